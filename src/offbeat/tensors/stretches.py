"""A coded sum in two phases: the rule that both worlds follow.

Every member of a block owns one stretch of the vector. Everyone codes, for each owner, its part of that stretch and
sends it there; the owner decodes what comes, adds it up in the order of the ranks, codes the sum once, and sends it to
all. A worker sends about 2(P − 1)/P of one coded message, and decodes one vector. All decode the same bytes, so all get
the same bits. What an owner has itself goes to nobody, and is not coded.

*What is lost is owed.* Where a member keeps a vector of what coding has ``lost`` in its hands, that is added to what it
has to send, and becomes what is lost this time: outside its stretch by coding its own numbers, inside by coding the
sum. So what was sent and what is kept add up to what was to be sent, over all members and any number of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.tensors.codec import Codec, decode_into, encode_into, encode_sum
from offbeat.tensors.vector import Vec, wide

GRAIN = 512  # numbers that are not cut apart, where a codec has no buckets
PIECE = 1 << 20  # numbers coded at a time: what is made of them on the way needs little memory, and is soon read again
KEPT = 64  # messages whose memory is kept for the next sum


class Room:
    """Memory for what is made on the way, again and again the same: fresh pages are slow. For one thread.

    What was taken is in use until the next ``begin``; what is ``scratch`` until it is asked for again.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._blocks: list[Tensor] = []
        self._taken = 0

    def begin(self) -> None:
        """Nobody reads any more what was taken so far."""
        self._taken = 0

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory for a message."""
        k, self._taken = self._taken, self._taken + 1
        if k >= KEPT:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._blocks += [torch.empty(0, dtype=torch.uint8)] * (k + 1 - len(self._blocks))
        if self._blocks[k].numel() < nbytes or self._blocks[k].device != device:
            self._blocks[k] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._blocks[k][:nbytes]

    def scratch(self, which: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = which, dtype, device
        if key not in self._scratch or self._scratch[key].numel() < length:
            self._scratch[key] = torch.empty(length, dtype=dtype, device=device)
        return self._scratch[key][:length]


class Piece(NamedTuple):
    """Numbers ``lo`` to ``hi`` of part ``k``: bytes ``start`` to ``stop`` of the messages to their owner."""

    k: int
    lo: int
    hi: int
    start: int
    stop: int


class Stretches:
    """Who owns what of vectors like ``like``: as equal as whole buckets allow.

    ``pieces``: what each owner has, in the order of the ranks. ``lengths``: the bytes of each owner's messages, 0 for
    one who owns nothing: there are fewer buckets than members at times. ``room``: kept by whoever sums again.
    """

    def __init__(self, like: Vec, codec: Codec, members: int, room: Room | None = None) -> None:
        self.codec, self.members, self._phantom_bytes = codec, members, like._phantom_bytes
        self._room = room
        self.like = [(p.numel(), wide(p.dtype), p.device) for p in like.parts]
        self.pieces: list[list[Piece]] = [[] for _ in range(members)]
        self.lengths = [0] * members
        for k, (numel, itemsize) in enumerate([(n, d.itemsize) for n, d, _ in self.like] or [(like.numel, 4)]):
            self._cut(k, numel, itemsize)

    def _cut(self, k: int, numel: int, itemsize: int) -> None:
        grain = getattr(self.codec, "bucket", GRAIN)
        grains, most = -(-numel // grain), max(PIECE // grain, 1)
        for owner in range(self.members):
            first, last = grains * owner // self.members, grains * (owner + 1) // self.members
            for at in range(first, last, most):
                lo, hi = at * grain, min(min(at + most, last) * grain, numel)
                start = self.lengths[owner]
                self.lengths[owner] += self.codec.message_bytes(hi - lo, itemsize)
                self.pieces[owner].append(Piece(k, lo, hi, start, self.lengths[owner]))

    def scratch(self, which: int = 0) -> Callable[[Piece], Tensor]:
        """Memory for one piece at a time, the same for all; that of another is ``which`` else."""
        room = self._room or Room()

        def of(piece: Piece) -> Tensor:
            _, dtype, device = self.like[piece.k]
            return room.scratch(which, piece.hi - piece.lo, dtype, device)

        return of

    def fresh(self, piece: Piece) -> Tensor:
        _, dtype, device = self.like[piece.k]
        return torch.empty(piece.hi - piece.lo, dtype=dtype, device=device)

    def message(self, nbytes: int, on_host: bool = False) -> Tensor:
        """Memory for a message: where all parts live, or on the host."""
        devices = {device for _, _, device in self.like}
        device = devices.pop() if len(devices) == 1 and not on_host else torch.device("cpu")
        nbytes = nbytes if self.like else 0
        if self._room is not None:
            return self._room.take(nbytes, device)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def read(self, sums: Sequence[Tensor], out: Sequence[Tensor], divisor: float = 1) -> None:
        """Let ``out`` be what the owners' coded sums say, divided."""
        for owner, message in enumerate(sums if out else ()):
            for k, lo, hi, start, stop in self.pieces[owner]:
                part = out[k][lo:hi]
                decode_into(self.codec, message[start:stop].to(part.device), part, divisor)

    def new(self) -> Vec:
        """Memory for a sum."""
        return Vec([torch.empty(n, dtype=dtype, device=device) for n, dtype, device in self.like], self._phantom_bytes)


