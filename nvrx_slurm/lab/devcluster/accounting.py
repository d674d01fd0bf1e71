"""slurmdbd and a MariaDB of its own, so that `sacct` answers. Nobody but the owner can reach the database."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.lab.devcluster.configuration import slurmdbd_conf
from nvrx_slurm.lab.devcluster.daemons import Daemon, last_words
from nvrx_slurm.lab.devcluster.spec import ClusterSpec

_INSTALL_TIMEOUT_S = 60


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
    with places.errors("mariadb-install").open("ab") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=_INSTALL_TIMEOUT_S, check=False)
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
        environment={
            "SLURM_CONF": os.fspath(spec.places.slurm_conf),
            "MYSQL_UNIX_PORT": os.fspath(spec.places.database_socket),
        },
    )
