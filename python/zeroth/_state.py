"""What a checkpoint holds of a rank's process beside the engine's states, as JSON."""

import base64
import dataclasses
import random
import sys
from typing import Any

import torch

__all__ = ["Loaded", "load_random_state", "random_state"]


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
