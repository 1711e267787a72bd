"""The scenarios of test_attach: each is called on every rank of one group of three; what it returns is judged there."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob
from offbeat.method.effects import Grad
from tests.support.forge import attempt

SIZE = 3
PATIENCE_S = 120.0  # bounds a hang, and is never reached


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rank: int, t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + t)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    return x, y


def loss(model: nn.Module, rank: int, t: int) -> Tensor:
    x, y = batch(rank, t)
    return F.mse_loss(model(x), y)


def flat(model: nn.Module | Iterable[Tensor]) -> Tensor:
    tensors = model.parameters() if isinstance(model, nn.Module) else model
    return torch.cat([p.detach().reshape(-1).double() for p in tensors])


def sgd(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **settings})


def serial(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    steps: int,
    ranks: Callable[[int], Iterable[int]] = lambda t: range(SIZE),
    clip: float | None = None,
    micro: int = 1,
) -> Tensor:
    """One process that takes the mean of everybody's gradients: what allreduce must equal."""
    model = net()
    inner = optimizer(model)
    for t in range(steps):
        inner.zero_grad()
        members = list(ranks(t))
        for rank in members:
            for m in range(micro):
                (loss(model, rank, micro * t + m) / len(members)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        inner.step()
    return flat(model)


def trained(rank: int, strategy: ob.Strategy, steps: int = 5, seed: int = 0, **settings: Any) -> Tensor:
    model = net(seed)
    with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S, **settings) as optimizer:
        for t in range(steps):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    return flat(model)


def distance(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def s_start(rank: int) -> Any:
    model = nn.Sequential(net(seed=rank), nn.BatchNorm1d(3).double())
    model.register_buffer("table", torch.polar(torch.ones(2), torch.full((2,), float(rank))))
    model.register_buffer("mask", torch.tensor([rank == 0, True]))
    frozen = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    model.register_parameter("frozen", frozen)
    model[1].running_mean.fill_(rank)
    model[1].num_batches_tracked.fill_(rank)
    optimizer = ob.attach(sgd(model), model, ob.local_sgd())
    out = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.finish()
    return out


def s_clipping_as_ddp(rank: int) -> Any:
    out = {}
    for name, make in {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    }.items():
        models = []
        for attached in (False, True):
            model = net()
            forward = model if attached else nn.parallel.DistributedDataParallel(model)
            optimizer = make(model.parameters())
            if attached:
                optimizer = ob.attach(optimizer, model, ob.allreduce())
            for t in range(6):
                optimizer.zero_grad()
                loss(forward, rank, t).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            if attached:
                optimizer.finish()
            models.append(flat(model))
        out[name] = distance(*models)
    return out


def s_grad_is_the_mean_after_backward(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    loss(model, rank, 0).backward()
    mean = flat(p.grad for p in model.parameters())
    optimizer.step()
    optimizer.finish()
    reference = net()
    sum(loss(reference, r, 0) / SIZE for r in range(SIZE)).backward()
    return distance(mean, flat(p.grad for p in reference.parameters()))


def _two_groups(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.1}],
        lr=0.02,
        momentum=0.5,
    )


