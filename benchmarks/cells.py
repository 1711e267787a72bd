"""Which cells the study has: step times, messages, optimisers, workers and tasks, chosen before any result was seen.

A *design* is a list of cells and the methods that are run in them. Step times: two profiles of everybody late now and
then, one of a worker in 16 that is 2.5 times slower for good, one of four speeds, Pareto, log-normal. A message (one
copy of the model on the wire) is free, or takes 0.5, 2 or 8 median steps. SGD with momentum 0.9, or AdamW.

* *first*: digits, 100 median steps. All 24 pairs of step times i = 0 … 5 and message j = 0 … 3, each once. The other
  two factors follow from i and j by a rule that is fixed here: AdamW where i + ⌊j/2⌋ is odd; 8, 32 or 128 workers as
  ⌊i/2⌋ + j leaves 0, 1 or 2 by 3. So every pair of levels of any two factors occurs. The fewest workers are run first,
  and among equals those with i + j even; where the time ends before the list does, what is left out is its end, cells
  of 128 workers.
* *fashion*: Fashion-MNIST, 100 median steps; the i-th step times with message i mod 4, AdamW where i + ⌊i/4⌋ is odd, 8
  workers, or 32 where i is 2 or 3. Rivals: all-reduce, and those that were best or second best in a cell of *first*.
* *verses*: a small Transformer on the characters of verses, 120 median steps; the i-th step times with message i + 2
  mod 4, AdamW where i + 1 + ⌊i/4⌋ is odd, 8 workers, or 16 where i is 2 or 3. Rivals as for *fashion*.
* *thousand*: digits, 1,024 workers, 60 median steps: one in 16 slow for good, and Pareto, each with free messages and
  with such as take 2 steps, each optimiser with both. Rivals: all-reduce, AD-PSGD, and those that were best in a cell
  of *first* with 128 workers.
* *samples*: the Transformer with AdamW and 4, 8, 16 workers that take 400 gradients each on average, equally many in
  all for every method, nobody slow (log-normal, σ = 0.1), messages free: what not waiting costs where nobody is late.
* *few*: 5, 6, 7 and 8 workers, where the settings for few of them and for many meet, at equal time (everybody late now
  and then, a message takes half a step) and at equal samples (nobody slow, messages free): the Transformer with AdamW
  for 200 median steps, digits with momentum for 100.
* *host*: 8 and 16 workers on one host, where messages cost next to nothing and nothing is coded: the i-th step times
  with digits, AdamW where i is odd, 16 workers where i is 2 or 3; the Transformer with AdamW, everybody late now and
  then with 8 workers, four speeds with 16. Pairs as they meet, and everyone, as soon as an eighth or half of them have
  handed in.
* *grace*: digits, 32 workers, 100 median steps, a message takes half a step; log-normal times with AdamW, one in 16
  slow for good with momentum: what a grace window does to the loss.
* *chronic*: the cells of *first*, *fashion* and *verses* in which some workers are slow for good, those with the most
  workers last. A second look, with the rivals that were best in one of them, for more seeds to tune with and to judge
  by: with one seed, which rate is best is chance in these small tasks, and a wrong one costs more than the methods
  differ by.
* *quick*: the cells of *first* and *thousand* with 128 workers or more and messages that are free or take half a step:
  a second look like that of *chronic*, with the rivals that were best in one of them.
* *draw 0*, a setting in all of them: the default without drawing, which is the default of more than 16 workers.
* *coded*: the cells of *first* with 8 or 32 workers, some of which are slow for good. The rivals that were best or
  second best in a cell of *first*, and can be coded, with the codec that self_clocked has between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import offbeat as ob

TIMES = {
    "bytedance-se": ob.delays.profile("bytedance-se", 1.0),
    "bytedance-se-micro": ob.delays.profile("bytedance-se-micro", 1.0),
    "bytedance-ar": ob.delays.profile("bytedance-ar", 1.0),
    "async-diloco": ob.delays.profile("async-diloco", 1.0),
    "pareto": ob.delays.pareto(0.68, 1.8, 20.0),
    "lognormal": ob.delays.lognormal(1.0, 0.5),
}
EVEN = "even"
STEP_TIMES = {**TIMES, EVEN: ob.delays.lognormal(1.0, 0.1)}
MESSAGES = (0.0, 0.5, 2.0, 8.0)
OPTIMISERS = ("momentum", "AdamW")
WORKERS = (8, 32, 128)
RATES = {
    ("digits", "momentum"): (0.05, 0.1, 0.2, 0.4),
    ("digits", "AdamW"): (0.005, 0.01, 0.02, 0.04),
    ("fashion", "momentum"): (0.0125, 0.025, 0.05, 0.1),
    ("fashion", "AdamW"): (0.0025, 0.005, 0.01, 0.02),
    ("verses", "momentum"): (0.1, 0.2, 0.4, 0.8),
    ("verses", "AdamW"): (0.002, 0.004, 0.008, 0.016),
}
POINTS = {"digits": 40, "fashion": 20, "verses": 20}  # looks at the loss, which cost more where more is held out

RIVALS = {
    "all-reduce": ob.allreduce(),
    "local SGD 8": ob.local_sgd(8),
    "DaSGD 8/4 correct": ob.dasgd(8, 4, merge="correct"),
    "AD-PSGD": ob.ad_psgd(),
    "SGP": ob.sgp(),
    "eager 1/2": ob.eager(wait=0.5, sync="bounded", staleness=20, grace=0),
    "eager 1/2 late": ob.eager(wait=0.5, sync="bounded", staleness=20, late=1, grace=0),
    "WAGMA 1/8 pairs correct": ob.wagma(wait=0.125, group=2, merge="correct", sync="bounded", staleness=20),
    "Ringmaster": ob.ringmaster(),
    "Decoupled": ob.decoupled(),
    "Decoupled every 6": ob.decoupled(every=6),  # four tensors, so four fragments: a turn of 24 steps, as its card says
    "m-sync 3/4": ob.msync("75%"),
    "SparseLoCo 8": ob.sparseloco(8, codec=ob.codec.topk(128)),
    "local SGD 16 by speed": ob.local_sgd(16, pace="speed"),  # 16 was the best of 8, 16 and 32 in two cells
}
DEFAULT, UNDRAWN, UNCODED = "self-clocked", "self-clocked draw 0", "self-clocked uncoded"
OURS = {
    DEFAULT: ob.self_clocked(),
    UNDRAWN: ob.self_clocked(draw=0),
    UNCODED: ob.self_clocked(codec=None),
    "self-clocked period 2 squares 1": ob.self_clocked(period=2, squares=1, codec=None),
    "self-clocked squares 1": ob.self_clocked(squares=1, codec=None),
    "self-clocked squares 4": ob.self_clocked(squares=4, codec=None),
    "self-clocked period 2 squares 1 pause 0": ob.self_clocked(period=2, pause=0.0, squares=1, codec=None),
}
AS_FEW, AS_MANY, AT_HALF = "self-clocked as few", "self-clocked as many", "self-clocked everyone at half"
SETTINGS = {  # squares beyond the number of workers count as so many
    AS_FEW: ob.self_clocked(period=1, group=None, wait=0.125, pause=0.0, squares=1024, codec=None),
    AS_MANY: ob.self_clocked(period=1, group=2, pause=1.0, squares=16, codec=None),
    AT_HALF: ob.self_clocked(period=1, group=None, pause=0.0, wait=0.5, squares=16, codec=None),
}
GRACE = {
    "eager 1/2, grace": ob.eager(wait=0.5, sync="bounded", staleness=20),
    "WAGMA 1/8 pairs correct, grace": ob.wagma(
        wait=0.125, group=2, merge="correct", sync="bounded", staleness=20, grace="auto"
    ),
    "Decoupled, grace": ob.decoupled(grace="auto"),
}
INT8 = ob.codec.int8()
CODED = {
    "local SGD 8, int8": ob.local_sgd(8, codec=INT8),
    "DaSGD 8/4 correct, int8": ob.dasgd(8, 4, merge="correct", codec=INT8),
    "SGP, int8": ob.sgp(codec=INT8),
    "WAGMA 1/8 pairs correct, int8": ob.wagma(
        wait=0.125, group=2, merge="correct", sync="bounded", staleness=20, codec=INT8
    ),
}
Ends = Literal["time", "samples"]
METHODS = {**RIVALS, **OURS, **SETTINGS, **GRACE, **CODED}
CHRONIC = ("bytedance-ar", "async-diloco")
BY_SPEED = "local SGD 16 by speed"
BEST_OF_QUICK = ("AD-PSGD", "WAGMA 1/8 pairs correct")
BEST_OF_128 = ("local SGD 8", "DaSGD 8/4 correct", "WAGMA 1/8 pairs correct", BY_SPEED)
M_SYNC = "m-sync 3/4"
BEST_OF_CHRONIC = (
    "local SGD 8", "DaSGD 8/4 correct", "AD-PSGD", "WAGMA 1/8 pairs correct", "Ringmaster", BY_SPEED, M_SYNC,
)  # fmt: skip
AMONG_TWO_BEST = (*BEST_OF_CHRONIC, "SGP", "SparseLoCo 8")


@dataclass(frozen=True)
class Cell:
    times: str
    message: float
    optimiser: str
    workers: int
    task: str = "digits"
    units: float = 100.0  # median steps of virtual time; or, where samples end the run, gradients a worker
    ends: Ends = "time"

    def __str__(self) -> str:
        cost = f"a message takes {self.message:g} steps" if self.message else "messages are free"
        what = "" if self.task == "digits" else f"{self.task}, "
        end = "" if self.ends == "time" else ", equal samples"
        return f"{what}{self.times}, {cost}, {self.optimiser}, {self.workers} workers{end}"


@dataclass(frozen=True)
class Design:
    """Cells, the methods that are run in them, and which of these are held against which at the end."""

    cells: list[Cell]
    methods: tuple[str, ...]
    against: dict[str, str] = field(default_factory=dict)
    target: float = float("inf")  # of the loss over the other's


def first() -> Design:
    cells: list[tuple[int, int, Cell]] = []
    for i, times in enumerate(TIMES):
        for j, message in enumerate(MESSAGES):
            optimiser, workers = OPTIMISERS[(i + j // 2) % 2], WORKERS[(i // 2 + j) % 3]
            cells.append((workers, (i + j) % 2, Cell(times, message, optimiser, workers)))
    return Design([cell for *_, cell in sorted(cells, key=lambda c: c[:2])], (*RIVALS, *OURS))


def fashion() -> Design:
    cells = [
        Cell(times, MESSAGES[i % 4], OPTIMISERS[(i + i // 4) % 2], 32 if i in (2, 3) else 8, "fashion")
        for i, times in enumerate(TIMES)
    ]
    return Design(cells, ("all-reduce", *AMONG_TWO_BEST, UNCODED, UNDRAWN, DEFAULT))


def verses() -> Design:
    cells = [
        Cell(times, MESSAGES[(i + 2) % 4], OPTIMISERS[(i + 1 + i // 4) % 2], 16 if i in (2, 3) else 8, "verses", 120.0)
        for i, times in enumerate(TIMES)
    ]
    return Design(cells, ("all-reduce", *AMONG_TWO_BEST, UNCODED, UNDRAWN, DEFAULT))


def thousand() -> Design:
    cells = [
        Cell(times, message, OPTIMISERS[(i + j) % 2], 1024, units=60.0)
        for i, times in enumerate(("pareto", "bytedance-ar"))
        for j, message in enumerate((0.0, 2.0))
    ]
    return Design(cells, ("all-reduce", "AD-PSGD", *BEST_OF_128, UNCODED, UNDRAWN, DEFAULT))


def samples() -> Design:
    cells = [Cell(EVEN, 0.0, "AdamW", workers, "verses", 400.0, "samples") for workers in (4, 8, 16)]
    methods = (DEFAULT, UNDRAWN, UNCODED, AS_FEW, AT_HALF)
    return Design(cells, ("all-reduce", *methods), dict.fromkeys(methods, "all-reduce"), 1.02)


def few() -> Design:
    places: tuple[tuple[Ends, str, float], ...] = (("time", "bytedance-se", 0.5), ("samples", EVEN, 0.0))
    cells = [
        Cell(times, message, optimiser, workers, task, units, ends)
        for task, optimiser, units in (("digits", "momentum", 100.0), ("verses", "AdamW", 200.0))
        for ends, times, message in places
        for workers in (5, 6, 7, 8)
    ]
    return Design(cells, (AS_FEW, AS_MANY), {AS_FEW: AS_MANY})


def host() -> Design:
    cells = [Cell(t, 0.0, OPTIMISERS[i % 2], 16 if i in (2, 3) else 8) for i, t in enumerate(TIMES)]
    for times, workers in (("bytedance-se", 8), ("async-diloco", 16)):
        cells.append(Cell(times, 0.0, "AdamW", workers, "verses", 120.0))
    methods = (AS_MANY, AS_FEW, AT_HALF)
    return Design(cells, ("AD-PSGD", *methods), dict.fromkeys(methods, "AD-PSGD"))


def chronic() -> Design:
    cells = [cell for made in (first, fashion, verses) for cell in made().cells if cell.times in CHRONIC]
    return Design(sorted(cells, key=lambda cell: cell.workers > 32), (*BEST_OF_CHRONIC, DEFAULT))


def quick() -> Design:
    cells = [cell for made in (first, thousand) for cell in made().cells if cell.workers >= 128 and cell.message <= 0.5]
    return Design(cells, (*BEST_OF_QUICK, DEFAULT))


def grace() -> Design:
    cells = [Cell("lognormal", 0.5, "AdamW", 32), Cell("bytedance-ar", 0.5, "momentum", 32)]
    without = {name: name.removesuffix(", grace") for name in GRACE}
    return Design(cells, (*without.values(), *GRACE), without)


def coded() -> Design:
    cells = [cell for cell in first().cells if cell.times in CHRONIC and cell.workers <= 32]
    return Design(cells, (*CODED, UNCODED, UNDRAWN, DEFAULT), {DEFAULT: UNCODED})


DESIGNS = {
    made.__name__: made for made in (first, fashion, verses, thousand, samples, few, host, chronic, quick, grace, coded)
}
