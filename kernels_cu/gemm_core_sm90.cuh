// Main loop of the Hopper GEMMs: a tile of BM = 128 x BN = 256 per CTA, K in steps of BK = 64, of e4m3 128, through the stages
// of pipeline_sm90.cuh. Consumer warpgroups 1 and 2 have 64 rows of the tile each and issue 4 wgmma m64n256k16, of e4m3
// m64n256k32, per k-step, one group in flight.
//
// An epilogue runs behind the next tile's wgmma (docs/decisions/002). A warp writes its 16 rows of a finished tile to shared
// memory as 16-bit elements and works through them between the k-steps of the next tile.
#pragma once
#include "pipeline_sm90.cuh"
#include "tile_raster.cuh"

constexpr int FRAGMENTS = BN / 8;                // of a lane's accumulators, 4 floats each
constexpr int ROW_BYTES = BN * sizeof(element);  // of a finished tile
constexpr int WARP_TILE_BYTES = WARP_ROWS * ROW_BYTES;
constexpr int WGMMA_K = 32 / sizeof(operand);
// From one wgmma's operand to the next, by what is contiguous.
constexpr int K_STEP_BYTES = WGMMA_K * sizeof(operand), MN_STEP_BYTES = WGMMA_K * LINE_BYTES;

// wgmma's descriptor of an operand in the 128-byte swizzle, in units of 16 bytes: bits 0 to 13 address, 16 to 29 distance of
// blocks of (BK, 64) of an MN-contiguous operand, 32 to 45 distance of groups of 8 lines, 62 and 63 swizzle. Only the low word
// depends on the address.
constexpr unsigned SWIZZLE_128B = 1u << 30;  // in the high word
__device__ __forceinline__ unsigned descriptor_low(unsigned address) {
    return (address & 0x3ffff) >> 4 | (LINES_64_BYTES >> 4) << 16;
}
__device__ __forceinline__ uint64 descriptor(unsigned low) { return low | uint64(SWIZZLE_ATOM_BYTES >> 4 | SWIZZLE_128B) << 32; }

// This warp's 16 rows of a finished tile, (16, BN) element in shared memory: 16-byte chunk c of row r is at chunk c ^ (r & 7).
struct FinishedRows {
    unsigned base;
    __device__ __forceinline__ FinishedRows()
        : base(shared_address(dynamic_shared) + FINISHED_TILE + consumer_warp() * WARP_TILE_BYTES) {}

    // acc[j] is a tile of mma.m16n8k16: rows lane / 4 and + 8, columns 8 j + 2 (lane % 4) and + 1.
    __device__ __forceinline__ void put(const float (&acc)[FRAGMENTS][4]) const {
        const unsigned lane = threadIdx.x & 31, row = lane & 15, chunk = lane >> 4 ^ (row & 7);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < FRAGMENTS; j += 2)
            stmatrix_x4(base + row * ROW_BYTES + ((j ^ chunk) << 4), pack2(element(), acc[j][0], acc[j][1]),
                        pack2(element(), acc[j][2], acc[j][3]), pack2(element(), acc[j + 1][0], acc[j + 1][1]),
                        pack2(element(), acc[j + 1][2], acc[j + 1][3]));
        __syncwarp();
    }
    __device__ __forceinline__ Row8<element> get(int row, int chunk) const {
        return Row8<element>(load_shared_16(base + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4)));
    }
};

