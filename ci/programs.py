"""`python -m ci.programs [slurm] [browser] [prometheus]`: see to it that this machine has the programs of the tests.

Missing ones are installed on Debian and its kin. Without a browser or Prometheus their tests are skipped (in CI they
fail), and all others run; without Slurm nearly nothing can be tested, so that is an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SLURM = (
    *("munged", "slurmctld", "slurmd", "slurmdbd", "sbatch", "mariadbd", "ps", "cc", "ip", "redis-server", "openssl"),
    *("podman", "ch-run"),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # one is enough
PROMETHEUS = ("prometheus", "promtool")
DEBIAN = {
    "slurm": (
        *("slurm-wlm", "munge", "slurmdbd", "mariadb-server", "procps", "gcc", "libc6-dev", "iproute2"),
        *("redis-server", "openssl", "podman", "runc", "uidmap", "charliecloud-runtime"),
    ),
    "browser": ("chromium",),
    "prometheus": ("prometheus",),
}
RHEL = (
    *("slurm", "slurm-slurmctld", "slurm-slurmd", "slurm-slurmdbd", "munge", "mariadb-server", "procps-ng", "gcc"),
    *("glibc-devel", "iproute", "redis", "openssl", "podman", "charliecloud"),
)
SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/libexec")


def browser() -> str | None:
    """The path of a browser of Chromium's kind, if this machine has one."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def missing(programs: Sequence[str]) -> list[str]:
    """Those that this machine lacks."""
    # Daemons lie where an ordinary user's PATH does not reach.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])
    return [program for program in programs if shutil.which(program, path=path) is None]


def install(packages: Sequence[str]) -> None:
    """Install them on Debian and its kin; with sudo where this user is not root. Raises CalledProcessError."""
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    # Packages must not start daemons of their own here: the tests start theirs.
    policy = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"]
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        subprocess.run([*prefix, *policy, "apt-get", *words], check=True, stdout=subprocess.DEVNULL)


def lacking(kind: str) -> list[str]:
    """The programs of a kind that this machine lacks: of browsers all, or none where there is one."""
    if kind == "browser":
        return [] if browser() else list(BROWSERS)
    return missing(SLURM if kind == "slurm" else PROMETHEUS)


def main(kinds: Sequence[str]) -> int:
    """0: all are here, or were installed, or the tests that need them are skipped."""
    wanted = [kind for kind in kinds if lacking(kind)]
    if not wanted:
        return 0
    packages = [package for kind in wanted for package in DEBIAN[kind]]
    absent = [program for kind in wanted for program in lacking(kind)]
    print(f"installing {', '.join(packages)} (missing: {', '.join(absent)})", file=sys.stderr)
    if Path("/etc/debian_version").exists():
        try:
            install(packages)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            print(f"that failed: {error}", file=sys.stderr)
    for kind in wanted:
        if kind != "slurm" and (absent := lacking(kind)):
            print(f"no {kind}: {', '.join(absent)} not on PATH", file=sys.stderr)
    if "slurm" not in wanted or not (absent := lacking("slurm")):
        return 0
    print(
        f"the tests on a real Slurm need {', '.join(absent)}. Install them:\n"
        f"  Debian, Ubuntu:  sudo apt-get install -y {' '.join(DEBIAN['slurm'])}\n"
        f"  RHEL and kin:    sudo dnf install -y epel-release && sudo dnf install -y {' '.join(RHEL)}",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
