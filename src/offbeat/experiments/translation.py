"""A small Transformer that translates verses from English into Spanish, in batches of pairs that are about as long."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.basics import draw
from offbeat.experiments import datasets
from offbeat.tasks.task import Task

PAD, END, OTHER = 0, 1, 2  # nothing; the beginning and the end of a sentence; a word that the vocabulary has not
WORDS, LONGEST, WIDTH, HEADS = 2000, 60, 64, 2
HELD_OUT_EVERY, JUDGED, SPOKEN, SPOKEN_LONGEST = 10, 192, 256, 40
DROPOUT = 0.1
WINDOW = 8  # a batch is drawn out of so many times as many neighbours in the order of lengths
INSTALL = "pip install 'offbeat[experiments]'"
_BATCH = 0x7A45


@dataclass(frozen=True)
class Corpus:
    """Pairs as numbers, those to train on in the order of their lengths, and the words of both vocabularies.

    ``spoken``: the English of the held-out verses that are translated in full, and what the Spanish ones say.
    """

    train: tuple[tuple[Tensor, Tensor], ...]
    held_out: tuple[tuple[Tensor, Tensor], ...]
    sizes: tuple[int, int]
    spanish: tuple[str, ...]
    spoken: Tensor
    said: tuple[str, ...]


@cache
def corpus(place: Path | None) -> Corpus:
    """Of all verses, or of the Proverbs, which come with the package; every tenth is held out."""
    lines = datasets.verses(place).lower().splitlines()
    pairs = [tuple(re.findall(r"\w+|[^\w\s]", side) for side in line.split("\t")) for line in lines]
    pairs = [pair for pair in pairs if all(0 < len(side) < LONGEST for side in pair)]
    train = [pair for k, pair in enumerate(pairs) if k % HELD_OUT_EVERY]
    held_out = pairs[::HELD_OUT_EVERY]
    lists = [_vocabulary([pair[side] for pair in train]) for side in (0, 1)]
    numbers = [{word: number for number, word in enumerate(words)} for words in lists]

    def numbered(pair: Sequence[list[str]]) -> tuple[Tensor, Tensor]:
        english, spanish = ([of.get(word, OTHER) for word in side] for of, side in zip(numbers, pair, strict=True))
        return torch.tensor([*english, END]), torch.tensor([END, *spanish, END])

    spoken = [pair for pair in held_out if len(pair[1]) < SPOKEN_LONGEST]
    spoken = spoken[:: max(1, len(spoken) // SPOKEN)][:SPOKEN]
    return Corpus(
        tuple(sorted(map(numbered, train), key=lambda pair: (len(pair[1]), len(pair[0])))),
        tuple(map(numbered, held_out[:: max(1, len(held_out) // JUDGED)][:JUDGED])),
        (len(lists[0]), len(lists[1])),
        tuple(lists[1]),
        _padded([numbered(pair)[0] for pair in spoken]),
        tuple(" ".join(pair[1]) for pair in spoken),
    )


def _vocabulary(sentences: Sequence[list[str]]) -> list[str]:
    counts = Counter(word for sentence in sentences for word in sentence)
    return ["", ".", "<?>", *(word for word, _ in counts.most_common(WORDS))]


def _padded(rows: Sequence[Tensor]) -> Tensor:
    length = max(map(len, rows))
    return torch.stack([F.pad(row, (0, length - len(row)), value=PAD) for row in rows])


# The model


class Attention(nn.Module):
    """Of every position of the one sequence to those of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.tell = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor, seen: Tensor) -> Tensor:
        keys, values = self.tell(other).chunk(2, dim=-1)
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in (self.ask(x), keys, values)]
        weights = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(WIDTH / HEADS)
        weights = weights.masked_fill(~seen.unsqueeze(-3), -1e9).softmax(dim=-1)
        out: Tensor = self.out((weights @ heads[2]).transpose(-2, -3).flatten(-2))
        return out


def _wide() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


