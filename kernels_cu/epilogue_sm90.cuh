// Epilogues of grouped_gemm_sm90.cu: what a consumer warp does with its 16 rows of a finished tile. begin() takes a tile over,
// next() works on one row, or on two where half a warp spans a row; see EpilogueBase. A lane has 8 columns, 16 bytes, of a row.
#pragma once
#include "activation.cuh"
#include "gemm_core_sm90.cuh"
#include "tile_bias_sm90.cuh"

constexpr int LANE_COLUMNS = 8;

// result (a panel) = the rows as they are.
struct StoreRows : EpilogueBase {
    static constexpr int SPREAD_STEPS = 8;
    const GroupedGemmParams& params;
    element* row;
    bool inside;

    __device__ __forceinline__ explicit StoreRows(const GroupedGemmParams& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int column = n0 + (threadIdx.x & 31) * LANE_COLUMNS;
        rows = count, done = 0, inside = column < params.columns;
        row = params.result + row0 * params.result_ld + column;
    }
    __device__ __forceinline__ void next() {
        const Row8<element> v = finished.get(done, threadIdx.x & 31);
        if (inside) v.store(row);
        row += params.result_ld;
        ++done;
    }
};

// k = 1: result of a row's token = the row, times the token's weight.
struct StoreTokenRows : EpilogueBase {
    static constexpr int SPREAD_STEPS = 8;
    const GroupedGemmParams& params;
    int column;    // of the lane
    int token;     // of the warp's row lane % 16
    float weight;  // of that token

    __device__ __forceinline__ explicit StoreTokenRows(const GroupedGemmParams& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31;
        rows = count, done = 0, column = n0 + lane * LANE_COLUMNS;
        token = params.expert_token_indices[row0 + min(lane & 15, rows - 1)];  // rows = 0: the token before row0
        weight = params.weights ? to_float(params.weights[token]) : 1.f;
    }
    __device__ __forceinline__ void next() {
        const int64 to = __shfl_sync(0xffffffffu, token, done);
        const float scale = __shfl_sync(0xffffffffu, weight, done);
        float v[8];
        finished.get(done, threadIdx.x & 31).unpack(v);
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] *= scale;
        if (column < params.columns) store_vector8(params.result + to * params.result_ld + column, v);
        ++done;
    }

    // Zeros for the tokens without an expert.
    static __device__ __forceinline__ void idle_producer_warp(const GroupedGemmParams& params) {
        const int lane = threadIdx.x & 31;
        const int64 L = params.num_slots;
        for (int64 first = blockIdx.x * 32LL; first < L; first += gridDim.x * 32LL) {
            const bool without = first + lane < L && params.token_index_map[min(first + lane, L - 1)] < 0;
            for (unsigned left = __ballot_sync(0xffffffffu, without); left; left &= left - 1) {
                element* row = params.result + (first + __ffs(left) - 1) * params.result_ld;
                for (int column = lane * LANE_COLUMNS; column < params.columns; column += 32 * LANE_COLUMNS)
                    store_global_16(row + column, make_uint4(0, 0, 0, 0));
            }
        }
    }
};

// first_layer = a and b, result = y_swi. A gated tile has 128 columns of gate beside 128 of up, and half a warp spans one of
// its rows. ActivatePairs is for interleaved columns. With WEIGHTS_ON_INPUT y_swi = V(w * a) * M(w * b), w being the row's weight.
// Of e4m3 products it stores y_swi with its scales too.
struct ActivateRows : EpilogueBase {
    static constexpr bool SPLIT = GATED;
    static constexpr int LANES = (SPLIT ? BN / 2 : BN) / LANE_COLUMNS;  // of a row of the result
    static constexpr int ROWS = 32 / LANES;                             // per call of next()
    const GroupedGemmParams& params;
    saved_t* first_layer;
    element* y_swi;
    bool inside;
    float weights;  // WEIGHTS_ON_INPUT: of the warp's row lane % 16
#ifdef OPERAND
    operand* quantised;      // as y_swi
    float* quantised_scale;  // of the lane's columns
#endif

