"""The launch geometry of the router's kernels: lanes per token, tokens per block, shared memory."""

from dataclasses import dataclass

from moeblaze_cupy.cuda.launch_config import DEFAULT_SHARED_BYTES, ceil_div

MAX_ROUTER_EXPERTS = 4096
MAX_ROUTER_K = 64
ROUTER_SUM_BLOCKS = 528  # most blocks with sums or groups: what an H200 holds at once; fixed, so that sums repeat
ROUTER_SUM_ROWS = 32  # rows of the blocks' sums that are added side by side
ROUTER_LISTED = 64  # keys of a token that are ranked by pairs
ROUTER_LANE_K = 8  # experts that one lane chooses and weighs, at most
ROUTER_LISTED_ROW = 208  # bytes: 24 entries that such a lane chooses from, and their number

CONSTANTS = {
    "router_forward.cu": {"MAX_ROUTER_EXPERTS": MAX_ROUTER_EXPERTS, "MAX_LISTED": ROUTER_LISTED},
    "router_lane.cu": {
        "MAX_ROUTER_EXPERTS": MAX_ROUTER_EXPERTS,
        "MAX_LISTED": ROUTER_LISTED,
        "LISTED_ROW_BYTES": ROUTER_LISTED_ROW,
    },
    "router_backward.cu": {"MAX_ROUTER_EXPERTS": MAX_ROUTER_EXPERTS},
    "router_sums.cu": {"ROWS_AT_ONCE": ROUTER_SUM_ROWS},
}


@dataclass(frozen=True)
class RouterConfig:
    """The places of tokens in threads: lanes per token, values per lane, tokens per block at a time and in all."""

    lanes: int
    values: int
    threads: int
    aligned: bool  # rows are read in vectors of 16 bytes
    full: bool  # all columns that lanes hold are experts'
    tokens_per_block: int
    blocks: int
    shared_bytes: int
    group_lanes: int = 0  # lanes that hold a group, a vector each, if the kernel ranks groups in registers
    lane_k: int = 0  # k where one lane chooses and weighs a token's experts


def _router_values(E: int, lanes: int, itemsize: int, aligned: bool) -> int:
    """Returns a lane's share of a row, in whole vectors."""
    width = 16 // itemsize if aligned else 1
    return ceil_div(E, lanes * width) * width


def _group_lanes(size: int, top: int, lanes: int, values: int, itemsize: int) -> int:
    """Returns the lanes of a group of `size` experts that ranks by its `top` best; 0 if a lane would get several."""
    width = 16 // itemsize
    found = size // width
    power_of_two = size % width == 0 and found & (found - 1) == 0
    return found if top <= 2 and power_of_two and values // width <= found <= lanes else 0


def _sum_row_words(E: int, lanes: int) -> int:
    """Returns the words of a token's row of sums in shared memory: E + 2 columns, rounded up as in router_token.cuh."""
    columns = E + 2
    if lanes == 1:
        return columns | 1
    return (columns + 15) // 32 * 32 + 16 if lanes == 4 else (columns + 3) // 4 * 4


