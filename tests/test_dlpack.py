"""Arrays known by nothing but DLPack: in without a copy, and back as the same kind."""

import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.types import ACTIVATIONS
from tests.cases import Case, make_inputs, relative_error

CASE = Case(L=7, k=2, E=3, d=4, h=6)


class Plain:
    """An array with DLPack's two methods, and NumPy's memory inside."""

    device = (1, 0)  # kDLCPU

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device

    def __getitem__(self, key):
        return type(self)(self.values[key])

    def reshape(self, *shape):
        return type(self)(self.values.reshape(*shape))


class WithNamespace(Plain):
    """An array that leads to its namespace, as the array API standard has it."""

    def __array_namespace__(self, api_version=None):
        return SimpleNamespace(from_dlpack=lambda array: WithNamespace(np.from_dlpack(array)))


class Standard:
    """An array with no more than the array API standard asks for: `reshape` is a function, `nbytes` is not there."""

    def __init__(self, values):
        self.values, self.shape = values, values.shape

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return (1, 0)

    def __getitem__(self, key):
        return Standard(self.values[key])

    def __array_namespace__(self, api_version=None):
        return SimpleNamespace(
            from_dlpack=lambda array: Standard(np.from_dlpack(array)),
            reshape=lambda array, shape: Standard(array.values.reshape(shape)),
        )


@pytest.fixture
def of_a_module(monkeypatch):
    """A class whose module has from_dlpack, as older frameworks do."""
    module = ModuleType("tiny_arrays")
    module.Array = type("Array", (Plain,), {"__module__": "tiny_arrays.core"})
    module.from_dlpack = lambda array: module.Array(np.from_dlpack(array))
    monkeypatch.setitem(sys.modules, "tiny_arrays", module)
    return module.Array


@pytest.fixture(params=["namespace", "module"])
def kind(request):
    return WithNamespace if request.param == "namespace" else request.getfixturevalue("of_a_module")


@pytest.fixture
def passed(monkeypatch):
    """Arrays into and out of the NumPy backend, by function."""
    calls = {}

    def spy_on(name):
        original = getattr(reference, name)

        def spying(*args, **options):
            calls[name] = (args, original(*args, **options))
            return calls[name][1]

        monkeypatch.setattr(reference, name, spying)

    for name in ("route", "route_backward", "dispatch", "moe_forward", "moe_backward"):
        spy_on(name)
    return calls


def parts(value):
    return value if isinstance(value, tuple) else (value,)


def wrapped(kind, value):
    return tuple(map(kind, value)) if isinstance(value, tuple) else kind(value)


def assert_same_memory(array, values):
    """Of two arrays or of two pairs."""
    for one, its_values in zip(parts(array), parts(values), strict=True):
        assert type(its_values) is np.ndarray
        assert np.shares_memory(one.values, its_values)
        assert one.values.strides == its_values.strides and one.values.dtype == its_values.dtype


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("order", ["row", "transposed", "pair"])
def test_layer(kind, order, dtype, passed):
    given = make_inputs(Case(L=7, k=2, E=3, d=4, h=6, order=order), 0, dtype)
    want, kept = mb.moe_forward(*given[:5])
    want_grads = mb.moe_backward(given[5], kept)

    *arguments, grad_out = [wrapped(kind, a) for a in given]
    out, saved = mb.moe_forward(*arguments)
    taken, (result, _) = passed["moe_forward"]
    for array, values in zip(arguments, taken, strict=True):
        assert_same_memory(array, values)
    assert type(out) is kind
    assert_same_memory(out, result)
    assert np.array_equal(out.values, want)

    grads = mb.moe_backward(grad_out, saved)
    taken, result = passed["moe_backward"]
    assert_same_memory(grad_out, taken[0])
    for got, values, wanted in zip(grads, result, want_grads, strict=True):
        assert_same_memory(got, values)
        assert all(type(part) is kind for part in parts(got))
        assert all(map(np.array_equal, parts(values), parts(wanted)))


