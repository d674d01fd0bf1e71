"""`prewarm` of job.yaml: its short forms, its errors, its fields in the plan, and which commands can be started
warm."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.load import load, parse_assignment, write_job
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import plan, plan_from_json, plan_to_json
from nvrx_slurm.jobspec.prewarm import PrewarmSpec, probe_command
from nvrx_slurm.jobspec.reading import read, written

PLAIN = {"name": "train", "command": "python train.py"}


def prewarm_of(keys, base, **more):
    made = plan(JobSpec(**PLAIN, prewarm=keys, **more), folder=base / "jobs", job_file=base / "job.yaml")
    assert plan_from_json(plan_to_json(made)) == made
    return made.roles[0].prewarm


@pytest.mark.parametrize(
    ("short", "imports"),
    [
        ("auto", "auto"),
        ("on", "auto"),
        (True, "auto"),
        ({}, "auto"),
        ("torch", ("torch",)),
        ("torch, torch.distributed", ("torch", "torch.distributed")),
        (["torch", "mymodel"], ("torch", "mymodel")),
        (("torch",), ("torch",)),
        ({"imports": "auto"}, "auto"),
        ({"imports": "torch"}, ("torch",)),
    ],
)
def test_a_short_form_names_the_imports(short, imports, tmp_path):
    """`auto`, or modules as a list or separated by commas; in Python also a tuple or a PrewarmSpec."""
    assert prewarm_of(short, tmp_path) == PrewarmSpec(imports=imports)
    assert prewarm_of(PrewarmSpec(imports=imports), tmp_path) == PrewarmSpec(imports=imports)


@pytest.mark.parametrize("off", [None, "off", "Off", False, "false", {"imports": []}])
def test_it_can_be_switched_off(off, tmp_path):
    """`off`, or no imports, means no prewarm."""
    assert prewarm_of(off, tmp_path) is None


def test_each_key_reaches_the_plan(tmp_path):
    """Patterns count from job.yaml's folder, whose own name is no pattern; sizes are in bytes, durations in
    seconds."""
    base = tmp_path / "a[1]"
    keys = {
        "imports": ["torch"],
        "setup": "mymodel.warm:prepare",
        "read": ["checkpoints/latest/**", "/data/{rank}/*", "../shard-{rank}.pt", "~/x"],
        "memory": "8GiB",
        "timeout": "5m",
    }
    prewarm = prewarm_of(keys, base)
    here = f"{tmp_path}/a[[]1]"
    assert prewarm.read[:3] == (f"{here}/checkpoints/latest/**", "/data/{rank}/*", f"{here}/../shard-{{rank}}.pt")
    assert prewarm.read[3] == str(Path.home() / "x")
    assert (prewarm.setup, prewarm.memory, prewarm.timeout) == ("mymodel.warm:prepare", 8 << 30, 300.0)
    assert prewarm_of({"memory": "512MB"}, tmp_path).memory == 512 * 1000**2
    assert prewarm_of({"memory": 1 << 30}, tmp_path).memory == 1 << 30
    assert prewarm_of("auto", tmp_path).timeout == 120.0


def test_reading_alone_needs_no_process(tmp_path):
    """Without imports and setup the node needs no warm process to fork workers from."""
    prewarm = prewarm_of({"imports": [], "read": "x"}, tmp_path)
    assert not prewarm.wants_process and len(prewarm.read) == 1
    assert prewarm_of("auto", tmp_path).wants_process
    assert prewarm_of({"imports": [], "setup": "a:b"}, tmp_path).wants_process


def test_a_role_has_its_own(tmp_path):
    """A role's `prewarm` replaces the job's; `off` removes it for that role."""
    roles = {
        "a": {"command": "x", "prewarm": ["torch"]},
        "b": {"command": "y", "prewarm": "off"},
        "c": {"command": "z"},
    }
    keys = {"imports": ["numpy"], "memory": "1GiB"}
    spec, problems = read(JobSpec, {"name": "t", "roles": roles, "prewarm": keys})
    assert not problems
    own, off, other = (role.prewarm for role in plan(spec, folder=tmp_path).roles)
    assert (own, off) == (PrewarmSpec(imports=("torch",)), None)
    assert other == PrewarmSpec(imports=("numpy",), memory=1 << 30)


def test_a_plan_that_was_written_earlier_is_read(tmp_path):
    """A plan without the key has no prewarm."""
    made = plan(JobSpec(**PLAIN), folder=tmp_path)
    raw = msgspec.json.decode(plan_to_json(made))
    for role in raw["roles"]:
        role.pop("prewarm", None)
    assert plan_from_json(msgspec.json.encode(raw)) == made
    assert made.roles[0].prewarm is None


def test_the_written_form_is_read_back(tmp_path):
    """`prewarm` is read back from what `--save` and `config show` write."""
    for keys in ("auto", "off", {"imports": ["torch"], "setup": "a:b", "read": "x", "memory": "8GiB"}):
        spec = JobSpec(**PLAIN, prewarm=keys)
        assert JobSpec(**PLAIN, prewarm=written(spec)["prewarm"]) == spec
    loaded = load(None, [("prewarm", "--prewarm", "torch,mymodel")], instead=PLAIN)
    file = tmp_path / "job.yaml"
    write_job(file, load(None, [*((key, key, value) for key, value in PLAIN.items()), *loaded_flags(loaded)]))
    assert load(file).spec == loaded.spec


def loaded_flags(loaded):
    return [("prewarm", "--prewarm", written(loaded.spec)["prewarm"])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prewarm=auto", PrewarmSpec()),
        ("prewarm=torch,x", PrewarmSpec(imports=("torch", "x"))),
        ("prewarm=[torch, x]", PrewarmSpec(imports=("torch", "x"))),
        ("prewarm={imports: [torch], timeout: 1m}", PrewarmSpec(imports=("torch",), timeout=60.0)),
        ("prewarm.memory=1GiB", PrewarmSpec(memory=1 << 30)),
    ],
)
def test_it_can_be_set_on_the_command_line(text, expected):
    """`--set prewarm=…` takes the same forms."""
    assert load(None, [parse_assignment(text)], instead=PLAIN).spec.prewarm == expected


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        ("my-model", (), "'my-model'"),
        ("torch,", (), "''"),
        ("a b", (), "'a b'"),
        (3, (), "3"),
        ([3], (), "3"),
        ([["torch"]], (), "['torch']"),
        (["auto", "torch"], (), "`auto` stands alone"),
        ({"imports": ["my/model.py"]}, ("imports",), "'my/model.py'"),
        ({"imports": [".x"]}, ("imports",), "'.x'"),
        ({"imports": {"a": "b"}}, ("imports",), "list of modules"),
        ({"imports": "a:b"}, ("imports",), "'a:b'"),
        ({"setup": "mymodel.prepare"}, ("setup",), "like mymodel.warm:prepare"),
        ({"setup": "my-model:prepare"}, ("setup",), "like mymodel.warm:prepare"),
        ({"setup": "mymodel:"}, ("setup",), "like mymodel.warm:prepare"),
        ({"setup": "mymodel:prepare()"}, ("setup",), "like mymodel.warm:prepare"),
        ({"setup": ["a:b"]}, ("setup",), "must be text"),
        ({"read": ["a/{node}/*"]}, ("read", 0), "{node}"),
        ({"read": ["a", "a/{}/*"]}, ("read", 1), "{}"),
        ({"read": ["{rank:02d}"]}, ("read", 0), "{rank:02d}"),
        ({"read": {"a": "b"}}, ("read",), "must be a list"),
        ({"memory": "lots"}, ("memory",), "is no size"),
        ({"memory": 0}, ("memory",), "from 1MiB"),
        ({"timeout": "soon"}, ("timeout",), "is no duration"),
        ({"timeout": 0}, ("timeout",), "from 10ms"),
        ({"import": ["torch"]}, ("import",), "did you mean `imports`"),
        ({"modules": ["torch"]}, ("modules",), "is not known"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(keys, path, words):
    """Each wrong value is one problem at its own key, for the job and for a role."""
    _, problems = read(JobSpec, {**PLAIN, "prewarm": keys})
    assert [*problems] == [("prewarm", *path)] and words in problems["prewarm", *path]
    roles = {"a": {"command": "x", "prewarm": keys}}
    _, problems = read(JobSpec, {"name": "t", "roles": roles})
    assert [*problems] == [("roles", "a", "prewarm", *path)]


# ------------------------------------------------------------------------------- which commands can be started warm

WARM = {
    ("python", "train.py"): ("python", "-c"),
    ("python3", "train.py", "-I"): ("python3", "-c"),
    ("/opt/py/bin/python3.11", "-u", "train.py"): ("/opt/py/bin/python3.11", "-u", "-c"),
    ("python3.13t", "train.py"): ("python3.13t", "-c"),
    ("pypy3", "-O", "train.py"): ("pypy3", "-O", "-c"),
    ("python", "-uB", "-m", "pkg.mod", "--x"): ("python", "-uB", "-c"),
    ("python", "-m", "mod"): ("python", "-c"),
    ("python", "-mmod"): ("python", "-c"),
    ("python", "-OBm", "mod"): ("python", "-OB", "-c"),
    ("python", "-c", "print()"): ("python", "-c"),
    ("python", "-cprint()"): ("python", "-c"),
    ("python", "-uc", "print()"): ("python", "-u", "-c"),
    ("python", "-uc", "-I"): ("python", "-u", "-c"),
    ("python", "-Wignore", "train.py"): ("python", "-Wignore", "-c"),
    ("python", "-W", "ignore", "train.py"): ("python", "-W", "ignore", "-c"),
    ("python", "-uW", "ignore", "-X", "dev", "train.py"): ("python", "-uW", "ignore", "-X", "dev", "-c"),
    ("python", "-WI", "train.py"): ("python", "-WI", "-c"),
    ("python", "-W", "-I", "train.py"): ("python", "-W", "-I", "-c"),
    ("python", "-Xdev", "-OO", "-bb", "-sPqvxRd", "train.py"): (
        *("python", "-Xdev", "-OO", "-bb", "-sPqvxRd", "-c"),
    ),
    ("python", "--check-hash-based-pycs", "always", "-u", "train.py"): (
        *("python", "--check-hash-based-pycs", "always", "-u", "-c"),
    ),
    ("python", "--", "train.py"): ("python", "-c"),
    ("python", "-u", "--", "-I"): ("python", "-u", "-c"),
    ("python", ""): ("python", "-c"),
}
COLD = {
    ("bash", "-c", "python train.py"): "the command is no Python program: bash",
    ("nothing-of-this-name",): "the command was not found: nothing-of-this-name",
    ("python", "-I", "train.py"): "python runs with -I, which leaves out the start-up hook",
    ("python", "-uE", "train.py"): "python runs with -E, which leaves out the start-up hook",
    ("python", "-S", "-m", "mod"): "python runs with -S, which leaves out the start-up hook",
    ("/usr/bin/python3", "-sIm", "mod"): "python3 runs with -I, which leaves out the start-up hook",
    ("python", "-i", "train.py"): "python runs with -i, which reads commands from stdin",
    ("python", "-V"): "python runs with -V, which only prints a text",
    ("python", "-uh"): "python runs with -h, which only prints a text",
    ("python", "--version"): "python runs with --version, which only prints a text",
    ("python",): "python reads its program from stdin",
    ("python", "-"): "python reads its program from stdin",
    ("python", "-u", "-", "train.py"): "python reads its program from stdin",
    ("python", "--"): "python reads its program from stdin",
    ("python", "-W"): "python reads its program from stdin",
    ("python", "-c"): "python runs with -c, and without what that needs",
    ("python", "-um"): "python runs with -m, and without what that needs",
    ("python", "-Z", "train.py"): "python runs with -Z, which is no option of Python",
    ("python", "--nonsense", "train.py"): "python runs with --nonsense, which is no option of Python",
}


def find(program):
    """Finds interpreters by any name, and the other programs of this machine."""
    return program if "python" in program or "pypy" in program else shutil.which(program)


@pytest.mark.parametrize("command", WARM)
def test_a_python_program_can_be_warm(command):
    """The probe starts the same interpreter with the same options, without the user's program."""
    assert probe_command(command, find) == WARM[command]


