"""Where a generation's time goes."""

from __future__ import annotations

import time
from typing import Literal

Doing = Literal["queue", "prefill", "decode", "paused", "preempted"]


class Spent:
    """Nanoseconds by what a generation was doing; it does one thing at a time, so the parts add up to its life.

    queue: waiting for a place in a step, at first and after `resume`. prefill: from being planned until its next token,
    where more than one token has to be computed for it (the prompt; what a pause or a preemption took). decode: from
    token to token. paused: from `pause` to `resume`. preempted: its pages went to another, until it is planned again.
    """

    __slots__ = ("doing", "ns", "since_ns")

    def __init__(self, now_ns: int) -> None:
        self.doing: Doing | None = "queue"
        self.since_ns = now_ns
        self.ns: dict[Doing, int] = {"queue": 0, "prefill": 0, "decode": 0, "paused": 0, "preempted": 0}

    def go(self, doing: Doing | None, now_ns: int | None = None) -> None:
        """From now on it does that; None: it has ended, for good."""
        if self.doing is None:
            return
        now = time.perf_counter_ns() if now_ns is None else now_ns
        self.ns[self.doing] += now - self.since_ns
        self.doing, self.since_ns = doing, now

    def now(self) -> dict[Doing, int]:
        """The parts up to now. From any thread."""
        parts, doing, since_ns = dict(self.ns), self.doing, self.since_ns
        if doing is not None:
            parts[doing] += time.perf_counter_ns() - since_ns
        return parts
