// CPU stand-in for the CUDA device environment: g++ compiles a kernel source with this file forced in
// front, and cuemu_launch runs it with one fibre per thread, a cluster of blocks after the other or several in turns.
// A fibre runs until it reaches a barrier or a collective that other threads have not reached; races between two such
// points show only under some thread orders, which the launch seed varies.
#pragma once
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#define __CUDA_ARCH__ 800
#define __global__ __attribute__((visibility("default")))
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(blocks) __attribute__((cuemu_cluster(blocks)))  // read by the Python driver
#define __align__(n) __attribute__((aligned(n)))
// thread_local is the one storage class that is legal after `extern` and means static inside a function.
// All fibres share an OS thread, and the library's TLS block then holds shared memory and nothing else.
#define __shared__ thread_local

alignas(1024) thread_local unsigned char dynamic_shared[256 * 1024];

#define CUEMU_VECTOR(T, NAME)                                                            \
    struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                   \
    struct alignas(4 * sizeof(T)) NAME##4 { T x, y, z, w; };                             \
    inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                           \
    inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUEMU_VECTOR(int, int)
CUEMU_VECTOR(unsigned, uint)
CUEMU_VECTOR(float, float)

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
static std::vector<std::unique_ptr<Async>> under_way;
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

// Runs on the signal stack and leaves it by switching to the scheduler, hence SA_NODEFER.
static void on_fault(int signal_number, siginfo_t* info, void* context) {
    if (!current) return static_cast<void>(signal(signal_number, SIG_DFL));
    const void* pc = nullptr;
#if defined(__x86_64__)
    pc = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    pc = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
    if (signal_number == SIGFPE) fail_at(pc, "integer division by zero");
    if (signal_number == SIGSEGV || signal_number == SIGBUS)
        fail_at(pc, "invalid access to address %p (out of bounds, null, or the stack is full)", info->si_addr);
    fail_at(pc, "undefined behaviour: misaligned access, array index, shift count or signed overflow");
}

struct FaultHandlers {
    static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    struct sigaction old_actions[5], action = {};
    stack_t old_stack, stack = {};
    FaultHandlers() {
        static unsigned char memory[64 * 1024];
        stack.ss_sp = memory, stack.ss_size = sizeof memory;
        sigaltstack(&stack, &old_stack);
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 5; ++i) sigaction(SIGNALS[i], &action, &old_actions[i]);
    }
    ~FaultHandlers() {
        for (int i = 0; i < 5; ++i) sigaction(SIGNALS[i], &old_actions[i], nullptr);
        sigaltstack(&old_stack, nullptr);
    }
};

static Range shared_block() {  // this library's TLS: dynamic_shared and every __shared__ variable
    dynamic_shared[0] = 0;      // TLS of a loaded library is allocated at first touch
    Range found = {};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* result) {
            unsigned char* begin = static_cast<unsigned char*>(info->dlpi_tls_data);
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const ElfW(Phdr)& header = info->dlpi_phdr[i];
                if (header.p_type == PT_TLS && begin && begin <= dynamic_shared && dynamic_shared < begin + header.p_memsz)
                    *static_cast<Range*>(result) = {begin, begin + header.p_memsz};
            }
            return 0;
        },
        &found);
    return found;
}

static uint64_t random_number() {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return random_state >> 33;
}

static std::vector<unsigned> numbers(size_t n) {
    std::vector<unsigned> order(n);
    std::iota(order.begin(), order.end(), 0u);
    return order;
}

static void shuffle(std::vector<unsigned>& order) {
    for (size_t i = order.size(); i > 1 && launch.seed; --i) std::swap(order[i - 1], order[random_number() % i]);
}

