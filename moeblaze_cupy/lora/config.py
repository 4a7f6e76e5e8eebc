"""Launch geometry of low-rank factors: pure functions of shapes and device limits; see `launch_config`."""

from moeblaze_cupy.cuda.launch_config import TILE_ROWS, DeviceLimits, ceil_div

LORA_PACK_THREADS = 256  # threads per block of lora_pack.cu and lora_sums.cu
LORA_PACK_TILE = 16 * LORA_PACK_THREADS  # elements per block of lora_pack.cu
LORA_SUMS_TILE = 8 * LORA_PACK_THREADS  # elements per block of lora_sums.cu
LORA_THREADS = 128  # threads per block of lora_rows.cu and lora_gram.cu
LORA_STAGES = 3  # more would leave room for fewer blocks
LORA_ROWS = TILE_ROWS // 2  # rows per block of lora_rows.cu
LORA_COLUMNS = 128  # columns per block of lora_gram.cu

LINE_BYTES = 128  # of a row in shared memory
MIN_CHUNK, MAX_CHUNK = 8, 12  # rows of a chunk, as powers of two
CHUNK_BLOCKS = 8  # blocks of lora_gram.cu per multiprocessor, for a last wave that counts little

CONSTANTS = {
    "lora_pack.cu": {"THREADS": LORA_PACK_THREADS, "TILE": LORA_PACK_TILE},
    "lora_rows.cu": {"THREADS": LORA_THREADS, "ROWS": LORA_ROWS, "STAGES": LORA_STAGES},
    "lora_gram.cu": {"THREADS": LORA_THREADS, "STAGES": LORA_STAGES},
    "lora_sums.cu": {"THREADS": LORA_PACK_THREADS, "TILE": LORA_SUMS_TILE},
}


def padded(rank: int) -> int:
    """The columns of rows of this rank, and the ranks of a factor, in memory: whole steps of mma.m16n8k16."""
    return ceil_div(rank, 16) * 16


def block_ranks(ranks: int, most: int) -> int:
    """Ranks of a block: 16, 32, 64, or more."""
    block = 16
    while block < min(ranks, most):
        block *= 2
    return block


def tile(columns: int, most: int, elements: int) -> tuple[int, int, tuple[int, int]]:
    """Columns and lines of a tile of lora_tile.cuh with so many elements, and the shifts of both there."""
    block = block_ranks(columns, most)
    lines = elements // block
    return block, lines, ((block // 8).bit_length() - 1, (lines // 8).bit_length() - 1)


def rows_shared_bytes(columns: int) -> int:
    return LORA_STAGES * (LORA_ROWS + columns) * LINE_BYTES


def gram_shared_bytes(ranks: int) -> int:
    return LORA_STAGES * (LORA_COLUMNS + ranks) * LINE_BYTES


def chunk_shift(num_rows: int, columns: int, ranks: int, limits: DeviceLimits) -> tuple[int, str]:
    """The rows of a chunk of lora_gram.cu, as a power of two, and why.

    Large chunks write few partial sums, small ones keep all multiprocessors busy.
    """
    wanted = CHUNK_BLOCKS * limits.multiprocessors
    blocks = ceil_div(columns, LORA_COLUMNS) * ceil_div(ranks, 64)
    shift = MAX_CHUNK
    while shift > MIN_CHUNK and ceil_div(num_rows, 1 << shift) * blocks < wanted:
        shift -= 1
    number = ceil_div(num_rows, 1 << shift) * blocks
    most = "at least" if number >= wanted else "as many as there are, of"
    return shift, f"chunks of {1 << shift} rows: {number} blocks, {most} {wanted}, {CHUNK_BLOCKS} per multiprocessor"
