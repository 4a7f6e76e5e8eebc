// Rows and weights as e4m3 with fp32 scales (fp8.cuh), for products that multiply e4m3.
//
// quantize_rows: a scale for each row. A row has threads_per_row threads. A block has THREADS threads, or threads_per_row if
// these are more. A thread keeps up to ROW_VECTORS * 8 elements of its row in registers. The rest of a longer
// row is read twice.
//
// dequantize_rows: the inverse, by the same geometry, of rows whose e4m3 came from other GPUs. Products that multiply e4m3 read
// them as they are. Weight gradients multiply bf16.
//
// weights_amax, then quantize_weights: a scale for each expert and half of its weight, and e4m3 in both orientations. Blocks have
// THREADS threads, one block for each tile of TILE x TILE elements. Grid: (tiles of a half, E * halves). weights_amax finds the
// largest magnitudes with integer atomics, whose result has the same bits in any order. Their memory holds zeros at launch.
#include "byte_tile.cuh"
#include "fp8.cuh"

template <bool ALIGNED>
__device__ __forceinline__ void store_e4m3(unsigned char* to, uint2 v, int64 valid) {
    if (ALIGNED) {
        if (valid > 0) *reinterpret_cast<uint2*>(to) = v;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < valid) to[i] = static_cast<unsigned char>((i < 4 ? v.x : v.y) >> i % 4 * 8);
    }
}

template <class T>
struct QuantizeRowsParams {
    const T* rows;       // (L, d) T, in
    unsigned char* out;  // (L, d) e4m3, out
    float* scales;       // (L,) fp32, out
    int64 L;
    int64 out_ld;  // bytes from row to row of out
    int d;
    int gap;               // bytes in out between each 128 columns and the next
    int threads_per_row;   // a power of two, of at least 32
    float scale_of_zeros;  // the scale of a row of zeros
};

template <bool ALIGNED, class T>
__device__ void quantize_rows(const QuantizeRowsParams<T>& p) {
    __shared__ float amax_of_warp[32];
    const unsigned threads = p.threads_per_row, lane = threadIdx.x & (threads - 1);
    const int64 row = blockIdx.x * int64(blockDim.x / threads) + threadIdx.x / threads;
    const int64 d = row < p.L ? p.d : 0, held_columns = int64(ROW_VECTORS) * threads * 8;
    const T* from = p.rows + row * p.d;
    Row8<T> held[ROW_VECTORS];
    float amax[1] = {0.f};
    auto look_at = [&](const Row8<T>& vector) {
        float v[8];
        vector.unpack(v);
        amax[0] = fmaxf(amax[0], amax_of(v));
    };
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) {
        const int64 column = (i * threads + lane) * 8;
        held[i].template load<ALIGNED>(from + column, d - column);
    }
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) look_at(held[i]);
    for (int64 column = held_columns + lane * 8; column < d; column += threads * 8) {
        Row8<T> vector;
        vector.template load<ALIGNED>(from + column, d - column);
        look_at(vector);
    }
    float row_amax = largest<32>(amax);
    if (threads > 32) {
        if (threadIdx.x % 32 == 0) amax_of_warp[threadIdx.x / 32] = row_amax;
        __syncthreads();
        const unsigned first = threadIdx.x / threads * (threads / 32);
        for (unsigned i = 0; i < threads / 32; ++i) row_amax = fmaxf(row_amax, amax_of_warp[first + i]);
    }
    const Scaling scaling = scaling_of(row_amax);
    auto put = [&](const Row8<T>& vector, int64 column) {
        float v[8];
        vector.unpack(v);
        const int64 place = row * p.out_ld + column + column / 128 * p.gap;
        store_e4m3<ALIGNED>(p.out + place, pack_e4m3(v, scaling.factor, scaling.factor), d - column);
    };
#pragma unroll
    for (int i = 0; i < ROW_VECTORS; ++i) put(held[i], (i * threads + lane) * 8);
    for (int64 column = held_columns + lane * 8; column < d; column += threads * 8) {
        Row8<T> vector;
        vector.template load<ALIGNED>(from + column, d - column);
        put(vector, column);
    }
    if (lane == 0 && row < p.L) p.scales[row] = row_amax >= MIN_NORMAL ? scaling.scale : p.scale_of_zeros;
}

