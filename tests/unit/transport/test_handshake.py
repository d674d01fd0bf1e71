"""The handshake: each side proves that it knows the token, and a proof cannot be used twice. Over real sockets."""

from __future__ import annotations

import contextlib

import pytest

from nvrx_slurm.transport import protocol
from nvrx_slurm.transport.errors import PayloadCorrupt, PayloadTimeout, PeerRefused, PeerReset
from nvrx_slurm.transport.protocol import REASONS, PeerLink, TokenHandshake, greet, pass_through, refusal
from tests.transport.harness import TOKEN, soon
from tests.unit.transport.sides import OTHER_TOKEN, Side, admitted, two_ends


def receive(link: PeerLink, size: int) -> bytearray:
    frame = bytearray(size)
    link.receive_into(memoryview(frame), soon())
    return frame


def test_both_know_the_token() -> None:
    """The server admits the client, and the client learns the server's eviction time."""
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server, eviction_s=12.5))
        welcome = greet(client, TOKEN, soon())
        client.send(welcome.proof, None, soon())
        assert side.result() is True
        assert welcome.eviction_s == 12.5


def test_a_client_without_the_token_is_not_admitted() -> None:
    """A proof made without the token is refused."""
    for proof in (bytes(protocol.PROOF_BYTES), b"\xff" * protocol.PROOF_BYTES):
        with two_ends() as (client, server):
            side = Side(lambda server=server: admitted(server))
            client.send(protocol.ClientHello(protocol.VERSION, bytes(protocol.NONCE_BYTES)).pack(), None, soon())
            receive(client, protocol.CHALLENGE_BYTES)
            client.send(proof, None, soon())
            assert side.result() is False


def test_a_client_sends_no_proof_to_a_server_of_another_job() -> None:
    """The server's own proof is wrong: the client raises PeerRefused and sends nothing more to it."""
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server, OTHER_TOKEN))
        with pytest.raises(PeerRefused, match="another token"):
            greet(client, TOKEN, soon())
        client.close()
        with pytest.raises(PeerReset):
            side.result()


def test_the_servers_proof_is_not_the_clients() -> None:
    """A client that sends the server's own proof back is not admitted."""
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server))
        client.send(protocol.ClientHello(protocol.VERSION, bytes(protocol.NONCE_BYTES)).pack(), None, soon())
        challenge = protocol.Challenge.unpack(receive(client, protocol.CHALLENGE_BYTES))
        client.send(challenge.proof, None, soon())
        assert side.result() is False


def test_a_recorded_proof_is_of_no_use() -> None:
    """A recorded proof, replayed on a new connection with the same hello, answers a challenge that is no longer
    asked."""
    nonce = bytes(range(protocol.NONCE_BYTES))

    class Overheard(Exception):
        pass

    class Tapped:
        """The client's link, which records the hello that it sends."""

        def __init__(self, link: PeerLink) -> None:
            self.link, self.hello = link, b""

        def send(self, frame: bytes, payload: memoryview | None, deadline: float) -> None:
            self.hello = frame
            self.link.send(frame, payload, deadline)

        def receive_into(self, buffer: memoryview, deadline: float) -> None:
            self.link.receive_into(buffer, deadline)

    with two_ends() as (client, server):
        side = Side(lambda: admitted(server))
        tapped = Tapped(client)
        welcome = greet(tapped, TOKEN, soon())  # type: ignore[arg-type]
        client.send(welcome.proof, None, soon())
        assert side.result() is True
    assert nonce not in tapped.hello
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server))
        client.send(tapped.hello, None, soon())
        receive(client, protocol.CHALLENGE_BYTES)
        client.send(welcome.proof, None, soon())
        assert side.result() is False


