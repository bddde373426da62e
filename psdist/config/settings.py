"""The settings of a run: RunConfig, with the type, bounds and documentation of each setting.

Owns what may be set and how a configuration is written down: as TOML for people, as bytes for
other ranks. Where values come from is psdist.config.sources. It never touches torch, MPI or files.

    config = RunConfig(mode="ssp", staleness=4)
    assert decode(encode(config)) == config

Longer than other modules: it is a list, one entry for each setting.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from psdist.config.codec_rounds import AUTO
from psdist.config.codec_specs import ALLOWED as CODECS_ALLOWED
from psdist.config.codec_specs import parse_both, parse_codec, parse_pull
from psdist.config.compatibility import refusal
from psdist.config.modes import ALLOWED as SCHEDULE_ALLOWED
from psdist.config.modes import parse_schedule
from psdist.config.outer import ACCUMULATE, parse_outer
from psdist.config.outer import ALLOWED as OUTER_ALLOWED
from psdist.errors import ProtocolError
from psdist.sizes import parse_bytes, parse_interval

MAX_ENCODED_BYTES: Final = 1 << 20
MIN_CHUNK_BYTES: Final = 4096
MAX_CHUNK_BYTES: Final = 256 << 20

MOST_STALENESS_TO: Final = 20
"""The window of rounds by which psdist.controller.bound chooses says nothing of higher bounds; a
test compares them."""

# Clocks and counts travel as 32-bit fields; nothing larger means anything here.
_COUNT_MAX: Final = 2**31 - 1
MAX_CREDITS: Final = 4096
"""As psdist.protocol.header says; neither imports the other, and a test compares them."""
MAX_SPARES: Final = 1 << 16
"""As many as a plan has ranks."""
_SEED_MAX: Final = 2**63 - 1
_SECONDS_MAX: Final = 1e9
_DEVICE: Final = r"^(cpu|auto|cuda(:(0|[1-9][0-9]{0,3}))?)$"
_COUNT: Final = f"a whole number from 1 to {_COUNT_MAX}"
_SECONDS: Final = f"a number of seconds > 0 and <= {_SECONDS_MAX:.0f}"


def parse_size(value: object) -> object:
    """``"4MiB"`` -> 4194304; what is not a size is returned as it came, for the type check."""
    found = parse_bytes(value) if isinstance(value, str) else None
    return found if isinstance(found, int) else value


def _number_as_text(value: object) -> object:
    """TOML may have a count as a number."""
    return str(value) if type(value) is int else value


def _require_interval(value: str) -> str:
    if parse_interval(value) is None:
        raise ValueError("not an interval")
    return value


def _require_outer(value: str) -> str:
    if value != ACCUMULATE:
        parse_outer(value)
    return value


def _require_schedule(value: str) -> str:
    parse_schedule(value)
    return value


def _require_codec(value: str) -> str:
    parse_codec(value)
    return value


def _require_pull_codec(value: str) -> str:
    parse_pull(value)
    return value


def _require_codecs(value: str) -> str:
    if value != AUTO:
        parse_both(value)
    return value


def _list_as_tuple(value: object) -> object:
    # TOML arrays arrive as lists; everything else must already be a tuple.
    return tuple(value) if isinstance(value, list) else value


def _setting(default: object, *, allowed: str, description: str) -> Any:
    return Field(default, description=description, json_schema_extra={"allowed": allowed})


_Count: TypeAlias = Annotated[int, Field(ge=1, le=_COUNT_MAX)]
_Seconds: TypeAlias = Annotated[float, Field(gt=0, le=_SECONDS_MAX, allow_inf_nan=False)]
_Interval: TypeAlias = Annotated[
    str, BeforeValidator(_number_as_text), AfterValidator(_require_interval)
]
_Codec: TypeAlias = Annotated[str, Field(max_length=200), AfterValidator(_require_codec)]
_PullCodec: TypeAlias = Annotated[str, Field(max_length=200), AfterValidator(_require_pull_codec)]
_CodecOrTwo: TypeAlias = Annotated[str, Field(max_length=400), AfterValidator(_require_codecs)]
_Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=500)]
_Path: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
_DOTTED: Final = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
# What psdist.protocol.optimizers.traits reads.
_OptimizerEntry: TypeAlias = Annotated[
    str,
    Field(pattern=rf"^{_DOTTED}:{_DOTTED}(=(elementwise|whole)(\+lr_scales)?)?$", max_length=500),
]


class RunConfig(BaseModel):
    """The settings of one run: frozen, strictly typed, the same on every rank."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mode: Literal["sync", "ssp", "async", "auto"] = _setting(
        "sync",
        allowed="sync, ssp, async or auto",
        description="Consistency across groups: sync, ssp (bounded staleness) or async; auto: "
        "sync, and ssp while that is faster.",
    )
    staleness: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        3,
        allowed=f"a whole number from 0 to {_COUNT_MAX}",
        description="Modes ssp, auto: how many iterations a group may be ahead of the slowest one.",
    )
    staleness_to: Annotated[int, Field(ge=1, le=MOST_STALENESS_TO)] | None = _setting(
        None,
        allowed=f"a whole number from 1 to {MOST_STALENESS_TO}",
        description="Mode ssp: the bound moves between staleness and this, as speeds ask for; "
        "unset: it stays.",
    )
    schedule: Annotated[str, Field(max_length=10_000), AfterValidator(_require_schedule)] | None = (
        _setting(
            None,
            allowed=SCHEDULE_ALLOWED,
            description="Modes by round, instead of mode and staleness: 0: ssp:8; 5000: sync; and "
            "codecs: 0: sync none; 500: sync topk:0.01.",
        )
    )
    set_mode: Literal["refused", "allowed"] = _setting(
        "refused",
        allowed="refused or allowed",
        description="Whether the script may change the mode during the run with job.set_mode.",
    )
    pipeline: Annotated[int, Field(ge=0, le=1)] = _setting(
        0,
        allowed="0 or 1",
        description="Modes ssp, async: 1: the next step awaits the replies, not the one that asks.",
    )
    stale_lr: Literal["off", "inverse"] = _setting(
        "off",
        allowed="off or inverse",
        description="Modes ssp, async: inverse: the lr of an update is divided by how stale it is.",
    )
    delay_compensation: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = _setting(
        0.0,
        allowed="a number >= 0 and <= 1000000",
        description="Modes ssp, async: lambda of the correction that moves a stale gradient to "
        "the current parameters.",
    )
    freeze_step: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        0,
        allowed=f"a whole number from 0 to {_COUNT_MAX}",
        description="Adam, AdamW: the second moment stays constant after N steps; 0: never.",
    )
    backup: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        0,
        allowed=f"a whole number from 0 to {_COUNT_MAX}",
        description="Mode sync: close each round without the N slowest groups; 0: wait for all.",
    )
    backup_every: Annotated[int, Field(ge=2, le=_COUNT_MAX)] = _setting(
        20,
        allowed=f"a whole number from 2 to {_COUNT_MAX}",
        description="With backup: wait for a group that has missed N-1 rounds in a row.",
    )
    local_steps: _Count | Literal["epoch"] = _setting(
        1,
        allowed=f"{_COUNT}, or epoch",
        description="Steps of the script's optimizer on each group between two exchanges; epoch: "
        "one pass over the loader.",
    )
    steps_by: Literal["count", "speed", "loss"] = _setting(
        "count",
        allowed="count, speed or loss",
        description="With local_steps: count: all groups make the same number; speed: faster "
        "groups make more, with the same mean; loss: fewer as the loss falls.",
    )
    outer: Annotated[str, AfterValidator(_require_outer)] = _setting(
        "average",
        allowed=OUTER_ALLOWED,
        description="With local_steps: how servers combine the parameters of the groups; "
        "accumulate: gradients are summed instead, and servers run the script's optimizer.",
    )
    servers: _Count | Literal["auto"] = _setting(
        "auto",
        allowed=f"{_COUNT}, or auto",
        description="How many ranks serve; auto: the mapper chooses, one per node at most.",
    )
    placement: _Path = _setting(
        "auto",
        allowed="auto, block, cyclic, or the path of a plan.json",
        description="Which ranks serve: by the mapper, the first, round the hosts, or by a plan.",
    )
    strict_placement: bool = _setting(
        False,
        allowed="true or false",
        description="A rank on another host than in the plan is an error, not a warning.",
    )
    racks: _Path | None = _setting(
        None,
        allowed="the path of a file",
        description="Switches: topology.conf, .yaml, scontrol show topology, ibnetdiscover, TOML.",
    )
    network: _Path | None = _setting(
        None,
        allowed="the path of a file",
        description="Measured links: the network.json that `psdist probe` writes.",
    )
    bind: Literal["auto", "off"] = _setting(
        "auto",
        allowed="auto or off",
        description="Ranks bind themselves to their cores, unless the launcher has; off: never.",
    )
    nics: Literal["auto", "off"] = _setting(
        "auto",
        allowed="auto or off",
        description="Of several network cards, ranks use those near them; off: MPI chooses.",
    )
    group: Literal["node", "socket", "numa", "rank", "rack", "auto"] | _Count = _setting(
        "node",
        allowed="node, socket, numa, rank, rack, a number of hosts, or auto",
        description="Workers that reduce gradients together; auto: node or rack by prediction.",
    )
    group_tier: Literal["auto", "shared_memory", "torch", "mpi", "nccl"] = _setting(
        "auto",
        allowed="auto, shared_memory, torch, mpi or nccl",
        description="Reduce in shared memory, by torch or MPI: same bits; nccl: in NCCL's order.",
    )
    server_device: Annotated[str, Field(pattern=_DEVICE)] = _setting(
        "cpu",
        allowed="cpu, cuda, cuda:N or auto",
        description="Where servers hold and step their shards; auto: a GPU no worker uses, if any.",
    )
    run_dir: _Path | None = _setting(
        None,
        allowed="the path of a directory",
        description="Where the run writes; unset, rank 0 chooses runs/YYYYMMDD-HHMMSS-<job>.",
    )
    resume: bool = _setting(
        False,
        allowed="true or false",
        description="Continue from the newest checkpoint in run_dir; start from the beginning if "
        "there is none.",
    )
    checkpoint_every: _Interval | None = _setting(
        None,
        allowed="a number of iterations (100) or a time (30s, 10m, 2h)",
        description="How often psdist itself makes a checkpoint; unset, only the script does.",
    )
    on_usr1: Literal["checkpoint", "requeue"] = _setting(
        "checkpoint",
        allowed="checkpoint or requeue",
        description="SIGUSR1: make a checkpoint; requeue: and end the job with status 75.",
    )
    grace_s: Annotated[float, Field(ge=0, le=_SECONDS_MAX, allow_inf_nan=False)] = _setting(
        30.0,
        allowed=f"a number of seconds >= 0 and <= {_SECONDS_MAX:.0f}",
        description="SIGTERM to psdist run -n: how long it waits for a last checkpoint; 0: none.",
    )
    checkpoint_keep: _Count = _setting(
        2,
        allowed=_COUNT,
        description="How many checkpoints stay: the newest ones.",
    )
    global_batch: _Count | None = _setting(
        None,
        allowed=_COUNT,
        description="Samples that all workers take as a batch, however many they are; unset: "
        "batch sizes are per worker.",
    )
    replication: Literal["none", "buddy"] = _setting(
        "none",
        allowed="none or buddy",
        description="buddy: another server has a replica of each shard, which survives its "
        "server's failure.",
    )
    spares: Annotated[int, Field(ge=0, le=MAX_SPARES)] = _setting(
        0,
        allowed=f"a whole number from 0 to {MAX_SPARES}",
        description="Ranks that wait to take a failed rank's place: a server's with replication = "
        "buddy, a worker's with max_deaths.",
    )
    seed: Annotated[int, Field(ge=0, le=_SEED_MAX)] = _setting(
        0,
        allowed=f"a whole number from 0 to {_SEED_MAX}",
        description="Seed of the order in which data is shuffled.",
    )
    record: bool = _setting(
        False,
        allowed="true or false",
        description="Write the history; `psdist check` proves from it that the mode's rules held.",
    )
    trace: bool = _setting(
        False,
        allowed="true or false",
        description="Record what each rank does and when; `psdist trace` converts it to a "
        "Perfetto file.",
    )
    checksum: Literal["off", "sampled", "all"] = _setting(
        "off",
        allowed="off, sampled or all",
        description="Which gradients and parameters carry a checksum that the receiver compares.",
    )
    checksum_every: _Count = _setting(
        16,
        allowed=_COUNT,
        description="checksum = sampled: one of N carries a checksum; with record: one of N "
        "replies is recorded.",
    )
    chunk_bytes: Annotated[
        Annotated[int, Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)] | Literal["auto"],
        BeforeValidator(parse_size),
    ] = _setting(
        "auto",
        allowed="a size from 4KiB to 256MiB (bytes, or with KiB, MiB, KB, MB), or auto",
        description="Size of a chunk, the unit of transfer and of consistency.",
    )
    credits: Annotated[int, Field(ge=1, le=MAX_CREDITS)] | Literal["auto"] = _setting(
        "auto",
        allowed=f"a whole number from 1 to {MAX_CREDITS}, or auto",
        description="Pushes that a worker may have outstanding at one server; auto: by groups.",
    )
    receive_buffers: Annotated[int, Field(ge=3, le=_COUNT_MAX)] | Literal["auto"] = _setting(
        "auto",
        allowed=f"a whole number from 3 to {_COUNT_MAX}, or auto",
        description="Buffers, of one chunk, for pushes to a server; auto: by groups and shard.",
    )
    max_deaths: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        0,
        allowed=f"a whole number from 0 to {_COUNT_MAX}",
        description="Number of workers that may fail while the others continue (Open MPI with "
        "ULFM).",
    )
    on_group_death: Literal["leave", "reform"] = _setting(
        "leave",
        allowed="leave or reform",
        description="With max_deaths: what the other workers of a failed worker's group do; "
        "leave: they end with status 0; reform: they continue as a smaller group.",
    )
    codec: _CodecOrTwo | None = _setting(
        None,
        allowed=f"auto, a codec for both directions, or PUSH/PULL; a codec is {CODECS_ALLOWED}",
        description="How gradients and parameters are encoded on the network; unset: not encoded; "
        "auto: psdist chooses, and may change it during the run.",
    )
    push_codec: _Codec | None = _setting(
        None,
        allowed=CODECS_ALLOWED,
        description="How gradients are encoded; unset: as codec says.",
    )
    pull_codec: _PullCodec | None = _setting(
        None,
        allowed=CODECS_ALLOWED,
        description="How parameters are encoded; unset: as codec says. ssp, async: casts only, or "
        "pull_copies = on.",
    )
    error_budget: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = _setting(
        None,
        allowed="a number > 0 and < 1",
        description="codec = auto: the part of a push that its codec may leave out.",
    )
    loss_patience: _Count | None = _setting(
        None,
        allowed=_COUNT,
        description="codec = auto: use a less lossy codec after N windows of 20 rounds in which "
        "the loss of job.report did not fall.",
    )
    rollback: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = _setting(
        None,
        allowed="a number > 1",
        description="codec = auto, steps_by = loss: if the loss of job.report is N times the "
        "lowest one, end with status 75; the resumed job is less lossy. mode = sync only.",
    )
    pull_copies: Literal["off", "on"] = _setting(
        "off",
        allowed="off or on",
        description="ssp, async: servers keep a copy of what each group holds, so that pulls may "
        "have any codec.",
    )
    feedback: Literal["on", "off"] = _setting(
        "on",
        allowed="on or off",
        description="What a codec leaves out of a push is added to the next one; off: it is lost.",
    )
    encode_on: Literal["auto", "host", "device"] = _setting(
        "host",
        allowed="auto, host or device",
        description="Where pushes of gradients on a GPU are encoded; auto: on the GPU if the push "
        "codec supports it (see docs/gpu.md).",
    )
    codec_exact: Annotated[
        tuple[_Pattern, ...], Field(max_length=100), BeforeValidator(_list_as_tuple)
    ] = _setting(
        ("vectors", "*embed*", "*.wte.*", "*.wpe.*"),
        allowed="names of parameters, with * and ? (a list in TOML, else separated by commas); "
        "vectors means all with fewer than two dimensions",
        description="Parameters that only fp16 and bf16 may encode: norms, biases, embeddings.",
    )
    warn_s: _Seconds = _setting(
        30.0,
        allowed=_SECONDS,
        description="A wait longer than this is reported, with the ranks that are missing.",
    )
    wait_timeout_s: _Seconds = _setting(
        1800.0,
        allowed=_SECONDS,
        description="A wait longer than this is an error.",
    )
    host_timeout_s: Annotated[float, Field(ge=0, le=_SECONDS_MAX, allow_inf_nan=False)] = _setting(
        60.0,
        allowed=f"a number of seconds >= 0 and <= {_SECONDS_MAX:.0f}",
        description="A host that does not answer for this long is cut off, and the job ends; 0: "
        "hosts are not monitored.",
    )
    on_nonfinite: Literal["error", "skip"] = _setting(
        "error",
        allowed="error or skip",
        description="A gradient with NaN or infinity: end with an error, or skip the iteration.",
    )
    overlap: Literal["auto", "off", "strict", "full"] = _setting(
        "auto",
        allowed="auto, off, strict or full",
        description="auto: send gradients during backward; off: in step(); strict: as auto; full: "
        "also return from step() before the replies.",
    )
    threads: _Count | Literal["auto"] = _setting(
        "auto",
        allowed=f"{_COUNT}, or auto",
        description="Threads that torch may use in each rank; auto shares the cores of the host.",
    )
    spin: Literal["auto", "on", "off"] = _setting(
        "auto",
        allowed="auto, on or off",
        description="Waiting ranks spin (on), back off (off), or spin where a core is to spare.",
    )
    progress: Literal["auto", "live", "lines", "off"] = _setting(
        "auto",
        allowed="auto, live, lines or off",
        description="Display of progress: live (on a terminal), a line now and then, or none.",
    )
    optimizers: Annotated[
        tuple[_OptimizerEntry, ...], Field(max_length=100), BeforeValidator(_list_as_tuple)
    ] = _setting(
        (),
        allowed='names like "package.module:Class" or "package.module:Class=elementwise+lr_scales" '
        "(a list in TOML, else separated by commas)",
        description="Optimizer classes that servers may construct besides those of torch.optim.",
    )


