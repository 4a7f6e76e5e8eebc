"""Collectives of torch.distributed for the exchange of tokens: bytes, uneven splits, errors that name the call."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moeblaze_cupy.types import ACTIVATIONS, FORMS, Activation

Tensor = torch.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SENT_DTYPES = (*DTYPES, torch.float8_e4m3fn)  # dtypes in which rows or router weights travel
DEVICES = ("cpu", "cuda")
PRECISIONS = (None, "fp8")
REQUIRING = ("x", "weights", "experts", "y")  # a bit each in "requires_grad"
FIRST_STEPS = ("exchange", "expert_parallel_moe")
STEPS = (
    *FIRST_STEPS,
    *("collect", "backward of collect", "backward of exchange", "backward of expert_parallel_moe"),
    "options of ExpertGroup",
)
CONSTANTS = ("constant 1", "constant 2")  # of the activation, as many as one has at most, in bits of float32
# The names are in the header's order. Steps other than the first have 0 for most.
SAME = (
    *("failed", "step", "group", "call", "d", "k", "experts", "dtype", "weights", "device", "activation", *CONSTANTS),
    *("precision", "requires_grad", "tokens"),
)


@contextmanager
def named(what: str, group: Any) -> Iterator[None]:
    """Turns errors of a collective within it into a RuntimeError that says which rank waited for what."""
    try:
        yield
    except RuntimeError as error:  # dist.DistBackendError and its kin are
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        raise RuntimeError(f"exchange: {what}: rank {rank} of {size} got no answer from the others: {error}") from error


class Pending:
    """A collective under way. `wait` gives its result; on CUDA the current stream then waits, not the host."""

    def __init__(self, result: Tensor, work: Any, what: str, group: Any, inputs: Any) -> None:
        self._result, self._work, self._what, self._group = result, work, what, group
        self._inputs = inputs  # alive until the collective has read them

    def wait(self) -> Tensor:
        if self._work is not None:
            with named(self._what, self._group):
                self._work.wait()
        self._work = self._inputs = None
        return self._result


def in_bytes(rows: Tensor) -> Tensor:
    """Returns (n, columns) as (n, bytes), because gloo has no bf16."""
    if not rows.numel():  # NumPy and torch's elementwise functions give these strides that allow no view
        return rows.new_empty((len(rows), rows.shape[1] * rows.itemsize), dtype=torch.uint8)
    return rows.view(torch.uint8)


def all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], room: int, what: str, group: Any) -> Pending:
    """Sends rows (n, columns), by rank. The result has `room` rows, the first of which are what came, by rank."""
    rows = rows.contiguous()
    result, total = rows.new_empty((room, rows.shape[1])), sum(received)
    with named(what, group):
        work = dist.all_to_all_single(
            in_bytes(result[:total]), in_bytes(rows), list(received), list(sent), group=group, async_op=True
        )
    return Pending(result, work, what, group, rows)


def all_gather(rows: Tensor, what: str, group: Any) -> Pending:
    """Gathers equally many rows (n, columns) of each rank, by rank: (P*n, columns)."""
    rows, size = rows.contiguous(), dist.get_world_size(group)
    result = rows.new_empty((size * len(rows), *rows.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    with named(what, group):
        work = gather(in_bytes(result), in_bytes(rows), group=group, async_op=True)
    return Pending(result, work, what, group, rows)


def gather_objects(value: Any, group: Any) -> list[Any]:
    """Returns the values of all ranks, by rank. The hosts wait for each other."""
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group=group)
    return by_rank


class PendingHeaders:
    """The headers of all ranks, on the way to the host while the device works on."""

    def __init__(self, gathered: Pending, is_cuda: bool = False) -> None:
        """Begins the copy. gathered: (P, n) int64, a row from each rank. is_cuda: it is on the device."""
        self._pending: Pending | None = gathered
        self._arrived: Any = None
        if is_cuda:
            on_device, self._pending = gathered.wait(), None
            self._values = torch.empty(on_device.shape, dtype=on_device.dtype, device="cpu", pin_memory=True)
            self._values.copy_(on_device, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
            self._arrived.record()

    def sent(self) -> None:
        """Waits until the other ranks have the values, where hosts send them."""
        if self._pending is not None:
            self._values, self._pending = self._pending.wait(), None

    def read(self) -> list[list[int]]:
        """Returns the headers by rank. The host waits for them."""
        self.sent()
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[list[int]] = self._values.tolist()
        return values


@functools.lru_cache
def numbers_of(activation: str | Activation) -> Mapping[str, int]:
    """Returns an activation's columns by their names in `SAME`."""
    whole = activation if isinstance(activation, Activation) else Activation(activation)
    bits = np.array([*whole.constants.values()], np.float32).view(np.uint32).tolist()
    return {"activation": ACTIVATIONS.index(whole.name), **dict(zip(CONSTANTS, bits, strict=False))}


