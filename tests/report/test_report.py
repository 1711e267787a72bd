"""The report: folders of runs, the page in a real browser, the timeline for specialists."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import offbeat as ob
from offbeat.cli import main
from offbeat.report import folder, page, timeline
from offbeat.runs.foreign import ForeignWait
from offbeat.runs.trace import DOINGS

Captured = pytest.CaptureFixture[str]
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def run(line: str) -> int:
    return main(shlex.split(line))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "made"
    options = f"--workers 4 --steps 24 --delay 'rank 2 100ms' --report {place} --trace {place.parent}/trace.json"
    assert run(f"compare allreduce adaptive:period=2 eager --seed 5 {options}") == 0
    return place


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def test_a_folder_is_read_as_it_was_written(made: Path) -> None:
    story = folder.read(made)
    assert [r.record.label for r in story.recordings] == ["allreduce", "adaptive period=2", "eager"]
    assert story.command.startswith("offbeat compare allreduce adaptive:period=2 eager --seed 5")
    assert story.versions["offbeat"] == ob.__version__
    assert not story.notes
    task, late = ob.tasks.digits(), ob.delays.chronic(2, 0.1)
    twin = ob.simulate(ob.eager(), task, 4, samples=4 * 24, seed=5, delays=late, spans=True)
    seen = story.recordings[2].trace
    assert [s[:3] for s in seen.spans] == [s[:3] for s in twin.trace.spans]
    assert [s.end_s for s in seen.spans] == pytest.approx([s.end_s for s in twin.trace.spans], abs=1e-6)
    assert [(r.version, r.fresh, dict(r.staleness)) for r in seen.rounds] == [
        (r.version, r.fresh, dict(r.staleness)) for r in twin.trace.rounds
    ]
    assert seen.series["loss"][-1].value == pytest.approx(twin.losses[-1].item())
    assert seen.series["loss"][-1].samples == 4 * 24 * 32


def test_a_folder_of_before_which_calls_a_method_a_strategy_is_read(made: Path, copy: Path) -> None:
    for file in copy.glob("*.json*"):
        text = file.read_text()
        assert '"method":' in text
        file.write_text(text.replace('"method":', '"strategy":'))
    assert [one.record for one in folder.read(copy).recordings] == [one.record for one in folder.read(made).recordings]


def test_report_says_which_worker_is_slow_and_writes_the_page(copy: Path, capsys: Captured) -> None:
    (copy / "report.html").unlink()
    assert run(f"report {copy}") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Rank 2 is chronically slow (late in 24 of 24 steps, by 100 ms each)" in shown
    text = (copy / "report.html").read_text()
    assert "Rank 2 is chronically slow" in text
    assert html.escape("--delay 'rank 2 100ms'") in text
    outside = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=", text.replace(_library(text), ""))
    assert outside == []


def test_waiting_in_collectives_of_others_is_kept_and_told_on_the_page_and_in_words(
    made: Path, tmp_path: Path, capsys: Captured
) -> None:
    story = folder.read(made)
    first, *rest = story.recordings
    where = "somewhere/pytorch/loops/training_epoch_loop.py:265"
    foreign = (ForeignWait(where, "broadcast", 4 * 24, 4 * 24, sum(first.wait_s)),)
    record = replace(first.record, foreign=foreign)
    folder.write(tmp_path / "kept", replace(story, recordings=[replace(first, record=record), *rest]))
    assert folder.read(tmp_path / "kept").recordings[0].record.foreign == foreign
    assert run(f"report {tmp_path}/kept") == 0
    said = "went into somewhere/…/training_epoch_loop.py:265 (broadcast, every step)."
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in (tmp_path / "kept" / "report.html").read_text()


def test_which_way_vectors_went_is_kept_and_told_on_the_page(made: Path, tmp_path: Path) -> None:
    story = folder.read(made)
    simulated, shared, both = story.recordings
    recordings = [
        simulated,
        replace(shared, record=replace(shared.record, carriers=("shm",))),
        replace(both, record=replace(both.record, carriers=("gloo", "shm"))),
    ]
    folder.write(tmp_path / "kept", replace(story, recordings=recordings))
    assert [r.record.carriers for r in folder.read(tmp_path / "kept").recordings] == [(), ("shm",), ("gloo", "shm")]
    assert run(f"report {tmp_path}/kept") == 0
    told = re.findall(r"vectors went through [a-z ]+", (tmp_path / "kept" / "report.html").read_text())
    assert told == ["vectors went through shm", "vectors went through gloo and shm"]


def test_how_workers_talked_is_kept_and_told_on_the_page_and_in_words(tmp_path: Path, capsys: Captured) -> None:
    line = "simulate self_clocked --task none --workers 4 --steps 20 --fixed-shares --delay 'rank 2 100ms'"
    assert run(f"{line} --report {tmp_path}/kept --json {tmp_path}/run.json") == 0
    capsys.readouterr()
    (kept,) = folder.read(tmp_path / "kept").recordings
    assert [one.exchanges for one in kept.record.talking] == [20] * 4
    assert json.loads((tmp_path / "run.json").read_text())["runs"][0]["talking"][0]["exchanges"] == 20
    assert run(f"report {tmp_path}/kept") == 0
    words, page = " ".join(capsys.readouterr().out.split()), (tmp_path / "kept/report.html").read_text()
    for said in ("They talked 80 times, once in 1.0 steps", "100% of it for rank 2."):
        assert said in words
        assert said in page


def test_who_was_done_before_the_job_is_told_and_drawn_until_its_end(tmp_path: Path, capsys: Captured) -> None:
    line = f"simulate eager --task none --workers 4 --steps 60 --delay 'rank 3 300ms' --trace {tmp_path}/trace.json"
    assert run(f"{line} --report {tmp_path}/shared") == 0
    assert run(f"{line} --report {tmp_path}/fixed --fixed-shares") == 0
    capsys.readouterr()
    shared, fixed = (folder.read(tmp_path / name).recordings for name in ("shared", "fixed"))
    ends_s = fixed[0].finished_s
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [(e["tid"] - 1, e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "done"]
    for rank, start_us, end_us in drawn:
        assert (start_us, end_us) == pytest.approx((1e6 * ends_s[rank], 1e6 * ends_s[3]), abs=1)
    assert [rank for rank, *_ in drawn] == [0, 1, 2]
    (lane,) = timeline.lanes(fixed)
    doing: Any = lane["doing"]
    assert doing.count(len(DOINGS)) == 3
    idle_s = sum(ends_s[3] - one_s for one_s in ends_s)
    said = f"3 of 4 workers were done before the job was, and idle for {idle_s:.3g} s together, "
    assert said in " ".join(page.words(fixed[0]))
    assert said in (tmp_path / "fixed" / "report.html").read_text()
    assert "done before the job" not in " ".join(page.words(shared[0]))


def test_the_page_of_4_workers_and_2000_steps_stays_under_10_MB(tmp_path: Path) -> None:
    place = tmp_path / "long"
    assert run(f"simulate allreduce --task none --workers 4 --steps 2000 --delay '1 rank 50ms' --report {place}") == 0
    assert (place / "report.html").stat().st_size < 10e6
    assert len(folder.read(place).recordings[0].trace.spans) > 4 * 2000


def test_what_a_damaged_folder_still_holds_is_shown(copy: Path, capsys: Captured) -> None:
    trace = copy / "01-allreduce.jsonl"
    trace.write_bytes(trace.read_bytes()[:3001])
    (copy / "02-adaptive-period-2.jsonl").write_text("")
    (copy / "run.json").write_text((copy / "run.json").read_text()[:100])
    assert run(f"report {copy}") == 0
    out, err = capsys.readouterr()
    assert "allreduce" in out
    assert "eager" in out
    assert "run.json cannot be read" in err
    assert "The trace 01-allreduce.jsonl is cut off; what was written before is shown." in err
    assert "The trace 02-adaptive-period-2.jsonl is empty." in err
    assert "is cut off" in (copy / "report.html").read_text()


def test_without_traces_the_table_is_shown(copy: Path, capsys: Captured) -> None:
    for trace in copy.glob("*.jsonl"):
        trace.unlink()
    assert run(f"report {copy}") == 0
    out, err = capsys.readouterr()
    assert "adaptive period=2" in out
    assert "The trace 03-eager.jsonl is missing." in err


def test_a_folder_without_a_run_gets_a_sentence(tmp_path: Path, copy: Path, capsys: Captured) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text('["not", "a run"]')
    (tmp_path / "file").write_text("")
    about = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**about, "format": 99, "offbeat": "7.0"}))
    for name, sentence in {
        "nowhere": "there is no folder",
        "file": "is a file; name the folder that --report made",
        "empty": "holds no run: neither run.json nor traces can be used",
        "broken": "holds no run: neither run.json nor traces can be used",
        "copy": "has format 99, written by offbeat 7.0",
    }.items():
        assert run(f"report {tmp_path / name}") == 2
        err = capsys.readouterr().err
        assert sentence in err
        assert len(err.splitlines()) == 1


def test_a_folder_with_other_things_is_not_written_over(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "thesis.txt").write_text("three years of work")
    assert run(f"simulate allreduce --steps 1 --report {tmp_path}") == 2
    assert f"--report {tmp_path} holds other things; name a new folder" in capsys.readouterr().err


def test_the_trace_file_obeys_the_rules_of_its_format(made: Path) -> None:
    trace = json.loads((made.parent / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "s", "t", "f"}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named[1, 4] == "rank 3"
    flows: dict[int, list[str]] = {}
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        if event["ph"] == "X":
            lane = event["pid"], event["tid"]
            assert lane in named
            assert event["dur"] > 0
            assert event["ts"] >= ends.get(lane, 0.0) - 0.2  # slices of a thread nest or follow, never overlap
            ends[lane] = event["ts"] + event["dur"]
        elif event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event["ph"])
    assert all(phases == ["s", *"t" * (len(phases) - 2), "f"] for phases in flows.values())
    spans = folder.read(made).recordings[0].trace.spans
    seen = Counter(e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1)
    assert seen == Counter(span.doing for span in spans)


LOOK = """<script>
const drawn = (chart) => [...chart.querySelectorAll(".scatterlayer .js-line, .barlayer .point path")]
  .filter((mark) => { const box = mark.getBoundingClientRect(); return box.width + box.height > 3; }).length;
