// The gradients of low-rank factors, from the parts that lora_gram.cu has summed: the parts of an expert, or of all experts
// that share the factor, are added in their order. An expert without rows gets zeros.
//
// Launch: grid (tiles of COLUMNS columns, ranks / RANKS, outputs), COLUMNS * RANKS / PER_THREAD threads. There is an output for
// each expert, or one. Threads read the parts along the ranks, and write along the dimension in which the output is contiguous.
#include "common.cuh"

typedef OUT out_t;

struct LoraSumsParams {
    const float* parts;               // (numbers of chunks, columns, ranks) fp32, in; see lora_gram.cu
    const int* expert_token_offsets;  // (E+1,) int32, in
    out_t* out;                       // OUT, out: (outputs, rank, columns) or (outputs, columns, rank), as the strides say
    int64 out_stride, rank_stride, column_stride;  // of out, in elements
    int columns, ranks, rank;                      // ranks: of the parts, a multiple of 16
    int experts, chunk_shift;                      // experts: of an output
};

constexpr int COLUMNS = 64, RANKS = 16, PER_THREAD = COLUMNS * RANKS / THREADS, LANE_COLUMNS = THREADS / RANKS;
static_assert(THREADS % COLUMNS == 0 && THREADS % RANKS == 0, "whole lines");

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const LoraSumsParams p) {
    __shared__ float tile[COLUMNS][RANKS + 1];
    const int column0 = blockIdx.x * COLUMNS, rank0 = blockIdx.y * RANKS, output = blockIdx.z;
    const int lane_rank = threadIdx.x % RANKS, lane_column = threadIdx.x / RANKS;
    float total[PER_THREAD] = {};
    for (int expert = output * p.experts; expert < (output + 1) * p.experts; ++expert) {
        const int begin = p.expert_token_offsets[expert], end = p.expert_token_offsets[expert + 1];
        const int chunks = (end - begin + (1 << p.chunk_shift) - 1) >> p.chunk_shift;
        const float* part = p.parts + (int64((begin >> p.chunk_shift) + expert) * p.columns + column0) * p.ranks + rank0;
#pragma unroll 4
        for (int chunk = 0; chunk < chunks; ++chunk, part += int64(p.columns) * p.ranks)
#pragma unroll
            for (int i = 0; i < PER_THREAD; ++i) {
                const int column = lane_column + LANE_COLUMNS * i;
                if (column0 + column < p.columns) total[i] += part[column * p.ranks + lane_rank];
            }
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) tile[lane_column + LANE_COLUMNS * i][lane_rank] = total[i];
    __syncthreads();
    const bool along_columns = p.column_stride < p.rank_stride;
    out_t* const out = p.out + output * p.out_stride;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
        const int index = threadIdx.x + THREADS * i;
        const int c = along_columns ? index % COLUMNS : index / RANKS, r = along_columns ? index / COLUMNS : index % RANKS;
        if (column0 + c < p.columns && rank0 + r < p.rank)
            store_one(out + (column0 + c) * p.column_stride + (rank0 + r) * p.rank_stride, tile[c][r]);
    }
}
