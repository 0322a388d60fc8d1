"""CUDA graphs: their capture, their replay."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable

import torch

from interactive_infer.core.cuda import borrow_stream, return_stream


class Graphs:
    """Captured graphs by key. They share one memory pool, so they must be replayed on one stream, and what one leaves
    behind must be consumed before the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = borrow_stream(device)
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, key: Hashable) -> None:
        """Launch the graph on the current stream; takes microseconds and allocates nothing."""
        self._graphs[key].replay()

    def capture(self, key: Hashable, work: Callable[[], object], *, uses_blas: bool) -> None:
        """Capture what `work` launches. It must have run once for real, so that kernels are compiled.

        `uses_blas`: it multiplies matrices by cuBLAS, of which each thread has a handle that no capture can make.

        Takes tens of milliseconds: not for the loop's thread. Others may use the card meanwhile, from their threads:
        the capture mode is thread-local. (`torch.cuda.graph` would collect garbage and stop the card first.)
        """
        with self._lock, torch.cuda.device(self._device):
            if uses_blas:
                self._stream.synchronize()  # idle; a new thread has no CUDA context before its first such call
                torch.cuda.current_blas_handle()
            self._capture(key, work)

    def _capture(self, key: Hashable, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what went wrong in `work` is the error to be told
                    graph.capture_end()
                raise
            graph.capture_end()
            self._graphs[key] = graph

    def clear(self) -> None:
        """Free the graphs and their memory, once; none may be running, and none is captured any more."""
        self._graphs.clear()
        return_stream(self._stream)
