"""`explain`: what it tells of a layer is what the layer does, and what the rules of launches decide."""

import itertools
import json
import operator
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeblaze_cupy.__main__ import GPUS, MAX_WIDTH, main
from moeblaze_cupy.cuda import launch_config, loader, runtime
from moeblaze_cupy.cuda.launch_config import H200
from moeblaze_cupy.tools import dry_run, explain, memory
from moeblaze_cupy.tools.dry_run import allocation_of
from moeblaze_cupy.types import SAVE_POLICIES, LayerOptions
from tests.fakes import Layer, limits_of, use

SHAPES = (
    memory.LayerShape(L=32768, d=2048, h=768, E=128, k=8),
    memory.LayerShape(L=1000, d=96, h=200, E=7, k=3, activation="gelu", dtype="float32"),
    memory.LayerShape(L=3, d=8, h=8, E=300, k=1, activation="reglu", dtype="float16"),
    memory.LayerShape(L=4096, d=256, h=129, E=8, k=2, activation="relu"),
    memory.LayerShape(L=4096, d=256, h=264, E=8, k=2, activation="silu", transposed=True),  # the panel lies in y_swi
    memory.LayerShape(L=2000, d=4360, h=64, E=2, k=2),  # three panels
    memory.LayerShape(L=20000, d=264, h=136, E=2, k=1, activation="silu"),  # split-K
    memory.LayerShape(L=30000, d=136, h=264, E=1, k=1, transposed=True),
    memory.LayerShape(L=512, d=4096, h=2048, E=2, k=2),  # 2-CTA clusters
    memory.LayerShape(L=4000, d=328, h=72, E=2, k=2),  # square tiles
)
TIERS = ("sm80", "sm90")


def passes_of(s, save="minimal", limits=H200, **options):
    return dry_run.layer(s, save, limits, **options).passes


def launch_of(passes, entry):
    """The first launch of an entry, its number, and its pass."""
    for of_pass in passes:
        for number, launch in enumerate(of_pass.run.launches):
            if launch.variant.entry.startswith(entry):
                return launch, number, of_pass
    raise AssertionError(f"no launch of {entry}")


def logged(log):
    """(variant, grid, threads, shared memory, what is alive by shape and dtype) of each launch in a fake's log."""
    alive, found = {}, []
    for kind, *entry in log:
        if kind == "allocate":
            label, shape, dtype = entry
            alive[label] = shape, dtype
        elif kind == "free":
            alive.pop(entry[0], None)  # what an earlier pass left
        elif kind == "launch":
            variant, grid, threads, _, shared_bytes = entry
            found.append((variant, grid, threads, shared_bytes, Counter(alive.values())))
    return found


def noted(of_pass):
    return [
        (
            launch.variant,
            launch.blocks,
            launch.threads,
            launch.shared_bytes,
            Counter((a.shape, a.dtype) for a in of_pass.alive_at(number)),
        )
        for number, launch in enumerate(of_pass.run.launches)
    ]


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("save", SAVE_POLICIES)
@pytest.mark.parametrize("tier", TIERS)
def test_launches_and_memory_are_those_of_the_layer(monkeypatch, tier, save, accumulate):
    device = use(monkeypatch, limits_of(tier))
    dtypes = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    for s in SHAPES:
        order = "transposed" if s.transposed else "row"
        sums = ("w1", "w2") if accumulate else ()
        layer = Layer(s.L, s.k, s.E, s.d, s.h, order, s.activation, save, dtypes[s.dtype], accumulate=sums)
        passes = passes_of(s, save, limits_of(tier), accumulate=accumulate)
        device.restart()
        before = device.peak = device.used
        out, saved = layer.forward(device)
        assert noted(passes[0]) == logged(device.log), s
        assert passes[0].peak_bytes == device.peak - before
        assert passes[0].kept_bytes == device.used - before
        assert len(passes) == (1 if save is None else 2)
        if save is not None:
            device.restart()
            before = device.peak = device.used
            gradients = layer.backward(device, saved)
            assert noted(passes[1]) == logged(device.log), s
            assert passes[1].peak_bytes == device.peak - before
            assert passes[1].kept_bytes == device.used - before
            del gradients
        del out, saved
    runtime.forget()


