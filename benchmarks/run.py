#!/usr/bin/env python3
"""Runs benchmarks of a build one after another and checks what they write.

  run.py [--build DIR] [--out DIR] [--quick] [--only NAME ...] [--list]

A NAME may be a pattern: --only 'peers-*'. --list prints the names, their commands and about how long each takes on two
quiet cores; --quick shortens every run until it only shows that it works. Plain Python 3; the peers need the Python
that has torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
sys.path.insert(0, str(ROOT / "benchmarks/support"))
sys.path.insert(0, str(ROOT / "benchmarks/peers"))
sys.path.insert(0, str(ROOT / "benchmarks/pipeline"))
import compare  # noqa: E402
from cells import CELLS  # noqa: E402
from record import Record, program, text_of  # noqa: E402
from setups import PARTS  # noqa: E402


@dataclasses.dataclass(kw_only=True, frozen=True)
class Run:
    name: str
    """also the result's file name"""
    command: str
    """{build}, {launcher}, {python} and {root} are filled in; --json FILE is appended"""
    quick: str
    """appended for --quick"""
    minutes: float
    """on two quiet cores"""
    on_demand: bool = False
    """run only if --only names it"""
    wrap: str = ""
    """name of the benchmark, for a program that writes bare rows"""


LAUNCH = "{launcher} -n"
STEP = "{build}/benchmarks/step_bench"
QUICK_STEP = "--size 3m --cycles 2 --steps-per-block 1"
SAVE = "{python} {root}/benchmarks/checkpoint/save_bench.py --build {build} --python {python}"
PIPELINE = "{python} {root}/benchmarks/pipeline/"
PEERS = "{python} {root}/benchmarks/peers/peers.py --build {build} --python {python} --cells"

