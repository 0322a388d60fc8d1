"""`%%infer` in a real kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.notebook.kernels import PATIENCE, Kernel, running_kernel

SETUP = """
import json
from interactive_infer import Engine, Generation
from tests.tiny_models import tiny_model, tiny_tokenizer

async def load():
    return await Engine.load(tiny_model("llama"), tokenizer=tiny_tokenizer(), progress=False, freeze_gc=False)

engine = await load()
engine.tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }} {{ m['content'] }} {% endfor %}"
%load_ext interactive_infer
"""
EIGHT = "--max-tokens 8 --temperature 0 --ignore-eos"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel("7.4.0", tmp_path_factory.mktemp("kernel")) as kernel:
        kernel.run(SETUP)
        yield kernel


def refused(shell: Kernel, cell: str) -> str:
    request = shell.start(cell)
    shell.finish(request)
    return shell.printed(request, "stderr") + "".join(error["evalue"] for error in shell.errors(request))


@pytest.mark.notebook
def test_it_continues_the_text_shows_it_and_binds_it(shell: Kernel) -> None:
    cell = shell.start(f"%%infer story {EIGHT}\na b\nc")
    shell.finish(cell)
    assert not shell.errors(cell)
    assert len(shell.of(cell, "display_data")) == 1
    assert shell.value("[story.prompt, story.params.max_tokens, story.params.temperature]") == ["a b\nc", 8, 0.0]
    same = "(await engine.generate('a b\\nc', max_tokens=8, temperature=0, ignore_eos=True)).token_ids"
    assert shell.run(f"print((await story).token_ids == {same})") == "True\n"


@pytest.mark.notebook
def test_without_a_name_it_is_gen(shell: Kernel) -> None:
    shell.run(f"%%infer {EIGHT} --stop 'no\\nsuch' --stop x --top-p 0.5 --seed 3 --logprobs 2\na")
    assert shell.value("[gen.params.stop, gen.params.top_p, gen.params.seed, gen.params.logprobs]") == [
        ["no\nsuch", "x"],
        0.5,
        3,
        2,
    ]


@pytest.mark.notebook
def test_several_samples_are_a_group(shell: Kernel) -> None:
    cell = shell.start(f"%%infer several {EIGHT} --n 2\na")
    shell.finish(cell)
    assert shell.value("len(several)") == 2
    assert len(shell.of(cell, "display_data")) == 2


@pytest.mark.notebook
def test_a_chat(shell: Kernel) -> None:
    shell.run(f"%%infer answer --chat --system 'be brief' {EIGHT}\nhello\n")
    assert shell.value("answer.prompt") == "s be brief u hello "


@pytest.mark.notebook
def test_which_engine(shell: Kernel) -> None:
    shell.run("other = await load()\n_mine, engine = engine, None\n")
    try:
        assert shell.value("len((get_ipython().run_cell_magic('infer', 'g', 'a'), g)[1].prompt)") == 1  # the only one
        shell.run("more = await load()")
        assert "several (more, other)" in refused(shell, "%%infer\na")
        shell.run(f"%%infer one --engine other {EIGHT}\na")
        assert "no engine in a variable" in refused(shell, "%%infer --engine story\na")
        shell.run("await other.close()\nengine = other")
        assert shell.value("(get_ipython().run_cell_magic('infer', 'g', 'a'), g)[1]._engine_ref() is more"), (
            "it is open"
        )
        shell.run("await more.close()\nengine = None")
        assert "there is none" in refused(shell, "%%infer\na")
    finally:
        shell.run("engine = _mine")


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("%%infer\n\n", "none below the first line"),
        ("%%infer 3x\na", "'3x' cannot be a variable"),
        ("%%infer class\na", "'class' cannot be a variable"),
        ("%%infer --max-tokens many\na", "invalid int value: 'many'"),
        ("%%infer --max-tokens 0\na", "max_tokens=0: "),
        ("%%infer --heat 3\na", "unrecognized arguments: --heat"),
        ("%%infer --system x\na", "--system belongs to --chat"),
        ('%%infer --stop "\na', "No closing quotation"),
        ("%%infer --stop 'a\\'\na", "invalid"),
        ("%%infer engine\na", "--engine engine?"),
    ],
)
def test_what_is_wrong_is_said(shell: Kernel, cell: str, problem: str) -> None:
    assert problem in refused(shell, cell)


@pytest.mark.notebook
def test_completion_and_help(shell: Kernel) -> None:
    def completed(line: str) -> list[str]:
        return shell.client.complete(f"{line}\nsome text", len(line), reply=True, timeout=PATIENCE)["content"][
            "matches"
        ]

    assert completed("%%infer story --m") == ["--max-tokens", "--min-p", "--min-tokens"]
    assert "--temperature" in completed("%%infer --")
    assert completed("%%infer --engine eng") == ["engine"]
    help_ = shell.client.inspect("%%infer", 7, reply=True, timeout=PATIENCE)["content"]
    assert help_["found"] and "--max-tokens MAX_TOKENS" in help_["data"]["text/plain"]
    assert "Continue the cell's text" in help_["data"]["text/plain"]


@pytest.mark.notebook
def test_loaded_again_there_is_one_and_unloaded_none(shell: Kernel) -> None:
    matchers = "[m.__qualname__ for m in get_ipython().Completer.custom_matchers].count('InferMagics.complete')"
    shell.run("%reload_ext interactive_infer\n%reload_ext interactive_infer")
    assert shell.value(matchers) == 1
    shell.run("%unload_ext interactive_infer")
    assert shell.value(matchers) == 0
    assert "not found" in refused(shell, "%%infer\na")
    shell.run("%load_ext interactive_infer")
    assert shell.value(matchers) == 1
