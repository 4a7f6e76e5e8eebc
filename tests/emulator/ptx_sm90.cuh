// The emulator's version of kernels_cu/common/ptx_sm90.cuh: the same functions in plain C++, by the PTX ISA. What the device does
// beside the threads is late here.
#pragma once
#include "ptx_sm80.cuh"

typedef unsigned long long uint64;

// What tests/emulator/tensor_map.py encodes: 3 dimensions of 16-bit or 8-bit elements, the contiguous one first.
struct alignas(64) TensorMap {
    uint64 magic, pointer, shape[3], strides[2], box[3], itemsize, unused[5];  // strides in bytes
};

#pragma GCC visibility push(hidden)
namespace cuemu {

bool hook_states();
static const bool hooked = hook_states();  // before the first launch of a library whose kernels include this file

struct Barrier;

// Addresses in the cluster: the block's rank, plus 1, above the address there.
constexpr unsigned RANK_SHIFT = 24;
Block& split_cluster_address(unsigned& address, const char* what, const void* pc = here());
Barrier* find_barrier(Block& of, unsigned address, const char* what, const void* pc = here());
void initialise_barrier(unsigned address, unsigned count, const void* pc);
void fence_barriers();
void arrive(Barrier& b, const void* pc);
void expect_tx(Barrier& b, unsigned bytes, const void* pc);
bool is_over(const Barrier& b, unsigned parity, const void* pc = here());
bool try_wait(unsigned address, unsigned parity);
void yield();

void arrive_after_copies(Barrier& b, const void* pc);
void store_remote(Barrier& b, unsigned address, int value, const void* pc);
void copy_box(Block& of, unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier, const void* pc);

void arrive_at_cluster(const void* pc);
void wait_for_cluster();
void wait_at_named(unsigned id, unsigned count);
void set_registers(unsigned registers, bool more, const void* pc);

struct StoreOperand { unsigned char* row; unsigned r[4]; };
void store_matrices(void* const* operands, unsigned lanes);

void fence_products();
void commit_products();
// to_float: null of e4m3. a_fragment: A in registers, in place of the descriptor.
void issue_product(float (*d)[4], unsigned fragments, uint64 a, uint64 b, bool accumulate, bool a_transposed, bool b_transposed,
                   float (*to_float)(unsigned short), const unsigned* a_fragment = nullptr);
void wait_for_products(unsigned left);

}  // namespace cuemu
#pragma GCC visibility pop

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
    cuemu::initialise_barrier(barrier, count, cuemu::here());
}
__device__ __forceinline__ void fence_mbarrier_init() { cuemu::fence_barriers(); }
__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
    cuemu::arrive(*cuemu::find_barrier(*cuemu::block, barrier, "mbarrier.arrive"), cuemu::here());
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
    cuemu::Barrier& b = *cuemu::find_barrier(*cuemu::block, barrier, "mbarrier.arrive.expect_tx");
    cuemu::expect_tx(b, bytes, cuemu::here());
    cuemu::arrive(b, cuemu::here());
}
__device__ __forceinline__ bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
    return cuemu::try_wait(barrier, parity);
}
__device__ __forceinline__ bool mbarrier_test_wait(unsigned barrier, unsigned parity) {
    const cuemu::Barrier& b = *cuemu::find_barrier(*cuemu::block, barrier, "mbarrier.test_wait");
    if (!cuemu::is_over(b, parity)) cuemu::yield();
    return cuemu::is_over(b, parity);
}
__device__ __forceinline__ void cp_async_mbarrier_arrive(unsigned barrier) {
    cuemu::arrive_after_copies(*cuemu::find_barrier(*cuemu::block, barrier, "cp.async.mbarrier.arrive"), cuemu::here());
}
__device__ __forceinline__ void tma_load_3d(unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier) {
    cuemu::copy_box(*cuemu::block, dst, map, c0, c1, c2, barrier, cuemu::here());
}
__device__ __forceinline__ void tma_load_multicast_3d(unsigned dst, const TensorMap* map, int c0, int c1, int c2, unsigned barrier,
                                                      unsigned short cta_mask) {
    if (!cta_mask || cta_mask >> cuemu::launch.cluster_blocks)
        CUEMU_FAIL("multicast to CTAs 0x%x of a cluster of %u", unsigned(cta_mask), unsigned(cuemu::launch.cluster_blocks));
    for (unsigned rank = 0; rank < cuemu::launch.cluster_blocks; ++rank)
        if (cta_mask >> rank & 1) cuemu::copy_box(cuemu::block->cluster[rank], dst, map, c0, c1, c2, barrier, cuemu::here());
}
__device__ __forceinline__ unsigned cluster_address(unsigned address, unsigned block) {
    if (block >= cuemu::launch.cluster_blocks || address >> cuemu::RANK_SHIFT)
        CUEMU_FAIL("mapa: address 0x%x in block %u of a cluster of %u", address, block, unsigned(cuemu::launch.cluster_blocks));
    return address | (block + 1) << cuemu::RANK_SHIFT;
}
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
    cuemu::Block& of = cuemu::split_cluster_address(barrier, "mbarrier.arrive.shared::cluster");
    cuemu::arrive(*cuemu::find_barrier(of, barrier, "mbarrier.arrive.shared::cluster"), cuemu::here());
}
__device__ __forceinline__ void store_async(unsigned address, int v, unsigned barrier) {
    if (cuemu::launch.cluster_blocks < 2) CUEMU_FAIL("st.async in a kernel that has no clusters");
    cuemu::Block& of = cuemu::split_cluster_address(address, "st.async");
    if (&cuemu::split_cluster_address(barrier, "st.async") != &of)
        CUEMU_FAIL("st.async: data and mbarrier in different blocks");
    cuemu::store_remote(*cuemu::find_barrier(of, barrier, "st.async"), address, v, cuemu::here());
}
__device__ __forceinline__ void cluster_arrive() { cuemu::arrive_at_cluster(cuemu::here()); }
__device__ __forceinline__ void cluster_wait() { cuemu::wait_for_cluster(); }

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() { cuemu::set_registers(REGISTERS, false, cuemu::here()); }
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() { cuemu::set_registers(REGISTERS, true, cuemu::here()); }

