"""`Handle`: what `swap` returns; restores the model and tells what ran."""

from __future__ import annotations

import platform
import threading
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version

from torch import nn

import apexk
from apexk.config import ApexConfig, Setting
from apexk.device.base import Device
from apexk.engine.runtime import Engine
from apexk.hardware import Hardware
from apexk.hf import dense
from apexk.hf.adopt import StoreViews
from apexk.hf.forward import uninstall
from apexk.hf.gpu import Placement
from apexk.hf.inspect import Experts
from apexk.store.capacity import Capacity
from apexk.store.host_store import HostStore
from apexk.timeline.writer import Timeline


class Handle:
    """A swapped model. `restore()` brings it back; as a context manager it does so on leaving."""

    def __init__(self, model: nn.Module, config: ApexConfig, settings: dict[str, Setting], hardware: Hardware, experts: Experts,
                 views: StoreViews, store: HostStore, device: Device, timeline: Timeline, capacity: Capacity):
        self.model, self.config, self.settings, self.hardware, self.capacity = model, config, settings, hardware, capacity
        self.engine: Engine | None = None
        self.placement: Placement | None = None  # of everything else, on a GPU
        self.dense: list[nn.Linear] = []  # that the CPU kernels compute
        self._experts, self._views, self._store, self._device, self._timeline = experts, views, store, device, timeline
        self._restored = False
        self._lock = threading.RLock()  # a signal handler may restore while a restore runs

    def restore(self) -> None:
        """Brings the model back, bit for bit, stops the workers and finishes the timeline. A second call does nothing. A pass of
        another thread ends its layer first and goes on with the model's own.

        Raises OSError where the timeline cannot be finished; the model is restored all the same.
        """
        with self._lock, self.engine.lock if self.engine is not None else nullcontext():
            if self._restored:
                return
            uninstall(self._experts)
            dense.uninstall(self.dense, self)
            try:
                self._device.close()  # its copies read the store
            finally:
                self._views.release()
                if self.placement is not None:
                    self.placement.back()
                self._restored = True
            try:
                self._timeline.close()
            except OSError as error:
                raise OSError(f"the model is restored, but its timeline {self.config.timeline} could not be finished: {error}") from error

    @property
    def restored(self) -> bool:
        return self._restored

    def __enter__(self) -> Handle:
        if self._restored:
            raise RuntimeError("this handle's model is restored already: call apexk.swap again")
        return self

    def __exit__(self, *_) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if self._restored else f"device {self._device.name}, pool {self.capacity.slots}"
        return f"<apexk.Handle of {type(self.model).__name__}: policy {self.config.policy}, {state}>"

    def summary(self) -> dict:
        """Sums by phase ("prefill", "decode"): transfers, hits, path and step times in ms; see `apexk.engine.totals`."""
        self.engine.observer.report()
        return {phase: totals.report() for phase, totals in self.engine.totals.items()}

    def info(self) -> dict:
        """What is swapped and how: model, policy, pool, memory, device, and every setting with its source."""
        return self.header() | {
            "restored": self._restored,
            "lossless": self.engine.policy.lossless and self.config.payload == "plain",
            "evict": self.engine.policy.options.evict or self.engine.policy.evicts,
            "pool_scope": "global" if self.engine.shared else "layer",
            "copy_bytes": self.engine.bytes_per_expert,
            "host_bytes": self._store.nbytes,
            "memory_nodes": self._store.nodes,
            "pool_bytes": self.capacity.slots * len(self._experts.blocks) * self._store.block.stride_bytes,
            "pool_arithmetic": self.capacity.arithmetic,
            "modelled": self._device.modelled,
            **getattr(self._device, "info", dict)(),
        }

    def header(self) -> dict:
        """The facts that a timeline starts with."""
        experts = self._experts
        ffn = getattr(self._device, "halves", self._device).ffn
        return {
            "versions": versions(),
            "model": {
                "class": type(self.model).__name__, "model_type": experts.model_type, "moe_layers": len(experts.blocks),
                "experts": experts.experts, "topk": experts.topk, "replaced": "experts" if experts.family.experts_only else "blocks", "hidden": experts.hidden, "intermediate": experts.intermediate,
                "dtype": str(experts.dtype).removeprefix("torch."), "bytes_per_expert": self._store.block.payload_bytes,
            },
            "config": {
                "policy": self.config.policy, "pool": self.capacity.slots, "payload": self.config.payload, "arithmetic": self.config.arithmetic,
                "dense_layers": len(self.dense),
                "seed": self.config.seed, "popularity": self.config.popularity is not None, "threads": ffn.threads, "cpu_isa": ffn.isa,
                "settings": {name: {"value": s.value, "source": s.source} for name, s in self.settings.items()},
            },
            "hardware": self.hardware.name if self._device.modelled else "this machine, measured",
            "device": self._device.name,
        }


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; None for what is not installed."""
    found = {"apexk": apexk.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
