"""An engine in real kernels: interrupts, a user's own buttons, and cells that do not await."""

from __future__ import annotations

import pytest

from tests.notebook.kernels import Kernel

# Steps take 5 ms at least, so that a text is still being written when something is done to it.
SETUP = """
import asyncio, json, threading, time
import ipywidgets
from interactive_infer import Engine, keep_live, run_sync
from tests.tiny_models import tiny_model, tiny_tokenizer

announce = False

def step(*_):
    global announce
    time.sleep(0.005)
    if announce:
        announce = False
        print("stepping", flush=True)

model = tiny_model("llama")
model.register_forward_pre_hook(step)
engine = await Engine.load(model, tokenizer=tiny_tokenizer(), progress=False, freeze_gc=False)
threads, button, clicked = [], ipywidgets.Button(), None

def click(_):
    threads.append(threading.current_thread() is threading.main_thread())
    clicked()

button.on_click(click)

def begin(max_tokens=500):
    return engine.generate([1, 2, 3], max_tokens=max_tokens, ignore_eos=True)

async def under_way(gen):
    async for token in gen:
        break
"""
AWAITING = "gen = begin()\nawait under_way(gen)\nprint('awaiting')\ndone = await gen\nprint(done.finish_reason)"


@pytest.fixture(scope="module")
def button(kernel: Kernel) -> str:
    kernel.run(SETUP)
    return str(kernel.value("button.model_id"))


@pytest.mark.notebook
def test_a_users_button_on_whatever_thread_the_kernel_takes(kernel: Kernel, button: str) -> None:
    route = None if kernel.series < 7 else kernel.subshell()
    kernel.run("def clicked():\n    global gen\n    gen = begin(20)")
    kernel.finish(kernel.click(button, route))
    assert kernel.run("print((await gen).usage.completion_tokens)") == "20\n"
    if route is not None:
        kernel.run("clicked = lambda: gen.cancel()")
        cell = kernel.start(AWAITING)
        kernel.await_print(cell, "awaiting")
        kernel.click(button, route)
        kernel.finish(cell)
        assert kernel.printed(cell) == "awaiting\ncancelled\n"
        if kernel.version != "7.4.0":  # which goes by the thread that last published on the comm
            assert kernel.value("threads") == [False, False]


@pytest.mark.notebook
def test_a_users_button_that_is_kept_live(kernel: Kernel, button: str) -> None:
    kernel.run("keep_live(button)\nthreads.clear()\nclicked = lambda: gen.cancel()")
    routes = [None] if kernel.series < 7 else [None, kernel.subshell()]
    for route in routes:
        cell = kernel.start(AWAITING)
        kernel.await_print(cell, "awaiting")
        kernel.finish(kernel.click(button, route), cell)
        assert kernel.printed(cell) == "awaiting\ncancelled\n"
    kernel.run("def clicked():\n    global more\n    more = begin(20)\n    begun.set()\nbegun = asyncio.Event()")
    cell = kernel.start("print('awaiting')\nawait begun.wait()\nprint((await more).usage.completion_tokens)")
    kernel.await_print(cell, "awaiting")
    kernel.finish(kernel.click(button, routes[-1]), cell)
    assert kernel.printed(cell) == "awaiting\n20\n"
    assert all(kernel.value("threads"))


# A widget of ours whose callbacks are loud and slow.
LOUD = """
from interactive_infer.notebook.widgets.panel import Panel

class Loud(Panel):
    def hear(self, message):
        print(message["say"])
        time.sleep(0.2)
        assert not message["fail"], message["say"]

    def static(self):
        return "", ""

loud = Loud(asyncio.get_running_loop())
"""
HOSTILE = "<script>window.ran = 1</script>\x1b[31m"


@pytest.mark.notebook
def test_what_our_callbacks_print_and_raise_comes_to_their_widget(kernel: Kernel, button: str) -> None:
    kernel.run(LOUD)
    loud = str(kernel.value("loud.model_id"))

    def shown() -> list[object]:
        told = [m["content"]["data"] for m in kernel.heard if m["msg_type"] == "comm_msg"]
        states = [data["state"]["printed"] for data in told if data.get("state", {}).get("printed")]
        return states + [data["content"]["error"] for data in told if "error" in data.get("content", ())]

    for route in [None] if kernel.series < 7 else [None, kernel.subshell()]:
        kernel.heard.clear()
        cell = kernel.start(AWAITING)
        kernel.await_print(cell, "awaiting")
        said = kernel.comm(loud, {"method": "custom", "content": {"say": HOSTILE, "fail": True}}, route)
        kernel.until(lambda: len(shown()) == 2, "what was said and raised")
        kernel.interrupt()
        kernel.finish(cell)
        assert shown() == [f"{HOSTILE}\n", f"AssertionError: {HOSTILE}"]
        assert not kernel.printed(said) and not kernel.printed(said, "stderr")
        assert kernel.printed(cell) == "awaiting\n"
        kernel.run("loud.printed = ''")


