"""Launch geometry of weights in four and eight bits; see `launch_config`."""

DECODE_THREADS = 256  # threads per block of decode.cu
DECODE_STEPS = 8  # steps of eight elements that a thread loads before it stores the first
E4M3_STEPS = 8  # steps of 16 elements of a thread of decode_e4m3.cu, in the packed order
E4M3_PARTS = 16  # blocks that look for a group's largest scale
E4M3_TILE = 128, 256  # rows and columns that a block transposes
ENCODE_THREADS = 128  # threads per block of encode.cu

CONSTANTS = {
    "decode.cu": {"THREADS": DECODE_THREADS, "STEPS": DECODE_STEPS},
    "decode_e4m3.cu": {
        "THREADS": DECODE_THREADS,
        "STEPS": E4M3_STEPS,
        "PARTS": E4M3_PARTS,
        "TILE_ROWS": E4M3_TILE[0],
        "TILE_COLUMNS": E4M3_TILE[1],
    },
    "encode.cu": {"THREADS": ENCODE_THREADS},
}
