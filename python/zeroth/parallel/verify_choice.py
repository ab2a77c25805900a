"""Which parts of a model are verified after it was split: those with code of no family that the tests cover."""

import functools
from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["OF_SEQUENCES", "OF_TENSORS", "foreign_code"]

OF_TENSORS = frozenset(
    "bart bert biogpt bloom codegen cohere distilbert falcon gemma gemma2 gemma3 glm4 gpt2 gpt_bigcode gpt_neox "
    "gpt_oss gptj granite llama llama4 mistral mixtral mpt nemotron olmo olmo2 opt persimmon phi phi3 qwen2 qwen3 "
    "qwen3_moe roberta smollm3 stablelm starcoder2 t5".split()
)
"""families of transformers whose layers tests share over tp"""
OF_SEQUENCES = frozenset("gemma gemma2 gpt2 llama mistral qwen2 qwen3".split())
"""families of transformers whose sequences tests split"""
_OF_TORCH = (
    nn.CrossEntropyLoss,
    nn.Dropout,
    nn.Embedding,
    nn.GELU,
    nn.Identity,
    nn.LayerNorm,
    nn.Linear,
    nn.ModuleDict,
    nn.ModuleList,
    nn.PReLU,
    nn.RMSNorm,
    nn.ReLU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
)
"""classes of torch that compute each element, or the last dimension, by itself"""
_ENCODERS = (nn.Transformer, nn.TransformerDecoder, nn.TransformerDecoderLayer, nn.TransformerEncoder,
             nn.TransformerEncoderLayer, nn.MultiheadAttention)  # fmt: skip
"""classes of torch whose layers a test shares over tp"""
_OTHERS = ("transformers.activations", "transformers.pytorch_utils", "transformers.modeling_layers", "peft.", "zeroth.")
"""modules of Python with layers that tests cover, wherever they are"""


def foreign_code(path: str, root: nn.Module, families: frozenset[str]) -> str:
    """The first module inside whose code is of none of the families of transformers, with its class; "" if there is
    none. `path`: of the root in the model."""
    for name, module in root.named_modules(prefix=path):
        kind, place = type(module), name or "the model"
        if not _is_known(module, families):
            return f"{place}, {kind.__qualname__} of {kind.__module__}"
        if hook := _own_hook(module):
            return f"{place}, a hook of {hook}"
    return ""


def _own_hook(module: nn.Module) -> str:
    """The module of Python that a hook around its forward is from, if somebody wrote it; else ""."""
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        hook = hook.func if isinstance(hook, functools.partial) else hook
        code = getattr(hook, "__module__", None) or type(hook).__module__
        if not code.startswith(("torch.", "transformers.", "peft.", "zeroth.")):
            return str(code)
    return ""


def _is_known(module: nn.Module, families: frozenset[str]) -> bool:
    kind = type(module)
    forward = vars(module).get("forward")
    if forward is not None:  # somebody's own, or tiles of this package
        tiles = isinstance(forward, functools.partial) and (forward.func.__module__ or "").startswith("zeroth.")
        return tiles and not _is_foreign(kind, families)
    return not _is_foreign(kind, families)


def _is_foreign(kind: Any, families: frozenset[str]) -> bool:
    """Whether the code of a class of modules is of none of the families."""
    if kind in _OF_TORCH or kind is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return False
    if kind in _ENCODERS:
        return families is not OF_TENSORS
    codes = (kind.__module__, getattr(kind.forward, "__module__", "") or "")
    holds = kind.forward is nn.Module.forward and codes[0].startswith("transformers.")
    return not holds and not all(_is_of(code, families) or code.startswith(_OTHERS) for code in codes)


def _is_of(code: str, families: Iterable[str]) -> bool:
    """Whether a module of Python belongs to one of the families."""
    parts = code.split(".")
    return parts[:2] == ["transformers", "models"] and len(parts) > 2 and parts[2] in families
