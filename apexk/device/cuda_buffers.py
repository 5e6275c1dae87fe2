"""Memory of a layer's step on a CUDA device, made once and used by every layer: rows on both sides, and tables of experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from apexk.device.base import Rows, divided_ids
from apexk.device.runtime import CudaRuntime, Stream


class StepBuffers:
    """Room for one part in flight: its weighted rows on the device, and what the CPU reads and writes, pinned, if it has a share
    (`host`)."""

    def __init__(self, runtime: CudaRuntime, tokens: int, topk: int, hidden: int, dtype: torch.dtype, host: bool = True):
        pairs, self._topk = tokens * topk, topk
        self._runtime = runtime
        self._pairs = runtime.empty_device((pairs, hidden), torch.float32)
        tokens, pairs = (tokens, pairs) if host else (0, 0)
        self._x = runtime.empty_pinned((tokens, hidden), dtype)
        self._weights = runtime.empty_pinned((tokens, topk), torch.float32)
        self._rows = runtime.empty_pinned((pairs, hidden), torch.float32)
        self._rows_view = runtime.device_view(self._rows)
        self._staged: torch.Tensor | None = None
        self._views(0)

    def of(self, rows: Rows) -> StepBuffers:
        """The same, its tensors cut to the size of `rows`."""
        if rows.tokens != self._tokens:
            self._views(rows.tokens)
        return self

    def stage(self, rows: Rows, stream: Stream) -> None:
        """Starts the copies of x and routing weights to the host, once a part."""
        if self._staged is not rows.x:  # which both shares of a part have
            self._staged = rows.x
            for (there, nbytes), here in zip(self._host, (rows.x, rows.topk_weights), strict=True):
                self._runtime.copy_async(there, here.data_ptr(), nbytes, False, stream)

    def _views(self, tokens: int) -> None:
        """Cuts the tensors once for all layers with as many tokens: a slice takes a microsecond."""
        self._tokens, pairs = tokens, tokens * self._topk
        self.x, self.weights = self._x[:tokens], self._weights[:tokens]
        self._host = [(tensor.data_ptr(), tensor.nbytes) for tensor in (self.x, self.weights)]
        self.pairs = self._pairs[:pairs]  # fp32 `[T*topk, H]` on the device
        self.host_rows, self.host_rows_view = self._rows[:pairs], self._rows_view[:pairs]  # the CPU's, and the same as the device sees it

    def release(self) -> None:
        """The part is over: its tensors need not stay for it."""
        self._staged = None


class Shares:
    """Ids of the two shares of a layer's parts where experts are split: made when first needed, for as many tokens as ever came.

    On the host int64, pinned, where `take_rows` sees them too: there the id `nobody` stands for the other side's pairs. The kernels' own have -1 and
    are made on their stream: every program of a routing reads all of them.
    """

    def __init__(self, runtime: CudaRuntime, nobody: int):
        self._runtime, self._nobody = runtime, nobody
        self._host = self._view = self._device = torch.empty(0)

    def divide(self, rows: Rows, split: Mapping[int, int], ids: torch.Tensor, whole: int, stream: Stream) -> None:
        """`ids [T, topk]` of `rows` on the host; `whole` tokens in all parts of the input. What the layer before left here has been read."""
        if self._device.shape[:1] < (whole,) or self._device.shape[1:] != (rows.topk,):
            shape = (1 << max(whole - 1, 0).bit_length(), rows.topk)
            self._host = self._runtime.empty_pinned((2, *shape), torch.int64)
            self._view, self._device = self._runtime.device_view(self._host), self._runtime.empty_device(shape, torch.int64)
        host, view = (memory[:, rows.start : rows.start + rows.tokens] for memory in (self._host, self._view))
        for there, found in zip(host, divided_ids(ids, split, self._nobody), strict=True):
            there.copy_(found)
        mine, here = rows.topk_ids, self._device[rows.start : rows.start + rows.tokens]
        self._runtime.launch(stream, lambda: here.copy_(divided_ids(mine, split, -1)[0]))
        rows.divide(split, here, view[1])
        for share, there, seen in zip(rows.shares, host, view, strict=True):
            share.host_ids = there, seen


class Ranks:
    """What the ranker finds for `layers` predicted layers, int32 `[layers, 3, E]` on the device and on the host: loads, bits of the fp32 score sums,
    experts in order."""

    def __init__(self, runtime: CudaRuntime, layers: int, experts: int):
        shape = layers, 3, experts
        device, self._host = runtime.empty_device(shape, torch.int32), runtime.empty_pinned(shape, torch.int32)
        self.here = tuple(device)
        self.down = self._host.data_ptr(), device.data_ptr(), device.nbytes  # of the copy to the host
        ranks = self._host.numpy()
        self._rows = [(loads, scores, order) for loads, scores, order in zip(ranks[:, 0], ranks.view("float32")[:, 1], ranks[:, 2], strict=True)]

    def read(self) -> list[tuple[dict[int, int], dict[int, float]]]:
        """What has come to the host: (loads, score sums) of the experts that have any, heaviest first."""
        found = []
        for loads, scores, order in self._rows:
            active = order[: (loads != 0).sum()]  # by load, downwards
            experts = active.tolist()
            found.append((dict(zip(experts, loads[active].tolist(), strict=True)), dict(zip(experts, scores[active].tolist(), strict=True))))
        return found


class PinnedRows:
    """int32 rows `[width]` in mapped host memory, written by the host and read by streams later.

    All that are taken within a layer are different ones; `reset` lets the next layer use them again.
    """

    def __init__(self, runtime: CudaRuntime, width: int, count: int = 32):
        self._runtime, self._width, self._count = runtime, width, count
        self._rows: list[tuple] = []
        self._next = 0

    def take(self) -> tuple:
        """The next one, a numpy array, and the same as a tensor that the device sees."""
        if self._next == len(self._rows):
            stride = -(-self._width // 4) * 4  # all aligned alike: kernels are compiled once
            memory = self._runtime.empty_pinned((self._count, stride), torch.int32)
            self._rows += zip(memory.numpy()[:, : self._width], self._runtime.device_view(memory)[:, : self._width], strict=True)
        row, self._next = self._next, self._next + 1
        return self._rows[row]

    def reset(self) -> None:
        self._next = 0


class Tables(PinnedRows):
    """Tables of experts that kernels read where they are: a copy to the device would queue behind experts."""

    def of(self, values: Mapping[int, int]) -> torch.Tensor:
        """`values[e]` for the experts in it, -1 for the others, as the device sees it."""
        host, device = self.take()
        host.fill(-1)
        cells = memoryview(host)  # item by item: half the time of an assignment by lists
        for expert, value in values.items():
            cells[expert] = value
        return device
