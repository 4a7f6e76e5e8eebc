"""Options of slots beside the layer that does without: k experts per token as pairs, router weights on the input, and
identity experts beside empty slots. A row's bound is the time of the layer without the option."""

import pytest
import torch

from bench import cases, inputs, measure, providers, verify
from bench.conftest import parametrize
from bench.layer import Layer

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="slots")
IDENTITY = 8  # one slot in so many is of an identity expert, or empty
BASE = {"fixed_k": "fixed_k", "pairs": "fixed_k", "weights_on_input": "fixed_k", "empty": "empty", "identity": "empty"}
CHECKED_TOKENS = 64


class Slots(Layer):
    """`interop.torch.moe` with one of the options."""

    def __init__(self, case, made: dict, way: str):
        from moeblaze_cupy.interop.torch import moe

        super().__init__(made, [made[name] for name in ("x", "weights", "w1", "w2")])
        self.moe, self.ids, self.case = moe, made["ids"].clone(), case
        self.options: dict = {"activation": case.activation}
        if BASE[way] == "empty":
            self.ids.view(-1)[::IDENTITY] = case.E
        if way == "identity":
            self.options["identity_experts"] = 1
        if way == "weights_on_input":
            self.options["weights_on"] = "input"
        if way == "pairs":
            self.ids = self.ids.view(-1)
            self.leaves[1] = self.leaves[1].detach().view(-1).requires_grad_()
            offsets = torch.arange(case.L + 1, device=self.ids.device) * case.k
            self.options["token_offsets"] = offsets.int()

    def forward(self) -> torch.Tensor:
        x, weights, w1, w2 = self.leaves
        return self.moe(x, self.ids, weights, w1, w2, **self.options)

    def results(self) -> dict[str, torch.Tensor]:
        gradients = self.named(self.forward_backward())
        return {"out": self.forward().detach()} | gradients


def expected_rows(layer: Slots, tokens: torch.Tensor) -> torch.Tensor:
    """Of the output, in float64."""
    x, weights, w1, w2 = (leaf.detach() for leaf in layer.leaves)
    case, rows = layer.case, []
    for t in tokens.tolist():
        row = torch.zeros(case.d, dtype=torch.float64, device=x.device)
        for j in range(case.k):
            e, w = int(layer.ids[t, j]), weights[t, j].double()
            given = x[t : t + 1].double() * (w if "weights_on" in layer.options else 1)
            if e < case.E:
                given = verify.activate(given @ w1[e].double(), case.activation)[0] @ w2[e].double()
            elif "identity_experts" not in layer.options:
                continue
            row += given[0] * (1 if "weights_on" in layer.options else w)
        rows.append(row)
    return torch.stack(rows)


def problem(layer: Slots, way: str, made: dict) -> str | None:
    """What is wrong, or None: pairs give fixed k's very bits, other rows of the output are those of float64."""
    if way == "pairs":
        got, want = layer.results(), Slots(layer.case, made, "fixed_k").results()
        differing = [name for name in got if not torch.equal(got[name].view_as(want[name]), want[name])]
        return f"other bits than with fixed k: {', '.join(differing)}" if differing else None
    tokens = torch.arange(0, layer.case.L, max(1, layer.case.L // CHECKED_TOKENS), device=layer.ids.device)
    want, out = expected_rows(layer, tokens), layer.forward().detach()
    error = float((out[tokens].double() - want).norm() / want.norm())
    return verify.problems({"out": error}, out.dtype)


def pytest_generate_tests(metafunc):
    ways = [(way, what) for way in BASE for what in ("forward", "forward_backward")]
    tiny = [(cases.TINY, *each) for each in ways]
    parametrize(metafunc, "olmoe,qwen30b", lambda name, config: [(cases.LAYERS[name], *each) for each in ways], tiny)


_MADE: dict = {}  # the layer in use, by case and way


def layer_of(case, way: str, current) -> Slots:
    """Built and checked once for both passes."""
    if (case, way) not in _MADE:
        _MADE.clear()
        made = current.inputs_of(case, "transposed")
        layer = Slots(case, made, way)
        wrong = problem(layer, way, made)
        assert wrong is None, f"{way} on {case.name}: {wrong}; a wrong result gets no time"
        _MADE[case, way] = layer
    return _MADE[case, way]


def test_slots(spec, current, time_device):
    """Time, and how many times that of the layer without the option."""
    case, way, what = spec
    if reason := providers.PROVIDERS["moeblaze"].missing():
        pytest.skip(f"moeblaze: {reason}")
    layer = layer_of(case, way, current)
    time_device(
        getattr(layer, what),
        bound=(case, BASE[way], what),
        is_bound=BASE[way] == way,
        provider=way,
        order="transposed",
        **case.info,
        **{"pass": what},
    )
    if not inputs.has_gpu():
        _MADE.clear()
