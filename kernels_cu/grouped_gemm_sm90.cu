// Grouped GEMMs over the rows of each expert, Hopper tier (sm_90a, bf16 and fp16, sizes that are multiples of 8): the steps of
// grouped_gemm_sm80.cu, with its results, on wgmma and the bulk copy engine. (Paper sections 3.1, 3.2, 5.2.)
//
// Launch: a persistent grid of at most one block per multiprocessor, THREADS threads, dynamic shared memory as below. CLUSTER_CTAS:
// blocks work in pairs, clusters of two, and their number is even.
// Tile: BM = 128 rows x BN = 256 columns (of them 128 gate beside 128 up), K in steps of BK = 64. Shared memory: STAGES = 3
// buffers of STAGE_BYTES = 48 KiB, TILE_BYTES = 64 KiB of the finished tile, and SPARE_BYTES = 16 KiB for the a and b that
// ActivateBwdRows reads, two rows per warp.
//   warpgroup 0, producer: thread 0 issues B's boxes, announces their bytes, claims tiles and says which comes next. A's rows
//     it fetches as one box; with GATHER all 128 threads copy them by cp.async into the 128-byte swizzle. full[s] expects
//     thread 0's arrival and with GATHER 128 more, and who has waited for a tile's last one may read on. A claim reaches the
//     threads, of a pair those of both blocks, through claimed[] and the barrier of its place there, which expects thread 0's
//     arrival, in a pair with 4 bytes. StoreTokenRows: warp 1 writes the zeros.
//   warpgroups 1 and 2, consumers: see gemm_core_sm90.cuh.
// A pair has two neighbouring tiles at a time. If they are of the same columns, as most are, each block fetches half of B for
// both, and the L2 cache gives 32 KiB per block and step in place of 48; if not, each its own. Either way a stage is filled
// when the consumers of both have released it. (DeepSeek-V3, up_fwd 544 -> 587 TFLOP/s, down_bwd 499 -> 540. A step's wait
// for the other block costs more where tiles are short: conf2 610 -> 595 and 420 -> 406.)
#include "gemm_core_sm90.cuh"

#if !defined(EPILOGUE) || !defined(GATED) || !defined(ACTIVATION) || !defined(GATHER) || !defined(B_K_CONTIGUOUS) || \
    !defined(K_SEGMENTS) || !defined(TILE_COLUMNS) || !defined(STORED_Y_SWI) || !defined(CLUSTER_CTAS) || !defined(WEIGHT)
#error "EPILOGUE, GATED, ACTIVATION, GATHER, B_K_CONTIGUOUS, K_SEGMENTS, TILE_COLUMNS, STORED_Y_SWI, CLUSTER_CTAS and WEIGHT are \
given by loader.gemm_variant"
#endif

typedef WEIGHT weight_t;

struct GroupedGemmParams {
#if !GATHER
    TensorMap a;  // (lda, R, 1) element, in, boxes of 64 x 128 x 1: K segment i from column i * depth on
#endif
    TensorMap b0, b1;                 // element, in: (k, n, expert) with B_K_CONTIGUOUS, else (n, k, expert), boxes of
                                      // 64 x 128 x 1 or 64 x 64 x 1, 128-byte swizzle; gate and up, or K segments 0 and 1
#if GATHER
    const element* a;                 // (L, lda) element, in: the rows of tokens
#endif
    const int* expert_token_indices;  // (num_slots,) int32, in
    const int* expert_token_offsets;  // (E+1,) int32, in
    const int* row_tiles;             // (T+1, 2) int32, in: [0] = (count, BM), then (expert, first row)
    element* first_layer;             // (R, 2N) or (R, N) element, a then b: out of ActivateRows (null: not kept), into
                                      // ActivateBwdRows
    element* first_layer_grad;        // as first_layer, out; may be first_layer itself; null: not wanted
    element* result;                  // element, out. ActivateRows: (R, N) act(a) * b, null: not wanted; ActivateBwdRows: (R, N)
                                      // A' = weight * act(a) * b, null: not wanted; StoreRows: the panel (R, result_ld), which
                                      // may be A's own, of up to BN columns: the tile that is stored was their last reader;
                                      // StoreTokenRows (k = 1): (L, result_ld), a row its token's, times the token's weight,
                                      // and zeros for tokens without an expert
    const element* y_swi;    // (R, N) element, in: ActivateBwdRows with STORED_Y_SWI, act(a) * b of forward
    const weight_t* weights;          // ActivateBwdRows: (R,) fp32, in: the router weight of each row; StoreTokenRows: (L,)
                                      // weight_t, in: of each token, or null
    float* partial_sums;              // (column tiles, num_slots) fp32, out: ActivateBwdRows, <dA, A> over each BN columns; null:
                                      // not wanted
    const int* token_index_map;       // (L,) int32, in: StoreTokenRows, -1 of tokens without an expert
    int* tile_counter;                // (1,) int32, zeroed: blocks claim their tiles; null: each takes every gridDim.x-th
#if GATHER
    int64 lda;                        // elements from row to row of a
#endif
    int64 result_ld;                 // elements from row to row of product, StoreRows and StoreTokenRows only
    int columns, depth;               // N, and K of one segment
    int num_slots;                    // L*k
};

