"""Tensor and sequence parallelism: axes of a mesh, and calls between its ranks that autograd knows."""

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
    gathered_linear,
    part_of_loss,
    redistribute,
    reduce_from_group,
    reduce_from_group_async,
    reduce_scatter,
    ring_shift,
    slice_sizes,
    split_to_group,
    vocab_cross_entropy,
)
from zeroth.parallel.batch_plan import BatchPlan, Work, group_sizes, plan_batch
from zeroth.parallel.cut_batch import cut_batch, shifted_labels, whole_batch
from zeroth.parallel.cuts import part_range, part_sizes, sequence_indices, sequence_sizes
from zeroth.parallel.experts import ExpertLayer, Experts, experts, set_expert_options
from zeroth.parallel.grid import grid_attention
from zeroth.parallel.halo import fetch_rows, halo_exchange, heights_of, received_rows
from zeroth.parallel.heads import HeadSplit, split_heads
from zeroth.parallel.image_grid import GridCost, ImageLayer, grid_cost, image_layers, plan_grid
from zeroth.parallel.image_window import Window, WindowCut
from zeroth.parallel.layout import SequenceLayout, contiguous, on_grid, zigzag
from zeroth.parallel.length_cost import SequenceCost
from zeroth.parallel.length_groups import LengthGroups
from zeroth.parallel.masks import SequenceMask, documents_of, documents_of_boundaries
from zeroth.parallel.parallelize import Parallel, parallelize
from zeroth.parallel.ring import ring_attention
from zeroth.parallel.run_plan import PlanResult, pack_sequences, run_plan
from zeroth.parallel.sample import require_same
from zeroth.parallel.sbp import Broadcast, Partial, Split
from zeroth.parallel.sequence_batches import SequenceBatches
from zeroth.parallel.spatial import (
    spatial_batch_norm,
    spatial_conv2d,
    spatial_mean,
    spatial_pool2d,
    split_rows,
    whole_rows,
)
from zeroth.parallel.split import SplitModel, split_sequence
from zeroth.parallel.split_images import SplitImages, split_images
from zeroth.parallel.state import pass_state
from zeroth.parallel.tensor import ColumnLinear, RowLinear, VocabEmbedding
from zeroth.parallel.tensor_cut import Cut
from zeroth.parallel.tensor_plan import find_plan
from zeroth.parallel.tensor_share import Share, TensorPlan
from zeroth.parallel.tile_hf_loss import TiledLoss, tile_loss
from zeroth.parallel.tile_runs import agree_on_tiles, run_tiles
from zeroth.parallel.tiled_loss import tiled_loss, tiled_loss_sum
from zeroth.parallel.tiled_mlp import TiledMlps, tile_mlps, tiled_mlp
from zeroth.parallel.ulysses import ulysses_attention

__all__ = [
    "BatchPlan",
    "Broadcast",
    "ColumnLinear",
    "Cut",
    "ExpertLayer",
    "Experts",
    "GridCost",
    "HeadSplit",
    "ImageLayer",
    "LengthGroups",
    "Parallel",
    "Partial",
    "PendingSum",
    "PlanResult",
    "RowLinear",
    "Sbp",
    "SequenceBatches",
    "SequenceCost",
    "SequenceLayout",
    "SequenceMask",
    "Share",
    "Split",
    "SplitImages",
    "SplitModel",
    "TensorPlan",
    "TiledLoss",
    "TiledMlps",
    "VocabEmbedding",
    "Window",
    "WindowCut",
    "Work",
    "agree_on_tiles",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "chunked_linear_reduce",
    "contiguous",
    "conversion_bytes",
    "copy_to_group",
    "cut_batch",
    "documents_of",
    "documents_of_boundaries",
    "experts",
    "fetch_rows",
    "find_plan",
    "gather_from_group",
    "gathered_linear",
    "grid_attention",
    "grid_cost",
    "group_sizes",
    "halo_exchange",
    "heights_of",
    "image_layers",
    "on_grid",
    "pack_sequences",
    "parallelize",
    "part_of_loss",
    "part_range",
    "part_sizes",
    "pass_state",
    "plan_batch",
    "plan_grid",
    "received_rows",
    "redistribute",
    "reduce_from_group",
    "reduce_from_group_async",
    "reduce_scatter",
    "require_same",
    "ring_attention",
    "ring_shift",
    "run_plan",
    "run_tiles",
    "sequence_indices",
    "sequence_sizes",
    "set_expert_options",
    "shifted_labels",
    "slice_sizes",
    "spatial_batch_norm",
    "spatial_conv2d",
    "spatial_mean",
    "spatial_pool2d",
    "split_heads",
    "split_images",
    "split_rows",
    "split_sequence",
    "split_to_group",
    "tile_loss",
    "tile_mlps",
    "tiled_loss",
    "tiled_loss_sum",
    "tiled_mlp",
    "ulysses_attention",
    "vocab_cross_entropy",
    "whole_batch",
    "whole_rows",
    "zigzag",
]
