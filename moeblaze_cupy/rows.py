"""Rows named by index, here or in the memory of other GPUs, and sums of them: a token's way to its experts and back."""

from typing import Any

from moeblaze_cupy import arrays, checks, reference
from moeblaze_cupy.call import Call
from moeblaze_cupy.ops import aggregation, pull
from moeblaze_cupy.ops.dispatch import IndexLayout
from moeblaze_cupy.runtime import Launch, Runtime, cached, current_device


def sum_rows(rows: Any, positions: Any) -> Any:
    """out[t] = sum over j, in order, of rows[positions[t, j]], in fp32, rounded once.

    rows: (n, d) bf16, fp16 or fp32 (fp64 on the CPU), contiguous. positions: (L, P) int32, contiguous, each below n;
    one below 0 names no row. On CUDA the host does not look at positions, so the rows that they name must exist.
    Returns out (L, d) in rows' dtype. No row is copied, and equal inputs give equal bits.
    Raises TypeError (dtype, device), ValueError (shape, memory order, on the CPU positions from n on), or RuntimeError
    of tensors that autograd or a transform of torch would have to follow.
    """
    named = {"rows": rows, "positions": positions}
    checks.untracked("sum_rows", named)
    call = Call("sum_rows", **named)
    of_rows, of_positions = call.described["rows"], call.described["positions"]
    checks.shape("sum_rows", "rows", of_rows, "n, d", (None, None))
    checks.dtype("sum_rows", "rows", of_rows, checks.floats(of_rows))
    checks.contiguous("sum_rows", "rows", of_rows)
    checks.shape("sum_rows", "positions", of_positions, "L, P", (None, None))
    checks.dtype("sum_rows", "positions", of_positions, ("int32",))
    checks.contiguous("sum_rows", "positions", of_positions)
    (n, d), (L, P) = of_rows.shape, of_positions.shape
    for name, shape in (("rows", (n, d)), ("positions", (L, P))):
        if shape[1] < 1:
            raise checks.bad_value("sum_rows", name, "at least one column", shape)
    if call.on_cpu:
        on_host, where = call.host("rows"), call.host("positions")
        if where.size and where.max() >= n:
            raise checks.bad_value("sum_rows", "positions", f"rows below {n}", where.max())
        return call.export(reference.sum_rows(on_host, where))
    step = _configure(L, P, d, of_rows.dtype, of_rows.ptr % arrays.ALIGNMENT)
    with current_device(call.device):
        run = Runtime.current(call.prepared(step).framework, call.device)
        out = run.empty((L, d), of_rows.dtype)
        if step:
            run.launch(step, of_rows.ptr, of_positions.ptr, 0, out.ptr)
        return call.export(out.array)


@cached
def _configure(L: int, P: int, d: int, dtype: str, misalignment: int) -> Launch | None:
    if L == 0:
        return None
    return aggregation.aggregate(IndexLayout(L, P, 1), dtype, None, d, 0, d, d, misalignment=misalignment)


def pull_rows(peers: Any, sources: Any, rows_per_peer: int, out: Any) -> None:
    """out[i] = row sources[i] of the peers' rows, counted on from peer to peer; rows with a source below 0 stay.

    peers: (P,) int64, addresses of (rows_per_peer, d) in out's dtype, in the memory of GPUs that this one can read.
    sources: (n,) int32 below P * rows_per_peer. out: (n, d), aligned, d a multiple of 8. All CuPy or torch arrays on
    CUDA, contiguous. Nothing is looked at on the host. The peers have written their rows before: a barrier comes first.
    Raises TypeError (dtype, device) or ValueError (shape, memory order, alignment).
    """
    call = _pulled("pull_rows", {"out": out, "sources": sources, "peers": peers})
    into, wanted = call.described["out"], call.described["sources"]
    checks.shape("pull_rows", "sources", wanted, "n", (into.shape[0],))
    rows_per_peer = checks.integer("pull_rows", "rows_per_peer", rows_per_peer)
    if into.shape[0] == 0 or rows_per_peer == 0:
        return
    step = pull.pull_rows(into.shape[0], rows_per_peer, into.shape[1], into.dtype)
    with current_device(call.device):
        run = Runtime.current(call.prepared(step).framework, call.device)
        run.launch(step, call.described["peers"].ptr, wanted.ptr, into.ptr)


def sum_peer_rows(peers: Any, positions: Any, out: Any) -> None:
    """out[t] = sum over peers j, in order, of peer j's row positions[t, j], in fp32, rounded once; below 0: no row.

    peers: (P,) int64, addresses of rows of d in out's dtype. positions: (L, P) int32. out: (L, d). Otherwise as
    `pull_rows`.
    """
    call = _pulled("sum_peer_rows", {"out": out, "positions": positions, "peers": peers})
    into, where = call.described["out"], call.described["positions"]
    P = call.described["peers"].size
    checks.shape("sum_peer_rows", "positions", where, "L, P", (into.shape[0], P))
    if into.shape[0] == 0:
        return
    step = pull.pull_sum(into.shape[0], P, into.shape[1], into.dtype)
    with current_device(call.device):
        run = Runtime.current(call.prepared(step).framework, call.device)
        run.launch(step, call.described["peers"].ptr, where.ptr, into.ptr)


def _pulled(function: str, named: dict[str, Any]) -> Call:
    """A call that reads other GPUs' rows, checked."""
    checks.untracked(function, named)
    call = Call(function, **named)
    if call.on_cpu:
        raise checks.bad_type(function, "out", "an array on CUDA", "one on the CPU, which has no peers")
    for name, array in call.described.items():
        checks.contiguous(function, name, array)
        checks.dtype(function, name, array, {"out": checks.floats(array), "peers": ("int64",)}.get(name, ("int32",)))
    out, peers = call.described["out"], call.described["peers"]
    checks.shape(function, "out", out, "n, d", (None, None))
    checks.shape(function, "peers", peers, "P", (None,))
    if out.shape[1] % 8 or out.ptr % arrays.ALIGNMENT:
        got = f"{out.shape[1]} at {out.ptr % arrays.ALIGNMENT} bytes past one"
        raise checks.bad_value(function, "out", "columns in multiples of 8 at a multiple of 16 bytes", got)
    return call
