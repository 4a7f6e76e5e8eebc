// The k largest of a token's keys, in order (part of paper section 2.1). The LANES lanes that hold the token have the keys in
// their registers. If keys are equal, the one in the lower column ranks first.
//
// A single lane picks the largest key k times. Several lanes find the k-th largest of their maxima. At least k keys of the
// token reach it, and in most cases few do. They are listed in shared memory as entries, and an entry's rank is the number of
// larger ones. If more than MAX_LISTED keys reach the bound, the k-th key is found bit by bit. For k > LANES all keys reach it.
#pragma once
#include "router_scores.cuh"

typedef unsigned long long Entry;  // key, then the complement of its column; larger entries rank first

static_assert(MAX_LISTED >= 64 && MAX_LISTED % 4 == 0, "k keys fit, in groups of four, and what follows is aligned");
static_assert(LANES == 1 || LANES >= 4, "up to 3 lanes fill the last group of four entries");

__device__ __forceinline__ Entry entry_of(unsigned key, int column) {
    return static_cast<Entry>(key) << 32 | ~static_cast<unsigned>(column);
}
__device__ __forceinline__ unsigned key_of(Entry entry) { return static_cast<unsigned>(entry >> 32); }
__device__ __forceinline__ int column_of_entry(Entry entry) { return static_cast<int>(~static_cast<unsigned>(entry)); }

__device__ __forceinline__ void pick(unsigned (&keys)[VALUES], int k, Entry* slots) {
    for (int j = 0; j < k; ++j) {
        unsigned best = keys[0];
#pragma unroll
        for (int i = 1; i < VALUES; ++i) best = max(best, keys[i]);
        int first = 0;
#pragma unroll
        for (int i = VALUES - 1; i > 0; --i)
            if (keys[i] == best) first = i;
        if (keys[0] == best) first = 0;
        slots[j] = entry_of(best, first);
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (i == first) keys[i] = 0;
    }
}

// The k-th largest of the values that the token's lanes give, one each. They are sorted by a bitonic network.
__device__ __forceinline__ unsigned kth_of_lanes(unsigned v, int k) {
    const int lane = lane_of_token();
#pragma unroll
    for (int size = 2; size <= LANES; size <<= 1)
#pragma unroll
        for (int stride = size / 2; stride > 0; stride >>= 1) {
            const unsigned other = __shfl_xor_sync(WARP, v, stride);
            const bool keeps_larger = ((lane & stride) == 0) == ((lane & size & (LANES - 1)) == 0);
            v = keeps_larger ? max(v, other) : min(v, other);
        }
    return from_lane(v, k - 1);
}

// The bound of a list: it has the keys above `key`, and those equal to `key` in columns up to `column`, counted from the lane's
// first column.
struct Bound {
    unsigned key;
    int column;
};

template <class F>
__device__ __forceinline__ int count(F is_counted) {
    int found = 0;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) found += is_counted(i) ? 1 : 0;
    return found;
}

// The bound that exactly k keys pass, found bit by bit. All lanes of the warp call it.
__device__ __forceinline__ Bound exact_bound(const unsigned (&keys)[VALUES], int k) {
    unsigned key = 0;
#pragma unroll 1
    for (int bit = 31; bit >= 0; --bit) {
        const unsigned trial = key | 1u << bit;
        if (count_of_lanes(count([&](int i) { return keys[i] >= trial; })) >= k) key = trial;
    }
    const int missing = k - count_of_lanes(count([&](int i) { return keys[i] > key; }));
    int column = 0;
#pragma unroll 1
    for (int bit = COLUMN_BITS - 1; bit >= 0; --bit) {
        const int trial = column | 1 << bit;
        const int mine = trial - first_column();
        if (count_of_lanes(count([&](int i) { return keys[i] == key && columns_after_first(i) < mine; })) < missing)
            column = trial;
    }
    return {key, column - first_column()};
}

// A bit for each of a lane's values.
struct Marks {
    static constexpr int WORDS = (VALUES + 31) / 32;
    unsigned words[WORDS];
    template <class F>
    __device__ __forceinline__ explicit Marks(F is_marked) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) words[w] = 0;
#pragma unroll
        for (int i = 0; i < VALUES; ++i)
            if (is_marked(i)) words[i / 32] |= 1u << i % 32;
    }
    __device__ __forceinline__ bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
    __device__ __forceinline__ int number() const {
        int found = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) found += __popc(words[w]);
        return found;
    }
};

// The place where this lane's entries begin in the token's list, and the number of entries of all its lanes. mine: this lane's.
struct Share {
    int begin, total;
};
__device__ __forceinline__ Share share_of(int mine) {
    int before = mine;
#pragma unroll
    for (int step = 1; step < LANES; step <<= 1) {
        const int other = __shfl_up_sync(WARP, before, step, LANES);
        if (lane_of_token() >= step) before += other;
    }
    return {before - mine, from_lane(before, LANES - 1)};
}

