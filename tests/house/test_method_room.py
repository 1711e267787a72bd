"""``offbeat.method`` is the room to write a method from, and one function makes one."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
import offbeat.method as room
from offbeat.cli import main
from offbeat.method import Axes, Body, Codec, Edge, Facts, Grad, Mix, Paper, Replica, method, topology, whole
from offbeat.strategies import registry

ROOT = Path(ob.__file__).parent
FILES = sorted((ROOT / "strategies").glob("*.py"))
TASK = ob.tasks.regression(dimension=5, batch=2)

PAPER = Paper(
    name="halved",
    full_name="Half-way averaging",
    title="Meet Me Half-Way",
    authors="Nobody, Ann and Other, Some",
    year=2031,
    venue="arXiv preprint",
    axes=Axes(what="weights", when="every H steps", whom="everyone"),
    laws=("share=1 equals local_sgd",),
)


@method(PAPER, lambda period, **_: Facts(meets="everyone" if period > 1 else "others"))
def halved(
    period: int = 4, share: float = 0.5, graph: str | Iterable[Edge] = "everyone", codec: Codec | None = None
) -> Body:
    """Go a part of the way to the mean of all.

    ``share``: of the way.

    *When it helps*: nobody
    knows. Yet.
    *When it hurts*: always.
    *Departures*: the title.

    Example: ``halved()``
    """
    whole("period", period, 1)

    async def body(me: Replica) -> None:
        for_all = topology.graph(graph, me.size)
        async for t in me.steps():
            me.step(await Grad())
            if (t + 1) % period == 0:
                me.x.mul_(1 - share).add_(await Mix(me.x, for_all(t), codec), alpha=share)

    return body


def test_settings_are_the_arguments_and_printing_gives_back_the_call() -> None:
    assert str(halved(2)) == repr(halved(period=2)) == "halved(period=2, share=0.5, graph='everyone', codec=None)"
    assert halved(share=1).settings == {"period": 4, "share": 1, "graph": "everyone", "codec": None}
    assert str(halved(codec=ob.codec.int8())).endswith("codec=int8)")


@pytest.mark.parametrize(
    "edges", [[[0, 1], [1, 2]], ((0, 1), (1, 2)), iter([(0, 1), (1, 2)])], ids=["list", "", "iter"]
)
def test_a_list_of_edges_becomes_a_value_whatever_it_came_in(edges: Any) -> None:
    made = halved(graph=edges)
    assert made.settings["graph"] == ((0, 1), (1, 2))
    assert ob.simulate(made, TASK, workers=3, steps=4).hash == ob.simulate(made, TASK, workers=3, steps=4).hash


def test_it_survives_pickling_and_trains() -> None:
    made = halved(2, codec=ob.codec.qsgd(4))
    again = pickle.loads(pickle.dumps(made))
    assert str(again) == str(made)
    assert again.make is halved
    assert ob.simulate(again, TASK, 3, 6).hash == ob.simulate(made, TASK, 3, 6).hash


def test_facts_may_be_a_function_of_the_settings() -> None:
    assert halved(2).facts.meets == "everyone"
    assert halved(1).facts.meets == "others"


def test_the_docstring_is_the_card() -> None:
    card = halved().card
    assert (card.summary, card.helps, card.hurts) == (
        "Go a part of the way to the mean of all", "nobody knows. Yet", "always",
    )  # fmt: skip
    assert (card.suggested, card.departures) == ("", "the title")
    assert card.paper.key == "nobody2031halved"
    assert ob.allreduce().card.departures == "none"


@pytest.mark.parametrize(
    ("call", "kind", "sentence"),
    [
        (lambda: halved(0), ValueError, "halved: period is 0, but must be a whole number of at least 1"),
        (lambda: halved(perod=2), TypeError, "halved has no setting 'perod'; did you mean 'period'? it has period, sh"),  # type: ignore[call-arg]
        (lambda: halved(1, 2, "ring", None, 5), TypeError, "halved: too many positional arguments"),  # type: ignore[call-arg]
        (lambda: ob.allreduce(period=2), TypeError, "allreduce has no setting 'period'; it has none"),  # type: ignore[call-arg]
    ],
)
def test_wrong_settings_are_answered_with_a_sentence(call: Any, kind: type[Exception], sentence: str) -> None:
    with pytest.raises(kind, match=re.escape(sentence)):
        call()


def test_a_card_of_another_name_is_refused() -> None:
    def other() -> Body:
        raise NotImplementedError

    with pytest.raises(ValueError, match="other has the card of 'halved'; give both the same name"):
        method(PAPER)(other)


def test_type_checkers_and_help_see_the_settings() -> None:
    assert list(inspect.signature(halved).parameters) == ["period", "share", "graph", "codec"]
    assert inspect.signature(ob.eager).return_annotation == "Method"
    assert isinstance(ob.eager, types.FunctionType), "help() shows a function's signature, and not that of an object"
    assert "*When it helps*" in (ob.eager.__doc__ or "")


def test_the_command_line_knows_what_is_in_the_registry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ob.STRATEGIES, "halved", halved().card)
    assert main(["list", "halved"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in short Go a part of the way to the mean of all" in shown
    assert "settings period=4, share=0.5, graph=everyone, codec=none" in shown
    assert "helps nobody knows. Yet hurts always" in shown
    assert (
        main(["simulate", "halved:period=2,share=0.25", "--task", "regression", "--workers", "2", "--steps", "4"]) == 0
    )
    assert main(["simulate", "halved:period=0"]) != 0
    assert "halved: period is 0" in capsys.readouterr().err


# One line registers a method.


def test_every_file_with_a_method_has_its_line_and_every_line_is_public() -> None:
    written = {file.stem for file in FILES if "\n@method(" in file.read_text(encoding="utf-8")}
    listed = [name for name in vars(registry) if not name.startswith("_")]
    assert written == set(listed)
    assert listed == list(ob.STRATEGIES)
    for name, card in ob.STRATEGIES.items():
        assert card.make is getattr(ob, name) is getattr(ob.strategies, name)
        assert name in ob.__all__
        assert card.paper.name == name


# The room.


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_method_imports_from_this_room_only(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    ours = [name for name in (*named, *plain) if name is not None and name.startswith("offbeat")]
    assert [name for name in ours if name != "offbeat.method" and not name.startswith("offbeat.strategies")] == []


def test_the_room_exports_what_it_has_and_everything_says_what_it_is() -> None:
    public = {name for name, thing in vars(room).items() if not name.startswith("_")}
    inside = {"annotations", *(file.stem for file in (ROOT / "method").glob("*.py"))}
    assert public - inside <= set(room.__all__) <= public
    assert room.__all__ == sorted(room.__all__, key=lambda name: (not name[0].isupper(), name))
    for name in room.__all__:
        thing = getattr(room, name)
        if isinstance(thing, types.FunctionType | types.ModuleType | type):
            assert thing.__doc__, name
            assert not thing.__doc__.startswith(f"{name}("), f"{name}: a dataclass's own signature says nothing"


def test_the_guide_imports_from_this_room_only() -> None:
    guide = (ROOT.parent.parent / "docs" / "adding-a-method.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^(?:from|import) (offbeat\S*)", guide, re.MULTILINE)) == {"offbeat", "offbeat.method"}


# Words beside numbers whose kind decides.


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (ob.nonblocking(stop="3 workers"), ob.nonblocking(stop=3)),
        (ob.nonblocking(stop="1 worker"), ob.nonblocking(stop=1)),
        (ob.nonblocking(stop="80ms"), ob.nonblocking(stop=0.08)),
        (ob.eager(wait="3 workers"), ob.eager(wait=3)),
        (ob.eager(wait="50%"), ob.eager(wait=0.5)),
        (ob.wagma(wait="100%"), ob.wagma(wait=1.0)),
        (ob.adaptive(2, sampling="50%"), ob.adaptive(2, sampling=0.5)),
        (ob.adaptive(2, sampling="8 steps"), ob.adaptive(2, sampling=8)),
    ],
    ids=str,
)
def test_words_with_units_mean_what_the_numbers_mean(said: ob.Strategy, meant: ob.Strategy) -> None:
    late = ob.delays.exponential(0.07)
    runs = [ob.simulate(strategy, TASK, workers=5, steps=16, delays=late) for strategy in (said, meant)]
    assert runs[0].hash == runs[1].hash
    assert str(said) != str(meant)
    assert str(pickle.loads(pickle.dumps(said))) == str(said)


def test_one_measured_step_can_be_said() -> None:
    """As a number, 1 is the whole run."""
    one, whole_run = (ob.simulate(ob.adaptive(1, sampling=s), TASK, 3, 40) for s in ("1 step", 1))
    assert one.hash != whole_run.hash


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ob.nonblocking(stop="0 workers"), "nonblocking: nobody can stop at '0 workers'; use 'first', 'auto'"),
        (lambda: ob.nonblocking(stop="2 wolves"), "nobody can stop at '2 wolves'"),
        (lambda: ob.nonblocking(stop="0ms"), "nobody can stop at '0ms'"),
        (lambda: ob.eager(wait="2.5 workers"), "eager: '2.5 workers' is 2.5 workers, which is not a whole number"),
        (lambda: ob.eager(wait="150%"), "a quorum of 1.5 means nothing"),
        (lambda: ob.adaptive(sampling="often"), "adaptive: sampling is 'often', but must be a share of the run, '25%'"),
        (lambda: ob.adaptive(sampling="150%"), "sampling, as a share, is 1.5, but must lie between 0 and 1"),
    ],
)
def test_words_that_mean_nothing_are_refused(call: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()
