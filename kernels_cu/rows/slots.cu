// Kernels of the options of slots, which the paper does not have: tokens with any number of experts, identity experts, and
// outputs with a row per slot. A layer has P slots. With token_offsets a slot is a pair of a token and an expert. Pairs are in
// the order of tokens, and token t has pairs token_offsets[t] to token_offsets[t + 1]. Without token_offsets each token has k
// slots. There are R rows in expert order, P or max_slots.
//   list_tokens       finds the token of each pair, masks the ids of pairs that belong to no token, and mends token_offsets
//   rows_to_tokens    replaces the slots in expert_token_indices, as dispatch writes them with k = 1, by their tokens
//   mark_identity     sets token_index_map of the slots of identity experts to IDENTITY_EXPERT
//   slots_by_row      lists the slot of each row in expert order, for outputs and gradients that have a row per slot
//   aggregate_slots   is aggregate of aggregation.cu, for pairs and identity experts
//   identity_weights  computes the gradient of the router weights of identity experts, <grad_out, x> of their token
//
// The caller's token_offsets may hold any numbers. list_tokens finds a pair's token by a binary search, whose tree of
// comparisons is the same for all pairs. A larger pair takes the same branches or one further to the right. So it never ends at
// a smaller token, and each token's pairs are consecutive whatever the offsets are. A pair belongs to one token at most, whose
// given offsets enclose the pair. list_tokens also writes mended offsets, which say where each token's pairs begin by this
// search. They equal the given offsets if these lie in 0 .. P and never decrease.
//
// Launch:
//   aggregate_slots   as aggregate of aggregation.cu
//   identity_weights  grid L / TOKENS_PER_BLOCK, rounded up; one warp per token, TOKENS_PER_BLOCK warps per block
//   list_tokens       grid max(P, L + 1) / SLOTS_PER_BLOCK, rounded up; one thread per pair and per offset, SLOTS_PER_BLOCK
//                     threads per block
//   the others        grid P / SLOTS_PER_BLOCK, rounded up; one thread per slot, SLOTS_PER_BLOCK threads per block
#include "aggregate.cuh"

template <class Id>
struct ListTokensParams {
    const Id* ids;       // (P,) int32 or int64, in
    const int* offsets;  // (L+1,) int32, in: the caller's token_offsets
    int* masked_ids;     // (P,) int32, out: ids; -1 for pairs that belong to no token, and for int64 ids < 0 or >= E
    int* tokens;         // (P,) int32, out: the token of each pair, -1 if it belongs to none
    int* token_offsets;  // (L+1,) int32, out: never decreasing, within 0 .. P
    int num_slots, num_tokens, num_experts;  // P, L, E
};

struct RowsToTokensParams {
    const int* tokens;          // (P,) int32, in
    int* expert_token_indices;  // (P,) int32, in: the slot of each row; out: its token; -1 past the last row stays
    int num_slots;              // P
};

template <class Id>
struct MarkIdentityParams {
    const Id* ids;                                 // (P,) int32 or int64, in; identity experts have ids from num_experts on
    const int* tokens;                             // (P,) int32, in: of list_tokens; null if each token has k slots
    int* token_index_map;                          // (P,) int32, out; other slots stay
    int num_slots, num_experts, identity_experts;  // P, E, and the number of identity experts
};

struct SlotsByRowParams {
    const int* token_index_map;       // (P,) int32, in: the row of each slot; below 0: none
    const int* expert_token_offsets;  // (E+1,) int32, in: the last one is the number of routed rows
    int* slots;                       // (P,) int32, out: the slot of each row, -1 past the last routed row
    float* row_weights;               // (R,) fp32, out: 1 for each routed row; null: not wanted
    int num_slots, num_experts;       // P, E
};

