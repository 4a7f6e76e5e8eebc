#include "fibres.h"

#include <dlfcn.h>

#include <cstdarg>
#include <cstdio>

#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
asm(R"(
    .pushsection .text
    .globl cuemu_switch; .hidden cuemu_switch; .type cuemu_switch, @function
cuemu_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
    .popsection
)");
#endif

namespace cuemu {

Fibre fibres[MAX_FIBRES];
Fibre* current;
Block blocks[MAX_BLOCKS];
Block* block;
std::vector<Async*> under_way;
void (*on_block_start)(Block&);
void (*on_block_end)(Block&);
void (*on_thread_end)(Fibre&);
Context scheduler;
Launch launch;
Index block_dim, grid_dim;
Range shared_range;
unsigned threads;
uint64_t random_state;
bool failed;
char error[4096];

size_t append_pc(char* text, size_t size, const void* pc) {
    Dl_info info;
    if (!pc || !dladdr(pc, &info)) return 0;
    return snprintf(text, size, " [pc+0x%zx]", static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase));
}

size_t begin_report() {
    failed = true;
    size_t n = 0;
    CUEMU_APPEND("kernel %s, block (%u, %u, %u)", launch.name, block->index.x, block->index.y, block->index.z);
    if (current) CUEMU_APPEND(", thread (%u, %u, %u)", current->index.x, current->index.y, current->index.z);
    return CUEMU_APPEND(": ");
}

void complain(const void* pc, const char* format, ...) {
    if (failed) return;
    size_t n = begin_report();
    va_list list;
    va_start(list, format);
    n += vsnprintf(error + n, sizeof error / 2 - n, format, list);
    va_end(list);
    append_pc(error + n, sizeof error - n, pc);
}

[[noreturn]] void leave() {
    current->context.switch_to(scheduler);
    __builtin_unreachable();
}

[[noreturn]] void fail_at(const void* pc, const char* format, ...) {
    size_t n = begin_report();
    va_list list;
    va_start(list, format);
    n += vsnprintf(error + n, sizeof error / 2 - n, format, list);
    va_end(list);
    append_pc(error + n, sizeof error - n, pc);
    leave();
}
__attribute__((noinline)) const void* here() {
    asm volatile("");  // keeps calls from being merged
    return before(__builtin_return_address(0));
}

void wait_as(State state, const char* name, unsigned mask, void* pc) {
    Fibre& me = *current;
    me.state = state, me.at = name, me.mask = mask, me.pc = pc;
    me.context.switch_to(scheduler);
}

static void finish_group(Warp& warp, unsigned base, unsigned g) {
    const Group group = warp.groups[g];
    warp.groups[g] = warp.groups[--warp.num_groups];
    group.complete(warp.operands, group.arrived);
    for (unsigned m = group.arrived; m; m &= m - 1) block->fibres[base + __builtin_ctz(m)].state = READY;
}

static void release_barrier() {
    block->at_barrier = 0;
    for (unsigned i = 0; i < threads; ++i)
        if (block->fibres[i].state == AT_BARRIER) block->fibres[i].state = READY;
}

void collective(const char* name, unsigned mask, void* operand, Complete complete) {
    void* pc = __builtin_return_address(0);
    const unsigned id = current->id, lane = id & 31;
    Warp& warp = block->warps[id / 32];
    if (!(mask >> lane & 1)) fail_at(before(pc), "%s: mask 0x%08x lacks the calling lane %u", name, mask, lane);
    unsigned g = 0;
    while (g < warp.num_groups && warp.groups[g].mask != mask) ++g;
    Group& group = warp.groups[g];
    if (g == warp.num_groups)
        group = {mask, 0, name, complete}, ++warp.num_groups;
    else if (group.complete != complete || strcmp(group.name, name))
        fail_at(before(pc), "warp %u mixes collectives under mask 0x%08x: lanes 0x%08x are at %s, lane %u at %s", id / 32,
                mask, group.arrived, group.name, lane, name);
    group.arrived |= 1u << lane;
    warp.operands[lane] = operand;
    if (group.arrived == (mask & warp.alive))
        finish_group(warp, id - lane, g);
    else
        wait_as(AT_COLLECTIVE, name, mask, pc);
}

void barrier() {
    if (++block->at_barrier == block->alive)
        release_barrier();
    else
        wait_as(AT_BARRIER, "__syncthreads", ~0u, __builtin_return_address(0));
}

// Since sm_70 nobody waits for exited threads, so an exit may complete what the others wait for.
void fibre_main() {
    launch.call(launch.params);
    Fibre& me = *current;
    Warp& warp = block->warps[me.id / 32];
    me.state = EXITED;
    warp.alive &= ~(1u << (me.id & 31));
    for (unsigned g = 0; g < warp.num_groups;)
        if (warp.groups[g].arrived == (warp.groups[g].mask & warp.alive))
            finish_group(warp, me.id & ~31u, g);
        else
            ++g;
    if (--block->alive && block->at_barrier == block->alive) release_barrier();
    if (on_thread_end) on_thread_end(me);
    me.context.switch_to(scheduler);
}

static size_t describe_threads(const Block& of, size_t n) {
    std::vector<char> told(threads, 0);
    for (unsigned i = 0; i < threads; ++i) {
        const Fibre& f = of.fibres[i];
        if (told[i] || f.state == EXITED || n > sizeof error / 2) continue;
        unsigned count = 0;
        for (unsigned j = i; j < threads; ++j) {
            const Fibre& other = of.fibres[j];
            if (other.state == f.state && other.pc == f.pc && other.mask == f.mask) told[j] = 1, ++count;
        }
        CUEMU_APPEND("\n  %u thread(s), the first is (%u, %u, %u), at %s", count, f.index.x, f.index.y, f.index.z, f.at);
        if (f.state == AT_COLLECTIVE) CUEMU_APPEND(" of mask 0x%08x", f.mask);
        n += append_pc(error + n, sizeof error - n, before(f.pc));
        if (f.state == AT_EVENT) f.describe(f, error + n, sizeof error - n), n += strlen(error + n);
    }
    if (of.alive < threads) CUEMU_APPEND("\n  %u thread(s) have exited", threads - of.alive);
    return n;
}

void report_deadlock(const std::vector<Block*>& running) {
    block = running.front();
    size_t n = begin_report();
    CUEMU_APPEND("deadlock, no thread can go on:");
    for (const Block* of : running) {
        if (of != block) CUEMU_APPEND("\n  and in block (%u, %u, %u):", of->index.x, of->index.y, of->index.z);
        n = describe_threads(*of, n);
    }
}

}  // namespace cuemu
