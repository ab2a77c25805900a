"""Trains a byte-level GPT on the text of a folder, with ZeRO 0-3 over the ranks that were started.

    zeroth-run -n 2 python examples/gpt/train.py --data FOLDER --suffix .py --steps 100 --sample 300 --plot FOLDER

Prints the size and digest of the text, progress, the validation loss beside the byte-bigram entropy of the held-out
text, a text sample, and what memory and traffic were planned and measured. A bare process works too, and so do ranks on
several hosts:

    zeroth-run --hostfile hosts python examples/gpt/train.py --data FOLDER

With --mesh dp=2,tp=2 four ranks are two pairs, each of which has one batch and shares the matrices of every layer;
with --mesh dp=2,sp=2 each pair shares its sequences; with --mesh dp=2,pp=2 each pair is a pipeline, whose stages have
half of the layers each and work on the --accumulate micro-batches of a step at the same time.

Arguments, lines and records (--json) are those of zeroth-gpt, the same trainer in C++ (examples/gpt_cpp); --bar and
--plot are here only. From the same arguments both give the same losses, gradient norms, samples and
weights, bit for bit, at every ZeRO stage: with the initial weights of one --init file, and without, for both draw them
from --seed alike.
"""

import sys
from collections.abc import Sequence

from errors import error_line
from options import HelpRequested, parse_command_line
from trainer import Preempted, train

import zeroth

INTERRUPTED = 130
"""128 + SIGINT"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; an error of Zeroth is one line on stderr, written at once, so that ranks do not mix. What
    is caught here the other ranks have to be told; what is not, Zeroth tells them."""
    who = "rank=?/?"
    world = None
    try:
        world = zeroth.World.from_environment()
        who = f"rank={world.rank}/{world.size}"
        train(parse_command_line(arguments), world)
    except HelpRequested as help_text:
        if world is None or world.rank == 0:
            print(help_text, end="")
    except Preempted:
        return zeroth.EXIT_PREEMPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except RuntimeError as error:
        line = error_line(error, who)
        if line is None:
            raise
        text, code = line
        sys.stderr.write(text)
        if world is not None:
            world.abort(error if isinstance(error, zeroth.Error) else str(error))
        return code
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # names of files are bytes
    sys.exit(main(sys.argv[1:]))
