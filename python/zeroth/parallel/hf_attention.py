"""Attention of split sequences behind transformers' attention interface: one registration for all models.

A model's configuration holds the name of its attention as a string. Here that string is a `BoundName`, which knows the
model's groups: two models of one process may have others, nothing is global but two functions.

    configuration -> BoundName("zeroth_ulysses") -> SequenceBinding: groups, method, the sample of this forward
    mask of a layer type -> SplitMask: what queries see, in positions of the whole sequence, and who has them
"""

import dataclasses
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.parallel.blocks import BlockRule
from zeroth.parallel.dense import dense_attention
from zeroth.parallel.grid import grid_attention
from zeroth.parallel.layout import SequenceLayout
from zeroth.parallel.masks import Index, SequenceMask
from zeroth.parallel.ring import ring_attention
from zeroth.parallel.sample import Sample
from zeroth.parallel.ulysses import ulysses_attention

__all__ = ["BoundName", "METHODS", "SequenceBinding", "SplitMask", "bind", "register"]

METHODS = {"ulysses": "zeroth_ulysses", "ring": "zeroth_ring", "grid": "zeroth_grid"}
"""name in transformers of each method"""
_WHERE = "parallel.split_sequence"


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class SequenceBinding:
    """A model's groups. Its forward changes `sample` and `calls`."""

    method: str
    group: _C.Communicator
    order: str
    ulysses: _C.Communicator | None = None
    """axes of a grid"""
    ring: _C.Communicator | None = None
    sample: Sample | None = None
    """of the forward that runs"""
    calls: int = 0
    """of attention in this forward"""


class BoundName(str):
    """The name of an attention in a configuration, with the model's binding. Copies, pickled or deep, are plain
    names."""

    binding: SequenceBinding

    def __new__(cls, name: str, binding: SequenceBinding) -> "BoundName":
        self = super().__new__(cls, name)
        self.binding = binding
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return str(self)

    def __copy__(self) -> str:
        return str(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[str], tuple[str]]:
        return str, (str.__str__(self),)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SplitMask:
    """Stands where a model expects the mask of its attention; layers pass it on. It is not a tensor: transformers
    takes it for a prepared mask of four dimensions."""

    mask: SequenceMask
    layout: SequenceLayout
    outer: SequenceLayout
    bias: torch.Tensor | None = None

    @property
    def ndim(self) -> int:
        return 4

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 1, self.layout.length, self.layout.length)


def _binding_of(config: Any) -> SequenceBinding:
    name = config._attn_implementation
    if not isinstance(name, BoundName):
        refuse(
            "a model has the name of a split attention, but no group",
            where=_WHERE,
            which=str(name),
            expected="a model that was given to split_sequence()",
            got=f"a configuration or a copy of one: {type(config).__name__}",
            hint="call zeroth.parallel.split_sequence(model, group)",
        )
    return name.binding


