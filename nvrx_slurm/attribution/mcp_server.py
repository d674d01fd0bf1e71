"""`nvrx-slurm mcp`: the tools of attribution for an assistant, over stdio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import ValidationError

from nvrx_slurm.attribution.analyze.analysis import inquiry_for
from nvrx_slurm.attribution.analyze.analyzer import Analyzer
from nvrx_slurm.attribution.rules.catalogue import Rule, load_catalogue
from nvrx_slurm.attribution.scan import files
from nvrx_slurm.attribution.service.confinement import OutsideRoots, Roots
from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.journal.verdicts import Inquiry, excess, unknown_keys

INSTRUCTIONS = """Why a multi-node training job failed, and whether a restart can help. Start with `explain_job` for a
job that nvrx-slurm ran, or `analyze_paths` for any log file or folder. Verdicts: STOP (it will happen again), RESTART
(it may well not), UNKNOWN. `explain_rule` describes the rule that an evidence line names."""

# A job as JSON, by its id; raises NvrxError.
Explain = Callable[[str], dict[str, Any]]


class Tools:
    """What the server offers. With `roots`, only paths below these folders are named, links followed first."""

    def __init__(
        self, analyzer: Analyzer, rules: Sequence[Rule], explain: Explain, roots: Roots | None = None
    ) -> None:
        self._analyzer, self._explain = analyzer, explain
        self._rules = {rule.name: rule for rule in rules}
        self._roots = roots

    async def attribute(self, inquiry: dict[str, Any], settled: bool = False) -> dict[str, Any]:
        """Whether a restart can help after this failure.

        `inquiry` names the failure and its logs; `settled` says that nothing more will be written to them. Answers
        with the key, the state `done`, the attribution, and, as `ignored`, keys of the inquiry that are not known.
        """
        try:
            asked = msgspec.convert(inquiry, Inquiry, str_keys=True)
        except msgspec.ValidationError as error:
            raise UsageError(f"inquiry: {error}") from None
        answer = {"key": str(asked.key), "state": "done", "attribution": await self._analyze(asked)}
        ignored = unknown_keys(inquiry, Inquiry)
        return answer | ({"ignored": ignored} if ignored else {})

    async def analyze_paths(self, paths: list[str]) -> dict[str, Any]:
        """What failed first in these log files or folders, why, what followed, and whether a restart can help."""
        return await self._analyze(inquiry_for([Path(path) for path in paths]))

    async def explain_job(self, job: str) -> dict[str, Any]:
        """How a job stands or ended (`status`), and of its last `failures`, newest first: what failed first, what
        followed, the verdict of each source with its evidence, progress, budget, and the decision. `job`: its id."""
        return await asyncio.to_thread(self._explain, job)

    async def list_rules(self, fault: str = "") -> dict[str, Any]:
        """The rules that recognise failures in logs, with the fault and verdict of each; of one `fault`, if given."""
        found = [rule for rule in self._rules.values() if fault in ("", rule.fault)]
        if not found:
            known = sorted({rule.fault for rule in self._rules.values()})
            raise UsageError(f"no rule is of the fault {fault!r}; there are {', '.join(known)}")
        return {"rules": [{"name": rule.name, "fault": rule.fault, "verdict": rule.verdict} for rule in found]}

    async def explain_rule(self, name: str) -> dict[str, Any]:
        """One rule: what it recognises, what it means, what to do, and where that is documented."""
        if name not in self._rules:
            raise UsageError(f"no rule {name!r}; `list_rules` has all names")
        rule = self._rules[name]
        keys = ("name", "fault", "verdict", "scope", "role", "pattern", "hint", "reference", "sample")
        pattern = rule.pattern.pattern.decode(errors="replace")
        return {key: getattr(rule, key) for key in keys} | {"pattern": pattern, "sample": list(rule.sample)}

    async def _analyze(self, inquiry: Inquiry) -> dict[str, Any]:
        if (out := excess(inquiry)) is not None:
            raise UsageError(f"{out[0]} - at `{out[1]}`")
        if self._roots is not None:
            for path in (*inquiry.paths, *inquiry.earlier):
                try:
                    # In a thread: it follows links on file systems that may take long to answer.
                    await asyncio.to_thread(self._roots.check, path)
                except OutsideRoots as error:
                    raise UsageError(str(error)) from None
        attribution = await self._analyzer.analyze(inquiry)
        found: dict[str, Any] = msgspec.to_builtins(attribution)
        return found


class _OneLineErrors(MCPServer[None]):
    """Reports each error in one line: what a tool raises, and a wrong argument."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, NvrxError):  # without this the SDK hides its message, as that of a crash
                raise ToolError(f"Error executing tool {name}: {cause}") from None
            if not isinstance(cause, ValidationError):
                raise
            wrong = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in cause.errors())
            raise ToolError(f"{name}: {'; '.join(wrong)}") from None


def serve(*, rules: Sequence[Path], roots: Sequence[Path], explain: Explain) -> None:
    """Serve on standard input and output until the input ends. Raises ConfigError for a rule that is wrong."""
    analyzer = Analyzer(rules=rules)
    allowed = Roots(roots) if roots else None
    if allowed is not None:
        # As in the service: a file below a named folder that leads out of the roots is left out and reported.
        files.readable = allowed.hold
    tools = Tools(analyzer, load_catalogue(rules).rules, explain, allowed)

    @asynccontextmanager
    async def life(_: MCPServer[None]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await analyzer.close()

    server = _OneLineErrors(
        "nvrx-slurm", version=version("nvrx-slurm"), instructions=INSTRUCTIONS, lifespan=life, log_level="WARNING"
    )
    offered = (tools.attribute, tools.analyze_paths, tools.explain_job, tools.list_rules, tools.explain_rule)
    for tool in offered:
        server.add_tool(tool, description=inspect.getdoc(tool), structured_output=True)
    server.run("stdio")
