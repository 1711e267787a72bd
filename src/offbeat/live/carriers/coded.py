"""Exchanges of coded vectors: sums in two phases, the papers' gathering, and messages between two.

Between hosts of several ranks, what leaves a host is coded, and what stays there is not. Where all ranks read each
other's memory nothing is coded, and nothing comes here, but from methods that always code (``qsgd``, ``sparseloco``):
for them each rank stands for a host of its own, as in the simulator.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offbeat.live.carriers.across import SUMS, Across, Coding
from offbeat.live.carriers.phases import TwoPhases
from offbeat.live.carriers.sent import Sent
from offbeat.method.effects import Mix
from offbeat.tensors.codec import Codec, sent_to
from offbeat.tensors.stretches import CodedShare, Stretches
from offbeat.tensors.sums import keep, mean, owing, weighted
from offbeat.tensors.vector import Vec, wide
from offbeat.tensors.wire import all_gather_bytes, decode, encode, message_bytes, two_phase_bytes

if TYPE_CHECKING:
    from offbeat.live.carriers.exchanges import Transport


class CodedExchanges:
    """Those of one attached optimiser."""

    def __init__(self, ways: Transport) -> None:
        self._ways = ways

    def mix(self, effect: Mix, codec: Codec, ranks: tuple[int, ...] | None, key: tuple[int, ...]) -> Sent:
        W, x = effect.W, effect.x
        if sent_to(codec, W.audience(self._ways.rank)) is None:
            return self._hear_coded(effect, codec)
        if ranks is not None and effect.in_two_phases(self._ways.rank):
            composed = self._ways.across(ranks, x.parts)
            if composed is not None:
                return self._across(effect, codec, ranks, composed, key)
            share = CodedShare(x, Stretches(x, codec, len(ranks)), ranks.index(self._ways.rank), key, effect.lost)
            return self._in_two_phases(share, ranks)
        wanted = owing(x, effect.lost)
        message = encode(wanted, codec, key)
        if ranks is not None:
            gathered = [torch.empty_like(message) for _ in ranks]
            self._ways.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
            work = self._ways.group(ranks).all_gather(gathered, message)

            def gathered_mean() -> Vec:
                decoded = [decode(m, wanted, codec) for m in gathered]
                keep(effect.lost, wanted, decoded[ranks.index(self._ways.rank)])
                return mean(decoded, len(ranks))

            return Sent([work], gathered_mean)
        theirs = {j: [torch.empty_like(message)] for j in W.senders(self._ways.rank)}
        works = self._ways.swap(W.receivers(self._ways.rank), theirs, [message])

        def result() -> Vec:
            rows = W.row(self._ways.rank).items()
            return weighted((w, decode(message if j == self._ways.rank else theirs[j][0], x, codec)) for j, w in rows)

        return Sent(works, result)

    def _in_two_phases(self, share: CodedShare, ranks: tuple[int, ...]) -> Sent:
        """The first phase goes on in the background; the second begins when the result is asked for."""
        phases = self._phases(share, ranks)

        def result() -> Vec:
            self._ways.waiter.wait([phases.to_all([True] * len(ranks))], "the others' sums")
            return Vec(phases.result(divisor=len(ranks)).parts)

        return Sent([phases.to_owners()], result)

    def _across(
        self, effect: Mix, codec: Codec, ranks: tuple[int, ...], composed: Across, key: tuple[int, ...]
    ) -> Sent:
        """What leaves a host is coded: the sum of its ranks'."""
        parts = [p.to(wide(p.dtype), copy=True) for p in effect.x.parts]
        lost = None if effect.lost is None else effect.lost.parts
        coding = Coding(codec, key, lost, lambda record, house: True, len(ranks))
        self._ways.wire_bytes += two_phase_bytes(Stretches(effect.x, codec, len(ranks)).lengths) // len(ranks)
        nothing = parts[0].new_zeros(1)
        errand = self._ways.porter.send(partial(composed.coded_total, parts, nothing, coding, SUMS))
        return Sent([errand], lambda: Vec(parts))

    def _phases(self, share: CodedShare, ranks: tuple[int, ...]) -> TwoPhases:
        phases = TwoPhases(share, self._ways.group(ranks))
        self._ways.wire_bytes += phases.wire_bytes
        return phases

    def _hear_coded(self, effect: Mix, codec: Codec) -> Sent:
        """Others' coded shares beside one's own, which goes to nobody."""
        W, x = effect.W, effect.x
        mine, length = Vec([p.to(wide(p.dtype), copy=True) for p in x.parts]), message_bytes(x, codec)
        theirs = {j: [torch.empty(length, dtype=torch.uint8)] for j in W.senders(self._ways.rank)}
        works = self._ways.swap((), theirs, [])

        def result() -> Vec:
            rows = W.row(self._ways.rank).items()
            return weighted((w, mine if j == self._ways.rank else decode(theirs[j][0], x, codec)) for j, w in rows)

        return Sent(works, result)

    def gradients(
        self,
        g: Vec | None,
        header: Tensor,
        like: Vec,
        codec: Codec,
        ranks: tuple[int, ...],
        key: tuple[int, int],
        gathers: bool = False,
    ) -> tuple[Vec | None, Tensor]:
        """The mean of the coded gradients of those who have one, and the sum of all ``header`` bytes."""
        if sent_to(codec, len(ranks) - 1) is None:
            return g, header.long()
        if gathers:
            return self._gathered_gradients(g, header, like, codec, ranks, key)
        stretches, own_key = Stretches(like, codec, len(ranks)), (key[0], self._ways.rank, key[1])
        share = CodedShare(g, stretches, ranks.index(self._ways.rank), own_key)
        message = torch.cat([torch.tensor([g is not None], dtype=torch.uint8), header])
        headers = torch.empty(len(ranks), message.numel(), dtype=torch.uint8)
        self._ways.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
        told = self._ways.group(ranks).all_gather(list(headers), message)
        phases = self._phases(share, ranks)
        self._ways.waiter.wait([told, phases.to_owners()], "the others' gradients")
        gives, counts = headers[:, 0].tolist(), headers[:, 1:].long().sum(dim=0)
        if not any(gives):
            return None, counts
        self._ways.waiter.wait([phases.to_all(gives)], "the others' sums")
        return Vec(phases.result(divisor=sum(gives)).parts), counts

    def _gathered_gradients(
        self, g: Vec | None, header: Tensor, like: Vec, codec: Codec, ranks: tuple[int, ...], key: tuple[int, int]
    ) -> tuple[Vec | None, Tensor]:
        seed, seq = key
        body = torch.zeros(message_bytes(like, codec), dtype=torch.uint8)
        if g is not None:
            body = encode(g, codec, (seed, self._ways.rank, seq))
        message = torch.cat([torch.tensor([g is not None], dtype=torch.uint8), header, body])
        gathered = [torch.empty_like(message) for _ in ranks]
        self._ways.wire_bytes += all_gather_bytes(len(ranks), message.numel()) // len(ranks)
        self._ways.waiter.wait([self._ways.group(ranks).all_gather(gathered, message)], "the others' gradients")
        start = 1 + header.numel()
        theirs = [decode(m[start:], like, codec) for m in gathered if m[0]]
        counts = torch.stack([m[1:start].long() for m in gathered]).sum(dim=0)
        return (mean(theirs, len(theirs)) if theirs else None), counts
