"""Prepared jobs that are kept, as `.pyc` files are: what has not changed is not loaded and rendered again.

An entry's name is a SHA-256 over everything that a prepared job is made of (`key_of`), so none is ever stale.
Whatever is wrong with the cache, jobs are prepared anew: nothing here raises.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import nvrx_slurm
from nvrx_slurm.api.prepared import PreparedJob
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.site import site_files
from nvrx_slurm.jobspec.template import TEMPLATE, template_folder
from nvrx_slurm.journal.sealed import SealedFolder

MOST_ENTRIES = 64
_MAKERS = (
    "api/prepared.py",
    "api/script_cache.py",
    "errors.py",
    "journal/records.py",
    "journal/verdicts.py",
    "jobspec/*.py",
)
"""The modules of this package that have a say in what a prepared job is."""


class ScriptCache:
    """Prepared jobs in a folder of their own, which is its user's alone (0700); the last used ones are kept."""

    def __init__(self, folder: Path) -> None:
        self._entries = SealedFolder(folder, MOST_ENTRIES)

    def get(self, key: str) -> PreparedJob | None:
        """What was put under this key, or None."""
        body = self._entries.get(key)
        return PreparedJob(**json.loads(body)) if body is not None else None

    def put(self, key: str, job: PreparedJob) -> None:
        """Keep it, unless it must be checked against the world each time, or the folder will not have it."""
        if not job.uses_site_store:
            self._entries.put(key, json.dumps(dataclasses.asdict(job)).encode())


def key_of(job_file: Path, folder: Path, cluster: str, flags: Sequence[object]) -> str | None:
    """The name of the job that these make, here and now; `flags` in any form that tells them apart.

    None where job.yaml cannot be read, or only once, as a pipe can.
    """
    digest = hashlib.sha256()
    try:
        if not job_file.is_file():
            return None
        for part in _inputs(job_file, folder, cluster, flags):
            data = part if isinstance(part, bytes) else repr(part).encode()
            digest.update(b"%d:" % len(data))
            digest.update(data)
    except (OSError, RuntimeError, ValueError):  # what a path can be wrong with
        return None
    return digest.hexdigest()


def _inputs(job_file: Path, folder: Path, cluster: str, flags: Sequence[object]) -> Iterator[object]:
    yield sys.executable, sys.version, cluster, tuple(flags)
    yield str(Path.cwd()), str(folder.resolve())
    yield sorted((name, value) for name, value in env.overrides().items() if name not in env.SECRETS)
    yield from _contents([job_file.resolve()])
    yield from _contents(path for path in site_files() if path.is_file())
    yield from _contents([template_folder() / TEMPLATE])
    package = Path(nvrx_slurm.__file__).parent
    for pattern in _MAKERS:
        yield from _contents(sorted(package.glob(pattern)))
    # Whoever installs, upgrades or removes a library changes the folder that it lies in.
    libraries = (Path(entry) for entry in sys.path if entry.endswith("-packages"))
    yield [(str(path), path.stat().st_mtime_ns) for path in libraries if path.is_dir()]


def _contents(paths: Iterable[Path]) -> Iterator[object]:
    for path in paths:
        yield str(path)
        yield path.read_bytes()
