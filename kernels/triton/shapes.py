"""MoE layer shapes of the models that the kernels are tuned, compiled and measured for (from their published configs)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeShape:
    """One MoE layer: E experts, topk a token, widths H and I, and how many such layers the model has."""

    experts: int
    topk: int
    hidden: int
    inter: int
    layers: int
    activation: str = "silu"
    biases: bool = False

    def expert_bytes(self, itemsize) -> int:
        return 3 * self.hidden * self.inter * itemsize


MODELS = {
    "qwen3.5-35b-a3b": MoeShape(256, 8, 2048, 512, 40),
    "qwen3-next-80b": MoeShape(512, 10, 2048, 512, 48),
    "glm-4.5-air": MoeShape(128, 8, 4096, 1408, 45),
    "gpt-oss-20b": MoeShape(32, 4, 2880, 2880, 24, "swiglu_oss", True),
    "tiny": MoeShape(8, 2, 64, 48, 2),  # small enough for the interpreter
}
