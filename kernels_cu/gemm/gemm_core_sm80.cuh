// Pipeline and main loop of the portable products (compute capability 8.0 and later). A block (CTA) computes one
// 128 x 128 tile of C with 4 warps, 2 x 2 warps of 64 x 64 each. Accumulators are fp32, in the layout of mma.m16n8k16.
// Operands come by cp.async through a ring of STAGES pipeline stages.
//
// Shared memory: STAGES stages of STAGE_BYTES, each 128 lines of A, then 128 lines of B. A line is 128 bytes, LINE
// elements along the contiguous dimension of the operand in global memory:
//   K-contiguous (rows of x, weights stored N x K): line l is row l of the tile, BK = LINE elements along K.
//   MN-contiguous (weights stored K x N, token rows in weight gradients): the tile's 128 columns are 128 / LINE slabs of
//     LINE columns, and line slab * BK + k holds row k of that slab.
// Swizzle: 16-byte chunk c of line l is stored at chunk c ^ (l & 7). It keeps the writes of cp.async and the reads of
// ldmatrix free of bank conflicts. After the main loop the epilogue uses the same memory to stage rows.
//
// fp32 operands take the same path with FFMA in place of mma.sync: their products are fp32, not TF32.
#pragma once
#include "row_staging.cuh"
#include "tile_raster.cuh"

typedef ELEMENT element;

constexpr int LINE = 128 / sizeof(element);  // elements per line: 64 (16-bit) or 32 (fp32)
constexpr int BK = LINE;
constexpr int VECTOR = 16 / sizeof(element);  // elements of a chunk
constexpr int OPERAND_BYTES = 128 * 128;
constexpr int LINES_PER_THREAD = 8;  // per operand and stage: thread t copies chunk t % 8 of lines t / 8 + 16 i
constexpr int COPY_QUARTERS = 4;     // the copies of a stage are issued in quarters, one before the products of each k16 step
constexpr int QUARTER_LINES = LINES_PER_THREAD / COPY_QUARTERS;
constexpr bool FP32 = sizeof(element) == 4;

static_assert(BM == 128 && BN == 128 && THREADS == 128, "4 warps of 64 x 64 each, a thread per row of the tile");
static_assert(STAGE_BYTES == 2 * OPERAND_BYTES, "a stage is 128 lines of 128 bytes of A and as many of B");
static_assert(STAGES >= 2, "one stage is filled while another is read");
static_assert(FP32 || BK / 16 == COPY_QUARTERS, "a quarter of the copies per k16 step");
static_assert(THREADS / 32 * STAGED_FLOATS * sizeof(float) <= STAGES * STAGE_BYTES,
              "the epilogue stages rows where the stages were");

// Copies this thread's chunk of its line i from src in global memory. Only the first `valid` elements exist there; the others
// become zeros.
__device__ __forceinline__ void copy_chunk(int operand_offset, int i, const char* src, int valid) {
    const int line = threadIdx.x / 8 + 16 * i, chunk = threadIdx.x & 7;
    const int offset = operand_offset + line * 128 + ((chunk ^ (line & 7)) * 16);
    if (ALIGNED) {
        cp_async_16(shared_address(dynamic_shared) + offset, src, valid > 0 ? 16u : 0u);
    } else {
        element* dst = reinterpret_cast<element*>(dynamic_shared + offset);
        const element* from = reinterpret_cast<const element*>(src);
        const element zero = {};
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) dst[e] = e < valid ? from[e] : zero;
    }
}

// A matrix in global memory with contiguous rows. Row numbers have 32 bits and byte offsets 64, so that an address is one
// multiply-add.
struct Rows {
    const char* base;
    int row_bytes;
    __device__ __forceinline__ Rows(const element* p, int64 ld)
        : base(reinterpret_cast<const char*>(p)), row_bytes(static_cast<int>(ld * sizeof(element))) {}
    __device__ __forceinline__ const char* at(int row, int column) const {
        return base + column * static_cast<int64>(sizeof(element)) + static_cast<int64>(row) * row_bytes;
    }
};

__device__ __forceinline__ int chunk_column() { return (threadIdx.x & 7) * VECTOR; }

// The column of the tile at which this warp's pair p of accumulators begins. A warp has four pairs, of 2 x 8 columns each. In a
// gated up projection (SPLIT) columns 0..63 of the tile are gate and 64..127 are up. A warp has 32 columns of each, so that a
// thread has a and b of the same element for the activation.
template <bool SPLIT>
__device__ __forceinline__ int pair_column(int warp_n, int p) {
    return SPLIT ? warp_n * 32 + (p & 1) * 16 + (p >> 1) * 64 : warp_n * 64 + p * 16;
}

struct Accumulators {
    float v[4][8][4];  // [m16 tile][n8 tile][mma register]: rows lane / 4 (+ 8), columns 2 (lane % 4) (+ 1)
    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r) v[i][j][r] = 0.f;
    }
};

// The shared address that a lane passes to ldmatrix for one operand, at index `mn` along M or N and k16 step kk. `first` is the
// lane's address at mn = 0 and kk = 0. In a K-contiguous tile a step along K stays within the 128-byte line, where the swizzle
// turns the addition into an exclusive or, and a step along M or N moves by whole lines. In an MN-contiguous tile it is the
// other way round.
template <bool K_CONTIGUOUS>
__device__ __forceinline__ unsigned fragment_address(unsigned first, unsigned mn, unsigned kk) {
    if (K_CONTIGUOUS) return (first ^ (kk * 32)) + mn * 128;
    return (first ^ ((mn % LINE) * 2)) + (mn / LINE) * BK * 128 + kk * 2048;
}

