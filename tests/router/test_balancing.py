"""The code of docs/balancing.md, block by block, against formulas in float64 that autograd differentiates."""

import re
from pathlib import Path

import pytest

import moeblaze_cupy as mb

torch = pytest.importorskip("torch")
one_hot = torch.nn.functional.one_hot

PAGE = (Path(__file__).parent.parent.parent / "docs" / "balancing.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
L, E, K = 96, 12, 3


@pytest.fixture(scope="module")
def page():
    """What the page's blocks define, in their order."""
    names = {}
    for block in BLOCKS:
        exec(compile(block, "docs/balancing.md", "exec"), names)
    return names


def logits_of(seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(-1, 1, E, dtype=torch.float64)
    return (scale * torch.randn(L, E, generator=generator, dtype=torch.float64) + spread).requires_grad_()


def top_counts(logits, k):
    """(E,) of a plain top-k, in float64."""
    return one_hot(logits.detach().topk(k, dim=1).indices, E).sum(dim=(0, 1)).double()


def shares(logits, score):
    """Each token's scores as parts of 1."""
    if score == "softmax":
        return logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    scores = 1 / (1 + (-logits).exp())
    return scores / scores.sum(dim=1, keepdim=True)


def switch(logits):
    first = one_hot(logits.detach().argmax(dim=1), E).double().mean(dim=0)
    return E * (first * shares(logits, "softmax").mean(dim=0)).sum()


def transformers(first, second):
    both = torch.cat([first, second])
    chosen = one_hot(shares(both, "softmax").topk(K, dim=1).indices, E).double()  # (2L, k, E)
    return E * (chosen.mean(dim=0) * shares(both, "softmax").mean(dim=0)).sum()


def aux(logits, score):
    fractions = top_counts(logits, K) / (K * L)
    return 0.25 * E * (fractions * shares(logits, score).mean(dim=0)).sum()


def seq_aux(logits, score):
    return sum(
        0.25 / 4 * E * (top_counts(part, K) / (K * len(part)) * shares(part, score).mean(dim=0)).sum()
        for part in logits.chunk(4)
    )


def importance(logits):
    total = shares(logits, "softmax").sum(dim=0)
    return ((total - total.mean()) ** 2).sum() / (E - 1) / total.mean() ** 2


LOSSES = {
    "switch_loss": (lambda f, x: f(x, K), switch),
    "aux_loss softmax": (lambda f, x: f(x, K, 0.25), lambda x: aux(x, "softmax")),
    "aux_loss sigmoid": (lambda f, x: f(x, K, 0.25, score="sigmoid"), lambda x: aux(x, "sigmoid")),
    "aux_loss of sequences, softmax": (lambda f, x: f(x, K, 0.25, 4), lambda x: seq_aux(x, "softmax")),
    "aux_loss of sequences, sigmoid": (lambda f, x: f(x, K, 0.25, 4, "sigmoid"), lambda x: seq_aux(x, "sigmoid")),
    "importance_loss": (lambda f, x: f(x, K), importance),
    "scaled_z_loss": (lambda f, x: f(x, K, 0.5), lambda x: 0.5 * (x.exp().sum(dim=1).log() ** 2).mean()),
}
# fp32 sums of 96 values; float64 logits are computed in float64.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}


def assert_close(got, want, dtype):
    assert (got.double() - want).norm() <= TOLERANCES[dtype] * want.norm()


def assert_same_loss(found, formula, inputs, dtype):
    """Value and gradients."""
    given = [x.detach().to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in given]
    got, want = found(*given), formula(*exact)
    assert got.shape == () and got.dtype == dtype
    assert_close(got.detach(), want.detach(), dtype)
    for one, other in zip(torch.autograd.grad(got, given), torch.autograd.grad(want, exact), strict=True):
        assert one.abs().max() > 0
        assert_close(one, other, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients(page, name, dtype):
    call, formula = LOSSES[name]
    assert_same_loss(lambda x: call(page[name.split()[0]], x), formula, [logits_of()], dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_transformers_loss_sums_layers_before_the_product(page, dtype):
    layers = [logits_of(1), logits_of(2, scale=0.5)]
    assert_same_loss(lambda *given: page["transformers_loss"](given, K), transformers, layers, dtype)
    of_each = sum(page["transformers_loss"]([x], K) for x in layers) / 2
    assert abs(page["transformers_loss"](layers, K) - of_each) > 1e-3


def test_transformers_loss_is_that_of_transformers(page):
    module = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layers = [logits_of(1).detach().float(), logits_of(2).detach().float()]
    want = module.load_balancing_loss_func(tuple(layers), E, K)
    assert_close(page["transformers_loss"](layers, K), want.double(), torch.float32)


def test_global_aux_loss_counts_all_micro_batches(page):
    """Of which the second has a quarter of the tokens."""
    first, second = logits_of(3).detach(), logits_of(4)[: L // 4].detach()
    total, tokens = torch.zeros(1, E, dtype=torch.int32), L + L // 4
    page["global_aux_loss"](first, K, 0.25, total)
    fractions = (top_counts(first, K) + top_counts(second, K)) / (K * tokens)

    def formula(x):
        return 0.25 * E * (fractions * shares(x, "softmax").mean(dim=0)).sum()

    def found(x):
        return page["global_aux_loss"](x, K, 0.25, total.clone())

    assert_same_loss(found, formula, [second], torch.float64)


def test_losses_at_balance(page):
    """Every expert is as likely, and chosen as often."""
    even = torch.eye(E, dtype=torch.float64).repeat(L // E, 1) * 1e-9
    assert abs(page["switch_loss"](even, K) - 1) < 1e-6
    assert abs(page["importance_loss"](even, K)) < 1e-6
    assert abs(page["transformers_loss"]([even, even], K) - K) < 1e-6  # not 1, as it does not divide by k
    total = torch.zeros(1, E, dtype=torch.int32)
    for sized in (even, even[: 2 * E], even):
        assert abs(page["global_aux_loss"](sized, K, 0.25, total) - 0.25) < 1e-6
    for score in ("softmax", "sigmoid"):
        assert abs(page["aux_loss"](even, K, 0.25, score=score) - 0.25) < 1e-6
        assert abs(page["aux_loss"](even, K, 0.25, 4, score=score) - 0.25) < 1e-6


def test_transformers_loss_takes_the_softmax_of_any_routers_logits(page):
    """Also where the layer weighs by sigmoids: shares of sigmoids give another loss."""
    logits = logits_of(1)
    loss = page["transformers_loss"]([logits], K)
    assert abs(loss - page["aux_loss"](logits, K, K)) < 1e-9
    assert abs(loss - page["aux_loss"](logits, K, K, score="sigmoid")) > 1e-2


def test_sequences_of_megatron_alternate(page):
    """Its tokens are (s, b): those of one sequence are b apart, until they are transposed."""
    T, S = L // 4, 4
    towards = torch.linspace(-3, 3, S, dtype=torch.float64).repeat(T)[:, None] * torch.linspace(-1, 1, E)
    logits = logits_of(10).detach() + towards  # sequences prefer different experts
    per_sequence = logits.view(T, S, E)
    want = sum(page["aux_loss"](per_sequence[:, s].contiguous(), K, 0.25) for s in range(S)) / S
    transposed = per_sequence.transpose(0, 1).reshape(L, E)
    assert abs(page["aux_loss"](transposed, K, 0.25, S) - want) < 1e-12
    assert abs(page["aux_loss"](logits, K, 0.25, S) - want) > 1e-2


def test_centred_sign_step(page):
    counts, bias = torch.tensor([[9, 1, 1, 1]], dtype=torch.int32), torch.zeros(4)
    page["centred_sign_step"](bias, counts, 0.125)
    assert bias.tolist() == [-0.1875, 0.0625, 0.0625, 0.0625]


def test_quantile_bias_is_the_quantile_of_line_less_score(page):
    logits, bias = logits_of(5).detach(), torch.linspace(-0.1, 0.1, E)
    scores = 1 / (1 + (-logits).exp())
    line = (scores + bias).topk(K + 1, dim=1).values[:, K:]
    exact = (line - scores).sort(dim=0).values[L * K // E - 1]  # the quantile: so many are not above it
    found = page["quantile_bias"](logits, K, bias)
    assert (found - (exact - exact.mean())).abs().max() < 2.2 / 1000 * 1.01  # a bin
    assert abs(found.mean()) < 1e-6


def test_quantile_bias_evens_out_the_load_in_one_step(page):
    logits = 2 * torch.randn(4096, 32, generator=torch.Generator().manual_seed(6)) + torch.linspace(-2, 2, 32)

    def violation(bias):
        _, ids = page["route"](logits, 4, score="sigmoid", bias=bias)
        return page["load_statistics"](mb.tokens_per_expert(ids, 32))["max_violation"]

    bias = torch.zeros(32)
    before = violation(bias)
    assert before > 1 and violation(page["quantile_bias"](logits, 4, bias)) < 0.4
    for _ in range(6):
        page["update_bias"](bias, mb.tokens_per_expert(page["route"](logits, 4, score="sigmoid", bias=bias)[1], 32))
    assert violation(bias) > 0.9 * before


def test_load_statistics(page):
    found = page["load_statistics"](torch.tensor([[4, 4, 0, 0]]))
    assert {name: round(float(value), 6) for name, value in found.items()} == {
        "max_violation": 1.0,
        "without_tokens": 0.5,
        "effective_experts": 0.5,
    }


def dense(token_offsets, ids, values):
    """(L, E) from pairs; 0 where there is none."""
    token = torch.repeat_interleave(torch.arange(L), torch.diff(token_offsets))
    ids, values = ids[: len(token)].long(), values[: len(token)]
    return torch.zeros(L, E, dtype=values.dtype).index_put((token, ids), values)


def test_switch_top2_renormalises_what_stays(page):
    logits = logits_of(7)
    weights, ids = page["switch_top2"](logits, 12)
    probabilities, chosen = shares(logits, "softmax"), logits.topk(2, dim=1).indices
    room = torch.full((E,), 12)
    stays = torch.zeros(L, 2, dtype=torch.bool)
    for choice in range(2):
        for t in range(L):
            stays[t, choice] = room[chosen[t, choice]] > 0
            room[chosen[t, choice]] -= 1
    assert torch.equal(ids, torch.where(stays, chosen, -1).int()) and (~stays).sum() > 10
    kept = probabilities.gather(1, chosen) * stays
    want = torch.where(stays, kept / kept.sum(dim=1, keepdim=True), 0.0)
    torch.testing.assert_close(weights, want, rtol=1e-12, atol=1e-12)


def test_weights_of_pairs_and_their_gradients(page):
    logits = logits_of(8)
    probabilities = shares(logits, "softmax")
    top, chosen = probabilities.topk(K, dim=1)
    combined = probabilities.scatter(1, chosen, top / top.sum(dim=1, keepdim=True))
    upstream = torch.randn(L, E, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    wanted = {
        "expert_choice": (probabilities, lambda f: f(logits, 20)),
        "token_rounding": (combined, lambda f: f(logits, K, tile=8)),
        "relu_routing": (logits.clamp(min=0), lambda f: f(logits, L * E)),
    }
    for name, (values, call) in wanted.items():
        token_offsets, ids, weights = call(page[name])
        mask = dense(token_offsets, ids, torch.ones(len(ids)))
        got, want = dense(token_offsets, ids, weights), values * mask
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        (grad,) = torch.autograd.grad((got * upstream).sum(), logits)
        (exact,) = torch.autograd.grad((want * upstream).sum(), logits, retain_graph=True)
        torch.testing.assert_close(grad, exact, rtol=1e-10, atol=1e-12)
        counts = mask.sum(dim=0)
        assert {"expert_choice": (counts == 20).all(), "token_rounding": (counts % 8 == 0).all()}.get(name, True)
        if name == "relu_routing":
            assert torch.equal(mask.bool(), logits > 0)


def test_every_block_of_the_page_is_tested(page):
    defined = set(re.findall(r"^def (\w+)", "".join(BLOCKS), re.MULTILINE))
    source = Path(__file__).read_text()
    assert len(defined) >= 13 and all(f'"{name}' in source for name in defined)
