"""The index lists (paper sections 4.1 and 4.2)."""

import numpy as np

from moeblaze_cupy.cuda import launch_config
from moeblaze_cupy.reference.numerics import HostArray
from moeblaze_cupy.types import DispatchIndices


def _offsets_up_to(offsets: HostArray, num_pairs: int) -> HostArray:
    """Returns (P,): how many of the offsets (L+1,) are up to each pair. Less 1 that is its token, or -1 or L for none.

    The search takes any contents. Rising offsets have one answer. With others each pair gets at most one token, whose
    offsets enclose the pair, and a larger pair no smaller token, as it halves the offsets at the same places.
    """
    pairs, number = np.arange(num_pairs), offsets.size
    found = np.zeros(num_pairs, np.int64)  # (P,) offsets up to the pair
    step = 1 << number.bit_length() - 1
    while step:
        at = found + step
        passes = (at <= number) & (offsets[np.minimum(at, number) - 1] <= pairs)
        found, step = np.where(passes, at, found), step >> 1
    return found


def dispatch(
    ids: HostArray, num_experts: int, token_offsets: HostArray | None = None, max_slots: int | None = None
) -> DispatchIndices:
    """Builds the index lists of Section 4.1 in the three steps of Section 4.2.

    ids (L, k) int32 or int64, contiguous: the experts of each token. An id < 0 or >= E is "no expert in this slot": its
    token_index_map entry is -1, and the end of expert_token_indices is filled with -1. A token that names an expert
    twice has two slots there. Within an expert the order is by token, then slot.
    token_offsets (L+1,) int32: ids are (P,), and pair p is token t's for token_offsets[t] <= p < token_offsets[t+1]. A
    pair without a token is no slot.

    max_slots: slots past so many, in the order of experts, then tokens, then slots, are not slots either.

    Returns DispatchIndices, all int32; row_tiles is -1 past its last tile. token_expert_indices is a view of int32 ids;
    for int64 ids it is an int32 copy in which absent slots are -1. Arguments are not checked.
    """
    token_expert_indices = ids.reshape(-1)  # (L*k,)
    if token_offsets is None:
        num_tokens, k = ids.shape
        token_of_slot = np.arange(ids.size) // k  # (L*k,)
        has_token = np.ones(ids.size, bool)  # (L*k,)
        first_slots = None
    else:
        num_tokens, k = token_offsets.size - 1, None
        found = _offsets_up_to(token_offsets, ids.size)  # (P,)
        token_of_slot, has_token = found - 1, (found > 0) & (found <= num_tokens)  # (P,), (P,)
        first_slots = np.searchsorted(found, np.arange(1, num_tokens + 2))  # (L+1,)
    if ids.dtype != np.int32:
        present = has_token & (token_expert_indices >= 0) & (token_expert_indices < num_experts)  # (L*k,)
        token_expert_indices = np.where(present, token_expert_indices, -1).astype(np.int32)  # (L*k,)
    num_slots = token_expert_indices.size

    # Step 1, dense token-expert map, one column (expert) at a time and a row per slot, not per token: a token may
    # name an expert twice. Only the rows that are set are kept, in order.
    slots_of_expert = [np.flatnonzero(has_token & (token_expert_indices == e)) for e in range(num_experts)]  # E x (n,)

    # Step 2, expert lengths and their exclusive prefix sum.
    expert_token_offsets = np.zeros(num_experts + 1, np.int32)  # (E+1,)
    np.cumsum([slots.size for slots in slots_of_expert], out=expert_token_offsets[1:])

    # Step 3, route indices to gates: a slot's position (the location map) is its expert's offset plus its rank there.
    slot_at_position = np.concatenate(slots_of_expert)  # (offsets[E],)
    chosen = slot_at_position.size
    if max_slots is not None:
        slot_at_position = slot_at_position[:max_slots]  # (offsets[E],)
        np.minimum(expert_token_offsets, max_slots, out=expert_token_offsets)
    num_routed = slot_at_position.size
    expert_token_indices = np.full(num_slots, -1, np.int32)  # (L*k,)
    expert_token_indices[:num_routed] = token_of_slot[slot_at_position]
    token_index_map = np.full(num_slots, -1, np.int32)  # (L*k,)
    token_index_map[slot_at_position] = np.arange(num_routed)

    # The GEMMs' row tiles, and the order in which weight gradients take the experts.
    tile_rows, offsets = launch_config.TILE_ROWS, expert_token_offsets
    tiles = [(e, row) for e in range(num_experts) for row in range(offsets[e], offsets[e + 1], tile_rows)]
    places, size = launch_config.index_lists(num_tokens, k, num_experts, num_slots, bounded=max_slots is not None)
    lists, experts, copied = np.full(size, -1, np.int32), token_expert_indices.reshape(ids.shape), ids.dtype != np.int32
    index = DispatchIndices(lists, experts, places, num_experts, copied, max_slots)
    if max_slots is not None:
        index.dropped[:] = chosen - num_routed
    index.expert_token_indices[:] = expert_token_indices
    index.expert_token_offsets[:] = expert_token_offsets
    index.token_index_map[:] = token_index_map.reshape(ids.shape)
    index.row_tiles[: 1 + len(tiles)] = [(len(tiles), tile_rows), *tiles]
    if first_slots is not None:
        index.token_offsets[:] = first_slots
    index.experts_by_load[:] = np.argsort(-np.diff(expert_token_offsets), kind="stable")
    return index
