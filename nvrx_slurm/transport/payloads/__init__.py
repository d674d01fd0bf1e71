"""Objects as a schema and buffers, and back, without a copy of what is big and without pickle.

What can be sent:

    bytes, bytearray, memoryview      their bytes
    None, bool, int, float, str       in the schema (a long str: its bytes)
    numpy arrays and scalars          of types with a fixed size
    torch tensors                     dense ones
    dict (str keys), list, tuple      of these

`schema` is the text between both sides, `formats` what the elements of an array are; `encoding` and `decoding` are
the two sides; `arrays` (numpy) and `tensors` (torch) are loaded once such a thing is there (`libraries`).
"""

from __future__ import annotations

from nvrx_slurm.transport.payloads.decoding import decode
from nvrx_slurm.transport.payloads.encoding import Encoded, encode

__all__ = ["Encoded", "decode", "encode"]
