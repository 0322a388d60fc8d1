"""Widget messages while a cell awaits, in real kernels: when, where and in which order they are handled."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import pytest
from IPython.core.events import EventManager, available_events

from interactive_infer import InvalidRequestError, keep_live, live_controls
from interactive_infer.notebook.kernel import LiveComms
from tests.notebook.kernels import Kernel

# The hooks are asked for on another thread, as by a button whose click came by a subshell.
SETUP = """
import asyncio, contextlib, json, threading, time
import ipywidgets
from IPython.display import display
from interactive_infer import keep_live, live_controls

loop = asyncio.get_running_loop()
slider, other, button = ipywidgets.IntSlider(max=10_000), ipywidgets.IntSlider(max=10_000), ipywidgets.Button()
box = ipywidgets.VBox([ipywidgets.HBox([slider]), button])
thread = threading.Thread(target=keep_live, args=(box,))
thread.start()
thread.join()
seen, gate, events, clicked = [], asyncio.Event(), [], (lambda: None)

def moved(change):
    on_loop = asyncio._get_running_loop() is loop
    seen.append([change.owner is slider, change.new, threading.current_thread() is threading.main_thread(), on_loop])
    if change.new >= 9_000:
        gate.set()

def fresh():
    global gate
    slider.value = other.value = 0
    seen.clear()
    gate = asyncio.Event()

async def opened():  # a message that never comes fails the test here
    await asyncio.wait_for(gate.wait(), 60)

