// Weights as four or eight bits with scales, in the layouts of decode.cu: the inverse of it, to the nearest codes.
// moeblaze_cupy.QuantizedWeight describes the formats. The weights may have any strides, as this runs once.
//
// Launch: grid (blocks of an expert, E), THREADS threads. MXFP4 and NF4: a thread has the elements of a scale. INT8: a warp has a
// row. E4M3: a block of threads has the elements of a scale. Where these are not all finite, the scale is NaN; of E4M3 an
// infinity makes it infinite, and a NaN has the code of NaN.
#include "fp8.cuh"
#include "nf4.cuh"

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");

struct EncodeParams {
    const bf16* weight;   // (E, N, K) bf16 of these strides, in
    unsigned char* data;  // (E, N, K) codes of 4 or 8 bits, out
    void* scales;         // (E, scales_of_expert) bytes of MXFP4, else fp32, out
    int64 expert_stride, row_stride, element_stride;
    int64 scales_of_expert;
    int N, K;
    int block_rows, block_columns;  // of E4M3
};

struct Weight {
    const bf16* first;
    int64 row_stride, element_stride;
    __device__ __forceinline__ explicit Weight(const EncodeParams& p)
        : first(p.weight + blockIdx.y * p.expert_stride), row_stride(p.row_stride), element_stride(p.element_stride) {}
    __device__ __forceinline__ float at(int64 n, int64 k) const { return to_float(first[n * row_stride + k * element_stride]); }
};

// -ftz=true makes zeros of denormals in some places.
__device__ __forceinline__ float without_denormals(float scale) { return scale < MIN_NORMAL ? 0.f : scale; }

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= LARGEST; }

// The largest magnitude, NaN if any of them is not finite.
template <int N>
__device__ __forceinline__ float finite_amax(const float (&v)[N]) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < N; ++i) finite &= is_finite(v[i]);
    return finite ? amax_of(v) : __uint_as_float(0x7fffffffu);
}

// The code of e2m1 nearest to v, of two the even one: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
__device__ __forceinline__ unsigned to_e2m1(float v) {
    const float m = fabsf(v);
    const unsigned code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f);
    return code | __float_as_uint(v) >> 31 << 3;
}

// The number of an nf4 entry nearest to v, of two the lower one.
__device__ __forceinline__ unsigned to_nf4(float v) {
    unsigned code = 0;
#pragma unroll
    for (int i = 0; i < 15; ++i) code += v > (NF4_TABLE[i] + NF4_TABLE[i + 1]) / 2;
    return code;
}

struct Mxfp4 {
    __device__ void encode(const EncodeParams& p) {
        const int blocks_of_row = p.K / 32;
        const int64 i = blockIdx.x * int64(THREADS) + threadIdx.x;
        if (i >= int64(p.N) * blocks_of_row) return;
        // Neighbours have neighbouring elements.
        const bool along_rows = p.element_stride == 1;
        const int64 n = along_rows ? i / blocks_of_row : i % p.N, block = along_rows ? i % blocks_of_row : i / p.N;
        const Weight weight(p);
        float v[32];
#pragma unroll
        for (int j = 0; j < 32; ++j) v[j] = weight.at(n, block * 32 + j);
        const float amax = finite_amax(v);
        // The exponent of the largest magnitude less 2, of denormals the least.
        const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 2;
        const int scale = amax == amax ? max(exponent, 0) : 255;
        const float factor = __uint_as_float((254 - min(scale, 252)) << 23);  // 2^(127 - scale)
        unsigned words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            words[w] = 0;
#pragma unroll
            for (int j = 0; j < 8; ++j) words[w] |= to_e2m1(product_rn(v[w * 8 + j], factor)) << 4 * j;
        }
        const int64 number = blockIdx.y * p.scales_of_expert + n * blocks_of_row + block;
        store_global_16(p.data + number * 16, make_uint4(words[0], words[1], words[2], words[3]));
        static_cast<unsigned char*>(p.scales)[number] = static_cast<unsigned char>(scale);
    }
};

