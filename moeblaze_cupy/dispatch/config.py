"""Launch geometry of dispatch: a pure function of sizes and device limits, no CuPy, no GPU."""

import functools
from dataclasses import dataclass

from moeblaze_cupy.cuda.launch_config import MAX_EXPERTS, MAX_K, RESERVED_BYTES, TILE_ROWS, DeviceLimits, ceil_div

MIN_COLUMNS = 8  # columns of dispatch_route's matrix: a lane reads 8 counters of 16 bits at a time
MIN_COUNT_COLUMNS = 4  # columns of dispatch_count's matrix: a lane reads 4 counters of 32 bits at a time
HELD_PIECES = 5  # 16-byte pieces of dispatch_route's matrix per thread, which keeps their prefix sums in registers
ALONE_SLOTS = 2048  # slots that one block of dispatch_route takes, and counts, by itself
DISPATCH_THREADS = (512, 1024)  # threads per block of both kernels of dispatch.cu
EXPERT_LISTS = 5  # lists of dispatch_route in shared memory, of E + 1 int32 on average
MIN_GROUPS = 3  # groups of threads that sum the counts over blocks; fewer work as one group, without scratch memory
BOUND_THREADS = 256  # threads per block of bound_slots.cu
SLOTS_PER_BLOCK = 256  # slots of a block of slots.cu, a thread each

CONSTANTS = {
    "bound_slots.cu": {"BOUND_THREADS": BOUND_THREADS},
    "dispatch.cu": {
        "TILE_ROWS": TILE_ROWS,
        "MAX_EXPERTS": MAX_EXPERTS,
        "MAX_K": MAX_K,
        "MAX_BLOCK_THREADS": DISPATCH_THREADS[-1],
        "MIN_COLUMNS": MIN_COLUMNS,
        "MIN_COUNT_COLUMNS": MIN_COUNT_COLUMNS,
        "HELD_PIECES": HELD_PIECES,
        "EXPERT_LISTS": EXPERT_LISTS,
        "MIN_GROUPS": MIN_GROUPS,
    },
}


@dataclass(frozen=True)
class DispatchConfig:
    """Launch geometry of the two kernels of dispatch.cu.

    A block of dispatch_route takes block_slots consecutive slots, in parts of part_slots slots, one part after the
    other. The matrix of counters in its shared memory has a row per expert and a column per counting thread.
    """

    blocks: int  # blocks of dispatch_route
    parts: int  # parts of each of these blocks
    part_slots: int
    counted_together: int  # blocks of dispatch_route whose slots one block of dispatch_count counts, 1 or 2
    count_columns: int  # columns of a matrix of dispatch_count
    count_threads: int  # per block of dispatch_count
    count_shared_bytes: int
    columns: int  # columns of the matrix of dispatch_route, and its threads that count
    route_threads: int  # per block of dispatch_route
    route_shared_bytes: int
    why: tuple[str, ...] = ()  # dispatch_count runs or not; then so many blocks of dispatch_route

    @property
    def block_slots(self) -> int:
        """Returns the slots of a block of dispatch_route. The last block may have fewer."""
        return self.parts * self.part_slots

    @property
    def counts(self) -> bool:
        """Returns True if dispatch_count runs. One block that takes all slots in one part counts them itself."""
        return self.blocks > 1 or self.parts > 1

    @property
    def count_blocks(self) -> int:
        """Returns the number of blocks of dispatch_count."""
        return ceil_div(self.blocks, self.counted_together)

    def workspace_bytes(self, num_experts: int) -> int:
        """Returns the bytes of block_counts: an int32 per block and expert, with E rounded up to a multiple of 4."""
        return 4 * self.count_blocks * self.counted_together * ceil_div(num_experts, 4) * 4 if self.counts else 0


def _power_of_two(most: int, least: int) -> int:
    """Returns the largest power of two up to `most`, or `least` if that is more."""
    return max(least, 1 << max(most, 1).bit_length() - 1)


def _route_shared_bytes(num_experts: int, columns: int, part_slots: int, threads: int, alone: bool) -> int:
    """Returns the dynamic shared memory of dispatch_route; dispatch.cu has the map.

    The lists come first. Then come the matrix and the scratch memory of the sums over blocks, or 4 bytes per slot of a
    part if that is more. At the end are 4 bytes per slot of a part. `alone`: one block takes all slots in one part, and
    sums nothing.
    """
    lists = ceil_div(4 * EXPERT_LISTS * (num_experts + 1), 16) * 16
    matrix = 2 * columns * (num_experts + 1)
    experts = ceil_div(num_experts, 4) * 4
    groups = 4 * (threads - max(columns, 32)) // experts  # groups of threads; a group sums four experts per thread
    sums = 0 if alone or groups < MIN_GROUPS else 8 * groups * experts
    return lists + max(matrix + sums, 4 * part_slots) + 4 * part_slots


