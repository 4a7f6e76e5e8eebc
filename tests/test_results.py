"""Every number in docs/results.md and in the README's results is in a committed record."""

import functools
import json
import re
from pathlib import Path
from statistics import median

import pytest

from bench import cases, fp8_report, other_gpus, report, summary, two_gpus
from bench.recorded import Records, routed_mib

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "bench" / "records"
RESULTS = (ROOT / "docs" / "results.md").read_text()
README = (ROOT / "README.md").read_text()
OVERVIEW = " ".join(RESULTS[: RESULTS.index("How to read the tables")].split())
BLOCK = README[README.index(summary.START) : README.index(summary.END) + len(summary.END)]
NUMBER = re.compile(r"(?<![\w.`-])\d[\d,]*(?:\.\d+)?(?![\w-])")


@pytest.fixture(scope="module")
def records():
    return Records.load()


SAID = (
    *("saved_mib", "peak_mib", "tflops", "gb_per_s", "times_bound", "touched_experts"),
    *("back_to_back_ms", "back_to_back_w"),
)


@functools.cache
def measured(case: str) -> set[float]:
    """All that the records and the paper say of a case, in the units of the tables, read from the files themselves."""
    values: set[float] = set()
    of_other_gpus = *RECORDS.glob("other_gpus/*.json"), *RECORDS.glob("other_gpus/*/layer-*.json")
    for path in (*RECORDS.glob("*.json"), *of_other_gpus):
        rows = [r for r in json.loads(path.read_text())["benchmarks"] if r["extra_info"]["case"] == case]
        seconds = {json.dumps(r["extra_info"], sort_keys=True): r["stats"]["median"] for r in rows}
        for row in rows:
            extra, median = row["extra_info"], row["stats"]["median"]
            values |= {median * 1e3, median * 1e6}
            values |= {extra[n] for n in SAID if extra.get(n)}
            values |= {1e3 * error for error in extra.get("errors", {}).values()}
            values |= {extra["share_of_roofline"]} if "share_of_roofline" in extra else set()
            for other, bound in seconds.items():
                about = json.loads(other)
                same = all(about.get(n) == extra.get(n) for n in ("order", "pass"))
                base = "relu" if extra["provider"] == "relu2" else "swiglu"
                if same and row["group"] == "experts" and about["provider"] == base:
                    values.add(median / bound)
                    if "back_to_back_ms" in extra and "back_to_back_ms" in about:
                        values.add(extra["back_to_back_ms"] / about["back_to_back_ms"])
                if same and about["provider"] == "moeblaze" and row["group"] == "layer":
                    values.add(median / bound)
                    if "back_to_back_ms" in extra and "back_to_back_ms" in about:
                        values.add(extra["back_to_back_ms"] / about["back_to_back_ms"])
                    if "peak_mib" in extra and "peak_mib" in about:
                        values.add(about["peak_mib"] / extra["peak_mib"])
                if same and (about["provider"] == "cublas_bound" or about.get("rows") == "contiguous"):
                    values.add(median / bound)
                    if "back_to_back_ms" in extra and "back_to_back_ms" in about:
                        values.add(extra["back_to_back_ms"] / about["back_to_back_ms"])
    for path in (ROOT / "bench" / "records" / "parallel").rglob("*.json"):
        rows = [row for row in json.loads(path.read_text())["rows"] if row["case"] == case and "ms" in row]
        times = [row.get("back_to_back_ms", row["ms"]) for row in rows]
        kinds = [(row["what"], "fp8" in row["provider"], "graph" in row["provider"]) for row in rows]
        alone = {kind: ms for kind, row, ms in zip(kinds, rows, times, strict=True) if row["gpus"] == 1}
        for kind, row, ms in zip(kinds, rows, times, strict=True):
            peak = row.get("peak_mib", ms)  # of a CUDA graph there is none
            values |= {row["gpus"], ms, peak, 100 * alone[kind] / ms}
            for peer, its_ms in zip(rows, times, strict=True):
                if (peer["provider"], peer["gpus"]) == ("slots", row["gpus"]):
                    values |= {its_ms / ms, peak / peer["peak_mib"]}
    values |= of_fp8(case) | of_saves(case) | over_bounds(case)
    for case_ in (cases.LAYERS.get(case), cases.DISPATCHES.get(case)):
        if case_ is not None:
            values |= {v for p in case_.paper for v in (p.time_ms, p.memory_mb) if v is not None}
    if case in cases.LAYERS:
        values.add(routed_mib(cases.LAYERS[case]))
    return values


