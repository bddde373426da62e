"""The settings of a run: RunConfig, with the name, type, bounds and documentation of each setting.

Owns which settings exist and how a configuration is written: as TOML for people, as bytes for other
ranks. psdist.config.sources finds the values. This module never touches torch, MPI or files.

    config = RunConfig(mode="ssp", staleness=4)
    assert decode(encode(config)) == config
    NAMES["codec_exact"]                                # "codec.exact": table and name

Longer than other modules: it is a list, one entry for each setting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from psdist.config.codec_rounds import AUTO
from psdist.config.codec_specs import ALLOWED as CODECS_ALLOWED
from psdist.config.codec_specs import parse_codec, parse_pull
from psdist.config.compatibility import refusal
from psdist.config.modes import ALLOWED as SCHEDULE_ALLOWED
from psdist.config.modes import parse_schedule
from psdist.config.old_names import MERGED, SCRIPT, SHORT, STALE_ALLOWED, STRICT, parse_stale
from psdist.config.outer import ACCUMULATE, parse_outer
from psdist.config.outer import ALLOWED as OUTER_ALLOWED
from psdist.errors import ProtocolError
from psdist.mode_names import ModeSetting
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


def _require(parse: Callable[[str], object], *words: str) -> AfterValidator:
    """Return a validator that accepts ``words`` and texts for which ``parse`` raises no
    ValueError."""

    def require(value: str) -> str:
        if value not in words:
            parse(value)
        return value

    return AfterValidator(require)


def _parse_interval(text: str) -> None:
    if parse_interval(text) is None:
        raise ValueError("not an interval")


def _list_as_tuple(value: object) -> object:
    # TOML arrays arrive as lists; everything else must already be a tuple.
    return tuple(value) if isinstance(value, list) else value


def _setting(
    name: str, default: object, description: str, *, allowed: str = "", needs: str = ""
) -> Any:
    """Declare a setting. ``name`` is ``TABLE.KEY``, or ``KEY`` without a table. ``allowed`` names
    the values unless the type does; ``needs`` the settings without which it has no effect."""
    extra: dict[str, Any] = {"name": name, "allowed": allowed, "needs": needs}
    return Field(default, description=description, json_schema_extra=extra)


_Count: TypeAlias = Annotated[int, Field(ge=1, le=_COUNT_MAX)]
_Seconds: TypeAlias = Annotated[float, Field(gt=0, le=_SECONDS_MAX, allow_inf_nan=False)]
_Interval: TypeAlias = Annotated[str, BeforeValidator(_number_as_text), _require(_parse_interval)]
_Push: TypeAlias = Annotated[str, Field(max_length=200), _require(parse_codec, AUTO)]
_Pull: TypeAlias = Annotated[str, Field(max_length=200), _require(parse_pull, AUTO)]
_Pattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=500)]
_Path: TypeAlias = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")]
_DOTTED: Final = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
# psdist.protocol.optimizers.traits reads this form.
_OptimizerEntry: TypeAlias = Annotated[
    str,
    Field(pattern=rf"^{_DOTTED}:{_DOTTED}(=(elementwise|whole)(\+lr_scales)?)?$", max_length=500),
]


class RunConfig(BaseModel):
    """The settings of one run: frozen, strictly typed, the same on every rank.

    Fields are called as the settings without their tables; a field that replaces several older
    settings is called ``TABLE_KEY``, and properties give the older ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mode: ModeSetting = _setting(
        "mode",
        "sync",
        "Consistency across groups: sync, ssp (bounded staleness) or async; auto: sync, and ssp "
        "while that is faster.",
    )
    staleness: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        "staleness",
        3,
        "Maximum iterations a group may be ahead of the slowest one.",
        needs="mode = ssp or auto",
    )
    servers: _Count | Literal["auto"] = _setting(
        "servers", "auto", "Number of servers; auto: the mapper chooses, at most one per node."
    )
    group: Literal["node", "socket", "numa", "rank", "rack", "auto"] | _Count = _setting(
        "group",
        "node",
        "Workers that reduce gradients together; auto: node or rack by prediction.",
        allowed="node, socket, numa, rank, rack, a number of hosts, or auto",
    )
    run_dir: _Path | None = _setting(
        "run_dir",
        None,
        "Where the run writes; unset, rank 0 chooses runs/YYYYMMDD-HHMMSS-<job>.",
        allowed="the path of a directory",
    )
    resume: bool = _setting(
        "resume",
        False,
        "Continue from the newest checkpoint in run_dir; start from the beginning if there is "
        "none.",
        needs="run_dir",
    )
    seed: Annotated[int, Field(ge=0, le=_SEED_MAX)] = _setting(
        "seed", 0, "Seed of the order in which data is shuffled."
    )
    consistency_schedule: (
        Annotated[str, Field(max_length=10_000), _require(parse_schedule, SCRIPT)] | None
    ) = _setting(
        "consistency.schedule",
        None,
        "Modes by round, instead of mode and staleness: 0: ssp:8; 5000: sync; and codecs: 0: sync "
        "none; 500: sync topk:0.01. script: the script changes the mode with job.set_mode.",
        allowed=f"script, or {SCHEDULE_ALLOWED}",
    )
    staleness_to: Annotated[int, Field(ge=1, le=MOST_STALENESS_TO)] | None = _setting(
        "consistency.staleness_to",
        None,
        "Upper end of the range in which the bound follows the groups' speeds; unset: it stays.",
        needs="mode = ssp",
    )
    pipeline: Annotated[int, Field(ge=0, le=1)] = _setting(
        "consistency.pipeline",
        0,
        "1: the next step awaits the replies, not the step that pushed.",
        allowed="0 or 1",
        needs="mode = ssp or async",
    )
    backup: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        "consistency.backup",
        0,
        "Close each round without the N slowest groups; 0: wait for all.",
        needs="mode = sync",
    )
    backup_every: Annotated[int, Field(ge=2, le=_COUNT_MAX)] = _setting(
        "consistency.backup_every",
        20,
        "Wait for a group that has missed N-1 rounds in a row.",
        needs="consistency.backup",
    )
    stale_updates: Annotated[str, _require(parse_stale)] = _setting(
        "consistency.stale_updates",
        "off",
        "inverse: divide the lr of an update by its staleness; compensate:LAMBDA: move a stale "
        "gradient to the current parameters.",
        allowed=STALE_ALLOWED,
        needs="mode = ssp or async",
    )
    on_nonfinite: Literal["error", "skip"] = _setting(
        "training.on_nonfinite",
        "error",
        "A gradient with NaN or infinity: end with an error, or skip the iteration.",
    )
    global_batch: _Count | None = _setting(
        "training.global_batch",
        None,
        "Samples in a batch of all workers together, for any number of workers; unset: batch sizes "
        "are per worker.",
    )
    freeze_step: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        "training.freeze_step",
        0,
        "Keep the second moment constant after N steps; 0: never.",
        needs="Adam or AdamW",
    )
    optimizers: Annotated[
        tuple[_OptimizerEntry, ...], Field(max_length=100), BeforeValidator(_list_as_tuple)
    ] = _setting(
        "training.optimizers",
        (),
        "Optimizer classes that servers may construct besides those of torch.optim.",
        allowed='names like "package.module:Class" or "package.module:Class=elementwise+lr_scales" '
        "(a list in TOML, else separated by commas)",
    )
    loss_patience: _Count | None = _setting(
        "training.loss_patience",
        None,
        "Use a less lossy codec after N windows of 20 rounds in which the loss of job.report did "
        "not fall.",
        needs="codec.push = auto or local.steps_by = loss",
    )
    rollback: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = _setting(
        "training.rollback",
        None,
        "If the loss of job.report is N times the lowest one, end with status 75; the resumed job "
        "is less lossy.",
        allowed="a number > 1",
        needs="mode = sync; codec.push = auto or local.steps_by = loss",
    )
    local_steps: _Count | Literal["epoch"] = _setting(
        "local.steps",
        1,
        "Steps of the script's optimizer on each group between two exchanges; epoch: one pass "
        "over the loader.",
    )
    steps_by: Literal["count", "speed", "loss"] = _setting(
        "local.steps_by",
        "count",
        "count: all groups make the same number of steps; speed: faster groups make more, with "
        "the same mean; loss: fewer as the loss falls.",
        needs="local.steps above 1",
    )
    outer: Annotated[str, _require(parse_outer, ACCUMULATE)] = _setting(
        "local.outer",
        "average",
        "How servers combine the groups' parameters; accumulate: gradients are summed "
        "instead, and servers run the script's optimizer.",
        allowed=OUTER_ALLOWED,
        needs="local.steps above 1",
    )
    codec_push: _Push | None = _setting(
        "codec.push",
        None,
        "Encoding of gradients on the network; unset: none; auto: psdist chooses, and "
        "may change it during the run.",
        allowed=f"auto, {CODECS_ALLOWED}",
    )
    codec_pull: _Pull | None = _setting(
        "codec.pull",
        None,
        "Encoding of parameters, as codec.push. In ssp and async only casts (fp16, bf16), "
        "unless codec.pull_copies = on.",
        allowed=f"auto, {CODECS_ALLOWED}",
    )
    codec_exact: Annotated[
        tuple[_Pattern, ...], Field(max_length=100), BeforeValidator(_list_as_tuple)
    ] = _setting(
        "codec.exact",
        ("vectors", "*embed*", "*.wte.*", "*.wpe.*"),
        "Parameters that only fp16 and bf16 may encode: norms, biases, embeddings.",
        allowed="names of parameters, with * and ? (a list in TOML, else separated by commas); "
        "vectors means all with fewer than two dimensions",
    )
    feedback: Literal["on", "off"] = _setting(
        "codec.feedback",
        "on",
        "Add to a push the values that the codec left out before; off: lose them.",
        needs="a push codec",
    )
    encode_on: Literal["auto", "host", "device"] = _setting(
        "codec.encode_on",
        "host",
        "Where gradients on a GPU are encoded; auto: on the GPU if the push codec "
        "supports it (see docs/guides/gpus.md).",
        needs="a push codec",
    )
    pull_copies: Literal["off", "on"] = _setting(
        "codec.pull_copies",
        "off",
        "Servers keep a copy of what each group holds, so that pulls may have any codec.",
        needs="mode = ssp or async",
    )
    error_budget: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = _setting(
        "codec.error_budget",
        None,
        "Part of a push that its codec may leave out, at most.",
        allowed="a number > 0 and < 1",
        needs="codec.push = auto",
    )
    hosts_placement: _Path = _setting(
        "hosts.placement",
        "auto",
        "Which ranks serve: chosen by the mapper (auto), the first ranks (block), one host after "
        "the other (cyclic), or by a plan; strict:PATH: a rank on another host than in the plan "
        "is an error, not a warning.",
        allowed="auto, block, cyclic, the path of a plan.json, or strict:PATH",
    )
    racks: _Path | None = _setting(
        "hosts.racks",
        None,
        "Switches: topology.conf, .yaml, scontrol show topology, ibnetdiscover, TOML.",
        allowed="the path of a file",
    )
    network: _Path | None = _setting(
        "hosts.network",
        None,
        "Measured links: the network.json that `psdist probe` writes.",
        allowed="the path of a file",
    )
    hosts_affinity: Literal["auto", "cores", "cards", "off"] = _setting(
        "hosts.affinity",
        "auto",
        "Ranks bind themselves to their cores, unless the launcher has (cores), and use the "
        "network cards near them (cards); auto: both; off: neither.",
    )
    group_tier: Literal["auto", "shared_memory", "torch", "mpi", "nccl"] = _setting(
        "hosts.group_tier",
        "auto",
        "Reduce in shared memory, by torch or MPI: same bits; nccl: in NCCL's order.",
    )
    server_device: Annotated[str, Field(pattern=_DEVICE)] = _setting(
        "hosts.server_device",
        "cpu",
        "Device on which servers store and step their shards; auto: a GPU no worker uses, if any.",
        allowed="cpu, cuda, cuda:N or auto",
    )
    threads: _Count | Literal["auto"] = _setting(
        "hosts.threads",
        "auto",
        "Threads that torch may use in each rank; auto shares the cores of the host.",
    )
    spin: Literal["auto", "on", "off"] = _setting(
        "hosts.spin",
        "auto",
        "Waiting ranks spin (on), back off (off), or spin if they have a core alone (auto).",
    )
    checkpoint_every: _Interval | None = _setting(
        "checkpoint.every",
        None,
        "Interval between psdist's own checkpoints; unset: only the script makes them.",
        allowed="a number of iterations (100) or a time (30s, 10m, 2h)",
    )
    checkpoint_keep: _Count = _setting(
        "checkpoint.keep", 2, "Number of newest checkpoints to keep."
    )
    on_usr1: Literal["checkpoint", "requeue"] = _setting(
        "checkpoint.on_usr1",
        "checkpoint",
        "SIGUSR1: make a checkpoint; requeue: and end the job with status 75.",
    )
    grace_s: Annotated[float, Field(ge=0, le=_SECONDS_MAX, allow_inf_nan=False)] = _setting(
        "checkpoint.grace_s",
        30.0,
        "Time that psdist run waits for a last checkpoint after SIGTERM; 0: none.",
        allowed=f"a number of seconds >= 0 and <= {_SECONDS_MAX:.0f}",
        needs="psdist run -n",
    )
    replication: Literal["none", "buddy"] = _setting(
        "failures.replication",
        "none",
        "buddy: another server has a replica of each shard, which survives its server's failure.",
        needs="two servers",
    )
    max_deaths: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        "failures.max_deaths",
        0,
        "Number of workers that may fail while the others continue.",
        needs="Open MPI with ULFM",
    )
    on_group_death: Literal["leave", "reform"] = _setting(
        "failures.on_group_death",
        "leave",
        "The other workers of a failed worker's group end with status 0 (leave), or continue as a "
        "smaller group (reform).",
        needs="failures.max_deaths",
    )
    spares: Annotated[int, Field(ge=0, le=MAX_SPARES)] = _setting(
        "failures.spares",
        0,
        "Ranks that wait to take a failed rank's place: a server's with failures.replication "
        "= buddy, a worker's with failures.max_deaths.",
        needs="failures.max_deaths or failures.replication",
    )
    host_timeout_s: Annotated[float, Field(ge=0, le=_SECONDS_MAX, allow_inf_nan=False)] = _setting(
        "failures.host_timeout_s",
        60.0,
        "A host that does not answer for this long is cut off, and the job ends; 0: hosts are not "
        "monitored.",
        allowed=f"a number of seconds >= 0 and <= {_SECONDS_MAX:.0f}",
    )
    warn_s: _Seconds = _setting(
        "failures.warn_s",
        30.0,
        "A wait longer than this is reported, with the ranks that are missing.",
        allowed=_SECONDS,
    )
    wait_timeout_s: _Seconds = _setting(
        "failures.wait_timeout_s", 1800.0, "A wait longer than this is an error.", allowed=_SECONDS
    )
    overlap: Literal["auto", "off", "strict", "full"] = _setting(
        "transfer.overlap",
        "auto",
        "auto: send gradients during backward; off: in step(); strict: as auto; full: also return "
        "from step() before the replies.",
    )
    chunk_bytes: Annotated[
        Annotated[int, Field(ge=MIN_CHUNK_BYTES, le=MAX_CHUNK_BYTES)] | Literal["auto"],
        BeforeValidator(parse_size),
    ] = _setting(
        "transfer.chunk_bytes",
        "auto",
        "Size of a chunk, the unit of transfer and of consistency.",
        allowed="a size from 4KiB to 256MiB (bytes, or with KiB, MiB, KB, MB), or auto",
    )
    credits: Annotated[int, Field(ge=1, le=MAX_CREDITS)] | Literal["auto"] = _setting(
        "transfer.credits",
        "auto",
        "Pushes that a worker may have outstanding at one server; auto: by workers.",
    )
    receive_buffers: Annotated[int, Field(ge=3, le=_COUNT_MAX)] | Literal["auto"] = _setting(
        "transfer.receive_buffers",
        "auto",
        "Buffers, of one chunk, for pushes to a server; auto: by groups and shard.",
    )
    checksum: Literal["off", "sampled", "all"] = _setting(
        "transfer.checksum",
        "off",
        "Which gradients and parameters carry a checksum that the receiver compares.",
    )
    checksum_every: _Count = _setting(
        "transfer.checksum_every",
        16,
        "One of N gradients and parameters carries a checksum; with report.record: one of N "
        "replies is recorded.",
        needs="transfer.checksum = sampled or report.record",
    )
    tables_mode: Annotated[str, Field(pattern=r"^(same|async|ssp:[0-9]{1,9})$")] = _setting(
        "tables.mode",
        "same",
        "Consistency of embedding tables; same: that of parameters.",
        allowed="same, async or ssp:N",
    )
    tables_prefetch: Literal["auto", "off"] = _setting(
        "tables.prefetch",
        "auto",
        "Ask for the rows of a loader's next batch with the push of this one.",
    )
    tables_max_rows: Annotated[int, Field(ge=1, le=_COUNT_MAX)] = _setting(
        "tables.max_rows",
        1 << 20,
        "Maximum rows in one message; longer pushes leave in parts.",
    )
    tables_cache: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        "tables.cache",
        0,
        "Maximum rows of each table that a worker keeps and uses again; 0: none.",
    )
    tables_cache_staleness: Annotated[int, Field(ge=0, le=_COUNT_MAX)] = _setting(
        "tables.cache_staleness",
        16,
        "Iterations for which a kept row is used; they add to the bound of the mode.",
        needs="tables.cache",
    )
    tables_codec: Literal["none", "fp16", "int8"] = _setting(
        "tables.codec",
        "none",
        "Encoding of rows on the network, row by row.",
    )
    record: bool = _setting(
        "report.record",
        False,
        "Write the history; `psdist check` proves from it that the mode's rules held.",
    )
    trace: bool = _setting(
        "report.trace",
        False,
        "Record what each rank does and when; `psdist trace` converts it to a Perfetto file.",
    )
    progress: Literal["auto", "live", "lines", "off"] = _setting(
        "report.progress",
        "auto",
        "Display of progress: live (on a terminal), a line now and then, or none.",
    )
    log: Annotated[str, Field(pattern=r"^(debug|info|warning|error)(\+propagate)?$")] = _setting(
        "report.log",
        "info",
        "Lowest level of the records in RUN_DIR/logs; +propagate: records also reach the "
        "script's own logging handlers.",
        allowed="debug, info, warning or error, each also with +propagate",
    )

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, given: object) -> object:
        """Take the names of merged settings, too."""
        if not isinstance(given, dict) or not MERGED.keys() & given.keys():
            return given
        now = {key: field.default for key, field in cls.model_fields.items()} | given
        for key, merged in MERGED.items():
            if (value := now.pop(key, None)) is not None:
                now |= merged.updates(value, now)
        return now

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other values. Raises ValueError for a name that is no field, because
        pydantic would accept it without effect."""
        for key in (update or {}).keys() - set(type(self).model_fields):
            wrong = f"write {MERGED[key].instead}" if key in MERGED else "it is no setting"
            raise ValueError(f"RunConfig.model_copy(update={{{key!r}: ...}}): {wrong}")
        return super().model_copy(update=update, deep=deep)

    def setting_text(self, key: str) -> str:
        """Return a field, or the setting that replaced an older one, as ``TABLE.KEY = VALUE``;
        ``TABLE.KEY`` if it is unset. For ``codec`` these are both directions, or the one that
        decides."""
        if key == SHORT and (self.codec is None or self.codec_push != self.codec_pull):
            given = [each for each in ("codec_push", "codec_pull") if getattr(self, each)]
            key = min(given, key=lambda each: getattr(self, each) != AUTO, default="codec_push")
        name = MERGED[key].instead if key in MERGED else NAMES[key]
        value = self.codec if key == SHORT else getattr(self, FIELDS[name])
        if value is None:
            return name
        text = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{name} = {text.lower() if isinstance(value, bool) else text}"

    @property
    def codec(self) -> str | None:
        """``auto``, or the codec that both directions have; else None."""
        if AUTO in (self.codec_push, self.codec_pull):
            return AUTO
        return self.codec_push if self.codec_push == self.codec_pull else None

    @property
    def push_codec(self) -> str | None:
        """The codec of pushes where `codec` does not give it."""
        return self._beside_codec(self.codec_push)

    @property
    def pull_codec(self) -> str | None:
        """The codec of pulls where `codec` does not give it."""
        return self._beside_codec(self.codec_pull)

    def _beside_codec(self, of_direction: str | None) -> str | None:
        if self.codec == AUTO:
            return None if of_direction == AUTO else of_direction or "none"
        return of_direction if self.codec is None else None

    @property
    def schedule(self) -> str | None:
        """Modes by round; None if there is no schedule."""
        return None if self.consistency_schedule == SCRIPT else self.consistency_schedule

    @property
    def set_mode(self) -> Literal["refused", "allowed"]:
        """``allowed`` if the script may change the mode."""
        return "allowed" if self.consistency_schedule == SCRIPT else "refused"

    @property
    def stale_lr(self) -> Literal["off", "inverse"]:
        """``inverse`` if the lr of an update is divided by its staleness."""
        return parse_stale(self.stale_updates)[0]

    @property
    def delay_compensation(self) -> float:
        """Lambda of the delay compensation; 0: none."""
        return parse_stale(self.stale_updates)[1]

    @property
    def placement(self) -> str:
        """A strategy or the path of a plan."""
        return self.hosts_placement.removeprefix(STRICT)

    @property
    def strict_placement(self) -> bool:
        """True if a rank on another host than in the plan is an error."""
        return self.hosts_placement.startswith(STRICT)

    @property
    def bind(self) -> Literal["auto", "off"]:
        """``auto`` if ranks bind themselves to their cores."""
        return "auto" if self.hosts_affinity in ("auto", "cores") else "off"

    @property
    def nics(self) -> Literal["auto", "off"]:
        """``auto`` if ranks use the network cards near them."""
        return "auto" if self.hosts_affinity in ("auto", "cards") else "off"


KEYS: Final = tuple(RunConfig.model_fields)
"""The fields of RunConfig, table by table."""


def _extra(key: str, name: str) -> str:
    extra = RunConfig.model_fields[key].json_schema_extra
    return str(extra[name]) if isinstance(extra, dict) else ""


NAMES: Final = {key: _extra(key, "name") for key in KEYS}
"""Field -> the setting's name, ``TABLE.KEY`` or ``KEY``."""
FIELDS: Final = {name: key for key, name in NAMES.items()}
"""Name -> field."""
TABLES: Final = tuple(dict.fromkeys(name.rpartition(".")[0] for name in FIELDS))
"""The tables in their order; "" for settings without one."""


