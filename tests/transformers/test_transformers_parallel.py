"""Models of transformers on two processes over gloo: its expert parallelism with this layer, and this one's."""

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "distributed"):
    pytest.skip("needs transformers with DistributedConfig", allow_module_level=True)
from tests.parallel import ranks_transformers  # noqa: E402
from tests.parallel.test_exchange import assert_right, run  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("ranks"), "transformers")


@pytest.mark.parametrize("name", ranks_transformers.MODEL_CASES)
def test_case(results, name):
    assert_right(results, name, ranks_transformers.MODEL_CASES[name])
