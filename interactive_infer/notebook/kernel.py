"""Live controls: widget messages handled at once while a cell awaits, on the kernel's own loop and thread.

Left to itself, ipykernel 6 and 7.0 to 7.3 handle a widget message after the running cell, or (where the front end uses
subshells) on another thread with another loop; 7.4 sends no idle status for it, after which a slider is dead. So the
handler of the kernel's shell stream is wrapped: comm messages of the widgets named here are taken out of it and
handled as they arrive, everything else goes the kernel's own way, in the kernel's own order.

Most of what this touches is private to ipykernel or IPython (docs/notebook.md lists it). It is looked for first: where
something is not there, nothing is changed and one warning says so.
"""

from __future__ import annotations

import contextvars
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

from interactive_infer.errors import InvalidRequestError
from interactive_infer.notebook.cells import Cells, cells_of, recorded_callback

Which = Literal["ours", "all", "off"]
Frames = list[Any]

_HANGS_S = 0.2  # a callback that takes so long is meant by an interrupt too
_MESSAGES = frozenset({"comm_open", "comm_msg", "comm_close"})
_DELIMITER = b"<IDS|MSG>"
_HEADER, _CONTENT = 2, 5  # frames after the delimiter


def keep_live(*controls: Any) -> None:
    """Have these controls answer while a cell awaits: widgets (of a box also its children) or comms.

    This package's own widgets are kept live by themselves. For yours: `keep_live(button)`; its callbacks then always
    run on the kernel's main thread. Outside ipykernel: nothing. From any thread.

    Raises InvalidRequestError for what is neither a widget nor a comm.
    """
    live = _live()
    comms = [comm for control in controls for comm in _comms(control, set())]
    if live is not None:
        live.keep(comms)


def live_controls(which: Which) -> None:
    """Which comm messages are handled while a cell awaits.

    - "ours" (from the first widget of this package on): those of this package's widgets and of what `keep_live` got;
    - "all": every widget's;
    - "off": none. Controls then answer between cells, or on another thread, as the kernel and the front end have it.

    Outside ipykernel: nothing.
    """
    if which not in ("ours", "all", "off"):
        raise InvalidRequestError("which", which, 'must be "ours", "all" or "off"')
    live = _live()
    if live is not None:
        live.choose(which)


def answers_at_once() -> bool:
    """Whether what `keep_live` got is heard while a cell awaits, here and now."""
    live = _live()
    return live is not None and live.active


