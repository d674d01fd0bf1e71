"""Bad job.yaml files: each is one clear ConfigError that names file, line and key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.errors import EXIT_USAGE, ConfigError
from nvrx_slurm.jobspec.load import load
from nvrx_slurm.jobspec.model import JobSpec, RoleSpec, SlurmSpec
from nvrx_slurm.jobspec.plan import plan
from nvrx_slurm.jobspec.script import render_job

Write = Callable[[str], Path]

BASE = "name: a\ncommand: x\n"

# lines of job.yaml below BASE → what the message says after `job.yaml:`
BAD_KEYS = {
    "nodez: 3": "3: nodez: is not known; did you mean `nodes`?",
    "zzz: 3": "3: zzz: is not known; valid here: name, command, nodes, spares",
    "1: 3": "3: 1: is not known; valid here:",
    "slurm:\n  partiton: gpu": "4: slurm.partiton: is not known; did you mean `partition`?",
    "partition: gpu": "3: partition: is not known; did you mean `slurm.partition`?",
    "slurm: {nodes: 3}": "3: slurm.nodes: is not known; did you mean `nodes`?",
    "fault_tolerance:\n  heartbeat:\n    intervall: 3s": "5: fault_tolerance.heartbeat.intervall: is not known;",
    "store: {uri: x}": "3: store.uri: is not known; did you mean `url`?",
}
BAD_TYPES = {
    "nodes: many": "3: nodes: must be a whole number, not 'many'",
    "nodes: 1.5": "3: nodes: must be a whole number, not '1.5'",
    "nodes: 1e9": "3: nodes: must be a whole number, not '1e9'",
    "nodes: true": "3: nodes: must be a whole number, not 'true'",
    "nodes: [3]": "3: nodes: must be a whole number, not ['3']",
    "nodes: {a: 3}": "3: nodes: must be a whole number, not {'a': '3'}",
    "nodes: 99999999999999999999999": "3: nodes: must be",
    "setup: {a: b}": "3: setup: must be a list, not {'a': 'b'}",
    "setup: [[a]]": "3: setup.0: must be text, not ['a']",
    "env: [A]": "3: env: must be a mapping of keys, not ['A']",
    "env:\n  A: [1]": "4: env.A: must be text, not ['1']",
    "slurm: [a]": "3: slurm: must be a mapping of keys, not ['a']",
    "slurm: gpu": "3: slurm: must be a mapping of keys, not 'gpu'",
    "slurm: {mem: [64G]}": "3: slurm.mem: must be text, not ['64G']",
    "slurm: {gpus_per_node: -1}": "3: slurm.gpus_per_node: must be a number or type:number, such as 8 or h100:8",
    "slurm: {extra: {comment: [a]}}": "3: slurm.extra.comment: must be",
    "fault_tolerance: 3": "3: fault_tolerance: must be a mapping of keys, not '3'",
    "store: redis": "3: store: must be a mapping of keys, not 'redis'",
}
BAD_VALUES = {
    "nodes: 0": "3: nodes: must be at least 1, not '0'",
    "nodes: 100001": "3: nodes: must be at most 100000, not '100001'",
    "spares: -1": "3: spares: must be at least 0, not '-1'",
    "workers_per_node: 0": "3: workers_per_node: must be at least 1, not '0'",
    "nodes: 100000\nspares: 1": "4: spares: 100001 nodes with the spares; at most 100000 are possible",
    "fault_tolerance:\n  attribution_endpoint: http://a\n  attribution: [a]": "5: fault_tolerance.attribution: must",
    'lease: {file: ""}': "3: lease.file: must not be empty",
    'container: ""': "3: container: must not be empty",
    'fault_tolerance: {attribution: {rules: ["a.yaml", ""]}}': "3: fault_tolerance.attribution.rules.1: must not be",
    'workdir: "a\\nb"': "3: workdir: must be one line of printable text",
    "env: {A-B: 1}": "3: env.A-B: is no name for an environment variable: letters, digits and '_' make one",
    "env:\n  A: 1\n  RANK: 0": "5: env.RANK: is set by nvrx-slurm itself, for each rank; give yours another name",
    "env: {NVRX_CYCLE: 0}": "3: env.NVRX_CYCLE: is set by nvrx-slurm itself",
    'env: {A: "a\\0b"}': "3: env.A: must not contain a NUL byte",
    'env: {A: "\\ud800"}': "3: env.A: must be valid Unicode; it holds half of a surrogate pair",
    'slurm: {account: "a\\tb"}': "3: slurm.account: must be one line of printable text",
    "slurm: {time: 5x}": "3: slurm.time: '5x' is no duration; write it like 15s, 2m, 1h30m",
    "slurm: {time: 30s}": "3: slurm.time: must be from 1m to 3650d, or UNLIMITED, not 30s",
    "slurm: {time: true}": "3: slurm.time: 'true' is no duration",
    "slurm: {time: .inf}": "3: slurm.time: '.inf' is no duration",
    "fault_tolerance: {teardown: {grace: .nan}}": "3: fault_tolerance.teardown.grace: '.nan' is no duration",
    "fault_tolerance: {teardown: {grace: 31d}}": "3: fault_tolerance.teardown.grace: must be from 0s to 30d, not",
    "fault_tolerance: {heartbeat: {interval: 0s}}": "3: fault_tolerance.heartbeat.interval: must be from 10ms to 30d",
    "fault_tolerance: {quarantine_after: 0}": "3: fault_tolerance.quarantine_after: must be at least 1, not '0'",
    "fault_tolerance: {teardown: {stop_signal: KILL}}": "3: fault_tolerance.teardown.stop_signal: must be one of "
    "SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGHUP, SIGQUIT, not 'KILL'",
    "fault_tolerance: {teardown: {checkpoint_signal: 15}}": "3: fault_tolerance.teardown.checkpoint_signal: must be",
    "fault_tolerance: {teardown: {gpu_memory_below: lots}}": "3: fault_tolerance.teardown.gpu_memory_below: 'lots' "
    "is no size; write it like 2GiB, 500MB",
    "fault_tolerance: {teardown: {gpu_memory_below: 0}}": "3: fault_tolerance.teardown.gpu_memory_below: must be "
    "from 1MiB to 1TiB, not 0B",
    "fault_tolerance: {hang: {learn: yes}}": "3: fault_tolerance.hang.learn: must be true or false, not 'yes'",
    "fault_tolerance: {hang: {safety_factor: 1}}": "3: fault_tolerance.hang.safety_factor: must be at least 1.5, not",
    "fault_tolerance: {hang: {safety_factor: .nan}}": "3: fault_tolerance.hang.safety_factor: must be a number, not",
    "fault_tolerance: {hang: {safety_factor: x}}": "3: fault_tolerance.hang.safety_factor: must be a number, not 'x'",
    "fault_tolerance: {hang: {warmup: 0}}": "3: fault_tolerance.hang.warmup: must be at least 1, not '0'",
    "fault_tolerance: {hang: {no_output: soon}}": "3: fault_tolerance.hang.no_output: 'soon' is no duration",
    "slurm: {extra: {nodes: 3}}": "3: slurm.extra.nodes: is set by nvrx-slurm itself; set `nodes` and `spares`",
    "slurm: {extra: {output: x}}": "3: slurm.extra.output: is set by nvrx-slurm itself; set `output`",
    "slurm: {extra: {het-group: 1}}": "3: slurm.extra.het-group: is not supported: ",
    "slurm: {extra: {wait: true}}": "3: slurm.extra.wait: is no property of a job: use `nvrx-slurm submit --wait`",
    "slurm: {extra: {gpus-per-node: 3}}": "3: slurm.extra.gpus-per-node: is a key of its own; set `slurm.",
    "slurm: {extra: {--comment: a}}": "3: slurm.extra.--comment: is no sbatch flag; write its long form",
    "slurm: {extra: {N: 3}}": "3: slurm.extra.N: is no sbatch flag",
    'slurm: {extra: {comment: "a\\nb"}}': "3: slurm.extra.comment: must be one line of printable text",
}
BAD_RELATIONS = {
    "nodes: 2\nmin_nodes: 3": "4: min_nodes: must be at most `nodes` (2), not 3",
    "spares: 3..1": "3: spares: at least 3 (`min_spares`) and at most 1: the first is larger",
    "min_spares: 3": "3: min_spares: at least 3 (`min_spares`) and at most 0: the first is larger",
    "fault_tolerance:\n  heartbeat:\n    interval: 15s": "5: fault_tolerance.heartbeat.interval: must be shorter "
    "than heartbeat.timeout (15s), not 15s",
    "fault_tolerance: {heartbeat: {startup_timeout: 10s}}": "3: fault_tolerance.heartbeat.startup_timeout: must be "
    "at least heartbeat.timeout (15s), not 10s",
    "fault_tolerance:\n  fence_timeout: 10s": "4: fault_tolerance.fence_timeout: must be at least heartbeat.timeout "
    "(15s), not 10s",
    "fault_tolerance: {fence_timeout: 1m, control_plane_grace: 40s}": "3: fault_tolerance.fence_timeout: must be at "
    "most control_plane_grace (40s), not 1m",
    "fault_tolerance: {teardown: {stop_signal: usr1, checkpoint_signal: SIGUSR1}}": "3: fault_tolerance.teardown."
    "checkpoint_signal: must differ from teardown.stop_signal (SIGUSR1): workers could not distinguish them",
    "fault_tolerance:\n  hang:\n    no_output: 1s": "5: fault_tolerance.hang.no_output: must be longer than "
    "heartbeat.interval (1s), not 1s",
    "fault_tolerance: {heartbeat: {interval: 2s}, hang: {exit_skew: 1.5s}}": "3: fault_tolerance.hang.exit_skew: "
    "must be longer than heartbeat.interval (2s), not 1.5s",
    "slurm: {time: 2m}\nfault_tolerance:\n  teardown:\n    grace: 55s": "6: fault_tolerance.teardown.grace: "
    "teardown.grace (55s) and 8s for the kill take 1m3s ahead of slurm.time (2m); at most half of it (1m) can be "
    "spent so: shorten them, or ask for more time",
    "slurm: {time: 2m}\nfault_tolerance:\n  teardown:\n    checkpoint_signal: USR1": "5: fault_tolerance.teardown."
    "checkpoint_timeout: teardown.checkpoint_timeout (1m), teardown.grace (10s) and 8s for the kill take 1m18s",
}
BAD_STORES = {
    "http://h:1": "must look like redis://host:6379/0 or rediss://host:6380/0",
    "redis://": "must look like",
    "redis://h:99999/0": "must look like",
    "redis://h:x/0": "must look like",
    "redis://[::1/0": "must look like",
    "redis://u:hunter2@h/0": "must not hold a password",
    "rediss://:hunter2@h:6380/0": "must not hold a password",
    "redis://h/0?password=hunter2": "must not hold a password",
    "rediss://h/0?ssl_password=hunter2": "must not hold a password",
    "rediss://h/0?ssl_check_hostname=false": "must not say how its certificate is checked",
    "rediss://h/0?ssl_cert_reqs=none": "must not say how its certificate is checked",
    "rediss://h/0?ssl_cert_reqs=required": "must not say how its certificate is checked",
    "rediss://h/0?hunter2": "has an option that is not known, or one twice; known are ssl_ca_certs",
    "rediss://h/0?max_connections=hunter2": "has an option that is not known",
    "rediss://h/0?ssl_ca_certs=/a&ssl_ca_certs=/hunter2": "has an option that is not known, or one twice",
    "redis://h/0?ssl_ca_certs=/hunter2": "has options of TLS, which only rediss:// takes",
}
BAD_COMMANDS = {
    "": "job.yaml: `command` is missing: say what each worker runs (or give `roles`)",
    "command:": "job.yaml: `command` is missing",
    "command: []": "job.yaml:2: command: must name a program",
    "command: ''": "job.yaml:2: command: must name a program",
    "command: ['', a]": "job.yaml:2: command: must name a program",
    "command: a 'b": "job.yaml:2: command: cannot be split as a shell would: No closing quotation",
    "command: {a: b}": "job.yaml:2: command: must be a list, not {'a': 'b'}",
    "command: [a, [b]]": "job.yaml:2: command.1: must be text, not ['b']",
    'command: [a, "b\\0"]': "job.yaml:2: command.1: must not contain a NUL byte",
}
BAD_ROLES = {
    "command: x\nroles: {p: {command: x}}": "2: command: with `roles`, set `command` in each role instead",
    "nodes: 3\nroles: {p: {command: x}}": "2: nodes: with `roles`, set `nodes_per_replica` in each role instead",
    "roles: [a]": "2: roles: must be a mapping of keys, not ['a']",
    "roles:\n  p: {}": "3: roles.p.command: is required",
    "roles:\n  p: [a]": "3: roles.p: must be a mapping of keys, not ['a']",
    "roles:\n  p:\n    command: x\n    nodes: 2": "5: roles.p.nodes: is not known; did you mean `nodes_per_replica`?",
    "roles:\n  p:\n    command: x\n    min_nodes: 2": "5: roles.p.min_nodes: must be at most `nodes_per_replica` (1)",
    "roles:\n  p q: {command: x}": "3: roles.p q: must be 1 to 64 letters",
    "roles:\n  p: {command: x, on_failure: retry}": "3: roles.p.on_failure: must be one of 'restart_replica'",
    "roles:\n  p: {command: x, env: {RANK: 1}}": "3: roles.p.env.RANK: is set by nvrx-slurm itself",
    "spares: 9\nroles:\n  p: {command: x, replicas: 1000, nodes_per_replica: 100}": "2: spares: 100009 nodes with",
}
BAD_NAMES = ('"a\\nb"', "a b", "-a", "a/b", "''", "a" * 65, "é", "'a;b'", "$(a)", "..")
BAD_YAML = {
    "name: [a\n": "job.yaml:2: is not YAML: ",
    "name: a: b\n": "job.yaml:1: is not YAML: mapping values are not allowed here",
    "name: 'a\n": "job.yaml:2: is not YAML: ",
    "name: *a\n": "job.yaml:1: is not YAML: found undefined alias 'a'",
    "name: @a\n": "job.yaml:1: is not YAML: ",
    "name: a\n---\nname: b\n": "job.yaml:2: is not YAML: expected a single document",
    "name: a\0b\n": "job.yaml:1: is not YAML: the character U+0000",
    "name: a\nslurm:\n\ttime: 1h\n": "job.yaml:3: a tab stands where YAML wants spaces; indent with spaces",
    "name: a\n\tcommand: x\n": "job.yaml:2: a tab stands where YAML wants spaces; indent with spaces",
    "name: a\nnodes: 1\nname: b\n": "job.yaml:3: the key `name` stands twice (first at line 1)",
    "name: a\nslurm:\n  qos: a\n  qos: b\n": "job.yaml:4: the key `qos` stands twice (first at line 3)",
    "? [a]\n: b\n": "job.yaml:1: a key must be text, not a list or a mapping",
    "- a\n- b\n": "job.yaml:1: the top level must be a mapping of keys, such as `name: train`",
    "text\n": "job.yaml:1: the top level must be a mapping",
    "name: !!python/name:os.system x\n": "job.yaml:1: the tag tag:yaml.org,2002:python/name:os.system has no meaning",
    "name: &a [*a]\n": "job.yaml:1: an alias (`*name`) must not stand inside the value that it names",
    "name: " + "[" * 1000: "job.yaml: is nested too deeply",
}


def complaint(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


@pytest.mark.parametrize(("below", "says"), (BAD_KEYS | BAD_TYPES | BAD_VALUES | BAD_RELATIONS).items())
def test_a_bad_key_or_value_is_named_with_its_line(write: Write, below: str, says: str) -> None:
    """The message begins with the file, the line and the key, then has the value seen and the valid values."""
    message = complaint(write(f"{BASE}{below}\n"))
    assert message.startswith(f"job.yaml:{says}")
    assert "\n" not in message


def test_each_bad_name_of_a_mapping_is_reported(write: Write) -> None:
    """One message has a line for each bad name, as for all other keys."""
    message = complaint(
        write(f"{BASE}env: {{A-B: 1, RANK: 0, C: [1], D: 1}}\nslurm: {{extra: {{-x: 1, nodes: 2}}}}\n")
    )
    keys = ("env.A-B", "env.RANK", "env.C", "slurm.extra.-x", "slurm.extra.nodes")
    assert message.startswith(f"{len(keys)} problems")
    assert all(f": {key}: " in message for key in keys)


@pytest.mark.parametrize(("url", "says"), BAD_STORES.items())
def test_a_bad_store_url_is_refused_and_its_password_not_shown(write: Write, url: str, says: str) -> None:
    """A URL of another kind, with a bad port, or with a password in it is refused; the password is not repeated."""
    message = complaint(write(f"{BASE}store: {{url: '{url}'}}\n"))
    assert message.startswith(f"job.yaml:3: store.url: {says}")
    assert "hunter2" not in message


@pytest.mark.parametrize("server", ["redis-server", "./redis-server", "", "Auto"])
def test_a_bad_store_server_is_refused(write: Write, server: str) -> None:
    """`store.server` is `auto`, `bundled`, or an absolute path; anything else is refused."""
    message = complaint(write(f"{BASE}store: {{server: '{server}'}}\n"))
    assert message.startswith("job.yaml:3: store.server: must be `auto`, `bundled`, or the absolute path")


def test_a_store_has_a_server_or_a_url(write: Write) -> None:
    """A key for the job's own server beside the URL of a running one is refused as ambiguous."""
    message = complaint(write(f"{BASE}store: {{url: 'redis://h', server: bundled}}\n"))
    assert message.startswith("job.yaml:3: store.server: starts a server of its own, and store.url names one")


