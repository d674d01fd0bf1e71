"""Failures in whole logs: the lines around the cause decide as much as its own line."""

from __future__ import annotations

import gzip
from pathlib import Path
from signal import SIGKILL, SIGTERM

import pytest

from nvrx_slurm.journal.verdicts import Failed
from tests.unit.attribution.analyze.whole import HEAD, STEPS, answer, said

# ---- an exception of any name


@pytest.mark.parametrize("last", ["acme.plans.ScheduleInvalid: no stage 4", "StopIteration", "SystemExit: 2"])
def test_an_exception_that_no_rule_knows(tmp_path: Path, last: str) -> None:
    """The exception's line is the cause, even before a launcher's report, which says less."""
    report = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    assert said(answer(tmp_path, f"{STEPS}{HEAD}{last}\n{report}")) == ("UNKNOWN", "exception", last)


def test_an_exception_that_a_lost_peer_caused(tmp_path: Path) -> None:
    """An exception that a rank raises after it has reported a lost peer is a consequence of that loss."""
    lost = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:9"
    chained = f"{HEAD}{lost}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    assert answer(tmp_path, f"{STEPS}{chained}{HEAD}acme.Comm: rank 3 gone\n").fault == "peer_lost"


# ---- words of a failure in lines that report none


@pytest.mark.parametrize(
    "routine",
    [
        "I1121 saver.py:88] {'step': 400, 'reached_preemption': False, 'preemption_received_at': None}",
        "node state: {'preemption signal received': false, 'spot instance interruption': null}",
        "counters: uncorrectable ECC error encountered=0, oom_kill=0",
        "INFO health: no CUDA out of memory found in the last 10 minutes",
        "  --on-oom ACTION       what to do at a CUDA out of memory (default: stop)",
        "+ echo 'exit at once on: CUDA error: uncorrectable ECC error encountered'",
        "# CUDA error: uncorrectable ECC error encountered is looked for below",
        "Config: {'watch': {'pattern': 'CUDA error: uncorrectable ECC error encountered', 'every': 10}, 'lr': 0.1}",
    ],
)
def test_routine_lines(tmp_path: Path, routine: str) -> None:
    """Such lines are no cause, and hide none."""
    log = f"{routine}\nstep 1 loss 2.0\n{routine}\n"
    assert said(answer(tmp_path / "with", f"{log}{HEAD}KeyError: 'lr'\n")) == ("STOP", "key_error", "KeyError: 'lr'")
    assert said(answer(tmp_path / "without", log)) == ("UNKNOWN", "unknown", None)


@pytest.mark.parametrize(
    "routine",
    [
        "DCGM health check: 12 Pass, 0 Fail",
        "nvidia-fabricmanager: no failed links",
        "Prolog: 0 checks failed",
        "Prolog ran 4 checks and found 0 failed",
        "[2026-05-01 12:00:00,123] [WARNING] [real_accelerator.py:162] CUDA_HOME environment variable is not set",
        "/opt/torch_geometric/typing.py:54: UserWarning: An issue occurred while importing 'pyg-lib'. Disabling its "
        "usage. Stacktrace: /opt/libpyg.so: undefined symbol: _ZN5torch3jit17parseSchemaOrNameE",
        "2026-05-01 12:00:00 INFO df: /tmp 90% used, disk full in 3 days",
        "INFO Comet API key not set, logging disabled",
        "[rank0]:W0501 12:00:00.123000 4711 extension.py:7] CUDA_HOME environment variable is not set",
    ],
)
def test_lines_of_a_program_that_goes_on(tmp_path: Path, routine: str) -> None:
    """A count of no failures, or a line that calls itself a warning, is no failure, even as the last line."""
    assert said(answer(tmp_path, f"step 1 loss 2.0\n{routine}\n")) == ("UNKNOWN", "unknown", None)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("DCGM health check: 11 Pass, 1 Fail", "gpu_health"),
        ("DCGM diagnostic of GPU 0 Fail", "gpu_health"),
        ("DCGM diagnostic: 2 Fail, 0 Failure", "gpu_health"),
        ("Prolog: 10 checks failed", "slurm_prolog"),
        ("Prolog of worker 0 failed", "slurm_prolog"),
        ("Prolog on host: 0 failed", "slurm_prolog"),
        ("OSError: CUDA_HOME environment variable is not set. WARNING: set it", "extension_build"),
        ("OSError: WARNING, CUDA_HOME environment variable is not set", "extension_build"),
        ("2026-05-01 12:00:00 INFO DCGM health check: Fail", "gpu_health"),
    ],
)
def test_failures_that_only_look_mild(tmp_path: Path, line: str, fault: str) -> None:
    """One failure in a count, the number of a GPU, or an error whose text names a level is still a failure."""
    assert answer(tmp_path, f"step 1 loss 2.0\n{line}\n").fault == fault


