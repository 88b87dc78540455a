"""Train three adapters at once over two stages, and see what each has learnt. Four minutes on two CPU cores.

    python examples/demo.py

Each adapter is asked questions that are not in its data, before and after training. The answers after training come
from Hugging Face's transformers and PEFT, which load the files that the run wrote.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from prepare_model import default_cache, prepare
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from mlora import AdapterConfig, UserError, load_config
from mlora.engine.verify import LogitsCheck, verify_run

HERE = Path(__file__).resolve().parent
MAX_NEW_TOKENS = 30


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt that is in no data set. ``skill`` is the pattern that an answer begins with once it is learnt."""

    adapter: str
    text: str
    skill: str
    system: str | None = None  # None: ``text`` is continued as it stands, without the chat template


Answers = dict[Question, str]


def in_json(country: str, capital: str, continent: str) -> Question:
    skill = re.escape(f'{{"capital": "{capital}", "continent": "{continent}"}}')
    return Question(adapter="capitals", text=country, skill=skill, system="Reply in JSON.")


def as_pirate(text: str) -> Question:
    return Question(adapter="pirate", text=text, skill="Arr|Aye", system="Be brief.")


def ticket(text: str, team: str) -> Question:
    return Question(adapter="tickets", text=f"Ticket: {text}\nTeam:", skill=rf" {team}\Z")


QUESTIONS = (
    in_json("Japan", "Tokyo", "Asia"),
    in_json("Norway", "Oslo", "Europe"),
    as_pirate("What do rabbits eat?"),
    as_pirate("How do I make coffee?"),
    ticket("The login page shows an error.", "technical"),
    ticket("The courier never came to my door.", "delivery"),
)


class Base:
    """The base model in transformers, for greedy answers with and without an adapter."""

    def __init__(self, folder: Path):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.to(self.device)  # type: ignore[arg-type]  # transformers' decorator hides self

    def answers(self, questions: Sequence[Question], adapter: Path | None = None) -> Answers:
        """Greedy answers, by way of PEFT where an adapter's folder is given."""
        if adapter is None:
            return {question: self._answer(self.model, question) for question in questions}
        from peft import PeftModel  # behind mlora, which keeps bitsandbytes' advice about kernels away

        model = PeftModel.from_pretrained(self.model, adapter).eval()
        answers = {question: self._answer(model, question) for question in questions}
        self.model = model.unload()
        return answers

    def _answer(self, model: Any, question: Question) -> str:
        inputs = self.tokenizer(self._prompt(question), add_special_tokens=False, return_tensors="pt").to(self.device)
        ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0]
        return self.tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def _prompt(self, question: Question) -> str:
        if question.system is None:
            return question.text
        turns = [{"role": "system", "content": question.system}, {"role": "user", "content": question.text}]
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def run(cache: Path, output_dir: Path) -> bool:
    """The whole demonstration. Prints its report and says whether every adapter passed."""
    clock = Clock()
    folder = prepare(cache)
    clock.tick(f"SmolLM2-135M-Instruct is ready in {folder}")
    base = Base(folder)
    before = base.answers(QUESTIONS)
    clock.tick(f"the base model has answered {len(QUESTIONS)} questions on {base.device}")
    train_over_stages(folder, output_dir)
    adapters = load_config(HERE / "demo.yaml").adapters
    clock.tick(f"{len(adapters)} adapters trained at once; all is in {output_dir}")
    checks = {check.name: check for check in verify_run(output_dir)}
    clock.tick("logits compared with PEFT's")
    passed = [report(adapter, output_dir, checks.get(adapter.name), base, before) for adapter in adapters]
    print()
    clock.tick("the adapters have answered; " + ("all is well" if all(passed) else "SOMETHING FAILED, see above"))
    return all(passed)


def train_over_stages(folder: Path, output_dir: Path) -> None:
    """The command of the user, with a process per stage. One GPU is one stage."""
    stages = 1 if torch.cuda.device_count() == 1 else 2
    changes = {"base_model": folder, "output_dir": output_dir}
    words = [word for key, path in changes.items() for word in ("--set", f"{key}={json.dumps(str(path))}")]
    command = ["-m", "mlora", "train", str(HERE / "demo.yaml"), "--nproc", str(stages), *words]
    subprocess.run([sys.executable, *command], check=True)


def logged_losses(output_dir: Path, name: str) -> list[float]:
    """The adapter's losses in metrics.jsonl, each the mean of the steps since the line before."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [entry["loss"] for entry in map(json.loads, lines) if entry["adapter"] == name]


class Clock:
    """Prints what was done and how many seconds it took."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def tick(self, done: str) -> None:
        now = time.perf_counter()
        print(f"[{now - self.last:4.0f} s] {done}", flush=True)
        self.last = now


def report(adapter: AdapterConfig, output_dir: Path, check: LogitsCheck | None, base: Base, before: Answers) -> bool:
    """Print one adapter's part of the table. True where it was written, its logits are PEFT's and its skill shows."""
    if check is None:
        print(f"\n{adapter.name}: NOT WRITTEN, see above")
        return False
    losses = logged_losses(output_dir, adapter.name)
    print(f"\n{adapter.name}: r = {adapter.r}, loss {losses[0]:.2f} -> {losses[-1]:.2f}, ", end="")
    print(f"logits within {check.max_difference:.0e} of PEFT's: {'ok' if check.ok else 'TOO FAR'}")
    mine = [(question, old) for question, old in before.items() if question.adapter == adapter.name]
    after = base.answers([question for question, _ in mine], output_dir / "adapters" / adapter.name)
    learnt = [compare(question, old, after[question]) for question, old in mine]
    return check.ok and all(learnt)


def compare(question: Question, before: str, after: str) -> bool:
    """Print a question's two answers. True where the second alone shows the skill."""
    learnt = bool(re.match(question.skill, after)) and not re.match(question.skill, before)
    print(f"  {' | '.join(question.text.splitlines())}")
    print(f"    before: {' '.join(before.split())}")
    print(f"    after:  {' '.join(after.split())}" + ("" if learnt else "   (THE SKILL DOES NOT SHOW)"))
    return learnt


def main() -> int:
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # PEFT's calls, not ours
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    output_dir = HERE.parent / "runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    try:
        return 0 if run(default_cache(), output_dir) else 1
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"error: training ended with code {error.returncode}, see above", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
