"""docs/job-yaml.md."""

from __future__ import annotations

from pathlib import Path

from ci.pages.job_yaml import sections
from nvrx_slurm.jobspec.container import ContainerSpec
from nvrx_slurm.jobspec.model import JobSpec
from nvrx_slurm.jobspec.prewarm import PrewarmSpec
from nvrx_slurm.jobspec.reading import Block

PAGE = Path(__file__).parents[3] / "docs" / "job-yaml.md"


def test_every_key_is_on_the_page() -> None:
    """Each block of the model has a section, and each of its keys a row."""
    assert {block for _, block in sections()} == {
        block
        for block in Block.__subclasses__()
        if block.__module__ in (JobSpec.__module__, ContainerSpec.__module__, PrewarmSpec.__module__)
    }
    page = PAGE.read_text()
    for path, block in sections():
        title = f"`{path}`" if path else "The top level"
        section = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        for key in block.__struct_fields__:
            assert f"| `{key}` |" in section, f"{title}: {key}"
