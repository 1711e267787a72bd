"""PPO on MiniGrid: workers find their way in worlds of different kinds, and learn from whole episodes.

    python -m offbeat.experiments.navigation minigrid-turns.csv

measures how long a turn takes in each of the worlds of ``TIMED``: playing whole episodes, and one step of learning from
them. It is CPU time, so that other work on the machine counts for little.
"""

from __future__ import annotations

import csv
import sys
import time
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

from offbeat.basics import draw
from offbeat.delays import Distribution
from offbeat.tasks.task import Task

# What is learned needs but to turn and to walk; what is timed knows all seven actions.
WORLDS = ("Empty-Random-5x5", "Empty-Random-6x6", "LavaGapS5", "LavaGapS6")
TIMED = ("FourRooms", "MultiRoom-N6", "KeyCorridorS3R3", "Dynamic-Obstacles-8x8", "GoTo")
FIELDS, WALKING = 7 * 7 * 3 + 4, 3
LEARNS = 4  # steps of learning from the episodes of a turn: twice over all of them, in two parts
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5
CUT = 60  # steps after which an episode that is learned from ends
INSTALL = "pip install 'offbeat[experiments]'"
JUDGED = 8  # times as many episodes as a turn has, in each world, are what an agent is judged by
_PLAYED, _JUDGED, _ROW = 0x9140, 0x9141, 0x9142


def check() -> None:
    """A ValueError says what is not installed."""
    try:
        import minigrid  # noqa: F401
    except ImportError:
        raise ValueError(f"the worlds are those of MiniGrid, which is not installed; {INSTALL}") from None


@cache
def _worlds(name: str, count: int) -> list[Any]:
    check()
    import gymnasium
    import minigrid  # noqa: F401  its worlds are known to gymnasium from here on

    full = f"BabyAI-{name}-v0" if name == "GoTo" else f"MiniGrid-{name}-v0"
    cut = {"max_steps": CUT} if name in WORLDS else {}
    return [gymnasium.make(full, **cut) for _ in range(count)]


@dataclass
class Rollout:
    """What was seen, done and hoped for in a turn, one row for each step of its episodes."""

    seen: Tensor
    actions: Tensor
    chances: Tensor
    advantages: Tensor
    returns: Tensor


