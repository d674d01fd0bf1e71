"""`nvrx-slurm config`"""

from __future__ import annotations

import json
from pathlib import Path

from nvrx_slurm.errors import EXIT_USAGE
from nvrx_slurm.jobspec.load import load
from tests.unit.cli.conftest import Nvrx

JOB = "name: a\ncommand: [x, 'a b']\nslurm:\n  time: 90m\nfault_tolerance: {teardown: {grace: 0.25}}\n"


def test_show_prints_every_key_with_its_origin(nvrx: Nvrx, tmp_path: Path) -> None:
    """One key a line, values as job.yaml would say them, and where each came from."""
    (tmp_path / "job.yaml").write_text(JOB)
    done = nvrx("config", "show", "--origin", "--spares=2", NVRX_SLURM_NODES="3")
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert lines["slurm.time"].split() == ['"1h30m"', "job.yaml:4"]
    assert lines["fault_tolerance.teardown.grace"].split() == ['"250ms"', "job.yaml:5"]
    assert lines["spares"].split() == ["2", "--spares"]
    assert lines["nodes"].split() == ["3", "$NVRX_SLURM_NODES"]
    assert lines["fault_tolerance.max_restarts"].split() == ["3", "default"]


def test_what_show_prints_as_json_loads_again(nvrx: Nvrx, tmp_path: Path) -> None:
    """Every value is one that job.yaml takes, and the job is the same."""
    (tmp_path / "job.yaml").write_text(JOB)
    flat = json.loads(nvrx("config", "show", "--json").stdout)
    (tmp_path / "name.yaml").write_text("")
    again = load(tmp_path / "name.yaml", {key: value for key, value in flat.items() if value is not None}).spec
    assert again == load(tmp_path / "job.yaml").spec


def test_the_schema_is_json(nvrx: Nvrx) -> None:
    """`config schema` prints one JSON document that closes every block to unknown keys."""
    schema = json.loads(nvrx("config", "schema").stdout)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["name"]["description"]


def test_a_mistake_is_one_message_and_exit_code_2(nvrx: Nvrx, tmp_path: Path) -> None:
    """`config show` of a bad file says what is wrong, and prints nothing else."""
    (tmp_path / "job.yaml").write_text("name: a\nnodes: x\n")
    done = nvrx("config", "show")
    assert (done.returncode, done.stdout) == (EXIT_USAGE, "")
    assert done.stderr == "nvrx-slurm: error: job.yaml:2: nodes: must be a whole number, not 'x'\n"
