// Products whose rows are summed over the k slots of each token, Hopper tier (sm_90a, bf16 and fp16, sizes that are
// multiples of 8): down_fwd with the output aggregation (paper sections 2.3 and 3.1), up_bwd with the accumulation of
// token gradients (section 3.2, step 3). The result passes through panels of 256 columns, a group of them at a time: while
// the products of one group are computed, that before is summed, so that two groups take the place of an (L*k, d) buffer and
// the sums cost little time. A's rows come from memory once per group. The last group is left to aggregation.cu, whose grid
// has all the multiprocessors' warps. With k = 1 (SLOTS = 1) a row is its token's sum: rows go straight to out, and there are
// no panels.
// CHUNKED: chunks of tokens pass through two buffers one after another, all columns of their rows, and A's rows come from
// memory once. The tiles are of parts, an expert's rows of one chunk each. Below, a round is a panel or a chunk.
//
//   a_map                 tensor map of A, 3-D: (lda, L*k, 1), boxes of 64 x 128 x 1; K_SEGMENTS * depth columns
//   b0, b1                tensor maps of the weight's K segments, as in grouped_gemm_sm90.cu
//   columns, depth        d; K of one segment
//   expert_token_indices  (L*k,)                     int32, in       read if k = 1
//   expert_token_offsets  (E+1,)                     int32, in       CHUNKED: part_ends of token_chunks.cu
//   row_tiles             (1 + tiles, 2)             int32, in       dispatch's (expert, first row) of tiles of 128 rows;
//                                                                    CHUNKED: those of token_chunks.cu
//   panels                (buffers, L*k, panel_ld)   element, scratch; panel i in buffer i % buffers. Up to 256 columns it may
//                                                    be A itself, of whose rows the tile that is stored was the last reader.
//                                                    CHUNKED: (buffers, chunk_tokens * k, d)
//   group, buffers        panels per group; of two groups, or of all if those are fewer. CHUNKED: all panels; 2
//   panel_ld, panel_stride                           from row to row, from buffer to buffer (this not read if CHUNKED)
//   token_index_map       (L, k)                     int32, in       -1: no expert in this slot. CHUNKED: buffer_rows
//   weights               (L, k)                     fp32 or element, in; read if WEIGHTED
//   out                   (L, columns)               element, out    sum over slots of weight * row; last group (chunk) not
//   num_tokens, k                                    L, k
//   part_shifts                                      int32, in       CHUNKED: of token_chunks.cu
//   num_experts                                      E
//   num_chunks, chunk_tokens                         read if CHUNKED
//   progress              (2, number of rounds)      int32, zeroed   blocks that have stored; that have summed; and then the
//                                                    5 of Pace. Null if the first group is the last
//
// Launch: cooperative (blocks wait for each other), at most one block per multiprocessor, 384 threads, dynamic shared
// memory 224 KiB. SLOTS: rows a sum takes at a time, min(8, k) rounded up to a power of two. With k = 1 out (L, columns) is
// whole when the kernel ends, and the messenger's warp writes the zeros of tokens without an expert.
//   warpgroup 0: thread 0, producer, copies both operands' boxes; full[s] expects its arrival and the bytes. Warp 1,
//     messenger, carries word of stored and summed rounds between this block's warps and the other blocks, so that no
//     consumer waits for a fence or a counter in global memory. Warps 2 and 3, adders, sum the rows of their share of
//     the tokens in slot order: two runs give the same bits.
//   warpgroups 1 and 2, consumers: see gemm_core_sm90.cuh.
// progress[0][i] counts the blocks that have stored their tiles of round i: all of them, before its first sum. progress[1][i]
// counts the blocks that have summed round i: all of them, before round i + buffers is stored over it.
// Nobody waits in a circle. Of the blocks that wait for a buffer, that with the earliest round waits for rows of rounds before
// it. A block that has such rows waits neither for a buffer, as its round would be earlier, nor for Pace: who does is 11 steps
// ahead of the hindmost, so that its consumers have stored all tiles up to the one for which that waits. This takes tiles that
// are fixed, every gridDim.x-th: steps do not tell the round of a claimed one.
#include "gemm_core_sm90.cuh"

