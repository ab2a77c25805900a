"""The steps of a pipeline: feeds micro-batches to the executor, and runs chunks of the model for it."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroth import _C, _boxes, _cast, _ending, _names
from zeroth._activations import ActivationOffload
from zeroth.parallel._refuse import refuse
from zeroth.pipe.batches import parts_of, take
from zeroth.pipe.held import Held
from zeroth.pipe.list_chain import ListChain
from zeroth.pipe.pipeline import Pipelined, head_of_engine, owners_of_buffers, units_of_chunks, units_of_tables
from zeroth.pipe.shared_head import ToHead, run_to_head
from zeroth.pipe.step import PipelineStep, StepEnd
from zeroth.pipe.values import Tensors, flat, nested, shared

__all__ = ["Runner", "loss_of"]

_WHERE = "pipe.runner"


class Runner:
    """Owned by an engine. One thread at a time."""

    def __init__(self, core: _C.Engine, done: Pipelined, activations: ActivationOffload | None) -> None:
        self.done = done
        self._device = core.device
        self._input_dtype = core.config.input_dtype
        self._saved: contextlib.AbstractContextManager[object] = activations or contextlib.nullcontext()
        self._tensors = None if activations is None else activations.tensors
        """where FLUSH moves what was saved"""
        if core.config.activations["device"] == "cpu" and activations is None:
            self._tensors = _C.SavedTensors(None, 0)  # all is in the memory of the host
        self._moved: set[tuple[int, int]] = set()
        """chunk and micro-batch of each FLUSH of what autograd saved"""
        self._held: dict[tuple[int, int], Held] = {}
        self._batches: list[Any] = []
        self._earlier: list[Any] = []
        """copies of those of the steps before, as far as chunks of this stage use late gradients"""
        late = _C.late_of_chunk(done.program)
        steps = [late[chunk] for chunk in done.chunks_of(done.stage)] if late else [0]
        self._most_earlier = done.micro_batches * max(steps)
        self.runs = False
        """a chunk, so a call of the model is the chain's"""
        self._weights: Sequence[float] | None = None
        """of the micro-batches of an evaluation"""
        self._output: list[Any] | None = None
        """where the last chunk puts what the model returns, in the place of its loss"""
        self._results: list[Any] | None = None
        """what the last chunk returns, beside its loss"""
        self._ends: list[ToHead] | None = None
        """runs of the last chunk up to a shared head, while they are kept"""
        self._left = ""
        """the action before which a step was left"""
        self._places = [_places_of_buffers(done, chunk) for chunk in range(len(done.stage_of_chunk))]
        me = weakref.ref(self)

        def forward(chunk: int, micro_batch: int, tensors: Tensors, structure: str) -> tuple[Tensors, str]:
            runner = me()
            assert runner is not None
            hooks = runner._saved
            if (chunk, micro_batch) in runner._moved and torch.is_grad_enabled():
                held = runner._held[chunk, micro_batch] = Held()
                hooks = held.hooks()
            return runner._forward(chunk, micro_batch, tensors, structure, hooks)

        def forward_alone(chunk: int, micro_batch: int, tensors: Tensors, structure: str) -> tuple[Tensors, str]:
            runner = me()
            assert runner is not None
            nothing = torch.autograd.graph.saved_tensors_hooks(_saves_nothing, _has_nothing)
            return runner._forward(chunk, micro_batch, tensors, structure, nothing)

        def buffers(chunk: int) -> list[torch.Tensor]:
            runner = me()
            assert runner is not None
            return [module._buffers[name] for module, name in runner._places[chunk]]  # type: ignore[misc]

        def move(away: bool, chunk: int, micro_batch: int) -> None:
            runner = me()
            assert runner is not None
            runner._move(away, chunk, micro_batch)

        def aged(keep: bool) -> None:
            runner = me()
            assert runner is not None
            runner._age(keep)

        own = _names.own_names(done.model)
        units = [
            (own.get(path, path), flag, [own.get(name, name) for name in names]) for path, flag, names in core.units
        ]
        self.core = _C.Pipeline(
            core,
            done.mesh.axis("pp"),
            done.program,
            units_of_chunks(done, units),
            forward,
            done.mesh.axis("tp") if done.sends_slices else None,
            _names.plain_keys(owners_of_buffers(done)),
            forward_alone,
            buffers,
            None if self._tensors is None else move,
            self._tensors,
            head_of_engine(done, units),
            units_of_tables(done, units),
            aged,
        )
        again = {action for action in self.core.actions if "RECOMPUTE" in action}
        for action in self.core.actions:
            chunk, flush, micro_batch = action.partition("FLUSH")
            if flush and f"{chunk}RECOMPUTE{micro_batch}" not in again:
                self._moved.add((int(chunk), int(micro_batch)))

    def train_batch(self, batches: Iterable[Any] | None) -> tuple[_C.StepResult, float]:
        """See Engine.train_batch()."""
        with self._given(batches, self.done.micro_batches), self._named():
            return self.core.train_batch()

    def eval_batch(
        self,
        batches: Iterable[Any] | None,
        count: int,
        weights: Sequence[float] | None,
        outputs: list[Any] | None = None,
    ) -> float:
        """The mean over `count` micro-batches, and over the ranks with batches of their own, of the loss; with
        `weights` of the loss times its weight. `outputs` gets what the model returns, on the last stage."""
        chain = self.done.chain
        loss_fn = chain.loss_fn

        def with_output(output: Any, labels: Any) -> Any:
            assert loss_fn is not None and outputs is not None
            outputs.append(output)
            return loss_fn(output, labels)

        with self._given(batches, count), self._named():
            self._weights = weights
            try:
                if outputs is not None and loss_fn is not None:
                    chain.loss_fn = with_output
                elif outputs is not None:
                    self._results = outputs
                with self._ends_kept(outputs is not None):
                    loss = self.core.eval_batch(count)
                    if outputs is not None and self.done.head is not None:
                        outputs[:] = self._results_of_ends(count, outputs)
                return loss
            finally:
                chain.loss_fn, self._results = loss_fn, None

    def outputs(self, batch: Any) -> Any:
        """See Engine.outputs()."""
        chain, kept = self.done.chain, []  # type: ignore[var-annotated]
        loss_fn = chain.loss_fn
        with self._given([batch], 1), self._named():
            try:
                self._output = kept
                if loss_fn is not None:  # which also says what a micro-batch is, so it is not None
                    chain.loss_fn = _output_of
                with self._ends_kept(True):
                    self.core.eval_batch(1)
                    if self.done.head is not None:
                        kept = self._results_of_ends(1, [])
            finally:
                chain.loss_fn, self._output = loss_fn, None
        root = self.done.stage_of_chunk[-1]
        return shared(kept[0] if kept else None, root, self.done.mesh.axis("pp"), self._device)

    @contextlib.contextmanager
    def step(self, batches: Iterable[Any] | None, end: StepEnd) -> Iterator[PipelineStep]:
        """See Engine.pipeline_step(). `end` is told the result."""
        with self._given(batches, self.done.micro_batches), self._named():
            step = PipelineStep(self.core, end)
            try:
                yield step
                step.result  # noqa: B018  # it ends the step
            except BaseException:
                self._left = step.expected
                raise

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Notes on an exception of the model's in which action it was raised. What errors say of other ranks has it.

        The other stages wait for values that this one will not send, also where the script catches the exception: they
        get it at once. An error in STEP is one of all stages, which nobody waits for."""
        earlier = self.core.failed_action
        try:
            yield
        except Exception as error:
            action = self.core.failed_action
            if (
                action
                and not earlier
                and getattr(error, "code", "") not in ("ABORTED", "MISMATCH", "PEER_LOST", "TIMEOUT")
            ):
                error.add_note(f"raised in {action}")
                world = _boxes.world_of(self.done.model)
                if world is not None and not action.startswith("action STEP "):
                    _ending.stop(world, error)
            raise

    @contextlib.contextmanager
    def _given(self, batches: Iterable[Any] | None, count: int) -> Iterator[None]:
        """The micro-batches of the step that runs inside."""
        if self._left:
            refuse(
                "an earlier step of the pipeline was left before its end",
                where=_WHERE,
                who=self._who,
                which=self._left,
                expected="all actions of a step",
                hint="close() the engine and go on from a checkpoint: the other stages have run another part of it",
            )
        if batches is None:
            self._require_no_reader()
            batches = [None] * count
        first = self.done.chunks_of(self.done.stage)[0]
        taken = take(batches, count, where=_WHERE, who=self._who, action=f"{first}F")
        self._batches = [self._cast(batch) for batch in taken]
        try:
            yield
        finally:
            self._batches, self._weights = [], None
            self._held.clear()

    def _cast(self, batch: Any) -> Any:
        """The micro-batch with inputs in the dtype of fp16.auto_cast or bf16.auto_cast. A list's labels stay."""
        dtype = self._input_dtype
        if dtype is None:
            return batch
        if isinstance(self.done.chain, ListChain):
            inputs, labels = parts_of(batch)
            return _cast.inputs(dtype, inputs), labels
        return _cast.inputs(dtype, batch)

    def _age(self, keep: bool) -> None:
        """The micro-batches of the step are now those of the step before; or no earlier ones are needed any more."""
        if not keep:
            self._earlier.clear()
        elif self._most_earlier:
            copies = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, self._batches)
            self._earlier = [*self._earlier, *copies][-self._most_earlier :]

    def _move(self, away: bool, chunk: int, micro_batch: int) -> None:
        assert self._tensors is not None
        if away:
            self._held[chunk, micro_batch].move(self._tensors)
        else:
            self._held.pop((chunk, micro_batch)).fetch()

    def _require_no_reader(self) -> None:
        done = self.done
        for chunk in done.chunks_of(done.stage):
            if done.chain.reads_batch(done.bounds[chunk], done.bounds[chunk + 1]):
                refuse(
                    "a stage that needs micro-batches is given none",
                    where=_WHERE,
                    who=self._who,
                    which=f"chunk {chunk}",
                    expected="an iterator of micro-batches",
                    got="None",
                    hint="None is for stages in the middle of a list of layers; blocks of a transformers model take "
                    "masks and positions from the micro-batch",
                )

    @property
    def _who(self) -> str:
        world = self.done.mesh.world
        return f"rank {world.rank}/{world.size}, stage {self.done.stage} of {self.done.mesh.size('pp')}"

    def _forward(
        self,
        chunk: int,
        micro_batch: int,
        tensors: Tensors,
        structure: str,
        saved: contextlib.AbstractContextManager[object],
    ) -> tuple[Tensors, str]:
        """`saved`: has the hooks of what autograd saves."""
        first, last = self.done.bounds[chunk], self.done.bounds[chunk + 1]
        values = None if chunk == 0 else nested(tensors, structure)
        self.runs = True
        ends = chunk + 1 == len(self.done.stage_of_chunk)
        try:
            with saved:
                if ends and self.done.head is not None:
                    return self._to_head(first, values, micro_batch)
                batch = self._batches[micro_batch] if micro_batch >= 0 else self._earlier[micro_batch]
                result = self.done.chain.run(first, last, values, batch)
        finally:
            self.runs = False
        if not ends:
            return flat(result)
        if self._output is not None:
            self._output.append(result)
            return [torch.zeros(())], ""
        if self._results is not None:
            self._results.append(result)
        loss = loss_of(result)
        if loss is not None and self._weights is not None:
            loss = loss.double() * self._weights[micro_batch]
        return [loss], ""

    @contextlib.contextmanager
    def _ends_kept(self, keeps: bool) -> Iterator[None]:
        """In here what the last chunk computes up to a shared head is kept, for the logits of all rows."""
        self._ends = [] if keeps and self.done.head is not None else None
        try:
            yield
        finally:
            self._ends = None

    def _results_of_ends(self, count: int, given: Sequence[Any]) -> list[Any]:
        """What the model returns for each micro-batch, on the stage of the last chunk, where it is `given` with
        stand-ins if a loss_fn was called with it. All stages compute the logits of their rows. Collective."""
        assert self._ends is not None
        results, mesh = [], self.done.mesh
        parts = mesh.axis("sp") if mesh.size("sp") > 1 else None
        with torch.no_grad():
            for number in range(count):
                end = self._ends[number] if self._ends else None  # other stages have none
                logits = self.core.logits(None if end is None else end.hidden)
                if end is not None:
                    result = given[number] if given else end.result
                    results.append(end.filled(result, logits, parts))
        return results

    def _to_head(self, first: int, values: Any, micro_batch: int) -> tuple[Tensors, str]:
        """The last chunk, of whose head all stages have rows."""
        head = self.done.head
        assert head is not None
        batch = self._batches[micro_batch]
        run = run_to_head(self.done.chain, head, first, values, batch, loss_of, needs_loss=self._output is None)
        if self._ends is not None:
            self._ends.append(run)
        weight = 1.0 if self._weights is None else self._weights[micro_batch]
        numbers = torch.tensor([run.factor * weight, run.constant * weight, run.parts], dtype=torch.float64)
        return [run.hidden, run.rows, run.targets, numbers], ""


def _places_of_buffers(done: Pipelined, chunk: int) -> list[tuple[nn.Module, str]]:
    """Where the buffers of a chunk's layers are, and those of no layer."""
    places = []
    for path, module in done.chain.model.named_modules():
        for name, buffer in module._buffers.items():
            users = done.chunks_of_parameter(f"{path}.{name}" if path else name)
            if buffer is not None and (chunk in users or not users):
                places.append((module, name))
    return places


def _saves_nothing(tensor: torch.Tensor) -> None:
    """The hook of a forward whose graph is thrown away."""


def _has_nothing(nothing: None) -> torch.Tensor:
    raise AssertionError("the backward of a forward that saved nothing")


def _output_of(output: Any, labels: Any) -> Any:
    """In the place of a loss_fn."""
    return output


def loss_of(result: Any) -> torch.Tensor | None:
    """The loss of what a whole model returns: a tensor, the attribute or key `loss`, or the first of a tuple."""
    if isinstance(result, torch.Tensor):
        return result
    loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
    if loss is None and isinstance(result, (tuple, list)) and result and isinstance(result[0], torch.Tensor):
        loss = result[0]
    return loss if isinstance(loss, torch.Tensor) else None
