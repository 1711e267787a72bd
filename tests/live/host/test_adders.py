"""Sums that are still made when their workers have gone."""

from __future__ import annotations

import threading

import pytest
import torch

from offbeat.live.host import adders
from offbeat.live.host.adders import Adders, Making
from offbeat.live.host.books import Books
from offbeat.live.host.ledger import Expression, Sum, Written
from offbeat.live.memory.arena import Arena, SlotMemory


def test_memory_goes_back_only_when_no_sum_is_made_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adders, "SHORT", 0)
    add, may_go_on = Making.add, threading.Event()

    def add_late(self: Making) -> None:
        assert may_go_on.wait(60)
        add(self)

    monkeypatch.setattr(Making, "add", add_late)
    arena, at_work = Arena(), Adders(lambda: None)
    books = Books(arena, SlotMemory(arena, [(torch.float32, 5)], 0), at_work)
    slot, left = books.slots.take(), []
    books.memory.vec(slot).parts[0].fill_(2.0)
    vector = Expression([(Sum([Expression([(Written(slot), 3.0)])]), 1.0)])
    books.also = lambda: [vector]
    books.make(vector)
    monkeypatch.setattr(arena, "give_back", lambda *_: left.append(vector.totals[0].is_made))
    threading.Timer(0.0, may_go_on.set).start()
    books.close()
    assert left == [True, True]
    at_work.close()
    arena.close()
