"""What the tests of the trainers train: a small network on data that every rank knows, and who is slow."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support import forge
from tests.support.forge import Job, hear, say

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
TABS = re.findall(r'^ *```python title="(\w+)_train\.py"\n(.*?)^ *```$', PAGE, flags=re.MULTILINE | re.DOTALL)
SCRIPTS = {trainer: textwrap.dedent(text) for trainer, text in TABS}
SIZE = 2
LATE_STEPS = 8
ONCE = "62 of 62 samples were used once, in each of 2 epochs."  # of two epochs of shared work


def data(rows: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 6, generator=generator)
    return TensorDataset(x, x[:, :2] * 2 - 1 + 0.1 * torch.randn(rows, 2, generator=generator))


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def late(rank: int, step: int, run: str = "", ahead: int = 6) -> None:
    """Rank 1 stands in a step until rank 0 is some steps further: in step they would never come to that.

    ``run``: which of several in one job, each of which has to show it anew. ``ahead``: the step at which rank 0 is
    then; of shared work, one of its own batches, as it may or may not take the last ones of a worker that stands.
    """
    if (rank, step) == (0, ahead):
        say(f"rank 0 is ahead {run}")
    if (rank, step) == (1, 2):
        hear(f"rank 0 is ahead {run}", timeout_s=60.0)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Trainers warn of many things, of each other's too; the processes of the tests take warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # as torchrun sets it: trainers ask who has started them
        yield


def outlived(rank: int, train: Callable[[], object]) -> None:
    """Train, and whatever comes of it, be there until the other one's training has ended, too."""
    try:
        train()
    finally:
        say(f"{rank} is over")
        hear(f"{1 - rank} is over", timeout_s=60.0)


def shared_folder() -> Path:
    """A folder that all ranks of this job see."""
    return Path(os.environ["JOB_FOLDER"])


def own_folder() -> Path:
    return Path(tempfile.mkdtemp())


def told_by_script(trainer: str) -> list[str]:
    """What each rank prints when the script of docs/trainers.md runs as it stands.

    As torchrun would start it, but in processes that have imported torch and the trainer before.
    """
    (outcomes,) = forge.run([Job(_run_script, SIZE, (trainer,))])
    return forge.values(outcomes)


def _run_script(rank: int, trainer: str) -> str:
    os.chdir(shared_folder())
    script = Path(f"{rank}.py")
    script.write_text(SCRIPTS[trainer], encoding="utf-8")
    with quiet(), contextlib.redirect_stdout(io.StringIO()) as told:
        runpy.run_path(str(script), run_name="__main__")
    return told.getvalue()
