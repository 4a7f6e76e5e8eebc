// Grouped GEMMs over the rows of each expert, Hopper tier: sm_90a, bf16 and fp16, sizes that are multiples of 8
// (paper sections 3.1, 3.2, 5.2). One source, compiled once per step of the layer; ENTRY is the step's name:
//
//   ENTRY       A (rows)                    B              K segments   EPILOGUE
//   up_fwd      x, gathered by token        w1             1            ActivateRows: first_layer (a, b), y_swi = V(a) * M(b);
//                                                              ActivatePairs if interleaved
//   down_fwd    y_swi                       w2             1            StoreRows: a column panel; StoreTokenRows if k = 1
//   down_bwd    grad_out, gathered          w2 transposed  1            ActivateBwdRows: first_layer_grad, weighted_y_swi, sums
//   up_bwd      first_layer_grad            w1 transposed  2 if gated   StoreRows: a column panel; StoreTokenRows if k = 1
//
// With BIASED up_fwd and down_fwd add a bias to the products, in fp32. With INTERLEAVED the columns of w1, of its bias and of
// first_layer are gate 0, up 0, gate 1, up 1, ...; up_bwd then has one K segment. With WEIGHTS_ON_INPUT up_fwd adds no bias.
// With FP8_SAVED, which only they may have, up_fwd and down_bwd keep and read first_layer as e4m3 with scales (fp8.cuh).
// A layer whose output has a row per slot is one of k = 1 to down_fwd and down_bwd: expert_token_indices are slots there.
//
// R = expert_token_offsets[E] routed rows of num_slots = L*k, N columns (of h, of the panel or of d), K depth of one segment.
//
// Launch: a persistent grid of at most one CTA per multiprocessor; THREADS threads; dynamic shared memory
// SPARE + SPARE_BYTES. With CLUSTER_CTAS = 2 clusters of 2 CTAs, and an even number of CTAs.
// A tile has BM = 128 rows and BN = 256 columns, in gated layers' up_fwd 128 of gate beside 128 of up, or 128 pairs.
//
// Warp roles               registers per thread       work
//   warpgroup 0, producer  PRODUCER_REGISTERS = 72    thread 0: TMA of B, and of A where rows are not gathered; tile scheduler.
//                                                     With GATHER all 128 threads: cp.async of A's rows, 16 bytes each.
//                                                     StoreTokenRows: warp 1 writes zeros for tokens without an expert.
//   warpgroups 1 and 2,    CONSUMER_REGISTERS = 216   wgmma of 64 rows of the tile each; between k-steps the epilogue of the
//   consumers                                         previous tile, 16 rows per warp
//
// Barriers                 arrivals per phase                                      waited on by
//   full[stage]            thread 0, with the bytes of TMA; with GATHER also       consumers, every k-step
//                          the cp.async copies of 128 threads
//   empty[stage]           8 consumer warps; in a 2-CTA cluster the 16 of both     producer threads, every k-step
//   taken[entry]           thread 0; in a 2-CTA cluster with 4 bytes of st.async   producer threads, every tile
//   PRODUCER_BARRIER       128 producer threads, with GATHER                       the same, every QUEUE tiles
//
// Dynamic shared memory: see pipeline_sm90.cuh. A is (BM, BK) element. B is (BN, BK) with B_K_CONTIGUOUS, else 4 blocks of
// (BK, 64). The spare bytes are ActivateBwdRows' or TileBias'.
//
// TMA multicast: the two CTAs of a cluster have neighbouring tiles. If these have the same expert and columns, as most have, each
// CTA fetches half of B for both. Else each fetches its own B. In both cases a stage is filled again when the consumers of both
// CTAs have released it (docs/decisions/004).
#include "gemm_core_sm90.cuh"
#include "tile_scheduler_sm90.cuh"

#if !defined(EPILOGUE) || !defined(GATED) || !defined(ACTIVATION) || !defined(GATHER) || !defined(B_K_CONTIGUOUS) ||  \
    !defined(K_SEGMENTS) || !defined(TILE_COLUMNS) || !defined(WEIGHTS_ON_INPUT) || !defined(STORED_Y_SWI) ||         \
    !defined(CLUSTER_CTAS) || !defined(WEIGHT) || !defined(INTERLEAVED) || !defined(CONSTANTS) || !defined(BIASED) || \
    !defined(BIAS) || (defined(OPERAND) && !defined(EXPERT_SCALES))
