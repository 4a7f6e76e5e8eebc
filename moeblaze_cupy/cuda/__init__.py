"""The way from kernel sources to launches: structs, variants, launch records, device limits.

May import `frameworks`, and nothing of the features. The only folder that touches CuPy's compiler and launcher
and the driver's functions.
"""
