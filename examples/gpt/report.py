"""What a run tells: lines for people on stdout, records for programs in a JSON-lines file, pictures; all from rank 0
only. The lines and the records are those of examples/gpt_cpp/report.h."""

import contextlib
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from data import format_bytes
from errors import errno_text, make_error
from options import Options
from sampling import printable
from settings import Settings
from tqdm import tqdm  # type: ignore[import-untyped]

Bytes = dict[str, int]


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class StepRecord:
    """One committed or skipped optimizer step."""

    step: int
    """from 1"""
    loss: float
    """nats per byte, mean over micro-steps and ranks"""
    grad_norm: float
    """of the averaged gradient, before clipping"""
    lr: float
    tokens: int
    """of this step, all ranks and micro-steps together"""
    seconds: float
    """wall time of this step"""
    skipped: str
    """why no weight was changed; empty: committed"""

    def as_json(self) -> dict[str, Any]:
        record = {
            "step": self.step,
            "loss": _number(self.loss),
            "loss_hex": hex_float(self.loss),
            "grad_norm": _number(self.grad_norm),
            "lr": self.lr,
            "tokens": self.tokens,
            "seconds": self.seconds,
        }
        return record | ({"skipped": self.skipped} if self.skipped else {})


@dataclasses.dataclass(kw_only=True, slots=True)
class RunSummary:
    """The end of a run. Bytes are those of rank 0, unless said otherwise."""

    world_size: int
    zero_stage: int
    parameters: int
    bigram_entropy: float
    steps: int = 0
    seconds: float = 0.0
    """of training, without the first step (warm-up), validations and sample"""
    tokens_per_second: float = 0.0
    last_loss_hex: str = ""
    validation_loss: float | None = None
    below_bigram_step: int | None = None
    """first validation below the bigram entropy"""
    target_reached: bool = False
    planned: Bytes = dataclasses.field(default_factory=dict)
    """by state, and their total"""
    measured: Bytes = dataclasses.field(default_factory=dict)
    """the same at the moment of the largest total"""
    pss_peak: int = 0
    """each rank's highest proportional set size after a forward, backward or step; their sum"""
    wire: Bytes = dataclasses.field(default_factory=dict)
    """received in training steps, by kind"""
    wire_formula: Bytes = dataclasses.field(default_factory=dict)
    """the plan's formula for the same steps"""
    wire_control: int = 0
    """received in training steps beside them: commit votes, averages"""
    live_slots: int = 0
    """most ring slots in use at a time"""
    files: Bytes = dataclasses.field(default_factory=dict)
    """of the last step, asked of files by kind: what moved, and what was still in memory"""
    files_formula: Bytes = dataclasses.field(default_factory=dict)
    """the plan's formula for a step"""
    files_moved: int = 0
    """bytes that moved in all steps, in both directions"""
    files_seconds: float = 0.0
    """in which a transfer was on its way, in all steps"""
    files_hidden: float = 1.0
    """the part of them in which the training did not wait"""

    def as_json(self) -> dict[str, Any]:
        return {
            "final": True,
            "steps": self.steps,
            "world_size": self.world_size,
            "zero_stage": self.zero_stage,
            "parameters": self.parameters,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "last_loss_hex": self.last_loss_hex,
            "validation_loss": None if self.validation_loss is None else _number(self.validation_loss),
            "bigram_entropy": self.bigram_entropy,
            "below_bigram_step": self.below_bigram_step,
            "target_reached": self.target_reached,
            "planned_bytes": self.planned,
            "measured_bytes": self.measured,
            "pss_peak_bytes": self.pss_peak,
            "wire_bytes": self.wire,
            "wire_formula_bytes": self.wire_formula,
            "wire_control_bytes": self.wire_control,
            "live_slots_peak": self.live_slots,
            "file_bytes": self.files,
            "file_formula_bytes": self.files_formula,
            "file_moved_bytes": self.files_moved,
            "file_seconds": self.files_seconds,
            "file_hidden_share": self.files_hidden,
        }