slider.observe(moved, "value")
other.observe(moved, "value")
button.on_click(lambda _: clicked())
get_ipython().events.register("post_execute", lambda: events.append("post"))
"""


@pytest.fixture(scope="module")
def ids(kernel: Kernel) -> SimpleNamespace:
    kernel.run(SETUP)
    slider, other, button = kernel.value("[slider.model_id, other.model_id, button.model_id]")
    return SimpleNamespace(slider=slider, other=other, button=button)


@pytest.fixture
def fresh(kernel: Kernel, ids: SimpleNamespace) -> SimpleNamespace:
    kernel.run("live_controls('ours')\nfresh()")
    kernel.heard.clear()
    return ids


def routes(kernel: Kernel) -> list[str | None]:
    """The shell channel; in ipykernel 7 a subshell too."""
    return [None] if kernel.series < 7 else [None, kernel.subshell()]


@pytest.mark.notebook
def test_a_slider_is_alive_while_a_cell_awaits(kernel: Kernel, fresh: SimpleNamespace) -> None:
    for route in routes(kernel):
        kernel.run("fresh()")
        cell = kernel.start("print('awaiting')\nawait opened()\nprint(json.dumps(seen))")
        kernel.await_print(cell, "awaiting")
        for value in (3, 4, 9_000):
            moved = kernel.set(fresh.slider, route, value=value)
            kernel.finish(moved)  # ipywidgets' front end sends nothing more until it hears idle
            assert kernel.states(moved) == ["busy", "idle"]
        kernel.finish(cell)
        assert f"{[[True, value, True, True] for value in (3, 4, 9_000)]}".lower() in kernel.printed(cell)
        states = kernel.order(cell, moved)
        assert states == [(0, "busy"), (1, "busy"), (1, "idle"), (0, "idle")]


@pytest.mark.notebook
def test_many_messages_keep_their_order(kernel: Kernel, fresh: SimpleNamespace) -> None:
    route = routes(kernel)
    cell = kernel.start("print('awaiting')\nawait opened()\nprint(json.dumps([value for _, value, _, _ in seen]))")
    kernel.await_print(cell, "awaiting")
    values = [*range(1, 200), 9_000]
    moved = [kernel.set(fresh.slider, route[-1], value=value) for value in values]
    kernel.finish(*moved, cell)
    assert str(values) in kernel.printed(cell)


@pytest.mark.notebook
def test_cells_keep_their_order_and_wait_for_each_other(kernel: Kernel, fresh: SimpleNamespace) -> None:
    cells = [kernel.start("print('awaiting')\nawait opened()"), kernel.start("seen.append('second')")]
    cells.append(kernel.start("print(seen)"))
    kernel.await_print(cells[0], "awaiting")
    moved = kernel.set(fresh.slider, value=9_000)
    kernel.finish(moved, *cells)
    assert kernel.printed(cells[2]) == "[[True, 9000, True, True], 'second']\n"
    order = kernel.order(*cells, moved)
    assert [event for event in order if event[0] != 3] == [(n, s) for n in range(3) for s in ("busy", "idle")]
    assert order.index((3, "idle")) < order.index((0, "idle"))


@pytest.mark.notebook
def test_an_error_aborts_the_cells_behind_it_and_no_other(kernel: Kernel, fresh: SimpleNamespace) -> None:
    for route in routes(kernel):
        kernel.run("fresh()")
        failing = kernel.start("print('awaiting')\nawait opened()\n1 / 0", stop_on_error=True)
        behind = [kernel.start("seen.append('ran')") for _ in range(2)]
        kernel.await_print(failing, "awaiting")
        kernel.finish(kernel.set(fresh.slider, route, value=9_000))
        kernel.finish(failing, *behind)
        assert kernel.reply(failing)["ename"] == "ZeroDivisionError"
        assert [kernel.reply(cell)["status"] for cell in behind] == ["aborted", "aborted"]
        while kernel.reply(kernel.start("pass"))["status"] == "aborted":  # until it has noticed that the queue is empty
            pass
        assert kernel.value("seen") == [[True, 9_000, True, True]]


@pytest.mark.notebook
def test_an_interrupt_ends_the_await_and_nothing_else(kernel: Kernel, fresh: SimpleNamespace) -> None:
    kernel.run(
        "ticks = 0\nasync def tick():\n    global ticks\n    while True:\n        await asyncio.sleep(0.02)\n"
        "        ticks += 1\nticking = asyncio.create_task(tick())"
    )
    cell = kernel.start("print('awaiting')\nawait opened()")
    behind = kernel.start("print('ran')")
    kernel.await_print(cell, "awaiting")
    kernel.finish(kernel.set(fresh.slider, value=3))
    kernel.interrupt()
    kernel.finish(cell, behind)
    assert kernel.errors(cell)[0]["ename"] in ("CancelledError", "KeyboardInterrupt")
    kernel.run("before = ticks\nawait asyncio.sleep(0.1)\nassert ticks > before and not ticking.done()")
    again = kernel.start("print('awaiting')\nawait opened()\nticking.cancel()")
    kernel.await_print(again, "awaiting")
    kernel.finish(kernel.set(fresh.slider, value=9_000), again)
    assert not kernel.errors(again)


@pytest.mark.notebook
def test_a_callback_that_hangs_between_cells_can_be_interrupted(kernel: Kernel, fresh: SimpleNamespace) -> None:
    kernel.run("def clicked():\n    print('hanging', flush=True)\n    time.sleep(120)")
    click = kernel.click(fresh.button)
    kernel.await_print(click, "hanging")
    kernel.interrupt()
    kernel.finish(click)
    kernel.run("clicked = lambda: None")


@pytest.mark.notebook
def test_a_callback_that_hangs_while_a_cell_awaits_can_be_interrupted(kernel: Kernel, fresh: SimpleNamespace) -> None:
    kernel.run("def clicked():\n    time.sleep(0.5)\n    print('hanging', flush=True)\n    time.sleep(120)")
    cell = kernel.start("print('awaiting')\nawait opened()")
    kernel.await_print(cell, "awaiting")
    click = kernel.click(fresh.button)
    kernel.await_print(click, "hanging")
    kernel.interrupt()
    kernel.finish(click, cell)
    assert kernel.errors(cell), "its await is cancelled too"
    kernel.run("clicked = lambda: None")


@pytest.mark.notebook
def test_output_goes_where_it_belongs(kernel: Kernel, fresh: SimpleNamespace) -> None:
    kernel.run("def clicked():\n    print('from the callback')\n    seen.append('clicked')\n    gate.set()")
    cell = kernel.start(
        "async def later():\n    await asyncio.sleep(0.05)\n    print('from a task')\n"
        "print('first', end=' ')\ntask = asyncio.create_task(later())\nprint('awaiting')\n"
        "await opened()\nprint('last')\ndisplay(1)\nawait task"
    )
    kernel.await_print(cell, "awaiting")
    click = kernel.click(fresh.button)
    kernel.finish(click, cell)
    assert kernel.printed(click) == "from the callback\n"
    assert kernel.printed(cell).replace("from a task\n", "") == "first awaiting\nlast\n"
    assert "from a task" in kernel.printed(cell)
    assert [content["data"]["text/plain"] for content in kernel.of(cell, "display_data")] == ["1"]
    kernel.run("clicked = lambda: None")


@pytest.mark.notebook
def test_a_background_task_prints_to_its_cell_after_a_click(kernel: Kernel, fresh: SimpleNamespace) -> None:
    cell = kernel.start(
        "async def later():\n    await opened()\n    await asyncio.sleep(0.05)\n    print('from a task')\n"
        "task = asyncio.create_task(later())"
    )
    kernel.finish(cell)
    moved = kernel.set(fresh.slider, value=9_000)
    last = kernel.start("await task")
    kernel.finish(moved, last)
    expected = last if kernel.version == "6.17.1" else cell  # before 6.29: to the newest request
    assert kernel.printed(expected) == "from a task\n"
    assert kernel.printed(moved) == ""


@pytest.mark.notebook
def test_an_error_in_a_callback_is_shown_and_ends_nothing(kernel: Kernel, fresh: SimpleNamespace) -> None:
    kernel.run("def clicked():\n    gate.set()\n    raise ValueError('in the callback')")
    cell = kernel.start("print('awaiting')\nawait opened()")
    kernel.await_print(cell, "awaiting")
    click = kernel.click(fresh.button)
    kernel.finish(click, cell)
    assert not kernel.errors(cell)
    assert [error["evalue"] for error in kernel.errors(click)] == ["in the callback"]
    kernel.run("clicked = lambda: None")


@pytest.mark.notebook
def test_no_post_execute_in_the_middle_of_a_cell(kernel: Kernel, fresh: SimpleNamespace) -> None:
    cell = kernel.start("events.clear()\nprint('awaiting')\nawait opened()\nprint(events)")
    kernel.await_print(cell, "awaiting")
    kernel.finish(kernel.set(fresh.slider, value=9_000), cell)
    assert kernel.printed(cell) == "awaiting\n[]\n"
    kernel.finish(kernel.set(fresh.slider, value=1))  # between cells as ever
    assert kernel.value("events") == ["post", "post"]


@pytest.mark.notebook
def test_only_the_widgets_that_were_named_are_live(kernel: Kernel, fresh: SimpleNamespace) -> None:
    def order_of_moves(which: str) -> list[bool]:
        """Move the other slider, then this one."""
        kernel.run(f"live_controls({which!r})\nfresh()")
        cell = kernel.start("print('awaiting')\nwith contextlib.suppress(TimeoutError):\n    await opened()")
        kernel.await_print(cell, "awaiting")
        moved = [kernel.set(fresh.other, value=1), kernel.set(fresh.slider, value=9_000)]
        kernel.finish(*moved, cell)
        return [named for named, _, _, _ in kernel.value("seen")]

    assert order_of_moves("all") == [False, True]
    if kernel.version != "7.4.0":  # which handles the other one at once, too
        assert order_of_moves("ours") == [True, False]


@pytest.mark.notebook
def test_it_can_be_switched_off(kernel: Kernel, fresh: SimpleNamespace) -> None:
    kernel.run("live_controls('off')")
    cell = kernel.start("print('awaiting')\nawait asyncio.sleep(0.2)\nprint(seen)")
    kernel.await_print(cell, "awaiting")
    moved = kernel.set(fresh.slider, value=1)
    kernel.finish(cell)
    if kernel.version == "7.4.0":  # handles it at once, and is silent about it
        assert kernel.states(moved) == []
    else:
        assert kernel.printed(cell) == "awaiting\n[]\n"
        kernel.finish(moved)
    assert kernel.value("seen") == [[True, 1, True, True]]


@pytest.mark.notebook
def test_garbage_on_the_shell_channel_changes_nothing(kernel: Kernel, fresh: SimpleNamespace) -> None:
    socket = kernel.client.shell_channel.socket
    for frames in ([b"x"], [b"<IDS|MSG>", b"sig"], [b"<IDS|MSG>", b"sig", b"{", b"{}", b"{}", b"{}"]):
        socket.send_multipart(frames)
    header = b'{"msg_type": "comm_msg"}'
    socket.send_multipart([b"<IDS|MSG>", b"forged", header, b"{}", b"{}", f'{{"comm_id": "{fresh.slider}"}}'.encode()])
    cell = kernel.start("print('awaiting')\nawait opened()")
    kernel.await_print(cell, "awaiting")
    kernel.finish(kernel.set(fresh.slider, value=9_000), cell)


@pytest.mark.notebook
def test_a_closed_widget_is_forgotten(kernel: Kernel, fresh: SimpleNamespace) -> None:
    kernel.run(
        "import gc\nfrom interactive_infer.notebook import kernel as live\nextra = ipywidgets.Button()\n"
        "keep_live(extra)\n(hooks,) = live._of_kernels.values()\nkept = len(hooks._comms)\n"
        "comms = get_ipython().kernel.comm_manager.comms"
    )
    extra = kernel.value("extra.model_id")
    cell = kernel.start("print('awaiting')\nwhile extra.model_id in comms:\n    await asyncio.sleep(0.01)")
    kernel.await_print(cell, "awaiting")
    kernel.finish(kernel.comm(extra, {}, kind="comm_close"), cell)
    assert kernel.value("(extra.close(), globals().pop('extra'), gc.collect(), kept - len(hooks._comms))[-1]") == 1


@pytest.mark.notebook
def test_no_request_is_left_lying(kernel: Kernel, fresh: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """ipykernel 7.0 to 7.3 without the hooks go deaf after some hundred requests."""
    monkeypatch.setattr(kernel, "_nudge", lambda: None)
    requests = [kernel.start("1") for _ in range(200)]
    kernel.finish(*requests)
    for value in range(1, 400):
        kernel.heard.clear()
        kernel.finish(kernel.set(fresh.slider, value=value) if value % 2 else kernel.start("1"))


# -- without a kernel --------------------------------------------------------------------------------------------------


def test_outside_ipykernel_nothing_happens() -> None:
    keep_live(SimpleNamespace(comm_id="1"), SimpleNamespace(comm=None))
    live_controls("all")


def test_what_is_no_control_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="controls='slider': give widgets or comms"):
        keep_live("slider")
    with pytest.raises(InvalidRequestError, match="which='on'"):
        live_controls("on")  # type: ignore[arg-type]


class Stream:
    def __init__(self) -> None:
        self._recv_callback = self.on_recv = lambda *args, **kwargs: None


class Comm:
    comm_id = "1"


class Shell:
    """What hears of cells."""

    def __init__(self) -> None:
        self.events = EventManager(self, available_events)
        self.history_manager = SimpleNamespace(input_hist_parsed=[""])


@pytest.mark.parametrize(
    "missing",
    [
        "_parent_ident",
        "_publish_status",
        "comm_manager",
        "shell_handlers",
        "session",
        "shell",
        "shell.events",
        "shell.history_manager",
    ],
)
def test_it_steps_back_from_a_kernel_that_it_does_not_know(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(
        shell=Shell(),
        _parent_ident={"shell": b""},
        get_parent=str,
        set_parent=None,
        _publish_status=None,
        io_loop=None,
        log=None,
        comm_manager=SimpleNamespace(comms={}),
        session=SimpleNamespace(feed_identities=None, deserialize=None, unpack=None),
        shell_handlers={"comm_open": None, "comm_msg": None, "comm_close": None},
        shell_stream=Stream(),
    )
    theirs = kernel.shell_stream._recv_callback
    owner, _, name = missing.rpartition(".")
    delattr(kernel.shell if owner else kernel, name)
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace(__version__="99.0"))  # type: ignore[arg-type]
    live = LiveComms(kernel)
    with pytest.warns(RuntimeWarning, match=rf"ipykernel 99.0 .*'{name}'.* between cells"):
        live.keep([Comm()])
    assert kernel.shell_stream._recv_callback is theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live.keep([Comm()])  # one warning
        live.choose("all")
    assert kernel.shell_stream._recv_callback is theirs
