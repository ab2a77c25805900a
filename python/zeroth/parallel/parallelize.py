"""Splits a model over the axes of a mesh."""

import contextlib
import functools
import inspect
from collections.abc import Mapping, MutableMapping
from typing import Any, Literal

import torch
from torch import nn

from zeroth import _C, _boxes, _deferred
from zeroth._config import ConfigLike, to_config
from zeroth.parallel._refuse import refuse
from zeroth.parallel.experts import Experts, experts
from zeroth.parallel.norm_plan import NormPlan, find_norm_plan
from zeroth.parallel.norm_split import SplitNorms
from zeroth.parallel.sample import require_same
from zeroth.parallel.sequence_way import SequenceWay
from zeroth.parallel.split import SplitModel
from zeroth.parallel.split_region import SplitRegion
from zeroth.parallel.tensor import ColumnLinear, RowLinear, SharedInput, VocabEmbedding
from zeroth.parallel.tensor import share as share_parameter
from zeroth.parallel.tensor_adapters import adapters_of, plain_name
from zeroth.parallel.tensor_cut import Cut
from zeroth.parallel.tensor_plan import find_plan
from zeroth.parallel.tensor_share import Role, Share, TensorPlan
from zeroth.parallel.verification import Verification, choose
from zeroth.parallel.verify import outputs_of, require_equal
from zeroth.parallel.verify_tensor import Change, Undo
from zeroth.parallel.vocab_loss import VocabLoss
from zeroth.parallel.vocabulary import VocabLogits

__all__ = ["Parallel", "parallelize"]

_WHERE = "parallel.parallelize"
_INPUTS = ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "labels", "shift_labels")


