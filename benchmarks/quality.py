"""Evaluation loss after training on bases in 16 bits (dense: bfloat16), NF4 (double quantised), int8 and FP8.

Three seeds of every task:

    python benchmarks/quality.py MODEL gsm8k.jsonl alpaca.json chats.json --out quality.jsonl
    python benchmarks/quality.py MODEL rows.jsonl --device cpu --bases dense nf4 int8 --steps 2 --rows 20 --seeds 0 1

One run for each base trains all tasks with all seeds together, r=16 on all linears; a seed decides about start, order
of rows and nothing else. Every tenth row of a file is held out, the same ones for all; losses are those on them behind
the last step. Two tables: mean and spread (largest less smallest) of the seeds; and how far the losses lie above those
on the dense base, mean of the seeds, with a word on whether that is within the spread there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import mlora
from mlora.types import UserError

BASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "float16": {"dtype": "float16"},
    "nf4": {"quantization": "nf4", "double_quantization": True},
    "int8": {"quantization": "int8"},
    "fp8": {"quantization": "fp8"},
}
EVERY = 10  # one row of so many is held out

Losses = dict[str, list[float]]  # task -> evaluation loss by seed


def read_rows(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]


def split(path: Path, folder: Path, most: int | None) -> tuple[Path, Path]:
    """Files of the rows to train on and of those held out."""
    rows = read_rows(path)[:most]
    parts = [row for i, row in enumerate(rows) if i % EVERY], rows[::EVERY]
    files = folder / f"{path.stem}-train.json", folder / f"{path.stem}-held-out.json"
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part), encoding="utf-8")
    return files


def adapters(tasks: Mapping[str, tuple[Path, Path]], options: argparse.Namespace) -> list[dict[str, Any]]:
    return [
        {
            "name": f"{task}-{seed}",
            "dataset": str(train),
            "eval_dataset": str(held_out),
            "eval_steps": options.steps,
            "max_steps": options.steps,
            "learning_rate": options.learning_rate,
            "max_length": options.max_length,
            "logging_steps": options.steps,
            "seed": seed,
        }
        for task, (train, held_out) in tasks.items()
        for seed in options.seeds
    ]


def measure(base: str, tasks: Mapping[str, tuple[Path, Path]], folder: Path, options: argparse.Namespace) -> Losses:
    """Train everything on ``base``. Raises UserError where this machine cannot."""
    tree = {
        "base_model": str(options.model),
        "output_dir": str(folder / base),
        "device": options.device,
        "adapters": adapters(tasks, options),
        **BASES[base],
    }
    with redirect_stdout(sys.stderr):
        results = mlora.train(tree).adapters
    return {task: [results[f"{task}-{seed}"].evaluations[-1].loss for seed in options.seeds] for task in tasks}


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def losses_table(found: Mapping[str, Losses], tasks: Sequence[str]) -> str:
    def cell(losses: Sequence[float]) -> str:
        return f"{statistics.mean(losses):.4f} ({max(losses) - min(losses):.4f})"

    lines = [[task, *(cell(losses[task]) for losses in found.values())] for task in tasks]
    return table(["evaluation loss: mean (spread)", *found], lines)


def differences_table(found: Mapping[str, Losses], tasks: Sequence[str]) -> str:
    others = [base for base in found if base != "dense"]

    def cell(base: str, task: str) -> str:
        dense = found["dense"][task]
        above = statistics.mean(found[base][task]) - statistics.mean(dense)
        return f"{above:+.4f}, {'within' if abs(above) <= max(dense) - min(dense) else 'outside'}"

    lines = [[task, *(cell(base, task) for base in others)] for task in tasks]
    return table(["above dense", *others], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the base model")
    parser.add_argument("files", type=Path, nargs="+", help="a data file for each task")
    parser.add_argument("--bases", nargs="+", choices=BASES, default=list(BASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=120, help="of 8 rows")
    parser.add_argument("--rows", type=int, help="the first rows of each file; default: all")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help="a file to which each base's losses are appended as one line of JSON")
    options = parser.parse_args()
    found: dict[str, Losses] = {}
    notes = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tasks = {path.stem: split(path, folder, options.rows) for path in options.files}
        for base in options.bases:
            start = time.perf_counter()
            try:
                found[base] = measure(base, tasks, folder, options)
            except UserError as error:
                notes.append(f"{base}: skipped: {error}")
                continue
            notes.append(f"{base}: {time.perf_counter() - start:.0f} s")
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"base": base, "steps": options.steps, "losses": found[base]}) + "\n")
    print(f"\n{options.model.name}, {options.steps} steps of 8 rows, seeds {options.seeds}; {'; '.join(notes)}\n")
    print(losses_table(found, list(tasks)))
    if "dense" in found and len(found) > 1:
        print("\n" + differences_table(found, list(tasks)))


if __name__ == "__main__":
    main()
