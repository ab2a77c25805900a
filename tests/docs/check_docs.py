#!/usr/bin/env python3
"""Holds the pages of docs/ and README.md to what is in the repository.

usage: check_docs.py ROOT

Rules, each named in its messages:
  link     a relative link leads to a file or folder that is there, and its #anchor to a heading of it
  path     a `path/in/backticks` that begins like a path of the repository is there; `*` may stand for a part of a name
  proof    a `path: name in backticks` names what is in that file, a test for one
  twice    no row of a table that names its test stands twice in a page
  short    a how-to page has fewer than 40 lines
  machine  no line names a path of somebody's machine
  fence    code fences are closed
  block    a code block says which language it is, and a test runs it: python and json tests/python/docs_test.py, cpp
  and cmake the
           file that includes it (tests/docs/blocks.py says under which name), each command of sh the test that COMMANDS
           names. What is no code says text
  reach    every page of docs/ is linked from docs/index.md, directly or through a page or folder that is
Prints one line for each violation; exit code 1 if there is one.
"""

from __future__ import annotations

import pathlib
import re
import sys

from blocks import Block, blocks_of, without_fences

HOW_TO_LINES = 40
TOP_LEVEL = (
    r"(?:include|src|csrc|tests|tools|docs|examples|benchmarks|cmake|\.ci)/|"
    r"(?:CMakeLists\.txt|CMakePresets\.json|Makefile|pyproject\.toml|LICENSE|README\.md)$"
)
MACHINE = re.compile(r"(?<![\w./<>-])/(?:home|root|work|Users|mnt|media|opt|srv|tmp|usr|var)(?:/|\b)")
# Files that a how-to page tells its reader to write.
TO_BE_WRITTEN = {
    "docs/how-to-add-an-optimizer.md": {"src/optim/signum.cpp"},
    "docs/how-to-add-a-backend.md": {"src/comm/decorators/traced_backend.cpp"},
    "docs/how-to-add-a-kernel.md": {"csrc/kernels/scale/scale_math.h"},
    "docs/how-to-add-a-reduction.md": {"src/zero/reductions/rounded.cpp"},
    "docs/how-to-add-a-router.md": {"src/libtorch/experts/top_p.cpp"},
    "docs/how-to-add-a-schedule.md": {"src/program/schedules/breadth_first.cpp"},
}


def without_space(text: str) -> str:
    """Where a formatter breaks a line does not count, nor its last comma."""
    return re.sub(r"\s+", "", text).replace(",)", ")").replace(",]", "]")


