"""The steps of a pipeline: feeds micro-batches to the executor, and runs chunks of the model for it."""

import contextlib
import functools
import itertools
import json
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.pipe.pipeline import Pipelined, units_of_chunks

__all__ = ["Runner", "loss_of"]

_WHERE = "pipe.runner"
_Tensors = list[torch.Tensor | None]


class Runner:
    """Owned by an engine. One thread at a time."""

    def __init__(self, core: _C.Engine, done: Pipelined) -> None:
        self.done = done
        self._batches: list[Any] = []
        self.output: Any = None
        """what the last chunk's last forward returned, on ranks that have it"""
        self.runs = False
        """a chunk, so a call of the model is the chain's"""
        me = weakref.ref(self)

        def forward(chunk: int, micro_batch: int, tensors: _Tensors, structure: str) -> tuple[_Tensors, str]:
            runner = me()
            assert runner is not None
            return runner._forward(chunk, micro_batch, tensors, structure)

        self.core = _C.Pipeline(
            core,
            done.mesh.axis("pp"),
            done.program,
            units_of_chunks(done, core.units),
            forward,
            done.mesh.axis("tp") if done.sends_slices else None,
        )

    def train_batch(self, batches: Iterable[Any]) -> tuple[_C.StepResult, float]:
        """See Engine.train_batch()."""
        with self._given(batches, self.done.micro_batches):
            return self.core.train_batch()

    def eval_batch(self, batches: Iterable[Any], micro_batches: int | None) -> float:
        """See Engine.eval_batch()."""
        count = self.done.micro_batches if micro_batches is None else micro_batches
        with self._given(batches, count):
            return self.core.eval_batch(count)

    @contextlib.contextmanager
    def _given(self, batches: Iterable[Any], count: int) -> Iterator[None]:
        """The micro-batches of the step that runs inside."""
        self._batches = list(itertools.islice(batches, count))
        try:
            if len(self._batches) < count:
                refuse(
                    "a stage of the pipeline has too few micro-batches for a step",
                    code="MISMATCH",
                    where=_WHERE,
                    who=f"stage {self.done.stage} of {self.done.mesh.size('pp')}",
                    which=f"micro-batch {len(self._batches)}",
                    expected=f"{count} micro-batches",
                    got=str(len(self._batches)),
                    hint="give every stage of a pipeline the same micro-batches, gradient_accumulation_steps a step",
                )
            yield
        finally:
            self._batches = []

    def _forward(self, chunk: int, micro_batch: int, tensors: _Tensors, structure: str) -> tuple[_Tensors, str]:
        first, last = self.done.bounds[chunk], self.done.bounds[chunk + 1]
        values = None if chunk == 0 else _nested(tensors, structure)
        self.runs = True
        try:
            result = self.done.chain.run(first, last, values, self._batches[micro_batch])
        finally:
            self.runs = False
        if chunk + 1 < len(self.done.stage_of_chunk):
            return _flat(result)
        self.output = result
        return [loss_of(result)], ""


def loss_of(result: Any) -> torch.Tensor | None:
    """The loss of what a whole model returns: a tensor, the attribute or key `loss`, or the first of a tuple."""
    if isinstance(result, torch.Tensor):
        return result
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if loss is None and isinstance(result, (tuple, list)) and result and isinstance(result[0], torch.Tensor):
        loss = result[0]
    return loss if isinstance(loss, torch.Tensor) else None


# --- values between chunks ------------------------------------------------------------------------------------------
#
# A single tensor has the structure "". Else the structure is a JSON document: the tree of torch's pytree, and for each
# leaf that is no tensor its value.

_PLAIN = (type(None), bool, int, float, str)


def _flat(values: Any) -> tuple[_Tensors, str]:
    if isinstance(values, torch.Tensor):
        return [values], ""
    leaves, tree = pytree.tree_flatten(values)
    tensors: _Tensors = []
    plain: list[list[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            continue
        if not isinstance(leaf, _PLAIN):
            refuse(
                "a value between two chunks cannot be sent",
                code="MODEL",
                where=_WHERE,
                which=type(leaf).__name__,
                expected="tensors, None, numbers, strings, and tuples, lists and dicts of them",
            )
        plain.append([len(tensors) + len(plain), leaf])
    return tensors, json.dumps([_text_of(tree), plain])


def _nested(tensors: _Tensors, structure: str) -> Any:
    if structure == "":
        return tensors[0]
    text, plain = json.loads(structure)
    leaves: list[Any] = list(tensors)
    for position, value in plain:
        leaves.insert(position, value)
    return pytree.tree_unflatten(leaves, _tree_of(text))


@functools.lru_cache(maxsize=64)
def _text_of(tree: pytree.TreeSpec) -> str:
    return pytree.treespec_dumps(tree)


@functools.lru_cache(maxsize=64)
def _tree_of(text: str) -> pytree.TreeSpec:
    return pytree.treespec_loads(text)
