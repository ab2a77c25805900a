"""That a model computes, after it was split, what it computed before: looked at in its first forward, by default where
it has code of no family that the tests cover.

    before the split   Choice: which blocks, and whether sequences, and why
    after it           Verification: hooks, which are gone once they have looked

tp is looked at block by block: verify_tensor.py. sp by a few tokens through the whole model: verify_sequence.py.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.parallel.norm_split import SplitNorms
from zeroth.parallel.split import SplitModel
from zeroth.parallel.tensor_plan import blocks_of
from zeroth.parallel.tensor_share import TensorPlan
from zeroth.parallel.verify_choice import OF_SEQUENCES, OF_TENSORS, foreign_code
from zeroth.parallel.verify_runs import Result, is_possible
from zeroth.parallel.verify_sequence import SequenceCheck
from zeroth.parallel.verify_stage import StageCheck
from zeroth.parallel.verify_tensor import BlockCheck, Undo

__all__ = ["Choice", "Verification", "choose"]

_MODES = ("untested", "always", "never")
_SHARED = ("column", "row", "heads", "summed")
_OVER_SP = " over sp"
_KNOWN = "all layers are of families that the tests cover"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is to be verified. A frozen value."""

    blocks: Mapping[str, tuple[str, ...]]
    """paths of the blocks whose matrices ranks share, with the regions inside"""
    outside: tuple[str, ...]
    """layers of the plan that no module below the model holds together: they are not verified"""
    sequence: bool
    why: str
    """of it, or why nothing is"""


def choose(
    model: nn.Module, plan: TensorPlan | None, *, splits_sequence: bool, mode: str, has_own_plan: bool
) -> Choice:
    """For a model before it is split. `has_own_plan`: roles of layers that a caller chose."""
    if mode not in _MODES:
        refuse(
            "there is no such way to verify a model",
            where="parallel.parallelize",
            which="verify, /zeroth/parallel/verify",
            expected=", ".join(_MODES) + ", or arguments of a forward",
            got=mode,
        )
    if mode == "never":
        return Choice(blocks={}, outside=(), sequence=False, why="as the configuration or the caller says")
    blocks: dict[str, tuple[str, ...]] = {}
    outside: list[str] = []
    reasons: list[str] = []
    if plan is not None:
        every = blocks_of(model)
        shared: dict[str, list[str]] = {}
        for share in plan.shares:
            if share.role not in _SHARED:
                continue
            path = next((one for one in every if share.name.startswith(f"{one}.")), "")
            if path:
                shared.setdefault(path, []).append(share.name)
            elif share.role in ("column", "row"):
                outside.append(share.name)
        for path in [one for name in outside for one in _regions("", plan) if name.startswith(f"{one}.") and one]:
            shared.setdefault(path, [])
        outside = [name for name in outside if not any(name.startswith(f"{path}.") for path in shared)]
        for path in shared:
            foreign = foreign_code(path, model.get_submodule(path), OF_TENSORS)
            if mode == "untested" and not foreign and not has_own_plan:
                continue
            blocks[path] = tuple(one for one in _regions(f"{path}.", plan) if one.startswith(f"{path}."))
            reasons.append(foreign or ("layers with roles that the caller chose" if has_own_plan else "as asked for"))
    sequence = False
    if splits_sequence:
        foreign = foreign_code("", model, OF_SEQUENCES)
        sequence = mode == "always" or bool(foreign)
        reasons += [foreign or "as asked for"] if sequence else []
    known = f"no module below the model holds {outside[0]} and its partners" if outside else _KNOWN
    return Choice(blocks=blocks, outside=tuple(outside), sequence=sequence, why=reasons[0] if reasons else known)


def _regions(inside: str, plan: TensorPlan) -> list[str]:
    """Of each row the smallest module around it that has a column, too; by paths, in the order of the plan. `inside`:
    how the names of the rows begin."""
    found: dict[str, None] = {}
    for share in plan.shares:
        if share.role != "row" or share.adapter or not share.name.startswith(inside):
            continue
        path = share.name
        while path and not any(one.role == "column" and one.name.startswith(f"{path}.") for one in plan.shares):
            path = path.rpartition(".")[0]
        found.setdefault(path)
    return list(found)


