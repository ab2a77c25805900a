"""One rank of two: a model whose matrices or sequences are shared runs in parts as it does whole; see
pipe_chain_test.py."""

from __future__ import annotations

from typing import Any, Literal

import tensor_models
import torch
from pipe_parts import require_equal

import zeroth
from zeroth import pipe


def check(name: str, mesh: dict[str, int], norms: Literal["whole", "split"], world: zeroth.World) -> None:
    torch.manual_seed(1)
    model = tensor_models.MODELS[name]().double()
    chain = pipe.chain_of(model)
    done = zeroth.parallelize(model, {"zeroth": {"mesh": mesh}}, world=world, norms=norms)
    # Samples are cut, and states of a forward begin and end, in hooks of the model.
    chain.forward = lambda model, args, kwargs: model(*args, **kwargs)  # type: ignore[attr-defined]
    if done.sequence is not None:
        done.sequence.whole = False
    tokens = torch.randint(2, 97, (2, 12), generator=torch.Generator().manual_seed(5))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
    if name == "gpt2":
        batch["position_ids"] = torch.arange(12)[None]
    require_equal(chain, lambda batch: model(**batch), [batch])


def main() -> None:
    world = zeroth.World.from_environment()
    for name in ("llama", "gpt2", "qwen2"):
        check(name, {"tp": 2}, "whole", world)
        check(name, {"tp": 2}, "split", world)
        check(name, {"sp": 2}, "whole", world)
        if world.rank == 0:
            print(f"{name}: ok", flush=True)
    print("mesh: ok")


if __name__ == "__main__":
    main()
