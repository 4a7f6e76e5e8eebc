"""Grouped products of the layer: tiles, variants, panels, biases; the launches of `kernels_cu/gemm/`.

It may import `rows` and what that may. It touches no framework but through `cuda`.
"""
