"""The live world: methods on ``torch.distributed``. The only folder that imports it."""

from __future__ import annotations

from offbeat.live.attached.attach import attach, init
from offbeat.live.attached.optimizer import Attached
from offbeat.live.attached.summary import Summary
from offbeat.live.host.status import JobStatus
from offbeat.live.transport.errors import ConfigMismatch, OffbeatError, PeerFailed
from offbeat.live.work.follow import follow
from offbeat.live.work.share import Shards, SharedBatches, share

__all__ = [
    "Attached",
    "ConfigMismatch",
    "JobStatus",
    "OffbeatError",
    "PeerFailed",
    "Shards",
    "SharedBatches",
    "Summary",
    "attach",
    "follow",
    "init",
    "share",
]
