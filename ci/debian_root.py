"""`python -m ci.debian_root debian:trixie -- COMMAND…`: run a command of this checkout on another Debian.

    make ci-slurm SLURM=debian:trixie           # that Debian's Slurm and its Python

debootstrap(8) makes the root file system once; it is kept for 30 days in `$XDG_CACHE_HOME/nvrx-slurm/roots`, with a
venv that has the project, editable, from this checkout, which is bound at /src. It takes root, or `sudo -n`: then the
command runs as the user who called sudo. It takes no container runtime.

    make ── this process ──pipe── init ── the command and all that it starts
                                   └─ PID 1 of a PID namespace, in a mount namespace of its own

Nothing of a run stays, whatever ends it. When make dies, the kernel kills this process; when this process dies, init
reads the end of the pipe and exits, and then the kernel kills what runs in the namespace and unmounts all of it. What
the command writes outside of the checkout is in memory: the kept root does not change. debootstrap runs under init
too; a folder `*.part` that it left when it was killed is removed by the next run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.programs import install

TREE = Path(__file__).resolve().parent.parent
MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("python3", "python3-venv", "munge", "slurm-wlm", "iproute2", "procps", "openssl")
KEPT_S = 30 * 24 * 3600.0
"""sid changes every day, and a stable suite gets its corrections."""

PASSED_ON = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT", "REQUESTS_CA", "GITHUB_", "TERM")
"""How the names of the variables begin that the command sees."""

_INSTALLED = "opt/installed"
_INTERRUPT, _TERMINATE = b"i", b"t"
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """The command's exit code; 2 where there is no such root, and none can be made."""
    if arguments[:1] == ["--init"]:
        return init(*arguments[1:5], command=arguments[5:])
    parser = argparse.ArgumentParser(prog="python -m ci.debian_root")
    parser.add_argument("slurm", metavar="debian:SUITE", help="debian:trixie, debian:sid, …")
    parser.add_argument("command", nargs="+", help="what to run in this checkout")
    parser.add_argument("--requirements", default="", help="a file in the checkout: packages with hashes")
    parser.add_argument("--mirror", default=MIRROR, help="default: %(default)s")
    options = parser.parse_args(arguments)
    family, _, suite = options.slurm.partition(":")
    if family != "debian" or not suite.isalnum():
        parser.error(f"{options.slurm}: must be debian: and a suite, such as debian:trixie or debian:sid")
    # A user's cache is no place for what root makes: sudo may keep HOME, and may not.
    cache = "/var/cache" if os.geteuid() else os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    inner = [suite, f"{cache}/nvrx-slurm/roots", options.mirror, options.requirements, *options.command]
    try:
        return supervise([sys.executable, "-m", "ci.debian_root", "--init", *inner])
    except FileNotFoundError as error:
        print(f"{error.filename} is not here: a root file system is made by root, or by `sudo -n`", file=sys.stderr)
        return 2


def supervise(command: Sequence[str]) -> int:
    """Run it as root and PID 1 of a namespace, and return its exit code. Its stdin is a pipe: through it come this
    process's SIGINT and SIGTERM, and its end. Raises FileNotFoundError where there is neither root nor sudo."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has died in between
        return 128 + signal.SIGKILL
    lifeline, ours = os.pipe()

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has just ended
            os.write(ours, _INTERRUPT if number == signal.SIGINT else _TERMINATE)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    sudo = ["sudo", "-n", f"--preserve-env={','.join(passed_on(os.environ))}"] if os.geteuid() else []
    isolated = ["unshare", "--mount-proc", "--propagation", "private", "--pid", "--fork", "--kill-child", *command]
    # In a session of its own: a terminal's Ctrl-C comes once, through the pipe.
    with subprocess.Popen([*sudo, *isolated], cwd=TREE, stdin=lifeline, start_new_session=True) as process:
        os.close(lifeline)
        code = process.wait()
    return code if code >= 0 else 128 - code


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the command sees: those of the index of packages, of GitHub's runner, of the terminal."""
    named = {name: value for name, value in environment.items() if name.upper().startswith(PASSED_ON)}
    return {name: value for name, value in named.items() if name != "PIP_FIND_LINKS"}  # a folder of this machine


# ----------------------------------------------------------------------------------------- init, PID 1 of a namespace


def init(suite: str, roots: str, mirror: str, requirements: str, *, command: Sequence[str]) -> int:
    """Run the command in the root of that suite; make the root and its venv first where it lacks them."""
    children = Children()
    threading.Thread(target=children.obey, daemon=True).start()
    packages = hashlib.sha256(" ".join(PACKAGES).encode()).hexdigest()[:8]
    root = Path(roots, f"debian-{suite}-{packages}")
    root.parent.mkdir(parents=True, exist_ok=True)
    asked = [(TREE / name).read_bytes() for name in ("pyproject.toml", *([requirements] if requirements else []))]
    digest = hashlib.sha256(b"".join(asked)).hexdigest()

    def is_kept() -> bool:
        return root.is_dir() and time.time() - root.stat().st_mtime < KEPT_S

    def is_installed() -> bool:
        return is_kept() and (root / _INSTALLED).is_file() and (root / _INSTALLED).read_text() == digest

    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        while not is_installed():
            # Alone: a run has the root for the lower layer of its overlay, and may not see it change.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_kept():
                _say(f"making {root} by debootstrap, in one or two minutes")
                if code := bootstrap(children, suite, root, mirror):
                    return code
            if not is_installed():
                _say(f"installing the project in {root}")
                script = _INSTALL_LOCKED if requirements else _INSTALL
                if code := children.enter(root, ["sh", "-ec", script, "sh", requirements], writable=True):
                    return code
                (root / _INSTALLED).write_text(digest)
            fcntl.flock(lock, fcntl.LOCK_SH)  # not atomic: another checkout's may come in between
        children.enter(root, ["sh", "-c", "echo on Debian $(cat /etc/debian_version), $(slurmctld -V), $(python -V)"])
        return children.enter(root, command)


