"""The host process's part of a checkpoint: in whatever order workers lay down, are late, leave and die."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from offbeat.live.host import checkpoint, saver_server
from offbeat.live.host import protocol as say
from offbeat.live.host.saver_server import LATE_S, SaverServer
from offbeat.live.host.server import Counterparts
from offbeat.live.memory.arena import round_up
from tests.support.clock import Clock
from tests.support.saved import packed

KEY, EVERY_S, WORKERS = "run/saver", 100.0, 3
STATE = b"what the optimizer remembers"


class Arena:
    """Gives places, and counts what it has not got back."""

    def __init__(self) -> None:
        self.memory, self.out, self._end = np.zeros(1 << 16, np.uint8), dict[int, int](), 0

    def take(self, nbytes: int) -> int:
        at, self._end = self._end, self._end + round_up(nbytes, 64)
        self.out[at] = nbytes
        return at

    def give_back(self, at: int, nbytes: int) -> None:
        assert self.out.pop(at) == nbytes

    def bytes_at(self, at: int, nbytes: int) -> Any:
        return self.memory[at : at + nbytes]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(saver_server, "time", found)
    return found


class Run:
    """A server with its workers, and a clock that is set."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.arena, self.heard, self._clock = Arena(), [list[Any]() for _ in range(WORKERS)], clock
        others = Counterparts(KEY, (), WORKERS, "", lambda *_: None)
        plan = {"run": "run", "ranks": [*range(WORKERS)], "min_workers": 1, "folder": str(folder), "every_s": EVERY_S}
        self.server = SaverServer(KEY, {**plan, "about": {"method": "eager()"}}, others, cast(Any, self.arena))
        for worker in range(WORKERS):
            self.server.open(say.OpenChannel(KEY, worker, {}, 0, False, False, 0), self.heard[worker].append)
        self.word = self.heard[0][0].at

    @property
    def due(self) -> int:
        return int.from_bytes(self.arena.bytes_at(self.word, 8).tobytes(), "little")

    def later(self, seconds: float) -> None:
        self._clock.now_s += seconds
        wakes_s = self.server.wakes_s
        if wakes_s is not None and self._clock.now_s >= wakes_s:
            self.server.silence(self._clock.now_s)

    def can(self, worker: int, number: int | None = None) -> Any:
        """It asks for a place; the answer."""
        model = self.model(worker)
        self.server.hear(worker, say.CanSave(KEY, self.due if number is None else number, len(model), len(STATE)))
        return self.heard[worker][-1]

    def model(self, worker: int) -> memoryview:
        return packed({"w": torch.full((4,), float(worker))})

    def has(self, worker: int, here: Any, why: str = "", number: int | None = None) -> None:
        """It has written what there was to write, and says so."""
        model = self.model(worker)
        self.arena.bytes_at(here.at, len(model))[:] = np.frombuffer(model, np.uint8)
        if here.whole:
            self.arena.bytes_at(here.at + round_up(len(model), 64), len(STATE))[:] = np.frombuffer(STATE, np.uint8)
        nbytes = len(STATE) if here.whole else 0
        self.server.hear(worker, say.HasSaved(KEY, self.due if number is None else number, nbytes, 10 + worker, why))

    def lays(self, worker: int) -> None:
        self.has(worker, self.can(worker))

    def settles(self) -> None:
        """What is being written is written."""
        if self.server._writer is not None:
            self.server._writer.join()
        self.later(1.0)


@pytest.fixture
def run(tmp_path: Path, clock: Clock) -> Run:
    run = Run(tmp_path / "checkpoints", clock)
    run.later(EVERY_S + 1)
    assert run.due == 1
    return run


def written(run: Run) -> list[tuple[int, int, float]]:
    """Of which step, of how many models, and what their mean is."""
    found = checkpoint.every(run.server._folder)
    assert all(not one.damage for one in found)
    return [(one.step, one.manifest["models"], float(one.model()["w"][0])) for one in found]


def nothing_is_held(run: Run) -> bool:
    return set(run.arena.out) == {run.word}


@pytest.mark.parametrize("order", [*itertools.permutations(range(WORKERS))], ids=str)
def test_when_all_have_laid_down_their_mean_is_written_with_the_state_of_the_first(
    run: Run, order: tuple[int, ...]
) -> None:
    for worker in order:
        assert written(run) == []
        run.lays(worker)
    run.settles()
    assert written(run) == [(10 + order[0], 3, 1.0)]
    assert (checkpoint.every(run.server._folder)[0].place / checkpoint.STATE).read_bytes() == STATE
    assert nothing_is_held(run)
    assert run.due == 1


