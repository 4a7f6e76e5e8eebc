"""Bad input: the type of the error, and a message with the function, the argument, what was expected and what came.

No test here needs a GPU. Where one would be, stand-ins for CUDA tensors show the checks everything they look at: shape,
strides, dtype and device, without memory behind it.
"""

import inspect
import itertools
import re
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import checks, overlaps
from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda import launch_config, loader, runtime
from moeblaze_cupy.router import config as router_config
from moeblaze_cupy.types import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    DispatchIndices,
    LayerArrays,
    LayerOptions,
    SavedForBackward,
    gate_and_up,
)
from tests import fakes
from tests.cases import Case, make_inputs, relative_error
from tests.conftest import MISSING_GPU
from tests.environment import run_python

L, K, E, D, H = 5, 2, 3, 4, 6
BF16 = ml_dtypes.bfloat16
ANY_ARRAY = "expected a NumPy, CuPy or torch array, or one with __dlpack__"
INNER_ORDER = "expected the last dimension contiguous, or the transposed view of an array whose last dimension is"
ONE_ACTIVATION = "expected one of " + ", ".join(map(repr, ACTIVATIONS))
PAGE = "; docs/activations.md says what each is and how to add one"
CONTIGUOUS = "expected a C-contiguous array, as of .contiguous() or np.ascontiguousarray"
STORED = "; pass its transposed view, .swapaxes(1, 2)?"
NO_CUPY = "moeblaze_cupy: CuPy: expected an importable cupy for CUDA arrays"


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def ids(*shape, dtype=np.int32):
    return np.zeros(shape, dtype)


def strided(*shape, strides):
    """float32 zeros with these strides, in elements."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    return np.lib.stride_tricks.as_strided(zeros(size), shape, [4 * s for s in strides])


class Tensor:
    """What the package sees of a CUDA tensor."""

    __module__ = "torch"

    def __init__(self, shape, dtype, strides=None, device=0):
        self.shape, self.dtype = tuple(shape), f"torch.{dtype}"
        self.is_cuda, self.ordinal = True, device
        row_major = tuple(itertools.accumulate((1, *reversed(self.shape[1:])), lambda a, b: a * b))[::-1]
        self.strides = row_major[-len(self.shape) :] if strides is None else tuple(strides)

    def get_device(self):
        return self.ordinal

    def stride(self):
        return self.strides

    def data_ptr(self):
        return 1 << 46

    def is_neg(self):
        return False


def as_tensor(array):
    pytest.importorskip("torch")
    return arrays.Torch.from_numpy(array)


def as_cuda(array, device=0):
    return Tensor(array.shape, array.dtype.name, (s // array.itemsize for s in array.strides), device)


BACKENDS = {"numpy": lambda array: array, "torch": as_tensor, "cuda": as_cuda}


def convert(value, to):
    if isinstance(value, (tuple, list)):
        return type(value)(convert(v, to) for v in value)
    if isinstance(value, dict):
        return {name: convert(v, to) for name, v in value.items()}
    return to(value) if isinstance(value, np.ndarray) else value


def saved(x=None, consumed=False, w1=None, to=lambda array: array):
    index = DispatchIndices(to(ids(4 * L * K)), to(ids(L, K)), {}, E)
    gate, up = gate_and_up(to(zeros(E, D, 2 * H)) if w1 is None else w1)
    x = to(zeros(L, D)) if x is None else x
    layer = LayerArrays(x, None, to(zeros(L, K)), gate, up, to(zeros(E, H, D)))
    return SavedForBackward(layer, LayerOptions(), index, None, None, consumed)


GOOD = {
    "route": {"logits": zeros(L, E), "k": K},
    "route_backward": {
        "grad_weights": zeros(L, K),
        "logits": zeros(L, E),
        "weights": zeros(L, K),
        "ids": ids(L, K),
    },
    "build_dispatch": {"ids": ids(L, K), "num_experts": E},
    "moe_forward": {
        "x": zeros(L, D),
        "ids": ids(L, K),
        "weights": zeros(L, K),
        "w1": zeros(E, D, 2 * H),
        "w2": zeros(E, H, D),
    },
    "moe_backward": {"grad_out": zeros(L, D), "saved": saved()},
}


@dataclass(frozen=True)
class Bad:
    """A call with `changes` to its good arguments, and its error; `message` leaves out the function's name."""

    function: str
    changes: dict
    error: type
    message: str

    def __str__(self):
        return f"{self.function}: {self.message}"


def forward(error, message, **changes):
    return Bad("moe_forward", changes, error, message)


def backward(error, message, **changes):
    return Bad("moe_backward", changes, error, message)


def route(error, message, **changes):
    return Bad("route", changes, error, message)


def route_backward(error, message, **changes):
    return Bad("route_backward", changes, error, message)


def dispatch(error, message, **changes):
    return Bad("build_dispatch", changes, error, message)


def call(function, to, changes):
    arguments = {name: convert(value, to) for name, value in {**GOOD[function], **changes}.items()}
    if isinstance(arguments.get("saved"), SavedForBackward):
        given = arguments["saved"]
        arguments["saved"] = saved(convert(given.x, to), given.consumed, convert(given.w1, to), to)
    return getattr(mb, function)(**arguments)


def accumulated(error, message, saved=None, **arrays):
    ((name, array),) = arrays.items()
    changes = {"accumulate": {name: array}} | ({} if saved is None else {"saved": saved})
    return Bad("moe_backward", changes, error, f"accumulate[{name!r}]: {message}")


MAX_E, MAX_ROUTER_E = launch_config.MAX_EXPERTS, router_config.MAX_ROUTER_EXPERTS
PAIR = (zeros(E, D, H), zeros(E, D, H))

