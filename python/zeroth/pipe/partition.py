"""Which stage of a pipeline gets which layers."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import nn

from zeroth._C import cut_evenly
from zeroth.parallel._refuse import refuse
from zeroth.pipe.balance import balanced
from zeroth.pipe.chain import Chain
from zeroth.pipe.layer_list import LayerList
from zeroth.pipe.layer_specs import LayerSpec
from zeroth.pipe.measure import measure, refuse_without_sample

__all__ = ["partition"]

_WHERE = "pipe.partition"
_METHODS = ("auto", "parameters", "uniform", "time", "memory")


def partition(
    chain: Chain,
    parts: int,
    split: str | Sequence[str | int] = "auto",
    *,
    weights: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
    sample: Any = None,
    shared: Callable[[str], bool] | None = None,
) -> list[int]:
    """Boundaries of `parts` contiguous parts of the chain's layers: part i has layers result[i] .. result[i + 1] - 1,
    at least one. Local, and the same on all ranks that give the same arguments.

    `split`: "parameters": the largest sum of parameters of a part is as small as it can be; a tied weight counts in
    each layer that uses it. "uniform": equal numbers of layers, the first parts with one more where it does not go out.
    "type:REGEX": equal numbers of the layers whose class has a name that the expression finds, in any case. "auto":
    "parameters", without the tables of embeddings in the layer that first uses them: to look rows up takes no time,
    while a head multiplies with all of its weights. "time", "memory": measured seconds or bytes of each layer, see
    measure(), for the micro-batch `sample`; ranks measure different times, so measure on one rank and give the others
    its `weights`. A list: names or numbers of the layers that begin a part; the first one may be left out.
    `weights`: a cost for each layer, in the place of what `split` says. `speeds`: of the parts, for unlike ranks; a
    part's time is its cost over its speed. `shared`: whether a parameter, by its name, is on all parts alike, and does
    not count in the last layer.

    Raises Error USAGE: more parts than layers, unknown names or methods, weights that do not fit."""
    names = [layer.name for layer in chain.layers]
    if not 1 <= parts <= len(names):
        refuse(
            "every part of a pipeline needs a layer",
            where=_WHERE,
            which=f"{parts} parts",
            expected=f"1 to {len(names)} parts, for {len(names)} layers",
            got=parts,
        )
    if not isinstance(split, str):
        return _of_names(names, parts, split)
    _require_numbers("speeds", speeds, parts, least_above=0.0)
    if split == "uniform" and weights is None and speeds is None:
        return cut_evenly(len(names), parts)
    if weights is None:
        weights = _costs(chain, split, sample, shared)
    elif split not in _METHODS and not split.startswith("type:"):
        _refuse_method(split)
    _require_numbers("weights", weights, len(names))
    return balanced(weights, speeds or [1.0] * parts)


def _of_names(names: list[str], parts: int, split: Sequence[str | int]) -> list[int]:
    unknown = [one for one in split if one not in names and not (isinstance(one, int) and 0 <= one < len(names))]
    if unknown:
        refuse(
            "there is no such layer",
            where=_WHERE,
            which=", ".join(map(str, unknown)),
            expected=f"one of {', '.join(names)}",
        )
    begins = [one if isinstance(one, int) else names.index(one) for one in split]
    boundaries = [*([] if begins[:1] == [0] else [0]), *begins, len(names)]
    if len(boundaries) != parts + 1 or sorted(set(boundaries)) != boundaries:
        refuse(
            "a split does not name the first layers of the parts",
            where=_WHERE,
            which=", ".join(map(str, split)),
            expected=f"{parts - 1} different layers in their order, or {parts} from {names[0]} on, for {parts} parts",
            got=f"{len(split)} layers",
        )
    return boundaries


def _costs(chain: Chain, split: str, sample: Any, shared: Callable[[str], bool] | None) -> list[float]:
    if split.startswith("type:"):
        return _of_types(chain, split.removeprefix("type:"))
    match split:
        case "uniform":
            return [1.0] * len(chain.layers)
        case "auto" | "parameters":
            return _of_parameters(chain, shared, tables=split == "parameters")
        case "time" | "memory":
            if sample is None:
                refuse_without_sample(split)
            return measure(chain, sample, split)
    _refuse_method(split)


def _refuse_method(split: str) -> NoReturn:
    refuse(
        "there is no such way to split",
        where=_WHERE,
        which="split",
        expected=f"{', '.join(_METHODS)}, type:REGEX, or a list of layers",
        got=split,
    )


def _of_types(chain: Chain, expression: str) -> list[float]:
    try:
        pattern = re.compile(expression, re.IGNORECASE)
    except re.error as error:
        refuse("this is no regular expression", where=_WHERE, which=f"type:{expression}", got=error)
    found = [any(pattern.search(name) for name in names) for names in _class_names(chain)]
    if not any(found):
        refuse(
            "no layer has a class with such a name",
            where=_WHERE,
            which=f"type:{expression}",
            expected=f"one of {', '.join(sorted({name for names in _class_names(chain) for name in names}))}",
        )
    return [float(one) for one in found]


def _class_names(chain: Chain) -> list[list[str]]:
    """Of functions their own."""
    names = [[type(module).__name__ for module in layer.modules] for layer in chain.layers]
    if isinstance(chain.model, LayerList):
        for number, own in enumerate(names):
            spec = chain.model.specs[number]
            if isinstance(spec, LayerSpec):
                own.append(spec.name)
            elif not isinstance(spec, nn.Module):
                own.append(getattr(spec, "__name__", type(spec).__name__))
    return names


def _of_parameters(chain: Chain, shared: Callable[[str], bool] | None, *, tables: bool) -> list[float]:
    """Elements of each layer. A tied weight has several names, and counts once in a layer."""
    costs = [0.0] * len(chain.layers)
    looked_up = set() if tables else _tables(chain)
    for name, parameter in chain.model.named_parameters():
        for number in chain.uses[name]:
            if shared is not None and shared(name) and number + 1 == len(costs):
                continue
            if (id(parameter), number) not in looked_up:
                costs[number] += parameter.numel()
    return costs


def _tables(chain: Chain) -> set[tuple[int, int]]:
    """Weights of embeddings, each with the first layer that uses it."""
    first = {id(parameter): chain.uses[name][:1] for name, parameter in chain.model.named_parameters()}
    return {
        (id(module.weight), number)
        for module in chain.model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for number in first.get(id(module.weight), ())
    }


def _require_numbers(what: str, numbers: Sequence[float] | None, count: int, *, least_above: float = -math.inf) -> None:
    if numbers is None:
        return
    bad = [one for one in numbers if not (math.isfinite(one) and one >= 0 and one > least_above)]
    if len(numbers) != count or bad:
        refuse(
            f"{what} do not fit",
            where=_WHERE,
            which=what,
            expected=f"{count} finite numbers, {'above 0' if least_above == 0 else 'none below 0'}",
            got=bad or f"{len(numbers)} numbers",
        )
