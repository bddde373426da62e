"""The options of ``psdist plan``, each declared once: its type, default, metavar and help.

    @app.command()
    @taking(PlanOptions)
    def plan(options: PlanOptions) -> Action: ...

Imports nothing of the mapper: psdist --help answers at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar, get_type_hints

import typer

from psdist.commands.cli_bench import Action

RACKS_HELP: Final = (
    "topology.conf or .yaml, scontrol show topology, ibnetdiscover, or a TOML table."
)
_Options = TypeVar("_Options")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options as text; :func:`psdist.commands.plan.run` checks them."""

    machines: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            metavar="[HOSTS=]FILE",
            help="lstopo's XML of the nodes; HOSTS=FILE for some. Else this machine.",
        ),
    ] = None
    racks: Annotated[Path | None, typer.Option(metavar="FILE", help=RACKS_HELP)] = None
    nodes: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="The nodes of the job, such as n[1-64].")
    ] = None
    network: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file that psdist probe wrote.")
    ] = None
    link: Annotated[
        str | None, typer.Option(metavar="SPEED", help="Speed of each node's link, such as 25Gbit.")
    ] = None
    servers: Annotated[
        str, typer.Option(metavar="N|auto", help="How many servers; auto: as few as needed.")
    ] = "auto"
    server_nodes: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="Only these have servers, and no workers.")
    ] = None
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The nodes: of Open MPI, PBS, Kubernetes, Flux ..."),
    ] = None
    workers_per_node: Annotated[
        int | None,
        typer.Option(min=0, max=100_000, metavar="N", help="Else slots of --hostfile, or 1."),
    ] = None
    workers: Annotated[
        list[str] | None,
        typer.Option(metavar="HOSTS=N", help="Another number of workers on some nodes."),
    ] = None
    group: Annotated[
        str,
        typer.Option(
            metavar="node|socket|numa|rank|rack|N|auto", help="Which workers reduce together."
        ),
    ] = "node"
    placement: Annotated[
        str, typer.Option(metavar="auto|block|cyclic", help="How servers are placed.")
    ] = "auto"
    model_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of the model's parameters, such as 4G.")
    ] = "1G"
    chunk_bytes: Annotated[
        str, typer.Option(metavar="SIZE|auto", help="As the run's setting chunk_bytes.")
    ] = "auto"
    apply: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED", help="Measured: what one core of a server applies, as 4GB/s."
        ),
    ] = None
    launcher: Annotated[
        str | None,
        typer.Option(
            "--emit",
            metavar="slurm|openmpi4|openmpi5|mpich|intel|hostfile|pbs|flux|json",
            help="Write this launcher's files.",
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where --emit writes them; else plan.")
    ] = None
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plan.")] = None
    explain: Annotated[
        bool, typer.Option("--explain", help="Name the link that limits, and what would help.")
    ] = False
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="Show how GPUs and cards of each node reach each other."),
    ] = False
    script: Annotated[
        str | None,
        typer.Option(metavar="SCRIPT", help="For the command line of --emit; else train.py."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print plan.json, not the drawing.")] = (
        False
    )


def taking(
    declared: type[_Options],
) -> Callable[[Callable[[_Options], Action]], Callable[..., Action]]:
    """Let typer read the options of a command from the fields of the dataclass ``declared``."""

    def decorated(function: Callable[[_Options], Action]) -> Callable[..., Action]:
        def command(**words: Any) -> Action:
            return function(declared(**words))

        hints = get_type_hints(declared, include_extras=True)
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = hints
        parameters = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=each.default,
                annotation=hints[each.name],
            )
            for each in fields(declared)  # type: ignore[arg-type] # any dataclass
        ]
        vars(command)["__signature__"] = inspect.Signature(parameters)  # of inspect.signature
        return command

    return decorated
