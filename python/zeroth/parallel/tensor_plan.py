"""Finds how the ranks of an axis share the matrices of a model: the plan of zeroth.parallelize().

Two rules (Redco, Tan et al. 2024; Shoeybi et al. 2019), for any model whose layers are nn.Linear or transformers'
Conv1D:
- attention: the last projection takes heads (row), all others give heads (column);
- elsewhere in a block: a layer that takes the block's size gives parts (column), one that gives it back takes them
  (row).
A model of transformers with a plan of its own (tp_plan) is split by that one.
"""

import contextlib
import dataclasses
import fnmatch
import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zeroth import _units
from zeroth._tiled import Tile
from zeroth.parallel._refuse import refuse
from zeroth.parallel.tensor_adapters import (
    Adapter,
    adapters_of,
    base_name,
    linears_of,
    plain_name,
    problem_of,
    shares_of_adapters,
)
from zeroth.parallel.tensor_heads import Found, of_attention
from zeroth.parallel.tensor_share import ROLES, Role, Share, TensorPlan, inputs_of, is_linear, outputs_of

__all__ = ["blocks_of", "find_plan", "is_attention"]

_WHERE = "parallel.parallelize"
_OF_TRANSFORMERS: dict[str, Role] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "summed",
    "embedding_rowwise": "vocab",
}
"""styles of tp_plan"""
_LEFT_TO_THE_RULES = {"colwise_gather_output", "rowwise_split_input"}
"""styles that gather what several layers give, where the rules find parts of one matrix"""


