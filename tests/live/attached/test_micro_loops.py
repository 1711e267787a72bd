"""Loops over micro-batches that break off, skip, fail, clip, scale or go on from a checkpoint: no sample is lost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offbeat as ob
from tests.support import forge
from tests.support.forge import Job, attempt
from tests.support.micro_batches import (
    EVERYBODY,
    ONE_EACH,
    ROWS,
    SIZE,
    all_of,
    attached,
    follows_the_union,
    learn,
    loader,
    reference,
    samples,
)
from tests.support.nets import flat, flat_grad, net
from tests.support.scenarios import Told, scenario

pytestmark = pytest.mark.live


@scenario(SIZE)
def an_error_that_is_caught(rank: int) -> Any:
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


def test_after_an_error_in_the_loss_the_micro_batch_is_handed_out_again(told: Told) -> None:
    for rank, (seen, failed, difference) in enumerate(told(an_error_that_is_caught)):
        assert seen == list(range(3 * ROWS))
        assert failed == (rank == 1)
        assert difference < 1e-14


@scenario(SIZE)
def breaking_off(rank: int) -> Any:
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


def test_breaking_off_keeps_what_was_done_and_what_was_not(told: Told) -> None:
    for seen, difference in told(breaking_off):
        assert [n for piece in seen for n in piece] == list(range(2 * ROWS))
        assert difference < 1e-14


@scenario(SIZE)
def skipping(rank: int) -> Any:
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


def test_a_micro_batch_without_backward_is_not_counted(told: Told) -> None:
    for used, difference in told(skipping):
        assert used == [6] * SIZE
        assert difference < 1e-14


@scenario(SIZE)
def two_batches_before_a_step(rank: int) -> Any:
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


def test_two_batches_before_a_step_lose_nothing(told: Told) -> None:
    for _, used in told(two_batches_before_a_step):
        assert used == [2 * ROWS] * SIZE


@scenario(SIZE)
def resume(rank: int) -> Any:
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


@pytest.mark.parametrize("over", ["allreduce", "ring"])
def test_a_resumed_run_goes_on_behind_the_samples_that_were_used_and_says_so(told: Told, over: str) -> None:
    for rank, out in enumerate(told(resume)):
        start, said, difference, used = out[over]
        assert start == 10
        assert len(said) == 1
        assert f"6 samples waited on rank {rank}" in said[0]
        assert difference < 1e-14
        assert used == [26] * SIZE


@scenario(SIZE)
def grad_scaler(rank: int) -> Any:
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


def test_a_grad_scaler_works_and_a_skipped_step_holds_up_nobody(told: Told) -> None:
    runs = told(grad_scaler)
    for rank, run in enumerate(runs):
        assert run["taken"].count(False) == (rank == 1)
        assert run["used"] == [32, 24, 32, 32]
        expected = [n for n in range(32) if rank != 1 or not 16 <= n < 24]
        assert [n for _, pieces, _, _ in run["log"] for piece in pieces for n in piece] == expected
    follows_the_union(runs)


@scenario(SIZE)
def clipping(rank: int) -> Any:
    model, optimizer = attached(ob.nonblocking(4, **EVERYBODY), max_norm=0.05)
    with optimizer:
        batch = samples(rank, 0, ROWS)
        for piece in optimizer.micro_batches(batch):
            learn(model, piece)
        own = flat_grad(model)
        optimizer.step()
        given = flat_grad(model)
    single = net()
    learn(single, batch)
    mine = flat_grad(single)
    single = net()
    learn(single, [torch.cat([samples(k, 0, ROWS)[c] for k in range(SIZE)]) for c in (0, 1)])
    whole = flat_grad(single)
    clipped = whole * 0.05 / (whole.norm() + 1e-6)  # as torch does it
    return (own - mine).abs().max().item(), (given - clipped).abs().max().item(), given.norm().item()


def test_clipping_and_the_inner_optimizer_see_the_mean_over_all_samples(told: Told) -> None:
    for own, given, norm in told(clipping):
        assert own < 1e-14
        assert given < 1e-14
        assert norm == pytest.approx(0.05, rel=1e-4)


@scenario(SIZE)
def low_precision(rank: int) -> Any:
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


def test_sums_are_kept_wide(told: Told) -> None:
    assert told(low_precision) == [1.0] * SIZE


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


@pytest.mark.parametrize("how", ["loss", "unequal"])
def test_an_error_on_one_rank_ends_all_with_its_sentence(how: str) -> None:
    (outcomes,) = forge.run([Job(failing, SIZE, (how,), timeout_s=180)])
    words = "the loss of rank 1 is out of luck" if how == "loss" else "give all of them one row a sample"
    for rank, outcome in enumerate(outcomes):
        assert not outcome.hung
        assert words in outcome.value, f"rank {rank}: {outcome}"
        assert ("rank 1 failed" in outcome.value) == (rank != 1)
