// Router forward where one lane chooses and weighs a token's LANE_K experts, in registers (paper section 2.1): few experts to
// choose, no options that cut slots, and no given ids. router_token.cuh describes places, lanes and sums. A lane sorts chunks of
// entries with sorting networks and merges them, keeping the largest.
//
// With LANES = 1 the lane holds the token's row and its chunks are the row. Otherwise LANES lanes hold the row and list in
// shared memory the entries that may be among the largest: those whose key reaches a bound, which is the LANE_K-th largest of
// the maxima of parts of the row. When 32 tokens are listed, one warp chooses for all of them, one token in each lane.
//
// Launch: grid ceil(L / tokens_per_block), THREADS threads. With LANES > 1 dynamic shared memory of LISTED_ROW_BYTES for each of
// 32 tokens, twice with sums or groups, and then 4 * sum_row_words(E + 2) bytes for each place with sums.
#include "router_token.cuh"

constexpr int CHUNK = next_power_of_two(LANE_K);
constexpr int PARTS = LANES < 16 ? 16 / LANES : 1;  // parts into which a lane divides its values; each has a maximum
static_assert(LANE_K <= PARTS * LANES && PARTS <= (LANES > 1 ? VALUES : PARTS), "their maxima bound the last chosen key");

[[maybe_unused]] constexpr bool WEIGHS_BY_ROW = SCORE == SOFTMAX && !RENORMALIZE;

struct ListedRow {
    static constexpr int MOST = 24;
    Entry entries[MOST];
    int number, token;   // token: -1 if the place has none
    float largest, sum;  // fields of LogSumExp, if WEIGHS_BY_ROW
};
static_assert(sizeof(ListedRow) % 32 == 16, "lanes load 16 bytes of their rows without conflicts");
static_assert(sizeof(ListedRow) == LISTED_ROW_BYTES, "launch_config.py");

__device__ __forceinline__ void put_larger_first(unsigned& a, unsigned& b) {
    const unsigned larger = max(a, b);
    b = min(a, b);
    a = larger;
}
__device__ __forceinline__ void put_larger_first(Entry& a, Entry& b) { sort_two(a, b); }

__device__ __forceinline__ void take_larger(unsigned& a, unsigned b) { a = max(a, b); }
// The columns of b are higher than those of a if LANES = 1. So a ranks first if the keys are equal.
__device__ __forceinline__ void take_larger(Entry& a, Entry b) {
    if (LANES == 1 ? key_of(b) > key_of(a) : b > a) a = b;
}

// Sorts values that fall and then rise.
template <class T, int N>
__device__ __forceinline__ void sort_bitonic(T (&v)[N]) {
#pragma unroll
    for (int apart = N / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int i = 0; i < N; ++i)
            if ((i & apart) == 0) put_larger_first(v[i], v[i + apart]);
}

// Batcher's odd-even merge sort.
template <class T, int N>
__device__ __forceinline__ void sort(T (&v)[N]) {
#pragma unroll
    for (int sorted = 1; sorted < N; sorted *= 2)
#pragma unroll
        for (int apart = sorted; apart > 0; apart /= 2)
#pragma unroll
            for (int i = 0; i < N; ++i)
                if (i + apart < N && i >= apart % sorted && (i - apart % sorted) / apart % 2 == 0 &&
                    i / (2 * sorted) == (i + apart) / (2 * sorted))
                    put_larger_first(v[i], v[i + apart]);
}

// The larger half of two sorted chunks, sorted, replaces the first.
template <class T, int N>
__device__ __forceinline__ void merge(T (&largest)[N], const T (&others)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) take_larger(largest[i], others[N - 1 - i]);
    sort_bitonic(largest);
}

