"""The engine's optimizer, as an object for torch's schedulers."""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroth import _C, _hypers

__all__ = ["Optimizer"]


class _NoState(defaultdict[torch.Tensor, Any]):
    """`state` of the engine's optimizer: empty, and an error for who looks for a parameter's."""

    def _refuse(self, *_: object) -> Any:
        raise _C.make_error(
            "USAGE",
            "the states of an engine's optimizer are in the engine",
            where="python.optimizer",
            which="optimizer.state",
            hint='engine.full(name, "exp_avg") gives one as a whole tensor, engine.local("exp_avg") this rank\'s parts',
        )

    def get(self, key: Any, default: Any = None) -> Any:
        # Torch's profiler asks for each parameter when it records the step.
        return {} if sys._getframe(1).f_code.co_name == "_optimizer_step_code" else self._refuse()

    __getitem__ = __setitem__ = __contains__ = __iter__ = _refuse
    keys = values = items = pop = setdefault = update = _refuse  # type: ignore[assignment]


class Optimizer(torch.optim.Optimizer):
    """`engine.optimizer`, for torch.optim.lr_scheduler and other code that writes to `param_groups`.

    Each step takes the hyper-parameters of every group: lr and weight_decay, with betas and eps (AdamW, Adam) or
    momentum, dampening and nesterov (SGD). All ranks must write the same values: otherwise step() raises Error MISMATCH
    and updates nothing. Where the configuration has a scheduler, "lr" of each group is the rate of the next update, and
    is not to be written. The engine owns the optimizer state: looking into `state` raises Error USAGE, step() is
    engine.step(), and state_dict() and load_state_dict() raise Error USAGE.
    """

    def __init__(
        self,
        core: _C.Engine,
        groups: Sequence[tuple[int, dict[str, Any]]],
        *,
        kind: str,
        defaults: dict[str, Any],
        step: Callable[[], _C.StepResult],
        zero_grad: Callable[[], None],
    ) -> None:
        """`groups`: for each group its number in the engine and its entry for torch. `kind`: the optimizer of the
        configuration. `defaults`: the configuration's hyper-parameters. `step`: the engine's. `zero_grad`: its
        zero_grad() where there was a backward since the last step()."""
        self._core = core
        self._engine_step = step
        self._engine_zero_grad = zero_grad
        self._numbers = [number for number, _ in groups]
        self._kind = kind
        super().__init__([group for _, group in groups], defaults)
        self._taken = [self._hypers(place, group) for place, group in enumerate(self.param_groups)]
        self._base_rates = [float(group["lr"]) for group in self.param_groups]
        """of the configuration, which its scheduler multiplies"""
        self.state = _NoState()
        self.follow_schedule()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Calls engine.step() and returns its StepResult. Raises Error USAGE for a closure: backward comes first."""
        if closure is not None:
            raise _C.make_error(
                "USAGE",
                "step() takes no closure",
                where="python.optimizer",
                hint="call engine.backward(loss) before it",
            )
        return self._engine_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Calls engine.zero_grad() if there was a backward since the last step(), and ignores `set_to_none`. Else it
        does nothing: a loop that calls it beside each step() accumulates gradients as the configuration says."""
        self._engine_zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises Error USAGE after construction: the engine's groups are fixed."""
        if hasattr(self, "_taken"):
            raise _C.make_error(
                "USAGE",
                "an engine takes no further parameter groups",
                where="python.optimizer",
                hint="name them in Engine(..., params=...)",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Raises Error USAGE: the moments are in the engine."""
        raise self._no_state("has no state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises Error USAGE, as state_dict() does."""
        raise self._no_state("takes no state_dict()")

    @staticmethod
    def _no_state(what: str) -> Exception:
        return _C.make_error(
            "USAGE",
            f"an engine's optimizer {what}",
            where="python.optimizer",
            hint="engine.save(folder) and engine.load(folder) keep moments and masters, with everything else",  # noqa: E501
        )

    def push(self) -> None:
        """Passes changed hyper-parameters to the engine. Raises Error USAGE for values that the optimizer cannot have,
        for a changed learning rate where the configuration has a scheduler, and for groups that were added or taken
        away."""
        if len(self.param_groups) != len(self._numbers):
            raise _C.make_error(
                "USAGE",
                "an engine takes no further parameter groups, and gives none up",
                where="python.optimizer",
                which="optimizer.param_groups",
                expected=f"{len(self._numbers)} groups",
                got=f"{len(self.param_groups)}",
                hint="name them in Engine(..., params=...)",
            )
        for place, (number, group) in enumerate(zip(self._numbers, self.param_groups, strict=True)):
            wanted, taken = self._hypers(place, group), self._taken[place]
            if wanted == taken:
                continue
            if wanted["lr"] != taken["lr"] and self._core.has_schedule:
                raise _C.make_error(
                    "USAGE",
                    "the configuration has a scheduler, and param_groups were changed beside it",
                    where="python.optimizer",
                    which=f"group {place}",
                    expected=f"lr {taken['lr']}",
                    got=f"{wanted['lr']}",
                    hint="learning rates have one master: take the scheduler out of the configuration, or leave the groups alone",  # noqa: E501
                )
            self._core.set_group(
                number, {**wanted, "lr": self._base_rates[place]} if self._core.has_schedule else wanted
            )
            self._taken[place] = wanted

    def pull(self) -> None:
        """Takes the engine's hyper-parameters, which a checkpoint has changed."""
        hypers = self._core.groups
        for place, (number, group) in enumerate(zip(self._numbers, self.param_groups, strict=True)):
            group.update(hypers[number])
            self._taken[place] = self._hypers(place, group)
            self._base_rates[place] = float(group["lr"])
        self.follow_schedule()

    def scheduled_rates(self) -> list[float]:
        """Learning rates of the next update, one a group."""
        rates = self._core.learning_rates
        return [rates[number] for number in self._numbers]

    def follow_schedule(self) -> None:
        """Where the configuration has a scheduler, `param_groups` get the rates of the next update."""
        if not self._core.has_schedule:
            return
        for place, rate in enumerate(self.scheduled_rates()):
            self.param_groups[place]["lr"] = rate
            self._taken[place] = self._hypers(place, self.param_groups[place])

    def _hypers(self, place: int, group: dict[str, Any]) -> _hypers.Hypers:
        return _hypers.of_group(group, self._kind, f"group {place}")
