// Pipeline and main loop of the portable products (compute capability 8.0 and later). A block (CTA) computes one 128 x 256 tile
// of C with 2 x 4 warps of 64 x 64 each. Accumulators are fp32, in the layout of mma.m16n8k16. Operands come by cp.async through
// a ring of STAGES pipeline stages.
//
// Shared memory: STAGES stages of STAGE_BYTES, each BM rows of A, then BN rows of B, of STEP_BYTES bytes along K (64 or 128,
// BK elements):
//   K-contiguous (rows of x, weights stored N x K): row r of the tile is at r * STEP_BYTES.
//   MN-contiguous (weights stored K x N, token rows in weight gradients): the tile's columns are slabs of LINE columns, 128
//     bytes, and line slab * BK + k of 128 bytes holds row k of that slab.
// Swizzle: 16-byte chunk c of line l is stored at chunk c ^ (l & 7); with 64-byte rows chunk c of row r at c ^ (r / 2 & 3); in
// MN-contiguous lines of TF32 at c ^ (l & 3) * 2. It keeps the writes of cp.async and the reads of fragments free of bank
// conflicts. After the main loop the epilogue uses the same memory to stage rows.
//
// Fragments of the first k16 step of a stage are loaded during the products of the last k16 step of the stage before, behind
// the barrier. So no product waits for a barrier and then for shared memory.
//
// fp32 operands take the same path with FFMA in place of mma.sync, as their products are fp32. With TF32 they are rounded to
// TF32 as they are multiplied, by mma.m16n8k8: what is k16 of 16-bit elements here is k8 then, of as many bytes. ldmatrix
// transposes 16-bit elements alone, so lanes load the words of MN-contiguous tiles.
#pragma once
#include "row_staging.cuh"
#include "tile_raster.cuh"

typedef ELEMENT element;

constexpr int LINE = 128 / sizeof(element);       // columns of a slab: 64 (16-bit) or 32 (fp32)
constexpr int BK = STEP_BYTES / sizeof(element);  // depth of a stage
constexpr int VECTOR = 16 / sizeof(element);      // elements of a chunk
constexpr int A_BYTES = BM * STEP_BYTES, STAGE_BYTES = (BM + BN) * STEP_BYTES;
constexpr int K_STEPS = STEP_BYTES / 32;     // of a stage, k16 each for 16-bit elements
constexpr int COPY_PARTS = K_STEPS - 1;      // the copies of a stage are issued in parts, one before the products of a k16 step
constexpr int ROW_CHUNKS = STEP_BYTES / 16;  // of a K-contiguous row: thread t copies chunk t % ROW_CHUNKS
constexpr int PASS_ROWS = THREADS / ROW_CHUNKS;                      // K-contiguous rows that all threads copy at once
constexpr int PASS_LINES = THREADS / 8;                              // MN-contiguous lines that all threads copy at once
constexpr int A_COPIES = BM / PASS_ROWS, B_COPIES = BN / PASS_ROWS;  // of a thread per stage, in either layout
constexpr int PASS_SLABS = PASS_LINES > BK ? PASS_LINES / BK : 1;    // slabs that these lines are of
constexpr int K_ROWS = PASS_LINES > BK ? 1 : BK / PASS_LINES;        // rows of an MN-contiguous stage that a thread copies from
constexpr bool FP32 = sizeof(element) == 4;
constexpr int K_LINES = 32 / sizeof(element);  // of an MN-contiguous tile in a k16 step

static_assert(FP32 || !TF32, "fp32 is rounded to TF32");
static_assert(BM == 128 && BN == 256 && THREADS == BN, "warps of 64 x 64 each, two threads per row of the tile");
static_assert(STEP_BYTES == 64 || STEP_BYTES == 128, "one or two rows per 128 bytes");
static_assert(STAGES >= 3, "one stage is filled while another is read and the next has arrived");
static_assert(THREADS / 32 * STAGED_FLOATS * sizeof(float) <= STAGES * STAGE_BYTES,
              "the epilogue stages rows where the stages were");

