"""C++ side of zeroth. Bytes are bytes of this rank; names of states are those of docs/configuration.md."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

torch_version: str

class Error(RuntimeError):
    """Everything that Zeroth refuses or reports."""

    code: str
    """"CONFIG", "MISMATCH", "PEER_LOST", ...; docs/errors has a page for each"""
    exit_code: int
    """what a program that ends with it should exit with"""
    message: str
    rank: int | None
    """that `who` names"""
    step: int | None
    """in which that rank was, or its last one"""
    op: str
    """"all_gather#841", the call, numbered in its group; "" where there is none"""
    where: str
    who: str
    which: str
    expected: str
    got: str
    hint: str

class ConfigError(Error):
    """Everything that is wrong with a configuration, at once."""

def make_error(
    code: str,
    message: str,
    *,
    where: str = "",
    who: str = "",
    which: str = "",
    expected: str = "",
    got: str = "",
    hint: str = "",
) -> Error:
    """An Error, or a ConfigError for "CONFIG", to be raised: with the text and the attributes of one that C++ throws. Raises Error
    INTERNAL for a code that there is not."""

def make_config_error(origin: str, problems: Sequence[tuple[str, str, str, str]]) -> ConfigError:
    """A ConfigError, to be raised: each problem has the JSON pointer of its key, what is wrong, what was expected and what there is."""

class ConfigOverride:
    """A value from elsewhere than the document, say a command line. It wins over the document, "auto" included."""

    def __init__(self, pointer: str, value: Any, origin: str = "an override") -> None:
        """`pointer`: JSON pointer of the key, "/zero_optimization/stage". `origin`: for errors, "--zero-stage". Raises ConfigError for a
        value that JSON does not have."""

class CheckpointState:
    """A state of a parameter, "weight" or "exp_avg"; or a tensor of the caller."""

    def __init__(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """`dtype`: of the format safetensors, "F32"."""
    @property
    def name(self) -> str: ...
    @name.setter
    def name(self, value: str) -> None: ...
    @property
    def dtype(self) -> str: ...
    @dtype.setter
    def dtype(self, value: str) -> None: ...
    @property
    def shape(self) -> list[int]:
        """of the logical tensor"""
    @shape.setter
    def shape(self, value: Sequence[int]) -> None: ...

class CheckpointParam:
    """A parameter with its states. Lists are copies: assign them to change them."""

    def __init__(self) -> None: ...
    @property
    def name(self) -> str: ...
    @name.setter
    def name(self, value: str) -> None: ...
    @property
    def shape(self) -> list[int]: ...
    @shape.setter
    def shape(self, value: Sequence[int]) -> None: ...
    @property
    def dtype(self) -> str:
        """as it computes"""
    @dtype.setter
    def dtype(self, value: str) -> None: ...
    @property
    def trainable(self) -> bool: ...
    @trainable.setter
    def trainable(self, value: bool) -> None: ...
    @property
    def group(self) -> int:
        """of Manifest.groups; -1: nobody knows"""
    @group.setter
    def group(self, value: int) -> None: ...
    @property
    def updates(self) -> int: ...
    @updates.setter
    def updates(self, value: int) -> None: ...
    @property
    def aliases(self) -> list[str]: ...
    @aliases.setter
    def aliases(self, value: Sequence[str]) -> None: ...
    @property
    def states(self) -> list[CheckpointState]: ...
    @states.setter
    def states(self, value: Sequence[CheckpointState]) -> None: ...

class CheckpointFile:
    """A file of a checkpoint."""

    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...

class Manifest:
    """What a checkpoint holds. Lists are copies: assign them to change them."""

    def __init__(self) -> None: ...
    @property
    def format(self) -> int: ...
    @property
    def run(self) -> str: ...
    @property
    def commit(self) -> int:
        """how manieth of its folder's commits; 0 if none was counted"""
    @property
    def world(self) -> int: ...
    @property
    def files(self) -> list[CheckpointFile]: ...
    @property
    def version(self) -> str: ...
    @version.setter
    def version(self, value: str) -> None: ...
    @property
    def step(self) -> int: ...
    @step.setter
    def step(self, value: int) -> None: ...
    @property
    def plan(self) -> str: ...
    @plan.setter
    def plan(self, value: str) -> None: ...
    @property
    def optimizer(self) -> str: ...
    @optimizer.setter
    def optimizer(self, value: str) -> None: ...
    @property
    def configuration(self) -> str:
        """JSON, or "" """
    @configuration.setter
    def configuration(self, value: str) -> None: ...
    @property
    def groups(self) -> list[str]:
        """hyper-parameters as JSON, doubles as hexadecimal text"""
    @groups.setter
    def groups(self, value: Sequence[str]) -> None: ...
    @property
    def params(self) -> list[CheckpointParam]: ...
    @params.setter
    def params(self, value: Sequence[CheckpointParam]) -> None: ...
    @property
    def extras(self) -> list[CheckpointState]: ...
    @extras.setter
    def extras(self, value: Sequence[CheckpointState]) -> None: ...
    @property
    def base(self) -> str:
        """folder beside it that has the weights which never train; "" if they are here"""
    @property
    def accumulation(self) -> str:
        """JSON of a step that was under way, or "" """
    @property
    def loss_scaler(self) -> str:
        """JSON, or "" """
    @loss_scaler.setter
    def loss_scaler(self, value: str) -> None: ...
    @property
    def user(self) -> str:
        """JSON"""
    @user.setter
    def user(self, value: str) -> None: ...
    @property
    def user_of_rank(self) -> list[str]: ...
    @user_of_rank.setter
    def user_of_rank(self, value: Sequence[str]) -> None: ...

class StoredRange:
    """Where a part of a state lies."""

    @property
    def key(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> list[int]:
        """of the logical tensor"""
    @property
    def file(self) -> str: ...
    @property
    def begin(self) -> int:
        """byte of the file"""
    @property
    def bytes(self) -> int: ...

class Damage:
    """What is wrong with a checkpoint: bytes of a file, or, where `file` is "", elements of a state."""

    @property
    def file(self) -> str: ...
    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def keys(self) -> list[str]:
        """states that lie there"""
    @property
    def what(self) -> str: ...

class CheckpointReader:
    """A checkpoint as logical tensors. Every MiB that it reads is compared with its digest. For one thread at a time; blocks."""

    def __init__(self, checkpoint: str) -> None:
        """Reads the manifest and the headers. Raises Error CHECKPOINT, IO."""
    @property
    def manifest(self) -> Manifest: ...
    def ranges(self) -> list[StoredRange]: ...
    def has(self, key: str) -> bool: ...
    def read(self, key: str, begin: int, end: int, into: torch.Tensor) -> None:
        """Elements [begin, end) of the logical tensor, row major, into a uint8 tensor on the CPU with as many bytes."""

class CheckpointWriter:
    """A checkpoint of one file. Without commit() nothing of it stays. For one thread at a time; blocks."""

    def __init__(self, folder: str, manifest: Manifest) -> None:
        """Makes room for all states of the manifest. Raises Error USAGE if the step is there, IO."""
    @property
    def keys(self) -> list[str]:
        """in the order in which write() wants them"""
    def write(self, data: torch.Tensor) -> None:
        """A uint8 tensor on the CPU: the next bytes."""
    def commit(self, keep_last: int = 0, keep_every: int = 0) -> str:
        """Returns the path of the checkpoint."""

class SafetensorsWriter:
    """A safetensors file that appears whole or not at all. Blocks."""

    def __init__(
        self, path: str, entries: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]
    ) -> None:
        """Entries: name, dtype, shape, bytes. Raises Error USAGE, IO."""
    def write(self, data: torch.Tensor) -> None:
        """A uint8 tensor on the CPU: the next bytes, in the order of the entries."""
    def commit(self) -> None: ...