def over_bounds(case: str) -> set[float]:
    """torch's time over this package's in a training pass, each over the bound of its own run, the newest."""
    over: dict[str, float] = {}
    for rows in layer_rows():
        for provider in ("moeblaze", "torch_grouped_mm"):
            keys = (case, "transposed", provider), (case, "transposed", "cublas_bound")
            if rows.keys() >= {*keys}:
                over[provider] = rows[keys[0]]["back_to_back_ms"] / rows[keys[1]]["back_to_back_ms"]
    return {over["torch_grouped_mm"] / over["moeblaze"]} if len(over) == 2 else set()


def of_fp8(case: str) -> set[float]:
    """Ratios of times of one row of bench.fp8's records, and MiB of the first layer."""
    values: set[float] = set()
    peers = "torch, fp8", "torchao, rowwise"
    names = "h200", "h200-layers", "h200-products"
    found = [json.loads((RECORDS / "fp8" / f"{name}.json").read_text())["rows"] for name in names]
    rows = [r for of_record in found for r in of_record if r["case"] == case]
    for row in rows:
        seconds = row["seconds"]
        values |= {seconds[base] / s for base in ("bf16", "fp8", *peers) if base in seconds for s in seconds.values()}
        if row["kernel"] == "forward" and row in found[1]:
            products = [r["seconds"] for r in found[2] if r["case"] == case and r["kernel"].endswith("_fwd")]
            values.add(seconds["fp8"] / sum(of_product["_scaled_mm"] for of_product in products))
            numbers, scales = cases.LAYERS[case].slots * cases.LAYERS[case].h, -(-cases.LAYERS[case].h // 128)
            values |= {4 * numbers / 2**20, 2 * (numbers + 4 * cases.LAYERS[case].slots * scales) / 2**20}
    return values


def of_saves(case: str) -> set[float]:
    """Times over "minimal", and milliseconds for each GiB less than it keeps, of all records of bench.save_policies."""
    values: set[float] = set()
    for path in RECORDS.glob("save_policies/*.json"):
        for row in json.loads(path.read_text())["rows"]:
            if row["case"] == case:
                base = row["saves"]["minimal"]
                for save in ("fp8", "recompute"):
                    of = row["saves"][save]
                    freed = (base["saved_mib"] - of["saved_mib"]) / 1024
                    values |= {of["ms"] / base["ms"], abs(of["ms"] - base["ms"]) / freed}
    return values


def is_rounding_of(text: str, values: set[float]) -> bool:
    plain = text.replace(",", "")
    step = 10.0 ** -len(plain.partition(".")[2])
    return any(abs(float(plain) - value) <= 0.5001 * step for value in values)


def table_numbers(text: str):
    """(case, number) of every table row that is about a case, without the shape; section 7.3's rows have none."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else [""]
        gathers = cells[0] in ("up_fwd", "down_bwd", "down_wgrad", "up_wgrad")
        case = "sec73" if gathers else cells[0]
        if case in cases.LAYERS or case in cases.DISPATCHES:
            yield from ((case, n) for cell in cells[1:] for n in NUMBER.findall(cell))


def unfounded(text: str) -> list[tuple[str, str]]:
    """Numbers of tables that no record has."""
    known: dict[str, set[float]] = {}
    missing = []
    for case, text_number in table_numbers(text):
        values = known.setdefault(case, measured(case))
        if not is_rounding_of(text_number, values):
            missing.append((case, text_number))
    return missing


def test_results_are_what_the_records_give(records):
    assert report.results(records) == RESULTS, "run python -m bench.report"


def test_readme_is_what_the_records_give(records):
    assert summary.readme(records) == BLOCK, "run python -m bench.report"


def test_performance_is_what_the_records_give(records):
    assert summary.performance(records) in (ROOT / "docs" / "performance.md").read_text(), "run python -m bench.report"


def test_performance_has_the_least_and_greatest_ratios():
    """By another way than the summary's."""
    text = summary.performance(Records.load())
    ours: dict[str, float] = {}
    for rows in layer_rows():
        for (case, order, provider), row in rows.items():
            if provider == "moeblaze" and (case, order, "cublas_bound") in rows:
                ratio = row["back_to_back_ms"] / rows[case, order, "cublas_bound"]["back_to_back_ms"]
                ours[case] = max(ours.get(case, 0), ratio)
    large = [ratio for case, ratio in ours.items() if not case.startswith("tab2")]
    assert f"| times the bound, {len(large)} shapes | " in text
    assert f" | {min(large):.2f} to {max(large):.2f} |\n" in text


def test_every_number_of_the_tables_is_in_a_record():
    """By another way than the report's: from the files, by case."""
    assert len(list(table_numbers(RESULTS))) > 100
    assert unfounded(RESULTS) == []


def test_an_altered_number_is_found(records):
    """A digit put in front of a table's number: too far from every record of its case, but for chance.

    It is each row's longest number. A number of GPUs, such as 2, would become another's percentage.
    """
    altered = found = 0
    for line in RESULTS.splitlines():
        for match in sorted(NUMBER.finditer(line), key=lambda match: -len(match[0])):
            if list(table_numbers(line)) and "L" not in line[max(0, match.start() - 1) : match.start()]:
                text = f"{line[: match.start()]}9{line[match.start() :]}"
                if len(list(table_numbers(text))) != len(list(table_numbers(line))):
                    continue
                altered += 1
                found += bool(unfounded(text))
                break  # one per row keeps this quick
    assert altered > 50
    assert found >= 0.95 * altered
    number = NUMBER.search(RESULTS, RESULTS.index("| conf3 |")).start()
    digit = RESULTS[number]
    assert report.results(records) != RESULTS[:number] + str((int(digit) + 1) % 10) + RESULTS[number + 1 :]


def layer_rows() -> list[dict[tuple, dict]]:
    """The training passes of each record, oldest first, with random routing: by case, order and provider."""
    found = []
    for path in (ROOT / "bench" / "records").glob("*.json"):
        record = json.loads(path.read_text())
        rows = {}
        for row in record["benchmarks"]:
            extra = row["extra_info"]
            is_pass = row["group"] == "layer" and extra["pass"] == "forward_backward" and "back_to_back_ms" in extra
            if is_pass and cases.LAYERS[extra["case"]].routing == "random":
                rows[extra["case"], extra["order"], extra["provider"]] = extra
        found.append((record["datetime"], rows))
    return [rows for _, rows in sorted(found, key=lambda item: item[0])]


def test_overview_has_the_least_greatest_and_median_ratios():
    bound: dict[tuple, float] = {}
    sonicmoe: dict[str, float] = {}
    peak: dict[str, float] = {}
    for rows in layer_rows():
        for (case, order, provider), row in rows.items():
            ours = rows.get((case, order, "moeblaze"))
            if provider == "cublas_bound" and ours:
                bound[case, order] = ours["back_to_back_ms"] / row["back_to_back_ms"]
            if provider == "sonicmoe" and ours:
                sonicmoe[case] = row["back_to_back_ms"] / ours["back_to_back_ms"]
                peak[case] = ours["peak_mib"] / row["peak_mib"]
    spans = [(f"{min(r.values()):.2f}", f"{max(r.values()):.2f}") for r in (bound, sonicmoe, peak)]
    assert re.findall(r"(\d+\.\d+) to (\d+\.\d+)", OVERVIEW)[: len(spans)] == spans
    stated = re.search(r"is (\d+\.\d+) times as fast and needs (\d+\.\d+) of its peak memory", OVERVIEW)
    assert list(stated.groups()) == [f"{median(r.values()):.2f}" for r in (sonicmoe, peak)]
    assert f"{len(sonicmoe)} layers" in OVERVIEW and len(peak) == len(sonicmoe)


def readme_rows() -> dict[str, list[str]]:
    """Cells of the README's table by their first."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in BLOCK.splitlines() if line[:2] == "| "]
    return {first: cells for first, *cells in rows}


def of_h100() -> dict[tuple[str, str, str], dict]:
    """What the newest of the H100's records says of each case, pass and provider."""
    records = [json.loads(path.read_text()) for path in (RECORDS / "other_gpus").glob("h100-*.json")]
    extras = [row["extra_info"] for r in sorted(records, key=lambda r: r["datetime"]) for row in r["benchmarks"]]
    return {tuple(extra[name] for name in ("case", "pass", "provider")): extra for extra in extras}


def of_layers(pairs: list[tuple[float, float]]) -> list[str]:
    """Cells of times and MiB."""
    times, mib = zip(*pairs, strict=True)
    least, most = min(mib) / 1024, max(mib) / 1024
    return [f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})", f"{least:.2f} to {most:.2f}"]


