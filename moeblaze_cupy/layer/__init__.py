"""The MoE layer: forward and backward, from a call to its launches in order.

`api` and `backward_api` hold the public functions, the other modules what they configure and launch. This folder
may import `dispatch`, `rows`, `gemm`, `fp8` and what these may. It touches no framework but through `cuda`.
"""
