"""`interactive-infer bench --timeline FILE`."""

from __future__ import annotations

from pathlib import Path

import pytest

from interactive_infer import cli
from interactive_infer.timeline import Timeline


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
