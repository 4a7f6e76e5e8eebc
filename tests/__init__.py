"""Tests, in a folder for each feature. Those of several features, and what tests share, are here.

`torch/` and `transformers/` have no `__init__.py`: where this folder is on the path, they would be imported instead of
the libraries of these names.
"""
