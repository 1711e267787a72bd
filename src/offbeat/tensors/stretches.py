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

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from offbeat.tensors.codec import Codec, decode_into
from offbeat.tensors.vector import Vec, wide

GRAIN = 512  # numbers that are not cut apart, where a codec has no buckets


class Stretches:
    """Who owns what of vectors like ``like``: as equal as whole buckets allow.

    ``of[k]``: where the stretches of part k begin and end, in the order of the ranks. ``lengths``: the coded bytes of
    each owner's stretches. ``owners``: those who own something; there are fewer buckets than members at times.
    """

    def __init__(self, like: Vec, codec: Codec, members: int) -> None:
        self.codec, self.members = codec, members
        self.like = [(p.numel(), wide(p.dtype), p.device) for p in like.parts]
        self._phantom_bytes = like._phantom_bytes
        sizes = [(n, dtype.itemsize) for n, dtype, _ in self.like] or [(like.numel, 4)]
        self.of, self.lengths = [self._cut(n) for n, _ in sizes], [0] * members
        for (_, itemsize), stretches in zip(sizes, self.of, strict=True):
            for owner, (lo, hi) in enumerate(stretches):
                self.lengths[owner] += codec.message_bytes(hi - lo, itemsize) if hi > lo else 0
        self.owners = [owner for owner, length in enumerate(self.lengths) if length]

    def _cut(self, numel: int) -> list[tuple[int, int]]:
        grain = getattr(self.codec, "bucket", GRAIN)
        grains = -(-numel // grain)
        return list(pairwise(min(grains * i // self.members * grain, numel) for i in range(self.members + 1)))

    def new(self) -> Vec:
        """Memory for a sum."""
        return Vec([torch.empty(n, dtype=dtype, device=device) for n, dtype, device in self.like], self._phantom_bytes)


class CodedShare:
    """One member's side of a coded sum: ``messages``, then ``own_sum``, then ``result``, then ``keep``.

    ``x``: what it gives (None: nothing), read at once. ``place``: which member it is, in the order of the ranks.
    ``key`` is its own, and keys the draws of all that it codes here. ``messages``: what goes to each owner, in the
    order of the ranks; None to itself, and to all if it gives nothing.
    """

    def __init__(
        self, x: Vec | None, stretches: Stretches, place: int, key: tuple[int, ...], lost: Vec | None = None
    ) -> None:
        self.gives, self.place, self.stretches = x is not None, place, stretches
        self._codec, self._key, self._lost = stretches.codec, key, lost
        self._left: list[Tensor] | None = None
        if lost is not None:
            kept = zip(lost.parts, stretches.like, strict=True)
            self._left = [p.to(device, dtype, copy=True) for p, (_, dtype, device) in kept]
        self._own: list[Tensor] = []
        self.messages: list[Tensor | None] = [None] * stretches.members
        if x is not None:
            self._encode(x)

    def _encode(self, x: Vec) -> None:
        parts, of = [p.detach().to(wide(p.dtype)) for p in x.parts], self.stretches.of
        if self._left is not None:
            parts = [kept.add_(p) for kept, p in zip(self._left, parts, strict=True)]
        self._own = [p[slice(*of[k][self.place])].clone() for k, p in enumerate(parts)]
        for owner in self.stretches.owners if parts else ():
            if owner != self.place:
                pieces = [(k, p[slice(*of[k][owner])]) for k, p in enumerate(parts)]
                self.messages[owner] = joined([self._coded(piece, k, owner) for k, piece in pieces if piece.numel()])

    def _coded(self, piece: Tensor, k: int, owner: int) -> Tensor:
        message = self._codec.encode(piece, (*self._key, k, owner))
        if self._left is not None:
            piece.sub_(self._codec.decode(message, piece))
        return message

    def own_sum(self, messages: Sequence[Tensor | None]) -> Tensor:
        """The coded sum of the stretch it owns. ``messages``: what came for it, in the order of the ranks, None in its
        own place and from those who give nothing."""
        coded, at = [], 0
        for k, (_, dtype, device) in enumerate(self.stretches.like):
            lo, hi = self.stretches.of[k][self.place]
            if hi == lo:
                continue
            total = torch.zeros(hi - lo, dtype=dtype, device=device)
            decoded, length = torch.empty_like(total), self._codec.message_bytes(hi - lo, total.element_size())
            for place, message in enumerate(messages):
                if place == self.place and self.gives:
                    total += self._own[k]
                elif message is not None:
                    total += decode_into(self._codec, message[at : at + length].to(total.device), decoded)
            at += length
            coded.append(self._codec.encode(total, (*self._key, k, len(messages))))
            if self._left is not None:
                lost = total.sub_(decode_into(self._codec, coded[-1], decoded))
                kept = self._left[k][lo:hi]
                kept.copy_(lost) if self.gives else kept.add_(lost)
        return joined(coded)

    def result(self, sums: Sequence[Tensor], out: Vec | None = None) -> Vec:
        """The sum of what all gave, from the owners' coded sums: the same bits on all."""
        out = self.stretches.new() if out is None else out
        starts = [0] * len(sums)
        for k, p in enumerate(out.parts):
            for owner, (lo, hi) in enumerate(self.stretches.of[k]):
                if hi > lo:
                    start, length = starts[owner], self._codec.message_bytes(hi - lo, p.element_size())
                    decode_into(self._codec, sums[owner][start : start + length].to(p.device), p[lo:hi])
                    starts[owner] += length
        return out

    def keep(self) -> None:
        """Note what was lost, to be sent next time. Until then ``lost`` is as it was, and the sum may be begun anew."""
        if self._left is not None and self._lost is not None:
            for kept, p in zip(self._left, self._lost.parts, strict=True):
                p.copy_(kept)


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
    if not any(share.gives for share in members):
        return None
    sums = [mine.own_sum([share.messages[mine.place] for share in members]) for mine in members]
    for share in members:
        share.keep()
    total = members[0].result(sums)
    return Vec([p.div_(divisor) for p in total.parts], total._phantom_bytes)


def nothing_lost(x: Vec) -> Vec:
    """Zeros for what coding loses of vectors such as ``x``, wide enough to lose nothing of it."""
    return Vec([torch.zeros_like(p, dtype=wide(p.dtype)) for p in x.parts], x._phantom_bytes)


def joined(messages: Sequence[Tensor]) -> Tensor:
    """One message after the other as one; in host memory, if they come from several devices."""
    if len(messages) == 1:
        return messages[0]
    apart = len({m.device for m in messages}) > 1
    return torch.cat([m.cpu() if apart else m for m in messages]) if messages else torch.empty(0, dtype=torch.uint8)
