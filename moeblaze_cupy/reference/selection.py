"""The pairs of a token and an expert that stay or are taken: counts, capacity, selection per expert, in NumPy."""

import itertools
from collections.abc import Iterator

import numpy as np

from moeblaze_cupy.reference.numerics import HostArray, cast, compute_dtype
from moeblaze_cupy.reference.router import scores_of

Sequences = int | HostArray


def expert_choice_pairs(num_tokens: int, num_experts: int, capacity: int, num_sequences: int, equal: bool) -> int:
    """Returns the room for the pairs of expert choice, which fill it if all sequences are equally long (`equal`)."""
    if equal:
        return num_sequences * num_experts * min(capacity, num_tokens // num_sequences)
    return num_experts * min(num_sequences * capacity, num_tokens)


def rounded_pairs(num_tokens: int, k: int, num_experts: int, tile: int, rounding: str) -> int:
    """Returns the room for the pairs of token rounding, whatever the router has chosen."""
    added = {
        "up": num_experts * (tile - 1),
        "down": 0,
        "nearest": num_experts * ((tile - 1) // 2),
        "balance": tile // 2,
    }
    return min(num_tokens * k + added[rounding], num_tokens * num_experts)


def tokens_per_expert(ids: HostArray, num_experts: int, *, sequences: Sequences = 1) -> HostArray:
    """Returns the slots of each expert in each sequence, (S, E) int32, for ids (L, k). Arguments are not checked."""
    ranges = list(_ranges(sequences, len(ids)))
    counts = np.zeros((len(ranges), num_experts), np.int32)
    for row, (begin, end) in zip(counts, ranges, strict=True):
        part = ids[begin:end]
        row[:] = np.bincount(part[_present(part, num_experts)], minlength=num_experts)
    return counts


def limit_capacity(
    ids: HostArray,
    num_experts: int,
    capacity: int,
    *,
    order: str = "position",
    weights: HostArray | None = None,
    priority: HostArray | None = None,
    sequences: Sequences = 1,
) -> HostArray:
    """Returns ids (L, k) int32 with at most `capacity` slots per expert and sequence, the first in `order`.

    Equal ones stay by rising token, then slot. Arguments are not checked.
    """
    L, k = ids.shape
    kept = np.full((L, k), -1, np.int32)
    rank = np.zeros((L, k), np.int64)  # equal ranks: none goes before another
    if order == "choice":
        rank[:] = np.arange(k)
    elif order == "weights" and weights is not None:
        rank = _descending(weights)
    elif priority is not None:
        rank[:] = _descending(priority)[:, None]
    for begin, end in _ranges(sequences, L):
        token, slot = np.nonzero(_present(ids[begin:end], num_experts))
        token += begin
        experts = ids[token, slot]
        by_expert = np.lexsort((slot, token, rank[token, slot], experts))  # the last is the first to sort by
        sorted_experts = experts[by_expert]
        place = np.arange(by_expert.size) - np.searchsorted(sorted_experts, sorted_experts)  # within the expert
        stays = by_expert[place < capacity]
        kept[token[stays], slot[stays]] = experts[stays]
    return kept


def expert_choice(scores: HostArray, capacity: int, *, sequences: Sequences = 1) -> tuple[HostArray, HostArray]:
    """Returns pairs of each expert with its `capacity` tokens of largest scores (L, E) in each sequence.

    Returns token_offsets (L+1,) and ids, int32; ids past the last pair are -1. Arguments are not checked.
    """
    L, E = scores.shape
    taken = np.zeros((L, E), bool)
    for begin, end in _ranges(sequences, L):
        for column, into in zip(_descending(scores[begin:end]).T, taken[begin:end].T, strict=True):
            into[np.argsort(column, kind="stable")[:capacity]] = True
    lengths = (sequences, None) if isinstance(sequences, int) else (len(sequences) - 1, sequences)
    return list_pairs(taken, expert_choice_pairs(L, E, capacity, lengths[0], lengths[1] is None))


def round_tokens(
    scores: HostArray, ids: HostArray, *, tile: int = 128, rounding: str = "nearest"
) -> tuple[HostArray, HostArray]:
    """Returns pairs of each expert with a multiple of `tile` tokens, or all L: those that chose it, then the others.

    scores (L, E), ids (L, k). Returns token_offsets (L+1,) and ids, int32; ids past the last pair are -1. Arguments are
    not checked.
    """
    L, E = scores.shape
    chosen = np.zeros((L, E), bool)
    token, slot = np.nonzero(_present(ids, E))
    chosen[token, ids[token, slot]] = True
    rank = _descending(scores)
    taken = np.zeros((L, E), bool)
    for expert, target in enumerate(rounded(chosen.sum(axis=0), L, tile, rounding)):
        taken[np.lexsort((rank[:, expert], ~chosen[:, expert]))[:target], expert] = True
    return list_pairs(taken, rounded_pairs(L, ids.shape[1], E, tile, rounding))


def rounded(frequencies: HostArray, L: int, tile: int, rounding: str) -> list[int]:
    """Returns how many tokens each expert gets in place of `frequencies` (E,).

    "up" and "down" are the multiples of the tile on either side, L at most; "nearest" the nearer one, half a tile goes
    down; "balance" the one that leaves the smaller absolute sum of all changes so far, equal ones go down.
    """
    targets, change = [], 0
    for frequency in map(int, frequencies):
        over = frequency % tile
        missing = min(tile - over, L - frequency) if over else 0
        up = {
            "up": True,
            "down": False,
            "nearest": tile - over < over,
            "balance": abs(change + missing) < abs(change - over),
        }[rounding]
        change += missing if up else -over
        targets.append(frequency + (missing if up else -over))
    return targets


def list_pairs(mask: HostArray, num_pairs: int) -> tuple[HostArray, HostArray]:
    """Returns the first num_pairs set pairs of mask (L, E), by token, then expert.

    Returns token_offsets (L+1,) and ids (num_pairs,), int32; ids past the last pair are -1. Arguments are not checked.
    """
    token_offsets = np.zeros(len(mask) + 1, np.int32)
    token_offsets[1:] = np.minimum(np.cumsum((mask != 0).sum(axis=1), dtype=np.int64), num_pairs)
    ids = np.full(num_pairs, -1, np.int32)
    ids[: token_offsets[-1]] = np.nonzero(mask)[1][:num_pairs]
    return token_offsets, ids


def quantile_histogram(
    logits: HostArray,
    ids: HostArray,
    bias: HostArray,
    histogram: HostArray,
    bounds: HostArray,
    *,
    score: str = "sigmoid",
) -> None:
    """Adds, per expert, the histogram over tokens of the largest biased score that is not chosen less the score.

    logits (L, E), ids (L, k), bias (E,), histogram (E, bins) int32, bounds (2,). A token without any id, and a NaN, is
    not counted. Arguments are not checked.
    """
    compute = compute_dtype(logits)
    num_experts, bins = histogram.shape
    scores = scores_of(cast(logits, compute), score)
    biased = scores + cast(bias, compute)
    present = _present(ids, num_experts)
    token, slot = np.nonzero(present)
    biased[token, ids[token, slot]] = -np.inf
    is_nan = np.isnan(biased).any(axis=1)
    line = np.where(is_nan | ~present.any(axis=1), np.nan, biased.max(axis=1, initial=-np.inf))[:, None]
    low, high = (cast(bounds, compute)[i] for i in range(2))
    place = (line - scores - low) * (compute.type(bins) / (high - low))
    token, expert = np.nonzero(~np.isnan(place))
    bin_ = np.clip(place[token, expert], 0, bins - 1).astype(np.int64)
    np.add.at(histogram, (expert, bin_), 1)


def _present(ids: HostArray, num_experts: int) -> HostArray:
    present: HostArray = (ids >= 0) & (ids < num_experts)
    return present


def _descending(values: HostArray) -> HostArray:
    """Returns integers that rise as values fall, equal for equal values; NaN comes first."""
    _, rank = np.unique(cast(values, compute_dtype(values)), return_inverse=True)  # NaN is the last
    descending: HostArray = -rank.reshape(values.shape)
    return descending


def _ranges(sequences: Sequences, L: int) -> Iterator[tuple[int, int]]:
    """Returns the bounds of each sequence: equally long ones, or by offsets (S+1,) that rise, clamped to [0, L]."""
    if isinstance(sequences, int):
        length = L // sequences
        yield from ((s * length, (s + 1) * length) for s in range(sequences))
        return
    for first, last in itertools.pairwise(sequences.tolist()):
        begin = min(max(first, 0), L)
        yield begin, min(max(last, begin), L)
