"""The smallest weight that a row's min_p, top_k and top_p keep, without a sort.

A token's weight is exp((x - largest x of the row) / temperature) in float32: its probability up to a factor that all
share, so thresholds and ties are those of probabilities. Weights are not negative, and the bit patterns of such floats
are ordered as they are. A threshold is the largest bit pattern whose tokens, with all above, reach a target: a number
of tokens for top_k, a mass for top_p. It lies in an interval of bit patterns, which four kinds of kernels narrow:

    bounds    one program a row: what the chunks' maxima and masses say about it
    narrow    one program a chunk, in rounds: the mass above each of a row of pivots, in float32
    collect   one program a chunk: the exact mass beyond the interval, and a list of the weights in it
    threshold one program a row: bisects the list

The interval comes with a margin for what float32 may have lost, and only decides how long the list is. The answer
comes of exact masses: whole numbers, weights times a power of two, whose sums do not depend on an order.
"""

# ruff: noqa: SIM102 - Triton compiles an `if` on a constant away, and has no short-circuit `and` with a tensor.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from interactive_infer.core import sampling_table as table

_TEMPERATURE, _TOP_P, _MIN_P = (tl.constexpr(i) for i in (table.TEMPERATURE, table.TOP_P, table.MIN_P))
_TOP_K = tl.constexpr(table.TOP_K)
_LOG2E = tl.constexpr(1.4426950408889634)
_INF = tl.constexpr(float("inf"))
CHUNK_UNIT = tl.constexpr(2.0**50)
"""Of a chunk's mass, in which its largest weight is 1: a chunk of 1024 tokens stays below 2**61."""
_ONE = tl.constexpr(0x3F800000)  # the bits of 1.0
_MOST_BITS = tl.constexpr(0x7FFFFFFF)
_OCTAVE = tl.constexpr(1 << 23)  # from the bits of a float to those of its double
_MARGIN = tl.constexpr(1e-4)  # several times what a float32 sum of a row's chunks can lose: under 300 roundings

BOUNDS = 4
"""int32 of a row: the interval, whose end is 0 where there is nothing to find; the bits of the unit of its masses; the
length of its list."""

EXACT = 2
"""int64 of a row: its mass above the limit of min_p, and above the interval."""

_BOUNDS, _EXACT = tl.constexpr(BOUNDS), tl.constexpr(EXACT)
_LOW, _HIGH, _UNIT, _LISTED = (tl.constexpr(i) for i in range(BOUNDS))
_REACH, _BEYOND = (tl.constexpr(i) for i in range(EXACT))


@triton.jit
def overlapped(OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def scale_of(reals, row, rows):
    """What takes a difference of logits to a binary exponent."""
    return (1.0 / tl.load(reals + rows * _TEMPERATURE + row) * _LOG2E).to(tl.float32)


@triton.jit
def weight_of(x, top, scale):
    return tl.exp2((x - top) * scale)


@triton.jit
def bits_of(weight):
    return weight.to(tl.int32, bitcast=True)


@triton.jit
def _kth_largest(chunk_max, top, scale, k, WIDTH: tl.constexpr):
    """The bits of the k-th largest weight among the chunks' maxima."""
    bits = bits_of(weight_of(tl.load(chunk_max + tl.arange(0, WIDTH)), top, scale))
    larger = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, WIDTH, 32):
        others = bits_of(weight_of(tl.load(chunk_max + start + tl.arange(0, 32)), top, scale))
        larger += tl.sum((others[None, :] > bits[:, None]).to(tl.int32), 1)
    return tl.min(tl.where(larger < k, bits, _MOST_BITS), 0)


