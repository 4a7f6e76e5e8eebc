"""What is measured: layer shapes, keyed by the paper's table or figure, with the numbers that it prints.

Letters as in the README: L tokens, d model width, h hidden width of one expert, E experts, k experts per token. The
paper measured on an H100 with torch 2.0; its numbers are kept here as printed and never mixed with measured ones.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

ROUTINGS = ("random", "balanced", "skewed")
GATED = ("swiglu",)
RESULTS = ("out", "x", "weights", "w1", "w2")  # of a layer, compared with float64: its output and its gradients
SAMPLED_ABOVE = 2**17  # tokens; the comparison of a larger batch takes samples


@dataclass(frozen=True)
class Paper:
    """One number set of the paper. Times in ms, memory in MB as printed; None where it prints nothing."""

    where: str  # "Table 2"
    system: str  # "MoEBlaze", "MegaBlocks", or the implementation of an ablation
    time_ms: float | None = None
    memory_mb: float | None = None
    note: str = ""


@dataclass(frozen=True)
class LayerCase:
    """One layer and its batch. `source` says where the shape is from."""

    name: str
    L: int
    d: int
    h: int
    E: int
    k: int
    source: str
    activation: str = "swiglu"
    routing: str = "random"
    paper: tuple[Paper, ...] = field(default=(), compare=False)

    @property
    def slots(self) -> int:
        return self.L * self.k

    @property
    def first_columns(self) -> int:
        """Columns of the first product: gate and up half, or one."""
        return self.h * (2 if self.activation in GATED else 1)

    @property
    def forward_flops(self) -> int:
        return 2 * self.slots * self.d * (self.first_columns + self.h)

    def flops(self, what: str) -> int:
        """Of "forward", or of "forward_backward": each product has two gradients."""
        return self.forward_flops * (3 if what == "forward_backward" else 1)

    @property
    def shape(self) -> str:
        return f"L{self.L}-d{self.d}-h{self.h}-E{self.E}-k{self.k}"

    @property
    def info(self) -> dict:
        """What tells a row's case in a record."""
        return {
            "case": self.name,
            "source": self.source,
            "shape": self.shape,
            "activation": self.activation,
            "routing": self.routing,
        }


@dataclass(frozen=True)
class DispatchCase:
    """One build of the index lists."""

    name: str
    L: int
    E: int
    k: int
    source: str
    routing: str = "random"
    dtype: str = "int32"
    paper: tuple[Paper, ...] = field(default=(), compare=False)

    @property
    def slots(self) -> int:
        return self.L * self.k

    @property
    def shape(self) -> str:
        return f"L{self.L}-E{self.E}-k{self.k}-{self.dtype}"


# What a reader knows a shape as.
NAMES = {
    "mixtral": "Mixtral 8x7B",
    "olmoe": "OLMoE",
    "qwen30b": "Qwen3-30B-A3B",
    "dsv3": "DeepSeek-V3",
    "gptoss20b": "gpt-oss-20b",
    "gptoss": "gpt-oss-120b",
    "qwen3next": "Qwen3-Next-80B-A3B",
    "glm45air": "GLM-4.5-Air",
    "minimax_m2": "MiniMax-M2",
    "kimi_k2_eighth": "Kimi-K2, an eighth",
    "llama4scout": "Llama 4 Scout",
    "marin": "marin's shape",
    "sonic7b": "SonicMoE's 7B",
    "readme": "SonicMoE's README",
    "conf4t": "paper's conf4, of its text",
    **{f"conf{n}": f"paper's conf{n}" for n in (1, 2, 3, 4, 5, 6)},
    **{f"tab2_{size}": f"paper's Table 2, {size.upper()} tokens" for size in ("8k", "32k", "128k", "512k", "2m")},
}


def _both(where: str, blaze: tuple, block: tuple) -> tuple[Paper, ...]:
    return (Paper(where, "MoEBlaze", *blaze), Paper(where, "MegaBlocks", *block))


