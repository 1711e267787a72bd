"""Who mixes with whom: the mixing matrix W_t, and the schedules that give one for every step.

``ring(8)(t)`` is the `Mixing` of step ``t``: row i says what worker i takes from whom, x_i ← Σ_j W_ij x_j. Both can be
printed, asked whether they are doubly stochastic, and asked for their spectral gap. Every schedule works for every
number of workers from 1 up, and for any set of ranks: ``ring([0, 2, 5], size=6)`` mixes among those three and leaves
the others alone, which is what is wanted after a death. A schedule is a pure function of the step: workers that ask
for the same step get the same matrix, without talking.

| schedule | who mixes |
| --- | --- |
| `everyone`, `complete` | the mean of all |
| `ring`, `grid`, `torus` | neighbours; grid and torus are as square as the number allows (a prime: a line, a ring) |
| `hypercube` | ranks that differ in one bit; where P is no power of two, the corners that exist |
| `exponential` | ranks 1, 2, 4, … away, all at once |
| `one_peer_exponential` | the same, one peer a step in turn, directed (SGP) |
| `groups` | rotating groups (WAGMA): what one worker knows reaches all others in about log_S P steps |
| `nodes` | the same groups every step: consecutive ranks, as on one machine |
| `pairs` | a random matching a round (NoLoCo) |

Fixed undirected graphs get Metropolis weights, W_ij = 1 / (1 + max(deg i, deg j)).

The matrix itself is in `matrix`, the edges of the graphs are in `graphs`, the rounds of `groups` and `pairs` in
`rotations`, MATCHA's plans in `matchings`; what users name of these is here.
"""

from __future__ import annotations

from offbeat.topology.graphs import Edge, Workers, edges
from offbeat.topology.matrix import Mixing, Row
from offbeat.topology.schedules import (
    Schedule,
    complete,
    everyone,
    exponential,
    graph,
    grid,
    groups,
    hypercube,
    nodes,
    one_peer_exponential,
    pairs,
    ring,
    torus,
)

__all__ = [
    "Edge",
    "Mixing",
    "Row",
    "Schedule",
    "Workers",
    "complete",
    "edges",
    "everyone",
    "exponential",
    "graph",
    "grid",
    "groups",
    "hypercube",
    "nodes",
    "one_peer_exponential",
    "pairs",
    "ring",
    "torus",
]