// Copies 16 bytes from src in global memory to this offset. Only the first `valid` elements exist there; the others become
// zeros.
__device__ __forceinline__ void copy_chunk(int offset, const char* src, int valid) {
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

// Where chunk `chunk` of a K-contiguous row lies in its operand.
__device__ __forceinline__ constexpr int row_chunk(int row, int chunk) {
    return row * STEP_BYTES + (chunk ^ (STEP_BYTES == 128 ? row & 7 : row / 2 & 3)) * 16;
}

// The rows, lines and columns that a thread copies. Copy i of a K-contiguous operand is of row first_row() + i * PASS_ROWS, of
// an MN-contiguous one of row first_line() + i % K_ROWS * PASS_LINES of the stage, slab_column(i) after chunk_column().
__device__ __forceinline__ int first_row() { return threadIdx.x / ROW_CHUNKS; }
__device__ __forceinline__ int first_line() { return threadIdx.x / 8 % BK; }
__device__ __forceinline__ constexpr int slab_column(int i) { return i / K_ROWS * PASS_SLABS * LINE; }
template <bool K_CONTIGUOUS>
__device__ __forceinline__ int chunk_column() {
    return K_CONTIGUOUS ? threadIdx.x % ROW_CHUNKS * VECTOR : threadIdx.x % 8 * VECTOR + threadIdx.x / 8 / BK * LINE;
}
template <bool K_CONTIGUOUS>
__device__ __forceinline__ int copy_offset(int i) {
    if (K_CONTIGUOUS) return row_chunk(first_row(), threadIdx.x % ROW_CHUNKS) + i * PASS_ROWS * STEP_BYTES;
    const int line = threadIdx.x / 8, swizzle = TF32 ? (line & 3) * 2 : line;
    return line * 128 + ((threadIdx.x ^ swizzle) & 7) * 16 + (i / K_ROWS * PASS_SLABS * BK + i % K_ROWS * PASS_LINES) * 128;
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

// The column of the tile at which this warp's pair p of accumulators begins. A warp has four pairs, of 2 x 8 columns each. In a
// gated up projection (SPLIT) the first half of the tile's columns are gate and the others are up. A warp has 32 columns of
// each, so that a thread has a and b of the same element for the activation.
template <bool SPLIT>
__device__ __forceinline__ int pair_column(int warp_n, int p) {
    return SPLIT ? warp_n * 32 + (p & 1) * 16 + (p >> 1) * (BN / 2) : warp_n * 64 + p * 16;
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
    if (K_CONTIGUOUS) return (first ^ (kk * 32)) + mn * STEP_BYTES;
    return (first ^ (mn % LINE * static_cast<unsigned>(sizeof(element)))) + (mn / LINE) * BK * 128 + kk * K_LINES * 128;
}

// What a warp reads for the products of a k16 step: fragments of 64 x 16 of A and of B, of this step and of the next.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, bool SPLIT>
struct Fragments {
    unsigned a[2][4][4], b[2][4][4];
    unsigned a_first, b_first;  // the lane's addresses for ldmatrix in stage 0
    int warp_n;

    __device__ __forceinline__ Fragments(int warp_m, int warp_n_) : warp_n(warp_n_) {
        const int lane = threadIdx.x & 31, r = lane & 7, low = (lane >> 3) & 1, high = lane >> 4;
        const unsigned start = shared_address(dynamic_shared);
        const int t = lane & 3, g = lane / 4;
        const int a_line = TF32 ? t * 128 + ((g / 2) ^ t * 2) * 16 + g % 2 * 8 : (high * 8 + r) * 128 + (low ^ r) * 16;
        const int b_line = TF32 ? t * 128 + ((g / 4) ^ t * 2) * 16 + g % 4 * 4 : (low * 8 + r) * 128 + (high ^ r) * 16;
        a_first = start + (A_K_CONTIGUOUS ? row_chunk(warp_m * 64 + low * 8 + r, high) : a_line + warp_m * 64 / LINE * BK * 128);
        b_first = start + A_BYTES + (B_K_CONTIGUOUS_ ? row_chunk(high * 8 + r, low) : b_line);
    }
    // What ldmatrix_x4_trans loads of 16-bit elements: lane 4 g + t loads lines t and t + 4 of a k8 step. Its rows of A are 2 g and
    // 2 g + 1 of 16, its columns of B g and g + 8; see tile_row.
    static __device__ __forceinline__ void load_a(unsigned (&r)[4], unsigned address) {
        const uint2 above = load_shared_8(address), below = load_shared_8(address + 512);
        r[0] = above.x, r[1] = above.y, r[2] = below.x, r[3] = below.y;
    }
    static __device__ __forceinline__ void load_b(unsigned (&r)[4], unsigned left, unsigned right) {
        r[0] = load_shared_4(left), r[1] = load_shared_4(left + 512);
        r[2] = load_shared_4(right), r[3] = load_shared_4(right + 512);
    }
    // Loads k16 step kk of a stage to buffer kk & 1.
    __device__ __forceinline__ void load(int stage, int kk) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned address = fragment_address<A_K_CONTIGUOUS>(a_first + stage, i * 16, kk);
            if (A_K_CONTIGUOUS)
                ldmatrix_x4(a[kk & 1][i], address);
            else if (TF32)
                load_a(a[kk & 1][i], address);
            else
                ldmatrix_x4_trans(a[kk & 1][i], address);
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const unsigned address = fragment_address<B_K_CONTIGUOUS_>(b_first + stage, pair_column<SPLIT>(warp_n, p), kk);
            if (B_K_CONTIGUOUS_)
                ldmatrix_x4(b[kk & 1][p], address);
            else if (TF32)
                load_b(b[kk & 1][p], address, fragment_address<false>(b_first + stage, pair_column<SPLIT>(warp_n, p) + 8, kk));
            else
                ldmatrix_x4_trans(b[kk & 1][p], address);
        }
    }
    // Rounds what was loaded for k8 step kk.
    __device__ __forceinline__ void round(int kk) {
        if constexpr (TF32) {
#pragma unroll
            for (int w = 0; w < 16; ++w) {
                a[kk & 1][w / 4][w % 4] = round_tf32(a[kk & 1][w / 4][w % 4]);
                b[kk & 1][w / 4][w % 4] = round_tf32(b[kk & 1][w / 4][w % 4]);
            }
        }
    }
    __device__ __forceinline__ void multiply(Accumulators& acc, int kk) const {
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                MMA(acc.v[i][j], a[kk & 1][i], b[kk & 1][j / 2][(j & 1) * 2], b[kk & 1][j / 2][(j & 1) * 2 + 1]);
    }
};

