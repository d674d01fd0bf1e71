"""The text of slurm.conf and the other files, the cluster's bounds, and the programs that it needs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.lab.devcluster import configuration, processes, programs
from nvrx_slurm.lab.devcluster.daemons import last_words, recorded
from nvrx_slurm.lab.devcluster.places import Places
from nvrx_slurm.lab.devcluster.spec import ClusterSpec, check_request, decode, encode, of_daemons
from nvrx_slurm.util.clock import SystemClock
from nvrx_slurm.util.files import write_private


def spec(version: tuple[int, int] = (22, 5), database_port: int | None = None) -> ClusterSpec:
    return ClusterSpec(
        name="dev",
        user="ann",
        hostname="here",
        slurm_version=version,
        cpus_per_node=8,
        controller_port=10001,
        node_ports=(10002, 10003),
        database_port=database_port,
        state="/home/ann/.local/state/nvrx-slurm/clusters/dev",
        runtime="/tmp/nvrx-dev-abcdefgh",
    )


def program_that_prints(text: str, folder: Path) -> str:
    program = folder / "slurmctld"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    return str(program)


def settings(text: str) -> dict[str, str]:
    """Maps key to value for the lines that have one setting."""
    return dict(line.split("=", 1) for line in text.splitlines() if not line.startswith(("NodeName", "Partition")))


def test_a_damaged_record_of_a_daemon_hides_no_other(tmp_path: Path) -> None:
    """Otherwise the cluster could not even be taken down."""
    places = Places(tmp_path, tmp_path)
    places.daemons.mkdir(mode=0o700)
    whole = processes.Identity(pid=1, started=2, boot="b")
    for name, text in ("n1", b""), ("n2", msgspec.json.encode(whole)):
        write_private(places.daemons / f"{name}.json", text)
    assert recorded(places) == {"n2": whole}


def test_every_node_has_its_own_port_and_claims_its_cpus() -> None:
    """There is one NodeName line for each node, in order, with the port and the CPUs of the spec."""
    lines = [line for line in configuration.slurm_conf(spec()).splitlines() if line.startswith("NodeName")]
    assert [line.split()[0] for line in lines] == ["NodeName=n1", "NodeName=n2"]
    assert "Port=10002 CPUs=8" in lines[0]
    assert "Port=10003 CPUs=8" in lines[1]


def test_given_settings_replace_the_tools_own() -> None:
    """They replace the tool's own settings and Slurm's defaults, and are kept in cluster.json."""
    asked = msgspec.structs.replace(spec(), settings={"KillWait": "7", "PreemptMode": "REQUEUE"})
    written = settings(configuration.slurm_conf(decode(encode(asked))))
    assert (written["KillWait"], written["PreemptMode"]) == ("7", "REQUEUE")
    assert written["ClusterName"] == "dev"


def test_one_default_partition_takes_all_nodes() -> None:
    """A job that names no partition runs, on any of the nodes and for any time."""
    last = configuration.slurm_conf(spec()).splitlines()[-1]
    assert last == "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"


def test_daemons_run_as_the_caller_with_a_munge_of_the_cluster() -> None:
    """Root is not needed, and no key is shared with another cluster of the machine."""
    conf = settings(configuration.slurm_conf(spec()))
    assert conf["SlurmUser"] == conf["SlurmdUser"] == "ann"
    assert conf["AuthInfo"] == "socket=/tmp/nvrx-dev-abcdefgh/munge/munge.socket"


def test_accounting_is_configured_only_where_it_was_asked_for() -> None:
    """Without a database port slurm.conf has no accounting; with one, slurmdbd.conf has the same port."""
    assert "AccountingStorage" not in configuration.slurm_conf(spec())
    with_accounting = spec(database_port=10009)
    assert settings(configuration.slurm_conf(with_accounting))["AccountingStoragePort"] == "10009"
    assert settings(configuration.slurmdbd_conf(with_accounting))["DbdPort"] == "10009"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((21, 8), None),
        ((22, 5), "CgroupPlugin=cgroup/v1\n"),
        ((23, 2), "CgroupPlugin=disabled\n"),
        ((24, 11), "CgroupPlugin=disabled\n"),
    ],
)
def test_cgroup_conf_keeps_every_release_away_from_cgroups(version: tuple[int, int], expected: str | None) -> None:
    """Each release gets a setting that it knows."""
    assert configuration.cgroup_conf(spec(version)) == expected


def test_socket_paths_fit_even_for_the_longest_name() -> None:
    """A step's socket, below the spool of the last node of the longest-named cluster, stays under 108 bytes."""
    runtime = Path(f"/tmp/nvrx-{'x' * 32}-abcdefgh")
    step = Places(Path("/s"), runtime).spool("n64") / "n64_4294967295.4294967295.4294967295"
    assert len(str(step).encode()) < 108


