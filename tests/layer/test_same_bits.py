"""A token's results have the same bits whatever other tokens are in the batch, and however many."""

from typing import NamedTuple

import pytest

pytest.importorskip("torch")
import torch

import moeblaze_cupy as mb
from moeblaze_cupy.cuda import loader
from moeblaze_cupy.cuda.runtime import Runtime

E = 4
DTYPES = torch.bfloat16, torch.float16, torch.float32


class Shape(NamedTuple):
    """k, d, h, the tokens of the largest batch, and numbers of tokens on both sides of each rule of `gemm.config`.

    changes: words of kernels that Hopper has in some batches alone. panels: some batches sum over slots in two panels.
    """

    k: int
    d: int
    h: int
    tokens: int
    sides: tuple[int, ...]
    changes: tuple[str, ...]
    panels: bool = False


SHAPES = {
    "square tiles": Shape(4, 1152, 288, 4096, (1535, 1536, 3640, 3641), ("square_tiles",), panels=True),
    "clusters of d": Shape(2, 4096, 64, 2100, (511, 512, 2048, 2049), ("cluster_ctas=2",), panels=True),
    "clusters of h": Shape(2, 512, 4096, 2100, (511, 512, 2048, 2049), ("cluster_ctas=2",)),
    "k = 1": Shape(1, 1152, 288, 6200, (6143, 6144), ()),
}
OPTIONS = {
    "fp8 saved": {"save": "fp8"},
    "paper": {"save": "paper"},
    "recompute": {"save": "recompute"},
    "nothing saved": {"save": None},
    "weights on input": {"weights_on": "input"},
    "interleaved": {"gate_up": "interleaved"},
    "biases": {"biases": True},
    "biases, interleaved": {"biases": True, "gate_up": "interleaved"},
    "adapters": {"ranks": 16},
    "adapters, interleaved": {"ranks": 16, "gate_up": "interleaved"},
    "adapters and biases": {"ranks": 16, "biases": True},
    "adapters and biases, interleaved": {"ranks": 16, "biases": True, "gate_up": "interleaved"},
    "larger adapters": {"ranks": 32},
    "chunks": {"memory_limit": 2**25},  # of 512 tokens
    "products in fp8": {"precision": "fp8"},
    "four bits": {"packed": True},
}


def random(*shape, scale=1.0):
    return torch.randn(*shape) * scale


def layer_of(shape, dtype, *, biases=False, ranks=0, packed=False, **options):
    """What all batches share: weights as transformers has them, and options of `moe_forward`."""
    _, d, h, *_ = shape
    w1, w2 = random(E, 2 * h, d, scale=d**-0.5).to(dtype).mT, random(E, d, h, scale=h**-0.5).to(dtype).mT
    if biases:
        options |= {"b1": random(E, 2 * h).to(dtype), "b2": random(E, d).to(dtype)}
    if ranks:
        sizes = ((ranks, d), (2 * h, ranks), (ranks, h), (d, ranks))
        options["lora"] = mb.Lora(*(random(E, *size, scale=size[1] ** -0.5).to(dtype) for size in sizes))
    if packed:
        w1, w2 = mb.quantize_experts(w1, w2, "nf4")
    return (w1, w2), options


def tokens_of(shape, dtype):
    """x, ids, router weights and the gradient of the output, of the largest batch."""
    k, d, _, L, *_ = shape
    ids = torch.rand(L, E).topk(k, dim=1).indices.int()
    return [random(L, d).to(dtype), ids, torch.rand(L, k), random(L, d).to(dtype)]


def results(tokens, weights, options):
    x, ids, scales, grad_out = tokens
    out, saved = mb.moe_forward(x, ids, scales, *weights, **options)
    if saved is None:
        return {"out": out}
    needs = ("x", "weights", "lora") if options.get("lora") else ("x", "weights")
    if not isinstance(weights[0], mb.QuantizedWeight) and "lora" not in needs:
        needs = None  # as in training, where all gradients come from one call
    grads = mb.moe_backward(grad_out, saved, needs=needs)
    return {"out": out, "x": grads.x, "weights": grads.weights}


def batches(L, sides):
    """Places of the tokens of smaller batches, and of one in another order."""
    some = torch.randperm(L)
    few = [some[:1], some[:2], some[:7], some[:64], some[:1000], some]
    return [*few, *(torch.arange(n) for n in sides), torch.arange(1, L)]


def differing(got, want):
    """How many rows differ, and by how much, by the name of the result. NaN would differ from itself."""
    found = {}
    for name in want:
        if not torch.equal(got[name], want[name]):
            difference = (got[name].double() - want[name].double()).abs()
            found[name] = int(difference.any(1).sum()), len(difference), float(difference.max())
    return found


