// PTX of sm_90a: mbarrier, TMA, clusters, wgmma; one instruction per function. Shared addresses are 32-bit. A barrier is the
// shared address of an mbarrier; a wait names the parity of the phase that is to complete.
#pragma once
#include "ptx_sm80.cuh"

typedef unsigned long long uint64;

// A CUtensorMap, which tells TMA of a tensor in global memory; passed by value in a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes initialised barriers visible to TMA and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// Tests like mbarrier_try_wait, but returns at once.
__device__ __forceinline__ bool mbarrier_test_wait(unsigned barrier, unsigned parity) {
    unsigned done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

// Arrives on the barrier, which counts this arrival, once this thread's cp.async copies so far have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// TMA: one box of a 3-D tensor to shared memory. Its bytes complete on the barrier; elements outside of the tensor are zeros.
__device__ __forceinline__ void tma_load_3d(unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(dst),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
        : "memory");
}

// Loads like tma_load_3d, to the same address in each CTA of the mask. The bytes complete on each CTA's barrier at that address.
__device__ __forceinline__ void tma_load_multicast_3d(unsigned dst, const TensorMap* map, int c0, int c1, int c2,
                                                      unsigned barrier, unsigned short cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(dst),
        "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(cta_mask)
        : "memory");
}

// The cluster address of what has this shared address in CTA `rank` of the cluster.
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned rank) {
    unsigned mapped;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
    return mapped;
}

// Arrives at a cluster address. The form .release.cluster would wait for the thread's stores to global memory.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Stores v and completes 4 bytes on the barrier, both at cluster addresses of one CTA. Illegal in a kernel without clusters.
__device__ __forceinline__ void store_async(unsigned address, int v, unsigned barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(address), "r"(v), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1), "r"(r2),
                 "r"(r3)
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(unsigned address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_shared_4(unsigned address, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}

// One instruction. The compiler splits a plain store of a vector whose registers are not adjacent.
__device__ __forceinline__ void store_global_vector(void* p, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// Stores under a predicate, without a branch, which would keep instructions before and after it from overlapping.
__device__ __forceinline__ void store_global_8_if(bool condition, void* p, uint2 v) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v2.u32 [%1], {%2, %3};\n}\n" ::"r"(int(condition)),
                 "l"(p), "r"(v.x), "r"(v.y));
}

// Returns in each half the larger magnitude, with the product of both signs; for a number and a NaN the number's.
__device__ __forceinline__ unsigned max_xorsign_abs_bf16x2(unsigned a, unsigned b) {
    unsigned r;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ unsigned max_xorsign_abs_fp16x2(unsigned a, unsigned b) {
    unsigned r;
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// p plus a * b bytes, a product of 64 bits.
template <class T>
__device__ __forceinline__ T* add_product(T* p, unsigned a, unsigned b) {
    T* sum;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(p));
    return sum;
}

// Waits until `threads` threads of the CTA have arrived at the named barrier `id`; 0 is __syncthreads'.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders accumulator registers and shared memory before the next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Operands of wgmma's accumulators, and their names.
#define FRAGMENT(J) "+f"(d[J][0]), "+f"(d[J][1]), "+f"(d[J][2]), "+f"(d[J][3])
#define FRAGMENTS_8(J)                                                                                                 \
    FRAGMENT(J), FRAGMENT(J + 1), FRAGMENT(J + 2), FRAGMENT(J + 3), FRAGMENT(J + 4), FRAGMENT(J + 5), FRAGMENT(J + 6), \
        FRAGMENT(J + 7)
#define FRAGMENTS_16 FRAGMENTS_8(0), FRAGMENTS_8(8)
#define FRAGMENTS_24 FRAGMENTS_16, FRAGMENTS_8(16)
#define FRAGMENTS_32 FRAGMENTS_24, FRAGMENTS_8(24)
#define REGISTERS_64                                                                   \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_96                                                                   \
    REGISTERS_64                                                                       \
    ", "                                                                               \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_128                                                                              \
    REGISTERS_96                                                                                   \
    ", "                                                                                           \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// d = a * b + (accumulate ? d : 0) over k = 16. d: 64 x 256 or 64 x 192 fp32 per warpgroup, d[j] laid out as a tile of
// mma.m16n8k16. a, b: shared memory descriptors. Transposed operands are contiguous along M or N.
#define WGMMA_OF(NAME, TYPES)                                                                                                  \
    template <int A_TRANSPOSED, int B_TRANSPOSED>                                                                              \
    __device__ __forceinline__ void NAME(float (&d)[32][4], uint64 a, uint64 b, int accumulate) {                              \
        asm volatile(                                                                                                          \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                                      \
            "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES " {" REGISTERS_128 "}, %128, %129, p, 1, 1, %131, %132;\n}\n" \
            : FRAGMENTS_32                                                                                                     \
            : "l"(a), "l"(b), "r"(accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));                                          \
    }                                                                                                                          \
    template <int A_TRANSPOSED, int B_TRANSPOSED>                                                                              \
    __device__ __forceinline__ void NAME(float (&d)[24][4], uint64 a, uint64 b, int accumulate) {                              \
        asm volatile(                                                                                                          \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                                                       \
            "wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPES " {" REGISTERS_96 "}, %96, %97, p, 1, 1, %99, %100;\n}\n"     \
            : FRAGMENTS_24                                                                                                     \
            : "l"(a), "l"(b), "r"(accumulate), "n"(A_TRANSPOSED), "n"(B_TRANSPOSED));                                          \
    }
