"""tiled_loss() inside a causal language model of Hugging Face, without a change to it.

While the model's forward runs with labels, its head gives no logits but an object that remembers the hidden states and
what the model does to logits (a factor, a soft cap). The model's loss function takes it apart."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zeroth import _C
from zeroth.parallel.tiled_loss import LogitStep, tiled_loss_sum

__all__ = ["TiledLogits", "TiledLoss", "tile_loss"]


class TiledLogits:
    """Logits that nobody has computed."""

    def __init__(self, hidden: torch.Tensor, head: nn.Module, steps: tuple[LogitStep, ...] = ()) -> None:
        self.hidden, self.steps = hidden, steps
        self._head = head

    def cross_entropy_sum(self, labels: torch.Tensor, ignore_index: int = -100) -> tuple[torch.Tensor, int]:
        """The sum of the losses, and how many labels count. `labels`: int64, one a hidden state. A call of the head,
        inside which its weight is gathered."""
        result: tuple[torch.Tensor, int] = self._head((self, labels.to(self.hidden.device), ignore_index))
        return result

    def _then(self, *steps: LogitStep) -> "TiledLogits":
        return TiledLogits(self.hidden, self._head, (*self.steps, *steps))

    def __mul__(self, factor: object) -> "TiledLogits":
        return self._then(_number("mul", factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> "TiledLogits":
        return self._then(1.0 / _number("div", divisor))

    def tanh(self) -> "TiledLogits":
        return self._then(None)

    def float(self) -> "TiledLogits":
        return self

    def to(self, *_: object, **__: object) -> "TiledLogits":
        return self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is torch.tanh and isinstance(args[0], cls):
            return args[0].tanh()
        if function is torch.mul and len(args) == 2:
            return args[0] * args[1] if isinstance(args[0], cls) else args[1] * args[0]
        if function is torch.div and len(args) == 2 and isinstance(args[0], cls):
            return args[0] / args[1]
        raise _unknown(getattr(function, "__name__", str(function)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(name)


def _number(name: str, value: object) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    raise _unknown(f"{name} by a {type(value).__name__}")


def _unknown(what: str) -> _C.Error:
    return _C.make_error(
        "USAGE",
        "the model does something to its logits that tiles cannot follow",
        where="parallel.tile_loss",
        which=what,
        expected="factors, tanh, conversions, and then loss_function(logits=..., labels=...)",
        hint="call tiled_loss(hidden, weight, labels) in a loss of your own",
    )


class TiledLoss:
    """A model whose loss is tiled since tile_loss(); undo() ends it."""

    def __init__(self, model: nn.Module, head: nn.Module, tiles: int | None, group: _C.Communicator | None) -> None:
        self.calls = 0
        """losses so far"""
        self._model, self._head, self._tiles, self._group = model, head, tiles, group
        self._active = False
        self._signature = inspect.signature(model.forward)
        self._heads: Callable[..., Any] = head.forward
        self._models: Callable[..., Any] = model.forward
        self._had_loss = vars(model).get("_loss_function")
        head.forward = functools.wraps(head.forward)(functools.partial(self._give_logits))
        model.forward = functools.wraps(model.forward)(functools.partial(self._forward))
        model.loss_function = self._loss  # type: ignore[assignment]

    def undo(self) -> None:
        """The model is as before."""
        for module in (self._head, self._model):
            vars(module).pop("forward", None)
        vars(self._model).pop("_loss_function", None)
        if self._had_loss is not None:
            self._model.loss_function = self._had_loss

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        if given.get("labels") is None:
            # A model whose sequence is split has taken its labels out, and asks its logits for the loss afterwards.
            return (
                self._with_tiles(*args, **kwargs) if _has_split_labels(self._model) else self._models(*args, **kwargs)
            )
        result = self._with_tiles(*args, **kwargs)
        if isinstance(result, tuple):
            return tuple(one for one in result if not isinstance(one, TiledLogits))
        return type(result)(**{name: value for name, value in result.items() if not isinstance(value, TiledLogits)})

    def _with_tiles(self, *args: Any, **kwargs: Any) -> Any:
        self._active = True
        try:
            return self._models(*args, **kwargs)
        finally:
            self._active = False

    def _give_logits(self, hidden: Any) -> Any:
        if isinstance(hidden, torch.Tensor):
            if not self._active:
                return self._heads(hidden)
            return TiledLogits(hidden, self._head)
        logits, labels, ignore_index = hidden  # the second call, of cross_entropy_sum()
        self.calls += 1
        return tiled_loss_sum(
            logits.hidden,
            self._head.weight,  # type: ignore[arg-type]
            labels,
            self._tiles,
            bias=self._head.bias,  # type: ignore[arg-type]
            ignore_index=ignore_index,
            steps=logits.steps,
            vocab_group=getattr(self._head, "group", None),
            vocab_sizes=getattr(self._head, "sizes", None),
        )

    def _loss(
        self,
        logits: Any,
        labels: torch.Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: object,
    ) -> torch.Tensor:
        """As transformers' ForCausalLMLoss."""
        if not isinstance(logits, TiledLogits):
            raise _unknown(f"a {type(logits).__name__} came to the loss")
        if shift_labels is None:
            assert labels is not None
            if self._group is not None and self._group.size > 1:
                raise _C.make_error(
                    "USAGE",
                    "labels of a part of a sequence must be shifted before it is cut",
                    where="parallel.tile_loss",
                    which="shift_labels",
                    expected="shift_labels=..., as SequenceBatches gives them",
                    got="labels only",
                )
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        total, valid = logits.cross_entropy_sum(shift_labels, ignore_index)
        group = self._group
        if num_items_in_batch is None:
            counted = torch.tensor([valid])
            if group is not None:
                group.all_reduce(counted)
            num_items_in_batch = float(max(1, int(counted)))
        elif isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        loss: torch.Tensor = total / num_items_in_batch
        if group is None or group.size == 1:
            return loss
        return _C.reduce_from_group(loss, group)


