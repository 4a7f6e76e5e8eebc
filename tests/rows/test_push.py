"""Results stored in the memory of the GPUs that have the tokens; in the emulator these are buffers of one memory."""

import numpy as np
import pytest

from moeblaze_cupy.dispatch.launches import IndexLayout
from moeblaze_cupy.rows import config as rows_config
from moeblaze_cupy.rows.push import Destination, PeerOffset, push_sum
from tests import emulator
from tests.cases import Case, make_inputs
from tests.layer.test_device_code import DTYPES, differences, emulated
from tests.layer_calls import backward_into, forward_into
from tests.lora.lora_cases import by_name, make_lora

P, RANK = 3, 1
NEEDS = ("x", "weights", "w1", "w2")


class Ranks:
    """A buffer for each of P ranks, of NaN, and where this rank's results of their tokens go in it."""

    def __init__(self, device, needed, d, dtype):
        M = len(needed) // P
        self.rows, self.needed, skipped = slice(RANK * M, RANK * M + M), needed, 4 * d
        self.buffers = [device.allocate((4 + P * M, d), dtype) for _ in range(P)]
        emulator.reachable += self.buffers
        addresses = device.put(np.array([buffer.ctypes.data for buffer in self.buffers], np.int64))
        place = PeerOffset(skipped * np.dtype(dtype).itemsize, RANK * M, M)
        self.destination = Destination(addresses, device.put(needed), place)

    def result(self, plain):
        """What all ranks got, in the order of tokens, with `plain` for those not needed, of which there must be NaN."""
        got = [np.asarray(buffer[4:]) for buffer in self.buffers]
        elsewhere = np.ones(len(got[0]), bool)
        elsewhere[self.rows] = False
        for buffer, rows in zip(self.buffers, got, strict=True):
            assert np.isnan(rows[elsewhere].astype(np.float32)).all() and np.isnan(buffer[:4].astype(np.float32)).all()
        found = np.concatenate([rows[self.rows] for rows in got])
        assert np.isnan(found[~self.needed].astype(np.float32)).all()
        return np.where(self.needed[:, None], found, plain)


@pytest.mark.parametrize("save", ["minimal", "paper"])
@pytest.mark.parametrize(
    ("tier", "dtype", "case", "max_slots"),
    [
        ("sm80", "float32", Case(L=111, k=2, E=5, d=24, h=40, routing="absent"), None),
        ("sm80", "bfloat16", Case(L=60, k=1, E=2, d=520, h=24), None),
        ("sm90", "bfloat16", Case(L=150, k=3, E=3, d=264, h=72, routing="absent"), 300),
        ("sm80", "float16", Case(L=60, k=2, E=2, d=24, h=24), None),
        ("sm90", "bfloat16", Case(L=150, k=1, E=3, d=264, h=72, routing="absent"), None),
        ("sm90", "float16", Case(L=399, k=1, E=2, d=72, h=40, routing="absent"), 100),
    ],
    ids=["portable", "portable_k1", "panels", "weights_in_float16", "to_tokens", "dropped"],
)
def test_results_go_to_their_ranks(monkeypatch, tier, dtype, case, max_slots, save):
    check(monkeypatch, tier, dtype, case, max_slots, save)


@pytest.mark.parametrize("ranks", [(8, 33), (None, 16)])
@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_results_beside_factors_go_to_their_ranks(monkeypatch, tier, ranks):
    """The gradients of factors are computed on the way."""
    case = Case(L=150, k=3, E=3, d=264, h=72, routing="absent")
    check(monkeypatch, tier, "bfloat16", case, 300, "minimal", ranks)


def check(monkeypatch, tier, dtype, case, max_slots, save, ranks=None):
    """Those of one array bit for bit, zeros for needed tokens whose slots are left out; of other tokens nothing.

    ranks: of factors, None for a layer without.
    """
    monkeypatch.setattr(emulator, "reachable", [])
    dtype, rng = DTYPES[dtype], np.random.default_rng(0)
    inputs = make_inputs(case, 0, dtype)
    needed = ((inputs[1] >= 0) & (inputs[1] < case.E)).any(1)
    needed[rng.random(case.L) < 0.1] = True
    with emulated(tier=tier) as device:
        weights = inputs[2].astype(dtype if tier == "sm80" else np.float32)
        x, ids, weights, w1, w2, grad_out = (device.put(array) for array in (*inputs[:2], weights, *inputs[3:]))

        lora = ranks and make_lora(case, ranks, np.float32)
        lora = lora and lora.with_factors(None if factor is None else device.put(factor) for factor in lora.factors)
        needs = (*NEEDS, "lora") if lora else NEEDS

        def run(into, grad_x):
            options = {"max_slots": max_slots, "save": save, "lora": lora}
            out, saved = forward_into(into, x, ids, weights, w1, w2, case.activation, **options)
            grads, _ = backward_into(grad_x, "moe_backward", grad_out, saved, needs, False, None)
            device.synchronize()
            return {"out": None, "x": None} | by_name(out, grads)

        plain = run(None, None)
        of_out, of_x = (Ranks(device, needed, case.d, dtype) for _ in range(2))
        found = run(of_out.destination, of_x.destination)
        assert found["out"] is None and found["x"] is None
        found |= {"out": of_out.result(plain["out"]), "x": of_x.result(plain["x"])}
    assert not differences(plain, found)


def test_launch():
    """Blocks of one rank do not have tokens of the next; offsets of 64 bits."""
    place = PeerOffset(5 << 32, 2 * 1001, 1001)
    launch = push_sum(IndexLayout(4 * 1001, 8, 16), "bfloat16", None, 2048, 1024, 1024, 1024, place)
    assert launch.grid == (4 * -(-1001 // rows_config.AGGREGATE_TOKENS), 4)
    assert launch.scalars["offset"] == 5 << 32 and launch.scalars["P"] == 4
    assert launch.variant.entry == "push_sum_bfloat16_float32"
