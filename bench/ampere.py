"""The portable kernels on a Hopper beside the fastest kernel that cuBLASLt has for Ampere, on the same products.

python -m bench.ampere --out FILE.json

cuBLAS multiplies by wgmma on a Hopper, so that its times say nothing about mma.sync. cuBLASLt still has its kernels for
Ampere there. This program runs its algorithms, tiles, pipeline depths and swizzles in a random order for a few seconds
on the dense product of a layer, rows contiguous and split evenly over the experts. It keeps the fastest whose name is
of compute capability 8.0. The portable kernels compute the same product with gathered rows, activation and sums, with
the shared memory of this card and of others. Shares are of mma.sync on operands in registers, in TF32 of half of that.
"""

import argparse
import ctypes
import functools
import itertools
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import cases, inputs, kernel_times, kernels, measure, mma, table

CASES = ("conf5", "qwen30b")
SHARED_KIB = {"this card": None, "A100": 163, "RTX 4090, 5090, L40S": 99}  # what a block may have
SEARCH_SECONDS = 4.0  # of a product's algorithms
BUSY_SECONDS, TIMED_SECONDS = 0.2, 0.4  # of a row, before it is timed and while it is
MOST_SLOWER = 1.25  # a first call that takes so many times the best one's time ends a candidate
TOLERANCE = {"bf16": 0.02, "tf32": 0.002}  # of the relative norm to float64; an operand is rounded to 8 and 10 bits
# Numbers of cublasLt.h: data and compute types, then attributes of a product, of a layout and of an algorithm.
TYPES = {"bf16": (14, 68, torch.bfloat16), "tf32": (0, 77, torch.float32)}
TRANSPOSE_A, TRANSPOSE_B = 3, 4
BATCH, BATCH_STRIDE = 5, 6
SWIZZLES, TILES, CUSTOM, STAGES = 2, 6, 7, 13  # what an algorithm can do
TILE, SWIZZLE, CUSTOM_OPTION, STAGE = 1, 4, 5, 6  # what is chosen
MOST_VALUES = 512


