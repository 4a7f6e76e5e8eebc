"""What the process of a rank runs: python -m tests.megatron.ranks RANK SIZE FOLDER CONNECTION.

Every case compares the layer in Megatron's own model parts with Megatron's SequentialMLP in the same ones, which
computes by torch's products, one expert after the other.
"""

import contextlib
import functools
import itertools
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import squared_relu
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from bench import megatron as bench
from moeblaze_cupy.interop import megatron
from moeblaze_cupy.interop.megatron import layer as layer_by_index
from moeblaze_cupy.interop.megatron.experts import MoeblazeGroupedMLP
from moeblaze_cupy.interop.megatron.layer import MoeblazeMoELayer
from tests.megatron.simulated import replace_cuda
from tests.parallel.rank_processes import answer

E, D, H = 4, 16, 8
LINEARS = ("linear_fc1", "linear_fc2")
MESHES = {  # by number of ranks: tensor, expert, and expert tensor parallelism
    1: {"one rank": (1, 1, 1)},
    2: {"data": (1, 1, 1), "experts": (1, 2, 1), "hidden": (2, 1, 2), "tokens": (2, 2, 1)},
}
# float32: sums of up to 48 products in another order. bfloat16: Megatron rounds the first layer, the activation and
# their gradients to 8 bits, and the layer rounds elsewhere.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
VARIANTS = {
    "swiglu": {},
    "bf16": {"params_dtype": torch.bfloat16, "bf16": True},
    "allgather": {"moe_token_dispatcher_type": "allgather"},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "geglu": {"activation_func": F.gelu},
    "clamp": {"activation_func_clamp_value": 0.1},
    "gpt-oss": {"activation_func": quick_gelu, "activation_func_clamp_value": 0.1, "glu_linear_offset": 1.0},
    "relu2": {"activation_func": squared_relu, "gated_linear_unit": False},
    "probs on input": {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True},
    "float64 probs": {"moe_router_dtype": "fp64"},
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}
BIASES = {"add_bias_linear": True}
VARIANTS["biases"] = VARIANTS["gpt-oss"] | BIASES
OF_MANY = ("swiglu", "bf16")  # variants for several ranks
BY_INDEX = {name: VARIANTS[name] for name in (*OF_MANY, "recompute", "probs on input", "float64 probs", "capacity")}
BY_INDEX |= {"shared": {"moe_shared_expert_intermediate_size": H}, "biases": VARIANTS["biases"]}


def config_of(mesh=(1, 1, 1), **options):
    tensor, expert, expert_tensor = mesh
    base = {
        "num_layers": 1, "hidden_size": D, "num_attention_heads": 2, "ffn_hidden_size": H, "moe_ffn_hidden_size": H,
        "num_moe_experts": E, "moe_router_topk": 2, "gated_linear_unit": True, "activation_func": F.silu,
        "add_bias_linear": False, "bias_activation_fusion": False, "moe_token_dispatcher_type": "alltoall",
        "use_cpu_initialization": True, "moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3, "init_method_std": 0.3,
        "tensor_model_parallel_size": tensor, "expert_model_parallel_size": expert,
        "expert_tensor_parallel_size": expert_tensor, "sequence_parallel": tensor > 1,
    }  # fmt: skip
    return TransformerConfig(**base | options)


@contextlib.contextmanager
def specs_of_megatron():
    """Specs name Megatron's experts."""
    present = LocalSpecProvider.grouped_mlp_modules
    LocalSpecProvider.grouped_mlp_modules = present.of_megatron
    try:
        yield
    finally:
        LocalSpecProvider.grouped_mlp_modules = present


def layer_of(config, own=False, seed=0, whole=False):
    """A Megatron layer with the layer's experts, or with Megatron's own. whole: by index."""
    torch.manual_seed(seed)
    with specs_of_megatron() if own else contextlib.nullcontext():
        spec = get_moe_module_spec(use_te=False, num_experts=E)
    layer = (functools.partial(MoeblazeMoELayer, **spec.keywords) if whole else spec)(config=config)
    layer.set_layer_number(1)
    assert type(layer.experts) is (SequentialMLP if own else MoeblazeGroupedMLP)
    return layer