def find_plan(model: nn.Module, ranks: int, corrections: Mapping[str, Role] | None = None) -> TensorPlan:
    """The plan for a model. `corrections`: roles by names of modules, with * for any part of a name; they come before
    the model's own plan and the rules. Raises Error MODEL for heads that the ranks cannot share."""
    shares: dict[str, Share] = {}
    attentions: list[list[Found]] = []
    own = _own_plan(model)
    adapters = adapters_of(model)
    for path, block in blocks_of(model).items():
        of_attentions, others = _of_block(model, path, block, ranks, own, adapters)
        attentions += of_attentions
        shares |= {name: share for attention in of_attentions for name, share, _ in attention} | others
    for share in _vocabulary(model, ranks):
        shares[share.name] = share
    found = dict(shares)
    for pattern, role in (corrections or {}).items():
        _correct(model, shares, pattern, role, adapters)
    attributes = [
        count for attention in attentions for count in _counts_of(model, attention, found, shares)
    ] + _without_shortcuts(model, shares)
    shares |= {share.name: share for share in shares_of_adapters(shares, adapters)}
    if not any(share.role in ("column", "row") for share in shares.values()):
        reasons = sorted({f"{share.name}: {share.why}" for share in shares.values() if share.why})
        tiled = any(isinstance(module, Tile) for module in model.modules())
        refuse(
            "the plan shares no layer of the model",
            code="MODEL",
            where=_WHERE,
            which=type(model).__name__,
            expected="blocks with nn.Linear or Conv1D in an nn.ModuleList",
            got="layers in tiles" if tiled else "; ".join(reasons[:3]),
            hint="leave zeroth.tile() out: the ranks share the matrices instead"
            if tiled
            else 'name layers: corrections={"blocks.*.up": "column", "blocks.*.down": "row"}',
        )
    return TensorPlan(tuple(shares.values()), tuple(attributes))


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The units of the model; a list of one block is a list of blocks here, too."""
    found = _units.find_units(model)
    if found:
        return found
    alone: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{other}.") for other in alone):
            members = {f"{path}.{name}": member for name, member in module.named_children()}
            alone |= {
                name: member for name, member in members.items() if sum(is_linear(one) for one in member.modules()) >= 2
            }
    return alone


def _own_plan(model: nn.Module) -> dict[str, Role]:
    """Of transformers, by patterns of names in the whole model."""
    own: dict[str, Role] = {}
    for path, module in model.named_modules():
        styles = getattr(getattr(module, "config", None), "base_model_tp_plan", None)
        if (
            styles
            and getattr(module, "base_model_prefix", None) is not None
            and hasattr(module, "get_input_embeddings")
        ):
            base = getattr(module, module.base_model_prefix, None)
            inner = module.base_model_prefix + "." if isinstance(base, nn.Module) and base is not module else ""
            prefix = f"{path}." if path else ""
            for pattern, style in styles.items():
                if style in _LEFT_TO_THE_RULES:
                    continue
                own[f"{prefix}{inner}{pattern}"] = _OF_TRANSFORMERS.get(style, "whole")
            return own
    return own


def _role_in(own: Mapping[str, Role], name: str) -> Role | None:
    return next((role for pattern, role in own.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _roles_of(module: nn.Module, path: str, own: Mapping[str, Role]) -> dict[str, Role | None]:
    return {f"{path}.{name}": _role_in(own, f"{path}.{name}") for name, _ in module.named_modules()}


def is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()


def _outermost_attentions(block: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in block.named_children():
        inside = f"{path}.{name}"
        if is_attention(child) and any(is_linear(one) for one in child.modules()):
            yield inside, child
        else:
            yield from _outermost_attentions(child, inside)


def _of_block(
    model: nn.Module,
    path: str,
    block: nn.Module,
    ranks: int,
    own: Mapping[str, Role],
    adapters: Mapping[str, Adapter],
) -> tuple[list[list[Found]], dict[str, Share]]:
    """What is in each of its attentions, and what is beside them."""
    attentions = [
        list(of_attention(model, name, attention, ranks, _roles_of(attention, name, own), adapters))
        for name, attention in _outermost_attentions(block, path)
    ]
    seen = {name for attention in attentions for name, _, _ in attention}
    linears = {name: module for name, module in linears_of(block, path).items() if name not in seen}
    return attentions, dict(_of_mlp(path, block, linears, ranks, own, adapters))


def _counts_of(
    model: nn.Module, attention: list[Found], found: Mapping[str, Share], shares: dict[str, Share]
) -> list[tuple[str, str, int]]:
    """Attributes to change. Where a correction leaves a layer whole that gives or takes heads, all that there is of the
    attention stays whole, and so do its counts of heads."""
    names = [name for name, _, _ in attention]
    asked = [
        name for name in names if found[name].role in ("column", "row") and shares[name].role not in ("column", "row")
    ]
    if not asked:
        return [count for _, _, counts in attention for count in counts]
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules:  # a parameter with a value a head
            del shares[name]
        elif shares[name].role != "whole":
            shares[name] = Share(name, "whole", why=f"{asked[0]} is whole")
    return []


def _without_shortcuts(model: nn.Module, shares: Mapping[str, Share]) -> list[tuple[str, str, int]]:
    """torch's encoder layers give their matrices to a kernel of their own in evaluations, past the layers. Without the
    number of their activation they do not."""
    return [
        (path, "activation_relu_or_gelu", 0)
        for path, module in model.named_modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        and any(share.role in ("column", "row") and share.name.startswith(f"{path}.") for share in shares.values())
    ]


def _leave(roles: dict[str, Share], why: str) -> None:
    """Nothing is shared after all."""
    for name, share in roles.items():
        if share.role in ("column", "row"):
            roles[name] = Share(name, "whole", why=why)


def _common_holder(block: nn.Module, names: list[str], path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters, besides those of linear layers, of the smallest module of the block that holds the layers."""
    if not names:
        return
    inside = [plain_name(name).removeprefix(f"{path}.").split(".")[:-1] for name in names]
    common = list(itertools.takewhile(lambda parts: len({*parts}) == 1, zip(*inside, strict=False)))
    holder = ".".join(parts[0] for parts in common)
    for name, module in block.get_submodule(holder).named_modules():
        if not is_linear(module):
            for own, parameter in module.named_parameters(recurse=False):
                yield ".".join(part for part in (path, holder, name, own) if part), parameter