def test_readme_compares_layers_as_the_records_do():
    """By another way than the summary's: other layers' times over this one's, each over the bound of its own run."""
    ours, found = {}, {"torch_grouped_mm": {}, "sonicmoe": {}}
    for rows in layer_rows():
        for (case, order, provider), row in rows.items():
            bound = rows.get((case, order, "cublas_bound"))
            if order == "transposed" and bound and provider in ("moeblaze", *found):
                entry = row["back_to_back_ms"] / bound["back_to_back_ms"], row["peak_mib"]
                (ours if provider == "moeblaze" else found[provider])[case] = entry
    cells = []
    for theirs in found.values():
        cells += of_layers([(time / ours[case][0], mib - ours[case][1]) for case, (time, mib) in theirs.items()])
    torchs, sonicmoe = map(len, found.values())
    assert readme_rows()[f"One layer, NVIDIA H200, {torchs} shapes (SonicMoE: {sonicmoe})"] == cells and sonicmoe == 21
    by_case: dict[str, dict] = {}
    for (case, what, provider), extra in of_h100().items():
        if what == "forward_backward" and "back_to_back_ms" in extra and extra["order"] == "transposed":
            by_case.setdefault(case, {})[provider] = extra
    pairs = [
        [
            (
                of[name]["back_to_back_ms"] / of["moeblaze"]["back_to_back_ms"],
                of[name]["peak_mib"] - of["moeblaze"]["peak_mib"],
            )
            for of in by_case.values()
            if name in of
        ]
        for name in found
    ]
    row = readme_rows()[f"One layer, NVIDIA H100 80GB HBM3, {len(pairs[0])} shapes (SonicMoE: {len(pairs[1])})"]
    assert row == [*of_layers(pairs[0]), *of_layers(pairs[1])] and len(pairs[1]) == 21