template <class T>
__device__ __forceinline__ void store_slots(T* to, const unsigned (&words)[LANE_K]) {
    unsigned* const out = reinterpret_cast<unsigned*>(to);
    if (LANE_K % 4 == 0) {
#pragma unroll
        for (int j = 0; j + 3 < LANE_K; j += 4)
            store_global_16(out + j, make_uint4(words[j], words[j + 1], words[j + 2], words[j + 3]));
    } else if (LANE_K % 2 == 0) {
#pragma unroll
        for (int j = 0; j + 1 < LANE_K; j += 2) *reinterpret_cast<uint2*>(out + j) = make_uint2(words[j], words[j + 1]);
    } else {
#pragma unroll
        for (int j = 0; j < LANE_K; ++j) out[j] = words[j];
    }
}

// Stores a token's ids and weights, from the first LANE_K entries. The weights equal those of `weigh` in router_forward.cu.
// lse: that of the token's row, only read if WEIGHS_BY_ROW.
__device__ __forceinline__ void store_token(const RouterForwardParams& p, int token, const Entry (&best)[CHUNK],
                                            const LogSumExp& lse) {
    const float scale = __int_as_float(p.scale);
    const bool masked = p.token_mask != nullptr && !p.token_mask[token];
    const ELEMENT* const logits = p.logits + static_cast<int64>(token) * experts_of(p);
    float values[LANE_K], largest = minus_infinity(), total = 0.f;
#pragma unroll
    for (int j = 0; j < LANE_K; ++j) {
        values[j] = BIAS ? to_float(logits[min(column_of_entry(best[j]), experts_of(p) - 1)]) : from_sort_key(key_of(best[j]));
        if (BIAS || j == 0) largest = fmaxf(largest, values[j]);
    }
#pragma unroll
    for (int j = 0; j < LANE_K; ++j) {
        values[j] = SCORE == SOFTMAX && RENORMALIZE ? expf(values[j] - largest) : score_in_row(values[j], lse);
        total += values[j];
    }
    if (SCORE != SOFTMAX) total += __int_as_float(p.eps);
    unsigned weights[LANE_K], ids[LANE_K];
#pragma unroll
    for (int j = 0; j < LANE_K; ++j) {
        const float weight = RENORMALIZE ? share_of_total(values[j], total) : values[j];
        weights[j] = masked ? 0 : __float_as_uint(weight * scale);
        ids[j] = masked ? ~0u : column_of_entry(best[j]);
    }
    store_slots(p.weights + static_cast<int64>(token) * LANE_K, weights);
    store_slots(p.ids + static_cast<int64>(token) * LANE_K, ids);
}

constexpr bool MORE_REGISTERS = (SUMS_LAST && __CUDA_ARCH__ != 900) || (SUMS && LANES == 32);  // others would spill
constexpr int SHARED_ROW_THREADS = SUMS_LAST && !FULL ? 512 : MORE_REGISTERS ? 768 : 1024;     // threads of a multiprocessor
constexpr int BLOCKS_PER_MULTIPROCESSOR = (VALUES <= 16 || LANES > 1 ? SHARED_ROW_THREADS : 512) / THREADS;

#if LANES == 1

// Chooses and weighs the experts of the token whose row the lane holds.
__device__ __forceinline__ void route_by_lane(const RouterForwardParams& p) {
    const int E = experts_of(p), token = blockIdx.x * TOKENS + threadIdx.x;
    if (token >= p.L) return;
    constexpr int CHUNKS = (VALUES + CHUNK - 1) / CHUNK;
    float x[VALUES], terms[VALUES];
    load_row(p.logits + static_cast<int64>(token) * E, true, E, x);
    LogSumExp lse = {0.f, 1.f, 0.f};
    if (NEEDS_LSE) lse = log_sum_exp(x, terms);
    Entry chunks[CHUNKS][CHUNK];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            const int value = c * CHUNK + i;
            chunks[c][i] = value < VALUES ? entry_of(sort_key(x[value < VALUES ? value : 0]), value) : 0;
        }
        sort(chunks[c]);
    }
#pragma unroll
    for (int apart = 1; apart < CHUNKS; apart *= 2)
