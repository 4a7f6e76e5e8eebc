"""Launch geometry of quantization; see `launch_config`."""

from moeblaze_cupy.cuda.launch_config import GROUP_COLUMNS
from moeblaze_cupy.gemm import config as gemm_config

SAVED_WARPS = 8  # warps per block of saved_fp8.cu
SAVED_BLOCKS = 16  # blocks per multiprocessor
QUANTIZE_THREADS = 256  # threads per block of quantize.cu
QUANTIZE_VECTORS = 4  # vectors of 8 elements of a row that a thread has in registers
QUANTIZE_TILE = 128  # rows and columns of a weight per block

CONSTANTS = {
    "quantize.cu": {"THREADS": QUANTIZE_THREADS, "ROW_VECTORS": QUANTIZE_VECTORS, "TILE": QUANTIZE_TILE},
    "routed_fp8.cu": {"THREADS": QUANTIZE_THREADS, "TILE": QUANTIZE_TILE},
    # A stage of as many bytes is twice as deep as in 16 bits. A consumer also holds fragments of the gathered operand.
    "grouped_wgrad_fp8_sm90.cu": gemm_config.CONSTANTS["grouped_wgrad_sm90.cu"]
    | {"BK": gemm_config.STEP_BYTES, "PRODUCER_REGISTERS": 40, "CONSUMER_REGISTERS": 232},
    "saved_fp8.cu": {"WARPS": SAVED_WARPS, "GROUP_COLUMNS": GROUP_COLUMNS},
}


def quantize_threads(d: int) -> int:
    """Returns the threads of a row of d elements in quantize.cu: a power of two, QUANTIZE_VECTORS each if possible."""
    threads = 32
    while threads < 1024 and threads * QUANTIZE_VECTORS * 8 < d:
        threads *= 2
    return threads
