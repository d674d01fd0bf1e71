"""docs/flows.md."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.lab.flow.faults import FAULTS
from nvrx_slurm.lab.flow.load import FlowFile, load_flow

PAGE = (Path(__file__).parents[4] / "docs" / "flows.md").read_text()


def test_every_key_and_every_fault_is_on_the_page() -> None:
    """The page has every key and every fault of a flow."""
    for name in (*FlowFile.__struct_fields__, *FAULTS):
        assert f"| `{name}` |" in PAGE, name


def test_the_example_is_a_flow(write: Callable[[str], Path]) -> None:
    """The example at the start of the page can be copied and run."""
    example = PAGE.partition("```yaml\n")[2].partition("```")[0]
    assert load_flow(write(example)).name == "spare-takes-over"
