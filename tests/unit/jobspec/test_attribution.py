"""The block `fault_tolerance.attribution` and the keys that depend on it: what the plan gets, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.errors import ConfigError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.model import (
    AttributionSpec,
    DataflowSpec,
    FaultToleranceSpec,
    LlmSpec,
    ProgressSpec,
    SlackSpec,
)
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.jobspec.values import Allowance

Write = Callable[[str], Path]

BASE = "name: a\ncommand: x\nfault_tolerance:\n"
WHOLE = """\
  attribution:
    attrsvc_url: https://Attrsvc.example:443/
    enable_lib: false
    enable_mcp: true
    mcp_command: my-mcp --fast
    http_urls: ["https://other:8000", "http://[::1]:8000/base/"]
    token_file: t
    timeout: 50s
    decision_timeout: 5s
    dry_run: false
    aggregation: all
    rules: [r.yaml, /abs/s.yaml]
    llm: {url: "http://localhost:1234/v1", model: m, key_file: k, style: anthropic, timeout: 3s}
    slack: {channel: c, token_file: s, mention: "@here", url: "http://localhost:1"}
    dataflow: {url: "http://localhost:2", index: i, token_file: d}
    ledger: l
"""
CREDENTIALS = "must not hold credentials, since the job script would show them; put the token into a file (mode 0600)"
# lines below `fault_tolerance:` → what the message says after `job.yaml:`
BAD = {
    "attribution: {attrsvc_url: attrsvc}": "must look like https://host:8443, or http://…",
    "attribution: {attrsvc_url: 'ftp://h'}": "must look like",
    "attribution: {attrsvc_url: 'http://'}": "must look like",
    "attribution: {attrsvc_url: 'http://h:99999'}": "must look like",
    "attribution: {attrsvc_url: 'http://h/a b'}": "must look like",
    "attribution: {attrsvc_url: 'http://h/?a=b'}": "must end with its path",
    "attribution: {attrsvc_url: 'http://h/#a'}": "must end with its path",
    "attribution: {attrsvc_url: 'http://u:hunter2@h'}": f"{CREDENTIALS} named by fault_tolerance.attribution.token"
    "_file, or into NVRX_SLURM_ATTRSVC_TOKEN",
    "attribution: {http_urls: ['http://hunter2@h']}": CREDENTIALS,
    "attribution: {http_urls: ['http://h?access_token=hunter2']}": CREDENTIALS,
    "attribution: {slack: {channel: c, url: 'https://hooks.slack.com/services/T/B/hunter2'}}": f"{CREDENTIALS} named"
    " by fault_tolerance.attribution.slack.token_file, or into NVRX_SLURM_SLACK_TOKEN",
    "attribution: {dataflow: {index: i, url: 'http://u:hunter2@h'}}": "or into NVRX_SLURM_DATAFLOW_TOKEN",
    "attribution: {llm: {model: m, url: 'http://h?key=hunter2'}}": "or into NVRX_SLURM_LLM_KEY",
    "attribution: {ledger: 'redis://:hunter2@h'}": "must not hold a password, since the job script would show it",
    "attribution: {ledger: 'redis://'}": "must look like redis://host:6379/0",
    "attribution: {ledger: 'http://h/x'}": "must look like redis://host:6379/0",
    "attribution: {http_urls: ['http://h', 'http://H:80/']}": "names http://h a second time",
    "attribution: {attrsvc_url: 'http://h', http_urls: 'http://h'}": "names http://h a second time",
    "attribution: {attrsvc_url: 'http://h', manage_attrsvc: true}": "attribution.manage_attrsvc: starts a service for"
    " this job, and fault_tolerance.attribution.attrsvc_url names one that runs: set one of the two",
    "attribution: {aggregation: most}": "must be one of 'any' or 'all', not 'most'",
    "attribution: {decision_timeout: 2m}": "must be at most attribution.timeout (1m), not 2m",
    "attribution: {timeout: 5s, decision_timeout: 10s}": "must be at most attribution.timeout (5s), not 10s",
    "attribution: {decision_timeout: 10s}\n  rendezvous: {join_timeout: 8s}": "fault_tolerance.attribution."
    "decision_timeout: must be at most rendezvous.join_timeout (8s), not 10s",
    "attribution: {mcp_command: ''}": "must name a program",
    "attribution: {slack: {token_file: f}}": "fault_tolerance.attribution.slack.channel: is required",
    "attribution: {llm: {style: other, url: 'http://h', model: m}}": "must be one of 'openai' or 'anthropic'",
    "attribution: {endpoint: 'http://h'}": "is not known",
    "max_restarts: -1": "must be a count from 0 to 1000000, or a rate such as '10 per 24h', not '-1'",
    "max_restarts: 10 per day": "'day' is no duration",
    "max_restarts: 10 per 0s": "must be a rate within some time",
    "max_restarts: 2000000": "must be a count from 0 to 1000000",
    "max_restarts: true": "must be a count",
    "max_restarts: [3]": "must be a count",
    "max_node_losses: many": "must be a count",
    "progress: {max_no_progress_cycles: 0}": "must be at least 1",
    "progress: {log_pattern: 'a(b'}": "is no regular expression",
    "progress: {log_pattern: 'step [0-9]+'}": "must have one group, around the step, not 0",
    "progress: {log_pattern: '(a)(b)'}": "must have one group, around the step, not 2",
    "progress: {log_pattern: '[[a]([0-9])'}": "is no regular expression: Possible nested set",
    "progress: {log_pattern: 'a{99999999999999999999}'}": "is no regular expression",
}


def bounds_of(job: Path) -> FaultToleranceSpec:
    return plan(load(job).spec, folder=Path("jobs"), job_file=job).fault_tolerance


def test_the_whole_block_reaches_the_plan(write: Write, tmp_path: Path) -> None:
    """Each key sets its own field; URLs are normalized, and file paths are absolute, relative to the folder of
    job.yaml."""
    here = str(tmp_path)
    assert bounds_of(write(BASE + WHOLE)).attribution == AttributionSpec(
        attrsvc_url="https://attrsvc.example",
        enable_mcp=True,
        mcp_command=("my-mcp", "--fast"),
        http_urls=("https://other:8000", "http://[::1]:8000/base"),
        token_file=f"{here}/t",
        timeout=50,
        decision_timeout=5,
        dry_run=False,
        aggregation="all",
        rules=(f"{here}/r.yaml", "/abs/s.yaml"),
        llm=LlmSpec(url="http://localhost:1234/v1", model="m", key_file=f"{here}/k", style="anthropic", timeout=3),
        slack=SlackSpec(channel="c", token_file=f"{here}/s", mention="@here", url="http://localhost:1"),
        dataflow=DataflowSpec(url="http://localhost:2", index="i", token_file=f"{here}/d"),
        ledger=f"{here}/l",
        enable_lib=False,
    )


def test_a_job_without_the_block_asks_the_rules_in_a_dry_run(write: Write) -> None:
    """By default attribution asks the built-in rules in a dry run: their verdicts are recorded and not acted on."""
    assert bounds_of(write("name: a\ncommand: x\n")).attribution == AttributionSpec(enable_lib=True)


def test_budgets_are_counts_or_rates(write: Write) -> None:
    """`3` allows three in all, `10 per 24h` ten within any 24 hours; without a key there is no limit."""
    keys = "{max_restarts: 10 per 24h, max_job_restarts: 7, max_node_losses: 2  per  1h30m, max_preemptions: '0'}"
    bounds = bounds_of(write(f"name: a\ncommand: x\nfault_tolerance: {keys}\n"))
    assert bounds.max_restarts == Allowance(count=10, per_s=86400.0)
    assert bounds.max_job_restarts == Allowance(count=7)
    assert bounds.max_node_losses == Allowance(count=2, per_s=5400.0)
    assert bounds.max_preemptions == Allowance(count=0)
    usual = bounds_of(write("name: a\ncommand: x\n"))
    assert (usual.max_restarts, usual.max_preemptions) == (Allowance(count=3), None)


def test_progress_reaches_the_plan(write: Write, tmp_path: Path) -> None:
    """A relative path of the iteration file counts from the folder of job.yaml."""
    keys = "{max_no_progress_cycles: 4, min_progress_steps: 5, iteration_file: it.txt, log_pattern: 'step ([0-9]+) '}"
    assert bounds_of(write(f"{BASE}  progress: {keys}\n")).progress == ProgressSpec(
        max_no_progress_cycles=4,
        min_progress_steps=5,
        iteration_file=str(tmp_path / "it.txt"),
        log_pattern="step ([0-9]+) ",
    )


@pytest.mark.parametrize(("below", "says"), BAD.items())
def test_a_bad_value_is_one_message_without_the_secret(write: Write, below: str, says: str) -> None:
    """The message has the file and line and the valid values, and repeats no credential."""
    with pytest.raises(ConfigError) as caught:
        load(write(f"{BASE}  {below}\n"))
    message = str(caught.value)
    assert message.startswith("job.yaml:4: fault_tolerance.")
    assert says in message
    assert "hunter2" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("below", "decision_s", "origin"),
    [
        ("attribution: {}", 10.0, "default"),
        ("attribution: {timeout: 5s}", 5.0, "default, not longer than fault_tolerance.attribution.timeout"),
        ("rendezvous: {join_timeout: 8s}", 8.0, "default, not longer than fault_tolerance.rendezvous.join_timeout"),
        ("attribution: {decision_timeout: 3s}", 3.0, "job.yaml:4"),
    ],
)
def test_the_decision_timeout_is_not_longer_than_the_bounds_around_it(
    write: Write, below: str, decision_s: float, origin: str
) -> None:
    """A user who shortens one bound need not know of the other: its default follows, and its origin says why."""
    loaded = load(write(f"{BASE}  {below}\n"))
    assert loaded.spec.fault_tolerance.attribution.decision_timeout == decision_s
    assert str(loaded.origin_of(("fault_tolerance", "attribution", "decision_timeout"))) == origin


def test_a_default_lowered_in_one_job_is_not_lowered_in_the_next(write: Write) -> None:
    """A short join timeout lowers the decision's default in that job only."""
    load(write(f"{BASE}  rendezvous: {{join_timeout: 1s}}\n"))
    assert load(write("name: a\ncommand: x\n")).spec.fault_tolerance.attribution.decision_timeout == 10.0


