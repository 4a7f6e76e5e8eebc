// PTX instructions of sm_80 and later, one per function. All inline assembly of the portable tier is here, because the CPU
// emulator of the tests replaces this file by plain C++.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// threadIdx.x, read from its special register here, so that the compiler keeps no earlier value of it in a register.
__device__ __forceinline__ int read_thread_index() {
    int r;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
    return r;
}

// Stores two neighbouring words with two instructions. One vector store would need adjacent registers, and the compiler would
// spill others.
__device__ __forceinline__ void store_shared_4_4(unsigned address, unsigned first, unsigned second) {
    asm volatile("st.shared.u32 [%0], %1;\n st.shared.u32 [%0+4], %2;" ::"r"(address), "r"(first), "r"(second) : "memory");
}

// Programmatic dependent launch (sm_90 and later). On older GPUs, and in a launch that does not overlap, both functions do
// nothing. A kernel whose `Launch` overlaps may start once every CTA of the launch before it has called let_next_launch_start
// or has ended. Until it has called wait_for_last_launch, it must not read or write memory that the launch before it writes,
// and must not write memory that this launch reads. If the launches before overlap with each other, the same holds for what
// they write. The wait ends when the launch before has ended and its writes are visible. At least one CTA of each such kernel
// must wait, so that launches end in their order.
__device__ __forceinline__ void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_last_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Copies 16 bytes from global to shared memory, asynchronously. It reads only the first src_bytes and fills the rest with
// zeros.
__device__ __forceinline__ void cp_async_16(unsigned dst_shared, const void* src, unsigned src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst_shared), "l"(src), "r"(src_bytes) : "memory");
}

// The same for BYTES = 4 or 8.
template <int BYTES>
__device__ __forceinline__ void cp_async_small(unsigned dst_shared, const void* src, unsigned src_bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst_shared), "l"(src), "n"(BYTES), "r"(src_bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the newest N of this thread's groups of copies are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ unsigned load_shared_4(unsigned address) {
    unsigned v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared_8(unsigned address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

// The warp computes d (16x8, fp32) += a (16x16, row-major) * b (16x8, column-major).
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_fp16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The warp computes d (16x8, fp32) += a (16x8, row-major) * b (8x8, column-major) of TF32.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The bits of a float rounded to TF32's 10 bits of mantissa, to nearest and ties away from zero, as cvt.rna.tf32.f32 does. That
// would also clear the last 13 bits, of which mma_tf32 takes no notice.
__device__ __forceinline__ unsigned round_tf32(unsigned bits) {
    asm("{ .reg .pred finite;\n .reg .f32 v;\n mov.b32 v, %0;\n abs.f32 v, v;\n setp.lt.f32 finite, v, 0f7f800000;\n"
        " @finite add.u32 %0, %0, 0x1000; }"
        : "+r"(bits));
    return bits;
}

// Two floats rounded to nearest even, with `low` in the low half.
__device__ __forceinline__ unsigned cvt_bf16x2(float low, float high) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ unsigned cvt_fp16x2(float low, float high) {
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float cvt_f32_from_bf16(unsigned short bits) {
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ __forceinline__ float cvt_f32_from_fp16(unsigned short bits) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
}

// Products, sums and quotients by themselves, which the compiler does not join, and which keep denormals under -ftz=true.
__device__ __forceinline__ float product_rn(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float sum_rn(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}
__device__ __forceinline__ float quotient_rn(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// Two floats rounded to e4m3, nearest even, with `low` in the low byte. Magnitudes above 448 become 448, a NaN becomes 0x7f.
// sm_89 and later have instructions for it.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ unsigned short cvt_e4m3x2(float low, float high) {
    unsigned short r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}
__device__ __forceinline__ float2 cvt_f32x2_from_e4m3x2(unsigned short bits) {
    unsigned halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
    return make_float2(cvt_f32_from_fp16(static_cast<unsigned short>(halves)),
                       cvt_f32_from_fp16(static_cast<unsigned short>(halves >> 16)));
}
#else
__device__ __forceinline__ unsigned e4m3_bits(float v) {
    const unsigned sign = __float_as_uint(v) >> 24 & 0x80u, bits = __float_as_uint(v) & 0x7fffffffu;
    if (v != v) return 0x7f;
    if (bits >= 0x43e00000u) return sign | 0x7e;  // 448
    // Below 2^-6 the addition of 2^14 rounds to multiples of 2^-9, the smallest e4m3.
    if (bits < 0x3c800000u) return sign | (__float_as_uint(__uint_as_float(bits) + 16384.f) - 0x46800000u);
    return sign | ((bits - (120u << 23) + 0x7ffffu + (bits >> 20 & 1)) >> 20);
}
__device__ __forceinline__ unsigned short cvt_e4m3x2(float low, float high) {
    return static_cast<unsigned short>(e4m3_bits(low) | e4m3_bits(high) << 8);
}
__device__ __forceinline__ float cvt_f32_from_e4m3(unsigned bits) {
    const float magnitude =
        (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fffffffu) : product_rn(__uint_as_float((bits & 0x7f) << 20), 0x1p120f);
    return bits & 0x80 ? -magnitude : magnitude;
}
__device__ __forceinline__ float2 cvt_f32x2_from_e4m3x2(unsigned short bits) {
    return make_float2(cvt_f32_from_e4m3(bits & 0xffu), cvt_f32_from_e4m3(bits >> 8));
}
#endif

// v, with -0 turned into +0 and every NaN into the canonical NaN, which has no sign.
__device__ __forceinline__ float canonical(float v) {
    float r;
    asm("add.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(v));
    return r;
}
// canonical(a + b) for an a that is not -0: the addition alone gives it.
__device__ __forceinline__ float canonical_sum(float a, float b) {
    float r;
    asm("add.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// Puts the larger of the two first, with one comparison. The compiler would compare twice, for a maximum and a minimum.
__device__ __forceinline__ void sort_two(unsigned long long& a, unsigned long long& b) {
    const unsigned long long x = a, y = b;
    asm("{ .reg .pred p;\n setp.gt.u64 p, %2, %3;\n selp.b64 %0, %2, %3, p;\n selp.b64 %1, %3, %2, p; }"
        : "=&l"(a), "=l"(b)
        : "l"(x), "l"(y));
}

// 1 / v, with an error of one unit in the last place at most. It is 0 for an infinity.
__device__ __forceinline__ float reciprocal(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// log2(v), with an error of 2^-22 at most between 1/2 and 2, and of two units in the last place elsewhere.
__device__ __forceinline__ float binary_logarithm(float v) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}

// Plain accesses, which the compiler may reorder and overlap. The emulator checks their alignment.
__device__ __forceinline__ uint4 load_global_16(const void* p) { return *static_cast<const uint4*>(p); }

__device__ __forceinline__ void store_global_16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }

// Loads of what is read once, which leave the L1 cache to other data.
__device__ __forceinline__ unsigned load_once_4(const void* p) {
    unsigned v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 load_once_8(const void* p) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}

// Returns four bytes of the eight in low and high, each chosen by a nibble of `chosen`. If the nibble's first bit is set, each
// bit of the byte becomes a copy of the first one. __byte_perm ignores that bit.
__device__ __forceinline__ unsigned permute_bytes(unsigned low, unsigned high, unsigned chosen) {
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(chosen));
    return r;
}

// Two products in bf16. sm_80 has none, but the sum of a product and -0 is the product.
__device__ __forceinline__ unsigned product_bf16x2(unsigned a, unsigned b) {
    unsigned r;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return r;
}
