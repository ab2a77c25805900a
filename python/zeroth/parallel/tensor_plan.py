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
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import nn

from zeroth import _units
from zeroth.parallel._refuse import refuse

__all__ = ["ROLES", "Role", "Share", "TensorPlan", "find_plan"]

Role = Literal["column", "row", "vocab", "head", "heads", "summed", "whole"]
ROLES: tuple[Role, ...] = ("column", "row", "vocab", "head", "heads", "summed", "whole")
_WHERE = "parallel.parallelize"
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_OF_TRANSFORMERS: dict[str, Role] = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "summed",
    "colwise_gather_output": "head",
    "embedding_rowwise": "vocab",
}
"""styles of tp_plan"""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """What ranks share of one module. A frozen value."""

    name: str
    """of the module"""
    role: Role
    """column: parts of the outputs; row: parts of the inputs; vocab: rows of an embedding; head: column, outputs are a
    vocabulary; heads: an embedding with a column a head; summed: whole, its gradient is a sum over the ranks; whole:
    not shared"""
    grain: int = 1
    """outputs (inputs of a row) that stay together: the size of a head"""
    heads: int = 0
    """of grain; fewer than ranks are copied to neighbours"""
    parts: int = 1
    """equal blocks of the outputs, each shared like this: query, key and value in one matrix"""
    why: str = ""
    """for what is not shared"""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlan:
    """How ranks share the modules of a model."""

    shares: tuple[Share, ...]
    attributes: tuple[tuple[str, str, int], ...] = ()
    """(module, attribute, whole value): counts of heads in modules, which are divided by the ranks"""

    def text(self, ranks: int) -> str:
        """A table: layers that differ in their number only are one row."""
        rows: dict[tuple[str, ...], int] = {}
        for share in self.shares:
            grain = f"{share.heads} x {share.grain}" if share.heads else ""
            blocks = f"{share.parts} blocks" if share.parts > 1 else ""
            name, why = (re.sub(r"\.\d+(?=\.)", ".*", text) for text in (share.name, share.why))
            row = (name, share.role, grain or blocks, why)
            rows[row] = rows.get(row, 0) + 1
        cells = [("module", "shared", "heads", "times", "")]
        cells += [(name, role, grain, str(count), why) for (name, role, grain, why), count in rows.items()]
        widths = [max(len(row[column]) for row in cells) for column in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
        ]
        return "\n".join([f"tensor parallelism over {ranks} ranks:", *lines])


def is_linear(module: nn.Module) -> bool:
    """nn.Linear or transformers' Conv1D itself: a class of their own might compute more."""
    forward = type(module).forward
    return forward is nn.Linear.forward or (
        type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
    )


def inputs_of(module: nn.Module) -> int:
    """Of a linear layer."""
    return int(module.weight.shape[1 if isinstance(module, nn.Linear) else 0])  # type: ignore[index]


def outputs_of(module: nn.Module) -> int:
    """Of a linear layer."""
    return int(module.weight.shape[0 if isinstance(module, nn.Linear) else 1])  # type: ignore[index]


def find_plan(model: nn.Module, ranks: int, corrections: Mapping[str, Role] | None = None) -> TensorPlan:
    """The plan for a model. `corrections`: roles by names of modules, with * for any part of a name; they come before
    the model's own plan and the rules. Raises Error MODEL for heads that the ranks cannot share."""
    shares: dict[str, Share] = {}
    attributes: list[tuple[str, str, int]] = []
    own = _own_plan(model)
    for path, block in _blocks(model).items():
        for name, share, counts in _of_block(model, path, block, ranks, own):
            shares[name] = share
            attributes += counts
    for share in _vocabulary(model, ranks):
        shares[share.name] = share
    for pattern, role in (corrections or {}).items():
        _correct(model, shares, pattern, role)
    if not any(share.role in ("column", "row") for share in shares.values()):
        reasons = sorted({f"{share.name}: {share.why}" for share in shares.values() if share.why})
        refuse(
            "the plan shares no layer of the model",
            code="MODEL",
            where=_WHERE,
            which=type(model).__name__,
            expected="blocks with nn.Linear or Conv1D in an nn.ModuleList",
            got="; ".join(reasons[:3]),
            hint='name layers: corrections={"blocks.*.up": "column", "blocks.*.down": "row"}',
        )
    return TensorPlan(tuple(shares.values()), tuple(attributes))


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
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
                own[f"{prefix}{inner}{pattern}"] = _OF_TRANSFORMERS.get(style, "whole")
            return own
    return own


def _role_in(own: Mapping[str, Role], name: str) -> Role | None:
    return next((role for pattern, role in own.items() if fnmatch.fnmatchcase(name, pattern)), None)


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()


