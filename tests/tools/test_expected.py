"""The work of passes by the algebra of the layer, and the figures of cards against the records that state them."""

import json
import re
from dataclasses import replace

import pytest

from bench import cases
from bench.recorded import RECORDS
from bench.table import merged_layers, rows_of
from moeblaze_cupy.__main__ import main
from moeblaze_cupy.tools import dry_run, expected, memory
from moeblaze_cupy.tools.expected import BOTH, CARDS, FORWARD, Card
from tests.fakes import limits_of

# The records of each card, first the one that states its speeds.
OF_CARDS = {"h200": ("h200-layer-peers",), "h100": ("other_gpus/h100-layer",)}
PASSES = {FORWARD: "forward_back_to_back", BOTH: "forward_backward_back_to_back"}


def shape_of(case):
    return memory.LayerShape(case.L, case.d, case.h, case.E, case.k, case.activation, transposed=True)


def recorded(key):
    """The card as its records state it, each time beside the speeds of its own record."""
    cards, ratios, tokens = [], {}, []
    for path in OF_CARDS[key]:
        record = json.loads((RECORDS / f"{path}.json").read_text())
        machine = record["machine_info"]
        cards.append(Card(machine["gpu"], machine["matmul_tflops"], machine["copy_gb_per_s"], 0, {}))
        for entry in merged_layers(rows_of(record, "layer")):
            case, provider = cases.LAYERS[entry["case"]], entry["provider"]
            if provider != "moeblaze" or entry["routing"] != "random":
                continue
            s = shape_of(case)
            for name, of_pass in expected.work(s, dry_run.layer(s, "minimal")).items():
                if PASSES[name] in entry:
                    tokens.append(case.L)
                    seconds = sum(cards[-1].seconds(of_pass))
                    ratios.setdefault(("sm90", name), []).append(entry[PASSES[name]] / seconds)
    ranges = {kind: (round(min(found), 2), round(max(found), 2)) for kind, found in ratios.items()}
    first = cards[0]
    return Card(first.name, round(first.tflops, 1), round(first.gb_per_s), min(tokens), ranges)


@pytest.mark.parametrize("key", OF_CARDS)
def test_cards_are_as_their_records_state(key):
    assert CARDS[key] == recorded(key)
    assert CARDS.keys() == OF_CARDS.keys()


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("save", ["minimal", "recompute", "paper", None])
def test_work_of_a_layer(activation, save):
    """By the sizes alone: each product is of rows and weights, and has two gradients."""
    L, d, h, E, k = 512, 64, 32, 8, 2
    g, rows, b = 1 + (activation == "swiglu"), L * k, 2
    s = memory.LayerShape(L, d, h, E, k, activation)
    run = dry_run.layer(s, save)
    found = expected.work(s, run)
    first, second = 2 * rows * d * g * h, 2 * rows * d * h
    assert found[FORWARD].flops == first + second
    weights, tokens, kept = E * (d * g * h + h * d) * b, L * d * b, run.saved_bytes and run.saved_bytes - L * d * b
    between = 2 * rows * (h + d) * b  # y_swi, and rows of d that are summed
    assert found[FORWARD].nbytes == weights + 2 * tokens + 4 * rows + kept + between
    if save is None:
        assert list(found) == [FORWARD]
        return
    assert found[BOTH].flops == 3 * (first + second) + (first if save == "recompute" else 0)
    backward = 2 * weights + 3 * tokens + 8 * rows + kept + between + 2 * rows * g * h * b
    assert found[BOTH].nbytes == found[FORWARD].nbytes + backward


def test_few_tokens_touch_few_experts():
    s = memory.LayerShape(L=3, d=64, h=32, E=128, k=1)
    nbytes = [expected.work(shape, dry_run.layer(shape, None))[FORWARD].nbytes for shape in (s, replace(s, E=3))]
    assert nbytes[0] == nbytes[1]


MEASURED = memory.LayerShape(L=32768, d=2048, h=768, E=128, k=8, transposed=True)  # qwen30b


@pytest.mark.parametrize(
    ("changes", "tier", "save", "ranges"),
    [
        ({}, "sm90", "minimal", (True, True)),
        ({}, "sm90", "paper", (False, False)),
        ({"L": 4096}, "sm90", "minimal", (False, True)),
        ({"L": 1024}, "sm90", "minimal", (False, False)),
        ({"bias": "float32"}, "sm90", "minimal", (False, False)),
        ({"ragged": True}, "sm90", "minimal", (False, False)),
        ({}, "sm80", "minimal", (False, False)),  # no record of portable kernels
        ({"d": 2047}, "sm90", "minimal", (False, False)),  # portable kernels that load an element at a time
        ({"d": 2044}, "sm80", "minimal", (False, False)),
    ],
)
def test_a_range_is_told_for_what_is_on_record(changes, tier, save, ranges):
    s = replace(MEASURED, **changes)
    run = dry_run.layer(s, save, limits_of(tier))
    of_cards = [expected.times(s, run, card, save) for card in CARDS.values()]
    assert tuple(all(of_pass["expected_s"] for of_pass in found.values()) for found in of_cards) == ranges
    assert all(of_pass["bound_s"] > 0 for found in of_cards for of_pass in found.values())


def test_products_of_another_speed_have_no_bound():
    for s in (replace(MEASURED, dtype="float32"), replace(MEASURED, precision="fp8")):
        assert expected.times(s, dry_run.layer(s, "minimal"), CARDS["h200"], "minimal") == {}


def test_a_measured_layer_is_in_the_range():
    record = json.loads((RECORDS / "h200-layer-peers.json").read_text())
    entries = merged_layers(rows_of(record, "layer"))
    found = next(e for e in entries if (e["case"], e["provider"]) == ("qwen30b", "moeblaze"))
    told = expected.times(MEASURED, dry_run.layer(MEASURED, "minimal"), CARDS["h200"], "minimal")
    for name, measured in PASSES.items():
        least, most = told[name]["expected_s"]
        assert 0.99 * least <= found[measured] <= 1.01 * most  # the range has two digits


SIZES = "--tokens 32768 --d-model 2048 --d-hidden 768 --experts 128 --k 8"


def test_commands_tell_work_and_time(capsys):
    assert main(["plan", *SIZES.split()]) == 0
    text = capsys.readouterr().out
    assert "Time on NVIDIA H200" in text and "Time on NVIDIA H100" in text and "ms; expect" not in text
    assert re.search(r"^  forward +2,473\.901 GFLOP +\S+ GiB of traffic$", text, re.MULTILINE)
    assert re.search(r"^  forward +[\d.]+ ms at 660 TFLOP/s and 4,065 GB/s; expect [\d.]+ to [\d.]+ ms$", text, re.M)
    for gpu, times in (("h100", {"h100"}), ("a100", set())):
        assert main(["explain", *SIZES.split(), "--gpu", gpu, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["work"]["forward"]["flops"] == 2 * 32768 * 8 * 2048 * 3 * 768
        assert told["time"].keys() == times


def test_no_time_has_its_reason(capsys):
    for command, reason in (
        (f"explain {SIZES} --gpu a100", "No time: no GPU of this kind is on record"),
        (f"plan {SIZES} --precision fp8", "No time on NVIDIA H200: the speed of products in fp8 is not on record"),
    ):
        assert main(command.split()) == 0
        assert reason in capsys.readouterr().out.splitlines()
