"""The training run: text, model and engine put together, in the order of examples/gpt_cpp/trainer.cpp."""

import os
import pathlib
import time
from typing import Any

import torch
from data import Corpus, bigram_entropy, held_out_windows, load_corpus, make_batch, train_windows
from errors import make_error
from model import Gpt, ModelOptions
from options import Options
from report import Bytes, Report, RunSummary, StepRecord, hex_float
from rng import digest64, key_of, mix64, unit_interval
from sampling import sample_index
from settings import Settings, make_settings
from weights import load_weights

import zeroth

KEPT_CHECKPOINTS = 3
"""of --checkpoints, the newest"""
MEASURED_STEPS = 3
"""steps, from 1, in which the process is measured from outside: a few, for it takes milliseconds"""
LISTED_FILES = 32
"""so many files are listed without being asked for"""
MEMORY_STATES = (
    "parameters",
    "masters",
    "optimizer",
    "buckets",
    "reduced",
    "gathered",
    "overflow",
    "control",
    "staging",
    "other",
)


class Preempted(Exception):
    """The job was asked to make room, and its state is saved."""


def train(options: Options, world: zeroth.World) -> None:
    """Trains, validates, samples and exports as `options` say; all ranks call it. Raises zeroth.Error, Preempted;
    torch's exceptions pass."""
    Trainer(options, world).run()


