"""ZeRO 0-3 under any PyTorch module: the stage changes memory, never numbers.

    engine = zeroth.Engine(model, "zero3.json")
    for batch in batches:
        loss = engine(batch)
        engine.backward(loss)          # loss.backward() does the same
        engine.step()

Start the ranks with `zeroth-run -n N train.py`, torchrun, mpirun or srun; a bare process is a world of one.
"""

from zeroth import _preflight as _preflight  # first: it imports torch, and says so if it is another one
from zeroth._access import Local, WeightReport
from zeroth._activation_plan import ActivationPlan, UnitCost, plan_activations
from zeroth._activations import ActivationOffload, offload_activations
from zeroth._average import Average
from zeroth._C import (
    Communicator,
    ConfigError,
    Error,
    FirstOffender,
    MemoryReport,
    Mesh,
    SaveHandle,
    StepResult,
    StepTimes,
    TransferReport,
    World,
    make_error,
)
from zeroth._config import Config, ConfigOverride
from zeroth._deferred import deferred
from zeroth._engine import Engine, initialize
from zeroth._expert_use import ExpertUse
from zeroth._host_table import HostTable, HostTableTraffic
from zeroth._local import LocalUpdates, local_updates
from zeroth._pretrained import load_pretrained
from zeroth._reversible import Reversible, ReversibleSequence
from zeroth._state import Loaded
from zeroth._tier_plan import TierBytes, TierPlan, plan_tiers
from zeroth._tiled import TiledEmbedding, TiledLinear, tile, tiled_state_dict, untile, untiled_state_dict
from zeroth._units import Unit, units
from zeroth.parallel import experts, parallelize
from zeroth.pipe.pipeline import pipeline

__version__ = _preflight.VERSION

EXIT_PREEMPTED = 75
"""exit code of a job that was preempted and asks to be started again"""

__all__ = [
    "EXIT_PREEMPTED",
    "ActivationOffload",
    "ActivationPlan",
    "Average",
    "Communicator",
    "Config",
    "ConfigError",
    "ConfigOverride",
    "Engine",
    "Error",
    "ExpertUse",
    "FirstOffender",
    "HostTable",
    "HostTableTraffic",
    "Loaded",
    "Local",
    "LocalUpdates",
    "MemoryReport",
    "Mesh",
    "Reversible",
    "ReversibleSequence",
    "SaveHandle",
    "StepResult",
    "StepTimes",
    "TierBytes",
    "TierPlan",
    "TiledEmbedding",
    "TiledLinear",
    "TransferReport",
    "Unit",
    "UnitCost",
    "WeightReport",
    "World",
    "__version__",
    "deferred",
    "experts",
    "initialize",
    "load_pretrained",
    "local_updates",
    "make_error",
    "offload_activations",
    "parallelize",
    "pipeline",
    "plan_activations",
    "plan_tiers",
    "tile",
    "tiled_state_dict",
    "units",
    "untile",
    "untiled_state_dict",
]
