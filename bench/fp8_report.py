"""Products in e4m3 and the layer with them in docs/results.md, from the records of bench.fp8."""

import json
from collections.abc import Iterable
from pathlib import Path

from bench.fp8_products import PRODUCTS
from bench.recorded import RECORDS
from bench.table import number, span

RECORD = RECORDS / "fp8" / "h200.json"  # in short windows, with torchao
LONG_RECORD = RECORDS / "fp8" / "h200-layers.json"  # of passes alone, in windows of a second
PRODUCTS_RECORD = RECORDS / "fp8" / "h200-products.json"  # of products and quantising, in windows of a second
PASSES = ("forward", "forward + backward")
RESULTS = ("out", "x", "weights", "w1", "w2")
PEER = "torch, fp8"
WGRAD = "fp8, fp8_wgrad"
# What a column of the layer's table has: a peer, a pass, and the kind of this package's call beside which it is timed.
OF_TRAINING = "torchao's with backward", "torchao, rowwise", "forward + backward", "fp8, quantises"
OF_PEERS = (
    ("torch's forward", PEER, "forward", "fp8"),
    ("torchao's forward", "torchao, rowwise", "forward", "fp8, quantises"),
    OF_TRAINING,
)
QUANTIZED = ("quantize_rows", "quantize_weights")
ABOUT = """`precision="fp8"` beside bf16, in windows of a second of calls back to back, which alternate. Weights are
quantised before the calls, unless a column says that the call quantises them. torchao's columns{} and
errors are of shorter windows at {}."""
OF_PRODUCTS = "Products at {}: bf16's time over e4m3's, including the sums over a token's slots."
OF_LAYERS = """The layer: bf16's time over that of `precision="fp8"`, both with `save="minimal"`. "over `_scaled_mm`"
is the forward's time in fp8 over that of two dense products of the same sizes by `torch._scaled_mm`, without gather,
experts and sums."""
OF_PEER = """The last columns are a peer's time in fp8 over this package's. torch's forward calls
`torch._scaled_grouped_mm` on sorted rows that it quantises. torchao's layer has its differentiable rowwise products,
which quantise the weights in each call, and is compared with calls that do so, too."""
OF_WGRAD = """Training passes with `fp8_wgrad=True`, whose weight gradients multiply e4m3, too:
bf16's time and that of `precision="fp8"` alone over theirs. Wide layers gain most, 1.5 to 1.6 times from d = 4,096 on.
At d = 512 (conf1) these gradients cost more than they save. Few rows per expert (dsv3, 512) gain as much, unless each
call quantises the weights."""
OF_ERRORS = """The norm of the difference from bf16's results over the norm of these, in thousandths, of all layers:"""


def by_case(path: Path = RECORD, needed: Iterable[str] = (*PRODUCTS, *PASSES)) -> dict[str, dict[str, dict]]:
    """Rows by case and kernel or pass, of cases with all that are needed; {} without a record."""
    found: dict[str, dict[str, dict]] = {}
    for row in json.loads(path.read_text())["rows"] if path.is_file() else ():
        found.setdefault(row["case"], {})[row["kernel"]] = row
    return {case: rows for case, rows in found.items() if rows.keys() >= {*needed}}


def speed(row: dict, kind: str, base: str = "bf16") -> str:
    """The base's time over that of `kind`."""
    seconds = row["seconds"]
    return number(seconds[base] / seconds[kind]) if kind in seconds else "-"


def products_rows(found: dict[str, dict[str, dict]]) -> list[list[str]]:
    return [[case, *(speed(rows[entry], "e4m3") for entry in PRODUCTS)] for case, rows in found.items()]


def peers_of(found: dict[str, dict[str, dict]]) -> list[tuple[str, str, str, str]]:
    """Those of OF_PEERS that have run on some case."""
    return [of for of in OF_PEERS if any(of[1] in rows[of[2]]["seconds"] for rows in found.values())]


def layer_rows(long: dict, products: dict, short: dict) -> list[list[str]]:
    """Cells: case, both passes, both where the call quantises, over torch._scaled_mm, then `peers_of`.

    long, products, short: rows of the three records, by case. Peers that have no time in long have that of short.
    """
    lines = []
    for case, rows in long.items():
        dense = sum(products[case][entry]["seconds"]["_scaled_mm"] for entry in ("up_fwd", "down_fwd"))
        cells = [speed(rows[name], kind) for kind in ("fp8", "fp8, quantises") for name in PASSES]
        ratios = []
        for _, peer, name, kind in peers_of(short):
            of = _with(peer, rows[name], short.get(case, rows)[name])
            ratios.append(speed(of, kind, peer) if of else "-")
        lines.append([case, *cells, number(rows[PASSES[0]]["seconds"]["fp8"] / dense), *ratios])
    return lines


def _with(peer: str, *rows: dict) -> dict | None:
    """The first of these rows in which a peer ran."""
    return next((row for row in rows if peer in row["seconds"]), None)


