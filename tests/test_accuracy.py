"""The accuracy suite without a GPU: its data, its float64 layer, its measures, its record and what is told of it."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.environment import plain_environment

torch = pytest.importorskip("torch")

from bench import accuracy, accuracy_report, cases, providers, table  # noqa: E402
from bench.layer import Layer  # noqa: E402
from moeblaze_cupy import reference  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CASE = cases.LayerCase("c", L=96, d=40, h=24, E=7, k=3, source="")
COMPARED = [name for name in providers.GROUPS["accuracy"] if name != "sonicmoe"]


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """Also where there is a GPU: NumPy reads these tensors, and no grouped product there takes float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the suite in a process of its own
        yield


def errors_of(case, inputs, provider) -> dict[str, dict]:
    want = accuracy.reference(case, inputs)
    with provider.active():
        found = accuracy.results(case, inputs, provider)
    return {name: accuracy.error(found[name], want[name]) for name in accuracy_report.RESULTS}


@pytest.mark.parametrize("kind", accuracy.KINDS)
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_reference_is_the_packages_own_in_float64(kind, activation):
    case = replace(CASE, activation=activation)
    inputs = accuracy.layer_inputs(case, kind, 0)
    want = accuracy.reference(case, inputs)
    x, w1, w2, grad_out, logits = (
        inputs[name].double().numpy() for name in ("x", "w1", "w2", "grad_out", "logits")
    )  # fmt: skip
    weights, ids = reference.route(logits, case.k)
    out, saved = reference.moe_forward(x, ids, weights, w1, w2, activation=activation)
    grads = reference.moe_backward(grad_out, saved)
    independent = {"out": out, **{name: getattr(grads, name) for name in ("x", "weights", "w1", "w2")}}
    independent["logits"] = reference.route_backward(grads.weights, logits, weights, ids)
    assert np.array_equal(ids, inputs["ids"].numpy())
    assert set(want) == set(accuracy_report.RESULTS)
    for name, value in independent.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(want[name].numpy(), value, rtol=1e-9, atol=1e-12 * scale, err_msg=name)


@pytest.mark.parametrize("kind", accuracy.KINDS)
def test_routing_is_of_the_largest_logits_and_its_weights(kind):
    inputs = accuracy.layer_inputs(CASE, kind, 3)
    weights, ids = reference.route(inputs["logits"].numpy(), CASE.k)
    assert inputs["ids"].dtype == torch.int32 and np.array_equal(inputs["ids"].numpy(), ids)
    np.testing.assert_allclose(inputs["weights"].numpy(), weights, rtol=1e-5)
    again, other = accuracy.layer_inputs(CASE, kind, 3), accuracy.layer_inputs(CASE, kind, 4)
    assert all(torch.equal(again[name], value) for name, value in inputs.items())
    assert not torch.equal(other["x"], inputs["x"]) and not torch.equal(other["logits"], inputs["logits"])


def test_trained_data_has_what_it_says():
    case = cases.LayerCase("c", L=4096, d=1536, h=512, E=12, k=2, source="")
    plain, trained = (accuracy.layer_inputs(case, kind, 0) for kind in accuracy.KINDS)
    scales = trained["x"].float().std(0)
    large = scales > 10
    assert int(large.sum()) == case.d // accuracy.OUTLIER_CHANNELS == 3
    assert bool(((scales[large] > 18) & (scales[large] < 65)).all()) and scales[~large].max() < 1.2
    assert plain["x"].float().std(0).max() < 1.2
    gates, ups = trained["w1"].float().std(1).chunk(2, dim=1)
    # a third of a chi-squared variable with three degrees is below 0.117 once in twenty: columns above 2.92
    share = (gates * case.d**0.5 > 0.117**-0.5).float().mean()
    assert 0.04 < share < 0.06 and gates.max() * case.d**0.5 < 22
    assert (ups * case.d**0.5).sub(1).abs().max() < 0.2
    tokens = trained["ids"].long().reshape(-1).bincount(minlength=case.E).sort().values
    # of E = 12 and k = 2 the first expert by 1/r^1.2 is drawn by about 63 tokens in 100
    assert tokens[0] == 0 and 0.55 < tokens[-1] / case.L < 0.7 and tokens[-1] > 5 * tokens[1] > 0
    by_token = trained["grad_out"].float().square().mean(1).sqrt().log()
    assert 0.9 < by_token.std() < 1.1 and plain["grad_out"].float().square().mean(1).sqrt().log().std() < 0.1
    assert len(set(plain["ids"].reshape(-1).tolist())) == case.E


