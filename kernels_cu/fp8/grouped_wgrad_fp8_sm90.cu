// Weight gradients of e4m3, Hopper tier: for each expert dW = P^T Q, summed over its routed rows. P (L, M) is gathered by token
// and has a scale per token. Q, "routed", has a row per slot. wgmma takes e4m3 only where it is contiguous along what is summed
// over, here the rows. routed_fp8.cu has written Q so, in tiles of 128 rows, with P's scales multiplied in and one scale for each
// expert and 128 columns. P's bytes become wgmma's A fragments in registers.
//
// A k-step is BK = 128 of an expert's rows. Its part of Q lies in the memory of these rows, see routed_fp8.cu: byte i of line c is
// row i of column c. The rest of an expert's rows, fewer than 128, has memory of its own, with zeros behind its last row.
//
// Launch, tiles, warp roles and barriers are those of grouped_wgrad_sm90.cu. A stage is A: 128 lines, a token's 128 columns of P
// each, and B: 256 lines, a column's 128 rows of Q each.
#include "wgrad_tiles_sm90.cuh"

static_assert(FP8 && sizeof(operand) == 1 && BM == 128 && BN == 256 && BK == 128, "tiles of e4m3");

struct GroupedWgradFp8Params {
    TensorMap routed;                 // (2 * halves * columns, R, 1) bytes, in, boxes of 128 x 128 x 1
    TensorMap rest;                   // (128, E * halves * columns, 1) bytes, in, boxes of 128 x 128 x 1
    const unsigned char* gathered;    // (L, M) e4m3, in
    const unsigned* amax;             // (E, groups) bits of fp32, in: largest magnitudes of Q, of which its scales are made
    const int* expert_token_indices;  // (R,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in
    OUT *out0, *out1;                 // (M, N), or if TRANSPOSED (N, M), of each expert, OUT, out, with ACCUMULATE also in: the
                                      // gradients of gate and up, or out0 alone
    const int* experts_by_load;       // (E,) int32, in: experts by falling number of rows, the order of tiles
    int64 ld;                         // bytes of gathered from token to token
    int64 expert_stride, ldo;         // elements of out0 and out1 from expert to expert and from row to row
    int rows, columns;                // M, N
    int num_experts, halves;          // E; 2 (gate and up) or 1
    int gap;                          // bytes of gathered between each 128 columns and the next
    int groups;                       // halves times the groups of 128 columns of a half
};

// TRANSPOSED: the gradient is stored (N, M). The warps of a warpgroup put their parts of a finished tile together as (BN, 64)
// element, where the part that two have in common of a row of N is 128 bytes, and each stores a quarter of the rows. A lane has
// two neighbours of M in each fragment, as their columns of P are a pair. 16-byte chunk c of line n is at c ^ 2 (n / 2 & 3),
// which keeps the stores of a fragment free of bank conflicts.
struct TransposedTile : EpilogueBase {
    static constexpr int LINES = 4;                              // rows of N per call of next(), eight lanes each
    static constexpr int WARP_LINES = BN / WARPGROUP_WARPS;      // rows of N that a warp stores
    static constexpr int COLUMNS = WARPGROUP_WARPS * WARP_ROWS;  // of M that a warpgroup has
    static_assert(COLUMNS * sizeof(element) == LINE_BYTES && WARP_LINES == LINES * WARP_ROWS, "a call for each of 16 rows");
    const int M, N;
    const int64 ldo;
    const unsigned base;  // shared address of the warpgroup's part
    element* out;
    bool inside;
    __device__ __forceinline__ TransposedTile(int M, int N, int64 ldo)
        : M(M), N(N), ldo(ldo),
          base(shared_address(dynamic_shared) + FINISHED_TILE + consumer_warp() / WARPGROUP_WARPS * BN * LINE_BYTES) {}
    static __device__ __forceinline__ int warp() { return consumer_warp() % WARPGROUP_WARPS; }
    // Waits for the other warps of the warpgroup: they have read the last tile, or have written this one.
    static __device__ __forceinline__ void meet() {
        named_barrier(PRODUCER_BARRIER + 1 + consumer_warp() / WARPGROUP_WARPS, WARPGROUP);
    }
    __device__ __forceinline__ unsigned chunk(int n, int c) const { return base + n * LINE_BYTES + ((c ^ (n / 2 & 3) * 2) << 4); }
    __device__ __forceinline__ void finish(const float (&acc)[FRAGMENTS][4], element* slice, int m, int n0) {
        const int lane = threadIdx.x & 31, first = warp() * WARP_LINES, column = m - warp() * WARP_ROWS + (lane & 7) * 8;
        meet();
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                store_shared_4(chunk(8 * j + 2 * (lane & 3) + c, 2 * warp() + lane / 16) + lane / 4 % 4 * 4,
                               __uint_as_float(pack2(element(), acc[j][c], acc[j][2 + c])));
        meet();
        rows = max(0, min(WARP_ROWS, (N - n0 - first) / LINES)), done = 0, inside = column < M;
        out = slice + (n0 + first + lane / 8) * ldo + column;
    }
    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31;
        const uint4 v = load_shared_16(chunk(warp() * WARP_LINES + done * LINES + lane / 8, lane & 7));
        if (inside) store_global_16(out, v);
        out += LINES * ldo;
        ++done;
    }
};

