"""`python -m ci …`: the flows that ship, as `nvrx-slurm ci run ci/flows …` runs them."""

from __future__ import annotations

import sys
from pathlib import Path

from nvrx_slurm.cli import main

FLOWS = Path(__file__).parent / "flows"

if __name__ == "__main__":
    sys.argv[1:1] = ["ci", "run", str(FLOWS)]
    main()