class Agent(nn.Module):
    """What to do, and what may be hoped for, by what it sees; asked for a step of a worker, its loss there.

    A worker's turn is of ``LEARNS`` steps: in the first it plays, and from what it has played it learns in all.
    """

    def __init__(self, seed: int, episodes: int, actions: int = WALKING) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FIELDS, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, actions), nn.Linear(32, 1)
        self.seed, self.episodes = seed, episodes
        self.played: dict[int, Rollout] = {}

    def look(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        body = self.body(seen)
        return self.policy(body), self.value(body).squeeze(-1)

    def forward(self, which: Tensor) -> Tensor:
        torch.rand(1)  # so that gradients are taken one at a time: playing draws
        rank, step = (int(number) for number in which[0])
        turn, part = divmod(step, LEARNS)
        if part == 0 or rank not in self.played:
            key = draw.below(1 << 30, _PLAYED, self.seed, rank, turn)
            self.played[rank] = rollout(play(self, WORLDS[rank % len(WORLDS)], self.episodes, key)[0])
        own = self.played[rank]
        order = torch.randperm(len(own.seen), generator=draw.generator(_PLAYED, self.seed, rank, turn, part // 2))
        halves = order.tensor_split(min(2, len(order)))  # one episode of one step has none
        rows = halves[part % len(halves)]
        return objective(self, own, rows).unsqueeze(0)


def objective(agent: Agent, own: Rollout, rows: Tensor) -> Tensor:
    """PPO's clipped objective, with the error of the values and a little entropy."""
    logits, values = agent.look(own.seen[rows])
    policy = Categorical(logits=logits)
    advantages = own.advantages[rows]
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    ratio = (policy.log_prob(own.actions[rows]) - own.chances[rows]).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    total: Tensor = VALUE * F.mse_loss(values, own.returns[rows]) - gain - ENTROPY * policy.entropy().mean()
    return total


Step = tuple[Tensor, int, float, float, float]  # seen, action, its log-probability, value, reward


@torch.no_grad()
def play(agent: Agent, name: str, count: int, key: int) -> tuple[list[list[Step]], float]:
    """So many episodes side by side, and their mean return."""
    worlds, generator = _worlds(name, count), draw.generator(_PLAYED, key)
    seen = [_as_tensor(world.reset(seed=(key + k) % (1 << 30))[0]) for k, world in enumerate(worlds)]
    episodes: list[list[Step]] = [[] for _ in worlds]
    running = list(range(count))
    while running:
        logits, values = agent.look(torch.stack([seen[k] for k in running]))
        chances = logits.log_softmax(-1)
        actions = torch.multinomial(chances.exp(), 1, generator=generator).squeeze(-1).tolist()
        on = []
        for row, k in enumerate(running):
            observation, reward, ended, cut, _ = worlds[k].step(actions[row])
            chance, value = float(chances[row, actions[row]]), float(values[row])
            episodes[k].append((seen[k], actions[row], chance, value, float(reward)))
            seen[k] = _as_tensor(observation)
            if not (ended or cut):
                on.append(k)
        running = on
    return episodes, sum(step[4] for episode in episodes for step in episode) / count


def _as_tensor(observation: dict[str, Any]) -> Tensor:
    seen = np.zeros(FIELDS, dtype=np.float32)
    seen[:-4] = np.asarray(observation["image"], dtype=np.float32).ravel() / 10.0
    seen[FIELDS - 4 + int(observation["direction"])] = 1.0
    return torch.from_numpy(seen)


def rollout(episodes: list[list[Step]]) -> Rollout:
    """With generalised advantage estimation, backwards through each episode; one that is cut off counts as ended."""
    advantages: list[float] = []
    for episode in episodes:
        advantage, following, own = 0.0, 0.0, []
        for _, _, _, value, reward in reversed(episode):
            advantage = reward + GAMMA * following - value + GAMMA * LAMBDA * advantage
            following = value
            own.append(advantage)
        advantages += reversed(own)
    steps = [step for episode in episodes for step in episode]
    seen, actions, chances, values, _ = zip(*steps, strict=True)
    hoped = torch.tensor(advantages)
    return Rollout(torch.stack(seen), torch.tensor(actions), torch.tensor(chances), hoped, hoped + torch.tensor(values))


# The task


def task(seed: int, batch: int, place: Path | None) -> Task:
    """``batch``: the episodes of a turn."""
    return Task(
        model=partial(Agent, seed, batch),
        loss=_loss,
        batch=_batch,
        optimizer=torch.optim.Adam,
        evaluate=_evaluate,
        name="navigation",
    )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[rank, step]]), torch.zeros(1)


def _evaluate(model: nn.Module) -> dict[str, float]:
    assert isinstance(model, Agent)
    found = [
        play(model, name, JUDGED * model.episodes, draw.below(1 << 30, _JUDGED, k))[1] for k, name in enumerate(WORLDS)
    ]
    mean = sum(found) / len(found)
    return {"loss": -mean, "score": mean}


# How long turns take


@dataclass(frozen=True)
class Turns(Distribution):
    """Turns as they were measured, a world for each worker: playing and a step of learning, and then only those."""

    def draw(self, seed: int, step: int, rank: int, workers: int) -> float:
        turn, part = divmod(step, LEARNS)
        rows = measured()[TIMED[rank % len(TIMED)]]
        play_s, learn_s = rows[draw.below(len(rows), seed, _ROW, turn, rank)]
        return learn_s + (play_s if part == 0 else 0.0)

    def __str__(self) -> str:
        return "turns of PPO on MiniGrid, measured"


@cache
def measured() -> dict[str, list[tuple[float, float]]]:
    """For each world: seconds of playing, and of a step of learning, of each turn."""
    found: dict[str, list[tuple[float, float]]] = {}
    with files("offbeat.experiments").joinpath("data", "minigrid-turns.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            found.setdefault(row["world"], []).append((float(row["play_s"]), float(row["learn_s"])))
    return found


def measure(file: Path, turns: int = 40, episodes: int = 4) -> None:
    """With an agent that has learned nothing yet."""
    torch.set_num_threads(1)
    rows = ["world,play_s,learn_s"]
    for name in TIMED:
        with draw.seeded(0):
            agent = Agent(0, episodes, int(_worlds(name, episodes)[0].action_space.n))
        play(agent, name, episodes, 0)  # the first is slower
        for turn in range(turns):
            began = time.process_time()
            own = rollout(play(agent, name, episodes, 1000 * (turn + 1))[0])
            played = time.process_time()
            for rows_ in torch.randperm(len(own.seen)).tensor_split(2):
                agent.zero_grad()
                objective(agent, own, rows_).backward()
            rows.append(f"{name},{played - began:.4g},{(time.process_time() - played) / 2:.4g}")
    file.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
