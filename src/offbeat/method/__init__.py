"""Everything a method is written with. Import from here; where a thing lies below is nobody's business.

* **the method**: `method` makes one of a function and its `Paper` (with `Axes`); `Facts` say what runtimes may rely on;
  a `Method` is a method with its settings, a `Body` its coroutine, a `Card` what is told of it
* **one worker**: `Replica`, what a body calls ``me``, and what it has `Reported` (with how it has been `Talking`)
* **requests**: `Grad`, `GradMix`, `Mix`, `Begin`, `Finish`; partial rounds: `Channel`, `Open`, `Got`, with `Rules`;
  micro-batches: `Batch`, `Done`, with a `Stop`; shared weights: `Share`, `Meet`, `Add`, `Retire`; one's own time:
  `Spent`. ``me.steps()`` asks `Next` for a `Turn`; a channel's ``mix``, ``through`` and ``rest`` are `Offer`, `Through`
  and `Rest`; what was begun is a `Ticket`
* **values**: `Vec`, `pack`, `unpack`, `scalar`, `numbers`; `Mixing`, `Edge`, `Nodes`; `Codec`, `nothing_lost`
* **modules**: `topology` and its `matchings` (with whom), `waiting` (for whom), `codec` (in how many bytes), `pacing`
  (how often), `micro` (in how many pieces), `draw` (chance that all workers agree on), `units` (numbers in words)
* **checks** of settings: `whole`, `between`, `one_of`

The rules that a body keeps are at the top of ``offbeat/method/effects.py``; docs/adding-a-method.md writes one.
"""

from __future__ import annotations

from offbeat import topology
from offbeat.basics import draw, units
from offbeat.basics.checks import between, one_of, whole
from offbeat.method.card import Axes, Card, Paper
from offbeat.method.effects import (
    Add,
    Batch,
    Begin,
    Channel,
    Done,
    Effect,
    Finish,
    Got,
    Grad,
    GradMix,
    Meet,
    Mix,
    Next,
    Offer,
    Open,
    Rest,
    Retire,
    Share,
    Spent,
    Through,
    Ticket,
    Turn,
)
from offbeat.method.facts import Facts, Reported
from offbeat.method.replica import Replica
from offbeat.method.strategy import Body, Method, Strategy, method
from offbeat.rounds import micro, pacing, waiting
from offbeat.rounds.grace import Window, checked_window
from offbeat.rounds.micro import Stop, Weighting
from offbeat.rounds.rules import Absent, CatchUp, Rules
from offbeat.rounds.waiting import Wait
from offbeat.runs.talking import Talking
from offbeat.tensors import codec
from offbeat.tensors.codec import Codec
from offbeat.tensors.stretches import nothing_lost
from offbeat.tensors.vector import Vec, numbers, pack, scalar, unpack
from offbeat.topology import Edge, Mixing, matchings
from offbeat.topology.hierarchy import Nodes

__all__ = [
    "Absent",
    "Add",
    "Axes",
    "Batch",
    "Begin",
    "Body",
    "Card",
    "CatchUp",
    "Channel",
    "Codec",
    "Done",
    "Edge",
    "Effect",
    "Facts",
    "Finish",
    "Got",
    "Grad",
    "GradMix",
    "Meet",
    "Method",
    "Mix",
    "Mixing",
    "Next",
    "Nodes",
    "Offer",
    "Open",
    "Paper",
    "Replica",
    "Reported",
    "Rest",
    "Retire",
    "Rules",
    "Share",
    "Spent",
    "Stop",
    "Strategy",
    "Talking",
    "Through",
    "Ticket",
    "Turn",
    "Vec",
    "Wait",
    "Weighting",
    "Window",
    "between",
    "checked_window",
    "codec",
    "draw",
    "matchings",
    "method",
    "micro",
    "nothing_lost",
    "numbers",
    "one_of",
    "pacing",
    "pack",
    "scalar",
    "topology",
    "units",
    "unpack",
    "waiting",
    "whole",
]
