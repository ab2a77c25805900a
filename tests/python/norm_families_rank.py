"""One rank of two: families of transformers with norms on slices of the sequence give the loss and the gradients of one
process, or are refused by name; see tensor_mixes_test.py."""

from __future__ import annotations

from refusing import refused
from tensor_families_rank import FAMILIES, check

import zeroth

WHOLE_ATTENTION = "attn; expected: attention that ranks share|attention; expected: attention that ranks share"
EXPERTS = "linear layers and norms between the layers that ranks share; got: .*(Router|Experts)"
REFUSED = {
    "Bloom": WHOLE_ATTENTION,
    "Phi3": WHOLE_ATTENTION,
    "Olmo2": WHOLE_ATTENTION,
    "GPTBigCode": WHOLE_ATTENTION,
    "CodeGen": WHOLE_ATTENTION,
    "Mpt": WHOLE_ATTENTION,
    "Mixtral": EXPERTS,
    "Qwen3Moe": EXPERTS,
    "GptOss": EXPERTS,
    "Llama4Text": EXPERTS,
    "Bart": "an encoder and a decoder",
}


def main() -> None:
    world = zeroth.World.from_environment()
    for name in FAMILIES:
        if name in REFUSED:
            with refused("MODEL", f"cannot work on slices of the sequence.*({REFUSED[name]}).*norms=.whole"):
                check(name, world, "split")
        else:
            check(name, world, "split")
        if world.rank == 0:
            print(f"{name}: {'refused' if name in REFUSED else 'ok'}", flush=True)
    print("families: ok")


if __name__ == "__main__":
    main()
