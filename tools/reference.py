"""The reference: pages made from docstrings, for what ``offbeat`` and ``offbeat.method`` export.

MkDocs loads this file as a hook and asks it for the pages, which are never written to disk; mkdocstrings fills them in.
``PAGES`` says which name stands on which page. A name that ``offbeat`` exports and no page has stops the build.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import offbeat as ob

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files


@dataclass(frozen=True)
class Page:
    """``names`` are below ``offbeat``; a module stands for all that is public in it."""

    file: str
    title: str
    text: str
    names: tuple[str, ...]


PAGES = (
    Page(
        "attach",
        "Training: attach",
        "What a training loop needs. [What attach promises](../attach.md) has arguments, promises and limits.",
        (
            "attach",
            "Attached",
            "Summary",
            "live.attached.summary.RankSummary",
            "runs.foreign.ForeignWait",
            "JobStatus",
            "live.host.status.WorkerStatus",
            "live.host.status.ChannelStatus",
            "live.host.status.OtherHost",
            "live.host.status.MemoryStatus",
            "init",
            "live.attached.stats.Log",
            "OffbeatError",
            "PeerFailed",
            "ConfigMismatch",
        ),
    ),
    Page(
        "share",
        "Sharing the work: share",
        "One supply of data for all workers. [Share the work](../share.md) begins with the lines to change.",
        ("share", "SharedBatches", "Shards", "follow"),
    ),
    Page(
        "simulate",
        "Simulating: simulate",
        "Runs in virtual time. [The simulator](../simulator.md) says what is charged for what.",
        (
            "simulate",
            "replay",
            "Run",
            "LiveRun",
            "Network",
            "Deadlock",
            "Mismatch",
            "runs.trace.Trace",
            "runs.trace.Round",
            "runs.trace.Span",
        ),
    ),
    Page(
        "methods",
        "Methods",
        "Each method is a function of `ob`, whose arguments are its settings; what it does, when it helps and where it "
        "comes from is on the method's own page. `attach`, `simulate` and `replay` also take one in words.",
        ("Method", "named", "METHODS", "strategies.Card", *ob.METHODS, "Strategy", "strategy", "STRATEGIES"),
    ),
    Page("tasks", "Tasks", "", ("tasks", "Task")),
    Page("delays", "Delays", "", ("delays",)),
    Page("topology", "Topology", "", ("topology",)),
    Page("codec", "Codecs", "", ("codec",)),
    Page("waiting", "Waiting", "", ("waiting",)),
    Page(
        "method",
        "Writing a method",
        "What a method is written with; [Adding a method](../adding-a-method.md) builds one from nothing.",
        ("method",),
    ),
)
# What has no docstring of its own.
SAID = {
    "METHODS": "All methods: a dict from a name to its [`Card`][offbeat.strategies.Card].",
    "Strategy": "An earlier name of `ob.Method`.",
    "strategy": "An earlier name of `ob.named`.",
    "STRATEGIES": "An earlier name of `ob.METHODS`.",
}
# Users are handed it; how it is made is no concern of theirs.
NOT_MADE = {"Attached"}


def documented() -> dict[str, str]:
    """Which page has which exported name."""
    return {"__version__": "index"} | {name: of.file for of in PAGES for name in of.names}


def public(module: ModuleType) -> dict[str, object]:
    """What a module exports: what ``__all__`` lists or, without one, what it defines."""
    own = vars(module)
    listed = getattr(module, "__all__", None)
    if listed is None:
        here = {name for name, thing in own.items() if getattr(thing, "__module__", None) == module.__name__}
        listed = [name for name in own if name in here | set(own.get("__annotations__", {}))]
    return {name: own[name] for name in listed if not name.startswith("_")}


def page(of: Page) -> str:
    """One page, as Markdown for mkdocstrings."""
    return "\n\n".join([f"# {of.title}", *([of.text] if of.text else []), *_entries(of)]) + "\n"


def index() -> str:
    """All exported names, with a sentence each."""
    undocumented = set(ob.__all__) - set(documented())
    if undocumented:
        raise ValueError(f"offbeat exports {', '.join(sorted(undocumented))}; name a page for it in tools/reference.py")
    lines = [
        "# Reference",
        "",
        "All that `import offbeat as ob` brings, made from the docstrings. What is not here, or begins with an "
        "underscore, is private and may change without notice. To write a method, import from "
        "[`offbeat.method`](method.md). `ob.__version__` is the version.",
    ]
    for of in PAGES:
        names = [name for name, file in documented().items() if file == of.file and name in ob.__all__]
        if names:
            lines += ["", f"## [{of.title}]({of.file}.md)", "", "| name | what it is |", "| --- | --- |"]
            lines += [f"| {_link(name, of.file)} | {SAID.get(name) or _first_sentence(name)} |" for name in names]
    return "\n".join(lines) + "\n"


def _link(name: str, file: str) -> str:
    thing = _named(name)
    anchor = "" if isinstance(thing, ModuleType) else f"#{_path(name, thing)}"
    return f"[`ob.{name}`]({file}.md{anchor}){{.name}}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs asks which files there are: those in docs/, and the pages of the reference."""
    from mkdocs.structure.files import File

    for file, text in {"index": index(), **{of.file: page(of) for of in PAGES}}.items():
        files.append(File.generated(config, f"reference/{file}.md", content=text))
    return files


