"""Process flows: a job, faults that really happen to it, and what its journal must then say.

flow.yaml ─ load ─▶ Flow ─▶ suite ─ one process each ─▶ attempt ─▶ outcome ─▶ report (text, JUnit, HTML, GitHub)
                                                          │  ▲
                                         stages: submit, inject │ journal, heartbeats

| to look up | modules |
|---|---|
| the language of a flow file | `load`, `parsing`, `patterns`, `problems`, `model`, `faults` |
| its schema, its documentation, its writer | `schema`, `docs`, `writing` |
| a run | `suite`, `attempt`, `flow_run`; `artifacts`, `cleanup`, `guard` |
| the verdict | `matching`, `triggers`, `topology`, `replaying`; `outcome`, `report_text` and its siblings |
| the places where a job runs, and the faults there | `stages` |
| flows made from a job | `recording`, `inferred_faults`, `matrix` |
"""
