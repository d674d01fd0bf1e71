"""Reads a pickle of plain values, and nothing else: no class, no call, no import is known here.

The standard unpickler, restricted, would not do: a memo index of four bytes makes it reserve up to 32 GiB. This one
keeps its memo in a dict, so that what it takes is bounded by the size of the file. It knows the opcodes of protocols
2 to 5, which `pickletools` describes, and whose arguments that reads.
"""

from __future__ import annotations

import pickletools
from typing import Any

from nvrx_slurm.errors import MalformedRecord

# Opcodes whose argument is the value.
_NUMBERS = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"})
_TEXTS = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_CONTAINERS: dict[str, type[list[Any] | dict[Any, Any]]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_PUTS = frozenset({"BINPUT", "LONG_BINPUT", "MEMOIZE"})
# How many values they take from the stack; None: all since the last mark.
_TUPLES = {"TUPLE": None, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ADDITIONS = {"APPEND": 1, "APPENDS": None, "SETITEM": 2, "SETITEMS": None}
_TAKEN = _TUPLES | _ADDITIONS


class NotPlainError(MalformedRecord):
    """The pickle is torn, or holds more than containers, numbers and texts; the message says which."""


def load_plain(data: bytes) -> Any:
    """The value that was pickled: dicts, lists, tuples, numbers, texts, None. Raises NotPlainError."""
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    position = None
    try:
        for opcode, argument, position in pickletools.genops(data):
            name = opcode.name
            if name in _TEXTS or name in _NUMBERS:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _CONTAINERS:
                stack.append(_CONTAINERS[name]())
            elif name in _GETS:
                stack.append(memo[argument])
            elif name in _PUTS:
                memo[len(memo) if argument is None else argument] = stack[-1]
            elif name == "MARK":
                marks.append(stack)
                stack = []
            elif name in _TAKEN:
                if (count := _TAKEN[name]) is None:
                    taken, stack = stack, marks.pop()
                elif count <= len(stack):
                    taken, stack[-count:] = stack[-count:], []
                else:
                    raise NotPlainError(f"more values are taken than there are, at byte {position}")
                if name in _TUPLES:
                    stack.append(tuple(taken))
                else:
                    _extend(stack[-1], taken, name, f"at byte {position}")
            elif name not in ("PROTO", "FRAME", "STOP"):
                raise NotPlainError(
                    f"{name}: only containers, numbers and texts are read, not this at byte {position}"
                )
        return stack.pop()
    except UnicodeDecodeError as error:
        raise NotPlainError(f"a text that is no UTF-8, after byte {position}") from error
    except (LookupError, ValueError) as error:
        raise NotPlainError(f"torn or no pickle, after byte {position}: {error}") from error


def _extend(container: object, values: list[Any], name: str, where: str) -> None:
    if name.startswith("APPEND"):
        if not isinstance(container, list):
            raise NotPlainError(f"an element of no list, {where}")
        container.extend(values)
        return
    for key, value in zip(values[::2], values[1::2], strict=False):
        # Only names and numbers are keys: to hash a tuple a million deep ends the process.
        if not isinstance(container, dict) or not isinstance(key, (str, int, float)):
            raise NotPlainError(f"an item of no dict, or with a key that is no name, {where}")
        container[key] = value
