"""Why a container cannot be started, as one sentence: the real program, run as a supervisor runs it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from nvrx_slurm.agent import container
from nvrx_slurm.jobspec.container import TAKEN_BY, image_kind


class Started:
    """A node whose programs and image the test provides. `start` returns the error sentence (empty if there is none)
    and the finished process."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.bin = base / "bin"
        self.bin.mkdir()
        (base / "runtime").mkdir()
        self.image = base / "image"
        (self.image / "usr/bin").mkdir(parents=True)
        (self.image / "usr/bin/train").symlink_to("/opt/train")
        self.env = {"PATH": str(self.bin), "NVRX_BEAT_SOCKET": str(base / "runtime/s"), "USER": "me"}

    def install(self, *programs):
        """Install programs that only print their arguments and environment."""
        for name in programs:
            path = self.bin / name
            path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexec /usr/bin/env\n')
            path.chmod(0o755)

    def start(self, *command, runtime="auto", image=None, mounts=(), own=(), env=None):
        image = str(self.image if image is None else image)
        order = {
            "image": image,
            "runtime": runtime,
            "takes": TAKEN_BY[image_kind(image)],
            "mounts": mounts,
            "inside": "/inside",
            "command": command or ("train",),
            "own": [*own],
            "shared": [str(self.base)],
            "label": "nvrx-test",
        }
        read, write = os.pipe()
        env = {**self.env, **(env or {}), container.START_FD: str(write)}
        done = subprocess.run(
            [*container.PROGRAM, json.dumps(order)],
            env=env,
            pass_fds=[write],
            capture_output=True,
            text=True,
            check=False,
        )
        os.close(write)
        with os.fdopen(read) as pipe:
            return pipe.read(), done


@pytest.fixture
def node(tmp_path):
    return Started(tmp_path)


def test_runtime_that_the_node_has_not(node):
    """The error names the runtime and the PATH that was searched; with `auto` it names every runtime that could be
    used."""
    said, done = node.start(runtime="podman")
    assert done.returncode == 127
    assert said == f"container.runtime: this node has no podman on its PATH ({node.bin})"
    assert "no apptainer or singularity or ch-run or podman on" in node.start()[0]


def test_image_that_the_node_has_not(node):
    """An image that is a path must exist on the worker's node; the error names the path."""
    node.install("ch-run")
    said, _ = node.start(image="/nowhere/root")
    assert said == "container.image: /nowhere/root does not exist on this node"


def test_mount_that_the_node_has_not(node):
    """The error names the mount's missing source."""
    node.install("ch-run")
    said, _ = node.start(mounts=["/nowhere/data:/data"])
    assert said == "container.mounts: /nowhere/data does not exist on this node"


def test_program_that_the_image_has_not(node):
    """A missing program is one sentence, not a runtime's own error; programs in mounted folders are found too."""
    node.install("ch-run")
    said, _ = node.start("python")
    assert said.startswith(f"container.image: {node.image} has no program python on its PATH (/usr/local/sbin:")
    tools = node.base / "tools"
    tools.mkdir()
    (tools / "python").touch()
    assert node.start("/opt/bin/python", mounts=[f"{tools}:/opt/bin"])[0] == ""
    assert "has no program /opt/bin/perl" in node.start("/opt/bin/perl", mounts=[f"{tools}:/opt/bin"])[0]


def test_mount_without_a_place_in_an_image_that_is_read_only(node):
    """ch-run needs a folder to mount on: it is created if possible; otherwise the error shows the command that
    creates it."""
    node.install("ch-run")
    said, done = node.start(mounts=["/usr/share:/data/set"])
    assert (said, done.returncode) == ("", 0)
    assert (node.image / "data/set").is_dir()
    (node.image / "blocked").touch()
    said, _ = node.start(mounts=["/usr/share:/blocked/set"])
    assert "has nothing at /blocked/set to mount on" in said and f"`mkdir -p {node.image}/blocked/set`" in said
    (node.bin / "ch-run").write_text('#!/bin/sh\necho --write-fake "$@"\n')  # newer versions have --write-fake
    said, done = node.start(mounts=["/usr/share:/blocked/set"])
    assert said == "" and done.stdout.startswith("--write-fake --write-fake --unset-env")
    assert "mounts nothing read-only" in node.start(mounts=["/usr/share:/data/set:ro"])[0]


def test_podmans_own_sentence(node):
    """The reason is what `podman create` prints, without its prefix."""
    (node.bin / "podman").write_text(
        "#!/bin/sh\necho 'Trying to pull' >&2; echo 'Error: no such image' >&2; exit 125\n"
    )
    (node.bin / "podman").chmod(0o755)
    said, _ = node.start(image="localhost/nowhere:1")
    assert said == "podman create: no such image"


def test_auto_takes_the_first_runtime_of_those_that_take_the_image(node):
    """A folder: apptainer before ch-run and podman. A name: podman, which apptainer would not find, before ch-run."""
    node.install("ch-run", "apptainer", "podman")
    _, done = node.start()
    assert done.stdout.splitlines()[:2] == ["--quiet", "exec"]
    said, _ = node.start(image="localhost/nowhere:1")
    assert said.startswith("podman start: ")


def test_own_variables_come_first_and_values_stay_out_of_the_way(node):
    """The job's variables override the image's, those of the host's libraries stay outside, and no value is
    evaluated."""
    node.install("ch-run", "apptainer")
    own = {"FOO": "it's $HOME", "PYTHONPATH": f"{container._HOOK}:/mine"}
    _, done = node.start(runtime="charliecloud", own=own, env={**own, "LD_PRELOAD": "", "VIRTUAL_ENV": "/host"})
    words = done.stdout.splitlines()
    assert "--set-env=FOO='it's $HOME'" in words
    assert words.index("--env-no-expand") < words.index("--set-env=FOO='it's $HOME'")
    lib = f"{node.base}/runtime/lib"
    assert f"--set-env=PYTHONPATH='{lib}/hook:/mine'" in words
    assert "--unset-env=VIRTUAL_ENV" in words
    assert Path(lib, "hook/sitecustomize.py").is_file() and Path(lib, "nvrx_slurm/workload/progress.py").is_file()
    _, done = node.start(runtime="apptainer", own=own, env=own)
    assert "APPTAINERENV_FOO=it's $HOME" in done.stdout.splitlines()
    assert "APPTAINER_NO_EVAL=1" in done.stdout.splitlines()