@triton.jit(do_not_specialize=["rows"])
def bounds_kernel(
    reals, whole, chunk_max, chunk_mass, row_top, thresholds, bounds, sums, exact, rows,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ROUNDS: tl.constexpr, PIVOTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's largest score, the limit of min_p as its threshold so far, and its first interval; zeroes its sums."""
    overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(chunk_max + row * WIDTH + tl.arange(0, WIDTH))
    masses = tl.load(chunk_mass + row * WIDTH + tl.arange(0, WIDTH))
    top = tl.max(largest, 0)
    tl.store(row_top + row, top)
    top_k = tl.load(whole + rows * _TOP_K + row)
    top_p = tl.load(reals + rows * _TOP_P + row)
    min_p = tl.load(reals + rows * _MIN_P + row).to(tl.float32)
    limit, low, high, unit = 0, 0, 0, 0
    if (top > -_INF) & (top < _INF) & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        limit = tl.maximum(bits_of(min_p), 1)
        if (top_k > 0) | (top_p < 1.0):
            scale = scale_of(reals, row, rows)
            weights = weight_of(largest, top, scale)
            mass = (tl.sum(masses.to(tl.float64) * weights.to(tl.float64), 0) / CHUNK_UNIT).to(tl.float32)
            # A power of two that takes the row's mass to just below 2**60.
            unit = (186 - ((bits_of(mass) >> 23) - 127)) << 23
            # A lower bound: the k-th largest of the chunks' maxima; or the weight below which all tokens together
            # could not have what top_p leaves out.
            low, high = limit, _ONE + 1
            if (top_k > 0) & (top_k <= CHUNKS):
                low = tl.maximum(low, _kth_largest(chunk_max + row * WIDTH, top, scale, top_k, WIDTH))
            elif top_k == 0:
                least_mass = tl.where(min_p > 0.0, 1.0, mass)
                low = tl.maximum(low, bits_of(((1.0 - top_p) * 0.99 / VOCAB).to(tl.float32) * least_mass))
    tl.store(thresholds + row, limit)
    tl.store(bounds + row * _BOUNDS + _LOW, low)
    tl.store(bounds + row * _BOUNDS + _HIGH, high)
    tl.store(bounds + row * _BOUNDS + _UNIT, unit)
    tl.store(bounds + row * _BOUNDS + _LISTED, 0)
    tl.store(exact + row * _EXACT + tl.arange(0, _EXACT), tl.zeros((_EXACT,), tl.int64))
    for turn in tl.static_range(ROUNDS):
        at = (row * ROUNDS + turn) * PIVOTS + tl.arange(0, PIVOTS)
        tl.store(sums + at, tl.zeros((PIVOTS,), tl.float32))


@triton.jit
def _searched(top_k, CHUNKS: tl.constexpr):
    """Whether there are rounds: a top_k has a close bound where there are as many chunks."""
    return (top_k == 0) | (top_k > CHUNKS)


@triton.jit
def _step(low, high, parts: tl.constexpr):
    """What lies between pivots that cut [low, high), or its upper 48 octaves: below those there is hardly any mass."""
    return tl.maximum(tl.minimum(high - low, 48 * _OCTAVE) // parts, 1)


@triton.jit
def _interval(bounds, sums, top_k, top_p, row, DONE: tl.constexpr, ROUNDS: tl.constexpr, PIVOTS: tl.constexpr):
    """A row's interval after the rounds that are done."""
    low, high = tl.load(bounds + row * _BOUNDS + _LOW), tl.load(bounds + row * _BOUNDS + _HIGH)
    index = tl.arange(0, PIVOTS)
    least, most = top_k.to(tl.float32), top_k.to(tl.float32)
    for turn in tl.static_range(DONE):
        above = tl.load(sums + (row * ROUNDS + turn) * PIVOTS + index)
        if turn == 0:
            if top_k == 0:
                target = top_p.to(tl.float32) * tl.sum(tl.where(index == PIVOTS - 1, above, 0.0), 0)
                least, most = target * (1 - _MARGIN), target * (1 + _MARGIN)
        pivot = tl.maximum(high - (index + 1) * _step(low, high, PIVOTS), low)
        reached = tl.where((above >= most) & (index < PIVOTS - 1), pivot, low)
        missed = tl.where((above < least) & (index < PIVOTS - 1), pivot, high)
        low, high = tl.max(reached, 0), tl.min(missed, 0)
    return low, high


@triton.jit(do_not_specialize=["rows"])
def narrow_kernel(
    source, stride, reals, whole, chunk_max, row_top, thresholds, bounds, sums, rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    TURN: tl.constexpr, ROUNDS: tl.constexpr, PIVOTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Adds to a row's sums its chunk's tokens, or their mass, above each pivot; the last is the limit of min_p."""
    overlapped(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top_k = tl.load(whole + rows * _TOP_K + row)
    if (tl.load(bounds + row * _BOUNDS + _HIGH) > 0) & _searched(top_k, CHUNKS):
        low, high = _interval(
            bounds, sums, top_k, tl.load(reals + rows * _TOP_P + row), row, TURN, ROUNDS, PIVOTS
        )  # fmt: skip
        scale, top = scale_of(reals, row, rows), tl.load(row_top + row)
        limit = tl.load(thresholds + row)
        needed = limit if TURN == 0 else low
        if bits_of(weight_of(tl.load(chunk_max + row * WIDTH + chunk), top, scale)) >= needed:
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(source + row * stride + at, mask=at < VOCAB, other=-_INF).to(tl.float32)
            weight = weight_of(x, top, scale)
            amount = tl.where(top_k > 0, 1.0, weight)
            step = _step(low, high, PIVOTS)
            index = tl.arange(0, PIVOTS)
            above = tl.zeros((PIVOTS,), tl.float32)
            for i in tl.static_range(PIVOTS):
                bits = tl.maximum(high - (i + 1) * step, low) if i < PIVOTS - 1 else limit
                # A product, not a choice: a multiply-add is half the work of a selection and an addition.
                inside = (weight >= bits.to(tl.float32, bitcast=True)).to(tl.float32)
                above = tl.where(index == i, tl.sum(amount * inside, 0), above)
            tl.atomic_add(sums + (row * ROUNDS + TURN) * PIVOTS + index, above, sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def collect_kernel(
    source, stride, reals, whole, chunk_max, row_top, thresholds, bounds, sums, exact, candidates, rows,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, STRIDE: tl.constexpr,
    ROUNDS: tl.constexpr, PIVOTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Appends a chunk's weights in the interval to its row's list, in any order, and adds its exact masses.

    With a top_k, the list holds what lies above the interval too, for top_p comes after it.
    """
    overlapped(OVERLAP)
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(bounds + row * _BOUNDS + _HIGH) > 0:
        top_k = tl.load(whole + rows * _TOP_K + row)
        low, high = tl.load(bounds + row * _BOUNDS + _LOW), tl.load(bounds + row * _BOUNDS + _HIGH)
        if _searched(top_k, CHUNKS):
            low, high = _interval(
                bounds, sums, top_k, tl.load(reals + rows * _TOP_P + row), row, ROUNDS, ROUNDS, PIVOTS
            )  # fmt: skip
        scale, top = scale_of(reals, row, rows), tl.load(row_top + row)
        limit = tl.load(thresholds + row)
        needed = tl.where(top_k > 0, low, limit)
        if bits_of(weight_of(tl.load(chunk_max + row * WIDTH + chunk), top, scale)) >= needed:
            at = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(source + row * stride + at, mask=at < VOCAB, other=-_INF).to(tl.float32)
            weight = weight_of(x, top, scale)
            bits = bits_of(weight)
            listed = (bits >= low) & ((bits < high) | (top_k > 0))
            place = tl.cumsum(listed.to(tl.int32), 0)
            count = tl.max(place, 0)
            if count > 0:
                start = tl.atomic_add(bounds + row * _BOUNDS + _LISTED, count, sem="relaxed")
                column = candidates.to(tl.pointer_type(tl.int32)) + row * STRIDE + start - 1
                tl.store(column + place, bits, mask=listed)
            if top_k == 0:
                unit = tl.load(bounds + row * _BOUNDS + _UNIT).to(tl.float32, bitcast=True)
                amount = (weight * unit).to(tl.int64)
                reach = tl.sum(tl.where(bits >= limit, amount, 0), 0)
                beyond = tl.sum(tl.where(bits >= high, amount, 0), 0)
                tl.atomic_add(exact + row * _EXACT + _REACH, reach, sem="relaxed")
                tl.atomic_add(exact + row * _EXACT + _BEYOND, beyond, sem="relaxed")


@triton.jit
def _join(a, b, c, least, most, a_, b_, c_, least_, most_):
    return a + a_, b + b_, c + c_, tl.minimum(least, least_), tl.maximum(most, most_)


@triton.jit
def _bisect(column, count, unit, by_count, target, low, high, beyond, TILE: tl.constexpr):
    """The largest bits in [low, high) whose tokens, with all above, reach the target: three pivots a pass.

    `column`: `count` weights' bits, all in [low, high) among them; `beyond`: what lies above, and not in the list.
    """
    lane = tl.arange(0, TILE)
    while high - low > 1:
        step = _step(low, high, 4)
        third = high - step
        second, first = tl.maximum(third - step, low), tl.maximum(third - 2 * step, low)
        above_1, above_2, above_3 = (tl.zeros((TILE,), tl.int64),) * 3
        least, most = tl.full((TILE,), _MOST_BITS, tl.int32), tl.zeros((TILE,), tl.int32)
        for start in range(0, count, TILE):
            bits = tl.load(column + start + lane, mask=start + lane < count, other=0)
            amount = _amount(bits, unit, by_count)
            above_1 += tl.where(bits >= first, amount, 0)
            above_2 += tl.where(bits >= second, amount, 0)
            above_3 += tl.where(bits >= third, amount, 0)
            inside = (bits >= low) & (bits < high)
            least = tl.minimum(least, tl.where(inside, bits, _MOST_BITS))
            most = tl.maximum(most, tl.where(inside, bits, 0))
        sum_1, sum_2, sum_3, lowest, highest = tl.reduce((above_1, above_2, above_3, least, most), 0, _join)
        if beyond + sum_3 >= target:
            low = third
        elif beyond + sum_2 >= target:
            low, high = second, third
        elif beyond + sum_1 >= target:
            low, high = first, second
        else:
            high = first
        low, high = tl.maximum(low, lowest), tl.minimum(high, highest + 1)
    return low


@triton.jit
def _amount(bits, unit, by_count):
    return tl.where(by_count, 1, (bits.to(tl.float32, bitcast=True) * unit).to(tl.int64))


@triton.jit(do_not_specialize=["rows"])
def threshold_kernel(
    reals, whole, thresholds, bounds, sums, exact, candidates, rows,
    CHUNKS: tl.constexpr, STRIDE: tl.constexpr, ROUNDS: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """The bits of the smallest weight that a row's filters keep; 0 for a row without filters or without an answer."""
    overlapped(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    high = tl.load(bounds + row * _BOUNDS + _HIGH)
    if high > 0:
        low, count = tl.load(bounds + row * _BOUNDS + _LOW), tl.load(bounds + row * _BOUNDS + _LISTED)
        unit = tl.load(bounds + row * _BOUNDS + _UNIT).to(tl.float32, bitcast=True)
        limit = tl.load(thresholds + row)
        reach, beyond = tl.load(exact + row * _EXACT + _REACH), tl.load(exact + row * _EXACT + _BEYOND)
        top_k = tl.load(whole + rows * _TOP_K + row)
        top_p = tl.load(reals + rows * _TOP_P + row)
        if _searched(top_k, CHUNKS):
            low, high = _interval(bounds, sums, top_k, top_p, row, ROUNDS, ROUNDS, PIVOTS)
        column = candidates.to(tl.pointer_type(tl.int32)) + row * STRIDE
        for stage in range(2):
            by_count = stage == 0
            if (by_count & (top_k > 0)) | ((stage == 1) & (top_p < 1.0)):
                target = top_k.to(tl.int64)
                if by_count:
                    reach = count.to(tl.int64)
                else:
                    if top_k > 0:
                        low, high = limit, tl.full((), _ONE + 1, tl.int32)
                        lane = tl.arange(0, TILE)
                        masses = tl.zeros((TILE,), tl.int64)
                        for start in range(0, count, TILE):
                            bits = tl.load(column + start + lane, mask=start + lane < count, other=0)
                            masses += tl.where(bits >= limit, _amount(bits, unit, False), 0)
                        reach = tl.sum(masses, 0)
                    wanted = top_p * reach.to(tl.float64)
                    target = wanted.to(tl.int64)
                    target = tl.maximum(target + (target.to(tl.float64) < wanted).to(tl.int64), 1)
                    target = tl.minimum(target, reach)
                if reach >= target:
                    limit = _bisect(column, count, unit, by_count, target, low, high, beyond, TILE)
        tl.store(thresholds + row, limit)
