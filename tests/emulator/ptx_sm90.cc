// Clusters, named barriers, setmaxnreg and stmatrix.
#include "mbarrier.h"

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

bool hook_states() {
    on_block_start = start_state, on_block_end = end_block, on_thread_end = end_thread;
    return true;
}

void arrive_at_cluster(const void* pc) {
    ThreadState& me = state_of(*current);
    BlockState& s = state_of(*block->cluster);
    if (me.cluster_arrived) fail_at(pc, "barrier.cluster.arrive twice without barrier.cluster.wait");
    me.cluster_arrived = true, me.cluster_generation = s.cluster_generation;
    ++s.cluster_arrived;
    settle_cluster();
}

static void describe_nothing(const Fibre&, char*, size_t) {}

void wait_for_cluster() {
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

void wait_at_named(unsigned id, unsigned count) {
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

void set_registers(unsigned registers, bool more, const void* pc) {
    Warpgroup& group = state_of(*block).warpgroups[current->id / 128];
    if (threads % 128 || registers % 8 || registers < 24 || registers > 256)
        CUEMU_REPORT(pc, "setmaxnreg: %u registers in a block of %u threads", registers, threads);
    const bool begun = group.called_setmaxnreg % 128, known = group.registers;
    if (known && (begun ? registers != group.registers : (registers > group.registers) != more))
        CUEMU_REPORT(pc, "setmaxnreg.%s: %u registers, the warpgroup has %u", more ? "inc" : "dec", registers, group.registers);
    group.registers = registers;
    ++group.called_setmaxnreg;
}

void store_matrices(void* const* operands, unsigned lanes) {
    if (lanes != ~0u) CUEMU_FAIL("stmatrix: all 32 lanes must take part, here 0x%08x", lanes);
    for (unsigned i = 0; i < 32; ++i)
        for (unsigned lane = 0; lane < 4; ++lane)
            memcpy(static_cast<StoreOperand*>(operands[i])->row + 4 * lane,
                   &static_cast<StoreOperand*>(operands[i % 8 * 4 + lane])->r[i / 8], 4);
}

}  // namespace cuemu
