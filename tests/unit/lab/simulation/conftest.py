"""Virtual time for the tests of the simulation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nvrx_slurm.lab.simulation.loop import VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    """A loop at the start of its time."""
    loop = VirtualLoop()
    yield loop
    loop.close()
