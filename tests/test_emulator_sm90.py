"""Self-tests of the emulator's Hopper instructions: what they compute, and which mistakes are reported."""

import platform
from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from moeblaze_cupy.cuda.structs import Params
from tests.emulator import COMPILER, EmulatedTensorMap, EmulatorError, build

if COMPILER is None or platform.system() != "Linux":
    pytest.skip("the emulator needs Linux and g++", allow_module_level=True)

PREAMBLE = """
#include "ptx_sm90.cuh"
typedef unsigned short half;
struct Params {
    TensorMap box;
    const half *a, *b;
    half* out;
    float* sums;
    int n;
};
extern __shared__ __align__(1024) unsigned char dynamic_shared[];
__device__ void wait(unsigned barrier, unsigned parity) {
    while (!mbarrier_try_wait(barrier, parity)) {}
}
__device__ void copy_out(half* out, int count) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = reinterpret_cast<const half*>(dynamic_shared)[i];
}
"""
TABLE = Params("Params", maps=("box",), pointers=("a", "b", "out", "sums"), int32=("n",))
SEEDS = range(6)

# Initialises one mbarrier, at the name's address.
BARRIER = """
    __shared__ uint64 storage[4];
    const unsigned barrier = shared_address(storage);
    if (threadIdx.x == 0) { mbarrier_init(barrier, COUNT); fence_mbarrier_init(); }
    __syncthreads();
"""


def barrier(count):
    return BARRIER.replace("COUNT", str(count))


def source(kernels):
    """Kernels (body, blocks of a cluster) of one source; reported line numbers count from each body's first line."""
    return PREAMBLE + "".join(
        f'extern "C" __global__ void __cluster_dims__({cluster}) {name}(const __grid_constant__ Params params) {{\n'
        f"const auto& [box, a, b, out, sums, n] = params;\n#line 1\n{body}\n}}\n"
        for name, (body, cluster) in kernels.items()
    )


LINES = 96  # of a box of 64 columns

KERNELS = {
    # What one thread writes before it arrives, others read after the phase.
    "phases": (
        barrier(64)
        + """
        int* word = reinterpret_cast<int*>(dynamic_shared);
        for (int i = 0; i < 5; ++i) {
            if (threadIdx.x == 32 * (i % 2)) word[i] = i * i;
            mbarrier_arrive(barrier);
            wait(barrier, i & 1);
            if (threadIdx.x == 40) sums[i] = word[i];
        }
        """,
        1,
    ),
    "box": (
        barrier(1)
        + """
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(barrier, 96 * 128);
            tma_load_3d(0, &box, n, 3, 1, barrier);
        }
        WAIT
        copy_out(out, 96 * 64);
        __syncthreads();
        wait(barrier, 0);
        """,
        1,
    ),
    "gathered": (
        barrier(65)
        + """
        for (int i = threadIdx.x; i < 256; i += 64) cp_async_16(i * 16, a + i * 8, 16);
        cp_async_mbarrier_arrive(barrier);
        if (threadIdx.x == 0) mbarrier_arrive(barrier);
        WAIT
        copy_out(out, 256 * 8);
        __syncthreads();
        wait(barrier, 0);
        """,
        1,
    ),
    # Each block fetches half of a box for both, says so to the other, and sends it a number.
    "pair": (
        barrier(2)
        + """
        const unsigned rank = blockIdx.x & 1, other = rank ^ 1;
        const unsigned sent = shared_address(storage + 1), told = shared_address(storage + 2);
        if (threadIdx.x == 0) { mbarrier_init(sent, 1); fence_mbarrier_init(); mbarrier_arrive_expect_tx(sent, 4); }
        cluster_arrive();
        cluster_wait();
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(barrier, 2 * 96 * 128);
            mbarrier_arrive_cluster(cluster_address(barrier, other));
            tma_load_multicast_3d(rank * 96 * 128, &box, 64 * rank, 0, 0, barrier, 3);
            store_async(cluster_address(told, other), 100 + rank, cluster_address(sent, other));
        }
        wait(barrier, 0);
        wait(sent, 0);
        copy_out(out + blockIdx.x * 2 * 96 * 64, 2 * 96 * 64);
        if (threadIdx.x == 0) sums[blockIdx.x] = static_cast<float>(reinterpret_cast<int&>(storage[2]));
        cluster_arrive();
        cluster_wait();
        """,
        2,
    ),
    # Four warps in pairs, and the block's registers.
    "named": (
        """
        threadIdx.x < 128 ? setmaxnreg_dec<56>() : setmaxnreg_inc<200>();
        int* words = reinterpret_cast<int*>(dynamic_shared);
        const int warp = threadIdx.x / 32;
        if (warp % 2 == 0) words[threadIdx.x] = threadIdx.x;
        named_barrier(1 + warp / 2, 64);
        if (warp % 2 == 1) sums[threadIdx.x] = words[threadIdx.x - 32];
        """,
        1,
    ),
    "matrices": (
        """
        const unsigned lane = threadIdx.x, pair = 2 * lane | 2 * lane + 1 << 16;
        stmatrix_x4(lane * 16, pair, pair + 0x00400040u, pair + 0x00800080u, pair + 0x00c000c0u);
        __syncwarp();
        for (int i = lane; i < 256; i += 32) out[i] = reinterpret_cast<const half*>(dynamic_shared)[i];
        """,
        1,
    ),
}

