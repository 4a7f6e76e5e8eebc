"""The forward of torch's own products in e4m3 beside which bench.fp8 times the layer, and the report of its record."""

import json
import sys

import pytest

torch = pytest.importorskip("torch")

from bench import cases, fp8, fp8_quantize, fp8_report, fp8_torch, fp8_torchao, inputs, verify  # noqa: E402

CASE = cases.LayerCase("tiny", 60, 48, 32, 5, 2, "test")


def layer(made):
    """(L, d) in float64, expert by expert."""
    out = torch.zeros(CASE.L, CASE.d, dtype=torch.float64)
    for expert in range(CASE.E):
        tokens, slots = (made["ids"] == expert).nonzero(as_tuple=True)
        y = verify.activate(made["x"][tokens].double() @ made["w1"][expert].double(), CASE.activation)[0]
        out.index_add_(0, tokens, y @ made["w2"][expert].double() * made["weights"][tokens, slots, None].double())
    return out


def grouped(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """torch._scaled_grouped_mm in float64, with the shapes and strides that the real one wants."""
    torch.ops.aten._scaled_grouped_mm(
        *(t.to("meta") if t.dim() < 3 else t.transpose(1, 2).to("meta").transpose(1, 2) for t in (a, b)),
        *(t.to("meta") for t in (scale_a, scale_b, offs)),
        out_dtype=out_dtype,
    )
    parts, start = [], 0
    for expert, end in enumerate(offs.tolist()):
        rows = a[start:end].double() * scale_a[start:end, None]
        parts.append(rows @ (b[expert].double() * scale_b[expert]))
        start = end
    return torch.cat(parts).to(out_dtype)


def test_torchs_forward_is_the_layer(monkeypatch):
    made = inputs.layer_inputs(CASE, "transposed")
    made = {name: array.cpu() for name, array in made.items()}
    monkeypatch.setattr(torch, "_scaled_grouped_mm", grouped, raising=False)
    out = fp8_torch.forward(CASE, made, compiles=False)()
    error = float((out.double() - layer(made)).norm() / layer(made).norm())
    assert out.dtype == torch.bfloat16 and 0.01 < error < 0.1
    assert fp8.relative_difference(out, out) == 0


@pytest.mark.parametrize("multiple", [16, 128])
def test_torchaos_layer_is_the_layer(multiple):
    made = inputs.layer_inputs(CASE, "transposed")
    made = {name: array.cpu() for name, array in made.items()}
    made = {name: array.double() if array.is_floating_point() else array for name, array in made.items()}

    def product(rows, weight, ends):
        """In the groups that torchao's product takes."""
        starts = [0, *ends.tolist()]
        assert ends.dtype == torch.int32 and starts[-1] == len(rows) and not any(end % multiple for end in starts)
        return torch.cat([rows[a:b] @ w for a, b, w in zip(starts, starts[1:], weight, strict=False)])

    found = fp8_torchao.TorchAO(CASE, made, product, multiple, compiles=False)
    want = layer({**made, **dict(zip(found.names, found.leaves, strict=True))})
    got = {"out": found.forward(), **found.named(found.forward_backward())}
    wanted = {"out": want, **found.named(torch.autograd.grad(want, found.leaves, made["grad_out"]))}
    for name, value in wanted.items():  # float64 throughout
        assert float((got[name] - value).detach().norm() / value.detach().norm()) < 1e-12, name


def test_torchaos_emulated_products_are_not_timed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)  # not installed
    with pytest.raises(ImportError, match="deep_gemm"):
        fp8_torchao.product_of("blockwise")


def test_a_peer_that_does_not_run_or_is_wrong_is_left_out(capsys):
    want = torch.ones(32, 4)

    def fails():
        raise ImportError("no such package")

    makers = {
        "right": lambda: {"forward": lambda: want},
        "absent": fails,
        "wrong": lambda: {"forward": lambda: 2 * want},
        "not a number": lambda: {"forward": lambda: want * float("nan")},
    }
    running, errors = fp8.check_peers("case", makers, want)
    assert list(running) == ["right"] and errors == {"right: out": 0}
    printed = capsys.readouterr().out
    assert "absent does not run: ImportError: no such package" in printed and "not a number: expected" in printed


