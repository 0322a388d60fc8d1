"""`%%infer`: continue a cell's text."""

from __future__ import annotations

import ast
import keyword
import weakref
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from interactive_infer.engine import Engine

_DEFAULT_NAME = "gen"
# Not parameters of sampling; every other option goes to it under its own name.
_OURS = frozenset({"name", "engine", "chat", "system"})


def _text(given: str) -> str:
    """A word, or a Python string: `--stop "\\n\\n"`. IPython leaves the quotes on."""
    try:
        return str(ast.literal_eval(given)) if given[:1] in ("'", '"') else given
    except SyntaxError:
        raise ValueError(given) from None  # which argparse tells


@magics_class
class InferMagics(Magics):
    """The magics of `%load_ext interactive_infer`."""

    @magic_arguments()
    @argument("name", nargs="?", default=_DEFAULT_NAME, help="variable for the generation (default: gen)")
    @argument("--engine", metavar="VARIABLE", help="which engine (default: `engine`, or the only one there is)")
    @argument("--max-tokens", type=int, help="most tokens to write")
    @argument("--min-tokens", type=int, help="no end before so many")
    @argument("--temperature", type=float, help="0 takes the most likely token")
    @argument("--top-p", type=float, help="draw from the most likely tokens of this much probability")
    @argument("--top-k", type=int, help="draw from the k most likely tokens")
    @argument("--min-p", type=float, help="leave out tokens below this part of the most likely one's probability")
    @argument("--presence-penalty", type=float, help="against tokens that have been written")
    @argument("--frequency-penalty", type=float, help="against tokens as often as they have been written")
    @argument("--repetition-penalty", type=float, help="against tokens of prompt and text")
    @argument("--seed", type=int, help="draw the same again")
    @argument("--stop", type=_text, action="append", metavar="TEXT", help="end before this text; may be given again")
    @argument("--ignore-eos", action="store_true", default=None, help="write on after an end of text")
    @argument("--n", type=int, help="so many texts side by side; the variable is a group then")
    @argument("--logprobs", type=int, metavar="K", help="log-probabilities, with the k most likely alternatives")
    @argument("--chat", action="store_true", help="the cell is a message to the model, which answers")
    @argument("--system", type=_text, metavar="TEXT", help="with --chat: what the model is told before")
    @cell_magic("infer")
    def infer(self, line: str, cell: str) -> Any:
        """Continue the cell's text, shown live; the generation is in a variable.

        `%%infer story --max-tokens 60 --temperature 0.8` begins a cell of text; the cell ends at once, `story` can then
        be paused, steered, awaited. The line break at the cell's end is no part of the text.
        """
        try:
            options = vars(parse_argstring(self.infer, line))
        except ValueError as error:  # of quotes that are not closed
            raise UsageError(f"%%infer {line}: {error}") from None
        name, engine = self._variable(options["name"]), self._engine(options["engine"])
        text = cell.removesuffix("\n")
        if not text.strip():
            raise UsageError("%%infer continues the cell's text, and there is none below the first line")
        if options["system"] is not None and not options["chat"]:
            raise UsageError("--system belongs to --chat")
        sampling = {key: value for key, value in options.items() if key not in _OURS and value is not None}
        if options["chat"]:
            system = [] if options["system"] is None else [{"role": "system", "content": options["system"]}]
            made: Any = engine.chat([*system, {"role": "user", "content": text}], **sampling)
        else:
            made = engine.generate(text, **sampling)
        self.shell.user_ns[name] = made
        return made  # the cell's value: displayed, as a generation on a cell's last line is

    def _engine(self, name: str | None) -> Engine:
        from interactive_infer.engine import Engine

        variables = self.shell.user_ns
        if name is not None:
            if not isinstance(variables.get(name), Engine):
                raise UsageError(f"--engine {name}: there is no engine in a variable of that name")
            return variables[name]
        usual = variables.get("engine")
        if isinstance(usual, Engine) and not usual.closed:
            return usual
        engines = {
            id(value): key
            for key, value in variables.items()
            if isinstance(value, Engine) and not value.closed and not key.startswith("_")
        }
        if len(engines) != 1:
            found = f"there are several ({', '.join(sorted(engines.values()))})" if engines else "there is none"
            raise UsageError(f"which engine? {found}: `engine = await Engine.load()`, or --engine VARIABLE")
        return variables[next(iter(engines.values()))]

    def _variable(self, name: str) -> str:
        from interactive_infer.engine import Engine

        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(
                f"{name!r} cannot be a variable; begin the line with a name: %%infer story --max-tokens 60"
            )
        there = self.shell.user_ns.get(name)
        if isinstance(there, Engine) and not there.closed:
            raise UsageError(f"{name} holds an engine, and the generation would take its place: --engine {name}?")
        return name

    @context_matcher()
    def complete(self, context: CompletionContext) -> SimpleMatcherResult:
        """On a `%%infer` line its options, and after --engine the engines, in place of Python's names."""
        from interactive_infer.engine import Engine

        line = context.text_until_cursor
        words = line.removesuffix(context.token).split()
        if context.cursor_line or not words or words[0] != "%%infer":
            return {"completions": []}
        if words[-1] == "--engine":
            there = [name for name, value in self.shell.user_ns.items() if isinstance(value, Engine) and name[0] != "_"]
        else:
            options = (option for action in self.infer.parser._actions for option in action.option_strings)
            there = [option for option in options if option.startswith("--")]
        completions = [SimpleCompletion(text) for text in there if text.startswith(context.token)]
        return {"completions": completions, "suppress": True}


_loaded: weakref.WeakKeyDictionary[InteractiveShell, InferMagics] = weakref.WeakKeyDictionary()


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext interactive_infer`: adds `%%infer`, with completion of its options."""
    unload_ipython_extension(shell)
    magics = _loaded[shell] = InferMagics(shell)
    shell.register_magics(magics)
    shell.Completer.custom_matchers.append(magics.complete)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """`%unload_ext interactive_infer`: takes `%%infer` away."""
    if (magics := _loaded.pop(shell, None)) is not None:
        shell.Completer.custom_matchers.remove(magics.complete)
        shell.magics_manager.magics["cell"].pop("infer", None)
