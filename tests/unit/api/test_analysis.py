"""Logs that are analysed from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.api.analysis import analyze
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.verdicts import Verdict

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"


@pytest.mark.parametrize("several", [False, True])
def test_a_path_or_several(tmp_path: Path, several: bool) -> None:
    """A list of file names and the path of a folder are both accepted."""
    log = tmp_path / "rank-3.err"
    log.write_text(f"Traceback (most recent call last):\n{OOM}\n")
    answer = analyze([str(log)] if several else tmp_path)
    assert (answer.verdict, answer.fault, answer.ranks) == (Verdict.STOP, "cuda_oom", (3,))
    assert answer.latency_s > 0


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    """The error names the missing path."""
    with pytest.raises(UsageError, match="nowhere"):
        analyze(tmp_path / "nowhere")
