// Grouped GEMMs over the rows of each expert, Hopper tier: sm_90a, operands in bf16, fp16 or e4m3, sizes that are multiples of
// 8 (paper sections 3.1, 3.2 and 5.2). The source is compiled once per step of the layer. ENTRY is the step's name:
//
//   ENTRY       A (rows)                    B              K segments   EPILOGUE
//   up_fwd      x, gathered by token        w1             1            ActivateRows, or ActivatePairs with INTERLEAVED:
//                                                                       first_layer (a, b), y_swi = V(a) * M(b)
//   down_fwd    y_swi                       w2             1            StoreRows: a column panel; StoreTokenRows if k = 1
//   down_bwd    grad_out, gathered          w2 transposed  1            ActivateBwdRows: first_layer_grad, weighted_y_swi,
//                                                                       row sums for the router weights' gradient
//   up_bwd      first_layer_grad            w1 transposed  2 if gated   StoreRows: a column panel; StoreTokenRows if k = 1
//
// Options, each a macro:
//   BIASED            up_fwd and down_fwd add a bias to the products, in fp32.
//   INTERLEAVED       The columns of w1, of its bias and of first_layer are gate 0, up 0, gate 1, up 1, ... up_bwd then has one
//                     K segment.
//   WEIGHTS_ON_INPUT  The input of an expert is w * x, where w is the row's router weight; see grouped_gemm_sm80.cu.
//   FP8_SAVED         up_fwd writes and down_bwd reads first_layer as e4m3 with scales (saved_scales.cuh).
//   PUSHES            StoreTokenRows stores each row in the memory of the GPU that has the token, as push.cu does for k > 1.
//   LORA              The products of lora_rows, of lora_rows.cu, and of the expert's low-rank factor end the sums, with FP8
//                     after the scales (lora_scaled_sm90.cuh). With LORA_STAGES they have stages of their own, filled by TMA,
//                     which writes zeros past the ranks. With LORA_IN_SPARE the factor's 16 ranks lie in the spare bytes
//                     (lora_spare_sm90.cuh).
//   FP8               A and B are e4m3 with scales (scaled_products_sm90.cuh). up_fwd also writes y_swi as e4m3, and down_bwd
//                     first_layer_grad.
// If the layer's output has a row per slot, slots take the place of tokens in down_fwd and down_bwd: expert_token_indices are
// slots.
//
// R = expert_token_offsets[E] is the number of routed rows. They are in expert order, in arrays that have room for num_slots
// rows. N is the number of columns of the result: h, those of a column panel (see grouped_gemm_sm80.cu), or d. K is the depth
// of one segment.
//
// Launch: a persistent grid of at most one CTA per multiprocessor, THREADS threads, SPARE + SPARE_BYTES bytes of dynamic shared
// memory. With CLUSTER_CTAS = 2 it has an even number, in clusters of 2. A tile has BM = 128 rows and BN = 256 columns of the
// products. In up_fwd of gated layers these are 128 columns of gate, then 128 of up, or 128 pairs. StoreRows and ActivatePairs
// also work with BM = BN = 192, row_tiles of square_tiles.cu, and warpgroup 3 as a third one of consumers.
//
// Warp roles               registers per thread   work
//   warpgroup 0, producer  PRODUCER_REGISTERS     Thread 0: TMA of B, and of A if rows are not gathered; tile scheduler.
//                                                 With GATHER all 128 threads: cp.async of A's rows, 16 bytes each; tile
//                                                 scheduler. StoreTokenRows: warp 1 writes zeros for tokens without an expert.
//   warpgroups 1 and 2,    CONSUMER_REGISTERS     wgmma of 64 rows of the tile each. Between k-steps the epilogue of the
//   consumers                                     previous tile, 16 rows per warp.
//
// Barriers                 arrivals per phase                                      waited on by
//   full[stage]            thread 0, with the bytes of TMA; with GATHER also       consumers, every k-step
//                          the cp.async copies of 128 threads
//   empty[stage]           8 or 12 consumer warps; in a 2-CTA cluster 16 of both   producer threads, every k-step
//   taken[entry]           thread 0; in a 2-CTA cluster with 4 bytes of st.async   producer threads, every tile
//   PRODUCER_BARRIER       128 producer threads, with GATHER                       the same, every QUEUE tiles
//   lora_full, lora_empty  thread 0 with the bytes of TMA; the consumer warps      consumers; thread 0, every tile
//
// Dynamic shared memory: see pipeline_sm90.cuh. A is (BM, BK) operand. B is (BN, BK) with B_K_CONTIGUOUS, else 4 blocks of
// (BK, 64). ActivateBwdRows or TileBias use the spare bytes.
//
// TMA multicast: the two CTAs of a cluster have neighbouring tiles. If both tiles have the same expert and columns, as most
// have, each CTA fetches half of B for both. Otherwise each fetches its own B. In both cases a stage is filled again only after
// the consumers of both CTAs have released it (docs/decisions/004).
#include "gemm_core_sm90.cuh"
#include "tile_scheduler_sm90.cuh"
#if BIASED
#include "tile_bias_sm90.cuh"
#endif
#include "epilogue_bwd_sm90.cuh"
#include "grouped_gemm_params_sm90.cuh"
#if LORA_IN_SPARE
#include "lora_spare_sm90.cuh"
#endif
#if FP8
#include "scaled_products_sm90.cuh"
#endif
[[maybe_unused]] constexpr int LORA_BK = LINE_BYTES / sizeof(element);  // ranks of a stage
#if FP8 && LORA_STAGES
#include "lora_scaled_sm90.cuh"
#endif