@pytest.mark.parametrize("command", COLD)
def test_all_else_is_cold_with_a_reason(command):
    """One sentence says why."""
    with pytest.raises(ValueError, match=f"^{re.escape(COLD[command])}$"):
        probe_command(command, find)


FIRST_LINES = {
    "#!/venv/bin/python3.11": ("/venv/bin/python3.11", "-c"),
    "#! /venv/bin/python -u ": ("/venv/bin/python", "-u", "-c"),
    "#!/usr/bin/env python3": ("/usr/bin/env", "python3", "-c"),
    "#!/usr/bin/env -S python3 -u": ("/usr/bin/env", "python3", "-u", "-c"),
    "#!/usr/bin/env -S python3 -uW 'a b'": ("/usr/bin/env", "python3", "-uW", "a b", "-c"),
    "#!/bin/sh\n'''exec' '/a venv/bin/python' \"$0\" \"$@\"\n' '''": ("/a venv/bin/python", "-c"),
    "#!/bin/sh\n'''exec' /venv/bin/python -u \"$0\" \"$@\"\n' '''": ("/venv/bin/python", "-u", "-c"),
    "#!/venv/bin/python -Es": "python runs with -E, which leaves out the start-up hook",
    "#!/venv/bin/python -u -B": "python runs with -u -B, which is no option of Python",
    "#!/usr/bin/env python3 -u": None,
    "#!/usr/bin/env": None,
    "#!/usr/bin/env -S": None,
    "#!/usr/bin/env -S 'python": None,
    "#!/bin/sh": None,
    "#!/bin/sh\n'''exec' 'python": None,
    "#!/bin/sh\n'''exec' ": None,
    "#!/bin/bash\npython train.py": None,
    "#!": None,
    "\x7fELF": None,
    "": None,
}