BAD = [
    forward(TypeError, "tf32: expected True or False, got 'yes'", tf32="yes"),
    forward(
        ValueError,
        "tf32: expected False for x of float16, as TF32 stands in for float32, got True",
        **{name: GOOD["moe_forward"][name].astype(np.float16) for name in ("x", "w1", "w2")},
        tf32=True,
    ),
    # not an array
    forward(TypeError, f"x: {ANY_ARRAY}, got <class 'list'>", x=[[1.0] * D] * L),
    forward(TypeError, f"ids: {ANY_ARRAY}, got <class 'NoneType'>", ids=None),
    forward(TypeError, f"weights: {ANY_ARRAY}, got <class 'float'>", weights=1.0),
    forward(TypeError, f"w1: {ANY_ARRAY}, got <class 'str'>", w1="w1"),
    forward(TypeError, f"w1[1]: {ANY_ARRAY}, got <class 'NoneType'>", w1=(zeros(E, D, H), None)),
    forward(TypeError, f"w2: {ANY_ARRAY}, got <class 'dict'>", w2={}),
    backward(TypeError, f"grad_out: {ANY_ARRAY}, got <class 'NoneType'>", grad_out=None),
    route(TypeError, f"logits: {ANY_ARRAY}, got <class 'list'>", logits=[[0.0]]),
    route_backward(TypeError, f"weights: {ANY_ARRAY}, got <class 'NoneType'>", weights=None),
    dispatch(TypeError, f"ids: {ANY_ARRAY}, got <class 'range'>", ids=range(3)),
    # shapes of the layer
    forward(
        ValueError,
        "x: expected shape (L, d) = (any, any), got (1, 5, 4); x.reshape(-1, 4) has this form",
        x=zeros(1, L, D),
    ),
    forward(ValueError, "x: expected shape (L, d) = (any, any), got (4,)", x=zeros(D)),
    forward(ValueError, "x: expected shape (L, d) = (any, any), got ()", x=zeros()),
    forward(ValueError, "x: expected shape (L, d) with d >= 1, got (5, 0)", x=zeros(L, 0)),
    forward(ValueError, "w2: expected shape (E, h, d) = (any, any, 4), got (6, 4)", w2=zeros(H, D)),
    forward(ValueError, "w2: expected shape (E, h, d) = (any, any, 4), got (3, 6, 5)", w2=zeros(E, H, D + 1)),
    forward(ValueError, f"w2: expected shape (E, h, d) = (any, any, 4), got (3, 4, 6){STORED}", w2=zeros(E, D, H)),
    forward(ValueError, "w2: expected shape (E, h, d) with h >= 1, got (3, 0, 4)", w2=zeros(E, 0, D)),
    forward(
        ValueError,
        f"w2: expected shape (E, h, d) with E from 1 to {MAX_E}, got (0, 6, 4)",
        w1=zeros(0, D, 2 * H),
        w2=zeros(0, H, D),
    ),
    forward(
        ValueError,
        f"w2: expected shape (E, h, d) with E from 1 to {MAX_E}, got ({MAX_E + 1}, 1, 4)",
        w1=zeros(MAX_E + 1, D, 2),
        w2=zeros(MAX_E + 1, 1, D),
    ),
    forward(ValueError, "w1: expected shape (E, d, 2h) = (3, 4, 12), got (4, 12)", w1=zeros(D, 2 * H)),
    forward(
        ValueError, "w1 and w2: expected as many experts in both, got (2, 4, 12) and (3, 6, 4)", w1=zeros(2, D, 12)
    ),
    forward(
        ValueError,
        "w1[0] and w2: expected as many experts in both, got (2, 4, 6) and (3, 6, 4)",
        w1=(zeros(2, D, H), PAIR[1]),
    ),
    forward(ValueError, "w1: expected shape (E, d, 2h) = (3, 4, 12), got (3, 5, 12)", w1=zeros(E, 5, 2 * H)),
    forward(ValueError, f"w1: expected shape (E, d, 2h) = (3, 4, 12), got (3, 12, 4){STORED}", w1=zeros(E, 2 * H, D)),
    forward(
        ValueError,
        f"w1[1]: expected shape (E, d, h) = (3, 4, 6), got (3, 6, 4){STORED}",
        w1=(PAIR[0], zeros(E, H, D)),
    ),
    forward(ValueError, "w1: expected one array or a pair (gate, up), got 0 arrays", w1=()),
    forward(
        ValueError,
        "w1: expected one array or a pair (gate, up), got 3 arrays; torch.stack or np.stack makes one of them",
        w1=(zeros(E, D, H),) * 3,
    ),
    forward(
        ValueError,
        "w1[0] and w2: expected one h in shapes (E, d, h) and (E, h, d), got (3, 4, 7) and (3, 6, 4)",
        w1=(zeros(E, D, 7), PAIR[1]),
    ),
    forward(ValueError, "w1[1]: expected shape (E, d, h) = (3, 4, 6), got (4, 6)", w1=(PAIR[0], zeros(D, H))),
    forward(ValueError, "ids: expected shape (L, k) = (5, any), got (10,)", ids=ids(L * K)),
    forward(ValueError, "ids: expected shape (L, k) = (5, any), got (4, 2)", ids=ids(L - 1, K)),
    forward(ValueError, "ids: expected shape (L, k) with k >= 1, got (5, 0)", ids=ids(L, 0), weights=zeros(L, 0)),
    forward(ValueError, "weights: expected shape (L, k) = (5, 2), got (5, 3)", weights=zeros(L, K + 1)),
    forward(ValueError, "weights: expected shape (L, k) = (5, 2), got (10,)", weights=zeros(L * K)),
    # the form of w1 and the activation
    *(
        forward(
            ValueError,
            "w1 and w2: expected one h in shapes (E, d, 2h) and (E, h, d), got (3, 4, 6) and (3, 6, 4)"
            "; 'silu' and other activations without a gate take w1 (E, d, h)",
            w1=zeros(E, D, H),
            activation=activation,
        )
        for activation in GATED_ACTIVATIONS
    ),
    *(
        forward(
            ValueError,
            "w1: expected shape (E, d, h) = (3, 4, 6), got (3, 4, 12); "
            f"{activation!r} has no gate: for columns of gate and up choose one that has, such as 'swiglu'",
            activation=activation,
        )
        for activation in ACTIVATIONS
        if activation not in GATED_ACTIVATIONS
    ),
    forward(
        ValueError, "w1: expected one array (E, d, h) for activation 'silu', got a pair", w1=PAIR, activation="silu"
    ),
    # dtypes
    forward(
        TypeError, "x: expected dtype bfloat16 or float16 or float32 or float64, got int32", x=zeros(L, D, dtype="i4")
    ),
    forward(
        TypeError,
        "x: expected dtype bfloat16 or float16 or float32 or float64, got complex64",
        x=zeros(L, D, dtype=np.complex64),
    ),
    forward(TypeError, "ids: expected dtype int32 or int64, got int8", ids=ids(L, K, dtype=np.int8)),
    forward(TypeError, "ids: expected dtype int32 or int64, got float32", ids=zeros(L, K)),
    forward(TypeError, "weights: expected dtype float32, got float64", weights=zeros(L, K, dtype=np.float64)),
    forward(TypeError, "weights: expected dtype float32, got bfloat16", weights=zeros(L, K, dtype=BF16)),
    forward(TypeError, "weights: expected dtype float32, got int32", weights=ids(L, K)),
    forward(
        TypeError,
        "weights: expected dtype float32 or bfloat16, got float16",
        x=zeros(L, D, dtype=BF16),
        w1=zeros(E, D, 2 * H, dtype=BF16),
        w2=zeros(E, H, D, dtype=BF16),
        weights=zeros(L, K, dtype=np.float16),
    ),
    forward(TypeError, "w1: expected dtype float16, that of x, got float32", x=zeros(L, D, dtype=np.float16)),
    forward(TypeError, "w1: expected dtype float32, that of x, got bfloat16", w1=zeros(E, D, 2 * H, dtype=BF16)),
    forward(
        TypeError,
        "w1[1]: expected dtype float32, that of x, got float16",
        w1=(PAIR[0], zeros(E, D, H, dtype=np.float16)),
    ),
    forward(TypeError, "w2: expected dtype float32, that of x, got float16", w2=zeros(E, H, D, dtype=np.float16)),
    # memory order
    forward(
        ValueError,
        f"x: {CONTIGUOUS}, got strides (1, 5) for shape (5, 4)",
        x=zeros(D, L).swapaxes(0, 1),
    ),
    forward(ValueError, f"x: {CONTIGUOUS}, got strides (8, 2) for shape (5, 4)", x=zeros(L, 2 * D)[:, ::2]),
    forward(ValueError, f"x: {CONTIGUOUS}, got strides (9, 1) for shape (5, 4)", x=zeros(L, 9)[:, :D]),
    forward(ValueError, f"ids: {CONTIGUOUS}, got strides (3, 1) for shape (5, 2)", ids=ids(L, K + 1)[:, :K]),
    forward(
        ValueError,
        f"weights: {CONTIGUOUS}, got strides (1, 5) for shape (5, 2)",
        weights=zeros(K, L).swapaxes(0, 1),
    ),
    forward(
        ValueError,
        f"w1: {INNER_ORDER}, got strides (96, 24, 2) for shape (3, 4, 12)",
        w1=zeros(E, D, 4 * H)[:, :, ::2],
    ),
    forward(
        ValueError,
        f"w1[1]: {INNER_ORDER}, got strides (48, 12, 2) for shape (3, 4, 6)",
        w1=(PAIR[0], zeros(E, D, 2 * H)[:, :, ::2]),
    ),
    forward(
        ValueError,
        f"w2: {INNER_ORDER}, got strides (1, 12, 3) for shape (3, 6, 4)",
        w2=strided(E, H, D, strides=(1, 12, 3)),
    ),
    forward(
        ValueError,
        f"w2: {INNER_ORDER}, got strides (0, 0, 0) for shape (3, 6, 4)",
        w2=strided(E, H, D, strides=(0, 0, 0)),
    ),
    forward(
        ValueError,
        "w1: expected gate and up with equal strides, got (24, 6, 1) and (48, 12, 1)",
        w1=(PAIR[0], zeros(E, D, 2 * H)[:, :, H:]),
    ),
    forward(
        ValueError,
        "w1: expected gate and up with equal strides, got (24, 6, 1) and (24, 1, 4)",
        w1=(PAIR[0], zeros(E, H, D).swapaxes(1, 2)),
    ),
    # names
    forward(ValueError, f"activation: {ONE_ACTIVATION}, got 'swish'{PAGE}", activation="swish"),
    forward(ValueError, f"activation: {ONE_ACTIVATION}, got None{PAGE}", activation=None),
    forward(ValueError, "save: expected one of 'minimal', 'fp8', 'paper', 'recompute', None, got 'all'", save="all"),
    forward(ValueError, "save: expected one of 'minimal', 'fp8', 'paper', 'recompute', None, got True", save=True),
    # backward
    backward(ValueError, "grad_out: expected shape (L, d) = (5, 4), got (5, 5)", grad_out=zeros(L, D + 1)),
    backward(ValueError, "grad_out: expected shape (L, d) = (5, 4), got (20,)", grad_out=zeros(L * D)),
    backward(ValueError, "grad_out: expected shape (L, d) = (5, 4), got ()", grad_out=zeros()),
    backward(TypeError, "grad_out: expected dtype float32, got float64", grad_out=zeros(L, D, dtype=np.float64)),
    backward(TypeError, "grad_out: expected dtype float32, got bfloat16", grad_out=zeros(L, D, dtype=BF16)),
    backward(
        ValueError,
        f"grad_out: {CONTIGUOUS}, got strides (1, 5) for shape (5, 4)",
        grad_out=zeros(D, L).swapaxes(0, 1),
    ),
    backward(
        ValueError,
        f"grad_out: {CONTIGUOUS}, got strides (0, 0) for shape (5, 4)",
        grad_out=strided(L, D, strides=(0, 0)),
    ),
    backward(
        TypeError,
        "saved: expected SavedForBackward from moe_forward (save is not None), got <class 'NoneType'>",
        saved=None,
    ),
    backward(
        TypeError, "saved: expected SavedForBackward from moe_forward (save is not None), got <class 'tuple'>", saved=()
    ),
    backward(
        RuntimeError,
        "saved: expected activations that are still there, got ones that an earlier backward overwrote with their "
        "gradients; pass keep_saved=True to the earlier call",
        saved=saved(consumed=True),
    ),
    backward(ValueError, "needs: expected one of 'x', 'weights', 'w1', 'w2', got 'w3'", needs=("x", "w3")),
    backward(ValueError, "needs: expected one of 'x', 'weights', 'w1', 'w2', got 1", needs=(1,)),
    backward(TypeError, "needs: expected a tuple of names from 'x', 'weights', 'w1', 'w2', got 'w1'", needs="w1"),
    backward(TypeError, "needs: expected a tuple of names from 'x', 'weights', 'w1', 'w2', got 1", needs=1),
    backward(
        TypeError,
        "accumulate: expected a mapping from 'w1' and 'w2' to arrays, got <class 'tuple'>",
        accumulate=(zeros(E, D, 2 * H), zeros(E, H, D)),
    ),
    backward(ValueError, "accumulate: expected one of 'w1', 'w2', got 'x'", accumulate={"x": zeros(L, D)}),
    backward(
        ValueError,
        "accumulate: expected names that are in needs, ('x', 'w1'), got 'w2'",
        accumulate={"w2": zeros(E, H, D)},
        needs=("x", "w1"),
    ),
    accumulated(TypeError, "expected a NumPy, CuPy or torch array, got <class 'NoneType'>", w2=None),
    accumulated(TypeError, "expected dtype float32, got float64", w2=zeros(E, H, D, dtype=np.float64)),
    accumulated(TypeError, "expected dtype float32, got bfloat16", w1=zeros(E, D, 2 * H, dtype=BF16)),
    accumulated(ValueError, "expected the weight's shape (3, 6, 4), got (3, 4, 6)", w2=zeros(E, D, H)),
    accumulated(ValueError, "expected the weight's shape (3, 6, 4), got (72,)", w2=zeros(E * H * D)),
    accumulated(ValueError, "expected one array, as the weight is, got a pair (gate, up)", w1=PAIR),
    accumulated(ValueError, "expected one array or a pair (gate, up), got 0 arrays", w2=()),
    accumulated(
        ValueError, "expected a pair (gate, up), as the weight is, got one array", saved=saved(w1=PAIR), w1=PAIR[0]
    ),
    accumulated(
        ValueError,
        f"{INNER_ORDER}, got strides (48, 8, 2) for shape (3, 6, 4)",
        w2=zeros(E, H, 2 * D)[:, :, ::2],
    ),
    accumulated(
        ValueError,
        "expected an array without overlaps, got strides (0, 4, 1) for shape (3, 6, 4)",
        w2=strided(E, H, D, strides=(0, 4, 1)),
    ),
    accumulated(
        ValueError,
        "expected an array without overlaps, got strides (24, 3, 1) for shape (3, 6, 4)",
        w2=strided(E, H, D, strides=(24, 3, 1)),
    ),
    accumulated(
        ValueError,
        "expected gate and up with equal strides, got (24, 6, 1) and (24, 1, 4)",
        saved=saved(w1=PAIR),
        w1=(PAIR[0], zeros(E, H, D).swapaxes(1, 2)),
    ),
    # dispatch
    dispatch(ValueError, "ids: expected shape (L, k) with k >= 1, got (10,)", ids=ids(L * K)),
    dispatch(ValueError, "ids: expected shape (L, k) with k >= 1, got ()", ids=ids()),
    dispatch(ValueError, "ids: expected shape (L, k) with k >= 1, got (5, 0)", ids=ids(L, 0)),
    dispatch(TypeError, "ids: expected dtype int32 or int64, got int8", ids=ids(L, K, dtype=np.int8)),
    dispatch(TypeError, "ids: expected dtype int32 or int64, got bool", ids=ids(L, K, dtype=bool)),
    dispatch(
        ValueError,
        f"ids: {CONTIGUOUS}, got strides (1, 5) for shape (5, 2)",
        ids=ids(K, L).swapaxes(0, 1),
    ),
    dispatch(ValueError, f"num_experts: expected 1 to {MAX_E}, got 0", num_experts=0),
    dispatch(ValueError, f"num_experts: expected 1 to {MAX_E}, got {MAX_E + 1}", num_experts=MAX_E + 1),
    dispatch(TypeError, "num_experts: expected an int, got 3.0", num_experts=3.0),
    dispatch(TypeError, "num_experts: expected an int, got True", num_experts=True),
    dispatch(TypeError, "num_experts: expected an int, got '3'", num_experts="3"),
    # router
    route(ValueError, "logits: expected shape (L, E) = (any, any), got (3,)", logits=zeros(E)),
    route(ValueError, "logits: expected shape (L, E) = (any, any), got (1, 5, 3)", logits=zeros(1, L, E)),
    route(ValueError, f"logits: expected 1 to {MAX_ROUTER_E} experts, got 0", logits=zeros(L, 0)),
    route(
        ValueError,
        f"logits: expected 1 to {MAX_ROUTER_E} experts, got {MAX_ROUTER_E + 1}",
        logits=zeros(L, MAX_ROUTER_E + 1),
    ),
    route(TypeError, "logits: expected dtype bfloat16 or float16 or float32 or float64, got int32", logits=ids(L, E)),
    route(
        ValueError,
        f"logits: {CONTIGUOUS}, got strides (1, 5) for shape (5, 3)",
        logits=zeros(E, L).swapaxes(0, 1),
    ),
    route(ValueError, "k: expected 1 to 3 (E = 3 experts, at most 64), got 0", k=0),
    route(ValueError, "k: expected 1 to 3 (E = 3 experts, at most 64), got -1", k=-1),
    route(ValueError, "k: expected 1 to 3 (E = 3 experts, at most 64), got 4", k=4),
    route(ValueError, "k: expected 1 to 64 (E = 128 experts, at most 64), got 65", logits=zeros(L, 128), k=65),
    route(TypeError, "k: expected an int, got 2.0", k=2.0),
    route(TypeError, "k: expected an int, got True", k=True),
    route(TypeError, "k: expected an int, as there are no ids, got None", k=None),
    route(
        ValueError,
        "score: expected one of 'softmax', 'sigmoid', 'sqrt_softplus', 'identity', 'relu', got 'tanh'",
        score="tanh",
    ),
    route(
        ValueError,
        "score: expected one of 'softmax', 'sigmoid', 'sqrt_softplus', 'identity', 'relu', got None",
        score=None,
    ),
    route(TypeError, "eps: expected a number, got '0'", eps="0"),
    route(TypeError, "eps: expected a number, got True", eps=True),
    route(ValueError, "eps: expected a finite number from 0 on, in float32, got -1.0", eps=-1),
    route(ValueError, "eps: expected a finite number from 0 on, in float32, got nan", eps=np.nan),
    route(ValueError, "scale: expected a finite number other than 0, in float32, got 0.0", scale=0),
    route(ValueError, "scale: expected a finite number other than 0, in float32, got inf", scale=np.inf),
    route(ValueError, "scale: expected a finite number other than 0, in float32, got 1e-300", scale=1e-300),
    route(ValueError, "scale: expected a finite number other than 0, in float32, got 1e+39", scale=1e39),
    route(ValueError, "eps: expected a finite number from 0 on, in float32, got inf", eps=10**400),
    route(ValueError, "bias_on: expected one of 'scores', 'logits', got 'weights'", bias_on="weights"),
    route(ValueError, "bias: expected shape (E,) = (3,) or (L, E) = (5, 3), got (5,)", bias=zeros(L)),
    route(TypeError, "bias: expected dtype float32, got float16", bias=zeros(E, dtype=np.float16)),
    route(TypeError, f"bias: {ANY_ARRAY}, got <class 'float'>", bias=1.0),
    route(
        ValueError,
        f"bias: {CONTIGUOUS}, got strides (0, 1) for shape (5, 3)",
        bias=strided(L, E, strides=(0, 1)),
    ),
    route(TypeError, "groups: expected None or three ints (groups, kept, top), got 4", groups=4),
    route(TypeError, "groups: expected an int, got 1.0", groups=(3, 1.0, 1)),
    route(
        ValueError,
        "groups: expected (groups, kept, top) with 1 <= kept <= groups and top >= 1, got (3, 4, 1)",
        groups=(3, 4, 1),
    ),
    route(ValueError, "groups: expected a number of groups that divides E = 3, got 2", groups=(2, 1, 1)),
    route(ValueError, "groups: expected top of at most the E / groups = 1 experts of one, got 2", groups=(3, 3, 2)),
    route(ValueError, "k: expected at most the 1 experts of the 1 kept groups of 1, got 2", groups=(3, 1, 1)),
    route(ValueError, "ids: expected shape (L, k) = (5, any), got (4, 2)", ids=ids(L - 1, K)),
    route(ValueError, "ids: expected shape (L, k) with k >= 1, got (5, 0)", ids=ids(L, 0), k=None),
    route(TypeError, "ids: expected dtype int32 or int64, got float32", ids=zeros(L, K)),
    route(ValueError, "k: expected None or the 3 slots of ids, got 2", ids=ids(L, 3)),
    route(ValueError, "k: expected None beside token_offsets, got 2", ids=ids(7), token_offsets=ids(L + 1)),
    route(ValueError, "ids: expected shape (P) = (any), got (5, 2)", ids=ids(L, K), token_offsets=ids(L + 1), k=None),
    route(ValueError, "token_offsets: expected None without ids, got offsets", token_offsets=ids(L + 1)),
    route(ValueError, "token_offsets: expected shape (L+1) = (6), got (5,)", ids=ids(7), token_offsets=ids(L), k=None),
    route(
        TypeError,
        "token_offsets: expected dtype int32, got int64",
        ids=ids(7),
        token_offsets=ids(L + 1, dtype=np.int64),
        k=None,
    ),
    route(ValueError, "token_mask: expected shape (L) = (5), got (5, 1)", token_mask=zeros(L, 1, dtype=bool)),
    route(TypeError, "token_mask: expected dtype bool, got float32", token_mask=zeros(L)),
    route(ValueError, "top_p: expected None or a number above 0, got 0.0", top_p=0),
    route(ValueError, "top_p: expected None beside ids, which are not selected, got 0.5", top_p=0.5, ids=ids(L, K)),
    route(TypeError, "threshold: expected a number, got '1'", threshold="1"),
    route(ValueError, "threshold: expected None or a number, got nan", threshold=np.nan),
    route(
        TypeError,
        "sums: expected a tuple of names from 'softmax', 'sigmoid', 'sqrt_softplus', 'z', 'entropy', got 'z'",
        sums="z",
    ),
    route(
        ValueError, "sums: expected one of 'softmax', 'sigmoid', 'sqrt_softplus', 'z', 'entropy', got 'p'", sums=("p",)
    ),
    route(
        ValueError,
        "sums: expected at most one of 'softmax', 'sigmoid', 'sqrt_softplus', got ('softmax', 'sigmoid')",
        sums=("softmax", "sigmoid"),
    ),
    route(TypeError, "sequences: expected an int or an array of offsets, got 1.0", sequences=1.0),
    route(TypeError, "sequences: expected an int or an array of offsets, got None", sequences=None, sums=("z",)),
    route(TypeError, "sequences: expected an int or an array of offsets, got [0, 5]", sequences=[0, 5]),
    route(ValueError, "sequences: expected offsets, or a number >= 1 that divides L = 5, got 0", sequences=0),
    route(ValueError, "sequences: expected offsets, or a number >= 1 that divides L = 5, got 2", sequences=2),
    route(ValueError, "sequences: expected an int, or offsets of shape (S+1,) with S >= 1, got (1,)", sequences=ids(1)),
    route(TypeError, "sequences: expected dtype int32, got float32", sequences=zeros(3)),
    route_backward(
        ValueError, "grad_weights: expected shape (L, k) = (5, 2), got (5, 3)", grad_weights=zeros(L, K + 1)
    ),
    route_backward(
        TypeError, "grad_weights: expected dtype float32, got float16", grad_weights=zeros(L, K, dtype=np.float16)
    ),
    route_backward(
        ValueError,
        f"grad_weights: {CONTIGUOUS}, got strides (0, 1) for shape (5, 2)",
        grad_weights=strided(L, K, strides=(0, 1)),
    ),
    route_backward(ValueError, "weights: expected shape (L, k) = (5, any), got (10,)", weights=zeros(L * K)),
    route_backward(ValueError, "weights: expected shape (L, k) = (5, any), got (4, 2)", weights=zeros(L - 1, K)),
    route_backward(TypeError, "weights: expected dtype float32, got float64", weights=zeros(L, K, dtype=np.float64)),
    route_backward(ValueError, "ids: expected shape (L, k) = (5, 2), got (10,)", ids=ids(L * K)),
    route_backward(TypeError, "ids: expected dtype int32, got int64", ids=ids(L, K, dtype=np.int64)),
    route_backward(ValueError, "logits: expected shape (L, E) = (any, any), got ()", logits=zeros()),
    route_backward(
        TypeError, "logits: expected dtype bfloat16 or float16 or float32 or float64, got int32", logits=ids(L, E)
    ),
    route(TypeError, "renormalize: expected True, False or None, got 'no'", renormalize="no"),
    route_backward(TypeError, "renormalize: expected True, False or None, got 1", renormalize=1),
    route_backward(
        ValueError,
        "score: expected one of 'softmax', 'sigmoid', 'sqrt_softplus', 'identity', 'relu', got 'top1'",
        score="top1",
    ),
    route_backward(
        ValueError,
        "grad_z_sums: expected None, as sums does not name it, got sums=('softmax',)",
        sums=("softmax",),
        grad_z_sums=zeros(1),
    ),
    route_backward(
        ValueError,
        "grad_score_sums: expected shape (S, E) = (1, 3), got (5, 3)",
        sums=("sigmoid",),
        grad_score_sums=zeros(L, E),
    ),
    route_backward(
        ValueError,
        "grad_entropy_sums: expected shape (S) = (5), got (1,)",
        sums=("entropy",),
        sequences=5,
        grad_entropy_sums=zeros(1),
    ),
    route_backward(
        TypeError,
        "grad_z_sums: expected dtype float32, got float64",
        sums=("z",),
        grad_z_sums=zeros(1, dtype=np.float64),
    ),
    route_backward(ValueError, "weights: expected shape (P) = (any), got (5, 2)", token_offsets=ids(L + 1)),
    route_backward(TypeError, "sequences: expected an int or an array of offsets, got None", sequences=None),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_bad_input(bad, backend):
    message = bad.message.replace(" or float64", "") if backend == "cuda" else bad.message
    if backend != "numpy":
        message = message.replace(".swapaxes(1, 2)?", ".transpose(1, 2)?")
    with pytest.raises(bad.error) as caught:
        call(bad.function, BACKENDS[backend], bad.changes)
    assert type(caught.value) is bad.error
    assert str(caught.value) == f"{bad.function}: {message}"


def test_an_array_for_a_name():
    """Comparing it with the names would give an array of answers."""
    with pytest.raises(ValueError) as caught:
        call("moe_forward", BACKENDS["numpy"], {"activation": np.array([1, 2])})
    assert str(caught.value) == f"moe_forward: activation: {ONE_ACTIVATION}, got array([1, 2]){PAGE}"


ROUTE_OPTIONS = set(inspect.signature(mb.route).parameters) - {"k"}


def test_every_argument_has_a_bad_case():
    options = {
        "moe_forward": {"activation", "save"},
        "moe_backward": {"needs", "accumulate"},
        "route": {*ROUTE_OPTIONS},
    }
    for function, arguments in GOOD.items():
        changed = set().union(*(bad.changes for bad in BAD if bad.function == function))
        assert changed >= set(arguments) | options.get(function, set())


def test_parts_of_accumulated_pairs_are_named():
    wrong = {"saved": saved(w1=PAIR), "accumulate": {"w1": (PAIR[0], zeros(E, D, H + 1))}}
    with pytest.raises(ValueError) as caught:
        call("moe_backward", BACKENDS["numpy"], wrong)
    assert str(caught.value) == (
        "moe_backward: accumulate['w1'][1]: expected the weight's shape (3, 4, 6), got (3, 4, 7)"
    )


def test_accumulated_arrays_can_be_written():
    total = zeros(E, H, D)
    total.flags.writeable = False
    with pytest.raises(ValueError) as caught:
        call("moe_backward", BACKENDS["numpy"], {"accumulate": {"w2": total}})
    assert str(caught.value) == (
        "moe_backward: accumulate['w2']: expected an array that can be written, got a read-only one"
    )


def layer_arrays(order="row", xp=lambda array: array):
    """Unit-scale inputs of a small layer, and what forward kept of them."""
    case = Case(L=9, k=2, E=3, d=4, h=6, order=order)
    x, chosen, weights, w1, w2, grad_out = (convert(a, xp) for a in make_inputs(case, 0, np.float32))
    _, kept = mb.moe_forward(x, chosen, weights, w1, w2)
    return kept, grad_out


def end_to_end(first, second):
    """The first's values and zeros in the second's shape, as views of one buffer that have one element in common."""
    flat = np.zeros(first.size + second.size - 1, first.dtype)
    flat[: first.size] = first.reshape(-1)
    return flat[: first.size].reshape(first.shape), flat[first.size - 1 :].reshape(second.shape)


@pytest.mark.parametrize("other", ["saved.w1", "saved.w2", "grad_out", "saved.x", "saved.first_layer", "w1"])
def test_sums_do_not_lie_over_what_backward_reads(other):
    kept, grad_out = layer_arrays()
    name, total = "w2", None
    if other in ("saved.w1", "saved.w2"):
        name, total = other[-2:], getattr(kept, other[-2:])
    elif other == "grad_out":
        grad_out, total = end_to_end(grad_out, kept.w2)
    elif other != "w1":
        field = other.partition(".")[2]
        moved, total = end_to_end(getattr(kept, field), kept.w2)
        if field == "x":
            kept.arrays = kept.arrays._replace(x=moved)
        else:
            setattr(kept, field, moved)
    totals = {name: total}
    if other == "w1":
        totals, other = dict(zip(("w1", "w2"), end_to_end(kept.w1, kept.w2), strict=True)), "accumulate['w1']"
    before = {name: array.copy() for name, array in totals.items()}
    with pytest.raises(ValueError) as caught:
        mb.moe_backward(grad_out, kept, accumulate=totals)
    assert str(caught.value) == (
        f"moe_backward: accumulate[{name!r}]: expected memory apart from {other}, got an array that overlaps it"
    )
    assert all(np.array_equal(totals[name], array) for name, array in before.items())


@pytest.mark.parametrize("xp", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["slices", "column halves", "row halves", "experts in turn"])
def test_sums_may_lie_among_each_other(layout, xp):
    """Views of one buffer, as optimizers make them, also where their address ranges meet."""
    kept, grad_out = layer_arrays("pair", BACKENDS[xp])
    experts, d, h = 3, 4, 6
    plain = mb.moe_backward(grad_out, kept, keep_saved=True)
    if layout == "slices":
        flat = BACKENDS[xp](np.zeros(3 * experts * d * h, np.float32))
        gate, up, second = (flat[i * experts * d * h : (i + 1) * experts * d * h] for i in range(3))
        gate, up, second = gate.reshape(experts, d, h), up.reshape(experts, d, h), second.reshape(experts, h, d)
    else:
        second = BACKENDS[xp](np.zeros((experts, h, d), np.float32))
        if layout == "column halves":
            both = BACKENDS[xp](np.zeros((experts, d, 2 * h), np.float32))
            gate, up = both[:, :, :h], both[:, :, h:]
        elif layout == "row halves":
            both = BACKENDS[xp](np.zeros((experts, 2 * h, d), np.float32))
            gate, up = both[:, :h].swapaxes(1, 2), both[:, h:].swapaxes(1, 2)
        else:
            both = BACKENDS[xp](np.zeros((2 * experts, d, h), np.float32))
            gate, up = both[::2], both[1::2]
    mb.moe_backward(grad_out, kept, accumulate={"w1": (gate, up), "w2": second})
    for got, want in zip((gate, up, second), (*plain.w1, plain.w2), strict=True):
        assert relative_error(np.asarray(got), np.asarray(want)) <= 1e-6


@pytest.mark.parametrize("calls_before", [0, 3], ids=["first", "recorded"])
def test_sums_over_what_backward_reads_are_refused_on_every_call(calls_before, monkeypatch, request):
    """A record of such layouts says nothing of where arrays lie. Sums among each other are allowed there too."""
    device = fakes.use(monkeypatch)
    request.addfinalizer(runtime.forget)  # kernels of this device
    x, chosen, weights, w1, w2 = fakes.Layer(30, 2, 5, 64, 32, order="pair").arguments(device)
    grad_out = device.array(("grad_out",), (30, 64), BF16)

    def fresh():
        both = device.array(("sums",), (5, 64, 64), BF16)  # gate's columns, then up's
        halves = tuple(fakes.DeviceArray(both.buffer, (5, 64, 32), both.strides, both.dtype, 64 * i) for i in range(2))
        return {"w1": halves, "w2": device.array(("sum",), (5, 32, 64), BF16)}

    def backward(totals):
        _, kept = mb.moe_forward(x, chosen, weights, w1, w2)
        device.restart()
        return mb.moe_backward(grad_out, kept, accumulate=totals)

    for _ in range(calls_before):
        backward(fresh())
    gate, up = fresh()["w1"]
    one_column_on = fakes.DeviceArray(gate.buffer, gate.shape, gate.strides, gate.dtype, 62)
    for other, totals in (
        ("saved.w2", {"w2": w2}),
        ("accumulate['w1'][0]", {"w1": (gate, gate)}),
        ("accumulate['w1'][0]", {"w1": (gate, one_column_on)}),
    ):
        with pytest.raises(ValueError, match=re.escape(f"expected memory apart from {other}, got an array")):
            backward(fresh() | totals)
        assert not fakes.launches(device)
    assert backward({**fresh(), "w1": (gate, up)}).w1 == (gate, up)


@pytest.mark.parametrize("in_bytes", [False, True])
def test_address_ranges(in_bytes):
    """The cheap question of repeated calls: the last two are written."""

    def layout(shape, strides, dtype="float32"):
        dtype = np.dtype(dtype)
        return shape, tuple(s * dtype.itemsize for s in strides) if in_bytes else strides, dtype, 0, 0

    read, written = layout((5, 4), (4, 1)), layout((3, 4), (8, 1))  # 80 bytes, and 80 with gaps
    backward = layout((3,), (-2,), "float64")  # from 32 bytes before its address to 8 behind

    def meet(*pointers, layouts=(read, written, written)):
        return overlaps.ranges_meet(in_bytes, layouts, pointers, 2)

    assert not meet(1000, 1080, 1160)
    assert meet(1000, 1079, 1200) and meet(1079, 1000, 1200) and meet(1000, 1200, 1079) and meet(1000, 1200, 1201)
    assert not overlaps.ranges_meet(in_bytes, (read, read, written), (1000, 1000, 1080), 1)
    assert not meet(1000, 1080 + 32, 2000, layouts=(read, backward, written))
    assert meet(1000, 1080 + 31, 2000, layouts=(read, backward, written))
    assert not meet(1000, 1000, 2000, layouts=(read, layout((0, 4), (4, 1)), written))


@pytest.fixture
def followed():
    """One call of each function of arrays, on torch tensors of which the named argument is to be changed."""
    torch = pytest.importorskip("torch")
    given = {name: convert(arguments, as_tensor) for name, arguments in GOOD.items()}
    x, chosen, weights, w1, w2 = (convert(a, as_tensor) for a in make_inputs(Case(L, K, E, D, H), 0, np.float32)[:5])
    given["moe_forward"] = {"x": x, "ids": chosen, "weights": weights, "w1": w1, "w2": w2}
    out, kept = mb.moe_forward(**given["moe_forward"])
    given["moe_backward"] = {"grad_out": torch.randn_like(out), "saved": kept, "keep_saved": True}
    return torch, given


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        *(("moe_forward", name) for name in ("x", "weights", "w1", "w2")),
        ("moe_backward", "grad_out"),
        ("route", "logits"),
        *(("route_backward", name) for name in ("grad_weights", "logits", "weights")),
    ],
)
def test_autograd_is_not_left_behind_in_silence(followed, function, argument):
    torch, given = followed
    given[function][argument].requires_grad_()
    with pytest.raises(RuntimeError) as caught:
        getattr(mb, function)(**given[function])
    assert str(caught.value) == (
        f"{function}: {argument}: expected a tensor that requires no gradient, as none is recorded here, got one that "
        "requires it; use moe or route of moeblaze_cupy.interop.torch, or detach"
    )
    with torch.no_grad():
        getattr(mb, function)(**given[function])


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("function", GOOD)
def test_transforms_of_torch_are_refused(followed, function):
    """A tracer would keep what it sees as constants, a tangent would be lost."""
    torch, given = followed
    arguments = given[function]
    name, first = next(
        (n, a) for n, a in arguments.items() if n == "ids" or (torch.is_tensor(a) and a.is_floating_point())
    )

    def run(array):
        result = getattr(mb, function)(**{**arguments, name: array})
        return result[0] if isinstance(result, tuple) else first

    run(first)
    make_fx = torch.fx.experimental.proxy_tensor.make_fx
    expected = rf"^{function}: \w+: expected a call outside of all transforms of torch but torch.compile, .*, got "
    with pytest.raises(RuntimeError, match=expected + "make_fx"):
        make_fx(run)(first)
    with pytest.raises(RuntimeError, match=expected + "make_fx"):
        make_fx(run, pre_dispatch=True)(first)
    with pytest.raises(RuntimeError, match=expected + "torch.jit.trace"):
        torch.jit.trace(run, (first,))
    with pytest.raises(RuntimeError, match=expected + r"a transform of torch\.func \(functorch wrappers are not"):
        torch.func.vmap(run)(first[None])
    if first.is_floating_point():
        dual_level = torch.autograd.forward_ad.dual_level()
        with dual_level, pytest.raises(RuntimeError, match=expected + "forward-mode differentiation"):
            run(torch.autograd.forward_ad.make_dual(first, first))
        with torch.autograd.forward_ad.dual_level():
            run(first)  # without a tangent
    with pytest.importorskip("torch.utils.flop_counter").FlopCounterMode(display=False):  # which changes nothing
        run(first)
    with torch.device("cpu"):
        run(first)