def _outermost_attentions(block: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in block.named_children():
        inside = f"{path}.{name}"
        if _is_attention(child) and any(is_linear(one) for one in child.modules()):
            yield inside, child
        else:
            yield from _outermost_attentions(child, inside)


Found = tuple[str, Share, list[tuple[str, str, int]]]


def _of_block(model: nn.Module, path: str, block: nn.Module, ranks: int, own: Mapping[str, Role]) -> Iterator[Found]:
    seen: set[str] = set()
    for name, attention in _outermost_attentions(block, path):
        for found in _of_attention(model, name, attention, ranks, own):
            seen.add(found[0])
            yield found
    linears = {
        f"{path}.{name}": module
        for name, module in block.named_modules()
        if is_linear(module) and f"{path}.{name}" not in seen
    }
    for name, share in _of_mlp(linears, ranks, own):
        yield name, share, []


def _of_mlp(linears: Mapping[str, nn.Module], ranks: int, own: Mapping[str, Role]) -> Iterator[tuple[str, Share]]:
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
        said = _role_in(own, name)
        if said == "whole":
            roles[name] = Share(name, "whole", why="the model's own plan")
        elif closes and outputs == size and (inputs != size or name == names[-1]) and said in (None, "row"):
            roles[name] = Share(name, "row")
            for column in given.pop(closes[0]):
                parts = closes[0] // inputs
                roles[column] = Share(column, "column", parts=parts)
        elif inputs == size:
            given.setdefault(outputs, []).append(name)
            roles[name] = Share(name, "whole", why="no layer takes its outputs back")
        else:
            roles[name] = Share(name, "whole", why="takes neither the block's size nor a column's")
    for name, share in list(roles.items()):
        width = inputs_of(linears[name]) if share.role == "row" else outputs_of(linears[name]) // share.parts
        if share.role in ("column", "row") and width < ranks:
            roles[name] = Share(name, "whole", why=f"{width} are fewer than {ranks} ranks")
    yield from roles.items()


def _of_attention(
    model: nn.Module, path: str, attention: nn.Module, ranks: int, own: Mapping[str, Role]
) -> Iterator[Found]:
    linears = {f"{path}.{name}": one for name, one in attention.named_modules() if is_linear(one)}
    names = list(linears)
    heads, kv_heads, head_size = _heads(model, path, attention)
    width = heads * head_size
    rows = [name for name in names if _role_in(own, name) == "row"] or names[-1:]
    row = linears[rows[0]]
    problem = ""
    if inputs_of(row) != width:
        problem = f"{rows[0]} takes {inputs_of(row)}, which is not {heads} heads of {head_size}"
    shares: list[Share] = [Share(name, "row", head_size, heads) for name in rows]
    for name in names:
        if name in rows:
            continue
        outputs = outputs_of(linears[name])
        if outputs == width and kv_heads == heads or outputs == width and not _is_key_or_value(name):
            shares.append(Share(name, "column", head_size, heads))
        elif outputs == kv_heads * head_size:
            shares.append(Share(name, "column", head_size, kv_heads))
        elif outputs == 3 * width:
            interleaved = "query_key_value" in name  # [heads, 3, size]: a head's three lie together
            shares.append(Share(name, "column", (3 if interleaved else 1) * head_size, heads, 1 if interleaved else 3))
        elif outputs == 2 * width:
            shares.append(Share(name, "column", head_size, heads, 2))
        else:
            problem = problem or f"{name} gives {outputs}, which are not {heads} or {kv_heads} heads of {head_size}"
    columns = {share.name.rpartition(".")[0] for share in shares if share.role == "column"}
    inside = {name: model.get_submodule(name) for name in sorted(columns)}
    summed, blocked = _others(inside, head_size, width, kv_heads * head_size)
    problem = problem or blocked
    if problem:
        for name in names:
            yield name, Share(name, "whole", why=problem), []
        return
    _require_shareable(path, heads, kv_heads, ranks)
    counts = _counts(path, attention, heads, kv_heads, width, ranks)
    for number, share in enumerate(sorted(shares, key=lambda one: names.index(one.name))):
        yield share.name, share, counts if number == 0 else []
    for name in summed:
        yield name, Share(name, "summed"), []
    for parent, holder in inside.items():
        for name, module in holder.named_modules():
            if isinstance(module, nn.Embedding) and module.embedding_dim == heads:
                yield f"{parent}.{name}", Share(f"{parent}.{name}", "heads", 1, heads), []


def _is_key_or_value(name: str) -> bool:
    last = name.rsplit(".", 1)[-1].lower()
    return last.startswith(("k", "v"))


def _first(holder: Any, names: tuple[str, ...]) -> int:
    return next((int(getattr(holder, name)) for name in names if isinstance(getattr(holder, name, None), int)), 0)


def _heads(model: nn.Module, path: str, attention: nn.Module) -> tuple[int, int, int]:
    """Query heads, key and value heads, size of a head: from the attention's own attributes, else its configuration."""
    holders: list[Any] = list(attention.modules())
    config = next((one.config for one in holders if hasattr(one, "config")), getattr(model, "config", None))
    holders.append(config)
    queries = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_query_heads")
    keys = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
    sizes = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv")
    heads = next((found for holder in holders if (found := _first(holder, queries))), 0)
    if heads == 0:
        refuse(
            "an attention does not say how many heads it has",
            code="MODEL",
            where=_WHERE,
            which=f"{path}, a {type(attention).__name__}",
            expected="an attribute " + ", ".join(queries),
            hint='say corrections={"' + path + '.*": "whole"} to leave it whole',
        )
    kv_heads = next((found for holder in holders if (found := _first(holder, keys))), heads)
    size = next((found for holder in holders if (found := _first(holder, sizes))), 0)
    if size == 0:
        linears = [one for one in attention.modules() if is_linear(one)]
        size = inputs_of(linears[-1]) // heads
    return heads, kv_heads, size


def _require_shareable(path: str, heads: int, kv_heads: int, ranks: int) -> None:
    fits = [str(n) for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return
    refuse(
        "the heads of an attention do not divide by the ranks that share them",
        code="MODEL",
        where=_WHERE,
        which=path,
        expected=f"tp of {', '.join(fits)}",
        got=f"tp={ranks} for {heads} heads, {kv_heads} of keys and values",
    )


def _others(holders: Mapping[str, nn.Module], head_size: int, *widths: int) -> tuple[list[str], str]:
    """Modules beside the columns: those that work on each head by itself, and a reason if one needs all heads."""
    summed: list[str] = []
    for path, holder in holders.items():
        for name, module in holder.named_modules():
            own = list(module.parameters(recurse=False))
            if not own or is_linear(module) or isinstance(module, nn.Embedding):
                continue
            if all(one.dim() == 1 and one.shape[0] == head_size for one in own) and head_size not in widths:
                summed.append(f"{path}.{name}" if name else path)
            elif any(size in widths for one in own for size in one.shape):
                return [], f"{path}.{name} computes over all heads"
    return summed, ""


def _counts(
    path: str, attention: nn.Module, heads: int, kv_heads: int, width: int, ranks: int
) -> list[tuple[str, str, int]]:
    """Attributes of the attention by which it cuts its tensors, and what they are on one rank."""
    local, local_kv = heads // ranks, max(kv_heads // ranks, 1)
    of_names = {
        **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "n_head", "num_query_heads"), (heads, local)),
        **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), (kv_heads, local_kv)),
        **dict.fromkeys(("split_size", "inner_dim", "all_head_size"), (width, width // ranks)),
        "num_key_value_groups": (heads // kv_heads, local // local_kv),
    }
    found: list[tuple[str, str, int]] = []
    for name, module in attention.named_modules():
        for attribute, (whole, one_rank) in of_names.items():
            if vars(module).get(attribute) == whole != one_rank:
                found.append((f"{path}.{name}" if name else path, attribute, one_rank))
    return found


def _vocabulary(model: nn.Module, ranks: int) -> Iterator[Share]:
    """The embedding of tokens, and the head that gives logits over them."""
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    names = {id(module): name for name, module in model.named_modules()}
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


def _not_shared(embedding: nn.Embedding) -> str:
    """Why ranks cannot share its rows; "" if they can: its forward is that of nn.Embedding, or calls it."""
    if embedding.max_norm is not None:
        return "it changes its rows (max_norm)"
    forward = type(embedding).forward
    with contextlib.suppress(OSError, TypeError):  # no source
        if forward is nn.Embedding.forward or "super().forward(" in inspect.getsource(forward):
            return ""
    return f"{type(embedding).__name__} computes more than a look-up"


def _correct(model: nn.Module, shares: dict[str, Share], pattern: str, role: Role) -> None:
    if role not in ROLES:
        refuse(
            "there is no such way to share a module", where=_WHERE, which=pattern, expected=", ".join(ROLES), got=role
        )
    hit = [name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, pattern)]
    if not hit:
        refuse(
            "a correction of the plan meets no module",
            where=_WHERE,
            which=pattern,
            expected="a name of the model, with * for parts",
            got=role,
        )
    for name in hit:
        before = shares.get(name, Share(name, "whole"))
        shares[name] = dataclasses.replace(before, role=role, why="" if role != "whole" else "asked for")
