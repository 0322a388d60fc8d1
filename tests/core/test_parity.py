"""Greedy texts of the engine against `model.generate`, token for token, in float32 on the CPU.

Two texts may part where the reference's two best logits lie within 1e-4 of each other: rounding decides there. Such
cases are counted, printed, and must stay rare.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from interactive_infer import Engine, assembly
from interactive_infer.core import runner
from interactive_infer.core.attention.sdpa import PagedSDPA, RowSpan
from interactive_infer.core.kernels import torch_ops
from interactive_infer.core.loader import LoadedModel, load_model
from interactive_infer.errors import DeviceError, UnsupportedModelError
from tests.tiny_models import REFUSED, VOCAB_SIZE, WINDOW, tiny_model

MODELS = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3_longrope",
    "gpt2",
    "gpt_neox",
    "olmo2",
    "mixtral",
    "gpt_oss",
)
FUSED = ("llama", "qwen2", "qwen3", "mistral")
PAGE = 4
STEP_TOKENS = 12
NEW = 20
NEAR_TIE = 1e-4
# The first is longer than a step (chunked prefill), all are longer than the sliding window once continued. longrope's
# reference changes its frequencies at 16 tokens, half-way through a text; longer prompts keep it on one side.
LENGTHS = {"phi3_longrope": (31, 18, 25, 17)}
DEFAULT_LENGTHS = (27, 5, 13, 1)
ATTEND = PagedSDPA.__call__


@dataclasses.dataclass
class Tally:
    """Texts compared with their reference, and where they parted at a near tie."""

    compared: int = 0
    parted: list[str] = dataclasses.field(default_factory=list)

    def compare(self, where: str, ours: tuple[int, ...], reference: Reference) -> None:
        self.compared += 1
        assert len(ours) == len(reference.token_ids), where
        for index, (token, expected) in enumerate(zip(ours, reference.token_ids, strict=True)):
            if token != expected:
                gap = reference.gaps[index]
                assert gap <= NEAR_TIE, (
                    f"{where}: token {index} is {token}, not {expected}, whose logit leads by {gap:.2g}"
                )
                self.parted.append(f"{where}: at token {index}, the two best logits {gap:.1e} apart")
                return


@dataclasses.dataclass
class Reference:
    """What `model.generate` writes, and by how much the best logit led at each token."""

    token_ids: tuple[int, ...]
    gaps: list[float]


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    print(f"\n{tally.compared} texts compared, {len(tally.parted)} parted at a near tie")
    for case in tally.parted:
        print(" ", case)
    assert len(tally.parted) <= 0.03 * tally.compared, tally.parted


@torch.no_grad()
def generate(model: Any, prompt: list[int], new: int = NEW) -> Reference:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).float().topk(2, dim=-1).values
    return Reference(tuple(out.sequences[0, len(prompt) :].tolist()), (best[:, 0] - best[:, 1]).tolist())


def prompts_for(name: str) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = LENGTHS.get(name, DEFAULT_LENGTHS)
    return [torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def is_restored(model: Any, names: list[str | None]) -> bool:
    return attention_names(model) == names and not any("forward" in vars(module) for module in model.modules())


async def load(model: Any, *, kv_cache_tokens: int = 1024, **options: Any) -> Engine:
    return await Engine.load(
        model,
        dtype="auto",
        kv_cache_tokens=kv_cache_tokens,
        page_size=PAGE,
        max_step_tokens=STEP_TOKENS,
        max_batch_size=8,
        progress=False,
        freeze_gc=False,
        **options,
    )


def greedy(engine: Engine, prompt: list[int], new: int = NEW) -> Any:
    return engine.generate(prompt, temperature=0, ignore_eos=True, max_tokens=new)


def attention_names(model: Any) -> list[str | None]:
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    return [getattr(config, "_attn_implementation", None) for config in configs]


async def tokens_of(generation: Any, count: int) -> None:
    """Wait for the first `count` tokens."""
    async for token in generation:
        if token.index + 1 >= count:
            return


def not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on models run through their own forward."""
    monkeypatch.setattr(assembly, "fuse", lambda *_, **__: "the test wants it so")