#pragma unroll
        for (int c = 0; c + apart < CHUNKS; c += 2 * apart) merge(chunks[c], chunks[c + apart]);
    store_token(p, token, chunks[0], lse);
}

#else

// bound: so many of a token's keys reach it as the choice needs. largest: the largest key.
struct RowKeys {
    unsigned bound, largest;
};

// Returns, from sorted lists, one in each lane of the token, the K-th largest and the largest of the keys of all lanes that
// differ in the bits of their number from STEP on. Lanes that differ in lower bits have merged their lists already, or do not
// matter.
template <int K, int STEP, int N>
__device__ __forceinline__ RowKeys keys_of_lists(unsigned (&list)[N]) {
    unsigned others[N];
#pragma unroll
    for (int i = 0; i < N; ++i) others[i] = __shfl_xor_sync(WARP, list[i], STEP);
    if constexpr (2 * STEP == LANES) {
        unsigned bound = ~0u;
#pragma unroll
        for (int i = 0; i < K; ++i) {
            const int other = K - 1 - i;
            if (i < N && other < N)
                bound = min(bound, max(list[i], others[other]));
            else if (i < N)
                bound = min(bound, list[i]);
            else if (other < N)
                bound = min(bound, others[other]);
        }
        return {bound, max(list[0], others[0])};
    } else if constexpr (2 * N <= next_power_of_two(K)) {
        unsigned both[2 * N];
#pragma unroll
        for (int i = 0; i < N; ++i) both[i] = list[i], both[2 * N - 1 - i] = others[i];
        sort_bitonic(both);
        return keys_of_lists<K, 2 * STEP>(both);
    } else {
        merge(list, others);
        return keys_of_lists<K, 2 * STEP>(list);
    }
}

// The LANE_K-th largest and the largest of the maxima of a token's parts. Each lane has PARTS of them.
__device__ __forceinline__ RowKeys keys_of_row(const unsigned (&keys)[VALUES]) {
    unsigned largest[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        largest[part] = 0;
#pragma unroll
        for (int i = part; i < VALUES; i += PARTS) largest[part] = max(largest[part], keys[i]);
    }
    sort(largest);
    return keys_of_lists<LANE_K, 1>(largest);
}

// A key that LANE_K keys or more of the vectors in `kept` reach. A lane lists its two largest maxima of such vectors. Half of
// the LANE_K keys are among the lists of the even lanes, the other half among those of the odd lanes. Each group is in as many
// even lanes as odd ones if it is in more than one lane.
__device__ __forceinline__ unsigned bound_of_kept(const unsigned (&keys)[VALUES], unsigned kept) {
    unsigned list[2] = {0, 0};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        unsigned largest = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) largest = max(largest, keys[v * WIDTH + i]);
        if (!is_vector_kept(kept, v)) largest = 0;
        list[1] = max(list[1], min(list[0], largest));
        list[0] = max(list[0], largest);
    }
    const unsigned bound = keys_of_lists<(LANE_K + 1) / 2, 2>(list).bound;
    return min(bound, __shfl_xor_sync(WARP, bound, 1));
}

constexpr int LISTED_BUFFERS = SUMS || GROUP_TOP ? 2 : 1;  // a block has 32 tokens if it has one buffer
static_assert(32 % TOKENS == 0, "rows are filled in whole turns");

