"""Memory of a layer's step on a CUDA device, made once and used by every layer: rows on both sides, and tables of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from apexk.device.base import Rows
from apexk.device.runtime import CudaRuntime, Stream


class StepBuffers:
    """Room for one part in flight: its weighted rows on the device, and what the CPU reads and writes, pinned."""

    def __init__(self, runtime: CudaRuntime, tokens: int, topk: int, hidden: int, dtype: torch.dtype):
        pairs = tokens * topk
        self._runtime = runtime
        self._pairs = runtime.empty_device((pairs, hidden), torch.float32)
        self._x = runtime.empty_pinned((tokens, hidden), dtype)
        self._weights = runtime.empty_pinned((tokens, topk), torch.float32)
        self._rows = runtime.empty_pinned((pairs, hidden), torch.float32)
        self._rows_view = runtime.device_view(self._rows)
        self._staged: Rows | None = None

    def pairs(self, rows: Rows) -> torch.Tensor:
        """fp32 `[T*topk, H]` on the device."""
        return self._pairs[: rows.tokens * rows.topk]

    def host_rows(self, rows: Rows) -> torch.Tensor:
        """The CPU's rows, fp32 `[T*topk, H]`."""
        return self._rows[: rows.tokens * rows.topk]

    def host_rows_view(self, rows: Rows) -> torch.Tensor:
        """The same as the device sees it."""
        return self._rows_view[: rows.tokens * rows.topk]

    def stage(self, rows: Rows, stream: Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts the copies of x and routing weights to the host, once a part; returns where they will be."""
        x, weights = self._x[: rows.tokens], self._weights[: rows.tokens]
        if self._staged is not rows:
            self._staged = rows
            for there, here in ((x, rows.x), (weights, rows.topk_weights)):
                self._runtime.copy_async(there.data_ptr(), here.data_ptr(), here.nbytes, False, stream)
        return x, weights

    def release(self) -> None:
        """The part is over: its tensors need not stay for it."""
        self._staged = None


class Tables:
    """int32 `[E]` tables that kernels read from mapped host memory: a copy to the device would queue behind experts.

    All of a layer's tables are different ones; `reset` lets the next layer use them again.
    """

    def __init__(self, runtime: CudaRuntime, experts: int, count: int = 32):
        self._runtime, self._experts, self._count = runtime, experts, count
        self._host: list = []
        self._device: list[torch.Tensor] = []
        self._next = 0

    def take(self, values: Mapping[int, int]) -> torch.Tensor:
        """`values[e]` for the experts in it, -1 for the others, as the device sees it."""
        if self._next == len(self._host):
            stride = -(-self._experts // 4) * 4  # all aligned alike: kernels are compiled once
            memory = self._runtime.empty_pinned((self._count, stride), torch.int32)
            self._host += list(memory.numpy()[:, : self._experts])
            self._device += list(self._runtime.device_view(memory)[:, : self._experts])
        table, self._next = self._next, self._next + 1
        self._host[table].fill(-1)
        self._host[table][list(values)] = list(values.values())
        return self._device[table]

    def reset(self) -> None:
        self._next = 0
