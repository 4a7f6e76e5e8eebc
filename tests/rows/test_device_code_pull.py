"""Rows, ids and values of other GPUs in the emulator, where the peers are other buffers of the same memory."""

import numpy as np
import pytest

from moeblaze_cupy import reference
from moeblaze_cupy.rows import config as rows_config
from moeblaze_cupy.rows import pull
from moeblaze_cupy.rows.api import PeerArray, Share, pull_rows, pull_slots, pull_values, sum_peer_rows
from tests.cases import make_inputs
from tests.layer.test_device_code import ALIGNED, DTYPES, Layer, differences, emulated
from tests.layer_calls import backward_into, forward_into


class Peers:
    """A buffer by rank of several arrays each, given by array, then rank, with bytes between that no one may read."""

    def __init__(self, device, *arrays):
        sections, offset, self.arrays = [], 0, []
        for of_ranks in arrays:
            offset += 48
            sections.append(offset)
            offset += -(-of_ranks[0].nbytes // 16) * 16
        self.held = []
        for rank in range(len(arrays[0])):
            buffer = np.full(offset, 0x7F, np.uint8)
            for start, of_ranks in zip(sections, arrays, strict=True):
                buffer[start : start + of_ranks[rank].nbytes] = of_ranks[rank].reshape(-1).view(np.uint8)
            self.held.append(device.put(buffer))
        addresses = device.put(np.array([buffer.ctypes.data for buffer in self.held], np.int64))
        self.arrays = [PeerArray(addresses, at, of[0].dtype.name) for at, of in zip(sections, arrays, strict=True)]


def random_ids(rng, shape, E, dtype):
    """Some absent, some past the experts, some beyond 32 bits; the first token has none."""
    ids = rng.integers(0, E, shape).astype(dtype)
    ids[rng.random(shape) < 0.2] = -1
    ids[rng.random(shape) < 0.1] = E
    if dtype == np.int64:
        ids[rng.random(shape) < 0.1] += 1 << 32
    ids[:1] = np.iinfo(dtype).min
    return ids


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(DTYPES[dtype])


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("P", "L", "k", "e"), [(1, 1, 1, 1), (3, 40, 3, 2), (2, 70, 12, 3), (5, 7, 40, 1)])
def test_slots(P, L, k, e, dtype, ids_dtype):
    """Blocks with more slots than threads, and with rows of several peers; as every rank sees them."""
    rng = np.random.default_rng(0)
    ids = [random_ids(rng, (L, k), P * e, ids_dtype) for _ in range(P)]
    weights = [normal(rng, (L, k), dtype) for _ in range(P)]
    every = np.concatenate(ids)
    for rank in range(P):
        with emulated(seed=rank) as device:
            peers = Peers(device, weights, ids)
            local_ids = device.allocate((P * L, k), np.int32)
            pulled, needed = device.allocate((P * L, k), DTYPES[dtype]), device.allocate((P * L,), np.bool_)
            pull_slots(peers.arrays[1], peers.arrays[0], Share(rank, e, L), local_ids, pulled, needed)
            device.synchronize()
        here = (every >= rank * e) & (every < rank * e + e)
        np.testing.assert_array_equal(local_ids, np.where(here, every - rank * e, -1))
        np.testing.assert_array_equal(pulled, np.concatenate(weights))
        np.testing.assert_array_equal(needed.view(np.uint8), here.any(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [24, 264, 2056])
def test_rows(d, dtype):
    """Rows of a few and of many pieces; rows that are not needed keep their NaN."""
    rng = np.random.default_rng(0)
    rows = [normal(rng, (40, d), dtype) for _ in range(3)]
    needed = rng.random(120) < 0.7
    with emulated() as device:
        peers = Peers(device, [row[:, :8] for row in rows], rows)
        out = device.allocate((120, d), DTYPES[dtype])
        pull_rows(peers.arrays[1], device.put(needed), out)
        device.synchronize()
    want = np.where(needed[:, None], np.concatenate(rows).astype(np.float32), np.nan)
    np.testing.assert_array_equal(out.astype(np.float32), want)


def peers_of(ids, P, e):
    """(L, P): whether a rank has an expert of the token."""
    return np.stack([((ids >= r * e) & (ids < r * e + e)).any(1) for r in range(P)], 1)


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("P", "k", "e", "d"), [(3, 2, 2, 264), (1, 1, 4, 8), (40, 36, 1, 24)])
def test_sums(P, k, e, d, dtype, ids_dtype):
    """Ranks without an expert of the token hold NaN in its row; more ranks and slots than a warp has lanes.

    Some ranks have more tokens.
    """
    rng, L, M, rank = np.random.default_rng(0), 33, 35, P - 1
    ids = random_ids(rng, (L, k), P * e, ids_dtype)
    present = peers_of(ids, P, e)
    rows = [normal(rng, (P * M, d), dtype) for _ in range(P)]
    for peer, row in enumerate(rows):
        row[rank * M : rank * M + L][~present[:, peer]] = np.nan
    with emulated() as device:
        peers = Peers(device, rows)
        out = device.allocate((L, d), DTYPES[dtype])
        sum_peer_rows(peers.arrays[0], device.put(ids), Share(rank, e, M), out)
        device.synchronize()
    places = np.where(present, P * M * np.arange(P) + rank * M + np.arange(L)[:, None], -1)
    np.testing.assert_array_equal(out, reference.sum_rows(np.concatenate(rows), places))


