"""`Handle`: what `swap` returns; restores the model and tells what ran."""

from __future__ import annotations

import platform
import threading
from importlib.metadata import PackageNotFoundError, version

from torch import nn

import apexk
from apexk.config import ApexConfig, Setting
from apexk.device.base import Device
from apexk.engine.runtime import Engine
from apexk.hardware import Hardware
from apexk.hf.adopt import StoreViews
from apexk.hf.forward import uninstall
from apexk.hf.inspect import Experts
from apexk.store.host_store import HostStore
from apexk.timeline.writer import Timeline


class Handle:
    """A swapped model. `restore()` brings it back; as a context manager it does so on leaving."""

    def __init__(self, model: nn.Module, config: ApexConfig, settings: dict[str, Setting], hardware: Hardware, experts: Experts,
                 views: StoreViews, store: HostStore, device: Device, timeline: Timeline):
        self.model, self.config, self.settings, self.hardware = model, config, settings, hardware
        self.engine: Engine | None = None
        self._experts, self._views, self._store, self._device, self._timeline = experts, views, store, device, timeline
        self._restored = False
        self._lock = threading.RLock()  # a signal handler may restore while a restore runs

    def restore(self) -> None:
        """Brings the model back, bit for bit, stops the workers and finishes the timeline. A second call does nothing.

        Raises OSError where the timeline cannot be finished; the model is restored all the same.
        """
        with self._lock:
            if self._restored:
                return
            uninstall(self._experts)
            self._views.release()
            self._device.close()
            self._restored = True
            try:
                self._timeline.close()
            except OSError as error:
                raise OSError(f"the model is restored, but its timeline {self.config.timeline} could not be finished: {error}") from error

    def __enter__(self) -> Handle:
        if self._restored:
            raise RuntimeError("this handle's model is restored already: call apexk.swap again")
        return self

    def __exit__(self, *_) -> None:
        self.restore()

    def __repr__(self) -> str:
        state = "restored" if self._restored else f"device {self._device.name}, pool {self.config.slots(self._experts.experts)}"
        return f"<apexk.Handle of {type(self.model).__name__}: policy {self.config.policy}, {state}>"

    def summary(self) -> dict:
        """Sums by phase ("prefill", "decode"): transfers, hits, path and step times in ms; see `apexk.engine.totals`."""
        return {phase: totals.report() for phase, totals in self.engine.totals.items()}

    def info(self) -> dict:
        """What is swapped and how: model, policy, pool, memory, device, and every setting with its source."""
        return self.header() | {
            "restored": self._restored,
            "host_bytes": self._store.nbytes,
            "pool_bytes": self._experts_in_pool() * self._store.block.stride_bytes,
            "modelled": self._device.modelled,
        }

    def header(self) -> dict:
        """The facts that a timeline starts with."""
        experts = self._experts
        return {
            "versions": versions(),
            "model": {
                "class": type(self.model).__name__, "model_type": experts.model_type, "moe_layers": len(experts.blocks),
                "experts": experts.experts, "topk": experts.topk, "replaced": "experts" if experts.family.experts_only else "blocks", "hidden": experts.hidden, "intermediate": experts.intermediate,
                "dtype": str(experts.dtype).removeprefix("torch."), "bytes_per_expert": self._store.block.payload_bytes,
            },
            "config": {
                "policy": self.config.policy, "pool": self.config.slots(experts.experts), "arithmetic": self.config.arithmetic,
                "seed": self.config.seed, "popularity": self.config.popularity is not None, "threads": self._device.halves.ffn.threads,
                "cpu_isa": self._device.halves.ffn.isa,
                "settings": {name: {"value": s.value, "source": s.source} for name, s in self.settings.items()},
            },
            "hardware": self.hardware.name if self._device.modelled else "this machine, measured",
            "device": self._device.name,
        }

    def _experts_in_pool(self) -> int:
        return self.config.slots(self._experts.experts) * len(self._experts.blocks)


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; None for what is not installed."""
    found = {"apexk": apexk.__version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
