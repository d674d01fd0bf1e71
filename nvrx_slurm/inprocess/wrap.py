"""The wrapper: options around a function, and one call at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from nvrx_slurm.inprocess.abort import Abort, AbortTorchDistributed, has_process_group
from nvrx_slurm.inprocess.admission import COMPLETED, LEFT, RunAdmission, RunStarted
from nvrx_slurm.inprocess.attribution import DEATHS, Interruption
from nvrx_slurm.inprocess.barriers import MemberProcess
from nvrx_slurm.inprocess.call import CallWrapper
from nvrx_slurm.inprocess.completion import Completion
from nvrx_slurm.inprocess.compose import Compose
from nvrx_slurm.inprocess.environment import launch
from nvrx_slurm.inprocess.exception import NestedCallError, OptionError, RestartError, StoreError
from nvrx_slurm.inprocess.finalize import Finalize
from nvrx_slurm.inprocess.health_check import HealthCheck
from nvrx_slurm.inprocess.initialize import Initialize
from nvrx_slurm.inprocess.ledger import Lost
from nvrx_slurm.inprocess.options import WrapperOptions, with_patience, without_host
from nvrx_slurm.inprocess.rank_assignment import ActivateAllRanks, RankAssignment, ShiftRanks
from nvrx_slurm.inprocess.rank_filter import RankFilter
from nvrx_slurm.inprocess.store import Store
from nvrx_slurm.inprocess.store_redis import RedisStore
from nvrx_slurm.inprocess.terminate import Terminate
from nvrx_slurm.util.log import get_logger
from nvrx_slurm.util.processes import process_space, started_ticks

log = get_logger("inprocess")

_AS_TEXT: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    import annotationlib

    # Otherwise a signature evaluates the annotations.
    _AS_TEXT["annotation_format"] = annotationlib.Format.STRING

A = ParamSpec("A")
T = TypeVar("T")


class Wrapper:
    """Restarts a function on all healthy ranks, at the same time and inside the same processes, when one fails.

    ```python
    @inprocess.Wrapper(soft_timeout=timedelta(minutes=5), hard_timeout=timedelta(minutes=8), …)
    def train(call: inprocess.CallWrapper, config: Config) -> float: ...

    train(config)
    ```

    Every rank calls the wrapped function, in its main thread. It returns on all ranks once all active ranks have
    returned in the same iteration, each with its own value; ranks in reserve return None. On a rank that is out it
    raises the reason: RestartError, or what the function or a callback raised.

    The group:
        store_factory, store_kwargs: the class of the store that the ranks share, and its arguments.
        rank_assignment: the ranks of the next iteration, from those of the last one and those that are out.
        rank_filter: which of them are active; `rank_assignment` can decide that too.

    Callbacks, each with a FrozenState:
        initialize: before the function, in each iteration. finalize: after a fault, once the function was left.
        abort: unblocks the main thread; called from another thread. health_check: whether this rank can go on.
        completion: once all ranks have returned. terminate: when this rank leaves for good.

    Intervals: monitor_thread_interval (how long clean-up code may run before it is interrupted too),
    monitor_process_interval (how often timeouts are checked), heartbeat_interval, progress_watchdog_interval
    (automatic progress).

    Bounds:
        soft_timeout: after this time without progress the iteration is interrupted. hard_timeout: after this time
        the process is killed.
        heartbeat_timeout: a rank whose monitor sends no heartbeat for this time is out, and dead by then.
        barrier_timeout, completion_timeout: how long ranks wait for each other between iterations, and at the end.
        last_call_wait: how long other ranks may report concurrent faults; it ends once all ranks have reported.
        termination_grace_time: between SIGTERM and SIGKILL.

    monitor_process_logfile: an absolute path; `{rank}` stands for the initial rank. enabled: False returns functions
    as they are.

    Raises OptionError, naming the option or the relation of two bounds that is wrong.
    """

    def __init__(
        self,
        *,
        store_factory: type[Store] = RedisStore,
        store_kwargs: Mapping[str, Any] | None = None,
        initialize: Initialize | None = None,
        abort: Abort | None = AbortTorchDistributed(),  # noqa: B008  it holds nothing
        finalize: Finalize | None = None,
        health_check: HealthCheck | None = None,
        rank_assignment: RankAssignment | None = None,
        rank_filter: RankFilter | None = None,
        completion: Completion | None = None,
        terminate: Terminate | None = None,
        monitor_thread_interval: timedelta = timedelta(seconds=1),
        monitor_process_interval: timedelta = timedelta(seconds=1),
        heartbeat_interval: timedelta = timedelta(seconds=1),
        progress_watchdog_interval: timedelta = timedelta(seconds=1),
        soft_timeout: timedelta = timedelta(seconds=60),
        hard_timeout: timedelta = timedelta(seconds=90),
        heartbeat_timeout: timedelta = timedelta(seconds=30),
        barrier_timeout: timedelta = timedelta(seconds=120),
        completion_timeout: timedelta = timedelta(seconds=120),
        last_call_wait: timedelta = timedelta(seconds=1),
        termination_grace_time: timedelta = timedelta(seconds=5),
        monitor_process_logfile: str | None = None,
        enabled: bool = True,
    ) -> None:
        # Each argument is the option of its name; `WrapperOptions` checks them.
        given = locals()
        del given["self"]
        own_kwargs = {} if store_kwargs is None else store_kwargs
        given["store_kwargs"], given["ignored"] = without_host(store_factory, own_kwargs)
        if rank_assignment is None:
            given["rank_assignment"] = Compose(ActivateAllRanks(), ShiftRanks())
        self.options = with_patience(WrapperOptions(**given))

    @overload
    def __call__(self, function: Callable[Concatenate[CallWrapper, A], T]) -> Callable[A, T | None]: ...

    @overload
    def __call__(self, function: Callable[A, T]) -> Callable[A, T | None]: ...

    def __call__(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """The function, restarted when a rank fails. The caller leaves out its parameter that is a CallWrapper. (Any
        parameter may be one; type checkers know only of the first.)

        Raises OptionError for a function that returns before it has run.
        """
        if not self.options.enabled:
            return function
        if any(is_lazy(each) for is_lazy in _LAZY for each in (function, _called(function))):
            raise OptionError(
                f"Wrapper: {_name(function)} is a coroutine or a generator; wrap what runs it to its end"
            )

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> T | None:
            return _call(self.options, function, args, kwargs)

        return wrapped


@dataclass(slots=True)
class _PastCalls:
    """The calls of this process in one group, and the members lost in them. `run`: the run that they belong to, and
    `before`: how many calls there were when this process joined it."""

    calls: int = 0
    lost: dict[int, Lost] = field(default_factory=dict)
    run: RunStarted | None = None
    before: int = 0


_histories: dict[str, _PastCalls] = {}
_running: list[str] = []

_ENDS = DEATHS | {Interruption.UNHEALTHY}  # after these a process has ended, or will


_LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that runs when this is called: behind a `functools.partial`, or an object's `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if inspect.isroutine(function) or inspect.isclass(function):
        return function
    return type(function).__call__


def _name(function: Callable[..., Any]) -> str:
    """The function's name in messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _call(
    options: WrapperOptions, function: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> T | None:
    name = _name(function)
    if threading.current_thread() is not threading.main_thread():
        raise NestedCallError(f"{name} must be called in the main thread: restarts are delivered there")
    if _running:
        raise NestedCallError(f"{name} was called inside of {_running[-1]}, which is wrapped too: wrap one of them")
    if has_process_group():
        raise OptionError(
            f"{name} was called with a process group of torch.distributed, which the first restart would destroy:"
            " call init_process_group inside of the wrapped function, and destroy_process_group before another call"
        )
    own = launch()
    history = _histories.setdefault(own.group, _PastCalls())
    if options.ignored and own.rank == history.calls == 0:  # once in a group
        names, store = ", ".join(sorted(options.ignored)), options.store_factory.__name__
        log.warning(
            "store_kwargs: %s ignored: no rank hosts a %s, and it is found or started without them", names, store
        )
    process = MemberProcess(
        host=own.host, pid=os.getpid(), began=started_ticks(os.getpid()) or 0, space=process_space()
    )
    call = CallWrapper(options, own, history.calls, process)
    # Before the others wait for this rank: wrong arguments are a TypeError on all of them.
    args, kwargs = inject(function, args, kwargs, call)
    admission = None
    if history.run is None or own.rank in history.lost:
        # Those that left the earlier run alive, this rank among them, may call again; dead ranks cannot.
        dead = {member: each for member, each in history.lost.items() if each.interruption in _ENDS}
        if own.rank in dead:
            raise RestartError(f"rank {own.rank} has left its group in an earlier call: {dead[own.rank].text}")
        admission = RunAdmission(
            options.store_factory(**options.store_kwargs),
            own,
            process,
            within_s=options.barrier_timeout.total_seconds(),
            heartbeat_timeout_s=options.heartbeat_timeout.total_seconds(),
            interval_s=options.heartbeat_interval.total_seconds(),
            again=history.run,
            out=tuple(dead),
        )
        history.run, history.before = admission.enter(), history.calls
        # A rank that died before this process joined: nothing more is known of it.
        died, text = Interruption.TERMINATED, "it died in an earlier call"
        before = {rank: Lost(iteration=0, member=rank, interruption=died, text=text) for rank in history.run.out}
        history.lost = {rank: dead.get(rank, lost) for rank, lost in before.items()}
    history.calls += 1
    _running.append(name)
    way = None
    try:
        key = history.run.first + history.calls - 1 - history.before
        value = call.run(lambda: function(*args, **kwargs), history.lost, key=key)
        way = COMPLETED
        return value  # type: ignore[no-any-return]
    except StoreError:
        # The store would be waited for once more.
        raise
    except BaseException:
        way = LEFT
        raise
    finally:
        _running.pop()
        history.lost.update(call.lost)
        if admission is not None and way is not None and os.getpid() == process.pid:
            with contextlib.suppress(RestartError):
                ended = sum(each.interruption in _ENDS for each in history.lost.values())
                admission.leave(history.run, way, ended)