template <class T>
struct DequantizeRowsParams {
    const unsigned char* rows;  // (L, d) e4m3, in: d is a multiple of 8, and rows begin at multiples of 8 bytes
    const float* scales;        // (L,) fp32, in
    T* out;                     // (L, d) T, out: each number times its row's scale, rounded
    int64 L;
    int d;
    int threads_per_row;  // a power of two, of at least 32
};

template <class T>
__device__ void dequantize_rows(const DequantizeRowsParams<T>& p) {
    const unsigned threads = p.threads_per_row, lane = threadIdx.x & (threads - 1);
    const int64 row = blockIdx.x * int64(blockDim.x / threads) + threadIdx.x / threads;
    if (row >= p.L) return;
    const unsigned char* from = p.rows + row * p.d;
    T* to = p.out + row * p.d;
    const float scale = p.scales[row];
    for (int first = lane * 8; first < p.d; first += ROW_VECTORS * threads * 8) {
        uint2 held[ROW_VECTORS];  // all are loaded before the first is used
#pragma unroll
        for (int i = 0; i < ROW_VECTORS; ++i) {
            const int column = first + i * threads * 8;
            if (column < p.d) held[i] = *reinterpret_cast<const uint2*>(from + column);
        }
#pragma unroll
        for (int i = 0; i < ROW_VECTORS; ++i) {
            const int column = first + i * threads * 8;
            if (column >= p.d) continue;
            float v[8];
            unpack_e4m3(v, held[i].x, held[i].y);
#pragma unroll
            for (int c = 0; c < 8; ++c) v[c] *= scale;
            store_vector8(to + column, v);
        }
    }
}

// A half of an expert's weight is a matrix of `outer` lines of `inner` elements that follow each other.
template <class T>
struct QuantizeWeightsParams {
    const T *first, *second;    // the halves, T, in: line o of expert e at e * expert_stride + o * ld
    unsigned* amax;             // (E, amax_ld) bits of fp32: in and out, zero at first, in weights_amax; in, in quantize_weights
    unsigned char* same;        // (E, size) e4m3, out: element (o, i) of half s at s * same_half + o * same_ld + i
    unsigned char* transposed;  // (E, size) e4m3, out: at s * transposed_half + i * transposed_ld + o
    float* scales;  // (E, scales_ld) fp32, out: a scale for each half; the same one scales_ld times if there is one half
    int64 expert_stride, ld, size, same_half, transposed_half;
    int outer, inner, halves, amax_ld, scales_ld, same_ld, transposed_ld;
};

struct WeightTile {
    int expert, half, outer, inner;  // outer, inner: the tile's first line and first element

    template <class T>
    __device__ __forceinline__ explicit WeightTile(const QuantizeWeightsParams<T>& p)
        : expert(blockIdx.y / p.halves), half(blockIdx.y % p.halves), outer(blockIdx.x / ((p.inner + TILE - 1) / TILE) * TILE),
          inner(blockIdx.x % ((p.inner + TILE - 1) / TILE) * TILE) {}

    template <bool ALIGNED, class T>
    __device__ __forceinline__ void load(Row8<T> (&v)[BLOCKS][BLOCK_LINES], const QuantizeWeightsParams<T>& p) const {
        const T* from = (half ? p.second : p.first) + expert * p.expert_stride + inner + block_column();
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
            for (int j = 0; j < BLOCK_LINES; ++j) {
                const int o = outer + block_line(i) + j;
                v[i][j].template load<ALIGNED>(from + o * p.ld, o < p.outer ? p.inner - inner - block_column() : 0);
            }
    }
};

