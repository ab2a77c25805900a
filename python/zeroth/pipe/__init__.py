"""Models as layers that the stages of a pipeline run: chain_of() finds them, partition() says who gets which."""

from zeroth.pipe.chain import Chain, Layer
from zeroth.pipe.layer_list import LayerList, PipelineModule
from zeroth.pipe.layer_specs import LayerSpec, TiedLayerSpec
from zeroth.pipe.make_chain import build, chain_of
from zeroth.pipe.measure import measure
from zeroth.pipe.partition import partition
from zeroth.pipe.stashed import pop, stash, stashing

__all__ = [
    "Chain",
    "Layer",
    "LayerList",
    "LayerSpec",
    "PipelineModule",
    "TiedLayerSpec",
    "build",
    "chain_of",
    "measure",
    "partition",
    "pop",
    "stash",
    "stashing",
]
