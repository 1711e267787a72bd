"""Offbeat trains PyTorch models on many workers without marching in step."""

from __future__ import annotations

from offbeat import delays, tasks, topology
from offbeat.basics.version import __version__
from offbeat.live import Attached, ConfigMismatch, OffbeatError, PeerFailed, Summary, attach, init
from offbeat.method.strategy import Strategy
from offbeat.replaying import replay
from offbeat.rounds import waiting
from offbeat.sim import Deadlock, Network, Run, simulate
from offbeat.strategies import (
    STRATEGIES,
    ad_psgd,
    adaptive,
    allreduce,
    dasgd,
    diloco,
    dpsgd,
    eager,
    local_sgd,
    matcha,
    noloco,
    nonblocking,
    qsgd,
    sgp,
    strategy,
    wagma,
)
from offbeat.tasks.task import Task
from offbeat.tensors import codec

__all__ = [
    "STRATEGIES",
    "Attached",
    "ConfigMismatch",
    "Deadlock",
    "Network",
    "OffbeatError",
    "PeerFailed",
    "Run",
    "Strategy",
    "Summary",
    "Task",
    "__version__",
    "ad_psgd",
    "adaptive",
    "allreduce",
    "attach",
    "codec",
    "dasgd",
    "delays",
    "diloco",
    "dpsgd",
    "eager",
    "init",
    "local_sgd",
    "matcha",
    "noloco",
    "nonblocking",
    "qsgd",
    "replay",
    "sgp",
    "simulate",
    "strategy",
    "tasks",
    "topology",
    "wagma",
    "waiting",
]