@pytest.mark.parametrize(
    ("record", "case", "name", "mode"),
    [
        ("", "qwen3_30b_a3b", "Qwen3-30B-A3B", "eager"),
        ("", "qwen3_30b_a3b", "Qwen3-30B-A3B", "compiled"),
        ("-lora", "qwen3_30b_a3b_lora_4k", "Qwen3-30B-A3B's adapters, 4k tokens", "eager"),
        ("-lora", "qwen3_30b_a3b_lora_32k", "Qwen3-30B-A3B's adapters, 32k tokens", "eager"),
    ],
)
def test_readme_compares_steps_as_the_records_do(record, case, name, mode):
    found = json.loads((RECORDS / f"h200-transformers{record}.json").read_text())
    extras = [row["extra_info"] for row in found["benchmarks"] if row["extra_info"]["case"] == case]
    wanted = "step" if mode == "eager" else "step_compiled"
    ours, base = ({e["provider"]: e for e in extras if e["pass"] == wanted}[n] for n in ("moeblaze", "grouped_mm"))
    cells = readme_rows()[f"Step of {name}, NVIDIA H200, {mode}"]
    more = (base["peak_mib"] - ours["peak_mib"]) / 1024
    assert cells[:2] == [f"{ours['tokens_per_second'] / base['tokens_per_second']:.2f}", f"{more:.1f}"]


def test_readme_says_what_portable_kernels_cost():
    """By another way than the summary's."""
    record = json.loads((RECORDS / "other_gpus" / "h200-portable.json").read_text())
    rows = [row["extra_info"] for row in record["benchmarks"] if row["group"] == "layer"]
    ms = {(r["case"], r["provider"]): r["back_to_back_ms"] for r in rows if r["pass"] == "forward_backward"}
    over = [took / ms[case, "cublas_bound"] for (case, name), took in ms.items() if name == "moeblaze"]
    told = f"take {min(over):.2f} to {max(over):.2f} times as long as their products in cuBLAS on an H200 ({len(over)} "
    assert told in " ".join(BLOCK.split())


def test_the_first_screen_of_the_readme_is_short():
    """At most 12 measured figures stand before the first code, which stands within 40 lines. Ranges do not count."""
    before, _, _ = README.partition("```python")
    assert before.count("\n") < 40 and README.count("\n") <= 150
    measured = re.sub(r"\d+\.\d+ to \d+\.\d+", "", BLOCK)
    assert (
        4 < len(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.]*\))", measured.replace("arxiv.org/abs/2512.14080", ""))) <= 12
    )


def test_spans_over_layers_in_e4m3_are_those_of_the_records():
    """By another way than the report's: errors, time of quantising, and passes with weight gradients in e4m3."""
    names = "h200", "h200-layers", "h200-products"
    short, of_layers, of_products = (json.loads((RECORDS / "fp8" / f"{n}.json").read_text())["rows"] for n in names)

    def between(values, digits):
        return f"{min(values):.{digits}f} to {max(values):.{digits}f}"

    for option, kind, rows in (
        ('`precision="fp8"`', "fp8: ", short),
        ("`fp8_wgrad=True`", "fp8, fp8_wgrad: ", of_layers),
        ('`save="fp8"`', "bf16, save fp8: ", short),
    ):
        errors: dict[str, list[float]] = {}
        for row in rows:
            for name, error in row["errors"].items() if row["kernel"] == "forward + backward" else ():
                if name.startswith(kind):
                    errors.setdefault(name.removeprefix(kind), []).append(1e3 * error)
        (line,) = re.findall(rf"^\| {re.escape(option)} \|(.*)\|$", RESULTS, re.MULTILINE)
        cells = [cell.strip() for cell in line.split("|")]
        assert list(errors) == ["out", "x", "weights", "w1", "w2"]
        assert cells == [between(of, 1) if max(of) else "-" for of in errors.values()], option
    text, quantising = " ".join(RESULTS.split()), {}
    for row in of_products:
        if row["kernel"].startswith("quantize_"):
            quantising.setdefault(row["kernel"], []).append(row["seconds"]["copy"] / row["seconds"]["e4m3"])
    x, weights = (between(quantising[f"quantize_{name}"], 2) for name in ("rows", "weights"))
    assert f"that of quantising is {x} for x, {weights} for the weights." in text
    speeds = [s["bf16"] / s["fp8, fp8_wgrad"] for s in (r["seconds"] for r in of_layers) if "fp8, fp8_wgrad" in s]
    assert f"gradients in e4m3 a training pass is {between(speeds, 2)} times as fast" in text
    of_pass = {what: [r["seconds"] for r in of_layers if r["kernel"] == what] for what in fp8_report.PASSES}
    forward, both, quantising = (
        between([seconds["bf16"] / seconds[kind] for seconds in of_pass[what]], 2)
        for what, kind in zip((*fp8_report.PASSES, fp8_report.PASSES[1]), ("fp8", "fp8", "fp8, quantises"), strict=True)
    )
    assert (
        f"a forward pass is {forward} times as fast and a training pass {both} times, or {quantising} times if" in text
    )


