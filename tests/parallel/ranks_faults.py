"""Cases of ranks that differ, skip or exit, over gloo. The last rank is at fault; the others have to be told."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from moeblaze_cupy.interop.parallel import ExpertGroup, collect, exchange, expert_parallel_moe
from moeblaze_cupy.interop.parallel.exchanges import PendingExchange
from moeblaze_cupy.types import Activation
from tests.parallel.rank_processes import Leave
from tests.parallel.ranks_common import (
    TIMEOUT,
    D,
    E,
    Inputs,
    K,
    case,
    compare,
    counts_of,
    difference,
    expect,
    results_of,
)
from tests.parallel.ranks_exchange import peers_over_gloo
from tests.parallel.ranks_hosts import waits_for_ended


@case
def faults(rank, size, group):
    """What differs among ranks is the same ValueError on all of them, at once."""
    start = time.monotonic()
    expect(ValueError, "num_experts: expected a multiple of the group's", ExpertGroup, group, E + 1)
    options = "options: expected the same on all ranks, got slots=64 on rank 0 and slots=65 on rank 1"
    expect(ValueError, options, lambda: ExpertGroup(group, E, slots=64 + (rank == 1)))
    expect(ValueError, 'expected another than "pull" on a group of gloo', lambda: ExpertGroup(group, E, route="pull"))
    for route in ("exact", "pull"):
        with peers_over_gloo():
            differing(rank, size, group, route)
    padded = ExpertGroup(group, E, route="static")
    inputs = Inputs(rank, counts_of(size, "uneven"))
    expect(ValueError, 'tokens: expected the same on all ranks for route "static"', results_of, inputs, padded)
    assert time.monotonic() - start < TIMEOUT.total_seconds()


def differing(rank, size, group, route):
    odd = rank == size - 1

    def attempt(experts, **changes):
        inputs = Inputs(rank, counts_of(size, "equal"))
        x, ids, weights, w1, w2 = inputs.local()
        named = {"x": x, "ids": ids, "weights": weights, "w1": w1, "w2": w2}
        if odd:
            named |= {name: change(named[name]) for name, change in changes.items()}
        return expert_parallel_moe(*named.values(), experts)

    same = [ExpertGroup(group, E, route=route) for _ in range(10)]
    got = [K] * (size - 1) + [K - 1]
    shorter = {"ids": lambda t: t[:, 1:].contiguous(), "weights": lambda t: t[:, 1:]}
    texts = [
        expect(ValueError, f"moe: k: expected the same on all ranks, got {got}", lambda: attempt(same[0], **shorter))
    ]
    narrower = {"x": lambda t: t[:, :8], "w1": lambda t: t[:, :8], "w2": lambda t: t[:, :, :8]}
    texts.append(expect(ValueError, "moe: d: expected the same", lambda: attempt(same[1], **narrower)))
    narrow = {"weights": lambda t: t.float()}
    texts.append(expect(ValueError, "moe: weights: expected the same", lambda: attempt(same[6], **narrow)))
    halved = dict.fromkeys(("x", "w1", "w2", "weights"), lambda t: t.float())
    texts.append(expect(ValueError, "moe: dtype: expected the same", lambda: attempt(same[2], **halved)))
    detached = {"x": lambda t: t.detach()}
    texts.append(
        expect(
            ValueError,
            "requires_grad: expected the same on all ranks, or backward",
            lambda: attempt(same[3], **detached),
        )
    )
    elsewhere = {"x": lambda t: t.to("meta")}
    text = "expert_parallel_moe: x: expected a tensor on cpu" if odd else f"got errors on [{size - 1}]"
    expect(TypeError if odd else ValueError, text, lambda: attempt(same[9], **elsewhere))
    for options, others, name, got in (
        ({"activation": "swiglu"}, {"activation": "geglu"}, "activation", "'swiglu', 'geglu']"),
        (
            {"activation": Activation("swiglu_oai", limit=7.0)},
            {"activation": Activation("swiglu_oai", limit=6.0)},
            "activation",
            "Activation('swiglu_oai', alpha=1.702, limit=7.0), Activation('swiglu_oai', alpha=1.702, limit=6.0)]",
        ),
        ({"precision": None}, {"precision": "fp8"}, "precision", "None, 'fp8']"),
    ):
        inputs = Inputs(rank, counts_of(size, "equal"), dtype=torch.bfloat16, h=32).local()
        given = others if odd else options
        call = lambda inputs=inputs, given=given: expert_parallel_moe(*inputs, same[9], **given)  # noqa: E731
        said = expect(ValueError, f"expert_parallel_moe: {name}: expected the same on all ranks", call)
        assert said.endswith(got), said
        texts.append(said)
    if odd:
        same[4].calls += 1  # as if it had been called once more
    texts.append(expect(ValueError, "call: expected all ranks at the same exchange", lambda: attempt(same[4])))
    wrong = {"w1": lambda t: t[1:]}
    first, last = (size - 1) * (E // size), E - 1
    text = f"of this rank's experts {first}..{last}, got" if odd else f"got errors on [{size - 1}]"
    expect(ValueError, text, lambda: attempt(same[5], **wrong))
    for name, change, what in (
        ("w1", lambda t: t[:, 1:], "shape (E, d, 2h) = ("),
        ("w1", lambda t: t.repeat_interleave(2, 2)[:, :, ::2], "the last dimension contiguous, or the transposed view"),
        ("w2", lambda t: t[:, :, 1:], "shape (E, h, d) = ("),
    ):
        text = f"expert_parallel_moe: {name}: expected {what}" if odd else f"got errors on [{size - 1}]"
        expect(ValueError, text, lambda name=name, change=change: attempt(same[7], **{name: change}))
    inputs = Inputs(rank, counts_of(size, "equal")).local()
    text = "expert_parallel_moe: save: expected one of"  # also of an option that is not hashable
    expect(ValueError, text, lambda: expert_parallel_moe(*inputs, same[7], save=["minimal"]))
    for name, value, kind, what in (
        ("w1", None, TypeError, "a torch tensor"),
        ("w2", None, TypeError, "a torch tensor"),
        ("w1", [], ValueError, "one tensor or a pair, got 0"),
    ):
        kind, text = (kind, f"{name}: expected {what}") if odd else (ValueError, f"got errors on [{size - 1}]")
        expect(kind, text, lambda name=name, value=value: attempt(same[7], **{name: lambda _: value}))

    def check():
        if odd:
            raise RuntimeError("no such GPU here")
        return {}

    x, ids, weights, *_ = Inputs(rank, counts_of(size, "equal")).local()
    kind, text = (RuntimeError, "no such GPU here") if odd else (ValueError, f"got errors on [{size - 1}]")
    expect(kind, text, lambda: PendingExchange("exchange", x, ids, weights, same[7], 0, check).finish())
    if odd:
        same[7].plan = lambda ids: check()  # as where there is no memory for it
    expect(kind, text, lambda: PendingExchange("exchange", x, ids, weights, same[7], 0).finish())
    if route == "exact":  # plans of "pull" count nothing
        if odd:
            same[7].plan = lambda ids: (ExpertGroup.plan(same[7], ids)[0], check)
        expect(kind, text, lambda: PendingExchange("exchange", x, ids, weights, same[7], 0).finish())
    x, ids, weights, w1, w2 = Inputs(rank, counts_of(size, "equal")).local()
    text = "save: expected a policy that keeps something" if odd else f"got errors on [{size - 1}]"
    save = None if odd else "minimal"
    expect(ValueError, text, lambda: expert_parallel_moe(x, ids, weights, w1, w2, same[8], save=save))
    everyone: list = [None] * size
    dist.all_gather_object(everyone, texts, group=group)
    assert all(other == texts for other in everyone)


@case
def shared_fails_on_the_last_rank(rank, size, group):
    """The others get their results, and the next calls fit together; one that does not is an error on all, at once."""
    start, last, doubled = time.monotonic(), rank == size - 1, lambda tokens: 2 * tokens
    inputs = Inputs(rank, counts_of(size, "equal"))
    want = inputs.whole()["out"] + 2 * inputs.x[inputs.here]

    def fail(_):
        raise MemoryError("no memory for the shared expert")

    def call(experts, shared):
        return expert_parallel_moe(*inputs.local(), experts, shared=shared)

    for route in ("exact", "static", "pull"):
        with peers_over_gloo():
            experts, another = (ExpertGroup(group, E, route=route) for _ in range(2))
            for shared in (fail, doubled, fail):
                if last and shared is fail:
                    expect(MemoryError, "no memory for the shared expert", call, experts, shared)
                else:
                    assert difference(call(experts, doubled), want) <= 1e-14
            text = "expert_parallel_moe: group: expected all ranks at the same ExpertGroup"
            expect(ValueError, text, call, experts if last else another, doubled)
    assert time.monotonic() - start < TIMEOUT.total_seconds()


@case
def shared_gives_what_does_not_add(rank, size, group):
    """It is an error on the last rank alone, whose others get their results. None of it is broadcast or converted."""
    last, doubled = rank == size - 1, lambda tokens: 2 * tokens
    inputs = Inputs(rank, counts_of(size, "equal"), dtype=torch.float32)
    want = inputs.whole()["out"] + 2 * inputs.x[inputs.here]
    for route in ("exact", "pull"):
        with peers_over_gloo():
            experts = ExpertGroup(group, E, route=route)
            for wrong, kind, got in (
                (lambda tokens: tokens[None], ValueError, "got (1, 24, 16) torch.float32 on cpu"),
                (lambda tokens: tokens[:1], ValueError, "got (1, 16) torch.float32 on cpu"),
                (lambda tokens: tokens.double(), ValueError, "got (24, 16) torch.float64 on cpu"),
                (lambda tokens: tokens.to("meta"), ValueError, "got (24, 16) torch.float32 on meta"),
                (lambda tokens: None, TypeError, "expected a function that returns a tensor, got <class 'NoneType'>"),
            ):
                call = lambda shared: expert_parallel_moe(*inputs.local(), experts, shared=shared)  # noqa: B023, E731
                if last:
                    said = expect(kind, "expert_parallel_moe: shared: expected", call, wrong)
                    assert said.endswith(got), said
                else:
                    assert difference(call(doubled), want) <= 1e-6
            told(last, size, TypeError, "shared: expected a function of x, or None, got", call, 3 if last else doubled)
            assert difference(call(doubled), want) <= 1e-6


@case
def last_rank_is_a_layer_ahead(rank, size, group):
    """It skips the first of two layers, each with an ExpertGroup of its own, and has called neither before."""
    layers = [ExpertGroup(group, E) for _ in range(2)]
    inputs = Inputs(rank, counts_of(size, "equal"))
    numbers = [layers[0].number] * (size - 1) + [layers[1].number]
    text = f"moe: group: expected all ranks at the same ExpertGroup, in the order of their making, of which one has \
skipped a layer, got {numbers}"
    expect(ValueError, text, results_of, inputs, layers[rank == size - 1])


def ways():
    """Routes whose ranks are compared in every step, and what makes them run: over gloo, and as where GPUs are."""
    yield from ((route, contextlib.nullcontext) for route in ("exact", "static"))
    yield from ((route, peers_over_gloo) for route in ("exact", "pull"))


def in_order(functions, reverse):
    for function in functions[::-1] if reverse else functions:
        function()


@case
def steps_in_different_orders(rank, size, group):
    """The last rank takes two steps in the other order: one ValueError on all, at once. The groups are of use then."""
    last = rank == size - 1
    for route, way in ways():
        kinds = ["equal", "uneven"] if route != "static" else ["equal"]
        with way():
            experts = [ExpertGroup(group, E, route=route) for _ in range(2)]
            for kind in kinds:
                inputs = [Inputs(rank, counts_of(size, of), seed=seed) for seed, of in enumerate(("equal", kind))]
                outs = [forward_of(of, on) for of, on in zip(inputs, experts, strict=True)]
                backwards = [lambda out=out: out.sum().backward() for out in outs]
                text = "group: expected all ranks at backward of expert_parallel_moe of the same ExpertGroup"
                said = expect(ValueError, text, in_order, backwards, last)
                assert said.endswith(f"got {[experts[rank == size - 1].number for rank in range(size)]}"), said
                exchanged = [exchange(*of.local()[:3], experts[0]) for of in inputs]
                collects = [lambda made=made: collect(made[0], made[3]) for made in exchanged]
                expect(ValueError, "call: expected all ranks at collect of the same exchange", in_order, collects, last)
                outs = [collect(rows, made) for rows, _, _, made in exchanged]
                backwards = [lambda out=out: out.sum().backward() for out in outs]
                text = "call: expected all ranks at backward of collect of the same exchange"
                expect(ValueError, text, in_order, backwards, last)
                for of, on in zip(inputs, experts, strict=True):
                    compare(of, results_of(of, on), 1e-14)


@case
def steps_that_differ(rank, size, group):
    """The last rank takes another step than the others: one ValueError on all, at once."""
    last = rank == size - 1
    inputs = Inputs(rank, counts_of(size, "equal"))
    for route, way in ways():
        with way():
            experts, another = (ExpertGroup(group, E, route=route) for _ in range(2))
            x, ids, weights, w1, w2 = inputs.local()
            out = expert_parallel_moe(x, ids, weights, w1, w2, experts)
            rows, _, _, made = exchange(x, ids, weights, experts)
            steps = {
                "forward": lambda: forward_of(inputs, another),  # noqa: B023
                "exchange": lambda: exchange(*inputs.local()[:3], another),  # noqa: B023
                "backward": lambda: out.sum().backward(retain_graph=True),  # noqa: B023
                "collect": lambda: collect(rows, made),  # noqa: B023
                "making": lambda: ExpertGroup(group, E, route=route),  # noqa: B023
            }
            pairs = [("backward", "collect"), ("collect", "making")]
            if not (route == "exact" and way is peers_over_gloo):  # forwards meet by their devices
                pairs += [("backward", "forward"), ("making", "exchange"), ("exchange", "forward")]
            for pair in pairs:
                text = "step: expected all ranks at the same step, got"
                expect(ValueError, text, steps[pair[last]])
            still = rows.detach() if last else rows
            expect(ValueError, "collect: requires_grad: expected the same on all ranks", collect, still, made)


@case
def last_rank_fails_in_a_step(rank, size, group):
    """Before any rows are sent: it raises its own error, and the others one that names it, at once."""
    last = rank == size - 1
    others = f"got errors on [{size - 1}]"
    for route, way in ways():
        with way():
            experts = ExpertGroup(group, E, route=route)
            inputs = Inputs(rank, counts_of(size, "equal"))
            x, ids, weights, w1, w2 = inputs.local()
            out = expert_parallel_moe(x, ids, weights, w1, w2, experts)
            if last:
                with torch.no_grad():
                    w2 += 1
            kind, text = (RuntimeError, "modified by an inplace operation") if last else (ValueError, others)
            expect(kind, text, lambda: out.sum().backward())  # noqa: B023
            rows, _, _, made = exchange(x, ids, weights, experts)
            expect(ValueError, "collect: y: expected shape" if last else others, collect, rows[last:], made)
            compare(inputs, results_of(inputs, experts), 1e-14)


def told(last, size, kind, text, function, *arguments):
    """The last rank raises its own error, the others one that names it."""
    if last:
        expect(kind, text, function, *arguments)
    else:
        expect(ValueError, f"got errors on [{size - 1}]", function, *arguments)


@case
def last_rank_has_a_wrong_group(rank, size, group):
    """An option that only it checks is an error on all ranks, at once."""
    start, last = time.monotonic(), rank == size - 1
    for name, wrong, kind in (
        ("route", "exakt", ValueError),
        ("slots", 2.5, TypeError),
        ("rows", 3, ValueError),
        ("on_overflow", "spill", ValueError),
    ):
        given = {name: wrong} if last else {}
        text = f"ExpertGroup: {name}: expected"
        told(last, size, kind, text, lambda given=given: ExpertGroup(group, E, **given))
    text = "ExpertGroup: num_experts: expected an int"
    told(last, size, TypeError, text, lambda: ExpertGroup(group, f"{E}" if last else E))
    inputs = Inputs(rank, counts_of(size, "equal"))
    compare(inputs, results_of(inputs, ExpertGroup(group, E)), 1e-14)
    assert time.monotonic() - start < TIMEOUT.total_seconds()


@case
def last_rank_exchanges_what_cannot_be_read(rank, size, group):
    """The others are told of it before rows travel."""
    start, last = time.monotonic(), rank == size - 1
    x, ids, weights, *_ = Inputs(rank, counts_of(size, "equal")).local()
    x = x.detach()
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    spread = DTensor.from_local(x, DeviceMesh.from_group(group, "cpu"), [Replicate()])
    experts = ExpertGroup(group, E)
    for wrong in (x.to_sparse(), freed, torch._neg_view(x), spread):
        kind, text = (RuntimeError if wrong is freed else TypeError), "exchange: x: memory: expected"
        told(last, size, kind, text, exchange, wrong if last else x, ids, weights.detach(), experts)
    assert time.monotonic() - start < TIMEOUT.total_seconds()


@case
def last_rank_collects_other_results(rank, size, group):
    """Results of another dtype or width, or that cannot be sent, are an error on all ranks, at once."""
    start, last = time.monotonic(), rank == size - 1
    for route, way in ways():
        with way():
            experts = ExpertGroup(group, E, route=route)
            x, ids, weights, *_ = Inputs(rank, counts_of(size, "equal"), dtype=torch.bfloat16).local()
            rows, local_ids, _, made = exchange(x.detach(), ids, weights.detach(), experts)
            for change, name, got in (
                (lambda y: y.half(), "dtype", ["torch.bfloat16", "torch.float16"]),
                (lambda y: y.float(), "dtype", ["torch.bfloat16", "torch.float32"]),
                (lambda y: y[:, :2], "d", [D, 2]),
            ):
                text = f"collect: {name}: expected the same on all ranks, got {[*got[:1] * (size - 1), got[1]]}"
                expect(ValueError, text, collect, change(rows) if last else rows, made)
            for wrong, kind, text in (
                (local_ids, TypeError, "expected a float dtype, got torch.int32"),
                (rows.to("meta"), TypeError, "expected the device of exchange, cpu, got meta"),
                (rows[:, :0], ValueError, f"expected shape ({made.room}, d >= 1)"),
                (torch._neg_view(rows), TypeError, "memory: expected a tensor's own values"),
                (None, TypeError, "expected a torch tensor, got"),
            ):
                told(last, size, kind, f"collect: y: {text}", collect, wrong if last else rows, made)
            # The exchange is of use still. Sums are in float32, and rounded once.
            assert torch.equal(collect(rows.float(), made).bfloat16(), collect(rows, made))
    assert time.monotonic() - start < TIMEOUT.total_seconds()


def until(text, function, *arguments):
    """Expects RuntimeError with the text, within the group's timeout."""
    start = time.monotonic()
    expect(RuntimeError, text, function, *arguments)
    assert time.monotonic() - start < TIMEOUT.total_seconds() + 5