typedef EPILOGUE<GroupedGemmParams> Epilogue;
constexpr bool SPLIT = Epilogue::SPLIT;
constexpr int B_PER_COLUMN = Epilogue::PAIRS ? 2 : 1;  // columns of B for each column of the result
static_assert(TILE_COLUMNS == (SPLIT ? BN / 2 : BN / B_PER_COLUMN), "columns of the result in a tile");
static_assert(GATED || !INTERLEAVED, "gate and up alternate");
static_assert(!WEIGHTS_ON_INPUT || !BIASED, "weights would scale the bias too");
static_assert(!(SPLIT && INTERLEAVED), "interleaved columns have ActivatePairs");
static_assert(K_SEGMENTS == 1 || (K_SEGMENTS == 2 && !SPLIT), "b1 is up, or the second K segment");
static_assert(sizeof(operand) == 2 || !STORED_Y_SWI, "e4m3: y_swi is computed again");
static_assert(EXPERT_SCALES == 1 || (EXPERT_SCALES == 2 && FP8), "scales of an expert's weight");
static_assert(CLUSTER_CTAS == 1 || CLUSTER_CTAS == 2, "CTAs of a cluster");
constexpr int B_BOX = BN % 128 ? BN : 128;  // columns of B in a box of the tensor map, with B_K_CONTIGUOUS
static_assert((BM == 128 && BN == 256) || (BM == 192 && BN == 192 && Epilogue::SQUARE && CLUSTER_CTAS == 1),
              "tiles that the epilogue works with");

typedef TileScheduler<TileOrder<GATHER>, CLUSTER_CTAS> Scheduler;

// The CTA's i-th tile has entry i % QUEUE of `queue` and `taken`.
constexpr int QUEUE = 8;
static_assert(QUEUE > STAGES + 1, "an entry is read before it is written again");
__shared__ uint64 barrier_storage[2 * STAGES];
// Tiles, from the producer to the consumers. Thread 0 writes the next tile before it arrives at the full barrier of a tile's
// last stage, and consumers read it when that stage is full. They are at most STAGES tiles behind the producer.
__shared__ WorkTile queue[QUEUE];
// Indices of tiles, from thread 0 to all producer threads; in a cluster from thread 0 of the first CTA to both CTAs. Thread 0
// takes an index while it fills a tile's stages.
__shared__ int taken[QUEUE];
__shared__ uint64 taken_storage[QUEUE];

// At k-step NEXT_TILE_STEP of a tile the producer finds the next tile, and at TAKEN_INDEX_STEP thread 0 passes on the index
// that it has taken; both at the last k-step of a tile with fewer. By then the loads that were issued at the tile's start have
// arrived.
constexpr int NEXT_TILE_STEP = 2, TAKEN_INDEX_STEP = 3;

