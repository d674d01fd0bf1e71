"""A small image for tests, with this Python, a shell and their libraries; and the settings that podman needs here.

It is built once per machine, in a few seconds and without a network, in ~/.cache/nvrx-slurm-tests. It cannot lie
below XDG_CACHE_HOME, which is a new folder in each test run.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import inspect
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "sys", "tmp", "usr/bin", "var/tmp")
LEFT_OUT = (
    "test",
    "tests",
    "site-packages",
    "dist-packages",
    "idlelib",
    "ensurepip",
    "lib2to3",
    "tkinter",
    "config-*",
)


def cache() -> Path:
    folder = Path.home() / ".cache" / "nvrx-slurm-tests"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def image_folder() -> Path:
    """The image as a folder: `python3` and `sh` are on its PATH."""
    key = hashlib.sha256("\0".join([sys.version, sys.base_prefix, inspect.getsource(_fill)]).encode()).hexdigest()
    root = cache() / f"image-{key[:12]}"
    with (cache() / "lock").open("w") as lock:  # the workers of pytest-xdist share it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.exists():
            fresh = Path(tempfile.mkdtemp(dir=cache()))
            fresh.chmod(0o755)
            _fill(fresh)
            fresh.rename(root)
    return root


def _fill(root: Path) -> None:
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        shutil.copy(f"/etc/{name}", root / "etc" / name)
    python, shell = Path(sys._base_executable).resolve(), Path("/bin/sh").resolve()
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, _inside(root, library), ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    for program in (python, shell):
        _inside(root, program).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, _inside(root, program))
    (root / "usr/bin/python3").unlink(missing_ok=True)
    (root / "usr/bin/python3").symlink_to(python)
    if not (root / "bin").exists():
        (root / "bin").symlink_to("usr/bin")
    if not (root / "bin/sh").exists():
        (root / "bin/sh").symlink_to(shell)
    _copy_libraries(root, python, shell, *library.glob("lib-dynload/*.so"))


def _copy_libraries(root: Path, *binaries: Path) -> None:
    for binary in binaries:
        listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            path = next((word for word in line.split() if word.startswith("/")), None)
            if path and not _inside(root, Path(path)).exists():
                _inside(root, Path(path)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, _inside(root, Path(path)))


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


# What an agent imports. redis-py needs async_timeout before Python 3.11.3.
IN_PACKAGE_IMAGE = ["nvrx_slurm", "msgspec", "redis", "hiredis", "xxhash"]
if sys.version_info < (3, 11, 3):
    IN_PACKAGE_IMAGE.append("async_timeout")


def package_image(base: Path) -> Path:
    """A copy of the image in which nvrx-slurm is installed, as `pip install nvrx-slurm` would do it."""
    root = base / "image-with-package"
    shutil.copytree(image_folder(), root, symlinks=True)
    site = [sys._base_executable, "-c", "import site; print(site.getsitepackages()[0])"]
    where = Path(subprocess.run(site, capture_output=True, text=True, check=True).stdout.strip())
    target = _inside(root, where)
    target.mkdir(parents=True, exist_ok=True)
    for name in IN_PACKAGE_IMAGE:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None
        # With the bytecode, as pip compiles what it installs: otherwise each agent would compile all of it.
        ignored = shutil.ignore_patterns("*.pyc.*")  # temporary files of a process that is writing bytecode
        shutil.copytree(Path(found.origin).parent, target / name, ignore=ignored)
        _copy_libraries(root, *Path(found.origin).parent.rglob("*.so"))
    record = target / "nvrx_slurm.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvrx-slurm\nVersion: {version('nvrx-slurm')}\n")
    return root


def podman_settings() -> Path:
    """A containers.conf for CONTAINERS_CONF. With it podman also runs in a VM or container that has no systemd, that
    mixes cgroups v1 and v2, or that may not raise its limits."""
    files = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 4096)
    path = cache() / f"containers-{os.getpid()}.conf"
    runtime = 'runtime = "runc"\n' if os.geteuid() == 0 and shutil.which("runc") else ""
    path.write_text(
        f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc=1000:1000"]\n'
        f'[engine]\n{runtime}cgroup_manager = "cgroupfs"\n'
    )
    return path


def podman_image(settings: Path) -> str:
    """Import the same image into podman, and return its name there."""
    root = image_folder()
    name = f"localhost/nvrx-slurm-tests:{root.name}"
    env = {**os.environ, "CONTAINERS_CONF": str(settings)}
    with (cache() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if subprocess.run(["podman", "image", "exists", name], env=env, check=False).returncode:
            with subprocess.Popen(["tar", "--create", "--directory", root, "."], stdout=subprocess.PIPE) as packed:
                subprocess.run(
                    ["podman", "import", "--change=ENV FROM_IMAGE=yes", "--change=ENV FOO=image", "-", name],
                    stdin=packed.stdout,
                    stdout=subprocess.DEVNULL,
                    env=env,
                    check=True,
                )
    return name


def refusal(runtime: str) -> str | None:
    """Why this kernel does not let a user run a container of that runtime; None where it does."""
    # Ubuntu's AppArmor lets a user create a namespace, but not mount in it. It exempts podman, and not ch-run.
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if runtime == "podman":
        unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["podman", "unshare"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"this kernel refuses the namespaces: {tried.stderr.strip()}"
