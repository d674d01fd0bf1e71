"""Which layer wins, and where each value came from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.errors import ConfigError, UsageError
from nvrx_slurm.jobspec import env
from nvrx_slurm.jobspec.load import Loaded, load, load_job, parse_assignment
from nvrx_slurm.jobspec.model import JobSpec

Write = Callable[[str], Path]


def origins(loaded: Loaded, *keys: str) -> list[str]:
    return [str(loaded.origin_of(tuple(key.split(".")))) for key in keys]


def test_the_strongest_layer_wins_and_every_origin_is_shown(tmp_path: Path) -> None:
    """Flag > environment > job.yaml > the user's site file > the machine's > default, in one real process."""
    user, machine = tmp_path / "user" / "nvrx-slurm", tmp_path / "machine" / "nvrx-slurm"
    user.mkdir(parents=True)
    machine.mkdir(parents=True)
    slurm = "slurm: {{{}}}\n".format
    (machine / "config.yaml").write_text(slurm("partition: m, account: m, qos: m, constraint: m, reservation: m"))
    (user / "config.yaml").write_text(slurm("partition: u, account: u, qos: u, constraint: u"))
    job = tmp_path / "job.yaml"
    job.write_text("name: a\ncommand: x\n" + slurm("partition: j, account: j, qos: j"))
    variables = {
        "XDG_CONFIG_HOME": str(user.parent),
        "XDG_CONFIG_DIRS": str(machine.parent),
        "NVRX_SLURM_SLURM__PARTITION": "e",
        "NVRX_SLURM_SLURM__ACCOUNT": "e",
    }
    shown = subprocess.run(
        [
            sys.executable,
            "-m",
            "nvrx_slurm",
            "config",
            "show",
            "--json",
            "--origin",
            job,
            "--set",
            "slurm.partition=f",
        ],
        env=env.child_environment(variables),
        capture_output=True,
        text=True,
        check=True,
    )
    rows = {key: (row["value"], row["origin"]) for key, row in json.loads(shown.stdout).items()}
    assert rows["slurm.partition"] == ("f", "--set slurm.partition")
    assert rows["slurm.account"] == ("e", "$NVRX_SLURM_SLURM__ACCOUNT")
    assert rows["slurm.qos"] == ("j", f"{job}:3")
    assert rows["slurm.constraint"] == ("u", f"{user}/config.yaml:1")
    assert rows["slurm.reservation"] == ("m", f"{machine}/config.yaml:1")
    assert rows["slurm.exclude"] == (None, "default")


def test_a_mistake_in_a_site_file_is_reported_with_that_file(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a bad key names the site file, not job.yaml."""
    site = tmp_path / "nvrx-slurm" / "config.yaml"
    site.parent.mkdir()
    site.write_text("\nspare: 1\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=f"^{site}:2: spare: is not known; did you mean `spares`"):
        load(write("name: a\ncommand: x\n"))


def test_a_mistake_in_a_variable_or_a_flag_is_reported_with_its_name(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a value that did not come from a file names the variable or the flag."""
    job = write("name: a\ncommand: x\n")
    with pytest.raises(ConfigError, match=r"^--spares: spares: must be at least 0, not -1$"):
        load(job, [("spares", "--spares", -1)])
    with pytest.raises(ConfigError, match=r"^--set slurm.tme: slurm.tme: is not known; did you mean `time`"):
        load(job, [parse_assignment("slurm.tme=1h")])
    monkeypatch.setenv("NVRX_SLURM_NODEZ", "3")
    with pytest.raises(ConfigError, match=r"^\$NVRX_SLURM_NODEZ: nodez: is not known; did you mean `nodes`"):
        load(job)


def test_lists_are_replaced_and_mappings_merge(write: Write) -> None:
    """A stronger layer adds to a mapping, and replaces a list or a value as a whole."""
    job = write("name: a\ncommand: [x, y]\nenv: {A: 1, B: 2}\n")
    loaded = load(job, {"command": ["z"], "env.B": "3"})
    assert loaded.spec.command == ("z",)
    assert loaded.spec.env == {"A": "1", "B": "3"}
    assert origins(loaded, "env.A", "env.B") == ["job.yaml:3", "env.B"]


def test_a_weaker_short_form_merges_as_what_it_stands_for(write: Write) -> None:
    """A flag for one key of the block keeps the other keys as the short form in the file sets them."""

    def loaded(text: str, **flags: Any) -> JobSpec:
        return load_job(write(f"name: a\n{text}\n"), **flags)

    prewarm = loaded("command: x\nprewarm: [torch, mymodel]", prewarm__memory="8GiB").prewarm
    assert prewarm is not None
    assert (prewarm.imports, prewarm.memory) == (("torch", "mymodel"), 8 << 30)
    backoff = loaded("command: x\nfault_tolerance: {backoff: off}", fault_tolerance__backoff__after=5)
    assert (backoff.fault_tolerance.backoff.after, backoff.fault_tolerance.backoff.max) == (5, 0)
    container = loaded("command: x\ncontainer: ./a.sif", container__runtime="apptainer").container
    assert container is not None
    assert (container.image, container.runtime) == ("./a.sif", "apptainer")
    roles = loaded("roles: {b: {command: x, prewarm: [torch]}}", roles__b__prewarm__timeout="1m").roles
    assert roles is not None
    assert roles["b"].prewarm is not None
    assert roles["b"].prewarm.imports == ("torch",)


@pytest.mark.parametrize(
    ("flags", "spares", "min_spares"),
    [({"min_spares": 0}, 3, 0), ({"spares": 2}, 2, None), ({"spares": "0..2"}, 2, 0)],
)
def test_a_flag_changes_one_end_of_a_range_of_spares_or_all_of_it(
    write: Write, flags: dict[str, Any], spares: int, min_spares: int | None
) -> None:
    """`min_spares` is the lower end of the file's `1..3`; `spares` replaces the range."""
    spec = load_job(write("name: a\ncommand: x\nspares: 1..3\n"), **flags)
    assert (spec.spares, spec.min_spares) == (spares, min_spares)


def test_a_stronger_short_form_replaces_the_block(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`store: embedded` and `prewarm: off` replace all that the site file sets in these blocks."""
    (tmp_path / "nvrx-slurm").mkdir()
    site = "store: {url: 'redis://h'}\nprewarm: {imports: auto, setup: 'a:b'}\n"
    (tmp_path / "nvrx-slurm" / "config.yaml").write_text(site)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    spec = load_job(write("name: a\ncommand: x\nstore: embedded\nprewarm: off\n"))
    assert spec.store.url is None
    assert spec.prewarm is not None
    assert spec.prewarm.is_off


def test_a_key_without_a_value_says_nothing(write: Write) -> None:
    """`slurm:` with all its keys commented out counts as absent; below `env`, a key without a value is empty text."""
    loaded = load(write("name: a\ncommand: x\nnodes:\nslurm:\nenv:\n  EMPTY:\n"))
    assert loaded.spec.nodes == 1
    assert loaded.spec.env == {"EMPTY": ""}
    assert origins(loaded, "nodes", "slurm.time") == ["default", "default"]


def test_a_default_that_follows_another_key_says_so(write: Write) -> None:
    """A longer heartbeat.timeout raises the defaults that must not be shorter, and the origin of each says why."""
    bounds = ("heartbeat.startup_timeout", "fence_timeout", "control_plane_grace")
    keys = [f"fault_tolerance.{key}" for key in bounds]

    def told(text: str) -> list[tuple[float, str]]:
        loaded = load(write(f"name: a\ncommand: x\nfault_tolerance: {{{text}}}\n"))
        found = loaded.spec.fault_tolerance
        values = (found.heartbeat.startup_timeout, found.fence_timeout, found.control_plane_grace)
        return list(zip(values, origins(loaded, *keys), strict=True))

    assert told("") == [(60.0, "default"), (30.0, "default"), (600.0, "default")]
    assert told("heartbeat: {timeout: 20m}") == [
        (1200.0, "default, not shorter than fault_tolerance.heartbeat.timeout"),
        (1200.0, "default, not shorter than fault_tolerance.heartbeat.timeout"),
        (1200.0, "default, not shorter than fault_tolerance.fence_timeout"),
    ]
    assert told("heartbeat: {timeout: 40s}, fence_timeout: 50s") == [
        (60.0, "default"), (50.0, "job.yaml:3"), (600.0, "default")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["heartbeat: {timeout: 2s}", "heartbeat: {timeout: 60s}", "control_plane_grace: 2s", "teardown: {grace: 0s}"],
)
def test_one_bound_alone_is_no_contradiction(write: Write, text: str) -> None:
    """A user who sets one bound need not know of those that depend on it."""
    assert load(write(f"name: a\ncommand: x\nslurm: {{time: 1m}}\nfault_tolerance: {{{text}}}\n")).spec


def test_a_merge_key_brings_what_the_mapping_lacks(write: Write) -> None:
    """`<<: *base` works as in YAML: own keys win, and the line of each value is the one where it was written."""
    text = "name: a\ncommand: x\nenv: &base\n  A: 1\n  B: 2\nslurm:\n  extra:\n    <<: *base\n"
    with pytest.raises(ConfigError, match=r"job.yaml:4: slurm.extra.A: is no sbatch flag"):
        load(write(text))
    roles = "roles:\n  p: &p {command: x, replicas: 2}\n  q: {<<: *p, replicas: 3}\n"
    spec = load(write("name: a\n" + roles)).spec
    assert spec.roles is not None
    assert (spec.roles["q"].command, spec.roles["q"].replicas) == (("x",), 3)


def test_variables_name_any_key(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """`__` separates levels; names below `env` keep their case; sbatch's flags get their dashes; empty means
    unset."""
    variables = {
        "SPARES": "2",
        "NODES": "",
        "FAULT_TOLERANCE__HEARTBEAT__TIMEOUT": "20s",
        "ENV__OMP_NUM_THREADS": "8",
        "ENV__EMPTY": "",
        "SLURM__EXTRA__MAIL_TYPE": "END",
        "COMMAND": '[python, "a b"]',
        "STORE_PASSWORD": "hunter2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(f"NVRX_SLURM_{name}", value)
    spec = load(write("name: a\ncommand: x\nnodes: 3\n")).spec
    assert (spec.spares, spec.nodes, spec.fault_tolerance.heartbeat.timeout) == (2, 3, 20.0)
    assert spec.env == {"OMP_NUM_THREADS": "8", "EMPTY": ""}
    assert spec.slurm.extra == {"mail-type": "END"}
    assert spec.command == ("python", "a b")


@pytest.mark.parametrize(
    "text", ["a #b", "*", "~", "- x", "'tis", " x ", "a: b", "|", "1e-4", "yes", "007", "!x", "é"]
)
def test_a_flags_value_arrives_as_it_was_given(write: Write, text: str) -> None:
    """A value of `--set` is taken as text unchanged, unless it is a YAML list or mapping in brackets."""
    spec = load(write("name: a\ncommand: x\n"), [parse_assignment(f"env.A={text}")]).spec
    assert spec.env == {"A": text}


@pytest.mark.parametrize("text", ["1.10", "007", "0x10", "1e-4", "yes", "True", "2024-01-01", "1_000", "12:30:00"])
def test_text_in_a_file_stays_as_it_was_written(write: Write, text: str) -> None:
    """A value that YAML would read as a number or a date stays text where the key takes text."""
    spec = load(write(f"name: a\ncommand: [x, {text}]\nenv: {{A: {text}}}\nslurm: {{account: {text}}}\n")).spec
    assert (spec.command, spec.env, spec.slurm.account) == (("x", text), {"A": text}, text)


def test_a_job_yaml_may_be_json(write: Write) -> None:
    """JSON is valid YAML, including its surrogate pairs of escapes."""
    job = {"name": "a", "command": ["x", "\U0001f600 \n\t\u2028"], "env": {"A": "\U0001f600"}, "nodes": 2}
    spec = load(write(json.dumps(job))).spec
    assert (list(spec.command or ()), spec.env, spec.nodes) == (job["command"], job["env"], 2)


def test_bad_assignments_are_usage_errors(write: Write) -> None:
    """`--set` without `=`, with an empty level, with broken YAML, or below a plain value says how to write it."""
    for text in ("foo", "=1", "a..b=1", ""):
        with pytest.raises(UsageError, match="write it as key=value"):
            parse_assignment(text)
    with pytest.raises(ConfigError, match=r"^--set command:1: is not YAML"):
        parse_assignment("command=[a")
    with pytest.raises(UsageError, match="`slurm` was given a value already"):
        load(write("name: a\n"), [parse_assignment("slurm=3"), parse_assignment("slurm.time=1h")])


def test_a_flag_for_a_block_keeps_the_keys_that_others_set_in_it(write: Write) -> None:
    """The order of the flags does not matter; if the block's value is no mapping, which could not take the key, the
    pair is refused."""
    job = write("name: a\ncommand: x\n")
    pair = [parse_assignment("slurm.time=2h"), parse_assignment("slurm={partition: gpu, time: 1h}")]
    for flags in (pair, pair[::-1]):
        slurm = load(job, flags).spec.slurm
        assert (slurm.time, slurm.partition) == (7200.0, "gpu")
    pair = [parse_assignment("prewarm.memory=8GiB"), ("prewarm", "--prewarm", "torch")]
    for flags in (pair, pair[::-1]):
        with pytest.raises(UsageError, match=r"--set prewarm\.memory: `prewarm` was given a value already"):
            load(job, flags)


def test_python_callers_go_a_level_down_by_two_underscores(write: Write) -> None:
    """`load_job(path, slurm__partition=…)` sets `slurm.partition`, as the strongest layer."""
    spec = load_job(str(write("name: a\ncommand: x\nspares: 1\n")), spares=2, slurm__partition="gpu")
    assert (spec.spares, spec.slurm.partition) == (2, "gpu")


def test_extra_flags_are_text_true_or_left_out(write: Write) -> None:
    """`true` or an empty value gives a flag without a value; `false` removes a flag that a weaker layer set."""
    flags = "{exclusive: true, hold: , mail-type: END, nice: 5, reboot: false, comment: ''}"
    extra = load(write(f"name: a\ncommand: x\nslurm: {{extra: {flags}}}\n")).spec.slurm.extra
    assert extra == {"exclusive": True, "hold": True, "mail-type": "END", "nice": "5", "reboot": False, "comment": ""}


def test_a_store_may_be_named_embedded(write: Write) -> None:
    """`store: embedded` is the default, written out."""
    assert load(write("name: a\ncommand: x\nstore: embedded\n")).spec.store.url is None


def test_the_configuration_is_frozen(write: Write) -> None:
    """The merged configuration cannot be changed."""
    spec = load(write("name: a\ncommand: x\n")).spec
    with pytest.raises(AttributeError, match="immutable"):
        spec.nodes = 3  # type: ignore[misc]


def test_a_job_made_in_python_holds_what_the_same_file_holds(write: Write) -> None:
    file = write("name: a\ncommand: python x.py\nslurm: {time: 1h}\nfault_tolerance: {backoff: off}\n")
    values: dict[str, Any] = {"slurm": {"time": "1h"}, "fault_tolerance": {"backoff": "off"}}
    made = JobSpec(name="a", command="python x.py", **values)  # type: ignore[arg-type]
    assert made == load(file).spec


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"command": ["x"], "min_nodes": 3},
        {"command": ["x"], "slurm": {"tim": "1h"}},
        {"command": ["x"], "nodes": 0},
    ],
)
def test_a_bad_job_is_refused_in_python_too(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        JobSpec(name="a", **values)
