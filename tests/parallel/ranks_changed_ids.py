"""Cases of ids that the caller writes to in place after a call, and of ids that are checked, over gloo."""

from unittest import mock

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.interop.parallel import ExpertGroup, collect, exchange, expert_parallel_moe
from moeblaze_cupy.interop.torch import moe
from tests.parallel.ranks_common import E, Inputs, case, compare, counts_of, difference, expect
from tests.parallel.ranks_exchange import peers_over_gloo


@case
def ids_that_change_before_backward(rank, size, group):
    """Only "pull" reads ids in backward, and raises an error."""
    inputs = Inputs(rank, counts_of(size, "equal"), "absent")

    def changed(**options):
        x, ids, weights, w1, w2 = inputs.local()
        ids = ids.clone()
        out = expert_parallel_moe(x, ids, weights, w1, w2, ExpertGroup(group, E, **options))
        ids.fill_(-1)
        out.backward(inputs.grad[inputs.here])
        return {"out": out.detach(), "x": x.grad, "weights": weights.grad, "w1": w1.grad, "w2": w2.grad}

    for route in ("exact", "static"):
        compare(inputs, changed(route=route), 1e-14)
    compare(inputs, changed(slots=20), 1e-14, same_bits=False)
    with peers_over_gloo():
        expect(RuntimeError, "modified by an inplace operation", lambda: changed(route="pull"))


@case
def ids_that_change_between_steps(rank, size, group):
    """Those of `exchange`, before `collect` or before backward, on all routes."""
    inputs = Inputs(rank, counts_of(size, "equal"), "absent")

    def run(route, write_before=None):
        x, ids, weights, _, _ = inputs.local()
        ids = ids.clone()
        rows, _, got, taken = exchange(x, ids, weights, ExpertGroup(group, E, route=route))
        if write_before == "collect":
            ids.fill_(-1)
        out = collect(rows * got.sum(1, keepdim=True), taken)
        if write_before == "backward":
            ids.fill_(-1)
        out.backward(inputs.grad[inputs.here])
        return out, x.grad, weights.grad

    with peers_over_gloo():
        for route in ("exact", "static", "pull"):
            want = run(route)
            for step in ("collect", "backward"):
                assert all(map(torch.equal, run(route, step), want)), f"{route}: written before {step}"


@case
def ids_of_other_ranks_experts_pass_the_check(rank, size, group):
    """They become -1 on this rank. A layer without gradients and a bound of slots builds its lists beforehand."""
    inputs = Inputs(rank, counts_of(size, "equal"))
    want = inputs.whole()["out"]
    x, ids, weights, w1, w2 = inputs.local()
    with mock.patch.object(checks, "CHECKS_IDS", True), torch.no_grad():
        bounded = expert_parallel_moe(x, ids, weights, w1, w2, ExpertGroup(group, E, slots=200))
        rows, local_ids, got, route = exchange(x, ids, weights, ExpertGroup(group, E))
        assert (local_ids == -1).any()
        assert difference(bounded, want) <= 1e-14
        assert difference(collect(moe(rows, local_ids, got, w1, w2), route), want) <= 1e-14
