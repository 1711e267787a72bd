"""What a worker without data does depends on what the others say, and not on when it hears it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore

from offbeat.live.attached.others import Others
from offbeat.live.worker.board import Board
from offbeat.method.effects import Turn

OWN_STEPS = 10  # this worker's data has ended after so many
NEWS = [{"reached/0": "10"}, {"reached/0": "11"}, {"reached/0": "12"}, {"done/0": "13", "done": "1"}]


class SlowNews:
    """The facts of a run, of which one more is heard at each of these looks."""

    failure = None

    def __init__(self, at: tuple[int, ...]) -> None:
        self._at, self._looks, self._known = at, 0, dict[str, str]()
        self.dead: dict[int, float] = {}

    @property
    def facts(self) -> dict[str, str]:
        self._looks += 1
        for look, news in zip(self._at, NEWS, strict=True):
            if look <= self._looks:
                self._known.update(news)
        return self._known

    def post(self, name: str, value: str) -> None:
        self._known[name] = value


def turns(news: SlowNews) -> list[Turn]:
    """What it does until its strategy has ended."""
    taken: list[Turn] = []
    me = SimpleNamespace(t=OWN_STEPS)
    driver = SimpleNamespace(me=me, asks=object())

    def turn(what: Turn) -> None:
        taken.append(what)
        if what is Turn.STOP:
            driver.asks = None
        else:
            me.t += 1

    def until(ready: Callable[[], bool], what: str, bears: bool) -> None:
        assert any(ready() for _ in range(100)), "it waits for ever"

    driver.turn = turn
    board = Board(HashStore(), "run", rank=1, size=2)
    board._link = cast(Any, news)
    others = Others(
        flat=cast(Any, None),
        board=board,
        transport=cast(Any, SimpleNamespace(waiter=SimpleNamespace(until=until))),
        driver=cast(Any, driver),
        endpoints=cast(Any, SimpleNamespace(has_channel=True, finished=lambda: None)),
        stepping=cast(Any, SimpleNamespace(without_data=lambda: None)),
        idled=lambda: None,
    )
    others.until_all_are_done()
    return taken


# Every look but the first may be the one at which one or several of the news are heard.
WHEN = [(a, b, c, d) for a in range(1, 4) for b in range(a, a + 6) for c in range(b, b + 6) for d in range(c, c + 6)]


@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_worker_without_data_takes_all_steps_of_the_others_whenever_it_hears_of_them(first: int) -> None:
    for at in WHEN:
        if at[0] == first:
            assert turns(SlowNews(at)) == [Turn.IDLE] * 3 + [Turn.STOP], f"heard at its looks {at}"