def test_accumulated_arrays_on_another_device():
    with pytest.raises(TypeError) as caught:
        call("moe_backward", as_cuda, {"accumulate": {"w2": as_cuda(zeros(E, H, D), device=1)}})
    assert str(caught.value) == "moe_backward: accumulate['w2']: expected saved.x's device cuda:0, got cuda:1"


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # `import cupy` raises ImportError


@pytest.mark.parametrize("function", ["route", "route_backward", "build_dispatch", "moe_forward", "moe_backward"])
def test_good_cuda_arrays_pass_the_checks_and_need_cupy(function, no_cupy):
    with pytest.raises(RuntimeError) as caught:
        call(function, as_cuda, {})
    assert str(caught.value).startswith(NO_CUPY)


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        ("moe_forward", "x", "bfloat16 or float16 or float32"),
        ("moe_forward", "weights", "float32"),
        ("moe_forward", "w1", "float32, that of x"),
        ("moe_forward", "w2", "float32, that of x"),
        ("route", "logits", "bfloat16 or float16 or float32"),
        ("route_backward", "grad_weights", "float32"),
        ("moe_backward", "grad_out", "float32"),
    ],
)
def test_float64_is_for_the_cpu(function, argument, expected):
    with pytest.raises(TypeError) as caught:
        call(function, as_cuda, {argument: GOOD[function][argument].astype(np.float64)})
    assert str(caught.value) == f"{function}: {argument}: expected dtype {expected}, got float64"


