"""Slurm behind its command line. The answers are copied from Slurm 22.05.8; Slurm itself is not run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import stamina

from nvrx_slurm.cluster import slurm_text
from nvrx_slurm.cluster.commands import (
    NOT_SET_UP,
    TIMED_OUT,
    CommandOutput,
    SystemRunner,
    environment_for,
    for_script,
)
from nvrx_slurm.cluster.slurm import SlurmCluster
from nvrx_slurm.cluster.states import JobState
from nvrx_slurm.errors import MissingProgramError, NvrxError, SlurmUnreachable, SubmissionRefused, UsageError
from nvrx_slurm.util.files import JobFiles

LISTED = CommandOutput(0, "1|RUNNING\n2_0|RUNNING\n2_1|PENDING\n", "")
UNLISTED = CommandOutput(1, "", "slurm_load_jobs error: Invalid job id specified\n")
NO_ACCOUNTING = CommandOutput(1, "", "Slurm accounting storage is disabled\n")
SILENT = CommandOutput(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
TIMEOUT = CommandOutput(
    1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"
)
REFUSED = CommandOutput(
    1,
    "",
    "sbatch: error: invalid partition specified: nope\n"
    "sbatch: error: Batch job submission failed: Invalid partition name specified\n",
)
VERSION = CommandOutput(0, "slurm-wlm 22.05.8\n", "")
NEW_VERSION = CommandOutput(0, "slurm 24.11.1\n", "")


class Script:
    """Answers each program (`sbatch --version` apart) from its own list; the last answer repeats."""

    def __init__(self, **answers: CommandOutput | list[CommandOutput]) -> None:
        self._answers = {name: one if isinstance(one, list) else [one] for name, one in answers.items()}
        self.commands: list[tuple[str, ...]] = []

    def __call__(self, command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        self.commands.append(tuple(command))
        name = "version" if "--version" in command else command[0]
        if name not in self._answers:
            raise FileNotFoundError(command[0])
        answers = self._answers[name]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def count(self, program: str) -> int:
        return sum(command[0] == program and "--version" not in command for command in self.commands)


@pytest.fixture
def no_pauses() -> Iterator[None]:
    """Three attempts, and no pause between them."""
    stamina.set_testing(True, attempts=3)
    yield
    stamina.set_testing(False)


# ---- states


def test_all_jobs_are_asked_about_in_one_call() -> None:
    """A thousand handles cost slurmctld one request."""
    script = Script(squeue=LISTED)
    states = SlurmCluster(script).states(["1", "2_0", "2_1"])
    assert states == {"1": JobState.RUNNING, "2_0": JobState.RUNNING, "2_1": JobState.PENDING}
    assert len(script.commands) == 1
    assert "--jobs=1,2_0,2_1" in script.commands[0]


def test_sacct_is_asked_once_about_those_that_squeue_does_not_know() -> None:
    """A job that left squeue is found in the accounting."""
    script = Script(squeue=LISTED, sacct=CommandOutput(0, "7|CANCELLED by 0\n8|FAILED\n", ""))
    states = SlurmCluster(script).states(["1", "7", "8"])
    assert states == {"1": "RUNNING", "7": "CANCELLED", "8": "FAILED"}
    assert [c for c in script.commands if c[0] == "sacct" and "--jobs=7,8" in c]
    assert script.count("sacct") == 1


@pytest.mark.parametrize("sacct", [NO_ACCOUNTING, CommandOutput(1, "", "sacct: error: something else\n")])
def test_failing_accounts_hide_nothing_that_squeue_said(sacct: CommandOutput) -> None:
    """Most development clusters have no accounting at all."""
    states = SlurmCluster(Script(squeue=LISTED, sacct=sacct)).states(["1", "99"])
    assert states == {"1": JobState.RUNNING, "99": JobState.UNKNOWN}


def test_a_job_that_slurm_does_not_know_is_unknown_and_not_over() -> None:
    """A job that is absent has not necessarily ended."""
    state = SlurmCluster(Script(squeue=UNLISTED, sacct=NO_ACCOUNTING)).states(["99"])["99"]
    assert state is JobState.UNKNOWN
    assert not state.terminal


def test_what_squeue_says_of_a_requeued_job_wins_over_the_accounts() -> None:
    """For the earlier run the accounting says REQUEUED for ever; squeue has the present state."""
    script = Script(squeue=CommandOutput(0, "2_1|PENDING\n", ""), sacct=CommandOutput(0, "2_1|REQUEUED\n", ""))
    assert SlurmCluster(script).states(["2_1"]) == {"2_1": JobState.PENDING}
    assert script.count("sacct") == 0


def test_each_cluster_named_in_a_job_id_is_asked_once() -> None:
    """`123;alpha` is asked of the cluster alpha, and the headline of the answer is no job."""
    script = Script(squeue=CommandOutput(0, "CLUSTER: alpha\n1|RUNNING\n", ""))
    assert SlurmCluster(script).states(["1;alpha"]) == {"1;alpha": JobState.RUNNING}
    assert "--clusters=alpha" in script.commands[0]


def test_the_id_of_a_whole_array_stands_for_its_elements() -> None:
    """squeue lists elements only."""
    assert SlurmCluster(Script(squeue=LISTED)).states(["2"]) == {"2": JobState.RUNNING}


def test_an_element_that_squeue_has_forgotten_counts() -> None:
    """squeue forgets each element MinJobAge after that element's own end. The accounting is asked once all elements
    that squeue lists have ended."""
    accounts = CommandOutput(0, "2_0|FAILED\n2_1|RUNNING\n", "")
    script = Script(squeue=CommandOutput(0, "2_1|COMPLETED\n", ""), sacct=accounts)
    assert SlurmCluster(script).states(["2"]) == {"2": JobState.FAILED}
    script = Script(squeue=CommandOutput(0, "2_1|RUNNING\n", ""), sacct=accounts)
    assert SlurmCluster(script).states(["2"]) == {"2": JobState.RUNNING}
    assert script.count("sacct") == 0


def test_a_squeue_that_fails_for_another_reason_is_an_error_with_that_reason() -> None:
    """A failure is not taken for an unknown job."""
    script = Script(squeue=CommandOutput(1, "", "squeue: error: Access/permission denied\n"))
    with pytest.raises(NvrxError, match=r"Access/permission denied"):
        SlurmCluster(script).states(["1"])


@pytest.mark.parametrize("job_id", ["", "abc", "12x", "1_", "1;", "1 2", "-1", "1,2"])
def test_what_is_no_job_id_is_refused_before_slurm_is_asked(job_id: str) -> None:
    """Text that a user types never changes the meaning of squeue's list."""
    script = Script()
    with pytest.raises(UsageError, match="no Slurm job id"):
        SlurmCluster(script).states([job_id])
    assert script.commands == []


