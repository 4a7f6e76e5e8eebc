"""Self-tests of the CPU emulator: what it computes, and which mistakes it reports."""

import platform
import time

import numpy as np
import pytest

from moeblaze_cupy.cuda.structs import Params
from moeblaze_cupy.reference.numerics import to_tf32
from tests.emulator import COMPILER, EmulatorError, build, engine_of, own_sources, preprocess_with, run_compiler

if COMPILER is None:
    pytest.skip("g++ is not installed", allow_module_level=True)
if platform.system() != "Linux":
    pytest.skip("the emulator needs Linux", allow_module_level=True)

PREAMBLE = """
#include "common.cuh"
extern __shared__ __align__(1024) unsigned char dynamic_shared[];
"""


class Kernels:
    """Kernels of a source of their own: (parameters in C++, body) by name. A body has its parameters as variables."""

    def __init__(self, kernels, **macros):
        self.order, self.tables, text = {}, {}, PREAMBLE
        for name, (parameters, body) in kernels.items():
            declared = [parameter.rsplit(maxsplit=1) for parameter in parameters.split(", ")]
            kinds = {"pointers": [], "int64": [], "int32": []}
            for kind, parameter in declared:
                kinds["pointers" if kind.endswith("*") else {"int": "int32"}.get(kind, kind)].append(parameter)
            self.order[name] = [parameter for _, parameter in declared]
            self.tables[name] = table = Params(f"{name}_params", **{k: tuple(names) for k, names in kinds.items()})
            types = {parameter: kind for kind, parameter in declared}
            fields = "".join(f"{types[field.name]} {field.name}; " for field in table.fields)
            names = ", ".join(field.name for field in table.fields)
            # Reported line numbers count from the body's first line.
            text += (
                f"struct {table.struct} {{ {fields} }};\n{table.assertions()}"
                f'extern "C" __global__ void {name}(const __grid_constant__ {table.struct} params) {{\n'
                f"const auto& [{names}] = params;\n#line 1\n{body}\n}}\n"
            )
        self.module = build("selftest.cu", macros, source_text=text)

    def launch(self, name, grid, block, args, **options):
        values = dict(zip(self.order[name], args, strict=True))
        self.module.launch(name, grid, block, self.tables[name], values, **options)


def one_kernel(parameters, body, **macros):
    return Kernels({"kernel": (parameters, body)}, **macros)


def to_bf16(values):
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


BLOCK_SUM = """
    float* partial = reinterpret_cast<float*>(dynamic_shared);
    partial[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
        BARRIER
    }
    if (threadIdx.x == 0) out[blockIdx.x] = partial[0];
"""


@pytest.mark.parametrize("macros", [{}, {"CUEMU_UCONTEXT": 1}], ids=["assembly", "ucontext"])
@pytest.mark.parametrize("seed", [0, 1])
def test_syncthreads_reduction(macros, seed):
    module = one_kernel("const float* x, float* out", BLOCK_SUM, BARRIER="__syncthreads();", **macros)
    x = np.random.default_rng(0).integers(-50, 50, (5, 256)).astype(np.float32)
    out = np.zeros(5, np.float32)
    module.launch("kernel", 5, 256, [x, out], shared_mem=1024, seed=seed)
    np.testing.assert_array_equal(out, x.sum(1))


def test_some_thread_order_shows_a_missing_barrier():
    module = one_kernel("const float* x, float* out", BLOCK_SUM, BARRIER="")
    x, out = np.ones((1, 256), np.float32), np.zeros(1, np.float32)
    results = set()
    for seed in range(4):
        module.launch("kernel", 1, 256, [x, out], shared_mem=1024, seed=seed)
        results.add(out[0])
    assert results != {256.0}