#error \
    "EPILOGUE, GATED, ACTIVATION, GATHER, B_K_CONTIGUOUS, K_SEGMENTS, TILE_COLUMNS, WEIGHTS_ON_INPUT, STORED_Y_SWI, \
CLUSTER_CTAS, WEIGHT, INTERLEAVED, CONSTANTS, BIASED and BIAS, of e4m3 EXPERT_SCALES, are given by loader.gemm_variant"
#endif
#ifndef GROUP_COLUMNS
#error "GROUP_COLUMNS is given by launch_config.py"
#endif
#include "activation.cuh"  // has the fields of its constants

typedef WEIGHT weight_t;
#if FP8_SAVED
#include "fp8.cuh"
typedef unsigned char saved_t;
#else
typedef element saved_t;
#endif

struct GroupedGemmParams {
#if !GATHER
    TensorMap a;  // (lda, R, 1) operand, in, boxes of BK x 128 x 1; K segment i begins at column i * depth
#endif
    TensorMap b0, b1;  // operand, in: (k, n, expert) with B_K_CONTIGUOUS in boxes of BK x 128 x 1, else
                       // (n, k, expert) in boxes of 64 x 64 x 1; gate and up, or K segments 0 and 1
#if GATHER
    const operand* a;  // (L, lda) operand, in: the rows of tokens
#endif
    const int* expert_token_indices;  // (num_slots,) int32, in
    const int* expert_token_offsets;  // (E+1,) int32, in
    const int* row_tiles;             // (T+1, 2) int32, in: [0] = (count, BM), then (expert, first row)
    saved_t* first_layer;             // (R, 2N) or (R, N) element, a then b, or pairs of both with INTERLEAVED: out of
                                      // ActivateRows (null: not kept), into ActivateBwdRows; SavedScales with FP8_SAVED
    element* first_layer_grad;        // (R, 2N) or (R, N) element, out; without FP8_SAVED it may be first_layer itself; null: not
                                      // wanted
    element* result;                  // element, out.
                                      // ActivateRows: (R, N) y_swi, null: not wanted
                                      // ActivateBwdRows: (R, N) weighted_y_swi, may be y_swi itself, null: not wanted
                                      // StoreRows: the panel (R, result_ld); may be A's memory if N <= BN: the tile that is
                                      // stored was the last reader of its rows
                                      // StoreTokenRows: (L, result_ld), zeros for tokens without an expert
    const element* y_swi;             // (R, N) element, in: ActivateBwdRows with STORED_Y_SWI, act(a) * b of forward
    const weight_t* weights;          // in: ActivateBwdRows, and ActivateRows WEIGHTS_ON_INPUT: (R,) fp32, the router weight of
                                      // each row; StoreTokenRows: (L,) weight_t, of each token, or null
    float* partial_sums;              // (column tiles, num_slots) fp32, out of ActivateBwdRows: its sums over each BN columns;
                                      // null: not wanted
    const int* token_index_map;       // (L,) int32, in: StoreTokenRows, below 0 for tokens without an expert
    int* tile_counter;                // (1,) int32, in and out, zero at launch: of the dynamic schedule; null: static schedule
#ifdef OPERAND
    const float* a_scales;    // fp32, in. GATHER: (L,), of tokens. Else (k-steps, scales_ld): of each row and BK columns of a K
                              // segment
    const float* b_scales;    // (E, EXPERT_SCALES) fp32, in: of the expert's weight, or of its gate and its up
    operand* quantised;       // operand, out, or null: not wanted. ActivateRows: (R, N) y_swi; ActivateBwdRows: (R, 2N) or (R, N)
                              // first_layer_grad
    float* quantised_scales;  // (groups, scales_ld) fp32, out: of each row and GROUP_COLUMNS columns of each half of quantised
#endif
#if BIASED
    const BIAS *bias0, *bias1;  // per expert as many as B has columns, BIAS, in: SPLIT: gate's and up's; else bias0 alone
#endif
#if GATHER
    int64 lda;  // elements from row to row of a
#endif
    int64 result_ld;  // elements from row to row of result, StoreRows and StoreTokenRows only
#ifdef OPERAND
    int64 scales_ld;  // elements from one group of columns to the next, of scales of rows; at least R
#endif
#if BIASED
    int64 bias_stride;  // elements of a bias from expert to expert
#endif
    int columns, depth;   // N, and K of one segment
    int num_slots;        // L*k, or max_slots if that bounds the rows, but of rows that go to tokens L
    ACTIVATION_CONSTANTS  // of the activations' epilogues
};