def _vmapped(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of single indices as one of tables of them, for masks that a model composes of its own functions."""
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=dims, out_dims=0)
    every = function

    def of_tables(b: Index, h: Index, q: Index, k: Index) -> torch.Tensor:
        from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

        with TransformGetItemToIndex():
            return every(b.flatten(), h.flatten(), q.flatten(), k.flatten())

    return of_tables


def split_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    config: Any = None,
    **_: Any,
) -> SplitMask:
    """The mask function of transformers: as sdpa_mask(), but without a matrix, and over the whole sequence."""
    from transformers import masking_utils

    if isinstance(attention_mask, SplitMask):
        return attention_mask
    sample = _binding_of(config).sample
    if sample is None or kv_length != sample.layout.length:
        refuse(
            "a mask is made outside the forward of the split model, or of another sequence",
            where=_WHERE,
            which=type(config).__name__,
            expected="a call of the model that was given to split_sequence()",
            got=f"{kv_length} keys",
        )
    causal: Any = masking_utils.causal_mask_function
    bidirectional: Any = masking_utils.bidirectional_mask_function
    plain_window = allow_is_causal_skip and local_size is not None and kv_length < local_size
    if mask_function is causal or plain_window:
        mask = SequenceMask.causal()
    elif mask_function is bidirectional:
        mask = SequenceMask()
    else:
        mask = SequenceMask(functions=(_vmapped(mask_function) if use_vmap else mask_function,), batch=batch_size)
    if attention_mask is not None and not bool(attention_mask.all()):
        mask = mask & SequenceMask.keys(attention_mask.bool())
    if sample.documents is not None:
        mask = mask & SequenceMask.documents(sample.documents)
    return SplitMask(mask, sample.layout, sample.outer)


_UNKNOWN = {"s_aux", "position_bias", "head_mask", "cache", "block_mask", "layer_head_mask"}
"""arguments that would change the result"""


def split_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers. query [B, H, n, D], key [B, K, n, D], value [B, K, n, E] of this rank's
    tokens -> ([B, n, H, E], None)."""
    binding = _binding_of(module.config)
    binding.calls += 1
    layer = f"{type(module).__name__} {getattr(module, 'layer_idx', '')}".strip()
    for name in _UNKNOWN:
        if more.get(name) is not None:
            refuse(
                "an attention has an argument that no split attention knows",
                where=_WHERE,
                which=f"{name} of {layer}",
                expected="scaling, softcap, dropout and a mask",
                got=name,
            )
    if not isinstance(attention_mask, SplitMask):
        refuse(
            "an attention has a mask that was not made for a split sequence",
            where=_WHERE,
            which=layer,
            expected="the mask that the model makes with transformers.masking_utils",
            got=type(attention_mask).__name__,
            hint="only self-attention of all tokens can be split; pass masks to the model that was split",
        )
    if torch.is_autocast_enabled(query.device.type):  # as torch does for its own attention
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    rule = BlockRule(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=attention_mask.mask,
        softcap=softcap,
        bias=attention_mask.bias,
        dropout_p=dropout,
    )
    out = _attend(binding, attention_mask, query, key, value, rule)
    return out.transpose(1, 2).contiguous(), None


def _attend(
    binding: SequenceBinding,
    split: SplitMask,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rule: BlockRule,
) -> torch.Tensor:
    layout = split.layout
    if binding.method == "ulysses":

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = None) -> torch.Tensor:
            return dense_attention(q, k, v, dataclasses.replace(rule, bias=bias))

        return ulysses_attention(q, k, v, attend, binding.group, lengths=layout.lengths, bias=rule.bias, grouped=True)
    more: dict[str, Any] = {
        "mask": rule.mask,
        "bias": rule.bias,
        "softcap": rule.softcap,
        "dropout_p": rule.dropout_p,
    }
    if binding.method == "ring":
        return ring_attention(q, k, v, binding.group, False, rule.scale, layout, binding.order, **more)  # type: ignore[arg-type]
    assert binding.ulysses is not None and binding.ring is not None
    return grid_attention(
        q,
        k,
        v,
        binding.ulysses,
        binding.ring,
        False,
        rule.scale,
        split.outer,
        binding.order,  # type: ignore[arg-type]
        lengths=layout.lengths,
        **more,
    )


def register() -> None:
    """Makes the names known to transformers."""
    import transformers

    for name in METHODS.values():
        transformers.AttentionInterface.register(name, split_attention)
        transformers.AttentionMaskInterface.register(name, split_mask)


def bind(model: nn.Module, name: BoundName) -> list[tuple[Any, str]]:
    """Gives all configurations of the model the name; returns them with their old ones."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            configs.setdefault(id(config), config)
    for config in configs.values():
        if isinstance(config._attn_implementation, BoundName):
            refuse(
                "a model is split already, or shares its configuration with one that is",
                where=_WHERE,
                which=type(model).__name__,
                expected="a model that is whole",
                got=str(config._attn_implementation),
                hint="call remove() of what split_sequence() returned, or give each model a configuration of its own",
            )
    before = [(config, config._attn_implementation) for config in configs.values()]
    for config in configs.values():
        config._attn_implementation = name
    return before