def test_generation_and_dispatch_with_other_routing_are_those_of_the_records():
    """By another way than the report's."""
    rows = json.loads((RECORDS / "generation" / "h200.json").read_text())["rows"]
    times = {(row["case"], row["sequences"], row["experts"]): row["median"] for row in rows}
    for case, number, _ in times:
        ours, base = (times[case, number, kind] for kind in ("moeblaze", "grouped_mm"))
        (line,) = re.findall(rf"^\| {case} \| {number} \|.*$", RESULTS, re.MULTILINE)
        for us in (ours, base):
            assert f"| {us / 1000:.{2 if us < 10_000 else 1}f} |" in line
        speed = base / ours
        assert line.endswith(f"| {speed:.{2 if speed >= 1 else 3}f} |")
    dispatch = [row["extra_info"] for row in json.loads((RECORDS / "h200-dispatch.json").read_text())["benchmarks"]]
    found = [
        row["times_bound"]
        for row in dispatch
        if row["provider"] == "moeblaze" and row["case"].endswith(("_one", "_zipf", "_balanced", "_skewed"))
    ]
    times_a_copy = f"{min(found):.2f} to {max(found):.2f} times a copy ({len(found)} cases)"
    assert f"With other routing a million tokens take {times_a_copy}." in RESULTS


def test_other_gpus_stand_beside_their_own_bound_and_torch():
    """By another way than the report's."""
    ratios: dict[str, list[float]] = {"bound": [], "torch": []}
    record, rows = json.loads((RECORDS / "other_gpus" / "h100-layer.json").read_text()), of_h100()
    for case in cases.LAYERS:
        times = [
            rows.get((case, "forward_backward", provider), {}).get("back_to_back_ms")
            for provider in ("moeblaze", "cublas_bound", "torch_grouped_mm")
        ]
        if all(times):
            ratios["bound"].append(times[0] / times[1])
            ratios["torch"].append(times[2] / times[0])
            line = next(ln for ln in RESULTS.split("## Other GPUs")[1].splitlines() if ln.startswith(f"| {case} |"))
            assert f" | {times[0] / times[1]:.2f} | {times[2] / times[0]:.2f} | " in line
    bound, torchs = (f"{min(r):.2f} to {max(r):.2f} times" for r in ratios.values())
    assert f"{record['machine_info']['gpu']}: a training pass takes {bound} as long as its products" in OVERVIEW
    of_all = f"(median {median(ratios['torch']):.2f}, {len(ratios['torch'])} layers)"
    assert f"`grouped_mm` {torchs} as long as this layer {of_all}" in OVERVIEW


def test_a_record_of_another_gpu_without_torch_is_refused_by_its_name(tmp_path, monkeypatch):
    record = json.loads((other_gpus.FOLDER / "h100-layer.json").read_text())
    ours = [row for row in record["benchmarks"] if row["extra_info"]["provider"] != other_gpus.PEER]
    (tmp_path / "h300-layer.json").write_text(json.dumps(record | {"benchmarks": ours}))
    monkeypatch.setattr(other_gpus, "FOLDER", tmp_path)
    said = r"^bench.report: h300-layer.json: expected a layer .* got none among the providers \['cublas_and"
    for lines in (other_gpus.headline, lambda: other_gpus.section(None, None)):
        with pytest.raises(ValueError, match=said):
            lines()


