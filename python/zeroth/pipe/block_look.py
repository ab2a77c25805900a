"""A look at a model: one run of a copy on the meta device, from which its layers follow. See [Note: What may pass]."""

import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.pipe import stashed
from zeroth.pipe.block_plan import BlockPlan, around, block_paths
from zeroth.pipe.chain import named_tensors
from zeroth.pipe.forms import Entry, Form
from zeroth.pipe.meta import meta_copy, to_meta
from zeroth.pipe.provenance import Provenance, key_of, keys_of

__all__ = ["look"]

_WHERE = "pipe.chain_of"

Forward = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any]


def look(
    model: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[BlockPlan, nn.Module]:
    """Finds the blocks of `model`, and runs `forward(copy, args, kwargs)` on the meta device, without gradients and in
    evaluation. Returns what it saw, and the copy. Raises Error MODEL for a model that cannot be run in layers, by what
    passes between them."""
    paths = block_paths(model)
    if not paths:
        refuse(
            "a model has no repeated blocks, so there is nothing to split",
            code="MODEL",
            where=_WHERE,
            which=type(model).__name__,
            expected="blocks in a ModuleList or Sequential, as zeroth.units(model) finds them",
            hint="make it an nn.Sequential, or give a list of layers",
        )
    copied = meta_copy(model).eval()
    _use_plain_kernels(copied)
    seen = _Look(copied, paths)
    run = seen.run
    with seen.hooks(), torch.no_grad(), torch.device("meta"), stashed.stashing(on_pop=seen.pass_on), run:
        try:
            forward(copied, to_meta(args), to_meta(dict(kwargs)))
        except _C.Error:
            raise
        except Exception as error:
            refuse(
                "a model cannot be run for a look at it",
                code="MODEL",
                where=_WHERE,
                which=type(model).__name__,
                expected="a forward that runs on the meta device, where tensors have no values",
                got=f"{type(error).__name__}: {error}",
                hint="give a batch as it is trained with: sample=",
            )
    for module in copied.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    return seen.plan(), copied


def _use_plain_kernels(model: nn.Module) -> None:
    """Models of transformers choose kernels by name, and not all of them run on the meta device."""
    for config in {id(config): config for config in _configs(model)}.values():
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"
        if getattr(config, "_attn_implementation", None) not in (None, "eager", "sdpa"):
            config._attn_implementation = "eager"


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            yield config


class _Look:
    def __init__(self, model: nn.Module, paths: list[str]) -> None:
        self.model = model
        self.candidates = paths
        self.run = Provenance(model, self._refuse_passing)
        self.blocks: list[str] = []
        """that were called, in order"""
        self.inside: str | None = None
        """a block, or a module outside of blocks, while it runs"""
        self.outside: defaultdict[str, set[int]] = defaultdict(set)
        self._arguments: dict[int, str] = {}
        """names of the storages that the present block was called with"""
        self._given: set[int] = set()
        """the same of the block that was called last, also after its call"""
        self._opaque: list[str] = []
        """its arguments that are neither tensors nor plain values"""
        self._results: dict[int, str] = {}
        """module outside of blocks that returned a storage"""
        self._entry: dict[int | str, int] = {}
        """storages of the arguments of the first block"""
        self._hidden: list[int | str] = []
        """arguments of the second block that the first one returned"""
        self._outputs: list[Any] = []

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Calls of blocks, and of the outermost modules that have parameters and lie in none."""
        handles: list[Any] = []
        blocks, containers = set(self.candidates), around(self.candidates)
        for path, module in self.model.named_modules():
            in_block = any(path.startswith(f"{block}.") for block in blocks)
            has_any = next(module.parameters(), None) is not None
            if path in blocks or (path not in containers and not in_block and has_any):
                kind = _Block(self, path) if path in blocks else _Outside(self, path)
                handles.append(module.register_forward_pre_hook(kind.begins, prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(kind.ends))
        yield
        for handle in handles:
            handle.remove()

    def block_begins(self, path: str, module: nn.Module, places: dict[int | str, Any]) -> None:
        if path in self.blocks:
            refuse(
                "a block is called twice in one forward",
                code="MODEL",
                where=_WHERE,
                which=path,
                expected="every block once, one after the other",
            )
        self.blocks.append(path)
        names = _names_of(module)
        for at, value in places.items():
            name = at if isinstance(at, str) else names[at] if at < len(names) else f"argument {at}"
            self._arguments |= {key: name for key in keys_of(value)}
            self._opaque += [f"{name}, a {type(leaf).__name__}" for leaf in _pytree.tree_leaves(value) if _opaque(leaf)]
        self._given = set(self._arguments)
        tensors = {at: key_of(value) for at, value in places.items() if isinstance(value, torch.Tensor)}
        if len(self.blocks) == 1:
            self._entry = tensors
            self.run.passed = {key for key in tensors.values() if self.run.maker(key) == 0}
            self.run.layer = 1
        elif len(self.blocks) == 2:
            self._hidden = [at for at, key in tensors.items() if key in self.run.passed]

    def block_ends(self, output: Any) -> None:
        self._arguments, self._opaque = {}, []
        self._outputs.append(output)
        self.run.keep(output)
        self.run.passed = keys_of(output)
        self.run.layer = len(self.blocks) + 1

    def outside_ends(self, path: str, output: Any) -> None:
        self.run.keep(output)
        self._results |= {key: path for key in keys_of(output)}

    def pass_on(self, value: Any) -> None:
        """A value that a layer stashed, and another one pops."""
        self.run.passed |= keys_of(value)

    def _refuse_passing(self, key: int, maker: int, operator: str) -> NoReturn:
        name = self._arguments.get(key) or ", ".join(self._opaque) or f"what {operator} reads"
        refuse(
            "more than the output of a block passes to a later one",
            code="MODEL",
            where=_WHERE,
            which=f"{name}, from {self._named(maker)} to {self._named(self.run.layer)}",
            expected="hidden states only, from each block to the next one",
            hint=self._hint(key, maker),
        )

    def _hint(self, key: int, maker: int) -> str:
        """For a read of a storage that does not pass. `maker`: the layer that wrote it."""
        before = len(self.blocks) if len(self.blocks) > 1 else 0
        if self.inside is None and (key in self._given or maker == before):
            return (
                f"the model adds to the output of {self.blocks[-1]} what was there before its call: add it inside of "
                "the block (return x + f(x)); values of earlier layers go by zeroth.pipe.stash() and pop()"
            )
        if len({path.rpartition(".")[0] for path in self.blocks}) > 1:
            return "an encoder with a decoder cannot be split; zeroth.pipe.stash() and pop() carry values over layers"
        return "zeroth.pipe.stash() in the layer that has it and pop() in the one that reads it carry it over layers"

    def _named(self, layer: int) -> str:
        if layer == 0:
            return "what runs before the first block"
        return self.blocks[layer - 1] if layer <= len(self.blocks) else f"what runs after {self.blocks[-1]}"

    def plan(self) -> BlockPlan:
        if len(self.blocks) < 2:
            refuse(
                "a model calls too few blocks to be split",
                code="MODEL",
                where=_WHERE,
                which=type(self.model).__name__,
                expected="two blocks or more, called as modules",
                got=self.blocks or f"no call of {', '.join(self.candidates)}",
            )
        needed, forms = self._forms()
        made = tuple(at for at, key in self._entry.items() if self.run.maker(key) == 0 and key in needed)
        return BlockPlan(
            blocks=tuple(self.blocks),
            entry=Entry(wanted=made or tuple(at for at in self._hidden if at in self._entry)),
            forms=forms,
            outside={path: tuple(sorted(layers)) for path, layers in self.outside.items()},
            loose={
                name: parameter.shape
                for name, parameter in self.model.named_parameters(remove_duplicate=False)
                if key_of(parameter) in self.run.loose
            },
            written=frozenset(path for key, path in self._results.items() if key in self.run.changed),
            uses=self._uses(),
        )

    def _forms(self) -> tuple[set[int], tuple[Form, ...]]:
        """From the last block to the first: what the layers after it read of what it returns, also where a block
        returns what it was given. And which storages the first block needs."""
        forms: list[Form] = []
        needed: set[int] = set()
        for number in range(len(self.blocks), 0, -1):
            leaves, spec = _pytree.tree_flatten(self._outputs[number - 1])
            needed = needed | self.run.read[number + 1]
            wanted = [at for at, leaf in enumerate(leaves) if self._is_wanted(leaf, needed, number)]
            form = Form(spec=spec, wanted=tuple(wanted))
            same = bool(forms) and (forms[0].spec, forms[0].wanted) == (form.spec, form.wanted)
            forms.insert(0, forms[0] if same else form)
            needed = keys_of([leaves[at] for at in wanted])
            if not needed:
                refuse(
                    "nothing that a block returns is used after it",
                    code="MODEL",
                    where=_WHERE,
                    which=self.blocks[number - 1],
                    expected="hidden states for the next block",
                    got=f"a {type(self._outputs[number - 1]).__name__}",
                )
        return needed | self.run.read[1], tuple(forms)

    def _is_wanted(self, leaf: Any, needed: set[int], number: int) -> bool:
        if isinstance(leaf, torch.Tensor):
            return key_of(leaf) in needed
        if _opaque(leaf):
            refuse(
                "a block returns what cannot be sent to another rank",
                code="MODEL",
                where=_WHERE,
                which=self.blocks[number - 1],
                expected="tensors and numbers, in tuples, lists, dicts or outputs of transformers",
                got=f"a {type(leaf).__name__}",
            )
        return leaf is not None

    def _uses(self) -> dict[str, tuple[int, ...]]:
        uses = defaultdict(set, {key: set(layers) for key, layers in self.run.uses.items()})
        holders = {path: {number + 1} for number, path in enumerate(self.blocks)} | self.outside
        for path, layers in holders.items():
            for _, tensor in named_tensors(self.model.get_submodule(path)):
                uses[key_of(tensor)] |= layers
        return {name: tuple(sorted(uses[key_of(tensor)])) for name, tensor in named_tensors(self.model)}


class _Hooked:
    """Hooks of one module; only the outermost one of those that run counts."""

    def __init__(self, seen: _Look, path: str) -> None:
        self.seen, self.path = seen, path

    def begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.seen.inside is None:
            self.seen.inside = self.path
            self.seen.run.in_module = True
            places: dict[int | str, Any] = dict(enumerate(args))
            places.update(kwargs)
            self.outermost_begins(module, places)

    def ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.seen.inside == self.path:
            self.seen.inside = None
            self.seen.run.in_module = False
            self.outermost_ends(output)

    def outermost_begins(self, module: nn.Module, places: dict[int | str, Any]) -> None: ...

    def outermost_ends(self, output: Any) -> None: ...


class _Block(_Hooked):
    def outermost_begins(self, module: nn.Module, places: dict[int | str, Any]) -> None:
        self.seen.block_begins(self.path, module, places)

    def outermost_ends(self, output: Any) -> None:
        self.seen.block_ends(output)


class _Outside(_Hooked):
    def outermost_begins(self, module: nn.Module, places: dict[int | str, Any]) -> None:
        self.seen.outside[self.path].add(self.seen.run.layer)

    def outermost_ends(self, output: Any) -> None:
        self.seen.outside_ends(self.path, output)


def _opaque(leaf: Any) -> bool:
    """Whether it cannot be taken apart and sent."""
    return leaf is not None and not isinstance(leaf, (torch.Tensor, bool, int, float, str))


def _names_of(module: nn.Module) -> list[str]:
    """Of positional arguments."""
    try:
        return list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return []
