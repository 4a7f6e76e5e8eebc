"""The public functions on a GPU, on CuPy arrays and torch tensors, against the float64 reference."""

import gc
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import loader, runtime
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.types import GRADIENTS, pair
from tests.cases import CASES, Case, in_order, is_marked, make_inputs, mark, relative_error

pytestmark = pytest.mark.gpu

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

# Relative norms against the float64 layer on the same rounded inputs. 16-bit results carry the rounding of the
# output and of the stored a, b, product, its gradient and panel, each uniform within half a unit in the last place
# (relative norm 0.29 to 0.58 of 2^-8 for bf16), so 1.5 units bounds their sum; fp32 carries the fp32 sums over K
# terms.
TOLERANCES = {"bfloat16": 1.5 * 2**-8, "float16": 1.5 * 2**-11, "float32": 3e-6}

RAGGED = Case(L=513, k=4, E=8, d=136, h=72)
GEGLU = Case(L=513, k=4, E=8, d=136, h=72, order="transposed", activation="geglu")
GATE_UP_PAIR = Case(L=1000, k=8, E=64, d=264, h=136, routing="absent", order="pair")
GATE_UP_TRANSPOSED = Case(L=300, k=2, E=3, d=600, h=328, order="pair_transposed")
UNALIGNED = Case(L=513, k=3, E=5, d=301, h=157, activation="silu")
EMPTY_EXPERTS = Case(L=2048, k=2, E=4, d=512, h=1024, routing="empty_experts")
ONE_EXPERT_EACH = Case(L=700, k=1, E=6, d=1032, h=264, routing="absent")
PANEL_IN_PLACE = Case(L=700, k=4, E=6, d=200, h=256, routing="absent", order="transposed")
PANELS = Case(L=4100, k=4, E=7, d=1032, h=136, routing="empty_experts", order="transposed")
PAIRS_OF_BLOCKS = Case(L=1400, k=3, E=7, d=4096, h=136, routing="empty_experts", order="transposed")
THREE_PANELS = Case(L=920, k=4, E=5, d=4616, h=64, routing="absent", order="transposed")
MANY_TOKENS = Case(L=3000, k=4, E=8, d=512, h=512)
# weight gradients by split-K, some of them empty, some of an expert that has none
FEW_EXPERTS = Case(L=9001, k=2, E=4, d=264, h=136, routing="skewed", order="transposed")
ONE_OF_THREE = Case(L=9000, k=1, E=3, d=520, h=264, routing="empty_experts", order="pair")
ONE_EXPERT = Case(L=6000, k=1, E=1, d=136, h=72, activation="silu")
LARGER = [
    RAGGED,
    GEGLU,
    Case(L=1000, k=8, E=64, d=256, h=128, routing="skewed"),
    GATE_UP_PAIR,
    GATE_UP_TRANSPOSED,
    UNALIGNED,
    EMPTY_EXPERTS,
    Case(L=1024, k=1, E=8, d=320, h=192, activation="relu", order="transposed", routing="one_expert"),
    # k = 1, where rows go straight to their tokens; one panel that takes the place of what it is computed from
    ONE_EXPERT_EACH,
    PANEL_IN_PLACE,
    # several panels: more tiles than blocks; a last one of 8 columns
    PANELS,
    THREE_PANELS,
    Case(L=4700, k=7, E=7, d=520, h=64, routing="duplicate", order="transposed"),
    Case(L=12289, k=2, E=3, d=776, h=136, routing="one_expert", order="transposed"),
    # one wide panel, as rows are few: many slots; fewer tokens than warps that sum
    Case(L=200, k=12, E=20, d=1288, h=72, routing="absent"),
    Case(L=9, k=3, E=5, d=1024, h=64, routing="absent"),
    # whole panels of 256 columns that Hopper's kernels take, where d is not one of their sizes
    Case(L=300, k=2, E=3, d=1004, h=64, order="transposed"),
    Case(L=300, k=2, E=3, d=1004, h=64),
    # the epilogue of dA beside so many k-steps that most have no row of it
    Case(L=1024, k=4, E=4, d=4168, h=1160, routing="skewed"),
    # 2-CTA clusters: a last tile that only one CTA has, experts of an odd number of tiles
    PAIRS_OF_BLOCKS,
    Case(L=2100, k=2, E=5, d=4104, h=264, routing="absent", order="pair", activation="geglu"),
    # the epilogue of dA beside several k-steps of the next tile
    MANY_TOKENS,
    FEW_EXPERTS,
    ONE_OF_THREE,
    ONE_EXPERT,
    # as many experts as the Hopper tier is for, most with one tile of few rows
    Case(L=1100, k=4, E=1024, d=136, h=72, routing="skewed", order="transposed"),
    # 22.5 tiles of 128, as gpt-oss has them
    Case(L=300, k=2, E=5, d=2880, h=2880, order="transposed"),
]


def to_float64(array):
    if isinstance(array, tuple):
        return tuple(map(to_float64, array))
    if hasattr(array, "get"):
        array = array.get()
    elif not isinstance(array, np.ndarray):
        array = arrays.Torch.to_numpy(array.cpu())
    return array.astype(np.float64)


