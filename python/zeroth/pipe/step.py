"""One step of a pipeline whose actions the caller runs, with code of the caller's own between them."""

from collections.abc import Callable

from zeroth import _C
from zeroth.parallel._refuse import refuse

__all__ = ["PipelineStep", "StepEnd"]

StepEnd = Callable[[_C.StepResult], _C.StepResult]
"""told the result at the end, which it returns"""

_WHERE = "pipe.step"


class PipelineStep:
    """What Engine.pipeline_step() gives. `actions` are this rank's, as texts ("0F2": chunk 0, forward, micro-batch 2);
    run() takes each of them once, in this order, for the other stages count on it."""

    def __init__(self, core: _C.Pipeline, end: StepEnd) -> None:
        self.actions = tuple(core.actions)
        self._core = core
        self._end = end
        self._done = 0
        self._result: tuple[_C.StepResult, float] | None = None
        core.begin()

    def run(self, action: str) -> None:
        """Runs the action that comes next. Blocks where it receives, and where it reduces or updates. Raises Error
        USAGE for another one, with nothing run; and what the model raises."""
        if action != self.expected:
            refuse(
                "an action of a pipeline is out of order",
                where=_WHERE,
                who=f"stage {self._core.stage}",
                which=f"action {self._done} of {len(self.actions)}",
                expected=self.expected or "none: the step is complete",
                got=action,
            )
        self._core.run(action)
        self._done += 1

    @property
    def expected(self) -> str:
        """The action that comes next; "" after the last one."""
        return self.actions[self._done] if self._done < len(self.actions) else ""

    @property
    def result(self) -> tuple[_C.StepResult, float]:
        """The result of the step and the mean loss, the same on all ranks, when all actions have been run. The first
        read ends the step: collective and blocking. Raises Error USAGE before."""
        self.require_complete()
        if self._result is None:
            result, loss = self._core.end()
            self._result = self._end(result), loss
        return self._result

    def require_complete(self) -> None:
        """Raises Error USAGE if actions are missing."""
        if self.expected:
            refuse(
                "a step of a pipeline ends before its last action",
                where=_WHERE,
                who=f"stage {self._core.stage}",
                which=f"action {self._done} of {len(self.actions)}",
                expected=self.expected,
                got="the end of the step",
                hint="for action in step.actions: step.run(action)",
            )
