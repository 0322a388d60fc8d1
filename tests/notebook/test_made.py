from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from interactive_infer.errors import MissingPackageError
from interactive_infer.notebook import made
from interactive_infer.notebook.follower import Follower
from interactive_infer.notebook.widgets.token_view import TokenView
from tests.notebook.fakes import Writer


@pytest.mark.parametrize("package", ["anywidget", "traitlets"])
@pytest.mark.parametrize("make", [made.controls, made.monitor, made.playground])
def test_without_its_packages_a_widget_says_how_to_get_them(
    make: Any, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("interactive_infer.notebook.widgets.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}, which is not installed.*\[notebook\]"):
        make(None)


def test_the_output_holds_no_widget_but_in_colab(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(["a"])
    writer.write()
    writer.finish()
    view = TokenView(writer.generation)
    assert set(view.bundle()) == {"text/plain", "text/html"}
    assert view.mark in view.bundle()["text/html"]
    monkeypatch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    assert "application/vnd.jupyter.widget-view+json" in view.bundle()


def test_old_views_of_ended_texts_are_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interactive_infer.notebook.widgets.token_view._FINISHED_KEPT", 3)
    TokenView._finished.clear()
    views, generations = [], []
    for _ in range(5):
        writer = Writer(["a"])
        writer.write()
        writer.finish()
        generations.append(writer.generation)
        views.append(TokenView(writer.generation))
        views[-1].stream.start()
    assert [bool(view.retired) for view in views] == [True, True, False, False, False]
    assert all(view.comm is not None for view in views), "an Output would lose what a closed one shows"
    assert not [one for gen in generations for one in gen._output.listeners if isinstance(one, Follower)]


def test_a_view_that_was_continued_is_not_retired_until_it_has_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interactive_infer.notebook.widgets.token_view._FINISHED_KEPT", 2)
    monkeypatch.setattr(TokenView, "renew", lambda view: None)
    TokenView._finished.clear()

    def ended() -> TokenView:
        writer = Writer(["a"])
        view = TokenView(writer.generation)
        view.stream.start()
        writer.write()
        writer.finish()
        return view

    after = Writer(["a", "b"])
    after.write()
    view = ended()
    monkeypatch.setattr(view.stream.generation, "continue_", lambda: after.generation, raising=False)
    view.hear({"do": "continue"})
    others = [ended() for _ in range(3)]
    assert not view.retired and [bool(other.retired) for other in others] == [True, False, False]
    after.write()
    after.finish()
    assert not view.retired and others[1].retired
    ended(), ended()
    assert view.retired
