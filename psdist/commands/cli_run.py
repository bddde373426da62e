"""The options of ``psdist run``, and its help by headings.

    request = read_request(["--mode", "ssp", "--set", "codec.push=int8", "train.py"])

Imports neither torch nor MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from psdist.commands.cli_bench import Action

if TYPE_CHECKING:
    from psdist.commands.run import RunRequest

HEADINGS: Final = {
    "Job": ("is_module", "ranks", "workers", "config", "profile", "settings", "help", "help_all"),
    "Consistency": ("mode", "staleness", "schedule", "local_steps", "codec"),
    "Ranks": ("servers", "group", "placement", "spares"),
    "Data": ("global_batch", "seed"),
    "Output": ("run_dir", "resume", "checkpoint_every", "record", "trace"),
}
"""Heading -> the options that --help shows under it."""
MORE: Final = ("backup", "outer", "push_codec", "pull_codec", "strict_placement")
"""Options that only --help-all shows."""
_NO_SETTINGS: Final = HEADINGS["Job"]
_ALL: Final = "psdist.help_all"


class RunCommand(TyperCommand):
    """The command, with its options under headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options that the help shows."""
        records = {each.name: each.get_help_record(ctx) for each in self.get_params(ctx)}
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([records[name] for name in names])
        if not ctx.meta.get(_ALL):
            return
        from psdist.config.settings import KEYS, NAMES, RunConfig

        with formatter.section("More options"):
            formatter.write_dl([records[name] for name in MORE])
        with formatter.section("More settings, by --set TABLE.KEY=VALUE"):
            formatter.write_dl(
                [
                    (NAMES[key], RunConfig.model_fields[key].description or "")
                    for key in KEYS
                    if key not in records and NAMES[key].replace(".", "_") not in records
                ]
            )


def _show_all(context: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        context.meta[_ALL] = True
        print(context.get_help())
        raise typer.Exit


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
    mode: Annotated[
        str | None, typer.Option(metavar="sync|ssp|async|auto", help="Consistency.")
    ] = None,
    staleness: Annotated[
        str | None, typer.Option(metavar="N", help="Mode ssp: iterations a group may be ahead.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="ROUND:MODE;...", help='Modes by round: "0: ssp:8; 5000: sync int8".'),
    ] = None,
    backup: Annotated[
        str | None,
        typer.Option(metavar="N", help="Sync: close each round without the N slowest groups."),
    ] = None,
    local_steps: Annotated[
        str | None,
        typer.Option(metavar="H", help="Steps of each group between two exchanges, or epoch."),
    ] = None,
    outer: Annotated[
        str | None,
        typer.Option(metavar="NAME[:KEY=X,...]", help="With local steps: the servers' optimizer."),
    ] = None,
    servers: Annotated[
        str | None, typer.Option(metavar="N|auto", help="Ranks that serve; auto: as needed.")
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="node|socket|numa|rank|rack|N|auto", help="Which workers reduce together."
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="auto|block|cyclic|FILE", help="Which ranks serve; a plan.json."),
    ] = None,
    strict_placement: Annotated[
        bool,
        typer.Option("--strict-placement", help="A rank on another host than planned is an error."),
    ] = False,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="auto|CODEC|PUSH/PULL", help="Send less: auto, int8, int4/sign, topk:0.01 ..."
        ),
    ] = None,
    push_codec: Annotated[
        str | None, typer.Option(metavar="CODEC", help="Codec of gradients alone.")
    ] = None,
    pull_codec: Annotated[
        str | None, typer.Option(metavar="CODEC", help="Codec of parameters alone.")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the run writes.")
    ] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="N", help="Seed of the shuffling of data.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Write the history that psdist check reads.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write the spans that psdist trace reads.")
    ] = False,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(metavar="N|TIME", help="Checkpoint every N iterations, or every 10m."),
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(metavar="N", help="Samples of a batch of all workers together."),
    ] = None,
    spares: Annotated[
        str | None,
        typer.Option(metavar="N", help="Ranks that wait to replace failed ones."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in --run-dir.")
    ] = False,
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
) -> Action:
    """Run a training script on servers and workers.

    Under mpirun or srun this process becomes one of the job's ranks. With -n or --workers it
    starts mpirun itself. With neither, one process is both server and worker.

    Settings come from these options, from the environment (PSDIST_MODE, PSDIST_CODEC_PUSH, ...),
    from the TOML file, from the script, from the profile and from defaults, in that order. psdist
    settings explains each of them.
    """
    from psdist.commands.run import run as run_request

    request = _request(locals())
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
    shown = (name for names in HEADINGS.values() for name in names if name not in _NO_SETTINGS)
    given = {
        f"--{name.replace('_', '-')}": words[name]
        for name in (*shown, *MORE)
        if words[name] not in (None, False)
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
