// The emulator's version of kernels_cu/ptx_sm90.cuh: the same functions in plain C++, by the PTX ISA. What the device does
// beside the threads is late here.
#pragma once
#include "mbarrier.h"
#include "wgmma.h"

namespace cuemu {

static void start_state(Block& b) {
    BlockState& s = state_of(b);
    s.barriers.clear();
    for (NamedBarrier& named : s.named) named = {};
    for (Warpgroup& group : s.warpgroups) group = {&b, {}, 0, 0, 0, false, {}};
    s.cluster_arrived = s.cluster_generation = 0;
    s.cluster_waiting.clear();
    for (unsigned i = 0; i < threads; ++i) state_of(b.fibres[i]) = {};
}

static void settle_cluster() {  // exited threads count as arrived
    BlockState& s = state_of(*block->cluster);
    unsigned expected = 0;
    for (unsigned rank = 0; rank < launch.cluster_blocks; ++rank) expected += block->cluster[rank].alive;
    if (s.cluster_arrived < expected) return;
    s.cluster_arrived = 0, ++s.cluster_generation;
    wake(s.cluster_waiting);
}

static void end_thread(Fibre& f) {
    if (!state_of(f).pending.empty()) complain(nullptr, "the thread exits with products in flight");
    settle_cluster();
}

static void end_block(Block& b) {
    for (const Async* work : under_way)
        if (work->of == &b) {
            const auto* copy = dynamic_cast<const ToBarrier*>(work);
            const void* pc = copy ? copy->pc : nullptr;
            return complain(pc, "the block exits while a copy to its shared memory is under way, issued");
        }
    unsigned registers = 0;
    for (unsigned w = 0; w < threads / 128; ++w) {
        const Warpgroup& group = state_of(b).warpgroups[w];
        if (group.called_setmaxnreg % 128)
            return complain(nullptr, "only %u threads of warpgroup %u call setmaxnreg", group.called_setmaxnreg, w);
        registers += group.registers * 128;
    }
    if (registers > 65536) complain(nullptr, "setmaxnreg: the warpgroups ask for %u registers, there are 65536", registers);
}

static const bool hooked = (on_block_start = start_state, on_block_end = end_block, on_thread_end = end_thread, true);

static void describe_nothing(const Fibre&, char*, size_t) {}

static __attribute__((noinline)) void wait_for_cluster() {
    void* pc = __builtin_return_address(0);
    ThreadState& me = state_of(*current);
    BlockState& s = state_of(*block->cluster);
    if (!me.cluster_arrived) fail_at(before(pc), "barrier.cluster.wait without barrier.cluster.arrive");
    me.cluster_arrived = false;
    if (me.cluster_generation != s.cluster_generation) return;
    s.cluster_waiting.push_back(current);
    wait_for_event("barrier.cluster.wait", 0, pc, describe_nothing);
}

static void describe_named(const Fibre& f, char* text, size_t size) {
    const NamedBarrier& named = state_of(*f.block).named[f.mask];
    snprintf(text, size, " %u: %u of %u threads are there", f.mask, named.arrived, named.threads);
}

static __attribute__((noinline)) void wait_at_named(unsigned id, unsigned count) {
    void* pc = __builtin_return_address(0);
    if (id < 1 || id > 15 || count % 32 || count < 32 || count > threads)
        fail_at(before(pc), "bar.sync %u, %u: expected 1 to 15 (0 is __syncthreads) and warps of the block", id, count);
    NamedBarrier& named = state_of(*block).named[id];
    if (named.arrived && named.threads != count)
        fail_at(before(pc), "bar.sync %u: %u threads here, %u in those that are there", id, count, named.threads);
    named.threads = count;
    if (++named.arrived == count) {
        named.arrived = 0;
        wake(named.waiting);
    } else {
        named.waiting.push_back(current);
        wait_for_event("bar.sync", id, pc, describe_named);
    }
}

static void set_registers(unsigned registers, bool more, const void* pc) {
    Warpgroup& group = state_of(*block).warpgroups[current->id / 128];
    if (threads % 128 || registers % 8 || registers < 24 || registers > 256)
        CUEMU_REPORT(pc, "setmaxnreg: %u registers in a block of %u threads", registers, threads);
    const bool begun = group.called_setmaxnreg % 128, known = group.registers;
    if (known && (begun ? registers != group.registers : (registers > group.registers) != more))
        CUEMU_REPORT(pc, "setmaxnreg.%s: %u registers, the warpgroup has %u", more ? "inc" : "dec", registers, group.registers);
    group.registers = registers;
    ++group.called_setmaxnreg;
}

struct StoreOperand { unsigned char* row; unsigned r[4]; };
static void store_matrices(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) CUEMU_FAIL("stmatrix: all 32 lanes must take part, here 0x%08x", lanes);
    for (unsigned i = 0; i < 32; ++i)
        for (unsigned lane = 0; lane < 4; ++lane)
            memcpy(static_cast<StoreOperand*>(operands[i])->row + 4 * lane,
                   &static_cast<StoreOperand*>(operands[i % 8 * 4 + lane])->r[i / 8], 4);
}
}  // namespace cuemu

