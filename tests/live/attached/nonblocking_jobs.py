"""The scenarios of test_nonblocking_live: each is called on every rank of one group of four; it is judged there."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob
from tests.live.attached.attach_jobs import PATIENCE_S, flat, net
from tests.support.forge import attempt

SIZE, ROWS, LR = 4, 8, 0.1
EVERYBODY: dict[str, Any] = {"stop": SIZE}  # the bell waits for all, so nobody is ever late
ONE_EACH: dict[str, Any] = {"stop": 1e-9}  # a deadline that is always over: one micro-batch a round
FORMS = ("allreduce", "server", "ring", "matcha")
Pair = namedtuple("Pair", "x y")


def samples(rank: int, lo: int, hi: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples ``lo`` to ``hi`` of a rank: inputs, targets, and their numbers."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(500, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    return x[lo:hi], y[lo:hi], torch.arange(lo, hi)


def loader(rank: int, count: int, rows: int = ROWS, start: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return (samples(rank, start + k * rows, start + (k + 1) * rows) for k in range(count))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR)


def attached(strategy: ob.Strategy, **settings: Any) -> tuple[nn.Module, ob.Attached]:
    model = net()
    return model, ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S, **settings)


def learn(model: nn.Module, piece: Any) -> None:
    F.mse_loss(model(piece[0]), piece[1]).backward()


class Pace:
    """What a worker does besides learning: before the k-th micro-batch of round r, and when it is through the round."""

    def before(self, r: int, k: int, rows: int) -> None:
        """Nothing."""

    def through(self, r: int) -> None:
        """Nothing."""


class Sleeps(Pace):
    """Sleeps ``seconds(r, rows)`` before each micro-batch."""

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds

    def before(self, r: int, k: int, rows: int) -> None:
        time.sleep(self._seconds(r, rows))


class Held(Pace):
    """Workers that are held in a round until another one is through it: an order of events, whatever the machine does.

    ``held(r)`` tells who is held in round r, each before which of its micro-batches; never all of them. When another
    worker is through, the bell is on its way; from one micro-batch to the next it is given more time to come.
    """

    def __init__(self, rank: int, name: str, held: Callable[[int], Mapping[int, int]]) -> None:
        self._rank, self._held = rank, held
        self._folder = Path(os.environ["JOB_FOLDER"], name)
        self._folder.mkdir(exist_ok=True)

    def before(self, r: int, k: int, rows: int) -> None:
        first = self._held(r).get(self._rank)
        if first is None or k < first:
            return
        others = [self._folder / f"{r}-{rank}" for rank in range(SIZE) if rank != self._rank]
        while not any(file.exists() for file in others):
            time.sleep(0.001)
        time.sleep(min(0.02 * 8 ** (k - first), 0.5))

    def through(self, r: int) -> None:
        (self._folder / f"{r}-{self._rank}").touch()


def train(
    rank: int,
    strategy: ob.Strategy,
    batches: int = 6,
    pace: Pace | None = None,
    rows: int = ROWS,
    **settings: Any,
) -> dict[str, Any]:
    """A run over a loader. The log: weights before, numbers of the samples, weights after, how many pieces at most."""
    model, optimizer = attached(strategy, **settings)
    pace = pace or Pace()
    log, micro = [], []
    with optimizer:
        for r, batch in enumerate(optimizer.batches(loader(rank, batches, rows))):
            before, seen = flat(model), []
            pieces = optimizer.micro_batches(batch)
            micro.append(optimizer.me.memory.n)
            most = len(pieces)
            for k, piece in enumerate(pieces):
                assert torch.equal(flat(model), before), "the weights changed within a round"
                pace.before(r, k, len(piece[0]))
                learn(model, piece)
                seen.append(piece[2].tolist())
            pace.through(r)
            optimizer.step()
            log.append((before, seen, flat(model), most))
    return {"log": log, "final": flat(model), "used": optimizer.samples_used, "micro": micro}


def reference(rounds: list[list[tuple[int, int, int]]]) -> Tensor:
    """One process on the union of everybody's samples; a round is a list of (rank, from, to)."""
    model = net()
    optimizer = sgd(model)
    for parts in rounds:
        x, y = (torch.cat(column) for column in zip(*(samples(*part)[:2] for part in parts), strict=True))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return flat(model)


def all_of(rounds: int, rows: int = ROWS, ranks: Any = range(SIZE)) -> list[list[tuple[int, int, int]]]:
    return [[(k, r * rows, (r + 1) * rows) for k in ranks] for r in range(rounds)]


def s_nobody_late(rank: int) -> Any:
    out = {}
    for over in ("allreduce", "server"):
        for micro in (1, 3, 4, 20):
            run = train(rank, ob.nonblocking(micro, over, **EVERYBODY))
            out[over, micro] = (run["final"] - reference(all_of(6))).abs().max().item()
    return out


