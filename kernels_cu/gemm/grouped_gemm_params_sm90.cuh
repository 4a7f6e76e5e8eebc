// Parameters of grouped_gemm_sm90.cu, which says what R, N, K and num_slots are. There are L tokens and E experts.
#pragma once
#include "activation.cuh"
#include "pipeline_sm90.cuh"

typedef WEIGHT weight_t;
#if FP8_SAVED
typedef unsigned char saved_t;
#else
typedef element saved_t;
#endif

struct GroupedGemmParams {
#if !GATHER
    TensorMap a;  // (lda, R, 1) operand, in, boxes of BK x 128 x 1; K segment i begins at column i * depth
#endif
    TensorMap b0, b1;  // operand, in: (k, n, expert) with B_K_CONTIGUOUS in boxes of BK x 128 x 1, else
                       // (n, k, expert) in boxes of 64 x 64 x 1; gate and up, or K segments 0 and 1
#if LORA_STAGES
    TensorMap lora_rows;  // (ranks, R, 1) element, in, boxes of BK x BM x 1
#endif
#if LORA
    TensorMap lora0, lora1;  // element, in, as b0 and b1, where k are the ranks; gate and up, else lora0 alone. With
                             // LORA_IN_SPARE (n, 16, expert) in boxes of 64 x 16 x 1
#endif
#if GATHER
    const operand* a;  // (L, lda) operand, in: rows of tokens
#endif
    const int* expert_token_indices;  // (num_slots,) int32, in: the token of each row
    const int* expert_token_offsets;  // (E+1,) int32, in: the first row of each expert, then R
    const int* row_tiles;             // (T+1, 2) int32, in: [0] = (row tile count, BM), then (expert, first row) of each
    saved_t* first_layer;             // (R, 2N) or (R, N) element, a then b, or pairs of both with INTERLEAVED; out of up_fwd
                                      // (null: not kept), into down_bwd; in the layout of SavedScales with FP8_SAVED
    element* first_layer_grad;        // (R, 2N) or (R, N) element, out of down_bwd; without FP8_SAVED it may be first_layer;
                                      // null: not wanted
    element* result;                  // element, out.
                                      // ActivateRows, ActivatePairs: (R, N) y_swi, null: not wanted
                                      // ActivateBwdRows: (R, N) weighted_y_swi, may be y_swi itself, null: not wanted
                                      // StoreRows: the panel, (R, result_ld). It may be A's memory if N <= BN: then no other
                                      // tile needs the rows of A that a tile overwrites
                                      // StoreTokenRows: (L, result_ld), zeros for tokens without an expert; unused if PUSHES
    const element* y_swi;             // (R, N) element, in: the result of up_fwd; read by down_bwd with STORED_Y_SWI
    const weight_t* weights;          // in. ActivateBwdRows, and others with WEIGHTS_ON_INPUT: (R,) fp32, the router weight of
                                      // each row. StoreTokenRows: (L,) weight_t, that of each token; null: 1
    float* partial_sums;              // (column tiles, num_slots) fp32, out of down_bwd: row sums over each tile's columns;
                                      // null: not wanted
    const int* token_index_map;       // (L,) int32, in: read by StoreTokenRows, below 0 for tokens without an expert
#if LORA_IN_SPARE
    const element* lora_rows;  // (R, 16) element, in
#endif
    int* tile_counter;  // (1,) int32, in and out: of the dynamic schedule, 0 at launch; null: static schedule
#if FP8
    const float* a_scales;    // fp32, in. GATHER: (L,), one per token. Else (k-steps, scales_ld), one per row and k-step
    const float* b_scales;    // (E, EXPERT_SCALES) fp32, in: one for the expert's weight, or one for gate and one for up
    operand* quantised;       // e4m3, out; null: not wanted. ActivateRows, ActivatePairs: (R, N) y_swi. ActivateBwdRows: (R, 2N)
                              // or (R, N) first_layer_grad
    float* quantised_scales;  // (groups, scales_ld) fp32, out: one per row and GROUP_COLUMNS columns of each half of quantised,
                              // or with INTERLEAVED of all its columns
#endif
#if FP8_WGRAD
    const float* x_scales;            // (L,) fp32, in: of each token's x in e4m3
    unsigned* first_layer_grad_amax;  // (E, halves, groups) bits of fp32, in and out, zeros at launch: largest magnitudes of
                                      // first_layer_grad times x_scales, of an expert's rows and GROUP_COLUMNS columns
    unsigned* result_amax;            // (E, groups), the same of result times a_scales
#endif
#if BIASED
    const BIAS *bias0, *bias1;  // (E, columns of B) BIAS, in. SPLIT: gate's and up's, (E, N) each; else bias0 alone
#endif
#if PUSHES
    const unsigned long long* peers;  // (P,) addresses of the buffers of P GPUs, in
    const unsigned char* needed;      // (L,) bool, in: tokens whose GPU reads the result; rows of others are not stored
#endif
#if GATHER
    int64 lda;  // elements from row to row of a
#endif
    int64 result_ld;  // elements from row to row of result; only read by StoreRows and StoreTokenRows
#if FP8
    int64 scales_ld;  // elements of a_scales and quantised_scales from one group of columns to the next; at least R
#endif
#if BIASED
    int64 bias_stride;  // elements of a bias from expert to expert
#endif
#if PUSHES
    int64 offset;     // bytes from a GPU's address to its (L, result_ld) element, out
    int64 first_row;  // row there of the GPU's first token
#endif
    int columns, depth;  // N, K
    int num_slots;       // L*k, or max_slots if that bounds the rows. StoreTokenRows: L
#if LORA_STAGES
    int lora_steps;  // k-steps of the ranks
#endif
#if PUSHES
    int rows_per_peer;  // tokens of each GPU; L is P times as many
#endif
    ACTIVATION_CONSTANTS  // for the epilogues of up_fwd and down_bwd
};
