"""Finding the addresses of a host."""

from __future__ import annotations

import errno
import os
import socket
import time

import pytest

from nvrx_slurm.transport import tcp
from nvrx_slurm.transport.errors import PayloadTimeout


def test_host_whose_lookup_has_timed_out_in_the_system_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(*_: object, **__: object) -> None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as broken:
        broken.setattr(socket, "getaddrinfo", times_out)
        with pytest.raises(PayloadTimeout):
            tcp.resolve("127.0.0.1", 9, time.monotonic() + 5)
    assert tcp.resolve("127.0.0.1", 9, time.monotonic() + 5)[0][1] == ("127.0.0.1", 9)
    tcp.forget("127.0.0.1", 9)
