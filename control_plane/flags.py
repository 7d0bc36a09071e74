"""Options as typer flags: a command names the groups it takes, and gets them filled in.

Knows nothing of the options that there are; parsing, bounds and precedence are `options`'.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from control_plane.options import ConfigError, Option, load, options_of, title_of, unknown_variables

logger = logging.getLogger(__name__)

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def configured(known: Sequence[type]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a typer command of a function whose parameters may be option groups.

    Each parameter annotated with a group's dataclass is replaced by that group's flags, and `--config` is added;
    other parameters stay typer's. `known` are all groups that a shared configuration file may speak of::

        @app.command()
        @configured(ALL_GROUPS)
        def serve(engine: EngineConfig, server: ServerConfig) -> None: ...

    A ConfigError, from reading the options or from the function itself, ends as a usage error (exit code 2).
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        groups = {name: hints[name] for name in inspect.signature(function).parameters if is_dataclass(hints[name])}

        def command(**given: Any) -> None:
            flags = {each.name: given.pop(each.name) for each in options_of(*groups.values())}
            config_file = given.pop("config")
            try:
                for warning in unknown_variables(os.environ, known):
                    logger.warning("%s", warning)
                settings = load(
                    tuple(groups.values()), flags=flags, environ=os.environ, config_file=config_file, known=known
                )
                filled = {name: settings.group(group) for name, group in groups.items()}
                for setting in settings.changed():
                    logger.info("%s", setting)
                function(**filled, **given)
            except ConfigError as error:
                raise typer.BadParameter(str(error)) from None

        parameters = _parameters(function, hints, groups)
        command.__name__ = function.__name__
        command.__doc__ = function.__doc__
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameters(
    function: Callable[..., None], hints: dict[str, Any], groups: dict[str, Any]
) -> list[inspect.Parameter]:
    options = [(each, group) for group in groups.values() for each in options_of(group)]
    flags = [_parameter(each.name, _annotation(each, group)) for each, group in options]
    config = typer.Option("--config", metavar="FILE", help="YAML file of options, `max-model-len: 4096` a line.")
    own = [
        each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[each.name])
        for each in inspect.signature(function).parameters.values()
        if each.name not in groups
    ]
    return [*own, *flags, _parameter("config", Annotated[Path | None, config])]


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(option: Option, group: type) -> Any:
    """Values stay text here, so that every source is parsed by the same code and errs in the same words."""
    text = option.description
    if option.positional:
        return Annotated[str | None, typer.Argument(metavar=option.flag, help=text, show_default=False)]
    panel = title_of(group)
    if option.kind is bool:
        names = f"{option.flag}/--no-{option.key}"
        return Annotated[bool | None, typer.Option(names, help=text, show_default=False, rich_help_panel=panel)]
    flag = typer.Option(
        option.flag, metavar=_METAVARS[option.kind], help=text, show_default=False, rich_help_panel=panel
    )
    return Annotated[str | None, flag]
