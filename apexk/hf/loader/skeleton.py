"""A model of the right shapes whose tensors take no memory, and models built without their experts' parameters."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from apexk.hf.inspect import UnsupportedModel
from apexk.hf.loader.headers import CheckpointError

_building = threading.Lock()


def read_config(folder: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The folder's configuration. Code that lies in the folder runs only if `trust_remote_code`."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - the library checks values by what happens to fail
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def unquantized(config: PretrainedConfig) -> PretrainedConfig:
    """A copy that asks for a model with plain weights."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def skeleton(config: PretrainedConfig, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of `config` with zero-stride parameters on the CPU: shapes and dtypes are real, values and memory are not."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - as above
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if "Unrecognized configuration class" in why:
            raise UnsupportedModel(f"model type {config.model_type!r} has no causal language model in transformers: {why}") from error
        raise CheckpointError(f"no model can be built from the configuration: {why}") from error
    for module in model.modules():
        add_placeholders(module, dict(module._parameters))
    return model


def add_placeholders(module: nn.Module, like: dict[str, nn.Parameter | None]) -> None:
    """Gives `module` parameters of the names, shapes and dtypes of `like` that take no memory."""
    for name, parameter in like.items():
        if parameter is not None:
            value = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
        module.register_parameter(name, parameter)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the library's report of what a checkpoint lacks and without its progress bars."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def without_parameters(classes: Iterable[type[nn.Module]]) -> Iterator[None]:
    """Modules of exactly these classes that this thread builds meanwhile have no parameters. Other threads' are complete."""
    owner = threading.get_ident()

    def bare(cls: type[nn.Module], build):
        def __init__(self, *args, **kwargs):
            build(self, *args, **kwargs)
            if type(self) is cls and threading.get_ident() == owner:
                self._parameters.clear()
                self._is_hf_initialized = True  # transformers would draw first values for them

        return __init__

    with _building:
        before = [(cls, vars(cls).get("__init__")) for cls in set(classes)]
        try:
            for cls, _ in before:
                cls.__init__ = bare(cls, cls.__init__)
            yield
        finally:
            for cls, own in before:
                if own is None:
                    del cls.__init__
                else:
                    cls.__init__ = own
