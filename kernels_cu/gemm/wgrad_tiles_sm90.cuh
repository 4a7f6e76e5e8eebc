// Tiles of Hopper's weight gradients: their order, their warp roles and stages, and what becomes of a finished one. Operands in
// 16 bits and in e4m3 use it (grouped_wgrad_sm90.cu, grouped_wgrad_fp8_sm90.cu).
#pragma once
#include "gemm_core_sm90.cuh"

// The place of a tile's row among the warp's 16 accumulator rows. E4m3 fragments are made of pairs of columns of P, of which one
// becomes an accumulator row in the first eight, the other in the last eight.
__device__ __forceinline__ int place_of_row(int row) { return FP8 ? (row >> 1) + (row & 1) * 8 : row; }

static_assert(BN == 256 || !(ACCUMULATE || SPLIT_K), "UnroundedTile stores halves of 128 columns");

struct WgradTile {
    int slice;               // index of the (M, N) array in out0 or out1: the expert, or the split of an expert
    int half, m0, n0;        // 0 (gate) or 1 (up); the tile's first row and column
    int first_row, end_row;  // the routed rows that the tile sums over
};

struct WgradTileOrder {
    const int m_tiles, n_tiles, halves, splits;
    const int* const expert_token_offsets;
    const int* const experts_by_load;

    __device__ __forceinline__ WgradTile tile(int index) const {
        const int per_slice = m_tiles * n_tiles * halves, ordered = index / per_slice, within = index % per_slice;
        const Tile position = raster(within % (m_tiles * n_tiles), m_tiles, n_tiles);
        const int expert = experts_by_load[SPLIT_K ? ordered / splits : ordered];
        int first_row = expert_token_offsets[expert], end_row = expert_token_offsets[expert + 1], slice = expert;
#if SPLIT_K
        const unsigned split = ordered % splits, rows = end_row - first_row;
        const unsigned split_rows = ((rows + BK - 1) / BK + splits - 1) / splits * BK;
        slice = expert * splits + split;
        first_row += min(split * split_rows, rows);
        end_row = min(unsigned(first_row) + split_rows, unsigned(end_row));
#endif
        return {slice, within / (m_tiles * n_tiles), position.m * BM, position.n * BN, first_row, end_row};
    }
};

// Tokens that the producer's threads load to shared memory at a time, one buffer ahead of their use. If each thread loaded its
// own, even some stages ahead, the producer would wait for them.
constexpr int TOKENS = 512;
constexpr int LINE_STEP = WARPGROUP / 8, LINES = BK / LINE_STEP;  // a producer's thread copies lines t / 8 + LINE_STEP * i
static_assert(2 * TOKENS * sizeof(int) <= SPARE_BYTES, "two buffers of tokens");

// The thread's part of the tokens of rows from first_row on.
template <class Params>
__device__ __forceinline__ void load_tokens(int (&loaded)[TOKENS / WARPGROUP], const Params& p, int first_row, int end_row) {
#pragma unroll
    for (int i = 0; i < TOKENS / WARPGROUP; ++i) {
        const int row = first_row + threadIdx.x + WARPGROUP * i;
        loaded[i] = row < end_row ? p.expert_token_indices[row] : 0;
    }
}

// Calls fill(tokens, row, first_row) in the producer's threads for each stage of a tile, of rows first_row to first_row + BK - 1.
// The token of its row l + LINE_STEP * i is the int number row + LINES * l + i of `tokens`, so that a thread's are one int4 or
// two. loaded, buffer: the first of the tile's tokens, and the buffer for them; in the end those of the next tile.
template <class Params, class Fill>
__device__ __forceinline__ void for_each_stage(const Params& p, const WgradTile& tile, const WgradTile& next,
                                               int (&loaded)[TOKENS / WARPGROUP], int& buffer, const Fill& fill) {
    constexpr bool ONE_STAGE = BK == WARPGROUP;  // the threads load the tokens of one stage at a time, or of several
    if (tile.first_row == tile.end_row) load_tokens(loaded, p, next.first_row, next.end_row);
    for (int start = tile.first_row; start < tile.end_row; start += TOKENS) {
        int4* tokens = reinterpret_cast<int4*>(dynamic_shared + SPARE) + buffer * (TOKENS / 4);
        buffer ^= 1;
        int* const to = reinterpret_cast<int*>(tokens) + (ONE_STAGE ? 0 : threadIdx.x / BK * BK) + (threadIdx.x & 15) * LINES;
#pragma unroll
        for (int i = 0; i < TOKENS / WARPGROUP; ++i)
            to[WARPGROUP * i + (ONE_STAGE ? threadIdx.x / 16 : threadIdx.x / 16 % LINES)] = loaded[i];
        named_barrier(PRODUCER_BARRIER, WARPGROUP);
        const bool more = start + TOKENS < tile.end_row;
        load_tokens(loaded, p, more ? start + TOKENS : next.first_row, more ? tile.end_row : next.end_row);
        for (int first_row = start; first_row < min(start + TOKENS, tile.end_row); first_row += BK)
            fill(tokens, first_row - start, first_row);
    }
}

