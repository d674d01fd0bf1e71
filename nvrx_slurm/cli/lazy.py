"""Groups of commands whose modules are imported when one is called, so that `--help` stays fast."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """`commands_in`: name → (`module:attribute` in `nvrx_slurm.cli`, what `--help` says)."""

    def __init__(self, *args: Any, commands_in: Mapping[str, tuple[str, str]], **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._commands_in = commands_in

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._commands_in)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self._commands_in:
            return None
        module, attribute = self._commands_in[name][0].split(":")
        loaded = getattr(importlib.import_module(f"nvrx_slurm.cli.{module}"), attribute)
        assert isinstance(loaded, click.Command)
        return loaded

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # click would end with 1, which stands for a job that has failed
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in self._commands_in.items()])