// What a warp does with its rows of a finished tile. begin(), of the derived struct, takes a tile over. Each call of next() works
// on one row or more and moves `done` on. end() follows the last row. All of this happens before the next tile is finished.
struct EpilogueBase {
    static constexpr int SPREAD_STEPS = 1 << 20;  // k-steps over which the rows are spread, if a tile has so many
    static constexpr bool SPLIT = false;          // half of the tile's columns are gate and half are up
    static constexpr bool PAIRS = false;          // gate and up alternate among the tile's columns
    static constexpr bool LONG_ROWS = false;      // a row takes longer than a k-step's wgmma, so that the warp waits for these
    const FinishedRows finished;
    int rows = 0, done = 0;  // of this warp
    __device__ __forceinline__ void end() {}
#ifdef OPERAND
    static constexpr bool SCALES_ROWS = false;  // it puts scales on the rows of a product of e4m3 by itself
    __device__ __forceinline__ void take_scales(const float*, float) {}
#endif
    // Work for a producer warp that has nothing else to do.
    template <class Params>
    static __device__ __forceinline__ void idle_producer_warp(const Params&) {}
};

// acc = this warpgroup's 64 x 256 over `steps` stages; acc[j] is a tile of mma.m16n8k16 of the warp's 16 rows. Unless `active`
// the stages are only released. Before each k-step a share of step / steps of the epilogue's rows is worked on; whether the
// stage is full is tested ahead of them, so that they hide the latency. `steps` and `active` come from uniform(), which keeps the
// loop in uniform registers.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, int CTAS, class Epilogue>
__device__ __forceinline__ void main_loop(float (&acc)[FRAGMENTS][4], int steps, bool active, PipelineState& state,
                                          const PipelineBarriers<CTAS>& barriers, Epilogue& epilogue) {
    // Fixed point: a step is due `share` rows, in units of 1 / ONE_ROW. Of more than FEW_STEPS steps most have no row.
    constexpr int ONE_ROW = 1 << 16;
    constexpr int FEW_STEPS = 64;
    constexpr int A_STEP = A_K_CONTIGUOUS ? K_STEP_BYTES : MN_STEP_BYTES;
    constexpr int B_STEP = B_K_CONTIGUOUS_ ? K_STEP_BYTES : MN_STEP_BYTES;
    const StageRelease<CTAS> release(barriers);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const unsigned a_low = descriptor_low(shared + uniform(consumer_warp() / WARPGROUP_WARPS) * LINES_64_BYTES);
    const unsigned b_low = descriptor_low(shared + A_BYTES);
    const unsigned share = uniform((WARP_ROWS * ONE_ROW) / max(min(steps, Epilogue::SPREAD_STEPS), 1) + 1);
    auto multiply = [&](bool first) {
        const unsigned a = a_low + state.stage * (STAGE_BYTES >> 4), b = b_low + state.stage * (STAGE_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BK / WGMMA_K; ++kk)
            WGMMA<!A_K_CONTIGUOUS, !B_K_CONTIGUOUS_>(acc, descriptor(a + (kk * A_STEP >> 4)), descriptor(b + (kk * B_STEP >> 4)),
                                                     kk > 0 || !first);
        wgmma_commit();
    };
    int previous = state.stage;
    if (steps > 0) {
        barriers.wait_full(state);
        if (active) multiply(true);
        state.advance();
    }
    unsigned credit = share;  // what is due and not yet in `due`
    int due = 0;              // rows
    for (int step = 1; step < steps; ++step, credit += share) {
        const bool full = barriers.is_full(state);
        const bool more_due = credit / ONE_ROW;  // the same in all warps of a warpgroup, of which some have fewer rows
        if (more_due) {
            due += credit / ONE_ROW, credit %= ONE_ROW;
            while (epilogue.done < min(due, epilogue.rows)) epilogue.next();
        }
        const bool drain = Epilogue::LONG_ROWS && (steps <= FEW_STEPS || more_due);
        if (drain) {  // wgmma has finished by now: the producer gets the stage before the next wgmma is issued
            wgmma_wait<0>();
            release(previous);
        }
        if (!full) barriers.wait_full(state);
        if (active) {
            multiply(false);
            if (!drain) wgmma_wait<1>();
        }
        if (!drain) release(previous);
        previous = state.stage;
        state.advance();
    }
    while (epilogue.done < epilogue.rows) epilogue.next();
    epilogue.end();
    wgmma_wait<0>();
    if (steps > 0) release(previous);
}