def on_gpu(xp_name, array):
    """A NumPy array on the GPU, as CuPy array or torch tensor, in its memory order."""
    if isinstance(array, tuple):
        return tuple(on_gpu(xp_name, a) for a in array)
    transposed = array.ndim == 3 and array.strides[1] < array.strides[2]
    plain = np.ascontiguousarray(array.swapaxes(1, 2)) if transposed else array
    if xp_name == "cupy":
        import cupy

        moved = cupy.asarray(plain)
    else:
        pytest.importorskip("torch")
        moved = arrays.Torch.from_numpy(plain).cuda()
    return moved.swapaxes(1, 2) if transposed else moved


def in_float64(inputs):
    """The same values in float64, the ids as they are."""
    x, ids, *others = inputs
    return [to_float64(x), ids, *map(to_float64, others)]


def inputs_of(case, dtype, xp_name="cupy", seed=0):
    """The case's inputs on the GPU in `dtype`, and the same rounded values in float64 on the host."""
    rounded = make_inputs(case, seed, DTYPES[dtype])
    return [on_gpu(xp_name, a) for a in rounded], in_float64(rounded)


def reference_results(case, host):
    x, ids, weights, w1, w2, grad_out = host
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, activation=case.activation)
    return {"out": out, **by_name(reference.moe_backward(grad_out, saved))}


def by_name(gradients):
    """Those that a layer without biases has."""
    return {name: getattr(gradients, name) for name in GRADIENTS}


def run(case, gpu, save="minimal", keep_saved=False):
    x, ids, weights, w1, w2, grad_out = gpu
    out, saved = mb.moe_forward(x, ids, weights, w1, w2, activation=case.activation, save=save)
    if saved is None:
        return {"out": out}
    return {"out": out, **by_name(mb.moe_backward(grad_out, saved, keep_saved=keep_saved))}


def assert_close(got, want, dtype):
    errors = {name: relative_error_of(value, want[name]) for name, value in got.items()}
    assert all(error <= TOLERANCES[dtype] for error in errors.values()), errors


def relative_error_of(got, want):
    if isinstance(want, tuple):
        return max(relative_error_of(g, w) for g, w in zip(got, want, strict=True))
    return relative_error(to_float64(got), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_layer_matches_float64_reference(case, dtype):
    gpu, host = inputs_of(case, dtype)
    assert_close(run(case, gpu), reference_results(case, host), dtype)


def small_integers(case, dtype, few=0.15):
    """The case's inputs as -1, 0 and 1, router weights as 1 and 2. Not 0 are 0.15 of the experts' weights, and of x and
    grad_out a share of `few`."""
    rng = np.random.default_rng(0)

    def integers(like, share=0.15):
        if isinstance(like, tuple):
            return tuple(map(integers, like))
        values = rng.integers(-1, 2, like.shape) * (rng.random(like.shape) < share)
        return in_order(values.astype(DTYPES[dtype]), like.ndim == 3 and case.order == "transposed")

    x, ids, _, w1, w2, grad_out = make_inputs(case, 0, DTYPES[dtype])
    return [integers(x, few), ids, np.float32(1 + ids % 2), integers(w1), integers(w2), integers(grad_out, few)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["row", "transposed"])
@pytest.mark.parametrize("sizes", [(328, 264), (4104, 136)], ids=str)
def test_small_integers_come_out_exact(sizes, order, dtype):
    """Every output and gradient is an integer below 256, which all dtypes hold: a product left out, counted twice or
    of the wrong row is seen, where a tolerance for rounding would let one of thousands pass."""
    d, h = sizes
    case = Case(L=700, k=2, E=5, d=d, h=h, activation="relu", order=order)
    made = small_integers(case, dtype, few=0.15 * 328 / d)  # so that sums over d stay as small for any d
    want = reference_results(case, in_float64(made))
    got = run(case, [on_gpu("cupy", a) for a in made])
    for name, value in want.items():
        assert np.abs(value).max() < 256, name
        assert np.count_nonzero(value) > value.size // 20, name
        assert np.array_equal(to_float64(got[name]), value), name


@pytest.mark.parametrize("order", ["row", "transposed", "pair"])
def test_parts_of_the_rows_add_up(monkeypatch, order):
    """Sums of small integers, which are exact in any number of parts: of 64 rows, and more than some experts have."""
    case = Case(L=1500, k=2, E=5, d=328, h=264, activation="reglu", order=order, routing="skewed")
    made = small_integers(case, "bfloat16")
    gpu, results = [on_gpu("cupy", a) for a in made], []
    for splits in (1, 2, 7, 33):
        monkeypatch.setattr(gemm_config, "split_k", lambda *_, made=splits: (made, ""))
        runtime.forget()
        results.append(run(case, gpu))
        assert same_bits(results[0], results[-1]), splits
    assert_close(results[-1], reference_results(case, in_float64(made)), "bfloat16")


@pytest.mark.parametrize("save", ["paper", "recompute", None])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", [RAGGED, GATE_UP_PAIR, UNALIGNED, PANEL_IN_PLACE, PAIRS_OF_BLOCKS, MANY_TOKENS], ids=str
)
def test_save_policies_match_reference(case, dtype, save):
    gpu, host = inputs_of(case, dtype)
    assert_close(run(case, gpu, save), reference_results(case, host), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [RAGGED, GEGLU, GATE_UP_PAIR, UNALIGNED], ids=str)