def _is_head(module: nn.Module) -> bool:
    """A Linear, or one whose outputs ranks share (ColumnLinear)."""
    return isinstance(module, nn.Linear) or (
        isinstance(getattr(module, "group", None), _C.Communicator)
        and hasattr(module, "sizes")
        and not getattr(module, "transposed", False)
    )


def _has_split_labels(model: nn.Module) -> bool:
    binding = getattr(getattr(getattr(model, "config", None), "_attn_implementation", None), "binding", None)
    return getattr(getattr(binding, "sample", None), "labels", None) is not None


def tile_loss(model: nn.Module, tiles: int | None = None, *, group: _C.Communicator | None = None) -> TiledLoss:
    """Switches tiled_loss() on in a causal language model of Hugging Face: before or after an engine is built around
    it. With labels, its forward returns the loss and no logits; without, it is as before.

    `tiles`, `group`: as tiled_loss(). Labels are shifted as transformers does, or come as `shift_labels`, which a
    `group` needs; `num_items_in_batch` is the divisor if it is given. A head may be tied to the embedding, and ranks
    may share its vocabulary.
    Raises Error USAGE, by name: no linear output layer, no loss_function, tiled already; and in a forward for a model
    that does to its logits what tiles cannot follow."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(output, nn.Module) or not _is_head(output) or not hasattr(type(model), "loss_function"):
        raise _C.make_error(
            "USAGE",
            "this is no causal language model of Hugging Face",
            where="parallel.tile_loss",
            which=type(model).__name__,
            expected="get_output_embeddings() gives a Linear, and loss_function can be set",
            got=f"an output layer {type(output).__name__}",
            hint="call tiled_loss(hidden, weight, labels) in a loss of your own",
        )
    if "forward" in vars(output) or isinstance(vars(model).get("_loss_function"), type(TiledLoss._loss)):
        raise _C.make_error(
            "USAGE",
            "the loss of this model is tiled already",
            where="parallel.tile_loss",
            which=type(model).__name__,
            hint="undo() the first tile_loss()",
        )
    return TiledLoss(model, output, tiles, group)
