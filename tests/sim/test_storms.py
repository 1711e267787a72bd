"""Storms: drawn runs in which workers die and come back. What is promised holds in each; and bugs that are put in on
purpose are found.

``python tools/storms.py`` runs as many as one likes.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.delays.faults import Faults
from offbeat.rounds.referee import Referee
from offbeat.rounds.seat import Seat
from offbeat.rounds.tray import Deposit, Tray
from offbeat.sim.exchanges import Exchanges
from offbeat.sim.fleet import Fleet
from tests.support.long import unless_long
from tests.support.storms import KINDS, Broken, Storm, check, drawn, run, shrunk, without_each

SEEDS, PARTS = unless_long(240, 2000), 8
ENOUGH = 200  # seeds within which a bug is to be found


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("part", range(PARTS))
def test_in_every_storm_each_sample_counts_once_or_is_named_as_lost_and_nobody_hangs(part: int) -> None:
    found = Counter[str]()
    for number in range(part, SEEDS, PARTS):
        try:
            found += check(drawn(number), twice=number % 4 == 0)
        except Broken as error:
            raise AssertionError(f"seed {number}: {error}\n{shrunk(drawn(number))!r}") from error
    assert found["deaths"] > SEEDS // PARTS // 2
    assert found["returns"] > SEEDS // PARTS // 4


def test_all_kinds_of_faults_are_drawn_and_happen() -> None:
    found = Counter(kind for number in range(SEEDS) for kind in drawn(number).fates)
    assert set(found) == set(KINDS)
    assert {storm.name for storm in map(drawn, range(SEEDS))} == set(ob.STRATEGIES)
    coming = Storm("eager", {}, 4, 12, "rank 2 dies at 350ms, back at 450ms + rank 2 dies at 500ms", bandwidth_Bps=2e4)
    ran, counts = run(coming)
    assert (counts.died, counts.died_coming, counts.returned) == (1, 1, 1)
    assert [(one.rank, one.died_s, one.back_s) for one in ran.absences] == [(2, 0.35, None)]


# Each of these broke a promise once.
BROKE = [
    Storm("eager", {}, 1, 5, "mtbf 250ms, back after 228ms"),
    Storm("eager", {}, 3, 20, "2 ranks die at 5ms + mtbf 872ms, back after 100ms"),
    Storm("msync", {"m": 3}, 3, 14, "mtbf 886ms", "rank 0 90ms", 0.05, seed=213),
    Storm("local_sgd", {"period": 2, "pace": "speed"}, 4, 15, "2 ranks die at 374ms", "1 rank 50ms", 0.01, seed=314),
    Storm("local_sgd", {"period": 2, "pace": "speed"}, 5, 14, "rank 1 dies at 678ms", "1 rank 50ms", 0.01, seed=1675),
    Storm(
        "local_sgd", {"period": 3, "pace": "speed"}, 7, 19,
        "5 ranks die at 729ms, back after 125ms + mtbf 850ms, back after 262ms", "rank 0 90ms", 0.01, seed=3248,
    ),
    Storm("msync", {"m": 0.25}, 5, 13, "rank 0 dies at 438ms, back after 52ms", "30% 100ms", seed=2613),
    Storm("nonblocking", {"over": "allreduce"}, 4, 15, "rank 2 dies at 371ms, back after 262ms"),
    Storm("dpsgd", {}, 8, 20, "rank 0 dies at 1.21s, back after 48ms + rank 0 dies at 1.41s", "none", 0.05),
    Storm("eager", {}, 9, 10, "rank 4 dies at 600ms + 6 ranks die at 1.2s + mtbf 663ms", seed=30),
    Storm(
        "eager", {"wait": 0.5, "sync_every": None, "stale": "drop", "sync": "bounded", "staleness": 2, "late": 1}, 9, 8,
        "rank 8 dies at 379ms, back after 362ms", "30% 100ms", 0.05, seed=120,
    ),
]  # fmt: skip


@pytest.mark.parametrize("storm", BROKE, ids=str)
def test_what_broke_once_holds(storm: Storm) -> None:
    check(storm)


def test_one_seed_is_one_run_whatever_python_hashes_by() -> None:
    program = "from tests.support.storms import *; print([digest(run(drawn(seed))[0]) for seed in range(6)])"
    root = Path(__file__).parents[2]
    ran = [
        subprocess.run(
            [sys.executable, "-c", program], cwd=root, check=True, capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    ]  # fmt: skip
    assert ran[0] == ran[1]


# What checks is checked: bugs, of which each must be found.


def skips_an_add(patch: pytest.MonkeyPatch) -> None:
    deposit, made = Tray.deposit, Counter[str]()

    def skipping(self: Tray, x: Any, piece: Deposit, weight: float = 1.0) -> None:
        made["deposits"] += self.absent == "carry" and self.value is not None
        if self.absent == "carry" and self.value is not None and made["deposits"] % 3 == 0:
            self.deposits += 1
            self.pieces.append(piece)
            return
        deposit(self, x, piece, weight)

    patch.setattr(Tray, "deposit", skipping)


def owes_twice(patch: pytest.MonkeyPatch) -> None:
    """Who comes back hands in what its member owes, as the member does."""
    twin = Seat.twin

    def doubled(self: Seat, rank: int) -> Seat:
        made = twin(self, rank)
        if self.tray.absent == "carry" and self.tray.value is not None:
            made.tray.deposit(self.tray.value, self.tray.pieces[-1])
        return made

    patch.setattr(Seat, "twin", doubled)


def forgets_what_the_dead_handed_in(patch: pytest.MonkeyPatch) -> None:
    bury = Seat.bury

    def forgetting(self: Seat) -> Any:
        self.tray.clear()
        return bury(self)

    patch.setattr(Seat, "bury", forgetting)


def counts_what_a_dead_one_was_computing(patch: pytest.MonkeyPatch) -> None:
    died = Exchanges.died

    def keeping(self: Exchanges, rank: int) -> None:
        kept = [(b, b.starts[rank]) for b in [*self._blocks.values(), *self._overlapping] if rank in b.starts]
        died(self, rank)
        for block, start in kept:
            block.starts[rank] = start

    patch.setattr(Exchanges, "died", keeping)


def draws_without_the_seed(patch: pytest.MonkeyPatch) -> None:
    mtbf = random.SystemRandom()
    patch.setattr(Faults, "_until_next_s", lambda self, seed, number: (self.mtbf_s or 0.0) * mtbf.expovariate(1.0))


def begins_a_round_before_the_one_before_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seat, "is_next", lambda self, version: True)


def wakes_nobody_when_one_dies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Exchanges, "died", lambda self, rank: self._dead.add(rank))


def divides_weights_by_the_dead_too(patch: pytest.MonkeyPatch) -> None:
    divisor = Seat.divisor
    patch.setattr(
        Seat,
        "divisor",
        lambda self, ranks, absent=frozenset(): divisor(self, ranks, frozenset() if self.rules.of_weights else absent),
    )


def divides_gradients_by_the_dead_too(patch: pytest.MonkeyPatch) -> None:
    divisor = Seat.divisor
    patch.setattr(
        Seat,
        "divisor",
        lambda self, ranks, absent=frozenset(): divisor(self, ranks, absent if self.rules.of_weights else frozenset()),
    )


def hands_no_replica_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "take_over", lambda self, rank, other: self._due.pop(rank, 0) or 1)


def waits_for_the_dead(patch: pytest.MonkeyPatch) -> None:
    def died(self: Referee, rank: int) -> list[int]:
        self._dead.add(rank)
        return []

    patch.setattr(Referee, "died", died)


BUGS: list[Callable[[pytest.MonkeyPatch], None]] = [
    skips_an_add,
    owes_twice,
    forgets_what_the_dead_handed_in,
    counts_what_a_dead_one_was_computing,
    draws_without_the_seed,
    begins_a_round_before_the_one_before_is_over,
    wakes_nobody_when_one_dies,
    divides_weights_by_the_dead_too,
    divides_gradients_by_the_dead_too,
    hands_no_replica_over,
    waits_for_the_dead,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_is_found_within_two_hundred_seeds(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        for number in range(ENOUGH):
            storm = drawn(number)
            try:
                check(storm, twice=bug is draws_without_the_seed and storm.events.mtbf_s is not None)
            except Exception:
                return
    raise AssertionError(f"nobody noticed that it {bug.__name__.replace('_', ' ')}")


def test_a_failure_is_shrunk_to_the_faults_that_it_needs() -> None:
    storm = Storm("eager", {}, 4, 12, "rank 1 dies at 250ms + rank 2 dies at 650ms, back after 100ms + mtbf 10s")
    assert len(without_each(storm)) == 3
    with pytest.MonkeyPatch.context() as patch:
        hands_no_replica_over(patch)
        assert shrunk(storm).faults == "rank 2 dies at 650ms, back after 100ms"
