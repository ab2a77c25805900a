"""Cuts a model into the stages of a pipeline."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroth import _C, _boxes, _units
from zeroth._config import ConfigLike, to_config
from zeroth._tiled import tiles_of_tables
from zeroth.parallel._refuse import refuse
from zeroth.parallel.tensor_share import Role
from zeroth.pipe.agree import require_same
from zeroth.pipe.block_chain import BlockChain
from zeroth.pipe.chain import Chain
from zeroth.pipe.make_chain import build, chain_of
from zeroth.pipe.measure import measured
from zeroth.pipe.module_stages import recomputes_chunks, set_interval, split_of, with_stages
from zeroth.pipe.partition import partition
from zeroth.pipe.shared_head import SharedHead, find_head

if TYPE_CHECKING:
    from zeroth.parallel.verification import Verification

__all__ = ["Pipelined", "pipeline", "pipelined_of"]

_WHERE = "pipe.pipeline"
_MARK = "_zeroth_pipeline"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pipelined:
    """What pipeline() did to a model."""

    chain: Chain
    mesh: _C.Mesh
    program: str
    """what each stage does in a step, as text"""
    bounds: Sequence[int]
    """chunk c has the layers from bounds[c] to bounds[c + 1] - 1"""
    stage_of_chunk: Sequence[int]
    micro_batches: int
    sends_slices: bool
    """ranks of tp, which have the same values, each send a slice of them to the next stage"""
    units: Mapping[str, nn.Module]
    """by path, as found before parameters were given away"""
    config: _C.Config
    """that of an engine that is given no other one"""
    head: SharedHead | None = None
    """the layer whose rows all stages share"""

    @property
    def model(self) -> nn.Module:
        """The module whose parameters are those of the job."""
        return self.chain.model

    @property
    def stage(self) -> int:
        """This rank's stage, from 0."""
        return self.mesh.coordinate("pp")

    def chunks_of(self, stage: int) -> list[int]:
        """The chunks of a stage, in the order of their layers."""
        return [chunk for chunk, owner in enumerate(self.stage_of_chunk) if owner == stage]

    def chunks_of_parameter(self, name: str) -> list[int]:
        """The chunks whose layers use a parameter, ascending."""
        if self.head is not None and self.head.tile_of(name) is not None:
            layers: Sequence[int] = self.head.table_layers
        else:
            layers = self.chain.uses.get(name, ())
        return sorted({_chunk_of_layer(self.bounds, layer) for layer in layers})

    def __str__(self) -> str:
        lines = [
            f"pipeline of {self.mesh.size('pp')} stages, {len(self.stage_of_chunk)} chunks, "
            f"{self.micro_batches} micro-batches a step"
            + (", inexact: gradients are late" if any(_C.late_of_chunk(self.program)) else "")
        ]
        for stage in range(self.mesh.size("pp")):
            lines.append(f"  stage {stage}: " + "; ".join(_parts(self.chain, self.bounds, self.chunks_of(stage))))
        if self.head is not None:
            rows = ", ".join(map(str, self.head.rows(self.mesh)))
            lines.append(f"  all stages: {self.head.path}, {rows} rows of {self.head.vocabulary}")
        return "\n".join(lines)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipelined":
        return self


def _parts(chain: Chain, bounds: Sequence[int], chunks: Iterable[int]) -> list[str]:
    """ "chunk 0: embed to blocks.1" for each chunk."""
    parts = []
    for chunk in chunks:
        first, last = bounds[chunk], bounds[chunk + 1] - 1
        names = [chain.layers[first].name, chain.layers[last].name]
        parts.append(f"chunk {chunk}: " + (names[0] if first == last else " to ".join(names)))
    return parts


def _chunk_of_layer(bounds: Sequence[int], layer: int) -> int:
    return next(chunk for chunk in range(len(bounds) - 1) if bounds[chunk] <= layer < bounds[chunk + 1])


def pipelined_of(model: nn.Module) -> Pipelined | None:
    """What pipeline() noted on the model."""
    found: Pipelined | None = vars(model).get(_MARK)
    return found