// All lanes of a warp find the LANE_K largest entries of one row, in order. Needed if more keys reach the bound than a
// ListedRow has room for. kept: the bits that the token's first lane has of all groups.
__device__ __forceinline__ void pick_by_warp(const RouterForwardParams& p, int token, const LogSumExp& lse, unsigned kept,
                                             Entry* entries) {
    constexpr int PER_LANE = (VALUES * LANES + 31) / 32;
    const int E = experts_of(p), lane = threadIdx.x % 32;
    const ELEMENT* const logits = p.logits + static_cast<int64>(token) * E;
    unsigned keys[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int column = i * 32 + lane;
        keys[i] = 0;  // ranks behind all experts
        if (column >= E || (GROUP_TOP && !is_column_kept(kept, column))) continue;
        const float x = to_float(logits[column]);
        keys[i] =
            rank_key(x, SCORE_SHARES ? quick_score_of<SHARES>(x) : 0.f, BIAS ? p.bias[token * p.bias_stride + column] : 0.f, lse);
    }
#pragma unroll 1
    for (int j = 0; j < LANE_K; ++j) {
        unsigned best = keys[0];
#pragma unroll
        for (int i = 1; i < PER_LANE; ++i) best = max(best, keys[i]);
        best = __reduce_max_sync(WARP, best);
        int column = 32 * PER_LANE;
#pragma unroll
        for (int i = PER_LANE - 1; i >= 0; --i)
            if (keys[i] == best) column = i * 32 + lane;
        column = __reduce_min_sync(WARP, column);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (i * 32 + lane == column) keys[i] = 0;
        if (lane == 0) entries[j] = entry_of(best, column);
    }
}

// The listed rows. When 32 are there, one warp chooses from them. With two buffers the warps take turns, and while one chooses,
// the others list tokens in the other buffer.
struct ListedTokens {
    ListedRow* rows;           // (LISTED_BUFFERS, 32)
    int places_filled, turns;  // rows listed in this turn so far; turns before it

    __device__ __forceinline__ ListedRow* rows_of_turn() const { return rows + turns % LISTED_BUFFERS * 32; }

    __device__ __forceinline__ int filled() const { return TOKENS == 32 ? 0 : places_filled; }

    __device__ __forceinline__ ListedRow& row_of(int place) const { return rows_of_turn()[filled() + place]; }

    // Lists tokens base, base + 1, ..., one in each place; tokens from `stop` on are not there. If in_sums, adds their sums to
    // the places' rows, `stride` words apart. The token is computed again after the listing, because few registers are left.
    __device__ __forceinline__ void take(const RouterForwardParams& p, int base, int stop, bool in_sums, float* sums, int stride,
                                         Held& held) {
        float x[VALUES], scores[VALUES];
        unsigned keys[VALUES];
        if (LISTED_BUFFERS == 2 && TOKENS == 32) turns = static_cast<unsigned>(base) / 32;  // saves the register of a count
        const auto token_again = [&] { return base + place_of_thread(); };
        const auto row_of_sums = [&] { return sums + place_of_thread() * stride; };
        // Places without a token read another token's row, and their results are not stored. Where read_token adds sums, they
        // read nothing.
        const bool is_there = !SUMS || SUMS_LAST || token_again() < stop;
        const int read = min(token_again(), p.L - 1);
        LogSumExp lse = read_token(p, read, is_there, in_sums, SUMS_LAST ? sums : row_of_sums(), held, x, scores);
        const unsigned kept = rank_experts(p, read, is_there, x, scores, lse, nullptr, 0, keys);
        for (int i = lane_of_token(); i < ListedRow::MOST / 2; i += LANES)
            reinterpret_cast<uint4*>(row_of(place_of_thread()).entries)[i] = make_uint4(0, 0, 0, 0);
        __syncwarp();
        RowKeys found = {0, 0};
        if constexpr (GROUP_TOP == 0)
            found = keys_of_row(keys);
        else
            found.bound = bound_of_kept(keys, kept);
        Marks marks([&](int i) { return keys[i] >= found.bound && (GROUP_TOP == 0 || is_vector_kept(kept, i / WIDTH)); });
        const Share share = share_of(marks.number());
        const bool fits = share.total <= ListedRow::MOST;
        if (!fits) marks = Marks([](int) { return false; });
        // The thread's index is read again. Otherwise the loop over tokens keeps the columns of all values in registers.
        const int first = (SUMS ? read_thread_index() : static_cast<int>(threadIdx.x)) % LANES * WIDTH;
        list(keys, shared_address(row_of(place_of_thread()).entries), share.begin, first, marks);
        if (SUMS_LAST && (in_sums || WEIGHS_BY_ROW)) {
            const int token = token_again();
            const bool counts = in_sums && counts_in_sums(p, token, token < stop);
            lse = add_sums_of_keys(keys, from_sort_key(found.largest), experts_of(p), row_of_sums(), counts, held);
        }
        if (lane_of_token() == 0) {
            ListedRow& listed = row_of(place_of_thread());
            const int token = token_again();
            listed.number = fits ? share.total : LANE_K, listed.token = token < stop ? token : -1;
            if (WEIGHS_BY_ROW) listed.largest = lse.largest, listed.sum = lse.sum;
        }
        for (unsigned left = __ballot_sync(WARP, !fits && lane_of_token() == 0); left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1, place = place_of_thread() / (32 / LANES) * (32 / LANES) + lane / LANES;
            const LogSumExp its = {__shfl_sync(WARP, lse.largest, lane), __shfl_sync(WARP, lse.sum, lane), 0.f};
            pick_by_warp(p, min(base + place, p.L - 1), its, __shfl_sync(WARP, kept, lane), row_of(place).entries);
        }
        if (TOKENS < 32) places_filled += TOKENS;
    }

