"""The interpreter of workers that need torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench.errors import PeerMissing

_HAS_TORCH = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"


def torch_python(peers: Path) -> str:
    """The peers' one, or the one that runs this. Raises PeerMissing where none of them has torch."""
    for python in ((peers / "python").absolute(), Path(sys.executable)):
        if python.exists() and subprocess.run([python, "-c", _HAS_TORCH], check=False, timeout=60).returncode == 0:
            return str(python)
    raise PeerMissing(f"neither {peers / 'python'} nor {sys.executable} has torch")
