"""Settings that cannot be used are refused at once, in a sentence that names the value and the way out."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable

import pytest

import offbeat as ob

CODED = [name for name, card in ob.STRATEGIES.items() if "codec" in inspect.signature(card.make).parameters]


NO_CODECS = {"a number": 8, "its maker": ob.codec.int8, "a list": [ob.codec.int8()]}


@pytest.mark.parametrize("given", NO_CODECS.values(), ids=NO_CODECS)
@pytest.mark.parametrize("name", CODED)
def test_what_is_no_codec_is_refused_by_every_method_that_takes_one(name: str, given: object) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name}: codec is .*, but must be a codec, such as 'int8' or ob\.codec\.int8\(\)"
    ):
        ob.strategy(name, codec=given)


@pytest.mark.parametrize("name", CODED)
def test_every_method_that_takes_a_codec_takes_one_and_none(name: str) -> None:
    for codec in (None, ob.codec.int8(), ob.codec.parse("qsgd4")):
        assert ob.strategy(name, codec=codec).settings["codec"] == codec


@pytest.mark.parametrize("name", CODED)
def test_a_codec_may_be_given_by_its_name(name: str) -> None:
    for word in ("int8", "qsgd4", "none"):
        said, meant = ob.named(name, codec=word), ob.named(name, codec=ob.codec.parse(word))
        assert said.settings == meant.settings
        assert str(said) == str(meant)


def test_the_methods_with_a_codec_are_those_that_are_known_to_have_one() -> None:
    assert {"self_clocked", "local_sgd", "sparseloco", "eager", "sgp", "dasgd", "adaptive", "diloco"} <= set(CODED)


A_PAUSE = "means nothing; use a number, 0 or more, or 'auto'"
BAD: dict[str, Callable[[], object]] = {
    f"a pause of 'x' {A_PAUSE}": lambda: ob.self_clocked(pause="x"),  # type: ignore[arg-type]
    f"a pause of None {A_PAUSE}": lambda: ob.self_clocked(pause=None),  # type: ignore[arg-type]
    f"a pause of inf {A_PAUSE}": lambda: ob.self_clocked(pause=math.inf),
    f"a pause of nan {A_PAUSE}": lambda: ob.self_clocked(pause=math.nan),
    f"a pause of -1.0 {A_PAUSE}": lambda: ob.self_clocked(pause=-1.0),
    "period is 'spread', but must be a whole number of at least 1": lambda: ob.self_clocked(
        period="spread"  # type: ignore[arg-type]
    ),
    "group is 'all', but must be a whole number of at least 1, or None, or 'auto'": lambda: ob.self_clocked(
        group="all"  # type: ignore[arg-type]
    ),
    "draw is 'x', but must be a whole number of at least 0, or 'auto'": lambda: ob.self_clocked(
        draw="x"  # type: ignore[arg-type]
    ),
    "squares is 0, but must be a whole number of at least 1, or 'auto'": lambda: ob.self_clocked(squares=0),
    "self_clocked: there is no codec 'atuo'; use none, bf16, fp16, int8, qsgd2 to qsgd16, or topk1 to topk4096, "
    "or auto": lambda: ob.self_clocked(codec="atuo"),
    "local_sgd: there is no codec 'int9'; use none, bf16": lambda: ob.local_sgd(4, codec="int9"),
    "sgp: nothing sends later what topk64 leaves out": lambda: ob.sgp(codec="topk64"),
    "group is 'all', but must be a whole number of at least 1, or None": lambda: ob.wagma(
        group="all"  # type: ignore[arg-type]
    ),
    "threshold is 'x', but must be a whole number of at least 1, or 'workers', or None": lambda: ob.ringmaster(
        threshold="x"  # type: ignore[arg-type]
    ),
    "micro is 0, but must be a whole number of at least 1, or 'auto'": lambda: ob.nonblocking(micro=0),
}


@pytest.mark.parametrize("sentence", BAD)
def test_a_setting_that_cannot_be_used_is_answered_with_the_way_out(sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        BAD[sentence]()


FADING = [ob.diloco, ob.noloco, ob.decoupled]


@pytest.mark.parametrize("make", FADING, ids=lambda make: make.__name__)
def test_an_outer_momentum_that_never_fades_is_refused_and_every_smaller_one_is_taken(
    make: Callable[..., ob.Strategy],
) -> None:
    for ones in (1, 1.0):
        sentence = f"{make.__name__}: an outer_momentum of {ones!r} never fades; use 0 or more, and less than 1"
        with pytest.raises(ValueError, match=re.escape(sentence)):
            make(outer_momentum=ones)
    for wrong in (1.5, -0.1, math.nan, "0.9"):
        with pytest.raises(ValueError, match=f"outer_momentum is {wrong!r}, but must lie between 0 and 1"):
            make(outer_momentum=wrong)
    for fine in (0, 0.9, 0.999):
        assert make(outer_momentum=fine).settings["outer_momentum"] == fine


def test_the_ways_out_that_are_named_can_be_taken() -> None:
    assert ob.self_clocked(group=2, draw=2, pause=0, codec="auto").settings["draw"] == 2
