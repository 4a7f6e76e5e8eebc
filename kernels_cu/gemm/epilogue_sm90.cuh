// Epilogues of grouped_gemm_sm90.cu, except that of down_bwd (paper sections 3.1 and 5.2). An epilogue is what a consumer warp
// does with its 16 rows of a finished tile; EpilogueBase in gemm_core_sm90.cuh describes begin() and next(). A lane has 8
// columns of a row, 16 bytes.
#pragma once
#include "activation.cuh"
#include "gemm_core_sm90.cuh"
#include "peers.cuh"
#include "saved_scales.cuh"
#include "scales_sm90.cuh"

constexpr int LANE_COLUMNS = 8;
constexpr int ROW_LANES = BN / LANE_COLUMNS;  // that span a row of a tile: all, or 24 of a tile with 192 columns

// down_fwd and up_bwd: stores the rows to the panel `result`.
template <class Params>
struct StoreRows : EpilogueBase {
    static constexpr bool SQUARE = true;
    static constexpr int SPREAD_STEPS = 8;
    const Params& params;
    element* row;
    bool inside;

    __device__ __forceinline__ explicit StoreRows(const Params& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31, column = n0 + lane * LANE_COLUMNS;
        rows = count, done = 0, inside = lane < ROW_LANES && column < params.columns;
        row = params.result + row0 * params.result_ld + column;
    }
    __device__ __forceinline__ void next() {
        const Row8<element> v = finished.get(done, min(int(threadIdx.x & 31), ROW_LANES - 1));
        if (inside) v.store(row);
        row += params.result_ld;
        ++done;
    }
};

// down_fwd and up_bwd with k = 1: stores each row, times its token's weight, to the token's row of `result`, or with PUSHES to its
// row in the memory of the GPU that has the token. No panel is needed.
template <class Params>
struct StoreTokenRows : EpilogueBase {
    static constexpr int SPREAD_STEPS = 8;
    const Params& params;
#if PUSHES
    typedef unsigned long long place_t;  // the address of a token's row
    static __device__ __forceinline__ place_t place_of(const Params& params, int token) {
        const int peer = token / params.rows_per_peer;
        const int64 row = params.first_row + token - peer * int64(params.rows_per_peer);
        return reinterpret_cast<place_t>(at_peer<element>(params.peers, peer, params.offset) + row * params.result_ld);
    }
    static __device__ __forceinline__ element* row_at(const Params&, place_t place) { return reinterpret_cast<element*>(place); }
    static __device__ __forceinline__ bool is_read(const Params& params, int64 token) { return params.needed[token]; }
#else
    typedef int place_t;  // a token
    static __device__ __forceinline__ place_t place_of(const Params&, int token) { return token; }
    static __device__ __forceinline__ element* row_at(const Params& params, place_t place) {
        return params.result + int64(place) * params.result_ld;
    }
    static __device__ __forceinline__ bool is_read(const Params&, int64) { return true; }
#endif
    int column;     // the lane's first column
    place_t place;  // place that the warp's row lane % 16 goes to
    float weight;   // the router weight of its token

    __device__ __forceinline__ explicit StoreTokenRows(const Params& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31;
        rows = count, done = 0, column = n0 + lane * LANE_COLUMNS;
        const int token = params.expert_token_indices[row0 + min(lane & 15, rows - 1)];  // rows <= 0: of the tile's last row
        weight = params.weights ? to_float(params.weights[token]) : 1.f;
        place = place_of(params, token);
    }
    __device__ __forceinline__ void next() {
        element* const row = row_at(params, __shfl_sync(0xffffffffu, place, done));
        const float scale = __shfl_sync(0xffffffffu, weight, done);
        float v[8];
        finished.get(done, threadIdx.x & 31).unpack(v);
#pragma unroll
        for (int c = 0; c < 8; ++c) v[c] *= scale;
        if (column < params.columns) store_vector8(row + column, v);
        ++done;
    }

    // Writes zeros to the rows of tokens without an expert, with PUSHES if they are needed: max_slots may have left their slots
    // out. All CTAs share this work, 32 tokens at a time.
    static __device__ __forceinline__ void idle_producer_warp(const Params& params) {
        const int lane = threadIdx.x & 31;
        const int64 L = params.num_slots;
        for (int64 first = blockIdx.x * 32LL; first < L; first += gridDim.x * 32LL) {
            const int64 token = min(first + lane, L - 1);
            const bool without = first + lane < L && params.token_index_map[token] < 0 && is_read(params, token);
            for (unsigned left = __ballot_sync(0xffffffffu, without); left; left &= left - 1) {
                element* const row = row_at(params, place_of(params, first + __ffs(left) - 1));
                for (int column = lane * LANE_COLUMNS; column < params.columns; column += 32 * LANE_COLUMNS)
                    store_global_16(row + column, make_uint4(0, 0, 0, 0));
            }
        }
    }
};

