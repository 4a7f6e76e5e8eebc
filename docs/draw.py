"""The drawings of the documentation, as SVG: `python -m docs.draw`. Lists and orders are computed, not typed."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "moeblaze"  # the same file each time
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyBboxPatch, Rectangle  # noqa: E402

import moeblaze_cupy as mb  # noqa: E402
from moeblaze_cupy.cuda import launch_config, loader  # noqa: E402
from moeblaze_cupy.gemm import config as gemm_config  # noqa: E402
from moeblaze_cupy.tools import dry_run, memory  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "drawings"
INK, FAINT, KERNEL, ARRAY, KEPT = "#222222", "#9a9a9a", "#0b5394", "#eef3f8", "#f9cb9c"
EXPERTS = ("#9fc5e8", "#f9cb9c", "#b6d7a8", "#d5a6bd")


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A white page with one unit per inch, the origin at the top left."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), xticks=(), yticks=())
    axes.spines[:].set_visible(False)
    return figure, axes


def write(axes: Axes, x: float, y: float, text: str, size: float = 9, **style) -> None:
    axes.text(x, y, text, fontsize=size, **{"ha": "center", "va": "center", "color": INK} | style)


def box(axes: Axes, x: float, y: float, w: float, h: float, text: str, color: str = ARRAY, size: float = 9) -> None:
    """A box with its text in the middle; white text on the color of kernels."""
    shape = FancyBboxPatch(
        (x, y), w, h, boxstyle="round,pad=0,rounding_size=0.06", facecolor=color, edgecolor=INK, lw=0.8
    )
    axes.add_patch(shape)
    write(axes, x + w / 2, y + h / 2, text, size, color="white" if color == KERNEL else INK)


def cell(axes: Axes, x: float, y: float, w: float, h: float, text: str, color: str, size: float = 9) -> None:
    axes.add_patch(Rectangle((x, y), w, h, facecolor=color, edgecolor=INK, lw=0.7))
    write(axes, x + w / 2, y + h / 2, text, size)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK, style: str = "-|>"
) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": style, "color": color, "lw": 1, "shrinkA": 0, "shrinkB": 0})


def dispatch() -> Figure:
    """The index lists of five tokens, two choices each, four experts."""
    ids = np.array([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32)
    index = mb.build_dispatch(ids, 4)
    figure, axes = canvas(9.2, 3.9)
    side, left, right, top = 0.42, 0.95, 7.75, 0.75
    write(axes, left + side, 0.3, "ids (L, k)", 10, fontweight="bold")
    write(axes, right + side, 0.3, "token_index_map (L, k)", 10, fontweight="bold")
    for token, choices in enumerate(ids):
        y = top + token * side
        write(axes, left - 0.45, y + side / 2, f"token {token}")
        write(axes, right - 0.45, y + side / 2, f"token {token}")
        for slot, expert in enumerate(choices):
            cell(axes, left + slot * side, y, side, side, str(expert), EXPERTS[expert])
            position = index.token_index_map[token, slot]
            cell(axes, right + slot * side, y, side, side, str(position), EXPERTS[expert])
    start, y = 2.45, 1.4
    write(axes, start + 5 * side, 0.85, "expert_token_indices (L·k,)", 10, fontweight="bold")
    tokens, offsets = index.expert_token_indices, index.expert_token_offsets
    for expert in range(4):
        first, end = offsets[expert], offsets[expert + 1]
        for position in range(first, end):
            x = start + position * side
            write(axes, x + side / 2, y - 0.15, str(position), 7, color=FAINT)
            cell(axes, x, y, side, side, str(tokens[position]), EXPERTS[expert])
        middle = start + (first + end) / 2 * side
        write(axes, middle, y + side + 0.2, f"expert {expert}", 8.5)
        rows = np.nonzero(ids == expert)[0]
        assert sorted(rows) == sorted(tokens[first:end])
    y = 2.75
    write(axes, start + 5 * side, y - 0.25, "expert_token_offsets (E+1,)", 10, fontweight="bold")
    for i, offset in enumerate(offsets):
        cell(axes, start + (2.5 + i) * side, y, side, side, str(offset), "white")
    text = (
        "A product reads row 0 of expert 2's block from token 0: expert_token_indices[5] = 0.\n"
        "The sum over the slots of token 0 reads rows 5 and 7: token_index_map[0] = [5, 7]."
    )
    assert tokens[5] == 0 and index.token_index_map[0].tolist() == [5, 7] and offsets[2] == 5
    write(axes, 4.6, 3.55, text, 9)
    return figure


def data_flow() -> Figure:
    """Arrays and kernels of forward and backward, with shapes."""
    figure, axes = canvas(11.2, 7.65)
    write(axes, 0.2, 0.3, "Forward", 12, ha="left", fontweight="bold")
    write(axes, 0.2, 3.95, "Backward", 12, ha="left", fontweight="bold")
    h, first, second = 0.62, 0.75, 1.7
    columns = (0.2, 1.85, 3.5, 5.2, 6.75, 8.35, 9.85)

    def kernel(x: float, y: float, name: str, w: float = 1.15) -> None:
        box(axes, x, y, w, h, name, KERNEL)

    def array(x: float, y: float, name: str, kept: bool = False, w: float = 1.2) -> None:
        box(axes, x, y, w, h, name, KEPT if kept else ARRAY, 8.5)

    def across(y: float, *ends: tuple[float, float]) -> None:
        """Arrows to the right, in the middle of a row."""
        for start, end in ends:
            arrow(axes, (start, y + h / 2), (end, y + h / 2))

    def down(x: float, start: float, end: float) -> None:
        arrow(axes, (x, start), (x, end))

    x0, x1, x2, x3, x4, x5, x6 = columns
    array(x0, first, "x\n(L, d)")
    kernel(x1, first, "up_fwd\ngathers x")
    array(x2, first, "act(a)·b\n(L·k, h)")
    kernel(x3, first, "down_fwd")
    array(x4, first, "column panel\n(L·k, width)")
    kernel(x5, first, "aggregate\nsums slots")
    array(x6, first, "out\n(L, d)")
    across(first, (1.4, x1), (3.0, x2), (4.7, x3), (6.35, x4), (7.95, x5), (9.5, x6))
    array(x2, second, "a, b\n(L·k, 2h)", True)
    arrow(axes, (3.0, first + h * 0.8), (x2, second + h * 0.3))
    array(x0, second, "ids\n(L, k)")
    kernel(x1, second, "dispatch")
    array(x1 - 0.03, second + 0.95, "index lists\nint32", True)
    across(second, (1.4, x1))
    down(x1 + 0.57, second + h, second + 0.95)
    write(axes, 3.2, second + 0.95 + h / 2, "every kernel that gathers or sums reads them", 8.5, ha="left")
    write(axes, x5 + 0.57, second - 0.0, "weights (L, k)", 8.5)
    arrow(axes, (x5 + 0.57, second - 0.12), (x5 + 0.57, first + h))

    first, second, third = 4.7, 5.65, 6.6
    array(x0, first, "grad_out\n(L, d)")
    kernel(x1, first, "down_bwd\ngathers")
    array(x2, first, "gradients of\na, b: in place")
    kernel(x3, first, "up_bwd")
    array(x4, first, "column panel\n(L·k, width)")
    kernel(x5, first, "aggregate\nsums slots")
    array(x6, first, "grad of x\n(L, d)")
    across(first, (1.4, x1), (3.0, x2), (4.7, x3), (6.35, x4), (7.95, x5), (9.5, x6))
    array(x1 - 0.03, 3.75, "a, b", True)
    down(x1 + 0.57, 3.75 + h, first)
    kernel(x3, second, "up_wgrad\ngathers x")
    array(x4, second, "grad of w1\n(E, d, 2h)")
    across(second, (6.35, x4))
    axes.plot([4.95, 4.95], [first + h / 2, second + h / 2], color=INK, lw=1)
    arrow(axes, (4.95, second + h / 2), (x3, second + h / 2))
    array(x2, third, "weighted\nact(a)·b")
    kernel(x3, third, "down_wgrad")
    array(x4, third, "grad of w2\n(E, h, d)")
    across(third, (4.7, x3), (6.35, x4))
    axes.plot([2.65, 2.65], [first + h, third + h / 2], color=INK, lw=1)
    arrow(axes, (2.65, third + h / 2), (x2, third + h / 2))
    array(x0, second, "row sums\nfloat32")
    arrow(axes, (x1 + 0.15, first + h), (1.4, second + h * 0.4))
    kernel(x0 + 0.02, third, "weights_bwd")
    down(0.8, second + h, third)
    write(axes, 0.8, third + h + 0.2, "grad of weights (L, k)", 8.5)
    for place, (color, words) in enumerate(
        ((KERNEL, "kernel"), (ARRAY, "array in global memory"), (KEPT, "may be kept for backward"))
    ):
        box(axes, x5, second + 0.25 + 0.35 * place, 0.3, 0.2, "", color)
        write(axes, x5 + 0.4, second + 0.35 + 0.35 * place, words, 8.5, ha="left")
    return figure


STEPS = ("dispatch", "up_fwd", "down_fwd", "up_fwd\nagain", "down_bwd", "down_wgrad", "up_bwd", "up_wgrad")
# per policy: name, first and last step, whether it is kept from forward to backward, bytes as a key of `sizes`
LISTS, PANELS = ("index lists", 0, 7, True, "lists"), (("panel", 2, 2, False, "panel"), ("panel", 6, 6, False, "panel"))
PRODUCT, WEIGHTED = ("act(a)·b", 1, 2, False, "half"), ("weighted act(a)·b", 4, 5, False, "half")
LIFETIMES = {
    'save="recompute"': (LISTS, PRODUCT, ("a, b, then their gradients", 3, 7, False, "first"), WEIGHTED, *PANELS),
    'save="fp8"': (LISTS, ("a, b in e4m3", 1, 4, True, "e4m3"), PRODUCT,
                   ("gradients of a, b", 4, 7, False, "first"), WEIGHTED, *PANELS),
    'save="minimal"': (LISTS, ("a, b, then their gradients", 1, 7, True, "first"), PRODUCT, WEIGHTED, *PANELS),
    'save="paper"': (LISTS, ("a, b, then their gradients", 1, 7, True, "first"),
                     ("act(a)·b, then weighted", 1, 5, True, "half"), *PANELS),
}  # fmt: skip


def sizes(L: int, d: int, h: int, E: int, k: int) -> dict[str, str]:
    """MiB of each array of a gated layer in bf16, and of each policy's what is kept beyond x."""
    shape = memory.LayerShape(L, d, h, E, k, "swiglu")
    kept = {
        save: dry_run.layer(shape, save).saved_bytes - 2 * L * d for save in ("recompute", "minimal", "fp8", "paper")
    }
    found = {
        "lists": kept["recompute"],
        "first": kept["minimal"] - kept["recompute"],
        "half": kept["paper"] - kept["minimal"],
        "e4m3": kept["fp8"] - kept["recompute"],
        **{f'save="{save}"': nbytes for save, nbytes in kept.items()},
    }
    return {name: f"{nbytes / 2**20:,.0f} MiB" for name, nbytes in found.items()} | {"panel": ""}


