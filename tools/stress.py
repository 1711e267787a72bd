"""Random runs of real processes, some of which are stopped or killed: each ends as promised, and leaves nothing.

A run is drawn from a number, its seed: the method and its settings, two to six workers on one host or as if on two,
uneven data, late steps, busy loops beside, and what happens to it. Where nothing happens, or processes are only stopped
for a while, it ends with equal replicas. Where one is killed, the others go on, or say who it was; then it is run
again. After each no process is left, no socket, no file. ``--seed`` draws a run again; what happens in it is timed as
before, but not to the instant.

    python tools/stress.py --minutes 10
    python tools/stress.py --seed 1234
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support import forge
from tests.support.busy import busy
from tests.support.forge import Job, Outcome
from tests.support.leftovers import left, left_of
from tests.support.stressed import GO_ON, PATIENCE_S, Plan, drawn, heard, train

NOTHING = "nothing happens"
HANGS_S, LATE_S = 3 * PATIENCE_S, PATIENCE_S + 30.0
GONE = "the host process has ended"


class Broken(Exception):
    """A promise was."""


def run(plan: Plan) -> str:
    """One run, whatever happens to it; what came of it, in a few words."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside, busy(plan.loops):
        Path(folder, "temporary").mkdir()
        job = Job(train, len(plan.batches), (plan, folder), timeout_s=HANGS_S, whole_end=plan.whole_end)
        ended = Event()
        struck = beside.submit(strike, plan, folder, ended)
        try:
            (outcomes,) = forge.run([job])  # here, since what a thread has started ends with it
        finally:
            ended.set()
        words = judged(plan, outcomes, struck.result())
        nothing_is_left(outcomes, folder)
        return words


def strike(plan: Plan, folder: str, ended: Event) -> bool:
    """Let happen what is to happen. Whether it came in time."""
    if plan.fate == NOTHING:
        return False
    of_a_host, everybody = "host process" in plan.fate, range(len(plan.batches))
    moment = "begun" if plan.early and not of_a_host else "attached"
    hosts = heard(folder, f"attached-{plan.victim}", ended.is_set) if of_a_host else []
    ranks = [pid for rank in everybody for pid in heard(folder, f"begun-{rank}", ended.is_set)]
    heard(folder, f"{moment}-{plan.victim}", ended.is_set)
    time.sleep(plan.after_s)
    if ended.is_set() or (of_a_host and not hosts):
        return False
    pids = hosts if of_a_host else ranks if plan.fate == "all are killed" else [ranks[plan.victim]]
    with suppress(ProcessLookupError):  # it has just ended
        for pid in pids:
            os.kill(pid, signal.SIGKILL if "killed" in plan.fate else signal.SIGSTOP)
        if "stops" in plan.fate:
            time.sleep(plan.stops_s)
            os.kill(pids[0], signal.SIGCONT)
        return True
    return False


def judged(plan: Plan, outcomes: list[Outcome], struck: bool) -> str:
    killed = struck and "killed" in plan.fate
    for rank, outcome in enumerate(outcomes):
        told = f"rank {rank} ended with {outcome.exit_code}: {outcome.stderr[-3000:]}"
        if outcome.hung:
            raise Broken(f"rank {rank} hung: {outcome.stderr[-3000:]}")
        if outcome.exit_code == 0 and not outcome.returned:
            raise Broken(f"rank {rank} ended with 0 and without a result")
        if outcome.exit_code and plan.fate == GO_ON and rank != plan.victim:
            raise Broken(told)
        if outcome.exit_code and not killed:
            raise Broken(told)
        if outcome.exit_code == -signal.SIGKILL and (plan.fate == "all are killed" or rank == plan.victim):
            continue
        if outcome.exit_code and not (outcome.exit_code == 1 and any(name in outcome.error for name in named(plan))):
            raise Broken(f"nobody is named: {told}")
        if (
            killed
            and outcome.ended_s - min(one.ended_s for one in outcomes if one.exit_code or one is outcome) > LATE_S
        ):
            raise Broken(f"rank {rank} ended {LATE_S:g} s after the first: {told}")
    finals = [outcome.value for outcome in outcomes if outcome.exit_code == 0]
    if not all(torch.equal(final, finals[0]) for final in finals):
        raise Broken(f"replicas differ by {max(float((one - finals[0]).abs().max()) for one in finals)}")
    return f"{len(finals)} of {len(outcomes)} ended well" + (
        ", too late for it" if plan.fate != NOTHING and not struck else ""
    )


def named(plan: Plan) -> list[str]:
    """What an error must speak of: whoever was killed."""
    if plan.fate == "a rank is killed":
        return [f"rank {plan.victim} "]
    host = [rank for rank, name in enumerate(plan.hosts) if name == plan.hosts[plan.victim]]
    return [GONE, *(f"rank {rank} " for rank in (host if "host" in plan.fate else range(len(plan.hosts))))]


def nothing_is_left(outcomes: list[Outcome], folder: str) -> None:
    helds = [held for outcome in outcomes for held in outcome.noted]
    if files := {file for held in helds for file in held.files}:
        raise Broken(f"there were files in /dev/shm: {sorted(files)}")
    if still := [*left(helds), *left_of(folder)]:
        raise Broken(f"left are {', '.join(still)}")
    if found := [str(path) for path in Path(folder, "temporary").iterdir()]:
        raise Broken(f"left are the files {', '.join(found)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, help="this run alone")
    given = parser.parse_args()
    end_s, broken = time.monotonic() + 60 * given.minutes, list[int]()
    while True:
        number = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
        plan = drawn(number)
        print(f"{number:6d}  {plan}", end=": ", flush=True)
        begun_s = time.monotonic()
        try:
            words = run(plan)
            if "killed" in plan.fate:
                words += f"; again: {run(replace(plan, fate=NOTHING))}"
        except (Broken, AssertionError) as error:
            broken.append(number)
            words = f"BROKEN: {error}"
        print(f"{words} ({time.monotonic() - begun_s:.1f} s)", flush=True)
        if given.seed is not None or time.monotonic() > end_s:
            break
    print(f"broken: {', '.join(map(str, broken)) or 'none'}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
