"""torch's tensors are received with the values with which they were sent."""

from __future__ import annotations

import importlib
import mmap
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from nvrx_slurm.transport.codec import decode, encode
from nvrx_slurm.transport.errors import PayloadCorrupt, TransportError
from nvrx_slurm.transport.schema import TENSOR_ITEM_BYTES
from tests.unit.transport.objects import ALIGNMENT, address, built, payload_of

pytestmark = pytest.mark.torch

QUANTIZED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")
OPAQUE = ("bits16", "bits1x8", "bits2x4", "bits4x2", "bits8")
ODD_INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


@pytest.fixture
def torch() -> Any:
    return importlib.import_module("torch")


def same(came: Any, went: Any) -> bool:
    """Whether all bits are the same, even if the type takes other bits for equal."""
    if (came.dtype, came.shape) != (went.dtype, went.shape):
        return False
    view = [tensor.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8) for tensor in (came, went)]
    return bool((view[0] == view[1]).all())


def random(torch: Any, name: str, *shape: int) -> Any:
    """Any bits, including NaNs of all kinds."""
    size = int(np.prod(shape, dtype=int)) * TENSOR_ITEM_BYTES[name]
    bits = bytearray(np.random.default_rng(size).integers(0, 2 if name == "bool" else 256, size, np.uint8).tobytes())
    flat = torch.frombuffer(bits, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, name)).reshape(shape)


