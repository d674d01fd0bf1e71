"""The flows that ship: each loads and can run on the stages that it names, and a few of them run embedded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.lab.flow.load import load_flow, load_flows
from nvrx_slurm.lab.flow.stages import check

CI = Path(__file__).parents[2] / "ci"
FILES = sorted((CI / "flows").glob("*.yaml"))
EMBEDDED = ("happy-path", "spare-takes-over")


def test_there_is_a_flow_for_each_way_in_which_jobs_break():
    """The set does not shrink unnoticed."""
    assert len(FILES) >= 26


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_flow_can_run_on_the_stages_that_it_names(file):
    """A flow has the name of its file, a sentence on what it is about, and no need that one of its stages cannot
    meet."""
    flow = load_flow(file)
    assert flow.name == file.stem
    assert flow.about.endswith(".")
    for stage in flow.on:
        check(flow, stage)


def test_every_job_file_is_used():
    """Each job file is run by a flow: an unused one would break unnoticed."""
    used = {flow.job.resolve() for flow in load_flows([CI / "flows"])}
    assert used == {path.resolve() for path in (CI / "jobs").glob("*.yaml")}


def test_flows_run_embedded(tmp_path):
    """On this machine alone, without Slurm, flows pass: a run to its end, and a dead node. Each job has its page,
    which the report links."""
    chosen = [word for name in EMBEDDED for word in ("--flow", name)]
    argv = [sys.executable, "-m", "ci", *chosen, "--on", "local", "--artifacts", str(tmp_path / "artifacts")]
    argv += ["--html", str(tmp_path / "ci.html")]
    done = subprocess.run(argv, cwd=CI.parent, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in EMBEDDED:
        assert f'href="ci-jobs/{name}-1.html"' in (tmp_path / "ci.html").read_text()
        assert b"Where the time went" in (tmp_path / "ci-jobs" / f"{name}-1.html").read_bytes()