@pytest.mark.parametrize(("line", "says"), BAD_COMMANDS.items())
def test_a_bad_command_is_named(write: Write, line: str, says: str) -> None:
    """A command that is missing, empty, not splittable, or not text has its own message each."""
    assert complaint(write(f"name: a\n{line}\n")).startswith(says)


@pytest.mark.parametrize(("below", "says"), BAD_ROLES.items())
def test_a_bad_role_is_named(write: Write, below: str, says: str) -> None:
    """Roles beside plain keys, roles with unknown keys, and roles that do not fit are reported with their line."""
    assert complaint(write(f"name: a\n{below}\n")).startswith(f"job.yaml:{says}")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_bad_name_is_refused(write: Write, name: str) -> None:
    """A job's name is letters, digits, '.', '_' and '-', since it is used in paths, keys and lines."""
    assert complaint(write(f"name: {name}\ncommand: x\n")).startswith("job.yaml:1: name: must be 1 to 64 letters")


@pytest.mark.parametrize(("text", "says"), BAD_YAML.items(), ids=range(len(BAD_YAML)))
def test_what_is_no_yaml_is_reported_with_its_line(write: Write, text: str, says: str) -> None:
    """Syntax errors, tabs, duplicate keys, and YAML constructs that job.yaml does not take are one message with the
    line."""
    message = complaint(write(text))
    assert message.startswith(says)
    assert "\n" not in message


