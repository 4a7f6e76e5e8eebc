// Main loop of the Hopper GEMMs. A CTA computes a tile of BM x BN in k-steps of BK, through the stages of pipeline_sm90.cuh.
// The tile is 128 x 256, or 192 x 192 where that fits the result better. BK is 64, or 128 with e4m3. Each consumer warpgroup has
// 64 rows of the tile. For each k-step it issues a group of 4 wgmma: m64n256k16, m64n192k16, or m64n256k32 with e4m3. One group is in
// flight at a time.
//
// The epilogue of a tile overlaps with the next tile's wgmma (docs/decisions/002). A warp writes its 16 rows of a finished tile
// to shared memory as 16-bit elements, and works on them between the k-steps of the next tile.
#pragma once
#include "pipeline_sm90.cuh"
#include "tile_raster.cuh"

constexpr int FRAGMENTS = BN / 8;                // a warp's accumulators: 16 x 8 each; a lane has 4 floats of one
constexpr int ROW_BYTES = BN * sizeof(element);  // a row of a finished tile
constexpr int WARP_TILE_BYTES = WARP_ROWS * ROW_BYTES;
constexpr int WGMMA_K = 32 / sizeof(operand);
// Bytes from one wgmma's operand to the next one's in a stage, for operands that are contiguous along K, and along M or N.
constexpr int K_STEP_BYTES = WGMMA_K * sizeof(operand), MN_STEP_BYTES = WGMMA_K * LINE_BYTES;

// wgmma's descriptor of an operand in the 128-byte swizzle. In units of 16 bytes, bits 0 to 13 are the address, bits 16 to 29
// the distance between blocks of (BK, 64) of an MN-contiguous operand, and bits 32 to 45 the distance between groups of 8
// lines. Bits 62 and 63 select the swizzle. Only the low word depends on the address.
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

    // acc[j] is a fragment of mma.m16n8k16: the lane has rows lane / 4 and + 8, columns 8 j + 2 (lane % 4) and + 1.
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

// An epilogue: what a warp does with its rows of a finished tile. The derived struct has begin(), which starts with a new tile,
// and next(), which works on one row or more and adds them to `done`. end() is called after the last row. All of this happens
// before the next tile is finished.
struct EpilogueBase {
    static constexpr int SPREAD_STEPS = 1 << 20;  // the rows are spread over the next tile's first k-steps, so many at most
    static constexpr bool SPLIT = false;          // half of the tile's columns are gate, then half are up
    static constexpr bool PAIRS = false;          // gate and up alternate among the tile's columns
    static constexpr bool SQUARE = false;         // also works with tiles of 192 x 192
    static constexpr bool LONG_ROWS = false;      // a row takes longer than a k-step's wgmma; see main_loop
    const FinishedRows finished;
    int rows = 0, done = 0;  // numbers of this warp's rows that the tile has, and that are done
    __device__ __forceinline__ void end() {}
    static constexpr bool SCALES_ROWS = false;  // FP8: the epilogue multiplies rows by their scales; else scale_rows does
    __device__ __forceinline__ void take_scales(const float*, float, int) {}
    // Work of the epilogue for a producer warp that loads nothing.
    template <class Params>
    static __device__ __forceinline__ void idle_producer_warp(const Params&) {}
};

// Computes acc, the sum of the products of `steps` stages for the warpgroup's 64 x BN of the tile. acc[j] is a fragment of
// mma.m16n8k16 of the warp's 16 rows. If not `active`, the warpgroup has no rows of the tile, and only releases the stages.
// Before each k-step but the first the warp works on its epilogue rows that are due by then: they are spread evenly over the
// k-steps. It tests before these rows whether the stage is full, so that they hide the latency of the test. `steps` and
// `active` come from uniform(), which keeps the loop in uniform registers.
// beside: what issues products of operands that no stage holds, after those of all stages; or nothing.
template <bool A_K_CONTIGUOUS, bool B_K_CONTIGUOUS_, int CTAS, class Epilogue, class... Beside>
__device__ __forceinline__ void main_loop(float (&acc)[FRAGMENTS][4], int steps, bool active, PipelineState& state,
                                          const PipelineBarriers<CTAS>& barriers, Epilogue& epilogue, const Beside&... beside) {
    // `share` rows become due with each k-step, in units of 1 / ONE_ROW. With more than FEW_STEPS k-steps most have no row.
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
    unsigned credit = share;  // due, but not yet counted in `due`, in units of 1 / ONE_ROW
    int due = 0;              // whole rows
    for (int step = 1; step < steps; ++step, credit += share) {
        const bool full = barriers.is_full(state);
        const bool more_due = credit / ONE_ROW;  // the same in all warps of a warpgroup, also in those with fewer rows
        if (more_due) {
            due += credit / ONE_ROW, credit %= ONE_ROW;
            while (epilogue.done < min(due, epilogue.rows)) epilogue.next();
        }
        const bool drain = Epilogue::LONG_ROWS && (steps <= FEW_STEPS || more_due);
        if (drain) {  // the rows have taken longer than the wgmma in flight, so its stage is released first
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
    if constexpr (sizeof...(Beside) > 0)
        if (steps > 0) (beside.multiply(acc, active), ...);
    while (epilogue.done < epilogue.rows) epilogue.next();
    epilogue.end();
    wgmma_wait<0>();
    if (steps > 0) release(previous);
}
