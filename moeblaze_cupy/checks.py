"""Argument checks, from shapes and dtypes alone: nothing here reads array contents or waits for a device.

Every message names the function, the argument, what was expected and what came. Types, dtypes and
devices raise TypeError; shapes, memory order and values ValueError.
"""

import importlib.util
import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moeblaze_cupy import frameworks as arrays
from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.frameworks import CPU, Array
from moeblaze_cupy.types import (
    ACTIVATIONS,
    GATE_UP,
    SAVE_POLICIES,
    WEIGHTS_ON,
    Activation,
    LayerArrays,
    LayerOptions,
    SavedForBackward,
    is_gated,
    pair,
)

GPU_DTYPES = ("bfloat16", "float16", "float32")
CPU_DTYPES = (*GPU_DTYPES, "float64")
ID_DTYPES = ("int32", "int64")
CHECKS_IDS = os.environ.get("MOEBLAZE_CHECK_IDS", "0") not in ("", "0")  # see `known_ids`
ACTIVATIONS_PAGE = "docs/activations.md says what each is and how to add one"


def _message(function: str, argument: str, expected: str, got: object) -> str:
    return f"{function}: {argument}: expected {expected}, got {got}"


def bad_value(function: str, argument: str, expected: str, got: object) -> ValueError:
    return ValueError(_message(function, argument, expected, got))


def bad_type(function: str, argument: str, expected: str, got: object) -> TypeError:
    return TypeError(_message(function, argument, expected, got))


def installed(module: str, library: str) -> None:
    """Raises ModuleNotFoundError, with the line that installs it, if a library that a module needs is missing."""
    if importlib.util.find_spec(library) is None:
        expected = f'an importable {library} (pip install "moeblaze-cupy[{library}]")'
        raise ModuleNotFoundError(_message(module, library, expected, "none"), name=library)


def one_of(function: str, argument: str, value: Any, allowed: Sequence[str | None]) -> None:
    is_name = value is None or isinstance(value, str)  # `in` would compare an array element by element
    if not is_name or value not in allowed:
        raise bad_value(function, argument, f"one of {', '.join(map(repr, allowed))}", repr(value))


def integer(function: str, argument: str, value: Any) -> int:
    """Returns `value` as an int: anything with __index__ but a bool, which a slip of arguments gives."""
    if isinstance(value, bool):
        raise bad_type(function, argument, "an int", repr(value))
    try:
        return operator.index(value)
    except TypeError:
        raise bad_type(function, argument, "an int", repr(value)) from None


def untransformed(function: str, first: str, tensors: Iterable[Any]) -> None:
    """Checks that no tracer or transform of torch is at work, which would take this call's results for constants.

    first: the argument that a message names.
    """
    transform = arrays.Torch.transformed(tensors)
    if transform is not None:
        expected = "a call outside of all transforms of torch but torch.compile, which take its results for constants"
        raise RuntimeError(_message(function, first, expected, transform))


def no_transform(function: str, given: Mapping[str, Any]) -> None:
    """Checks, if the first is a torch tensor, that no transform is to follow this call, as it could not."""
    first = next(iter(given))
    if arrays.framework_of(given[first]) is arrays.Torch:
        untransformed(function, first, given.values())


def untracked(function: str, given: Mapping[str, Any]) -> None:
    """Checks, if the first is a torch tensor, that neither autograd nor a transform is to follow, as they could not."""
    torch = sys.modules.get("torch")
    if torch is None or arrays.framework_of(next(iter(given.values()))) is not arrays.Torch:
        return
    if torch.is_grad_enabled():
        for name, tensor in given.items():
            if getattr(tensor, "requires_grad", False):
                expected = "a tensor that requires no gradient, as none is recorded here"
                advice = "use moe or route of moeblaze_cupy.interop.torch, or detach"
                raise RuntimeError(_message(function, name, expected, f"one that requires it; {advice}"))
    no_transform(function, given)


def unreadable(function: str, argument: str, error: Exception) -> Exception:
    """Returns the error of reading an array, with the names of the function and the argument."""
    own_name, text = "moeblaze_cupy: ", str(error)
    known = text.startswith(own_name)
    text = text.removeprefix(own_name) if known else f"expected an array whose memory can be read, got {text}"
    kind = RuntimeError if isinstance(error, RuntimeError) else TypeError
    return kind(f"{function}: {argument}: {text}")


