"""``psdist run -n N`` as the parent of mpirun: what a user sees and does at the terminal of a job.

    with make_parent(num_ranks=4, script="train.py", config=config) as parent:
        status = parent.run(command, environment, death_signal=signal.SIGTERM)

Here is its one loop over mpirun, the ranks of this host (``ranks``), the terminal and signals. It
passes output on (``screen``) without the launcher's own noise (``noise``), draws progress
(``display``), forwards signals once and decides what follows one (``ending``). It never waits for a
rank, and no rank outlives it. The ranks' end of the line is psdist.ranks.parent_link.

Nothing here imports torch, mpi4py or numpy: a parent costs little and is at work while ranks start.

Longer than other modules: all that may happen meets in one loop.
"""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from psdist.commands.launch.display import Display, View
from psdist.commands.launch.ending import (
    ENDINGS,
    EndByCoordinator,
    Ending,
    KillRanks,
    SignalLauncher,
    Signals,
    Step,
    TellRanks,
    judge,
)
from psdist.commands.launch.noise import LauncherNoise
from psdist.commands.launch.ranks import Rank, Ranks, start
from psdist.commands.launch.screen import READ_BYTES, Filter, Lines, Screen
from psdist.config.settings import RunConfig
from psdist.errors import LaunchError, ProtocolError
from psdist.install.quirks import own_session
from psdist.install.room import session_bytes
from psdist.report import (
    EndNow,
    Fact,
    Failed,
    Finished,
    Hello,
    InputWanted,
    PhaseReached,
    RankSurvived,
    RoleTaken,
    SignalCame,
    Training,
)
from psdist.report.progress import Style

_LEFT_BEHIND_S: Final = 3.0
"""From the launcher's end to the end of ranks that it has left behind; then they are killed."""
_HANGING_S: Final = 30.0
"""From the end of the last rank of a failed job on this host to that of its launcher."""
_BUSY_S: Final = 0.02
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class _Source:
    """Something that is read: for which of our streams, and through what."""

    descriptor: int
    stream: int
    filter: Filter


def make_parent(*, num_ranks: int, script: str, config: RunConfig) -> Parent:
    """Return a parent on this process's own output."""
    for stream in (0, 1, 2):  # what is opened below must not take the number of one that is closed
        try:
            os.fstat(stream)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    can_draw = os.isatty(2) and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    style: Style = "lines"
    if config.progress == "off":
        style = "off"
    elif config.progress != "lines" and can_draw:
        style = "live"
    screen = Screen(is_live=style == "live")
    view = View(num_ranks=num_ranks, script=script, started_s=time.monotonic())
    return Parent(screen, Display(screen, style=style, view=view), num_ranks, config)