def allowed_values(key: str) -> str:
    """Return in words which values a field or an old name takes: ``"sync, ssp or async"``."""
    if key in MERGED:
        return MERGED[key].allowed or allowed_values(FIELDS[MERGED[key].instead])
    if told := _extra(key, "allowed"):
        return told
    field = RunConfig.model_fields[key]
    words = _words_of(field.annotation, field.metadata)
    comma = "," if " " in words[0] else ""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}{comma} or {words[-1]}"


def _words_of(kind: Any, bounds: Sequence[Any]) -> list[str]:
    """Return the values of a type: of bool, Literal, bounded int, and unions of them."""
    origin, members = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words_of(members[0], members[1:])
    if origin is Literal:
        return [str(each) for each in members]
    if members:
        return [word for each in members for word in _words_of(each, bounds)]
    if kind is bool:
        return ["true", "false"]
    if kind is not int:
        return []
    limits = [limit for each in bounds for limit in getattr(each, "metadata", [each])]
    least = next(each.ge for each in limits if hasattr(each, "ge"))
    most = next(each.le for each in limits if hasattr(each, "le"))
    return [f"a whole number from {least} to {most}"]


def unit_of(key: str) -> str:
    """Return the unit of a setting, "" if its description says what is counted."""
    return {"s": "s", "bytes": "bytes"}.get(key.rpartition("_")[2], "")


