"""A store that does what none may, where a monitor can import it from."""

from __future__ import annotations

from nvrx_slurm.inprocess.store_redis import RedisConnection, RedisStore


class FlawedStore(RedisStore):
    """One whose connections break in a way that no store may, from the second beat on."""

    def connect(self, group: str, call: int) -> RedisConnection:
        connection = super().connect(group, call)
        beats = iter([connection.beat(0, None)])
        connection.beat = lambda *_: next(beats)  # type: ignore[method-assign]
        return connection
