"""One worker's run, from ``attach`` to its end: the parts, and how they begin and end together."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from offbeat.basics.warn import warn
from offbeat.live.attached import refusals, shards, state
from offbeat.live.attached.arguments import Arguments
from offbeat.live.attached.driver import Driver
from offbeat.live.attached.equal import share_beginning
from offbeat.live.attached.finite import Finite
from offbeat.live.attached.flat import Flat
from offbeat.live.attached.gradient import only_reads_gradients
from offbeat.live.attached.handing import Hands
from offbeat.live.attached.others import Others
from offbeat.live.attached.saving import Resumed, Saving
from offbeat.live.attached.stats import Stats
from offbeat.live.attached.stepping import Stepping
from offbeat.live.attached.twin import ReplicaTwin
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.island import Island
from offbeat.live.host import looking
from offbeat.live.host.status import JobStatus
from offbeat.live.partial.endpoints import Endpoints
from offbeat.live.transport import elsewhere, hosts, notice
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.work import share
from offbeat.live.work.follow import keep_up
from offbeat.live.worker.board import Board
from offbeat.live.worker.waiter import Waiter
from offbeat.method.effects import Next
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.tensors.vector import Vec


class Training:
    """A run as one worker sees it. ``closed`` is called when it has ended well."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        model: nn.Module,
        strategy: Strategy,
        board: Board,
        given: Arguments,
        closed: Callable[[], None],
    ) -> None:
        self._inner, self._model, self._strategy, self._board, self._closed = inner, model, strategy, board, closed
        self._max_norm, self._recorder, self._on_error = given.max_norm, given.recorder, given.on_error
        self.stats = Stats(given.log)
        self._flat = flat = Flat(model, inner, given.mesh)
        if flat.island is not None:
            refusals.check_sharded(strategy)
            if given.checkpoint is not None or given.resume is not None:
                raise OffbeatError(
                    "checkpoint= and resume= are not built for a sharded model; save its state_dict() and the "
                    "optimizer's with torch.distributed.checkpoint"
                )
        self._returns = hosts.returns() > 0 and board.has_posted_before
        resumed = Resumed(None if self._returns else given.resume)
        begins = {} if self._returns else {"checkpoint": resumed.in_words}
        facts = refusals.facts(flat, strategy, **given.must_be_equal, **begins)
        (board.come_back if self._returns else board.agree)(facts, given.patience_s)
        self._island: Island | None = None
        try:
            if flat.island is not None:
                self._island = Island(board, flat.island, given.patience_s)
                self._board = board = self._island.between
            devices = [p.device for p in flat.parts]
            self.transport = Transport(
                Waiter(board, given.patience_s), board, devices, of_shards=self._island is not None
            )
            if not self._returns:
                if board.rank == 0:
                    resumed.load_model(model)
                    flat.adopt()
                share_beginning(flat, self.transport, self._island)
            self._refuse_what_cannot_go_on()
            self.transport.waiter.until(board.has_attached(), "the others to attach")
            if board.min_workers and not self._returns:
                board.has_begun()
        except BaseException as error:
            for one in (board, self._island):
                if one is not None:
                    one.fail(f"{type(error).__name__}: {error}")
                    one.abandon()
            raise
        self.me = Replica(
            board.rank,
            board.size,
            flat.x,
            flat.buffers,
            self._update,
            lambda: inner.param_groups,
            given.seed,
            given.steps,
            parameters=len(flat.params),
            states=lambda: inner.state,
            slots=flat.layout.slots,
            sizes=shards.whole_bytes(flat.params),
            whole=self._over_all_shards,
            held=shards.local,
            hosts=self.transport.hosts if self._island is None else self._island.hosts,
        )
        unknown = given.unknown_to_a_task
        if self._island is not None and not self._island.leads:
            self._recorder.follow()
        homes = self.transport.numbered_homes
        self._recorder.begin(strategy, board.size, flat.whole(), given.seed, given.steps, unknown, homes)
        twin = ReplicaTwin.of(flat, inner)
        self.endpoints = Endpoints(
            board,
            self.transport,
            given.patience_s,
            self._recorder.events,
            self._island,
            twin,
            log_beside=self._recorder.events_beside,
        )
        self._driver = Driver(strategy, self.me, self.transport, self.endpoints, self._recorder.spent, self._island)
        parts = (flat, board, self.transport, self._driver, self.endpoints)
        recorder = self._recorder  # and not this run, which holds what follows
        left_out = lambda: recorder.cannot("a gradient in it was not finite")  # noqa: E731
        self._finite = finite = Finite(flat, self.me.rank, given.nonfinite, left_out)
        self.stepping = Stepping(*parts, given.accumulate, self._recorder, self._finite)
        self._others = self.endpoints.others = Others(*parts, self.stepping, lambda: keep_up(inner), self._island)
        self._hands = Hands(flat, inner, board, self.transport, self._driver, self.endpoints)
        self._left = state.Left()
        resumed.load_state(inner, self.me)
        if resumed.saved is not None:
            self._recorder.cannot("it was taken up from a checkpoint, which the record does not hold")
        self.begun_at = self.me.t
        self._saving: Saving | None = None
        if given.checkpoint is not None:
            wait = self.endpoints.answer_at
            parts_ = (flat, model, inner, self.me, strategy, board)
            self._saving = Saving(given.checkpoint, given.every_s, *parts_, wait)
        self._everyone = board.members
        self.is_over = self._ended_well = False
        self._handled = id(sys.exc_info()[1])  # the script may have been started from an except clause
        self._inner_steps = refusals.OnlyAttachedSteps(inner)
        elsewhere.attached(board.name, self.stats.ledger, flat.tensors)
        waits = self._others.until if board.min_workers else None
        share.attached(self.name, board, given.patience_s, self._steps_together, waits, not self.is_sharded)
        atexit.register(self._at_exit)
        if board.min_workers:
            notice.heed(board.name, board.rank, lambda: self._leave(notice.LEFT_AFTER))
        if self._returns:
            self._come_back(given.patience_s)
        self.stats.begin()
        self.stats.losses, self.stats.left_out = lambda: board.losses, lambda: finite.in_words

    def _come_back(self, patience_s: float) -> None:
        """Take a member's replica over, and be there where it is."""
        self._recorder.cannot("a worker has come back in it")
        try:
            self._hands.take(patience_s)
            self.stepping.reset()
            with torch.no_grad():
                self._driver.start()
        except BaseException as error:
            self.abandon(f"{type(error).__name__}: {error}")
            raise
        self.begun_at = self.me.t

    def _refuse_what_cannot_go_on(self) -> None:
        """All ranks find the same."""
        if self._board.min_workers and self._island is not None:
            raise OffbeatError(
                f"min_workers={self._board.min_workers} was asked for, but going on without the dead is not built for "
                f"a model that is sharded; leave it out, or under offbeat launch say --min-workers {self._board.size}"
            )

    def _update(self, g: Vec) -> None:
        """The inner optimiser's step."""
        share.applied(self.name)
        gradients = self.stepping.gradients
        if self._max_norm is None and only_reads_gradients(self._inner):
            gradients.shown(g, lambda: self._inner_steps.step(self._inner))
            return
        gradients.put(g)
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._flat.tensors, self._max_norm)  # of a sharded model, over all shards
        self._inner_steps.step(self._inner)

    def _over_all_shards(self, numbers: Vec) -> Vec:
        """Sums over this rank's shard become sums over the model."""
        if self._island is None or not numbers.parts:
            return numbers
        return Vec([self._island.agree_on(part) for part in numbers.parts])

    @property
    def name(self) -> str:
        """Of this run, among those of the process."""
        return self._board.name

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of those who are in the run: all but the dead, as far as this worker has heard."""
        return tuple(rank for rank in self._everyone if rank not in self._board.dead)

    def _steps_together(self) -> int | None:
        asks = self._driver.asks
        if self.endpoints.has_channel or not isinstance(asks, Next) or len(asks.among or self._everyone) < self.me.size:
            return None
        return self.me.t

    def took_step(self) -> None:
        """One more is over; whoever looks at the job is shown."""
        self._board.took_steps(self.me.t)
        if self._saving is not None:
            self._saving.between_steps()
        if self._board.min_workers and self._board.wanted:
            with torch.no_grad():
                self._hands.over()

    def status(self) -> JobStatus:
        """What is known of the job now."""
        if self.is_over:
            why = "The run is over: what is shown is this worker alone."
        elif self._board.line is not None:
            return self._board.line.status()
        elif self.me.size == 1:
            why = "This run has one worker, and so no host process: there is nobody to wait for."
        else:
            why = "This worker has no connection to a host process now, so nothing is known of the others here."
        return looking.of_this_process(self.me.rank, self.me.size, self.me.t, why)

    @property
    def is_sharded(self) -> bool:
        return self._island is not None

    @property
    def wait_s(self) -> float:
        return self.transport.waiter.waited_s + self.endpoints.waited_s

    @property
    def wire_bytes(self) -> int:
        return self.transport.wire_bytes + self.endpoints.wire_bytes

    def refuse_if_over(self, what: str) -> None:
        if self.is_over:
            raise OffbeatError(f"{what} came after the run was ended; attach the optimizer again to go on")

    def _refuse_between_averages(self, what: str) -> None:
        """Each worker counts its own steps there, so that no moment is one between the same two averages for all."""
        if self.me.size > 1 and self._driver.steps_alone:
            raise OffbeatError(
                f"{what} came in the middle of a run of {self._strategy}, whose workers are between different "
                "averages; end the run with finish() before it, or let all take equally many steps between them: a "
                "number as the period, and pace='equal'"
            )

    # A checkpoint.

    def saved(self) -> dict[str, Any]:
        if not self.is_over:
            self._refuse_between_averages("state_dict()")
            self._remember()
        plain = state.saved(self._strategy, self.me, self._left)
        return plain if self._island is None else state.of_shard(plain, self._island.shard)

    def full_state(self) -> dict[str, Any]:
        """The averaged model's state, in memory of its own."""
        if not self.is_over:
            self.average()
        elif not self._ended_well:
            raise OffbeatError(
                "full_state_dict() came after the run was given up, and this rank's weights are its own, not the "
                "average; model.state_dict() has them"
            )
        keeps = self._island is None or self._island.leads
        return state.full(self._model, keeps)

    def _remember(self) -> None:
        self.endpoints.fetch_lost()
        owed = self.endpoints.owed() if self.endpoints.is_open else self._left.owed
        self._left = state.Left(self._driver.resume_from, self.endpoints.rounds, owed, self.stepping.stream.waiting)

    def restore(self, own: dict[str, Any]) -> None:
        """Go on where a state was saved; refuses one that is not this run's."""
        self._driver.refuse_if_begun()
        if self._island is not None:
            own = state.whole_of_shard(own, self._island.shard)
        self._left = state.restore(own, self._strategy, self.me)
        self._recorder.cannot("it was taken up from a state, which the record does not hold")
        self._driver.restart(self._left.exchanges, self._left.owed)
        self.endpoints.resume(self._left.rounds)
        self.stepping.reset()
        if self._left.waiting:
            warn(
                f"when this state was saved, {self._left.waiting} samples waited on rank {self.me.rank}; samples are "
                "not saved; let the data go on behind this worker's first optimizer.samples_used[rank] samples"
            )

    # All together.

    def average(self) -> None:
        """Make all replicas equal now."""
        elsewhere.stepping()
        elsewhere.count(f"{self._board.name}/average", self._everyone)
        self._refuse_between_averages("average()")
        self._flat.adopt()
        self._recorder.averages(self.me.t, self.stepping.has_begun, self.endpoints.per_node)
        if self.me.size > 1:
            with torch.no_grad():
                self._driver.start()  # as those without data have done
            self._others.average()

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Of what all workers have measured."""
        elsewhere.stepping()
        if self._island is not None:
            raise OffbeatError("mean() is not built for a sharded model; use a collective of your own")
        if self.stepping.has_begun:
            raise OffbeatError("mean() came between backward() and step(); call it after the step")
        self._refuse_between_averages("mean()")
        return self._others.mean(numbers) if self.me.size > 1 else [*numbers]

    def finish(self) -> None:
        """Answer the others until all are done, apply what is in flight, make all replicas equal."""
        if self.is_over:
            return
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, StopIteration) and id(error) != self._handled:
            self.abandon(f"{type(error).__name__}: {error}")
            return
        self._finite.tell(wait=True)
        elsewhere.stepping()
        elsewhere.count(f"{self._board.name}/finish", self._everyone)
        share.settle(self.name)
        self.stats.end()
        with torch.no_grad():
            self._flat.adopt()
            self._driver.start()
            never_stepped = self.stepping.has_begun and not self.stepping.has_stepped
            if self.stepping.has_begun:
                self._recorder.cannot("it ended between backward() and step()")
                self.stepping.give_up()
            self._others.until_all_are_done()
            if self.me.size > 1:
                self._others.take_part()
                self.stats.exchange(self.transport, self.wait_s, self.wire_bytes, self.me.reported.talking)
            self.stats.work = share.in_words(self.name)  # all have told, and the store is there until all have read
            if self.me.size > 1:
                self.transport.agree_on(torch.zeros(1), dist.ReduceOp.SUM, "the others to finish")
        if self._board.losses:
            self._recorder.cannot("workers died in it")
        self._recorder.end(self.me.rank, self._flat.whole())
        self._release()
        self.endpoints.close()
        unused = self.stepping.stream.waiting + self.stepping.stream.samples
        self._give_back()
        self.transport.close()
        if self._island is not None:
            self._island.close()
        self._board.close()
        self._closed()
        self._ended_well = True
        # Last: where warnings are errors, the others are not kept waiting.
        if never_stepped:
            warn(
                "backward() ran in this run, but step() was never called on the attached optimizer, so nothing was "
                "trained together; call step() on what ob.attach returned: optimizer = ob.attach(optimizer, model)"
            )
        if unused:
            warn(
                f"{unused} samples of this worker were never used; loop over optimizer.batches(loader), which hands "
                "them out at the end, with a step() for each batch"
            )

    def abandon(self, message: str) -> None:
        """Leave without waiting for anybody, and tell the others why: they end, too, or with ``on_error="leave"`` they
        go on.
        """
        if self.is_over:
            return
        if notice.has_come():  # what it has failed of may follow: the children of this process may have got it, too
            self._leave(notice.LEFT_AFTER)
        elif self._on_error == "leave" and not self._board.has_failed:
            self._leave(f"failed: {message}")
        else:
            self._abandon(message)
        notice.deliver()

    def leave(self) -> None:
        """Let the others go on without this worker."""
        if not self._board.min_workers:
            raise OffbeatError(
                "leave() came in a run that needs all its workers; end it with finish(), or let the others go on: "
                "ob.attach(…, min_workers=1)"
            )
        self._leave("has left")

    def _leave(self, how: str) -> None:
        if self.is_over:
            return
        self._release()
        self._driver.release()
        self._board.leave(how)  # they go on, before what may take a while
        self.endpoints.hang_up()
        self.transport.park()
        with suppress(RuntimeError):
            self._give_back()
        self._board.abandon()

    def _abandon(self, message: str) -> None:
        self._release()
        for board in self._boards:
            board.fail(message)  # before hanging up, so that whoever notices that finds the reason
        self._driver.release()  # with what it has begun: what has ended well is not parked with the groups
        self.endpoints.abandon()
        with suppress(RuntimeError):  # a device that has failed: its memory is not to be had
            self._give_back()
        self.transport.park()
        for board in self._boards:
            board.abandon()

    @property
    def _boards(self) -> list[Board | Island]:
        return [self._board] if self._island is None else [self._board, self._island]

    def _release(self) -> None:
        self.is_over = True
        if self._saving is not None:
            self._saving.close()
        self._inner_steps.release()
        elsewhere.released(self._board.name)
        share.released(self.name)
        notice.forget(self.name)
        atexit.unregister(self._at_exit)
        self.stepping.release()

    def _give_back(self) -> None:
        """Let go of all memory of the run now. What stays is what it was like, and what a checkpoint holds."""
        self._remember()
        self.stepping.forget()
        for part in (self._driver, self.endpoints, self.me, self._flat):
            part.release()

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.abandon(f"{type(error).__name__}: {error}" if error else "the process ended without finish()")
