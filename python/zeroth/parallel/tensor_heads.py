"""How ranks share an attention: its last projection takes heads, all others give heads."""

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from zeroth.parallel._refuse import refuse
from zeroth.parallel.tensor_adapters import Adapter, linears_of, plain_name, problem_of
from zeroth.parallel.tensor_share import Role, Share, inputs_of, is_linear, outputs_of

__all__ = ["KEYS", "QUERIES", "SIZES", "Found", "of_attention"]

_WHERE = "parallel.parallelize"
_ENDS = {"o_proj", "out_proj", "o", "wo", "dense", "c_proj", "proj", "out", "output", "to_out", "out_lin"}
"""names of last projections"""
QUERIES = ("num_attention_heads", "num_heads", "n_heads", "n_head", "num_query_heads")
KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "d_kv")
"""names of numbers of heads, and of the size of one, in an attention or its configuration"""
Found = tuple[str, Share, list[tuple[str, str, int]]]
"""name of a module, its share, and attributes to change: (module, attribute, value on a rank)"""


def of_attention(
    model: nn.Module,
    path: str,
    attention: nn.Module,
    ranks: int,
    roles: Mapping[str, Role | None],
    adapters: Mapping[str, Adapter],
) -> Iterator[Found]:
    linears = linears_of(attention, path)
    names = list(linears)
    heads, kv_heads, head_size = _heads(model, attention)
    problem = _needs_all_heads(attention) if heads else f"it has no number of heads by a name of {', '.join(QUERIES)}"
    problem = problem or problem_of(names, adapters)
    if problem:
        for name in names:
            yield name, Share(name, "whole", why=problem), []
        return
    width = heads * head_size
    rows = [name for name in names if roles.get(plain_name(name)) == "row"] or [_last_of(names)]
    row = linears[rows[0]]
    queries = any(outputs_of(linears[name]) == width for name in names if name not in rows)
    if len(rows) == len(names):
        problem = f"no layer of it gives {rows[0]} its heads"
    elif inputs_of(row) != width:
        problem = f"{rows[0]} takes {inputs_of(row)}, which is not {heads} heads of {head_size}"
    shares: list[Share] = [Share(name, "row", head_size, heads) for name in rows]
    for name in names:
        if name in rows:
            continue
        outputs = outputs_of(linears[name])
        if outputs == width and kv_heads == heads or outputs == width and not _is_key_or_value(plain_name(name)):
            shares.append(Share(name, "column", head_size, heads))
        elif outputs == kv_heads * head_size:
            shares.append(Share(name, "column", head_size, kv_heads))
        elif outputs == 3 * width:
            interleaved = "query_key_value" in name  # [heads, 3, size]: a head's three lie together
            shares.append(Share(name, "column", (3 if interleaved else 1) * head_size, heads, 1 if interleaved else 3))
        elif outputs == 2 * width and queries and kv_heads == heads:
            shares.append(Share(name, "column", head_size, heads, 2))
        else:
            problem = problem or f"{name} gives {outputs}, which are not {heads} or {kv_heads} heads of {head_size}"
    columns = {plain_name(share.name).rpartition(".")[0] for share in shares if share.role == "column"}
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
        for name, parameter in holder.named_parameters(recurse=False):
            if tuple(parameter.shape) == (heads,):
                yield f"{parent}.{name}", Share(f"{parent}.{name}", "heads", 1, heads), []


def _last_of(names: list[str]) -> str:
    """The projection that ends an attention, by its name; else the one that was made last."""
    ends = [name for name in names if plain_name(name).rpartition(".")[2] in _ENDS]
    return ends[0] if len(ends) == 1 else names[-1]


def _is_key_or_value(name: str) -> bool:
    last = name.rsplit(".", 1)[-1].lower()
    return last.startswith(("k", "v"))


def _first(holder: Any, names: tuple[str, ...]) -> int:
    return next((int(getattr(holder, name)) for name in names if isinstance(getattr(holder, name, None), int)), 0)


def _needs_all_heads(attention: nn.Module) -> str:
    """Why it cannot run with some of its heads; "" if it can."""
    takes = inspect.signature(attention.forward).parameters
    makes_its_own = any(isinstance(one, nn.Embedding) for one in attention.modules())
    if "alibi" in takes and not makes_its_own and getattr(_config_of(attention), "alibi", None) is not False:
        return "it is given alibi of all heads"
    bias = takes.get("position_bias")
    if bias is not None and not makes_its_own and bias.default is inspect.Parameter.empty:
        return "it is given position_bias of all heads"
    if any(isinstance(one, nn.MultiheadAttention) for one in attention.modules()):
        return "nn.MultiheadAttention multiplies by its matrices without a call of a layer"
    if type(attention).__name__ == "CodeGenAttention":
        return "its matrix has the heads of four old accelerators, one after the other"
    return ""


def _config_of(attention: nn.Module) -> Any:
    return next((one.config for one in attention.modules() if hasattr(one, "config")), None)


def _heads(model: nn.Module, attention: nn.Module) -> tuple[int, int, int]:
    """Query heads, key and value heads, size of a head: from the attention's own attributes, else its configuration.
    Zeros if neither says so."""
    holders: list[Any] = list(attention.modules())
    holders.append(_config_of(attention) or getattr(model, "config", None))
    heads = next((found for holder in holders if (found := _first(holder, QUERIES))), 0)
    if heads == 0:
        return 0, 0, 0
    kv_heads = next((found for holder in holders if (found := _first(holder, KEYS))), heads)
    size = next((found for holder in holders if (found := _first(holder, SIZES))), 0)
    if size == 0:
        linears = list(linears_of(attention, "").values())
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
        **dict.fromkeys(QUERIES, (heads, local)),
        **dict.fromkeys(KEYS, (kv_heads, local_kv)),
        **dict.fromkeys(("split_size", "inner_dim", "all_head_size"), (width, width // ranks)),
        "num_key_value_groups": (heads // kv_heads, local // local_kv),
    }
    with contextlib.suppress(OSError, TypeError):  # no source
        cuts = re.findall(r"\.(?:view|reshape)\([^()]*self\.(\w+)\)", inspect.getsource(type(attention).forward))
        of_names |= dict.fromkeys(cuts, (width, width // ranks))  # [batch, tokens, heads x size], as self.embed_dim
    found: list[tuple[str, str, int]] = []
    for name, module in attention.named_modules():
        for attribute, (whole, one_rank) in of_names.items():
            if vars(module).get(attribute) == whole != one_rank:
                found.append((f"{path}.{name}" if name else path, attribute, one_rank))
    return found
