"""A chain of whatever model is given."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from zeroth.parallel._refuse import refuse
from zeroth.pipe.block_chain import BlockChain
from zeroth.pipe.chain import Chain
from zeroth.pipe.layer_list import LayerList
from zeroth.pipe.list_chain import ListChain

__all__ = ["build", "chain_of"]


def chain_of(
    model: nn.Module | Sequence[Any], *, loss_fn: Callable[..., Any] | None = None, sample: Any = None
) -> Chain:
    """The layers of a model, for a pipeline:

    nn.Sequential, nn.ModuleList, LayerList, PipelineModule, or a list of modules, functions and LayerSpec: its members,
    by the names "0", "1", ...; a micro-batch is (inputs, labels), see ListChain.
    any other module: what runs before its blocks, each block (as zeroth.units(model) finds them), and what runs after
    them: "embedding", the paths of the blocks, "head". It runs by its own forward, on the whole micro-batch on every
    rank: a dict is its keywords, a tuple its arguments. With loss_fn a micro-batch is a pair of that and labels.
    loss_fn(output, labels) is the result; without, it is what the model returns: an output with its loss if the batch
    has labels. `sample`: a batch to look at the model with, without arithmetic; language models of transformers need
    none.

    Call it on all ranks, with the same model, before parallelize() and Engine: the look is local and takes no memory.
    Raises Error MODEL for what cannot be split, with the name of what passes between blocks or of a trainable parameter
    that no layer uses; USAGE."""
    if isinstance(model, nn.Module):
        plain = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
        if plain or isinstance(model, (nn.ModuleList, LayerList)):
            return ListChain(model, loss_fn)
        return BlockChain(model, loss_fn, sample)
    if not isinstance(model, (list, tuple)):
        refuse(
            "this is no model",
            where="pipe.chain_of",
            which="model",
            expected="a torch.nn.Module, or a list of layers",
            got=type(model).__name__,
        )
    return ListChain(LayerList(model), loss_fn)


def build(chain: Chain, first: int, last: int, *, deferred: bool = False) -> None:
    """Makes layers first..last-1 of a list that are specified and not there yet, on this rank; the others stay without
    values, on the meta device. Nothing for other models. Parameters are new objects: call it before optimizers and
    engines. Values follow from the seed and the number of the layer alone. `deferred`: by zeroth.deferred(), so that an
    engine makes them unit by unit."""
    if isinstance(chain.model, LayerList):
        chain.model.build(first, last, deferred=deferred)
