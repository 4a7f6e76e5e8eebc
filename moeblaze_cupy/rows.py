"""Sums of rows that are named by index, which put together what other ranks' experts made of a token."""

from typing import Any

from moeblaze_cupy import arrays, checks, reference
from moeblaze_cupy.call import Call
from moeblaze_cupy.ops import aggregation
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
    return aggregation.aggregate(IndexLayout(L, P, 1), dtype, None, d, 0, d, d, misalignment)