def shape(
    function: str, argument: str, array: Array, letters: str, expected: tuple[int | None, ...], hint: str = ""
) -> None:
    """Checks the shape of an array; `expected` has None where any size will do."""
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
        expected = "a C-contiguous array, as of .contiguous() or np.ascontiguousarray"
        raise bad_value(function, argument, expected, f"strides {array.strides} for shape {array.shape}")


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


def ids(function: str, array: Array, num_experts: int, token_offsets: Array | None = None) -> None:
    """Checks ids and, where tokens have any number of experts, the `token_offsets` of their pairs."""
    if token_offsets is not None:
        offsets(function, token_offsets)
        shape(function, "ids", array, "P", (None,), "; with token_offsets ids are pairs")
    elif len(array.shape) != 2 or array.shape[1] < 1:
        raise bad_value(function, "ids", "shape (L, k) with k >= 1", array.shape)
    dtype(function, "ids", array, ID_DTYPES)
    contiguous(function, "ids", array)
    slots(function, "ids", array.size)
    if token_offsets is None and array.shape[1] > launch_config.MAX_K:
        raise bad_value(function, "ids", f"at most {launch_config.MAX_K} slots per token", array.shape[1])
    if not 1 <= num_experts <= launch_config.MAX_EXPERTS:
        raise bad_value(function, "num_experts", f"1 to {launch_config.MAX_EXPERTS}", num_experts)


def known_ids(function: str, array: Array, num_experts: int) -> None:
    """Checks the contents of ids, to find a mistake: this waits for the device. A call does it with CHECKS_IDS.

    -1 passes, because routers, selections and exchanges write it where a slot is empty on purpose.
    """
    given = array.owner
    if array.size and bool(((given < -1) | (given >= num_experts)).any()):
        expected = f"-1 to {num_experts - 1} in all slots, as MOEBLAZE_CHECK_IDS asks"
        raise bad_value(function, "ids", expected, f"{int(given.min())} to {int(given.max())}")


def offsets(function: str, array: Array) -> None:
    """Checks token_offsets of pairs, but not their contents: the kernels take any."""
    if len(array.shape) != 1 or array.shape[0] < 1:
        raise bad_value(function, "token_offsets", "shape (L + 1,)", array.shape)
    dtype(function, "token_offsets", array, ("int32",))
    contiguous(function, "token_offsets", array)
    if array.size - 1 > launch_config.MAX_SLOTS:
        raise bad_value(function, "token_offsets", f"at most {launch_config.MAX_SLOTS} tokens", array.size - 1)


def max_slots(function: str, value: Any, num_slots: int) -> int | None:
    """Returns the bound of slots that have a row, as an int: None, or 1 to L*k, the most there are; 0 without slots."""
    if value is None:
        return None
    bound = integer(function, "max_slots", value)
    if bound < 1:
        raise bad_value(function, "max_slots", "None, or at least 1", bound)
    return min(bound, num_slots)


def memory_limit(function: str, given: Any, w2: Array | None = None, **others: Any) -> int | None:
    """Returns the limit as an int, or None; checks that the layer can be computed in chunks of tokens.

    w2: of a layer with gradients. others: by name, what no chunks go with; None for what is absent.
    """
    if given is None:
        return None
    limit = integer(function, "memory_limit", given)
    if limit < 1:
        raise bad_value(function, "memory_limit", "None, or at least 1 byte", limit)
    for name, other in others.items():
        if other is not None:
            raise bad_value(function, "memory_limit", f"None with {name}, which goes without chunks", limit)
    if w2 is not None and w2.itemsize == 2 and (w2.shape[1] % 8 or w2.shape[2] % 8):
        expected = f"None with {w2.dtype} weights whose d and h are no multiples of 8"
        raise bad_value(function, "memory_limit", expected, limit)
    return limit