def test_every_type_of_elements_is_known_or_refused_on_purpose(torch: Any) -> None:
    """A new type of torch's makes this test fail first."""
    names = {str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    assert names - {*QUANTIZED, *OPAQUE, *ODD_INTS} == TENSOR_ITEM_BYTES.keys() & names
    assert all(getattr(torch, name).itemsize == TENSOR_ITEM_BYTES[name] for name in TENSOR_ITEM_BYTES.keys() & names)


@pytest.mark.parametrize("shape", [(4, 6), (), (0,), (2, 0, 3), (1,)], ids=str)
@pytest.mark.parametrize("name", TENSOR_ITEM_BYTES)
@pytest.mark.parametrize("writable", [False, True])
def test_a_tensor_comes_back(torch: Any, name: str, shape: tuple[int, ...], writable: bool) -> None:
    """This holds for every type, without a warning, also beside other objects."""
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    tensor = random(torch, name, *shape)
    encoded = encode({"before": b"x", "tensor": tensor})
    came: Any = decode(encoded.schema, payload_of(encoded, writable=writable))
    assert same(came["tensor"], tensor)


TURNED = {
    "transposed": lambda tensor: tensor.mT,
    "channels-last": lambda tensor: tensor.to(memory_format=sys.modules["torch"].channels_last),
    "cut": lambda tensor: tensor[:, 1:, ::2],
    "repeated": lambda tensor: tensor[:1].expand(5, -1, -1, -1),
    "turned": lambda tensor: tensor.permute(3, 1, 0, 2),
}


@pytest.mark.parametrize("how", TURNED)
def test_a_tensor_that_does_not_lie_row_by_row(torch: Any, how: str) -> None:
    """Its values are the same; one without gaps keeps its order in memory and is not copied."""
    tensor = TURNED[how](random(torch, "float32", 2, 3, 4, 5))
    encoded = encode([tensor])
    (came,) = built(encoded.schema, payload_of(encoded))
    assert same(came, tensor)
    if how not in ("cut", "repeated"):
        assert came.stride() == tensor.stride()
        assert address(encoded.buffers[0]) == tensor.data_ptr()


def test_one_element_of_many(torch: Any) -> None:
    """Such a tensor has a stride that has no meaning; so has such an array of numpy's."""
    tensor, array = torch.arange(9, dtype=torch.int32)[4::3][:1], np.arange(9, dtype="i4")[4::3][:1]
    encoded = encode([tensor, array])
    came: Any = decode(encoded.schema, payload_of(encoded))
    assert (came[0].tolist(), came[1].tolist()) == ([4], [4])


def test_parts_of_one_storage_are_sent_as_parts(torch: Any) -> None:
    """Each has its own values and no others; they do not share memory any more."""
    storage = torch.arange(1000, dtype=torch.int64)
    encoded = encode([storage[10:12], storage[11:14]])
    first, second = built(encoded.schema, payload_of(encoded, writable=True))
    assert encoded.size == ALIGNMENT + 3 * 8
    first[1] = -1
    assert (first.tolist(), second.tolist()) == ([10, -1], [11, 12, 13])


def test_values_are_sent_without_their_graph(torch: Any) -> None:
    """A tensor that requires a gradient, a parameter, and a computed tensor are received as tensors that require
    none."""
    parameter = torch.nn.Parameter(torch.ones(3))
    encoded = encode([parameter, parameter * 2, torch.ones(3, requires_grad=True)])
    came: Any = decode(encoded.schema, payload_of(encoded))
    assert [type(tensor) for tensor in came] == [torch.Tensor] * 3
    assert [tensor.tolist() for tensor in came] == [[1] * 3, [2] * 3, [1] * 3]
    assert not any(tensor.requires_grad for tensor in came)


def test_values_that_are_only_said_to_be_conjugate_or_negative_are_sent_so(torch: Any) -> None:
    """torch only sets a flag; its memory still has the other values."""
    number = torch.tensor([1 + 2j])
    encoded = encode([number.conj(), number.conj().imag])
    came: Any = decode(encoded.schema, payload_of(encoded))
    assert came[0].tolist() == [1 - 2j]
    assert came[1].tolist() == [-2]


def test_a_big_tensor_is_sent_without_a_copy(torch: Any) -> None:
    """The buffer is the tensor's own memory."""
    tensor = torch.ones(1 << 20, dtype=torch.bfloat16)
    (buffer,) = encode([tensor]).buffers
    assert address(buffer) == tensor.data_ptr()


def test_on_a_writable_payload_a_tensor_is_no_copy(torch: Any) -> None:
    """It is at a multiple of 64 bytes in the payload, and writing to it changes the payload."""
    encoded = encode([b"x", torch.ones(3)])
    payload = payload_of(encoded, writable=True)
    _, tensor = built(encoded.schema, payload)
    assert tensor.data_ptr() == address(payload) + ALIGNMENT
    tensor[0] = 0
    assert payload[ALIGNMENT : ALIGNMENT + 4] == bytes(4)


def test_of_a_read_only_payload_a_tensor_is_a_copy(torch: Any) -> None:
    """torch has no read-only memory: writing to this tensor changes only the copy."""
    encoded = encode([torch.ones(3)])
    payload = payload_of(encoded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tensor,) = built(encoded.schema, payload)
    tensor[0] = 0
    assert tensor.data_ptr() != address(payload)
    assert payload.tobytes() == b"".join(encoded.buffers)


def test_a_payload_that_is_not_aligned_is_copied(torch: Any) -> None:
    """For any address of the payload, the tensor has the alignment of its type."""
    encoded = encode([torch.ones(3, dtype=torch.float64)])
    memory = bytearray(1) + b"".join(encoded.buffers)
    (tensor,) = built(encoded.schema, memoryview(memory)[1:])
    assert tensor.data_ptr() % 8 == 0
    assert tensor.tolist() == [1] * 3


def test_memory_cannot_be_unmapped_under_a_tensor(torch: Any) -> None:
    """Closing the memory is an error while a tensor uses it."""
    encoded = encode([torch.ones(3)])
    with mmap.mmap(-1, 4096) as memory:
        memory[: encoded.size] = b"".join(encoded.buffers)
        (tensor,) = built(encoded.schema, memoryview(memory)[: encoded.size])
        with pytest.raises(BufferError):
            memory.close()
        assert tensor.tolist() == [1] * 3
        del tensor


REFUSED = {
    "sparse": lambda torch: torch.eye(3).to_sparse(),
    "meta": lambda torch: torch.ones(3, device="meta"),
    "quantized": lambda torch: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "bits": lambda torch: torch.ones(3, dtype=torch.uint8).view(torch.bits8),
    "subclass": lambda torch: torch.ones(3).as_subclass(type("Own", (torch.Tensor,), {"__module__": "torch.own"})),
    "buffer": lambda torch: torch.nn.Buffer(torch.ones(3)).as_subclass(torch.nn.UninitializedBuffer),
    "dimensions": lambda torch: torch.ones((1,) * 33),
    "dtype": lambda torch: torch.float32,
    "device": lambda torch: torch.device("cpu"),
    "generator": lambda torch: torch.Generator(),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*quantize:DeprecationWarning")
def test_a_tensor_that_is_more_than_its_bytes_is_not_sent(torch: Any, kind: str) -> None:
    """The error has its place in the object."""
    with pytest.raises(TransportError, match=r"^\$\.a\[0\]: .* what can be sent"):
        encode({"a": [REFUSED[kind](torch)]})


def test_a_type_that_this_torch_has_not_is_named(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender may have a later version of torch."""
    monkeypatch.delattr(torch, "bfloat16")
    with pytest.raises(TransportError, match="has no bfloat16; upgrade it"):
        decode('[1,["tensor","bfloat16",[0]]]', memoryview(b""))


@pytest.mark.parametrize("node", ['["tensor","load",[0]]', '["tensor","float32",[-1]]', '["tensor","int8",[2],[1]]'])
def test_a_hostile_description_of_a_tensor(torch: Any, node: str) -> None:
    """It is refused before torch gets it."""
    with pytest.raises(PayloadCorrupt):
        decode(f"[1,{node}]", memoryview(b""))
