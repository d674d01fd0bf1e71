"""The `#SBATCH` lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.jobspec.script import sbatch_flags, sbatch_quote
from tests.unit.jobspec.specs import job_spec


def flags(folder: str = "/shared/jobs", **keys: object) -> list[str]:
    spec = job_spec({"name": "a", "command": "x", **keys})
    return sbatch_flags(spec, plan(spec, folder=Path(folder)))


def test_plain_values_stay_plain() -> None:
    """A value that needs no quotes gets none, so that a script reads as people write them."""
    for value in ("gpu", "a,b", "node[1-3]", "h100:8", "2-00:00:00", "/a/b-%j.out", "a&b|c"):
        assert sbatch_quote(value) == value


@pytest.mark.parametrize(
    ("value", "quoted"),
    {"": '""', "a b": '"a b"', 'a"b': '"a\\"b"', "a\\": '"a\\\\"', "#a": '"#a"', "a'": '"a\'"'}.items(),
)
def test_other_values_stand_in_double_quotes(value: str, quoted: str) -> None:
    """Slurm ends a value at a blank or `#`, and removes the backslashes of `"…"`."""
    assert sbatch_quote(value) == quoted


@pytest.mark.parametrize("value", ["a\nb", "a\0b", "a\tb", "\x7f", "a\udcffb"])
def test_what_no_line_can_carry_is_refused(value: str) -> None:
    """Control characters and bytes that are no text are an error, since no `#SBATCH` line can have them."""
    with pytest.raises(ConfigError, match="no sbatch flag can carry"):
        sbatch_quote(value)


def test_percent_signs_of_the_folder_are_no_pattern() -> None:
    """Slurm replaces `%j` in a log path; a `%` of the folder itself is doubled."""
    assert "--output=/shared/100%%j/slurm-%j.out" in flags("/shared/100%j")


def test_a_backslash_in_the_folder_is_refused() -> None:
    """Slurm drops a backslash in a log path and replaces nothing after it, so no escape can name such a folder."""
    with pytest.raises(ConfigError, match="holds a backslash, which no Slurm log path can; choose another"):
        flags("/shared/a\\b")


def test_the_allocation_holds_the_spares_and_outlives_a_node() -> None:
    """The allocation has the working nodes and the hot spares, and Slurm does not end the job when a node dies."""
    assert {"--nodes=5", "--ntasks-per-node=1", "--no-kill", "--requeue"} <= set(flags(nodes=3, spares=2))


def test_the_notice_before_the_time_limit_fits_the_teardown() -> None:
    """Slurm signals the job a minute ahead, or earlier if its workers' grace is longer."""
    spec = job_spec({"name": "a", "command": "x"})
    assert spec.fault_tolerance.teardown.notice_s(spec.slurm.time) == 60
    assert "--signal=B:USR1@150" in flags(fault_tolerance={"teardown": {"grace": "2m"}})


def test_the_notice_includes_the_time_to_save(tmp_path: Path) -> None:
    """If workers are asked to save, their time to save is added to the notice; otherwise the notice is as before."""
    saving = {"teardown": {"checkpoint_signal": "USR1", "checkpoint_timeout": "5m"}}
    assert "--signal=B:USR1@340" in flags(fault_tolerance=saving)
    assert "--signal=B:USR1@60" in flags(fault_tolerance={"teardown": {"checkpoint_timeout": "5m"}})
    assert "--signal=B:USR1@318" in flags(fault_tolerance=saving, slurm={"time": "11m"})


def test_extra_flags_stand_as_they_are() -> None:
    """`true` gives a flag without a value, `false` gives no flag, and the user may remove the tool's own
    `--requeue`."""
    found = flags(slurm={"extra": {"comment": "a b", "contiguous": True, "hold": False, "no-requeue": True}})
    assert {'--comment="a b"', "--contiguous", "--no-requeue"} <= set(found)
    assert not {"--hold", "--requeue"} & set(found)


def test_an_exclusive_node_comes_with_all_its_memory() -> None:
    """`--exclusive` alone would get the partition's default share; a memory key of the user's is kept."""
    assert "--mem=0" in flags(slurm={"extra": {"exclusive": True}})
    assert "--mem=0" not in flags(slurm={"extra": {"exclusive": True}, "mem": "64G"})
    assert "--mem=0" not in flags(slurm={"extra": {"exclusive": True, "mem-per-cpu": "2G"}})
    assert "--mem=0" not in flags(slurm={"extra": {"exclusive": False}})


def test_flags_without_a_value_come_last() -> None:
    """If a flag that needs a value has none, sbatch refuses it there, instead of taking the next flag for its
    value."""
    assert flags(slurm={"extra": {"comment": True, "mail-type": "END"}})[-2:] == ["--mail-type=END", "--comment"]
