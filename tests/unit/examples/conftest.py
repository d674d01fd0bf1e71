"""Adds the folder of the digits example to the import path, as Python does for a script."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples" / "digits"))
