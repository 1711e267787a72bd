"""Settings that several methods share, and what they must be."""

from __future__ import annotations

from typing import Literal

from offbeat.method import (
    Absent,
    CatchUp,
    Codec,
    Grad,
    GradMix,
    Replica,
    Rules,
    Wait,
    Window,
    between,
    checked_window,
    codec,
    one_of,
    topology,
    units,
    waiting,
    whole,
)

LATER = "local_sgd, adaptive, dasgd, diloco or sparseloco, which keep it and send it with the next average"
Sync = Literal["barrier", "bounded"]


def own_gradient(me: Replica, per_node: int) -> Grad | GradMix:
    """My gradient; where workers make up nodes, the mean of my node's."""
    return Grad() if per_node == 1 else GradMix(topology.nodes(me.size, per_node)(0))


def whole_or(name: str, value: object, least: int, *others: str | None) -> None:
    """Refuse a setting that is neither a whole number from ``least`` up nor one of the others."""
    if value not in others:
        try:
            whole(name, value, least)
        except ValueError as error:
            raise ValueError(f"{error}{''.join(f', or {other!r}' for other in others)}") from None


def optional(name: str, value: int | None) -> int | None:
    """A setting that is a whole number from 1 up, or None."""
    whole_or(name, value, 1, None)
    return value


def fading(outer_momentum: object) -> float:
    """An outer momentum: the share of the ways before that is kept, which at 1 would never end."""
    mu = between("outer_momentum", outer_momentum, 0, 1)
    if mu == 1:
        raise ValueError(f"an outer_momentum of {outer_momentum!r} never fades; use 0 or more, and less than 1")
    return mu


def coded(Q: object, *words: str) -> Codec | None:
    """The codec that was given, if one was; refuses what is neither a codec, nor None, nor one of the words."""
    if Q is None or Q in words:
        return None
    if not isinstance(Q, Codec):  # names were read before
        others = "".join(f", {word!r}" for word in words)
        raise ValueError(f"codec is {Q!r}, but must be a codec, such as 'int8' or ob.codec.int8(){others}, or None")
    return Q


def sends_all(Q: object, *words: str) -> Codec | None:
    """The same where a method has no way to send later what a codec leaves out, and refuses such a codec."""
    given = coded(Q, *words)
    if given is not None and codec.leaves_out(given):
        raise ValueError(
            f"nothing sends later what {given.name} leaves out; use bf16, fp16, int8 or qsgd8 here, or {LATER}"
        )
    return given


def quorum(wait: str | int | float | Wait) -> Wait:
    """Who must be there: also as ``"3 workers"`` and ``"50%"``, which no kind of number can be mistaken for."""
    if isinstance(wait, str) and "worker" in wait:
        return waiting.at_least(units.parse_number_of(wait, "worker"))
    if isinstance(wait, str) and wait.endswith("%"):
        return waiting.at_least(units.parse_share(wait))
    return waiting.rule(wait)


def rules(
    *,
    wait: str | int | float | Wait,
    absent: Absent,
    full_every: int | None,
    catch_up: CatchUp,
    sync: Sync | None,
    staleness: int | None,
    late: int,
    fade: bool = False,
    grace: Window = 0.0,
    spares: bool = False,
) -> Rules:
    """Check the settings and put them together: full rounds every so often, or a bound instead of them.

    By default a bound where results may be late: a full round waits for all, which nothing hides.
    """
    one_of("catch_up", catch_up, ("current", "every_step"))
    if sync is None:  # of rounds that are all full, none is partial
        sync = "bounded" if late and (staleness is not None or (full_every or 0) > late) else "barrier"
    one_of("sync", sync, ("barrier", "bounded"))
    if late not in (0, 1):
        raise ValueError(f"late is {late!r}, but a result can be 0 or 1 rounds late")
    bound = None
    if sync == "bounded":
        bound, full_every = staleness if staleness is not None else full_every, None
        if bound is None:
            raise ValueError("sync='bounded' needs a bound; give staleness=K")
        whole("staleness", bound, 1 + late)
    elif staleness is not None:
        raise ValueError(f"staleness={staleness} bounds nothing with sync='barrier'; use sync='bounded'")
    return Rules(
        quorum(wait),
        absent,
        full_every=full_every,
        bound=bound,
        catch_up=catch_up,
        late=late,
        fade=fade,
        grace=checked_window(grace),
        spares=spares,
    )
