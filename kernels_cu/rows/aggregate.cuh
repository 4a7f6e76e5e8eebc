// The sum over the slots of each token, which aggregation.cu, slots.cu and push.cu launch (paper sections 2.3 and 3.1, and
// section 3.2, step 3). Each token has one warp. The sum is in fp32 and in the order of slots, so that two runs give the same bits.
#pragma once
#include "common.cuh"

static_assert(PANEL_COLUMNS == 32 * 8, "a warp spans the columns of its grid row, 8 to a lane");
static_assert(TOKENS_PER_BLOCK * 32 <= 1024 && SLOTS_PER_BLOCK <= 1024, "threads of a block");

enum { NO_EXPERT = -1, IDENTITY_EXPERT = -2 };  // values of token_index_map that are not rows

// The slots of a token: those from token_offsets[token] to token_offsets[token + 1], or k slots if token_offsets is null.
struct TokenSlots {
    int first, count;  // 32 bits are enough: there are fewer than 2^31 slots
    __device__ __forceinline__ TokenSlots(const int* token_offsets, int64 token, int k) : first(token * k), count(k) {
        if (token_offsets) first = token_offsets[token], count = token_offsets[token + 1] - first;
    }
};

// Adds weight * row over a token's slots, and writes the sum to `out`, the token's row of the result. The row of a slot is the
// row of the panel that token_index_map names; a slot without an expert adds nothing. P is AggregateParams, PushSumParams, or
// SlotAggregateParams with SLOTS. With SLOTS tokens may have any number of slots, and the row of an identity expert's slot is
// the token's row of p.source.
template <bool ALIGNED_ROWS, bool SLOTS, class T, class P>
__device__ __forceinline__ void sum_of_slots(const P& p, int64 token, T* out) {
    const int64 column = blockIdx.y * int64(PANEL_COLUMNS) + (threadIdx.x & 31) * 8, valid = min(p.columns - column, int64(8));
    if (valid <= 0) return;
    int64 first = token * p.k;
    int k = p.k;
    if constexpr (SLOTS) {
        const TokenSlots slots(p.token_offsets, token, p.k);
        first = slots.first, k = slots.count;
    }
    const int* positions = p.token_index_map + first;
    const T* panel = p.panel + column;
    float sum[8] = {};
    for (int j0 = 0; j0 < k; j0 += 4) {
        Row8<T> rows[4];  // four rows are loaded before the first is used, to hide the latency
        float scale[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int position = j0 + i < k ? positions[j0 + i] : NO_EXPERT;
            if constexpr (SLOTS) {
                const bool identity = position == IDENTITY_EXPERT && p.source;
                const T* row =
                    identity ? p.source + token * p.d + p.first_column + column : panel + max(position, 0) * p.panel_ld;
                const bool scaled = identity || p.scales_rows;
                scale[i] = position < 0 && !identity ? 0.f : scaled ? to_float(p.weights[first + j0 + i]) : 1.f;
                rows[i].template load<ALIGNED_ROWS>(row, position < 0 && !identity ? 0 : valid);
            } else {
                scale[i] = position < 0 ? 0.f : p.weights ? to_float(p.weights[first + j0 + i]) : 1.f;
                rows[i].template load<ALIGNED_ROWS>(panel + max(position, 0) * p.panel_ld, position < 0 ? 0 : valid);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float row[8];
            rows[i].unpack(row);
#pragma unroll
            for (int c = 0; c < 8; ++c) sum[c] = fmaf(scale[i], row[c], sum[c]);
        }
    }
    store_row8<ALIGNED_ROWS>(out + p.first_column + column, sum, valid);
}

template <bool ALIGNED_ROWS, bool SLOTS, class T, class P>
__device__ void aggregate(const P& p) {
    const int64 token = blockIdx.x * int64(TOKENS_PER_BLOCK) + threadIdx.x / 32;
    if (token < p.L) sum_of_slots<ALIGNED_ROWS, SLOTS>(p, token, p.out + token * p.d);
}