def s_one_micro_batch(rank: int) -> Any:
    def plain(strategy: ob.Strategy) -> Tensor:
        model, optimizer = attached(strategy)
        with optimizer:
            for batch in loader(rank, 6):
                optimizer.zero_grad()
                learn(model, batch)
                optimizer.step()
        return flat(model)

    twins = {
        "allreduce": ob.allreduce(),
        "ring": ob.dpsgd(order="atc"),
        "matcha": ob.matcha(),
        "server": ob.allreduce(),
    }
    return {k: (train(rank, ob.nonblocking(1, k))["final"] - plain(s)).abs().max().item() for k, s in twins.items()}


HELD_ROUNDS = 6  # of 8 batches: in these everybody has data


def slower(rank: int) -> Pace:
    return Sleeps(lambda _, rows: rows * (0.004 if rank == 3 else 0.001))


def stalls(r: int) -> dict[int, int]:
    """Who stalls in round r, and where: any but one, at random."""
    draw = random.Random(r)
    return {
        rank: draw.randrange(2) for rank in range(SIZE) if r < HELD_ROUNDS and rank != r % SIZE and draw.random() < 0.5
    }


def s_one_that_is_always_last(rank: int) -> Any:
    def last(r: int) -> dict[int, int]:
        return {3: 0} if r < HELD_ROUNDS else {}

    return {over: train(rank, ob.nonblocking(4, over), 8, Held(rank, f"last {over}", last)) for over in FORMS}


def s_stalls(rank: int) -> Any:
    return {over: train(rank, ob.nonblocking(4, over), 8, Held(rank, f"stalls {over}", stalls)) for over in FORMS}


def s_weighting_by_workers(rank: int) -> Any:
    return train(rank, ob.nonblocking(4, weighting="workers"), 4, slower(rank))


def s_codecs(rank: int) -> Any:
    return {over: train(rank, ob.nonblocking(4, over, codec=ob.codec.qsgd(8)), 8, slower(rank)) for over in FORMS}


def s_kinds_of_batches(rank: int) -> Any:
    x, y, _ = samples(rank, 0, ROWS)
    words = [f"sample {k}" for k in range(ROWS)]
    kinds = {
        "tensor": x,
        "tuple": (x, y),
        "list": [x, y],
        "dict": {"x": x, "y": y},
        "named tuple": Pair(x, y),
        "nested": {"x": (x, [y]), "name": "train"},
        "words": [x, words],
        "array": (x, y.numpy()),
        "user dict": UserDict({"x": x}),
    }
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    out = {}
    with optimizer:
        for kind, batch in kinds.items():
            pieces = optimizer.micro_batches(batch)
            most, handed = len(pieces), []
            for piece in pieces:
                model(x).sum().backward()
                handed.append(piece)
            optimizer.step()
            out[kind] = (most, batch, handed)
    return out


def s_leftovers_come_first(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(4, **ONE_EACH))
    seen = []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in loader(rank, 3):
            for piece in optimizer.micro_batches(batch):
                learn(model, piece)
                seen += piece[2].tolist()
            optimizer.step()
        optimizer.finish()
    return seen, optimizer.samples_used, [str(w.message) for w in said]


def s_data_is_fetched_only_when_needed(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(4, **ONE_EACH))
    fetched, when = [], []

    def slow_loader() -> Iterator[Any]:
        for k, batch in enumerate(loader(rank, 2)):
            fetched.append(k)
            yield batch

    with optimizer:
        for batch in optimizer.batches(slow_loader()):
            when.append(len(fetched))
            for piece in optimizer.micro_batches(batch):
                learn(model, piece)
            optimizer.step()
    return when, (flat(model) - reference([[(k, 2 * r, 2 * r + 2) for k in range(SIZE)] for r in range(8)])).abs().max()


def s_a_word_about_many_leftovers(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(8, **ONE_EACH))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for batch in loader(rank, 25):
            for piece in optimizer.micro_batches(batch):
                learn(model, piece)
            optimizer.step()
    messages = [str(w.message) for w in said]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.finish()
    return messages


def s_cuts_by_cost(rank: int) -> Any:
    lengths = torch.tensor([9, 1, 1, 1, 3, 3, 3, 9])
    x, y, numbers = samples(rank, 0, ROWS)
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    with optimizer:
        pieces = [
            (learn(model, piece), piece[3].tolist())[1]
            for piece in optimizer.micro_batches((x, y, numbers, lengths), cost=lambda sample: sample[3])
        ]
        optimizer.step()
    padded = torch.zeros(ROWS, 5)
    model2, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    asked = []
    with optimizer:
        for _ in optimizer.micro_batches(padded, cost=lambda sample: asked.append(len(sample)) or 1.0):
            model2(x).sum().backward()
        optimizer.step()
    return pieces, (flat(model) - reference(all_of(1))).abs().max().item(), asked


