"""The parts of examples/digits around its network: splitting batches, checkpoints, arguments."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from group import Group
from hypothesis import given, settings
from hypothesis import strategies as st
from model import load_digits, new_state
from train import my_part, parse_arguments, replace_file, restore, save_checkpoint
from train import train as run_training


@settings(max_examples=30)  # 300 ranks draw the batch 300 times
@given(step=st.integers(1, 10_000), world=st.sampled_from([1, 2, 3, 8, 50, 256, 300]))
def test_any_number_of_ranks_share_the_same_batch(step: int, world: int) -> None:
    """The parts of all ranks together are the batch of a world of one: no image twice, none missing."""
    parts = [my_part(step, 256, 0, rank, world) for rank in range(world)]
    assert np.concatenate(parts).tolist() == my_part(step, 256, 0, 0, 1).tolist()
    assert len(set(np.concatenate(parts).tolist())) == 256


def test_a_checkpoint_gives_back_every_bit(tmp_path: Path) -> None:
    """A new training starts with exactly what was saved."""
    saved, state = new_state(1), new_state(2)
    saved["step"], saved["mean"], saved["square"] = 40, np.pi, 1e-300
    save_checkpoint(tmp_path / "checkpoint.npy", saved)
    restore(Group(0, {}), tmp_path / "checkpoint.npy", state)
    assert state.tobytes() == saved.tobytes()


def test_without_a_checkpoint_a_training_starts_from_the_beginning(tmp_path: Path) -> None:
    """The state stays as it was initialized."""
    state = new_state(2)
    restore(Group(0, {}), tmp_path / "checkpoint.npy", state)
    assert state.tobytes() == new_state(2).tobytes()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """The message names the file and says to remove it."""
    np.save(tmp_path / "checkpoint.npy", np.zeros(3))
    with pytest.raises(SystemExit, match=r"checkpoint\.npy is of another model; remove it"):
        restore(Group(0, {}), tmp_path / "checkpoint.npy", new_state(0))


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    """A reader that has the old file open still reads the old content."""
    path = tmp_path / "result.json"
    replace_file(path, b"old")
    with path.open("rb") as reader:
        replace_file(path, b"new")
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_training_in_two_halves_is_the_training_in_one(tmp_path: Path) -> None:
    """The state after 7 steps, saved, restored and taken to 15 is bit for bit that of 15 steps at once."""
    data = load_digits()
    whole, halves = new_state(0), new_state(0)
    run_training(Group(0, {}), 1, _options(tmp_path / "whole", 15), data, whole)
    run_training(Group(0, {}), 1, _options(tmp_path / "halves", 7), data, halves)
    resumed = new_state(5)
    restore(Group(0, {}), tmp_path / "halves" / "checkpoint.npy", resumed)
    run_training(Group(0, {}), 1, _options(tmp_path / "halves", 15), data, resumed)
    assert resumed.tobytes() == whole.tobytes() != halves.tobytes()


def _options(folder: Path, steps: int) -> argparse.Namespace:
    folder.mkdir(exist_ok=True)
    return parse_arguments(["--checkpoint-dir", str(folder), "--steps", str(steps)])


@pytest.mark.parametrize("batch", ["0", "-1", "1501"])
def test_an_impossible_batch_is_refused(batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has one line with the valid range."""
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(["--checkpoint-dir", "x", "--batch", batch])
    assert f"--batch must be 1 to 1500, not {batch}" in capsys.readouterr().err