__device__ __forceinline__ float2 load_two(const float* p) { return *reinterpret_cast<const float2*>(p); }
template <class Half>
__device__ __forceinline__ float2 load_two(const Half* p) {
    const unsigned v = *reinterpret_cast<const unsigned*>(p);
    return make_float2(to_float(Half{static_cast<unsigned short>(v)}), to_float(Half{static_cast<unsigned short>(v >> 16)}));
}
__device__ __forceinline__ void store_two(float* p, float2 v) { *reinterpret_cast<float2*>(p) = v; }
template <class Half>
__device__ __forceinline__ void store_two(Half* p, float2 v) {
    *reinterpret_cast<unsigned*>(p) = pack2(Half(), v.x, v.y);
}

// TRANSPOSED and ACCUMULATE: adds a finished tile to the values in memory.
struct TransposedSums : EpilogueBase {
    const int M, N;
    const int64 ldo;
    __device__ __forceinline__ TransposedSums(int M, int N, int64 ldo) : M(M), N(N), ldo(ldo) {}
    __device__ __forceinline__ void finish(const float (&acc)[FRAGMENTS][4], OUT* slice, int m, int n0) const {
        constexpr int AHEAD = 8;  // fragments whose loads are issued before the first is used
        const int lane = threadIdx.x & 31, n = n0 + 2 * (lane & 3);
        OUT* const to = slice + n * ldo + m + lane / 4 * 2;
#pragma unroll
        for (int first = 0; first < FRAGMENTS; first += AHEAD) {
            float2 before[AHEAD][2];
#pragma unroll
            for (int i = 0; i < 2 * AHEAD; ++i) {
                const int row = 8 * (first + i / 2) + i % 2;
                if (m < M && n + row < N) before[i / 2][i % 2] = load_two(to + row * ldo);
            }
#pragma unroll
            for (int i = 0; i < 2 * AHEAD; ++i) {
                const int j = first + i / 2, c = i % 2, row = 8 * j + c;
                const float2 sum = make_float2(before[i / 2][c].x + acc[j][c], before[i / 2][c].y + acc[j][2 + c]);
                if (m < M && n + row < N) store_two(to + row * ldo, sum);
            }
        }
    }
    __device__ __forceinline__ void next() {}  // finish() has stored the tile
};

#if TRANSPOSED && ACCUMULATE
typedef TransposedSums Epilogue;
#elif TRANSPOSED
typedef TransposedTile Epilogue;
#elif ACCUMULATE
typedef UnroundedTile Epilogue;
#else
typedef RoundedTile Epilogue;
#endif