// Writes the entries of the marked keys one after the other, from entry `begin` of the list at shared address `listed` on.
// first_column: this lane's. The address goes through a shuffle so that the compiler keeps it in a register. It would compute
// an address in dynamic_shared again for each key.
__device__ __forceinline__ void list(const unsigned (&keys)[VALUES], unsigned listed, int begin, int first_column,
                                     const Marks& marks) {
    unsigned at = from_lane(listed, 0) + begin * static_cast<int>(sizeof(Entry));
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (marks.has(i)) {
            store_shared_4_4(at, ~static_cast<unsigned>(first_column + columns_after_first(i)), keys[i]);
            at += sizeof(Entry);
        }
}

// Lists the entries of all keys >= `key`, which are k or more. If a token of the warp has more than MOST of them, it lists
// exactly the k largest. Returns the number of entries.
template <int MOST>
__device__ __forceinline__ int list_from(unsigned key, const unsigned (&keys)[VALUES], int k, Entry* listed) {
    Marks marks([&](int i) { return keys[i] >= key; });
    Share share = share_of(marks.number());
    if (__any_sync(WARP, share.total > MOST)) {
        const Bound bound = exact_bound(keys, k);
        marks =
            Marks([&](int i) { return keys[i] > bound.key || (keys[i] == bound.key && columns_after_first(i) <= bound.column); });
        share = share_of(marks.number());
    }
    list(keys, shared_address(listed), share.begin, first_column(), marks);
    return share.total;
}

// Writes the k largest entries to slots[0 .. k - 1] in shared memory, in order. The warp must synchronize before it reads them.
// listed: shared memory for MAX_LISTED entries.
__device__ __forceinline__ void select(unsigned (&keys)[VALUES], int k, Entry* slots, Entry* listed) {
    if (LANES == 1) {
        pick(keys, k, slots);
        return;
    }
    unsigned key = 0;
    if (k <= LANES) {
        unsigned largest = keys[0];
#pragma unroll
        for (int i = 1; i < VALUES; ++i) largest = max(largest, keys[i]);
        key = kth_of_lanes(largest, k);
    }
    const int total = list_from<MAX_LISTED>(key, keys, k, listed);
    // Entries are read in groups of four. The entry 0, which ranks behind all others, fills the last group.
    if (lane_of_token() < (-total & 3)) listed[total + lane_of_token()] = 0;
    __syncwarp();
#pragma unroll 1
    for (int i = lane_of_token(); i < total; i += LANES) {
        const Entry entry = listed[i];
        int rank = 0;
#pragma unroll 1
        for (int other = 0; other < total; other += 4)
#pragma unroll
            for (int j = 0; j < 4; ++j) rank += listed[other + j] > entry ? 1 : 0;
        if (rank < k) slots[rank] = entry;
    }
}

// If GROUP_LANES > 0, so many lanes hold a group, each lane one vector of it.
constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }
constexpr int GROUPS_HELD = next_power_of_two(VECTORS);  // groups that a lane has vectors of, and some that do not exist
constexpr int GROUP_APART = GROUP_LANES / GROUPS_HELD;   // see kept_vectors: lanes that end up with the same group