def test_aliases_that_multiply_are_refused(write: Write) -> None:
    """A small file whose aliases would unfold to a billion values is refused, not unfolded."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "holds more than 100000 values" in complaint(write("\n".join(lines)))


def test_an_empty_file_lacks_a_name(write: Write) -> None:
    """An empty file is read as an empty mapping: the message says which key is required."""
    assert complaint(write("")) == "job.yaml: name: is required"


def test_a_file_that_cannot_be_read_is_named(write: Write, tmp_path: Path) -> None:
    """A missing file, a folder, and bytes that are no text say so."""
    assert complaint(Path("nope.yaml")) == "nope.yaml: cannot be read: No such file or directory"
    assert complaint(tmp_path).endswith("cannot be read: Is a directory")
    write("").write_bytes(b"name: \xff\n")
    assert complaint(Path("job.yaml")) == "job.yaml: is not UTF-8 text (byte 6)"


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(write: Write) -> None:
    """Several problems are one message, with one line for each in the order of the line numbers."""
    message = complaint(write(f"{BASE}nodes: x\nspares: -2\nslurm: {{tyme: 1h}}\n"))
    assert message.splitlines() == [
        "3 problems:",
        "  job.yaml:3: nodes: must be a whole number, not 'x'",
        "  job.yaml:4: spares: must be at least 0, not '-2'",
        "  job.yaml:5: slurm.tyme: is not known; did you mean `time`?",
    ]


def test_a_long_value_is_shown_by_its_beginning(write: Write) -> None:
    """A message stays short even for a value of 5,000 characters."""
    assert len(complaint(write(f"{BASE}nodes: {'x' * 5000}\n"))) < 200


FIELDS = [field for block in (JobSpec, SlurmSpec, RoleSpec) for field in block.__struct_fields__]
KEYS = st.sampled_from([*FIELDS, "heartbeat", "timeout", "a b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1h", "x", "3"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(settings.get_profile("shared fixtures"), max_examples=150)
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_keys_and_values_are_a_job_or_one_clear_error(write: Write, data: dict[str, object]) -> None:
    """Any keys and values give a job or a ConfigError, and no other exception; a job that loads can be planned and
    rendered."""
    loads_or_complains(write(json.dumps(data)))


@settings(settings.get_profile("shared fixtures"), max_examples=150)
@given(st.text(st.sampled_from("ab:-[]{}&*!|>'\"%@#,? \n\t01.e<~\\é\x00\x85")))
def test_any_text_is_a_job_or_one_clear_error(write: Write, text: str) -> None:
    """Any text gives a job or a ConfigError, and no other exception."""
    loads_or_complains(write(text))


def loads_or_complains(path: Path) -> None:
    try:
        spec = load(path).spec
        render_job(spec, plan(spec, folder=Path("jobs"), job_file=path), cluster="slurm", python="python")
    except ConfigError as error:
        assert str(error).partition("\n")[0]
