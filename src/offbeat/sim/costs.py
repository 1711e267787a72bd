"""What a sum among the members of a block costs."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.sim.network import Network
from offbeat.tensors.codec import Codec, sent_to
from offbeat.tensors.stretches import Stretches
from offbeat.tensors.vector import Vec
from offbeat.tensors.wire import all_gather_bytes, all_reduce_bytes, message_bytes, two_phase_bytes


def sum_cost(
    network: Network, ranks: Sequence[int], x: Vec, codec: Codec | None, gathers: bool = False
) -> tuple[float, int]:
    """How long a sum of vectors like ``x`` takes, and how many bytes all send together."""
    codec, count = sent_to(codec, len(ranks) - 1), len(ranks)
    if codec is None:
        nbytes = message_bytes(x, None)
        return network.all_reduce_s(ranks, nbytes), all_reduce_bytes(count, nbytes)
    if gathers:
        nbytes = message_bytes(x, codec)
        return network.all_gather_s(ranks, nbytes), all_gather_bytes(count, nbytes)
    stretches = Stretches(x, codec, count).lengths
    seconds = network.all_to_all_s(ranks, max(stretches)) + network.all_gather_s(ranks, max(stretches))
    return seconds, two_phase_bytes(stretches)
