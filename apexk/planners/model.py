"""What the planners share: a machine's roofs, a model's sizes, what work takes at best, what lies in which memory.

Every time is a roofline: the larger of bytes over bandwidth and operations over rate, nothing for launches or hand-over.
So a plan's tokens/s is a bound to choose by, and no forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

GIB = 1 << 30
WORD = 2  # bytes of a weight's or activation's 16-bit word
ACTIVATION_WORDS = 8  # live words of hidden size per token in attention: input, q, k, v, scores' output, residual, two to spare


@dataclass(frozen=True)
class Machine:
    """Bytes, bytes/s and operations/s; a rate counts a multiply-add as two."""

    name: str
    gpu_bytes: float
    host_bytes: float
    gpu_bps: float
    gpu_flops: float
    cpu_bps: float
    cpu_flops: float
    link_bps: float
    source: str = "given"


#: from data sheets, not measured: RTX A6000 (BF16 tensor cores, dense), one Xeon 8358P socket (AVX-512, FP32), PCIe 4.0 x16
MACHINES = {
    "a6000": Machine("a6000", 48 * GIB, 512 * GIB, 768e9, 154.8e12, 204.8e9, 32 * 2.6e9 * 64, 25e9, "data sheets"),
    "a6000-amx": Machine("a6000-amx", 48 * GIB, 512 * GIB, 768e9, 154.8e12, 307.2e9, 32 * 2.0e9 * 2048, 25e9, "data sheets; the CPU with AMX BF16 and eight DDR5-4800 channels"),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """Sizes in bytes; `dense_bytes` is everything but the experts, `kv_bytes` one token's cache in all layers.

    `popularity` (shares of a layer's load by expert, most popular first; None: equal) says what residents cover.
    """

    name: str
    layers: int
    experts: int
    topk: int
    hidden: int
    expert_bytes: float
    dense_bytes: float
    kv_bytes: float
    popularity: Sequence[float] | None = None

    def shares(self) -> Sequence[float]:
        return self.popularity or [1 / self.experts] * self.experts


@dataclass(frozen=True)
class Load:
    """Requests of `prompt` tokens that generate `new` tokens each."""

    prompt: int = 512
    new: int = 128

    @property
    def context(self) -> float:
        """Mean length of a request's cache while it decodes."""
        return self.prompt + self.new / 2

    @property
    def longest(self) -> int:
        return self.prompt + self.new


@dataclass(frozen=True)
class Choice:
    """A plan: `batch` requests in micro-batches of `micro_batch`; `shares` names what else was chosen. `seconds` are a layer's
    times by resource, `gpu` and `host` the bytes by purpose."""

    system: str
    batch: int
    micro_batch: int
    shares: Mapping[str, float]
    seconds: Mapping[str, float]
    gpu: Mapping[str, float]
    host: Mapping[str, float]
    tokens_per_s: float


class NoRoom(ValueError):
    """No plan fits; the message has the smallest one's arithmetic."""


def active(shares: Iterable[float], topk: int, tokens: float) -> float:
    """How many of these experts `tokens` tokens are expected to use: each token takes expert e with probability min(1, topk * share)."""
    return sum(1 - (1 - min(1.0, topk * share)) ** tokens for share in shares)


def experts_s(model: Model, experts: float, pairs: float, bps: float, flops: float) -> float:
    """FFN of `pairs` (token, expert) rows over `experts` experts."""
    return max(experts * model.expert_bytes / bps, 2 * pairs * model.expert_bytes / WORD / flops)


def dense_s(model: Model, machine: Machine, tokens: float) -> float:
    """Everything of a layer but experts and cache, on the GPU."""
    layer = model.dense_bytes / model.layers
    return max(layer / machine.gpu_bps, 2 * tokens * layer / WORD / machine.gpu_flops)


def kv_layer(model: Model, requests: float, tokens: float) -> float:
    """Bytes of a layer's cache."""
    return requests * tokens * model.kv_bytes / model.layers


def activations(model: Model, load: Load, micro_batch: int, batch: int) -> float:
    """Bytes of the largest pass: a micro-batch's prompts in attention, the whole batch's hidden states in decode."""
    return micro_batch * load.prompt * ACTIVATION_WORDS * model.hidden * WORD + batch * model.hidden * WORD


def powers(limit: int) -> list[int]:
    return [1 << n for n in range(limit.bit_length()) if 1 << n <= limit]


def best(system: str, machine: Machine, candidates: Iterable[Callable[[], Choice]]) -> Choice:
    """The fitting choice of most tokens/s; of equals the first. Raises `NoRoom` with the smallest need where none fits."""
    found, smallest = None, None
    for choice in (make() for make in candidates):
        need = sum(choice.gpu.values())
        if need <= machine.gpu_bytes and sum(choice.host.values()) <= machine.host_bytes:
            if found is None or choice.tokens_per_s > found.tokens_per_s:
                found = choice
        elif smallest is None or need < sum(smallest.gpu.values()):
            smallest = choice
    if found is None:
        raise NoRoom(f"{system}: no plan fits {machine.name}. The smallest, {smallest.batch} request(s), needs {_gib(smallest.gpu)} of GPU memory, of "
                     f"{machine.gpu_bytes / GIB:.2f} GiB, and {_gib(smallest.host)} of host memory, of {machine.host_bytes / GIB:.2f} GiB")
    return found


def _gib(parts: Mapping[str, float]) -> str:
    return f"{sum(parts.values()) / GIB:.2f} GiB ({', '.join(f'{name} {nbytes / GIB:.2f}' for name, nbytes in parts.items() if nbytes)})"
