"""The simulated world: every method in virtual time, up to thousands of workers in one process."""

from __future__ import annotations

from offbeat.runs.result import Run
from offbeat.sim.network import Network
from offbeat.sim.replay.mismatch import Mismatch
from offbeat.sim.simulation import simulate
from offbeat.sim.world import Deadlock

__all__ = ["Deadlock", "Mismatch", "Network", "Run", "simulate"]
