"""Models of transformers on two processes over gloo: its expert parallelism with this layer, and this one's."""

from contextlib import closing

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(transformers, "distributed"):
    pytest.skip("needs transformers with DistributedConfig", allow_module_level=True)
from tests.parallel import ranks_transformers  # noqa: E402
from tests.parallel.rank_processes import RankProcesses  # noqa: E402
from tests.parallel.test_exchange import RANKS, parameters_of, skip_if_missing  # noqa: E402


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    with closing(RankProcesses(2, tmp_path_factory.mktemp("ranks"), *RANKS, "transformers")) as processes:
        yield processes


@pytest.mark.parametrize("name", parameters_of(ranks_transformers.MODEL_CASES, "tokens_that_differ"))
def test_case(processes, name):
    skip_if_missing(ranks_transformers.MODEL_CASES[name])
    processes.run(name)
