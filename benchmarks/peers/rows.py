"""The rows of a cell's result: "<contestant>: <what>". Plain Python 3."""

from __future__ import annotations

from cells import BARE, TINY_MODULES
from measure import Measurement, Solo
from record import Record


def add_rows(record: Record, measured: Measurement) -> None:
    startup_bare = measured.startup[BARE.name]
    for name in [BARE.name, *(entry.name for entry in measured.entries)]:
        if measured.pairs[name]:
            _add_step(record, measured, name)
        if name in measured.solo:
            _add_solo(record, measured.solo[name], name)
            peak = _tracked_peak(measured.solo[name], measured.solo.get("floor"))
            if peak is not None and name != "floor":
                record.add(f"{name}: tracked highest, largest rank", "MB", [peak / 1e6], "lower")
        startup = measured.startup[name]
        if startup:
            record.add(f"{name}: start-up", "s", startup, "lower")
        if name != BARE.name and len(startup) == len(startup_bare) > 0:
            record.add(
                f"{name}: start-up over bare", "s", [own - other for own, other in zip(startup, startup_bare)], "lower"
            )


def _add_step(record: Record, measured: Measurement, name: str) -> None:
    pairs = measured.pairs[name]
    record.add(f"{name}: step", "ms", [1e3 * own["wall"] for own, _ in pairs], "lower")
    if measured.cell.work != "tiny":
        tokens = sum(report["tokens"] for report in measured.solo[name].reports)
        record.add(f"{name}: tokens", "tokens/s", [tokens / own["wall"] for own, _ in pairs], "higher")
    record.add(f"{name}: CPU of a step, all ranks", "s", [own["cpu"] for own, _ in pairs], "lower")
    if name == "floor":
        return
    record.add(f"{name}: step over floor", "x", [own["wall"] / floor["wall"] for own, floor in pairs], "lower")
    for field, phase in (("wall", "step"), ("forward", "forward"), ("backward", "backward"), ("update", "update")):
        record.add(
            f"{name}: {phase} beyond floor", "ms", [1e3 * (own[field] - floor[field]) for own, floor in pairs], "lower"
        )
    if measured.cell.work == "tiny":
        micros = [1e6 * (own["wall"] - floor["wall"]) / TINY_MODULES for own, floor in pairs]
        record.add(f"{name}: a module beyond floor", "us", micros, "lower")


def _tracked_peak(solo: Solo, floor: Solo | None) -> int | None:
    """The highest within a step, without the activations: by the contestant's own count, or its samples less the
    floor's."""
    if all("tracked_peak" in report for report in solo.reports):
        return max(report["tracked_peak"] for report in solo.reports)
    if floor is None or not all("tracked_in_step" in report for report in [*solo.reports, *floor.reports]):
        return None
    peaks = []
    for own, plain in zip(solo.reports, floor.reports):
        samples, activations = own["tracked_in_step"], plain["tracked_in_step"]
        if not samples or len(samples) != len(activations):
            return None
        peaks.append(max(held - other for held, other in zip(samples, activations)))
    return max(peaks)


def _add_solo(record: Record, solo: Solo, name: str) -> None:
    reports = solo.reports
    for row, field in (("after backward", "tracked_after_backward"), ("after step", "tracked_after_step")):
        record.add(
            f"{name}: tracked {row}, largest rank", "MB", [max(report[field] for report in reports) / 1e6], "lower"
        )
    record.add(f"{name}: peak PSS, all ranks", "MiB", [solo.peak_pss / 2**20], "lower")
    if "counted" in reports[0]:
        record.add(
            f"{name}: wire a step, all ranks", "MB", [sum(report["counted"] for report in reports) / 1e6], "lower"
        )
    elif name != "floor":
        record.add(f"{name}: wire a step, all ranks", "MB", [reports[0]["loopback"] / 1e6], "lower")
    record.add(f"{name}: last loss alone, rank 0", "nats", [reports[0]["loss"]])