def list_checkpoints(folder: str) -> list[tuple[int, str]]:
    """Step and path of each, the last commit first; they have not been looked into. Raises Error IO."""

def read_manifest(checkpoint: str) -> Manifest:
    """Raises Error CHECKPOINT, IO."""

def why_torn(checkpoint: str) -> str:
    """Why it is not whole, "" if it is: its manifest, its files and their sizes, also those of the one that it refers to."""

def find_damage(checkpoint: str) -> list[Damage]:
    """Reads all of a checkpoint whose manifest is whole. Blocks. Raises Error CHECKPOINT, IO."""

def prune_checkpoints(folder: str, keep_last: int, keep_every: int, dry_run: bool) -> list[str]:
    """Removes what retention does not keep; returns the paths. Raises Error IO."""

class Config:
    """A configuration with all defaults filled in."""

    @staticmethod
    def from_file(path: str | os.PathLike[str], overrides: Sequence[ConfigOverride] = ...) -> Config: ...
    @staticmethod
    def from_json(text: str, origin: str = "a dict", overrides: Sequence[ConfigOverride] = ...) -> Config: ...
    def to_json(self) -> str: ...
    def describe(self) -> list[str]: ...
    @property
    def zero_stage(self) -> int: ...
    @property
    def optimizer_type(self) -> str: ...
    @property
    def fp16_auto_cast(self) -> bool: ...
    @property
    def bf16_auto_cast(self) -> bool: ...
    @property
    def input_dtype(self) -> str | None:
        """To which floating-point inputs are cast, "float16" or "bfloat16"; None: they stay as they are."""
    def mesh(self, world: int) -> dict[str, int]:
        """Sizes of the axes dp, sp and tp, from outer to inner. Raises Error CONFIG if they do not fit `world` ranks."""
    @property
    def sequence(self) -> dict[str, Any]:
        """Section zeroth.sequence: method, order and ulysses."""
    @property
    def activations(self) -> dict[str, Any]:
        """The keys of zeroth.activations (in device cpu_checkpointing counts), and of the files: piece_bytes, io, direct."""
    @property
    def updates_inside_backward(self) -> bool:
        """zeroth.update.inside_backward."""
    @property
    def norms(self) -> str:
        """zeroth.tensor.norms."""
    @property
    def verify(self) -> str:
        """zeroth.parallel.verify."""
    def micro_steps(self, world: int) -> int:
        """Micro-steps of a step: gradient_accumulation_steps, or what the batch sizes leave."""
    def batch_sizes(self, world: int) -> dict[str, int]:
        """train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps for `world` ranks. Raises Error CONFIG if
        none of the first two is given, or they do not fit each other."""
    @property
    def experts(self) -> dict[str, Any]:
        """The keys of zeroth.experts."""
    @property
    def pipeline(self) -> dict[str, Any]:
        """The keys of zeroth.pipeline: schedule, chunks, split, recompute, checkpoint_interval; unshard: "none" where
        parameters are whole all the time."""
    @property
    def gradient_accumulation_steps(self) -> int | None: ...
    @property
    def train_micro_batch_size_per_gpu(self) -> int | None: ...

class World:
    """Who this process is among the ranks of its job."""

    @staticmethod
    def from_environment() -> World:
        """What the launcher's variables say. Ranks on several hosts that MPI does not join are the default group of torch.distributed: if
        there is none yet, this makes it over gloo and waits for all of them."""
    @staticmethod
    def from_group(group: ProcessGroup | None = None) -> World:
        """The ranks of an existing torch.distributed group (None: the default one), which carries every message: on several
        hosts, whatever started them. It needs a backend for CPU tensors, such as gloo."""
    def abort(self, why: str | Error) -> None:
        """Tells every rank that this one gives up, and why: whoever waits in an engine of this world, or comes to wait, gets Error
        ABORTED with the text at once, or the error as it is where it tells of other ranks (MISMATCH, PEER_LOST, TIMEOUT). For reasons that
        the engines cannot see, such as data that has run out; an exception that leaves the script is told by itself. Blocks for half a
        second at most; does nothing before the world has its first engine. The engines of this rank are of no use after it."""
    def find_places(self, signal: int, pipe: int, skipped: list[str], here: str) -> None:
        """For zeroth itself: how the line is found at which this rank is."""
    def ends_by(self, how: str) -> None:
        """For zeroth itself: how the script ends, for the ranks that wait for this one then."""
    def spare(self) -> None:
        """For zeroth itself: this process is interactive, and does not end by itself when the job has failed elsewhere."""
    def write_trace(self, path: str) -> None:
        """Writes the last 1,024 calls of this rank, one JSON object a line; `zeroth-trace` draws the files of all ranks."""
    def site(self, count: int) -> World:
        """The ranks of this rank's site as a world: this one is cut into `count` runs of consecutive ranks, which train apart, see
        zeroth.local_updates(). A failure anywhere still ends the whole job. Never blocks. Raises Error CONFIG if `count` does not divide
        the ranks, USAGE for a site of a site."""
    @property
    def num_sites(self) -> int:
        """Of which this world is one; 1: it is no site."""
    @property
    def site_index(self) -> int: ...
    @property
    def is_job_of_its_own(self) -> bool:
        """zeroth-run --sites has started it as a site, with a hub to the others."""
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def origin(self) -> str: ...
    def mesh(self, axes: dict[str, int], config: Config | None = None) -> Mesh:
        """Groups of ranks by named axes, from outer to inner: {"dp": 2, "tp": 2} has ranks 0 and 1 side by side along "tp". Collective,
        blocks. Timeouts and nodes are those of the first engine of this world; without one they are the defaults, and hold for later
        engines. Raises Error CONFIG if the sizes do not multiply to the world's, and MISMATCH if ranks give different axes."""

class Mesh:
    """The ranks of a world as a grid, with a group for each axis."""

    def axis(self, name: str) -> Communicator:
        """The ranks that differ from this one along one axis only. Raises Error USAGE with the names of all axes."""
    def axes(self, names: Sequence[str]) -> Communicator:
        """The ranks that differ from this one along these axes only, in the order of the world. The first call with a list is collective
        over the world and blocks."""
    @property
    def world(self) -> Communicator:
        """All ranks."""
    def received(self) -> dict[str, int]:
        """Payload bytes that this rank has received along each axis. An axis of all ranks counts the world's calls, too."""
    def reset_received(self) -> None:
        """Forgets what was counted in all groups of the mesh."""
    def size(self, axis: str) -> int: ...
    def coordinate(self, axis: str) -> int:
        """Of this rank, from 0."""
    @property
    def sizes(self) -> dict[str, int]: ...