class _Answer(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


def _loaded() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded."""
    torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    found = re.search(r"/\S*libcublasLt\.so\S*", Path("/proc/self/maps").read_text())
    if found is None:
        raise RuntimeError("bench.ampere: expected that torch loads libcublasLt")
    return ctypes.CDLL(found[0])


class Dense:
    """One batched product a @ b in cuBLASLt, whose algorithms can be called one by one."""

    def __init__(self, kind: str, a: torch.Tensor, b: torch.Tensor):
        self.type, self.compute, dtype = TYPES[kind]
        self.a, self.b, self.library = a, b, _loaded()
        self.out = torch.empty(len(a), a.shape[1], b.shape[2], device="cuda", dtype=dtype)
        self.workspace = torch.empty(2**25, device="cuda", dtype=torch.uint8)
        self.handle, self.product = ctypes.c_void_p(), ctypes.c_void_p()
        self._do("Create", ctypes.byref(self.handle))
        self._do("MatmulDescCreate", ctypes.byref(self.product), self.compute, 0)
        # Matrices are column-major there: the transposed result is the product of b's and a's transposes.
        for attribute, matrix in ((TRANSPOSE_A, b), (TRANSPOSE_B, a)):
            if matrix.stride(2) != 1:
                self._set("MatmulDescSetAttribute", self.product, attribute, ctypes.c_int(1))
        self.layouts = [self._layout(matrix) for matrix in (b, a, self.out)]
        ends = slice(None, None, len(a) - 1)
        self.want = a[ends].double() @ b[ends].double()

    def _do(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.library, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"bench.ampere: cublasLt{name}: expected status 0, got {status}")

    def _set(self, name: str, of: Any, attribute: int, value: Any) -> None:
        self._do(name, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _layout(self, matrix: torch.Tensor) -> ctypes.c_void_p:
        stored = matrix if matrix.stride(2) == 1 else matrix.transpose(1, 2)
        layout, (_, rows, columns) = ctypes.c_void_p(), stored.shape
        sizes = ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(stored.stride(1))
        self._do("MatrixLayoutCreate", ctypes.byref(layout), self.type, *sizes)
        self._set("MatrixLayoutSetAttribute", layout, BATCH, ctypes.c_int(len(stored)))
        self._set("MatrixLayoutSetAttribute", layout, BATCH_STRIDE, ctypes.c_int64(stored.stride(0)))
        return layout

    def _able(self, algorithm: Any, attribute: int) -> list[int]:
        values, written = (ctypes.c_int * MOST_VALUES)(), ctypes.c_size_t()
        size = ctypes.c_size_t(ctypes.sizeof(values))
        get = self.library.cublasLtMatmulAlgoCapGetAttribute
        status = get(ctypes.byref(algorithm), attribute, values, size, ctypes.byref(written))
        return [] if status else list(values)[: written.value // 4]

    def algorithms(self) -> Iterator[Any]:
        """Every configuration that serves this product."""
        types = (self.compute, 0, *[self.type] * 4)
        ids, found = (ctypes.c_int * MOST_VALUES)(), ctypes.c_int()
        self._do("MatmulAlgoGetIds", self.handle, *types, MOST_VALUES, ids, ctypes.byref(found))
        for each in ids[: found.value]:
            algorithm = (ctypes.c_uint64 * 8)()
            if self.library.cublasLtMatmulAlgoInit(self.handle, *types, each, ctypes.byref(algorithm)):
                continue
            tiles, stages = (self._able(algorithm, attribute) or [0] for attribute in (TILES, STAGES))
            swizzles, options = (range(1 + min([2, *self._able(algorithm, a)])) for a in (SWIZZLES, CUSTOM))
            for chosen in itertools.product(tiles, stages, options, swizzles):
                configured, answer = (ctypes.c_uint64 * 8)(*algorithm), _Answer()
                for attribute, value in zip((TILE, STAGE, CUSTOM_OPTION, SWIZZLE), chosen, strict=True):
                    number = ctypes.c_int(value)
                    self.library.cublasLtMatmulAlgoConfigSetAttribute(
                        ctypes.byref(configured), attribute, ctypes.byref(number), ctypes.c_size_t(4)
                    )
                b, a, out = self.layouts
                check = self.library.cublasLtMatmulAlgoCheck
                refused = check(
                    self.handle, self.product, b, a, out, out, ctypes.byref(configured), ctypes.byref(answer)
                )
                if not refused and answer.workspace <= self.workspace.numel():
                    yield configured

    def call(self, algorithm: Any) -> int:
        """Its status: some configurations are refused only here."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        b, a, out = (ctypes.c_void_p(each.data_ptr()) for each in (self.b, self.a, self.out))
        of_b, of_a, of_out = self.layouts
        workspace = ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(self.workspace.numel())
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status: int = self.library.cublasLtMatmul(
            self.handle, self.product, ctypes.byref(one), b, of_b, a, of_a, ctypes.byref(zero), out, of_out, out,
            of_out, ctypes.byref(algorithm), *workspace, stream,
        )  # fmt: skip
        return status

    def name(self, algorithm: Any) -> str:
        """Of its kernel."""
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.call(algorithm)
            torch.cuda.synchronize()
        longest, _, _ = max(kernel_times.on_gpu(found.events()), key=lambda event: event[2] - event[1])
        names = re.findall(r"(?:cutlass_|sm)\d+_\w+|\w+gemm\w*", longest)
        return names[0] if names else longest

    def error(self, algorithm: Any) -> float:
        """Relative norm of the first and the last matrix against float64; infinite if the call is refused."""
        self.out.fill_(torch.nan)
        if self.call(algorithm):
            return float("inf")
        ends = self.out[:: len(self.out) - 1].double()
        return float((ends - self.want).norm() / self.want.norm())


def fastest(kind: str, dense: Dense) -> tuple[Callable[[], int], str, int]:
    """The fastest kernel for Ampere, its name, and how many right configurations ran."""
    clock, end, ran = measure.DeviceClock(), time.monotonic() + SEARCH_SECONDS, []
    best = float("inf")
    algorithms = list(dense.algorithms())
    random.Random(0).shuffle(algorithms)  # the slowest come first, and would take all the time
    for algorithm in algorithms:
        if time.monotonic() > end:
            break
        if not dense.error(algorithm) < TOLERANCE[kind]:
            continue  # some return without an error and without a result
        before = clock()
        clock.run(functools.partial(dense.call, algorithm))
        seconds = clock() - before
        best = min(best, seconds)
        if seconds < MOST_SLOWER * best:
            before = clock()
            clock.run(measure.in_a_row([functools.partial(dense.call, algorithm)] * 4), 4)
            ran.append((clock() - before, algorithm))
    names = []
    for _, algorithm in sorted(ran, key=lambda each: each[0]):
        names.append(dense.name(algorithm))
        if re.match(r"cutlass_80_tensorop|sm80|ampere", names[-1]):
            return functools.partial(dense.call, algorithm), names[-1], len(ran)
    raise RuntimeError(f"bench.ampere: expected a kernel of cuBLASLt for compute capability 8.0, got {names}")


def rate(call: Callable[[], object], flops: int) -> float:
    """TFLOP/s of calls back to back."""
    _, once = measure.keep_busy(call, BUSY_SECONDS)
    return flops / measure.back_to_back_seconds(call, once, TIMED_SECONDS) / 1e12


def rows_of(case: cases.LayerCase, kind: str) -> Iterator[dict]:
    """A row for each product: cuBLASLt's kernel, and the portable one with the shared memory of each card."""
    dtype = TYPES[kind][2]
    made = inputs.layer_inputs(case, dtype=dtype)
    kernel = kernels.Kernels(case, made, tf32=kind == "tf32")
    limits = replace(kernel.limits, tier="sm80")
    for entry in kernels.GEMMS:
        row: dict[str, Any] = {"case": case.name, "kind": kind, "product": entry}
        flops = kernels.gemm_work(case, entry).flops
        call, row["kernel"], row["configurations"] = fastest(
            kind, Dense(kind, *kernels.dense_operands(case, entry, dtype=dtype))
        )
        row["cublas"] = rate(call, flops)
        del call
        for card, kib in SHARED_KIB.items():
            kernel.limits = replace(limits, shared_bytes_per_block=kib * 1024) if kib else limits
            kernel.calls = kernel.configured()
            if entry not in ("up_fwd", "down_fwd"):
                kernel.calls["down_bwd"]()  # what later products read
            kernel.calls[entry]()
            row[f"{card}, error"] = kernel.error(entry)
            assert row[f"{card}, error"] < TOLERANCE[kind], f"{row}: a wrong result gets no time"
            row[card] = rate(kernel.calls[entry], flops)
        yield row
        measure.release()


def text(rows: list[dict], ceiling: float) -> str:
    """A table of shares of mma.sync in percent."""
    head = ["case", "in", "product", "TFLOP/s", "cuBLASLt, %", *(f"{card}, %" for card in SHARED_KIB)]
    lines = [head]
    for row in rows:
        most = ceiling / (2 if row["kind"] == "tf32" else 1)
        shares = [f"{100 * row[name] / most:.0f}" for name in ("cublas", *SHARED_KIB)]
        lines.append([row["case"], row["kind"], row["product"], table.number(row["this card"]), *shares])
    return "\n".join(table.aligned(lines, 3))


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ampere", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--commit", help="names the commit if there is no git")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    ceiling, rows = mma.ceiling(), []
    for name, kind in itertools.product(CASES, TYPES):
        for row in rows_of(cases.LAYERS[name], kind):
            rows.append(row)
            measure.write_record(measure.record(args.commit, ceiling=ceiling, rows=rows), args.out)
            print(row, flush=True)
    print(text(rows, ceiling["mma_tflops"]))


if __name__ == "__main__":
    main()