// Returns a bit for each of the lane's vectors, GROUP_APART bits apart: it is set if the vector is in one of the `kept` best groups. A group ranks as
// in keep_groups below.
//
// A lane has parts of as many groups as it has vectors. In each step a lane gives half of its groups to another lane and gets
// that lane's parts of the other half, until each group's two largest keys are in lanes of its own.
template <int TOP>
__device__ __forceinline__ unsigned kept_vectors(const unsigned (&ranked_by)[VALUES], int kept) {
    constexpr int HELD = GROUPS_HELD, APART = GROUP_APART;  // lanes of the next vector's group follow
    static_assert(APART > 0 && GROUP_LANES <= LANES && TOP <= 2, "a lane ends up with one group");
    const int lane = lane_of_token();
    unsigned first[HELD], second[HELD];
#pragma unroll
    for (int v = 0; v < HELD; ++v) {
        first[v] = second[v] = v < VECTORS ? 0 : sort_key(minus_infinity());  // past VECTORS there is no group: it ranks last
#pragma unroll
        for (int i = 0; i < WIDTH && v < VECTORS; ++i) {
            const unsigned key = ranked_by[v * WIDTH + i];
            second[v] = max(second[v], min(first[v], key));
            first[v] = max(first[v], key);
        }
    }
#pragma unroll
    for (int step = GROUP_LANES / 2; step > 0; step >>= 1) {
        const int half = step / APART;  // half of the lane's groups; 0 if one is left
        const bool upper = (lane & step) != 0;
#pragma unroll
        for (int i = 0; i < max(half, 1); ++i) {
            const unsigned mine = upper ? first[i + half] : first[i];
            const unsigned other = __shfl_xor_sync(WARP, upper ? first[i] : first[i + half], step);
            if (TOP == 2) {
                const unsigned others_second = __shfl_xor_sync(WARP, upper ? second[i] : second[i + half], step);
                second[i] = max(max(upper ? second[i + half] : second[i], others_second), min(mine, other));
            }
            first[i] = max(mine, other);
        }
    }
    const float best = from_sort_key(first[0]);
    const unsigned sum = sort_key(TOP == 1 ? best : best + from_sort_key(second[0]));
    const int group = lane % GROUP_LANES / APART * (LANES / GROUP_LANES) + lane / GROUP_LANES;
    unsigned better = 0;  // a bit for each group that ranks before this one
#pragma unroll
    for (int apart = APART, bit = 0; apart < LANES; apart += APART, ++bit) {
        const int differs = apart % GROUP_LANES / APART * (LANES / GROUP_LANES) + apart / GROUP_LANES;
        // The other group is `group ^ differs`, and a lower one if this group has the highest bit of `differs`. Then its sum is
        // to reach this one's, which is above 0, else to exceed it.
        const unsigned below = sum - (group >> (31 - __clz(differs)) & 1);
        if (__shfl_xor_sync(WARP, sum, apart) > below) better |= 1u << bit;
    }
    return __ballot_sync(WARP, __popc(better) < kept) >> threadIdx.x % 32 / GROUP_LANES * GROUP_LANES;
}
__device__ __forceinline__ bool is_vector_kept(unsigned kept, int v) { return kept >> v * GROUP_APART & 1; }
// The same of a column, from the bits that the token's first lane has.
__device__ __forceinline__ bool is_column_kept(unsigned kept, int column) {
    constexpr int OF_GROUP = GROUP_LANES > 0 ? GROUP_LANES : 1;
    return is_vector_kept(kept >> column / WIDTH % LANES / OF_GROUP * OF_GROUP, column / (LANES * WIDTH));
}

// Sets the keys of all experts outside of the `kept` best groups to 0, which is below the key of -infinity. A group ranks by
// the sum of its `top` largest values of ranked_by. If groups are equal, the lower one ranks first. rows: shared memory for a word
// per column, then two words per group. size: experts per group. reciprocal_of_size: 2^32 / size rounded up, 0 for size 1. TOP:
// 1, 2, or above for any top.
template <int TOP>
__device__ __forceinline__ void keep_groups(unsigned (&keys)[VALUES], const unsigned (&ranked_by)[VALUES], unsigned* rows, int E,
                                            int groups, int kept, int top, int size, unsigned reciprocal_of_size) {
    const int lane = lane_of_token();
    unsigned* sums = rows + E;
    unsigned* is_kept = sums + groups;
    const auto group_of = [&](int column) {
        return reciprocal_of_size == 0 ? column : static_cast<int>(static_cast<Entry>(column) * reciprocal_of_size >> 32);
    };
    __syncwarp();  // all lanes have read the rows of the token before
#pragma unroll
    for (int i = 0; i < VALUES; ++i)
        if (is_expert(column_of(i), E)) rows[column_of(i)] = ranked_by[i];
    __syncwarp();
    for (int group = lane; group < groups; group += LANES) {
        const unsigned* row = rows + group * size;
        float sum = 0.f;
        if (TOP <= 2) {
            unsigned first = 0, second = 0;
            for (int i = 0, at = group % size; i < size; ++i) {  // neighbouring lanes begin in different banks
                const unsigned key = row[at];
                second = max(second, min(first, key));
                first = max(first, key);
                at = at + 1 == size ? 0 : at + 1;
            }
            sum = TOP == 1 ? from_sort_key(first) : from_sort_key(first) + from_sort_key(second);
        } else {
            Entry last = ~0ull;
            for (int j = 0; j < top; ++j) {
                Entry next = 0;
                for (int i = 0; i < size; ++i) {
                    const Entry entry = entry_of(row[i], i);
                    if (entry < last && entry > next) next = entry;
                }
                sum = j == 0 ? from_sort_key(key_of(next)) : sum + from_sort_key(key_of(next));
                last = next;
            }
        }
        sums[group] = sort_key(sum);
    }
    __syncwarp();
    for (int group = lane; group < groups; group += LANES) {
        const unsigned sum = sums[group];
        int rank = 0;
        for (int other = 0; other < groups; ++other) rank += sums[other] > sum || (sums[other] == sum && other < group) ? 1 : 0;
        is_kept[group] = rank < kept;
    }
    __syncwarp();
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int column = column_of(v * WIDTH);
        if (size % WIDTH == 0) {
            if (is_expert(column, E) && !is_kept[group_of(column)])
#pragma unroll
                for (int i = 0; i < WIDTH; ++i) keys[v * WIDTH + i] = 0;
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (is_expert(column, E) && !is_kept[group_of(column + i)]) keys[v * WIDTH + i] = 0;
        }
    }
}