def lifetimes() -> Figure:
    """When each array is alive, per save policy, with its size for one layer."""
    about = {"L": 32768, "d": 2048, "h": 768, "E": 128, "k": 8}
    mib = sizes(**about)
    left, width, bar, gap = 1.85, 0.92, 0.26, 0.3
    rows = sum(len(bars) - 1 for bars in LIFETIMES.values())  # both panels share a row
    height = 1.25 + rows * (bar + 0.06) + gap * len(LIFETIMES)
    figure, axes = canvas(left + width * len(STEPS) + 0.2, height)
    for i, step in enumerate(STEPS):
        write(axes, left + (i + 0.5) * width, 0.65, step, 8.5)
    write(axes, left + 1.5 * width, 0.25, "forward", 10, fontweight="bold")
    write(axes, left + 5.5 * width, 0.25, "backward", 10, fontweight="bold")
    axes.plot([left + 3 * width] * 2, [0.1, height - 0.6], color=INK, lw=0.8, linestyle=(0, (4, 3)), zorder=0)
    y = 1.0
    for policy, bars in LIFETIMES.items():
        write(axes, 0.15, y + 0.2, policy, 9.5, ha="left", fontweight="bold")
        write(axes, 0.15, y + 0.48, f"keeps {mib[policy]} beyond x", 8.5, ha="left")
        for name, first, last, kept, size in bars:
            x, w = left + first * width + 0.04, (last - first + 1) * width - 0.08
            axes.add_patch(Rectangle((x, y), w, bar, facecolor=KEPT if kept else ARRAY, edgecolor=INK, lw=0.7))
            text = f"{name}, {mib[size]}" if mib[size] and w > 1 else name
            write(axes, x + w / 2, y + bar / 2, text, 7 if w < 2 else 8)
            y += 0 if (name, first) == ("panel", 2) else bar + 0.06
        y += gap
    shape = ", ".join(f"{name} {value:,}" for name, value in about.items())
    text = (
        f"Orange is kept from forward to backward. A panel is a group of columns of the outputs of all slots.\n"
        f"Sizes: Qwen3-30B-A3B's layer in bf16, {shape}."
    )
    write(axes, 0.15, y - 0.05, text, 8.5, ha="left")
    return figure


