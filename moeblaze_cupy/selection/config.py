"""Launch geometry of selections and counts, and room for pairs: pure functions of shapes and device limits."""

from moeblaze_cupy.cuda import launch_config

SELECT_THREADS = 1024  # threads per block of selections over many tokens
SPLIT_SHARED_BYTES = 96 * 1024  # columns_split: 383 candidates of 8 bytes for each of 32 columns
FINISH_THREADS = 1024  # threads per block that selects among the candidates of a column
FINISH_SHARED_BYTES = 34 * 1024  # memory of such a block: more than 4,000 candidates of 8 bytes, and counters
SELECT_BITS = 10  # the widest digit of a radix select
SELECT_SHARED_BYTES = 128 * 1024  # counters per block, if a block may have so many
SELECT_HISTOGRAM_BYTES = 64 * 1024 * 1024  # a digit's counters of all columns
PART_COUNTS = 2**16 - 1  # greatest count of a block, which is in 16 bits
COUNT_THREADS = 512  # threads per block of tokens_per_expert and quantile_histogram
PAIRS_THREADS = 512  # threads per block of the lists of pairs, a word of 32 pairs each
PAIRS_BLOCKS = 1024
MAX_TILE = 2**30  # greatest tile of token rounding
MAX_BINS = 8192  # greatest number of quantile_histogram's bins: a block's shared memory has room for one expert's

CONSTANTS = {
    "selection.cu": {
        "SELECT_THREADS": SELECT_THREADS,
        "SELECT_BITS": SELECT_BITS,
        "SPLIT_SHARED_BYTES": SPLIT_SHARED_BYTES,
        "PAIRS_BLOCKS": PAIRS_BLOCKS,
        "FINISH_THREADS": FINISH_THREADS,
        "FINISH_SHARED_BYTES": FINISH_SHARED_BYTES,
        "MAX_EXPERTS": launch_config.MAX_EXPERTS,
        "DEFAULT_SHARED_BYTES": launch_config.DEFAULT_SHARED_BYTES,
    },
    "pairs.cu": {"PAIRS_THREADS": PAIRS_THREADS, "PAIRS_BLOCKS": PAIRS_BLOCKS},
    "capacity.cu": {
        "SELECT_THREADS": SELECT_THREADS,
        "SELECT_BITS": SELECT_BITS,
        "FINISH_THREADS": FINISH_THREADS,
        "FINISH_SHARED_BYTES": FINISH_SHARED_BYTES,
    },
    "balance.cu": {"COUNT_THREADS": COUNT_THREADS},
}


def parts_of_sequence(num_sequences: int, longest: int, blocks: int, fewest_tokens: int, most_tokens: int) -> int:
    """Returns the number of parts, a block each, into which the tokens of each sequence are divided.

    longest: tokens that a sequence may have. blocks: for all sequences together at most, if their parts then have
    `fewest_tokens` or more, and `most_tokens` at most.
    """
    wanted = min(blocks // num_sequences, launch_config.ceil_div(longest, fewest_tokens))
    return max(1, wanted, launch_config.ceil_div(longest, most_tokens))


def pairs_block_shift(num_tokens: int, row_words: int) -> int:
    """Returns log2 of the tokens whose pairs a block lists: a word or more per thread, at most PAIRS_BLOCKS blocks."""
    fewest = launch_config.ceil_div(PAIRS_THREADS, row_words)
    tokens = max(fewest, launch_config.ceil_div(num_tokens, PAIRS_BLOCKS))
    return (tokens - 1).bit_length()


def digit_bits(block_bytes: int, num_columns: int, limits: launch_config.DeviceLimits) -> int:
    """Returns the bits of the widest leading digit that a selection counts.

    block_bytes: bytes of a block's counters in shared memory per value of a digit. num_columns: columns of all 32-bit
    counters in global memory.
    """
    shared = min(SELECT_SHARED_BYTES, limits.shared_bytes_per_block - launch_config.RESERVED_BYTES)
    width, memory = SELECT_BITS, SELECT_HISTOGRAM_BYTES
    while width > 1 and (block_bytes << width > shared or 4 * num_columns << width > memory):
        width -= 1
    return width


def listed_candidates(num_tokens: int, num_experts: int) -> int:
    """Returns the number of 8-byte candidates that columns_split lists: an eighth of all scores, a byte per score.

    If scores differ, fewer of them have the digit in which the selection ends. Columns without room are read again,
    through a bit per score.
    """
    return min(launch_config.ceil_div(num_tokens * num_experts, 8), 2**31 - 1)


def ranking_warps(num_experts: int, limits: launch_config.DeviceLimits) -> int:
    """Returns the warps of capacity_mark that rank slots, each with a counter per expert in shared memory."""
    available = min(SELECT_SHARED_BYTES, limits.shared_bytes_per_block - launch_config.RESERVED_BYTES)
    return max(1, min(SELECT_THREADS // 32, available // (4 * num_experts) - 2))


def counts_choices(num_counts: int, num_parts: int, limits: launch_config.DeviceLimits) -> bool:
    """Returns whether slots are counted per choice and expert, num_counts in each part, instead of compared by keys."""
    available = min(SELECT_SHARED_BYTES, limits.shared_bytes_per_block - launch_config.RESERVED_BYTES)
    return 4 * num_counts <= available and 4 * num_counts * num_parts <= SELECT_HISTOGRAM_BYTES


def quantile_columns(bins: int) -> int:
    """Returns the experts of a block of quantile_counts: a power of two up to 32 whose counters fit."""
    return min(32, 1 << (launch_config.DEFAULT_SHARED_BYTES // (4 * bins)).bit_length() - 1)
