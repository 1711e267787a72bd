"""A job in which a worker is killed, and comes back: what ``offbeat demo --kill`` shows.

The workers are processes of ``offbeat launch``, and each of them runs this module. They share one supply of batches, so
it can be said of each batch whether it was used. DDP, which cannot go on, has its fixed share of them.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch.distributed as dist

from offbeat.basics.units import format_ranks
from offbeat.live.attached.attach import attach
from offbeat.live.attached.optimizer import Attached
from offbeat.live.job.ddp import Ddp
from offbeat.live.job.scripts import run_script
from offbeat.live.transport.errors import OffbeatError
from offbeat.live.transport.hosts import returns
from offbeat.live.work.share import share
from offbeat.method.strategy import Method
from offbeat.tasks.task import Task

BATCH = 32  # samples, as the digits have them
SAY_S = 1.0  # how often it is said how far the job is


@dataclass(frozen=True)
class Killing:
    """``victim`` is killed inside the step with which it has taken ``at`` steps; None: nobody is."""

    method: Method | Literal["ddp"]
    task: Task
    steps: int
    seed: int
    compute_s: float
    victim: int | None
    at: int


class Survivor(NamedTuple):
    """How a worker ended: when, after how many steps in its last life, and what it says of the run."""

    end_s: float
    steps: int
    of_work: list[str]
    of_deaths: list[str]
    metrics: dict[str, float]


class Survived(NamedTuple):
    """How a job ended. ``ended``: by rank; ``seconds``: from the first worker's first step to the last one's end."""

    seconds: float
    ended: dict[int, Survivor]


def kill_one(killing: Killing, workers: int) -> Survived:
    """Run it. Who dies, and who is started again, the launcher says while it lasts."""
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        Path(folder, "killing").write_bytes(pickle.dumps(killing))
        run_script(["-m", __name__, folder], workers, restarts=int(killing.method != "ddp"))
        ended = {int(file.suffix[1:]): json.loads(file.read_bytes()) for file in Path(folder).glob("ended.*")}
        parts = {rank: Survivor(**told) for rank, told in sorted(ended.items())}
        began_s = [float(file.read_text(encoding="ascii")) for file in Path(folder).glob("began.*")]
    ends_s = [one.end_s for one in parts.values()]
    return Survived(max(ends_s, default=0.0) - min(began_s, default=0.0) if parts else 0.0, parts)


def main(folder: str) -> None:
    killing: Killing = pickle.loads(Path(folder, "killing").read_bytes())
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task, model = killing.task, killing.task.build(killing.seed).train()
    inner = task.optimizer([p for p in model.parameters() if p.requires_grad])
    optimizer: Attached | Ddp
    batches: Iterable[Sequence[int]]
    if isinstance(killing.method, Method):
        try:
            optimizer = attach(inner, model, killing.method, seed=killing.seed)
        except OffbeatError as error:
            if not returns():
                raise
            print(error, flush=True)  # too late: the others have used all batches meanwhile
            return
        batches = supply = share(range(BATCH * killing.steps * workers), BATCH, shuffle=False)
    else:
        dist.init_process_group("gloo")
        optimizer, supply = Ddp(inner, model), None
        batches = [[BATCH * number] for number in range(rank, killing.steps * workers, workers)]
    if not returns():
        Path(folder, f"began.{rank}").write_text(str(time.time()), encoding="ascii")
    steps, said_s = 0, 0.0
    try:
        with optimizer:
            for first, *_ in batches:  # of its samples
                step, whose = divmod(first // BATCH, workers)
                time.sleep(killing.compute_s)
                forward = optimizer.model if isinstance(optimizer, Ddp) else model
                loss = task.value(forward, task.take(whose, step))
                optimizer.zero_grad()
                if isinstance(optimizer, Ddp):
                    optimizer.backward(loss)
                else:
                    loss.backward()
                if rank == killing.victim and not returns() and steps == killing.at:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
                steps += 1
                there = optimizer.members if isinstance(optimizer, Attached) else tuple(range(workers))
                if rank == there[0] and time.monotonic() - said_s > SAY_S:
                    said_s = time.monotonic()
                    print(f"step {steps}, loss {loss.item():.3f}, with {format_ranks(there)}", flush=True)
    except RuntimeError as error:
        if supply is not None:
            raise
        print(
            f"DDP ends after {steps} of {killing.steps} steps: {str(error).splitlines()[0].rpartition('] ')[2][:80]}",
            flush=True,
        )
        os._exit(1)
    sentences = optimizer.summary().sentences if isinstance(optimizer, Attached) else ()
    told = Survivor(
        time.time(),
        steps,
        supply.told() if supply is not None else [],
        [sentence for sentence in sentences if " died " in sentence],
        dict(task.evaluate(model)) if task.evaluate is not None and rank == 0 else {},
    )
    Path(folder, f"ended.{rank}").write_text(json.dumps(told._asdict()), encoding="utf-8")
    with suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