def _activation_of(values: Sequence[int]) -> str | Activation:
    """Returns the activation of a header, by its name where it has no constants."""
    name = ACTIVATIONS[values[SAME.index("activation")]]
    known = FORMS[name].constants
    first = SAME.index(CONSTANTS[0])
    constants = np.array(values[first : first + len(known)], np.uint32).view(np.float32)
    # As text they have the digits of float32.
    named = {constant.name: float(str(value)) for constant, value in zip(known, constants, strict=True)}
    return Activation(name, **named) if named else name


def header(**values: int) -> list[int]:
    """Returns the values in the order of `SAME`, 0 for those that are not given."""
    return [values.get(name, 0) for name in SAME]


def check_same(by_rank: Sequence[Sequence[int]], same_tokens: bool) -> None:
    """Raises one ValueError on all ranks if what must be the same differs among them; `SAME` names the columns."""
    compared = [values[: len(SAME) - (not same_tokens)] for values in by_rank]  # "tokens" are last
    if not compared[0][0] and compared.count(compared[0]) == len(compared):
        return
    steps = [STEPS[values[SAME.index("step")]] for values in by_rank]
    functions = {step.split()[-1] for step in steps}
    function = functions.pop() if len(functions) == 1 else "exchange"
    failed = [rank for rank, values in enumerate(by_rank) if values[0]]
    if failed:
        step, expected = steps[failed[0]], "no error on any rank"
        if step in (*FIRST_STEPS, "collect"):
            step, expected = "arguments", "ones that pass the checks on all ranks"
        raise ValueError(f"{function}: {step}: expected {expected}, got errors on {failed}")
    at, reason = "at", "of which one has skipped a layer"
    if steps[0] not in FIRST_STEPS:
        at, reason = f"at {steps[0]} of", "of which one has skipped a step or taken another order"
    for name, *values in zip(SAME[1:], *(of_rank[1:] for of_rank in compared), strict=False):
        if len(set(values)) == 1:
            continue
        got: list[Any] = values
        expected = "the same on all ranks"
        if name == "step":
            expected, got = "all ranks at the same step", steps
        elif name == "group":
            expected = f"all ranks {at} the same ExpertGroup, in the order of their making, {reason}"
        elif name == "call":
            expected = f"all ranks {at} the same exchange, {reason}"
        elif name == "requires_grad":
            expected += ", or backward would wait for ever"
            got = [[of for bit, of in enumerate(REQUIRING) if v >> bit & 1] for v in values]
        elif name in ("dtype", "weights"):
            got = [str(SENT_DTYPES[v]) for v in values]
        elif name == "device":
            got = [DEVICES[v] for v in values]
        elif name == "precision":
            got = [PRECISIONS[v] for v in values]
        elif name in ("activation", *CONSTANTS):
            name, got = "activation", [*map(_activation_of, by_rank)]
        elif name == "tokens":
            expected += ' for route "static"'
        raise ValueError(f"{function}: {name}: expected {expected}, got {got}")
