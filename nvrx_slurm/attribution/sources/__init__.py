"""Who is asked about a failure, each behind one port, bounded, and behind a circuit breaker.

base.py        the port
guard.py       what bounds a source: time, number, circuit; breaker.py has the circuit, purely
lib.py         `lib`: the rules, in a process of their own, lib_process.py
assistant.py   `mcp`: an MCP server over stdio; session.py is one session with it, stdio.py its pipes
service.py     `attrsvc`, and each of `http_urls`: a service over HTTP
  talk.py, exchange.py, replies.py, places.py
answers.py     what a service or a server answers, checked
patience.py    when a view of logs that are still written is good enough
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nvrx_slurm.attribution.sources.base import Source
from nvrx_slurm.attribution.sources.guard import Guard
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.util.clock import Clock

__all__ = ["Source", "sources_of"]

PATIENCE = 0.8
"""Of the decision's time: how long a source waits for logs to be whole. The rest is for its last look."""


def sources_of(plan: AttributionSpec, *, folder: Path, clock: Clock) -> list[Source]:
    """The sources of a plan, in the order of `plan.sources`; each answers in time, and raises nothing.

    `folder`: the job's. What a source needs beyond the core dependencies is loaded when it is first asked.
    """
    return [Guard(source, clock=clock) for source in _bare(plan, folder, clock)]


def _bare(plan: AttributionSpec, folder: Path, clock: Clock) -> Iterator[Source]:
    patience_s = plan.decision_timeout * PATIENCE
    if plan.enable_lib:
        from nvrx_slurm.attribution.sources.lib import LibSource

        yield LibSource(rules=plan.rules, llm=plan.llm, patience_s=patience_s, clock=clock)
    if plan.enable_mcp:
        from nvrx_slurm.attribution.sources.assistant import AssistantSource, default_command

        command = plan.mcp_command or default_command(plan.rules)
        yield AssistantSource(command, patience_s=patience_s)
    if len(plan.sources) > plan.enable_lib + plan.enable_mcp:
        yield from _services(plan, folder, patience_s, clock)


def _services(plan: AttributionSpec, folder: Path, patience_s: float, clock: Clock) -> Iterator[Source]:
    from urllib.parse import urlsplit

    from nvrx_slurm.attribution.local_service import is_loopback
    from nvrx_slurm.attribution.sources.places import fixed_place, managed_place
    from nvrx_slurm.attribution.sources.service import ServiceSource

    def at(name: str, url: str) -> Source:
        where, local = fixed_place(url, plan.token_file), is_loopback(urlsplit(url).hostname or "")
        return ServiceSource(name, where, patience_s=patience_s, clock=clock, local=local)

    if plan.manage_attrsvc:
        where = managed_place(folder)
        yield ServiceSource("attrsvc", where, patience_s=patience_s, clock=clock, managed=True)
    elif plan.attrsvc_url:
        yield at("attrsvc", plan.attrsvc_url)
    for url in plan.http_urls:
        yield at(url, url)
