"""A small GPT on the characters of Python's own documentation, with one worker that is late.

torchrun --standalone --nproc-per-node 2 examples/gpt.py [--method eager] [--steps 150] [--late 0.05]

Prints the loss of the average of the workers on held-out text, who was waited for, and a line that the model wrote.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import offbeat as ob

CONTEXT, WIDTH, LAYERS, HEADS, BATCH = 48, 64, 2, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forward_ = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        heads = self.query_key_value(self.before(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        out: Tensor = mixed + self.forward_(self.after(mixed))
        return out


class GPT(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last = nn.LayerNorm(WIDTH)

    def forward(self, text: Tensor) -> Tensor:
        x = self.blocks(self.letters(text) + self.places.weight[: text.shape[1]])
        out: Tensor = self.last(x) @ self.letters.weight.T  # tied
        return out


def loss(model: nn.Module, text: Tensor) -> Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", help="any of `offbeat list`, with settings or without; none: Offbeat's default")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--late", type=float, default=0.05, help="seconds by which the last rank is late, every step")
    given = parser.parse_args()
    device = ob.init()

    whole = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    alphabet = sorted(set(whole))
    numbers = torch.tensor([alphabet.index(letter) for letter in whole[:200_000]])
    train, held_out = numbers[:180_000], numbers[180_000:]

    def draw(source: Tensor, generator: torch.Generator, rows: int = BATCH) -> Tensor:
        starts = torch.randint(len(source) - CONTEXT - 1, (rows,), generator=generator)
        return torch.stack([source[start : start + CONTEXT + 1] for start in starts.tolist()])

    torch.manual_seed(0)
    model = GPT(len(alphabet)).to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with ob.attach(inner, model, given.method, max_norm=1.0, steps=given.steps) as optimizer:
        own = torch.Generator().manual_seed(optimizer.rank)  # every worker has data of its own
        start = time.monotonic()
        for _ in range(given.steps):
            time.sleep(given.late if optimizer.rank == optimizer.size - 1 and optimizer.size > 1 else 0.0)
            loss(model, draw(train, own).to(device)).backward()
            optimizer.step()
            optimizer.zero_grad()
        took_s = time.monotonic() - start

    if optimizer.rank == 0:
        with torch.no_grad():
            final = loss(model, draw(held_out, torch.Generator().manual_seed(1), 64).to(device)).item()
            text = held_out[None, :8].to(device)
            for _ in range(60):
                text = torch.cat([text, model(text[:, -CONTEXT:])[:, -1:].argmax(-1)], dim=1)
        print(f"{optimizer.method.name}: held-out loss {final:.3f} after {took_s:.1f} s on rank 0 of {optimizer.size}")
        print(optimizer.summary())
        print(repr("".join(alphabet[number] for number in text[0].tolist())))


if __name__ == "__main__":
    main()
