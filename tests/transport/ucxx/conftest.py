"""The ucxx transport and a far end of it, for the tests of this transport alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from nvrx_slurm.transport.backends import by_scheme
from nvrx_slurm.transport.errors import PeerRefused
from nvrx_slurm.transport.protocol import Backend
from tests.transport.links import Far


@pytest.fixture
def backend() -> Backend:
    """The transport. If it is missing, the test fails in CI, and is skipped elsewhere."""
    try:
        return by_scheme("ucxx")
    except PeerRefused as error:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(str(error))


@pytest.fixture
def far(backend: Backend) -> Iterator[Far]:
    far = Far("ucxx")
    try:
        yield far
    finally:
        far.close()
