"""What is received equals what was sent."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given

from nvrx_slurm.transport.codec import decode, encode
from tests.unit.transport.objects import ALIGNMENT, Objects, arrays, built, is_same, payload_of


@given(Objects)
@example({"é\u2028\0": [float("nan"), -0.0, 5e-324, 2**64, -(2**63) - 1], "": ()})
@example({"text": "x" * 257, "wide": "\U0001f600" * 300})
def test_what_comes_out_is_the_object(obj: object) -> None:
    """It has the same types and the same bits, in the same order."""
    encoded = encode(obj)
    assert is_same(decode(encoded.schema, payload_of(encoded)), obj)


@given(Objects)
def test_the_payload_is_the_buffers_one_after_the_other(obj: object) -> None:
    """Code that writes the buffers needs no knowledge of the schema."""
    encoded = encode(obj)
    assert encoded.size == sum(buffer.nbytes for buffer in encoded.buffers)
    assert all(buffer.nbytes and buffer.format == "B" for buffer in encoded.buffers)


@given(Objects)
def test_a_schema_is_json_that_a_person_can_read(obj: object) -> None:
    """It has a version and a description; for bytes alone it is empty."""
    schema = encode(obj).schema
    assert schema == "" if type(obj) is bytes else msgspec.json.decode(schema)[0] == 1


@given(arrays())
def test_an_array_on_the_payload_is_the_array(array: np.ndarray[Any, Any]) -> None:
    """It has the same type, shape and bits."""
    encoded = encode([array])
    (came,) = built(encoded.schema, payload_of(encoded))
    assert is_same(came, array)


@pytest.mark.parametrize(
    ("obj", "schema"),
    [
        (b"raw", ""),
        (memoryview(b"raw"), ""),
        (np.zeros((2, 3), "f4"), '[1,["array","<f4",[2,3]]]'),
        (np.zeros((2, 3), ">i8").T, '[1,["array",">i8",[3,2],[1,0]]]'),
        (np.float32(1), '[1,["scalar","<f4",[]]]'),
        ({"obs": b"12", "done": [True, None]}, '[1,{"obs":["bytes",2],"done":["list",true,null]}]'),
        (("a", 1, 0.5, float("inf")), '[1,["tuple","a",1,0.5,["float","7ff0000000000000"]]]'),
        (np.zeros(1, [("a", "i1"), ("b", "f4", (2,))]),
         '[1,["array",{"bytes":9,"fields":[["a",0,"|i1"],["b",1,"<f4",[2]]]},[1]]]'),
    ],
)  # fmt: skip
def test_schemas_stay_as_they_are(obj: object, schema: str) -> None:
    """Other versions read them: a change here needs a new version of the format."""
    assert encode(obj).schema == schema


def test_raw_bytes_are_the_payload_itself() -> None:
    """Without a schema no object is built."""
    payload = memoryview(bytearray(b"raw"))
    assert decode("", payload) is payload


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2), ()])
@pytest.mark.parametrize("kind", ["<f4", ">f8", "?", "<M8[ns]", "<m8[25s]", "S3", "<U2", "V5", "<c16", "<f2"])
def test_arrays_without_elements_and_without_dimensions(shape: tuple[int, ...], kind: str) -> None:
    """They are sent as any other array."""
    array = np.zeros(shape, kind)
    encoded = encode([b"x", array, b"y"])
    assert is_same(decode(encoded.schema, payload_of(encoded)), [b"x", array, b"y"])


def test_every_leaf_begins_at_a_multiple_of_64_bytes() -> None:
    """Processors and libraries need no copy of it; zeros fill the space between leaves."""
    encoded = encode([b"\xff" * size for size in (1, 63, 64, 65, 0, 7)])
    payload = payload_of(encoded)
    views: Any = decode(encoded.schema, payload)
    starts = [0, 64, 128, 192, 320, 320]
    for view, start in zip(views, starts, strict=True):
        assert payload[start : start + len(view)] == view
    assert payload.tobytes().replace(b"\xff", b"") == bytes(encoded.size - (1 + 63 + 64 + 65 + 7))
    assert encoded.size % ALIGNMENT == 7


@pytest.mark.parametrize(
    "view",
    [
        np.arange(6, dtype="<i4").reshape(2, 3).data,
        np.arange(6, dtype=">i4").reshape(2, 3).data,
        np.arange(12, dtype="<i4").data[::2],
        np.asfortranarray(np.arange(6, dtype="u1").reshape(2, 3)).data,
        np.zeros((0, 3), ">f4").data,
    ],
    ids=["rows", "big-endian", "gaps", "columns", "empty"],
)
def test_a_memoryview_is_its_bytes(view: memoryview) -> None:
    """Its bytes are sent row by row, for any layout in memory."""
    assert b"".join(encode(view).buffers) == view.tobytes()
    assert b"".join(encode([view]).buffers) == view.tobytes()
