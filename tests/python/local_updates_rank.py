"""One rank of a site that trains apart from others; see slow_links_test.py.

local_updates_rank.py FOLDER CASE...
"""

from __future__ import annotations

import copy
import hashlib
import os
import pathlib
import signal
import sys
from typing import Any

import torch
from slow_links_rank import Letters, batch
from torch import nn

import zeroth
import zeroth.ckpt

SITES, STEPS = 2, 10
ADAM = {"lr": 5e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
DILOCO: dict[str, Any] = {"steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
STREAMING: dict[str, Any] = {**DILOCO, "fragments": 2, "delay": 3, "keep_local": 0.5, "payload": "int4", "block": 64}
CO2: dict[str, Any] = {"steps": 3, "method": "co2", "outer_momentum": 0.5, "nesterov": False, "clip": 0.1}


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    return Letters().to(dtype)


def engine_of(world: zeroth.World, stage: int, dtype: torch.dtype) -> zeroth.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    like = torch.float32 if dtype == torch.bfloat16 else dtype
    model = model_of(like)
    units = list(model.children())
    return zeroth.Engine(model, config, units=units, world=world, log_level="warning")


def train(engine: zeroth.Engine, rank: int, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(engine(*batch(step, rank)))
        engine.step()


def digest_of(engine: zeroth.Engine) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(engine.state_dict(ranks=None).items()):
        digest.update(name.encode() + tensor.to(torch.float64).numpy().tobytes())
    return digest.hexdigest()[:12]


class Paper:
    """Algorithm 1 of Douillard et al., arXiv 2311.08105, of all sites in one process, with torch's optimizers."""

    def __init__(self, ranks: int, settings: dict[str, Any]) -> None:
        self.outer = model_of(torch.float64)
        self.sites = [copy.deepcopy(self.outer) for _ in range(SITES)]
        self.inner = [torch.optim.AdamW(site.parameters(), **ADAM) for site in self.sites]  # type: ignore[arg-type]
        self.nesterov = torch.optim.SGD(
            self.outer.parameters(),
            lr=settings["outer_lr"],
            momentum=settings["outer_momentum"],
            nesterov=settings["outer_momentum"] > 0,
        )
        self.ranks, self.steps = ranks, settings["steps"]

    def step(self, number: int) -> None:
        for site, (model, inner) in enumerate(zip(self.sites, self.inner, strict=True)):
            inner.zero_grad()
            for rank in range(site * self.ranks, (site + 1) * self.ranks):
                (model(*batch(number, rank)) / self.ranks).backward()
            inner.step()
        if (number + 1) % self.steps:
            return
        with torch.no_grad():
            for outer, *own in zip(self.outer.parameters(), *(site.parameters() for site in self.sites), strict=True):
                outer.grad = outer - sum(own) / SITES
            self.nesterov.step()
            for site_model in self.sites:
                for outer, parameter in zip(self.outer.parameters(), site_model.parameters(), strict=True):
                    parameter.copy_(outer)


def run_paper(job: zeroth.World, world: zeroth.World, stage: int) -> None:
    """DiLoCo, and averaging, are the paper's; float64, one rounding apart."""
    for settings in (DILOCO, {"steps": 5, "outer_lr": 1.0, "outer_momentum": 0.0}):
        engine = engine_of(world, stage, torch.float64)
        zeroth.local_updates(engine, **settings)
        paper = Paper(world.size, settings)
        for step in range(STEPS):
            train(engine, job.rank, step, step + 1)
            paper.step(step)
        expected = paper.sites[world.site_index].state_dict()
        for name, tensor in engine.state_dict(ranks=None).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-11, atol=1e-13)
        engine.close()


def run_bits(job: zeroth.World, world: zeroth.World, folder: pathlib.Path) -> None:
    """The same bits at every stage and from a checkpoint in the middle of a window; bytes as planned."""
    for name, settings, dtypes in (
        ("diloco", DILOCO, (torch.float32,)),
        ("streaming", STREAMING, (torch.float32, torch.bfloat16)),
        ("co2", CO2, (torch.bfloat16,)),
    ):
        for dtype in dtypes:
            digests = []
            for stage in (0, 3):
                engine = engine_of(world, stage, dtype)
                local = zeroth.local_updates(engine, **settings)
                train(engine, job.rank, 0, 6)
                where = folder / f"{name}{stage}{dtype}" / f"site{local.site}"
                engine.save(where)
                train(engine, job.rank, 6, STEPS)
                digests.append(digest_of(engine))
                engine.full("head.weight", "outer_param")  # what is under way arrives
                report = local.report()
                counted = engine.wire_report()["between_sites"]
                assert local.sites == SITES and counted == report["received_bytes"] > 0, (name, counted, report)
                memory = engine.memory_report()
                assert memory.measured_peak == memory.planned, (name, memory)
                engine.close()
                if stage == 0 and name != "co2":
                    continue
                engine = engine_of(world, 3 - stage, dtype)
                zeroth.local_updates(engine, **settings)
                engine.load(where)
                train(engine, job.rank, 6, STEPS)
                digests.append(digest_of(engine))
                engine.close()
            assert len(set(digests)) == 1, (name, dtype, digests)


def run_branches(job: zeroth.World, world: zeroth.World, folder: pathlib.Path) -> None:
    """Sites that exchange nothing, and the mean of their checkpoints."""
    engine = engine_of(world, 3, torch.float32)
    local = zeroth.local_updates(engine, 1, method="none")
    train(engine, job.rank, 0, 5)
    assert engine.wire_report()["between_sites"] == 0
    own = engine.save(folder / "branch" / f"site{local.site}")
    weights = engine.state_dict(ranks=None)
    torch.save({"path": str(own), "weights": weights}, folder / f"branch{local.site}.pt")
    engine.barrier()
    engine.close()
    everyone = job.mesh({"all": job.size}).axis("all")
    everyone.barrier()
    if job.rank == 0:
        branches = [torch.load(folder / f"branch{site}.pt") for site in range(SITES)]
        merged = zeroth.ckpt.average([one["path"] for one in branches], folder / "merged", weights=[1, 3])
        found = zeroth.ckpt.open(merged)
        for name, one in branches[0]["weights"].items():
            other = branches[1]["weights"][name]
            mean = (0.25 * one.double() + 0.75 * other.double()).float()
            assert torch.equal(found.tensor(name), mean), name


def refused(code: str, words: str, call: Any) -> None:
    try:
        call()
    except zeroth.Error as error:
        assert error.code == code and words in str(error), error
        return
    raise AssertionError(f"no error: {words}")


def run_refusals(job: zeroth.World, world: zeroth.World) -> None:
    refused("CONFIG", "a divisor of", lambda: job.site(3))
    refused("USAGE", "a site of a site", lambda: world.site(2))
    engine = engine_of(world, 3, torch.float32)
    refused("CONFIG", "which: steps", lambda: zeroth.local_updates(engine, 0))
    refused("CONFIG", "which: lost_sites", lambda: zeroth.local_updates(engine, 4, lost_sites="leave"))
    refused("CONFIG", "which: delay; expected: 0 to 3", lambda: zeroth.local_updates(engine, 4, delay=4))
    wrong: Any = "gossip"
    refused("CONFIG", "average, co2, none", lambda: zeroth.local_updates(engine, 4, method=wrong))
    odd = int(job.rank == 3)
    refused(
        "MISMATCH",
        "who: rank 1 of site 1; which: steps, fragments",
        lambda: zeroth.local_updates(engine, 4 + odd, fragments=1 + odd),
    )
    zeroth.local_updates(engine, 4)
    refused("USAGE", "has local updates already", lambda: zeroth.local_updates(engine, 4))
    engine.close()


def run_lost(job: zeroth.World, folder: pathlib.Path) -> None:
    """Under zeroth-run --sites: site 1 dies in a window, is started again, and is in the mean of all. Until then site 0
    goes on alone."""
    again = os.environ["ZEROTH_RESTART_COUNT"] != "0"
    world = job.site(SITES)
    refused("CONFIG", "zeroth-run has started another number of sites", lambda: job.site(SITES + 1))
    assert (world.size, world.site_index, world.is_job_of_its_own) == (job.size, world.site_index, True)
    engine = engine_of(world, 3, torch.float32)
    local = zeroth.local_updates(engine, **DILOCO, lost_sites="leave")
    assert local.joined == again and local.sites_present == ([0] if again else [0, 1]), (local, again)
    assert (engine.load(folder / f"site{local.site}", if_any=True) is not None) == again
    number = world.site_index * world.size + world.rank
    last, present = None, []
    while last is None or local.step < last:
        train(engine, number, local.step, local.step + 1)
        if local.step == 3:
            engine.save(folder / f"site{local.site}")
        if local.step == 6 and world.site_index == 1 and world.rank == 1 and not again:
            os.kill(os.getpid(), signal.SIGKILL)
        if local.step % DILOCO["steps"]:
            continue
        present.append(local.sites_present)
        if present[-1] == [0, 1] and (again or [0] in present) and last is None:
            last = local.step + 2 * DILOCO["steps"]
    assert present[-1] == [0, 1] and (again or [0] in present), present
    print(f"values {digest_of(engine)}", flush=True)
    engine.close()


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    job = zeroth.World.from_environment()
    if sys.argv[2:] == ["lost"]:
        run_lost(job, folder)
        return
    world = job.site(SITES)
    assert (world.size, world.num_sites, job.num_sites) == (job.size // SITES, SITES, 1)
    for case in sys.argv[2:]:
        if case.startswith("paper"):
            run_paper(job, world, int(case[-1]))
        elif case == "bits":
            run_bits(job, world, folder)
        elif case == "branches":
            run_branches(job, world, folder)
        else:
            run_refusals(job, world)
        print(f"rank {job.rank} {case} ok", flush=True)


if __name__ == "__main__":
    main()