class CodedShare:
    """One member's side of a coded sum: ``messages``, then ``own_sum``, then ``keep``, then ``result``.

    ``x``: what it gives (None: nothing), read at once, and once more by ``keep``. ``place``: which member it is, in the
    order of the ranks. ``key`` is its own, and keys the draws of all that it codes here. ``messages``: what goes to
    each owner, in the order of the ranks, empty to itself; they lie side by side in ``sent``. None of one who gives
    nothing. ``yields``: ``x`` stays as it is until ``own_sum``, and may be written over from then on.
    """

    def __init__(
        self,
        x: Vec | None,
        stretches: Stretches,
        place: int,
        key: tuple[int, ...],
        lost: Vec | None = None,
        yields: bool = False,
    ) -> None:
        self.place, self.stretches, self._yields = place, stretches, yields
        self._codec, self._key, self._target = stretches.codec, key, lost
        self._lost: list[Tensor] | None = None
        if lost is not None:
            self._lost = [p.to(device) for p, (_, _, device) in zip(lost.parts, stretches.like, strict=True)]
        self._x = None if x is None else [p.detach() for p in x.parts]
        self._own: list[Tensor] = []  # my pieces of my stretch
        self._errors: list[Tensor] = []  # what coding the sum has lost there
        self.sent: Tensor | None = None
        self.messages: list[Tensor] | None = None
        if self._x is not None:
            lengths = [0 if owner == place else length for owner, length in enumerate(stretches.lengths)]
            self.sent = stretches.message(sum(lengths))
            self.messages = list(self.sent.split(lengths)) if self._x else []
            self._encode(self._x, self.messages)

    def _encode(self, x: list[Tensor], messages: list[Tensor]) -> None:
        scratch = self.stretches.scratch()
        for owner, message in enumerate(messages):
            for piece in self.stretches.pieces[owner]:
                if owner != self.place:
                    self._code(self._wanted(x, piece, scratch), piece, message)
                    continue
                kept = self._wanted(x, piece, self.stretches.fresh)
                lies = self._lost is None and kept.dtype == x[piece.k].dtype
                self._own.append(kept.clone() if lies and not self._yields else kept)

    def _wanted(self, x: list[Tensor], piece: Piece, memory: Callable[[Piece], Tensor]) -> Tensor:
        """What is to be sent of a piece: where it lies, or in other memory."""
        own = x[piece.k][piece.lo : piece.hi]
        if self._lost is not None:
            return torch.add(own, self._lost[piece.k][piece.lo : piece.hi], out=memory(piece))
        return own if own.dtype == self.stretches.like[piece.k][1] else memory(piece).copy_(own)

    def _code(self, numbers: Tensor, piece: Piece, message: Tensor) -> None:
        """The draws are keyed by the place in the vector: of one stretch, a member codes its own numbers or the sum."""
        encode_into(self._codec, numbers, (*self._key, piece.k, piece.lo), message[piece.start : piece.stop])

    def _read(self, message: Tensor, piece: Piece, out: Tensor) -> Tensor:
        return decode_into(self._codec, message[piece.start : piece.stop].to(out.device), out)

    def own_sum(self, messages: Sequence[Tensor | None], out: Tensor | None = None) -> Tensor:
        """The coded sum of the stretch it owns, in memory of its own or in ``out``. ``messages``: what came for it, in
        the order of the ranks, None from those who give nothing. (What is in its own place is not read.)"""
        coded = self.stretches.message(self.stretches.lengths[self.place]) if out is None else out
        scratch, spare = self.stretches.scratch(0), self.stretches.scratch(1)
        mine = self.stretches.pieces[self.place] if self.stretches.like else []
        self._errors = []
        for i, piece in enumerate(mine):
            if self._lost is None and self._sum_coded(messages, i, piece, coded):
                continue
            memory, decoded, total = scratch(piece), spare(piece), None
            for place, message in enumerate(messages):
                if place == self.place and self._own:
                    total = self._own[i] if total is None else total.add_(self._own[i])
                elif place != self.place and message is not None:
                    # Into the sum's own memory where it is the first: a pass less.
                    read = self._read(message, piece, memory if total is None else decoded)
                    total = read if total is None else torch.add(total, read, out=memory)
            total = memory.zero_() if total is None else total
            self._code(total, piece, coded)
            if self._lost is not None:
                error = self._own[i] if self._own else torch.empty_like(total)  # which nobody needs any more
                self._errors.append(torch.sub(total, self._read(coded, piece, decoded), out=error))
        return coded

    def _sum_coded(self, messages: Sequence[Tensor | None], i: int, piece: Piece, coded: Tensor) -> bool:
        """The same of one piece at once, where the codec can: neither what it decodes nor the sum is written down."""
        terms = [m if m is None else m[piece.start : piece.stop] for m in messages]
        terms[self.place] = self._own[i] if self._own else None
        there = [term for term in terms if term is not None]
        return encode_sum(self._codec, there, piece.hi - piece.lo, coded[piece.start : piece.stop])

    def keep(self) -> None:
        """Note what was lost, to be sent next time. Until then ``lost`` is as it was, and the sum may be begun anew."""
        if self._lost is None or self._target is None:
            return
        scratch, lost, x = self.stretches.scratch(), self._lost, self._x or []
        for owner, message in enumerate(self.messages or ()):
            for piece in self.stretches.pieces[owner]:
                kept = lost[piece.k][piece.lo : piece.hi]
                if owner == self.place:
                    kept.zero_()  # all of it is in the sum
                else:
                    kept.add_(x[piece.k][piece.lo : piece.hi]).sub_(self._read(message, piece, scratch(piece)))
        for (k, lo, hi, *_), error in zip(self.stretches.pieces[self.place], self._errors, strict=bool(lost)):
            lost[k][lo:hi] += error
        for p, now in zip(self._target.parts, lost, strict=True):
            p.copy_(now)

    def result(self, sums: Sequence[Tensor], out: Vec | None = None, divisor: float = 1) -> Vec:
        """The sum of what all gave, divided, from the owners' coded sums: the same bits on all."""
        out = self.stretches.new() if out is None else out
        self.stretches.read(sums, out.parts, divisor)
        return out


