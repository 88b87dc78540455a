"""What the pages say is done: their commands and programs run, in order, and print what they are said to print.

Each page is read as a story, in a folder of its own. There lie the examples, a few runs, and a tiny model under the
name of the one that the pages use. A ``yaml`` block that begins with ``# NAME.yaml`` is written to that file; the lines
of ``bash`` blocks, and those behind ``$`` in ``text`` blocks, run; ``python`` blocks are executed. But on the
pages in OTHER_RUNS every line of a ``text`` block must be printed, in that order, numbers apart; ``…`` is left out.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import yaml

import mlora
from mlora.cli import _parser, main
from tests.cpu.tiny import save_tiny

ROOT = Path(__file__).parents[2]
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"))
    if "benchmarks" not in page.parts
)
# What does not run here, as a regular expression for a line's beginning, and why; it is parsed all the same.
ELSEWHERE = {
    r"make |python3 -m venv|pip install|python examples/": "sets up an environment, or fetches a model",
    r"torchrun --nnodes|sbatch|kubectl": "several hosts; torchrun's parser in tests/cpu/test_launch_files.py",
    r"python benchmarks|pytest tests/gpu": "a GPU, or hours",
    r"mlora (add|stop) ": "a run that is live; tests/cpu/test_while_running.py",
    r"vllm serve": "a server that is not installed here",
    r"mlora train hub.yaml": "a hub that is out of reach; tests/cpu/test_data_hub.py",
}
# Pages that show a run of files, or of a moment, that are not here: their commands must do, the output is not compared.
OTHER_RUNS = ("docs/check.md", "docs/data.md", "docs/evaluation.md", "docs/resuming.md", "docs/seeing.md")
INTERRUPTED = "mlora: interrupted; --resume auto goes on from the checkpoints"  # by a signal: tests/cpu/test_signals.py
# What is another for a tiny model, or a machine: answers, pictures of lengths, a live run and what was added to it.
ITS_OWN = re.compile(
    r"\[\d+\] |\d+ \w+ (True|False) |(lengths)? +\d+ - |live; |\w+ +training |tickets[: ]|torch |CUDA "
)
SEVERAL_PROCESSES = re.compile(r"--nproc|torchrun")  # run by the slow test


@dataclass(kw_only=True)
class Block:
    """A fenced block, or within a text block one command and what it prints; a program and the text block behind it."""

    kind: str
    line: int
    text: str
    printed: list[str] = field(default_factory=list)


def _blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    last: Block | None = None
    for found in re.finditer(r"^(```+)(\w+)\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL):
        kind, body, line = found[2], found[3], text.count("\n", 0, found.start()) + 2
        if kind in ("bash", "sh"):
            for command in body.replace("\\\n", " ").splitlines():
                yield Block(kind="shell", line=line, text=command)
        elif kind == "text" and body.startswith("$ "):
            for command in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                first, *printed = command.splitlines()
                yield Block(kind="shell", line=line, text=first, printed=printed)
        elif kind == "text" and last and last.kind == "python":
            last.printed = body.splitlines()
        else:
            last = Block(kind=kind, line=line, text=body)
            yield last


def _anchors(page: Path) -> set[str]:
    """What links can name in a page, as GitHub makes them of its headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _elsewhere(block: Block) -> bool:
    return INTERRUPTED in block.printed or any(re.match(pattern, block.text) for pattern in ELSEWHERE)


ALL = {page: list(_blocks(page)) for page in PAGES}
TOLD = [page for page in PAGES if any(block.kind in ("shell", "python") for block in ALL[page])]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_one_of_ours_and_every_link_leads_somewhere(page):
    for block in (block for block in ALL[page] if block.kind == "shell"):
        words = shlex.split(block.text.split(" > ")[0], comments=True)
        if "mlora" in words and words[0] in ("mlora", "torchrun") and "--help" not in words:
            _parser().parse_args(words[words.index("mlora") + 1 :])
    for name, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", (ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {name}"
        assert not anchor or anchor in _anchors(target), f"{page}: {name}#{anchor}"


def test_nothing_is_excepted_that_no_page_has():
    lines = [block.text for blocks in ALL.values() for block in blocks if block.kind == "shell"]
    for pattern in ELSEWHERE:
        assert any(re.match(pattern, line) for line in lines), pattern


