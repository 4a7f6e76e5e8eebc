// Kernels of layers whose slots are more than k choices per token: pairs of tokens with any number of experts each, identity
// experts, outputs per slot. P slots in all. Pairs are in the order of tokens; token t has those from token_offsets[t] on.
//   list_tokens       of pairs: the token of each, ids without those of no token, and token_offsets made fit for use
//   rows_to_tokens    expert_token_indices from slots, which dispatch writes for k = 1, to the tokens of these slots
//   mark_identity     token_index_map of the slots of identity experts becomes IDENTITY_EXPERT
//   slots_by_row      the slot of each of the experts' rows, for outputs and gradients that have a row per slot
//   aggregate_slots   aggregate of aggregation.cu, for pairs and identity experts
//   identity_weights  the gradient of the router weights of identity experts, <grad_out, x> of their token
//
// The given offsets may hold anything. A pair's token is found by a search that halves the offsets, always at the same
// places. A larger pair takes the same way or one to the right of it, so tokens have consecutive pairs whatever the offsets
// are. Every pair has at most one token, and its offsets enclose the pair. list_tokens also writes where each token's pairs
// begin by that search. These are the given offsets, if they lie in 0 .. P and do not fall.
//
// Launch:
//   aggregate_slots   as aggregate
//   identity_weights  a warp per token, TOKENS_PER_BLOCK warps per block
//   the others        a thread per slot, SLOTS_PER_BLOCK threads per block; list_tokens: per slot or offset, which are more
#include "aggregate.cuh"

template <class Id>
struct ListTokensParams {
    const Id* ids;       // (P,) int32 or int64, in
    const int* offsets;  // (L+1,) int32, in: as given
    int* masked_ids;     // (P,) int32, out: ids; -1 for pairs of no token, and for int64 ids < 0 or >= E
    int* tokens;         // (P,) int32, out: -1 for pairs of no token
    int* token_offsets;  // (L+1,) int32, out: rising, within 0 .. P
    int num_slots, num_tokens, num_experts;
};

struct RowsToTokensParams {
    const int* tokens;          // (P,) int32, in
    int* expert_token_indices;  // (P,) int32, in: slots; out: their tokens; -1 past the last row stays
    int num_slots;
};

template <class Id>
struct MarkIdentityParams {
    const Id* ids;         // (P,) int32 or int64, in; num_experts .. + identity_experts are identity experts
    const int* tokens;     // (P,) int32, in: -1 for pairs of no token; null where each slot has one
    int* token_index_map;  // (P,) int32, in and out
    int num_slots, num_experts, identity_experts;
};

struct SlotsByRowParams {
    const int* token_index_map;       // (P,) int32, in
    const int* expert_token_offsets;  // (E+1,) int32, in
    int* slots;                       // (P,) int32, out: -1 past the last row
    float* row_weights;               // (P,) fp32, out: 1 for each row; null: not wanted
    int num_slots, num_experts;
};

template <class T, class W>
struct SlotAggregateParams {
    const T* panel;              // (P, panel_ld) element, in: expert outputs, or input gradients
    const int* token_index_map;  // (P,) int32, in; below 0: no row of the panel
    const int* token_offsets;    // (L+1,) int32, in, of list_tokens; null where each token has k slots
    const W* weights;            // (P,) fp32 or element, in; null where no slot is scaled
    const T* source;             // (L, d) element, in: the rows of identity experts, x or grad_out; null without these experts
    T* out;                      // (L, d) element, out: columns first_column .. + columns
    int64 panel_ld;              // elements from row to row of the panel
    int L, k, d;
    int first_column, columns;
    int scales_rows;  // not 0: weights scale the rows of the panel as well as those of source
};

template <class T, class W>
struct IdentityWeightsParams {
    const T* x;                  // (L, d) element, in
    const T* grad_out;           // (L, d) element, in
    const int* token_index_map;  // (P,) int32, in
    const int* token_offsets;    // (L+1,) int32, in, of list_tokens; null where each token has k slots
    W* grad_weights;             // (P,) fp32 or element, out: of slots of identity experts alone
    int L, k, d;
};

// The number of offsets up to `slot` by the search: less 1 the slot's token, or -1 or L for none.
__device__ __forceinline__ int count_offsets(const int* offsets, unsigned number, unsigned top, int slot) {
    unsigned found = 0;
    for (unsigned step = top; step > 0; step >>= 1)
        if (found + step <= number && offsets[found + step - 1] <= slot) found += step;
    return static_cast<int>(found);
}

// The first slot for which count_offsets gives `found` or more. The search for such a slot visits these offsets, from the
// last to the first: where it goes to the right the slot is not below the offset, and where it could go to the right but
// goes to the left a slot from the offset on has more than `found` anyway.
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

// At least 3 blocks per multiprocessor: for more the compiler would spill.
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