// The parts of `shared_range` that belong to a block: all but what lies past the launch's dynamic shared memory.
static void swap_shared(Block& with, bool out) {
    unsigned char* const past = dynamic_shared + launch.shared_bytes;
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    const size_t first = past - shared_range.begin, second = shared_range.end - end;
    with.saved.resize(first + second);
    unsigned char *const one = with.saved.data(), *const two = one + first;
    memcpy(out ? one : shared_range.begin, out ? shared_range.begin : one, first);
    memcpy(out ? two : end, out ? end : two, second);
}

static void give_turn(Block& to) {
    if (block == &to) return;
    if (block) swap_shared(*block, true);
    swap_shared(to, false);
    block = &to;
}

// Where a byte of a block's shared memory is now, by its address in shared_range.
static unsigned char* in_block(const Block& of, unsigned char* p) {
    if (&of == block) return p;
    unsigned char* const past = dynamic_shared + launch.shared_bytes;
    unsigned char* const saved = const_cast<unsigned char*>(of.saved.data());
    if (p < past) return saved + (p - shared_range.begin);
    return saved + (past - shared_range.begin) + (p - (dynamic_shared + sizeof dynamic_shared));
}

static void start_block(Block& b, unsigned number, Block* cluster) {
    b.index = {number % grid_dim.x, number / grid_dim.x % grid_dim.y, number / grid_dim.x / grid_dim.y};
    b.cluster = cluster, b.rank = &b - cluster;
    b.alive = threads, b.at_barrier = b.stall = 0;
    b.place = &b - blocks, b.fibres = fibres + b.place * threads;
    give_turn(b);
    memset(shared_range.begin, 0xff, dynamic_shared + launch.shared_bytes - shared_range.begin);
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    memset(end, 0xff, shared_range.end - end);
    for (unsigned first = 0; first < threads; first += 32)
        b.warps[first / 32].alive = ~0u >> (32 - std::min(32u, threads - first)), b.warps[first / 32].num_groups = 0;
    for (unsigned i = 0; i < threads; ++i) {
        Fibre& f = b.fibres[i];
        f.index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / block_dim.x / block_dim.y};
        f.id = i, f.state = READY, f.commits = f.landed = 0, f.block = &b;
        f.copies.clear();
        // Equal stack offsets would put all fibres' hot lines into the same cache sets.
        f.context.start(launch.stacks + (&f - fibres) * STACK_BYTES + PAGE, STACK_BYTES - PAGE - i % 32 * 512, fibre_main);
    }
    if (on_block_start) on_block_start(b);
}

// Without a seed warps go in step. With one, some passes let a warp run as far as it can, and others leave a warp behind,
// which shows missing barriers that lockstep hides.
static bool run_pass(Block& b) {
    static std::vector<unsigned> warp_order, lane_order;
    warp_order = numbers((threads + 31) / 32), lane_order = numbers(32);
    shuffle(warp_order);
    shuffle(lane_order);
    bool progress = false, ran;
    const bool ahead = launch.seed && random_number() % 4 == 0;
    if (b.stall)
        --b.stall;
    else if (launch.seed && random_number() % 16 == 0)
        b.stalled = random_number() % warp_order.size(), b.stall = random_number() % 64;
    for (const unsigned w : warp_order) {
        if (b.stall && w == b.stalled) continue;
        do {
            ran = false;
            for (unsigned i : lane_order) {
                i += 32 * w;
                if (i >= threads || b.fibres[i].state != READY) continue;
                ran = progress = true;
                current = &b.fibres[i];
                scheduler.switch_to(current->context);
                current = nullptr;
                if (failed) return true;
            }
        } while (ran && ahead);
    }
    return progress;
}

// Completes all the work that threads wait for, or under a seed some of it. Returns whether there was any.
static bool complete_awaited() {
    std::vector<unsigned> found;
    bool all_yield = true;
    for (unsigned i = 0; i < under_way.size(); ++i)
        if (under_way[i]->awaited()) found.push_back(i), all_yield = all_yield && under_way[i]->yields();
    if (found.empty()) return false;
    shuffle(found);
    if (launch.seed) found.resize(1 + random_number() % found.size());
    std::vector<std::unique_ptr<Async>> chosen;
    for (const unsigned i : found)
        if (launch.seed || all_yield || !under_way[i]->yields()) chosen.push_back(std::move(under_way[i]));
    under_way.erase(std::remove(under_way.begin(), under_way.end(), nullptr), under_way.end());
    for (const auto& work : chosen)
        if (!failed) work->complete();
    return true;
}

