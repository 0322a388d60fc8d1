"""What every test shares, and the rule that a test which was not run is a failure.

A skip is expected only of a test marked `gpu` on a machine without CUDA, and outside CI of one marked `browser`
where there is no Chromium. With --no-unexpected-skips, or with CI in the environment, any other skip or expected
failure fails the session.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Before torch is imported: the tests' models are so small that a second thread only costs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test needs a network or writes into the user's cache; a second run finds the converted default model.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("INTERACTIVE_INFER_CACHE", str(ROOT / "build" / "test-cache"))
os.environ.setdefault("MPLBACKEND", "agg")

# ------------------------------------------------------------------------------- skips that nobody expected


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-unexpected-skips",
        action="store_true",
        help="fail when a test was skipped or expected to fail that could have been run here",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--no-unexpected-skips") or os.environ.get("CI"):
        config.pluginmanager.register(UnexpectedSkips(), "unexpected-skips")


@cache
def has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def lacks_its_device(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None and not has_cuda()


def may_be_skipped(item: pytest.Item) -> bool:
    return lacks_its_device(item) or (item.get_closest_marker("browser") is not None and not os.environ.get("CI"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if lacks_its_device(item):
        pytest.skip("needs a CUDA device")


class UnexpectedSkips:
    """Counts what was not run, and fails the session for it."""

    def __init__(self) -> None:
        self.not_run: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.skipped and not may_be_skipped(item):  # an expected failure counts as skipped too
            self.not_run.append(item.nodeid)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole module, by importorskip or allow_module_level
            self.not_run.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.not_run and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.not_run:
            terminalreporter.section("skipped without leave", red=True)
            for node in self.not_run:
                terminalreporter.line(node)
