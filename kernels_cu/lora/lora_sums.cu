// The gradients of low-rank factors, from the parts that lora_gram.cu has summed: the parts of an expert, or of all experts
// that share the factor, are added in their order. An expert without rows gets zeros.
//
// Launch: grid (tiles of columns, tiles of ranks, outputs), THREADS threads. A tile has TILE elements, 8 << column_shift
// columns and 8 << rank_shift ranks. There is an output for each expert, or one. Threads read the parts along the ranks, and
// write along the dimension in which the output is contiguous. ALIGNED: the output has a multiple of 8 elements in it.
#include "lora_tile.cuh"

typedef OUT out_t;

struct LoraSumsParams {
    const float* parts;               // (numbers of chunks, columns, ranks) fp32, in; see lora_gram.cu
    const int* expert_token_offsets;  // (E+1,) int32, in
    out_t* out;                       // OUT, out: (outputs, rank, columns) if along_columns, or (outputs, columns, rank)
    int columns, ranks, rank;         // ranks: of the parts, a multiple of 16
    int experts, chunk_shift;         // experts: of an output
    int column_shift, rank_shift, along_columns;
};

static_assert(VECTORS == 1, "a thread's vector");

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const LoraSumsParams p) {
    const int column0 = blockIdx.x * 8 << p.column_shift, rank0 = blockIdx.y * 8 << p.rank_shift, output = blockIdx.z;
    const Place in(0, p.rank_shift);
    const int in_column = column0 + in.slow, in_rank = rank0 + in.fast;
    const bool exists = in_column < p.columns && in_rank < p.ranks;  // the others' sums are not stored
    const int64 step = int64(p.columns) * p.ranks;
    const float* const parts = p.parts + (exists ? int64(in_column) * p.ranks + in_rank : 0);
    float total[1][8] = {};
    for (int expert = output * p.experts; expert < (output + 1) * p.experts; ++expert) {
        const int begin = p.expert_token_offsets[expert], end = p.expert_token_offsets[expert + 1];
        const int chunks = (end - begin + (1 << p.chunk_shift) - 1) >> p.chunk_shift;
        const float* part = parts + ((begin >> p.chunk_shift) + expert) * step;
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk += 2, part += 2 * step) {  // both are in flight; most experts have few
            const bool two = chunk + 1 < chunks;
            Row8<float> given[2];
            float values[2][8];
            given[0].load<true>(part, 8);
            given[1].load<true>(two ? part + step : part, 8);
            issue_loads_now();
            given[0].unpack(values[0]), given[1].unpack(values[1]);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float sum = total[0][j] + values[0][j];
                total[0][j] = two ? sum + values[1][j] : sum;
            }
        }
    }
    if (p.along_columns) transpose_tile(total, p.rank_shift, p.column_shift);
    const Place at(0, p.along_columns ? p.column_shift : p.rank_shift);
    const int column = column0 + (p.along_columns ? at.fast : at.slow), rank = rank0 + (p.along_columns ? at.slow : at.fast);
    if (column >= p.columns || rank >= p.rank) return;
    out_t* const out = p.out + int64(output) * p.columns * p.rank;
    if (p.along_columns)
        store_row8<ALIGNED>(out + int64(rank) * p.columns + column, total[0], p.columns - column);
    else
        store_row8<ALIGNED>(out + int64(column) * p.rank + rank, total[0], p.rank - rank);
}
