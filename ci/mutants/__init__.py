"""Mutants: ways in which the product could be broken, one at a time, to see whether the checks notice.

`control_plane`, `node`, `libraries` and `surroundings` list them by subject; `product_copy` applies one to a copy;
`checks` runs unit tests, the simulation or flows against that copy; `__main__` chooses and prints.
"""

from __future__ import annotations

from ci.mutants.control_plane import CONTROL_PLANE
from ci.mutants.libraries import LIBRARIES
from ci.mutants.model import Mutant
from ci.mutants.node import NODE
from ci.mutants.surroundings import SURROUNDINGS

MUTANTS: tuple[Mutant, ...] = (*CONTROL_PLANE, *NODE, *LIBRARIES, *SURROUNDINGS)
