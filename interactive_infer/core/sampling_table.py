"""The parameters of the running sequences on the host, and what a step's sampling reads of them.

Random numbers are made here too: one uniform number for each (seed, position), which depends on nothing else.
The generator is Philox4x32-10 with the seed as key and the position as counter: J. K. Salmon, M. A. Moraes,
R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It is keyed, because users
choose seeds like 0, 1, 2, and those must give independent streams (splitmix64's are one sequence at different
offsets). Seeds and positions are known when a step is planned, so the device, and a CUDA graph on it, reads
finished numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from interactive_infer.core.sampling_packed import PADDING_REALS, PADDING_WHOLE, PackedBuffer, PackedKey
from interactive_infer.sampling import MAX_LOGPROBS, SamplingParams

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, UNIFORM = range(7)
"""Rows of `SamplingInputs.reals`."""

GREEDY, TOP_K, PENALIZED, LOGPROBS, PROCESSED, SLOT = range(6)
"""Rows of `PackedInputs.whole`."""

_BIASED = SLOT  # the table's own sixth row: a slot knows its number

_DRAWN, _FILTERED, _WITH_PENALTIES, _WITH_BIAS, _WITH_LOGPROBS = (1 << i for i in range(5))

_SPARSE_ROOM = 64
"""The least room for additions to single logits; it grows by factors of four, so that there are few layouts."""

LOGPROBS_ROOMS = (0, 5, MAX_LOGPROBS)
"""Alternatives that a `PackedKey` has room for."""

_AHEAD = 32
"""How many of a slot's random numbers are made at once."""

_PHILOX_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_PHILOX_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Ten rounds of Philox4x32 on columns of 32-bit words held in uint64: [4, N] and [2, N] to [4, N]."""
    even, odd = counter[0::2], counter[1::2]
    for _ in range(10):
        product = even * _PHILOX_MULTIPLIERS
        even = (product >> _32)[::-1] ^ odd ^ key
        odd = (product & _LOW32)[::-1]
        key = (key + _PHILOX_WEYL) & _LOW32
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seeds: Ints, positions: Ints) -> npt.NDArray[np.float64]:
    """One number in the open interval (0, 1) for each (seed, position), on a grid of 2**-52."""
    seed, position = seeds.astype(np.uint64), positions.astype(np.uint64)
    zero = np.zeros_like(position)
    words = philox4x32(
        np.stack((position & _LOW32, position >> _32, zero, zero)), np.stack((seed & _LOW32, seed >> _32))
    )
    # 52 bits and a half: the midpoint of a cell is exact in float64 and can be neither 0 nor 1.
    return ((words[0] << np.uint64(20) | words[1] >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """What one step's R rows ask for: a snapshot, on which later changes to the table have no effect.

    Tensors that nobody in the step needs are None. `sparse_*` are additions to single logits: the logit bias,
    and -inf for stop tokens that may not come yet.
    """

    reals: Tensor  # float64 [7, R]: temperature, top_p, min_p, presence, frequency, repetition, uniform
    slots: Tensor  # int64 [R]
    greedy: Tensor  # bool [R]
    top_k: Tensor  # int64 [R], 0 where there is no limit
    penalty_rows: Tensor | None  # int64 [P]
    sparse_rows: Tensor | None  # int64 [N]
    sparse_ids: Tensor | None  # int64 [N]
    sparse_values: Tensor | None  # float32 [N]
    raw_logprob_rows: Tensor | None  # int64 [Q]
    processed_logprob_rows: Tensor | None  # int64 [Q]
    all_greedy: bool
    any_greedy: bool
    any_temperature: bool
    any_min_p: bool
    any_top_p: bool
    any_repetition: bool
    any_count_penalty: bool  # frequency or presence
    max_top_k: int  # 0: no row has a top_k
    max_logprobs: int  # the most alternatives a row asks for

    def to(self, device: torch.device) -> SamplingInputs:
        """The same inputs on `device`, copied in the current stream's order."""
        moved: dict[str, Any] = {
            f.name: value.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)


