"""`nvrx-slurm analyze`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.unit.cli.conftest import Nvrx

LOG = """\
2026-11-21 18:00:00,123 INFO train: loading
2026-11-21 18:00:01,456 INFO train: 8 ranks
Traceback (most recent call last):
  File "/work/train.py", line 12, in <module>
    main()
  File "/work/train.py", line 9, in main
    lr = config["lr"]
KeyError: 'lr'
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A training that lacks a key."""
    path = tmp_path / "train.log"
    path.write_text(LOG)
    return path


def test_a_page_for_people(nvrx: Nvrx, log: Path) -> None:
    """Plain text where it is no terminal: the verdict, the line in its context, what to do."""
    done = nvrx("analyze", log.name)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "STOP  key_error, of user code, confidence 0.70"
    assert any(line.startswith("first      ") and line.endswith("train.log:8") for line in lines)
    assert '         7 |     lr = config["lr"]' in lines
    assert ">        8 | KeyError: 'lr'" in lines
    assert any(line.startswith("hint       ") for line in lines)
    assert "\x1b" not in done.stdout


def test_json_is_what_the_schema_says(nvrx: Nvrx, log: Path) -> None:
    """Both are printed by the command."""
    answer = json.loads(nvrx("analyze", str(log), "--json").stdout)
    jsonschema.validate(answer, json.loads(nvrx("analyze", "--schema").stdout))
    assert (answer["verdict"], answer["fault"], answer["primary"]["line"]) == ("STOP", "key_error", 8)
    assert answer["latency_s"] > 0


def test_rules_of_ones_own(nvrx: Nvrx, log: Path, tmp_path: Path) -> None:
    """They are read beside the shipped ones."""
    mine = "missing_lr.mine:\n  fault: missing_lr\n  pattern: 'KeyError: .lr.'\n  verdict: STOP\n  scope: user_code\n"
    (tmp_path / "mine.yaml").write_text(f"{mine}  severity: 90\n  hint: Set lr in the configuration.\n")
    done = nvrx("analyze", log.name, "--rules", "mine.yaml")
    assert done.stdout.startswith("STOP  missing_lr")
    assert "Set lr in the configuration." in done.stdout


def test_only_one_rank(nvrx: Nvrx, tmp_path: Path) -> None:
    """What others say is left out."""
    (tmp_path / "rank-0.err").write_text(LOG)
    (tmp_path / "rank-1.err").write_text(LOG.replace("KeyError: 'lr'", "NameError: name 'lr' is not defined"))
    answer = json.loads(nvrx("analyze", ".", "--rank", "1", "--json").stdout)
    assert (answer["fault"], answer["ranks"]) == ("name_error", [1])


def test_nothing_wrong_is_said_as_well(nvrx: Nvrx, tmp_path: Path) -> None:
    """With 0 too: the command has done what it was asked for."""
    (tmp_path / "train.log").write_text("step 1 loss 2.0\n" * 50)
    done = nvrx("analyze", "train.log")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "UNKNOWN  cause unknown")
    assert "No line reports a failure." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a log file or a folder of logs"),
        (("none.log",), "none.log"),
        (("x", "--rules", "no.yaml"), "no.yaml"),
    ],
)
def test_what_is_wrong_is_one_message(nvrx: Nvrx, arguments: tuple[str, ...], message: str) -> None:
    """And 2."""
    done = nvrx("analyze", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr
