"""The cost model of experts on many ranks: closed forms, random routings, and what the command prints."""

from dataclasses import replace

import numpy as np
import pytest

from moeblaze_cupy import __main__, memory
from moeblaze_cupy.expert_parallel_plan import ExpertParallel, Machine, parts_per_token
from moeblaze_cupy.memory import LayerShape

QWEN = LayerShape(L=32768, d=2048, h=768, E=128, k=8)
ONE_NODE = Machine(ranks_per_node=4, nvlink=340e9, latency=0)


def test_rows_per_token_in_closed_form():
    assert parts_per_token(128, 8, 1) == 1
    assert parts_per_token(128, 8, 128) == pytest.approx(8)  # every expert a rank of its own
    assert parts_per_token(64, 1, 16) == pytest.approx(1)
    # two ranks: both, unless all eight experts are on one
    alone = 2 * np.prod([(64 - i) / (128 - i) for i in range(8)])
    assert parts_per_token(128, 8, 2) == pytest.approx(2 - alone)
    assert parts_per_token(256, 8, 32, limit=4) == parts_per_token(32, 8, 4)
    assert parts_per_token(256, 8, 4, limit=9) == parts_per_token(256, 8, 4)


@pytest.mark.parametrize(
    ("E", "k", "parts", "limit"), [(128, 8, 4, None), (256, 8, 32, None), (256, 8, 32, 4), (60, 4, 6, None)]
)
def test_rows_per_token_of_random_routings(E, k, parts, limit):
    rng, tokens, size = np.random.default_rng(0), 4000, E // parts
    found = []
    for _ in range(tokens):
        allowed = (
            np.arange(E)
            if limit is None
            else np.concatenate([np.arange(size) + size * part for part in rng.permutation(parts)[:limit]])
        )
        found.append(len(set(rng.permutation(allowed)[:k] // size)))
    assert np.mean(found) == pytest.approx(
        parts_per_token(E, k, parts, limit), abs=4 * np.std(found) / tokens**0.5 + 1e-9
    )


def test_bytes_and_seconds_of_an_exchange():
    """D(P-1)/P rows per token and direction over NVLink; between nodes a row per node."""
    four = ExpertParallel(QWEN, 4, ONE_NODE)
    rows = four.rows_per_token * 3 / 4 * 32768
    assert four.bytes_over_nvlink == pytest.approx(rows * 4096) and four.bytes_over_network == 0
    assert four.exchange_seconds == pytest.approx(rows * 4096 / 340e9)
    assert ExpertParallel(QWEN, 1, ONE_NODE).exchange_seconds == 0 and ExpertParallel(QWEN, 1).efficiency == 1
    wide = ExpertParallel(QWEN, 16, Machine(ranks_per_node=8, network=1e9, latency=0))
    assert wide.nodes == 2 and wide.nodes_per_token == pytest.approx(parts_per_token(128, 8, 2))
    assert wide.exchange_seconds == pytest.approx(wide.nodes_per_token / 2 * 32768 * 4096 / 1e9)
    assert four.compute_seconds == pytest.approx(3 * 2 * 32768 * 8 * 3 * 2048 * 768 / 6e14)
    t, c = four.exchange_seconds, four.compute_seconds
    assert four.efficiency == pytest.approx(c / (c + 4 * t - min(t, c / 3)))


def test_memory_of_a_rank():
    four = ExpertParallel(QWEN, 4, ONE_NODE)
    shape = four.received
    assert shape.E == 32 and shape.max_slots == 262144 and four.rows_per_token * QWEN.L <= shape.L
    assert four.rows_per_token * 17 / 16 >= shape.L / QWEN.L
    kept = {term.name: term.nbytes for term in four.plan("minimal").saved}
    assert kept["first layer a, b"] == 2 * 262144 * 768 * 2 and kept["x"] == shape.L * 4096
    unbounded = memory.layer(replace(shape, max_slots=None), "minimal")
    of_slots = (shape.L * 8 - 262144) * 2 * 768 * 2  # which are not this rank's
    assert unbounded.saved_bytes - four.plan("minimal").saved_bytes == of_slots - 4  # and a count


def test_ranks_that_cannot_share():
    with pytest.raises(ValueError, match="ranks: expected a divisor of E = 128, got 3"):
        ExpertParallel(QWEN, 3)
    with pytest.raises(ValueError, match="limit_nodes: expected nodes with k = 8 experts, got 1"):
        ExpertParallel(QWEN, 128, Machine(ranks_per_node=4), limit_nodes=1)


SIZES = ["--tokens", "16384", "--d-model", "7168", "--d-hidden", "2048", "--experts", "256", "--k", "8"]


def test_the_command(capsys):
    assert __main__.main(["plan", *SIZES, "--ranks", "1024", "--nodes", "128", "--limit-nodes", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.strip() and line.split()[0].isdigit() and "ranks," not in line]
    assert [int(row[0]) for row in rows] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [int(row[1]) for row in rows] == [1, 1, 1, 1, 2, 4, 8, 16, 32]
    assert float(rows[3][2]) == pytest.approx(parts_per_token(256, 8, 8), abs=0.005)
    assert float(rows[-1][3]) == pytest.approx(parts_per_token(32, 8, 4), abs=0.005)


@pytest.mark.parametrize(
    ("option", "text"),
    [(["--ranks", "10", "--nodes", "3"], "--nodes: expected a divisor"), (["--nodes", "2"], "with --ranks alone")],
)
def test_options_that_do_not_fit(option, text, capsys):
    assert __main__.main(["plan", *SIZES, *option]) != 0
    assert text in capsys.readouterr().err
