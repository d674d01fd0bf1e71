"""A hostile schema or payload causes an error of this package, soon, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvrx_slurm.transport.codec import decode, encode
from nvrx_slurm.transport.errors import PayloadCorrupt, TransportError
from nvrx_slurm.transport.ref import LONGEST_SCHEMA
from nvrx_slurm.transport.schema import CACHED_SCHEMAS, LONGEST_CACHED, VERSION, _cached_plan, plan_of
from tests.unit.transport.objects import Objects, payload_of

TRIED_BYTES = 1 << 20
FREE_BYTES = 512 << 10
PER_SCHEMA_BYTE, PER_PAYLOAD_BYTE = 200, 8
"""What decoding may take: a bound that neither sizes nor shapes in the schema have a part in."""

HOSTILE = Path(__file__).with_name("hostile_schemas.py")

NUMBERS = [-1, 0, 1, 2, 31, 33, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 1.5, 1e300]
WORDS = [
    "array",
    "scalar",
    "list",
    "tuple",
    "float",
    "bytes",
    "bytearray",
    "text",
    "<f4",
    ">M8[ns]",
    "|O",
    "<U9999999",
]
WORDS += [
    "|S5",
    "|V8",
    "<m8[99s]",
    "O",
    "object",
    "f4,f4",
    "numpy.foo",
    "<f16",
    "=i4",
    "|b1",
    "datetime64",
    "",
    "fields",
]

Json = st.recursive(
    st.one_of(st.sampled_from(NUMBERS), st.sampled_from(WORDS), st.none(), st.booleans(), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.dictionaries(st.sampled_from(["a", "bytes", "fields", ""]), inner, max_size=3),
        st.lists(inner, max_size=3).map(lambda rest: ["array", *rest]),
        st.lists(inner, max_size=3).map(lambda rest: ["scalar", *rest]),
        st.tuples(st.sampled_from(["bytes", "text", "bytearray"]), inner).map(list),
    ),
    max_leaves=15,
)


def attempt(schema: str, payload: memoryview) -> None:
    """Decodes; only this package's errors are allowed, and memory in proportion to the input."""
    tracemalloc.start()
    try:
        decode(schema, payload)
    except TransportError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < FREE_BYTES + PER_SCHEMA_BYTE * len(schema) + PER_PAYLOAD_BYTE * payload.nbytes


def attempt_both(schema: str, payload: memoryview) -> None:
    """Decodes with this payload, and with one of exactly the size that the schema asks for, if that is small
    enough."""
    attempt(schema, payload)
    try:
        size = plan_of(schema).size
    except TransportError:
        return
    if size <= TRIED_BYTES:
        fitting = memoryview(np.random.default_rng(size).bytes(size))
        attempt(schema, fitting)


@given(st.one_of(st.text(max_size=100), Json.map(json.dumps), Json.map(lambda node: json.dumps([VERSION, node]))))
@example("[1," + "[" * 60_000)
@example("[1," + '["list",' * 5000 + "]" * 5001)
@example('[1,["array","<f4",[4294967296,4294967296]]]')
@example('[1,["array","<f4",[0,4611686018427387904,4]]]')
@example('[1,["array","<f4",[-1]]]')
@example('[1,["bytes",-5]]')
@example('[1,["array","<f4",[true]]]')
@example('[1,["array","|V2147483647",[0]]]')
@example('[1,["array","<U536870911",[0]]]')
@example('[1,["scalar","<U1",[]]]')
@example('[1,["array",{"bytes":4,"fields":[["a",2,"<f4"]]},[1]]]')
@example('[1,["array",{"bytes":2147483647,"fields":[["a",0,"<f4",[536870911]]]},[0]]]')
@example('[1,["array","<M8[2147483648s]",[1]]]')
@example('[1,["array","<M8[generic]",[1]]]')
@example("[1," + "1" * 5000 + "]")
@example('[1,"\\ud800"]')
@settings(max_examples=300)
def test_a_made_up_schema(schema: str) -> None:
    """Any text is decoded or refused."""
    attempt_both(schema, memoryview(bytes(100)))


@given(Objects, st.data())
@settings(max_examples=300)
def test_a_schema_with_a_part_of_another(obj: object, data: st.DataObject) -> None:
    """A valid schema in which any node is replaced by something else."""
    encoded = encode([obj])
    tree = json.loads(encoded.schema)
    node: Any = tree
    for _ in range(data.draw(st.integers(0, 6))):
        inner = [item for item in (node.values() if isinstance(node, dict) else node) if item and not is_leaf(item)]
        if inner:
            node = data.draw(st.sampled_from(inner))
    keys = list(node) if isinstance(node, dict) else range(len(node))
    node[data.draw(st.sampled_from(keys))] = data.draw(Json)
    attempt_both(json.dumps(tree), payload_of(encoded))


def is_leaf(item: object) -> bool:
    return not isinstance(item, dict | list)


@given(Objects, st.integers(0), st.integers(0, 3), st.text(max_size=3))
@settings(max_examples=200)
def test_a_schema_with_other_characters(obj: object, place: int, cut: int, put: str) -> None:
    """A valid schema with some of its text removed and other text inserted."""
    encoded = encode([obj])
    at = place % len(encoded.schema)
    attempt_both(encoded.schema[:at] + put + encoded.schema[at + cut :], payload_of(encoded))


