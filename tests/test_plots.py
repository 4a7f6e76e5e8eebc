"""Plots and drawings: nothing lies outside the canvas or on another text, and they show what the records hold."""

import functools
import itertools
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench import cases, plots, sweep_report
from bench.recorded import RECORDS, Records
from bench.table import merged_layers, rows_of
from docs import draw

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def records() -> Records:
    return Records.load()


@functools.cache
def figure_of(name: str) -> Figure:
    """Skips where no record has what it shows."""
    figure = plots.DRAWN[name](records()) if name in plots.DRAWN else draw.DRAWN[name]()
    return figure or pytest.skip(f"no record of {name}")


@functools.cache
def rendered(figure: Figure):
    """Draws it, which settles its layout, and gives what measures its parts."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return canvas.get_renderer()


def shown_texts(figure: Figure) -> list[tuple[str, object]]:
    """Every text that is drawn, with its box in pixels."""
    renderer = rendered(figure)
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts]


def outside_canvas(figure: Figure) -> list[str]:
    """Artists of which a part lies outside the figure, by more than half a pixel."""
    renderer, canvas, found = rendered(figure), figure.bbox, []
    for artist in figure.findobj(lambda a: a is not figure and a.get_visible() and a.get_in_layout()):
        box = artist.get_tightbbox(renderer)
        if box is None or not (box.width and box.height):
            continue
        if min(box.x0, box.y0) < -0.5 or box.x1 > canvas.x1 + 0.5 or box.y1 > canvas.y1 + 0.5:
            found.append(f"{artist}: {box.extents} of {canvas.extents}")
    return found


def overlapping_texts(figure: Figure) -> list[tuple[str, str]]:
    texts = shown_texts(figure)
    return [
        (one, other)
        for i, (one, box) in enumerate(texts)
        for other, its in texts[i + 1 :]
        if box.x0 < its.x1 and its.x0 < box.x1 and box.y0 < its.y1 and its.y0 < box.y1
    ]


@pytest.mark.parametrize("name", [*plots.DRAWN, *draw.DRAWN])
def test_nothing_is_clipped_or_covered(name):
    assert outside_canvas(figure_of(name)) == []
    assert overlapping_texts(figure_of(name)) == []


def test_what_is_clipped_or_covered_is_found():
    """The test above proves nothing if it sees no clipped text."""
    figure = Figure(figsize=(4, 3))
    axes = figure.subplots()
    axes.text(0.5, 0.5, "covered")
    axes.text(0.5, 0.5, "above")
    assert overlapping_texts(figure) == [("covered", "above")] and outside_canvas(figure) == []
    clipped = Figure(figsize=(4, 3))
    clipped.legend(handles=clipped.subplots().plot([0, 1], label="a long label " * 20), loc="lower left")
    assert outside_canvas(clipped)


@pytest.mark.parametrize("name", plots.DRAWN)
def test_plots_name_this_package(name):
    assert any(plots.OURS in text for text, _ in shown_texts(figure_of(name)))
    comments = re.findall("<!--(.*?)-->", (ROOT / "docs" / name).read_text())  # matplotlib's, one per text
    assert any(plots.OURS in comment for comment in comments)


def test_front_figure_shows_the_records():
    """By another way than the plot's: each row of the newest records of layers, and the sentence on top."""
    texts = " ".join(text for text, _ in shown_texts(figure_of("front.svg")))
    found = [merged_layers(rows_of(records().by_name["h200-layer-peers"], "layer"))]
    found.append(merged_layers(rows_of(json.loads((RECORDS / "other_gpus" / "h100-layer.json").read_text()), "layer")))
    assert "Time, NVIDIA H200" in texts and "Time, NVIDIA H100" in texts
    for rows, case in itertools.product(found, plots.FRONT_CASES):
        by_key = {(row["case"], row["provider"]): row for row in rows if row["order"] == "transposed"}
        ours = by_key[case, "moeblaze"]
        for provider in plots.FRONT_PROVIDERS:
            row = by_key[case, provider]
            times = row["forward_backward_back_to_back"] / row["forward_backward_back_to_back_bound"]
            assert f"{times:.2f}" in texts and f"{row['peak_mib'] / 1024:.2f}" in texts
            if row is not ours:  # "faster than SonicMoE and torch, in less memory"
                assert times > ours["forward_backward_back_to_back_ratio"] and row["peak_mib"] > ours["peak_mib"]


def test_dots_are_at_the_records_figures():
    first, drawn = figure_of("time_over_bound.svg").axes
    at = {c.get_label(): {tuple(point) for point in c.get_offsets().tolist()} for c in drawn.collections}
    names = [label.get_text() for label in first.get_yticklabels()]
    entries = {e["case"]: e for e in records().layers() if (e["provider"], e["order"]) == ("moeblaze", "transposed")}
    expected = {
        (e["forward_backward_back_to_back_ratio"], float(names.index(cases.NAMES[case]))) for case, e in entries.items()
    }
    assert at[plots.OURS] == expected


def test_write_makes_every_plot(tmp_path):
    plots.write(records(), tmp_path)
    shown = {path.name for path in (ROOT / "docs").glob("*.svg")}
    assert {path.name for path in tmp_path.iterdir()} == shown <= set(plots.DRAWN)
    assert all(path.read_text().rstrip().endswith("</svg>") for path in tmp_path.iterdir())


def test_drawings_are_those_of_the_script():
    assert {path.name for path in (ROOT / "docs" / "drawings").iterdir()} == set(draw.DRAWN)


def swept_record(gpu: str, date: str, of_h: dict[int, float], commit: str = "abc1234") -> dict:
    """A record of the sweep of h: this package's time over the bound by h, torch's twice that."""
    rows = []
    for h, ratio in of_h.items():
        for provider, times in (("cublas_bound", 1.0), ("moeblaze", ratio), ("torch_grouped_mm", 2 * ratio)):
            info = {"case": f"granularity_h{h}", "order": "transposed", "provider": provider}
            info |= {"pass": "forward_backward", "back_to_back_ms": 4.0 * times}
            rows.append({"group": "sweep", "stats": {"median": 5e-3 * times, "iqr": None}, "extra_info": info})
    about = {"machine_info": {"gpu": gpu}, "commit_info": {"id": commit}, "datetime": date}
    return {**about, "benchmarks": rows}


def test_sweeps_have_a_panel_per_gpu_and_the_newest_records_ratios():
    made = Records(
        {
            "a": swept_record("one GPU", "2026-01-01", {128: 1.5, 256: 1.25}),
            "b": swept_record("one GPU", "2026-01-02", {256: 1.125}, "def5678"),
            "c": swept_record("other GPU", "2026-01-03", {512: 1.0625}),
        }
    )
    figure = plots.swept(made, "granularity")
    assert outside_canvas(figure) == [] and overlapping_texts(figure) == []
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["one GPU", "other GPU"]
    drawn = [{line.get_label(): dict(line.get_xydata().tolist()) for line in axes.lines} for axes in figure.axes]
    assert drawn[0][plots.OURS] == {128: 1.5, 256: 1.125} and drawn[0]["torch grouped_mm"] == {128: 3, 256: 2.25}
    assert drawn[1][plots.OURS] == {512: 1.0625}
    text = "\n".join(sweep_report.section(made))
    assert "one GPU, commit `abc1234`, `def5678`; other GPU, commit `abc1234`." in text
    assert "(granularity.svg)" in text and "sparsity.svg" not in text
    assert plots.swept(made, "sparsity") is None and sweep_report.section(Records({})) == []