// Runs in the producer warpgroup. Thread t copies 16-byte chunk t % 8 of lines t / 8 + 16 i of A. Of each 16 tokens line
// 8 q + r has number 4 (r / 2) + r % 2 + 2 q: eight lines that follow each other are what one 8 x 8 matrix of ldmatrix reads.
__device__ __forceinline__ void produce(const GroupedWgradFp8Params& p, const WgradTileOrder& order, int tiles,
                                        const PipelineBarriers<1>& barriers, unsigned shared) {
    constexpr int BOX = 128;
    static_assert(LINES == 8 && BK == WARPGROUP, "a thread's tokens of a stage are two int4");
    const int M = p.rows;
    auto tile_at = [&](int t) { return t < tiles ? order.tile(t) : WgradTile{}; };
    PipelineState state;
    const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
    const int number = (line & 7) / 2 * 4 + (line & 1) + line / 8 * 2;
    const unsigned dst = shared + line * LINE_BYTES + ((chunk ^ (line & 7)) * 16);
    int buffer = 0;
    const unsigned ld = static_cast<unsigned>(p.ld);
    int loaded[TOKENS / WARPGROUP];
    WgradTile tile = tile_at(blockIdx.x);
    load_tokens(loaded, p, tile.first_row, tile.end_row);
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const WgradTile next = tile_at(t + gridDim.x);
        const bool inside = tile.m0 + chunk * 16 < M;
        const unsigned char* gathered = p.gathered + tile.m0 + tile.m0 / BM * p.gap + chunk * 16;
        const int column = tile.half * p.columns + tile.n0, first_rest = tile.slice * p.halves * p.columns + column;
        auto fill = [&](const int4* buffered, int row, int first_row) {
            const int* tokens = reinterpret_cast<const int*>(buffered) + row + number * LINES;
            const int4 low = *reinterpret_cast<const int4*>(tokens), high = *reinterpret_cast<const int4*>(tokens + 4);
            const int of_lines[LINES] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
            const unsigned stage = state.stage * STAGE_BYTES, full = barriers.full_of(state.stage);
            const unsigned char* token_rows[LINES];
#pragma unroll
            for (int i = 0; i < LINES; ++i) token_rows[i] = add_product(gathered, of_lines[i], ld);
            const bool whole = first_row + BK <= tile.end_row;
            barriers.wait_empty(state);
            if (threadIdx.x == 0) {
                mbarrier_arrive_expect_tx(full, B_BYTES);
#pragma unroll
                for (int i = 0; i < BN; i += BOX) {
                    const unsigned to = shared + stage + A_BYTES + i * LINE_BYTES;
                    if (whole)
                        tma_load_3d(to, &p.routed, 2 * (column + i), first_row, 0, full);
                    else
                        tma_load_3d(to, &p.rest, 0, first_rest + i, 0, full);
                }
            }
            if (inside && whole) {
#pragma unroll
                for (int i = 0; i < LINES; ++i) cp_async_16(dst + stage + i * LINE_STEP * LINE_BYTES, token_rows[i], 16);
            } else {
#pragma unroll
                for (int i = 0; i < LINES; ++i)
                    cp_async_16(dst + stage + i * LINE_STEP * LINE_BYTES, inside ? token_rows[i] : p.gathered,
                                inside && first_row + number + LINE_STEP * i < tile.end_row ? 16 : 0);
            }
            cp_async_mbarrier_arrive(full);
            state.advance();
        };
        for_each_stage(p, tile, next, loaded, buffer, fill);
        tile = next;
    }
}

// The warp's 16 columns of P over a stage's 128 tokens, as four fragments of mma.m16n8k32. Matrices of ldmatrix have pairs of
// columns 2 i and 2 i + 1 in their columns i; __byte_perm puts four tokens of one column together. Column 2 i becomes row i of the
// fragment and column 2 i + 1 row i + 8.
__device__ __forceinline__ void load_fragments(unsigned (&a)[BK / WGMMA_K][4], unsigned from) {
#pragma unroll
    for (int kk = 0; kk < BK / WGMMA_K; ++kk) {
        unsigned pairs[4];
        ldmatrix_x4_trans(pairs, from + kk * WGMMA_K * LINE_BYTES);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[kk][2 * i] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x6420);
            a[kk][2 * i + 1] = __byte_perm(pairs[2 * i], pairs[2 * i + 1], 0x7531);
        }
    }
}

// Multiplies the tile's halves of 128 columns by their scales.
__device__ __forceinline__ void scale_columns(float (&acc)[FRAGMENTS][4], float first, float last) {
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) acc[j][c] *= j < FRAGMENTS / 2 ? first : last;
}

