"""The files of tests/corpus keep every byte of a log; the commands of `python -m ci.corpus` read and change them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import cases, corpus
from ci.cases import CORPUS, PARTS, Case, Label, pack, part_file, read_folder, read_part, write_part
from nvrx_slurm.errors import ConfigError
from nvrx_slurm.journal.verdicts import Scope, Verdict

LABEL = Label(verdict=(Verdict.STOP,), fault=("key_error",), scope=(Scope.USER_CODE,), why="A key is missing.")
AWKWARD = {
    "logs/empty": b"",
    "logs/no-line-end": b"a\nb",
    "logs/crlf": b"a\r\n\rprogress\rprogress\r\n",
    "logs/nul": b"\0\n\0",
    "logs/latin-1": b"caf\xe9\nascii\n\xff\xfe\n",
    "logs/utf-16": "ein Wort\nnoch eins\n".encode("utf-16"),
    "logs/surrogate": b"\xed\xb2\x80\n",
    "logs/separators": "a\u2028b\u0085c\n\x0c\x1c\n".encode(),
    "logs/escapes": b'\x1b[31m"red"\\n\x1b[0m\n',
    "logs/health/n1.txt": "héllo ✓\n".encode(),
    "logs/rank-0.out.gz": gzip.compress(b"step 1\n", mtime=0),
    "earlier/cycle-0/rank-0.out": b"step 0\n",
}


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A case as a contributor writes it."""
    folder = tmp_path / "mine" / "key-missing"
    Case("dev", "", LABEL, AWKWARD).extract(folder)
    return folder


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus of four small parts in place of tests/corpus."""
    for part in PARTS:
        write_part(part, [Case(part, title, LABEL, AWKWARD) for title in ("a-key", "b-key")], tmp_path)
    for function in (cases.read_part, cases.write_part, cases.part_file):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    return tmp_path


# ---------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_as_add_would_write_it(part: str) -> None:
    """Cases are sorted, each name occurs once, and `pack` gives the bytes of the file again."""
    read = read_part(part)
    assert len({case.title for case in read}) == len(read) > 20
    assert pack(read) == part_file(part).read_bytes()


@pytest.mark.parametrize("part", PARTS)
def test_folders_of_a_part_hold_the_same_bytes(part: str, tmp_path: Path) -> None:
    """Extracted and read again, a case has the same label and the same bytes in the same files."""
    before = read_part(part)[::4]
    for case in before:
        case.extract(tmp_path / case.title)
        written = files_below(tmp_path / case.title)
        written.pop("case.yaml")
        assert written == case.files
    assert [read_folder(part, tmp_path / case.title) for case in before] == before
    assert len(before) >= 6


def test_awkward_bytes_survive(folder: Path, tmp_path: Path) -> None:
    """Line ends of every kind, NULs, bytes that are not UTF-8, and compressed files are read back unchanged."""
    case = read_folder("dev", folder)
    assert case == Case("dev", "key-missing", LABEL, AWKWARD)
    write_part("dev", [case], tmp_path)
    assert read_part("dev", tmp_path) == [case]


@given(st.dictionaries(st.sampled_from(["logs/a", "logs/b/c", "earlier/cycle-0/a"]), st.binary()))
def test_any_bytes_survive(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    """Any bytes of a log are read back unchanged."""
    root = tmp_path_factory.getbasetemp() / "any"
    root.mkdir(exist_ok=True)
    case = Case("dev", "any", LABEL, files)
    write_part("dev", [case], root)
    assert read_part("dev", root) == [case]


def test_a_line_of_a_log_is_a_line_of_the_file() -> None:
    """A search or a diff shows single lines of the log; a line that is not UTF-8 is readable too."""
    packed = pack([Case("dev", "any", LABEL, {"logs/a": b'KeyError: "a"\ncaf\xe9\n'})]).decode().splitlines()
    assert packed[1:] == ['{"file": "logs/a"}', r'"KeyError: \"a\"\n"', r'{"latin-1": "caf\u00e9\n"}']


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "line",
    [
        '"a line of no file"',
        '{"file": "logs/of-no-case"}',
        '{"case": "a", "verdict": ["STOP"], "fault": [], "why": "", "verdickt": 1}',
        '{"case": "a", "verdict": ["STOP"], "fault": [], "why": ""}\n{"file": "logs/../../out"}',
        '{"case": "a", "verdict": ["STOP"], "fault": [], "why": ""}\n{"file": "/etc/passwd"}',
        '{"case": "a", "verdict": ["STOP"], "fault": [], "why": ""}\n{"file": "logs/a"}\n{"latin-1": "\\u0100"}',
        '{"case": "a", "verdict": ["STOP"], "fault": [], "why": ""}\n<<<<<<< ours',
    ],
)
def test_a_wrong_line_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    """The last line of the file is wrong: the error has the file and the number of that line."""
    part_file("dev", tmp_path).write_text(f"{line}\n")
    with pytest.raises(ConfigError) as raised:
        read_part("dev", tmp_path)
    assert (raised.value.file, raised.value.line) == (str(tmp_path / "dev.jsonl"), line.count("\n") + 1)


def test_a_wrong_label_is_an_error_that_names_its_file(folder: Path) -> None:
    """An unknown key is refused, with the file."""
    (folder / "case.yaml").write_text("verdict: STOP\nfault: [key_error]\nverdickt: STOP\nwhy: so.\n")
    with pytest.raises(ConfigError, match="verdickt") as raised:
        read_folder("dev", folder)
    assert raised.value.file == str(folder / "case.yaml")


@pytest.mark.parametrize("where", ["train.log", "logs/link", "case.yaml", "logs"])
def test_a_folder_that_is_no_case(folder: Path, where: str) -> None:
    """A file beside logs/, a symbolic link, no label, no logs: each is an error that names the path, and no file is
    skipped silently."""
    path = folder / where
    match where:
        case "train.log":
            path.write_text("step 1\n")
        case "logs/link":
            path.symlink_to("rank-0.out.gz")
        case "case.yaml":
            path.unlink()
        case "logs":
            path.rename(folder / "earlier" / "cycle-1")
    with pytest.raises(ConfigError) as raised:
        read_folder("dev", folder)
    assert raised.value.file == str(folder if where == "logs" else path)


# ---------------------------------------------------------------------------------------------- commands


def test_add_changes_only_the_lines_of_its_case(copied: Path, folder: Path) -> None:
    """An added case is inserted in the order of names, and the lines of the other cases stay."""
    before = part_file("dev", copied).read_text().splitlines()
    assert corpus.main(["add", "dev", str(folder)]) == 0
    after = part_file("dev", copied).read_text().splitlines()
    assert [case.title for case in read_part("dev", copied)] == ["a-key", "b-key", "key-missing"]
    assert after[: len(before)] == before
    assert read_part("fresh", copied) == [Case("fresh", title, LABEL, AWKWARD) for title in ("a-key", "b-key")]


def test_add_replaces_a_case_only_where_asked(copied: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is taken is refused, and the file stays as it was; with --replace the case is replaced."""
    named = folder.rename(folder.parent / "a-key")
    (named / "logs" / "nul").write_bytes(b"changed\n")
    before = part_file("dev", copied).read_bytes()
    assert corpus.main(["add", "dev", str(named)]) == 2
    assert "dev/a-key" in capsys.readouterr().err
    assert part_file("dev", copied).read_bytes() == before
    assert corpus.main(["add", "dev", str(named), "--replace"]) == 0
    assert [(case.title, case.files["logs/nul"]) for case in read_part("dev", copied)] == [
        ("a-key", b"changed\n"),
        ("b-key", AWKWARD["logs/nul"]),
    ]


