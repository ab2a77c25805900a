"""What a layer costs: seconds of its forward and backward, or bytes that it keeps for backward."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zeroth import _C
from zeroth.parallel._refuse import refuse
from zeroth.pipe.chain import Chain, named_tensors
from zeroth.pipe.forms import leaves_of

__all__ = ["measure", "measured"]


def measure(chain: Chain, sample: Any, what: Literal["time", "memory"], *, repeats: int = 3) -> list[float]:
    """Runs each layer on the micro-batch `sample`, on this rank, and returns for each layer: "time": the least seconds
    of `repeats` forwards with backward; "memory": bytes of the tensors that one micro-batch keeps for backward,
    parameters and buffers not counted. All layers need values here. Buffers, gradients and random numbers are as
    before. Raises Error USAGE for a layer without values."""
    _require_values(chain)
    costs: list[float] = []
    with _undisturbed(chain.model), torch.enable_grad():
        values: Any = None
        for number in range(len(chain.layers)):
            own = [
                parameter
                for name, parameter in chain.model.named_parameters()
                if parameter.requires_grad and number in chain.uses[name]
            ]
            layer = _OneLayer(chain, number, sample, own)
            costs.append(layer.seconds(values, repeats) if what == "time" else layer.saved_bytes(values))
            values = tree_map(_detached, layer.output)
            layer.output = None
    return costs


def measured(chain: Chain, sample: Any, what: Literal["time", "memory"], mesh: _C.Mesh) -> list[float]:
    """What rank 0 measures, on all ranks: they measure different times, and have to cut alike. Collective, blocks.
    Raises Error USAGE, on all ranks, without a sample or for a layer without values."""
    if sample is None:
        refuse_without_sample(what)
    _require_values(chain)
    costs = measure(chain, sample, what) if mesh.world.rank == 0 else [0.0] * len(chain.layers)
    told = mesh.world.broadcast(torch.tensor(costs, dtype=torch.float64), 0)
    return [float(cost) for cost in told.tolist()]


def refuse_without_sample(what: str) -> NoReturn:
    refuse(
        "a layer is measured on a micro-batch",
        where="pipe.partition",
        which=what,
        expected="sample=, a micro-batch as run() is given, or weights=",
        got="None",
    )


def _require_values(chain: Chain) -> None:
    missing = [name for name, tensor in named_tensors(chain.model) if tensor.is_meta]
    if missing:
        refuse(
            "a layer without values cannot be measured",
            where="pipe.measure",
            which=missing[0],
            expected="all layers on this rank",
            got="a tensor on the meta device",
            hint='build() the layers first, or split by "parameters"',
        )


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


class _OneLayer:
    def __init__(self, chain: Chain, number: int, sample: Any, own: list[nn.Parameter]) -> None:
        self.chain, self.number, self.sample, self.own = chain, number, sample, own
        self.output: Any = None

    def forward(self, values: Any) -> None:
        self.output = self.chain.run(self.number, self.number + 1, values, self.sample)

    def seconds(self, values: Any, repeats: int) -> float:
        best = float("inf")
        for _ in range(repeats):
            _synchronize(self.chain.model)
            begin = time.perf_counter()
            self.forward(values)
            self._backward(values)
            _synchronize(self.chain.model)
            best = min(best, time.perf_counter() - begin)
        return best

    def _backward(self, values: Any) -> None:
        outputs = [one for one in leaves_of(self.output) if one.requires_grad]
        inputs = [*self.own, *(one for one in leaves_of(values) if one.requires_grad)]
        if outputs and inputs:
            ones = [torch.ones_like(one) for one in outputs]
            torch.autograd.grad(outputs, inputs, ones, allow_unused=True)

    def saved_bytes(self, values: Any) -> float:
        model = {tensor.untyped_storage()._cdata for _, tensor in named_tensors(self.chain.model)}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in model:
                kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.forward(values)
        return float(sum(storage.nbytes() for storage in kept.values()))


def _synchronize(model: nn.Module) -> None:
    for device in {tensor.device for _, tensor in named_tensors(model)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Buffers and random numbers are as before."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[name] = buffer  # a forward may have put another tensor there
