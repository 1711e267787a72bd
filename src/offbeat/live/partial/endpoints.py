"""A worker's place at a channel: opened once, by all ranks, and closed when all have finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from offbeat.live.carriers.exchanges import Transport
from offbeat.live.carriers.island import Island
from offbeat.live.partial.alone import Alone, OwnWeights
from offbeat.live.partial.opening import Opening
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.worker.board import Board
from offbeat.live.worker.channel_client import LOOK_S, ChannelClient, HostClient, Twin
from offbeat.live.worker.line import Line
from offbeat.live.worker.news import HostBell
from offbeat.live.worker.weights_client import Meeting, WeightsClient
from offbeat.method.effects import (
    Add,
    Begin,
    Channel,
    Effect,
    Finish,
    Got,
    Meet,
    Offer,
    Open,
    Rest,
    Retire,
    Share,
    Through,
    not_ours,
)
from offbeat.method.replica import Replica
from offbeat.rounds.seat import Event
from offbeat.runs.trace import Trace
from offbeat.tensors.vector import Vec


class AskForAverages(Protocol):
    """Those who may ask for an average while this worker waits without data."""

    def asked(self) -> bool: ...

    def take_part(self) -> None: ...


class Nobody:
    """Nobody asks for anything."""

    def asked(self) -> bool:
        return False

    def take_part(self) -> None:
        raise AssertionError("nobody has asked")


class Endpoints:
    """This process's places at the host process: none until a method opens a channel, or shares its weights.

    A channel beside the run's has endpoints of its own, in a section of the board.
    """

    def __init__(
        self,
        board: Board,
        transport: Transport,
        patience_s: float,
        log: list[Event] | None = None,
        island: Island | None = None,
        twin: Twin | None = None,
        log_beside: Callable[[str], list[Event] | None] = lambda channel: None,
    ) -> None:
        self.others: AskForAverages = Nobody()
        self._log, self._log_beside = log, log_beside
        self._beside: dict[str, Endpoints] = {}  # of channels that are open beside the run's, by their names
        self._board, self._transport, self._patience_s = board, transport, patience_s
        self._channel: Channel | None = None
        self._client: ChannelClient | Alone | None = None
        self.step_over: Callable[[], None] | None = None  # called whenever the worker goes back to its own loop
        self._weights: WeightsClient | OwnWeights | None = None
        self._bell: HostBell | None = None
        self._island = island
        self._first_round = self._wire_bytes = 0
        self._waited_s, self._lost, self._is_over = 0.0, list[int](), False
        self._times_stood = 0
        self._standing: dict[str, Any] | None = None  # of the one that this worker is a twin of
        self._stood: Vec | None = None
        self.trace = Trace(keep_spans=False)
        self._opening = Opening(board, transport, patience_s, log, island, self.trace, twin)

    @property
    def is_open(self) -> bool:
        return self._is_over or any(end is not None for end in self._ends)

    @property
    def has_channel(self) -> bool:
        return self._channel is not None

    @property
    def per_node(self) -> int:
        return 1 if self._channel is None else self._channel.per_node

    @property
    def _ends(self) -> tuple[ChannelClient | Alone | None, WeightsClient | OwnWeights | None, HostBell | None]:
        return self._client, self._weights, self._bell

    @property
    def shared_weights(self) -> WeightsClient | OwnWeights:
        if self._weights is None:
            raise OffbeatError("the method meets a peer before it has shared its weights; await Share(me.x) first")
        return self._weights

    @property
    def client(self) -> ChannelClient | Alone:
        if self._client is None:
            raise OffbeatError("the method uses a channel that it has not opened; await Open(channel, …) first")
        return self._client

    @property
    def waited_s(self) -> float:
        return self._waited_s + sum(end.waited_s for end in (*self._ends, *self._beside.values()) if end)

    @property
    def wire_bytes(self) -> int:
        return self._wire_bytes + sum(e.wire_bytes for e in (self._client, self._weights, *self._beside.values()) if e)

    def perform(self, effect: Effect[Any], me: Replica) -> object:
        """Answer what needs a channel or shared weights; refuse what nobody can answer."""
        match effect:
            case Open():
                (self._make_beside(effect.channel) if effect.channel.beside else self).open(effect, me)
                self.step_over = self._told_of_steps()
                return None
            case Offer():
                return self._at(effect.channel).client.offer(effect.x, effect.t)
            case Through():
                return self._at(effect.channel).client.through(effect.t)
            case Rest():
                return self._at(effect.channel).rest(effect.x)
            case Share():
                self.share(effect, me)
                self.step_over = self._told_of_steps()
                return None
            case Begin(Meet(peer)):
                return self.shared_weights.meet(peer)
            case Finish(Meeting() as visit):
                self.shared_weights.finish(visit)
                return None
            case Meet(peer):
                self.shared_weights.finish(self.shared_weights.meet(peer))
                return None
            case Add(delta):
                return self.shared_weights.add(delta)
            case Retire():
                return self.retire()
        raise not_ours(effect)

    def _at(self, channel: Channel) -> Endpoints:
        return self._beside.get(channel.name, self) if self._beside else self

    def _make_beside(self, channel: Channel) -> Endpoints:
        """Another run's numbers are not this channel's: after a resume its rounds begin anew."""
        name, log = channel.name, self._log_beside(channel.name)
        board = self._board.section(name)
        made = Endpoints(board, self._transport, self._patience_s, log, self._island)
        made.others = self.others
        if self._standing is not None:
            made.take_over(self._standing["beside"][name])
        return self._beside.setdefault(name, made)  # one that is there already refuses

    def open(self, effect: Open, me: Replica) -> None:
        """Every rank comes here at its first step."""
        self._refuse_if_open()
        first = self._agreed_first_round() if self._standing is None else self._first_round
        self._client = self._opening.channel(effect, me, first)
        self._channel = effect.channel
        if self._standing is not None and isinstance(self._client, ChannelClient):
            self._client.holds = self._standing["holds"]

    def look(self) -> None:
        """In the middle of a step."""
        for end in (self, *self._beside.values()):
            if isinstance(end._client, ChannelClient):
                end._client.look()

    def _told_of_steps(self) -> Callable[[], None] | None:
        """Those who are to hear that a step is over, as one call."""
        ends = [one for end in (self, *self._beside.values()) for one in (end._client, end._weights)]
        calls = [one.step_over for one in ends if isinstance(one, ChannelClient | WeightsClient)]
        if len(calls) < 2:
            return next(iter(calls), None)

        def call_all() -> None:
            for call in calls:
                call()

        return call_all

    def share(self, effect: Share, me: Replica) -> None:
        """The same for weights that others may average with."""
        self._refuse_if_open()
        self._weights = self._opening.weights(effect, me)

    @property
    def standing(self) -> dict[str, Any]:
        """Where this worker is, in plain values, for a twin."""
        holds = self._client.holds if isinstance(self._client, ChannelClient) else 0
        beside = {name: one.standing for name, one in self._beside.items()}
        return {"rounds": self.rounds, "holds": holds, "times stood": self._times_stood, "beside": beside}

    def take_over(self, standing: dict[str, Any]) -> None:
        """Open the places of a worker that has stood there, when they are opened."""
        self._standing, self._first_round = standing, standing["rounds"]
        self._times_stood = standing["times stood"]

    def resume(self, rounds: int) -> None:
        """The run goes on after so many rounds."""
        self._first_round = rounds

    def _agreed_first_round(self) -> int:
        """Where nobody waits, ranks that were saved at the same step may know different numbers of rounds."""
        mine = torch.tensor([self._first_round])
        most = self._transport.agree_on(mine, dist.ReduceOp.MAX, "the others' first step")
        if self._island is not None:
            most = self._island.agree_on(most, dist.ReduceOp.MAX)
        self._first_round = int(most.item())
        return self._first_round

    @property
    def rounds(self) -> int:
        """How many rounds of the channel are over, those of runs before this one included."""
        return self._first_round if self._client is None else self._client.rounds

    def _refuse_if_open(self) -> None:
        if self.is_open:
            raise OffbeatError(
                "a method opens one channel, or shares its weights once, and others beside=True, each once"
            )

    def rest(self, x: Vec | None) -> Got | None:
        return self.client.rest(x, self.others.asked, self.others.take_part)

    def align(self, x: Vec, agree_on_largest: Callable[[int], int]) -> None:
        """All ranks come to stand between two steps; ``x`` then holds every result, or every visit, there has been."""
        if not self.is_open:
            return
        self._times_stood += 1
        all_there = self._board.meeting(f"standing-{self._times_stood}", tuple(range(self._board.size)))
        if self._client is not None and self._channel is not None:
            self._client.stand(all_there, agree_on_largest, self._channel.apply)
            self._stood = x.clone()
        elif self._weights is not None:
            self._weights.stand(x, all_there)
        for beside in self._beside.values():
            beside.align(x, agree_on_largest)

    def hang_bell(self) -> HostBell:
        """The bell of micro-batches; every rank comes here at its first step."""
        if self._bell is None:
            self._refuse_if_open()
            line = self._transport.line
            assert line is not None
            self._bell = HostBell(self._board.name, line, self._board.rank, self._board.plan(), self.answer_at)
        return self._bell

    def answer_at(self, key: str, line: Line) -> Any:
        """The host process's answer there."""
        while (answer := line.heard_within(key, LOOK_S)) is None:
            self._board.check("an answer of the host process")
        return answer

    def ring(self, r: int, workers: int) -> None:
        """This worker is through its batch of round ``r``; alone, nobody listens."""
        if self._board.size > 1:
            self.hang_bell().ring(r, workers)

    @property
    def rung(self) -> int:
        """The last round whose bell has rung; −1 if none has."""
        return self.hang_bell().rung if self._board.size > 1 else -1

    def finished(self) -> None:
        """No step left to take. (Shared weights hear it when their worker retires.)"""
        if self._client is not None and self._channel is not None:
            self._client.finished(self._channel.holds())
        for beside in self._beside.values():
            beside.finished()

    def adopt(self, x: Vec) -> None:
        """The weights were made equal on all ranks in the middle of a run."""
        if self._weights is not None:
            self._weights.adopt(x)
        if self._client is not None and self._channel is not None and self._stood is not None:
            shared = self._channel.rules.absent == "shared"  # to these everybody adds differences
            self._client.renew(x - self._stood if shared else self._channel.holds())
        self._stood = None
        for beside in self._beside.values():
            beside.adopt(x)

    def retire(self) -> Vec:
        return self.shared_weights.retire(self.others.asked, self.others.take_part)

    def fetch_lost(self) -> None:
        """Let the vectors of what coding has lost be up to date, which are the method's own to remember."""
        for end in (self, *self._beside.values()):
            if isinstance(end._client, ChannelClient):
                end._client.fetch_lost()

    def owed(self) -> Vec | None:
        if self._client is None or self._channel is None or self._channel.rules.of_weights:
            return None
        return self._client.owed()

    @property
    def lost(self) -> list[int]:
        return list(self._client.lost) if self._client is not None else self._lost

    def close(self) -> None:
        """All ranks are through."""
        for beside in self._beside.values():
            beside.close()
        for end in self._ends:
            if end is not None:
                end.close()

    def abandon(self) -> None:
        """Leave without waiting for anybody."""
        for beside in self._beside.values():
            beside.abandon()
        for end in self._ends:
            if end is not None:
                end.abandon()

    def hang_up(self) -> None:
        """Leave at once. What was submitted is the others' now, and nothing of it is owed to this worker."""
        for beside in self._beside.values():
            beside.hang_up()
        for end in self._ends:
            if isinstance(end, HostClient):
                end.hang_up()
            elif end is not None:
                end.abandon()

    def release(self) -> None:
        """The run is over: keep its numbers, and let go of everything else."""
        self._is_over = self.is_open
        self._waited_s, self._wire_bytes, self._lost = self.waited_s, self.wire_bytes, self.lost
        self._first_round = self.rounds
        for end in (*self._ends, *self._beside.values()):
            if end is not None:
                end.release()
        self._channel = self._client = self._weights = self._bell = self._stood = self.step_over = None
        self._beside = {}
        self.others = Nobody()
