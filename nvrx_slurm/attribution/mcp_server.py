"""`nvrx-slurm mcp`: the tools of attribution for an assistant, over stdio."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, ParamSpec

import msgspec
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from msgspec.structs import replace

from nvrx_slurm.attribution.analyze.analysis import inquiry_for, logs_of
from nvrx_slurm.attribution.analyze.analyzer import Analyzer
from nvrx_slurm.attribution.rules.catalogue import Rule, load_catalogue
from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.journal.verdicts import Inquiry

INSTRUCTIONS = """Why a multi-node training job failed, and whether a restart can help. Start with `explain_job` for a
job that nvrx-slurm ran, or `analyze_paths` for any log file or folder. Verdicts: STOP (it will happen again), RESTART
(it may well not), UNKNOWN. `explain_rule` describes the rule that an evidence line names."""

Explain = Callable[[str], dict[str, Any]]
"""A job as JSON, by its id; raises NvrxError."""

_P = ParamSpec("_P")
_Tool = Callable[_P, Coroutine[Any, Any, dict[str, Any]]]


class Tools:
    """What the server offers. With `roots`, only files below these folders are read, links followed first."""

    def __init__(self, analyzer: Analyzer, rules: Sequence[Rule], explain: Explain, roots: Sequence[Path]) -> None:
        self._analyzer, self._explain = analyzer, explain
        self._rules = {rule.name: rule for rule in rules}
        self._roots = [root.resolve() for root in roots]

    async def attribute(self, inquiry: dict[str, Any], settled: bool = False) -> dict[str, Any]:
        """Whether a restart can help after this failure.

        `inquiry` names the failure and its logs; `settled` says that nothing more will be written to them. Answers
        with the key, the state `done`, and the attribution.
        """
        try:
            asked = msgspec.convert(inquiry, Inquiry, str_keys=True)
        except msgspec.ValidationError as error:
            raise UsageError(f"inquiry: {error}") from None
        return {"key": str(asked.key), "state": "done", "attribution": await self._analyze(asked)}

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
        return {
            "name": rule.name,
            "fault": rule.fault,
            "verdict": rule.verdict,
            "scope": rule.scope,
            "role": rule.role,
            "pattern": rule.pattern.pattern.decode(errors="replace"),
            "hint": rule.hint,
            "reference": rule.reference,
            "sample": list(rule.sample),
        }

    async def _analyze(self, inquiry: Inquiry) -> dict[str, Any]:
        if self._roots:
            await asyncio.to_thread(self._confine, inquiry)
        attribution = await self._analyzer.analyze(inquiry)
        found: dict[str, Any] = msgspec.to_builtins(attribution)
        return found

    def _confine(self, inquiry: Inquiry) -> None:
        """Refuse what leads out of the roots: each named path, before it is opened, then each file found there."""
        named = (*inquiry.paths, *inquiry.earlier)
        for path in named:
            self._check(Path(path))
        for log in logs_of(replace(inquiry, paths=named)):
            self._check(log.path)

    def _check(self, path: Path) -> None:
        if not any(path.resolve().is_relative_to(root) for root in self._roots):
            raise UsageError(f"{path} is outside of what may be read: {', '.join(map(str, self._roots))}")


def serve(*, rules: Sequence[Path], roots: Sequence[Path], explain: Explain) -> None:
    """Serve on standard input and output until the input ends. Raises ConfigError for a rule that is wrong."""
    analyzer = Analyzer(rules=rules)
    tools = Tools(analyzer, load_catalogue(rules).rules, explain, roots)

    @asynccontextmanager
    async def life(_: MCPServer[None]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await analyzer.close()

    server = MCPServer(
        "nvrx-slurm", version=version("nvrx-slurm"), instructions=INSTRUCTIONS, lifespan=life, log_level="WARNING"
    )
    offered = (tools.attribute, tools.analyze_paths, tools.explain_job, tools.list_rules, tools.explain_rule)
    for tool in offered:
        server.add_tool(_with_tool_errors(tool), description=inspect.getdoc(tool), structured_output=True)
    server.run("stdio")


def _with_tool_errors(tool: _Tool[_P]) -> _Tool[_P]:
    """The tool with each NvrxError raised as the SDK's ToolError, which the assistant sees as its message."""

    @wraps(tool)
    async def called(*args: _P.args, **named: _P.kwargs) -> dict[str, Any]:
        try:
            return await tool(*args, **named)
        except NvrxError as error:
            raise ToolError(str(error)) from None

    return called