def layer_options(function: str, given: LayerOptions, has_weights: bool, has_b1: bool = False) -> LayerOptions:
    """Returns the options, identity experts as an int; checks that what slots do is valid and goes together."""
    one_of(function, "weights_on", given.weights_on, WEIGHTS_ON)
    if not isinstance(given.unreduced, (bool, np.bool_)):
        raise bad_type(function, "unreduced", "True or False", repr(given.unreduced))
    number = integer(function, "identity_experts", given.identity_experts)
    if number < 0:
        raise bad_value(function, "identity_experts", "at least 0", number)
    if given.unreduced and number:
        raise bad_value(function, "identity_experts", "0 with unreduced=True, which has no rows for them", number)
    if given.unreduced and not given.on_input and has_weights:
        expected = "None with unreduced=True, whose output is not weighted (or weights_on='input')"
        raise bad_value(function, "weights", expected, "an array")
    if not has_weights and (given.on_input or not given.unreduced):
        raise bad_type(function, "weights", "an array, as only unreduced=True goes without one", None)
    if given.on_input and has_b1:
        raise bad_value(function, "b1", "None, as weights_on='input' goes without b1", "a bias")
    return given._replace(unreduced=bool(given.unreduced), identity_experts=number)


def tf32(function: str, given: Any, x: Array) -> None:
    if not isinstance(given, (bool, np.bool_)):
        raise bad_type(function, "tf32", "True or False", repr(given))
    if given and x.dtype != "float32":
        raise bad_value(function, "tf32", f"False for x of {x.dtype}, as TF32 stands in for float32", "True")


def identity_experts(function: str, options: LayerOptions, num_experts: int) -> None:
    most = 2**31 - 1 - num_experts
    if options.identity_experts > most:
        raise bad_value(function, "identity_experts", f"at most {most}, as ids are int32", options.identity_experts)


def weight_order(function: str, argument: str, array: Array) -> bool:
    """Returns True if the memory order is (E, columns, rows), the transposed view; False if row-major.

    Either inner dimension may be the contiguous one; rows (less than 2 GiB) and experts may be further apart.
    """
    _, rows, columns = array.shape
    _, row_stride, column_stride = array.strides
    far = 2**31 // array.itemsize  # the kernels' row pitch is 32 bits of bytes
    if (abs(row_stride) >= far and rows > 1) or (abs(column_stride) >= far and columns > 1):
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
    """Returns a hint if a weight (E, rows, columns) comes as (E, columns, rows), which transformers and vLLM store."""
    fits = len(array.shape) == 3 and array.shape[1] == columns and rows in (None, array.shape[2])
    swap = "transpose" if arrays.framework_of(array.owner) is arrays.Torch else "swapaxes"
    return f"; pass its transposed view, .{swap}(1, 2)?" if fits else ""


def activation(function: str, value: Any) -> None:
    is_name = isinstance(value, str)  # `in` would compare an array element by element
    if not isinstance(value, Activation) and not (is_name and value in ACTIVATIONS):
        names = ", ".join(map(repr, ACTIVATIONS))
        raise bad_value(function, "activation", f"one of {names}", f"{value!r}; {ACTIVATIONS_PAGE}")


def gate_up(function: str, value: Any, of_layer: str | Activation) -> None:
    one_of(function, "gate_up", value, GATE_UP)
    if value == "interleaved" and not is_gated(of_layer):
        raise bad_value(function, "gate_up", f"'halves' for an activation without a gate, {of_layer!r}", repr(value))