# A command of a shell block: the test that runs it, and what stands there.
COMMANDS = {
    **dict.fromkeys(
        [
            "make train",
            "make test",
            "make test-quick",
            "make fuzz",
            "cmake --preset core",
            "cmake --build build/core -j 2",
            "build/core/tests/conformance/comm_chaos --gtest_filter='Chaos.*'",
            "benchmarks/peers/peers.py",
            "benchmarks/peers/peers.py --cells peers-25m-2-ranks",
            "benchmarks/run.py --only 'peers-*'",
            "benchmarks/peers/table.py --page docs/peers.md",
        ],
        ("tests/python/docs_test.py", "def test_commands"),
    ),
    "zeroth-run -n N [options] PROGRAM [arguments...]": (
        "tests/process/launcher/command_line_test.cpp",
        "Usage: zeroth-run -n N [options] PROGRAM",
    ),
    "zeroth-run -n 2 train.py --lr 1e-3": (
        "tests/process/launcher/command_line_test.cpp",
        '"--nproc_per_node=2", script, "--lr"',
    ),
    "zeroth-run -n 2 -m package.train --lr 1e-3": (
        "tests/process/launcher/command_line_test.cpp",
        '"-m", "package.train"',
    ),
    "zeroth-run --sites 3 -n 6 --max-restarts 2 train.py": (
        "tests/process/sites_test.cpp",
        '"--sites", "3", "-n", "6"',
    ),
    "zeroth-run --hostfile hosts --dry-run train.py": (
        "tests/process/launcher/hosts_test.cpp",
        '"--hostfile", file, "--dry-run", "train.py"',
    ),
    "zeroth-run --hostfile hosts python train.py": ("tests/python/apart_test.py", "def test_ranks_of_a_hostfile_train"),
    "zeroth-run --hosts node1:8,node2:8 python train.py": ("tests/python/apart_test.py", 'how="--hosts"'),
    **dict.fromkeys(
        [
            "zeroth-run -n 8 --nnodes 2 --node-rank 0 --rdzv node0:29400 --rdzv-secret-file secret python train.py",
            "zeroth-run -n 8 --nnodes 2 --node-rank 1 --rdzv node0:29400 --rdzv-secret-file secret python train.py",
            "zeroth-run -n 8 --nnodes 2 --node-rank $JOB_COMPLETION_INDEX --rdzv node0:29400 --rdzv-secret-file secret python train.py",  # noqa: E501
        ],
        ("tests/python/apart_test.py", "def test_ranks_of_nodes_train"),
    ),
    "zeroth-run --launcher mpirun --hostfile hosts python train.py": (
        "tests/process/launcher/restart_test.cpp",
        '"--launcher", "mpirun"',
    ),
    "zeroth-run --launcher srun --dry-run -n 16 python train.py": (
        "tests/process/launcher/restart_test.cpp",
        '"--launcher", "srun", "--dry-run"',
    ),
    "torchrun --nproc-per-node 2 --no-python ./trainer": (
        "tests/package/package_test.sh",
        "torchrun --nproc-per-node 2 --no-python ./trainer",
    ),
    "mpirun -n 2 ./trainer": ("tests/python/mpi_test.py", 'self.trained(ranks, "", per_node)'),
    "mpirun -n 8 --hostfile hosts python train.py": ("tests/python/hosts_test.py", "shared_memory_inside_it"),
    "mpirun -n 4 -x ZEROTH_BACKEND=mpi python train.py": ("tests/python/mpi_test.py", 'self.trained(ranks, "mpi")'),
    "mpirun -n 2 zeroth-bench comm --backends shm,mpi --tune calls.json": (
        "tests/python/mpi_test.py",
        '"--backends", "shm,mpi"',
    ),
    "zeroth-bench io disk0/scratch disk1/scratch --json io.json": (
        "tests/unit/bench/io_test.cpp",
        "AnEngineBlockAndDepthAreARowAndTheFilesGo",
    ),
    **dict.fromkeys(
        [
            "build/bin/zeroth-run -n 4 build/bin/zeroth-gpt --data FOLDER --mesh dp=2,tp=2 --checkpoints runs/a",
            "build/bin/zeroth-run -n 2 build/bin/zeroth-gpt --data FOLDER --checkpoints runs/a --resume auto --steps 200",  # noqa: E501
        ],
        ("tests/process/gpt/gpt_test.py", "def test_ranks_that_share_matrices_or_sequences_are_like_one"),
    ),
    "zeroth-trace traces --seconds 10": ("tests/python/waits_test.py", '"--seconds", "10"'),
    "zeroth doctor": ("tests/process/launcher/doctoring.py", 'DOCTOR, "doctor"'),
    **dict.fromkeys(
        [
            "zeroth doctor --hosts node1:8,node2:8",
            "zeroth doctor --hostfile hosts --params 7e9 --dtype bf16",
        ],
        ("tests/process/launcher/doctor_hosts_test.py", 'self.doctor("--params", "7e9"'),
    ),
    "zeroth schedule 1f1b --stages 4 --micro 8": (
        "tests/unit/program/command_test.cpp",
        '{"1f1b", "--stages", "4", "--micro", "8"}',
    ),
    "zeroth schedule zb-v --stages 4 --micro 8 --costs 1,1,1,0.1 --svg zb-v.svg": (
        "tests/unit/program/command_test.cpp",
        '"--costs", "1,1,1,0.1", "--svg"',
    ),
    "zeroth schedule interleaved --chunks 2 --gathers kept --text > step.txt": (
        "tests/unit/program/command_test.cpp",
        '{"interleaved", "--chunks", "2", "--gathers", "kept", "--text"}',
    ),
    "zeroth schedule --program step.txt --trace step.json": (
        "tests/unit/program/command_test.cpp",
        '{"--program", file.c_str(), "--trace", trace.c_str()}',
    ),
    **{
        f"zeroth ckpt {command}": ("tests/python/ckpt_test.py", text)
        for command, text in {
            "ls runs/a": '"ls", self.folder',
            "ls runs/a/step-00000300": '"ls", self.folder / "step-00000001"',
            "verify runs/a": '"verify", self.folder',
            "diff runs/a runs/b --tolerance 1e-6": '"--tolerance"',
            "average runs/a runs/b --out runs/merged --weights 1,3": '"average", *sources',
            "prune runs/a --keep-last 2 --keep-every 1000 --dry-run": '"--keep-every", 4',
        }.items()
    },
    "zeroth ckpt convert runs/a out/hf --to hf --dtype bf16": ("tests/python/ckpt_others_test.py", '"--dtype", "fp16"'),
    "zeroth ckpt convert ds_checkpoints runs/a --to zeroth": (
        "tests/python/ckpt_others_test.py",
        "def test_deepspeed_of_every_stage",
    ),
    "zeroth ckpt convert dcp_checkpoint runs/a --to zeroth": (
        "tests/python/ckpt_others_test.py",
        "def test_a_dcp_of_two_ranks",
    ),
    "zeroth ckpt convert checkpoint.pt runs/a --to zeroth": (
        "tests/python/ckpt_others_test.py",
        "def test_a_torch_optimizer",
    ),
    "mpirun -n 16 --hostfile hosts zeroth doctor": (
        "tests/process/launcher/doctor_hosts_test.py",
        "def test_links_of_mpi",
    ),
    "srun --nodes 1 --ntasks 2 ./trainer": ("tests/python/slurm_test.py", '"srun", "--nodes=1", "--ntasks=2"'),
    "ZEROTH_BACKEND=shm+mpi srun --nodes 2 --ntasks 16 --mpi=pmix python train.py": (
        "tests/python/slurm_test.py",
        '"srun", "--nodes=2", "--ntasks=4", "--mpi=pmix", ZEROTH_BACKEND="shm+mpi"',
    ),
    "tools/run-tests build/core": ("tests/process/run_tests_test.py", "def test_counts_cases_not_executables"),
    "tools/run-tests build/core:unit,conformance": ("tests/process/run_tests_test.py", "def test_only_the_labels"),
    "tools/run-tests build/core::comm": ("tests/process/run_tests_test.py", "def test_only_the_rooms"),
    "tools/run-tests build/core --tier quick,test": ("tests/process/run_tests_test.py", "def test_only_the_tier"),
    "tools/run-tests build/core --regex left_behind --repeat 20 --load 2": (
        "tests/process/run_tests_test.py",
        "def test_many_rounds_say_how_often_a_suite_failed_and_pardon_nothing",
    ),
    "tools/run-tests build/core --regex comm_": ("tests/process/run_tests_test.py", "def test_only_the_name"),
    "ZEROTH_MUTATION=leaked_buffer build/release/tests/mutations/toy_engine_test_faults": (
        "tests/mutations/mutations_test.py",
        'Guard(fault="leaked_buffer", target="toy_engine_test"',
    ),
    **dict.fromkeys(
        [
            "cmake --preset release",
            "cmake --build build/release --target zeroth_package",
            "cmake --install build/release --prefix PREFIX",
        ],
        ("tests/package/package_test.sh", 'cmake --install "$build" --prefix "$work/prefix"'),
    ),
    "pip install .": ("tests/python/wheel_test.py", "def test_it_installs_beside_torch_alone"),
}
# Folders of the files that include blocks: #include "docs/page-1.cpp", include(${BLOCKS}/docs/page-1.cmake).
INCLUDING = ("tests/docs", "tests/package/consumer")
INCLUDE = re.compile(r'^ *(?:#include "|include\(\$\{BLOCKS\}/)([^")\n]+-\d+\.(?:cpp|cmake))[")]', re.MULTILINE)


