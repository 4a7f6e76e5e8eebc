// Epilogues of grouped_gemm_sm90.cu: what a warp makes of its 16 rows of a finished tile. begin() takes a tile over, next()
// works on one row, or on two where half a warp spans a row; see EpilogueBase.
#pragma once
#include "activation.cuh"
#include "gemm_core_sm90.cuh"
#include "row_staging.cuh"

// product = the rows as they are.
struct StoreRows : EpilogueBase {
    static constexpr int SPREAD = 8;
    const GroupedGemmParams& params;
    element* row;
    bool inside;

    __device__ __forceinline__ explicit StoreRows(const GroupedGemmParams& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int column = n0 + (threadIdx.x & 31) * 8;
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

// k = 1: each row to its token, times the token's weight.
struct StoreTokenRows : EpilogueBase {
    static constexpr int SPREAD = 8;
    const GroupedGemmParams& params;
    int column, token;  // of the lane; of row lane % 16
    float weight;       // of that token

    __device__ __forceinline__ explicit StoreTokenRows(const GroupedGemmParams& params) : params(params) {}
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31;
        rows = count, done = 0, column = n0 + lane * 8;
        token = params.expert_token_indices[row0 + min(lane & 15, rows - 1)];  // without rows, of the expert's last
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
    static __device__ __forceinline__ void beside(const GroupedGemmParams& params) {
        const int lane = threadIdx.x & 31;
        const int64 L = params.num_slots;
        for (int64 first = blockIdx.x * 32LL; first < L; first += gridDim.x * 32LL) {
            const bool without = first + lane < L && params.token_index_map[min(first + lane, L - 1)] < 0;
            for (unsigned left = __ballot_sync(0xffffffffu, without); left; left &= left - 1) {
                element* row = params.result + (first + __ffs(left) - 1) * params.result_ld;
                for (int column = lane * 8; column < params.columns; column += 256)
                    store_global_16(row + column, make_uint4(0, 0, 0, 0));
            }
        }
    }
};

// first_layer = a (and b), product = act(a) * b. A gated tile is 128 columns of gate beside 128 of up, and half a warp
// spans one of its rows.
struct ActivateRows : EpilogueBase {
    static constexpr bool SPLIT = GATED;
    static constexpr int LANES = (SPLIT ? BN / 2 : BN) / 8, ROWS = 32 / LANES;  // of a row of the result; per step
    const GroupedGemmParams& params;
    element *layer, *out;
    bool inside;

    __device__ __forceinline__ explicit ActivateRows(const GroupedGemmParams& params) : params(params) {}
    __device__ __forceinline__ int64 layer_ld() const { return GATED ? 2 * params.columns : params.columns; }
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31, column = n0 + lane % LANES * 8;
        rows = count, done = 0, inside = column < params.columns;
        const int64 r = row0 + lane / LANES;
        layer = params.first_layer + r * layer_ld() + column;
        out = params.result + r * params.columns + column;
    }
    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31, row = done + lane / LANES, chunk = lane % LANES;
        const bool valid = inside && row < rows;
        const Row8<element> gate = finished.get(row, chunk), up = SPLIT ? finished.get(row, chunk + LANES) : gate;
        float a[8], b[8];
        gate.unpack(a);
        up.unpack(b);
#pragma unroll
        for (int c = 0; c < 8; ++c) a[c] = activate<ACTIVATION>(a[c]).value * (SPLIT ? b[c] : 1.f);
        const uint4 packed = pack8(element(), a);
        if (valid && params.first_layer) gate.store(layer);
        if (SPLIT && valid && params.first_layer) up.store(layer + params.columns);
        if (valid && params.result) store_global_16(out, packed);
        layer += ROWS * layer_ld();
        out += ROWS * params.columns;
        done += ROWS;
    }
};

// With the accumulators as grad = dA and w the row's weight: first_layer_grad = w * grad * (act(a) * b)', product =
// w * act(a) * b, partial_sums = <grad, act(a) * b> of the tile's columns. a and b come two rows ahead, by cp.async into
// the lane's own 16 bytes of two slots of 1 KiB per warp; a goes on to registers as the row before is done. A lane leaves
// its part of <grad, act(a) * b> in the row of the finished tile that it has read. What depends on the row is computed
// anew: registers are short, and those that pointers take are missing where eight activations are to overlap.
struct ActivateBwdRows : EpilogueBase {
    static constexpr int SLOT_BYTES = 1024;
    static_assert(8 * 2 * SLOT_BYTES <= SPARE_BYTES, "two slots for each of 8 warps");
    static constexpr bool LONG = true;
    const GroupedGemmParams& params;
    const unsigned slots;
    unsigned row0, column;
    float weights;  // of the warp's row lane % 16
    Row8<element> a_row;

