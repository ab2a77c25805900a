"""The configuration that follows from the arguments and a configuration file: arguments win, and the trainer has
defaults for what neither says. "auto" in the file counts as not said where the trainer has a value. The same as
examples/gpt_cpp/settings.cpp."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from errors import make_error
from options import Options

import zeroth

STAGE = "/zero_optimization/stage"
TRAIN = "/train_batch_size"
MICRO = "/train_micro_batch_size_per_gpu"
ACCUMULATE = "/gradient_accumulation_steps"
CLIP = "/gradient_clipping"
OFFLOAD = "/zero_optimization/offload_"
LR = "/optimizer/params/lr"
BF16 = "/bf16/enabled"
FP16 = "/fp16/enabled"
DEFAULT_LR = 1e-3
DEFAULT_BATCH = 8

_ABSENT = object()


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class Settings:
    """What the engine runs with."""

    config: zeroth.Config
    micro_batch: int
    """sequences of a rank's micro-step"""
    accumulate: int
    """micro-steps of a step"""
    batch: int
    """sequences of a step, all ranks together"""
    mesh: dict[str, int]
    """sizes of the axes"""
    data_ranks: int
    """ranks, or groups of ranks that share layers, matrices or sequences, with batches of their own"""
    dtype: str
    """ "fp32", "bf16", "fp16" or "fp64" """
    notes: list[str]
    """which argument replaced which value of the file"""


class Overrides:
    """A document, and what wins over it. Keys are JSON pointers."""

    def __init__(self, path: pathlib.Path | None) -> None:
        self.path = path
        self.document = _read(path) if path else {}
        self.overrides: list[zeroth.ConfigOverride] = []
        self.notes: list[str] = []

    def value(self, pointer: str) -> Any:
        """What the document says, "auto" included, or _ABSENT."""
        value: Any = self.document
        for name in pointer.split("/")[1:]:
            value = value.get(name, _ABSENT) if isinstance(value, dict) else _ABSENT
        return value

    def mentions(self, pointer: str) -> bool:
        return self.value(pointer) is not _ABSENT

    def says(self, pointer: str) -> bool:
        """The document has something else than "auto"."""
        return self.mentions(pointer) and self.value(pointer) != "auto"

    def size(self, pointer: str) -> int:
        """A positive integer of the document, or 0."""
        value = self.value(pointer)
        return max(0, value) if isinstance(value, int) else 0

    def argument(self, name: str, pointer: str, value: Any) -> None:
        """None: the argument was not given."""
        if value is None:
            return
        if self.says(pointer) and self.value(pointer) != value:
            old = json.dumps(self.value(pointer))
            self.notes.append(f"{name}: {pointer} = {json.dumps(value)} replaces {old} of {self.path}")
        self._add(pointer, value, name)

    def fallback(self, pointer: str, value: Any) -> None:
        if not self.says(pointer):
            self._add(pointer, value, "default of train.py")

    def resolve_auto(self, pointer: str, value: Any) -> None:
        """Only where the document leaves the value to its caller."""
        if self.mentions(pointer):
            self.fallback(pointer, value)

    def config(self, more: Sequence[zeroth.ConfigOverride] = ()) -> zeroth.Config:
        """Raises ConfigError, which names the line of the file or the argument."""
        every = [*self.overrides, *more]
        if self.path:
            return zeroth.Config.from_file(self.path, every)
        return zeroth.Config.from_json("{}", "the arguments", every)

    def _add(self, pointer: str, value: Any, origin: str) -> None:
        self.overrides.append(zeroth.ConfigOverride(pointer, value, origin))


def make_settings(options: Options, world_size: int) -> Settings:
    """Raises what zeroth.Config says about file and arguments."""
    overrides = Overrides(options.config)
    for axis, size in sorted(options.mesh.items()):
        overrides.argument("--mesh", f"/zeroth/mesh/{axis}", size)
    _merge_optimizer(options, overrides)
    _merge_scheduler(options.steps, overrides)
    _merge_dtype(options.dtype, overrides)
    overrides.argument("--zero-stage", STAGE, options.zero_stage)
    overrides.argument("--clip", CLIP, options.clip)
    for name, folder in (("optimizer", options.offload_optimizer), ("param", options.offload_param)):
        if folder is not None:
            overrides.argument(f"--offload-{name}", f"{OFFLOAD}{name}/device", "nvme")
            overrides.argument(f"--offload-{name}", f"{OFFLOAD}{name}/nvme_path", folder)
    if options.memory_limit is not None:
        overrides.argument("--memory-limit", "/zeroth/memory_limit_bytes", options.memory_limit << 20)
    if options.zero_stage is None:
        overrides.fallback(STAGE, 3)
    if options.clip is None:
        overrides.fallback(CLIP, 1.0)
    mesh = _find_mesh(world_size, overrides)
    data_ranks = mesh["dp"] * mesh.get("ep", 1)
    _merge_batch(options, data_ranks, overrides)

    config = overrides.config()
    micro_batch, accumulate = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert micro_batch is not None and accumulate is not None, "_merge_batch sets them"
    sections = json.loads(config.to_json())
    halves = [name for name in ("bf16", "fp16") if sections[name]["enabled"]]
    return Settings(
        config=config,
        micro_batch=micro_batch,
        accumulate=accumulate,
        batch=micro_batch * accumulate * data_ranks,
        mesh=mesh,
        data_ranks=data_ranks,
        dtype=options.dtype or (halves[0] if halves else "fp32"),
        notes=overrides.notes,
    )