#include "epilogue_bwd_sm90.cuh"  // works on the parameters
#ifdef OPERAND
#include "scaled_products_sm90.cuh"
#endif

typedef EPILOGUE Epilogue;
constexpr bool SPLIT = Epilogue::SPLIT;                // gate beside up
constexpr int B_PER_COLUMN = Epilogue::PAIRS ? 2 : 1;  // columns of B for one of the result
static_assert(TILE_COLUMNS == (SPLIT ? BN / 2 : BN / B_PER_COLUMN), "columns of the result in a tile");
static_assert(GATED || !INTERLEAVED, "gate and up alternate");
static_assert(!WEIGHTS_ON_INPUT || !BIASED, "weights would scale the bias too");
static_assert(!(SPLIT && INTERLEAVED), "interleaved columns have ActivatePairs");
static_assert(K_SEGMENTS == 1 || (K_SEGMENTS == 2 && !SPLIT), "b1 is up, or the second K segment");
static_assert(sizeof(operand) == 2 || (!INTERLEAVED && !STORED_Y_SWI), "e4m3 products know halves, and compute y_swi again");
static_assert(CLUSTER_CTAS == 1 || CLUSTER_CTAS == 2, "CTAs of a cluster");

typedef TileScheduler<TileOrder<GATHER>, CLUSTER_CTAS> Scheduler;

// Entry i % QUEUE is of the CTA's i-th tile.
constexpr int QUEUE = 8;
static_assert(QUEUE > STAGES + 1, "an entry is read before it is written again");
__shared__ uint64 barrier_storage[2 * STAGES];
// Tiles for the consumers. Thread 0 writes the next tile before it announces the last stage of a tile. Consumers read it when
// that stage is full. They are at most STAGES tiles behind.
__shared__ WorkTile queue[QUEUE];
// Indices that thread 0, of a cluster's first CTA, has taken for all producer threads while it fills the tile's stages.
__shared__ int taken[QUEUE];
__shared__ uint64 taken_storage[QUEUE];

// K-steps of a tile, or its last one if it has fewer: the producer finds the next tile, and thread 0 passes on the index that it
// has taken from the counter. By then the loads that were issued at the tile's start have arrived.
constexpr int NEXT_TILE_STEP = 2, TAKEN_INDEX_STEP = 3;

// How A's rows come to a stage. FULL_ARRIVALS: of the stage's full barrier. TMA_BYTES: that it expects of A. prepare() is given a
// tile early; begin() makes it the current one; load() fills a stage, or in GatheredRows this thread's part of it.
struct GatheredRows {
    // Thread t copies 16-byte chunk t % 8 of lines t / 8 + 16 i.
    static constexpr int FULL_ARRIVALS = WARPGROUP + 1, TMA_BYTES = 0, LINES = 8, LINE_STEP = WARPGROUP / 8;
    static_assert(LINES * LINE_STEP == BM, "the producer's threads copy all rows of a tile");
    static_assert(!GATHER || K_SEGMENTS == 1, "load() tells from k0 where the pointers are");
    const operand* const a;
    const int64 lda;
    const int* const expert_token_indices;
    const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
    int tokens[LINES], count;
    const operand* rows[LINES];

