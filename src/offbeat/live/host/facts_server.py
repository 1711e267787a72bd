"""Small facts of a run at the host process: who is done, who asks for an average, who has failed, who is gone.

All workers of a run hear all facts, in one order: whoever knows a fact knows everything that its author knew. What is
known before a worker comes, it is told when it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offbeat.live.host import protocol as say
from offbeat.live.host.books import Send
from offbeat.live.memory.arena import Arena
from offbeat.rounds.bell import Rope


class FactsServer:
    """One run's. ``doing`` says in words what a worker is doing; None: its process is stopped."""

    wakes_s: float | None = None

    def __init__(self, key: str, plan: dict[str, Any], doing: Callable[[str, int], str | None]) -> None:
        self.key, self.run, self._size, self._doing = key, str(plan["run"]), int(plan["size"]), doing
        self._facts: dict[str, str] = {}
        self._sends: dict[int, Send] = {}
        self._lost: list[Any] = []  # what is said of those who have failed, or are gone
        self._left: set[int] = set()
        self._ended: set[int] = set()

    def open(self, message: say.OpenChannel, send: Send) -> None:
        self._sends[message.worker] = send
        for name, value in self._facts.items():
            send(say.Fact(self.key, name, value))
        for one in self._lost:
            send(one)

    def hear(self, worker: int, message: Any) -> None:
        match message:
            case say.Post(name=name, value=value):
                self._facts[name] = value
                self._tell(say.Fact(self.key, name, value), but=worker)
            case say.Fail(words=words):
                self._ended.add(worker)
                self._miss(say.Failed(self.key, worker, words), worker)
            case say.Bye():
                self._ended.add(worker)
            case say.Ask(number=number):
                found = [(one, self._doing(self.key, one)) for one in self._sends]
                said = [(one, doing) for one, doing in found if doing is not None]
                self._sends[worker](say.Doing(self.key, number, said))
            case _:
                raise ValueError(f"a run's facts do not know what to do with {message}")

    def _tell(self, message: Any, but: int) -> None:
        for worker, send in self._sends.items():
            if worker != but and worker not in self._left:
                send(message)

    def _miss(self, message: Any, worker: int) -> None:
        self._lost.append(message)
        self._tell(message, but=worker)

    def leave(self, worker: int, ended: bool = False) -> bool:
        """Whether all have left. ``ended``: its process has."""
        if worker not in self._ended and worker not in self._left:
            self._miss(say.Gone(self.key, worker, ended), worker)
        self._left.add(worker)
        return len(self._left) == self._size

    def waits_for(self, worker: int) -> tuple[int, int]:
        return 0, 0

    def silence(self, now_s: float) -> None:
        """Nothing waits for time."""

    def flush(self) -> None:
        """All has been sent."""

    def close(self) -> None:
        self._sends = {}


class BellServer:
    """The bell of a run: a number in the arena, 1 + the last round whose bell has rung, which all workers can read."""

    wakes_s: float | None = None

    def __init__(self, key: str, plan: dict[str, Any], arena: Arena) -> None:
        self.key, self.run, self._size, self._rope = key, str(plan["run"]), int(plan["size"]), Rope()
        self._arena, self._place = arena, arena.take(8)
        self._word = arena.bytes_at(self._place, 8)
        self._word[:] = 0
        self._left: set[int] = set()

    def open(self, message: say.OpenChannel, send: Send) -> None:
        send(say.Answer(self.key, 1, "open", self._place, 0, [], [], [], {}, [], []))

    def hear(self, worker: int, message: Any) -> None:
        if isinstance(message, say.Ring) and self._rope.pull(message.r, message.workers):
            self._word[:] = bytearray((message.r + 1).to_bytes(8, "little"))

    def leave(self, worker: int, ended: bool = False) -> bool:
        self._left.add(worker)
        return len(self._left) == self._size

    def waits_for(self, worker: int) -> tuple[int, int]:
        return 0, 0

    def silence(self, now_s: float) -> None:
        """Nothing waits for time."""

    def flush(self) -> None:
        """Nobody is answered."""

    def close(self) -> None:
        self._word = self._word[:0]
        self._arena.give_back(self._place, 8)