def layer(function: str, given: LayerArrays, options: LayerOptions) -> None:
    """Checks the arrays of a layer. given: the `arrays.Array` of each, None for an absent one."""
    x, chosen, weights, w2 = given.x, given.ids, given.router_weights, given.w2
    w1, b1, token_offsets = given.w1_parts, given.b1_parts, given.token_offsets
    act, columns_order = options.activation, options.gate_up
    activation(function, act)
    one_of(function, "save", options.save, SAVE_POLICIES)
    gate_up(function, columns_order, act)
    names = ("w1",) if len(w1) == 1 else ("w1[0]", "w1[1]")
    hint = f"; x.reshape(-1, {x.shape[-1]}) has this form" if len(x.shape) > 2 else ""
    shape(function, "x", x, "L, d", (None, None), hint)
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
    if len(w1) == 2 and not is_gated(act):
        raise bad_value(function, "w1", f"one array (E, d, h) for activation {act!r}", "a pair")
    if len(w1) == 2 and columns_order == "interleaved":
        raise bad_value(function, "w1", "one array (E, d, 2h) for gate_up='interleaved'", "a pair")
    for name, array in zip(names, w1, strict=True):
        letters, columns = ("E, d, 2h", 2 * h) if len(w1) == 1 and is_gated(act) else ("E, d, h", h)
        if array.shape[1:] == (d, columns) and array.shape[0] != E:  # either may be the wrong one
            raise bad_value(function, f"{name} and w2", "as many experts in both", f"{array.shape} and {w2.shape}")
        hint = in_storage_order(array, d, columns)
        if array.shape == (E, d, 2 * h) and not is_gated(act):
            hint = f"; {act!r} has no gate: for columns of gate and up choose one that has, such as 'swiglu'"
        elif array.shape[:2] == (E, d) and len(array.shape) == 3 and array.shape[2] != columns:  # again either
            expected = f"one h in shapes ({letters}) and (E, h, d)"
            advice = "; 'silu' and other activations without a gate take w1 (E, d, h)" if array.shape[2] == h else ""
            raise bad_value(function, f"{name} and w2", expected, f"{array.shape} and {w2.shape}{advice}")
        shape(function, name, array, letters, (E, d, columns), hint)
    for name, array in (*zip(names, w1, strict=True), ("w2", w2)):
        if array.dtype != x.dtype:
            raise bad_type(function, name, f"dtype {x.dtype}, that of x", array.dtype)
        weight_order(function, name, array)
    if len(w1) == 2:
        alike(function, "w1", *w1)
    if token_offsets is None:
        shape(function, "ids", chosen, "L, k", (L, None))
    else:
        shape(function, "token_offsets", token_offsets, "L + 1", (L + 1,))
    ids(function, chosen, E, token_offsets)
    if weights is not None:
        shape(function, "weights", weights, "L, k" if token_offsets is None else "P", chosen.shape)
        dtype(function, "weights", weights, tuple(dict.fromkeys(("float32", x.dtype))))
        contiguous(function, "weights", weights)
    _biases(function, b1, given.b2_parts, x.dtype, (E, d, h), act, columns_order)


def _biases(
    function: str,
    b1: tuple[Array, ...],
    b2: tuple[Array, ...],
    x_dtype: str,
    sizes: tuple[int, int, int],
    act: str | Activation,
    columns_order: str,
) -> None:
    E, d, h = sizes
    if len(b1) == 2 and not is_gated(act):
        raise bad_value(function, "b1", f"one array (E, h) for activation {act!r}", "a pair")
    if len(b1) == 2 and columns_order == "interleaved":
        raise bad_value(function, "b1", "one array (E, 2h) for gate_up='interleaved'", "a pair")
    letters, columns = ("E, 2h", 2 * h) if len(b1) == 1 and is_gated(act) else ("E, h", h)
    names = ("b1",) if len(b1) == 1 else ("b1[0]", "b1[1]")
    given = [(name, array, letters, columns) for name, array in zip(names, b1, strict=False)]
    for name, array, of_shape, width in (*given, *(("b2", array, "E, d", d) for array in b2)):
        shape(function, name, array, of_shape, (E, width))
        dtype(function, name, array, tuple(dict.fromkeys(("float32", x_dtype))))
        bias_order(function, name, array)
    if len(b1) == 2:
        alike(function, "b1", *b1)


def bias_order(function: str, argument: str, array: Array) -> None:
    """Checks that columns follow each other; experts may be further apart."""
    if array.shape[1] > 1 and array.strides[1] != 1:
        raise bad_value(
            function, argument, "a contiguous last dimension", f"strides {array.strides} for shape {array.shape}"
        )


def alike(function: str, argument: str, gate: Array, up: Array) -> None:
    """Checks that both halves of a weight or a bias are alike, as one launch serves both."""
    if any(n != 1 and a != b for n, a, b in zip(gate.shape, gate.strides, up.strides, strict=True)):
        raise bad_value(function, argument, "gate and up with equal strides", f"{gate.strides} and {up.strides}")
    dtype(function, f"{argument}[1]", up, (gate.dtype,))


