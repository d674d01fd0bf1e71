"""Which files a change touches, by git."""

from __future__ import annotations

import subprocess

from ci.mutants.model import ROOT

AUTO = "auto"


def changed_files(base: str) -> set[str] | None:
    """The files that differ from `base`, those that are not committed included. AUTO: from where this branch left
    origin/main, or else from the commit before. None: there is no such commit here (a shallow clone, no repository).
    """
    bases = [base]
    if base == AUTO:
        head, left = _git("rev-parse", "HEAD"), _git("merge-base", "HEAD", "origin/main")
        bases = [each for each in (left if left != head else None, "HEAD~1") if each is not None]
    for each in bases:
        names = _git("diff", "--name-only", each)
        if names is not None:
            new = _git("ls-files", "--others", "--exclude-standard") or ""
            return {*names.splitlines(), *new.splitlines()}
    return None


def _git(*words: str) -> str | None:
    """What git prints; None: it fails, or there is none."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
