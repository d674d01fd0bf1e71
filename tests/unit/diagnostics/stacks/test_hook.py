"""What the hook does to the interpreters of a worker."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvrx_slurm.diagnostics.stacks.hook_client import DUMP_SIGNAL, HOOK_DIR

PYENV = Path.home() / ".pyenv/versions"
PYTHONS = [sys.executable, *map(str, sorted(PYENV.glob("*/bin/python")))]
THEIRS = """
import sys
print("theirs", __name__, __file__, __spec__.origin, sys.modules["sitecustomize"].__dict__ is globals())
"""


def run(env, code, *, python=sys.executable, check=True):
    return subprocess.run([python, "-c", code], env=env, capture_output=True, text=True, check=check, timeout=60)


def customized(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(text)
    return folder


@pytest.fixture
def agent(tmp_path):
    """The socket on which the agent receives exceptions."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.setblocking(False)
        yield listening


def heard_by(agent, env, code):
    """The agent's datagram about one process, and the process."""
    ended = run({**env, "NVRX_BEAT_SOCKET": agent.getsockname(), "RANK": "3"}, code, check=False)
    return agent.recv(4096), ended


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.split("/")[-3])
def test_no_interpreter_is_disturbed(python, hooked):
    """An interpreter of any version prints nothing, and ends as it would without the hook."""
    ended = run(hooked, "print('fine')", python=python)
    assert (ended.stdout, ended.stderr) == ("fine\n", "")


@pytest.mark.parametrize("wrong", [{"NVRX_DUMP_DIR": "/nonexistent"}, {"NVRX_DUMP_SIGNAL": "x"}, {"RANK": "\n"}])
def test_wrong_environment_is_borne_in_silence(hooked, wrong):
    """With wrong variables the program runs, and nothing is printed."""
    ended = run({**hooked, **wrong}, "print('fine')")
    assert (ended.stdout, ended.stderr) == ("fine\n", "")


def test_missing_variables_are_borne_in_silence(hooked):
    """With the hook on the path and none of its variables, the program runs as usual."""
    env = {name: value for name, value in hooked.items() if not name.startswith("NVRX_")}
    ended = run(env, "print('fine')")
    assert (ended.stdout, ended.stderr) == ("fine\n", "")


def test_low_descriptors_stay_as_they_are(hooked):
    """The first file that a program opens gets the number that it has without the hook."""
    code = "import os; print(os.open('/dev/null', os.O_RDONLY))"
    plain = {name: value for name, value in hooked.items() if name != "PYTHONPATH"}
    assert run(hooked, code).stdout == run(plain, code).stdout


def test_few_descriptors_are_enough(hooked):
    """If the process may not open a thousand files, the hook takes one of the descriptors that it may have."""
    child = "import os; print(*sorted(map(int, os.listdir('/proc/self/fd'))))"
    code = f"""
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
subprocess.run([sys.executable, "-c", {child!r}])
with open("/proc/self/status") as status: print(*(line.split()[1] for line in status if line.startswith("SigCgt")))
"""
    caught, descriptors = sorted(run(hooked, code).stdout.splitlines(), key=len, reverse=True)
    assert int(caught, 16) >> (DUMP_SIGNAL - 1) & 1
    assert max(map(int, descriptors.split())) < 64


