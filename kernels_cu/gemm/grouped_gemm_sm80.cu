// Grouped GEMMs over the rows of each expert (paper sections 3.1, 3.2 and 5.2), portable tier: compute capability 8.0 and
// later. The source is compiled once per step of the layer. ENTRY is the step's name:
//
//   ENTRY       A (rows)                B             K segments  EPILOGUE
//   up_fwd      x, gathered by token    w1            1           ACTIVATE: first_layer (a, b), y_swi = V(a) * M(b)
//   down_fwd    y_swi                   w2 panel      1           STORE: a column panel of the slots' outputs
//   down_bwd    grad_out, gathered      w2 transposed 1           ACTIVATE_BWD: first_layer_grad, weighted_y_swi, row sums of
//                                                                 grad_y_swi * y_swi for the router weights' gradient
//   up_bwd      first_layer_grad        w1 transposed 2 if gated  STORE: a column panel of the slots' input gradients
//
// up_bwd of a gated layer sums over gate's columns, then over up's: these are its two K segments. With BIASED up_fwd and
// down_fwd add a bias to the products, in fp32. With INTERLEAVED the columns of w1, of its bias and of first_layer are gate 0,
// up 0, gate 1, up 1, ...; up_bwd then has one K segment. With LORA the sums begin with the products of lora_rows, of
// lora_rows.cu, and of the expert's low-rank factor.
//
// With WEIGHTS_ON_INPUT the input of an expert is w * x, where w is the row's router weight. As (w * x) w1 = w * (x w1),
// first_layer stays unscaled, and y_swi = V(w * a) * M(w * b). With g and u the gradients of w * a and w * b, first_layer_grad
// is w * g and w * u, the row sums are of g * a + u * b, and weighted_y_swi is y_swi. up_fwd adds no bias in this case.
//
// R = expert_token_offsets[E] is the number of routed rows. They are in expert order, in arrays that have room for num_slots
// rows. A column panel is such an array (R, N) for some of the d columns. N is the number of columns of the result, h or the
// panel's. K is the depth of one segment. A block (CTA) computes one tile, BM rows of one expert by TILE_COLUMNS columns.
//
// Launch: THREADS threads per block, STAGES * STAGE_BYTES bytes of dynamic shared memory. The grid has a block for each pair of
// a row tile and a column tile (N / TILE_COLUMNS, rounded up). Only the device knows the number of row tiles. So the grid is
// sized for an upper bound, num_slots / BM + min(E, num_slots), and surplus blocks return at once.
#include "gemm_core_sm80.cuh"
#include "activation.cuh"

struct GroupedGemmParams {
    const element* a;                 // (L, lda) element, in, with GATHER: row r of the product is the row of r's token; else
                                      // (R, lda)
    const element *b0, *b1;           // per expert K x N, element, in. Element (k, n) of expert e is at e * expert_stride +
                                      // k * ldb + n, or n * ldb + k with B_K_CONTIGUOUS. ACTIVATE of a gated layer: gate and
                                      // up; STORE: K segments 0 and 1
    const int* expert_token_indices;  // (num_slots,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in: the first row of each expert, then R
    const int* row_tiles;             // (T+1, 2) int32, in: [0] = (number of row tiles, BM), then (expert, first row) of each
    element* first_layer;             // (R, 2N) or (R, N) element, a then b, or pairs of both with INTERLEAVED: out of ACTIVATE
                                      // (null: not kept), into ACTIVATE_BWD
    element* first_layer_grad;        // shape of first_layer, element, out; may be first_layer itself; null: not wanted
    element* result;                  // (R, N) element, out. ACTIVATE: y_swi, null: not wanted. ACTIVATE_BWD: weighted_y_swi =
                                      // weight * y_swi, may be y_swi itself, null: not wanted. STORE: the panel
    const element* y_swi;             // (R, N) element, in: ACTIVATE_BWD with save="paper"; null: computed from a and b
    const float* row_weights;         // (R,) fp32, in: the router weight of each row; read by ACTIVATE_BWD, and by ACTIVATE
                                      // with WEIGHTS_ON_INPUT
    float* partial_sums;              // (column tiles, num_slots) fp32, out of ACTIVATE_BWD: the row sums over each tile's
                                      // columns; null: not wanted
#if LORA
    const element* lora_rows;      // (R, ranks) element, in
    const element *lora0, *lora1;  // (E, ranks, columns of B) element, in, in B's memory order; ACTIVATE of a gated layer:
                                   // gate's and up's, else lora0 alone
#endif
#if BIASED
    const BIAS *bias0, *bias1;  // (E, N) BIAS, in. ACTIVATE of a gated layer: gate's and up's, or with INTERLEAVED bias0 alone,
                                // (E, 2N). STORE: bias0 alone
#endif
    int64 lda, expert_stride, ldb;  // in elements
#if LORA
    int64 lora_stride, lora_ld;  // as expert_stride and ldb, of lora0 and lora1
#endif
#if BIASED
    int64 bias_stride;  // elements of a bias from expert to expert
#endif
    int columns, depth;  // N, K
    int num_slots;       // L*k, or max_slots if that bounds the rows
#if LORA
    int ranks;  // a multiple of 16
#endif
    ACTIVATION_CONSTANTS  // for ACTIVATE and ACTIVATE_BWD
};

