"""The text of slurm.conf, cgroup.conf and slurmdbd.conf. Pure: a spec in, text out.

Values that differ from Slurm's defaults do so to make node loss quick to see, or so that several nodes fit on one
machine. See slurm.conf(5).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.lab.devcluster.daemons import MARK, Daemon, last_words
from nvrx_slurm.lab.devcluster.spec import ClusterSpec

PARTITION = "main"
SLURMD_TIMEOUT_S = 10
# Shorter than Slurm's default of 30 s, and long enough for a teardown of the default grace.
KILL_WAIT_S = 20

_MEMORY_PER_NODE_MB = 65_536  # claimed, not there: nothing enforces it
_MEMORY_PER_CPU_MB = 1_024


def slurm_conf(spec: ClusterSpec) -> str:
    """slurm.conf for this cluster."""
    places = spec.places
    settings: dict[str, object] = {
        "ClusterName": spec.name,
        "SlurmctldHost": "localhost",
        "SlurmctldPort": spec.controller_port,
        "SlurmUser": spec.user,
        "SlurmdUser": spec.user,
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={places.munge_socket}",
        # slurmctld listens on the loopback address only. A credential without a hash of its message is refused: one
        # that was overheard cannot be sent again with another message (CVE-2022-29500).
        "CommunicationParameters": "NoCtldInAddrAny,block_null_hash",
        "StateSaveLocation": places.controller_state,
        "SlurmdSpoolDir": places.runtime / "%n",
        "SlurmctldPidFile": places.runtime / "slurmctld.pid",
        "SlurmdPidFile": places.runtime / "%n.pid",
        "SlurmctldLogFile": places.log("slurmctld"),
        "SlurmdLogFile": places.log("%n"),
        # proctrack/cgroup needs cgroups that an ordinary user may not make.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": _MEMORY_PER_CPU_MB,
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        "SlurmdParameters": "config_overrides",  # more CPUs and memory than there are
        # By default Slurm looks at the queue again after 3 to 60 s, for which tests would wait.
        "SchedulerParameters": "batch_sched_delay=0,bf_interval=1,sched_interval=5",
        # A node that was DOWN is used again as soon as its slurmd registers.
        "ReturnToService": 2,
        "TreeWidth": 65_533,  # no node relays messages, so a dead one delays no other
        "SlurmdTimeout": SLURMD_TIMEOUT_S,
        "MessageTimeout": 5,
        "KillWait": KILL_WAIT_S,
        "UnkillableStepTimeout": 30,
        "InactiveLimit": 0,
        "MinJobAge": 300,
        "JobRequeue": 1,
    }
    if spec.database_port is not None:
        settings |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": "localhost",
            "AccountingStoragePort": spec.database_port,
            "AccountingStoragePass": places.munge_socket,  # with munge it is no password but the socket
        }
    settings |= spec.settings
    nodes = [
        f"NodeName={node} NodeHostname={spec.hostname} NodeAddr=127.0.0.1 Port={port}"
        f" CPUs={spec.cpus_per_node} RealMemory={_MEMORY_PER_NODE_MB} State=UNKNOWN"
        for node, port in zip(spec.nodes, spec.node_ports, strict=True)
    ]
    partition = f"PartitionName={PARTITION} Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    return "\n".join([*(f"{key}={value}" for key, value in settings.items()), *nodes, partition, ""])


def cgroup_conf(spec: ClusterSpec) -> str | None:
    """cgroup.conf for this cluster, which uses no cgroup; None where Slurm does not look for one.

    From 22.05 on slurmd loads a cgroup plugin even when nothing uses it, and the one for cgroup v2 asks systemd for a
    scope, which an ordinary user does not get. `disabled` exists since 23.02; before, the plugin for v1 is the one
    that touches nothing until it is used, so it does no harm where there is no v1 either.
    """
    if spec.slurm_version >= (23, 2):
        return "CgroupPlugin=disabled\n"
    if spec.slurm_version >= (22, 5):
        return "CgroupPlugin=cgroup/v1\n"
    return None


def slurmdbd_conf(spec: ClusterSpec) -> str:
    """slurmdbd.conf for this cluster. The database is reached by its unix socket alone, so it has no password."""
    places = spec.places
    settings: dict[str, object] = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={places.munge_socket}",
        "DbdHost": "localhost",
        "DbdPort": spec.database_port,
        "SlurmUser": spec.user,
        "LogFile": places.log("slurmdbd"),
        "PidFile": places.runtime / "slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": spec.user,
        "StorageLoc": "slurm_acct_db",
        "CommitDelay": 1,
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


_INSTALL_TIMEOUT_S = 180  # 2 s on an idle machine; a minute and more was seen on a busy one


def prepare(spec: ClusterSpec, programs: Mapping[str, str]) -> None:
    """Write slurmdbd.conf and make MariaDB's system tables (about 2 s). Raises NvrxError."""
    places = spec.places
    places.slurmdbd_conf.touch(mode=0o600)  # slurmdbd refuses one that others can read
    places.slurmdbd_conf.write_text(slurmdbd_conf(spec))
    command = [
        programs["mariadb-install-db"],
        "--no-defaults",
        f"--datadir={places.database}",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        f"--user={spec.user}",
    ]
    # It is a script. Where its wait is cut short, `down` finds by the mark the server that the script has started.
    environment = {**os.environ, MARK: str(places.state)}
    with places.errors("mariadb-install").open("ab") as log:
        try:
            done = subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=_INSTALL_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            problem = f"mariadb-install-db did not end within {_INSTALL_TIMEOUT_S} s"
            raise NvrxError(f"{problem}\n{last_words('mariadb-install', places)}") from None
    if done.returncode:
        raise NvrxError(f"mariadb-install-db failed\n{last_words('mariadb-install', places)}")


def database(spec: ClusterSpec, programs: Mapping[str, str]) -> Daemon:
    """MariaDB, on a unix socket only, in a folder that only the owner may enter."""
    places = spec.places
    options: dict[str, str | Path] = {
        "datadir": places.database,
        "socket": places.database_socket,
        "pid-file": places.runtime / "mariadb.pid",
        "user": spec.user,
        "innodb-buffer-pool-size": "32M",
        "innodb-lock-wait-timeout": "900",  # what slurmdbd asks for
        # No commit waits for the disk: a crash may lose a second of the accounts, which does no harm here.
        "innodb-flush-log-at-trx-commit": "0",
    }
    return Daemon(
        name="mariadb",
        command=[
            programs["mariadbd"],
            "--no-defaults",
            "--skip-networking",
            "--skip-grant-tables",
            *(f"--{key}={value}" for key, value in options.items()),
        ],
        folder=places.runtime,
    )


def slurmdbd(spec: ClusterSpec, programs: Mapping[str, str]) -> Daemon:
    """Slurm's own accounting daemon. libmariadb takes the socket's path from MYSQL_UNIX_PORT."""
    return Daemon(
        name="slurmdbd",
        command=[programs["slurmdbd"], "-D"],
        folder=spec.places.runtime,
        environment={**spec.client_environment, "MYSQL_UNIX_PORT": str(spec.places.database_socket)},
    )
