"""Grouped products of the layer: tiles, variants, panels, biases; the launches of `kernels_cu/gemm/`.

May import `rows` and what that may. Touches no framework but through `cuda`.
"""
