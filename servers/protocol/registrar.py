"""Who has come to a collective, who is done, what goes into the run's files; pure.

One server, number 0, is the registrar beside being a server: it is always responsive, which the
chief, busy computing, is not. It is no coordinator of updates: consistency is every server's own.

A collective (save, mean, barrier, prepare) goes this way: every worker sends ``Enter``; when all
have come, every server is told to ``Resume`` the groups that waited; when all servers have
answered, every worker gets ``Collected``. So no worker leaves a collective before every server
counts every group again.

Who has missed a call is psdist.servers.protocol.collectives', what psdist decides by what workers
tell psdist.servers.protocol.decided's.

    registrar = Registrar(num_workers=4, num_servers=2)
    registrar.handle(worker_id(0), Enter(worker=0, seq=1, name="barrier", payload=b""))

Longer than other modules: a collective, from its first worker to its end or error, is one story.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NoReturn

from psdist.controller.decisions import Controller, Decision
from psdist.controller.kept import Fidelity, KeptModes, Rollback
from psdist.controller.loss_steps import LossStepControl
from psdist.controller.steps import StepControl
from psdist.errors import InvariantError, PeerLostError, ProtocolError
from psdist.protocol.checkpoints import CHECKPOINT, WRITTEN, unpack_clocks
from psdist.protocol.collected import MOST_TOLD, PREPARED, collected
from psdist.protocol.control import (
    Absent,
    Admit,
    AskSteps,
    Buried,
    Busy,
    Collected,
    Control,
    CopyFilled,
    Departed,
    Done,
    Enter,
    Failure,
    Finish,
    Finished,
    Held,
    KeepsCopy,
    LossReported,
    Metrics,
    ModeProposed,
    Progress,
    Ready,
    Regroup,
    Resume,
    Resumed,
    RoundTook,
    Stop,
    Survive,
    TakenOver,
    Welcome,
    WhoIsAbsent,
)
from psdist.protocol.ids import (
    REGISTRAR,
    describe_peer,
    describe_workers,
    is_worker,
    server_id,
    spare_id,
    spare_of,
    worker_id,
    worker_of,
)
from psdist.protocol.modes import SET_MODE, unpack_mode
from psdist.protocol.substitutes import JOIN, unpack_join
from psdist.servers.protocol.actions import SendControl
from psdist.servers.protocol.checkpoints import (
    BeginCheckpoint,
    Checkpoints,
    CompleteCheckpoint,
    DropCheckpoint,
    KeepFidelity,
)
from psdist.servers.protocol.collectives import Collective, MissedCalls, Warn
from psdist.servers.protocol.deaths import Death, Deaths, Survived
from psdist.servers.protocol.decided import Decided
from psdist.servers.protocol.joins import Joined, Joins, SubstituteDeath
from psdist.servers.protocol.meetings import Meetings
from psdist.servers.protocol.modes import (
    GroupCame,
    GroupGone,
    LevelsSized,
    ModeChanged,
    ModeChanges,
    ModeObserved,
)
from psdist.servers.protocol.regroups import Regroups
from psdist.servers.protocol.replication.takeovers import TakeoverAction, Takeovers
from psdist.servers.protocol.steps import LossHeard, StepsChosen, StepsObserved


@dataclass(slots=True)
class WriteMetrics:
    """One line for metrics.jsonl."""

    line: dict[str, Any]


@dataclass(slots=True)
class EndJob:
    """Somebody failed: print this once, end every rank with this status."""

    failure: Failure


@dataclass(slots=True)
class Complete:
    """All workers are done and all servers have reported."""


RegistrarAction = (
    SendControl
    | WriteMetrics
    | EndJob
    | Complete
    | Warn
    | BeginCheckpoint
    | KeepFidelity
    | CompleteCheckpoint
    | DropCheckpoint
    | Death
    | Survived
    | Joined
    | SubstituteDeath
    | TakeoverAction
    | ModeChanged
    | ModeObserved
    | GroupGone
    | GroupCame
    | StepsObserved
    | LossHeard
    | Rollback
    | StepsChosen
    | LevelsSized
)


class Registrar:
    LAST: Final[type] = Complete
    """The action behind which the registrar ends."""
    TAKES = (
        *(Enter, Resumed, Done, Finished, Metrics, Progress, Failure, WhoIsAbsent),
        *Checkpoints.TAKES,
        *Meetings.TAKES,
        *Deaths.TAKES,
        *Regroups.TAKES,
        *Joins.TAKES,
        *Takeovers.TAKES,
        *ModeChanges.TAKES,
        *Decided.TAKES,
    )

    def __init__(
        self,
        *,
        num_workers: int,
        num_servers: int,
        mode: str = "sync",
        staleness: int = 0,
        groups: Sequence[Sequence[int]] = (),
        max_deaths: int = 0,
        buddies: Sequence[int] = (),
        hosts: Sequence[str] = (),
        racks: Sequence[str] = (),
        num_spares: int = 0,
        takes_set_mode: bool = False,
        control: Controller | None = None,
        steps: StepControl | LossStepControl | None = None,
        num_substitutes: int = 0,
        rollback: float | None = None,
        fidelity: Fidelity | None = None,
        first_round: int = 0,
        modes: KeptModes | None = None,
        reforms: bool = False,
        may_miss: bool = False,
    ) -> None:
        """``mode``: sync only where no other one may come, async where no group ever waits;
        ``staleness``: how many iterations a group may be ahead of what it waits for in a step
        (ssp), the least that may come; ``groups``: the workers of each; without them every worker
        is one of its own;
        ``max_deaths``: psdist.servers.protocol.deaths; ``buddies``: by server, who
        has its second copy; nothing where there are none; ``hosts``, ``racks``: by server,
        and then by spare, where it is; ``takes_set_mode``: whether scripts may change the mode;
        ``control``: changes it, or the codecs, where nobody else does; ``steps``: chooses how many
        local steps each group makes, where they are not always as many; ``num_substitutes``: so
        many of the workers, the last ones, are groups of their own that join when others have died
        (psdist.servers.protocol.joins); with ``num_spares`` they are the spares, each of which is
        either's; ``rollback``, ``fidelity``, ``first_round``: psdist.servers.protocol.decided;
        ``modes``: with which the run begins, where scripts or ``control`` may change them;
        ``reforms``: groups go on without their dead; ``may_miss``: rounds may close without some
        groups."""
        substitutes = range(num_workers - num_substitutes, num_workers)
        self._first_substitute = num_workers - num_substitutes
        self._shares_spares = bool(num_spares and num_substitutes)
        self._num_workers = num_workers
        self._num_servers = num_servers
        self._missed_calls = MissedCalls(mode=mode, may_miss=may_miss)
        self._checkpoints = Checkpoints(
            num_workers=num_workers, num_servers=num_servers, substitutes=substitutes
        )
        self._meetings = Meetings(
            num_workers=num_workers,
            groups=groups,
            staleness={"sync": 0, "ssp": staleness}.get(mode),
            substitutes=substitutes,
            may_miss=may_miss,
        )
        self._may_miss = may_miss
        self._deaths = Deaths(
            groups=groups or [(worker,) for worker in range(num_workers)],
            num_servers=num_servers,
            max_deaths=max_deaths,
            substitutes=substitutes,
            reforms=reforms,
        )
        self._regroups = Regroups(groups if reforms else ())
        self._joins = Joins(substitutes)
        self._modes = ModeChanges(num_servers=num_servers, begins=modes)
        self._takes_set_mode = takes_set_mode
        self._decided = Decided(
            num_workers=num_workers,
            groups=groups,
            mode=mode,
            control=control,
            steps=steps,
            rollback=rollback,
            fidelity=fidelity,
            first_round=first_round,
        )
        self._changes_mode: int | None = None
        """Number of the collective that is over when the mode has changed."""
        self._is_ready = False
        """Whether everybody has prepared, and nobody prepares more."""
        self._is_finishing = False
        """Whether servers have been told that all workers are done."""
        self._takeovers = Takeovers(
            num_workers=num_workers,
            buddies=buddies,
            hosts=hosts,
            racks=racks,
            num_spares=num_spares,
            num_substitutes=num_substitutes,
        )
        self._collectives: dict[int, Collective] = {}
        self._held: int | None = None
        """Number of a collective to which all have come, and that waits until the checkpoint before
        is written: another one, or the end of the job behind it."""
        self._entered: dict[int, int] = {}
        """Worker -> number of its last collective."""
        self.progress: dict[int, Progress] = {}
        self.done: dict[int, dict[str, Any]] = {}
        """Statistics of the workers that are done."""
        self._left: dict[int, list[int]] = {}
        """Of leaders among them: after how many iterations of each set their groups have left."""
        self._departed: list[Departed] = []
        """Of those of them that have died since."""
        self.servers: dict[int, dict[str, Any]] = {}
        """Statistics of the servers, at the end."""
        self.last: dict[str, Any] = {}
        """The chief's last value of every logged name."""

    def handle(self, peer: int, message: Control) -> list[RegistrarAction]:
        """What to do about a message of one of ``TAKES``. Raises :class:`ProtocolError` that names
        a peer which speaks for another one or says what cannot be."""
        if self._deaths.out and is_worker(peer) and worker_of(peer) in self._deaths.out:
            return []  # it is not in the job any more, and may not have heard of that
        if is_worker(peer) and worker_of(peer) in self._deaths.waiting:
            return self._on_substitute(peer, message)
        if isinstance(message, Progress):
            self._require_worker(peer, message)
            return self._on_progress(message)
        if isinstance(message, Metrics):
            return self._on_metrics(peer, message.line)
        if isinstance(message, Enter):
            self._require_worker(peer, message)
            return [*self._on_enter(peer, message), *self._fix_steps()]
        if isinstance(message, Resumed):
            self._require_server(peer, message)
            return self._on_resumed(message)
        if isinstance(message, Done):
            self._require_worker(peer, message)
            return [*self._on_done(peer, message), *self._fix_steps()]
        if isinstance(message, Finished):
            self._require_server(peer, message)
            return self._on_finished(peer, message)
        if isinstance(message, WhoIsAbsent):
            self._require_worker(peer, message)
            return self._on_who_is_absent(message)
        if isinstance(message, Failure):
            return [EndJob(message)]
        if isinstance(message, Held | Busy):
            self._require_worker(peer, message)
            is_collecting = any(not each.error for each in self._collectives.values())
            return [*self._meetings.on_told(message.worker, message, is_collecting=is_collecting)]
        if isinstance(message, Buried):
            self._require_server(peer, message)
            return self._on_buried(message)
        if isinstance(message, Regroup):
            self._require_worker(peer, message)
            answers = self._regroups.on_told(message)
            if not answers:
                return []
            self._decided.go_on(self._regroups.members_with(message.worker))
            return [*answers]
        if isinstance(message, ModeProposed):
            self._require_server(peer, message)
            return self._on_mode_proposed(message)
        if isinstance(message, RoundTook | AskSteps | LossReported):
            self._require_worker(peer, message)
            return [*self._decided.on_told(message, self._away)]
        if isinstance(message, TakenOver):
            taken = self._takeovers.on_taken_over(peer, message)
            return [*taken, *self._ask_again(message.server)]
        if isinstance(message, KeepsCopy):
            return [*self._takeovers.on_keeps_copy(peer, message)]
        if isinstance(message, CopyFilled):
            return [*self._takeovers.on_copy_filled(peer, message)]
        if isinstance(message, Checkpoints.TAKES):
            return [*self._checkpoints.on_told(peer, message), *self._go_on_with_checkpoint()]
        raise InvariantError(f"the registrar was given {type(message).__name__}")

    def on_server_lost(self, peer: int, who: str) -> list[RegistrarAction]:
        """Handle the failure of a server or a spare. Raises :class:`ServersLostError`."""
        return [*self._takeovers.on_server_lost(peer, who)]

    def _ask_again(self, server: int) -> list[RegistrarAction]:
        """What a server owes whose place another one has taken."""
        peer, actions = server_id(server), list[RegistrarAction]()
        for seq, each in self._collectives.items():
            is_told = each.is_complete and seq != self._changes_mode
            if is_told and server not in each.resumed:
                actions += [
                    SendControl(peer, Admit(worker=new.worker, clocks=list(new.clocks)))
                    for new in self._joins.admitted_in(seq)
                ]
                actions.append(SendControl(peer, Resume(seq=seq, checkpoint=each.checkpoint)))
        dropped = self._checkpoints.on_server_lost(peer, is_resumed=not actions)
        actions += self._deaths.ask_again(server)
        actions += [SendControl(peer, each) for each in self._departed]
        if self._is_finishing:
            self.servers.pop(server, None)  # what the dead one has told was not the last
            actions.append(SendControl(peer, Finish()))
        # In front of what followed, of which whoever is told finds servers that know the mode.
        modes = self._modes.ask_again(server)
        return [*modes, *actions, *dropped, *self._go_on_with_checkpoint()]

    def _on_substitute(self, peer: int, message: Control) -> list[RegistrarAction]:
        """Of one that has not joined."""
        if isinstance(message, Failure):
            return [EndJob(message)]
        if isinstance(message, Metrics | Progress):
            return []  # of its script, on the way to where the others are
        if not isinstance(message, Ready) or peer != worker_id(message.worker):
            _refuse(peer, f"sent {type(message).__name__} before it had joined the job")
        self._joins.on_ready(peer, message)
        return [*self._call_for_joins()]

    def _call_for_joins(self) -> list[SendControl]:
        """A meeting, where somebody waits to join and, as far as is known, may."""
        live = set(self._deaths.live)
        told = [each.clock for worker, each in self.progress.items() if worker in live]
        may_join = not told or self._joins.may_join([max(told)])
        return self._meetings.call() if self._joins.ready and may_join else []

    def _require_worker(
        self,
        peer: int,
        message: (
            Progress
            | Enter
            | Done
            | WhoIsAbsent
            | Held
            | Busy
            | RoundTook
            | LossReported
            | AskSteps
            | Regroup
        ),
    ) -> None:
        worker = message.worker
        if not 0 <= worker < self._num_workers or peer != worker_id(worker):
            _refuse(peer, f"sent {type(message).__name__} of worker {worker}")

    def _require_server(
        self, peer: int, message: Resumed | Finished | Buried | ModeProposed
    ) -> None:
        server = message.server
        if not 0 <= server < self._num_servers or peer != server_id(server):
            _refuse(peer, f"sent {type(message).__name__} of server {server}")

    def _on_metrics(self, peer: int, line: dict[str, Any]) -> list[RegistrarAction]:
        worker, values = line.get("worker"), line.get("values", {})
        is_of_peer = isinstance(worker, int) and peer == worker_id(worker)
        if not is_of_peer or not isinstance(values, dict) or not is_plain(line):
            _refuse(peer, "sent a line of metrics that is not its own, or no plain data")
        if worker == self._deaths.chief:
            self.last.update(values)
        return [WriteMetrics({**{k: v for k, v in line.items() if k != "values"}, **values})]

    def _on_enter(self, peer: int, message: Enter) -> list[RegistrarAction]:
        entered = self._entered.get(message.worker, 0)
        is_waiting = self._is_waiting(message.worker)
        if message.seq != entered + 1 or is_waiting or message.worker in self.done:
            _refuse(
                peer,
                f"entered collective {message.seq} after collective {entered}"
                + (", which is not over" if is_waiting else "")
                + (", and its script has finished" if message.worker in self.done else ""),
            )
        unpack = _UNPACK.get(message.name)
        if unpack is not None and unpack(message.payload) is None:
            _refuse(peer, f"entered a {message.name} with what are no clocks")
        self._entered[message.worker] = message.seq
        if message.name == "prepare" and message.payload != PREPARED:
            self._is_ready = False
        collective = self._collectives.get(message.seq)
        if collective is None:
            if message.name == JOIN:
                self._meetings.is_join_due = False
            is_of_meeting = message.name in (WRITTEN, JOIN) or (
                message.name == CHECKPOINT and self._meetings.take_met()
            )
            collective = Collective(message.name, is_of_meeting=is_of_meeting)
            self._collectives[message.seq] = collective
        collective.entered[message.worker] = message
        if collective.error:
            return self._tell(message.seq, collective.error, [message.worker])
        actions = self._check_missed_calls(message.seq, collective, message.worker)
        actions += self._meetings.on_entered()
        return actions if collective.error else actions + self._go_on(message, collective)

    def _is_waiting(self, worker: int) -> bool:
        """In a collective that has neither ended nor failed."""
        return any(worker in each.entered and not each.error for each in self._collectives.values())

    def _go_on(self, message: Enter, collective: Collective) -> list[RegistrarAction]:
        """``message.worker`` has come, and nobody has passed anybody."""
        if message.name != collective.name:
            return self._fail(
                message.seq,
                collective,
                f"workers made different calls: {collective.who_called()}; every worker must make "
                "the same calls in the same order",
            )
        return self._fail_if_a_script_has_finished(message.seq, collective) or (
            self._resume_if_all_have_come(message.seq, collective)
        )

    def _on_progress(self, message: Progress) -> list[RegistrarAction]:
        before = self.progress.get(message.worker)
        if message.clock < (before.clock if before else 0) or message.samples < 0:
            _refuse(
                worker_id(message.worker),
                f"sent Progress at clock {message.clock} after "
                f"{before.clock if before else 'none'}, {message.samples} samples",
            )
        self.progress[message.worker] = message
        actions: list[RegistrarAction] = []
        for seq, each in self._collectives.items():
            actions += self._judged(seq, each, self._missed_calls.judge(each, message))
        if not self._is_join_under_way:
            actions += self._call_for_joins()
        return actions + self._observe(message) if message.own_us else actions

    @property
    def _is_join_under_way(self) -> bool:
        names = (each.name for each in self._collectives.values() if not each.error)
        return self._meetings.is_join_due or JOIN in names

    def _observe(self, message: Progress) -> list[RegistrarAction]:
        """What rounds of a group have taken, where psdist chooses the mode or the codecs."""
        observed, decision = self._decided.observe(message, may_change=self._may_change_mode)
        return [*observed, *(self._modes.propose(decision) if decision is not None else ())]

    @property
    def good_rounds(self) -> int | None:
        """See :attr:`psdist.servers.protocol.decided.Decided.good`."""
        return self._decided.good

    def know_sizes(self, sizes: list[int]) -> list[RegistrarAction]:
        """The model is known, and with it how many bytes an exchange takes at each level."""
        return [*self._decided.know_sizes(sizes)]

    @property
    def _away(self) -> set[int]:
        """Workers that are done, wait in a collective, or are out of the job."""
        waiting = (each.entered for each in self._collectives.values() if not each.error)
        return {*self.done, *self._deaths.out, *chain.from_iterable(waiting)}

    def _fix_steps(self) -> list[RegistrarAction]:
        """Fix the steps of each term for which no worker is waited for any more."""
        return [*self._decided.fix_steps(self._away)]

    def _check_missed_calls(
        self, seq: int, collective: Collective, worker: int
    ) -> list[RegistrarAction]:
        """``worker`` has entered."""
        mine = self.progress.get(worker)
        if mine is None:
            return []
        out = self._deaths.out
        others = (each for each in self.progress.values() if each.worker not in out)
        return self._judged(
            seq, collective, self._missed_calls.on_entered(collective, mine, others)
        )

    def _judged(
        self, seq: int, collective: Collective, found: Iterable[str | Warn]
    ) -> list[RegistrarAction]:
        """What follows from calls that were missed: of an error that the collective fails."""
        actions: list[RegistrarAction] = []
        for each in found:
            actions += [each] if isinstance(each, Warn) else self._fail(seq, collective, each)
        return actions

    def _fail_if_a_script_has_finished(
        self, seq: int, collective: Collective
    ) -> list[RegistrarAction]:
        gone = self.done.keys() - collective.entered.keys()
        if not gone or collective.error:
            return []
        whose = "whose script has" if len(gone) == 1 else "whose scripts have"
        return self._fail(
            seq,
            collective,
            f"{collective.name} was called by {describe_workers(collective.entered)} only; absent: "
            f"{describe_workers(gone)}, {whose} finished; {collective.name} must be called by "
            "every worker",
        )

    def _resume_if_all_have_come(self, seq: int, collective: Collective) -> list[RegistrarAction]:
        if collective.error or collective.is_complete or self._is_settling:
            return []
        if not all(worker in collective.entered for worker in self._deaths.live):
            return []
        if collective.name == CHECKPOINT:
            return self._begin_checkpoint(seq, collective)
        if collective.name == SET_MODE:
            return self._begin_change(seq, collective)
        if collective.name == JOIN:
            return self._admit(seq, collective)
        if collective.name == WRITTEN and self._checkpoints.is_busy:
            self._held = seq
            return []
        return self._resume(seq)

    @property
    def _is_settling(self) -> bool:
        """Whether servers are being told of what all must know before anything else follows."""
        return self._deaths.is_settling or self._modes.is_settling

    def _resume(self, seq: int, checkpoint: str = "") -> list[RegistrarAction]:
        self._collectives[seq].is_complete = True
        resume = Resume(seq=seq, checkpoint=checkpoint)
        return [SendControl(server_id(server), resume) for server in range(self._num_servers)]

    def _admit(self, seq: int, collective: Collective) -> list[RegistrarAction]:
        """Every worker has called join: servers hear who joins in front of ``Resume``."""
        brought = {}
        for worker in self._deaths.live:
            brought[worker] = unpack_join(collective.entered[worker].payload)
        told = [each for each in brought.values() if each is not None]
        clocks = [each.clocks for each in told]
        if len(set(map(len, clocks))) > 1:
            return self._fail_for_sets(seq, collective, clocks)
        of_chief = brought[self._deaths.chief]
        assert of_chief is not None
        actions: list[RegistrarAction] = []
        for worker in self._joins.refuse(num_sets=len(clocks[0])):
            actions += [
                Warn(
                    f"worker {worker}, which was to join, has prepared another number of "
                    f"optimizers than the job, which has {len(clocks[0])}: it does not join"
                ),
                SendControl(worker_id(worker), Stop()),
            ]
        for each in self._joins.admit(seq, clocks, state=of_chief.state):
            self._deaths.admit(each.worker)
            self._checkpoints.admit(each.worker)
            self._entered[each.worker] = seq
            actions += self._decided.admit(each.worker, each.clocks[0])
            admit = Admit(worker=each.worker, clocks=list(each.clocks))
            actions += [SendControl(server_id(it), admit) for it in range(self._num_servers)]
        return [*actions, *self._resume(seq)]

    def _welcome(self, seq: int) -> list[RegistrarAction]:
        """Collective ``seq`` is over: who has joined in it hears so, and where it stands."""
        actions: list[RegistrarAction] = []
        settled = self._deaths.settled  # not all servers may have heard of who has died since
        for each in self._joins.take_welcome(seq):
            welcome = Welcome(
                worker=each.worker,
                clocks=list(each.clocks),
                state=each.state,
                seq=seq,
                generation=settled.generation,
                dead=settled.dead,
                chief=settled.chief,
                meeting=self._meetings.number,
            )
            actions += [SendControl(worker_id(each.worker), welcome), each]
            actions += self._meetings.admit(each.worker)
        return actions

    def _clocks_brought(self, collective: Collective) -> dict[int, tuple[int, ...]]:
        of_worker = {}
        for worker in self._deaths.live:
            told = unpack_clocks(collective.entered[worker].payload)
            assert told is not None
            of_worker[worker] = told
        return of_worker

    def _fail_for_sets(
        self, seq: int, collective: Collective, clocks: Sequence[tuple[int, ...]]
    ) -> list[RegistrarAction]:
        return self._fail(
            seq,
            collective,
            f"workers called {collective.name} with different numbers of prepared optimizers: "
            f"{', '.join(str(len(each)) for each in clocks[:MOST_TOLD])}",
        )

    def _begin_checkpoint(self, seq: int, collective: Collective) -> list[RegistrarAction]:
        of_worker = self._clocks_brought(collective)
        clocks = list(of_worker.values())
        if len(set(map(len, clocks))) > 1:
            return self._fail_for_sets(seq, collective, clocks)
        if self._checkpoints.is_busy:  # the one before is being written
            self._held = seq
            return []
        if self._may_miss:  # who has not heard of missed rounds goes on where the others are
            highest = tuple(map(max, zip(*clocks, strict=True)))
            of_worker = dict.fromkeys(of_worker, highest)
        # Who has died goes on, in a job that goes on from it, where the others are.
        lowest = tuple(map(min, zip(*clocks, strict=True)))
        begun = self._checkpoints.begin(
            [of_worker.get(worker, lowest) for worker in range(self._num_workers)]
        )
        collective.checkpoint = begun.checkpoint
        fidelity = self._decided.kept(lowest[0])
        if self._modes.kept is not None:
            fidelity = replace(fidelity or Fidelity(), modes=self._modes.kept)
        kept = [] if fidelity is None else [KeepFidelity(begun.checkpoint, fidelity)]
        return [begun, *kept, *self._resume(seq, begun.checkpoint)]

    def _begin_change(self, seq: int, collective: Collective) -> list[RegistrarAction]:
        """Every worker has called set_mode."""
        asked = {enter.payload for enter in collective.entered.values()}
        if len(asked) > 1:
            words = ", ".join(sorted(payload.decode(errors="replace")[:40] for payload in asked))
            return self._fail(
                seq,
                collective,
                f"workers called set_mode with different modes: {words}; every worker must ask for "
                "the same one",
            )
        found = unpack_mode(asked.pop())
        if found is None or not self._takes_set_mode:
            _refuse(
                worker_id(min(collective.entered)),
                "asked for a mode that there is not, or in a run whose mode no script may change",
            )
        collective.is_complete = True
        self._changes_mode = seq
        mode, staleness = found
        decided = Decision(mode, staleness, f"the script, in collective {seq}")
        return [*self._modes.propose(decided)]

    @property
    def _may_change_mode(self) -> bool:
        """Whether the registrar may change the mode now, without a collective: everybody trains."""
        return self._is_ready and not self._modes.is_settling and not self.done

    def _on_mode_proposed(self, message: ModeProposed) -> list[RegistrarAction]:
        actions: list[RegistrarAction] = [*self._modes.on_proposed(message.server, message)]
        if self._modes.is_settling:
            return actions
        changed = actions[-1]
        assert isinstance(changed, ModeChanged)
        self._decided.committed(changed.rounds[0])
        # Behind CommitMode: whoever hears of what follows finds servers that have heard of it.
        if self._changes_mode is not None:
            actions += self._resume(self._changes_mode)
            self._changes_mode = None
        for seq, collective in tuple(self._collectives.items()):
            actions += self._resume_if_all_have_come(seq, collective)
        return actions + self._finish_if_all_are_done()

    def _go_on_with_checkpoint(self) -> list[RegistrarAction]:
        """A collective that has waited for a checkpoint goes on when that is over."""
        if self._held is None or self._checkpoints.is_busy:
            return []
        seq, self._held = self._held, None
        return self._resume_if_all_have_come(seq, self._collectives[seq])

    def _fail(self, seq: int, collective: Collective, error: str) -> list[RegistrarAction]:
        collective.error = error
        return self._tell(seq, error, sorted(collective.entered))

    @staticmethod
    def _tell(seq: int, error: str, workers: Iterable[int]) -> list[RegistrarAction]:
        answer = Collected(seq=seq, payloads=[], runs=[], values=b"", error=error)
        return [SendControl(worker_id(worker), answer) for worker in workers]

    def _on_resumed(self, message: Resumed) -> list[RegistrarAction]:
        collective = self._collectives.get(message.seq)
        if collective is None or not collective.is_complete:
            raise ProtocolError(
                f"server {message.server} resumed collective {message.seq}, which is not complete"
            )
        if message.server in collective.resumed:
            _refuse(server_id(message.server), f"resumed collective {message.seq} twice")
        collective.resumed.add(message.server)
        if len(collective.resumed) < self._num_servers:
            return []
        del self._collectives[message.seq]
        entered = [collective.entered.get(worker) for worker in range(self._num_workers)]
        if collective.name == "prepare":
            brought = {enter.payload for enter in collective.entered.values()}
            self._is_ready = brought == {PREPARED}
        if collective.checkpoint:
            answer = Collected(
                seq=message.seq,
                payloads=[collective.checkpoint.encode()],
                runs=[0, self._num_workers],
                values=b"",
                error="",
            )
        else:
            answer = collected(message.seq, entered)
        has_come = [worker for worker in self._deaths.live if worker in collective.entered]
        told = [SendControl(worker_id(worker), answer) for worker in has_come]
        # Who has not joined in a meeting for that does so in one that is called when more is known.
        again = self._call_for_joins() if collective.name != JOIN else []
        return [*told, *self._welcome(message.seq), *again]

    def _on_done(self, peer: int, message: Done) -> list[RegistrarAction]:
        is_waiting = self._is_waiting(message.worker)
        if message.worker in self.done or is_waiting or not is_plain(message.statistics):
            _refuse(peer, "sent Done twice, inside a collective, or with what is no plain data")
        self._checkpoints.require_told(peer)
        self.done[message.worker] = message.statistics
        if message.left:
            self._left[message.worker] = message.left
        cancelled = self._meetings.on_done(message.worker)
        failed = (
            self._fail_if_a_script_has_finished(seq, each)
            for seq, each in self._collectives.items()
        )
        return [*cancelled, *chain.from_iterable(failed), *self._finish_if_all_are_done()]

    def _finish_if_all_are_done(self) -> list[RegistrarAction]:
        if self._is_finishing or self._is_settling:
            return []
        if not all(worker in self.done for worker in self._deaths.live):
            return []
        self._is_finishing = self._takeovers.is_ending = True
        return [SendControl(server_id(server), Finish()) for server in range(self._num_servers)]

    def _on_finished(self, peer: int, message: Finished) -> list[RegistrarAction]:
        is_asked = self._is_finishing
        if message.server in self.servers or not is_asked or not is_plain(message.statistics):
            _refuse(peer, "sent Finished twice, unasked, or with what is no plain data")
        self._checkpoints.require_told(peer)
        self.servers[message.server] = message.statistics
        return self._complete_if_all_reported()

    def _complete_if_all_reported(self) -> list[RegistrarAction]:
        if len(self.servers) < self._num_servers:
            return []
        waiting = self._deaths.waiting
        if self._shares_spares:  # the others are stopped as spares
            waiting = waiting & self._joins.asked
        heard_by = sorted({*self._deaths.live, *waiting})
        stops = [SendControl(worker_id(worker), Stop()) for worker in heard_by]
        # Until now a server may have had to take another one's place.
        servers = self._takeovers.alive if self._takeovers.has_buddies else []
        stops += [SendControl(each, Stop()) for each in servers if each != REGISTRAR]
        return [*stops, Complete()]

    def _on_who_is_absent(self, message: WhoIsAbsent) -> list[RegistrarAction]:
        collective = self._collectives.get(message.seq)
        if collective is None:
            return []  # it is over: the question has crossed the answer
        absent = [worker for worker in self._deaths.live if worker not in collective.entered]
        return [
            SendControl(
                worker_id(message.worker),
                Absent(seq=message.seq, workers=absent[:MOST_TOLD], num_absent=len(absent)),
            ),
        ]

    def open_collectives(self) -> list[tuple[int, str, list[int], list[int]]]:
        """Of each that has not ended: its number and name, the workers that have entered it, and
        those that have still to come."""
        live = self._deaths.live
        return [
            (
                seq,
                each.name,
                sorted(each.entered),
                [worker for worker in live if self._entered.get(worker, 0) < seq],
            )
            for seq, each in sorted(self._collectives.items())
            if not each.error
        ]

    @property
    def alone(self) -> list[int]:
        """Servers of whose shards there is one copy, where all had a second one."""
        return self._takeovers.alone

    @property
    def idle_spares(self) -> list[int]:
        """The ids of spares that wait."""
        return self._takeovers.idle_spares

    @property
    def out(self) -> frozenset[int]:
        """Workers that are not in the job: the dead and the others of their groups, who are in it
        no more, and substitutes that have not joined."""
        return frozenset(self._deaths.out | self._deaths.waiting)

    @property
    def left_out(self) -> frozenset[int]:
        """Those of them that were in the job."""
        return frozenset(self._deaths.out)

    @property
    def survived(self) -> Survive:
        """What workers were told last of who is dead."""
        return self._deaths.settled

    @property
    def not_joined(self) -> frozenset[int]:
        """Substitutes that have not joined."""
        return frozenset(self._deaths.waiting)

    @property
    def num_idle_spares(self) -> int:
        """Those that wait until somebody dies."""
        if self._shares_spares:
            return len(self._takeovers.idle_spares)
        return len(self._takeovers.idle_spares) + len(self._joins.idle)

    # -- deaths --------------------------------------------------------------------------------

    def on_lost(self, peer: int, who: str) -> list[RegistrarAction]:
        """The network has noticed that ``peer`` is dead. Raises :class:`PeerLostError` where the
        job cannot go on without it."""
        if not is_worker(peer):
            raise PeerLostError(who)
        worker = worker_of(peer)
        if worker in self._deaths.waiting:
            is_told_elsewhere = self._shares_spares and worker not in self._joins.asked
            if not self._joins.on_lost(worker) or is_told_elsewhere:
                return []
            return [SubstituteDeath(worker, who), *self._ask_substitutes()]
        if worker in self.done:
            return self._depart(worker)
        actions = self._deaths.on_lost(worker, who, is_ready=self._is_ready)
        if not any(isinstance(each, Death) for each in actions):
            return [*actions]
        self._joins.on_died(worker)
        return [*actions, *self._decided.lose(worker, self._deaths.out)]

    def _ask_substitutes(self) -> list[RegistrarAction]:
        """To take the places of the dead, where all servers know of these and training goes on."""
        if self._deaths.is_settling or self.done:
            return []
        if not self._shares_spares:
            return [*self._joins.ask()]
        first, idle = self._first_substitute, map(spare_of, self._takeovers.idle_spares)
        self._joins.keep_idle({first + spare for spare in idle})
        asked = [(worker_of(each.peer) - first, each.message) for each in self._joins.ask()]
        for spare, _ in asked:
            self._takeovers.lend(spare)
        return [SendControl(spare_id(spare), message) for spare, message in asked]

    def _depart(self, worker: int) -> list[RegistrarAction]:
        """A worker that is done has died: nothing was to come of it, but what it had told a server
        that has died, too."""
        left = self._left.pop(worker, None)
        if left is None:
            return []
        departed = Departed(worker=worker, left=left)
        self._departed.append(departed)
        return [SendControl(server_id(each), departed) for each in self._takeovers.taken]

    def _on_buried(self, message: Buried) -> list[RegistrarAction]:
        reached = self._deaths.reached(message)
        actions: list[RegistrarAction] = [*self._deaths.on_buried(message.server, message)]
        self._joins.on_buried(reached)
        if self._deaths.is_settling:
            return actions
        # Behind Survive: whoever hears of what follows knows who is dead.
        self._regroups.on_settled(self._deaths.dead)
        actions += self._ask_substitutes()
        out = self._deaths.out
        for seq, collective in tuple(self._collectives.items()):
            if collective.is_complete:
                continue
            for worker in out:
                collective.entered.pop(worker, None)
            collective.earliest = {
                length: each
                for length, each in collective.earliest.items()
                if each.worker not in out
            }
            if not collective.entered:
                del self._collectives[seq]
        actions += self._fix_steps()
        actions += self._meetings.on_lost(out)
        actions += self._checkpoints.on_lost([worker_id(worker) for worker in sorted(out)])
        actions += self._go_on_with_checkpoint()
        for seq, collective in tuple(self._collectives.items()):
            if not collective.is_complete:
                actions += self._fail_if_a_script_has_finished(seq, collective)
                actions += self._resume_if_all_have_come(seq, collective)
        return actions + self._finish_if_all_are_done()


_UNPACK: Final[dict[str, Callable[[bytes], object]]] = {
    CHECKPOINT: unpack_clocks,
    JOIN: unpack_join,
}


def is_plain(value: Any, *, depth: int = 8) -> bool:
    """Whether this can go into a JSON file: numbers, texts, None, and lists and maps of them."""
    if value is None or isinstance(value, bool | int | float | str):
        return True
    if not depth:
        return False
    if isinstance(value, dict):
        keys = all(isinstance(key, str) for key in value)
        return keys and all(is_plain(each, depth=depth - 1) for each in value.values())
    return isinstance(value, list) and all(is_plain(each, depth=depth - 1) for each in value)


def _refuse(peer: int, why: str) -> NoReturn:
    raise ProtocolError(f"the registrar: {describe_peer(peer)} {why}")