class LiveComms:
    """The hooks in one kernel's shell channel.

    - A message is handled synchronously, so nothing of the cell runs in between. Its parent, for output, is the
      message; then it is the cell's again. Busy and idle are published for it.
    - While a cell runs, the events that comm messages fire (`pre_execute`, `post_execute`) are left out: matplotlib's
      listener would take the cell's half-drawn figures.
    - Where the front end sends a message by a subshell, ipykernel's channel thread hands it to the main thread.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._which: Which = "ours"
        self._comms: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._cells: Cells | None = None
        self._state: Literal["new", "installed", "refused"] = "new"

    @property
    def active(self) -> bool:
        return self._state == "installed" and self._which != "off"

    def keep(self, comms: Iterable[Any]) -> None:
        for comm in comms:
            self._comms[comm.comm_id] = comm
        if self._which != "off":
            self._install()

    def choose(self, which: Which) -> None:
        self._which = which  # what is installed stays, and lets everything pass
        if which != "off":
            self._install()

    # -- the hooks -----------------------------------------------------------------------------------------------

    def _install(self) -> None:
        if self._state != "new":
            return
        self._state = "installed"
        if threading.current_thread() is threading.main_thread():
            self._install_here()
        else:
            self._kernel.io_loop.add_callback(self._install_here)

    def _install_here(self) -> None:
        """On the main thread, where the main stream's messages arrive."""
        kernel = self._kernel
        try:
            self._check()
            self._cells = cells_of(kernel.shell)
            channel = getattr(kernel, "shell_channel_thread", None)  # ipykernel 7's: receives, and hands out to threads
            if channel is None:
                _wrap(kernel.shell_stream, self._take)
                return
            main = channel.manager._shell_channel_to_main.to_stream
            to_main = channel.manager.get_shell_channel_to_subshell_socket(None)
            _check_stream(main)
            _check_stream(kernel.shell_stream)

            def reroute(frames: Frames) -> bool:
                if not self._is_mine(frames):
                    return False
                to_main.send_multipart(frames, copy=False)
                return True

            def on_channel_thread() -> None:
                _wrap(kernel.shell_stream, reroute)
                if getattr(channel.manager, "_shell_socket", None) is kernel.shell_stream.socket:
                    # 7.0 to 7.3 send replies past the stream, which then may never hear of a message that came in just
                    # then, nor of any after it: no cell and no click. The remedy is 7.4's.
                    channel.manager._shell_socket = kernel.shell_stream

            _wrap(main, self._take)
            channel.io_loop.add_callback(on_channel_thread)
        except Exception as error:
            self._step_back(error)

    def _check(self) -> None:
        """Raises where something of what `_handle` uses is missing."""
        kernel = self._kernel
        _ = kernel._parent_ident["shell"], kernel.get_parent("shell"), kernel.set_parent, kernel._publish_status
        _ = kernel.io_loop, kernel.comm_manager.comms, kernel.log
        _ = kernel.session.feed_identities, kernel.session.deserialize, kernel.session.unpack
        missing = _MESSAGES - set(kernel.shell_handlers)
        if missing:
            raise LookupError(f"no handlers of {', '.join(sorted(missing))}")
        if getattr(kernel, "shell_channel_thread", None) is None:
            _check_stream(kernel.shell_stream)

    def _step_back(self, error: Exception) -> None:
        if self._state == "refused":
            return
        self._state, self._which = "refused", "off"
        ipykernel = sys.modules["ipykernel"]
        warnings.warn(
            f"ipykernel {ipykernel.__version__} is not as this version of interactive_infer knows it "
            f"({type(error).__name__}: {error}): controls answer between cells, not while one awaits",
            RuntimeWarning,
            stacklevel=2,
        )

    # -- messages ------------------------------------------------------------------------------------------------

    def _is_mine(self, frames: Frames) -> bool:
        if self._which == "off":
            return False
        kind = self._part(frames, _HEADER).get("msg_type")
        if kind not in _MESSAGES:
            return False
        return self._which == "all" or self._part(frames, _CONTENT).get("comm_id") in self._comms

    def _take(self, frames: Frames) -> bool:
        """On the main thread: handle a comm message of ours, and what was rerouted before a change of mind."""
        if not self._is_mine(frames):
            header = self._part(frames, _HEADER)
            if header.get("msg_type") not in _MESSAGES or header.get("subshell_id") is None:
                return False
        self._handle(frames)
        return True

    def _part(self, frames: Frames, number: int) -> dict[str, Any]:
        """One of the message's dictionaries, read without touching the session's memory of signatures.

        Empty for what is no message. ipykernel 7's own "stop aborting" is such: were it dropped, the kernel would abort
        every later cell.
        """
        at = next((at for at, frame in enumerate(frames) if _bytes(frame) == _DELIMITER), len(frames)) + number
        if at >= len(frames):
            return {}
        try:
            part = self._kernel.session.unpack(_bytes(frames[at]))
        except Exception:  # garbled: the kernel's own handler gets it, and logs it
            return {}
        return part if isinstance(part, dict) else {}

    def _handle(self, frames: Frames) -> None:
        session = self._kernel.session
        idents, frames = session.feed_identities(frames, copy=False)
        try:
            message = session.deserialize(frames, content=True, copy=False)  # checks the signature
        except Exception:
            self._kernel.log.exception("Invalid Message")
            return
        try:
            # A copy: the cell's own context must not see another parent.
            contextvars.copy_context().run(self._handle_as_request, idents, message)
        except Exception as error:
            self._kernel.log.exception("a comm message could not be handled while a cell awaits")
            self._step_back(error)

    def _handle_as_request(self, idents: Any, message: dict[str, Any]) -> None:
        kernel = self._kernel
        before = kernel._parent_ident["shell"], kernel.get_parent("shell")
        _flush()  # what was printed so far is the cell's
        kernel.set_parent(idents, message, channel="shell")
        kernel._publish_status("busy", "shell", message)
        try:
            callback = self._callback(message)
            # By the class of the widget; what is no widget by what it is.
            name = "comm" if callback is None else type(getattr(callback, "__self__", callback)).__name__
            with _interruptible(), recorded_callback(name):
                self._call(idents, message, callback)
        except Exception:
            kernel.log.exception("Exception in a comm message's handler")
        except KeyboardInterrupt:
            kernel.log.error("KeyboardInterrupt caught in kernel.")
        finally:
            _flush()
            kernel._publish_status("idle", "shell", message)
            kernel.set_parent(*before, channel="shell")

    def _callback(self, message: dict[str, Any]) -> Any:
        """What the message's comm calls; None where there is no such comm."""
        comm = self._kernel.comm_manager.comms.get(message["content"].get("comm_id"))
        return getattr(comm, "_msg_callback", None)

    def _call(self, idents: Any, message: dict[str, Any], callback: Any) -> None:
        kernel, kind = self._kernel, message["header"]["msg_type"]
        in_a_cell = self._cells is not None and self._cells.running
        if kind == "comm_msg" and in_a_cell and callback is not None:
            callback(message)  # `comm.handle_msg` without its events
            return
        kernel.shell_handlers[kind](kernel.shell_stream, idents, message)


def _wrap(stream: Any, take: Callable[[Frames], bool]) -> None:
    """Ask `take` first; what it does not take goes to the stream's handler of now."""
    theirs = stream._recv_callback

    def on_recv(frames: Frames) -> Any:
        return None if take(frames) else theirs(frames)

    stream.on_recv(on_recv, copy=False)


def _bytes(frame: Any) -> bytes:
    return bytes(getattr(frame, "buffer", frame))


def _check_stream(stream: Any) -> None:
    if not callable(stream._recv_callback):
        raise LookupError("a shell stream without a handler")


@contextmanager
def _interruptible() -> Iterator[None]:
    """A callback that hangs can be interrupted. Between cells ipykernel ignores SIGINT, and while one awaits it cancels
    that and lets the callback be: a short one, which goes on."""
    before, begun = signal.getsignal(signal.SIGINT), time.monotonic()
    if before is None:  # of another language, and could not be put back
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        if before is signal.SIG_IGN or time.monotonic() - begun > _HANGS_S:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _comms(control: Any, seen: set[int]) -> Iterator[Any]:
    """The open comms of a comm, a widget, or a box of widgets."""
    if id(control) in seen:
        return
    seen.add(id(control))
    if hasattr(control, "comm_id"):
        yield control
    elif hasattr(control, "comm"):
        if control.comm is not None:  # None: it is closed
            yield control.comm
        for child in getattr(control, "children", ()):
            yield from _comms(child, seen)
    else:
        raise InvalidRequestError("controls", control, "give widgets or comms")


_of_kernels: weakref.WeakKeyDictionary[Any, LiveComms] = weakref.WeakKeyDictionary()


def _live() -> LiveComms | None:
    """The running kernel's, made at the first call; None outside ipykernel."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not hasattr(kernel, "shell_handlers"):
        return None
    live = _of_kernels.get(kernel)
    if live is None:
        live = _of_kernels[kernel] = LiveComms(kernel)
    return live
