"""Makes the digits example importable the way Python does it for a script: by its folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "examples" / "digits"))