RUNS = [
    Run(name="step-25m", command=f"{LAUNCH} 2 {STEP} --cycles 20 --noise", quick=QUICK_STEP, minutes=8.5),
    Run(
        name="step-25m-keep-pages", command=f"{LAUNCH} 2 {STEP} --cycles 12 --keep-pages", quick=QUICK_STEP, minutes=4.5
    ),
    Run(
        name="step-25m-reshard-all",
        command=f"{LAUNCH} 2 {STEP} --cycles 12 --plans 3 --reshard all",
        quick=QUICK_STEP,
        minutes=2,
    ),
    Run(
        name="step-25m-accumulate-4",
        command=f"{LAUNCH} 2 {STEP} --cycles 8 --accumulate 4 --steps-per-block 1",
        quick=QUICK_STEP,
        minutes=6,
    ),
    Run(name="step-25m-bf16", command=f"{LAUNCH} 2 {STEP} --cycles 15 --dtype bf16", quick=QUICK_STEP, minutes=4),
    Run(
        name="step-25m-bf16-keep-pages",
        command=f"{LAUNCH} 2 {STEP} --cycles 12 --dtype bf16 --keep-pages",
        quick=QUICK_STEP,
        minutes=2,
    ),
    Run(
        name="step-25m-4-ranks",
        command=f"{LAUNCH} 4 {STEP} --cycles 8 --steps-per-block 1",
        quick=QUICK_STEP,
        minutes=4,
    ),
    Run(
        name="step-120m-stages-0-3",
        command=f"{LAUNCH} 2 {STEP} --size 120m --cycles 6 --steps-per-block 1 --plans 0,3",
        quick=QUICK_STEP,
        minutes=3.5,
    ),
    Run(
        name="step-120m-stages-1-2",
        command=f"{LAUNCH} 2 {STEP} --size 120m --cycles 6 --steps-per-block 1 --plans 1,2",
        quick=QUICK_STEP,
        minutes=3.5,
    ),
    Run(name="unit-cost-1-rank", command="{build}/benchmarks/unit_cost_bench", quick="--cycles 2", minutes=1),
    Run(
        name="unit-cost-2-ranks",
        command=LAUNCH + " 2 {build}/benchmarks/unit_cost_bench",
        quick="--cycles 2",
        minutes=1,
    ),
    Run(
        name="startup",
        command="{python} {root}/benchmarks/step/startup_bench.py --build {build}",
        quick="--rounds 2",
        minutes=1,
    ),
    Run(
        name="memory-25m",
        command="{python} {root}/benchmarks/memory/memory_table.py --build {build}",
        quick="--steps 2 --ranks 2",
        minutes=1.5,
    ),
    Run(
        name="memory-sequences",
        command="{python} {root}/benchmarks/memory/sequence_lengths.py --build {build}",
        quick="--mib 4 --ranks 1",
        minutes=2.5,
    ),
    *(
        Run(
            name=f"overhead-{part}",
            command=f"{{python}} {{root}}/benchmarks/parallel/overhead.py {part} --build {{build}} --python {{python}}",
            quick="--cycles 1 --tokens 256 --layers 2",
            minutes=8,
            on_demand=True,
        )
        for part in ("tensor", "sequence")
    ),
    *(
        Run(
            name=f"checkpoint-{size}-{ranks}-rank{'s' if ranks > 1 else ''}",
            command=f"{SAVE} --ranks {ranks} --size {size} {more}",
            quick="--rounds 2 --steps 0",
            minutes=minutes,
        )
        for size, ranks, more, minutes in (
            (382, 1, "--steps 3", 3),
            (382, 2, "--steps 3 --batch 256", 3),
            (2016, 1, "--rounds 5", 4),
            (2016, 2, "--rounds 5", 4),
        )
    ),
    *(
        Run(name=cell.name, command=f"{PEERS} {cell.name}", quick="--quick", minutes=cell.minutes, on_demand=True)
        for cell in CELLS
    ),
    *(
        Run(
            name=f"pipeline-{name}",
            command=f"{PIPELINE}pipeline.py {name} --build {{build}} --python {{python}}",
            quick="--layers 4 --width 64 --tokens 32 --cycles 2 --block-seconds 0 --startup-rounds 1",
            minutes=12 if part.deepspeed else 6,
            on_demand=True,
        )
        for name, part in PARTS.items()
    ),
    Run(
        name="pipeline-actions",
        command=f"{PIPELINE}actions.py --build {{build}} --python {{python}}",
        quick="--micro 8 --cycles 2 --steps 2",
        minutes=4,
        on_demand=True,
    ),
    Run(
        name="pipeline-sleeping",
        command=f"{PIPELINE}sleeping.py --build {{build}} --python {{python}}",
        quick="--stages 2 --micro 4 --times 5,5,5 --steps 2 --schedules 1f1b zb-h1",
        minutes=9,
        on_demand=True,
    ),
    Run(
        name="offload-disk",
        command="{python} {root}/benchmarks/offload/disk.py {root}/build --build {build}",
        quick="--rounds 2 --seconds 1 --mib 64",
        minutes=4,
        on_demand=True,
    ),
    Run(
        name="offload-step",
        command="{python} {root}/benchmarks/offload/step.py {root}/build --build {build} --python {python}",
        quick="--work 3m --cycles 2 --block-seconds 0",
        minutes=6,
        on_demand=True,
    ),
    Run(
        name="offload-largest",
        command="{python} {root}/benchmarks/offload/largest.py {root}/build --build {build} --python {python}",
        quick="--memory 0.25 --disk 1 --width 256 --steps 2",
        minutes=10,
        on_demand=True,
    ),
    Run(
        name="offload-bus",
        command="{python} {root}/benchmarks/offload/bus.py --build {build} --folder {root}/build",
        quick="--params 16777216 --turns 1 --rounds 1",
        minutes=3,
        on_demand=True,
    ),
    Run(
        name="links-to-loss",
        command="{python} {root}/benchmarks/links/to_loss.py --build {build} --python {python}",
        quick="--steps 60 --freeze 10 --gbit 1 --lr 1e-3 --rounds 1",
        minutes=45,
        on_demand=True,
    ),
    Run(
        name="watch",
        command="{build}/benchmarks/watch_bench",
        quick="--rounds 3",
        minutes=1,
    ),
    Run(
        name="control",
        command="{build}/benchmarks/control_bench",
        quick="--ranks 8 --rounds 1",
        minutes=3,
    ),
    *(
        Run(
            name=f"watch-step-{plan}",
            command=f"{LAUNCH} 2 {{build}}/benchmarks/watch_step_bench --size 25m --plan {plan} --cycles 70 --max-seconds 560",  # noqa: E501
            quick="--size 3m --cycles 2",
            minutes=10,
        )
        for plan in (2, 3)
    ),
    Run(
        name="collectives-2-ranks",
        command="{build}/benchmarks/collectives_bench --ranks 2",
        quick="--rounds 3",
        minutes=1,
        wrap="comm/collectives",
    ),
    Run(
        name="collectives-4-ranks",
        command="{build}/benchmarks/collectives_bench --ranks 4",
        quick="--rounds 3",
        minutes=2,
        wrap="comm/collectives",
    ),
    *(
        Run(
            name=f"mpi-{ranks}-ranks",
            command=f"mpirun --oversubscribe --bind-to none --mca btl self,vader -n {ranks} {{build}}/benchmarks/mpi_bench",  # noqa: E501
            quick="--rounds 1 --sizes 4096 65536",
            minutes=minutes,
            on_demand=True,
        )
        for ranks, minutes in ((2, 4), (4, 8))
    ),
    *(
        Run(
            name=f"comm-peers-{ranks}-ranks",
            command=f"{{python}} {{root}}/benchmarks/comm/comm_peers.py --build {{build}} --ranks {ranks}",
            quick="--rounds 1 --largest 20",
            minutes=minutes,
            on_demand=True,
        )
        for ranks, minutes in ((2, 5), (4, 10))
    ),
    Run(
        name="step-phase", command="{build}/benchmarks/step_phase_bench", quick="--params 8388608 --rounds 2", minutes=2
    ),
    Run(name="adamw", command="{build}/benchmarks/adamw_bench", quick="--params 8388608 --rounds 2", minutes=1),
    Run(
        name="adamw-torch",
        command="{python} {root}/benchmarks/kernels/adamw_torch.py --bench {build}/benchmarks/adamw_bench",
        quick="--params 8388608 --turns 1 --steps 2",
        minutes=1.5,
    ),
    Run(name="compress", command="{build}/benchmarks/compress_bench", quick="--seconds 0.02", minutes=1),
    Run(name="memory-copies", command="{build}/benchmarks/memory_bench", quick="--seconds 0.02", minutes=1),
    *(
        Run(
            name=f"moe-layer-{ranks}-{width}",
            command=f"{{python}} {{root}}/benchmarks/moe/layer.py --ranks {ranks} --width {width} --build {{build}} "
            "--python {python}",
            quick="--cycles 1 --tokens 64 --width 32",
            minutes=minutes,
            on_demand=True,
        )
        for ranks, width, minutes in ((1, 256, 0.5), (1, 1024, 3), (2, 256, 0.5), (2, 512, 1))
    ),
    Run(name="moe-kernels", command="{build}/benchmarks/moe_bench", quick="--seconds 0.02", minutes=0.5),
]


