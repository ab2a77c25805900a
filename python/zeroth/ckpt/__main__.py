"""python -m zeroth.ckpt: what `zeroth ckpt` runs."""

import sys

from zeroth.ckpt.command import main

sys.exit(main(sys.argv[1:]))
