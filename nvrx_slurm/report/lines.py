"""The journal, an event a line."""

from __future__ import annotations

from nvrx_slurm.journal.records import Entry, entry_to_json
from nvrx_slurm.report.sentences import describe
from nvrx_slurm.report.words import event_name
from nvrx_slurm.util.sanitize import one_line

NAME_WIDTH = 20
TIME_WIDTH = 12


class Lines:
    """Turns entries into lines. Times count from the first entry given: pass the journal from its start."""

    def __init__(self) -> None:
        self._begin: float | None = None

    def in_words(self, entry: Entry) -> str:
        """`+4.953s      node_lost            n2: tether lost, at step 80`."""
        if self._begin is None:
            self._begin = entry.t
        time = f"+{entry.t - self._begin:.3f}s"
        return f"{time:<{TIME_WIDTH}} {event_name(entry.record):<{NAME_WIDTH}} {one_line(describe(entry.record))}"

    def as_json(self, entry: Entry) -> str:
        """The line as `events.jsonl` has it."""
        return entry_to_json(entry).decode()
