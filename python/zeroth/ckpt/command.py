"""The command `zeroth ckpt`: options, and what goes wrong."""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from zeroth import _C
from zeroth.ckpt import tables
from zeroth.ckpt.average import average
from zeroth.ckpt.contents import WEIGHT
from zeroth.ckpt.convert import SOURCES, TARGETS, convert, read
from zeroth.ckpt.diff import diff
from zeroth.ckpt.dtypes import parse_dtype
from zeroth.ckpt.experts import prune_experts
from zeroth.ckpt.folder import entries, prune, verify
from zeroth.ckpt.reader import is_checkpoint
from zeroth.ckpt.refusals import refused
from zeroth.ckpt.torch_file import read_names

__all__ = ["main"]

OK, DIFFERENT, USAGE, REFUSED, IO = 0, 1, 64, 65, 74

_DESCRIPTION = """\
Looks into checkpoints, compares, converts and averages them, without ranks and without an engine.

exit codes: 0 fine; 1 differences were found; 64 wrong use; 65 a checkpoint is torn, corrupt or not usable;
74 a file cannot be read or written"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"zeroth ckpt: [USAGE] {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zeroth ckpt", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, help: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help, description=help)
        one.add_argument("--json", action="store_true", help="print one JSON object")
        return one

    ls = command("ls", "list the checkpoints of a folder, or what is in one")
    ls.add_argument("path", help="a folder with checkpoints, or a checkpoint of any form that convert reads")

    check = command("verify", "read every byte of a checkpoint and compare it with its digests")
    check.add_argument("path", help="a checkpoint, or a folder: all in it")

    compare = command("diff", "say where two checkpoints differ, by name and state")
    compare.add_argument("a", help="a checkpoint of any form that convert reads")
    compare.add_argument("b")
    compare.add_argument("--tolerance", type=float, metavar="X", help="values may differ by so much (their bits)")

    turn = command("convert", "write a checkpoint in another form")
    turn.add_argument("source", help="a checkpoint: of Zeroth, safetensors, torch.save, DCP, DeepSpeed")
    turn.add_argument("target", help="a new file or folder; for zeroth a folder that gets step-N")
    turn.add_argument("--to", choices=TARGETS, help="the form of the target (torch for *.pt, else needed)")
    turn.add_argument("--from", dest="kind", choices=SOURCES, help="the form of the source (what it looks like)")
    turn.add_argument("--dtype", metavar="NAME", help="of floating-point weights: fp32, bf16, fp16")
    turn.add_argument(
        "--weights",
        choices=("computed", "master"),
        help="as the model computes, or float32 masters (computed for hf, else master)",
    )
    turn.add_argument("--state", default=WEIGHT, metavar="NAME", help="whose values are the weights, say average")
    turn.add_argument("--weights-only", action="store_true", help="without states of the optimizer")
    turn.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file of hf: 500MB, 2GiB (5GB)")
    turn.add_argument(
        "--frozen",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters that do not train keep their dtype: 'base.*'",
    )
    turn.add_argument(
        "--rename", action="append", default=[], metavar="REGEX=TEXT", help="names: '^module\\.=' takes a prefix away"
    )
    turn.add_argument(
        "--prune-experts",
        action="append",
        default=[],
        metavar="LAYERS=N,N",
        help="leave these experts out of layers: 'model.layers.*.mlp=0,5'",
    )
    turn.add_argument("--tie", action="append", default=[], metavar="OTHER=NAME", help="another name of a parameter")
    turn.add_argument(
        "--param-names", metavar="FILE", help="JSON list: parameters of a torch file's optimizer, in order"
    )
    turn.add_argument("--model-prefix", metavar="TEXT", help="of the keys of weights in a DCP (model.)")
    turn.add_argument("--step", type=int, metavar="N", help="instead of the source's")

    mean = command("average", "write the weighted average of checkpoints as a checkpoint")
    mean.add_argument("sources", nargs="+", help="checkpoints of any form that convert reads")
    mean.add_argument("--out", required=True, metavar="FOLDER", help="gets step-N")
    mean.add_argument("--weights", metavar="W,W,...", help="one a source; they are divided by their sum (equal ones)")
    mean.add_argument(
        "--optimizer", choices=("drop", "first"), default="drop", help="its states: none, or those of the first (drop)"
    )
    mean.add_argument("--step", type=int, metavar="N", help="instead of the first one's")

    thin = command("prune", "remove old checkpoints of a folder, as Engine.save() does")
    thin.add_argument("folder")
    thin.add_argument("--keep-last", type=int, required=True, metavar="N", help="the newest stay")
    thin.add_argument("--keep-every", type=int, default=0, metavar="N", help="and steps that are multiples (none)")
    thin.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs it and returns the exit code. Results go to stdout, errors to stderr."""
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        code = _COMMANDS[options.command](options)
        sys.stdout.flush()
        return code
    except _C.Error as error:
        print(f"zeroth ckpt: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        return OK
    except (KeyboardInterrupt, MemoryError) as error:
        print(f"zeroth ckpt: {type(error).__name__}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 71


def _print(options: argparse.Namespace, data: Any, text: str) -> None:
    print(json.dumps(data, indent=1) if options.json else text, end="\n" if options.json or text else "")


def _ls(options: argparse.Namespace) -> int:
    path = options.path
    if os.path.isdir(path) and not is_checkpoint(path):
        found = entries(path)
        if found or not os.listdir(path):
            _print(options, {"checkpoints": tables.plain(found)}, tables.of_entries(found))
            return OK
    contents = read(path)
    entry = entries(contents.origin)[0] if contents.kind == "zeroth" else None
    _print(options, tables.facts_of(contents, entry), tables.of_contents(contents, entry))
    return OK


def _verify(options: argparse.Namespace) -> int:
    one = is_checkpoint(options.path)
    paths = [options.path] if one else [entry.path for entry in entries(options.path)]
    if not paths:
        raise refused("there is no checkpoint", which=options.path)
    results: list[dict[str, Any]] = []
    for path in paths:
        try:
            damage = verify(path)
            results.append({"path": path, "damage": [tables.damage_of(one) for one in damage]})
        except _C.Error as error:
            if error.code != "CHECKPOINT":
                raise
            whole = {"file": "manifest.json", "begin": 0, "end": 0, "keys": [], "what": str(error)}
            results.append({"path": path, "damage": [whole]})
    bad = any(result["damage"] for result in results)
    _print(options, {"whole": not bad, "checkpoints": results}, tables.of_damage(results))
    return REFUSED if bad else OK


def _diff(options: argparse.Namespace) -> int:
    if options.tolerance is not None and not options.tolerance >= 0:
        raise refused("a tolerance cannot be this", code="USAGE", which="--tolerance", got=str(options.tolerance))
    found = diff(options.a, options.b, tolerance=options.tolerance)
    _print(options, {"equal": not found, "differences": tables.plain(found)}, tables.of_differences(found))
    return DIFFERENT if found else OK


def _convert(options: argparse.Namespace) -> int:
    to: Any = options.to or ("torch" if options.target.endswith((".pt", ".pth", ".bin")) else None)
    if to is None:
        raise refused("it is not said into which form", code="USAGE", which="--to", expected=", ".join(TARGETS))
    names = read_names(options.param_names) if options.param_names else None
    contents = read(options.source, options.kind, param_names=names, model_prefix=options.model_prefix)
    contents.rename([_pair(rule, "--rename") for rule in options.rename])
    for other, name in (_pair(rule, "--tie") for rule in options.tie):
        contents.param(name).aliases.append(other)
        contents.left_out = [one for one in contents.left_out if not one.startswith(f"{other}:")]
    contents.require_unique("USAGE")
    contents.freeze(options.frozen)
    for layers, numbers in (_pair(rule, "--prune-experts") for rule in options.prune_experts):
        prune_experts(contents, layers, _numbers(numbers, "--prune-experts"))
    if options.step is not None and options.step < 0:
        raise refused("a step cannot be this", code="USAGE", which="--step", got=str(options.step))
    path = convert(
        contents,
        options.target,
        to=to,
        weights=options.weights,
        dtype=parse_dtype(options.dtype) if options.dtype else None,
        state=options.state,
        optimizer=not options.weights_only,
        max_shard_bytes=_size_of(options.max_shard_size),
        step=options.step,
    )
    _print(options, {"path": path, "left_out": contents.left_out}, tables.of_conversion(path, contents))
    return OK


def _average(options: argparse.Namespace) -> int:
    weights = None
    if options.weights is not None:
        try:
            weights = [float(text) for text in options.weights.split(",")]
        except ValueError as error:
            raise refused("a weight is no number", code="USAGE", which="--weights", got=options.weights) from error
    path = average(options.sources, options.out, weights=weights, optimizer=options.optimizer, step=options.step)
    _print(options, {"path": path}, path)
    return OK


def _prune(options: argparse.Namespace) -> int:
    gone = prune(options.folder, keep_last=options.keep_last, keep_every=options.keep_every, dry_run=options.dry_run)
    done = "would remove" if options.dry_run else "removed"
    _print(options, {"removed": gone, "dry_run": options.dry_run}, "\n".join(f"{done} {path}" for path in gone))
    return OK


_COMMANDS = {
    "ls": _ls,
    "verify": _verify,
    "diff": _diff,
    "convert": _convert,
    "average": _average,
    "prune": _prune,
}


def _pair(rule: str, option: str) -> tuple[str, str]:
    first, mark, second = rule.rpartition("=")
    if not mark or not first:
        raise refused("a rule has no two sides", code="USAGE", which=option, expected="A=B", got=rule)
    return first, second


def _numbers(text: str, option: str) -> list[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise refused("these are no numbers", code="USAGE", which=option, expected="0,3,5", got=text)
    return [int(word) for word in text.split(",")]


def _size_of(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    size = 0.0
    if found:
        size = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    if size < 1:
        raise refused("a size cannot be read", code="USAGE", which="--max-shard-size", expected="500MB", got=text)
    return int(size)