def s_micro_auto(rank: int) -> Any:
    pace = Held(rank, "micro auto", lambda r: {3: 0} if r < 5 else {})  # the rounds after which the number is adapted
    return train(rank, ob.nonblocking("auto"), 10, pace, rows=32)


def s_stop_auto(rank: int) -> Any:
    """Rank 3's batches take 1.2 s and more where they are compared; a fast one's 32 ms, or several times that."""
    pace = Sleeps(lambda r, rows: 0.15 if rank == 3 and 1 <= r < 6 else rows * 0.002)
    return train(rank, ob.nonblocking(8, stop="auto"), 6, pace, rows=16)


def s_bad_batches(rank: int) -> Any:
    x, y, _ = samples(rank, 0, ROWS)
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    out = {}
    with optimizer:
        for name, bad in {
            "unequal": (x, y[:5]),
            "scalar": (x, torch.tensor(1.0)),
            "text": ["a", "b"],
            "number": 3,
        }.items():
            out[name] = attempt(lambda bad=bad: optimizer.micro_batches(bad))
        out["cost"] = attempt(lambda: list(optimizer.micro_batches((x, y), cost=lambda sample: -1.0)))
        for piece in optimizer.micro_batches((x, y)):
            learn(model, piece)
        optimizer.step()
    out["after"] = (flat(model) - reference(all_of(1))).abs().max().item()
    return out


def s_an_empty_batch(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(4))
    handed = []
    with optimizer:
        for r in range(3):
            lo = r * ROWS
            batch = samples(rank, lo, lo if rank == 2 else lo + ROWS)
            pieces = optimizer.micro_batches(batch)
            handed.append(len(pieces))
            count = 0
            for piece in pieces:
                learn(model, piece)
                count += len(piece[0])
            optimizer.step()
        for _ in range(3 * ROWS):  # the rest, with empty batches only
            for piece in optimizer.micro_batches(samples(rank, 0, 0)):
                learn(model, piece)
            optimizer.step()
    return handed, flat(model), optimizer.samples_used


def s_few_samples(rank: int) -> Any:
    run = train(rank, ob.nonblocking(8, **EVERYBODY), 4, rows=3)
    return [most for *_, most in run["log"]], (run["final"] - reference(all_of(4, rows=3))).abs().max().item()


def s_another_strategy(rank: int) -> Any:
    model, optimizer = attached(ob.local_sgd())
    with optimizer:
        said = attempt(lambda: optimizer.micro_batches(samples(rank, 0, ROWS)))
        learn(model, samples(rank, 0, ROWS))
        optimizer.step()
        used = optimizer.samples_used
    return said, used


def s_without_micro_batches(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking())
    with warnings.catch_warnings(record=True) as said, optimizer:
        warnings.simplefilter("always")
        for batch in loader(rank, 5):
            optimizer.zero_grad()
            learn(model, batch)
            optimizer.step()
    return (flat(model) - reference(all_of(5))).abs().max().item(), [str(w.message) for w in said]


def s_an_error_that_is_caught(rank: int) -> Any:
    """The loss of one micro-batch fails once; the user goes on, and no sample is lost."""
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    seen, failed = [], False
    with optimizer:
        for batch in optimizer.batches(loader(rank, 3)):
            done = False
            while not done:
                try:
                    for piece in optimizer.micro_batches(batch):
                        if rank == 1 and not failed and 10 in piece[2]:
                            failed = True
                            raise ValueError("out of luck")
                        learn(model, piece)
                        seen += piece[2].tolist()
                    done = True
                except ValueError:
                    batch = samples(rank, 0, 0)
            optimizer.step()
    return seen, failed, (flat(model) - reference(all_of(3))).abs().max().item()


