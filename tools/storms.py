"""Runs in virtual time in which workers die and come back, drawn from seeds: what is promised must hold in each.

Any method with any settings, one to nine workers, some kinds of faults, several at once. Of a run that breaks a
promise, the seed is told, and what is left of it without the faults that are not needed.

    python tools/storms.py --schedules 10000 --seed 0
    nice -n 15 python tools/storms.py --schedules 1 --seed 1234
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.storms import Broken, check, drawn, shrunk


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next ones follow")
    parser.add_argument("--once", action="store_true", help="run each once, not twice to see that it is the same")
    given = parser.parse_args()
    torch.set_num_threads(1)
    seen, broken, begun_s = Counter[str](), list[int](), time.monotonic()
    for number in range(given.seed, given.seed + given.schedules):
        storm = drawn(number)
        try:
            seen += check(storm, twice=not given.once)
        except Exception as error:
            broken.append(number)
            what = str(error) if isinstance(error, Broken) else traceback.format_exc(limit=-4)
            print(f"BROKEN {number}: {what}\n  {storm}\n  {shrunk(storm)!r}", flush=True)
        if (done := number + 1 - given.seed) % 1000 == 0:
            said = ", ".join(f"{count:,} {what}" for what, count in sorted(seen.items()) if " " not in what)
            print(f"{done:,} in {time.monotonic() - begun_s:.0f} s, {len(broken)} broken: {said}", flush=True)
    for what, count in sorted(seen.items()):
        print(f"{what}: {count:,}")
    print(f"{given.schedules:,} schedules from seed {given.seed} in {time.monotonic() - begun_s:.0f} s", end="; ")
    print(f"broken: {', '.join(map(str, broken)) or 'none'}")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
