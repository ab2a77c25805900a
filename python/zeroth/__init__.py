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
    World,
    make_error,
)
from zeroth._config import Config, ConfigOverride
from zeroth._deferred import deferred
from zeroth._engine import Engine, initialize
from zeroth._pretrained import load_pretrained
from zeroth._state import Loaded
from zeroth._units import Unit, units
from zeroth.parallel import parallelize
from zeroth.pipe.pipeline import pipeline

__version__ = _preflight.VERSION

EXIT_PREEMPTED = 75
"""exit code of a job that was preempted and asks to be started again"""

__all__ = [
    "EXIT_PREEMPTED",
    "Average",
    "Communicator",
    "Config",
    "ConfigError",
    "ConfigOverride",
    "Engine",
    "Error",
    "FirstOffender",
    "Loaded",
    "Local",
    "MemoryReport",
    "Mesh",
    "SaveHandle",
    "StepResult",
    "StepTimes",
    "Unit",
    "WeightReport",
    "World",
    "__version__",
    "deferred",
    "initialize",
    "load_pretrained",
    "make_error",
    "parallelize",
    "pipeline",
    "units",
]