# 64 x 256 of a warpgroup over `n` stages of 64 k: A and B come by plain copies in the swizzled layout, in two buffers.
PRODUCT = """
    const uint64 stride = uint64(1024 >> 4) << 32 | uint64(1) << 62, block = uint64(8192 >> 4) << 16;
    float acc[32][4];
    for (int stage = 0; stage < n; ++stage) {
        const unsigned base = stage % 2 * 40960;
        if (stage > 0) { BEFORE_REUSE }
        for (int i = threadIdx.x; i < 512; i += 128)
            reinterpret_cast<uint4*>(dynamic_shared + base)[i] = load_global_16(a + (stage * 512 + i) * 8);
        for (int i = threadIdx.x; i < 2048; i += 128)
            reinterpret_cast<uint4*>(dynamic_shared + base + 8192)[i] = load_global_16(b + (stage * 2048 + i) * 8);
        __syncthreads();
        wgmma_fence();
        for (int kk = 0; kk < 4; ++kk) {
            const uint64 from_a = base + kk * (A_T ? 2048 : 32), from_b = base + 8192 + kk * (B_T ? 2048 : 32);
            WGMMA<A_T, B_T>(acc, from_a >> 4 | block | stride, from_b >> 4 | block | stride, stage > 0 || kk > 0);
        }
        wgmma_commit();
    }
    LAST_WAIT
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    for (int j = 0; j < 32; ++j)
        for (int i = 0; i < 4; ++i) sums[(row + i / 2 * 8) * 256 + j * 8 + lane % 4 * 2 + i % 2] = acc[j][i];
"""
WGMMAS = {"bfloat16": "wgmma_bf16", "float16": "wgmma_fp16"}
FORMS = [(dtype, a_t, b_t) for dtype in WGMMAS for a_t in (0, 1) for b_t in (0, 1)]


def product(dtype="bfloat16", a_t=0, b_t=1, before_reuse="wgmma_wait<1>(); __syncthreads();", last="wgmma_wait<0>();"):
    body = PRODUCT
    for name, text in {"A_T": a_t, "B_T": b_t, "WGMMA": WGMMAS[dtype]}.items():
        body = body.replace(name, str(text))
    return body.replace("BEFORE_REUSE", before_reuse).replace("LAST_WAIT", last), 1


def with_wait(name, wait):
    body, cluster = KERNELS[name]
    assert "WAIT" in body
    return body.replace("WAIT", wait), cluster


@cache
def module():
    kernels = dict(KERNELS)
    for name in ("box", "gathered"):
        kernels[name] = with_wait(name, "wait(barrier, 0);")
        kernels[f"{name}_unawaited"] = with_wait(name, "")
        kernels[f"{name}_wrong_parity"] = with_wait(name, "wait(barrier, 1);")
    kernels |= {f"product_{dtype}_{a_t}{b_t}": product(dtype, a_t, b_t) for dtype, a_t, b_t in FORMS}
    kernels |= {f"mistake{i}": mistake[:2] for i, mistake in enumerate(MISTAKES)}
    return build("selftest_sm90.cu", {}, source_text=source(kernels))


