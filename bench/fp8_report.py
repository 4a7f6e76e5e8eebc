"""Products in e4m3 and the layer with them in docs/results.md, from the record of bench.fp8."""

import json
from pathlib import Path

from bench.fp8_products import PRODUCTS
from bench.recorded import RECORDS
from bench.table import number, span

RECORD = RECORDS / "fp8" / "h200.json"
PASSES = ("forward", "forward + backward")
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
ABOUT = """`precision="fp8"` beside bf16, in alternating calls back to back. Weights are quantised before the calls,
unless a column says that the call quantises them."""
OF_PRODUCTS = "Products: bf16's time over e4m3's, including the sums over a token's slots."
OF_LAYERS = """The layer: bf16's time over that of `precision="fp8"`, both with `save="minimal"`. "over `_scaled_mm`"
is the forward's time in fp8 over that of two dense products of the same sizes by `torch._scaled_mm`, without gather,
experts and sums."""
OF_PEER = """The last columns are a peer's time in fp8 over this package's. torch's forward calls
`torch._scaled_grouped_mm` on sorted rows that it quantises. torchao's layer has its differentiable rowwise products,
which quantise the weights in each call, and is compared with calls that do so, too."""
OF_QUANTIZED = """Quantisation of x and of the weights: the time of a copy of as many bytes over the kernel's time,
and TB/s."""
OF_WGRAD = (
    "A training pass with `fp8_wgrad=True`, whose weight gradients multiply e4m3, too, and their errors as below."
)
OF_ERRORS = """The norm of the difference from bf16's results over the norm of these, in thousandths: out and each
gradient with `precision="fp8"`, then each gradient with only `save="fp8"`, whose out is that of bf16."""


def by_case(path: Path = RECORD) -> dict[str, dict[str, dict]]:
    """Rows by case and kernel or pass; {} without a record."""
    found: dict[str, dict[str, dict]] = {}
    for row in json.loads(path.read_text())["rows"] if path.is_file() else ():
        found.setdefault(row["case"], {})[row["kernel"]] = row
    return {case: rows for case, rows in found.items() if {*PRODUCTS, *PASSES} <= rows.keys()}


def speed(row: dict, kind: str, base: str = "bf16") -> str:
    """The base's time over that of `kind`."""
    seconds = row["seconds"]
    return number(seconds[base] / seconds[kind]) if kind in seconds else "-"


def products_rows(found: dict[str, dict[str, dict]]) -> list[list[str]]:
    return [[case, *(speed(rows[entry], "e4m3") for entry in PRODUCTS)] for case, rows in found.items()]


def peers_of(found: dict[str, dict[str, dict]]) -> list[tuple[str, str, str, str]]:
    """Those of OF_PEERS that have run on some case."""
    return [of for of in OF_PEERS if any(of[1] in rows[of[2]]["seconds"] for rows in found.values())]


def layer_rows(found: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Cells: case, both passes, both where the call quantises, over torch._scaled_mm, then `peers_of`."""
    lines = []
    for case, rows in found.items():
        both = [rows[name] for name in PASSES]
        dense = sum(rows[entry]["seconds"]["_scaled_mm"] for entry in ("up_fwd", "down_fwd"))
        cells = [speed(row, kind) for kind in ("fp8", "fp8, quantises") for row in both]
        ratios = [
            speed(rows[name], kind, peer) if peer in rows[name]["seconds"] else "-"
            for _, peer, name, kind in peers_of(found)
        ]
        lines.append([case, *cells, number(both[0]["seconds"]["fp8"] / dense), *ratios])
    return lines


def wgrad_rows(found: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Cells: case, bf16's time over that with `fp8_wgrad`, `precision="fp8"`'s over it, errors of w1 and w2 in
    thousandths. None of records without it."""
    lines = []
    for case, row in ((case, rows[PASSES[1]]) for case, rows in found.items()):
        if WGRAD in row["seconds"]:
            errors = (number(1e3 * row["errors"][f"{WGRAD}: {name}"]) for name in ("w1", "w2"))
            lines.append([case, speed(row, WGRAD), speed(row, WGRAD, "fp8"), *errors])
    return lines


def quantized_rows(found: dict[str, dict[str, dict]]) -> list[list[str]]:
    """Cells: case, a copy's time over that of x, TB/s, both of the weights. None of records without these kernels."""
    lines = []
    for case, rows in found.items():
        these = [rows[kernel] for kernel in QUANTIZED if kernel in rows]
        cells = [(speed(row, "e4m3", "copy"), number(row["bytes"] / row["seconds"]["e4m3"] / 1e12)) for row in these]
        if cells:
            lines.append([case, *(cell for pair in cells for cell in pair)])
    return lines


def error_rows(found: dict[str, dict[str, dict]]) -> list[list[str]]:
    lines = []
    for case, rows in found.items():
        errors = rows[PASSES[1]]["errors"]
        names = [f"fp8: {key}" for key in ("out", "x", "weights", "w1", "w2")]
        names += [f"bf16, save fp8: {key}" for key in ("x", "weights", "w1", "w2")]
        lines.append([case, *(number(1e3 * errors[name]) for name in names)])
    return lines


def headline() -> list[str]:
    """The span of both passes' times beside bf16's, and of torchao's beside them; none without a record."""
    found = by_case().values()
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
    _, peer, _, kind = OF_TRAINING
    of_peer = [seconds[peer] / seconds[kind] for seconds in both if peer in seconds]
    if of_peer:
        lines.append(f"torchao's fp8 layer, which quantises them too, takes {span(of_peer)} times as long to train.")
    return lines


def section(table) -> list[str]:
    """Lines of the page; none without a record."""
    found = by_case()
    if not found:
        return []
    record = json.loads(RECORD.read_text())
    titles = [title for title, *_ in peers_of(found)]
    head = ["case", "forward", "with backward", "forward that quantises", "with backward", "over `_scaled_mm`"]
    gradients = ["x", "weights", "w1", "w2"]
    quantized, wgrads = quantized_rows(found), wgrad_rows(found)
    head_quantized = ["case", "x, of a copy", "TB/s", "weights, of a copy", "TB/s"]
    return [
        *("", "## Products in e4m3", "", ABOUT, ""),
        f"{record['machine_info']['gpu']}, commit `{record['commit_info']['id']}`.",
        *("", OF_PRODUCTS, *table(["case", *PRODUCTS], products_rows(found))),
        *("", f"{OF_LAYERS} {OF_PEER}" if titles else OF_LAYERS),
        *table([*head, *titles], layer_rows(found)),
        *(("", OF_WGRAD, *table(["case", "over bf16", "over fp8", "w1", "w2"], wgrads)) if wgrads else ()),
        *(("", OF_QUANTIZED, *table(head_quantized, quantized)) if quantized else ()),
        *("", OF_ERRORS),
        *table(["case", "out", *gradients, *(f"save: {name}" for name in gradients)], error_rows(found)),
    ]
