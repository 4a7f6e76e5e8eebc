"""The work of a layer's passes, and the time that they should take on the GPUs whose records are in `bench/records`.

A card's record states the speeds of a large product in cuBLAS and of a copy. The longer of the FLOP's and the bytes'
time at these speeds is the bound of a pass. Measured times are in a narrow range around the sum of both, as products
at the card's power limit and traffic hardly overlap, so this sum gives the time to expect.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from moeblaze_cupy.cuda.recorder import allocation_of
from moeblaze_cupy.frameworks import ITEMSIZE
from moeblaze_cupy.tools import memory
from moeblaze_cupy.tools.dry_run import DryRun
from moeblaze_cupy.tools.memory import LayerShape, format_bytes

FORWARD, BOTH = "forward", "forward and backward"
DTYPES = ("bfloat16", "float16")  # dtypes whose products have the speed on record


@dataclass(frozen=True)
class Work:
    """FLOP of the products, and bytes read and written: each array once that a pass is given, makes or keeps, and
    twice the rows that it writes for a later product or sum to read. Chunks read the weights again."""

    flops: int
    nbytes: int


@dataclass(frozen=True)
class Card:
    """The figures of a GPU in the records.

    tokens: the fewest tokens of a layer on record. ranges: by tier and pass, the least and the greatest time over the
    sum of FLOP's and bytes' time. All are of calls back to back with save="minimal" in bf16 and random routing.
    """

    name: str
    tflops: float
    gb_per_s: float
    tokens: int
    ranges: dict[tuple[str, str], tuple[float, float]]

    def seconds(self, work: Work) -> tuple[float, float]:
        """Returns the seconds of the FLOP, and of the bytes."""
        return work.flops / self.tflops / 1e12, work.nbytes / self.gb_per_s / 1e9


# tests/tools/test_expected.py holds these figures against the records.
CARDS = {
    "h200": Card(
        "NVIDIA H200",
        tflops=660.5,
        gb_per_s=4065,
        tokens=8192,
        ranges={
            ("sm90", FORWARD): (0.83, 0.92),
            ("sm90", BOTH): (0.87, 0.95),
        },
    ),
    "h100": Card(
        "NVIDIA H100 80GB HBM3",
        tflops=680.1,
        gb_per_s=2897,
        tokens=2048,
        ranges={("sm90", FORWARD): (0.73, 0.86), ("sm90", BOTH): (0.78, 0.89)},
    ),
}


def work(s: LayerShape, run: DryRun) -> dict[str, Work]:
    """Returns the work of each pass, with the experts that can have slots. run: the layer's dry run."""
    forward, *has_backward = run.passes
    first_flops, flops = 2 * s.R * s.d * s.g * s.h, 2 * s.R * s.d * (s.g + 1) * s.h
    hidden, sums = s.R * s.h * s.b, s.R * s.d * s.b if s.k > 1 else 0
    weights = min(s.E, s.R) * s.d * (s.g + 1) * s.h * s.b
    router_weights = ITEMSIZE[s.weights_dtype] * s.slots if s.has_weights else 0
    given, out = run.x_bytes + weights + router_weights, allocation_of(forward.kept["out"]).nbytes
    kept = run.saved_bytes - run.x_bytes if has_backward else 0
    factors = 2 * s.R * (s.lora_rank or 0) * (2 * s.d + (s.g + 1) * s.h)
    again_in_chunks = (run.chunks(s) - 1) * weights
    found = {FORWARD: Work(flops + factors, given + out + kept + 2 * (hidden + sums) + again_in_chunks)}
    if has_backward:
        again = 0 if any(name.startswith("first layer") for name in forward.kept) else first_flops
        nbytes = given + out + kept + memory.total(memory.gradients(s)) + 2 * ((s.g + 1) * hidden + sums)
        if again_in_chunks:  # sums in float32 are cleared, added to by every chunk, and rounded
            nbytes += again_in_chunks + (2 * run.chunks(s) + 2) * 4 * s.E * s.d * (s.g + 1) * s.h
        of_both = (3 if s.lora_rank is None else 2) * flops + 3 * factors + again
        found[BOTH] = Work(of_both, found[FORWARD].nbytes + nbytes)
    return found


def tier_of(run: DryRun) -> str:
    """Returns "sm80" for a layer with any portable product: one that a record of Hopper's kernels says nothing of."""
    return "sm80" if any(launch.variant.source.endswith("_sm80.cu") for launch in run.launches) else "sm90"


def times(s: LayerShape, run: DryRun, card: Card, save: str | None) -> dict[str, Any]:
    """Returns by pass the bound in seconds and the range to expect, None if no layer like this is on record.

    It returns {} for products of another speed than those on record.
    """
    of_passes = work(s, run)
    if s.dtype not in DTYPES or s.precision is not None:
        return {}
    is_plain = s.options == memory.PLAIN and not s.ragged and s.bias is None and s.lora_rank is None
    is_aligned = all(dict(launch.variant.macros).get("ALIGNED") != "0" for launch in run.launches)
    on_record = is_plain and is_aligned and run.chunks(s) == 1 and save in ("minimal", None) and card.tokens <= s.L
    found = {}
    for name, of_pass in of_passes.items():
        both = card.seconds(of_pass)
        ratios = card.ranges.get((tier_of(run), name)) if on_record else None
        found[name] = {"bound_s": max(both), "expected_s": ratios and [sum(both) * ratio for ratio in ratios]}
    return found


def facts(s: LayerShape, run: DryRun, cards: Iterable[str], save: str | None) -> dict[str, Any]:
    """Returns the expected times for JSON. cards: names in CARDS."""
    of_cards = {key: times(s, run, CARDS[key], save) for key in cards}
    return {"work": {name: asdict(of_pass) for name, of_pass in work(s, run).items()}, "time": of_cards}


def report(s: LayerShape, run: DryRun, cards: Iterable[str], save: str | None) -> list[str]:
    """Returns lines of text. cards: names in CARDS."""
    lines, cards = ["Work:"], list(cards)
    for name, of_pass in work(s, run).items():
        lines.append(f"  {name:<22}{of_pass.flops / 1e9:>12,.3f} GFLOP{format_bytes(of_pass.nbytes):>12} of traffic")
    for card in map(CARDS.__getitem__, cards):
        found = times(s, run, card, save)
        if not found:
            lines.append(f"No time on {card.name}: the speed of products in {s.precision or s.dtype} is not on record")
            continue
        lines.append(f"Time on {card.name}, of calls back to back:")
        for name, times_of in found.items():
            text = f"  {name:<22}{1e3 * times_of['bound_s']:>10,.3f} ms"
            text += f" at {card.tflops:.0f} TFLOP/s and {card.gb_per_s:,.0f} GB/s"
            if times_of["expected_s"]:
                least, most = (1e3 * seconds for seconds in times_of["expected_s"])
                text += f"; expect {least:,.3f} to {most:,.3f} ms"
            lines.append(text)
        if not any(times_of["expected_s"] for times_of in found.values()):
            lines.append("  no layer like this is on record, so there is no range to expect")
    if not cards:
        lines.append("No time: no GPU of this kind is on record")
    return lines