    __device__ __forceinline__ void prepare(const WorkTile& tile) {  // past the expert's end its last row again
#pragma unroll
        for (int i = 0; i < LINES; ++i)
            tokens[i] = expert_token_indices[tile.row + min(line + LINE_STEP * i, max(tile.rows - 1, 0))];
    }
    __device__ __forceinline__ void begin(const WorkTile& tile) {
        count = tile.rows;
#pragma unroll
        for (int i = 0; i < LINES; ++i) rows[i] = a + static_cast<int64>(tokens[i]) * lda + chunk * (16 / int(sizeof(operand)));
    }
    // A k-step's columns, `ahead` elements after the pointers. Lines past the expert's end are never stored, so most of them are
    // not fetched; a nearly full tile takes all lines, without predicates.
    __device__ __forceinline__ void copy(unsigned to, int ahead, unsigned bytes) const {
        if (count > BM - LINE_STEP) {
#pragma unroll
            for (int i = 0; i < LINES; ++i) cp_async_16(to + i * LINE_STEP * LINE_BYTES, rows[i] + ahead, bytes);
        } else {
#pragma unroll
            for (int i = 0; i < LINES; ++i)
                if (i * LINE_STEP < count) cp_async_16(to + i * LINE_STEP * LINE_BYTES, rows[i] + ahead, bytes);
        }
    }
    // Scales of the tile's lines, at its first k-step.
    __device__ __forceinline__ void load_scales(unsigned to, const float* scales) const {
        if (chunk > 0) return;
#pragma unroll
        for (int i = 0; i < LINES; ++i) cp_async_small<4>(to + (line + LINE_STEP * i) * sizeof(float), scales + tokens[i], 4);
    }
    __device__ __forceinline__ void load(unsigned to, int k0, int K, unsigned full) {
        to += line * LINE_BYTES + (chunk ^ (line & 7)) * 16;
        const unsigned bytes = k0 + chunk * (16 / int(sizeof(operand))) < K ? 16 : 0;
        const bool odd = k0 & BK;  // the pointers move every other step
        odd ? copy(to, BK, bytes) : copy(to, 0, bytes);
        cp_async_mbarrier_arrive(full);
        if (odd)
#pragma unroll
            for (int i = 0; i < LINES; ++i) rows[i] += 2 * BK;  // after the copies, for which the consumers wait
    }
};
struct ContiguousRows {
    static constexpr int FULL_ARRIVALS = 1, TMA_BYTES = A_BYTES;
    const TensorMap& a;
    int row;

    __device__ __forceinline__ void prepare(const WorkTile&) {}
    __device__ __forceinline__ void begin(const WorkTile& tile) { row = tile.row; }
    __device__ __forceinline__ void load(unsigned to, int k, int, unsigned full) {  // rows past the expert's end are never stored
        tma_load_3d(to, &a, k, row, 0, full);
    }
};

#if GATHER
typedef GatheredRows Rows;
#define A_ROWS {p.a, p.lda, p.expert_token_indices}
#else
typedef ContiguousRows Rows;
#define A_ROWS {p.a}
#endif
#if CLUSTER_CTAS == 2
#define CLUSTERS __cluster_dims__(CLUSTER_CTAS)
#else
#define CLUSTERS
#endif

// Thread 0 asks TMA for a stage's B, all of it or with multicast this CTA's half of it. b_to: shared address; n0: of B's columns;
// k0: of the segment.
__device__ __forceinline__ void load_b(const GroupedGemmParams& p, unsigned b_to, int segment, int expert, int n0, int k0,
                                       unsigned full, bool multicast, int rank) {
    constexpr int BOX_COLUMNS = B_K_CONTIGUOUS ? 128 : 64, HALF = BN / 2;
    auto load_half = [&](int first_column, auto load_box) {
#pragma unroll
        for (int column = first_column; column < first_column + HALF; column += BOX_COLUMNS) {
            const TensorMap* map = segment || (SPLIT && column >= HALF) ? &p.b1 : &p.b0;
            const int n = n0 + (SPLIT ? column % HALF : column);
            load_box(b_to + column * LINE_BYTES, map, B_K_CONTIGUOUS ? k0 : n, B_K_CONTIGUOUS ? n : k0);
        }
    };
    if (multicast) {
        load_half(rank * HALF, [&](unsigned to, const TensorMap* map, int c0, int c1) {
            tma_load_multicast_3d(to, map, c0, c1, expert, full, BOTH_CTAS);
        });
    } else {
        auto load_box = [&](unsigned to, const TensorMap* map, int c0, int c1) { tma_load_3d(to, map, c0, c1, expert, full); };
        load_half(0, load_box);
        load_half(HALF, load_box);
    }
}

