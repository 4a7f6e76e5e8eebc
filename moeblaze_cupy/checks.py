"""Argument checks, from shapes and dtypes alone: nothing here reads array contents or waits for a device.

Every message names the function, the argument, what was expected and what came. Types, dtypes and
devices raise TypeError; shapes, memory order and values ValueError.
"""

import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import arrays, launch_config
from moeblaze_cupy.arrays import CPU, Array
from moeblaze_cupy.structures import ACTIVATIONS, GRADIENTS, ROUTER_KINDS, SAVE_POLICIES, SavedForBackward, is_gated

GPU_DTYPES = ("bfloat16", "float16", "float32")
CPU_DTYPES = (*GPU_DTYPES, "float64")
ID_DTYPES = ("int32", "int64")


def _message(function: str, argument: str, expected: str, got: object) -> str:
    return f"{function}: {argument}: expected {expected}, got {got}"


def bad_value(function: str, argument: str, expected: str, got: object) -> ValueError:
    return ValueError(_message(function, argument, expected, got))


def bad_type(function: str, argument: str, expected: str, got: object) -> TypeError:
    return TypeError(_message(function, argument, expected, got))


def one_of(function: str, argument: str, value: Any, allowed: Sequence[str | None]) -> None:
    is_name = value is None or isinstance(value, str)  # `in` would compare an array element by element
    if not is_name or value not in allowed:
        raise bad_value(function, argument, f"one of {', '.join(map(repr, allowed))}", repr(value))


def integer(function: str, argument: str, value: Any) -> int:
    """`value` as an int: anything with __index__ but a bool, which a slip of arguments gives."""
    if isinstance(value, bool):
        raise bad_type(function, argument, "an int", repr(value))
    try:
        return operator.index(value)
    except TypeError:
        raise bad_type(function, argument, "an int", repr(value)) from None


def renormalized(function: str, value: Any, k: int) -> bool:
    """What `renormalize` means: None is k > 1, as the only weight over itself is 1 and has no gradient."""
    if value is None:
        return k > 1
    if not isinstance(value, (bool, np.bool_)):
        raise bad_type(function, "renormalize", "True, False or None", repr(value))
    return bool(value)


def untransformed(function: str, given: Mapping[str, Any]) -> None:
    """Of torch tensors: no tracer or transform is at work, which would take this call's results for constants."""
    transform = arrays.Torch.transformed(given.values())
    if transform is not None:
        expected = "a call outside of all transforms of torch but torch.compile, which take its results for constants"
        raise RuntimeError(_message(function, next(iter(given)), expected, transform))


def untracked(function: str, given: Mapping[str, Any]) -> None:
    """If the first is a torch tensor: neither autograd nor a transform is to follow this call, as it could not."""
    first = next(iter(given.values()))
    torch = sys.modules.get("torch")
    if torch is None or arrays.framework_of(first) is not arrays.Torch:
        return
    if torch.is_grad_enabled():
        for name, tensor in given.items():
            if getattr(tensor, "requires_grad", False):
                expected = "a tensor that requires no gradient, as none is recorded here"
                advice = "use moe or route of moeblaze_cupy.interop.torch, or detach"
                raise RuntimeError(_message(function, name, expected, f"one that requires it; {advice}"))
    untransformed(function, given)


def unreadable(function: str, argument: str, error: Exception) -> Exception:
    """The error of reading an array, with the names of the function and the argument."""
    own_name, text = "moeblaze_cupy: ", str(error)
    known = text.startswith(own_name)
    text = text.removeprefix(own_name) if known else f"expected an array whose memory can be read, got {text}"
    kind = RuntimeError if isinstance(error, RuntimeError) else TypeError
    return kind(f"{function}: {argument}: {text}")


def shape(
    function: str, argument: str, array: Array, letters: str, expected: tuple[int | None, ...], hint: str = ""
) -> None:
    """`expected` has None where any size will do."""
    sizes_match = len(array.shape) == len(expected) and all(
        e is None or e == n for e, n in zip(expected, array.shape, strict=True)
    )
    if not sizes_match:
        wanted = ", ".join("any" if e is None else str(e) for e in expected)
        raise bad_value(function, argument, f"shape ({letters}) = ({wanted})", f"{array.shape}{hint}")


def dtype(function: str, argument: str, array: Array, allowed: tuple[str, ...]) -> None:
    if array.dtype not in allowed:
        raise bad_type(function, argument, f"dtype {' or '.join(allowed)}", array.dtype)