    __device__ __forceinline__ explicit ActivateBwdRows(const GroupedGemmParams& params)
        : params(params),
          slots(shared_address(dynamic_shared) + STAGES * STAGE_BYTES + TILE_BYTES + consumer_warp() * 2 * SLOT_BYTES +
                (threadIdx.x & 31) * 16) {}

    // This lane's columns of the tile's row `row` in a matrix of HALVES * N columns.
    template <int HALVES, class T>
    __device__ __forceinline__ T* place(T* matrix, int row) const {
        return matrix + (uint64(row0 + row) * unsigned(HALVES * params.columns) + column);
    }
    __device__ __forceinline__ unsigned slot(int row) const { return slots + (row & 1) * SLOT_BYTES; }
    __device__ __forceinline__ bool inside() const { return column < params.columns; }

    __device__ __forceinline__ void fetch(int row) {
        const element* from = place<1 + GATED>(params.first_layer, row);
        const unsigned bytes = inside() && row < rows ? 16 : 0;
        cp_async_16(slot(row), from, bytes);
        if (GATED) cp_async_16(slot(row) + SLOT_BYTES / 2, from + params.columns, bytes);
        cp_async_commit();
    }
    __device__ __forceinline__ void load_a(int row) {
        cp_async_wait<1>();
        a_row = Row8<element>(load_shared_16(slot(row)));
    }
    __device__ __forceinline__ void begin(int64 of_row0, int count, int n0) {
        const int lane = threadIdx.x & 31;
        rows = count, done = 0;
        row0 = static_cast<unsigned>(of_row0), column = n0 + lane * 8;
        weights = to_float(params.weights[row0 + min(lane & 15, rows - 1)]);  // without rows, of the expert's last
        fetch(0);
        fetch(1);
    }

    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31;
        if (done == 0) load_a(0);
        const float w = __shfl_sync(0xffffffffu, weights, done);
        float g[8], a[8], b[8], p[8], dot[2] = {};
        a_row.unpack(a);
        if (GATED) Row8<element>(load_shared_16(slot(done) + SLOT_BYTES / 2)).unpack(b);
        finished.get(done, lane).unpack(g);
        fetch(done + 2);
        if (STORED_Y_SWI) {
            Row8<element> row;
            row.load<true>(place<1>(params.y_swi, done), inside());
            row.unpack(p);
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const Activated s = activate<ACTIVATION>(a[c]);
            if (!STORED_Y_SWI) p[c] = GATED ? s.value * b[c] : s.value;
            dot[c & 1] = fmaf(g[c], p[c], dot[c & 1]);
            p[c] *= w;
            const float wg = w * g[c];
            a[c] = (GATED ? wg * b[c] : wg) * s.derivative;
            b[c] = wg * s.value;
        }
        const uint4 grad_a = pack8(element(), a), grad_b = pack8(element(), b), weighted = pack8(element(), p);
        element* grad = place<1 + GATED>(params.first_layer_grad, done);
        if (inside() && params.first_layer_grad) store_global_vector(grad, grad_a);
        if (GATED && inside() && params.first_layer_grad) store_global_vector(grad + params.columns, grad_b);
        if (inside() && params.result) store_global_vector(place<1>(params.result, done), weighted);
        __syncwarp();  // the row has been read by all lanes
        store_shared_4(finished.base + done * (BN * 2) + lane * 4, dot[0] + dot[1]);
        load_a(++done);
    }

    // The sums: two lanes per row, 16 of its 32 parts each.
    __device__ __forceinline__ void end() const {
        const int row = threadIdx.x & 15, half = (threadIdx.x & 31) / 16;
        cp_async_wait<0>();  // the next tile's first rows go where the zeros past this one's last go
        __syncwarp();
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // rows start at different quarters, for the sake of the banks
            const uint4 v = load_shared_16(finished.base + row * (BN * 2) + half * 64 + (i + row) % 4 * 16);
            sum += __uint_as_float(v.x) + __uint_as_float(v.y) + __uint_as_float(v.z) + __uint_as_float(v.w);
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 16);
        if (half == 0 && row < rows && params.partial_sums)
            params.partial_sums[static_cast<int64>(column / BN) * params.num_slots + row0 + row] = sum;
    }
};
