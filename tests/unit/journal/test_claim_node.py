"""One agent a node: whether a lock refuses a second agent, while the first one's processes live and after their
end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import JobFolder, claim_node, clear_runtime_folders


@pytest.fixture
def job(tmp_path: Path) -> Iterator[JobFolder]:
    yield (job := JobFolder(tmp_path / "7"))
    clear_runtime_folders(job)


def test_second_agent_of_a_node_is_refused_and_leaves_nothing(job):
    """The first agent keeps its folder; another node of the job on the same machine can still be claimed."""
    first, lock = claim_node(job, "n1")
    with pytest.raises(UsageError):
        claim_node(job, "n1")
    other, others_lock = claim_node(job, "n2")
    assert sorted(job.runtime_folders()) == sorted([first, other])
    os.close(lock)
    os.close(others_lock)


def test_supervisor_that_outlives_its_agent_keeps_the_node(job):
    """The agent is dead, but its supervisor and workers may still run: until they end, no other agent can claim the
    node."""
    first, lock = claim_node(job, "n1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock]) as supervisor:
        os.close(lock)
        with pytest.raises(UsageError):
            claim_node(job, "n1")
        supervisor.communicate()
    second, lock = claim_node(job, "n1")
    assert job.runtime_folders() == [second], "the dead agent's folder is removed"
    assert second != first
    os.close(lock)


class Overtaken(JobFolder):
    """Another agent claims the node after this agent has made its folder and before it locks it."""

    def make_runtime_folder(self, node: str) -> Path:
        own = super().make_runtime_folder(node)
        self.others = claim_node(JobFolder(self.path), node)
        return own


def test_agent_that_is_overtaken_at_its_start_is_refused(job):
    """The other agent took its unlocked folder for that of a killed agent and removed it."""
    overtaken = Overtaken(job.path)
    with pytest.raises(UsageError):
        claim_node(overtaken, "n1")
    first, lock = overtaken.others
    assert job.runtime_folders() == [first]
    os.close(lock)