typedef WEIGHT weight_t;

constexpr int ADDERS = 2;

// Word between a block's warps: what consumers and adders have done, for the messenger, and what it says of all blocks.
struct Word {
    int stored_rounds[8], summed_rounds[ADDERS];  // of each warp
    int summable_rounds, free_rounds;             // stored by all blocks; whose buffer may be written
};

__device__ __forceinline__ void tell(int& field, int count) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) store_release_shared(shared_address(&field), count);
}
__device__ __forceinline__ int hear(const int& field) {
    const int count = load_acquire_shared(shared_address(&field));
    __syncwarp();  // what any lane heard of, all lanes may pass on
    return __reduce_min_sync(0xffffffffu, count);
}

// Tiles of a group: those of the same rows next to each other.
struct Order {
    int m_tiles, panels, group;
    __device__ __forceinline__ int tiles() const { return m_tiles * panels; }
    __device__ __forceinline__ int2 operator()(int t) const {  // of the list, of the panels
        const int first = t / (m_tiles * group) * group, within = t - m_tiles * first, width = min(group, panels - first);
        return make_int2(within / width, first + within % width);
    }
    __device__ __forceinline__ int listed(int t) const { return (*this)(t).x; }
    __device__ __forceinline__ Place place(int t, int2 entry, int, int) const { return {entry.x, entry.y, (*this)(t).y}; }
};

// Panels, or chunks of tokens: the rounds in which rows pass through the buffers. Panels of a group take turns.
struct Rounds {
    const int count, summed_here, experts, group;  // the last ones are not summed here
    __device__ __forceinline__ int of(const Found& tile) const { return CHUNKED ? tile.place.expert / experts : tile.place.n; }
    // The rounds before this one have none of the tiles that a block has from this tile on.
    __device__ __forceinline__ int complete_before(const Found& tile) const {
        return tile.rows == END ? count : CHUNKED ? of(tile) : of(tile) / group * group;
    }
};

__device__ __forceinline__ void carry_word(Word& word, const Rounds& rounds, int buffers, int* progress) {
    const int count = rounds.count, sums = rounds.summed_here;
    const bool leads = threadIdx.x % 32 == 0;
    int posted_stored = 0, posted_summed = 0, summable = 0, free = buffers;
    while (posted_stored < sums || posted_summed < sums || free < count) {
        const int stored = min(hear(word.stored_rounds[threadIdx.x % 8]), sums), summed = hear(word.summed_rounds[threadIdx.x % ADDERS]);
        for (; posted_stored < stored; ++posted_stored)
            if (leads) add_release(progress + posted_stored, 1);
        for (; posted_summed < summed; ++posted_summed)
            if (leads) add_release(progress + count + posted_summed, 1);
        if (summable < sums && __all_sync(0xffffffffu, load_acquire(progress + summable) == gridDim.x)) ++summable;
        if (free < count && __all_sync(0xffffffffu, load_acquire(progress + count + free - buffers) == gridDim.x)) ++free;
        tell(word.summable_rounds, summable);
        tell(word.free_rounds, free);
        sleep_ns(100);
    }
}

// Keeps the producers of all blocks in step, so that what many of them read comes from memory once: at its i-th EVERY steps a
// block waits until all have begun the EVERY before. (up_bwd without and with: DeepSeek-V3 478 and 562 TFLOP/s, d = 4096, h =
// 1024 569 and 598, conf3 632 and 656. Not for short tiles: d = 1536, h = 256, of 8 steps, 425 and 405. Nor where experts have
// one tile or none on average, and nothing is read twice: 16 tokens of qwen30b, forward, 249 and 256 us.)
struct Pace {
    static constexpr int EVERY = 8, SLOTS_OF_STEPS = 4, LEAST_STEPS = 12;
    int* passed;  // blocks that have begun their i-th EVERY steps, in counter i % 4, again and again; then, if one has finished
    int steps = 0, seen = 0;

