"""Finding the addresses of a host, and taking connections while descriptors are scarce."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import socket
import time

import pytest

from nvrx_slurm.transport import tcp
from nvrx_slurm.transport.errors import PayloadTimeout
from nvrx_slurm.transport.protocol import AdmissionCheck, TokenHandshake, host_and_port


def test_host_whose_lookup_has_timed_out_in_the_system_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(*_: object, **__: object) -> None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as broken:
        broken.setattr(socket, "getaddrinfo", times_out)
        with pytest.raises(PayloadTimeout):
            tcp.resolve("localhost", 9, time.monotonic() + 5)
    assert ("127.0.0.1", 9) in [address for _, address in tcp.resolve("localhost", 9, time.monotonic() + 5)]
    tcp.forget("localhost", 9)


def test_flood_that_takes_all_descriptors_costs_a_flooding_host_its_connection() -> None:
    """The honest peer has waited longest, but from another address than the flood, and keeps its connection."""
    entry = AdmissionCheck(lambda: TokenHandshake(bytes(32), 60.0), within_s=60.0)
    listener = tcp.TcpBackend().listen("127.0.0.1", 0, lambda link: None, entry)
    _, port = host_and_port(listener.address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as ends:
        ends.callback(listener.close)

        def connected(source: str) -> socket.socket:
            peer = ends.enter_context(socket.socket())
            peer.bind((source, 0))
            peer.connect(("127.0.0.1", port))
            return peer

        honest, *flood = [connected(source) for source in ("127.0.0.2", "127.0.0.1", "127.0.0.1")]
        late = ends.enter_context(socket.socket())
        deadline = time.monotonic() + 30
        while len(listener._pending) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            late.connect(("127.0.0.1", port))
            ended, _, _ = select.select([honest, *flood], [], [], 30)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert ended
        assert honest not in ended
