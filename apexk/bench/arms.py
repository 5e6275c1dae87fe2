"""What is compared: apexk under a policy and a pool, and the plain library in each of its ways.

An arm's name says all of it: `apex/pool=64`, `hf/grouped_mm`, `accelerate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import nn

from apexk.bench.plan import check_plain
from apexk.config import ApexConfig
from apexk.hf.handle import Handle
from apexk.hf.swap import swap


@dataclass(frozen=True)
class Arm:
    """`config`: apexk's; None: the plain library with this experts implementation, or accelerate's CPU offload."""

    name: str
    config: ApexConfig | None = None
    implementation: str | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot run here."""
        if self.name == "accelerate":
            if find_spec("accelerate") is None:
                return "accelerate is not installed"
            if not torch.cuda.is_available():
                return "CPU offload needs a GPU to offload from"
        return None

    @contextmanager
    def entered(self, model: nn.Module) -> Iterator[Handle | None]:
        """The model as this arm runs it; as it was afterwards."""
        if self.config is not None:
            with swap(model, self.config) as handle:
                yield handle
        elif self.name == "accelerate":
            from accelerate import cpu_offload
            from accelerate.hooks import remove_hook_from_submodules

            cpu_offload(model, execution_device="cuda")
            try:
                yield None
            finally:
                remove_hook_from_submodules(model)
        else:
            before = model.get_experts_implementation()
            model.set_experts_implementation(self.implementation)
            try:
                yield None
            finally:
                model.set_experts_implementation(before)


def arms(config: ApexConfig, policies: list[str], pools: list, plain: list[str]) -> list[Arm]:
    """Every policy with every pool, then the plain ones. On device "cpu" there is no pool, and policies do not differ."""
    if config.device == "cpu":
        made = [Arm("apexk", replace(config, policy=policies[0]))]
    else:
        made = [Arm(f"{policy}/pool={pool}", replace(config, policy=policy, pool=pool)) for policy in policies for pool in pools]
    check_plain(plain)
    for name in plain:
        made.append(Arm("accelerate") if name == "accelerate" else Arm(f"hf/{name}", implementation=name))
    return made
