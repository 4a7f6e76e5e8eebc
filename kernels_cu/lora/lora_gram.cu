// Parts of the gradients of low-rank factors, every tier: fp32 sums of row^T u over chunks of each expert's rows, (columns, rank).
// lora_sums.cu adds the parts of an expert in order, so that two runs give the same bits.
//
//   ENTRY      rows                         u
//   lora_da1   x, gathered by token         v1
//   lora_db1   first_layer_grad             u1
//   lora_da2   weighted_y_swi               v2
//   lora_db2   grad_out, gathered           weighted u2
//
// A chunk is 2^chunk_shift rows of an expert, or those that are left. Chunk c of expert e has the number
// (first row of e >> chunk_shift) + e + c, which no other has; numbers in between have no chunk.
//
// Options, each a macro: GATHER, rows are those of expert_token_indices; RANKS, 16, 32 or 64 ranks of a block; ALIGNED, rows
// start at multiples of 16 bytes and have a multiple of 8 elements. u is aligned always.
//
// Launch: grid (numbers of chunks, columns / TILE rounded up, ranks / RANKS rounded up), THREADS threads, STAGES * STAGE_BYTES
// bytes of dynamic shared memory. Blocks that run at one time read the same columns of the rows of many experts, which stay in
// the L2 cache while each of a token's experts reads them. A warp has 32 of the block's TILE columns.
//
// Dynamic shared memory, per stage: lines of KROWS rows for each LINE columns of the tile, then KROWS lines of u.
#include "lora_core.cuh"

struct LoraGramParams {
    const element* rows;              // (L, ld) element, in, with GATHER; else (R, ld)
    const element* u;                 // (R, ranks) element, in
    const int* expert_token_indices;  // (R,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in
    float* parts;                     // (numbers of chunks, columns, ranks) fp32, out
    int64 ld;                         // elements from row to row of rows
    int columns, ranks;               // ranks: a multiple of 16
    int num_experts, chunk_shift;
};

constexpr int TILE = 128, KROWS = LINE, SLABS = TILE / LINE;
constexpr int U_LINES = SLABS * KROWS * LINE_BYTES;  // where lines of u begin in a stage
constexpr int U_LINE_BYTES = RANKS * sizeof(element), U_LINE_CHUNKS = U_LINE_BYTES / 16;
constexpr int STAGE_BYTES = U_LINES + KROWS * U_LINE_BYTES, ROWS_PER_THREAD = KROWS / LINE_STEP;
constexpr int U_CHUNKS = KROWS * U_LINE_CHUNKS / THREADS;  // of a thread
constexpr int M_TILES = 2, FRAGMENTS = RANKS / 8;          // of 16 columns, and of 8 ranks, of a warp
static_assert(THREADS == TILE, "a warp has 32 columns");
static_assert(U_CHUNKS * THREADS == KROWS * U_LINE_CHUNKS, "whole lines of u");
static_assert(STAGES >= 2, "one stage is filled while another is read");

// Where 16-byte chunk `chunk` of line `line` of u is in a stage. Eight lines at one chunk are in different banks.
__device__ __forceinline__ unsigned u_place(int line, int chunk) {
    constexpr int SHIFT = U_LINE_CHUNKS >= 8 ? 0 : U_LINE_CHUNKS == 4 ? 1 : 2, MASK = U_LINE_CHUNKS >= 8 ? 7 : U_LINE_CHUNKS - 1;
    return U_LINES + line * U_LINE_BYTES + (chunk ^ (line >> SHIFT & MASK)) * 16;
}

__device__ __forceinline__ void multiply_mma(float (&acc)[M_TILES][FRAGMENTS][4], unsigned stage) {
    const int lane = threadIdx.x % 32, r = lane & 7, low = lane >> 3 & 1, high = lane >> 4, m0 = threadIdx.x / 32 * 32;
    const unsigned at = shared_address(dynamic_shared) + stage;
    const unsigned a_first = at + (high * 8 + r) * LINE_BYTES + (low ^ r) * 16, b_first = at + u_place(low * 8 + r, high);
#pragma unroll
    for (int kk = 0; kk < KROWS / 16; ++kk) {
        unsigned a[M_TILES][4];
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
            const int m = m0 + 16 * i;
            ldmatrix_x4_trans(a[i], (a_first ^ m % LINE * 2) + m / LINE * (KROWS * LINE_BYTES) + kk * 16 * LINE_BYTES);
        }
#pragma unroll
        for (int q = 0; q < RANKS / 16; ++q) {
            unsigned b[4];
            ldmatrix_x4_trans(b, (b_first ^ q * 32) + kk * 16 * U_LINE_BYTES);
#pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                MMA(acc[i][2 * q], a[i], b[0], b[1]);
                MMA(acc[i][2 * q + 1], a[i], b[2], b[3]);
            }
        }
    }
}

