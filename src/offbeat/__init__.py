"""Offbeat trains PyTorch models on many workers without marching in step."""

from __future__ import annotations

from offbeat import delays, tasks, topology
from offbeat.basics.version import __version__
from offbeat.live import (
    Attached,
    ConfigMismatch,
    JobStatus,
    OffbeatError,
    PeerFailed,
    Shards,
    SharedBatches,
    Summary,
    attach,
    follow,
    init,
    share,
)
from offbeat.method import Method, Strategy
from offbeat.replaying import replay
from offbeat.rounds import waiting
from offbeat.runs.result import LiveRun, Run
from offbeat.sim import Deadlock, Mismatch, Network, simulate
from offbeat.strategies import METHODS, STRATEGIES, named, strategy
from offbeat.strategies.registry import *  # noqa: F403
from offbeat.tasks.task import Task
from offbeat.tensors import codec

__all__ = [
    "METHODS",
    "STRATEGIES",
    "Attached",
    "ConfigMismatch",
    "Deadlock",
    "JobStatus",
    "LiveRun",
    "Method",
    "Mismatch",
    "Network",
    "OffbeatError",
    "PeerFailed",
    "Run",
    "Shards",
    "SharedBatches",
    "Strategy",
    "Summary",
    "Task",
    "__version__",
    "attach",
    "codec",
    "delays",
    "follow",
    "init",
    "named",
    "replay",
    "share",
    "simulate",
    "strategy",
    "tasks",
    "topology",
    "waiting",
]
__all__ += METHODS  # the methods, each under its name
