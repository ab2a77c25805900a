"""What split_sequence() refuses: groups, models and arguments that do not fit, by name and before anything is
changed."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import conv
from torch.nn.modules.batchnorm import _BatchNorm

from zeroth import _C
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.hf_attention import METHODS
from zeroth.parallel.sample import IGNORED
from zeroth.parallel.vocabulary import require_in_vocabulary

__all__ = [
    "ALIGNED",
    "CONSUMED",
    "SAME",
    "depends_on_length",
    "loss_type_of",
    "require_groups",
    "require_heads",
    "require_known",
    "require_model",
    "require_tokens",
]

_WHERE = "parallel.split_sequence"
SAME = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "attention_mask",
    "labels",
    "shift_labels",
    "token_type_ids",
    "cu_seq_lens_q",
    "num_items_in_batch",
)
"""arguments that ranks of a group must be given alike"""
CONSUMED = (
    "labels",
    "shift_labels",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "num_items_in_batch",
    "ignore_index",
)
"""arguments that the model itself does not get"""
_REFUSED: dict[str, str] = {
    "past_key_values": "train and evaluate whole sequences; to generate, call remove() first",
    "use_cache": "leave it out: a split model keeps no cache",
    "output_attentions": "no rank has the probabilities of all tokens",
    "output_router_logits": "the loss of a router is no sum over tokens",
    "encoder_hidden_states": "only self-attention can be split",
    "logits_to_keep": "each rank has the logits of its own tokens",
}
ALIGNED = {"ForMaskedLM", "ForTokenClassification"}
"""losses whose labels belong to the tokens themselves"""
_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def require_groups(
    group: _C.Communicator,
    method: str,
    layout: str,
    order: str,
    ulysses: _C.Communicator | None,
    ring: _C.Communicator | None,
) -> None:
    for name, value, choices in (
        ("method", method, tuple(METHODS)),
        ("layout", layout, ("contiguous", "zigzag")),
        ("order", order, ("ring", "token")),
    ):
        if value not in choices:
            refuse(f"there is no such {name}", where=_WHERE, which=name, expected=" or ".join(choices), got=value)
    if method == "ulysses" and layout != "contiguous":
        refuse(
            "Ulysses needs tokens in their order",
            where=_WHERE,
            which="layout",
            expected="contiguous",
            got=layout,
            hint="heads are equally much work anyway",
        )
    if method != "grid":
        if ulysses is not None or ring is not None:
            refuse(
                "only a grid has two axes", where=_WHERE, which="ulysses, ring", expected='method "grid"', got=method
            )
        return
    if ulysses is None or ring is None:
        refuse("a grid needs both of its axes", where=_WHERE, which="ulysses, ring", expected="two groups", got="None")
    if ulysses.size * ring.size != group.size or ring.rank * ulysses.size + ulysses.rank != group.rank:
        refuse(
            "the axes of a grid are not those of its group",
            where=_WHERE,
            who=who(group),
            which="ulysses, ring",
            expected=f"{group.size} ranks, ulysses fastest",
            got=f"rank {ulysses.rank}/{ulysses.size} of ulysses, {ring.rank}/{ring.size} of ring",
            hint='mesh.axes(["ring", "ulysses"]) is the group of mesh.axis("ring") and mesh.axis("ulysses")',
        )


def loss_type_of(model: nn.Module) -> str:
    """As transformers names it; "ForCausalLM" where it has no other one."""
    return getattr(model, "loss_type", None) or "ForCausalLM"


def depends_on_length(module: nn.Module) -> bool:
    """Whether it is a rotary embedding whose frequencies follow from the longest position."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, Mapping) else [kind]
    return any(isinstance(one, str) and ("dynamic" in one or one == "longrope") for one in kinds)


_ALONG = (nn.RNNBase, nn.RNNCellBase, _BatchNorm, nn.MultiheadAttention)


