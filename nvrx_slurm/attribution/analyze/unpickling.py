"""Reads a pickle of plain values, and nothing else: no class, no call, no import is known here.

The standard unpickler, restricted, would not do: a memo index of four bytes makes it reserve up to 32 GiB. This one
keeps its memo in a dict, so that what it takes is bounded by the size of the file. Opcodes are those of protocols
2 to 5 (Lib/pickletools.py describes each).
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any

from nvrx_slurm.errors import MalformedRecord


class NotPlainError(MalformedRecord):
    """The pickle is torn, or holds more than containers, numbers and texts; the message says which."""


def load_plain(data: bytes) -> Any:
    """The value that was pickled: dicts, lists, tuples, numbers, texts, None. Raises NotPlainError."""
    machine = _Machine(data)
    try:
        return machine.run()
    except UnicodeDecodeError as error:
        raise NotPlainError(f"a text that is no UTF-8, before byte {machine.position}") from error
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, struct.error) as error:
        raise NotPlainError(f"torn or no pickle, at byte {machine.position}") from error


class _Machine:
    """A stack, a memo, and the bytes still to read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        while (opcode := self.take(1)) != pickle.STOP:
            act = _ACTS.get(opcode)
            if act is None:
                known = (each.name for each in pickletools.opcodes if each.code == opcode.decode("latin-1"))
                name = next(known, f"byte {opcode!r}")
                raise NotPlainError(
                    f"{name}: only containers, numbers and texts are read, not this at byte {self.position}"
                )
            act(self)
        return self.stack.pop()

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise NotPlainError(f"ends early, at byte {len(self.data)}")
        return self.data[start : self.position]

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def since_mark(self) -> list[Any]:
        """What was pushed since the last mark; the stack below it is back."""
        above, self.stack = self.stack, self.marks.pop()
        return above

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def memoize(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def last(self, count: int) -> list[Any]:
        """The values on top, taken off the stack."""
        if len(self.stack) < count:
            raise NotPlainError(f"more values are taken than there are, at byte {self.position}")
        above, self.stack[-count:] = self.stack[-count:], []
        return above

    def push(self, value: object) -> None:
        self.stack.append(value)

    def set_items(self, flat: list[Any]) -> None:
        for key, value in zip(flat[::2], flat[1::2], strict=False):
            # Only names and numbers are keys: to hash a tuple a million deep ends the process.
            if not isinstance(self.stack[-1], dict) or not isinstance(key, (str, int, float)):
                raise NotPlainError(f"an item of no dict, or with a key that is no name, at byte {self.position}")
            self.stack[-1][key] = value

    def extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise NotPlainError(f"an element of no list, at byte {self.position}")
        self.stack[-1].extend(values)


_Act = Callable[[_Machine], object]


def _push(value: Callable[[_Machine], Any]) -> _Act:
    return lambda machine: machine.push(value(machine))


def _number(form: str) -> _Act:
    return _push(lambda machine: machine.number(form))


def _text(form: str) -> _Act:
    # As the pickler encodes texts: a file name that is not UTF-8 has lone surrogates.
    return _push(lambda machine: machine.take(machine.number(form)).decode("utf-8", "surrogatepass"))


def _get(form: str) -> _Act:
    return _push(lambda machine: machine.memo[machine.number(form)])


def _put(form: str) -> _Act:
    return lambda machine: machine.memoize(machine.number(form))


_ACTS: dict[bytes, _Act] = {
    pickle.PROTO: lambda machine: machine.take(1),
    pickle.FRAME: lambda machine: machine.take(8),
    pickle.MARK: _Machine.mark,
    pickle.NONE: _push(lambda _: None),
    pickle.NEWTRUE: _push(lambda _: True),
    pickle.NEWFALSE: _push(lambda _: False),
    pickle.BININT: _number("<i"),
    pickle.BININT1: _number("<B"),
    pickle.BININT2: _number("<H"),
    pickle.LONG1: _push(lambda machine: int.from_bytes(machine.take(machine.number("<B")), "little", signed=True)),
    pickle.BINFLOAT: _number(">d"),
    pickle.SHORT_BINUNICODE: _text("<B"),
    pickle.BINUNICODE: _text("<I"),
    pickle.BINUNICODE8: _text("<Q"),
    pickle.EMPTY_LIST: _push(lambda _: []),
    pickle.EMPTY_TUPLE: _push(lambda _: ()),
    pickle.EMPTY_DICT: _push(lambda _: {}),
    pickle.APPEND: lambda machine: machine.extend(machine.last(1)),
    pickle.APPENDS: lambda machine: machine.extend(machine.since_mark()),
    pickle.SETITEM: lambda machine: machine.set_items(machine.last(2)),
    pickle.SETITEMS: lambda machine: machine.set_items(machine.since_mark()),
    pickle.TUPLE: lambda machine: machine.push(tuple(machine.since_mark())),
    pickle.TUPLE1: lambda machine: machine.push(tuple(machine.last(1))),
    pickle.TUPLE2: lambda machine: machine.push(tuple(machine.last(2))),
    pickle.TUPLE3: lambda machine: machine.push(tuple(machine.last(3))),
    pickle.BINPUT: _put("<B"),
    pickle.LONG_BINPUT: _put("<I"),
    pickle.MEMOIZE: lambda machine: machine.memoize(len(machine.memo)),
    pickle.BINGET: _get("<B"),
    pickle.LONG_BINGET: _get("<I"),
}