def test_cluster_json_round_trips() -> None:
    """Later commands read what `up` writes."""
    assert decode(encode(spec(database_port=10009))) == spec(database_port=10009)


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a-", "a/b", "..", "a\n", "x" * 33])
def test_a_name_that_is_no_folder_name_is_refused(name: str) -> None:
    """The name becomes a folder and a Slurm cluster name."""
    with pytest.raises(UsageError):
        check_request(name, 6, 4)


@pytest.mark.parametrize(("nodes", "cpus"), [(0, 4), (65, 4), (-1, 4), (6, 0), (6, 10_000)])
def test_a_size_out_of_bounds_is_refused(nodes: int, cpus: int) -> None:
    """The message names the option and its bounds."""
    with pytest.raises(UsageError, match=r"--nodes|--cpus-per-node"):
        check_request("dev", nodes, cpus)


@pytest.mark.parametrize(
    ("said", "version"),
    [("slurm-wlm 22.05.8\n", (22, 5)), ("slurm 24.11.0-1", (24, 11)), ("slurm 23.02.7", (23, 2))],
)
def test_the_version_is_read_from_what_slurm_prints(said: str, version: tuple[int, int], tmp_path: Path) -> None:
    """Debian prints another name than other builds; only the number is used."""
    assert programs.slurm_version(program_that_prints(said, tmp_path)) == version


def test_no_version_is_one_clear_error(tmp_path: Path) -> None:
    """The output of a program without a version is an error."""
    with pytest.raises(NvrxError, match="`slurmctld -V` printed 'usage: slurmctld'"):
        programs.slurm_version(program_that_prints("usage: slurmctld", tmp_path))


@pytest.mark.parametrize(
    ("missing", "packager", "line"),
    [
        (["slurmctld", "sinfo", "munged"], "apt-get", "sudo apt-get install -y slurm-wlm munge"),
        (["slurmdbd", "mariadbd"], "apt-get", "sudo apt-get install -y slurmdbd mariadb-server"),
        (["munged", "slurmdbd"], "dnf", "sudo dnf install -y munge slurm-slurmdbd"),
    ],
)
def test_missing_programs_come_with_the_line_that_installs_them(missing: list[str], packager: str, line: str) -> None:
    """One line installs all missing programs, with each package once."""
    assert line in programs.missing_message(missing, packager)


def test_sinfo_is_read_by_node() -> None:
    """The state keeps its star, which means that the node does not answer."""
    assert programs.parse_node_states("n1 idle\nn2 down*\n\n") == {"n1": "idle", "n2": "down*"}


def test_database_server_of_a_script_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """subprocess has killed only the script: taking the cluster down finds and kills the server."""
    script = tmp_path / "mariadb-install-db"
    script.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    script.chmod(0o700)
    places = Places(state=tmp_path / "state", runtime=tmp_path)
    places.logs.mkdir(parents=True)
    monkeypatch.setattr(configuration, "_INSTALL_TIMEOUT_S", 1)
    of_cluster = msgspec.structs.replace(spec(database_port=10004), state=str(places.state), runtime=str(tmp_path))
    with pytest.raises(NvrxError, match="did not end"):
        configuration.prepare(of_cluster, {"mariadb-install-db": str(script)})
    assert len(processes.kill(lambda table: of_daemons(places, table), SystemClock())) == 1


def test_the_errors_before_the_end_of_a_log_are_shown(tmp_path: Path) -> None:
    """The errors before the end are shown, although mariadb-install-db prints more lines of advice than are shown."""
    places = Places(state=tmp_path, runtime=tmp_path)
    places.logs.mkdir()
    advice = [f"advice {number}" for number in range(40)]
    places.errors("mariadb-install").write_text("\n".join(["begins", "[ERROR] no space left", *advice]))
    lines = last_words("mariadb-install", places).splitlines()
    assert "[ERROR] no space left" in lines and "begins" not in lines
    assert lines[-1] == advice[-1] and advice[0] not in lines
