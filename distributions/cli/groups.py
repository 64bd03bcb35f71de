"""Command groups: hyphens as good as underscores, and one line for every error."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from apis.errors import PostgradError
from distributions.cli.output import print_error


class CommandGroup(TyperGroup):
    """`supervised-fine-tune` finds `supervised_fine_tune`."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, cmd_name.replace("-", "_"))


def _stack_group() -> TyperGroup:
    from distributions.cli import stack

    return get_group(stack.app)


class RootGroup(CommandGroup):
    """Turns a `PostgradError` from any command into one line on stderr and exit code 1.

    The group `stack` is imported when it is run, since what serves a stack takes longer to import than a client.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _stack_group() if name == "stack" else command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PostgradError as error:
            print_error(error)
            raise typer.Exit(1) from None
