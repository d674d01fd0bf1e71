"""Where this tool's own files lie: the site files that are layers of every job, and the user's cache and state."""

from __future__ import annotations

from pathlib import Path

from platformdirs import PlatformDirs

SITE_FILE = "config.yaml"
_DIRS = PlatformDirs("nvrx-slurm", appauthor=False)


def site_files() -> tuple[Path, ...]:
    """The user's site file and the machine's, strongest first, whether they exist or not."""
    return (Path(_DIRS.user_config_path) / SITE_FILE, Path(_DIRS.site_config_path) / SITE_FILE)


def cache_folder() -> Path:
    """Where what can be made again is kept for this user: `$XDG_CACHE_HOME/nvrx-slurm`. It may not exist."""
    return Path(_DIRS.user_cache_path)


def state_folder() -> Path:
    """Where what this user's jobs have learned is kept: `$XDG_STATE_HOME/nvrx-slurm`. It may not exist."""
    return Path(_DIRS.user_state_path)
