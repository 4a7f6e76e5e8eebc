// Dispatch's lists once more, by chunks of consecutive tokens: of each expert's rows, which lie in the order of their
// tokens, those of chunk 0 first, then those of chunk 1. grouped_panels_sm90.cu goes through the rows in this order where
// the expert outputs of two chunks are all that is to be in memory (paper sections 2.3 and 3.2: no routed buffer).
//
//   expert_token_indices  (L*k,)     int32, in    token of each routed row
//   expert_token_offsets  (E+1,)     int32, in
//   token_index_map       (L*k,)     int32, in    row of each slot, or -1
//   row_tiles             (T+1, 2)   int32, out   [0] = (count, 128), then (c*E + e, first row), by chunk and expert
//   part_ends             (C*E+1,)   int32, out   [c*E + e + 1]: end of the rows of expert e in chunk c
//   part_shifts           (C*E,)     int32, out   row less its place in the buffer
//   buffer_rows           (L*k,)     int32, out   place of each slot's row in a buffer of two chunks, or -1
//
// num_slots = L*k; chunk_tokens per chunk, the last with what is left; C = num_chunks, E = num_experts, C*E <= 1024.
// Chunk c has the rows of its tokens alone, at most chunk_tokens * k: the buffer's half c % 2 holds them.
//
// Launch: 1024 threads, any number of blocks. Every block finds out where the parts start, a thread each by bisection,
// and places its share of the slots, whose expert it finds likewise; block 0 writes the lists.
#include "common.cuh"

constexpr int TILE_ROWS = 128, MAX_PARTS = 1024;

struct Counts {
    int rows, tiles;
};

// Of the threads before this one, in a block of 1024.
__device__ __forceinline__ Counts sum_before(Counts mine, Counts (&warps)[32], Counts& total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    auto scan = [&](Counts v) {
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int rows = __shfl_up_sync(0xffffffffu, v.rows, step), tiles = __shfl_up_sync(0xffffffffu, v.tiles, step);
            if (lane >= step) v.rows += rows, v.tiles += tiles;
        }
        return v;
    };
    const Counts upto = scan(mine);
    if (lane == 31) warps[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        const Counts v = warps[lane], all = scan(v);
        __syncwarp();
        warps[lane] = {all.rows - v.rows, all.tiles - v.tiles};
        if (lane == 31) total = all;
    }
    __syncthreads();
    return {warps[warp].rows + upto.rows - mine.rows, warps[warp].tiles + upto.tiles - mine.tiles};
}

extern "C" __global__ void __launch_bounds__(1024)
    token_chunks(const int* expert_token_indices, const int* expert_token_offsets, const int* token_index_map, int* row_tiles,
                 int* part_ends, int* part_shifts, int* buffer_rows, int64 num_slots, int64 k, int64 num_experts,
                 int64 num_chunks, int64 chunk_tokens) {
    __shared__ Counts warps[32], total;
    __shared__ int starts[MAX_PARTS], rows_before[MAX_PARTS], shifts[MAX_PARTS];
    const int E = static_cast<int>(num_experts), parts = static_cast<int>(num_chunks) * E;
    const int part = threadIdx.x, chunk = part / E, expert = part % E;
    if (part < parts) {
        int first = expert_token_offsets[expert], last = expert_token_offsets[expert + 1];
        while (first < last) {
            const int middle = first + (last - first) / 2;
            if (expert_token_indices[middle] < chunk * chunk_tokens)
                first = middle + 1;
            else
                last = middle;
        }
        starts[part] = first;
    }
    __syncthreads();
    const int start = part < parts ? starts[part] : 0;
    const int end = part >= parts ? 0 : part + E < parts ? starts[part + E] : expert_token_offsets[expert + 1];
    const Counts before = sum_before({end - start, (end - start + TILE_ROWS - 1) / TILE_ROWS}, warps, total);
    rows_before[part] = before.rows;
    __syncthreads();
    if (part < parts) {
        const int place = before.rows - rows_before[chunk * E] + static_cast<int>((chunk & 1) * chunk_tokens * k);
        shifts[part] = start - place;
        if (blockIdx.x == 0) {
            part_ends[part + 1] = end;
            part_shifts[part] = start - place;
            for (int tile = 0; start + tile * TILE_ROWS < end; ++tile) {
                row_tiles[2 * (1 + before.tiles + tile)] = part;
                row_tiles[2 * (1 + before.tiles + tile) + 1] = start + tile * TILE_ROWS;
            }
            if (part == 0) row_tiles[0] = total.tiles, row_tiles[1] = TILE_ROWS, part_ends[0] = 0;
        }
    }
    __syncthreads();
    const unsigned slots_per_chunk = static_cast<unsigned>(chunk_tokens * k);
    for (int64 slot = blockIdx.x * 1024LL + threadIdx.x; slot < num_slots; slot += gridDim.x * 1024LL) {
        const int row = token_index_map[slot], first_part = static_cast<unsigned>(slot) / slots_per_chunk * E;
        int expert = 0;  // the last whose part starts at the row or before
        for (int step = 512; step > 0; step /= 2)
            if (expert + step < E && starts[first_part + expert + step] <= row) expert += step;
        buffer_rows[slot] = row < 0 ? -1 : row - shifts[first_part + expert];
    }
}
