"""How the layers of experts of a model are used."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zeroth import _C

__all__ = ["ExpertUse", "Layers", "biases", "groups_of", "layers_of", "note", "noted"]

_USE = "_zeroth_expert_use"
_LAYERS = "_zeroth_expert_layers"


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertUse:
    """Of one layer of experts: of its last forward on this rank, or of a step on all ranks."""

    name: str
    """of the layer's module"""
    chosen: tuple[int, ...]
    """choices of the tokens, for each expert of the layer: those that were computed"""
    rows: tuple[int, ...]
    """tokens of all ranks that came to each of this rank's experts; of a step on all ranks, to each expert"""
    dropped: int
    """choices of the tokens that were left out for want of capacity"""

    @property
    def entropy(self) -> float:
        """Of `chosen`, from 0, one expert for all, to 1, the same number for each."""
        total = sum(self.chosen)
        if total == 0 or len(self.chosen) < 2:
            return 0.0
        parts = [count / total for count in self.chosen if count]
        return min(1.0, -sum(part * math.log(part) for part in parts) / math.log(len(self.chosen)))


class _Use:
    """What a module noted: its last forward, and sums over a step's forwards of training."""

    def __init__(self) -> None:
        self.last: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
        self.step: torch.Tensor | None = None
        """[E + 1] of int64: choices of each expert, and those dropped; None before a forward"""
        self.finished: torch.Tensor | None = None
        """of the step before"""

    def add(self, counts: torch.Tensor) -> None:
        self.step = counts if self.step is None else self.step + counts


def _use_of(module: nn.Module) -> _Use:
    use = vars(module).get(_USE)
    if use is None:
        use = _Use()
        object.__setattr__(module, _USE, use)
    return use


def note(
    module: nn.Module, chosen: Sequence[int], rows: Sequence[int], dropped: int = 0, training: bool | None = None
) -> None:
    """What the module's forward has just done. `training`: whether it belongs to a step; None: as the module says."""
    use = _use_of(module)
    use.last = (tuple(chosen), tuple(rows), dropped)
    if (module.training if training is None else training) and not _C.Gate.is_repeated():
        use.add(torch.tensor([*chosen, dropped], dtype=torch.int64))


def noted(module: nn.Module) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """`chosen`, `rows` and `dropped` of the module's last note()."""
    use: _Use | None = vars(module).get(_USE)
    return None if use is None else use.last


class _Watch:
    """Counts choices before a forward of experts that nothing else counts; no value leaves the device."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not module.training or _C.Gate.is_repeated():
            return
        chosen = inputs[1] if len(inputs) > 1 else next(iter([*named.values()][1 - len(inputs) :]), None)
        if not isinstance(chosen, torch.Tensor) or chosen.is_floating_point():
            return
        flat = chosen.detach().reshape(-1).long()
        flat = torch.where((flat < 0) | (flat > self.num_experts), self.num_experts, flat)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        counts[-1] = 0  # choices of no expert
        _use_of(module).add(counts)


class Layers:
    """The layers of experts of a model, with the ranks that have other tokens."""

    def __init__(self, model: nn.Module, groups: Sequence[_C.Communicator]) -> None:
        self.groups = tuple(groups)
        self.found: dict[str, tuple[nn.Module, int]] = {}
        self.handles: list[Any] = []
        """of hooks"""
        if any(hasattr(module, "num_experts") for module in model.modules()):
            self._find(model)
        object.__setattr__(model, _LAYERS, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model has no engine."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def forget(self, model: nn.Module) -> None:
        """The model has no engine any more."""
        for handle in self.handles:
            handle.remove()
        vars(model).pop(_LAYERS, None)

    def _find(self, model: nn.Module) -> None:
        from zeroth.nn.moe import MoE  # it needs what this module needs
        from zeroth.parallel.experts import _PLACED, experts  # it needs what this module needs

        found = self.found
        for name, module in model.named_modules():
            if isinstance(module, MoE):
                found[name] = (module, module.num_experts)
        for name, module in model.named_modules():
            if any(name == one or name.startswith(one + ".") for one in found):
                continue
            if isinstance(number := vars(module).get(_PLACED), int):
                found[name] = (module, number)
        for layer in experts(model).layers:
            if any(layer.name == one or layer.name.startswith(one + ".") for one in found):
                continue
            found[layer.name] = (layer.module, layer.num_experts)
            watch = _Watch(layer.num_experts)
            self.handles.append(layer.module.register_forward_pre_hook(watch, with_kwargs=True))

    def begin_step(self) -> None:
        """What comes now belongs to a new step."""
        for module, _ in self.found.values():
            use = _use_of(module)
            use.finished, use.step = use.step, None

    def last_forward(self) -> list[ExpertUse]:
        """Of each layer that noted one, on this rank."""
        return [ExpertUse(name, *use) for name, (module, _) in self.found.items() if (use := noted(module)) is not None]

    def least_even(self) -> tuple[float, str, int] | None:
        """Of this rank's tokens in the step so far: the least entropy of a layer, its name, and the choices that were
        dropped in all layers. None before a forward."""
        uses = []
        for name, (module, number) in self.found.items():
            if number > 1 and (counts := _use_of(module).step) is not None:
                *chosen, dropped = counts.tolist()
                uses.append(ExpertUse(name, tuple(chosen), (), dropped))
        if not uses:
            return None
        worst = min(uses, key=lambda use: use.entropy)
        return worst.entropy, worst.name, sum(use.dropped for use in uses)

    def everywhere(self) -> list[ExpertUse]:
        """Of the step so far, or of the last one where the next has no forward yet, on all ranks. Collective: one sum
        an axis of ranks with other tokens, of 16 (E + 1) bytes a layer and 8."""
        if not self.found:
            return []
        sizes = [number + 1 for _, number in self.found.values()]
        parts: list[torch.Tensor] = [torch.zeros(1, dtype=torch.int64)]
        for step in ("step", "finished"):
            for (module, _), size in zip(self.found.values(), sizes, strict=True):
                counts: torch.Tensor | None = getattr(_use_of(module), step)
                parts[0][0] += int(step == "step" and counts is not None)
                parts.append(torch.zeros(size, dtype=torch.int64) if counts is None else counts.cpu())
        total = torch.cat(parts)
        for group in self.groups:
            total = _C.all_reduce(total, group)
        of_step, of_last = total[1:].chunk(2)
        # A rank without a batch has no forward of a step that others are in.
        sums = torch.split(of_step if int(total[0]) > 0 else of_last, sizes)
        uses = []
        for name, counts in zip(self.found, sums, strict=True):
            chosen = tuple(counts[:-1].tolist())
            uses.append(ExpertUse(name, chosen, chosen, int(counts[-1])))
        return uses


def groups_of(mesh: _C.Mesh) -> tuple[_C.Communicator, ...]:
    """The ranks along these axes have other tokens of one batch."""
    axes = (axis for axis in ("dp", "ep", "sp") if axis in mesh.sizes and mesh.size(axis) > 1)
    return tuple(mesh.axis(axis) for axis in axes)


def layers_of(model: nn.Module) -> Layers | None:
    """Those that an engine keeps of the model."""
    return vars(model).get(_LAYERS)


def biases(model: nn.Module, layers: Layers) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers of biases of the choice, each with the name of its layer of experts."""
    for layer in layers.found:
        block = layer.rpartition(".")[0]
        inside = model.get_submodule(block) if block else model
        for name, buffer in inside.named_buffers():
            if name.rpartition(".")[2] == "e_score_correction_bias":
                yield layer, buffer
