"""The systems that are compared: a policy on our engine each, what its authors claim, and what it is good for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apexk.arguments import once
from apexk.policy import registry
from apexk.sim.named import REFERENCES


@dataclass(frozen=True)
class System:
    """`spec` is a policy as `apexk.policy.get` takes it, `payload` what its copies move, as `ApexConfig` has it. `idea` says in one
    line what decides; `claim` what the source says of itself, on other hardware, models and baselines than ours."""

    name: str
    spec: str
    idea: str
    claim: str = "-"
    payload: str = "plain"

    @property
    def lossless(self) -> bool:
        return registry.get(self.spec).lossless and self.payload == "plain"

    @property
    def source(self) -> str:
        return registry.get(self.spec).source


SYSTEMS = (
    System("apex", "apex", "copies misses until both sides end together, prefetches the next layer; a long prefill's copies go through a few slots in waves",
           "1.43x over no assignment (Apex paper, Table 3)"),
    System("apex_int8", "apex", "the same with int8 copies", payload="int8"),
    System("apex_int4", "apex", "the same with int4 copies", payload="int4"),
    System("apex_paper", "apex_paper", "the same by the paper's letter: rates, residents wait", "1.43x over no assignment (Apex paper, Table 3)"),
    System("fiddler_static", "fiddler_static", "popular experts stay, misses run on the CPU; nothing moves",
           "1.26x at one request, 1.30x in long prefills (arXiv 2402.07033, abstract)"),
    System("fiddler_original", "fiddler_original", "an expert with many tokens is copied, used and dropped",
           "1.26x at one request, 1.30x in long prefills (arXiv 2402.07033, abstract)"),
    System("mixtral_offloading", "mixtral_offloading", "GPU alone: every miss is copied, LRU", "2 to 3 tokens/s of Mixtral 8x7B on a small GPU (arXiv 2312.17238, abstract)"),
    System("post_fetch", "post_fetch", "misses run on the CPU and are copied after the step"),
    System("hybrimoe", "hybrimoe", "deals experts from both ends of the load order, score cache",
           "1.33x in prefill, 1.70x in decode over KTransformers (arXiv 2504.05897, abstract)"),
    System("freetoken_q", "freetoken_q", "copies the share of misses that balances link and CPU, the recent ones first; LRU over all layers"),
    System("dali", "dali", "greedy deal by load, predictions corrected by their own error", "speedups in prefill and decode, no number in the abstract (arXiv 2602.03495)"),
    System("llamacpp_static32", "llamacpp_static32", "from 32 tokens on every miss is copied and dropped"),
    System("ik_static", "ik_static", "the same from 32 tokens an expert on"),
    System("n_cpu_moe", "n_cpu_moe", "whole layers: the first on the CPU, the others on the GPU"),
    System("kt_front", "kt_static(placement=front)", "whole layers: the first on the GPU, the others on the CPU"),
    System("kt_static", "kt_static", "lowest ids resident, misses run on the CPU",
           "60.3 tokens/s of Qwen3-Next at 20 % of the experts on four RTX 4090 (kt-kernel's tutorial)"),
    System("kt_dynamic", "kt_dynamic", "a long prefill streams through the GPU and leaves its most used experts",
           "74.7 tokens/s where kt_static has 60.3 (kt-kernel's tutorial)"),
    System("kt_defer", "kt_static(defer=2)", "kt_static, and each token's two lightest experts may be added one layer late (kt-kernel's expert deferral)",
           "up to 1.45x in decode, accuracy down by 0.5 % at most (KTransformers, SOSP 2025)"),
    System("replication", "replication", "experts above twice the mean load get a slot beside their place on the CPU"),
    System("mira", "mira", "a hot region that stays, a stage for what the two next layers' routers name; the GPU runs everything"),
    System("mira_int8", "mira", "the same with int8 copies", payload="int8"),
    System("mira_int4", "mira", "the same with int4 copies", payload="int4"),
    System("cox_moe", "cox_moe", "popular experts on the GPU, the others on the CPU, for good; its gain is in its batches, not in this row",
           "up to 7.1x over FlexGen, 2.4x over MoE-Lightning, for large batches (arXiv 2605.17889, abstract)"),
    System("flexgen", "flexgen", "GPU alone: part of each layer stays, the rest streams through in order",
           "up to 100x over other offloading systems, for large batches (arXiv 2303.06865)"),
    System("moe_lightning", "moe_lightning", "GPU alone: whole layers page in order through slots of all layers, each while the one before runs",
           "up to 10.3x over other offloading systems, for large batches (arXiv 2411.11217, abstract)"),
)  # fmt: skip
BY_NAME = {system.name: system for system in SYSTEMS}


def chosen(names: Sequence[str]) -> list[System]:
    """The systems of these names; "all" are all of them, and any other policy is named by its spec. Raises ValueError for what is none."""
    found: dict[str, System] = {}
    names = [name for given in names for name in (BY_NAME if given == "all" else [given])]
    once("--systems", names)
    for name in names:
        if name in REFERENCES:
            raise ValueError(f"{name} is a reference row, not a system: clairvoyant and all_resident are shown beside every comparison")
        if name not in BY_NAME:
            registry.check(name)
        found[name] = BY_NAME.get(name) or System(name, name, "-")
    if not found:
        raise ValueError("no system is named; wanted all, or names")
    return list(found.values())
