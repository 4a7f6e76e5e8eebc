"""What a monitor of experts, and recorded and replayed routing, cost of a training step of a model of transformers.

python -m bench.watched_steps --out FILE.json [--layers 4] [--compiled-layers 4] [--tokens 4096]

A step is a forward with loss and backward of layers at the sizes of Qwen3-30B-A3B, without an optimizer, eager and
compiled. The arms are the same model, whose copies share their parameters: with nothing, with a
monitor, with what a step records, and with that replayed. Their order changes from round to round.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench import bench_transformers, inputs, measure, table

FIRST, CALLS, ROUNDS = 4, 6, 15


def steps(case: bench_transformers.Model, compiles: bool) -> tuple[dict[str, Callable[[], None]], Any, Any]:
    """Steps by arm, the monitor and the routing."""
    from moeblaze_cupy.interop.transformers import Routing, monitor

    torch._dynamo.config.skip_nnmodule_hook_guards = False  # the copies are one code, with and without hooks
    model = bench_transformers.build(case)
    model.set_experts_implementation("moeblaze")
    tokens = torch.randint(bench_transformers.VOCABULARY, (case.B, case.T), device=inputs.device())
    watched, routed = (bench_transformers.copy_of(model) for _ in range(2))
    loads, routing = monitor(watched), Routing(routed)
    with routing.record() as record, torch.no_grad():
        routed(input_ids=tokens, use_cache=False)
    ids = record.ids
    calls = {id(each): torch.compile(each) if compiles else each for each in (model, watched, routed)}

    def step(of) -> None:
        calls[id(of)](input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    def recorded() -> None:
        with routing.record():
            step(routed)

    def replayed() -> None:
        with routing.replay(ids):
            step(routed)

    arms = {"nothing": lambda: step(model), "monitor": lambda: step(watched), "record": recorded, "replay": replayed}
    return arms, loads, routing


def measured(case: bench_transformers.Model, compiles: bool) -> list[dict]:
    arms, loads, routing = steps(case, compiles)
    for name in (*arms, *arms):  # compiled code may be compiled again after other arms
        start = time.perf_counter()
        for _ in range(FIRST // 2):
            arms[name]()
        if inputs.has_gpu():
            torch.cuda.synchronize()
        print(f"{name}: first steps in {time.perf_counter() - start:.1f} s", flush=True)
    times = measure.host_microseconds(arms, CALLS, ROUNDS, waits=True)
    mode, layers, rows = "compiled" if compiles else "eager", case.sizes["num_hidden_layers"], []
    tokens = (FIRST + ROUNDS * CALLS) * case.B * case.T
    counted, forced = loads.read().tokens.tolist(), routing.counts()["forced"]
    if counted != [tokens] * layers or forced != tokens * layers:
        raise RuntimeError(f"expected {tokens} tokens in each of {layers} layers, got {counted}, in all {forced}")
    for name, quartiles in times.items():
        more = quartiles["median"] / times["nothing"]["median"] - 1
        rows.append({"mode": mode, "layers": layers, "tokens": case.B * case.T, "arm": name, **quartiles, "more": more})
    return rows


def main(*argv: str) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.watched_steps", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4, help="of eager steps, 0 for none (%(default)s)")
    parser.add_argument("--compiled-layers", type=int, default=4, help="of compiled ones (%(default)s)")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step, one sequence (%(default)s)")
    parser.add_argument("--out", metavar="FILE.json", help="a record")
    args = parser.parse_args(argv or None)
    inputs.expect_gpu(parser)
    case, rows = replace(bench_transformers.MODELS["qwen3_30b_a3b"], B=1, T=args.tokens), []
    for compiles, layers in ((False, args.layers), (True, args.compiled_layers)):
        if layers:
            rows += measured(replace(case, sizes=case.sizes | {"num_hidden_layers": layers}), compiles)
            measure.release()
        if args.out:
            measure.write_record(measure.record(rows=rows), args.out)
    head = ["step", "layers", "with", "q1 us", "median us", "q3 us", "more, %"]
    lines = [
        [r["mode"], str(r["layers"]), r["arm"], *(f"{r[q]:.0f}" for q in measure.QUARTILES), f"{100 * r['more']:.2f}"]
        for r in rows
    ]
    print("\n".join(table.aligned([head, *lines], 3)))


if __name__ == "__main__":
    main()
