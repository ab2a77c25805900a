"""Schedules of the learning rate beside an engine: the configuration's, and one of torch that the engine steps."""

from typing import Any

from zeroth import _C
from zeroth._optimizer import Optimizer

__all__ = ["ConfiguredSchedule", "Stepping"]


class ConfiguredSchedule:
    """The scheduler of the configuration, as zeroth.initialize() returns it. It reads: engine.step() takes each rate
    from the schedule by itself, and engine.save() and engine.load() keep its place. step() is refused."""

    def __init__(self, core: _C.Engine, optimizer: Optimizer) -> None:
        self._core = core
        self.optimizer = optimizer
        """the engine's, whose `param_groups` have the rates of the next update"""

    def get_last_lr(self) -> list[float]:
        """Learning rates of the next update, one a parameter group: engine.learning_rates. Local."""
        return self.optimizer.scheduled_rates()

    def get_lr(self) -> list[float]:
        """get_last_lr()."""
        return self.get_last_lr()

    @property
    def last_epoch(self) -> int:
        """Committed steps so far."""
        return self._core.steps

    def step(self, *_: Any) -> None:
        """Raises Error USAGE: engine.step() has made the schedule's step."""
        raise _C.make_error(
            "USAGE",
            "engine.step() steps the scheduler of the configuration, and another step by hand would be the second",
            where="python.scheduler",
            hint="leave out lr_scheduler.step()",
        )

    def state_dict(self) -> dict[str, Any]:
        """Its place, for programs that keep it beside a checkpoint: {"last_epoch": committed steps}."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Checks that the engine is at the same step. Raises Error USAGE otherwise: engine.load() brings the place."""
        wanted = state_dict.get("last_epoch")
        if wanted != self.last_epoch:
            raise _C.make_error(
                "USAGE",
                "the scheduler of the configuration is at another step than its state",
                where="python.scheduler",
                which="last_epoch",
                expected=str(self.last_epoch),
                got=repr(wanted),
                hint="engine.load(path) brings the step with everything else; call it before",
            )

    def __repr__(self) -> str:
        return f"zeroth's schedule of the configuration: step {self.last_epoch}, next rates {self.get_last_lr()}"


class Stepping:
    """The engine's steps of a scheduler of the user's, and whether somebody else has made one."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._count: Any = None
        self.look()

    def look(self) -> None:
        """Takes the scheduler's count of steps as it is. torch's schedulers have one."""
        self._count = getattr(self._scheduler, "_step_count", None)

    def step(self) -> None:
        self._scheduler.step()
        self.look()

    def require_untouched(self) -> None:
        """Raises Error USAGE if step() was called by hand since the engine did."""
        if not isinstance(self._count, int) or getattr(self._scheduler, "_step_count", None) != self._count + 1:
            return
        self.look()
        raise _C.make_error(
            "USAGE",
            "lr_scheduler.step() was called beside engine.step(), which steps the scheduler of zeroth.initialize()",
            where="python.scheduler",
            which=type(self._scheduler).__name__,
            hint="leave out lr_scheduler.step(); or make the scheduler yourself, "
            "of engine.optimizer, and call its step() after engine.step()",
        )
