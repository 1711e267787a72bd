"""Who may import whom (DESIGN.md, "The house"), and what is public: read from the source, nothing is run."""

from __future__ import annotations

import ast
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbeat as ob

ROOT = Path(ob.__file__).parent
FILES = {str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8")) for file in ROOT.rglob("*.py")}

# The rooms, each with those it may look into; nothing imports upwards. A room is a folder, or a file beside them.
VALUES = {"basics", "delays", "runs", "tensors", "topology", "rounds"}
WORLD = VALUES | {"method", "tasks"}
MAY_IMPORT = {
    "basics": set[str](),
    "tensors": {"basics"},
    "topology": {"basics"},
    "delays": {"basics"},
    "runs": {"basics", "topology"},
    "tasks": {"basics"},
    "rounds": {"basics", "tensors", "topology"},
    "method": {"basics", "tensors", "topology", "rounds", "runs"},
    "strategies": {"method"},  # the room that methods are written from
    "sim": WORLD,
    "live": WORLD,
    "replaying": WORLD | {"strategies", "sim"},
    "experiments": WORLD | {"strategies", "sim"},
    "report": {"basics", "runs", "method"},
    "integrations": {"basics", "method", "live", "strategies"},
    "cli": WORLD | {"strategies", "sim", "live", "report", "replaying", "experiments"},
    "__init__": WORLD | {"strategies", "sim", "live", "replaying"},
    "__main__": {"cli"},
}
# A method in words, or none at all: who takes one as an argument asks what it stands for.
ALSO = {"live/attached/attach.py": {"strategies"}, "sim/simulation.py": {"strategies"}}
# Inside the live world: from the wire up to whole jobs.
LIVE = ["transport", "memory", "host", "worker", "carriers", "partial", "work", "attached", "job"]
# No clock, no network, no thread, no process: a property of these rooms, whatever is put into them.
PURE = {*VALUES, "method", "strategies", "tasks"}

# The environment says which rank this process is (RANK, WORLD_SIZE, MASTER_ADDR), and is handed to the processes that
# are started. Everything else is an argument.
READS_ENVIRONMENT = (
    "cli/",
    "live/attached/attach.py",
    "live/transport/hosts.py",
    "live/work/share.py",
    "live/job/",
)


def layer(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def imported(file: str) -> Iterator[str]:
    """The full names of all modules that a file imports, wherever in the file."""
    package = ["offbeat", *Path(file).parts[:-1]]
    for node in ast.walk(FILES[file]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module != "offbeat":
                yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def ours(file: str) -> set[str]:
    """The layers a file imports. What is taken from the public face, where all of them meet, keeps its own name."""
    parts = [name.split(".") for name in imported(file)]
    return {part[1] if len(part) > 1 else "the public face" for part in parts if part[0] == "offbeat"}


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_file_imports_only_what_its_layer_may(file: str) -> None:
    assert layer(file) in MAY_IMPORT, f"{file} belongs to no layer; give it one here and in DESIGN.md"
    assert ours(file) <= MAY_IMPORT[layer(file)] | {layer(file)} | ALSO.get(file, set())


def test_the_imports_of_this_test_are_read_right() -> None:
    assert {"method", "strategies"} <= ours("strategies/local_sgd.py")
    assert "topology" in ours("method/effects.py")
    assert "torch.distributed" in set(imported("live/carriers/exchanges.py"))


SIDE_BY_SIDE = "experiments/bench.py"  # makes whole simulations in processes of their own


@pytest.mark.parametrize("file", sorted(file for file in FILES if layer(file) != "live" and file != SIDE_BY_SIDE))
def test_only_the_live_world_knows_threads_and_processes_and_who_makes_simulations_side_by_side(file: str) -> None:
    forbidden = ("torch.distributed", "torch.multiprocessing", "threading", "multiprocessing", "concurrent", "asyncio")
    assert not [name for name in imported(file) if name.startswith(forbidden)]
    mentions = [ast.unparse(node) for node in ast.walk(FILES[file]) if isinstance(node, ast.Attribute)]
    assert not [name for name in mentions if name.startswith("torch.distributed")]


@pytest.mark.parametrize("file", sorted(file for file in FILES if file.startswith("live/")))
def test_in_the_live_world_nothing_imports_upwards(file: str) -> None:
    parts = Path(file).parts
    if len(parts) < 3:  # the face of the folder
        return
    rooms = {name.split(".")[2] for name in imported(file) if name.startswith("offbeat.live.")}
    assert rooms <= set(LIVE[: LIVE.index(parts[1]) + 1])


@pytest.mark.parametrize("file", sorted(file for file in FILES if file.startswith(("live/host/", "live/worker/"))))
def test_nothing_that_comes_over_a_line_can_be_run(file: str) -> None:
    """Between a worker and its host process there are plain values alone."""
    runs = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "copyreg", "multiprocessing"}
    assert not {name.split(".")[0] for name in imported(file)} & runs
    mentioned = {ast.unparse(node) for node in ast.walk(FILES[file]) if isinstance(node, ast.Attribute | ast.Name)}
    assert not mentioned & {"eval", "exec", "torch.load", "torch.save", "dist.recv_object_list"}


@pytest.mark.parametrize("file", sorted(file for file in FILES if layer(file) in PURE))
def test_pure_rooms_know_no_clock_and_no_network(file: str) -> None:
    assert not {name.split(".")[0] for name in imported(file)} & {"time", "socket", "subprocess", "simpy"}


# Files of one name that are the same thing in two rooms: its rule and its drivers, or the two worlds' ways of doing it.
THE_SAME_THING = {"__init__.py", "bell.py", "exchanges.py", "leaders.py", "shared.py", "report.py", "status.py"}


def test_no_two_files_or_classes_of_one_name_mean_different_things() -> None:
    names = Counter(Path(file).name for file in FILES)
    assert {name for name, count in names.items() if count > 1} <= THE_SAME_THING
    classes = Counter(
        node.name
        for tree in FILES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name[0] != "_"
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_only_the_command_line_and_the_start_of_a_live_run_read_the_environment() -> None:
    readers = []
    for file, tree in FILES.items():
        names = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        from_os = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "os"]
        if from_os or any(name.startswith(("os.environ", "os.getenv")) for name in names):
            readers.append(file)
    assert readers
    assert not [file for file in readers if not file.startswith(READS_ENVIRONMENT)]


def test_what_is_public_is_what_is_exported() -> None:
    modules = {layer(file) for file in FILES}
    exported = set(ob.__all__)
    public = {name for name in vars(ob) if not name.startswith("_") and name != "annotations"}
    assert len(exported) == len(ob.__all__)
    assert exported <= set(vars(ob))
    assert public - exported <= modules, "a name is there that __all__ does not list"


def test_the_exports_are_in_order() -> None:
    def constants_classes_functions(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)

    by_hand, methods = ob.__all__[: -len(ob.STRATEGIES)], ob.__all__[-len(ob.STRATEGIES) :]
    assert by_hand == sorted(by_hand, key=constants_classes_functions)
    assert methods == list(ob.STRATEGIES)


@pytest.mark.parametrize("name", sorted(set(ob.__all__) - {"__version__", "METHODS", "STRATEGIES"}))
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(ob, name)
    assert thing.__doc__
    if isinstance(thing, types.FunctionType | type):
        assert not thing.__doc__.startswith(f"{thing.__name__}("), "a dataclass's own signature says nothing"


@pytest.mark.parametrize("thing", [ob.Attached, ob.Run, ob.Task, ob.Network, ob.Strategy], ids=lambda t: t.__name__)
def test_every_public_method_of_what_users_hold_says_what_it_does(thing: type) -> None:
    own = {name: value for name, value in vars(thing).items() if not name.startswith("_")}
    methods = {n: v for n, v in own.items() if isinstance(v, types.FunctionType | property)}
    # What a torch optimiser has keeps torch's words; a strategy's name and a link's latency are what they say.
    known = {*dir(__import__("torch").optim.Optimizer), "param_groups", "state", "defaults", "name", "latency"}
    assert [n for n, v in methods.items() if not v.__doc__ and n not in known] == []


def test_no_test_module_imports_another() -> None:
    """What several tests need lies in tests/support; a file that is run alone is the only one that is run."""
    for file in Path(__file__).parents[1].rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        others = [name for name in modules if name.startswith("tests.") and not name.startswith("tests.support")]
        assert others == [], f"{file} imports {others}; move what they share into tests/support"