// up_fwd: stores a and b to first_layer, and y_swi to `result`. A gated tile has 128 columns of gate, then 128 of up, so that
// half a warp spans a row of the result. ActivatePairs is for interleaved columns. With WEIGHTS_ON_INPUT
// y_swi = V(w * a) * M(w * b), where w is the row's router weight. With e4m3 operands y_swi is also stored as e4m3 with scales.
// If any scales are stored, a lane works on two rows per call of next(): lanes share the work of the scales, and the shuffles
// of one row overlap with the activations of the other.
template <class Params>
struct ActivateRows : EpilogueBase {
    static constexpr bool SPLIT = GATED;
    static constexpr int LANES = (SPLIT ? BN / 2 : BN) / LANE_COLUMNS;  // that span a row of the result
    static constexpr int LANE_ROWS = FP8_SAVED || FP8 ? 2 : 1;          // rows of a lane per call of next()
    static constexpr int STEP = 32 / LANES;                             // rows from one of a lane's rows to its next
    static constexpr int ROWS = LANE_ROWS * STEP;                       // rows of the warp per call of next()
    static constexpr int VECTORS = LANE_ROWS * (1 + SPLIT);  // a lane's: gate and up of its first row, then of its second
    using Shared = SharedScaling<VECTORS>;
    using SharedY = SharedScaling<LANE_ROWS>;
    const Params& params;
    decltype(Params::first_layer) first_layer;
    bool inside;
    float weights;           // WEIGHTS_ON_INPUT: the router weight of the warp's row lane % 16
    bool group_inside;       // the group of the lane's columns begins before the last column
    element* y_swi;          // without FP8
    operand* quantised;      // FP8: y_swi as e4m3, at the lane's first row and column
    float* quantised_scale;  // the scale that this lane stores
    float* scale;            // FP8_SAVED: the scale of a or b that this lane stores
    unsigned scale_ld;       // floats from row to row

    __device__ __forceinline__ explicit ActivateRows(const Params& params) : params(params) {}
    __device__ __forceinline__ int64 first_layer_ld() const { return GATED ? 2 * params.columns : params.columns; }
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31, column = n0 + lane % LANES * LANE_COLUMNS;
        rows = count, done = 0, inside = column < params.columns;
        const int64 r = row0 + lane / LANES;
        first_layer = params.first_layer + r * first_layer_ld() + column;
        if constexpr (FP8) {
            quantised = params.quantised + r * params.columns + column;
            quantised_scale = params.quantised_scales + column / GROUP_COLUMNS * params.scales_ld + r + SharedY::vector() * STEP;
        } else {
            y_swi = params.result + r * params.columns + column;
        }
        if constexpr (FP8_SAVED || FP8) {
            const int first_column = column - lane % GROUP_LANES * LANE_COLUMNS;
            group_inside = first_column < params.columns;
            if constexpr (FP8_SAVED) {
                const SavedScales<1 + GATED> scales(params.first_layer, params.num_slots, params.columns);
                scale = scales.at(static_cast<unsigned>(r + scale_row()), first_column) + Shared::vector() % (1 + SPLIT);
                scale_ld = scales.groups * (1 + GATED);
            }
        }
        if (WEIGHTS_ON_INPUT)
            weights = to_float(params.weights[row0 + min(lane & 15, rows - 1)]);  // rows <= 0: that of the tile's last row
    }
    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31, row = done + lane / LANES, chunk = lane % LANES;
        float w[LANE_ROWS], y[LANE_ROWS][8];
        bool valid[LANE_ROWS];
        Row8<element> gate[LANE_ROWS], up[LANE_ROWS];
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            w[i] = WEIGHTS_ON_INPUT ? __shfl_sync(0xffffffffu, weights, (row + i * STEP) & 15) : 1.f;
            valid[i] = inside && row + i * STEP < rows;
            gate[i] = finished.get(row + i * STEP, chunk);
            up[i] = SPLIT ? finished.get(row + i * STEP, chunk + LANES) : gate[i];
        }
        if constexpr (FP8_SAVED) keep<VECTORS>(gate, up, valid);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            float b[8];
            gate[i].unpack(y[i]);
            up[i].unpack(b);
