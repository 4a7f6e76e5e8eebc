"""`python -m bench.card`: its kernel for the ceiling, what it prints, and its record."""

import json
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bench import card, cases, kernels, mma, nvrtc, other_gpus, report  # noqa: E402
from tests.environment import run_python  # noqa: E402

CEILING = {"mma_tflops": 200.0, "mma_flops_per_processor_and_clock": 1000.0}


@pytest.fixture(scope="module")
def sums():
    """Operands of one block, and what the kernel's body makes of them on the emulator."""
    from tests.test_emulator import one_kernel  # skips where there is no compiler

    made, found = mma.operands(1, "cpu"), np.full(32 * mma.WARPS, np.nan, np.float32)
    words = made.view(torch.int32).numpy().view(np.uint32).reshape(-1)
    steps = mma.CHECKED_STEPS
    one_kernel(mma.PARAMETERS, mma.BODY).launch("kernel", 1, 32 * mma.WARPS, (words, found, steps))
    return made, torch.from_numpy(found), steps


def test_the_kernel_makes_the_products_that_are_counted(sums):
    mma.check(*sums)


@pytest.mark.parametrize("wrong", ["a step less", "a warp", "nan"])
def test_wrong_products_get_no_time(sums, wrong):
    made, found, steps = sums
    found = found.clone()
    if wrong == "a step less":
        found *= (steps - 1) / steps
    elif wrong == "a warp":
        found[:32] = found[32:64]
    else:
        found[-1] = torch.nan
    with pytest.raises(AssertionError, match=r"mma.sync: relative error .*; a wrong result gets no time"):
        mma.check(made, found, steps)


@pytest.mark.skipif(nvrtc.library() is None, reason=nvrtc.INSTALL)
@pytest.mark.parametrize("arch", ["80", "89", "90", "120"])
def test_the_kernel_compiles_without_spills(arch):
    compiled = nvrtc.compile_source(mma.source().encode(), "mma.cu", ["-std=c++17", f"-arch=sm_{arch}", "-Xptxas=-v"])
    assert "0 bytes spill stores" in compiled.log and "Compiling entry function 'mma_sync'" in compiled.log


@pytest.mark.gpu
def test_the_ceiling_is_of_this_card():
    """FLOP of bf16 per multiprocessor and clock: 4,096 on an H100 by wgmma, 512 on consumer cards by mma.sync."""
    found = mma.ceiling()
    assert found["mma_tflops"] > 1 and 256 < found.get("mma_flops_per_processor_and_clock", 1024) < 4300


def suite(group: str) -> dict:
    def row(seconds, **about):
        extra = {"case": "conf5", "order": "transposed", **about}
        return {"group": group, "fullname": str(about), "stats": {"median": seconds, "iqr": 0.0}, "extra_info": extra}

    if group == "grouped_gemm":
        ours = [row(1.0, provider="moeblaze", kernel=name, tflops=150.0) for name in ("up_fwd", "down_fwd + sums")]
        rows = [*ours, row(1.0, provider="cublas_bound", kernel="up_fwd", tflops=180.0)]
    else:
        times = (("cublas_bound", 1.0), ("moeblaze", 2.0), ("torch_grouped_mm", 3.0))
        more = {"peak_mib": 64.0}
        rows = [
            row(seconds, provider=name, back_to_back_ms=1e3 * seconds, **more, **{"pass": what})
            for name, seconds in times
            for what in ("forward", "forward_backward")
        ]
    machine = {"gpu": "NVIDIA GeForce RTX 4090", "matmul_tflops": 160.0, "copy_gb_per_s": 900.0, "torch": "2"}
    machine |= {"driver": "1", "power_limit_w": "450"}
    return {"machine_info": machine, "commit_info": {"id": "c"}, "datetime": "2026-01-01", "benchmarks": rows}


@pytest.fixture
def measured(monkeypatch, tmp_path, capsys):
    """Runs the program where the suites only write their records; what they were asked for, the record, the lines."""
    asked = {}

    def run(args):
        asked.update(vars(args), tier=os.environ.get("MOEBLAZE_TIER"))
        for name in args.suite:
            with open(os.path.join(args.out, f"{name}.json"), "w") as file:
                json.dump(suite(name), file)
        return 1

    monkeypatch.setattr(card.command, "run", run)
    monkeypatch.setattr(card.inputs, "has_gpu", lambda: True)
    monkeypatch.setattr(card.mma, "ceiling", lambda: CEILING)
    monkeypatch.delenv("MOEBLAZE_TIER", raising=False)
    assert card.main("--out", str(tmp_path / "card.json")) == 1  # of the suites
    assert "MOEBLAZE_TIER" not in os.environ
    return asked, json.loads((tmp_path / "card.json").read_text()), capsys.readouterr().out.splitlines()


def test_both_suites_run_with_the_portable_kernels_and_make_one_record(measured):
    asked, record, lines = measured
    assert asked["suite"] == ["grouped_gemm", "layer"] and asked["tier"] == "sm80" and asked["order"] == "transposed"
    assert set(asked["case"].split(",")) <= cases.LAYERS.keys()
    assert record["ceiling"] == CEILING and record["tier"] == "sm80" and len(record["benchmarks"]) == 9
    assert lines[-1].endswith("card.json is the record. Please send it back.")


def test_products_stand_beside_the_ceiling_and_what_is_expected(measured):
    _, _, lines = measured
    assert lines[0] == "NVIDIA GeForce RTX 4090: mma.sync 200 TFLOP/s, cuBLAS 160 TFLOP/s, a copy 900 GB/s"
    assert [line.split(maxsplit=1)[1].split("  ")[0] for line in lines[2:4]] == ["up_fwd", "down_fwd + sums"]
    assert lines[2].endswith("75  85 to 92") and lines[3].endswith("75  82 to 90")
    assert "conf5, forward: torch grouped_mm takes 1.50 times as long as this layer" in lines


def test_a_card_of_which_nothing_is_expected_has_its_shares():
    record = {**suite("grouped_gemm"), "ceiling": CEILING}
    record["machine_info"]["gpu"] = "NVIDIA GeForce RTX 3090"
    assert card.card_text(record)[2].endswith("75         -")
    assert all(len(spans) == len(kernels.GEMMS) for spans in card.EXPECTED.values())


def test_the_page_shows_a_record_that_was_sent_back(measured, tmp_path, monkeypatch):
    _, record, _ = measured
    (tmp_path / "rtx4090.json").write_text(json.dumps(record))
    (tmp_path / "card.json").unlink()
    monkeypatch.setattr(other_gpus, "FOLDER", tmp_path)
    text = "\n".join([*other_gpus.headline(), *other_gpus.section(report.table, report.peer_section)])
    assert "NVIDIA GeForce RTX 4090, portable kernels, 450 W, driver 1, torch 2, commit `c`." in text
    assert "| conf5 | 2,000 | 2.00 | 1.50 | 2,000 | 2.00 | 1.50 | 1.00 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure on the GPU")
def test_it_runs_tiny_shapes_without_a_gpu(tmp_path):
    done = run_python("-m", "bench.card", "--out", str(tmp_path / "card.json"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "card.json").read_text())
    assert {row["group"] for row in record["benchmarks"]} >= {"grouped_gemm", "layer"} and record["ceiling"] == {}