def test_hidden_sitecustomize_runs_as_if_it_were_alone(hooked, tmp_path):
    """One on the user's PYTHONPATH is imported under its own name, file and spec."""
    theirs = customized(tmp_path / "theirs", THEIRS)
    env = {**hooked, "PYTHONPATH": os.pathsep.join([str(HOOK_DIR), str(theirs)])}
    file = theirs / "sitecustomize.py"
    code = "import sitecustomize; print(sitecustomize.__file__)"
    assert run(env, code).stdout.splitlines() == [f"theirs sitecustomize {file} {file} True", str(file)]


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_hidden_sitecustomize_of_a_venv_runs(hooked, tmp_path, version):
    """One in the site-packages of a virtual environment is found too."""
    base = next((path for path in PYTHONS if f"/{version}" in path), None)
    if base is None:
        pytest.skip(f"no Python {version} here")
    subprocess.run([base, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site_packages = next((tmp_path / "venv/lib").glob("python3*/site-packages"))
    customized(site_packages, THEIRS)
    said = run(hooked, "pass", python=str(tmp_path / "venv/bin/python")).stdout
    assert said.startswith(f"theirs sitecustomize {site_packages}/sitecustomize.py")


@pytest.mark.parametrize("text", ["raise ValueError('bad day')", "import no_such_module", "raise ImportError('x')"])
def test_hidden_sitecustomize_that_fails_fails_as_ever(hooked, tmp_path, text):
    """Its exception is handled, and printed, exactly as without the hook."""
    theirs = customized(tmp_path / "theirs", text)
    code = "import sys; print('sitecustomize' in sys.modules)"
    plain = run({**hooked, "PYTHONPATH": str(theirs)}, code, check=False)
    hooked_run = run({**hooked, "PYTHONPATH": f"{HOOK_DIR}{os.pathsep}{theirs}"}, code, check=False)
    assert (hooked_run.returncode, hooked_run.stdout, hooked_run.stderr) == (
        plain.returncode,
        plain.stdout,
        plain.stderr,
    )


def test_sitecustomize_before_the_hook_runs_once(hooked, tmp_path):
    """Another launcher's sitecustomize, which comes before the hook and imports it, is not run a second time."""
    hand_on = f"del sys.modules['sitecustomize']; sys.path.remove({str(tmp_path / 'first')!r}); import sitecustomize"
    first = customized(tmp_path / "first", f"import sys; print('first'); {hand_on}")
    last = customized(tmp_path / "last", "print('last')")
    env = {**hooked, "PYTHONPATH": os.pathsep.join(map(str, [first, HOOK_DIR, last]))}
    assert run(env, "pass").stdout.split() == ["first", "last"]


def test_uncaught_exception_is_reported_at_once(agent, hooked):
    """One datagram names rank, process, moment, type and the first line; the traceback is printed as usual."""
    began = time.monotonic()
    told, ended = heard_by(agent, hooked, "import os; print(os.getpid()); raise ValueError('bad day\\nvery bad')")
    rank, who, what = told.decode().split(" ", 2)
    pid, _, at = who.partition("@")
    assert (rank, pid, what) == ("!3", ended.stdout.strip(), "ValueError: bad day")
    assert began < float(at) < time.monotonic()
    assert ended.returncode == 1
    assert ended.stderr.endswith("ValueError: bad day\nvery bad\n")
    assert "sitecustomize" not in ended.stderr


RESET = "ConnectionResetError(104, 'reset')"


@pytest.mark.parametrize(
    ("raised", "told_as"),
    [
        (f"raise KeyError(1) from {RESET}", "KeyError: 1 (after ConnectionResetError: [Errno 104] reset)"),
        ("raise KeyError(1) from RuntimeError('gloo')", "KeyError: 1 (after RuntimeError: gloo)"),
        (
            f"try: raise {RESET}\nexcept OSError: raise KeyError(1)",
            "KeyError: 1 (after ConnectionResetError: [Errno 104] reset)",
        ),
        (f"try: raise {RESET}\nexcept OSError: raise KeyError(1) from None", "KeyError: 1"),
        ("raise KeyError(1) from ValueError(2)", "KeyError: 1"),
    ],
)
def test_wrapped_connection_error_is_named(agent, hooked, raised, told_as):
    """Libraries wrap exceptions: a lost connection at the start of a chain is named with the exception at its end."""
    told, _ = heard_by(agent, hooked, raised)
    assert told.decode().split(" ", 2)[2] == told_as


@pytest.mark.parametrize("message", ["'ä' * 1000", "'\\udc80'", "b'\\xff'", "1, 2", ""])
def test_any_message_fits(agent, hooked, message):
    """Long, torn and strange messages arrive as at most 512 bytes of UTF-8."""
    told, _ = heard_by(agent, hooked, f"raise ValueError({message})")
    assert len(told) <= 512
    assert " ValueError: " in told.decode()


def test_message_that_cannot_be_had_is_empty(agent, hooked):
    """An exception whose own `__str__` fails is still reported by its type."""
    told, ended = heard_by(agent, hooked, "class E(Exception):\n  def __str__(self): raise OSError\nraise E")
    assert told.endswith(b" E: ")
    assert ended.returncode == 1


STOPPED_AT_ONCE = """
import os, signal

class Stopped(Exception):
    def __str__(self):  # asked for by the report, in whose wake the agent stops this process
        os.kill(os.getpid(), signal.SIGTERM)
        return "at once"

{before}
raise Stopped
"""


def test_the_traceback_is_printed_although_the_agent_stops_the_process(agent, hooked):
    """SIGTERM that comes with the report ends the process only after it has printed its traceback."""
    _, ended = heard_by(agent, hooked, STOPPED_AT_ONCE.format(before="signal.signal(signal.SIGTERM, signal.SIG_DFL)"))
    assert ended.returncode == -signal.SIGTERM
    assert "Traceback (most recent call last)" in ended.stderr


def test_a_programs_own_handler_of_sigterm_stays(agent, hooked):
    """The handler is called as it would be without the hook."""
    before = "signal.signal(signal.SIGTERM, lambda *_: print('theirs', flush=True))"
    _, ended = heard_by(agent, hooked, STOPPED_AT_ONCE.format(before=before))
    assert ended.returncode == 1
    assert ended.stdout.startswith("theirs")


def test_clean_exit_reports_nothing(agent, hooked):
    """SystemExit is no failure of the program."""
    with pytest.raises(BlockingIOError):
        heard_by(agent, hooked, "raise SystemExit(3)")


def test_missing_agent_delays_no_process(hooked, tmp_path):
    """Without an agent at the socket the program ends with its traceback alone."""
    ended = run({**hooked, "NVRX_BEAT_SOCKET": str(tmp_path / "none"), "RANK": "0"}, "raise ValueError", check=False)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (1, "ValueError")


def test_question_at_the_end_of_the_interpreter_does_not_kill(hooked):
    """After faulthandler has restored the former handler, the signal is ignored."""
    code = f"import faulthandler, os; faulthandler.unregister({DUMP_SIGNAL}); os.kill(os.getpid(), {DUMP_SIGNAL})"
    assert run(hooked, code).returncode == 0


def test_program_started_by_a_worker_has_default_signals(hooked):
    """For a program that a worker starts, the signal is neither caught nor ignored."""
    assert shutil.which("grep")
    code = "import subprocess; subprocess.run(['grep', '-E', '^Sig(Ign|Cgt)', '/proc/self/status'])"
    masks = [int(line.split()[1], 16) for line in run(hooked, code).stdout.splitlines()]
    assert [mask >> (DUMP_SIGNAL - 1) & 1 for mask in masks] == [0, 0]


def test_signal_is_a_real_time_one():
    """No signal that programs commonly use is taken from them."""
    assert signal.SIGRTMIN < DUMP_SIGNAL < signal.SIGRTMAX
