"""Initial weights from a safetensors file."""

import pathlib
from collections.abc import Mapping, Sequence

import torch
from errors import make_error
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

SHOWN = 5
"""names in a message; the rest is counted"""


@torch.no_grad()
def load_weights(model: nn.Module, path: pathlib.Path) -> None:
    """Fills the parameters with the file's tensors, rounded to the parameters' dtype. Raises Error with nothing
    changed: IO for a file that cannot be read, USAGE for names, shapes or dtypes that are not those of the model."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise make_error(
            "IO", "the initial weights cannot be read", where="train.py --init", which=str(path), got=str(error)
        ) from error
    parameters = dict(model.named_parameters())
    problems = _problems(parameters, tensors)
    if problems:
        raise make_error(
            "USAGE",
            "the initial weights are not those of this model",
            where="train.py --init",
            which=str(path),
            expected=f"its {len(parameters)} parameters",
            got="; ".join(problems),
            hint="give the --layers and --d-model that they were made with",
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def _problems(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> list[str]:
    both = sorted(parameters.keys() & tensors.keys())
    findings = {
        "missing": sorted(parameters.keys() - tensors.keys()),
        "not in the model": sorted(tensors.keys() - parameters.keys()),
        "of another shape": [
            f"{name} {list(tensors[name].shape)} instead of {list(parameters[name].shape)}"
            for name in both
            if tensors[name].shape != parameters[name].shape
        ],
        "no floating-point numbers": [
            f"{name} ({tensors[name].dtype})" for name in both if not tensors[name].is_floating_point()
        ],
    }
    return [f"{what}: {_some(items)}" for what, items in findings.items() if items]


def _some(items: Sequence[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