def shares(
    given: Mapping[int, Vec],
    ranks: Sequence[int],
    stretches: Stretches,
    seed: int,
    seq: int,
    lost: Mapping[int, Vec | None] | None = None,
) -> list[CodedShare]:
    """The sides of all members of a block, some of whom have ``given`` something to sum ``seq``."""
    kept = lost or {}
    return [CodedShare(given.get(r), stretches, i, (seed, r, seq), kept.get(r)) for i, r in enumerate(ranks)]


def coded_mean(members: Sequence[CodedShare], divisor: float) -> Vec | None:
    """All members' sides in one place: the sum, divided; None if nobody gives anything."""
    if all(share.messages is None for share in members):
        return None
    nothing: list[Tensor | None] = [None] * len(members)
    sent: list[Sequence[Tensor | None]] = [one.messages or nothing for one in members]
    sums = [mine.own_sum([messages[mine.place] for messages in sent]) for mine in members]
    for share in members:
        share.keep()
    return members[0].result(sums, divisor=divisor)


def nothing_lost(x: Vec) -> Vec:
    """Zeros for what coding loses of vectors such as ``x``, wide enough to lose nothing of it."""
    return Vec([torch.zeros_like(p, dtype=wide(p.dtype)) for p in x.parts], x._phantom_bytes)
