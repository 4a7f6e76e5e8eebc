// Weight gradients, Hopper tier: sm_90a, bf16 and fp16, sizes that are multiples of 8 (paper section 3.2, Algorithm 1 lines 18
// and 29). For each expert dW = P^T Q, summed over the expert's routed rows. The source is compiled once per step of the layer.
// ENTRY is the step's name:
//
//   ENTRY       P (columns M)               Q (columns N)
//   down_wgrad  weighted_y_swi              grad_out, gathered by token   dW2 (h, d)
//   up_wgrad    x, gathered by token        first_layer_grad              dW1 (d, h) per half: gate, up
//
// If the weight is stored transposed, P and Q are exchanged. One operand is gathered by token. The other one, "routed", has R
// rows in expert order. The gradient of an expert without tokens becomes zeros, or with ACCUMULATE stays as it is. With SPLIT_K
// a tile sums a part of an expert's rows in fp32, and wgrad_parts.cu adds these sums. With OTHERS the gradient becomes the
// scaled sum of this GPU's, rounded to element, and those that other GPUs have stored in this one's memory. The order of all
// sums is fixed, so that two runs give the same bits. The experts may be those of one rank alone (rank_experts.cu).
//
// Launch: a persistent grid of at most one CTA per multiprocessor, THREADS threads, SPARE + SPARE_BYTES bytes of dynamic shared
// memory. The tile scheduler is static: CTA i computes tile i and every gridDim.x-th tile after it.
// Tile: BM (M) x BN (N) of one expert's gradient, 128 x 256 or 192 x 192. K is the expert's rows, in k-steps of BK = 64.
//
// Warp roles               registers per thread   work
//   warpgroup 0, producer  PRODUCER_REGISTERS     All 128 threads: cp.async of the gathered operand's 64 rows per stage, 16
//                                                 bytes each, and loads of token indices. Thread 0: TMA of the routed operand.
//   warpgroups 1 to        CONSUMER_REGISTERS     wgmma of 64 rows of the tile each, both operands MN-contiguous. Between
//   BM / 64, consumers                            k-steps the stores of the previous tile, 16 rows per warp.
//
// Barriers                 arrivals per phase                                      waited on by
//   full[stage]            the cp.async copies of 128 threads; thread 0 with the   consumers, every k-step
//                          bytes of TMA
//   empty[stage]           the consumer warps, 8 or 12                             producer threads, every k-step
//   PRODUCER_BARRIER       128 producer threads                                    the same, every TOKENS rows
//
// Dynamic shared memory: see pipeline_sm90.cuh. A is BM / 64 blocks of (BK, 64) element, B is BN / 64 such blocks. The spare
// bytes are two buffers of TOKENS int32, token indices of the rows that are being copied and of the rows after them.
//
// If an expert's last stage has fewer than 64 rows, cp.async copies both operands, and writes zeros in place of rows that are
// not the expert's: these may hold any numbers, NaN among them.
#include "wgrad_tiles_sm90.cuh"

static_assert(GATHER_P != GATHER_Q, "one operand is gathered, the other comes through a tensor map");
static_assert(!(ACCUMULATE && SPLIT_K), "wgrad_parts.cu adds the sums of split-K");
static_assert(!(OTHERS && (ACCUMULATE || SPLIT_K)), "SummedTile adds rounded values");

struct GroupedWgradParams {
    TensorMap routed;                 // the operand that is not gathered, (columns, R, 1) element, in, boxes of 64 x 64 x 1
    const element *p, *q;             // (L, ldp) and (L, ldq) element, in; R rows in place of L in the one that is not gathered
                                      // by token (GATHER_P, GATHER_Q)
    const int* expert_token_indices;  // (R,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in
    OUT *out0, *out1;                 // (M, N) of each expert, OUT, out, with ACCUMULATE also in: the gradients of gate and up,
                                      // or out0 alone. With SPLIT_K (M, N) fp32 of each split: split j of expert e is at
                                      // (e * splits + j) * expert_stride
    const int* experts_by_load;       // (E,) int32, in: experts by falling number of rows. Tiles follow this order, so that the
                                      // last ones are short
#if OTHERS
    const element* others;  // (num_others, ...) element, in: what other GPUs computed of out0 and out1. Each part has
                            // the strides of out0, and up's half as far from gate's
#endif
    int64 ldp, ldq;            // elements from row to row
    int64 expert_stride, ldo;  // elements of out0 and out1 from expert (or split) to the next, and from row to row
#if OTHERS
    int64 others_stride;  // elements from part to part
#endif
    int p_half, q_half;       // elements from gate's columns to up's in P or Q; 0 in the operand that both halves share
    int rows, columns;        // M, N
    int num_experts, halves;  // E; 2 (gate and up) or 1
    int splits;               // with SPLIT_K: parts of an expert's rows, one per tile; else 1
#if OTHERS
    int num_others;  // at most MAX_OTHERS
    float scale;     // of the sum
#endif
};