class Verification:
    """Of one model. It is done with after the first forwards."""

    def __init__(
        self,
        model: nn.Module,
        choice: Choice,
        world: _C.World,
        mesh: _C.Mesh,
        undo: Undo | None,
        sequence: SplitModel | None,
        norms: SplitNorms | None,
    ) -> None:
        self.announces = False
        self.report = ""
        """what came out; "" before"""
        self._world = world
        self._model = model
        self._choice = choice
        self._mesh = mesh
        self._split = sequence
        self._seconds = 0.0
        self._is_busy = False
        """its own forwards run"""
        self._results: dict[str, Result] = {}
        self._blocks: dict[str, tuple[BlockCheck | StageCheck, Any]] = {}
        """those that are to be looked at, with their hooks"""
        self._sequence: SequenceCheck | None = None
        self._root: Any = None
        """hook of the model"""
        self._end: Any = None
        if choice.blocks or choice.sequence:
            # Those of ep, too: where a block has experts, they run it together.
            axes = [axis for axis in ("ep", "sp", "tp") if axis in mesh.sizes and mesh.size(axis) > 1]
            self._agree = mesh.axis(axes[0]) if len(axes) == 1 else mesh.axes(axes)
        if choice.blocks:
            assert undo is not None
            tp = mesh.axis("tp")
            for path, regions in choice.blocks.items():
                check = BlockCheck(model, path, undo.of(path), regions, tp, self._agree, norms)
                handle = check.block.register_forward_pre_hook(_BlockHook(self, path), with_kwargs=True)
                self._blocks[path] = check, handle
        if choice.sequence and sequence is not None:
            self._sequence = SequenceCheck(model, sequence, mesh, self._agree)
            self._root = model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        if self._blocks or self._sequence is not None:
            self._end = model.register_forward_hook(self._after)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Verification":
        """A copy of the model is not verified."""
        return self

    def __str__(self) -> str:
        """What is going to be looked at, and why."""
        choice = self._choice
        parts = [f"{len(choice.blocks)} blocks over tp"] if choice.blocks else []
        parts += ["sequences over sp"] if choice.sequence else []
        if not parts:
            return f"not verified: {choice.why}"
        return f"verified in the first forward: {', '.join(parts)} ({choice.why})"

    def follow(self, announces: bool) -> None:
        """The hooks of an engine are there now: a forward of its own goes through them, so it runs before them.
        `announces`: rank 0, or the first one of a stage, writes what comes out to the log."""
        self.announces = announces
        if self._root is not None:
            self._model._forward_pre_hooks.move_to_end(self._root.id, last=False)  # type: ignore[attr-defined]

    def of_stage(self, mesh: _C.Mesh) -> None:
        """The model is one stage of a pipeline, which runs some of its blocks. `mesh`: of the pipeline, over which its
        modules may communicate."""
        for path, (check, handle) in list(self._blocks.items()):
            if not _is_here(check.block):
                handle.remove()
                del self._blocks[path]
        if self._sequence is None or self._split is None:
            return
        self._sequence = None
        self._root.remove()
        self._root = None
        alone = next((self._mesh.axis(axis) for axis, size in self._mesh.sizes.items() if size == 1), None)
        alone = self._world.mesh({"dp": self._world.size, "sp": 1}).axis("sp") if alone is None else alone
        for path, block in blocks_of(self._model).items():
            if _is_here(block):
                check = StageCheck(path, block, self._split, [self._mesh, mesh], self._agree, alone)
                name = f"{path}{_OVER_SP}"
                self._blocks[name] = check, block.register_forward_pre_hook(_BlockHook(self, name), with_kwargs=True)

    def look(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At a block, in front of its forward."""
        if self._is_busy or path not in self._blocks:
            return
        check, handle = self._blocks[path]
        if module is not check.block or not is_possible((args, kwargs)):
            return
        if torch._C._current_graph_task_id() != -1:  # activations computed again
            return
        handle.remove()
        del self._blocks[path]
        began = time.monotonic()
        self._results[path] = check.run(args, kwargs)
        self._seconds += time.monotonic() - began
        if not self._blocks:
            self._finish()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check = self._sequence
        if check is None or model is not self._model or not is_possible((args, kwargs)):
            return
        self._sequence = None
        self._root.remove()
        self._root = None
        self._is_busy = True
        began = time.monotonic()
        try:
            self._results["sequences"] = check.run(args, kwargs)
        finally:
            self._is_busy = False
            self._seconds += time.monotonic() - began

    def _after(self, model: nn.Module, *_: Any) -> None:
        """Behind the first forward of the model. What it has not called is not waited for."""
        if model is self._model and not self._is_busy and self._sequence is None and self._results:
            self._finish()

    def _finish(self) -> None:
        """Says what came out, once."""
        if self.report or self._sequence is not None:
            return
        if self._end is not None:
            self._end.remove()
        done = {name: one for name, one in self._results.items() if not one.left_out}
        left_out = {name: one.left_out for name, one in self._results.items() if one.left_out}
        left_out |= {name: "it was not called in the first forward" for name in self._blocks}
        left_out |= {name: "no module below the model holds it and its partners" for name in self._choice.outside}
        of_stage = len([name for name in done if name.endswith(_OVER_SP)])
        blocks = len(done) - of_stage - ("sequences" in done)
        parts = [f"{blocks} of {len(self._choice.blocks)} blocks over tp"] if self._choice.blocks else []
        parts += ["sequences over sp"] if "sequences" in done else []
        parts += [f"{of_stage} blocks over sp"] if of_stage else []
        worst = max((one.difference for one in done.values()), default=0.0)
        self.report = f"verified {' and '.join(parts) or 'nothing'} in {1000 * self._seconds:.0f} ms"
        if done:
            self.report += f", largest relative difference {worst:.2g}"
        for name, why in list(left_out.items())[:3]:
            self.report += f"; left out: {name}, {why}"
        if self.announces and all(self._mesh.coordinate(axis) == 0 for axis in self._mesh.sizes if axis != "pp"):
            print(self.report, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _BlockHook:
    """A deep copy of the block has it, too, and is not looked at."""

    owner: Verification
    path: str

    def __deepcopy__(self, memo: dict[int, Any]) -> "_BlockHook":
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.owner.look(self.path, module, args, kwargs)


# Out of the graphs of torch.compile, as torch.compiler.disable() does it, which imports all of dynamo.
for _hook in (_BlockHook.__call__, Verification._before, Verification._after):
    set_code_exec_strategy(_hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


def _is_here(block: nn.Module) -> bool:
    """Not on another stage of a pipeline, which leaves nothing of its parameters here."""
    return all(parameter.numel() > 0 for parameter in block.parameters())