#include "epilogue_sm90.cuh"  // works on the parameters

typedef EPILOGUE Epilogue;
constexpr bool SPLIT = Epilogue::SPLIT;  // gate beside up
constexpr int BLOCKS = CLUSTER_CTAS;
static_assert(TILE_COLUMNS == (SPLIT ? BN / 2 : BN), "columns of the result in a tile");
static_assert(K_SEGMENTS == 1 || (K_SEGMENTS == 2 && !SPLIT), "b1 is up, or the second K segment");

// An expert's row tiles, in even groups of about 16, by all column tiles: what runs at one time is near a square, which reads
// the fewest bytes, and the weights of an expert with few tokens come from memory once. In groups of 2 where rows are not
// gathered and the columns a panel's: tiles of the same rows run side by side (TFLOP/s of down_fwd and up_bwd in 16: conf3 612
// and 634, in ones 620 and 641; conf4t 658 and 656, 660 and 682).
struct Order {
    unsigned n_tiles;
    __device__ __forceinline__ int listed(int t) const { return unsigned(t) / n_tiles; }
    struct Group {
        unsigned start, rows, within;  // the expert's row tiles from start on, and which of the group's tiles t is
    };
    __device__ __forceinline__ Group group(int t, int2 entry, int first, int end) const {
        const unsigned about = GATHER || n_tiles > 8 ? 16 : 2;
        const unsigned tiles = max((end - first + BM - 1) / BM, 1), index = unsigned(entry.y - first) / BM;
        const unsigned groups = max((tiles + about / 2) / about, 1u), height = (tiles + groups - 1) / groups;
        const unsigned start = index / height * height;
        return {start, min(height, tiles - start), t - (listed(t) - index + start) * n_tiles};
    }
    __device__ __forceinline__ Place place(int t, int2 entry, int first, int end) const {
        const Group g = group(t, entry, first, end);
        return {entry.x, first + static_cast<int>(g.start + g.within % g.rows) * BM, static_cast<int>(g.within / g.rows)};
    }
    __device__ __forceinline__ bool shares(int t, int2 entry, int first, int end) const {
        const Group g = group(t, entry, first, end);  // another group's tile would be before the first, or past the last column
        return (g.within + 1 - 2 * (t & 1)) / g.rows == g.within / g.rows;
    }
};

// How A's rows come to a stage. look_up() is told a tile early what begin() then begins; load() adds ARRIVALS - 1 arrivals and
// BYTES to what the stage's barrier is to see.
struct GatheredRows {
    static constexpr int ARRIVALS = 128 + 1, BYTES = 0, LINES = 8;  // thread t copies chunk t % 8 of lines t / 8 + 16 i
    const element* const a;
    const int64 lda;
    const int* const expert_token_indices;
    const int line = threadIdx.x / 8, chunk = threadIdx.x & 7;
    int tokens[LINES], count;
    const element* rows[LINES];