class Communicator:
    """A group of ranks and its calls. A deep copy is the object itself. All ranks of the group make the same calls in the same order, with the same dtype, counts, op, root
    and tag; otherwise all of them get Error MISMATCH with both sides. Calls block, without the GIL, until this rank has its result.

    Tensors are dense, contiguous, on the CPU, of float64, float32, bfloat16, float16, int64, int32 or uint8 (no sums of uint8), and do not
    require grad, or the call is under torch.no_grad(): no gradient flows through it. Rows are along dimension 0. `counts`: rows of each
    rank; without it all parts are equal. `out`: where the result goes, of so many elements; without it a new tensor is made. Sums are in
    rank order, inside nodes first, in float32 for 16-bit values."""

    @property
    def rank(self) -> int:
        """Of this process in the group."""
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str:
        """ "world/mesh0/tp", as in errors."""
    @property
    def received_bytes(self) -> int:
        """Payload bytes that this rank has received in this group since it was made or reset."""
    def received(self) -> dict[str, tuple[int, int]]:
        """Calls and bytes of each kind of call: {"all_reduce": (2, 4096)}."""
    def reset_received(self) -> None: ...
    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, out: torch.Tensor | None = None, tag: int = 0
    ) -> torch.Tensor:
        """Sum, "min" or "max" over the ranks, in place if there is no `out`."""
    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        tag: int = 0,
    ) -> torch.Tensor:
        """The rows of all ranks, in rank order."""
    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        tag: int = 0,
    ) -> torch.Tensor:
        """This rank's rows of the sum, minimum or maximum."""
    def broadcast(self, tensor: torch.Tensor, root: int, *, tag: int = 0) -> torch.Tensor:
        """The root's tensor, in place."""
    def gather(
        self,
        tensor: torch.Tensor,
        root: int,
        *,
        counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        tag: int = 0,
    ) -> torch.Tensor | None:
        """The rows of all ranks at the root; None elsewhere."""
    def scatter(
        self,
        out: torch.Tensor,
        root: int,
        tensor: torch.Tensor | None = None,
        *,
        counts: Sequence[int] | None = None,
        tag: int = 0,
    ) -> torch.Tensor:
        """This rank's rows of the root's tensor, in `out`."""
    def all_to_all(
        self,
        tensor: torch.Tensor,
        *,
        counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        tag: int = 0,
    ) -> torch.Tensor:
        """Part r of the rows goes to rank r, part r of the result comes from rank r. `counts`: rows for each rank, `recv_counts`: rows
        from each."""
    def send(self, tensor: torch.Tensor, to: int, *, tag: int = 0) -> None:
        """To one rank, which receives it. May wait for that."""
    def recv(self, tensor: torch.Tensor, source: int, *, tag: int = 0) -> torch.Tensor:
        """From one rank, in place."""
    def send_recv(self, tensor: torch.Tensor, to: int, out: torch.Tensor, source: int, *, tag: int = 0) -> torch.Tensor:
        """Sends `tensor` and receives `out` at once, so that ranks can send to each other."""
    def exchange(
        self, sent: Sequence[tuple[torch.Tensor, int]], received: Sequence[tuple[torch.Tensor, int]], *, tag: int = 0
    ) -> None:
        """Sends and receives any number of tensors, all of them in flight at once: each to, or from, the rank beside
        it, in place. Those between the same two ranks are matched in order."""
    def barrier(self, name: str = "", *, tag: int = 0) -> None:
        """Waits for all ranks. Ranks compare the name."""

