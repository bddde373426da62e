"""The command line: words into calls, errors into one line and an exit status.

    psdist run -n 6 --mode ssp train.py --epochs 5
    psdist check runs/20260101-120000-1

Imports what a command needs only when that command runs: ``psdist --help`` loads neither torch nor
MPI. The options of ``psdist bench``, ``plan`` and ``run`` are in cli_bench, cli_plan and cli_run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal, NoReturn, TypeAlias, cast

import typer

from psdist.commands import flush, open_missing, report_failure
from psdist.commands.cli_bench import Action, bench_app
from psdist.commands.cli_plan import RACKS_HELP, PlanOptions, taking
from psdist.commands.cli_run import SHOWN, RunCommand, SettingsCommand, read_request, run
from psdist.errors import PsdistError, UsageError
from psdist.install import detect

app = typer.Typer(
    name="psdist",
    help="Train PyTorch models on sharded parameter servers over MPI.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
checkpoint_app = typer.Typer(rich_markup_mode=None)
app.add_typer(checkpoint_app, name="checkpoint")

JOB_SCRIPTS: Final = {
    "openmpi": "srun-openmpi.sbatch",
    "mpich": "srun-mpich.sbatch",
    "mpirun": "mpirun.sbatch",
    "requeue": "requeue.sbatch",
    "multi-gpu": "multi-gpu.sbatch",
    "pbs": "mpirun.pbs",
    "lsf": "mpirun.lsf",
}
"""Name in ``psdist slurm`` -> file. psdist/slurm is a link to slurm/; the wheel has the files."""

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# click's UsageError. Which package has it depends on the version of typer: newer ones bring a
# click of their own, and export of its exceptions only this child.
_WrongUsage: Final = cast(type[Exception], typer.BadParameter.__base__)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of ``psdist``. `arguments` are those of the process unless given."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    open_missing()
    try:
        result = app(args=words, prog_name="psdist", standalone_mode=False)
        # --help and --version have done their work, and the result is their exit status.
        status = result() if callable(result) else int(result or 0)
        flush()
    except _WrongUsage as error:
        status = _refuse(error)
    except PsdistError as error:
        print(f"psdist: error: {error}", file=sys.stderr)
        status = error.exit_status
    except OSError as error:
        if (failed := report_failure(error)) is None:
            raise
        status = failed
    sys.exit(status)


@app.callback(invoke_without_command=True)
def psdist(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from psdist.version import VERSION

        print(f"psdist {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(UsageError.exit_status)


# The first word that is no option is the script; everything after it belongs to the script.
app.command("run", cls=RunCommand, context_settings={"allow_interspersed_args": False})(run)


@app.command("settings", cls=SettingsCommand)
def settings_command(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(metavar="[TABLE|KEY]", help="A table, such as codec, or a setting."),
    ] = None,
    show: Annotated[
        bool,
        typer.Option("--show", help="Resolve the words that follow, as psdist run would."),
    ] = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print a TOML file.")] = False,
    conflicts: Annotated[
        bool, typer.Option("--conflicts", help="Print what settings need and exclude.")
    ] = False,
    as_json: Json = False,
) -> Action:
    """List, explain and resolve the settings of psdist run.

    psdist settings codec lists a table, psdist settings codec.push explains one. psdist settings
    --show --mode ssp train.py prints each value that the command line, the environment or a file
    gives, and its source.
    """
    from psdist.commands.settings import show_settings

    request = read_request(context.meta[SHOWN]) if show else None
    return lambda: show_settings(
        what, request, as_toml=as_toml, conflicts=conflicts, as_json=as_json
    )


@app.command()
def check(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run made with --record.")
    ],
    as_json: Json = False,
) -> Action:
    """Prove from its history that a run kept the rules."""
    from psdist.commands.check import main as check_run

    return lambda: check_run(run_dir, as_json=as_json)


@app.command("trace")
def trace_command(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The folder of a run made with --trace.")
    ],
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw one step of all ranks.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Which iteration; else a middling one.")
    ] = None,
    as_json: Json = False,
) -> Action:
    """Put the spans of a run together: a file for Perfetto, and where the time went.

    Writes RUN_DIR/trace.json, which ui.perfetto.dev opens, and prints for each worker its mean
    step: milliseconds in passes, the script, psdist, the network, at servers, and waiting for
    other workers; how much communication was hidden; and the worker that was waited for most.
    """
    from psdist.commands.trace import main as show_trace

    return lambda: show_trace(run_dir, svg=svg, step=step, as_json=as_json)


@app.command()
@taking(PlanOptions)
def plan(options: PlanOptions) -> Action:
    """Place a job before it starts: draw the plan and write the files for its launcher.

    Runs on a login node, without MPI, torch or a GPU.
    """
    from psdist.commands.plan import run as make_plan

    return lambda: make_plan(options)


@app.command()
def probe(
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Where it is written; else network.json."),
    ] = None,
    racks: Annotated[str | None, typer.Option(metavar="FILE", help=RACKS_HELP)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer repeats, smaller messages.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="OLD NEW", help="Measure nothing: what got slower between the two."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(min=0, max=1000, metavar="PERCENT", help="Of --compare; else 10, latency 25."),
    ] = None,
) -> Action:
    """Measure latency and bandwidth inside a job: nodes, racks, sockets and GPUs.

    Start it as the job would start: srun --mpi=pmix psdist probe, or mpirun psdist probe. psdist
    plan --network and psdist run --set hosts.network=FILE read its file. --compare lists what got
    slower between two such files: exit status 0 nothing, 1 something, 2 files that cannot be
    compared.
    """
    if compare is not None:
        if racks is not None or quick:
            raise typer.BadParameter("nothing is measured: leave --racks and --quick out",
                                     param_hint="--compare")  # fmt: skip
        from psdist.commands.probe.comparison import compare as compare_files

        old, new = compare
        return lambda: compare_files(old, new, threshold=threshold, json_path=json_path)
    if threshold is not None:
        raise typer.BadParameter("only --compare has one", param_hint="--threshold")
    from psdist.commands.probe import probe as measure

    return lambda: measure(json_path, quick=quick, racks=racks)


@app.command()
def status(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The folder of a running job.")
    ],
    as_json: Json = False,
) -> Action:
    """Show which ranks wait for which others, since when, and which are slow, in a running job.

    Without MPI. Server 0 writes RUN_DIR/status.json about once a second.
    """
    from psdist.commands.status import main

    return lambda: main(run_dir, as_json=as_json)


_CHECKPOINT_HELP = "RUN_DIR, or a checkpoint of it: RUN_DIR/checkpoints/step-N."


@checkpoint_app.callback()
def checkpoint() -> None:
    """List, prove and compare what a run has kept. Without MPI."""


@checkpoint_app.command("list")
def list_checkpoints(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_CHECKPOINT_HELP)],
    as_json: Json = False,
) -> Action:
    """List the checkpoints of a run: time, clocks, ranks and size, one in a line."""
    from psdist.commands.checkpoints import list_all

    return lambda: list_all(path, as_json=as_json)


@checkpoint_app.command("verify")
def verify_checkpoints(
    path: Annotated[Path, typer.Argument(metavar="RUN_DIR", help=_CHECKPOINT_HELP)],
    as_json: Json = False,
) -> Action:
    """Read every byte and compare checksums; exit status 0 whole, 1 damaged."""
    from psdist.commands.checkpoints import verify

    return lambda: verify(path, as_json=as_json)


@checkpoint_app.command("diff")
def compare_checkpoints(
    first: Annotated[Path, typer.Argument(metavar="A", help=_CHECKPOINT_HELP)],
    second: Annotated[Path, typer.Argument(metavar="B", help=_CHECKPOINT_HELP)],
    as_json: Json = False,
) -> Action:
    """Which parameters, optimizer state and workers' values differ; exit status 0 none, 1 some."""

    def compare() -> int:
        from psdist.commands.checkpoints.comparing import compare

        return compare(first, second, as_json=as_json)

    return compare


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="CKPT", help=_CHECKPOINT_HELP)],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .safetensors file; with dcp a new folder.")
    ],
    model: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Which, of several that were prepared.")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="safetensors|dcp", help="dcp: torch's distributed.")
    ] = "safetensors",
    table: Annotated[
        str, typer.Option(metavar="NAME", help="Rows of this table instead; '*': of all tables.")
    ] = "",
) -> Action:
    """Write a checkpoint's model as one safetensors file, as job.save does.

    From RUN_DIR: the newest checkpoint that is whole. With --format dcp a folder that
    torch.distributed.checkpoint reads, with the optimizer's state. With --table the tensors
    NAME.ids and NAME.rows of tables. Without MPI.
    """
    if form not in ("safetensors", "dcp"):
        raise typer.BadParameter(f"{form} is neither safetensors nor dcp", param_hint="--format")
    chosen: Literal["safetensors", "dcp"] = "dcp" if form == "dcp" else "safetensors"
    if table and (form == "dcp" or model is not None):
        raise typer.BadParameter("rows go without --model and --format", param_hint="--table")

    def write() -> int:
        from psdist.commands.checkpoints.exporting import export, export_rows

        if table:
            return export_rows(path, out, table=table)
        return export(path, out, model=model, form=chosen)

    return write


@app.command()
def slurm(
    name: Annotated[str, typer.Argument(metavar="|".join(JOB_SCRIPTS), help="Which.")] = "openmpi",
) -> Action:
    """Print a job script for Slurm, PBS or LSF. Its first lines say what to change.

    psdist slurm requeue > job.sbatch; sbatch job.sbatch train.py. The scripts for PBS and LSF
    follow the manuals; they have never run on such a cluster.
    """
    if name not in JOB_SCRIPTS:
        raise typer.BadParameter(f"{name}: expected one of {', '.join(JOB_SCRIPTS)}")
    script = files("psdist").joinpath("slurm", JOB_SCRIPTS[name])

    def show() -> int:
        print(script.read_text(encoding="utf-8"), end="")
        return 0

    return show


@app.command()
def doctor(as_json: Json = False) -> Action:
    """Say what is here and whether it fits together.

    MPI and a message between two ranks of this host, Slurm, hwloc and torch, with the remedy for
    what does not fit. The exit status is 1 if training would fail.
    """
    from psdist.commands.doctor import main as examine

    return lambda: examine(as_json=as_json)


def _refuse(error: Exception) -> int:
    """Say in one line what is wrong with the words of the command line; the exit status."""
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "psdist")
    reason = str(cast(typer.BadParameter, error).format_message()).rstrip(".")
    from psdist.config.old_names import why_removed

    option = getattr(error, "option_name", "")
    if wrong := why_removed(option.lstrip("-").replace("-", "_")):
        reason = f"{option} {wrong}"
    refusal = UsageError(f"{reason} (see {command} --help)")
    if (detect(os.environ).size or 1) > 1:
        # All ranks have the same words. One must speak, and the launcher ends the job at the
        # first rank that fails, which may be a silent one: startup lets them agree.
        from psdist.commands.program import Program
        from psdist.commands.run_rank import run_program

        return run_program(refusal, Program(name=""))
    print(f"psdist: error: {refusal}", file=sys.stderr)
    return refusal.exit_status