def inject(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call's arguments, with `value` for each parameter that is annotated with its type. The caller may leave
    such a parameter out, at any position, or pass None for it.

    Raises TypeError, as the call itself would, if the arguments do not fit.
    """
    try:
        signature = inspect.signature(function, **_AS_TEXT)
    except ValueError:  # a builtin without a signature
        return args, dict(kwargs)
    try:
        hints = typing.get_type_hints(_called(function))
    except Exception:
        # An annotation may name what exists for a type checker only: then the text of the annotations counts.
        hints = {}
    annotations = {name: hints.get(name, each.annotation) for name, each in signature.parameters.items()}
    wanted = [name for name, each in annotations.items() if _asks_for(each, type(value))]
    kept = signature.replace(parameters=[each for name, each in signature.parameters.items() if name not in wanted])
    # Arguments that fit with and without the parameter include it only if they pass None for it.
    whole, without = (_bound(each, args, kwargs) for each in (signature, kept))
    if whole is not None and (without is None or all(whole.get(name) is None for name in wanted)):
        given = whole
    else:
        given = dict(kept.bind(*args, **kwargs).arguments)
    bound = inspect.BoundArguments(signature, OrderedDict(given | dict.fromkeys(wanted, value)))
    return bound.args, bound.kwargs


def _bound(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return None


def _asks_for(annotation: Any, kind: type) -> bool:
    if isinstance(annotation, str):
        parts = annotation.replace("Optional[", "").replace("]", "").split("|")
        return any(part.strip().rsplit(".", 1)[-1] == kind.__name__ for part in parts)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return any(_asks_for(each, kind) for each in typing.get_args(annotation))
    return annotation is kind
