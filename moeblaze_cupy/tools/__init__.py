"""Tools that need no GPU: dry runs, memory, variants, and the subcommands of `python -m moeblaze_cupy`.

May import everything but `interop`. Nothing else imports it. Touches standard output.
"""
