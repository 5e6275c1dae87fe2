"""What `CudaDevice` launches for a layer: the Triton kernels, or the same by their references on CPU tensors.

Every method only launches on the current stream. Memory is made by `reserve`, before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from apexk.kernels.cuda.reference import slot_gather_ref
from apexk.kernels.cuda.slots import Kernel, slot_gather
from apexk.kernels.triton.combine import combine
from apexk.kernels.triton.moe_ffn import Step, Workspace, moe_ffn
from apexk.kernels.triton.reference import combine_ref, moe_ffn_ref, rank_ref, take_rows_ref
from apexk.kernels.triton.routing import demand_view, rank
from apexk.kernels.triton.take_rows import take_rows
from apexk.store.block import ExpertBlock
from apexk.store.pool import Pool


class GpuKernels(Protocol):
    def reserve(self, tokens: int, topk: int) -> None:
        """Makes room for parts of up to `tokens` tokens; called on the stream of `count` and `ffn`. What was launched there before
        may still run: torch gives the old room on in that stream's order."""

    def demand(self, pairs: int) -> torch.Tensor:
        """Where `count` leaves int32 [E + T*topk]: token loads, then ids."""

    def count(self, topk_ids: torch.Tensor) -> None:
        """Groups the pairs of topk_ids [T, topk] by expert, for `demand` and the `ffn` calls to come."""

    def ffn(self, x: torch.Tensor, pool: Pool, topk_ids: torch.Tensor, topk_weights: torch.Tensor, slot_of: torch.Tensor,
            pairs: torch.Tensor) -> None:
        """Weighted rows of the experts that slot_of int32 [E] gives a slot, into pairs fp32 [T*topk, H]."""

    def rank(self, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        """out int32 [3, E]: loads, bits of the fp32 score sums, order."""

    def take_rows(self, host: torch.Tensor, topk_ids: torch.Tensor, mark: torch.Tensor, pairs: torch.Tensor) -> None:
        """Rows of the marked experts from `host` to `pairs`."""

    def combine(self, pairs: torch.Tensor, topk: int, out: torch.Tensor, shared: torch.Tensor | None = None, **parts: torch.Tensor | None) -> None:
        """out [T, H] = sum over top-k, in order, plus `shared`; `parts` as in `combine_ref`: rows of some experts only, and a sum of others."""

    def gather(self, blocks: torch.Tensor, experts: torch.Tensor, slots: torch.Tensor, count: torch.Tensor, epoch: torch.Tensor,
               pool: torch.Tensor, ready: torch.Tensor, landed: torch.Tensor, payload_bytes: int) -> None:
        """Listed experts' blocks from pinned host memory into slots; see `apexk.kernels.cuda.slots.slot_gather`."""


class TritonKernels:
    """`load(name)` gives a kernel of `apexk.kernels.cuda`."""

    def __init__(self, block: ExpertBlock, experts: int, device: torch.device, *, activation: str, weight_on_input: bool,
                 load: Callable[[str], Kernel]):
        self._block, self._experts, self._device, self._load = block, experts, device, load
        self._rule = {"activation": activation, "weight_on_input": weight_on_input}
        self._gather: Kernel | None = None
        self._workspace: Workspace | None = None
        self._step: Step | None = None

    def reserve(self, tokens: int, topk: int) -> None:
        block, self._step = self._block, None
        self._workspace = Workspace(tokens, topk, self._experts, block.hidden, block.intermediate, block.dtype, self._device)

    def demand(self, pairs: int) -> torch.Tensor:
        return demand_view(self._workspace.ints, pairs, self._experts)

    def count(self, topk_ids: torch.Tensor) -> None:
        self._step = self._workspace.begin(topk_ids)

    def ffn(self, x, pool, topk_ids, topk_weights, slot_of, pairs) -> None:
        if self._step is None or self._step.topk_ids is not topk_ids:
            self.count(topk_ids)  # another part was counted since
        moe_ffn(x, pool.w13, pool.w2, topk_ids, topk_weights, slot_of, pairs, b13=pool.b13, b2=pool.b2,
                step=self._step, **self._rule)

    def rank(self, topk_ids, topk_weights, out) -> None:
        rank(topk_ids, topk_weights, self._experts, out=out)

    def take_rows(self, host, topk_ids, mark, pairs) -> None:
        take_rows(host, topk_ids, mark, pairs)

    def combine(self, pairs, topk, out, shared=None, **parts) -> None:
        combine(pairs, topk, out, shared, **parts)

    def gather(self, *arguments) -> None:
        if self._gather is None:
            self._gather = self._load("slot_gather")
        slot_gather(self._gather, *arguments)


class ReferenceKernels:
    """For a runtime whose device memory is host memory."""

    def __init__(self, block: ExpertBlock, experts: int, device: torch.device, *, activation: str, weight_on_input: bool, load=None):
        self._experts = experts
        self._rule = {"activation": activation, "weight_on_input": weight_on_input}
        self._ints: torch.Tensor | None = None

    def reserve(self, tokens: int, topk: int) -> None:
        self._ints = torch.empty(self._experts + tokens * topk, dtype=torch.int32)

    def demand(self, pairs: int) -> torch.Tensor:
        return self._ints[: self._experts + pairs]

    def count(self, topk_ids: torch.Tensor) -> None:
        ids = topk_ids.reshape(-1)
        self._ints[: self._experts] = torch.bincount(ids, minlength=self._experts)
        self._ints[self._experts : self._experts + ids.numel()] = ids

    def ffn(self, x, pool, topk_ids, topk_weights, slot_of, pairs) -> None:
        moe_ffn_ref(x, pool.w13, pool.w2, topk_ids, topk_weights, slot_of, pairs, b13=pool.b13, b2=pool.b2,
                    compute_dtype=torch.float32, **self._rule)

    def rank(self, topk_ids, topk_weights, out) -> None:
        loads, scores, order = rank_ref(topk_ids, topk_weights, self._experts)
        out[0], out[1], out[2] = loads, scores.view(torch.int32), order

    def take_rows(self, host, topk_ids, mark, pairs) -> None:
        take_rows_ref(host, topk_ids, mark, pairs)

    def combine(self, pairs, topk, out, shared=None, **parts) -> None:
        combine_ref(pairs, topk, out, shared, **parts)

    def gather(self, blocks, experts, slots, count, epoch, pool, ready, landed, payload_bytes) -> None:
        slot_gather_ref(blocks, experts, slots, count, epoch, pool, ready, payload_bytes)
