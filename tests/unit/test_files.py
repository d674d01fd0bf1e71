"""Where a job's files lie."""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.files import JobFiles


def test_jobs_of_one_id_share_no_folder_in_a_nodes_memory():
    """Two clusters on one machine both have a job 1: neither clears away what the other's workers use."""
    first, second = JobFiles(Path("/a/1")), JobFiles(Path("/b/1"))
    assert first.runtime_name != second.runtime_name
    assert first.runtime_name == JobFiles(Path("/a/1")).runtime_name
