// Main loop of the portable GEMMs: one 128 x 128 tile of C per block of 4 warps (2 x 2, 64 x 64 each),
// fp32 accumulators in the layout of mma.m16n8k16, operands streamed by cp.async through STAGES buffers.
//
// Shared memory holds an operand stage as 128 lines of 128 bytes (LINE elements), 16-byte chunk c of
// line l stored at chunk c ^ (l & 7), which keeps cp.async writes and ldmatrix reads free of bank conflicts:
//   K-contiguous (rows of x, weights stored N x K): line = row of the tile, along K
//   MN-contiguous (weights stored K x N, token rows in weight gradients): line = block * BK + k, along M or N,
//     in BLOCKS = 128 / LINE blocks of LINE columns
// fp32 operands take the same path with plain FFMA in place of mma.sync, so that products are true fp32.
#pragma once
#include "common.cuh"

typedef ELEMENT element;

constexpr int BM = 128, BN = 128, THREADS = 128;
constexpr int LINE = 128 / sizeof(element);  // elements per line: 64 (16-bit) or 32 (fp32)
constexpr int BK = LINE, BLOCKS = 128 / LINE;
constexpr int VECTOR = 16 / sizeof(element);
constexpr int OPERAND_BYTES = 128 * 128, STAGE_BYTES = 2 * OPERAND_BYTES;
constexpr int LINES_PER_THREAD = 8;  // thread t copies chunk t % 8 of lines t / 8 + 16 i
constexpr bool FP32 = sizeof(element) == 4;

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

// Copies chunk t % 8 of one line: VECTOR elements of which the first `valid` exist, zeros beyond.
__device__ __forceinline__ void copy_chunk(int operand_offset, int line, const element* src, int64 valid) {
    const int chunk = threadIdx.x & 7;
    const int offset = operand_offset + line * 128 + ((chunk ^ (line & 7)) * 16);
    if (ALIGNED) {
        cp_async_16(shared_address(dynamic_shared) + offset, src, valid > 0 ? 16u : 0u);  // 0: src is not read
    } else {
        element* dst = reinterpret_cast<element*>(dynamic_shared + offset);
        const element zero = {};
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) dst[i] = i < valid ? src[i] : zero;
    }
}

// One stage of a K-contiguous operand. row(i) points at the start of line i's matrix row; null: zeros.
template <class Row>
__device__ __forceinline__ void copy_k_contiguous(int operand_offset, int64 k0, int64 K, Row row) {
    const int64 k = k0 + (threadIdx.x & 7) * VECTOR;
#pragma unroll
    for (int i = 0; i < LINES_PER_THREAD; ++i) {
        const element* p = row(i);
        copy_chunk(operand_offset, threadIdx.x / 8 + 16 * i, p + k, p ? K - k : 0);
    }
}

// One stage of an MN-contiguous operand. row(i, block) points at the start of line i's K row, null: zeros;
// first_column(block) is where that LINE-wide block starts in a row of num_columns.
template <class Row, class Column>
__device__ __forceinline__ void copy_mn_contiguous(int operand_offset, int64 num_columns, Row row, Column first_column) {
#pragma unroll
    for (int i = 0; i < LINES_PER_THREAD; ++i) {
        const int line = threadIdx.x / 8 + 16 * i, block = 16 * i / BK;  // t / 8 < 16 never crosses a block
        const int64 column = first_column(block) + (threadIdx.x & 7) * VECTOR;
        const element* p = row(i, block);
        copy_chunk(operand_offset, line, p + column, p ? num_columns - column : 0);
    }
}

// First tile column of this warp's pair p (of four) of 8-column accumulator tiles. In a gated up
// projection columns 0..63 of the tile are gate and 64..127 up: a warp takes 32 of each, so that the
// activation finds a and b of one element in one thread.
template <bool SPLIT>
__device__ __forceinline__ int pair_column(int warp_n, int p) {
    return SPLIT ? warp_n * 32 + (p & 1) * 16 + (p >> 1) * 64 : warp_n * 64 + p * 16;
}

struct Accumulators {
    float v[4][8][4];  // [m16 tile][n8 tile][mma register]: rows lane/4 (+8), columns 2 (lane%4) (+1)
    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r) v[i][j][r] = 0.f;
    }
};