def test_memory_has_names():
    passes = passes_of(SHAPES[0], "recompute")
    forward, backward = ({p.contents(a) for a in p.run.allocations} for p in passes)
    assert forward == {
        *("slots per CTA and expert", "index lists", "first layer a, b", "y_swi", "tile counter", "out"),
        "column panel",
    } - {"first layer a, b"}
    assert backward == {
        *("first layer, computed again", "weighted y_swi", "router weights by row", "tile counter", "column panel"),
        *("partial sums for the router weights", "gradient of x", "gradient of weights"),
        *("gradient of w1", "gradient of w2"),
    }
    in_e4m3 = replace(SHAPES[0], precision="fp8")
    on_input = LayerOptions(weights_on="input", identity_experts=2)
    of_pairs = replace(SHAPES[9], ids_are_int64=True, ragged=True, options=on_input, bias="float32")
    for s, save in itertools.product((*SHAPES, in_e4m3, of_pairs, replace(of_pairs, ragged=False)), SAVE_POLICIES):
        for of_pass in passes_of(s, save):
            assert "memory" not in map(of_pass.contents, of_pass.run.allocations)


def test_a_panel_in_the_left_operands_rows_is_y_swi():
    (forward,) = passes_of(SHAPES[4], None)
    names = [forward.contents(a) for a in forward.run.allocations]
    assert "y_swi" in names and "column panel" not in names
    assert "rows of the left operand" in " ".join(launch_of([forward], "down_fwd")[0].why)


RELATION = r"(at least|at most|less than|fewer than|more than) (\d+)"
COMPARED = re.compile(rf"([\d.]+)(?: [a-z]+)*(?:,| is) {RELATION}|([\d.]+)(?: [a-z]+)* \(([^()]*)\)")
HOLDS = {
    "at least": operator.ge,
    "at most": operator.le,
    "less than": operator.lt,
    "fewer than": operator.lt,
    "more than": operator.gt,
}


def decisions(passes):
    """What each launch that has a choice does, beside its sentences."""
    for of_pass in passes:
        launches = of_pass.run.launches
        for number, launch in enumerate(launches):
            entry, macros = launch.variant.entry, dict(launch.variant.macros)
            names = [of_pass.contents(a) for a in of_pass.alive_at(number)]
            decided = {}
            if launch.variant.source == "grouped_gemm_sm90.cu":
                decided[
                    "2-CTA clusters with TMA multicast" if macros["CLUSTER_CTAS"] == "2" else "no 2-CTA clusters"
                ] = True
                if macros["EPILOGUE"] in ("StoreRows", "ActivatePairs") and not {
                    ("FP8", "1"),
                    ("FP8_SAVED", "1"),
                } & set(macros.items()):
                    decided["tiles of 192 x 192" if macros.get("BM") == "192" else "tiles of 128 x 256"] = True
                decided[f"{'dynamic' if 'tile counter' in names else 'static'} tile scheduling"] = True
            if launch.variant.source == "grouped_wgrad_sm90.cu":
                decided["split-K, " if "split-K sums" in names else "no split-K"] = True
                decided["tiles of 192 x 192" if macros.get("BM") == "192" else "tiles of 128 x 256"] = True
            if entry in ("down_fwd", "up_bwd"):
                number_of_panels = sum(other.variant.entry == entry for other in launches)
                sums = any(other.variant.entry.startswith("aggregate") for other in launches)
                several = "one column panel" if number_of_panels == 1 else f"{number_of_panels} column panels of "
                decided[several if sums else "no column panel"] = True
            if launch.variant.source == "dispatch.cu":
                counted = any(other.variant.entry.startswith("dispatch_count") for other in launches)
                if entry.startswith("dispatch_count") or not counted:
                    decided["two launches: " if counted else "one launch: "] = True
            yield launch, decided


def check_sentences(passes):
    """Every decision has its sentence, and every comparison in a sentence holds. Returns the comparisons."""
    compared = []
    for launch, decided in decisions(passes):
        for start in decided:
            assert sum(why.startswith(start) for why in launch.why) == 1, (start, launch.lines)
        for why in launch.why:
            found = 0
            for value, relation, bound, other, bounds in COMPARED.findall(why):
                for one in [(relation, bound)] if value else re.findall(RELATION, bounds):
                    assert HOLDS[one[0]](float(value or other), float(one[1])), why
                    compared.append(one)
                    found += 1
            assert found == len(re.findall(RELATION, why)), why
    return compared