def pair_of(config, whole=False):
    """The same layer with Megatron's experts and with ours, by name."""
    layers = {"own": layer_of(config, own=True), "ours": layer_of(config, seed=1, whole=whole)}
    for each in layers["own"].experts.local_experts if config.add_bias_linear else ():
        for name in LINEARS:  # Megatron begins with zeros
            getattr(each, name).bias.detach().normal_()
        # Megatron adds the bias in place to a view, which autograd refuses.
        each.linear_fc2.register_forward_hook(lambda linear, given, out: (out[0].clone(), out[1]))
    layers["ours"].load_state_dict(layers["own"].state_dict())
    return layers


def stacked(experts, linear, attribute, kind="weight"):
    """A tensor of all experts' weights or biases, such as grad. The attribute "data" is the weights themselves."""
    if isinstance(experts, MoeblazeGroupedMLP):
        return getattr(getattr(getattr(experts, linear), kind), attribute)
    return torch.stack([getattr(getattr(getattr(each, linear), kind), attribute) for each in experts.local_experts])


def kinds(layer):
    """All parameters of experts, as linear and kind."""
    return list(itertools.product(LINEARS, ("weight", "bias") if layer.config.add_bias_linear else ("weight",)))


def gradients(layer, attribute="grad"):
    return gradients_of_experts(layer, attribute) | {"router": getattr(layer.router.weight, attribute)}


def gradients_of_experts(layer, attribute="grad"):
    return {f"{name}.{kind}": stacked(layer.experts, name, attribute, kind) for name, kind in kinds(layer)}


def inputs(rank, config, number=0, tokens=12):
    generator = torch.Generator().manual_seed(10 * number + rank)
    return tuple(torch.randn(tokens, 2, D, generator=generator).to(config.params_dtype) for _ in range(2))


def step(layer, rank, config, number=0, **arguments):
    """Forward and backward; returns the output and the gradient of the input by name."""
    x, grad_out = inputs(rank, config, number)
    x.requires_grad_()
    out, bias = layer(x, **arguments)
    assert bias is None
    out.backward(grad_out)
    return {"out": out.detach(), "dx": x.grad}


def compare(got, expected, dtype=torch.float32):
    assert got.keys() == expected.keys()
    for name, right in expected.items():
        right = right.double()
        error = float((got[name].double() - right).norm() / right.norm())
        assert right.norm() > 0 and error < TOLERANCE[dtype], (name, error)


def parity(rank, mesh, options):
    config = config_of(mesh, **options)
    found = {}
    for name, layer in pair_of(config).items():
        found[name] = step(layer, rank, config) | gradients(layer)
    compare(found["ours"], found["own"], config.params_dtype)


def by_index(rank, mesh, options, refused=None):
    """The whole layer, whose tokens no dispatcher moves, beside Megatron's with its own experts.

    refused: what is told of a configuration that runs by Megatron's dispatcher.
    """
    config, found = config_of(mesh, **options), {}
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, 8:] = True
    layers = pair_of(config, whole=True)
    assert type(layers["ours"]) is MoeblazeMoELayer and layers["ours"].refused == refused
    if refused is None:
        layers["ours"].token_dispatcher = None
    for name, layer in layers.items():
        found[name] = step(layer, rank, config, padding_mask=padding) | gradients(layer)
        if config.moe_shared_expert_intermediate_size:
            found[name] |= {f"shared {n}": getattr(layer.shared_experts, n).weight.grad for n in LINEARS}
    compare(found["ours"], found["own"], config.params_dtype)


def not_by_index(rank, mesh):
    """Other experts, and other arguments than of training."""
    spec = get_moe_module_spec(use_te=False, num_experts=E)
    spec.keywords["submodules"].experts = spec.keywords["submodules"].experts.keywords["fallback"]
    layer = MoeblazeMoELayer(config_of(mesh), **spec.keywords)
    assert layer.refused == "experts of SequentialMLP"
    try:
        layer_of(config_of(mesh), whole=True)(torch.zeros(1, 1, D), intermediate_tensors=())
    except ValueError as error:
        assert str(error).startswith("MoeblazeMoELayer: intermediate_tensors: expected None")
    else:
        raise AssertionError("intermediate_tensors are not taken")