# ---- missing answers


@pytest.mark.usefixtures("no_pauses")
def test_a_question_without_an_answer_is_asked_again_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """A restart of slurmctld is survived, and logged."""
    script = Script(squeue=[SILENT, SILENT, LISTED])
    with caplog.at_level(logging.WARNING):
        assert SlurmCluster(script).states(["1"])["1"] is JobState.RUNNING
    assert script.count("squeue") == 3
    assert "Unable to contact slurm controller" in caplog.text


@pytest.mark.usefixtures("no_pauses")
def test_a_slurm_that_never_answers_is_given_up() -> None:
    """The wait has a bound, and the exit code is 69."""
    with pytest.raises(SlurmUnreachable, match="Unable to contact") as caught:
        SlurmCluster(Script(squeue=SILENT)).states(["1"])
    assert caught.value.exit_code == 69


def test_without_patience_there_is_one_attempt() -> None:
    """A caller that repeats its query itself does not wait here."""
    script = Script(squeue=SILENT)
    with pytest.raises(SlurmUnreachable):
        SlurmCluster(script, patience_s=0).states(["1"])
    assert script.count("squeue") == 1


def test_a_slurm_that_is_not_set_up_is_not_asked_again() -> None:
    """There is no server to wait for; the message names the alternatives."""
    script = Script(squeue=CommandOutput(1, "", f"squeue: fatal: {NOT_SET_UP}\n"))
    with pytest.raises(SlurmUnreachable, match="nvrx-slurm cluster up"):
        SlurmCluster(script).states(["1"])
    assert script.count("squeue") == 1


