"""What callbacks of our widgets print and raise: caught, and shown in the widget."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from interactive_infer.notebook.widgets.panel import Message, Panel
from interactive_infer.notebook.widgets.prints import KEPT, prints_caught, step_by_step
from tests.notebook.widgets.conftest import Wire

HOSTILE = "<script>window.ran = 1</script>\x1b[31m\u202e\0"


def test_what_is_printed_in_the_block_is_told_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    before = sys.stdout, sys.stderr
    with prints_caught(told.append):
        print("one", end=" ", flush=True)
        print("two", file=sys.stderr)
        assert told == []
    assert told == ["one two\n"]
    assert (sys.stdout, sys.stderr) == before and capsys.readouterr() == ("", "")
    with prints_caught(told.append):
        pass
    assert len(told) == 1, "nothing was printed"


def test_it_is_told_also_when_the_block_raises(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with pytest.raises(ZeroDivisionError), prints_caught(told.append):
        print("before")
        raise ZeroDivisionError
    print("after")
    assert told == ["before\n"] and capsys.readouterr().out == "after\n"


def test_other_threads_print_where_they_always_do(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with prints_caught(told.append):
        thread = threading.Thread(target=print, args=("of a thread",))
        thread.start()
        thread.join()
    assert told == [] and capsys.readouterr().out == "of a thread\n"


def test_the_last_of_very_much_is_kept() -> None:
    told: list[str] = []
    with prints_caught(told.append):
        for number in range(3 * KEPT):
            print(number)
        print("x" * 1_000_000)
        print("end")
    assert len(told[0]) == KEPT and told[0].endswith("xxx\nend\n")


def test_two_threads_that_end_in_the_order_they_began_leave_the_streams_as_they_were() -> None:
    before = sys.stdout
    told: list[str] = []
    first, second = prints_caught(told.append), prints_caught(told.append)
    first.__enter__()
    second.__enter__()
    print("of the second")
    first.__exit__(None, None, None)
    print("of the second still")
    second.__exit__(None, None, None)
    assert sys.stdout is before and told == ["of the second\nof the second still\n"]


async def test_a_coroutine_in_steps_is_cancelled_as_it_would_be() -> None:
    seen: list[Any] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0)
            seen.append("waits")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    async def whole() -> None:
        await step_by_step(work(), nullcontext)

    task = asyncio.create_task(whole())
    while not seen:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["waits", "cancelled", "cleaned up"]


# -- in a widget -------------------------------------------------------------------------------------------------------


class Loud(Panel):
    """Prints what it hears."""

    def hear(self, message: Message) -> None:
        print(message["say"], end="")
        if "raise" in message:
            raise ValueError(message["raise"])

    def static(self) -> tuple[str, str]:
        return "", ""

    async def work(self) -> None:
        print("begins")
        await asyncio.sleep(0.01)
        print("ends")


async def test_prints_and_errors_of_callbacks_are_shown(
    wire: Callable[[Panel], Wire], capsys: pytest.CaptureFixture[str]
) -> None:
    page = wire(panel := Loud(asyncio.get_running_loop()))
    page.say(say=HOSTILE)
    await page.until(lambda: panel.printed)
    assert panel.printed == HOSTILE
    page.say(say="\ud83d", **{"raise": HOSTILE})
    await page.until(lambda: page.of("error"))
    assert panel.printed == HOSTILE + "\ufffd"
    assert page.of("error") == [{"error": f"ValueError: {HOSTILE}"}]
    page.say(dismiss=True)
    await page.until(lambda: not panel.printed)
    for _ in range(3):
        page.say(say="y" * 3_000, **{"raise": "z" * 1_000_000})
    await page.until(lambda: len(page.of("error")) == 4)
    assert panel.printed == "…" + "y" * KEPT
    assert all(len(message["error"]) <= 2_000 for message in page.of("error"))
    assert capsys.readouterr().out == ""


async def test_a_task_of_a_widget_prints_into_it_and_nobody_else_does(
    wire: Callable[[Panel], Wire], capsys: pytest.CaptureFixture[str]
) -> None:
    page = wire(panel := Loud(asyncio.get_running_loop()))
    panel.spawn(panel.work())
    await page.until(lambda: panel.printed)
    print("of somebody else")
    await page.until(lambda: "ends" in panel.printed)
    assert panel.printed == "begins\nends\n"
    assert capsys.readouterr().out == "of somebody else\n"


async def test_a_closed_widget_prints_as_everybody_does(capsys: pytest.CaptureFixture[str]) -> None:
    panel = Loud(asyncio.get_running_loop())
    panel.close()
    panel.attend(lambda: print("still said"))
    assert capsys.readouterr().out == "still said\n"
