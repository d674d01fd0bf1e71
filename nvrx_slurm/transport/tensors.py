"""torch's tensors. Loaded only where there are such (see `codec.library`); their bytes pass through numpy.

Sent is what a tensor holds: neither its gradient, nor what it was computed from, nor its device.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from nvrx_slurm.transport.codec import Unsendable
from nvrx_slurm.transport.errors import TransportError
from nvrx_slurm.transport.schema import MOST_DIMENSIONS, TENSOR_ITEM_BYTES, Array, axes_in_memory

torch = importlib.import_module("torch")

# Exactly these: other subclasses are more than their bytes, or have them elsewhere.
_KINDS = (torch.Tensor, torch.nn.Parameter)


def describe(array: Any) -> tuple[list[object], memoryview]:
    """The tensor's node of the schema, and its bytes."""
    # Its values in this machine's memory, dense.
    if type(array) not in _KINDS:
        raise Unsendable(f"an object of {type(array).__module__}.{type(array).__qualname__} is not sent")
    if array.layout is not torch.strided or array.is_quantized or array.device.type == "meta":
        raise Unsendable("a tensor that is sparse, quantized or without data is not sent")
    if _name(array.dtype) not in TENSOR_ITEM_BYTES:
        raise Unsendable(f"a tensor of {array.dtype} is not sent")
    if array.dim() > MOST_DIMENSIONS:
        raise Unsendable(f"a tensor of {array.dim()} dimensions is not sent; {MOST_DIMENSIONS} are the most")
    # torch keeps a conjugated or negated view as a flag beside the old bytes: only resolved, they are its values.
    tensor = array.detach().to("cpu").resolve_conj().resolve_neg()
    node: list[object] = ["tensor", _name(tensor.dtype), list(tensor.shape)]
    if tensor.is_contiguous():
        return node, _flat(tensor)
    axes = axes_in_memory(tensor.stride())
    turned = tensor.permute(axes)
    if turned.is_contiguous():
        return [*node, list(axes)], _flat(turned)
    return node, _flat(tensor.contiguous())


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _flat(tensor: Any) -> memoryview:
    flat = tensor.as_strided(
        (tensor.numel(),), (1,)
    )  # not reshape: of a single element that keeps a stride of its own
    view: memoryview = flat.view(torch.uint8).numpy().data
    return view


def build(leaf: Array, payload: memoryview) -> object:
    """The tensor that a leaf describes. It lies on `payload`, and holds it; on a read-only one it is a copy."""
    dtype = getattr(torch, str(leaf.format), None)
    if dtype is None:
        raise TransportError(f"the torch that is installed here has no {leaf.format}; upgrade it")
    if not leaf.size:
        data = torch.empty(0, dtype=torch.uint8)
    else:
        source = np.frombuffer(payload, np.uint8, leaf.size, leaf.start)
        is_aligned = source.ctypes.data % TENSOR_ITEM_BYTES[str(leaf.format)] == 0
        # torch has no read-only tensors: a write would end the process, or change what others read.
        if source.flags.writeable and is_aligned:
            data = torch.from_numpy(source)
        else:
            data = torch.empty(leaf.size, dtype=torch.uint8)
            np.copyto(data.numpy(), source)
    tensor = data.view(dtype).reshape(leaf.shape)
    return tensor if leaf.axes is None else tensor.permute(leaf.axes)