#if OTHERS
constexpr int MAX_OTHERS = 7;

// With OTHERS it does what RoundedTile does, and adds the parts of other GPUs to a row. Its loads are issued one row ahead.
struct SummedTile : EpilogueBase {
    const GroupedWgradParams& p;
    OUT* out;
    const element* part;
    bool inside;
    Row8<element> ahead[MAX_OTHERS];
    __device__ __forceinline__ explicit SummedTile(const GroupedWgradParams& p) : p(p) {}
    __device__ __forceinline__ void load() {
#pragma unroll
        for (int i = 0; i < MAX_OTHERS; ++i)
            if (i < p.num_others && inside) ahead[i].load<true>(part + i * p.others_stride, 8);
    }
    // v: 8 values of out. Adds the parts in order and scales the sum.
    __device__ __forceinline__ void add(float (&v)[8]) const {
#pragma unroll
        for (int i = 0; i < MAX_OTHERS; ++i) {
            if (i >= p.num_others) break;
            float other[8];
            ahead[i].unpack(other);
#pragma unroll
            for (int c = 0; c < 8; ++c) v[c] += other[c];
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] *= p.scale;
    }
    __device__ __forceinline__ void finish(const float (&acc)[FRAGMENTS][4], OUT* slice, int m, int n0) {
        finished.put(acc);
        const int lane = threadIdx.x & 31, n = n0 + lane * 8;
        rows = min(WARP_ROWS, p.rows - m), done = 0, inside = lane < FRAGMENTS && n < p.columns;
        out = slice + m * p.ldo + n;
        part = p.others + (out - p.out0);
        if (rows > 0) load();
    }
    __device__ __forceinline__ void next() {
        float v[8];
        finished.get(done, min(int(threadIdx.x & 31), FRAGMENTS - 1)).unpack(v);
        add(v);
        if (inside) store_vector8(out, v);
        out += p.ldo, part += p.ldo;
        if (++done < rows) load();
    }
    // The tile of an expert without rows: 8 columns at m, n.
    __device__ __forceinline__ void store_others(OUT* slice, int m, int n) {
        float v[8] = {};
        inside = true, part = p.others + (slice - p.out0) + m * p.ldo + n;
        load();
        add(v);
        store_vector8(slice + m * p.ldo + n, v);
    }
};
#endif

#if OTHERS
typedef SummedTile Epilogue;
#elif ACCUMULATE || SPLIT_K
typedef UnroundedTile Epilogue;
#else
typedef RoundedTile Epilogue;
#endif