@pytest.mark.parametrize("text", FIRST_LINES)
def test_a_program_of_python_is_known_by_its_first_line(text, tmp_path):
    """A console script is started warm with the interpreter and the options of its first line, as the kernel
    would."""
    program = tmp_path / "train"
    program.write_text(f"{text}\nimport sys\n")
    expected = FIRST_LINES[text]
    expected = f"the command is no Python program: {program}" if expected is None else expected
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            probe_command([str(program), "x"], str)
    else:
        assert probe_command([str(program), "-I"], str) == expected


def test_a_program_that_cannot_be_read_is_cold(tmp_path):
    """A folder cannot be read as a program, for example."""
    with pytest.raises(ValueError, match="cannot be read"):
        probe_command([str(tmp_path)], str)


def test_a_probe_runs_as_the_command_does(tmp_path):
    """The probe runs the real interpreter with the flags of the program."""
    program = tmp_path / "train"
    code = "import sys; print(sys.executable, sys.flags, sys.warnoptions, sys._xoptions)"
    program.write_text(f"#!/usr/bin/env -S {sys.executable} -uBW ignore -X dev\n{code}\n")
    program.chmod(0o755)
    for command in [(str(program),), (sys.executable, "-OOW", "error", "-Xutf8", str(program))]:
        words = [command, (*probe_command(command, shutil.which), code)]
        ran = [subprocess.run(each, env=env.child_environment({}), capture_output=True, check=True) for each in words]
        assert ran[0].stdout == ran[1].stdout