__device__ __forceinline__ void mbarrier_init(unsigned barrier, unsigned count) {
    cuemu::initialise_barrier(barrier, count, cuemu::here());
}
__device__ __forceinline__ void fence_mbarrier_init() {
    for (cuemu::Barrier& b : cuemu::state_of(*cuemu::block).barriers)
        if (b.initialised_by == cuemu::current) b.fenced = true;
}
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
    cuemu::Barrier* b = cuemu::find_barrier(*cuemu::block, barrier, "cp.async.mbarrier.arrive");
    cuemu::under_way.push_back(new cuemu::CopiesArrive(b, cuemu::here()));
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
    cuemu::Barrier* b = cuemu::find_barrier(of, barrier, "st.async");
    cuemu::under_way.push_back(new cuemu::RemoteStore(b, cuemu::here(), address, v));
}
__device__ __forceinline__ void cluster_arrive() {
    cuemu::ThreadState& me = cuemu::state_of(*cuemu::current);
    cuemu::BlockState& s = cuemu::state_of(*cuemu::block->cluster);
    if (me.cluster_arrived) CUEMU_FAIL("barrier.cluster.arrive twice without barrier.cluster.wait");
    me.cluster_arrived = true, me.cluster_generation = s.cluster_generation;
    ++s.cluster_arrived;
    cuemu::settle_cluster();
}
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
__device__ __forceinline__ uint2 load_shared_8(unsigned address) {
    uint2 v;
    memcpy(&v, cuemu::shared_at(address, 8, "load_shared_8"), 8);
    return v;
}
__device__ __forceinline__ void store_shared_4(unsigned address, float v) {
    memcpy(cuemu::shared_at(address, 4, "store_shared_4"), &v, 4);
}
__device__ __forceinline__ void store_global_vector(void* p, uint4 v) { store_global_16(p, v); }

template <class T>
__device__ __forceinline__ T* add_product(T* p, unsigned a, unsigned b) {
    return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(p) + uint64(a) * b);
}

__device__ __forceinline__ void named_barrier(int id, int threads) { cuemu::wait_at_named(id, threads); }

__device__ __forceinline__ void wgmma_fence() { cuemu::state_of(*cuemu::current).fenced = true; }
__device__ __forceinline__ void wgmma_commit() { ++cuemu::state_of(*cuemu::current).groups; }
template <int N>
__device__ __forceinline__ void wgmma_wait() { cuemu::wait_for_products(N); }

template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void wgmma_bf16(float (&d)[32][4], uint64 a, uint64 b, int accumulate) {
    cuemu::issue_product(d, a, b, accumulate, A_TRANSPOSED, B_TRANSPOSED, cvt_f32_from_bf16);
}
template <int A_TRANSPOSED, int B_TRANSPOSED>
__device__ __forceinline__ void wgmma_fp16(float (&d)[32][4], uint64 a, uint64 b, int accumulate) {
    cuemu::issue_product(d, a, b, accumulate, A_TRANSPOSED, B_TRANSPOSED, cvt_f32_from_fp16);
}