def test_two_records_of_another_gpu_are_one_table(tmp_path, monkeypatch):
    """The newer record's row stands where both have one, and each card and commit is named."""
    record = json.loads((other_gpus.FOLDER / "h100-layer.json").read_text())
    newer = json.loads(json.dumps(record | {"datetime": "2999-01-01", "commit_info": {"id": "newer12"}}))
    newer["benchmarks"] = [row for row in newer["benchmarks"] if row["extra_info"]["case"] == "conf3"]
    for row in newer["benchmarks"]:
        row["extra_info"]["back_to_back_ms"] *= 3 if row["extra_info"]["provider"] == "moeblaze" else 2
    for name, made in (("b", record), ("a", newer)):
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    before = other_gpus.layers(record)
    monkeypatch.setattr(other_gpus, "FOLDER", tmp_path)
    ((_, rows),) = other_gpus.by_gpu().items()
    both = other_gpus.SHOWN[1]
    for was, row in zip(before, rows, strict=True):
        factor = 1.5 if row["case"] == "conf3" else 1
        assert row["passes"][both][1] == pytest.approx(factor * was["passes"][both][1])
    text = "\n".join(other_gpus.section(report.table, report.peer_section))
    assert ", commit `ebcca78` (conf1, conf2, conf4," in text and "; commit `newer12` (conf3).\n" in text
    assert len(other_gpus.headline()) == 4


def test_readme_has_the_errors_and_losses_of_the_records():
    """By another way than the report's."""
    rows = json.loads((ROOT / "bench" / "records" / "h200-accuracy.json").read_text())["benchmarks"]
    norms: dict[tuple, list[float]] = {}
    for extra in (row["extra_info"] for row in rows if "accuracy" in row["extra_info"]):
        for tensor, errors in extra["accuracy"].items():
            norms.setdefault((extra["case"], extra["data"], tensor, extra["provider"]), []).append(errors["norm"])
    ratios: dict[tuple, float] = {}
    for (*key, provider), found in norms.items():
        if provider.startswith("moeblaze"):
            beside = sum(found) / sum(norms[(*key, "torch_eager")])
            ratios[tuple(key)] = max(ratios.get(tuple(key), 0.0), beside)
    assert f"against float64 are {min(ratios.values()):.2f} to {max(ratios.values()):.2f} times those" in OVERVIEW
    arms = {"minimal": [], "grouped_mm": []}
    folders = [f for f in (ROOT / "bench" / "records" / "language_model").iterdir() if f.name in ("small", "base")]
    of_size = {f: [json.loads(p.read_text()) for p in f.glob("*.json")] for f in folders}
    for result in max(of_size.values(), key=lambda results: (len(results), results[0]["parameters"])):
        arms.get(result["arm"], []).append(result["held_out_loss"])
    means = [sum(losses) / len(losses) for losses in arms.values()]
    assert f"held-out loss of {means[0]:.3f} nats per byte, with torch's `grouped_mm` at {means[1]:.3f}" in OVERVIEW
    step = json.loads((ROOT / "bench" / "records" / "language_model" / "step.json").read_text())
    ours, torchs = ({row["arm"]: row for row in step["rows"]}[arm] for arm in arms)
    faster = ours["tokens_per_second"]["median"] / torchs["tokens_per_second"]["median"]
    smaller, batch = (ours[name] / torchs[name] for name in ("peak_mib", "largest_batch"))
    assert (
        f"trains at {faster:.2f} times the tokens per second of `grouped_mm`, in {smaller:.3f} of its memory"
        in OVERVIEW
    )
    assert f"{batch:.2f} times as many sequences fit into a step" in OVERVIEW


def test_readme_has_the_times_beside_torchao():
    both = {}
    for name in ("h200", "h200-layers"):  # the second has windows of a second
        rows = json.loads((RECORDS / "fp8" / f"{name}.json").read_text())["rows"]
        of_passes = ((row["case"], row["seconds"]) for row in rows if row["kernel"] == "forward + backward")
        both.update((case, seconds) for case, seconds in of_passes if "torchao, rowwise" in seconds)
    ratios = [seconds["torchao, rowwise"] / seconds["fp8, quantises"] for seconds in both.values()]
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} times as long to train" in OVERVIEW


def test_readme_states_no_other_measurement():
    """Times and rates outside the block would not be checked."""
    outside = README.replace(BLOCK, "")
    assert not re.findall(r"\d\s*(?:ms|µs|TFLOP/s|GB/s)\b", outside)


def test_plots_are_there():
    assert "](docs/front.svg)" in BLOCK
    for name in ("time_over_bound.svg", "memory.svg"):
        assert f"]({name})" in RESULTS


