"""A store with a defect, in a module from which a monitor can import it."""

from __future__ import annotations

from nvrx_slurm.inprocess.store_redis import RedisConnection, RedisStore


class FlawedStore(RedisStore):
    """A store whose connections raise from the second heartbeat on, as no store may."""

    def connect(self, group: str, call: int) -> RedisConnection:
        connection = super().connect(group, call)
        beats = iter([connection.beat(0, None)])
        connection.beat = lambda *_: next(beats)  # type: ignore[method-assign]
        return connection