// Computes acc, the tile's sums over `steps` stages. The warp works on the rows of its last tile behind the wgmma.
// amax: of the tile's first 128 columns of Q. last: elements from there to that of its last 128.
__device__ __forceinline__ void multiply_tile(float (&acc)[FRAGMENTS][4], int steps, PipelineState& state,
                                              const PipelineBarriers<1>& barriers, Epilogue& epilogue, const unsigned* amax,
                                              int last) {
    constexpr int ONE_ROW = 1 << 16;  // as in main_loop of gemm_core_sm90.cuh
    const StageRelease<1> release(barriers);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const unsigned lane = threadIdx.x & 31;
    const unsigned a_from = shared + lane * LINE_BYTES + ((consumer_warp() ^ (lane & 7)) << 4);
    const unsigned b_low = descriptor_low(shared + A_BYTES);
    const unsigned share = uniform((WARP_ROWS * ONE_ROW) / steps + 1);
    unsigned credit = share;  // the first rows are due behind the first wgmma
    int due = 0;
    auto work = [&] {
        due += credit / ONE_ROW, credit %= ONE_ROW;
        while (epilogue.done < min(due, epilogue.rows)) epilogue.next();
        credit += share;
    };
    unsigned a[BK / WGMMA_K][4];
    const float first_amax = __uint_as_float(amax[0]), last_amax = __uint_as_float(amax[last]);
    for (int step = 0; step < steps; ++step) {
        barriers.wait_full(state);
        load_fragments(a, a_from + state.stage * STAGE_BYTES);
        const unsigned b = b_low + state.stage * (STAGE_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BK / WGMMA_K; ++kk)
            wgmma_e4m3(acc, a[kk], descriptor(b + (kk * K_STEP_BYTES >> 4)), kk > 0 || step > 0);
        wgmma_commit();
        work();
        wgmma_wait<0>();
        release(state.stage);
        state.advance();
    }
    while (epilogue.done < epilogue.rows) epilogue.next();
    scale_columns(acc, scaling_of(first_amax).scale, scaling_of(last_amax).scale);
}

// Runs in the consumer warpgroups.
__device__ __forceinline__ void consume(const GroupedWgradFp8Params& p, const WgradTileOrder& order, int tiles,
                                        const PipelineBarriers<1>& barriers) {
    const int M = p.rows, N = p.columns, of_half = p.groups / p.halves;
    const int warp_row = consumer_warp() * WARP_ROWS;
    auto tile_at = [&](int t) { return t < tiles ? order.tile(t) : WgradTile{}; };
    PipelineState state;
    Epilogue epilogue(M, N, p.ldo);
    WgradTile tile = tile_at(blockIdx.x), next;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x, tile = next) {
        next = tile_at(t + gridDim.x);
        OUT* out = (tile.half ? p.out1 : p.out0) + tile.slice * p.expert_stride;
        const int rows = tile.end_row - tile.first_row;
        if (rows == 0) {
            for (int i = threadIdx.x - WARPGROUP; !ACCUMULATE && i < BM * BN / 8; i += THREADS - WARPGROUP) {
                const int m = tile.m0 + (TRANSPOSED ? i % (BM / 8) * 8 : i / (BN / 8));
                const int n = tile.n0 + (TRANSPOSED ? i / (BM / 8) : i % (BN / 8) * 8);
                const float zeros[8] = {};
                if (m < M && n < N) store_vector8(out + (TRANSPOSED ? n * p.ldo + m : m * p.ldo + n), zeros);
            }
            continue;
        }
        const int group = tile.n0 / (BN / 2);
        const unsigned* amax = p.amax + tile.slice * p.groups + tile.half * of_half + group;
        float acc[FRAGMENTS][4];
        multiply_tile(acc, static_cast<int>(uniform((rows + BK - 1) / BK)), state, barriers, epilogue, amax, group + 1 < of_half);
        epilogue.finish(acc, out, tile.m0 + warp_row, tile.n0);
    }
    while (epilogue.done < epilogue.rows) epilogue.next();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(const __grid_constant__ GroupedWgradFp8Params p) {
    run_wgrad(p, 1);
}