addEventListener("load", () => setTimeout(() => {
  const drag = document.querySelector("#timeline .nsewdrag"), box = drag.getBoundingClientRect();
  const bars = [...document.querySelectorAll("#timeline .bars .point path")].map((bar) => bar.getBoundingClientRect());
  const bar = bars.filter((b) => b.width > 3).sort((a, b) => a.left - b.left)[0];
  const at = { clientX: bar.left + bar.width / 2, clientY: bar.top + bar.height / 4, bubbles: true };
  for (const kind of ["mouseover", "mousemove"]) drag.dispatchEvent(new MouseEvent(kind, at));
  setTimeout(() => {
    const seen = { errors: window.seenErrors, bars: bars.length,
      lanes: [...document.querySelectorAll("#timeline .ytick text")].map((tick) => tick.textContent),
      hover: [...document.querySelectorAll("#timeline .hovertext")].map((label) => label.textContent),
      charts: Object.fromEntries([...document.querySelectorAll(".chart")].map((chart) => [chart.id, drawn(chart)])),
      wide: document.documentElement.scrollWidth };
    document.body.innerHTML = "<pre id=seen></pre>";
    document.getElementById("seen").textContent = JSON.stringify(seen);
  }, 500);
}, 300));</script>"""
CATCH = """<script>window.seenErrors = [];
addEventListener("error", (event) => seenErrors.push(event.message));
addEventListener("unhandledrejection", (event) => seenErrors.push(String(event.reason)));
for (const kind of ["error", "warn"]) console[kind] = (...words) => seenErrors.push(words.join(" "));</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_browser_the_lanes_are_there_and_hovering_tells_the_details(made: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = (made / "report.html").read_text()
    page.write_text(text.replace("<head>", f"<head>{CATCH}", 1).replace("</body>\n</html>", f"{LOOK}</body>\n</html>"))
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1200,900",
        "--virtual-time-budget=8000",
    ]
    words = [str(BROWSER), *options, f"--user-data-dir={tmp_path}/profile", "--dump-dom", page.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["errors"] == []
    assert sorted(seen["lanes"]) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert seen["bars"] > 100
    assert re.match(r"rank \d, step \d+(compute|late|wait)", seen["hover"][0])
    marks = seen["charts"]
    assert {"loss-time": 3, "loss-samples": 3, "period": 1, "wire": 3}.items() <= marks.items()
    assert marks.keys() - {"loss-time", "loss-samples", "period", "wire"} == {"spread", "waiting", "staleness"}
    assert all(marks.values()), marks
    assert seen["wide"] <= 1200


def _library(text: str) -> str:
    """The scripts of the page, in which addresses are only words."""
    return max(re.findall(r"<script>(.*?)</script>", text, re.DOTALL), key=len)
