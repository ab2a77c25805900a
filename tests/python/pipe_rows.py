"""Trainings in the stages of a pipeline, for pipe_rank.py."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    model: str
    pp: int
    schedule: str = "1f1b"
    micro: int = 4
    stage: int = 1
    chunks: int = 0
    tp: int = 1
    sp: int = 1
    dp: int = 1
    """of the covering set; else what the ranks leave"""
    clip: float = 0.0
    policy: str = "per_micro_step"
    unshard: str = "micro_batch"
    vocabulary: str = "whole"
    reshard: str = "default"
    dtype: str = ""
    """bf16 or fp16"""
    recompute: bool = False
    layers: int = 6
    files: bool = False
    """states of the optimizer and parameters rest in files; not at the other stages"""
    again: bool = False
    """chunks are computed again, by the program; not at the other stages"""
    sgd: bool = False
    """weights are those of one process to 1e-12: an update of AdamW divides by the root of a sum"""
    stages: tuple[int, ...] = ()
    """the other ZeRO stages that are compared; (): one"""


TABLES = {
    "two": [
        Row("llama", 2),
        Row("gpt2", 2, "gpipe", stage=0, policy="per_step"),
        Row("qwen2", 2, micro=1, stage=3, clip=0.1),
        Row("llama", 2, "interleaved", stage=2, chunks=2, policy="per_step"),
    ],
    "few": [
        Row("gpt2", 2, "zb-v", micro=3, stage=3, policy="per_step"),
        Row("llama", 2, "dualpipev", micro=5, stage=1, clip=0.1),
        Row("qwen2", 2, "zb-h1", micro=2, stage=2, policy="per_step"),
    ],
    "three": [
        Row("gpt2", 3, micro=2, stage=2, policy="per_step", clip=0.1),
    ],
    "four": [
        Row("llama", 2, micro=3, stage=3),
        Row("gpt2", 4, micro=2, stage=3, policy="per_step"),
        Row("llama", 2, "zb-h1", micro=3, stage=3, unshard="step", policy="per_step"),
        Row("qwen2", 2, "zb-v", micro=2, stage=3),
        Row("gpt2", 2, "zb-h1", micro=1, stage=2),
    ],
}
TABLES["tp"] = [
    Row("llama", 2, micro=3, stage=1, tp=2),
    Row("gpt2", 2, "interleaved", micro=2, stage=3, tp=2, chunks=2, policy="per_step"),
    Row("qwen2", 2, "zb-h1", micro=4, stage=2, tp=2, clip=0.1, policy="per_step"),
]
TABLES["sp"] = [
    Row("llama", 2, micro=3, stage=3, sp=2),
    Row("qwen2", 2, "gpipe", micro=2, stage=1, sp=2, clip=0.1),
]
TABLES["half"] = [
    Row("llama", 2, micro=4, stage=2, dtype="bf16", policy="per_step"),
    Row("llama", 2, micro=3, stage=2, dtype="bf16"),
    Row("llama", 2, "zb-h1", micro=4, stage=1, dtype="bf16"),
    Row("llama", 2, "zb-h1", micro=4, stage=1, dtype="fp16", policy="per_step"),
    Row("gpt2", 2, "gpipe", micro=3, stage=3, recompute=True),
    Row("llama", 2, "1f1b", micro=3, stage=1, dtype="fp16", clip=0.1, again=True),
]
TABLES["eight"] = [
    Row("llama", 2, micro=2, stage=3, tp=2, sp=2),
    Row("llama", 2, "zb-v", micro=2, stage=2, tp=2, policy="per_step"),
    Row("llama", 2, "zb-h1", micro=2, stage=3, sp=2, clip=0.1, policy="per_step"),
    Row("qwen2", 4, micro=2, stage=1, sp=2),
]
TABLES["sixteen"] = [Row("llama", 2, micro=2, stage=3, tp=2, sp=2, clip=0.1, layers=2)]  # and two replicas
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipev")
for ranks in (2, 3, 4):
    TABLES[f"schedules {ranks}"] = [
        Row(
            ("llama", "gpt2", "qwen2")[number % 3],
            ranks,
            schedule,
            micro=(4, 1, 6, 2)[number % 4],
            stage=number % 4,
            policy=("per_step", "per_micro_step")[number % 2],
        )
        for number, schedule in enumerate(SCHEDULES)
    ]
TABLES["few 2"] = [
    Row("qwen2", 2, "zb-v", micro=2, stage=2, clip=0.1),
]
TABLES["files"] = [
    Row("gpt2", 2, schedule, micro=2 + number % 2, stage=number % 4, unshard=("micro_batch", "step")[number // 4 % 2],
        policy=("per_step", "per_micro_step")[number % 2], files=True)
    for number, schedule in enumerate(SCHEDULES)
]  # fmt: skip
TABLES["few 4"] = [
    Row("gpt2", 2, "zb-h1", micro=2, stage=3, policy="per_step", unshard="step", files=True),
]
for ranks in (2, 3, 4):
    TABLES[f"grid {ranks}"] = [
        Row(
            "gpt2",
            ranks,
            schedule,
            micro=micro,
            stage=(number + micro) % 4,
            chunks=1 if schedule == "interleaved" and micro % 3 == 0 else 0,
            policy=("per_step", "per_micro_step")[micro % 2],
            again=(number + micro) % 3 == 0,
            sgd=True,
            stages=tuple(stage for stage in range(4) if stage != (number + micro) % 4),
        )
        for number, schedule in enumerate(SCHEDULES)
        for micro in range(1, 9)
    ]
TABLES["head 2"] = [
    Row("llama", 2, micro=3, stage=3, vocabulary="two_barriers", clip=0.1),
    Row("llama", 2, "zb-h1", micro=2, stage=1, vocabulary="one_barrier", policy="per_step"),
    Row("llama", 2, "gpipe", micro=3, stage=2, vocabulary="one_barrier"),
]
TABLES["head 4"] = [
    Row("llama", 4, micro=3, stage=3, vocabulary="one_barrier", policy="per_step", layers=4),
    Row("llama", 2, "zb-v", micro=3, stage=3, vocabulary="two_barriers", unshard="step", clip=0.1, layers=4),
]
TABLES["head 4"] += [
    Row("llama", 2, micro=3, stage=3, sp=2, vocabulary="two_barriers", clip=0.1, layers=2),
    Row("llama", 2, "zb-h1", micro=2, stage=1, tp=2, vocabulary="one_barrier", policy="per_step", layers=2),
]
WAYS = ("two_barriers", "one_barrier")
HEADS = [
    Row(
        "llama",
        2,
        schedule,
        micro=1 + number % 3,
        stage=(number // 2 + turn) % 4,
        tp=2 if turn == 0 else 1,
        sp=2 if turn == 1 else 1,
        policy=("per_step", "per_micro_step")[number // 2 % 2],
        clip=0.1 if number % 3 else 0.0,
        vocabulary=WAYS[(number + turn) % 2],
        layers=4,  # with two chunks a stage none is the embedding alone
    )
    for number, schedule in enumerate(SCHEDULES)
    for turn in range(2)
] + [
    Row(
        "llama",
        2,
        SCHEDULES[(4 * turn + stage) % len(SCHEDULES)],
        micro=1 + (turn + stage) % 2,
        stage=stage,
        tp=1 if turn == 2 else 2,
        sp=1 if turn == 1 else 2,
        dp=1 if turn == 0 else 2,
        clip=0.1 if stage % 2 else 0.0,
        vocabulary=WAYS[(turn + stage) % 2],
        layers=4,
    )
    for turn in range(3)
    for stage in range(4)
] + [Row("llama", 2, micro=2, stage=3, tp=2, sp=2, dp=2, clip=0.1, vocabulary="one_barrier", layers=2)]  # fmt: skip
"""A head in rows on every rank of pp and tp: each two of schedule, way, ZeRO stage and axis beside
pp, but for schedule and ZeRO stage, which other rows have."""
for row in HEADS:
    TABLES.setdefault(f"cover head {row.pp * row.dp * row.tp * row.sp}", []).append(row)
TABLES["tied 2"] = [
    Row("qwen2", 2, micro=3, stage=3, vocabulary="two_barriers", clip=0.1, stages=(0, 1, 2)),
    Row("gpt2", 2, "zb-h1", micro=2, stage=1, vocabulary="one_barrier", policy="per_step", stages=(0, 2, 3)),
    Row("gpt2", 2, "zb-v", micro=3, stage=3, vocabulary="one_barrier", unshard="step", clip=0.1),
    Row("qwen2", 2, "gpipe", micro=1, stage=2, vocabulary="two_barriers", again=True),
]
TABLES["tied 4"] = [
    Row("gpt2", 4, micro=3, stage=3, vocabulary="one_barrier", policy="per_step", layers=4, stages=(0, 1, 2)),
    Row("qwen2", 2, "dualpipev", micro=5, stage=3, vocabulary="two_barriers", clip=0.1, layers=4, stages=(0, 1, 2)),
    Row("gpt2", 2, micro=2, stage=2, vocabulary="one_barrier", clip=0.1, dtype="bf16", policy="per_step", layers=4),
]
TABLES["tied 4"] += [
    Row("qwen2", 2, micro=2, stage=3, tp=2, vocabulary="two_barriers", clip=0.1, layers=4, stages=(1,)),
    Row("gpt2", 2, "zb-h1", micro=2, stage=1, tp=2, vocabulary="one_barrier", policy="per_step", layers=4),
    Row("gpt2", 2, "zb-v", micro=3, stage=3, sp=2, vocabulary="one_barrier", layers=4, stages=(0,)),
    Row("qwen2", 2, micro=3, stage=2, sp=2, vocabulary="two_barriers", clip=0.1, layers=4),
]
for ranks in (2, 3, 4):
    TABLES[f"tied grid {ranks}"] = [
        Row(
            ("gpt2", "qwen2")[(number + turn) % 2],
            ranks,
            schedule,
            micro=(4, 1, 6, 3)[(number + turn) % 4],
            stage=(number + ranks + 2 * turn) % 4,
            vocabulary=way,
            policy=("per_step", "per_micro_step")[number % 2],
            unshard=("micro_batch", "step")[number // 2 % 2],
            sgd=True,
        )
        for number, schedule in enumerate(SCHEDULES)
        for turn, way in enumerate(("two_barriers", "one_barrier"))
    ]
AXES = ("none", "dp", "tp", "sp")


def shares_head(number: int, turn: int) -> bool:
    """Of some rows with tp or sp; their model is llama, whose head is not its embedding."""
    return number + turn in (3, 6) and turn >= 2


COVER = [
    Row(
        "llama" if shares_head(number, turn) else ("gpt2", "llama", "qwen2")[(number + turn) % 3],
        (2, 3, 4, 2)[(turn + number // 2) % 4],
        schedule,
        micro=(1, 2, 3, 5)[(turn + 2 * number + number // 4) % 4],
        stage=turn,
        tp=2 if AXES[(turn + number) % 4] == "tp" else 1,
        sp=2 if AXES[(turn + number) % 4] == "sp" else 1,
        dp=2 if AXES[(turn + number) % 4] == "dp" else 1,
        policy=("per_step", "per_micro_step")[(number + turn) % 2],
        clip=0.1 if number % 2 else 0.0,
        layers=(2, 4, 6, 2)[(turn + number // 2) % 4],  # as few as two chunks a stage need
        again=(number + turn) % 3 == 0,
        vocabulary=WAYS[turn % 2] if shares_head(number, turn) else "whole",
    )
    for number, schedule in enumerate(SCHEDULES)
    for turn in range(4)
]
"""Each two of schedule, ZeRO stage, stages of the pipeline, axis beside them, and number of micro-batches are in a row
together; see pipe_test.py."""
for row in COVER:
    TABLES.setdefault(f"cover {row.pp * row.dp * row.tp * row.sp}", []).append(row)