WGMMA_OF(wgmma_bf16, "bf16.bf16")
WGMMA_OF(wgmma_fp16, "f16.f16")
#undef WGMMA_OF

// d += a * b, where a is a fragment of mma.m16n8k16 of the warp's 16 rows. It must stay as it is until the product is done.
#define WGMMA_OF(NAME, TYPES)                                                                   \
    template <int B_TRANSPOSED>                                                                 \
    __device__ __forceinline__ void NAME(float (&d)[32][4], const unsigned (&a)[4], uint64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES " {" REGISTERS_128    \
                     "}, {%128, %129, %130, %131}, %132, 1, 1, 1, %133;\n"                      \
                     : FRAGMENTS_32                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_TRANSPOSED));  \
    }                                                                                           \
    template <int B_TRANSPOSED>                                                                 \
    __device__ __forceinline__ void NAME(float (&d)[24][4], const unsigned (&a)[4], uint64 b) { \
        asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32." TYPES " {" REGISTERS_96     \
                     "}, {%96, %97, %98, %99}, %100, 1, 1, 1, %101;\n"                          \
                     : FRAGMENTS_24                                                             \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_TRANSPOSED));  \
    }
WGMMA_OF(wgmma_bf16, "bf16.bf16")
WGMMA_OF(wgmma_fp16, "f16.f16")
#undef WGMMA_OF

// The same of e4m3, over k = 32. Both operands are contiguous along K: these products know no other.
template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32][4], uint64 a, uint64 b, int accumulate) {
    static_assert(!A_TRANSPOSED && !B_TRANSPOSED, "e4m3 operands are contiguous along K");
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" REGISTERS_128 "}, %128, %129, p, 1, 1;\n}\n"
        : FRAGMENTS_32
        : "l"(a), "l"(b), "r"(accumulate));
}
// The same for 128 columns.
__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[16][4], uint64 a, uint64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" REGISTERS_64 "}, %64, %65, p, 1, 1;\n}\n"
        : FRAGMENTS_16
        : "l"(a), "l"(b), "r"(accumulate));
}
// The same with a fragment of mma.m16n8k32 of the warp's 16 rows of A. It must stay as it is until the product is done.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32][4], const unsigned (&a)[4], uint64 b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" REGISTERS_128 "}, {%128, %129, %130, %131}, %132, p, 1, 1;\n}\n"
        : FRAGMENTS_32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
#undef REGISTERS_128
#undef REGISTERS_96
#undef REGISTERS_64
#undef FRAGMENTS_32
#undef FRAGMENTS_24
#undef FRAGMENTS_16
#undef FRAGMENTS_8
#undef FRAGMENT