def wgrad_rows(found: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Cells: case, bf16's time over that with `fp8_wgrad`, `precision="fp8"`'s over it. None of records without it."""
    lines = []
    for case, row in ((case, rows[PASSES[1]]) for case, rows in found.items()):
        if WGRAD in row["seconds"]:
            lines.append([case, speed(row, WGRAD), speed(row, WGRAD, "fp8")])
    return lines


def of_quantizing(found: dict[str, dict[str, dict]]) -> list[str]:
    """Sentences with a copy's time over that of x and of the weights. None of records without these kernels."""
    seconds = [[rows[kernel]["seconds"] for rows in found.values() if kernel in rows] for kernel in QUANTIZED]
    if not all(seconds):
        return []
    x, weights = (span(s["copy"] / s["e4m3"] for s in of_kernel) for of_kernel in seconds)
    return [f"The time of a copy of as many bytes over that of quantising is {x} for x, {weights} for the weights."]


def error_rows(found: dict[str, dict[str, dict]], long: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Cells: the option, then the least and greatest error of out and of each gradient, "-" for the out of bf16.

    long: of `LONG_RECORD`.
    """
    lines = []
    for option, kind, rows in (
        ('`precision="fp8"`', "fp8", found),
        ("`fp8_wgrad=True`", WGRAD, long),
        ('`save="fp8"`', "bf16, save fp8", found),
    ):
        errors = [of_case[PASSES[1]]["errors"] for of_case in rows.values()]
        of = {name: [1e3 * of_case[f"{kind}: {name}"] for of_case in errors] for name in RESULTS}
        lines.append([option, *(f"{min(e):.1f} to {max(e):.1f}" if any(e) else "-" for e in of.values())])
    return lines


def headline() -> list[str]:
    """The span of both passes' times beside bf16's, and of torchao's beside them; none without a record."""
    long = by_case(LONG_RECORD, PASSES)
    found = long.values()
    if not found:
        return []
    forward, both = ([rows[name]["seconds"] for rows in found] for name in PASSES)
    of_forward, of_both, of_quantising = (
        span(seconds["bf16"] / seconds[kind] for seconds in of_pass)
        for of_pass, kind in ((forward, "fp8"), (both, "fp8"), (both, "fp8, quantises"))
    )
    lines = [
        f"Products in fp8: compared with bf16, a forward pass is {of_forward} times as fast and a training pass",
        f"{of_both} times, or {of_quantising} times if each pass quantises the weights ({len(found)} layers).",
    ]
    if of_wgrad := [seconds["bf16"] / seconds[WGRAD] for seconds in both if WGRAD in seconds]:
        lines.append(f"With weight gradients in e4m3 a training pass is {span(of_wgrad)} times as fast.")
    _, peer, name, kind = OF_TRAINING
    short = by_case()
    of_cases = [_with(peer, rows[name], short.get(case, rows)[name]) for case, rows in long.items()]
    of_peer = [row["seconds"][peer] / row["seconds"][kind] for row in of_cases if row]
    if of_peer:
        lines.append(f"torchao's fp8 layer, which quantises them too, takes {span(of_peer)} times as long to train.")
    return lines


def _commits(path: Path) -> str:
    """A record's commit, and others with the cases of their rows."""
    record = json.loads(path.read_text())
    others: dict[str, dict[str, None]] = {}
    for row in record["rows"]:
        if "commit" in row:
            others.setdefault(row["commit"], {})[row["case"]] = None
    of_rows = (f"`{commit}` ({', '.join(names)})" for commit, names in others.items())
    return ", ".join([f"`{record['commit_info']['id']}`", *of_rows])


def section(table) -> list[str]:
    """Lines of the page; none without a record."""
    found, long, products = by_case(), by_case(LONG_RECORD, PASSES), by_case(PRODUCTS_RECORD, PRODUCTS)
    if not (found and long and products):
        return []
    machine = json.loads(LONG_RECORD.read_text())["machine_info"]
    titles = [title for title, *_ in peers_of(found)]
    head = ["case", "forward", "with backward", "forward that quantises", "with backward", "over `_scaled_mm`"]
    quantized, wgrads = of_quantizing(products), wgrad_rows(long)
    others = [case for case, rows in long.items() if _with(OF_TRAINING[1], rows[PASSES[1]])]
    but = f" (but {', '.join(others)}'s)" if others else ""
    return [
        *("", "## Products in e4m3", "", ABOUT.format(but, _commits(RECORD)), ""),
        f"{machine['gpu']}, commit {_commits(LONG_RECORD)}.",
        *("", OF_PRODUCTS.format(_commits(PRODUCTS_RECORD))),
        *table(["case", *PRODUCTS], products_rows(products)),
        *("", f"{OF_LAYERS} {OF_PEER}" if titles else OF_LAYERS),
        *table([*head, *titles], layer_rows(long, products, found)),
        *(("", OF_WGRAD, *table(["case", "over bf16", "over fp8"], wgrads)) if wgrads else ()),
        *(("", *quantized) if quantized else ()),
        *("", OF_ERRORS),
        *table(["option", *RESULTS], error_rows(found, long)),
    ]
