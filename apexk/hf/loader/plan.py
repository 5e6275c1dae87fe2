"""Which stored tensor goes where: the library's own renaming and conversion tables, asked about names alone.

So every format that `from_pretrained` knows for a family is known here: an expert's matrices as tensors of their own, fused
over all experts, or under names of former days.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from apexk.hf.inspect import Experts, UnsupportedModel
from apexk.hf.loader.codec import Tensor
from apexk.hf.loader.headers import CheckpointError


@dataclass(frozen=True)
class Piece:
    """Values for rows of an expert parameter: of one `expert`, rows `[begin, end)` of its second dimension; or, where
    `expert` is None, of all experts and all rows."""

    tensor: Tensor
    layer: int
    parameter: str  # name in the experts module
    expert: int | None = None
    begin: int = 0
    end: int = 0


@dataclass
class Plan:
    """pieces: of the experts. dense: the other tensors that the model wants. skipped: what it has no place for (layers for
    multi-token prediction). conversions: the library's transforms that were used, for saving in the same format."""

    pieces: list[Piece] = field(default_factory=list)
    dense: list[Tensor] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    conversions: list = field(default_factory=list)

    @property
    def expert_bytes(self) -> int:
        """Bytes of expert tensors on disk."""
        return sum(piece.tensor.nbytes for piece in self.pieces)


def make_plan(model: PreTrainedModel, experts: Experts, tensors: list[Tensor]) -> Plan:
    """`model`: a skeleton; `experts`: its sparse blocks. Raises `CheckpointError` naming what is missing, twice there or of
    another shape."""
    wanted = {}
    for layer, name in enumerate(experts.names):
        for parameter, value in experts.weights(layer).named_parameters():
            wanted[f"{name}.{experts.family.experts}.{parameter}"] = (layer, parameter, tuple(value.shape))
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    plan, found = Plan(conversions=transforms), {}
    for tensor in tensors:
        name, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, state)
        if name not in state and tensor.name in state:
            name, pattern = tensor.name, None
        if name in wanted:
            layer, parameter, shape = wanted[name]
            piece = _piece(tensor, name, layer, parameter, shape, by_pattern.get(pattern), pattern)
            found.setdefault(name, []).append(piece)
            plan.pieces.append(piece)
        elif name in state:
            plan.dense.append(tensor)
        else:
            plan.skipped.append(tensor.name)
    for name, (_, _, shape) in wanted.items():
        _check_cover(name, shape, found.get(name, []))
    plan.conversions = [t for t in transforms if t.was_used()]
    return plan


def _piece(tensor: Tensor, name: str, layer: int, parameter: str, shape: tuple[int, ...], converter: WeightConverter | None,
           pattern: str | None) -> Piece:
    """Where a stored tensor goes in the parameter of `shape`, which is `name` in the model."""
    if converter is None:
        _check_shape(tensor, shape)
        return Piece(tensor, layer, parameter)
    steps = [type(step) for step in converter.operations]
    merged = steps == [MergeModulelist] or (steps == [MergeModulelist, Concatenate] and converter.operations[1].dim == 1)
    if not merged or converter.operations[0].dim != 0 or len(converter.target_patterns) > 1:
        raise UnsupportedModel(f"{tensor.name} is stored in a form that takes {converter.operations} to become {parameter}; "
                               "load it with from_pretrained, then swap")
    sources = converter.source_patterns
    rows = shape[1] // len(sources)
    _check_shape(tensor, (rows, *shape[2:]))
    numbers = _numbers(tensor.name)
    if len(numbers) <= len(_numbers(name)):  # those of its layer alone: the library's patterns let anything stand for an expert
        raise CheckpointError(f"{tensor.name} does not say by a number which expert of {name} it is of")
    expert = int(tensor.name.split(".")[numbers[-1]])
    if expert >= shape[0]:
        raise CheckpointError(f"{tensor.name} is of expert {expert}, but the configuration gives a layer {shape[0]} experts")
    begin = sources.index(pattern) * rows
    return Piece(tensor, layer, parameter, expert, begin, begin + rows)


def _check_shape(tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(f"{tensor.name} in {tensor.first.file.name} has shape {list(tensor.shape)}, the configuration wants {list(shape)}")


def _check_cover(name: str, shape: tuple[int, ...], pieces: list[Piece]) -> None:
    """Every value of a parameter is given exactly once."""
    if not pieces:
        raise CheckpointError(f"{name} is missing: the checkpoint holds nothing for it")
    owner: dict[tuple[int | None, int], Piece] = {}
    for piece in pieces:
        first = owner.setdefault((piece.expert, piece.begin), piece)
        if first is not piece or ((None, 0) in owner and len(owner) > 1):
            raise CheckpointError(f"{next(p for p in pieces if p is not piece).tensor.name} and {piece.tensor.name} both hold values of {name}: which count cannot be known")
    if pieces[0].expert is not None:
        kinds = {piece.begin: piece for piece in pieces}
        lacking = [(expert, begin) for expert in range(shape[0]) for begin in kinds if (expert, begin) not in owner]
        if lacking:
            names = [_name_for(kinds[begin], expert) for expert, begin in lacking[:5]]
            raise CheckpointError(f"{', '.join(names)}{f' and {len(lacking) - 5} more' if len(lacking) > 5 else ''} missing")
        given = sum(piece.end - piece.begin for piece in kinds.values())
        if given != shape[1]:
            raise CheckpointError(f"{name}: there are {given} of {shape[1]} rows an expert, all from tensors like {pieces[0].tensor.name}; the others are missing")


def _numbers(name: str) -> list[int]:
    """Which parts of a name are numbers; the last one of an expert's tensor is its expert."""
    return [i for i, part in enumerate(name.split(".")) if part.isascii() and part.isdigit()]


def _name_for(piece: Piece, expert: int) -> str:
    """The name that another expert's piece would have."""
    parts, at = piece.tensor.name.split("."), _numbers(piece.tensor.name)[-1]
    return ".".join([*parts[:at], str(expert), *parts[at + 1 :]])
