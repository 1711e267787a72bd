"""Speed and size of the core: the simulator, `allreduce` beside DDP, what `dasgd` hides, `attach`'s overhead, memory.

python benchmarks/core.py [--json FILE] [--repeats 5] [--only simulator,ddp,dasgd,attach,memory,noticed]
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from harness import Report, arguments, median, run_workers, spread, together
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob


def network(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def simulator(report: Report) -> None:
    for workers, steps, limit in ((1024, 1000, 20.0), (512, 1000, None), (1024, 500, None)):
        start = time.process_time()
        ob.simulate(ob.allreduce(), None, workers=workers, steps=steps, delays=ob.delays.random(ranks=2, seconds=0.32))
        took = time.process_time() - start
        figure = f"{took:.1f} s, {took / workers / steps * 1e6:.1f} µs a worker-step"
        met = None if limit is None else took < limit
        report.row(f"time only, {workers} × {steps}, allreduce", figure, f"under {limit:.0f} s" if limit else "", met)
    for name in ("local_sgd", "dasgd", "eager", "wagma", "dpsgd"):
        start = time.process_time()
        ob.simulate(ob.named(name), None, workers=1024, steps=100, delays=ob.delays.random(ranks=2, seconds=0.32))
        took = time.process_time() - start
        report.row(f"time only, 1024 × 100, {name}", f"{took / 1024 / 100 * 1e6:.1f} µs a worker-step")
    for name in ("allreduce", "local_sgd", "eager", "wagma"):
        start = time.process_time()
        ob.simulate(ob.named(name), ob.tasks.digits(), workers=64, steps=200)
        took = time.process_time() - start
        report.row(f"gradients, digits, 64 × 200, {name}", f"{took:.1f} s", "under 30 s", took < 30)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, steps: int) -> float:
    start = together()
    for _ in range(steps):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps


def _ddp_job(rank: int, repeats: int, steps: int, width: int, depth: int) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    theirs = DistributedDataParallel(network(width, depth))
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=1e-3)
    ours = network(width, depth)
    our_optimizer = ob.attach(torch.optim.SGD(ours.parameters(), lr=1e-3), ours, ob.allreduce())
    data = torch.randn(64, width)
    _train(theirs, their_optimizer, data, 5), _train(ours, our_optimizer, data, 5)
    pairs = []
    for k in range(repeats):
        if k % 2:  # whoever goes first must not matter
            b = _train(ours, our_optimizer, data, steps)
            a = _train(theirs, their_optimizer, data, steps)
        else:
            a = _train(theirs, their_optimizer, data, steps)
            b = _train(ours, our_optimizer, data, steps)
        pairs.append((a, b))
    our_optimizer.finish()
    return pairs


def ddp(report: Report, repeats: int) -> None:
    for width, depth, steps in ((512, 4, 30), (1024, 8, 10), (1600, 10, 4)):
        pairs = run_workers(4, _ddp_job, max(repeats, 7), steps, width, depth)[0]
        ratios = [b / a for a, b in pairs]
        size = sum(p.numel() for p in network(width, depth).parameters())
        report.row(
            f"4 processes, {size / 1e6:.1f}M parameters: allreduce / DDP",
            f"{spread(ratios)}, DDP {median([a for a, _ in pairs]) * 1e3:.1f} ms",
            "at most 0.9",
            median(ratios) <= 0.9,
            pairs=pairs,
        )


def _dasgd_job(rank: int, steps: int, step_s: float, equal: bool) -> tuple[float, float]:
    model = network(512, 4)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=1e-3), model, ob.dasgd(period=4, delay=2))
    size = sum(p.numel() for p in model.parameters())
    data = torch.randn(8, 512)
    for _ in range(8):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
    before = optimizer.wait_s
    start = together()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        # The rest of the step needs no core: four workers share two. If it ends on a common schedule, all are equally
        # fast; else the waiting has the lateness of slower ones in it, which is not communication.
        time.sleep(max(0.0, start + step * step_s - time.perf_counter()) if equal else 0.75 * step_s)
        optimizer.step()
    waited = optimizer.wait_s - before
    optimizer.finish()
    tensor = torch.randn(size)
    times = []
    for _ in range(10):
        start = together()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return waited, median(times) * (steps // 4)


def dasgd(report: Report, repeats: int) -> None:
    for equal, who in ((True, "equally fast workers"), (False, "each at its own pace")):
        shares = []
        for _ in range(repeats):
            answers = run_workers(4, _dasgd_job, 80, 0.04, equal)
            shares.append(sum(w for w, _ in answers) / sum(c for _, c in answers))
        what = f"4 processes, {who}: dasgd's waiting / communication time"
        met = median(shares) < 0.02 if equal else None
        report.row(what, spread(shares), "under 0.02" if equal else "", met, shares=shares)


def _attach_job(rank: int, repeats: int, steps: int, step_s: float) -> list[float]:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            deadline = time.perf_counter() + step_s
            optimizer.zero_grad()
            model(data).square().mean().backward()
            while time.perf_counter() < deadline:  # the rest of a step of 10 ms, before the optimiser's part
                pass
            optimizer.step()
        return (time.perf_counter() - start) / steps

    data = torch.randn(8, 64)
    plain, attached = network(64, 8), network(64, 8)
    inner = torch.optim.SGD(plain.parameters(), lr=1e-3)
    outer = ob.attach(torch.optim.SGD(attached.parameters(), lr=1e-3), attached, ob.local_sgd(period=10**9))
    loop(plain, inner), loop(attached, outer)
    shares = []
    for _ in range(repeats):
        a, b = loop(plain, inner), loop(attached, outer)
        shares.append((b - a) / a)
    outer.finish()
    return shares


def attach(report: Report, repeats: int) -> None:
    shares = run_workers(2, _attach_job, max(repeats, 7), 100, 0.010)[0]
    more = median(shares)
    report.row("attach adds to a step of 10 ms (18 tensors)", f"{more:+.2%}", "under 2 %", more < 0.02)


def _peak_bytes() -> int:
    """The most memory this process has held since the last `_forget_peak`."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory_job(rank: int, name: str) -> float:
    torch.manual_seed(0)
    model = nn.Linear(5000, 5000, bias=False)
    data = torch.randn(2, 5000)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def train(steps: int) -> int:
        for step in range(steps):
            if step == 3:
                _forget_peak()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return _peak_bytes()

    plain = train(6)
    if name != "none":
        optimizer = ob.attach(optimizer, model, ob.named(name, **({"period": 2} if "sgd" in name else {})))
    with_it = train(12)
    if isinstance(optimizer, ob.Attached):
        optimizer.finish()
    return (with_it - plain) / (25e6 * 4)


