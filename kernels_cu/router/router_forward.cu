// Router forward: the k experts of each token, their weights, and partial sums for balancing losses (paper section 2.1). All
// lanes that hold a token choose its experts. router_token.cuh describes places, lanes and sums.
//
// Launch: grid ceil(L / tokens_per_block), THREADS threads. Dynamic shared memory in 4-byte words for each place, in this order:
//   2 * (k + MAX_LISTED)   the selection
//   E + 2 * groups         the choice of groups, without GROUP_LANES
//   sum_row_words(E + 2)   sums
#include "router_token.cuh"

constexpr int MEDIUM_ROW_BLOCKS = SUMS || (GROUP_TOP != 0 && GROUP_LANES == 0) ? 4 : 5;
constexpr int BLOCKS_PER_MULTIPROCESSOR = VALUES <= 8 ? 6 : VALUES <= 16 ? MEDIUM_ROW_BLOCKS : VALUES <= 32 ? 2 : 1;

// Computes the weights of a token's slots 0 .. number - 1. id_of(j) is the expert of slot j, or outside of 0 .. E - 1 if the slot is
// empty; logit_of(j) is its logit; put(j, weight, id) stores. longest: the largest number of slots in the warp.
template <class Id, class Logit, class Put>
__device__ __forceinline__ void weigh(int number, int longest, int E, const LogSumExp& lse, float scale, float eps, Id id_of,
                                      Logit logit_of, Put put) {
    const int lane = lane_of_token();
    const auto is_present = [&](int j) { return j < number && static_cast<unsigned>(id_of(j)) < static_cast<unsigned>(E); };
    float largest = minus_infinity();
    if (SCORE == SOFTMAX && RENORMALIZE) {
#pragma unroll 1  // one turn in most cases
        for (int j = lane; j < number; j += LANES)
            if (is_present(j)) largest = fmaxf(largest, logit_of(j));
        largest = max_of_lanes(largest);
    }
    float value = 0.f;  // the value of the lane's slot; in most cases a lane has one
    const auto value_of = [&](int j) {
        return SCORE == SOFTMAX && RENORMALIZE ? expf(logit_of(j) - largest) : score_in_row(logit_of(j), lse);
    };
    float total = 0.f;
    if (RENORMALIZE) {  // added in the order of slots, so that the sum's bits do not depend on LANES
        for (int base = 0; base < longest; base += LANES) {
            const int j = base + lane;
            value = is_present(j) ? value_of(j) : 0.f;
#pragma unroll
            for (int part = 0; part < LANES; part += 8)
                if (base + part < longest)
#pragma unroll
                    for (int i = part; i < min(part + 8, LANES); ++i) total += from_lane(value, i);  // 0 past the last slot
        }
        if (SCORE != SOFTMAX) total += eps;
    }
#pragma unroll 1
    for (int j = lane; j < number; j += LANES) {
        const bool present = is_present(j);
        if (!RENORMALIZE || longest > LANES) value = present ? value_of(j) : 0.f;
        if (RENORMALIZE && present) value = share_of_total(value, total);
        put(j, value * scale, present ? id_of(j) : -1);
    }
}

// The shared memory of the block's places.
struct PlaceMemory {
    Entry* slots;      // (TOKENS, k)
    Entry* listed;     // (TOKENS, MAX_LISTED)
    unsigned* groups;  // (TOKENS, group_words)
    int group_words;
};

