// Frozen weights in four or eight bits, decoded to bf16. moeblaze_cupy.QuantizedWeight describes the formats. An element is
// code * scale in fp32, rounded once, in the order of the packed elements. The result of the format MXFP4 is exact.
//
// Launch: grid (chunks of an expert, E), THREADS threads. A block decodes STEPS * 8 * THREADS elements of an expert, and does
// nothing if the expert has no tokens. A warp's part of that is contiguous. In each step a lane has the next eight elements, so
// that both loads and stores of a warp are of contiguous memory. All loads are issued before the first store.
#include "fp8.cuh"
#include "nf4.cuh"

static_assert(THREADS % 32 == 0 && THREADS <= 1024, "whole warps");

struct DecodeParams {
    const unsigned char* data;          // (E, size) codes of 4 or 8 bits, in
    const void* scales;                 // (E, scales_of_expert) SCALE, in
    const float* nested_code;           // (256,) fp32, in: of nested scales, as the next two
    const float* nested_absmax;         // (E, scales_of_expert / 256) fp32, in
    const float* nested_offset;         // (1,) fp32, in
    const int* expert_token_offsets;    // (E+1,) int32, in: experts without tokens are left out; null: none is
    bf16* out;                          // (E, size) bf16, out
    int64 size;                         // elements of an expert, N * K, less than 2^31 and a multiple of 8
    int64 scales_of_expert;             // a multiple of 256 where they are nested
    int K;                              // elements of a row
    int K_factor, K_shift;              // for quotients by K
    int rows_factor, rows_shift;        // and by the rows
    int columns_factor, columns_shift;  // and the columns of a block of E4m3
    int columns_of_blocks;              // blocks side by side, ceil(K / columns)
};

// i / divisor for 0 <= i < 2^31: factor is ceil(2^shift / divisor), less than 2^32, and shift 31 + ceil(log2(divisor)).
__device__ __forceinline__ unsigned quotient(unsigned i, int factor, int shift) {
    return static_cast<unsigned>(static_cast<unsigned long long>(i) * static_cast<unsigned>(factor) >> shift);
}

// 2^(s - 127) has the exponent s, but for 0, which is a denormal, and 255, which is NaN: both have the mantissa's first bit.
__device__ __forceinline__ bool is_special_e8m0(unsigned s) { return (s + 1 & 255u) < 2; }

// Scales: load takes what is in memory, value gives fp32.
struct E8m0 {
    unsigned byte;
    __device__ __forceinline__ void load(const DecodeParams& p, int64 i) {
        byte = static_cast<const unsigned char*>(p.scales)[i];
    }
    __device__ __forceinline__ float value(const DecodeParams&) const {
        return __uint_as_float(byte << 23 | (is_special_e8m0(byte) ? 0x00400000u : 0u));
    }
};
struct Single {
    float scale;
    __device__ __forceinline__ void load(const DecodeParams& p, int64 i) { scale = static_cast<const float*>(p.scales)[i]; }
    __device__ __forceinline__ float value(const DecodeParams&) const { return scale; }
};
struct Nested {
    unsigned byte;
    float absmax;
    __device__ __forceinline__ void load(const DecodeParams& p, int64 i) {
        byte = static_cast<const unsigned char*>(p.scales)[i];
        absmax = p.nested_absmax[i / 256];
    }
    __device__ __forceinline__ float value(const DecodeParams& p) const {
        return sum_rn(product_rn(__ldg(p.nested_code + byte), absmax), __ldg(p.nested_offset));
    }
};