def test_scales_of_gate_columns_are_cut():
    """Among 2^17 columns some would be 50 times larger than most."""
    wide = cases.LayerCase("c", L=8, d=64, h=2048, E=64, k=2, source="")
    gates = accuracy.layer_inputs(wide, "trained", 0)["w1"][:, :, : wide.h].float()
    assert 20 < (gates.square().mean(1).sqrt() * wide.d**0.5).max() < 28


def test_unknown_data_is_refused():
    with pytest.raises(ValueError, match="kind: expected one of gaussian, trained, got 'plain'"):
        accuracy.layer_inputs(CASE, "plain", 0)


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("kind", accuracy.KINDS)
def test_every_provider_is_right_in_float32(kind, name):
    """So its errors in bf16 are those of rounding."""
    inputs = accuracy.layer_inputs(CASE, kind, 0, dtype=torch.float32)
    errors = errors_of(CASE, inputs, providers.PROVIDERS[name])
    assert accuracy.problems(errors) is None
    assert {t: e["norm"] for t, e in errors.items() if e["norm"] > 2e-6} == {}


def test_sums_in_bf16_cost_what_they_cost():
    inputs = accuracy.layer_inputs(CASE, "gaussian", 0)
    names = ("torch_eager", "torch_eager_fp32", "torch_grouped_fp32")
    eager, fp32, grouped = (errors_of(CASE, inputs, providers.PROVIDERS[name]) for name in names)
    assert eager["out"]["norm"] > 1.05 * fp32["out"]["norm"]
    assert fp32["out"]["norm"] == pytest.approx(grouped["out"]["norm"], rel=0.02)
    assert 1e-3 < min(e["norm"] for e in eager.values()) < max(e["norm"] for e in eager.values()) < 2e-2


def test_errors_of_constructed_results():
    want = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [6.0, 8.0]], dtype=torch.float64)
    assert accuracy.error(want, want) == {"norm": 0, "row": 0, "row_p999": 0, "zero_rows": 2, "wrong_zero_rows": 0}
    got = want.clone()
    got[0] += torch.tensor([0.3, 0.4])  # 0.5 of a row of 5, of a whole of sqrt(125)
    found = accuracy.error(got, want)
    assert (found["norm"], found["row"]) == (pytest.approx(0.5 / math.sqrt(125), rel=1e-3), pytest.approx(0.1))
    got[1, 1] = 1e-30
    assert accuracy.error(got, want)["wrong_zero_rows"] == 1
    experts = want.view(2, 2, 2)
    assert accuracy.error(got.view(2, 2, 2), experts) == accuracy.error(got, want)
    got[0, 0] = math.nan
    found = accuracy.error(got.view(2, 2, 2), experts)
    assert math.isnan(found["norm"]) and math.isnan(found["row"])
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    assert accuracy.error(nothing, nothing)["norm"] == accuracy.error(nothing, nothing)["row"] == 0
    assert accuracy.error(nothing + 1, nothing)["norm"] == math.inf
    with pytest.raises(ValueError, match=r"error: expected shape \(2, 3\), got \(3, 2\)"):
        accuracy.error(nothing.T, nothing)


def test_one_row_in_two_thousand_moves_the_largest_alone():
    want = torch.ones(2000, 4, dtype=torch.float64)
    got = want + 0.001
    got[77] = 3
    found = accuracy.error(got, want)
    assert found["row"] == pytest.approx(2) and found["row_p999"] == pytest.approx(1e-3)


class _Wrong(Layer):
    """This package's layer with one of its results changed."""

    def __init__(self, case, inputs, tensor, change):
        super().__init__(inputs, [inputs[name] for name in ("x", "weights", "w1", "w2")])
        self.right = providers.PROVIDERS["moeblaze"].build(case, inputs)
        self.tensor, self.change = tensor, change

    def forward(self):
        return self.right.forward()

    def forward_backward(self):
        gradients = dict(zip(self.names, self.right.forward_backward(), strict=True))
        gradients[self.tensor] = self.change(gradients[self.tensor].float())
        return tuple(gradients.values())


