"""A thread waits for a GPU, so that whoever wants to know when it has come so far need not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from offbeat.live.partial import marks
from offbeat.live.partial.marks import Marks
from tests.support.streams import SOON_S, Mark


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_each_word_comes_when_its_mark_is_there_and_none_before_an_earlier_one(pipe: tuple[int, int]) -> None:
    read, written = pipe
    os.set_blocking(read, False)
    waiting, first, second = Marks(written), Mark(), Mark()
    waiting.wait_for(first, b"a")
    waiting.wait_for(second, b"b")
    second.reached.set()
    assert first.waited_for.wait(SOON_S)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    first.reached.set()
    assert waiting.end()
    assert os.read(read, 9) == b"ab"


def test_what_is_there_is_said_at_once_without_a_thread(pipe: tuple[int, int]) -> None:
    read, written = pipe
    waiting = Marks(written)
    waiting.wait_for(None, b"a")
    assert os.read(read, 9) == b"a"
    assert waiting.end()


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_of_a_gpu_that_has_failed_the_word_comes_too(pipe: tuple[int, int]) -> None:
    """Else whoever waits for it would wait for ever; when it looks itself, it hears the error."""
    read, written = pipe
    waiting = Marks(written)
    waiting.wait_for(Broken(), b"a")
    assert os.read(read, 9) == b"a"
    assert waiting.end()


def test_a_gpu_that_never_comes_so_far_is_not_waited_for_at_the_end(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marks, "LEAVE_S", 0.1)
    waiting, mark = Marks(pipe[1]), Mark()
    waiting.wait_for(mark, b"a")
    assert not waiting.end()
    mark.reached.set()
    assert waiting.end()
