"""The Triton kernels on a CUDA card, beside PyTorch's: µs a call in a CUDA graph.

    python benchmarks/gpu_kernels.py [--only decode prefill ops linear layer] [--sweep]

A graph holds many calls, on buffers in rotation where a piece reads more than the L2 cache keeps (weights, keys,
values), and is replayed; a figure is the replay's time over its calls. `--sweep` also tries the settings among which
`decode_tuning`, `prefill_tuning` and `plan` were chosen. Writes build/benchmarks/gpu_kernels_<piece>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import report
import torch
import torch.nn.functional as F
import triton
from torch.nn.attention.bias import causal_lower_right

from interactive_infer.core.attention import triton_paged
from interactive_infer.core.attention.batch import StepBatch
from interactive_infer.core.attention.triton_paged import Tuning
from interactive_infer.core.kernels import launch, triton_linear, triton_ops
from interactive_infer.core.kernels.triton_linear import MatrixPlan

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE = 64
ROTATED_BYTES = 400e6  # several times the L2 cache

Call = Callable[[], Any]


def graph_us(calls: Sequence[Call], at_least: int = 16) -> float:
    """µs a call, of calls captured one after the other and replayed: the median of five timed stretches."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = -(-at_least // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def stretch(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / replays

    replays = max(1, int(10_000 / stretch(1)))  # about 10 ms
    return sorted(stretch(replays) for _ in range(5))[2] / (rounds * len(calls))


def attempt(calls: Sequence[Call], at_least: int = 16) -> float | None:
    """`graph_us`, or None for what a kernel does not support (too much shared memory, say), with the reason printed."""
    try:
        return graph_us(calls, at_least)
    except (RuntimeError, triton.runtime.errors.TritonError) as error:
        torch.cuda.synchronize()  # raises in its turn where the context is lost
        print(f"  left out: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
        return None


@contextmanager
def no_overlap() -> Iterator[None]:
    """Launches that wait for the kernel before them to end."""
    before = launch.can_overlap
    launch.can_overlap = lambda device: False  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.can_overlap = before


def rotation(bytes_each: float) -> int:
    return max(1, min(64, int(ROTATED_BYTES / bytes_each) + 1))


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, dtype=DTYPE, device=DEVICE) * scale


