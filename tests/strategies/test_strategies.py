"""What every strategy must do, as tables over all of them: a new one adds a row."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import pickle
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat import topology
from offbeat.method.effects import Begin, Finish, Grad, GradMix, Mix, Next, Ticket, Turn
from offbeat.method.replica import Replica
from offbeat.method.strategy import Strategy
from offbeat.tensors.stretches import CodedShare, Stretches, coded_mean
from offbeat.tensors.sums import coded, keep, mean, owing, weighted
from offbeat.tensors.vector import Vec
from offbeat.topology import matchings

TASK = ob.tasks.regression(dimension=5, batch=2)
EDGES = [(0, 1)]

STRATEGIES = {
    "allreduce": ob.allreduce(),
    "qsgd": ob.qsgd(),
    "local_sgd": ob.local_sgd(3),
    "adaptive": ob.adaptive(2),
    "dasgd": ob.dasgd(4, 2),
    "dasgd correct": ob.dasgd(4, 3, merge="correct"),
    "dasgd at once": ob.dasgd(2, 0),
    "dpsgd": ob.dpsgd(),
    "dpsgd atc": ob.dpsgd("hypercube", order="atc"),
    "sgp": ob.sgp(),
    "sgp uneven": ob.sgp("grid"),
    "matcha": ob.matcha(),
    "matcha whole": ob.matcha("complete", budget=1.0),
    "diloco": ob.diloco(3),
    "diloco overlap": ob.diloco(4, overlap=3, merge=0.5),
    "streaming": ob.diloco(6, fragments=2, overlap=1, merge=0.5),
    "sparseloco": ob.sparseloco(3, codec=None),
    "noloco": ob.noloco(3),
}
CODECS = {
    "bf16": ob.codec.bf16(),
    "int8": ob.codec.int8(bucket=4),  # of which several workers own some
    "qsgd": ob.codec.qsgd(4),
    "topk": ob.codec.topk(16, chunk=64),
}
SEND_LATER = {"local_sgd", "adaptive", "dasgd", "diloco", "sparseloco"}  # what a codec left out
CODED = {
    f"{name}, {word}": ob.strategy(made.name, **{**made.settings, "codec": codec})
    for name, made in STRATEGIES.items()
    if "codec" in made.settings
    for word, codec in CODECS.items()
    if word != "topk" or made.name in SEND_LATER
}
ALL = STRATEGIES | CODED

every = pytest.mark.parametrize("name", ALL)


def simulate(name: str, task: ob.Task | None = TASK, workers: int = 4, **how: Any) -> ob.Run:
    return ob.simulate(ALL[name], task, workers=workers, **({"steps": 9} | how))


def test_the_registry_has_every_strategy_in_its_order() -> None:
    order = ["allreduce", "qsgd", "local_sgd", "adaptive", "dasgd", "dpsgd", "sgp", "matcha", "diloco"]
    order += ["sparseloco", "noloco"]
    assert [name for name in ob.STRATEGIES if name in order] == order
    assert {made.name for made in STRATEGIES.values()} == set(order)


@pytest.mark.parametrize("name", ob.STRATEGIES)
def test_every_card_is_complete(name: str) -> None:
    card = ob.STRATEGIES[name]
    assert card.make is getattr(ob, name)
    for words in ("*When it helps*", "*When it hurts*", "*Suggested settings*"):
        assert words in card.text
    paper = card.paper
    assert all((paper.title, paper.authors, paper.venue, paper.laws))
    assert all((card.summary, card.helps, card.hurts, card.suggested, card.departures))
    assert (paper.arxiv is None) == (paper.venue == "Offbeat"), "a method of this project has no paper"
    assert paper.arxiv is None or paper.arxiv in paper.bibtex()
    settings = inspect.signature(card.make).parameters
    assert all(p.default is not p.empty for p in settings.values()), "every setting has the paper's default"
    assert list(card.make().settings) == list(settings)


AT_CONFERENCES = {"qsgd", "local_sgd", "eager", "ringmaster", "dpsgd", "ad_psgd", "sgp"}
OF_NO_VENUE = {"self_clocked"}


@pytest.mark.parametrize("name", ob.STRATEGIES)
def test_a_reference_is_of_the_kind_of_its_venue(name: str) -> None:
    paper = ob.STRATEGIES[name].paper
    entry = paper.bibtex()
    if name in AT_CONFERENCES:
        kind, where = "inproceedings", "booktitle"
    else:
        kind, where = ("misc", "howpublished") if name in OF_NO_VENUE else ("article", "journal")
    assert entry.startswith(f"@{kind}{{{paper.key},")
    assert f"  {where} = {{{paper.venue}}}" in entry


@every
def test_a_strategy_prints_as_its_call_and_survives_pickling(name: str) -> None:
    again = pickle.loads(pickle.dumps(ALL[name]))
    assert str(again) == str(ALL[name])
    assert str(again).startswith(f"{ALL[name].name}(")
    assert ob.simulate(again, TASK, 3, 5).hash == simulate(name, workers=3, steps=5).hash


@every
def test_the_same_seed_gives_the_same_run_and_another_seed_another(name: str) -> None:
    assert simulate(name, seed=3).hash == simulate(name, seed=3).hash
    assert simulate(name, seed=3).hash != simulate(name, seed=4).hash


@every
def test_delays_change_the_time_and_not_the_weights(name: str) -> None:
    calm = simulate(name)
    late = simulate(name, delays=ob.delays.random(ranks=2, seconds=0.37), compute_s=ob.delays.uniform(0.05, 0.2))
    assert torch.equal(calm.weights, late.weights)
    assert torch.equal(calm.final, late.final)
    assert late.seconds > calm.seconds


@given(
    st.sampled_from(sorted(ALL)), st.integers(1, 9), st.sampled_from(["steps", "samples"]), st.integers(0, 17),
    st.integers(0, 99),
)  # fmt: skip
def test_any_number_of_workers_and_steps_ends_with_finite_weights(
    name: str, workers: int, end: str, count: int, seed: int
) -> None:
    how: dict[str, Any] = {end: count}
    run = ob.simulate(ALL[name], TASK, workers, **how, seed=seed, delays=ob.delays.exponential(0.1))
    assert run.final.shape == (5,)
    assert torch.isfinite(run.final).all()
    assert torch.isfinite(run.weights).all()
    assert run.gradients == (count,) * workers if end == "steps" else sum(run.gradients) == count


@every
@pytest.mark.parametrize("end", [{"samples": 23}, {"seconds": 1.55}], ids=str)
def test_uneven_work_ends_without_a_deadlock_and_uses_every_sample(name: str, end: Any) -> None:
    run = simulate(name, workers=5, steps=None, compute_s=lambda step, rank: 0.1 * (1 + rank), **end)
    assert "samples" not in end or sum(run.gradients) == 23  # which five workers cannot share evenly
    assert torch.isfinite(run.final).all()


@every
def test_time_alone_runs_the_very_same_schedule(name: str) -> None:
    """The time-only run sends messages for the same steps as the real one, of the size of its own model."""
    network = ob.Network(latency_s=0.01, bandwidth_Bps=math.inf)
    real = simulate(name, network=network)
    time = simulate(name, task=None, parameters=5, network=network)
    if ALL[name].name != "adaptive":  # whose period follows the weights, and time alone has none
        assert time.finished_s == pytest.approx(real.finished_s)
        assert len(time.trace.rounds) == len(real.trace.rounds)
    assert time.weights.numel() == 0


@pytest.mark.parametrize("name", CODED)
def test_a_codec_sends_fewer_bytes_and_still_learns(name: str) -> None:
    plain = name.split(",")[0]
    task = ob.tasks.regression(dimension=512, batch=64, lr=0.03, dtype=torch.float32)
    coded, exact = (ob.simulate(ALL[n], task, 3, 12) for n in (name, plain))
    assert coded.wire_bytes < 0.8 * exact.wire_bytes
    assert coded.losses[-1] < 0.5 * coded.losses[0]
    assert not torch.equal(coded.final, exact.final)


# ----------------------------------------------------------------------------------------- what a strategy hides


HIDDEN = {"dasgd": ob.dasgd(4, 2), "dpsgd": ob.dpsgd(), "streaming": ob.diloco(6, fragments=2, overlap=2)}
IN_THE_OPEN = {"dasgd": ob.dasgd(4, 0), "dpsgd": ob.dpsgd(order="atc"), "streaming": ob.diloco(6, fragments=2)}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_exchange_shorter_than_its_delay_costs_no_time(name: str) -> None:
    network = ob.Network(latency_s=0.01, bandwidth_Bps=math.inf)
    hidden, shown = (ob.simulate(s[name], None, 4, 24, network=network) for s in (HIDDEN, IN_THE_OPEN))
    assert hidden.seconds == pytest.approx(2.4)
    assert sum(hidden.wait_s) == pytest.approx(0)
    assert shown.seconds > 2.4
    assert hidden.wire_bytes == shown.wire_bytes


def test_streaming_sends_the_same_bytes_in_smaller_pieces() -> None:
    whole, pieces = (ob.simulate(ob.diloco(12, fragments=f), None, 4, 24) for f in (1, 4))
    assert whole.wire_bytes == pieces.wire_bytes
    assert len(pieces.trace.rounds) == 4 * len(whole.trace.rounds)


def test_a_smaller_budget_sends_fewer_messages() -> None:
    sent = [ob.simulate(ob.matcha("ring", budget), None, 8, 200).wire_bytes for budget in (0.25, 0.5, 1.0)]
    assert sent[0] / sent[2] == pytest.approx(0.25, abs=0.06)
    assert sent[1] / sent[2] == pytest.approx(0.5, abs=0.06)


def test_a_round_in_which_somebody_keeps_its_own_is_recorded_too() -> None:
    """On a ring of three each matching leaves one worker out."""
    plan = matchings.plan(topology.edges("ring", 3), 3, 0.2)
    talked = [step for step in range(20) if any(matchings.active(plan, 0, step))]
    assert 0 < len(talked) < 20
    assert len(ob.simulate(ob.matcha(budget=0.2), TASK, 3, 20).trace.rounds) == len(talked)


def test_batch_statistics_stay_sound_and_are_averaged_at_the_end() -> None:
    """BatchNorm's running variance must not turn negative by any merge, and its mean lie among the workers'."""
    task = ob.Task(
        model=lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)).double(),
        loss=torch.nn.functional.mse_loss,
        batch=lambda rank, step: (
            torch.full((2, 3), float(rank)).double() + torch.eye(3)[:2],
            torch.ones(2, 1).double(),
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    for name in STRATEGIES:
        run = ob.simulate(STRATEGIES[name], task, 3, 4)
        assert run.model is not None
        buffers = dict(run.model.named_buffers())
        assert torch.isfinite(buffers["0.running_var"]).all(), name
        assert (buffers["0.running_var"] > 0).all(), name
        assert 0 < buffers["0.running_mean"].min() < 2, name


# ------------------------------------------------------------------------------------------------- bad settings

BAD: dict[str, Callable[[], object]] = {
    "qsgd: bits is 1": lambda: ob.qsgd(1),
    "17 bits": lambda: ob.qsgd(17),
    "qsgd: bucket is 0": lambda: ob.qsgd(bucket=0),
    "adaptive: period is 0": lambda: ob.adaptive(0),
    "adaptive: cap is 0": lambda: ob.adaptive(cap=0),
    "adaptive: a period of 9 is over its cap of 8": lambda: ob.adaptive(9, cap=8),
    "adaptive: sampling is -1": lambda: ob.adaptive(sampling=-1),
    "adaptive: low is 2 and high is 1": lambda: ob.adaptive(low=2, high=1),
    "adaptive: low is nan": lambda: ob.adaptive(low=math.nan),
    "dasgd: period is 2.5": lambda: ob.dasgd(2.5),  # type: ignore[arg-type]
    "a delay of 4 steps does not fit a period of 4": lambda: ob.dasgd(4, 4),
    "dasgd: delay is -1": lambda: ob.dasgd(4, -1),
    "dasgd: xi is 1.5": lambda: ob.dasgd(xi=1.5),
    "dasgd: merge is 'replace', but must be one of 'paper', 'correct'": lambda: ob.dasgd(
        merge="replace"  # type: ignore[arg-type]
    ),
    "no graph named 'rign'": lambda: ob.dpsgd("rign"),
    "dpsgd: order is 'act', but must be one of 'cta', 'atc'": lambda: ob.dpsgd(
        order="act"  # type: ignore[arg-type]
    ),
    "no graph named 'star'": lambda: ob.sgp("star"),
    "matcha: a budget of 0 never mixes": lambda: ob.matcha(budget=0),
    "matcha: budget is 2": lambda: ob.matcha(budget=2),
    "diloco: period is 0": lambda: ob.diloco(0),
    "a period of 500 steps cannot be shared by 3 fragments": lambda: ob.diloco(fragments=3),
    "an overlap of 2 steps does not fit the 2 steps": lambda: ob.diloco(4, fragments=2, overlap=2),
    "diloco: merge is 1.5": lambda: ob.diloco(merge=1.5),
    "diloco: outer_momentum is -0.1": lambda: ob.diloco(outer_momentum=-0.1),
    "noloco: period is True": lambda: ob.noloco(True),
    "noloco: pull is -1": lambda: ob.noloco(pull=-1),
    "6 fragments do not fit a model of 5": lambda: ob.simulate(ob.diloco(6, fragments=6), TASK, 2, 3),
    "cannot reach each other": lambda: ob.simulate(ob.matcha(EDGES), TASK, 3, 3),
    "leaves the ranks": lambda: ob.simulate(ob.dpsgd([(0, 9)]), TASK, 3, 3),
    "did you mean 'matcha'": lambda: ob.strategy("macha"),
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_bad_setting_is_answered_with_a_sentence(sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        BAD[sentence]()


# ------------------------------------------------------------------------------------------- stopping and resuming


class InFlight(Ticket):
    def __init__(self, seq: Any) -> None:
        self.seq = seq


class Lockstep:
    """A third world, small enough to read: all workers in memory, saved and resumed at any step."""

    def __init__(self, strategy: ob.Strategy, workers: int, saved: Any = None) -> None:
        self.x = saved.x if saved else [torch.linspace(-1, 1, 6, dtype=torch.float64) for _ in range(workers)]
        self.me = [
            Replica(r, workers, Vec((self.x[r],)), Vec(()), self._updater(r), lambda: [{"lr": 0.1}], seed=5, horizon=20)
            for r in range(workers)
        ]
        for r, me in enumerate(self.me):
            me.t, me.memory = (saved.t, saved.memory[r]) if saved else (0, SimpleNamespace())
        self.body = [strategy.body(me) for me in self.me]
        self.asked = [body.send(None) for body in self.body]
        self.seq = [0] * workers
        self.posts: dict[int, dict[int, tuple[Any, Any]]] = {}
        self.means: dict[int, Vec | None] = {}

    def _updater(self, rank: int) -> Callable[[Vec], None]:
        def update(g: Vec) -> None:
            self.x[rank].sub_(0.1 * g.parts[0])

        return update

    def run(self, until: int) -> SimpleNamespace:
        """Until all ask for step ``until``; then what a checkpoint holds."""
        while any(not (isinstance(e, Next) and e.t == until) for e in self.asked):
            moved = [r for r in range(len(self.me)) if self._move(r, until)]
            assert moved, f"nobody can move: {self.asked}"
        return copy.deepcopy(SimpleNamespace(t=until, x=self.x, memory=[me.memory for me in self.me]))

    def _move(self, r: int, until: int) -> bool:
        effect: Any = self.asked[r]
        if isinstance(effect, Next):
            if effect.t == until:
                return False
            return self._send(r, Turn.WORK)
        if isinstance(effect, Grad):
            return self._send(r, self._gradient(r))
        if isinstance(effect, Begin):
            of: Any = effect.effect
            return self._send(r, self._post(r, of.x, of))
        if isinstance(effect, Mix | GradMix):
            x = effect.x if isinstance(effect, Mix) else self._gradient(r)
            self.asked[r] = Finish(self._post(r, x, effect))
            return True
        posts = self.posts[effect.ticket.seq]
        if len(posts) < len(self.me):
            return False
        W = posts[r][1]
        block = W.block(r)
        shares = {j: x for j, (x, _) in posts.items()}
        if block and isinstance(shares[r], CodedShare):
            if effect.ticket.seq not in self.means:
                self.means[effect.ticket.seq] = coded_mean([shares[j] for j in block], len(block))
            return self._send(r, self.means[effect.ticket.seq])
        if block:
            return self._send(r, mean([shares[j] for j in block], len(block)))
        return self._send(r, weighted((w, shares[j]) for j, w in W.row(r).items()))

    def _send(self, r: int, answer: Any) -> bool:
        self.asked[r] = self.body[r].send(answer)
        return True

    def _post(self, r: int, x: Vec, effect: Any) -> InFlight:
        ticket = InFlight(self.seq[r])
        self.seq[r] += 1
        wanted = owing(x, getattr(effect, "lost", None))
        share: Any = coded(wanted, effect.codec, (r,)) if effect.codec else x.clone()
        if isinstance(effect, Mix) and effect.in_two_phases(r):
            assert effect.codec is not None
            share = CodedShare(x, Stretches(x, effect.codec, len(self.me)), r, (r,), effect.lost)
        elif isinstance(effect, Mix) and effect.codec:
            keep(effect.lost, wanted, share)
        self.posts.setdefault(ticket.seq, {})[r] = (share, effect.W)
        return ticket

    def _gradient(self, r: int) -> Vec:
        t = self.me[r].t
        return Vec((self.x[r] * (0.5 + r) - torch.sin(torch.arange(6).double() + t + r),))


@every
@pytest.mark.parametrize("stop", [0, 1, 5, 7, 8])
def test_a_run_that_is_stopped_and_resumed_ends_as_one_that_was_not(name: str, stop: int) -> None:
    whole = Lockstep(ALL[name], 4).run(until=14)
    resumed = Lockstep(ALL[name], 4, saved=Lockstep(ALL[name], 4).run(until=stop)).run(until=14)
    for a, b in zip(whole.x, resumed.x, strict=True):
        assert torch.equal(a, b)


@every
def test_what_is_remembered_is_plain_enough_for_a_checkpoint(name: str) -> None:
    for memory in Lockstep(ALL[name], 3).run(until=5).memory:
        for value in vars(memory).values():
            for one in value if isinstance(value, list) else [value]:
                assert one is None or isinstance(one, int | float | Vec)


def test_a_checkpoint_catches_something_under_way() -> None:
    """Otherwise the test above would prove little."""
    for name, stop in (("dasgd", 5), ("dasgd correct", 5), ("diloco overlap", 5), ("streaming", 5)):
        assert Lockstep(ALL[name], 4).run(until=stop).memory[0].sent is not None, name


@pytest.mark.parametrize("seconds", [0, 1])
def test_awaiting_asyncio_in_a_strategy_gets_a_sentence(seconds: int) -> None:
    async def body(me: Replica) -> None:
        async for _ in me.steps():
            await asyncio.sleep(seconds)

    card = ob.STRATEGIES["allreduce"]
    with pytest.raises(TypeError, match="is not an Offbeat effect; await one of Next, Grad"):
        ob.simulate(Strategy(card.paper, card.make, {}, body), None, workers=2, steps=2)
