"""E4m3: weights, rows and what a layer saves, and the operands of products that multiply it.

May import `gemm` and what that may. Touches no framework but through `cuda` and `frameworks`.
"""
