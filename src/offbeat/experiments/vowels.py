"""An LSTM that tells nine speakers by a vowel: 7 to 29 frames, in batches of utterances that are about as long."""

from __future__ import annotations

from functools import cache, partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.basics import draw
from offbeat.tasks.task import Task

TRAINED, CHANNELS, SPEAKERS, WIDTH, DROPOUT = 270, 12, 9, 32, 0.1
WINDOW = 3  # a batch is drawn out of so many times as many neighbours in the order of lengths
_BATCH = 0x70E1

Data = tuple[list[Tensor], Tensor]


@cache
def _data() -> tuple[Data, Data]:
    """Sequences and speakers, in the order of lengths: those to train on, and those held out."""
    with files("offbeat.experiments").joinpath("data", "vowels.npz").open("rb") as file, np.load(file) as stored:
        sequences = torch.from_numpy(stored["frames"]).float().div(1e4).split(stored["lengths"].tolist())
        speakers = torch.from_numpy(stored["labels"].astype(np.int64))

    def part(numbers: range) -> Data:
        order = sorted(numbers, key=lambda k: len(sequences[k]))
        return [sequences[k] for k in order], speakers[order]

    return part(range(TRAINED)), part(range(TRAINED, len(sequences)))


class Recurrent(nn.Module):
    """One layer; what fills up a row, in front, changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.kept = nn.Linear(CHANNELS, 4 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, SPEAKERS)

    def forward(self, frames: Tensor, counts: Tensor) -> Tensor:
        """``counts``: 1 where there is a frame, 0 where a row is filled up, in front."""
        seen = self.seen(frames)
        hidden = cell = torch.zeros_like(seen[..., 0, :WIDTH])
        for k in range(frames.shape[-2]):
            gates = seen[..., k, :] + self.kept(hidden)
            keep, enter, leave, new = gates.chunk(4, dim=-1)
            cell = counts[..., k, None] * (keep.sigmoid() * cell + enter.sigmoid() * new.tanh())
            hidden = leave.sigmoid() * cell.tanh()
        out: Tensor = self.last(F.dropout(hidden, DROPOUT, self.training))
        return out


def _padded(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, sequences))
    frames = torch.stack([F.pad(one, (0, 0, longest - len(one), 0)) for one in sequences])
    counts = torch.stack([F.pad(torch.ones(len(one)), (longest - len(one), 0)) for one in sequences])
    return frames, counts


def task(seed: int, batch: int, place: Path | None) -> Task:
    return Task(
        model=Recurrent,
        loss=F.cross_entropy,
        batch=partial(_batch, batch, seed),
        optimizer=torch.optim.SGD,
        evaluate=_evaluate,
        name="vowels",
    )


def _chosen(size: int, seed: int, rank: int, step: int) -> list[int]:
    total = len(_data()[0][0])
    window = min(WINDOW * size, total)
    generator = draw.generator(_BATCH, seed, rank, step)
    # Windows that would stand over an end are moved inside it: otherwise the shortest and longest would seldom come.
    start = int(torch.randint(1 - window, total, (1,), generator=generator))
    start = min(max(start, 0), total - window)
    return [start + int(k) for k in torch.randperm(window, generator=generator)[:size]]


def _batch(size: int, seed: int, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    sequences, speakers = _data()[0]
    chosen = _chosen(size, seed, rank, step)
    return (*_padded([sequences[k] for k in chosen]), speakers[chosen])


def cost(seed: int, size: int, place: Path | None, rank: int, step: int) -> float:
    """How long a batch takes: as long as its longest sequence."""
    return float(max(len(_data()[0][0][k]) for k in _chosen(size, seed, rank, step)))


@torch.no_grad()
def _evaluate(model: nn.Module) -> dict[str, float]:
    model.eval()
    sequences, speakers = _data()[1]
    output = torch.cat([model(*_padded(sequences[k : k + 37])) for k in range(0, len(sequences), 37)])
    right = (output.argmax(dim=1) == speakers).double().mean().item()
    return {"loss": F.cross_entropy(output, speakers).item(), "accuracy": right}
