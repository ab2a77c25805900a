"""What each unit does with its activations, chosen by the engine: measured steps, then a plan.

steps 1, 2   every unit is computed again, its input moves if anything can    the least memory
choice       figures of the slowest rank -> plan_activations()                once, the same on all ranks
after        keep, recompute, move, recompute+move, unit by unit              the same bits
"""

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeroth import _C
from zeroth._activation_plan import UnitCost, plan_activations
from zeroth._activations import ActivationOffload, offload_activations

__all__ = ["PlannedUnits", "planned_units"]

_MEASURED_STEPS = 2
"""the first one makes what is made once"""
_NEVER_S = 1e6
"""of a unit that must not be computed again; nor would it spare a byte"""
_PROBE_BLOCK = 1 << 20


class _Unit:
    """A module, what it does with its activations, and its figures of a micro-step: the most of all."""

    def __init__(self, name: str, module: nn.Module, choice: str) -> None:
        self.name = name
        self.module = module
        self.choice = choice
        self.call: Callable[..., Any] = module._compiled_call_impl or module._call_impl
        self.may_recompute = not any(_counts_batches(inner) for inner in module.modules())
        self.saved_bytes = self.input_bytes = 0
        self.forward_s = self.recompute_s = float("inf")
        """the least of all steps"""
        self.saved_now = self.input_now = 0
        """of the micro-step under way, as the two below"""
        self.forward_now = self.recompute_now = 0.0

    def end_micro_step(self) -> None:
        self.saved_bytes = max(self.saved_bytes, self.saved_now)
        self.input_bytes = max(self.input_bytes, self.input_now)
        if self.forward_now > 0.0:
            self.forward_s = min(self.forward_s, self.forward_now)
        if self.recompute_now > 0.0:
            self.recompute_s = min(self.recompute_s, self.recompute_now)
        self.saved_now = self.input_now = 0
        self.forward_now = self.recompute_now = 0.0