def _find_mesh(world_size: int, overrides: Overrides) -> dict[str, int]:
    """The axes, which have to be known before the batch: with one of size 1 in the place of what is not known yet."""
    sizes = [MICRO, ACCUMULATE, *([TRAIN] if overrides.mentions(TRAIN) else [])]
    return overrides.config([zeroth.ConfigOverride(size, 1, "train.py") for size in sizes]).mesh(world_size)


def _merge_batch(options: Options, data_ranks: int, overrides: Overrides) -> None:
    """The three sizes depend on each other. With --batch or --accumulate the product follows them; else a product in
    the file decides about what the file leaves open."""
    train = 0 if options.batch or options.accumulate else overrides.size(TRAIN)
    micro = options.batch or overrides.size(MICRO)
    accumulate = options.accumulate or overrides.size(ACCUMULATE)
    if accumulate == 0:
        accumulate = max(1, train // (data_ranks * micro)) if train and micro else 1
    if micro == 0:
        micro = max(1, train // (data_ranks * accumulate)) if train else DEFAULT_BATCH
    overrides.argument("--batch", MICRO, options.batch)
    overrides.argument("--accumulate", ACCUMULATE, options.accumulate)
    if options.batch is None:
        overrides.fallback(MICRO, micro)
    if options.accumulate is None:
        overrides.fallback(ACCUMULATE, accumulate)
    if train == 0 and overrides.mentions(TRAIN):
        overrides.argument("--batch and --accumulate", TRAIN, micro * accumulate * data_ranks)


def _merge_optimizer(options: Options, overrides: Overrides) -> None:
    """AdamW unless the file brings its own; betas as is usual for language models."""
    overrides.argument("--lr", LR, options.lr)
    if overrides.says("/optimizer"):
        if options.lr is None:
            overrides.resolve_auto(LR, DEFAULT_LR)
        return
    overrides.fallback("/optimizer/type", "AdamW")
    overrides.fallback("/optimizer/params/betas", [0.9, 0.95])
    overrides.fallback("/optimizer/params/weight_decay", 0.1)
    if options.lr is None:
        overrides.fallback(LR, DEFAULT_LR)


def _merge_scheduler(steps: int, overrides: Overrides) -> None:
    """A warmed-up cosine unless the file brings its own."""
    warmup = min(100, max(1, steps // 10))
    total = max(steps, warmup + 1)
    if overrides.says("/scheduler"):
        overrides.resolve_auto("/scheduler/params/total_num_steps", total)
        overrides.resolve_auto("/scheduler/params/warmup_num_steps", warmup)
        return
    overrides.fallback("/scheduler/type", "WarmupCosineLR")
    overrides.fallback("/scheduler/params/total_num_steps", total)
    overrides.fallback("/scheduler/params/warmup_num_steps", warmup)
    overrides.fallback("/scheduler/params/warmup_min_ratio", 0.1)  # the first step trains, too
    overrides.fallback("/scheduler/params/cos_min_ratio", 0.1)


def _merge_dtype(dtype: str | None, overrides: Overrides) -> None:
    for name, key in (("bf16", BF16), ("fp16", FP16)):
        if dtype is None:
            overrides.resolve_auto(key, False)
        elif dtype == name or overrides.mentions(key):
            overrides.argument(f"--dtype {dtype}", key, dtype == name)


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The file's JSON object. Raises what zeroth.Config says about a file that holds none."""
    try:
        document = json.loads(path.read_text("utf-8"), object_pairs_hook=_unique_keys)
    except (OSError, ValueError):
        document = None
    if not isinstance(document, dict):
        zeroth.Config.from_file(path)
        raise make_error("CONFIG", "the file holds no JSON object", which=str(path))
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key is there twice")
    return document
