"""A worker that looks ahead tells the hub when it has read what it took, and never of what it reads just then.

Its second thread says so in its own time; here it is called in every order that its time allows, without a thread.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offbeat.live.partial.ahead import Ahead
from offbeat.live.partial.told import Answer, Delivery
from offbeat.live.transport.hub import Word
from tests.support.streams import SOON_S, Mark


class Reader:
    """Writes down what is said to the hub. Something is read from the moment that it is said to be."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.is_reading = False
        self.listens: Any = None
        self.answer: Any = None

    def come_again(self, word: Word, a: int = 0, b: int = 0, c: int = -1, reads: Sequence[Delivery] = ()) -> None:
        self.said.append(word.name)
        self.is_reading = bool(reads)


class Shelves:
    """``marks``: where the stream is after each thing that it was asked for; without any, all of it is there."""

    on_device = False

    def __init__(self, marks: Sequence[Mark] = ()) -> None:
        self.marks = list(marks)

    def mark(self) -> Mark | None:
        return self.marks.pop(0) if self.marks else None

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def ahead() -> Iterator[SimpleNamespace]:
    one, other = socket.socketpair()
    reader = Reader()
    made = Ahead(cast(Any, reader), cast(Any, Shelves()), one, cast(Any, None), after_steps=False)
    made._thread = cast(Any, SimpleNamespace(join=lambda seconds: None, is_alive=lambda: False))
    yield SimpleNamespace(made=made, said=reader.said)
    made.end()
    one.close()
    other.close()


def hand_in(ahead: SimpleNamespace, step: int) -> None:
    told = Delivery(Answer("needed", None, [], [([], None)], [], [], [], [], []), [], 0.0)
    ahead.made.hand_in(step, step, [told], at_once=True)


def test_what_was_read_is_told_once_when_the_step_is_over(ahead: SimpleNamespace) -> None:
    hand_in(ahead, 0)
    ahead.made.has_read()
    ahead.made.has_read()  # a worker goes back to its own loop twice a step
    ahead.made._say_read()
    ahead.made.has_read()
    ahead.made._say_read()
    assert ahead.said == ["OFFER", "READ"]


def test_said_too_late_it_is_not_said_of_what_is_read_by_then(ahead: SimpleNamespace) -> None:
    hand_in(ahead, 0)
    ahead.made.has_read()
    hand_in(ahead, 1)  # before the second thread came to it
    ahead.made._say_read()
    assert ahead.said == ["OFFER", "OFFER"]
    ahead.made.has_read()
    ahead.made._say_read()
    assert ahead.said == ["OFFER", "OFFER", "READ"]


def test_while_the_worker_speaks_to_the_hub_the_second_thread_says_nothing(ahead: SimpleNamespace) -> None:
    hand_in(ahead, 0)
    ahead.made.has_read()
    ahead.made.hush()
    ahead.made._say_read()
    assert ahead.said == ["OFFER"]


def test_nothing_is_told_before_what_was_handed_in_is(ahead: SimpleNamespace) -> None:
    told = Delivery(Answer("needed", None, [], [([], None)], [], [], [], [], []), [], 0.0)
    ahead.made.hand_in(0, 0, [told], at_once=False)  # the second thread has not come to say it
    ahead.made.has_read()
    ahead.made._say_read()
    assert ahead.said == []
    ahead.made._say()
    ahead.made._say_read()
    assert ahead.said == ["OFFER", "READ"]


def test_an_answer_is_heard_though_the_step_is_not_over() -> None:
    """The thread slept when the worker handed in, and is woken after the step; the worker asks for room before that."""
    one, other = socket.socketpair()
    reader, heard = Reader(), Answer("room", None, [], [], [], [], [], [], [])
    made = Ahead(cast(Any, reader), cast(Any, Shelves()), one, cast(Any, SimpleNamespace(check=lambda _: None)), True)
    made._thread = thread = threading.Thread(target=made._run, daemon=True)
    reader.answer = lambda: one.recv(1) and heard
    thread.start()
    made.hand_in(0, 0, [], at_once=False)
    other.sendall(b".")
    asked = threading.Thread(target=lambda: reader.said.append(reader.listens("room").how), daemon=True)
    asked.start()
    asked.join(10.0)
    assert "room" in reader.said
    assert made.end()
    one.close()
    other.close()


def test_what_is_asked_for_is_answered_though_the_gpu_has_not_come_to_what_was_handed_in() -> None:
    """On a GPU what was handed in is there only later. The thread that is to say so hears answers meanwhile."""
    one, other = socket.socketpair()
    reader, heard, marks = Reader(), Answer("room", None, [], [], [], [], [], [], []), [Mark(), Mark()]
    board, shelves = SimpleNamespace(check=lambda _: None), Shelves(marks)
    made = Ahead(cast(Any, reader), cast(Any, shelves), one, cast(Any, board), after_steps=False)
    made._thread = thread = threading.Thread(target=made._run, daemon=True)
    reader.answer = lambda: one.recv(1) and heard
    thread.start()
    made.hand_in(0, 0, [], at_once=False)
    made.has_read()
    assert marks[0].waited_for.wait(SOON_S)
    other.sendall(b".")
    asked = threading.Thread(target=lambda: reader.said.append(reader.listens("room").how), daemon=True)
    asked.start()
    asked.join(SOON_S)
    assert reader.said == ["room"]
    marks[0].reached.set()
    assert made.said_within(SOON_S)
    assert reader.said == ["room", "OFFER"]
    marks[1].reached.set()
    assert made.end()
    one.close()
    other.close()
