"""The routed experts of a Megatron layer: rows in expert order, in and out."""

import contextlib
from collections import deque
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import divide, get_pg_rank, get_pg_size
from torch.autograd.function import once_differentiable

import moeblaze_cupy as mb
from moeblaze_cupy.interop.megatron import checkpoint, configuration
from moeblaze_cupy.interop.torch import arguments as torch_arguments
from moeblaze_cupy.interop.torch import moe
from moeblaze_cupy.types import PendingWeights

Tensor = torch.Tensor


class Linear(torch.nn.Module):
    """Holds one of the two weights of all local experts, its bias, and what DDP calls once the gradient is there."""

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.hooks: list[Any] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """DDP calls it if it delays weight gradients. Such a hook reduces main_grad and clears .grad."""
        self.hooks.append(hook)

    def total(self) -> Tensor | None:
        """main_grad in the layer's order of dimensions, or None without DDP."""
        main_grad: Tensor | None = getattr(self.weight, "main_grad", None)
        return None if main_grad is None else main_grad.transpose(1, 2)

    def take(self, gradient: Tensor) -> None:
        """Ends the sum of a delayed gradient: what was added to `total`, or what goes to .grad."""
        weight = self.weight
        if self.total() is None:
            gradient = gradient.transpose(1, 2)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            return
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # DDP's
        if self.hooks:
            weight.grad = weight.new_zeros(()).expand_as(weight)  # they expect one, and drop it
        for hook in self.hooks:
            hook()


