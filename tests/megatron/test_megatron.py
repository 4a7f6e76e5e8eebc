"""Megatron-Core: its parts with the layer's experts on CPUs over gloo, one and two ranks, and what is refused."""

import logging
import sys
import types
from contextlib import closing

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
import torch

from moeblaze_cupy.interop import megatron
from moeblaze_cupy.interop.megatron import configuration, providers
from moeblaze_cupy.interop.megatron.experts import MoeblazeGroupedMLP
from tests.environment import run_python
from tests.megatron import ranks
from tests.parallel.rank_processes import RankProcesses

RANKS = "-W", "ignore", "-m", "tests.megatron.ranks"  # Megatron warns of libraries that it does not find


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    with closing(RankProcesses(1, tmp_path_factory.mktemp("ranks"), *RANKS)) as processes:
        yield processes


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    with closing(RankProcesses(2, tmp_path_factory.mktemp("ranks"), *RANKS)) as processes:
        yield processes


@pytest.mark.parametrize("name", ranks.CASES[1])
def test_one_rank(one_process, name):
    one_process.run(name)


@pytest.mark.parametrize("name", ranks.CASES[2])
def test_two_ranks(two_processes, name):
    two_processes.run(name)


OTHER = torch.nn.functional.mish
REFUSED = [
    *(({name: 1}, f"{name}=1") for name in configuration.REFUSED),
    *(
        ({"add_bias_linear": True, name: True}, f"add_bias_linear with {name}=True")
        for name in configuration.NOT_BIASED
    ),
    ({"transformer_impl": "inference_optimized"}, "transformer_impl='inference_optimized'"),
    ({"fine_grained_activation_offloading": True, "offload_modules": ["moe_act"]}, "offload_modules=['moe_act']"),
    ({"activation_func": OTHER}, f"activation_func={OTHER!r} with a gate, clamp None, offset 0.0"),
    ({"activation_func": OTHER, "gated_linear_unit": False}, f"activation_func={OTHER!r} without a gate"),
    ({"activation_func": ranks.quick_gelu, "glu_linear_offset": 1.0}, "with a gate, clamp None, offset 1.0"),
    ({"activation_func_clamp_value": 2.0, "bias_activation_fusion": True}, "with a gate, clamp 2.0, offset 0.0"),
]


def built(config, pg_collection=None):
    """What `build_experts` returns of a fallback that hands its arguments back."""
    return megatron.build_experts(
        4, config, pg_collection=pg_collection, name="n", fallback=lambda *a, **k: (a, k), save="recompute"
    )


@pytest.mark.parametrize(
    ("options", "reason"), REFUSED, ids=lambda value: ",".join(value) if isinstance(value, dict) else ""
)
def test_a_refused_option_leaves_megatrons_experts(caplog, options, reason):
    providers._tell.cache_clear()
    config = ranks.config_of()
    assert configuration.refusal(config, None) is None
    for name, value in options.items():  # as Megatron's own checks ask for more than the option
        setattr(config, name, value)
    with caplog.at_level(logging.WARNING):
        assert built(config) == ((4, config), {"pg_collection": None, "name": "n"})
        built(config)
    (record,) = caplog.records  # of two layers
    assert record.message.startswith("the routed experts stay Megatron's, as moeblaze_cupy does not serve ")
    assert reason in record.message
    with pytest.raises(ValueError, match=r"^MoeblazeGroupedMLP: config: expected what the layer serves, got "):
        MoeblazeGroupedMLP(4, config, pg_collection=None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"optimizer": "dist_muon"}, "the optimizer 'dist_muon', which"),
        ({"use_megatron_fsdp": True}, "Megatron-FSDP, whose"),
        ({"use_torch_fsdp2": True}, "FSDP2, whose"),
    ],
)
def test_what_the_arguments_of_a_run_name_is_refused(monkeypatch, arguments, reason):
    told = types.SimpleNamespace(_GLOBAL_ARGS=types.SimpleNamespace(**arguments))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", told)
    assert configuration.refusal(ranks.config_of(), None).startswith(reason)
    told._GLOBAL_ARGS = types.SimpleNamespace(optimizer="adam", use_megatron_fsdp=False)
    assert configuration.refusal(ranks.config_of(), None) is None


