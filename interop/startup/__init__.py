"""The folder that `python -m moeblaze_cupy run` puts in front of PYTHONPATH, for Python to run `sitecustomize.py`.

It holds nothing else that an `import` could find by a short name. May import only the standard library at start-up, and
`interop.transformers` or `interop.megatron` once a program has imported transformers or Megatron-Core. Touches
`sys.meta_path` and what it imports then.
"""
