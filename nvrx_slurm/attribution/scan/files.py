"""The log files below the paths that a user or the job names: found, attributed to ranks and nodes, opened.

Never follows a file that grows, never waits for a FIFO, touches no device, and maps nothing into memory: a process
that reads a mapped file dies when the file is truncated.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import functools
import gzip
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

from nvrx_slurm.attribution.scan.model import LogFile, LogKind
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.verdicts import Inquiry

PIECE_BYTES = 256 << 10

_UNPACKERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
}

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_NOT_TEXT = {
    b"\x7fELF": "a program or a core dump",
    b"PK\x03\x04": "a zip archive, such as a checkpoint",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
    b"\x89PNG": "an image",
    b"\x89HDF": "an HDF5 file",
    b"SQLite format 3\0": "a database",
    b"PAR1": "a Parquet file",
}

_KINDS = {
    stat.S_ISDIR: "a folder that cannot be listed",
    stat.S_ISFIFO: "a FIFO",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


# Set in a process that may read only some paths: whether it may read this one, which has no symlinks.
readable: Callable[[str], bool] | None = None


class Unreadable(Exception):
    """Why a file cannot be read, or not to its end. Becomes one of a scan's problems."""


def refusal(mode: int) -> str | None:
    """What a file is, by its st_mode, that cannot be read as a log; None: it can."""
    return next((what for is_it, what in _KINDS.items() if is_it(mode)), None)


@contextlib.contextmanager
def opened(path: Path) -> Generator[IO[bytes], None, None]:
    """The file, unbuffered. Raises Unreadable."""
    try:
        _refuse(path.stat().st_mode)  # before it is opened: opening may rewind a tape or wake a terminal
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            _refuse(os.fstat(descriptor).st_mode)  # it may have been replaced meanwhile
            # The path of the file that is open: a symlink put there between check and open changes nothing.
            if readable is not None and not readable(os.readlink(f"/proc/self/fd/{descriptor}")):  # noqa: PTH115  as it is
                raise Unreadable("does not lie below an allowed root")
            yield file
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None


def _refuse(mode: int) -> None:
    what = refusal(mode)
    if what is not None:
        raise Unreadable(f"is {what}, no log")


