"""The rule in conftest.py: what was not run fails the session, but for `gpu` without CUDA and `browser` without one."""

from __future__ import annotations

from pathlib import Path

import pytest

RULE = Path(__file__).with_name("conftest.py").read_text()


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CI", raising=False)
    pytester.makeconftest(RULE + "\nhas_cuda = lambda: False\n")
    pytester.makeini("[pytest]\nmarkers =\n gpu\n browser\nasyncio_default_fixture_loop_scope = function")
    return pytester


NOT_RUN = {
    "skip": "import pytest\ndef test(): pytest.skip('why')",
    "mark": "import pytest\n@pytest.mark.skip\ndef test(): pass",
    "skipif": "import pytest\n@pytest.mark.skipif(True, reason='why')\ndef test(): pass",
    "fixture": "import pytest\n@pytest.fixture\ndef f(): pytest.skip('why')\ndef test(f): pass",
    "xfail": "import pytest\n@pytest.mark.xfail\ndef test(): assert False",
    "module": "import pytest\npytest.importorskip('no_such_module')\ndef test(): pass",
}


@pytest.mark.parametrize("kind", NOT_RUN)
def test_what_was_not_run_fails_the_session(session: pytest.Pytester, kind: str) -> None:
    session.makepyfile(test_ran="def test(): pass", test_other=NOT_RUN[kind])
    result = session.runpytest_inprocess("--no-unexpected-skips")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*skipped without leave*", "test_other.py*"])


def test_ci_turns_the_rule_on(session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    session.makepyfile(test_ran="def test(): pass", test_other=NOT_RUN["skip"])
    assert session.runpytest_inprocess().ret == pytest.ExitCode.OK
    monkeypatch.setenv("CI", "true")
    assert session.runpytest_inprocess().ret == pytest.ExitCode.TESTS_FAILED


def test_a_gpu_test_without_cuda_may_be_skipped(session: pytest.Pytester) -> None:
    session.makepyfile(
        test_ran="def test(): pass", test_gpu="import pytest\n@pytest.mark.gpu\ndef test(): assert False"
    )
    result = session.runpytest_inprocess("--no-unexpected-skips")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.OK


def test_a_browser_test_may_be_skipped_but_not_in_ci(session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    session.makepyfile("import pytest\n@pytest.mark.browser\ndef test(): pytest.skip('no Chromium')")
    assert session.runpytest_inprocess("--no-unexpected-skips").ret == pytest.ExitCode.OK
    monkeypatch.setenv("CI", "true")
    assert session.runpytest_inprocess().ret == pytest.ExitCode.TESTS_FAILED


def test_a_failure_stays_a_failure(session: pytest.Pytester) -> None:
    session.makepyfile(test_fails="def test(): assert False", test_other=NOT_RUN["skip"])
    assert session.runpytest_inprocess("--no-unexpected-skips").ret == pytest.ExitCode.TESTS_FAILED