__device__ __forceinline__ void stmatrix_x4(unsigned address, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    cuemu::StoreOperand mine = {cuemu::shared_at(address, 16, "stmatrix_x4"), {r0, r1, r2, r3}};
    cuemu::collective("stmatrix_x4", ~0u, &mine, cuemu::store_matrices);
}
__device__ __forceinline__ uint4 load_shared_16(unsigned address) {
    uint4 v;
    memcpy(&v, cuemu::shared_at(address, 16, "load_shared_16"), 16);
    return v;
}
__device__ __forceinline__ void store_shared_4(unsigned address, float v) {
    memcpy(cuemu::shared_at(address, 4, "store_shared_4"), &v, 4);
}
__device__ __forceinline__ void store_global_vector(void* p, uint4 v) { store_global_16(p, v); }
__device__ __forceinline__ void store_global_8_if(bool condition, void* p, uint2 v) {
    if (!condition) return;
    cuemu::check_global(p, 8, 8, "store_global_8_if");
    memcpy(p, &v, 8);
}

namespace cuemu {
// to_float: of 16 bits. Two NaNs are the one without a sign.
template <class ToFloat>
static inline unsigned max_xorsign_abs(unsigned a, unsigned b, ToFloat to_float) {
    unsigned found = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        const unsigned short x = a >> shift, y = b >> shift, of_x = x & 0x7fff, of_y = y & 0x7fff;
        const float value_x = to_float(of_x), value_y = to_float(of_y);
        const bool nan_x = value_x != value_x, nan_y = value_y != value_y;
        unsigned bits = (nan_x || value_y > value_x ? of_y : of_x) | ((x ^ y) & 0x8000u);
        if (nan_x && nan_y) bits = 0x7fff;
        if (nan_y && !nan_x) bits = of_x | ((x ^ y) & 0x8000u);
        found |= bits << shift;
    }
    return found;
}
}  // namespace cuemu
__device__ __forceinline__ unsigned max_xorsign_abs_bf16x2(unsigned a, unsigned b) {
    return cuemu::max_xorsign_abs(a, b, cvt_f32_from_bf16);
}
__device__ __forceinline__ unsigned max_xorsign_abs_fp16x2(unsigned a, unsigned b) {
    return cuemu::max_xorsign_abs(a, b, cvt_f32_from_fp16);
}

template <class T>
__device__ __forceinline__ T* add_product(T* p, unsigned a, unsigned b) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + uint64(a) * b);
}

__device__ __forceinline__ void named_barrier(int id, int threads) { cuemu::wait_at_named(id, threads); }

__device__ __forceinline__ void wgmma_fence() { cuemu::fence_products(); }
__device__ __forceinline__ void wgmma_commit() { cuemu::commit_products(); }
template <int N>
__device__ __forceinline__ void wgmma_wait() { cuemu::wait_for_products(N); }

template <int A_TRANSPOSED, int B_TRANSPOSED, int FRAGMENTS>
__device__ __forceinline__ void wgmma_bf16(float (&d)[FRAGMENTS][4], uint64 a, uint64 b, int accumulate) {
    static_assert(FRAGMENTS == 24 || FRAGMENTS == 32, "those that ptx_sm90.cuh has");
    cuemu::issue_product(d, FRAGMENTS, a, b, accumulate, A_TRANSPOSED, B_TRANSPOSED, cvt_f32_from_bf16);
}
template <int A_TRANSPOSED, int B_TRANSPOSED, int FRAGMENTS>
__device__ __forceinline__ void wgmma_fp16(float (&d)[FRAGMENTS][4], uint64 a, uint64 b, int accumulate) {
    static_assert(FRAGMENTS == 24 || FRAGMENTS == 32, "those that ptx_sm90.cuh has");
    cuemu::issue_product(d, FRAGMENTS, a, b, accumulate, A_TRANSPOSED, B_TRANSPOSED, cvt_f32_from_fp16);
}
template <int B_TRANSPOSED, int FRAGMENTS>
__device__ __forceinline__ void wgmma_bf16(float (&d)[FRAGMENTS][4], const unsigned (&a)[4], uint64 b) {
    cuemu::issue_product(d, FRAGMENTS, 0, b, true, false, B_TRANSPOSED, cvt_f32_from_bf16, a);
}
template <int B_TRANSPOSED, int FRAGMENTS>
__device__ __forceinline__ void wgmma_fp16(float (&d)[FRAGMENTS][4], const unsigned (&a)[4], uint64 b) {
    cuemu::issue_product(d, FRAGMENTS, 0, b, true, false, B_TRANSPOSED, cvt_f32_from_fp16, a);
}
template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32][4], uint64 a, uint64 b, int accumulate) {
    static_assert(!A_TRANSPOSED && !B_TRANSPOSED, "e4m3 operands are contiguous along K");
    cuemu::issue_product(d, 32, a, b, accumulate, false, false, nullptr);
}
__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[16][4], uint64 a, uint64 b, int accumulate) {
    cuemu::issue_product(d, 16, a, b, accumulate, false, false, nullptr);
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32][4], const unsigned (&a)[4], uint64 b, int accumulate) {
    cuemu::issue_product(d, 32, 0, b, accumulate, false, false, nullptr, a);
}
