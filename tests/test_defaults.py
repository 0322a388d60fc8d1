from __future__ import annotations

import pytest

from interactive_infer.defaults import Defaults
from interactive_infer.errors import InvalidRequestError


def test_a_change_is_heard_and_what_is_refused_changes_nothing() -> None:
    defaults = Defaults()
    heard: list[float] = []
    defaults.listeners.append(lambda: heard.append(defaults.params.temperature))
    defaults.update(temperature=0.5, top_k=3)
    with pytest.raises(InvalidRequestError, match="temperature=-1"):
        defaults.update(top_k=9, temperature=-1)
    with pytest.raises(InvalidRequestError, match="did you mean"):
        defaults.update(temprature=1)
    assert heard == [0.5]
    assert (defaults.params.temperature, defaults.params.top_k) == (0.5, 3)
