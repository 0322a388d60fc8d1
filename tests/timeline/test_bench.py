"""`interactive-infer bench --timeline FILE`, and the scripts that docs/timeline.md names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from interactive_infer import cli
from interactive_infer.timeline import Timeline

SCENES = ("ways", "cell", "storm", "paused")


@pytest.mark.slow
def test_it_leaves_a_figure_or_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--timeline", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "busy" in said and "out.png" in said
    assert cli.main(["bench", "--timeline", str(tmp_path / "out.json")]) == 0
    assert Timeline.load(tmp_path / "out.json").summary().tokens >= 8 * 64


@pytest.mark.parametrize("name", ["out.bmp", "out", "nowhere/out.png"])
def test_a_file_that_cannot_be_is_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--timeline"):
        cli.main(["bench", "--timeline", str(tmp_path / name)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [("timeline.py", "What recording costs"), ("timeline_figures.py", "two in flight: CPU device busy")],
)
def test_the_scripts_of_the_docs_run(script: str, said: str, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "benchmarks"
    # Its tables would take the place of measured ones.
    code = (
        "import sys, runpy; from pathlib import Path; sys.path.insert(0, sys.argv.pop(1)); import report; "
        "report.BUILD = Path(sys.argv.pop(1)); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    pictures = tmp_path / "pictures"
    options = ["--quick"] if script == "timeline.py" else ["--folder", str(pictures)]
    command = [sys.executable, "-c", code, str(folder), str(tmp_path / "tables"), str(folder / script)]
    command += ["--device", "cpu", "--shape", "tiny", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    if script == "timeline_figures.py":
        names = {f"timeline-{scene}-{theme}.png" for scene in SCENES for theme in ("light", "dark")}
        assert {picture.name for picture in pictures.iterdir()} == names
