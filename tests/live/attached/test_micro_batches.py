"""What micro_batches() makes of batches: of any kind, cut by rows or by cost, empty, short or wrong."""

from __future__ import annotations

import warnings
from collections import UserDict, namedtuple
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import offbeat as ob
from tests.support.forge import attempt
from tests.support.micro_batches import (
    EVERYBODY,
    ONE_EACH,
    ROWS,
    SIZE,
    all_of,
    attached,
    joined,
    learn,
    loader,
    reference,
    samples,
    train,
)
from tests.support.nets import flat
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


Pair = namedtuple("Pair", "x y")


@scenario(SIZE)
def kinds_of_batches(rank: int) -> Any:
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


def test_tensors_and_tuples_lists_and_dicts_of_them_are_cut_alike(told: Told) -> None:
    for kinds in told(kinds_of_batches):
        for kind, (most, batch, handed) in kinds.items():
            assert most == len(handed) == 4, kind
            assert all(type(piece) is type(batch) for piece in handed), kind
        x = kinds["tensor"][1]
        y = kinds["tuple"][1][1]
        whole = torch.cat
        assert torch.equal(whole(kinds["tensor"][2]), x)
        for kind in ("tuple", "list", "named tuple"):
            assert torch.equal(whole([piece[0] for piece in kinds[kind][2]]), x)
            assert torch.equal(whole([piece[1] for piece in kinds[kind][2]]), y)
        assert torch.equal(whole([piece["y"] for piece in kinds["dict"][2]]), y)
        assert torch.equal(whole([piece.y for piece in kinds["named tuple"][2]]), y)
        assert torch.equal(whole([piece["x"][1][0] for piece in kinds["nested"][2]]), y)
        assert {piece["name"] for piece in kinds["nested"][2]} == {"train"}
        assert joined(piece[1] for piece in kinds["words"][2]) == [f"sample {k}" for k in range(ROWS)]
        assert joined(piece[1].tolist() for piece in kinds["array"][2]) == y.tolist()
        assert torch.equal(whole([piece["x"] for piece in kinds["user dict"][2]]), x)


@scenario(SIZE)
def cuts_by_cost(rank: int) -> Any:
    lengths = torch.tensor([9, 1, 1, 1, 3, 3, 3, 9])
    x, y, numbers = samples(rank, 0, ROWS)
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    with optimizer:
        pieces = []
        for piece in optimizer.micro_batches((x, y, numbers, lengths), cost=lambda sample: sample[3]):
            learn(model, piece)
            pieces.append(piece[3].tolist())
        optimizer.step()
    padded = torch.zeros(ROWS, 5)
    model2, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    asked = []

    def cost(sample: Tensor) -> float:
        asked.append(len(sample))
        return 1.0

    with optimizer:
        for _ in optimizer.micro_batches(padded, cost=cost):
            model2(x).sum().backward()
        optimizer.step()
    return pieces, (flat(model) - reference(all_of(1))).abs().max().item(), asked


def test_micro_batches_can_be_cut_by_cost(told: Told) -> None:
    for pieces, difference, asked in told(cuts_by_cost):
        assert [length for piece in pieces for length in piece] == [9, 1, 1, 1, 3, 3, 3, 9]
        assert [sum(piece) for piece in pieces] == [9, 6, 6, 9]
        assert difference < 1e-14
        assert asked == [5] * ROWS


@scenario(SIZE)
def bad_batches(rank: int) -> Any:
    x, y, _ = samples(rank, 0, ROWS)
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY))
    out: dict[str, Any] = {}
    with optimizer:
        wrong: dict[str, Any] = {
            "unequal": (x, y[:5]),
            "scalar": (x, torch.tensor(1.0)),
            "text": ["a", "b"],
            "number": 3,
        }
        for name, bad in wrong.items():
            out[name] = attempt(partial(optimizer.micro_batches, bad))
        out["cost"] = attempt(lambda: list(optimizer.micro_batches((x, y), cost=lambda sample: -1.0)))
        for piece in optimizer.micro_batches((x, y)):
            learn(model, piece)
        optimizer.step()
    out["after"] = (flat(model) - reference(all_of(1))).abs().max().item()
    return out


