"""The pictures of a run: losses over steps, and memory by ZeRO stage. tools/compare-stages draws the second one,
too."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

Curve = Sequence[tuple[int, float]]

STATE_COLORS = {
    "parameters": "#0072b2",
    "masters": "#56b4e9",
    "optimizer": "#e69f00",
    "buckets": "#009e73",
    "reduced": "#8fd3bb",
    "gathered": "#cc79a7",
    "overflow": "#d55e00",
    "control": "#555555",
    "other": "#bbbbbb",
}
"""of the states of memory, from the bottom of a bar to its top (the palette of Okabe and Ito, told apart by
everybody)"""


def draw_losses(path: pathlib.Path, losses: Curve, validations: Curve, *, bigram_entropy: float) -> None:
    """Training and validation loss in nats per byte, over steps; the bigram entropy of the held-out text is a line.
    Writes a PNG."""
    figure, axes = _figure("Loss of a byte-level GPT", 8.0)
    if losses:
        axes.plot(*zip(*losses, strict=True), color="#9ecae1", linewidth=1.0, label="training")
    if validations:
        axes.plot(*zip(*validations, strict=True), color="#0072b2", marker="o", markersize=3.5, label="validation")
    axes.axhline(
        bigram_entropy, color="#d55e00", linestyle="--", linewidth=1.2, label=f"bigram entropy {bigram_entropy:.4f}"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("nats per byte")
    axes.legend(frameon=False)
    figure.savefig(path, format="png")


def draw_stages(path: pathlib.Path, finals: Sequence[Mapping[str, Any]]) -> None:
    """A bar for each final record: the measured bytes of rank 0 by state, at the moment of the largest total. Writes a
    PNG."""
    first = finals[0]
    title = f"Memory of rank 0 of {first['world_size']}, {first['parameters']:,} parameters"
    figure, axes = _figure(title, 3.5 + 1.2 * len(finals))
    labels = [f"ZeRO-{final['zero_stage']}" for final in finals]
    tops = [0.0] * len(finals)
    for state, color in STATE_COLORS.items():
        heights = [final["measured_bytes"].get(state, 0) / 1e6 for final in finals]
        if any(heights):
            axes.bar(labels, heights, bottom=tops, width=0.6, color=color, label=state)
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
    for index, top in enumerate(tops):
        axes.annotate(f"{top:,.1f}", (index, top), xytext=(0, 3), textcoords="offset points", ha="center")
    axes.set_xlim(-0.6, len(finals) - 0.4)
    axes.set_ylabel("MB (10^6 bytes)")
    handles, names = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], names[::-1], frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )  # top of a bar first
    figure.savefig(path, format="png")


def _figure(title: str, width: float) -> tuple[Figure, Axes]:
    """`width` in inches. No pyplot: no windows, and nothing global."""
    figure = Figure(figsize=(width, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes
