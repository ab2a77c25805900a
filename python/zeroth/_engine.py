"""The engine around an nn.Module."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from zeroth import _C, _ending, _place, _units, _watch
from zeroth._config import ConfigLike, to_config
from zeroth._optimizer import Optimizer

__all__ = ["Engine", "initialize"]

_Batch = TypeVar("_Batch")
_END = object()
"""of a loader"""

ParamGroups = Sequence[Mapping[str, Any]] | Iterable[nn.Parameter] | Iterable[tuple[str, nn.Parameter]]

_owned: set[int] = set()
"""ids of the parameters of all open engines, which keep them alive"""


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
    """Partitions a module's parameters, gradients and optimizer state over the ranks of the job, as the configuration
    says.

    The module stays the user's: its parameters are the same objects, and calling it directly is the same as calling the
    engine.
    Collective: all ranks make it with the same model and configuration; rank 0's values become everybody's.
    Raises Error, with nothing changed, for what cannot be trained as asked.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ConfigLike = None,
        *,
        params: ParamGroups | None = None,
        units: Iterable[nn.Module] | None = None,
        world: _C.World | None = None,
        log_level: str = "info",
        progress_every_s: float = 1.0,
        json_log: str = "",
    ) -> None:
        """`params`: groups as torch's optimizers take them, with "lr" and "weight_decay" of their own. `units`: modules
        that are gathered and reduced as one, instead of those that zeroth.units(model) finds. `world`:
        World.from_environment() by default. `progress_every_s`: rank 0 logs how far it is, at most so often; 0: never.
        `json_log`: a file that gets the log and every step as JSON lines (default: that of ZEROTH_JSON_LOG)."""
        _ending.install()
        _refuse_second(model)
        _refuse_subclasses(model)
        if world is None:
            world = _C.World.from_environment()
        _refuse_another_world(world)
        _place.announce(world)
        _ending.follow(world)
        self._world: _C.World | None = world
        self._model = model
        found = _units.find_units(model) if units is None else _units.named_units(model, units)
        hypers, group_of = _groups(model, params)
        for parameter in model.parameters():
            _make_hook_dict(parameter)
        watched = _watch.held(model)
        buffers = _watch.buffers(model)
        modules = list(dict.fromkeys(found.values()))  # one a unit, in the order in which C++ numbers them
        self._core: _C.Engine = _C.Engine(
            units=[(path, id(module), type(module).__qualname__) for path, module in found.items()],
            parameters=list(model.named_parameters(remove_duplicate=False)),
            buffers=buffers,
            groups=hypers,
            group_of=group_of,
            config=to_config(config),
            world=world,
            log_level=log_level,
            progress_every_s=progress_every_s,
            json_log=json_log,
            hooks=_hook_dicts(model),
        )
        self._core.set_buffers(buffers)
        self._rank, self._world_size, self._config = self._core.rank, self._core.world_size, self._core.config
        self._device = self._core.device
        self._steps = 0
        self._optimizer: Optimizer | None = None
        self._scheduler: Any = None
        self._group_members = _members(model, group_of, len(hypers))
        self._parameters = list(model.parameters())
        _owned.update(map(id, self._parameters))
        self._require_same = _watch.follow(model)
        self._handles: list[RemovableHandle] = []
        for index, module in enumerate([model, *modules]):
            hooks = _C.UnitHooks(self._core, index)
            before = (
                hooks.before
                if index > 0
                else functools.partial(hooks.before_root, watched, _look_again(self._require_same, self._core))
            )
            self._handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(hooks.after, always_call=True))
        if self._core.gathers_parameters:
            inside = [
                (path, module)
                for path, module in model.named_modules()
                if not isinstance(module, torch.jit.ScriptModule)
            ]
            self._handles += [_refuse_state_dict(path, module) for path, module in inside]

    # --- training ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        try:
            return self._model(*args, **kwargs)
        except BaseException:  # torch's hooks see an Exception, but no KeyboardInterrupt
            self._core.drop_forwards()
            raise

    def backward(self, loss: torch.Tensor) -> None:
        """loss.backward(). Raises Error if no gradient can flow from `loss`."""
        seen = self._core.open_backward(loss)
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self._core.fail_backward()
            raise
        self._core.close_backward(seen)

    def step(self) -> _C.StepResult:
        """Boundary of a micro-step; on the last one updates the parameters, on all ranks at once. Collective then."""
        if self._optimizer is None:
            return self._step()
        # Through it, so that torch's schedulers see a step.
        return self._optimizer.step()  # type: ignore[no-any-return]

    def _step(self) -> _C.StepResult:
        if self._optimizer is not None:
            self._optimizer.push()
        result = self._core.step()
        if result.boundary:
            self._steps = result.step
            torch.clear_autocast_cache()  # it holds casts of the old values
        if result.committed and self._scheduler is not None:
            self._scheduler.step()
        return result

    def batches(
        self, loader: Iterable[_Batch], *, on_joined_step: Callable[[_C.StepResult], object] | None = None
    ) -> Iterator[_Batch]:
        """The loader's batches, for loops on all ranks in which some may run out before others. The key zeroth.uneven
        says what then happens. "error": Error MISMATCH on all ranks, naming those that have none. "drop": all loops end
        with the first. "join": a rank without a batch stays in its loop, takes part in what the others do with nothing
        of its own, and leaves it when nobody has a batch any more; the gradient of a step is the mean over the
        micro-batches that there are (`result.batches`), and average() that over the ranks that have one. Within such a
        loop all ranks that have a batch must do the same: forward, backward, step(), zero_grad(), average(). Also for
        evaluation. `on_joined_step(result)` is called on a rank without a batch after each step() that it took part in:
        there belongs what the loop does once a step, such as `scheduler.step()`. One engine is followed: where a loop
        steps several, use "drop". Collective, once a batch."""
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

    def zero_grad(self) -> None:
        """Forgets the gradients since the last step(): of a batch that is thrown away, or what another loss left in
        this module. After an update nothing has to be done, and without a backward since step() nothing is. Else
        collective: Error MISMATCH on all ranks if some call step() meanwhile. Raises Error in the middle of an
        accumulation, whose earlier micro-steps are summed already."""
        self._core.zero_grad()

    @property
    def optimizer(self) -> Optimizer:
        """For torch.optim.lr_scheduler: its `param_groups` hold "lr" and "weight_decay", which every step() takes from
        there. Beside a scheduler of the configuration they must not be changed."""
        if self._optimizer is None:
            hypers = self._core.groups
            groups = [
                (number, {"params": members, "lr": hypers[number][0], "weight_decay": hypers[number][1]})
                for number, members in self._group_members.items()
            ]
            self._optimizer = Optimizer(self, self._core, groups)
        return self._optimizer

    @property
    def learning_rates(self) -> list[float]:
        """What the next update takes, one a parameter group."""
        if self._optimizer is not None:
            self._optimizer.push()
        rates = self._core.learning_rates
        return [rates[number] for number in self._group_members]

    def train(self, mode: bool = True) -> "Engine":
        """The module's train()."""
        self._model.train(mode)
        return self

    def eval(self) -> "Engine":
        """The module's eval()."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the module trains."""
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
        """Where the module's parameters were when the engine was built, and where it computes; inputs belong there.
        Whatever it is, the engine keeps parameters, gradients and optimizer in host memory."""
        return self._device

    @property
    def rank(self) -> int:
        """This rank among all of the job."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self._world_size

    @property
    def steps(self) -> int:
        """Committed updates so far."""
        return self._steps

    def memory_report(self) -> _C.MemoryReport:
        """Bytes of this rank by state: planned, and measured at their peak."""
        return self._core.memory_report()

    def wire_report(self) -> dict[str, int]:
        """Bytes received from other ranks since reset_counters(), and what the formula says of one step."""
        return self._core.wire_report()

    def reset_counters(self) -> None:
        """Forgets peaks and traffic, so that a phase can be measured by itself."""
        self._core.reset_counters()

    def average(self, value: float, name: str = "") -> float:
        """Mean over ranks. Collective. Ranks compare the names, as those of barriers: without one, two averages that a
        rank makes the other way round are the wrong numbers everywhere."""
        return self._core.average(value, name)

    def barrier(self, name: str = "") -> None:
        """Waits until all ranks are here. Collective. The name is in errors and in the flight recorder; where ranks
        give different ones, all get Error MISMATCH with both."""
        self._core.barrier(name)

    # --- the end ----------------------------------------------------------------------------------------------------

    def export_safetensors(self, path: str) -> None:
        """Collective. All weights and buffers to one file, written by rank 0: the whole new file or none."""
        self._core.export_safetensors(path)

    def close(self, *, keep_parameters: bool = True) -> None:
        """Collective with `keep_parameters`: the module gets ordinary memory back, with the values of now, and works by
        itself again. Without, and where an engine is only dropped, its parameters are gone: reading one is an error
        with its name. Raises Error, with the engine closed, if the module holds others than those that got the
        values."""
        self._core.close(keep_parameters=keep_parameters)
        self._world = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _owned.difference_update(map(id, self._parameters))
        gives_back = keep_parameters and bool(self._parameters)
        self._parameters.clear()
        if gives_back:
            self._require_same(
                self._model,
                "python.close",
                "the one that the engine was built with has the values: keep the module as it is until close()",
            )

    def __del__(self) -> None:
        if "_handles" in self.__dict__:
            self.close(keep_parameters=False)

    if not TYPE_CHECKING:  # type checkers know what there is

        def __getattr__(self, name: str) -> Any:
            """Says where it is what the user may be looking for."""
            has_it = hasattr(self.__dict__.get("_model"), name)
            raise AttributeError(
                f"zeroth.Engine has no {name!r}{f', its module has: engine.module.{name}' if has_it else ''}"
            )


def initialize(
    *,
    model: nn.Module,
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
) -> tuple[Engine, Optimizer, None, Any]:
    """The shape that DeepSpeed users know: (engine, optimizer, loader, scheduler). The optimizer is engine.optimizer,
    the scheduler what `lr_scheduler(optimizer)` made: engine.step() steps it after each update. The configuration may
    be `args.deepspeed_config`. The optimizer's type comes from it; objects of torch's, data sets, and what else
    DeepSpeed takes are refused. `world`, `units`, `log_level` and `json_log` are those of Engine."""
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
    if lr_scheduler is not None:
        engine._scheduler = lr_scheduler(engine.optimizer)
    return engine, engine.optimizer, None, engine._scheduler


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
"""What DeepSpeed's initialize() takes beside, and where it belongs"""


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


