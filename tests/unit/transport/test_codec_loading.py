"""numpy and torch are loaded only when a payload needs them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = "; import sys; print(*[name for name in ('numpy', 'torch') if name in sys.modules])"
PAYLOADS = "from nvrx_slurm.transport.codec import encode, decode"


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        (PAYLOADS, ""),
        (f"{PAYLOADS}; decode(encode({{'a': [b'1', 2.0]}}).schema, memoryview(b'1'))", ""),
        (f"{PAYLOADS}; decode('[1,[\"array\",\"<f4\",[0]]]', memoryview(b''))", "numpy"),
        (f"{PAYLOADS}; import numpy as np; e = encode([np.ones(1)]); decode(e.schema, e.buffers[0])", "numpy"),
    ],
    ids=["import", "plain", "schema-of-an-array", "array"],
)
def test_what_is_loaded(code: str, loaded: str) -> None:
    """Arrays load numpy; none of these loads torch."""
    assert run(code + LOADED) == loaded


@pytest.mark.parametrize(("library", "node"), [("numpy", '["array","<f4",[0]]'), ("torch", '["tensor","int8",[0]]')])
def test_a_missing_library_is_named(library: str, node: str) -> None:
    """The error names the library that the payload needs."""
    code = f"import sys; sys.modules[{library!r}] = None; {PAYLOADS}\n"
    code += "from nvrx_slurm.transport.errors import TransportError\n"
    code += f"try: decode('[1,{node}]', memoryview(b''))\nexcept TransportError as error: print(error)"
    assert run(code).startswith(f"this payload needs {library}, which cannot be loaded here: ")


@pytest.mark.parametrize("node", ['["array","<f4",[9]]', '["tensor","int8",[9]]'])
def test_a_schema_that_does_not_fit_loads_nothing(node: str) -> None:
    """The payload is refused before a library is loaded."""
    code = f"{PAYLOADS}\nfrom nvrx_slurm.transport.errors import PayloadCorrupt\n"
    code += f"try: decode('[1,{node}]', memoryview(b''))\nexcept PayloadCorrupt: pass\n"
    assert run(code + LOADED.removeprefix("; ")) == ""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()
