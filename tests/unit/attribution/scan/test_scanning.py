"""The hits in a file do not depend on how it is read, packed, encoded or labelled."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.attribution.rules.catalogue import Catalogue, Rule, load_catalogue
from nvrx_slurm.attribution.scan import LogFile, scan, scanning
from nvrx_slurm.attribution.scan.blocks import KEPT_OF_A_LINE_BYTES, LONGEST_LINE_BYTES, LogBlock, blocks
from nvrx_slurm.attribution.scan.matching import ONE_BY_ONE, LineMatcher, Sheet
from nvrx_slurm.attribution.scan.model import KEPT, Hit
from nvrx_slurm.attribution.scan.prefilter import Prefilter, Search, Searcher, prefilter_of
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.journal.sealed import SealedFolder
from tests.unit.attribution.scan.logs import CATALOGUE, found, rule, scanned

OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
FILE = LogFile(Path("/logs/all.log"), None, None, "mixed")

LINES = st.sampled_from(
    [
        OOM,
        b"[rank3]: ValueError: x",
        b"\x1b[31mValueError\x1b[0m: coloured",
        b"2026-11-21T18:00:00Z node1 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1",
        b"ValueError: retried",
        b'{"level": "error", "rank": 2, "msg": "failed", "exc_info": "Traceback:\\n  File\\nValueError: x\\r\\n"}',
        b'{"log": "torch.OutOfMemoryError: CUDA out of memory\\n", "stream": "stderr", "time": "2026-11-21T18:00Z"}',
        b'{"msg": "ValueError: torn',
        b"Loss is NaN",
        b"loss 1.23",
        b" 10%|#         | 1/10\r 20%|##        | 2/10",
        b"Traceback (most recent call last):",
        b'  File "/work/train.py", line 12, in step',
        b"\0\0\0",
        b"\xe4\xff latin",
        b"x" * (LONGEST_LINE_BYTES + 7),
        b"",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r", b"\0"])
TEXTS = st.lists(st.tuples(LINES, ENDS).map(b"".join), max_size=30).map(b"".join)


def read(pieces: list[bytes]) -> list[Hit]:
    matcher = LineMatcher(Searcher(prefilter_of(CATALOGUE)), Sheet(FILE, False, 0.0), lambda: False)
    for block in blocks(pieces):
        matcher.read(block)
    return matcher.hits()


@given(text=TEXTS, data=st.data())
def test_pieces(text: bytes, data: st.DataObject) -> None:
    """Hits are the same however the file is split into pieces."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces) == read([text])


@given(text=TEXTS)
def test_line_by_line(text: bytes) -> None:
    """A scan finds what each rule's own pattern finds, line by line."""
    hits = read([text])
    expected = []
    prefilter = prefilter_of(CATALOGUE)
    sheet = Sheet(FILE, False, 0.0)
    for block in blocks([text]):
        for begin, line in _lines(block):
            if not any(sheet.match(noise, line) for noise in prefilter.noise):
                matching = (rule.name for rule in prefilter.rules if sheet.match(rule, line))
                expected += [(block.offset_of(begin), name) for name in matching]
    assert [(hit.offset, hit.rule.name) for hit in hits] == expected


SOME = st.sampled_from([OOM, b"[rank3]: ValueError: x", b"ValueError: retried", b"loss 1.23"])
MANY = st.lists(st.tuples(SOME, st.integers(1, 40)), max_size=40)


@given(runs=MANY, every=st.integers(20, 2000))
def test_first_and_last(runs: list[tuple[bytes, int]], every: int) -> None:
    """Of each rule the first 8 lines and the last 8 are kept, however many there are and in however many blocks."""
    text = b"".join((line + b"\n") * count for line, count in runs)
    hits = read([text[at : at + every] for at in range(0, len(text), every)])
    lines = [line for line, count in runs for _ in range(count)]
    told = {"oom": [OOM], "value": [b"[rank3]: ValueError: x"], "raised": [b"[rank3]: ValueError: x"]}
    for name, texts in told.items():
        numbers = [number for number, line in enumerate(lines, 1) if line in texts]
        kept = [hit.line for hit in hits if hit.rule.name == name]
        assert kept == sorted({*numbers[:KEPT], *numbers[-KEPT:]})


def _lines(block: LogBlock) -> list[tuple[int, bytes]]:
    text, begin, lines = block.text, 0, []
    for at in range(len(text) + 1):
        if text[at : at + 1] in (b"\n", b"\r", b"\0", b""):
            lines.append((begin, text[begin:at]))
            begin = at + 1
    return lines


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_packed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    """A packed file is read as its content is."""
    log = scanned(tmp_path / "a.log", pack(b"fine\n" * 1000 + OOM + b"\n"))
    assert found(log) == [("oom", 1001, OOM.decode())]
    assert log.bytes_read == 5 * 1000 + len(OOM) + 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "latin-1"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    """Text is decoded in the encodings that logs have."""
    assert found(scanned(tmp_path / "a.log", "ValueError: größe\n".encode(encoding)))[0] == (
        "value",
        1,
        "ValueError: größe",
    )


