"""The engine around an nn.Module."""

import contextlib
import functools
import json
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from zeroth import (
    _C,
    _access,
    _activation_choice,
    _activations,
    _boxes,
    _cast,
    _deferred,
    _doors,
    _elsewhere,
    _ending,
    _expert_use,
    _folders,
    _given,
    _guards,
    _hypers,
    _json_values,
    _names,
    _packed,
    _place,
    _printing,
    _schedule,
    _state,
    _units,
    _watch,
)
from zeroth._config import ConfigLike, to_config
from zeroth._evaluation import evaluating
from zeroth._optimizer import Optimizer

__all__ = ["Engine", "initialize"]

if TYPE_CHECKING:
    from zeroth.pipe.step import PipelineStep

_Batch = TypeVar("_Batch")
_END = object()
"""marks the end of a loader"""

ParamGroups = Sequence[Mapping[str, Any]] | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]

_owned: set[int] = set()
"""ids of the parameters of all open engines, which keep them alive"""


def has_engine(model: nn.Module) -> bool:
    """Whether an open engine has a parameter of the model."""
    return any(id(parameter) in _owned for parameter in model.parameters())


def _refuse_foreign_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(optimizer, Optimizer):
        return
    for group in optimizer.param_groups:
        if any(parameter.requires_grad and id(parameter) in _owned for parameter in group["params"]):
            raise _C.make_error(
                "USAGE",
                "an optimizer of torch's steps over parameters that an engine owns",
                where="python.engine",
                which=type(optimizer).__name__,
                hint="engine.step() updates them, with the optimizer of the configuration",
            )


register_optimizer_step_pre_hook(_refuse_foreign_step)


class Engine:
    """Shards a module's parameters, gradients and optimizer state over the ranks of the job, as the configuration says.

    Ownership: the module stays the user's and its parameters are the same objects. The engine owns their memory until
    close(). `module(x)` is the same call as `engine(x)`.
    Collective and blocking: all ranks build the engine with the same model and configuration. Rank 0's parameters and
    buffers are copied to all ranks. If the configuration enables bf16 or fp16, a model in float32 is cast to it first,
    in place, parameters and buffers, as by model.to(dtype).
    Parameters: dense float32, float64, bfloat16, or with fp16.enabled float16; frozen ones of any dtype with elements
    of 1, 2, 4 or 8 bytes; on the CPU or on one CUDA device, or those of a module that zeroth.deferred() has built.
    Without a trainable one the engine gathers and evaluates, and step() is refused.
    Raises Error, with nothing changed: CONFIG, MODEL, MISMATCH, OUT_OF_MEMORY, ENVIRONMENT, USAGE, and errors of the
    transport.
    """

    def __init__(
        self,
        model: _given.Given,
        config: ConfigLike = None,
        *,
        params: ParamGroups | None = None,
        trainable_later: bool | nn.Parameter | nn.Module | Iterable[nn.Parameter | nn.Module] = False,
        units: Iterable[nn.Module] | None = None,
        world: _C.World | None = None,
        log_level: str = "info",
        progress_every_s: float = 1.0,
        json_log: str = "",
    ) -> None:
        """`model`: the module to train, or what zeroth.pipeline() or zeroth.parallelize() returned for it. `config`: a
        path, a dictionary, a Config; None: that of the pipeline, else all defaults.
        `params`: parameter groups as torch's optimizers take them, each with its own hyper-parameters or the
        configuration's: "lr", "weight_decay", "betas" (all but SGD), "eps" (all but SGD and Lion), "momentum",
        "dampening", "nesterov" (SGD).
        `trainable_later`: frozen parameters, in a group or not, that may become trainable at any step: True for all, or
        a parameter, a module, or several of them. They have moments and gradient memory from the beginning, as frozen
        ones in a group do.
        `units`: the modules to use as units, instead of zeroth.units(model). `world`: default
        World.from_environment(). `log_level`: least level that is logged. `progress_every_s`: seconds between two
        progress lines of rank 0, at least; 0: no such lines. `json_log`: path of a file to which the log and every step
        are appended as JSON lines; "": the path in ZEROTH_JSON_LOG, if it is set."""
        _ending.install()
        model, config = _given.module_of(model, config)
        _refuse_wrapped(model)
        _refuse_second(model)
        _refuse_subclasses("parameter", model.named_parameters())
        if world is None:
            world = _boxes.world_of(model) or _C.World.from_environment()
        _refuse_another_world(world)
        if world.size > 1:
            _refuse_subclasses("buffer", model.named_buffers())
        _place.announce(world)
        _ending.follow(world)
        self._world: _C.World | None = world
        self._model = model
        settings = _with_rows(model, _of_layer_list(model, to_config(config), world), world)
        announce = log_level in ("debug", "info")
        _require_ep_size(model, settings, world)
        _parallelize(model, settings, world, announce)
        self._moe_layers, self._experts = _moe_layers(model, settings, world)
        images = _split_images(model, settings, world, announce)
        pipelined = _pipelined(model, settings, world, announce)
        if units is not None:
            found = _units.with_tiles(model, _units.named_units(model, units))
        else:
            found = _units.find_units(model) if pipelined is None else dict(pipelined.units)
        params = _built(model, params)
        hypers, group_of = _groups(model, params, settings.optimizer_type)
        later = _later(model, trainable_later)
        initial = _deferred.initial_of(model)
        for parameter in model.parameters():
            _make_hook_dict(parameter)
        watched = _watch.held(model)
        buffers = _watch.buffers(model)
        modules = list(dict.fromkeys(found.values()))  # one a unit, in the order in which C++ numbers them
        try:
            self._core: _C.Engine = _C.Engine(
                units=_units.described(model, found),
                units_hint=_units.suggestion(model, found),
                parameters=[(_names.plain(name), one) for name, one in _boxes.own_parameters(model)],
                buffers=buffers,
                groups=hypers,
                group_of=_names.plain_keys(group_of),
                config=settings,
                world=world,
                log_level=log_level,
                progress_every_s=progress_every_s,
                json_log=json_log,
                hooks=_names.plain_keys(_hook_dicts(model)),
                trainable_later=set(map(_names.plain, later)),
                initial=None if initial is None else initial.values,
                boxes=_names.plain_keys(_boxes.of_model(model)),
            )
        except BaseException:
            if initial is not None:
                initial.undo()
            raise
        self._core.set_buffers(buffers)
        self._rank, self._world_size, self._config = self._core.rank, self._core.world_size, self._core.config
        self._device = self._core.device
        _printing.install()
        if self._core.gathers_parameters:
            _doors.guard()
        self._steps = 0
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None
        self._stepping: _schedule.Stepping | None = None
        """of the scheduler that initialize() was given"""
        self._batch_fn: Callable[[Any], Any] | None = None
        self._data: Iterator[Any] | None = None
        """of train_batch() and eval_batch() without an iterator"""
        self._group_members = _members(model, group_of, len(hypers), later)
        self._parameters = list(model.parameters())
        _owned.update(map(id, self._parameters))
        self._require_same = _watch.follow(model)
        self._planned: _activation_choice.PlannedUnits | None = None
        self._handles: list[RemovableHandle] = []
        self._activations = _activations.of_engine(self._core, model)
        self._planned = _activation_choice.planned_units(self._core, world, found, self._activations)
        self._updates_inside = self._core.config.updates_inside_backward
        self._pipeline = None
        if pipelined is not None:
            from zeroth.pipe.runner import Runner  # it needs what this module needs

            self._pipeline = Runner(self._core, pipelined, self._activations)
            self._handles.append(model.register_forward_pre_hook(_refuse_forward(self._pipeline), prepend=True))
        for index, module in enumerate([model, *modules]):
            if index == 0 and pipelined is not None:
                continue  # the pipeline runs the root unit's forwards, a chunk at a time
            hooks = _C.UnitHooks(self._core, index)
            before = (
                hooks.before
                if index > 0
                else functools.partial(hooks.before_root, watched, _look_again(self._require_same, self._core))
            )
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(hooks.after, always_call=True))
        if self._config.input_dtype is not None and pipelined is None:
            cast = functools.partial(_cast_inputs, self._config.input_dtype)
            self._handles.append(model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True))
        if self._activations is not None and pipelined is None and self._planned is None:
            self._handles += self._activations.attach(model)
        if pipelined is None:
            self._handles += _packed.keep_apart(model)
        split = _boxes.split_of(model)
        if split is not None and split.verification is not None:
            split.verification.follow(announce)
        if announce and split is not None and world.rank == 0:
            from zeroth.parallel.experts import announce_checks  # it needs what this module needs

            announce_checks(model)
        if images is not None:  # an evaluation, so before anything of this forward
            check = images.check_first
            self._handles.append(images.model.register_forward_pre_hook(check, prepend=True, with_kwargs=True))
        if self._core.gathers_parameters:
            inside = [
                (path, module)
                for path, module in model.named_modules()
                if not isinstance(module, torch.jit.ScriptModule)
            ]
            self._handles += [_refuse_state_dict(path, module) for path, module in inside]

    # --- training ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward and returns its result. Blocks for other ranks where a unit must be gathered
        (stage 3), and in training mode where buffers are shared. Inputs must be on `device`. Raises Error, and whatever
        the module raises."""
        try:
            return self._model(*args, **kwargs)
        except BaseException as error:  # torch's hooks see an Exception, but no KeyboardInterrupt
            self._core.drop_forwards()
            if self._activations is not None:
                self._activations.leave()
            if (known := _guards.error_of(error)) is not None:
                raise known from error
            raise

    def backward(self, loss: torch.Tensor, *, gradient: torch.Tensor | None = None, retain_graph: bool = False) -> None:
        """Calls loss.backward(gradient, retain_graph), with the same result. `loss`: a tensor with a graph, a scalar
        unless `gradient` is given. `retain_graph`: the graph serves another backward. With fp16 it begins with the loss
        scale, so that a loss in float32 from float16 outputs keeps small gradients; those of leaves outside of engines
        have none. May block for other ranks. Raises Error MODEL if `loss` does not require a
        gradient."""
        if self._pipeline is not None:
            raise _of_pipeline("backward()")
        if self._updates_inside:  # the update takes what the groups have now
            self._push()
        seen, first = self._core.open_backward(loss, gradient)
        try:
            with contextlib.nullcontext() if self._planned is None else self._planned.backward():
                loss.backward(first, retain_graph)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self._core.fail_backward()
            if (known := _guards.error_of(error)) is not None:
                raise known from error
            raise
        self._core.close_backward(seen)

    def part_of_loss(self, term: torch.Tensor, *, count: int | None = None) -> torch.Tensor:
        """A term of the loss that the program computes by itself, on any mesh::

            engine.backward(engine(**batch).loss + engine.part_of_loss(penalty))

        Gradients are summed over the ranks that share samples (sp, rows), and those of some parameters over the ranks
        that share matrices (tp). What is returned has the value of the whole term, and this rank's part of the
        gradient.

        Without `count`: a term of weights alone, inside gathered(), which every rank computes whole: a penalty. Over tp
        each rank has its part of a matrix, so a sum over elements has the right gradient, and the value is that of this
        rank's parts. No call of other ranks. With `count`: a mean over elements of which each rank of sp has some, such
        as hidden states: `term` is the sum over this rank's elements, `count` their number. Collective over sp.

        Raises Error USAGE for a term without `count` of what the model's forward gave, where ranks share sequences."""
        if count is None:
            return self._core.part_of_loss(term)
        mesh = self.mesh
        if (mesh is None or mesh.size("sp") == 1) and count >= 0:
            return term / max(count, 1)
        if mesh is None:
            raise _C.make_error(
                "USAGE", "a mean over fewer than no elements", where="python.engine", which="count", got=str(count)
            )
        return _C.part_of_loss(term, mesh.axis("sp"), count)

    @property
    def mesh(self) -> _C.Mesh | None:
        """The ranks by axis, where the configuration has others than dp, or the model was split before."""
        split = _boxes.split_of(self._model)
        return None if split is None else split.mesh

    def train_batch(self, data_iter: Iterable[Any] | None = None) -> tuple[_C.StepResult, float]:
        """One step of a pipeline (zeroth.mesh.pp): takes gradient_accumulation_steps micro-batches from `data_iter`, an
        iterator, runs this stage's part of the schedule, and updates. All stages of a pipeline are given the same
        micro-batches; batches differ over dp. None: what set_dataiterator() gave; without one it will do on stages in
        the middle of a list of layers. Returns the result of the step and the mean loss, on all ranks.

        Without a pipeline it is a loop of forward, backward and step() over the micro-batches; the model returns its
        loss. Collective and blocking. Raises Error, and whatever the model raises: MISMATCH if there are too few
        micro-batches, or stages run different schedules; MODEL if the last chunk gives no loss. After an error in an
        action of a pipeline every further step is refused with USAGE."""
        micro_steps = self._config.micro_steps(self._world_size)
        data_iter = self._data if data_iter is None else data_iter
        if self._pipeline is not None:
            self._push()
            if self._stepping is not None:
                self._stepping.require_untouched()
            result, loss = self._pipeline.train_batch(self._of_user(data_iter))
            return self._stepped(result), loss
        total = 0.0
        for batch in self._taken(data_iter, micro_steps):
            own = _loss_of(self._called(batch))
            self.backward(own)
            total += own.item()
            result = self.step()
        return result, self.average(total / micro_steps)

    @overload
    def eval_batch(
        self,
        data_iter: Iterable[Any] | None = None,
        return_logits: Literal[False] = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        *,
        micro_batches: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> float: ...
    @overload
    def eval_batch(
        self,
        data_iter: Iterable[Any] | None,
        return_logits: Literal[True],
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        *,
        micro_batches: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> tuple[float, list[Any] | None]: ...
    def eval_batch(
        self,
        data_iter: Iterable[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
        *,
        micro_batches: int | None = None,
        weights: Sequence[float] | None = None,
    ) -> float | tuple[float, list[Any] | None]:
        """The mean loss over `micro_batches` micro-batches, default as many as train_batch() takes, without gradients
        and in eval(), on all ranks; afterwards each module trains, or does not, as before. `weights`: of this rank's
        micro-batches, from 0, the same on all stages of a pipeline, for a mean over samples where micro-batches differ
        in size. Collective and blocking. Errors as there; USAGE for weights that do not fit, or are 0 on all ranks.

        The arguments in between are DeepSpeed's. `return_logits`: a pair of the mean and the list of what the model
        returned for each micro-batch, on the last stage; None on the others. `num_micro_batches`: another name of
        `micro_batches`. `bcast_loss` changes nothing. Raises Error USAGE for others than `compute_loss` True and
        `reduce_output` "avg"."""
        _require_mean(compute_loss, reduce_output)
        micro_batches = num_micro_batches if micro_batches is None else micro_batches
        data_iter = self._data if data_iter is None else data_iter
        count = self._config.micro_steps(self._world_size) if micro_batches is None else micro_batches
        _require_weights(weights, count)
        outputs: list[Any] | None = [] if return_logits else None
        if self._pipeline is not None:
            with self._evaluating():
                total = self._pipeline.eval_batch(self._of_user(data_iter), count, weights, outputs) * count
        else:
            with self._evaluating():
                losses = [_loss_of(self._called(batch, kept=outputs)).item() for batch in self._taken(data_iter, count)]
            total = self.average(
                sum(loss * weight for loss, weight in zip(losses, weights or [1.0] * count, strict=True))
            )
        mean_weight = float(count) if weights is None else self.average(float(sum(weights)))
        if mean_weight == 0.0:
            raise _C.make_error("USAGE", "all micro-batches of an evaluation have weight 0", where="python.engine")
        mean = total / mean_weight
        return (mean, outputs if self.is_last_stage() else None) if return_logits else mean

    def outputs(self, batch: Any) -> Any:
        """What the whole model returns for one micro-batch, without gradients and in eval(), on all ranks of a
        pipeline: logits, for example. A loss_fn is not called, and labels for it may be left out. Through a pipeline
        the outputs are tensors, plain values, and tuples, lists and dicts of them: output["logits"] of a model of
        transformers. Ranks with batches of their own get their own outputs. Collective over all ranks, blocks. Wire:
        the outputs once to each stage. Raises Error MODEL on all ranks for outputs that cannot be sent, and whatever
        the model raises."""
        with self._evaluating():
            if self._pipeline is not None:
                return self._pipeline.outputs(self._made(batch))
            return self._called(self._made(batch), loss=False)

    def pipeline_step(self, data_iter: Iterable[Any] | None) -> "contextlib.AbstractContextManager[PipelineStep]":
        """A step like train_batch(), whose actions the caller runs, with code of its own between them::

            with engine.pipeline_step(batches) as step:
                for action in step.actions:  # "0F0", "0SEND_F0", ...
                    step.run(action)
            result, loss = step.result

        Collective and blocking. Raises Error as there, and USAGE for an action that is not the next one and for a step
        that ends before its last action. A step that was left by an error cannot be continued: the pipeline refuses
        further ones."""
        if self._pipeline is None:
            raise _C.make_error(
                "USAGE",
                "a model of one stage has no schedule",
                where="python.engine",
                which="pipeline_step()",
                expected="zeroth.mesh.pp of 2 or more",
                hint="engine(batch), engine.backward(loss) and engine.step() are its actions",
            )
        self._push()
        if self._stepping is not None:
            self._stepping.require_untouched()
        return self._pipeline.step(self._of_user(data_iter), self._stepped)

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """`fn` makes micro-batches of what train_batch(), eval_batch(), outputs() and pipeline_step() are given; None
        takes them as they are."""
        self._batch_fn = fn

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """What train_batch() and eval_batch() take micro-batches from if they are given no iterator."""
        self._data = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """set_dataiterator() of its first pass."""
        self.set_dataiterator(iter(loader))

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers of the pipeline; True without one."""
        return self._pipeline is None or self._pipeline.done.stage_of_chunk[0] == self._pipeline.done.stage

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers of the pipeline, and computes the loss; True without one."""
        return self._pipeline is None or self._pipeline.done.stage_of_chunk[-1] == self._pipeline.done.stage

    def _evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model is in eval(), with the modules of its loss_fn, and there are no gradients."""
        chain = None if self._pipeline is None else self._pipeline.done.chain
        loss_fn = getattr(self._model if chain is None else chain, "loss_fn", None)
        return evaluating(self._model, *([loss_fn] if isinstance(loss_fn, nn.Module) else []))

    def _called(self, batch: Any, *, loss: bool = True, kept: list[Any] | None = None) -> Any:
        """What the model makes of a micro-batch, by itself or with its loss_fn. `kept` gets what it makes by itself."""
        from zeroth.pipe.batches import parts_of  # it needs what this module needs
        from zeroth.pipe.layer_list import LayerList

        if isinstance(self._model, LayerList):
            inputs, labels = parts_of(batch)
            output = self(inputs)
            loss_fn = getattr(self._model, "loss_fn", None) if loss else None
            result = output if loss_fn is None else loss_fn(output, labels)
        elif isinstance(batch, dict):
            output = result = self(**batch)
        else:
            output = result = self(*batch) if isinstance(batch, tuple) else self(batch)
        if kept is not None:
            kept.append(output)
        return result

    def _made(self, batch: Any) -> Any:
        return batch if self._batch_fn is None else self._batch_fn(batch)

    def _of_user(self, data_iter: Iterable[Any] | None) -> Iterable[Any] | None:
        return None if data_iter is None else map(self._made, data_iter)

    def _taken(self, data_iter: Iterable[Any] | None, count: int) -> list[Any]:
        from zeroth.pipe.batches import take  # it needs what this module needs

        batches = self._of_user(data_iter) or ()
        return take(batches, count, where="python.engine", who=f"rank {self._rank}/{self._world_size}")

    def _push(self) -> None:
        if self._optimizer is not None:
            self._optimizer.push()

    @property
    def ends_step(self) -> bool:
        """The next step() updates: it is that of the last micro-step, or with zeroth.gradient_code other ranks have run
        what the step needs, and this one may leave out the rest. Local, and never blocks."""
        return self._core.ends_step

    @property
    def chunks(self) -> list[int]:
        """With zeroth.gradient_code: the numbers, from 0 to the number of ranks, of the micro-batches that this rank
        computes in a step, in this order. Each is also another rank's. Empty without."""
        return self._core.chunks

    @property
    def pipeline(self) -> Any:
        """What zeroth.pipeline() did to the model; None without a pipeline."""
        return None if self._pipeline is None else self._pipeline.done

    def step(self) -> _C.StepResult:
        """Ends a micro-step. On the last one it reduces the gradients and updates the parameters on all ranks.

        Collective and blocking on the last micro-step. On an earlier one it returns at once with
        `result.boundary == False`. A skipped step (a non-finite gradient, a failed backward) has
        `result.committed == False` and the cause in `result.reason`.
        Raises Error: USAGE without a backward since the last step(); NONFINITE after max_nonfinite_steps skipped steps
        in a row; MISMATCH for different hyper-parameters; and errors of the transport."""
        if self._optimizer is None:
            return self._step()
        # Through it, so that torch's schedulers see a step.
        return self._optimizer.step()  # type: ignore[no-any-return]

    def _step(self) -> _C.StepResult:
        if self._pipeline is not None:
            raise _of_pipeline("step()")
        _ending.stay_on_top()
        self._push()
        if self._stepping is not None:
            self._stepping.require_untouched()
        self._note_experts()
        return self._stepped(self._core.step())

    def _note_experts(self) -> None:
        if self._rank == 0 and (worst := self._experts.least_even()) is not None:
            self._core.note_experts(*worst)

    def end_accumulation(self) -> _C.StepResult:
        """Updates now with the micro-steps that there were since the last update, for example at the end of an epoch
        whose batches are no multiple of `gradient_accumulation_steps`. The gradient is the mean over them.

        A backward that no step() has taken counts as a micro-step of its own. Without any the call changes nothing and
        returns a result with `boundary == False`: so it may end every epoch. Collective and blocking.
        Raises Error: what step() raises; MISMATCH on all ranks if ranks are in different micro-steps."""
        if self._pipeline is not None:
            raise _of_pipeline("end_accumulation()")
        self._push()
        self._note_experts()
        return self._stepped(self._core.end_accumulation())

    def _stepped(self, result: _C.StepResult) -> _C.StepResult:
        if result.boundary:
            self._steps = result.step
            for layer in self._moe_layers:
                layer.begin_step()
            self._experts.begin_step()
            torch.clear_autocast_cache()  # it holds casts of the old values
        if result.committed and self._stepping is not None:
            self._stepping.step()
        if result.boundary and self._optimizer is not None:
            self._optimizer.follow_schedule()
        if self._planned is not None:
            self._planned.end_micro_step(result.boundary)
        return result

    def batches(
        self, loader: Iterable[_Batch], *, on_joined_step: Callable[[_C.StepResult], object] | None = None
    ) -> Iterator[_Batch]:
        """Iterates over `loader`; ranks may have different numbers of batches. Collective and blocking, once per batch.
        For training and for evaluation.

        The key zeroth.uneven decides what happens when some ranks have no batch and others have:
        "error": raises Error MISMATCH on all ranks, which names the ranks without a batch.
        "drop": the loops of all ranks end.
        "join": a rank without a batch stays in its loop and takes part in the other ranks' calls with weight zero. Its
        loop ends when no rank has a batch. The gradient of a step is the mean over the existing micro-batches
        (`result.batches`); average() is the mean over the ranks with a batch.

        All ranks with a batch must make the same calls in the loop: forward, backward, step(), end_accumulation(),
        zero_grad(), average().
        `on_joined_step(result)` is called on a rank without a batch after each of its step() calls. It is the place for
        code that every rank runs once a step, such as `scheduler.step()`. A joined rank follows one engine: a loop that
        steps several engines must use "drop"."""
        self._core.begin_epoch()
        batches = iter(loader)
        while True:
            batch = next(batches, _END)
            ahead = self._core.begin_batch(batch is not _END)
            while ahead == "step":
                result = self.step()
                if on_joined_step is not None:
                    on_joined_step(result)
                ahead = self._core.join()
            if ahead == "end":
                return
            yield batch  # type: ignore[misc]

    @contextlib.contextmanager
    def gathered(
        self, *what: nn.Parameter | nn.Module, modify_on: int | Literal["all"] | None = None
    ) -> Iterator[None]:
        """Gathers parameters for code outside of their units' forwards, as a context manager. `what`: parameters, and
        modules for all of theirs. For a loss that is fused with the head's product, a penalty on weights, a look at
        values::

            with engine.gathered(model.lm_head):
                loss = fused_loss(hidden, model.lm_head.weight, labels)

        Gradients flow through what is computed inside; the backward gathers the parameters again. It gathers whole
        units. At stages 0 to 2 parameters are whole anyway. Blocks for other ranks at stage 3; where gathers are
        collective (docs/transports.md), all ranks must make the call.

        `modify_on`: who may write to `what` inside, in place and under torch.no_grad(). None: nobody; a write is an
        error. A rank: what it wrote is the value on all ranks at the end. "all": every rank writes the same values.
        Masters get the values too; an element that does not change keeps its master to the bit, and other states stay.
        An exception inside undoes what was written. Then it is collective and blocking, between steps, and needs memory
        for the parameters once more.
        Raises Error: USAGE for what is not the engine's, and with `modify_on` in the middle of a step; MODEL if a
        parameter was written to that must not be; MISMATCH, with its name and nothing changed, if ranks wrote different
        values under "all"."""
        parameters: list[nn.Parameter] = []
        for one in what:
            parameters += one.parameters() if isinstance(one, nn.Module) else [one]
        scope = self._core.gathered(parameters, _WRITERS.get(modify_on, modify_on))  # type: ignore[arg-type]
        try:
            yield
        except BaseException:
            del scope  # without finish(), which could raise
            raise
        scope.finish()
        if modify_on is not None:
            torch.clear_autocast_cache()

    def zero_grad(self) -> None:
        """Drops all gradients since the last update, for example those of a dropped batch or of another loss. In the
        middle of an accumulation these are the gradients of all of its micro-steps: it begins anew.

        Collective and blocking if there was a backward since the last update; otherwise it does nothing. Not needed
        after an update. Raises Error: USAGE on all ranks, with nothing changed, if it drops a second accumulation after
        a step() without an update in between: such a loop never trains; MISMATCH on all ranks if some ranks call step()
        instead."""
        self._core.zero_grad()

    def _zero_grad_between_steps(self) -> None:
        """Of the optimizer object: loops call it beside each step(), also where that ends no accumulation yet."""
        if self._core.has_gradients:
            self._core.zero_grad()

    def flush_update(self) -> None:
        """Updates now with the gradients of the last step, where the key zeroth.update.delayed_after lets them wait for
        the next one: at the end of a training, before its weights are used. Does nothing if none wait.

        Collective and blocking; between steps. Raises Error USAGE in the middle of a step."""
        self._core.flush_update()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer object for torch.optim.lr_scheduler. Every step() takes the hyper-parameters from its
        `param_groups`: lr, weight_decay, and betas and eps, or momentum, dampening and nesterov. If the configuration
        has a scheduler, "lr" must not be changed. Owned by the engine. Raises Error USAGE if no parameter trains."""
        if not self._core.trains:
            raise _C.make_error(
                "USAGE",
                "an engine whose model has no trainable parameter has no optimizer",
                where="python.engine",
                hint="it gathers and evaluates; set requires_grad before the engine is built, or name parameters in "
                "params=[...]",
            )
        if self._optimizer is None:
            hypers = self._core.groups
            groups = [
                (number, {"params": members, **hypers[number]}) for number, members in self._group_members.items()
            ]
            self._optimizer = Optimizer(
                self._core,
                groups,
                kind=self._config.optimizer_type,
                defaults=hypers[0],
                step=self._step,
                zero_grad=self._zero_grad_between_steps,
            )
        return self._optimizer

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the next update, one per parameter group. Local."""
        self._push()
        rates = self._core.learning_rates
        return [rates[number] for number in self._group_members]

    def train(self, mode: bool = True) -> "Engine":
        """Calls the module's train(mode) and returns the engine."""
        self._model.train(mode)
        return self

    def eval(self) -> "Engine":
        """Calls the module's eval() and returns the engine."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return self._model.training

    # --- what there is ----------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self._model

    @property
    def config(self) -> _C.Config:
        """The configuration, defaults included."""
        return self._config

    @property
    def device(self) -> torch.device:
        """The device of the module's parameters when the engine was built. The module computes there and takes inputs
        there. On any device the engine keeps parameters, gradients and optimizer state in host memory."""
        return self._device

    @property
    def rank(self) -> int:
        """This rank's number in the job, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the job."""
        return self._world_size

    @property
    def loss_scale(self) -> float:
        """By which fp16 multiplies the gradients of the next step; 1.0 without fp16. StepResult.loss_scale is that of a
        step."""
        return _elsewhere.Value(self._core.loss_scale, "engine.loss_scale")

    @property
    def steps(self) -> int:
        """Number of committed updates so far."""
        return self._steps

    def moe_report(self, everywhere: bool = False) -> list[_expert_use.ExpertUse]:
        """Of each layer of experts that ranks along ep share, and of each zeroth.nn.MoE: which experts this rank's
        tokens chose in the last forward, how many rows came to this rank's experts, and what was dropped. Local.

        `everywhere`: of each layer of experts of the model, also of those that no ranks share: the sums over all
        micro-batches of the step and all ranks with other tokens. After step() it is the step that ended, later the one
        that runs. Forwards in eval() are not counted. Collective, of all ranks: one sum an axis of the mesh with other
        tokens, of 16 (experts + 1) bytes a layer."""
        return self._experts.everywhere() if everywhere else self._experts.last_forward()

    def memory_report(self) -> _C.MemoryReport:
        """Memory of this rank in bytes, by state: planned, and measured at the peak. Local; reads smaps, so it is
        slow."""
        return self._core.memory_report()

    def transfer_report(self) -> _C.TransferReport:
        """Bytes that moved between memory and files (zero_optimization.offload_optimizer and offload_param,
        zeroth.activations), by set of states: in the last step and in all, beside the formula, and how much of the time
        the training waited. Local."""
        return self._core.transfer_report()

    def trace_transfers(self, on: bool = True) -> None:
        """From now on the engine keeps what this rank does and what moves between memory and files, the latest 65,536
        pieces of each; False: no more. What was kept is dropped. Local."""
        self._core.trace_transfers(on)

    def transfer_trace(self) -> str:
        """What trace_transfers() has kept, as JSON for chrome://tracing or ui.perfetto.dev. Local."""
        return self._core.transfer_trace()

    def activation_report(self) -> dict[str, int]:
        """What moved of the tensors that the model's forwards saved, see ActivationOffload.report(); empty without the
        section zeroth.activations. Local."""
        return {} if self._activations is None else self._activations.report()

    def wire_report(self) -> dict[str, int]:
        """Bytes that this rank received from other ranks since reset_counters(): `all_gather`, `reduce_scatter`,
        `between_nodes` (the part from other nodes) and `control`. `planned_all_gather` and `planned_reduce_scatter`
        are the formula of one step. `between_sites`: by local updates, beside the others. Local."""
        return self._core.wire_report()

    def reset_counters(self) -> None:
        """Resets the peaks of memory and the counters of traffic, to measure a phase by itself. Local."""
        self._core.reset_counters()
        if self._activations is not None:
            self._activations.reset_counters()

    def average(self, value: float, name: str = "") -> float:
        """Returns the mean of `value` (a float64) over the ranks. Collective and blocking. Raises Error MISMATCH if
        ranks give different names. Without names, two averages in a different order on one rank give wrong numbers on
        all ranks and no error."""
        return self._core.average(value, name)

    def barrier(self, name: str = "") -> None:
        """Blocks until all ranks are in this barrier. Collective. The name is in errors and in the flight recorder.
        Raises Error MISMATCH on all ranks, with both names, if ranks give different names."""
        self._core.barrier(name)

    # --- states -----------------------------------------------------------------------------------------------------

    def full(self, name: str, kind: str = "param", *, ranks: _access.Ranks = None) -> torch.Tensor | None:
        """The whole tensor of a state, a copy on the CPU. Collective and blocking: all ranks call it.

        `name`: of the module's state_dict(), also of a tied weight. `kind`: "param"; "master", the value that the
        update changes (float32 of a bfloat16 parameter, else the parameter); "grad", between backward and step(): the
        mean over ranks and micro-steps, before clipping, with the bits that the update takes; a state of the optimizer
        ("exp_avg", "exp_avg_sq", "momentum_buffer"); or the name of an Average. `ranks`: which ranks want it: one,
        several, or None for all. The others get None, and need no memory for it. For a buffer: this rank's values.
        Returns None for a gradient that no rank has.
        Raises Error on all ranks: USAGE for unknown names and kinds, and for gradients before the last micro-step's
        backward; MISMATCH if ranks ask for other things. Wire: the tensor once to each reader."""
        return _access.full(self._core, self._model, name, kind, ranks)

    def local(self, kind: str = "param") -> dict[str, _access.Local]:
        """This rank's own part of a state, by parameter name, and where it lies in the whole tensor: copies. Without
        communication. Gradients only after a full(..., "grad") of this step, which sums them. Raises Error USAGE."""
        return _access.local(self._core, kind)

    def state_dict_items(self, kind: str = "param", *, ranks: _access.Ranks = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) for all parameters that have the state, one unit in memory at a time, then, for "param"
        and "master", the persistent buffers. Tied weights come under each of their names. Yields nothing on ranks that
        are not among `ranks`, but all ranks must iterate to the end: each unit is a call of all ranks. Raises as
        full()."""
        yield from _access.items(self._core, self._model, kind, ranks)

    def state_dict(self, kind: str = "param", *, ranks: _access.Ranks = 0) -> dict[str, torch.Tensor]:
        """All tensors of the module's state_dict(), in its order, as copies on the CPU, at every stage. On `ranks`
        (one, several, or None for all); an empty dictionary on the others. Peak memory: the result and one unit. `kind`
        as in full(); one weight under several names is one tensor. Collective and blocking. Raises as full()."""
        found = dict(self.state_dict_items(kind, ranks=ranks))
        return {name: found[name] for name in _access.names_of(self._model) if name in found}

    def load_state_dict(self, values: _access.Weights | None = None, *, strict: bool = True) -> _access.WeightReport:
        """Replaces weights and persistent buffers on all ranks, at every stage, by rank 0's `values`: a mapping, or
        pairs of name and tensor. On other ranks `values` may be None and is not looked at. Masters get float32 values
        as they are. Other states stay. `strict`: names that are missing or too many are an error; the report lists them
        otherwise. Collective and blocking, between steps. Raises Error on all ranks, with nothing changed: MODEL for
        another model, shape or dtype; USAGE."""
        report = _access.load(self._core, values, strict)
        torch.clear_autocast_cache()
        return report

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @overload
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str = "",
        client_state: Any = None,
        keep_last: int = 0,
        keep_every: int = 0,
        frozen: Literal["copy", "once"] = "copy",
        overwrite: bool = False,
        async_: Literal[False] = False,
    ) -> str: ...
    @overload
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str = "",
        client_state: Any = None,
        keep_last: int = 0,
        keep_every: int = 0,
        frozen: Literal["copy", "once"] = "copy",
        overwrite: bool = False,
        async_: Literal[True],
    ) -> _C.SaveHandle: ...
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str = "",
        client_state: Any = None,
        keep_last: int = 0,
        keep_every: int = 0,
        frozen: Literal["copy", "once"] = "copy",
        overwrite: bool = False,
        async_: bool = False,
    ) -> str | _C.SaveHandle:
        """Writes a checkpoint of this step into `folder` and returns its path. Collective and blocking; after step(),
        also that of a micro-step.

        It holds all states of the engine (weights, masters, optimizer states, update counts, hyper-parameters), the
        module's persistent buffers and the scheduler of zeroth.initialize() as rank 0 has them, the random generators
        of every rank (torch, random, NumPy), after micro-steps the sums of their gradients, and `client_state` of rank
        0: None, numbers, strings, bytes, scalars of NumPy, and lists, tuples, sets, dictionaries, Counter, OrderedDict,
        defaultdict and deque of these, which come back with their types. Names of a compiled model are those of the
        model that was compiled. When it returns, the checkpoint is on the disk. A save that is interrupted leaves the
        earlier ones as they were.

        `name`: a folder inside of `folder`, for each of several engines of a program; load() takes the same.
        `keep_last`: removes all but so many of the folder's checkpoints, those that were committed last, 0 none;
        `keep_every`: but not those of steps that are multiples of it. `frozen`: "once" writes parameters that never
        train into the folder's first checkpoint alone, and later ones refer to it, so that those of an adapter (LoRA)
        are small; retention keeps what is referred to. `overwrite`: a checkpoint of this step that has another state is
        replaced; at every moment one of them is there. One that has the same state needs no `overwrite`.
        Raises Error on all ranks: IO; USAGE between a backward and its step(), for another state of a step that was
        saved there before, for a folder in which another open engine of this program saves, or for a `client_state`
        that cannot be kept, with its place.

        `async_`: if True, it waits only for a copy of this rank's part in memory of the host, and for an earlier such
        save, and returns a SaveHandle; the rest follows behind the training. What fails then is raised on all ranks,
        once, by a later step(), save() or load(), or by the handle's wait(); that call has changed nothing and can be
        made again. close() and the end of the program finish the save."""
        place = _folders.place_of(self, folder, name)
        self._push()
        user = _json_values.user_text(
            {
                "client": client_state,
                "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            }
        )
        of_rank = json.dumps(_state.random_state())
        if not async_:
            return self._core.save(place, user, of_rank, keep_last, keep_every, frozen, overwrite)
        handle = self._core.save_async(place, user, of_rank, keep_last, keep_every, frozen, overwrite)
        _ending.finish_at_exit(handle)
        return handle

    @overload
    def load(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        strict: bool = True,
        if_any: Literal[False] = False,
        hypers: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> _state.Loaded: ...
    @overload
    def load(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        strict: bool = True,
        if_any: Literal[True],
        hypers: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> _state.Loaded | None: ...
    def load(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        strict: bool = True,
        if_any: bool = False,
        hypers: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> _state.Loaded | None:
        """Brings everything that save() wrote. Collective and blocking; between steps. `path`: a checkpoint, or a
        folder with checkpoints, of which the whole one that was committed last is taken. `name`: that of save(). Any
        number of ranks and any ZeRO stage may have written it; random generators come back if as many ranks did, and
        one from between micro-steps goes on with as many ranks and the same accumulation.

        `strict`: if False, what the checkpoint lacks keeps its values, and what it has beyond the model is left out;
        Loaded lists both. It must have at least one parameter of the model. `if_any`: if True, a folder without any
        checkpoint is no error, and the result None. `hypers`: if False, learning rates and all other hyper-parameters
        stay as they are here, and the scheduler of zeroth.initialize() too; else those that change are logged. Those of
        another optimizer are never taken. `rename`: names in the checkpoint, each with the one of the model's parameter
        or buffer, as load_pretrained() has it; the other way round is taken where all of its first names are the
        model's, and not all of the second.
        Raises Error on all ranks, with nothing changed: CHECKPOINT for one that is torn, corrupt, of another model or
        optimizer, or of other parameter groups; IO; USAGE."""
        if not hypers:
            self._push()
        place = _folders.inside(folder=path, name=name)
        found = self._core.load(place, strict, if_any, hypers, dict(rename or {}))
        if not found["path"]:
            return None
        self._steps = found["step"]
        torch.clear_autocast_cache()
        if self._optimizer is not None:
            self._optimizer.pull()
        user = _json_values.from_json(found["user"], found["path"]) if found["user"] else {}
        if hypers and self._scheduler is not None and user.get("scheduler") is not None:
            self._scheduler.load_state_dict(user["scheduler"])
            if self._stepping is not None:
                self._stepping.look()
        if found["user_of_rank"]:
            _state.load_random_state(json.loads(found["user_of_rank"]))
        return _state.Loaded(
            path=found["path"],
            step=found["step"],
            micro_step=found["micro_step"],
            world_size=found["world"],
            client_state=user.get("client"),
            random_state=bool(found["user_of_rank"]),
            missing=found["missing"],
            unexpected=found["unexpected"],
            skipped=found["skipped"],
        )

    # --- the end ----------------------------------------------------------------------------------------------------

    def export_safetensors(self, path: str) -> None:
        """Writes all weights and persistent buffers to one safetensors file. Collective and blocking; rank 0 writes.
        `path` is afterwards either the old file or the whole new one. Raises Error IO on all ranks."""
        self._core.export_safetensors(path)

    def close(self, *, keep_parameters: bool = True) -> None:
        """Closes the engine. With `keep_parameters` the module gets ordinary memory with the current values and works
        without the engine; this is collective and blocking, and needs memory for the whole model on every rank.
        Otherwise, and if an engine is dropped without close(), the values are gone: reading a parameter is an error
        with its name. Raises Error MODEL, with the engine closed, if parameters of the module were replaced."""
        self._core.close(keep_parameters=keep_parameters)
        _folders.leave(self)
        if self._planned is not None:
            self._planned.detach()
        self._world = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._experts.forget(self._model)
        _owned.difference_update(map(id, self._parameters))
        gives_back = keep_parameters and bool(self._parameters)
        self._parameters.clear()
        if gives_back:
            self._require_same(
                self._model,
                "python.close",
                "the one that the engine was built with has the values: keep the module as it is until close()",
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _C.make_error(
            "USAGE",
            "an engine is not copied or pickled: its states are spread over the ranks",
            where="python.engine",
            hint="engine.save(folder) writes them all; engine.state_dict() gives the weights",
        )

    def __del__(self) -> None:
        if "_handles" in self.__dict__:
            self.close(keep_parameters=False)

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError that says where another library's name, or one of the module's, is found here."""
            raise AttributeError(_elsewhere.missing(name, self.__dict__.get("_model")))


def initialize(
    *,
    model: _given.Given,
    config: ConfigLike = None,
    model_parameters: ParamGroups | None = None,
    optimizer: None = None,
    training_data: None = None,
    lr_scheduler: Callable[[Optimizer], Any] | None = None,
    args: Any = None,
    world: _C.World | None = None,
    units: Iterable[nn.Module] | None = None,
    log_level: str = "info",
    json_log: str = "",
    **others: None,
) -> tuple[Engine, Optimizer | None, None, Any]:
    """Builds an engine and returns DeepSpeed's tuple: (engine, engine.optimizer, None, scheduler). Without a trainable
    parameter, as in a reference model, the optimizer is None. Collective and blocking, as Engine.

    `lr_scheduler`: a function that makes the scheduler from the optimizer; engine.step() steps it after each update,
    and refuses to go on after a step() by hand. Without it, and with a scheduler in the configuration, the fourth value
    is a ConfiguredSchedule: it reads that schedule. None without any.
    `config` may also come from `args.deepspeed_config`. `model_parameters`: the `params` of Engine. `world`, `units`,
    `log_level` and `json_log` are those of Engine. The configuration names the optimizer type.
    Raises Error USAGE for optimizer objects, data sets and the other arguments of DeepSpeed; TypeError for unknown
    arguments; and the errors of Engine."""
    for name, value in {"optimizer": optimizer, "training_data": training_data, **others}.items():
        if name not in _NOT_TAKEN:
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")
        if value is not None:
            raise _C.make_error("USAGE", f"{name} is not taken here", where="python.initialize", hint=_NOT_TAKEN[name])
    from_args = getattr(args, "deepspeed_config", None)
    if from_args is not None and config is not None:
        raise _C.make_error(
            "USAGE", "there are two configurations", where="python.initialize", which="config and args.deepspeed_config"
        )
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise _C.make_error(
            "USAGE",
            "lr_scheduler is not taken as an object",
            expected="a function that makes it: lambda optimizer: StepLR(optimizer, 10)",
            hint="an object is bound to another optimizer already",
        )
    engine = Engine(
        model,
        config if from_args is None else from_args,
        params=model_parameters,
        world=world,
        units=units,
        log_level=log_level,
        json_log=json_log,
    )
    scheduler: Any = None
    if lr_scheduler is not None:
        scheduler = engine._scheduler = lr_scheduler(engine.optimizer)
        engine._stepping = _schedule.Stepping(scheduler)
    elif engine._core.trains and engine._core.has_schedule:
        scheduler = _schedule.ConfiguredSchedule(engine._core, engine.optimizer)
    return engine, engine.optimizer if engine._core.trains else None, None, scheduler


def _require_weights(weights: Sequence[float] | None, count: int) -> None:
    if weights is not None and (len(weights) != count or not all(0 <= weight < math.inf for weight in weights)):
        raise _C.make_error(
            "USAGE",
            "weights do not fit the micro-batches of an evaluation",
            where="python.engine",
            which="weights",
            expected=f"{count} finite numbers from 0",
            got=str(list(weights)),
        )


def _require_mean(compute_loss: bool, reduce_output: str | None) -> None:
    """Of an evaluation."""
    for name, value, expected in (("compute_loss", compute_loss, True), ("reduce_output", reduce_output, "avg")):
        if value != expected:
            raise _C.make_error(
                "USAGE",
                "an evaluation gives the mean of losses",
                where="python.engine",
                which=name,
                expected=repr(expected),
                got=repr(value),
                hint="engine.outputs(batch) gives what the model returns",
            )


_WRITERS: dict[int | str | None, int] = {None: -2, "all": -1}
"""of Engine.gathered(), as the engine numbers them"""

_NOT_TAKEN = {
    "optimizer": "name it in the configuration, see docs/configuration.md",
    "training_data": "make a DataLoader, with a DistributedSampler over engine.world_size",
    "collate_fn": "make a DataLoader, with a DistributedSampler over engine.world_size",
    "config_params": "it is config=",
    "dist_init_required": "the world is the launcher's, or world=zeroth.World.from_group()",
    "distributed_port": "the world is the launcher's, or world=zeroth.World.from_group()",
    "mpu": "there is data parallelism only, over world=",
    "mesh_param": "there is data parallelism only, over world=",
}
"""further arguments of DeepSpeed's initialize(), and their place in Zeroth"""


def _of_layer_list(model: nn.Module, config: _C.Config, world: _C.World) -> _C.Config:
    """The configuration with the stages that the model asks for. Without stages all layers of a list are built."""
    from zeroth.pipe.layer_list import LayerList  # it needs what this module needs
    from zeroth.pipe.module_stages import set_interval, with_stages

    config = with_stages(model, config)
    set_interval(model, config)
    if isinstance(model, LayerList) and config.mesh(world.size).get("pp", 1) == 1:
        model.build(0, len(model))
    return config


def _built(model: nn.Module, params: ParamGroups | None) -> ParamGroups | None:
    """With the parameters that a list of layers has by now."""
    from zeroth.pipe.module_stages import built_parameters  # it needs what this module needs

    return None if params is None else built_parameters(model, params)


def _parallelize(model: nn.Module, config: _C.Config, world: _C.World, announce: bool) -> None:
    """Splits the model for the axes of the configuration's mesh, unless that has been done. `announce`: rank 0 prints
    how, with what stays whole and why."""
    axes = config.mesh(world.size)
    if "pp" in axes:
        return  # zeroth.pipeline() does it, after it has looked at the whole model
    if (axes["tp"] > 1 or axes["sp"] > 1 or axes.get("ep", 1) > 1) and not _boxes.is_split(model):
        from zeroth.parallel.parallelize import parallelize  # it needs what this module needs

        done = parallelize(model, config, world=world)
        if announce and world.rank == 0:
            print(done, file=sys.stderr, flush=True)


def _require_ep_size(model: nn.Module, config: _C.Config, world: _C.World) -> None:
    from zeroth.nn.moe import MoE  # it needs what this module needs

    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        return
    ranks = config.mesh(world.size).get("ep", 1)
    for name, layer in layers.items():
        if layer.ep_size is not None and layer.ep_size != ranks:
            raise _C.make_error(
                "USAGE",
                "a layer of experts names another number of ranks than the mesh",
                where="nn.moe",
                who=f"rank {world.rank}/{world.size}",
                which=f"{name or type(model).__name__}: MoE(ep_size)",
                expected=f"ep_size={ranks}, which is /zeroth/mesh/ep, or none",
                got=f"ep_size={layer.ep_size}",
                hint=f'leave ep_size out, or set {{"zeroth": {{"mesh": {{"ep": {layer.ep_size}}}}}}}',
            )


def _moe_layers(model: nn.Module, config: _C.Config, world: _C.World) -> tuple[list[Any], _expert_use.Layers]:
    """The layers with a router of this package, and all layers of experts. Their balance is from now on over all ranks
    that have other tokens."""
    from zeroth.nn.gated import GatedLayer  # it needs what this module needs

    layers = [module for module in model.modules() if isinstance(module, GatedLayer)]
    groups: tuple[_C.Communicator, ...] = ()
    if world.size > 1 and any(hasattr(module, "num_experts") for module in model.modules()):
        mesh = world.mesh(config.mesh(world.size), config)
        groups = _expert_use.groups_of(mesh)
        for layer in layers:
            layer.balance_over(mesh)
    return layers, _expert_use.Layers(model, groups)


def _with_rows(model: nn.Module, config: _C.Config, world: _C.World) -> _C.Config:
    from zeroth._images import with_rows  # it needs what this module needs

    return with_rows(model, config, world)


def _split_images(model: nn.Module, config: _C.Config, world: _C.World, announce: bool) -> Any:
    from zeroth._images import split_model  # it needs what this module needs

    return split_model(model, config, world, announce)


def _pipelined(model: nn.Module, config: _C.Config, world: _C.World, announce: bool) -> Any:
    """Cuts the model for the stages of the configuration's mesh, unless that has been done, and returns what was done;
    None for one stage."""
    if config.mesh(world.size).get("pp", 1) == 1:
        return None
    from zeroth.pipe.pipeline import pipeline, pipelined_of  # it needs what this module needs

    done = pipelined_of(model) or pipeline(model, config, world=world)
    if announce and world.rank == 0:
        print(done, file=sys.stderr, flush=True)
    return done


def _of_pipeline(what: str) -> _C.Error:
    return _C.make_error(
        "USAGE",
        f"{what} of a pipeline",
        where="python.engine",
        hint="engine.train_batch(batches) runs forwards, backwards and the step in the order of its schedule",
    )


def _refuse_forward(runner: Any) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Makes the hook that refuses a call of the whole model. A copy of the module has the same hook, and its owner is
    another one."""
    owner = weakref.ref(runner)

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        its = owner()
        if its is None or its.runs or its.done.model is not module:
            return
        raise _C.make_error(
            "USAGE",
            "a forward of the whole model, of which this rank has some layers",
            where="python.engine",
            which=type(module).__name__,
            hint="engine.train_batch(batches) and engine.eval_batch(batches) run a pipeline",
        )

    return hook


def _loss_of(result: Any) -> torch.Tensor:
    from zeroth.pipe.runner import loss_of

    loss = loss_of(result)
    if loss is None:
        raise _C.make_error(
            "MODEL",
            "the model gives no loss",
            where="python.engine",
            got=type(result).__name__,
            expected="a tensor, or an output with the attribute loss",
        )
    return loss


def _refuse_second(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if id(parameter) in _owned:
            raise _C.make_error(
                "USAGE",
                "the module is in an engine already",
                where="python.engine",
                which=name,
                hint="close() that engine first; after an error sys.last_traceback may hold one whose name was deleted",
            )


_WRAPPERS = {
    "DistributedDataParallel": "pass model.module: the engine sums gradients over the ranks",
    "DataParallel": "pass model.module: a rank computes on one device",
    "FullyShardedDataParallel": "pass the module as it is before FSDP wraps it: the engine does the sharding",
    "FSDPModule": "pass the module as it is before fully_shard(): the engine does the sharding",
    "DeepSpeedEngine": "pass model.module as it is before deepspeed.initialize()",
}
"""classes that do on their own what the engine does"""


def _refuse_wrapped(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for base in type(module).__mro__:
            if base.__name__ in _WRAPPERS and base.__module__.startswith(("torch.", "deepspeed.")):
                raise _C.make_error(
                    "MODEL",
                    "the module is wrapped for another kind of data parallelism",
                    where="python.engine",
                    which=path or "the model itself",
                    expected="the module inside",
                    got=base.__name__,
                    hint=_WRAPPERS[base.__name__],
                )


def _refuse_subclasses(kind: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuses tensor subclasses such as DTensor, which have no memory of their own."""
    for name, tensor in tensors:
        if is_traceable_wrapper_subclass(tensor) or is_traceable_wrapper_subclass(tensor.data):
            raise _C.make_error(
                "MODEL",
                f"a {kind} is a tensor subclass",
                where="python.engine",
                which=name,
                expected="an ordinary nn.Parameter" if kind == "parameter" else "an ordinary tensor",
                hint=f"it is a {type(tensor).__name__}: the engine does the sharding, give it the module before "
                "fully_shard(), distribute_module() or quantisation"
                if kind == "parameter"
                else f"it is a {type(tensor).__name__}: keep it as an ordinary attribute, which no rank shares",
            )


def _cast_inputs(
    dtype: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return _cast.inputs(dtype, (args, kwargs))  # type: ignore[no-any-return]


def _look_again(
    require_same: Callable[[nn.Module, str, str], None], core: _C.Engine
) -> Callable[[nn.Module], _watch.Watched]:
    """Makes the function that a forward calls after a change of the module. A function, not a method: a reference from
    the module to the engine would keep the engine alive as long as the module."""

    def look_again(module: nn.Module) -> _watch.Watched:
        require_same(
            module,
            "python.forward",
            "change the module before the engine is built, or close() the engine and build another one",
        )
        core.set_buffers(_watch.buffers(module))
        return _watch.held(module)

    return look_again


def _refuse_state_dict(path: str, module: nn.Module) -> RemovableHandle:
    """Makes state_dict() of a module with sharded parameters raise. A copy of the module has the same hooks, and its
    state_dict() works."""
    owner = weakref.ref(module)

    def hook(called: nn.Module, prefix: str, keep_vars: bool) -> None:
        if called is owner():
            raise _C.make_error(
                "USAGE",
                "a module with sharded parameters has no state_dict()",
                where="python.engine",
                which=f"{path} ({type(called).__name__})" if path else type(called).__name__,
                hint="engine.state_dict() has the whole weights on rank 0, and engine.export_safetensors(path) writes them",  # noqa: E501
            )

    return module.register_state_dict_pre_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


def _later(model: nn.Module, chosen: bool | nn.Parameter | nn.Module | Iterable[nn.Parameter | nn.Module]) -> list[str]:
    """Names of the parameters that `trainable_later` chooses. Raises Error USAGE for those of other modules."""
    named = list(model.named_parameters(remove_duplicate=False))
    if isinstance(chosen, bool):
        return [name for name, parameter in named if chosen and not parameter.requires_grad]
    known = {id(parameter) for _, parameter in named}
    wanted: set[int] = set()
    # One module, or one parameter, is that one: an iteration would go over its layers, or its rows.
    for position, one in enumerate([chosen] if isinstance(chosen, nn.Module | torch.Tensor) else chosen):
        if not isinstance(one, nn.Module | nn.Parameter):
            raise _C.make_error(
                "USAGE",
                "what may train later is neither a parameter nor a module",
                where="python.engine",
                which=f"trainable_later, the entry at {position}",
                expected="True, parameters, or modules for all of theirs",
                got=f"{one!r}" if isinstance(one, str) else type(one).__name__,
            )
        members = list(one.parameters()) if isinstance(one, nn.Module) else list(_boxes.parts_of(one))
        if any(id(parameter) not in known for parameter in members):
            raise _C.make_error(
                "USAGE",
                "a parameter that may train later is none of the module's",
                where="python.engine",
                which=f"trainable_later, the entry at {position}",
                got=type(one).__name__,
            )
        wanted.update(map(id, members))
    return [name for name, parameter in named if id(parameter) in wanted]


def _members(
    model: nn.Module, group_of: Mapping[str, int], groups: int, later: Sequence[str]
) -> dict[int, list[nn.Parameter]]:
    """Parameters of each group, by group number. Group 0 is the configuration's: without other groups it has all
    that train, now or `later`."""
    if groups == 0:
        named = model.named_parameters()
        return {0: [parameter for name, parameter in named if parameter.requires_grad or name in later]}
    members: dict[int, list[nn.Parameter]] = {number: [] for number in range(1, groups + 1)}
    for name, parameter in model.named_parameters():
        if name in group_of:
            members[group_of[name]].append(parameter)
    return members


def _refuse_another_world(world: _C.World) -> None:
    """Raises Error if torch.distributed is in use and its world differs from the environment's. A World.from_group()
    may be any part of it."""
    if world.backend.startswith("c10d") or not dist.is_available() or not dist.is_initialized():
        return
    theirs = (dist.get_rank(), dist.get_world_size())
    site, sites = (0, 1) if world.is_job_of_its_own else (world.site_index, world.num_sites)
    if theirs != (site * world.size + world.rank, sites * world.size):
        raise _C.make_error(
            "ENVIRONMENT",
            "torch.distributed and the environment speak of different worlds",
            where="python.engine",
            which=f"torch.distributed: rank {theirs[0]} of {theirs[1]}",
            expected=f"rank {world.rank} of {world.size}, as the variables of the launcher say",
            hint="start the ranks with a launcher, or pass world=zeroth.World.from_group()",
        )


def _make_hook_dict(parameter: nn.Parameter) -> None:
    """Creates the parameter's dictionary of Python hooks after accumulation. If torch made it later, it would replace
    the engine's C++ hook."""
    if not parameter.is_leaf or not (parameter.is_floating_point() or parameter.is_complex()):
        return
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses the hook else; a frozen parameter may become trainable later
    parameter.register_post_accumulate_grad_hook(lambda _: None).remove()  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)


def _hook_dicts(model: nn.Module) -> dict[str, dict[int, Any]]:
    """The dictionaries of hooks after accumulation, by parameter name."""
    named = model.named_parameters(remove_duplicate=False)
    hooks = {name: getattr(parameter, "_post_accumulate_grad_hooks", None) for name, parameter in named}
    return {name: entries for name, entries in hooks.items() if entries is not None}


def _groups(
    model: nn.Module, params: ParamGroups | None, optimizer: str
) -> tuple[list[_hypers.Hypers], dict[str, int]]:
    """Hyper-parameters of each group, and the group of each parameter, counted from 1. Raises Error USAGE for unknown
    keys, for trainable parameters in no group or in two, and for parameters of other modules."""
    if params is None:
        return [], {}
    entries = list(params)
    are_groups = bool(entries) and isinstance(entries[0], Mapping)
    groups: list[Mapping[str, Any]] = entries if are_groups else [{"params": entries}]  # type: ignore[assignment]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    known = (*_hypers.names_of(optimizer), "params", "name")
    hypers: list[_hypers.Hypers] = []
    index_of: dict[int, int] = {}
    for number, group in enumerate(groups, start=1):
        unknown = set(group) - {*known}
        if unknown:
            raise _C.make_error(
                "USAGE",
                "a parameter group has a key that is not known",
                where="python.engine",
                which=f"group {number}, {sorted(unknown)[0]!r}",
                expected=", ".join(known),
            )
        given = {key: value for key, value in group.items() if value is not None}
        hypers.append(_hypers.of_group(given, optimizer, f"group {number}"))
        members = group["params"]
        for position, member in enumerate([members] if isinstance(members, torch.Tensor) else members):
            parameter = member[1] if isinstance(member, tuple) else member  # as model.named_parameters() gives them
            if id(parameter) not in names:
                raise _C.make_error(
                    "USAGE",
                    "a parameter in a group is none of the module's",
                    where="python.engine",
                    which=f"group {number}, the parameter at {position}",
                    got=f"shape {tuple(parameter.shape)}"
                    if isinstance(parameter, torch.Tensor)
                    else type(parameter).__name__,
                    hint="the engine trains what is inside the module: put a loss with parameters of its own there, too",  # noqa: E501
                )
            if index_of.setdefault(id(parameter), number) != number:
                raise _C.make_error(
                    "USAGE",
                    "a parameter is in two groups",
                    which=f"{names[id(parameter)]}, groups {index_of[id(parameter)]} and {number}",
                )
    group_of: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in index_of:
            group_of[name] = index_of[id(parameter)]
        elif parameter.requires_grad:
            raise _C.make_error(
                "USAGE",
                "a trainable parameter is in no group",
                which=name,
                hint="put it into one, or call requires_grad_(False)",
            )
    return hypers, group_of
