"""Index lists from the chosen experts: the launches of `kernels_cu/dispatch/` and their configuration.

May import `cuda`, `frameworks`, `types`, `checks` and `reference`. Touches no framework but through `cuda`.
"""