class Report:
    def __init__(self, rank: int, options: Options) -> None:
        """Opens the files, so that a path that cannot be written is an error before the training. Raises Error IO, or
        ENVIRONMENT."""
        self._speaks = rank == 0
        self._options = options
        self._losses: list[tuple[int, float]] = []
        self._validations: list[tuple[int, float]] = []
        self._bar: Any = None
        self._json: TextIO | None = None
        if self._speaks and options.json:
            with _io_errors("the records", options.json):
                self._json = options.json.open("w")
        if self._speaks and options.plot:
            _prepare_plots(options.plot)

    def line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._speaks:
            print(text, flush=True)

    def introduce(self, settings: Settings, summary: RunSummary, threads: int) -> None:
        """Size of the model and how it is trained."""
        options = self._options
        self.line(
            f"{summary.parameters:,} parameters: {options.layers} layers, width {options.d_model}, {options.heads} heads, "  # noqa: E501
            f"sequence {options.seq}, {settings.dtype}"
        )
        sharing = summary.world_size // settings.data_ranks
        ranks = f"{summary.world_size} ranks" if sharing == 1 else f"{settings.data_ranks} groups of {sharing} ranks"
        self.line(
            f"ZeRO-{summary.zero_stage}, {ranks} x {settings.accumulate} micro-steps x {settings.micro_batch} "  # noqa: E501
            f"sequences = {settings.batch} sequences a step, threads per rank: {threads}"
        )

    def step(self, record: StepRecord) -> None:
        """Appends {step, loss, loss_hex, grad_norm, lr, tokens, seconds} (a skipped step: with "skipped") to the
        records."""
        if not self._speaks:
            return
        self._losses.append((record.step, record.loss))
        self._append(record.as_json())
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {record.loss:.4f}", refresh=False)
            self._bar.update()

    def progress(self, record: StepRecord, tokens_per_second: float) -> None:
        """ "step 20/300  loss 2.7182  5,432 tokens/s  grad norm 0.810  lr 1.00e-03"; the bar, where there is one,
        stands for it."""
        if self._bar is None:
            self.line(
                f"step {record.step}/{self._options.steps}  loss {record.loss:.4f}  {int(tokens_per_second):,} tokens/s  "  # noqa: E501
                f"grad norm {record.grad_norm:.3f}  lr {record.lr:.2e}"
            )

    def validation(self, step: int, loss: float, bigram_entropy: float) -> None:
        """ "step 20  validation loss 2.5012 nats/byte (bigram entropy of the held-out text: 2.3957)"."""
        self._validations.append((step, loss))
        self.line(
            f"step {step}  validation loss {loss:.4f} nats/byte (bigram entropy of the held-out text: {bigram_entropy:.4f})"  # noqa: E501
        )

    def sample(self, prompt: bytes, text: bytes, temperature: float) -> None:
        """The generated text under a heading."""
        self.line(f'--- sample, temperature {temperature:g}, after the prompt "{printable(prompt)}" ---')
        self.line(printable(prompt) + printable(text))
        self.line("--- end of the sample ---")

    def table(self, summary: RunSummary) -> None:
        """Planned and measured bytes by state, bytes on the wire by kind against their formula."""

        def row(name: str, left: str, right: str) -> None:
            self.line(f"  {name:<32} {left:>16} {right:>16}")

        self.line(
            f"ZeRO-{summary.zero_stage}, {summary.world_size} ranks, {summary.parameters:,} parameters: bytes of rank 0"
        )
        row("memory", "planned", "measured")
        for name, planned in summary.planned.items():
            row(name, f"{planned:,}", f"{summary.measured[name]:,}")
        row("wire, all training steps", "formula", "counted")
        for name, counted in summary.wire.items():
            row(name, f"{summary.wire_formula[name]:,}", f"{counted:,}")
        row("control", "", f"{summary.wire_control:,}")
        if summary.files:
            row("files, last step", "formula", "counted")
        for name, counted in summary.files.items():
            row(name, f"{summary.files_formula[name]:,}", f"{counted:,}")
        if summary.files:
            self.line(
                f"  files: {summary.files_moved / 1e6 / max(summary.files_seconds, 1e-9):,.0f} MB/s while something was on its "  # noqa: E501
                f"way, {100 * summary.files_hidden:.0f} % of that time hidden behind the training"
            )
        self.line(
            f"  ring slots in use at a time, most: {summary.live_slots}; peak PSS of all ranks: {format_bytes(summary.pss_peak)}"  # noqa: E501
        )

    def finish(self, summary: RunSummary) -> None:
        """Appends the final record {final, ...} and draws the pictures."""
        if not self._speaks:
            return
        self._append(summary.as_json())
        if self._options.plot:
            import plots

            with _io_errors("a picture", self._options.plot):
                plots.draw_losses(
                    self._options.plot / "loss.png",
                    self._losses,
                    self._validations,
                    bigram_entropy=summary.bigram_entropy,
                )
                plots.draw_stages(self._options.plot / "memory.png", [summary.as_json()])
            self.line(f"pictures drawn in {self._options.plot}: loss.png, memory.png")

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """A progress bar as long as it lasts, if it was asked for, or if stdout is a terminal and nothing was said."""
        wanted = sys.stdout.isatty() if self._options.bar is None else self._options.bar
        if not (wanted and self._speaks):
            yield
            return
        with tqdm(total=self._options.steps, unit="step", file=sys.stdout, dynamic_ncols=True) as self._bar:
            yield
        self._bar = None

    def _append(self, record: dict[str, Any]) -> None:
        if self._json is not None and self._options.json is not None:
            with _io_errors("a record", self._options.json):
                print(json.dumps(record, separators=(",", ":")), file=self._json, flush=True)


def hex_float(value: float) -> str:
    """ "0x1.8p+1": the exact value, as C's %a writes it."""
    mantissa, exponent, power = value.hex().partition("p")
    return mantissa.rstrip("0").rstrip(".") + exponent + power if exponent else mantissa


def _number(value: float) -> float | None:
    """JSON has no infinity and no NaN: they become null, and loss_hex still tells them apart."""
    return value if math.isfinite(value) else None


def _prepare_plots(folder: pathlib.Path) -> None:
    try:
        import plots as plots  # not above: matplotlib takes its time
    except ImportError as error:
        raise make_error(
            "ENVIRONMENT", "pictures need matplotlib", which="--plot", got=str(error), hint="pip install matplotlib"
        ) from error
    with _io_errors("the pictures", folder):
        folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _io_errors(what: str, path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise make_error("IO", f"cannot write {what}", which=str(path), got=errno_text(error)) from error
