// Pipeline and main loop of the Hopper GEMMs: a tile of 128 x 256 per block of 384 threads, K in steps of 64 through a
// ring of STAGES buffers.
//   warpgroup 0, producer: fills the buffers; full[s] expects one arrival with the bytes of bulk copies, and 128 cp.async
//     arrivals more in kernels that gather.
//   warpgroups 1 and 2, consumers: 64 rows each, 4 wgmma m64n256k16 per stage, one group in flight; empty[s] expects
//     one arrival of each of the 8 warps, in pairs of blocks of each of the 16.
// Epilogues run behind the next tile's products: a warp leaves its 16 rows of a finished tile in shared memory, as 16-bit
// elements, and works through them while products of the next tile are in flight.
// Buffers hold operands as lines of 128 bytes, 16-byte chunk c of line l at chunk c ^ (l & 7), the 128-byte swizzle of
// wgmma: K-contiguous, a line per row of M or N; MN-contiguous, a line per k and block of 64 columns.
#pragma once
#include "ptx_sm90.cuh"
#include "row_staging.cuh"

#if !defined(BM) || !defined(BN) || !defined(BK) || !defined(THREADS) || !defined(STAGES) || !defined(STAGE_BYTES) || \
    !defined(TILE_BYTES) || !defined(SPARE_BYTES) || !defined(PRODUCER_REGISTERS) || !defined(CONSUMER_REGISTERS)
#error "BM, BN, BK, THREADS, STAGES, STAGE_BYTES, TILE_BYTES, SPARE_BYTES, PRODUCER_REGISTERS and CONSUMER_REGISTERS are \
given by launch_config.py"
#endif
#if !defined(ENTRY) || !defined(ELEMENT) || !defined(WGMMA)
#error "ENTRY, ELEMENT and WGMMA are given by loader.gemm_variant"
#endif

typedef ELEMENT element;

constexpr int A_BYTES = BM * BK * sizeof(element), B_BYTES = BN * BK * sizeof(element);

static_assert(sizeof(element) == 2 && BK * sizeof(element) == 128, "a line of the 128-byte swizzle is a row's part of a stage");
static_assert(THREADS == 3 * 128, "a producer warpgroup and two of consumers");
static_assert(BM == 2 * 64 && BN == 256, "each consumer warpgroup has 64 rows of wgmma m64n256k16");
static_assert(STAGE_BYTES == A_BYTES + B_BYTES && A_BYTES % 1024 == 0 && B_BYTES % 1024 == 0, "operands start on 1024 bytes");
static_assert(TILE_BYTES == BM * BN * sizeof(element), "a finished tile lies behind the stages");
static_assert(STAGES >= 2, "one stage is filled while another is read");
static_assert(STAGES * STAGE_BYTES + TILE_BYTES + SPARE_BYTES <= 227 * 1024, "a block's shared memory");
static_assert(PRODUCER_REGISTERS % 8 == 0 && CONSUMER_REGISTERS % 8 == 0, "setmaxnreg takes multiples of 8");
static_assert(128 * (PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS) <= THREADS * 168, "what the threads have at entry");

extern __shared__ __align__(1024) unsigned char dynamic_shared[];

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// What all lanes have, or one of them has and the others have zeros, as an OR over the warp gives it: in a uniform register,
// where the compiler then keeps what follows from it, counts and branches too. (What a shuffle gives it takes for different in
// every lane: of a consumer's step 21 to 41 instructions were of the vector pipes, now 6 to 11.)
__device__ __forceinline__ unsigned uniform(unsigned v) { return __reduce_or_sync(0xffffffffu, v); }

// The barriers of the ring, by shared address; BLOCKS: 2 if the blocks of a cluster fill each other's buffers.
template <int BLOCKS>
struct Barriers {
    unsigned full, empty;
    __device__ __forceinline__ Barriers(uint64 (&storage)[2 * STAGES], int full_arrivals)
        : full(uniform(shared_address(storage))), empty(full + 8 * STAGES) {
        if (threadIdx.x == 0) {
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(full + 8 * s, full_arrivals);
                mbarrier_init(empty + 8 * s, 8 * BLOCKS);
            }
            fence_mbarrier_init();
        }
        __syncthreads();
        if (BLOCKS == 2) {
            cluster_arrive();
            cluster_wait();
        }
    }
};

// A consumer warp's word that it has read a stage, to the producers that fill it.
template <int BLOCKS>
struct Release {
    const unsigned empty;  // of the block to which this lane says so
    __device__ __forceinline__ Release(const Barriers<BLOCKS>& barriers)
        : empty(BLOCKS == 1 ? barriers.empty : cluster_address(barriers.empty, threadIdx.x & 1)) {}
    __device__ __forceinline__ void operator()(int stage) const {
        if (threadIdx.x % 32 < BLOCKS) BLOCKS == 1 ? mbarrier_arrive(empty + 8 * stage) : mbarrier_arrive_cluster(empty + 8 * stage);
    }
};