// The body of a kernel of weight gradients, which has produce() and consume() of its Params. splits: parts of an expert's rows,
// by reference, as a copy takes four more instructions.
template <class Params>
__device__ __forceinline__ void run_wgrad(const Params& p, const int& splits) {
    __shared__ uint64 barrier_storage[2 * STAGES];
    const PipelineBarriers<1> barriers(barrier_storage, WARPGROUP + 1);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const WgradTileOrder order = {(p.rows + BM - 1) / BM, (p.columns + BN - 1) / BN, p.halves, splits,
                                  p.expert_token_offsets, p.experts_by_load};
    const int tiles = p.num_experts * p.halves * splits * order.m_tiles * order.n_tiles;
    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        produce(p, order, tiles, barriers, shared);
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(p, order, tiles, barriers);
}

// Without ACCUMULATE and SPLIT_K: each warp stores its 16 rows of a tile as elements, between the k-steps of the next tile.
struct RoundedTile : EpilogueBase {
    const int M, N;
    const int64 ldo;
    element* out;
    bool inside;
    __device__ __forceinline__ RoundedTile(int M, int N, int64 ldo) : M(M), N(N), ldo(ldo) {}
    // slice: the tile's (M, N) array in out0 or out1. m: the warp's first row.
    __device__ __forceinline__ void finish(const float (&acc)[FRAGMENTS][4], element* slice, int m, int n0) {
        finished.put(acc);
        const int lane = threadIdx.x & 31, n = n0 + lane * 8;
        rows = min(WARP_ROWS, M - m), done = 0, inside = lane < FRAGMENTS && n < N;
        out = slice + m * ldo + n;
    }
    __device__ __forceinline__ void next() {
        const Row8<element> v = finished.get(place_of_row(done), min(int(threadIdx.x & 31), FRAGMENTS - 1));
        if (inside) v.store(out);
        out += ldo;
        ++done;
    }
};

__device__ __forceinline__ float4 load_four(const float* p) { return *reinterpret_cast<const float4*>(p); }
template <class Half>
__device__ __forceinline__ float4 load_four(const Half* p) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    auto element_of = [](unsigned bits) { return to_float(Half{static_cast<unsigned short>(bits)}); };
    return make_float4(element_of(v.x), element_of(v.x >> 16), element_of(v.y), element_of(v.y >> 16));
}
__device__ __forceinline__ void store_four(float* p, float4 v) {
    store_global_vector(p, make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)));
}
template <class Half>
__device__ __forceinline__ void store_four(Half* p, float4 v) {
    *reinterpret_cast<uint2*>(p) = make_uint2(pack2(Half(), v.x, v.y), pack2(Half(), v.z, v.w));
}

// Stores a tile's fp32 sums (SPLIT_K), or adds them to the values in memory (ACCUMULATE). It does so before the next tile
// begins: a tile of fp32 does not fit into shared memory beside the stages, and 16-bit elements would be rounded before the
// addition. Meanwhile the producer fills the stages. The columns go through shared memory in two halves, 16-byte chunk c of row
// r at c ^ 2 (r & 3), so that a warp accesses 128 columns of a row at a time. Straight from the accumulators it would access 32
// bytes of 8 rows at a time (docs/decisions/008).
struct UnroundedTile : EpilogueBase {
    static constexpr int HALF = BN / 2;
    static_assert(CONSUMER_WARPS * WARP_ROWS * HALF * sizeof(float) <= TILE_BYTES,
                  "a warp's 16 rows fit where a finished tile lies");
    const int M, N;
    const int64 ldo;
    float* const staged;  // (16, HALF) fp32
    __device__ __forceinline__ UnroundedTile(int M, int N, int64 ldo)
        : M(M), N(N), ldo(ldo),
          staged(reinterpret_cast<float*>(dynamic_shared + FINISHED_TILE) + consumer_warp() * WARP_ROWS * HALF) {}
    __device__ __forceinline__ void finish(const float (&acc)[FRAGMENTS][4], OUT* slice, int m, int n0) const {
        const int lane = threadIdx.x & 31, valid = min(WARP_ROWS, M - m), n = n0 + lane * 4;
        float* pairs[4];  // addresses of the lane's two columns of fragment j of mma.m16n8k16, by j % 4
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = staged + lane / 4 * HALF + (j ^ (lane / 4 & 3)) * 8 + (lane & 3) * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            __syncwarp();
#pragma unroll
            for (int j = 0; j < 16; ++j)
#pragma unroll
                for (int s = 0; s < 2; ++s)
                    *reinterpret_cast<float2*>(pairs[j % 4] + j / 4 * 32 + s * 8 * HALF) =
                        make_float2(acc[16 * half + j][2 * s], acc[16 * half + j][2 * s + 1]);
            __syncwarp();
            if (valid <= 0 || n + half * HALF >= N) continue;
            OUT* to = slice + m * ldo + n + half * HALF;
            const OUT* from = to;
            float4 before[WARP_ROWS];  // all loads are issued before the first is used; past the last row it is loaded again
#pragma unroll
            for (int r = 0; ACCUMULATE && r < WARP_ROWS; ++r) {
                before[r] = load_four(from);
                if (r + 1 < valid) from += ldo;
            }
#pragma unroll
            for (int r = 0; r < WARP_ROWS; ++r, to += ldo) {
                float4 v =
                    *reinterpret_cast<const float4*>(staged + place_of_row(r) * HALF + (lane ^ 2 * (place_of_row(r) & 3)) * 4);
                if (ACCUMULATE) v = make_float4(before[r].x + v.x, before[r].y + v.y, before[r].z + v.z, before[r].w + v.w);
                if (r < valid) store_four(to, v);
            }
        }
    }
    __device__ __forceinline__ void next() {}  // finish() has stored the tile
};