#pragma unroll
            for (int c = 0; c < 8; ++c)
                y[i][c] = y_swi_of<ACTIVATION>(w[i] * y[i][c], SPLIT ? w[i] * b[c] : 1.f, constants_of(params));
        }
        if constexpr (FP8) store_scaled(y, valid, row);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            const uint4 packed = pack8(element(), y[i]);
            if constexpr (!FP8_SAVED) {
                const auto to = first_layer + i * STEP * first_layer_ld();
                if (valid[i] && params.first_layer) gate[i].store(to);
                if (SPLIT && valid[i] && params.first_layer) up[i].store(to + params.columns);
            }
            if (!FP8 && valid[i] && params.result) store_global_16(y_swi + i * STEP * params.columns, packed);
        }
        first_layer += ROWS * first_layer_ld();
        if (!FP8) y_swi += ROWS * params.columns;
        done += ROWS;
    }

    // Stores y_swi as e4m3 with scales, and if it is wanted as elements.
    __device__ __forceinline__ void store_scaled(const float (&y)[LANE_ROWS][8], const bool (&valid)[LANE_ROWS], int row) {
        if (params.quantised) {
            const float scale = store_quantised(quantised, STEP * params.columns, y, [&](int i) { return valid[i]; });
            if (SharedY::stores() && group_inside && row + SharedY::vector() * STEP < rows) *quantised_scale = scale;
        }
        if (params.result) {
            element* const y_swi = params.result + (quantised - params.quantised);
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i)
                if (valid[i]) store_vector8(y_swi + i * STEP * params.columns, y[i]);
        }
        quantised += ROWS * params.columns, quantised_scale += ROWS;
    }

    // The row of the scale that this lane stores, from the lane's first row on.
    static __device__ __forceinline__ int scale_row() { return Shared::vector() / (1 + SPLIT) * STEP; }
    // Stores a and b as e4m3 with scales. N is VECTORS; as a parameter it keeps a compiler from looking into what has no scales.
    template <int N>
    __device__ __forceinline__ void keep(const Row8<element> (&gate)[LANE_ROWS], const Row8<element> (&up)[LANE_ROWS],
                                         const bool (&valid)[LANE_ROWS]) {
        unsigned of_vectors[N], amax[N / 2];
#pragma unroll
        for (int i = 0; i < N; ++i) of_vectors[i] = amax_of_pairs(SPLIT && i % 2 ? up[i / 2] : gate[i / (1 + SPLIT)]);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) amax[i] = amax_of_two<element>(of_vectors[2 * i], of_vectors[2 * i + 1]);
        const Scaling mine = scaling_of_pairs<GROUP_LANES, element>(amax);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float v[8];
            (SPLIT && i % 2 ? up[i / 2] : gate[i / (1 + SPLIT)]).unpack(v);
            const float factor = Shared::factor(mine, i);
            const auto to = first_layer + i / (1 + SPLIT) * STEP * first_layer_ld() + i % (1 + SPLIT) * params.columns;
            store_global_8_if(valid[i / (1 + SPLIT)], to, pack_e4m3(v, factor, factor));
        }
        const int scaled_row = done + static_cast<int>(threadIdx.x & 31) / LANES + scale_row();
        if (Shared::stores() && group_inside && scaled_row < rows) *scale = mine.scale;
        scale += ROWS * scale_ld;
    }
};

// ActivateRows for interleaved columns: a tile has 128 pairs of gate and up, of which a lane has four. Each call of next()
// takes two rows, so that eight activations overlap.
template <class Params>
struct ActivatePairs : EpilogueBase {
    static constexpr bool PAIRS = true, SQUARE = true;
    static constexpr int ROWS = 2;  // rows of the warp per call of next()
    // FP8_SAVED: as many lanes have the scale of gate of the first row, then that of up, then the same for the second row.
    static constexpr int SCALE_LANES = 32 / (2 * ROWS);
    static_assert(!(FP8_SAVED || FP8) || BN / 2 == GROUP_COLUMNS, "a row of the tile is one group, of gate, up and y_swi");
    const Params& params;
    decltype(Params::first_layer) first_layer;
    element* y_swi;
    bool inside;
    float weights;           // WEIGHTS_ON_INPUT: the router weight of the warp's row lane % 16
    float* scale;            // FP8_SAVED: the scale that this lane stores
    unsigned scale_ld;       // floats from row to row
    operand* quantised;      // FP8: y_swi as e4m3, at the lane's columns
    float* quantised_scale;  // the scale that this lane stores

