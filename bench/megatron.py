"""A Megatron-Core layer of experts: its own SequentialMLP, this package's experts, and the layer by index.

python -m bench.megatron [--gpus 2] --out FILE.json

Milliseconds and peak memory of a forward with backward of the whole layer, router and losses included, in bf16 with the
dispatcher "alltoall". All have the same weights; errors are relative norms of what differs from SequentialMLP's. The
order of the layers changes from round to round.

With --gpus 2 two GPUs share the experts (expert parallelism), and each has so many tokens of its own. A row then has
the largest error, time and memory of a rank.
"""

import argparse
import functools
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

from bench import inputs, measure, ranks

CALLS, ROUNDS = 3, 7
SHAPES = {  # tokens, hidden size, hidden size of an expert, experts, experts per token
    "qwen3_30b_a3b": (8192, 2048, 768, 128, 8),
    "dsv3, 32 of 256 experts": (8192, 7168, 2048, 32, 4),
}
TINY = (12, 16, 8, 4, 2)


def start_megatron() -> None:
    """Megatron's groups of all ranks, which share the experts, and the seeds of its GPU."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(expert_model_parallel_size=torch.distributed.get_world_size())
    if inputs.has_gpu():
        tensor_parallel.model_parallel_cuda_manual_seed(0)


def layers_of(shape: tuple[int, ...]) -> dict[str, torch.nn.Module]:
    """The same layer by name, with the same weights."""
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from moeblaze_cupy.interop import megatron
    from moeblaze_cupy.interop.megatron.layer import MoeblazeMoELayer

    _, d, h, E, k = shape
    config = TransformerConfig(
        num_layers=1, hidden_size=d, num_attention_heads=2, ffn_hidden_size=h, moe_ffn_hidden_size=h,
        num_moe_experts=E, moe_router_topk=k, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, bias_activation_fusion=True, moe_token_dispatcher_type="alltoall",
        use_cpu_initialization=not inputs.has_gpu(), moe_aux_loss_coeff=1e-2, bf16=True, params_dtype=torch.bfloat16,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )  # fmt: skip
    present = LocalSpecProvider.grouped_mlp_modules
    LocalSpecProvider.grouped_mlp_modules = getattr(present, "of_megatron", present)
    spec_of_own = get_moe_module_spec(use_te=False, num_experts=E)
    megatron.install()
    spec = get_moe_module_spec(use_te=False, num_experts=E)
    LocalSpecProvider.grouped_mlp_modules = present
    by_index = functools.partial(MoeblazeMoELayer, **spec.keywords)
    layers: dict[str, torch.nn.Module] = {}
    for name, made in (("SequentialMLP", spec_of_own), ("experts", spec), ("by index", by_index)):
        layer = made(config=config)
        layer.set_layer_number(1)
        layer = layer.to(inputs.device())
        if layers:
            layer.load_state_dict(layers["SequentialMLP"].state_dict())
        layers[name] = layer
    return layers


def step_of(layer: Any, x: torch.Tensor, grad_out: torch.Tensor) -> Callable[[], dict[str, torch.Tensor]]:
    def step() -> dict[str, torch.Tensor]:
        for parameter in layer.parameters():
            parameter.grad = None
        x.grad = None
        out, _ = layer(x)
        out.backward(grad_out)
        return {"out": out.detach(), "x": x.grad, "router": layer.router.weight.grad}

    return step


def expert_gradients(layer: Any) -> dict[str, torch.Tensor]:
    def of(name: str) -> torch.Tensor:
        if hasattr(layer.experts, "local_experts"):
            return torch.stack([getattr(each, name).weight.grad for each in layer.experts.local_experts])
        return getattr(layer.experts, name).weight.grad

    return {name: of(name) for name in ("linear_fc1", "linear_fc2")}


def measured(name: str, shape: tuple[int, ...]) -> list[dict]:
    random.seed(0)  # the order of the layers is that of the other ranks
    torch.manual_seed(torch.distributed.get_rank())
    options = {"device": inputs.device(), "dtype": torch.bfloat16}
    x = torch.randn(shape[0], 1, shape[1], **options).requires_grad_()
    grad_out = torch.randn(shape[0], 1, shape[1], **options)
    torch.manual_seed(0)
    layers = layers_of(shape)
    steps = {which: step_of(layer, x, grad_out) for which, layer in layers.items()}
    own, rows = None, []
    for which, step in steps.items():
        found = step() | expert_gradients(layers[which])
        own = own or found
        errors = ranks.largest({tensor: ranks.error(value, own[tensor]) for tensor, value in found.items()})
        rows.append({"shape": name, "sizes": shape, "layer": which, "errors": errors})
    del own, found
    times = ranks.timed(steps, CALLS, ROUNDS)
    for row in rows:
        row |= times[row["layer"]]
        row["speed"] = times["SequentialMLP"]["median_ms"] / row["median_ms"]
    return rows


def work(out: str | None) -> None:
    """Measures in each rank; the first writes and prints."""
    warnings.filterwarnings("ignore")  # Megatron's, of packages that it does not find
    start_megatron()
    first, rows = torch.distributed.get_rank() == 0, []
    for name, shape in SHAPES.items():
        rows += [row | {"gpus": torch.distributed.get_world_size()} for row in measured(name, shape)]
        measure.release()
        if out and first:
            measure.write_record(measure.record(rows=rows, megatron=measure.version("megatron-core")), out)
    if first:
        ranks.show(rows, {"shape": "shape", "layer": "layer"})


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.megatron", description=__doc__.splitlines()[0])
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    parser.add_argument("--gpus", type=int, default=1, help="that share the experts, a process each (%(default)s)")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    ranks.run(parser, work, args.gpus, args.out)


if __name__ == "__main__":
    main()