    __device__ __forceinline__ explicit ActivateRows(const GroupedGemmParams& params) : params(params) {}
    __device__ __forceinline__ int64 first_layer_ld() const { return GATED ? 2 * params.columns : params.columns; }
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31, column = n0 + lane % LANES * LANE_COLUMNS;
        rows = count, done = 0, inside = column < params.columns;
        const int64 r = row0 + lane / LANES;
        first_layer = params.first_layer + r * first_layer_ld() + column;
        y_swi = params.result + r * params.columns + column;
#ifdef OPERAND
        quantised = params.quantised + r * params.columns + column;
        quantised_scale = params.quantised_scales + column / GROUP_COLUMNS * params.scales_ld + r;
#endif
#if FP8_SAVED
        const int first_column = column - lane % GROUP_LANES * LANE_COLUMNS;
        const SavedScales<1 + GATED> scales(params.first_layer, params.num_slots, params.columns);
        scale = scales.at(static_cast<unsigned>(r), first_column) + lane % GROUP_LANES / SCALE_LANES;
        scale_ld = scales.groups * (1 + GATED);
        stores_scale = lane % SCALE_LANES == 0 && first_column < params.columns;
#endif
        if (WEIGHTS_ON_INPUT)
            weights = to_float(params.weights[row0 + min(lane & 15, rows - 1)]);  // rows = 0: the row before row0
    }
    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31, row = done + lane / LANES, chunk = lane % LANES;
        const float w = WEIGHTS_ON_INPUT ? __shfl_sync(0xffffffffu, weights, row & 15) : 1.f;
        const bool valid = inside && row < rows;
        const Row8<element> gate = finished.get(row, chunk), up = SPLIT ? finished.get(row, chunk + LANES) : gate;
        float a[8], b[8];
        gate.unpack(a);
        up.unpack(b);
#if FP8_SAVED
        keep(a, b, valid, row);
#endif
#pragma unroll
        for (int c = 0; c < 8; ++c) a[c] = y_swi_of<ACTIVATION>(w * a[c], SPLIT ? w * b[c] : 1.f, constants_of(params));
#ifdef OPERAND
        if (params.quantised) store_quantised<1>(quantised, 0, quantised_scale, 0, a, a, valid, valid);
        quantised += ROWS * params.columns, quantised_scale += ROWS;
#endif
        const uint4 packed = pack8(element(), a);
#if !FP8_SAVED
        if (valid && params.first_layer) gate.store(first_layer);
        if (SPLIT && valid && params.first_layer) up.store(first_layer + params.columns);
#endif
        if (valid && params.result) store_global_16(y_swi, packed);
        first_layer += ROWS * first_layer_ld();
        y_swi += ROWS * params.columns;
        done += ROWS;
    }

#if FP8_SAVED
    static constexpr int GROUP_LANES = GROUP_COLUMNS / LANE_COLUMNS, SCALE_LANES = GROUP_LANES / (1 + SPLIT);
    float* scale;       // of the lane's group and half: SCALE_LANES lanes have gate's, and as many up's
    unsigned scale_ld;  // floats from row to row
    bool stores_scale;

    __device__ __forceinline__ void keep(const float (&a)[8], const float (&b)[8], bool valid, int row) {
        float amax[1 + SPLIT] = {amax_of(a)};
        if constexpr (SPLIT) amax[1] = amax_of(b);
        const Scaling mine = scaling_of(largest<GROUP_LANES>(amax));
        const int first_lane = threadIdx.x & (32 - GROUP_LANES);
        auto store = [&](const float (&v)[8], int half) {
            const float factor = SPLIT ? __shfl_sync(0xffffffffu, mine.factor, first_lane + half * SCALE_LANES) : mine.factor;
            if (valid) *reinterpret_cast<uint2*>(first_layer + half * params.columns) = pack_e4m3(v, factor, factor);
        };
        store(a, 0);
        if (SPLIT) store(b, 1);
        if (stores_scale && row < rows) *scale = mine.scale;
        scale += ROWS * scale_ld;
    }
#endif
};

// The same for a tile of 128 pairs of gate and up, of which a lane has four. Two rows at a time, so that eight activations overlap.
struct ActivatePairs : EpilogueBase {
    static constexpr bool PAIRS = true;
    static constexpr int ROWS = 2;  // per call of next()
    const GroupedGemmParams& params;
    saved_t* first_layer;
    element* y_swi;
    bool inside;
    float weights;  // WEIGHTS_ON_INPUT: of the warp's row lane % 16

