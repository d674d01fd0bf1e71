"""Finds log files below the paths that a user or the job names. Reads nothing but the heads of possible dumps."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvrx_slurm.attribution.scan.model import LogFile
from nvrx_slurm.attribution.scan.naming import log_file
from nvrx_slurm.attribution.scan.opening import Unreadable, opened, refusal
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.verdicts import Inquiry

_NO_LOG_SUFFIXES = frozenset(
    """
    py pyc pyi ipynb c cc cpp cu h hpp cuh rs go js ts sh sbatch md rst html css yaml yml toml cfg ini lock so a o whl
    pt pth ckpt safetensors bin npy npz h5 hdf5 parquet arrow onnx tar zip tgz zst png jpg jpeg gif svg pdf csv tsv
    distcp index idx db sqlite nsys-rep qdrep tfevents
    """.split()  # noqa: SIM905
)
_NO_LOG_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})
_DUMP_MARKS = (b"pg_config", b"entries", b"nccl_version")
_DUMP_HEAD_BYTES = 64 << 10


def find_logs(paths: Sequence[Path], inquiry: Inquiry | None) -> list[LogFile]:
    """The logs that `paths` name, and those below folders among them, each once, in the order of their paths.

    Of a job's folder only its `logs` count: the journal beside them quotes them. Below a folder, what is by its name
    no log (programs, checkpoints, hidden files) is left out; a folder that cannot be listed is in the result, so that
    a scan tells why. Raises UsageError for a path that is not there or cannot be a log, and where there is no log.
    """
    found: dict[tuple[int, int], LogFile] = {}
    seen: set[tuple[int, int]] = set()
    for path in paths:
        absolute = Path(os.path.abspath(path))  # noqa: PTH100  # `resolve` would lose the name that the user gave
        for file, identity, flight_recorder in _named(absolute, seen):
            found.setdefault(identity, log_file(file, inquiry, flight_recorder=flight_recorder))
    if not found:
        named = ", ".join(map(str, paths)) or "no path"
        raise UsageError(f"no log below {named}: name the files themselves, or the folder that holds them")
    return sorted(found.values(), key=lambda file: file.path)


_Found = tuple[Path, tuple[int, int], bool]


def _named(path: Path, seen: set[tuple[int, int]]) -> Iterator[_Found]:
    """What one of the paths comes to. Raises UsageError."""
    try:
        status = path.stat()
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; name log files or folders that hold them"
        ) from None
    if not stat.S_ISDIR(status.st_mode):
        what = refusal(status.st_mode)
        if what is not None:
            raise UsageError(f"{path} is {what}; name log files or folders that hold them")
        yield path, _identity(status), _is_dump(path)
        return
    is_job = (path / "plan.json").is_file() and (path / "logs").is_dir()
    yield from _below(path / "logs" if is_job else path, seen)


def _below(top: Path, seen: set[tuple[int, int]]) -> Iterator[_Found]:
    """All logs below a folder. `seen`: the folders that were entered, so that no loop of links is walked twice."""
    folders = [str(top)]
    while folders:
        folder = folders.pop()
        try:
            identity = _identity(os.stat(folder))  # noqa: PTH116  # a Path for each of 100,000 names takes seconds
            if identity in seen:
                continue
            seen.add(identity)
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _may_hold_logs(entry.name):
                        yield from _entry(entry, folders)
        except OSError:
            yield Path(folder), (0, hash(folder)), False


def _entry(entry: os.DirEntry[str], folders: list[str]) -> Iterator[_Found]:
    with contextlib.suppress(OSError):  # it vanished, or is a link to nothing
        status = entry.stat()
        if stat.S_ISDIR(status.st_mode):
            folders.append(entry.path)
        elif stat.S_ISREG(status.st_mode) and (status.st_size or status.st_blocks):
            path = Path(entry.path)
            yield path, _identity(status), _is_dump(path)


def _may_hold_logs(name: str) -> bool:
    suffix = name.rpartition(".")[2].lower() if "." in name else ""
    return not (name.startswith(".") or name in _NO_LOG_FOLDERS or suffix in _NO_LOG_SUFFIXES)


def _is_dump(path: Path) -> bool:
    """Whether a file is a dump of PyTorch's flight recorder: named as one, a pickle or JSON, with its keys."""
    if "trace" not in path.name:
        return False
    with contextlib.suppress(Unreadable), opened(path) as file:
        head = file.read(_DUMP_HEAD_BYTES)
        return head[:1] in (b"\x80", b"{") and any(mark in head for mark in _DUMP_MARKS)
    return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
