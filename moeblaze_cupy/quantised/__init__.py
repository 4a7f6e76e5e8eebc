"""Frozen weights in four and eight bits: quantisation, their decoding, and the memory that layers decode to.

May import `calls`, `reference` and `cuda`, and what these may.
"""