def _refuse_subclasses(model: nn.Module) -> None:
    """Tensors that stand for others, DTensors above all: their memory is not their own."""
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter) or is_traceable_wrapper_subclass(parameter.data):
            raise _C.make_error(
                "MODEL",
                "a parameter is a tensor subclass",
                where="python.engine",
                which=name,
                expected="an ordinary nn.Parameter",
                hint=f"it is a {type(parameter).__name__}: the engine does the sharding, give it the module before "
                "fully_shard(), distribute_module() or quantisation",
            )


def _look_again(
    require_same: Callable[[nn.Module, str, str], None], core: _C.Engine
) -> Callable[[nn.Module], _watch.Watched]:
    """What the forward does when the module is no longer as it was. A function, not a method: the module does not know
    the engine, which would live as long as the module does."""

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
    """Where parameters are sharded. Copies of the module, which have its hooks, may."""
    owner = weakref.ref(module)

    def hook(called: nn.Module, prefix: str, keep_vars: bool) -> None:
        if called is owner():
            raise _C.make_error(
                "USAGE",
                "a module with sharded parameters has no state_dict()",
                where="python.engine",
                which=f"{path} ({type(called).__name__})" if path else type(called).__name__,
                hint="engine.export_safetensors(path) writes the whole weights on rank 0",
            )

    return module.register_state_dict_pre_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


