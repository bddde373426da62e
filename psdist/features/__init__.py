"""The features of psdist: which settings turn each one on, what it needs, what it excludes.

Names and data only. psdist.config.compatibility compares the settings of a run with this table, and
psdist.config.conflicts prints it.

To add a feature, add an entry. Declare each pair once. A reason states a principle that holds
however the code changes. An untried pair is not a conflict: the tests run it.

Longer than other modules: it is a list, one entry for each feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple


class Need(NamedTuple):
    """The feature works only with at least one of these."""

    features: Sequence[str]
    reason: str


class Conflict(NamedTuple):
    """The feature does not work with this one."""

    feature: str
    reason: str


class Feature(NamedTuple):
    name: str
    settings: Sequence[Mapping[str, object]] = ()
    """Examples, one for each way to turn it on, by fields of RunConfig or older settings. The first
    setting of an example decides; the others are what that one needs. Empty for a property of the
    script."""
    off: str = ""
    """How to do without it, as an imperative with names of settings; "": leave the setting out."""
    on: str = ""
    """How to turn it on, as an imperative; set if another feature needs it."""
    needs: Sequence[Need] = ()
    conflicts: Sequence[Conflict] = ()
    recorded: Sequence[str] = ()
    """Settings that run.json has while the feature is on."""
    counted: Sequence[str] = ()
    """Counts of summary.json that are null while the feature is off."""
    options: Mapping[str, str] = MappingProxyType({})
    """Options of psdist run by flat name, with their metavars."""


_ONE_DECIDES: Final = "only one of them may decide the mode and the bound of a round"
_ONE_CHANGE: Final = (
    "psdist judges a change by the time of rounds, so it changes one thing at a time"
)

MODES: Final = (
    Feature("sync rounds", [{"mode": "sync"}], "set mode = ssp or async"),
    Feature("ssp", [{"mode": "ssp"}], on="set mode = ssp"),
    Feature("ssp or async", [{"mode": "ssp"}, {"mode": "async"}], "set mode = sync"),
    Feature("bound of 0", [{"staleness": 0, "mode": "ssp"}], "set staleness = 1 or more"),
    Feature("schedule", [{"schedule": "0: sync; 4: ssp:2"}]),
    Feature(
        "mode set by the script",
        [{"set_mode": "allowed"}],
        conflicts=[Conflict("mode set by psdist", _ONE_DECIDES)],
    ),
    Feature(
        "mode set by psdist",
        [{"mode": "auto"}, {"staleness_to": 8, "mode": "ssp", "staleness": 2}],
        "let the mode and its bound stay",
    ),
    Feature(
        "moving bound",
        [{"staleness_to": 8, "mode": "ssp", "staleness": 2}],
        needs=[Need(["ssp"], "only ssp has a bound that can move")],
        conflicts=[Conflict("schedule", _ONE_DECIDES)],
    ),
    Feature(
        "changing mode",
        [
            {"mode": "auto"},
            {"schedule": "0: sync; 4: ssp:2"},
            {"set_mode": "allowed"},
            {"staleness_to": 8, "mode": "ssp", "staleness": 2},
        ],
        "keep one mode",
    ),
    Feature(
        "pipeline",
        [{"pipeline": 1, "mode": "ssp"}],
        "set consistency.pipeline = 0",
        conflicts=[
            Conflict("sync rounds", "in sync every step waits for its own replies"),
            Conflict("bound of 0", "each group would wait for iterations that others begin later"),
            Conflict("copies for readers", "a push leaves before the reply that it is relative to"),
        ],
        recorded=["pipeline"],
    ),
    Feature(
        "staleness correction",
        [
            {"stale_lr": "inverse", "mode": "ssp"},
            {"delay_compensation": 0.25, "mode": "async"},
        ],
        conflicts=[
            Conflict("sync rounds", "in sync no update is stale"),
            Conflict("pipeline", "a gradient is older than what its worker holds when it pushes"),
            Conflict("coded pushes", "a residual is added to an update of another staleness"),
            Conflict("replicas", "a replica does not store which version each worker received"),
            Conflict("shrinking groups", "a successor pushes what another worker has computed"),
        ],
        recorded=["stale_lr", "delay_compensation"],
    ),
)

ROUNDS: Final = (
    Feature(
        "frozen moments",
        [{"freeze_step": 2}],
        "set training.freeze_step = 0",
        recorded=["freeze_step"],
    ),
    Feature(
        "backup groups",
        [{"backup": 1}],
        "set consistency.backup = 0",
        conflicts=[
            Conflict("ssp or async", "there each update is applied when it arrives"),
            Conflict("coded pushes", "the residual of an update that is dropped would be lost"),
            Conflict("rounds of an epoch", "a group that misses a round loses a whole epoch"),
            Conflict("steps by speed", "samples assigned to a group that misses a round are lost"),
            Conflict("strict or full overlap", "a round closes when step() sends gradients"),
            Conflict("failed workers", "servers close a round without asking who failed in it"),
            Conflict("replicas", "a replica does not store which groups missed which rounds"),
        ],
        recorded=["backup", "backup_every"],
        counted=["rounds_missed"],
        options={"backup": "N"},
    ),
    Feature("local steps", [{"local_steps": 2}], "set local.steps = 1", "set local.steps = 2"),
    Feature(
        "rounds of an epoch",
        [{"local_steps": "epoch"}],
        "set local.steps = a number",
        conflicts=[
            Conflict("summed gradients", "a round's weight needs its number of steps beforehand"),
            Conflict("varying steps", "the loader decides how many steps an epoch has"),
        ],
    ),
    Feature(
        "varying steps",
        [{"steps_by": "speed", "local_steps": 8}, {"steps_by": "loss", "local_steps": 8}],
        "set local.steps_by = count",
        needs=[Need(["local steps"], "no round is shorter than one step")],
        conflicts=[
            Conflict("summed gradients", "they make one step, however long the round is"),
            Conflict("replicas", "the standby does not store the lengths of rounds"),
        ],
    ),
    Feature(
        "steps by speed",
        [{"steps_by": "speed", "local_steps": 8}],
        "set local.steps_by = count",
        conflicts=[
            Conflict("global batch", "the size of a joint batch would vary with the steps"),
        ],
    ),
    Feature(
        "outer optimizer",
        [{"outer": "nesterov", "local_steps": 2}],
        needs=[Need(["local steps"], "with one step servers run the script's own optimizer")],
        options={"outer": "NAME[:KEY=X,...]"},
    ),
    Feature(
        "summed gradients", [{"outer": "accumulate", "local_steps": 2}], "set local.outer = average"
    ),
    Feature("global batch", [{"global_batch": 16}]),
)

CODECS: Final = (
    Feature(
        "codecs",
        [{"push_codec": "int8"}, {"pull_codec": "fp16"}],
        "set codec.push = none and codec.pull = none",
    ),
    Feature("coded pushes", [{"push_codec": "int8"}], "set codec.push = none"),
    Feature("coded pulls", [{"pull_codec": "fp16"}], "set codec.pull = none"),
    Feature(
        "relative pulls",
        [{"pull_codec": "int8"}],
        "set codec.pull = none, fp16 or bf16",
        conflicts=[
            Conflict("different versions", "a relative reply needs the version its reader holds")
        ],
    ),
    Feature(
        "different versions",
        [{"mode": "ssp"}, {"mode": "async"}],
        "set mode = sync, or codec.pull_copies = on",
    ),
    Feature(
        "copies for readers",
        [{"pull_copies": "on", "mode": "ssp"}],
        "set codec.pull_copies = off",
        conflicts=[
            Conflict("mixed modes", "in sync one reply to all is relative to no copy"),
        ],
    ),
    Feature(
        "mixed modes",
        [
            {"mode": "auto"},
            {"schedule": "0: ssp:1 int8; 4: sync int8/bf16"},
            {"set_mode": "allowed"},
        ],
        "name the codecs in a schedule, with pulls of none in sync",
    ),
    Feature(
        "chosen codecs",
        [{"codec": "auto"}],
        "set codec.push and codec.pull to other codecs",
        "set codec.push = auto",
        conflicts=[
            Conflict("changing mode", _ONE_CHANGE),
            Conflict("varying steps", _ONE_CHANGE),
            Conflict("backup groups", "a group does not report the time of a round that it misses"),
            Conflict("feedback off", "the residual of a codec must reach the next codec"),
            Conflict("bursts", "psdist compares codecs by what they leave out of every round"),
        ],
    ),
    Feature(
        "codecs of a schedule",
        [{"schedule": "0: sync none; 4: sync int8"}],
        "leave the codecs in the schedule out",
        conflicts=[Conflict("codec settings", "the schedule decides the codecs of every round")],
    ),
    Feature(
        "codec settings",
        [{"codec": "fp16"}, {"push_codec": "int8"}, {"pull_codec": "fp16"}],
        "leave codec.push and codec.pull out",
    ),
    Feature("push codec", [{"push_codec": "int8"}]),
    Feature(
        "error budget",
        [{"error_budget": 0.1, "codec": "auto"}],
        conflicts=[Conflict("push codec", "it limits the choice of a push codec, which is given")],
    ),
    Feature(
        "limits of chosen codecs",
        [{"error_budget": 0.1, "codec": "auto"}, {"loss_patience": 3, "codec": "auto"}],
        needs=[Need(["chosen codecs"], "it limits which codecs psdist chooses")],
        recorded=["error_budget", "loss_patience"],
    ),
    Feature("feedback off", [{"feedback": "off"}], "set codec.feedback = on"),
    Feature("bursts", [{"push_codec": "int8+burst:3"}], "leave +burst out"),
    Feature(
        "skipped pushes",
        [{"push_codec": "skip:0.001"}],
        "leave skip:THETA out",
        conflicts=[
            Conflict("feedback off", "a push that is skipped would be lost"),
            Conflict(
                "optimizer other than SGD",
                "skip compares lr x gradient with the parameters, which moves them in SGD alone",
            ),
        ],
    ),
    Feature(
        "encoding on the device",
        [{"encode_on": "device", "push_codec": "int8"}],
        "set codec.encode_on = auto",
        needs=[Need(["codec for devices"], "each other codec computes on the host alone")],
    ),
    Feature(
        "codec for devices",
        [{"push_codec": "int8", "encode_on": "device"}],
        on="set codec.push = fp16, bf16, int8, int4, int2, sign or topk:R",
    ),
)

FAILURES: Final = (
    Feature(
        "failed workers",
        [{"max_deaths": 1}],
        "set failures.max_deaths = 0",
        "set failures.max_deaths = 1",
    ),
    Feature(
        "replicas",
        [{"replication": "buddy", "servers": 2}],
        "set failures.replication = none",
        "set failures.replication = buddy",
        needs=[Need(["several servers"], "another server stores the replica of a shard")],
        conflicts=[Conflict("servers on a GPU", "replicas are kept in the memory of the host")],
    ),
    Feature("several servers", [{"servers": 2}], on="set servers = 2 or more"),
    Feature("servers on a GPU", [{"server_device": "cuda"}], "set hosts.server_device = cpu"),
    Feature(
        "tracing",
        [{"trace": True}],
        "set report.trace = false",
        conflicts=[
            Conflict("survived failures", "at the end the clocks of all ranks are compared")
        ],
    ),
    Feature(
        "survived failures",
        [{"max_deaths": 1}, {"replication": "buddy", "servers": 2}],
    ),
    Feature(
        "shrinking groups",
        [{"on_group_death": "reform", "max_deaths": 1}],
        "set failures.on_group_death = leave",
        needs=[Need(["failed workers"], "without it the failure of a worker ends the job")],
        conflicts=[
            Conflict("group tier of MPI or NCCL", "a call with a failed member may never return"),
            Conflict("spares for workers", "a spare takes the place of a whole group"),
            Conflict("coded pulls", "replies are relative to values of the failed worker"),
            Conflict("local steps", "steps that workers have made cannot be taken back"),
            Conflict("strict or full overlap", "a group can shrink only inside step()"),
            Conflict("pipeline", "a pending reply is for the failed worker"),
            Conflict("call of a whole group", "a group can shrink only inside step()"),
        ],
    ),
    Feature(
        "spares",
        [{"spares": 1, "max_deaths": 1}],
        "set failures.spares = 0",
        needs=[Need(["failed workers", "replicas"], "no place would ever become free")],
    ),
    Feature(
        "spares for workers",
        [{"spares": 1, "max_deaths": 1}],
        "set failures.spares = 0, or failures.max_deaths = 0",
        conflicts=[
            Conflict("mode set by the script", "a spare does not receive what a script has set"),
            Conflict("local steps", "the state of a worker's optimizer is lost with the worker"),
            Conflict("workers on GPUs", "a plan gives spares no GPU, and a CPU would delay all"),
        ],
    ),
    Feature(
        "group tier of MPI or NCCL",
        [{"group_tier": "mpi"}, {"group_tier": "nccl"}],
        "set hosts.group_tier = auto",
    ),
    Feature(
        "strict or full overlap",
        [{"overlap": "strict"}, {"overlap": "full"}],
        "set transfer.overlap = auto or off",
    ),
)

LOSSES: Final = (
    Feature(
        "rollback",
        [
            {
                "rollback": 2.0,
                "codec": "auto",
                "checkpoint_every": "100",
                "run_dir": "runs/a",
                "on_nonfinite": "skip",
            }
        ],
        needs=[
            Need(["chosen codecs", "steps by loss"], "else psdist cannot become less lossy"),
            Need(["checkpoints"], "the restarted job must find one to go back to"),
            Need(["skipped steps"], "else a step with NaN ends the job before it goes back"),
        ],
        conflicts=[
            Conflict("ssp or async", "only in sync is a checkpoint of one round for all groups")
        ],
        recorded=["rollback"],
    ),
    Feature(
        "steps by loss", [{"steps_by": "loss", "local_steps": 8}], on="set local.steps_by = loss"
    ),
    Feature(
        "checkpoints",
        [{"checkpoint_every": "100", "run_dir": "runs/a"}],
        on="set checkpoint.every and run_dir, and start it with --resume",
    ),
    Feature("skipped steps", [{"on_nonfinite": "skip"}], on="set training.on_nonfinite = skip"),
    Feature(
        "rounds of one optimizer",
        [
            {"local_steps": "epoch"},
            {"steps_by": "speed", "local_steps": 8},
            {"steps_by": "loss", "local_steps": 8},
            {"codec": "auto"},
            {"backup": 1},
        ],
    ),
)

SCRIPTS: Final = (
    Feature(
        "float64 parameters",
        off="train in float32",
        conflicts=[Conflict("codecs", "codecs compute in float32")],
    ),
    Feature(
        "several optimizers",
        off="prepare one optimizer",
        conflicts=[Conflict("rounds of one optimizer", "it looks at the rounds of one optimizer")],
    ),
    Feature("optimizer other than SGD", off="train with torch.optim.SGD"),
    Feature(
        "optimizer without a second moment",
        off="train with Adam or AdamW and amsgrad=False",
        conflicts=[Conflict("frozen moments", "training.freeze_step keeps the second moment")],
    ),
    Feature(
        "tables",
        off="use torch.nn.Embedding",
        conflicts=[
            Conflict("local steps", "rows are pushed in every step"),
            Conflict("staleness correction", "rows of an update are of several versions"),
            Conflict("shrinking groups", "a failed worker has merged rows of others"),
            Conflict("copies of groups or servers", "rows exist once, and no group misses a round"),
        ],
    ),
    Feature(
        "copies of groups or servers",
        [
            {"backup": 1},
            {"replication": "buddy", "servers": 2},
            {"spares": 1, "max_deaths": 1},
        ],
    ),
    Feature("call of a whole group", off="leave the call out"),
    Feature("workers on GPUs", off="hide the GPUs"),
)

TABLES: Final = (
    Feature(
        "mode of tables",
        [{"tables_mode": "async"}, {"tables_mode": "ssp:2"}],
        "set tables.mode = same",
        conflicts=[Conflict("changing mode", "a change of the mode is one of all sets")],
    ),
    Feature(
        "kept rows",
        [{"tables_cache": 1000, "tables_mode": "async"}],
        "set tables.cache = 0",
        needs=[Need(["stale tables"], "in sync a kept row would lack updates")],
    ),
    Feature(
        "stale tables",
        [{"tables_mode": "async"}, {"mode": "ssp"}, {"mode": "async"}],
        on="set tables.mode = async or ssp:N",
    ),
)

FEATURES: Final = (*MODES, *ROUNDS, *CODECS, *FAILURES, *LOSSES, *SCRIPTS, *TABLES)