def publish(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    card = torch.cuda.get_device_name()
    report.publish(f"gpu_kernels_{name}", f"{title} ({card})", columns, rows, card=card, triton=triton.__version__)


# ------------------------------------------------------------------------------------------------- attention


def paged(rows: int, length: int, queries: int, heads: int, kv_heads: int, head_dim: int, decodes: bool) -> list[Any]:
    """Batches of one step's shape in rotation, as (query, keys, values, batch)."""
    pages = -(-length // PAGE)
    made = []
    for _ in range(rotation(2 * rows * pages * PAGE * kv_heads * head_dim * 2)):
        tokens = rows * queries
        start = torch.arange(0, tokens + 1, queries) if not decodes else torch.tensor([tokens])
        batch = StepBatch(
            num_decodes=rows if decodes else 0,
            positions=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            write_to=torch.zeros(tokens, dtype=torch.int64, device=DEVICE),
            query_start=start.to(DEVICE),
            kv_len=torch.full((rows,), length, device=DEVICE),
            row_slot=torch.arange(rows, device=DEVICE),
            page_table=(torch.randperm(rows * pages) + 1).view(rows, pages).to(torch.int32).to(DEVICE),
            page_size=PAGE,
        )
        pool = (rows * pages + 1, PAGE, kv_heads, head_dim)
        made.append((random(tokens, heads, head_dim), random(*pool), random(*pool), batch))
    return made


def tuned(
    kernel: Callable[..., None], inputs: Sequence[Any], tuning: Tuning, settings: triton_paged.Settings
) -> list[Call]:
    def call(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch) -> Call:
        return lambda: kernel(query, keys, values, batch, torch.empty_like(query), settings, tuning)

    return [call(*each) for each in inputs]


def attend(inputs: Sequence[Any]) -> list[Call]:
    return [lambda each=each: triton_paged.paged_attention(*each) for each in inputs]


DECODES = [(1, 512), (1, 8192), (1, 32768), (8, 2048), (64, 512), (64, 4096)]
DECODE_TUNINGS = [
    Tuning(16, 64, 4, 2, 4),
    Tuning(16, 64, 4, 2, 8),
    Tuning(16, 64, 4, 3, 2),
    Tuning(16, 64, 4, 3, 3),
    Tuning(16, 64, 4, 4, 2),
    Tuning(16, 64, 4, 4, 4),
    Tuning(16, 32, 4, 4, 4),
]


def decode(sweep: bool) -> None:
    rows, swept = [], []
    for count, length in DECODES:
        inputs = paged(count, length, 1, 32, 8, 128, decodes=True)
        bytes_read = 2 * count * length * 8 * 128 * 2
        ours = graph_us(attend(inputs))
        with no_overlap():
            alone = graph_us(attend(inputs))
        dense = [(q.view(count, 32, 1, 128), *(random(count, 8, length, 128) for _ in "kv")) for q, *_ in inputs]
        sdpa = attempt([lambda qkv=qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True) for qkv in dense])
        del dense
        rows.append([f"{count} × {length}", ours, bytes_read / ours / 1e6, alone, sdpa])
        if sweep:
            settings = triton_paged.Settings(128**-0.5)
            times = [attempt(tuned(triton_paged.decode, inputs, each, settings)) for each in DECODE_TUNINGS]
            swept.append([f"{count} × {length}", *times])
        del inputs
    # One long text among short ones: the share of the long one must spread over the card.
    inputs = paged(16, 32768, 1, 32, 8, 128, decodes=True)
    for *_, batch in inputs:
        batch.kv_len[1:] = 512
    ours = graph_us(attend(inputs))
    rows.append(["1 × 32768 and 15 × 512", ours, 2 * (32768 + 15 * 512) * 8 * 128 * 2 / ours / 1e6, None, None])
    columns = ["rows × keys", "ours, µs", "TB/s", "without overlap, µs", "SDPA on dense, µs"]
    publish("decode", "decode attention, 32 heads over 8 of 128, pages of 64, bf16", columns, rows)
    if sweep:
        print("\nkeys a block, warps, stages, waves")
        print(report.table(["", *(f"{t.keys},{t.num_warps},{t.num_stages},{t.waves}" for t in DECODE_TUNINGS)], swept))


PREFILLS = [(1, 2048, 2048, 128), (1, 2048, 8192, 128), (4, 512, 512, 128), (1, 2048, 8192, 64), (1, 256, 8192, 128)]
PREFILL_TUNINGS = [
    Tuning(64, 64, 4, 3),
    Tuning(64, 32, 4, 4),
    Tuning(128, 64, 8, 3),
    Tuning(128, 128, 8, 2),
]


def prefill(sweep: bool) -> None:
    rows, swept = [], []
    for count, queries, length, head_dim in PREFILLS:
        inputs = paged(count, length, queries, 32, 8, head_dim, decodes=False)[:4]
        seen = count * (queries * length - queries * (queries - 1) // 2)
        flops = 4 * 32 * head_dim * seen
        ours = graph_us(attend(inputs), at_least=4)
        q, k, v = (random(count, h, n, head_dim) for h, n in ((32, queries), (8, length), (8, length)))
        mask = causal_lower_right(queries, length)
        sdpa = attempt([lambda q=q, k=k, v=v, m=mask: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)], 4)
        label = f"{count} × {queries} of {length}, head size {head_dim}"
        rows.append([label, ours, flops / ours / 1e6, sdpa, flops / sdpa / 1e6 if sdpa else None])
        if sweep:
            settings = triton_paged.Settings(head_dim**-0.5)
            times = [attempt(tuned(triton_paged.prefill, inputs, each, settings), 4) for each in PREFILL_TUNINGS]
            swept.append([label, *(flops / time / 1e6 if time else None for time in times)])
    columns = ["rows × queries of keys", "ours, µs", "TFLOP/s", "SDPA on dense, µs", "TFLOP/s"]
    publish("prefill", "causal prefill attention, 32 heads over 8, pages of 64, bf16", columns, rows)
    if sweep:
        print("\nTFLOP/s by rows, keys, warps, stages")
        names = [f"{t.rows},{t.keys},{t.num_warps},{t.num_stages}" for t in PREFILL_TUNINGS]
        print(report.table(["", *names], swept))


# --------------------------------------------------------------------------------------------- between projections


def ops(sweep: bool) -> None:
    rows = []
    weight, head_weight = random(4096), random(128)
    cos, sin = random(8192, 128), random(8192, 128)
    for tokens in (1, 8, 64, 512, 2048):
        x, residual, gate_up, qkv = (random(tokens, width) for width in (4096, 4096, 24576, 6144))
        keys, values = random(64, PAGE, 8, 128), random(64, PAGE, 8, 128)
        position = torch.arange(tokens, device=DEVICE)
        rope = dict(heads=32, kv_heads=8)
        key, value = random(tokens, 8, 128), random(tokens, 8, 128)
        pieces: list[tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any], int]] = [
            ("rms_norm 4096", triton_ops.rms_norm, (x, weight, 1e-6), {}, 2 * 4096),
            ("add_rms_norm 4096", triton_ops.add_rms_norm, (x, residual, weight, 1e-6), {}, 4 * 4096),
            ("silu_mul 12288", triton_ops.silu_mul, (gate_up,), {}, 3 * 12288),
            ("rope_store 32 + 2 × 8 heads", triton_ops.rope_store,
             (qkv, cos, sin, position, position, keys, values), rope, 2 * 6144),
            ("the same, heads normed", triton_ops.rope_store, (qkv, cos, sin, position, position, keys, values),
             dict(**rope, q_norm=head_weight, k_norm=head_weight, eps=1e-6), 2 * 6144),
            ("store 2 × 8 heads", triton_ops.store, (key, value, keys, values, position), {}, 4 * 1024),
        ]  # fmt: skip
        for name, function, arguments, more, width in pieces:
            call = [lambda function=function, arguments=arguments, more=more: function(*arguments, **more)]
            ours = graph_us(call, at_least=32)
            with no_overlap():
                alone = graph_us(call, at_least=32)
            torchs = None
            if name.startswith("rms_norm"):
                torchs = graph_us([lambda x=x: F.rms_norm(x, (4096,), weight, 1e-6)], at_least=32)
            rows.append([name, tokens, ours, alone, torchs, tokens * width * 2 / ours / 1e6])
    columns = ["piece", "tokens", "ours, µs", "without overlap, µs", "PyTorch, µs", "TB/s, mostly of the L2"]
    publish("ops", "between the projections, bf16", columns, rows)


