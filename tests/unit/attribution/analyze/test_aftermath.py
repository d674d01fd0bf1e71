"""The lines after an error show whether its rank survived it."""

from __future__ import annotations

import pytest

from nvrx_slurm.attribution.analyze.aftermath import (
    Finality,
    Nature,
    TailLine,
    aftermath,
    finality,
    nature,
)

PROGRESS = [
    " iteration      120/  500000 | consumed samples:       122880 | elapsed time per iteration (ms): 812.3",
    "step 1200 loss 2.31",
    "step=12, loss=2.4",
    "Epoch 3: 100%|██████████| 120/120",
    " 45%|████▌     | 450/1000 [07:12<08:49,  1.04it/s, loss=2.1]",
    "[2026-11-21 18:00:00] INFO train: loss: 2.513",
    "throughput 181234 tokens/s",
    "{'loss': 2.2990, 'grad_norm': 1.2010, 'learning_rate': 5.00e-05, 'epoch': 0.01}",
    "{'loss': '2.299', 'grad_norm': '1.201', 'epoch': '0.01'}",
    '{"step": 12, "loss": 2.1}',
    '{"epoch": 1, "update": 0.012, "loss": "12.3", "ups": "3.1"}',
    "12/1000 train_loss=2.1 lr=1e-4",
    "===== Step 12/1000 =====",
    "-------------------- iteration 12 --------------------",
]
CRASH = [
    "Traceback (most recent call last):",
    '  File "/work/train.py", line 12, in step',
    "    loss.backward()",
    "RuntimeError: CUDA error: an illegal memory access was encountered",
    "frame #3: c10::cuda::c10_cuda_check_implementation(int, char const*) + 0x118",
    "srun: error: n2: task 3: Exited with exit code 1",
    "terminate called after throwing an instance of 'c10::Error'",
    "wandb: Synced 5 W&B file(s)",
    "==================== stack of step() ====================",
    "[E1121 18:00:00.123 ProcessGroupNCCL.cpp:607] [Rank 1] Some NCCL operations have failed",
    "Indexing.cu:1515: block: [0,0,0], thread: [1,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below is wrong.",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "",
]
CALM = ["loading the tokenizer", "2026-11-21 18:00:00 INFO data: 12 shards ready", "error rate: 0.1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, Nature.PROGRESS) for text in PROGRESS),
        *((text, Nature.CRASH) for text in CRASH),
        *((text, Nature.CALM) for text in CALM),
    ],
)
def test_nature(text: str, expected: Nature) -> None:
    """A line shows a training's progress, a process's crash, or neither."""
    assert nature(text) is expected


def tail(*texts: str, rank: int | None = None) -> list[TailLine]:
    """Lines of ten bytes each."""
    return [TailLine(index * 10, text, rank) for index, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (CRASH, Finality.ENDED),
        (CALM, Finality.ENDED),
        (CALM * 3, Finality.LIKELY),
        (CALM * 30, Finality.SURVIVED),
        (PROGRESS, Finality.SURVIVED),
        (PROGRESS[:1], Finality.ENDED),
    ],
    ids=["stacks", "a last word", "some lines", "many lines", "progress", "one step, printed late by another thread"],
)
def test_finality(after: list[str], expected: Finality) -> None:
    """Progress after an error shows that it was survived; stacks show that it was not."""
    lines = tail("KeyError: 'lr'", *after)
    assert finality(aftermath(0, None, lines), shared=False) is expected


def test_what_other_ranks_print_says_nothing_of_this_one() -> None:
    """In a file whose lines are labelled, the progress of other ranks does not show that this rank survived."""
    lines = [
        TailLine(0, "KeyError: 'lr'", 3),
        *(TailLine(10 + index, text, 1) for index, text in enumerate(PROGRESS)),
    ]
    assert finality(aftermath(0, 3, lines), shared=True) is Finality.ENDED
    assert finality(aftermath(0, None, lines), shared=True) is Finality.SURVIVED


@pytest.mark.parametrize(
    ("non_fatal", "after", "expected"),
    [
        ("ignored", CRASH, Finality.SURVIVED),
        ("task", CRASH, Finality.SURVIVED),
        ("thread", CRASH, Finality.SURVIVED),
        ("process", CRASH, Finality.LIKELY),
        ("process", CALM * 30, Finality.SURVIVED),
        ("logged", CRASH, Finality.ENDED),
        ("logged", PROGRESS[:1], Finality.SURVIVED),
        ("warned", PROGRESS[:1], Finality.SURVIVED),
    ],
)
def test_non_fatal(non_fatal: str, after: list[str], expected: Finality) -> None:
    """An exception that ended no process was survived; of one that a rank may survive, a single step of progress
    decides."""
    lines = tail("KeyError: 'lr'", *after)
    assert finality(aftermath(0, None, lines), shared=False, non_fatal=non_fatal) is expected
