"""A worker's end of the facts of a run, and of its bell, at the host process.

It has no thread. What the others have said waits in the worker's line, and is heard whenever the worker looks: before
it says something, and while it waits. What it is doing, its page shows to whoever asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.basics.units import format_ranks
from offbeat.live.host import protocol as say
from offbeat.live.host.facts_server import progress_of, with_twin
from offbeat.live.transport.errors import OffbeatError, PeerFailed
from offbeat.live.transport.notice import LEFT_AFTER
from offbeat.live.worker.line import Line

ANSWER_S = 2.0  # for all host processes to say what their workers are doing
LEAVE_S = 1.0  # for the host process to have heard all that a worker who leaves has handed in


class Failure(NamedTuple):
    """What ended the run for the others: a worker's last words, or that it vanished without any.

    ``after_notice``: it has left since its process was asked to end.
    """

    words: str
    vanished: bool
    after_notice: bool = False


class Loss(NamedTuple):
    """A worker that the others went on without: when this one heard of its death, and of its return; None: of none."""

    rank: int
    at_s: float
    back_s: float | None = None


class RunFacts:
    """Of one run. ``called``: the number under which the script knows a rank of ours."""

    def __init__(self, run: str, line: Line, rank: int, plan: dict[str, Any], called: Callable[[int], int]) -> None:
        self._key, self._line, self._rank, self._called = f"{run}/facts", line, rank, called
        self._facts: dict[str, str] = {}
        self.dead: dict[int, float] = {}  # workers without whom the others go on, and when this one heard of it
        self.losses: list[Loss] = []
        self.wanted = 0  # so many have returned, and want a replica
        self._handing: int | None = None  # where this worker's may lie, as it was answered last; -1: nowhere
        self._said_by_then: dict[str, str] = {}  # how far this worker had said to be when it laid its replica down
        self._replica: say.TakeHere | say.NoReturn | None = None  # for this worker
        self._failure: Failure | None = None  # the first one stays
        self._answers: dict[int, dict[int, str]] = {}
        self._questions = 0
        self._over = self._asked = False
        self._word = line.join(self._key, self._is_news)
        self._shown: NDArray[np.uint64] | None = line.arena.words_of(line.page)
        self._shown[self._word] = 0
        line.send(say.OpenChannel(self._key, rank, {**plan, "what": "facts"}, 0, False, False, self._word))

    @property
    def facts(self) -> dict[str, str]:
        """What is known, with all that has come by now."""
        self.hear(0.0)
        return self._facts

    @property
    def failure(self) -> Failure | None:
        self.hear(0.0)
        return self._failure

    def _is_news(self, message: Any) -> bool:
        """Whether a wait for something else is to end."""
        return isinstance(message, say.Failed | say.Gone | say.HostGone)

    def hear(self, seconds: float) -> bool:
        """Whether something has come; waits no longer than that for it."""
        if self._over:
            return False
        try:
            message = self._line.heard_within(self._key, seconds)
            found = message is not None
            while message is not None:
                self._hear(message)
                message = self._line.heard_within(self._key, 0.0)
        except PeerFailed as error:
            self._failure = self._failure or Failure(str(error), vanished=True)
            return True
        return found

    def _hear(self, message: Any) -> None:
        match message:
            case say.Fact(name=name, value=value):
                self._facts[name] = value
            case say.Failed(worker=worker, words=words):
                failure = Failure(f"rank {self._called(worker)} failed: {words}", vanished=False)
                self._failure = self._failure or failure
            case say.Gone(worker=worker, goes_on=True):
                self._go_on_without(worker)
            case say.HostGone(workers=workers, goes_on=True):
                for worker in workers:
                    self._go_on_without(worker)
            case say.HostGone(workers=workers, words=why):
                ranks = format_ranks([self._called(worker) for worker in workers])
                words = f"the host of {ranks} is lost: {why}"
                self._failure = self._failure or Failure(words, vanished=True)
            case say.Gone(worker=worker, ended=ended, why=and_so, said=said):
                why = "the process has ended" if ended else "its connection has closed"
                words = f"rank {self._called(worker)} {said or f'gives no sign of life: {why}'}"
                words = f"{words}; {and_so}" if and_so else words
                self._failure = self._failure or Failure(words, not said, said == LEFT_AFTER)
            case say.Wanted(many=many):
                self.wanted = many
            case say.HandHere(at=at):
                self._handing = at
            case say.Returned(worker=worker, twin_of=other):
                self.dead.pop(worker, None)
                self.losses = [
                    one._replace(back_s=time.monotonic()) if one.rank == worker and one.back_s is None else one
                    for one in self.losses
                ]
                own = other == self._rank
                told = self._said_by_then if own else progress_of(self._facts, other)
                self._facts = with_twin(self._facts, told, worker)
            case say.TakeHere() | say.NoReturn():
                self._replica = message
            case say.Doing(number=number, said=said):
                self._answers[number] = dict(said)

    def _go_on_without(self, worker: int) -> None:
        self.dead[worker] = time.monotonic()
        if worker != self._rank:  # else its predecessor
            self.losses.append(Loss(worker, self.dead[worker]))
        self._facts[f"done/{worker}"] = str(int(self._facts.get(f"reached/{worker}", "-1")) + 1)
        self._facts["done"] = "1"

    def post(self, name: str, value: str) -> None:
        """A fact, known here at once and to the others soon."""
        self._facts[name] = value
        self._say(say.Post(self._key, name, value))

    def post_attached(self) -> None:
        """A fact that is known here when it is known to all, whatever becomes of this host."""
        self._say(say.Post(self._key, f"{say.ATTACHED}/{self._rank}", "1"))

    def fail(self, words: str) -> None:
        """My last words to the others; nothing where they have failed before me, and know."""
        if self.failure is None:
            self._say(say.Fail(self._key, words))

    def leave(self, how: str) -> None:
        """The others go on without this worker. Waits a moment until what it has handed in has been heard: on a GPU
        some of it may be on its way.
        """
        end_s = time.monotonic() + LEAVE_S
        with suppress(OffbeatError):
            self._line.send(say.Leave(self._key, how))
            while (left_s := end_s - time.monotonic()) > 0:
                message = self._line.heard_within(self._key, left_s)
                if isinstance(message, say.Gone) and message.worker == self._rank:
                    return

    # Coming back.

    def returns(self) -> say.TakeHere | say.NoReturn | None:
        """Where a member's replica lies for this worker, which comes in place of a dead one, once that is known.

        The first call asks for it.
        """
        if self._replica is None and not self._asked:
            self._asked = True
            self._say(say.Returns(self._key))
        self.hear(0.0)
        return self._replica

    def has_taken(self) -> None:
        self._say(say.HasTaken(self._key))

    def place_for(self, nbytes: int, within_s: float = ANSWER_S) -> int | None:
        """This worker is between two steps: where in the arena its replica is to lie; None: nowhere now."""
        self._handing = None
        self._say(say.CanHand(self._key, nbytes))
        end_s = time.monotonic() + within_s
        while self._handing is None and self._failure is None and (left_s := end_s - time.monotonic()) > 0:
            self.hear(left_s)
        return None if self._handing in (None, -1) else self._handing

    def handed(self, nbytes: int, page: int, why: str = "") -> None:
        """It lies there."""
        self._said_by_then = progress_of(self._facts, self._rank)
        self._say(say.Handed(self._key, nbytes, page, why))

    def ask_all(self, size: int, within_s: float = ANSWER_S) -> dict[int, str]:
        """What each rank is doing; one that is not in it is stopped."""
        self._questions += 1
        number, end_s = self._questions, time.monotonic() + within_s
        self._say(say.Ask(self._key, number))
        while number not in self._answers and self._failure is None and (left_s := end_s - time.monotonic()) > 0:
            self.hear(left_s)
        return self._answers.pop(number, {})

    def took_steps(self, steps: int) -> None:
        """So many, which the host process shows to whoever looks."""
        if self._shown is not None:
            self._shown[self._word] = steps

    def close(self) -> None:
        """All are through."""
        self._leave(say.Bye(self._key))

    def abandon(self) -> None:
        """Hang up; what there was to say has been said."""
        self._leave(None)

    def _leave(self, farewell: Any) -> None:
        if not self._over:
            if farewell is not None:
                self._say(farewell)
            self._say(say.Close(self._key))
            self._over, self._shown = True, None  # a part of the arena's would keep it
            self._line.part(self._key, self._word)

    def _say(self, message: Any) -> None:
        if not self._over:
            with suppress(PeerFailed):  # whoever looks next hears so
                self._line.send(message)


class HostBell:
    """This worker's ear and hand at the bell: the ear reads one number, in memory that all see."""

    waited_s = 0.0

    def __init__(self, run: str, line: Line, rank: int, plan: dict[str, Any], wait: Callable[[str, Line], Any]) -> None:
        self._key, self._line, self._mine = f"{run}/bell", line, -1
        self._word = line.join(self._key)
        line.send(say.OpenChannel(self._key, rank, {**plan, "what": "bell"}, 0, False, False, self._word))
        self._rung: NDArray[np.uint8] | None = line.arena.bytes_at(wait(self._key, line).about, 8)
        self._over, self._last = False, -1

    @property
    def rung(self) -> int:
        """The last round whose bell has rung; −1: none has."""
        return self._last if self._rung is None else int.from_bytes(self._rung.tobytes(), "little") - 1

    def ring(self, r: int, workers: int) -> None:
        """I am through my batch of round ``r``; the bell rings when ``workers`` are."""
        if r > max(self.rung, self._mine):
            self._mine = r  # once a round: a step that is given up and made anew must not count as two workers
            self._line.send(say.Ring(self._key, r, workers))

    def close(self) -> None:
        if not self._over:
            self._over = True
            with suppress(PeerFailed):
                self._line.send(say.Close(self._key))
            self._line.part(self._key, self._word)
            self._last, self._rung = self.rung, None

    def release(self) -> None:
        """Nothing is kept."""

    def abandon(self) -> None:
        self.close()


