"""Launch geometry of quantization; see `launch_config`."""

from moeblaze_cupy.cuda.launch_config import GROUP_COLUMNS

SAVED_WARPS = 8  # warps per block of saved_fp8.cu
SAVED_BLOCKS = 16  # blocks per multiprocessor
QUANTIZE_THREADS = 256  # threads per block of quantize.cu
QUANTIZE_VECTORS = 4  # vectors of 8 elements of a row that a thread has in registers
QUANTIZE_TILE = 128  # rows and columns of a weight per block

CONSTANTS = {
    "quantize.cu": {"THREADS": QUANTIZE_THREADS, "ROW_VECTORS": QUANTIZE_VECTORS, "TILE": QUANTIZE_TILE},
    "saved_fp8.cu": {"WARPS": SAVED_WARPS, "GROUP_COLUMNS": GROUP_COLUMNS},
}


def quantize_threads(d: int) -> int:
    """Returns the threads of a row of d elements in quantize.cu: a power of two, QUANTIZE_VECTORS each if possible."""
    threads = 32
    while threads < 1024 and threads * QUANTIZE_VECTORS * 8 < d:
        threads *= 2
    return threads