def test_none_is_due_before_its_time_and_the_next_one_as_long_after_the_last(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, clock)
    for number in (1, 2, 3):
        run.later(EVERY_S - 2)
        assert run.due == number - 1
        assert run.can(0, number).at == -1
        run.later(4)
        assert run.due == number
        for worker in range(WORKERS):
            run.lays(worker)
        run.settles()
        assert len(written(run)) == min(number, checkpoint.KEPT)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_who_is_late_is_waited_for_a_while_and_then_left_out(run: Run, late: int) -> None:
    there = [worker for worker in range(WORKERS) if worker != late]
    for worker in there:
        run.lays(worker)
    run.later(LATE_S - 2)
    assert run.server._writer is None
    here = run.can(late)  # it begins to, and is stopped
    run.later(4)
    run.settles()
    assert written(run) == [(10 + there[0], 2, sum(there) / 2)]
    assert here.at in run.arena.out, "it may be writing there yet"
    run.later(EVERY_S + 1)
    assert run.can(there[0]).at != here.at
    run.has(late, here, number=1)
    assert here.at not in run.arena.out
    assert len(written(run)) == 1


def test_where_nobody_comes_it_is_tried_anew(run: Run) -> None:
    run.later(EVERY_S + 1)
    assert written(run) == []
    run.later(EVERY_S + 1)
    assert run.due == 2


@pytest.mark.parametrize("ends", ["leave", "bury"])
@pytest.mark.parametrize("when", ["before it asks", "before it has laid", "when it has laid"])
@pytest.mark.parametrize("who", ["the first", "another"])
def test_whoever_ends_is_not_waited_for_and_what_it_has_laid_down_counts(
    run: Run, ends: str, when: str, who: str
) -> None:
    if who == "another":
        run.lays(0)
    if when != "before it asks":
        here = run.can(1)
        assert here.whole == (who == "the first")
        if when == "when it has laid":
            run.has(1, here)
    getattr(run.server, ends)(1)
    if who == "the first":
        run.lays(0)
    run.lays(2)
    run.settles()
    with_it = when == "when it has laid"
    step = 11 if with_it and who == "the first" else 10
    assert written(run) == [(step, 3, 1.0) if with_it else (step, 2, 1.0)]
    assert nothing_is_held(run)


def test_where_the_one_with_the_state_fails_after_all_the_others_no_half_a_checkpoint_is_written(run: Run) -> None:
    here = run.can(0)
    run.lays(1)
    run.lays(2)
    run.server.bury(0)
    assert here.whole
    run.later(EVERY_S + 1)
    assert written(run) == []
    assert nothing_is_held(run)
    run.later(EVERY_S + 1)
    for worker in (1, 2):
        run.lays(worker)
    run.settles()
    assert written(run) == [(11, 2, 1.5)]


def test_a_state_that_cannot_be_packed_is_named_and_another_ones_is_taken(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    run.has(0, run.can(0), why="TypeError: a lambda cannot be packed")
    assert "rank 0: TypeError: a lambda cannot be packed" in capfd.readouterr().err
    for worker in (1, 2, 0):
        run.lays(worker)
    run.settles()
    assert written(run) == [(11, 3, 1.0)]


def test_where_it_cannot_be_written_that_is_said_and_the_next_one_is_tried(
    tmp_path: Path, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    run = Run(tmp_path / "file", clock)
    run.later(EVERY_S + 1)
    for worker in range(WORKERS):
        run.lays(worker)
    run.settles()
    assert f"offbeat: no checkpoint was written to {tmp_path / 'file'}: " in capfd.readouterr().err
    assert nothing_is_held(run)
    (tmp_path / "file").unlink()
    run.later(EVERY_S + 1)
    for worker in range(WORKERS):
        run.lays(worker)
    run.settles()
    assert written(run) == [(10, 3, 1.0)]


def test_closed_in_the_middle_it_holds_nothing(run: Run) -> None:
    run.lays(0)
    run.can(1)
    run.server.close()
    assert run.arena.out == {}


def test_a_message_of_another_kind_is_an_error(run: Run) -> None:
    with pytest.raises(ValueError, match="checkpoints do not know what to do with Nothing"):
        run.server.hear(0, say.Nothing(KEY))