class HostSaver:
    """This worker's end of the run's checkpoints: it reads one number, and lays down what is asked for."""

    def __init__(
        self, run: str, line: Line, worker: int, plan: dict[str, Any], wait: Callable[[str, Line], Any]
    ) -> None:
        self._key, self.line, self._wait = f"{run}/saver", line, wait
        self._word = line.join(self._key)
        line.send(say.OpenChannel(self._key, worker, {**plan, "what": "saver"}, 0, False, False, self._word))
        self._due: NDArray[np.uint8] | None = line.arena.bytes_at(wait(self._key, line).at, 8)
        self._last = self._number

    @property
    def _number(self) -> int:
        return 0 if self._due is None else int.from_bytes(self._due.tobytes(), "little")

    @property
    def due(self) -> int:
        """The number of the checkpoint that this worker is asked for; 0: of none."""
        number = self._number
        return number if number > self._last else 0

    def place(self, model_bytes: int, state_bytes: int) -> tuple[int, bool] | None:
        """Where in the arena it is to lie, and whether with the state; None: nowhere."""
        self._last = self._number
        self.line.send(say.CanSave(self._key, self._last, model_bytes, state_bytes))
        here = self._wait(self._key, self.line)
        return None if here.at < 0 else (here.at, here.whole)

    def has_saved(self, state_bytes: int, step: int, why: str = "") -> None:
        self.line.send(say.HasSaved(self._key, self._last, state_bytes, step, why))

    def close(self) -> None:
        if self._due is not None:
            self._due = None
            with suppress(PeerFailed):
                self.line.send(say.Close(self._key))
            self.line.part(self._key, self._word)
