// Weight gradients (paper section 3.2, Algorithm 1 lines 18 and 29), portable tier: compute capability 8.0 and later. For
// each expert dW = P^T Q, summed over the expert's routed rows. The source is compiled once per step of the layer. ENTRY
// is the step's name:
//
//   ENTRY       P (columns M)               Q (columns N)
//   down_wgrad  weighted_y_swi              grad_out, gathered by token   dW2 (h, d)
//   up_wgrad    x, gathered by token        first_layer_grad              dW1 (d, h) per half: gate, up
// If the weight is stored transposed, P and Q are exchanged, so that rows of dW are always contiguous. One operand is gathered
// by token. The other one has R rows in expert order.
//
// With ACCUMULATE the kernel adds dW in fp32 to the values of out0 and out1 and rounds the sum to OUT once. Without it OUT is
// element. The gradient of an expert without tokens becomes zeros, or with ACCUMULATE stays as it is. One block (CTA) sums a
// tile over all rows of its expert, in their order, so that two runs give the same bits.
//
// Launch: grid (tiles of M x N, E, halves), THREADS threads per block, STAGES * STAGE_BYTES bytes of dynamic shared memory.
// halves is 2 (gate and up) for up_wgrad of gated layers, else 1. A tile is BM x BN.
#include "gemm_core_sm80.cuh"

struct GroupedWgradParams {
    const element *p, *q;             // (L, ldp) and (L, ldq) element, in; R rows in place of L in the one that is not gathered
                                      // by token (GATHER_P, GATHER_Q)
    const int* expert_token_indices;  // (R,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in
    OUT *out0, *out1;                 // (M, N) of each expert, OUT, out, with ACCUMULATE also in: the gradients of gate and up,
                                      // or out0 alone
    int64 ldp, ldq;                   // elements from row to row
    int64 expert_stride, ldo;         // elements of out0 and out1 from expert to expert, and from row to row
    int p_half, q_half;               // elements from gate's columns to up's in P or Q; 0 in the operand that both halves share
    int rows, columns;                // M, N
};

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const __grid_constant__ GroupedWgradParams params) {
    const GroupedWgradParams p = params;  // a copy: fields of params that the main loop reads would cost registers
    const int M = p.rows, N = p.columns, expert = blockIdx.y;
    const Tile tile = raster(blockIdx.x, (M + BM - 1) / BM, (N + BN - 1) / BN);
    const int m0 = tile.m * BM, n0 = tile.n * BN;
    const int first = p.expert_token_offsets[expert], last = p.expert_token_offsets[expert + 1];
    if (ACCUMULATE && first == last) return;
    const Rows p_matrix(p.p + blockIdx.z * p.p_half, p.ldp), q_matrix(p.q + blockIdx.z * p.q_half, p.ldq);

    // Token indices are loaded one stage before the rows that they address.
    int tokens[K_ROWS];
    auto load_tokens = [&](int step) {
#pragma unroll
        for (int i = 0; i < K_ROWS; ++i) {
            const int row = first + step * BK + first_line() + i * PASS_LINES;
            tokens[i] = row < last ? p.expert_token_indices[row] : 0;
        }
    };
    load_tokens(0);
    const int chunk = chunk_column<false>();
    Accumulators acc;
    main_loop<false, false, false>(acc, (last - first + BK - 1) / BK, [&](int stage, int step, int part) {
        auto copy = [&](int i, int operand, const Rows& matrix, bool gathered, int start, int columns) {
            const int row = first + step * BK + first_line() + i % K_ROWS * PASS_LINES, column = start + slab_column(i) + chunk;
            const int of_row = gathered ? tokens[i % K_ROWS] : row;
            if (TF32) {  // one address for all columns of a row, and no predicates that last: see copy_b of the other products
                copy_chunk(stage + operand + copy_offset<false>(i), matrix.at(of_row, start + chunk) + slab_column(i) * 4,
                           (row < last ? columns - start - chunk : 0) - slab_column(i));
                return;
            }
            copy_chunk(stage + operand + copy_offset<false>(i), matrix.at(of_row, column), row < last ? columns - column : 0);
        };
#pragma unroll
        for (int i = A_COPIES * part / COPY_PARTS; i < A_COPIES * (part + 1) / COPY_PARTS; ++i)
            copy(i, 0, p_matrix, GATHER_P, m0, M);
#pragma unroll
        for (int i = B_COPIES * part / COPY_PARTS; i < B_COPIES * (part + 1) / COPY_PARTS; ++i)
            copy(i, A_BYTES, q_matrix, GATHER_Q, n0, N);
        if (part == COPY_PARTS - 1) load_tokens(step + 1);
    });

    OUT* out = (blockIdx.z ? p.out1 : p.out0) + expert * p.expert_stride;
    const int n = n0 + (threadIdx.x / 64) * 64 + RowStaging<1>::column_group() * 8;
    for_each_row<1>(acc, [&](int staged_row, float (&v)[1][8]) {
        const int row = tile_row<false>(staged_row);
        if (m0 + row >= M) return;
        OUT* to = out + (m0 + row) * p.ldo + n;
        if (ACCUMULATE) {
            Row8<OUT> held;
            float before[8];
            held.load<ALIGNED>(to, N - n);
            held.unpack(before);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[0][i] += before[i];
        }
        store_row8<ALIGNED>(to, v[0], N - n);
    });
}