def test_torch_tensors_give_torch_tensors(case, dtype):
    torch = pytest.importorskip("torch")
    gpu, host = inputs_of(case, dtype, "torch")
    got = run(case, gpu)
    assert isinstance(got["out"], torch.Tensor) and got["out"].dtype == gpu[0].dtype
    assert_close(got, reference_results(case, host), dtype)


@pytest.mark.parametrize("case", [GEGLU, GATE_UP_PAIR], ids=str)
def test_gradients_have_the_weights_memory_order(case):
    gpu, _ = inputs_of(case, "bfloat16")
    got = run(case, gpu)
    w1, grad_w1 = pair(gpu[3]), pair(got["w1"])
    assert [g.strides for g in grad_w1] == [w.strides for w in w1]
    assert got["w2"].strides == gpu[4].strides


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [RAGGED, ONE_EXPERT_EACH], ids=str)
def test_router_weights_in_the_dtype_of_x(case, dtype):
    gpu, host = inputs_of(case, dtype)
    gpu[2] = gpu[2].astype(DTYPES[dtype])
    host[2] = to_float64(gpu[2])
    got = run(case, gpu)
    assert got["weights"].dtype == DTYPES[dtype]
    assert_close(got, reference_results(case, host), dtype)


def test_int64_ids_match_int32():
    gpu, _ = inputs_of(GATE_UP_PAIR, "bfloat16")
    first = run(GATE_UP_PAIR, gpu)
    gpu[1] = gpu[1].astype(np.int64)
    second = run(GATE_UP_PAIR, gpu)
    assert same_bits(first, second)


