"""Low-rank factors beside the weights of the experts.

May import `gemm` and what that may. Touches no framework but through `cuda` and `frameworks`.
"""
