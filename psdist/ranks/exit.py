"""The end of a rank: after its last job, or because it or the job has failed.

    status = rank.exit.run(train)    # whatever train() raises ends every rank
    rank.exit.close()                # after the last job
    rank.exit.fail(text, status)     # end every rank of the job; one rank prints the text
    rank.exit.check()                # on the coordinator: end the job if the parent or hosts say so

A script's exception comes here by one of three ways. ``psdist run`` runs the script inside
:meth:`Exit.run` (psdist/commands/run_rank.py). A script that python starts has an exception hook
(psdist/ranks/plain_script.py). ``with psdist.init() as job`` keeps it in ``job.failure``, which
ends the rank at the script's end even if something catches it (psdist/joining.py). All three call
:meth:`Exit.fail_with`.

One rank prints one reason for the end of a job, and every rank exits with the same status.
psdist.ranks.failure turns an exception into the text and the status.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from psdist.errors import BuriedError, HostLostError, JobEndedError, PeerLostError, PsdistError
from psdist.install import survives_deaths
from psdist.protocol.control import Ended, Failure, MembershipChanged
from psdist.protocol.events import ControlArrived
from psdist.protocol.ids import COORDINATOR, is_spare, is_worker, server_id, worker_of
from psdist.ranks.failure import (
    end_all,
    end_if_forked,
    flush_output,
    format_error,
    ignore_interrupts,
    interruption,
    is_interruption,
    may_be_a_consequence,
    printable,
    wait_until_read,
)
from psdist.ranks.hosts import HostWatch
from psdist.ranks.mpi_end import leave_out
from psdist.ranks.parent_link import ParentLink
from psdist.report import RankSurvived
from psdist.report.logs import stop_logs

if TYPE_CHECKING:
    from psdist.ranks.rank import Rank

logger = logging.getLogger("psdist")

DRAIN_TIMEOUT_S = 10.0
# A server that loads torch from a slow disk answers late.
_REPORT_TIMEOUT_S = 30.0
# How much later than torch.distributed MPI may notice that a rank has failed.
_NOTICE_S = 1.0
_LAST_MESSAGE_S = 1.0


class Exit:
    """How one rank ends."""

    def __init__(self, rank: Rank, parent: ParentLink | None = None) -> None:
        self._rank = rank
        self.parent = parent
        """Connection to ``psdist run -n N``; None if another launcher started this rank."""
        self.hosts: HostWatch | None = None
        """Monitor of the job's hosts; None if the job runs on one host or does not monitor them."""
        self.flushes: list[Callable[[], None]] = []
        """Functions that write a job's buffered records to disk if the job fails."""
        self._on_failure: Callable[[str, int], None] | None = None
        self._stop_progress: Callable[[], None] = lambda: None
        self._has_trained = False
        self._group_is_evicted = False
        self._skips_finalize = False

    # -- what a job registers ------------------------------------------------------------------

    def on_failure(self, write: Callable[[str, int], None]) -> None:
        """Call ``write(text, status)`` before this rank ends a failed job."""
        self._on_failure = write

    def before_failure(self, stop: Callable[[], None]) -> None:
        """Call ``stop()`` before a failing rank uses the network: another thread may use it."""
        self._stop_progress = stop

    def note_iteration(self) -> None:
        """The job uses this rank's updates from now on, so its failure ends the job."""
        self._has_trained = True

    def end_job(self) -> None:
        """Drop what the job has registered."""
        self._on_failure, self._stop_progress = None, lambda: None
        self.flushes.clear()

    def watch_hosts(self) -> None:
        """Monitor the job's hosts, if there are several and the settings allow it. Collective."""
        rank, world = self._rank, self._rank.comms.world
        timeout_s = rank.bootstrap.config.host_timeout_s
        if world is None or not timeout_s or len({each.host for each in rank.roles.places}) == 1:
            return
        self.hosts = HostWatch.begin(
            world,
            rank.roles,
            hubs=[COORDINATOR, *(server_id(each) for each in rank.bootstrap.buddies[:1])],
            timeout_s=timeout_s,
            dead=lambda: rank.session.transport.lost.keys() | rank.session.transport.moved.keys(),
            decides=lambda: rank.session.is_coordinator,
            end=self.end_cut_off,
        )

    # -- the end of a rank that has not failed -------------------------------------------------

    def close(self) -> None:
        """End this rank after its last job: send what is pending and close its files."""
        rank, session = self._rank, self._rank.session
        session.transport.drain(DRAIN_TIMEOUT_S)
        if self.hosts is not None:
            self.hosts.close()
        stop_logs()
        survives = session.survives_workers or session.survives_servers
        if self.parent is not None:
            # The job is complete without the failed ranks. The coordinator may have no parent on
            # its host, so each rank reports them.
            for peer in (
                session.transport.lost.keys() | session.transport.moved.keys() if survives else ()
            ):
                self.parent.tell(RankSurvived(rank=rank.roles.rank_of_peer[peer]))
            self.parent.finished()
        # Even if no failure is known: a job may complete before a failure is reported.
        self._skips_finalize = survives

    def end_process(self) -> None:
        """Skip MPI_Finalize if ranks may have failed. Registered with atexit, so it runs last."""
        if self._skips_finalize:
            leave_out()

    def end_evicted(self, text: str) -> NoReturn:
        """End this rank alone, with status 0: the job continues without its group."""
        self._ignore_interrupts()
        print(f"psdist: {self._rank.who}: {text}", file=sys.stderr, flush=True)
        self._flush_records()
        self._end_alone(0)

    # -- the end of a job that has failed ------------------------------------------------------

    def run(self, part: Callable[[], int]) -> int:
        """Return the status of ``part()``; whatever it raises ends the job. A process that
        ``part()`` has forked ends here alone: the rank and its MPI belong to its parent."""
        rank = os.getpid()
        try:
            status = part()
        except SystemExit as stop:
            end_if_forked(rank, stop)
            if stop.code in (None, 0):
                return 0
            self.fail_with(stop)
        except BaseException as error:  # a rank that only stops would leave the others waiting
            end_if_forked(rank, error)
            self.fail_with(error)
        end_if_forked(rank, None)
        return status

    def fail_with(self, error: BaseException) -> NoReturn:
        """End the job because of ``error``, or of the failure of another rank that caused it."""
        whole = "".join(traceback.format_exception(error))
        logger.info("this rank failed:\n%s", printable(whole).rstrip())
        if may_be_a_consequence(error):
            error = self.cause_of(error)
        if isinstance(error, JobEndedError):
            self.end_with_job(error.exit_status)
        if isinstance(error, BuriedError):
            self.end_evicted(printable(str(error)))
        self.fail(*format_error(error))

    def fail(self, text: str, status: int) -> NoReturn:
        """End the job: the coordinator prints ``text`` once, or this rank if it does not answer.

        A spare whose updates the job does not use yet ends alone, and the job continues.
        """
        rank, session = self._rank, self._rank.session
        if self.may_end_alone and not is_interruption(text, status):
            has_joined = worker_of(rank.me) in session.joined
            how = ", as after the failure of a worker" if has_joined else ""
            self.end_evicted(
                f"{text}\npsdist: this spare ends, and the job continues without it{how}"
            )
        self._ignore_interrupts()
        self._stop_progress()
        flush_output()
        self._flush_records()
        heading = f"psdist: {rank.who}"
        if not rank.is_alone and not session.is_coordinator:
            failure = Failure(heading=heading, text=printable(text), exit_status=status)
            with suppress(PsdistError):  # the network may have failed: print it here
                self._send_failure(failure)
        self.abort(heading, text, status)

    def _send_failure(self, failure: Failure) -> None:
        """Send it to the coordinator and wait for the end: the printing rank's Abort or message."""
        rank, session = self._rank, self._rank.session
        session.transport.send_control(COORDINATOR, failure)
        sent_to = session.coordinator_at
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        while self.printing_peer() != rank.me and time.monotonic() < deadline:
            try:
                session.transport.poll()
            except JobEndedError as ended:
                self.end_with_job(ended.exit_status)
            except PsdistError:  # one failure is enough
                pass
            if sent_to != session.coordinator_at:  # it has failed, and its standby is active
                session.transport.send_control(COORDINATOR, failure)
                sent_to = session.coordinator_at
            time.sleep(1e-3)

    @property
    def may_end_alone(self) -> bool:
        """True if the job uses nothing of this rank and has every server that it needs."""
        rank, session = self._rank, self._rank.session
        has_servers = session.survives_servers or all(map(is_worker, session.transport.lost))
        return rank.is_substitute and not self._has_trained and has_servers

    def printing_peer(self) -> int:
        """Return the id of the rank that prints why the job ends: the coordinator, its standby, the
        first server that runs, or the first worker."""
        rank, session = self._rank, self._rank.session
        failed = session.transport.lost.keys() | session.transport.moved.keys()
        for peer in (session.coordinator_at, session.standby):
            if peer is not None and peer not in failed:
                return peer
        running = (peer for peer in rank.roles.rank_of_peer if peer not in failed)
        # A spare with two ids uses one of them; other ranks cannot tell which.
        has_two_ids = rank.roles.has_shared_spares
        return next(
            peer
            for peer in running
            if peer == rank.me or not (has_two_ids and rank.roles.is_substitute(peer))
        )

    def abort(self, heading: str, text: str, status: int) -> NoReturn:
        """Print ``text`` here and end every rank, now."""
        self._ignore_interrupts()
        self.write_last_files(text, status)
        if self.parent is not None:
            self.parent.failed(status)
        end_all(self._rank.comms.world, heading, text, status, tell=lambda: self._send_end(status))

    def _send_end(self, status: int) -> None:
        """Send the end to every rank. Under ULFM Abort ends this process alone."""
        if not survives_deaths(os.environ):
            return
        rank = self._rank
        with suppress(Exception):  # the network may have failed, or this rank's part of it
            for number, peer in rank.roles.peer_of_rank.items():
                if number != rank.number and peer not in rank.endpoint.lost:
                    rank.endpoint.send_control(peer, Ended(exit_status=status))
            rank.endpoint.drain(_LAST_MESSAGE_S)

    def end_with_job(self, status: int) -> NoReturn:
        """End this rank: another rank has ended the job and printed why."""
        self._ignore_interrupts()
        self.write_last_files("another rank has ended the job", status)
        self._end_alone(status)

    def end_cut_off(self, text: str, *, is_told: bool) -> NoReturn:
        """End this rank, from a thread: the job's other hosts do not reach it. ``is_told``: print
        ``text``; False if another rank of this host prints it."""
        logger.error("this rank ends: %s", text)
        if is_told:
            with suppress(OSError, ValueError):
                print(f"psdist: {self._rank.who}: error: {text}", file=sys.stderr, flush=True)
        if self.parent is not None:
            self.parent.failed(HostLostError.exit_status)
        flush_output()
        wait_until_read()
        os._exit(HostLostError.exit_status)

    def _end_alone(self, status: int) -> NoReturn:
        flush_output()
        if self.hosts is not None:
            self.hosts.close()
        stop_logs()
        if self.parent is not None:
            self.parent.failed(status) if status else self.parent.finished()
        wait_until_read()
        os._exit(status)

    def check(self) -> None:
        """End the job if its parent asks for it or has ended; called on the coordinator now and
        then. Raises :class:`HostLostError` if a host is cut off."""
        if self.parent is not None and self.parent.end_signal is not None:
            self.abort(f"psdist: {self._rank.who}", *interruption(self.parent.end_signal))
        if self.parent is not None and self.parent.is_lost:
            self._ignore_interrupts()
            self.write_last_files("psdist run or its mpirun was killed", 1)
            # No Abort: mpirun may be gone. Every rank notices it by its own connection.
            os._exit(1)
        if self.hosts is not None and (verdict := self.hosts.verdict) is not None:
            raise HostLostError(verdict)

    def write_last_files(self, text: str, status: int) -> None:
        """Write buffered records and, on the coordinator, summary.json."""
        self._flush_records()
        # An error here, such as a full disk, must not hide the first one or delay other ranks.
        with suppress(Exception):
            if self._on_failure is not None:
                self._on_failure(text, status)

    def _flush_records(self) -> None:
        for flush in self.flushes:
            with suppress(PsdistError):  # the disk may have failed
                flush()

    def _ignore_interrupts(self) -> None:
        ignore_interrupts()
        if self.parent is not None:
            self.parent.ignore_signals()

    # -- the cause of an error -----------------------------------------------------------------

    def cause_of(self, error: Exception) -> Exception:
        """Return the failure of another rank that caused ``error``, or ``error``.

        torch.distributed reports only a closed connection. If the job survives failed workers, only
        a failure in this worker's group can be the cause, and the result is a :class:`BuriedError`
        once the coordinator has evicted the group.
        """
        rank, session = self._rank, self._rank.session
        if rank.is_alone or not survives_deaths(os.environ):
            return error
        self._stop_progress()
        deadline = time.monotonic() + _NOTICE_S
        while not self.fatal_losses() and time.monotonic() < deadline:
            self._poll_for_eviction()
            time.sleep(1e-3)
        lost = self.fatal_losses()
        deadline = time.monotonic() + _REPORT_TIMEOUT_S
        while lost and session.survives_workers and time.monotonic() < deadline:
            if self._poll_for_eviction():
                return BuriedError(
                    f"{lost[0]}, of the same group, has failed: this worker ends, and the job "
                    "continues without them"
                )
            time.sleep(1e-3)
        return PeerLostError(lost[0]).with_traceback(error.__traceback__) if lost else error

    def _poll_for_eviction(self) -> bool:
        """Return True once the coordinator has evicted a worker of this group."""
        with suppress(PsdistError):
            event = self._rank.session.transport.poll()
            if isinstance(event, ControlArrived) and isinstance(event.message, MembershipChanged):
                evicted = set(event.message.dead)
                self._group_is_evicted |= not evicted.isdisjoint(self._group)
        return self._group_is_evicted

    def fatal_losses(self) -> list[str]:
        """Return descriptions of the failed ranks without which this rank cannot continue."""
        session = self._rank.session
        lost = session.transport.lost
        if not session.survives_workers:
            return [who for peer, who in lost.items() if not is_spare(peer)]
        if session.reforms_groups:
            return []
        group = self._group
        return [who for peer, who in lost.items() if is_worker(peer) and worker_of(peer) in group]

    @property
    def _group(self) -> Sequence[int]:
        """Workers of this worker's group; () on a server."""
        roles, me = self._rank.roles, self._rank.me
        return roles.groups[roles.group_of_worker[worker_of(me)]] if is_worker(me) else ()
