"""Objects as a schema and buffers, and back, without a copy of what is big and without pickle.

What can be sent:

    bytes, bytearray, memoryview      their bytes
    None, bool, int, float, str       in the schema (a long str: its bytes)
    numpy arrays and scalars          of types with a fixed size
    torch tensors                     dense ones
    dict (str keys), list, tuple      of these

`schema` is the text between both sides, `codec` encodes and decodes; `arrays` (numpy) and `tensors` (torch) are
loaded when the first such object is sent or received.
"""

from __future__ import annotations

from nvrx_slurm.transport.payloads.codec import Encoded, decode, encode

__all__ = ["Encoded", "decode", "encode"]
