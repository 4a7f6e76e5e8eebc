"""The gradients of w1 and w2 on CUDA: their launches in a backward, and on their own after one that deferred them.

`configure_weights` chooses the launches from layouts alone, once per layout; `moe_backward_weights` allocates and
launches, as does `summed_weights` where each rank gets the sum over all ranks of its experts' gradients.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moeblaze_cupy.cuda import loader
from moeblaze_cupy.cuda.launch_config import DeviceLimits
from moeblaze_cupy.cuda.runtime import Launch, Runtime, cached
from moeblaze_cupy.dispatch.launches import EXPERT_TOKEN_OFFSETS, EXPERTS_BY_LOAD, IndexLayout
from moeblaze_cupy.fp8 import operands as fp8
from moeblaze_cupy.frameworks import Layout
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm import products as grouped_gemm
from moeblaze_cupy.gemm.biases import Bias
from moeblaze_cupy.gemm.products import Operand, Summed, Weight, Wgrad
from moeblaze_cupy.layer.forward import half_columns, rows_of_slots
from moeblaze_cupy.rows import aggregation
from moeblaze_cupy.types import BackwardArrays, Gradients, LayerOptions


def up_columns(rows: Operand, h: int, options: LayerOptions) -> tuple[tuple[Operand, int], int]:
    """Returns, for w1's gradient, the operand with its step to the up half, and the number of halves.

    Interleaved columns are one matrix to the product, as the first layer and the gradient have them in the same order.
    """
    return ((rows, 0), 1) if options.interleaved else ((rows, h if options.gated else 0), options.halves)


def gradient_memory(run: Runtime, of: Weight | Bias, total: Sequence[int] | None) -> tuple[Any, Sequence[int]]:
    """Returns new memory as `Weight.empty_gradient` does; or none, and the addresses of what it is added to."""
    return of.empty_gradient(run) if total is None else (None, total)


@dataclass(frozen=True, eq=False)
class Weights:
    """The launches of the gradients of the weights, after a backward that deferred them."""

    index: IndexLayout
    up: Weight
    down: Weight
    up_gradient: Weight
    down_gradient: Weight
    down_wgrad: Wgrad | None
    up_wgrad: Wgrad | None
    slots_by_row: Launch | None  # runs where grad_out has a row per slot
    grad_in_e4m3: fp8.Dequantize | None
    x_in_e4m3: fp8.Dequantize | None
    own_down: Wgrad | None = None  # that of this rank's experts, where gradients are summed over ranks
    own_up: Wgrad | None = None
    down_total: Weight | None = None
    up_total: Weight | None = None
    rank_experts: Launch | None = None

    @property
    def all_sm90(self) -> bool:
        """Returns True if the kernels of all products are Hopper's, which alone sum over ranks."""
        steps = self.down_wgrad, self.up_wgrad, self.own_down, self.own_up
        return all(step is None or step.tier == "sm90" for step in steps)


class Totals(NamedTuple):
    """Layouts of the arrays that gradients of weights go to, by name, in place of new arrays."""

    accumulate: tuple[tuple[str, tuple[Layout, ...]], ...] = ()  # buffers that they are added to
    sums: tuple[tuple[str, Layout], ...] = ()  # sums of this rank's experts, where gradients are summed over ranks
    summed: Summed | None = None


@cached
def configure_weights(
    arrays: BackwardArrays,
    options: LayerOptions,
    needs: tuple[str, ...],
    limits: DeviceLimits,
    index: IndexLayout,
    totals: Totals,
) -> Weights:
    """Configures `moe_backward_weights` for arrays of these layouts.

    arrays: first_layer is the first layer's gradient, y_swi the weighted one. x and grad_out may be in e4m3 (uint8).
    totals: with `summed`, the launches are those of `summed_weights`, in the weights' memory order.
    """
    x, w2, w1, summed = arrays.layer.x, arrays.layer.w2, arrays.layer.w1_parts, totals.summed
    d, h, dtype, buffers = x.shape[1], w2.shape[1], w2.dtype, dict(totals.accumulate)
    half = half_columns(w1, h, options)
    up, down = Weight.of(w1, half), Weight.of((w2,))
    up_gradient = Weight.of(buffers.get("w1") or up.gradient_layouts(), half)
    down_gradient = Weight.of(buffers.get("w2") or down.gradient_layouts())
    rows_of = functools.partial(Operand, dtype, tf32=options.tf32)
    x_rows, grad_rows = rows_of(d, x.misalignment), rows_of(d, arrays.grad_out.misalignment)
    first_rows = rows_of(h * options.halves, arrays.first_layer.misalignment)
    y_rows = rows_of(h, arrays.y_swi.misalignment)
    each = index.num_experts // (summed.num_others + 1) if summed else None
    wgrad = functools.partial(grouped_gemm.configure_wgrad, index, options.activation, limits, num_experts=each)
    down_wgrad = up_wgrad = slots_by_row = own_down = own_up = down_total = up_total = rank_experts = None
    if "w2" in needs:
        down_wgrad = wgrad("down_wgrad", (y_rows, 0), (grad_rows, 0), down_gradient, 1, "w2" in buffers)
        if summed:
            down_total = Weight.of((dict(totals.sums)["w2"],))
            own_down = wgrad("down_wgrad", (y_rows, 0), (grad_rows, 0), down_total, 1, False, summed=summed)
        if options.unreduced and index.num_rows and index.num_tokens:
            slots_by_row = aggregation.slots_by_row(index)
    if "w1" in needs:
        operand, halves = up_columns(first_rows, h, options)
        up_wgrad = wgrad("up_wgrad", (x_rows, 0), operand, up_gradient, halves, "w1" in buffers)
        if summed:
            up_total = Weight.of((dict(totals.sums)["w1"],), half)
            own_up = wgrad("up_wgrad", (x_rows, 0), operand, up_total, halves, False, summed=summed)
    if summed and each:
        experts = {"num_experts": index.num_experts, "each": each}
        addresses = "experts_by_load", "rank_experts"
        entry, threads = loader.entry("rank_experts.cu", "rank_experts"), gemm_config.RANK_EXPERTS_THREADS
        rank_experts = Launch(entry, (summed.num_others + 1,), threads, addresses, experts)
    in_e4m3 = fp8.configure_dequantize(arrays.grad_out), fp8.configure_dequantize(x)
    return Weights(
        index,
        up,
        down,
        up_gradient,
        down_gradient,
        down_wgrad,
        up_wgrad,
        slots_by_row,
        *in_e4m3,
        own_down,
        own_up,
        down_total,
        up_total,
        rank_experts,
    )


