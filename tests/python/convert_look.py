"""What convert_test.py does with checkpoints between its jobs.

convert_look.py FOLDER out|back|deepspeed NAME...
"""

from __future__ import annotations

import json
import pathlib
import sys

import checkpoint_rank
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zeroth.ckpt
from zeroth.ckpt.command import main as command

Tensors = dict[str, torch.Tensor]


def equal(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name


def ckpt(*arguments: object) -> None:
    assert command([str(argument) for argument in arguments]) == 0, arguments


def optimizer_for(model: torch.nn.Module) -> torch.optim.AdamW:
    """Made as the engine's, with other values; it has made a step, so that it has states to be loaded into."""
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() >= 2]},
            {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.3},
        ],
        lr=0.5,
    )
    x = torch.arange(8)
    model(x, x).backward()
    optimizer.step()
    return optimizer


def states_equal(model: torch.nn.Module, optimizer: torch.optim.AdamW, checkpoint: zeroth.ckpt.Checkpoint) -> None:
    names = {id(param): name for name, param in model.named_parameters()}
    seen = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            name, state = names[id(param)], optimizer.state[param]
            about = checkpoint.param(name)
            hypers = checkpoint.groups[about.group]
            assert (group["lr"], group["weight_decay"]) == (hypers["lr"], hypers["weight_decay"]), name
            assert tuple(group["betas"]) == (hypers["beta1"], hypers["beta2"]), name
            if not param.requires_grad:
                assert not state and about.updates == 0, name
                continue
            assert float(state["step"]) == about.updates == 3, name
            for key in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(state[key], checkpoint.tensor(name, key)), f"{name}/{key}"
                seen += 1
    assert seen == 26, seen


def out(folder: pathlib.Path, name: str) -> None:
    """To each form, loaded by plain torch; and back."""
    exported = load_file(folder / name / "export.safetensors")
    checkpoint = zeroth.ckpt.open(folder / name)
    assert zeroth.ckpt.verify(checkpoint.path) == []
    for about in checkpoint.manifest.params:  # also of what rank 0 has no element of
        assert {state.name for state in about.states} == {"weight", "exp_avg", "exp_avg_sq"}, about.name
    masters = {one: checkpoint.tensor(one) for one in checkpoint.names}
    masters |= {one: checkpoint.buffer(one) for one in checkpoint.buffers}
    masters["head.weight"] = masters["embed.weight"]

    # Hugging Face: as the model computes, in several files; tied names once.
    hf = folder / f"{name}.hf"
    ckpt("convert", folder / name, hf, "--to", "hf", "--max-shard-size", "1500B")
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors", files
    loaded: Tensors = {}
    for file in files:
        loaded |= load_file(hf / file)
    equal({**loaded, "head.weight": loaded["embed.weight"]}, {**exported, "head.weight": exported["embed.weight"]})

    # torch.save(): masters and the optimizer, into a plain model and a plain optimizer.
    plain = folder / f"{name}.pt"
    ckpt("convert", folder / name, plain)
    whole = torch.load(plain, weights_only=True)
    equal(whole["model"], masters)
    assert whole["model"]["head.weight"].data_ptr() == whole["model"]["embed.weight"].data_ptr()
    model = checkpoint_rank.Net()
    optimizer = optimizer_for(model)
    model.load_state_dict(whole["model"])
    optimizer.load_state_dict(whole["optimizer"])
    states_equal(model, optimizer, checkpoint)

    # DCP, by name.
    ckpt("convert", folder / name, folder / f"{name}.dcp", "--to", "dcp")
    model = checkpoint_rank.Net()
    optimizer = optimizer_for(model)
    state = {
        "model": {key: torch.zeros_like(tensor) for key, tensor in masters.items()},
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=folder / f"{name}.dcp", no_dist=True)
    equal(state["model"], masters)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    states_equal(model, optimizer, checkpoint)

    for form, source in (("torch", plain), ("dcp", folder / f"{name}.dcp"), ("hf", hf), ("zeroth", folder / name)):
        ckpt("convert", source, folder / f"{name}-{form}", "--to", "zeroth")
        if form == "hf":
            continue
        different = zeroth.ckpt.diff(folder / name, folder / f"{name}-{form}")
        assert [one.what for one in different if one.what != "scheduler"] == [], different


def back(folder: pathlib.Path, name: str) -> None:
    """Weights that the engine had after it loaded those of Hugging Face's form."""
    equal(load_file(folder / f"{name}-hf/export.safetensors"), load_file(folder / name / "export.safetensors"))


def deepspeed(folder: pathlib.Path, name: str) -> None:
    ckpt("convert", folder / name, folder / f"{name}-zeroth", "--to", "zeroth")


def main() -> None:
    torch.set_num_threads(1)
    folder, what, *names = sys.argv[1:]
    for name in names:
        {"out": out, "back": back, "deepspeed": deepspeed}[what](pathlib.Path(folder), name)


if __name__ == "__main__":
    main()