class PlannedUnits:
    """Calls the units of a model by their choices. The engine tells it of backwards and steps."""

    def __init__(
        self, core: _C.Engine, world: _C.World, modules: Mapping[str, nn.Module], moved: ActivationOffload | None
    ) -> None:
        self._core, self._world = core, world
        self._keys = core.config.activations
        self._moved = moved
        self._moved_all = None if moved is None else moved.of_all()
        self._steps = 0
        self._backward_s = float("inf")
        self._backward_now = 0.0
        first = "recompute" if moved is None else "recompute+move"
        self._units: list[_Unit] = []
        for name, module in modules.items():
            known = any(name.startswith(f"{unit.name}.") or module is unit.module for unit in self._units)
            if known or isinstance(module, torch.jit.ScriptModule):
                continue
            unit = _Unit(name, module, first)
            if not unit.may_recompute:
                unit.choice = "keep" if moved is None else "move"
            self._units.append(unit)
            # In the place where torch.compile puts its call: outside of all hooks, so that parameters are gathered
            # again for a recompute, and left out where a module is copied.
            module._compiled_call_impl = _call_of(weakref.ref(self), unit)

    @property
    def choices(self) -> dict[str, str]:
        """By path of the unit."""
        return {unit.name: unit.choice for unit in self._units}

    def detach(self) -> None:
        """Units are called as before."""
        for unit in self._units:
            unit.module.__dict__.pop("_compiled_call_impl", None)
            if unit.call != unit.module._call_impl:
                unit.module._compiled_call_impl = unit.call
        self._units.clear()

    def call(self, unit: _Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The unit's forward."""
        if unit.choice == "keep" and not self._measures:
            return unit.call(*args, **kwargs)
        moved = self._moved_all if unit.choice == "move" else self._moved if "move" in unit.choice else None
        with contextlib.nullcontext() if moved is None else moved:
            if not self._measures:
                inner = unit.call
            else:
                unit.input_now += _bytes_of(args)
                inner = functools.partial(self._measured, unit)
            if "recompute" not in unit.choice:
                return inner(*args, **kwargs)
            return checkpoint(functools.partial(inner, **kwargs) if kwargs else inner, *args, use_reentrant=False)

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward of the engine."""
        begin, waited = time.perf_counter(), self._waited()
        try:
            yield
        finally:
            self._backward_now += max(0.0, time.perf_counter() - begin - (self._waited() - waited))

    def end_micro_step(self, boundary: bool) -> None:
        """After step(). Collective on the last micro-step of the last measured step. Raises Error OUT_OF_MEMORY on all
        ranks if nothing fits the memory of the configuration; IO."""
        if not self._measures:
            return
        if self._backward_now > 0.0:
            self._backward_s = min(self._backward_s, self._backward_now)
        self._backward_now = 0.0
        for unit in self._units:
            unit.end_micro_step()
        self._steps += boundary
        if not self._measures:
            self._choose()

    @property
    def _measures(self) -> bool:
        return self._steps < _MEASURED_STEPS

    def _waited(self) -> float:
        return 0.0 if self._moved is None else self._moved.report()["wait_ns"] * 1e-9

    def _measured(self, unit: _Unit, *args: Any, **kwargs: Any) -> Any:
        again = torch._C._current_graph_task_id() != -1  # in a backward
        begin, waited = time.perf_counter(), self._waited()
        try:
            with contextlib.nullcontext() if again else _counted(unit):
                return unit.call(*args, **kwargs)
        finally:
            seconds = max(0.0, time.perf_counter() - begin - (self._waited() - waited))
            if again:
                unit.recompute_now += seconds
            else:
                unit.forward_now += seconds

    def _choose(self) -> None:
        units = self._units
        figures = [
            float(figure)
            for unit in units
            for figure in (unit.saved_bytes, unit.input_bytes, _known(unit.forward_s), _known(unit.recompute_s))
        ]
        given = int(self._keys["memory_bytes"])
        ranks = self._world.mesh({"dp": self._world.size}).world

        def of_slowest(values: list[float]) -> list[float]:
            return [float(one) for one in ranks.all_reduce(torch.tensor(values, dtype=torch.float64), "max")]

        of_slowest([0.0])  # all ranks begin to measure
        write, read = (0.0, 0.0) if self._moved is None else _speeds(self._keys, self._core.device)
        own = given or _C.free_bytes_of_rank(self._world) // 2
        *figures, backward, write, read, least = of_slowest(
            [*figures, _known(self._backward_s), -write, -read, -float(own)]
        )
        write, read, memory = -write, -read, int(-least)
        rows = [figures[4 * number : 4 * number + 4] for number in range(len(units))]
        forwards = sum(row[2] for row in rows)
        # One sum: the planner's step has no other.
        rest = max(0.0, backward - sum(row[3] for row in rows)) if backward > 0.0 else 2.0 * forwards
        costs = [
            UnitCost(
                name=unit.name,
                saved_bytes=int(saved),
                input_bytes=int(taken if unit.may_recompute else saved),
                forward_s=forward,
                backward_s=rest * forward / forwards if forwards > 0.0 else 0.0,
                recompute_s=(again or forward) if unit.may_recompute else _NEVER_S,
            )
            for unit, (saved, taken, forward, again) in zip(units, rows, strict=True)
        ]
        seen = [number for number, cost in enumerate(costs) if cost.forward_s > 0.0]
        if not seen:
            self._core.set_activation_choice("activations: no unit was called in two steps; nothing is chosen")
            return
        try:
            plan = plan_activations(
                [costs[number] for number in seen],
                memory_bytes=memory,
                write_bytes_per_s=write,
                read_bytes_per_s=read,
            )
        except _C.Error as error:
            if given or error.code != "OUT_OF_MEMORY":
                raise
            self._core.set_activation_choice(f"activations: units stay as in the measured steps: {error}")
            return
        for number, choice in zip(seen, plan.choices, strict=True):
            units[number].choice = choice
        counts = {choice: plan.choices.count(choice) for choice in dict.fromkeys(plan.choices)}
        chosen = ", ".join(f"{choice} {count}" for choice, count in counts.items())
        tier = f"; files write {write / 1e6:.0f} MB/s and read {read / 1e6:.0f} MB/s" if write > 0.0 else ""
        if self._keys["device"] == "cpu":
            tier = tier.replace("files", "copies to the host")
        self._core.set_activation_choice(
            f"activations of {len(seen)} units: {chosen}, the fastest within {memory:,} bytes of a rank; measured at "
            f"the slowest rank{tier}\n{plan}"
        )


def planned_units(
    core: _C.Engine, world: _C.World, modules: Mapping[str, nn.Module], moved: ActivationOffload | None
) -> PlannedUnits | None:
    """Where zeroth.activations.choice is "planned". Raises Error CONFIG for a pipeline."""
    if core.config.activations["choice"] != "planned":
        return None
    if core.config.mesh(world.size).get("pp", 1) > 1:
        raise _C.make_error(
            "CONFIG",
            "activations of a pipeline are not planned",
            where="python.activations",
            which="/zeroth/activations/choice",
            expected="given",
            got="planned",
            hint="what waits for its backward depends on the schedule: zeroth.plan_activations() takes any figures",
        )
    return PlannedUnits(core, world, modules, moved)


def _call_of(owner: "weakref.ref[PlannedUnits]", unit: _Unit) -> Callable[..., Any]:
    """A function, not a method: the module shall not keep the engine."""
    call = unit.call

    def called(*args: Any, **kwargs: Any) -> Any:
        planned = owner()
        if planned is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return planned.call(unit, args, kwargs)

    return called


def _counts_batches(module: nn.Module) -> bool:
    """Whether another forward would change the module."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


@contextlib.contextmanager
def _counted(unit: _Unit) -> Iterator[None]:
    """Counts the bytes that autograd saves inside, whatever hooks do with them then: each storage once, without the
    unit's parameters."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    seen: dict[int, torch.UntypedStorage] = {}  # kept, so that none has the number of another

    def pack(tensor: torch.Tensor) -> Any:
        if not seen:  # parameters are gathered by now
            for one in (*unit.module.parameters(), *unit.module.buffers()):
                seen[one.untyped_storage()._cdata] = one.untyped_storage()
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            unit.saved_now += storage.nbytes()
        return tensor if outer is None else outer[0](tensor)

    def unpack(packed: Any) -> torch.Tensor:
        return packed if outer is None else outer[1](packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _bytes_of(args: tuple[Any, ...]) -> int:
    storages = {
        one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in args if isinstance(one, torch.Tensor)
    }
    return sum(storages.values())


def _speeds(keys: Mapping[str, Any], device: torch.device) -> tuple[float, float]:
    """Bytes a second to where activations move, and back: in a store of its own, so that no counter of the user's
    changes."""
    moved = offload_activations(
        keys["nvme_path"] or None,
        device=keys["device"],
        saved="all",
        min_bytes=0,
        prefetch=keys["prefetch"],
        buffer_bytes=keys["buffer_bytes"],
        piece_bytes=keys["piece_bytes"],
        io=keys["io"],
        direct=keys["direct"],
    )
    count = max(8, 3 * keys["buffer_bytes"] // _PROBE_BLOCK)
    begin = time.perf_counter()
    packed = [moved._pack(torch.full((_PROBE_BLOCK,), 1, dtype=torch.uint8, device=device)) for _ in range(count)]
    middle, report = time.perf_counter(), moved.report()
    while packed:
        packed.pop().unpack()
    end = time.perf_counter()
    written = report["bytes_written"] or count * _PROBE_BLOCK
    read = moved.report()["bytes_read"] or count * _PROBE_BLOCK
    return written / (middle - begin), read / (end - middle)


def _known(seconds: float) -> float:
    return 0.0 if seconds == float("inf") else seconds