def moe_backward_weights(
    run: Runtime,
    steps: Weights,
    arrays: BackwardArrays,
    accumulate: dict[str, tuple[int, ...]],
    x_scales: int = 0,
    grad_scales: int = 0,
) -> Gradients:
    """Returns the gradients of w2 and w1 (Algorithm 1, lines 18 and 29), from addresses; see `configure_weights`.

    Rows in e4m3 are converted to bf16 one after the other, so that both take the same memory.
    """
    index, grad_out, x = steps.index.addresses(arrays.lists), arrays.grad_out, arrays.layer.x
    grad_w1 = grad_w2 = None
    if steps.down_wgrad:
        grad_rows, by_row = rows_of_slots(run, steps.slots_by_row, index)
        grad_w2, addresses = gradient_memory(run, steps.down, accumulate.get("w2"))
        gradient = steps.down_gradient.halves(*addresses)
        in_bf16 = steps.grad_in_e4m3 and steps.grad_in_e4m3.make(run, grad_out, grad_scales)
        read = in_bf16.ptr if in_bf16 else grad_out
        grouped_gemm.wgrad(run, steps.down_wgrad, grad_rows, arrays.y_swi, read, gradient)
        del by_row, in_bf16
    if steps.up_wgrad:
        grad_w1, addresses = gradient_memory(run, steps.up, accumulate.get("w1"))
        in_bf16 = steps.x_in_e4m3 and steps.x_in_e4m3.make(run, x, x_scales)
        read, gradient = in_bf16.ptr if in_bf16 else x, steps.up_gradient.halves(*addresses)
        grouped_gemm.wgrad(run, steps.up_wgrad, index, read, arrays.first_layer, gradient)
    return Gradients(w1=grad_w1, w2=grad_w2)


class OfRanks(NamedTuple):
    """The addresses that the gradients of a weight go to."""

    total: int  # the scaled sum of this rank's experts, in the weight's memory order
    others: int  # (P - 1, ...): what other ranks store of the same experts, in the weights' dtype
    at: Mapping[int, int]  # address of this rank's part among the `others` of that rank, by rank


def summed_weights(
    run: Runtime,
    steps: Weights,
    arrays: BackwardArrays,
    ranks: Sequence[int],
    to: Mapping[str, OfRanks],
    signal: Callable[[str], None],
    wait: Callable[[str], None],
) -> None:
    """Computes the sums over ranks of the gradients of this rank's experts, from addresses; see `configure_weights`.

    Gradients of other ranks' experts are stored in the memory of those ranks. ranks: this one, then the others, in the
    order in which theirs are computed. signal: "w1" or "w2" of others' experts is stored. wait: makes the stream wait
    until all ranks have stored it. One product lies between, so that ranks need not be in step.
    """
    index, grad_out, x = steps.index.addresses(arrays.lists), arrays.grad_out, arrays.layer.x
    grad_rows, by_row = rows_of_slots(run, steps.slots_by_row, index) if steps.down_wgrad else (index, None)
    assert steps.rank_experts is not None
    each = steps.index.num_experts // len(ranks)
    experts = run.empty((steps.index.num_experts,), "int32")
    run.launch(steps.rank_experts, index[EXPERTS_BY_LOAD], experts.ptr)
    operands = {"w2": (grad_rows, arrays.y_swi, grad_out), "w1": (index, x, arrays.first_layer)}

    def product(name: str, step: Wgrad | None, layout: Weight | None, rank: int, address: int, parts: int = 0) -> None:
        if step and layout:
            rows, p, q = operands[name]
            of_rank = list(rows)
            of_rank[EXPERTS_BY_LOAD] = experts.ptr + 4 * each * rank
            of_rank[EXPERT_TOKEN_OFFSETS] += 4 * each * rank
            grouped_gemm.wgrad(run, step, tuple(of_rank), p, q, layout.halves(address), parts)  # type: ignore[arg-type]  # as many lists as before

    own, *others = ranks
    stored = {"w2": (steps.down_wgrad, steps.down_gradient), "w1": (steps.up_wgrad, steps.up_gradient)}
    for name in stored:
        if name in to:
            for rank in others:
                product(name, *stored[name], rank, to[name].at[rank])
            signal(name)
    for name, step, total in (("w2", steps.own_down, steps.down_total), ("w1", steps.own_up, steps.up_total)):
        if name in to:
            wait(name)
            product(name, step, total, own, to[name].total, to[name].others)
    del by_row
