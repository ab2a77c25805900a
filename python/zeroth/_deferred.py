"""Modules whose weights are made when an engine takes them: unit by unit, so that no rank ever has the whole model.

    build()  on the meta device, under a mode that records the operators    no memory
    record   random operators run once into scratch, for their states        one tensor
    replay   of what leads to one weight, with these states, on the CPU      one unit

[Note: Replay] An operator's arguments are noted as storage, sizes, strides and offset, not as tensors: parameters share
storages with what they were made of, and views need no replay. The values of a weight are the operators that wrote its
storage, back to the last one that wrote all of it, and what those read. A random operator starts from the state of the
generator that it had in its place, so weights may be made in any order.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from zeroth import _C, _boxes, _names

__all__ = ["Initial", "Recording", "deferred", "initial_of", "random_states_of"]

_Model = TypeVar("_Model", bound=nn.Module)
_ATTRIBUTE = "_zeroth_deferred"
"""of a module: its Recording"""

_WHOLE = {"_no_grad_trunc_normal_", "dirac_", "orthogonal_", "sparse_"}
"""functions of torch.nn.init that leave a tensor on the meta device alone, since torch 2.15. Each is recorded as one
operator that writes all of its tensor."""

_OVERWRITES = _WHOLE | {"zero_", "fill_", "normal_", "uniform_", "copy_", "log_normal_", "exponential_"}
"""operators after which nothing of what was there before is left, if they write all of a storage"""


@dataclasses.dataclass(frozen=True, slots=True)
class _Ref:
    """A tensor on the meta device: a place in a storage, which it keeps."""

    storage: Any
    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def whole(self) -> bool:
        count = 1
        for extent in self.size:
            count *= extent
        return count * self.dtype.itemsize == int(self.storage.nbytes())


def _ref(tensor: torch.Tensor) -> _Ref:
    storage = tensor.untyped_storage()
    return _Ref(
        storage, storage._cdata, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
    )


@dataclasses.dataclass(slots=True)
class _Call:
    function: Any
    args: Any
    kwargs: Any
    made: list[_Ref | None]
    """of its results, those with a storage that was not there before"""
    writes: list[_Ref]
    reads: list[_Ref]
    random: bool
    state: torch.Tensor | None = None
    """of the generator, before it"""

    @property
    def name(self) -> str:
        schema = getattr(self.function, "_schema", None)
        return str(self.function.__name__ if schema is None else schema.name.partition("::")[2])


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Of the operators that build a module on the meta device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports all of dynamo (900 modules) to keep it away from each call

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.writers: dict[int, list[int]] = {}
        """calls that write a storage, in order; the first one makes it"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **kwargs)
        results = list(result) if isinstance(result, tuple | list) else [result]
        outputs = [one for one in results if isinstance(one, torch.Tensor) and one.is_meta]
        writes: list[_Ref] = []
        reads: list[_Ref] = []
        for place, argument in enumerate(func._schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, tuple | list) else [value]:
                if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                    written = argument.alias_info is not None and argument.alias_info.is_write
                    (writes if written else reads).append(_ref(tensor))
        if random and not outputs and not writes:
            raise _C.make_error(
                "MODEL",
                "random numbers for a tensor that is not on the meta device",
                where="python.deferred",
                which=str(func),
                expected="torch.empty() and the like, which follow torch.device()",
                hint="torch.Tensor(sizes) and tensors with a device of their own do not: their random numbers would "
                "not be those of an ordinary build",
            )
        made = [ref if ref.key not in self.writers else None for ref in map(_ref, outputs)]
        if not writes and not any(made):
            return result  # a view, or a look
        number = len(self.calls)
        self.calls.append(
            _Call(
                function=func,
                args=tree_map(_kept, args),
                kwargs=tree_map(_kept, kwargs),
                made=made,
                writes=writes,
                reads=reads,
                random=random,
            )
        )
        for key in dict.fromkeys([ref.key for ref in made if ref is not None] + [ref.key for ref in writes]):
            self.writers.setdefault(key, []).append(number)
        return result

    def note_whole(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """A function that fills arguments["tensor"], with random numbers perhaps, as one operator."""
        ref = _ref(arguments["tensor"])
        self.writers.setdefault(ref.key, []).append(len(self.calls))
        kept = {name: _kept(value) for name, value in arguments.items()}
        self.calls.append(
            _Call(function=function, args=(), kwargs=kept, made=[None], writes=[ref], reads=[], random=True)
        )

    def run_random(self) -> None:
        """Takes from the generators what the calls would have taken, and notes their states."""
        # In one block, made before: a state that is kept between two scratch tensors lies in the place of the first,
        # where the second then does not fit, and the heap grows by the whole model.
        random = [call for call in self.calls if call.random]
        block = torch.empty(len(random), torch.default_generator.get_state().numel(), dtype=torch.uint8)
        with torch.no_grad():
            for call, state in zip(random, block, strict=True):
                call.state = state.copy_(_generator_of(call).get_state())
                memory: dict[int, torch.UntypedStorage] = {}
                _run(call, memory, scratch=True)

    def values(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """On the CPU, those that an ordinary build would have given `tensor`."""
        wanted = _ref(tensor)
        chosen: set[int] = set()
        todo: list[tuple[int, int]] = [(wanted.key, len(self.calls))]
        seen: dict[int, int] = {}
        while todo:
            key, before = todo.pop()
            if seen.get(key, -1) >= before:
                continue
            if key not in self.writers:
                raise _C.make_error(
                    "MODEL",
                    "a tensor on the meta device has no values",
                    where="python.deferred",
                    which=name,
                    hint="build, convert and tie the module inside the function that zeroth.deferred() calls",
                )
            seen[key] = before
            for number in reversed([one for one in self.writers[key] if one < before]):
                call = self.calls[number]
                known = number in chosen
                chosen.add(number)
                if not known:
                    todo += [(ref.key, number) for ref in call.reads if ref.key != key]
                    todo += [(ref.key, number) for ref in call.writes if ref.key != key]
                covers = call.name in _OVERWRITES and any(ref.key == key and ref.whole() for ref in call.writes)
                if covers and all(ref.key != key for ref in call.reads):
                    chosen.add(self.writers[key][0])  # its memory
                    todo += [(ref.key, self.writers[key][0]) for ref in self.calls[self.writers[key][0]].reads]
                    break
        memory: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for number in sorted(chosen):
                call = self.calls[number]
                generator = _generator_of(call) if call.random else None
                if generator is None or call.state is None:
                    _run(call, memory)
                    continue
                now = generator.get_state()
                generator.set_state(call.state.clone())  # torch reads over the end of a view
                _run(call, memory)
                generator.set_state(now)
        return _real(wanted, memory)


class _Functions(TorchFunctionMode):
    """Tensors of Python numbers have values also on the meta device: as copies from the CPU, which are recorded.
    Functions of torch.nn.init that do nothing there are recorded as a whole: they ask for `tensor.is_meta` first."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            self.look_at_caller(args[0], sys._getframe(1))
            return func(*args, **kwargs)
        made = func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], torch.Tensor)
        if not made or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        trains = kwargs.pop("requires_grad", False)
        values = func(*args, **{**kwargs, "device": "cpu"})
        # One without elements stays on the CPU: transformers asks by it whether it builds on the meta device, where it
        # would leave out its initialisation.
        copy = values.to("meta") if values.numel() else values
        return copy.requires_grad_() if trains else copy

    def look_at_caller(self, tensor: torch.Tensor, frame: Any) -> None:
        code = frame.f_code
        if code.co_name not in _WHOLE or code.co_filename != nn.init.__file__ or frame.f_locals["tensor"] is not tensor:
            return
        arguments = {name: frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
        if tensor.device.type == "meta" and tensor.numel():
            self.recording.note_whole(getattr(nn.init, code.co_name), arguments)


_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _ref(value) if value.is_meta else value
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _generator_of(call: _Call) -> torch.Generator:
    given = call.kwargs.get("generator")
    return given if isinstance(given, torch.Generator) else torch.default_generator


def _real(ref: _Ref, memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    return torch.empty(0, dtype=ref.dtype).set_(memory[ref.key], ref.offset, ref.size, ref.stride)


def _run(call: _Call, memory: dict[int, torch.UntypedStorage], *, scratch: bool = False) -> None:
    """`scratch`: whatever it reads, it gets zeros."""

    def argument(value: Any) -> Any:
        if not isinstance(value, _Ref):
            return value
        if scratch and value.key not in memory:
            memory[value.key] = torch.zeros(value.storage.nbytes(), dtype=torch.uint8).untyped_storage()
        return _real(value, memory)

    args, kwargs = tree_map(argument, call.args), tree_map(argument, call.kwargs)
    result = call.function(*args, **kwargs)
    results = list(result) if isinstance(result, tuple | list) else [result]
    tensors = [one for one in results if isinstance(one, torch.Tensor)]
    for ref, tensor in zip(call.made, tensors, strict=True):
        if ref is not None:
            memory[ref.key] = tensor.untyped_storage()


def deferred(build: Callable[[], _Model]) -> _Model:
    """Calls `build()`, which makes a module, on the meta device, and returns the module without any memory. An Engine
    makes its weights unit by unit, and shards each unit at once: no rank ever has more than one unit whole. They are
    those of an ordinary build with the same random state, to the bit, and random numbers go on as after it.

    All that changes weights (initialisation, casts, ties) must happen inside `build`. What needs values there, such as
    a loop on `tensor.item()`, raises torch's error of the meta device. zeroth.load_pretrained() may follow the engine.
    Random operators run twice. Only the engine gives the module values: until then it has none."""
    recording = Recording()
    with torch.device("meta"), _Functions(recording), recording:
        model = build()
    recording.run_random()
    model.__dict__[_ATTRIBUTE] = recording
    return model


class Initial:
    """Parameters of a deferred module that wait for their values. In the place of each stands memory on the CPU that
    nobody has written to, which takes none."""

    def __init__(self, model: nn.Module, recordings: list[tuple[nn.Module, Recording]]) -> None:
        """Gives buffers their values. Raises Error MODEL for a tensor without."""
        self._recordings = recordings
        self._waiting: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {}
        """recorded tensors, and what cuts this rank's part of them"""
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []
        every = _boxes.own_parameters(model, remove_duplicate=True)
        named = [(name, parameter) for name, parameter in every if parameter.is_meta]
        for name, parameter in named:
            self._recording_of(_boxes.later_of(parameter)[0], name)
        made: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    if id(buffer) not in made:
                        made[id(buffer)] = self._recording_of(buffer, key).values(buffer, key)
                    module._buffers[key] = made[id(buffer)]
        for module, _ in recordings:
            del module.__dict__[_ATTRIBUTE]
        for name, parameter in named:
            self._waiting[_names.plain(name)] = _boxes.later_of(parameter)
            place = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
            own = nn.Parameter(place, requires_grad=parameter.requires_grad)
            # The object stays the user's. Weak references to it, as recurrent modules have, are no hindrance, for which
            # torch.utils.swap_tensors() takes them.
            torch._C._swap_tensor_impl(parameter, own)
            self._swapped.append((parameter, own))

    def values(self, name: str) -> torch.Tensor | None:
        """Of a parameter with this plain name, made now; None for one that has its own."""
        waiting = self._waiting.get(name)
        if waiting is None:
            return None
        whole, cut = waiting
        return cut(self._recording_of(whole, name).values(whole, name))

    def undo(self) -> None:
        """Makes the module what it was before, for another engine."""
        for parameter, own in self._swapped:
            torch._C._swap_tensor_impl(parameter, own)
        self._swapped.clear()
        for module, recording in self._recordings:
            module.__dict__[_ATTRIBUTE] = recording

    def _recording_of(self, tensor: torch.Tensor, name: str) -> Recording:
        key = tensor.untyped_storage()._cdata
        for _, recording in self._recordings:
            if key in recording.writers:
                return recording
        self._recordings[0][1].values(tensor, name)  # raises
        raise AssertionError


def random_states_of(model: nn.Module) -> list[torch.Tensor]:
    """Of deferred modules inside: the state of the generator before their first random number."""
    states = []
    for module in model.modules():
        recording: Recording | None = module.__dict__.get(_ATTRIBUTE)
        if recording is not None:
            states += [call.state.clone() for call in recording.calls if call.state is not None][:1]
    return states


def initial_of(model: nn.Module) -> Initial | None:
    """None for an ordinary module."""
    recordings = [(module, module.__dict__[_ATTRIBUTE]) for module in model.modules() if _ATTRIBUTE in module.__dict__]
    return Initial(model, recordings) if recordings else None
