"""A model with repeated blocks as a chain: what runs before them, the blocks, and what runs after them."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zeroth.parallel._refuse import refuse
from zeroth.pipe import stashed
from zeroth.pipe.batches import parts_of
from zeroth.pipe.block_look import look
from zeroth.pipe.block_plan import Places
from zeroth.pipe.block_run import BlockRun, Leave, zeros_for_loose
from zeroth.pipe.chain import Layer, refuse_unused, require_range
from zeroth.pipe.placeholders import Placeholders
from zeroth.pipe.stand_in import standing_in

__all__ = ["BlockChain"]

_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
"""options with which a model of transformers returns something of every block"""
_ROUTER = "add the loss of a router in the model's blocks, or train without it"


def own_forward(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The model's forward, without the hooks of the model itself."""
    return model.forward(*args, **kwargs)


class BlockChain:
    """A Chain of the blocks that zeroth.units(model) finds. The model runs by its own forward, which is called for
    every chunk with the whole micro-batch: [Note: Stand-ins], [Note: What may pass]. So buffers have to be on all
    ranks."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, sample: Any) -> None:
        self.model = model
        self.loss_fn = loss_fn
        self.forward: Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Any] = own_forward
        """replace it to call the model otherwise, as with hooks: lambda model, args, kwargs: model(*args, **kwargs)"""
        self.notes: tuple[str, ...] = ()
        self._options: dict[str, Any] = {"use_cache": False} if _takes_cache(model) else {}
        config = getattr(model, "config", None)
        if self._options and getattr(config, "use_cache", False):
            self.notes = ("use_cache is off: a pipeline keeps no keys and values of earlier tokens",)
        _refuse_options({name: getattr(config, name, False) for name in _OUTPUTS}, "pipe.chain_of")
        args, kwargs, _ = self._arguments(_sample_of(model) if sample is None else sample)
        self._plan, copied = look(model, self.forward, args, kwargs)
        self._places = Places(model, [*self._plan.blocks, *self._plan.outside])
        self._placeholders = Placeholders(copied, self._plan.written)
        self._names = ("embedding", *self._plan.blocks, "head")
        self.uses = self._plan.uses
        refuse_unused(model, self.uses)

    @property
    def layers(self) -> tuple[Layer, ...]:
        inside: list[list[str]] = [[] for _ in self._names]
        for path, layers in self._plan.outside.items():
            for layer in layers:
                inside[layer].append(path)
        for number, path in enumerate(self._plan.blocks):
            inside[number + 1].append(path)
        return tuple(
            Layer(name=name, modules=tuple(self.model.get_submodule(path) for path in paths))
            for name, paths in zip(self._names, inside, strict=True)
        )

    def reads_batch(self, first: int, last: int) -> bool:
        return True

    def run(self, first: int, last: int, values: Any, batch: Any) -> Any:
        require_range(first, last, self._names, values)
        args, kwargs, labels = self._arguments(batch)
        value, held = stashed.unpacked(values)
        run = BlockRun(self._plan, self._placeholders, first, last, value)
        with (
            stashed.stashing(held) as stash,
            zeros_for_loose(self.model, self._plan, first, last),
            standing_in(run.calls(self._places)),
        ):
            try:
                output = self.forward(self.model, args, kwargs)
            except Leave as leave:
                return stashed.packed(leave.values, stash)
        run.require_left()
        stash.require_empty()
        return output if self.loss_fn is None else self.loss_fn(output, labels)

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Of a call of the model; and labels for loss_fn."""
        inputs, labels = (batch, None) if self.loss_fn is None else parts_of(batch)
        if not isinstance(inputs, Mapping):
            return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), dict(self._options), labels
        _refuse_options(inputs, "pipe.run")
        return (), {**inputs, **self._options}, labels


def _sample_of(model: nn.Module) -> Any:
    """A batch for a look at a language model of transformers."""
    if getattr(model, "main_input_name", "") != "input_ids":
        refuse(
            "a model that is none of transformers' language models has to be looked at with a batch",
            where="pipe.chain_of",
            which=type(model).__name__,
            expected="sample=, a batch as run() is given",
            got="None",
        )
    tokens = torch.zeros((1, 8), dtype=torch.int64, device="meta")
    pair = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return {"input_ids": tokens, **({"decoder_input_ids": tokens} if pair else {})}


def _refuse_options(given: Mapping[str, Any], where: str) -> None:
    """Raises Error USAGE for what needs something of every block."""
    for name in _OUTPUTS:
        if given.get(name):
            refuse(
                "a stage has the values of its own blocks only",
                where=where,
                which=name,
                expected="False",
                got=given[name],
                hint="run the whole model for them" if name != "output_router_logits" else _ROUTER,
            )
    if given.get("past_key_values") is not None or given.get("use_cache"):
        refuse(
            "a pipeline keeps no keys and values of earlier tokens",
            where=where,
            which="past_key_values, use_cache",
            expected="whole sequences, and no cache",
        )


def _takes_cache(model: nn.Module) -> bool:
    """Whether a cache is asked for by a keyword."""
    parameters = inspect.signature(model.forward).parameters
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters.values()):  # it passes everything on
        return hasattr(getattr(model, "config", None), "use_cache")
    return "use_cache" in parameters