@pytest.mark.parametrize(
    ("function", "first"),
    [("route_backward", "logits"), ("moe_forward", "x"), ("moe_backward", "grad_out")],
)
def test_arrays_on_two_devices(function, first):
    """Each argument in turn on the second GPU, then on the CPU."""
    torch = pytest.importorskip("torch")
    names = [name for name in GOOD[function] if name not in (first, "saved")]
    for name in names:
        for other, elsewhere in (("cuda:1", lambda a: as_cuda(a, device=1)), ("cpu", torch.from_numpy)):
            with pytest.raises(TypeError) as caught:
                call(function, as_cuda, {name: elsewhere(GOOD[function][name])})
            assert str(caught.value) == f"{function}: {name}: expected {first}'s device cuda:0, got {other}"
    if function == "moe_backward":
        with pytest.raises(TypeError) as caught:
            mb.moe_backward(as_cuda(zeros(L, D)), saved(as_cuda(zeros(L, D), device=1)))
        assert str(caught.value) == "moe_backward: grad_out: expected saved.x's device cuda:1, got cuda:0"


@pytest.mark.parametrize(
    ("function", "first", "names"),
    [
        ("route", {"logits": zeros(L, E)}, {"k": K, "bias": zeros(E)}),
        ("route", {"logits": zeros(L, E)}, {"k": K, "bias": zeros(L, E)}),
        ("route", {"logits": zeros(L, E)}, {"k": K, "token_mask": zeros(L, dtype=bool)}),
        ("route", {"logits": zeros(L, E)}, {"k": K, "sequences": ids(3)}),
        ("route", {"logits": zeros(L, E)}, {"ids": ids(L, K)}),
        ("limit_capacity", {"ids": ids(L, K)}, {"num_experts": E, "capacity": 1, "sequences": ids(3)}),
        (
            "limit_capacity",
            {"ids": ids(L, K)},
            {"num_experts": E, "capacity": 1, "order": "weights", "weights": zeros(L, K)},
        ),
        ("round_tokens", {"scores": zeros(L, E)}, {"ids": ids(L, K)}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_arrays_of_routing_on_two_devices(function, first, names):
    torch = pytest.importorskip("torch")
    ((where, _),) = first.items()
    name = list(names)[-1]
    for other, elsewhere in (("cuda:1", lambda a: as_cuda(a, device=1)), ("cpu", torch.from_numpy)):
        with pytest.raises(TypeError) as caught:
            getattr(mb, function)(**convert(first, as_cuda), **convert(names, elsewhere))
        assert str(caught.value) == f"{function}: {name}: expected {where}'s device cuda:0, got {other}"


def test_sums_of_too_many_sequences():
    """Their index is an int32. Only the score sums have a column per expert."""
    logits, offsets = Tensor((5, 4096), "float32"), Tensor((2**19 + 1,), "int32")
    with pytest.raises(ValueError) as caught:
        mb.route(logits, 2, sums=("softmax",), sequences=offsets)
    assert str(caught.value) == f"route: sequences: expected S * E of at most {2**31 - 128}, got {2**31}"


def test_sums_of_more_sequences_than_a_grid_has_rows():
    """Only a launch of `route` has a row of blocks for each. Without sums there is no such launch."""
    logits, most = Tensor((2**16, 8), "float32"), 2**16 - 1
    for sequences in (2**16, Tensor((2**16 + 1,), "int32")):
        with pytest.raises(ValueError) as caught:
            mb.route(logits, 2, sums=("z",), sequences=sequences)
        assert str(caught.value) == f"route: sequences: expected at most {most} with sums on CUDA, got {2**16}"
    on_cpu = np.zeros((2**16, 8), np.float32)
    assert mb.route(on_cpu, 2, sums=("z",), sequences=2**16)[2].z_sums.shape == (2**16,)


def test_half_of_a_pair_on_another_device():
    with pytest.raises(TypeError) as caught:
        call("moe_forward", as_cuda, {"w1": (as_cuda(PAIR[0]), as_cuda(PAIR[1], device=1))})
    assert str(caught.value) == "moe_forward: w1[1]: expected x's device cuda:0, got cuda:1"


@pytest.mark.parametrize(
    ("function", "first"), [("route_backward", "logits"), ("moe_forward", "x"), ("moe_backward", "grad_out")]
)
def test_arrays_of_two_frameworks(function, first):
    torch = pytest.importorskip("torch")
    for name in (name for name in GOOD[function] if name not in (first, "saved")):
        with pytest.raises(TypeError) as caught:
            call(function, BACKENDS["numpy"], {name: torch.from_numpy(GOOD[function][name])})
        assert str(caught.value) == f"{function}: {name}: expected a numpy array like {first}, got torch"
    if function == "moe_backward":
        with pytest.raises(TypeError) as caught:
            mb.moe_backward(zeros(L, D), saved(torch.zeros(L, D)))
        assert str(caught.value) == "moe_backward: grad_out: expected a torch array like saved.x, got numpy"


def test_tensors_without_memory():
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError) as caught:
        mb.build_dispatch(torch.zeros(L, K, dtype=torch.int32, device="meta"), E)
    assert str(caught.value) == "build_dispatch: ids: device: expected a tensor on cpu or cuda, got meta"


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors", "ignore:.*quantiz")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sparse_coo", "memory: expected a dense tensor"),
        ("sparse_csr", "memory: expected a dense tensor"),
        ("mkldnn", "memory: expected a dense tensor"),
        ("nested", "memory: expected a dense tensor"),
        ("jagged", "memory: expected a tensor with memory of its own"),
        ("zero", "memory: expected a tensor with memory of its own"),
        ("negated", "memory: expected a tensor's own values, got a lazy negation"),
        ("quantized", "expected dtype bfloat16 or float16 or float32 or float64, got quint8"),
        ("float8_e4m3fn", "expected dtype bfloat16 or float16 or float32 or float64, got float8_e4m3fn"),
        ("complex64", "expected dtype bfloat16 or float16 or float32 or float64, got complex64"),
    ],
)
def test_tensors_that_are_not_plain_floats(kind, message):
    torch = pytest.importorskip("torch")
    logits = torch.randn(L, E)
    make = {
        "sparse_coo": logits.to_sparse,
        "sparse_csr": logits.to_sparse_csr,
        "mkldnn": logits.to_mkldnn,
        "nested": lambda: torch.nested.nested_tensor([logits, logits]),
        "jagged": lambda: torch.nested.nested_tensor([logits, logits], layout=torch.jagged),
        "zero": lambda: torch._efficientzerotensor(L, E),
        "negated": lambda: torch._neg_view(logits),
        "quantized": lambda: torch.quantize_per_tensor(logits, 0.1, 0, torch.quint8),
    }
    try:
        given = make[kind]() if kind in make else logits.to(getattr(torch, kind))
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this torch has no such tensors: {error}")
    with pytest.raises(TypeError) as caught:
        mb.route(given, K)
    assert str(caught.value).startswith(f"route: logits: {message}")


