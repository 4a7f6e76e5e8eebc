"""Rows by index: sums over the slots of a token, here and in the memory of other GPUs.

May import `dispatch` and what that may. Touches the memory of other GPUs by addresses that callers give.
"""
