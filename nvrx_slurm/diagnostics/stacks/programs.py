"""Runs py-spy and nvidia-smi, where they are installed, never for longer than allowed."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

import msgspec

from nvrx_slurm.util.tasks import run_program
from nvrx_slurm.util.threads import awaitable_thread

GPU_S = 2.0


class ProgramOutput(msgspec.Struct, frozen=True):
    """What a program printed, and whether it succeeded."""

    text: str
    ok: bool


async def find(name: str, timeout_s: float) -> str | None:
    """Where the program is (beside this Python, or on PATH); None if nowhere, or its disk does not answer in time."""

    def look() -> str | None:
        beside = Path(sys.executable).with_name(name)
        path = str(beside) if beside.is_file() else shutil.which(name)
        if path is None:
            return None
        # Read a byte: where the program's disk does not answer, exec would hang, and hold up this whole process.
        try:
            with Path(path).open("rb") as file:
                file.read(1)
        except OSError:
            return None
        return path

    looking = awaitable_thread(look, f"find {name}")
    await asyncio.wait([looking], timeout=max(0.0, timeout_s))
    if not looking.done():
        looking.cancel()
        return None
    return looking.result()


async def run(*argv: str, timeout_s: float) -> ProgramOutput:
    """Run a program to its end, or kill it after `timeout_s`. A failure is reported as its output."""
    if timeout_s <= 0:
        return ProgramOutput("no time was left for it", ok=False)
    try:
        code, printed = await run_program(argv, timeout_s=timeout_s, stderr=asyncio.subprocess.STDOUT)
    except TimeoutError:
        return ProgramOutput(f"no answer within {timeout_s:.1f} s", ok=False)
    except OSError as error:
        return ProgramOutput(f"{argv[0]}: {error.strerror}", ok=False)
    return ProgramOutput(printed.decode(errors="replace").strip(), ok=code == 0)


async def spy(program: str, pid: int, *, may_pause: bool, timeout_s: float) -> ProgramOutput:
    """The stacks that py-spy finds. With `may_pause` it stops the process for some milliseconds, and sees
    native frames too; a process that cannot be stopped just now must be asked without."""
    base = (program, "dump", "--pid", str(pid))
    if not may_pause:
        return await run(*base, "--nonblocking", timeout_s=timeout_s)
    half_s = timeout_s / 2
    said = await run(*base, "--native", timeout_s=half_s)
    return said if said.ok else await run(*base, "--nonblocking", timeout_s=half_s)


async def gpu_state(timeout_s: float) -> str | None:
    """The output of nvidia-smi on this node, or None where there is none."""
    program = await find("nvidia-smi", timeout_s)
    if program is None:
        return None
    said = await run(program, timeout_s=min(GPU_S, timeout_s))
    return said.text