def _router_in_lane(
    L: int, E: int, k: int, *, itemsize: int, aligned: bool, groups: int, top: int, sums: bool, narrow: bool
) -> RouterConfig:
    """Returns the configuration in which one lane chooses and weighs a token's experts.

    With more than 32 experts the lane chooses from what other lanes have listed. Blocks list 32 tokens at a time, and
    with sums or groups several times 32: while one warp chooses, the others go on. With fewer experts, small blocks
    spread over more multiprocessors.
    """
    if E <= 32:
        values, threads = _router_values(E, 1, itemsize, aligned), 64
        return RouterConfig(
            1, values, threads, aligned, values == E, threads, max(1, ceil_div(L, threads)), 0, lane_k=k
        )
    most = 16 if narrow else 32  # values of a lane
    lanes = 4
    while lanes * most < E:
        lanes *= 2
    values, threads = _router_values(E, lanes, itemsize, aligned), 32 * min(lanes, 8)
    tokens = threads // lanes
    per_block, shared_bytes = 32, 32 * ROUTER_LISTED_ROW
    if sums or groups:
        per_block *= ceil_div(ceil_div(max(L, 1), per_block), ROUTER_SUM_BLOCKS)
        shared_bytes += 32 * ROUTER_LISTED_ROW + (4 * tokens * _sum_row_words(E, lanes) if sums else 0)
    blocks, full = max(1, ceil_div(L, per_block)), lanes * values == E
    group_lanes = _group_lanes(E // groups, top, lanes, values, itemsize) if groups and aligned else 0
    return RouterConfig(lanes, values, threads, aligned, full, per_block, blocks, shared_bytes, group_lanes, lane_k=k)


def router_forward(
    L: int,
    E: int,
    k: int | None,
    *,
    itemsize: int,
    aligned: bool,
    selects: bool,
    groups: tuple[int, int],
    sums: bool,
    biased: bool = False,
    cut: bool = False,
    over_row: bool = False,
    narrow: bool = False,
) -> RouterConfig:
    """Returns the configuration of a route's forward.

    aligned: 16-byte loads are possible. k: None if tokens have varying numbers of slots, which are not selected.
    groups: their number, 0 for none, and the number of its best experts that rank a group.
    cut: slots may stay empty. over_row: weights are shares of a sum over all experts. narrow: sums need more registers
    than those of softmax and z do.

    A token of up to 32 experts has a thread; others as many lanes as have a largest key each for k, so that the k-th of
    these bounds the k-th key of all.
    """
    number, top = groups
    plain = not (biased or number or sums)
    in_lane = plain if E <= 32 else E <= 512 and not (number and sums)
    if selects and k and k <= ROUTER_LANE_K and not cut and in_lane:
        vectors = aligned and E % (16 // itemsize) == 0
        # 32 values per lane would leave too few registers here.
        narrow |= biased or bool(number) or (E > 256 and (sums or over_row))
        found = _router_in_lane(
            L, E, k, itemsize=itemsize, aligned=vectors, groups=number, top=top, sums=sums, narrow=narrow
        )
        if found.shared_bytes <= DEFAULT_SHARED_BYTES and bool(number) == bool(found.group_lanes):
            return found
    if E <= 32:
        lanes = 1
    elif E <= 64 and (k or 1) <= 8:
        lanes = 8
    elif E <= 512 and (k or 1) <= 16:
        lanes = 16
    else:
        lanes = 32
    aligned = aligned and E % (16 // itemsize) == 0
    words = 2 * ((k or 0) + (ROUTER_LISTED if lanes > 1 else 0)) if selects else 0
    values = _router_values(E, lanes, itemsize, aligned)
    group_lanes = _group_lanes(E // number, top, lanes, values, itemsize) if number and aligned else 0
    words += (E + 2 * number + 3) // 4 * 4 if number and not group_lanes else 0
    if sums:
        words += _sum_row_words(E, lanes)
    threads = 128 if lanes == 1 else 256
    while threads > 32 and 4 * words * (threads // lanes) + 16 > DEFAULT_SHARED_BYTES:
        threads //= 2
    tokens = threads // lanes
    per_block = tokens * ceil_div(ceil_div(max(L, 1), tokens), ROUTER_SUM_BLOCKS) if sums else tokens
    blocks, shared_bytes = max(1, ceil_div(L, per_block)), 4 * words * tokens + 16
    full = lanes * values == E
    return RouterConfig(lanes, values, threads, aligned, full, per_block, blocks, shared_bytes, group_lanes)


def router_backward(L: int, E: int, *, itemsize: int, aligned: bool) -> RouterConfig:
    aligned = aligned and E % (16 // itemsize) == 0
    lanes = 4
    while lanes < 32 and lanes * 16 < E:
        lanes *= 2
    words, threads = (E + 3) // 4 * 4, 256
    while threads > 32 and 4 * words * (threads // lanes) > DEFAULT_SHARED_BYTES:
        threads //= 2
    tokens = threads // lanes
    values = _router_values(E, lanes, itemsize, aligned)
    blocks, full = max(1, ceil_div(L, tokens)), lanes * values == E
    return RouterConfig(lanes, values, threads, aligned, full, tokens, blocks, 4 * words * tokens)
