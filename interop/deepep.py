"""Experts on many GPUs whose rows travel by DeepEP (https://github.com/deepseek-ai/DeepEP), or by what has its methods.

DeepEP's rows are this layer's: a row per token and rank, with local ids of which -1 are other ranks' experts. The
package is not imported here; the caller makes the buffer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch

from moeblaze_cupy import checks
from moeblaze_cupy.interop import collectives
from moeblaze_cupy.interop.exchange import ExpertGroup, Route

Tensor = torch.Tensor


class Buffer(Protocol):
    """What is called of `deep_ep.Buffer`, with its argument names. P ranks, L tokens here, n rows received."""

    group: Any  #: a process group of torch.distributed

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Sequence[Any]:
        """topk_idx: (L, k) int64, -1 for none.

        Returns num_tokens_per_rank (P,), num_tokens_per_rdma_rank, num_tokens_per_expert (E,), is_token_in_rank (L, P)
        and an event.
        """

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        async_finish: bool = False,
    ) -> Sequence[Any]:
        """x: (L, d). With a handle, rows go where those of the dispatch that made it went.

        Returns recv_x (n, d), recv_topk_idx (n, k) int64, recv_topk_weights (n, k), num_recv_tokens_per_expert_list,
        handle and event. With a handle only the first and the event are given.
        """

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, *, async_finish: bool = False
    ) -> Sequence[Any]:
        """x: (n, d), topk_weights: (n, k). Returns their sums over ranks, (L, d) and (L, k), and an event."""


class DeepEPGroup(ExpertGroup):
    """An ExpertGroup whose rows travel by a buffer of DeepEP, for `exchange`, `collect` and `expert_parallel_moe`.

    buffer: of the ranks among which the experts are spread. `deep_ep.Buffer` takes x in bfloat16 and router weights in
    float32, in which 16-bit weights travel. The ids of a token differ from each other.
    num_experts, slots, on_overflow, keep_received, spare_multiprocessors: as of `ExpertGroup` with route "exact".
    Sizes are compared among the ranks by the buffer's process group before rows travel, as route "exact" does; the host
    waits for them. The order in which rows arrive is the buffer's, and so is that of the sums that are gradients of the
    experts' weights.
    Raises TypeError if the buffer lacks a method, and what `ExpertGroup` raises.
    """

    def __init__(self, buffer: Buffer, num_experts: int, **options: Any) -> None:
        for name in ("get_dispatch_layout", "dispatch", "combine", "group"):
            if not hasattr(buffer, name):
                raise TypeError(f"DeepEPGroup: buffer: expected one with DeepEP's {name}, got {type(buffer)}")
        for name in ("route", "rows"):
            if name in options:
                raise checks.bad_value("DeepEPGroup", name, "none, as the buffer decides", options[name])
        super().__init__(buffer.group, num_experts, route="exact", **options)
        self.buffer = buffer

    sends_fp8 = False

    def plan(self, ids: Tensor) -> tuple[Route, Callable[[], Tensor]]:
        """See `ExpertGroup.plan`."""
        wide = ids.to(torch.int64)
        ids = torch.where((wide >= 0) & (wide < self.num_experts), wide, -1).contiguous()
        layout = self.buffer.get_dispatch_layout(ids, self.num_experts)
        rows, _, per_expert, _, _ = layout

        def count() -> Tensor:
            return torch.cat([rows.to(torch.int64), per_expert.to(torch.int64).view(self.size, -1).sum(1)])

        return DeepEPRoute(ids, self, layout), count


class DeepEPRoute(Route):
    """Which rows one exchange sends where; DeepEP's handle has the particulars."""

    def __init__(self, ids: Tensor, experts: DeepEPGroup, layout: Sequence[Any]) -> None:
        super().__init__(ids, experts, [])
        self.layout, self.handle = layout, None
        self.columns, self.dtype = 0, torch.bfloat16  # d, and that of the rows

    @property
    def _buffer(self) -> Buffer:
        return cast(DeepEPGroup, self.experts).buffer

    def _named(self, name: str) -> Any:
        what = f"DeepEP's exchange of {name} (call {self.call}, rows sent {self.sent}, expected {self.arriving})"
        return collectives.named(what, self.experts.group)

    def receive(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Route.receive`."""
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self.layout
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32)).contiguous()
        with self._named("rows"):
            rows, local_ids, got, _, self.handle, _ = self._buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                num_tokens_per_rdma_rank=per_rdma_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=self.ids,
                topk_weights=wide,
            )
        self.layout, self.columns, self.dtype = (), x.shape[1], x.dtype
        return rows, local_ids, got

    def receive_gradients(self, grad: Tensor, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """See `Route.receive_gradients`."""
        named = {"results' gradients": grad} if x is None else {"results' gradients": grad, "rows": x}
        received: list[Tensor | None] = [None, None]
        for place, (name, tensor) in enumerate(named.items()):
            with self._named(name):
                received[place], *_ = self._buffer.dispatch(tensor, handle=self.handle)
        return cast(Tensor, received[0]), received[1]

    def _combine(self, rows: Tensor, weights: Tensor | None, name: str) -> Callable[[], tuple[Tensor, Any]]:
        on_gpu = rows.is_cuda  # what runs on the stream meanwhile, the gradients of the experts' weights, overlaps
        with self._named(name):
            out, of_slots, event = self._buffer.combine(rows, self.handle, topk_weights=weights, async_finish=on_gpu)

        def wait() -> tuple[Tensor, Any]:
            if on_gpu:
                event.current_stream_wait()
            return out, of_slots

        return wait

    def bring_back(self, rows: Tensor) -> Callable[[], Tensor]:
        """See `Route.bring_back`."""
        wait = self._combine(rows, None, "results")
        return lambda: wait()[0]

    def return_gradients(self, grads: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """See `Route.return_gradients`."""
        if not grads:
            return dict
        rows, weights = grads.get("x"), grads.get("weights")
        if rows is None:  # DeepEP takes weights beside rows only
            rows = grads["weights"].new_zeros((self.received, self.columns), dtype=self.dtype)
        wait = self._combine(rows, weights, f"gradients of {' and '.join(grads)}")
        return lambda: {name: back for name, back in zip(("x", "weights"), wait(), strict=True) if name in grads}
