"""Errors on their way between processes and readers."""

from __future__ import annotations

import pickle

import pytest

from interactive_infer.errors import InvalidRequestError, PromptTooLongError, twin


@pytest.mark.parametrize("kind", [InvalidRequestError, PromptTooLongError])
def test_a_wrong_argument_can_be_pickled(kind: type[InvalidRequestError]) -> None:
    error = kind("n", 0, "must be 1 or more")
    for again in (pickle.loads(pickle.dumps(error)), twin(error)):
        assert type(again) is kind
        assert str(again) == str(error) == "n=0: must be 1 or more"
        assert (again.argument, again.value) == ("n", 0)