def test_no_slurm_at_all_names_the_ways_on(tmp_path: Path) -> None:
    """A user without sbatch is referred to `run` and `cluster up`; the exit code is 2 and nothing is left."""
    ways_on = r"sbatch is not on PATH.*nvrx-slurm run.*nvrx-slurm cluster up"
    with pytest.raises(MissingProgramError, match=ways_on) as refused:
        SlurmCluster(Script()).submit("#!/bin/bash\n", folder=tmp_path / "jobs", name="a")
    assert refused.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_configuration_that_is_gone_is_said_at_once(tmp_path: Path) -> None:
    """Slurm's programs would look for the file for a minute."""
    runner = SystemRunner({"SLURM_CONF": str(tmp_path / "gone.conf")})
    with pytest.raises(SlurmUnreachable, match=r"gone\.conf, which is not there"):
        SlurmCluster(runner).states(["1"])


# ---- submission


def test_a_submitted_script_is_kept_in_the_job_folder(tmp_path: Path) -> None:
    """The script can be read afterwards, by its owner alone."""
    script = Script(sbatch=CommandOutput(0, "41\n", ""), version=NEW_VERSION)
    assert SlurmCluster(script).submit("#!/bin/bash\nmark\n", folder=tmp_path, name="a") == "41"
    kept = tmp_path / "41" / "job.sh"
    assert kept.read_text() == "#!/bin/bash\nmark\n"
    assert kept.stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["41"]


def test_a_job_id_with_a_cluster_has_a_folder_without(tmp_path: Path) -> None:
    """The job itself knows only its number."""
    script = Script(sbatch=CommandOutput(0, "41;alpha\n", ""), version=NEW_VERSION)
    assert SlurmCluster(script).submit("#!/bin/bash\n", folder=tmp_path, name="a") == "41;alpha"
    assert (tmp_path / "41" / "job.sh").is_file()
    # Later commands ask that cluster, for the job and for an array's task.
    assert JobFiles(tmp_path / "41").full_id == "41;alpha"
    assert JobFiles(tmp_path / "41_7").full_id == "41_7;alpha"
    assert JobFiles(tmp_path / "41", "beta").full_id == "41;beta"  # what the user says


def test_a_job_of_this_cluster_drops_the_name_that_an_earlier_one_left(tmp_path: Path) -> None:
    """Slurm uses ids again, and a job that never started leaves its folder."""
    for printed in ("41;alpha\n", "41\n"):
        script = Script(sbatch=CommandOutput(0, printed, ""), version=NEW_VERSION)
        SlurmCluster(script).submit("#!/bin/bash\n", folder=tmp_path, name="a")
    assert JobFiles(tmp_path / "41").full_id == "41"


def test_a_refusal_carries_slurms_reason_and_leaves_nothing(tmp_path: Path) -> None:
    """The message has both of sbatch's lines, without their prefixes."""
    expected = "Slurm refused job 'a': Invalid partition name specified; invalid partition specified: nope"
    with pytest.raises(SubmissionRefused) as caught:
        SlurmCluster(Script(sbatch=REFUSED)).submit("#!/bin/bash\n", folder=tmp_path / "jobs", name="a")
    assert str(caught.value) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("number", ["43", "43_[0-7]"])  # as squeue lists a pending array