def pipeline(
    model: nn.Module | Sequence[Any],
    config: ConfigLike = None,
    *,
    world: _C.World | None = None,
    stages: int | None = None,
    split: str | Sequence[str] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    speeds: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    sample: Any = None,
    program: str | None = None,
) -> Pipelined:
    """Cuts a model in place into the stages of the configuration's mesh, zeroth.mesh.pp. zeroth.Engine does it for a
    model that is not cut yet; call it before for a loss function or another cut, or to see it:
    print(zeroth.pipeline(...)). An engine is given the model, or what is returned here, then with this configuration.

    `model`: see chain_of(); the num_stages of a PipelineModule is the configuration's zeroth.mesh.pp. `stages`: how
    many, for a configuration that does not say it; an engine of the model has them too. `split`: see partition(); None:
    the partition_method of a PipelineModule, or zeroth.pipeline.split of the configuration. `loss_fn`: for models
    without a loss of their own. `sample`: a micro-batch, to look at models that are none of transformers', and to
    measure layers for split="time" and "memory": rank 0 does, and all ranks cut alike.
    `speeds`, `weights`: see partition(). `program`: what all stages do in a step, as text, in the place of the schedule
    of the configuration: `zeroth schedule NAME --text` prints one to begin with.

    Parameters of other stages keep their names and become empty on this rank; engine.full(name), state_dict(), saves
    and loads are those of the whole model. A weight that several stages use is on each of them, and its gradients are
    summed over them. All ranks build the model from the same seed.

    Collective and blocking. Raises Error, before the model is changed: MODEL for a model that cannot be cut; CONFIG for
    a mesh that does not fit the ranks, or has one stage; MISMATCH, on all ranks, if they have other layers, another
    split or another schedule; USAGE, also for a program that the verifier refutes, or that has actions that are not run
    yet."""
    settings = with_stages(model, to_config(config), stages)
    if world is None:
        world = _C.World.from_environment()
    axes = settings.mesh(world.size)
    if axes.get("pp", 1) < 2:
        refuse(
            "the configuration has one stage",
            code="CONFIG",
            where=_WHERE,
            which="zeroth.mesh.pp",
            expected="2 or more",
            got="1",
        )
    if isinstance(model, nn.Module) and pipelined_of(model) is not None:
        refuse("the model is a pipeline already", where=_WHERE, which=type(model).__name__)
    if isinstance(model, nn.Module) and _boxes.is_split(model):
        refuse(
            "the model is split over tp or sp already",
            where=_WHERE,
            which=type(model).__name__,
            expected="the whole model: zeroth.pipeline() splits its layers over all axes of the mesh",
        )
    chain = chain_of(model, loss_fn=loss_fn, sample=sample)
    keys = settings.pipeline
    micro_batches = settings.micro_steps(world.size)
    schedule = keys["schedule"] if program is None else "a program of the caller's own"
    recomputes = recomputes_chunks(chain.model, keys)
    if program is None:
        program = _C.make_program(
            keys["schedule"],
            axes["pp"],
            micro_batches,
            chunks=keys["chunks"],
            unshard=keys["unshard"],
            recompute=recomputes,
            offload=recomputes and settings.activations["device"] != "none",
            vocabulary=keys["vocabulary"],
        )
    else:
        program = _own_program(program, axes["pp"], micro_batches, settings)
    ranks_of_head = axes["pp"] * axes["tp"]
    head = find_head(chain, ranks_of_head) if "V_S" in program else None
    stage_of_chunk = _C.rank_of_chunk(program)
    split = split or split_of(chain.model, keys)
    mesh = world.mesh(axes, settings)
    match split:
        case "time" | "memory" if weights is None:
            weights = measured(chain, sample, split, mesh)
    shared = None if head is None else head.has
    bounds = partition(chain, len(stage_of_chunk), split, weights=weights, speeds=speeds, shared=shared)
    require_same(
        {
            "the schedule": f"{schedule}, {micro_batches} micro-batches",
            "the layers": ", ".join(layer.name for layer in chain.layers),
            "the split": "; ".join(_parts(chain, bounds, range(len(stage_of_chunk)))),
            "the program": program,
        },
        mesh,
        where=_WHERE,
    )
    set_interval(chain.model, settings)
    stage = mesh.coordinate("pp")
    for chunk, owner in enumerate(stage_of_chunk):
        if owner == stage:
            build(chain, bounds[chunk], bounds[chunk + 1])
    if head is not None:
        build(chain, len(chain.layers) - 1, len(chain.layers))
        head = find_head(chain, ranks_of_head)  # building makes modules anew
    verification = None
    if axes["tp"] > 1 or axes["sp"] > 1 or axes.get("ep", 1) > 1:
        verification = _share_layers(chain, settings, world, head)
    units = _units_with(chain.model, head)
    if head is not None:
        looks_up = stage in {stage_of_chunk[_chunk_of_layer(bounds, layer)] for layer in head.table_layers}
        head.share(mesh, looks_up=looks_up)
        units = _units.with_tiles(chain.model, units)
    done = Pipelined(
        chain=chain,
        mesh=mesh,
        program=program,
        bounds=bounds,
        stage_of_chunk=stage_of_chunk,
        micro_batches=micro_batches,
        sends_slices=keys["scatter"] and axes["tp"] > 1 and settings.norms == "whole",
        units=units,
        config=settings,
        head=head,
    )
    _give_away(done)
    if verification is not None:
        verification.of_stage(mesh)
    object.__setattr__(chain.model, _MARK, done)
    _boxes.mark(chain.model, _boxes.Split(world, axes, mesh, verification=verification))
    return done