// Runs in the producer warpgroup. Thread t copies 16-byte chunk t % 8 of lines t / 8 + 16 i of each block of 64 columns.
__device__ __forceinline__ void produce(const GroupedWgradParams& p, const WgradTileOrder& order, int tiles,
                                        const PipelineBarriers<1>& barriers, unsigned shared) {
    static_assert(LINES == 4, "a thread's tokens of a stage are one int4");
    constexpr int COLUMNS = GATHER_P ? BM : BN, ROUTED_COLUMNS = BM + BN - COLUMNS;
    const int M = p.rows, N = p.columns;
    auto tile_at = [&](int t) { return t < tiles ? order.tile(t) : WgradTile{}; };
    PipelineState state;
    const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
    const unsigned dst = shared + line * LINE_BYTES + ((chunk ^ (line & 7)) * 16);
    int buffer = 0;
    const unsigned gathered_to = GATHER_P ? 0 : A_BYTES, routed_to = GATHER_P ? A_BYTES : 0;
    const unsigned ld_bytes = static_cast<unsigned>((GATHER_P ? p.ldp : p.ldq) * sizeof(element));
    const int extent = GATHER_P ? M : N, routed_extent = GATHER_P ? N : M;
    int loaded[TOKENS / WARPGROUP];
    WgradTile tile = tile_at(blockIdx.x);
    load_tokens(loaded, p, tile.first_row, tile.end_row);
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
        const WgradTile next = tile_at(t + gridDim.x);
        const int column0 = GATHER_P ? tile.m0 : tile.n0, routed_column0 = GATHER_P ? tile.n0 : tile.m0;
        const bool inside = column0 + COLUMNS <= extent;
        const int routed_half = GATHER_P ? p.q_half : p.p_half;
        const int64 routed_ld = GATHER_P ? p.ldq : p.ldp;
        const element* gathered = (GATHER_P ? p.p : p.q) + tile.half * (GATHER_P ? p.p_half : p.q_half) + column0 + chunk * 8;
        const element* routed = (GATHER_P ? p.q : p.p) + tile.half * routed_half + routed_column0 + chunk * 8;
        auto fill = [&](const int4* buffered, int row, int first_row) {
            const int4 of_lines = buffered[row / LINES + line];
            const int tokens[LINES] = {of_lines.x, of_lines.y, of_lines.z, of_lines.w};
            const unsigned stage = state.stage * STAGE_BYTES, full = barriers.full_of(state.stage);
            const char* token_rows[LINES];  // computed before the wait, because consumers wait for the copies that follow it
#pragma unroll
            for (int i = 0; i < LINES; ++i)
                token_rows[i] = add_product(reinterpret_cast<const char*>(gathered), tokens[i], ld_bytes);
            barriers.wait_empty(state);
            const bool whole = first_row + BK <= tile.end_row;
            if (threadIdx.x == 0) {
                constexpr int BLOCKS = ROUTED_COLUMNS / 64;
                mbarrier_arrive_expect_tx(full, whole ? BLOCKS * LINES_64_BYTES : 0);
                if (whole)
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
                        tma_load_3d(shared + stage + routed_to + block * LINES_64_BYTES, &p.routed,
                                    tile.half * routed_half + routed_column0 + block * 64, first_row, 0, full);
            }
            if (whole && inside) {
#pragma unroll
                for (int i = 0; i < LINES; ++i)
#pragma unroll
                    for (int block = 0; block < COLUMNS / 64; ++block)
                        cp_async_16(dst + stage + gathered_to + block * LINES_64_BYTES + i * LINE_STEP * LINE_BYTES,
                                    token_rows[i] + block * LINE_BYTES, 16);
            } else {
#pragma unroll
                for (int i = 0; i < LINES; ++i) {
                    const int row = first_row + line + LINE_STEP * i;
                    const element* from = reinterpret_cast<const element*>(token_rows[i]);
                    for (int column = 0; column < COLUMNS; column += 64)
                        cp_async_16(dst + stage + gathered_to + column * LINE_BYTES + i * LINE_STEP * LINE_BYTES, from + column,
                                    row < tile.end_row && column0 + chunk * 8 + column < extent ? 16 : 0);
                    if (whole) continue;
                    for (int column = 0; column < ROUTED_COLUMNS; column += 64)
                        cp_async_16(dst + stage + routed_to + column * LINE_BYTES + i * LINE_STEP * LINE_BYTES,
                                    routed + row * routed_ld + column,
                                    row < tile.end_row && routed_column0 + chunk * 8 + column < routed_extent ? 16 : 0);
                }
            }
            cp_async_mbarrier_arrive(full);
            state.advance();
        };
        for_each_stage(p, tile, next, loaded, buffer, fill);
        tile = next;
    }
}

// Runs in the consumer warpgroups.
__device__ __forceinline__ void consume(const GroupedWgradParams& p, const WgradTileOrder& order, int tiles,
                                        const PipelineBarriers<1>& barriers) {
    const int M = p.rows, N = p.columns;
    auto tile_at = [&](int t) { return t < tiles ? order.tile(t) : WgradTile{}; };
    const int warp_row = consumer_warp() * WARP_ROWS;
    PipelineState state;
#if OTHERS
    Epilogue epilogue(p);
#else
    Epilogue epilogue(M, N, p.ldo);
#endif
    WgradTile tile = tile_at(blockIdx.x), next;
    for (int t = blockIdx.x;; t += gridDim.x, tile = next) {
        const bool last = t >= tiles;
        next = tile_at(t + gridDim.x);
        OUT* out = (tile.half ? p.out1 : p.out0) + tile.slice * p.expert_stride;
        const int rows = tile.end_row - tile.first_row;
        if (!last && rows == 0) {
            for (int i = threadIdx.x - WARPGROUP; !ACCUMULATE && i < BM * BN / 8; i += THREADS - WARPGROUP) {
                const int m = tile.m0 + i / (BN / 8), n = tile.n0 + i % (BN / 8) * 8;
#if OTHERS
                if (m < M && n < N) SummedTile(p).store_others(out, m, n);
#else
                const float zeros[8] = {};
                if (m < M && n < N) store_vector8(out + m * p.ldo + n, zeros);
#endif
            }
            continue;
        }
        float acc[FRAGMENTS][4];
        main_loop<false, false>(acc, static_cast<int>(uniform((rows + BK - 1) / BK)), true, state, barriers, epilogue);
        if (last) return;
        epilogue.finish(acc, out, tile.m0 + warp_row, tile.n0);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) ENTRY(const __grid_constant__ GroupedWgradParams p) {
    run_wgrad(p, p.splits);
}