# Table 1; h = 4d. Figures 3 and 5 (memory) and 4 and 6 (speed-up over MegaBlocks) print no numbers; those below are
# from the text of sections 6.3 to 6.6. conf4 has d = 512 in Table 1 and d = 2048 in the text: both are here.
_TABLE1 = {
    "conf1": (65536, 512, 2048, 4, 1),
    "conf2": (65536, 1024, 4096, 8, 2),
    "conf3": (65536, 1024, 4096, 16, 4),
    "conf4": (32768, 512, 2048, 16, 4),
    "conf4t": (32768, 2048, 8192, 16, 4),
    "conf5": (16384, 1024, 4096, 16, 4),
    "conf6": (8192, 2048, 8192, 8, 4),
}
_FIGURES = {
    ("conf3", "swiglu"): (
        Paper("Figure 5", "MoEBlaze", memory_mb=10000, note="approximately"),
        Paper("Figure 5", "MegaBlocks", memory_mb=40000, note="over"),
    ),
    ("conf4t", "silu"): (
        Paper("Figure 3", "MoEBlaze", memory_mb=6100),
        Paper("Figure 3", "MegaBlocks", memory_mb=22000),
    ),
}
# least and most speed-up over MegaBlocks in a training pass
SPEEDUPS = {"silu": ("Figure 4", 1.4, 3.7), "swiglu": ("Figure 6", 2.0, 6.2)}


def _table1() -> list[LayerCase]:
    return [
        LayerCase(name + suffix, *shape, "Table 1", activation, paper=_FIGURES.get((name, activation), ()))
        for activation, suffix in (("swiglu", ""), ("silu", "_silu"))
        for name, shape in _TABLE1.items()
    ]


# Table 2: (SwiGLU, SiLU), each MoEBlaze's time and memory, then MegaBlocks'. Its caption says d = d' = 256, and its
# memory fits h = 256. h = 512, as in the layers it is to stand for, is there under the plain names.
_TABLE2 = {
    "8k": (8192, (1.0, 155, 1.8, 495), (0.7, 108, 1.4, 303)),
    "32k": (32768, (2.3, 477, 5.9, 1931), (1.8, 334, 4.4, 1163)),
    "128k": (131072, (7.7, 1766, 22.5, 7675), (6.3, 1238, 16.1, 4603)),
    "512k": (524288, (28.7, 6918, None, None), (24.0, 4854, None, None)),
    "2m": (2097152, (115.2, 27528, None, None), (95.3, 19320, None, None)),
}


def _table2() -> list[LayerCase]:
    cases = []
    for size, (L, swiglu, silu) in _TABLE2.items():
        for activation, suffix, numbers in (("swiglu", "", swiglu), ("silu", "_silu", silu)):
            paper = _both("Table 2", numbers[:2], numbers[2:])
            if numbers[2] is None:
                paper = (paper[0], replace(paper[1], note="out of memory"))
            shape = (L, 256, 256, 128, 4)
            cases.append(LayerCase(f"tab2_{size}_h256{suffix}", *shape, "Table 2", activation, paper=paper))
    for activation, suffix in (("swiglu", ""), ("silu", "_silu")):
        for size, (L, *_) in _TABLE2.items():
            cases.append(LayerCase(f"tab2_{size}{suffix}", L, 256, 512, 128, 4, "Table 2, h = 512", activation))
    return cases


ABLATION = ("routed torch, sort", "fused kernels, sort", "and recomputation, sort", "and dispatch")
_ABLATION_PAPER = ("PyTorch, sort", "Triton, sort", "Triton + SAC, sort", "Triton + SAC, hash")
# Table 4 prints 333 ms for the second row where Table 5 prints 324
_TABLES45 = {
    "tab4": ((524288, 256, 256, 128, 4), "Table 4", (654, 333, 290, 287), (11750, 7958, 6934, 6918)),
    "tab5_e512": ((524288, 256, 256, 512, 4), "Table 5", (1076, 352, 340, 336), (8166, 6294, 5782, 5766)),
    "tab5_e32": ((524288, 512, 512, 32, 4), "Table 5", (887, 561, 511, 509), (22278, 14646, 12598, 12582)),
}