@given(
    rows=st.sampled_from([1, 64, 250, 256, 300, 1024, 1025, 3000, 20000]),
    widths=st.tuples(*[st.sampled_from([8, 64, 256, 264, 512, 520, 1536, 2048, 2056, 4096, 4104])] * 2),
    E=st.sampled_from([1, 2, 7, 128]),
    k=st.sampled_from([1, 2, 5]),
    activation=st.sampled_from(["swiglu", "relu"]),
    gpu=st.sampled_from(GPUS),
    transposed=st.booleans(),
)
@example(rows=1024, widths=(8, 2048), E=128, k=5, activation="swiglu", gpu="h200", transposed=False)  # 1024.02 rows
def test_sentences_are_true(rows, widths, E, k, activation, gpu, transposed):
    k = min(k, E)
    s = memory.LayerShape(-(-rows * E // k), *widths, E, k, activation, transposed=transposed)
    check_sentences(passes_of(s, limits=explain.GPUS[gpu]))


ROW_TILES = {"d": 4096, "h": 4096, "E": 4, "k": 2}
FP8 = {"precision": "fp8", "L": 512, "d": 64}
FP32 = {"dtype": "float32", "L": 512, "options": LayerOptions()}
BOUNDS = [  # entry; a layer; its sentence; a change; its sentence then
    ("up_fwd", {"L": 512, "d": 4096}, "2-CTA clusters with", {"d": 4088}, "sums over 4088, less than 4096"),
    ("up_fwd", {"L": 512, "d": 4096}, "2-CTA clusters with", {"L": 511}, "255 rows on average, fewer than 256"),
    ("up_bwd", {"L": 2048, "h": 2048}, "2-CTA clusters with", {"L": 2049}, "1024.5 rows on average, more than 1024"),
    ("up_bwd", {"L": 2048, "h": 2048}, "2-CTA clusters with", {"h": 2040}, "sums over 4080, less than 4096"),
    ("up_bwd", {"L": 512, "h": 2048, "d": 512}, "2-CTA clusters with", {"d": 256}, "column tiles is odd (1)"),
    ("up_bwd", {"L": 512, "h": 2048, "k": 2}, "2-CTA clusters with", {"k": 1, "L": 1024}, "straight to their tokens"),
    ("up_fwd", {"L": 512, "d": 64}, "dynamic tile", {"L": 511}, "255 rows on average, fewer than 256"),
    ("down_bwd", {"L": 512, "d": 64}, "dynamic tile", {"L": 511}, "255 rows on average, fewer than 256"),
    ("up_fwd", {"L": 8192, "d": 2048}, "dynamic tile", {"d": 2040}, "sums over 2040, less than 2048"),
    ("up_fwd", {"L": 8448, "h": 1024, "d": 64}, "(at most 264", {"L": 8704}, "has 272 tiles, more than 264"),
    ("down_fwd", {"L": 65536, "d": 512}, "d = 512 is at most 512", {"d": 520}, "2 column panels of 512"),
    ("down_fwd", {"L": 16384, "d": 512}, "d = 512 is", {"d": 1024, "L": 8192}, "16777216 elements, at most 16777216"),
    ("down_fwd", {"d": 1024, "L": 8192}, "one column panel", {"L": 8193}, "2 column panels of 512 columns: half"),
    ("down_fwd", {"d": 1024, "L": 8192, "k": 2}, "one column panel", {"k": 1}, "no column panel: with k = 1"),
    ("down_fwd", {"d": 2880, "L": 3072}, "tiles of 192 x 192: these", {"d": 3072}, "these compute 3072 columns"),
    ("down_fwd", {"d": 2880, "L": 3072}, "no 2-CTA clusters: square", {"L": 3071}, "1535 rows on average, fewer than"),
    ("dispatch", {"L": 1024}, "one CTA takes all 2048 slots (at most 2048)", {"L": 1025}, "two launches: 2050 slots"),
    ("up_wgrad", {"L": 16384, "E": 1, "k": 1, "d": 512, "h": 1024}, "split-K, 4 CTAs", {"L": 512}, "no split-K"),
    ("up_fwd", {"L": 512}, "Hopper's kernels", {"d": 4100}, "multiples of 8; memory is read an element at a time"),
    ("up_fwd", {"L": 512}, "Hopper's kernels", {"dtype": "float32"}, "not float32; memory is read 16 bytes"),
    ("up_wgrad", FP32 | {"options": LayerOptions(tf32=True)}, "are rounded to TF32", FP32, "not float32; memory is"),
    ("up_fwd", FP8, "the weight: operands are e4m3", FP8 | {"L": 511}, "255 rows on average, fewer than 256"),
    ("up_bwd", FP8 | {"d": 512}, "column tiles is even (2)", FP8 | {"d": 256}, "column tiles is odd (1)"),
    ("up_bwd", FP8, "two count as one of what", {"precision": None, "L": 512, "d": 64}, "column tiles is odd (1)"),
    ("up_fwd", FP8 | {"L": 8192, "d": 4096}, "dynamic tile", FP8 | {"L": 8192, "d": 4080}, "sums over 2040"),
]


@pytest.mark.parametrize(("entry", "layer", "sentence", "change", "other"), BOUNDS)
def test_sentences_change_where_decisions_do(entry, layer, sentence, change, other):
    for fields, told in ((layer, sentence), (layer | change, other)):
        passes = passes_of(memory.LayerShape(**(ROW_TILES | fields)))
        launch, *_ = launch_of(passes, entry)
        assert told in "\n".join(launch.why), launch.why
        check_sentences(passes)


@pytest.mark.parametrize(
    ("gpu", "told"),
    [
        ("a100", "portable kernels: compute capability is 8.0, not 9.0; memory is read 16 bytes at a time"),
        ("a100", "3 stages of 48 KiB in the 163 KiB of a CTA; a CTA per tile"),
        ("l40s", "4 stages of 24 KiB in the 99 KiB of a CTA; a CTA per tile"),
        ("b200", "4 stages of 48 KiB in the 227 KiB of a CTA; a CTA per tile"),
        ("h100", "3 stages of 48 KiB; a persistent grid with at most one CTA per multiprocessor"),
    ],
)
def test_sentences_of_gpus(gpu, told):
    passes = passes_of(SHAPES[0], limits=explain.GPUS[gpu])
    assert any(why.startswith(told) for why in launch_of(passes, "up_fwd")[0].why)


def test_many_experts_are_counted_in_parts_of_the_slots():
    passes = passes_of(memory.LayerShape(100, 8, 8, 2800, 8), limits=explain.GPUS["l40s"])
    assert check_sentences(passes) is not None
    assert "leave room for" in launch_of(passes, "dispatch_count")[0].why[0]


@pytest.mark.parametrize(
    ("d", "options", "tile", "why"),
    [
        (2880, {}, (192, 192), "fewer elements lie past"),
        (2880, {"accumulate": ("w1", "w2")}, (128, 256), "it is added to sums, for which"),
        (2048, {}, (128, 256), "no more elements lie past"),
    ],
)
def test_tiles_of_weight_gradients_and_why(d, options, tile, why):
    passes = passes_of(memory.LayerShape(L=16384, d=d, h=d, E=32, k=4), limits=H200, **options)
    for entry in ("down_wgrad", "up_wgrad"):
        launch = launch_of(passes, entry)[0]
        assert launch.tiles[:2] == tile and any(f"{tile[0]} x {tile[1]}: {why}" in line for line in launch.why)


def test_tiles_cover_what_a_launch_computes():
    """As many as the routing can need for products, exactly as many for weight gradients."""
    s = memory.LayerShape(L=1000, d=520, h=264, E=7, k=3)
    row_tiles = 1000 * 3 // 128 + 7
    for limits, columns, gated, down_wgrad, up_wgrad in (
        (H200, 256, 128, (192, 192, 7 * 2 * 3), (192, 192, 2 * 7 * 3 * 2)),
        (limits_of("sm80"), 256, 128, (128, 256, 7 * 3 * 3), (128, 256, 2 * 7 * 5 * 2)),
    ):
        passes = passes_of(s, limits=limits)
        assert launch_of(passes, "up_fwd")[0].tiles == (128, gated, row_tiles * -(-264 // gated), True)
        assert launch_of(passes, "down_bwd")[0].tiles == (128, columns, row_tiles * -(-264 // columns), True)
        assert launch_of(passes, "down_wgrad")[0].tiles == (*down_wgrad, False)
        assert launch_of(passes, "up_wgrad")[0].tiles == (*up_wgrad, False)


def test_the_first_launch_prints_the_lines_of_explain(monkeypatch, capsys):
    device = use(monkeypatch)
    monkeypatch.setenv("MOEBLAZE_LOG", "1")
    s = SHAPES[5]
    layer = Layer(s.L, s.k, s.E, s.d, s.h)
    _, saved = layer.forward(device)
    layer.backward(device, saved)
    printed = capsys.readouterr().err
    launches = [launch for of_pass in passes_of(s) for launch in of_pass.run.launches]
    blocks = ["\n    ".join((f"moeblaze_cupy: device 0: {x.lines[0]}", *x.lines[1:])) for x in launches]
    assert printed == "".join(f"{block}\n" for block in blocks)
    layer.forward(device)
    assert not capsys.readouterr().err
    del saved
    runtime.forget()


SIZES = {"--tokens": "2000", "--d-model": "4360", "--d-hidden": "64", "--experts": "2", "--k": "2"}


def words(sizes=(), *more):
    return ["explain", *(word for option in (SIZES | dict(sizes)).items() for word in option), *more]


def test_command_lists_launches_in_their_order(capsys):
    assert main(words({}, "--gpu", "h200", "--order", "row")) == 0
    output = capsys.readouterr().out
    passes = passes_of(SHAPES[5])
    for of_pass, text in zip(passes, output.split("\nforward\n")[1].split("\nbackward\n"), strict=True):
        for launch in of_pass.run.launches:
            assert "\n       ".join(launch.lines) in text
        numbered = re.findall(r"^  (\d+)(?:, \d+)*(?: .. \d+ \(\d+ launches\))?  \w+\.cu:", text, re.MULTILINE)
        assert list(map(int, numbered)) == sorted(map(int, numbered)) and numbered[0] == "1"
        for allocation in of_pass.run.allocations:
            name = of_pass.contents(allocation)
            shape = " x ".join(map(str, allocation.shape))
            kept = ", kept" if any(allocation_of(buffer) is allocation for buffer in of_pass.kept.values()) else ""
            size = memory.format_bytes(allocation.nbytes)
            assert f"  + {name}: {shape} {allocation.dtype}, {size}{kept}\n" in text
            assert (f"  - {name}\n" in text) == (not kept)
        assert f"at the peak {memory.format_bytes(of_pass.peak_bytes)} allocated ({of_pass.peak_bytes} bytes)" in text
        assert f"kept: {memory.format_bytes(of_pass.kept_bytes)} ({of_pass.kept_bytes} bytes): " in text
    assert "  4, 6  grouped_gemm_sm90.cu:down_fwd" in output and "  8  grouped_gemm_sm90.cu:down_fwd" in output


def test_command_tells_gpu_and_layer(capsys):
    assert main(words({}, "--gpu", "rtx4090", "--save", "inference", "--activation", "gelu", "--dtype", "float16")) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first == (
        "L = 2000 tokens, d = 4360, h = 64, E = 2 experts, k = 2, gelu, float16, weights transposed, inference"
    )
    assert second == ("GPU: rtx4090 (compute capability 8.9, 128 multiprocessors, 99 KiB of shared memory per CTA)")
    assert "backward" not in rest and any("grouped_gemm_sm80.cu:down_fwd" in line for line in rest)


def test_command_accumulates(capsys):
    assert main(words({}, "--gpu", "h200", "--accumulate")) == 0
    output = capsys.readouterr().out
    assert (
        "accumulate=1 out=float" in output
        and "+ gradient of x" in output
        and "gradient of w" not in (output.replace("gradient of weights", ""))
    )


def test_without_a_gpu_an_h200_stands_for_one(monkeypatch, capsys):
    def fail():
        raise RuntimeError("no GPU")

    monkeypatch.setattr(loader, "import_cupy", fail)
    assert main(words()) == 0
    assert "GPU: h200, as no GPU is here (compute capability 9.0, 132" in capsys.readouterr().out


@pytest.mark.parametrize("tier", [(), ("--tier", "sm80")])
def test_the_gpu_that_is_there_is_explained(monkeypatch, capsys, tier):
    use(monkeypatch, replace(H200, multiprocessors=78))
    assert main(words({}, *tier)) == 0
    output = capsys.readouterr().out
    assert "GPU: the GPU here (compute capability 9.0, 78 multiprocessors" in output
    assert ("the portable tier is forced" in output) == bool(tier)
    runtime.forget()


def test_command_as_json(capsys):
    assert main(words({}, "--gpu", "h200", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    passes = passes_of(replace(SHAPES[5], transposed=True))
    assert (told["gpu"]["multiprocessors"], told["layer"]["save"]) == (132, "minimal")
    for shown, of_pass in zip(told["passes"], passes, strict=True):
        launches = of_pass.run.launches
        assert [launch["kernel"] for launch in shown["launches"]] == [launch.variant.entry for launch in launches]
        assert [tuple(launch["grid"]) for launch in shown["launches"]] == [launch.blocks for launch in launches]
        assert (shown["pass"], shown["peak_bytes"]) == (of_pass.name, of_pass.peak_bytes)
        assert [b["nbytes"] for b in shown["buffers"]] == [a.nbytes for a in of_pass.run.allocations]


@pytest.mark.parametrize(
    ("argv", "fragments"),
    [
        (words({"--experts": "1"}), ("--k", "at most 1 for --experts 1, got 2")),
        (words({"--tokens": str(2**30)}), ("slots", f"at most {launch_config.MAX_SLOTS}", f"got {2**31}")),
        (words({"--experts": "4097"}), ("--experts", "4096, got 4097")),
        (words({"--experts": "4096"}, "--gpu", "l40s"), ("num_experts", "101376 bytes", "got 4096")),
        (words({}, "--gpu", "a100", "--tier", "sm90"), ("--tier sm90", "compute capability 9.0, got 8.0 (a100)")),
    ],
    ids=lambda value: " ".join(value)[-40:],
)
def test_command_refuses_what_the_layer_refuses(capsys, argv, fragments):
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("moeblaze_cupy explain: ")
    assert all(fragment in captured.err for fragment in fragments), captured.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (words({}, "--gpu", "h300"), "argument --gpu: invalid choice: 'h300'"),
        (words({"--k": "0"}), "argument --k: expected a whole number from 1 on, got '0'"),
        (words({"--d-model": "-8"}), f"argument --d-model: expected a whole number from 1 to {MAX_WIDTH}, got '-8'"),
        (["explain", "--tokens", "8"], "required: --d-model, --d-hidden, --experts, --k"),
        (words({}, "--save", "all"), "argument --save: invalid choice: 'all'"),
    ],
    ids=lambda value: " ".join(value)[-30:] if isinstance(value, list) else "",
)
def test_command_explains_options_that_it_cannot_read(capsys, argv, message):
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_presets_are_those_that_the_parser_offers():
    assert tuple(explain.GPUS) == GPUS
    for limits in explain.GPUS.values():
        assert limits.tier == launch_config.tier(limits.compute_capability)
        assert limits.shared_bytes_per_block + launch_config.RESERVED_BYTES == limits.shared_bytes_per_multiprocessor


def test_the_guide_quotes_what_is_printed(capsys):
    text = (Path(__file__).parent.parent.parent / "docs" / "guide.md").read_text()
    section = text.partition("## See what a layer launches\n")[2].partition("\n## ")[0]
    command, quoted = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    assert main(" ".join(command.split()[3:]).replace("\\ ", "").split()) == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    parts = [re.sub(r"\s+", " ", part).strip() for part in quoted.split("...\n")]
    assert len(parts) > 1 and all(part in printed for part in parts)


def test_many_panels_are_told_in_few_lines(capsys):
    assert main(words({"--d-model": str(2**18), "--tokens": "64"}, "--gpu", "a100")) == 0
    output = capsys.readouterr().out
    assert "(128 launches)" in output and len(output.splitlines()) < 100
