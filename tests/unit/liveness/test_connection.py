"""The liveness connection: it is authenticated, and its end is noticed at once."""

from __future__ import annotations

import asyncio
import os

import pytest

from nvrx_slurm.agent.linux import ProvenConnection
from nvrx_slurm.liveness import connection as liveness
from nvrx_slurm.liveness.connection import ALIVE, FENCED, GOODBYE, LivenessServer


class Ears:
    """A liveness server, and the callbacks that it made."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue = asyncio.Queue()
        self.server = LivenessServer("token", lambda *who: self.say("alive", who), lambda *who: self.say("lost", who))

    def say(self, what, who):
        self.heard.put_nowait((what, *who))

    async def next(self):
        return await asyncio.wait_for(self.heard.get(), 60.0)


@pytest.fixture
async def ears():
    ears = Ears()
    ears.port = await ears.server.start("127.0.0.1")
    yield ears
    await ears.server.close()


async def dial(ears, token="token"):
    return await liveness.connect(
        "127.0.0.1", ears.port, token=token, node="n1", incarnation="a", interval_s=1.0, timeout_s=15.0
    )


async def connect(ears, token="token"):
    return ProvenConnection(*await dial(ears, token))


async def test_closed_connection_is_reported(ears):
    """When the connection ends, the server reports the node and its agent as lost."""
    connection = await connect(ears)
    assert await ears.next() == ("alive", "n1", "a")
    connection.close()
    assert await ears.next() == ("lost", "n1", "a")


async def test_duplicate_of_the_connection_keeps_it_whole(ears):
    """The node is lost only when all duplicates are closed: the supervisor keeps one until the last worker is
    dead."""
    connection = await connect(ears)
    second = os.dup(connection.fileno())
    await ears.next()
    connection.close()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(ears.heard.get(), 0.2)
    os.close(second)
    assert await ears.next() == ("lost", "n1", "a")


async def test_goodbye_is_no_death(ears):
    """An agent that says goodbye before it closes the connection is not lost."""
    connection = await connect(ears)
    await ears.next()
    connection.say(GOODBYE)
    connection.close()
    again = await connect(ears)
    assert await ears.next() == ("alive", "n1", "a")
    again.close()


async def test_wrong_token_is_refused(ears):
    """Without the job's token no process can keep a dead node alive or report a node as dead."""
    with pytest.raises(OSError, match="closed the connection"):
        await connect(ears, token="guess")
    assert ears.heard.empty()


async def test_closing_controller_reports_no_agent_as_lost(ears):
    """A controller that ends reports none of its agents as lost."""
    connection = await connect(ears)
    await ears.next()
    await ears.server.close()
    assert ears.heard.empty()
    connection.close()


async def test_alive_is_reported(ears):
    """The connection also shows that a node is alive if its heartbeats do not reach the store."""
    connection = await connect(ears)
    assert await ears.next() == ("alive", "n1", "a")
    connection.say(ALIVE)
    assert await ears.next() == ("alive", "n1", "a")
    connection.close()


async def test_fenced_agent_receives_fenced(ears):
    """The controller sends FENCED on the connection of that agent only, not to a newer agent of the node."""
    connection = await connect(ears)
    await ears.next()
    ears.server.fence("n1", "older")
    ears.server.fence("n1", "a")
    assert await connection.hear() == FENCED
    connection.close()


async def test_agent_that_connected_again_is_not_lost(ears):
    """While an agent has a newer connection, the end of its older one is not reported."""
    first = await connect(ears)
    await ears.next()
    second = await connect(ears)
    await ears.next()
    first.close()
    second.close()
    assert await ears.next() == ("lost", "n1", "a")
    await asyncio.sleep(0)
    assert ears.heard.empty()


async def test_silence_counts_from_the_last_answer_of_the_peers_kernel(ears):
    """It stays short while the kernel of the controller's host answers, even if the controller sends nothing."""
    connection = await connect(ears)
    await ears.next()
    assert 0.0 <= connection.silence_s() < 10.0
    connection.close()
    with pytest.raises(OSError):
        connection.silence_s()