def anchors_of(text: str) -> set[str]:
    """Names that GitHub gives to the headings."""
    headings = re.findall(r"^#+\s+(.*?)\s*$", without_fences(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in headings}


def links_of(text: str) -> list[tuple[int, str]]:
    """(line, target) of every link that is no address."""
    plain = re.sub(r"`[^`\n]*`", lambda code: " " * len(code.group()), without_fences(text))
    found = [
        (plain.count("\n", 0, link.start()) + 1, link.group(1)) for link in re.finditer(r"\]\(([^()\s]+)\)", plain)
    ]
    return [(line, target) for line, target in found if not re.match(r"[a-z]+:", target)]


class Checker:
    def __init__(self, root: pathlib.Path, commands: dict[str, tuple[str, str]]) -> None:
        self.root = root.resolve()
        self.commands = commands
        self.violations: list[str] = []
        self.links: dict[str, set[str]] = {}  # page -> pages and folders it leads to
        files = [file for folder in INCLUDING for file in (self.root / folder).glob("*") if file.is_file()]
        self.included = {name for file in files for name in INCLUDE.findall(file.read_text(encoding="utf-8"))}
        self.used: set[str] = set()  # commands that are on a page

    def report(self, page: str, line: int, rule: str, text: str) -> None:
        self.violations.append(f"{page}:{line}: {rule}: {text}")

    def run(self) -> list[str]:
        pages = sorted((self.root / "docs").rglob("*.md"))
        readme = self.root / "README.md"
        for page in pages + ([readme] if readme.exists() else []):
            self.check(page.relative_to(self.root).as_posix(), page.read_text(encoding="utf-8"))
        self.check_reach([page.relative_to(self.root).as_posix() for page in pages])
        self.check_commands()
        return self.violations

    def check(self, page: str, text: str) -> None:
        lines = text.split("\n")
        for number, line in enumerate(without_fences(text).split("\n"), 1):
            if re.search("```|~~~", line):
                self.report(page, number, "fence", "a code fence is not closed, or not the first in its line")
        for block in blocks_of(page, text):
            self.check_block(block)
        if page.startswith("docs/how-to") and len(text.splitlines()) >= HOW_TO_LINES:
            self.report(page, len(text.splitlines()), "short", f"a how-to page has fewer than {HOW_TO_LINES} lines")
        for number, line in enumerate(lines, 1):
            for place in MACHINE.findall(line):
                self.report(page, number, "machine", f"names {place}")
        self.links[page] = {target for line, link in links_of(text) if (target := self.resolve(page, line, link))}
        rows: set[str] = set()
        for number, line in enumerate(without_fences(text).split("\n"), 1):
            if line.startswith("| ") and "`tests/" in line:
                if line in rows:
                    self.report(page, number, "twice", f"a row stands above already: {line[:60]}")
                rows.add(line)
            for code in re.findall(r"`([^`]+)`", line):
                if proof := re.fullmatch(r"(tests/[\w./-]+): (.+)", code):
                    self.check_proof(page, number, *proof.groups())
                else:
                    self.check_path(page, number, code)

    def check_block(self, block: Block) -> None:
        if block.language in ("cpp", "cmake"):
            if block.file not in self.included:
                self.report(block.page, block.line, "block", f"no file of {', '.join(INCLUDING)} includes {block.file}")
        elif block.language == "sh":
            for command in block.commands:
                self.used.add(command)
                if command not in self.commands:
                    self.report(block.page, block.line, "block", f"COMMANDS names no test that runs: {command}")
        elif block.language not in ("python", "json", "text"):
            self.report(
                block.page,
                block.line,
                "block",
                f'the language is python, json, cpp, cmake, sh, or text for what is no code; not "{block.language}"',
            )

    def check_commands(self) -> None:
        for command, (test, text) in self.commands.items():
            file = self.root / test
            if not file.is_file() or without_space(text) not in without_space(file.read_text(encoding="utf-8")):
                self.report(test, 1, "block", f'is to run "{command}", and "{text}" is not there')
            if command not in self.used:
                self.report(test, 1, "block", f'is to run "{command}", which is on no page; take it out of COMMANDS')

    def resolve(self, page: str, line: int, link: str) -> str | None:
        """Where a link leads, from the root; None (and a report) if nowhere."""
        name, _, anchor = link.partition("#")
        target = ((self.root / page).parent / name).resolve() if name else self.root / page
        if not target.exists() or not target.is_relative_to(self.root):
            self.report(page, line, "link", f"{link} leads nowhere")
            return None
        if anchor and target.is_file() and anchor not in anchors_of(target.read_text(encoding="utf-8")):
            self.report(page, line, "link", f"{name or page} has no heading #{anchor}")
        return target.relative_to(self.root).as_posix()

    def check_path(self, page: str, line: int, path: str) -> None:
        if not re.match(TOP_LEVEL, path) or re.search(r"[\s<>{}|$]", path):
            return
        there = any(self.root.glob(path.rstrip("/"))) if "*" in path else (self.root / path).exists()
        planned = path in TO_BE_WRITTEN.get(page, set())
        if there and planned:
            self.report(page, line, "path", f"{path} is there; take it out of TO_BE_WRITTEN")
        elif not there and not planned:
            self.report(page, line, "path", f"{path} is not there")

    def check_proof(self, page: str, line: int, path: str, name: str) -> None:
        file = self.root / path
        if not file.is_file() or not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", file.read_text(encoding="utf-8")):
            self.report(page, line, "proof", f"{path} has no {name}")

    def check_reach(self, pages: list[str]) -> None:
        reached, todo = set(), ["docs/index.md"]
        while todo:
            page = todo.pop()
            if page in reached:
                continue
            reached.add(page)
            todo += self.links.get(page, set())
            todo += [other for other in pages if other.startswith(page + "/")]  # a link to a folder leads to its pages
        for page in pages:
            if page not in reached:
                self.report(page, 1, "reach", "no link leads here from docs/index.md")


def main() -> int:
    violations = Checker(pathlib.Path(sys.argv[1]), COMMANDS).run()
    print("\n".join(violations) if violations else "the pages agree with the repository")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
