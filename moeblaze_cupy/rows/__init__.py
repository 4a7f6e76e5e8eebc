"""Rows by index: sums over the slots of a token, here and in the memory of other GPUs.

It may import `dispatch` and what that may. It touches the memory of other GPUs by addresses that callers give.
"""
