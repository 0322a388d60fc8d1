"""Ways of waiting for a card on an event loop: for one event, and in a loop of steps. The tables of docs/design.md.

    python benchmarks/waiting.py [events] [steps] [--json FILE] [--quick]

`events`: work of 0.1, 1 and 10 ms is launched and awaited, again and again. Delay is from its end on the card's clock
to the resumed coroutine. `steps`: a CUDA graph is replayed as a step, 300 µs of host work follow each, and one or two
are in flight; efficiency is the card's time for the steps over the time that passed. CPU is the whole process's, in
cores. A 5 ms heartbeat on the same loop measures lag.

`--device simulated` puts a sleeping thread in the card's place: it says nothing about speed, only that the script runs.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import queue
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from report import BUILD, environment, percentile, table

from interactive_infer.timeline.clock import DeviceClock
from interactive_infer.waiting import Completion, Waiter

BEAT_S = 0.005
HOST_S = 300e-6
EVENTS_MS = {0.1: 300, 1.0: 200, 10.0: 100}
STEPS_MS = {0.49: 1500, 1.92: 500, 7.6: 160}
HostFunction = Callable[[Any, int], None]


class Device(Protocol):
    """Runs pieces of work in order, each with an event at its end."""

    name: str

    def prepare(self, ms: float) -> Callable[[], None]:
        """Work that takes about `ms`; calling it launches it."""

    def record(self, *, blocking: bool) -> Any:
        """An event after everything launched; `blocking`: whoever synchronizes with it sleeps."""

    def call(self, function: Any, argument: int) -> None:
        """Have a thread of the driver's call a C function once everything launched is done."""

    def ended_ns(self, event: Any) -> int: ...

    def seconds(self, launch: Callable[[], None], times: int) -> float:
        """What one `launch` takes on the device, of `times` in a row."""


class Card:
    """A CUDA card, on one stream."""

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        idle = torch.cuda.Stream()

        def record() -> torch.cuda.Event:
            event = torch.cuda.Event(enable_timing=True)
            event.record(idle)
            return event

        self.clock = DeviceClock(record)
        self._launch_host_function = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc
        self._launch_host_function.argtypes = [ctypes.c_void_p] * 3
        probe = 10_000_000
        self._cycles_per_ms = probe / min(self.seconds(lambda: torch.cuda._sleep(probe), 3) * 1e3 for _ in range(3))

    def prepare(self, ms: float) -> Callable[[], None]:
        kernels = 10
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for _ in range(kernels):
                torch.cuda._sleep(int(ms * self._cycles_per_ms / kernels))
        return graph.replay

    def record(self, *, blocking: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=blocking)
        event.record(self.stream)
        return event

    def call(self, function: Any, argument: int) -> None:
        status = self._launch_host_function(self.stream.cuda_stream, ctypes.cast(function, ctypes.c_void_p), argument)
        if status:
            raise RuntimeError(f"cuLaunchHostFunc failed with {status}")

    def ended_ns(self, event: torch.cuda.Event) -> int:
        return self.clock.ns(event)

    def seconds(self, launch: Callable[[], None], times: int) -> float:
        launch()
        start = self.record(blocking=False)
        for _ in range(times):
            launch()
        end = self.record(blocking=False)
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times


