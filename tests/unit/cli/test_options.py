"""The flags of failure attribution, on every command that takes a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nvrx_slurm.errors import EXIT_USAGE
from nvrx_slurm.jobspec.flags import ATTRIBUTION, DEPRECATED_FLAGS, FLAGS
from tests.unit.cli.conftest import Nvrx

COMMANDS = ("submit", "run", "render", "config show", "ci matrix")
GIVEN = {
    "attrsvc_url": ("http://h/", "http://h"),
    "http_urls": ("http://u", ["http://u"]),
    "timeout": ("90s", "1m30s"),
    "decision_timeout": ("3s", "3s"),
    "aggregation": ("all", "all"),
    "slack.channel": ("c", "c"),
    "slack.token_file": ("s", "{here}/s"),
    "dataflow.url": ("http://d", "http://d"),
    "dataflow.index": ("i", "i"),
    "dataflow.token_file": ("/d", "/d"),
}
"""Key → what its flag is given, and what the key has then."""

SWITCHES = ("manage_attrsvc", "enable_lib", "enable_mcp", "dry_run")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_flags_stand_together_at_the_end_of_the_long_help(nvrx: Nvrx, command: str) -> None:
    """They follow all others, including `--help`, and are shown only by --help-all; flags of older releases are not
    shown."""
    usual, _, last = nvrx(*command.split(), "--help-all").stdout.partition("\nFailure attribution:\n")
    assert usual.strip() == nvrx(*command.split(), "--help").stdout.strip()
    assert "--help" in usual
    assert "--ft-" not in usual
    assert all(f"  {flag} " in last for flag in FLAGS.values())
    assert not any(flag in last for flag, _, _ in DEPRECATED_FLAGS.values())


def test_every_flag_sets_its_key_and_is_its_origin(nvrx: Nvrx, tmp_path: Path) -> None:
    """A flag wins over job.yaml and a variable; its path is relative to the current folder."""
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "job.yaml").write_text(
        "name: a\ncommand: x\nfault_tolerance: {attribution: {timeout: 9s}}\n"
    )
    flags = [f"{FLAGS[key]}={given}" for key, (given, _) in GIVEN.items()]
    shown = nvrx(
        *("config", "show", "below/job.yaml", "--json", "--origin", *flags),
        NVRX_SLURM_FAULT_TOLERANCE__ATTRIBUTION__TIMEOUT="8s",
    )
    rows = json.loads(shown.stdout)
    for key, (_, value) in GIVEN.items():
        wanted = value.format(here=tmp_path) if isinstance(value, str) else value
        assert rows[f"{ATTRIBUTION}.{key}"] == {"value": wanted, "origin": FLAGS[key]}, key
    assert set(GIVEN) | set(SWITCHES) == set(FLAGS)


@pytest.mark.parametrize("on", [True, False])
def test_a_switch_is_set_or_taken_back(nvrx: Nvrx, tmp_path: Path, on: bool) -> None:
    """`--ft-…` sets it and `--no-ft-…` clears it; the origin is the flag that was given."""
    (tmp_path / "job.yaml").write_text("name: a\ncommand: x\n")
    flags = {key: FLAGS[key] if on else FLAGS[key].replace("--", "--no-", 1) for key in SWITCHES}
    rows = json.loads(nvrx("config", "show", "--json", "--origin", *flags.values()).stdout)
    assert {key: rows[f"{ATTRIBUTION}.{key}"] for key in SWITCHES} == {
        key: {"value": on, "origin": flag} for key, flag in flags.items()
    }


def test_a_repeated_url_is_one_more_source(nvrx: Nvrx, tmp_path: Path) -> None:
    """The URLs keep the order in which they are given."""
    (tmp_path / "job.yaml").write_text("name: a\ncommand: x\n")
    urls = ("--ft-attribution-http-url", "http://b", "--ft-attribution-http-url", "http://a")
    assert json.loads(nvrx("config", "show", "--json", *urls).stdout)[f"{ATTRIBUTION}.http_urls"] == [
        "http://b",
        "http://a",
    ]


def test_a_mistake_is_reported_by_the_flag(nvrx: Nvrx, tmp_path: Path) -> None:
    """There is one message, with what is valid; a credential in it is not repeated."""
    (tmp_path / "job.yaml").write_text("name: a\ncommand: x\n")
    for flags, says in {
        (
            "--ft-attribution-timeout=soon",
        ): "--ft-attribution-timeout: fault_tolerance.attribution.timeout: 'soon' is",
        ("--ft-attrsvc-url=http://hunter2@h",): "--ft-attrsvc-url: fault_tolerance.attribution.attrsvc_url: must not",
        ("--ft-slack-token-file=f",): "--ft-slack-token-file: fault_tolerance.attribution.slack.channel: is required",
        ("--ft-attribution-endpoint=http://a", "--ft-attrsvc-url=http://a"): "--ft-attribution-endpoint and"
        " --ft-attrsvc-url say the same thing: keep fault_tolerance.attribution.attrsvc_url (--ft-attrsvc-url)",
    }.items():
        done = nvrx("config", "show", *flags)
        assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
        assert done.stderr.startswith(f"nvrx-slurm: error: {says}")
        assert "hunter2" not in done.stderr


def test_older_flags_work_and_are_reported_once(nvrx: Nvrx, tmp_path: Path) -> None:
    """One line on stderr for each names the new flag; stdout is the same as ever."""
    (tmp_path / "job.yaml").write_text("name: a\ncommand: x\n")
    older = (
        "--ft-attribution-backend=mcp",
        "--ft-attribution-backend=http://u",
        "--ft-attribution-endpoint=http://e",
    )
    done = nvrx("config", "show", "--json", *older)
    rows = json.loads(done.stdout)
    told = {key: rows[f"{ATTRIBUTION}.{key}"] for key in ("enable_mcp", "http_urls", "attrsvc_url")}
    assert told == {"enable_mcp": True, "http_urls": ["http://u"], "attrsvc_url": "http://e"}
    endpoint, backend = done.stderr.splitlines()
    assert endpoint.endswith("use --ft-attrsvc-url")
    assert backend.endswith("use --ft-attribution-http-url and --ft-attribution-enable-mcp")
    assert all(line.startswith("nvrx-slurm: DeprecationWarning: --ft-") for line in (endpoint, backend))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--of", "transport", "--nodes", "3"], "--nodes"),
        (["--of", "inprocess", "--minutes", "1", "--keep", "."], "--minutes, --keep"),
        (["--keep", "."], "--minutes"),
    ],
)
def test_no_option_of_a_simulation_is_ignored(nvrx: Nvrx, given: list[str], named: str) -> None:
    """An option that has no effect with the others is an error."""
    done = nvrx("ci", "simulate", "--seeds", "1", *given)
    assert done.returncode == EXIT_USAGE
    assert named in done.stderr