def test_router_and_dispatch(kind, passed):
    logits, grad_weights = np.random.default_rng(0).standard_normal((2, 5, 4), np.float32)
    grad_weights = np.ascontiguousarray(grad_weights[:, :2])
    weights, ids = mb.route(kind(logits), 2)
    assert type(weights) is type(ids) is kind
    assert_same_memory(ids, passed["route"][1][1])
    grad = mb.route_backward(kind(grad_weights), kind(logits), weights, ids)
    assert_same_memory(grad, passed["route_backward"][1])
    index = mb.build_dispatch(ids, 4)
    for name in ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map"):
        assert_same_memory(getattr(index, name), getattr(passed["dispatch"][1], name))
    assert np.shares_memory(index.token_expert_indices.values, ids.values)  # int32 ids are not copied


def test_needs_stay_none(kind):
    *arguments, grad_out = map(kind, make_inputs(CASE, 0))
    _, saved = mb.moe_forward(*arguments)
    grads = mb.moe_backward(grad_out, saved, needs=("weights",))
    assert type(grads.weights) is kind
    assert grads.x is grads.w1 is grads.w2 is None


def test_bad_input_is_named():
    x, ids, weights, _, w2, _ = map(WithNamespace, make_inputs(CASE, 0))
    with pytest.raises(ValueError, match=r"^moe_forward: w1: expected shape \(E, d, 2h\) = \(3, 4, 12\), got"):
        mb.moe_forward(x, ids, weights, w2, w2)


@pytest.mark.parametrize("device", [4, 8, 10])  # kDLOpenCL, kDLMetal, kDLROCM
def test_other_devices_are_refused(kind, device):
    x, *others = map(kind, make_inputs(CASE, 0)[:5])
    x.device = (device, 0)
    with pytest.raises(TypeError) as caught:
        mb.moe_forward(x, *others)
    assert str(caught.value) == f"moe_forward: x: DLPack device: expected CPU or CUDA, got type {device}"


