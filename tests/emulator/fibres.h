// Threads as fibres, which run until they reach a barrier or a collective that others have not reached. What they wait for,
// and reports of errors.
#pragma once
#include <dlfcn.h>
#include <link.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace cuemu {

constexpr size_t STACK_BYTES = 64 * 1024, PAGE = 4096;
constexpr unsigned MAX_THREADS = 1024, MAX_FIBRES = 2 * MAX_THREADS, MAX_BLOCKS = 8;
constexpr uint16_t OUTSIDE = 0x7fc1;  // shared memory past the launch's size: NaN as fp32, bf16 and fp16

#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
// swapcontext makes a system call per switch; this saves the callee-saved registers and nothing else.
extern "C" __attribute__((visibility("hidden"))) void cuemu_switch(void** save, void* to);
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
struct Context {
    void* sp;
    void start(unsigned char* stack, size_t bytes, void (*entry)()) {
        void** top = reinterpret_cast<void**>(stack + bytes);
        top[-2] = reinterpret_cast<void*>(entry);  // `ret` leaves the stack pointer 8 off 16, as a call would
        std::fill(top - 8, top - 2, nullptr);
        sp = top - 8;
    }
    void switch_to(Context& to) { cuemu_switch(&sp, to.sp); }
};
#else
struct Context {
    ucontext_t state;
    void start(unsigned char* stack, size_t bytes, void (*entry)()) {
        getcontext(&state);
        state.uc_stack.ss_sp = stack, state.uc_stack.ss_size = bytes, state.uc_link = nullptr;
        makecontext(&state, entry, 0);
    }
    void switch_to(Context& to) { swapcontext(&state, &to.state); }
};
#endif

struct Index { unsigned x, y, z; };
struct Range { unsigned char *begin, *end; };
struct Copy { unsigned group; unsigned char *dst, data[16]; };  // a cp.async that no wait has retired
using Complete = void (*)(void* const* operands, unsigned lanes);

struct Launch {  // mirrored by the Python driver
    void (*call)(const void* params);
    const char* name;
    const void* params;  // the struct that the kernel takes
    const Range* arrays;
    unsigned char* stacks;
    uint64_t num_arrays, shared_bytes, seed, cluster_blocks, clusters_at_once;
    Index grid, block;
};

enum State { READY, AT_COLLECTIVE, AT_BARRIER, AT_EVENT, EXITED };
struct Block;
struct Fibre {
    Context context;
    Index index;
    unsigned id, commits, mask, landed;  // landed: how many of its copies
    State state;
    const char* at;  // what it waits for (under `mask`), called from `pc`
    void* pc;
    Block* block;
    void (*describe)(const Fibre&, char* text, size_t size);  // AT_EVENT: more of what it waits for
    std::vector<Copy> copies;
};
// Lanes that arrived at a collective under one mask. Lanes under disjoint or nested masks may wait in
// several groups at once.
struct Group { unsigned mask, arrived; const char* name; Complete complete; };
struct Warp { unsigned alive, num_groups; Group groups[32]; void* operands[32]; };

// A block that runs, in one of MAX_BLOCKS places. Its shared memory lies in `saved` while another block has its turn.
struct Block {
    Index index;
    unsigned place, rank, alive, at_barrier;  // rank: in its cluster
    unsigned stalled, stall;  // a warp that does not run for so many passes more
    Fibre* fibres;
    Warp warps[MAX_THREADS / 32];
    std::vector<unsigned char> saved;
    Block* cluster;  // the first of the cluster's blocks, which have neighbouring places
};

// Work that goes on beside the threads: copies, products of the tensor cores. It completes as late as can be, when no
// thread can go on; under a seed sometimes earlier.
struct Async {
    Block* of;  // whose shared memory it reads or writes
    virtual ~Async() = default;
    virtual bool awaited() const = 0;  // by some thread
    virtual bool yields() const { return false; }  // without a seed, to all that do not
    virtual void complete() = 0;
};

