// Products of e4m3 on Hopper, an addition to the paper: the scales of A and B, and a main loop with promotion.
//
// In gathered products (up_fwd, down_bwd) a row of A has one scale for all of K. Their wgmma accumulate over all k-steps, and
// the result is multiplied by the row's scale. In the others (down_fwd, up_bwd) a row has one scale per k-step, that is per
// BK = 128 columns. The wgmma of each k-step then start from zero, and the accumulators add their sums times the row's scale.
// This is promotion. Beside 64 x 256 accumulators there are registers for 64 x 128 sums, so a k-step computes two halves of 128
// columns one after the other.
#pragma once
#include "gemm_core_sm90.cuh"
#include "tile_scheduler_sm90.cuh"

static_assert(sizeof(operand) == 1 && B_K_CONTIGUOUS, "e4m3 operands are contiguous along K");
static_assert(BK == GROUP_COLUMNS, "a k-step has one scale of each row");

// Scales of an expert's weight: one, or one for gate and one for up.
constexpr int B_SCALES = EXPERT_SCALES;

// Scales of the tokens that a tile gathers. The producer copies them while it fills the tile's first stage. Consumers read them
// after the tile's products, before they release the first stage of the next tile. So SCALE_TILES buffers are enough.
constexpr int SCALE_TILES = STAGES + 1;
__shared__ float gathered_scales[SCALE_TILES][BM];

struct ExpertScales {
    float first, last;  // the scales of gate and of up; equal if the weight has one scale
    __device__ __forceinline__ ExpertScales(const float* b_scales, int expert, bool active)
        : first(active ? b_scales[expert * B_SCALES] : 0.f), last(active ? b_scales[expert * B_SCALES + B_SCALES - 1] : 0.f) {}
};

// Multiplies acc by the scales of its rows and of the expert. rows: scales of the warp's 16 rows. acc[j] is a fragment of
// mma.m16n8k16: the lane has rows lane / 4 and + 8.
__device__ __forceinline__ void scale_rows(float (&acc)[32][4], const float* rows, const ExpertScales& expert) {
    const float low = rows[threadIdx.x % 32 / 4], high = rows[threadIdx.x % 32 / 4 + 8];
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        const float of_columns = j < 16 ? expert.first : expert.last;
        acc[j][0] *= low * of_columns, acc[j][1] *= low * of_columns;
        acc[j][2] *= high * of_columns, acc[j][3] *= high * of_columns;
    }
}

// The scales of the lane's rows, lane / 4 and + 8 of the warp's 16, loaded one k-step ahead. a_scales: (k-steps, ld) fp32.
struct RowScales {
    const float* low;  // scales of row lane / 4
    const int64 ld;
    const int apart;          // elements from this row's scale to the other's
    const int segment_steps;  // k-steps of a K segment; each segment's part of the weight has its own scale
    const ExpertScales expert;
    float next_low, next_high;

    // warp_row: the warp's first row in the tile. Rows past the tile's last one read the scale of this one.
    __device__ __forceinline__ RowScales(const float* a_scales, int64 ld, const WorkTile& tile, int warp_row, int segment_steps,
                                         const ExpertScales& expert)
        : low(a_scales + tile.row + min(line(warp_row), tile.rows - 1)), ld(ld),
          apart(max(min(8, tile.rows - 1 - line(warp_row)), 0)), segment_steps(segment_steps), expert(expert) {}
    static __device__ __forceinline__ int line(int warp_row) { return warp_row + static_cast<int>(threadIdx.x % 32 / 4); }
    __device__ __forceinline__ void load() {
        next_low = low[0], next_high = low[apart];
        low += ld;
    }
    __device__ __forceinline__ float2 of_step(int step) const {
        const float of_weight = B_SCALES == 1 || step < segment_steps ? expert.first : expert.last;
        return make_float2(next_low * of_weight, next_high * of_weight);
    }
};

// Adds a k-step's sums, times the scales of the rows, to half of the accumulators' columns.
template <int FIRST>
__device__ __forceinline__ void promote(float (&acc)[32][4], const float (&sums)[16][4], float2 scales) {
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        acc[FIRST + j][0] = fmaf(scales.x, sums[j][0], acc[FIRST + j][0]);
        acc[FIRST + j][1] = fmaf(scales.x, sums[j][1], acc[FIRST + j][1]);
        acc[FIRST + j][2] = fmaf(scales.y, sums[j][2], acc[FIRST + j][2]);
        acc[FIRST + j][3] = fmaf(scales.y, sums[j][3], acc[FIRST + j][3]);
    }
}

// main_loop with promotion. The warp works on its epilogue rows behind the wgmma of the first half of the columns.
template <int CTAS, class Epilogue>
__device__ __forceinline__ void promoting_main_loop(float (&acc)[32][4], int steps, bool active, PipelineState& state,
                                                    const PipelineBarriers<CTAS>& barriers, Epilogue& epilogue,
                                                    RowScales& scales) {
    constexpr int ONE_ROW = 1 << 16;  // as in main_loop
    const StageRelease<CTAS> release(barriers);
    const unsigned shared = uniform(shared_address(dynamic_shared));
    const unsigned a_low = descriptor_low(shared + uniform(consumer_warp() / WARPGROUP_WARPS) * LINES_64_BYTES);
    const unsigned b_low = descriptor_low(shared + A_BYTES);
    const unsigned share = uniform((WARP_ROWS * ONE_ROW) / max(min(steps, Epilogue::SPREAD_STEPS), 1) + 1);
    float sums[16][4];
    auto multiply = [&](int first_line) {
        const unsigned a = a_low + state.stage * (STAGE_BYTES >> 4);
        const unsigned b = b_low + state.stage * (STAGE_BYTES >> 4) + (first_line * LINE_BYTES >> 4);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BK / WGMMA_K; ++kk)
            wgmma_e4m3_n128(sums, descriptor(a + (kk * K_STEP_BYTES >> 4)), descriptor(b + (kk * K_STEP_BYTES >> 4)), kk > 0);
        wgmma_commit();
    };
#pragma unroll
    for (int j = 0; j < 32; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
    if (active && steps > 0) scales.load();
    unsigned credit = 0;
    int due = 0;  // epilogue rows
    auto work = [&] {
        while (epilogue.done < min(due, epilogue.rows)) epilogue.next();
    };
    for (int step = 0; step < steps; ++step, credit += share) {
        barriers.wait_full(state);
        due += credit / ONE_ROW, credit %= ONE_ROW;
        if (active) {
            multiply(0);
            work();
            const float2 of_rows = scales.of_step(step);
            if (step + 1 < steps) scales.load();
            wgmma_wait<0>();
            promote<0>(acc, sums, of_rows);
            multiply(BN / 2);
            wgmma_wait<0>();
            release(state.stage);
            promote<16>(acc, sums, of_rows);
        } else {
            work();
            release(state.stage);
        }
        state.advance();
    }
    while (epilogue.done < epilogue.rows) epilogue.next();
    epilogue.end();
}