def test_torn_gzip(tmp_path: Path) -> None:
    """If a packed file is torn, what can be unpacked is read, and the tear is a problem."""
    packed = gzip.compress(OOM + b"\n" + os.urandom(10_000).hex().encode())
    log = scanned(tmp_path / "a.log.gz", packed[:-100])
    assert [hit.rule.name for hit in log.hits] == ["oom"]
    assert "torn" in log.problems[0]


def test_progress_bar(tmp_path: Path) -> None:
    """An error after a progress bar that was redrawn many times is found, with the line number that an editor
    shows."""
    log = scanned(tmp_path / "a.log", b"start\n" + b" 10%|#    | 1/10\r" * 100_000 + OOM + b"\n")
    assert found(log) == [("oom", 2, OOM.decode())]


def test_line_without_end(tmp_path: Path) -> None:
    """A very long line is read in parts, and what comes after it is found."""
    log = scanned(tmp_path / "a.log", b"x" * (3 << 20) + b"\n" + OOM)
    assert found(log) == [("oom", 2, OOM.decode())]
    assert log.hits[0].offset == (3 << 20) + 1


def test_hole(tmp_path: Path) -> None:
    """A hole of NUL bytes before a line does not hide it."""
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.seek(5 << 20)
        file.write(OOM + b"\n")
    assert found(scanned(path, path.read_bytes())) == [("oom", 1, OOM.decode())]


def test_many(tmp_path: Path) -> None:
    """Of many lines the first and the last are kept."""
    count = 20 * ONE_BY_ONE
    lines = b"".join(b"ValueError: number %d\n" % number + b"fine\n" * 9 for number in range(count))
    log = scanned(tmp_path / "a.log", lines)
    kept = [hit.text for hit in log.hits if hit.rule.name == "value"]
    numbers = [*range(KEPT), *range(count - KEPT, count)]
    assert kept == [f"ValueError: number {number}" for number in numbers]


def test_noise(tmp_path: Path) -> None:
    """A line that a noise rule matches counts for no rule, and noise has no hits."""
    log = scanned(tmp_path / "a.log", b"ValueError: retried\nValueError: real\n")
    assert {hit.text for hit in log.hits} == {"ValueError: real"}


def test_what_a_hit_contains(tmp_path: Path) -> None:
    """A hit has the rank, node and time of its label and stamp, and the pattern's groups."""
    stamped = b"2026-11-21T18:00:00Z node7 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1"
    log = scanned(tmp_path / "a.log", b"fine\n[rank12]: " + stamped + b"\n")
    hit = log.hits[0]
    assert (hit.rank, hit.node, hit.line, hit.offset) == (12, "node7", 2, 5)
    assert (hit.t, hit.groups) == (1795284000.0, {"gpu": "PCI:0000:1b:00", "xid": "79"})


def test_groups_name_rank_and_node(tmp_path: Path) -> None:
    """If neither label nor file names rank and node, the pattern's groups do."""
    hit = scanned(tmp_path / "a.log", b"the rank 5 on node n3\n").hits[0]
    assert (hit.rank, hit.node) == (5, "n3")
    assert scanned(tmp_path / "a.log", b"the rank 5 on node n3\n", rank=2).hits[0].rank == 2


def test_srun_labels(tmp_path: Path) -> None:
    """In a file that `srun --label` wrote, the number before each line is its rank; in other files it is not."""
    labelled = b"".join(b"%2d: fine\n" % (number % 16) for number in range(200)) + b" 7: ValueError: x\n"
    assert {hit.rank for hit in scanned(tmp_path / "a.log", labelled).hits} == {7}
    assert not scanned(tmp_path / "b.log", b"fine\n" * 200 + b" 7: ValueError: x\n").hits


def test_tails_and_times(tmp_path: Path) -> None:
    """A file's last lines are kept, and the times of its first and last stamps."""
    lines = [f"2026-11-21T18:{minute:02}:00Z step {minute}" for minute in range(60)]
    log = scanned(tmp_path / "a.log", "\n".join(["no stamp", *lines, "\x1b[1mno stamp\x1b[0m", ""]).encode())
    read = log.of(log.files[0])
    assert read.tail == (*lines[-19:], "no stamp")
    assert (read.first_t, read.last_t) == (1795284000.0, 1795284000.0 + 59 * 60)


