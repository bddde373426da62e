"""The options of ``psdist run``, and its help by headings.

    request = read_request(["--mode", "ssp", "--set", "codec.push=int8", "train.py"])

Imports neither torch nor MPI.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from psdist.commands.cli_bench import Action
from psdist.features import FEATURES

if TYPE_CHECKING:
    from psdist.commands.run import RunRequest

OPTIONS: Final = {
    "mode": "sync|ssp|async|auto",
    "staleness": "N",
    "schedule": "ROUND:MODE;...",
    "local_steps": "H",
    "codec": "auto|CODEC|PUSH/PULL",
    "servers": "N|auto",
    "group": "node|socket|numa|rank|rack|N|auto",
    "placement": "auto|block|cyclic|FILE",
    "spares": "N",
    "global_batch": "N",
    "seed": "N",
    "run_dir": "DIR",
    "resume": "",
    "checkpoint_every": "N|TIME",
    "record": "",
    "trace": "",
    **{name: metavar for each in FEATURES for name, metavar in each.options.items()},
    "push_codec": "CODEC",
    "pull_codec": "CODEC",
    "strict_placement": "",
}
"""Flat name of a setting that has an option -> its metavar, "" for a flag."""
HEADINGS: Final = {
    "Job": ("is_module", "ranks", "workers", "config", "profile", "settings", "help", "help_all"),
    "Consistency": ("mode", "staleness", "schedule", "local_steps", "codec"),
    "Ranks": ("servers", "group", "placement", "spares"),
    "Data": ("global_batch", "seed"),
    "Output": ("run_dir", "resume", "checkpoint_every", "record", "trace"),
}
"""Heading -> the options that --help shows under it; --help-all shows the others, too."""
_ALL: Final = "psdist.help_all"
SHOWN: Final = "psdist.shown"
"""Key of a context's words after --show."""


class RunCommand(TyperCommand):
    """The command, with its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, with the descriptions of their settings."""
        from psdist.config.old_names import MERGED
        from psdist.config.settings import FIELDS, KEYS, NAMES, RunConfig

        def described(key: str) -> str:
            return RunConfig.model_fields[key].description or ""

        params = {each.name: each for each in self.get_params(ctx)}
        records = {name: each.get_help_record(ctx) or ("", "") for name, each in params.items()}
        for name in OPTIONS:
            key = name if name in KEYS else FIELDS.get(MERGED[name].instead, "")
            text = described(key) if key else f"Both codecs: {MERGED[name].allowed}."
            records[name] = (records[name][0], text)
        sections = {heading: [records[name] for name in HEADINGS[heading]] for heading in HEADINGS}
        if ctx.meta.get(_ALL):
            listed = {name for names in HEADINGS.values() for name in names}
            sections["More options"] = [records[name] for name in OPTIONS if name not in listed]
            more = [key for key in KEYS if key not in OPTIONS]
            sections["More settings, by --set"] = [(NAMES[key], described(key)) for key in more]
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class SettingsCommand(TyperCommand):
    """A command whose words after --show are words of psdist run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words after --show for `read_request`."""
        end = args.index("--show") + 1 if "--show" in args else len(args)
        ctx.meta[SHOWN] = args[end:]
        return super().parse_args(ctx, args[:end])


def _with_options(function: Callable[..., Action]) -> Callable[..., Action]:
    """Declare the options of OPTIONS as parameters of ``function``; typer reads its signature."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
    for name, metavar in OPTIONS.items():
        option = typer.Option(f"--{name.replace('_', '-')}", metavar=metavar or None)
        kind: Any = Annotated[str | None, option] if metavar else Annotated[bool | None, option]
        function.__annotations__[name] = kind
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        )
    function.__annotations__.pop("options")
    vars(function)["__signature__"] = signature.replace(parameters=parameters)  # typer reads it
    return function


def _show_all(context: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        context.meta[_ALL] = True
        print(context.get_help())
        raise typer.Exit


@_with_options
def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The training script; after -m, a module.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments of the script."),
    ] = None,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m.")
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            "-n", "--ranks", min=1, metavar="N", help="Start mpirun with N ranks, unless under one."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="The same with N workers plus the servers."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A TOML file of settings.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="slow-network, unreliable, uneven or study."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="A setting; may be repeated."),
    ] = None,
    help_all: Annotated[
        bool,
        typer.Option(
            "--help-all", is_eager=True, callback=_show_all, help="Show all options and settings."
        ),
    ] = False,
    **options: Any,
) -> Action:
    """Run a training script on servers and workers.

    Under mpirun or srun this process becomes one of the job's ranks. With -n or --workers it
    starts mpirun itself. With neither, one process is both server and worker.

    Settings come from these options, from the environment (PSDIST_MODE, PSDIST_CODEC_PUSH, ...),
    from the TOML file, from the script, from the profile and from defaults, in that order. psdist
    settings explains each of them.
    """
    from psdist.commands.run import run as run_request

    request = _request({**locals(), **options})
    return lambda: run_request(request)


def read_request(words: Sequence[str]) -> RunRequest:
    """Return the request that the words after ``psdist run`` make; they need not name a script.

    Raises typer's errors for words that are no options.
    """
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=RunCommand, context_settings={"allow_interspersed_args": False})(run)
    command = typer.main.get_command(app)
    for parameter in command.params:
        parameter.required = False
    return _request(command.make_context("psdist run", list(words)).params)


def _request(words: Mapping[str, Any]) -> RunRequest:
    """Return the request of parsed options; an option that is a setting keeps its dashes."""
    from psdist.commands.program import Program
    from psdist.commands.run import RunRequest

    if words["ranks"] is not None and words["workers"] is not None:
        raise typer.BadParameter(
            f"-n {words['ranks']} and --workers {words['workers']}: give the number of all ranks "
            "or that of the workers"
        )
    given = {
        f"--{name.replace('_', '-')}": words[name] for name in OPTIONS if words[name] is not None
    }
    program = Program(
        name=words["script"] or "",
        arguments=tuple(words["arguments"] or ()),
        is_module=words["is_module"],
    )
    return RunRequest(
        program=program,
        ranks=words["ranks"],
        workers=words["workers"],
        config_file=Path(words["config"]) if words["config"] is not None else None,
        profile=words["profile"],
        command_line=_with_settings(given, words["settings"] or ()),
    )


def _with_settings(
    options: dict[str, str | bool], settings: Sequence[str]
) -> dict[str, str | bool]:
    given = dict(options)
    seen = {key.removeprefix("--").replace("-", "_"): value for key, value in given.items()}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise typer.BadParameter(f"{setting!r} is not KEY=VALUE", param_hint="--set")
        if key in seen:
            raise typer.BadParameter(
                f"{key} is given twice, as {seen[key]} and as {value}", param_hint="--set"
            )
        given[key] = seen[key] = value
    return given
