"""What the commands print."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from zeroth import _C
from zeroth._json_values import user_text
from zeroth.ckpt.contents import WEIGHT, Contents
from zeroth.ckpt.diff import Difference
from zeroth.ckpt.folder import Entry

__all__ = [
    "damage_of",
    "facts_of",
    "of_contents",
    "of_conversion",
    "of_damage",
    "of_differences",
    "of_entries",
    "plain",
    "size_text",
]


def plain(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Dataclasses as dictionaries."""
    return [dataclasses.asdict(item) for item in items]


def size_text(size: float) -> str:
    """Bytes, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """With one space beside the widest entry of each column; `right`: columns that are numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def of_entries(entries: Sequence[Entry]) -> str:
    """A row each."""
    if not entries:
        return "no checkpoints"
    rows = [["step", "ranks", "plan", "optimizer", "parameters", "size", "date", "state"]]
    for one in entries:
        state = "whole" if one.whole else f"torn: {one.why}"
        known = one.world_size > 0
        rows.append(
            [
                str(one.step) + (f"-{one.micro_step}" if one.micro_step else ""),
                str(one.world_size) if known else "-",
                one.plan or "-",
                one.optimizer or "-",
                f"{one.elements:,}" if known else "-",
                size_text(one.bytes) if known else "-",
                one.date[:19].replace("T", " "),
                state,
            ]
        )
    return _table(rows, right=(0, 1, 4, 5))


def facts_of(contents: Contents, entry: Entry | None) -> dict[str, Any]:
    """Of one checkpoint, for JSON."""
    return {
        "path": contents.origin,
        "kind": contents.kind,
        "step": contents.step,
        "optimizer": contents.optimizer,
        "checkpoint": None if entry is None else dataclasses.asdict(entry),
        "groups": contents.groups,
        "accumulation": contents.accumulation,
        "loss_scaler": contents.loss_scaler,
        "user": json.loads(user_text(contents.user)),
        "params": [
            {
                "name": param.name,
                "shape": list(param.shape),
                "dtype": _short(param.dtype),
                "trainable": param.trainable,
                "group": param.group,
                "updates": param.updates,
                "aliases": param.aliases,
                "states": {
                    name: {"dtype": _short(lazy.dtype), "shape": list(lazy.shape), "bytes": lazy.bytes}
                    for name, lazy in param.states.items()
                },
            }
            for param in contents.params
        ],
        "buffers": {
            name: {"dtype": _short(lazy.dtype), "shape": list(lazy.shape), "bytes": lazy.bytes}
            for name, lazy in contents.buffers.items()
        },
        "left_out": contents.left_out,
    }


def of_contents(contents: Contents, entry: Entry | None) -> str:
    """A checkpoint, a row a parameter."""
    states = [lazy for param in contents.params for lazy in param.states.values()]
    size = sum(lazy.bytes for lazy in [*states, *contents.buffers.values()])
    elements = sum(math.prod(param.shape) for param in contents.params)
    lines = [
        contents.origin,
        f"form {contents.kind}, step {contents.step}, optimizer {contents.optimizer or 'none'}, "
        f"{elements:,} parameters in {len(contents.params)} tensors, {size_text(size)}",
    ]
    if entry is not None:
        ranks = f"{entry.world_size} rank{'s' if entry.world_size != 1 else ''}"
        state = "whole" if entry.whole else f"torn: {entry.why}"
        if entry.base:
            state += f"; weights that never train are in {entry.base}"
        lines.append(f"written by {ranks}, plan {entry.plan}, {entry.date}, {state}")
    for number, group in enumerate(contents.groups):
        lines.append(f"group {number}: " + ", ".join(f"{name} {value:g}" for name, value in group.items()))
    if contents.accumulation:
        lines.append("between micro-steps: {micro_step} of {micro_steps}".format(**contents.accumulation))
    if contents.loss_scaler:
        lines.append("loss scaler: " + ", ".join(f"{name} {value:g}" for name, value in contents.loss_scaler.items()))
    if contents.user.get("client") is not None:
        lines.append(f"client state: {_shortened(contents.user['client'])}")
    rows = [["name", "shape", "dtype", "states", "size", "group", "updates"]]
    for param in contents.params:
        own = ", ".join(f"{name} {_short(lazy.dtype)}" for name, lazy in param.states.items() if name != WEIGHT)
        weight = _short(param.states[WEIGHT].dtype)
        rows.append(
            [
                " = ".join([param.name, *param.aliases]),
                "x".join(map(str, param.shape)) or "scalar",
                _short(param.dtype) + (f" (master {weight})" if weight != _short(param.dtype) else ""),
                own or ("-" if param.trainable else "frozen"),
                size_text(sum(lazy.bytes for lazy in param.states.values())),
                str(param.group) if param.group >= 0 else "-",
                str(param.updates),
            ]
        )
    for name, lazy in contents.buffers.items():
        shape = "x".join(map(str, lazy.shape)) or "scalar"
        rows.append([name, shape, _short(lazy.dtype), "buffer", size_text(lazy.bytes), "-", "-"])
    lines += [_table(rows, right=(4, 5, 6)), *(f"not taken: {one}" for one in contents.left_out)]
    return "\n".join(lines)


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _shortened(value: Any, most: int = 200) -> str:
    text = str(value)
    return text if len(text) <= most else text[:most] + "..."


def damage_of(damage: _C.Damage) -> dict[str, Any]:
    """For JSON."""
    return {
        "file": damage.file,
        "begin": damage.begin,
        "end": damage.end,
        "keys": list(damage.keys),
        "what": damage.what,
    }


def of_damage(results: Sequence[dict[str, Any]]) -> str:
    """A line for what is wrong, with the states that it hits; a line for each whole checkpoint."""
    lines = []
    for result in results:
        if not result["damage"]:
            lines.append(f"{result['path']}: whole")
        for one in result["damage"]:
            keys = one["keys"]
            hit = ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            if one["file"] == "manifest.json":
                place = "manifest.json"
            elif one["file"]:
                place = f"{one['file']}, bytes {one['begin']} to {one['end']}"
            else:
                place = f"elements {one['begin']} to {one['end']}"
            lines.append(f"{result['path']}: {place}: {one['what']}" + (f"; hits {hit}" if hit else ""))
    return "\n".join(lines)


def of_differences(found: Sequence[Difference]) -> str:
    """A line each; "equal" if there is none."""
    if not found:
        return "equal"
    lines = []
    for one in found:
        if one.kind == "values":
            about = f"{one.elements} elements differ, by at most {one.max_abs:g} ({one.max_rel:g} of the larger one)"
        elif one.kind.startswith("missing"):
            about = one.kind
        else:
            about = f"{'' if one.kind == 'value' else one.kind + ' '}{_shortened(one.a)} against {_shortened(one.b)}"
        lines.append(f"{one.what}: {about}")
    return "\n".join(lines)


def of_conversion(path: str, contents: Contents) -> str:
    """The path, then what the source has and the target does not."""
    return "\n".join([path, *(f"not taken: {one}" for one in contents.left_out)])
