"""Tensor and sequence parallelism: what the ranks of a mesh's axis compute together, with gradients.

    tp = world.mesh({"dp": 2, "tp": 2}).axis("tp")
    x = zeroth.parallel.copy_to_group(x, tp)                      # column-parallel, then row-parallel:
    y = torch.relu(x @ w1_own_columns) @ w2_own_rows              # this rank's part of a sum
    y = zeroth.parallel.reduce_from_group(y, tp)

The calls (x: a dense CPU tensor of the dtypes of zeroth.Communicator, contiguous or not; group: a Communicator):

    copy_to_group      forward x                        backward sum of the gradients over the ranks
    reduce_from_group  forward sum over the ranks       backward the gradient as it is
    split_to_group     forward own slice of a dim       backward all_gather
    gather_from_group  forward all_gather               backward own slice
    all_reduce         forward sum over the ranks       backward sum over the ranks
    all_gather         forward slices of all ranks      backward reduce_scatter
    reduce_scatter     forward own slice of the sum     backward all_gather
    all_to_all         forward slices to and from all   backward the reverse
    ring_shift         forward to the next rank         backward to the rank before

The first four are for values that all ranks of the group have alike, the others for values that differ from rank to
rank. All ranks of the group make the same calls in the same order, forward and backward, with requires_grad alike. They
block, may stand inside torch.utils.checkpoint, and return `x` itself in a group of one. Sums are in rank order.
"""

from zeroth._C import (
    PendingSum,
    Sbp,
    all_gather,
    all_reduce,
    all_to_all,
    chunked_linear_reduce,
    conversion_bytes,
    copy_to_group,
    gather_from_group,
    redistribute,
    reduce_from_group,
    reduce_from_group_async,
    reduce_scatter,
    ring_shift,
    slice_sizes,
    split_to_group,
    vocab_cross_entropy,
)
from zeroth.parallel.grid import grid_attention
from zeroth.parallel.heads import HeadSplit, split_heads
from zeroth.parallel.layout import SequenceLayout, contiguous, on_grid, zigzag
from zeroth.parallel.masks import SequenceMask, documents_of, documents_of_boundaries
from zeroth.parallel.parallelize import Parallel, parallelize
from zeroth.parallel.ring import ring_attention
from zeroth.parallel.sbp import Broadcast, Partial, Split
from zeroth.parallel.split import SplitModel, split_sequence
from zeroth.parallel.state import pass_state
from zeroth.parallel.tensor import ColumnLinear, RowLinear, VocabEmbedding
from zeroth.parallel.tensor_plan import Share, TensorPlan, find_plan
from zeroth.parallel.ulysses import ulysses_attention

__all__ = [
    "Broadcast",
    "ColumnLinear",
    "HeadSplit",
    "Parallel",
    "Partial",
    "PendingSum",
    "RowLinear",
    "Sbp",
    "SequenceLayout",
    "SequenceMask",
    "Share",
    "Split",
    "SplitModel",
    "TensorPlan",
    "VocabEmbedding",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "chunked_linear_reduce",
    "contiguous",
    "conversion_bytes",
    "copy_to_group",
    "documents_of",
    "documents_of_boundaries",
    "find_plan",
    "gather_from_group",
    "grid_attention",
    "on_grid",
    "parallelize",
    "pass_state",
    "redistribute",
    "reduce_from_group",
    "reduce_from_group_async",
    "reduce_scatter",
    "ring_attention",
    "ring_shift",
    "slice_sizes",
    "split_heads",
    "split_sequence",
    "split_to_group",
    "ulysses_attention",
    "vocab_cross_entropy",
    "zigzag",
]