    __device__ __forceinline__ explicit ActivatePairs(const GroupedGemmParams& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int column = n0 + (threadIdx.x & 31) * (LANE_COLUMNS / 2);
        rows = count, done = 0, inside = column < params.columns;
        first_layer = params.first_layer + 2 * (row0 * params.columns + column);
        y_swi = params.result + row0 * params.columns + column;
#if FP8_SAVED
        const SavedScales<2> scales(params.first_layer, params.num_slots, params.columns);
        scale_ld = 2 * scales.groups;
        scale = scales.at(static_cast<unsigned>(row0), n0) + lane_row() * scale_ld + threadIdx.x / SCALE_LANES % 2;
#endif
        if (WEIGHTS_ON_INPUT)
            weights = to_float(params.weights[row0 + min(static_cast<int>(threadIdx.x & 15), rows - 1)]);  // as ActivateRows
    }
    __device__ __forceinline__ void next() {
        Row8<element> pairs[ROWS];
        float y[LANE_COLUMNS / 2 * ROWS];
#if FP8_SAVED
        float amax[2 * ROWS];
#endif
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float ab[LANE_COLUMNS];
            const float w = WEIGHTS_ON_INPUT ? __shfl_sync(0xffffffffu, weights, (done + i) & 15) : 1.f;
            pairs[i] = finished.get(done + i, threadIdx.x & 31);  // past the last row there is one more in the tile
            pairs[i].unpack(ab);
#if FP8_SAVED
            float halves[2][4];
#pragma unroll
            for (int c = 0; c < LANE_COLUMNS; ++c) halves[c % 2][c / 2] = ab[c];
            amax[2 * i] = amax_of(halves[0]), amax[2 * i + 1] = amax_of(halves[1]);
#endif
#pragma unroll
            for (int c = 0; c < 4; ++c)
                y[4 * i + c] = y_swi_of<ACTIVATION>(w * ab[2 * c], w * ab[2 * c + 1], constants_of(params));
        }
        const uint4 packed = pack8(element(), y);
#if FP8_SAVED
        keep(pairs, amax);
#endif
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool valid = inside && done + i < rows;
#if !FP8_SAVED
            if (valid && params.first_layer) pairs[i].store(first_layer + i * 2 * params.columns);
#endif
            const uint2 of_row = i ? make_uint2(packed.z, packed.w) : make_uint2(packed.x, packed.y);
            if (valid && params.result) *reinterpret_cast<uint2*>(y_swi + i * params.columns) = of_row;
        }
        first_layer += ROWS * 2 * params.columns;
        y_swi += ROWS * params.columns;
        done += ROWS;
    }

#if FP8_SAVED
    static_assert(BN / 2 == GROUP_COLUMNS, "a warp has one group of gate and one of up");
    static constexpr int SCALE_LANES = 32 / (2 * ROWS);  // gate of the first row, up of it, gate of the second, up of it
    float* scale;                                        // of the lane's row and half
    unsigned scale_ld;                                   // floats from row to row

    static __device__ __forceinline__ int lane_row() { return (threadIdx.x & 31) / (2 * SCALE_LANES); }
    __device__ __forceinline__ void keep(const Row8<element> (&pairs)[ROWS], const float (&amax)[2 * ROWS]) {
        const Scaling mine = scaling_of(largest<32>(amax));
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float gate = __shfl_sync(0xffffffffu, mine.factor, 2 * i * SCALE_LANES);
            const float up = __shfl_sync(0xffffffffu, mine.factor, (2 * i + 1) * SCALE_LANES);
            float ab[LANE_COLUMNS];
            pairs[i].unpack(ab);
            if (inside && done + i < rows)
                *reinterpret_cast<uint2*>(first_layer + i * 2 * params.columns) = pack_e4m3(ab, gate, up);
        }
        if (threadIdx.x % SCALE_LANES == 0 && done + lane_row() < rows) *scale = mine.scale;
        scale += ROWS * scale_ld;
    }
#endif
};

