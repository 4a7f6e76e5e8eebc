"""CUDA sources, in the folders of their features. Headers are included by name, which no two folders have."""