def needs_of(key: str) -> str:
    """Return the settings without which ``key`` has no effect, "" if it needs none."""
    return _extra(key, "needs")


def contradiction(config: RunConfig) -> str:
    """Return why these settings exclude each other, with the remedy; "" if they do not."""
    if config.staleness_to is not None and config.staleness_to <= config.staleness:
        return (
            f"{config.setting_text('staleness_to')}: expected more than staleness, which is "
            f"{config.staleness}; set a higher one, or leave it out"
        )
    if config.pipeline and config.tables_mode == "ssp:0":
        return (
            f"{config.setting_text('tables_mode')}: expected ssp:1 or more, or async, where "
            "consistency.pipeline is 1: groups would wait for iterations that others begin later"
        )
    return refusal(config)


def to_toml(config: RunConfig) -> str:
    """The configuration as a TOML file that `resolve` reads back to the same configuration."""
    lines: list[str] = []
    table = ""
    for key, value in config.model_dump().items():
        of, _, name = NAMES[key].rpartition(".")
        if of != table:
            lines += ["", f"[{of}]"]
            table = of
        unit = f" ({unit_of(key)})" if unit_of(key) else ""
        lines.append(f"# {RunConfig.model_fields[key].description}{unit}")
        # TOML has no null: an unset value is shown as a comment.
        lines.append(f"# {name} =" if value is None else f"{name} = {toml_value(value)}")
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


def toml_value(value: object) -> str:
    """Return a value as TOML writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, str):
        # A JSON string is a TOML basic string, except DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)
