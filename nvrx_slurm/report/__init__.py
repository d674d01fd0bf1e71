"""Reading a job: the journal folded into a view, and the view shown as text, JSON, or a live screen.

    model.py       the values: nodes, replicas, cycles, recoveries, failures; `JobView` holds them
    view.py        `fold`: the view after one more journal entry; `with_beat`: after a beat
      facts.py, decisions.py, changes.py   what each kind of record changes
    recovery.py    the phases of each recovery, which add up to its total
    ranks.py       each rank's step, lag, silence and open sections, from the beats
    words.py       a duration, a list of nodes, a failure in words; `sentences.py`: an entry in one line
    lines.py       the journal, an event a line
    source.py      where entries come from: `journal_file.py`, and `journal_stream.py` while the job runs
    presence.py    whether anybody still runs a job whose journal just ceases
    jobs.py        which jobs a base folder holds; `overview.py` has a line for each
    snapshot.py    the view with what folder and host add: what `status` shows
    tables.py      titled tables of text; `plain.py` prints them
    sections.py    a snapshot as facts and tables; `fleet.py`: its nodes and ranks
    screen.py      the same in colour; `live.py` keeps it on the terminal until the job ends
    logs.py        the ranks' output, cycle after cycle
    docs.py        docs/journal.md, generated

`model`, `view`, `recovery`, `ranks`, `words`, `sentences`, `tables`, `sections` and `fleet` do no I/O and know no
clock.
"""
