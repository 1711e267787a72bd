"""Methods in words, as on the command line; the method of those who name none; and the names of before."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import offbeat as ob
import offbeat.method as room
from offbeat.cli import main
from offbeat.method import Axes, Body, Paper, Replica, method
from offbeat.strategies import registry

TASK = ob.tasks.regression(dimension=5, batch=2)

SAID = {
    "wagma": ob.wagma(),
    "wagma:tau=5": ob.wagma(tau=5),
    " local_sgd : period = 4 , codec = int8 ": ob.local_sgd(4, ob.codec.int8()),
    "local_sgd:period=speed": ob.local_sgd("speed"),
    "self_clocked:codec=auto,group=none": ob.self_clocked(group=None),
    "nonblocking:scale_lr=yes": ob.nonblocking(scale_lr=True),
    "eager:wait=50%,grace=auto": ob.eager("50%", grace="auto"),
    "eager:wait=0.5": ob.eager(0.5),
}


def attached(*method: Any, **named: Any) -> ob.Method:
    model = torch.nn.Linear(2, 1)
    with ob.attach(torch.optim.SGD(model.parameters(), lr=0.1), model, *method, **named) as optimizer:
        assert optimizer.strategy is optimizer.method
        return optimizer.method


def simulated(*method: Any, **named: Any) -> ob.Run:
    given = dict(zip(["method"], method, strict=False))
    return ob.simulate(**given, task=TASK, workers=3, steps=4, **named)


@pytest.mark.parametrize("words", SAID)
def test_words_stand_for_the_method_that_the_call_makes(words: str) -> None:
    assert str(ob.named(words)) == str(SAID[words])
    assert str(attached(words)) == str(SAID[words])
    run = simulated(words)
    assert run.method == run.strategy == str(SAID[words])
    assert run.hash == simulated(SAID[words]).hash


def test_further_settings_may_follow_in_words_or_as_arguments() -> None:
    expected = str(ob.local_sgd(4, ob.codec.int8()))
    assert str(ob.named("local_sgd", period=4, codec="int8")) == expected
    assert str(ob.named("local_sgd:period=4", "codec=int8")) == expected
    assert str(ob.named("local_sgd:period=4", codec=ob.codec.int8())) == expected


@method(
    Paper("mine", "Mine", "Mine", "Nobody, Ann", 2031, "arXiv preprint", Axes("weights", "never", "nobody"), ("none",))
)
def mine(seconds: float = 1.0) -> Body:
    """A method of one's own."""

    async def body(me: Replica) -> None:
        async for _ in me.steps():
            pass

    return body


IN_PYTHON = {
    "no method is called 'wagna'; did you mean 'wagma'? there are self_clocked, allreduce, ": "wagna:tau=5",
    "wagma has no setting 'tua'; did you mean 'tau'? it has group, tau, ": "wagma:tua=5",
    "wagma: tau is 'ten', but must be a whole number": "wagma:tau=ten",
    "wagma: tau is 0, but must be a whole number of at least 1": "wagma:tau=0",
    "the setting 'tau' is not understood; write it as name=value, such as period=8": "wagma:tau",
    "tau is given twice, as '5' and '6'; leave one of them out": "wagma:tau=5,tau=6",
    "ob.wagma is the function that makes the method; call it: ob.wagma()": ob.wagma,
    "mine is the function that makes the method; call it: mine()": mine,
    "8 is not a method; use one such as ob.local_sgd(period=8), in words 'local_sgd:period=8'": 8,
}


@pytest.mark.parametrize("sentence", IN_PYTHON)
@pytest.mark.parametrize("used", [attached, simulated], ids=["attach", "simulate"])
def test_what_names_no_method_gets_a_sentence(used: Callable[..., object], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        used(IN_PYTHON[sentence])


@pytest.mark.parametrize("sentence", [s for s, given in IN_PYTHON.items() if isinstance(given, str)])
def test_the_command_line_answers_with_the_same_sentence(sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(IN_PYTHON[sentence])]) == 2
    assert sentence in capsys.readouterr().err


def test_a_setting_in_words_and_as_an_argument_is_given_twice() -> None:
    with pytest.raises(ValueError, match="period is given twice, as 4 and 8; leave one of them out"):
        ob.named("local_sgd:period=4", period=8)
    not_a_name: Any = ob.wagma()
    with pytest.raises(TypeError, match="is not the name of a method; use one of self_clocked, allreduce"):
        ob.named(not_a_name)


def test_a_replay_takes_words_too(tmp_path: Path) -> None:
    run = ob.simulate("eager:wait=0.5", TASK, workers=3, steps=6, record=tmp_path)
    for again in (ob.replay(tmp_path, TASK, "eager:wait=0.5"), ob.replay(tmp_path, TASK, strategy="eager:wait=0.5")):
        assert torch.equal(again.final, run.final)
    with pytest.raises(ValueError, match=r"the record is of eager\(.*, not of eager\(.*; replay it with that method"):
        ob.replay(tmp_path, TASK, method="eager:wait=0.25")


def test_whoever_names_no_method_gets_the_first_of_the_registry() -> None:
    first = next(name for name in vars(registry) if not name.startswith("_"))
    assert first == next(iter(ob.METHODS)) == "self_clocked"
    assert attached().name == first
    assert simulated().hash == simulated(ob.METHODS[first].make()).hash


# The names of before.


def test_the_names_of_before_go_on_working(tmp_path: Path) -> None:
    assert ob.Strategy is room.Strategy is room.Method is ob.Method
    assert ob.STRATEGIES is ob.METHODS
    assert str(ob.strategy("wagma", tau=5)) == str(ob.wagma(tau=5))
    assert str(attached(strategy=ob.wagma(tau=5))) == str(ob.wagma(tau=5))
    run = simulated(strategy=ob.wagma(tau=5), record=tmp_path)
    assert run.strategy == str(ob.wagma(tau=5))
    assert torch.equal(ob.replay(tmp_path, TASK, strategy=ob.wagma(tau=5)).final, run.final)


@pytest.mark.parametrize("used", [attached, simulated], ids=["attach", "simulate"])
def test_both_names_at_once_are_refused(used: Callable[..., object]) -> None:
    sentence = "method=wagma and strategy=allreduce() are two names of one argument; give method alone"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        used("wagma", strategy=ob.allreduce())


def test_a_record_of_before_is_refused_with_the_way_out(tmp_path: Path) -> None:
    simulated(ob.eager(), record=tmp_path)
    for file in tmp_path.glob("*.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "format": 1}))
    with pytest.raises(ValueError, match=r"has format 1, .* replay it with the version that wrote it"):
        ob.replay(tmp_path, TASK)