template <class T, class W>
struct SlotAggregateParams {
    const T* panel;              // (R, panel_ld) element, in: the experts' outputs, or the gradients of their inputs
    const int* token_index_map;  // (P,) int32, in: the row of each slot in the panel, or IDENTITY_EXPERT, or -1
    const int* token_offsets;    // (L+1,) int32, in: of list_tokens; null if each token has k slots
    const W* weights;            // (P,) fp32 or element, in; null if no slot is scaled
    const T* source;             // (L, d) element, in: x or grad_out, whose rows identity experts add; null: no such experts
    T* out;                      // (L, d) element, out: columns first_column .. + columns
    int64 panel_ld;              // elements from row to row of the panel
    int L, k, d;
    int first_column, columns;
    int scales_rows;  // not 0: weights scale the rows of the panel too; they always scale those of source
};

template <class T, class W>
struct IdentityWeightsParams {
    const T* x;                  // (L, d) element, in
    const T* grad_out;           // (L, d) element, in
    const int* token_index_map;  // (P,) int32, in
    const int* token_offsets;    // (L+1,) int32, in: of list_tokens; null if each token has k slots
    W* grad_weights;             // (P,) fp32 or element, out; slots of other experts stay
    int L, k, d;
};

// The number of offsets that are no larger than `slot`, by binary search. If it is n, the pair's token is n - 1, and there is
// none if this is -1 or L. top: the largest power of two up to number, which is L + 1.
__device__ __forceinline__ int count_offsets(const int* offsets, unsigned number, unsigned top, int slot) {
    unsigned found = 0;
    for (unsigned step = top; step > 0; step >>= 1)
        if (found + step <= number && offsets[found + step - 1] <= slot) found += step;
    return static_cast<int>(found);
}

// The first slot for which count_offsets returns `found` or more. The loop visits the offsets that a search with the result
// `found` compares, from the last to the first. Where this search goes to the right, the slot is at least the offset. Where it
// goes to the left, a slot from the offset on would go to the right, to a larger result.
__device__ __forceinline__ int first_slot_of(const int* offsets, unsigned number, unsigned top, unsigned found) {
    int first = 0;
    for (unsigned step = 1; step <= top; step <<= 1) {
        const unsigned at = (found & ~(2 * step - 1)) + step;
        if (at > number) continue;
        first = found & step ? max(first, offsets[at - 1]) : min(first, offsets[at - 1]);
    }
    return first;
}

template <class Id>
__device__ void list_tokens(const ListTokensParams<Id>& p) {
    const int64 i = blockIdx.x * int64(SLOTS_PER_BLOCK) + threadIdx.x;
    const unsigned number = p.num_tokens + 1u, top = 0x80000000u >> __clz(number);
    if (i < p.num_slots) {
        const int token = count_offsets(p.offsets, number, top, static_cast<int>(i)) - 1;
        const bool has_token = token >= 0 && token < p.num_tokens;
        const Id id = p.ids[i];
        const bool fits = sizeof(Id) == 4 || (id >= 0 && id < p.num_experts);
        p.tokens[i] = has_token ? token : -1;
        p.masked_ids[i] = has_token && fits ? static_cast<int>(id) : -1;
    }
    if (i <= p.num_tokens)
        p.token_offsets[i] = min(max(first_slot_of(p.offsets, number, top, static_cast<unsigned>(i) + 1), 0), p.num_slots);
}

template <class Id>
__device__ void mark_identity(const MarkIdentityParams<Id>& p) {
    const int64 slot = blockIdx.x * int64(SLOTS_PER_BLOCK) + threadIdx.x;
    if (slot >= p.num_slots) return;
    const Id id = p.ids[slot];
    const bool identity = id >= p.num_experts && id - p.num_experts < p.identity_experts;
    if (identity && (!p.tokens || p.tokens[slot] >= 0)) p.token_index_map[slot] = IDENTITY_EXPERT;
}

