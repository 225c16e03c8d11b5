"""Commands that answer a wrong flag with the nearest right one, and groups that import commands when used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import Any

import click


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`; None only if nothing is known."""
    near = difflib.get_close_matches(name, list(known), 1, 0.0)
    return near[0] if near else None


class Command(click.Command):
    """A command that suggests the nearest flag, however far it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = error.option_name
            known = [name for parameter in self.get_params(ctx) for name in _flags(parameter)]
            # -z is not meant to be --size: a short flag is compared with short ones.
            short = [name for name in known if not name.startswith("--")]
            near = nearest(flag, known if flag.startswith("--") else short or known)
            hint = f"; did you mean {near}?" if near else ""
            raise click.UsageError(f"no such option {flag}{hint}", ctx) from error
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class LazyGroup(click.Group):
    """A group whose commands are named by `lazy` as name -> (module:attribute, one line of help)."""

    command_class = Command

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, attribute = self.lazy[cmd_name][0].split(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.lazy:
            near = nearest(args[0], self.lazy)
            raise click.UsageError(f"no such command {args[0]!r}; did you mean {near}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in self.lazy.items()])


def _flags(parameter: click.Parameter) -> list[str]:
    return [*parameter.opts, *parameter.secondary_opts] if isinstance(parameter, click.Option) else []
