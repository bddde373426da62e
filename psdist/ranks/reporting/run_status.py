"""The status of a run, for users: one model, with one update for each fact; pure.

    status = RunStatus(config, roles, coordinator.progress)
    status.update(Death(...), at_s=3.1)       # a Notice, for the log
    status.mode, status.deaths, status.modes_of_set(0)

The log, the progress display, status.json and summary.json are made from it. The coordinator's
standby has the same model. Rows of ``deaths``, ``joined`` and ``alone`` have the keys of
summary.json; ``at_s``, ``from_s`` and ``until_s`` are seconds since the start of the job.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from psdist.config.codec_rounds import is_auto, ladder_of
from psdist.config.codec_specs import text_of_both
from psdist.config.modes import (
    describe_mode,
    describe_modes,
    describe_now,
    describe_tables,
    first_mode,
    mode_of_tables,
    parts_of,
    schedule_of,
)
from psdist.config.outer import counted_steps
from psdist.config.settings import RunConfig
from psdist.controller.kept import TuningState
from psdist.controller.observed import LossHeard
from psdist.controller.snapshots import Fields, HasSnapshot
from psdist.controller.steps import first_of
from psdist.history.run_record import CodecsSince, ModeSince
from psdist.mode_names import Mode
from psdist.protocol.control import Progress
from psdist.protocol.ids import describe_peer, describe_workers, is_spare, worker_id
from psdist.protocol.roles import Roles
from psdist.ranks.wire import codecs_of_ladder, codecs_of_rounds
from psdist.servers.protocol.joins import Joined, SubstituteDeath
from psdist.servers.protocol.modes import ModeChanged
from psdist.servers.protocol.steps import StepsChosen
from psdist.servers.protocol.takeovers import ServerDeath, ShardAlone, ShardWhole, SpareDeath
from psdist.servers.protocol.views import Death, Survived

_MOST_SHOWN: Final = 16
_SILENT_BLOCKS: Final = 3
"""Blocks of rounds after which a missing loss is reported."""

Row = dict[str, Any]


class Notice(NamedTuple):
    """A line for the log."""

    text: str
    level: int = logging.WARNING


def holder_of(peer: int) -> int | str:
    """Return the process that has a shard, for summary.json: a server's number, or ``spare 1``."""
    return describe_peer(peer) if is_spare(peer) else peer