def test_masked_arrays_are_refused():
    """Their mask would count for nothing: a masked id would be an expert like any other."""
    masked = np.ma.masked_equal(np.array([[0, 1], [1, 0]], np.int32), 1)
    with pytest.raises(TypeError) as caught:
        mb.build_dispatch(masked, 2)
    assert str(caught.value) == (
        "build_dispatch: ids: mask: expected an array without one, got <class 'numpy.ma.MaskedArray'>"
    )
    with pytest.raises(TypeError, match=r"^moe_forward: weights: mask: expected"):
        call("moe_forward", BACKENDS["numpy"], {"weights": np.ma.array(zeros(L, K))})


@pytest.mark.parametrize("argument", ["x", "weights", "w1", "w2"])
def test_arrays_of_another_byte_order_are_refused(argument):
    """NumPy gives them the name of the machine's dtype. Those of float64 would be computed in float32."""
    swapped = np.dtype(np.float64).newbyteorder()
    given = {name: np.zeros(shape) for name, shape in (("x", (L, D)), ("w1", (E, D, 2 * H)), ("w2", (E, H, D)))}
    given |= {"ids": ids(L, K), "weights": np.zeros((L, K))}
    given[argument] = given[argument].astype(swapped)
    with pytest.raises(TypeError) as caught:
        mb.moe_forward(**given)
    assert str(caught.value) == (
        f"moe_forward: {argument}: byte order: expected the machine's own, got dtype {swapped.str}"
    )