static bool written_outside() {
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    unsigned char* outside = dynamic_shared + (launch.shared_bytes + 1) / 2 * 2;
    if (!memcmp(outside, &OUTSIDE, 2) && !memcmp(outside, outside + 2, end - outside - 2)) return false;
    while (!memcmp(outside, &OUTSIDE, 2)) outside += 2;
    snprintf(error + begin_report(), 200, "dynamic shared memory was written at byte %td, the launch gave %zu",
             outside - dynamic_shared, size_t(launch.shared_bytes));
    return true;
}

// A block's turn: until none of its threads can go on, or under a seed for some passes.
static bool take_turn(Block& b) {
    give_turn(b);
    bool progress = false;
    while (b.alive && run_pass(b)) {
        progress = true;
        if (failed || (launch.seed && random_number() % 8 == 0)) break;
    }
    if (!failed && !b.alive && progress && !written_outside() && on_block_end) on_block_end(b);
    return progress;
}

static void run_grid() {
    const FaultHandlers handlers;
    unsigned char* const end = dynamic_shared + sizeof dynamic_shared;
    unsigned char* const outside = dynamic_shared + (launch.shared_bytes + 1) / 2 * 2;
    std::fill(reinterpret_cast<uint16_t*>(outside), reinterpret_cast<uint16_t*>(end), OUTSIDE);
    block = nullptr;
    under_way.clear();
    const unsigned of_cluster = launch.cluster_blocks;
    std::vector<unsigned> clusters = numbers(size_t(grid_dim.x) * grid_dim.y * grid_dim.z / of_cluster);
    shuffle(clusters);
    std::reverse(clusters.begin(), clusters.end());
    const size_t room = std::min(MAX_BLOCKS, MAX_FIBRES / threads) / of_cluster;
    std::vector<Block*> free_places, running;  // a cluster's first block; blocks
    for (size_t i = 0; i < std::min<size_t>(room, launch.clusters_at_once); ++i) free_places.push_back(blocks + i * of_cluster);
    while (!clusters.empty() || !running.empty()) {
        while (!clusters.empty() && !free_places.empty()) {
            for (unsigned rank = 0; rank < of_cluster; ++rank) {
                start_block(free_places.back()[rank], clusters.back() * of_cluster + rank, free_places.back());
                running.push_back(free_places.back() + rank);
            }
            clusters.pop_back(), free_places.pop_back();
        }
        std::vector<unsigned> order = numbers(running.size());
        shuffle(order);
        bool progress = false;
        for (const unsigned i : order) {
            progress |= take_turn(*running[i]);
            if (failed) return;
        }
        if (!progress || (launch.seed && random_number() % 4 == 0)) progress |= complete_awaited();
        if (failed) return;
        for (Block* b : running)
            if (!progress && b->stall) b->stall = 0, progress = true;
        if (!progress) return report_deadlock(running);
        for (size_t i = 0; i < running.size(); i += of_cluster) {
            const auto first = running.begin() + i;
            if (std::any_of(first, first + of_cluster, [](const Block* b) { return b->alive; })) continue;
            free_places.push_back(*first);
            running.erase(first, first + of_cluster);
            i -= of_cluster;
        }
    }
}

#define CUEMU_EXPORT extern "C" __attribute__((visibility("default")))

// The stacks of a block, each over a page without access; null where memory is short.
CUEMU_EXPORT unsigned char* cuemu_stacks() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* p = mmap(nullptr, MAX_FIBRES * STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) return nullptr;
    for (unsigned i = 0; i < MAX_FIBRES; ++i) mprotect(static_cast<unsigned char*>(p) + i * STACK_BYTES, PAGE, PROT_NONE);
    return static_cast<unsigned char*>(p);
}