def contiguous(function: str, argument: str, array: Array) -> None:
    if not array.is_contiguous:
        raise bad_value(function, argument, "a C-contiguous array", f"strides {array.strides} for shape {array.shape}")


def floats(array: Array) -> tuple[str, ...]:
    return CPU_DTYPES if array.device == CPU else GPU_DTYPES


def same_device(function: str, **given: Array) -> None:
    first = next(iter(given))
    for name, array in given.items():
        if array.device != given[first].device:
            raise bad_type(function, name, f"{first}'s device {device_name(given[first])}", device_name(array))


def device_name(array: Array) -> str:
    return "cpu" if array.device == CPU else f"cuda:{array.device}"


def slots(function: str, argument: str, num_slots: int) -> None:
    if num_slots > launch_config.MAX_SLOTS:
        raise bad_value(
            function, argument, f"at most {launch_config.MAX_SLOTS} slots L*k (int32 index lists)", num_slots
        )


def ids(function: str, array: Array, num_experts: int) -> None:
    if len(array.shape) != 2 or array.shape[1] < 1:
        raise bad_value(function, "ids", "shape (L, k) with k >= 1", array.shape)
    dtype(function, "ids", array, ID_DTYPES)
    contiguous(function, "ids", array)
    slots(function, "ids", array.size)
    if array.shape[1] > launch_config.MAX_K:
        raise bad_value(function, "ids", f"at most {launch_config.MAX_K} slots per token", array.shape[1])
    if not 1 <= num_experts <= launch_config.MAX_EXPERTS:
        raise bad_value(function, "num_experts", f"1 to {launch_config.MAX_EXPERTS}", num_experts)


def max_slots(function: str, value: Any, num_slots: int) -> int | None:
    """Of slots that have a row: None, or 1 to L*k."""
    if value is None:
        return None
    bound = integer(function, "max_slots", value)
    if not 1 <= bound <= num_slots:
        raise bad_value(function, "max_slots", f"None, or 1 to the {num_slots} slots L*k", bound)
    return bound


def spare_multiprocessors(function: str, value: Any, limits: launch_config.DeviceLimits | None) -> int:
    """How many multiprocessors grids leave alone: 0 to all but one. limits: None on the CPU, where there are none."""
    spare = integer(function, "spare_multiprocessors", value)
    if spare < 0 or (limits is not None and spare >= limits.multiprocessors):
        most = "" if limits is None else f" to {limits.multiprocessors - 1}, all but one of this GPU's"
        raise bad_value(function, "spare_multiprocessors", f"0{most or ' or more'}", spare)
    return spare


def router(function: str, logits: Array, k: int, kind: str) -> None:
    one_of(function, "kind", kind, ROUTER_KINDS)
    shape(function, "logits", logits, "L, E", (None, None))
    dtype(function, "logits", logits, floats(logits))
    contiguous(function, "logits", logits)
    num_experts = logits.shape[1]
    if not 1 <= num_experts <= launch_config.MAX_ROUTER_EXPERTS:
        raise bad_value(function, "logits", f"1 to {launch_config.MAX_ROUTER_EXPERTS} experts", num_experts)
    limit = min(num_experts, launch_config.MAX_ROUTER_K)
    if not 1 <= k <= limit:
        raise bad_value(function, "k", f"1 to {limit} (E = {num_experts} experts, at most 32)", k)


def router_backward(
    function: str, grad_weights: Array, logits: Array, weights: Array, chosen: Array, kind: str
) -> None:
    shape(function, "weights", weights, "L, k", (logits.shape[0], None) if logits.shape else (None, None))
    router(function, logits, weights.shape[1], kind)
    expected = weights.shape
    wide = "float64" if logits.dtype == "float64" else "float32"
    for name, array, dtypes in (
        ("grad_weights", grad_weights, (wide,)),
        ("weights", weights, (wide,)),
        ("ids", chosen, ("int32",)),
    ):
        shape(function, name, array, "L, k", expected)
        dtype(function, name, array, dtypes)
        contiguous(function, name, array)


def weight_order(function: str, argument: str, array: Array) -> bool:
    """True if the memory order is (E, columns, rows), the transposed view; False if row-major.

    Either inner dimension may be the contiguous one; rows (less than 2 GiB) and experts may be further apart.
    """
    _, rows, columns = array.shape
    _, row_stride, column_stride = array.strides
    far = 2**31 // array.itemsize  # the kernels' row pitch is 32 bits of bytes
    if (row_stride >= far and rows > 1) or (column_stride >= far and columns > 1):
        raise bad_value(function, argument, "rows less than 2 GiB apart", f"strides {array.strides}")
    if column_stride == 1 or columns == 1:
        return False
    if row_stride == 1 or rows == 1:
        return True
    raise bad_value(
        function,
        argument,
        "the last dimension contiguous, or the transposed view of an array whose last dimension is",
        f"strides {array.strides} for shape {array.shape}",
    )


