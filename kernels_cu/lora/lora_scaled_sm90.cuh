// The products of a low-rank factor that has stages, in grouped_gemm_sm90.cu with FP8. They are in bf16, and end the sums: the
// tensor cores keep too few bits of accumulators of e4m3 products. A stage has as many bytes as one of e4m3: A is (BM, LORA_BK)
// element, rows of u, and B is (BN, LORA_BK) element, the factor, both with zeros past the ranks.
//
// Accumulators that an epilogue will scale take u over the scale of its row, so that a factor of zeros changes no bit of them.
// Then A passes through registers.
#pragma once
#include "scaled_products_sm90.cuh"

constexpr float LEAST_SCALE = 1.17549435e-38f;  // the least normal number; products with a lesser scale are 0, by -ftz
__device__ __forceinline__ float inverse(float scale) { return scale >= LEAST_SCALE ? reciprocal(scale) : 0.f; }

__device__ __forceinline__ unsigned scaled_pair(unsigned pair, float by) {
    return pack2(element(), __uint_as_float(pair << 16) * by, __uint_as_float(pair & 0xffff0000u) * by);
}

// Adds the products of `steps` stages. SCALED: acc has its scales. row_scales: as in scale_rows. The other arguments are those of
// promoting_main_loop.
template <bool SCALED, int CTAS>
__device__ __forceinline__ void add_lora_stages(float (&acc)[32][4], int steps, bool active, PipelineState& state,
                                                const PipelineBarriers<CTAS>& barriers, const float* row_scales,
                                                const ExpertScales& expert) {
    constexpr int PRODUCTS = LORA_BK / 16;
    const StageRelease<CTAS> release(barriers);
    const unsigned shared = uniform(shared_address(dynamic_shared)), lane = threadIdx.x & 31;
    const unsigned a_low = descriptor_low(shared + uniform(consumer_warp() / WARPGROUP_WARPS) * LINES_64_BYTES);
    const unsigned b_low = descriptor_low(shared + A_BYTES);
    const unsigned line = consumer_warp() * WARP_ROWS + (lane & 15);  // that ldmatrix takes from the lane
    const unsigned fragment = shared + line * LINE_BYTES + (lane >> 4 ^ (line & 7)) * 16;
    float by[2] = {1.f, 1.f};
#pragma unroll
    for (int i = 0; !SCALED && i < 2; ++i)
        if (active) by[i] = inverse(row_scales[lane / 4 + 8 * i] * expert.first);
    for (int step = 0; step < steps; ++step) {
        barriers.wait_full(state);
        if (active) {
            const unsigned b = b_low + state.stage * (STAGE_BYTES >> 4);
            if constexpr (SCALED) {
                const unsigned a = a_low + state.stage * (STAGE_BYTES >> 4);
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < PRODUCTS; ++kk)
                    wgmma_bf16<0, 0>(acc, descriptor(a + (kk * K_STEP_BYTES >> 4)), descriptor(b + (kk * K_STEP_BYTES >> 4)), 1);
                wgmma_commit();
                wgmma_wait<0>();
            } else {
                unsigned u[PRODUCTS][4];
#pragma unroll
                for (int kk = 0; kk < PRODUCTS; ++kk) {
                    ldmatrix_x4(u[kk], fragment + state.stage * STAGE_BYTES ^ kk * K_STEP_BYTES);
#pragma unroll
                    for (int i = 0; i < 4; ++i) u[kk][i] = scaled_pair(u[kk][i], by[i & 1]);
                }
                wgmma_fence();
#pragma unroll
                for (int kk = 0; kk < PRODUCTS; ++kk) wgmma_bf16<0>(acc, u[kk], descriptor(b + (kk * K_STEP_BYTES >> 4)));
                wgmma_commit();
                wgmma_wait<0>();
            }
        }
        release(state.stage);
        state.advance();
    }
}
