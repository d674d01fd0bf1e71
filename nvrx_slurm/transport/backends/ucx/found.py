"""The library that is installed, and how it is set."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import threading
from typing import Any, NamedTuple

from nvrx_slurm.transport.errors import PeerRefused

SETTINGS = {
    "UCX_HANDLE_ERRORS": "none",  # SIGSEGV and its like belong to the program, and to its faulthandler
    "UCX_LOG_LEVEL": "fatal",  # a peer that goes is an exception of ours, not a line on standard error
    "UCXX_LOG_LEVEL": "fatal",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    "UCX_RNDV_FRAG_MEM_TYPE": "host",  # payloads lie in host memory; the binding would say "cuda"
    "UCX_USE_MT_MUTEX": "y",  # its threads wait for each other asleep, not spinning: half of the time of a connect
}
"""Where the user has said nothing else. UCX reads its environment when it is loaded."""

VERSION = "0.52"
"""Of the binding: what lies below its asyncio layer may be another in the next one."""

_INSTALL = "pip install 'nvrx-slurm[ucxx-cu12]' (or ucxx-cu13)"
_loading = threading.Lock()
_found: Ucx | None = None


class Ucx(NamedTuple):
    """What is used of the binding."""

    context: Any
    worker: Any
    address: Any
    endpoint: Any
    tag: Any
    tag_mask: Any
    array: Any
    canceling: Any


def load() -> Ucx:
    """Load it, once. Raises PeerRefused that says what to install."""
    global _found
    with _loading:
        if _found is None:
            _found = _load()
        return _found


def _load() -> Ucx:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        version = importlib.import_module("ucxx").__version__
        library = importlib.import_module("ucxx._lib.libucxx")
        array = importlib.import_module("ucxx._lib.arr").Array
    except (ImportError, OSError) as error:
        raise PeerRefused(f"the ucxx transport is not there ({error}): {_INSTALL}") from None
    if not version.startswith(f"{VERSION}."):
        raise PeerRefused(f"ucxx {version} is installed, and {VERSION} is needed: {_INSTALL}")
    return Ucx(
        library.UCXContext,
        library.UCXWorker,
        library.UCXAddress,
        library.UCXEndpoint,
        library.UCXXTag,
        library.UCXXTagMask,
        array,
        _canceling(),
    )


def _canceling() -> Any:
    """`ucxx::Endpoint::getCancelingSize() const`, which drops the requests that have ended since they were cancelled.

    The binding has no way to call it. Without, a connection that was cut while it sent is never freed.
    """
    with contextlib.suppress(OSError, AttributeError):
        function = ctypes.CDLL("libucxx.so")._ZNK4ucxx8Endpoint16getCancelingSizeEv
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_size_t
        return function
    return lambda endpoint: 0
