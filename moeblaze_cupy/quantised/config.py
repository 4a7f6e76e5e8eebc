"""Launch geometry of weights in four and eight bits; see `launch_config`."""

DECODE_THREADS = 256  # threads per block of decode.cu
DECODE_STEPS = 8  # steps of eight elements that a thread loads before it stores the first
ENCODE_THREADS = 128  # threads per block of encode.cu

CONSTANTS = {
    "decode.cu": {"THREADS": DECODE_THREADS, "STEPS": DECODE_STEPS},
    "encode.cu": {"THREADS": ENCODE_THREADS},
}
