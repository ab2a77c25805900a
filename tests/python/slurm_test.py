"""A real Slurm over two hosts, which are network namespaces: munged, slurmctld and slurmd of this test's own. Needs
root and Debian's slurm-wlm, which nothing installs: it would start services of the machine."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable

import forked
import hosts
import job
import left_behind  # job.py says where it is
import mpi_test

NEEDED = ("munged", "slurmctld", "slurmd", "srun")
PATIENCE_S = 60
SETTINGS = """ClusterName=test
SlurmctldHost={name}({net}.250)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
NodeName=host-[1-2] NodeAddr={net}.[1-2] CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""
# Few descriptors: before it starts a task, slurmd closes as many as there may be, one by one.
NODE = "hostname host-{number} && mount -t tmpfs tmpfs /dev/shm && ulimit -n 1024 && exec {slurmd} -D -f {folder}/slurm.conf -N host-{number}"  # noqa: E501


def program(name: str) -> str:
    found = shutil.which(name) or f"/usr/sbin/{name}"
    return found if pathlib.Path(found).exists() else ""


class Cluster(contextlib.ExitStack):
    """`with Cluster() as cluster:` two idle nodes of two tasks each."""

    def __init__(self) -> None:
        super().__init__()
        left_behind.adopt_orphans()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.callback(left_behind.kill_descendants)
        self.hosts = self.enter_context(hosts.Hosts(2))
        self.net = self.hosts.net
        self.environment = {**os.environ, "SLURM_CONF": f"{self.folder}/slurm.conf", "OMP_NUM_THREADS": "1"}
        try:
            self.build()
        except BaseException:
            self.close()
            raise

    def build(self) -> None:
        for name in ("state", "spool-host-1", "spool-host-2", "tmp-host-1", "tmp-host-2"):
            (self.folder / name).mkdir()
        self.write("munge.key", secrets.token_hex(64))
        self.write("slurm.conf", SETTINGS.format(name=os.uname().nodename, net=self.net, folder=self.folder))
        self.write("cgroup.conf", "CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n")
        files = {"key-file": "key", "socket": "socket", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        self.daemon(
            program("munged"),
            "--foreground",
            "--force",
            *(f"--{option}={self.folder}/munge.{end}" for option, end in files.items()),
        )
        self.wait_for("munged", (self.folder / "munge.socket").exists)
        self.daemon(program("slurmctld"), "-D", "-f", f"{self.folder}/slurm.conf")
        for number in (1, 2):
            script = NODE.format(number=number, slurmd=program("slurmd"), folder=self.folder)
            self.daemon(
                "ip",
                "netns",
                "exec",
                f"{self.hosts.name}h{number}",
                "unshare",
                "--uts",
                "--mount",
                "/bin/sh",
                "-c",
                script,
            )
        self.wait_for(
            "two idle nodes", lambda: self.run("sinfo", "--noheader", "--format=%D %t").stdout.split() == ["2", "idle"]
        )

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o600)

    def daemon(self, *command: str) -> None:
        with open(self.folder / "daemons.txt", "ab") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=self.environment
            )
        self.callback(process.wait)
        self.callback(process.terminate)

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_there():
            if time.monotonic() > end:
                texts = "".join(
                    path.read_text(errors="replace")[-2000:]
                    for path in (*self.folder.glob("*.log"), self.folder / "daemons.txt")
                )
                raise AssertionError(f"Slurm does not start: {what}\n{texts}")
            time.sleep(0.1)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**self.environment, **variables},
        )


