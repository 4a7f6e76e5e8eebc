"""Layer shapes to measure.

conf1-6: the paper's Table 1 (h = 4d); tab2: Table 2 with h = 512; the rest are production layers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCase:
    name: str
    L: int
    d: int
    h: int
    E: int
    k: int

    @property
    def forward_flops(self) -> int:
        """Of a SwiGLU layer: three products of 2*L*k*d*h."""
        return 6 * self.L * self.k * self.d * self.h


LAYERS = {
    case.name: case
    for case in (
        LayerCase("conf1", 65536, 512, 2048, 4, 1),
        LayerCase("conf2", 65536, 1024, 4096, 8, 2),
        LayerCase("conf3", 65536, 1024, 4096, 16, 4),
        LayerCase("conf4", 32768, 512, 2048, 16, 4),
        LayerCase("conf4t", 32768, 2048, 8192, 16, 4),
        LayerCase("conf5", 16384, 1024, 4096, 16, 4),
        LayerCase("conf6", 8192, 2048, 8192, 8, 4),
        LayerCase("tab2_32k", 32768, 256, 512, 128, 4),
        LayerCase("tab2_128k", 131072, 256, 512, 128, 4),
        LayerCase("sonic7b", 24576, 1536, 256, 128, 8),
        LayerCase("qwen30b", 32768, 2048, 768, 128, 8),
        LayerCase("readme", 32768, 4096, 1024, 128, 8),
        LayerCase("olmoe", 32768, 2048, 1024, 64, 8),
        LayerCase("mixtral", 8192, 4096, 14336, 8, 2),
        LayerCase("dsv3", 16384, 7168, 2048, 256, 8),
    )
}
