"""What an engine would need on each tier, without making one."""

import dataclasses
from collections.abc import Iterable

import torch
from torch import nn

from zeroth import _C, _boxes, _names, _units
from zeroth._config import ConfigLike, to_config

__all__ = ["TierBytes", "TierPlan", "plan_tiers"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TierBytes:
    """Bytes of one rank."""

    device: int
    """what rests where it is updated"""
    host: int
    """states that rest in host memory, blocks on their way, and those in a cache"""
    files: int
    """on disk, rounded as files are"""

    @property
    def memory(self) -> int:
        """Device and host, which on ranks of a CPU are one memory."""
        return self.device + self.host


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """What an engine plans for a rank: the bytes of Engine.memory_report(), and those of each tier."""

    rows: dict[str, TierBytes]
    """by state: "parameters", "optimizer", "gathered", ..."""
    total: TierBytes
    text: str
    """the table"""

    def __str__(self) -> str:
        return self.text


def plan_tiers(
    model: nn.Module,
    config: ConfigLike = None,
    *,
    world_size: int,
    rank: int = 0,
    units: Iterable[nn.Module] | None = None,
) -> TierPlan:
    """What zeroth.Engine(model, config, units=units) would plan on `rank` of `world_size` ranks of CPUs that share
    memory. The model may be on the meta device, or zeroth.deferred(): shapes and dtypes are enough, no value is read,
    and none has memory for it. All trainable parameters are in one group. A ratio that the engine would choose
    (zeroth.offload.ratio) counts as given.

    Pure and local: nothing is allocated, no rank is asked, and the model stays as it was. Raises Error CONFIG, MODEL
    and USAGE as an engine would; a budget that is too small is no error here."""
    found = _units.find_units(model) if units is None else _units.with_tiles(model, _units.named_units(model, units))
    places: dict[int, nn.Parameter] = {}
    for parameter in model.parameters():
        places[id(parameter)] = _place_of(parameter) if parameter.is_meta else parameter
    rows, text = _C.preview_tiers(
        units=_units.described(model, found),
        parameters=[
            (_names.plain(name), places[id(one)]) for name, one in model.named_parameters(remove_duplicate=False)
        ],
        boxes=_names.plain_keys(_boxes.of_model(model)),
        config=to_config(config),
        rank=rank,
        world=world_size,
    )
    table = {name: TierBytes(device=device, host=host, files=files) for name, (device, host, files) in rows.items()}
    total = TierBytes(
        device=sum(row.device for row in table.values()),
        host=sum(row.host for row in table.values()),
        files=sum(row.files for row in table.values()),
    )
    return TierPlan(rows=table, total=total, text=text)


def _place_of(parameter: nn.Parameter) -> nn.Parameter:
    """Memory that nobody writes to takes none."""
    place = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    return nn.Parameter(place, requires_grad=parameter.requires_grad)