SHAPES = [
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096),
    (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024),
]  # fmt: skip
SMALL_VECTORS = [MatrixPlan(2, 1024, 4, 1, True), MatrixPlan(4, 1024, 4, 1, True), MatrixPlan(8, 1024, 4, 1, True)]
LARGE_VECTORS = [
    MatrixPlan(2, 1024, 4, 1, True),
    MatrixPlan(4, 1024, 4, 1, True),
    MatrixPlan(4, 2048, 8, 1, True),
    MatrixPlan(8, 512, 4, 1, True),
    MatrixPlan(8, 1024, 8, 1, True),
    MatrixPlan(16, 512, 4, 1, True),
]
MATRICES = [
    MatrixPlan(8, 512, 4, 4, False),
    MatrixPlan(16, 256, 2, 5, False),
    MatrixPlan(16, 256, 4, 4, False),
    MatrixPlan(32, 256, 4, 4, False),
    MatrixPlan(64, 128, 4, 4, False),
]
PREFETCHES = [0, 512, 1024, 2048, 8192]


def named(plan: MatrixPlan | None) -> str:
    if plan is None:
        return "cuBLAS"
    return (
        f"{'v' if plan.vectors else 'm'}{plan.rows},{plan.columns},{plan.num_warps},{plan.num_stages},{plan.prefetch}"
    )


def linear(sweep: bool) -> None:
    rows = []
    for out_features, in_features in SHAPES:
        bytes_read = out_features * in_features * 2
        weights = [random(out_features, in_features, scale=0.02) for _ in range(rotation(bytes_read))]
        for tokens in (1, 4, 16):
            x = random(tokens, in_features)
            how = triton_linear.plan(tokens, out_features, in_features, DEVICE)
            ours = graph_us([lambda w=w, x=x: triton_linear.linear(x, w) for w in weights])
            cublas = graph_us([lambda w=w, x=x: F.linear(x, w) for w in weights])
            label = f"{in_features} → {out_features}"
            row = [label, tokens, named(how), ours, bytes_read / ours / 1e6, cublas, None, None]
            if in_features > out_features:  # the way down from SwiGLU
                gate_up = random(tokens, 2 * in_features)
                row[6:] = (
                    graph_us([lambda w=w, g=gate_up: triton_linear.silu_mul_linear(g, w) for w in weights]),
                    graph_us([lambda w=w, g=gate_up: F.linear(triton_ops.silu_mul(g), w) for w in weights]),
                )
            rows.append(row)
            if sweep and how is not None:
                print(f"{label}, {tokens}:", " | ".join(around(how, x, weights)), flush=True)
    columns = [
        "weight", "tokens", "plan", "ours, µs", "TB/s", "cuBLAS, µs", "SwiGLU and ours, µs", "SwiGLU and cuBLAS, µs",
    ]  # fmt: skip
    publish("linear", "linear layers, weights past the cache, bf16", columns, rows)


