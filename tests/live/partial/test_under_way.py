"""On a GPU a sum is there later than the call that asks for it, and its flag goes up behind it.

Meanwhile its adder goes on, and speaks to the hub. Numbers lie in plain memory here, and flags go up when told to.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from offbeat.live.memory.hands import ONE
from offbeat.live.partial.reading import Reader
from offbeat.live.partial.stacks import READS, SEEN, Home
from offbeat.live.partial.told import Answer, Delivery
from offbeat.live.transport.hub import Word, read_frame
from offbeat.tensors.vector import Used, Vec

ME, SUM, MINE, THEIRS = 0, (1, 5), (0, 0), (1, 0)


class Shelves:
    """``flags`` are up; those of ``behind`` will be when the stream has come there."""

    hands, on_device, vector_bytes = ONE, True, 8

    def __init__(self) -> None:
        self.memory = {home: Vec([torch.zeros(2)]) for home in (SUM, MINE, THEIRS)}
        self.flags: dict[tuple[Home, int], int] = {}
        self.behind: list[tuple[tuple[Home, int], int]] = []

    def vec(self, member: int, slot: int) -> Vec:
        return self.memory[member, slot]

    def raise_flag(self, member: int, slot: int, part: int, number: int, waits: bool) -> None:
        assert not waits
        self.behind.append((((member, slot), part), number))

    def raised(self, member: int, slot: int, parts: Iterable[int], number: int) -> bool:
        return all(self.flags.get(((member, slot), part), -1) >= number for part in parts)

    def settle(self) -> None:
        """The stream that the caller asks has come so far: not that of another thread."""

    def comes(self) -> None:
        self.flags.update(self.behind)
        self.behind = []

    def note_used(self, member: int, slot: int, used: Used) -> None:
        """Nobody asks."""

    def used(self, places: Sequence[Home]) -> Used:
        return None

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()


class Side:
    """A worker's side, and the other end of its line."""

    def __init__(self) -> None:
        self.shelves, (line, self._hub) = Shelves(), socket.socketpair()
        board = SimpleNamespace(rank=ME, check=lambda *_: None)
        self.reader = Reader(cast(Any, self.shelves), line, ME, cast(Any, board), 1.0, lambda answer: None, pooled=True)
        self.shelves.memory[MINE].parts[0].fill_(1.0)
        self.shelves.memory[THEIRS].parts[0].fill_(3.0)

    def is_told(self, read: bool | None, summers: tuple[int, ...] = (ME,)) -> Delivery:
        """Of a sum that it is to make of its own deposit and another's, and that is a result."""
        recipe = (SUM, 7, False, False, summers, 2, [[(*MINE, 1.0)], [(*THEIRS, 1.0)]])
        result: Any = ([(-1, 0, 1.0)], (0, True, False, 2, {}))
        return self.reader.make(Answer("needed", None, [recipe], [result], [], [], [], [], []), read)

    def says(self, word: Word) -> list[int]:
        """What it says of each sum that it was lent."""
        self.reader.come_again(word, settled=False)
        frame = read_frame(self._hub)
        assert frame is not None
        assert frame.word is word
        return list(frame.data)

    def close(self) -> None:
        self.reader._line.close()
        self._hub.close()


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.close()


def test_the_slot_of_a_sum_stays_its_adders_until_it_is_there(side: Side) -> None:
    """Else the hub would name it to another, and the adder would write over what that one lays down there."""
    side.is_told(read=True)
    assert side.says(Word.READ) == [READS], "it is read no longer, and still being written"
    assert side.says(Word.READ) == [READS], "and is not forgotten: both count the sums that are lent"
    side.shelves.comes()
    assert side.says(Word.READ) == [SEEN]
    assert side.says(Word.READ) == []


def test_of_a_sum_that_another_has_not_ended_its_own_part_is_all_that_keeps_it(side: Side) -> None:
    """The other may have been stopped; what it owes is not this worker's to keep."""
    side.is_told(read=True, summers=(ME, 1))
    assert side.says(Word.READ) == [READS]
    side.shelves.comes()
    assert side.says(Word.READ) == [0], "it is not there, and this worker neither reads nor writes it"
    assert side.says(Word.READ) == []


def test_a_sum_that_is_told_of_again_while_it_is_under_way_is_not_made_a_second_time(side: Side) -> None:
    """When it is there, its deposits may be written over; a second sum behind the first would be one of these."""
    side.is_told(read=None)
    side.is_told(read=None)
    assert len(side.shelves.behind) == 1


def test_who_makes_a_sum_and_reads_it_in_the_same_stream_waits_for_nothing(side: Side) -> None:
    told = side.is_told(read=True)
    assert side.reader.sums.read(told) == [side.shelves.memory[SUM]], "where it lies, not in memory of its own"
    assert not side.shelves.flags, "its flag is not up yet"


def test_who_reads_it_in_another_stream_waits_for_its_flag(side: Side) -> None:
    told = side.is_told(read=None)
    assert not side.reader.sums.all_there(told)
    side.reader.sums.find(told)
    assert not told.made
    side.shelves.comes()
    assert side.reader.sums.all_there(told)
    side.reader.sums.find(told)
    assert told.made[0].parts[0].tolist() == [2.0, 2.0]


def test_its_deposits_stay_where_they_are_until_it_is_there(side: Side) -> None:
    told = side.is_told(read=None)
    side.reader._own.free_when_there([(told.sums[0], MINE)])
    side.reader._own.set_aside(MINE)
    assert side.reader._own.look() == 0
    assert side.reader._own.one(lambda: ()) is None
    side.shelves.comes()
    side.reader._own.look()
    assert side.reader._own.one(lambda: ()) == MINE
