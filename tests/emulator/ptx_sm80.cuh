// The emulator's version of kernels_cu/common/ptx_sm80.cuh: the same functions in plain C++. Fragment layouts
// follow the PTX ISA. Shared addresses are byte offsets into dynamic_shared, or of static arrays those from STATIC on.
#pragma once

#pragma GCC visibility push(hidden)
namespace cuemu {
// The access lies inside one array argument; reads past an end would pass unseen otherwise.
bool check_global_at(const void* pc, const void* p, unsigned bytes, unsigned alignment, const char* what);

static __forceinline__ void check_global(const void* p, unsigned bytes, unsigned alignment, const char* what) {
    if (!check_global_at(here(), p, bytes, alignment, what)) leave();
}

constexpr unsigned STATIC = 1 << 20;

// `bytes` of the running block's shared memory.
unsigned char* shared_at(unsigned address, unsigned bytes, const char* what, const void* pc = here());

void start_copy(unsigned char* dst, const void* src, unsigned bytes, unsigned size = 16);  // until a wait
void land(Fibre& thread, size_t count);                                // its first copies
void wait_for_copies(unsigned left);                                   // until so many groups are under way at most

struct MatrixOperand { unsigned* r; const unsigned char* row; };
void load_matrices(void* const* operands, unsigned lanes);
void load_matrices_trans(void* const* operands, unsigned lanes);

struct MmaOperand { float* d; const unsigned* a; unsigned b[2]; };
void multiply_bf16(void* const* operands, unsigned lanes);
void multiply_tf32(void* const* operands, unsigned lanes);
void multiply_fp16(void* const* operands, unsigned lanes);
}  // namespace cuemu
#pragma GCC visibility pop

__device__ __forceinline__ unsigned shared_address(const void* p) {
    unsigned char* const byte = static_cast<unsigned char*>(const_cast<void*>(p));
    if (byte >= dynamic_shared && byte <= dynamic_shared + sizeof dynamic_shared)
        return static_cast<unsigned>(byte - dynamic_shared);
    if (byte < cuemu::shared_range.begin || byte >= cuemu::shared_range.end)
        CUEMU_FAIL("shared_address: %p is not in shared memory", p);
    return cuemu::STATIC + static_cast<unsigned>(byte - cuemu::shared_range.begin);
}

__device__ __forceinline__ int read_thread_index() { return threadIdx.x; }

// Launches follow each other.
__device__ __forceinline__ void let_next_launch_start() {}
__device__ __forceinline__ void wait_for_last_launch() {}

__device__ __forceinline__ void store_shared_4_4(unsigned address, unsigned first, unsigned second) {
    const unsigned words[2] = {first, second};
    memcpy(cuemu::shared_at(address, 8, "store_shared_4_4"), words, 8);
}

// The destination holds poison from issue to wait: reading it early shows, and so does overwriting a
// buffer that another warp still reads.
__device__ __forceinline__ void cp_async_16(unsigned dst_shared, const void* src, unsigned src_bytes) {
    if (src_bytes > 16) CUEMU_FAIL("cp_async_16: src_bytes is %u", src_bytes);
    unsigned char* const dst = cuemu::shared_at(dst_shared, 16, "cp_async_16");
    cuemu::check_global(src, src_bytes, 16, "cp_async_16");
    cuemu::start_copy(dst, src, src_bytes);
}

template <int BYTES>
__device__ __forceinline__ void cp_async_small(unsigned dst_shared, const void* src, unsigned src_bytes) {
    static_assert(BYTES == 4 || BYTES == 8);
    if (src_bytes > BYTES) CUEMU_FAIL("cp_async_small: src_bytes is %u of %d", src_bytes, BYTES);
    unsigned char* const dst = cuemu::shared_at(dst_shared, BYTES, "cp_async_small");
    cuemu::check_global(src, src_bytes, BYTES, "cp_async_small");
    cuemu::start_copy(dst, src, src_bytes, BYTES);
}

__device__ __forceinline__ void cp_async_commit() { ++cuemu::current->commits; }

template <int N>
__device__ __forceinline__ void cp_async_wait() {
    cuemu::wait_for_copies(N);
}

__device__ __forceinline__ unsigned load_shared_4(unsigned address) {
    unsigned v;
    memcpy(&v, cuemu::shared_at(address, 4, "load_shared_4"), 4);
    return v;
}

__device__ __forceinline__ uint2 load_shared_8(unsigned address) {
    uint2 v;
    memcpy(&v, cuemu::shared_at(address, 8, "load_shared_8"), 8);
    return v;
}

__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
    cuemu::MatrixOperand mine = {r, cuemu::shared_at(address, 16, "ldmatrix_x4")};
    cuemu::collective("ldmatrix_x4", ~0u, &mine, cuemu::load_matrices);
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
    cuemu::MatrixOperand mine = {r, cuemu::shared_at(address, 16, "ldmatrix_x4_trans")};
    cuemu::collective("ldmatrix_x4_trans", ~0u, &mine, cuemu::load_matrices_trans);
}

