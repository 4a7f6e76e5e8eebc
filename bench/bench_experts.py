"""What the experts of today's models add to a layer: activations with constants, biases, interleaved gates.

Each kind is timed on gpt-oss-20b's shape and, as `times_base`, compared with swiglu's time, relu2 with relu's. All of
it at once, as gpt-oss has it, is timed on the shapes of its two models beside their cuBLAS products, which are also
timed with copies of as many bytes as a layer moves besides. Calls are timed singly and back to back. With equal loads
the experts of the larger model have 512 rows each, four full tiles: what partly filled tiles cost shows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from bench import cases, measure, providers, verify
from bench.conftest import orders, parametrize
from bench.layer import Layer
from moeblaze_cupy import Activation

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="experts")


def _swiglu_oai(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a = a.clamp(max=7.0)
    return (b.clamp(-7.0, 7.0) + 1) * a * torch.sigmoid(1.702 * a)


FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "swiglu": lambda a, b: F.silu(a) * b,
    "swiglu_clamp": lambda a, b: F.silu(a.clamp(max=10.0)) * b.clamp(-10.0, 10.0),
    "swiglu_oai": _swiglu_oai,
    "relu": F.relu,
    "relu2": lambda a: F.relu(a).square(),
}


@dataclass(frozen=True)
class Kind:
    """A layer of this package. base: the kind that it is compared with."""

    name: str
    activation: str
    base: str | None = "swiglu"
    bias: bool = False
    gate_up: str = "halves"


GPT_OSS = Kind("gpt_oss", "swiglu_oai", None, True, "interleaved")
KINDS = (
    Kind("swiglu", "swiglu", None),
    Kind("swiglu_clamp", "swiglu_clamp"),
    Kind("swiglu_oai", "swiglu_oai"),
    Kind("swiglu_biases", "swiglu", bias=True),
    Kind("swiglu_interleaved", "swiglu", gate_up="interleaved"),
    GPT_OSS,
    Kind("relu", "relu", None),
    Kind("relu2", "relu2", "relu"),
)
BOUND = Kind("cublas_bound", "swiglu", None)
BOUNDS = (BOUND, Kind("cublas_and_traffic", "swiglu", None))
ONLY_ALL_AT_ONCE = {"gptoss", "gptoss_balanced"}  # gpt-oss-120b's: timed with GPT_OSS and its bounds alone


class _Experts(Layer):
    def __init__(self, inputs: dict, kind: Kind):
        from moeblaze_cupy.interop.torch import moe

        self.names = tuple(name for name in ("x", "weights", "w1", "w2", "b1", "b2") if name in inputs)
        super().__init__(inputs, [inputs[name] for name in self.names])
        self.moe, self.options = moe, {"activation": Activation(kind.activation), "gate_up": kind.gate_up}

    def forward(self) -> torch.Tensor:
        return self.moe(ids=self.inputs["ids"], **dict(zip(self.names, self.leaves, strict=True)), **self.options)


def with_biases(made: dict, seed: int = 2) -> dict:
    """made, and b1, b2 of unit scale in the weights' dtype."""
    w1, w2 = made["w1"], made["w2"]
    generator = torch.Generator(w1.device).manual_seed(seed)

    def normal(columns: int) -> torch.Tensor:
        return torch.randn(len(w1), columns, generator=generator, device=w1.device).to(w1.dtype)

    return {**made, "b1": normal(w1.shape[2]), "b2": normal(w2.shape[2])}