// The producer's threads that have something to load. rank: of the CTA in its cluster. shared: the address of the stages.
// K: of a segment. steps: of a tile, over all segments.
__device__ __forceinline__ void produce(const GroupedGemmParams& p, Scheduler& scheduler,
                                        const PipelineBarriers<CLUSTER_CTAS>& barriers, int rank, unsigned shared, int K,
                                        int steps_per_segment, int steps, PipelineState& state) {
    const unsigned taken_barriers = shared_address(taken_storage);
    Rows rows = A_ROWS;
    if (scheduler.valid()) rows.prepare(scheduler.current);
    for (int number = 0; scheduler.valid(); ++number) {
        const unsigned taken_to = shared_address(&taken[number % QUEUE]), taken_full = taken_barriers + 8 * (number % QUEUE);
        const bool takes = threadIdx.x == 0 && rank == 0;
        const int index = takes ? scheduler.take_index(p.tile_counter) : 0;
        if (CLUSTER_CTAS == 2 && threadIdx.x == 0) mbarrier_arrive_expect_tx(taken_full, sizeof(int));
        const int expert = scheduler.current.expert, n0 = scheduler.current.column_tile * TILE_COLUMNS * B_PER_COLUMN;
        rows.begin(scheduler.current);
        scheduler.prefetch();
        WorkTile next;
        for (int step = 0; step < steps; ++step) {
            const int segment = K_SEGMENTS == 2 && step >= steps_per_segment, k0 = (step - segment * steps_per_segment) * BK;
            const unsigned stage = shared + state.stage * STAGE_BYTES, full = barriers.full_of(state.stage);
            barriers.wait_empty(state);
            if (step == min(NEXT_TILE_STEP, steps - 1)) next = scheduler.next();
            if (threadIdx.x == 0) {
                if (step == steps - 1) queue[(number + 1) % QUEUE] = next;
                mbarrier_arrive_expect_tx(full, B_BYTES + Rows::TMA_BYTES);
                if (!GATHER) rows.load(stage, segment * K + k0, K, full);  // A first: its rows come from farther than B
                load_b(p, stage + A_BYTES, segment, expert, n0, k0, full, scheduler.multicast, rank);
                if (step == min(TAKEN_INDEX_STEP, steps - 1) && takes) {
                    if constexpr (CLUSTER_CTAS == 1) {
                        taken[number % QUEUE] = index;
                        mbarrier_arrive(taken_full);
                    } else {
#pragma unroll
                        for (int cta = 0; cta < CLUSTER_CTAS; ++cta)
                            store_async(cluster_address(taken_to, cta), index + cta, cluster_address(taken_full, cta));
                    }
                }
            }
#if GATHER && defined(OPERAND)
            if (step == 0) rows.load_scales(shared_address(gathered_scales[number % SCALE_TILES]), p.a_scales);
#endif
            if (GATHER) rows.load(stage, k0, K, full);
            state.advance();
            if (GATHER && step == min(NEXT_TILE_STEP, steps - 1) && next.rows != NO_TILE) rows.prepare(next);
        }
        wait(taken_full, number / QUEUE & 1);
        scheduler.advance(next, taken[number % QUEUE]);
        // All threads have read the entries before thread 0 writes them again.
        if (GATHER && number % QUEUE == QUEUE - 1) named_barrier(PRODUCER_BARRIER, WARPGROUP);
    }
}

