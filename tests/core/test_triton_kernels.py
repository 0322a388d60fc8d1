"""The Triton kernels against plain PyTorch: on the card where there is one, and in Triton's interpreter on the CPU.

The CPU checks run in one process of their own, this file as a script (see interpreter.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from interactive_infer.core.attention.batch import StepBatch
from tests.core.interpreter import outcome_of, report

# ------------------------------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class Step:
    """Decoding rows by their keys; prefilling rows by (queries, keys); tokens of nobody at the end."""

    decodes: Sequence[int] = ()
    prefills: Sequence[tuple[int, int]] = ()
    padding: int = 0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scaling: float | None = None


STEPS = {
    "one decode": Step(decodes=[37]),
    "one decode in many parts": Step(decodes=[300], page_size=64),
    "one decode without keys": Step(decodes=[0]),
    "decodes of unequal length": Step(decodes=[1, 130, 0, 16, 17, 0], page_size=64, heads=3, kv_heads=1),
    "decodes with all the extras": Step(
        decodes=[5, 90, 0, 200], window=33, softcap=5.0, sinks=True, scaling=0.3, page_size=64
    ),
    "decodes in a window of one page's part": Step(decodes=[5, 90, 200], window=7, head_dim=80),
    "one prefill": Step(prefills=[(40, 40)], page_size=64),
    "prefill with context": Step(prefills=[(20, 150)], heads=2, kv_heads=2),
    "prefills in a window": Step(prefills=[(70, 70), (9, 100)], window=20, page_size=64, heads=6, kv_heads=2),
    "prefills with all the extras": Step(
        prefills=[(3, 80), (0, 0), (50, 50), (0, 0)], padding=9, window=30, softcap=5.0, sinks=True, scaling=0.2
    ),
    "mixed": Step(
        decodes=[12, 0, 77], prefills=[(33, 40), (1, 65), (0, 0)], padding=5, heads=14, kv_heads=2, page_size=64
    ),
    "mixed, head size 96": Step(decodes=[12, 70], prefills=[(17, 40)], head_dim=96, heads=3, kv_heads=3, sinks=True),
}
LARGE_STEPS = {
    "head size 128": Step(
        decodes=[1, 511, 512, 4000, 0], prefills=[(700, 700), (300, 3000)], padding=24, heads=32, kv_heads=8,
        head_dim=128, page_size=64,
    ),
    "head size 128 in a window": Step(
        decodes=[100, 4000, 0, 900], prefills=[(700, 700), (300, 3000)], window=512, heads=16, kv_heads=8,
        head_dim=128, page_size=64, sinks=True,
    ),
    "head size 256": Step(
        decodes=[100, 2000], prefills=[(200, 700)], heads=8, kv_heads=4, head_dim=256, page_size=64, softcap=50.0,
        window=300,
    ),
    "head size 192": Step(decodes=[100, 2000], prefills=[(200, 700)], heads=8, kv_heads=4, head_dim=192, page_size=64),
    "one long decode": Step(decodes=[30_000], heads=32, kv_heads=8, head_dim=128, page_size=64),
    "many decodes": Step(decodes=[17 * i % 1200 for i in range(100)], heads=16, kv_heads=8, head_dim=128, page_size=64),
}  # fmt: skip


class Case:
    """A step's tensors. The pools are NaN wherever no key of the step lies, the null page included."""

    def __init__(self, step: Step, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self.step = step
        self.dtype = dtype
        generator = torch.Generator().manual_seed(seed)
        size, rows = step.page_size, [(1, n) if n else (0, 0) for n in step.decodes] + list(step.prefills)
        lengths = [n for _, n in rows]
        pages = [-(-n // size) for n in lengths]
        order = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
        table = torch.zeros((len(rows) + 2, max(pages) + 3), dtype=torch.int32)
        slots = torch.randperm(len(rows) + 1, generator=generator)[: len(rows)]
        shape = (sum(pages) + 1, size, step.kv_heads, step.head_dim)
        self.keys, self.values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        for slot, length, count in zip(slots.tolist(), lengths, pages, strict=True):
            own = [order.pop() for _ in range(count)]
            table[slot, :count] = torch.tensor(own, dtype=torch.int32)
            key, value = (
                torch.randn((length, step.kv_heads, step.head_dim), generator=generator).to(dtype) for _ in "kv"
            )
            place = (torch.tensor(own, dtype=torch.int64)[:, None] * size + torch.arange(size)).flatten()[:length]
            self.keys.flatten(0, 1)[place], self.values.flatten(0, 1)[place] = key.float(), value.float()
            self.rows.append((key.double(), value.double()))
        decodes = len(step.decodes)
        starts = [decodes]
        for count, _ in step.prefills:
            starts.append(starts[-1] + count)
        tokens = starts[-1] + step.padding
        # As a view of a fused projection: not contiguous.
        fused = torch.randn((tokens, step.heads + 3, step.head_dim), generator=generator).to(dtype).to(device)
        self.query = fused[:, : step.heads]
        self.keys, self.values = self.keys.to(dtype).to(device), self.values.to(dtype).to(device)
        self.sinks = torch.randn(step.heads, generator=generator).to(dtype).to(device) if step.sinks else None
        self.starts = starts
        unused = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.batch = StepBatch(
            num_decodes=decodes,
            positions=unused,
            write_to=unused,
            query_start=torch.tensor(starts, device=device),
            kv_len=torch.tensor(lengths, device=device),
            row_slot=slots.to(device),
            page_table=table.to(device),
            page_size=size,
        )

    def run(self) -> torch.Tensor:
        from interactive_infer.core.attention.triton_paged import paged_attention

        return paged_attention(
            self.query,
            self.keys,
            self.values,
            self.batch,
            scaling=self.step.scaling,
            sliding_window=self.step.window,
            softcap=self.step.softcap,
            sinks=self.sinks,
        )

    def expected(self) -> torch.Tensor:
        """In float64, on the CPU; zeros where no row is."""
        step = self.step
        query = self.query.double().cpu()
        out = torch.zeros_like(query)
        spans = [(i, 1 if n else 0) for i, n in enumerate(step.decodes)]
        spans += [(start, count) for start, (count, _) in zip(self.starts, step.prefills, strict=False)]
        for (start, count), (key, value) in zip(spans, self.rows, strict=True):
            if not count:
                continue
            length = key.shape[0]
            key, value = (x.repeat_interleave(step.heads // step.kv_heads, 1) for x in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query[start : start + count], key)
            scores *= step.head_dim**-0.5 if step.scaling is None else step.scaling
            if step.softcap:
                scores = torch.tanh(scores / step.softcap) * step.softcap
            position = torch.arange(length - count, length)[:, None]
            seen = torch.arange(length)[None] <= position
            if step.window:
                seen &= torch.arange(length)[None] > position - step.window
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                sink = self.sinks.double().cpu()[:, None, None].expand(-1, count, 1)
                scores = torch.cat([scores, sink], 2)
            weights = scores.softmax(2)[:, :, :length]
            out[start : start + count] = torch.einsum("hqk,khd->qhd", weights, value)
        return out


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """By the norm of the difference, and no element further off than ten times that share of the largest."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    difference = (actual - expected).abs()
    assert difference.norm() <= tolerance * expected.norm().clamp(min=1e-30), (difference.norm(), expected.norm())
    assert difference.max() <= 10 * tolerance * expected.abs().max()


def check_attention(step: Step, dtype: torch.dtype, device: str) -> None:
    case = Case(step, dtype, device)
    actual, expected = case.run(), case.expected()
    if expected.any():
        assert_near(actual, expected, TOLERANCE[dtype])
    empty = ~expected.flatten(1).any(1)
    assert not actual.cpu()[empty].any()


# --------------------------------------------------------------------------------------------- between projections


def tensor(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As transformers' LlamaRMSNorm: rounded before the weight."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def check_norms(dtype: torch.dtype, device: str) -> None:
    from interactive_infer.core.kernels import triton_ops

    for tokens, hidden in ((1, 64), (5, 576), (3, 4096)):
        x, residual = (tensor(tokens, hidden, dtype=dtype, device=device, seed=s) for s in (0, 1))
        weight = tensor(hidden, dtype=dtype, device=device, seed=2)
        assert_near(triton_ops.rms_norm(x, weight, 1e-5), rms(x, weight, 1e-5), TOLERANCE[dtype])
        normed, total = triton_ops.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, residual + x)
        assert_near(normed, rms(residual + x, weight, 1e-6), TOLERANCE[dtype])


def check_silu_mul(dtype: torch.dtype, device: str) -> None:
    from interactive_infer.core.kernels import triton_ops

    for tokens, inner in ((1, 96), (20, 1536), (3, 5000)):
        gate_up = tensor(tokens, 2 * inner, dtype=dtype, device=device)
        gate, up = gate_up.chunk(2, -1)
        assert_near(triton_ops.silu_mul(gate_up), F.silu(gate) * up, TOLERANCE[dtype])


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    rot = cos.shape[-1]
    turned, rest = x[..., :rot], x[..., rot:]
    first, second = turned.chunk(2, -1)
    return torch.cat([turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None], rest], -1)


def check_rope_store(
    dtype: torch.dtype, device: str, *, tokens: int, heads: int, kv_heads: int, head_dim: int, rot: int, norms: bool
) -> None:
    from interactive_infer.core.kernels import triton_ops

    width = (heads + 2 * kv_heads) * head_dim
    qkv = tensor(tokens, width, dtype=dtype, device=device)
    angle = torch.rand((50, rot), generator=torch.Generator().manual_seed(1))
    cos, sin = (f(angle).to(dtype).to(device) for f in (torch.cos, torch.sin))
    positions = (torch.arange(tokens) * 7 % 50).to(device)
    pool = (-(-tokens // 16) + 2, 16, kv_heads, head_dim)
    keys, values = (torch.zeros(pool, dtype=dtype, device=device) for _ in "kv")
    write_to = (torch.randperm(tokens, generator=torch.Generator().manual_seed(2)) + 16).to(device)
    q_norm, k_norm = (tensor(head_dim, dtype=dtype, device=device, seed=s) if norms else None for s in (3, 4))
    query = triton_ops.rope_store(
        qkv, cos, sin, positions, write_to, keys, values,
        heads=heads, kv_heads=kv_heads, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
    )  # fmt: skip
    q, k, v = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = rms(q, q_norm, 1e-6), rms(k, k_norm, 1e-6)
    q, k = (rotated(x.float(), cos[positions].float(), sin[positions].float()) for x in (q, k))
    assert_near(query, q, TOLERANCE[dtype])
    assert_near(keys.flatten(0, 1)[write_to], k, TOLERANCE[dtype])
    assert torch.equal(values.flatten(0, 1)[write_to], v)
    written = torch.zeros(pool[0] * 16, dtype=torch.bool, device=device)
    written[write_to] = True
    assert not keys.flatten(0, 1)[~written].any() and not values.flatten(0, 1)[~written].any()


def check_store(dtype: torch.dtype, device: str) -> None:
    from interactive_infer.core.kernels import triton_ops

    # As a model's attention passes them: [kv_heads, tokens, head_dim], transposed.
    key, value = (tensor(3, 7, 80, dtype=dtype, device=device, seed=s).transpose(0, 1) for s in (0, 1))
    keys, values = (torch.zeros((3, 16, 3, 80), dtype=dtype, device=device) for _ in "kv")
    write_to = torch.tensor([40, 17, 0, 18, 0, 33, 47], device=device)
    triton_ops.store(key, value, keys, values, write_to)
    kept = write_to > 0
    assert torch.equal(keys.flatten(0, 1)[write_to[kept]], key[kept])
    assert torch.equal(values.flatten(0, 1)[write_to[kept]], value[kept])
    assert not keys.flatten(0, 1)[19:33].any()


def check_linear(dtype: torch.dtype, device: str, shapes: Sequence[tuple[int, int]]) -> None:
    from interactive_infer.core.kernels import triton_linear
    from interactive_infer.core.kernels.triton_linear import MatrixPlan

    for out_features, in_features in shapes:
        weight = tensor(out_features, in_features, dtype=dtype, device=device)
        bias = tensor(out_features, dtype=dtype, device=device, seed=1)
        for tokens in (1, 2, 3, 16, 17):
            x = tensor(tokens, in_features, dtype=dtype, device=device, seed=2)
            gate_up = tensor(tokens, 2 * in_features, dtype=dtype, device=device, seed=3)
            gate, up = gate_up.chunk(2, -1)
            for b in (None, bias):
                expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
                assert_near(triton_linear.linear(x, weight, b), expected, TOLERANCE[dtype])
            swiglu = (F.silu(gate) * up).double() @ weight.double().T
            assert_near(triton_linear.silu_mul_linear(gate_up, weight), swiglu, TOLERANCE[dtype])
            for vectors in (True, False):  # both kernels, whatever the plan would choose
                if tokens <= (4 if vectors else 16):
                    how = MatrixPlan(16, 128, 4, 2, vectors=vectors, prefetch=512)
                    expected = F.linear(x.double(), weight.double(), bias.double())
                    assert_near(triton_linear.multiply(x, weight, bias, how), expected, TOLERANCE[dtype])
        nothing = tensor(0, in_features, dtype=dtype, device=device)
        assert triton_linear.linear(nothing, weight, bias).shape == (0, out_features)


# A model's products as (out, in): queries, keys and values; out; gate and up; down.
PRODUCTS = {
    "0.5B": [(1152, 896), (896, 896), (9728, 896), (896, 4864)],
    "1B": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)],
    "7B": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "32B": [(7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648)],
    "70B": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
}
FEW_FEATURES = [(16, 16), (96, 32), (1000, 48), (32, 64), (2048, 16)]


def check_plans(dtype: torch.dtype, device: str) -> None:
    """What Triton can compile for any model's products; and no program is left with more rows than it is worth."""
    from interactive_infer.core.kernels.launch import multiprocessors
    from interactive_infer.core.kernels.triton_linear import MAX_TOKENS, plan

    fill = multiprocessors(torch.device(device))
    for name, products in {**PRODUCTS, "few features": FEW_FEATURES}.items():
        for out_features, in_features in products:
            for tokens in range(1, MAX_TOKENS + 1):
                how = plan(tokens, out_features, in_features, torch.device(device))
                assert how is not None, name
                for size in (how.rows, how.columns, how.num_warps, how.prefetch):
                    assert size > 0 and size & (size - 1) == 0, (name, how)
                assert how.prefetch >= 128, (name, how)
                assert how.vectors or how.rows >= 16, (name, how)
                assert how.rows <= 16 or out_features // how.rows >= fill // 2 or name == "few features", (name, how)
            for tokens in (0, MAX_TOKENS + 1):
                assert plan(tokens, out_features, in_features, torch.device(device)) is None
    assert plan(1, 1000, 1000, torch.device(device)) is None  # rows that are not whole vectors of 16 elements


def check_prefetch() -> None:
    """What a launch that overlaps prefetches of each row: nothing, or as many lines of 128 bytes as a power of two."""
    from interactive_infer.core.kernels import triton_linear
    from interactive_infer.core.kernels.triton_linear import MatrixPlan

    asked: list[tuple[int, int]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *_, PREFETCH, EARLY, **__: asked.append((PREFETCH, EARLY))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_linear, "_vectors_kernel", Kernel())
        patch.setattr(triton_linear, "_matrix_kernel", Kernel())
        patch.setattr(triton_linear, "options", lambda device, **options: {**options, "OVERLAP": True})
        for in_features in (16, 32, 48, 64, 96, 4096):
            x, weight = (torch.zeros((rows, in_features), dtype=torch.float16) for rows in (1, 40))
            triton_linear.linear(x, weight)
            for prefetch in (128, 1024, 8192):
                triton_linear.multiply(x, weight, None, MatrixPlan(16, 256, 4, 4, vectors=False, prefetch=prefetch))
    for prefetch, early in asked:
        assert prefetch >= 128 and prefetch & (prefetch - 1) == 0, asked
        assert early > 0
    assert len(asked) == 6 * 4


def check_reply(_: torch.dtype, device: str) -> None:
    """More words than one round takes, to an address that is read on the card; and none to address 0."""
    from interactive_infer.core.kernels.triton_reply import reply, write_clock

    result = torch.arange(2500, dtype=torch.int64, device=device)
    host = torch.full((2500,), -1, dtype=torch.int64, pin_memory=device == "cuda")
    to = torch.tensor([host.data_ptr(), 0], device=device)
    reply(result, to[1:], 2500, clock_at=1)
    for words in (2, 1024, 2100):
        host.fill_(-1)
        write_clock(result)
        reply(result, to, words, clock_at=1)
        if device == "cuda":
            torch.cuda.synchronize()
            begun, ended = host[:2].tolist()
            assert 2500 < begun <= ended < begun + 60 * 10**9, "the card's clock, in ns"
        else:
            assert host[:2].tolist() == [0, 1]
        assert host[2:].tolist() == [*range(2, words), *[-1] * (2500 - words)]


ROPES = {
    "llama": dict(tokens=5, heads=4, kv_heads=2, head_dim=64, rot=64, norms=False),
    "normed": dict(tokens=3, heads=6, kv_heads=3, head_dim=128, rot=128, norms=True),
    "half rotated": dict(tokens=4, heads=3, kv_heads=3, head_dim=80, rot=32, norms=True),
    "odd size": dict(tokens=2, heads=2, kv_heads=1, head_dim=96, rot=96, norms=False),
}
CHECKS: dict[str, Callable[[torch.dtype, str], None]] = {
    **{
        f"attention, {name}": lambda dtype, device, step=step: check_attention(step, dtype, device)
        for name, step in STEPS.items()
    },
    **{
        f"rope, {name}": lambda dtype, device, rope=rope: check_rope_store(dtype, device, **rope)
        for name, rope in ROPES.items()
    },
    "rope, many tokens": lambda dtype, device: check_rope_store(
        dtype, device, tokens=30, heads=6, kv_heads=3, head_dim=32, rot=32, norms=True
    ),
    "norms": check_norms,
    "silu_mul": check_silu_mul,
    "store": check_store,
    "plans": check_plans,
    "reply": check_reply,
}

# ------------------------------------------------------------------------------------------------------ on the CPU


def interpreted_checks() -> dict[str, Callable[[], None]]:
    """Every check in float32 on the CPU."""
    checks = {name: partial(check, torch.float32, "cpu") for name, check in CHECKS.items()}
    # float16: float32 layers are left to PyTorch.
    checks["linear"] = partial(check_linear, torch.float16, "cpu", [(40, 144), (24, 16)])
    checks["prefetch"] = check_prefetch
    return checks


if sys.platform == "linux":  # where Triton has wheels

    @pytest.fixture(scope="module")
    def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
        return outcome_of(__file__, tmp_path_factory.mktemp("interpreted"))

    @pytest.mark.parametrize("name", [*CHECKS, "linear", "prefetch"])
    def test_in_the_interpreter(interpreted: dict[str, str | None], name: str) -> None:
        error = interpreted[name]
        assert error is None, error


# ----------------------------------------------------------------------------------------------------- on the card

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_card(name: str, dtype: torch.dtype) -> None:
    CHECKS[name](dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LARGE_STEPS)
def test_large_steps(name: str, dtype: torch.dtype) -> None:
    check_attention(LARGE_STEPS[name], dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(dtype: torch.dtype) -> None:
    check_linear(dtype, "cuda", [(40, 144), (24, 16), (96, 32), (1000, 1024), (6144, 4096), (1024, 3072)])


@pytest.mark.gpu
def test_rope_store_of_many_tokens() -> None:
    check_rope_store(
        torch.bfloat16, "cuda", tokens=2048, heads=32, kv_heads=8, head_dim=128, rot=128, norms=True
    )  # fmt: skip


@pytest.mark.gpu
def test_one_graph_serves_steps_of_other_lengths() -> None:
    """Captured once, attention follows what is in the batch's tensors at each replay."""
    step = Step(
        decodes=[100, 4000, 0, 900], prefills=[(70, 700), (30, 30)], padding=20, heads=16, kv_heads=8, head_dim=128,
        page_size=64,
    )  # fmt: skip
    other = Step(
        decodes=[2000, 1, 64, 0], prefills=[(20, 20), (60, 2000)], padding=40, heads=16, kv_heads=8, head_dim=128,
        page_size=64,
    )  # fmt: skip
    case, second = Case(step, torch.bfloat16, "cuda"), Case(other, torch.bfloat16, "cuda", seed=1)
    # Both in one pool and one table, the second's pages behind the first's.
    pages = case.keys.shape[0]
    case.keys, case.values = torch.cat([case.keys, second.keys]), torch.cat([case.values, second.values])
    table = case.batch.page_table.clone()
    width = max(table.shape[1], second.batch.page_table.shape[1])
    shared = torch.zeros((table.shape[0], width), dtype=torch.int32, device="cuda")
    shared[:, : table.shape[1]] = table
    case.query = case.query.contiguous()
    case.batch = StepBatch(**{**{f: getattr(case.batch, f) for f in StepBatch.__slots__}, "page_table": shared})
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = case.run()
    graph.replay()
    assert_near(out, case.expected(), TOLERANCE[torch.bfloat16])
    shared.zero_()
    shared[:, : second.batch.page_table.shape[1]] = second.batch.page_table + pages
    for name in ("query_start", "kv_len", "row_slot"):
        getattr(case.batch, name).copy_(getattr(second.batch, name))
    case.query.copy_(second.query)
    graph.replay()
    assert_near(out, second.expected(), TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
def test_a_chain_of_kernels_in_a_graph_waits_for_each_of_its_links() -> None:
    """Launches overlap (see kernels/launch.py): each must still see what the one before it wrote."""
    from interactive_infer.core.kernels import triton_linear, triton_ops

    weight = tensor(4096, 4096, dtype=torch.bfloat16, device="cuda") / 64
    norm = tensor(4096, dtype=torch.bfloat16, device="cuda", seed=1)
    x = tensor(1, 4096, dtype=torch.bfloat16, device="cuda", seed=2)

    def chain() -> torch.Tensor:
        hidden, residual = x, x
        for _ in range(20):
            hidden, residual = triton_ops.add_rms_norm(hidden, residual, norm, 1e-6)
            hidden = triton_linear.linear(hidden, weight)
            hidden = triton_linear.silu_mul_linear(torch.cat([hidden, residual], 1), weight)
            hidden = triton_linear.linear(hidden, weight)
        return hidden

    eager = []
    for _ in range(2):
        hidden, residual = x, x
        for _ in range(20):
            hidden, residual = triton_ops.add_rms_norm(hidden, residual, norm, 1e-6)
            torch.cuda.synchronize()
            hidden = triton_linear.linear(hidden, weight)
            torch.cuda.synchronize()
            hidden = triton_linear.silu_mul_linear(torch.cat([hidden, residual], 1), weight)
            torch.cuda.synchronize()
            hidden = triton_linear.linear(hidden, weight)
            torch.cuda.synchronize()
        eager.append(hidden)
    assert torch.equal(*eager)
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager[0])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 40, 70])
def test_attention_in_a_chain_waits_for_what_it_reads(rows: int) -> None:
    """Rows that are split and rows that are not: programs without work end early, and nobody may take that for the
    end of those that have some."""
    from interactive_infer.core.attention.triton_paged import paged_attention
    from interactive_infer.core.kernels import triton_linear, triton_ops

    lengths = [[1500, 3, 64, 700][i % 4] for i in range(rows)]
    case = Case(
        Step(decodes=lengths, heads=8, kv_heads=2, head_dim=128, page_size=64), torch.bfloat16, "cuda"
    )  # fmt: skip
    batch = case.batch
    last = torch.tensor(lengths, device="cuda") - 1
    page = batch.page_table[batch.row_slot, last // 64].long()
    positions, write_to = last, page * 64 + last % 64
    cos, sin = (tensor(2048, 128, dtype=torch.bfloat16, device="cuda", seed=s) for s in (0, 1))
    into, back = (
        tensor(*shape, dtype=torch.bfloat16, device="cuda", seed=2) / 32 for shape in ((1536, 1024), (1024, 1024))
    )
    x = tensor(rows, 1024, dtype=torch.bfloat16, device="cuda", seed=3)

    def chain(pause: Callable[[], None]) -> torch.Tensor:
        y = x
        for _ in range(20):
            qkv = triton_linear.linear(y, into)
            pause()
            query = triton_ops.rope_store(
                qkv, cos, sin, positions, write_to, case.keys, case.values, heads=8, kv_heads=2
            )  # fmt: skip
            pause()
            attended = paged_attention(query, case.keys, case.values, batch)
            pause()
            y = triton_linear.linear(attended.flatten(1), back)
            pause()
            y = triton_ops.rms_norm(y, x[0], 1e-6)
            pause()
        return y

    expected = chain(torch.cuda.synchronize)
    assert expected.isfinite().all() and expected.any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(lambda: None)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


if __name__ == "__main__":
    report(interpreted_checks(), sys.argv[1])
