"""What a checkpoint holds of a rank's process beside the engine's states, as JSON."""

import base64
import dataclasses
import json
import random
import sys
from typing import Any

import torch

from zeroth import _C

__all__ = ["Loaded", "load_random_state", "random_state", "to_json"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What Engine.load() found."""

    path: str
    """the checkpoint that was loaded"""
    step: int
    """committed updates so far"""
    micro_step: int
    """micro-steps of the next step that had ended: 0 for a checkpoint from between steps"""
    world_size: int
    """ranks that wrote it"""
    client_state: Any
    """what was given to save() on rank 0; None if nothing was"""
    random_state: bool
    """the random generators of this rank were restored: the checkpoint is of as many ranks"""
    missing: list[str]
    """states and buffers that it lacks, which keep their values: "blocks.3.weight/exp_avg" """
    unexpected: list[str]
    """parameters that the model does not have"""
    skipped: list[str]
    """newer checkpoints that are not whole, with the reason"""


def to_json(value: Any, what: str) -> str:
    """Raises Error USAGE, with the place, for what JSON cannot hold without loss."""
    try:
        _require_json(value, what)
        return json.dumps(value, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise _C.make_error(
            "USAGE",
            f"{what} cannot be saved",
            where="python.save",
            expected="None, numbers, strings, lists and dictionaries with strings as keys",
            got=str(error),
            hint="a checkpoint has no pickles; save numbers that make the object again",
        ) from error


def _require_json(value: Any, place: str) -> None:
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            _require_json(item, f"{place}[{index}]")
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{place} has the key {key!r}, a {type(key).__name__}")
            _require_json(item, f"{place}[{key!r}]")
        return
    raise TypeError(f"{place} is a {type(value).__name__}")


def random_state() -> dict[str, Any]:
    """Of torch (CPU, and the current CUDA device if CUDA is in use), random and, if it is loaded, NumPy."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _to_text(torch.get_rng_state()),
        "random": [version, list(internal), gauss],
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = _to_text(torch.cuda.get_rng_state())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return state


def load_random_state(state: dict[str, Any]) -> None:
    """The other way."""
    torch.set_rng_state(_from_text(state["torch"]))
    version, internal, gauss = state["random"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(state["cuda"]))
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(tuple(state["numpy"]))


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