_INSTALL = """
python3 -m venv --clear /opt/venv
pip install --quiet --editable '.[attribution,ci]' 'numpy>=1.26'  # what the flows' workloads import
"""
_INSTALL_LOCKED = """
python3 -m venv --clear /opt/venv
pip install --quiet --require-hashes -r ci/tools.txt
pip install --quiet --require-hashes -r "$1"
pip install --quiet --no-deps --no-build-isolation --editable .
"""


def bootstrap(children: Children, suite: str, root: Path, mirror: str) -> int:
    """Make the root file system. Returns an exit code, and prints the end of the log where that is not 0."""
    for old in (root, *root.parent.glob(f"{root.name}.*.part")):
        shutil.rmtree(old, ignore_errors=True)
    if shutil.which("debootstrap") is None:
        install(["debootstrap", "debian-archive-keyring"])
    part = root.with_suffix(f".{time.time_ns()}.part")
    log = root.with_suffix(".log")
    include = f"--include={','.join(PACKAGES)}"
    with log.open("wb") as output:
        command = ["debootstrap", "--variant=minbase", include, suite, str(part), mirror]
        code = children.run(command, os.environ, output=output.fileno())
    if code:
        _say(f"debootstrap failed, see {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]))
        return code
    for archive in (part / "var/cache/apt/archives").glob("*.deb"):
        archive.unlink()
    # Whole or not at all: a root that is there is complete.
    part.rename(root)
    os.utime(root)
    return 0


# $1: the root, $2: overlay, or bind to write to it; $3: an empty folder; $4: the checkout; then the command.
_ENTER = """
root=$1 how=$2 mounts=$3 tree=$4; shift 4
mount -t tmpfs -o mode=755 nvrx-slurm "$mounts"
cd "$mounts"
mkdir upper work root
if [ "$how" = bind ]; then mount --bind "$root" root
else mount -t overlay -o "lowerdir=$root,upperdir=upper,workdir=work" nvrx-slurm root; fi
cd root
mkdir -p src
mount --bind "$tree" src
mount --rbind /dev dev
mount --rbind /sys sys
mount -t proc proc proc
for folder in dev/shm tmp; do mount -t tmpfs -o mode=1777 nvrx-slurm $folder; done
mount -t tmpfs -o mode=755 nvrx-slurm run
# Names, the index of packages, and whose certificates are trusted, are those of this machine.
for file in etc/resolv.conf etc/hosts etc/pip.conf; do
  if [ -e /$file ]; then : >> $file; mount --bind /$file $file; fi
done
if [ -d /etc/ssl/certs ]; then mkdir -p etc/ssl/certs; mount --bind /etc/ssl/certs etc/ssl/certs; fi
if [ "$UID_IN" != 0 ]; then
  echo "ci:x:$UID_IN:$GID_IN::/tmp:/bin/bash" >> etc/passwd
fi
# Not chroot: a process in one gets no user namespace (user_namespaces(7)), and flows make some.
pivot_root . .
umount -l .
cd /src
exec setpriv --reuid "$UID_IN" --regid "$GID_IN" --clear-groups "$@"
"""


class Children:
    """What PID 1 starts, one at a time; it also reaps the orphans of the namespace, so that none stays a zombie."""

    def __init__(self) -> None:
        self._handle: int | None = None

    def obey(self) -> None:
        """Signal the child as the pipe says. With the other end of the pipe PID 1 exits: the kernel ends the rest. So
        it does at a signal while no child runs, as where it waits for the lock."""
        while said := os.read(sys.stdin.fileno(), 1):
            if (handle := self._handle) is None:
                break
            with contextlib.suppress(OSError):  # it has just ended, and its handle may be closed
                signal.pidfd_send_signal(handle, signal.SIGINT if said == _INTERRUPT else signal.SIGTERM)
        os._exit(128 + signal.SIGKILL)

    def run(self, command: Sequence[str], environment: Mapping[str, str], *, output: int | None = None) -> int:
        """The exit code of the command; `output`: where its stdout and stderr go."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, stdout=output, stderr=output)
        self._handle = os.pidfd_open(process.pid)
        # `wait` takes any child: orphans of the namespace end here too, since PID 1 is their parent.
        while (ended := os.wait())[0] != process.pid:
            pass
        os.close(self._handle)
        self._handle = None
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

    def enter(self, root: Path, command: Sequence[str], *, writable: bool = False) -> int:
        """The exit code of a command in the root, as root or as the user who called sudo. What it changes in the root
        stays if `writable`, and is gone when it ends if not."""
        mounts = root.parent / "mounts"  # stays empty: what is mounted there is seen in the namespace only
        mounts.mkdir(exist_ok=True)
        uid, gid = ("0", "0") if writable else (os.environ.get("SUDO_UID", "0"), os.environ.get("SUDO_GID", "0"))
        environment = passed_on(os.environ) | {
            "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root" if uid == "0" else "/tmp",
            "LANG": "C.UTF-8",
            "UID_IN": uid,
            "GID_IN": gid,
        }
        how = "bind" if writable else "overlay"
        script = ["sh", "-euc", _ENTER, "sh", str(root), how, str(mounts), str(TREE), *command]
        return self.run(["unshare", "--mount", "--propagation", "private", *script], environment)


def _say(line: str) -> None:
    print(f"{line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
