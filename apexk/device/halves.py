"""The two halves of a layer on CPU tensors: what the GPU would compute from its slots, and what the CPU computes.

Used by devices without a GPU. The CPU half is the native grouped FFN over the host store. The GPU half is the reference
of the Triton kernels over a pool of slots (`arithmetic="reference"`, FP32 accumulation), or the native FFN over the same
slots (`"same"`, the rows of a token added in the order of their experts' ids), which makes a result bitwise independent of where
an expert ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from apexk.device.base import Router, Rows, active_loads, divided_ids, with_nobody
from apexk.kernels.cpu.ffn import HostFFN
from apexk.kernels.triton.reference import combine_ref, moe_ffn_ref, rank_ref
from apexk.store.host_store import HostStore
from apexk.store.pool import Pool
from apexk.store.quantised import Payload

ARITHMETIC = ("reference", "same")


class Halves:
    """Tensors and arithmetic of a model's expert layers, with `slots` for each of them. `threads` of the CPU half as in `HostFFN`.

    With a `payload` a transfer packs the expert's block into it and dequantises that into the slot; a machine with a GPU would
    keep the packed payloads.
    """

    def __init__(self, store: HostStore, slots: int, *, activation: str = "silu", weight_on_input: bool = False,
                 arithmetic: str = "reference", threads: int | None = None, payload: Payload | None = None):
        if arithmetic not in ARITHMETIC:
            raise ValueError(f"arithmetic is {arithmetic!r}; known: {', '.join(ARITHMETIC)}")
        self.store, self.arithmetic, self.payload = store, arithmetic, payload
        self._packed = torch.empty(payload.nbytes if payload else 0, dtype=torch.uint8)
        self._rule = {"activation": activation, "weight_on_input": weight_on_input}
        self.pool = Pool(store.layers * slots, store.block)
        self.ffn = HostFFN(threads=threads)
        self._part_pairs: dict[int, torch.Tensor] = {}  # the buffers of `Rows.parts` and their waves, made when first needed
        self._sums = torch.empty(0)
        self._slots = self.pool.addresses()
        self._nobody = store.experts  # as an expert: a block that nobody asks for
        self._host_blocks = [with_nobody(store.addresses(layer)) for layer in range(store.layers)]

    def begin(self, rows: Rows) -> dict[int, int]:
        """Counts the token load of every active expert, of the whole and of each part."""
        self._tokens = rows.tokens
        for part in rows.parts:
            part.loads = self._count(part.topk_ids)
        return self._count(rows.topk_ids)

    def run_host(self, layer: int, rows: Rows, experts: Sequence[int]) -> None:
        self._native(self._host_blocks[layer], rows, experts)

    def run_summed(self, layer: int, rows: Rows, experts: Sequence[int]) -> None:
        """As `run_host` with all experts of the rows: their sums are made at once, and the merge has no rows to read. On torch's threads."""
        self._native(self._host_blocks[layer], rows, experts, out=rows.of(self._room_for_sums(rows)), summed=True, with_torch=True)
        rows.summed = True

    def run_slots(self, rows: Rows, slots: Mapping[int, int]) -> None:
        if self.arithmetic == "same":
            addresses = torch.zeros(self._nobody + 1, dtype=torch.int64)
            addresses[list(slots)] = self._slots[list(slots.values())]
            self._native(addresses, rows, list(slots))
            return
        slot_of = torch.full((self._nobody + 1,), -1, dtype=torch.int32)
        slot_of[list(slots)] = torch.tensor(list(slots.values()), dtype=torch.int32)
        moe_ffn_ref(rows.x, self.pool.w13, self.pool.w2, rows.topk_ids, rows.topk_weights, slot_of, self._pairs(rows),
                    b13=self.pool.b13, b2=self.pool.b2, compute_dtype=torch.float32, **self._rule)

    def divide(self, rows: Rows, split: Mapping[int, int]) -> None:
        self._pairs(rows)  # both shares fill these
        rows.divide(split, *divided_ids(rows.topk_ids, split, self._nobody))

    def predict(self, rows: Rows, router: Router) -> tuple[dict[int, int], dict[int, float]]:
        ids, weights = router(rows.x)
        loads, scores, order = rank_ref(ids, weights, self.store.experts)
        active = [e for e in order.tolist() if loads[e] > 0]
        return {e: int(loads[e]) for e in active}, {e: float(scores[e]) for e in active}

    def accumulate(self, rows: Rows, experts: Sequence[int]) -> None:
        sums = rows.of(self._room_for_sums(rows))
        combine_ref(self._pairs(rows), rows.topk, sums, partial=sums if rows.summed else None, topk_ids=rows.topk_ids, slot_of=self._mark(experts))

    def combine(self, rows: Rows, experts: Iterable[int], out: torch.Tensor, shared: torch.Tensor | None) -> None:
        partial = rows.of(self._sums) if rows.summed else None
        if rows.late is not None:
            late, chosen = rows.late
            added = torch.empty(out.shape)
            pairs, ids = self._in_order(late)
            combine_ref(pairs, late.topk, added, partial, topk_ids=ids, slot_of=self._mark(chosen))
            partial = added
        if rows.summed and rows.pairs is None:
            out.copy_(partial if shared is None else partial + shared)
            return
        pairs, ids = self._in_order(rows)
        if rows.summed or rows.withheld:
            combine_ref(pairs, rows.topk, out, shared, partial=partial, topk_ids=ids, slot_of=self._mark(experts))
        else:
            combine_ref(pairs, rows.topk, out, shared, partial=partial)

    def fill(self, layer: int, expert: int, slot: int) -> None:
        """The transfer: one expert's block from the host store into a slot."""
        block, there = self.store.blocks(layer)[expert], self.pool.memory[slot]
        if self.payload is None:
            there.copy_(block)
        else:
            self.payload.pack(block, self._packed)
            self.payload.unpack(self._packed, there)

    def poison(self, slot: int) -> None:
        """What a stopped copy leaves must never be read: NaN makes it show."""
        self.pool.memory[slot].fill_(float("nan"))

    def close(self) -> None:
        self.ffn.close()

    def _mark(self, experts: Iterable[int]) -> torch.Tensor:
        """int32 `[E]`, -1 for those that are none of `experts`."""
        mark = torch.full((self.store.experts,), -1, dtype=torch.int32)
        mark[list(experts)] = 0
        return mark

    def _count(self, topk_ids: torch.Tensor) -> dict[int, int]:
        return active_loads(torch.bincount(topk_ids.reshape(-1), minlength=self.store.experts))

    def _in_order(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted rows and ids of each token in the order in which they are added."""
        pairs, ids = self._pairs(rows), rows.topk_ids
        if self.arithmetic != "same":
            return pairs, ids
        order = ids.argsort(dim=-1, stable=True)
        ordered = pairs.view(*ids.shape, -1).take_along_dim(order[..., None], dim=1)
        return ordered.view(pairs.shape), ids.take_along_dim(order, dim=-1)

    def _room_for_sums(self, rows: Rows) -> torch.Tensor:
        """fp32 `[T, H]` of the whole input."""
        shape = (self._tokens, rows.x.shape[1])
        if self._sums.shape != shape:
            self._sums = torch.empty(shape)
        return self._sums

    def _pairs(self, rows: Rows) -> torch.Tensor:
        """Room for the weighted rows, NaN until computed."""
        if rows.pairs is None:
            shape = (rows.tokens * rows.topk, rows.x.shape[1])
            if rows.buffer is None:
                rows.pairs = torch.empty(shape)
            else:
                buffer = self._part_pairs.get(rows.buffer)
                if buffer is None or buffer.shape[0] < shape[0] or buffer.shape[1] != shape[1]:
                    buffer = self._part_pairs[rows.buffer] = torch.empty(shape)
                rows.pairs = buffer[: shape[0]]
            rows.pairs.fill_(float("nan"))
        return rows.pairs

    def _native(self, blocks: torch.Tensor, rows: Rows, experts: Sequence[int], out: torch.Tensor | None = None, **how) -> None:
        self.ffn.run(rows.x, blocks, rows.topk_ids, rows.topk_weights, experts, self._pairs(rows) if out is None else out,
                     intermediate=self.store.block.intermediate, biases=self.store.block.biases, **self._rule, **how)
