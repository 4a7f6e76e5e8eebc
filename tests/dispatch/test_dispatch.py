"""Dispatch on a GPU: bit for bit the reference's index lists."""

import numpy as np
import pytest

import moeblaze_cupy as mb
from moeblaze_cupy import reference
from moeblaze_cupy.cuda import launch_config
from tests.cases import CASES, Case, make_ids

pytestmark = pytest.mark.gpu

LISTS = ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map", "experts_by_load")


def assert_dispatch_matches(ids, num_experts):
    cupy = pytest.importorskip("cupy")
    got = mb.build_dispatch(cupy.asarray(ids), num_experts)
    want = reference.dispatch(ids, num_experts)
    for name in LISTS:
        assert np.array_equal(getattr(got, name).get(), getattr(want, name)), name
        assert getattr(got, name).dtype == np.int32
    offsets = want.expert_token_offsets
    tiles = [(e, row) for e in range(num_experts) for row in range(offsets[e], offsets[e + 1], launch_config.TILE_ROWS)]
    row_tiles = got.row_tiles.get()
    assert tuple(row_tiles[0]) == (len(tiles), launch_config.TILE_ROWS)
    assert np.array_equal(row_tiles[1 : 1 + len(tiles)], np.array(tiles, np.int32).reshape(-1, 2))


def test_worked_example_of_the_paper():
    """Section 4.1: five tokens, not six; token_expert_indices has ten entries."""
    cupy = pytest.importorskip("cupy")
    ids = cupy.asarray([[2, 3], [0, 1], [0, 3], [1, 2], [0, 3]], np.int32)
    index = mb.build_dispatch(ids, 4)
    assert index.expert_token_indices.tolist() == [1, 2, 4, 1, 3, 0, 3, 0, 2, 4]
    assert index.expert_token_offsets.tolist() == [0, 3, 5, 7, 10]
    assert index.token_expert_indices.tolist() == [2, 3, 0, 1, 0, 3, 1, 2, 0, 3]
    assert index.token_index_map[0].tolist() == [5, 7]
    assert index.token_expert_indices.data.ptr == ids.data.ptr  # int32 ids are not copied


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, dtype):
    assert_dispatch_matches(make_ids(case, np.random.default_rng(0)).astype(dtype), case.E)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(seed, dtype):
    rng = np.random.default_rng(seed)
    L, k, E = int(rng.integers(0, 30000)), int(rng.integers(1, 100)), int(rng.integers(1, 4097))
    low, high = (-3, E + 3) if seed % 2 else (0, E)
    assert_dispatch_matches(rng.integers(low, high, (L, k)).astype(dtype), E)


@pytest.mark.parametrize("E", [1, 8, 128, 1024, 4096])
def test_many_tokens(E):
    rng = np.random.default_rng(E)
    zipf = np.minimum(rng.zipf(1.2, (200_000, 8)) - 1, E - 1).astype(np.int32)
    assert_dispatch_matches(zipf, E)


def test_int64_ids_outside_int32_are_no_expert():
    ids = np.array([[2**32, 1], [-(2**40), 0], [2**32 + 1, 1]])
    assert_dispatch_matches(ids, 2)


@pytest.mark.parametrize("routing", ["uniform", "zipf", "one_expert", "absent"])
@pytest.mark.parametrize(
    ("L", "E", "k"), [(2**21, 8, 2), (2**19, 40, 8), (2**19, 128, 8), (600_001, 256, 8), (2**18, 4096, 1)]
)
def test_millions_of_slots(L, E, k, routing):
    """So many that most of the blocks have several parts."""
    rng = np.random.default_rng(E)
    if routing == "zipf":
        ids = np.minimum(rng.zipf(1.2, (L, k)) - 1, E - 1)
    else:
        low, high = {"uniform": (0, E), "one_expert": (E // 2, E // 2 + 1), "absent": (-E, 2 * E)}[routing]
        ids = rng.integers(low, high, (L, k))
    assert_dispatch_matches(ids.astype(np.int64 if routing == "absent" else np.int32), E)


@pytest.mark.parametrize(("L", "E"), [(64, 256), (20000, 64), (300_000, 256)])
def test_repetitions_give_the_same_bits(L, E):
    cupy = pytest.importorskip("cupy")
    ids = cupy.asarray(make_ids(Case(L=L, k=8, E=E, d=1, h=1, routing="skewed"), np.random.default_rng(0)))
    first = mb.build_dispatch(ids, E)
    for _ in range(1000):
        again = mb.build_dispatch(ids, E)
        equal = [cupy.array_equal(getattr(first, name), getattr(again, name)) for name in LISTS]
        assert cupy.stack(equal).all()
