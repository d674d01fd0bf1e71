"""docs/flows.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.lab.flow.docs import EXAMPLE, flows_page
from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.load import FlowFile, load_flow

PAGE = Path(__file__).parents[4] / "docs" / "flows.md"


def test_the_page_is_current() -> None:
    """docs/flows.md is what `python -m nvrx_slurm.lab.flow.docs` writes."""
    assert PAGE.read_text() == flows_page(), "run: python -m nvrx_slurm.lab.flow.docs > docs/flows.md"


def test_every_key_and_every_fault_is_on_the_page() -> None:
    """Whatever a flow may say is told."""
    for name in (*FlowFile.__struct_fields__, *FAULTS):
        assert f"| `{name}` |" in flows_page(), name


def test_the_example_is_a_flow(write: Callable[[str], Path]) -> None:
    """What the page begins with can be copied and run."""
    assert load_flow(write(EXAMPLE)).name == "spare-takes-over"
