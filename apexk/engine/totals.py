"""What a run added up to, by phase: transfers, hits, path times and step times."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Totals:
    """Sums over the layers and steps of one phase. Times in ms of the device's clock; experts count once a layer and step."""

    steps: int = 0
    layers: int = 0
    tokens: int = 0
    step_ms: float = 0.0
    cpu_path_ms: float = 0.0  # routing event to the CPU's rows being back
    gpu_path_ms: float = 0.0  # routing event to the end of the last expert kernel
    active: int = 0
    hits: int = 0  # active and resident at the routing event, landed prefetches included
    exact: int = 0
    speculative: int = 0  # speculative copies begun
    used: int = 0  # of those: run from their slot in the layer and step they were made for
    abandoned: int = 0  # of those: stopped before they were complete
    failed_copies: int = 0  # exact copies that could not be issued; the CPU computed their experts
    cpu_experts: int = 0
    cpu_pairs: int = 0
    estimated: int = 0  # layers whose plan estimated its paths
    estimate_error: float = 0.0  # sum over them of |estimated longer path / taken - 1|
    bytes: int = 0  # expert bytes asked of the link, abandoned copies included in full

    def report(self) -> dict:
        """The sums and what follows from them; a quotient without a denominator is None."""

        def per(value: float, count: int) -> float | None:
            return value / count if count else None

        return asdict(self) | {
            "wasted": self.speculative - self.used,
            "mean_estimate_error": per(self.estimate_error, self.estimated),
            "hit_rate": per(self.hits, self.active),
            "ms_per_step": per(self.step_ms, self.steps),
            "cpu_path_ms_per_layer": per(self.cpu_path_ms, self.layers),
            "gpu_path_ms_per_layer": per(self.gpu_path_ms, self.layers),
            "tokens_per_s": per(1e3 * self.tokens, self.step_ms) if self.step_ms else None,
        }