    __device__ __forceinline__ int look(int of) const { return load_relaxed(passed + of % SLOTS_OF_STEPS); }
    __device__ __forceinline__ void step() {
        const int index = steps / EVERY, within = steps++ % EVERY, before = index - 1;
        if (!passed) return;
        if (within == 0) {
            add_relaxed(passed + index % SLOTS_OF_STEPS, 1);
            if (index > 0) seen = look(before);  // used some steps later, when it has come
        } else if (within == 3 && index > 0) {
            const int all = gridDim.x * (before / SLOTS_OF_STEPS + 1);
            while (seen - all < 0) {
                seen = look(before);
                if (load_relaxed(passed + SLOTS_OF_STEPS)) {
                    passed = nullptr;
                    return;
                }
            }
        }
    }
    __device__ __forceinline__ void finish() const {
        if (passed) add_relaxed(passed + SLOTS_OF_STEPS, 1);
    }
};

// An adder's sums over a panel. Rows come by cp.async, each lane's 16 bytes for itself, through RING places of SLOTS
// rows; the positions of 32 slots are loaded two batches ahead, and their rows fetched to the L2 cache one batch ahead.
struct Adder {
    static constexpr int RING = 16 / SLOTS, BATCH = 32 / SLOTS;
    const int64 columns, ld, k;
    const int lane = threadIdx.x & 31, adder = threadIdx.x / 32 - 2;
    const unsigned ring = shared_address(dynamic_shared) + STAGES * STAGE_BYTES + TILE_BYTES + adder * 8192 + lane * 16;
    int64 first_token;
    int items, groups;  // tokens times groups of SLOTS slots

    __device__ __forceinline__ Adder(int64 columns, int64 ld, int64 k)
        : columns(columns), ld(ld), k(k), groups(static_cast<int>((k + SLOTS - 1) / SLOTS)) {}

    // Its share of the tokens first .. first + count.
    __device__ __forceinline__ void take(int64 first, int64 count) {
        const int64 adders = ADDERS * gridDim.x, index = blockIdx.x * ADDERS + adder, from = count * index / adders;
        first_token = first + from;
        items = static_cast<int>(count * (index + 1) / adders - from) * groups;
    }

    // Of this lane's slot in a batch: -1 if there is none.
    __device__ __forceinline__ int64 slot_of(int batch) const {
        const int item = batch * BATCH + lane / SLOTS, slot = (groups > 1 ? item % groups * SLOTS : 0) + lane % SLOTS;
        return item < items && slot < k ? (first_token + (groups > 1 ? item / groups : item)) * k + slot : -1;
    }

