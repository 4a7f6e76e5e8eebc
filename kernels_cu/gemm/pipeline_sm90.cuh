// Pipeline of the Hopper GEMMs: a ring of STAGES stages in shared memory. The producer warpgroup fills a stage for each k-step,
// and the consumer warps read it. Each stage has two mbarriers. Each use of the stage is one phase of both.
//
//   mbarrier      arrivals per phase                                     waited on by
//   full[stage]   full_arrivals, and the bytes of TMA                    consumers, before they read the stage
//   empty[stage]  CONSUMER_WARPS, of each CTA in the cluster             producer, before it fills the stage again
//
// Dynamic shared memory. (R, C) stands for R rows of C elements. Elements of A and B have 16 bits or are e4m3. Those of a
// finished tile have 16 bits.
//
//   offset in bytes                   size               contents
//   stage * STAGE_BYTES               A_BYTES            A: (BM, BK) if K-contiguous, else BM / 64 blocks of (BK, 64)
//   stage * STAGE_BYTES + A_BYTES     B_BYTES            B: (BN, BK) if K-contiguous, else BN / 64 blocks of (BK, 64)
//   FINISHED_TILE                     TILE_BYTES         a finished tile: (BM, BN), 16 rows of each consumer warp
//   SPARE                             SPARE_BYTES        rows that an epilogue prefetches, a tile's bias, or the token indices
//                                                        of a weight gradient
//
// Rows of A and B are lines of 128 bytes in the 128-byte swizzle of wgmma: 16-byte chunk c of line l is at chunk c ^ (l & 7).
#pragma once
#include "common.cuh"
#include "ptx_sm90.cuh"

typedef ELEMENT element;
#if FP8
#include "fp8.cuh"
typedef e4m3 operand;  // the type of A and B
#else
typedef element operand;
#endif

constexpr int WARPGROUP = 128, WARPGROUP_WARPS = 4;  // threads, warps
constexpr int PRODUCER_WARPS = WARPGROUP_WARPS;      // warpgroup 0
constexpr int WARP_ROWS = 16;                        // rows of a tile per consumer warp
constexpr int CONSUMER_WARPS = BM / WARP_ROWS;       // all other warpgroups
constexpr int PRODUCER_BARRIER = 1;                  // named barrier of the producer's threads; __syncthreads uses 0
constexpr unsigned short BOTH_CTAS = 3;              // mask of multicast: a bit per CTA of the cluster
constexpr int LINE_BYTES = 128;                      // a line of the swizzle: BK elements of a row, or 64 columns at one k
constexpr int SWIZZLE_ATOM_BYTES = 8 * LINE_BYTES;   // the swizzle repeats after these
constexpr int LINES_64_BYTES = 64 * LINE_BYTES;      // 64 rows of a K-contiguous operand, or a block of (BK, 64)
constexpr int A_BYTES = BM * BK * sizeof(operand), B_BYTES = BN * BK * sizeof(operand);
constexpr int FINISHED_TILE = STAGES * STAGE_BYTES, SPARE = FINISHED_TILE + TILE_BYTES;
constexpr int MAX_SHARED_BYTES = 227 * 1024;                 // per CTA
constexpr int REGISTERS_AT_ENTRY = 65536 / THREADS / 8 * 8;  // per thread, in multiples of 8