def main_grad(rank, mesh, fused, delayed, overlap, whole=False, biases=False):
    """Two microbatches under DDP, whose sums are over ranks."""
    config = config_of(mesh, add_bias_linear=biases)
    config.delay_wgrad_compute = delayed  # Megatron's own check asks for its schedules
    layers, found = pair_of(config, whole), {}
    ours = layers["ours"].experts
    for name, layer in layers.items():
        later = delayed and name == "ours"
        layer.config.gradient_accumulation_fusion = fused and name == "ours"  # Megatron's own needs a CUDA extension
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, delay_wgrad_compute=later
        )
        model = DistributedDataParallel(config, options, layer)
        model.zero_grad_buffer()
        if name == "ours":
            assert [len(each.hooks) for each in (ours.linear_fc1, ours.linear_fc2)] == [int(later)] * 2
        for number in range(2):
            with model.no_sync() if number == 0 else torch.enable_grad():
                step(layer, rank, config, number)
                layer.backward_dw() if later else None
        model.finish_grad_sync()
        assert all(parameter.grad is None for parameter in layer.parameters())
        found[name] = gradients(layer, "main_grad")
    compare(found["ours"], found["own"])


def state_of(layer, singleton, moments):
    """The layer's sharded state, and a state of an optimizer beside each weight. moments: makes it of the weight."""
    metadata = {"singleton_local_shards": singleton}
    state = layer.sharded_state_dict(metadata=dict(metadata))
    weights = {key: entry for key, entry in state.items() if key.endswith(("weight", "bias"))}
    of_optimizer = {
        key: make_sharded_optimizer_tensor(entry, moments(entry.data.detach()), "optimizer.state.exp_avg")
        for key, entry in weights.items()
    }
    return {"model": state, "optimizer": of_optimizer}


def moments_of(weight):
    return 2 * weight + 1


def handed_on(source, target, singleton, folder):
    """What `source` saves and `target` loads; returns the target, whose bits are checked."""
    Path(folder).mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state_of(source, singleton, moments_of), folder)
    state = dist_checkpointing.load(state_of(target, singleton, torch.zeros_like), folder)
    target.load_state_dict(state["model"])
    for name, kind in kinds(source):
        assert torch.equal(*(stacked(layer.experts, name, "data", kind) for layer in (source, target))), name
    assert torch.equal(source.router.weight, target.router.weight)
    for name, weight in target.named_parameters():
        assert torch.equal(state["optimizer"][name], moments_of(weight)), name
    return target


def checkpoints(rank, mesh, singleton, options):
    """From Megatron's experts to ours and back, bit by bit."""
    config, folder = config_of(mesh, **options), tempfile.mkdtemp() if rank == 0 else None
    told = [folder]
    dist.broadcast_object_list(told)
    own = pair_of(config)["own"]
    ours = handed_on(own, layer_of(config, seed=1), singleton, f"{told[0]}/own")
    handed_on(ours, layer_of(config, own=True, seed=2), singleton, f"{told[0]}/ours")


def start(rank, mesh, on_cpu):
    """Weights and the attributes that Megatron's optimizers and DDP read, as Megatron's own experts begin with."""

    @torch.no_grad()
    def numbered(weight):
        return weight.copy_(torch.arange(weight.numel()).view(weight.shape))

    options = {"init_method": numbered, "output_layer_init_method": numbered, "use_cpu_initialization": on_cpu}
    layers = [layer_of(config_of(mesh, **options), own=own) for own in (True, False)]
    for name in LINEARS:
        assert torch.equal(*(stacked(layer.experts, name, "data") for layer in layers)), name
        own = getattr(layers[0].experts.local_experts[0], name).weight
        ours = getattr(layers[1].experts, name).weight
        for attribute in ("tensor_model_parallel", "allreduce", "partition_stride", "dtype", "device"):
            assert getattr(own, attribute) == getattr(ours, attribute), (name, attribute)
        assert ours.partition_dim == own.partition_dim + 1


def run_experts(experts, x, counts, probs, grad_out, rows):
    """Output, dx and the gradient of the probabilities of the first rows."""
    x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
    out, _ = experts(x, counts, probs)
    out.backward(grad_out)
    assert probs.grad.dtype == probs.dtype
    return {"out": out.detach()[:rows], "dx": x.grad[:rows], "dprobs": probs.grad[:rows]}