def memory(report: Report) -> None:
    none = max(run_workers(2, _memory_job, "none"))
    report.row("peak memory over plain training: nothing attached", f"{none:+.2f} copies of the weights")
    for name, most in (("allreduce", 1.0), ("local_sgd", 1.0), ("dasgd", 2.0), ("eager", None), ("wagma", None)):
        extra = max(run_workers(2, _memory_job, name)) - none
        figure = f"{extra:+.2f} copies of the weights"
        target = "" if most is None else f"at most {most:.0f}, and 15 MB"  # for what Gloo holds
        report.row(
            f"peak memory over plain training: {name}", figure, target, None if most is None else extra <= most + 0.15
        )


def noticed(report: Report, repeats: int) -> None:
    """What a collective of the script's own costs more while an optimiser is attached, since it is noticed."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    loss = torch.zeros(1)

    def call_s(calls: int = 5000) -> float:
        start = time.thread_time()  # what is added is this thread's own work; the exchange is another one's
        for _ in range(calls):
            dist.all_reduce(loss)
        return (time.thread_time() - start) / calls

    added = []
    for _ in range(2 * repeats):
        model = nn.Linear(2, 1)
        with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.eager()):
            beside_s = call_s()
        added.append(beside_s - call_s())
    dist.destroy_process_group()
    figure = f"{median(added) * 1e6:.2f} µs more ({min(added) * 1e6:.2f} to {max(added) * 1e6:.2f})"
    report.row("all_reduce of one number, alone, while attached", figure, "under 10 µs", median(added) < 10e-6)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", default="simulator,ddp,dasgd,attach,memory,noticed")
    chosen = parser.parse_args()
    report = Report("core", chosen)
    torch.set_num_threads(1)
    wanted = chosen.only.split(",")
    if "simulator" in wanted:
        simulator(report)
    if "ddp" in wanted:
        ddp(report, chosen.repeats)
    if "dasgd" in wanted:
        dasgd(report, chosen.repeats)
    if "attach" in wanted:
        attach(report, chosen.repeats)
    if "memory" in wanted:
        memory(report)
    if "noticed" in wanted:
        noticed(report, chosen.repeats)
    report.close()


if __name__ == "__main__":
    main()