def forward_of(inputs, experts):
    x, ids, weights, w1, w2 = inputs.local()
    return expert_parallel_moe(x, ids, weights, w1, w2, experts)


@case
def last_rank_skips(rank, size, group):
    """A layer, a backward, the way back: the others' error names the call."""
    inputs = Inputs(rank, counts_of(size, "equal"))
    grad = inputs.grad[inputs.here]
    forward, backward, way_back = (ExpertGroup(dist.new_group(timeout=TIMEOUT), E) for _ in range(3))
    results_of(inputs, forward)
    with peers_over_gloo():
        pulling = ExpertGroup(group, E, route="pull")
        results_of(inputs, pulling)
    out = forward_of(inputs, backward)
    x, ids, weights, _, _ = inputs.local()
    rows, _, _, route = exchange(x, ids, weights, way_back)
    if rank == size - 1:
        time.sleep(TIMEOUT.total_seconds() + 4)
        return
    waits = (
        ("exchange: all-gather of sizes (call 2): rank", results_of, inputs, forward),
        ("exchange: all-gather of sizes (call 2): rank", forward_of, inputs, pulling),
        ("exchange: backward of expert_parallel_moe (call 1): rank", out.backward, grad),
        ("exchange: collect (call 1): rank", collect, rows, route),
    )
    with ThreadPoolExecutor(len(waits)) as at_once:
        list(at_once.map(lambda wait: until(*wait), waits))


@case
def last_rank_exits(rank, size, group):
    """The same when it is gone."""
    inputs = Inputs(rank, counts_of(size, "equal"))
    grad = inputs.grad[inputs.here]
    groups = [dist.new_group(timeout=TIMEOUT) for _ in range(3)]
    forward, backward = (ExpertGroup(of, E) for of in groups[:2])
    out = forward_of(inputs, backward)
    with peers_over_gloo():
        pulling = ExpertGroup(group, E, route="pull")
        results_of(inputs, pulling)
    if rank == size - 1:
        raise Leave
    waits_for_ended(pulling, inputs, size)
    until("exchange: all-gather of sizes (call 1): rank", results_of, inputs, forward)
    until("exchange: backward of expert_parallel_moe (call 1): rank", out.backward, grad)
    until("exchange: options of ExpertGroup: rank", ExpertGroup, groups[2], E)