def wrap_rows(path: pathlib.Path, run: Run, command: str, load_before: float) -> None:
    """Makes a whole record of bare rows."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(rows, list):
        record = Record(benchmark=run.wrap, rows=rows, command=command, load_before=load_before)
        path.write_text(text_of(record.to_dict()), encoding="utf-8")


def forget_places(path: pathlib.Path, command: str) -> None:
    """A result names the command as anybody would type it, without this machine's folders."""
    record = json.loads(path.read_text(encoding="utf-8"))
    record["command"] = command
    path.write_text(text_of(record), encoding="utf-8")


def execute(run: Run, arguments: argparse.Namespace) -> bool:
    """True if the run ended well and its result fits the schema."""
    path = arguments.out / f"{run.name}.json"
    places = {
        "build": arguments.build,
        "launcher": program(arguments.build, "zeroth-run"),
        "python": arguments.python,
        "root": ROOT,
    }
    command = run.command.format(**places).split() + (run.quick.split() if arguments.quick else [])
    plain = " ".join(word.rsplit("/", 1)[-1] for word in command)
    print(f"== {run.name}: {plain}", flush=True)
    load = os.getloadavg()[0]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if subprocess.run([*command, "--json", str(path)], env=environment, check=False).returncode != 0:
        print(f"{run.name}: failed", file=sys.stderr)
        return False
    if run.wrap:
        wrap_rows(path, run, plain, load)
    forget_places(path, plain)
    result, found = compare.load(str(path))
    if result is None:
        print(f"{path}: does not fit schema.json", *found, sep="\n  ", file=sys.stderr)
    return result is not None


def chosen(run: Run, patterns: list[str] | None) -> bool:
    return not run.on_demand if patterns is None else any(fnmatch.fnmatch(run.name, pattern) for pattern in patterns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results (default: BUILD/benchmarks/results)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names or patterns; default: all but the peers")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--list", action="store_true")
    venv = ROOT / "build/venv/bin/python"
    parser.add_argument(
        "--python", default=str(venv) if venv.exists() else sys.executable, help="has torch, for the peers"
    )
    arguments = parser.parse_args()
    for pattern in arguments.only or []:
        if not any(fnmatch.fnmatch(run.name, pattern) for run in RUNS):
            parser.error(f"no benchmark is called {pattern}; --list prints their names")
    if arguments.list:
        for run in RUNS:
            print(f"{run.name:<26} {run.minutes:4.1f} min  {run.command}")
        for what, on_demand in (("all but the peers", False), ("the peers", True)):
            print(f"{what}: {sum(run.minutes for run in RUNS if run.on_demand == on_demand):.0f} min")
        return 0
    runs = [run for run in RUNS if chosen(run, arguments.only)]
    arguments.build = arguments.build.resolve()
    arguments.out = arguments.out or arguments.build / "benchmarks/results"
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = [run.name for run in runs if not execute(run, arguments)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
