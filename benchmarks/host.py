"""What the host process can do by itself, without workers, and how long it takes to start.

    python benchmarks/host.py [--json FILE] [--repeats 3] [--only adders,ping,start] [--numbers 100000000]

- adders: gigabytes a second that are read and written when four vectors are summed, beside a plain copy by as many of
  torch's threads, which is what the memory can give.
- start: from ``ob.attach`` until the first step is over, of 4 processes that have imported torch.
- ping: how long the thread of the loop takes for a small message while the adders sum vectors of 2.5·10⁷ floats.
"""

from __future__ import annotations

import json
import time

import torch
from harness import Report, arguments, median, run_workers, spread, together

import offbeat as ob
from offbeat.live.host.adders import Adders, threads
from offbeat.live.host.ledger import Expression, Sum, Written
from offbeat.live.memory.arena import Arena, SlotMemory

TERMS = 4


def _summed(memory: SlotMemory, slots: list[int]) -> Sum:
    made = Sum([Expression([(Written(slot), 1.0)]) for slot in slots[:TERMS]])
    made.slot = slots[TERMS]
    return made


def _memory(numbers: int) -> tuple[SlotMemory, list[int]]:
    arena = Arena()
    memory = SlotMemory(arena, [(torch.float32, numbers)], 0)
    slots = [arena.take(memory.slot_bytes) for _ in range(TERMS + 1)]
    for slot in slots:
        memory.vec(slot).parts[0].fill_(1.0)
    return memory, slots


def _wait(adders: Adders, made: Sum) -> None:
    while not made.is_made:
        adders.made()
        time.sleep(0.0001)


def adders(report: Report, repeats: int, numbers: int) -> None:
    memory, slots = _memory(numbers)
    at_work, rates, copies = Adders(lambda: None), list[float](), list[float]()
    for _ in range(repeats + 1):  # the first one starts threads
        made, start = _summed(memory, slots), time.perf_counter()
        at_work.make(made, memory)
        _wait(at_work, made)
        rates.append((TERMS + 1) * 4 * numbers / (time.perf_counter() - start) / 1e9)
        start = time.perf_counter()
        memory.vec(slots[0]).parts[0].copy_(memory.vec(slots[1]).parts[0])
        copies.append(2 * 4 * numbers / (time.perf_counter() - start) / 1e9)
    at_work.close()
    what = f"adders, {threads()} threads, {TERMS} vectors of {numbers:,} floats"
    report.row(what, f"{spread(rates[1:])} GB/s, a copy {median(copies[1:]):.1f}", "at least 80 on 16 cores", None)


def ping(report: Report, repeats: int) -> None:
    memory, slots = _memory(25_000_000)
    at_work, slowest = Adders(lambda: None), list[float]()
    for _ in range(repeats):
        took = list[float]()
        for _ in range(20):
            made = _summed(memory, slots)
            at_work.make(made, memory)
            while not made.is_made:
                start = time.perf_counter()
                json.loads(json.dumps(["Submit", 1, 2, 3]))
                time.sleep(0)  # as a poll does: let go of the interpreter, and want it back
                took.append(time.perf_counter() - start)
                at_work.made()
        slowest.append(sorted(took)[int(0.99 * len(took))] * 1e3)
    at_work.close()
    report.row("ping beside adders, 99th percentile", f"{spread(slowest)} ms", "at most 1 ms", median(slowest) <= 1.0)


def _start_job(rank: int) -> float:
    model = torch.nn.Linear(10, 10)
    optimizer, start = torch.optim.SGD(model.parameters(), lr=0.1), together()
    attached = ob.attach(optimizer, model, ob.eager())
    model(torch.ones(1, 10)).sum().backward()
    attached.step()
    took = time.perf_counter() - start
    attached.finish()
    return took


def start(report: Report, repeats: int) -> None:
    took = [max(run_workers(4, _start_job)) for _ in range(repeats)]
    report.row("4 processes, attach until the first step", f"{spread(took)} s", "at most 3 s", median(took) <= 3.0)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="adders,ping,start")
    parser.add_argument("--numbers", type=int, default=100_000_000)
    given = parser.parse_args()
    torch.set_num_threads(threads())
    torch.set_grad_enabled(False)
    report, only = Report("host", given), given.only.split(",")
    if "adders" in only:
        adders(report, given.repeats, given.numbers)
    if "ping" in only:
        ping(report, given.repeats)
    if "start" in only:
        start(report, given.repeats)
    report.close()


if __name__ == "__main__":
    main()
