"""The memory of a layer, by its path of version 0.1: import from `moeblaze_cupy.tools.memory`."""

from moeblaze_cupy.tools.memory import LayerShape, RoutedLayer, routed_layer

__all__ = ["LayerShape", "RoutedLayer", "routed_layer"]
