"""The flags that set keys below `fault_tolerance.attribution`, shared by every command that takes a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import click

from nvrx_slurm.jobspec.flags import ATTRIBUTION, BLOCK, DEPRECATED_FLAGS, FLAGS

_F = TypeVar("_F", bound=Callable[..., Any])
Flag = tuple[str, str, Any]
"""A dotted key, the flag that sets it, and its value."""


class AttributionOption(click.Option):
    """One of these flags: `--help` lists them apart. `key`: what it sets, dotted."""

    def __init__(self, *args: Any, key: str, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.key = key

    def flag(self, value: Any) -> Flag:
        """The value as a layer of configuration has it. A path counts from here, not from where job.yaml lies."""
        name = (self.secondary_opts if value is False else self.opts)[0]
        if isinstance(self.type, click.Path):
            value = str(Path.cwd() / value)
        return self.key, name, list(value) if self.multiple else value


class JobCommand(click.Command):
    """A command that takes job.yaml."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The usual options first, those of failure attribution at the end."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        for title, is_last in (("Options", False), ("Failure attribution", True)):
            listed = (each for each in options if isinstance(each, AttributionOption) is is_last)
            with formatter.section(title):
                formatter.write_dl([record for each in listed if (record := each.get_help_record(ctx))])


def attribution_flags(values: dict[str, Any], options: list[click.Parameter]) -> Iterator[Flag]:
    """What was given of these flags; taken out of the command's `values`."""
    for option in options:
        if isinstance(option, AttributionOption) and option.name is not None:
            value = values.pop(option.name)
            if value is not None and value != ():
                yield option.flag(value)


_URL, _TIME, _FILE = {"metavar": "URL"}, {"metavar": "DURATION"}, {"type": click.Path(), "metavar": "FILE"}
_SWITCH: dict[str, Any] = {"default": None}
_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "attrsvc_url": (_URL, "Ask the attribution service there why a job failed."),
    "manage_attrsvc": (_SWITCH, "Ask one that the job starts for itself."),
    "enable_lib": (_SWITCH, "Ask the rules that come with this tool (the default)."),
    "enable_mcp": (_SWITCH, "Ask an MCP server."),
    "http_urls": ({**_URL, "multiple": True}, "Ask this service too; repeatable."),
    "timeout": (_TIME, "How long one source may take."),
    "decision_timeout": (_TIME, "How long a restart waits for them."),
    "dry_run": (_SWITCH, "Record what would have been decided, and restart all the same (the default)."),
    "aggregation": ({"type": click.Choice(["any", "all"])}, "How many sources must say STOP."),
    "slack.channel": ({"metavar": "CHANNEL"}, "Send each failure to this Slack channel."),
    "slack.token_file": (_FILE, "The Slack app's token."),
    "dataflow.url": (_URL, "Keep a document of each failure in an index there."),
    "dataflow.index": ({"metavar": "NAME"}, "The index."),
    "dataflow.token_file": (_FILE, "The index's token."),
}
_OLDER: dict[str, dict[str, Any]] = {
    "attribution_endpoint": {"metavar": "URL"},
    "attribution_backends": {"metavar": "URL|mcp", "multiple": True},
    "attribution_loganalysis": {"metavar": "lib|mcp|url"},
}


def attribution_options(command: _F) -> _F:
    """Give a command all of these flags; `--help` does not list deprecated ones."""
    for key, about in reversed(_OLDER.items()):
        command = _option(f"{BLOCK}.{key}", DEPRECATED_FLAGS[key], about, hidden=True)(command)
    for key, (about, text) in reversed(_OPTIONS.items()):
        command = _option(f"{ATTRIBUTION}.{key}", FLAGS[key], about, help=text)(command)
    return command


def _option(key: str, flag: str, about: dict[str, Any], **shown: Any) -> Callable[[_F], _F]:
    spelled = f"{flag}/{flag.replace('--', '--no-', 1)}" if about is _SWITCH else flag
    return click.option(spelled, cls=AttributionOption, key=key, **about, **shown)
