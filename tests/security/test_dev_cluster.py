"""The development cluster runs jobs as its owner, for its owner alone."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.lab.devcluster import DevCluster, names, programs, remove
from nvrx_slurm.lab.devcluster.daemons import MARK, recorded
from nvrx_slurm.lab.devcluster.places import Places
from nvrx_slurm.lab.devcluster.processes import environment_of, identify, read_table
from nvrx_slurm.lab.devcluster.spec import of_daemons
from tests.security.conftest import Bob
from tests.waiting import until

NAME = "test-security"
BOUND_S = 60
CONF = """\
ClusterName={name}
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser={alice}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge}
MpiDefault=none
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs=2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES
"""


class Owner:
    """The owner of the cluster: the user who runs the tests; where that is root, also a plain user."""

    def __init__(self, user: str, other: Bob | None) -> None:
        self.user, self._other = user, other

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments) if self._other is None else self._other.run(function, *arguments)


# ---- what alice does


def bring_up(state_home: str, accounting: bool) -> dict[str, Any]:
    os.environ["XDG_STATE_HOME"] = state_home
    spec = DevCluster.up(name=NAME, nodes=1, cpus_per_node=2, accounting=accounting).spec
    daemons = {name: record.pid for name, record in recorded(spec.places).items()}
    return {
        "name": NAME,
        "alice": spec.user,
        "controller": spec.controller_port,
        "node": spec.node_ports[0],
        "host": spec.hostname,
        "munge": str(spec.places.munge_socket),
        "runtime": spec.runtime,
        "state": spec.state,
        "daemons": daemons,
    }


def take_down(state_home: str) -> None:
    os.environ["XDG_STATE_HOME"] = state_home
    if NAME in names():
        remove(NAME)


def own_job(state_home: str) -> str:
    """The user as whom a job of the owner runs."""
    os.environ["XDG_STATE_HOME"] = state_home
    return programs.ask(DevCluster.load(NAME).environment(), "srun", "--mpi=none", "id", "-un").strip()


# ---- what bob does


def srun_as_bob(cluster: dict[str, Any], munge: str) -> list[Any]:
    """Run `id -un` on alice's cluster with a slurm.conf that bob has written."""
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder) / "slurm.conf"
        conf.write_text(CONF.format(**{**cluster, "munge": munge}))
        done = subprocess.run(
            ["srun", "--mpi=none", "--immediate=20", "id", "-un"],
            env={**os.environ, "SLURM_CONF": str(conf)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=BOUND_S,
            check=False,
        )
    return [done.returncode, done.stdout.strip(), done.stderr.strip()]


def srun_with_own_munge(cluster: dict[str, Any]) -> list[Any]:
    """The same with credentials of a munged that bob has started with a key of his own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        at = Path(folder)
        (at / "key").write_bytes(os.urandom(128))
        (at / "key").chmod(0o600)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{option}={at / file}" for option, file in files.items()]
        munged = subprocess.Popen(["munged", "--foreground", "--force", *options], stderr=subprocess.DEVNULL)
        try:
            until((at / "socket").is_socket, "bob's munged", timeout=BOUND_S)
            return srun_as_bob(cluster, str(at / "socket"))
        finally:
            munged.kill()
            munged.wait()


def reachable(places: list[str]) -> list[str]:
    """Those of the places that bob can connect to, list, or read."""
    found = []
    for place in places:
        with contextlib.suppress(PermissionError):
            mode = Path(place).stat().st_mode
            if stat.S_ISSOCK(mode):
                with socket.socket(socket.AF_UNIX) as link:
                    link.connect(place)
            elif stat.S_ISDIR(mode):
                list(Path(place).iterdir())
            else:
                Path(place).read_bytes()
            found.append(place)
    return found


# ---- tests


@pytest.fixture(params=["plain user", "root"])
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    if os.geteuid() != 0:
        if request.param == "root":
            pytest.skip("the tests do not run as root")
        yield Owner(pwd.getpwuid(os.getuid()).pw_name, None)
        return
    if request.param == "root":
        yield Owner("root", None)
        return
    other = pwd.getpwnam("daemon")  # its group has the same number, which bob.py sets too
    alice = Bob([], other.pw_uid, other.pw_uid)
    yield Owner("daemon", alice)
    alice.end()


@pytest.fixture
def state_home(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="nvrx-alice-", dir="/tmp")
    os.chown(folder, pwd.getpwnam(owner.user).pw_uid, -1)
    Path(folder).chmod(0o755)  # bob can enter it, as he can enter a home folder
    monkeypatch.setenv("XDG_STATE_HOME", folder)
    yield folder
    owner.run(take_down, folder)
    shutil.rmtree(folder)


def test_bob_gets_no_shell_from_alices_cluster(bob: Bob, owner: Owner, state_home: str) -> None:
    """Bob's slurm.conf names alice's controller and node. He can run a job neither with her munge nor with one of his
    own; she can."""
    cluster = owner.run(bring_up, state_home, False)
    attacks = {
        "her munge": bob.run(srun_as_bob, cluster, cluster["munge"]),
        "a munge of his own": bob.run(srun_with_own_munge, cluster),
    }
    for name, (code, said, complaint) in attacks.items():
        assert (code != 0, said) == (True, ""), f"with {name} bob ran a job as {said!r}: {complaint}"
    assert "Permission denied" in attacks["her munge"][2]
    assert "Invalid credential" in (Path(cluster["state"]) / "logs" / "slurmctld.log").read_text()
    assert owner.run(own_job, state_home) == owner.user


def test_bob_reaches_no_file_and_no_socket_of_the_cluster(bob: Bob, owner: Owner, state_home: str) -> None:
    """The database has no password: its socket is in a folder that bob cannot enter, and it listens on no port."""
    cluster = owner.run(bring_up, state_home, True)
    folders = [Path(cluster["runtime"]), Path(cluster["state"])]
    everything = [str(path) for folder in folders for path in [folder, *folder.rglob("*")]]
    assert len([path for path in everything if Path(path).is_socket()]) >= 2
    assert bob.run(reachable, everything) == []
    assert listening_ports(cluster["daemons"]["mariadb"]) == set()
    assert listening_ports(cluster["daemons"]["slurmctld"]) == {("127.0.0.1", cluster["controller"])}


def listening_ports(pid: int) -> set[tuple[str, int]]:
    """The addresses on which the process accepts TCP connections. Needs root, or the process's owner."""
    sockets = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {(socket.inet_ntoa(bytes.fromhex(host)[::-1][-4:]), int(port, 16)) for host, port in listening}


# ---- records that name what to kill and what to delete


def plant_cluster(home: str, victim: dict[str, Any], folder: str) -> None:
    """A cluster that bob records where alice will look for hers: its daemon is a process of hers, its folder one of
    hers."""
    os.umask(0)
    state = Path(home) / "nvrx-slurm" / "clusters" / NAME
    (state / "daemons").mkdir(parents=True)
    spec = {
        "name": NAME,
        "user": "alice",
        "hostname": "here",
        "slurm_version": [22, 5],
        "cpus_per_node": 1,
        "controller_port": 1,
        "node_ports": [2],
        "state": str(state),
        "runtime": folder,
    }
    (state / "cluster.json").write_text(json.dumps(spec))
    (state / "daemons" / "munged.json").write_text(json.dumps({"name": "munged", **victim}))


def plant_attempt(run: str, victim: dict[str, Any]) -> None:
    """Bob's list of what an attempt has left, which names a process of alice's."""
    os.umask(0)
    attempt = Path(run) / "flow" / "1"
    attempt.mkdir(parents=True)
    (attempt / "held.jsonl").write_text(json.dumps({"held": "process", "process": victim}) + "\n")


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of alice's that does not belong to any cluster."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def shared(common: Path) -> Path:
    """A folder in which both users may write, and neither may remove the other's files."""
    common.chmod(0o1777)
    return common


def record_of(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    identity = identify(process.pid)
    assert identity is not None
    return {"pid": identity.pid, "started": identity.started, "boot": identity.boot}


def call(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nvrx_slurm", *arguments],
        env={**os.environ, "XDG_STATE_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=BOUND_S,
    )


@pytest.mark.parametrize("command", ["down", "status", "kill-node", "up"])
def test_bobs_cluster_is_not_taken_for_alices(
    bob: Bob, shared: Path, tmp_path: Path, victim: subprocess.Popen[bytes], command: str
) -> None:
    """Where alice's state folder is inside a shared one, bob's records there make her kill no process and delete no
    folder."""
    precious = tmp_path / "precious"
    precious.mkdir()
    bob.run(plant_cluster, str(shared), record_of(victim), str(precious))
    node = ["n1"] if command == "kill-node" else []
    done = call(shared, "cluster", command, *node, "--name", NAME)
    assert (victim.poll(), precious.is_dir()) == (None, True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"{shared}/nvrx-slurm" in done.stderr


def test_a_list_that_bob_wrote_ends_no_process(
    bob: Bob, shared: Path, tmp_path: Path, victim: subprocess.Popen[bytes]
) -> None:
    """`ci clean` ignores a list that another user wrote, and reports it."""
    bob.run(plant_attempt, str(shared), record_of(victim))
    done = call(tmp_path, "ci", "clean", str(shared))
    assert victim.poll() is None
    assert done.returncode != 0
    assert "held.jsonl" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def marked(state: str) -> None:
    """Become a process whose environment claims that it is a daemon of alice's cluster. Prints its pid first."""
    print(os.getpid(), flush=True)
    os.execve("/bin/cat", ["cat"], {MARK: state})


def test_a_process_of_bob_is_not_taken_for_alices_daemon(bob: Bob, common: Path) -> None:
    """Root can read every environment, but that of another user's process is not trusted."""
    pid = int(bob.start(marked, str(common)).line())
    until(lambda: Path(f"/proc/{pid}/cmdline").read_bytes() == b"cat\0", "bob's process", timeout=BOUND_S)
    assert os.geteuid() != 0 or environment_of(pid).get(MARK) == str(common)
    assert pid not in of_daemons(Places(state=common, runtime=common), read_table())