def _entries(of: Page) -> Iterator[str]:
    for name in of.names:
        thing = _named(name)
        if isinstance(thing, ModuleType):
            yield from _module(name, thing)
            continue
        if name in SAID:
            yield f"## ob.{name} {{#offbeat.{name}}}\n\n{SAID[name]}"
            continue
        yield _entry(_path(name, thing), f"ob.{name}" if name in ob.__all__ else name.rpartition(".")[2], name)
        if name in ob.METHODS:
            yield f"More: [{ob.METHODS[name].paper.full_name}](../methods/{name}.md)."


def _module(name: str, module: ModuleType) -> Iterator[str]:
    """The module's own words, its values and aliases as a table, then its classes and functions."""
    yield _directive(f"offbeat.{name}", {"show_root_heading": False, "show_root_toc_entry": False, "members": False})
    face = f"ob.{name}" if name in ob.__all__ else f"offbeat.{name}"
    things = public(module)
    values = {n: v for n, v in things.items() if not inspect.isclass(v) and not inspect.isroutine(v)}
    if values:
        rows = [f"| `{face}.{n}` | {_value(v)} |" for n, v in values.items()]
        yield "\n".join(["| name | what it stands for |", "| --- | --- |", *rows])
    for each, thing in things.items():
        if each in values:
            continue
        first = getattr(thing, "__name__", each)
        if first != each and things.get(first) is thing:  # delays.random is RandomRanks, which has the entry
            continue
        called = [n for n, other in things.items() if other is thing]
        yield _entry(_path(f"{name}.{each}", thing), f"{face}.{called[-1]}", each)


def _entry(path: str, heading: str, name: str) -> str:
    options: dict[str, object] = {"heading": heading, "toc_label": heading.rpartition(".")[2]}
    if name in NOT_MADE:
        options["merge_init_into_class"] = False
    return _directive(path, options)


def _directive(path: str, options: Mapping[str, object]) -> str:
    lines = [
        f"        {key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()
    ]
    return "\n".join([f"::: {path}", "    options:", *lines])


def _path(name: str, thing: object) -> str:
    """Where mkdocstrings finds what is called ``name``, a name below ``offbeat``.

    Where a package takes a function out of a module of the same name (``eager`` from ``eager.py``), the short name is
    the module's; the full path tells them apart.
    """
    if inspect.isclass(thing) or inspect.isroutine(thing):
        package, _, module = thing.__module__.rpartition(".")
        if module == thing.__name__ and getattr(importlib.import_module(package), module) is thing:
            return f"{thing.__module__}.{thing.__qualname__}"
    return f"offbeat.{name}"


def _named(name: str) -> object:
    """What stands behind a dotted name below ``offbeat``."""
    if hasattr(ob, name):
        return getattr(ob, name)
    above, _, last = f"offbeat.{name}".rpartition(".")
    module = importlib.import_module(above)
    return getattr(module, last) if hasattr(module, last) else importlib.import_module(f"offbeat.{name}")


def _value(value: object) -> str:
    if isinstance(value, ModuleType):  # in its own words: its repr would name a folder of the machine that builds this
        return (value.__doc__ or "").strip().splitlines()[0]
    if isinstance(value, Mapping):
        return ", ".join(f"`{key}`" for key in value)
    return f"`{re.sub(r'([a-z_]+[.])+(?=[A-Za-z])', '', str(value))}`"


def _first_sentence(name: str) -> str:
    paragraph = (inspect.getdoc(_named(name)) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return paragraph.split(". ")[0].rstrip(".:") + "."