__device__ __forceinline__ float cvt_f32_from_bf16(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ __forceinline__ float cvt_f32_from_fp16(unsigned short bits) {
    const unsigned sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, mantissa = bits & 1023u;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint(mantissa * 0x1p-24f));
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

namespace cuemu {
static inline unsigned bf16_bits(float v) {
    const unsigned bits = __float_as_uint(v);
    if (v != v) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static inline unsigned fp16_bits(float v) {
    const unsigned bits = __float_as_uint(v) & 0x7fffffffu, sign = __float_as_uint(v) >> 16 & 0x8000u;
    if (v != v) return 0x7fff;
    if (bits >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
    // Below 2^-14 the addition of 0.5 rounds to multiples of 2^-24, the smallest fp16.
    if (bits < 0x38800000u) return sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000u);
    return sign | ((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

// By the nearest of all 127 magnitudes, of two the even one.
static inline unsigned e4m3_bits(float v) {
    if (v != v) return 0x7f;
    const auto magnitude = [](unsigned bits) {
        return bits < 8 ? double(bits) / 512 : (1 + (bits & 7) / 8.) * std::ldexp(1., int(bits >> 3) - 7);
    };
    const double wanted = v < 0 ? -double(v) : double(v);
    unsigned best = 0;
    for (unsigned bits = 1; bits < 0x7f; ++bits) {
        const double gained = std::abs(magnitude(best) - wanted) - std::abs(magnitude(bits) - wanted);
        if (gained > 0 || (gained == 0 && bits % 2 == 0)) best = bits;
    }
    if (wanted > 448) best = 0x7e;
    return best | (__float_as_uint(v) >> 24 & 0x80u);
}

}  // namespace cuemu

__device__ __forceinline__ unsigned short cvt_e4m3x2(float low, float high) {
    return static_cast<unsigned short>(cuemu::e4m3_bits(low) | cuemu::e4m3_bits(high) << 8);
}

__device__ __forceinline__ float2 cvt_f32x2_from_e4m3x2(unsigned short bits) {
    const auto value = [](unsigned byte) {
        const unsigned e = byte >> 3 & 15, m = byte & 7;
        const float v = (byte & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu)
                                              : e ? (8 + m) * std::ldexp(1.f, int(e) - 10) : m * 0x1p-9f;
        return byte & 0x80 ? -v : v;
    };
    return make_float2(value(bits & 0xff), value(bits >> 8));
}

__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cuemu::MmaOperand mine = {d, a, {b0, b1}};
    cuemu::collective("mma_bf16", ~0u, &mine, cuemu::multiply_bf16);
}

__device__ __forceinline__ void mma_fp16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cuemu::MmaOperand mine = {d, a, {b0, b1}};
    cuemu::collective("mma_fp16", ~0u, &mine, cuemu::multiply_fp16);
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    cuemu::MmaOperand mine = {d, a, {b0, b1}};
    cuemu::collective("mma_tf32", ~0u, &mine, cuemu::multiply_tf32);
}

__device__ __forceinline__ unsigned round_tf32(unsigned bits) {
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}

__device__ __forceinline__ unsigned cvt_bf16x2(float low, float high) {
    return cuemu::bf16_bits(low) | cuemu::bf16_bits(high) << 16;
}

__device__ __forceinline__ unsigned cvt_fp16x2(float low, float high) {
    return cuemu::fp16_bits(low) | cuemu::fp16_bits(high) << 16;
}

__device__ __forceinline__ float canonical(float v) { return v != v ? __uint_as_float(0x7fffffffu) : v + 0.f; }
__device__ __forceinline__ void sort_two(unsigned long long& a, unsigned long long& b) {
    if (b > a) std::swap(a, b);
}
__device__ __forceinline__ float canonical_sum(float a, float b) { return canonical(a + b); }

__device__ __forceinline__ float reciprocal(float v) { return 1.f / v; }
__device__ __forceinline__ float binary_logarithm(float v) { return log2f(v); }

__device__ __forceinline__ uint4 load_global_16(const void* p) {
    cuemu::check_global(p, 16, 16, "load_global_16");
    uint4 v;
    memcpy(&v, p, 16);
    return v;
}

__device__ __forceinline__ void store_global_16(void* p, uint4 v) {
    cuemu::check_global(p, 16, 16, "store_global_16");
    memcpy(p, &v, 16);
}

__device__ __forceinline__ unsigned load_once_4(const void* p) {
    cuemu::check_global(p, 4, 4, "load_once_4");
    unsigned v;
    memcpy(&v, p, 4);
    return v;
}
__device__ __forceinline__ uint2 load_once_8(const void* p) {
    cuemu::check_global(p, 8, 8, "load_once_8");
    uint2 v;
    memcpy(&v, p, 8);
    return v;
}

__device__ __forceinline__ unsigned permute_bytes(unsigned low, unsigned high, unsigned chosen) {
    unsigned result = __byte_perm(low, high, chosen);
    for (int i = 0; i < 4; ++i)
        if (chosen >> 4 * i & 8) result = (result & ~(0xffu << 8 * i)) | (result >> (8 * i + 7) & 1 ? 0xffu << 8 * i : 0u);
    return result;
}

__device__ __forceinline__ float product_rn(float a, float b) { return a * b; }
__device__ __forceinline__ float sum_rn(float a, float b) { return a + b; }
__device__ __forceinline__ float quotient_rn(float a, float b) { return a / b; }

__device__ __forceinline__ unsigned product_bf16x2(unsigned a, unsigned b) {
    const float low = __uint_as_float(a << 16) * __uint_as_float(b << 16);
    const float high = __uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u);
    return cvt_bf16x2(low, high);
}
