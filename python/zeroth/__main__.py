"""python -m zeroth ckpt ...: what `zeroth ckpt` runs."""

import sys

from zeroth.ckpt.command import USAGE, main

if sys.argv[1:2] == ["ckpt"]:
    sys.exit(main(sys.argv[2:]))
print("usage: python -m zeroth ckpt COMMAND [options]; zeroth doctor is a program of its own", file=sys.stderr)
sys.exit(USAGE)