def zero_half(gradient):
    gradient[: len(gradient) // 2] = 0
    return gradient


@pytest.mark.parametrize(
    ("tensor", "change", "least"),
    [
        ("w2", lambda g: 1.2 * g, 0.19),
        ("x", lambda g: -g, 1.9),
        ("w1", lambda g: g.flip(2), 1.0),  # gate and up exchanged, and more
        ("weights", zero_half, 0.3),
    ],
)
def test_a_wrong_gradient_is_seen(tensor, change, least):
    inputs = accuracy.layer_inputs(CASE, "gaussian", 0)
    wrong = providers.Provider("moeblaze_wrong", lambda case, made: _Wrong(case, made, tensor, change))
    errors = errors_of(CASE, inputs, wrong)
    assert errors[tensor]["norm"] > least
    told = accuracy.problems(errors)
    assert f"{tensor} {errors[tensor]['norm']:.2g}" in told
    affected = {tensor, "logits"} if tensor == "weights" else {tensor}
    assert {name for name, found in errors.items() if found["norm"] > accuracy.WRONG} == affected


def test_a_gradient_for_an_expert_without_tokens_is_seen():
    inputs = accuracy.layer_inputs(CASE, "trained", 0)
    idle = next(e for e in range(CASE.E) if e not in inputs["ids"])

    def leave(gradient):
        gradient[idle, 1] = 1e-20
        return gradient

    errors = errors_of(CASE, inputs, providers.Provider("p", lambda case, made: _Wrong(case, made, "w1", leave)))
    assert errors["w1"]["zero_rows"] == CASE.d and errors["w1"]["norm"] < 0.01
    assert accuracy.problems(errors) == "1 rows of w1 are not zero"


def test_a_router_that_chooses_others_is_refused():
    inputs = accuracy.layer_inputs(CASE, "gaussian", 0)
    inputs["ids"] = inputs["ids"].flip(1).contiguous()
    with pytest.raises(ValueError, match="route: expected the experts of the 3 largest logits"):
        accuracy.results(CASE, inputs, providers.PROVIDERS["moeblaze"])


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """The suite's record on tiny shapes, made as a user would."""
    path = tmp_path_factory.mktemp("record") / "accuracy.json"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "bench/bench_accuracy.py",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not gpu",
    ]
    command.append(f"--benchmark-json={path}")
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


def test_the_record_has_every_provider_kind_and_seed(record):
    rows = [row["extra_info"] for row in record["benchmarks"]]
    assert len(rows) == len(COMPARED) * len(accuracy.KINDS) * len(accuracy.SEEDS)
    assert {(r["provider"], r["data"], r["seed"]) for r in rows} == {
        (name, kind, seed) for name in COMPARED for kind in accuracy.KINDS for seed in accuracy.SEEDS
    }
    for row in rows:
        assert row["case"] == "tiny" and row["shape"] == cases.TINY.shape
        assert set(row["accuracy"]) == set(accuracy_report.RESULTS)
        assert all(0 < found["norm"] < 0.02 for found in row["accuracy"].values()), row
    assert any(row["accuracy"]["w1"]["zero_rows"] for row in rows if row["data"] == "trained")


def by_hand(record, data, tensor, measure, *names):
    """The largest of the providers' means."""
    rows = [row["extra_info"] for row in record["benchmarks"]]
    each = [
        [r["accuracy"][tensor][measure] for r in rows if r["provider"] == name and r["data"] == data] for name in names
    ]
    return max(sum(values) / len(values) for values in each)


def test_what_is_told_is_in_the_record(record):
    lines = accuracy_report.section([record])
    ratios = [line for line in lines if "no larger |" in line or "larger: " in line]
    assert len(ratios) == len(accuracy.KINDS) * len(accuracy_report.MEASURES)
    ours = [name for name in COMPARED if accuracy_report.is_ours(name)]
    assert len(ours) == 6
    titles = {words: measure for measure, words in accuracy_report.MEASURES.items()}
    for line in ratios:
        data, measure, *numbers, _ = (cell.strip() for cell in line.strip("|").split("|"))
        for tensor, number in zip(accuracy_report.RESULTS, numbers, strict=True):
            key = data, tensor, titles[measure]
            assert float(number) == pytest.approx(
                by_hand(record, *key, *ours) / by_hand(record, *key, "torch_eager"), abs=6e-4
            )
    rows = accuracy_report.error_rows(accuracy_report.errors_by_provider([record]))
    shown = [f"| {' | '.join(row)} |" for row in rows]
    for name in COMPARED:
        words = accuracy_report.TITLES.get(name, f"`{name}`")
        for kind in accuracy.KINDS:
            (line,) = (each for each in shown if words in each and f"| tiny, {kind} |" in each)
            cells = [cell.strip() for cell in line.strip("|").split("|")][2:]
            for tensor, cell in zip(accuracy_report.RESULTS, cells, strict=True):
                norm, _, row = re.split(" ±|; ", cell)
                assert float(norm) == pytest.approx(1e3 * by_hand(record, kind, tensor, "norm", name), abs=6e-3)
                assert float(row) == pytest.approx(1e3 * by_hand(record, kind, tensor, "row", name), abs=6e-2)