static Fibre fibres[MAX_FIBRES];
static Fibre* current;  // null while the scheduler runs
static Block blocks[MAX_BLOCKS];
static Block* block;  // whose turn it is
static std::vector<Async*> under_way;
static void (*on_block_start)(Block&);  // of the Hopper tier
static void (*on_block_end)(Block&);
static void (*on_thread_end)(Fibre&);
static Context scheduler;
static Launch launch;
static Index block_dim, grid_dim;
static Range shared_range;
static unsigned threads;
static uint64_t random_state;
static bool failed;
static char error[4096];

// The Python driver turns "[pc+0x...]" into file and line.
static size_t append_pc(char* text, size_t size, const void* pc) {
    Dl_info info;
    if (!pc || !dladdr(pc, &info)) return 0;
    return snprintf(text, size, " [pc+0x%zx]", static_cast<const char*>(pc) - static_cast<const char*>(info.dli_fbase));
}

#define CUEMU_APPEND(...) n += snprintf(error + n, sizeof error - n, __VA_ARGS__)
static size_t begin_report() {
    failed = true;
    size_t n = 0;
    CUEMU_APPEND("kernel %s, block (%u, %u, %u)", launch.name, block->index.x, block->index.y, block->index.z);
    if (current) CUEMU_APPEND(", thread (%u, %u, %u)", current->index.x, current->index.y, current->index.z);
    return CUEMU_APPEND(": ");
}

// Ends the launch with an error, from the scheduler or from a fibre, which then has to leave. The first error is kept.
static __attribute__((noinline, format(printf, 2, 3))) void complain(const void* pc, const char* format, ...) {
    if (failed) return;
    size_t n = begin_report();
    va_list list;
    va_start(list, format);
    n += vsnprintf(error + n, sizeof error / 2 - n, format, list);
    va_end(list);
    append_pc(error + n, sizeof error - n, pc);
}

[[noreturn]] static void leave() {  // a fibre, never to be resumed
    current->context.switch_to(scheduler);
    __builtin_unreachable();
}

// As complain(), from a fibre.
[[noreturn]] static __attribute__((noinline, format(printf, 2, 3))) void fail_at(const void* pc, const char* format, ...) {
    size_t n = begin_report();
    va_list list;
    va_start(list, format);
    n += vsnprintf(error + n, sizeof error / 2 - n, format, list);
    va_end(list);
    append_pc(error + n, sizeof error - n, pc);
    leave();
}
// A return address may belong to the line after the call.
static inline const void* before(const void* return_address) { return static_cast<const char*>(return_address) - 1; }
static __attribute__((noinline)) const void* here() {
    asm volatile("");  // keeps calls from being merged
    return before(__builtin_return_address(0));
}
#define CUEMU_FAIL(...) cuemu::fail_at(cuemu::here(), __VA_ARGS__)

static void wait_as(State state, const char* name, unsigned mask, void* pc) {
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

// Posts `operand` and returns once all lanes of `mask` that have not exited arrived under that mask; the
// last to arrive has called `complete` on everyone's operands, which live on the lanes' own stacks.
static __attribute__((noinline)) void collective(const char* name, unsigned mask, void* operand, Complete complete) {
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

static __attribute__((noinline)) void barrier() {
    if (++block->at_barrier == block->alive)
        release_barrier();
    else
        wait_as(AT_BARRIER, "__syncthreads", ~0u, __builtin_return_address(0));
}

// A kernel, which takes one struct by value. The Python driver adds an Entry for each to the preprocessed source.
struct Entry { void (*call)(const void* params); uint64_t params_bytes; };
template <class Params>
constexpr uint64_t bytes_of(void (*)(Params)) { return sizeof(Params); }
template <auto KERNEL>
struct Call;
template <class Params, void (*KERNEL)(Params)>
struct Call<KERNEL> {
    static void with(const void* params) { KERNEL(*static_cast<const Params*>(params)); }
};

// Since sm_70 nobody waits for exited threads, so an exit may complete what the others wait for.
static void fibre_main() {
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

static void report_deadlock(const std::vector<Block*>& running) {
    block = running.front();
    size_t n = begin_report();
    CUEMU_APPEND("deadlock, no thread can go on:");
    for (const Block* of : running) {
        if (of != block) CUEMU_APPEND("\n  and in block (%u, %u, %u):", of->index.x, of->index.y, of->index.z);
        n = describe_threads(*of, n);
    }
}

}  // namespace cuemu