// Position in the ring of stages: the buffer, and the parity of its barriers' current phase.
struct Ring {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// A tile's rows of one expert, and which of the column tiles it is.
struct Place {
    int expert, row, n;
};

// Word of the producer to consumers, in shared memory: a tile and how many rows it has: 0 if of a pair of blocks only the other
// has one, END if there is none. Given for the next tile before the last stage of a tile is announced, it may be read when
// that stage is full; consumers are up to STAGES tiles behind.
struct alignas(16) Found {
    Place place;
    int rows;
};
constexpr int FOUND = 8, END = -1;

// This block's tiles, in an Order that says of tile t
//   listed(t)                      which entry of dispatch's list names its expert
//   place(t, entry, first, end)    where it is; first, end: the rows of that expert
//   shares(t, entry, first, end)   with BLOCKS = 2: true only if tile t ^ 1 is of the same expert and columns
// The first three are blockIdx.x and on by gridDim.x, and the rest as advance is told; a pair of blocks has tiles 2 i and
// 2 i + 1 at a time. What a tile needs is loaded while those before it are worked on: found out at a tile's start it costs
// three loads in a row.
template <class Order, int BLOCKS>
struct Schedule {
    const Order order;
    const int2* const row_tiles;
    const int* const expert_token_offsets;
    const int tiles;
    int next_t, t_after;
    Found own;
    bool shared = false;           // own's columns, with the other block of the pair
    int2 next_entry, entry_after;  // (expert, first row)
    int next_first, next_end;

    __device__ __forceinline__ Schedule(Order order, const int* list, const int* expert_token_offsets, int tiles)
        : order(order), row_tiles(reinterpret_cast<const int2*>(list) + 1), expert_token_offsets(expert_token_offsets), tiles(tiles),
          next_t(blockIdx.x), t_after(next_t + gridDim.x), entry_after(at(next_t)) {
        prefetch();
        advance(next(), following());
    }
    __device__ __forceinline__ int2 at(int tile) const { return tile < tiles ? row_tiles[order.listed(tile)] : make_int2(0, 0); }
    __device__ __forceinline__ bool valid() const { return own.rows != END; }
    __device__ __forceinline__ Found next() const {
        if (next_t >= tiles) return {{}, BLOCKS == 2 && next_t & 1 && next_t == tiles ? 0 : END};
        const Place place = order.place(next_t, next_entry, next_first, next_end);
        return {place, min(BM, next_end - place.row)};
    }
    // The tile after those that are known.
    __device__ __forceinline__ int following() const { return t_after + static_cast<int>(gridDim.x); }
    // Blocks drift apart by whole tiles: by `counter` (zero at launch) they take tiles as they come to them, so that those that
    // read the same weights start together. For a pair, by its first block.
    __device__ __forceinline__ int claim(int* counter) const {
        return counter && t_after < tiles ? 3 * static_cast<int>(gridDim.x) + atomicAdd(counter, BLOCKS) : following();
    }
    // At a tile's start, and at its end, with what next() says in between.
    __device__ __forceinline__ void prefetch() {
        next_entry = entry_after;
        next_first = expert_token_offsets[next_entry.x], next_end = expert_token_offsets[next_entry.x + 1];
        entry_after = at(t_after);
    }
    __device__ __forceinline__ void advance(const Found& to, int claimed) {
        own = to;
        if constexpr (BLOCKS == 2) shared = (next_t | 1) < tiles && order.shares(next_t, next_entry, next_first, next_end);
        next_t = t_after, t_after = claimed;
    }
};

// Read by lane 0 alone. By a stage's release the producer knows that a place is free to be written again: lane 0 has then
// read it, and lane 1, which says so to the other block of a pair, has its value.
__device__ __forceinline__ Found of_lane_0(const Found& found) {
    int4 v = {};
    if (threadIdx.x % 32 == 0) v = reinterpret_cast<const int4&>(found);
    auto of_all = [](int v) { return static_cast<int>(uniform(v)); };  // zeros in the other lanes
    return {{of_all(v.x), of_all(v.y), of_all(v.z)}, of_all(v.w)};
}

// wgmma descriptor of a 128-byte-swizzled operand: 8-row (or 8-k) groups 1024 bytes apart, and for an MN-contiguous
// operand its 64-column blocks 8192 bytes apart. Only the low word depends on the address, in units of 16 bytes.
__device__ __forceinline__ unsigned descriptor_low(unsigned address) { return (address & 0x3ffff) >> 4 | (8192 >> 4) << 16; }
__device__ __forceinline__ uint64 descriptor(unsigned low) { return low | uint64(1024 >> 4 | 1 << 30) << 32; }

__device__ __forceinline__ int consumer_warp() { return threadIdx.x / 32 - 4; }

// This warp's 16 rows of a finished tile in shared memory: 16-byte chunk c of row r at c ^ (r & 7) of its 512 bytes.
struct FinishedRows {
    unsigned base;
    __device__ __forceinline__ FinishedRows()
        : base(shared_address(dynamic_shared) + STAGES * STAGE_BYTES + consumer_warp() * 16 * BN * 2) {}

