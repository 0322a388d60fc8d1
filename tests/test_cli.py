"""The command line: what the demo leaves, what doctor says, and what is said outside a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import interactive_infer
from interactive_infer import cli


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
