"""The engine's optimizer as torch's schedulers see it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroth import _C

__all__ = ["Optimizer"]


class Optimizer(torch.optim.Optimizer):
    """`engine.optimizer`: for torch.optim.lr_scheduler and whatever else writes to `param_groups`.

    Each step takes "lr" and "weight_decay" of every group; all ranks must write the same (Error MISMATCH if not, and
    nothing is updated). The state is in the engine: `state` is empty, step() is engine.step(), and state_dict() and
    load_state_dict() are refused.
    """

    def __init__(
        self,
        core: _C.Engine,
        groups: Sequence[tuple[int, dict[str, Any]]],
        *,
        step: Callable[[], _C.StepResult],
        zero_grad: Callable[[], None],
    ) -> None:
        """`groups`: the number of each in the engine, and what torch keeps of it. `step`, `zero_grad`: the engine's."""
        self._core = core
        self._engine_step = step
        self._engine_zero_grad = zero_grad
        self._numbers = [number for number, _ in groups]
        super().__init__([group for _, group in groups], {"lr": 0.0, "weight_decay": 0.0})
        self._taken = [(group["lr"], group["weight_decay"]) for group in self.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """engine.step(). A closure is refused: backward comes first."""
        if closure is not None:
            raise _C.make_error(
                "USAGE",
                "step() takes no closure",
                where="python.optimizer",
                hint="call engine.backward(loss) before it",
            )
        return self._engine_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """engine.zero_grad(), whatever `set_to_none` is."""
        self._engine_zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built: the engine's groups are those that it was built with."""
        if hasattr(self, "_taken"):
            raise _C.make_error(
                "USAGE",
                "an engine takes no further parameter groups",
                where="python.optimizer",
                hint="name them in Engine(..., params=...)",
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Refused: what it could say has no moments in it."""
        raise self._no_state("has no state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as state_dict() is."""
        raise self._no_state("takes no state_dict()")

    @staticmethod
    def _no_state(what: str) -> Exception:
        return _C.make_error(
            "USAGE",
            f"an engine's optimizer {what}",
            where="python.optimizer",
            hint="moments and masters are in the engine, and not written to files yet; engine.export_safetensors(path) writes the weights",  # noqa: E501
        )

    def push(self) -> None:
        """Hands changed hyper-parameters to the engine. Raises Error if they changed beside a scheduler of the
        configuration."""
        for place, (number, group) in enumerate(zip(self._numbers, self.param_groups, strict=True)):
            wanted = (float(group["lr"]), float(group["weight_decay"]))
            if wanted != self._taken[place]:
                if self._core.has_schedule:
                    raise _C.make_error(
                        "USAGE",
                        "the configuration has a scheduler, and param_groups were changed beside it",
                        where="python.optimizer",
                        which=f"group {place}",
                        expected=f"lr and weight_decay {self._taken[place]}",
                        hint="learning rates have one master: take the scheduler out of the configuration, or leave the groups alone",  # noqa: E501
                    )
                self._core.set_group(number, *wanted)
                self._taken[place] = wanted