__device__ __forceinline__ void multiply_fma(float (&acc)[M_TILES][FRAGMENTS][4], unsigned stage) {
    const int lane = threadIdx.x % 32, m0 = threadIdx.x / 32 * 32 + lane / 4, n0 = (lane & 3) * 2;
    for (int k = 0; k < KROWS; ++k) {
        float a[M_TILES][2];
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; ++i) {
            const int m = m0 + 8 * i;
            a[i / 2][i % 2] = shared_float(stage, m / LINE * KROWS + k, m % LINE);
        }
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j) {
            const float2 b = *reinterpret_cast<const float2*>(dynamic_shared + stage + u_place(k, 2 * j + n0 / 4) + n0 % 4 * 4);
#pragma unroll
            for (int i = 0; i < 2 * M_TILES; ++i) {
                acc[i / 2][j][i % 2 * 2] = fmaf(a[i / 2][i % 2], b.x, acc[i / 2][j][i % 2 * 2]);
                acc[i / 2][j][i % 2 * 2 + 1] = fmaf(a[i / 2][i % 2], b.y, acc[i / 2][j][i % 2 * 2 + 1]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const LoraGramParams p) {
    __shared__ int first_row, end_row;
    const int number = blockIdx.x;
    if (threadIdx.x == 0) first_row = end_row = 0;
    __syncthreads();
    for (int expert = threadIdx.x; expert < p.num_experts; expert += THREADS) {  // one expert at most has the number
        const int begin = p.expert_token_offsets[expert], end = p.expert_token_offsets[expert + 1];
        const int64 first = begin + int64(number - (begin >> p.chunk_shift) - expert) * (1 << p.chunk_shift);
        if (first >= begin && first < end) first_row = int(first), end_row = min(int(first) + (1 << p.chunk_shift), end);
    }
    __syncthreads();
    const int first = first_row, end = end_row;
    if (first == end) return;
    const int m0 = blockIdx.y * TILE, n0 = blockIdx.z * RANKS, line = threadIdx.x / 8, steps = (end - first + KROWS - 1) / KROWS;

    int64 tokens[ROWS_PER_THREAD];  // of the next copies
    auto load_tokens = [&](int step) {
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i) {
            const int row = first + step * KROWS + line + LINE_STEP * i;
            tokens[i] = row >= end ? 0 : GATHER ? p.expert_token_indices[row] : row;
        }
    };
    auto copy = [&](int step) {
        const unsigned stage = step % STAGES * STAGE_BYTES;
        const int row0 = first + step * KROWS;
#pragma unroll
        for (int i = 0; i < ROWS_PER_THREAD; ++i) {
            const int within = line + LINE_STEP * i;
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                const int column = m0 + slab * LINE + chunk_column(), valid = row0 + within < end ? p.columns - column : 0;
                copy_chunk<ALIGNED>(chunk_place(stage, slab * KROWS + within),
                                    valid > 0 ? p.rows + tokens[i] * p.ld + column : p.rows, valid);
            }
        }
#pragma unroll
        for (int i = 0; i < U_CHUNKS; ++i) {
            const int chunk = threadIdx.x + THREADS * i, within = chunk / U_LINE_CHUNKS, at = chunk % U_LINE_CHUNKS;
            const int rank = n0 + at * VECTOR, row = row0 + within;
            const bool exists = row < end && rank < p.ranks;
            copy_chunk<true>(stage + u_place(within, at), exists ? p.u + int64(row) * p.ranks + rank : p.u, exists);
        }
        load_tokens(step + 1);
    };
    float acc[M_TILES][FRAGMENTS][4] = {};
    load_tokens(0);
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) copy(s);
        cp_async_commit();
    }
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) copy(step + STAGES - 1);
        cp_async_commit();
        if constexpr (FP32)
            multiply_fma(acc, step % STAGES * STAGE_BYTES);
        else
            multiply_mma(acc, step % STAGES * STAGE_BYTES);
    }
    cp_async_wait<0>();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        const int column = m0 + threadIdx.x / 32 * 32 + 8 * i + lane / 4;
        if (column >= p.columns) continue;
        float* const to = p.parts + (int64(number) * p.columns + column) * p.ranks + n0 + 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j)
            if (n0 + 8 * j < p.ranks) store_pair(to + 8 * j, acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
    }
}
