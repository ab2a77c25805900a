"""Embedding tables in host memory, for tables that are larger than a device.

B: indices of a lookup, R: rows of the table, D: values of a row.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import os
import typing

import torch
import torch.distributed as dist

from zeroth import _C

if typing.TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RULES = ("sgd", "rowwise_adagrad", "adam")
_TEXT_BYTES = 512
"""of what a rank says of its table"""
_STATES = {"sgd": (), "rowwise_adagrad": ("sums",), "adam": ("exp_avg", "exp_avg_sq")}


@dataclasses.dataclass(kw_only=True, slots=True)
class HostTableTraffic:
    """What a table has sent to the model's device since it was made or reset."""

    rows: int = 0
    """looked up, with repetitions"""
    sent_bytes: int = 0
    """to the device: values, and with 8 bits their scales"""
    float32_bytes: int = 0
    """what the same rows are in float32"""


def _host_memory(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool) -> tuple[torch.Tensor, str]:
    """Zeroed memory, page-locked if a device wants it and the system grants it; and why not, if so."""
    if not pin:
        return torch.zeros(shape, dtype=dtype), "the model computes on the CPU"
    try:
        return torch.zeros(shape, dtype=dtype, pin_memory=True), ""
    except RuntimeError as refused:  # of the driver, or of a limit on locked memory
        return torch.zeros(shape, dtype=dtype), str(refused).splitlines()[0]


