"""`HandOff`: CPU experts started when a stream's rows are there and waited for by a stream, without Python between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from apexk.device.runtime import CudaRuntime, Stream
from apexk.kernels.cpu.ffn import HostFFN


class HandOffError(RuntimeError):
    """The CPU kernels refused or failed; the rows of `out` were not written."""


class Finished(NamedTuple):
    """When a job's rows were seen to be there and when its results were, in ns of `time.perf_counter_ns`."""

    start_ns: int
    end_ns: int


class HandOff:
    """Jobs for `ffn`'s threads that begin and end on streams. `how`: "flags" (stream memory operations), "host functions",
    or None: flags where the runtime has them. At most `depth` jobs are outstanding. Close it before `ffn` and the runtime.
    """

    def __init__(self, runtime: CudaRuntime, ffn: HostFFN, *, max_experts: int, depth: int = 8, how: str | None = None):
        raise NotImplementedError

    def submit(self, rows: Stream, x: torch.Tensor, blocks: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
               experts: Sequence[int], out: torch.Tensor, *, intermediate: int, activation: str = "silu", biases: bool = False,
               weight_on_input: bool = False) -> int:
        """As `HostFFN.submit`, once all that is now on the stream `rows` is done (so the copies into x, topk_ids and
        topk_weights, which are pinned, have been put there). Returns a ticket. Raises `HandOffError` for an earlier job."""
        raise NotImplementedError

    def join(self, ticket: int, stream: Stream) -> None:
        """What is put on `stream` from now on runs after the job. Once for each ticket. Raises `HandOffError` for an earlier job."""
        raise NotImplementedError

    def wait(self, ticket: int) -> Finished:
        """Blocks the host until the job is done (an interrupt gets through); `HandOffError` where it failed."""
        raise NotImplementedError

    def finished(self, ticket: int) -> Finished | None:
        """The job's times, or None while it is under way; never waits. Known for the last `depth` tickets."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises `HandOffError` for the first failed job that nobody was told of yet. Never waits."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits for outstanding jobs and ends the thread. May be called again."""
        raise NotImplementedError