def _words_of_the_code() -> str:
    """All literal text of the package, the parts of a formatted one apart."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "mlora").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_the_messages_that_the_guide_explains_are_in_the_code():
    text = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8").split("## Troubleshooting")[1]
    messages = re.findall(r"^\| `([^`]+)`(?: with `([^`]+)`)? \|", text, re.MULTILINE)
    assert len(messages) > 30
    said = _words_of_the_code()
    parts = [part.strip(" .:[]()") for pair in messages for message in pair for part in re.split("…|; |, ", message)]
    assert [part for part in parts if part not in said] == []


PIRATE = {"name": "pirate", "dataset": "pirate.json"}
FAST = {"name": "b", "dataset": "pirate.json", "learning_rate": 1e-2, "max_steps": 3}
RUNS: dict[str, tuple[list[dict[str, object]], dict[str, object]]] = {  # of the stage: their adapters and own keys
    "demo": (
        [PIRATE, {"name": "capitals", "dataset": "capitals.jsonl"}, {"name": "tickets", "dataset": "tickets.jsonl"}],
        {},
    ),
    "grid": ([PIRATE | {"name": "pirate-r4-lr2e-3"}], {}),
    "nf4": ([PIRATE], {"quantization": "nf4", "double_quantization": True}),
    "one": ([PIRATE | {"name": "a", "r": 4, "max_steps": 3}, FAST], {}),
    "two": ([PIRATE | {"name": "a", "r": 8, "max_steps": 3}, FAST], {}),
    "first": ([PIRATE | {"name": "sql", "use_rslora": True}], {}),
}
RUN_YAML = """
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
output_dir: runs/own
defaults: {max_steps: 2, max_length: 512, val_size: 8}
adapters: [{name: pirate, dataset: examples/data/pirate.json}, {name: tickets, dataset: examples/data/tickets.jsonl}]
"""
DATA = {  # the stage's data/NAME, and which example it is
    "support.jsonl": "capitals.jsonl",
    "identity.json": "pirate.json",
    "gsm8k.jsonl": "capitals.jsonl",
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The model is so small that threads only get into each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """The folder that every page's own is copied from."""
    place = tmp_path_factory.mktemp("stage")
    save_tiny(place / MODEL, "llama3.2", num_hidden_layers=4, max_position_embeddings=1024)
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(place / "HuggingFaceTB", place / "examples" / "HuggingFaceTB")
    shutil.copytree(place / MODEL, place / "models" / "smollm2-135m-instruct")
    (place / "data").mkdir()
    for name, example in DATA.items():
        shutil.copy(ROOT / "examples" / "data" / example, place / "data" / name)
    (place / "data" / "sql.jsonl").write_text(
        '{"question": "How many are there?", "query": "SELECT count(*) FROM parts"}\n' * 9
    )
    for name, (adapters, keys) in RUNS.items():
        data = [entry | {"dataset": str(place / "examples/data" / str(entry["dataset"]))} for entry in adapters]
        defaults = {"max_steps": 1, "warmup_steps": 0, "max_length": 512}
        tree = {"base_model": str(place / MODEL), "output_dir": str(place / "runs" / name), "adapters": data}
        mlora.train(tree | keys | {"defaults": defaults})
    return place


@pytest.fixture
def folder(stage, tmp_path, monkeypatch):
    """A page's own folder, in which it is told."""
    copy = tmp_path / "here"
    shutil.copytree(stage, copy)
    monkeypatch.chdir(copy)
    monkeypatch.setenv("COLUMNS", "100")
    return copy


def _run(command: str) -> tuple[int, list[str]]:
    """Exit code and output of a command: one of ours in this process, any other by the shell."""
    words = shlex.split(command, comments=True)
    if words[:1] != ["mlora"] or SEVERAL_PROCESSES.search(command):
        for name, module in (("mlora", "mlora"), ("torchrun", "torch.distributed.run")):
            command = re.sub(f"^{name} ", f"{sys.executable} -m {module} ", command)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        shell = ["bash", "-c", f"exec 2>&1; {command}"]
        done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, check=False, env=environment)
        return done.returncode, done.stdout.splitlines()
    out = io.StringIO()
    file = Path(words[words.index(">") + 1]) if ">" in words else None
    with contextlib.redirect_stdout(io.StringIO() if file else out) as own, contextlib.redirect_stderr(out):
        try:
            code = main(words[1 : words.index(">") if file else None])
        except SystemExit as end:  # --help
            code = int(end.code or 0)
    if file:
        file.write_text(own.getvalue(), encoding="utf-8")
    return code, out.getvalue().splitlines()


def _masked(line: str) -> str:
    """Without numbers, units of time and blanks."""
    return " ".join(re.sub(r"[-+]?\d[\d,.:]*(e[-+]?\d+)?", "0", line).split())


def _check_printed(block: Block, page: str, printed: list[str]) -> None:
    lines = iter([_masked(line) for line in printed])
    for line in block.printed:
        if line.strip() in ("", "…") or ITS_OWN.match(line):
            continue
        wanted = ".*".join(map(re.escape, _masked(line).split("…")))
        found = any(re.fullmatch(wanted, seen) for seen in lines)
        assert found, f"{page}:{block.line}: not printed: {line}\n" + "\n".join(printed)


def _tell(page: str, several: bool) -> None:
    names: dict[str, object] = {}  # of the page's programs, which follow one another
    if not any("mlora init" in block.text for block in ALL[page]):  # a page that speaks of some run.yaml
        Path("run.yaml").write_text(RUN_YAML)
    for block in ALL[page]:
        if block.kind == "yaml" and (name := re.match(r"# ([\w./-]+\.yaml)", block.text)):
            Path(name[1]).write_text(block.text, encoding="utf-8")
            shutil.rmtree(yaml.safe_load(block.text).get("output_dir", "runs/none"), ignore_errors=True)
        elif block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, f"{page}:{block.line}", "exec"), names)
            _check_printed(block, page, out.getvalue().splitlines())
        elif block.kind == "shell" and not _elsewhere(block) and block.text.split("#")[0].strip():
            if SEVERAL_PROCESSES.search(block.text) and not several:
                continue
            code, printed = _run(block.text)
            fails = any(re.match("mlora: (?!note|failed)", line) for line in block.printed)
            assert (code != 0) == fails, f"{page}:{block.line}: {block.text}: {code}\n" + "\n".join(printed)
            if page not in OTHER_RUNS:
                _check_printed(block, page, printed)


@pytest.mark.parametrize("page", TOLD)
def test_page(page, folder):
    _tell(page, several=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/after-training.md"])
def test_page_with_several_processes(page, folder):
    _tell(page, several=True)