// GatheredRows and ContiguousRows copy A's rows to a stage. FULL_ARRIVALS: arrivals per phase of a full barrier. TMA_BYTES:
// bytes of A per stage that come by TMA. prepare() loads what a later tile needs, begin() starts this tile, and load() fills
// the A part of a stage. In GatheredRows each producer thread calls load() for its part.
struct GatheredRows {
    // Thread t copies 16-byte chunk t % 8 of lines t / 8 + 16 i.
    static constexpr int FULL_ARRIVALS = WARPGROUP + 1, TMA_BYTES = 0, LINE_STEP = WARPGROUP / 8, LINES = BM / LINE_STEP;
    static_assert(LINES * LINE_STEP == BM, "the producer's threads copy all rows of a tile");
    static_assert(!GATHER || K_SEGMENTS == 1, "load() tells from k0 where the pointers are");
    const operand* const a;
    const int64 lda;
    const int* const expert_token_indices;
    const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
    int tokens[LINES], count;
    const operand* rows[LINES];

    __device__ __forceinline__ void prepare(const WorkTile& tile) {  // lines past the expert's end repeat its last row
#pragma unroll
        for (int i = 0; i < LINES; ++i)
            tokens[i] = expert_token_indices[tile.row + min(line + LINE_STEP * i, max(tile.rows - 1, 0))];
    }
    __device__ __forceinline__ void begin(const WorkTile& tile) {
        count = tile.rows;
#pragma unroll
        for (int i = 0; i < LINES; ++i) rows[i] = a + static_cast<int64>(tokens[i]) * lda + chunk * (16 / int(sizeof(operand)));
    }
    // Copies the thread's chunks of one k-step, `ahead` elements after the row pointers. The results of lines past the expert's
    // end are never stored, so most of these lines are not copied. A nearly full tile copies all lines, without predicates.
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
    // Copies the scales of the tile's lines. Called at its first k-step.
    __device__ __forceinline__ void load_scales(unsigned to, const float* scales) const {
        if (chunk > 0) return;
#pragma unroll
        for (int i = 0; i < LINES; ++i) cp_async_small<4>(to + (line + LINE_STEP * i) * sizeof(float), scales + tokens[i], 4);
    }
    __device__ __forceinline__ void load(unsigned to, int k0, int K, unsigned full) {
        to += line * LINE_BYTES + (chunk ^ (line & 7)) * 16;
        const unsigned bytes = k0 + chunk * (16 / int(sizeof(operand))) < K ? 16 : 0;
        const bool odd = k0 & BK;  // the pointers move after every second k-step
        odd ? copy(to, BK, bytes) : copy(to, 0, bytes);
        cp_async_mbarrier_arrive(full);
        if (odd)
#pragma unroll
            for (int i = 0; i < LINES; ++i) rows[i] += 2 * BK;  // after the copies are issued, because consumers wait for these
    }
};
struct ContiguousRows {
    static constexpr int FULL_ARRIVALS = 1, TMA_BYTES = A_BYTES;
    const TensorMap& a;
    int row;

