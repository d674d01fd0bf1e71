"""Reading a job: one pass over the journal feeds a view and other readers; text, JSON and a live screen show them.

    model.py         the values: nodes, replicas, cycles, recoveries, failures; `JobView` holds them
    view.py          `JobFold`: the one pass over the journal; its view, and its subscribers
    recovery.py      the phases of each recovery, which add up to its total
    ranks.py         each rank's step, lag, silence and open sections, from the heartbeats
    source.py        where entries come from: `journal_file.py`, and `journal_stream.py` while the job runs
    jobs.py          which jobs a base folder holds; `presence.py`: whether a process still runs one
    snapshot.py      the view with what folder and host add: what `status` shows, of one job or of all
    words.py         a duration, a list of nodes, a failure in words; `sentences.py`: an entry in one line
    page.py          a snapshot as facts and tables (`tables.py`); `plain.py` prints them
    screen.py        the same in colour, and the live screen, which `live.py` feeds until the job ends
    failures.py      a subscriber: what counts as a failure, and what was decided about each
    failure_replay.py  the same, with what only the core knew; `explanation.py`: one of them on one screen
    spans.py         what each node's time was spent on; goodput.py adds it up; history.py: beside that the failures
    web/             a job, or many (`fleet.py`), as one HTML file; `job_report.py` reads what it shows
    trace.py         a job for Perfetto; metrics.py: for Prometheus
    top.py           the screen of `top`; live_jobs.py: jobs that are followed by readers that stay
    hindsight.py     what the STOP verdicts of dry runs would have saved or lost
    logs.py          the ranks' output, cycle after cycle

`model`, `view`, `recovery`, `ranks`, `words`, `sentences`, `tables`, `page`, `failures`, `spans`, `goodput`,
`history`, `trace` and `top` do no I/O and read no clock.
"""