def errors_of(made: dict, kind: Kind, layer: _Experts) -> dict[str, float]:
    """Relative errors of the output and of each gradient, by autograd in float64, expert by expert."""
    got = {"out": layer.forward().detach(), **layer.named(layer.forward_backward())}
    exact = {name: torch.zeros_like(made[name], dtype=torch.float64) for name in ("x", "weights")}
    exact["out"] = torch.zeros_like(exact["x"])
    sums = {name: [0.0, 0.0] for name in got}

    def add(name: str, values: torch.Tensor, reference: torch.Tensor) -> None:
        sums[name][0] += float((values.double() - reference).square().sum())
        sums[name][1] += float(reference.square().sum())

    for expert in range(len(made["w2"])):
        tokens, slots = (made["ids"] == expert).nonzero(as_tuple=True)
        weights = {name: made[name][expert].double().requires_grad_() for name in layer.names[2:]}
        x = made["x"][tokens].double().requires_grad_()
        scale = made["weights"][tokens, slots].double().requires_grad_()
        ab = x @ weights["w1"] + weights.get("b1", 0.0)
        if kind.activation.startswith("relu"):
            y = FORMULAS[kind.activation](ab)
        else:
            halves = (ab[:, 0::2], ab[:, 1::2]) if kind.gate_up == "interleaved" else ab.chunk(2, dim=1)
            y = FORMULAS[kind.activation](*halves)
        out = (y @ weights["w2"] + weights.get("b2", 0.0)) * scale[:, None]
        exact["out"].index_add_(0, tokens, out.detach())
        gradients = torch.autograd.grad(out, [x, scale, *weights.values()], made["grad_out"][tokens].double())
        exact["x"].index_add_(0, tokens, gradients[0])
        exact["weights"][tokens, slots] = gradients[1]
        for name, reference in zip(weights, gradients[2:], strict=True):
            add(name, got[name][expert], reference)
    for name, reference in exact.items():
        add(name, got[name], reference)
    return {name: (error / norm) ** 0.5 if norm else error**0.5 for name, (error, norm) in sums.items()}


_TIMES: dict[tuple, dict[str, float]] = {}  # of the kinds that others are compared with, single and back to back


def pytest_generate_tests(metafunc):
    passes = ("forward", "forward_backward")

    def combinations(name, config):
        kinds = (*BOUNDS, GPT_OSS) if name in ONLY_ALL_AT_ONCE else (*BOUNDS, *KINDS)
        for order in orders(config, "row"):
            yield from ((cases.LAYERS[name], order, kind, what) for kind in kinds for what in passes)

    tiny = [(cases.TINY, "row", kind, what) for kind in (*BOUNDS, *KINDS) for what in passes]
    parametrize(metafunc, "experts", combinations, tiny, set(cases.GROUPS["experts"]))


def test_experts(spec, current, time_device, benchmark):
    """Time, beside the dense products' through cuBLAS, and beside the base's."""
    case, order, kind, what = spec
    if reason := providers.PROVIDERS["moeblaze"].missing():
        pytest.skip(f"moeblaze: {reason}")
    gated = not kind.activation.startswith("relu")
    of_inputs = case if gated else replace(case, activation="silu")  # without a gate, w1 has half the columns
    made = current.inputs_of(of_inputs, order)
    info = {**of_inputs.info, "activation": kind.activation, "order": order, "provider": kind.name, "pass": what}
    bound = (of_inputs, order, what)
    if kind in BOUNDS:
        layer = providers.PROVIDERS[kind.name].build(of_inputs, made)
    else:
        layer = _Experts(with_biases(made) if kind.bias else made, kind)
        if what == "forward_backward":
            errors = errors_of(layer.inputs, kind, layer)
            wrong = verify.problems(errors, made["x"].dtype)
            assert wrong is None, f"{kind.name} on {case.name}: {wrong}; a wrong result gets no time"
            info["errors"] = {name: float(f"{error:.3g}") for name, error in errors.items()}
    run, flops, extra = getattr(layer, what), of_inputs.flops(what), benchmark.extra_info
    seconds = time_device(run, bound=bound, is_bound=kind is BOUND, flops=flops, back_to_back=True, **info)
    if seconds is None:
        return
    own = {"": seconds, "back_to_back_": extra["back_to_back_ms"]}
    _TIMES[(*bound, kind.name)] = own
    for ratio, other in (("times_bound", BOUND.name), ("times_base", kind.base)):
        found = _TIMES.get((*bound, other))
        if found and kind is not BOUND:
            extra |= {f"{how}{ratio}": own[how] / found[how] for how in own}
