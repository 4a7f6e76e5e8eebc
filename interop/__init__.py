"""The layer in other libraries: `torch/`, and upon it `parallel/`, `fsdp/` and `transformers/`.

Each folder may import the library that it is named after and all of moeblaze_cupy but `tools`. The modules
beside the folders are former paths.
"""