    __device__ __forceinline__ explicit ActivatePairs(const Params& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31, column = n0 + lane * (LANE_COLUMNS / 2);
        rows = count, done = 0, inside = lane < ROW_LANES && column < params.columns;
        first_layer = params.first_layer + 2 * (row0 * params.columns + column);
        y_swi = params.result + row0 * params.columns + column;
        if constexpr (FP8) {
            quantised = params.quantised + row0 * params.columns + column;
            quantised_scale = params.quantised_scales + n0 / GROUP_COLUMNS * params.scales_ld + row0 + y_row();
        }
        if constexpr (FP8_SAVED) {
            const SavedScales<2> scales(params.first_layer, params.num_slots, params.columns);
            scale_ld = 2 * scales.groups;
            scale = scales.at(static_cast<unsigned>(row0), n0) + lane_row() * scale_ld + threadIdx.x / SCALE_LANES % 2;
        }
        if (WEIGHTS_ON_INPUT)
            weights = to_float(params.weights[row0 + min(static_cast<int>(threadIdx.x & 15), rows - 1)]);  // as ActivateRows
    }
    __device__ __forceinline__ void next() {
        Row8<element> pairs[ROWS];
        float y[LANE_COLUMNS / 2 * ROWS];
        unsigned amax[ROWS];  // FP8_SAVED: largest magnitudes of gate, in the low half, and of up
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            float ab[LANE_COLUMNS];
            const float w = WEIGHTS_ON_INPUT ? __shfl_sync(0xffffffffu, weights, (done + i) & 15) : 1.f;
            // row done + 1 may be past the last; it is not stored
            pairs[i] = finished.get(done + i, min(int(threadIdx.x & 31), ROW_LANES - 1));
            pairs[i].unpack(ab);
            if (FP8_SAVED) amax[i] = amax_of_pairs(pairs[i]);
#pragma unroll
            for (int c = 0; c < 4; ++c)
                y[4 * i + c] = y_swi_of<ACTIVATION>(w * ab[2 * c], w * ab[2 * c + 1], constants_of(params));
        }
        const uint4 packed = pack8(element(), y);
        if constexpr (FP8_SAVED) keep(pairs, amax);
        if constexpr (FP8) store_scaled(y);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const bool valid = inside && done + i < rows;
            if constexpr (!FP8_SAVED)
                if (valid && params.first_layer) pairs[i].store(first_layer + i * 2 * params.columns);
            const uint2 of_row = i ? make_uint2(packed.z, packed.w) : make_uint2(packed.x, packed.y);
            if (valid && params.result) *reinterpret_cast<uint2*>(y_swi + i * params.columns) = of_row;
        }
        first_layer += ROWS * 2 * params.columns;
        y_swi += ROWS * params.columns;
        done += ROWS;
    }

    // The row whose scale of y_swi this lane has, from `done` on.
    static __device__ __forceinline__ int y_row() { return (threadIdx.x & 31) / (32 / ROWS); }
    // Stores y_swi as e4m3 with scales. A row of the tile is one group.
    __device__ __forceinline__ void store_scaled(const float (&y)[LANE_COLUMNS / 2 * ROWS]) {
        if (params.quantised) {
            float amax[ROWS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
                amax[i] = fmaxf(fmaxf(fabsf(y[4 * i]), fabsf(y[4 * i + 1])), fmaxf(fabsf(y[4 * i + 2]), fabsf(y[4 * i + 3])));
            const Scaling mine = scaling_of(largest<32>(amax));
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                const float factor = __shfl_sync(0xffffffffu, mine.factor, i * (32 / ROWS));
                const unsigned low = cvt_e4m3x2(y[4 * i] * factor, y[4 * i + 1] * factor);
                const unsigned high = cvt_e4m3x2(y[4 * i + 2] * factor, y[4 * i + 3] * factor);
                if (inside && done + i < rows) *reinterpret_cast<unsigned*>(quantised + i * params.columns) = low | high << 16;
            }
            if (threadIdx.x % (32 / ROWS) == 0 && done + y_row() < rows) *quantised_scale = mine.scale;
        }
        quantised += ROWS * params.columns, quantised_scale += ROWS;
    }

    // The row of the scale that this lane stores, from `done` on.
    static __device__ __forceinline__ int lane_row() { return (threadIdx.x & 31) / (2 * SCALE_LANES); }
    // Stores a and b as e4m3 with scales.
    __device__ __forceinline__ void keep(const Row8<element> (&pairs)[ROWS], const unsigned (&amax)[ROWS]) {
        const Scaling mine = scaling_of_pairs<32, element>(amax);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float gate = __shfl_sync(0xffffffffu, mine.factor, 2 * i * SCALE_LANES);
            const float up = __shfl_sync(0xffffffffu, mine.factor, (2 * i + 1) * SCALE_LANES);
            float ab[LANE_COLUMNS];
            pairs[i].unpack(ab);
            store_global_8_if(inside && done + i < rows, first_layer + i * 2 * params.columns, pack_e4m3(ab, gate, up));
        }
        if (threadIdx.x % SCALE_LANES == 0 && done + lane_row() < rows) *scale = mine.scale;
        scale += ROWS * scale_ld;
    }
};
