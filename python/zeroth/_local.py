"""Local updates: sites that train apart, and exchange weights once in many steps."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from zeroth._engine import Engine

__all__ = ["LocalUpdates", "local_updates"]


class LocalUpdates:
    """What local_updates() has begun; step() of the engine makes the exchanges."""

    def __init__(self, engine: "Engine", settings: dict[str, int | float | bool | str]) -> None:
        self.settings = settings
        """the arguments of local_updates()"""
        self._engine = engine

    @property
    def sites(self) -> int:
        """Number of sites."""
        return int(self._engine._core.local_report()["sites"])

    @property
    def site(self) -> int:
        """Number of this rank's site, from 0."""
        return int(self._engine._core.local_report()["site"])

    @property
    def sites_present(self) -> list[int]:
        """Sites in the mean of the last exchange that has ended; before the first one those that began together."""
        return list(self._engine._core.local_report()["present"])

    @property
    def joined(self) -> bool:
        """This site has come to a training that others had begun, and has its weights and steps from them."""
        return bool(self._engine._core.local_report()["joined"])

    @property
    def step(self) -> int:
        """Steps since the beginning of the windows, the same in all sites; of a site that has joined, theirs."""
        return int(self._engine._core.local_report()["step"])

    def report(self) -> dict[str, int | bool | list[int]]:
        """`sites`, `site`, `present`, `joined`, `step`, `exchanges` of fragments so far, `received_bytes` from other
        sites so far by formula, `bytes_per_exchange` to this rank and `offsets` in a window of each fragment. What was
        counted at the copy is engine.wire_report()["between_sites"]."""
        return dict(self._engine._core.local_report())

    def __repr__(self) -> str:
        return f"zeroth.LocalUpdates({', '.join(f'{name}={value!r}' for name, value in self.settings.items())})"


def local_updates(
    engine: "Engine",
    steps: int,
    *,
    method: Literal["average", "co2", "none"] = "average",
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
    nesterov: bool = True,
    fragments: int = 1,
    delay: int = 0,
    keep_local: float = 0.0,
    payload: Literal["full", "int8", "int4", "fp4"] = "full",
    block: int = 256,
    gap_scale: float = 0.0,
    clip: float = 0.0,
    lost_sites: Literal["end", "leave"] = "end",
) -> LocalUpdates:
    """Begins local updates of an engine that was made in a site: Engine(..., world=World.from_environment().site(n)).

    From now on engine.step() exchanges weights with the other sites, each fragment every `steps` committed steps. All
    sites take the weights of the first. Collective over all sites and blocking, between steps, once an engine, before
    engine.load(); each site saves into and loads from a folder of its own.

    `method`: "average": local SGD with the defaults, DiLoCo with `outer_momentum`, Streaming DiLoCo with `fragments`
    and `delay`; "co2": one window late; "none": branches, which exchange nothing. `outer_lr`, `outer_momentum`,
    `nesterov`: of the outer update, of what the mean of the sites has moved. `fragments`: parts of the model that are
    exchanged in different steps, units by turns. `delay`: steps between an exchange and its use, less than `steps`.
    `keep_local`: share of a site's own weights when it takes an exchange. `payload`: what is sent of an element; codes
    have a scale for each `block` elements. `gap_scale`, `clip`: of "co2": staleness penalty and largest magnitude of
    the momentum; 0: none.

    `lost_sites`: what an exchange without all sites is. "end": Error PEER_LOST in all sites. "leave": the mean of those
    that are there, for sites that are jobs of their own (zeroth-run --sites); a site that comes back waits here for
    their next exchange, and goes on from their weights and steps. Raises Error USAGE, CONFIG, MISMATCH, PEER_LOST."""
    settings: dict[str, int | float | bool | str] = {
        "method": method,
        "steps": steps,
        "outer_lr": outer_lr,
        "outer_momentum": outer_momentum,
        "nesterov": nesterov,
        "fragments": fragments,
        "delay": delay,
        "keep_local": keep_local,
        "payload": payload,
        "block": block,
        "gap_scale": gap_scale,
        "clip": clip,
        "lost_sites": lost_sites,
    }
    engine._core.local_updates(
        method=method,
        steps=steps,
        outer_lr=outer_lr,
        outer_momentum=outer_momentum,
        nesterov=nesterov,
        fragments=fragments,
        delay=delay,
        keep_local=keep_local,
        payload=payload,
        block=block,
        gap_scale=gap_scale,
        clip=clip,
        lost_sites=lost_sites,
    )
    return LocalUpdates(engine, settings)