def _members(model: nn.Module, group_of: Mapping[str, int], groups: int) -> dict[int, list[nn.Parameter]]:
    """Parameters of each group by its number; 0 is the configuration's, which has those that train where there are no
    others."""
    if groups == 0:
        return {0: [parameter for parameter in model.parameters() if parameter.requires_grad]}
    members: dict[int, list[nn.Parameter]] = {number: [] for number in range(1, groups + 1)}
    for name, parameter in model.named_parameters():
        if name in group_of:
            members[group_of[name]].append(parameter)
    return members


def _refuse_another_world(world: _C.World) -> None:
    """The environment's must be the one that torch.distributed speaks of, if that is in use. A group of it may be any
    part of it."""
    if world.backend.startswith("c10d") or not dist.is_available() or not dist.is_initialized():
        return
    theirs = (dist.get_rank(), dist.get_world_size())
    if theirs != (world.rank, world.size):
        raise _C.make_error(
            "ENVIRONMENT",
            "torch.distributed and the environment speak of different worlds",
            where="python.engine",
            which=f"torch.distributed: rank {theirs[0]} of {theirs[1]}",
            expected=f"rank {world.rank} of {world.size}, as the variables of the launcher say",
            hint="start the ranks with a launcher, or pass world=zeroth.World.from_group()",
        )


def _make_hook_dict(parameter: nn.Parameter) -> None:
    """Python's hooks after accumulation replace a C++ hook, unless their dictionary was there before it."""
    if not parameter.is_leaf or not (parameter.is_floating_point() or parameter.is_complex()):
        return
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # torch refuses the hook else; a frozen parameter may become trainable later
    parameter.register_post_accumulate_grad_hook(lambda _: None).remove()  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trains)


def _hook_dicts(model: nn.Module) -> dict[str, dict[int, Any]]:
    """By the parameter's name."""
    named = model.named_parameters(remove_duplicate=False)
    hooks = {name: getattr(parameter, "_post_accumulate_grad_hooks", None) for name, parameter in named}
    return {name: entries for name, entries in hooks.items() if entries is not None}


def _groups(
    model: nn.Module, params: ParamGroups | None
) -> tuple[list[tuple[float | None, float | None]], dict[str, int]]:
    """Hyper-parameters of each group, and the group of each parameter, counted from 1. Raises Error for keys that are
    not known, and for trainable parameters in no group or in two, and for such that are not the module's."""
    if params is None:
        return [], {}
    entries = list(params)
    are_groups = bool(entries) and isinstance(entries[0], Mapping)
    groups: list[Mapping[str, Any]] = entries if are_groups else [{"params": entries}]  # type: ignore[assignment]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    hypers: list[tuple[float | None, float | None]] = []
    index_of: dict[int, int] = {}
    for number, group in enumerate(groups, start=1):
        unknown = set(group) - {"params", "lr", "weight_decay", "name"}
        if unknown:
            raise _C.make_error(
                "USAGE",
                "a parameter group has a key that is not known",
                which=f"group {number}, {sorted(unknown)[0]!r}",
                expected="params, lr, weight_decay, name",
            )
        hypers.append((group.get("lr"), group.get("weight_decay")))
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