// Routes one token if it is `there`. Other places of the warp call this too, as all lanes take part in shuffles. row: the place's
// row of sums. in_sums: whether the token's sequence has sums.
__device__ __forceinline__ void route_token(const RouterForwardParams& p, int token, bool there, bool in_sums, float* row,
                                            Held& held, const PlaceMemory& memory) {
    const int E = experts_of(p), lane = lane_of_token();
    const ELEMENT* logits = p.logits + static_cast<int64>(there ? token : 0) * E;
    const bool masked = there && p.token_mask != nullptr && !p.token_mask[token];
    const float scale = __int_as_float(p.scale), eps = __int_as_float(p.eps);
    float x[VALUES], scores[VALUES];
    const LogSumExp lse = read_token(p, token, there, in_sums, row, held, x, scores);
    if (GIVEN) {
        const Pairs pairs = pairs_of(p.token_offsets, token, p.k, p.num_pairs, there);
        const int longest = __reduce_max_sync(WARP, pairs.number);
        const auto id_of = [&](int j) {
            const int64 at = static_cast<int64>(pairs.first) + j;
            if (masked) return -1;
            if (!p.given_wide) return static_cast<const int*>(p.given)[at];
            const int64 id = static_cast<const int64*>(p.given)[at];
            return id < 0 || id >= E ? -1 : static_cast<int>(id);
        };
        weigh(
            pairs.number, longest, E, lse, scale, eps, id_of, [&](int j) { return to_float(logits[id_of(j)]); },
            [&](int j, float weight, int id) {
                p.weights[static_cast<int64>(pairs.first) + j] = weight;
                p.ids[static_cast<int64>(pairs.first) + j] = id;
            });
        return;
    }
    unsigned keys[VALUES];
    rank_experts(p, token, there, x, scores, lse, memory.groups, memory.group_words, keys);
    const int k = p.k, place = place_of_thread();
    Entry* const slots = memory.slots + place * k;
    select(keys, k, slots, memory.listed + place * MAX_LISTED);
    __syncwarp();
    const auto id_of = [&](int j) { return column_of_entry(slots[j]); };
    const auto logit_of = [&](int j) { return BIAS ? to_float(logits[min(id_of(j), E - 1)]) : from_sort_key(key_of(slots[j])); };
    int number = there && !masked ? k : 0;
    if (CUT) {
        int first_cut = number;
        float mass = 0.f;
        for (int base = 0; base < k; base += LANES) {
            const int j = base + lane;
            const float x_j = j < number ? logit_of(j) : 0.f, probability = j < number ? lse.probability(x_j) : 0.f;
            float before = 0.f;
#pragma unroll
            for (int i = 0; i < LANES; ++i) {
                if (i == lane) before = mass;
                if (base + i < k) mass += from_lane(probability, i);
            }
            const float compared = BIAS ? from_sort_key(key_of(slots[min(j, k - 1)])) : score_in_row(x_j, lse);
            // A NaN stays, so that it shows. Options that are not given are infinities.
            const bool stays = (j == 0 || !(before >= __int_as_float(p.top_p))) && !(compared < __int_as_float(p.threshold));
            if (j < number && !stays) first_cut = min(first_cut, j);
        }
        number = over_lanes(first_cut, [](int a, int b) { return min(a, b); });
    }
    // Each lane reads and overwrites its own slots. Empty slots are last.
    weigh(number, k, E, lse, scale, eps, id_of, logit_of, [&](int j, float weight, int id) {
        slots[j] = static_cast<Entry>(__float_as_uint(weight)) << 32 | static_cast<unsigned>(id);
    });
#pragma unroll 1
    for (int j = number + lane; j < k; j += LANES) slots[j] = 0xffffffffull;
    __syncwarp();
    // The warp's tokens are consecutive. So are their slots, in shared memory and in the results.
    const int place_in_warp = threadIdx.x % 32 / LANES, first = token - place_in_warp;
    const unsigned there_lanes = __ballot_sync(WARP, there);
    const int written = __popc(there_lanes) / LANES * k;
    const Entry* warp_slots = slots - place_in_warp * k;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < written; i += 32) {
        const Entry entry = warp_slots[i];
        p.weights[static_cast<int64>(first) * k + i] = __uint_as_float(static_cast<unsigned>(entry >> 32));
        p.ids[static_cast<int64>(first) * k + i] = static_cast<int>(static_cast<unsigned>(entry));
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR) router_forward(const RouterForwardParams p) {
    if (SUMS) let_next_launch_start();
    const int E = experts_of(p), stride = sum_row_words(E + 2);
    Entry* const all_slots = reinterpret_cast<Entry*>(dynamic_shared);
    Entry* const all_listed = all_slots + (GIVEN ? 0 : (TOKENS * p.k + 1) / 2 * 2);
    unsigned* const all_groups = reinterpret_cast<unsigned*>(all_listed + (GIVEN || LANES == 1 ? 0 : TOKENS * MAX_LISTED));
    const int group_words = GROUP_TOP && GROUP_LANES == 0 ? (E + 2 * p.groups + 3) / 4 * 4 : 0;
    float* const all_sums = reinterpret_cast<float*>(all_groups + TOKENS * group_words);
    const int first = blockIdx.x * p.tokens_per_block, end = min(p.L, first + p.tokens_per_block);

    if (GIVEN && p.token_offsets != nullptr && blockIdx.x == gridDim.x - 1) {  // pairs that belong to no token
        const int begin = clamped(p.token_offsets[0], p.num_pairs), behind = clamped(p.token_offsets[p.L], p.num_pairs);
        for (int i = threadIdx.x; i < begin; i += THREADS) p.weights[i] = 0.f, p.ids[i] = -1;
        for (int i = behind + threadIdx.x; i < p.num_pairs; i += THREADS) p.weights[i] = 0.f, p.ids[i] = -1;
    }
    const auto route = [&](int base, int stop, bool, bool counts, Held& held) {
        const int token = base + threadIdx.x / LANES;
        float* const row = all_sums + place_of_thread() * stride;
        route_token(p, token, token < stop, counts, row, held, {all_slots, all_listed, all_groups, group_words});
    };
    route_sequences(p, first, end, all_sums, route, [] { __syncthreads(); });
}
