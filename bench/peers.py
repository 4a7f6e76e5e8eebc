"""Peers, each through its public functions with its own best settings. None is a dependency: an absent one is skipped.

All read the same x, ids, weights, w1 and w2 (transposed order: (E, 2h, d) and (E, d, h) in memory) and dispatch from
the ids themselves. Their tuning runs in the first call, before anything is timed.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.layer import Layer


class _SonicMoE(Layer):
    """SonicMoE's metadata, up- and down-projection, as its own layer for top-k routing calls them, on given ids.

    Its tuner tries every tile for a new shape (bench/README.md says how long); QUACK_CACHE_AUTOTUNING=1 (set below
    unless it is given) keeps the results under QUACK_CACHE_DIR for the next process.
    """

    def __init__(self, case, inputs: dict):
        functional = importlib.import_module("sonicmoe.functional")
        self.up, self.down = functional._UpProjection, functional._DownProjection
        self.metadata = functional.TC_topk_router_metadata_triton
        self.activation = importlib.import_module("sonicmoe.enums").ActivationType(case.activation)
        self.case = case
        # (2h, d, E) and (d, h, E) views of the (E, ...) storage
        views = [inputs["w1"].transpose(1, 2).permute(1, 2, 0), inputs["w2"].transpose(1, 2).permute(1, 2, 0)]
        super().__init__(inputs, [inputs["x"], inputs["weights"], *views])

    def forward(self) -> torch.Tensor:
        x, weights, w1, w2 = self.leaves
        case, ids = self.case, self.inputs["ids"]

        def int32(n):
            return torch.empty(n, dtype=torch.int32, device=x.device)

        scatter, reverse, gather = (int32(case.slots) for _ in range(3))
        counts, offsets = int32(case.E), int32(case.E + 1)
        self.metadata(ids, case.E, counts, offsets, gather, scatter, reverse)
        lists = (gather, scatter, reverse, None, False)
        # the last two: training, and gate rows before up rows instead of alternating with them
        a, h = self.up.apply(x, w1, None, offsets, case.slots, case.k, *lists, self.activation, False, True)
        return self.down.apply(a, h, w2, None, weights, offsets, case.L, case.k, *lists, self.activation)

    def named(self, gradients):
        dx, dweights, dw1, dw2 = gradients
        return {"x": dx, "weights": dweights, "w1": dw1.permute(2, 1, 0), "w2": dw2.permute(2, 1, 0)}


class _Liger(Layer):
    """Liger's fused MoE function, tuned by Triton in the first call."""

    def __init__(self, case, inputs: dict):
        self.function = importlib.import_module("liger_kernel.ops.fused_moe").LigerFusedMoEFunction
        storage = [inputs["w1"].transpose(1, 2), inputs["w2"].transpose(1, 2)]
        super().__init__(inputs, [inputs["x"], inputs["weights"], *storage])

    def forward(self) -> torch.Tensor:
        x, weights, w1, w2 = self.leaves
        return self.function.apply(x, w1, w2, self.inputs["ids"], weights)

    def named(self, gradients):
        dx, dweights, dw1, dw2 = gradients
        return {"x": dx, "weights": dweights, "w1": dw1.transpose(1, 2), "w2": dw2.transpose(1, 2)}


class _ScatterMoE(Layer):
    """ScatterMoE's parallel linear layers, called as its MLPs call them."""

    def __init__(self, case, inputs: dict):
        module = importlib.import_module("scattermoe.parallel_experts")
        self.sort, self.linear, self.case = module.flatten_sort_count, module.parallel_linear, case
        super().__init__(inputs, [inputs[name] for name in ("x", "weights", "w1", "w2")])
        self.ids = inputs["ids"].long()

    def forward(self) -> torch.Tensor:
        x, weights, w1, w2 = self.leaves
        lists = self.sort(self.ids, num_experts=self.case.E)
        first = self.linear(x, w1, self.case.k, *lists, grouped_out=True)
        if self.case.activation == "silu":
            product = torch.nn.functional.silu(first)
        else:
            gate, up = first.chunk(2, dim=-1)
            product = torch.nn.functional.silu(gate) * up
        return self.linear(product, w2, 1, *lists, gates=weights.to(x.dtype), grouped_in=True)


class _MoMoE(Layer):
    """MoMoE's module over a dense (E, L) mask and scores, keeping `percent` of the intermediate results."""

    def __init__(self, case, inputs: dict, percent: int):
        super().__init__(inputs, [inputs["x"], inputs["weights"]])
        self.case = case
        self.module = importlib.import_module("momoe.momoe").MoMoE(
            embedding_dim=case.d,
            intermediate_dim=case.h,
            num_experts=case.E,
            num_chosen_experts=case.k,
            save_percent=percent,
            Wl1_ND2H=_other_half_first(inputs["w1"]),
            Wl2_NHD=inputs["w2"].contiguous(),
        )
        self.leaves += list(self.module.parameters())
        ids = inputs["ids"].long()
        self.mask = torch.zeros(case.L, case.E, dtype=torch.int32, device=ids.device).scatter_(1, ids, 1).T.contiguous()

    def forward(self) -> torch.Tensor:
        x, weights = self.leaves[:2]
        scores = torch.zeros(self.case.L, self.case.E, dtype=weights.dtype, device=x.device)
        scores = scores.scatter(1, self.inputs["ids"].long(), weights).T.contiguous()
        return self.module(x[None], self.mask, scores)[0][0]

    def named(self, gradients):
        dx, dweights, *experts = gradients
        shapes = {tuple(self.inputs[name].shape): name for name in ("w1", "w2")}
        named = {"x": dx, "weights": dweights} | {shapes[tuple(g.shape)]: g for g in experts}
        return named | {"w1": _other_half_first(named["w1"])}