def around(how: MatrixPlan, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[str]:
    """Plan `how`, its like and more or less prefetch, as "plan µs", the fastest first."""
    plans = {how}
    if how.vectors:
        plans |= {*(LARGE_VECTORS if weights[0].numel() > 1 << 22 and x.shape[0] == 1 else SMALL_VECTORS)}
    else:
        plans |= {*MATRICES}
    plans |= {replace(how, prefetch=bytes_ahead) for bytes_ahead in PREFETCHES}
    times = {p: attempt([lambda w=w, p=p: triton_linear.multiply(x, w, None, p) for w in weights]) for p in plans}
    ranked = sorted((time, named(plan)) for plan, time in times.items() if time is not None)
    return [f"{name} {time:.2f}" for time, name in ranked]


# ------------------------------------------------------------------------------------------------- a whole layer


class Layer:
    """A decoder layer with the norms of each head (Qwen3), at decode."""

    def __init__(self, hidden: int, heads: int, inner: int, rows: int, length: int) -> None:
        self.heads = heads
        self.qkv, self.out = (
            random(n, k, scale=0.02) for n, k in (((heads + 16) * 128, hidden), (hidden, heads * 128))
        )
        self.gate_up, self.down = (random(n, k, scale=0.02) for n, k in ((2 * inner, hidden), (hidden, inner)))
        self.norm, self.head_norm = random(hidden), random(128)
        _, self.keys, self.values, self.batch = paged(rows, length, 1, heads, 8, 128, decodes=True)[0]
        self.bytes = 2 * sum(w.numel() for w in (self.qkv, self.out, self.gate_up, self.down))
        self.bytes += 2 * rows * length * 8 * 128 * 2

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        by_cublas: frozenset[str],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`by_cublas`: which products it computes, of "gate_up" and "rest"."""
        multiply = F.linear if "rest" in by_cublas else triton_linear.linear
        x, residual = triton_ops.add_rms_norm(x, residual, self.norm, 1e-6)
        query = triton_ops.rope_store(
            multiply(x, self.qkv), *rope, self.batch.positions, self.batch.write_to, self.keys, self.values,
            heads=self.heads, kv_heads=8, q_norm=self.head_norm, k_norm=self.head_norm, eps=1e-6,
        )  # fmt: skip
        x = triton_paged.paged_attention(query, self.keys, self.values, self.batch)
        x = multiply(x.flatten(1), self.out)
        x, residual = triton_ops.add_rms_norm(x, residual, self.norm, 1e-6)
        gate_up = (F.linear if "gate_up" in by_cublas else triton_linear.linear)(x, self.gate_up)
        if "rest" in by_cublas:
            return F.linear(triton_ops.silu_mul(gate_up), self.down), residual
        return triton_linear.silu_mul_linear(gate_up, self.down), residual


def layer(sweep: bool) -> None:
    rows = []
    rope = random(4096, 128), random(4096, 128)
    for name, hidden, heads, inner in (("8B", 4096, 32, 12288), ("0.6B", 1024, 16, 3072)):
        for tokens in (1, 4, 16, 64):
            layers = [Layer(hidden, heads, inner, tokens, 512) for _ in range(12)]
            x = random(tokens, hidden)

            def run(*by_cublas: str, layers: list[Layer] = layers, x: torch.Tensor = x) -> list[Call]:
                def all_layers() -> None:
                    y, residual = x, x
                    for each in layers:
                        y, residual = each.forward(y, residual, rope, frozenset(by_cublas))

                return [all_layers]

            ours = graph_us(run(), at_least=1) / len(layers)
            mixed = graph_us(run("gate_up"), at_least=1) / len(layers)
            cublas = graph_us(run("gate_up", "rest"), at_least=1) / len(layers)
            with no_overlap():
                alone = graph_us(run(), at_least=1) / len(layers)
            floor = layers[0].bytes / 4.31e6
            rows.append([name, tokens, floor, ours, floor / ours, alone, mixed, cublas])
    columns = [
        "shape", "rows", "floor at 4.31 TB/s, µs", "ours, µs", "floor / ours", "without overlap, µs",
        "gate and up by cuBLAS, µs", "all by cuBLAS, µs",
    ]  # fmt: skip
    publish("layer", "one decoder layer at decode, 512 keys a row, bf16", columns, rows)


PIECES: dict[str, Callable[[bool], None]] = {
    "decode": decode,
    "prefill": prefill,
    "ops": ops,
    "linear": linear,
    "layer": layer,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES))
    parser.add_argument("--sweep", action="store_true", help="also try the settings that were not chosen")
    arguments = parser.parse_args()
    for name in arguments.only:
        PIECES[name](arguments.sweep)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
