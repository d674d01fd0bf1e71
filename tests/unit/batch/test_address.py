"""The address at which agents of other nodes reach the batch host, where its own name resolves to loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nvrx_slurm.batch import __main__ as batch
from nvrx_slurm.errors import UsageError
from nvrx_slurm.journal.folder import LOOPBACK, JobFolder
from tests.unit.core.fleet import plain

OWN = "10.0.0.1"

AddressOf = Callable[[str, bool], str]


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AddressOf:
    """Returns the address in the job.json of a job on n1, this host, and n2; given are n2's address and whether there
    is a route to it."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho n1\necho n2\n")
    scontrol.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def address(of_n2: str, has_route: bool) -> str:
        def getaddrinfo(name: str, *_: Any) -> list[tuple[Any, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (of_n2 if name == "n2" else "127.0.1.1", 0))]

        def gethostbyname(name: str) -> str:
            if ":" in of_n2:
                raise socket.gaierror(socket.EAI_NONAME, "no address")
            return of_n2

        def address_towards(host: str) -> str:
            if not has_route or host != of_n2:
                raise OSError("Network is unreachable")
            return LOOPBACK if of_n2.startswith("127.") else OWN

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(socket, "gethostbyname", gethostbyname)
        monkeypatch.setattr(batch, "address_towards", address_towards)
        return batch._info(plain(), JobFolder(tmp_path / "7"), "slurm", ("srun",), None, None).addr

    return address


@pytest.mark.parametrize(("of_n2", "expected"), [("10.0.0.2", OWN), ("127.0.0.1", LOOPBACK)])
def test_way_to_a_neighbour_is_taken_where_there_is_no_other(address: AddressOf, of_n2: str, expected: str) -> None:
    """On a network of compute nodes without a default route it is this host's address on the way to another node; on
    a development cluster, all on one host, it is loopback."""
    assert address(of_n2, True) == expected


@pytest.mark.parametrize("of_n2", ["10.0.0.2", "fd00::2"])
def test_job_whose_other_nodes_cannot_reach_it_is_refused(address: AddressOf, of_n2: str) -> None:
    """Agents of other nodes would wait for ten minutes, and then requeue the job."""
    with pytest.raises(UsageError):
        address(of_n2, False)
