"""Any decoder of transformers with its sequence split over a group of ranks, unchanged."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

from zeroth import _C
from zeroth._evaluation import evaluating
from zeroth.parallel._random import mixed
from zeroth.parallel._refuse import refuse, who
from zeroth.parallel.cut import cut_sample
from zeroth.parallel.hf_attention import METHODS, BoundName, SequenceBinding, bind, register
from zeroth.parallel.layout import SequenceLayout
from zeroth.parallel.sample import Sample, require_same
from zeroth.parallel.split_checks import (
    CONSUMED,
    SAME,
    depends_on_length,
    loss_type_of,
    require_groups,
    require_heads,
    require_known,
    require_model,
    require_tokens,
)
from zeroth.parallel.verify import difference
from zeroth.parallel.vocab_loss import cross_entropy_sum, sum_of_parts

__all__ = ["SplitModel", "split_sequence"]

_WHERE = "parallel.split_sequence"


class SplitModel:
    """What split_sequence() did to a model. Keeps the model and the groups."""

    def __init__(self, model: nn.Module, binding: SequenceBinding, layout: str) -> None:
        self.model = model
        self.binding = binding
        self.kind = layout
        self._signature = inspect.signature(model.forward)
        kinds = {parameter.kind for parameter in self._signature.parameters.values()}
        wrapper = inspect.Parameter.VAR_POSITIONAL in kinds  # it passes everything on
        if not hasattr(type(model), "base_model_prefix"):  # around a model of transformers, as PEFT's
            wrapper = wrapper or inspect.Parameter.VAR_KEYWORD in kinds
        self.has_cache = "use_cache" in self._signature.parameters or wrapper
        self.is_aside = False
        """the model runs as it was"""
        self._counting = [
            name for name, module in model.named_modules() if hasattr(module, "create_position_ids_from_input_ids")
        ]
        self.whole = True
        """whether a forward calls all blocks; a stage of a pipeline, which may have none, sets it to False"""
        self._random: torch.Tensor | None = None
        self.cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = cross_entropy_sum
        """logits [N, size], labels [N] -> their sum; another one where ranks share the vocabulary"""
        self._names: list[tuple[Any, str]] = []
        self._hooks: list[Any] = []
        self._attach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitModel":
        """Groups are not copied; the configuration of a copy has a name without a group, which says so when it runs."""
        return self

    @property
    def group(self) -> _C.Communicator:
        return self.binding.group

    @property
    def layout(self) -> SequenceLayout:
        """Which tokens each rank had in the last forward."""
        return self._sample().layout

    def _attach(self) -> None:
        model = self.model
        self._names = bind(model, BoundName(METHODS[self.binding.method], self.binding))
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]
        for module in model.modules():
            if depends_on_length(module):
                self._hooks.append(module.register_forward_pre_hook(self._with_all_positions, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._of_own_positions))

    @property
    def counts_positions(self) -> bool:
        """Whether the model needs positions of the whole sequence with each sample."""
        return bool(self._counting)

    @contextlib.contextmanager
    def aside(self, *, eager: bool = False) -> Iterator[None]:
        """In here the model runs as it was, with whole sequences. `eager`: the attention of its own code stands in for
        kernels, some of which leave out a soft cap."""
        bound = [(config, config._attn_implementation) for config, _ in self._names]
        try:
            self.is_aside = True
            for config, name in self._names:
                kernel = name == "sdpa" or name.startswith(("flash", "flex"))
                config._attn_implementation = "eager" if eager and kernel else name
            yield
        finally:
            self.is_aside = False
            for config, name in bound:
                config._attn_implementation = name

    def remove(self) -> None:
        """The model is as it was: it has its own attention again, and takes whole sequences for itself."""
        for hook in self._hooks:
            hook.remove()
        for config, name in self._names:
            config._attn_implementation = name
        self._names, self._hooks = [], []

    def verify(self, bound: float = 1e-4, **inputs: Any) -> float:
        """Runs a sample, whole, through the model as it was on every rank, and split, without gradients, and returns
        the largest difference of the logits, relative to the largest logit. A call of all ranks, for a look at a model
        that nobody has split before. Raises Error MODEL if the difference is above `bound`."""
        inputs = {name: value for name, value in inputs.items() if name not in CONSUMED}
        with evaluating(self.model):
            self.remove()
            try:
                whole = self.model(**inputs, **({"use_cache": False} if self.has_cache else {})).logits
            finally:
                self._attach()
            split = self.gather(self.model(**inputs).logits)
        found = difference(whole, split)
        if not found <= bound:
            refuse(
                "a model gives other logits with its sequence split",
                code="MODEL",
                where="parallel.SplitModel.verify",
                who=who(self.group),
                which=type(self.model).__name__,
                expected=f"a relative difference of at most {bound}",
                got=found,
                hint="something in it looks along the sequence besides its attention: keep its sequence whole",
            )
        return found

    def gather(self, tensor: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All tokens, in their order, of a tensor that has this rank's tokens of the last forward along `dim`: logits,
        hidden states. No gradient flows. A call of all ranks."""
        sample = self._sample()
        lengths = sample.layout.lengths
        if tensor.shape[dim] != lengths[self.group.rank]:
            refuse(
                "a tensor has other tokens than this rank had in the last forward",
                where="parallel.SplitModel.gather",
                who=who(self.group),
                which=f"dimension {dim}",
                expected=lengths[self.group.rank],
                got=list(tensor.shape),
            )
        rows = tensor.detach().movedim(dim, 0).contiguous()
        whole = sample.layout.join(self.group.all_gather(rows, counts=lengths), 0)
        return whole[: sample.length].movedim(0, dim)

    def _sample(self) -> Sample:
        if self.binding.sample is None:
            refuse("the model has not been called yet", where=_WHERE, which="layout")
        return self.binding.sample

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        if self.is_aside:
            return args, kwargs
        given = self.named(args, kwargs)
        require_known(given, who(self.group))
        if self._counting and given.get("position_ids") is None:
            refuse(
                "a model counts positions by itself, from the first token that it is given",
                where=_WHERE,
                which=f"position_ids, {self._counting[0]}",
                expected="position_ids of the whole sequence",
                got="None",
                hint="make them as the model does, from the whole input_ids",
            )
        require_same({name: given.get(name) for name in SAME}, self.group, where=_WHERE)
        require_tokens(model, given, who(self.group))
        local, self.binding.sample = cut_sample(given, self.binding, self.kind, loss_type_of(model))
        if self.has_cache:
            local["use_cache"] = False
        self.binding.calls = 0
        if model.training and self.group.size > 1:  # dropout outside attention must differ between ranks, too
            seed = int(torch.randint(1 << 62, (), dtype=torch.int64))
            self._random = torch.get_rng_state()
            torch.default_generator.manual_seed(mixed(seed, self.group.rank))
        return (), local

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        bound = self._signature.bind_partial(*args, **kwargs)
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                named.update(value)
            elif kind is inspect.Parameter.VAR_POSITIONAL:
                refuse(
                    "arguments have no names",
                    where=_WHERE,
                    which=type(self.model).__name__,
                    expected="input_ids=..., labels=...",
                    got=f"{len(value)} positional arguments",
                )
            else:
                named[name] = value
        return named

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._random is not None:
            torch.set_rng_state(self._random)
            self._random = None
        if output is None or self.is_aside:  # None: the forward raised
            return None
        if self.binding.calls == 0 and self.whole:
            refuse(
                "a model has no attention of transformers' attention interface, so its sequence was not split",
                code="MODEL",
                where=_WHERE,
                which=type(model).__name__,
                expected="attention by transformers.AttentionInterface",
                got="no call of it in a forward",
            )
        sample = self._sample()
        if sample.labels is None:
            return output
        logits = output["logits"] if isinstance(output, Mapping) else output[0]
        loss = self._loss(logits, sample)
        tiled = not isinstance(logits, torch.Tensor)  # then nobody has the logits
        if not isinstance(output, Mapping):
            return (loss, *output[1 if tiled else 0 :])
        fields = {name: value for name, value in output.items() if name != "loss" and not (tiled and name == "logits")}
        kind: Any = type(output)
        return kind(loss=loss, **fields)

    def _with_all_positions(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Frequencies of a rotation that depend on the longest position need those of all ranks."""
        if self.is_aside:
            return args, kwargs
        positions = self._sample().positions
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def _of_own_positions(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self.is_aside:
            return output
        layout = self._sample().layout
        return tuple(layout.cut(table, -2, self.group.rank) for table in output)

    def _loss(self, logits: Any, sample: Sample) -> torch.Tensor:
        """The whole loss, whose gradient is that of this rank's tokens. `logits`: a tensor, or what tile_loss() puts in
        the place of one."""
        assert sample.labels is not None
        if isinstance(logits, torch.Tensor):
            local = self.cross_entropy(logits.flatten(0, -2), sample.labels.flatten().to(logits.device))
        else:
            local, _ = logits.cross_entropy_sum(sample.labels)
        return sum_of_parts(local / sample.valid, self.group)


def split_sequence(
    model: nn.Module,
    group: _C.Communicator,
    method: Literal["ulysses", "ring", "grid"] = "ulysses",
    *,
    layout: Literal["contiguous", "zigzag"] | None = None,
    order: Literal["ring", "token"] = "ring",
    ulysses: _C.Communicator | None = None,
    ring: _C.Communicator | None = None,
) -> SplitModel:
    """Lets a model of transformers run with its sequence split over the ranks of `group`; its code stays as it is.

    From now on the model takes the WHOLE sample, the same on all ranks of the group (checked: Error MISMATCH), and
    each rank computes its tokens. input_ids [B, S] or inputs_embeds [B, S, size], labels [B, S] (shifted here, before
    the cut: the label of a token is the next one's), position_ids ([1 or B, S]; where they start again packed
    documents begin, as transformers has it, or give cu_seq_lens_q of the whole sequence), attention_mask [B, S] of
    padding or a prepared one [B or 1, heads or 1, S, S]. Sliding windows, chunks and soft caps follow the model's
    configuration. S need not divide: ranks have +-1 tokens, and a sequence shorter than the ranks is filled up.

    output.loss is the whole loss, sum over tokens / tokens with a label of all ranks, on every rank; its gradient is
    this rank's part: gradients of parameters are to be summed over the group (ZeRO does). output.logits and hidden
    states are this rank's tokens; SplitModel.gather() makes them whole.

    method: "ulysses" (as many ranks as heads at most), "ring" (any number), "grid": Ulysses over the group `ulysses`
    inside, ring over the group `ring` outside; `group` has the ranks of both, ulysses fastest.
    layout: "contiguous", or for ring and grid "zigzag", the default there. order: see ring_attention().

    Local: no call of the group, but each forward and backward of the model is one of all its ranks. Dropout gives other
    numbers on each rank, from the next draw of torch's generator.
    Raises Error USAGE for groups and layouts that do not fit, Error MODEL, by name, for a model with layers that look
    along the sequence and cannot be split (recurrences, convolutions, normalisation over a batch), with an encoder, or
    with an attention of its own. Until remove() the model cannot generate."""
    kind = layout or ("contiguous" if method == "ulysses" else "zigzag")
    require_groups(group, method, kind, order, ulysses, ring)
    require_model(model)
    register()
    require_heads(model, group if method == "ulysses" else ulysses)
    binding = SequenceBinding(method=method, group=group, order=order, ulysses=ulysses, ring=ring)
    return SplitModel(model, binding, kind)