class RunStatus(HasSnapshot):
    """Everything that users are told of a run, and that no rank's report contains."""

    STATE = Fields(
        {
            list[Row]: "_deaths joined alone steps_by_loss",
            list[ModeChanged]: "mode_changes _codec_changes",
            int: "_num_parts",
            bool: "_has_loss",
        }
    )

    def __init__(
        self,
        config: RunConfig,
        roles: Roles,
        progress: Mapping[int, Progress],
        *,
        tuning_state: TuningState | None = None,
        why: str = "",
    ) -> None:
        """``progress``: the latest report of each worker, which the coordinator keeps current;
        ``tuning_state``: psdist's own choices with which the job begins, and ``why``."""
        self._config, self._roles, self._progress = config, roles, progress
        modes = tuning_state.modes if tuning_state is not None else None
        codecs = tuning_state.codecs if tuning_state is not None else None
        steps = tuning_state.steps if tuning_state is not None else None
        self._deaths: list[Row] = []
        self.joined: list[Row] = []
        """Spares that have taken places: ``place`` is the failed worker, ``clock`` the first
        iteration."""
        self.alone: list[Row] = []
        """Times in which a shard had no replica; ``until_s`` and ``kept_by`` are None while it has
        none."""
        self.first_mode = _since(*first_mode(config))
        self.schedule: tuple[ModeSince, ...] = ()
        """The mode of every round; empty without a schedule."""
        if config.schedule is not None:
            self.schedule = tuple(_since(*each) for each in schedule_of(config))
        self._why_modes = why if modes is not None else "settings"
        self.mode_changes = [
            ModeChanged(each.rounds, each.mode, each.staleness, why)
            for each in (modes.starts[1:] if modes is not None else ())
        ]
        self._starts = [part.mode.round for part in parts_of(config)]
        self._num_parts = 1
        """Parts of the schedule that have begun."""
        self._levels = codecs.starts if codecs is not None else ((0, 0),)
        self._why_codecs = why or "auto"
        self.first_codecs = codecs_of_rounds(config, self._levels)
        """The codecs of every round at the start of the job."""
        self.ladder = codecs_of_ladder(config)
        """The codecs among which psdist chooses."""
        self._codec_names = [text_of_both(each) for each in ladder_of(config) if is_auto(config)]
        self._codec_changes: list[ModeChanged] = []
        self.steps_by_loss: list[Row] = []
        """Local steps of all groups, with the first round and the reason; empty unless the loss
        decides them."""
        self._has_loss = False
        if config.steps_by == "loss":
            starts = steps.starts if steps is not None else ((0, counted_steps(config)),)
            for block, number in starts:
                row = {"round": first_of(block), "steps": number, "why": why or "settings"}
                self.steps_by_loss.append(row)

    def update(self, fact: object, at_s: float) -> Notice | None:
        """Take in a fact. Return its line for the log, None if it has none. ``at_s``: seconds since
        the start of the job. Other actions of the coordinator change nothing."""
        match fact:
            case Death():
                return self._lose_worker(fact, at_s)
            case Survived(generation):
                for each in self._deaths:
                    is_open = each.get("settled_s", 0.0) is None
                    if is_open and each["generation"] <= generation:
                        each["settled_s"] = round(at_s - each["at_s"], 4)
            case ServerDeath(server, who, host):
                self._lose(at_s, server=server, who=who, taken_over_by=holder_of(host))
                return Notice(
                    f"{who} has failed; {describe_peer(host)} has taken its place: no update that "
                    "was acknowledged is lost"
                )
            case SpareDeath(spare, who):
                return self._lose_spare(spare, who, at_s)
            case SubstituteDeath(worker, who):
                return self._lose_spare(worker - self._roles.num_beginning, who, at_s)
            case Joined(worker, place, clocks):
                who = self._roles.describe(worker_id(worker))
                row = {"worker": worker, "who": who, "place": place, "clock": clocks[0]}
                self.joined.append({**row, "at_s": round(at_s, 3)})
                return Notice(self.joined_lines[-1])
            case ShardAlone(server, host):
                return self._leave_alone(server, host, at_s)
            case ShardWhole(server, keeper):
                return self._complete(server, keeper, at_s)
            case ModeChanged():
                return self._change(fact)
            case LossHeard():
                self._has_loss = True
            case StepsChosen():
                return self._choose_steps(fact)
        return None

    # -- failures and spares -----------------------------------------------------------------------

    def _lose_worker(self, death: Death, at_s: float) -> Notice:
        last = self._progress.get(death.worker)
        row = {
            "worker": death.worker,
            "who": death.who,
            "group": self._roles.group_of_worker[death.worker],
            "left": death.left,
            "clock": None if last is None else last.clock,
            "at_s": at_s,
            "settled_s": None,
            "generation": death.generation,
        }
        self._deaths.append(row)
        lost = [each for each in self._deaths if "worker" in each]
        out = {worker for each in lost for worker in (each["worker"], *each["left"])}
        num_left = self._roles.num_beginning + len(self.joined) - len(out)
        with_whom = f", and with it {describe_workers(death.left)} of its group" * bool(death.left)
        if death.stay:
            with_whom = f"; group {death.group} continues with {describe_workers(death.stay)}"
        return Notice(
            f"{death.who} has failed{with_whom}; the job continues with {num_left} "
            f"worker{'s' * (num_left != 1)}"
        )

    def _lose_spare(self, spare: int, who: str, at_s: float) -> Notice:
        """The notices of other changes name the shards that it had."""
        self._lose(at_s, spare=spare, who=who)
        return Notice(f"{who} has failed; the job continues")

    def _lose(self, at_s: float, **row: int | str) -> None:
        clock = max((each.clock for each in self._progress.values()), default=0)
        self._deaths.append({**row, "clock": clock, "at_s": at_s})

    def _leave_alone(self, server: int, host: int, at_s: float) -> Notice:
        row = {"server": server, "host": holder_of(host), "from_s": round(at_s, 3)}
        self.alone.append({**row, "until_s": None, "kept_by": None})
        return Notice(
            f"the shard of server {server} is in {describe_peer(host)} only, without a replica: "
            "the job ends if that process fails before the next replica is complete"
        )

    def _complete(self, server: int, keeper: int, at_s: float) -> Notice:
        now = next(
            each for each in self.alone if each["server"] == server and each["until_s"] is None
        )
        now["until_s"], now["kept_by"] = round(at_s, 3), holder_of(keeper)
        return Notice(
            f"the shard of server {server} has a replica again, in {describe_peer(keeper)}, "
            f"after {now['until_s'] - now['from_s']:.1f} s"
        )

    @property
    def alone_now(self) -> list[int]:
        """Servers whose shard has no replica."""
        return sorted({each["server"] for each in self.alone if each["until_s"] is None})

    @property
    def deaths(self) -> list[Row]:
        """Failed ranks in the order of their failures. ``clock``: the last that the worker has
        reported (None: none), for other ranks the furthest of any worker; ``settled_s``: seconds
        until all servers had evicted it."""
        return [{**each, "at_s": round(each["at_s"], 3)} for each in self._deaths]

    @property
    def joined_lines(self) -> list[str]:
        """A line for each spare that has taken a place."""
        return [
            f"{each['who']} has taken the place of worker {each['place']}, from iteration "
            f"{each['clock']} on"
            for each in self.joined
        ]

    # -- modes, codecs and local steps -------------------------------------------------------------

    def _change(self, change: ModeChanged) -> Notice:
        if change.level >= 0:
            self._codec_changes.append(change)
            what = f"codec {self._codec_names[change.level]}"
        else:
            self.mode_changes.append(change)
            what = f"mode {describe_mode(change.mode, change.staleness)}"
        rounds = change.rounds if change.level < 0 else change.rounds[:1]
        where = ", ".join(map(str, rounds))
        return Notice(f"{what} from iteration {where} on ({change.why})", logging.INFO)

    def _choose_steps(self, choice: StepsChosen) -> Notice | None:
        first, is_by_loss = choice.steps[0], self._config.steps_by == "loss"
        if choice.why and is_by_loss:
            start = first_of(choice.term.block)
            self.steps_by_loss.append({"round": start, "steps": first, "why": choice.why})
            return Notice(f"local steps: {first} ({choice.why})", logging.INFO)
        if choice.why:
            shown = ", ".join(map(str, choice.steps[:_MOST_SHOWN]))
            more = ", ..." * (len(choice.steps) > _MOST_SHOWN)
            return Notice(f"local steps by group: {shown}{more} ({choice.why})", logging.INFO)
        if is_by_loss and choice.term.block == _SILENT_BLOCKS and not self._has_loss:
            return Notice(
                f"local.steps_by = loss: no loss was reported in the first "
                f"{first_of(_SILENT_BLOCKS)} rounds; rounds stay at {first} local steps until the "
                "script calls job.report(loss)"
            )
        return None

    def reach(self, clock: int) -> list[Notice]:
        """All groups have made ``clock`` iterations. Return a line for each part of the schedule
        that has begun since the last call."""
        notices = []
        for start in self._starts[self._num_parts :]:
            if start > clock:
                break
            self._num_parts += 1
            text = f"{self._mode_now} from iteration {start} on (schedule)"
            notices.append(Notice(text, logging.INFO))
        return notices

    @property
    def mode(self) -> str:
        """The mode, and the codecs if psdist chooses them, for displays."""
        return " ".join([self._mode_now, *self._codecs_now])

    @property
    def _mode_now(self) -> str:
        if not self.mode_changes:
            return describe_now(self._config, self._starts[self._num_parts - 1])
        last = self.mode_changes[-1]
        return f"ssp (staleness {last.staleness})" if last.mode == "ssp" else last.mode

    @property
    def _codecs_now(self) -> list[str]:
        levels = [*(level for _, level in self._levels), *(c.level for c in self._codec_changes)]
        return [self._codec_names[levels[-1]]] if self._codec_names else []

    @property
    def words(self) -> str:
        """The modes, codecs and local steps of the whole run."""
        parts = [_listed(describe_modes(self._config), self._changed_modes())]
        parts += filter(None, [describe_tables(self._config)])
        if self._codec_names:
            (_, first), *later = self._levels
            changes = [*later, *((each.rounds[0], each.level) for each in self._codec_changes)]
            names = ((start, self._codec_names[level]) for start, level in changes)
            parts.append(_listed(f"codec auto, {self._codec_names[first]}", names))
        if self.steps_by_loss:
            first_steps, *others = self.steps_by_loss
            changed = ((each["round"], each["steps"]) for each in others)
            parts.append(_listed(f"local steps {first_steps['steps']}", changed))
        return "; ".join(parts)

    def _changed_modes(self) -> Iterable[tuple[int, str]]:
        for each in self.mode_changes:
            yield each.rounds[0], describe_mode(each.mode, each.staleness)

    def modes_of_set(self, index: int, *, is_of_tables: bool = False) -> list[Row]:
        """Return the mode of every round of a parameter set, in order, and why."""
        own = mode_of_tables(self._config) if is_of_tables else None
        if own is not None:
            return [_since(*own).model_dump() | {"why": "settings"}]
        why = "schedule" if self.schedule else self._why_modes
        parts = [(each, why) for each in self.schedule or (self.first_mode,)]
        for change in self.mode_changes:
            start = change.rounds[index] if index < len(change.rounds) else 0
            parts = [each for each in parts if each[0].round < start]
            parts.append((_since(start, change.mode, change.staleness), change.why))
        return [part.model_dump() | {"why": reason} for part, reason in parts]

    @property
    def codecs(self) -> list[Row]:
        """The codecs of every round, in order, and why."""
        by_settings = "schedule" if len(self.first_codecs) > 1 else "settings"
        why = self._why_codecs if self.ladder else by_settings
        parts = [(each, why) for each in self.first_codecs]
        for change in self._codec_changes:
            codecs = self.ladder[change.level].model_dump()
            parts.append((CodecsSince(round=change.rounds[0], **codecs), change.why))
        fields = {"round", "push", "pull"}
        return [each.model_dump(include=fields) | {"why": reason} for each, reason in parts]


def _listed(first: str, changes: Iterable[tuple[int, object]]) -> str:
    return ", ".join([first, *(f"{what} from {start}" for start, what in changes)])


def _since(start: int, mode: Mode, staleness: int) -> ModeSince:
    return ModeSince(round=start, mode=mode, staleness=staleness if mode == "ssp" else None)
