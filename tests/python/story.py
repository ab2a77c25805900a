"""Two engines in one job: a teacher, and a student that learns from it; see story_test.py. Arguments: zero stages of
the teacher, of the student, of the student after it was rebuilt, and a file for its weights. The output is the same at
all stages."""

import sys

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import zeroth


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        if not h.isfinite().all():
            raise ValueError("what comes into the block is not finite")
        return torch.add(h, self.down(F.gelu(self.up(self.norm(h)))))


def net(width: int, num_blocks: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), *(Block(width) for _ in range(num_blocks)), nn.Linear(width, 4))


def engine_of(model: nn.Module, stage: str) -> zeroth.Engine:
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    config = {
        "zero_optimization": {"stage": int(stage)},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
    }
    return zeroth.Engine(model, config, params=groups, log_level="warning")


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(size, 2) * 2 - 1
    return x, (x[:, 0] * x[:, 1] > 0).long() + 2 * (x.norm(dim=1) > 0.8).long()


def accuracy(engine: zeroth.Engine, held_out: tuple[torch.Tensor, torch.Tensor]) -> float:
    with torch.no_grad():
        right = engine.eval()(held_out[0]).argmax(dim=1) == held_out[1]
    engine.train()
    return engine.average(right.float().mean().item())


of_teacher, of_student, of_student_later, path = sys.argv[1:]
torch.manual_seed(0)
held_out, model = batch(512), net(16, 2)
teacher, student = engine_of(net(32, 3), of_teacher), engine_of(model, of_student)
torch.manual_seed(student.rank)  # other data on every rank
for step in range(1, 91):
    if step == 61:  # the student goes on at another stage with its values; its moments begin anew
        student.close()
        student = engine_of(model, of_student_later)
    x, y = batch(64)
    loss = F.cross_entropy(teacher(x), y)
    teacher.backward(loss)
    teacher.step()
    if step == 45 and student.rank == 1:  # the other rank knows nothing of it
        try:
            student(x * torch.inf)
        except ValueError as error:
            print("caught:", error, flush=True)
    with torch.no_grad():
        wanted = teacher(x).softmax(dim=1)
    distilled = F.cross_entropy(student(x), wanted)
    student.backward(distilled)
    student.step()
    if step % 30 == 0:
        losses = teacher.average(loss.item()), student.average(distilled.item())
        print(
            "step",
            step,
            "losses",
            losses,
            "accuracies",
            (accuracy(teacher, held_out), accuracy(student, held_out)),
            flush=True,
        )
del teacher
student.export_safetensors(path)
with torch.no_grad():
    logits, plain = student(held_out[0]), net(16, 2)
    plain.load_state_dict(load_file(path))
    print("equal logits in plain torch:", torch.equal(plain(held_out[0]), logits))
