"""Launch geometry: from device limits and problem sizes to grids and shared memory."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeblaze_cupy.cuda import launch_config, loader
from moeblaze_cupy.cuda.launch_config import H200, DeviceLimits
from moeblaze_cupy.dispatch import config as dispatch_config
from moeblaze_cupy.gemm import config as gemm_config
from moeblaze_cupy.gemm import variants as gemm_variants
from moeblaze_cupy.router import config as router_config
from tests.cuda.test_compile import SOURCES

A100 = DeviceLimits(80, 108, 166912, 167936)
RTX_3090 = DeviceLimits(86, 82, 101376, 102400)
JETSON_ORIN = DeviceLimits(87, 16, 166912, 167936)
RTX_4090 = DeviceLimits(89, 128, 101376, 102400)
B200 = DeviceLimits(100, 148, 232448, 233472)
RTX_5090 = DeviceLimits(120, 170, 101376, 102400)
DEVICES = [A100, RTX_3090, JETSON_ORIN, RTX_4090, H200, B200, RTX_5090]

STATIC_BYTES = 1024  # of the portable products: a row number for each row of a tile


@pytest.mark.parametrize("limits", DEVICES, ids=lambda limits: f"sm_{limits.compute_capability}")
def test_only_hopper_leaves_the_portable_tier(limits):
    assert launch_config.tier(limits.compute_capability) == ("sm90" if limits is H200 else "sm80")


@pytest.mark.parametrize(
    ("limits", "stages", "step_bytes"),
    [
        (A100, 3, 128),
        (JETSON_ORIN, 3, 128),
        (H200, 4, 128),
        (B200, 4, 128),
        (RTX_3090, 4, 64),
        (RTX_4090, 4, 64),
        (RTX_5090, 4, 64),
    ],
    ids=lambda value: f"sm_{value.compute_capability}" if isinstance(value, DeviceLimits) else str(value),
)
def test_portable_stages_fill_the_memory_of_a_block(limits, stages, step_bytes):
    assert gemm_config.portable_stages(limits) == (stages, step_bytes)
    stage_bytes = (128 + 256) * step_bytes
    room = limits.shared_bytes_per_block - STATIC_BYTES
    assert stages * stage_bytes <= room
    assert stages == 4 or (stages + 1) * stage_bytes > room
    assert step_bytes == 128 or 3 * 2 * stage_bytes > room  # three stages of twice the depth do not fit


@pytest.mark.parametrize("dtype", loader.ELEMENTS)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("limits", DEVICES, ids=lambda limits: f"sm_{limits.compute_capability}")
def test_gemm_configuration(limits, split, aligned, dtype):
    config = gemm_config.gemm(dtype, aligned, split, limits)
    on_hopper = limits is H200 and aligned and dtype != "float32"
    assert config.tier == ("sm90" if on_hopper else "sm80")
    assert config.threads == (384 if on_hopper else 256)
    assert config.tile_columns == 256 // (2 if split else 1)
    assert config.shared_bytes <= limits.shared_bytes_per_block - (0 if on_hopper else STATIC_BYTES)
    # 5 tiles of rows, 3 of columns: a block each, or as many as there are multiprocessors
    columns = 2 * config.tile_columns + 1
    assert config.blocks(columns, 5, limits) == 15
    assert config.blocks(columns, 5000, limits) == (limits.multiprocessors if on_hopper else 15000)
    if on_hopper:
        assert config.blocks(columns, 5, limits, clusters=True) == 16  # an even number
        assert config.blocks(columns, 5000, limits, clusters=True) == limits.multiprocessors // 2 * 2


def test_forcing_the_portable_tier_takes_its_configuration_on_hopper():
    limits = dataclasses.replace(H200, tier=launch_config.tier(90, "sm80"))
    config = gemm_config.gemm("bfloat16", True, False, limits)
    assert (config.tier, config.stages, config.step_bytes, config.shared_bytes) == ("sm80", 4, 128, 4 * 384 * 128)


@given(counts=st.lists(st.integers(0, 1000), min_size=1, max_size=50), absent=st.integers(0, 300))
def test_row_tiles_of_any_routing_stay_below_the_bound(counts, absent):
    tiles = sum(launch_config.ceil_div(count, launch_config.TILE_ROWS) for count in counts)
    assert tiles <= launch_config.max_row_tiles(sum(counts) + absent, len(counts))


@pytest.mark.parametrize(("slots", "experts"), [(0, 5), (1, 1), (3, 5), (128 * 7 + 5, 5), (5, 5)])
def test_some_routing_reaches_the_bound_on_row_tiles(slots, experts):
    used = min(experts, slots)
    counts = [1] * used  # one partial tile each; the rest in whole tiles of the first
    rest = slots - used
    if used:
        counts[0] += rest
    tiles = sum(launch_config.ceil_div(count, launch_config.TILE_ROWS) for count in counts)
    assert launch_config.max_row_tiles(slots, experts) - tiles <= (1 if rest % launch_config.TILE_ROWS else 0)


@given(columns=st.integers(1, 20000), slots=st.one_of(st.integers(1, 5000), st.integers(1, launch_config.MAX_SLOTS)))
def test_panels_tile_the_columns(columns, slots):
    panels, _ = gemm_config.panels(columns, slots)
    assert [c for first, width in panels for c in range(first, first + width)] == list(range(columns))
    for first, width in panels:
        assert 1 <= width <= panels[0][1]
        assert first % 256 == 0 and (width % 8 == 0 or columns % 8)  # 16-byte accesses stay possible
    if columns > 512 and columns * slots > 2**24:  # about half a routed buffer, in whole tiles
        assert panels[0][1] <= min((columns + 511) // 2, 2048)


@pytest.mark.parametrize(
    ("columns", "widths"),
    [
        (8, [8]),
        (512, [512]),
        (520, [512, 8]),
        (1024, [512] * 2),
        (1536, [768] * 2),
        (2048, [1024] * 2),
        (2880, [1536, 1344]),
        (4096, [2048] * 2),
        (7168, [2048] * 3 + [1024]),
    ],
)
def test_widths_of_panels(columns, widths):
    assert [width for _, width in gemm_config.panels(columns, 2**20)[0]] == widths
    assert gemm_config.panels(columns, 2**24 // columns)[0] == ((0, columns),)


@pytest.mark.parametrize(
    ("columns", "spare", "tier", "in_place"),
    [
        (256, 256, "sm90", True),
        (264, 512, "sm90", False),  # two tiles, of which the second would read what the first has stored
        (256, 248, "sm90", False),
        (8, 0, "sm90", False),
        (64, 256, "sm80", False),
    ],
)
def test_a_panel_in_the_left_operands_rows(columns, spare, tier, in_place):
    assert gemm_config.panel_takes_left_operands_rows(columns, spare, tier) == in_place


@pytest.mark.parametrize(
    ("tiles", "rows", "splits"),
    [
        (128, 16384, 1),  # conf1's: 0.97 of a turn of all multiprocessors
        (256, 16384, 1),  # and 1.94
        (32, 16384, 4),  # one expert of its sizes
        (8, 16384, 16),
        (32, 2048, 1),  # too few rows for what split-K costs
        (1, 1600, 1),
        (72, 16384, 3),  # two turns of a third, which take as long as three of a fifth
        (136, 16384, 3),  # a second turn of four tiles would take as long as the first
        (4, 1000, 1),
        (114688, 512, 1),  # DeepSeek-V3
    ],
)
def test_weight_gradients_of_few_tiles_take_split_k(tiles, rows, splits):
    assert gemm_config.split_k(tiles, 3 * rows, 3, H200)[0] == splits


@given(
    tiles=st.one_of(st.integers(1, 600), st.integers(1, 10**6)),
    slots=st.integers(1, launch_config.MAX_SLOTS),
    experts=st.integers(1, 4096),
)
def test_splits_of_weight_gradients_are_bounded(tiles, slots, experts):
    """By four tiles per multiprocessor, and by the steps of 64 rows that a mean expert has."""
    splits, rows = gemm_config.split_k(tiles, slots, experts, H200)[0], slots // experts
    assert splits == 1 or (splits * tiles <= 528 and rows > 1024 and splits <= -(-rows // 64))


def test_tiles_of_weight_gradients():
    tiles = {(1, 1): 3, (128, 256): 3, (129, 256): 6, (128, 257): 6, (192, 192): 3, (2880, 2880): 3 * 15 * 15}
    assert {s: gemm_config.wgrad_tiles(*s, 3, gemm_config.square_wgrad(*s)[0]) for s in tiles} == tiles


@given(rows=st.integers(1, 2000).map(lambda n: 8 * n), columns=st.integers(1, 2000).map(lambda n: 8 * n))
def test_tiles_of_weight_gradients_are_those_with_fewer_elements_past_the_edges(rows, columns):
    square, _ = gemm_config.square_wgrad(rows, columns)
    config = gemm_config.wgrad("bfloat16", True, square, H200)
    tile = config.tile_rows, config.tile_columns
    assert tile == ((192, 192) if square else (128, 256))

    def computed(m, n):
        return -(-rows // m) * m * -(-columns // n) * n

    assert square == (computed(192, 192) < computed(128, 256))
    assert gemm_config.wgrad_tiles(rows, columns, 2, square) == 2 * computed(*tile) // math.prod(tile)
    assert config.threads == (512 if square else 384)
    assert config.shared_bytes <= H200.shared_bytes_per_block
    constants = loader.kernel_constants("grouped_wgrad_sm90.cu")
    constants |= gemm_config.square_constants(152) if square else {}
    assert tile == (constants["BM"], constants["BN"]) and config.threads == constants["THREADS"]
    spare = constants["STAGES"] * constants["STAGE_BYTES"] + constants["TILE_BYTES"]
    assert config.shared_bytes == spare + constants["SPARE_BYTES"]


@given(widths=st.lists(st.integers(1, 500).map(lambda n: 8 * n), min_size=1, max_size=3), rows=st.integers(0, 4000))
def test_square_tiles_of_products_are_those_that_compute_fewer_columns(widths, rows):
    def computed(tile):
        return sum(-(-width // tile) * tile for width in widths)

    square, _ = gemm_config.square_product(tuple(widths), 7 * rows, 7)
    assert square == (computed(192) < computed(256) and rows >= 8 * 192)


@pytest.mark.parametrize("pairs", [False, True])
def test_square_tiles_of_products(pairs):
    config = gemm_config.square_gemm(pairs)
    constants = loader.kernel_constants("grouped_gemm_sm90.cu")
    constants |= gemm_config.square_product_constants("ActivatePairs" if pairs else "StoreRows")
    assert (config.tile_rows, config.tile_columns) == (192, 96 if pairs else 192) and config.threads == 512
    assert config.tile_columns == constants["TILE_COLUMNS"] and config.threads == constants["THREADS"]
    spare = constants["STAGES"] * constants["STAGE_BYTES"] + constants["TILE_BYTES"]
    assert config.shared_bytes == spare + constants["SPARE_BYTES"] <= H200.shared_bytes_per_block - 1024


@pytest.mark.parametrize("limits", [A100, H200], ids=["sm_80", "sm_90"])
def test_weight_gradients_of_the_portable_tier_have_its_tiles(limits):
    dtype = "float32" if limits is H200 else "bfloat16"
    assert gemm_config.wgrad(dtype, True, True, limits) == gemm_config.gemm(dtype, True, False, limits)


@given(tokens=st.integers(0, 10**6), k=st.integers(1, 64), experts=st.integers(1, 4096))
def test_index_lists_share_a_buffer(tokens, k, experts):
    places, size = launch_config.index_lists(tokens, k, experts)
    ends = [0]
    for start, shape in places.values():
        assert start == ends[-1]  # no gaps: what is kept for backward is what the formulas say
        ends.append(start + math.prod(shape))
    assert ends[-1] == size
    assert places["token_index_map"][0] % 4 == 0  # written 16 bytes at a time
    assert places["row_tiles"][0] % 2 == 0  # read as pairs
    assert places["row_tiles"][1] == (launch_config.max_row_tiles(tokens * k, experts) + 1, 2)


@given(a=st.integers(0, 10**12), b=st.integers(1, 10**6))
def test_ceil_div(a, b):
    assert launch_config.ceil_div(a, b) == (a + b - 1) // b


def test_column_tiles():
    assert [gemm_config.column_tiles(n) for n in (1, 256, 257)] == [1, 1, 2]
    assert [gemm_config.column_tiles(n, 64) for n in (1, 64, 65)] == [1, 1, 2]


def check_dispatch(num_slots, num_experts, limits):
    """What dispatch.cu relies on. Few multiprocessors or little shared memory bring many parts."""
    config = dispatch_config.dispatch(num_slots, num_experts, limits)
    assert config.blocks * config.block_slots >= num_slots
    assert config.blocks == 1 or (config.blocks - 1) * config.block_slots < num_slots  # no block without slots
    assert config.blocks <= 2 * limits.multiprocessors
    assert config.columns in (8, 16, 32, 64, 128)
    assert config.part_slots % config.columns == 0 and config.part_slots // config.columns % 4 == 2
    assert config.part_slots < 65536  # places in a part, and sums of two counters in one word
    assert config.route_threads in (512, 1024) and config.route_threads >= 32 + config.columns
    assert config.columns * (num_experts + 1) // 8 <= dispatch_config.HELD_PIECES * config.route_threads
    assert config.counted_together in (1, 2) and config.count_threads in (512, 1024)
    assert config.count_columns in (4, 8, 16, 32)
    assert config.count_shared_bytes == 4 * config.counted_together * config.count_columns * (num_experts + 1)

    matrix = 2 * config.columns * (num_experts + 1)
    scratch = 0
    if config.counts:  # (groups, experts rounded up) pairs of int32
        others = config.route_threads - max(config.columns, 32)
        experts = -(-num_experts // 4) * 4
        groups = 4 * others // experts
        scratch = 8 * groups * experts if groups >= 3 else 0
    slots = config.part_slots
    assert 5 * 4 * (num_experts + 1) + max(matrix + scratch, 4 * slots) + 4 * slots <= config.route_shared_bytes
    assert max(config.count_shared_bytes, config.route_shared_bytes) <= limits.shared_bytes_per_block
    assert config.counts or config.blocks * config.parts == 1
    assert config.workspace_bytes(num_experts) <= 4 * (config.blocks + 1) * (num_experts + 3)
    return config


@settings(max_examples=300)
@given(
    num_slots=st.one_of(st.integers(0, 5000), st.integers(0, launch_config.MAX_SLOTS)),
    num_experts=st.one_of(st.integers(1, 300), st.integers(1, launch_config.MAX_EXPERTS)),
    limits=st.sampled_from([A100, H200, B200]),
)
def test_dispatch_of_any_size(num_slots, num_experts, limits):
    check_dispatch(num_slots, num_experts, limits)


@settings(max_examples=300)
@given(
    num_slots=st.one_of(st.integers(0, 5000), st.integers(0, launch_config.MAX_SLOTS)),
    num_experts=st.integers(1, 2750),  # more do not fit
    limits=st.sampled_from([RTX_3090, RTX_4090, RTX_5090]),
)
def test_dispatch_of_any_size_with_99_kib_of_shared_memory(num_slots, num_experts, limits):
    check_dispatch(num_slots, num_experts, limits)


@pytest.mark.parametrize("limits", [A100, RTX_4090, H200], ids=lambda limits: f"sm_{limits.compute_capability}")
def test_dispatch_of_any_number_of_experts_or_refuses(limits):
    for num_experts in range(1, launch_config.MAX_EXPERTS + 1, 5):
        for num_slots in (0, 1000, 10**7):
            try:
                check_dispatch(num_slots, num_experts, limits)
            except ValueError as error:
                assert f"got {num_experts}" in str(error)
                assert limits is RTX_4090 and num_experts > 2750


def test_dispatch_takes_more_blocks_before_more_slots_each_and_these_before_parts():
    configs = [dispatch_config.dispatch(n, 64, H200) for n in (100, 2048, 2049, 768 * 264, 10**8)]
    assert [config.counts for config in configs] == [False, False, True, True, True]
    assert [config.blocks for config in configs] == [1, 1, 3, 244, 264]
    assert [config.parts > 1 for config in configs] == [False, False, False, False, True]


def test_two_blocks_of_dispatch_fit_a_multiprocessor():
    for num_experts in (8, 64, 128):
        config = dispatch_config.dispatch(2**23, num_experts, H200)
        assert config.blocks > H200.multiprocessors
        shared = max(config.count_shared_bytes, config.route_shared_bytes)
        assert 2 * (shared + 1024) <= H200.shared_bytes_per_multiprocessor


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_source_has_constants(source):
    constants = loader.kernel_constants(source)
    assert constants and all(isinstance(value, int) and value > 0 for value in constants.values())


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_gemms_are_compiled_for_the_tiles_of_the_launches(tier):
    limits = H200 if tier == "sm90" else A100
    for entry, split in (("up_fwd", True), ("down_fwd", False)):
        config = gemm_config.gemm("bfloat16", True, split, limits)
        options = {"dtype": "bfloat16", "activation": "swiglu", "transposed": False, "aligned": True}
        pipeline = {"stages": config.stages, "step_bytes": config.step_bytes}
        variant = gemm_variants.gemm_variant(entry, **options, tier=config.tier, **pipeline)
        given = loader.kernel_constants(variant.source) | dict(variant.macros)
        assert int(given["TILE_COLUMNS"]) == config.tile_columns
        assert given["THREADS"] == config.threads
        assert int(given["STAGES"]) == config.stages
        beside = given["TILE_BYTES"] + given["SPARE_BYTES"] if tier == "sm90" else 0
        stage_bytes = given["STAGE_BYTES"] if tier == "sm90" else 384 * int(given["STEP_BYTES"])
        assert int(given["STAGES"]) * stage_bytes + beside == config.shared_bytes


@given(
    st.integers(0, 2**21),
    st.integers(1, router_config.MAX_ROUTER_EXPERTS),
    st.integers(1, router_config.MAX_ROUTER_K),
    st.sampled_from([2, 4]),
    st.fixed_dictionaries(
        dict.fromkeys(("aligned", "selects", "sums", "biased", "cut", "over_row", "narrow"), st.booleans())
    ),
    st.sampled_from([(0, 1), (2, 1), (4, 2), (8, 2), (8, 3)]),
)
def test_routers_hold_all_tokens_and_columns(L, E, k, itemsize, options, groups):
    number, top = groups if groups[0] and E % groups[0] == 0 else (0, 1)
    config = router_config.router_forward(L, E, k, itemsize=itemsize, groups=(number, top), **options)
    assert config.lanes * config.values >= E and config.full == (config.lanes * config.values == E)
    assert config.blocks * config.tokens_per_block >= L and (config.blocks - 1) * config.tokens_per_block <= L
    assert config.tokens_per_block % (config.threads // config.lanes) == 0 and config.threads % 32 == 0
    assert config.shared_bytes <= launch_config.DEFAULT_SHARED_BYTES or config.threads == 32
    assert not options["sums"] or config.blocks <= router_config.ROUTER_SUM_BLOCKS
    if config.lane_k:
        assert config.lane_k == k <= router_config.ROUTER_LANE_K and options["selects"] and not options["cut"]
        assert config.values <= 32 and bool(config.group_lanes) == bool(number)
        if config.lanes > 1:  # rows of 32 tokens, a warp's share
            assert config.tokens_per_block % 32 == 0 and config.threads // config.lanes <= 32
            assert config.shared_bytes >= 32 * router_config.ROUTER_LISTED_ROW


@pytest.mark.parametrize(
    ("E", "k", "options", "lanes"),
    [
        (16, 4, {}, 1),
        (16, 4, {"biased": True}, None),
        (32, 9, {}, None),
        (128, 8, {}, 4),
        (256, 8, {}, 8),
        (256, 8, {"sums": True}, 8),
        (256, 8, {"sums": True, "narrow": True}, 16),
        (512, 8, {"sums": True}, 32),
        (256, 8, {"over_row": True}, 8),
        (512, 8, {"over_row": True}, 32),
        (256, 8, {"biased": True}, 16),
        (256, 8, {"biased": True, "groups": (8, 2)}, 16),
        (256, 8, {"biased": True, "groups": (8, 3)}, None),
        (256, 8, {"biased": True, "groups": (8, 2), "sums": True}, None),
        (60, 4, {"groups": (5, 3)}, None),
        (512, 8, {}, 16),
        (513, 8, {}, None),
        (64, 8, {}, 4),
        (256, 8, {"selects": False}, None),
    ],
)
def test_which_routers_choose_in_one_lane(E, k, options, lanes):
    plain = {"itemsize": 4, "aligned": True, "selects": True, "groups": (0, 1), "sums": False}
    config = router_config.router_forward(16384, E, k, **plain | options)
    assert (config.lanes if config.lane_k else None) == lanes


@pytest.mark.parametrize("k", [1, 2, 3, 7, 255, 641, 1000, 4097, 32767, launch_config.MAX_K])
def test_the_reciprocal_of_k_divides_exactly(k):
    """dispatch.cu writes slot / k as a multiplication, for a slot of a part plus the first one's place in its token."""
    slots = np.arange(65536 + k - 1, dtype=np.uint64)
    reciprocal = np.uint64(0xFFFFFFFF if k == 1 else 0xFFFFFFFF // k + 1)
    added = np.uint64(k == 1)
    assert np.array_equal((slots + added) * reciprocal >> np.uint64(32), slots // np.uint64(k))
    assert (65536 + k) * k < 2**32