    __device__ __forceinline__ void prepare(const WorkTile&) {}
    __device__ __forceinline__ void begin(const WorkTile& tile) { row = tile.row; }
    __device__ __forceinline__ void load(unsigned to, int k, int, unsigned full) {
        tma_load_3d(to, &a, k, row, 0, full);  // also rows past the expert's end, whose results are never stored
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

// Thread 0 issues the TMA loads of a stage's B: all of B, or with multicast this CTA's half of it for both CTAs. b_to: the
// shared address of the stage's B. n0: the tile's first column of B. k0: the k-step's first index within the segment. map0,
// map1: gate and up, or the K segments.
__device__ __forceinline__ void load_b(const TensorMap* map0, const TensorMap* map1, unsigned b_to, int segment, int expert,
                                       int n0, int k0, unsigned full, bool multicast, int rank) {
    constexpr int BOX_COLUMNS = B_K_CONTIGUOUS ? B_BOX : 64, HALF = BN / 2;
    auto load_columns = [&](int first_column, int columns, auto load_box) {
#pragma unroll
        for (int column = first_column; column < first_column + columns; column += BOX_COLUMNS) {
            const TensorMap* map = segment || (SPLIT && column >= HALF) ? map1 : map0;
            const int n = n0 + (SPLIT ? column % HALF : column);
            load_box(b_to + column * LINE_BYTES, map, B_K_CONTIGUOUS ? k0 : n, B_K_CONTIGUOUS ? n : k0);
        }
    };
    if (multicast) {
        load_columns(rank * HALF, HALF, [&](unsigned to, const TensorMap* map, int c0, int c1) {
            tma_load_multicast_3d(to, map, c0, c1, expert, full, BOTH_CTAS);
        });
    } else {
        load_columns(0, BN,
                     [&](unsigned to, const TensorMap* map, int c0, int c1) { tma_load_3d(to, map, c0, c1, expert, full); });
    }
}

#if LORA_STAGES
// Fills a tile's stages of a low-rank factor, in the threads of produce(), as that does.
__device__ __forceinline__ void produce_lora(const GroupedGemmParams& p, const WorkTile& tile, bool multicast,
                                             const PipelineBarriers<CLUSTER_CTAS>& barriers, int rank, unsigned shared,
                                             PipelineState& state) {
    const int n0 = tile.column_tile * TILE_COLUMNS * B_PER_COLUMN;
    for (int step = 0; step < p.lora_steps; ++step) {
        const unsigned stage = shared + state.stage * STAGE_BYTES, full = barriers.full_of(state.stage);
        barriers.wait_empty(state);
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(full, A_BYTES + B_BYTES);
            tma_load_3d(stage, &p.lora_rows, step * LORA_BK, tile.row, 0, full);
            load_b(&p.lora0, &p.lora1, stage + A_BYTES, 0, tile.expert, n0, step * LORA_BK, full, multicast, rank);
        }
        if (GATHER) mbarrier_arrive(full);  // as the thread's copies do in other stages
        state.advance();
    }
}
#endif

// Runs in the producer's threads that load: all 128 with GATHER, else thread 0. rank: of the CTA in its cluster. shared: the
// shared address of the stages. K: depth of a segment. steps: k-steps of a tile, over all segments of the weight.
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
                if (!GATHER) rows.load(stage, segment * K + k0, K, full);  // A first: B is more often in the L2 cache
                load_b(&p.b0, &p.b1, stage + A_BYTES, segment, expert, n0, k0, full, scheduler.multicast, rank);
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
#if GATHER && FP8
            if (step == 0) rows.load_scales(shared_address(gathered_scales[number % SCALE_TILES]), p.a_scales);
#endif
            if (GATHER) rows.load(stage, k0, K, full);
            state.advance();
            if (GATHER && step == min(NEXT_TILE_STEP, steps - 1) && next.rows != NO_TILE) rows.prepare(next);
        }
#if LORA_STAGES
        produce_lora(p, scheduler.current, scheduler.multicast, barriers, rank, shared, state);
#endif
#if LORA_IN_SPARE
        if (threadIdx.x == 0) load_lora<SPLIT>(p, queue[number % QUEUE], number & 1, TILE_COLUMNS * B_PER_COLUMN);
#endif
        wait(taken_full, number / QUEUE & 1);
        scheduler.advance(next, taken[number % QUEUE]);
        // Thread 0 must not write the entries again before all threads have read them.
        if (GATHER && number % QUEUE == QUEUE - 1) named_barrier(PRODUCER_BARRIER, WARPGROUP);
    }
}

// A tile of the queue. Only lane 0 reads it, and passes it on to the other lanes. This makes it safe for the producer to
// overwrite the entry after the warp has released the stage: lane 0 has read the entry when it arrives at the empty barrier,
// and lane 1, which arrives in the other CTA of a cluster, has got the value from lane 0.
__device__ __forceinline__ WorkTile read_by_lane_0(const WorkTile& tile) {
    int4 v = {};
    if (threadIdx.x % 32 == 0) v = reinterpret_cast<const int4&>(tile);
    auto to_all = [](int v) { return static_cast<int>(uniform(v)); };  // v is 0 in other lanes
    return {to_all(v.x), to_all(v.y), to_all(v.z), to_all(v.w)};
}