class Index:
    """What integers are read through, such as NumPy's scalars."""

    def __index__(self):
        return 2


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), np.array(2), Index()], ids=lambda v: type(v).__name__)
def test_whatever_has_an_index_is_an_integer(two):
    logits = np.random.default_rng(0).standard_normal((L, E)).astype(np.float32)
    assert all(map(np.array_equal, mb.route(logits, two), mb.route(logits, 2)))
    index = mb.build_dispatch(ids(L, K), two)
    assert index.num_experts == 2 and type(index.num_experts) is int


def test_one_expert_per_token_is_not_renormalised_by_default():
    """Its weight over itself would be 1, without a gradient."""
    logits = np.random.default_rng(0).standard_normal((L, E)).astype(np.float32)
    for k in (1, 2):
        weights, chosen = mb.route(logits, k)
        want, _ = mb.route(logits, k, renormalize=k > 1)
        assert np.array_equal(weights, want)
        grad = mb.route_backward(weights, logits, weights, chosen)
        assert np.array_equal(grad, mb.route_backward(weights, logits, weights, chosen, renormalize=k > 1))
        assert grad.any()
    assert (mb.route(logits, 1, renormalize=True)[0] == 1).all()


@pytest.mark.parametrize("slots", [(2**30, 2), (2**31, 1), (2**26, 32)])
def test_more_slots_than_int32_can_number(slots):
    tokens, _ = slots
    many = f"ids: expected at most {2**31 - 128} slots L*k (int32 index lists), got {2**31}"
    with pytest.raises(ValueError) as caught:
        mb.build_dispatch(Tensor(slots, "int32"), E)
    assert str(caught.value) == f"build_dispatch: {many}"
    arguments = {
        "x": Tensor((tokens, D), "float32"),
        "ids": Tensor(slots, "int64"),
        "weights": Tensor(slots, "float32"),
    }
    with pytest.raises(ValueError) as caught:
        call("moe_forward", as_cuda, arguments)
    assert str(caught.value) == f"moe_forward: {many}"


