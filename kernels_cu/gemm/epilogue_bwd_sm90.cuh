// The epilogue of down_bwd in grouped_gemm_sm90.cu (paper sections 3.2 and 5.2). EpilogueBase in gemm_core_sm90.cuh describes
// begin() and next().
#pragma once
#include "epilogue_sm90.cuh"

// The accumulators are grad_y_swi = grad_out w2^T, the gradient of w * y_swi. w is the row's router weight. The results are
//   first_layer_grad = the gradients of a and b: w * grad_y_swi times the derivatives of y_swi
//   result           = weighted_y_swi = w * y_swi
//   partial_sums     = <grad_y_swi, y_swi> of each row over the tile's columns
// With WEIGHTS_ON_INPUT y_swi = V(w * a) * M(w * b), and grad_y_swi is its gradient. g and u are the gradients of w * a and
// w * b. The results are
//   first_layer_grad = w * g and w * u
//   result           = y_swi
//   partial_sums     = <g, a> + <u, b> of each row over the tile's columns
// cp.async fetches a and b two rows ahead, into two slots of shared memory per warp. When a row is done, the a of the next row
// is loaded to registers. Each lane stores its part of a row's partial sum over the row of the finished tile that the warp has
// just read, and end() adds the parts. Addresses are computed again for each row: in registers they would take the place that
// lets eight activations overlap.
//
// With INTERLEAVED a lane has columns 4 lane to 4 lane + 3 of each half of the tile, so that the warp's accesses to pairs of a
// and b are contiguous. A slot then holds pairs of the tile's first half and pairs of the second, in place of a and b.
//
// With FP8_SAVED a lane has 16 bytes in the first half of a slot: eight e4m3 of a, then of b, or four pairs of the tile's first
// half, then of the second. It has the scales of these in the second half of the slot: of a and of b, or of both for each half.
//
// Spare shared memory: (8 warps, 2 slots, 2, BN) element. A lane reads only what it has fetched itself.
template <class Params>
struct ActivateBwdRows : EpilogueBase {
    static constexpr int SLOTS = 2, SLOT_BYTES = 2 * ROW_BYTES;
    static_assert(BN != 256 || CONSUMER_WARPS * SLOTS * SLOT_BYTES <= SPARE_BYTES, "two slots for each consumer warp");
    static constexpr bool LONG_ROWS = true;
    static constexpr int HALF_COLUMNS = BN / 2;  // columns of half a tile, with INTERLEAVED
    const Params& params;
    const unsigned slots;   // shared address of the lane's part of the warp's first slot
    unsigned row0, column;  // the warp's first row, and the lane's first column
    float weights;          // the router weight of the warp's row lane % 16
    static constexpr bool SCALES_ROWS = true;
    float scales;  // FP8: the scale of the warp's row lane % 16; grad_y_swi is the accumulator times it
    // FP8_WGRAD: largest magnitudes over the warp's rows of a tile, of what is multiplied with x and with grad_out for the weight
    // gradients, times the scales of these. See note_amax.
    int expert;
    float weight_scale, x_scales;  // of the expert's w2; of x for the warp's row lane % 16
    float grad_amax, result_amax;
    __device__ __forceinline__ void take_scales(const float* rows, float of_weight, int of_expert) {
        scales = rows[threadIdx.x & 15] * of_weight;
        if constexpr (FP8_WGRAD) expert = of_expert, weight_scale = of_weight;
    }
    // FP8: the gradients of a and b of row done - 1. The next call of next() stores them as e4m3, which overlaps with its
    // activations. With INTERLEAVED they are pairs of the tile's first half, and of its second.
    using Shared = SharedScaling<1 + GATED>;
    float held[1 + GATED][8];
    float* quantised_scale;  // the scale that this lane stores, for the warp's first row
    bool group_inside;       // the group of this scale begins before the last column
    __device__ __forceinline__ void begin_quantised() {
        if constexpr (INTERLEAVED) {
            const int group = 2 * (column + Shared::vector() * HALF_COLUMNS) / GROUP_COLUMNS;
            quantised_scale = params.quantised_scales + group * params.scales_ld + row0;
            group_inside = group * GROUP_COLUMNS < 2 * params.columns;
            return;
        }
        const int groups = (params.columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS, group = column / GROUP_COLUMNS;
        quantised_scale = params.quantised_scales + (group + Shared::vector() * groups) * params.scales_ld + row0;
        group_inside = group * GROUP_COLUMNS < params.columns;
#if FP8_WGRAD
        x_scales = params.x_scales[params.expert_token_indices[row0 + min(static_cast<int>(threadIdx.x & 15), rows - 1)]];
        grad_amax = result_amax = 0.f;
#endif
    }
    __device__ __forceinline__ void store_held() {
        const bool stores = params.quantised && done > 0;
        operand* const to = INTERLEAVED ? pairs_at(params.quantised, done - 1) : at<1 + GATED>(params.quantised, done - 1);
        float amax;  // of the vector whose scale this lane computes
        const auto inside_of = [&](int i) { return stores && (INTERLEAVED && i ? inside_second() : inside()); };
        const float scale = store_quantised(to, INTERLEAVED ? 2 * HALF_COLUMNS : params.columns, held, inside_of, amax);
        if (Shared::stores() && group_inside && stores) quantised_scale[done - 1] = scale;
        if constexpr (FP8_WGRAD) {
            const float of_row = __shfl_sync(0xffffffffu, x_scales, (done - 1) & 15);
            if (done > 0) grad_amax = fmaxf(grad_amax, amax * of_row);
        }
    }
#if FP8_WGRAD
    // Integer maxima have the same bits in any order. Magnitudes of weighted_y_swi had grad_out's scale with that of w2.
    __device__ __forceinline__ void note_amax() const {
        const int groups = (params.columns + GROUP_COLUMNS - 1) / GROUP_COLUMNS, group = column / GROUP_COLUMNS;
        const float of_result[1] = {result_amax}, largest_result = largest<GROUP_LANES>(of_result) / weight_scale;
        if (rows <= 0 || !group_inside) return;
        const int of_grad = (expert * (1 + GATED) + Shared::vector()) * groups + group;
        if (Shared::stores()) atomicMax(params.first_layer_grad_amax + of_grad, __float_as_uint(grad_amax));
        if (threadIdx.x % GROUP_LANES == 0)
            atomicMax(params.result_amax + expert * groups + group, __float_as_uint(largest_result));
    }
#endif
    Row8<element> a_row;  // a of row `done`, or with INTERLEAVED its first pairs; with FP8_SAVED all e4m3 of the lane

    __device__ __forceinline__ explicit ActivateBwdRows(const Params& params)
        : params(params),
          slots(shared_address(dynamic_shared) + SPARE + consumer_warp() * SLOTS * SLOT_BYTES + (threadIdx.x & 31) * 16) {}

    // Both return the address of the lane's columns in the warp's row `row`: at() in a matrix of HALVES * N columns, pairs_at()
    // in one of N pairs.
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

    static constexpr int HALVES = 1 + GATED, SCALES_BYTES = HALVES * sizeof(float);
    __device__ __forceinline__ void fetch(int row) {
        if constexpr (FP8_SAVED) {
            const bool first = inside() && row < rows, second = INTERLEAVED ? inside_second() && row < rows : first;
            const auto from = INTERLEAVED ? pairs_at(params.first_layer, row) : at<HALVES>(params.first_layer, row);
            cp_async_small<8>(slot(row), from, first ? 8 : 0);
            if (GATED) cp_async_small<8>(slot(row) + 8, from + (INTERLEAVED ? 2 * HALF_COLUMNS : params.columns), second ? 8 : 0);
            const float* scales =
                SavedScales<HALVES>(params.first_layer, params.num_slots, params.columns).at(row0 + row, column);
            cp_async_small<SCALES_BYTES>(slot(row) + ROW_BYTES, scales, first ? SCALES_BYTES : 0);
            if (INTERLEAVED) cp_async_small<SCALES_BYTES>(slot(row) + ROW_BYTES + 8, scales + HALVES, second ? SCALES_BYTES : 0);
        } else if constexpr (INTERLEAVED) {
            const element* from = pairs_at(params.first_layer, row);
            cp_async_16(slot(row), from, inside() && row < rows ? 16 : 0);
            cp_async_16(slot(row) + ROW_BYTES, from + 2 * HALF_COLUMNS, inside_second() && row < rows ? 16 : 0);
        } else {
            const element* from = at<HALVES>(params.first_layer, row);
            const unsigned bytes = inside() && row < rows ? 16 : 0;
            cp_async_16(slot(row), from, bytes);
            if (GATED) cp_async_16(slot(row) + ROW_BYTES, from + params.columns, bytes);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void unpack_saved(float (&a)[8], float (&b)[8]) const {
        if constexpr (FP8_SAVED) {
            const uint4 scales = load_shared_16(slot(done) + ROW_BYTES);
            unpack_e4m3(a, a_row.words[0], a_row.words[1]);
            if (GATED) unpack_e4m3(b, a_row.words[2], a_row.words[3]);
            if (INTERLEAVED) take_pairs_apart(a, b);
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const bool second = INTERLEAVED && c >= 4;
                a[c] *= __uint_as_float(second ? scales.z : scales.x);
                if (GATED) b[c] *= __uint_as_float(second ? scales.w : scales.y);
            }
        } else {
            a_row.unpack(a);
            if (GATED) Row8<element>(load_shared_16(slot(done) + ROW_BYTES)).unpack(b);
            if (INTERLEAVED) take_pairs_apart(a, b);
        }
    }
    // Returns grad_y_swi of the lane's columns of row `row`, from the finished tile.
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
        weights = to_float(params.weights[row0 + min(lane & 15, rows - 1)]);  // rows <= 0: that of the tile's last row
        if constexpr (FP8) begin_quantised();
        fetch(0);
        fetch(1);
    }

    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31;
        if (done == 0) load_a(0);
        const float w = __shfl_sync(0xffffffffu, weights, done);
        const float scale = FP8 ? __shfl_sync(0xffffffffu, scales, done) : 1.f;
        auto scaled = [&](float v) { return v * scale; };
        const float scaled_w = scaled(w);
        const ActivationConstants constants = constants_of(params);
        float grad[8], a[8], b[8], y_swi[8], dot[2] = {};
        unpack_saved(a, b);
        grad_row(done).unpack(grad);
        fetch(done + SLOTS);
        if constexpr (FP8) store_held();
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
        if constexpr (FP8_WGRAD) {
            const unsigned pairs = amax_of_pairs(Row8<element>(weighted_y_swi)) & 0x7fff7fff;
            result_amax = fmaxf(result_amax, __uint_as_float(max(pairs & 0xffff, pairs >> 16) << 16) * scale);
        }
        if constexpr (FP8) {
#pragma unroll
            for (int c = 0; c < 8; ++c) held[0][c] = a[c], held[GATED][c] = GATED ? b[c] : a[c];
        }
        __syncwarp();  // all lanes have read the row
        // Without WEIGHTS_ON_INPUT the products lack the row's scale.
        const float sum = dot[0] + dot[1];
        store_shared_4(finished.base + done * ROW_BYTES + lane * 4, WEIGHTS_ON_INPUT ? sum : scaled(sum));
        load_a(++done);
    }

    // Stores the partial sums. A row has 32 parts, of which two lanes add 16 each.
    __device__ __forceinline__ void end() {
        if constexpr (FP8) store_held();
#if FP8_WGRAD
        note_amax();
#endif
        const int row = threadIdx.x & 15, half = (threadIdx.x & 31) / 16;
        cp_async_wait<0>();  // fetch() ran past the last row: its copies must end before begin() fills these slots again
        __syncwarp();
        float parts[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // lanes start at different 16 bytes, which spreads their reads over the banks
            const uint4 v = load_shared_16(finished.base + row * ROW_BYTES + half * 64 + (i + row) % 4 * 16);
            parts[i] = __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) + __uint_as_float(v.w);
        }
        float sum = (parts[0] + parts[2]) + (parts[1] + parts[3]);  // the same bits wherever the lane starts
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (half == 0 && row < rows && params.partial_sums)
            params.partial_sums[static_cast<int64>(column / BN) * params.num_slots + row0 + row] = sum;
    }
};
