"""The mean of all weights, also through a codec."""

from __future__ import annotations

from offbeat.codec import Codec
from offbeat.effects import Mix
from offbeat.replica import Replica
from offbeat.topology import Mixing
from offbeat.vector import Vec


class Averager:
    """The mean of the workers' models.

    Without a codec the weights travel. With one, each worker's displacement from the last common point travels
    (``memory.anchor``, the same on all): its rounding error shrinks with what was learned since.
    """

    def __init__(self, me: Replica, codec: Codec | None) -> None:
        self._me, self._codec = me, codec
        if codec is not None:
            me.recall(anchor=me.model.clone())

    async def __call__(self, W: Mixing) -> Vec:
        if self._codec is None:
            return await Mix(self._me.model, W)
        anchor: Vec = self._me.memory.anchor
        anchor.add_(await Mix(self._me.model - anchor, W, self._codec))
        return anchor