def test_a_newer_record_takes_a_rows_place_with_its_own_bound(tmp_path):
    def written(name, date, bound, ours):
        rows = [
            {
                "group": "layer",
                "stats": {"median": seconds, "iqr": None},
                "extra_info": {"case": "conf3", "order": "transposed", "provider": provider, "pass": "forward"},
            }
            for provider, seconds in (("cublas_bound", bound), ("moeblaze", ours))
            if seconds
        ]
        (tmp_path / f"{name}.json").write_text(json.dumps({"datetime": date, "benchmarks": rows}))

    written("a", "2026-01-02", 2.0, 3.0)
    written("b", "2026-01-01", 1.0, 9.0)
    rows = {row["provider"]: row for row in Records.load(tmp_path).rows("layer")}
    assert rows["moeblaze"]["forward"] == 3.0 and rows["moeblaze"]["forward_ratio"] == 1.5
    written("c", "2026-01-03", 4.0, None)  # a bound alone must not change the ratio of the other run
    rows = {row["provider"]: row for row in Records.load(tmp_path).rows("layer")}
    assert rows["moeblaze"]["forward_ratio"] == 1.5 and rows["cublas_bound"]["forward"] == 4.0


def test_a_readme_without_its_block_is_refused():
    with pytest.raises(ValueError, match=r"README\.md: expected a block"):
        summary.put("no block", "block", "README.md")


def full_record() -> dict:
    """Rows of every suite with figures that no two share, as a run on a GPU writes them."""
    figures = iter(range(1, 10**6))
    rows = []

    def add(group, **about):
        seconds = (1000 + next(figures)) * 1e-6
        row = {"group": group, "stats": {"median": seconds, "iqr": None}, "extra_info": about}
        rows.append(row)
        return seconds

    for provider in ("cublas_bound", "moeblaze", "sonicmoe", "torch_grouped_mm"):
        for what in ("forward", "forward_backward"):
            keeps = provider != "cublas_bound" and what == "forward_backward"
            kept = {"saved_mib": next(figures), "peak_mib": next(figures)} if keeps else {}
            if keeps:
                kept["errors"] = {name: next(figures) / 1e3 for name in cases.RESULTS}
            calls = {"back_to_back_ms": 2000 + next(figures), "back_to_back_w": 3000 + next(figures)}
            more = {**calls, "busy_s": 0.4, **kept, "pass": what}
            add("layer", case="conf3", order="transposed", provider=provider, **more)
            skewed = {"case": "conf3_skewed", "routing": "skewed", "order": "transposed", "provider": provider}
            if provider in ("moeblaze", "sonicmoe"):
                add("layer", **skewed, **more)
    for case in ("conf3", "tab2_8k_h256", "tab2_2m_h256_silu"):
        for provider in ("moeblaze", "moeblaze_recompute", "torch_grouped_mm"):
            add("memory", case=case, provider=provider, saved_mib=next(figures), peak_mib=next(figures))
    of_gemms = (("conf3", ("cublas", "gathered")), (cases.GATHER.name, ("cublas", "gathered", "contiguous")))
    for case, rows_ in ((case, kind) for case, kinds in of_gemms for kind in kinds):
        provider, kind = ("cublas_bound", "contiguous") if rows_ == "cublas" else ("moeblaze", rows_)
        about = {"case": case, "order": "transposed", "kernel": "up_fwd", "provider": provider, "rows": kind}
        add("grouped_gemm", **about, tflops=next(figures), times_bound=1.5, share_of_roofline=0.5)
    for group in ("aggregation", "router"):
        add(group, case="conf3", kernel="k", provider="moeblaze", times_bound=1.25, gb_per_s=next(figures))
    for step in cases.ABLATION:
        add("ablation", case="tab4", provider=step, saved_mib=next(figures))
    small = {"touched_experts": 82.5, "times_bound": 1.75, "gb_per_s": next(figures), "shape": "L16"}
    add("small_batch", case="qwen30b_16", order="transposed", provider="moeblaze", **small, **{"pass": "forward"})
    machine = {"gpu": "a GPU", "torch": "2", "peers": {"sonic-moe": "0.1"}}
    return {"machine_info": machine, "commit_info": {"id": "c"}, "datetime": "2026-01-01", "benchmarks": rows}