def test_a_submission_that_was_accepted_without_an_answer_is_not_made_twice(tmp_path: Path, number: str) -> None:
    """sbatch timed out, but slurmctld has the job: squeue finds it by its script."""
    script = Script(sbatch=TIMEOUT, squeue=CommandOutput(0, "", ""), version=NEW_VERSION)

    def squeue_finds_it(command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        if command[0] == "squeue":
            fields = {"%i": number, "%F": "43", "%o": script.commands[0][-1]}
            asked = command[-1].removeprefix("--format=").split("|")
            return CommandOutput(0, f"40|/elsewhere.sh\n{'|'.join(fields[each] for each in asked)}\n", "")
        return script(command, timeout_s=timeout_s)

    assert SlurmCluster(squeue_finds_it).submit("#!/bin/bash\n", folder=tmp_path, name="a") == "43"
    assert script.count("sbatch") == 1


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("flag", ["#SBATCH --clusters=alpha,beta\n", ""])
def test_a_submission_without_an_answer_to_another_cluster_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """squeue is asked about the clusters that sbatch was given, and names the one with the job."""
    if not flag:
        monkeypatch.setenv("SBATCH_CLUSTERS", "alpha,beta")
    script = Script(sbatch=TIMEOUT, version=NEW_VERSION)

    def squeue_of_beta(command: Sequence[str], *, timeout_s: float) -> CommandOutput:
        if command[0] == "squeue":
            there = f"43|{script.commands[0][-1]}\n" if "--clusters=alpha,beta" in command else ""
            return CommandOutput(0, f"CLUSTER: alpha\n43|/elsewhere.sh\n\nCLUSTER: beta\n{there}", "")
        return script(command, timeout_s=timeout_s)

    text = f"#!/bin/bash\n{flag}:\n#SBATCH --clusters=no-flag\n"
    assert SlurmCluster(squeue_of_beta).submit(text, folder=tmp_path, name="a") == "43;beta"
    assert script.count("sbatch") == 1


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("first", [TIMEOUT, CommandOutput(TIMED_OUT, "", "sbatch: no answer within 60 s")])
def test_a_submission_that_was_lost_is_made_again(tmp_path: Path, first: CommandOutput) -> None:
    """If squeue answers and does not know the script, the script is submitted once more."""
    script = Script(
        sbatch=[first, CommandOutput(0, "44\n", "")],
        squeue=CommandOutput(0, "40|/else.sh\n", ""),
        version=NEW_VERSION,
    )
    assert SlurmCluster(script).submit("#!/bin/bash\n", folder=tmp_path, name="a") == "44"
    assert script.count("sbatch") == 2


@pytest.mark.parametrize(("version", "warns"), [(VERSION, True), (NEW_VERSION, False)])
def test_an_old_slurm_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: CommandOutput, warns: bool
) -> None:
    """One line names the version found and the first one to trust; the job is submitted."""
    script = Script(sbatch=CommandOutput(0, "1\n", ""), version=version)
    with caplog.at_level(logging.WARNING):
        SlurmCluster(script).submit("#!/bin/bash\n", folder=tmp_path, name="a")
    assert ("22.05.8: before 23.02.3" in caplog.text) is warns


def test_a_folder_that_cannot_be_written_is_said_before_anything_is_submitted(tmp_path: Path) -> None:
    """If a file has the folder's name there is one error, and sbatch is not run."""
    (tmp_path / "jobs").write_text("")
    script = Script()
    for folder in (tmp_path / "jobs", tmp_path / "jobs" / "below"):
        with pytest.raises(UsageError, match="--folder"):
            SlurmCluster(script).submit("#!/bin/bash\n", folder=folder, name="a")
    assert script.commands == []


@pytest.mark.parametrize(
    ("text", "job_id"),
    [("123\n", "123"), ("123;alpha\n", "123;alpha"), ("site notice\n9\n", "9"), ("Submitted batch job\n", None)],
)
def test_the_id_is_read_from_what_sbatch_prints(text: str, job_id: str | None) -> None:
    """A plugin's notice on stdout is skipped."""
    assert slurm_text.submitted_id(text) == job_id


# ---- cancel and nodes


def test_cancelling_a_job_that_slurm_does_not_know_is_an_error() -> None:
    """scancel itself reports nothing and succeeds."""
    script = Script(squeue=UNLISTED, sacct=NO_ACCOUNTING, scancel=CommandOutput(0, "", ""))
    with pytest.raises(UsageError, match="no job 99"):
        SlurmCluster(script).cancel("99")
    assert script.count("scancel") == 0


def test_cancelling_a_job_that_is_over_does_nothing() -> None:
    """Cancelling a job twice is no error."""
    script = Script(squeue=CommandOutput(0, "1|CANCELLED\n", ""))
    SlurmCluster(script).cancel("1")
    assert script.count("scancel") == 0


def test_a_jobs_nodes_come_in_slurms_order() -> None:
    """Ranks follow the order of `scontrol show hostnames`, which is not always alphabetical."""
    script = Script(squeue=CommandOutput(0, "|n2|n[2-3],n1\n", ""), scontrol=CommandOutput(0, "n2\nn3\nn1\n", ""))
    assert SlurmCluster(script).nodes("1") == ("n2", "n3", "n1")
    assert script.commands[-1] == ("scontrol", "show", "hostnames", "n[2-3],n1")


