"""How a worker writes vectors into slots of the arena, and reads what lies there.

On the host both are done when the call returns. On a GPU they are done when a stream has come so far, and the worker
does not wait for that: behind its work the stream writes a number into a word of the worker's page (`due`), and the
host process takes a message as said when the word has come to the number that it names.

Where a worker's vectors lie on a GPU and the slots in memory of the host, vectors pass through *stages*: memory on the
GPU from which, and to which, a stream of its own copies. So a gradient may change as soon as it has been copied on the
GPU itself, and the copy to the host goes on beside the computation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.live.host.protocol import Ref
from offbeat.live.memory.adding import Unadded, lay
from offbeat.live.memory.arena import PAGE_BYTES, WORDS_AT, DeviceSlots, Kinds, Mapping, Shard, SlotMemory
from offbeat.live.memory.device import StreamWords, call_driver
from offbeat.live.worker.line import Line
from offbeat.tensors.vector import Vec, Way


class OnHost:
    """Vectors and slots in memory of the host."""

    keeps = True  # what is to be kept until a way from it is written can lie in the slot of that way

    def __init__(self, memory: SlotMemory) -> None:
        self.memory = memory

    def write(self, x: Vec, slot: int) -> None:
        """Let a slot hold ``x``."""
        lay(x, self.memory.vec(slot))
        self.memory.note_used(slot, x.used)

    def write_way(self, way: Way, slot: int) -> None:
        """Let the slot in which a way begins hold that way."""
        self.write(way, slot)

    def own(self, x: Vec, memory: Vec | None) -> Vec:
        """``x`` as a slot would hold it, in memory of this worker's."""
        return x.put_into(self._new() if memory is None else memory)

    def read(self, refs: Sequence[Ref], plus: int | Vec | None = None) -> Vec:
        """What these slots hold together, ``plus`` what this worker has brought, to be read before it submits more."""
        terms = [(self._vec(slot), f) for slot, f in refs]
        if plus is not None:
            terms.append((plus if isinstance(plus, Vec) else self._vec(plus), 1.0))
        slots = [slot for slot, _ in refs]
        if len(terms) == 1 and terms[0][1] == 1.0:
            vec = terms[0][0]
            vec.used = self.memory.used(slots)
            return vec
        return Unadded(terms, self.memory.used(slots), self._room)

    def _vec(self, slot: int) -> Vec:
        return self.memory.vec(slot)

    def _room(self) -> Vec:
        return self._new()

    def _new(self) -> Vec:
        return Vec([torch.empty(n, dtype=dtype) for dtype, n in self.memory.kinds])

    def fetch(self, slots: Sequence[int]) -> None:
        """These will be read soon: bring them where the worker's vectors are, beside what it computes."""

    @property
    def is_fetched(self) -> bool:
        """Whether they are there."""
        return True

    def each(self, slots: Sequence[int]) -> list[Vec]:
        """These by themselves."""
        return [self._vec(slot) for slot in slots]

    def room(self, slot: int) -> Vec:
        """Memory of a slot, to be written to; `wrote` says that it is."""
        return self.memory.vec(slot)

    def wrote(self, slots: Sequence[int]) -> None:
        """What was put into the room of these is theirs now."""

    def due(self) -> int:
        """The number of what has been asked for so far; 0: it is done."""
        return 0

    def released(self) -> None:
        """What this worker has brought may be overwritten."""

    def close(self) -> None:
        self.memory.forget()


class _Words:
    """The word of a worker's page that its streams write."""

    def __init__(self, line: Line, word: int, device: torch.device) -> None:
        self._word, self._number, self._device = line.arena.words_of(line.page)[word : word + 1], 0, device
        self._word[0] = 0
        self._index = WORDS_AT // 8 + word
        self._by_streams: StreamWords | None = None
        try:
            self._by_streams = StreamWords([line.arena.bytes_at(line.page, 1).ctypes.data], PAGE_BYTES, device)
        except OSError:  # another channel of this process has registered the page, or the driver cannot
            self._by_streams = None

    def write(self, stream: Any) -> int:
        """Behind all that ``stream`` was asked for."""
        self._number += 1
        if self._by_streams is not None:
            with torch.cuda.stream(stream):
                self._by_streams.write(0, self._index, self._number)
        else:
            stream.synchronize()
            self._word[0] = self._number
        return self._number

    def close(self) -> None:
        if self._by_streams is not None:
            torch.cuda.synchronize(self._device)
            self._by_streams.close()