def test_long_line_is_cut_around_its_match(tmp_path: Path) -> None:
    """A long line's text is at most 400 characters, and shows what matched."""
    hit = scanned(tmp_path / "a.log", b"y" * 3000 + b" the loss is nan here " + b"z" * 3000).hits[0]
    assert len(hit.text) <= 400
    assert "loss is nan" in hit.text


def test_line_that_is_not_searched_to_its_end(tmp_path: Path) -> None:
    """The part of a line beyond the limit is not searched and is a problem; a line of just that length is none."""
    long, longer = b"y" * KEPT_OF_A_LINE_BYTES + b"\n", b"z" * (KEPT_OF_A_LINE_BYTES + 99) + b"\n"
    (problem,) = scanned(tmp_path / "a.log", long + longer + long + longer).problems
    assert problem == f"{tmp_path / 'a.log'} has lines of more than 64 KiB: 200 bytes of them are not searched"
    assert scanned(tmp_path / "b.log", long + OOM).problems == ()


def test_unreadable(tmp_path: Path) -> None:
    """A file that cannot be read is a problem that names it; the others are read."""
    (tmp_path / "a.log").write_bytes(OOM)
    (tmp_path / "core").write_bytes(b"\x7fELF" + OOM)
    os.mkfifo(tmp_path / "fifo")
    paths = [tmp_path / name for name in ("a.log", "core", "fifo", "gone.log")]
    log = scan([LogFile(path, None, None, "mixed") for path in [*paths, Path("/dev/null")]], CATALOGUE)
    assert len(log.hits) == 1
    wrong = ["core is no log but a program or a core dump", "fifo is a FIFO, no log", "gone.log No such file"]
    assert [said in problem for said, problem in zip(wrong, log.problems, strict=False)] == [True] * 3
    assert "/dev/null is a device" in log.problems[3]


def test_order(tmp_path: Path) -> None:
    """Hits are in the order of the files."""
    logs = []
    for number in range(20):
        path = tmp_path / f"rank-{number}.log"
        path.write_bytes(b"fine\n" * number + b"ValueError: %d\n" % number)
        logs.append(LogFile(path, number, None, "out"))
    found = [hit.rank for hit in scan(logs, CATALOGUE).hits]
    assert list(dict.fromkeys(found)) == list(range(20))


def test_stopped(tmp_path: Path) -> None:
    """A scan that is stopped says how many files it has read."""
    path = tmp_path / "a.log"
    path.write_bytes(OOM)
    stop = threading.Event()
    stop.set()
    log = scan([LogFile(path, None, None, "mixed")], CATALOGUE, stop=stop)
    assert log.problems == ("stopped before the end: 0 of 1 files are read",)


def test_nothing_to_look_for(tmp_path: Path) -> None:
    """Without rules a file is still read; a rule that no search can find is refused."""
    path = tmp_path / "a.log"
    path.write_bytes(b"last\n")
    logs = [LogFile(path, None, None, "mixed")]
    assert scan(logs, Catalogue(())).of(logs[0]).tail == ("last",)
    with pytest.raises(ConfigError) as caught:
        scan(logs, Catalogue((rule("any", ".*"),)))
    assert caught.value.key == "any"


def test_search_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds no memory ends the scan with its error at once, and not only after `stop` is set."""

    def search(rules: Sequence[Rule], forms: str, kept: SealedFolder | None) -> Callable[[], Search]:
        def begin() -> Search:
            raise MemoryError

        return begin

    monkeypatch.setattr(scanning, "prefilter_of", lambda catalogue: Prefilter(catalogue, search=search))
    logs = [LogFile(tmp_path / name, None, None, "mixed") for name in ("a.log", "b.log")]
    stop = threading.Event()
    bound = threading.Timer(10.0, stop.set)
    bound.start()
    try:
        with pytest.raises(MemoryError):
            scan(logs, CATALOGUE, stop=stop)
    finally:
        bound.cancel()


def test_shipped_rules(tmp_path: Path) -> None:
    """Every sample of every shipped rule is found in a file of them all."""
    catalogue = load_catalogue()
    found = [rule for rule in catalogue.rules if rule.role != "noise" and not rule.below]  # below: test_exceptions.py
    samples = [(rule, sample) for rule in found for sample in rule.sample]
    path = tmp_path / "a.log"
    path.write_text("".join(f"{sample}\n" for _, sample in samples))
    read = scan([LogFile(path, None, None, "mixed")], catalogue)
    noise = [rule for rule in catalogue.rules if rule.role == "noise"]
    expected = {
        rule.name for rule, sample in samples if not any(other.pattern.search(sample.encode()) for other in noise)
    }
    assert expected - {hit.rule.name for hit in read.hits} == set()