class Slurm(unittest.TestCase):
    cluster: Cluster
    expected: dict[str, str]

    @classmethod
    def setUpClass(cls) -> None:
        # Before the cluster: they look at everything that is left below this process.
        cls.expected = {
            "shm": mpi_test.Mpirun().reference(2)[0],
            "shm+mpi": mpi_test.Mpirun().reference(4, per_node=2)[0],
        }
        cls.cluster = Cluster()
        cls.addClassCleanup(cls.cluster.close)

    def losses(self, kind: str, ranks: int, *command: str, **variables: str) -> str:
        """Of all stages, the same on all ranks."""
        done = self.cluster.run(*command, *forked.python(), mpi_test.PROGRAM, RANKS_PER_NODE="0", **variables)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        told = re.findall(rf"(\d) of {ranks} over {re.escape(kind)}, stage (\d): (.*)", done.stdout)
        self.assertEqual(len({(rank, stage) for rank, stage, _ in told}), 4 * ranks, done.stdout)
        self.assertEqual(len({losses for _, _, losses in told}), 1, done.stdout)
        self.assertIn(f"{ranks} ranks over {kind}, says SLURM_PROCID and SLURM_NTASKS (srun)", done.stderr)
        return told[0][2]

    def test_ranks_of_one_node_share_memory(self) -> None:
        self.assertEqual(
            self.losses("shm", 2, "srun", "--nodes=1", "--ntasks=2", ZEROTH_BACKEND=""), self.expected["shm"]
        )
        # zeroth-run prints the command, too.
        self.assertEqual(
            self.losses("shm", 2, job.RUN, "--launcher", "srun", "--hosts", "host-2:2", ZEROTH_BACKEND=""),
            self.expected["shm"],
        )

    def test_ranks_of_two_nodes_share_memory_inside_them_and_talk_over_mpi(self) -> None:
        mpi = {"OMPI_MCA_btl": "self,vader,tcp", "OMPI_MCA_btl_tcp_if_include": f"{self.cluster.net}.0/24"}
        found = self.losses(
            "shm+mpi", 4, "srun", "--nodes=2", "--ntasks=4", "--mpi=pmix", ZEROTH_BACKEND="shm+mpi", **mpi
        )
        self.assertEqual(found, self.expected["shm+mpi"])
        # zeroth-run asks for it by itself.
        delegated = self.losses(
            "shm+mpi", 4, job.RUN, "--launcher", "srun", "--hosts", "host-1:2,host-2:2", ZEROTH_BACKEND="", **mpi
        )
        self.assertEqual(delegated, found)

    def test_two_nodes_without_mpi_are_refused(self) -> None:
        done = self.cluster.run(
            "srun", "--nodes=2", "--ntasks=4", *forked.python(), mpi_test.PROGRAM, ZEROTH_BACKEND=""
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("the ranks are on several hosts, and the shared memory of one does not reach them", done.stderr)
        self.assertIn("which: SLURM_STEP_NUM_NODES; expected: 1 host; got: 2", done.stderr)

    def test_one_zeroth_run_a_node(self) -> None:
        """As under Kubernetes; the first node is the head."""
        script = f"exec {job.RUN} -q -n 2 --nnodes 2 --node-rank $SLURM_NODEID --rdzv {self.cluster.net}.1:29400 sh -c 'echo $RANK of $WORLD_SIZE on $(hostname)'"  # noqa: E501
        done = self.cluster.run(
            "srun", "--nodes=2", "--ntasks=2", "sh", "-c", script, ZEROTH_RDZV_SECRET=secrets.token_hex(16)
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual(
            sorted(done.stdout.splitlines()), [f"[{rank}] {rank} of 4 on host-{1 + rank // 2}" for rank in range(4)]
        )

    def test_the_exit_code_of_a_rank_is_that_of_the_job(self) -> None:
        done = self.cluster.run(job.RUN, "--launcher", "srun", "-n", "2", "sh", "-c", "exit $((SLURM_PROCID * 7))")
        self.assertEqual(done.returncode, 7, done.stderr)


def main() -> int:
    missing = [name for name in NEEDED if not program(name)]
    if reason := f"no Slurm: {', '.join(missing)}" if missing else hosts.why_not():
        print(f"SKIPPED: {reason}")
        return 77
    return 0 if unittest.main(verbosity=2, exit=False).result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
