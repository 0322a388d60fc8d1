"""What the sections of gpu.py share: the engine and its peer, runs, steady steps, a heartbeat, a table."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar

import gpu_models
import numpy as np
import torch
from report import percentile
from transformers import PreTrainedModel

from interactive_infer import Completion, Engine, Generation
from interactive_infer.timeline.recorder import Recording

T = TypeVar("T")

BEAT_S = 0.005
BATCHES = (1, 64)


@dataclass(frozen=True, slots=True)
class Table:
    """What a section shows, and what only its JSON holds."""

    title: str
    columns: Sequence[str]
    rows: list[list[object]]
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. Tokens, except where the name says otherwise."""

    context: int = 512
    steady_steps: int = 100
    prompt: int = 128
    new: int = 256
    turns: int = 2
    arrival_s: float = 2.0
    beats: int = 10_000
    long_prompt: int = 30_000
    long_prompts: int = 10
    endless: int = 2_000
    buffer_bytes: int = 4 << 30


QUICK = Sizes(64, 16, 16, 16, 1, 0.2, 100, 600, 2, 200, 64 << 20)
"""Says nothing about speed: only that the scripts run."""


class Bench:
    """One shape on one device: the engine, loaded when first asked for, and a model object of transformers' own."""

    def __init__(self, shape: str, device: torch.device, sizes: Sizes, *, compiled: bool) -> None:
        self.shape = shape
        self.device = device
        self.sizes = sizes
        self.compiled = compiled
        self.loads: list[float] = []
        """Seconds that each `Engine.load` of a model object took."""
        self._engine: Engine | None = None
        self._peer: PreTrainedModel | None = None
        self._seed = 0

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    async def engine(self) -> Engine:
        """The engine with its defaults, warm."""
        if self._engine is None:
            self._engine = await self.load()
        return self._engine

    async def load(self, **options: Any) -> Engine:
        """An engine of its own on a new model, warm; the caller closes it."""
        model = gpu_models.make(self.shape, self.device)
        start = time.perf_counter()
        engine = await Engine.load(model, progress=False, **options)
        self.loads.append(time.perf_counter() - start)
        try:
            await self.warm_up(engine)
        except BaseException:
            await _give_up(engine)
            raise
        return engine

    async def drop_engine(self) -> None:
        """Close the engine, for a section that needs the memory or another engine."""
        if self._engine is not None:
            await self._engine.close()
            self._engine = None
            collect()

    async def abandon(self) -> None:
        """After a failure: the next section gets an engine of its own, whatever has become of this one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await _give_up(engine)
        collect()

    def peer(self) -> PreTrainedModel:
        """The model that `generate` runs, with SDPA, which no engine touches."""
        if self._peer is None:
            self._peer = gpu_models.make(self.shape, self.device)
        return self._peer

    def drop_peer(self) -> None:
        self._peer = None
        collect()

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts that no call before has given: no prefix is found in the cache."""
        self._seed += 1
        return gpu_models.prompts(gpu_models.SHAPES[self.shape]["vocab_size"], count, length, self._seed)

    async def warm_up(self, engine: Engine) -> None:
        """Greedy steps of every shape, until the engine has no more graphs to make."""
        info = engine.info()

        async def batches() -> None:  # they end one after the other, so that all sizes come by
            asked = [
                engine.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=4 + index // 2).future()
                for index, ids in enumerate(self.prompts(info.max_batch_size, 16))
            ]
            await asyncio.gather(*asked)

        async def chunks(beside: int) -> None:
            group = [
                engine.generate(ids, temperature=0.0, ignore_eos=True, max_tokens=self.sizes.endless)
                for ids in self.prompts(beside, 16)
            ]
            while any(len(generation.token_ids) < 2 for generation in group):
                await asyncio.sleep(0.005)
            for length in (40, 200, 400, 1000, 2000):
                prompts = self.prompts(1, min(length, info.max_step_tokens - beside))
                await run(engine, prompts, 1)
            for generation in group:
                generation.cancel()

        await captured(engine, batches)
        for beside in (0, 8, 32, 64):
            if beside < info.max_batch_size:
                await captured(engine, partial(chunks, beside))

    async def close(self) -> None:
        await self.drop_engine()
        self.drop_peer()


async def _give_up(engine: Engine) -> None:
    """Close an engine that may be broken."""
    with contextlib.suppress(Exception):
        await within(10, engine.close())


def collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Some generations, all asked for at once: their tokens, the time from the call to the last one, the records."""

    completions: list[Completion]
    seconds: float
    recording: Recording

    @property
    def tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def rate(self) -> float:
        """Tokens/s, prefill included."""
        return self.tokens / self.seconds


async def run(engine: Engine, prompts: list[list[int]], new_tokens: int, **sampling: Any) -> Run:
    """Greedy unless `sampling` says otherwise."""
    engine.timeline.clear()
    start = time.perf_counter()
    group = engine.generate(prompts, ignore_eos=True, max_tokens=new_tokens, **({"temperature": 0.0} | sampling))
    completions = await group
    return Run(completions, time.perf_counter() - start, engine.timeline.recorder.snapshot())


async def captured(engine: Engine, once: Callable[[], Awaitable[T]]) -> T:
    """Call `once` until it makes the engine capture nothing more (a few times at most); its last result."""
    for _ in range(4):
        before = engine.info().launches
        result = await once()
        seen = None
        while seen != (seen := engine.info().launches):  # captures go on after the steps that asked for them
            await asyncio.sleep(0.4)
        if seen == before:
            break
    return result


@dataclass(frozen=True, slots=True)
class Steady:
    """Consecutive steps in which exactly `batch` sequences decode, one token each.

    periods_ms: from one step's end to the next one's, which is what a token costs. own_ms: from a step's own start to
    its end, on the device's clock. window: start of the first, end of the last, in ns.
    """

    periods_ms: list[float]
    own_ms: list[float]
    intervals: np.ndarray
    window: tuple[int, int]

    @property
    def busy(self) -> float:
        """Share of the window in which a step was on the device."""
        starts, ends = self.intervals[:, 0], np.maximum.accumulate(self.intervals[:, 1])
        gaps = np.maximum(starts[1:] - ends[:-1], 0).sum()
        return float(1 - gaps / (self.window[1] - self.window[0]))


def steady(recording: Recording, batch: int) -> Steady:
    steps = recording.steps
    steps = steps[(steps["batch_size"] == batch) & (steps["tokens"] == batch) & (steps["prefill_tokens"] == 0)]
    steps = steps[2:-2]  # the first ones still follow prefill, the last ones precede the end
    if len(steps) < 4:
        raise RuntimeError(f"only {len(steps)} steps of {batch} decoding sequences were seen: nothing to measure")
    following = np.diff(steps["step_id"]) == 1
    return Steady(
        (np.diff(steps["end"])[following] / 1e6).tolist(),
        ((steps["end"] - steps["start"]) / 1e6).tolist(),
        np.stack([steps["start"], steps["end"]], axis=1),
        (int(steps["start"][0]), int(steps["end"][-1])),
    )


def read_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes/s at which the device reads a buffer larger than any cache: the best of torch's sum and a Triton kernel."""
    buffer = torch.zeros(num_bytes // 4, dtype=torch.int32, device=device)
    ways = [lambda: buffer.view(torch.float32).sum()]
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from gpu_read import read

        ways.append(lambda: read(buffer))
    best = 0.0
    for way in ways:
        way()
        for _ in range(10):
            best = max(best, buffer.nbytes / _seconds(way, device))
    return best


def _seconds(work: Any, device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# ---- the loop beside it ---------------------------------------------------------------------------------------------


class Heartbeat:
    """`async with Heartbeat() as heart:` sleeps 5 ms again and again; `heart.lags` is how much later it woke, in ms."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._beat())
        await asyncio.sleep(0)  # its first sleep has begun
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            due = time.perf_counter() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.lags.append((time.perf_counter() - due) * 1e3)

    async def until(self, beats: int) -> None:
        """Wait until it has beaten this often."""
        while len(self.lags) < beats:
            await asyncio.sleep(BEAT_S * max(beats - len(self.lags), 1))


def spread(values: Sequence[float]) -> list[float | None]:
    """Median, p99, maximum."""
    if not values:
        return [None, None, None]
    return [percentile(values, 0.5), percentile(values, 0.99), max(values)]


class Crowd:
    """`async with Crowd(engine, …):` `count` generations decode until the end, each read token by token.

    A generation that ends is followed by another, of another prompt.
    """

    def __init__(self, bench: Bench, engine: Engine, count: int) -> None:
        self._bench = bench
        self._engine = engine
        self._count = count
        self._times_ns: list[array[int]] = []  # not the texts: a million token ids are much for a garbage collection
        self.tokens = 0

    async def __aenter__(self) -> Self:
        most = self._bench.sizes.endless  # the first ones end one after the other, so later ones do too
        self._readers = [
            asyncio.create_task(self._read(most - index * most // (2 * self._count))) for index in range(self._count)
        ]
        await asyncio.sleep(0)
        while self.tokens < 8 * self._count:
            self.raise_failure()
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.cancel()
        ends = await asyncio.gather(*self._readers, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _read(self, first: int) -> None:
        length = first
        while True:
            [prompt] = self._bench.prompts(1, 32)
            generation = self._engine.generate(prompt, temperature=0.0, ignore_eos=True, max_tokens=length)
            length = self._bench.sizes.endless
            assert isinstance(generation, Generation)
            self._times_ns.append(generation._output.times_ns)
            async for _ in generation:
                self.tokens += 1

    def raise_failure(self) -> None:
        """Raise what a reader has failed with, if one has."""
        for reader in self._readers:
            if reader.done() and not reader.cancelled():
                reader.result()

    def gaps_ms(self, since_ns: int) -> list[float]:
        """Times between two tokens of one generation that came after `since_ns`."""
        gaps: list[float] = []
        for times_ns in self._times_ns:
            times = np.array(times_ns, np.int64)
            times = times[times >= since_ns]
            gaps += (np.diff(times) / 1e6).tolist()
        return gaps


async def within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """`work`'s result; TimeoutError once it takes longer."""
    async with asyncio.timeout(seconds):
        return await work
