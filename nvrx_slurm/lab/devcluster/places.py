"""Where a development cluster keeps its files.

<state>/<name>/            0700   `$XDG_STATE_HOME/nvrx-slurm/clusters`
  cluster.json                    what the cluster is (spec.ClusterSpec)
  slurm.conf, cgroup.conf         and slurmdbd.conf (0600) with accounting
  daemons/<daemon>.json           which process each daemon is (processes.Identity)
  logs/<daemon>.log               and <daemon>.err: what it printed before it had a log
  controller/, database/          slurmctld's state, MariaDB's data
  runtime                         link to the other folder:
/tmp/nvrx-<name>-XXXX/     0700   short, since a unix socket's path has at most 107 bytes
  key/munge.key            0600
  munge/munge.socket              the right to run jobs as the owner (see below)
  database/                       MariaDB's socket
  n1/, n2/, …                     each slurmd's spool, with its steps' sockets

Every folder is for its owner alone. slurmctld takes a job from any user with a credential of this cluster's munged,
and slurmd, which does not run as root, starts that job as the cluster's owner. munged itself makes its socket for
everybody (0777): the folder above is what keeps other users from it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.jobspec import site
from nvrx_slurm.util import ownership

_RUNTIME_LINK = "runtime"
PRIVATE = 0o700


class Places:
    """All paths of one cluster: `state` is its state folder, `runtime` its short one."""

    def __init__(self, state: Path, runtime: Path) -> None:
        self.state, self.runtime = state, runtime
        self.slurm_conf, self.slurmdbd_conf = state / "slurm.conf", state / "slurmdbd.conf"
        self.controller_state, self.database = state / "controller", state / "database"
        self.daemons, self.logs = state / "daemons", state / "logs"
        self.munge_key = runtime / "key" / "munge.key"
        self.munge_socket = runtime / "munge" / "munge.socket"
        self.database_socket = runtime / "database" / "db.socket"

    def spool(self, node: str) -> Path:
        return self.runtime / node

    def log(self, daemon: str) -> Path:
        return self.logs / f"{daemon}.log"

    def errors(self, daemon: str) -> Path:
        return self.logs / f"{daemon}.err"

    def remove(self) -> None:
        """Delete everything; what is already gone is fine."""
        # The state folder last: it is the claim on the name, and its link leads to the other one.
        for folder in (self.runtime, self.state):
            shutil.rmtree(folder, ignore_errors=True)
        if self.state.exists() or self.runtime.exists():
            left = self.state if self.state.exists() else self.runtime
            raise NvrxError(f"{left}: could not be removed; delete it by hand")


def clusters_folder() -> Path:
    """The folder with one folder per cluster."""
    return site.state_folder() / "clusters"


def check(name: str) -> None:
    """Refuse a cluster whose records another user could have written: they name processes to kill and folders to
    delete. A cluster that is not there is fine. Raises UnsafePath, OSError."""
    with contextlib.suppress(FileNotFoundError):
        ownership.check_base(clusters_folder(), "XDG_STATE_HOME")
        os.close(ownership.open_private_folder(clusters_folder() / name))


def claim(name: str) -> Places:
    """Make the cluster's folders; the name is then taken. Raises UsageError when it already is."""
    state = clusters_folder() / name
    state.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    check(name)
    try:
        # The folder is the claim: of two commands that bring up one name at once, one fails here.
        state.mkdir(mode=PRIVATE)
    except FileExistsError:
        raise UsageError(
            f"cluster {name!r} already exists ({state}): take it down with"
            f" `nvrx-slurm cluster down --name {name}`, or choose another --name"
        ) from None
    places = Places(state, runtime=state)
    try:
        # In /tmp, not $TMPDIR: that may be deep, and then the paths of sockets do not fit.
        places = Places(state, runtime=Path(tempfile.mkdtemp(prefix=f"nvrx-{name}-", dir="/tmp")))  # 0700
        (state / _RUNTIME_LINK).symlink_to(places.runtime)
        for folder in (places.daemons, places.logs, places.controller_state):
            folder.mkdir(mode=PRIVATE)
        for holder in (places.munge_key, places.munge_socket, places.database_socket):
            holder.parent.mkdir(mode=PRIVATE)
    except BaseException:  # a full /tmp, or Ctrl-C: the name is free again
        places.remove()
        raise
    return places


def existing(name: str) -> Places:
    """The folders of a cluster of which nothing else may be known. Raises UnsafePath."""
    check(name)
    state = clusters_folder() / name
    # The link is missing where `up` was killed between its two folders.
    link = state / _RUNTIME_LINK
    return Places(state=state, runtime=link.readlink() if link.is_symlink() else state)
