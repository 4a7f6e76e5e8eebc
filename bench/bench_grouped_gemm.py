"""Each product of the experts, beside the product alone through cuBLAS and its roofline, and with the gather against
contiguous rows (section 7.3).

The rows "down_fwd + sums" and "up_bwd + sums" time the product and the sum over each token's slots, as the layer runs
them; the cuBLAS rows beside them, down_fwd and up_bwd, have no sums. "+ float32 sums" are weight gradients that are
added to what such buffers hold. down_bwd finds the router weights in the order of its rows, which a layer makes once
per backward.
"""

import pytest

from bench import cases, kernels, measure, verify
from bench.conftest import orders, parametrize

pytestmark = pytest.mark.benchmark(timer=measure.CLOCK, group="grouped_gemm")
GATHERING = ("up_fwd", "down_bwd", "down_wgrad", "up_wgrad")  # those that read x or grad_out through the lists


def pytest_generate_tests(metafunc):
    def combinations(name, config):
        case = cases.LAYERS[name]
        for number, order in enumerate(orders(config)):
            # cuBLAS's operands do not depend on the order of ours: once is enough
            for rows in ("gathered",) if number else ("cublas", "gathered"):
                yield from ((case, order, entry, rows) for entry in kernels.GEMMS)
            if order == "transposed":
                yield from ((case, order, entry, "accumulated") for entry in kernels.WGRADS)
            if case is cases.GATHER:
                yield from ((case, order, entry, "contiguous") for entry in GATHERING)

    tiny = [(cases.TINY, "transposed", entry, "cublas") for entry in kernels.GEMMS]
    parametrize(metafunc, "conf1,conf3,conf5,qwen30b,readme,sonic7b,dsv3,one_expert,gather", combinations, tiny)


@pytest.fixture(scope="module")
def built():
    """The kernels of one case, order and kind of rows at a time: their buffers fill gigabytes."""
    made = {}
    yield made
    made.clear()


def test_grouped_gemm(spec, current, built, time_device):
    """Time of one product with what the layer fuses into it. Its result is compared with float64 first."""
    case, order, entry, rows = spec
    inputs = current.inputs_of(case, order)
    work = kernels.gemm_work(case, entry)
    label = entry
    if rows == "cublas":
        built.clear()
        call = kernels.dense_product(case, entry, inputs["x"].device)
    else:
        key = (case, order, rows)
        if key not in built:
            built.clear()
            measure.release()
            built[key] = kernels.Kernels(case, inputs, rows == "contiguous", rows == "accumulated")
        kernel = built[key]
        label += " + sums" if entry in kernels.SUMMED else " + float32 sums" if rows == "accumulated" else ""
        call = kernel.calls[entry]
        call()
        error = kernel.error(entry)
        assert error <= verify.TOLERANCE, f"{entry} on {case.name}: relative error {error:.2g}; no time for it"
    time_device(
        call,
        bound=(case, entry),
        is_bound=rows == "cublas",
        lead=True,
        flops=work.flops,
        nbytes=work.nbytes,
        case=case.name,
        shape=case.shape,
        order=order,
        provider="cublas_bound" if rows == "cublas" else "moeblaze",
        kernel=label,
        rows={"cublas": "contiguous", "accumulated": "gathered"}.get(rows, rows),
    )
    if rows == "cublas":
        del call
        measure.release()
