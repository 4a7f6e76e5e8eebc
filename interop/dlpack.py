"""DLPack arrays, by its path of version 0.1: import from `moeblaze_cupy.dlpack`."""

from moeblaze_cupy.dlpack import exporter, import_array, is_dlpack

__all__ = ["exporter", "import_array", "is_dlpack"]
