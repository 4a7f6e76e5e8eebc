"""docs/pytorch.md: every program of it runs, in order, and prints what its comments say."""

import re
import socket
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from moeblaze_cupy.interop.torch import MoE  # noqa: E402
from tests.torch_versions import NO_SHARDING_ON_THE_CPU  # noqa: E402

PAGE = (Path(__file__).parent.parent.parent / "docs" / "pytorch.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def expected(block: str) -> list[str]:
    return re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE)


@pytest.fixture(scope="module")
def one_process():
    """As torchrun sets it. The page calls init_process_group as a user does."""
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        for name, value in (address | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}).items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_the_programs_run_in_order_and_print(one_process, capfd, monkeypatch, on_gpu):
    if not on_gpu:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names: dict = {}
    for block in BLOCKS:
        if "fully_shard" in block and NO_SHARDING_ON_THE_CPU and not on_gpu:
            continue
        exec(compile(block, "docs/pytorch.md", "exec"), names)
        printed = capfd.readouterr().out.splitlines()
        assert printed, block
        if wanted := expected(block):
            assert printed[: len(wanted)] == wanted  # on a GPU a CUDA graph prints one more
    assert len(BLOCKS) > 10


def load_experts():
    names: dict = {"torch": torch}
    (block,) = [block for block in BLOCKS if "def load_experts" in block]
    exec(block[: block.index("\n\nprefix")], names)
    return names["load_experts"]


@pytest.mark.parametrize("model", ["mixtral", "qwen3"])
def test_weights_of_a_checkpoint_give_the_models_own_outputs(model):
    """In float64, from the names that the model's checkpoints on disk have."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    E, k, d, h = 6, 2, 16, 12
    sizes = {"hidden_size": d, "num_experts_per_tok": k, "experts_implementation": "eager"}
    if model == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Of

        config = transformers.MixtralConfig(intermediate_size=h, num_local_experts=E, **sizes)
        names = "w1", "w3", "w2"
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Of

        config = transformers.Qwen3MoeConfig(moe_intermediate_size=h, num_experts=E, norm_topk_prob=True, **sizes)
        names = "gate_proj", "up_proj", "down_proj"
    block = Of(config).double().eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    gate, up = block.experts.gate_up_proj.chunk(2, dim=1)
    stacked = dict(zip(names, (gate, up, block.experts.down_proj), strict=True))
    state = {f"p.experts.{e}.{n}.weight": w[e].detach() for n, w in stacked.items() for e in range(E)}
    state["p.gate.weight"] = block.gate.weight.detach()
    layer = MoE(d, h, E, k, dtype=torch.float64)
    load_experts()(layer, state, "p.", names)
    x = torch.randn(2, 20, d, dtype=torch.float64)
    want = block(x)
    want = want[0] if isinstance(want, tuple) else want
    # transformers' router computes its weights in float32, of which 24 bits are left
    assert (layer(x) - want).norm() <= 1e-6 * want.norm()
