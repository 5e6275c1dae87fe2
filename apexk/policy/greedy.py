"""Running totals of a layer's three resources while experts are dealt out one by one."""

from __future__ import annotations

from dataclasses import dataclass

from .types import Costs, Plan


@dataclass
class Deal:
    """What was given to each side so far. `wait` is how long the channel is busy before a first copy."""

    costs: Costs
    wait: float = 0.0
    gpu_experts: int = 0
    gpu_pairs: int = 0
    cpu_experts: int = 0
    cpu_pairs: int = 0
    copies: int = 0
    gpu_end: float = 0.0
    cpu_end: float = 0.0

    def gpu_with(self, load: int, copied: bool) -> float:
        """When the GPU would be done with one more expert of `load` pairs, which has to be `copied` first or is there."""
        costs = self.costs
        more = costs.gpu_ms(self.gpu_experts + 1, self.gpu_pairs + load) - costs.gpu_ms(self.gpu_experts, self.gpu_pairs)
        ready = self.wait + costs.copy_ms(self.copies + 1) if copied else 0.0
        return max(self.gpu_end, ready) + more

    def cpu_with(self, load: int) -> float:
        return self.costs.cpu_ms(self.cpu_experts + 1, self.cpu_pairs + load)

    def to_gpu(self, load: int, copied: bool) -> None:
        self.gpu_end = self.gpu_with(load, copied)
        self.gpu_experts, self.gpu_pairs, self.copies = self.gpu_experts + 1, self.gpu_pairs + load, self.copies + copied

    def to_cpu(self, load: int) -> None:
        self.cpu_end = self.cpu_with(load)
        self.cpu_experts, self.cpu_pairs = self.cpu_experts + 1, self.cpu_pairs + load

    @property
    def end(self) -> float:
        return max(self.gpu_end, self.cpu_end)

    def plan(self, resident: list[int], fetch: list[int], cpu: list[int]) -> Plan:
        return Plan(tuple(resident), tuple(fetch), tuple(cpu), self.cpu_end, self.gpu_end)