def test_the_table_of_a_run(record):
    group, head, *lines = table.tables(record)
    assert group == "accuracy" and head.split()[:3] == ["over", "torch_eager", "measure"]
    assert len(lines) == len(accuracy.KINDS) * len(accuracy_report.MEASURES)
    alone = {"benchmarks": [r for r in record["benchmarks"] if r["extra_info"]["provider"] == "moeblaze"]}
    _, head, *lines = table.tables(alone)
    assert head.startswith("thousandths") and len(lines) == len(accuracy.KINDS)


def row_of(case, provider, seed, value, **changed):
    accuracy_ = {
        tensor: dict.fromkeys(accuracy_report.MEASURES, changed.get(tensor, value))
        for tensor in accuracy_report.RESULTS
    }
    info = {"case": case, "data": "trained", "seed": seed, "provider": provider, "accuracy": accuracy_}
    return {"group": "accuracy", "extra_info": info}


def test_the_worst_of_this_package_is_compared_with_torchs_spread():
    rows = [row_of("conf5", "torch_eager", seed, value) for seed, value in ((0, 1.0), (1, 1.2))]
    rows += [row_of("conf5", "moeblaze", seed, 0.5) for seed in (0, 1)]
    rows += [row_of("conf5", "moeblaze_sm80", seed, 0.5, x=1.19, w2=1.21) for seed in (0, 1)]
    ((providers_of_case),) = accuracy_report.errors_by_provider([{"benchmarks": rows}]).values()
    assert accuracy_report.compare(providers_of_case, "out", "norm") == (pytest.approx(0.5 / 1.1), True)
    assert accuracy_report.compare(providers_of_case, "x", "norm") == (pytest.approx(1.19 / 1.1), True)
    assert accuracy_report.compare(providers_of_case, "w2", "row") == (pytest.approx(1.21 / 1.1), False)
    assert accuracy_report.compare(providers_of_case, "w2", "row", "sonicmoe") is None
    text = "\n".join(accuracy_report.section([{"benchmarks": rows}]))
    assert "| larger: w2 (conf5 1.100) |" in text and "no larger |" not in text


def test_a_nan_of_one_tier_is_larger():
    rows = [row_of("conf5", "torch_eager", 0, 1.0), row_of("conf5", "moeblaze", 0, 0.5)]
    rows.append(row_of("conf5", "moeblaze_sm80", 0, 0.5, logits=math.nan))
    text = "\n".join(accuracy_report.section([json.loads(json.dumps({"benchmarks": rows}))]))
    assert text.count("| larger: logits (conf5 nan) |") == len(accuracy_report.MEASURES)


def test_cases_share_a_row():
    rows = [row_of(case, "torch_eager", 0, 1.0) for case in ("conf5", "olmoe")]
    rows += [row_of("conf5", "moeblaze", 0, 0.5, x=1.5), row_of("olmoe", "moeblaze", 0, 0.75, x=0.25, w2=2.0)]
    found = accuracy_report.rows_over_cases(accuracy_report.errors_by_provider([{"benchmarks": rows}]))
    told = "larger: x (conf5 1.500), w2 (olmoe 2.000)"
    same = ["0.500 to 0.750"] * 3
    assert found == [
        ["trained", words, "0.500 to 0.750", "0.250 to 1.500", *same, "0.500 to 2.000", told]
        for words in accuracy_report.MEASURES.values()
    ]


def test_a_newer_record_takes_a_cases_place():
    old = [row_of(case, name, 0, 1.0) for case in ("conf5", "olmoe") for name in ("torch_eager", "moeblaze", "liger")]
    new = [row_of("conf5", "moeblaze", 0, 3.0), row_of("conf5", "torch_eager", 0, 2.0)]
    other = {"group": "layer", "extra_info": {"case": "conf5"}}
    found = accuracy_report.errors_by_provider([{"benchmarks": old}, {"benchmarks": [*new, other]}])
    assert set(found[("conf5", "trained")]) == {"moeblaze", "torch_eager"}
    assert accuracy_report.compare(found[("conf5", "trained")], "out", "norm") == (1.5, False)
    assert set(found[("olmoe", "trained")]) == {"moeblaze", "torch_eager", "liger"}
    assert accuracy_report.section([{"benchmarks": [other]}]) == []