struct Nf4 {
    __device__ void encode(const EncodeParams& p) {
        const int64 block = blockIdx.x * int64(THREADS) + threadIdx.x;
        if (block >= p.scales_of_expert) return;
        const Weight weight(p);
        float v[64];
#pragma unroll
        for (int j = 0; j < 64; j += 8) {  // K is a multiple of 8
            const int64 n = (block * 64 + j) / p.K, k = (block * 64 + j) % p.K;
#pragma unroll
            for (int c = 0; c < 8; ++c) v[j + c] = weight.at(n, k + c);
        }
        const float absmax = without_denormals(finite_amax(v)), factor = absmax > 0 ? quotient_rn(1.f, absmax) : 0.f;
        const int64 number = blockIdx.y * p.scales_of_expert + block;
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[i] = 0;
#pragma unroll
                for (int j = 0; j < 8; ++j)  // the high nibble first
                    words[i] |= to_nf4(product_rn(v[w * 32 + i * 8 + j], factor)) << (j / 2 * 8 + (j % 2 ? 0 : 4));
            }
            store_global_16(p.data + number * 32 + w * 16, make_uint4(words[0], words[1], words[2], words[3]));
        }
        static_cast<float*>(p.scales)[number] = absmax;
    }
};

struct Int8 {
    __device__ void encode(const EncodeParams& p) {
        const int64 n = blockIdx.x * int64(THREADS / 32) + threadIdx.x / 32;
        if (n >= p.N) return;
        const Weight weight(p);
        float amax[1] = {0.f}, all = 0.f;
        for (int k = threadIdx.x % 32; k < p.K; k += 32) {
            const float v[1] = {weight.at(n, k)};
            amax[0] = fmaxf(amax[0], amax_of(v));
            all = is_finite(v[0]) ? all : __uint_as_float(0x7fffffffu);
        }
        all = warp_sum(all);  // NaN, if any element is not finite
        const float scale = all == 0 ? without_denormals(quotient_rn(largest<32>(amax), 127.f)) : all;
        for (int k = threadIdx.x % 32; k < p.K; k += 32) {
            const float code = scale > 0 ? quotient_rn(weight.at(n, k), scale) : 0.f;
            const int64 place = (blockIdx.y * int64(p.N) + n) * p.K + k;
            p.data[place] = static_cast<unsigned char>(static_cast<int>(rintf(fminf(fmaxf(code, -127.f), 127.f))));
        }
        if (threadIdx.x % 32 == 0) static_cast<float*>(p.scales)[blockIdx.y * int64(p.N) + n] = scale;
    }
};

struct E4m3 {
    __device__ void encode(const EncodeParams& p) {
        __shared__ float amax_of_warp[THREADS / 32];
        const int columns_of_blocks = (p.K + p.block_columns - 1) / p.block_columns;
        const int64 first_row = int64(blockIdx.x / columns_of_blocks) * p.block_rows;
        const int64 first_column = int64(blockIdx.x % columns_of_blocks) * p.block_columns;
        const int rows = static_cast<int>(min(int64(p.block_rows), p.N - first_row));
        const int columns = static_cast<int>(min(int64(p.block_columns), p.K - first_column));
        const bool along_rows = p.element_stride == 1;
        const Weight weight(p);
        auto for_each = [&](auto use) {
            for (int i = threadIdx.x; i < rows * columns; i += THREADS)
                use(first_row + (along_rows ? i / columns : i % rows), first_column + (along_rows ? i % columns : i / rows));
        };
        float amax[1] = {0.f};
        for_each([&](int64 n, int64 k) { amax[0] = fmaxf(amax[0], fabsf(weight.at(n, k))); });
        const float of_warp = largest<32>(amax);
        if (threadIdx.x % 32 == 0) amax_of_warp[threadIdx.x / 32] = of_warp;
        __syncthreads();
        float of_block = 0.f;
        for (int i = 0; i < THREADS / 32; ++i) of_block = fmaxf(of_block, amax_of_warp[i]);
        const Scaling scaling = scaling_of(of_block);
        for_each([&](int64 n, int64 k) {
            const unsigned code = cvt_e4m3x2(product_rn(weight.at(n, k), scaling.factor), 0.f);
            p.data[(blockIdx.y * int64(p.N) + n) * p.K + k] = static_cast<unsigned char>(code);
        });
        if (threadIdx.x == 0) static_cast<float*>(p.scales)[blockIdx.y * p.scales_of_expert + blockIdx.x] = scaling.scale;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) encode(const EncodeParams p) { FORMAT().encode(p); }
