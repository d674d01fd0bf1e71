"""Where this tool's own files lie: the site files that are layers of every job, and the user's cache and state.

The folders are those of the XDG Base Directory Specification.
"""

from __future__ import annotations

from pathlib import Path

from nvrx_slurm.jobspec import env

SITE_FILE = "config.yaml"
_NAME = "nvrx-slurm"


def site_files() -> tuple[Path, ...]:
    """The user's site file and the machine's, strongest first, whether they exist or not."""
    first = (env.get("XDG_CONFIG_DIRS") or "").partition(":")[0]
    return (_home("XDG_CONFIG_HOME", ".config") / SITE_FILE, Path(first or "/etc/xdg") / _NAME / SITE_FILE)


def cache_folder() -> Path:
    """Where what can be made again is kept for this user: `$XDG_CACHE_HOME/nvrx-slurm`. It may not exist."""
    return _home("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """Where what this user's jobs have learned is kept: `$XDG_STATE_HOME/nvrx-slurm`. It may not exist."""
    return _home("XDG_STATE_HOME", ".local/state")


def _home(variable: str, usual: str) -> Path:
    named = (env.get(variable) or "").strip()
    return (Path(named) if named else Path.home() / usual) / _NAME