// Formats: scale_of gives the number of the scale of an expert's element first + step, for a step that is a multiple of 256;
// decode gives eight elements.
struct Mxfp4 {
    static constexpr int BITS = 4;
    using Packed = unsigned;
    __device__ static int64 scale_of(const DecodeParams&, unsigned first, int step) { return int64(first / 32) + step / 32; }
    __device__ __forceinline__ void prepare() {}
    // Bytes of bf16 are looked up by the nibbles' magnitudes. The product by a power of two is exact, also where it is a
    // denormal.
    __device__ __forceinline__ uint4 decode(unsigned packed, const E8m0& scale, const DecodeParams&) const {
        const unsigned factor = scale.byte * 0x00800080u | (is_special_e8m0(scale.byte) ? 0x00400040u : 0u);
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned nibbles = packed >> 16 * i, magnitudes = nibbles & 0x7777u;
            const unsigned low = permute_bytes(0xC0800000u, 0xC0804000u, magnitudes);
            const unsigned high = permute_bytes(0x3F3F3F00u, 0x40404040u, magnitudes);
            const unsigned signs = permute_bytes(0x80808080u, 0x80808080u, nibbles) << 1 & 0x80808080u;
            words[2 * i] = product_bf16x2(permute_bytes(low, high | signs, 0x5140u), factor);
            words[2 * i + 1] = product_bf16x2(permute_bytes(low, high | signs, 0x7362u), factor);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

__device__ __forceinline__ uint4 scaled(const float (&codes)[8], float scale) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = product_rn(codes[i], scale);
    return pack8(bf16(), v);
}

struct Nf4 {
    static constexpr int BITS = 4;
    using Packed = unsigned;
    const float* table;  // of this lane's bank of shared memory
    __device__ static int64 scale_of(const DecodeParams&, unsigned first, int step) { return int64(first / 64) + step / 64; }
    __device__ __forceinline__ void prepare() {
        __shared__ float of_banks[16 * 32];
        for (int i = threadIdx.x; i < 16 * 32; i += THREADS) of_banks[i] = NF4_TABLE[i / 32];
        __syncthreads();
        table = of_banks + threadIdx.x % 32;
    }
    template <class Scale>
    __device__ __forceinline__ uint4 decode(unsigned packed, const Scale& scale, const DecodeParams& p) const {
        float codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) codes[i] = table[(packed >> (i / 2 * 8 + (i % 2 ? 0 : 4)) & 15u) * 32];  // high nibble first
        return scaled(codes, scale.value(p));
    }
};
struct E4m3 {
    static constexpr int BITS = 8;
    using Packed = uint2;
    __device__ static int64 scale_of(const DecodeParams& p, unsigned first, int step) {
        const unsigned row = quotient(first + step, p.K_factor, p.K_shift), column = first + step - row * p.K;
        return quotient(row, p.rows_factor, p.rows_shift) * int64(p.columns_of_blocks) +
               quotient(column, p.columns_factor, p.columns_shift);
    }
    __device__ __forceinline__ void prepare() {}
    template <class Scale>
    __device__ __forceinline__ uint4 decode(uint2 packed, const Scale& scale, const DecodeParams& p) const {
        float codes[8];
        unpack_e4m3(codes, packed.x, packed.y);
        return scaled(codes, scale.value(p));
    }
};
struct Int8 {
    static constexpr int BITS = 8;
    using Packed = uint2;
    __device__ static int64 scale_of(const DecodeParams& p, unsigned first, int step) {
        return quotient(first + step, p.K_factor, p.K_shift);
    }
    __device__ __forceinline__ void prepare() {}
    template <class Scale>
    __device__ __forceinline__ uint4 decode(uint2 packed, const Scale& scale, const DecodeParams& p) const {
        float codes[8];
#pragma unroll
        for (int i = 0; i < 8; ++i)
            codes[i] = static_cast<float>(static_cast<signed char>((i < 4 ? packed.x : packed.y) >> i % 4 * 8));
        return scaled(codes, scale.value(p));
    }
};

__device__ __forceinline__ void load_once(unsigned& v, const void* p) { v = load_once_4(p); }
__device__ __forceinline__ void load_once(uint2& v, const void* p) { v = load_once_8(p); }

// first: this lane's first element in the expert. WHOLE: all elements of the block exist.
template <bool WHOLE>
__device__ __forceinline__ void decode_chunk(const DecodeParams& p, const FORMAT& format, int64 expert, unsigned first) {
    const unsigned char* from = p.data + (expert * p.size + first) * FORMAT::BITS / 8;
    bf16* to = p.out + (expert * p.size + first);
    FORMAT::Packed packed[STEPS];
    SCALE scales[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (WHOLE || first + i * 256 < p.size) {
            load_once(packed[i], from + i * (256 * FORMAT::BITS / 8));
            scales[i].load(p, expert * p.scales_of_expert + FORMAT::scale_of(p, first, i * 256));
        }
    issue_loads_now();
#pragma unroll
    for (int i = 0; i < STEPS; ++i)
        if (WHOLE || first + i * 256 < p.size) store_global_16(to + i * 256, format.decode(packed[i], scales[i], p));
}

extern "C" __global__ void __launch_bounds__(THREADS) decode(const DecodeParams p) {
    const int expert = blockIdx.y;
    if (p.expert_token_offsets && p.expert_token_offsets[expert] == p.expert_token_offsets[expert + 1]) return;
    FORMAT format;
    format.prepare();
    constexpr unsigned CHUNK = THREADS * STEPS * 8;
    const unsigned block_first = blockIdx.x * CHUNK;
    const unsigned first = block_first + threadIdx.x / 32 * (STEPS * 256) + threadIdx.x % 32 * 8;
    if (block_first + CHUNK <= p.size)
        decode_chunk<true>(p, format, expert, first);
    else
        decode_chunk<false>(p, format, expert, first);
}
