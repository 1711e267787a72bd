"""How a live run ends badly: each error names the rank, what it saw, and what it means."""

from __future__ import annotations


class OffbeatError(RuntimeError):
    """Base of the errors of the live world."""


class PeerFailed(OffbeatError):
    """Another worker failed; the message carries its rank and its own error."""


class ConfigMismatch(OffbeatError):
    """Workers that do not fit together: another model, method or version. Nothing has been exchanged yet."""
