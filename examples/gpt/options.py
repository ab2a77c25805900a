"""The command line: the arguments of zeroth-gpt (examples/gpt_cpp/options.h), --bar and --plot."""

import argparse
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from errors import make_error

import zeroth

MOST = 2**40
LARGEST_SIZE = 2**20


@dataclasses.dataclass(kw_only=True, slots=True)
class Options:
    """What was asked for; sizes in tokens (bytes of text), sequences or steps."""

    data: pathlib.Path
    suffix: list[str]
    exclude: list[str]
    list_files: bool

    layers: int
    d_model: int
    heads: int
    experts: int
    choices: int
    """0 on the command line: one head for every 64 of the width"""
    seq: int

    steps: int
    seed: int
    eval_every: int
    """steps between validations; 0: at the end only"""
    eval_windows: int
    """held-out windows of a validation; 0: never validate"""
    target_loss: float | None
    target_bigram: bool
    """the target is the bigram entropy of the held-out text"""
    max_seconds: float
    """of training; 0: no limit"""
    log_every: int
    sample: int
    """bytes of generated text at the end; 0: none"""
    prompt: str
    temperature: float
    train_table: bool
    """planned and measured memory and traffic at the end"""

    json: pathlib.Path | None
    plot: pathlib.Path | None
    init: pathlib.Path | None
    export: pathlib.Path | None
    checkpoints: pathlib.Path | None
    save_every: int
    """steps between checkpoints; 0: at the end only"""
    resume: str
    """ "auto": from the newest checkpoint of --checkpoints, if there is one; "": from the beginning; else a path"""
    bar: bool | None
    """a progress bar instead of progress lines; None: on a terminal"""

    config: pathlib.Path | None
    zero_stage: int | None
    mesh: dict[str, int]
    """sizes of axes: pp, dp, sp, tp"""
    batch: int | None
    accumulate: int | None
    dtype: str | None
    """ "fp32", "bf16", "fp16" or "fp64" """
    lr: float | None
    clip: float | None
    offload_optimizer: str | None
    """folder of files in which optimizer states rest"""
    offload_param: str | None
    """folder of files in which parameters rest"""
    memory_limit: int | None
    """MiB"""