def test_a_file_may_be_in_the_users_home(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~/` is the home of the user who submits; a `~` inside a path is a plain name."""
    monkeypatch.setenv("HOME", "/home/me")
    bounds = bounds_of(write(f"{BASE}  attribution: {{ledger: ~/l, token_file: a/~/t}}\n"))
    assert (bounds.attribution.ledger, bounds.attribution.token_file) == ("/home/me/l", str(Path.cwd() / "a/~/t"))


def test_a_redis_is_no_path(write: Write) -> None:
    """The URL of a ledger in a Redis server stays a URL in the plan."""
    bounds = bounds_of(write(f"{BASE}  attribution: {{ledger: 'redis://host:6379/1'}}\n"))
    assert bounds.attribution.ledger == "redis://host:6379/1"


def test_variables_set_the_block_and_secrets_are_no_keys(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """`NVRX_SLURM_FAULT_TOLERANCE__ATTRIBUTION__…` sets a key; the variables of secrets set none, and are no
    error."""
    below = "NVRX_SLURM_FAULT_TOLERANCE__ATTRIBUTION__"
    monkeypatch.setenv(f"{below}DRY_RUN", "false")
    monkeypatch.setenv(f"{below}HTTP_URLS", "[http://a, http://b]")
    for variable in env.SECRETS:
        monkeypatch.setenv(variable, f"of {variable}")
    loaded = load(write("name: a\ncommand: x\n"))
    asked = loaded.spec.fault_tolerance.attribution
    assert (asked.dry_run, asked.http_urls) == (False, ("http://a", "http://b"))
    assert str(loaded.origin_of(("fault_tolerance", "attribution", "dry_run"))) == f"${below}DRY_RUN"
