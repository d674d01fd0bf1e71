"""docs/rules.md."""

from __future__ import annotations

import re
from pathlib import Path

from nvrx_slurm.attribution.rules.catalogue import load_catalogue
from nvrx_slurm.attribution.rules.rulefile import KEYS

PAGE = (Path(__file__).parents[3] / "docs" / "rules.md").read_text()


def test_the_page_has_every_class() -> None:
    """Each class of failure has its row."""
    listed = set(re.findall(r"^\| `(\w+)` \| [A-Z]", PAGE.split("## Classes")[1], re.MULTILINE))
    assert listed == {rule.fault for rule in load_catalogue().rules}


def test_the_example_is_a_valid_file(tmp_path: Path) -> None:
    """The file that the page shows can be loaded as it is."""
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    path = tmp_path / "own.yaml"
    path.write_text(example[1])
    assert load_catalogue([path]).rules[-1].name == "trainer_error.bad_curriculum"


def test_the_page_explains_every_key() -> None:
    """Each key that a rule may have is explained."""
    keys = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE.split("## Classes")[0], re.M))))
    assert keys == set(KEYS)