def _own_program(text: str, stages: int, micro_batches: int, settings: _C.Config) -> str:
    """Of the user's own, if it can run."""
    unshard, vocabulary = settings.pipeline["unshard"], settings.pipeline["vocabulary"]
    program = _C.runnable_program(text, stages, micro_batches, keeps=unshard != "micro_batch")
    got = "whole" if "V_S" not in program else "two_barriers" if "V_GRAD" in program else "one_barrier"
    if vocabulary not in ("whole", got):
        refuse(
            "a program and the configuration share the head in different ways",
            where=_WHERE,
            which="zeroth.pipeline.vocabulary",
            expected=got,
            got=vocabulary,
        )
    if unshard == "step" and "UNSHARD" not in program:
        refuse(
            "a program does not say when parameters are gathered",
            where=_WHERE,
            which="zeroth.pipeline.unshard=step",
            expected="UNSHARD and RESHARD of each chunk, or unshard=micro_batch",
        )
    if "FLUSH" in program and settings.activations["device"] == "none":
        refuse(
            "a program moves what is kept for a backward, and there is no place for it",
            where=_WHERE,
            which="zeroth.activations.device",
            expected="nvme, or cpu",
            got="none",
        )
    return program


def _share_layers(chain: Chain, settings: _C.Config, world: _C.World, head: SharedHead | None) -> "Verification | None":
    """Splits the layers of all stages over tp, sp and ep, but for a head whose rows they share. The model is called
    with the hooks that do it. Returns what looks at them in their first forward."""
    from zeroth.parallel.parallelize import parallelize  # it needs what this module needs

    apart: dict[str, Role] = {} if head is None else dict.fromkeys(head.paths, "whole")
    done = parallelize(chain.model, settings, world=world, corrections=apart)
    if isinstance(chain, BlockChain):
        chain.forward = lambda model, args, kwargs: model(*args, **kwargs)
    if done.sequence is not None:
        done.sequence.whole = False
    return done.verification


def _units_with(model: nn.Module, head: SharedHead | None) -> dict[str, nn.Module]:
    """The units of a model; a head that stages share is one, without what is around it."""
    found = _units.find_units(model)
    if head is None or head.path in found or head.table is not None:
        return found
    inside = next((path for path in found if head.path.startswith(f"{path}.")), None)
    if inside is not None:
        refuse(
            "the head is a part of a unit",
            code="MODEL",
            where=_WHERE,
            which=head.path,
            expected="a layer that no unit has",
            got=inside,
            hint='zeroth.pipeline.vocabulary = "whole"',
        )
    return {**found, head.path: head.module}


