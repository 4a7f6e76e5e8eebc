"""memory_limit: what passes allocate, how many chunks they take, and what is refused. No kernel runs here."""

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import runtime
from moeblaze_cupy.cuda.launch_config import ceil_div
from moeblaze_cupy.layer import chunks
from moeblaze_cupy.tools import dry_run, memory
from moeblaze_cupy.types import ChunkedIndices, LayerOptions
from tests.cases import Case, make_inputs
from tests.fakes import Layer, launches, limits_of, use
from tests.lora.lora_cases import by_name, problem

BF16 = ml_dtypes.bfloat16
SHAPES = [
    Layer(512, 2, 5, 64, 200),
    Layer(1000, 3, 4, 600, 64, "transposed"),
    Layer(3000, 1, 3, 264, 72, "pair", ids=np.int64),
    Layer(333, 2, 5, 96, 40, activation="relu", weights=BF16),
    Layer(400, 2, 5, 31, 45, "pair_transposed", dtype=np.float32),
    Layer(500, 2, 3, 64, 72, slots=LayerOptions(unreduced=True)),
    Layer(500, 2, 3, 64, 72, slots=LayerOptions(weights_on="input", identity_experts=3)),
    Layer(4096, 8, 4, 256, 128),
    Layer(1000, 2, 5, 64, 200, "transposed", rank=12, needs=("x", "weights", "lora")),
]


@pytest.fixture
def forget():
    yield
    runtime.forget()


def least_of(device, layer):
    """From the error. pytest.raises would hold what the call had in memory."""
    try:
        replace(layer, memory_limit=1).forward(device)
    except ValueError as error:
        found = re.fullmatch(r"moe_forward: memory_limit: expected at least (\d+) bytes for .*, got 1", str(error))
        return int(found[1])
    pytest.fail("a limit of one byte was kept")