def in_storage_order(array: Array, rows: int | None, columns: int) -> str:
    """A hint, where a weight (E, rows, columns) arrives as (E, columns, rows), which transformers and vLLM store."""
    fits = len(array.shape) == 3 and array.shape[1] == columns and rows in (None, array.shape[2])
    return "; pass its transposed view, .swapaxes(1, 2)?" if fits else ""


def strides_that_matter(array: Array) -> tuple[int, ...]:
    return tuple(stride for n, stride in zip(array.shape, array.strides, strict=True) if n != 1)


def layer(
    function: str,
    x: Array,
    chosen: Array,
    weights: Array,
    w1: tuple[Array, ...],
    w2: Array,
    activation: str,
    save: str | None,
) -> None:
    """`w1` as a tuple: one array, or a pair (gate, up)."""
    one_of(function, "activation", activation, ACTIVATIONS)
    one_of(function, "save", save, SAVE_POLICIES)
    names = ("w1",) if len(w1) == 1 else ("w1[0]", "w1[1]")
    shape(function, "x", x, "L, d", (None, None))
    dtype(function, "x", x, floats(x))
    contiguous(function, "x", x)
    L, d = x.shape
    if d < 1:
        raise bad_value(function, "x", "shape (L, d) with d >= 1", x.shape)
    shape(function, "w2", w2, "E, h, d", (None, None, d), in_storage_order(w2, None, d))
    E, h, _ = w2.shape
    if h < 1:
        raise bad_value(function, "w2", "shape (E, h, d) with h >= 1", w2.shape)
    if not 1 <= E <= launch_config.MAX_EXPERTS:
        raise bad_value(function, "w2", f"shape (E, h, d) with E from 1 to {launch_config.MAX_EXPERTS}", w2.shape)
    if len(w1) == 2 and not is_gated(activation):
        raise bad_value(function, "w1", f"one array (E, d, h) for activation {activation!r}", "a pair")
    for name, array in zip(names, w1, strict=True):
        letters, columns = ("E, d, 2h", 2 * h) if len(w1) == 1 and is_gated(activation) else ("E, d, h", h)
        shape(function, name, array, letters, (E, d, columns), in_storage_order(array, d, columns))
    for name, array in (*zip(names, w1, strict=True), ("w2", w2)):
        dtype(function, name, array, (x.dtype,))
        weight_order(function, name, array)
    if len(w1) == 2 and strides_that_matter(w1[0]) != strides_that_matter(w1[1]):
        raise bad_value(function, "w1", "gate and up with equal strides", f"{w1[0].strides} and {w1[1].strides}")
    shape(function, "ids", chosen, "L, k", (L, None))
    ids(function, chosen, E)
    shape(function, "weights", weights, "L, k", chosen.shape)
    dtype(function, "weights", weights, tuple(dict.fromkeys(("float32", x.dtype))))
    contiguous(function, "weights", weights)


def accumulated_names(function: str, accumulate: Any, needs: tuple[str, ...]) -> None:
    if not isinstance(accumulate, Mapping):
        raise bad_type(function, "accumulate", "a mapping from 'w1' and 'w2' to arrays", type(accumulate))
    for name in accumulate:
        one_of(function, "accumulate", name, ("w1", "w2"))
        if name not in needs:
            raise bad_value(function, "accumulate", f"names that are in needs, {needs}", repr(name))


def accumulated(
    function: str, buffers: Mapping[str, Array], weight_shapes: Sequence[tuple[int, ...]], x_dtype: str
) -> None:
    """`buffers`, by their argument names: one weight's accumulated gradient, or those of its (gate, up) pair."""
    for (name, array), weight_shape in zip(buffers.items(), weight_shapes, strict=True):
        if array.shape != weight_shape:
            raise bad_value(function, name, f"the weight's shape {weight_shape}", array.shape)
        dtype(function, name, array, tuple(dict.fromkeys(("float32", x_dtype))))
        weight_order(function, name, array)
        without_overlap(function, name, array)
    names = tuple(buffers)
    gate, up = buffers[names[0]], buffers[names[-1]]
    if strides_that_matter(gate) != strides_that_matter(up):
        got = f"{gate.strides} and {up.strides}"
        raise bad_value(function, names[0].removesuffix("[0]"), "gate and up with equal strides", got)
    dtype(function, names[-1], up, (gate.dtype,))