template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, bool SPLIT>
__device__ __forceinline__ void multiply_stage_mma(Accumulators& acc, int a_offset, int b_offset, int warp_m, int warp_n) {
    const int lane = threadIdx.x & 31, r = lane & 7, low = (lane >> 3) & 1, high = lane >> 4;
    const unsigned base = shared_address(dynamic_shared);
#pragma unroll
    for (int kk = 0; kk < BK / 16; ++kk) {
        unsigned a[4][4], b[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int m0 = warp_m * 64 + i * 16;
            if (A_K_CONTIGUOUS) {
                ldmatrix_x4(a[i], base + a_offset + (m0 + low * 8 + r) * 128 + (((kk * 2 + high) ^ r) * 16));
            } else {
                const int line = (m0 / LINE) * BK + kk * 16 + high * 8 + r;
                ldmatrix_x4_trans(a[i], base + a_offset + line * 128 + ((((m0 % LINE) / 8 + low) ^ r) * 16));
            }
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int n0 = pair_column<SPLIT>(warp_n, p);
            if (B_K_CONTIGUOUS_) {
                ldmatrix_x4(b[p], base + b_offset + (n0 + high * 8 + r) * 128 + (((kk * 2 + low) ^ r) * 16));
            } else {
                const int line = (n0 / LINE) * BK + kk * 16 + low * 8 + r;
                ldmatrix_x4_trans(b[p], base + b_offset + line * 128 + ((((n0 % LINE) / 8 + high) ^ r) * 16));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) MMA(acc.v[i][j], a[i], b[j / 2][(j & 1) * 2], b[j / 2][(j & 1) * 2 + 1]);
    }
}

template <bool K_CONTIGUOUS>
__device__ __forceinline__ float shared_element(int operand_offset, int mn, int k) {
    const int line = K_CONTIGUOUS ? mn : (mn / LINE) * BK + k, within = K_CONTIGUOUS ? k : mn % LINE;
    const int offset = operand_offset + line * 128 + (((within / 4) ^ (line & 7)) * 16) + (within % 4) * 4;
    return *reinterpret_cast<const float*>(dynamic_shared + offset);
}

template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, bool SPLIT>
__device__ __forceinline__ void multiply_stage_fma(Accumulators& acc, int a_offset, int b_offset, int warp_m, int warp_n) {
    const int lane = threadIdx.x & 31, row = lane / 4, column = (lane & 3) * 2;
#pragma unroll 2
    for (int k = 0; k < BK; ++k) {
        float a[4][2], b[8][2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int s = 0; s < 2; ++s) a[i][s] = shared_element<A_K_CONTIGUOUS>(a_offset, warp_m * 64 + i * 16 + s * 8 + row, k);
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int s = 0; s < 2; ++s)
                b[j][s] = shared_element<B_K_CONTIGUOUS_>(b_offset, pair_column<SPLIT>(warp_n, j / 2) + (j & 1) * 8 + column + s, k);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int s = 0; s < 4; ++s) acc.v[i][j][s] = fmaf(a[i][s >> 1], b[j][s & 1], acc.v[i][j][s]);
    }
}

// C tile = sum over `steps` stages. copy(stage_offset, step) issues the copies of one stage.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, bool SPLIT, class Copy>
__device__ __forceinline__ void main_loop(Accumulators& acc, int64 steps, Copy copy) {
    const int warp_m = (threadIdx.x / 32) & 1, warp_n = threadIdx.x / 64;
    acc.zero();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
        if (s < steps) copy(s * STAGE_BYTES, s);
        cp_async_commit();
    }
    int read = 0, write = STAGES - 1;
    for (int64 step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) copy(write * STAGE_BYTES, step + STAGES - 1);
        cp_async_commit();
        if constexpr (FP32)
            multiply_stage_fma<A_K_CONTIGUOUS, B_K_CONTIGUOUS_, SPLIT>(acc, read * STAGE_BYTES, read * STAGE_BYTES + OPERAND_BYTES,
                                                                       warp_m, warp_n);
        else
            multiply_stage_mma<A_K_CONTIGUOUS, B_K_CONTIGUOUS_, SPLIT>(acc, read * STAGE_BYTES, read * STAGE_BYTES + OPERAND_BYTES,
                                                                       warp_m, warp_n);
        read = read + 1 == STAGES ? 0 : read + 1;
        write = write + 1 == STAGES ? 0 : write + 1;
    }
    cp_async_wait<0>();
    __syncthreads();  // the epilogue reuses the stages
}

// Hands the warp's accumulators to `consume(row, v)` as rows: v[g] are 8 consecutive columns of group g, where
// a lane has column group lane % (8 / GROUPS) of each; GROUPS = 2 pairs gate and up of one element. Row is
// 0..127 within the tile. Goes through shared memory 16 rows at a time, so that global accesses are 16 bytes.
template <int GROUPS, class Consume>
__device__ __forceinline__ void for_each_row(const Accumulators& acc, Consume consume) {
    constexpr int STRIDE = 72;  // floats per staged row: 64 and a pad that spreads rows over the banks
    constexpr int LANES = 8 / GROUPS, ROWS = 32 / LANES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    float* staged = reinterpret_cast<float*>(dynamic_shared) + warp * 16 * STRIDE;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int s = 0; s < 2; ++s)
                *reinterpret_cast<float2*>(staged + (lane / 4 + s * 8) * STRIDE + j * 8 + (lane & 3) * 2) =
                    make_float2(acc.v[i][j][2 * s], acc.v[i][j][2 * s + 1]);
        __syncwarp();
#pragma unroll
        for (int pass = 0; pass < 16 / ROWS; ++pass) {
            const int row = pass * ROWS + lane / LANES;
            float v[GROUPS][8];
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float4 q = *reinterpret_cast<const float4*>(staged + row * STRIDE + g * 32 + (lane % LANES) * 8 + h * 4);
                    v[g][4 * h] = q.x, v[g][4 * h + 1] = q.y, v[g][4 * h + 2] = q.z, v[g][4 * h + 3] = q.w;
                }
            consume((warp & 1) * 64 + i * 16 + row, v);
        }
    }
}

struct Tile {
    int64 m, n;
};

// Rasters a grid of tiles in groups of 16 m-tiles by all n-tiles: what runs at one time (264 blocks on
// an H200) is near a square, which reads the fewest operand bytes.
__device__ __forceinline__ Tile raster(int64 block, int64 m_tiles, int64 n_tiles) {
    constexpr int GROUP = 16;
    const int64 first = block / (GROUP * n_tiles) * GROUP, within = block % (GROUP * n_tiles);
    const int64 height = min(static_cast<int64>(GROUP), m_tiles - first);
    return {first + within % height, within / height};
}