@pytest.mark.parametrize("ids_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype, ids_dtype):
    rng, P, L, M, k, e = np.random.default_rng(0), 3, 301, 320, 2, 5
    ids = random_ids(rng, (L, k), P * e, ids_dtype)
    values = [normal(rng, (P * M, k), dtype) for _ in range(P)]
    for rank in range(P):
        with emulated() as device:
            peers = Peers(device, values)
            out = device.allocate((L, k), DTYPES[dtype])
            pull_values(peers.arrays[0], device.put(ids), Share(rank, e, M), out)
            device.synchronize()
        there = (ids >= 0) & (ids < P * e)
        of_rank = np.stack(values)[np.where(there, ids // e, 0), rank * M + np.arange(L)[:, None], np.arange(k)]
        np.testing.assert_array_equal(out, np.where(there, of_rank, 0))


def test_launches():
    """As many blocks as there are rows for, few where they come in turn, more if rows are short; offsets of 64 bits."""
    far = 5 << 32
    rows = pull.pull_rows(2, 100_000, 4096, "bfloat16", far)
    assert rows.grid == (rows_config.PULL_BLOCKS,) and rows.scalars["offset"] == far
    assert rows.scalars["pieces"] == 4096 * 2 // 16
    assert pull.pull_rows(2, 9, 8, "float32", 0).grid == (2,)
    assert pull.pull_rows(2, 100_000, 512, "bfloat16", 0).grid == (4 * rows_config.PULL_BLOCKS,)
    slots = pull.pull_slots(4, 65, 2, far, far + 64, 6, 2, "int64", "bfloat16")
    assert slots.grid == (-(-4 * 65 // rows_config.PULL_SLOT_ROWS),) and slots.scalars["weights_offset"] == far + 64
    assert slots.variant.entry == "pull_slots_int64_2"
    sums = pull.pull_sum(4, 100, 2, 520, 3 << 31, 2, "int32", "float32", far)
    assert sums.grid == (-(-100 // rows_config.AGGREGATE_TOKENS), 3) and sums.scalars["first_row"] == 3 << 31
    values = pull.pull_values(4, 1025, 3 << 31, 2, "int32", "float32", far)
    assert values.grid == (3,) and values.variant.entry == "pull_values_int32_4"


def test_nothing_is_launched_for_no_tokens():
    with emulated() as device:
        peers = Peers(device, [np.zeros((0, 8), np.float32)] * 2, [np.zeros((0, 2), np.int32)] * 2)
        rows, ids = peers.arrays
        empty = device.allocate((0, 2), np.int32)
        needed, none = device.allocate((0,), np.bool_), Share(0, 1, 0)
        pull_slots(ids, rows, none, empty, device.allocate((0, 2), np.float32), needed)
        pull_rows(rows, needed, device.allocate((0, 8), np.float32))
        sum_peer_rows(rows, empty, none, device.allocate((0, 8), np.float32))
        pull_values(rows, empty, none, device.allocate((0, 2), np.float32))
        device.synchronize()
        assert device.launched == []


def test_messages():
    with emulated() as device:
        (rows,) = Peers(device, [np.zeros((4, 24), np.float16)] * 2).arrays
        needed = device.put(np.ones(8, np.bool_))
        with pytest.raises(ValueError, match="pull_rows: out: expected columns in multiples of 8"):
            pull_rows(rows, needed, device.allocate((8, 20), np.float16))
        with pytest.raises(ValueError, match="pull_rows: needed: expected a C-contiguous array"):
            pull_rows(rows, device.put(np.ones((8, 2), np.bool_))[:, 0], device.allocate((8, 24), np.float16))


def test_results_in_given_memory():
    """The layer writes its result and the gradient of x where it is told to, and the bits are the same."""
    inputs = make_inputs(ALIGNED, 0, DTYPES["bfloat16"])
    with emulated() as device:
        whole = Layer(device, inputs)
        plain = whole.run("minimal")
        x, ids, weights, w1, w2, grad_out = whole.on_device
        into, grad_x = device.allocate(x.shape, x.dtype), device.allocate(x.shape, x.dtype)
        out, saved = forward_into(into, x, ids, weights, w1, w2)
        needs = ("x", "weights", "w1", "w2")
        grads, _ = backward_into(grad_x, "moe_backward", grad_out, saved, needs, False, None)
        device.synchronize()
        assert out is into and grads.x is grad_x
        found = {"out": out, "x": grads.x, "weights": grads.weights, "w1": grads.w1, "w2": grads.w2}
    assert not differences(plain, found)