def _other_half_first(w1: torch.Tensor) -> torch.Tensor:
    """Columns of up before those of gate, or the other way round."""
    return torch.cat(w1.chunk(2, dim=2)[::-1], dim=2)


class _MegaBlocks(Layer):
    """MegaBlocks' dropless experts in their grouped form; the sparse form refuses Triton 3.2 and later."""

    def __init__(self, case, inputs: dict):
        arguments = importlib.import_module("megablocks.layers.arguments").Arguments
        dmoe = importlib.import_module("megablocks.layers.dmoe")
        gated = case.activation == "swiglu"
        self.experts = dmoe.ParallelDroplessMLP(
            arguments(
                hidden_size=case.d,
                ffn_hidden_size=case.h,
                moe_num_experts=case.E,
                moe_top_k=case.k,
                moe_loss_weight=0.0,
                bias=False,
                return_bias=False,
                activation_fn=torch.nn.functional.silu,
                mlp_type="glu" if gated else "mlp",
                mlp_impl="grouped",
                fp16=False,
                bf16=True,
            )
        )
        mlp = self.experts.mlp
        names = ("w1", "v1", "w2") if gated else ("w1", "w2")
        halves = inputs["w1"].chunk(2, dim=2) if gated else (inputs["w1"],)
        with torch.no_grad():
            for name, half in zip(names, halves, strict=False):
                getattr(mlp, name).copy_(half.transpose(1, 2).reshape(-1, case.d))
            mlp.w2.copy_(inputs["w2"].reshape(-1, case.d))
        super().__init__(inputs, [inputs["x"], inputs["weights"].to(inputs["x"].dtype)])
        self.leaves += [getattr(mlp, name) for name in names]
        self.case, self.ids = case, inputs["ids"].long()

    def forward(self) -> torch.Tensor:
        x, weights = self.leaves[:2]
        return self.experts(x, None, weights, self.ids)

    def named(self, gradients):
        dx, dweights, *halves, dw2 = gradients
        parts = [half.view(self.case.E, self.case.h, self.case.d).transpose(1, 2) for half in halves]
        return {
            "x": dx,
            "weights": dweights,
            "w1": torch.cat(parts, dim=2),
            "w2": dw2.view(self.case.E, self.case.h, self.case.d),
        }


def _swiglu_only(case) -> str | None:
    return None if case.activation == "swiglu" else f"runs SwiGLU only, not {case.activation}"


def _sonic_refuses(case) -> str | None:
    if case.d % 64 or case.h % 64:
        return "needs d and h in multiples of 64"
    return _swiglu_only(case)


@dataclass(frozen=True)
class Peer:
    """`module` must be importable, on a GPU; `install` says how. `environment` has to be set before that import."""

    name: str
    module: str
    install: str
    build: Callable[..., Layer]
    refuses: Callable[[object], str | None] = lambda case: None
    environment: tuple[tuple[str, str], ...] = ()

    def missing(self) -> str | None:
        if not torch.cuda.is_available():
            return f"needs a CUDA device, and {self.install}"
        for variable, value in self.environment:
            os.environ.setdefault(variable, value)
        try:
            importlib.import_module(self.module)
        except Exception as error:  # an incompatible peer fails at import in any way
            return f"{self.install} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
        return None


_GIT = "pip install git+https://github.com/"
PEERS = (
    Peer(
        "sonicmoe",
        "sonicmoe",
        "pip install sonic-moe (Python 3.12 or later)",
        _SonicMoE,
        _sonic_refuses,
        (("QUACK_CACHE_AUTOTUNING", "1"),),
    ),
    Peer("liger", "liger_kernel.ops.fused_moe", "pip install liger-kernel", _Liger, _swiglu_only),
    Peer("scattermoe", "scattermoe", f"{_GIT}shawntan/scattermoe", _ScatterMoE),
    Peer(
        "momoe_100",
        "momoe.momoe",
        f"{_GIT}tilde-research/MoMoE-impl",
        lambda case, x: _MoMoE(case, x, 100),
        _swiglu_only,
    ),
    Peer(
        "momoe_0", "momoe.momoe", f"{_GIT}tilde-research/MoMoE-impl", lambda case, x: _MoMoE(case, x, 0), _swiglu_only
    ),
    Peer("megablocks", "megablocks.layers.dmoe", "pip install megablocks[gg], which compiles with nvcc", _MegaBlocks),
)