@pytest.fixture
def launched(monkeypatch):
    """Names of the kernels that were launched, in order."""
    names, plain = [], Runtime.launch
    monkeypatch.setattr(
        Runtime, "launch", lambda self, step, *a: (names.append(step.variant.name), plain(self, step, *a))
    )
    return names


def check(device, shape, dtype, launched, **options):
    torch.manual_seed(0)
    with torch.device(device):
        weights, options = layer_of(shape, dtype, **options)
        tokens, kernels = tokens_of(shape, dtype), []
        smaller = batches(shape.tokens, shape.sides)

    def run(given):
        launched.clear()
        found = results(given, weights, options)
        kernels.append(tuple(launched))
        return found

    whole = run(tokens)
    assert all(value.isfinite().all() and value.any() for value in whole.values())
    differ = {}
    for number, places in enumerate(smaller):
        got = run([given[places] for given in tokens])
        want = {name: value[places] for name, value in whole.items()}
        differ[number, len(places)] = differing(got, want)
    crowd = [given.clone() for given in tokens]
    crowd[1][7:] = torch.arange(shape.k, dtype=torch.int32, device=device)  # experts of all tokens but seven
    got = run(crowd)
    few = [{name: value[:7] for name, value in found.items()} for found in (got, whole)]
    differ |= {"crowd": differing(*few)}
    assert not any(differ.values()), {batch: found for batch, found in differ.items() if found}
    return kernels


CPU = Shape(4, 64, 48, 300, (127, 128), ())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_bits_of_a_token_on_the_cpu(launched, dtype):
    check("cpu", CPU, dtype, launched)


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_a_token_on_the_cpu_with(launched, name):
    check("cpu", CPU, torch.bfloat16, launched, **OPTIONS[name])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, dtype) for name in SHAPES for dtype in (torch.bfloat16, torch.float32)), ("square tiles", torch.float16)],
    ids=str,
)
def test_bits_of_a_token(launched, name, dtype):
    shape = SHAPES[name]
    kernels = check("cuda", shape, dtype, launched)
    if loader.device_limits(0).tier == "sm90" and dtype is not torch.float32:
        for change in shape.changes:
            with_it = [any(change in kernel.split() for kernel in batch) for batch in kernels]
            assert any(with_it) and not all(with_it), change
    if shape.panels:
        sums = {sum(kernel.startswith("aggregat") for kernel in batch) for batch in kernels}
        assert len(sums) > 1, sums


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_bits_of_a_token_with(launched, name):
    if name == "products in fp8" and loader.device_limits(0).tier != "sm90":
        pytest.skip("products in e4m3 need Hopper's kernels")
    check("cuda", SHAPES["square tiles"], torch.bfloat16, launched, **OPTIONS[name])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_another_order_of_slots_gives_other_bits(device, dtype):
    """The comparison sees a sum in another order. On a GPU float32 holds the gradients' sums of fp16 rows exactly."""
    torch.manual_seed(0)
    # A change of float32's last bit changes one of 2^16 numbers in bf16, of which these are 2^20.
    shape = CPU._replace(tokens=2**14) if device == "cpu" else SHAPES["square tiles"]
    with torch.device(device):
        weights, options = layer_of(shape, dtype)
        tokens = tokens_of(shape, dtype)
    turned = [tokens[0], tokens[1].flip(1).contiguous(), tokens[2].flip(1).contiguous(), tokens[3]]
    first, second = (results(given, weights, options) for given in (tokens, turned))
    second["weights"] = second["weights"].flip(1)
    is_exact = device == "cuda" and dtype is torch.float16
    assert list(differing(second, first)) == (["out"] if is_exact else ["out", "x"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("experts", "k", "options"),
    [
        (8, 2, {}),
        (64, 8, {"renormalize": False}),
        (128, 8, {}),
        (256, 8, {"score": "sigmoid", "groups": (8, 4, 2), "eps": 1e-20, "scale": 2.5}),
        (512, 22, {"score": "sqrt_softplus", "sums": ("z", "entropy")}),
    ],
)
def test_bits_of_a_routed_token(device, experts, k, options, dtype):
    torch.manual_seed(0)
    L = 1100 if device == "cpu" else 4096
    with torch.device(device):
        logits, grad, all_of_them = random(L, experts).to(dtype), random(L, k), torch.arange(L)
        smaller = batches(L, ())

    def run(places):
        x = logits[places]
        weights, ids, *_ = mb.route(x, k, **options)
        backward = {name: value for name, value in options.items() if name != "sums"}
        return {"weights": weights, "ids": ids, "logits": mb.route_backward(grad[places], x, weights, ids, **backward)}

    whole = run(all_of_them)
    assert whole["logits"].any()
    for places in smaller:
        found = differing(run(places), {name: value[places] for name, value in whole.items()})
        assert not found, (len(places), found)
