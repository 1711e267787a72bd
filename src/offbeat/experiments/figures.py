"""What one run came to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """What one run came to. Without learning there are no losses.

    ``curve``: (seconds, training loss), or the held-out one where what is held out is followed: ``reached``, (seconds,
    the more the better).
    """

    seed: int
    rate: float | None
    seconds: float
    waiting: float
    sent: int
    gradients: int
    loss: float | None = None
    accuracy: float | None = None
    training_loss: float | None = None
    curve: tuple[tuple[float, float], ...] = ()
    score: float | None = None
    reached: tuple[tuple[float, float], ...] = ()

    @property
    def efficiency(self) -> float:
        """The share of the workers' time in which they computed."""
        return 1.0 - self.waiting

    def __str__(self) -> str:
        found = {"loss": self.loss, "accuracy": self.accuracy, "score": self.score}
        told = [f"{what} {value:.3g}" for what, value in found.items() if value is not None]
        return ", ".join([f"{self.seconds:.1f} s of virtual time", f"{self.waiting:.1%} waiting", *told])