    __device__ __forceinline__ void sum(const element* panel, int first_column, const int* token_index_map,
                                        const weight_t* weights, element* out) const {
        element* out_row = out + first_token * columns + first_column + lane * 8;
        const int width = CHUNKED ? static_cast<int>(min(columns - first_column, int64(BN))) : BN;  // of panels only whole ones
        const bool inside = lane * 8 < width;
        const char* lane_panel = reinterpret_cast<const char*>(panel + lane * 8);
        int position[3];
        float scale[3], total[8];  // scale: of the batch before, this one and the next
        auto load = [&](int batch, int& row, float& weight) {
            const int64 slot = slot_of(batch);
            row = slot < 0 ? -1 : token_index_map[slot];
            weight = slot < 0 ? 0.f : WEIGHTED ? to_float(weights[slot]) : 1.f;
        };
        load(0, position[1], scale[2]);
        load(1, position[2], scale[0]);
        scale[1] = 0.f;
        float scale_after = scale[0];
        for (int item = 0, group = 0; item < items + RING - 1; ++item) {
            const int within = item % BATCH;
            if (within == 0) {
                position[0] = position[1], position[1] = position[2];
                scale[0] = scale[1];
                scale[1] = position[0] < 0 ? 0.f : scale[2];  // an empty slot's weight may be NaN
                scale[2] = scale_after;
                load(item / BATCH + 2, position[2], scale_after);
                if (position[1] >= 0)
                    for (int line = 0; line < width; line += 64) prefetch_l2(panel + static_cast<int64>(position[1]) * ld + line);
            }
            int rows[SLOTS];  // all before the first copy: a shuffle's latency once, not once per row
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) rows[j] = __shfl_sync(0xffffffffu, position[0], within * SLOTS + j);
            const unsigned to = ring + item % RING * (SLOTS * 512);
#pragma unroll
            for (int j = 0; j < SLOTS; ++j)
                cp_async_16(to + j * 512, lane_panel + static_cast<int64>(max(rows[j], 0)) * (ld * sizeof(element)),
                            rows[j] >= 0 && inside ? 16 : 0);
            cp_async_commit();
            const int ready = item - (RING - 1);
            if (ready < 0) continue;
            cp_async_wait<RING - 1>();
            const float weight_of_lane = ready / BATCH == item / BATCH ? scale[1] : scale[0];
            if (group == 0)
#pragma unroll
                for (int c = 0; c < 8; ++c) total[c] = 0.f;
            const unsigned from = ring + ready % RING * (SLOTS * 512);
            constexpr int TOGETHER = SLOTS < 4 ? SLOTS : 4;
#pragma unroll
            for (int first = 0; first < SLOTS; first += TOGETHER) {
                float weight[TOGETHER];
                uint4 row[TOGETHER];
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) row[j] = load_shared_16(from + (first + j) * 512);
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j)
                    weight[j] = WEIGHTED ? __shfl_sync(0xffffffffu, weight_of_lane, ready % BATCH * SLOTS + first + j) : 1.f;
#pragma unroll
                for (int j = 0; j < TOGETHER; ++j) {
                    float v[8];
                    Row8<element>(row[j]).unpack(v);
#pragma unroll
                    for (int c = 0; c < 8; ++c) total[c] = fmaf(weight[j], v[c], total[c]);
                }
            }
            if (++group == groups) {
                if (inside) store_vector8(out_row, total);
                out_row += columns;
                group = 0;
            }
        }
        cp_async_wait<0>();  // the empty items' copies write zeros where the next sum's go
    }
};

// A consumer warp's rows of a finished tile. When they are stored, so are all of the warp's of the rounds that the next tile
// says are complete, which the messenger is told.
struct PanelRows : EpilogueBase {
    static constexpr int SPREAD = 8;
    const int64 columns, panel_ld, panel_stride;
    const int buffers;
    element* const panels;
    const int* const part_shifts;
    const Rounds& rounds;
    Word& word;
    int round, complete;  // of the finished tile; those before it, once the tile is stored
    element* row;
    bool inside;

    __device__ __forceinline__ PanelRows(int64 columns, element* panels, int buffers, int64 panel_ld, int64 panel_stride,
                                         const int* part_shifts, const Rounds& rounds, Word& word, const Found& first)
        : columns(columns), panel_ld(panel_ld), panel_stride(panel_stride), buffers(buffers), panels(panels),
          part_shifts(part_shifts), rounds(rounds), word(word), complete(rounds.complete_before(first)) {
        tell_stored();
    }
    __device__ __forceinline__ void tell_stored() const { tell(word.stored_rounds[consumer_warp()], complete); }
    __device__ __forceinline__ void begin(const Found& tile, const Found& next, int warp_row) {
        const int lane = threadIdx.x & 31, n = tile.place.n;
        const int64 row0 = tile.place.row + warp_row;
        round = rounds.of(tile), complete = rounds.complete_before(next);
        rows = min(max(tile.rows - warp_row, 0), 16), done = 0;
        inside = n * BN + lane * 8 < columns;
        row = panels + lane * 8;
        if (CHUNKED)
            row += (row0 - part_shifts[tile.place.expert]) * panel_ld + n * BN;
        else
            row += n % buffers * panel_stride + row0 * panel_ld;
        if (rows == 0) tell_stored();
    }
    __device__ __forceinline__ void next() {
        if (done == 0 && round >= buffers)
            while (hear(word.free_rounds) <= round) {
            }
        const Row8<element> v = finished.get(done, threadIdx.x & 31);
        if (inside) v.store(row);
        row += panel_ld;
        if (++done == rows) tell_stored();
    }
};

