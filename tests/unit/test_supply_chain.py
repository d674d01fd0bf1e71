"""All that this project installs, and all that it releases, is listed with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PYPI = ("https://pypi.org/simple", "https://files.pythonhosted.org/")
GROUPS = {
    "core": PYPROJECT["project"]["dependencies"],
    **PYPROJECT["project"]["optional-dependencies"],
    **PYPROJECT["dependency-groups"],
}
LOCKED: dict[str, list[dict[str, Any]]] = {}
for package in LOCK["package"]:
    LOCKED.setdefault(package["name"], []).append(package)


@pytest.mark.parametrize("group", GROUPS)
def test_every_requirement_is_locked(group: str) -> None:
    """Each of pyproject.toml's requirements has a version in uv.lock that satisfies it: `make lock` writes them."""
    for requirement in map(Requirement, GROUPS[group]):
        if (name := canonicalize_name(requirement.name)) != "nvrx-slurm":
            versions = [Version(package["version"]) for package in LOCKED[name]]
            assert any(version in requirement.specifier for version in versions), requirement


def test_the_lock_is_of_these_requirements() -> None:
    """The lock's copy of the requirements equals pyproject.toml: the same names with the same bounds."""
    (own,) = LOCKED["nvrx-slurm"]
    developing = own["metadata"]["requires-dev"].values()
    copied = [*own["metadata"]["requires-dist"], *(each for group in developing for each in group)]
    written = [Requirement(text) for group in GROUPS.values() for text in group]
    assert {(each["name"], SpecifierSet(each.get("specifier", ""))) for each in copied} == {
        (canonicalize_name(each.name), each.specifier) for each in written
    }


def test_every_locked_file_has_a_hash_and_comes_from_pypi() -> None:
    """The lock names no other index, such as a mirror on a developer's machine."""
    for package in LOCK["package"]:
        if package["name"] == "nvrx-slurm":
            continue
        assert package["source"] == {"registry": PYPI[0]}
        files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
        assert files, package["name"]
        for file in files:
            assert file["url"].startswith(PYPI[1])
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", file["hash"])


def test_the_tools_of_a_release_are_those_of_the_lock() -> None:
    """ci/tools.txt, which pip installs with --require-hashes, names the lock's versions and hashes."""
    text = (ROOT / "ci" / "tools.txt").read_text()
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    assert {"build", "cyclonedx-bom", "editables", "hatchling", "uv"} <= {name for name, _ in found}
    for name, version in found:
        assert version in {package["version"] for package in LOCKED[name]}, name
    known = {
        file["hash"]
        for packages in LOCKED.values()
        for package in packages
        for file in [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    }
    assert set(re.findall(r"sha256:[0-9a-f]{64}", text)) <= known


@pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem
)
def test_workflows_use_actions_by_commit(workflow: Path) -> None:
    """A tag can be moved, a commit cannot; the tag is in a comment beside it for the reader."""
    for line in workflow.read_text().splitlines():
        if "uses:" in line:
            assert re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line