class Parallel:
    """What parallelize() did to a model."""

    def __init__(
        self,
        model: nn.Module,
        mesh: _C.Mesh,
        plan: TensorPlan | None,
        sequence: SplitModel | None,
        norms: NormPlan | None = None,
        verification: Verification | None = None,
        experts: Experts | None = None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.plan = plan
        """of tp; None without it"""
        self.sequence = sequence
        """of sp; None without it"""
        self.norms = norms
        """where tp ranks work on slices of the sequence; None where norms are whole"""
        self.verification = verification
        """whether it computes what it computed before; None without tp and sp"""
        self.experts = experts
        """of ep; None without it"""

    def __str__(self) -> str:
        lines = ["mesh: " + " x ".join(f"{axis}={size}" for axis, size in self.mesh.sizes.items())]
        if self.plan is not None:
            lines.append(self.plan.text(self.mesh.size("tp")))
        if self.norms is not None:
            lines.append(f"slices of the sequence from {self.norms.first} to {self.norms.last}")
        if self.sequence is not None:
            lines.append(f"sequences over {self.mesh.size('sp')} ranks: {self.sequence.binding.method}")
        if self.experts is not None:
            lines.append(str(self.experts))
        if self.verification is not None:
            lines.append(str(self.verification))
        return "\n".join(lines)


def parallelize(
    model: nn.Module,
    config: ConfigLike = None,
    *,
    world: _C.World | None = None,
    plan: Literal["auto"] | TensorPlan = "auto",
    corrections: Mapping[str, Role] | None = None,
    method: Literal["ulysses", "ring", "grid"] | None = None,
    order: Literal["ring", "token"] | None = None,
    ulysses: int | None = None,
    norms: Literal["whole", "split"] | None = None,
    verify: Mapping[str, Any] | Literal["untested", "always", "never"] | None = None,
) -> Parallel:
    """Splits a model in place for the mesh of the configuration: its matrices over tp, its sequences over sp, its
    experts over ep.
    zeroth.Engine does it for a model that is not split yet; call it before for another plan, or to see it:
    print(zeroth.parallelize(...)).

    tp: linear layers and the vocabulary's embedding and head get this rank's part of their parameters (same Parameter
    objects), by `plan`: "auto" finds it (see TensorPlan, find_plan); `corrections` say otherwise for modules by name,
    with * for parts: {"model.layers.*.mlp.*": "whole"}. With labels, models of transformers compute their loss from
    logits that no rank has whole. In training output.logits is then a VocabLogits, which says so; in eval(), and
    without labels, they are whole.
    `norms`: "split" lets ranks of tp work on slices of the sequence between the layers that they share: norms,
    dropouts, residual sums and what is kept of them for backward are divided by tp, the bytes on the wire stay the
    same (Korthikanti et al. 2022). For decoders and encoders of one list of blocks; output.hidden_states are slices.
    sp: see split_sequence(); `method` and `order` as there. A grid has `ulysses` ranks inside, 0: the largest divisor
    of sp below it; the others are in the ring.
    ep: see zeroth.experts().
    `verify`: whether the first forward compares the model with what it was before, layer by layer: "untested" where
    it has code of no family that the tests cover, or layers have roles that were chosen here, "always", "never". A
    layer that differs is an Error MODEL of that forward, on all ranks, with its name and what to do. It costs a few
    forwards of the layers, without gradients; nothing of the training changes. Or arguments of a forward, without
    labels: the model runs with them now, before and after it is split; other outputs are an Error MODEL of this call.
    None: what the configuration says: zeroth.sequence.method, .order and .ulysses, zeroth.tensor.norms,
    zeroth.parallel.verify.

    All ranks of a tp or sp group are given the same samples, which is checked in every forward of the model; batches
    differ over dp. All ranks build the model from the same seed. A pickled or saved model has this rank's parts: states
    and checkpoints of the engine are those of the whole model.

    Collective and blocking. Returns what was done. Raises Error, before the model is changed: MODEL for heads that the
    ranks cannot share; MISMATCH if ranks of a tp group have other weights; CONFIG for a mesh that does not fit the
    ranks; USAGE."""
    settings = to_config(config)
    way = SequenceWay.of(settings, method=method, order=order, ulysses=ulysses)
    norms = norms or settings.norms  # type: ignore[assignment]
    if norms not in ("whole", "split"):
        refuse("there is no such way to hold norms", where=_WHERE, which="norms", expected="whole, split", got=norms)
    if _boxes.is_split(model):
        refuse("the model is split already", where=_WHERE, which=type(model).__name__)
    if world is None:
        world = _C.World.from_environment()
    axes = settings.mesh(world.size)
    found = None
    if axes["tp"] > 1:
        found = find_plan(model, axes["tp"], corrections) if plan == "auto" else plan
    slices = find_norm_plan(model, found) if found is not None and norms == "split" else None
    way.require(axes["sp"])
    sample = verify if isinstance(verify, Mapping) else None
    mode: Any = settings.verify if verify is None else verify if isinstance(verify, str) else "never"
    choice = choose(
        model,
        found,
        splits_sequence=axes["sp"] > 1,
        mode=mode,
        has_own_plan=plan != "auto" or any(role != "whole" for role in (corrections or {}).values()),
    )
    mesh = world.mesh(axes, settings)
    expected = None if sample is None else outputs_of(model, sample)
    has_ranks = any(axes.get(axis, 1) > 1 for axis in settings.experts["over"].split(","))
    of_experts = experts(model, mesh, **settings.experts, verify=mode) if has_ranks else None
    shared = undo = split_norms = None
    if found is not None:
        tp = mesh.axis("tp")
        weights: dict[str, torch.Tensor] = {}
        weights |= {name: one for name, one in model.named_parameters() if not one.is_meta and not _differs(one, "tp")}
        states = _deferred.random_states_of(model)
        weights |= {f"random numbers of deferred module {at}": state for at, state in enumerate(states)}
        require_same(
            weights,
            tp,
            where=_WHERE,
            what="ranks that share matrices have other weights",
            hint="build the model from the same seed on every rank: torch.manual_seed() before it is made",
        )
        shared = _TensorSplit(model, tp, "tp")
        undo = shared.apply(found)
        if slices is not None:
            split_norms = SplitNorms(model, tp, "tp", slices)
    sequence = None
    if axes["sp"] > 1:
        sequence = way.split(model, world, mesh, settings)
        loss = getattr(model, "loss_function", None)
        if isinstance(loss, VocabLoss):
            sequence.cross_entropy = functools.partial(loss.total, vocab_size=int(model.config.vocab_size))  # type: ignore[union-attr,arg-type]
    if shared is not None:
        shared.follow_logits()
    verification = None
    if sample is not None and expected is not None:
        got = outputs_of(model, sample)
        require_equal(model, expected, got if sequence is None else [sequence.gather(one) for one in got[:1]], mesh)
    elif shared is not None or sequence is not None:
        verification = Verification(model, choice, world, mesh, undo, sequence, split_norms)
    _boxes.mark(model, _boxes.Split(world, axes, mesh, verification=verification))
    return Parallel(model, mesh, found, sequence, slices, verification, of_experts)


def _differs(parameter: nn.Parameter, axis: str) -> bool:
    """Whether ranks of the axis have other parts of it already: experts over tp."""
    box = _boxes.box_of(parameter)
    return box is not None and axis in (box.distinct, *box.further)


class _TensorSplit:
    """Puts layers that ranks share in the place of whole ones."""

    def __init__(self, model: nn.Module, group: _C.Communicator, axis: str) -> None:
        self.model = model
        self.group = group
        self.axis = axis
        self.head: ColumnLinear | None = None
        self.causal: nn.Module | None = None
        """that calls a loss_function: the model, or the one inside PEFT's"""
        self.by_parts = False
        """the forward that runs computes its loss from parts of the logits"""
        self.draws = SplitRegion.draws(model)
        self.made: dict[int, tuple[nn.Module, nn.Module]] = {}
        """new modules by the id of the old one, which is kept"""

    def apply(self, plan: TensorPlan) -> Undo:
        modules = dict(self.model.named_modules(remove_duplicate=False))
        for share in plan.shares:
            if share.name in modules:
                self._replace(modules[share.name], share)
            else:  # a parameter with one value a head
                path, _, name = share.name.rpartition(".")
                share_parameter(self.model.get_submodule(path), name, self._cut(share), 0)
        attributes = []
        for name, attribute, value in plan.attributes:
            module = self.model.get_submodule(name)
            attributes.append((name, module, attribute, getattr(module, attribute)))
            setattr(module, attribute, value)
        before = {share.name: modules[share.name] for share in plan.shares if share.name in modules}
        layers = [
            Change(name, module, self.made[id(module)][0]) for name, module in before.items() if id(module) in self.made
        ]
        self._regions(plan)
        self.made.clear()
        if self.causal is not None:
            self.causal.register_forward_pre_hook(self._choose, prepend=True, with_kwargs=True)
        self.model.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
        return Undo(tuple(layers), tuple(attributes))

    def _cut(self, share: Share) -> Cut:
        copies = self.group.size // share.heads if 0 < share.heads < self.group.size else 1
        return Cut(self.axis, self.group.rank, self.group.size, share.grain, copies, share.parts)

    def _replace(self, module: nn.Module, share: Share) -> None:
        made: nn.Module
        if id(module) in self.made:  # one module in several places
            self._put(share.name, self.made[id(module)][0])
            return
        match share.role:
            case "whole":
                return
            case "summed":
                for parameter in module.parameters(recurse=False):
                    _boxes.put_box(parameter, _C.ParameterBox(summed=[self.axis]))
                return
            case "heads":
                share_parameter(module, "weight", self._cut(share), 1)
                return
            case "column":
                made = ColumnLinear(module, self.group, self._cut(share))
            case "row":
                made = RowLinear(module, self.group, self._cut(share))
            case "vocab":
                assert isinstance(module, nn.Embedding)
                made = VocabEmbedding.of(module, self.group, self._cut(share))
            case "head":
                cut = self._cut(share)
                made = self.head = ColumnLinear(module, self.group, cut, gather_output=True)
                self.causal = next((one for one in self.model.modules() if _calls_loss_function(one)), None)
                if self.causal is not None:
                    self.causal.loss_function = VocabLoss(self.group, cut)  # type: ignore[assignment]
        if share.role != "vocab":
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
                getattr(made, hooks).update(getattr(module, hooks))
        self.made[id(module)] = made, module
        self._put(share.name, made)

    def _put(self, at: str, made: nn.Module) -> None:
        path, _, name = at.rpartition(".")
        self.model.get_submodule(path).register_module(name, made)

    def _regions(self, plan: TensorPlan) -> None:
        """Around each row-parallel layer the smallest module that has its columns, too: these enter their input once,
        and dropouts between them differ on the ranks."""
        adapters = adapters_of(self.model)
        beside = {id(self.model.get_submodule(share.name)) for share in plan.shares if share.adapter}
        whole = {
            id(self.model.get_submodule(dropout))
            for share in plan.shares
            if share.role == "column" and share.name in adapters
            for dropout in adapters[share.name].dropouts
        }
        for share in plan.shares:
            if share.role != "row" or share.adapter:
                continue
            path = share.name
            region = self.model.get_submodule(path)
            while path and not any(isinstance(one, ColumnLinear) and id(one) not in beside for one in region.modules()):
                path = path.rpartition(".")[0]
                region = self.model.get_submodule(path)
            rows = [one for one in region.modules() if isinstance(one, RowLinear) and id(one) not in beside]
            columns = [one for one in region.modules() if isinstance(one, ColumnLinear) and one is not self.head]
            if path and len(columns) > 1:
                shared = SharedInput(region, self.group)
                for column in columns:
                    column.shared_input = column.shared_input or shared
            if len(rows) == 1 and SplitRegion.draws(region):
                adapted = share.name in adapters
                end = self.model.get_submodule(plain_name(share.name)) if adapted else rows[0]
                of_whole = [one for one in region.modules() if id(one) in whole]
                SplitRegion(region, end, self.group, adapted=adapted, of_whole=of_whole)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same sample on all ranks."""
        given = _named(model, args, kwargs)
        tensors = {name: given.get(name) for name in _INPUTS}
        if all(value is None for value in tensors.values()):
            tensors = {str(number): one for number, one in enumerate(_tensors(args, kwargs))}
        if self.draws and model.training:
            tensors["torch.get_rng_state()"] = torch.get_rng_state()
        require_same(
            tensors,
            self.group,
            where="parallel.forward",
            what="ranks that share matrices were given different samples or random numbers",
            hint="give all ranks of tp the same sample and the same torch.manual_seed(); batches differ over dp only",
        )

    def _choose(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Logits are gathered where nobody computes a loss from the parts."""
        given = _named(model, args, kwargs)
        labels = given.get("labels") is not None or given.get("shift_labels") is not None
        self.by_parts = labels and isinstance(model.loss_function, VocabLoss)
        if self.head is not None:
            self.head.gather_output = not self.by_parts

    def follow_logits(self) -> None:
        """From now on outputs have no logits that look whole and are not. After what computes a loss from parts."""
        if self.causal is not None:
            self.causal.register_forward_hook(self._after)

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Logits beside a loss of parts: whole in an evaluation, else an object that says what it is."""
        if not self.by_parts or self.head is None:
            return None
        is_mapping = isinstance(output, MutableMapping)
        at = "logits" if is_mapping else 1
        if is_mapping and "logits" not in output or not is_mapping and not (isinstance(output, tuple) and output[1:]):
            return None
        local, sizes = output[at], self.head.sizes
        if not isinstance(local, torch.Tensor) or local.dim() == 0 or local.shape[-1] != sizes[self.group.rank]:
            return None  # tiles
        logits = VocabLogits(local, self.group, sizes)
        value: Any = logits if model.training else logits.whole()
        if not is_mapping:
            return (output[0], value, *output[2:])
        output[at] = value
        return output


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward by name, as far as it has a signature."""
    given = dict(kwargs)
    with contextlib.suppress(TypeError, ValueError):
        given |= inspect.signature(model.forward).bind_partial(*args).arguments
    return given


def _tensors(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


def _calls_loss_function(model: nn.Module) -> bool:
    """Whether the model's forward computes its loss by model.loss_function, the one of causal language models."""
    if not hasattr(model, "loss_function") or (getattr(model, "loss_type", None) or "ForCausalLM") != "ForCausalLM":
        return False
    try:
        return "self.loss_function(" in inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