@pytest.mark.parametrize(
    "line",
    [
        '{"level": "error", "ok": false, "msg": "CUDA error: uncorrectable ECC error encountered"}',
        "RuntimeError: CUDA error: uncorrectable ECC error encountered, rank: 0",
        "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_lines_of_a_failure(tmp_path: Path, line: str) -> None:
    """A line of a JSON log, or one with a rank's number 0, counts as a failure."""
    assert answer(tmp_path, f"step 1 loss 2.0\n{line}\n").fault == "gpu_ecc"


def test_the_text_of_the_program(tmp_path: Path) -> None:
    """A source line that a traceback quotes is no event."""
    source = '  File "/work/train.py", line 3, in f\n    raise Bad("EC2 Spot Instance interruption: {code}")\n'
    assert answer(tmp_path, f"{HEAD}{source}acme.Bad: 4\n").fault == "exception"


# ---- what follows the cause


EPILOGUES = {
    "deepspeed": "".join(
        f"[2026-11-21 18:02:12,{n:03}] [INFO] [launch.py:316:sigkill_handler] Killing subprocess {4000 + n}\n"
        for n in range(300)
    ),
    "env": "".join(f"MODULE_{n}_ROOT=/opt/modules/{n}\nPATH_{n}=/a:/b\n" for n in range(90)),
    "freeze": "".join(f"package-{n}=={n}.0.1\n" for n in range(200)),
    "trap": "".join(f"copying part {n} of the output to the archive\n" for n in range(120)),
    "slurm": "".join(f"srun: error: n{n}: task {n}: Terminated\n" for n in range(64))
    + "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T18:00:00 ***\n",
}


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
def test_a_long_epilogue(tmp_path: Path, epilogue: str) -> None:
    """A long epilogue does not show that the error was survived; training steps do."""
    assert said(answer(tmp_path / "end", f"{STEPS}{HEAD}KeyError: 'lr'\n{epilogue}"))[:2] == ("STOP", "key_error")
    assert answer(tmp_path / "on", f"{HEAD}KeyError: 'lr'\n{STEPS}{epilogue}").fault != "key_error"


def test_steps_before_a_very_long_epilogue(tmp_path: Path) -> None:
    """Steps that the usual tail of a file does not reach still show that the error was survived."""
    epilogue = "".join(f"copying part {n} of the output to the archive, as asked for\n" for n in range(4000))
    assert answer(tmp_path, f"{HEAD}KeyError: 'lr'\n{STEPS}{epilogue}").fault == "unknown"


def test_a_retry_that_succeeded(tmp_path: Path) -> None:
    """An error with a successful retry after it was survived, even if no step follows."""
    log = f"{HEAD}ConnectionRefusedError: [Errno 111] Connection refused\nattempt 2 succeeded\nwriting the report\n"
    assert answer(tmp_path, log).fault == "unknown"


WATCHDOG = (
    "[rank0]:[E501 12:10:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=8123, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n"
    "[rank0]:[E501 12:10:00.2 ProcessGroupNCCL.cpp:1177] To avoid data inconsistency, we are taking the entire "
    "process down.\n"
)
BARS = "".join(f"\rTraining:  12%|###   | {n}/2000 [00:10<01:00,  3.20it/s, loss=2.1]" for n in range(120, 1120))
SURVIVED_BY = {
    "a bar": BARS,
    "transformers": "".join(f"{{'loss': 2.29, 'grad_norm': 1.2, 'epoch': 0.{n:03}}}\n" for n in range(300)),
    "JSON": "".join(f'{{"step": {n}, "loss": 2.1}}\n' for n in range(300)),
}


@pytest.mark.parametrize("steps", SURVIVED_BY.values(), ids=SURVIVED_BY)
@pytest.mark.parametrize("caught", ["ValueError: bad prompt", "FileNotFoundError: [Errno 2] No such file: 'a'"])
def test_steps_of_any_form(tmp_path: Path, steps: str, caught: str) -> None:
    """Steps of any form show that the error was survived; the later timeout is the cause."""
    found = answer(tmp_path, f"{HEAD}{caught}\n{steps}\n{WATCHDOG}")
    assert (found.verdict, found.fault, found.nodes) == ("RESTART", "nccl_timeout", ())


def test_bars_that_a_program_closes_at_its_end(tmp_path: Path) -> None:
    """Bars that are drawn once more below a traceback, as a program closes them at its end, are no steps."""
    bars = (
        "\rEpoch:  33%|###      | 1/3 [00:02<00:04,  2.40s/it]",
        "\n\rStep:  14%|#        | 7/50 [00:00<00:01, 21.85it/s]",
        "\n\n\rmicro:  25%|##     | 1/4 [00:00<00:00, 97.82it/s]\x1b[A\x1b[A",
    )
    closed = "\n".join(bars).replace("1/4", "2/4")
    found = answer(tmp_path, {"rank-0.err": f"{''.join(bars)}\n{HEAD}KeyError: 'lr'\n{closed}\n"})
    assert said(found) == ("STOP", "key_error", "KeyError: 'lr'")


def stamped(steps: range) -> str:
    return "".join(f"[2026-05-01 12:{n // 60:02}:{n % 60:02}] step {n} loss 2.1\n" for n in steps)


@pytest.mark.parametrize(
    ("older", "newest"),
    [
        (["train.log.1"], "train.log"),
        (["train.log.1.gz"], "train.log"),
        (["train.log-20260501.gz"], "train.log"),
        (["train.log.2026-05-01_12"], "train.log"),
        (["train.log.2", "train.log.1"], "train.log"),
        (["rank0.log.1"], "rank0.log"),
    ],
)
def test_steps_in_the_next_part_of_a_rotated_log(tmp_path: Path, older: list[str], newest: str) -> None:
    """An error at the end of an earlier part was survived if steps follow in a later part, and is the cause if none
    do."""
    failure = f"[2026-05-01 12:05:00] ERROR train: caught\n{HEAD}ValueError: bad prompt\n"
    end = len(older) * 300
    logs = {older[0]: stamped(range(300)) + failure}
    logs |= {name: stamped(range(300 * n, 300 * n + 300)) for n, name in enumerate(older[1:], 1)}
    folder = tmp_path / "survived"
    folder.mkdir()
    for name, text in {**logs, newest: stamped(range(end, end + 300)) + WATCHDOG}.items():
        (folder / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert answer(folder, {}).fault == "nccl_timeout"
    ended = answer(tmp_path / "ended", {older[-1].removesuffix(".gz"): logs[older[0]], newest: "rotated\n"})
    assert said(ended) == ("STOP", "value_error", "ValueError: bad prompt")


@pytest.mark.parametrize("others", [{"job.out.0": stamped(range(300, 600))}, {"job.out": stamped(range(600))}])
def test_a_number_that_is_a_task_s(tmp_path: Path, others: dict[str, str]) -> None:
    """A suffix that is a task's number is no rotation: tasks are counted from 0, and write at the same time."""
    failure = f"{stamped(range(300))}{HEAD}ValueError: bad prompt\n"
    found = answer(tmp_path, {"job.out": stamped(range(300, 600)), "job.out.1": failure, **others})
    assert said(found) == ("STOP", "value_error", "ValueError: bad prompt")


# ---- a shell's complaints


COMPLAINTS = (
    "/var/spool/slurmd/job7/slurm_script: line 4: /opt/conda/bin/activate: No such file or directory",
    "/etc/profile.d/site.sh: line 12: module: command not found",
    'Lmod has detected the following error: The following module(s) are unknown: "cuda/13"',
)


@pytest.mark.parametrize("complaint", COMPLAINTS)
@pytest.mark.parametrize(
    ("end", "fault"),
    [
        ("Killed\n", "killed"),
        (f"{HEAD}RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED\n", "cudnn_error"),
        ("[rank1]:[E1121 18:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
         "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n",
         "nccl_timeout"),
        ("".join(f"loading part {n}\n" for n in range(20)), "unknown"),
    ],
    ids=["killed", "cudnn", "nccl", "nothing"],
)  # fmt: skip
def test_a_shell_that_went_on(tmp_path: Path, complaint: str, end: str, fault: str) -> None:
    """A shell's complaint before a program's output is no cause."""
    assert answer(tmp_path, f"{complaint}\nloading the model\n{end}").fault == fault


@pytest.mark.parametrize("complaint", COMPLAINTS[:1])
def test_a_shell_s_last_words(tmp_path: Path, complaint: str) -> None:
    """Without a program's output the shell's complaint is the cause."""
    srun = "srun: error: n1: task 0: Exited with exit code 127\n"
    assert answer(tmp_path, f"job 7 starts\n{complaint}\n{srun}").fault == "usage_error"


# ---- order


def test_a_watchdog_before_an_unlabelled_abort(tmp_path: Path) -> None:
    """The abort follows from the timeout."""
    log = (
        "[rank2]:[E1121 18:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n"
        "terminate called after throwing an instance of 'c10::DistBackendError'\n"
    )
    assert answer(tmp_path, STEPS + log).fault == "nccl_timeout"


def test_slurm_cancels_a_step_after_a_task_exited(tmp_path: Path) -> None:
    """The task's exit is the cause if it is reported first; otherwise the cancellation is."""
    exited = "srun: error: n2: task 3: Exited with exit code 1\n"
    cancelled = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-21T18:00:00 ***\n"
    assert answer(tmp_path / "a", STEPS + exited + cancelled).fault == "task_exited"
    assert answer(tmp_path / "b", STEPS + cancelled + exited).fault == "job_cancelled"


# ---- several runs in one file


BANNER = "== job 7 starts at 2026-11-2{n} on n1,n2\ncluster atlas, user ada, image train-2.1\n"
LAUNCH = "*****\nSetting OMP_NUM_THREADS environment variable for each process to be 1 in default\n*****\n"
OOM = f"{HEAD}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
SRUN = "srun: error: n1: task 0: Exited with exit code 1\n"


@pytest.mark.parametrize(
    "between",
    [
        SRUN,
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T18:00:00 DUE TO JOB REQUEUE ***\n",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
    ],
    ids=["srun", "requeue", "torchrun"],
)
@pytest.mark.parametrize("start", [BANNER + LAUNCH, LAUNCH * 2], ids=["script", "launcher"])
def test_the_last_run_is_judged(tmp_path: Path, start: str, between: str) -> None:
    """Only the last run counts, not what a requeued job printed before."""
    first = f"{start.replace('{n}', '1')}{STEPS}{OOM}{between}"
    second = start.replace("{n}", "2") + "loading\n"
    log = f"{first}{second}{HEAD}KeyError: 'lr'\n{SRUN}"
    assert said(answer(tmp_path / "other", log)) == ("STOP", "key_error", "KeyError: 'lr'")
    again = answer(tmp_path / "same", first + second + OOM + SRUN)
    assert again.fault == "cuda_oom"
    assert again.primary is not None
    assert again.primary.line > log.count("\n") - 12
    assert said(answer(tmp_path / "cut", first + second)) == ("UNKNOWN", "unknown", None)


def test_a_requeued_run_without_a_banner(tmp_path: Path) -> None:
    """Slurm's message of the requeue begins a new run."""
    requeue = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T18:00:00 DUE TO JOB REQUEUE ***\n"
    loading = "".join(f"loading part {n}\n" for n in range(9))
    assert answer(tmp_path / "a", f"{STEPS}{requeue}").fault == "preemption"
    assert answer(tmp_path / "b", f"{STEPS}{requeue}{loading}{HEAD}KeyError: 'lr'\n").fault == "key_error"


def test_a_node_that_starts_late(tmp_path: Path) -> None:
    """The banner of a late node, after another node's failure, begins no new run."""
    assert answer(tmp_path, f"{LAUNCH}{OOM}{LAUNCH}loading\n{SRUN}").fault == "cuda_oom"


@pytest.mark.parametrize(("lines", "verdict"), [(12, "STOP"), (30, "UNKNOWN")])
def test_a_script_that_goes_on_a_little(tmp_path: Path, lines: int, verdict: str) -> None:
    """A few lines of the batch script may follow an uncaught traceback; after many lines the program may have gone
    on."""
    rest = "".join(f"copying part {n} of the output\n" for n in range(lines))
    assert answer(tmp_path, f"loading\n{HEAD}KeyError: 'lr'\n{rest}").verdict == verdict


def test_an_exception_that_only_torchrun_reports(tmp_path: Path) -> None:
    """The traceback of a worker that has written an error file is indented in the launcher's summary."""
    log = (
        "  error_file: /tmp/torchelastic_x/error.json\n  traceback : Traceback (most recent call last):\n"
        '    File "/work/train.py", line 31, in wrapper\n      return f(*args, **kwargs)\n'
        "  ValueError: no such schedule\n"
    )
    assert answer(tmp_path, log).fault == "value_error"


def test_a_hang_names_the_missing_ranks(tmp_path: Path) -> None:
    """The answer names the missing ranks, the collective and its last line, and which ranks have no log."""
    timeout = (
        "[rank{rank}]:[E1121 02:23:43.1 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation "
        "timeout: WorkNCCL(SeqNum=1594, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600001 milliseconds before "
        "timing out.\n"
    )
    logs = {f"rank-{rank}.err": timeout.replace("{rank}", str(rank)) for rank in (0, 1, 2, 3, 5, 6)}
    logs["rank-4.out"] = "02:13:41 step 1078 loss 2.1\n02:13:43 step 1079 loss 2.1\n"
    found = answer(tmp_path, logs, nodes=("n1", "n2"), workers_per_node=4)
    assert found.missing == (4, 7)
    assert found.explanation.startswith(
        "Ranks 4, 7 never entered ALLREDUCE 1594; its last line: 02:13:43 step 1079 loss 2.1."
    )
    assert found.read is not None
    assert (found.read.files, found.read.silent) == (7, (7,))


def test_what_would_settle_an_unknown(tmp_path: Path) -> None:
    """An UNKNOWN comes with the next best line, and a command."""
    log = f"{STEPS}Fatal Python error: Segmentation fault\n[E1] double free or corruption (!prev)\n"
    found = answer(tmp_path, log)
    assert found.verdict == "UNKNOWN"
    assert found.runner_up is not None
    assert {found.fault, found.runner_up.rule.partition(".")[0]} == {"segfault", "heap_corruption"}
    assert "dmesg" in found.settle


# ---- what the monitor of the in-process wrapper writes into its rank's log

MONITOR = "19:03:15.004 monitor of rank 0: "


@pytest.mark.parametrize(
    ("line", "number", "fault"),
    [
        ("SIGTERM, SIGCONT for process 3847: no progress for 12.2 s: hard timeout", SIGTERM, "hang"),
        ("SIGKILL for process 3847: no progress for 12.2 s: hard timeout", SIGKILL, "hang"),
        ("SIGKILL for process 3847: no sign of life for 30 s", SIGKILL, "inprocess_monitor"),
        ("process 3847: no progress for 6.19 s: soft timeout", SIGTERM, "terminated"),
    ],
)
def test_why_a_monitor_ended_its_rank(tmp_path: Path, line: str, number: int, fault: str) -> None:
    """The reason in the monitor's line counts, not the signal that it sent; a soft timeout ends no rank."""
    failed = Failed(cause="killed", node="n1", rank=0, signal=number)
    found = answer(tmp_path, {"rank-0.err": f"{MONITOR}{line}\n"}, failed=failed, nodes=("n1",), pids={0: 3847})
    assert (found.fault, found.ranks, found.nodes) == (fault, (0,), ())