// Adds the products of one stage. Before the products of k16 step kk, copy_quarter(kk) issues a quarter of a later stage's
// copies.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, bool SPLIT, class Copy>
__device__ __forceinline__ void multiply_stage_mma(Accumulators& acc, int stage, int warp_m, int warp_n, Copy copy_quarter) {
    const int lane = threadIdx.x & 31, r = lane & 7, low = (lane >> 3) & 1, high = lane >> 4;
    const unsigned a_first = shared_address(dynamic_shared) + stage +
                             (A_K_CONTIGUOUS ? (low * 8 + r) * 128 + (high ^ r) * 16 : (high * 8 + r) * 128 + (low ^ r) * 16) +
                             warp_m * 64 * 128;
    const unsigned b_first = shared_address(dynamic_shared) + stage + OPERAND_BYTES +
                             (B_K_CONTIGUOUS_ ? (high * 8 + r) * 128 + (low ^ r) * 16 : (low * 8 + r) * 128 + (high ^ r) * 16);
    unsigned a[2][4][4], b[2][4][4];  // fragments of this k16 step and of the next
    auto load = [&](int kk) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned address = fragment_address<A_K_CONTIGUOUS>(a_first, i * 16, kk);
            if (A_K_CONTIGUOUS)
                ldmatrix_x4(a[kk & 1][i], address);
            else
                ldmatrix_x4_trans(a[kk & 1][i], address);
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const unsigned address = fragment_address<B_K_CONTIGUOUS_>(b_first, pair_column<SPLIT>(warp_n, p), kk);
            if (B_K_CONTIGUOUS_)
                ldmatrix_x4(b[kk & 1][p], address);
            else
                ldmatrix_x4_trans(b[kk & 1][p], address);
        }
    };
    load(0);
#pragma unroll
    for (int kk = 0; kk < BK / 16; ++kk) {
        if (kk + 1 < BK / 16) load(kk + 1);
        copy_quarter(kk);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                MMA(acc.v[i][j], a[kk & 1][i], b[kk & 1][j / 2][(j & 1) * 2], b[kk & 1][j / 2][(j & 1) * 2 + 1]);
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
                b[j][s] =
                    shared_element<B_K_CONTIGUOUS_>(b_offset, pair_column<SPLIT>(warp_n, j / 2) + (j & 1) * 8 + column + s, k);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
#pragma unroll
                for (int s = 0; s < 4; ++s) acc.v[i][j][s] = fmaf(a[i][s >> 1], b[j][s & 1], acc.v[i][j][s]);
    }
}

// Computes acc as the sum of the products of `steps` stages. copy(stage_offset, step, quarter) issues a quarter of the copies
// of a k-step to the stage at stage_offset. It is called for k-steps and quarters in order, and also for k-steps past the last.
// There it must read nothing and fill in zeros. A branch around it would keep the compiler from scheduling the copies among the
// products.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, bool SPLIT, class Copy>
__device__ __forceinline__ void main_loop(Accumulators& acc, int steps, Copy copy) {
    const int warp_m = (threadIdx.x / 32) & 1, warp_n = threadIdx.x / 64;
    acc.zero();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
#pragma unroll
        for (int quarter = 0; quarter < COPY_QUARTERS; ++quarter) copy(s * STAGE_BYTES, s, quarter);
        cp_async_commit();
    }
    int read = 0, write = (STAGES - 1) * STAGE_BYTES;
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        const int ahead = step + STAGES - 1;
        if constexpr (FP32) {
#pragma unroll
            for (int quarter = 0; quarter < COPY_QUARTERS; ++quarter) copy(write, ahead, quarter);
            multiply_stage_fma<A_K_CONTIGUOUS, B_K_CONTIGUOUS_, SPLIT>(acc, read, read + OPERAND_BYTES, warp_m, warp_n);
        } else {
            multiply_stage_mma<A_K_CONTIGUOUS, B_K_CONTIGUOUS_, SPLIT>(acc, read, warp_m, warp_n,
                                                                       [&](int quarter) { copy(write, ahead, quarter); });
        }
        cp_async_commit();
        read = read == (STAGES - 1) * STAGE_BYTES ? 0 : read + STAGE_BYTES;
        write = write == (STAGES - 1) * STAGE_BYTES ? 0 : write + STAGE_BYTES;
    }
    cp_async_wait<0>();
    __syncthreads();  // the epilogue reuses the stages
}

// The memory in which a warp stages 16 rows of its accumulators. It is that of the pipeline stages, free after the main loop.
__device__ __forceinline__ float* warp_staging() {
    return reinterpret_cast<float*>(dynamic_shared) + threadIdx.x / 32 * STAGED_FLOATS;
}
// The tile's row at which this warp's accumulators acc.v[i] begin.
__device__ __forceinline__ int warp_row(int i) { return (threadIdx.x / 32 & 1) * 64 + i * 16; }

// Calls consume(row, v) for each row of the tile that the lane has columns of. v[g] holds its 8 columns of group g; see
// RowStaging.
template <int GROUPS, class Consume>
__device__ __forceinline__ void for_each_row(const Accumulators& acc, Consume consume) {
    using Staging = RowStaging<GROUPS>;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Staging::put(warp_staging(), acc.v[i]);
#pragma unroll
        for (int pass = 0; pass < Staging::PASSES; ++pass) {
            float v[GROUPS][8];
            Staging::get(v, warp_staging(), pass);
            consume(warp_row(i) + Staging::row(pass), v);
        }
    }
}