def whole_model(rank, mesh):
    """A GPTModel that Megatron makes of its own spec: loss and the gradient of every parameter."""
    config, found = config_of(mesh, hidden_dropout=0.0, attention_dropout=0.0), {}
    tokens = torch.arange(24).reshape(2, 12) % 7
    state = None
    for name in ("own", "ours"):
        with specs_of_megatron() if name == "own" else contextlib.nullcontext():
            model = GPTModel(config, get_gpt_layer_local_spec(num_experts=E), vocab_size=8, max_sequence_length=12)
        state = state or model.state_dict()
        model.load_state_dict(state)
        mask = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
        loss = model(tokens, torch.arange(12).expand(2, 12), mask, labels=tokens)
        loss.mean().backward()
        (layer,) = model.decoder.layers
        assert isinstance(layer.mlp.experts, SequentialMLP if name == "own" else MoeblazeGroupedMLP)
        found[name] = {"loss": loss.detach()} | gradients(layer.mlp)
        found[name] |= {n: p.grad for n, p in model.named_parameters() if "experts" not in n}
    compare(found["ours"], found["own"])


def garbage_rows(rank, mesh, dtype):
    """Rows behind the sum of the counts hold NaN; the gradients that come for them do too."""
    layers, counts = pair_of(config_of(mesh)), torch.tensor([3, 0, 5, 1])
    torch.manual_seed(0)
    x, probs, grad_out = torch.randn(12, D), torch.rand(12, dtype=dtype), torch.randn(12, D)
    for array in (x, probs, grad_out):
        array[9:] = torch.nan
    own = run_experts(layers["own"].experts, x[:9], counts, probs[:9], grad_out[:9], 9)
    out = run_experts(layers["ours"].experts, x, counts, probs, grad_out, 12)
    assert not any(rows[9:].any() for rows in out.values())  # NaN would be true
    weights = [gradients_of_experts(layer) for layer in layers.values()]
    compare({name: rows[:9] for name, rows in out.items()} | weights[1], own | weights[0])


def no_rows(rank, mesh, delayed):
    config = config_of(mesh)
    config.delay_wgrad_compute = delayed
    experts = layer_of(config).experts
    found = run_experts(
        experts, torch.zeros(0, D), torch.zeros(E, dtype=torch.int64), torch.zeros(0), torch.zeros(0, D), 0
    )
    experts.backward_dw()
    assert [tuple(each.shape) for each in found.values()] == [(0, D), (0, D), (0,)]
    assert not any(parameter.grad.any() for parameter in experts.parameters())


def two_pending(rank, mesh):
    """Two forwards wait for their weight gradients, which come first in, first out."""
    config = config_of(mesh)
    config.delay_wgrad_compute = True
    layers = pair_of(config)
    steps = {name: [step(layer, rank, config, number) for number in range(2)] for name, layer in layers.items()}
    for got, expected in zip(steps["ours"], steps["own"], strict=True):
        compare(got, expected)
    ours = layers["ours"]
    assert all(parameter.grad is None for parameter in ours.experts.parameters())
    first = layer_of(config, own=True)
    step(first, rank, config, 0)
    ours.backward_dw()
    compare(gradients_of_experts(ours), gradients_of_experts(first))
    ours.backward_dw()
    ours.backward_dw()  # nothing is left to do
    compare(gradients(ours), gradients(layers["own"]))


def state_dicts(rank, mesh, biases):
    """Names of Megatron's grouped experts, of SequentialMLP, and the parameters' own."""
    config = config_of(mesh, add_bias_linear=biases)
    layers = pair_of(config)
    ours, of_kinds = layers["ours"].experts, kinds(layers["ours"])
    state = ours.state_dict()
    assert state.keys() == {f"{name}.{kind}{i}" for name, kind in of_kinds for i in range(E)}
    assert all(state[f"linear_fc1.weight{i}"].data_ptr() == ours.linear_fc1.weight[i].data_ptr() for i in range(E))
    extra = {"linear_fc1._extra_state": None, "linear_fc2._extra_state3": None}
    parameters = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    for given in (state, state | extra, parameters, layers["own"].experts.state_dict()):
        other = layer_of(config, seed=1)
        other.experts.load_state_dict(given)
        for name, kind in of_kinds:
            found, wanted = (stacked(of, name, "data", kind) for of in (other.experts, layers["own"].experts))
            assert wanted.any() and torch.equal(found, wanted), (name, kind)
    del state["linear_fc2.weight1"]
    try:
        ours.load_state_dict(state)
    except RuntimeError as error:
        assert "linear_fc2.weight" in str(error)
    else:
        raise AssertionError("an expert is missing")
    mesh = init_device_mesh("cpu", (1,))
    ours.linear_fc1.weight = torch.nn.Parameter(distribute_tensor(ours.linear_fc1.weight.detach(), mesh))
    try:
        ours.state_dict()
    except TypeError as error:
        assert "Megatron-FSDP" in str(error)
    else:
        raise AssertionError("Megatron-FSDP has sharded a parameter")