class HostTable:
    """R rows of D float32 values in host memory. A lookup brings the rows of a batch to the model's device; its
    backward keeps the gradients of these rows alone; step() updates them.

        table = zeroth.HostTable(1_000_000, 64, device="cuda", rule="rowwise_adagrad", lr=0.05)
        hidden_BD = table(indices_B)     # differentiable
        loss.backward()
        table.step()

    It is no parameter of a model: an engine neither shards nor saves it; see state_dict().

    With several ranks give their `group`: every rank has the whole table, and making it and step() are calls of all
    ranks. step() gathers indices and gradients in rank order and takes their mean over the ranks, so that one process
    with the ranks' batches one behind the other computes the same, to the last bit where the number of ranks is a power
    of two. Ranks compare what they have when the table is made, after load_state_dict(), and the hyper-parameters in
    each step. In a job of several ranks a table of this rank alone says so: group=None.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        device: torch.device | str = "cpu",
        values: torch.Tensor | None = None,
        rule: str = "sgd",
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        quantize: bool = False,
        block: int = 64,
        group: _C.Communicator | None | typing.Literal["not said"] = "not said",
        threads: int = 0,
    ) -> None:
        """`values` [R, D]: the first ones; without them normal with standard deviation 1, as torch.nn.Embedding, the
        same on all ranks only if their generators are. rule: "sgd"; "rowwise_adagrad", one state a row; "adam", on
        touched rows alone as torch.optim.SparseAdam. lr may be changed between steps. quantize: rows travel in 8 bits
        with one float32 scale for `block` values; a value arrives within half a step, scale / 2, of its own. threads:
        of gathers and updates; 0: the processors that this process may use. Throws Error USAGE; MISMATCH, on all ranks
        of the group, if they make different tables."""
        if num_rows < 1 or dim < 1 or block < 1:
            sizes = f"{num_rows} rows of {dim} values, blocks of {block}"
            raise _usage("a host table has no rows, no values or empty blocks", "1 or more of each", sizes)
        if rule not in RULES:
            raise _usage("a host table has no such rule", ", ".join(RULES), rule)
        if values is not None and tuple(values.shape) != (num_rows, dim):
            raise _usage("the values of a host table have another shape", f"{[num_rows, dim]}", f"{list(values.shape)}")
        if isinstance(group, str):
            group = None
            if (ranks := _ranks_of_job()) > 1:
                raise _usage(
                    f"a host table in a job of {ranks} ranks has no group",
                    "group=, the ranks that have the same table",
                    "none",
                    which="group",
                    hint=f'zeroth.World.from_environment().mesh({{"dp": {ranks}}}).axis("dp") are all ranks; '
                    "group=None makes a table of this rank alone",
                )
        self.device = torch.device(device)
        self.rule = rule
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self._require_hypers()
        self.quantize = quantize
        self.block = block
        self.traffic = HostTableTraffic()
        self.steps = 0
        pin = self.device.type == "cuda"
        self.values, self.not_pinned = _host_memory((num_rows, dim), torch.float32, pin=pin)
        with torch.no_grad():
            if values is None:
                self.values.normal_()
            else:
                self.values.copy_(values)
        shapes = {"sums": (num_rows,), "exp_avg": (num_rows, dim), "exp_avg_sq": (num_rows, dim)}
        self._states = {name: torch.zeros(shapes[name]) for name in _STATES[rule]}
        self._rows = _C.HostRows(self.values, threads or len(os.sched_getaffinity(0)))
        self._group = group
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.reads_by_device = self.device.type == "cuda" and self.is_pinned and not quantize
        """The device reads the rows of a lookup in host memory itself (zero-copy); else threads of the host gather
        them."""
        self._reads: list[torch.cuda.Event] = []
        # autograd calls a backward only if an input asks for gradients
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._is_new = False
        """values and states were loaded, and other ranks may have loaded others"""
        self._require_same()

    @property
    def is_pinned(self) -> bool:
        """The table is in page-locked memory; if not, `not_pinned` says why."""
        return not self.not_pinned

    @property
    def num_rows(self) -> int:
        return self.values.shape[0]

    @property
    def dim(self) -> int:
        return self.values.shape[1]

    def __call__(self, indices: torch.Tensor | Sequence[typing.Any] | int) -> torch.Tensor:
        """lookup()"""
        return self.lookup(indices)

    def lookup(self, indices: torch.Tensor | Sequence[typing.Any] | int) -> torch.Tensor:
        """The rows of integer `indices` of any shape, [*indices.shape, D] on the table's device; or of what torch makes
        such a tensor of: lists, arrays. Gradients come to the rows as they are, quantized or not. Throws Error USAGE,
        with the position, for an index that is no row."""
        if not isinstance(indices, torch.Tensor):
            indices = _tensor_of(indices)
        if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
            raise _usage("indices of a host table are no integers", "int64", str(indices.dtype))
        flat_B = indices.detach().to("cpu", torch.int64).reshape(-1).contiguous()
        rows_BD: torch.Tensor = _Lookup.apply(self._anchor, self, flat_B)
        return rows_BD.reshape(*indices.shape, self.dim)

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that have gradients, ascending and each once, and their sums on this rank: [n], [n, D]."""
        indices_B, grads_BD = self._own()
        return self._rows.sum(indices_B, grads_BD, 1.0)

    def zero_grad(self) -> None:
        """Forgets the gradients since the last step()."""
        self._pending.clear()

    def step(self) -> int:
        """Updates the rows that have gradients, and forgets these. Returns how many rows were updated. With a group all
        ranks call it, also those without a gradient."""
        indices_B, grads_BD = self._own()
        factor = 1.0
        self._require_hypers()
        if self._group is not None and self._group.size > 1:
            own = [indices_B.numel(), int(self._is_new), _digest(self._hypers())]
            said = self._group.all_gather(torch.tensor([own])).tolist()
            counts = [one[0] for one in said]
            if any(one[1] for one in said) or len({one[2] for one in said}) > 1:
                self._require_same()
            indices_B = self._group.all_gather(indices_B, counts=counts)
            grads_BD = self._group.all_gather(grads_BD, counts=counts)
            factor = 1.0 / self._group.size
        self._pending.clear()
        self._await_reads()
        if indices_B.numel() == 0:
            return 0
        self.steps += 1
        none = torch.zeros(0)
        first, second = [*self._states.values(), none, none][:2]
        return self._rows.update(
            self.rule,
            indices_B,
            grads_BD,
            factor,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            step=self.steps,
            first=first,
            second=second,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Values, states of the rule and "steps": the table's own memory, as torch's modules give it."""
        return {"values": self.values, **self._states, "steps": torch.tensor(self.steps)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copies what state_dict() gave. Throws Error USAGE, and changes nothing, if names or shapes differ."""
        own = {"values": self.values, **self._states}
        names = sorted([*own, "steps"])
        if sorted(state) != names:
            raise _usage("a state is not that of a host table with this rule", str(names), str(sorted(state)))
        for name, tensor in own.items():
            expected, got = list(tensor.shape), list(state[name].shape)
            if expected != got:
                raise _usage(f"{name} of a host table has another shape", str(expected), str(got))
        self._await_reads()
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.steps = int(state["steps"])
        self._pending.clear()
        self._is_new = True

    def _hypers(self) -> str:
        return f"lr {self.lr!r}, betas {tuple(self.betas)!r}, eps {self.eps!r}"

    def _require_hypers(self) -> None:
        for name, value, good, expected in (
            ("lr", self.lr, 0 <= self.lr < math.inf, "a finite number from 0"),
            ("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers from 0, below 1"),
            ("eps", self.eps, 0 <= self.eps < math.inf, "a finite number from 0"),
        ):
            if not good:
                raise _usage("a host table has no such hyper-parameter", expected, repr(value), which=name)

    def _require_same(self) -> None:
        """Raises Error MISMATCH on all ranks of the group, with the first thing that differs."""
        self._is_new = False
        if self._group is None or self._group.size == 1:
            return
        facts = {
            "num_rows and dim": f"{self.num_rows} rows of {self.dim} values",
            "rule": self.rule,
            "lr, betas, eps": self._hypers(),
            "quantize and block": f"8 bits, blocks of {self.block}" if self.quantize else "float32",
            "values": f"values with digest {_digest_of_values(self.values):016x}",
            **{f"{name}, loaded": f"digest {_digest_of_values(one):016x}" for name, one in self._states.items()},
            "steps": f"after {self.steps} steps",
        }
        texts = self._texts_of_ranks(list(facts.values()))
        for number, name in enumerate(facts):
            every = [own[number] if number < len(own) else "nothing" for own in texts]
            ((most, _),) = collections.Counter(every).most_common(1)
            odd = next((rank for rank, text in enumerate(every) if text != most), None)
            if odd is not None:
                raise _C.make_error(
                    "MISMATCH",
                    "ranks have different host tables",
                    where="host_table",
                    who=f"rank {odd}/{self._group.size} of {self._group.name}",
                    which=name,
                    expected=f"{most} (rank {every.index(most)})",
                    got=f"{every[odd]} (rank {odd})",
                    hint="give all ranks the same values=, or the same torch.manual_seed() before"
                    if name == "values"
                    else "give all ranks the same arguments and state",
                )

    def _texts_of_ranks(self, texts: list[str]) -> list[list[str]]:
        """A call of all ranks; some 300 bytes of each."""
        assert self._group is not None
        message = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        own = "\n".join(texts).encode()[:_TEXT_BYTES]
        message[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        every = self._group.all_gather(message[None])
        return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace").split("\n") for row in every]

    def _own(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._pending:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.dim)
        return torch.cat([one[0] for one in self._pending]), torch.cat([one[1] for one in self._pending])

    def _bring(self, indices_B: torch.Tensor) -> torch.Tensor:
        """The rows, on the device."""
        count = indices_B.numel()
        pin = self.device.type == "cuda" and self.is_pinned
        self.traffic.rows += count
        self.traffic.float32_bytes += count * self.dim * 4
        if self.reads_by_device:
            return self._read_by_device(indices_B)
        if not self.quantize:
            rows_BD = torch.empty(count, self.dim, pin_memory=pin)
            self._rows.gather(indices_B, rows_BD)
            self.traffic.sent_bytes += rows_BD.nbytes
            return rows_BD.to(self.device, non_blocking=True)
        blocks = -(-self.dim // self.block)
        steps_BD = torch.empty(count, self.dim, dtype=torch.int8, pin_memory=pin)
        scales = torch.empty(count, blocks, pin_memory=pin)
        self._rows.gather_in_8_bits(indices_B, self.block, steps_BD, scales)
        self.traffic.sent_bytes += steps_BD.nbytes + scales.nbytes
        there_BD = steps_BD.to(self.device, non_blocking=True).to(torch.float32)
        wide = scales.to(self.device, non_blocking=True).repeat_interleave(self.block, dim=1)[:, : self.dim]
        return there_BD * wide

    def _read_by_device(self, indices_B: torch.Tensor) -> torch.Tensor:
        self._rows.require(indices_B)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            rows_BD = torch.empty(indices_B.numel(), self.dim, device=self.device)
            self._rows.gather_on_device(indices_B.to(self.device), rows_BD, stream.cuda_stream)
            self._reads.append(stream.record_event())
        self.traffic.sent_bytes += rows_BD.nbytes
        return rows_BD

    def _await_reads(self) -> None:
        """The device has read what it was given: the table may change."""
        for read in self._reads:
            read.synchronize()
        self._reads.clear()

    def _keep(self, indices_B: torch.Tensor, grads_BD: torch.Tensor) -> None:
        self._pending.append((indices_B, grads_BD.detach().to("cpu", torch.float32).contiguous()))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: typing.Any,
        anchor: torch.Tensor,
        table: HostTable,
        indices_B: torch.Tensor,  # noqa: ANN401
    ) -> torch.Tensor:
        ctx.table = table
        ctx.indices_B = indices_B
        return table._bring(indices_B)

    @staticmethod
    def backward(ctx: typing.Any, *grads: torch.Tensor) -> tuple[None, None, None]:  # noqa: ANN401
        ctx.table._keep(ctx.indices_B, grads[0])
        return None, None, None


def _ranks_of_job() -> int:
    in_torch = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return in_torch if in_torch > 1 else _C.World.from_environment().size


def _tensor_of(indices: object) -> torch.Tensor:
    try:
        made = torch.as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        expected = "a tensor of integers, or lists of them that are equally long"
        raise _usage("indices of a host table are no tensor", expected, str(error).splitlines()[0]) from None
    return made.to(torch.int64) if made.numel() == 0 else made


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _digest_of_values(values: torch.Tensor) -> int:
    """Of the bits and their rows, at the speed of memory."""
    bits = values.reshape(len(values), -1).view(torch.int32).sum(1, dtype=torch.int64)
    of_rows = bits * (2 * torch.arange(len(bits)) + 0x9E3779B1)  # overflow is well-defined: modulo 2^64
    return int(of_rows.sum()) & 0xFFFFFFFFFFFFFFFF


def _usage(message: str, expected: str, got: str, *, which: str = "", hint: str = "") -> _C.Error:
    return _C.make_error("USAGE", message, where="host_table", which=which, expected=expected, got=got, hint=hint)