def s_breaking_off(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    seen = []
    with optimizer:
        for batch in optimizer.batches(loader(rank, 2)):
            for k, piece in enumerate(optimizer.micro_batches(batch)):
                learn(model, piece)
                seen.append(piece[2].tolist())
                if k == 1:
                    break
            optimizer.step()
    halves = [[(k, 4 * r, 4 * r + 4) for k in range(SIZE)] for r in range(4)]
    return seen, (flat(model) - reference(halves)).abs().max().item()


def s_skipping(rank: int) -> Any:
    """A micro-batch without a backward is not counted in the mean."""
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    with optimizer:
        for piece in optimizer.micro_batches(samples(rank, 0, ROWS)):
            if 2 in piece[2]:
                continue
            optimizer.zero_grad()  # a habit that does no harm here
            learn(model, piece)
        optimizer.step()
        used = optimizer.samples_used
    parts = [part for k in range(SIZE) for part in ((k, 0, 2), (k, 4, 8))]
    return used, (flat(model) - reference([parts])).abs().max().item()


def s_two_batches_before_a_step(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(16, **EVERYBODY))
    with optimizer:
        for half in (samples(rank, 0, ROWS), samples(rank, ROWS, 2 * ROWS)):
            for piece in optimizer.micro_batches(half):
                learn(model, piece)
        optimizer.step()
        used = optimizer.samples_used
        while optimizer.samples_used[rank] < 2 * ROWS:
            for piece in optimizer.micro_batches(samples(rank, 0, 0)):
                learn(model, piece)
            optimizer.step()
    return used, optimizer.samples_used


def s_resume(rank: int) -> Any:
    out = {}
    for over in ("allreduce", "ring"):
        strategy = ob.nonblocking(4, over, **ONE_EACH)
        model, optimizer = attached(strategy)
        source = optimizer.batches(loader(rank, 4))

        def rounds(model: nn.Module, optimizer: ob.Attached, source: Iterator[Any], count: int) -> None:
            for _ in range(count):
                for piece in optimizer.micro_batches(next(source)):
                    learn(model, piece)
                optimizer.step()

        rounds(model, optimizer, source, 5)
        saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        rounds(model, optimizer, source, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.finish()
        again, resumed = attached(strategy)
        again.load_state_dict(weights)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed.load_state_dict(saved)
        start = resumed.samples_used[rank]
        rounds(again, resumed, resumed.batches(loader(rank, 2, start=start)), 8)
        resumed.finish()
        difference = (flat(again) - flat(model)).abs().max().item()
        out[over] = (start, [str(w.message) for w in said], difference, resumed.samples_used)
    return out


def s_uneven(rank: int) -> Any:
    counts = [[0, 3, 5, 2], [4, 0, 1, 3], [1, 0, 0, 0]]
    return [
        (each, {over: train(rank, ob.nonblocking(4, over), each[rank], slower(rank)) for over in FORMS})
        for each in counts
    ]


def s_grad_scaler(rank: int) -> Any:
    """With a scaler, and a step in which one rank's gradients overflow."""
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    taken, log = [], []
    with optimizer:
        for r, batch in enumerate(optimizer.batches(loader(rank, 4))):
            before, seen, t = flat(model), [], optimizer.me.t
            for piece in optimizer.micro_batches(batch):
                loss = F.mse_loss(model(piece[0]), piece[1])
                scaler.scale(loss * (float("inf") if (rank, r) == (1, 2) else 1.0)).backward()
                seen.append(piece[2].tolist())
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            taken.append(optimizer.me.t > t)
            if taken[-1]:
                log.append((before, seen, flat(model), 0))
            scaler.update()
            optimizer.zero_grad()
    return {"log": log, "taken": taken, "used": optimizer.samples_used}


def s_clipping(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY), max_norm=0.05)
    with optimizer:
        batch = samples(rank, 0, ROWS)
        for piece in optimizer.micro_batches(batch):
            learn(model, piece)
        own = flat(p.grad for p in model.parameters())
        optimizer.step()
        given = flat(p.grad for p in model.parameters())
    single = net()
    learn(single, batch)
    mine = flat(p.grad for p in single.parameters())
    single = net()
    learn(single, [torch.cat([samples(k, 0, ROWS)[c] for k in range(SIZE)]) for c in (0, 1)])
    whole = flat(p.grad for p in single.parameters())
    clipped = whole * 0.05 / (whole.norm() + 1e-6)  # as torch does it
    return (own - mine).abs().max().item(), (given - clipped).abs().max().item(), given.norm().item()


def s_low_precision(rank: int) -> Any:
    """Sums of many micro-batches are kept wide: bfloat16 would lose what is small beside the sum."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1.0), model, ob.nonblocking(256, **EVERYBODY))
    with torch.no_grad():
        model.weight.zero_()
    with optimizer:
        for piece in optimizer.micro_batches(torch.ones(512, 1, dtype=torch.bfloat16)):
            (-model(piece).mean()).backward()
        optimizer.step()
    return model.weight.item()


# Jobs of their own.


def failing(rank: int, how: str) -> str:
    def rounds() -> None:
        ob.init()
        model, optimizer = attached(ob.nonblocking(4))
        with optimizer:
            for r, batch in enumerate(optimizer.batches(loader(rank, 20))):
                for piece in optimizer.micro_batches(batch):
                    time.sleep(0.002)
                    if rank == 1 and r == 3:
                        if how == "unequal":
                            optimizer.micro_batches((piece[0], piece[1][:1]))
                        raise ValueError("the loss of rank 1 is out of luck")
                    learn(model, piece)
                optimizer.step()

    return attempt(rounds)
