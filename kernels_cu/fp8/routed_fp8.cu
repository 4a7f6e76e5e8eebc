// The routed operand of a weight gradient in e4m3 (grouped_wgrad_fp8_sm90.cu): rows in 16 bits, times the scale of the gathered
// operand's row of the same token, become e4m3 that is contiguous along the rows. Each expert and group of TILE columns of a half
// has one scale, from the largest magnitude that down_bwd has found.
//
// A block of THREADS threads has TILE rows of one expert and TILE columns of a half, or fewer at its end. Grid: groups * (R / TILE
// + E). It reads the tile and writes it over its own memory: line c, TILE bytes, is column c, and begins where the tile's row c
// does. If the expert has fewer than TILE rows left, they would have no room for the lines, which then go to `rest`.
#include "byte_tile.cuh"
#include "fp8.cuh"

template <class T>
struct RoutedParams {
    T* rows;                          // (R, halves * columns) T, in and out
    const float* token_scales;        // (L,) fp32, in: the scale of each token's row of the gathered operand
    const int* expert_token_indices;  // (R,) int32, in
    const int* expert_token_offsets;  // (E+1,) int32, in
    const unsigned* amax;             // (E, groups) bits of fp32, in: largest magnitudes of rows times token_scales
    unsigned char* rest;              // (E, halves * columns, TILE) e4m3, out: of each expert's last rows, if they are no tile
    int columns;                      // of a half, a multiple of 64
    int halves, groups, num_experts;  // groups: those of all halves
};

// The block's rows and columns. All threads of the block make it; `expert` is -1 if there are no rows.
struct RoutedTile {
    int expert, block, group, first_row, end_row, column, columns;

    template <class T>
    __device__ __forceinline__ explicit RoutedTile(const RoutedParams<T>& p)
        : block(blockIdx.x / p.groups), group(blockIdx.x % p.groups) {
        __shared__ int found[3];
        if (threadIdx.x == 0) found[0] = -1;
        __syncthreads();
        for (int e = threadIdx.x; e < p.num_experts; e += THREADS) {
            const int from = p.expert_token_offsets[e], to = p.expert_token_offsets[e + 1], before = block - (from / TILE + e);
            if (before >= 0 && from + before * TILE < to) found[0] = e, found[1] = from + before * TILE, found[2] = to;
        }
        __syncthreads();
        expert = found[0], first_row = found[1], end_row = found[2];
        const int of_half = p.groups / p.halves, half = group / of_half, inside = group % of_half * TILE;
        column = half * p.columns + inside, columns = p.columns - inside;
    }

    // Loads the thread's elements, each row times its token's scale; zeros past the last row and column.
    template <class T>
    __device__ __forceinline__ void load(float (&v)[BLOCKS][BLOCK_LINES][8], const RoutedParams<T>& p) const {
        Row8<T> held[BLOCKS][BLOCK_LINES];
        float scales[BLOCKS][BLOCK_LINES];
        const int64 ld = int64(p.halves) * p.columns;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < BLOCK_LINES; ++j) {
                const int row = first_row + block_line(i) + j;
                const bool inside = row < end_row;
                held[i][j].template load<true>(p.rows + row * ld + column + block_column(),
                                               inside ? columns - block_column() : 0);
                scales[i][j] = inside ? p.token_scales[p.expert_token_indices[row]] : 0.f;
            }
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < BLOCK_LINES; ++j) {
                held[i][j].unpack(v[i][j]);
#pragma unroll
                for (int c = 0; c < 8; ++c) v[i][j][c] *= scales[i][j];
            }
    }
};

template <class T>
__device__ void transpose_routed(const RoutedParams<T>& p) {
    __shared__ __align__(16) unsigned words[TILE * TILE / 4];
    const RoutedTile tile(p);
    if (tile.expert < 0) return;
    float v[BLOCKS][BLOCK_LINES][8];
    tile.load(v, p);
    const float amax = __uint_as_float(p.amax[tile.expert * p.groups + tile.group]);
    const float factor = amax >= MIN_AMAX ? scaling_of(amax).factor : 0.f;  // smaller ones may be of numbers that underflowed
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        unsigned low[BLOCK_LINES], high[BLOCK_LINES];
#pragma unroll
        for (int j = 0; j < BLOCK_LINES; ++j) {
            const uint2 packed = pack_e4m3(v[i][j], factor, factor);
            low[j] = packed.x, high[j] = packed.y;
        }
        put_transposed(words, i, low, high);
    }
    __syncthreads();  // all threads have read the tile
    const int64 ld = int64(p.halves) * p.columns;
    const bool whole = tile.first_row + TILE <= tile.end_row;
    unsigned char* const to = whole ? reinterpret_cast<unsigned char*>(p.rows + tile.first_row * ld + tile.column)
                                    : p.rest + (tile.expert * ld + tile.column) * TILE;
    const int64 line_bytes = whole ? ld * int(sizeof(T)) : TILE;
#pragma unroll
    for (int i = 0; i < TILE * TILE / 8 / THREADS; ++i) {
        const int column = (i * THREADS + threadIdx.x) / 16, line = threadIdx.x % 16 * 8;
        const uint2 packed = *reinterpret_cast<const uint2*>(words + byte_tile_word(column, line / 4));
        if (column < tile.columns) *reinterpret_cast<uint2*>(to + column * line_bytes + line) = packed;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose_routed_bfloat16(const RoutedParams<bf16> p) {
    transpose_routed(p);
}
