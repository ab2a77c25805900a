"""Layers whose matrices the ranks of a mesh's axis share (Shoeybi et al. 2019, Megatron-LM, section 3)."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zeroth import _C, _boxes
from zeroth._C import copy_to_group, gather_from_group, reduce_from_group
from zeroth.parallel._refuse import who
from zeroth.parallel.tensor_cut import Cut, note_cut
from zeroth.parallel.vocabulary import require_in_vocabulary

__all__ = ["ColumnLinear", "RowLinear", "SharedInput", "VocabEmbedding", "share", "whole_shape"]


def share(module: nn.Module, name: str, cut: Cut, dim: int, *, noted: bool = True) -> None:
    """Puts this rank's part in the place of a whole parameter: the same Parameter object, with its part for data.
    `noted`: ranks of tp can put it together again, to verify the layers that they share."""
    parameter = getattr(module, name)
    if parameter is None or _boxes.box_of(parameter) is not None:
        return  # no bias; or tied, and cut already
    whole = tuple(parameter.shape)
    if parameter.is_meta:
        _boxes.cut_later(parameter, parameter.data, functools.partial(cut.take, dim=dim))
    parameter.data = cut.take(parameter.data, dim)
    _boxes.put_box(parameter, cut.box(whole, dim))
    if noted:
        note_cut(parameter, cut, dim)


def whole_shape(parameter: nn.Parameter) -> list[int]:
    """Of the whole model's parameter."""
    box = _boxes.box_of(parameter)
    return list(parameter.shape) if box is None or not box.logical_shape else box.logical_shape


class _Shared(nn.Module):
    """A linear layer with a part of its matrix: nn.Linear's weight [out, in], or [in, out] as transformers' Conv1D."""

    def __init__(self, whole: nn.Module, group: _C.Communicator) -> None:
        super().__init__()
        self.group = group
        self.transposed = not isinstance(whole, nn.Linear)
        self.weight: nn.Parameter = whole.weight  # type: ignore[assignment]
        self.bias: nn.Parameter | None = whole.bias  # type: ignore[assignment]
        self.train(whole.training)

    @property
    def in_features(self) -> int:
        """That this rank takes."""
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """That this rank gives."""
        return self.weight.shape[1 if self.transposed else 0]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] -> [..., out] with this rank's matrix."""
        return functional.linear(x, self.weight.t() if self.transposed else self.weight, bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, ranks={self.group.size}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update({key: value for key, value in vars(self).items() if key != "_parameters"})
        copied._parameters = {}
        for name, parameter in self._parameters.items():
            if parameter is not None and id(parameter) not in memo:
                twin = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                if (box := _boxes.box_of(parameter)) is not None:
                    _boxes.put_box(twin, box)
                memo[id(parameter)] = twin
            copied._parameters[name] = None if parameter is None else memo[id(parameter)]
        if "shared_input" in vars(self):
            vars(copied)["shared_input"] = copy.deepcopy(self.shared_input, memo)
        return copied


class SharedInput:
    """The input of several column layers, entered once: their gradients are added before they are summed over ranks,
    so that query, key and value cost one sum and not three."""

    def __init__(self, region: nn.Module, group: _C.Communicator) -> None:
        """`region`: the module that calls the layers; nothing is kept beyond its forward."""
        self.group = group
        self._entered: list[tuple[torch.Tensor, int, torch.Tensor]] = []
        region.register_forward_hook(self._end, always_call=True)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """x, whole on all ranks. Its gradient is the sum of what the ranks compute."""
        for source, version, entered in self._entered:
            if source is x and version == x._version:
                return entered
        entered = self._entered_of(x)
        self._entered.append((x, x._version, entered))
        return entered

    def _entered_of(self, x: torch.Tensor) -> torch.Tensor:
        return copy_to_group(x, self.group)

    def _end(self, *_: Any) -> None:
        self._entered.clear()


class ColumnLinear(_Shared):
    """Each rank computes a part of the outputs: x [..., in] whole on all ranks -> [..., own out]. The gradient of x is
    summed over the ranks. `gather_output`: the result is whole on all ranks, too, and made for values that all compute
    alike."""

    def __init__(self, whole: nn.Module, group: _C.Communicator, cut: Cut, gather_output: bool = False) -> None:
        """Takes the parameters of `whole`, an nn.Linear or transformers' Conv1D, and cuts them."""
        super().__init__(whole, group)
        self.gather_output = gather_output
        self.shared_input: SharedInput | None = None
        dim = 1 if self.transposed else 0
        self.sizes = cut.sizes(whole_shape(self.weight)[dim])
        share(self, "weight", cut, dim)
        share(self, "bias", cut, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = copy_to_group(x, self.group) if self.shared_input is None else self.shared_input.enter(x)
        out = self.product(entered, self.bias)
        return gather_from_group(out, -1, self.group, self.sizes) if self.gather_output else out


class RowLinear(_Shared):
    """Each rank takes a part of the inputs, as ColumnLinear gives it: x [..., own in] -> [..., out], the sum over the
    ranks. The bias is added once, after the sum."""

    def __init__(self, whole: nn.Module, group: _C.Communicator, cut: Cut) -> None:
        """Takes the parameters of `whole`, an nn.Linear or transformers' Conv1D, and cuts the matrix."""
        super().__init__(whole, group)
        self.leave: Callable[[torch.Tensor], torch.Tensor] | None = None
        share(self, "weight", cut, 0 if self.transposed else 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.product(x, None)
        out = reduce_from_group(out, self.group) if self.leave is None else self.leave(out)
        return out if self.bias is None else out + self.bias


class VocabEmbedding(nn.Embedding):
    """Each rank has the rows of a part of the vocabulary: indices, the same on all ranks -> [..., size], whole. Raises
    Error USAGE, an IndexError, too, on all ranks for an index outside the vocabulary."""

    group: _C.Communicator
    begin: int
    """first row of this rank"""
    count: int

    @staticmethod
    def of(whole: nn.Embedding, group: _C.Communicator, cut: Cut) -> "VocabEmbedding":
        """Takes the table of `whole` and cuts it. A class of its own, whose forward calls that of nn.Embedding, stays a
        base: a scale of the rows, say."""
        kind = type(whole)
        bases = (VocabEmbedding,) if kind is nn.Embedding else (kind, VocabEmbedding)
        made: VocabEmbedding = nn.Module.__new__(type(f"Vocab{kind.__name__}", bases, {}))
        vars(made).update(vars(whole))
        for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
            vars(made)[name] = vars(whole)[name].copy()
        made.group, made.sparse = group, False
        made.begin, made.count = cut.range_of(whole.num_embeddings)
        share(made, "weight", cut, 0)
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        require_in_vocabulary(
            input, self.num_embeddings, what="an index", where="parallel.VocabEmbedding", who=who(self.group)
        )
        own = input - self.begin
        outside = (own < 0) | (own >= self.count)
        rows = functional.embedding(own.masked_fill(outside, 0), self.weight, self._own_padding())
        return reduce_from_group(rows.masked_fill(outside[..., None], 0.0), self.group)

    def _own_padding(self) -> int | None:
        """The padding row gets no gradient, on the rank that has it."""
        if self.padding_idx is None or not 0 <= self.padding_idx - self.begin < self.count:
            return None
        return self.padding_idx - self.begin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _Shared.__deepcopy__(self, memo)  # type: ignore[arg-type]