def test_as_many_slots_as_int32_can_number(no_cupy):
    with pytest.raises(RuntimeError, match=NO_CUPY):
        mb.build_dispatch(Tensor((2**31 - 128, 1), "int32"), E)


def test_largest_router_and_most_experts(no_cupy):
    with pytest.raises(RuntimeError, match=NO_CUPY):
        mb.route(Tensor((L, MAX_ROUTER_E), "bfloat16"), router_config.MAX_ROUTER_K)
    with pytest.raises(RuntimeError, match=NO_CUPY):
        mb.build_dispatch(Tensor((L, K), "int64"), MAX_E)


def fake_cupy(device_count):
    """A module with as much of CuPy as `import_cupy` asks."""

    class CUDARuntimeError(RuntimeError):
        pass

    def get_device_count():
        if device_count is None:
            raise CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")
        return device_count

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, getDeviceCount=get_device_count, runtimeGetVersion=lambda: 13000
    )
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))


def test_no_cupy(no_cupy):
    with pytest.raises(RuntimeError, match=r'pip install "moeblaze-cupy\[cuda13\]" or .*cuda12\]"\), got .*Error'):
        loader.import_cupy()


def test_old_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(None))
    with pytest.raises(RuntimeError, match=r"CUDA driver: expected .* CUDA 13\b.*, got cudaErrorInsufficientDriver"):
        loader.import_cupy()


def test_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(0))
    with pytest.raises(RuntimeError, match="GPU: expected at least one CUDA device, got 0"):
        loader.import_cupy()


def test_cupy_itself_without_a_gpu():
    pytest.importorskip("cupy")
    if MISSING_GPU is None:
        pytest.skip("this machine has a GPU")
    with pytest.raises(RuntimeError, match=r"^moeblaze_cupy: (CUDA driver|GPU): expected .*, got "):
        loader.import_cupy()


