"""Reading a job: the journal folded into a view, and the view shown as text, JSON, or a live screen.

    model.py      the values: nodes, replicas, cycles, recoveries, failures; `JobView` holds them
    view.py       `fold`: the view after one more journal entry; `with_beat`: steps from a beat
    recovery.py   the phases of each recovery, which add up to its total
    source.py     where entries come from: the folder, and the store while the job runs
    jobs.py       which jobs a base folder holds, and how they stand
    words.py      an entry, a duration, a list of nodes in words
    sections.py   the view as titled tables of text; `plain.py` prints them
    screen.py     the same in colour; `live.py` keeps it on the terminal until the job ends
    logs.py       the ranks' output, cycle after cycle
    docs.py       docs/journal.md, generated

`model`, `view`, `recovery`, `words` and `sections` do no I/O and know no clock.
"""
