"""Offbeat trains PyTorch models on many workers without marching in step."""

from __future__ import annotations

from offbeat import codec, delays, tasks, topology
from offbeat.sim import Network, Run, simulate
from offbeat.strategies import STRATEGIES, allreduce, local_sgd, strategy
from offbeat.strategy import Strategy
from offbeat.task import Task

__version__ = "0.1.0"

__all__ = [
    "STRATEGIES",
    "Network",
    "Run",
    "Strategy",
    "Task",
    "allreduce",
    "codec",
    "delays",
    "local_sgd",
    "simulate",
    "strategy",
    "tasks",
    "topology",
]