def test_the_report_has_a_peer_where_it_has_run(tmp_path):
    record = json.loads(fp8_report.RECORD.read_text())
    found = fp8_report.by_case()
    case = next(iter(found))
    for row in record["rows"]:
        for _, peer, *_ in fp8_report.OF_PEERS:
            row["seconds"].pop(peer, None)
        for _, peer, name, kind in fp8_report.OF_PEERS[:2]:
            if (row["case"], row["kernel"]) == (case, name):
                row["seconds"][peer] = 2.5 * row["seconds"][kind]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    changed = fp8_report.by_case(path)
    first, *others = fp8_report.layer_rows(changed, found, changed)
    assert first[0] == case and first[-2:] == ["2.50", "2.50"] and all(row[-2:] == ["-", "-"] for row in others)
    assert {peer for _, peer, *_ in fp8_report.OF_PEERS} <= {*fp8.PEERS}


def test_the_report_has_the_kernels_that_make_e4m3_where_they_were_timed():
    found = {"first": {}, "second": {}}
    assert fp8_report.of_quantizing(found) == []
    times = (3e9, {"e4m3": 1e-3, "copy": 0.9e-3}), (6e9, {"e4m3": 2e-3, "copy": 1.5e-3})
    rows = [
        {"case": "second", "kernel": kernel, "bytes": nbytes, "errors": {}, "seconds": seconds}
        for kernel, (nbytes, seconds) in zip(fp8_report.QUANTIZED, times, strict=True)
    ]
    found["second"] = {row["kernel"]: row for row in rows}
    (sentence,) = fp8_report.of_quantizing(found)
    assert "is 0.90 to 0.90 for x, 0.75 to 0.75 for the weights" in sentence
    assert fp8_report.QUANTIZED == fp8_quantize.KERNELS
    assert [line.split()[-1] for line in fp8.text(rows)[-2:]] == ["0.90", "0.75"]


def test_a_copy_of_many_bytes_is_one_of_fewer(monkeypatch):
    monkeypatch.setattr(fp8_quantize, "MOST_COPIED", 64)
    for nbytes, copied, times in ((64, 32, 1), (160, 32, 2.5), (48, 24, 1)):
        call, factor = fp8_quantize.copy_of(nbytes, torch.device("cpu"))
        assert call().numel() == copied and factor == times


@pytest.mark.skipif(inputs.has_gpu(), reason="for machines without a GPU, where kinds are those of the reference")
def test_the_layers_kinds_are_timed_and_wgrad_has_its_own_errors(monkeypatch):
    """fp8_wgrad changes the gradients of the weights alone, and no forward."""
    case = cases.LayerCase("tiny", 60, 128, 64, 5, 2, "test")
    monkeypatch.setitem(cases.LAYERS, "tiny", case)
    forward, both = fp8.layer_rows("tiny", inputs.layer_inputs(case), 1e-4, 2)
    ours = set(forward["seconds"]) - {*fp8.PEERS}
    assert fp8.WGRAD not in ours and set(both["seconds"]) == ours | {fp8.WGRAD} == {*fp8.LAYERS}
    errors = both["errors"]
    for name in ("out", "x", "weights"):
        assert errors[f"{fp8.WGRAD}: {name}"] == errors[f"fp8: {name}"] > 0
    for name in ("w1", "w2"):
        assert errors[f"fp8: {name}"] < errors[f"{fp8.WGRAD}: {name}"] < 0.1
    assert fp8_report.wgrad_rows({"tiny": {"forward": forward, "forward + backward": both}})[0][0] == "tiny"


def test_the_report_has_weight_gradients_in_e4m3_where_they_were_timed():
    assert fp8_report.WGRAD == fp8.WGRAD
    seconds = {"bf16": 3e-3, "fp8": 2.4e-3}
    plain = {"forward + backward": {"seconds": seconds}}
    with_wgrad = {"forward + backward": {"seconds": {**seconds, fp8.WGRAD: 2e-3}}}
    assert fp8_report.wgrad_rows({"first": plain, "second": with_wgrad}) == [["second", "1.50", "1.20"]]