def test_install_twice_and_with_another_save(monkeypatch):
    provider = ranks.LocalSpecProvider
    own = provider.grouped_mlp_modules
    monkeypatch.setattr(provider, "grouped_mlp_modules", own)
    for save in ("minimal", "recompute"):
        megatron.install(save)
        made = provider().grouped_mlp_modules(True)
        assert made.func is megatron.build_experts and made.keywords["save"] == save
        assert made.keywords["fallback"].func is ranks.SequentialMLP
    with pytest.raises(ValueError, match=r"^install: save: expected one of 'minimal'.*, got 'most'"):
        megatron.install("most")


SPECS = """
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
def experts_of(spec):
    return spec.submodules.mlp.keywords["submodules"].experts.func.__name__
print(experts_of(hybrid_stack_spec.submodules.moe_layer), experts_of(get_gpt_layer_local_spec(num_experts=4)))
"""


@pytest.mark.parametrize("words", [[], ["-m", "moeblaze_cupy", "run", "--megatron", "--", sys.executable]], ids=len)
def test_run_reaches_specs_that_megatron_makes_while_it_is_imported(words):
    done = run_python(*words, "-W", "ignore", "-c", SPECS)
    expected = "build_experts" if words else "SequentialMLP"
    assert done.stdout.split() == [expected] * 2, done.stderr


@pytest.mark.parametrize("argument", ["output_buffer", "grad_input_buffer", "routing_map"])
def test_what_dispatchers_give_for_others_is_refused(argument):
    experts = MoeblazeGroupedMLP.__new__(MoeblazeGroupedMLP)
    with pytest.raises(ValueError, match=f"^MoeblazeGroupedMLP: {argument}: expected None, got <class"):
        experts.__class__.forward(experts, None, None, None, **{argument: torch.zeros(1)})


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["plain", "delayed", "biases"])
@pytest.mark.parametrize("counts_on", ["cpu", "cuda"])
def test_rows_on_a_gpu(counts_on, how):
    """Without a stand-in for CUDA, beside float64 products of each expert; the last rows hold NaN."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
    config = ranks.config_of(hidden_size=64, moe_ffn_hidden_size=32, ffn_hidden_size=32, use_cpu_initialization=False)
    config.params_dtype, config.delay_wgrad_compute = torch.bfloat16, how == "delayed"
    config.add_bias_linear = how == "biases"
    groups = types.SimpleNamespace(ep=None, expt_tp=None, expt_dp=None)
    experts = MoeblazeGroupedMLP(4, config, pg_collection=groups)
    counts, rows = torch.tensor([30, 0, 50, 20], device=counts_on), 100
    torch.manual_seed(0)
    for linear in (experts.linear_fc1, experts.linear_fc2):
        if linear.bias is not None:
            linear.bias.detach().normal_()
    x, grad_out = (torch.randn(128, 64, device="cuda").bfloat16() for _ in range(2))
    probs = torch.rand(128, device="cuda")
    for array in (x, probs, grad_out):
        array[rows:] = torch.nan
    found = ranks.run_experts(experts, x, counts, probs, grad_out, 128)
    experts.backward_dw()
    found |= {name: parameter.grad for name, parameter in experts.named_parameters()}
    assert not any(found[name][rows:].any() for name in ("out", "dx", "dprobs"))  # NaN would be true
    leaves = {"dx": x[:rows], "dprobs": probs[:rows]} | dict(experts.named_parameters())
    leaves = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    w1, w2 = leaves["linear_fc1.weight"], leaves["linear_fc2.weight"]
    b1, b2 = (leaves.get(f"linear_fc{n}.bias", torch.zeros(4, 1, device="cuda").double()) for n in (1, 2))
    parts, out = (leaves[name].split(counts.tolist()) for name in ("dx", "dprobs")), []
    for e, (each, prob) in enumerate(zip(*parts, strict=True)):
        gate, up = (each @ w1[e].T + b1[e]).chunk(2, 1)
        out.append(((torch.nn.functional.silu(gate) * up) @ w2[e].T + b2[e]) * prob[:, None])
    torch.cat(out).backward(grad_out[:rows].double())
    expected = {"out": torch.cat(out).detach()} | {name: leaf.grad for name, leaf in leaves.items()}
    found |= {name: found[name][:rows] for name in ("out", "dx", "dprobs")}
    ranks.compare(found, expected, torch.bfloat16)