def without_overlap(function: str, argument: str, array: Array) -> None:
    """Of an array that is written: no element lies where another does."""
    end = 1
    for stride, n in sorted((abs(stride), n) for n, stride in zip(array.shape, array.strides, strict=True) if n != 1):
        if stride < end:
            raise bad_value(
                function, argument, "an array without overlaps", f"strides {array.strides} for shape {array.shape}"
            )
        end += (n - 1) * stride


def _extent(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Bytes from an array's address to its first and to the end of its last; strides in bytes."""
    if 0 in shape:
        return 0, 0
    reaches = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
    return sum(r for r in reaches if r < 0), sum(r for r in reaches if r > 0) + itemsize


@functools.lru_cache(maxsize=1024)
def _extents(strides_in_bytes: bool, layouts: tuple[Any, ...]) -> list[tuple[int, int]]:
    units = ((1 if strides_in_bytes else dtype.itemsize) for _, _, dtype, *_ in layouts)
    return [
        _extent(shape, tuple(unit * stride for stride in strides), dtype.itemsize)
        for unit, (shape, strides, dtype, *_) in zip(units, layouts, strict=True)
    ]


def ranges_meet(strides_in_bytes: bool, layouts: tuple[Any, ...], pointers: Sequence[int], written: int) -> bool:
    """Whether the address range of one of the last `written` arrays meets that of any other.

    layouts as `arrays.CuPy.layouts` gives them. Ranges of views of one buffer may meet where the views share no
    element: `apart` tells.
    """
    ranges = [(p + low, p + high) for p, (low, high) in zip(pointers, _extents(strides_in_bytes, layouts), strict=True)]
    for last in range(len(ranges) - written, len(ranges)):
        low, high = ranges[last]
        for other_low, other_high in ranges[:last]:
            if low < other_high and other_low < high:
                return True
    return False


class _Memory:
    """An array's place, for NumPy to reason about: it reads nothing there."""

    def __init__(self, array: Array) -> None:
        strides = tuple(stride * array.itemsize for stride in array.strides)
        data = {"data": (array.ptr, True), "shape": array.shape, "strides": strides}
        self.__array_interface__ = {"version": 3, "typestr": f"|V{array.itemsize}", **data}


def _share_memory(a: Array, b: Array) -> bool:
    """Whether some byte belongs to elements of both, from addresses, shapes and strides alone."""
    (low_a, high_a), (low_b, high_b) = (
        (array.ptr + low, array.ptr + high)
        for array in (a, b)
        for low, high in [_extent(array.shape, tuple(s * array.itemsize for s in array.strides), array.itemsize)]
    )
    if low_a >= high_b or low_b >= high_a or not a.size or not b.size:
        return False
    try:
        # NumPy's stubs know only two of the numbers that max_work may be.
        return np.shares_memory(np.asarray(_Memory(a)), np.asarray(_Memory(b)), max_work=10**6)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # no halves, slices or columns of a buffer are that involved


def apart(function: str, read: Mapping[str, Array], written: Mapping[str, Array]) -> None:
    """No array that is written shares memory with one that is read, or with another that is written."""
    others = dict(read)
    for name, array in written.items():
        for other, held in others.items():
            if _share_memory(array, held):
                raise bad_value(function, name, f"memory apart from {other}", "an array that overlaps it")
        others[name] = array


def gradient_names(function: str, needs: Any) -> tuple[str, ...]:
    if type(needs) is tuple and needs == GRADIENTS:
        return GRADIENTS
    if not isinstance(needs, (tuple, list, set, frozenset)):
        raise bad_type(function, "needs", f"a tuple of names from {', '.join(map(repr, GRADIENTS))}", repr(needs))
    for name in needs:
        one_of(function, "needs", name, GRADIENTS)
    return tuple(needs)


def layer_backward(function: str, grad_out: Array, x: Array, saved: SavedForBackward) -> None:
    shape(function, "grad_out", grad_out, "L, d", x.shape)
    dtype(function, "grad_out", grad_out, (x.dtype,))
    contiguous(function, "grad_out", grad_out)
    not_consumed(function, saved)


def not_consumed(function: str, saved: SavedForBackward) -> None:
    if saved.consumed:
        raise RuntimeError(
            f"{function}: saved: expected activations that are still there, got ones that an earlier backward "
            "overwrote with their gradients; pass keep_saved=True to the earlier call"
        )
