"""Ready balancing losses and the bias step, against formulas in float64 that autograd differentiates."""

import functools

import pytest

import moeblaze_cupy as mb
from moeblaze_cupy.calls import graph_break
from moeblaze_cupy.types import RouterSums

torch = pytest.importorskip("torch")

from moeblaze_cupy.interop.torch import MoE, load_balancing_loss, route, update_bias, z_loss  # noqa: E402
from moeblaze_cupy.interop.torch.private import GRAPH_BREAKS_HAVE_REASONS  # noqa: E402

L, E, K, S = 96, 12, 3, 4
# float32 sums of 96 values of size 1 and their shares; in float64 all is float64
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}


def logits_of(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(-1, 1, E, dtype=torch.float64)
    return (2 * torch.randn(L, E, generator=generator, dtype=torch.float64) + spread).to(dtype).requires_grad_()


def shares(logits, score):
    """Each token's scores as parts of 1, by exponentials alone."""
    scores = logits.exp() if score == "softmax" else 1 / (1 + (-logits).exp())
    return scores / scores.sum(dim=1, keepdim=True)


def slots_of(logits):
    """(L, E): 1 where a plain top-k chose."""
    return torch.zeros_like(logits.detach()).scatter(1, logits.detach().topk(K, dim=1).indices, 1.0)


def balance(logits, score):
    f, q = slots_of(logits).mean(dim=0) / K, shares(logits, score).mean(dim=0)
    return E * (f * q).sum()


def assert_same(found, wanted, logits, dtype):
    """The value, and the gradient of the logits."""
    exact = logits.detach().double().requires_grad_()
    got, want = found(logits), wanted(exact)
    assert got.shape == () and got.dtype == dtype
    assert abs(got.double() - want) <= TOLERANCES[dtype] * abs(want)
    (one,), (other,) = torch.autograd.grad(got, logits), torch.autograd.grad(want, exact)
    assert other.abs().max() > 0
    assert (one.double() - other).norm() <= TOLERANCES[dtype] * other.norm()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balancing_loss(score, dtype):
    def found(x):
        _, ids, sums = route(x, K, score=score, sums=(score,))
        return load_balancing_loss(mb.tokens_per_expert(ids, E), sums)

    assert_same(found, lambda x: balance(x, score), logits_of(1, dtype), dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_load_balancing_loss_of_sequences_is_the_mean_of_theirs(dtype):
    def found(x):
        _, ids, sums = route(x, K, sums=("softmax",), sequences=S)
        return load_balancing_loss(mb.tokens_per_expert(ids, E, sequences=S), sums)

    def wanted(x):
        return sum(balance(part, "softmax") for part in x.chunk(S)) / S

    logits = logits_of(2, dtype)
    assert_same(found, wanted, logits, dtype)
    assert abs(found(logits) - balance(logits.double(), "softmax")) > 1e-3


def test_load_balancing_loss_takes_counts_of_a_larger_batch():
    other = logits_of(4)

    def found(x):
        _, ids, sums = route(x, K, sums=("softmax",))
        return load_balancing_loss(mb.tokens_per_expert(ids, E)[0] + slots_of(other).sum(dim=0).int(), sums)

    def wanted(x):
        f = (slots_of(x) + slots_of(other)).mean(dim=0) / (2 * K)
        return E * (f * shares(x, "softmax").mean(dim=0)).sum()

    assert_same(found, wanted, logits_of(3), torch.float64)


def test_masked_tokens_have_no_part():
    keep = torch.arange(L) % 3 > 0

    def found(x):
        _, ids, sums = route(x, K, sums=("softmax", "z"), token_mask=keep)
        return load_balancing_loss(mb.tokens_per_expert(ids, E), sums) + z_loss(sums, keep.sum())

    def wanted(x):
        x = x[keep]
        return balance(x, "softmax") + (x.exp().sum(dim=1).log() ** 2).mean()

    assert_same(found, wanted, logits_of(5), torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_z_loss(dtype):
    def found(x):
        _, _, sums = route(x, K, sums=("z",), sequences=S)
        return z_loss(sums, L)

    assert_same(found, lambda x: (x.exp().sum(dim=1).log() ** 2).mean(), logits_of(6, dtype), dtype)


@pytest.mark.parametrize("number", [0, torch.tensor(0)], ids=["int", "tensor"])
def test_z_loss_of_no_tokens(number):
    x = logits_of(6).requires_grad_()
    _, _, sums = route(x, K, sums=("z",), token_mask=torch.zeros(L, dtype=torch.bool))
    loss = z_loss(sums, number)
    assert loss == 0 and not torch.autograd.grad(loss, x)[0].any()


def test_losses_at_balance_and_at_collapse():
    even = torch.full((1, E), L / E, dtype=torch.float64)
    one = torch.zeros(1, E, dtype=torch.float64).index_fill(1, torch.tensor(0), L)
    assert abs(load_balancing_loss(even, RouterSums(even)) - 1) < 1e-12
    assert abs(load_balancing_loss(one, RouterSums(one)) - E) < 1e-12
    none = torch.zeros(1, E, dtype=torch.float64)
    assert load_balancing_loss(none, RouterSums(none)) == 0  # of a rank without tokens


def test_update_bias_moves_towards_the_mean():
    bias = torch.tensor([0.5, 0.25, 0.0, -0.5])
    update_bias(bias, torch.tensor([[1, 4, 0, 3], [1, 4, 0, 3]], dtype=torch.int32), 0.125)  # their mean is 4
    assert bias.tolist() == [0.625, 0.125, 0.125, -0.625]
    update_bias(bias, torch.tensor([2, 2, 2, 2]))
    assert bias.tolist() == [0.625, 0.125, 0.125, -0.625]


@pytest.mark.parametrize("bias", [None, [0.0, 1.0]])
def test_a_bias_that_is_no_tensor_is_refused(bias):
    with pytest.raises(TypeError, match=r"^update_bias: bias: expected a float32 tensor, .* got "):
        update_bias(bias, torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("slots", "signs"), [([1_000_001] * 60, [0] * 60), ([2**24, 2**24 + 1] * 2, [1, -1] * 2)], ids=["even", "uneven"]
)
def test_update_bias_counts_exactly(slots, signs):
    bias = torch.zeros(len(slots))
    update_bias(bias, torch.tensor(slots, dtype=torch.int32), 0.125)
    assert bias.tolist() == [0.125 * sign for sign in signs]


def test_update_bias_evens_out_the_load_of_a_module():
    torch.manual_seed(7)
    layer = MoE(16, 8, E, K, score="sigmoid", bias=True, return_routing=True)
    x = torch.randn(512, 16) + 1  # a mean, which favours some experts

    def counts():
        return mb.tokens_per_expert(layer(x)[1].ids, E)

    before = counts().max()
    for _ in range(60):
        update_bias(layer.bias, counts(), 1e-2)
    assert before > 1.5 * 512 * K / E and counts().max() < 1.15 * 512 * K / E


def test_errors_name_the_function_and_the_argument():
    _, ids, sums = route(logits_of(8), K, sums=("softmax",))
    counts = mb.tokens_per_expert(ids, E)
    with pytest.raises(TypeError, match=r'^load_balancing_loss: sums: expected .*sums=\("softmax",\).* got None'):
        load_balancing_loss(counts, None)
    with pytest.raises(TypeError, match=r'^z_loss: sums: expected .*sums=\("z",\)'):
        z_loss(sums, L)
    with pytest.raises(ValueError, match=rf"^load_balancing_loss: counts: expected .*E = {E}, got \(1, 11\)"):
        load_balancing_loss(counts[:, :-1], sums)
    for of_counts, of_sums in ((1, 2), (2, 1), (2, 4)):  # the first two would broadcast to another loss
        _, ids, sums = route(logits_of(8), K, sums=("softmax",), sequences=of_sums)
        expected = rf"^load_balancing_loss: counts: expected those of S = {of_sums} sequences.*, got S = {of_counts}"
        with pytest.raises(ValueError, match=expected):
            load_balancing_loss(mb.tokens_per_expert(ids, E, sequences=of_counts), sums)
    with pytest.raises(TypeError, match=r"^update_bias: bias: expected torch.float32, got torch.bfloat16"):
        update_bias(torch.zeros(E, dtype=torch.bfloat16), counts)
    with pytest.raises(ValueError, match=rf"^update_bias: counts: expected .*E = {E}, got \(1, 11\)"):
        update_bias(torch.zeros(E), counts[:, :-1])


@graph_break
def never_called(ids):
    return ids


def test_one_graph_is_refused_with_the_reason():
    """Also where the first call of a function is compiled."""
    ids = route(logits_of(8), K)[1]
    for function in (never_called, functools.partial(mb.tokens_per_expert, num_experts=E)):
        compiled = torch.compile(lambda ids, function=function: function(ids), backend="eager", fullgraph=True)
        expected = r"(never_called|tokens_per_expert) of moeblaze_cupy has no operator"
        with pytest.raises(RuntimeError, match=expected if GRAPH_BREAKS_HAVE_REASONS else ""):
            compiled(ids)


def test_losses_compile_to_one_graph():
    """With counts by torch, as the page on balancing says."""

    def found(x):
        _, ids, sums = route(x, K, sums=("softmax", "z"))
        counts = (ids[..., None] == torch.arange(E, device=ids.device)).sum((0, 1))
        return load_balancing_loss(counts, sums) + z_loss(sums, len(x))

    def wanted(x):
        return balance(x, "softmax") + (x.exp().sum(dim=1).log() ** 2).mean()

    compiled = torch.compile(found, backend="aot_eager", fullgraph=True)
    assert_same(compiled, wanted, logits_of(9), torch.float64)