KEYS: Final = tuple(RunConfig.model_fields)


def allowed_values(key: str) -> str:
    """What `key` may be, in words: ``"sync, ssp or async"``."""
    extra = RunConfig.model_fields[key].json_schema_extra
    return str(extra["allowed"]) if isinstance(extra, dict) else ""


def contradiction(config: RunConfig) -> str:
    """Return why these settings exclude each other, with the remedy; "" if they do not."""
    if config.staleness_to is not None and config.staleness_to <= config.staleness:
        return (
            f"staleness_to = {config.staleness_to}: expected more than staleness, which is "
            f"{config.staleness}; set a higher one, or leave it out"
        )
    if config.codec == AUTO and config.push_codec is not None and config.pull_codec is not None:
        return (
            f"codec = auto: no codec is left to choose beside push_codec = {config.push_codec}, "
            f"pull_codec = {config.pull_codec}; leave one of the three out"
        )
    return refusal(config)


def to_toml(config: RunConfig) -> str:
    """The configuration as a TOML file that `resolve` reads back to the same configuration."""
    lines: list[str] = []
    for key, value in config.model_dump().items():
        lines.append(f"# {RunConfig.model_fields[key].description}")
        # TOML has no null: an unset value is shown as a comment.
        lines.append(f"# {key} =" if value is None else f"{key} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


def encode(config: RunConfig) -> bytes:
    """JSON bytes by which rank 0 hands its configuration to the others."""
    return config.model_dump_json().encode()


def decode(data: bytes) -> RunConfig:
    """The inverse of `encode`. Raises ProtocolError for anything else."""
    if len(data) > MAX_ENCODED_BYTES:
        raise ProtocolError(
            f"a configuration of {len(data)} bytes was received; the limit is {MAX_ENCODED_BYTES}"
        )
    try:
        return RunConfig.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(
            "the configuration received from rank 0 is damaged or of another psdist version "
            f"({error.error_count()} fields refused)"
        ) from error


def _toml_value(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
