"""Reading a job: the journal folded into a view, and the view shown as text, JSON, or a live screen.

    model.py       the values: nodes, replicas, cycles, recoveries, failures; `JobView` holds them
    view.py        `fold`: the view after one more journal entry; `with_beat`: steps from a beat
      facts.py, decisions.py, changes.py   what each kind of record changes
    recovery.py    the phases of each recovery, which add up to its total
    words.py       an entry, a duration, a list of nodes in words; `lines.py`: the journal, an event a line
    source.py      where entries come from: `journal_file.py`, and `journal_stream.py` while the job runs
    presence.py    whether anybody still runs a job whose journal just ceases
    jobs.py        which jobs a base folder holds; `overview.py` has a line for each
    snapshot.py    the view with what folder and host add: what `status` shows
    sections.py    a snapshot as titled tables of text; `plain.py` prints them
    screen.py      the same in colour; `live.py` keeps it on the terminal until the job ends
    logs.py        the ranks' output, cycle after cycle
    docs.py        docs/journal.md, generated

`model`, `view`, `recovery`, `words` and `sections` do no I/O and know no clock.
"""