@pytest.mark.parametrize("device", [2, 13])  # kDLCUDA, kDLCUDAManaged
def test_cuda_arrays_need_cupy(kind, device, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    logits = kind(np.zeros((2, 3), np.float32))
    logits.device = (device, 0)
    with pytest.raises(RuntimeError, match=r"^route: logits: CuPy: expected an importable cupy for CUDA arrays"):
        mb.route(logits, 1)


def test_pinned_host_memory_is_cpu_memory(kind):
    ids = kind(np.array([[1, 0], [0, 1]], np.int32))
    ids.device = (3, 0)  # kDLCUDAHost
    assert mb.build_dispatch(ids, 2).expert_token_indices.values.tolist() == [0, 1, 0, 1]


def test_a_framework_must_take_dlpack_back():
    with pytest.raises(TypeError, match=r"^route: logits: DLPack: expected a framework with from_dlpack, got .*Plain"):
        mb.route(Plain(np.zeros((2, 3), np.float32)), 1)


def test_what_dlpack_cannot_carry_is_refused():
    """NumPy has no bfloat16 of its own to exchange."""
    logits = WithNamespace(np.zeros((2, 3), ml_dtypes.bfloat16))
    expected = (
        r"^route: logits: DLPack: expected an array whose memory can be read by NumPy \(no bfloat16: pass float32\)"
    )
    with pytest.raises(TypeError, match=expected):
        mb.route(logits, 1)
    float8 = pytest.importorskip("torch").zeros(2, 3, dtype=pytest.importorskip("torch").float8_e4m3fn)
    of_torch = SimpleNamespace(__dlpack__=float8.__dlpack__, __dlpack_device__=float8.__dlpack_device__)
    with pytest.raises(TypeError, match=expected):
        mb.route(of_torch, 1)


def test_read_only_ids_are_handed_back():
    """To a framework of the older protocol, which has no word for "read-only"."""

    class Unversioned(WithNamespace):
        def __array_namespace__(self, api_version=None):
            return SimpleNamespace(from_dlpack=lambda array: array.__dlpack__() and Unversioned(array))

    values = np.array([[1, 0], [0, 1]], np.int32)
    values.flags.writeable = False
    index = mb.build_dispatch(Unversioned(values), 2)
    assert type(index.token_expert_indices) is Unversioned
    assert index.token_expert_indices.values.tolist() == [1, 0, 0, 1]


def test_index_lists_need_only_the_array_api():
    ids = np.array([[0, 1], [2, 0]], np.int32)
    index, want = mb.build_dispatch(Standard(ids), 3), mb.build_dispatch(ids, 3)
    for name in ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map"):
        assert np.array_equal(getattr(index, name).values, getattr(want, name)), name
    assert index.nbytes == want.nbytes == want.lists.nbytes


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_of_every_dtype(dtype):
    """NumPy's DLPack knows no bfloat16, and exports no read-only arrays, which JAX's are."""
    jax = pytest.importorskip("jax")
    x, ids, weights, w1, w2, grad_out = make_inputs(CASE, 0, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    out, kept = mb.moe_forward(x, ids, weights, w1, w2)
    want = [out, *mb.moe_backward(grad_out, kept)]
    *arguments, grad_out = map(jax.numpy.asarray, (x, ids, weights, w1, w2, grad_out))
    out, kept = mb.moe_forward(*arguments)
    for got, wanted in zip((out, *mb.moe_backward(grad_out, kept)), want, strict=True):
        assert isinstance(got, jax.Array) and got.dtype == wanted.dtype
        assert relative_error(np.asarray(got, np.float32), wanted.astype(np.float32)) <= 1e-6
    index, want_index = mb.build_dispatch(arguments[1], CASE.E), mb.build_dispatch(ids, CASE.E)
    for name in ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map"):
        assert isinstance(getattr(index, name), jax.Array)
        assert np.array_equal(getattr(index, name), getattr(want_index, name))
    routed, chosen = mb.route(arguments[0], 2)
    assert isinstance(routed, jax.Array) and routed.dtype == np.float32
    assert mb.route_backward(routed, arguments[0], routed, chosen).dtype == x.dtype


def test_jax_inside_its_transforms():
    jax = pytest.importorskip("jax")
    logits = jax.numpy.ones((5, 4))
    expected = r"^route: logits: JAX: expected an array with contents: a call outside of jax.jit, .*, got .*Tracer"
    for transform in (jax.jit, jax.vmap):
        with pytest.raises(TypeError, match=expected):
            transform(lambda logits: mb.route(logits, 2)[0])(logits[None] if transform is jax.vmap else logits)


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn"])
def test_jax_of_other_dtypes_is_refused(dtype):
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=f"^route: logits: expected dtype bfloat16 .*, got {dtype}$"):
        mb.route(jax.numpy.ones((5, 4), dtype), 2)


def test_cpu_arrays_of_other_kinds_mix_with_numpy():
    """They are NumPy arrays by the time they are compared; the result is of the other kind."""
    x, *others = make_inputs(CASE, 0)[:5]
    assert type(mb.moe_forward(WithNamespace(x), *others)[0]) is WithNamespace


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_jax(activation):
    jax = pytest.importorskip("jax")
    given = make_inputs(Case(L=7, k=2, E=3, d=4, h=6, activation=activation), 0, np.float32)
    want, kept = mb.moe_forward(*given[:5], activation=activation)
    want_grads = mb.moe_backward(given[5], kept)
    *arguments, grad_out = map(jax.numpy.asarray, given)
    out, saved = mb.moe_forward(*arguments, activation=activation)
    grads = mb.moe_backward(grad_out, saved)
    for got, wanted in zip((out, *grads), (want, *want_grads), strict=True):
        assert isinstance(got, jax.Array)
        assert relative_error(np.asarray(got), wanted) <= 1e-6
    weights, ids = mb.route(jax.numpy.asarray(given[0]), 2)
    assert isinstance(weights, jax.Array) and ids.dtype == np.int32
