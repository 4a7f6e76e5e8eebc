"""Random inputs: unit-scale tensors and top-k routings of three kinds, on the CPU or the current CUDA device."""

import argparse
from collections.abc import Iterable

import torch

CHUNK = 2**18  # rows of scores made at once: 2M tokens times 128 experts would be a gigabyte


def has_gpu() -> bool:
    return torch.cuda.is_available()


def expect_gpu(parser: argparse.ArgumentParser) -> None:
    """Ends a program that cannot run without a GPU, with exit status 2 and a message, where torch finds none."""
    if not has_gpu():
        parser.error("expected a CUDA device that torch can use, got none")


def chosen(
    parser: argparse.ArgumentParser, option: str, names: str | None, known: Iterable[str], separator: str = ","
) -> list[str]:
    """The names that an option lists, or all known ones. Ends the program for one that is not known."""
    every = list(known)
    found = names.split(separator) if names else every
    if unknown := [name for name in found if name not in every]:
        listed, others = (f"{separator} ".join(each) for each in (every, unknown))
        parser.error(f"argument {option}: expected names among {listed}, got {others}")
    return found


def device() -> str:
    return "cuda" if has_gpu() else "cpu"


def _rows(L: int, width: int, generator) -> list[torch.Tensor]:
    return [
        torch.rand(min(CHUNK, L - i), width, generator=generator, device=generator.device) for i in range(0, L, CHUNK)
    ]


def routing(L: int, E: int, k: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """(L, k) int64 expert ids. All kinds but "one" and "zipf" name k distinct experts per token.

    random: uniform. balanced: every expert gets L*k/E slots, give or take one. skewed: a quarter of the experts get
    80% of the slots. one: all slots on one expert. zipf: probability 1/rank^1.2, with repeats.
    """
    where = generator.device
    if kind == "one":
        return torch.full((L, k), E // 2, device=where)
    if kind == "zipf":
        p = torch.arange(1, E + 1, device=where, dtype=torch.float64) ** -1.2
        return torch.multinomial(p, L * k, replacement=True, generator=generator).reshape(L, k)
    names = torch.randperm(E, generator=generator, device=where)
    if kind == "balanced":
        turn = torch.randperm(L, generator=generator, device=where)[:, None] * k
        return names[(turn + torch.arange(k, device=where)) % E]
    if kind == "random":
        return torch.cat([scores.topk(k, dim=1).indices for scores in _rows(L, E, generator)])
    if kind != "skewed":
        raise ValueError(f"bench: routing: expected random, balanced, skewed, one or zipf, got {kind!r}")
    hot = max(1, E // 4)
    # a token names m of the hot experts, floor or ceil of 0.8*k, so that 80% of all slots are theirs
    few = min(int(0.8 * k), hot)
    slot, chosen = torch.arange(k, device=where), []
    for scores in _rows(L, E, generator):
        coin = torch.rand(len(scores), 1, generator=generator, device=where)
        m = (few + (coin < 0.8 * k - few)).clamp(max(0, k - (E - hot)), min(hot, k))
        ranks_hot = scores[:, :hot].argsort(dim=1)
        ranks_cold = scores[:, hot:].argsort(dim=1) + hot
        from_hot = ranks_hot.gather(1, slot.expand(len(scores), k).clamp(max=hot - 1))
        from_cold = ranks_cold.gather(1, (slot - m).clamp(0, E - hot - 1))
        chosen.append(names[torch.where(slot < m, from_hot, from_cold)])
    return torch.cat(chosen)


def layer_inputs(case, order: str = "transposed", seed: int = 0, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """x (L, d), ids (L, k) int32, weights (L, k) float32, w1 (E, d, 2h) or (E, d, h), w2 (E, h, d), grad_out (L, d).

    order: "row" as indexed; "transposed" the two inner dimensions of w1 and w2 the other way round in memory, as
    transformers stores them. Weights are scaled so that every product has unit variance.
    """
    if order not in ("row", "transposed"):
        raise ValueError(f"bench: order: expected row or transposed, got {order!r}")
    generator = torch.Generator(device()).manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype).mul_(scale)

    L, d, h, E, k, n = case.L, case.d, case.h, case.E, case.k, case.first_columns
    ids = routing(L, E, k, case.routing, generator).int()
    weights = torch.rand(L, k, generator=generator, device=generator.device).add_(0.1)
    if order == "transposed":
        w1 = normal(E, n, d, scale=d**-0.5).transpose(1, 2)
        w2 = normal(E, d, h, scale=h**-0.5).transpose(1, 2)
    else:
        w1, w2 = normal(E, d, n, scale=d**-0.5), normal(E, h, d, scale=h**-0.5)
    weights /= weights.sum(1, keepdim=True)
    return {"x": normal(L, d), "ids": ids, "weights": weights, "w1": w1, "w2": w2, "grad_out": normal(L, d)}