def benchmark(rank, mesh):
    """The rows of the benchmark, of a small shape and without a GPU."""
    bench.ROUNDS = 2
    rows = bench.measured("tiny", bench.TINY)
    assert [row["layer"] for row in rows] == ["SequentialMLP", "experts", "by index"]
    for row in rows:
        assert max(row["errors"].values()) < TOLERANCE[torch.bfloat16] and row["speed"] > 0
        assert bool(any(row["errors"].values())) == (row["layer"] != "SequentialMLP")


def cases_of(size):
    """The cases of so many ranks by name."""
    cases = {}
    for name, mesh in MESHES[size].items():

        def add(case, function, *arguments, name=name, mesh=mesh):
            cases[f"{name}, {case}"] = functools.partial(function, mesh=mesh, **dict(*arguments))

        for variant, options in VARIANTS.items():
            if size == 1 or variant in (*OF_MANY, "allgather") or (variant == "biases" and mesh[2] == 1):
                add(f"parity, {variant}", parity, {"options": options})
        for variant, options in BY_INDEX.items() if mesh[2] == 1 else ():
            if size == 1 or variant in (*OF_MANY, "shared"):
                add(f"by index, {variant}", by_index, {"options": options})
        if mesh[1] > 1:
            refused = "add_bias_linear with expert parallelism"
            add("by index, biases", by_index, {"options": BIASES, "refused": refused})
        for switches in itertools.product((False, True), repeat=3):
            on = dict(zip(("fused", "delayed", "overlap"), switches, strict=True))
            add(f"main_grad, {on}", main_grad, on)
        if mesh[2] == 1:
            on = {"fused": True, "delayed": False, "overlap": True, "biases": True}
            add("main_grad of biases", main_grad, on)
            add("main_grad, by index", main_grad, {"fused": True, "delayed": False, "overlap": True, "whole": True})
        else:
            add("by index, refused", by_index, {"options": {}, "refused": f"expert_tensor_parallel_size={mesh[2]}"})
        for singleton in (False, True):
            add(f"checkpoint, singleton={singleton}", checkpoints, {"singleton": singleton, "options": {}})
            if mesh[2] == 1:
                biased = {"singleton": singleton, "options": BIASES}
                add(f"checkpoint of biases, singleton={singleton}", checkpoints, biased)
        if mesh[0] == 1 and (size == 1 or mesh[1] > 1):
            add("benchmark", benchmark)
        add("checkpoint without a gate", checkpoints, {"singleton": False, "options": VARIANTS["relu2"]})
        for on_cpu in (False, True):
            add(f"start, on_cpu={on_cpu}", start, {"on_cpu": on_cpu})
    if size == 1:
        for dtype in (torch.float32, torch.float64):
            add(f"garbage rows, {dtype}", garbage_rows, {"dtype": dtype})
        for delayed in (False, True):
            add(f"no rows, delayed={delayed}", no_rows, {"delayed": delayed})
        padded = {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}
        add("by index, padded", by_index, {"options": padded, "refused": "moe_pad_expert_input_to_capacity=True"})
        add("by index, refused", not_by_index)
        add("two pending", two_pending)
        add("whole model", whole_model)
        for biases in (False, True):
            add(f"state dicts, biases={biases}", state_dicts, {"biases": biases})
    return cases


CASES = {size: cases_of(size) for size in MESHES}


def main():
    folder = sys.argv[3]
    rank, size, connection = (int(sys.argv[place]) for place in (1, 2, 4))
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # Megatron compiles activations
    tempfile.tempdir = folder
    replace_cuda(setattr)
    megatron.install()
    present = []  # the mesh of the groups that there are

    def run_case(name):
        mesh = MESHES[size][name.split(", ")[0]]
        if mesh not in present:  # the threads of groups that are left take all cores
            if present:
                parallel_state.destroy_model_parallel()
                dist.destroy_process_group()
                layer_by_index._expert_group.cache_clear()
            store = dist.FileStore(f"{folder}/store{mesh}", size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=mesh[0],
                expert_model_parallel_size=mesh[1],
                expert_tensor_parallel_size=mesh[2],
            )
            present[:] = [mesh]
        CASES[size][name](rank)

    answer(run_case, connection)


if __name__ == "__main__":
    main()