def _ablation() -> list[LayerCase]:
    return [
        LayerCase(
            name,
            *shape,
            where,
            paper=tuple(Paper(where, *row) for row in zip(_ABLATION_PAPER, times, memory, strict=True)),
        )
        for name, (shape, where, times, memory) in _TABLES45.items()
    ]


# Section 7.3 counts about 400k tokens; they are taken as routed rows, L*k.
GATHER = LayerCase(
    "sec73", 204800, 1024, 4096, 8, 2, "section 7.3",
    paper=(Paper("section 7.3", "gather over contiguous rows", note="approximately 30% slower"),),
)  # fmt: skip

# conf1's widths and tokens on one expert, whose weight gradients have 32 and 64 tiles.
ONE_EXPERT = LayerCase("one_expert", 65536, 512, 2048, 1, 1, "few large experts")

_SMALL = (16, 128, 1024)  # tokens of an inference step, on qwen30b's widths

_SONICMOE = {
    "sonic1b4_n256": (40960, 768, 256, 128, 8),
    "sonic1b4_n1024": (40960, 768, 1024, 32, 2),
    "sonic7b": (24576, 1536, 256, 128, 8),
    "sonic7b_n1024": (24576, 1536, 1024, 32, 2),
    "sonic30b_n256": (32768, 4096, 256, 256, 16),
    "sonic30b_n1024": (32768, 4096, 1024, 64, 4),
    "sonic120b_n512": (32768, 4096, 512, 256, 16),
    "readme": (32768, 4096, 1024, 128, 8),
    "sonic120b_n2048": (32768, 4096, 2048, 64, 4),
}
_PRODUCTION = {
    "mixtral": (8192, 4096, 14336, 8, 2),
    "qwen30b": (32768, 2048, 768, 128, 8),
    "qwen235b": (16384, 4096, 1536, 128, 8),
    "dsv3": (16384, 7168, 2048, 256, 8),
    "gptoss": (16384, 2880, 2880, 128, 4),
    "granite": (32768, 1536, 512, 40, 8),
    "dbrx": (8192, 6144, 10752, 16, 4),
    "olmoe": (32768, 2048, 1024, 64, 8),
}
GPT_OSS_20B = LayerCase("gptoss20b", 16384, 2880, 2880, 32, 4, "gpt-oss-20b")

# Layers of models that are trained and fine-tuned today, by their published configurations. L is ours: 16,384 tokens.
# An eighth of Kimi-K2's 384 experts, with all k slots of 2,048 tokens on them, has as many rows as one of eight GPUs.
_TODAY = {
    "qwen3next": (16384, 2048, 512, 512, 10),
    "glm45air": (16384, 4096, 1408, 128, 8),
    "minimax_m2": (16384, 3072, 1536, 256, 8),
    "kimi_k2_eighth": (2048, 7168, 2048, 48, 8),
    "llama4scout": (16384, 5120, 8192, 16, 1),
    "marin": (16384, 2560, 1280, 64, 4),
}