def accumulated_names(function: str, accumulate: Any, needs: tuple[str, ...], present: tuple[str, ...]) -> None:
    """Checks the names in `accumulate`. present: the names of what the layer has gradients of."""
    names = tuple(name for name in present if name not in ("x", "weights", "lora"))
    if not isinstance(accumulate, Mapping):
        *first, last = map(repr, names)
        wanted = f"a mapping from {', '.join(first)} and {last} to arrays"
        raise bad_type(function, "accumulate", wanted, type(accumulate))
    for name in accumulate:
        one_of(function, "accumulate", name, names)
        if name not in needs:
            raise bad_value(function, "accumulate", f"names that are in needs, {needs}", repr(name))


def accumulated(
    function: str, buffers: Mapping[str, Array], weight_shapes: Sequence[tuple[int, ...]], x_dtype: str
) -> None:
    """Checks `buffers`, by their argument names: one weight's accumulated gradient, or those of its (gate, up) pair."""
    for (name, array), weight_shape in zip(buffers.items(), weight_shapes, strict=True):
        if array.shape != weight_shape:
            raise bad_value(function, name, f"the weight's shape {weight_shape}", array.shape)
        dtype(function, name, array, tuple(dict.fromkeys(("float32", x_dtype))))
        (weight_order if len(weight_shape) == 3 else bias_order)(function, name, array)
        without_overlap(function, name, array)
    if len(buffers) == 2:
        alike(function, next(iter(buffers)).removesuffix("[0]"), *buffers.values())


def without_overlap(function: str, argument: str, array: Array) -> None:
    """Checks that no two elements of an array that is written lie in one place."""
    end = 1
    for stride, n in sorted((abs(stride), n) for n, stride in zip(array.shape, array.strides, strict=True) if n != 1):
        if stride < end:
            raise bad_value(
                function, argument, "an array without overlaps", f"strides {array.strides} for shape {array.shape}"
            )
        end += (n - 1) * stride


