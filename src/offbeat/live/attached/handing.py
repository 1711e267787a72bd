"""A member's replica for a worker that has come back, which goes on as that member's twin.

It is what a checkpoint holds, and where in the run its worker is. The member lays it into the arena between two steps,
in its own time: it waits for nobody but for what it has begun itself. What coding has lost is the member's own, and is
not sent twice.
"""

from __future__ import annotations

import io
from typing import Any, cast

import torch
from torch import Tensor

from offbeat.live.attached import state
from offbeat.live.attached.driver import Driver
from offbeat.live.attached.flat import Flat
from offbeat.live.attached.saving import put, room_for
from offbeat.live.carriers.exchanges import Transport
from offbeat.live.partial.endpoints import Endpoints
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.work import share
from offbeat.live.worker.board import Board
from offbeat.method.effects import Next
from offbeat.method.replica import OWN
from offbeat.tensors.vector import Vec


class Hands:
    """This worker's side: it lays its replica down, or takes one over."""

    def __init__(
        self,
        flat: Flat,
        inner: torch.optim.Optimizer,
        board: Board,
        transport: Transport,
        driver: Driver,
        endpoints: Endpoints,
    ) -> None:
        self._flat, self._inner, self._board = flat, inner, board
        self._transport, self._driver, self._endpoints = transport, driver, endpoints

    def over(self) -> None:
        """Between two steps, where a worker that has come back waits for a replica: lay this one's down."""
        if not isinstance(self._driver.asks, Next):
            return
        known = self._driver.under_way()
        held = self._held(known)
        room = room_for(held)
        at, line = self._board.place_for(room), self._board.line
        if at is None or line is None:
            return
        nbytes, why, page = 0, "", self._transport.place[0]
        try:
            nbytes = put(held, memoryview(cast(Any, line.arena.bytes_at(at, room))))
        except Exception as error:  # an optimiser of another kind, say: this run is not to end for another's sake
            why = f"{type(error).__name__}: {error}"
        self._board.handed(nbytes, page, why)

    def _held(self, known: list[Vec]) -> dict[str, Any]:
        left = state.Left(self._driver.resume_from, self._endpoints.rounds)
        method = state.saved(self._driver.strategy, self._driver.me, left)
        method["memory"] = {name: _zeros(value) if name in OWN else value for name, value in method["memory"].items()}
        self._flat.adopt()
        return {
            "model": [_whole(tensor) for tensor in self._in_the_model()],
            "optimizer": self._inner.state_dict(),
            "method": method,
            "known": [[*one.parts] for one in known],
            "place": list(self._transport.place),
            "standing": self._endpoints.standing,
            "averages": self._board.averages,
            "means": self._board.means,
            "shares": [*share.taken_up()],
        }

    def _in_the_model(self) -> list[Tensor]:
        flat = self._flat
        return [tensor.data for tensor in (*flat.parts, *flat.buffers.parts, *flat.frozen, *flat.other_buffers)]

    def take(self, patience_s: float) -> None:
        """Go on as the member that has laid its replica down for this worker."""
        line = self._board.line
        assert line is not None
        at, nbytes = self._board.replica(patience_s)
        held = torch.load(io.BytesIO(line.arena.bytes_at(at, nbytes).tobytes()), map_location="cpu", weights_only=True)
        self._board.has_taken()
        with torch.no_grad():
            for tensor, value in zip(self._in_the_model(), held["model"], strict=True):
                tensor.copy_(value)
        try:
            self._inner.load_state_dict(held["optimizer"])
        except (ValueError, KeyError) as error:
            raise OffbeatError(
                f"a member's optimizer state does not fit this worker's ({error}); build the same on every rank"
            ) from error
        me = self._driver.me
        left = state.restore(held["method"], self._driver.strategy, me)
        device = me.x.parts[0].device
        share.take_up(held["shares"])
        self._driver.take_over(left.exchanges, [Vec([part.to(device) for part in one]) for one in held["known"]])
        self._transport.place = tuple(held["place"])
        self._endpoints.take_over(held["standing"])
        self._board.averages, self._board.means = held["averages"], held["means"]


def _whole(tensor: Tensor) -> Tensor:
    """Alone in its memory: with a part, torch saves all of what it is a part of."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _zeros(value: Any) -> Any:
    """The same vectors, of nothing."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _zeros(one) for key, one in value.items()}
    return [_zeros(one) for one in value] if isinstance(value, list) else value