def _of_mlp(
    path: str,
    block: nn.Module,
    linears: Mapping[str, nn.Module],
    ranks: int,
    own: Mapping[str, Role],
    adapters: Mapping[str, Adapter],
) -> Iterator[tuple[str, Share]]:
    """The block's size is what the first layer takes. A row takes what a column gives: whole, or half of it (gated,
    both halves in one matrix)."""
    if not linears:
        return
    names = list(linears)
    size = inputs_of(linears[names[0]])
    given: dict[int, list[str]] = {}
    roles: dict[str, Share] = {}
    for name, module in linears.items():
        inputs, outputs = inputs_of(module), outputs_of(module)
        closes = [width for width in (inputs, 2 * inputs) if given.get(width)]
        said = _role_in(own, plain_name(name))
        if said == "whole":
            roles[name] = Share(name, "whole", why="the model's own plan")
        elif closes and outputs == size and (inputs != size or name == names[-1]) and said in (None, "row"):
            roles[name] = Share(name, "row")
            for column in given.pop(closes[0]):
                parts = closes[0] // inputs
                roles[column] = Share(column, "column", parts=parts)
        elif inputs == size:
            given.setdefault(outputs, []).append(name)
            holder = type(block.get_submodule(name.removeprefix(path).lstrip(".").rpartition(".")[0])).__name__
            why = f"no layer takes its outputs back, nor has {holder} a name with attention or attn in it"
            roles[name] = Share(name, "whole", why=why)
        else:
            roles[name] = Share(name, "whole", why="takes neither the block's size nor a column's")
    columns = [share for share in roles.values() if share.role == "column"]
    widths = {outputs_of(linears[share.name]) // share.parts for share in columns} - {size}
    for name, module in linears.items():
        if roles[name].role == "whole" and inputs_of(module) in widths:
            _leave(roles, f"{name} takes the outputs of a column, too")
    for name, parameter in _common_holder(block, [share.name for share in columns], path):
        if widths & set(parameter.shape):
            _leave(roles, f"{name} is of all that the columns give")
    if problem := problem_of(linears, adapters):
        _leave(roles, problem)
    for name, share in list(roles.items()):
        width = inputs_of(linears[name]) if share.role == "row" else outputs_of(linears[name]) // share.parts
        if share.role in ("column", "row") and width < ranks:
            roles[name] = Share(name, "whole", why=f"{width} are fewer than {ranks} ranks")
    yield from roles.items()


def _vocabulary(model: nn.Module, ranks: int) -> Iterator[Share]:
    """The embedding of tokens, and the head that gives logits over them."""
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    names = {id(module): name for name, module in model.named_modules()}
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", head)
    if tied and not (isinstance(embedding, nn.Embedding) and is_linear(head)):
        for name, module in model.named_modules(remove_duplicate=False):
            if module in (embedding, head):
                yield Share(name, "whole", why="the embedding and the head are one matrix, and one has an adapter")
        return
    if reader := _reader_of_weights(model, {id(embedding), id(head)}):
        for name, module in model.named_modules(remove_duplicate=False):
            if module in (embedding, head):
                yield Share(name, "whole", why=f"{reader} reads weights, which would be a part of the vocabulary")
        return
    if isinstance(embedding, nn.Embedding) and id(embedding) in names:
        # Encoders and decoders may have modules of their own around one table.
        around = [
            (name, module)
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, nn.Embedding) and module.weight is embedding.weight
        ]
        why = next((_not_shared(module) for _, module in around if _not_shared(module)), "")
        for name, _ in around:
            yield Share(name, "whole", why=why) if why or embedding.num_embeddings < ranks else Share(name, "vocab")
        if why and getattr(head, "weight", None) is embedding.weight:
            return
    if head is not None and id(head) in names and is_linear(head) and outputs_of(head) >= ranks:
        yield Share(names[id(head)], "head")


def _reader_of_weights(model: nn.Module, tables: set[int]) -> str:
    """The class of a module outside of blocks whose forward, which is none of transformers' or torch's, may compute
    with a table without calling it: F.linear(hidden, self.embedding.weight). "" if there is none."""
    blocks = blocks_of(model)
    for path, module in model.named_modules():
        inside = any(path == block or path.startswith(f"{block}.") for block in blocks)
        forward = type(module).forward
        known = (forward.__module__ or "").startswith(("torch.", "transformers.", "peft.", "zeroth."))
        if inside or known or id(module) in tables:
            continue
        with contextlib.suppress(OSError, TypeError):  # no source
            if ".weight" in inspect.getsource(forward):
                return type(module).__name__
    return ""


def _not_shared(embedding: nn.Embedding) -> str:
    """Why ranks cannot share its rows; "" if they can: its forward is that of nn.Embedding, or calls it."""
    if embedding.max_norm is not None:
        return "it changes its rows (max_norm)"
    forward = type(embedding).forward
    with contextlib.suppress(OSError, TypeError):  # no source
        if forward is nn.Embedding.forward or "super().forward(" in inspect.getsource(forward):
            return ""
    return f"{type(embedding).__name__} computes more than a look-up"


def _correct(
    model: nn.Module, shares: dict[str, Share], pattern: str, role: Role, adapters: Mapping[str, Adapter]
) -> None:
    if role not in ROLES:
        refuse(
            "there is no such way to share a module", where=_WHERE, which=pattern, expected=", ".join(ROLES), got=role
        )
    names: dict[int, list[str]] = {}  # of each module
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    met = [own for own in names.values() if any(fnmatch.fnmatchcase(name, pattern) for name in own)]
    hit = [name for own in met for name in own if name in shares or name == own[0]]
    if not hit:
        refuse(
            "a correction of the plan meets no module",
            where=_WHERE,
            which=pattern,
            expected="a name of the model, with * for parts",
            got=role,
        )
    for name in dict.fromkeys(base_name(name, adapters) for name in hit):
        before = shares.get(name, Share(name, "whole"))
        shares[name] = dataclasses.replace(before, role=role, why="" if role != "whole" else "asked for")
