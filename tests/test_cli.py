"""The command line: what the demo prints and leaves, what doctor says, and what is said outside a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

import interactive_infer
from interactive_infer import cli


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def custom(comm: str, start: int, text: str) -> dict[str, Any]:
    data = {"method": "custom", "content": {"start": start, "text": text, "status": ""}}
    return {"header": {"msg_type": "comm_msg"}, "content": {"comm_id": comm, "data": data}}


def synced(comm: str, text: str) -> dict[str, Any]:
    data = {"method": "update", "state": {"text": text}}
    return {"header": {"msg_type": "comm_msg"}, "content": {"comm_id": comm, "data": data}}


def display(kind: str, display_id: str, **data: Any) -> dict[str, Any]:
    bundle = {name.replace("_", "/", 1): value for name, value in data.items()}
    content = {"data": bundle, "transient": {"display_id": display_id}}
    return {"header": {"msg_type": kind}, "content": content}


def printed(text: str) -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": text}}


class TestStreamPrinter:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def printer(self, clock: Clock) -> cli._StreamPrinter:
        return cli._StreamPrinter(clock)

    def test_only_what_is_new(self, printer: cli._StreamPrinter, capsys: pytest.CaptureFixture[str]) -> None:
        for message in (custom("a", 0, "Once"), custom("a", 4, " upon"), synced("a", "Once upon a")):
            printer.hear(message)
        printer.hear(synced("a", "Once upon a"))
        printer.hear(synced("a", "Once"))  # stale
        printer.hear(custom("a", 90, "lost"))  # a message before it was lost; the next whole text heals it
        printer.hear(synced("a", "Once upon a time"))
        assert capsys.readouterr().out == "Once upon a time"

    def test_streams_take_turns(
        self, printer: cli._StreamPrinter, clock: Clock, capsys: pytest.CaptureFixture[str]
    ) -> None:
        printer.hear(custom("a", 0, "a1 "))
        printer.hear(custom("b", 0, "b1 "))
        printer.hear(custom("a", 3, "a2 "))
        assert capsys.readouterr().out == "a1 a2 "
        printer.hear(custom("b", 3, "b" * 60))
        assert capsys.readouterr().out == "\nb1 " + "b" * 60
        clock.now = 1.0
        printer.hear(custom("a", 6, "a3"))
        assert capsys.readouterr().out == "\na3"
        printer.hear(custom("b", 63, "end"))
        printer.flush()
        assert capsys.readouterr().out == "\nend"

    def test_print_is_at_once(self, printer: cli._StreamPrinter, capsys: pytest.CaptureFixture[str]) -> None:
        printer.hear(custom("a", 0, "a"))
        printer.hear(printed("said\n"))
        assert capsys.readouterr().out == "a\nsaid\n"

    def test_a_display_and_the_widget_it_shows_are_one_stream(
        self, printer: cli._StreamPrinter, capsys: pytest.CaptureFixture[str]
    ) -> None:
        view = display("display_data", "d", text_plain="TokenView()")
        view["content"]["data"]["application/vnd.jupyter.widget-view+json"] = {"model_id": "a"}
        printer.hear(view)
        printer.hear(custom("a", 0, "Once"))
        printer.hear(display("update_display_data", "d", text_plain="Once upon"))
        assert capsys.readouterr().out == "Once upon"
        assert printer.last == {"d": {"text/plain": "Once upon"}}

    def test_model_text_cannot_steer_the_terminal(
        self, printer: cli._StreamPrinter, capsys: pytest.CaptureFixture[str]
    ) -> None:
        printer.hear(custom("a", 0, "\x1b[2Jline\n\t日本 🙂\x07\x9b\u202e"))
        assert capsys.readouterr().out == "\\x1b[2Jline\n\t日本 🙂\\x07\\x9b\\u202e"


def test_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "interactive_infer.cli", "--help"], capture_output=True, text=True)
    assert ran.returncode == 0
    assert "doctor" in ran.stdout


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_outside_a_checkout(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
    with pytest.raises(SystemExit, match="source checkout"):
        cli.main([command])


@pytest.mark.parametrize("full", [False, True])
def test_bench_is_quick_unless_asked(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name in cli._BENCHMARKS:
        (tmp_path / "benchmarks" / name).write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
    assert cli.main(["bench", *(["--full"] if full else [])]) == 0
    said = capfd.readouterr().out
    assert said.count("[]" if full else "['--quick'") == len(cli._BENCHMARKS)
    assert said.count("about") == len(cli._BENCHMARKS)


def test_bench_passes_a_failure_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name in cli._BENCHMARKS:
        (tmp_path / "benchmarks" / name).write_text("raise SystemExit(3)")
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
    assert cli.main(["bench"]) == 3


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in (interactive_infer.__version__, "torch", "transformers", "default model", "cache", "dtype='auto'"):
        assert word in said


@pytest.mark.notebook
def test_demo_reports_a_failing_cell_and_keeps_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pieces = "import time\nfor word in ('so', ' far', chr(10)): print(word, end='', flush=True); time.sleep(0.3)"
    cells = [nbformat.v4.new_code_cell(pieces), nbformat.v4.new_code_cell("raise ValueError('so bad')")]
    (tmp_path / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / cli._NOTEBOOK)
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
    assert cli.main(["demo", "--output", str(tmp_path / "out")]) == 1
    out, err = capfd.readouterr()
    assert "so far" in out
    assert "so bad" in err
    assert "WARNING" not in err
    executed = nbformat.read(tmp_path / "out" / "01_quickstart.ipynb", as_version=4)
    assert [output.text for output in executed.cells[0].outputs] == ["so far\n"]


@pytest.mark.notebook
@pytest.mark.slow
def test_demo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--output", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    executed = nbformat.read(tmp_path / "01_quickstart.ipynb", as_version=4)
    generate = next(cell for cell in executed.cells if cell.id == "generate")
    story = generate.outputs[-1].data["text/plain"]
    assert len(story) > 100, "the saved notebook holds the final text of a stream that outlived its cell"
    assert story.strip()[:20] in out
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "lighthouse" in (tmp_path / "01_quickstart.html").read_text()
    (loaded,) = (output for output in executed.cells[1].outputs if output.output_type == "display_data")
    assert loaded.data["text/plain"].startswith("loaded in ") and "text/html" not in loaded.data