def test_a_batch_that_makes_no_sense_is_refused_in_a_sentence_and_can_be_replaced(told: Told) -> None:
    for out in told(bad_batches):
        assert "the tensors of a batch have 5, 8 rows; give all of them one row a sample" in out["unequal"]
        assert "has no dimensions" in out["scalar"]
        assert "a batch of type list holds no tensors" in out["text"]
        assert "a batch of type int holds no tensors" in out["number"]
        assert "a sample cannot cost -1.0" in out["cost"]
        assert out["after"] < 1e-14


@scenario(SIZE)
def an_empty_batch(rank: int) -> Any:
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


def test_an_empty_batch_on_one_worker_adds_nothing_and_holds_up_nobody(told: Told) -> None:
    outs = told(an_empty_batch)
    assert outs[2][0] == [0, 0, 0]
    assert outs[0][0] == [4, 4, 4]
    for _, final, used in outs:
        assert torch.equal(final, outs[0][1])
        assert used == [24, 24, 0, 24]


@scenario(SIZE)
def few_samples(rank: int) -> Any:
    run = train(rank, ob.nonblocking(8, **EVERYBODY), 4, rows=3)
    return [most for *_, most in run["log"]], (run["final"] - reference(all_of(4, rows=3))).abs().max().item()


def test_more_micro_batches_than_samples_give_one_sample_each(told: Told) -> None:
    for most, difference in told(few_samples):
        assert most == [3, 3, 3, 3]
        assert difference < 1e-14


@scenario(SIZE)
def another_strategy(rank: int) -> Any:
    model, optimizer = attached(ob.local_sgd())
    with optimizer:
        said = attempt(lambda: optimizer.micro_batches(samples(rank, 0, ROWS)))
        learn(model, samples(rank, 0, ROWS))
        optimizer.step()
        used = optimizer.samples_used
    return said, used


def test_micro_batches_of_another_strategy_are_refused(told: Told) -> None:
    for said, used in told(another_strategy):
        assert "takes whole batches; micro_batches() goes with ob.nonblocking()" in said
        assert used == []


@scenario(SIZE)
def without_micro_batches(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking())
    with warnings.catch_warnings(record=True) as said, optimizer:
        warnings.simplefilter("always")
        for batch in loader(rank, 5):
            optimizer.zero_grad()
            learn(model, batch)
            optimizer.step()
    return (flat(model) - reference(all_of(5))).abs().max().item(), [str(w.message) for w in said]


def test_without_micro_batches_it_is_allreduce_and_says_so_once(told: Told) -> None:
    for difference, said in told(without_micro_batches):
        assert difference < 1e-14
        assert len(said) == 1
        assert "for micro in optimizer.micro_batches(batch)" in said[0]


@scenario(SIZE)
def leftovers_come_first(rank: int) -> Any:
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


def test_leftovers_come_first_and_those_never_used_are_spoken_of(told: Told) -> None:
    for seen, used, said in told(leftovers_come_first):
        assert seen == list(range(6))
        assert used == [6] * SIZE
        assert len(said) == 1
        assert "18 samples of this worker were never used; loop over optimizer.batches(loader)" in said[0]


@scenario(SIZE)
def data_is_fetched_only_when_needed(rank: int) -> Any:
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


def test_batches_fetches_data_only_when_the_leftovers_make_no_round(told: Told) -> None:
    for when, difference in told(data_is_fetched_only_when_needed):
        assert when == [1, 2, 2, 2, 2, 2, 2, 2]
        assert difference < 1e-13


@scenario(SIZE)
def a_word_about_many_leftovers(rank: int) -> Any:
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


def test_a_pile_of_leftovers_is_spoken_of_once(told: Told) -> None:
    for said in told(a_word_about_many_leftovers):
        assert len(said) == 1
        assert "samples wait on this worker" in said[0]
