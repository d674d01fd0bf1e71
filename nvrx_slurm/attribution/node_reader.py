"""`python -m nvrx_slurm.attribution.node_reader`: reads the logs of one node's ranks for its agent.

The first line on standard input says which; each empty line after it asks what is in them now. Each answer is its
length in four bytes, and the encoded findings. It ends with its input.
"""

from __future__ import annotations

from nvrx_slurm.util import garbage

if __name__ == "__main__":
    garbage.pause()

import os
import re
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.attributing import SideEvidence
from nvrx_slurm.attribution.analyze.evidence import read_logs
from nvrx_slurm.attribution.analyze.node_findings import encoded, found_in, joined
from nvrx_slurm.attribution.rules.catalogue import load_catalogue, usable_files
from nvrx_slurm.attribution.scan import LogFile, Scan
from nvrx_slurm.attribution.scan.files import log_file
from nvrx_slurm.journal.verdicts import FINDINGS_LENGTH_BYTES, Wire
from nvrx_slurm.util.log import set_up
from nvrx_slurm.util.processes import die_with

# Of CPU and, as Linux derives the one from the other (ioprio_set(2)), of I/O. The decision waits for it: workers of
# another replica on this node only go first.
NICENESS = 5

_OF_A_RANK = re.compile(r"rank-(\d{1,9})\.")


class NodeLogs(Wire, frozen=True, kw_only=True):
    """The first line. `folder`: the cycle's."""

    node: str
    folder: str
    ranks: tuple[int, ...]
    rules: tuple[str, ...] = ()


def logs_of_node(asked: NodeLogs) -> Iterator[tuple[LogFile, tuple[int, int]]]:
    """What the node's ranks have written, their stacks, and the node's own state; with the size and the time of the
    last change of each. The folder is listed, but no other file in it is looked at: at a thousand nodes that would be
    a million looks."""
    folder, ranks = Path(asked.folder), frozenset(asked.ranks)
    for below in (folder, folder / "health", folder / "stacks"):
        try:
            names = os.listdir(below)  # noqa: PTH208  names are all that is needed
        except OSError:
            continue
        for name in sorted(names):
            named = _OF_A_RANK.match(name)
            own = name == f"{asked.node}.txt" if below.name == "health" else named and int(named[1]) in ranks
            path = below / name
            if not own:
                continue
            try:
                status = path.stat()
            except OSError:  # it has been removed since the folder was listed
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size:
                # The agent knows the node. By the path alone it would be a guess.
                yield replace(log_file(path, None), node=asked.node), (status.st_size, status.st_mtime_ns)


def main() -> None:
    """Answer until standard input ends."""
    die_with(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    set_up("attribution")
    lines = iter(sys.stdin.buffer.readline, b"")
    asked = msgspec.json.decode(next(lines), type=NodeLogs)
    # As the controller's `lib` reads: with other rules it could not use these findings. It names the wrong files.
    rules, _ = usable_files([Path(rule) for rule in asked.rules])
    catalogue = load_catalogue(rules)
    known: dict[Path, tuple[tuple[int, int], tuple[Scan, SideEvidence]]] = {}
    for _ in lines:
        # Of files that have not changed since the time before, what was found then.
        logs = dict(logs_of_node(asked))
        for log, state in logs.items():
            if log.path not in known or known[log.path][0] != state:
                known[log.path] = state, read_logs([log], catalogue, threading.Event())
        parts = [known[log.path][1] for log in logs]
        # Empty where even the fewest lines are too many to send: the broker then reads these logs itself.
        data = encoded(found_in(asked.node, Path(asked.folder), *joined(parts), catalogue)) or b""
        sys.stdout.buffer.write(len(data).to_bytes(FINDINGS_LENGTH_BYTES, "big") + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    garbage.resume()
    main()