def _give_away(done: Pipelined) -> None:
    """Notes on each parameter which stages use it, and empties those of other stages."""
    everywhere = list(range(done.mesh.size("pp")))
    for name, parameter in _boxes.own_parameters(done.chain.model, remove_duplicate=True):
        if done.head is not None and done.head.has(name):
            _boxes.put_box(parameter, _box(parameter, [done.stage]))  # its part of it
            continue
        tile = None if done.head is None else done.head.tile_of(name)
        users = {done.stage_of_chunk[chunk] for chunk in done.chunks_of_parameter(name)}
        stages = sorted(users | (set() if tile is None else {tile})) or everywhere
        if parameter.dim() == 0:  # no box of it is empty
            stages = everywhere
        _boxes.put_box(parameter, _box(parameter, stages))
        if done.stage not in stages:
            _empty(parameter)


def _empty(parameter: nn.Parameter) -> None:
    """Leaves nothing of a parameter but its dtype and its device; one on the meta device becomes one of the CPU."""
    shape = (0, *parameter.shape[1:])
    if not parameter.is_meta:
        parameter.data = parameter.data.new_empty(shape)
        return
    nothing = nn.Parameter(torch.empty(shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, nothing)  # the object stays the user's


def _box(parameter: nn.Parameter, stages: list[int]) -> _C.ParameterBox:
    box = _boxes.box_of(parameter)
    if box is None:
        return _C.ParameterBox(list(parameter.shape), [0] * parameter.dim(), stages=stages)
    return _C.ParameterBox(
        box.logical_shape or list(parameter.shape),
        box.offset or [0] * parameter.dim(),
        box.distinct,
        box.copies,
        box.summed,
        box.parts,
        box.parts_dim,
        stages,
        box.names,
        box.further,
    )


def units_of_chunks(done: Pipelined, units: Sequence[tuple[str, bool, Sequence[str]]]) -> list[list[int]]:
    """For each chunk the engine's units that have parameters of it. `units`: as _C.Engine.units."""
    found: list[list[int]] = [[] for _ in done.stage_of_chunk]
    chunks: Mapping[str, list[int]] = {name: done.chunks_of_parameter(name) for _, _, names in units for name in names}
    for number, (_, _, names) in enumerate(units):
        if done.head is not None and any(map(done.head.has, names)):
            continue  # V_ actions use it, no chunk
        for chunk in sorted({chunk for name in names for chunk in chunks[name]}):
            found[chunk].append(number)
    return found


def units_of_tables(done: Pipelined, units: Sequence[tuple[str, bool, Sequence[str]]]) -> list[list[int]]:
    """For each chunk the engine's units in which its embeddings look rows up, and which it uses for nothing else."""
    modules = [id(done.model.get_submodule(name)) for name, _, _ in units[1:]]  # unit 0 is the root
    found = []
    for first, last in itertools.pairwise(done.bounds):
        called = [one for layer in done.chain.layers[first:last] for outer in layer.modules for one in outer.modules()]
        tables = tiles_of_tables(called) | {id(one) for one in called if _looks_up(one)}
        found.append([number for number, module in enumerate(modules, 1) if module in tables])
    return found


def _looks_up(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def head_of_engine(
    done: Pipelined, units: Sequence[tuple[str, bool, Sequence[str]]]
) -> tuple[int, torch.Tensor, torch.Tensor | None, list[int], _C.Communicator | None] | None:
    """What the executor has to know of a head that the stages share. `units`: as _C.Engine.units."""
    if done.head is None:
        return None
    rows = done.head.name_of_rows(done.stage)
    unit = next(number for number, (_, _, names) in enumerate(units) if rows in names)
    module = done.head.module
    return unit, module.weight, module.bias, done.head.rows(done.mesh), done.head.beside(done.mesh)


def owners_of_buffers(done: Pipelined) -> dict[str, int]:
    """The rank whose values of a buffer count, the first one of the first stage that uses it; without those that rank 0
    uses."""
    sizes = done.mesh.sizes
    ranks_of_stage = 1
    for axis, size in sizes.items():
        ranks_of_stage *= 1 if axis == "pp" else size
    owners = {}
    for name, _ in done.chain.model.named_buffers():
        stages = sorted({done.stage_of_chunk[chunk] for chunk in done.chunks_of_parameter(name)})
        if stages and stages[0] > 0:
            owners[name] = stages[0] * ranks_of_stage  # pp is the mesh's outermost axis
    return owners
