"""The ceiling of the portable kernels: TFLOP/s of mma.sync in bf16 on operands that stay in registers."""

import statistics
from pathlib import Path

import numpy as np
import torch

import moeblaze_cupy.kernels_cu
from bench import measure

WARPS, BLOCKS = 8, 2  # warps of a block, and blocks per multiprocessor
TILES = 2, 4  # operands of a warp: as many fragments of 16 x 16, and of 16 x 8; a product of each pair is one mma.sync
WORDS = 4 * TILES[0] + 2 * TILES[1]  # of two bf16, of a lane
FLOPS = 2 * 16 * 8 * 16 * TILES[0] * TILES[1] * WARPS  # of a block and step
STEPS, CHECKED_STEPS = 20_000, 16
TOLERANCE = 1e-4  # of sums in float32
PARAMETERS = "const unsigned* operands, float* sums, int steps"
# All sums of a warp are independent of one another, and all are written in the end, so that none is left out.
BODY = f"""
    unsigned long long thread = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned a[{TILES[0]}][4], b[{TILES[1]}][2];
    float d[{TILES[0]}][{TILES[1]}][4] = {{}};
    const unsigned* words = operands + thread * {WORDS};
    #pragma unroll
    for (int i = 0; i < {TILES[0]}; ++i)
        for (int w = 0; w < 4; ++w) a[i][w] = words[4 * i + w];
    #pragma unroll
    for (int j = 0; j < {TILES[1]}; ++j)
        for (int w = 0; w < 2; ++w) b[j][w] = words[{4 * TILES[0]} + 2 * j + w];
    for (int step = 0; step < steps; ++step) {{
        #pragma unroll
        for (int i = 0; i < {TILES[0]}; ++i) {{
            #pragma unroll
            for (int j = 0; j < {TILES[1]}; ++j) mma_bf16(d[i][j], a[i], b[j][0], b[j][1]);
        }}
    }}
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < {TILES[0]}; ++i) {{
        #pragma unroll
        for (int j = 0; j < {TILES[1]}; ++j) sum += d[i][j][0] + d[i][j][1] + d[i][j][2] + d[i][j][3];
    }}
    sums[thread] = sum;
"""


def source() -> str:
    """CUDA source of the kernel `mma_sync`."""
    header = Path(moeblaze_cupy.kernels_cu.__path__[0], "common", "ptx_sm80.cuh").read_text()
    bounds = f"__launch_bounds__({32 * WARPS}, {BLOCKS})"
    return f'{header}\nextern "C" __global__ void {bounds} mma_sync({PARAMETERS}) {{{BODY}}}\n'


def operands(blocks: int, device: str) -> torch.Tensor:
    """Random bf16 of unit scale, (blocks, warps, lanes, words, 2): zeros would run faster at the power limit."""
    generator = torch.Generator(device).manual_seed(0)
    shape = blocks, WARPS, 32, WORDS, 2
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def expected(made: torch.Tensor, steps: int) -> torch.Tensor:
    """The sums of all elements of a warp's products in float64, (blocks, warps).

    Lane 4 g + t holds the elements 2 t, 2 t + 1, 2 t + 8 and 2 t + 9 along the dimension that is summed over: of the
    rows g and g + 8 of the first operand, in the order of `mma_bf16`, and of the column g of the second.
    """
    by_lane = made.double().unflatten(2, (8, 4))  # (blocks, warps, g, t, words, 2)
    first, second = by_lane.split((4 * TILES[0], 2 * TILES[1]), dim=4)
    of_rows = first.unflatten(4, (TILES[0], 2, 2)).sum((2, 4, 6))  # over g, fragments, and rows g and g + 8
    of_columns = second.unflatten(4, (TILES[1], 2)).sum((2, 4))
    return steps * (of_rows * of_columns).sum((2, 3, 4))


def check(made: torch.Tensor, sums: torch.Tensor, steps: int) -> None:
    """Raises AssertionError for sums (threads,) of other products."""
    want = expected(made, steps)
    error = float((sums.double().view(*want.shape, 32).sum(2) - want).norm() / want.norm())
    assert error <= TOLERANCE, f"mma.sync: relative error {error:.2g}; a wrong result gets no time"


def ceiling() -> dict[str, float]:
    """TFLOP/s, and FLOP per multiprocessor and clock where the driver tells the clock. Needs a GPU of 8.0 or later."""
    from moeblaze_cupy.cuda import loader

    cupy, processors = loader.import_cupy(), torch.cuda.get_device_properties(0).multi_processor_count
    blocks = BLOCKS * processors
    kernel = cupy.RawModule(code=source(), options=("-std=c++17",)).get_function("mma_sync")
    made, sums = operands(blocks, "cuda"), torch.empty(blocks * WARPS * 32, device="cuda")
    arrays = cupy.asarray(made.view(torch.int32)), cupy.asarray(sums)

    def run(steps: int = STEPS) -> None:
        kernel((blocks,), (32 * WARPS,), (*arrays, np.int32(steps)))

    torch.cuda.synchronize()  # CuPy's stream and torch's are both the default one, unless a user says otherwise
    run(CHECKED_STEPS)
    check(made, sums, CHECKED_STEPS)
    state, _ = measure.keep_busy(run)
    clock, times = measure.DeviceClock(), []
    for _ in range(12):
        before = clock()
        clock.run(run)
        times.append(clock() - before)
    rate = blocks * STEPS * FLOPS / statistics.median(times)
    found = {"mma_tflops": rate / 1e12}
    if state.get("sm_mhz"):
        found["mma_flops_per_processor_and_clock"] = rate / processors / state["sm_mhz"] / 1e6
    return found