def pieces(file: IO[bytes], piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The text in pieces of at most about `piece_bytes`, as much as there was when this began.

    A packed file is unpacked, UTF-16 with a byte order mark becomes UTF-8. Raises Unreadable, also after some pieces.
    """
    descriptor = file.fileno()
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, 16, 0)
    for magic, what in _NOT_TEXT.items():
        if head.startswith(magic):
            raise Unreadable(f"is no log but {what}")
    unpack = next((unpack for magic, unpack in _UNPACKERS.items() if head.startswith(magic)), None)
    read = _plain(file, size, piece_bytes) if unpack is None else _unpacked(unpack(file), piece_bytes)
    first = next(read, b"")
    if not first.startswith(_UTF_16):
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from read
        return
    decoder = codecs.getincrementaldecoder("utf-16")("replace")
    yield decoder.decode(first).encode("utf-8", "replace")
    for piece in read:
        yield decoder.decode(piece).encode("utf-8", "replace")
    yield decoder.decode(b"", final=True).encode("utf-8", "replace")


def _plain(file: IO[bytes], size: int, piece_bytes: int) -> Iterator[bytes]:
    while size > 0:
        piece = file.read(min(piece_bytes, size))
        if not piece:
            raise Unreadable(f"was cut while it was read: {size} bytes are missing")
        size -= len(piece)
        yield piece


def _unpacked(file: IO[bytes], piece_bytes: int) -> Iterator[bytes]:
    with file:
        try:
            # `read1`, not `read`: what was unpacked before a tear is not lost.
            while piece := file.read1(piece_bytes):  # type: ignore[attr-defined]
                yield piece
        # bz2 raises a plain OSError for corrupt data, which `opened` reports.
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise Unreadable(f"is torn: {error}") from None


_RANK = re.compile(r"(?:^|[._-])(?<!local[._-])(?:global_?rank|rank|task|proc)[._-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_BARE_RANK = re.compile(
    r"(\d{1,3})\.(?:out|err|log|txt)|(?:std)?(?:out|err|log)[._-](\d{1,3})(?:\.(?:out|err|log|txt))?"
)
_TORCHRUN = re.compile(r"attempt_\d+/(\d{1,9})/std(?:out|err)\.log$")
_TRACE = re.compile(r"_trace(?:_rank)?_(\d{1,9})(?:\.\w+)?$")
_NODE = re.compile(r"(?:^|[._-])((?:node|nid|dgx|hgx|host|compute|cn)-?\d+(?:-\d+)*)(?=[._-]|$)")
_PARENTS_LOOKED_AT = 3


def log_file(path: Path, inquiry: Inquiry | None, *, flight_recorder: bool = False) -> LogFile:
    """Whose output a file holds, by its path (the layouts of this tool, torchrun, srun, NeMo and PyTorch) and by what
    is known of the job: a rank's node, a node's ranks."""
    parts = path.parts[-1 - _PARENTS_LOOKED_AT :]
    nodes = inquiry.nodes if inquiry else ()
    node: str | None = None
    if path.parent.name == "health":
        node = path.stem
    else:  # one of the job's nodes, or else what looks like a node's name
        node = next((named for part in reversed(parts) if (named := _node_in(part, nodes)) is not None), None)
        if node is None and (looks_so := _NODE.search(path.name)):
            node = looks_so[1]
    rank: int | None = None
    if torchrun := _TORCHRUN.search(path.as_posix()):
        local = int(torchrun[1])
        if inquiry is None or len(nodes) <= 1:
            rank = local
        elif node in nodes:  # each of several nodes has such a rank
            rank = nodes.index(node) * inquiry.workers_per_node + local
    elif bare := _BARE_RANK.fullmatch(path.name) or _TRACE.search(path.name):
        rank = int(next(filter(None, bare.groups())))
    else:
        found = (_RANK.search(part) for part in reversed(parts))
        rank = next((int(each[1]) for each in found if each), None)
    if node is None and rank is not None and inquiry is not None:
        node = inquiry.node_of(rank)

    name, kind = path.name.lower(), "mixed"
    if flight_recorder:
        kind = "flight_recorder"
    elif path.parent.name in ("stacks", "health"):
        kind = path.parent.name
    elif ".err" in name or "stderr" in name:
        kind = "err"
    elif "stdout" in name or (rank is not None and ".out" in name):
        kind = "out"
    return LogFile(path, rank, node, cast(LogKind, kind))


@functools.lru_cache(4096)  # a thousand files lie in one folder
def _node_in(part: str, nodes: tuple[str, ...]) -> str | None:
    """The longest of the nodes' names that stands in a part of a path."""
    named = (each for each in nodes if each in part)  # few do, and this costs little
    bounded = (each for each in named if re.search(rf"(?<![A-Za-z0-9]){re.escape(each)}(?![A-Za-z0-9])", part))
    return max(bounded, key=len, default=None)


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

    Below a folder, what is by its name no log (programs, checkpoints, hidden files) is left out. Raises UsageError
    for a path that is not there or cannot be a log, and where there is no log.
    """
    found: dict[tuple[int, int], LogFile] = {}
    empty: dict[tuple[int, int], LogFile] = {}
    seen: set[tuple[int, int]] = set()
    for path in paths:
        absolute = Path(os.path.abspath(path))  # noqa: PTH100  # `resolve` would lose the name that the user gave
        try:
            status = absolute.stat()
        except OSError as error:
            message = f"{absolute} cannot be read: {error.strerror}; name log files or folders that hold them"
            raise UsageError(message) from None
        files: Iterable[tuple[Path, tuple[int, int], bool]] = [(absolute, _identity(status), False)]
        if stat.S_ISDIR(status.st_mode):
            # Of a job's folder only its `logs`: the journal beside them quotes them.
            is_job = (absolute / "plan.json").is_file() and (absolute / "logs").is_dir()
            files = _below(absolute / "logs" if is_job else absolute, seen)
        elif what := refusal(status.st_mode):
            raise UsageError(f"{absolute} is {what}; name log files or folders that hold them")
        for file, identity, is_empty in files:
            if is_empty:
                empty[identity] = log_file(file, inquiry)
            elif identity not in found:
                found[identity] = log_file(file, inquiry, flight_recorder=_is_dump(file))
    # An empty log says nothing beside others; alone it says that nothing was printed.
    found = found or empty
    if not found:
        named = ", ".join(map(str, paths)) or "no path"
        raise UsageError(f"no log below {named}: name the files themselves, or the folder that holds them")
    return sorted(found.values(), key=lambda file: file.path)


def _below(top: Path, seen: set[tuple[int, int]]) -> Iterator[tuple[Path, tuple[int, int], bool]]:
    """All logs below a folder, and whether each is empty. `seen`: the folders that were entered, so that no loop of
    links is walked twice."""
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
                    name = entry.name
                    suffix = name.rpartition(".")[2].lower() if "." in name else ""
                    if name.startswith(".") or name in _NO_LOG_FOLDERS or suffix in _NO_LOG_SUFFIXES:
                        continue
                    with contextlib.suppress(OSError):  # it vanished, or is a link to nothing
                        status = entry.stat()
                        if stat.S_ISDIR(status.st_mode):
                            folders.append(entry.path)
                        elif stat.S_ISREG(status.st_mode):
                            yield Path(entry.path), _identity(status), not (status.st_size or status.st_blocks)
        except OSError:
            # The folder itself: a scan of it reports why it cannot be listed.
            yield Path(folder), (0, hash(folder)), False


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