// The accumulators are grad_y_swi; w is the row's weight.
//   first_layer_grad = gradients of a and b of w * y_swi, given grad_y_swi
//   result           = weighted_y_swi = w * y_swi
//   partial_sums     = <grad_y_swi, y_swi> over the tile's columns
// With WEIGHTS_ON_INPUT y_swi = V(w * a) * M(w * b), and
//   first_layer_grad = w times the gradients of w * a and w * b
//   result           = y_swi
//   partial_sums     = these gradients times a and b, over the tile's columns
// a and b come two rows ahead, by cp.async into two slots of each warp; a goes on to registers when the row before it is done.
// A lane leaves its part of <grad_y_swi, y_swi> in the finished tile, in the row that it has read. Pointers to the row are
// computed anew for each row: kept in registers they would take those that let eight activations overlap.
//
// With INTERLEAVED a lane has columns 4 lane .. + 3 of each half of the tile, so that the warp's accesses to pairs of a and b are
// contiguous. The slots then hold four pairs of the tile's first half and four of the second, in place of a and b.
//
// With FP8_SAVED a lane's 16 bytes of the first half of a slot are eight e4m3 of a and eight of b, or of the first four pairs and
// of the second, and those of the second half are their scales: of a and b of each group that the lane has columns of.
//
// Spare shared memory: (8 warps, 2 slots, a and b, BN) element, the bytes of a lane's 8 columns read by that lane alone.
struct ActivateBwdRows : EpilogueBase {
    static constexpr int SLOTS = 2, SLOT_BYTES = 2 * ROW_BYTES;
    static_assert(CONSUMER_WARPS * SLOTS * SLOT_BYTES <= SPARE_BYTES, "two slots for each consumer warp");
    static constexpr bool LONG_ROWS = true;
    static constexpr int HALF_COLUMNS = BN / 2;  // of the tile, with INTERLEAVED
    const GroupedGemmParams& params;
    const unsigned slots;
    unsigned row0, column;
    float weights;  // of the warp's row lane % 16
#ifdef OPERAND
    static constexpr bool SCALES_ROWS = true;
    float scales;  // likewise: the accumulators are grad_y_swi over this
    __device__ __forceinline__ void take_scales(const float* rows, float of_weight) {
        scales = rows[threadIdx.x & 15] * of_weight;
    }
#endif
    Row8<element> a_row;  // of row `done`, with INTERLEAVED pairs

    __device__ __forceinline__ explicit ActivateBwdRows(const GroupedGemmParams& params)
        : params(params),
          slots(shared_address(dynamic_shared) + SPARE + consumer_warp() * SLOTS * SLOT_BYTES + (threadIdx.x & 31) * 16) {}

    // This lane's columns of the tile's row `row` in a matrix of HALVES * N columns. pairs_at: in one of N pairs.
    template <int HALVES, class T>
    __device__ __forceinline__ T* at(T* matrix, int row) const {
        return matrix + (uint64(row0 + row) * unsigned(HALVES * params.columns) + column);
    }
    template <class T>
    __device__ __forceinline__ T* pairs_at(T* matrix, int row) const {
        return at<2>(matrix, row) + column;
    }
    __device__ __forceinline__ unsigned slot(int row) const { return slots + (row & (SLOTS - 1)) * SLOT_BYTES; }
    __device__ __forceinline__ bool inside() const { return column < params.columns; }
    __device__ __forceinline__ bool inside_second() const { return column + HALF_COLUMNS < params.columns; }  // INTERLEAVED

#if FP8_SAVED
    static constexpr int HALVES = 1 + GATED, SCALES_BYTES = HALVES * sizeof(float);
    // Of a row's columns from `first` on.
    __device__ __forceinline__ const float* scales_at(int row, unsigned first) const {
        return SavedScales<HALVES>(params.first_layer, params.num_slots, params.columns).at(row0 + row, first);
    }
    __device__ __forceinline__ void fetch(int row) {
        const bool first = inside() && row < rows, second = INTERLEAVED ? inside_second() && row < rows : first;
        const saved_t* from = INTERLEAVED ? pairs_at(params.first_layer, row) : at<HALVES>(params.first_layer, row);
        cp_async_small<8>(slot(row), from, first ? 8 : 0);
        if (GATED) cp_async_small<8>(slot(row) + 8, from + (INTERLEAVED ? 2 * HALF_COLUMNS : params.columns), second ? 8 : 0);
        const float* scales = scales_at(row, column);
        cp_async_small<SCALES_BYTES>(slot(row) + ROW_BYTES, scales, first ? SCALES_BYTES : 0);
        if (INTERLEAVED) cp_async_small<SCALES_BYTES>(slot(row) + ROW_BYTES + 8, scales + HALVES, second ? SCALES_BYTES : 0);
        cp_async_commit();
    }
    __device__ __forceinline__ void unpack_saved(float (&a)[8], float (&b)[8]) const {
        const uint4 scales = load_shared_16(slot(done) + ROW_BYTES);
        const float gate = __uint_as_float(scales.x), up = __uint_as_float(scales.y);
        unpack_e4m3(a, a_row.words[0], a_row.words[1]);
        if (GATED) unpack_e4m3(b, a_row.words[2], a_row.words[3]);
        if (INTERLEAVED) take_pairs_apart(a, b);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const bool second = INTERLEAVED && c >= 4;
            a[c] *= second ? __uint_as_float(scales.z) : gate;
            if (GATED) b[c] *= second ? __uint_as_float(scales.w) : up;
        }
    }
