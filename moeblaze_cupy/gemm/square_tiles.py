"""Row tiles of 192 rows, beside dispatch's of 128, for products in square tiles: kernels_cu/gemm/square_tiles.cu."""

from moeblaze_cupy.cuda import loader
from moeblaze_cupy.cuda.runtime import Launch, Runtime
from moeblaze_cupy.dispatch.launches import EXPERT_TOKEN_OFFSETS, LISTS, IndexLayout, Lists
from moeblaze_cupy.frameworks import Buffer
from moeblaze_cupy.gemm import config as gemm_config

ROW_TILES = LISTS.index("row_tiles")


def configure(index: IndexLayout) -> Launch:
    """Configures the one launch of a pass; its products in square tiles share the list."""
    return Launch(
        loader.entry("square_tiles.cu", "square_tiles"),
        (1,),
        gemm_config.TILES_THREADS,
        ("expert_token_offsets", "row_tiles"),
        {"num_experts": index.num_experts},
        why=("lists row tiles of 192 rows, for products in tiles of 192 x 192",),
    )


def listed(run: Runtime, launch: Launch | None, index: IndexLayout, lists: Lists) -> tuple[Lists, Buffer | None]:
    """Returns the lists with these row tiles in place of dispatch's, and their memory; without `launch` as they are."""
    if launch is None:
        return lists, None
    made = run.empty((index.max_square_tiles + 1, 2), "int32")
    run.launch(launch, lists[EXPERT_TOKEN_OFFSETS], made.ptr)
    return (*lists[:ROW_TILES], made.ptr, *lists[ROW_TILES + 1 :]), made  # type: ignore[return-value]  # as many as before
