"""CoX-MoE's strata: the most popular experts of each layer on the GPU, the others on the CPU, for good."""

from __future__ import annotations

from .no_assign import NoAssignment


class CoXMoE(NoAssignment):
    """No weight moves. `initial` takes the popular experts, which covers the largest load that as many can; the batches that the
    system rests on are its planner's (`apexk.planners`) and `apexk.hf.coalesce`'s. Without attention offload."""

    name = "cox_moe"
    source = "CoX-MoE, abstract; without attention offload"