#else
    __device__ __forceinline__ void fetch(int row) {
        if constexpr (INTERLEAVED) {
            const element* from = pairs_at(params.first_layer, row);
            cp_async_16(slot(row), from, inside() && row < rows ? 16 : 0);
            cp_async_16(slot(row) + ROW_BYTES, from + 2 * HALF_COLUMNS, inside_second() && row < rows ? 16 : 0);
        } else {
            const element* from = at<1 + GATED>(params.first_layer, row);
            const unsigned bytes = inside() && row < rows ? 16 : 0;
            cp_async_16(slot(row), from, bytes);
            if (GATED) cp_async_16(slot(row) + ROW_BYTES, from + params.columns, bytes);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void unpack_saved(float (&a)[8], float (&b)[8]) const {
        a_row.unpack(a);
        if (GATED) Row8<element>(load_shared_16(slot(done) + ROW_BYTES)).unpack(b);
        if (INTERLEAVED) take_pairs_apart(a, b);
    }
#endif
    // Of the lane's columns of row `row`, from the finished tile.
    __device__ __forceinline__ Row8<element> grad_row(int row) const {
        const int lane = threadIdx.x & 31;
        if constexpr (!INTERLEAVED) return finished.get(row, lane);
        const unsigned first = finished.base + row * ROW_BYTES + ((lane / 2 ^ (row & 7)) << 4) + (lane & 1) * 8;
        const uint2 low = load_shared_8(first), high = load_shared_8(first + ROW_BYTES / 2);
        return Row8<element>(make_uint4(low.x, low.y, high.x, high.y));
    }
    __device__ __forceinline__ void load_y_swi(float (&y_swi)[8], int row) const {
        const element* from = at<1>(params.y_swi, row);
        Row8<element> loaded;
        if constexpr (INTERLEAVED) {
            const uint2 none = make_uint2(0, 0);
            const uint2 low = inside() ? *reinterpret_cast<const uint2*>(from) : none;
            const uint2 high = inside_second() ? *reinterpret_cast<const uint2*>(from + HALF_COLUMNS) : none;
            loaded = Row8<element>(make_uint4(low.x, low.y, high.x, high.y));
        } else {
            loaded.load<true>(from, inside());
        }
        loaded.unpack(y_swi);
    }
    __device__ __forceinline__ void load_a(int row) {
        cp_async_wait<1>();
        a_row = Row8<element>(load_shared_16(slot(row)));
    }
    __device__ __forceinline__ void begin(int64 first_row, int count, int n0) {
        const int lane = threadIdx.x & 31;
        rows = count, done = 0;
        row0 = static_cast<unsigned>(first_row), column = n0 + lane * (INTERLEAVED ? LANE_COLUMNS / 2 : LANE_COLUMNS);
        weights = to_float(params.weights[row0 + min(lane & 15, rows - 1)]);  // rows = 0: the row before row0
        fetch(0);
        fetch(1);
    }

    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31;
        if (done == 0) load_a(0);
        const float w = __shfl_sync(0xffffffffu, weights, done);
#ifdef OPERAND
        const float scale = __shfl_sync(0xffffffffu, scales, done);
        auto scaled = [&](float v) { return v * scale; };
#else
        auto scaled = [](float v) { return v; };
#endif
        const float scaled_w = scaled(w);
        const ActivationConstants constants = constants_of(params);
        float grad[8], a[8], b[8], y_swi[8], dot[2] = {};
        unpack_saved(a, b);
        grad_row(done).unpack(grad);
        fetch(done + SLOTS);
        if (STORED_Y_SWI) load_y_swi(y_swi, done);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            if constexpr (WEIGHTS_ON_INPUT) {
                const ActivatedBwd bwd = activate_bwd<ACTIVATION>(w * a[c], GATED ? w * b[c] : 1.f, scaled(grad[c]), constants);
                y_swi[c] = bwd.y_swi;
                dot[c & 1] = fmaf(bwd.grad_a, a[c], dot[c & 1]);
                if (GATED) dot[c & 1] = fmaf(bwd.grad_b, b[c], dot[c & 1]);
                a[c] = w * bwd.grad_a;
                b[c] = w * bwd.grad_b;
                continue;
            }
            const ActivatedBwd bwd = activate_bwd<ACTIVATION>(a[c], GATED ? b[c] : 1.f, scaled_w * grad[c], constants);
            if (!STORED_Y_SWI) y_swi[c] = bwd.y_swi;
            dot[c & 1] = fmaf(grad[c], y_swi[c], dot[c & 1]);
            y_swi[c] *= w;
            a[c] = bwd.grad_a;
            b[c] = bwd.grad_b;
        }
        if (INTERLEAVED) make_pairs(a, b);
        const uint4 grad_a = pack8(element(), a), grad_b = pack8(element(), b), weighted_y_swi = pack8(element(), y_swi);
        if constexpr (INTERLEAVED) {
            element* first_layer_grad = pairs_at(params.first_layer_grad, done);
            if (inside() && params.first_layer_grad) store_global_vector(first_layer_grad, grad_a);
            if (inside_second() && params.first_layer_grad) store_global_vector(first_layer_grad + 2 * HALF_COLUMNS, grad_b);
            uint2* result = reinterpret_cast<uint2*>(at<1>(params.result, done));
            if (inside() && params.result) *result = make_uint2(weighted_y_swi.x, weighted_y_swi.y);
            if (inside_second() && params.result) result[HALF_COLUMNS / 4] = make_uint2(weighted_y_swi.z, weighted_y_swi.w);
        } else {
            element* first_layer_grad = at<1 + GATED>(params.first_layer_grad, done);
            if (inside() && params.first_layer_grad) store_global_vector(first_layer_grad, grad_a);
            if (GATED && inside() && params.first_layer_grad) store_global_vector(first_layer_grad + params.columns, grad_b);
            if (inside() && params.result) store_global_vector(at<1>(params.result, done), weighted_y_swi);
        }
#ifdef OPERAND
        if (params.quantised) {
            operand* to = at<1 + GATED>(params.quantised, done);
            float* to_scale = params.quantised_scales + column / GROUP_COLUMNS * params.scales_ld + (row0 + done);
            const int64 up_scales = (params.columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS * params.scales_ld;
            const bool any_inside = int(column) / GROUP_COLUMNS * GROUP_COLUMNS < params.columns;
            store_quantised<1 + GATED>(to, params.columns, to_scale, up_scales, a, b, inside(), any_inside);
        }
#endif
        __syncwarp();                       // all lanes have read the row
        const float sum = dot[0] + dot[1];  // of rows without their scales, unless these are on the input
        store_shared_4(finished.base + done * ROW_BYTES + lane * 4, WEIGHTS_ON_INPUT ? sum : scaled(sum));
        load_a(++done);
    }

    // The partial sums: two lanes per row add 16 of its 32 parts each.
    __device__ __forceinline__ void end() const {
        const int row = threadIdx.x & 15, half = (threadIdx.x & 31) / 16;
        cp_async_wait<0>();  // the next tile's first rows go to the slots that this tile's last, unused copies fill
        __syncwarp();
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows start at different quarters, to spread over the banks
            const uint4 v = load_shared_16(finished.base + row * ROW_BYTES + half * 64 + (i + row) % 4 * 16);
            sum += __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) + __uint_as_float(v.w);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (half == 0 && row < rows && params.partial_sums)
            params.partial_sums[static_cast<int64>(column / BN) * params.num_slots + row0 + row] = sum;
    }
};