def peaks(device, layer):
    """The bytes of forward beyond out and what it keeps, and those of backward; saved, which may be None."""
    before = device.peak = device.used
    out, saved = layer.forward(device)
    forward = device.peak - device.used
    if saved is None:
        return forward, 0, None
    assert device.used - before == out.nbytes + saved.nbytes
    before = device.peak = device.used
    gradients = layer.backward(device, saved)
    backward = device.peak - before
    del gradients
    return forward, backward, saved


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
@pytest.mark.parametrize("save", ["recompute", "minimal", "fp8", "paper", None])
@pytest.mark.parametrize("layer", SHAPES, ids=str)
def test_passes_stay_within_the_limit(layer, save, tier, monkeypatch, forget):
    """For limits from the least one to that of one chunk, and every kind of backward."""
    device, layer = use(monkeypatch, limits_of(tier)), replace(layer, save=save)
    least = least_of(device, layer)
    whole = max(peaks(device, replace(layer, keep_saved=True))[:2])
    assert least < whole
    numbers = []
    for limit in (least, (3 * least + whole) // 4, (least + whole) // 2, whole - 1, whole, 2 * whole):
        limited = replace(layer, memory_limit=limit)
        kinds = {"keep_saved": True}, {"accumulate": tuple(name for name in ("w1", "w2") if name in layer.needs)}
        for variant in (limited, *(replace(limited, **kind) for kind in kinds)):
            forward, backward, saved = peaks(device, variant)
            assert max(forward, backward) <= limit
        is_chunked = saved is not None and isinstance(saved.index, ChunkedIndices)
        numbers.append(-(-layer.L // saved.index.chunk_tokens) if is_chunked else 1)
    if save is not None:
        assert numbers == sorted(numbers, reverse=True)
        assert numbers[0] > 1 and numbers[3] > 1 and numbers[-2:] == [1, 1]


def test_sizes_of_chunks():
    """They take no time for each chunk, as many numbers of chunks are tried."""
    for num_tokens in (1, 15, 16, 17, 31, 32, 33, 160, 161):
        for tokens in (16, 32, 48):
            cut = chunks.Cut(num_tokens, min(tokens, num_tokens))
            assert cut.sizes == tuple(dict.fromkeys(min(cut.tokens, num_tokens - first) for first in cut.starts))
    assert chunks.Cut(10**15 + 3, 16).sizes == (16, 3)


@pytest.mark.parametrize("layer", SHAPES[:2], ids=str)
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_one_chunk_fewer_does_not_fit(layer, tier, monkeypatch, forget):
    device = use(monkeypatch, limits_of(tier))
    least, whole = least_of(device, layer), max(peaks(device, replace(layer, keep_saved=True))[:2])
    for limit in ((7 * least + whole) // 8, (least + 2 * whole) // 3):
        _, _, saved = peaks(device, replace(layer, memory_limit=limit))
        number = -(-layer.L // saved.index.chunk_tokens)
        shape = memory.LayerShape(layer.L, layer.d, layer.h, layer.E, layer.k, transposed=layer.order == "transposed")
        arrays, options = dry_run.arrays(shape), shape.of_layer("minimal")._replace(memory_limit=limit)
        fewer = ceil_div(ceil_div(layer.L, number - 1), chunks.STEP) * chunks.STEP
        assert saved.index.chunk_tokens < fewer
        cut = chunks.Cut(layer.L, min(fewer, layer.L))
        assert chunks.peak_bytes(arrays, options, limits_of(tier), (), cut) > limit


@pytest.mark.parametrize("save", ["recompute", "minimal", "fp8", "paper", None])
@pytest.mark.parametrize(
    ("L", "d", "k", "E", "rank"),
    [(512, 64, 2, 5, None), (700, 600, 3, 4, None), (4096, 256, 8, 4, None), (1024, 64, 2, 5, 12)],
)
def test_plan_gives_the_bytes_of_the_layer(L, d, k, E, rank, save, monkeypatch, forget):
    device = use(monkeypatch)
    for transposed in (False, True):
        of_factors = {"rank": rank, "needs": ("x", "weights", "lora")} if rank else {}
        layer = Layer(L, k, E, d, 72, "transposed" if transposed else "row", save=save, **of_factors)
        least = least_of(device, layer)
        for limit in (least, least * 5 // 4, least * 2):
            of_shape = {"transposed": transposed, "memory_limit": limit, "lora_rank": rank}
            shape = memory.LayerShape(L, d, 72, E, k, **of_shape)
            run = dry_run.layer(shape, save)
            forward, backward, saved = peaks(device, replace(layer, memory_limit=limit))
            assert (run.forward_peak_bytes, run.backward_peak_bytes) == (forward, backward)
            if saved is not None:
                assert saved.nbytes == run.saved_bytes - run.x_bytes
                assert getattr(saved.index, "chunk_tokens", L) == run.chunk_tokens
                assert rank is None or "gradient of lora.b2" in run.passes[1].kept


def test_a_limit_that_one_chunk_keeps_changes_no_launch(monkeypatch, forget):
    device, layer = use(monkeypatch), SHAPES[0]
    found = []
    for limit in (None, 1 << 40):
        device.restart()
        limited = replace(layer, memory_limit=limit)
        out, saved = limited.forward(device)
        gradients = limited.backward(device, saved)
        found.append([(variant, grid, values) for variant, grid, values in launches(device)])
        del out, saved, gradients
    assert found[0] == found[1] and len(found[0]) > 5


def test_chunks_read_and_write_their_own_part(monkeypatch, forget):
    device, layer = use(monkeypatch), replace(SHAPES[1], save="minimal")
    limited = replace(layer, memory_limit=least_of(device, layer) * 3 // 2)
    device.restart()
    out, saved = limited.forward(device)
    tokens, number = saved.index.chunk_tokens, -(-layer.L // saved.index.chunk_tokens)
    assert number > 2 and tokens % 16 == 0 and layer.L % tokens
    products = [values for variant, _, values in launches(device) if variant.entry == "up_fwd"]
    assert [values["a"] for values in products] == [(("x",), i * tokens * layer.d * 2) for i in range(number)]
    routed = [values for variant, _, values in launches(device) if variant.entry.startswith("dispatch_route")]
    assert [values["ids"] for values in routed] == [(("ids",), i * tokens * layer.k * 4) for i in range(number)]
    kept = [values["first_layer"] for values in products]
    assert [offset for _, offset in kept] == [i * tokens * layer.k * 2 * layer.h * 2 for i in range(number)]
    device.restart()
    gradients = limited.backward(device, saved)
    log = launches(device)
    sums = {values["out0"][0] for variant, _, values in log if variant.entry == "up_wgrad"}
    assert len(sums) == 1  # all chunks add to the same float32 sums, from which one launch rounds
    rounds = [(values["factor"][0], values["out"]) for variant, _, values in log if variant.entry == "lora_pack"]
    assert [label for label, _ in rounds].count(sums.pop()) == 1 and len(rounds) == 2
    assert rounds[-1][1][0] == gradients.w1.buffer.label and gradients.w1.dtype == BF16
    del out, saved, gradients


def test_lists_of_chunks_are_refused(monkeypatch, forget):
    device, layer = use(monkeypatch), SHAPES[0]
    _, saved = replace(layer, memory_limit=least_of(device, layer)).forward(device)
    for name in ("expert_token_indices", "expert_token_offsets", "token_index_map", "row_tiles", "experts_by_load"):
        with pytest.raises(RuntimeError, match=rf"saved.index: expected {name} of a layer without memory_limit"):
            getattr(saved.index, name)
    assert (saved.index.num_tokens, saved.index.k, saved.index.num_slots) == (layer.L, layer.k, layer.L * layer.k)
    grad_out = device.array(("grad_out",), (layer.L, layer.d), layer.dtype)
    with pytest.raises(ValueError, match=r"moe_backward_data: saved: expected a layer without memory_limit"):
        mb.moe_backward_data(grad_out, saved)
    rounded = replace(layer, accumulate=("w2",), totals=BF16)
    with pytest.raises(TypeError, match=r"accumulate\['w2'\]: expected dtype float32 or float64, got bfloat16"):
        rounded.backward(device, saved)
    del saved


def test_backward_takes_the_chunks_of_its_own_forward(monkeypatch, forget):
    """Also where those of a forward with the same arrays and limit were others, as beside decoded weights."""
    device, layer = use(monkeypatch), replace(SHAPES[1], save="recompute")
    _, saved = replace(layer, memory_limit=least_of(device, layer) * 3 // 2).forward(device)
    tokens = saved.index.chunk_tokens
    for number in (tokens, tokens - 16):
        saved.index.chunk_tokens = number
        device.restart()
        layer.backward(device, saved)
        starts = [values["a"] for variant, _, values in launches(device) if variant.entry == "up_fwd"]
        assert starts == [(("x",), first * layer.d * 2) for first in range(0, layer.L, number)]
    del saved


ON_CPU = Case(L=40, k=2, E=3, d=24, h=16)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"memory_limit": 0}, ValueError, "expected None, or at least 1 byte, got 0"),
        ({"memory_limit": 1e9}, TypeError, "expected an int, got 1000000000.0"),
        ({"memory_limit": True}, TypeError, "expected an int, got True"),
        ({"memory_limit": 9, "max_slots": 5}, ValueError, "expected None with max_slots"),
        ({"memory_limit": 9, "token_offsets": True}, ValueError, "expected None with token_offsets"),
    ],
    ids=str,
)
def test_options_without_chunks(options, error, message):
    x, ids, weights, w1, w2, _ = make_inputs(ON_CPU, 0, np.float32)
    if "token_offsets" in options:
        ids, weights = ids.ravel(), weights.ravel()
        options["token_offsets"] = np.arange(41, dtype=np.int32) * 2
    with pytest.raises(error, match=rf"moe_forward: memory_limit: {message}"):
        mb.moe_forward(x, ids, weights, w1, w2, **options)


def test_widths_that_sums_are_not_rounded_in():
    x, ids, weights, w1, w2, _ = make_inputs(replace(ON_CPU, d=20), 0, BF16)
    with pytest.raises(ValueError, match=r"memory_limit: expected None with bfloat16 weights whose d and h"):
        mb.moe_forward(x, ids, weights, w1, w2, memory_limit=9)
    mb.moe_forward(x, ids, weights, w1, w2, memory_limit=9, save=None)


def test_the_cpu_has_no_limit():
    """The options pass their checks, and the results are those without."""
    (x, ids, weights, w1, w2, grad_out), lora = problem(ON_CPU, (4, 8), np.float32)
    for factors in (None, lora):
        results = []
        for limit in (None, 1):
            out, saved = mb.moe_forward(x, ids, weights, w1, w2, lora=factors, memory_limit=limit)
            results.append(by_name(out, mb.moe_backward(grad_out, saved)))
            assert saved.options.memory_limit == limit
        for name, plain in results[0].items():
            np.testing.assert_array_equal(results[1][name], plain, name)


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["minimal", "fp8", "recompute", "paper"])
@pytest.mark.parametrize(("dtype", "shared"), [(BF16, False), (np.float32, True)], ids=str)
def test_chunks_with_factors_on_a_gpu(dtype, shared, save):
    """Against the layer without a limit, whose factors' gradients are sums in another order."""
    cupy = pytest.importorskip("cupy")
    case = Case(L=3000, k=3, E=6, d=520, h=136, order="transposed", routing="absent")
    inputs, lora = problem(case, (16, 24), BF16, factor_dtype=dtype, shared=shared)
    x, ids, weights, w1, w2, grad_out = map(cupy.asarray, inputs)
    given = {"lora": lora.with_factors(map(cupy.asarray, lora.factors)), "save": save}
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, **given)
    plain = by_name(out, mb.moe_backward(grad_out, saved))
    with pytest.raises(ValueError, match="memory_limit: expected at least") as error:
        mb.moe_forward(x, ids, weights, w1, w2, **given, memory_limit=1)
    least = int(str(error.value).split("at least ")[1].split()[0])
    for limit in (least, least * 5 // 4):
        out, saved = mb.moe_forward(x, ids, weights, w1, w2, **given, memory_limit=limit)
        assert isinstance(saved.index, ChunkedIndices)
        got = by_name(out, mb.moe_backward(grad_out, saved))
        assert got.keys() == plain.keys()
        for name, of in plain.items():
            # Of factors, sums in another order; those in bf16 are rounded to 8 bits afterwards.
            tolerance = {"out": 0, "x": 0, "weights": 0}.get(name, 2**-8 if dtype is BF16 else 1e-5)
            one, other = (np.asarray(array.get()).astype(np.float64) for array in (got[name], of))
            assert got[name].dtype == of.dtype
            assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other), name


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["minimal", "fp8", "recompute", "paper"])
@pytest.mark.parametrize(("dtype", "d", "h"), [(BF16, 520, 136), (np.float32, 131, 67)], ids=str)
def test_chunks_on_a_gpu(dtype, d, h, save):
    """out and the gradients of x and of router weights have the bits of the layer without a limit."""
    cupy = pytest.importorskip("cupy")
    inputs = make_inputs(Case(L=3000, k=3, E=6, d=d, h=h, order="transposed", routing="absent"), 0, dtype)
    x, ids, weights, w1, w2, grad_out = map(cupy.asarray, inputs)
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
    plain = {"out": out, **vars(mb.moe_backward(grad_out, saved))}
    with pytest.raises(ValueError, match="memory_limit: expected at least") as error:
        mb.moe_forward(x, ids, weights, w1, w2, save=save, memory_limit=1)
    least = int(str(error.value).split("at least ")[1].split()[0])
    for limit in (least, least * 5 // 4):
        out, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save, memory_limit=limit)
        assert isinstance(saved.index, ChunkedIndices)
        got = {"out": out, **vars(mb.moe_backward(grad_out, saved))}
        # Sums in another order; those of bf16 weights are rounded to 8 bits afterwards.
        of_weights = 2**-8 if dtype is BF16 else 1e-5
        for name, tolerance in {"out": 0, "x": 0, "weights": 0, "w1": of_weights, "w2": of_weights}.items():
            one, other = (np.asarray(results[name].get()).astype(np.float64) for results in (got, plain))
            assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other), name