static_assert(BK * sizeof(operand) == LINE_BYTES, "a line of the 128-byte swizzle is a row's part of a stage");
static_assert(sizeof(element) == 2, "results of 16 bits");
static_assert(sizeof(operand) == 2 || sizeof(operand) == 1, "wgmma of 16-bit elements or of e4m3");
static_assert(THREADS == WARPGROUP + BM / 64 * WARPGROUP, "a producer warpgroup, and one of consumers for 64 rows of a tile");
static_assert(STAGE_BYTES == A_BYTES + B_BYTES, "a stage holds A, then B");
static_assert(A_BYTES % SWIZZLE_ATOM_BYTES == 0 && B_BYTES % SWIZZLE_ATOM_BYTES == 0, "operands start where the swizzle does");
static_assert(TILE_BYTES == BM * BN * sizeof(element), "a finished tile lies behind the stages");
static_assert(STAGES >= 2, "one stage is filled while another is read");
static_assert(SPARE + SPARE_BYTES <= MAX_SHARED_BYTES, "a CTA's shared memory");
static_assert(PRODUCER_REGISTERS % 8 == 0 && CONSUMER_REGISTERS % 8 == 0, "setmaxnreg takes multiples of 8");
static_assert(WARPGROUP * (PRODUCER_REGISTERS + BM / 64 * CONSUMER_REGISTERS) <= THREADS * REGISTERS_AT_ENTRY,
              "setmaxnreg distributes what the threads have at entry");

__device__ __forceinline__ int consumer_warp() { return threadIdx.x / 32 - PRODUCER_WARPS; }

// The bitwise OR of v over the warp, in a uniform register. It is v if all lanes have v, or if one lane has v and the others 0.
// The compiler then keeps values that depend on it in uniform registers too. It would not do so after a shuffle, whose result
// may differ between lanes. At the power limit vector instructions cost time even where they hide behind wgmma
// (docs/decisions/010).
__device__ __forceinline__ unsigned uniform(unsigned v) { return __reduce_or_sync(0xffffffffu, v); }

// Waits until the barrier's phase of this parity has completed.
__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {
    }
}

// A position in the pipeline: a stage, and the parity of its phase. The parity changes each time the ring wraps.
struct PipelineState {
    int stage = 0;
    unsigned phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// The barriers of all stages, as shared addresses. CTAS is the number of CTAs in the cluster. Two CTAs fill each other's
// stages.
template <int CTAS>
struct PipelineBarriers {
    unsigned full, empty;
    __device__ __forceinline__ PipelineBarriers(uint64 (&storage)[2 * STAGES], int full_arrivals)
        : full(uniform(shared_address(storage))), empty(full + sizeof(uint64) * STAGES) {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < STAGES; ++stage) {
                mbarrier_init(full_of(stage), full_arrivals);
                mbarrier_init(empty_of(stage), CONSUMER_WARPS * CTAS);
            }
            fence_mbarrier_init();
        }
        __syncthreads();
        if (CTAS == 2) {
            cluster_arrive();
            cluster_wait();
        }
    }
    __device__ __forceinline__ unsigned full_of(int stage) const { return full + 8 * stage; }
    __device__ __forceinline__ unsigned empty_of(int stage) const { return empty + 8 * stage; }
    __device__ __forceinline__ bool is_full(const PipelineState& state) const {
        return mbarrier_test_wait(full_of(state.stage), state.phase);
    }
    __device__ __forceinline__ void wait_full(const PipelineState& state) const { wait(full_of(state.stage), state.phase); }
    // The first wait for a stage returns at once: a new barrier counts the phase before its first one as completed.
    __device__ __forceinline__ void wait_empty(const PipelineState& state) const { wait(empty_of(state.stage), state.phase ^ 1); }
};

// Releases a stage: a consumer warp arrives at empty[stage] of each CTA whose producer fills the stage. Lane i arrives in CTA
// i.
template <int CTAS>
struct StageRelease {
    const unsigned empty;
    __device__ __forceinline__ StageRelease(const PipelineBarriers<CTAS>& barriers)
        : empty(CTAS == 1 ? barriers.empty : cluster_address(barriers.empty, threadIdx.x & 1)) {}
    __device__ __forceinline__ void operator()(int stage) const {
        if (threadIdx.x % 32 < CTAS) CTAS == 1 ? mbarrier_arrive(empty + 8 * stage) : mbarrier_arrive_cluster(empty + 8 * stage);
    }
};
