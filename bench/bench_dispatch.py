"""Index lists from ids (Table 3), beside a copy of the same bytes, torch's stable sort, and SonicMoE's kernels."""

import importlib
import operator

import pytest
import torch

import moeblaze_cupy as mb
from bench import cases, kernels, measure, peers
from bench.conftest import parametrize
from bench.inputs import device

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="dispatch")
PROVIDERS = ("copy", "moeblaze", "torch_sort", "sonicmoe")
SORTED = ("expert_token_indices", "expert_token_offsets", "token_index_map")


def pytest_generate_tests(metafunc):
    def combinations(name, config):
        case = cases.DISPATCHES[name]
        chosen = config.getoption("--provider")
        wanted = chosen.split(",") if chosen else PROVIDERS if case.paper else PROVIDERS[:2]
        return [(case, provider) for provider in PROVIDERS if provider in wanted]

    tiny = [(cases.TINY_DISPATCH, provider) for provider in PROVIDERS]
    parametrize(metafunc, ",".join(cases.DISPATCHES), combinations, tiny, cases.DISPATCHES)


def sonicmoe_lists(ids: torch.Tensor, E: int) -> tuple[torch.Tensor, ...]:
    """SonicMoE's four index lists, by its Triton kernels."""
    build = importlib.import_module("sonicmoe.functional.triton_kernels").TC_topk_router_metadata_triton
    gather, scatter, reverse = (torch.empty_like(ids).view(-1) for _ in range(3))
    counts, offsets = ids.new_empty(E), ids.new_empty(E + 1)
    build(ids, E, counts, offsets, gather, scatter, reverse)
    return gather, offsets, reverse.view(ids.shape)


def builder(provider: str, E: int):
    """ids -> the three lists that all providers make."""
    if provider == "moeblaze":
        return lambda ids: operator.attrgetter(*SORTED)(mb.build_dispatch(ids, E))
    return (
        (lambda ids: kernels.sorted_lists(ids, E)) if provider == "torch_sort" else lambda ids: sonicmoe_lists(ids, E)
    )


def test_dispatch(spec, time_device):
    """Time of one build: graph replays over rotating sets of ids. The lists are compared with torch's sort first."""
    case, provider = spec
    nbytes = 12 * case.slots  # 4 read and 8 written per slot
    calls = measure.sets_for_cold_cache(nbytes)
    if provider == "sonicmoe" and (reason := next(p for p in peers.PEERS if p.name == provider).missing()):
        pytest.skip(f"{provider}: {reason}")
    if provider == "copy":
        # as many bytes read as written: six of each per slot
        buffers = [
            torch.empty(max(nbytes // 2, 16), dtype=torch.uint8, device=device()).random_(256)
            for _ in range(min(calls, 4))
        ]
        run = [lambda i=i: buffers[i % len(buffers)].clone() for i in range(calls)]
    else:
        ids = kernels.dispatch_inputs(case, min(calls, 4), device())
        build = builder(provider, case.E)
        for got, want in zip(build(ids[0]), kernels.sorted_lists(ids[0], case.E), strict=True):
            assert torch.equal(got.reshape(-1).long(), want.reshape(-1).long()), (
                f"{provider} on {case.name}: wrong lists"
            )
        run = [lambda i=i: build(ids[i % len(ids)]) for i in range(calls)]
    time_device(
        measure.in_graph(run),
        calls,
        bound=(case, "dispatch"),
        is_bound=provider == "copy",
        busy=measure.BRIEFLY,
        nbytes=nbytes,
        case=case.name,
        source=case.source,
        shape=case.shape,
        routing=case.routing,
        provider=provider,
    )