class HelpRequested(Exception):
    """--help was given; its text is the message."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _usage_error(message, "the command line")


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        raise HelpRequested(parser.format_help())


def parse_command_line(arguments: Sequence[str]) -> Options:
    """Raises Error USAGE with the argument's name: unknown, malformed, out of range, or contradicting another;
    HelpRequested."""
    parser = _Parser(
        prog="train.py",
        usage="zeroth-run -n N python train.py --data FOLDER [arguments]",
        description="Trains a byte-level GPT on the text of a folder, with ZeRO 0-3 over the ranks that started it.",
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h", "--help", action=_Help, nargs=0, default=argparse.SUPPRESS, help="print this help and exit"
    )
    _add_data_arguments(parser)
    _add_model_arguments(parser)
    _add_run_arguments(parser)
    _add_output_arguments(parser)
    _add_engine_arguments(parser)
    values = vars(parser.parse_args(arguments))
    options = Options(**values | _read_target(values.pop("target")) | {"mesh": _read_mesh(values.pop("mesh"))})
    _check_combinations(options)
    return options


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("text").add_argument
    add("--data", type=pathlib.Path, required=True, help="folder with text files, read recursively")
    add("--suffix", nargs="+", action="extend", default=[], help="take only files whose names end so; may be repeated")
    add(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        help="leave out files and folders of this name; may be repeated",
    )
    add("--list-files", action="store_true", help="print name, size and xxHash3 of every file (few are printed anyway)")


def _add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    size = _integer(1, LARGEST_SIZE)
    add("--layers", type=size, default=4, help="transformer blocks (default %(default)s)")
    add("--d-model", type=size, default=256, help="model width (default %(default)s)")
    add(
        "--experts",
        type=_integer(0, LARGEST_SIZE),
        default=0,
        help="MLPs of each block, of which a token goes to a few; 0: one for all",
    )  # noqa: E501
    add("--choices", type=_integer(1, LARGEST_SIZE), default=2, help="experts of a token (default: 2)")
    add("--heads", type=_integer(0, LARGEST_SIZE), default=0, help="attention heads (default: d-model / 64)")
    add("--seq", type=size, default=128, help="sequence length in bytes of text (default %(default)s)")
    add("--init", type=pathlib.Path, help="begin with the weights of this safetensors file")


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("run").add_argument
    count = _integer(0, MOST)
    add("--steps", type=count, default=100, help="most steps to train (default %(default)s)")
    add(
        "--seed",
        type=_integer(0, 2**64 - 1),
        default=1,
        help="of initial values, batches and the sample (default %(default)s)",
    )
    add("--eval-every", type=count, default=0, help="steps between validations (default: at the end only)")
    add(
        "--eval-windows",
        type=count,
        default=64,
        help="held-out sequences of a validation; 0: never (default %(default)s)",
    )
    add(
        "--target",
        "--target-loss",
        help='stop when the validation loss is below this number, or below "bigram": the bigram entropy '
        "of the held-out text",
    )
    add("--max-seconds", type=_number, default=0.0, help="stop training after this time (default: no limit)")
    add("--sample", type=count, default=0, help="bytes of text to generate at the end (default %(default)s)")
    add("--prompt", default="def ", help='beginning of the generated text (default "%(default)s")')
    add(
        "--temperature",
        type=_number,
        default=0.8,
        help="of the generated text; 0: the likeliest byte (default %(default)s)",
    )


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    count = _integer(0, MOST)
    add(
        "--log-every",
        type=_integer(0, MOST),
        default=10,
        help="steps between progress lines; 0: none (default %(default)s)",
    )
    add(
        "--bar",
        action=argparse.BooleanOptionalAction,
        help="a progress bar instead of progress lines (default: on a terminal)",
    )
    add(
        "--no-train-table",
        dest="train_table",
        action="store_false",
        help="leave out the table of memory and traffic at the end",
    )
    add("--json", type=pathlib.Path, help="write one JSON record a step and a final one to this file")
    add("--plot", type=pathlib.Path, help="draw loss.png and memory.png in this folder")
    add("--export", type=pathlib.Path, help="write the trained weights to this safetensors file")
    add("--checkpoints", type=pathlib.Path, help="save checkpoints in this folder")
    add("--save-every", type=count, default=0, help="steps between checkpoints (default 0: at the end only)")
    add(
        "--resume",
        default="",
        help='go on from this checkpoint; "auto": the newest of --checkpoints, if there is one',
    )


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("engine").add_argument
    add("--config", type=pathlib.Path, help="Zeroth configuration (JSON); the arguments below win over it")
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), help="default 3")
    add(
        "--mesh",
        help='the ranks as a grid, say "dp=2,tp=2": tp neighbours share the matrices of each layer, sp ranks each '
        "sequence, pp ranks the layers, and have one batch; with pp a step has --accumulate micro-batches "
        "(default: dp alone)",
    )
    add("--batch", type=_integer(1, MOST), help="sequences per rank and micro-step (default 8)")
    add("--accumulate", type=_integer(1, MOST), help="micro-steps of a step (default 1)")
    add("--dtype", choices=("fp32", "bf16", "fp16", "fp64"), help="default fp32")
    add("--lr", type=_number, help="highest learning rate (default 0.001)")
    add("--clip", type=_number, help="clip gradients to this norm; 0: off (default 1)")
    add("--offload-optimizer", metavar="FOLDER", help="optimizer states and masters rest in files in this folder")
    add("--offload-param", metavar="FOLDER", help="parameters rest in files in this folder, and come for each use")
    add("--memory-limit", type=_integer(1, MOST), metavar="MIB", help="of all ranks' plans together; more is an error")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer from {low} to {high}")
        return value

    return read


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0")
    return value


def _read_target(target: str | None) -> dict[str, Any]:
    if target is None or target == "bigram":
        return {"target_loss": None, "target_bigram": target is not None}
    try:
        return {"target_loss": float(target), "target_bigram": False}
    except ValueError:
        raise _usage_error('a target is a number or "bigram"', "--target", target) from None


def _read_mesh(text: str | None) -> dict[str, int]:
    """ "dp=2,tp=2"; every axis once."""
    axes: dict[str, int] = {}
    for part in [] if text is None else text.split(","):
        name, _, size = part.partition("=")
        is_size = re.fullmatch(r"[0-9]{1,7}", size) is not None and 1 <= int(size) <= LARGEST_SIZE
        if name not in ("pp", "dp", "ep", "sp", "tp") or not is_size or name in axes:
            raise _usage_error(
                'a mesh is a list of the axes pp, dp, ep, sp and tp with their sizes, as "dp=2,tp=2"',
                "--mesh",
                text or "",
            )
        axes[name] = int(size)
    return axes


def _check_combinations(options: Options) -> None:
    if options.heads == 0:
        options.heads = max(1, options.d_model // 64)
    if options.d_model % options.heads != 0 or options.d_model // options.heads % 2 != 0:
        raise _usage_error(
            "the width does not divide into heads of an even width (rotary positions turn pairs)",
            "--heads",
            f"--d-model {options.d_model} --heads {options.heads}",
        )
    if 0 < options.experts < options.choices:
        raise _usage_error(
            "a token cannot have more experts than there are",
            "--choices",
            f"--experts {options.experts} --choices {options.choices}",
        )
    has_target = options.target_bigram or options.target_loss is not None
    if options.eval_windows == 0 and (has_target or options.eval_every > 0):
        raise _usage_error("a target and --eval-every need validations", "--eval-windows", "0")
    if has_target and options.eval_every == 0:
        options.eval_every = 10
    if options.checkpoints is None and (options.save_every > 0 or options.resume == "auto"):
        raise _usage_error("there is no folder for checkpoints", "--checkpoints")
    if options.sample > 0 and not options.prompt:
        raise _usage_error("generated text needs a beginning", "--prompt", "an empty text")


def _usage_error(message: str, which: str, got: str = "") -> zeroth.Error:
    return make_error("USAGE", message, which=which, got=got, hint="train.py --help lists all arguments")
