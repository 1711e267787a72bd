"""How much of the work that could be done is done while workers die and come back: 8 to 1,024 of them, in virtual time.

    python benchmarks/goodput.py [--workers 8,64,256,1024] [--methods eager,decoupled] [--steps 300]

Steps of 1 s; a worker dies at a moment without memory, once in so many of its own hours on average; another is there
30 s later. Goodput is the gradients that all take together in the time of ``--steps`` steps, over those of workers that
never die. Beside the simulated methods stand three that are counted with the same deaths:

- restart: all stop at a death, start again 30 s later, and take the steps since the last checkpoint again. One is
  written, in 1 s, as often as is best (Young's √(2 · 1 s · the time between two deaths)).
- quorum 1.06 s, quorum 5 s: the others stop at each death for so long, torchft's heartbeat limit tuned, and by default
  (measured with 3 processes), and lose nothing else. Who comes back costs the others nothing.
"""

from __future__ import annotations

import argparse
import math
import time

import offbeat as ob
from offbeat.delays.faults import Faults

HOURS = (16.0, 4.0, 1.0)
BACK_S, STEP_S, SAVING_S = 30.0, 1.0, 1.0
STALLS_S = {"quorum 1.06 s": 1.06, "quorum 5 s": 5.0}


def simulated(method: str, workers: int, faults: Faults, steps: int, seed: int) -> float:
    run = ob.simulate(
        method, None, workers, seconds=steps * STEP_S, compute_s=STEP_S, faults=faults, seed=seed, rounds=False
    )
    lost = sum(one.lost is not None for one in run.absences)
    return (sum(run.gradients) - lost) / (workers * steps)


def counted(workers: int, faults: Faults, steps: int, seed: int) -> dict[str, float]:
    """Of the methods that are not simulated; who is away does no work in any of them."""
    end_s = steps * STEP_S
    deaths = list[float]()
    for event in faults.events(workers, seed):
        if event.at_s >= end_s:
            break
        if not event.is_back:
            deaths.append(event.at_s)
    away_s = sum(min(BACK_S, end_s - at_s) for at_s in deaths)
    assert faults.mtbf_s is not None
    every_s = math.sqrt(2 * SAVING_S * faults.mtbf_s)
    done_s, now_s = 0.0, 0.0
    for at_s in [*deaths, end_s]:
        if at_s > now_s:
            saved = (at_s - now_s) // (every_s + SAVING_S)
            rest_s = (at_s - now_s) - saved * (every_s + SAVING_S)
            done_s += saved * every_s + (rest_s if at_s == end_s else 0.0)
        if at_s < end_s:
            now_s = at_s + BACK_S
    found = {"restart": min(1.0, done_s / end_s)}
    for name, stall_s in STALLS_S.items():
        stood_s, until_s = 0.0, 0.0
        for at_s in deaths:  # one that dies while they stand makes them stand anew
            stood_s += min(end_s, at_s + stall_s) - max(at_s, until_s)
            until_s = at_s + stall_s
        found[name] = (1 - stood_s / end_s) * (1 - away_s / (workers * end_s))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,64,256,1024")
    parser.add_argument("--methods", default="eager,decoupled")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    methods = given.methods.split(",")
    print(f"{'workers':>8}{'a death of each in':>20}{'deaths/min':>12}", *(f"{m:>14}" for m in methods), end="")
    print(*(f"{m:>15}" for m in ("restart", *STALLS_S)))
    for workers in map(int, given.workers.split(",")):
        for hours in HOURS:
            between_s = hours * 3600 / workers
            faults = Faults(mtbf_s=between_s, mtbf_absent_s=BACK_S)
            begun_s = time.monotonic()
            ours = [simulated(method, workers, faults, given.steps, given.seed) for method in methods]
            others = counted(workers, faults, given.steps, given.seed).values()
            print(f"{workers:>8}{hours:>18g} h{60 / between_s:>12.2f}", *(f"{one:>14.1%}" for one in ours), end="")
            print(*(f"{one:>15.1%}" for one in others), f"  ({time.monotonic() - begun_s:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