template <bool ALIGNED_ROWS, class T, class W>
__device__ void identity_weights(const IdentityWeightsParams<T, W>& p) {
    const int64 token = blockIdx.x * int64(TOKENS_PER_BLOCK) + threadIdx.x / 32;
    const int lane = threadIdx.x & 31;
    if (token >= p.L) return;
    const TokenSlots slots(p.token_offsets, token, p.k);
    const int* positions = p.token_index_map + slots.first;
    bool found = false;
    for (int j = lane; j < slots.count; j += 32) found |= positions[j] == IDENTITY_EXPERT;
    if (!__any_sync(0xffffffffu, found)) return;
    float sum = 0.f;
    for (int column = lane * 8; column < p.d; column += 32 * 8) {
        Row8<T> loaded[2];
        float x[8], grad[8];
        loaded[0].template load<ALIGNED_ROWS>(p.x + token * p.d + column, p.d - column);
        loaded[1].template load<ALIGNED_ROWS>(p.grad_out + token * p.d + column, p.d - column);
        loaded[0].unpack(x);
        loaded[1].unpack(grad);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum = fmaf(x[c], grad[c], sum);
    }
    sum = warp_sum(sum);
    for (int j = lane; j < slots.count; j += 32)
        if (positions[j] == IDENTITY_EXPERT) store_one(p.grad_weights + slots.first + j, sum);
}

extern "C" __global__ void __launch_bounds__(SLOTS_PER_BLOCK) rows_to_tokens(const RowsToTokensParams p) {
    const int64 row = blockIdx.x * int64(SLOTS_PER_BLOCK) + threadIdx.x;
    if (row >= p.num_slots) return;
    const int slot = p.expert_token_indices[row];
    if (slot >= 0) p.expert_token_indices[row] = p.tokens[slot];
}

extern "C" __global__ void __launch_bounds__(SLOTS_PER_BLOCK) slots_by_row(const SlotsByRowParams p) {
    const int64 slot = blockIdx.x * int64(SLOTS_PER_BLOCK) + threadIdx.x;
    if (slot >= p.num_slots) return;
    const int row = p.token_index_map[slot];
    if (row >= 0) {
        p.slots[row] = static_cast<int>(slot);
        if (p.row_weights) p.row_weights[row] = 1.f;
    }
    if (slot >= p.expert_token_offsets[p.num_experts]) p.slots[slot] = -1;
}

#define IDS_ENTRIES(SUFFIX, ID)                                                                                            \
    extern "C" __global__ void __launch_bounds__(SLOTS_PER_BLOCK) list_tokens_##SUFFIX(const ListTokensParams<ID> p) {     \
        list_tokens(p);                                                                                                    \
    }                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(SLOTS_PER_BLOCK) mark_identity_##SUFFIX(const MarkIdentityParams<ID> p) { \
        mark_identity(p);                                                                                                  \
    }
IDS_ENTRIES(int32, int)
IDS_ENTRIES(int64, long long)

// aggregate_slots has 3 blocks per multiprocessor at least. With more the compiler would spill registers.
#define ROWS_ENTRY(SUFFIX, ALIGNED_ROWS, T, W)                             \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK, 3) \
        aggregate_slots_##SUFFIX(const SlotAggregateParams<T, W> p) {      \
        aggregate<ALIGNED_ROWS, true, T>(p);                               \
    }                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * TOKENS_PER_BLOCK)    \
        identity_weights_##SUFFIX(const IdentityWeightsParams<T, W> p) {   \
        identity_weights<ALIGNED_ROWS>(p);                                 \
    }
#define ROWS_ENTRIES(SUFFIX, T, W) \
    ROWS_ENTRY(SUFFIX, true, T, W) \
    ROWS_ENTRY(SUFFIX##_unaligned, false, T, W)
ROWS_ENTRIES(bfloat16_float32, bf16, float)
ROWS_ENTRIES(bfloat16_bfloat16, bf16, bf16)
ROWS_ENTRIES(float16_float32, fp16, float)
ROWS_ENTRIES(float16_float16, fp16, fp16)
ROWS_ENTRIES(float32_float32, float, float)
