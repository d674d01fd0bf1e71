"""`container` of job.yaml: its short form, its paths, what it refuses, and what pyxis gets."""

from __future__ import annotations

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec.container import ContainerSpec
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.plan import plan, plan_from_json, plan_to_json
from nvrx_slurm.jobspec.reading import read
from nvrx_slurm.jobspec.script import render_job

PLAIN = {"name": "train", "command": "python train.py"}


def container_of(keys, base, **more):
    spec = JobSpec(**PLAIN, container=keys, **more)
    made = plan(spec, folder=base / "jobs", job_file=base / "job.yaml")
    assert plan_from_json(plan_to_json(made)) == made
    return made.roles[0].container


def test_an_image_alone_is_the_short_form(tmp_path):
    """`container: IMAGE` is the short form; paths count from job.yaml's folder, and an image name stays a name."""
    assert container_of("./root", tmp_path) == ContainerSpec(image=f"{tmp_path}/root")
    assert container_of("images/a.sif", tmp_path).image == f"{tmp_path}/images/a.sif"
    assert container_of("docker://a/b:1", tmp_path).image == "docker://a/b:1"
    assert container_of("localhost/a:1", tmp_path).image == "localhost/a:1"


def test_mounts_are_whole_in_the_plan(tmp_path):
    """The plan has source, target and options of each mount; a source is resolved like every path of job.yaml."""
    mounts = container_of({"image": "a", "mounts": ["/data", "./x:/y", "~/z:/z:ro"]}, tmp_path).mounts
    assert mounts[:2] == ("/data:/data", f"{tmp_path}/x:/y")
    assert mounts[2].endswith("/z:/z:ro") and mounts[2].startswith("/")


def test_a_role_has_its_own(tmp_path):
    """A role's container replaces the job's, and its `env` overrides the role's."""
    roles = {
        "a": {"command": "x", "container": {"image": "b", "env": {"A": "2"}}, "env": {"A": 1, "B": 1}},
        "c": {"command": "y"},
    }
    spec, problems = read(JobSpec, {"name": "t", "roles": roles, "container": "a"})
    assert not problems
    own, other = plan(spec, folder=tmp_path).roles
    assert (own.container.image, own.env, other.container.image) == ("b", {"A": "2", "B": "1"}, "a")


@pytest.mark.parametrize(
    ("keys", "path"),
    [
        ({"runtime": "podman"}, ("container", "image")),
        ({"image": "a", "runtime": "docker"}, ("container", "runtime")),
        ({"image": "a.sif", "runtime": "podman"}, ("container", "runtime")),
        ({"image": "a", "mounts": ["data"]}, ("container", "mounts", 0)),
        ({"image": "a", "mounts": ["/data:rw"]}, ("container", "mounts", 0)),
        ({"image": "a", "mounts": ["/data:/data:z"]}, ("container", "mounts", 0)),
        ({"image": "a", "workdir": "here"}, ("container", "workdir")),
        ({"image": "a", "env": {"RANK": "1"}}, ("container", "env", "RANK")),
        ({"image": "a", "mount": ["/data"]}, ("container", "mount")),
        ({"image": "a", "agents": "within"}, ("container", "agents")),
        ({"image": "a", "agents": "inside", "runtime": "podman"}, ("container", "agents")),
        ({"image": "a", "agents": "outside", "runtime": "pyxis"}, ("container", "agents")),
    ],
)
def test_what_is_wrong_is_named_by_its_key(keys, path):
    """Each wrong value is one problem, at its own key."""
    _, problems = read(JobSpec, {**PLAIN, "container": keys})
    assert list(problems) == [path]


def test_pyxis_runs_the_agents_too(tmp_path):
    """srun gets pyxis's flags and starts the image's own Python; a container for one role alone is refused."""
    spec = JobSpec(
        **PLAIN, container={"image": "nvcr.io#nvidia/pytorch:25.10-py3", "runtime": "pyxis", "mounts": "/data"}
    )
    made = plan(spec, folder=tmp_path / "jobs", job_file=tmp_path / "job.yaml")
    script = render_job(spec, made, cluster="slurm", python="/venv/bin/python")
    launcher = script[script.index("srun") :].splitlines()[0]
    assert "--container-image=nvcr.io#nvidia/pytorch:25.10-py3" in launcher.replace("'", "")
    assert f"--container-mounts=/data:/data,{tmp_path}/jobs:{tmp_path}/jobs," in launcher
    assert " python3 -P -m nvrx_slurm.agent" in launcher
    with pytest.raises(ConfigError) as refused:
        render_job(spec, made, cluster="local", python="python")
    assert refused.value.key == "container.runtime"
    roles = {"a": {"command": "x", "container": {"image": "b", "runtime": "pyxis"}}}
    assert list(read(JobSpec, {"name": "t", "roles": roles})[1]) == [("roles", "a", "container")]


def test_agents_inside_are_started_by_the_hosts_python(tmp_path):
    """The host's Python on each node looks for a runtime there and starts the agents; podman cannot run them, and a
    container for one role alone is refused."""
    spec = JobSpec(**PLAIN, container={"image": "a", "agents": "inside"})
    made = plan(spec, folder=tmp_path / "jobs", job_file=tmp_path / "job.yaml")
    script = render_job(spec, made, cluster="slurm", python="/venv/bin/python")
    assert " /venv/bin/python -P -m nvrx_slurm.agent.inside" in script
    assert made.roles[0].container.takes == ("charliecloud", "pyxis")
    assert ContainerSpec(image="a").takes == ("podman", "charliecloud", "pyxis")
    roles = {"a": {"command": "x", "container": "b"}}
    read_with = {"name": "t", "roles": roles, "container": {"image": "a", "agents": "inside"}}
    assert list(read(JobSpec, read_with)[1]) == [("roles", "a", "container")]