    __device__ __forceinline__ void look_up(const Found& tile) {  // past the expert's end its last row again
#pragma unroll
        for (int i = 0; i < LINES; ++i)
            tokens[i] = expert_token_indices[tile.place.row + min(line + 16 * i, max(tile.rows - 1, 0))];
    }
    __device__ __forceinline__ void begin(const Found& tile) {
        count = tile.rows;
#pragma unroll
        for (int i = 0; i < LINES; ++i) rows[i] = a + static_cast<int64>(tokens[i]) * lda + chunk * 8;
    }
    static_assert(!GATHER || K_SEGMENTS == 1, "load() tells from k0 where the pointers are");
    // A step's columns, `ahead` of the pointers. Lines past the expert's end are never stored: of few rows most are not fetched.
    __device__ __forceinline__ void copy(unsigned to, int ahead, unsigned bytes) const {
        if (count > BM - 16) {
#pragma unroll
            for (int i = 0; i < LINES; ++i) cp_async_16(to + i * 16 * 128, rows[i] + ahead, bytes);
        } else {
#pragma unroll
            for (int i = 0; i < LINES; ++i)
                if (i * 16 < count) cp_async_16(to + i * 16 * 128, rows[i] + ahead, bytes);
        }
    }
    __device__ __forceinline__ void load(unsigned to, int k0, int K, unsigned full) {
        to += line * 128 + (chunk ^ (line & 7)) * 16;
        const unsigned bytes = k0 + chunk * 8 < K ? 16 : 0;
        const bool odd = k0 & BK;  // the pointers move every other step
        odd ? copy(to, BK, bytes) : copy(to, 0, bytes);
        cp_async_mbarrier_arrive(full);
        if (odd)
#pragma unroll
            for (int i = 0; i < LINES; ++i) rows[i] += 2 * BK;  // here, as consumers wait for what follows a wait
    }
};
struct OwnRows {
    static constexpr int ARRIVALS = 1, BYTES = A_BYTES;
    const TensorMap& a;
    int row;

    __device__ __forceinline__ void look_up(const Found&) {}
    __device__ __forceinline__ void begin(const Found& tile) { row = tile.place.row; }
    __device__ __forceinline__ void load(unsigned to, int k, int, unsigned full) {  // rows past the expert's end are never stored
        tensor_load_3d(to, &a, k, row, 0, full);
    }
};

#if GATHER
typedef GatheredRows Rows;
#define A_ROWS {p.a, p.lda, p.expert_token_indices}
#else
typedef OwnRows Rows;
#define A_ROWS {p.a}
#endif
#if CLUSTER_CTAS == 2
#define CLUSTERS __cluster_dims__(2)
#else
#define CLUSTERS
#endif

