"""``offbeat launch``: workers that outlive each other, whatever they print, and whatever they are sent."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from offbeat.cli import main
from tests.support.ports import hold_port

pytestmark = pytest.mark.live

Captured = pytest.CaptureFixture[str]

WITHIN_S = 240.0  # bounds a hang

# The command with all that it imports, once: each launch is a fork of it. It tells the process, and then how it ended.
COMMANDS = """
import gc, json, os, signal, sys
import offbeat.cli
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
gc.freeze()  # or each would spend a second, when it ends, on what it has inherited
for line in iter(sys.stdin.readline, ""):
    folder, *words = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for fd, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), fd)
        sys.argv = ["offbeat", *words]
        offbeat.cli.run()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""

# What scripts below begin with.
HEAD = """
import json, os, signal, sys, time
from pathlib import Path
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def wait_for(what, within_s=60.0):
    end_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.005)

def text_of(name):
    wait_for(lambda: Path(name).exists() and Path(name).read_text())
    return Path(name).read_text()

def all_here():
    Path(f"here-{rank}").touch()
    wait_for(lambda: len(list(Path().glob("here-*"))) == size)
"""


class Launch:
    """One command that runs."""

    def __init__(self, commands: subprocess.Popen[str], folder: Path, words: list[str]) -> None:
        self._commands, self._folder = commands, folder
        assert commands.stdin is not None
        commands.stdin.write(json.dumps([str(folder), *words]) + "\n")
        commands.stdin.flush()
        self.pid, self.ended = int(self._heard()), False

    def _heard(self) -> str:
        """A line of the process that forks; read without a buffer, so that it can be waited for."""
        source, line = self._commands.stdout, ""
        assert source is not None
        while not line.endswith("\n"):
            if not select.select([source], [], [], WITHIN_S)[0]:
                pytest.fail(f"it did not end; so far: {self.out}{self.err}")
            line += os.read(source.fileno(), 1).decode()
        return line

    def ends(self) -> int:
        """Its exit code."""
        code, self.ended = int(self._heard()), True
        return code

    @property
    def out(self) -> str:
        return (self._folder / "stdout").read_bytes().decode(errors="surrogateescape")

    @property
    def err(self) -> str:
        return (self._folder / "stderr").read_bytes().decode(errors="surrogateescape")


Start = Callable[..., Launch]


