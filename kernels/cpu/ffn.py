"""Grouped expert FFN on the CPU: `HostFFN` owns the threads, checks what it is given and calls the native library."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from . import library as lib

log = logging.getLogger("apexk.kernels.cpu")

DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # apexk_dtype
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "swiglu_oss": 3}  # apexk_activation


class Job:
    """One submitted call. `wait()` returns once every row of `out` is written, and raises what went wrong."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, buffers: tuple):
        self._library, self._handle = library, handle
        weakref.finalize(self, _finish, library, handle, buffers)

    def done(self) -> bool:
        return bool(self._library.apexk_job_done(self._handle))

    def wait(self) -> None:
        raise_for(self._library.apexk_job_wait(self._handle))


def _finish(library: ctypes.CDLL, handle: ctypes.c_void_p, buffers: tuple) -> None:
    """A job that nobody holds any more is waited for: the threads use its buffers until it is done."""
    library.apexk_job_wait(handle)
    library.apexk_job_release(handle)


def _destroy(library: ctypes.CDLL, pool: ctypes.c_void_p) -> None:
    if pool.value is not None:
        library.apexk_pool_destroy(pool)


class HostFFN:
    """Threads that compute expert FFNs from expert blocks in host memory.

    `threads`: default one for each core that this process may use; more than it has processors or quota for are brought
    down to that, with a warning, unless `oversubscribe`. On several memory nodes each thread stays on one and first takes
    the rows of weights that lie there. `isa`: default `APEXK_CPU_ISA`, else the best one that the machine runs. Results do
    not depend on `threads` nor on the other tokens of a call; they do depend on `isa`. `library`: another build of the
    native code. `root`: a folder with copies of /proc and /sys files, to be read in place of this machine's.
    """

    def __init__(
        self,
        threads: int | None = None,
        isa: str | None = None,
        *,
        oversubscribe: bool = False,
        library: Path = lib.PATH,
        root: str | os.PathLike = "",
    ):
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, got {threads}")
        name = isa if isa is not None else os.environ.get("APEXK_CPU_ISA", "")
        self._library = lib.load(library)
        limit = lib.machine(os.fspath(root), library).limit
        if threads is not None and threads > limit and not oversubscribe:
            log.warning("%d CPU threads asked for, the affinity mask and the cgroup's quota allow %d: using %d", threads, limit, limit)
            threads = limit
        pool = ctypes.c_void_p()
        # before there are threads: an interrupt may arrive while they start
        self._close = weakref.finalize(self, _destroy, self._library, pool)
        status = self._library.apexk_pool_create_at(os.fspath(root).encode(), threads or 0, name.encode(), ctypes.byref(pool))
        if status in (lib.UNKNOWN_ISA, lib.UNAVAILABLE_ISA):
            names = lib.isa_names(library)
            known = ", ".join(f"{n}{'' if runs else ' (not on this machine)'}" for n, runs in names.items())
            raise ValueError(f"CPU instruction set {name!r}: {lib.status_text(status)}; there are: {known}")
        raise_for(status)
        self._pool = pool
        self.isa: str = self._library.apexk_pool_isa(pool).decode()
        self.threads: int = self._library.apexk_pool_threads(pool)

    def close(self) -> None:
        """Finishes what was submitted and ends the threads. May be called again."""
        self._close()

    def __enter__(self) -> HostFFN:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def run(
        self,
        x: torch.Tensor,  # [T, H] bf16 | fp16 | fp32, rows contiguous
        blocks: torch.Tensor,  # [E] int64 addresses of expert blocks of x's dtype, 0 = not on this host
        topk_ids: torch.Tensor,  # [T, topk] int64 | int32
        topk_weights: torch.Tensor,  # [T, topk] float32
        experts: Sequence[int],
        out: torch.Tensor,  # [T*topk, H] float32; [T, H] if summed
        *,
        intermediate: int,
        activation: str = "silu",
        biases: bool = False,
        weight_on_input: bool = False,
        summed: bool = False,
        with_torch: bool = False,
    ) -> None:
        """out[t*topk + k] = topk_weights[t, k] * W2(act(W1 x_t) * (W3 x_t)) for each pair whose id is in `experts`.

        A block holds w13 [2I, H] (gate rows, then up rows), w2 [H, I] and, with `biases`, b13 [2I] and b2 [H]. With
        `weight_on_input` the weight multiplies x_t instead, rounded to its dtype. Other rows of `out` are not touched.
        With `summed`, out[t] is the sum of the token's pairs in ascending order of expert and then of k; every row is
        written, with zeros where a token has no such pair.
        `with_torch` computes on the threads that torch's own operators run on, where those are OpenMP's and as many as
        `threads`: they wait for their next piece of work in a loop, 2 ms and more, in which they and the pool's would
        share the processors.
        Raises ValueError or TypeError, with `out` as it was, when something does not fit.
        """
        call, _keep = self.native_call(
            x, blocks, topk_ids, topk_weights, experts, out, intermediate, activation, biases, weight_on_input, summed
        )
        team = self._team(with_torch)
        if team is not None:
            raise_for(self._library.apexk_ffn_run_in(self._pool, call, team))
        else:
            raise_for(self._library.apexk_ffn_run(self._pool, call))

    def submit(
        self,
        x: torch.Tensor,
        blocks: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        experts: Sequence[int],
        out: torch.Tensor,
        *,
        intermediate: int,
        activation: str = "silu",
        biases: bool = False,
        weight_on_input: bool = False,
        summed: bool = False,
    ) -> Job:
        """As `run`, but returns when the call is checked and queued."""
        call, keep = self.native_call(
            x, blocks, topk_ids, topk_weights, experts, out, intermediate, activation, biases, weight_on_input, summed
        )
        handle = ctypes.c_void_p()
        raise_for(self._library.apexk_ffn_submit(self._pool, call, None, None, ctypes.byref(handle)))
        return Job(self._library, handle, keep)

    def call_linear(self, call, with_torch: bool) -> int:
        """The status of a native `LinearCall`, given by reference; see linear.py."""
        if not self._close.alive:
            raise ValueError("this HostFFN is closed")
        return self._library.apexk_linear_run(self._pool, call, self._team(with_torch))

    def _team(self, with_torch: bool) -> ctypes.c_void_p | None:
        return _openmp_team() if with_torch and torch.get_num_threads() == self.threads > 1 else None

    def native_queue(self) -> tuple[int, int, int]:
        """For native code that submits by itself: the pool, and the addresses of `apexk_ffn_submit` and `apexk_job_release`."""
        submit, release = self._library.apexk_ffn_submit, self._library.apexk_job_release
        return self._pool.value, ctypes.cast(submit, ctypes.c_void_p).value, ctypes.cast(release, ctypes.c_void_p).value

    def native_call(
        self, x, blocks, topk_ids, topk_weights, experts, out, intermediate, activation, biases, weight_on_input, summed
    ) -> tuple[lib.FFNCall, tuple]:
        """The native description of a call, and what must stay alive while it runs."""
        described = self.describe(x, topk_ids, topk_weights, out, intermediate, activation, biases, weight_on_input, summed)
        call, keep = self.complete(described, blocks, experts)
        return call, (x, topk_weights, out, *keep)

    def complete(self, described: lib.FFNCall, blocks: torch.Tensor, experts: Sequence[int]) -> tuple[lib.FFNCall, tuple]:
        """`described`, which may be used again, with the experts; and what must stay alive beside the tensors of `describe`."""
        if not self._close.alive:
            raise ValueError("this HostFFN is closed")
        _check("blocks", blocks, 1, (torch.int64,), contiguous=True)
        known = blocks.shape[0]
        if experts and not (min(experts) >= 0 and max(experts) < known):
            raise ValueError(f"experts must be in [0, {known}), got {[e for e in experts if not 0 <= e < known]}")
        wanted = array("i", experts)  # int32; filled in half the time that a ctypes array takes
        call = lib.FFNCall.from_buffer_copy(described)
        call.blocks, call.num_experts, call.experts, call.expert_count = blocks.data_ptr(), known, wanted.buffer_info()[0], len(wanted)
        return call, (blocks, wanted)

    def describe(self, x, topk_ids, topk_weights, out, intermediate, activation, biases, weight_on_input, summed) -> lib.FFNCall:
        """The native description of a call but for its experts; most of a call's checks are here."""
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r}; there are: {', '.join(ACTIVATIONS)}")
        if intermediate < 1:
            raise ValueError(f"intermediate must be at least 1, got {intermediate}")
        _check("x", x, 2, tuple(DTYPES))
        tokens, hidden = x.shape
        _check("topk_ids", topk_ids, 2, (torch.int64, torch.int32), contiguous=True)
        topk = topk_ids.shape[1]
        if topk_ids.shape[0] != tokens:
            raise ValueError(f"topk_ids must have shape {(tokens, topk)}, got {tuple(topk_ids.shape)}")
        _check("topk_weights", topk_weights, 2, (torch.float32,), shape=(tokens, topk), contiguous=True)
        _check("out", out, 2, (torch.float32,), shape=(tokens if summed else tokens * topk, hidden), contiguous=True)
        if hidden < 1 or topk < 1:
            raise ValueError(f"x must have columns and topk_ids too, got shapes {tuple(x.shape)}, {tuple(topk_ids.shape)}")
        if x.stride(1) != 1 and hidden > 1 or tokens > 1 and x.stride(0) < hidden:
            raise ValueError(f"x must have contiguous rows that do not overlap, got strides {x.stride()}")
        return lib.FFNCall(
            x=x.data_ptr(),
            topk_ids=topk_ids.data_ptr(),
            topk_weights=topk_weights.data_ptr(),
            out=out.data_ptr(),
            tokens=tokens,
            x_stride=max(x.stride(0), hidden),
            hidden=hidden,
            intermediate=intermediate,
            topk=topk,
            id_bytes=topk_ids.element_size(),
            dtype=DTYPES[x.dtype],
            activation=ACTIVATIONS[activation],
            biases=biases,
            weight_on_input=weight_on_input,
            summed=summed,
        )


@cache
def _openmp_team() -> ctypes.c_void_p | None:
    """The function that runs a loop of torch's on its threads, of whichever OpenMP library torch has loaded for all; None where it has none."""
    function = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return function and ctypes.cast(function, ctypes.c_void_p)


def _check(name: str, tensor: torch.Tensor, rank: int, dtypes=None, *, shape=None, contiguous=False) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu:
        raise ValueError(f"{name} must be on the CPU, got {tensor.device}")
    if dtypes and tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.dim() != rank:
        raise ValueError(f"{name} must have {rank} dimensions, got shape {tuple(tensor.shape)}")
    if shape is not None and tensor.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def raise_for(status: int) -> None:
    if status == lib.OK:
        return
    if status == lib.NO_MEMORY:
        raise MemoryError(lib.status_text(status))
    if status == lib.NO_THREAD:
        raise RuntimeError(lib.status_text(status))
    raise ValueError(lib.status_text(status))