def s_parameter_groups(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(_two_groups(model), model, ob.allreduce())
    for t in range(5):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    return distance(flat(model), serial(_two_groups, 5)), [g["lr"] for g in optimizer.param_groups]


def s_max_norm(rank: int) -> Any:
    return distance(trained(rank, ob.allreduce(), max_norm=0.1), serial(sgd, 5, clip=0.1))


def s_accumulate(rank: int) -> Any:
    out = {}
    for declared, really in ((4, 4), (1, 3), (4, 2), (2, 5)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = net()
            optimizer = ob.attach(sgd(model), model, ob.allreduce(), accumulate=declared)
            for t in range(3):
                optimizer.zero_grad(set_to_none=t % 2 == 0)
                for m in range(really):
                    loss(model, rank, really * t + m).backward()
                optimizer.step()
            optimizer.finish()
        reference = serial(sgd, 3, micro=really)
        said = [str(w.message) for w in seen]
        out[declared, really] = distance(flat(model), reference), said
    return out


def s_accumulate_with_local_gradients(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model, momentum=0), model, ob.local_sgd(period=1), accumulate=2)
    for t in range(3):
        optimizer.zero_grad()
        for m in range(2):
            loss(model, rank, 2 * t + m).backward()
        optimizer.step()
    optimizer.finish()
    return distance(flat(model), serial(lambda m: sgd(m, momentum=0), 3, micro=2))


def s_mixed_precision(rank: int) -> Any:
    torch.manual_seed(0)
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.qsgd()):
        for zero in ("optimizer", "model"):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                model = net(rank).float()
                inner = sgd(model)
                steps = [0]
                inner.register_step_post_hook(lambda *_, steps=steps: steps.__setitem__(0, steps[0] + 1))
                optimizer = ob.attach(inner, model, strategy, patience_s=PATIENCE_S)
                scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
                for t in range(6):
                    x, y = batch(rank, t)
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        value = F.mse_loss(model(x.float()), y.float())
                    if t == 2 and rank == 1:
                        value = value * float("inf")
                    scaler.scale(value).backward()
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                    (optimizer if zero == "optimizer" else model).zero_grad()
                optimizer.finish()
            said = [str(w.message) for w in seen]
            out[strategy.name, zero] = flat(model), steps[0], scaler.get_scale(), said
    return out


def s_zero_grad(rank: int) -> Any:
    ways: dict[str, Callable[[Any, Any], None]] = {
        "none": lambda o, m: o.zero_grad(),
        "zeros": lambda o, m: o.zero_grad(set_to_none=False),
        "model": lambda o, m: m.zero_grad(),
        "model zeros": lambda o, m: m.zero_grad(set_to_none=False),
    }
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.qsgd()):
        for name, way in ways.items():
            model = net()
            optimizer = ob.attach(sgd(model), model, strategy)
            for t in range(4):
                loss(model, rank, t).backward()
                optimizer.step()
                way(optimizer, model)
            optimizer.finish()
            out[strategy.name, name] = flat(model)
    return out