class OnDevice(OnHost):
    """Vectors on a GPU, and slots there, or on others that it reads and writes directly."""

    def __init__(self, memory: DeviceSlots, line: Line, word: int) -> None:
        super().__init__(memory)
        (self._device,) = memory.devices
        self._words = _Words(line, word, self._device)

    def write_way(self, way: Way, slot: int) -> None:
        _ = way.parts  # made in place
        self.memory.note_used(slot, way.used)

    def _new(self) -> Vec:
        return Vec([torch.empty(n, dtype=dtype, device=self._device) for dtype, n in self.memory.kinds])

    def due(self) -> int:
        return self._words.write(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        self._words.close()
        super().close()


class ThroughHost(OnHost):
    """Vectors on a GPU, or on several, and slots in memory of the host, which the GPU reads and writes itself."""

    keeps = False

    def __init__(self, memory: SlotMemory, like: Vec, line: Line, word: int) -> None:
        super().__init__(memory)
        self._devices = [p.device for p in like.parts]
        first = next(device for device in self._devices if device.type == "cuda")
        self._words = _Words(line, word, first)
        self._down = {d: torch.cuda.Stream(d) for d in self._devices if d.type == "cuda"}
        self._up = {d: torch.cuda.Stream(d) for d in self._down}
        self._stage: Vec | None = None
        self._staged: int | None = None  # the slot whose numbers are in the stage
        self._stages: list[tuple[Vec, list[Any]]] = []  # free, when the worker's streams have come so far
        self._lent: list[Vec] = []
        self._fetched: dict[int, tuple[Vec, list[Any]]] = {}  # by slot, what is on its way up or there
        self._registered: dict[int, int] = {}
        self._rooms: dict[int, Vec] = {}

    def _new(self) -> Vec:
        kinds = zip(self.memory.kinds, self._devices, strict=True)
        return Vec([torch.empty(n, dtype=dtype, device=device) for (dtype, n), device in kinds])

    def _host(self, slot: int) -> Vec:
        vec = self.memory.vec(slot)
        if slot not in self._registered:
            address = self.memory.address(slot)
            self._registered[slot] = address
            for device in self._down:
                with torch.cuda.device(device):
                    call_driver(
                        "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(self.memory.vector_bytes), 1
                    )
                    break  # of one GPU is of all: it is registered as portable
        return vec

    def write(self, x: Vec, slot: int) -> None:
        """On the GPU first, by the worker's stream; from there to the host beside what that does next."""
        if self._stage is None:
            self._stage = self._new()
        self._wait_for_down()  # the copy before it has left the stage
        x.put_into(self._stage)
        self._staged = slot
        self._copy_down(self._stage, slot)
        self.memory.note_used(slot, x.used)

    def _copy_down(self, stage: Vec, slot: int) -> None:
        for into, part in zip(self._host(slot).parts, stage.parts, strict=True):
            if part.is_cuda:
                stream = self._down[part.device]
                stream.wait_stream(torch.cuda.current_stream(part.device))
                with torch.cuda.stream(stream):
                    into.copy_(part, non_blocking=True)
            else:
                into.copy_(part)

    def _wait_for_down(self) -> None:
        for device, stream in self._down.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _copy_up(self, slot: int, stage: Vec, free: list[Any]) -> list[Any]:
        """Beside what the worker computes, when the stage is ``free``. What tells that it is there."""
        for stream in self._up.values():
            for event in free:
                stream.wait_event(event)
        for into, part in zip(stage.parts, self._host(slot).parts, strict=True):
            if into.is_cuda:
                with torch.cuda.stream(self._up[into.device]):
                    into.copy_(part, non_blocking=True)
            else:
                into.copy_(part)
        return [stream.record_event() for stream in self._up.values()]

    def _copy_here(self, slot: int, stage: Vec) -> None:
        """By the worker's own streams."""
        for into, part in zip(stage.parts, self._host(slot).parts, strict=True):
            into.copy_(part, non_blocking=True)

    def _mark(self) -> list[Any]:
        """What tells that the worker's streams have come so far."""
        return [torch.cuda.current_stream(device).record_event() for device in self._down]

    def _wait(self, events: list[Any]) -> None:
        """Let the worker's streams."""
        for event in events:
            for device in self._down:
                torch.cuda.current_stream(device).wait_event(event)

    def fetch(self, slots: Sequence[int]) -> None:
        self._give_back([stage for slot in list(self._fetched) if slot not in slots for stage in self._drop(slot)])
        for slot in slots:
            if slot not in self._fetched and slot != self._staged:
                stage, free = self._stages.pop() if self._stages else (self._new(), [])
                self._fetched[slot] = stage, self._copy_up(slot, stage, free)

    @property
    def is_fetched(self) -> bool:
        return all(event.query() for _, events in self._fetched.values() for event in events)

    def _drop(self, slot: int) -> list[Vec]:
        """What was fetched in vain."""
        stage, events = self._fetched.pop(slot)
        self._wait(events)
        return [stage]

    def _vec(self, slot: int) -> Vec:
        if slot == self._staged and self._stage is not None:
            return self._stage
        if slot in self._fetched:
            (stage,) = self._drop(slot)
            self._lent.append(stage)
            return stage
        stage = self._room()
        self._copy_here(slot, stage)
        return stage

    def _room(self) -> Vec:
        stage, free = self._stages.pop() if self._stages else (self._new(), [])
        self._wait(free)
        self._lent.append(stage)
        return stage

    def _give_back(self, stages: list[Vec]) -> None:
        """They may serve again when the worker's streams have read them."""
        if stages:
            events = self._mark()
            self._stages += [(stage, events) for stage in stages]

    def read(self, refs: Sequence[Ref], plus: int | Vec | None = None) -> Vec:
        vec = super().read(refs, plus)
        if len(refs) == 1 and plus is None:
            vec.used = self.memory.used([refs[0][0]])
        return vec

    def room(self, slot: int) -> Vec:
        self._rooms[slot] = self._room()
        return self._rooms[slot]

    def wrote(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._copy_down(self._rooms[slot], slot)
        self._rooms = {}

    def due(self) -> int:
        """What was read into stages is there by then, too, so that these may serve again."""
        lent, self._lent = self._lent, []
        self._give_back(lent)
        return self._write_word()

    def _write_word(self) -> int:
        """Behind all that the worker's streams and those down were asked for."""
        first, *others = self._down.items()
        device, stream = first
        stream.wait_stream(torch.cuda.current_stream(device))
        for other, its_stream in others:
            its_stream.wait_stream(torch.cuda.current_stream(other))
            stream.wait_stream(its_stream)
        return self._words.write(stream)

    def released(self) -> None:
        """The slot that is in the stage may become another's: it is read where it lies from now on."""
        self._staged = None

    def close(self) -> None:
        for device in self._down:
            torch.cuda.synchronize(device)
        self._words.close()
        for address in self._registered.values():
            call_driver("cuMemHostUnregister", ctypes.c_void_p(address))
        self._registered, self._stages, self._lent, self._stage, self._fetched = {}, [], [], None, {}
        super().close()


Slots = OnHost | OnDevice | ThroughHost


def slots_for(
    line: Line, like: Vec, kinds: Kinds, parameters: int, on_device: bool, word: int, shard: Shard | None = None
) -> Slots:
    """For vectors that lie where ``like`` does; ``on_device``: slots lie there, too. ``shard``: what of a slot is this
    rank's, where ``kinds`` are those of several ranks.
    """
    arena: Mapping = line.arena
    if on_device:
        return OnDevice(DeviceSlots(arena, kinds, parameters, [like.parts[0].device], shard), line, word)
    memory = SlotMemory(arena, kinds, parameters, shard)
    return ThroughHost(memory, like, line, word) if any(p.is_cuda for p in like.parts) else OnHost(memory)