class Simulated:
    """A thread that sleeps."""

    name = "simulated"

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._queue.get()()

    def prepare(self, ms: float) -> Callable[[], None]:
        return lambda: self._queue.put(lambda: time.sleep(ms / 1e3))

    def record(self, *, blocking: bool) -> SimulatedEvent:
        event = SimulatedEvent()
        self._queue.put(event.reach)
        return event

    def call(self, function: Any, argument: int) -> None:
        self._queue.put(lambda: function(argument))

    def ended_ns(self, event: SimulatedEvent) -> int:
        return event.at_ns

    def seconds(self, launch: Callable[[], None], times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            launch()
        self.record(blocking=True).synchronize()
        return (time.perf_counter() - start) / times


class SimulatedEvent:
    def __init__(self) -> None:
        self._reached = threading.Event()
        self.at_ns = 0

    def reach(self) -> None:
        self.at_ns = time.perf_counter_ns()
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


# ---- ways -----------------------------------------------------------------------------------------------------------

Way = Callable[[Device, Any], Awaitable[object]]
"""Called right after an event was recorded; what it returns is awaited, now or later."""


async def block(device: Device, event: Any) -> None:
    event.synchronize()


async def spin(device: Device, event: Any) -> None:
    while not event.query():
        await asyncio.sleep(0)


async def timer(device: Device, event: Any) -> None:
    while not event.query():
        await asyncio.sleep(0.0005)  # epoll makes at least 1 ms of it


def thread() -> Way:
    """The package's own waiter thread."""
    waiter = Waiter()

    def wait(device: Device, event: Any) -> Awaitable[object]:
        completion: Completion[None] = Completion()
        waiter.watch(event, completion, lambda: None)
        return completion

    return wait


def executor(device: Device, event: Any) -> Awaitable[object]:
    return asyncio.get_running_loop().run_in_executor(None, event.synchronize)


def host_function_in_c(device: Device, event: Any) -> Awaitable[object]:
    """The host function is the C library's own `close`: it closes one end of a pipe whose other end the loop reads.

    Its argument, passed as a pointer, is the number of the file.
    """
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    reader, writer = os.pipe()

    def ready() -> None:
        loop.remove_reader(reader)
        os.close(reader)
        if not future.done():
            future.set_result(None)

    loop.add_reader(reader, ready)
    device.call(_close, writer)
    return future


_close = ctypes.CDLL(None).close


def host_function_in_python() -> Way:
    """A Python function as the host function: the driver's thread needs the GIL, and the stream waits meanwhile."""
    loop = asyncio.get_running_loop()
    waiting: dict[int, asyncio.Future[None]] = {}
    numbers = iter(range(1, 1 << 60))

    def settle(number: int) -> None:
        future = waiting.pop(number)
        if not future.done():
            future.set_result(None)

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def callback(number: int) -> None:
        loop.call_soon_threadsafe(settle, number)

    def wait(device: Device, event: Any) -> Awaitable[object]:
        number = next(numbers)
        future = waiting[number] = loop.create_future()
        device.call(callback, number)
        return future

    return wait


@dataclass(frozen=True, slots=True)
class Kind:
    """`make` gives a fresh way, on the running loop. blocking: its thread sleeps in `synchronize`."""

    make: Callable[[], Way]
    blocking: bool = True


EVENT_WAYS = {
    "event.synchronize() on the loop": Kind(lambda: block, blocking=False),
    "while not query(): sleep(0)": Kind(lambda: spin),
    "poll with a timer": Kind(lambda: timer),
    "one waiter thread": Kind(thread),
    "run_in_executor per wait": Kind(lambda: executor),
    "host function in C": Kind(lambda: host_function_in_c),
    "host function in Python": Kind(host_function_in_python),
}
STEP_WAYS = {
    "blocking": EVENT_WAYS["event.synchronize() on the loop"],
    "spin": EVENT_WAYS["while not query(): sleep(0)"],
    "timer": EVENT_WAYS["poll with a timer"],
    "waiter thread": EVENT_WAYS["one waiter thread"],
    "host function in C": EVENT_WAYS["host function in C"],
}


# ---- what is measured -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Beside:
    """`async with Beside() as beside:` a heartbeat's lags in µs, and the CPU that the process used, in cores."""

    lags_us: list[float] = field(default_factory=list)
    cpu: float = 0.0
    _start: tuple[float, float] = (0.0, 0.0)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Beside:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)
        self._start = time.process_time(), time.perf_counter()
        return self

    async def __aexit__(self, *_: object) -> None:
        used, passed = time.process_time() - self._start[0], time.perf_counter() - self._start[1]
        self.cpu = used / passed
        await asyncio.sleep(2 * BEAT_S)  # the beat that was held up last is counted too
        assert self._task is not None
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.lags_us.append((time.perf_counter() - due) * 1e6)

    def lag(self, share: float) -> float:
        return percentile(self.lags_us, share)


async def one_by_one(device: Device, kind: Kind, ms: float, times: int) -> tuple[float, Beside]:
    """Median delay in µs, and what happened beside."""
    launch, way = device.prepare(ms), kind.make()
    woken: list[tuple[Any, int]] = []

    async def once() -> None:
        launch()
        event = device.record(blocking=kind.blocking)
        await way(device, event)
        woken.append((event, time.perf_counter_ns()))
        await asyncio.sleep(0)

    for _ in range(3):
        await once()
    woken.clear()
    async with Beside() as beside:
        for _ in range(times):
            await once()
    return statistics.median((at_ns - device.ended_ns(event)) / 1e3 for event, at_ns in woken), beside