def require_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        looks = isinstance(module, _ALONG) or (
            isinstance(module, conv._ConvNd) and any(size != 1 for size in module.kernel_size)
        )
        if looks:
            refuse(
                "a layer looks along the sequence and cannot be split",
                code="MODEL",
                where=_WHERE,
                which=f"{name or 'the model'}, {type(module).__name__}",
                expected="layers that compute each token alone, and attention by transformers' interface",
                got=type(module).__name__,
                hint="keep the sequence whole (sp=1); states of linear attention can be passed with pass_state()",
            )
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        refuse(
            "a model is none of transformers",
            code="MODEL",
            where=_WHERE,
            which=type(model).__name__,
            expected="a PreTrainedModel",
            got=f"{type(model).__module__}.{type(model).__name__}",
            hint="call ulysses_attention() or ring_attention() in the model's own attention",
        )
    if getattr(config, "is_encoder_decoder", False):
        refuse(
            "a model has an encoder, whose sequence is another one",
            code="MODEL",
            where=_WHERE,
            which=type(model).__name__,
            expected="a decoder or an encoder alone",
            got="is_encoder_decoder",
        )
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        refuse(
            "layers of a type look along the sequence and cannot be split",
            code="MODEL",
            where=_WHERE,
            which=f"layer_types of {type(model).__name__}",
            expected=", ".join(sorted(_LAYER_TYPES)),
            got=", ".join(sorted(unknown)),
        )
    supports = getattr(type(model), "_can_set_attn_implementation", None)
    if supports is not None and not supports():
        refuse(
            "the attention of a model is none of transformers' attention interface",
            code="MODEL",
            where=_WHERE,
            which=type(model).__name__,
            expected="attention by transformers.AttentionInterface",
            got="an attention of its own",
        )
    kind = loss_type_of(model)
    if kind != "ForCausalLM" and kind not in ALIGNED:
        refuse(
            "the output of a model is not one of each token",
            code="MODEL",
            where=_WHERE,
            which=type(model).__name__,
            expected="a model with logits of each token: " + ", ".join(["ForCausalLM", *sorted(ALIGNED)]),
            got=kind,
            hint="split the model inside, and compute the output from SplitModel.gather()",
        )
    if getattr(config.get_text_config(), "attn_temperature_tuning", False):
        refuse(
            "an attention counts positions by itself, from the first token that it is given",
            code="MODEL",
            where=_WHERE,
            which=f"attn_temperature_tuning of {type(model).__name__}",
            expected="False",
            got="True",
        )
    if getattr(config, "output_router_logits", False):
        refuse(
            "the loss of a router is no sum over tokens",
            where=_WHERE,
            which="output_router_logits",
            expected="False",
            got="True",
        )


def require_heads(model: nn.Module, group: _C.Communicator | None) -> None:
    heads = getattr(model.config, "num_attention_heads", None)
    if group is not None and isinstance(heads, int) and heads < group.size:
        refuse(
            "there are more ranks than heads, so some would have nothing to compute",
            where=_WHERE,
            which=type(model).__name__,
            expected=f"at most {heads} ranks for {heads} heads",
            got=f"{group.size} ranks",
            hint='use method "ring", which has no limit by heads, or "grid"',
        )


def require_known(given: Mapping[str, Any], rank: str) -> None:
    for name, hint in _REFUSED.items():
        value = given.get(name)
        if value is not None and value is not False and not (isinstance(value, int) and value == 0):
            refuse(
                "a split model cannot take this argument",
                where=_WHERE,
                who=rank,
                which=name,
                expected="not given",
                got=type(value).__name__ if not isinstance(value, (bool, int)) else value,
                hint=hint,
            )
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and name not in (*SAME, *CONSUMED, *_REFUSED):
            refuse(
                "it is not known how to cut an argument",
                where=_WHERE,
                who=rank,
                which=name,
                expected=", ".join(SAME),
                got=f"a tensor of shape {list(value.shape)}",
            )
    tokens, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if (tokens is None) == (embeds is None):
        refuse(
            "a sample is either input_ids or inputs_embeds",
            where=_WHERE,
            who=rank,
            which="input_ids",
            expected="one of the two",
            got="none" if tokens is None else "both",
        )
    whole = (tokens if tokens is not None else embeds).shape[:2]  # type: ignore[union-attr]
    if len(whole) != 2 or whole[1] == 0:
        refuse(
            "a sample has no sequence", where=_WHERE, who=rank, which="input_ids", expected="[batch, tokens]", got=whole
        )
    for name in ("labels", "shift_labels", "token_type_ids"):
        value = given.get(name)
        if value is not None and value.shape != whole:
            refuse(
                "an argument is not of the whole sequence",
                where=_WHERE,
                who=rank,
                which=name,
                expected=list(whole),
                got=list(value.shape),
            )
    positions = given.get("position_ids")
    if positions is not None and positions.shape[-1] != whole[1]:
        refuse(
            "an argument is not of the whole sequence",
            where=_WHERE,
            who=rank,
            which="position_ids",
            expected=f"{whole[1]} positions",
            got=list(positions.shape),
        )


def require_tokens(model: nn.Module, given: Mapping[str, Any], rank: str) -> None:
    """Tokens and labels of the whole sample are in the vocabulary: else the ranks that have them would raise torch's
    error, and the others wait for them."""
    tokens = given.get("input_ids")
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if tokens is not None and isinstance(table, nn.Embedding):
        size = table.num_embeddings
        require_in_vocabulary(tokens, size, what="an index", where=_WHERE, who=rank, which="input_ids")
    config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    size = config.num_labels if loss_type_of(model) == "ForTokenClassification" else config.vocab_size
    for name in ("labels", "shift_labels"):
        labels = given.get(name)
        if labels is not None:
            ignored = given.get("ignore_index")
            labels = labels if ignored is None else labels.masked_fill(labels == ignored, IGNORED)
            require_in_vocabulary(labels, size, what="a label", where=_WHERE, who=rank, which=name, ignored=IGNORED)