def test_a_pending_job_has_no_nodes() -> None:
    """An empty list of nodes is not expanded."""
    assert SlurmCluster(Script(squeue=CommandOutput(0, "||\n", ""))).nodes("1") == ()


# ---- the environment of commands


def test_a_users_settings_change_no_question() -> None:
    """SQUEUE_PARTITION would hide jobs, and SCANCEL_INTERACTIVE would ask for a confirmation."""
    seen = environment_for("squeue", {"SQUEUE_PARTITION": "x", "SLURM_CONF": "c", "PATH": "p"})
    assert seen == {"SLURM_CONF": "c", "PATH": "p", "LC_ALL": "C"}


def test_a_job_submitted_inside_a_job_inherits_nothing_of_it() -> None:
    """srun would use the SLURM_* numbers of the outer job; what the user set stays."""
    outer = {"SLURM_JOB_ID": "1", "SLURM_CPUS_PER_TASK": "8", "SLURMD_NODENAME": "n1", "SRUN_CPUS_PER_TASK": "8"}
    kept = {"SLURM_CONF": "c", "SBATCH_ACCOUNT": "a"}
    assert environment_for("sbatch", outer | kept) == kept
    assert environment_for("sbatch", {"SLURM_HINT": "h"}) == {"SLURM_HINT": "h"}


SCRIPT = """\
#!/bin/bash
# a: 1 node

#SBATCH --job-name=a
#SBATCH --time=0-01:00:00
#SBATCH --mem-per-cpu=1G

:  # the rest is shell
#SBATCH --qos=x
"""


def test_a_scripts_flags_win_over_the_users_variables() -> None:
    """sbatch itself would prefer the variables. A variable whose flag the script lacks stays as a default."""
    of_flags = ("JOB_NAME", "TIMELIMIT", "MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU")
    decided = ("SIGNAL", "NO_REQUEUE", "REQUEUE", "ARRAY_INX", "NO_KILL", "OPEN_MODE", "WAIT")
    kept = {"SBATCH_ACCOUNT": "a", "SBATCH_QOS": "q", "SBATCH_MEM_BIND": "local", "TIMELIMIT": "1"}
    assert for_script(SCRIPT, {f"SBATCH_{name}": "1" for name in (*of_flags, *decided)} | kept) == kept


@pytest.mark.parametrize(
    ("flag", "variables"),
    [
        ("clusters", ("SBATCH_CLUSTERS", "SLURM_CLUSTERS")),
        ("hint", ("SBATCH_HINT", "SLURM_HINT")),
        ("segment", ("SBATCH_SEGMENT_SIZE",)),
    ],
)
def test_variables_of_other_names_than_their_flags_are_left_out_too(flag: str, variables: tuple[str, ...]) -> None:
    """They are in sbatch(1), "input environment variables"; without the flag they stay."""
    environment = dict.fromkeys(variables, "1")
    assert for_script(f"#!/bin/bash\n#SBATCH --{flag}=2\n:\n", environment) == {}
    assert for_script("#!/bin/bash\n:\n", environment) == environment


def test_the_terminals_interrupt_does_not_reach_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch would end without printing the id of a job that Slurm has accepted, and `submit --wait` could not cancel
    that job."""
    ask = f"read -r _ _ _ _ group _ </proc/$$/stat; [ $group = {os.getpgrp()} ] || echo 7"
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\n{ask}\n")
    (tmp_path / "sbatch").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert SystemRunner({"SLURM_CONF": ""})(("sbatch", "--parsable"), timeout_s=30).stdout == "7\n"


def test_sbatch_runs_without_the_variables_of_its_scripts_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner reads the flags in the script that sbatch gets."""
    (tmp_path / "sbatch").write_text("#!/bin/bash\necho $SBATCH_TIMELIMIT $SBATCH_ACCOUNT\n")
    (tmp_path / "sbatch").chmod(0o700)
    (tmp_path / "job.sh").write_text(SCRIPT)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    extra = {"SLURM_CONF": "", "SBATCH_TIMELIMIT": "5", "SBATCH_ACCOUNT": "a"}
    output = SystemRunner(extra)(("sbatch", "--parsable", str(tmp_path / "job.sh")), timeout_s=30)
    assert output.stdout == "a\n"
