// The products of rows with a first low-rank factor, every tier: for each routed row of each expert
// out = scale * row * factor^T, (R, rank). The products of grouped_gemm_*.cu with LORA read it as one more segment of what they
// sum over. Memory bounds this kernel: it reads each row once, for up to COLUMNS ranks.
//
//   ENTRY     rows                         factor    out
//   lora_u1   x, gathered by token         a1        u1
//   lora_u2   y_swi                        a2        u2
//   lora_v2   grad_out, gathered           b2^T      v2; also weighted = weights * u2
//   lora_v1   first_layer_grad             b1^T      v1
//
// Options, each a macro: GATHER, rows are those of expert_token_indices; COLUMNS, 16, 32, 64 or 128 ranks of a block; ALIGNED,
// rows start at multiples of 16 bytes and have a multiple of 8 elements. The factor is aligned always.
//
// Launch: grid (2 blocks per row tile at most, ranks / COLUMNS rounded up), THREADS threads, STAGES * STAGE_BYTES bytes of
// dynamic shared memory. A block has ROWS rows, half of a row tile, and a warp 16 of them. A row's sum has one order, whatever
// the other rows are.
//
// Dynamic shared memory, per stage: ROWS lines of rows, then COLUMNS lines of the factor, of LINE elements along the depth.
#include "lora_core.cuh"

struct LoraRowsParams {
    const element* rows;              // (L, ld) element, in, with GATHER; else (R, ld)
    const element* factor;            // (E, ranks, factor_ld) element, in: zeros past the rank and past the depth
    const int* expert_token_indices;  // (R,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in
    const int* row_tiles;             // (T+1, 2) int32, in: [0] = (number of row tiles, 2 ROWS), then (expert, first row) of each
    element* out;                     // (R, ranks) element, out
    const element* other;             // (R, ranks) element, in; null: no `weighted`
    const float* weights;             // (R,) fp32, in: the router weight of each row; null: 1
    element* weighted;                // (R, ranks) element, out: weights * other
    int64 ld;                         // elements from row to row of rows
    int depth, ranks, factor_ld;      // ranks: a multiple of 16
    float scale;
};

constexpr int BK = LINE, B_LINES = COLUMNS, STAGE_BYTES = (ROWS + B_LINES) * LINE_BYTES, FRAGMENTS = COLUMNS / 8;
static_assert(ROWS == THREADS / 2 && ROWS % LINE_STEP == 0, "a warp has 16 rows");
static_assert(COLUMNS % LINE_STEP == 0 && COLUMNS % 16 == 0, "pairs of 8 columns");
static_assert(STAGES >= 2, "one stage is filled while another is read");

__device__ __forceinline__ void multiply_mma(float (&acc)[FRAGMENTS][4], unsigned stage) {
    const int lane = threadIdx.x % 32, r = lane & 7, low = lane >> 3 & 1, high = lane >> 4, warp = threadIdx.x / 32;
    const unsigned at = shared_address(dynamic_shared) + stage;
    const unsigned a_first = at + (warp * 16 + low * 8 + r) * LINE_BYTES + (high ^ r) * 16;
    const unsigned b_first = at + ROWS * LINE_BYTES + (high * 8 + r) * LINE_BYTES + (low ^ r) * 16;
#pragma unroll
    for (int kk = 0; kk < BK / 16; ++kk) {
        unsigned a[4];
        ldmatrix_x4(a, a_first ^ kk * 32);
#pragma unroll
        for (int q = 0; q < COLUMNS / 16; ++q) {
            unsigned b[4];
            ldmatrix_x4(b, (b_first ^ kk * 32) + q * 16 * LINE_BYTES);
            MMA(acc[2 * q], a, b[0], b[1]);
            MMA(acc[2 * q + 1], a, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void multiply_fma(float (&acc)[FRAGMENTS][4], unsigned stage) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = (lane & 3) * 2;
#pragma unroll 2
    for (int k = 0; k < BK; ++k) {
        const float a[2] = {shared_float(stage, row, k), shared_float(stage, row + 8, k)};
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j)
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const float b = shared_float(stage + ROWS * LINE_BYTES, 8 * j + column + s, k);
                acc[j][s] = fmaf(a[0], b, acc[j][s]);
                acc[j][2 + s] = fmaf(a[1], b, acc[j][2 + s]);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const LoraRowsParams p) {
    const int2* const list = reinterpret_cast<const int2*>(p.row_tiles);
    if (blockIdx.x / 2 >= list[0].x) return;
    const int2 tile = list[1 + blockIdx.x / 2];
    const int row0 = tile.y + blockIdx.x % 2 * ROWS, rows = min(ROWS, p.expert_token_offsets[tile.x + 1] - row0);
    if (rows <= 0) return;
    const int n0 = blockIdx.y * COLUMNS, steps = (p.depth + BK - 1) / BK, line = threadIdx.x / 8;
    const element* from[ROWS / LINE_STEP];
#pragma unroll
    for (int i = 0; i < ROWS / LINE_STEP; ++i) {  // lines past the last row repeat it; their results are not stored
        const int row = row0 + min(line + LINE_STEP * i, rows - 1);
        from[i] = p.rows + (GATHER ? p.expert_token_indices[row] : row) * p.ld + chunk_column();
    }
    const element* const factor = p.factor + (int64(tile.x) * p.ranks + n0 + line) * p.factor_ld + chunk_column();

    auto copy = [&](int step) {
        const unsigned stage = step % STAGES * STAGE_BYTES;
        const int k0 = step * BK, k = k0 + chunk_column();
#pragma unroll
        for (int i = 0; i < ROWS / LINE_STEP; ++i)
            copy_chunk<ALIGNED>(chunk_place(stage, line + LINE_STEP * i), from[i] + k0, p.depth - k);
#pragma unroll
        for (int i = 0; i < COLUMNS / LINE_STEP; ++i) {
            const int n = line + LINE_STEP * i;
            const bool exists = n0 + n < p.ranks && k < p.factor_ld;
            copy_chunk<true>(chunk_place(stage + ROWS * LINE_BYTES, n),
                             exists ? factor + int64(LINE_STEP * i) * p.factor_ld + k0 : p.factor, exists);
        }
    };
    float acc[FRAGMENTS][4] = {};
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
    for (int s = 0; s < 2; ++s) {
        const int row = threadIdx.x / 32 * 16 + lane / 4 + 8 * s;
        if (row >= rows) continue;
        element* const to = p.out + int64(row0 + row) * p.ranks + n0 + 2 * (lane & 3);
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j)
            if (n0 + 8 * j < p.ranks) store_pair(to + 8 * j, p.scale * acc[j][2 * s], p.scale * acc[j][2 * s + 1]);
    }
    if (p.other == nullptr || blockIdx.y > 0) return;
    for (int i = threadIdx.x; i < rows * p.ranks / 8; i += THREADS) {
        const int64 row = row0 + i / (p.ranks / 8), at = row * p.ranks + i % (p.ranks / 8) * 8;
        Row8<element> loaded;
        float v[8];
        loaded.template load<true>(p.other + at, 8);
        loaded.unpack(v);
        const float weight = p.weights ? p.weights[row] : 1.f;
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] *= weight;
        store_vector8(p.weighted + at, v);
    }
}
