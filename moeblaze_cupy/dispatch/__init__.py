"""Index lists from the chosen experts: the launches of `kernels_cu/dispatch/` and their configuration.

It may import `cuda`, `frameworks`, `types`, `checks` and `reference`. It touches no framework but through `cuda`.
"""