static_assert(Pace::EVERY >= PanelRows::SPREAD, "who waits for the hindmost block has stored its tile before");

// The same where k = 1: each row to its token, times the token's weight.
struct TokenRows : EpilogueBase {
    static constexpr int SPREAD = 8;
    const int64 columns;
    const int* const expert_token_indices;
    const weight_t* const weights;
    element* const out;
    int column, token;  // of the lane; of row lane % 16
    float weight;       // of that token

    __device__ __forceinline__ TokenRows(int64 columns, const int* expert_token_indices, const weight_t* weights, element* out)
        : columns(columns), expert_token_indices(expert_token_indices), weights(weights), out(out) {}
    __device__ __forceinline__ void begin(const Found& tile, const Found&, int warp_row) {
        const int lane = threadIdx.x & 31;
        rows = min(tile.rows - warp_row, 16), done = 0, column = tile.place.n * BN + lane * 8;
        token = expert_token_indices[tile.place.row + warp_row + min(lane & 15, rows - 1)];  // without rows, the expert's last
        weight = WEIGHTED ? to_float(weights[token]) : 1.f;
    }
    __device__ __forceinline__ void next() {
        const int64 to = __shfl_sync(0xffffffffu, token, done);
        const float scale = WEIGHTED ? __shfl_sync(0xffffffffu, weight, done) : 1.f;
        float v[8];
        finished.get(done, threadIdx.x & 31).unpack(v);
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] *= scale;
        if (column < columns) store_vector8(out + to * columns + column, v);
        ++done;
    }
};