template <bool ALIGNED, class T>
__device__ void weights_amax(const QuantizeWeightsParams<T>& p) {
    __shared__ float amax_of_warp[THREADS / 32];
    const WeightTile tile(p);
    Row8<T> held[BLOCKS][BLOCK_LINES];
    let_next_launch_start();
    tile.template load<ALIGNED>(held, p);
    float amax[1] = {0.f};
#pragma unroll
    for (int i = 0; i < BLOCKS * BLOCK_LINES; ++i) {
        float v[8];
        held[i / BLOCK_LINES][i % BLOCK_LINES].unpack(v);
        amax[0] = fmaxf(amax[0], amax_of(v));
    }
    const float of_warp = largest<32>(amax);
    if (threadIdx.x % 32 == 0) amax_of_warp[threadIdx.x / 32] = of_warp;
    __syncthreads();
    wait_for_last_launch();
    if (threadIdx.x >= THREADS / 32) return;
    atomicMax(p.amax + tile.expert * p.amax_ld + tile.half, __float_as_uint(amax_of_warp[threadIdx.x]));
}

template <bool ALIGNED, class T>
__device__ void quantize_weights(const QuantizeWeightsParams<T>& p) {
    __shared__ __align__(16) unsigned words[TILE * TILE / 4];
    const WeightTile tile(p);
    Row8<T> held[BLOCKS][BLOCK_LINES];
    let_next_launch_start();
    tile.template load<ALIGNED>(held, p);
    wait_for_last_launch();
    const Scaling scaling = scaling_of(__uint_as_float(p.amax[tile.expert * p.amax_ld + tile.half]));
    if (blockIdx.x == 0 && threadIdx.x < p.scales_ld / p.halves)
        p.scales[tile.expert * p.scales_ld + tile.half + threadIdx.x] = scaling.scale;
    unsigned char* same = p.same + tile.expert * p.size + tile.half * p.same_half + tile.inner + block_column();
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        unsigned low[BLOCK_LINES], high[BLOCK_LINES];
#pragma unroll
        for (int j = 0; j < BLOCK_LINES; ++j) {
            float v[8];
            held[i][j].unpack(v);
            const uint2 packed = pack_e4m3(v, scaling.factor, scaling.factor);
            const int o = tile.outer + block_line(i) + j;
            store_e4m3<ALIGNED>(same + int64(o) * p.same_ld, packed, o < p.outer ? p.inner - tile.inner - block_column() : 0);
            low[j] = packed.x, high[j] = packed.y;
        }
        put_transposed(words, i, low, high);
    }
    __syncthreads();
    unsigned char* transposed = p.transposed + tile.expert * p.size + tile.half * p.transposed_half + tile.outer;
#pragma unroll
    for (int i = 0; i < TILE * TILE / 8 / THREADS; ++i) {
        const int column = (i * THREADS + threadIdx.x) / 16, line = threadIdx.x % 16 * 8;
        const uint2 v = *reinterpret_cast<const uint2*>(words + byte_tile_word(column, line / 4));
        store_e4m3<ALIGNED>(transposed + int64(tile.inner + column) * p.transposed_ld + line, v,
                            tile.inner + column < p.inner ? p.outer - tile.outer - line : 0);
    }
}

#define QUANTIZE_ENTRIES(SUFFIX, T, ALIGNED)                                                                            \
    extern "C" __global__ void __launch_bounds__(1024) quantize_rows_##SUFFIX(const QuantizeRowsParams<T> p) {          \
        quantize_rows<ALIGNED>(p);                                                                                      \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) weights_amax_##SUFFIX(const QuantizeWeightsParams<T> p) {     \
        weights_amax<ALIGNED>(p);                                                                                       \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_weights_##SUFFIX(const QuantizeWeightsParams<T> p) { \
        quantize_weights<ALIGNED>(p);                                                                                   \
    }
extern "C" __global__ void __launch_bounds__(1024) dequantize_rows_bfloat16(const DequantizeRowsParams<bf16> p) {
    dequantize_rows(p);
}
QUANTIZE_ENTRIES(bfloat16, bf16, true)
QUANTIZE_ENTRIES(float16, fp16, true)
QUANTIZE_ENTRIES(float32, float, true)
QUANTIZE_ENTRIES(bfloat16_unaligned, bf16, false)
QUANTIZE_ENTRIES(float16_unaligned, fp16, false)
QUANTIZE_ENTRIES(float32_unaligned, float, false)
