"""docs/inprocess.md."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta
from pathlib import Path

from nvrx_slurm.inprocess import Wrapper
from nvrx_slurm.inprocess.timeline import RestartPart

PAGE = Path(__file__).parents[3] / "docs" / "inprocess.md"


def test_every_option_is_documented_with_its_default():
    """The page has the options of `Wrapper` in any order, with their defaults and units."""
    told = {name: default for line in PAGE.read_text().splitlines() for name, default in _option(line).items()}
    parameters = list(inspect.signature(Wrapper.__init__).parameters.values())[1:]
    assert set(told) == {parameter.name for parameter in parameters}
    times = {each.name: each.default for each in parameters if isinstance(each.default, timedelta)}
    assert {name: told[name] for name in times} == {n: f"{t.total_seconds():g} s" for n, t in times.items()}


def _option(line: str) -> dict[str, str]:
    """Each name's default in a row of the table of options; empty for any other line."""
    row = re.fullmatch(r"\| (`[a-z_`, ]+`) \| (`.+?`(?:, `.+?`)?|[\d.]+ s) \| .+ \|", line)
    if row is None:
        return {}
    names, defaults = re.findall(r"`(\w+)`", row[1]), row[2].split("`, `")
    return dict(zip(names, defaults, strict=True))


def test_every_part_of_a_timeline_is_documented():
    """The page names all phases."""
    page = PAGE.read_text()
    assert [phase for phase in RestartPart if f"`{phase}`" not in page] == []