@pytest.mark.notebook
def test_a_slow_callback_is_what_a_bubble_is_put_down_to(kernel: Kernel, button: str) -> None:
    kernel.run(LOUD + "engine.timeline.clear()\nkeep_live(button)\nclicked = lambda: time.sleep(0.2)")
    loud = str(kernel.value("loud.model_id"))
    cell = kernel.start(AWAITING)
    kernel.await_print(cell, "awaiting")
    kernel.finish(kernel.click(button))
    kernel.comm(loud, {"method": "custom", "content": {"say": "slow", "fail": False}})
    kernel.until(lambda: any("slow" in str(m["content"]) for m in kernel.heard if m["msg_type"] == "comm_msg"), "it")
    kernel.interrupt()
    kernel.finish(cell)
    causes = kernel.value("list(engine.timeline.summary().causes)")
    assert {"callback: Button", "callback: Loud"} <= set(causes[:3]), causes


@pytest.mark.notebook
def test_an_interrupt_cancels_the_awaited_generation_alone(kernel: Kernel, button: str) -> None:
    kernel.run("other = begin()\nawait under_way(other)")
    cell = kernel.start(AWAITING)
    kernel.await_print(cell, "awaiting")
    kernel.interrupt()
    kernel.finish(cell)
    assert kernel.errors(cell)[0]["ename"] in ("CancelledError", "KeyboardInterrupt")
    assert kernel.value("[gen.finish_reason, len(gen.token_ids) > 0, len(gen.text) > 0, other.state]") == [
        "cancelled",
        True,
        True,
        "running",
    ]
    kernel.run("before = len(other.token_ids)\nawait asyncio.sleep(0.1)\nassert len(other.token_ids) > before")
    kernel.run("other.cancel()")


@pytest.mark.notebook
def test_an_interrupt_is_noticed_while_nothing_happens(kernel: Kernel, button: str) -> None:
    cell = kernel.start("gen = begin()\ngen.pause()\nprint('awaiting')\nawait gen")
    kernel.await_print(cell, "awaiting")
    kernel.interrupt()
    kernel.finish(cell)
    assert kernel.value("gen.finish_reason") == "cancelled"


@pytest.mark.notebook
def test_an_interrupt_between_cells_leaves_everything_running(kernel: Kernel, button: str) -> None:
    kernel.run("gen = begin(60)\nawait under_way(gen)")
    kernel.interrupt()
    assert kernel.run("print((await gen).usage.completion_tokens)") == "60\n"


@pytest.mark.notebook
def test_a_synchronous_cell(kernel: Kernel, button: str) -> None:
    kernel.run("other = begin()\nawait under_way(other)")
    kernel.run(
        "before = len(other.token_ids)\ndone = engine.generate_sync([4, 5], max_tokens=20, ignore_eos=True)\n"
        "assert done.usage.completion_tokens == 20 and len(other.token_ids) >= before + 10"
    )
    cell = kernel.start("gen = begin()\nannounce = True\ngen.result_sync()")
    # A thread prints to the cell that began it, or to the newest: either.
    kernel.until(lambda: kernel.heard[-1]["content"].get("text") == "stepping\n", "a step")
    kernel.interrupt()
    kernel.finish(cell)
    assert kernel.errors(cell)[0]["ename"] == "KeyboardInterrupt"
    assert kernel.value("[gen.finish_reason, other.state]") == ["cancelled", "running"]
    kernel.run("other.cancel()")


@pytest.mark.notebook
def test_run_sync_awaits_a_generation(kernel: Kernel, button: str) -> None:
    kernel.run("other = begin()\nawait under_way(other)")
    assert kernel.run("print(run_sync(begin(20)).usage.completion_tokens)") == "20\n"
    cell = kernel.start(
        "gen = begin()\nasync def whole():\n    await under_way(gen)\n    print('nested', flush=True)\n    await gen\n"
        "run_sync(whole())"
    )
    kernel.await_print(cell, "nested")
    kernel.interrupt()
    kernel.finish(cell)
    assert kernel.errors(cell)[0]["ename"] == "KeyboardInterrupt"
    assert kernel.value("[gen.finish_reason, other.state]") == ["cancelled", "running"]
    assert kernel.run("other.cancel()\nprint((await begin(5)).usage.completion_tokens)") == "5\n"


@pytest.mark.notebook
def test_after_close_nothing_of_it_is_left(kernel: Kernel, button: str) -> None:
    cell = kernel.start(AWAITING)
    kernel.await_print(cell, "awaiting")
    kernel.interrupt()
    kernel.finish(cell)
    kernel.run("await engine.close()")
    kernel.run(
        "def left():\n    tasks = [task.get_name() for task in asyncio.all_tasks()]\n"
        "    names = [thread.name for thread in threading.enumerate()] + tasks\n"
        "    return [name for name in names if 'interactive_infer' in name]\n"
        "async with asyncio.timeout(60):\n    while left(): await asyncio.sleep(0.01)"
    )
