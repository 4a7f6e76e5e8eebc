"""Selections of pairs of a token and an expert, and counts: capacity, expert choice, token rounding, balance.

May import what `dispatch` may, and `calls`. Touches no framework but through `cuda`.
"""
