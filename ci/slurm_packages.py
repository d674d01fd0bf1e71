"""Install the programs that the tests start, Slurm's and container runtimes; `python -m ci.slurm_packages`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "slurmdbd",
    "sbatch",
    "mariadbd",
    "ps",
    "cc",
    "ip",
    "redis-server",
    "openssl",
    "podman",
    "ch-run",
)
DEBIAN = (
    "slurm-wlm",
    "munge",
    "slurmdbd",
    "mariadb-server",
    "procps",
    "gcc",
    "libc6-dev",
    "iproute2",
    "redis-server",
    "openssl",
    "podman",
    "runc",
    "uidmap",
    "charliecloud-runtime",
)
RHEL = (
    "slurm",
    "slurm-slurmctld",
    "slurm-slurmd",
    "slurm-slurmdbd",
    "munge",
    "mariadb-server",
    "procps-ng",
    "gcc",
    "glibc-devel",
    "iproute",
    "redis",
    "openssl",
    "podman",
    "charliecloud",
)
SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/libexec")


def missing() -> list[str]:
    """The programs that are not here."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


def install(packages: Sequence[str]) -> None:
    """Install them on Debian and its kin; with sudo where we are not root. Raises CalledProcessError."""
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    # Packages must not start daemons of their own here: the tests start theirs.
    policy = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"]
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        subprocess.run([*prefix, *policy, "apt-get", *words], check=True, stdout=subprocess.DEVNULL)


def try_to_install(packages: Sequence[str], lacking: Sequence[str]) -> None:
    """Install them if this is Debian or its kin, and say what happens."""
    print(f"installing {', '.join(packages)} (missing: {', '.join(lacking)})", file=sys.stderr)
    if Path("/etc/debian_version").exists():
        try:
            install(packages)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"that failed: {error}", file=sys.stderr)


def main() -> int:
    """0: all are here, or were installed."""
    lacking = missing()
    if not lacking:
        return 0
    try_to_install(DEBIAN, lacking)
    lacking = missing()
    if lacking:
        print(
            f"the tests on a real Slurm need {', '.join(lacking)}. Install them:\n"
            f"  Debian, Ubuntu:  sudo apt-get install -y {' '.join(DEBIAN)}\n"
            f"  RHEL and kin:    sudo dnf install -y epel-release && sudo dnf install -y {' '.join(RHEL)}",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