def test_every_suite_has_its_section():
    """And each of its figures stands there: a section that dropped rows would go unnoticed elsewhere."""
    record = full_record()
    text = report.results(Records({"full": record}))
    for heading in ("Forward, calls", "Forward and backward, calls", "Figures 3 and 5", "Table 2:", "Products of",
                    "7.3", "Aggregation", "Router", "Tables 4 and 5", "back to back", "Errors against",
                    "Small batches", "Other layers"):  # fmt: skip
        assert re.search(rf"^##+ .*{re.escape(heading)}", text, re.MULTILINE), heading
    numbers = {number.replace(",", "") for number in NUMBER.findall(text)}
    for row in record["benchmarks"]:
        extra = row["extra_info"]
        if row["group"] == "layer" and extra["case"] == "conf3_skewed":
            assert f"{row['stats']['median'] * 1e3:.2f}" in numbers, row
            continue  # its other figures have no table
        if row["group"] == "dispatch" and cases.DISPATCHES[extra["case"]].routing != "random":
            continue  # the page has their least and greatest
        for name in ("saved_mib", "peak_mib", "back_to_back_ms", "back_to_back_w"):
            if name in extra and (name != "back_to_back_w" or extra["provider"] == "moeblaze"):
                assert str(extra[name]) in numbers, row
        if extra["provider"] in ("moeblaze", "torch_grouped_mm"):  # of one layer, so the least and the greatest
            assert {f"{1e3 * error:.2f}" for error in extra.get("errors", {}).values()} <= numbers, row
        # not shown: single calls of a layer, the bound of a product, the time of a memory row outside Table 2
        shown = row["group"] not in ("layer", "memory")
        shown = shown and extra["provider"] != "cublas_bound"
        if row["group"] == "grouped_gemm" and extra["case"] != cases.GATHER.name:  # whose section has times alone
            assert extra["provider"] == "cublas_bound" or f"{extra['tflops']:.3g}" in numbers, row
        elif shown:
            seconds = row["stats"]["median"]
            assert {f"{seconds * 1e3:.2f}", f"{seconds * 1e6:.0f}"} & numbers, row
    assert "| out of memory |" in text  # as the paper prints it
    assert "sonic-moe 0.1" in text
    assert "1.75" in numbers and "82.5" in numbers


def transformers_record():
    """A record of two implementations, as bench/bench_transformers.py writes it."""

    def row(provider, what, tokens_per_second, peak):
        info = {"case": "olmoe_1b_7b", "pass": what, "provider": provider, "tokens_per_second": tokens_per_second}
        stats = {"median": 0.5, "iqr": 0.01}
        return {"group": "transformers", "extra_info": info | {"peak_mib": peak}, "stats": stats}

    rows = [row("moeblaze", "step", 3000.0, 1024.0), row("grouped_mm", "step", 2000.0, 2048.0)]
    return {"machine_info": {"gpu": "a GPU"}, "benchmarks": rows}


def test_transformers_stand_beside_grouped_mm():
    from bench import transformers_report

    text = "\n".join(transformers_report.section([transformers_record()], report.table))
    assert "| olmoe_1b_7b | step | moeblaze | 3,000 | 1.50 | 1.00 | 0.500 | 2.0 |" in text
    assert transformers_report.section([], report.table) == []


def test_transformers_have_a_plot():
    pytest.importorskip("matplotlib")
    from bench import plots
    from bench.recorded import Records

    assert plots.transformers(Records({})) is None
    figure = plots.transformers(Records({"record": transformers_record()}))
    assert "(a GPU, bf16)" in figure.get_suptitle()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Tokens per second", "Peak memory, GiB"]


def test_other_suites_of_two_gpus_stand_side_by_side(tmp_path, records):
    """The rows that both have, from this package's records as if another GPU had been 1.5 times as far from bounds."""
    folder = tmp_path / "h100"
    folder.mkdir()
    assert two_gpus.section(report.table, records, tmp_path) == []
    about = {"machine_info": {"gpu": "another GPU"}, "commit_info": {"id": "other12"}}
    dispatch = json.loads((RECORDS / "h200-dispatch.json").read_text())
    times = {}
    for row in dispatch["benchmarks"]:
        extra = row["extra_info"]
        if extra["provider"] == "moeblaze" and extra["case"] in ("qwen3_1m", "dsv3_1m"):
            times[extra["case"]] = extra["times_bound"]
            extra["times_bound"] *= 1.5
        elif "times_bound" in extra:
            del extra["times_bound"]
    (folder / "dispatch.json").write_text(json.dumps(dispatch | about))
    fp8 = json.loads((RECORDS / "fp8" / "h200-layers.json").read_text())
    fp8["rows"] = [row for row in fp8["rows"] if row["case"] == "readme"]
    speeds = {
        row["kernel"]: row["seconds"]["bf16"] / row["seconds"]["fp8"] for row in fp8["rows"] if "fp8" in row["seconds"]
    }
    (folder / "fp8.json").write_text(json.dumps(fp8 | about))
    text = "\n".join(two_gpus.section(report.table, records, tmp_path))
    assert "| figure | rows | NVIDIA H200 | another GPU |" in text
    least, most = min(times.values()), max(times.values())
    cells = f"{least:.2f} to {most:.2f} | {1.5 * least:.2f} to {1.5 * most:.2f}"
    assert f"| dispatch of a million tokens, times a copy | 2 | {cells} |" in text
    for words, what in (("forward", "forward"), ("training pass", "forward + backward")):
        one = f"{speeds[what]:.2f} to {speeds[what]:.2f}"
        assert f"| {words} in fp8, times the speed of bf16 | 1 | {one} | {one} |" in text
    assert "Those of another GPU are `other12`." in text
    assert text.count("\n| ") == 5  # a head, dispatch, and three passes in fp8
