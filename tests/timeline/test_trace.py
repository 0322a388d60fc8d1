"""Files: where a trace is written, and what is no trace."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from interactive_infer.errors import InvalidRequestError
from interactive_infer.timeline import Timeline

NO_PATHS = [None, 1, b"trace.json", "", "a\0b", [], 1.5]


@pytest.mark.parametrize("path", NO_PATHS)
def test_what_is_no_path(made: Timeline, path: Any) -> None:
    for call in (made.save, Timeline.load):
        with pytest.raises(InvalidRequestError, match="path"):
            call(path)


def test_a_link_stays_a_link_and_the_file_behind_it_is_replaced(made: Timeline, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link, target = tmp_path / "link.json", folder / "target.json"
    link.symlink_to(target)
    for _ in range(2):  # behind it is no file yet, then one
        made.save(link)
        assert link.is_symlink() and Timeline.load(target).recording() == made.recording()
    assert [each.name for each in folder.iterdir()] == ["target.json"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_no_file_is_written_to(made: Timeline, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    made.save(pipe)
    reader.join(60)
    assert pipe.is_fifo() and json.loads(read[0])["otherData"]["device"] == made.device


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_device_stays_one(made: Timeline, tmp_path: Path) -> None:
    link = tmp_path / "full"
    link.symlink_to("/dev/full")
    with pytest.raises(OSError, match="full") as caught:
        made.save(link)
    assert caught.value.filename == str(link)
    assert Path("/dev/full").is_char_device() and link.is_symlink()


def test_errors_name_the_path_that_was_given(made: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "no folder" / "t.json"
    with pytest.raises(FileNotFoundError) as missing:
        made.save(path)
    with pytest.raises(IsADirectoryError) as folder:
        made.save(str(tmp_path))
    assert (missing.value.filename, folder.value.filename) == (str(path), str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    made.save(tmp_path / ("n" * 250))  # the longest name that there is, nearly


def refused(path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="path") as caught:
        Timeline.load(path)
    assert caught.value.value == str(path)


def test_json_that_nests_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[" * 100_000)
    refused(tmp_path / "t.json")


def test_any_byte_of_a_gzipped_trace_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    whole = gzip.compress(b'{"traceEvents": []}' * 100)
    for at in range(len(whole)):
        path.write_bytes(bytes([*whole[:at], whole[at] ^ 0xFF, *whole[at + 1 :]]))
        refused(path)


def kernel(ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "args": {"device": 0}}


@pytest.mark.parametrize("event", [kernel(5, -1), kernel(5e15, 1), kernel(-5e15, 1), kernel(5, float("inf"))])
def test_times_that_cannot_be(event: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [kernel(1, 1), event]}))
    refused(tmp_path / "t.json")


@pytest.mark.parametrize("category", ["host", "device"])
def test_a_saved_trace_in_which_something_ends_before_it_starts(made: Timeline, category: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    made.save(path)
    data = json.loads(path.read_text())
    next(event for event in data["traceEvents"] if event.get("cat") == category)["dur"] = -0.001
    path.write_text(json.dumps(data))
    refused(path)


def test_a_step_whose_tokens_do_not_fit_its_generations(made: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    made.save(path)
    data = json.loads(path.read_text())
    next(event for event in data["traceEvents"] if event.get("cat") == "device")["args"]["drawn"] = [1]
    path.write_text(json.dumps(data))
    refused(path)