@given(Objects, st.integers(-200, 200))
def test_a_payload_of_another_size(obj: object, more: int) -> None:
    """Its size does not match the schema: it is refused before any object is built, even for one byte."""
    encoded = encode([obj])
    if more == 0 or encoded.size + more < 0:
        return
    with pytest.raises(PayloadCorrupt, match=f"a payload of {encoded.size} bytes, this one has"):
        decode(encoded.schema, memoryview(bytes(encoded.size + more)))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("x", "the schema is none: JSON is malformed"),
        ("{}", "no pair of a version and a description"),
        ("[1,0,0]", "no pair of a version and a description"),
        ("[true,0]", "no pair of a version and a description"),
        ("[2,0]", "of version 2, this side knows 1: upgrade it"),
        ("[1,[]]", "none of list, tuple, float"),
        ('[1,["exec",1]]', "none of list, tuple, float"),
        ('[1,["bytes"]]', "has no size"),
        ('[1,["float","7ff8"]]', "not the bits of one"),
        ('[1,["float",["7ff8"]]]', "not the bits of one"),
        ('[1,["array","<f4"]]', "a type, a shape"),
        ('[1,["array","<f4",[1],[0],0]]', "a type, a shape"),
        ('[1,["array","<f4",[2,2],[0,0]]]', "names each of its axes once"),
        ('[1,["array","<f4",[2,2],[0,true]]]', "names each of its axes once"),
        (f'[1,["array","<f4",{[1] * 33}]]', "at most 32 numbers"),
        ('[1,["array","<f4",[4611686018427387905]]]', "no number of elements"),
        ('[1,["array","<f4",[1,-1]]]', "no number of elements"),
        ('[1,["array","<f4",[0,4611686018427387904]]]', "bigger than any memory"),
        ('[1,["list",["bytes",4611686018427387904],["bytes",1]]]', "bigger than any memory"),
        ('[1,["list"' + ',["bytes",0]' * 4097 + "]]", "more than 4096 leaves"),
        ('[1,["array","|O",[1]]]', "no type of elements"),
        ('[1,["array","|O8",[1]]]', "no type of elements"),
        ('[1,["array","<f3",[1]]]', "no type of elements"),
        ('[1,["array","<f16",[1]]]', "no type of elements"),
        ('[1,["array","<f4[ns]",[1]]]', "no type of elements"),
        ('[1,["array","|S2147483648",[0]]]', "elements of 2147483648 bytes cannot be"),
        ('[1,["scalar","<f4",[1]]]', "a scalar in the schema has a shape"),
        ('[1,["tensor","qint8",[1]]]', "no type of a tensor's elements"),
        ('[1,["tensor","load",[1]]]', "no type of a tensor's elements"),
        ('[1,["array",{"bytes":4},[1]]]', "by its name, or by its bytes and fields"),
        ('[1,["array",{"bytes":4,"fields":[]},[1]]]', "a list of 1 to 256 fields"),
        ('[1,["array",{"bytes":4,"fields":[["a",0]]},[1]]]', "a field is a list of name"),
        ('[1,["array",{"bytes":4,"fields":[["",0,"<f4"]]},[1]]]', "a field needs a name"),
        ('[1,["array",{"bytes":4,"fields":[["a",-1,"<f4"]]},[1]]]', "a field needs a name"),
        ('[1,["array",{"bytes":4,"fields":[["a",1,"<f4"]]},[1]]]', "outside its record"),
        ('[1,["array",{"bytes":8,"fields":[["a",0,"<f4"],["a",4,"<f4"]]},[1]]]', "two fields of a record"),
        ("[1,0]" + " " * LONGEST_SCHEMA, "none has more than 65536"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_schema_is_said(schema: str, message: str) -> None:
    """It is reported before the payload is read."""
    with pytest.raises(TransportError) as error:
        decode(schema, memoryview(b""))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["<i1", "=f4", "<S4", "<M8[7 s]", "<M8[zz]", "<M8[99999999999s]", ">b1"])
def test_a_type_has_one_valid_name(name: str) -> None:
    """Only the name that numpy itself gives to the type is accepted."""
    schema = msgspec.json.encode([VERSION, ["array", name, [0]]]).decode()
    with pytest.raises(PayloadCorrupt):
        decode(schema, memoryview(b""))


def test_text_that_is_no_text() -> None:
    """Bytes that are neither valid UTF-8 nor valid text of numpy are refused."""
    for schema, payload in (('[1,["text",2]]', b"\xff\xff"), ('[1,["scalar","<U1",[]]]', b"\xff\xff\xff\xff")):
        with pytest.raises(PayloadCorrupt):
            decode(schema, memoryview(payload))


def test_the_cache_of_schemas_is_bounded() -> None:
    """The cache of schemas is bounded in number and length, so endless new schemas do not use more and more
    memory."""
    _cached_plan.cache_clear()
    for number in range(CACHED_SCHEMAS + 50):
        decode(f"[1,{number}]", memoryview(b""))
    decode(f'[1,["list"{",0" * LONGEST_CACHED}]]', memoryview(b""))
    assert _cached_plan.cache_info().currsize == CACHED_SCHEMAS
    _cached_plan.cache_clear()


def test_a_schema_makes_a_new_object_each_time() -> None:
    """The objects that are returned are not those of the cache."""
    schema = '[1,{"a":["list",1,{}]}]'
    first: Any = decode(schema, memoryview(b""))
    first["a"].append(2)
    first["a"][1]["b"] = 3
    assert decode(schema, memoryview(b"")) == {"a": [1, {}]}


def test_hostile_schemas_import_open_and_run_nothing() -> None:
    """Python's audit hook sees no event in a process that decodes thousands of them."""
    done = subprocess.run([sys.executable, str(HOSTILE)], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 1000
