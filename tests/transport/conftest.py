"""Which transports are available here, and a check that no ring is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.transport.backends import SCHEMES, by_scheme
from nvrx_slurm.transport.errors import PeerRefused
from tests.transport.links import Far


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    """Each transport that a server can listen with. One that is missing fails in CI, and is skipped elsewhere."""
    try:
        by_scheme(request.param)
    except PeerRefused as error:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse(str(error))
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def fars() -> Iterator[dict[str, Far]]:
    """Far ends that are still alive, for reuse: such a process takes a second to start."""
    fars: dict[str, Far] = {}
    yield fars
    for far in fars.values():
        far.close()


@pytest.fixture
def far(scheme: str, fars: dict[str, Far]) -> Iterator[Far]:
    """The far end."""
    far = fars.pop(scheme, None) or Far(scheme)
    try:
        yield far
        if far.begin_again():
            fars[scheme] = far
    finally:
        if far is not fars.get(scheme):
            far.close()


@pytest.fixture(autouse=True)
def nothing_left_in_shared_memory() -> Iterator[None]:
    """Assert that no ring of this process is left, even if the test has killed processes."""
    before = set(Path("/dev/shm").glob("nvrx-ring-*"))
    yield
    ours = {path for path in set(Path("/dev/shm").glob("nvrx-ring-*")) - before if _is_of_ours(path)}
    assert not ours


def _is_of_ours(path: Path) -> bool:
    """Whether this process has created the ring, and should have removed it. Other tests run at the same time."""
    return path.name.startswith(f"nvrx-ring-{os.getpid()}-")
