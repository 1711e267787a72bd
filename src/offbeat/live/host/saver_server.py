"""Checkpoints at the host process: it asks the run's workers on its host for their models, and writes their mean.

Every so often a number in the arena, which all workers can read, says that one is due. Each worker lays its model down
at the end of its next step, in its own time; the first that comes, what its optimiser remembers as well. When all have,
or no more come, a thread writes what is there (`offbeat.live.host.checkpoint`), while the workers compute on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from offbeat.live.host import checkpoint
from offbeat.live.host import protocol as say
from offbeat.live.host.books import Send
from offbeat.live.host.server import Counterparts, Server
from offbeat.live.memory.arena import Arena, round_up

LATE_S = 20.0  # for the others to lay down theirs, when one has
LOOK_S = 0.02  # how often it is looked whether the thread is through
NICE = 10  # what workers compute goes before


class LaidModel(NamedTuple):
    """Where a worker lays its model, and behind it, in ``room``, what else there is of its replica."""

    at: int
    model_bytes: int
    room: int

    @property
    def state_at(self) -> int:
        return self.at + round_up(self.model_bytes, 64)


class Writer(threading.Thread):
    """Writes one checkpoint. Not a daemon: this process ends when it is written."""

    def __init__(self, folder: Path, models: list[memoryview], state: memoryview, about: dict[str, Any]) -> None:
        super().__init__(name="offbeat-saver")
        self._folder, self._models, self._state, self._about = folder, models, state, about
        self.error = ""

    def run(self) -> None:
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            checkpoint.mean(self._models)
            checkpoint.write(self._folder, self._models[0], self._state, self._about)
        except Exception as error:  # a full disk, say: the run goes on, and the checkpoint before stays
            self.error = str(error) or type(error).__name__
        self._models, self._state = [], memoryview(b"")


class SaverServer(Server):
    """One run's. ``plan``: the folder, how often, and what the manifest says of the run."""

    what = "checkpoints"

    def __init__(self, key: str, plan: dict[str, Any], others: Counterparts, arena: Arena) -> None:
        super().__init__(key, plan, others)
        self._folder, self._every_s, self._about = Path(plan["folder"]), float(plan["every_s"]), plan["about"]
        self._arena, self._word_at, self._number = arena, arena.take(8), 0
        self._word = arena.bytes_at(self._word_at, 8)
        self._sends: dict[int, Send] = {}
        self._due_s, self._until_s = time.monotonic() + self._every_s, 0.0
        self._granted: dict[int, LaidModel] = {}
        self._laid: dict[int, LaidModel] = {}
        self._whole: int | None = None  # who lays its replica down, and no model alone
        self._about_state = (0, 0)  # how long what is beside its model is, and of which step
        self._writer: Writer | None = None
        self._look_s = 0.0
        self._say(0)

    def _say(self, number: int) -> None:
        self._word[:] = bytearray(number.to_bytes(8, "little"))

    def open(self, message: say.OpenChannel, send: Send) -> None:
        self._sends[message.worker] = send
        send(say.SaveHere(self.key, self._word_at, False))

    @property
    def _is_asked(self) -> bool:
        """Whether a checkpoint is due whose writing has not begun."""
        return self._due_s == float("inf") and self._writer is None

    def hear(self, worker: int, message: Any) -> None:
        match message:
            case say.CanSave(number=number) if number != self._number or not self._is_asked or worker in self._laid:
                self._sends[worker](say.SaveHere(self.key, -1, False))
            case say.CanSave(model_bytes=model_bytes, state_bytes=state_bytes):
                self._give_back(self._granted.pop(worker, None))  # it had not waited for the answer
                self._whole = worker if self._whole is None else self._whole
                room = round_up(model_bytes, 64) + (state_bytes if self._whole == worker else 0)
                place = self._granted[worker] = LaidModel(self._arena.take(room), model_bytes, room)
                self._sends[worker](say.SaveHere(self.key, place.at, self._whole == worker))
            case say.HasSaved(number=number, state_bytes=state_bytes, step=step, why=why):
                if worker not in self._granted:
                    return
                if number != self._number or not self._is_asked:  # too late
                    self._give_back(self._granted.pop(worker))
                    return
                if why:
                    self._failed(f"rank {self.ranks[worker]}: {why}")
                    self._forget(worker)
                    return
                self._laid[worker] = self._granted.pop(worker)
                if worker == self._whole:
                    self._about_state = state_bytes, step
                self._until_s = min(self._until_s, time.monotonic() + LATE_S)
                self._write_if_all_have()
            case _:
                raise ValueError(f"checkpoints do not know what to do with {message}")

    def leave(self, rank: int, ended: bool = False) -> None:
        super().leave(rank, ended)
        self._forget(rank)

    def bury(self, rank: int) -> None:
        super().bury(rank)
        self._forget(rank)

    def _forget(self, worker: int) -> None:
        """It lays nothing down any more."""
        self._give_back(self._granted.pop(worker, None))
        if worker == self._whole and worker not in self._laid:
            self._whole = None  # the next one that comes; if all the others have come, there is none
        self._write_if_all_have()

    def _give_back(self, place: LaidModel | None) -> None:
        if place is not None:
            self._arena.give_back(place.at, place.room)

    def _write_if_all_have(self) -> None:
        here = set(self._sends) - self._left
        if self._is_asked and self._whole in self._laid and here <= set(self._laid):
            self._write()

    def _write(self) -> None:
        assert self._whole is not None
        places = [self._laid[self._whole], *(one for rank, one in self._laid.items() if rank != self._whole)]
        nbytes, step = self._about_state
        about = {**self._about, "step": step, "workers": len(self._sends) - len(self._dead), "models": len(places)}
        models = [self._memory(one.at, one.model_bytes) for one in places]
        self._writer = Writer(self._folder, models, self._memory(places[0].state_at, nbytes), about)
        self._writer.start()
        self._look_s = time.monotonic() + LOOK_S

    def _memory(self, at: int, nbytes: int) -> memoryview:
        return memoryview(cast(Any, self._arena.bytes_at(at, nbytes)))

    @property
    def wakes_s(self) -> float | None:  # type: ignore[override]
        if self._writer is not None:
            return self._look_s
        return self._until_s if self._is_asked else self._due_s

    def silence(self, now_s: float) -> None:
        if self._writer is not None:
            self._look_s = now_s + LOOK_S
            if not self._writer.is_alive():
                self._has_written(now_s)
        elif not self._is_asked and now_s >= self._due_s:
            self._number += 1
            self._due_s, self._until_s = float("inf"), now_s + max(self._every_s, LATE_S)
            self._say(self._number)
        elif self._is_asked and now_s >= self._until_s:
            if self._whole in self._laid:
                self._write()
            else:
                self._begin_anew(now_s)

    def _has_written(self, now_s: float) -> None:
        assert self._writer is not None
        writer, self._writer = self._writer, None
        self.rounds += not writer.error
        if writer.error:
            self._failed(writer.error)
        self._begin_anew(now_s)

    def _failed(self, why: str) -> None:
        print(f"offbeat: no checkpoint was written to {self._folder}: {why}", file=sys.stderr, flush=True)

    def _begin_anew(self, now_s: float) -> None:
        """Who is late may be writing yet: its place stays its own until it says something, or has gone."""
        for place in self._laid.values():
            self._give_back(place)
        self._laid, self._whole = {}, None
        self._due_s = now_s + self._every_s

    @property
    def is_through(self) -> bool:
        return super().is_through and self._writer is None

    def close(self) -> None:
        """What is being written keeps its memory until this process ends, which it does when it is written."""
        self._word = np.empty(0, np.uint8)  # a part of the arena's would keep it
        self._arena.give_back(self._word_at, 8)
        for place in self._granted.values():
            self._give_back(place)
        if self._writer is None:
            self._begin_anew(0.0)
