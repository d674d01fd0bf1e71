"""Process flows: a job, faults that really happen to it, and what its journal must then say.

flow.yaml ─ load ─▶ Flow ─▶ suite ─ one process each ─▶ attempt ─▶ outcome ─▶ report (text, JUnit, HTML, GitHub)
                                                          │  ▲
                                         stages: submit, inject │ journal, heartbeats
"""
