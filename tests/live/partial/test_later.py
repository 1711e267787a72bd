"""On a GPU a second thread says that results are read no longer: when they are, and never of newer ones."""

from __future__ import annotations

import threading
from typing import Any, cast

from offbeat.live.partial.later import Later
from tests.support.streams import SOON_S, Mark


class Worker:
    """Its reader and its shelves."""

    def __init__(self) -> None:
        self.is_reading, self.marks, self.given_back = True, list[Mark](), 0
        self.said, self.has_said = list[str](), threading.Event()
        self.later = Later(cast(Any, self), cast(Any, self))

    def mark(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]

    def let_go(self, settled: bool) -> None:
        assert not settled, "the stream has come so far, and need not be waited for"
        self.said.append("read")
        self.has_said.set()

    def give_back(self) -> None:
        self.given_back += 1


def test_it_is_said_when_the_stream_has_come_so_far() -> None:
    worker = Worker()
    worker.later.let_go()
    worker.later.let_go()  # a worker goes back to its own loop twice a step
    (mark,) = worker.marks
    assert mark.waited_for.wait(SOON_S)
    assert worker.said == []
    mark.reached.set()
    assert worker.has_said.wait(SOON_S)
    worker.is_reading = False
    worker.later.let_go()
    assert worker.said == ["read"]
    assert len(worker.marks) == 1
    assert worker.given_back == 3, "what it has laid down need not wait for that"
    assert worker.later.end()


def test_it_is_not_said_when_the_worker_has_come_again_meanwhile() -> None:
    worker = Worker()
    worker.later.let_go()
    (old,) = worker.marks
    assert old.waited_for.wait(SOON_S)
    worker.later.hush()
    old.reached.set()
    worker.later.let_go()
    assert worker.marks[1].waited_for.wait(SOON_S), "the thread is through with the first"
    assert worker.said == []
    worker.marks[1].reached.set()
    assert worker.has_said.wait(SOON_S)
    assert worker.later.end()
    assert worker.said == ["read"]