# The papers' sweeps: what many and small experts cost at equal products. Granularity: h by equal k*h and E*h, so the
# weights stay as many. Sparsity: E by equal k and h, so the weights grow and each expert's rows become few.
_SWEPT = {
    "granularity": {f"granularity_h{h}": (32768, 2048, h, 65536 // h, 2048 // h) for h in (128, 256, 512, 1024, 2048)},
    "sparsity": {f"sparsity_e{E}": (32768, 2048, 512, E, 8) for E in (16, 32, 64, 128, 256, 512)},
}


def _layers() -> dict[str, LayerCase]:
    cases = [*_table1(), *_table2(), *_ablation(), GATHER, ONE_EXPERT, GPT_OSS_20B]
    cases += [LayerCase(name, *shape, "SonicMoE's figure") for name, shape in _SONICMOE.items()]
    cases += [LayerCase(name, *shape, "production layer") for name, shape in _PRODUCTION.items()]
    cases += [LayerCase(name, *shape, "trained today") for name, shape in _TODAY.items()]
    cases += [LayerCase(name, *shape, sweep) for sweep, shapes in _SWEPT.items() for name, shape in shapes.items()]
    by_name = {case.name: case for case in cases}
    for L in _SMALL:
        by_name[f"qwen30b_{L}"] = replace(by_name["qwen30b"], name=f"qwen30b_{L}", L=L, source="small batches")
    even = replace(by_name["gptoss"], name="gptoss_balanced", source="equal loads", routing="balanced")
    by_name[even.name] = even
    many = replace(by_name["qwen30b"], name="qwen30b_65536", L=65536, source="selections of many tokens")
    by_name[many.name] = many
    for name in ("conf3", "readme", "qwen30b"):
        for routing in ROUTINGS[1:]:
            case = replace(
                by_name[name], name=f"{name}_{routing}", source="MoMoE's routings", routing=routing, paper=()
            )
            by_name[case.name] = case
    return by_name


LAYERS = _layers()

# Table 3, 1M tokens: E, k, sorting ms, hash ms
_TABLE3 = {
    "qwen3": (128, 8, 5.1, 2.1),
    "dsv3": (256, 8, 6.8, 3.0),
    "dbrx": (16, 4, 1.7, 0.9),
    "mixtral": (8, 2, 1.9, 1.4),
    "gptoss": (128, 4, 3.6, 1.9),
    "granite": (40, 8, 3.8, 1.6),
}


def _dispatches() -> dict[str, DispatchCase]:
    cases = []
    for name, (E, k, sorting, hashing) in _TABLE3.items():
        paper = (Paper("Table 3", "sorting", sorting), Paper("Table 3", "hash", hashing))
        cases.append(DispatchCase(f"{name}_1m", 2**20, E, k, "Table 3", paper=paper))
        cases += [DispatchCase(f"{name}_{L}", L, E, k, "Table 3's models, fewer tokens") for L in (8192, 64)]
    for name, (E, k, _, _) in _TABLE3.items():
        for routing in ("one", "zipf", "balanced", "skewed") if name in ("qwen3", "mixtral") else ("one", "zipf"):
            cases.append(DispatchCase(f"{name}_1m_{routing}", 2**20, E, k, "other routings", routing))
    cases += [
        DispatchCase("qwen3_1m_int64", 2**20, 128, 8, "torch's own ids", dtype="int64"),
        DispatchCase("qwen3_16m", 2**24, 128, 8, "sizes"),
        DispatchCase("e1024_1m", 2**20, 1024, 8, "sizes"),
        DispatchCase("e4096_1m", 2**20, 4096, 8, "sizes"),
        DispatchCase("k64_128k", 2**17, 128, 64, "sizes"),
    ]
    return {case.name: case for case in cases}


DISPATCHES = _dispatches()


@dataclass(frozen=True)
class RouterCase:
    """Logits (L, E) and the options of `route`; `biased`: with a bias (E,)."""

    name: str
    L: int
    E: int
    k: int
    dtype: str = "float32"
    score: str = "softmax"
    biased: bool = False
    groups: tuple[int, int, int] | None = None
    renormalize: bool = True
    sums: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        return f"L{self.L}-E{self.E}-k{self.k}"


_GROUPED: dict[str, Any] = {"score": "sigmoid", "biased": True, "groups": (8, 4, 2)}
ROUTERS = {
    case.name: case
    for case in (
        RouterCase("dsv3", 16384, 256, 8),
        RouterCase("dsv3_bf16", 16384, 256, 8, "bfloat16"),
        RouterCase("dsv3_grouped", 16384, 256, 8, **_GROUPED),
        RouterCase("dsv3_sums", 16384, 256, 8, sums=("softmax", "z")),
        RouterCase("dsv3_grouped_sums", 16384, 256, 8, sums=("sigmoid",), **_GROUPED),
        RouterCase("dsv3_1m", 2**20, 256, 8),
        RouterCase("dsv3_1m_bf16", 2**20, 256, 8, "bfloat16"),
        RouterCase("dsv3_1m_grouped", 2**20, 256, 8, **_GROUPED),
        RouterCase("dsv3_1m_sums", 2**20, 256, 8, sums=("softmax", "z")),
        RouterCase("qwen30b", 32768, 128, 8),
        RouterCase("olmoe", 32768, 64, 8, renormalize=False),
        RouterCase("conf3", 65536, 16, 4),
        RouterCase("mixtral", 8192, 8, 2),
        RouterCase("nemotron3", 16384, 512, 22, score="sigmoid", biased=True),
        RouterCase("kimi_k3", 16384, 896, 16, score="sigmoid", biased=True),
        RouterCase("e4096", 4096, 4096, 8),
    )
}
TINY_ROUTER = RouterCase("tiny", 48, 16, 2, **_GROUPED, sums=("sigmoid", "z"))
TINY = LayerCase("tiny", 48, 32, 24, 6, 2, "for machines without a GPU")
TINY_SILU = LayerCase("tiny_silu", 48, 32, 24, 6, 2, "for machines without a GPU", "silu", "skewed")
TINY_DISPATCH = DispatchCase("tiny", 96, 8, 2, "for machines without a GPU")


def _named(source: str) -> tuple[str, ...]:
    return tuple(name for name, case in LAYERS.items() if case.source == source)


GROUPS = {
    "quick": ("conf1", "conf3", "conf5", "qwen30b", "tab2_128k"),
    "table1": tuple(_TABLE1),
    "table1_silu": tuple(f"{name}_silu" for name in _TABLE1),
    "table2": tuple(name for name in LAYERS if name.startswith("tab2_") and not name.endswith("_silu")),
    "table2_silu": tuple(name for name in LAYERS if name.startswith("tab2_") and name.endswith("_silu")),
    "table3": tuple(f"{name}_1m" for name in _TABLE3),
    "ablation": tuple(_TABLES45),
    "gather": (GATHER.name,),
    "sonicmoe": _named("SonicMoE's figure"),
    "production": _named("production layer"),
    "routing": _named("MoMoE's routings"),
    "skewed": tuple(name for name, case in LAYERS.items() if case.routing == "skewed"),
    "small": _named("small batches"),
    "shapes": ("readme", "sonic7b", "tab2_32k"),  # beside the tables', so that small h and small d are among them
    "peers": ("conf3", "conf5", "qwen30b", "tab2_128k"),
    "experts": (GPT_OSS_20B.name, "gptoss", "gptoss_balanced"),
    "accuracy": ("conf5", "qwen30b", "olmoe", "readme", GPT_OSS_20B.name),
    "today": (*_TODAY, GPT_OSS_20B.name, "gptoss"),
    **{sweep: tuple(shapes) for sweep, shapes in _SWEPT.items()},
}


_SIZES = re.compile("-".join(f"{letter}([1-9][0-9]*)" for letter in "LdhEk"))


def select(names: str | None, default: str) -> list[str]:
    """Case names from a comma-separated list of cases, groups and sizes, each once, in the list's order.

    Sizes are written as `LayerCase.shape` writes them, and become a case in LAYERS of that name.
    Raises ValueError for a name that is none of these, and for k above E.
    """
    chosen: list[str] = []
    for name in (names or default).split(","):
        if name in GROUPS:
            chosen += GROUPS[name]
        elif name in LAYERS or name in DISPATCHES or name in ROUTERS:
            chosen.append(name)
        elif sizes := _SIZES.fullmatch(name):
            case = LayerCase(name, *map(int, sizes.groups()), "the command line")
            if case.k > case.E:
                raise ValueError(f"bench: --case: expected k at most E in {name!r}, got k = {case.k}, E = {case.E}")
            LAYERS[name] = case
            chosen.append(name)
        else:
            known = ", ".join(dict.fromkeys((*GROUPS, *LAYERS, *DISPATCHES, *ROUTERS)))
            expected = f"sizes such as {TINY.shape}, or names among {known}"
            raise ValueError(f"bench: --case: expected {expected}; got {name!r}")
    return list(dict.fromkeys(chosen))