class Translator(nn.Module):
    """One layer that reads and one that writes; the words that are written are those that are read again."""

    def __init__(self, english: int, spanish: int) -> None:
        super().__init__()
        self.english, self.spanish = nn.Embedding(english, WIDTH), nn.Embedding(spanish, WIDTH)
        self.place = nn.Embedding(LONGEST + 2, WIDTH)
        for table in (self.english, self.spanish, self.place):
            nn.init.normal_(table.weight, std=WIDTH**-0.5)
        self.reads, self.writes, self.looks = Attention(), Attention(), Attention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.read_wide, self.write_wide = _wide(), _wide()

    def read(self, english: Tensor) -> Tensor:
        x = self.english(english) + self.place.weight[: english.shape[-1]]
        normed = self.norms[0](x)
        x = x + self.reads(normed, normed, (english != PAD).unsqueeze(-2))
        out: Tensor = self.norms[1](x + self.read_wide(x))
        return out

    def write(self, read: Tensor, english: Tensor, spanish: Tensor) -> Tensor:
        """What is known of the word that follows each."""
        length = spanish.shape[-1]
        y = self.spanish(spanish) + self.place.weight[:length]
        before = torch.ones(length, length, dtype=torch.bool).tril()
        normed = self.norms[2](y)
        y = y + self.writes(normed, normed, before)
        y = y + self.looks(self.norms[3](y), read, (english != PAD).unsqueeze(-2))
        out: Tensor = self.norms[4](F.dropout(y + self.write_wide(y), DROPOUT, self.training))
        return out

    def words(self, known: Tensor) -> Tensor:
        """How likely each word is, up to a factor."""
        return known @ self.spanish.weight.T

    def forward(self, english: Tensor, spanish: Tensor) -> Tensor:
        return self.words(self.write(self.read(english), english, spanish))


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Of each word; what only fills up a row counts for nothing."""
    counts = target != PAD
    each = F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="none")
    return (each * counts.flatten()).sum() / counts.sum()


@torch.no_grad()
def translations(model: nn.Module, english: Tensor) -> Tensor:
    """The likeliest next word, until the end or as many words as any of those verses has."""
    assert isinstance(model, Translator)
    read = model.read(english)
    said = torch.full((len(english), 1), END)
    ended = torch.zeros(len(english), dtype=torch.bool)
    while said.shape[1] <= SPOKEN_LONGEST and not bool(ended.all()):
        following = model.words(model.write(read, english, said)[:, -1]).argmax(dim=-1)
        following = following.masked_fill(ended, PAD)
        ended |= following == END
        said = torch.cat([said, following.unsqueeze(1)], dim=1)
    return said[:, 1:]


def check() -> None:
    """A ValueError says what is not installed."""
    try:
        import sacrebleu  # noqa: F401
    except ImportError:
        raise ValueError(f"BLEU is counted by sacrebleu, which is not installed; {INSTALL}") from None


def bleu(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """By sacrebleu; words are apart already, which ``force`` says."""
    check()
    from sacrebleu.metrics.bleu import BLEU

    return float(BLEU(tokenize="none", force=True).corpus_score(list(hypotheses), [list(references)]).score)


# The task


def task(seed: int, batch: int, place: Path | None) -> Task:
    return Task(
        model=partial(_model, place),
        loss=loss,
        batch=partial(_batch, place, batch, seed),
        optimizer=torch.optim.Adam,
        evaluate=partial(_evaluate, place),
        name="verses",
    )


def _model(place: Path | None) -> nn.Module:
    return Translator(*corpus(place).sizes)


def _chosen(place: Path | None, size: int, seed: int, rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Out of neighbours in the order of lengths, as is usual, so that little of a batch is filled up."""
    pairs = corpus(place).train
    generator = draw.generator(_BATCH, seed, rank, step)
    start = int(torch.randint(len(pairs) - WINDOW * size + 1, (1,), generator=generator))
    return [pairs[start + int(k)] for k in torch.randperm(WINDOW * size, generator=generator)[:size]]


def _batch(place: Path | None, size: int, seed: int, rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    chosen = _chosen(place, size, seed, rank, step)
    english, spanish = (_padded([pair[side] for pair in chosen]) for side in (0, 1))
    return english, spanish[:, :-1], spanish[:, 1:]


@cache
def cost(seed: int, size: int, place: Path | None, rank: int, step: int) -> float:
    """How long a batch takes: as many words as its rows have, filled up."""
    chosen = _chosen(place, size, seed, rank, step)
    return float(sum(max(len(pair[side]) for pair in chosen) for side in (0, 1)))


@torch.no_grad()
def _evaluate(place: Path | None, model: nn.Module) -> dict[str, float]:
    model.eval()
    lines = sorted(corpus(place).held_out, key=lambda pair: len(pair[1]))
    total = right = words = 0.0
    for k in range(0, len(lines), 64):
        english, spanish = (_padded([pair[side] for pair in lines[k : k + 64]]) for side in (0, 1))
        output, target = model(english, spanish[:, :-1]), spanish[:, 1:]
        counts = target != PAD
        total += loss(output, target).item() * int(counts.sum())
        right += int(((output.argmax(dim=-1) == target) & counts).sum())
        words += int(counts.sum())
    return {"loss": total / words, "accuracy": right / words}


def score(place: Path | None, model: nn.Module) -> float:
    of = corpus(place)
    model.eval()
    said = translations(model, of.spoken)
    words = [[of.spanish[number] for number in row if number not in (PAD, END)] for row in said.tolist()]
    return bleu([" ".join(line) for line in words], of.said)