enum { STORE = 0, ACTIVATE = 1, ACTIVATE_BWD = 2 };

constexpr bool PAIRS = EPILOGUE == ACTIVATE && INTERLEAVED;      // a tile has BN / 2 pairs of columns, gate and up
constexpr bool SPLIT = EPILOGUE == ACTIVATE && GATED && !PAIRS;  // a tile has BN / 2 columns of gate, then as many of up
constexpr int GROUPS = SPLIT ? 2 : 1;
constexpr int B_PER_COLUMN = PAIRS ? 2 : 1;  // columns of B for each column of the result
static_assert(TILE_COLUMNS == (SPLIT || PAIRS ? BN / 2 : BN), "columns of the result in a tile");
static_assert(GATED || !INTERLEAVED, "gate and up alternate");
static_assert(EPILOGUE == STORE || !WEIGHTS_ON_INPUT || !BIASED, "weights would scale the bias too");
static_assert(K_SEGMENTS == 1 || (K_SEGMENTS == 2 && EPILOGUE == STORE && !GATHER), "b1 is up, or the second K segment");

extern "C" __global__ void __launch_bounds__(THREADS) ENTRY(const GroupedGemmParams p) {
    // The row of A for each row of the tile. Rows past the expert's last one repeat it, and their results are not stored.
    __shared__ int tile_rows[BM];
    static_assert(sizeof tile_rows <= STATIC_BYTES, "shared memory beside the stages");
    // After the main loop, behind what the warps stage: each row's weight, and its sums over each warp's columns.
    float* const tile_weights = reinterpret_cast<float*>(dynamic_shared) + THREADS / 32 * STAGED_FLOATS;
    float* const row_sums = tile_weights + BM;
    static_assert((THREADS / 32 * STAGED_FLOATS + BM + BN / 64 * BM) * sizeof(float) <= STAGES * STAGE_BYTES,
                  "the epilogue's arrays lie where the stages were");

    const int N = p.columns, K = p.depth;
    const int n_tiles = (N + TILE_COLUMNS - 1) / TILE_COLUMNS, m_tiles = p.row_tiles[0];
    if (blockIdx.x >= static_cast<int64>(m_tiles) * n_tiles) return;
    const Tile tile = raster(blockIdx.x, m_tiles, n_tiles);
    const int expert = p.row_tiles[2 * (tile.m + 1)], row0 = p.row_tiles[2 * (tile.m + 1) + 1];
    const int rows = min(BM, p.expert_token_offsets[expert + 1] - row0);
    const int n0 = tile.n * TILE_COLUMNS, b_n0 = n0 * B_PER_COLUMN, b_columns = N * B_PER_COLUMN;

    const int my_row = row0 + min(static_cast<int>(threadIdx.x), rows - 1);
    if (threadIdx.x < BM) tile_rows[threadIdx.x] = GATHER ? p.expert_token_indices[my_row] : my_row;
    __syncthreads();

    // Each copy has its address in the first k-step. A distance, the same for all copies of an operand, leads to that of a later
    // one. If the addresses themselves moved on, a warp would wait here until its last copies have read them.
    const Rows a_matrix(p.a, p.lda), gate(p.b0 + expert * p.expert_stride, p.ldb), up(p.b1 + expert * p.expert_stride, p.ldb);
    const int steps_per_segment = (K + BK - 1) / BK;
    const int ka = chunk_column<true>(), kb = chunk_column<B_K_CONTIGUOUS>();
    auto b_address = [&](int i, const Rows& first, const Rows& second, int k0) {
        const Rows& b = SPLIT && i >= B_COPIES / 2 ? second : first;
        const int j = SPLIT ? i % (B_COPIES / 2) : i;
        return B_K_CONTIGUOUS ? b.at(min(b_n0 + first_row() + j * PASS_ROWS, b_columns - 1), k0 + kb)
                              : b.at(k0 + first_line() + j % K_ROWS * PASS_LINES, b_n0 + slab_column(j) + kb);
    };
    auto copy_b = [&](int stage, int i, const char* from, int left) {
        const int j = SPLIT ? i % (B_COPIES / 2) : i;
        const int column = b_n0 + slab_column(j) + kb, row = first_line() + j % K_ROWS * PASS_LINES;
        // With TF32 each copy compares anew: predicates that last would leave none to the rounding of operands.
        const int valid = B_K_CONTIGUOUS ? left - kb
                          : TF32         ? (row < left ? b_columns - b_n0 - kb : 0) - slab_column(j)
                                         : (row < left ? b_columns - column : 0);
        copy_chunk(stage + A_BYTES + copy_offset<B_K_CONTIGUOUS>(i), from, valid);
    };
#if LORA
    const Rows lora_rows(p.lora_rows + int64(row0) * p.ranks, p.ranks);
    const Rows lora_gate(p.lora0 + expert * p.lora_stride, p.lora_ld), lora_up(p.lora1 + expert * p.lora_stride, p.lora_ld);
    const int lora_steps = (p.ranks + BK - 1) / BK;
#else
    constexpr int lora_steps = 0;
#endif
    const char *a_at[A_COPIES], *b_at[B_COPIES];
    int64 a_moved = 0, b_moved = 0;
#pragma unroll
    for (int i = 0; i < A_COPIES; ++i) a_at[i] = a_matrix.at(tile_rows[first_row() + i * PASS_ROWS], ka);
#pragma unroll
    for (int i = 0; i < B_COPIES; ++i) b_at[i] = b_address(i, gate, up, 0);
    const int64 b_step = B_K_CONTIGUOUS ? STEP_BYTES : BK * static_cast<int64>(gate.row_bytes);
    Accumulators acc;
    main_loop<true, B_K_CONTIGUOUS, SPLIT>(acc, lora_steps + steps_per_segment * K_SEGMENTS, [&](int stage, int step, int part) {
#if LORA
        if (step < lora_steps) {
            const int k0 = step * BK, left = p.ranks - k0;
#pragma unroll
            for (int i = A_COPIES * part / COPY_PARTS; i < A_COPIES * (part + 1) / COPY_PARTS; ++i)
                copy_chunk(stage + copy_offset<true>(i), lora_rows.at(min(first_row() + i * PASS_ROWS, rows - 1), k0 + ka),
                           left - ka);
#pragma unroll
            for (int i = B_COPIES * part / COPY_PARTS; i < B_COPIES * (part + 1) / COPY_PARTS; ++i)
                copy_b(stage, i, b_address(i, lora_gate, lora_up, k0), left);
            return;
        }
        step -= lora_steps;
#endif
        const int k0 = (step - (K_SEGMENTS == 2 && step >= steps_per_segment ? steps_per_segment : 0)) * BK;
        const bool past = K_SEGMENTS == 2 && step >= 2 * steps_per_segment;
        const int left = past ? 0 : K - k0;  // depth from here on; none past the last step
#pragma unroll
        for (int i = A_COPIES * part / COPY_PARTS; i < A_COPIES * (part + 1) / COPY_PARTS; ++i)
            copy_chunk(stage + copy_offset<true>(i), a_at[i] + a_moved, left - ka);
#pragma unroll
        for (int i = B_COPIES * part / COPY_PARTS; i < B_COPIES * (part + 1) / COPY_PARTS; ++i)
            copy_b(stage, i, b_at[i] + b_moved, left);
        if (part < COPY_PARTS - 1) return;
        // The second segment begins K columns after the first in A, and with up in place of gate in B.
        const bool turn = K_SEGMENTS == 2 && step == steps_per_segment - 1;
        a_moved += turn ? K * static_cast<int64>(sizeof(element)) - (steps_per_segment - 1) * STEP_BYTES : STEP_BYTES;
        b_moved += turn ? up.base - gate.base - (steps_per_segment - 1) * b_step : b_step;
    });

    const int warp_n = threadIdx.x / 64;
    const int64 first_layer_ld = GATED ? 2LL * N : N;
    using Staging = RowStaging<GROUPS>;
    const int b_n = b_n0 + warp_n * (SPLIT ? 32 : 64) + Staging::column_group() * 8, n = b_n / B_PER_COLUMN;
    const ActivationConstants constants = constants_of(p);
#if BIASED
    float bias[GROUPS][8];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        Row8<BIAS> loaded;
        loaded.template load<ALIGNED>((g ? p.bias1 : p.bias0) + expert * p.bias_stride + b_n, b_columns - b_n);
        loaded.unpack(bias[g]);
    }
    auto add_bias = [&](float (&v)[GROUPS][8]) {
#pragma unroll
        for (int i = 0; i < GROUPS * 8; ++i) v[i / 8][i % 8] += bias[i / 8][i % 8];
    };