template <bool K_CONTIGUOUS>
__device__ __forceinline__ float shared_element(int operand_offset, int mn, int k) {
    const int line = (mn / LINE) * BK + k, within = mn % LINE;
    const int chunk = K_CONTIGUOUS ? row_chunk(mn, k / 4) : line * 128 + (((within / 4) ^ (line & 7)) * 16);
    return *reinterpret_cast<const float*>(dynamic_shared + operand_offset + chunk + (K_CONTIGUOUS ? k : within) % 4 * 4);
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

// Computes acc as the sum of the products of `steps` stages. copy(stage_offset, step, part) issues a part of the copies of a
// k-step to the stage at stage_offset. It is called for k-steps and parts in order, and also for k-steps past the last. There
// it must read nothing and fill in zeros. A branch around it would keep the compiler from scheduling the copies among the
// products.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, bool SPLIT, class Copy>
__device__ __forceinline__ void main_loop(Accumulators& acc, int steps, Copy copy) {
    const int warp_m = (threadIdx.x / 32) & 1, warp_n = threadIdx.x / 64;
    acc.zero();
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
#pragma unroll
        for (int part = 0; part < COPY_PARTS; ++part) copy(s * STAGE_BYTES, s, part);
        cp_async_commit();
    }
    int read = 0, write = (STAGES - 1) * STAGE_BYTES;
    auto after = [](int stage) { return stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES; };
    if constexpr (FP32 && !TF32) {
        for (int step = 0; step < steps; ++step) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
#pragma unroll
            for (int part = 0; part < COPY_PARTS; ++part) copy(write, step + STAGES - 1, part);
            cp_async_commit();
            multiply_stage_fma<A_K_CONTIGUOUS, B_K_CONTIGUOUS_, SPLIT>(acc, read, read + A_BYTES, warp_m, warp_n);
            read = after(read), write = after(write);
        }
    } else {
        Fragments<A_K_CONTIGUOUS, B_K_CONTIGUOUS_, SPLIT> fragments(warp_m, warp_n);
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fragments.load(0, 0);
        fragments.round(0);
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int kk = 0; kk < K_STEPS; ++kk) {
                if (kk == K_STEPS - 1) {
                    // The next stage has arrived, and all warps have loaded the last fragments of this one, so that the copies
                    // of the next k-step may overwrite it.
                    read = after(read);
                    cp_async_wait<STAGES - 2>();
                    __syncthreads();
                }
                fragments.load(read, (kk + 1) % K_STEPS);
                if (kk < COPY_PARTS) copy(write, step + STAGES - 1, kk);
                if (kk == COPY_PARTS - 1) cp_async_commit();
                fragments.multiply(acc, kk);
                fragments.round(kk + 1);
            }
            write = after(write);
        }
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

// The tile's row that a row of the accumulators is of. With TF32 the rows of an MN-contiguous A are in another order.
template <bool A_K_CONTIGUOUS>
__device__ __forceinline__ int tile_row(int row) {
    return TF32 && !A_K_CONTIGUOUS ? (row & ~15) + (row & 7) * 2 + (row >> 3 & 1) : row;
}

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
