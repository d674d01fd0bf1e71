"""The sources of attribution, each behind one port, bounded, and behind a circuit breaker.

base.py           the port; when a view of logs that are still written is good enough
guard.py          bounds of time and number, and the circuit breaker (pure)
builtin_rules.py  `lib`: the built-in rules, in a process of their own
mcp.py            `mcp`: an MCP server over stdio; mcp_session.py is one session with it
service.py        `attrsvc`, and each of `http_urls`: a service over HTTP
answers.py        the answers of a service or a server, checked
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nvrx_slurm.attribution.sources.base import Source
from nvrx_slurm.attribution.sources.guard import GuardedSource
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.util.clock import Clock

__all__ = ["Source", "sources_of"]

SETTLE_SHARE = 0.8
"""Of the decision's time: how long a source waits for complete logs. The rest is for its last look."""


def sources_of(plan: AttributionSpec, *, folder: Path, clock: Clock) -> list[Source]:
    """The sources of a plan, in the order of `plan.sources`; each answers in time, and raises nothing.

    `folder`: the job's. What a source needs beyond the core dependencies is loaded when it is first asked.
    """
    return [GuardedSource(source, clock=clock) for source in _bare(plan, folder, clock)]


def _bare(plan: AttributionSpec, folder: Path, clock: Clock) -> Iterator[Source]:
    settle_s = plan.decision_timeout * SETTLE_SHARE
    if plan.enable_lib:
        from nvrx_slurm.attribution.sources.builtin_rules import BuiltinRulesSource

        yield BuiltinRulesSource(rules=plan.rules, llm=plan.llm, settle_s=settle_s, clock=clock)
    if plan.enable_mcp:
        from nvrx_slurm.attribution.sources.mcp import McpSource, default_command

        command = plan.mcp_command or default_command(plan.rules)
        yield McpSource(command, settle_s=settle_s)
    if len(plan.sources) > plan.enable_lib + plan.enable_mcp:
        yield from _services(plan, folder, settle_s, clock)


def _services(plan: AttributionSpec, folder: Path, settle_s: float, clock: Clock) -> Iterator[Source]:
    from urllib.parse import urlsplit

    from nvrx_slurm.attribution.local_service import is_loopback
    from nvrx_slurm.attribution.sources.service import ServiceSource, fixed_endpoint, managed_endpoint

    def at(name: str, url: str) -> Source:
        where, local = fixed_endpoint(url, plan.token_file), is_loopback(urlsplit(url).hostname or "")
        return ServiceSource(name, where, settle_s=settle_s, clock=clock, local=local)

    if plan.manage_attrsvc:
        where = managed_endpoint(folder)
        yield ServiceSource("attrsvc", where, settle_s=settle_s, clock=clock, managed=True)
    elif plan.attrsvc_url:
        yield at("attrsvc", plan.attrsvc_url)
    for url in plan.http_urls:
        yield at(url, url)