extern "C" __global__ void CLUSTERS __launch_bounds__(THREADS, 1) ENTRY(const __grid_constant__ GroupedGemmParams p) {
    const int rank = CLUSTER_CTAS == 2 ? blockIdx.x & 1 : 0;  // rank of the CTA in its cluster
    const unsigned taken_barriers = shared_address(taken_storage);
    const int column_tiles = (p.columns + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles = p.row_tiles[0] * column_tiles;
    Scheduler scheduler({unsigned(column_tiles)}, p.row_tiles, p.expert_token_offsets, tiles);  // used by the producer
    if (threadIdx.x == 0) {
        queue[0] = scheduler.current;
        for (int i = 0; i < QUEUE; ++i) mbarrier_init(taken_barriers + 8 * i, 1);
#if LORA_IN_SPARE
        init_lora_barriers();
#endif
    }
    const PipelineBarriers<CLUSTER_CTAS> barriers(barrier_storage, Rows::FULL_ARRIVALS);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const int K = p.depth, steps_per_segment = (K + BK - 1) / BK, steps = steps_per_segment * K_SEGMENTS;
#if LORA_STAGES && !FP8
    const int all_steps = steps + p.lora_steps;
#else
    [[maybe_unused]] const int all_steps = steps;
#endif

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

    // The consumers. This part is no function of its own: then the compiler places the loop's exit differently, which takes
    // more instructions.
    const int warp_row = static_cast<int>(uniform(consumer_warp())) * WARP_ROWS;
    PipelineState state;
    Epilogue epilogue(p);
    for (int number = 0;; ++number) {
        const WorkTile now = read_by_lane_0(queue[number % QUEUE]);
        const int rows = now.rows;
        const bool last = rows == NO_TILE, active = warp_row / 64 * 64 < rows;  // active: the warpgroup has rows of the tile
        float acc[FRAGMENTS][4];
#if BIASED
        const TileBias bias;
        const int n0 = now.column_tile * TILE_COLUMNS * B_PER_COLUMN;
        if (active) bias.fetch<SPLIT>(p, now.expert, n0, p.columns * B_PER_COLUMN);
#endif
#if FP8
        const ExpertScales expert_scales(p.b_scales, now.expert, active);
#endif
#if LORA_IN_SPARE
        const LoraInSpare lora(p, now, warp_row, number);
#endif
#if FP8 && !GATHER
        RowScales scales(p.a_scales, p.scales_ld, now, warp_row, steps_per_segment, expert_scales);
        promoting_main_loop(acc, last ? 0 : steps, active, state, barriers, epilogue, scales);
#elif LORA_IN_SPARE && !FP8
        main_loop<true, B_K_CONTIGUOUS>(acc, last ? 0 : all_steps, active, state, barriers, epilogue, lora);
        if (!last) lora.release();
#else
        main_loop<true, B_K_CONTIGUOUS>(acc, last ? 0 : all_steps, active, state, barriers, epilogue);
#endif
        if (last) return;
#if FP8
        constexpr bool SCALES_LATER = GATHER && Epilogue::SCALES_ROWS;
        [[maybe_unused]] const float* const row_scales = GATHER ? gathered_scales[number % SCALE_TILES] + warp_row : nullptr;
        if (GATHER && !SCALES_LATER && active) scale_rows(acc, row_scales, expert_scales);
#endif
#if BIASED
        if (active) bias.add_to(acc);
#endif
#if FP8 && LORA_STAGES
        add_lora_stages<!SCALES_LATER>(acc, p.lora_steps, active, state, barriers, row_scales, expert_scales);
#elif FP8 && LORA_IN_SPARE
        static_assert(!SCALES_LATER, "the accumulators are scaled");
        lora.multiply(acc, active);
        lora.release();
#endif
        if (active) epilogue.finished.put(acc);
        const WorkTile tile = read_by_lane_0(queue[number % QUEUE]);
        if (tile.rows <= 0) continue;
#if FP8 && GATHER
        epilogue.take_scales(row_scales, expert_scales.first, tile.expert);
#endif
        epilogue.begin(tile.row + warp_row, min(WARP_ROWS, tile.rows - warp_row), tile.column_tile * TILE_COLUMNS);
    }
}