class SamplingTable:
    """The parameters of the running sequences by slot, on the host; a step's rows are gathered at once.

    A slot is a small number that a sequence holds while it runs; the slots of one step must differ. Not
    thread-safe.
    """

    def __init__(self, max_batch_size: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._reals = np.zeros((6, max_batch_size))
        self._whole = np.zeros((6, max_batch_size), dtype=np.int64)
        self._flags = np.zeros(max_batch_size, dtype=np.int64)
        self._seeds = np.zeros(max_batch_size, dtype=np.int64)
        self._ahead = np.zeros((max_batch_size, _AHEAD))
        self._ahead_from = np.full(max_batch_size, -_AHEAD, dtype=np.int64)
        self._keys: dict[PackedKey, PackedKey] = {}
        self._version = 0  # counts the changes of anybody's parameters
        nothing = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
        self._bias: list[tuple[Ints, npt.NDArray[np.float32]]] = [nothing] * max_batch_size
        self._stop_ids = np.full((max_batch_size, 1), -1, dtype=np.int64)  # as wide as the longest; -1: no id
        self._additions = np.zeros(max_batch_size, dtype=np.int64)  # the most that a slot can have
        self._occupied = np.zeros(max_batch_size, dtype=np.bool_)

    def assign(self, slot: int, params: SamplingParams, stop_token_ids: Sequence[int] = ()) -> None:
        """Gives a free slot to a sequence. `stop_token_ids`: every token that ends it, end-of-text included.

        The seed must be concrete, unless `params` are greedy. Where `penalized(params)`, `Sampler.load_history`
        comes before the first draw.
        """
        if self._occupied[slot]:
            raise ValueError(f"slot {slot} is taken")
        self._occupied[slot] = True
        self.update(slot, params, stop_token_ids)

    def update(self, slot: int, params: SamplingParams, stop_token_ids: Sequence[int] = ()) -> None:
        """Sets a taken slot's parameters from the next `rows` on."""
        if not self._occupied[slot]:
            raise ValueError(f"slot {slot} is free")
        greedy = params.greedy
        if params.seed is None and not greedy:
            raise ValueError("the seed must be concrete: params.with_seed()")
        self._version += 1
        self._reals[:, slot] = (
            1.0 if greedy else params.temperature,
            1.0 if greedy else params.top_p,
            0.0 if greedy else params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        top_k = 0 if greedy or params.top_k >= self._vocab_size else max(params.top_k, 0)
        self._whole[:, slot] = (
            greedy,
            top_k,
            penalized(params),
            -1 if params.logprobs is None else params.logprobs,
            params.logprobs_mode == "processed_logprobs",
            bool(params.logit_bias),
        )
        filtered = not greedy and (top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
        self._flags[slot] = (
            _DRAWN * (not greedy)
            + _FILTERED * filtered
            + _WITH_PENALTIES * penalized(params)
            + _WITH_BIAS * bool(params.logit_bias)
            + _WITH_LOGPROBS * (params.logprobs is not None)
        )
        if self._seeds[slot] != (params.seed or 0):
            self._seeds[slot] = params.seed or 0
            self._ahead_from[slot] = -_AHEAD
        bias = params.logit_bias or {}
        self._bias[slot] = (
            np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
        )
        # A stop id outside the model's vocabulary never comes, so it needs no ban.
        ids = sorted({i for i in stop_token_ids if i < self._vocab_size})
        missing = len(ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(ids)] = ids
        self._additions[slot] = len(bias) + len(ids)

    def _uniforms(self, slots: Ints, positions: Ints) -> npt.NDArray[np.float64]:
        """`uniforms` of the rows, of which a slot's next ones are computed many at a time."""
        offset = positions - self._ahead_from[slots]
        missing = (offset < 0) | (offset >= _AHEAD)
        if missing.any():
            renewed, start = slots[missing], positions[missing]
            grid = np.arange(_AHEAD)
            ahead = uniforms(np.repeat(self._seeds[renewed], _AHEAD), (start[:, None] + grid).ravel())
            self._ahead[renewed] = ahead.reshape(-1, _AHEAD)
            self._ahead_from[renewed] = start
            offset[missing] = 0
        return self._ahead[slots, offset]

    def release(self, slot: int) -> None:
        self._occupied[slot] = False
        self._additions[slot] = 0

    def rows(self, slots: Ints, positions: Ints, forbid_stop: Bools | None = None) -> SamplingInputs:
        """The inputs of a step whose row r draws token number `positions[r]` of the sequence in `slots[r]`.

        A position is the index of the token to draw in its sequence, prompt included or not, as long as the
        caller keeps to one. `forbid_stop[r]`: its stop tokens are banned, `min_tokens` not being reached.
        """
        reals = np.empty((UNIFORM + 1, len(slots)))
        np.take(self._reals, slots, axis=1, out=reals[:UNIFORM])
        whole = self._whole[:, slots]
        greedy = whole[GREEDY].astype(np.bool_)
        all_greedy = bool(greedy.all())
        reals[UNIFORM] = 0.5 if all_greedy else uniforms(self._seeds[slots], positions)
        logprobs = whole[LOGPROBS]
        asked, processed = logprobs >= 0, whole[PROCESSED].astype(np.bool_)
        biased = whole[_BIASED].astype(np.bool_)
        sparse = self._sparse(slots, biased, forbid_stop)
        sparse_rows, sparse_ids, sparse_values = map(torch.from_numpy, sparse) if sparse else (None, None, None)
        return SamplingInputs(
            reals=torch.from_numpy(reals),
            slots=torch.from_numpy(np.array(slots, dtype=np.int64)),
            greedy=torch.from_numpy(greedy),
            top_k=torch.from_numpy(whole[TOP_K]),
            penalty_rows=_indices(whole[PENALIZED].astype(np.bool_)),
            sparse_rows=sparse_rows,
            sparse_ids=sparse_ids,
            sparse_values=sparse_values,
            raw_logprob_rows=_indices(asked & ~processed),
            processed_logprob_rows=_indices(asked & processed),
            all_greedy=all_greedy,
            any_greedy=bool(greedy.any()),
            any_temperature=bool((reals[TEMPERATURE] != 1.0).any()),
            any_min_p=bool((reals[MIN_P] > 0.0).any()),
            any_top_p=bool((reals[TOP_P] < 1.0).any()),
            any_repetition=bool((reals[REPETITION] != 1.0).any()),
            any_count_penalty=bool(reals[PRESENCE : FREQUENCY + 1].any()),
            max_top_k=int(whole[TOP_K].max(initial=0)),
            max_logprobs=int(logprobs.max(initial=0)),
        )

    def packed_nbytes(self, rows: int) -> int:
        """The most bytes that `pack` can need for `rows` padded rows, with the parameters as they are."""
        return PackedKey(rows, sparse=_room(int(self._additions.sum()))).input_nbytes

    def pack(self, slots: Ints, positions: Ints, forbid_stop: Bools | None, rows: int, into: PackedBuffer) -> PackedKey:
        """`rows(slots, positions, forbid_stop)` for the sampler of a card, padded to `rows` rows, written into a
        buffer, to which nobody else writes.

        `packed_nbytes(rows)` bytes are enough; in a shorter one it may be a TooShortError. Padding is greedy, and its
        slot is the one past the last. From step to step only the uniforms change: the rest is left as it is.
        """
        count, end = len(slots), len(self._flags)
        step = (self._version, rows, slots.tobytes())
        if forbid_stop is None and into.holds is not None and into.holds[0] == step:
            key = into.holds[1]
            if not key.all_greedy:
                into.sections(key)["reals"][UNIFORM, :count] = self._uniforms(slots, positions)
            return key
        into.holds = None
        flags = self._flags[slots]
        some = int(np.bitwise_or.reduce(flags, initial=0))
        whole = self._whole[:, slots]
        biased = whole[_BIASED].astype(np.bool_) if some & _WITH_BIAS else np.zeros(count, dtype=np.bool_)
        sparse = self._sparse(slots, biased, forbid_stop) if some & _WITH_BIAS or forbid_stop is not None else None
        most = int(whole[LOGPROBS].max()) if some & _WITH_LOGPROBS else None
        key = PackedKey(
            rows,
            all_greedy=not some & _DRAWN,
            filtered=bool(some & _FILTERED),
            penalized=bool(some & _WITH_PENALTIES),
            sparse=_room(len(sparse[0])) if sparse else 0,
            logprobs=None if most is None else next(room for room in LOGPROBS_ROOMS if most <= room),
        )
        key = self._keys.setdefault(key, key)  # the one whose sections are known already
        sections = into.sections(key)
        reals = sections["reals"]
        reals[:UNIFORM, :count] = self._reals[:, slots]
        reals[UNIFORM, :count] = self._uniforms(slots, positions) if some & _DRAWN else 0.5
        reals[:, count:] = PADDING_REALS[:, None]
        sections["whole"][:, :count] = whole
        sections["whole"][:, count:] = np.array([*PADDING_WHOLE, end])[:, None]
        sections["whole"][SLOT, :count] = slots
        if sparse is None:
            sections["sparse_start"][:] = 0
        else:
            order = np.argsort(sparse[0], kind="stable")
            sections["sparse_start"][:] = np.searchsorted(sparse[0][order], np.arange(rows + 1))
            sections["sparse_ids"][: len(order)] = sparse[1][order]
            sections["sparse_values"][: len(order)] = sparse[2][order]
        into.holds = None if forbid_stop is not None else (step, key)
        return key

    def _sparse(
        self, slots: Ints, biased: Bools, forbid_stop: Bools | None
    ) -> tuple[Ints, Ints, npt.NDArray[np.float32]] | None:
        """Rows, token ids and values of the additions to single logits; a row's and id's may come twice."""
        row_parts: list[Ints] = []
        id_parts: list[Ints] = []
        value_parts: list[npt.NDArray[np.float32]] = []
        for row in np.flatnonzero(biased).tolist():
            ids, values = self._bias[slots[row]]
            row_parts.append(np.full(len(ids), row))
            id_parts.append(ids)
            value_parts.append(values)
        if forbid_stop is not None and forbid_stop.any():
            banned = np.where(forbid_stop[:, None], self._stop_ids[slots], -1)
            rows, columns = np.nonzero(banned >= 0)
            row_parts.append(rows)
            id_parts.append(banned[rows, columns])
            value_parts.append(np.full(len(rows), -np.inf, dtype=np.float32))
        if not id_parts:
            return None
        return np.concatenate(row_parts), np.concatenate(id_parts), np.concatenate(value_parts)


def penalized(params: SamplingParams) -> bool:
    """Whether `params` need the token history of their sequence on the device."""
    return (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0.0, 0.0, 1.0)


def _indices(mask: Bools) -> Tensor | None:
    return torch.from_numpy(np.flatnonzero(mask)) if mask.any() else None


def _room(count: int) -> int:
    """Room for `count` additions: 0, or a number of a short list."""
    room = _SPARSE_ROOM if count else 0
    while room < count:
        room *= 4
    return room