def test_indices_and_overloads():
    module = one_kernel(
        "int64* out, int64* other, int64 big, int64 negative",
        """
        const int64 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const int64 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
        out[block * 24 + thread] = block * 100 + thread;
        if (block == 0 && thread == 0) {
            const int small = -7;
            other[0] = max(negative, big) + min(small, 3) + max(5u, 6u) + static_cast<int64>(max(0.5f, 2.f));
            other[1] = __popc(0xf0u) + 10 * __ffs(0x8) + 100 * __clz(1) + 10000 * (__float_as_uint(1.f) == 0x3f800000u);
            const uint4 v = make_uint4(1, 2, 3, 4);
            other[2] = v.x + v.w + sizeof(v) + alignof(float2);
        }
        """,
    )
    out, other = np.zeros((24, 24), np.int64), np.zeros(3, np.int64)
    module.launch("kernel", (2, 3, 4), (4, 3, 2), [out, other, 2**40, -5])
    np.testing.assert_array_equal(out, np.arange(24)[:, None] * 100 + np.arange(24))
    assert other.tolist() == [2**40 - 7 + 6 + 2, 4 + 40 + 3100 + 10000, 1 + 4 + 16 + 8]


def test_shuffles():
    module = one_kernel(
        "const float* x, float* f, int64* l",
        """
        const int lane = threadIdx.x;
        const float v = x[lane];
        f[lane] = __shfl_sync(0xffffffffu, v, lane * 5);
        f[32 + lane] = __shfl_up_sync(0xffffffffu, v, 3);
        f[64 + lane] = __shfl_down_sync(0xffffffffu, v, 3, 8);
        f[96 + lane] = __shfl_xor_sync(0xffffffffu, v, 9);
        f[128 + lane] = __shfl_sync(0xffffffffu, v, 2, 4);
        l[lane] = __shfl_xor_sync(0xffffffffu, (1LL << 40) * lane, 1);
        l[32 + lane] = __shfl_xor_sync(0xffffffffu, lane, 1);
        """,
    )
    lane = np.arange(32)
    x = lane.astype(np.float32) + 0.5
    f, longs = np.zeros((5, 32), np.float32), np.zeros((2, 32), np.int64)
    module.launch("kernel", 1, 32, [x, f, longs])
    sources = [lane * 5 % 32, np.where(lane < 3, lane, lane - 3), np.where(lane % 8 < 5, lane + 3, lane)]
    sources += [lane ^ 9, lane // 4 * 4 + 2]
    np.testing.assert_array_equal(f, x[np.array(sources)])
    np.testing.assert_array_equal(longs, [(lane ^ 1) << 40, lane ^ 1])


def test_votes_match_and_reductions():
    module = one_kernel(
        "const int* x, unsigned* out",
        """
        const int lane = threadIdx.x, v = x[lane];
        const unsigned all = 0xffffffffu;
        out[lane] = __ballot_sync(all, v > 0);
        out[32 + lane] = __match_any_sync(all, v);
        out[64 + lane] = __reduce_max_sync(all, v);
        out[96 + lane] = __reduce_max_sync(all, static_cast<unsigned>(v));
        out[128 + lane] = __reduce_min_sync(all, v);
        out[160 + lane] = __reduce_add_sync(all, v);
        out[192 + lane] = __any_sync(all, v == 3) + 2 * __all_sync(all, v < 100) + 4 * __all_sync(all, v > 0);
        const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;  // two groups wait at the same time
        out[224 + lane] = __ballot_sync(half, v > 0);
        """,
    )
    x = np.random.default_rng(1).integers(-4, 5, 32).astype(np.int32)
    out = np.zeros((8, 32), np.uint32)
    module.launch("kernel", 1, 32, [x, out])

    def bits(lanes):
        return (lanes.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum().astype(np.uint32)

    positive = bits(x > 0)
    np.testing.assert_array_equal(out[0], np.full(32, positive))
    np.testing.assert_array_equal(out[1], [bits(x == v) for v in x])
    for row, value in zip(out[2:6], [x.max(), x.view(np.uint32).max(), x.min(), x.sum()], strict=True):
        np.testing.assert_array_equal(row, np.full(32, np.int64(value) & 0xFFFFFFFF))
    np.testing.assert_array_equal(out[6], np.full(32, (x == 3).any() + 2))
    np.testing.assert_array_equal(out[7], np.repeat([positive & 0xFFFF, positive & 0xFFFF0000], 16))


def test_atomics_and_static_shared_poison():
    module = one_kernel(
        "int* sum, unsigned* bits, unsigned* poison",
        """
        __shared__ unsigned first[4];
        if (threadIdx.x == 0) poison[blockIdx.x] = first[3] & reinterpret_cast<unsigned*>(dynamic_shared)[0];
        __syncthreads();
        first[threadIdx.x % 4] = reinterpret_cast<unsigned*>(dynamic_shared)[0] = 0;
        atomicAdd(sum, 2);
        atomicOr(bits, 1u << (threadIdx.x % 8));
        """,
    )
    total, bits, poison = np.zeros(1, np.int32), np.zeros(1, np.uint32), np.zeros(3, np.uint32)
    module.launch("kernel", 3, 40, [total, bits, poison], shared_mem=16)
    assert total[0] == 240 and bits[0] == 0xFF
    np.testing.assert_array_equal(poison, np.full(3, 0xFFFFFFFF))


def test_conversions_match_numpy():
    module = one_kernel(
        "const float* x, unsigned* bf16, unsigned* fp16, float* back, int64 n",
        """
        for (int64 i = threadIdx.x; i < n; i += blockDim.x) {
            bf16[i] = cvt_bf16x2(x[i], 1.f);
            fp16[i] = cvt_fp16x2(x[i], 1.f);
            back[i] = cvt_f32_from_fp16(static_cast<unsigned short>(fp16[i]));
        }
        """,
    )
    rng = np.random.default_rng(2)
    special = [0, -0.0, np.inf, -np.inf, 65504, 65519.9, 65520, 2**-14, 2**-24, 2**-25, 3 * 2**-25, 1 + 2**-11, 1e-40]
    x = np.concatenate([special, rng.standard_normal(4000) * 2.0 ** rng.integers(-30, 18, 4000)]).astype(np.float32)
    bf16, fp16, back = np.zeros(x.size, np.uint32), np.zeros(x.size, np.uint32), np.zeros(x.size, np.float32)
    module.launch("kernel", 1, 64, [x, bf16, fp16, back, x.size])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(fp16 & 0xFFFF, expected.view(np.uint16))
    np.testing.assert_array_equal(back, expected.astype(np.float32))
    np.testing.assert_array_equal(bf16 & 0xFFFF, to_bf16(x))
    assert {*(fp16 >> 16)} == {0x3C00} and {*(bf16 >> 16)} == {0x3F80}
    nan, words = np.full(1, np.nan, np.float32), np.zeros(2, np.uint32)
    module.launch("kernel", 1, 1, [nan, words[:1], words[1:], np.zeros(1, np.float32), 1])
    assert (words & 0xFFFF).tolist() == [0x7FFF, 0x7FFF]


# One warp, D (16x16) = A (16x16) * B (16x16). K-major: A is stored (m, k) and B (n, k), as mma.row.col
# reads them. MN-major: A is stored (k, m) and B (k, n), which the transposing load turns.
WARP_MMA = """
    const int lane = threadIdx.x;
    for (int i = lane; i < 32; i += 32) {
        cp_async_16(shared_address(dynamic_shared) + i * 16, a + i * 8, 16);
        cp_async_16(512 + i * 16, b + i * 8, 16);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    unsigned fa[4], fb[4];
    const int row = lane % 8, matrix = lane / 8;
#if A_MN
    ldmatrix_x4_trans(fa, (row + matrix / 2 * 8) * 32 + matrix % 2 * 16);
#else
    ldmatrix_x4(fa, (row + matrix % 2 * 8) * 32 + matrix / 2 * 16);
#endif
#if B_MN
    ldmatrix_x4_trans(fb, 512 + (row + matrix % 2 * 8) * 32 + matrix / 2 * 16);
#else
    ldmatrix_x4(fb, 512 + (row + matrix / 2 * 8) * 32 + matrix % 2 * 16);
#endif
    for (int tile = 0; tile < 2; ++tile) {
        float acc[4] = {1.f, 1.f, 1.f, 1.f};
        MMA(acc, fa, fb[2 * tile], fb[2 * tile + 1]);
        for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 16 + tile * 8 + lane % 4 * 2 + i % 2] = acc[i];
    }
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("a_mn", [0, 1])
@pytest.mark.parametrize("b_mn", [0, 1])
def test_ldmatrix_and_mma_match_numpy(dtype, a_mn, b_mn):
    parameters = "const unsigned short* a, const unsigned short* b, float* d"
    module = one_kernel(parameters, WARP_MMA, MMA=f"mma_{dtype}", A_MN=a_mn, B_MN=b_mn)
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 16, 16)).astype(np.float32)
    if dtype == "bf16":
        a_bits, b_bits = to_bf16(a), to_bf16(b)
        a, b = from_bf16(a_bits), from_bf16(b_bits)
    else:
        a, b = a.astype(np.float16), b.astype(np.float16)
        a_bits, b_bits = a.view(np.uint16), b.view(np.uint16)
    expected = 1 + a.astype(np.float64) @ b.astype(np.float64)
    a_bits, b_bits = a_bits.T if a_mn else a_bits, b_bits if b_mn else b_bits.T
    d = np.zeros((16, 16), np.float32)
    module.launch("kernel", 1, 32, [np.ascontiguousarray(a_bits), np.ascontiguousarray(b_bits), d], shared_mem=1024)
    np.testing.assert_allclose(d, expected, rtol=1e-5, atol=1e-5)


def test_tf32_fragments_and_rounding_match_numpy():
    """Lanes load their words of A (16, 8) and of B (8, 8), in the order of the PTX ISA; mma_tf32 reads 10 bits."""
    body = """
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    float* shared = reinterpret_cast<float*>(dynamic_shared);
    for (int i = threadIdx.x; i < 128; i += 32) shared[i] = a[i], shared[128 + i % 64] = b[i % 64];
    __syncwarp();
    unsigned fa[4], fb[2];
    for (int i = 0; i < 4; ++i) fa[i] = load_shared_4(((g + i % 2 * 8) * 8 + t + i / 2 * 4) * 4);
    for (int i = 0; i < 2; ++i) fb[i] = load_shared_4(512 + ((t + i * 4) * 8 + g) * 4);
    float acc[4] = {};
    if (ROUNDS)
        for (int i = 0; i < 4; ++i) fa[i] = round_tf32(fa[i]), fb[i % 2] = i < 2 ? round_tf32(fb[i]) : fb[i % 2];
    mma_tf32(acc, fa, fb[0], fb[1]);
    for (int i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = acc[i];
    """
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 8)).astype(np.float32), rng.standard_normal((8, 8)).astype(np.float32)
    cut = [(v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for v in (a, b)]
    for rounds, (left, right) in ((0, cut), (1, (to_tf32(a), to_tf32(b)))):
        d = np.zeros((16, 8), np.float32)
        module = one_kernel("const float* a, const float* b, float* d", body, ROUNDS=rounds)
        module.launch("kernel", 1, 32, [a, b, d], shared_mem=1024)
        np.testing.assert_allclose(d, left.astype(np.float64) @ right.astype(np.float64), rtol=1e-5, atol=1e-6)


def test_fragment_registers_follow_the_ptx_isa():
    module = one_kernel(
        "unsigned* out",
        """
        const int lane = threadIdx.x;
        unsigned short* cells = reinterpret_cast<unsigned short*>(dynamic_shared);
        for (int i = lane; i < 256; i += 32) cells[i] = i;  // cell c of row r of matrix m holds 64m + 8r + c
        __syncwarp();
        unsigned r[4], t[4];
        ldmatrix_x4(r, lane * 16);
        ldmatrix_x4_trans(t, lane * 16);
        for (int m = 0; m < 4; ++m) out[lane * 8 + m] = r[m], out[lane * 8 + 4 + m] = t[m];
        """,
    )
    out = np.zeros((32, 8), np.uint32)
    module.launch("kernel", 1, 32, [out], shared_mem=512)
    lane, matrix = np.arange(32)[:, None], np.arange(4) * 64
    row, pair = lane // 4, lane % 4 * 2
    straight = [matrix + row * 8 + pair + half for half in (0, 1)]
    turned = [matrix + (pair + half) * 8 + row for half in (0, 1)]
    np.testing.assert_array_equal(out[:, :4], straight[0] | straight[1] << 16)
    np.testing.assert_array_equal(out[:, 4:], turned[0] | turned[1] << 16)


CP_ASYNC = """
    const int lane = threadIdx.x;
    for (int stage = 0; stage < 2; ++stage) {
        cp_async_16((stage * 32 + lane) * 16, x + (stage * 32 + lane) * 4, lane < 16 ? 16 : lane < 24 ? 8 : 0);
        COMMIT
    }
    WAIT
    __syncthreads();
    const float* staged = reinterpret_cast<const float*>(dynamic_shared);
    for (int i = lane; i < 256; i += 32) out[i] = staged[i];
"""


@pytest.mark.parametrize(
    "commit, wait, arrived",
    [
        ("cp_async_commit();", "cp_async_wait<0>();", (True, True)),
        ("cp_async_commit();", "cp_async_wait<1>();", (True, False)),
        ("cp_async_commit();", "", (False, False)),
        ("", "cp_async_wait<0>();", (False, False)),
    ],
    ids=["wait0", "wait1", "no_wait", "no_commit"],
)
def test_cp_async_arrives_at_the_wait(commit, wait, arrived):
    module = one_kernel("const float* x, float* out", CP_ASYNC, COMMIT=commit, WAIT=wait)
    x = np.random.default_rng(4).standard_normal((2, 32, 4)).astype(np.float32)
    out = np.zeros_like(x)
    module.launch("kernel", 1, 32, [x, out], shared_mem=1024)
    expected = x.copy()
    expected[:, 16:, 2:] = 0
    expected[:, 24:] = 0
    expected[~np.array(arrived)] = np.nan
    np.testing.assert_array_equal(out, expected)


def test_exited_threads_are_not_waited_for():
    module = one_kernel(
        "int* out",
        """
        if (threadIdx.x % 32 >= 20 || threadIdx.x >= 64) return;
        __syncthreads();
        out[threadIdx.x] = __reduce_add_sync(0xffffffffu, 1);
        if (threadIdx.x >= 32) return;  // the rest already waits, or will
        __syncthreads();
        out[threadIdx.x] += 100;
        """,
    )
    for seed in range(3):
        out = np.zeros((2, 32), np.int32)
        module.launch("kernel", 1, 100, [out], seed=seed)
        np.testing.assert_array_equal(out[:, :20], np.broadcast_to([[120], [20]], (2, 20)))
        assert not out[:, 20:].any()


MISTAKES = [
    (
        "if (threadIdx.x != 5) __syncthreads();\nelse __syncwarp();",
        r"kernel kernel0, block \(0, 0, 0\): deadlock(.|\n)* 63 thread\(s\).*__syncthreads at selftest.cu:1"
        r"(.|\n)* 1 thread\(s\).*\(5, 0, 0\).*__syncwarp of mask 0xffffffff at selftest.cu:2",
    ),
    ("if (threadIdx.x < 48) __syncwarp(); else __ballot_sync(~0u, 1);", "warp 1 mixes.*__syncwarp.*__ballot_sync"),
    ("__syncwarp(1);", "__syncwarp: mask 0x00000001 lacks the calling lane 1 at selftest.cu:1"),
    ("unsigned r[4];\nif (threadIdx.x != 40) ldmatrix_x4(r, 0);", "ldmatrix: all 32 lanes must take part"),
    ("unsigned r[4];\nldmatrix_x4(r, 8);", "ldmatrix_x4: shared address 8 is not 16-byte aligned.*selftest.cu:2"),
    ("unsigned r[4];\nldmatrix_x4(r, 16 * threadIdx.x);", "shared address 512, the launch gave 512.*selftest.cu:2"),
    ("cp_async_16(0, out + 1, 16);", "cp_async_16: global address .* not 16-byte aligned.*selftest.cu:1"),
    ("load_global_16(out + 64);", "load_global_16: 16 bytes at .* outside every array argument.*selftest.cu:1"),
    ("store_global_16(out + 2, make_uint4(0, 0, 0, 0));", "store_global_16: global address .* not 16-byte"),
    ("shared_address(out);", "shared_address: .* is not in shared memory"),
    ("dynamic_shared[512] = 1;", "dynamic shared memory was written at byte 512, the launch gave 512"),
    ("if (threadIdx.x == 3) __trap();", r"thread \(3, 0, 0\): __trap at selftest.cu:1"),
    ("\n*reinterpret_cast<volatile int*>(64) = 1;", "invalid access to address 0x40 .*selftest.cu:2"),
    ("out[0] = reinterpret_cast<uint2*>(out + 1)->x;", "undefined behaviour.* selftest.cu:1"),
    ("__shared__ int few[4];\nfew[threadIdx.x] = 1;\nout[0] = few[out[1]];", "undefined behaviour.*selftest.cu:2"),
    ("out[0] = 5 / out[1];", "division by zero"),
    ("out[64] = 1;", r"out \(int32 \(64,\)\): 4 guard bytes changed past its end, the nearest at byte 256"),
    ("out[-2] = 1;", "4 guard bytes changed before its start, the nearest at byte -5"),
]


@pytest.mark.parametrize("number", range(len(MISTAKES)))
def test_mistakes_are_reported(number):
    # All in one source: one compilation.
    module = Kernels({f"kernel{i}": ("int* out", body) for i, (body, _) in enumerate(MISTAKES)})
    out = np.zeros(64, np.int32)
    with pytest.raises(EmulatorError, match=MISTAKES[number][1]):
        module.launch(f"kernel{number}", 1, 64, [out], shared_mem=512)
    assert not out.any()  # a failed launch changes nothing


def test_a_launch_after_an_error_starts_clean():
    module = one_kernel("int* out", "if (out[0]) threadIdx.x ? __syncthreads() : __syncwarp(); out[1] = 7;")
    bad, good = np.array([1, 0], np.int32), np.array([0, 0], np.int32)
    with pytest.raises(EmulatorError, match="deadlock"):
        module.launch("kernel", 1, 64, [bad])
    module.launch("kernel", 1, 64, [good])
    assert good.tolist() == [0, 7]


def test_kernels_load_the_precompiled_header(tmp_path):
    """Without it a source takes several times as long to compile, and nothing else tells."""
    engine = engine_of(own_sources(), [])
    (tmp_path / "empty.cu").touch()
    run_compiler([*preprocess_with(engine), "-Winvalid-pch", "-Werror", "empty.cu", "-o", "empty.ii"], tmp_path)
    assert f'pch_preprocess "{engine}' in (tmp_path / "empty.ii").read_text()


def test_a_replaced_file_of_the_engine_is_compiled():
    with pytest.raises(EmulatorError, match="#error replaced"):
        build("selftest.cu", source_text=PREAMBLE, headers={"ptx_sm80.cc": "#error replaced"})


def test_parameters():
    add = """
        for (int64 i = threadIdx.x; i < n; i += 32) y[i] += x[i] + (optional ? optional[0] : 0.f);
    """
    many = {f"a{i}": 2**40 - i for i in range(20)} | {f"b{i}": -i for i in range(11)}
    parameters = ", ".join(["int64* out", *(f"int64 a{i}" for i in range(20)), *(f"int b{i}" for i in range(11))])
    body = "".join(f"out[{i}] = {name};" for i, name in enumerate(many))
    module = Kernels(
        {"add": ("const float* x, float* y, const float* optional, int64 n", add), "many": (parameters, body)}
    )
    x = np.arange(8, dtype=np.float32)
    module.launch("add", 1, 32, [x, x, None, 8])  # one array given twice is one array
    np.testing.assert_array_equal(x, 2 * np.arange(8))
    y = np.zeros(4, np.float32)
    module.launch("add", 1, 32, [(x, 16), y, x, np.int64(4)])
    np.testing.assert_array_equal(y, x[4:])
    out = np.zeros(31, np.int64)
    module.launch("many", 1, 1, [out, *many.values()])
    assert out.tolist() == list(many.values())
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    for args, message in [
        ([x, y, None, y], "n is array.*, expected an int"),
        ([x, 5, None, 4], "y is 5, expected an array or None"),
        ([x, y, None, 2**63], "n is 9223372036854775808: "),
        ([x[::2], y, None, 4], "x must be a C-contiguous array"),
        ([x[:6], x[2:], None, 4], "x and y overlap without being equal"),
        ([x, frozen, None, 4], "y .* is read-only and was written"),
    ]:
        with pytest.raises(EmulatorError, match=message):
            module.launch("add", 1, 32, args)
    values = {"x": x, "y": y, "optional": None}
    table = module.tables["add"]
    for wrong, message in [(values, r"missing or unknown parameters \['n'\]"), (values | {"m": 1}, "['m', 'n']")]:
        with pytest.raises(EmulatorError, match=message):
            module.module.launch("add", 1, 32, table, wrong)
    with pytest.raises(EmulatorError, match="its struct has 32 bytes, add_params 24"):
        module.module.launch("add", 1, 32, Params("add_params", pointers=("x", "y", "optional")), values)
    with pytest.raises(EmulatorError, match=r"(?s)failed:.*selftest.cu:1"):
        one_kernel("int64 n", "undeclared();")


@pytest.mark.parametrize(
    "fields",
    [
        "const int* x; const int* y; int64 m; int n, o;",  # one more, where the padding was
        "const int* x; const int* y; int64 m, l; int n;",
        "const int* y; const int* x; int64 m; int n;",  # in another order
        "const int* x; const int* y; int n; int64 m;",
        "const int* x; const int* y; int64 m; short n; int rest;",  # narrower
        "const int* x; const int* z; int64 m; int n;",  # of another name
    ],
)
def test_a_table_of_another_layout_does_not_compile(fields):
    table = Params("S", pointers=("x", "y"), int64=("m",), int32=("n",))
    with pytest.raises(
        EmulatorError, match=r"static assertion failed: moeblaze_cupy/cuda/structs\.py|has no member|names provided"
    ):
        build("selftest.cu", source_text=f"{PREAMBLE}struct S {{ {fields} }};\n{table.assertions()}")


def test_speed_of_a_gemm_tile():
    module = one_kernel(
        "float* out",
        """
        for (int i = threadIdx.x; i < 8192; i += 128) reinterpret_cast<unsigned*>(dynamic_shared)[i] = 0x3f803f80u;
        __syncthreads();
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        float acc[4][8][4] = {};  // a 64x64 quarter per warp
        for (int k = 0; k < 4; ++k) {
            unsigned a[4][4], b[4][4];
            const unsigned part = lane % 16 * 128 + k * 32 + lane / 16 * 16;
            for (int i = 0; i < 4; ++i) ldmatrix_x4(a[i], (warp % 2 * 64 + i * 16) * 128 + part);
            for (int i = 0; i < 4; ++i) ldmatrix_x4(b[i], 16384 + (warp / 2 * 64 + i * 16) * 128 + part);
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 8; ++j) mma_bf16(acc[i][j], a[i], b[j / 2][j % 2], b[j / 2][2 + j % 2]);
        }
        out[threadIdx.x] = acc[3][7][3];
        """,
    )
    out = np.zeros(128, np.float32)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        module.launch("kernel", 1, 128, [out], shared_mem=32768)
        seconds.append(time.perf_counter() - start)
    np.testing.assert_array_equal(out, np.full(128, 64))
    assert min(seconds) < 0.05
