"""Random-weight models in the shapes of real ones, at full or reduced depth: `random_model("qwen3.5-35b-a3b", layers=2)`.

Their routers choose almost uniformly, unlike a trained model's: say so beside a result, or force the routing
(`apexk.testing.forced`). The large matrices are windows of one stream of normal numbers, so that gigabytes are filled at the
speed of memory: no two are alike, but they are not independent either.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from apexk.hf.loader.skeleton import quiet_transformers, skeleton
from apexk.testing.shapes import shape_of

STREAM, WINDOW = 1 << 24, 1 << 21  # numbers
SMALL = 1 << 20  # tensors of fewer numbers get the library's own first values


def real_config(name: str, layers: int | None = None, **changes) -> PretrainedConfig:
    """The configuration of a named model with `layers` sparse layers (default: all); the dense ones in front of them stay.

    Raises ValueError for an unknown name or a depth that the model does not have.
    """
    shape = shape_of(name, layers)
    config = AutoConfig.for_model(shape.model_type, **shape.config)
    if layers is not None:
        depth = shape.layers - shape.moe_layers + layers
        config.num_hidden_layers = depth
        if getattr(config, "layer_types", None):  # the last ones: patterns end in the full attention that caches need
            config.layer_types = config.layer_types[-depth:]
        if getattr(config, "mlp_layer_types", None):
            config.mlp_layer_types = config.mlp_layer_types[:depth]
    for key, value in changes.items():
        if not hasattr(config, key):
            raise ValueError(f"{key} is no field of {type(config).__name__}")
        setattr(config, key, value)
    return config


def random_model(name: str, layers: int | None = None, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes) -> PreTrainedModel:
    """A named model with random weights, in eval mode on the CPU: `layers` sparse layers, everything else in its real size.

    `changes` go to the configuration (`vocab_size=1024` saves memory). The weights depend on `seed` alone.
    """
    return random_weights(real_config(name, layers, **changes), dtype=dtype, seed=seed)


def random_weights(config: PretrainedConfig, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PreTrainedModel:
    """As `random_model`, for any configuration of a causal language model."""
    like = skeleton(config, dtype)
    spread = getattr(config.get_text_config(), "initializer_range", 0.02)
    draw = torch.Generator().manual_seed(seed)
    stream = (torch.randn(STREAM, generator=draw) * spread).to(dtype)
    large = {name: tensor.shape for name, tensor in like.named_parameters() if tensor.numel() >= SMALL}
    state = {name: Window(shape, stream, seed * 1_000_003 + i) for i, (name, shape) in enumerate(large.items())}
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        model = type(like).from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    del model._weight_conversions  # "none were used"; without it save_pretrained writes the family's usual format
    return model


class Window:
    """A tensor of windows of the stream, made when the library asks for it."""

    def __init__(self, shape: torch.Size, stream: torch.Tensor, seed: int):
        self._shape, self._stream, self._seed = shape, stream, seed

    def __getitem__(self, _) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self._seed)
        tensor = torch.empty(self._shape, dtype=self._stream.dtype)
        pieces = tensor.view(-1).split(WINDOW)
        starts = torch.randint(0, STREAM - WINDOW, (len(pieces),), generator=draw)
        for piece, start in zip(pieces, starts.tolist(), strict=True):
            piece.copy_(self._stream[start : start + len(piece)])
        return tensor
