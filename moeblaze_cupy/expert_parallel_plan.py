"""Time and memory of experts spread over ranks, by formula, for uniform routing.

Letters as in `memory`, with L tokens per rank, P ranks that share the E experts, N nodes that they are on. A token's
row goes once to every rank, and between nodes once to every node, that has an expert of it. Times are in seconds, rates
in bytes per second out of one GPU.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from math import comb

from moeblaze_cupy import launch_config, memory
from moeblaze_cupy.memory import LayerShape, Plan


def parts_per_token(E: int, k: int, parts: int, limit: int | None = None) -> float:
    """In how many of `parts` equal parts of E experts a token's k distinct experts are, on average.

    P(1 - C(E - E/P, k) / C(E, k)): each part is missed by the choices among the others' experts alone.
    limit: the choices are among the experts of so many of the parts.
    """
    if limit is not None and limit < parts:
        return parts_per_token(E * limit // parts, k, limit)
    return parts * (1 - comb(E - E // parts, k) / comb(E, k))


@dataclass(frozen=True)
class Machine:
    """What times are computed from; none of these is measured here."""

    ranks_per_node: int = 8
    nvlink: float = 300e9  # bytes per second between the GPUs of a node
    network: float = 45e9  # between nodes
    latency: float = 30e-6  # of an exchange
    flops: float = 6e14  # per second, of the experts' products


@dataclass(frozen=True)
class ExpertParallel:
    """One layer whose experts are on `ranks` ranks. limit_nodes: a token's experts are on so many nodes at most."""

    shape: LayerShape  # L tokens per rank, all E experts
    ranks: int
    machine: Machine = Machine()
    limit_nodes: int | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.shape.E % self.ranks:
            raise ValueError(f"ranks: expected a divisor of E = {self.shape.E}, got {self.ranks}")
        if self.limit_nodes is not None and self.limited_experts < self.shape.k:
            raise ValueError(f"limit_nodes: expected nodes with k = {self.shape.k} experts, got {self.limit_nodes}")

    @property
    def nodes(self) -> int:
        return launch_config.ceil_div(self.ranks, self.machine.ranks_per_node)

    @property
    def limited_experts(self) -> int:
        """Experts that one token can choose from."""
        E, limit = self.shape.E, self.limit_nodes
        return E if limit is None or limit >= self.nodes else E * limit // self.nodes

    @property
    def rows_per_token(self) -> float:
        """D: ranks that a token's row goes to, its own among them."""
        E, k = self.limited_experts, self.shape.k
        return parts_per_token(E, k, self.ranks * E // self.shape.E)

    @property
    def nodes_per_token(self) -> float:
        return parts_per_token(self.shape.E, self.shape.k, self.nodes, self.limit_nodes)

    @property
    def bytes_over_nvlink(self) -> float:
        """What a rank sends in one exchange. A node passes on to its ranks what other nodes sent."""
        P, s = min(self.ranks, self.machine.ranks_per_node), self.shape
        return self.rows_per_token * (P - 1) / P * s.L * s.d * s.b

    @property
    def bytes_over_network(self) -> float:
        s = self.shape
        return self.nodes_per_token * (self.nodes - 1) / self.nodes * s.L * s.d * s.b

    @property
    def exchange_seconds(self) -> float:
        """The time of one exchange. A layer has four: forward there and back, backward there and back."""
        if self.ranks == 1:
            return 0.0
        times = self.bytes_over_nvlink / self.machine.nvlink, self.bytes_over_network / self.machine.network
        return max(times) + self.machine.latency

    @property
    def compute_seconds(self) -> float:
        """The time of forward and backward: 6 d h operations per slot and weight matrix, of which there are g + 1."""
        s = self.shape
        return 6 * s.slots * s.d * s.h * (s.g + 1) / self.machine.flops

    @property
    def efficiency(self) -> float:
        """The share of its time that the layer computes.

        The gradient of x travels behind the gradients of the weights, which are a third of the products.
        """
        hidden = min(self.exchange_seconds, self.compute_seconds / 3)
        return self.compute_seconds / (self.compute_seconds + 4 * self.exchange_seconds - hidden)

    @cached_property
    def received(self) -> LayerShape:
        """The layer that a rank computes where routing is balanced: its rows, its experts, its slots."""
        s = self.shape
        rows = launch_config.size_class(round(self.rows_per_token * s.L))
        slots = min(launch_config.size_class(s.slots), rows * s.k)
        return replace(s, L=rows, E=s.E // self.ranks, max_slots=max(slots, 1))

    def plan(self, save: str | None) -> Plan:
        """Memory of that layer, received rows included."""
        return memory.layer(self.received, save)