// A tile of the queue, read by lane 0 alone. When the producer finds a stage empty, lane 0 of each consumer warp has read the
// entry, and lane 1, which arrives in the other CTA of the cluster, has its value.
__device__ __forceinline__ WorkTile read_by_lane_0(const WorkTile& tile) {
    int4 v = {};
    if (threadIdx.x % 32 == 0) v = reinterpret_cast<const int4&>(tile);
    auto to_all = [](int v) { return static_cast<int>(uniform(v)); };  // zeros in the other lanes
    return {to_all(v.x), to_all(v.y), to_all(v.z), to_all(v.w)};
}

extern "C" __global__ void CLUSTERS __launch_bounds__(THREADS, 1) ENTRY(const __grid_constant__ GroupedGemmParams p) {
    const int rank = CLUSTER_CTAS == 2 ? blockIdx.x & 1 : 0;  // in the cluster
    const unsigned taken_barriers = shared_address(taken_storage);
    const int column_tiles = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles = p.row_tiles[0] * column_tiles;
    Scheduler scheduler({unsigned(column_tiles)}, p.row_tiles, p.expert_token_offsets, tiles);  // the producer's
    if (threadIdx.x == 0) {
        queue[0] = scheduler.current;
        for (int i = 0; i < QUEUE; ++i) mbarrier_init(taken_barriers + 8 * i, 1);
    }
    const PipelineBarriers<CLUSTER_CTAS> barriers(barrier_storage, Rows::FULL_ARRIVALS);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const int K = p.depth, steps_per_segment = (K + BK - 1) / BK, steps = steps_per_segment * K_SEGMENTS;

    if (threadIdx.x < WARPGROUP) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (!GATHER && threadIdx.x > 0) {
            if (threadIdx.x / 32 == 1) Epilogue::idle_producer_warp(p);
            return;
        }
        PipelineState state;
        produce(p, scheduler, barriers, rank, shared, K, steps_per_segment, steps, state);
        // The other CTA's consumers arrive at this CTA's empty barriers, so this CTA must not exit before they have.
        for (int stage = 0; CLUSTER_CTAS == 2 && stage < STAGES; ++stage) {
            barriers.wait_empty(state);
            state.advance();
        }
        return;
    }
    setmaxnreg_inc<CONSUMER_REGISTERS>();

    // Consumers. As a function this part has more instructions: the compiler places the loop's exit differently.
    const int warp_row = static_cast<int>(uniform(consumer_warp())) * WARP_ROWS;
    PipelineState state;
    Epilogue epilogue(p);
    for (int number = 0;; ++number) {
        const WorkTile now = read_by_lane_0(queue[number % QUEUE]);
        const int rows = now.rows;
        const bool last = rows == NO_TILE, active = warp_row / 64 * 64 < rows;  // of the warpgroup
        float acc[32][4];
#if BIASED
        const TileBias bias;
        const int n0 = now.column_tile * TILE_COLUMNS * B_PER_COLUMN;
        if (active) bias.fetch<SPLIT>(p, now.expert, n0, p.columns * B_PER_COLUMN);
#endif
#ifdef OPERAND
        const ExpertScales expert_scales(p.b_scales, now.expert, active);
#endif
#if defined(OPERAND) && !GATHER
        RowScales scales(p.a_scales, p.scales_ld, now, warp_row, steps_per_segment, expert_scales);
        promoting_main_loop(acc, last ? 0 : steps, active, state, barriers, epilogue, scales);
#else
        main_loop<true, B_K_CONTIGUOUS>(acc, last ? 0 : steps, active, state, barriers, epilogue);
#endif
        if (last) return;
#if defined(OPERAND) && GATHER
        const float* const row_scales = gathered_scales[number % SCALE_TILES] + warp_row;
        if (!Epilogue::SCALES_ROWS && active) scale_rows(acc, row_scales, expert_scales);
#endif
#if BIASED
        if (active) bias.add_to(acc);
#endif
        if (active) epilogue.finished.put(acc);
        const WorkTile tile = read_by_lane_0(queue[number % QUEUE]);
        if (tile.rows <= 0) continue;
#if defined(OPERAND) && GATHER
        epilogue.take_scales(row_scales, expert_scales.first);
#endif
        epilogue.begin(tile.row + warp_row, min(WARP_ROWS, tile.rows - warp_row), tile.column_tile * TILE_COLUMNS);
    }
}
