"""The bell of non-blocking SGD, by itself."""

from __future__ import annotations

import socket
import time
from typing import Any, cast

from offbeat.live.partial.bell import Bell
from offbeat.live.transport.hub import Frame, Word, read_frame


def test_the_ear_keeps_the_latest_round_and_the_hand_rings_once_a_round() -> None:
    class OfRank3:
        rank = 3

    here, there = socket.socketpair()
    bell = Bell(here, cast(Any, OfRank3()), patience_s=5)
    try:
        for r in (5, 3):  # the bell of round 3 comes late
            there.sendall(Frame(Word.RUNG, 0, r).pack())
        for r in (5, 6, 6, 7):
            while bell.rung < 5:
                time.sleep(0.001)
            bell.ring(r, 2)
        there.sendall(Frame(Word.FLUSH, 0).pack())
        bell.close()
        assert bell.rung == 5
        rung = [read_frame(there), read_frame(there)]
        assert [frame.a for frame in rung if frame] == [6, 7]
        assert read_frame(there) is None
    finally:
        there.close()
