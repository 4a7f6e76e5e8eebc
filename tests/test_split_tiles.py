"""Products that begin with the row tiles whose rows are here, in the emulator."""

import numpy as np
import pytest
from cases import Case, make_ids, make_inputs
from test_device_code import DTYPES, differences, emulated

import moeblaze_cupy as mb
from moeblaze_cupy import arrays, runtime
from moeblaze_cupy.backward import backward_into
from moeblaze_cupy.launch_config import TILE_ROWS
from moeblaze_cupy.layer import forward_into
from moeblaze_cupy.ops import dispatch, split_tiles
from moeblaze_cupy.ops.split_tiles import AFTER, BEFORE, WITHIN, Arrival


def lists_of(index, E, first_token, end_token):
    """By list: [(2 e, first row)], and the rows (first, end) of each expert in it, by the tokens of each tile."""
    tiles, ranges = ([], [], []), np.zeros((3, E, 2), int)
    for expert in range(E):
        start, end = (int(offset) for offset in index.expert_token_offsets[expert : expert + 2])
        ends = [start, start, start]
        for row in range(start, end, TILE_ROWS):
            tokens = np.asarray(index.expert_token_indices[row : min(row + TILE_ROWS, end)])
            which = BEFORE if tokens.min() < first_token else AFTER if tokens.max() >= end_token else WITHIN
            tiles[which].append((2 * expert, row))
            ends[which:] = [min(row + TILE_ROWS, end)] * (3 - which)
        ranges[:, expert] = list(zip([start, *ends[:2]], ends, strict=True))
    return tiles, ranges.reshape(3, -1)


@pytest.mark.parametrize(
    ("L", "k", "E", "routing"), [(2500, 3, 5, "skewed"), (900, 2, 1100, "absent"), (130, 1, 1, "random")]
)
def test_lists(L, k, E, routing):
    """Ranges of tokens at the ends, within, empty, and so short that a tile has tokens on either side."""
    ids = make_ids(Case(L=L, k=k, E=E, d=1, h=1, routing=routing), np.random.default_rng(0))
    with emulated(tier="sm90") as device:
        index = mb.build_dispatch(device.put(ids), E)
        layout = dispatch.IndexLayout(L, k, E)
        run = runtime.Runtime.current(arrays.CuPy, 0)
        for tokens in ((0, L // 2), (L // 2, L), (L // 3, 2 * L // 3), (L // 2, L // 2 + 9), (0, L), (L, L)):
            step = split_tiles.configure(layout, tokens)
            made, of_launches = split_tiles.split(run, step, layout.addresses(index.lists.data.ptr))
            device.synchronize()
            flat, wanted = np.asarray(made.array), lists_of(index, E, *tokens)
            got_tiles = flat[: step.ranges].reshape(3, -1, 2)
            np.testing.assert_array_equal(flat[step.ranges :].reshape(3, -1), wanted[1])
            for got, tiles in zip(got_tiles, wanted[0], strict=True):
                assert got[0].tolist() == [len(tiles), TILE_ROWS]
                np.testing.assert_array_equal(got[1 : 1 + len(tiles)], np.reshape(tiles, (-1, 2)))
            assert step.lists[0] == WITHIN and len(of_launches) == len(step.lists)
            assert not any(wanted[0][which] for which in {BEFORE, WITHIN, AFTER} - set(step.lists))


LARGE = Case(L=900, k=2, E=3, d=72, h=136, routing="skewed")  # enough tiles for two launches


def run_layer(device, inputs, save, tokens=None):
    """Results by name. tokens: whose rows are there at first; the others are NaN until a product waits for them."""
    x, ids, weights, w1, w2, grad_out = (device.put(array) for array in inputs)
    waits = []

    def arrival_of(array, whole):
        if tokens is None:
            return None
        absent = np.ones(len(whole), bool)
        absent[slice(*tokens)] = False
        array[absent] = np.nan

        def wait():
            device.synchronize()  # what has been launched does not read these rows
            array[absent] = whole[absent]
            waits.append(list(device.launched))

        return Arrival(*tokens, wait)

    out, saved = forward_into(None, x, ids, weights, w1, w2, "swiglu", save, arrival=arrival_of(x, inputs[0]))
    device.synchronize()
    arrival = arrival_of(grad_out, inputs[5])
    grads, _ = backward_into(None, "moe_backward", grad_out, saved, None, False, None, 0, arrival=arrival)
    device.synchronize()
    return {"out": out, **{name: value for name, value in vars(grads).items() if value is not None}}, waits


ARRIVALS = [
    *(("sm90", "minimal", order, tokens) for order in ("transposed", "pair") for tokens in ((0, 450), (300, 600))),
    *(("sm90", "recompute", "pair", (450, 900)), ("sm80", "minimal", "row", (450, 900))),
]


@pytest.mark.parametrize(("tier", "save", "order", "tokens"), ARRIVALS, ids=str)
def test_rows_that_arrive(tier, save, order, tokens):
    """The bits of a layer whose rows are all there, and no product reads a row that is not."""
    inputs = make_inputs(Case(**{**vars(LARGE), "order": order}), 0, DTYPES["bfloat16"])
    with emulated(tier=tier) as device:
        plain, _ = run_layer(device, inputs, save)
    with emulated(tier=tier) as device:
        got, waits = run_layer(device, inputs, save, tokens)
    assert not differences(plain, got)
    assert len(waits) == 2
    parts = (1 + (tokens[0] > 0) + (tokens[1] < LARGE.L)) if tier == "sm90" else 1
    counts = [device.launched.count(name) for name in ("split_tiles", "up_fwd", "down_bwd")]
    recomputed = save == "recompute"
    assert counts == [2 * (parts > 1), parts + recomputed, parts]
    assert [waits[0].count("up_fwd"), waits[1].count("down_bwd")] == ([1, 1] if parts > 1 else [0, 0])


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["row", "transposed"])
def test_rows_that_arrive_on_a_gpu(order):
    torch = pytest.importorskip("torch")
    inputs = make_inputs(Case(L=16384, k=4, E=16, d=512, h=512, routing="absent"), 0, np.float32)
    x, ids, weights, w1, w2, grad_out = (torch.from_numpy(array).cuda() for array in inputs)
    x, w1, w2, grad_out = (tensor.bfloat16() for tensor in (x, w1, w2, grad_out))
    if order == "transposed":
        w1, w2 = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (w1, w2))

    def run(tokens=None):
        waits = []

        def arrival_of(whole):
            if tokens is None:
                return whole, None
            array = torch.full_like(whole, torch.nan)
            array[slice(*tokens)] = whole[slice(*tokens)]
            return array, Arrival(*tokens, lambda: waits.append(array.copy_(whole)))

        rows, arrival = arrival_of(x)
        out, saved = forward_into(None, rows, ids, weights, w1, w2, arrival=arrival)
        rows, arrival = arrival_of(grad_out)
        grads, _ = backward_into(None, "moe_backward", rows, saved, None, False, None, 0, arrival=arrival)
        assert tokens is None or len(waits) == 2 or tokens == (0, 16384)  # Hopper's kernels then wait for nothing
        return {"out": out, "x": grads.x, "weights": grads.weights, "w1": grads.w1, "w2": grads.w2}

    plain = run()
    for tokens in ((0, 8192), (8192, 16384), (5000, 9000), (100, 101), (0, 16384)):
        got = run(tokens)
        assert [name for name in plain if not torch.equal(plain[name], got[name])] == []
