"""`rollouts.py policy …`, `rollouts.py rollout`: examples/rollouts under the Python that runs the agents.

It has what they need, nvrx-slurm and numpy; a node's own may lack them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rollouts"


def main() -> None:
    """Go on as the same process, under the interpreter of our parent."""
    python = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[0]
    script, *options = sys.argv[1:]
    os.execv(python, [os.fsdecode(python), str(EXAMPLE / f"{script}.py"), *options])


if __name__ == "__main__":
    main()