def test_a_recorded_challenge_of_a_server_is_of_no_use() -> None:
    """A server that repeats another connection's challenge has no proof for this client's nonce."""
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server))
        client.send(protocol.ClientHello(protocol.VERSION, bytes(protocol.NONCE_BYTES)).pack(), None, soon())
        overheard = bytes(receive(client, protocol.CHALLENGE_BYTES))
        client.close()
        with pytest.raises(PeerReset):
            side.result()

    def repeat(link: PeerLink) -> None:
        receive(link, protocol.HELLO_BYTES)
        link.send(overheard, None, soon())

    with two_ends() as (client, server):
        side = Side(lambda: repeat(server))
        with pytest.raises(PeerRefused, match="another token"):
            greet(client, TOKEN, soon())
        side.result()


def test_a_client_of_another_version_gets_the_servers_version() -> None:
    """The client gets the server's version, and no proof."""
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server))
        client.send(protocol.ClientHello(protocol.VERSION + 1, bytes(protocol.NONCE_BYTES)).pack(), None, soon())
        challenge = protocol.Challenge.unpack(receive(client, protocol.CHALLENGE_BYTES))
        assert (challenge.version, challenge.status) == (protocol.VERSION, protocol.ResponseStatus.VERSION)
        assert challenge.proof == bytes(protocol.PROOF_BYTES)
        assert side.result() is False


def test_a_server_of_another_version_is_refused() -> None:
    """The client's error has both versions."""

    def other(link: PeerLink) -> None:
        receive(link, protocol.HELLO_BYTES)
        link.send(
            protocol.Challenge(9, protocol.ResponseStatus.VERSION, 0, bytes(32), bytes(32)).pack(), None, soon()
        )

    with two_ends() as (client, server):
        side = Side(lambda: other(server))
        with pytest.raises(PeerRefused, match=f"version 9 .* this side {protocol.VERSION}"):
            greet(client, TOKEN, soon())
        side.result()


@pytest.mark.parametrize(
    "status", [status for status in protocol.ResponseStatus if status is not protocol.ResponseStatus.OK]
)
def test_a_server_that_turns_away_says_why(status: protocol.ResponseStatus) -> None:
    """Any answer to the hello other than OK raises PeerRefused with the server's reason."""

    def away(link: PeerLink) -> None:
        receive(link, protocol.HELLO_BYTES)
        link.send(refusal(status), None, soon())

    with two_ends() as (client, server):
        side = Side(lambda: away(server))
        with pytest.raises(
            PeerRefused, match=REASONS.get(status, "version" if status.name == "VERSION" else status.name)
        ):
            greet(client, TOKEN, soon())
        side.result()


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\nHost: n1\r\n".ljust(200), bytes(200), b"\xff" * 200])
def test_what_is_no_hello_is_corrupt(hello: bytes) -> None:
    """The first bytes of another protocol end the connection with PayloadCorrupt, on either side."""
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server))
        client.send(hello, None, soon())
        with pytest.raises(PayloadCorrupt):
            side.result()
        side = Side(lambda: server.send(hello, None, soon()))
        with pytest.raises(PayloadCorrupt):
            greet(client, TOKEN, soon())
        side.result()


@pytest.mark.parametrize("stage", ["hello", "challenge", "proof"])
def test_each_wait_of_the_hello_is_bounded(stage: str) -> None:
    """A silent peer causes PayloadTimeout, whichever side waits."""
    with two_ends() as (client, server), contextlib.ExitStack() as ended:
        if stage == "challenge":
            with pytest.raises(PayloadTimeout):
                greet(client, TOKEN, soon(0.05))
            return
        if stage == "proof":
            client.send(protocol.ClientHello(protocol.VERSION, bytes(protocol.NONCE_BYTES)).pack(), None, soon())
        with pytest.raises(PayloadTimeout):
            ended.enter_context(contextlib.nullcontext(pass_through(server, TokenHandshake(TOKEN, 60.0), soon(0.05))))


def test_a_very_long_eviction_fits_the_frame() -> None:
    """A server with an eviction time of 100 days can still answer the hello."""
    with two_ends() as (client, server):
        side = Side(lambda: admitted(server, eviction_s=100 * 86400.0))
        welcome = greet(client, TOKEN, soon())
        client.send(welcome.proof, None, soon())
        assert side.result() is True
        assert welcome.eviction_s > 40 * 86400.0
