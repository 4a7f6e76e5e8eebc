// Adds the partial sums of router_forward.cu, which has a row for each block and sequence.
//
// Launch: grid (ceil((E + 2) / 32), num_sequences), ROWS_AT_ONCE = 32 warps. A block adds 32 columns of one sequence. Each warp adds
// every 32nd row. Then warp i adds the warps' sums of column i. The order of the additions is fixed.
#include "common.cuh"

static_assert(ROWS_AT_ONCE == 32, "a lane for each warp's sum, and a warp for each column");

struct RouterSumsParams {
    const float* partial_sums;  // (blocks + num_sequences, E + 2) fp32, in
    const int* sequences;       // (num_sequences + 1,) int32, in, or absent
    float* score_sums;          // (num_sequences, E) fp32, out, or absent
    float* z_sums;              // (num_sequences,) fp32, out, or absent
    float* entropy_sums;        // (num_sequences,) fp32, out, or absent
    int L, num_experts, tokens_per_block, num_sequences;
};

extern "C" __global__ void __launch_bounds__(32 * ROWS_AT_ONCE) router_sums(const RouterSumsParams p) {
    __shared__ float sums[ROWS_AT_ONCE][33];  // a column's are in different banks
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, E = p.num_experts, columns = E + 2;
    const int column = blockIdx.x * 32 + lane, sequence = blockIdx.y;
    int begin = sequence * (p.L / p.num_sequences), end = begin + p.L / p.num_sequences;
    if (p.sequences != nullptr) {
        begin = min(max(p.sequences[sequence], 0), p.L);
        end = min(max(p.sequences[sequence + 1], 0), p.L);
    }
    const int first = begin / p.tokens_per_block, stop = begin < end ? (end - 1) / p.tokens_per_block + 1 : first;
    float sum = 0.f;
    wait_for_last_launch();
    if (column < columns)
#pragma unroll 16  // so many loads are in flight; 528 blocks at most are 17 rows for a warp
        for (int block = first + warp; block < stop; block += ROWS_AT_ONCE)
            sum += p.partial_sums[static_cast<int64>(block + sequence) * columns + column];
    sums[warp][lane] = sum;
    __syncthreads();
    sum = sums[lane][warp];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const int added = blockIdx.x * 32 + warp;
    if (lane > 0 || added >= columns) return;
    if (added < E) {
        if (p.score_sums != nullptr) p.score_sums[static_cast<int64>(sequence) * E + added] = sum;
    } else if (added == E) {
        if (p.z_sums != nullptr) p.z_sums[sequence] = sum;
    } else if (p.entropy_sums != nullptr) {
        p.entropy_sums[sequence] = sum;
    }
}