class HostRows:
    """Rows of float32 in a tensor [rows, dim] on the CPU, which it shares: the arithmetic of HostTable. Tensors are dense and on the
    CPU; indices are int64. One thread at a time; calls release the GIL. Raises Error USAGE for tensors that do not fit, and for an index that
    is no row, with its position."""

    def __init__(self, table: torch.Tensor, threads: int) -> None: ...
    def gather(self, indices: torch.Tensor, out: torch.Tensor) -> None:
        """Into `out` [indices, dim]."""
    def require(self, indices: torch.Tensor) -> None:
        """Raises Error USAGE for an index that is no row, with its position."""
    def gather_on_device(self, indices: torch.Tensor, out: torch.Tensor, stream: int) -> None:
        """Both on the thread's CUDA device, which reads the page-locked table itself, in `stream`. Does not block: the
        table stays as it is until the stream has come there. Indices are good. Raises Error ENVIRONMENT without the module
        of CUDA kernels."""
    def gather_in_8_bits(self, indices: torch.Tensor, block: int, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Into `values` [indices, dim] of int8 and `scales` [indices, blocks of a row]: value * scale, within scale / 2."""
    def sum(self, indices: torch.Tensor, grads: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Touched rows, ascending, and the sums of their gradients in the order of the positions, times `factor`."""
    def update(
        self,
        rule: str,
        indices: torch.Tensor,
        grads: torch.Tensor,
        factor: float,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        step: int,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> int:
        """Updates the touched rows by "sgd", "rowwise_adagrad" or "adam". Returns how many there are."""

class ParameterBox:
    """What a rank's parameter is of the parameter of the whole model."""

    def __init__(
        self,
        logical_shape: Sequence[int] = (),
        offset: Sequence[int] = (),
        distinct: str = "",
        copies: int = 1,
        summed: Sequence[str] = (),
        parts: int = 1,
        parts_dim: int = 0,
        stages: Sequence[int] = (),
        names: Sequence[str] = (),
        further: Sequence[str] = (),
    ) -> None:
        """`logical_shape`, `offset`: the whole tensor, and where the parameter begins in it; empty: it is the whole. `distinct`: the axis
        along which ranks have other boxes; `copies`: so many neighbours have the same. `summed`: axes along which ranks have parts of the
        gradient. `parts`: the box is of each of so many equal blocks of dimension `parts_dim`. `stages`: of a pipeline that use the
        parameter, on the others its box has no elements; empty: all use it. `names`: of the whole tensor, where a rank has several boxes
        of it: the first one is that of checkpoints, the others are tied; empty: those of the parameter. `further`: more axes along which
        ranks have other boxes."""
    @property
    def logical_shape(self) -> list[int]: ...
    @property
    def offset(self) -> list[int]: ...
    @property
    def distinct(self) -> str: ...
    @property
    def copies(self) -> int: ...
    @property
    def further(self) -> list[str]: ...
    @property
    def summed(self) -> list[str]: ...
    @property
    def parts(self) -> int: ...
    @property
    def parts_dim(self) -> int: ...
    @property
    def stages(self) -> list[int]: ...
    @property
    def names(self) -> list[str]: ...

def copy_to_group(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """x as it is; its gradient is the sum of the gradients over the ranks. No call in forward; the result is x's memory. (Megatron's f.)"""

def reduce_from_group(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """The sum of the ranks' tensors; the gradient passes as it is, without a call. (Megatron's g.)"""

def split_to_group(x: torch.Tensor, dim: int, group: Communicator, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's slice of a dim, without a call; the gradient is gathered. `sizes`: of each rank, else slice_sizes()."""

def gather_from_group(
    x: torch.Tensor, dim: int, group: Communicator, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """The slices of all ranks along a dim; the gradient is this rank's slice, without a call. `sizes`: of each rank, else all as this one."""

def all_reduce(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """The sum of the ranks' tensors; so is the gradient."""

def all_gather(x: torch.Tensor, dim: int, group: Communicator, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """The slices of all ranks along a dim; the gradient is this rank's slice of the sum. `sizes`: of each rank, else all as this one."""

def reduce_scatter(x: torch.Tensor, dim: int, group: Communicator, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's slice of the sum along a dim; the gradient is gathered. `sizes`: of each rank, else slice_sizes()."""

def all_to_all(
    x: torch.Tensor,
    split_dim: int,
    concat_dim: int,
    group: Communicator,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Slice r of split_dim goes to rank r; what comes is joined along concat_dim in rank order. split_sizes: of the slices for each rank,
    else slice_sizes(). concat_sizes: along concat_dim of what comes from each rank, else as if all had x's shape. With one dim for both,
    sizes may be any that ranks have told each other, and then both are needed. The gradient is the reverse call."""

class KeptScopes:
    """A context of KeptCalls. It may be entered again."""

class KeptCalls:
    """The results of the calls between ranks of a region that is computed again in backward: recorded in the first forward, handed out in
    the recompute without a call. Contexts are of their thread, and may be nested."""

    def __init__(self) -> None: ...
    def record(self) -> AbstractContextManager[None]:
        """A context: calls are made, and their results are kept."""
    def hand_out(self) -> AbstractContextManager[None]:
        """A context: the same calls in the same order get the kept results, once; what is left is dropped at its end. Other calls raise
        Error MISMATCH. Entered again, it lets calls be made."""
    @property
    def size(self) -> int:
        """Calls whose results are kept."""
    @property
    def bytes(self) -> int:
        """Of the kept results."""

def hands_out_calls() -> bool:
    """True in a context of KeptCalls.hand_out() of this thread: the forward has been computed before."""

class TokenExchange:
    """The way of one batch of tokens to their experts and back. experts: [T, k] of int64 or int32, -1 for none. Rank r of the group owns
    slice r of slice_sizes(num_experts, ranks). All ranks of the group make the same calls in the same order; T may differ, and be 0. Without
    ranks this rank has all experts, and no call is made."""

    def __init__(
        self, experts: torch.Tensor, num_experts: int, ranks: ExpertRanks | Communicator | None = None
    ) -> None: ...
    def send(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] -> [R, D]: rows of this rank's experts, expert by expert, and for each by rank and token."""
    def bring(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """y [R, D'] in the order of send(), weights [T, k] -> [T, D']: the weighted sum over a token's choices, in their order."""
    def through(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        compute: Callable[[torch.Tensor, int, list[int]], torch.Tensor],
    ) -> torch.Tensor:
        """bring(compute(send(x)), weights), run by run of the experts: compute(rows [R', D], number of the run, rows of each of its experts)
        -> [R', D'], while rows of the next run and results of the last one are under way. Not for a run without experts."""
    def blocks_of_runs(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """[own experts, ...] -> for each run [its experts, ...]: copies, where there may be any, and runs of the own experts. Gradients of
        copies go to their owners. Collective if any rank holds a copy."""
    @property
    def experts_here(self) -> list[int]:
        """Numbers of the copies, then of the own experts."""
    @property
    def rows(self) -> list[int]:
        """Of each of experts_here; their sum is R."""
    @property
    def expert_of_row(self) -> torch.Tensor:
        """[R] of int64: the place of a row's expert in experts_here."""
    @property
    def chosen(self) -> list[int]:
        """Choices of this rank's tokens, for each expert of the layer."""

class ExpertRanks:
    """The ranks that share the experts of one layer, and how tokens and experts meet. One layout for all ways: the options change between
    two forwards, on all ranks alike, and move no byte.

    meet: "experts" (rows travel), "tokens" (copies of the chosen experts travel, those with most rows first), "balance" (copies where they
    lower the greatest number of rows of a rank). copies: most experts of other ranks on a rank, during a layer until its backward. pieces:
    runs of the own experts whose rows are under way while others are computed; 0: measured. two_hops: inside nodes, then between them.
    Collective with two_hops."""

    def __init__(
        self, group: Communicator, *, meet: str = "experts", copies: int = 1, pieces: int = 1, two_hops: bool = False
    ) -> None: ...
    @staticmethod
    def of_mesh(
        mesh: Mesh, *, over: str = "ep", meet: str = "experts", copies: int = 1, pieces: int = 1, two_hops: bool = False
    ) -> ExpertRanks | None:
        """The ranks along the axes of `over` that have several; None if none has. Ranks of tp have the same tokens: each sends its share.
        Collective over the world."""
    def of_another_layer(self) -> ExpertRanks:
        """The same ranks and options, with times of its own."""
    @property
    def alike(self) -> int:
        """So many neighbours have the same tokens."""
    @property
    def axes(self) -> list[str]: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def set_options(self, *, meet: str, copies: int, pieces: int, two_hops: bool) -> None: ...
    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def pieces(self) -> int:
        """Of the last forward."""

class ExpertLoad:
    """How the tokens of a step spread over the experts of one layer, on all ranks with tokens of their own."""

    def __init__(self, num_experts: int) -> None: ...
    def begin_step(self) -> None:
        """Forgets the micro-batches so far."""
    def add(self, experts: torch.Tensor, groups: Iterable[Communicator]) -> None:
        """Adds a micro-batch: its choices [T, k] before any was dropped. `groups`: ranks with other tokens, axis by axis; all of them make
        the call, with one sum of E + 1 numbers an axis. Blocks."""
    def balance_loss(self, scores: torch.Tensor) -> torch.Tensor:
        """E sum_i f_i p_i: f_i, the part of all choices so far that are expert i's, over all ranks; p_i, its mean score [T, E] in the last
        micro-batch. The mean over ranks is the loss. f has no gradient."""
    @property
    def chosen(self) -> list[int]:
        """Choices of each expert in the step so far, over all ranks."""
    @property
    def tokens(self) -> int:
        """Of the last micro-batch, over all ranks."""

class Gated:
    """What a gate made of the tokens of a forward."""

    @property
    def experts(self) -> torch.Tensor:
        """[T, k], before any was dropped"""
    @property
    def kept(self) -> torch.Tensor:
        """[T, k]"""
    @property
    def weights(self) -> torch.Tensor:
        """[T, k]"""
    @property
    def scores(self) -> torch.Tensor:
        """[T, E]"""
    @property
    def logits(self) -> torch.Tensor:
        """[T, E]"""
    @property
    def balance(self) -> torch.Tensor:
        """A scalar; zero with balance="bias"."""
    @property
    def counts(self) -> torch.Tensor:
        """[E] of int64: choices of this rank's tokens, before any was dropped"""
    @property
    def dropped(self) -> int:
        """Choices of this rank's tokens beyond the capacity."""

class Gate:
    """Noise, choice, balance and capacity of a layer of experts, without its parameters. zeroth/libtorch/moe.h has the contract."""

    def __init__(
        self,
        num_experts: int,
        *,
        k: int = 1,
        score: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        groups_kept: int = 1,
        rule: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None,
        schedule: tuple[int, int, int] | None = None,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        drop_tokens: bool = True,
        use_rts: bool = True,
        noise: str = "none",
        top2_2nd_expert_sampling: bool = False,
        balance: str = "loss",
        bias_rate: float = 1e-3,
        seed: int = 0,
    ) -> None: ...
    def balance_over(self, groups: Iterable[Communicator]) -> None:
        """Ranks with other tokens of one batch, axis by axis of the mesh."""
    @property
    def place(self) -> int:
        """This rank's number among them: other ranks draw other numbers."""
    @place.setter
    def place(self, place: int) -> None: ...
    def set_choices(self, choices: int) -> None:
        """k from now on. Raises Error USAGE with a schedule."""
    def set_capacity(self, factor: float, eval_factor: float, least: int) -> None:
        """Of the forwards from now on."""
    def choices(self, step: int = 0) -> int:
        """k of a step."""
    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        used: torch.Tensor | None = None,
        training: bool = True,
        number: int = 0,
        step: int = 0,
    ) -> Gated:
        """x [T, D], weight [E, D], bias [E] of the choice, used [T]: False for no expert. `number`: of the forward, for what is drawn.
        `step`: updates so far, for the schedule. Blocks: one sum of E + 1 numbers an axis of balance_over()."""
    def begin_step(self, bias: torch.Tensor | None = None) -> None:
        """Forgets the micro-batches so far. With balance "bias" or "both" the bias moves by their load."""
    @staticmethod
    def is_repeated() -> bool:
        """True inside a backward: a forward repeats an earlier one, and keeps its number."""
    @property
    def load(self) -> ExpertLoad:
        """Of the step so far."""

def choices_at(step: int, steps: int, first: int, last: int) -> int:
    """first + floor((last - first) step / steps), and `last` from step `steps` on."""

def fixed_router_weight(num_experts: int, width: int, seed: int) -> torch.Tensor:
    """[num_experts, width] of float32, uniform from -1/sqrt(width) to 1/sqrt(width), drawn from the seed."""

def sequence_balance_loss(scores: torch.Tensor, experts: torch.Tensor, sequences: Sequence[int]) -> torch.Tensor:
    """The mean over sequences of sum_i f_i P_i: f_i, E / k times the part of a sequence's choices that are expert i's; P_i, the mean part of
    expert i in a token's scores. scores [T, E], experts [T, k]; `sequences`: lengths, T in all. DeepSeek-V3 report, eq. 17 to 20."""

def update_balance_bias(bias: torch.Tensor, load: Sequence[int], rate: float) -> None:
    """bias_i += rate * sign(mean(load) - load_i), in place; bias [E] of float32 or float64. Wang et al., 2024, algorithm 1."""

def route(
    logits: torch.Tensor,
    choices: int,
    *,
    score: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    groups_kept: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """experts [T, k] of int64, weights [T, k] and scores [T, E] of logits [T, E]. `score`: "softmax", "sigmoid". `bias` [E]: added for the
    choice only. `groups`: equal blocks of experts, of which the `groups_kept` best are chosen from. Of equal scores the lower number."""

def expert_capacity(tokens: int, num_experts: int, choices: int, factor: float, least: int) -> int:
    """max(least, ceil(factor choices tokens / num_experts))"""

def keep_within(
    experts: torch.Tensor, weights: torch.Tensor, num_experts: int, capacity: int, by: str = "position", seed: int = 0
) -> torch.Tensor:
    """experts [T, k] with -1 for choices beyond `capacity` of an expert. `by`: "position" keeps the first choices of all tokens before the
    second ones, "weight" the greatest weights [T, k], "draw" a draw from the seed."""

def router_z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The mean over tokens of logsumexp(logits)^2; logits [T, E]."""

class ExpertMatrices:
    """The matrices [experts, out, in] and biases [experts, out] of experts for one forward in which each expert has one product. Their
    gradients are written where they stay in those of the stacks."""
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None: ...
    def linear(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """x [rows, in] times the matrix of one expert, plus its bias."""

class ExpertParts:
    """The parts of a stack [experts, ...] for one forward, whose gradient is filled as those of the parts come."""
    def __init__(self, stacked: torch.Tensor) -> None: ...
    def part(self, expert: int) -> torch.Tensor: ...

def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: Sequence[int]
) -> torch.Tensor:
    """x [R, in], its first rows[0] rows times the matrix of expert 0, and so on: [R, out]. weight [experts, out, in], bias [experts, out].
    Experts without rows have a gradient of zeros."""

def gathered_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dim: int,
    group: Communicator,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """linear(all_gather(x, dim), weight, bias) that keeps only the own slice of x for backward and gathers it again there. x: a slice of
    `dim`, one before the last; weight [own out, features]; bias [own out]. The gradient of x is this rank's slice of the sum. `sizes`: as in
    all_gather(). It has no gradient of its own."""

def ring_shift(tensors: Sequence[torch.Tensor], group: Communicator, by: int = 1) -> list[torch.Tensor]:
    """The tensors of rank - `by`, around the ring, in one batch of messages; gradients are shifted back. All ranks give the same shapes."""

def part_of_loss(term: torch.Tensor, group: Communicator, count: int | None = None) -> torch.Tensor:
    """A term of a loss whose gradients are summed over the ranks of the group: its whole value, with this rank's part of the gradient.

    Without `count`: a term that every rank computes whole and alike, such as a penalty on weights. Its gradient is divided by the ranks; no call of the group.
    With `count`: a mean over elements, tokens for one, of which each rank has some. `term` is the sum over this rank's elements, `count` their number, from 0. Returns the mean over the elements of all ranks, 0 where there are none. A call of all ranks; wire: the count, and the sum.
    A group of one rank makes no call. Raises Error USAGE for a negative count, and for what has no floating-point values."""

def slice_sizes(elements: int, ranks: int) -> list[int]:
    """As equal as can be: the first elements % ranks ranks have one more."""

def share_tasks(loads: Sequence[float], ranks: int) -> list[list[tuple[int, int, int]]]:
    """Of each rank (task, part, parts): part `part` of `parts` of a task. A task has ranks for itself, or it is whole on a rank with others.
    The largest load is at most 4/3 of the least."""

def vocab_cross_entropy(
    local_logits: torch.Tensor,
    targets: torch.Tensor,
    group: Communicator,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    vocab_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Cross entropy of logits of which each rank has those of a part of the vocabulary: local_logits [..., own vocabulary] floating,
    targets [...] int64, the same on all ranks. The loss is alike on all ranks: "mean" over the targets that are not ignore_index, "sum", or
    "none": [...]; float32 for 16-bit logits. Logits never move: two all_reduces of 1 and 2 numbers a target. vocab_sizes: of each rank, else
    all as this one. (Megatron-LM.)"""

class PendingSum:
    """A sum over ranks under way."""

    def wait(self) -> torch.Tensor:
        """Blocks until all ranks have started it. The sum, with x's gradient as it is; the same tensor each time."""

def reduce_from_group_async(x: torch.Tensor, group: Communicator) -> PendingSum:
    """Starts reduce_from_group(x): on ranks of one node no rank waits for another before wait(), elsewhere the call is made there. All ranks
    start, and take, the same sums in the same order. Do not write to x meanwhile. Hold one Communicator: each shares memory of its own."""

def chunked_linear_reduce(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunks: int, group: Communicator
) -> torch.Tensor:
    """reduce_from_group(linear(x, weight)) + bias in pieces of x's rows: the sum of one is under way while the next is computed. x
    [..., own features], weight [out, own features], bias [out]. The gradients do not depend on the chunks; the value only as far as the
    product of a row depends on the rows beside it."""

class Sbp:
    """How one logical tensor lies on the ranks of a group: S(dim) rank r has slice r, B every rank has it, P it is the sum of what the
    ranks have. (OneFlow.)"""

    @staticmethod
    def split(dim: int) -> Sbp: ...
    @staticmethod
    def broadcast() -> Sbp: ...
    @staticmethod
    def partial() -> Sbp: ...
    def gradient(self, gradients_alike: bool = False) -> Sbp:
        """How its gradient lies: of S(dim) like S(dim), of P like B, of B like P, or like B where all ranks have the same gradient."""

def redistribute(
    x: torch.Tensor,
    source: Sbp,
    to: Sbp,
    group: Communicator,
    *,
    source_sizes: Sequence[int] | None = None,
    to_sizes: Sequence[int] | None = None,
    gradients_alike: bool = False,
) -> torch.Tensor:
    """This rank's share of a tensor that lies as `source` says, laid as `to` says, by the cheapest call: S to B all_gather, P to B
    all_reduce, P to S reduce_scatter, S to another S all_to_all, the others none. source_sizes: of the slices, else all as this one;
    to_sizes: else slice_sizes(). The gradient goes the reverse way; gradients_alike: gradients of broadcast tensors are the same on all
    ranks, not each rank's part."""

def conversion_bytes(source: Sbp, to: Sbp, shape: Sequence[int], element_bytes: int, ranks: int) -> int:
    """Bytes that all ranks together receive in redistribute() of a tensor of this whole shape."""

class FirstOffender:
    """Where the first non-finite gradient of a step came from."""

    @property
    def param(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def micro_step(self) -> int: ...
    @property
    def count(self) -> int: ...

class StepTimes:
    """Where a rank's time of a step went, in microseconds, from the commit vote of one step to that of the next."""

    @property
    def between_us(self) -> int:
        """From step() to the forward: batches are loaded there, models evaluated."""
    @property
    def forward_us(self) -> int: ...
    @property
    def backward_us(self) -> int:
        """And what the program does between it and step()."""
    @property
    def step_us(self) -> int: ...
    @property
    def waited_us(self) -> int:
        """For other ranks, in all of them; it is in no other of these times."""
    @property
    def computed_us(self) -> int:
        """All but the waits."""

class StepResult:
    """What a step did: the same on every rank."""

    @property
    def boundary(self) -> bool: ...
    @property
    def committed(self) -> bool: ...
    @property
    def delayed(self) -> bool:
        """Committed, and its update runs in the next step: see the key zeroth.update.delayed_after."""
    @property
    def messages(self) -> bool:
        """Committed, and ranks exchanged messages in the place of gradients: the step is lossy."""
    @property
    def reason(self) -> str: ...
    @property
    def cause(self) -> str:
        """ "" for a committed step, "failed backward", "non-finite", or "overflow": non-finite under a loss scale."""
    @property
    def step(self) -> int: ...
    @property
    def batches(self) -> int:
        """Micro-batches of all ranks that the gradient is the mean of: fewer than ranks times micro-steps where some ranks had run out of
        them (see Engine.batches())."""
    @property
    def left_out(self) -> list[int]:
        """With zeroth.gradient_code: ranks that left micro-steps out. Their gradients are not in the sum, which is the same."""
    @property
    def grad_norm(self) -> float: ...
    @property
    def clip_coefficient(self) -> float: ...
    @property
    def lr(self) -> float: ...
    @property
    def loss_scale(self) -> float:
        """By which fp16 multiplied this step's gradients; 1.0 without fp16. It is not in grad_norm."""
    @property
    def preempted(self) -> bool:
        """A rank got SIGTERM (see the key zeroth.preemption): save, and end with zeroth.EXIT_PREEMPTED."""
    @property
    def first_offender(self) -> FirstOffender | None: ...
    @property
    def times(self) -> list[StepTimes]:
        """Of every rank; zeros in the first step."""

class MemoryReport:
    """Bytes by state, planned and measured."""

    @property
    def planned(self) -> dict[str, int]: ...
    @property
    def measured_peak(self) -> dict[str, int]: ...
    @property
    def live(self) -> dict[str, int]: ...
    @property
    def construction_peak(self) -> int: ...
    @property
    def live_gathered_peak(self) -> int: ...
    @property
    def live_slots_peak(self) -> int: ...
    @property
    def overflow_slots(self) -> int: ...
    @property
    def order_deviations(self) -> int:
        """Units that were not used in the order of the step before."""

    @property
    def bus_down(self) -> int:
        """Bytes of states that have come from a device with memory of its own."""

    @property
    def bus_up(self) -> int:
        """Those that have gone to it."""

    @property
    def demand_fetches(self) -> int:
        """Reads of parameters in files that the recorded order had not foreseen."""

    @property
    def spills(self) -> int: ...
    @property
    def resident(self) -> int: ...
    @property
    def transport(self) -> int: ...
    @property
    def pss(self) -> int: ...
    @property
    def residency_choice(self) -> str:
        """Which states rest in files and why, if the engine has chosen it (zeroth.offload.ratio); else ""."""

    @property
    def activation_choice(self) -> str:
        """What each unit does with its activations and why, if the engine has chosen it (zeroth.activations.choice); else ""."""

    @property
    def planned_files(self) -> int:
        """Bytes on disk of states that rest in files, see zero_optimization.offload_optimizer and offload_param."""

    @property
    def measured_files(self) -> int:
        """What the file systems say that these files take."""

    @property
    def activation_files(self) -> int:
        """What the file systems say that the files of saved tensors take, see zeroth.activations; in no plan."""

    @property
    def checkpoint_copy(self) -> int:
        """Bytes of the copy that save(async_=True) keeps; in no plan."""

    @property
    def compute_copies(self) -> int:
        """Bytes of the parameters' copies on the device that computes, where that is not the engine's own memory."""

class TransferCounters:
    """What moved between memory and the files of one set of states: in a step, or in all. Bytes are of whole blocks,
    rounded up to 4096. read_bytes = needed_bytes - spared_read_bytes + unused_bytes + what is read ahead now, less what
    was before; write_bytes = changed_bytes - spared_write_bytes."""

    @property
    def leases(self) -> int:
        """Uses of blocks; of activations: tensors that came back."""

    @property
    def reads(self) -> int:
        """Blocks."""

    @property
    def writes(self) -> int:
        """Blocks."""

    @property
    def read_bytes(self) -> int: ...
    @property
    def write_bytes(self) -> int: ...
    @property
    def prefetched(self) -> int:
        """Uses whose read had begun before, and had ended."""

    @property
    def late(self) -> int:
        """Uses whose read had begun before, and had not ended: they waited for it."""

    @property
    def on_demand(self) -> int:
        """Uses that waited for a read that nobody had begun."""

    @property
    def waited_s(self) -> float:
        """For reads, and for writes whose memory was needed."""

    @property
    def needed_bytes(self) -> int:
        """Of uses of what an earlier one wrote: planned_read_bytes in a step."""

    @property
    def spared_read_bytes(self) -> int:
        """Of these, what was still in memory."""

    @property
    def changed_bytes(self) -> int:
        """Of uses that write: planned_write_bytes in a step."""

    @property
    def spared_write_bytes(self) -> int:
        """Of these, what stays in a cache."""

    @property
    def unused_bytes(self) -> int:
        """Read, and gone from memory before a use."""

    @property
    def ahead_bytes(self) -> int:
        """Read for a use that has not come yet, now."""

class TransferTimes:
    """Of a step, or of all."""

    @property
    def in_flight_s(self) -> float:
        """In which at least one transfer was on its way; with io_uring and aio rather too little."""

    @property
    def waited_s(self) -> float: ...
    @property
    def hidden_share(self) -> float:
        """The part of the time on the way in which nobody waited: 0 to 1; 1 where nothing moved."""

class TransferRow:
    """One set of states that has blocks in files."""

    @property
    def planned_read_bytes(self) -> int | None:
        """The formula of a step; None for activations."""

    @property
    def planned_write_bytes(self) -> int | None: ...
    @property
    def last_step(self) -> TransferCounters: ...
    @property
    def all(self) -> TransferCounters:
        """Since the engine was made, or reset_counters()."""

class TransferReport:
    """What moved between memory and files on this rank; str() makes a table."""

    @property
    def rows(self) -> dict[str, TransferRow]:
        """optimizer (with masters), parameters, activations; those that have files."""

    @property
    def last_step(self) -> TransferTimes:
        """Of optimizer and parameters."""

    @property
    def all(self) -> TransferTimes: ...
    @property
    def activations_last_step(self) -> TransferTimes: ...
    @property
    def activations_all(self) -> TransferTimes: ...

class SaveHandle:
    """A save that runs behind the training: Engine.save(async_=True)."""

    @property
    def path(self) -> str:
        """Final name of the checkpoint; it is there after wait()."""

    def done(self) -> bool:
        """True when the save has ended, well or not. Never blocks; ranks may differ until wait() or the next save."""

    def wait(self) -> str:
        """Collective and blocking: returns the path when the checkpoint is on the disk. Raises the error of the save on
        all ranks, once; "" if an earlier call has raised it."""

    def finish(self) -> None:
        """Blocks until the save has ended, on this rank only. Tells nothing and raises nothing."""

class Gathered:
    """Units whose parameters are gathered until finish(), or until this is gone."""

    def finish(self) -> None: ...

def why_without_memory(tensor: torch.Tensor) -> str:
    """Why a tensor that stands for a parameter or a gradient has no memory now; "" for another tensor."""

def require_memory(storage: object) -> None:
    """Raises an Error if a torch.UntypedStorage is that of a tensor that stands for a parameter or a gradient."""

class Engine:
    """The engine below zeroth.Engine: knows no module."""

    def __init__(
        self,
        units: Sequence[tuple[str, int, str, int]],
        units_hint: str,
        parameters: Sequence[tuple[str, torch.Tensor]],
        buffers: Sequence[tuple[dict[str, Any], str, str, torch.Tensor | None, bool]],
        groups: Sequence[Mapping[str, Any]],
        group_of: Mapping[str, int],
        config: Config,
        world: World,
        log_level: str,
        progress_every_s: float,
        json_log: str,
        hooks: Mapping[str, dict[int, Any]],
        trainable_later: Set[str],
        initial: Callable[[str], torch.Tensor | None] | None,
        boxes: Mapping[str, ParameterBox],
    ) -> None: ...
    def open_backward(self, loss: torch.Tensor, gradient: torch.Tensor | None) -> tuple[int, torch.Tensor | None]:
        """A number for close_backward(), and the gradient for loss.backward(): with the loss scale, or as it was given."""
    def close_backward(self, seen: int) -> None: ...
    def fail_backward(self) -> None: ...
    def part_of_loss(self, term: torch.Tensor) -> torch.Tensor: ...
    def drop_forwards(self) -> None: ...
    def note_experts(self, entropy: float, layer: str, dropped: int) -> None:
        """For the log of the next step, on rank 0."""
    def gathered(self, parameters: Sequence[torch.Tensor], writers: int) -> Gathered:
        """`writers`: a rank, -1 for all, -2 for nobody."""
    def read_states(
        self, kind: str, names: Sequence[str], ranks: Sequence[int], partial: bool
    ) -> list[tuple[str, torch.Tensor]]:
        """`names`: empty for all. `ranks`: empty for all. `partial`: names without the state are left out."""
    def local_states(self, kind: str) -> list[tuple[str, torch.Tensor, list[int], int, int]]:
        """Name, values, shape of the whole, begin and end."""
    def load_state_dict(
        self, values: Sequence[tuple[str, torch.Tensor]], strict: bool
    ) -> tuple[list[str], list[str]]: ...
    def load_mapped(
        self, values: Sequence[tuple[str, torch.Tensor]], strict: bool, failure: str
    ) -> tuple[list[str], list[str]]: ...
    def local_updates(
        self,
        *,
        method: str,
        steps: int,
        outer_lr: float,
        outer_momentum: float,
        nesterov: bool,
        fragments: int,
        delay: int,
        keep_local: float,
        payload: str,
        block: int,
        gap_scale: float,
        clip: float,
        lost_sites: str,
    ) -> None: ...
    def local_report(self) -> dict[str, Any]: ...
    def add_average(self, name: str) -> None: ...
    def update_average(self, name: str, decay: float) -> None: ...
    def swap_average(self, name: str) -> None: ...
    def zero_grad(self) -> None: ...
    def flush_update(self) -> None: ...
    def end_accumulation(self) -> StepResult: ...
    def begin_epoch(self) -> None: ...
    def begin_batch(self, has_batch: bool) -> str:
        """ "batch", "end", or "step": then step() and join() come next."""
    def join(self) -> str:
        """As begin_batch()."""
    def set_buffers(self, buffers: Sequence[tuple[dict[str, Any], str, str, torch.Tensor | None, bool]]) -> None: ...
    def step(self) -> StepResult: ...
    def average(self, value: float, name: str = "") -> float: ...
    def barrier(self, name: str = "") -> None: ...
    def export_safetensors(self, path: str) -> None: ...
    def save(
        self,
        folder: str,
        user: str,
        user_of_rank: str,
        keep_last: int,
        keep_every: int,
        frozen: str,
        overwrite: bool,
    ) -> str: ...
    def save_async(
        self,
        folder: str,
        user: str,
        user_of_rank: str,
        keep_last: int,
        keep_every: int,
        frozen: str,
        overwrite: bool,
    ) -> SaveHandle: ...
    def load(self, path: str, strict: bool, if_any: bool, hypers: bool, names: Mapping[str, str]) -> dict[str, Any]: ...
    def memory_report(self) -> MemoryReport: ...
    def transfer_report(self) -> TransferReport: ...
    def trace_transfers(self, on: bool) -> None: ...
    def transfer_trace(self) -> str: ...
    def wire_report(self) -> dict[str, int]: ...
    def reset_counters(self) -> None: ...
    def set_activation_choice(self, choice: str) -> None:
        """For the log of rank 0, and for MemoryReport.activation_choice."""
    def close(self, keep_parameters: bool) -> None: ...
    @property
    def state_kinds(self) -> list[str]: ...
    @property
    def applied_average(self) -> str: ...
    @property
    def state_batches(self) -> list[list[str]]:
        """Names of parameters, one list a unit."""
    @property
    def aliases(self) -> dict[str, str]:
        """Each name of a parameter, and the one that the engine uses."""
    @property
    def device(self) -> torch.device: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def config(self) -> Config: ...
    @property
    def has_gradients(self) -> bool: ...
    @property
    def micro_step(self) -> int: ...
    @property
    def ends_step(self) -> bool: ...
    @property
    def chunks(self) -> list[int]: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def learning_rates(self) -> list[float]: ...
    def set_group(self, group: int, values: Mapping[str, Any]) -> None: ...
    @property
    def groups(self) -> list[dict[str, Any]]:
        """Hyper-parameters with the names of torch's optimizers, the configuration's group first."""
    @property
    def has_schedule(self) -> bool: ...
    @property
    def trains(self) -> bool: ...
    @property
    def gathers_parameters(self) -> bool: ...
    @property
    def units(self) -> list[tuple[str, bool, list[str]]]: ...

class UnitHooks:
    """What a unit's module calls before and after its forward. Copies, which copies of the module get, do nothing; pickling is an Error."""

    def __init__(self, engine: Engine, unit: int) -> None: ...
    def before_root(
        self,
        watched: list[tuple[dict[str, Any], tuple[Any, ...] | int]],
        look_again: Callable[[nn.Module], list[tuple[dict[str, Any], tuple[Any, ...] | int]]],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None: ...
    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None: ...
    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None: ...

def schedule_names() -> list[str]:
    """The schedules of a pipeline."""

def make_program(
    schedule: str,
    ranks: int,
    micro_batches: int,
    chunks: int = 0,
    unshard: str = "none",
    step: bool = True,
    recompute: bool = False,
    offload: bool = False,
    vocabulary: str = "whole",
) -> str:
    """What each rank of a pipeline does in a step, as text. `chunks`: on each rank, 0: as few as the schedule needs.
    `unshard`: as Config.pipeline has it."""

def verify_program(text: str) -> None:
    """Raises Error USAGE, with the ranks and actions in conflict, for a program that must not run."""

def runnable_program(text: str, stages: int, micro_batches: int, keeps: bool) -> str:
    """The program, as make_program() writes it. Raises Error USAGE, with the reason, for one that no pipeline of so
    many stages and micro-batches runs. `keeps`: parameters may stay gathered for several micro-batches."""

def cut_evenly(layers: int, chunks: int) -> list[int]:
    """Boundaries of chunks with equal numbers of layers; the first ones have one more where it does not go out. Raises Error USAGE for fewer layers than chunks."""

def late_of_chunk(text: str) -> list[int]:
    """By how many steps the gradients of each chunk of a program are late; empty for an exact one."""

def rank_of_chunk(text: str) -> list[int]:
    """The rank that has each chunk of a program."""

class Pipeline:
    """Runs this rank's part of a program; see zeroth/libtorch/pipeline.h."""

    def __init__(
        self,
        engine: Engine,
        stages: Communicator,
        program: str,
        units: Sequence[Sequence[int]],
        forward: Callable[[int, int, list[torch.Tensor | None], str], tuple[list[torch.Tensor | None], str]],
        copies: Communicator | None = None,
        buffer_owners: Mapping[str, int] = ...,
        forward_alone: Callable[[int, int, list[torch.Tensor | None], str], tuple[list[torch.Tensor | None], str]]
        | None = None,
        buffers: Callable[[int], list[torch.Tensor]] | None = None,
        move: Callable[[bool, int, int], None] | None = None,
        saved: SavedTensors | None = None,
        head: tuple[int, torch.Tensor, torch.Tensor | None, list[int], Communicator | None] | None = None,
        tables: Sequence[Sequence[int]] = (),
        aged: Callable[[bool], None] | None = None,
    ) -> None: ...
    def train_batch(self) -> tuple[StepResult, float]: ...
    def eval_batch(self, micro_batches: int = 0) -> float: ...
    def logits(self, input: torch.Tensor | None) -> torch.Tensor:
        """Of a shared head, [..., all rows], on all stages; `input` on that of the last chunk. Collective."""
    def begin(self) -> None: ...
    def run(self, action: str) -> None: ...
    def end(self) -> tuple[StepResult, float]: ...
    @property
    def program(self) -> str: ...
    @property
    def actions(self) -> list[str]: ...
    @property
    def stage(self) -> int: ...
    @property
    def failed_action(self) -> str:
        """The action that raised: "action 1B3 of step 4 (stage 1 of 2: the backward of chunk 1, micro-batch 3)"; "" without one."""
    def report(self) -> dict[str, int]: ...
    def reset_report(self) -> None: ...

class ActivationStore:
    """Blocks of saved tensors in files; see zeroth/offload/activation_store.h."""

def open_activation_store(
    *, folders: Sequence[str], prefetch: int, buffer_bytes: int, piece_bytes: int, io: str, direct: bool
) -> ActivationStore: ...
def activation_store_of(engine: Engine) -> ActivationStore | None:
    """The one that the engine opened for the section zeroth.activations."""

def free_bytes_of_rank(world: World) -> int:
    """Memory that the system still has, shared out over the ranks of this host."""

def return_heap() -> bool:
    """Gives the free pages of the process's heap back to the system, also those between what is used. Whether there were some."""

def plan_activations(
    *,
    units: Sequence[tuple[str, int, int, float, float, float]],
    write_bytes_per_s: float,
    read_bytes_per_s: float,
    memory_bytes: int,
) -> dict[str, Any]: ...
def preview_tiers(
    units: Sequence[tuple[str, int, str, int]],
    parameters: Sequence[tuple[str, torch.Tensor]],
    boxes: Mapping[str, ParameterBox],
    config: Config,
    rank: int,
    world: int,
) -> tuple[dict[str, tuple[int, int, int]], str]:
    """Bytes on device, host and files by state, and the table."""

class SavedTensor:
    """A tensor as autograd saved it; its end drops what was moved."""

    def unpack(self) -> torch.Tensor:
        """The tensor, to the last bit. Raises Error USAGE if it was modified in place meanwhile, and IO."""
    @property
    def moved(self) -> bool: ...

class SavedTensors:
    """Packs saved tensors; see zeroth/libtorch/saved_tensors.h."""

    def __init__(self, store: ActivationStore | None, min_bytes: int) -> None: ...
    def keep(self, tensors: Sequence[torch.Tensor]) -> None: ...
    def pack(self, tensor: torch.Tensor, move: bool) -> SavedTensor: ...
    def report(self) -> dict[str, int]: ...
    def reset_counters(self) -> None: ...