def test_extract_writes_a_part_or_one_case(copied: Path, tmp_path: Path) -> None:
    """The folders have the form that `add` takes; a folder that exists is not written to."""
    assert corpus.main(["extract", "dev/b-key", str(tmp_path / "one")]) == 0
    assert read_folder("dev", tmp_path / "one" / "b-key").files == AWKWARD
    assert corpus.main(["extract", "dev", str(tmp_path / "one")]) == 2
    assert not (tmp_path / "one" / "a-key").exists()
    assert corpus.main(["extract", "dev", str(tmp_path / "all")]) == 0
    assert {path.name for path in (tmp_path / "all").iterdir()} == {"a-key", "b-key"}


def test_show_raw_prints_the_bytes(copied: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """It prints the files that match the pattern, or all files."""
    assert corpus.main(["show", "dev/a-key", "logs/latin-1", "--raw"]) == 0
    assert capfdbinary.readouterr().out == AWKWARD["logs/latin-1"]
    assert corpus.main(["show", "dev/a-key", "--raw"]) == 0
    assert capfdbinary.readouterr().out == b"".join(data for _, data in sorted(AWKWARD.items()))


def test_show_is_safe_on_a_terminal(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Label and logs are printed with terminal controls made visible and compressed files unpacked."""
    assert corpus.main(["show", "dev/a-key"]) == 0
    shown = capsys.readouterr().out
    assert "fault: [key_error]" in shown
    assert r'\x1b[31m"red"' in shown
    assert "\x1b" not in shown
    assert "step 1\n" in shown
    assert r"caf\xe9" in shown


def test_list_prints_a_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """It lists the cases of one part, or of all parts."""
    assert corpus.main(["list", "fresh"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == [case.name for case in read_part("fresh")]
    assert corpus.main(["list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == sum(len(read_part(part)) for part in PARTS)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["list", "nosuch"], "nosuch"),
        (["show", "nosuch/a"], "dev, held_out"),
        (["show", "dev"], "''"),
        (["show", "dev/ecc-one-gpuu"], "ecc-one-gpu"),
        (["show", "dev/ecc-one-gpu", "nosuch"], "logs/rank-0.err"),
        (["extract", "dev/nosuch", "/nowhere"], "nosuch"),
        (["add", "nosuch", "/nowhere"], "nosuch"),
        (["add", "dev", "/nowhere"], "/nowhere/case.yaml"),
    ],
)
def test_unknown_names_are_usage_errors(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code is 2, and the message names the unknown name or the valid ones."""
    try:
        code: object = corpus.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert named in capsys.readouterr().err
    assert not (CORPUS / "nosuch.jsonl").exists()