class MoeblazeGroupedMLP(MegatronModule):  # type: ignore[misc]  # Megatron ships no types
    """Megatron's experts, computed by `moe` with a slot per row.

    Parameters: linear_fc1.weight (E, 2h, d), gate rows first, or (E, h, d) without a gate, and linear_fc2.weight
    (E, d, h), of the E local experts; h is this rank's part of the hidden width under expert tensor parallelism.
    With `add_bias_linear` also linear_fc1.bias (E, 2h) and linear_fc2.bias (E, d), else None.
    `state_dict` has their experts' weights one by one, under the names of Megatron's grouped experts, weight0 and so
    on. `load_state_dict` takes these, the names of SequentialMLP, and the parameters' own.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        *,
        pg_collection: Any,
        name: str | None = None,
        save: str = "minimal",
    ) -> None:
        """config: a TransformerConfig. save: as of `moe`. Raises ValueError for a configuration that is not served."""
        super().__init__(config=config)
        refused = configuration.refusal(config, pg_collection)
        if refused is not None:
            raise ValueError(f"MoeblazeGroupedMLP: config: expected what the layer serves, got {refused}")
        activation = configuration.activation_of(config)
        weights_on = "input" if config.moe_apply_probs_on_input else "output"
        self.options: dict[str, Any] = {"activation": activation, "save": save, "weights_on": weights_on}
        self.num_local_experts, self.name = num_local_experts, name
        self.groups = pg_collection
        self.delays = config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad
        self.pending: deque[PendingWeights] = deque()  # of forwards whose weight gradients are to come
        d, h = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        halves = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = self._linear((halves * h, d), 0, halves, config.init_method)
        self.linear_fc2 = self._linear((d, h), 1, 1, config.output_layer_init_method)
        self.register_state_dict_post_hook(checkpoint.write_indexed)
        self.register_load_state_dict_pre_hook(checkpoint.read_indexed)

    def _linear(self, shape: tuple[int, int], dim: int, stride: int, init_method: Any) -> Linear:
        """Returns the weights of all local experts. shape: of one on all ranks that share it, in `stride` parts."""
        config, group = self.config, self.groups.expt_tp
        size, rank, on_cpu = get_pg_size(group), get_pg_rank(group), config.use_cpu_initialization
        own = [n // size if i == dim else n for i, n in enumerate(shape)]
        divide(shape[dim], size * stride)  # raises unless it divides
        device = "cpu" if on_cpu else torch.cuda.current_device()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": device}
        weight = torch.nn.Parameter(torch.empty(self.num_local_experts, *own, **options))
        set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=dim + 1, stride=stride)
        etp_is_tp = config.expert_tensor_parallel_size == config.tensor_model_parallel_size
        weight.allreduce = config.expert_model_parallel_size == 1 and etp_is_tp  # type: ignore[attr-defined]  # DDP's
        weight.skip_backward_post_hook = self.delays  # type: ignore[attr-defined]  # DDP's
        bias = None
        if config.add_bias_linear:  # Megatron refuses it with expert tensor parallelism
            bias = torch.nn.Parameter(torch.zeros(self.num_local_experts, own[0], **options))
            bias.allreduce = weight.allreduce  # type: ignore[attr-defined]  # DDP's
        if config.perform_initialization:
            tracker = contextlib.nullcontext()
            if not on_cpu:
                tracker = get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name())
            with torch.no_grad(), tracker:
                for expert in weight:
                    if on_cpu:  # ranks draw the same numbers, and each takes its part
                        whole = torch.empty(shape)
                        init_method(whole)
                        expert.copy_(torch.cat(whole.chunk(size * stride, dim)[rank::size], dim))
                    else:
                        init_method(expert)
        return Linear(weight, bias)

    def forward(
        self,
        dispatched_input: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        output_buffer: Tensor | None = None,
        grad_input_buffer: Tensor | None = None,
        routing_map: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Returns the experts' weighted outputs (R, d), and None in the place of a bias.

        dispatched_input: (R, d), the rows of expert 0, then those of expert 1, and so on. tokens_per_expert: (E,)
        integers, on the host or the device; rows behind their sum are not read, and are 0 in the output.
        permuted_probs: (R,) of any floating-point dtype. Nothing waits for the GPU.
        Raises ValueError for one of the last three, which zero-copy dispatch and inference give.
        """
        refused = {"output_buffer": output_buffer, "grad_input_buffer": grad_input_buffer, "routing_map": routing_map}
        for argument, given in refused.items():
            if given is not None:
                raise ValueError(f"MoeblazeGroupedMLP: {argument}: expected None, got {type(given)}")
        x, probs, fc1, fc2 = dispatched_input, permuted_probs, self.linear_fc1.weight, self.linear_fc2.weight
        ends = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0)
        rows = torch.arange(len(x), device=x.device)
        ids = torch.bucketize(rows, ends, right=True, out_int32=True).unsqueeze(1)  # E, an empty slot, behind the sum
        probs = torch_arguments.widened(probs, x.dtype).unsqueeze(1)
        if self.delays and torch.is_grad_enabled() and (fc1.requires_grad or fc2.requires_grad):
            out = DelayedWeights.apply(self, x, ids, probs, fc1, fc2)  # type: ignore[no-untyped-call]  # torch's
            return out, None
        sums = {"w1": fc1, "w2": fc2} if self.config.gradient_accumulation_fusion else False
        weights = fc1.transpose(1, 2), fc2.transpose(1, 2)
        options = self.options | self.biases
        return moe(x, ids, probs, *weights, accumulate_into_main_grad=sums, **options), None

    @property
    def biases(self) -> dict[str, Any]:
        """Returns the arguments of `moe` for them."""
        return {"b1": self.linear_fc1.bias, "b2": self.linear_fc2.bias}

    def backward_dw(self) -> None:
        """Computes the weight gradients of the oldest forward that has none, if Megatron delays them.

        They are added to main_grad, or to .grad without DDP. It runs on the current stream.
        """
        if not self.pending:
            return
        pending = self.pending.popleft()
        linears = {"w1": self.linear_fc1, "w2": self.linear_fc2}
        linears = {name: linear for name, linear in linears.items() if linear.weight.requires_grad}
        totals = {name: total for name, linear in linears.items() if (total := linear.total()) is not None}
        grads = mb.moe_backward_weights(pending, needs=tuple(linears), accumulate=totals or None)
        for name, linear in reversed(linears.items()):
            linear.take(getattr(grads, name))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the state under the keys that Megatron's own experts give, whose checkpoints are the same."""
        return checkpoint.sharded(self, prefix, tuple(sharded_offsets), metadata or {})


class DelayedWeights(torch.autograd.Function):
    """The layer, whose backward leaves the gradients of the weights to `MoeblazeGroupedMLP.backward_dw`."""

    @staticmethod
    def forward(ctx: Any, experts: Any, x: Tensor, ids: Tensor, probs: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
        """The weights are arguments so that backward runs where x requires no gradient."""
        out: Tensor
        layer, tf32 = (x, ids, probs, fc1.transpose(1, 2), fc2.transpose(1, 2)), torch_arguments.in_tf32(x)
        out, ctx.saved = mb.moe_forward(*layer, tf32=tf32, **experts.options)
        ctx.experts = experts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        needs = tuple(name for name, at in (("x", 1), ("weights", 3)) if ctx.needs_input_grad[at])
        grads, pending = mb.moe_backward_data(grad_out.contiguous(), ctx.saved, needs=needs)
        ctx.saved = None
        ctx.experts.pending.append(pending)
        return None, grads.x, None, grads.weights, None, None
