// down_bwd's epilogue (grouped_gemm_sm90.cu), of the same kind as those of epilogue_sm90.cuh.
#pragma once
#include "epilogue_sm90.cuh"

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
#ifdef OPERAND
    // Gradients of a and b of row done - 1, which become e4m3 while the row after it waits for its activations.
    using Shared = SharedScaling<1 + GATED>;
    float held[1 + GATED][8];
    float* quantised_scale;  // of row 0 and of the half that the lane has the scale of
    bool group_inside;       // the group of the lane's columns has columns inside
    __device__ __forceinline__ void begin_quantised() {
        const int groups = (params.columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS, group = column / GROUP_COLUMNS;
        quantised_scale = params.quantised_scales + (group + Shared::vector() * groups) * params.scales_ld + row0;
        group_inside = group * GROUP_COLUMNS < params.columns;
    }
    __device__ __forceinline__ void store_held() const {
        const bool stores = params.quantised && done > 0;
        operand* const to = at<1 + GATED>(params.quantised, done - 1);
        const float scale = store_quantised(to, params.columns, held, [&](int) { return stores && inside(); });
        if (Shared::stores() && group_inside && stores) quantised_scale[done - 1] = scale;
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
#ifdef OPERAND
        begin_quantised();
#endif
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
#ifdef OPERAND
        store_held();
#endif
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
#pragma unroll
        for (int c = 0; c < 8; ++c) held[0][c] = a[c], held[GATED][c] = GATED ? b[c] : a[c];
#endif
        __syncwarp();                       // all lanes have read the row
        const float sum = dot[0] + dot[1];  // of rows without their scales, unless these are on the input
        store_shared_4(finished.base + done * ROW_BYTES + lane * 4, WEIGHTS_ON_INPUT ? sum : scaled(sum));
        load_a(++done);
    }

    // The partial sums: two lanes per row add 16 of its 32 parts each.
    __device__ __forceinline__ void end() const {
#ifdef OPERAND
        store_held();
#endif
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