def hopper_block() -> Figure:
    """Shared memory of a CTA of Hopper's products, and what its warpgroups do over time."""
    figure, axes = canvas(10.4, 5.0)
    write(axes, 0.2, 0.25, "Shared memory, 224 KiB", 11, ha="left", fontweight="bold")
    rows, columns, depth = launch_config.TILE_ROWS, launch_config.PANEL_COLUMNS, gemm_config.STEP_ROWS
    registers = loader.kernel_constants("grouped_gemm_sm90.cu")
    a, b = (2 * depth * side // 1024 for side in (rows, columns))
    tile, spare = gemm_config.HOPPER_TILE_BYTES // 1024, gemm_config.HOPPER_SPARE_BYTES // 1024
    operands = ((f"A {rows}×{depth}\n{a} KiB", a, "#cfe2f3"), (f"B {columns}×{depth}\n{b} KiB", b, "#9fc5e8"))
    parts = [
        (f"stage {s}\n{name}", size, color) for s in range(gemm_config.HOPPER_STAGES) for name, size, color in operands
    ]
    parts += [(f"finished tile {rows}×{columns}\nas 16-bit elements\n{tile} KiB", tile, KEPT)]
    parts += [(f"a, b\n{spare} KiB", spare, "#fff2cc")]
    x, scale = 0.2, 10.0 / 224
    for text, size, color in parts:
        cell(axes, x, 0.5, size * scale, 0.85, text, color, 7.5)
        x += size * scale
    assert sum(size for _, size, _ in parts) == 224

    write(axes, 0.2, 1.75, "Time: k-steps of 64 of tile i, epilogue of tile i-1", 11, ha="left", fontweight="bold")
    left, step, h = 2.9, 0.9, 0.42
    lanes = (
        (
            2.1,
            f"warpgroup 0, producer, {registers['PRODUCER_REGISTERS']} registers:\nTMA, and cp.async of gathered rows",
        ),
        (2.95, f"warpgroups 1 and 2, {registers['CONSUMER_REGISTERS']} registers,\n64 rows each: wgmma m64n256k16"),
        (3.6, "the same warps meanwhile:\n16 finished rows each"),
    )
    for top, lane in lanes:
        write(axes, 0.2, top + h / 2, lane, 8, ha="left")
    filled, multiplied, stored = (top for top, _ in lanes)
    for k in range(8):
        x = left + k * step
        cell(axes, x, filled, step * 0.92, h, f"fill stage {k % 3}", "#9fc5e8", 7.5)
        if k:
            cell(axes, x, multiplied, step, h, f"stage {(k - 1) % 3}", "#b6d7a8", 7.5)
            cell(axes, x, stored, step, h, "rows", KEPT, 7.5)
    full, empty = left + step, left + 3 * step
    arrow(axes, (full - 0.05, filled + h), (full + 0.12, multiplied), "#38761d")
    write(axes, full - 0.08, filled + h + 0.22, "full[0]", 8, ha="right", color="#38761d")
    arrow(axes, (empty - 0.35, multiplied), (empty + 0.02, filled + h), "#990000")
    write(axes, empty - 0.05, filled + h + 0.25, "empty[0]", 8, ha="left", color="#990000")
    text = (
        "full[s] waits for the producer's arrival with the bytes of TMA, and for 128 cp.async arrivals where rows are "
        "gathered.\nempty[s] waits for the 8 consumer warps, in a 2-CTA cluster for those of both CTAs. A stage is "
        "released when the\nproducts of the next one have been issued. Thread 0 of the producer also takes the next "
        "tile from the scheduler."
    )
    write(axes, 0.2, 4.55, text, 8.5, ha="left")
    return figure


def order_of_tiles(row_tiles: int, column_tiles: int, about: int) -> np.ndarray:
    """When each (row tile, column tile) of one expert is worked on, by the rule of `Order` in grouped_gemm_sm90.cu."""
    order = np.empty((row_tiles, column_tiles), int)
    groups = max((row_tiles + about // 2) // about, 1)
    height = -(-row_tiles // groups)
    t = 0
    for start in range(0, row_tiles, height):
        rows = min(height, row_tiles - start)
        for within in range(rows * column_tiles):
            order[start + within % rows, within // rows] = t
            t += 1
    return order


def tile_order() -> Figure:
    """Row tiles by column tiles of two experts, with the order in which CTAs take them."""
    figure, axes = canvas(8.6, 5.1)
    side, colors = 0.4, plt.get_cmap("Blues")
    grids = (
        (0.95, "up_fwd and down_bwd: rows are gathered", "all column tiles of up to 16 row tiles", 16, 6),
        (5.3, "down_fwd and up_bwd: one column panel", "row tiles in groups of 2", 2, 6),
    )
    for left, heading, rule, about, columns in grids:
        write(axes, left + columns * side / 2, 0.25, heading, 10, fontweight="bold")
        write(axes, left + columns * side / 2, 0.55, rule, 9)
        first, y = 0, 0.95
        for expert, rows in enumerate((5, 3)):
            order = order_of_tiles(rows, columns, about) + first
            first += order.size
            write(axes, left - 0.5, y + rows * side / 2, f"expert {expert}\n{rows} row\ntiles", 8.5)
            for (row, column), t in np.ndenumerate(order):
                shade = colors(0.08 + 0.5 * t / (8 * columns))
                cell(axes, left + column * side, y + row * side, side, side, str(t), shade, 7.5)
            y += rows * side + 0.2
        arrow(axes, (left, y + 0.02), (left + columns * side, y + 0.02), FAINT)
        write(axes, left + columns * side / 2, y + 0.2, "column tiles of 256", 8.5)
    return figure


def call_path() -> Figure:
    """From a Python call to a kernel: what happens once per layout, and at every call."""
    figure, axes = canvas(10.2, 3.9)
    width, step, height = 2.1, 2.6, 0.75
    rows = (
        (0.55, "Once per layout, cached", (
            ("layer/forward.py\nconfigure_forward", "kernels in order,\nshapes of buffers"),
            ("gemm/products.py\nconfigure", "one kernel: variant,\ngrid, constants"),
            ("gemm/config.py", "tiles, stages, shared memory,\ndynamic scheduling, clusters"),
            ("Launch", "a record of all but\nthe addresses"),
        )),
        (2.35, "At every call", (
            ("layer.py\nmoe_forward", "looks the layout up;\nchecks arguments if it is new"),
            ("layer/forward.py\nmoe_forward", "allocates and launches,\nin a straight line"),
            ("gemm/products.py\ngemm", "passes the addresses"),
            ("runtime.py\nRuntime.launch", "fills the kernel's struct,\ncalls the driver"),
        )),
    )  # fmt: skip
    for top, heading, boxes in rows:
        write(axes, 0.15, top - 0.28, heading, 10.5, ha="left", fontweight="bold")
        for i, (where, what) in enumerate(boxes):
            x = 0.15 + i * step
            box(axes, x, top, width, height, where, KEPT if where == "Launch" else ARRAY, 9)
            write(axes, x + width / 2, top + height + 0.27, what, 8.5)
            if i:
                arrow(axes, (x - step + width, top + height / 2), (x, top + height / 2))
    return figure


DRAWN = {
    "dispatch.svg": dispatch,
    "data_flow.svg": data_flow,
    "lifetimes.svg": lifetimes,
    "hopper_block.svg": hopper_block,
    "tile_order.svg": tile_order,
    "call_path.svg": call_path,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        figure = draw()
        figure.savefig(FOLDER / name, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    main()
