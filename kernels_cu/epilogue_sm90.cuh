// Epilogues of grouped_gemm_sm90.cu: what a warp makes of its 16 rows of a finished tile. begin() takes a tile over, next()
// works on one row, or on two where half a warp spans a row; see EpilogueBase.
#pragma once
#include "activation.cuh"
#include "gemm_core_sm90.cuh"
#include "row_staging.cuh"

// What the epilogues read and write; arguments of grouped_gemm_sm90.cu.
struct Operands {
    int64 N;
    element *first_layer, *first_layer_grad, *product;
    const element* stored_product;
    const float* row_weights;
    float* partial_sums;
    int64 num_slots;
};

// first_layer = a (and b), product = act(a) * b. A gated tile is 128 columns of gate beside 128 of up, and half a warp
// spans one of its rows.
struct ActivateRows : EpilogueBase {
    static constexpr bool SPLIT = GATED;
    static constexpr int TILE_COLUMNS = SPLIT ? 128 : 256, LANES = TILE_COLUMNS / 8, ROWS = 32 / LANES;
    const Operands& operands;
    element *layer, *out;
    bool inside;

    __device__ __forceinline__ explicit ActivateRows(const Operands& operands) : operands(operands) {}
    __device__ __forceinline__ int64 layer_ld() const { return GATED ? 2 * operands.N : operands.N; }
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31, column = n0 + lane % LANES * 8;
        rows = count, done = 0, inside = column < operands.N;
        const int64 r = row0 + lane / LANES;
        layer = operands.first_layer + r * layer_ld() + column;
        out = operands.product + r * operands.N + column;
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
        if (valid && operands.first_layer) gate.store(layer);
        if (SPLIT && valid && operands.first_layer) up.store(layer + operands.N);
        if (valid && operands.product) store_global_16(out, packed);
        layer += ROWS * layer_ld();
        out += ROWS * operands.N;
        done += ROWS;
    }
};

// With the accumulators as grad = dA and w the row's weight: first_layer_grad = w * grad * (act(a) * b)', product =
// w * act(a) * b, partial_sums = <grad, act(a) * b> of the tile's columns. a and b come two rows ahead, by cp.async into
// the lane's own 16 bytes of two slots of 1 KiB per warp.
struct ActivateBwdRows : EpilogueBase {
    static constexpr int TILE_COLUMNS = 256, SLOT_BYTES = 1024;
    const Operands& operands;
    const unsigned slots;
    const element *fetched, *stored;
    element *grad, *out;
    float* sums;
    bool inside;
    float weight, dot_before;

    __device__ __forceinline__ explicit ActivateBwdRows(const Operands& operands)
        : operands(operands),
          slots(shared_address(dynamic_shared) + STAGES * STAGE_BYTES + TILE_BYTES + consumer_warp() * 2 * SLOT_BYTES +
                (threadIdx.x & 31) * 16) {}
    __device__ __forceinline__ int64 layer_ld() const { return GATED ? 2 * operands.N : operands.N; }

    __device__ __forceinline__ void fetch(int row) {
        const unsigned slot = slots + (row & 1) * SLOT_BYTES, bytes = inside && row < rows ? 16 : 0;
        cp_async_16(slot, fetched, bytes);
        if (GATED) cp_async_16(slot + SLOT_BYTES / 2, fetched + operands.N, bytes);
        cp_async_commit();
        fetched += layer_ld();
    }
    __device__ __forceinline__ void begin(int64 row0, int count, int n0) {
        const int lane = threadIdx.x & 31, column = n0 + lane * 8;
        rows = count, done = 0, inside = column < operands.N;
        fetched = operands.first_layer + row0 * layer_ld() + column;
        grad = operands.first_layer_grad + row0 * layer_ld() + column;
        out = operands.product + row0 * operands.N + column;
        stored = operands.stored_product + row0 * operands.N + column;
        sums = operands.partial_sums + n0 / TILE_COLUMNS * operands.num_slots + row0;
        weight = operands.row_weights[row0 + min(lane & 15, rows - 1)];
        fetch(0);
        fetch(1);
    }

    __device__ __forceinline__ void next() {
        const int lane = threadIdx.x & 31;
        const float w = __shfl_sync(0xffffffffu, weight, done);
        cp_async_wait<1>();
        const unsigned slot = slots + (done & 1) * SLOT_BYTES;
        float g[8], a[8], b[8], p[8];
        finished.get(done, lane).unpack(g);
        Row8<element>(load_shared_16(slot)).unpack(a);
        if (GATED) Row8<element>(load_shared_16(slot + SLOT_BYTES / 2)).unpack(b);
        if (STORED_PRODUCT) {
            Row8<element> row;
            row.load<true>(stored, inside);
            row.unpack(p);
        }
        float dot[2] = {};
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            const Activated s = activate<ACTIVATION>(a[c]);
            if (!STORED_PRODUCT) p[c] = GATED ? s.value * b[c] : s.value;
            dot[c & 1] = fmaf(g[c], p[c], dot[c & 1]);
            p[c] *= w;
            const float wg = w * g[c];
            a[c] = (GATED ? wg * b[c] : wg) * s.derivative;
            b[c] = wg * s.value;
        }
        const uint4 grad_a = pack8(element(), a), grad_b = pack8(element(), b), weighted = pack8(element(), p);
        if (inside && operands.first_layer_grad) store_global_16(grad, grad_a);
        if (GATED && inside && operands.first_layer_grad) store_global_16(grad + operands.N, grad_b);
        if (inside && operands.product) store_global_16(out, weighted);
        reduce(dot[0] + dot[1]);
        grad += layer_ld(), out += operands.N, stored += operands.N;
        fetch(done + 2);
        ++done;
    }

    // Two rows at a time: lanes 0-15 sum up the first, 16-31 the second.
    __device__ __forceinline__ void reduce(float dot) {
        const bool odd = done & 1, upper = threadIdx.x & 16;
        if (operands.partial_sums && (odd || done == rows - 1)) {
            const float first = odd ? dot_before : dot;
            float sum = (upper ? dot : first) + __shfl_xor_sync(0xffffffffu, upper ? first : dot, 16);
#pragma unroll
            for (int step = 8; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
            if (threadIdx.x % 16 == 0 && (odd || !upper)) sums[(done & ~1) + upper] = sum;
        }
        dot_before = dot;
    }
};