async def steps(device: Device, kind: Kind, ms: float, in_flight: int, times: int) -> tuple[float, Beside]:
    """Efficiency of a loop of steps, and what happened beside."""
    launch, way = device.prepare(ms), kind.make()
    alone = device.seconds(launch, 20)
    flights: deque[Awaitable[object]] = deque()
    async with Beside() as beside:
        start = time.perf_counter()
        for number in range(times):
            while len(flights) < min(in_flight, times - number):
                launch()
                flights.append(way(device, device.record(blocking=kind.blocking)))
            await flights.popleft()
            busy_until = time.perf_counter() + HOST_S
            while time.perf_counter() < busy_until:
                pass
        passed = time.perf_counter() - start
    return times * alone / passed, beside


async def event_table(device: Device, share: float, problems: list[str]) -> tuple[list[str], list[list[object]]]:
    rows: list[list[object]] = []
    for name, kind in EVENT_WAYS.items():
        row: list[object] = [name]
        try:
            found = [await one_by_one(device, kind, ms, max(int(n * share), 5)) for ms, n in EVENTS_MS.items()]
        except Exception as error:
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        row += [delay for delay, _ in found]
        row += [beside.cpu for _, beside in found]
        row.append(found[-1][1].lag(0.5))
        rows.append(row)
    times = [f"{ms:g} ms" for ms in EVENTS_MS]
    return ["way of waiting", *(f"delay µs, {t}" for t in times), *(f"CPU, {t}" for t in times), "lag µs, 10 ms"], rows


async def step_table(device: Device, share: float, problems: list[str]) -> tuple[list[str], list[list[object]]]:
    rows: list[list[object]] = []
    last: dict[str, Beside] = {}
    for ms, n in STEPS_MS.items():
        for in_flight in (1, 2):
            row: list[object] = [f"{ms:g} ms", in_flight]
            for name, kind in STEP_WAYS.items():
                try:
                    efficiency, last[name] = await steps(device, kind, ms, in_flight, max(int(n * share), 8))
                    row.append(f"{efficiency:.3f}")
                except Exception as error:
                    problems.append(f"{name}, {ms} ms, {in_flight} in flight: {type(error).__name__}: {error}")
                    row.append(None)
            rows.append(row)
    of_last = f"at {max(STEPS_MS):g} ms"
    beside = [last.get(name) for name in STEP_WAYS]
    for label, share_of in (("lag p50, µs", 0.5), ("lag p99, µs", 0.99)):
        rows.append([f"{label} {of_last}", 2, *(b and b.lag(share_of) for b in beside)])
    rows.append([f"CPU {of_last}", 2, *(b and b.cpu for b in beside)])
    return ["step on the GPU", "in flight", *STEP_WAYS], rows


async def measure(args: argparse.Namespace) -> None:
    device: Device = Simulated() if args.device == "simulated" else Card()
    results: dict[str, Any] = {"environment": environment() | {"card": device.name, "cuda": torch.version.cuda}}
    print(", ".join(f"{key} {value}" for key, value in results["environment"].items()))
    problems: list[str] = []
    for name, make in {"events": event_table, "steps": step_table}.items():
        if args.tables and name not in args.tables:
            continue
        start = time.perf_counter()
        columns, rows = await make(device, 0.05 if args.quick else 1.0, problems)
        print(f"\n## {name} ({time.perf_counter() - start:.0f} s)\n\n{table(columns, rows)}", flush=True)
        results[name] = {"columns": columns, "rows": rows}
    if isinstance(device, Card):
        results["clock_error_us"] = device.clock.error_ns / 1e3
        print(f"\nthe card's clock is placed to within {results['clock_error_us']:.0f} µs")
    results["problems"] = problems
    path: Path = args.json
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if problems:
        sys.exit("\n".join(problems))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="table", help="events, steps; none: both")
    parser.add_argument("--device", choices=["cuda", "simulated"], default="cuda")
    parser.add_argument("--json", type=Path, default=BUILD / "waiting.json")
    parser.add_argument("--quick", action="store_true", help="a twentieth of it: only to see it work")
    args = parser.parse_args()
    unknown = set(args.tables) - {"events", "steps"}
    if unknown:
        parser.error(f"there is no table {', '.join(sorted(unknown))}; there are events, steps")
    asyncio.run(measure(args))


if __name__ == "__main__":
    main()