def same_bits(a, b):
    """Of arrays, tuples of them, or the first's entries by name."""
    if isinstance(a, dict):
        return all(same_bits(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return np.array_equal(to_float64(a), to_float64(b), equal_nan=True)


@pytest.mark.parametrize("without", [slice(123, 456), slice(None)], ids=["some", "all"])
@pytest.mark.parametrize("case", [PANELS, PANEL_IN_PLACE, ONE_EXPERT_EACH], ids=str)
def test_tokens_without_an_expert(case, without):
    """They get zeros, whether they are some or all, and the others are as the reference says."""
    gpu, host = inputs_of(case, "bfloat16")
    gpu[1][without], host[1][without] = -1, -1
    got = run(case, gpu)
    assert not to_float64(got["out"])[without].any() and not to_float64(got["x"])[without].any()
    if without != slice(None):
        assert_close(got, reference_results(case, host), "bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        Case(L=4096, k=8, E=32, d=1536, h=776, routing="skewed"),
        Case(L=4096, k=8, E=32, d=256, h=264, routing="skewed"),  # rows that take the place of what they are made of
        Case(L=4096, k=4, E=8, d=4096, h=776, routing="skewed"),  # 2-CTA clusters
        FEW_EXPERTS,
    ],
    ids=str,
)
def test_repeated_runs_give_the_same_bits(case):
    gpu, _ = inputs_of(case, "bfloat16")
    first = run(case, gpu)
    for _ in range(10):
        again = run(case, gpu)
        assert same_bits(first, again)


@pytest.mark.parametrize(
    "case",
    [
        Case(L=4096, k=8, E=32, d=64, h=520, routing="skewed"),  # one step per tile
        Case(L=3000, k=8, E=40, d=1032, h=392, routing="absent", order="transposed"),
        Case(L=4096, k=8, E=32, d=3080, h=136, routing="skewed", order="transposed"),
        Case(L=300, k=2, E=3, d=600, h=328),  # fewer tiles than blocks
        Case(L=1100, k=4, E=6, d=520, h=264, order="pair", activation="geglu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_claimed_tiles_and_pairs_of_blocks_give_the_same_bits(monkeypatch, case, dtype):
    """Whichever block comes to a tile first, and whichever fetches its weights."""
    gpu, host = inputs_of(case, dtype)
    results = []
    for dynamic, clusters in ((False, False), (True, False), (False, True), *3 * ((True, True),)):
        monkeypatch.setattr(gemm_config, "dynamic_schedule", lambda *_, made=dynamic: (made, ""))
        monkeypatch.setattr(gemm_config, "uses_clusters", lambda *_, made=clusters: (made, ""))
        runtime.forget()
        results.append(run(case, gpu))
        assert same_bits(results[0], results[-1]), (dynamic, clusters)
    assert_close(results[-1], reference_results(case, host), dtype)


@pytest.mark.parametrize("multiprocessors", [131, 114, 7])
@pytest.mark.parametrize(
    "case",
    [
        Case(L=4096, k=8, E=32, d=3080, h=392),
        Case(L=900, k=3, E=4, d=1608, h=392, routing="skewed"),  # fewer tiles than blocks
        Case(L=900, k=1, E=4, d=1032, h=776, routing="absent"),
        Case(L=2100, k=2, E=7, d=4104, h=392),  # 2-CTA clusters
    ],
    ids=str,
)
def test_any_number_of_blocks_gives_the_same_bits(monkeypatch, case, multiprocessors):
    gpu, _ = inputs_of(case, "bfloat16")
    first = run(case, gpu)
    limits = replace(loader.device_limits(0), multiprocessors=multiprocessors)
    monkeypatch.setattr(loader, "device_limits", lambda _: limits)
    for _ in range(3):
        runtime.forget()
        again = run(case, gpu)
        assert same_bits(first, again)


def test_inputs_are_not_written():
    gpu, _ = inputs_of(RAGGED, "bfloat16")
    before = [to_float64(a) for a in gpu]
    run(RAGGED, gpu)
    assert all(np.array_equal(to_float64(a), b) for a, b in zip(gpu, before, strict=True))


def test_empty_experts_have_exactly_zero_gradients():
    case = EMPTY_EXPERTS
    gpu, host = inputs_of(case, "bfloat16")
    got = run(case, gpu)
    used = np.isin(np.arange(case.E), host[1])
    assert not used.all()
    for name in ("w1", "w2"):
        assert not to_float64(got[name])[~used].any()


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
def test_backward_twice(save):
    """keep_saved allows it, with the same result; without, the saved activations are gone and the error says so."""
    case = RAGGED
    (x, ids, weights, w1, w2, grad_out), _ = inputs_of(case, "bfloat16")
    _, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
    first = by_name(mb.moe_backward(grad_out, saved, keep_saved=True))
    second = by_name(mb.moe_backward(grad_out, saved))
    assert same_bits(first, second)
    if save == "recompute":
        third = by_name(mb.moe_backward(grad_out, saved))
        assert same_bits(first, third)
    else:
        with pytest.raises(RuntimeError, match=r"moe_backward: saved: expected .* got .*keep_saved"):
            mb.moe_backward(grad_out, saved)


@pytest.mark.parametrize("needs", [("x",), ("weights",), ("w1",), ("w2",), ("x", "w2"), ()])
def test_only_needed_gradients_are_computed(needs):
    gpu, _ = inputs_of(RAGGED, "bfloat16")
    everything = run(RAGGED, gpu)
    x, ids, weights, w1, w2, grad_out = gpu
    _, saved = mb.moe_forward(x, ids, weights, w1, w2)
    for name, value in by_name(mb.moe_backward(grad_out, saved, needs=needs)).items():
        assert (value is None) == (name not in needs)
        assert value is None or same_bits(value, everything[name])


def total_of(weight, dtype, transposed, used, xp_name):
    """Random numbers in a weight's form, on the GPU and on the host; experts that are not `used` are marked."""
    if isinstance(weight, tuple):
        return tuple(zip(*(total_of(half, dtype, transposed, used, xp_name) for half in weight), strict=True))
    host = np.random.default_rng(2).standard_normal(weight.shape).astype(DTYPES[dtype])
    mark(host, ~used)
    return on_gpu(xp_name, in_order(host, transposed)), host


def host_of(array):
    """A GPU array on the host, in its own dtype."""
    if isinstance(array, tuple):
        return tuple(map(host_of, array))
    return array.get() if hasattr(array, "get") else arrays.Torch.to_numpy(array.cpu())


ACCUMULATED = [
    (replace(EMPTY_EXPERTS, E=6), "bfloat16", "cupy"),  # more tiles than blocks, and experts without tokens
    (RAGGED, "bfloat16", "cupy"),
    (GATE_UP_PAIR, "bfloat16", "torch"),  # w1 as two arrays
    (GATE_UP_TRANSPOSED, "float16", "cupy"),
    (UNALIGNED, "bfloat16", "cupy"),  # sizes that only the portable kernel takes
    (replace(ONE_EXPERT_EACH, L=300), "float32", "cupy"),
    (FEW_EXPERTS, "bfloat16", "cupy"),
    (ONE_OF_THREE, "float16", "torch"),
    (Case(L=0, k=2, E=8, d=64, h=128), "bfloat16", "cupy"),
]


@pytest.mark.parametrize("transposed", [False, True], ids=["row", "transposed"])
@pytest.mark.parametrize(("case", "dtype", "xp_name"), ACCUMULATED, ids=str)
def test_accumulated_weight_gradients(case, dtype, xp_name, transposed):
    """The products' fp32 sums, found by adding them to zeros, match the reference; they are added, in backward after
    backward, bit for bit as NumPy adds them, and experts without tokens keep their bits."""
    if xp_name == "torch":
        pytest.importorskip("torch")
    gpu, host = inputs_of(case, dtype, xp_name)
    used = np.isin(np.arange(case.E), host[1])
    weights = {"w1": host[3], "w2": host[4]}
    out, saved = mb.moe_forward(*gpu[:5], activation=case.activation)

    def add_to(totals):
        got = mb.moe_backward(gpu[5], saved, keep_saved=True, accumulate=totals)
        assert all(getattr(got, name) is total for name, total in totals.items())
        return got

    sums = {name: total_of(w, "float32", transposed, used, xp_name)[0] for name, w in weights.items()}
    for part in (*pair(sums["w1"]), sums["w2"]):
        part[:] = 0
    want = reference_results(case, host)
    assert_close({"out": out, **by_name(add_to(sums))}, want, dtype)
    for name in weights:  # 16-bit results are rounded from these very sums
        assert all(part.dtype == np.float32 for part in pair(host_of(sums[name])))
        assert case.order.endswith("transposed") != transposed or same_bits(
            tuple(part.astype(DTYPES[dtype]) for part in pair(host_of(sums[name]))),
            pair(host_of(getattr(mb.moe_backward(gpu[5], saved, keep_saved=True), name))),
        )
    added = {name: pair(host_of(total)) for name, total in sums.items()}
    for total_dtype in dict.fromkeys(("float32", dtype)):
        totals, expected = {}, {}
        for name, weight in weights.items():
            totals[name], start = total_of(weight, total_dtype, transposed, used, xp_name)
            expected[name] = pair(start)
        for _ in range(2):
            add_to(totals)
            for name, total in totals.items():
                pairs = zip(expected[name], added[name], strict=True)
                with np.errstate(invalid="ignore"):  # the marks
                    expected[name] = tuple((e.astype(np.float32) + a).astype(e.dtype) for e, a in pairs)
                for got, exact in zip(pair(host_of(total)), expected[name], strict=True):
                    assert np.array_equal(got[used], exact[used])
                    assert is_marked(got, ~used)


def test_accumulated_gradients_take_no_memory(monkeypatch):
    """Torch's allocator gives none for them; repeated runs give the same bits."""
    torch = pytest.importorskip("torch")
    case = Case(L=2048, k=4, E=32, d=512, h=512, routing="skewed")
    gpu, _ = inputs_of(case, "bfloat16", "torch")
    _, saved = mb.moe_forward(*gpu[:5])
    found = []
    gc.collect()  # of earlier tests, whose memory may else be freed between the readings
    for _ in range(5):
        totals = {name: torch.ones_like(w, dtype=torch.float32) for name, w in (("w1", gpu[3]), ("w2", gpu[4]))}
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        got = mb.moe_backward(gpu[5], saved, needs=("w1", "w2"), keep_saved=True, accumulate=totals)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
        found.append((to_float64(got.w1), to_float64(got.w2)))
        del got, totals  # or the next round's allocation starts with theirs
    assert all(same_bits(found[0], again) for again in found[1:])


def test_accumulation_into_main_grad():
    """Megatron's contract, on the module: its parameters are stored transposed."""
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import MoE

    torch.manual_seed(0)
    layer = MoE(128, 64, 8, 2, accumulate_into_main_grad=True, device="cuda", dtype=torch.bfloat16)
    plain = MoE(128, 64, 8, 2, device="cuda", dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    experts = (layer.w1_storage, layer.w2_storage)
    for parameter in experts:
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter, dtype=torch.float32), False
    for _ in range(2):
        x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16)
        for model in (layer, plain):
            model(x).float().square().mean().backward()
    for parameter, other in zip(experts, (plain.w1_storage, plain.w2_storage), strict=True):
        assert parameter.grad_added_to_main_grad
        assert relative_error(to_float64(parameter.main_grad), to_float64(other.grad)) <= TOLERANCES["bfloat16"]
    assert same_bits(layer.router.grad, plain.router.grad)


@pytest.mark.parametrize("calls_before", [0, 3], ids=["first", "replayed"])
@pytest.mark.parametrize("xp_name", ["cupy", "torch"])
@pytest.mark.parametrize("order", ["row", "pair"])
def test_sums_over_what_backward_reads_are_refused_on_every_call(order, xp_name, calls_before):
    """Layouts do not tell of it; neither do address ranges of sums that lie among each other, which are allowed."""
    if xp_name == "torch":
        pytest.importorskip("torch")
    case = Case(L=300, k=2, E=4, d=136, h=72, order=order)
    gpu, host = inputs_of(case, "bfloat16", xp_name)
    x, ids, weights, w1, w2, grad_out = gpu

    def backward(totals):
        _, saved = mb.moe_forward(x, ids, weights, w1, w2)
        return mb.moe_backward(grad_out, saved, accumulate=totals)

    def fresh():
        both = on_gpu(xp_name, np.zeros((case.E, case.d, 2 * case.h), DTYPES["bfloat16"]))
        w1_total = both if order == "row" else (both[:, :, : case.h], both[:, :, case.h :])
        return {"w1": w1_total, "w2": on_gpu(xp_name, np.zeros(host[4].shape, DTYPES["bfloat16"]))}

    for _ in range(calls_before):
        backward(fresh())
    got = backward(fresh())
    want = reference_results(case, host)
    assert_close({name: getattr(got, name) for name in ("w1", "w2")}, want, "bfloat16")
    before = to_float64(w2)
    with pytest.raises(ValueError, match=r"accumulate\['w2'\]: expected memory apart from saved.w2, got an array"):
        backward(fresh() | {"w2": w2})
    assert np.array_equal(to_float64(w2), before)
    if order == "row":
        with pytest.raises(ValueError, match=r"accumulate\['w1'\]: expected memory apart from saved.w1, got an array"):
            backward(fresh() | {"w1": w1})
    else:
        gate = fresh()["w1"][0]
        with pytest.raises(ValueError, match=r"\['w1'\]\[1\]: expected memory apart from accumulate\['w1'\]\[0\]"):
            backward(fresh() | {"w1": (gate, gate)})
    assert_close({"w2": backward(fresh()).w2}, want, "bfloat16")


@pytest.mark.parametrize("calls_before", [0, 3], ids=["first", "replayed"])
def test_what_torch_cannot_follow_is_refused_on_every_call(calls_before):
    torch = pytest.importorskip("torch")
    forward_ad, make_fx = torch.autograd.forward_ad, pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
    (x, ids, weights, w1, w2, grad_out), _ = inputs_of(RAGGED, "bfloat16", "torch")

    def forward_with(x, w1):
        return mb.moe_forward(x, ids, weights, w1, w2)[0]

    def forward(x):  # make_fx counts the parameters
        return forward_with(x, w1)

    def backward(grad_out):
        _, saved = mb.moe_forward(x, ids, weights, w1, w2)
        return mb.moe_backward(grad_out, saved).x

    for _ in range(calls_before):
        forward(x), backward(grad_out)
    for function, given in ((forward, x), (backward, grad_out)):
        with pytest.raises(RuntimeError, match="got one that requires it; use moe or route of"):
            function(given.detach().clone().requires_grad_())
        with pytest.raises(RuntimeError, match="got make_fx"):
            make_fx(function)(given)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="got forward-mode differentiation"):
            function(forward_ad.make_dual(given, given))
    with pytest.raises(RuntimeError, match=r"^moe_forward: w1: expected a tensor that requires no gradient"):
        forward_with(x, torch.nn.Parameter(w1))
    with torch.no_grad():
        assert torch.equal(forward_with(x, torch.nn.Parameter(w1)), forward(x))


@pytest.mark.parametrize("save", ["minimal", "paper", "recompute"])
@pytest.mark.parametrize("needs", [("x",), ("weights",), ("w1",), ("w2",), ("weights", "w2"), ()], ids=" ".join)
def test_what_counts_as_consumed_is_what_was_overwritten(needs, save):
    """Of every backward, also of replayed ones: the saved arrays differ afterwards just where the mark says so."""
    gpu, _ = inputs_of(RAGGED, "bfloat16")
    x, ids, weights, w1, w2, grad_out = gpu
    for _ in range(3):
        _, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
        kept = [array for array in (saved.first_layer, saved.y_swi) if array is not None]
        before = [to_float64(array) for array in kept]
        mb.moe_backward(grad_out, saved, needs=needs)
        changed = any(not np.array_equal(to_float64(a), b) for a, b in zip(kept, before, strict=True))
        assert saved.consumed == changed


def test_no_second_derivative_on_a_gpu():
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import MoE

    torch.manual_seed(0)
    layer = MoE(128, 64, 8, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        (want,) = torch.autograd.grad(layer(x).sum(), x)
        (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        assert torch.equal(grad, want)
        with pytest.raises(RuntimeError, match="no second derivatives"):
            grad.float().square().sum().backward()


def test_autocast_leaves_the_router_in_fp32_on_a_gpu():
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import MoE

    torch.manual_seed(0)
    layer = MoE(256, 16, 64, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.equal(layer(x), want)


def test_frozen_experts_run_no_weight_kernel(monkeypatch):
    from moeblaze_cupy.gemm import products as grouped_gemm

    monkeypatch.setattr(grouped_gemm, "wgrad", lambda *a, **k: pytest.fail("weight gradient kernel launched"))
    gpu, _ = inputs_of(RAGGED, "bfloat16")
    x, ids, weights, w1, w2, grad_out = gpu
    _, saved = mb.moe_forward(x, ids, weights, w1, w2)
    mb.moe_backward(grad_out, saved, needs=("x", "weights"))


@pytest.mark.parametrize("save", ["minimal", "fp8", "paper", "recompute"])
def test_saved_bytes(save):
    """x aside: h, 2h or 3h elements per slot by policy, and at most 20 bytes of index lists and router weight."""
    case = Case(L=4096, k=8, E=64, d=256, h=128)
    (x, ids, weights, w1, w2, _), _ = inputs_of(case, "bfloat16")
    _, saved = mb.moe_forward(x, ids, weights, w1, w2, save=save)
    slots = case.L * case.k
    activations = {"minimal": 2, "fp8": 2 * 0.515625, "paper": 3, "recompute": 0}[save] * slots * case.h * 2
    held = saved.nbytes + ids.nbytes + weights.nbytes
    assert activations <= held <= activations + 20 * slots


@pytest.mark.parametrize(("L", "d", "panel_columns"), [(4096, 2048, 1024), (8192, 1024, 512), (4096, 7168, 2048)])
@pytest.mark.parametrize("xp_name", ["cupy", "torch"])
def test_no_routed_buffer_is_allocated(monkeypatch, xp_name, L, d, panel_columns):
    """Nothing of L*k rows is as wide as d, in both passes: a panel takes half of that, for large d less."""
    if xp_name == "torch":
        pytest.importorskip("torch")
    case = Case(L=L, k=4, E=8, d=d, h=64)
    gpu, _ = inputs_of(case, "bfloat16", xp_name)
    framework = arrays.framework_of(gpu[0])
    sizes = []

    def empty(shape, dtype, device, transposed, plain=framework.empty):
        buffer = plain(shape, dtype, device, transposed)
        sizes.append(int(buffer.array.nbytes))
        return buffer

    monkeypatch.setattr(framework, "empty", staticmethod(empty))
    slots = case.L * case.k
    weights_bytes = case.E * 3 * case.d * case.h * 2

    def peak_of(call):
        if xp_name == "torch":
            import torch

            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            result = call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before, result
        return None, call()

    x, ids, weights, w1, w2, grad_out = gpu
    forward_peak, (_, saved) = peak_of(lambda: mb.moe_forward(x, ids, weights, w1, w2))
    backward_peak, _ = peak_of(lambda: mb.moe_backward(grad_out, saved))
    panel = slots * panel_columns * 2
    assert max(sizes) <= panel
    if forward_peak is not None:
        out = case.L * case.d * 2
        assert forward_peak <= out + saved.nbytes + slots * case.h * 2 + panel + 2**20
        # while that of x is computed: the gradients of x, w2 and the router weights, and the panel
        assert backward_peak <= out + weights_bytes // 3 + slots * 8 + panel + 2**20


def test_row_offsets_beyond_2_31_elements():
    """L*k*2h = 2.4e9 elements; tokens at both ends are compared, and all weight gradients."""
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.memGetInfo()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    L, k, d, h = 131072, 8, 64, 1144
    assert L * k * 2 * h > 2**31
    small, host = inputs_of(Case(L=1024, k=k, E=8, d=d, h=h), "bfloat16")
    repeats = L // 1024
    x, ids, weights, w1, w2, grad_out = small
    tiled = [cupy.tile(a, (repeats, 1)) for a in (x, ids, weights, grad_out)]
    out, saved = mb.moe_forward(tiled[0], tiled[1], tiled[2], w1, w2)
    assert saved.first_layer.size > 2**31
    grads = mb.moe_backward(tiled[3], saved)
    want = reference_results(Case(L=1024, k=k, E=8, d=d, h=h), host)
    tolerance = TOLERANCES["bfloat16"]
    for rows in (slice(0, 1024), slice(L - 1024, L)):
        assert relative_error(to_float64(out[rows]), want["out"]) <= tolerance
        assert relative_error(to_float64(grads.x[rows]), want["x"]) <= tolerance
        assert relative_error(to_float64(grads.weights[rows]), want["weights"]) <= tolerance
    assert relative_error(to_float64(grads.w1) / repeats, want["w1"]) <= tolerance
    assert relative_error(to_float64(grads.w2) / repeats, want["w2"]) <= tolerance
    del out, saved, grads, tiled
    cupy.get_default_memory_pool().free_all_blocks()


def test_current_cupy_stream_is_used():
    """On a stream that is blocked by earlier work, results are still ordered after the inputs."""
    cupy = pytest.importorskip("cupy")
    case = RAGGED
    gpu, host = inputs_of(case, "float32")
    want = reference_results(case, host)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.full_like(gpu[0], np.nan)
        for _ in range(50):
            x[...] = cupy.full_like(x, np.nan)
        x[...] = gpu[0]
        got = run(case, [x, *gpu[1:]])
        stream.synchronize()
    assert_close(got, want, "float32")


def test_two_threads_with_own_streams():
    cupy = pytest.importorskip("cupy")
    cases = [RAGGED, UNALIGNED]
    data = [inputs_of(case, "float32") for case in cases]
    cupy.cuda.Device().synchronize()
    results, failures = {}, []

    def work(i):
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for _ in range(20):
                    results[i] = run(cases[i], data[i][0])
                stream.synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for i, case in enumerate(cases):
        assert_close(results[i], reference_results(case, data[i][1]), "float32")


def test_non_default_device():
    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    case = RAGGED
    with cupy.cuda.Device(1):
        gpu, host = inputs_of(case, "float32")
    got = run(case, gpu)  # the current device is 0
    assert got["out"].device.id == 1
    assert_close(got, reference_results(case, host), "float32")


@pytest.mark.parametrize("framework", ["cupy", "torch"])
@pytest.mark.parametrize("case", [PANELS, ONE_EXPERT_EACH, PAIRS_OF_BLOCKS], ids=str)
def test_graph_capture_and_replay(case, framework):
    """Forward and backward replay on new contents of the same buffers, and with counters that start anew."""
    cupy = pytest.importorskip("cupy")
    first, _ = inputs_of(case, "bfloat16", framework)
    second, host = inputs_of(case, "bfloat16", framework, seed=1)
    run(case, first)  # compiles every kernel before the capture
    if framework == "torch":
        torch = pytest.importorskip("torch")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(case, first)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(case, first)
        for old, new in zip(first, second, strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
    else:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            run(case, first)
            stream.synchronize()
            stream.begin_capture()
            got = run(case, first)
            graph = stream.end_capture()
            for old, new in zip(first, second, strict=True):
                old[...] = new
            graph.launch(stream)
            stream.synchronize()
    assert_close(got, reference_results(case, host), "bfloat16")


def test_torch_moe_and_its_gradients():
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import moe

    case = GATE_UP_PAIR
    (x, ids, weights, w1, w2, grad_out), host = inputs_of(case, "bfloat16", "torch")
    leaves = [t.requires_grad_() for t in (x, weights, *w1, w2)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # backward runs in another thread and must follow this stream
        out = moe(x, ids, weights, w1, w2)
        grads = torch.autograd.grad(out, leaves, grad_out)
    side.synchronize()
    want = reference_results(case, host)
    got = dict(zip(("out", "x", "weights", "w1", "w2"), (out, grads[0], grads[1], grads[2:4], grads[4]), strict=True))
    assert_close(
        {n: tuple(g.detach() for g in v) if n == "w1" else v.detach() for n, v in got.items()}, want, "bfloat16"
    )
    with pytest.raises(RuntimeError, match="moe: saved: expected activations that are still there"):
        out = moe(x, ids, weights, w1, w2)
        torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        torch.autograd.grad(out, leaves, grad_out)


def test_torch_module_trains():
    torch = pytest.importorskip("torch")
    from moeblaze_cupy.interop.torch import MoE

    torch.manual_seed(0)
    layer = MoE(128, 64, 8, 2, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 100, 128, device="cuda", dtype=torch.bfloat16)
    target = torch.randn_like(x)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (layer(x) - target).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_errors_of_bf16_are_no_larger_than_the_torch_composition():
    """Each gradient beside that of the same layer written in bf16 torch operations."""
    torch = pytest.importorskip("torch")
    case = Case(L=1024, k=2, E=4, d=512, h=256)
    (x, ids, weights, w1, w2, grad_out), host = inputs_of(case, "bfloat16", "torch")
    want = reference_results(case, host)
    ours = run(case, (x, ids, weights, w1, w2, grad_out))
    leaves = [t.clone().requires_grad_() for t in (x, weights, w1, w2)]
    tx, tweights, tw1, tw2 = leaves
    out = torch.zeros_like(tx)
    for expert in range(case.E):
        tokens, slots = torch.where(ids == expert)
        a, b = (tx[tokens] @ tw1[expert]).chunk(2, dim=-1)
        rows = (torch.nn.functional.silu(a) * b) @ tw2[expert]
        out = out.index_add(0, tokens, (rows * tweights[tokens, slots, None]).to(out.dtype))
    theirs = dict(zip(("x", "weights", "w1", "w2"), torch.autograd.grad(out, leaves, grad_out), strict=True))
    theirs["out"] = out.detach()
    for name, value in theirs.items():
        mine = relative_error_of(ours[name], want[name])
        assert mine <= 1.05 * relative_error_of(value, want[name]), name  # 5%: both are noise of the same rounding


def test_mixed_devices_and_frameworks_are_refused():
    torch = pytest.importorskip("torch")
    (x, ids, weights, w1, w2, _), _ = inputs_of(RAGGED, "float32")
    with pytest.raises(TypeError, match=r"moe_forward: ids: expected a cupy array like x, got numpy"):
        mb.moe_forward(x, ids.get(), weights, w1, w2)
    tensors = [torch.from_numpy(a.get()).cuda() for a in (x, ids, weights, w1, w2)]
    tensors[2] = tensors[2].cpu()
    with pytest.raises(TypeError, match=r"moe_forward: weights: expected x's device cuda:0, got cpu"):
        mb.moe_forward(*tensors)


def test_float64_is_refused_on_the_gpu():
    (x, ids, weights, w1, w2, _), _ = inputs_of(RAGGED, "float32")
    with pytest.raises(TypeError, match=r"moe_forward: x: expected dtype bfloat16 or float16 or float32, got float64"):
        mb.moe_forward(x.astype(np.float64), ids, weights, w1, w2)


def test_nan_stays_with_its_token():
    """A NaN row of x reaches its own output row and gradient, no other."""
    case = replace(RAGGED, L=200)
    (x, ids, weights, w1, w2, grad_out), _ = inputs_of(case, "bfloat16")
    x[17] = np.nan
    out, saved = mb.moe_forward(x, ids, weights, w1, w2)
    grads = mb.moe_backward(grad_out, saved, needs=("x", "weights"))
    for rows in (out, grads.x, grads.weights):
        finite = np.isfinite(to_float64(rows)).all(axis=1)
        assert not finite[17] and finite.sum() == case.L - 1


@pytest.mark.parametrize("case", [GATE_UP_PAIR, ONE_EXPERT_EACH, THREE_PANELS], ids=str)
def test_weights_of_empty_slots_do_not_matter(case):
    """Not even NaN: a router may leave anything where it names no expert."""
    gpu, _ = inputs_of(case, "bfloat16")
    x, ids, weights, w1, w2, grad_out = gpu
    expected = run(case, gpu)
    empty = (ids < 0) | (ids >= case.E)
    assert empty.any()
    weights = weights.copy()
    weights[empty] = np.nan
    got = run(case, [x, ids, weights, w1, w2, grad_out])
    assert all(same_bits(got[name], expected[name]) for name in expected)