// Returns null or an error text. Not reentrant: the driver holds a lock.
CUEMU_EXPORT const char* cuemu_launch(const Launch* description) {
    launch = *description;
    grid_dim = launch.grid, block_dim = launch.block;
    threads = block_dim.x * block_dim.y * block_dim.z;
    random_state = launch.seed;
    failed = false;
    shared_range = shared_block();
    if (!launch.stacks || reinterpret_cast<uintptr_t>(dynamic_shared) % 1024)
        return "the emulator got no stacks, or shared memory off its 1024-byte alignment";
    run_grid();
    return failed ? error : nullptr;
}

// Combines the values of all lanes in lane order and gives each the result.
template <class T>
static __forceinline__ T fold(const char* name, unsigned mask, T value, T (*combine)(T, T)) {
    struct Operand { T value; T (*combine)(T, T); } mine = {value, combine};
    collective(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        const Operand first = *static_cast<Operand*>(operands[__builtin_ctz(lanes)]);
        T total = first.value;
        for (unsigned m = lanes & (lanes - 1); m; m &= m - 1)
            total = first.combine(total, static_cast<Operand*>(operands[__builtin_ctz(m)])->value);
        for (unsigned m = lanes; m; m &= m - 1) static_cast<Operand*>(operands[__builtin_ctz(m)])->value = total;
    });
    return mine.value;
}

// A source lane outside the mask, or exited, gives poison: its value is undefined in CUDA.
template <class T>
static __forceinline__ T exchange(const char* name, unsigned mask, T value, unsigned source) {
    struct Operand { T in, out; unsigned source; } mine = {value, value, source};
    collective(name, mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned m = lanes; m; m &= m - 1) {
            Operand& to = *static_cast<Operand*>(operands[__builtin_ctz(m)]);
            if (lanes >> to.source & 1)
                to.out = static_cast<Operand*>(operands[to.source])->in;
            else
                memset(static_cast<void*>(&to.out), 0xff, sizeof(T));
        }
    });
    return mine.out;
}

}  // namespace cuemu

#define threadIdx (cuemu::current->index)
#define blockIdx (cuemu::block->index)
#define blockDim (cuemu::block_dim)
#define gridDim (cuemu::grid_dim)
#define warpSize 32

static __forceinline__ void __syncthreads() { cuemu::barrier(); }
static __forceinline__ void __syncwarp(unsigned mask = ~0u) {
    cuemu::collective("__syncwarp", mask, nullptr, [](void* const*, unsigned) {});
}
static __forceinline__ void __threadfence() {}
static __forceinline__ void __threadfence_block() {}
static __forceinline__ void __trap() { CUEMU_FAIL("__trap"); }

