"""The options of ``psdist bench`` and what they may be; what is measured is in ``bench``.

psdist bench step --size 64MiB --compute 1.5x
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from psdist.errors import UsageError

# A command returns what is to be done, and cli.main() does it: typer would turn an EOFError or a
# broken pipe in a user's script into errors of its own, and add its frames to every traceback.
Action: TypeAlias = Callable[[], int]

JsonPath: TypeAlias = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here as well.")
]
PlotPath: TypeAlias = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw them, as SVG.")
]
NumServers: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="Ranks that serve; else as settings say.")
]

bench_app = typer.Typer(rich_markup_mode=None)
_ROW_BYTES = 4096
"""``bench server`` measures whole rows."""


@bench_app.callback()
def bench() -> None:
    """Measure psdist, and the limit of each figure on this machine."""


@bench_app.command()
def pushpull(
    sizes: Annotated[
        str, typer.Option(help="Message sizes, separated by commas.")
    ] = "4KiB,64KiB,1MiB,4MiB,16MiB,64MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Exchanges of each size.")] = 30,
    servers: Annotated[int, typer.Option(min=1, help="Ranks that serve.")] = 1,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> Action:
    """Measure push and pull, and the raw MPI exchange.

    The same bytes are exchanged between the same ranks in the same run.

    Start it under mpirun: mpirun -n 2 psdist bench pushpull
    """
    num_bytes = _sizes(sizes)
    from psdist.ranks.loading import uncollected

    with uncollected():
        from psdist.commands.bench.pushpull import pushpull as measure

    return lambda: measure(num_bytes, repeats, servers, json_path, plot_path)


@bench_app.command()
def step(
    size: Annotated[str, typer.Option(help="Bytes of the model's parameters.")] = "64MiB",
    layers: Annotated[int, typer.Option(min=1, help="Layers, of equal size.")] = 16,
    compute: Annotated[
        str,
        typer.Option(
            help="Sleep of the layers in a step: seconds (0.5), or times the raw exchange (2x)."
        ),
    ] = "0",
    repeats: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn, in a row: their mean.")] = 1,
    servers: NumServers = None,
    ddp_bucket: Annotated[int, typer.Option(min=1, help="MiB of DDP's buckets.")] = 25,
    links: Annotated[
        bool, typer.Option("--links", help="Show how long each host's links are idle.")
    ] = False,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> Action:
    """Measure a training step, and DDP, MPI_Allreduce and the raw exchange.

    All take turns in one run on the same ranks; the layers sleep instead of an accelerator.

    Start it under mpirun or srun: mpirun -n 4 psdist bench step --size 4MiB
    """
    num_bytes = _size(size)
    seconds = _compute(compute)
    from psdist.ranks.loading import uncollected

    with uncollected():
        from psdist.commands.bench.step import step as measure
        from psdist.commands.bench.step_report import StepOptions

    options = StepOptions(
        num_bytes=num_bytes,
        layers=layers,
        compute=seconds,
        repeats=repeats,
        steps=steps,
        servers=servers,
        ddp_bucket_mib=ddp_bucket,
        links=links,
        json_path=json_path,
        plot_path=plot_path,
    )
    return lambda: measure(options)


@bench_app.command("group")
def bench_group(
    sizes: Annotated[
        str, typer.Option(help="Bytes of the model, separated by commas.")
    ] = "1MiB,4MiB,16MiB,64MiB",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each size.")] = 15,
    json_path: JsonPath = None,
    plot_path: PlotPath = None,
) -> Action:
    """Measure a group's reduce-scatter, all-gather and whole step, and torch's.

    In shared memory and over gloo; compared with MPI_Allreduce, gloo's all-reduce and a step of
    DistributedDataParallel, between the same ranks in the same run.

    Start it under mpirun: mpirun -n 3 psdist bench group
    """
    num_bytes = _sizes(sizes)
    from psdist.ranks.loading import uncollected

    with uncollected():
        from psdist.commands.bench.group import group as measure

    return lambda: measure(num_bytes, repeats, json_path, plot_path)


@bench_app.command("server")
def bench_server(
    size: Annotated[
        str, typer.Option(help="Bytes of the shard, in whole rows of 4 KiB.")
    ] = "64MiB",
    groups: Annotated[int, typer.Option(min=1, help="Groups that push in a round.")] = 4,
    codec: Annotated[
        list[str] | None,
        typer.Option(help="Codec, as the setting (may be repeated).", show_default="none, int8"),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(help="SGD, momentum or Adam (may be repeated).", show_default="all"),
    ] = None,
    every: Annotated[float, typer.Option(min=1e-3, help="Seconds between a group's steps.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each kind.")] = 7,
    json_path: JsonPath = None,
) -> Action:
    """Measure how many groups a server on this host can take, by model size.

    Sums, steps and replies on one core, and a copy by that core, which limits them. No MPI.

    Start it alone: psdist bench server --codec int4/sign --optimizer Adam
    """
    num_bytes = _size(size) // _ROW_BYTES * _ROW_BYTES
    if not num_bytes:
        raise typer.BadParameter(f"{size} is below 4 KiB", param_hint="--size")
    from psdist.config.codec_specs import parse_both
    from psdist.ranks.loading import uncollected

    with uncollected():
        from psdist.commands.bench.server import OPTIMIZERS, ServerOptions
        from psdist.commands.bench.server import server as measure

    chosen, codecs = optimizer or list(OPTIMIZERS), codec or ["none", "int8"]
    if wrong := [each for each in chosen if each not in OPTIMIZERS]:
        raise typer.BadParameter(
            f"{wrong[0]!r} is none of {', '.join(OPTIMIZERS)}", param_hint="--optimizer"
        )
    try:
        for each in codecs:
            parse_both(each)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--codec") from error
    options = ServerOptions(
        num_bytes=num_bytes,
        groups=groups,
        every_s=every,
        repeats=repeats,
        codecs=codecs,
        optimizers=chosen,
        json_path=json_path,
    )
    return lambda: measure(options)


@bench_app.command()
def convergence(
    task: Annotated[str, typer.Option(help="Task: digits or chars.")] = "chars",
    width: Annotated[
        int | None,
        typer.Option(
            min=4, help="Width of the model of chars; 48: 75,984 parameters.", show_default="48"
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=2, help="Steps of every worker, with every scheme.")
    ] = 300,
    every: Annotated[
        int, typer.Option(min=1, help="Steps between points of the curves of the loss.")
    ] = 20,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a worker and step.")] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of values, samples and codecs.")] = 0,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            metavar='"KEY=VALUE ..."',
            help="Settings to compare with sync without a codec (may be repeated).",
        ),
    ] = None,
    ddp: Annotated[
        str,
        typer.Option(help="DDP's ways: plain, fp16, powersgd:K, with commas between; or none."),
    ] = "plain,fp16,powersgd:1",
    link: Annotated[
        str,
        typer.Option(help="Speeds at which times are computed, too; or none.", metavar="SPEEDS"),
    ] = "10Mbit,100Mbit,1Gbit",
    servers: NumServers = None,
    json_path: JsonPath = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curves, as SVG.")
    ] = None,
) -> Action:
    """Compare schemes with sync: bytes, seconds, loss, staleness, and the error of codecs.

    A small real task is trained with each scheme on the same ranks, and with DDP and its hooks.

    Start it under mpirun or srun: mpirun -n 5 psdist bench convergence --scheme codec=int4/sign
    """
    from psdist.commands.bench.schemes import (
        baseline,
        require_different,
        require_task,
        rivals_of,
        scheme_of,
    )

    given = ["codec=int8", "codec=int4/sign"] if scheme is None else scheme
    try:
        require_task(task, width)
        schemes, rivals = [baseline(), *map(scheme_of, given)], rivals_of(ddp)
        require_different([*(each.name for each in schemes), *(each.name for each in rivals)])
    except UsageError as error:  # all ranks have the same words: one of them speaks
        raise typer.BadParameter(str(error)) from error
    links = _rates(link)
    from psdist.ranks.loading import uncollected

    with uncollected():
        from psdist.commands.bench.convergence import convergence as measure
        from psdist.commands.bench.convergence_report import ConvergenceOptions

    options = ConvergenceOptions(
        task=task,
        width=width,
        steps=steps,
        every=every,
        batch_size=batch_size,
        seed=seed,
        schemes=schemes,
        rivals=rivals,
        links=links,
        servers=servers,
        json_path=json_path,
        plot_path=plot_path,
    )
    return lambda: measure(options)


def _compute(text: str) -> tuple[float, bool]:
    """``"0.5"`` -> seconds; ``"2x"`` -> times the communication."""
    number, times, rest = text.strip().partition("x")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value <= 1e6:
        raise typer.BadParameter(
            f"{text} is neither seconds (0.5) nor times the raw exchange (2x)",
            param_hint="--compute",
        )
    return value, bool(times)


def _rates(text: str) -> dict[str, float]:
    """Bytes per second, by what they are called."""
    from psdist.sizes import parse_rate

    names = [] if text.strip() == "none" else [part.strip() for part in text.split(",")]
    rates = {name: parse_rate(name) for name in names}
    wrong = [name for name, rate in rates.items() if not rate]
    if wrong:
        raise typer.BadParameter(
            f"{wrong[0]!r} is no speed; write one such as 10Mbit or 1Gbit", param_hint="--link"
        )
    return {name: rate for name, rate in rates.items() if rate}


def _size(text: str) -> int:
    sizes = _sizes(text, "--size")
    if len(sizes) != 1:
        raise typer.BadParameter(f"{text} is not one size", param_hint="--size")
    return sizes[0]


def _sizes(text: str, option: str = "--sizes") -> list[int]:
    from psdist.config.settings import parse_size

    sizes = [parse_size(part.strip()) for part in text.split(",")]
    wrong = [size for size in sizes if not isinstance(size, int) or size < 1]
    if wrong:
        raise typer.BadParameter(
            f"{wrong[0]!r} is no size; write bytes or a size such as 64KiB or 4MiB",
            param_hint=option,
        )
    return [size for size in sizes if isinstance(size, int)]