    // acc[j] is a tile of mma.m16n8k16: rows lane / 4 and + 8, columns 8 j + 2 (lane % 4) and + 1.
    __device__ __forceinline__ void put(const float (&acc)[32][4]) const {
        const unsigned lane = threadIdx.x & 31, row = lane & 15, chunk = lane >> 4 ^ (row & 7);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 32; j += 2)
            stmatrix_x4(base + row * (BN * 2) + ((j ^ chunk) << 4), pack2(element(), acc[j][0], acc[j][1]),
                        pack2(element(), acc[j][2], acc[j][3]), pack2(element(), acc[j + 1][0], acc[j + 1][1]),
                        pack2(element(), acc[j + 1][2], acc[j + 1][3]));
        __syncwarp();
    }
    __device__ __forceinline__ Row8<element> get(int row, int chunk) const {
        return Row8<element>(load_shared_16(base + row * (BN * 2) + ((chunk ^ (row & 7)) << 4)));
    }
};

// What a warp does with a finished tile: the 16 rows are stored by next(), one or more at a time, and end() follows the
// last, all before the next tile is finished.
struct EpilogueBase {
    static constexpr int SPREAD = 1 << 20;  // k-steps over which this is spread, if a tile has so many
    static constexpr bool SPLIT = false;    // whether half of the tile's columns are gate and half are up
    static constexpr bool LONG = false;     // whether a row takes longer than a step's products: these are then waited for
    const FinishedRows finished;
    int rows = 0, done = 0;  // of this warp; next() moves `done` on
    __device__ __forceinline__ void end() {}
    template <class Params>
    static __device__ __forceinline__ void beside(const Params&) {}  // by a warp of the producer's that has nothing else to do
};

// acc = this warpgroup's 64 x 256 over `steps` stages; acc[j] is a tile of mma.m16n8k16 of rows 16 * warp .. Without
// `active` the stages only pass. Before each step a share of step / steps of the epilogue's rows is done; what the step
// needs is asked for ahead of them, so that they hide the latency. `steps` and `active` come from uniform(), so that the loop
// is in uniform registers: at the power limit vector instructions cost time even where they hide behind the products.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, int BLOCKS, class Epilogue>
__device__ __forceinline__ void consume(float (&acc)[32][4], int steps, bool active, Ring& ring, const Barriers<BLOCKS>& barriers,
                                        Epilogue& epilogue) {
    const Release<BLOCKS> release(barriers);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const unsigned a_low = descriptor_low(shared + uniform(consumer_warp() / 4) * 8192), b_low = descriptor_low(shared + A_BYTES);
    const unsigned share = uniform((16 << 16) / max(min(steps, Epilogue::SPREAD), 1) + 1);  // of 16 rows per step, in 1 / 65536
    constexpr int MANY = 64;  // of more steps most have no row (of 112, DeepSeek-V3's down_bwd: 400 -> 465 TFLOP/s)
    auto multiply = [&](bool first) {
        const unsigned a = a_low + ring.stage * (STAGE_BYTES >> 4), b = b_low + ring.stage * (STAGE_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BK / 16; ++kk)
            WGMMA<!A_K_CONTIGUOUS, !B_K_CONTIGUOUS_>(acc, descriptor(a + (kk * (A_K_CONTIGUOUS ? 32 : 2048) >> 4)),
                                                     descriptor(b + (kk * (B_K_CONTIGUOUS_ ? 32 : 2048) >> 4)), kk > 0 || !first);
        wgmma_commit();
    };
    int previous = ring.stage;
    if (steps > 0) {
        wait(barriers.full + 8 * ring.stage, ring.parity);
        if (active) multiply(true);
        ring.advance();
    }
    unsigned credit = share;  // rows that are due and not yet in `due`, and the fraction of another
    int due = 0;
    for (int step = 1; step < steps; ++step, credit += share) {
        const bool full = mbarrier_test_wait(barriers.full + 8 * ring.stage, ring.parity);
        const bool more_due = credit >> 16;  // in all warps of a warpgroup alike, of which some have fewer rows
        if (more_due) {
            due += credit >> 16, credit &= 0xffff;
            while (epilogue.done < min(due, epilogue.rows)) epilogue.next();
        }
        const bool drains = Epilogue::LONG && (steps <= MANY || more_due);
        if (drains) {  // done with by now: the producer need not wait for the next step's issue
            wgmma_wait<0>();
            release(previous);
        }
        if (!full) wait(barriers.full + 8 * ring.stage, ring.parity);
        if (active) {
            multiply(false);
            if (!drains) wgmma_wait<1>();
        }
        if (!drains) release(previous);
        previous = ring.stage;
        ring.advance();
    }
    while (epilogue.done < epilogue.rows) epilogue.next();
    epilogue.end();
    wgmma_wait<0>();
    if (steps > 0) release(previous);
}
