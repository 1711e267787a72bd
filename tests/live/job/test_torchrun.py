"""Plain user scripts under torchrun: on one machine, and as two agents that meet over the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.long import long
from tests.support.ports import hold_port

pytestmark = pytest.mark.live

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn

import offbeat as ob

ob.init()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
model = nn.Linear(4, 2)
optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, ob.strategy(sys.argv[2]))
for _ in range(6):
    if len(sys.argv) > 3 and rank == 1:
        raise ValueError("no such file")
    nn.functional.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.finish()
torch.save((size, dist.is_initialized(), model.state_dict()), f"{sys.argv[1]}/{rank}.pt")
"""


def torchrun(folder: Path, options: list[str], *arguments: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py", str(folder), *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(process: subprocess.Popen[str], timeout_s: float = 300.0) -> tuple[int, str]:
    try:
        _, stderr = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return process.returncode, stderr


def results(folder: Path, size: int) -> None:
    import torch

    saved = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]
    for seen, initialized, weights in saved:
        assert seen == size
        assert not initialized  # ob.init() made the default group, and finish() has ended it
        assert all(torch.equal(weights[name], saved[0][2][name]) for name in weights)


@long  # as the first job of the documentation does at every change
def test_a_plain_script_trains_under_torchrun(tmp_path: Path) -> None:
    code, stderr = ended(torchrun(tmp_path, ["--standalone", "--nproc-per-node", "2"], "local_sgd"))
    assert code == 0, stderr
    results(tmp_path, 2)


def test_a_plain_script_that_fails_on_one_rank_ends_under_torchrun(tmp_path: Path) -> None:
    code, stderr = ended(torchrun(tmp_path, ["--standalone", "--nproc-per-node", "2"], "dasgd", "fail"))
    assert code == 1
    assert "ValueError: no such file" in stderr


def test_two_agents_train_together(tmp_path: Path) -> None:
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "two"]
    with hold_port() as held:
        where += ["--rdzv-endpoint", f"127.0.0.1:{held.getsockname()[1]}", "--local-addr", "127.0.0.1"]
        agents = [torchrun(tmp_path, where, "dpsgd") for _ in range(2)]
        for code, stderr in [ended(agent) for agent in agents]:
            assert code == 0, stderr
    results(tmp_path, 2)