    // Chooses if 32 rows are listed, or fewer and no more follow. It begins with a barrier of the block in this case.
    __device__ __forceinline__ void choose(const RouterForwardParams& p, bool follow) {
        if (TOKENS < 32 && places_filled < 32 && follow) return;
        __syncthreads();
        if (threadIdx.x / 32 == turns % (THREADS / 32))
            choose_from(p, rows_of_turn()[threadIdx.x % 32], TOKENS == 32 || threadIdx.x % 32 < places_filled);
        places_filled = 0;
        if (TOKENS < 32) ++turns;
    }

    __device__ __forceinline__ void choose_from(const RouterForwardParams& p, const ListedRow& row, bool is_filled) const {
        const int longest = __reduce_max_sync(WARP, is_filled ? row.number : 0);
        Entry best[CHUNK], others[CHUNK];
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) best[i] = row.entries[i];
        sort(best);
#pragma unroll 1
        for (int first = CHUNK; first < longest; first += CHUNK) {
#pragma unroll
            for (int i = 0; i < CHUNK; ++i) others[i] = row.entries[first + i];
            sort(others);
            merge(best, others);
        }
        if (is_filled && row.token >= 0)
            store_token(p, row.token, best, {WEIGHS_BY_ROW ? row.largest : 0.f, WEIGHS_BY_ROW ? row.sum : 1.f, 0.f});
    }
};

// Lists and chooses the block's tokens.
__device__ __forceinline__ void route_by_lane(const RouterForwardParams& p) {
    ListedTokens listed = {reinterpret_cast<ListedRow*>(dynamic_shared), 0, 0};
    float* const all_sums = reinterpret_cast<float*>(listed.rows + 32 * LISTED_BUFFERS);
    const int stride = sum_row_words(experts_of(p) + 2);
    const int first = blockIdx.x * p.tokens_per_block, end = min(p.L, first + p.tokens_per_block);
    if (LISTED_BUFFERS == 1) {  // the block has 32 tokens
        Held none;
#pragma unroll 1
        for (int base = 0; base < 32; base += TOKENS) listed.take(p, first + base, end, false, nullptr, 0, none);
        listed.choose(p, false);
        return;
    }
    const auto route = [&](int base, int stop, bool follow, bool counts, Held& held) {
        listed.take(p, base, stop, counts, all_sums, stride, held);
        listed.choose(p, follow);
    };
    route_sequences(p, first, end, all_sums, route, [&] {
        if (listed.filled() != 0) __syncthreads();  // otherwise choose() had a barrier
    });
}

#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_MULTIPROCESSOR) router_lane(const RouterForwardParams p) {
    if (SUMS) let_next_launch_start();
    route_by_lane(p);
}