def use_threads(world_size: int) -> int:
    """Threads of torch's CPU kernels. Sums depend on their number, so it is the same on all ranks and at all stages."""
    text = os.environ.get("OMP_NUM_THREADS")
    share = max(1, len(os.sched_getaffinity(0)) // world_size)
    threads = share if text is None else int(text) if text.isdecimal() else 0
    if threads <= 0:
        raise make_error(
            "ENVIRONMENT", "OMP_NUM_THREADS is no positive number", which="OMP_NUM_THREADS", got=text or ""
        )
    torch.set_num_threads(threads)
    return threads


def make_model(options: Options, dtype: str) -> Gpt:
    """In the dtype of the run, with the weights of --init or those of the seed."""
    model = Gpt(
        ModelOptions(
            layers=options.layers,
            d_model=options.d_model,
            heads=options.heads,
            experts=options.experts,
            choices=options.choices,
            seq=options.seq,
            seed=options.seed,
            dtype=torch.float64 if dtype == "fp64" else torch.float32,
        )
    )
    if dtype in ("bf16", "fp16"):
        model.to(torch.bfloat16 if dtype == "bf16" else torch.float16)
    if options.init:
        load_weights(model, options.init)
    return model


def make_stages(model: Gpt, settings: Settings, world: zeroth.World) -> None:
    """Each rank of the mesh's pp keeps some layers of the model; ranks of tp share their matrices, and each of them has
    the vocabulary whole. Raises Error USAGE for ranks that are to share sequences."""
    if settings.mesh["sp"] > 1:
        raise make_error(
            "USAGE",
            "the stages of a pipeline share no sequences here",
            which="--mesh",
            expected="sp=1 beside pp",
            got=f"sp={settings.mesh['sp']}",
            hint="zeroth.pipeline() splits models of transformers over both",
        )
    tokens = torch.zeros((1, model.options.seq), dtype=torch.int64)
    zeroth.pipeline(model, settings.config, world=world, sample=(tokens, tokens))


def make_engine(model: Gpt, settings: Settings, world: zeroth.World) -> zeroth.Engine:
    """No weight decay for norms and other vectors. The embedding decays: it is also the output matrix."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.dim() >= 2]},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]
    return zeroth.Engine(model, settings.config, params=groups, units=model.blocks, world=world, progress_every_s=0)


def pss_bytes() -> int:
    """Proportional set size of this process, 0 if it cannot be read."""
    try:
        lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


class Trainer:
    def __init__(self, options: Options, world: zeroth.World) -> None:
        self.options = options
        self.world = world
        self.settings = make_settings(options, world.size)
        self.report = Report(world.rank, options)
        self.threads = use_threads(world.size)
        self.corpus: Corpus = load_corpus(options.data, options.suffix, options.exclude, options.seq)
        model = make_model(options, self.settings.dtype)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        mesh = self.settings.mesh
        sharing = mesh["sp"] * mesh["tp"]  # with samples that are the same
        if mesh.get("pp", 1) > 1:
            make_stages(model, self.settings, world)
        elif sharing > 1:
            model.share(self.settings.config, world)
        self.engine = make_engine(model, self.settings, world)
        self.data_rank = world.rank // sharing % self.settings.data_ranks
        """ranks that share matrices or sequences are neighbours, stages of a pipeline are not; both have one batch"""
        self.summary = RunSummary(
            world_size=world.size,
            zero_stage=self.settings.config.zero_stage,
            parameters=parameters,
            bigram_entropy=bigram_entropy(self.corpus.held_out),
        )
        self.target = self.summary.bigram_entropy if options.target_bigram else options.target_loss
        self.validated_step = -1
        self.first_step = 1
        self.saved_updates = -1
        self.preempted = False
        self.pss_peak = 0
        self.traffic = {"all_gather": 0, "reduce_scatter": 0, "control": 0}
        """bytes received in training steps alone: validations and samples gather, too"""

    def run(self) -> None:
        self.introduce()
        self.check_agreement("the text of --data (its digest)", self.corpus.digest)
        self.check_agreement("the number of threads (OMP_NUM_THREADS)", self.threads)
        self.resume()
        with self.report.bar():
            self.train_steps()
        if self.options.eval_windows > 0 and self.validated_step != self.summary.steps:
            self.validate()
        if self.options.sample > 0:
            prompt = os.fsencode(self.options.prompt)
            self.report.sample(prompt, self.generate(prompt), self.options.temperature)
        if self.summary.steps >= self.first_step:
            self.save(self.summary.steps)
        if self.options.export:
            self.engine.export_safetensors(str(self.options.export))
            self.report.line(f"weights written to {self.options.export}")
        self.summarise()

    def introduce(self) -> None:
        for note in self.settings.notes:
            self.report.line(note)
        if self.options.list_files or len(self.corpus.files) <= LISTED_FILES:
            for file in self.corpus.files:
                self.report.line(str(file))
        self.report.line(str(self.corpus))
        self.report.introduce(self.settings, self.summary, self.threads)

    def check_agreement(self, what: str, value: int) -> None:
        """All ranks raise when one has another value; 24 bits, so that means over ranks are exact."""
        mine = float((value ^ (value >> 40)) & 0xFFFFFF)
        differs = self.engine.average(mine) != mine
        if self.engine.average(float(differs)) != 0:
            raise make_error(
                "MISMATCH",
                f"the ranks differ in {what}",
                who=f"rank {self.world.rank}/{self.world.size}",
                which=what,
                expected="one value on all ranks",
                got=f"on this rank {value}" + ("" if differs else ", which may be the others' too"),
                hint="give every rank the same arguments and the same files",
            )

    # --- training ---------------------------------------------------------------------------------------------------

    def train_steps(self) -> None:
        start = time.monotonic()
        window_seconds, window_tokens = 0.0, 0  # of the steps since the last progress line
        tokens = 0  # without the first step, which also warms up
        for step in range(self.first_step, self.options.steps + 1):
            record = self.train_step(step)
            self.report.step(record)
            self.summary.steps = step
            self.summary.last_loss_hex = hex_float(record.loss)
            window_seconds += record.seconds
            window_tokens += record.tokens
            if step > self.first_step:
                self.summary.seconds += record.seconds
                tokens += record.tokens
                self.summary.tokens_per_second = tokens / self.summary.seconds
            if record.skipped:
                self.report.line(f"step {step} skipped: {record.skipped}")
            if self.options.log_every > 0 and (step % self.options.log_every == 0 or step == self.first_step):
                self.report.progress(record, window_tokens / window_seconds)
                window_seconds, window_tokens = 0.0, 0
            every = self.options.save_every
            if self.preempted or (every > 0 and step % every == 0):
                self.save(step)
            if self.preempted:
                raise Preempted
            if self.options.eval_every > 0 and step % self.options.eval_every == 0 and self.validate():
                break
            if self.time_is_up(start):
                self.report.line(f"step {step}: --max-seconds is over")
                break

    def save(self, step: int) -> None:
        """Batches are drawn from --seed, the step and the rank: the step is the position in the data."""
        folder = self.options.checkpoints
        if folder is None or self.engine.steps == self.saved_updates:
            return  # a step that was skipped is no other state
        path = self.engine.save(folder, client_state={"step": step}, keep_last=KEPT_CHECKPOINTS)
        self.saved_updates = self.engine.steps
        self.report.line(f"checkpoint written to {path}")

    def resume(self) -> None:
        source = self.options.resume
        if not source:
            return
        loaded = (
            self.engine.load(self.options.checkpoints, if_any=True)
            if source == "auto" and self.options.checkpoints is not None
            else self.engine.load(source)
        )
        if loaded is None:
            self.report.line("no checkpoint to go on from: training from the beginning")
            return
        self.saved_updates = loaded.step
        self.first_step = loaded.client_state["step"] + 1
        self.summary.steps = loaded.client_state["step"]
        self.report.line(f"goes on from {loaded.path}, step {self.first_step}")

    def train_step(self, step: int) -> StepRecord:
        before = self.engine.wire_report()
        start = time.monotonic()
        result, mean_loss = self.step_of_pipeline(step) if self.engine.pipeline else self.step_of_rank(step)
        self.preempted = result.preempted
        seconds = time.monotonic() - start
        after = self.engine.wire_report()
        self.traffic = {kind: count + after[kind] - before[kind] for kind, count in self.traffic.items()}
        return StepRecord(
            step=step,
            loss=mean_loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=self.settings.batch * self.options.seq,
            seconds=seconds,
            skipped="" if result.committed else result.reason,
        )

    def step_of_rank(self, step: int) -> tuple[zeroth.StepResult, float]:
        """Its result, and the mean loss."""
        loss_sum = 0.0
        for micro_step in range(self.settings.accumulate):
            loss = self.engine(*self.train_batch(step, micro_step))
            self.sample_memory(step)  # activations are at their peak
            self.engine.backward(loss)
            self.sample_memory(step)  # gradients are
            result = self.engine.step()
            self.sample_memory(step)
            loss_sum += loss.item()
        return result, self.engine.average(loss_sum / self.settings.accumulate)

    def step_of_pipeline(self, step: int) -> tuple[zeroth.StepResult, float]:
        """The same; the actions of a step that is measured are run one by one."""
        batches = (self.train_batch(step, micro_step) for micro_step in range(self.settings.accumulate))
        if step > MEASURED_STEPS:
            return self.engine.train_batch(batches)
        with self.engine.pipeline_step(batches) as running:
            for action in running.actions:
                running.run(action)
                if "SEND" not in action and "RECV" not in action:
                    self.sample_memory(step)
        return running.result

    def train_batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        text, seq = self.corpus.train, self.options.seq
        starts = train_windows(
            len(text),
            seq,
            self.settings.micro_batch,
            seed=self.options.seed,
            step=step,
            micro_step=micro_step,
            rank=self.data_rank,
        )
        return make_batch(text, starts, seq)

    def sample_memory(self, step: int) -> None:
        """All that stays is there from step 1 on; smaps is too slow to be read in every step."""
        if step <= MEASURED_STEPS:
            self.pss_peak = max(self.pss_peak, pss_bytes())

    def time_is_up(self, start: float) -> bool:
        """By the mean over ranks: one answer on all of them."""
        limit = self.options.max_seconds
        return limit > 0 and self.engine.average(time.monotonic() - start) > limit

    # --- after training, and in between -----------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self) -> bool:
        """Loss over the fixed held-out windows, which the ranks share; every rank runs as many forwards as the others.
        Returns whether the target is reached."""
        text, seq, batch = self.corpus.held_out, self.options.seq, self.settings.micro_batch
        windows = held_out_windows(len(text), seq, self.options.eval_windows)
        mine = windows[self.data_rank :: self.settings.data_ranks]
        most = -(-len(windows) // self.settings.data_ranks)
        parts = [mine[begin : begin + batch] for begin in range(0, most, batch)]
        # A rank whose windows are used up runs one more for company, at no weight.
        batches = (make_batch(text, starts or windows[:1], seq) for starts in parts)
        counts = [len(starts) for starts in parts]
        if self.engine.pipeline:
            loss = self.engine.eval_batch(batches, micro_batches=len(parts), weights=counts)
        else:
            total = 0.0  # of the windows' mean losses
            for count, (x_BT, y_BT) in zip(counts, batches, strict=True):
                total += count * self.engine(x_BT, y_BT).item()
            loss = self.engine.average(total) * self.settings.data_ranks / len(windows)
        summary = self.summary
        summary.validation_loss = loss
        summary.target_reached = self.target is not None and loss < self.target
        self.validated_step = summary.steps
        if loss < summary.bigram_entropy and summary.below_bigram_step is None:
            summary.below_bigram_step = summary.steps
        self.report.validation(summary.steps, loss, summary.bigram_entropy)
        return summary.target_reached

    @torch.no_grad()
    def generate(self, prompt: bytes) -> bytes:
        """All ranks run the same forwards (the parameters are spread over them) and draw the same bytes."""
        key = key_of(self.options.seed, digest64(b"sample"))
        text = bytearray(prompt)
        for i in range(self.options.sample):
            x_BT = torch.tensor([list(text[-self.options.seq :])])
            logits_V = self.engine.outputs(x_BT)[0, -1].to(torch.float64)
            text.append(sample_index(logits_V.tolist(), self.options.temperature, unit_interval(mix64(key + i))))
        return bytes(text[len(prompt) :])

    def summarise(self) -> None:
        summary = self.summary
        memory = self.engine.memory_report()
        summary.planned = _by_state(memory.planned)
        summary.measured = _by_state(memory.measured_peak)
        if memory.planned_files + memory.measured_files > 0:
            summary.planned["on disk"], summary.measured["on disk"] = memory.planned_files, memory.measured_files
        summary.live_slots = memory.live_slots_peak
        self.pss_peak = max(self.pss_peak, memory.pss)
        summary.pss_peak = int(self.engine.average(float(self.pss_peak)) * self.world.size)

        wire = self.engine.wire_report()
        summary.wire = {kind: self.traffic[kind] for kind in ("all_gather", "reduce_scatter")}
        steps = max(0, summary.steps - self.first_step + 1)
        summary.wire_formula = {kind: steps * wire[f"planned_{kind}"] for kind in summary.wire}
        summary.wire_control = self.traffic["control"]
        files = self.engine.transfer_report()
        for name, of_set in files.rows.items():
            if of_set.planned_read_bytes is None or of_set.planned_write_bytes is None:
                continue
            summary.files[f"{name}, read"] = of_set.last_step.needed_bytes
            summary.files[f"{name}, written"] = of_set.last_step.changed_bytes
            summary.files_formula[f"{name}, read"] = of_set.planned_read_bytes
            summary.files_formula[f"{name}, written"] = of_set.planned_write_bytes
            summary.files_moved += of_set.all.read_bytes + of_set.all.write_bytes
        summary.files_seconds, summary.files_hidden = files.all.in_flight_s, files.all.hidden_share
        if self.options.train_table:
            self.report.table(summary)
        self.report.finish(summary)


def _by_state(snapshot: Bytes) -> Bytes:
    """With the states that hold nothing, and the total."""
    return {state: snapshot.get(state, 0) for state in MEMORY_STATES} | {"total": sum(snapshot.values())}