def gradient_names(function: str, needs: Any, present: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names as a tuple. present: what the layer has gradients of, with biases; None asks for them all."""
    if needs is None or (type(needs) is tuple and needs == present):
        return present
    if not isinstance(needs, (tuple, list, set, frozenset)):
        raise bad_type(function, "needs", f"a tuple of names from {', '.join(map(repr, present))}", repr(needs))
    for name in needs:
        one_of(function, "needs", name, present)
    return tuple(needs)


def layer_backward(function: str, grad_out: Array, x: Array, saved: SavedForBackward) -> None:
    if saved.options.unreduced:
        letters = "P, d" if saved.index.is_ragged else "L, k, d"
        slots_shape = saved.index.places["token_index_map"][1]
        shape(function, "grad_out", grad_out, letters, (*slots_shape, x.shape[1]))
    else:
        shape(function, "grad_out", grad_out, "L, d", x.shape)
    dtype(function, "grad_out", grad_out, (x.dtype,))
    contiguous(function, "grad_out", grad_out)
    not_consumed(function, saved)


def not_consumed(function: str, saved: SavedForBackward) -> None:
    if saved.consumed:
        advice = "pass keep_saved=True to the earlier call"
        if function == "expert_parallel_moe":  # all ranks take part in its backward
            advice = "each forward has one backward"
        raise consumed(function, advice)


def consumed(function: str, advice: str) -> RuntimeError:
    expected = "activations that are still there"
    got = "ones that an earlier backward overwrote with their gradients"
    return RuntimeError(_message(function, "saved", expected, f"{got}; {advice}"))


def rows_of_ids(function: str, array: Array, num_experts: int) -> None:
    """Checks ids (L, k) whose rows may lie apart, such as the first choices ids[:, :1]."""
    if len(array.shape) != 2 or array.shape[1] < 1:
        raise bad_value(function, "ids", "shape (L, k) with k >= 1", array.shape)
    dtype(function, "ids", array, ID_DTYPES)
    if array.size and array.shape[1] > 1 and array.strides[1] != 1:
        raise bad_value(function, "ids", "rows of consecutive elements", f"strides {array.strides}")
    slots(function, "ids", array.size)
    experts(function, "num_experts", num_experts)


def experts(function: str, argument: str, number: int) -> None:
    if not 1 <= number <= launch_config.MAX_EXPERTS:
        raise bad_value(function, argument, f"1 to {launch_config.MAX_EXPERTS} experts", number)


def columns(function: str, argument: str, array: Array, dtypes: tuple[str, ...]) -> None:
    """Checks an array (L, E) with a column per expert."""
    shape(function, argument, array, "L, E", (None, None))
    dtype(function, argument, array, dtypes)
    contiguous(function, argument, array)
    if array.shape[0] > launch_config.MAX_SLOTS:
        raise bad_value(function, argument, f"at most {launch_config.MAX_SLOTS} tokens", array.shape[0])
    experts(function, argument, array.shape[1])


def vector(function: str, argument: str, array: Array, letters: str, length: int, dtypes: tuple[str, ...]) -> None:
    shape(function, argument, array, letters, (length,))
    dtype(function, argument, array, dtypes)
    contiguous(function, argument, array)


def divided(function: str, sequences: Any) -> tuple[int | None, Any]:
    """Returns `sequences` as (the number, None), or (None, the array of offsets), which is not looked at."""
    if getattr(sequences, "shape", ()) != ():
        return None, sequences
    try:
        return integer(function, "sequences", sequences), None
    except TypeError:
        raise bad_type(function, "sequences", "an int or an array of offsets", repr(sequences)) from None


def sequences(function: str, number: int | None, offsets: Array | None, num_tokens: int, num_experts: int) -> int:
    """Returns the number of sequences, from that number or from int32 offsets (S+1,)."""
    if offsets is not None:
        if len(offsets.shape) != 1 or offsets.shape[0] < 2:
            raise bad_value(function, "sequences", "an int, or offsets of shape (S+1,) with S >= 1", offsets.shape)
        dtype(function, "sequences", offsets, ("int32",))
        contiguous(function, "sequences", offsets)
        number = offsets.shape[0] - 1
    elif number is None or number < 1 or num_tokens % number:
        raise bad_value(function, "sequences", f"offsets, or a number >= 1 that divides L = {num_tokens}", number)
    slots_of_all = number * num_experts
    if slots_of_all > launch_config.MAX_SLOTS:
        raise bad_value(function, "sequences", f"S * E of at most {launch_config.MAX_SLOTS}", slots_of_all)
    return number


def pairs(function: str, argument: str, number: int) -> None:
    if not 0 <= number <= launch_config.MAX_SLOTS:
        raise bad_value(function, argument, f"0 to {launch_config.MAX_SLOTS} pairs (int32 offsets)", number)


def writable(function: str, argument: str, array: Any) -> None:
    """Checks that the caller's array may be written."""
    framework = arrays.framework_of(array)
    if framework is None:  # an array that speaks DLPack alone may be immutable
        raise bad_type(function, argument, "a NumPy, CuPy or torch array", type(array))
    if framework is arrays.NumPy and not array.flags.writeable:
        raise bad_value(function, argument, "an array that can be written", "a read-only one")


def named_pair(function: str, name: str, w1: Any) -> dict[str, Any]:
    """Returns the arrays of a weight or a bias by argument name; none for None."""
    if w1 is None:
        return {}
    parts = pair(w1)
    if len(parts) not in (1, 2):
        advice = "; torch.stack or np.stack makes one of them" if len(parts) > 2 else ""
        raise bad_value(function, name, "one array or a pair (gate, up)", f"{len(parts)} arrays{advice}")
    return {name: parts[0]} if len(parts) == 1 else {f"{name}[0]": parts[0], f"{name}[1]": parts[1]}


def fp8_rows(function: str, name: str, values: Array, scales: Array) -> None:
    """Checks the `Fp8Rows` of argument `name`; the shape of the values is left to the checks of rows."""
    dtype(function, f"{name}.values", values, ("uint8",))
    shape(function, f"{name}.scales", scales, "L", values.shape[:1])
    dtype(function, f"{name}.scales", scales, ("float32",))
    contiguous(function, f"{name}.scales", scales)
    if values.device != arrays.CPU and values.ptr % arrays.ALIGNMENT:
        raise bad_value(function, f"{name}.values", "16-byte aligned memory", hex(values.ptr))