def environment() -> dict[str, str]:
    """Whatever these tests are run with, a launch is to say itself what it needs."""
    return {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.fixture(scope="module")
def commands() -> Iterator[subprocess.Popen[str]]:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", COMMANDS]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment()) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def start(commands: subprocess.Popen[str], tmp_path: Path) -> Iterator[Start]:
    """Start a launch of a script, given as text."""
    launches: list[Launch] = []

    def started(workers: int, script: str, *arguments: str, options: tuple[str, ...] = ()) -> Launch:
        (tmp_path / "script.py").write_text(HEAD + dedent(script))
        words = ["launch", "-n", str(workers), *options, "script.py", *arguments]
        launches.append(Launch(commands, tmp_path, words))
        return launches[-1]

    yield started
    for launch in launches:  # where a claim has failed
        if not launch.ended:
            os.kill(launch.pid, signal.SIGKILL)
            launch.ends()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"
    except FileNotFoundError:
        return True


def until(what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.01)


# Starting.


def test_workers_have_the_environment_that_torchrun_gives(start: Start, tmp_path: Path) -> None:
    script = 'Path(f"env-{rank}.json").write_text(json.dumps(dict(os.environ)))'
    launch = start(2, script)
    assert launch.ends() == 0
    ours = [json.loads((tmp_path / f"env-{rank}.json").read_text()) for rank in range(2)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "script.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=WITHIN_S, env=environment())
    theirs = [json.loads((tmp_path / f"env-{rank}.json").read_text()) for rank in range(2)]
    differ = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"}
    its_own = {*differ, "TORCHELASTIC_SIGNALS_TO_HANDLE"}
    for rank in range(2):
        given = {name: value for name, value in theirs[rank].items() if environment().get(name) != value}
        assert {"RANK", "LOCAL_RANK", "GROUP_RANK", *differ} <= set(given)
        assert {name: ours[rank].get(name) for name in given.keys() - its_own} == {
            name: value for name, value in given.items() if name not in its_own
        }
        assert ours[rank]["MASTER_ADDR"] == "127.0.0.1"
        assert ours[rank]["OFFBEAT_MIN_WORKERS"] == "1"
    assert ours[0]["TORCHELASTIC_RUN_ID"] == ours[1]["TORCHELASTIC_RUN_ID"] != theirs[0]["TORCHELASTIC_RUN_ID"]


def test_threads_are_one_for_each_of_several_workers_unless_the_user_has_said_more(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    script = tmp_path / "script.py"
    script.write_text('import os; print(os.environ.get("OMP_NUM_THREADS"))')
    seen = []
    for asked, workers in ((None, 1), (None, 2), ("7", 2)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if asked is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert main(["launch", "-n", str(workers), str(script)]) == 0
        out, err = capfd.readouterr()
        seen.append((sorted(out.splitlines()), "set OMP_NUM_THREADS to change that" in err))
    assert seen == [(["[0] None"], False), (["[0] 1", "[1] 1"], True), (["[0] 7", "[1] 7"], False)]


def test_what_stands_behind_the_script_is_the_scripts(start: Start) -> None:
    launch = start(1, "print(sys.argv)", "-n", "7", "--help", "-m", "--", "a b")
    assert launch.ends() == 0
    assert launch.out == "[0] ['script.py', '-n', '7', '--help', '-m', '--', 'a b']\n"


def test_a_module_is_found_where_python_finds_it(commands: subprocess.Popen[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, sys.argv[1:])")
    launch = Launch(commands, tmp_path, ["launch", "-n", "1", "-m", "package.train", "-m", "--x"])
    assert launch.ends() == 0
    assert launch.out == "[0] __main__ ['-m', '--x']\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-n 0 script.py", "-n 0 is too few; use 1 or more"),
        ("-n two script.py", "-n: 'two' is not"),
        ("-n 2 train.py", "there is no file train.py here; name a script, without python before it, or a module after"),
        ("-n 2 python script.py", "there is no file python here; name a script, without python before it"),
        ("-n 2 --grace 30 script.py", "--grace: '30' has no unit; write 30ms or 30s"),
        ("-n 2 --restarts -1 script.py", "--restarts: '-1' is not a number"),
        (
            "-n 2 --resume damaged script.py",
            "no checkpoint in damaged is whole: damaged/checkpoint-1/manifest.json cannot",
        ),
        ("-n 2 --master-port 70000 script.py", "port 70000 is none; use one from 1 to 65535, or 0 for any"),
        ("-n 2", "missing argument 'SCRIPT'"),
        ("script.py", "missing option '-n' / '--workers'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('ran')")
    (tmp_path / "damaged" / "checkpoint-1").mkdir(parents=True)
    assert main(["launch", *words.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert f"offbeat: {sentence}" in err


def test_the_store_has_the_port_that_was_asked_for_and_a_port_that_is_taken_is_refused(
    start: Start, tmp_path: Path, capfd: Captured
) -> None:
    with hold_port() as held:
        port = str(held.getsockname()[1])
        launch = start(1, 'print(os.environ["MASTER_PORT"])', options=("--master-port", port))
        assert launch.ends() == 0
        assert launch.out == f"[0] {port}\n"
        held.listen()
        assert main(["launch", "-n", "1", "--master-port", port, str(tmp_path / "script.py")]) == 2
        assert (
            f"port {port} of 127.0.0.1 cannot be had (Address already in use); choose another" in capfd.readouterr().err
        )


# What workers print.


def test_lines_are_whole_and_say_whose_they_are_whatever_is_in_them(start: Start) -> None:
    launch = start(
        4,
        r"""
        all_here()
        for line in range(40):
            for fd in (1, 2):
                text = b"%d %d " % (rank, line) + b"\xff\xe2\x82" * (30 * line) + b"end\n"
                half = len(text) // 2
                os.write(fd, text[:half])
                os.write(fd, text[half:])
        os.write(1, b"x" * 300_000 + b"\n")
        os.write(1, b"no end")
        """,
    )
    assert launch.ends() == 0
    for text, last in ((launch.out, [300_000 * "x", "no end"]), (launch.err, [])):
        rows = [line.encode(errors="surrogateescape") for line in text.split("\n")]
        assert rows.pop() == b""
        for rank in range(4):
            own = [row.removeprefix(b"[%d] " % rank) for row in rows if row.startswith(b"[%d] " % rank)]
            wanted = [b"%d %d " % (rank, line) + b"\xff\xe2\x82" * (30 * line) + b"end" for line in range(40)]
            assert own == [*wanted, *(one.encode() for one in last)]
        assert len(rows) == 4 * (40 + len(last))


def test_a_progress_bar_is_its_last_state_and_not_a_line_for_each(start: Start) -> None:
    launch = start(
        1,
        r"""
        os.write(2, b"\r0 of 1000\r0 of 1000")
        wait_for(Path("stderr").read_text)  # it is seen while it moves
        for step in range(1001):
            os.write(2, b"\r%d of 1000" % step)
        os.write(2, b"\nwindows\r\n")
        os.write(2, b"\rafter")
        """,
    )
    assert launch.ends() == 0
    assert launch.err.split("\n") == ["[0] 0 of 1000", "[0] 1000 of 1000", "[0] windows", "[0] after", ""]


def test_without_a_prefix_output_is_left_as_it_is(start: Start) -> None:
    launch = start(1, r'os.write(1, b"a\r\xff\0b"); os.write(2, b"open end")', options=("--no-prefix",))
    assert launch.ends() == 0
    assert (launch.out.encode(errors="surrogateescape"), launch.err) == (b"a\r\xff\0b", "open end")


def test_output_is_there_while_the_worker_runs(start: Start, tmp_path: Path) -> None:
    launch = start(1, 'print("begun"); wait_for(Path("go").exists)')
    until(lambda: (tmp_path / "stdout").exists() and launch.out == "[0] begun\n")
    (tmp_path / "go").touch()
    assert launch.ends() == 0


def test_when_the_reader_leaves_workers_meet_what_they_would_without_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("while True: print('line')")
    command = [sys.executable, "-m", "offbeat", "launch", "-n", "2", str(tmp_path / "script.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            _, err = process.communicate(timeout=WITHIN_S)
            assert process.returncode == 1
        finally:
            process.kill()
    assert err.count("BrokenPipeError") >= 2


# Who dies, and who goes on.


def test_the_others_go_on_when_one_is_killed(start: Start) -> None:
    launch = start(
        3,
        """
        all_here()
        if rank == 1:
            Path("dead").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        pid = text_of("dead")
        wait_for(lambda: not Path(f"/proc/{pid}").exists())  # the launcher has seen it
        print("went on")
        """,
    )
    assert launch.ends() == 0
    assert sorted(launch.out.splitlines()) == ["[0] went on", "[2] went on"]
    said, summary = launch.err.splitlines()
    assert re.fullmatch(r"offbeat: rank 1 was killed by SIGKILL after [\d.]+ m?s; the others go on", said)
    assert summary == "offbeat: 2 of 3 workers ended well; rank 1 did not"


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [("exit(3)", "exit(4)", 3), ("os.kill(os.getpid(), 9)", "exit(4)", 137), ("exit(3)", "exit(0)", 0)],
)
def test_the_exit_code_is_that_of_the_first_unless_one_has_ended_well(
    first: str, second: str, code: int, start: Start
) -> None:
    launch = start(
        2,
        f"""
        if rank == 1:
            Path("first").write_text(str(os.getpid()))
            {first}
        pid = text_of("first")
        wait_for(lambda: not Path(f"/proc/{{pid}}").exists())
        {second}
        """,
    )
    assert launch.ends() == code
    assert ("no other is left" in launch.err) == (code != 0)


def test_the_last_words_of_the_dead_come_before_the_news_of_their_death(start: Start) -> None:
    launch = start(
        2,
        """
        import fcntl
        all_here()
        if rank == 0:
            os.kill(os.getppid(), signal.SIGSTOP)  # so that there is more to read at once than it reads at once
            fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 1 << 20)
            Path("dies").write_text(str(os.getpid()))
            raise ValueError("no such layer" * 30_000 + " indeed")
        pid = text_of("dies")
        wait_for(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text())
        os.kill(os.getppid(), signal.SIGCONT)
        """,
    )
    assert launch.ends() == 0
    lines = launch.err.splitlines()
    told = next(i for i, line in enumerate(lines) if line.startswith("offbeat: rank 0 ended with exit code 1 after"))
    assert lines[told - 1].startswith("[0] ValueError: no such layer")
    assert lines[told - 1].endswith("no such layer indeed")


def test_children_of_the_dead_end_with_them_and_what_holds_their_output_holds_up_nobody(
    start: Start, tmp_path: Path
) -> None:
    launch = start(
        2,
        """
        child = os.fork()
        if child == 0:
            if rank == 1:
                os.setsid()
                Path("away").write_text(str(os.getpid()))
            time.sleep(600)
        if rank == 0:
            Path("child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        text_of("away")
        """,
    )
    try:
        assert launch.ends() == 0
        until(lambda: gone(int((tmp_path / "child").read_text())))
    finally:
        os.kill(int((tmp_path / "away").read_text()), signal.SIGKILL)


# Who dies, and is started again.

BEGUN = """
        import torch.distributed as dist
        life = int(os.environ["OFFBEAT_RETURNS"])
        def all_have_attached():
            dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False).set("offbeat/began", "1")
"""


def test_who_dies_is_started_again_as_often_as_was_asked_each_time_after_a_longer_pause(start: Start) -> None:
    launch = start(
        2,
        BEGUN
        + """
        if rank == 1:
            Path(f"life-{life}").write_text(f"{os.getpid()} {time.monotonic()}")
            if life == 0:
                all_have_attached()
            exit(life + 3)
        pid = int(text_of("life-2").split()[0])
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
        at_s = [float(text_of(f"life-{k}").split()[1]) for k in range(3)]
        print(at_s[1] - at_s[0] > 0.2, at_s[2] - at_s[1] > 0.4, flush=True)
        """,
        options=("--restarts", "2"),
    )
    assert launch.ends() == 0
    assert launch.out == "[0] True True\n"
    first, second, last, summary = [
        re.sub(r"after [\d.]+ m?s", "after a while", line) for line in launch.err.splitlines()
    ]
    begins = "offbeat: rank 1 ended with exit code {} after a while; the others go on, and it is "
    assert first == begins.format(3) + "started again in 200 ms"
    assert second == begins.format(4) + "started again in 400 ms"
    assert last == begins.format(5) + "not started again, since it has been 2 times"
    assert summary == "offbeat: 1 of 2 workers ended well; rank 1 did not"


def test_who_ends_well_in_a_later_life_has_ended_well(start: Start) -> None:
    launch = start(
        2,
        BEGUN
        + """
        if rank == 1 and life == 0:
            all_have_attached()
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1:
            Path("back").touch()
        wait_for(Path("back").exists)
        """,
        options=("--restarts", "1"),
    )
    assert launch.ends() == 0
    assert re.fullmatch(
        r"offbeat: rank 1 was killed by SIGKILL .*; the others go on, and .* again in 200 ms\n", launch.err
    )


def test_before_all_have_attached_nobody_is_started_again(start: Start) -> None:
    launch = start(
        2,
        """
        if rank == 1:
            Path("dies").write_text(str(os.getpid()))
            exit(3)
        pid = text_of("dies")
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
        """,
        options=("--restarts", "5"),
    )
    assert launch.ends() == 0
    assert "and it is not started again, since not all workers had attached" in launch.err


def test_where_no_other_lives_nobody_is_started_again_neither_at_once_nor_after_its_pause(
    start: Start, tmp_path: Path
) -> None:
    launch = start(
        2,
        BEGUN
        + """
        Path(f"life-{rank}-{life}").touch()
        if rank == 1:
            all_have_attached()
            os.kill(os.getppid(), signal.SIGSTOP)  # so that it hears of both ends before a pause is over
            Path("dies").write_text(str(os.getpid()))
            exit(3)
        pid = text_of("dies")
        wait_for(lambda: ") Z " in Path(f"/proc/{pid}/stat").read_text())
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(4)
        """,
        options=("--restarts", "5"),
    )
    assert launch.ends() in (3, 4)
    assert sorted(one.name for one in tmp_path.glob("life-*")) == ["life-0-0", "life-1-0"]
    first, second = launch.err.splitlines()
    assert first.endswith("it is started again in 200 ms")
    assert second.endswith("no other is left")


def test_after_ctrl_c_nobody_is_started_again(start: Start) -> None:
    launch = start(
        2,
        BEGUN
        + """
        assert life == 0
        if rank == 1:
            all_have_attached()
            Path("dies").write_text(str(os.getpid()))
            exit(3)
        pid = text_of("dies")
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1.0)
        """,
        options=("--restarts", "5"),
    )
    assert launch.ends() == 130
    assert launch.err.count("started again") == 1


TRAINS = """
    import torch, offbeat as ob
    life = int(os.environ["OFFBEAT_RETURNS"])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = ob.attach(torch.optim.SGD(model.parameters(), lr=0.01), model{arguments})
    print("begins", optimizer.begun_at > 0, flush=True)
"""


def test_a_worker_that_is_killed_in_the_middle_of_training_is_started_again_and_all_end_equal(start: Start) -> None:
    launch = start(
        3,
        TRAINS.format(arguments="")
        + """
    if life:
        Path("back").touch()
    more = 5
    while more:
        more -= Path("back").exists()
        model(torch.ones(1, 4)).sum().backward()
        if (rank, life, optimizer.me.t) == (1, 0, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    print("ends", optimizer.members, [p.tolist() for p in model.parameters()], flush=True)
        """,
        options=("--restarts", "1"),
    )
    assert launch.ends() == 0
    begins = sorted(line for line in launch.out.splitlines() if "begins" in line)
    assert begins == ["[0] begins False", "[1] begins False", "[1] begins True", "[2] begins False"]
    ends = [line.partition("ends ")[2] for line in launch.out.splitlines() if "ends" in line]
    assert len(ends) == 3
    assert len(set(ends)) == 1
    assert ends[0].startswith("(0, 1, 2)")


def test_a_job_is_taken_up_from_its_checkpoints_by_another_number_of_workers(start: Start) -> None:
    script = (
        TRAINS.format(arguments=', checkpoint="saved", every_s=0.05')
        + """
    while not list(Path("saved").glob("checkpoint-*")):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    """
    )
    first = start(3, script, options=("--resume", "saved"))
    assert first.ends() == 0
    assert "offbeat: there is no checkpoint in saved yet; the job begins anew" in first.err
    second = start(2, script, options=("--resume", "saved"))
    assert second.ends() == 0
    assert re.search(r"offbeat: the job is taken up from saved/checkpoint-\d+, of step \d+", second.err)
    assert sorted(second.out.splitlines()[-2:]) == ["[0] begins True", "[1] begins True"]


ON_TWO_HOSTS = (
    TRAINS.format(arguments="")
    + """
    print("rank", rank, "of", size, os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], flush=True)
    for t in range(12):
        model(torch.ones(1, 4)).sum().backward()
        if rank == {dies} and t == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    print("ends", optimizer.members, [p.tolist() for p in model.parameters()], flush=True)
    """
)


@pytest.mark.parametrize("dies", [0, 2])
def test_the_launchers_of_two_hosts_meet_and_the_others_go_on_when_one_of_their_workers_is_killed(
    dies: int, tmp_path: Path
) -> None:
    """Rank 2 is alone on its host, where its host process answers for it from then on; so is rank 0 with its store."""
    with hold_port() as held:
        port = held.getsockname()[1]
    counts = (2, 1) if dies == 2 else (1, 2)
    names = "os.environ['OFFBEAT_HOST'] = os.environ['GROUP_RANK']\n"
    (tmp_path / "script.py").write_text(HEAD + names + dedent(ON_TWO_HOSTS.format(dies=dies)))
    command = [sys.executable, "-c", "import offbeat.cli; offbeat.cli.run()", "launch", "--hosts", "2"]
    both = [
        subprocess.Popen(
            [*command, "-n", str(count), "--job", f"127.0.0.1:{port}", "--host", str(number), "script.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for number, count in enumerate(counts)
    ]
    said = [one.communicate(timeout=WITHIN_S) for one in both]
    out, err = ("".join(one[k] for one in said) for k in (0, 1))
    codes = [one.returncode for one in both]
    where = {line.partition("rank ")[2] for line in out.splitlines() if " of 3 " in line}
    assert where == (
        {"0 of 3 0 0", "1 of 3 1 0", "2 of 3 0 1"} if dies == 2 else {"0 of 3 0 0", "1 of 3 0 1", "2 of 3 1 1"}
    )
    ends = [line.partition("ends ")[2] for line in out.splitlines() if "ends" in line]
    assert len(ends) == 2, err
    assert len(set(ends)) == 1
    assert sorted(codes) == [0, 137]


def test_what_hosts_of_a_job_cannot_be_is_refused(tmp_path: Path, capfd: Captured) -> None:
    (tmp_path / "script.py").write_text("")
    for words, sentence in {
        "--job node0": "--job: 'node0' is no address and port; write node0:29400, say",
        "--job 127.0.0.1:1 --host 2": "--host is 2, and --hosts 2; hosts are numbered from 0 to 1",
        "--job 127.0.0.1:1 --restarts 1": "--restarts is for jobs on one host",
    }.items():
        assert main(["launch", "-n", "1", *words.split(), str(tmp_path / "script.py")]) == 2
        assert sentence in capfd.readouterr().err


# Signals.


def test_ctrl_c_reaches_each_worker_once_and_the_exit_code_is_130(start: Start) -> None:
    launch = start(
        2,
        """
        heard = []
        signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
        all_here()
        if rank == 0:
            os.killpg(os.getppid(), signal.SIGINT)  # as a terminal does
        wait_for(lambda: heard)
        time.sleep(0.2)
        print(len(heard))
        """,
    )
    assert launch.ends() == 130
    assert sorted(launch.out.splitlines()) == ["[0] 1", "[1] 1"]
    assert launch.err.splitlines() == [
        "offbeat: Ctrl-C is passed on; workers have 30 s to end, and one more Ctrl-C kills them at once",
        "offbeat: interrupted",
    ]


def test_who_does_not_end_after_sigterm_is_killed(start: Start) -> None:
    launch = start(
        2,
        """
        signal.signal(signal.SIGTERM, (lambda *_: exit(0)) if rank == 0 else signal.SIG_IGN)
        all_here()
        if rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
        """,
        options=("--grace", "400ms"),
    )
    assert launch.ends() == 143
    said, killed = launch.err.splitlines()
    assert said == "offbeat: SIGTERM is passed on; workers have 400 ms to end, and a Ctrl-C kills them at once"
    assert killed == "offbeat: rank 1 had not ended yet: killed"


def test_a_second_ctrl_c_kills_at_once(start: Start) -> None:
    begun_s = time.monotonic()
    launch = start(
        2,
        """
        signal.signal(signal.SIGINT, lambda *_: Path(f"heard-{rank}").touch())
        all_here()
        if rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
            wait_for(lambda: len(list(Path().glob("heard-*"))) == 2)
            time.sleep(0.5)
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
        """,
        options=("--grace", "1h"),
    )
    assert launch.ends() == 130
    assert time.monotonic() - begun_s < 30


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_signals_that_do_not_end_a_job_are_passed_on(name: str, start: Start) -> None:
    launch = start(
        2,
        f"""
        heard = []
        signal.signal(signal.{name}, lambda number, _: heard.append(number))
        all_here()
        if rank == 0:
            os.kill(os.getppid(), signal.{name})
        wait_for(lambda: heard)
        """,
    )
    assert launch.ends() == 0
    assert launch.err == ""


def test_when_the_launcher_is_killed_no_worker_stays(start: Start, tmp_path: Path) -> None:
    launch = start(2, 'Path(f"pid-{rank}").write_text(str(os.getpid())); all_here(); time.sleep(600)')
    until(lambda: len(list(tmp_path.glob("here-*"))) == 2)
    os.kill(launch.pid, signal.SIGKILL)
    assert launch.ends() == -signal.SIGKILL
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    until(lambda: all(map(gone, pids)))


# Under torch.


def test_the_store_outlives_rank_0_and_listens_on_loopback_alone(start: Start) -> None:
    launch = start(
        3,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        together = torch.ones(1)
        dist.all_reduce(together)
        print("together", int(together), flush=True)
        store = dist.distributed_c10d._get_default_store()
        port = f":{int(os.environ['MASTER_PORT']):04X}"
        if rank == 0:
            rows = [line.split() for net in ("tcp", "tcp6") for line in open(f"/proc/net/{net}")]
            listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(port)]
            store.set("listens", " ".join(listening))
            store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        pid = store.get("pid").decode()
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
        store.set(f"from-{rank}", "hello")
        print(store.get(f"from-{3 - rank}").decode(), store.get("listens").decode() == "0100007F" + port, flush=True)
        os._exit(0)
        """,
    )
    assert launch.ends() == 0
    together = [f"[{rank}] together 3" for rank in range(3)]
    assert sorted(launch.out.splitlines()) == sorted([*together, "[1] hello True", "[2] hello True"])
    assert "rank 0 was killed by SIGKILL" in launch.err