extern "C" __global__ void CLUSTERS __launch_bounds__(THREADS, 1)
    ENTRY(const __grid_constant__ GroupedGemmParams p) {
    __shared__ uint64 barrier_storage[2 * STAGES];
    __shared__ Found found[FOUND];  // by the number of the tile, as
    __shared__ int claimed[FOUND];  // what thread 0, of a pair's first block, claims while it fills its stages
    __shared__ uint64 claim_storage[FOUND];
    const int block = BLOCKS == 2 ? blockIdx.x & 1 : 0;  // of the pair
    const unsigned claim_barriers = shared_address(claim_storage);
    const int N = p.columns, K = p.depth;
    const int n_tiles = (N + TILE_COLUMNS - 1) / TILE_COLUMNS, tiles = p.row_tiles[0] * n_tiles;
    Schedule<Order, BLOCKS> schedule({unsigned(n_tiles)}, p.row_tiles, p.expert_token_offsets, tiles);  // the producer's
    if (threadIdx.x == 0) {
        found[0] = schedule.own;
        for (int i = 0; i < FOUND; ++i) mbarrier_init(claim_barriers + 8 * i, 1);
    }
    const Barriers<BLOCKS> barriers(barrier_storage, Rows::ARRIVALS);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const int steps_per_segment = (K + BK - 1) / BK, steps = steps_per_segment * K_SEGMENTS;

    if (threadIdx.x < 128) {
        Ring ring;
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (!GATHER && threadIdx.x > 0) {
            if (threadIdx.x / 32 == 1) Epilogue::beside(p);
            return;
        }
        Rows rows = A_ROWS;
        if (schedule.valid()) rows.look_up(schedule.own);
        for (int number = 0; schedule.valid(); ++number) {
            const unsigned claim_to = shared_address(&claimed[number % FOUND]), claim_full = claim_barriers + 8 * (number % FOUND);
            const bool claims_here = threadIdx.x == 0 && block == 0;
            const int claim = claims_here ? schedule.claim(p.tile_counter) : 0;
            if (BLOCKS == 2 && threadIdx.x == 0) mbarrier_arrive_expect_tx(claim_full, sizeof(int));
            const Place place = schedule.own.place;
            rows.begin(schedule.own);
            const int n0 = place.n * TILE_COLUMNS;
            schedule.prefetch();
            Found next;
            for (int step = 0; step < steps; ++step) {
                const int segment = K_SEGMENTS == 2 && step >= steps_per_segment, k0 = (step - segment * steps_per_segment) * BK;
                const unsigned stage = shared + ring.stage * STAGE_BYTES, full = barriers.full + 8 * ring.stage;
                wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
                if (step == min(2, steps - 1)) next = schedule.next();
                if (threadIdx.x == 0) {
                    if (step == steps - 1) found[(number + 1) % FOUND] = next;
                    mbarrier_arrive_expect_tx(full, B_BYTES + Rows::BYTES);
                    if (!GATHER) rows.load(stage, segment * K + k0, K, full);  // before B: conf3's up_bwd 622 -> 634 TFLOP/s
                    auto load = [&](int from, auto copy) {  // half of the tile's columns
                        constexpr int BOX = B_K_CONTIGUOUS ? 128 : 64;
#pragma unroll
                        for (int column = from; column < from + BN / 2; column += BOX) {
                            const TensorMap* map = segment || (SPLIT && column >= 128) ? &p.b1 : &p.b0;
                            const int n = n0 + (SPLIT ? column % 128 : column);
                            copy(stage + A_BYTES + column * 128, map, B_K_CONTIGUOUS ? k0 : n, B_K_CONTIGUOUS ? n : k0, place.expert,
                                 full);
                        }
                    };
                    if (schedule.shared) {
                        load(block * (BN / 2), tensor_multicast_3d);
                    } else {
                        load(0, tensor_load_3d);
                        load(BN / 2, tensor_load_3d);
                    }
                    if (step == min(3, steps - 1) && claims_here) {
                        if constexpr (BLOCKS == 1) {
                            claimed[number % FOUND] = claim;
                            mbarrier_arrive(claim_full);
                        } else {
#pragma unroll
                            for (int of = 0; of < 2; ++of)
                                store_async(cluster_address(claim_to, of), claim + of, cluster_address(claim_full, of));
                        }
                    }
                }
                if (GATHER) rows.load(stage, k0, K, full);
                ring.advance();
                if (GATHER && step == min(2, steps - 1) && next.rows != END) rows.look_up(next);
            }
            wait(claim_full, number / FOUND & 1);
            schedule.advance(next, claimed[number % FOUND]);
            if (GATHER && number % FOUND == FOUND - 1) named_barrier(1, 128);  // all have read what comes to be overwritten
        }
        // The other block's consumers release this one's stages, which must not be gone by then.
        for (int stage = 0; BLOCKS == 2 && stage < STAGES; ++stage) {
            wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
            ring.advance();
        }
        return;
    }

    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int warp_row = static_cast<int>(uniform(consumer_warp())) * 16;
    Ring ring;
    Epilogue epilogue(p);
    for (int number = 0;; ++number) {
        const int rows = of_lane_0(found[number % FOUND]).rows;
        const bool last = rows == END, active = warp_row / 64 * 64 < rows;  // of the warpgroup
        float acc[32][4];
        consume<true, B_K_CONTIGUOUS>(acc, last ? 0 : steps, active, ring, barriers, epilogue);
        if (last) return;
        if (active) epilogue.finished.put(acc);
        const Found tile = of_lane_0(found[number % FOUND]);
        if (tile.rows > 0) epilogue.begin(tile.place.row + warp_row, min(16, tile.rows - warp_row), tile.place.n * TILE_COLUMNS);
    }
}
