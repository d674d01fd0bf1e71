"""Is in a built sdist and wheel what belongs there, and nothing else? `python -m ci.dist dist`, after `make dist`."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

IN_WHEEL = ("nvrx_slurm/", "nvrx_slurm-")  # the package, and its .dist-info
IN_SDIST = (
    ".ci/", ".github/", ".gitignore", "CHANGELOG.md", "LICENSE", "Makefile", "PKG-INFO", "README.md", "SECURITY.md",
    "bench/", "ci/", "docs/", "examples/", "nvrx_slurm/", "pyproject.toml", "sbatch/", "tests/", "uv.lock",
)  # fmt: skip
NEEDED = ("nvrx_slurm/py.typed", "nvrx_slurm/sbatch/job.sh.template", "nvrx_slurm/cli/__init__.py")
NEVER = (".pyc", ".so", ".env", "store.json", "munge.key")


def strangers(names: Iterable[str], expected: tuple[str, ...]) -> list[str]:
    """The files that do not belong there."""
    return [name for name in names if not name.startswith(expected) or name.endswith(NEVER)]


def problems(folder: Path) -> list[str]:
    """What is wrong with the distributions of this folder, in words."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{folder} holds {len(wheels)} wheels and {len(sdists)} sdists, and not one of each"]
    with zipfile.ZipFile(wheels[0]) as wheel, tarfile.open(sdists[0]) as sdist:
        in_wheel = wheel.namelist()
        in_sdist = [member.name.partition("/")[2] for member in sdist.getmembers()]
        found = [f"{wheels[0].name}: {name} does not belong there" for name in strangers(in_wheel, IN_WHEEL)]
        found += [f"{sdists[0].name}: {name} does not belong there" for name in strangers(in_sdist, IN_SDIST)]
        found += [f"{wheels[0].name}: {name} is missing" for name in NEEDED if name not in in_wheel]
        found += [
            f"{sdists[0].name}: {member.name} is a link" for member in sdist if member.issym() or member.islnk()
        ]
    return found


def main(arguments: list[str]) -> int:
    found = problems(Path(*arguments))
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