class Odd(nn.Module):
    """Tied, frozen, unused and sometimes unused weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer.weight = self.inner.weight
        self.frozen, self.never, self.some = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, some: bool) -> Tensor:
        x = self.frozen(self.outer(torch.tanh(self.inner(x))))
        return self.some(x) if some else x


def s_odd_parameters(rank: int) -> Any:
    torch.manual_seed(rank)
    out = {}
    for strategy in (ob.allreduce(), ob.qsgd(bits=16)):
        model = Odd().double()
        reference = copy.deepcopy(model)
        optimizer = ob.attach(sgd(model, weight_decay=0.1), model, strategy)
        reference.load_state_dict(model.state_dict())
        inner = sgd(reference, weight_decay=0.1)
        for t in range(3):
            optimizer.zero_grad()
            F.mse_loss(model(batch(rank, t)[0], some=rank == 1), torch.ones(4, 6).double()).backward()
            optimizer.step()
            inner.zero_grad()
            for r in range(SIZE):
                y = torch.ones(4, 6).double()
                (F.mse_loss(reference(batch(r, t)[0], some=r == 1), y) / SIZE).backward()
            inner.step()
        never = [p.grad is None for p in model.never.parameters()]
        tied = model.inner.weight is model.outer.weight
        optimizer.finish()
        out[strategy.name] = distance(flat(model), flat(reference)), never, tied
    return out


def s_mixed_dtypes(rank: int) -> Any:
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.dpsgd(), ob.qsgd(), ob.sgp(), ob.diloco(period=2)):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(6, 5).bfloat16(), nn.Linear(5, 4), nn.Linear(4, 3).double()])
        optimizer = ob.attach(sgd(model, lr=0.05), model, strategy)
        for t in range(4):
            x, y = batch(rank, t)
            optimizer.zero_grad()
            F.mse_loss(model[2](model[1](model[0](x.bfloat16()).float()).double()), y).backward()
            optimizer.step()
        optimizer.finish()
        out[strategy.name] = flat(model), [p.dtype for p in model.parameters()]
    return out


def s_channels_last(rank: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double().to(memory_format=torch.channels_last)
    reference = copy.deepcopy(model)
    optimizer, inner = ob.attach(sgd(model), model, ob.allreduce()), sgd(reference)
    images = torch.randn(SIZE, 3, 2, 3, 5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for t in range(3):
        optimizer.zero_grad()
        model(images[rank, t].to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        inner.zero_grad()
        for r in range(SIZE):
            (reference(images[r, t]).square().mean() / SIZE).backward()
        inner.step()
    kept = model[0].weight.is_contiguous(memory_format=torch.channels_last)
    optimizer.finish()
    return distance(flat(model), flat(reference)), kept


def s_batch_norm(rank: int) -> Any:
    out = {}
    for name, strategy in {"finish": ob.allreduce(), "sync": ob.local_sgd(period=2)}.items():
        model = nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)).double()
        optimizer = ob.attach(sgd(model), model, strategy)
        for t in range(2 + rank if name == "finish" else 2):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
        local = model[0].running_mean.clone()
        if name == "finish":
            optimizer.finish()
        out[name] = local, model[0].running_mean.clone(), int(model[0].num_batches_tracked)
        optimizer.finish()
    return out


def s_buffers_put_anew(rank: int) -> Any:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + dist.get_rank() + 1.0
            return self.layer(x)

    model = Shift().double()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    for t in range(2):
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    return model.seen.item()


def s_parameters_only_the_optimizer_knows(rank: int) -> Any:
    model, extra = net(), nn.Parameter(torch.full((3,), float(rank), dtype=torch.float64))
    inner = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    optimizer = ob.attach(inner, model, ob.allreduce())
    began = extra.detach().clone()
    for t in range(3):
        optimizer.zero_grad()
        x, y = batch(rank, t)
        F.mse_loss(model(x) + extra, y).backward()
        optimizer.step()
    optimizer.finish()
    return began, extra.detach().clone()


def s_broken_views(rank: int) -> Any:
    model = net()
    state = copy.deepcopy(net(7).state_dict())
    optimizer = ob.attach(sgd(model, momentum=0), model, ob.local_sgd(period=1))
    for t in range(4):
        if t == 1:
            for p in model.parameters():
                p.data = p.data * 0.5
        if t == 2:
            model.load_state_dict(state)
        if t == 3:
            model[0].weight.data = model[0].weight.data.flip(0)
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
    optimizer.finish()
    reference = net(7)
    inner = sgd(reference, momentum=0)
    for t in (2, 3):
        if t == 3:
            reference[0].weight.data = reference[0].weight.data.flip(0)
        inner.zero_grad()
        sum(loss(reference, r, t) / SIZE for r in range(SIZE)).backward()
        inner.step()
    return distance(flat(model), flat(reference))


def s_converted_model(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.local_sgd())
    model.float()
    x, y = batch(rank, 0)
    said = attempt(lambda: F.mse_loss(model(x.float()), y.float()).backward())
    model.double()
    optimizer.finish()
    return said


def s_closure(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    seen = []
    for t in range(5):

        def closure(t: int = t) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, rank, t)
            value.backward()
            return value

        seen.append(optimizer.step(closure).item())
    optimizer.finish()
    return distance(flat(model), serial(sgd, 5)), all(v > 0 for v in seen)


def s_refusals(rank: int) -> Any:
    model, other = net(), net()
    attached = ob.attach(sgd(other), other, ob.allreduce())
    frozen = net().requires_grad_(False)
    out = {
        "LBFGS": attempt(lambda: ob.attach(torch.optim.LBFGS(model.parameters()), model, ob.allreduce())),
        "nothing to learn": attempt(lambda: ob.attach(sgd(frozen), frozen, ob.allreduce())),
        "swapped": attempt(lambda: ob.attach(model, sgd(model), ob.allreduce())),
        "no strategy": attempt(lambda: ob.attach(sgd(model), model, "local_sgd")),
        "factory": attempt(lambda: ob.attach(sgd(model), model, ob.local_sgd)),
        "twice": attempt(lambda: ob.attach(attached, other, ob.allreduce())),
        "accumulate": attempt(lambda: ob.attach(sgd(model), model, ob.allreduce(), accumulate=0)),
        "ddp": attempt(lambda: ob.attach(sgd(model), nn.parallel.DistributedDataParallel(model), ob.allreduce())),
        "complex": attempt(lambda: ob.attach(*_complex(), ob.allreduce())),
        "new group": attempt(lambda: attached.add_param_group({"params": []})),
    }
    attached.finish()
    out["step"] = attempt(attached.step)
    out["average"] = attempt(attached.average)
    out["finish"] = attempt(attached.finish)
    loss(other, rank, 0).backward()  # the model is the user's again
    return out


def _complex() -> tuple[torch.optim.Optimizer, nn.Module]:
    model = nn.Linear(2, 2, dtype=torch.complex64)
    return sgd(model), model


def s_foreign_effect(rank: int) -> Any:
    class Sleep:
        def __await__(self) -> Any:
            return (yield self)

        def __repr__(self) -> str:
            return "Sleep()"

    async def body(me: Any) -> None:
        async for _ in me.steps():
            await Grad()
            await Sleep()

    base = ob.local_sgd()
    strategy = ob.Strategy(base.paper, base.make, base.settings, body)
    model = net()
    said = []

    def use() -> None:
        with ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S) as optimizer:
            loss(model, rank, 0).backward()
            said.append(attempt(optimizer.step))
            raise ValueError("leave")

    attempt(use)
    return said[0]


def s_models_one_after_the_other(rank: int) -> Any:
    return [trained(rank, ob.local_sgd(period=2)) for _ in range(3)]


def s_two_models_at_once(rank: int) -> Any:
    alone = [trained(rank, ob.local_sgd(period=2)), trained(rank, ob.allreduce(), seed=5)]
    models = [net(), net(5)]
    first = ob.attach(sgd(models[0]), models[0], ob.local_sgd(period=2))
    second = ob.attach(sgd(models[1]), models[1], ob.allreduce())
    for t in range(5):
        for model, optimizer in zip(models, (first, second), strict=True):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
    second.finish()
    first.finish()
    return [torch.equal(a, flat(m)) for a, m in zip(alone, models, strict=True)]


def s_average_in_the_middle(rank: int) -> Any:
    out = {}
    for strategy in (ob.local_sgd(period=50), ob.dasgd(), ob.dpsgd(), ob.sgp(), ob.diloco(period=50)):
        model = net()
        optimizer = ob.attach(sgd(model), model, strategy)
        for t in range(5):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            optimizer.step()
            if t == 3:
                before = flat(model)
                optimizer.average()
                out[strategy.name] = before, flat(model)
        optimizer.finish()
    return out


def s_alone(rank: int) -> Any:
    """Rank 1 evaluates and saves by itself, in the middle."""
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    saved = None
    for t in range(5):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
        if rank == 1:
            with torch.no_grad():
                loss(model, rank, t)
            loss(model, rank, t)
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
    optimizer.finish()
    return distance(flat(model), serial(sgd, 5)), saved


def s_users_own_collectives(rank: int) -> Any:
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.dasgd(period=2, delay=1))
    sums = []
    for t in range(6):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        mine = torch.tensor([float(rank + t)])
        dist.all_reduce(mine)
        sums.append(mine.item())
        optimizer.step()
    groups = dist.distributed_c10d._world.pg_map
    optimizer.finish()
    mine = torch.ones(1)
    dist.all_reduce(mine)
    return sums, mine.item(), len(groups), dist.is_initialized()


def s_schedulers(rank: int) -> Any:
    out = {}
    for when in ("before", "after"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model = net()
            inner = sgd(model)
            if when == "before":
                scheduler = torch.optim.lr_scheduler.StepLR(inner, 2, 0.5)
            optimizer = ob.attach(inner, model, ob.allreduce())
            if when == "after":
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            rates = []
            for t in range(5):
                optimizer.zero_grad()
                loss(model, rank, t).backward()
                optimizer.step()
                scheduler.step()
                rates.append(optimizer.param_groups[0]["lr"])
            optimizer.finish()
        out[when] = flat(model), rates, inner.param_groups[0]["lr"]
    return out


def s_a_backward_without_its_step(rank: int) -> Any:
    out = {}
    for strategy in (ob.allreduce(), ob.local_sgd(period=2), ob.dpsgd(), ob.qsgd()):
        model = net()
        optimizer = ob.attach(sgd(model), model, strategy, patience_s=PATIENCE_S)
        for t in range(4):
            optimizer.zero_grad()
            loss(model, rank, t).backward()
            if t == 2 and rank == 1:
                break
            optimizer.step()
        optimizer.finish()
        out[strategy.name] = flat(model)
    return out


def s_gradients_in_groups(rank: int) -> Any:
    from offbeat.method.effects import GradMix
    from offbeat.topology import Mixing

    async def body(me: Any) -> None:
        async for _ in me.steps():
            me.step(await GradMix(Mixing.uniform_blocks(SIZE, [[0, 2], [1]])))

    base = ob.allreduce()
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.Strategy(base.paper, base.make, base.settings, body))
    for t in range(4):
        optimizer.zero_grad()
        loss(model, rank, t).backward()
        optimizer.step()
    before = flat(model)
    optimizer.finish()
    return distance(before, serial(sgd, 4, ranks=lambda t: [1] if rank == 1 else [0, 2]))


def s_mismatches(rank: int) -> Any:
    odd = rank == 2
    cases: dict[str, Callable[[], Any]] = {
        "names": lambda: (nn.ModuleDict({"b" if odd else "a": nn.Linear(2, 2)}), ob.allreduce(), {}),
        "shapes": lambda: (nn.Linear(2, 3 if odd else 2), ob.allreduce(), {}),
        "dtypes": lambda: (nn.Linear(2, 2, dtype=torch.float64 if odd else torch.float32), ob.allreduce(), {}),
        "count": lambda: (nn.Linear(2, 2, bias=not odd), ob.allreduce(), {}),
        "frozen": lambda: (_partly_frozen(3 if odd else 2), ob.allreduce(), {}),
        "buffers": lambda: (nn.BatchNorm1d(2, track_running_stats=not odd), ob.allreduce(), {}),
        "strategy": lambda: (net(), ob.local_sgd(period=4 if odd else 8), {}),
        "accumulate": lambda: (net(), ob.allreduce(), {"accumulate": 2 if odd else 1}),
        "seed": lambda: (net(), ob.noloco(), {"seed": int(odd)}),
    }
    out = {}
    for name, case in cases.items():
        model, strategy, settings = case()
        out[name] = attempt(partial(ob.attach, sgd(model), model, strategy, **settings))
    return out


def _partly_frozen(width: int) -> nn.Module:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, width)])
    model[1].requires_grad_(False)
    return model


def s_version(rank: int) -> Any:
    from offbeat.live.attached import refusals as checks

    kept = checks.__version__
    checks.__version__ = "9.9" if rank == 0 else kept
    said = attempt(lambda: ob.attach(sgd(model), model, ob.allreduce())) if (model := net()) else ""
    checks.__version__ = kept
    return said


def alone_in_the_world(rank: int) -> Any:
    import os

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    before = dist.is_initialized()
    model = net()
    optimizer = ob.attach(sgd(model), model, ob.allreduce())
    during = dist.is_initialized()
    for t in range(5):
        optimizer.zero_grad()
        loss(model, 0, t).backward()
        optimizer.step()
    optimizer.finish()
    after = dist.is_initialized()
    second = ob.attach(sgd(model), model, ob.allreduce())
    again = dist.is_initialized()
    reference = serial(sgd, 5, ranks=lambda t: [0])
    difference = distance(flat(model), reference)
    second.finish()
    return before, during, after, again, difference
