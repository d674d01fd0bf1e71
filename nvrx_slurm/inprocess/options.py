"""The options of a wrapper, checked as a whole: each bound relies on others."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import pickle
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from nvrx_slurm.inprocess.abort import Abort
from nvrx_slurm.inprocess.completion import Completion
from nvrx_slurm.inprocess.exception import OptionError
from nvrx_slurm.inprocess.finalize import Finalize
from nvrx_slurm.inprocess.health_check import HealthCheck
from nvrx_slurm.inprocess.initialize import Initialize
from nvrx_slurm.inprocess.rank_assignment import RankAssignment
from nvrx_slurm.inprocess.rank_filter import RankFilter
from nvrx_slurm.inprocess.store import Store
from nvrx_slurm.inprocess.terminate import Terminate

# Of each pair the first must be shorter: otherwise the second passes before the first could take effect.
_LESS = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)

# The arguments of nvidia_resiliency_ext's TCPStore, which rank 0 hosts. Here no rank hosts the store.
_OF_A_HOST = {"host_name", "port", "world_size", "timeout", "wait_for_workers", "multi_tenant", "use_libuv"}
# Of the heartbeat timeout: the longest patience. A rank that cannot reach the store raises StoreError within one and
# a half times its patience; its lease, after which it is killed, ends after three quarters of the timeout.
PATIENCE_SHARE = 1 / 3
_MAY_BE_ZERO = ("last_call_wait", "termination_grace_time")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperOptions:
    """As `Wrapper` documents them. Raises OptionError for a value of the wrong type, and for two bounds that
    conflict."""

    store_factory: type[Store]
    store_kwargs: Mapping[str, Any] = field(default_factory=dict)
    initialize: Initialize | None
    abort: Abort | None
    finalize: Finalize | None
    health_check: HealthCheck | None
    rank_assignment: RankAssignment
    rank_filter: RankFilter | None
    completion: Completion | None
    terminate: Terminate | None
    monitor_thread_interval: datetime.timedelta
    monitor_process_interval: datetime.timedelta
    heartbeat_interval: datetime.timedelta
    progress_watchdog_interval: datetime.timedelta
    soft_timeout: datetime.timedelta
    hard_timeout: datetime.timedelta
    heartbeat_timeout: datetime.timedelta
    barrier_timeout: datetime.timedelta
    completion_timeout: datetime.timedelta
    last_call_wait: datetime.timedelta
    termination_grace_time: datetime.timedelta
    monitor_process_logfile: str | None
    enabled: bool
    ignored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for problem, *options in self._problems():
            raise OptionError(f"Wrapper: {problem}", *options)

    def _problems(self) -> Iterator[tuple[str, ...]]:
        """The problems, each with the names of the options."""
        # Types first: what follows relies on them.
        if not isinstance(self.store_factory, type) or not issubclass(self.store_factory, Store):
            seen = f"{self.store_factory!r}"
            yield f"store_factory must be a class of stores (RedisStore, FileStore, …), not {seen}", "store_factory"
        if not isinstance(self.store_kwargs, Mapping):
            yield f"store_kwargs must be a dictionary of {self.store_factory.__name__}'s arguments", "store_kwargs"
        for name, hint in typing.get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), typing.get_args(hint) or (hint,)
            # Left out are generic types: those of the store, checked above, and `ignored`, which no user gives.
            if typing.get_origin(hint) in (None, types.UnionType) and not isinstance(value, kinds):
                wanted = " or ".join(kind.__name__.replace("NoneType", "None") for kind in kinds)
                yield f"{name} must be of type {wanted}, not {type(value).__name__} ({value!r})", name
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, datetime.timedelta):
                zero = datetime.timedelta(0)
                if value < zero or (value == zero and each.name not in _MAY_BE_ZERO):
                    least = "0 or more" if each.name in _MAY_BE_ZERO else "more than 0"
                    yield f"{each.name} must be {least}, not {value.total_seconds():g} s", each.name
        for less, more in _LESS:
            shorter, longer = getattr(self, less), getattr(self, more)
            if not shorter < longer:
                seen = f"{shorter.total_seconds():g} s and {longer.total_seconds():g} s"
                yield f"{less} must be shorter than {more}; they are {seen}", less, more
        kill = self.hard_timeout + self.termination_grace_time + self.monitor_process_interval
        if not kill < self.barrier_timeout:
            names = ("hard_timeout", "termination_grace_time", "monitor_process_interval")
            seen = f"{kill.total_seconds():g} s and {self.barrier_timeout.total_seconds():g} s"
            together = f"{names[0]}, {names[1]} and {names[2]} together must be shorter than barrier_timeout"
            yield (
                f"{together}, for which the others wait while a rank is killed; they are {seen}",
                *names,
                "barrier_timeout",
            )
        logfile = self.monitor_process_logfile
        if logfile is not None and not Path(logfile).is_absolute():
            yield f"monitor_process_logfile must be an absolute path, not {logfile!r}", "monitor_process_logfile"
        if self.store_factory.__module__ == "__main__":
            yield (
                f"the store {self.store_factory.__name__} is defined in the script itself, where its monitor process"
                " cannot find it: define it in a module that can be imported",
                "store_factory",
            )
        try:
            pickle.dumps(dict(self.store_kwargs))
        except Exception as error:
            yield f"store_kwargs must be picklable, since the monitor process gets them too: {error}", "store_kwargs"
        patience = self.store_kwargs.get("patience")
        if isinstance(patience, datetime.timedelta) and patience > self.heartbeat_timeout * PATIENCE_SHARE:
            seen = f"{patience.total_seconds():g} s and {self.heartbeat_timeout.total_seconds():g} s"
            yield (
                "the patience in store_kwargs must be at most a third of heartbeat_timeout, since a rank without"
                f" heartbeats is killed soon after that; they are {seen}",
                "store_kwargs",
                "heartbeat_timeout",
            )
        accepted = inspect.signature(self.store_factory)
        try:
            accepted.bind(**self.store_kwargs)
        except TypeError as error:
            takes = ", ".join(accepted.parameters)
            yield f"store_kwargs: {error}; {self.store_factory.__name__} takes {takes}", "store_kwargs"
        default = getattr(accepted.parameters.get("patience"), "default", None)
        is_time = isinstance(patience, datetime.timedelta) and patience > datetime.timedelta(0)
        if "patience" in self.store_kwargs and isinstance(default, datetime.timedelta) and not is_time:
            yield f"the patience in store_kwargs must be a timedelta of more than 0, not {patience!r}", "store_kwargs"
        if self.store_factory.__module__.startswith("nvrx_slurm."):
            # Not a store of the user's: it may need what is there only once the function is called.
            try:
                self.store_factory(**self.store_kwargs)
            except OptionError as error:
                yield f"store_kwargs: {error}", "store_kwargs"


def with_patience(options: WrapperOptions) -> WrapperOptions:
    """The options with a patience that goes with the heartbeat timeout, where the store takes one and none is
    named."""
    parameter = inspect.signature(options.store_factory).parameters.get("patience")
    default = None if parameter is None else parameter.default
    if not isinstance(default, datetime.timedelta) or "patience" in options.store_kwargs:
        return options
    patience = min(default, options.heartbeat_timeout * PATIENCE_SHARE)
    return dataclasses.replace(options, store_kwargs={**options.store_kwargs, "patience": patience})


def without_host(store_factory: type[Store], store_kwargs: object) -> tuple[Any, frozenset[str]]:
    """`store_kwargs` as nvidia_resiliency_ext's users have them, without what this store does not take; and the names
    that were left out. A name that is neither store's stays, and is an error."""
    is_store = isinstance(store_factory, type) and issubclass(store_factory, Store)
    if not is_store or not isinstance(store_kwargs, Mapping):  # an error: see `_problems`
        return store_kwargs, frozenset()
    parameters = inspect.signature(store_factory).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):  # a user's own, which takes any
        return store_kwargs, frozenset()
    # A port alone is on the host that MASTER_ADDR names, which is rank 0's.
    accepted = set(parameters) - (set() if "host_name" in store_kwargs else {"port"})
    ignored = frozenset(_OF_A_HOST.intersection(store_kwargs) - accepted)
    return {name: value for name, value in store_kwargs.items() if name not in ignored}, ignored