// By one warp per block: zeros for the tokens of its share that have no expert.
__device__ __forceinline__ void clear_tokens_without_expert(const int* token_index_map, element* out, int64 num_tokens, int64 columns) {
    const int lane = threadIdx.x & 31;
    for (int64 first = blockIdx.x * 32LL; first < num_tokens; first += gridDim.x * 32LL) {
        unsigned absent = __ballot_sync(0xffffffffu, first + lane < num_tokens && token_index_map[min(first + lane, num_tokens - 1)] < 0);
        for (; absent; absent &= absent - 1) {
            element* row = out + (first + __ffs(absent) - 1) * columns;
            for (int64 column = lane * 8; column < columns; column += 256) store_global_16(row + column, make_uint4(0, 0, 0, 0));
        }
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    ENTRY(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b0, const __grid_constant__ TensorMap b1,
          int64 columns, int64 depth, const int* expert_token_indices, const int* expert_token_offsets, const int* row_tiles,
          element* panels, int64 group, int64 buffers, int64 panel_ld, int64 panel_stride, const int* token_index_map,
          const weight_t* weights, element* out, int64 num_tokens, int64 k, const int* part_shifts, int64 num_experts,
          int64 num_chunks, int64 chunk_tokens, int* progress) {
    __shared__ uint64 barrier_storage[2 * STAGES];
    __shared__ Found found[FOUND];  // by the number of the tile
    __shared__ Word word;
    if (threadIdx.x < sizeof(Word) / 4) reinterpret_cast<int*>(&word)[threadIdx.x] = 0;
    const Barriers<1> barriers(barrier_storage, 1);
    const int K = static_cast<int>(depth), num_buffers = static_cast<int>(buffers);
    const Order order = {row_tiles[0], static_cast<int>((columns + BN - 1) / BN), static_cast<int>(group)};
    const int steps_per_segment = (K + BK - 1) / BK, steps = steps_per_segment * K_SEGMENTS;

    const int last_group = (order.panels - 1) / order.group * order.group, chunks = static_cast<int>(num_chunks);
    const Rounds rounds = {CHUNKED ? chunks : order.panels, CHUNKED ? chunks - 1 : last_group, static_cast<int>(num_experts), order.group};

    if (threadIdx.x < 128) {
        Ring ring;
        setmaxnreg_dec<88>();
        Schedule<Order, 1> schedule(order, row_tiles, expert_token_offsets, order.tiles());
        if (threadIdx.x == 0) found[0] = schedule.own;
        __syncthreads();
        if (threadIdx.x / 32 == 1) {
            if constexpr (SLOTS == 1)
                clear_tokens_without_expert(token_index_map, out, num_tokens, columns);
            else if (rounds.summed_here > 0)
                carry_word(word, rounds, num_buffers, progress);
            return;
        }
        if (SLOTS > 1 && threadIdx.x / 32 >= 2) {
            Adder adder(columns, CHUNKED ? panel_ld : BN, k);
            for (int round = 0; round < rounds.summed_here; ++round) {
                while (hear(word.summable_rounds) <= round) sleep_ns(100);
                // all chunks but the last, which is not summed here, are whole
                adder.take(CHUNKED ? round * chunk_tokens : 0, CHUNKED ? chunk_tokens : num_tokens);
                if (CHUNKED) {
                    for (int n = 0; n < order.panels; ++n) adder.sum(panels + n * BN, n * BN, token_index_map, weights, out);
                } else
                    adder.sum(panels + round % num_buffers * panel_stride, round * BN, token_index_map, weights, out);
                tell(word.summed_rounds[threadIdx.x / 32 - 2], round + 1);
            }
            return;
        }
        if (threadIdx.x > 0) return;
        const bool worthwhile = steps >= Pace::LEAST_STEPS && order.m_tiles >= 2 * rounds.experts;
        Pace pace = {progress && worthwhile ? progress + 2 * rounds.count : nullptr};
        for (int number = 0; schedule.valid(); ++number) {
            const Place place = schedule.own.place;
            const int n = place.n * BN, expert = CHUNKED ? place.expert % rounds.experts : place.expert;
            schedule.prefetch();
            for (int step = 0; step < steps; ++step) {
                const int segment = K_SEGMENTS == 2 && step >= steps_per_segment;
                const int k0 = (step - segment * steps_per_segment) * BK;
                const unsigned to = shared_address(dynamic_shared) + ring.stage * STAGE_BYTES;
                const unsigned full = barriers.full + 8 * ring.stage;
                wait(barriers.empty + 8 * ring.stage, ring.parity ^ 1);
                pace.step();
                if (step == steps - 1) found[(number + 1) % FOUND] = schedule.next();
                mbarrier_arrive_expect_tx(full, STAGE_BYTES);
                // rows past the expert's end are others', never stored
                tensor_load_3d(to, &a_map, segment * K + k0, place.row, 0, full);
                constexpr int BOX = B_K_CONTIGUOUS ? 128 : 64;
#pragma unroll
                for (int box = 0; box < BN; box += BOX) {
                    const TensorMap* map = segment ? &b1 : &b0;
                    const unsigned b_to = to + A_BYTES + box * 128;
                    if (B_K_CONTIGUOUS)
                        tensor_load_3d(b_to, map, k0, n + box, expert, full);
                    else
                        tensor_load_3d(b_to, map, n + box, k0, expert, full);
                }
                ring.advance();
            }
            schedule.advance(schedule.following());
        }
        pace.finish();
        return;
    }

    setmaxnreg_inc<208>();
    __syncthreads();
    const int warp_row = consumer_warp() * 16;
    Ring ring;
#if SLOTS == 1
    TokenRows epilogue(columns, expert_token_indices, weights, out);
#else
    PanelRows epilogue(columns, panels, num_buffers, panel_ld, panel_stride, part_shifts, rounds, word, found[0]);
#endif
    for (int number = 0;; ++number) {
        const int rows = found[number % FOUND].rows;
        const bool last = rows == END, active = warp_row / 64 * 64 < rows;  // of the warpgroup
        float acc[32][4];
        consume<true, B_K_CONTIGUOUS>(acc, last ? 0 : steps, active, ring, barriers, epilogue);
        if (last) return;
        if (active) epilogue.finished.put(acc);
        epilogue.begin(found[number % FOUND], found[(number + 1) % FOUND], warp_row);
    }
}
