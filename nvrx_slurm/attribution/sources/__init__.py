"""The sources of attribution, each behind one port, bounded, and behind a circuit breaker.

base.py           the port, its answers; when a view of logs that are still written is good enough
guard.py          bounds of time and number, and the circuit breaker (pure)
builtin_rules.py  `lib`: the built-in rules, in a process of their own
mcp.py            `mcp`: an MCP server over stdio; mcp_session.py is one session with it
service.py        `attrsvc`, and each of `http_urls`: a service over HTTP
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from nvrx_slurm.attribution.sources.base import Source
from nvrx_slurm.attribution.sources.guard import GuardedSource
from nvrx_slurm.jobspec.model import AttributionSpec
from nvrx_slurm.util.clock import Clock

__all__ = ["Source", "sources_of"]

# Of the decision's time: how long a source waits for complete logs. The rest is for its last look.
SETTLE_SHARE = 0.8


def sources_of(plan: AttributionSpec, *, folder: Path, clock: Clock) -> list[GuardedSource]:
    """The sources of a plan, in the order of `plan.sources`; each answers in time, and raises nothing.

    `folder`: the job's. What a source needs beyond the core dependencies is loaded when it is first asked.
    """
    sources: list[Source] = []
    settle_s = plan.decision_timeout * SETTLE_SHARE
    if plan.enable_lib:
        from nvrx_slurm.attribution.sources.builtin_rules import BuiltinRulesSource

        # Where no verdict acts no decision waits for one, and the answer may take all of its time.
        decide_s = plan.decision_timeout if plan.acts else plan.timeout
        sources.append(
            BuiltinRulesSource(rules=plan.rules, llm=plan.llm, settle_s=settle_s, clock=clock, decide_s=decide_s)
        )
    if plan.enable_mcp:
        from nvrx_slurm.attribution.sources.mcp import McpSource, default_command

        command = plan.mcp_command or default_command(plan.rules)
        sources.append(McpSource(command, settle_s=settle_s))
    services = [(url, url) for url in plan.http_urls]
    if plan.attrsvc_url and not plan.manage_attrsvc:
        services.insert(0, ("attrsvc", plan.attrsvc_url))
    if plan.manage_attrsvc or services:
        from nvrx_slurm.attribution.local_service import is_loopback
        from nvrx_slurm.attribution.sources.service import ServiceSource, fixed_endpoint, managed_endpoint

        if plan.manage_attrsvc:
            where = managed_endpoint(folder)
            sources.append(ServiceSource("attrsvc", where, settle_s=settle_s, clock=clock, managed=True))
        for name, url in services:
            where, local = fixed_endpoint(url, plan.token_file), is_loopback(urlsplit(url).hostname or "")
            sources.append(ServiceSource(name, where, settle_s=settle_s, clock=clock, local=local))
    return [GuardedSource(source, clock=clock) for source in sources]
