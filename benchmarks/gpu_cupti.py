"""When the card worked, with each CUDA graph as one piece of work: CUPTI's activity records, without torch.profiler.

The profiler records each kernel of a graph, which makes a launch cost as much as hundreds of launches; as a whole, a
graph costs one record.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch

# CUpti_ActivityKind, and the byte at which a record of that kind has its `start`, before its `end`: cupti_activity.h of
# CUDA 13.0, CUpti_ActivityGraphTrace2, CUpti_ActivityKernel10, CUpti_ActivityMemcpy6, CUpti_ActivityMemset4.
_START = {51: 8, 10: 16, 1: 16, 2: 16}
_BUFFER_BYTES = 1 << 22
_FLUSH_FORCED = 1

_Requested = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)
_Completed = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)


class GraphTrace:
    """`with GraphTrace() as trace:` load what makes the graphs; `with trace.window():` replay them, again and again;
    after each window `trace.intervals`: (n, 2) int64, ns on CUPTI's clock, sorted by start.

    Graphs as wholes, and kernels, copies and fills outside of graphs. Replaying a graph that was made before crashes in
    CUPTI 13.0. torch.profiler, which takes CUPTI's callbacks for itself, may be used after it and not before.
    """

    def __init__(self) -> None:
        self._cupti = ctypes.CDLL(f"libcupti.so.{(torch.version.cuda or '13').partition('.')[0]}")
        self._buffers: dict[int, Any] = {}
        self._found: list[tuple[int, int]] = []
        self._num_graphs = 0
        self._requested, self._completed = _Requested(self._request), _Completed(self._complete)
        self.intervals = np.zeros((0, 2), np.int64)

    def __enter__(self) -> Self:
        self._call("cuptiActivityRegisterCallbacks", self._requested, self._completed)
        for kind in _START:
            self._call("cuptiActivityEnable", kind)
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        for kind in _START:
            self._call("cuptiActivityDisable", kind)
        self._call("cuptiActivityFlushAll", _FLUSH_FORCED)

    @contextmanager
    def window(self) -> Iterator[None]:
        self._flush()
        self._found.clear()
        self._num_graphs = 0
        yield
        self._flush()
        if not self._num_graphs:
            raise RuntimeError("CUPTI has recorded no graph: none was replayed, or it does not record graphs here")
        self.intervals = np.array(sorted(self._found), np.int64).reshape(-1, 2)

    def _flush(self) -> None:
        torch.cuda.synchronize()
        self._call("cuptiActivityFlushAll", _FLUSH_FORCED)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cupti, name)(*arguments)
        if status:
            raise RuntimeError(f"{name}{arguments} failed with status {status} (CUptiResult)")

    def _request(self, buffer: Any, size: Any, most: Any) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES)
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], most[0] = address, _BUFFER_BYTES, 0

    def _complete(self, _context: Any, _stream: int, buffer: int, _size: int, valid: int) -> None:
        memory = self._buffers.pop(buffer)
        record = ctypes.c_void_p(None)
        following = self._cupti.cuptiActivityGetNextRecord
        while not following(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)):
            at = (record.value or 0) - buffer
            (kind,) = struct.unpack_from("<I", memory, at)
            if kind in _START:
                start, end = struct.unpack_from("<QQ", memory, at + _START[kind])
                self._num_graphs += kind == 51
                if start:  # 0: no time was taken
                    self._found.append((start, end))