@functools.lru_cache(maxsize=1024)
def dispatch(num_slots: int, num_experts: int, limits: DeviceLimits) -> DispatchConfig:
    """Chooses blocks, parts, columns and shared memory of the dispatch kernels.

    Up to ALONE_SLOTS slots there is one block and one launch. Above, there is a block per 768 slots, at most as many
    as are resident at one time. A multiprocessor holds two blocks while matrices of 128 columns take at most a third
    of its shared memory. Else it holds one block of more threads. A block clears and sums its matrix however many
    slots it has, so few slots get few columns.

    Raises ValueError for more experts than the shared memory of a block has room for.
    """
    row_bytes = 2 * (num_experts + 1)
    resident, available = 2, limits.shared_bytes_per_multiprocessor // 2 - RESERVED_BYTES
    if 128 * row_bytes > available // 3:
        resident, available = 1, limits.shared_bytes_per_block
    blocks = 1
    if num_slots > ALONE_SLOTS:
        blocks = min(resident * limits.multiprocessors, ceil_div(num_slots, 768))
    block_slots = max(1, ceil_div(num_slots, blocks))
    few = block_slots <= ALONE_SLOTS
    less, more = DISPATCH_THREADS
    threads = less if resident == 2 or (few and (num_experts + 1) * MIN_COLUMNS // 8 <= HELD_PIECES * less) else more
    worthwhile = max(32, block_slots // 16)
    columns = _power_of_two(min(128, HELD_PIECES * threads * 8 // (num_experts + 1), worthwhile), MIN_COLUMNS)

    def fits(slots_per_column: int, alone: bool) -> bool:
        part_slots = columns * slots_per_column
        return part_slots < 65536 and _route_shared_bytes(num_experts, columns, part_slots, threads, alone) <= available

    def slots_per_column(slots: int) -> int:
        """Returns the slots of each column in a part of that many slots, rounded up to 2 more than a multiple of 4."""
        return ceil_div(max(ceil_div(slots, columns) - 2, 0), 4) * 4 + 2

    alone = blocks == 1 and fits(slots_per_column(block_slots), True)
    while columns > MIN_COLUMNS and not fits(2, alone):
        columns //= 2
    if not fits(2, alone):
        raise ValueError(
            f"dispatch: num_experts: expected few enough for {limits.shared_bytes_per_block} bytes of shared memory "
            f"per block (20 and {MIN_COLUMNS} counters of 2 per expert), got {num_experts}"
        )
    most, too_many = 0, 65536 // (4 * columns) + 1  # 4 * most + 2 slots per column fit
    while most + 1 < too_many:
        middle = (most + too_many) // 2
        most, too_many = (middle, too_many) if fits(4 * middle + 2, alone) else (most, middle)
    parts = ceil_div(block_slots, columns * (4 * most + 2))
    part_slots = columns * slots_per_column(ceil_div(block_slots, parts))
    blocks = max(1, ceil_div(num_slots, parts * part_slots))
    counted_together = 2 if resident == 2 or (few and num_experts <= 1024) else 1
    count_matrices = 4 * counted_together * (num_experts + 1)  # bytes per column
    count_columns = _power_of_two(min(32, limits.shared_bytes_per_block // count_matrices), MIN_COUNT_COLUMNS)
    if blocks == parts == 1:
        one = "slot" if num_slots == 1 else "slots"
        why: tuple[str, ...] = (
            f"one launch: one CTA takes all {num_slots} {one} (at most {ALONE_SLOTS}) and counts them itself",
        )
    else:
        reason = f"the counters of {num_experts} experts leave room for {part_slots} slots at a time"
        if blocks > 1:
            reason = f"{num_slots} slots are more than one CTA takes by itself"
        why = (
            f"two launches: {reason}, so dispatch_count counts per CTA, and dispatch_route ranks",
            f"dispatch_route has {blocks} CTAs of {parts * part_slots} slots"
            f"{f' in {parts} parts' if parts > 1 else ''}, with {columns} columns of counters",
        )
    return DispatchConfig(
        blocks=blocks,
        parts=parts,
        part_slots=part_slots,
        counted_together=counted_together,
        count_columns=count_columns,
        count_threads=less if few else more,
        count_shared_bytes=count_matrices * count_columns,
        columns=columns,
        route_threads=threads,
        route_shared_bytes=_route_shared_bytes(num_experts, columns, part_slots, threads, alone),
        why=why,
    )