#else
    auto add_bias = [](float (&)[GROUPS][8]) {};
#endif
    if constexpr (EPILOGUE == STORE) {
        for_each_row<GROUPS>(acc, [&](int row, float (&v)[GROUPS][8]) {
            add_bias(v);
            if (row < rows) store_row8<ALIGNED>(p.result + static_cast<int64>(row0 + row) * N + n, v[0], N - n);
        });
    } else if constexpr (EPILOGUE == ACTIVATE) {
        if (WEIGHTS_ON_INPUT) {
            if (threadIdx.x < BM) tile_weights[threadIdx.x] = p.row_weights[my_row];
            __syncthreads();
        }
        for_each_row<GROUPS>(acc, [&](int row, float (&v)[GROUPS][8]) {
            if (row >= rows) return;
            add_bias(v);
            const int64 r = row0 + row;
            if constexpr (PAIRS) {
                float y_swi[4];
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const float w = WEIGHTS_ON_INPUT ? tile_weights[row] : 1.f;
                    y_swi[c] = y_swi_of<ACTIVATION>(w * v[0][2 * c], w * v[0][2 * c + 1], constants);
                }
                if (p.first_layer) store_row8<ALIGNED>(p.first_layer + r * first_layer_ld + b_n, v[0], b_columns - b_n);
                if (p.result) store_row4<ALIGNED>(p.result + r * N + n, y_swi, N - n);
                return;
            }
            if (p.first_layer) {
                store_row8<ALIGNED>(p.first_layer + r * first_layer_ld + n, v[0], N - n);
                if (SPLIT) store_row8<ALIGNED>(p.first_layer + r * first_layer_ld + N + n, v[SPLIT], N - n);
            }
            if (!p.result) return;
            float y_swi[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const float w = WEIGHTS_ON_INPUT ? tile_weights[row] : 1.f;
                y_swi[c] = y_swi_of<ACTIVATION>(w * v[0][c], SPLIT ? w * v[SPLIT][c] : 1.f, constants);
            }
            store_row8<ALIGNED>(p.result + r * N + n, y_swi, N - n);
        });
    } else {
        // a and b of the next 16 rows are loaded while the epilogue works on these 16 rows. fp32 has no registers for that.
        // With INTERLEAVED a_loaded and b_loaded hold the first and the last four of the lane's eight pairs.
        constexpr int BUFFERS = FP32 ? 1 : 2;
        const int b_offset = INTERLEAVED ? 8 : N;
        Row8<element> a_loaded[BUFFERS][Staging::PASSES], b_loaded[BUFFERS][Staging::PASSES];
        auto load = [&](int i) {
#pragma unroll
            for (int pass = 0; pass < Staging::PASSES; ++pass) {
                const int row = warp_row(i) + Staging::row(pass);
                const element* from = p.first_layer + (row0 + min(row, rows - 1)) * first_layer_ld + (1 + INTERLEAVED) * n;
                // Nothing is loaded past the last row: first_layer_grad may be first_layer, and another warp overwrite the last
                // row.
                const int64 valid = row < rows ? N - n : 0;
                a_loaded[i % BUFFERS][pass].template load<ALIGNED>(from, (1 + INTERLEAVED) * valid);
                if (GATED)
                    b_loaded[i % BUFFERS][pass].template load<ALIGNED>(from + b_offset, INTERLEAVED ? 2 * valid - 8 : valid);
            }
        };
        load(0);
        if (threadIdx.x < BM) tile_weights[threadIdx.x] = p.row_weights[my_row];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (BUFFERS == 2 && i < 3) load(i + 1);
            Staging::put(warp_staging(), acc.v[i]);
#pragma unroll
            for (int pass = 0; pass < Staging::PASSES; ++pass) {
                const int row = warp_row(i) + Staging::row(pass), valid = row < rows ? N - n : 0;
                const int64 r = row0 + row;
                const float weight = tile_weights[row];
                float v[GROUPS][8], a_row[8], b_row[8], y_swi[8], grad_a[8], grad_b[8], dot = 0.f;
                Staging::get(v, warp_staging(), pass);
                a_loaded[i % BUFFERS][pass].unpack(a_row);
                if (GATED) b_loaded[i % BUFFERS][pass].unpack(b_row);
                if (INTERLEAVED) take_pairs_apart(a_row, b_row);
                if (p.y_swi) {
                    Row8<element> stored;
                    stored.template load<ALIGNED>(p.y_swi + r * N + n, valid);
                    stored.unpack(y_swi);
                }
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    if constexpr (WEIGHTS_ON_INPUT) {
                        const float b_or_1 = GATED ? weight * b_row[c] : 1.f;
                        const ActivatedBwd bwd = activate_bwd<ACTIVATION>(weight * a_row[c], b_or_1, v[0][c], constants);
                        y_swi[c] = bwd.y_swi;
                        dot = fmaf(bwd.grad_a, a_row[c], dot);
                        if (GATED) dot = fmaf(bwd.grad_b, b_row[c], dot);
                        grad_a[c] = weight * bwd.grad_a;
                        grad_b[c] = weight * bwd.grad_b;
                        continue;
                    }
                    const ActivatedBwd bwd =
                        activate_bwd<ACTIVATION>(a_row[c], GATED ? b_row[c] : 1.f, weight * v[0][c], constants);
                    if (!p.y_swi) y_swi[c] = bwd.y_swi;
                    dot = fmaf(v[0][c], y_swi[c], dot);
                    grad_a[c] = bwd.grad_a;
                    grad_b[c] = bwd.grad_b;
                    y_swi[c] *= weight;
                }
                if (p.first_layer_grad) {
                    if (INTERLEAVED) make_pairs(grad_a, grad_b);
                    element* to = p.first_layer_grad + r * first_layer_ld + (1 + INTERLEAVED) * n;
                    store_row8<ALIGNED>(to, grad_a, (1 + INTERLEAVED) * valid);
                    if (GATED) store_row8<ALIGNED>(to + b_offset, grad_b, INTERLEAVED ? 2 * valid - 8 : valid);
                }
                if (p.result) store_row8<ALIGNED>(p.result + r * N + n, y_swi, valid);
#pragma unroll
                for (int step = 1; step < 8; step <<= 1) dot += __shfl_xor_sync(0xffffffffu, dot, step);
                if (Staging::column_group() == 0) row_sums[warp_n * BM + row] = dot;
            }
            if (BUFFERS == 1 && i < 3) load(i + 1);
        }
        __syncthreads();
        if (p.partial_sums && threadIdx.x < rows) {
            float sum = row_sums[threadIdx.x];
#pragma unroll
            for (int w = 1; w < BN / 64; ++w) sum += row_sums[w * BM + threadIdx.x];
            p.partial_sums[static_cast<int64>(tile.n) * p.num_slots + row0 + threadIdx.x] = sum;
        }
    }
}
