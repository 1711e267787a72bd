"""PPO on MiniGrid: episodes end when they end, so that now one worker is late and now another.

pip install 'offbeat[examples]'
torchrun --standalone --nproc-per-node 2 examples/ppo.py [--method eager] [--turns 40] [--world MiniGrid-…]

Each turn, every worker plays whole episodes of its own and learns from them. Prints the mean return on the way and, of
the average of the workers, on new episodes: 0 is an agent that never finds the goal, about 0.95 one that goes straight.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import gymnasium
import minigrid  # noqa: F401  its worlds are known to gymnasium from here on
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F

import offbeat as ob

EPISODES, EPOCHS, PARTS = 8, 4, 4  # a turn: episodes that are played at the same time, and steps learned from them
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 0.99, 0.95, 0.2, 0.01, 0.5


class Agent(nn.Module):
    """What to do, and what may be hoped for, by what it sees: 7 × 7 fields before it, and where it looks."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7 * 7 * 3 + 4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, actions), nn.Linear(64, 1)

    @property
    def device(self) -> torch.device:
        return self.value.weight.device

    def forward(self, seen: Tensor) -> tuple[Categorical, Tensor]:
        body = self.body(seen)
        return Categorical(logits=self.policy(body)), self.value(body).squeeze(-1)


@dataclass
class Moment:
    """One step of one episode; afterwards with what it was worth."""

    seen: Tensor
    action: Tensor
    log_probability: Tensor
    value: float
    reward: float
    advantage: float = 0.0


def as_tensor(observation: dict[str, Any]) -> Tensor:
    image = torch.from_numpy(np.asarray(observation["image"], dtype=np.float32)).flatten() / 10.0
    return torch.cat([image, F.one_hot(torch.tensor(int(observation["direction"])), 4).float()])


@torch.no_grad()
def play(agent: Agent, worlds: list[Any], seed: int) -> list[list[Moment]]:
    """An episode in each of these worlds; those that have ended wait for the longest. One cut off counts as ended."""
    seen = [as_tensor(world.reset(seed=seed + k)[0]) for k, world in enumerate(worlds)]
    episodes: list[list[Moment]] = [[] for _ in worlds]
    running = list(range(len(worlds)))
    while running:
        policy, values = agent(torch.stack([seen[k] for k in running]).to(agent.device))
        actions = policy.sample()
        chances = policy.log_prob(actions)
        on = []
        for row, k in enumerate(running):
            observation, reward, ended, cut, _ = worlds[k].step(int(actions[row]))
            moment = Moment(seen[k], actions[row], chances[row], float(values[row]), float(reward))
            episodes[k].append(moment)
            seen[k] = as_tensor(observation)
            if not (ended or cut):
                on.append(k)
        running = on
    return episodes


def weigh(episode: list[Moment]) -> None:
    """Generalised advantage estimation, backwards through one episode."""
    advantage, following = 0.0, 0.0
    for moment in reversed(episode):
        surprise = moment.reward + GAMMA * following - moment.value
        advantage = surprise + GAMMA * LAMBDA * advantage
        moment.advantage, following = advantage, moment.value


def loss(agent: Agent, part: list[Moment]) -> Tensor:
    """PPO's clipped objective, with the error of the values and a little entropy."""
    policy, values = agent(torch.stack([moment.seen for moment in part]).to(agent.device))
    advantages = torch.tensor([moment.advantage for moment in part], device=agent.device)
    returns = advantages + torch.tensor([moment.value for moment in part], device=agent.device)
    advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    ratio = (
        policy.log_prob(torch.stack([m.action for m in part])) - torch.stack([m.log_probability for m in part])
    ).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
    total: Tensor = VALUE * F.mse_loss(values, returns) - gain - ENTROPY * policy.entropy().mean()
    return total


def mean_return(episodes: list[list[Moment]]) -> float:
    return sum(moment.reward for episode in episodes for moment in episode) / len(episodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", help="any of `offbeat list`, with settings or without; none: Offbeat's default")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--world", default="MiniGrid-Empty-6x6-v0", help="any of MiniGrid's")
    given = parser.parse_args()
    device = ob.init()

    worlds = [gymnasium.make(given.world) for _ in range(EPISODES)]
    torch.manual_seed(0)
    actions = worlds[0].action_space
    assert isinstance(actions, gymnasium.spaces.Discrete)
    agent = Agent(int(actions.n)).to(device)
    inner = torch.optim.Adam(agent.parameters(), lr=1e-3)
    with ob.attach(inner, agent, given.method, max_norm=0.5) as optimizer:
        torch.manual_seed(1 + optimizer.rank)  # workers play different episodes
        for turn in range(given.turns):
            episodes = play(agent, worlds, seed=EPISODES * (turn * optimizer.size + optimizer.rank))
            if optimizer.rank == 0 and turn % 5 == 0:
                print(f"turn {turn}: mean return {mean_return(episodes):.2f}", flush=True)
            for episode in episodes:
                weigh(episode)
            moments = [moment for episode in episodes for moment in episode]
            for _ in range(EPOCHS):  # as many steps for all, however long the episodes were
                for part in torch.randperm(len(moments)).tensor_split(PARTS):
                    loss(agent, [moments[k] for k in part.tolist()]).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    if optimizer.rank == 0:
        torch.manual_seed(0)
        found = mean_return([episode for k in range(4) for episode in play(agent, worlds, seed=10**6 + EPISODES * k)])
        print(f"{optimizer.method.name}: mean return {found:.2f} on new episodes, {optimizer.size} workers")
        print(optimizer.summary())


if __name__ == "__main__":
    main()
