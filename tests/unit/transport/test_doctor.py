"""The findings of `transport doctor` for given conditions, and for this node."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from nvrx_slurm.transport.doctor import (
    Level,
    TransportCheck,
    examine,
    gibibytes,
    is_fit,
    known_as,
    measure,
    measure_apart,
    rdma,
    room_for_rings,
)
from nvrx_slurm.transport.errors import TransportError

MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30
NO_LIMIT = resource.RLIM_INFINITY


@pytest.fixture(scope="module")
def here() -> list[TransportCheck]:
    """The findings for this node, made once."""
    return examine()


def test_this_node_can_do_what_is_used_by_default(here: list[TransportCheck]) -> None:
    """The doctor makes a ring, and reads payloads in place and over a socket: it tries them instead of inspecting."""
    findings = {finding.part: finding for finding in here}
    assert list(findings) == [
        "/dev/shm", "rings", "shm", "tcp", "host name", "open files", "ucxx", "RDMA", "nixl"
    ]  # fmt: skip
    assert is_fit(list(findings.values()))
    for part in ("shm", "tcp"):
        assert findings[part].level is Level.OK
        assert "GB/s" in findings[part].seen
        assert findings[part].todo == ""


def test_the_page_shows_each_part(here: list[TransportCheck]) -> None:
    """The parts are in the order of the report."""
    page = (Path(__file__).parents[3] / "docs" / "transport.md").read_text()
    _, _, rest = page.partition("PART        LEVEL   SEEN")
    shown = [line.split("  ")[0] for line in rest.partition("```")[0].splitlines()[1:]]
    assert shown == [finding.part for finding in here]


def test_each_problem_comes_with_what_to_do(here: list[TransportCheck]) -> None:
    """Each finding that is a warning or a failure says what to do."""
    assert [each.part for each in here if each.level in (Level.WARN, Level.FAIL) and not each.todo] == []


def test_the_pace_is_measured_on_payloads_that_were_read() -> None:
    """Both numbers are measured in this run, and large payloads have more bytes per second."""
    pace = measure("tcp")
    assert 0 < pace.round_trip_s < 5
    assert pace.bytes_per_s > 1024 / pace.round_trip_s


def test_a_transport_that_cannot_be_tried_is_reported_with_its_own_error() -> None:
    """It is tried in a process of its own, so that a crash ends only that process."""
    with pytest.raises(TransportError, match="'pigeons' is none of tcp"):
        measure_apart("pigeons")
    with pytest.raises(TransportError, match="'pigeons' is none of tcp"):
        measure("pigeons")


@pytest.mark.parametrize(
    ("size", "free", "level", "words"),
    [
        (64 * GIBIBYTE, 60 * GIBIBYTE, Level.OK, "64.0 GiB, 60.0 GiB free"),
        (64 * MEBIBYTE, 64 * MEBIBYTE, Level.WARN, "64 MiB, 64 MiB free: no more than containers have by default"),
        (65 * MEBIBYTE, 64 * MEBIBYTE, Level.OK, "65 MiB, 64 MiB free"),
        (64 * GIBIBYTE, 6 * GIBIBYTE, Level.WARN, "64.0 GiB, 6.0 GiB free"),
    ],
)
def test_shared_memory_that_is_small_or_nearly_full_is_reported(
    size: int, free: int, level: Level, words: str
) -> None:
    """Containers have 64 MiB by default."""
    finding = room_for_rings(size, free)
    assert (finding.level, finding.seen) == (level, words)
    assert bool(finding.todo) == (level is not Level.OK)


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["127.0.1.1"], "n1 is 127.0.1.1: the loopback"),
        (["::1"], "n1 is ::1: the loopback"),
        (["192.0.2.7"], "n1 is 192.0.2.7: no address of this node"),
        (["127.0.0.1", "2001:db8::7"], "n1 is 127.0.0.1, 2001:db8::7: no address of this node"),
    ],
)
def test_a_host_name_that_peers_could_not_use_is_reported(addresses: list[str], words: str) -> None:
    """The doctor finds out whether an address is this node's by binding to it."""
    finding = known_as("n1", addresses)
    assert (finding.level, finding.seen) == (Level.WARN, words)
    assert "PayloadServer(ring, host=" in finding.todo


@pytest.mark.parametrize(
    ("devices", "resources", "memlock", "level", "todo"),
    [
        ([], (), 8192, Level.ABSENT, ""),
        ([], ("tcp/eth0",), NO_LIMIT, Level.ABSENT, ""),
        (["mlx5_0"], (), NO_LIMIT, Level.WARN, "pip install"),
        (["mlx5_0"], ("self/memory", "tcp/eth0"), NO_LIMIT, Level.WARN, "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"),
        (["mlx5_0"], ("tcp/eth0", "rc_mlx5/mlx5_0:1"), 8 * MEBIBYTE, Level.WARN, "ulimit -l unlimited"),
        (["mlx5_0"], ("tcp/eth0", "rc_mlx5/mlx5_0:1"), NO_LIMIT, Level.OK, ""),
        (["efa_0"], ("srd/efa_0:1",), NO_LIMIT, Level.OK, ""),
    ],
)
def test_rdma_is_there_when_ucx_uses_it_and_may_pin_memory(
    devices: list[str], resources: tuple[str, ...], memlock: int, level: Level, todo: str
) -> None:
    """A device alone is not enough: the UCX of the wheels cannot use it."""
    finding = rdma(devices, resources, memlock)
    assert finding.level is level
    assert todo in finding.todo
    assert bool(finding.todo) == bool(todo)


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 MiB"), (MEBIBYTE, "1 MiB"), (1023 * MEBIBYTE, "1023 MiB"), (GIBIBYTE, "1.0 GiB")]
)
def test_sizes_are_shown_in_the_unit_that_fits(size: int, words: str) -> None:
    """Sizes are shown in MiB or GiB."""
    assert gibibytes(size) == words
