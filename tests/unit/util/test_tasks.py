"""How asyncio tasks report errors, and how they are ended."""

import asyncio
import contextlib

from nvrx_slurm.util.tasks import end, start


async def test_what_a_task_raises_arrives_and_a_cancellation_does_not():
    """Errors are reported, cancellations are not; the set has a task only until it ends."""
    errors: list[BaseException] = []
    among: set[asyncio.Task[None]] = set()

    async def failing() -> None:
        raise ConnectionError("closed")

    start(failing(), among, errors.append)
    start(asyncio.sleep(0), among, errors.append)
    start(asyncio.sleep(99), among, errors.append).cancel()
    await asyncio.wait(among)
    assert [type(error) for error in errors] == [ConnectionError]
    assert not among


async def test_a_task_that_takes_its_cancellation_for_an_error_ends_all_the_same():
    """A task that swallows its cancellation, as a loop around redis-py sometimes does, is cancelled again."""
    swallowed = asyncio.Event()

    async def patient() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        swallowed.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(patient())
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await end([task])
    assert swallowed.is_set() and task.cancelled()


async def test_what_a_task_raises_instead_is_not_raised_again():
    """A task that ends with its own error when it is cancelled has ended; the error is not raised."""

    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("closed")

    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    await end([task])
    assert isinstance(task.exception(), ConnectionError)