@pytest.mark.filterwarnings("ignore:the model's forward cannot be captured")  # mixtures of experts in float32
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("name", "fused"), [*((name, False) for name in MODELS), *((name, True) for name in FUSED)])
async def test_greedy_parity(name: str, fused: bool, place: str, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card too the reference is `model.generate` on the CPU."""
    if not fused:
        not_fused(monkeypatch)
    model = tiny_model(name)
    held = copy.deepcopy(model).to(place)
    prompts = prompts_for(name)
    references = [generate(model, prompt) for prompt in prompts]
    if name in ("mistral", "gemma2", "gemma3", "gpt_oss"):
        assert model.config.sliding_window == WINDOW < min(map(len, prompts)) + NEW

    async with await load(held) as engine:
        assert (engine._parts.runner.layers() == "fused") == fused
        # Unequal lengths in one batch, joined at different steps, the longest one prefilled in chunks.
        assert len(prompts[0]) > STEP_TOKENS
        generations = [greedy(engine, prompts[0])]
        for prompt in prompts[1:]:
            await tokens_of(generations[-1], 2)
            generations.append(greedy(engine, prompt))
        assert engine.info().num_running + engine.info().num_waiting == len(prompts), "they should have met"
        parents = []
        for i, (generation, reference) in enumerate(zip(generations, references, strict=True)):
            completion = await generation
            assert completion.usage.cached_tokens == 0
            tally.compare(f"{name}, joined at different steps, prompt {i}", completion.token_ids, reference)
            parents.append(completion)

        # The same prompts again, all at once: full pages come from the prefix index.
        for i, generation in enumerate([greedy(engine, prompt) for prompt in prompts]):
            completion = await generation
            # The last token is always computed, and a page is reused when all its tokens are.
            reused = min(len(prompts[i]) // PAGE * PAGE, len(prompts[i]) - 1)
            assert completion.usage.cached_tokens == reused
            assert reused > 0 or len(prompts[i]) < PAGE
            tally.compare(f"{name}, prefix reused, prompt {i}", completion.token_ids, references[i])

        # Branches at page borders and off them, plain and with a token put in.
        parent, prompt = generations[0], prompts[0]
        cached = len(prompt) + NEW - 1  # the last token was never an input
        ours = list(parents[0].token_ids)
        exact = tuple(ours) == references[0].token_ids
        for at in range(NEW - 6, NEW):
            branch = parent.branch(at=at)
            completion = await branch
            assert min(cached, len(prompt) + at) - branch._sequence.num_reused < PAGE
            assert list(completion.token_ids[:at]) == ours[:at]
            if exact:
                tally.compare(f"{name}, branched at {at}", completion.token_ids, references[0])
        for at in (0, 7):
            shared = [*ours[:at], (ours[at] + 1) % VOCAB_SIZE]
            branch = parent.branch(at=at, token=shared[-1])
            completion = await branch
            assert min(cached, len(prompt) + at) - branch._sequence.num_reused < PAGE
            assert list(completion.token_ids[: at + 1]) == shared
            expected = generate(model, prompt + shared, NEW - at - 1)
            tally.compare(f"{name}, branched at {at} with a token", completion.token_ids[at + 1 :], expected)

    # Pages for hardly two of the four texts.
    longest = max(len(prompt) for prompt in prompts) + NEW
    async with await load(held, kv_cache_tokens=longest + 2 * PAGE) as engine:
        generations = [greedy(engine, prompt) for prompt in prompts[::-1]]
        for i, generation in enumerate(generations):
            completion = await generation
            assert completion.usage.cached_tokens == 0, "pages of its own, found again, are not a reused prompt"
            tally.compare(f"{name}, short of pages, prompt {i}", completion.token_ids, references[::-1][i])
        assert sum(generation._sequence.num_preemptions for generation in generations) > 0
        assert engine.info().kv_tokens_in_use == 0


# GPT-J's attention ignored the interface in early releases of transformers 5 and no longer does.
ALWAYS_REFUSED = tuple(name for name in REFUSED if name != "gptj")


async def test_gptj_is_right_or_refused(tally: Tally) -> None:
    model = tiny_model("gptj")
    prompt = prompts_for("gptj")[0]
    reference = generate(model, prompt)
    try:
        engine = await load(model)
    except UnsupportedModelError as refusal:
        assert "'gptj'" in str(refusal)
        return
    tally.compare("gptj", (await greedy(engine, prompt)).token_ids, reference)
    await engine.close()


@pytest.mark.parametrize("name", ALWAYS_REFUSED)
async def test_a_model_that_would_be_wrong_is_refused_by_name_and_stays_as_it_was(name: str) -> None:
    model = tiny_model(name)
    names = attention_names(model)
    input_ids = torch.tensor([prompts_for(name)[1]])
    with torch.no_grad():
        logits = model(input_ids).logits
    with pytest.raises(UnsupportedModelError, match=repr(model.config.model_type)) as refusal:
        await load(model)
    assert len(str(refusal.value)) > 60, "the message gives a reason"
    assert is_restored(model, names)
    with torch.no_grad():
        assert torch.equal(model(input_ids).logits, logits)


def without(argument: str) -> Callable[..., Any]:
    """Our attention with one of its arguments forgotten."""

    def attend(self: PagedSDPA, *args: Any, **kwargs: Any) -> torch.Tensor:
        return ATTEND(self, *args, **{**kwargs, argument: None})

    return attend


@pytest.mark.parametrize(
    ("name", "argument"),
    [("gemma2", "scaling"), ("gemma2", "softcap"), ("gpt_oss", "sinks"), ("mistral", "sliding_window")],
)
async def test_the_check_at_load_finds_an_attention_that_forgets(
    name: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(name)
    if argument == "sliding_window":  # far longer than the check's texts: it must be shrunk to be seen
        for holder in (model.config, *(module for module in model.modules() if hasattr(module, "sliding_window"))):
            holder.sliding_window = 200
    await (await load(model)).close()
    monkeypatch.setattr(PagedSDPA, "__call__", without(argument))
    with pytest.raises(UnsupportedModelError, match=repr(model.config.model_type)):
        await load(model)
    if argument == "sliding_window":
        assert model.config.sliding_window == 200


async def test_the_check_at_load_disturbs_nobody_who_uses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mistral")
    for holder in (model.config, *(module for module in model.modules() if hasattr(module, "sliding_window"))):
        holder.sliding_window = 200  # the check cuts it
    input_ids = torch.tensor([prompts_for("mistral")[0]])

    @torch.no_grad()
    def forward() -> torch.Tensor:
        return model(input_ids).logits

    expected, beside = forward(), []

    def attend(self: PagedSDPA, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not beside:
            with ThreadPoolExecutor(1) as owner:
                beside.append(owner.submit(forward).result())
        return ATTEND(self, *args, **kwargs)

    monkeypatch.setattr(PagedSDPA, "__call__", attend)
    await (await load(model)).close()
    assert torch.equal(beside[0], expected)


async def test_the_check_at_load_finds_texts_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def spill(spans: Sequence[RowSpan], *args: Any) -> PagedSDPA:
        first = spans[0]
        mixed = [first, *(dataclasses.replace(s, pages=[*first.pages[:1], *s.pages[1:]]) for s in spans[1:])]
        return PagedSDPA(mixed, *args)

    model = tiny_model("llama")
    monkeypatch.setattr(runner, "PagedSDPA", spill)
    with pytest.raises(UnsupportedModelError, match="'llama'"):
        await load(model)


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3_longrope", "gpt2"])
async def test_the_owner_may_use_the_model_meanwhile(name: str, tally: Tally) -> None:
    model = tiny_model(name)
    names = attention_names(model)
    prompts = prompts_for(name)
    references = [generate(model, prompt) for prompt in prompts]
    weights = {key: value.data_ptr() for key, value in model.named_parameters()}

    engine = await load(model)
    assert engine.model is model
    assert {key: value.data_ptr() for key, value in model.named_parameters()} == weights, "no copy"
    for prompt, reference in zip(prompts, references, strict=True):
        assert generate(model, prompt).token_ids == reference.token_ids, "while the engine is idle"

    running = [greedy(engine, prompt, 30) for prompt in prompts]
    await tokens_of(running[0], 1)
    met = 0
    for prompt, reference in zip(prompts, references, strict=True):
        met += sum(generation.state == "running" for generation in running)
        beside = await asyncio.to_thread(generate, model, prompt)
        assert beside.token_ids == reference.token_ids, "while generations run"
    assert met, "a generation should have run beside it"
    for i, (generation, reference) in enumerate(zip(running, references, strict=True)):
        completion = await generation
        tally.compare(f"{name}, beside its owner, prompt {i}", completion.token_ids[:NEW], reference)

    # Training: gradients flow through the original attention, and the engine's own steps leave none behind.
    loss = model(torch.tensor([prompts[0]]), labels=torch.tensor([prompts[0]])).loss
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model.zero_grad()

    await engine.close()
    assert is_restored(model, names)
    for prompt, reference in zip(prompts, references, strict=True):
        assert generate(model, prompt).token_ids == reference.token_ids, "after close"


@pytest.mark.parametrize("first_closed", [0, 1])
@pytest.mark.parametrize("name", ["gemma2", "phi3_longrope"])
async def test_two_engines_over_one_model(name: str, first_closed: int, tally: Tally) -> None:
    model = tiny_model(name)
    names = attention_names(model)
    prompts = prompts_for(name)
    references = [generate(model, prompt) for prompt in prompts]
    engines = [await load(model), await load(model)]
    for engine in engines:
        tally.compare("two engines", (await greedy(engine, prompts[0])).token_ids, references[0])
    await engines.pop(first_closed).close()
    (left,) = engines
    tally.compare("the engine that is left", (await greedy(left, prompts[1])).token_ids, references[1])
    assert generate(model, prompts[2]).token_ids == references[2].token_ids
    await left.close()
    assert is_restored(model, names)


async def test_longrope_is_fixed_for_one_length_at_a_time() -> None:
    model = tiny_model("phi3_longrope")
    async with await load(model, kv_cache_tokens=64) as engine:
        with pytest.raises(UnsupportedModelError, match="another engine"):
            await load(model, kv_cache_tokens=16)  # would take the short factors
        assert len((await greedy(engine, prompts_for("phi3_longrope")[1])).token_ids) == NEW
    await (await load(model, kv_cache_tokens=16)).close()


async def test_a_model_whose_own_logits_are_nan_is_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("nan")
    with pytest.raises(UnsupportedModelError, match="NaN in float32"):
        await load(model)


async def test_a_text_whose_logits_are_nan_harms_nobody(tally: Tally) -> None:
    model = tiny_model("llama")
    poison = 5
    prompts = [[token for token in prompt if token != poison] for prompt in prompts_for("llama")]
    references = [generate(model, prompt) for prompt in prompts]
    assert not any(poison in reference.token_ids for reference in references)
    shared = prompts[0][: 4 * PAGE]
    async with await load(model, kv_cache_tokens=160) as engine:
        with torch.no_grad():
            model.get_input_embeddings().weight[poison] = float("nan")
        for _ in range(2):
            good = [greedy(engine, prompt) for prompt in prompts]
            await tokens_of(good[0], 3)
            bad = [
                greedy(engine, [*shared, poison]),  # reads pages of a text that is being written
                greedy(engine, [poison] * STEP_TOKENS + [7, 7]),  # NaN in pages of a whole chunk that draws nothing
            ]
            for generation in bad:
                with pytest.raises(DeviceError, match="logits"):
                    await generation
            for prompt in ([poison] * 2 * PAGE, [poison]):  # would find such pages again, whole
                with pytest.raises(DeviceError, match="logits"):
                    await greedy(engine, prompt)
            for i, generation in enumerate(good):
                tally.compare(f"beside NaN, prompt {i}", (await generation).token_ids, references[i])


@pytest.mark.slow
async def test_smollm2_on_real_prompts(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a village by the sea, there lived an old fisherman who had never caught",
    ]
    async with await Engine.load(dtype="float32", kv_cache_tokens=1024, progress=False, freeze_gc=False) as engine:
        model = engine.model
        monkeypatch.setattr(model.generation_config, "eos_token_id", None)
        generations = [engine.generate(text, temperature=0, ignore_eos=True, max_tokens=24) for text in texts]
        for text, generation in zip(texts, generations, strict=True):
            completion = await generation
            prompt = list(generation.prompt_token_ids)
            tally.compare(f"SmolLM2, {text!r}", completion.token_ids, generate(model, prompt, 24))


async def test_a_fused_forward_that_is_wrong_gives_way_to_the_models_own(
    monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    wrong = staticmethod(lambda gate_up, weight: gate_up.chunk(2, -1)[0] @ weight.T)
    monkeypatch.setattr(torch_ops.StepOps, "silu_mul_linear", wrong)
    model, prompt = tiny_model("llama"), prompts_for("llama")[0]
    async with await load(model) as engine:
        assert "its logits differ" in engine._parts.runner.layers()
        tally.compare("wrong when fused", (await greedy(engine, prompt)).token_ids, generate(model, prompt))


async def test_a_hook_is_called_while_the_engine_writes(tally: Tally) -> None:
    model, prompt = tiny_model("llama"), prompts_for("llama")[0]
    reference = generate(model, prompt)
    async with await load(model) as engine:
        generation = greedy(engine, prompt)
        await tokens_of(generation, 5)
        seen: list[int] = []
        handle = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
        await tokens_of(generation, 12)
        handle.remove()
        assert 3 <= len(seen) < NEW
        tally.compare("hooked half-way", (await generation).token_ids, reference)
        assert engine._parts.runner.layers() == "fused"


async def test_an_owner_who_trains_gets_no_dropout_in_texts(tally: Tally) -> None:
    """gpt2 drops out at embeddings, attention and residuals."""
    model = tiny_model("gpt2")
    prompt = prompts_for("gpt2")[0]
    expected = generate(model, prompt)
    async with await load(model) as engine:
        model.train()
        assert any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
        tally.compare("in training mode", (await greedy(engine, prompt)).token_ids, expected)
        assert model.training
        assert all(module.training for module in model.modules())


@pytest.mark.parametrize("fused", [True, False])
async def test_weights_changed_in_silence_hold_after_a_reset(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weight.data` is written to without a trace; packed copies are of what was there before."""
    if not fused:
        not_fused(monkeypatch)
    model, prompt = tiny_model("llama"), prompts_for("llama")[0]
    monkeypatch.setattr(assembly, "load_model", lambda *_, **__: owned(model))
    async with await load(model) as engine:
        before = (await greedy(engine, prompt)).token_ids
        model.lm_head.weight.data.copy_(model.lm_head.weight.data.roll(1, 0))
        engine.reset_prefix_cache()
        after = (await greedy(engine, prompt)).token_ids
        assert after[0] == (before[0] + 1) % VOCAB_SIZE


def owned(model: Any) -> LoadedModel:
    """As if the engine had loaded it, so that its weights may be packed."""
    return dataclasses.replace(load_model(model), owned=True)
