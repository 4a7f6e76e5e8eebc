"""Rows named by index, here or in the memory of other GPUs, and sums of them: a token's way to its experts and back."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from moeblaze_cupy import checks, frameworks, reference
from moeblaze_cupy.calls import Call, Lookup, graph_break, launched
from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.frameworks import Array, Buffer
from moeblaze_cupy.rows import aggregation, pull
from moeblaze_cupy.types import Fp8Rows


@graph_break
def sum_rows(rows: Any, positions: Any) -> Any:
    """Computes out[t] = sum over j, in order, of rows[positions[t, j]], in fp32, rounded once.

    rows: (n, d) bf16, fp16 or fp32 (fp64 on the CPU), contiguous. positions: (L, P) int32, contiguous, each below n;
    one below 0 names no row. On CUDA the host does not look at positions, so the rows that they name must exist.
    Returns out (L, d) in rows' dtype. No row is copied, and equal inputs give equal bits.
    Raises TypeError (dtype, device), ValueError (shape, memory order, on the CPU positions from n on), or RuntimeError
    of tensors that autograd or a transform of torch would have to follow.
    """
    function, names = "sum_rows", ("rows", "positions")
    look = Lookup(function, (), names, (rows, positions))
    if look.record is None:
        call = look.begin(required=2)
        of_rows, of_positions = call.described["rows"], call.described["positions"]
        checks.shape(function, "rows", of_rows, "n, d", (None, None))
        checks.dtype(function, "rows", of_rows, checks.floats(of_rows))
        checks.shape(function, "positions", of_positions, "L, P", (None, None))
        checks.dtype(function, "positions", of_positions, ("int32",))
        for name, array in call.described.items():
            checks.contiguous(function, name, array)
            if array.shape[1] < 1:
                raise checks.bad_value(function, name, "at least one column", array.shape)
        (n, d), (L, P) = of_rows.shape, of_positions.shape
        if call.on_cpu:
            where = call.host("positions")
            if where.size and where.max() >= n:
                raise checks.bad_value(function, "positions", f"rows below {n}", where.max())
            return call.on_host(reference.sum_rows)
        step = _configure(L, P, d, of_rows.dtype, of_rows.ptr % frameworks.ALIGNMENT)
        look.keep((step, (L, d), of_rows.dtype))
    return look.run(_sum_rows)


def _configure(L: int, P: int, d: int, dtype: str, misalignment: int) -> Launch | None:
    if L == 0:
        return None
    return aggregation.aggregate(IndexLayout(L, P, 1), dtype, None, d, 0, d, d, misalignment=misalignment)


def _sum_rows(run: Runtime, plan: tuple[Launch | None, tuple[int, int], str], pointers: Sequence[int]) -> Buffer:
    step, shape, dtype = plan
    out = run.empty(shape, dtype)
    if step:
        rows, positions = pointers
        run.launch(step, rows, positions, 0, out.ptr)
    return out


class PeerArray(NamedTuple):
    """An array of every rank of a group, at the same place of a buffer that the GPUs of all ranks can read."""

    addresses: Any  #: (P,) int64, CuPy or torch on CUDA: the buffers, by rank
    offset: int  #: bytes from there to the array
    dtype: str


class Share(NamedTuple):
    """One of P ranks. It has the experts rank * experts to (rank + 1) * experts - 1."""

    rank: int
    experts: int  #: the same number on every rank
    tokens: int  #: rows that every rank has for the tokens of each; some may have no token


def pull_slots(ids: PeerArray, weights: PeerArray, share: Share, local_ids: Any, pulled: Any, needed: Any) -> None:
    """Fetches what this rank has to know of the slots of all ranks' tokens; rows are by rank, then token.

    M is share.tokens. ids: those of all ranks, (M, k) int32 or int64; one that is none of all experts is no expert.
    weights: those of all ranks, (M, k).
    Writes local_ids (P*M, k) int32, from 0 to share.experts - 1, or -1 without an expert here, the weights (P*M, k)
    into `pulled`, and needed (P*M,) bool, whether a row has an expert here. These are CuPy or torch arrays on CUDA,
    contiguous. Nothing is looked at on the host. The peers have written their arrays before: a barrier comes first.
    Dtypes and shapes are not checked, as a route makes these arrays. Raises ValueError (memory order).
    """
    function = "pull_slots"

    def step(call: Call) -> Launch | None:
        (rows, k), P = call.described["local_ids"].shape, call.described["peers"].size
        first = share.rank * share.experts
        if not rows * k:
            return None
        sizes = P, share.tokens, k, ids.offset, weights.offset, first, share.experts
        return pull.pull_slots(*sizes, ids.dtype, weights.dtype)

    outputs = {"local_ids": local_ids, "weights": pulled, "needed": needed}
    _pull(function, (ids[1:], weights[1:], share), {"peers": ids.addresses, **outputs}, step)


def pull_rows(rows: PeerArray, needed: Any, out: Any) -> None:
    """Copies out[r * L + t] = row t of rank r where needed[r * L + t]; other rows of `out` stay as they are.

    rows: those of all ranks, (L, d) in out's dtype. needed: (P*L,) bool. out: (P*L, d), aligned, d a multiple of 8.
    The rest is as in `pull_slots`.
    """
    function = "pull_rows"

    def step(call: Call) -> Launch | None:
        into, P = _output(function, call), call.described["peers"].size
        L, d = into.shape[0] // P, into.shape[1]
        return pull.pull_rows(P, L, d, into.dtype, rows.offset) if L else None

    _pull(function, rows[1:], {"peers": rows.addresses, "needed": needed, "out": out}, step)


def pull_scaled_rows(values: PeerArray, scales: PeerArray, needed: Any, out: Fp8Rows) -> None:
    """Copies as `pull_rows` does, rows in e4m3 with their scales.

    values: those of all ranks, (L, d) uint8, d a multiple of 16. scales: those of all ranks, (L,) float32. out:
    (P*L, d), aligned, and (P*L,).
    """
    function = "pull_scaled_rows"

    def step(call: Call) -> Launch | None:
        into, P = call.described["out.values"], call.described["peers"].size
        L, d = into.shape[0] // P, into.shape[1]
        if d % 16:
            raise checks.bad_value(function, "out.values", "columns in multiples of 16", d)
        return pull.pull_scaled_rows(P, L, d, values.offset, scales.offset) if L else None

    arrays_here = {"needed": needed, "out.values": out.values, "out.scales": out.scales}
    _pull(function, (values[1:], scales[1:]), {"peers": values.addresses, **arrays_here}, step)


def sum_peer_rows(rows: PeerArray, ids: Any, share: Share, out: Any) -> None:
    """out[t] = sum over ranks that have an expert of token t, in order, of their row share.rank * M + t; 0 without any.

    The sum is in fp32 and rounded once. rows: those of all ranks, (P*M, d) in out's dtype, by rank, then token.
    ids: (L, k) int32 or int64, this rank's, L <= M. out: (L, d), aligned, d a multiple of 8. The rest is as in
    `pull_slots`.
    """
    function = "sum_peer_rows"

    def step(call: Call) -> Launch | None:
        into, of_ids, P = _output(function, call), call.described["ids"], call.described["peers"].size
        L, d = into.shape
        sizes = P, L, of_ids.shape[1], d, share.rank * share.tokens, share.experts
        return pull.pull_sum(*sizes, of_ids.dtype, into.dtype, rows.offset) if L else None

    _pull(function, (rows[1:], share), {"peers": rows.addresses, "ids": ids, "out": out}, step)


def pull_values(values: PeerArray, ids: Any, share: Share, out: Any) -> None:
    """out[t, j] = element (share.rank * M + t, j) of the rank that has expert ids[t, j]; 0 for slots without an expert.

    values: those of all ranks, (P*M, k) in out's dtype. ids: (L, k) int32 or int64, this rank's, L <= M. out: (L, k).
    The rest is as in `pull_slots`.
    """
    function = "pull_values"

    def step(call: Call) -> Launch | None:
        into, of_ids, P = call.described["out"], call.described["ids"], call.described["peers"].size
        first_slot, offset = share.rank * share.tokens * into.shape[1], values.offset
        sizes = P, into.size, first_slot, share.experts
        return pull.pull_values(*sizes, of_ids.dtype, into.dtype, offset) if into.size else None

    _pull(function, (values[1:], share), {"peers": values.addresses, "ids": ids, "out": out}, step)


def _pull(function: str, options: Any, named: dict[str, Any], step: Callable[[Call], Launch | None]) -> None:
    """Launches what `step` makes of the checked call, whose record the next call of such arrays finds."""
    look = Lookup(function, (options,), tuple(named), tuple(named.values()))
    if look.record is None:
        call = look.begin(required=len(named))
        for name, array in call.described.items():
            checks.contiguous(function, name, array)
        look.keep(step(call))
    look.run(launched)


def _output(function: str, call: Call) -> Array:
    out = call.described["out"]
    if out.shape[1] % 8 or out.ptr % frameworks.ALIGNMENT:
        got = f"{out.shape[1]} at {out.ptr % frameworks.ALIGNMENT} bytes past one"
        raise checks.bad_value(function, "out", "columns in multiples of 8 at a multiple of 16 bytes", got)
    return out