@pytest.mark.parametrize("capability", [52, 70, 75])
def test_gpu_before_sm_80(capability, monkeypatch):
    message = rf"compute capability: expected 8.0 or later .*, got {capability // 10}\.{capability % 10}"
    with pytest.raises(RuntimeError, match=message):
        launch_config.tier(capability)
    attributes = {75: capability // 10, 76: capability % 10, 16: 80, 97: 48 * 1024, 81: 64 * 1024}
    runtime = SimpleNamespace(deviceGetAttribute=lambda number, device: attributes[number])
    monkeypatch.setattr(loader, "import_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(RuntimeError, match=message):
        loader.device_limits(capability)  # a device that no other test has asked for


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_gpu_from_sm_80_on(capability):
    assert launch_config.tier(capability) == ("sm90" if capability == 90 else "sm80")
    assert launch_config.tier(capability, "sm80") == "sm80"


def test_forcing_kernels_that_there_are_not(monkeypatch):
    with pytest.raises(ValueError, match=r"MOEBLAZE_TIER: expected sm80 or sm90, got 'sm100'"):
        launch_config.tier(90, "sm100")
    with pytest.raises(RuntimeError, match=r"MOEBLAZE_TIER=sm90: expected compute capability 9.0, got 8.0"):
        launch_config.tier(80, "sm90")
    monkeypatch.setenv("MOEBLAZE_TIER", "sm99")  # which NumPy, that takes the place of kernels, refuses as well
    with pytest.raises(ValueError, match=r"MOEBLAZE_TIER: expected sm80 or sm90, got 'sm99'"):
        mb.build_dispatch(ids(L, K), E)


@pytest.mark.parametrize(("wrong", "got"), [(-2, "-2 to 0"), (E + 2, "0 to 5")])
def test_ids_are_checked_where_it_is_asked_for(monkeypatch, wrong, got):
    """Without it such an id is an empty slot, as -1 always is. Experts that return their input have ids, too."""
    good = GOOD["moe_forward"]
    given = good | {"ids": ids(L, K)}
    given["ids"][1, 1] = wrong

    def calls(arguments, Z):
        mb.moe_forward(**arguments, identity_experts=Z)
        mb.build_dispatch(arguments["ids"], E + Z)

    calls(given, 2)
    monkeypatch.setattr(checks, "CHECKS_IDS", True)
    calls(good, 2)
    empty = good | {"ids": ids(L, K)}
    empty["ids"][1, 1] = -1
    calls(empty, 2)
    for function, call_it in (
        ("moe_forward", lambda: mb.moe_forward(**given, identity_experts=2)),
        ("build_dispatch", lambda: mb.build_dispatch(given["ids"], E + 2)),
    ):
        with pytest.raises(ValueError) as caught:
            call_it()
        expected = "-1 to 4 in all slots, as MOEBLAZE_CHECK_IDS asks"
        assert str(caught.value) == f"{function}: ids: expected {expected}, got {got}"


@pytest.mark.parametrize(("value", "checked"), [("", False), ("0", False), ("1", True)])
def test_the_environment_asks_for_the_check_of_ids(value, checked):
    code = "from moeblaze_cupy import checks; print(checks.CHECKS_IDS)"
    assert run_python("-c", code, MOEBLAZE_CHECK_IDS=value).stdout == f"{checked}\n"


@pytest.mark.parametrize("room", ["torch", "parallel", "fsdp", "transformers"])
def test_a_missing_torch_is_named_with_the_line_that_installs_it(room):
    code = f"import sys; sys.modules['torch'] = None; import moeblaze_cupy.interop.{room}"
    *_, last = run_python("-c", code).stderr.splitlines()
    expected = 'expected an importable torch (pip install "moeblaze-cupy[torch]"), got none'
    assert last == f"ModuleNotFoundError: moeblaze_cupy.interop.{room}: torch: {expected}"


@pytest.mark.parametrize("name", ["MoE", "moe"])
def test_names_of_torchs_part_are_found(name):
    with pytest.raises(ImportError) as caught:
        getattr(mb, name)
    expected = f"'from moeblaze_cupy.interop.torch import {name}', got an import from moeblaze_cupy itself"
    assert str(caught.value) == f"moeblaze_cupy: {name}: expected {expected}"
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        mb.no_such_name  # noqa: B018


def odd_strides(array):
    """The same values; dimensions of size 1 get strides that no allocation has."""
    strides = [7 * array.itemsize if n == 1 else s for n, s in zip(array.shape, array.strides, strict=True)]
    return np.lib.stride_tricks.as_strided(array, array.shape, strides)


def transposed(w):
    return np.ascontiguousarray(w.swapaxes(1, 2)).swapaxes(1, 2)


def among_others(w):
    """The same values as every second expert and some of the columns of a larger array."""
    experts, rows, columns = w.shape
    larger = np.zeros((2 * experts, rows, columns + 3), w.dtype)
    larger[::2, :, :columns] = w
    return larger[::2, :, :columns]


def reversed_experts(w):
    return np.ascontiguousarray(w[::-1])[::-1]


SIZES = [  # L, k, E, d, h
    (0, 2, 3, 4, 6),
    (1, 1, 1, 1, 1),
    (5, 2, 3, 1, 6),
    (5, 2, 3, 4, 1),
    (5, 1, 1, 4, 6),
    (5, 3, 1, 4, 6),  # the same expert in several slots
    (1, 2, 3, 4, 6),
    (5, 40, 3, 4, 6),  # the router's limit of k is not the layer's
]
VIEWS = [odd_strides, transposed, lambda w: odd_strides(transposed(w)), among_others, reversed_experts]


@pytest.mark.parametrize(("activation", "pair"), [("swiglu", False), ("swiglu", True), ("relu", False)])
@pytest.mark.parametrize("view", VIEWS, ids=["odd", "transposed", "odd_transposed", "among_others", "reversed_experts"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_edge_sizes_and_weight_views(sizes, view, pair, activation):
    """Accepted, and the same results as with plain arrays."""
    tokens, k, experts, d, h = sizes
    rng = np.random.default_rng(0)
    x, grad_out = rng.standard_normal((2, tokens, d))
    chosen, weights = rng.integers(-1, experts + 1, (tokens, k)), rng.random((tokens, k))
    w1 = rng.standard_normal((experts, d, 2 * h if activation in GATED_ACTIVATIONS else h))
    w2 = rng.standard_normal((experts, h, d))
    halves = [np.ascontiguousarray(half) for half in np.split(w1, 2, axis=2)] if pair else [w1]

    out, kept = mb.moe_forward(x, chosen, weights, w1, w2, activation=activation)
    want = mb.moe_backward(grad_out, kept)
    views = tuple(map(view, halves))
    got_out, kept = mb.moe_forward(
        odd_strides(x), chosen, odd_strides(weights), views if pair else views[0], view(w2), activation=activation
    )
    got = mb.moe_backward(odd_strides(grad_out), kept)
    got_w1 = np.concatenate(got.w1, axis=2) if pair else got.w1
    for name, value, wanted in (
        ("out", got_out, out),
        ("x", got.x, want.x),
        ("weights", got.weights, want.weights),
        ("w1", got_w1, want.w1),
        ("w2", got.w2, want.w2),
    ):
        assert value.shape == wanted.shape, name
        assert relative_error(value, wanted) <= 1e-13, name


def test_pair_may_differ_in_strides_that_do_not_matter():
    gate, up = np.ones((D, H), np.float32)[None], np.ones((1, D, H), np.float32)
    assert gate.strides[0] != up.strides[0]
    out, _ = call("moe_forward", BACKENDS["numpy"], {"w1": (gate, up), "w2": zeros(1, H, D)})
    assert out.shape == (L, D)


@pytest.mark.parametrize("sizes", [(0, 4, 2), (3, 1, 1), (3, MAX_ROUTER_E, 64), (3, 5, 5)], ids=str)
def test_edge_sizes_of_the_router(sizes):
    tokens, experts, k = sizes
    logits = np.random.default_rng(0).standard_normal((tokens, experts)).astype(np.float32)
    weights, chosen = mb.route(logits, k)
    assert weights.shape == chosen.shape == (tokens, k)
    assert mb.route_backward(weights, logits, weights, chosen).shape == logits.shape


def test_weights_in_the_dtype_of_x():
    dtypes = {name: GOOD["moe_forward"][name].astype(BF16) for name in ("x", "weights", "w1", "w2")}
    out, kept = call("moe_forward", BACKENDS["numpy"], dtypes)
    assert out.dtype == BF16
    assert mb.moe_backward(out, kept).weights.dtype == BF16


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_matrices_are_taken_as_arrays():
    rng = np.random.default_rng(0)
    good = {name: rng.standard_normal(a.shape) for name, a in GOOD["moe_forward"].items() if name != "ids"}
    matrices = {name: np.asmatrix(good[name]) for name in ("x", "weights")}
    with_arrays, _ = call("moe_forward", BACKENDS["numpy"], good)
    with_matrices, _ = call("moe_forward", BACKENDS["numpy"], {**good, **matrices})
    assert np.array_equal(with_arrays, with_matrices)


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((5, 4), (4, 1), True),
        ((5, 4), (5, 1), False),
        ((5, 4), (1, 5), False),
        ((1, 4), (99, 1), True),
        ((5, 1), (1, 99), True),
        ((5, 1), (2, 1), False),
        ((0, 4), (7, 3), True),
        ((), (), True),
        ((2, 1, 3), (3, 99, 1), True),
    ],
)
def test_contiguity(shape, strides, contiguous):
    assert arrays.Array(None, 0, shape, strides, "float32", 0).is_contiguous == contiguous


@pytest.mark.parametrize(
    ("shape", "strides", "is_transposed"),
    [
        ((3, 4, 6), (24, 6, 1), False),
        ((3, 4, 6), (24, 1, 4), True),
        ((3, 4, 6), (24, 1, 9), True),
        ((3, 4, 1), (4, 1, 77), False),
        ((3, 1, 6), (6, 77, 1), False),
        ((3, 1, 6), (60, 77, 10), True),
        ((3, 1, 1), (5, 77, 78), False),
        ((3, 4, 6), (6, 2**29 - 1, 1), False),
        ((3, 1, 6), (6, 2**29, 1), False),
    ],
)
def test_weight_order(shape, strides, is_transposed):
    described = arrays.Array(None, 0, shape, strides, "float32", 0)
    assert checks.weight_order("moe_forward", "w1", described) == is_transposed


@pytest.mark.parametrize("strides", [(6, 2**29, 1), (6, 1, 2**29), (6, -(2**29), 1), (6, 1, -(2**29))], ids=str)
def test_rows_of_a_weight_lie_less_than_2_gib_apart(strides):
    described = arrays.Array(None, 0, (3, 4, 6), strides, "float32", 0)
    with pytest.raises(ValueError, match=r"moe_forward: w1: expected rows less than 2 GiB apart, got strides \(6, "):
        checks.weight_order("moe_forward", "w1", described)
