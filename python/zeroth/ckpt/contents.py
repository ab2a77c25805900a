"""Contents: what is between any source and any target. Nothing of it is in memory until a tensor is read."""

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zeroth import _C
from zeroth._names import plain, plain_keys
from zeroth.ckpt.refusals import refused

__all__ = ["NO_GROUP", "WEIGHT", "Contents", "Hypers", "Lazy", "Param", "as_reals", "of_tensor", "weight_of"]

WEIGHT = "weight"
"""the state that is the parameter itself: its float32 master where there is one"""
_STEP_SUM = "step_sum"
NO_GROUP = -1
"""of a parameter whose hyper-parameters nobody knows"""

Hypers = dict[str, float | bool]
"""lr, beta1, beta2, eps, weight_decay, momentum, dampening, nesterov"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lazy:
    """A tensor that is read when it is wanted."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    """blocks; the tensor has this shape and dtype and lies on the CPU"""

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to(self, dtype: torch.dtype, convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor]) -> "Lazy":
        """The same with convert(tensor, dtype) on the way."""
        if dtype == self.dtype:
            return self
        read = self.read
        return Lazy(shape=self.shape, dtype=dtype, read=lambda: convert(read(), dtype))


def of_tensor(tensor: torch.Tensor) -> Lazy:
    """Of a tensor that is there, or mapped from a file."""
    return Lazy(shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: tensor.detach().contiguous())


@dataclasses.dataclass(kw_only=True, slots=True)
class Param:
    """A parameter with its states."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """as the model computes"""
    states: dict[str, Lazy]
    """"weight", "exp_avg", "exp_avg_sq", "momentum_buffer", ..."""
    trainable: bool = True
    group: int = NO_GROUP
    """index in Contents.groups"""
    updates: int = 0
    """steps in which it was updated"""
    aliases: list[str] = dataclasses.field(default_factory=list)
    """other names of the same tensor"""


_TRAINED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def as_reals(lazy: Lazy) -> Lazy:
    """A complex tensor as pairs of reals, which engines have for complex parameters; any other as it is."""
    if not lazy.dtype.is_complex:
        return lazy
    read = lazy.read
    real = torch.float64 if lazy.dtype == torch.complex128 else torch.float32
    return Lazy(shape=(*lazy.shape, 2), dtype=real, read=lambda: torch.view_as_real(read()).contiguous())


def weight_of(name: str, lazy: Lazy) -> Param:
    """A parameter of which no more is known; it trains if one of its dtype can."""
    lazy = as_reals(lazy)
    return Param(name=name, shape=lazy.shape, dtype=lazy.dtype, states={WEIGHT: lazy}, trainable=lazy.dtype in _TRAINED)


@dataclasses.dataclass(kw_only=True, slots=True)
class Contents:
    """Everything that a checkpoint holds, by logical names. Sources make it, targets take it."""

    origin: str
    """path, for people and errors"""
    kind: str
    """"zeroth", "hf", "torch", "dcp", "deepspeed" or "deepspeed-universal" """
    params: list[Param]
    buffers: dict[str, Lazy] = dataclasses.field(default_factory=dict)
    """persistent buffers of the module"""
    groups: list[Hypers] = dataclasses.field(default_factory=list)
    optimizer: str = ""
    """"AdamW", "Adam", "SGD" or "", if there is none or nobody knows"""
    step: int = 0
    """committed updates"""
    user: dict[str, Any] = dataclasses.field(default_factory=dict)
    """what Engine.save() took: client_state under "client" """
    loss_scaler: dict[str, Any] = dataclasses.field(default_factory=dict)
    """of fp16: scale, steps, last_overflow, hysteresis; empty if there is none"""
    accumulation: dict[str, Any] = dataclasses.field(default_factory=dict)
    """micro_step, micro_steps and more of a step that was under way; empty between steps"""
    left_out: list[str] = dataclasses.field(default_factory=list)
    """what the source has and this does not, in words"""
    manifest: _C.Manifest | None = None
    """of a source that is a checkpoint of Zeroth"""

    def param(self, name: str) -> Param:
        """By any of its names. Raises Error USAGE."""
        for param in self.params:
            if param.name == name or name in param.aliases:
                return param
        raise refused("there is no such parameter", code="USAGE", which=f"{self.origin}, {name}")

    @property
    def has_optimizer(self) -> bool:
        """Its states, or at least its hyper-parameters."""
        return bool(self.optimizer and self.groups)

    def without_optimizer(self) -> None:
        """Weights and buffers stay."""
        for param in self.params:
            param.states = {WEIGHT: param.states[WEIGHT]}
            param.updates = 0
        self.optimizer = ""
        self.loss_scaler = {}

    def drop_accumulation(self) -> None:
        """Gradients of a step that was under way: only the engine that had them can go on with them."""
        if self.accumulation:
            micro_step, of = self.accumulation["micro_step"], self.accumulation["micro_steps"]
            self.left_out.append(f"gradients of a step that was under way: {micro_step} of {of} micro-steps")
        self.accumulation = {}
        for param in self.params:
            param.states = {name: lazy for name, lazy in param.states.items() if not name.startswith(_STEP_SUM)}

    def use_state(self, state: str) -> None:
        """Values of this state become the weights: of an average. Parameters without it keep theirs. Raises Error USAGE
        if none has it, or if it has another shape than its parameter."""
        found = [param for param in self.params if state in param.states]
        if not found:
            known = sorted({name for param in self.params for name in param.states})
            raise refused(
                "no parameter has this state", code="USAGE", which=self.origin, expected=", ".join(known), got=state
            )
        for param in found:
            if param.states[state].shape != param.shape:
                raise refused("a state cannot be a weight", code="USAGE", which=f"{self.origin}, {param.name}/{state}")
            param.states[WEIGHT] = param.states[state]
            if state != WEIGHT:
                del param.states[state]

    def rename(self, rules: Sequence[tuple[str, str]]) -> None:
        """Each rule is a regular expression and what takes the place of its first match. Raises Error USAGE for an
        expression that is none, and where two parameters would get one name."""

        def renamed(name: str) -> str:
            for pattern, text in rules:
                name = re.sub(pattern, text, name, count=1)
            return name

        try:
            for param in self.params:
                param.name = renamed(param.name)
                param.aliases = [renamed(alias) for alias in param.aliases]
            self.buffers = {renamed(name): lazy for name, lazy in self.buffers.items()}
        except re.error as error:
            raise refused("a rule for names is no regular expression", code="USAGE", got=str(error)) from error
        self.require_unique("USAGE")

    def plain_names(self) -> None:
        """Names without those of the wrappers of torch.compile(). Raises Error CHECKPOINT where two become one."""
        for param in self.params:
            param.name = plain(param.name)
            param.aliases = [plain(alias) for alias in param.aliases]
        self.buffers = plain_keys(self.buffers)
        self.require_unique()

    def freeze(self, patterns: Iterable[str]) -> None:
        """Parameters whose names match (as file names do) are frozen: they keep no states but the weight, in the dtype
        of computation. Raises Error USAGE for a pattern that matches none."""
        for pattern in patterns:
            matching = [param for param in self.params if fnmatch.fnmatchcase(param.name, pattern)]
            if not matching:
                raise refused("a pattern matches no parameter", code="USAGE", which=f"{self.origin}, {pattern!r}")
            for param in matching:
                param.trainable = False
                param.states = {WEIGHT: param.states[WEIGHT]}

    def require_unique(self, code: str = "CHECKPOINT") -> None:
        """Raises Error if two parameters or buffers have one name."""
        seen: set[str] = set()
        for name in [*(name for param in self.params for name in (param.name, *param.aliases)), *self.buffers]:
            if name in seen:
                raise refused("two tensors have one name", code=code, which=f"{self.origin}, {name}")
            seen.add(name)
