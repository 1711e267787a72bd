"""A thread waits for a GPU, so that whoever wants to know when it has come so far need not."""

from __future__ import annotations

import threading

import pytest

from offbeat.live.partial import marks
from offbeat.live.partial.marks import Marks
from tests.support.streams import SOON_S, Mark


def test_each_is_called_when_its_mark_is_there_and_none_before_an_earlier_one() -> None:
    waiting, first, second, called = Marks(), Mark(), Mark(), list[str]()
    waiting.wait_for(first, lambda: called.append("a"))
    waiting.wait_for(second, lambda: called.append("b"))
    second.reached.set()
    assert first.waited_for.wait(SOON_S)
    assert called == []
    first.reached.set()
    assert waiting.end()
    assert called == ["a", "b"]


def test_for_what_is_there_nobody_waits() -> None:
    waiting, called = Marks(), list[threading.Thread]()
    waiting.wait_for(None, lambda: called.append(threading.current_thread()))
    assert called == [threading.current_thread()]
    assert waiting.end()


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_of_a_gpu_that_has_failed_it_is_called_too() -> None:
    """Else whoever waits for that would wait for ever; when it looks itself, it hears the error."""
    waiting, called = Marks(), threading.Event()
    waiting.wait_for(Broken(), called.set)
    assert called.wait(SOON_S)
    assert waiting.end()


def test_a_gpu_that_never_comes_so_far_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "LEAVE_S", 0.1)
    waiting, mark = Marks(), Mark()
    waiting.wait_for(mark, lambda: None)
    assert not waiting.end()
    mark.reached.set()
    assert waiting.end()
