"""Which objects are refused, and with what message; pickles are sent and read only if both sides allow them."""

from __future__ import annotations

import collections
import enum
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from nvrx_slurm.transport.codec import decode, encode
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA
from nvrx_slurm.transport.schema import MOST_DEPTH, MOST_LEAVES
from tests.unit.transport.objects import is_same, payload_of


class Point(NamedTuple):
    x: int


class Colour(enum.IntEnum):
    RED = 1


class Own(np.ndarray[Any, Any]):
    """A subclass of an array, whose bytes are not its whole state."""


class Unpicklable:
    def __reduce__(self) -> str:
        raise ValueError("mine")


TITLED = np.dtype([(("title", "name"), "f4")])

REFUSED = [
    np.array([{}], dtype=object),
    np.zeros(2, [("a", "O")]),
    memoryview(np.array([{}, 1], dtype=object)),
    np.zeros(2, np.longdouble),
    np.zeros(2, np.clongdouble),
    np.zeros(2, [("a", [("b", "g")])]),
    np.zeros(2, TITLED),
    np.zeros(2, []),
    np.ma.masked_array([1, 2], [True, False]),
    np.zeros(2).view(Own),
    np.zeros((1,) * 33) if int(np.__version__.partition(".")[0]) > 1 else {1},
    np.zeros(2, [("\ud800", "f4")]),
    {1: 2},
    {7},
    object(),
    print,
    Point(1),
    Colour.RED,
    collections.OrderedDict(a=1),
    1j,
    1 << 5000,
    "\ud800",
    "\ud800" * 300,
    {"\ud800": 1},
]


def shown(thing: object) -> str:
    """A short id of the object that is the same in each process."""
    return f"{type(thing).__name__}-{str(thing)[:12]!a}"


@pytest.mark.parametrize("thing", REFUSED, ids=shown)
def test_what_cannot_be_sent_is_named_with_its_place(thing: object) -> None:
    """An object that would not be received as it was sent is refused."""
    with pytest.raises(TransportError) as error:
        encode({"obs": {"image": ["x", thing]}})
    assert str(error.value).startswith("$.obs.image[1]: ")
    assert "what can be sent: None, bool" in str(error.value)
    assert "allow_pickle=True on both sides" in str(error.value)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1 has no texts of variable size")
def test_texts_of_variable_size_are_not_sent() -> None:
    """Their array has pointers instead of the text."""
    with pytest.raises(TransportError, match=r"^\$: elements of dtype StringDType"):
        encode(np.array(["a"], dtype=np.dtypes.StringDType()))


def test_a_key_that_is_no_name_is_quoted() -> None:
    """The place in the message can be used as an expression."""
    with pytest.raises(TransportError, match=r'^\$\["two words"\]\.b\[0\]: '):
        encode({"two words": {"b": ({1},)}})


def nested(depth: int) -> object:
    obj: object = 0
    for _ in range(depth):
        obj = [obj]
    return obj


def within_itself() -> list[object]:
    obj: list[object] = []
    obj += [obj, obj]
    return obj


def test_the_deepest_and_the_widest_object_come_back() -> None:
    """Both sides have the same bounds: an object that can be sent can be read."""
    for obj in (nested(MOST_DEPTH), [b"x"] * MOST_LEAVES, "x" * LONGEST_SCHEMA, [0] * 32_000):
        encoded = encode(obj)
        assert is_same(decode(encoded.schema, payload_of(encoded)), obj)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nested(MOST_DEPTH + 1), "nested deeper than 32, or within itself"),
        (within_itself, "nested deeper than 32, or within itself"),
        (lambda: [b"x"] * (MOST_LEAVES + 1), "more than 4096 arrays and buffers: stack them"),
        (lambda: [0] * LONGEST_SCHEMA, "more than 32768 values: put many numbers into one array"),
        (lambda: [1.5] * 20_000, "takes 80012 bytes, more than 65536: put many numbers"),
    ],
    ids=["deep", "endless", "leaves", "values", "long"],
)
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_an_object_too_big_for_a_schema_says_so(make: Callable[[], object], message: str, allow_pickle: bool) -> None:
    """The error comes before anything is written, and says what to do."""
    with pytest.raises(TransportError, match=message):
        encode(make(), allow_pickle=allow_pickle)


PICKLED = [
    {1: np.ones(2)},
    {7},
    Point(1),
    Colour.RED,
    1 << 5000,
    "\ud800",
    1j,
    {1: {2: [math.pi]}},
]


@pytest.mark.parametrize("thing", PICKLED, ids=shown)
def test_a_pickle_is_read_only_if_the_reader_allows_it(thing: object) -> None:
    """Both sides must allow it: the reader's error names the argument and its risk."""
    encoded = encode({"a": b"1", "b": thing, "c": b"2"}, allow_pickle=True)
    payload = payload_of(encoded)
    with pytest.raises(TransportError, match=r"runs code .* allow_pickle=True"):
        decode(encoded.schema, payload)
    came: Any = decode(encoded.schema, payload, allow_pickle=True)
    assert (bytes(came["a"]), repr(came["b"]), bytes(came["c"])) == (b"1", repr(thing), b"2")


def test_only_what_needs_it_is_pickled() -> None:
    """Arrays beside it are sent unpickled."""
    encoded = encode({"image": np.zeros(3, "u1"), "set": {1}}, allow_pickle=True)
    assert encoded.schema.startswith('[1,{"image":["array","|u1",[3]],"set":["pickle",')


def test_a_refused_pickle_is_not_touched() -> None:
    """It is refused before any of it is read, so its code does not run."""
    trap = b"cbuiltins\nexec\n(S'import sys; sys.nvrx_trapped = True'\ntR."
    payload, schema = memoryview(trap), f'[1,["pickle",{len(trap)}]]'
    with pytest.raises(TransportError, match="allow_pickle"):
        decode(schema, payload)
    assert not hasattr(sys, "nvrx_trapped")


def test_what_cannot_be_pickled_says_so() -> None:
    """The error has the place of the object and the error of its class."""
    with pytest.raises(TransportError, match=r"^\$\.a: cannot be pickled: mine$"):
        encode({"a": Unpicklable()}, allow_pickle=True)


def test_a_pickle_that_cannot_be_read_says_so() -> None:
    """For example, its class is not installed where it is read."""
    pickled = b"cno_such_module\nThing\n."
    with pytest.raises(TransportError, match="cannot be read here: ModuleNotFoundError"):
        decode(f'[1,["pickle",{len(pickled)}]]', memoryview(pickled), allow_pickle=True)