#define CUEMU_SHUFFLE(NAME, BY, SOURCE)                                               \
    template <class T>                                                                \
    static __forceinline__ T NAME(unsigned mask, T v, BY by, int width = 32) {        \
        const unsigned lane = cuemu::current->id & 31, inner = width - 1;             \
        return cuemu::exchange(#NAME, mask, v, SOURCE);                               \
    }
CUEMU_SHUFFLE(__shfl_sync, int, (lane & ~inner) | (by & inner))
CUEMU_SHUFFLE(__shfl_up_sync, unsigned, (lane & inner) >= by ? lane - by : lane)
CUEMU_SHUFFLE(__shfl_down_sync, unsigned, by <= inner - (lane & inner) ? lane + by : lane)
CUEMU_SHUFFLE(__shfl_xor_sync, int, (lane ^ by) <= (lane | inner) ? lane ^ by : lane)

#define CUEMU_FOLD(NAME, T, VALUE, COMBINED)                                                          \
    static __forceinline__ T NAME(unsigned mask, T v) {                                               \
        return cuemu::fold<T>(#NAME, mask, VALUE, [](T a, T b) { return static_cast<T>(COMBINED); }); \
    }
CUEMU_FOLD(__ballot_sync, unsigned, (v != 0) * (1u << (cuemu::current->id & 31)), a | b)
CUEMU_FOLD(__reduce_or_sync, unsigned, v, a | b)
CUEMU_FOLD(__any_sync, int, v != 0, a | b)
CUEMU_FOLD(__all_sync, int, v != 0, a & b)
CUEMU_FOLD(__reduce_add_sync, unsigned, v, a + b)
CUEMU_FOLD(__reduce_min_sync, unsigned, v, b < a ? b : a)
CUEMU_FOLD(__reduce_max_sync, unsigned, v, a < b ? b : a)
CUEMU_FOLD(__reduce_add_sync, int, v, static_cast<unsigned>(a) + b)
CUEMU_FOLD(__reduce_min_sync, int, v, b < a ? b : a)
CUEMU_FOLD(__reduce_max_sync, int, v, a < b ? b : a)

template <class T>
static __forceinline__ unsigned __match_any_sync(unsigned mask, T v) {
    struct Operand { T value; unsigned peers; } mine = {v, 0};
    cuemu::collective("__match_any_sync", mask, &mine, [](void* const* operands, unsigned lanes) {
        for (unsigned m = lanes; m; m &= m - 1) {
            Operand& to = *static_cast<Operand*>(operands[__builtin_ctz(m)]);
            for (unsigned n = lanes; n; n &= n - 1)
                if (!memcmp(&static_cast<Operand*>(operands[__builtin_ctz(n)])->value, &to.value, sizeof(T)))
                    to.peers |= n & -n;
        }
    });
    return mine.peers;
}

static __forceinline__ unsigned __byte_perm(unsigned low, unsigned high, unsigned chosen) {  // no sign replication
    const unsigned long long bytes = low | static_cast<unsigned long long>(high) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> 8 * (chosen >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
static __forceinline__ int __popc(unsigned v) { return __builtin_popcount(v); }
static __forceinline__ int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static __forceinline__ int __ffs(int v) { return __builtin_ffs(v); }
static __forceinline__ int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static __forceinline__ unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
static __forceinline__ float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
static __forceinline__ int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
static __forceinline__ float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
template <class T>
static __forceinline__ T __ldg(const T* p) { return *p; }

#define CUEMU_ATOMICS(T)                                                                                          \
    static __forceinline__ T atomicAdd(T* p, T v) { T old = *p; __builtin_add_overflow(old, v, p); return old; }  \
    static __forceinline__ T atomicOr(T* p, T v) { T old = *p; *p = old | v; return old; }
CUEMU_ATOMICS(int)
CUEMU_ATOMICS(unsigned)
CUEMU_ATOMICS(unsigned long long)

// Macros: glibc declares functions of some of these names.
#define __expf expf
#define __logf logf
#define __frcp_rn(a) (1.f / static_cast<float>(a))
#define rsqrtf(a) (1.f / sqrtf(a))

#define CUEMU_MIN_MAX(A, B, R)                                                                             \
    static __forceinline__ R min(A a, B b) { return static_cast<R>(b) < static_cast<R>(a) ? b : a; }       \
    static __forceinline__ R max(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? b : a; }
#define CUEMU_MIN_MAX_OF(S, U) \
    CUEMU_MIN_MAX(S, S, S) CUEMU_MIN_MAX(U, U, U) CUEMU_MIN_MAX(S, U, U) CUEMU_MIN_MAX(U, S, U)
CUEMU_MIN_MAX_OF(int, unsigned)
CUEMU_MIN_MAX_OF(long, unsigned long)
CUEMU_MIN_MAX_OF(long long, unsigned long long)
static __forceinline__ float min(float a, float b) { return fminf(a, b); }
static __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
