"""The exchange of rows, by its path of version 0.1: import from `moeblaze_cupy.interop.parallel`."""

from moeblaze_cupy.interop.parallel import ExpertGroup, Route, collect, exchange

__all__ = ["ExpertGroup", "Route", "collect", "exchange"]
