"""Dispatch's lists by chunks of tokens: kernels_cu/token_chunks.cu."""

import itertools
from dataclasses import dataclass

from moeblaze_cupy import launch_config, loader
from moeblaze_cupy.arrays import Array, Context
from moeblaze_cupy.ops.grouped_gemm import Index

THREADS = 1024


@dataclass(slots=True)
class TokenChunks:
    """Pointers to the lists of token_chunks.cu, but for buffer_rows (L, k), which holds their memory."""

    row_tiles: int
    part_ends: int
    part_shifts: int
    buffer_rows: Array
    max_row_tiles: int


def token_chunks(context: Context, index: Index, num_chunks: int, chunk_tokens: int) -> TokenChunks:
    """Parts of the experts' rows: those of tokens c * chunk_tokens .. (c + 1) * chunk_tokens for each chunk c."""
    (L, k), E = index.token_index_map.shape, index.num_experts
    sizes = launch_config.chunk_lists(L * k, E, num_chunks)
    starts = (0, *itertools.accumulate(sizes.values()))
    lists = context.empty((starts[-1],), "int32")
    pointers = [lists.ptr + 4 * start for start in starts[:-1]]
    context.launch(
        loader.entry("token_chunks.cu", "token_chunks"),
        (min(loader.device_limits(context.device).multiprocessors, launch_config.ceil_div(L * k, THREADS)),),
        THREADS,
        (
            index.expert_token_indices.ptr,
            index.expert_token_offsets.ptr,
            index.token_index_map.ptr,
            *pointers,
            *(L * k, k, E, num_chunks, chunk_tokens),
        ),
    )
    return TokenChunks(*pointers[:-1], lists.part(starts[-2], (L, k)), sizes["row_tiles"] // 2 - 1)