class Parent:
    def __init__(self, screen: Screen, display: Display, num_ranks: int, config: RunConfig) -> None:
        self._screen = screen
        self._display = display
        self._num_ranks = num_ranks
        self._selector = selectors.PollSelector()
        self._sources: dict[int, _Source] = {}
        self._noise = {stream: LauncherNoise() for stream in (1, 2)}
        self._max_deaths = config.max_deaths
        self._ending = Ending(grace_s=config.grace_s)
        self._told: list[int] = []
        self._vanished: list[Rank] = []
        self._over_s: float | None = None
        """Since when the job has failed and no rank of this host is left."""
        self._lost_output: dict[int, str] = {}
        """By stream of ours: why it cannot be written any more."""
        self._num_vanished_first = 0
        """Those that had vanished when the first failure was told: they are what it came of."""

    def __enter__(self) -> Parent:
        self._display.tick(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.erase()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], *, death_signal: int
    ) -> int:
        """Start ``command`` and stay until it has ended; the job's exit status.

        ``death_signal``: what ends this launcher and its ranks when this process is gone. Raises
        LaunchError if it cannot be started.
        """
        line = shlex.join(command)
        self._screen.say(f"{_DIM}{line}{_PLAIN}" if self._screen.is_live else line)
        with (
            Ranks(num_bytes=session_bytes(self._num_ranks)) as self._ranks,
            Signals() as self._signals,
        ):
            self._selector.register(self._signals.descriptor, selectors.EVENT_READ, _nothing)
            self._selector.register(self._ranks.listener, selectors.EVENT_READ, self._accept)
            session = own_session(self._ranks.folder, environment)
            self._launcher = start(
                command,
                {**environment, **session, **self._ranks.environment()},
                death_signal=death_signal,
            )
            try:
                self._watch(self._launcher)
                while self._launcher.poll() is None:
                    self._turn()
                self._end_ranks_left_behind()
                return self._conclude()
            finally:
                # Nothing may run without this parent, whatever has happened.
                if self._launcher.poll() is None:
                    self._launcher.kill()
                    self._launcher.wait()
                self._selector.close()

    # -- one turn ------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to happen, or for the time of what is due; take it on."""
        is_full = any(self._screen.is_full(stream) for stream in (1, 2))
        if is_full:  # who reads us is slow, so the ranks wait, as with any pipe
            self._screen.flush(timeout_s=_BUSY_S)
        else:
            for key, _ in self._selector.select(self._time_to_wait_s()):
                key.data()
        for number in self._signals.take():
            self._on_signal(number)
        now_s = time.monotonic()
        for source in list(self._sources.values()):
            self._screen.put(source.stream, source.filter.overdue(now_s=now_s))
        self._take_steps(self._ending.on_time(now_s=now_s))
        self._end_hanging_launcher(now_s)
        self._screen.flush()
        self._look_for_lost_output()
        self._display.tick(now_s)

    def _look_for_lost_output(self) -> None:
        for stream, name in ((1, "output"), (2, "error")):
            failure = self._screen.failure(stream)
            if failure is not None and stream not in self._lost_output:
                self._lost_output[stream] = failure
                self._screen.say(
                    f"psdist: error: standard {name}: cannot be written ({failure}): the job "
                    "continues without it and ends with a failure; free some space, or send it "
                    "elsewhere"
                )

    def _end_hanging_launcher(self, now_s: float) -> None:
        """An mpirun that does not reach a host any more waits for its word, after an abort, too."""
        if not any(self._told) or self._ranks.alive:
            return
        if self._over_s is None:
            self._over_s = now_s
        elif now_s - self._over_s > _HANGING_S:
            self._launcher.kill()

    def _time_to_wait_s(self) -> float:
        if self._screen.waiting:
            return _BUSY_S
        now_s = time.monotonic()
        deadlines = [source.filter.deadline_s for source in self._sources.values()]
        due = [at_s for at_s in (*deadlines, self._ending.deadline_s) if at_s is not None]
        return max(0.0, min([self._display.every_s, *(at_s - now_s for at_s in due)]))

    def _watch(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        for stream, file in ((1, launcher.stdout), (2, launcher.stderr)):
            self._add_source(os.dup(file.fileno()), stream, self._noise[stream])
            file.close()

    def _add_source(self, descriptor: int, stream: int, filter_: Filter) -> None:
        os.set_blocking(descriptor, False)
        source = self._sources[descriptor] = _Source(descriptor, stream, filter_)
        self._selector.register(descriptor, selectors.EVENT_READ, partial(self._read, source))

    def _read(self, source: _Source) -> bool:
        """Take what is there; whether there was anything."""
        try:
            data = os.read(source.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            shown = source.filter.feed(data, now_s=time.monotonic())
            self._screen.put(source.stream, shown)
        else:
            self._screen.put(source.stream, source.filter.close())
            self._selector.unregister(source.descriptor)
            del self._sources[source.descriptor]
            os.close(source.descriptor)
        return bool(data)

    # -- ranks ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        rank = self._ranks.accept()
        if rank is not None:
            hear: Callable[[], None] = partial(self._hear, rank)
            self._selector.register(rank.connection, selectors.EVENT_READ, hear)

    def _hear(self, rank: Rank) -> None:
        if not rank.is_connected:
            return  # its end was noticed together with another one's
        self._take_facts(rank)
        if rank.is_connected:
            return
        # A rank that fails says so before it ends the others: that is here by now, whichever of
        # them is heard first.
        others = self._ranks.connected
        for other in others:
            self._take_facts(other)
        for lost in (rank, *(other for other in others if not other.is_connected)):
            self._selector.unregister(lost.connection)
            if not lost.has_ended_well:
                self._vanished.append(lost)

    def _take_facts(self, rank: Rank) -> None:
        try:
            for fact in rank.receive():
                self._on_fact(rank, fact)
        except ProtocolError as error:
            self._screen.say(f"psdist: error: {rank.name}: {error}")

    def _on_fact(self, rank: Rank, fact: Fact) -> None:
        if isinstance(fact, Training):
            self._display.training(fact)
        elif isinstance(fact, Hello):
            rank.number = fact.rank
            self._display.view.rank_reached(fact.rank, "connecting")
            for stream, descriptor in enumerate(rank.welcome(), start=1):
                self._add_source(descriptor, stream, Lines())
        elif isinstance(fact, PhaseReached) and rank.number is not None:
            self._display.view.rank_reached(rank.number, fact.phase)
        elif isinstance(fact, RoleTaken):
            rank.take_role(fact)
            if rank.number is not None:
                self._display.view.take_role(rank.number, is_worker=rank.is_worker)
            ranks = self._ranks.all
            if all(each.who for each in ranks) and not any(each.is_coordinator for each in ranks):
                self._display.view.coordinator_is_elsewhere()
        elif isinstance(fact, InputWanted):
            rank.give_input()
        elif isinstance(fact, RankSurvived):
            for each in self._ranks.all:
                each.has_ended_well |= each.number == fact.rank
            self._vanished = [each for each in self._vanished if each.number != fact.rank]
        elif isinstance(fact, Failed | Finished):
            rank.has_ended_well = True
            if isinstance(fact, Failed):
                if not self._told:
                    self._num_vanished_first = len(self._vanished)
                self._told.append(fact.status)

    # -- signals -------------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if number in ENDINGS:
            self._end(number)
        elif number == signal.SIGTSTP:
            self._stop()
        elif number == signal.SIGCONT:
            self._continue()
        elif number == signal.SIGUSR1:
            if self._has_ranks_elsewhere:  # mpirun reaches them all, and servers ignore it
                self._launcher.send_signal(number)
            else:
                self._take_steps([TellRanks(number)])

    def _end(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._ending.number is None:
            self._screen.say(f"psdist: {name}: ending the job; a second signal ends it at once")
        steps = self._ending.on_signal(
            number,
            now_s=time.monotonic(),
            has_worker=any(rank.is_worker for rank in self._ranks.connected),
            has_coordinator=any(rank.is_coordinator for rank in self._ranks.connected),
        )
        self._take_steps(steps)

    def _take_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, TellRanks):
                for rank in self._ranks.connected:
                    rank.tell(SignalCame(number=step.number))
            elif isinstance(step, EndByCoordinator):
                for rank in self._ranks.connected:
                    if rank.is_coordinator:
                        rank.tell(EndNow(number=step.number))
            elif isinstance(step, SignalLauncher):
                self._launcher.send_signal(step.number)
            elif isinstance(step, KillRanks):
                for rank in self._ranks.all:
                    rank.process.signal_group(signal.SIGKILL)

    @property
    def _has_ranks_elsewhere(self) -> bool:
        return len(self._ranks.all) < self._num_ranks

    def _stop(self) -> None:
        """Handle Ctrl-Z: stop the job, then this process. The job continues with this process."""
        self._screen.erase()
        for rank in self._ranks.all:
            rank.process.signal_group(signal.SIGSTOP)
        if self._has_ranks_elsewhere:
            self._launcher.send_signal(signal.SIGTSTP)
        came = self._signals.stop_here()
        self._continue()
        for number in came:
            self._on_signal(number)

    def _continue(self) -> None:
        for rank in self._ranks.all:
            rank.process.signal_group(signal.SIGCONT)
        if self._has_ranks_elsewhere:
            self._launcher.send_signal(signal.SIGCONT)
        self._display.restart()

    # -- the end -------------------------------------------------------------------------------

    def _end_ranks_left_behind(self) -> None:
        """Collect the last facts of ranks that outlive a killed mpirun for a moment."""
        for rank in self._ranks.connected:
            self._hear(rank)
        for rank in self._ranks.connected:
            self._selector.unregister(rank.connection)
        self._selector.unregister(self._ranks.listener)
        self._ranks.hang_up()
        deadline_s = time.monotonic() + _LEFT_BEHIND_S
        while self._ranks.alive and time.monotonic() < deadline_s:
            self._turn()
        for rank in self._ranks.alive:
            rank.process.signal_group(signal.SIGKILL)
        for source in list(self._sources.values()):
            while self._read(source):
                self._flush_patiently()
            self._screen.put(source.stream, source.filter.close())

    def _conclude(self) -> int:
        verdict = judge(
            self._launcher.returncode,
            told=self._told,
            interrupted_by=self._ending.number,
            deaths=[death for noise in self._noise.values() for death in noise.deaths],
            lost_hosts=[host for noise in self._noise.values() for host in noise.lost_hosts],
            vanished=[rank.name for rank in self._vanished],
            num_vanished_first=self._num_vanished_first,
            num_started=len(self._ranks.all),
            max_deaths=self._max_deaths,
        )
        if verdict.line is not None:
            self._screen.say(verdict.line)
        self._flush_patiently()
        self._look_for_lost_output()
        self._flush_patiently()
        return verdict.status or (LaunchError.exit_status if self._lost_output else 0)

    def _flush_patiently(self) -> None:
        """All of it, however slow the reader, unless we are told to end."""
        while self._screen.waiting:
            self._screen.flush(timeout_s=_BUSY_S)
            if set(self._signals.take()) & set(ENDINGS):
                return


def _nothing() -> None:
    """The signals are taken after every wait."""
