"""Checkpoints on disk: whole or not there, and what is damaged is refused by the name of its file."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from offbeat.live.host import checkpoint
from offbeat.live.host.checkpoint import ModelFile, Saved
from tests.support.saved import packed, tensors

ABOUT = {"step": 7, "method": "eager()", "workers": 3}


def save(folder: Path, seed: int = 0) -> Saved:
    place = checkpoint.write(folder, packed(tensors(seed)), memoryview(b"state" * 100), {**ABOUT, "step": seed})
    return next(one for one in checkpoint.every(folder) if one.place == place)


def test_what_was_written_is_read_by_us_and_by_the_safetensors_library(tmp_path: Path) -> None:
    saved = save(tmp_path)
    ours, theirs = saved.model(), pytest.importorskip("safetensors.torch").load_file(saved.place / checkpoint.MODEL)
    assert ours.keys() == theirs.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(ours[name], tensor)
        assert torch.equal(theirs[name], tensor)
        assert ours[name].dtype == theirs[name].dtype == tensor.dtype


def test_a_kind_of_number_without_a_name_is_refused_by_the_name_of_its_tensor() -> None:
    with pytest.raises(ValueError, match=r"table is torch\.complex64, which safetensors has no name for"):
        ModelFile({"table": torch.zeros(2, dtype=torch.complex64)})


def test_the_mean_of_several_is_that_of_their_numbers_and_counters_stay_the_firsts() -> None:
    models = [packed(tensors(seed)) for seed in range(3)]
    checkpoint.mean(models)
    found = checkpoint._read(models[0])
    for name in ("layer.weight", "wide"):
        wanted = torch.stack([tensors(seed)[name] for seed in range(3)]).mean(0)
        torch.testing.assert_close(found[name], wanted)
    half = torch.stack([tensors(seed)["half"].float() for seed in range(3)]).mean(0)
    assert torch.equal(found["half"], half.bfloat16())
    assert (int(found["counter"]), found["flags"].tolist()) == (12, [True, False, True])


def test_the_last_two_are_kept_and_numbers_go_on(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path, step)
    assert [(one.place.name, one.step) for one in checkpoint.every(tmp_path)] == [
        ("checkpoint-5", 4),
        ("checkpoint-4", 3),
    ]
    found, damaged = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.in_words, damaged) == ("checkpoint-5 of step 4", [])


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "other files"])
def test_where_there_is_none_there_is_none(there: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    if there != "nothing":
        folder.mkdir()
    if there == "other files":
        (folder / "notes.txt").write_text("checkpoint-3")
        (folder / "checkpoint-x").mkdir()
    assert checkpoint.newest(folder) == (None, [])


def change(path: Path, how: str, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "a bit flips":
        at = draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
    elif how == "the end is missing":
        del data[draw.randrange(len(data)) :]
    else:
        data += b"x" * draw.randrange(1, 9)
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["a bit flips", "the end is missing", "there is more"])
@pytest.mark.parametrize("file", [checkpoint.MODEL, checkpoint.STATE, checkpoint.MANIFEST])
def test_a_damaged_one_is_refused_by_the_name_of_its_file_and_the_one_before_is_taken(
    how: str, file: str, tmp_path: Path
) -> None:
    draw = random.Random(f"{how} {file}")
    save(tmp_path, 1)
    last = save(tmp_path, 2)
    path = last.place / file
    whole = path.read_bytes()
    for _ in range(40):
        change(path, how, draw)
        found, damaged = checkpoint.newest(tmp_path)
        assert found is not None
        assert found.step == 1
        assert [str(path) in one.damage for one in damaged] == [True], damaged
        path.write_bytes(whole)
    assert checkpoint.newest(tmp_path)[1] == []


def test_where_all_are_damaged_the_error_names_them_and_the_way_out(tmp_path: Path) -> None:
    for step in (1, 2):
        place = save(tmp_path, step).place
        (place / checkpoint.STATE).unlink()
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* is whole: .*checkpoint-2/state\.pt cannot be read"
    ) as error:
        checkpoint.newest(tmp_path)
    assert "checkpoint-1/state.pt cannot be read" in str(error.value)
    assert "begin without it, or name another folder" in str(error.value)


def writes_until_it_is_killed(folder: Path, step: int, told: int) -> None:
    model, state = packed(tensors()), memoryview(bytes(1 << 20))
    while True:
        step += 1
        checkpoint.write(folder, model, state, {**ABOUT, "step": step})
        os.write(told, f"{step}\n".encode())


def test_a_kill_at_any_moment_leaves_what_was_written_before_whole(tmp_path: Path) -> None:
    draw, step = random.Random(0), 0
    for _ in range(30):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            writes_until_it_is_killed(tmp_path, step, writer)
        os.close(writer)
        with os.fdopen(reader) as told:
            step = int(told.readline())
            time.sleep(draw.uniform(0.0, 0.02))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            step = max([step, *(int(line) for line in told if line.endswith("\n"))])
        found, damaged = checkpoint.newest(tmp_path)
        assert found is not None
        assert found.step >= step  # what was said to be there is there
        assert damaged == []
        step = found.step
    save(tmp_path, 10_000)
    assert not list(tmp_path.glob(f"{checkpoint.UNFINISHED}*"))


def test_where_the_disk_is_full_the_one_before_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    if (pid := os.fork()) == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        try:
            save(tmp_path, 2)
        except OSError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert [one.step for one in checkpoint.every(tmp_path)] == [1]
    assert [one.name for one in tmp_path.iterdir()] == ["checkpoint-1"]