def launch(name, *, grid=1, threads=64, box=None, seed=0, clusters_at_once=1, **values):
    values = dict.fromkeys(TABLE.pointers) | {"box": box or tensor(np.random.default_rng(0))[1], "n": 0} | values
    module().launch(name, grid, threads, TABLE, values, 98304, seed, clusters_at_once)


def swizzled(lines):
    """Lines of 64 16-bit elements: 16-byte chunk c of line l at chunk c ^ (l % 8)."""
    chunks = lines.reshape(-1, 8, 8)
    order = np.arange(8) ^ (np.arange(len(chunks))[:, None] % 8)
    return np.take_along_axis(chunks, order[:, :, None], axis=1).reshape(lines.shape)


def tensor(rng, depth=3, rows=120, columns=136):
    values = rng.integers(1, 2**15, (depth, rows, columns)).astype(np.uint16)
    return values, EmulatedTensorMap(values, (columns - 8, rows, depth), (columns, rows * columns), (64, LINES, 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_phases(seed):
    sums = np.zeros(5, np.float32)
    launch("phases", sums=sums, seed=seed)
    assert sums.tolist() == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("column", [0, 64, 100, -8])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_box_arrives_swizzled_with_zeros_outside(column, seed):
    values, box = tensor(np.random.default_rng(0))
    out = np.zeros((LINES, 64), np.uint16)
    launch("box", box=box, out=out, n=column, seed=seed)
    plain = np.zeros((LINES, 64), np.uint16)
    first, last = max(column, 0), min(column + 64, 128)
    plain[:, first - column : last - column] = values[1, 3 : 3 + LINES, first:last]
    np.testing.assert_array_equal(out, swizzled(plain))


@pytest.mark.parametrize("mistake", ["unawaited", "wrong_parity"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_box_that_is_not_awaited_is_poison(mistake, seed):
    _, box = tensor(np.random.default_rng(0))
    out = np.zeros((LINES, 64), np.uint16)
    launch(f"box_{mistake}", box=box, out=out, seed=seed)
    assert (out == 0xFFFF).any()


def test_cp_async_arrives_on_its_mbarrier():
    a = np.arange(2048).astype(np.uint16)
    for seed in SEEDS:
        out = np.zeros_like(a)
        launch("gathered", a=a, out=out, seed=seed)
        np.testing.assert_array_equal(out, a)
        for mistake in ("unawaited", "wrong_parity"):
            launch(f"gathered_{mistake}", a=a, out=out, seed=seed)
            assert (out == 0xFFFF).any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clusters_at_once", [1, 2])
def test_a_pair_of_blocks(seed, clusters_at_once):
    values, box = tensor(np.random.default_rng(1))
    out, sums = np.zeros((6, 2, LINES, 64), np.uint16), np.zeros(6, np.float32)
    launch("pair", grid=6, box=box, out=out, sums=sums, seed=seed, clusters_at_once=clusters_at_once)
    for block in range(6):
        for half in range(2):
            np.testing.assert_array_equal(out[block, half], swizzled(values[0, :LINES, 64 * half : 64 * half + 64]))
    assert sums.tolist() == [101, 100] * 3


def test_named_barriers_and_registers():
    for seed in SEEDS:
        sums = np.zeros(256, np.float32)
        launch("named", threads=256, sums=sums, seed=seed)
        for warp in (1, 3, 5, 7):
            np.testing.assert_array_equal(sums[32 * warp : 32 * warp + 32], np.arange(32) + 32 * (warp - 1))


def test_stmatrix_follows_the_ptx_isa():
    out = np.zeros(256, np.uint16)
    launch("matrices", threads=32, out=out)
    np.testing.assert_array_equal(out, np.arange(256))


def operands(dtype, a_t, b_t, stages):
    """Random A (64, K), B (K, 256) and how the stages of both lie in shared memory."""
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in ((64, 64 * stages), (64 * stages, 256)))
    a_stages = [part if not a_t else part.T for part in np.split(a, stages, axis=1)]  # (m, k), or (k, m)
    b_stages = [part.T if not b_t else np.concatenate(np.split(part, 4, axis=1)) for part in np.split(b, stages)]
    laid_out = [np.stack([swizzled(np.ascontiguousarray(s).view(np.uint16)) for s in x]) for x in (a_stages, b_stages)]
    return a.astype(np.float64) @ b.astype(np.float64), *laid_out


@pytest.mark.parametrize(("dtype", "a_t", "b_t"), FORMS)
def test_products(dtype, a_t, b_t):
    exact, a, b = operands(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16, a_t, b_t, 3)
    for seed in (0, 1):
        sums = np.full((64, 256), np.nan, np.float32)
        launch(f"product_{dtype}_{a_t}{b_t}", threads=128, a=a, b=b, sums=sums, n=3, seed=seed)
        np.testing.assert_allclose(sums, exact, rtol=1e-5, atol=1e-4)


INIT = """__shared__ uint64 s[2];
const unsigned bar = shared_address(s);
if (threadIdx.x) return;
mbarrier_init(bar, 1);
"""
FENCED = INIT + "fence_mbarrier_init();\n"
WGMMA = "float d[32][4];\nwgmma_fence();\nwgmma_bf16<0, 0>(d, {}, uint64(1) << 62 | uint64(64) << 32, 0);"
GOOD = "uint64(1) << 62 | uint64(64) << 32"
AWAITED = "\nwgmma_commit();\nwgmma_wait<0>();"

# (body, blocks of a cluster, threads, the report)
MISTAKES = [
    (
        INIT + "mbarrier_try_wait(bar + 8, 0);",
        1,
        64,
        "try_wait: the mbarrier at shared address .* is not initialised.*:5",
    ),
    (INIT + "s[0] = 7;\nmbarrier_arrive(bar);", 1, 64, "arrive: the mbarrier .* has been overwritten.*:6"),
    (INIT + "mbarrier_init(bar, 1);", 1, 64, "is initialised already.*:5"),
    (
        INIT + "mbarrier_arrive_expect_tx(bar, 64);\nmbarrier_arrive(bar);",
        1,
        64,
        "phase 0: an arrival beyond its 1.*:6",
    ),
    (
        INIT + "mbarrier_arrive(bar);\nwait(bar, 0);\nwait(bar, 1);",
        1,
        64,
        r"deadlock(.|\n)*try_wait.*parity 1 of mbarrier 0 .*initialised.*:4\) in phase 1, parity 1, lacks 1 of 1 arr",
    ),
    (
        FENCED + "mbarrier_arrive_expect_tx(bar, 12296);\ntma_load_3d(0, &box, 0, 0, 0, bar);\nwait(bar, 0);",
        1,
        64,
        "deadlock(.|\n)*lacks 0 of 1 arrivals and 8 bytes",
    ),
    (
        FENCED + "mbarrier_arrive_expect_tx(bar, 12280);\ntma_load_3d(0, &box, 0, 0, 0, bar);\nwait(bar, 0);",
        1,
        64,
        "phase 0: 8 bytes more have come than were announced.*:7",
    ),
    (INIT + "tma_load_3d(0, &box, 0, 0, 0, bar);", 1, 64, "no fence.mbarrier_init after that of mbarrier 0.*:5"),
    (FENCED + "tma_load_3d(512, &box, 0, 0, 0, bar);", 1, 64, "address 512 is not 1024-byte aligned.*:6"),
    (
        FENCED + "tma_load_3d(95232, &box, 0, 0, 0, bar);",
        1,
        64,
        "bytes at shared address 95232, the launch gave 98304.*:6",
    ),
    (
        FENCED + "tma_load_3d(0, &box, 0, 0, 0, bar);",
        1,
        64,
        "exits while a copy to its shared memory is under way.*:6",
    ),
    (
        FENCED + "tma_load_3d(0, &box, 0, 0, 0, bar);\ntma_load_3d(1024, &box, 0, 0, 0, bar);",
        1,
        64,
        "another copy to shared address 1024 is under way.*:7",
    ),
    (FENCED + "cluster_address(bar, 1);", 1, 64, "mapa: .* in block 1 of a cluster of 1.*:6"),
    (
        FENCED + "mbarrier_arrive(cluster_address(bar, 0));",
        1,
        64,
        "is an address in the cluster, expected the block's own",
    ),
    (
        FENCED + "store_async(cluster_address(bar, 0), 1, cluster_address(bar, 0));",
        1,
        64,
        "a kernel that has no clusters",
    ),
    (
        FENCED
        + "cluster_arrive();\ncluster_wait();\nif (blockIdx.x) {\nmbarrier_arrive_cluster(cluster_address(bar, 0));\n"
        "return;\n}\nwait(bar, 0);\nmbarrier_arrive_cluster(cluster_address(bar, 1));",
        2,
        64,
        "block 1 of the cluster has exited",
    ),
    ("cluster_wait();", 2, 64, "cluster.wait without barrier.cluster.arrive.*:1"),
    ("cluster_arrive();\ncluster_arrive();", 2, 64, "arrive twice without"),
    ("if (threadIdx.x < 32) named_barrier(2, 64);", 1, 64, "deadlock(.|\n)*bar.sync.* 2: 32 of 64 threads are there"),
    (
        "named_barrier(3, threadIdx.x < 32 ? 64 : 32);",
        1,
        64,
        "bar.sync 3: 32 threads here, 64 in those|64 threads here",
    ),
    ("if (threadIdx.x < 96) setmaxnreg_dec<24>();", 1, 128, "only 96 threads of warpgroup 0 call setmaxnreg"),
    ("setmaxnreg_inc<256>();", 1, 384, "the warpgroups ask for 98304 registers"),
    (WGMMA.format("uint64(64) << 32"), 1, 128, "swizzle mode 0 of operand A, expected 1.*:3"),
    (WGMMA.format(f"{GOOD} | 8"), 1, 128, "operand A starts at 128, within a 1024-byte pattern"),
    (WGMMA.format("uint64(1) << 62 | uint64(32) << 32"), 1, 128, "and 512 .stride. of operand A"),
    (WGMMA.format(f"{GOOD} | 6080") + AWAITED, 1, 128, "an operand at shared address .*, the launch gave 98304"),
    (WGMMA.format(GOOD), 1, 128, "exits with products in flight"),
    (WGMMA.format(GOOD).replace("wgmma_fence();", ""), 1, 128, "no wgmma.fence since"),
    (
        WGMMA.format(GOOD) + "\nwgmma_commit();\nd[3][1] = 1.f;\nwgmma_wait<0>();",
        1,
        128,
        "accumulators were written while products were in flight.*:6",
    ),
    (
        WGMMA.format(f"{GOOD} | threadIdx.x / 32 * 64") + AWAITED,
        1,
        128,
        "threads of a warpgroup have different descriptors",
    ),
    (
        f"if (threadIdx.x >= 96) return;\n{WGMMA.format(GOOD)}{AWAITED}",
        1,
        128,
        "deadlock(.|\n)*wgmma.wait_group.* by 96 of the warpgroup's 128 threads",
    ),
    # The first stage's buffer is written again while its products are in flight.
    (product(before_reuse="")[0], 1, 128, "operand [AB] was written before the wait for the product, issued"),
    (product(last="wgmma_wait<1>();")[0], 1, 128, "exits with products in flight"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_are_reported(number):
    _, cluster, threads, report = MISTAKES[number]
    _, box = tensor(np.random.default_rng(0))
    _, a, b = operands(np.float16, 0, 1, 3)
    with pytest.raises(EmulatorError, match=report):
        launch(
            f"mistake{number}", grid=cluster, threads=threads, a=a, b=b, box=box, n=3, sums=np.zeros(2**14, np.float32)
        )


@pytest.mark.parametrize(
    ("change", "report"),
    [
        ({"strides": (132, 132 * 120)}, "expected strides of multiples of 16 bytes"),
        ({"strides": (136, 0)}, "expected strides of multiples of 16 bytes"),
        ({"shape": (128, 0, 3)}, "expected sizes up to 2"),
        ({"box": (64, 257, 1)}, "boxes up to 256"),
        ({"box": (128, 8, 1)}, "lines of at most 128 bytes"),
        ({"box": (64, 8)}, "expected 3 dimensions"),
    ],
)
def test_maps_that_the_driver_refuses(change, report):
    _, box = tensor(np.random.default_rng(0))
    with pytest.raises(ValueError, match=report):
        replace(box, **change)


def test_a_map_off_16_bytes_is_refused():
    _, box = tensor(np.random.default_rng(0))
    address, unpacked = EmulatedTensorMap.unpack(replace(box, offset=32).pack(4096))
    assert address == 4128 and (unpacked.shape, unpacked.strides, unpacked.box) == (box.shape, box.strides, box.box)
    with pytest.raises(ValueError, match="expected an address on 16 bytes"):
        replace(box, offset=8).pack(4096)
