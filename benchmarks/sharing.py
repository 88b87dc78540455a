"""What sharing brings: the same jobs in transformers + PEFT one after another, here one after another, here together.

    python benchmarks/sharing.py                       # SmolLM2-135M, 8 adapters, 1 row of 64 tokens each
    python benchmarks/sharing.py --adapters 4 --rows 2 --tokens 128 --repeats 5

All three ways take the same optimizer steps on the same tokens in one process, in turns; medians are printed as ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from mlora import parse_config
from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.engine.device import choose_device, choose_dtype
from mlora.engine.device import prepare as prepare_arithmetic
from mlora.models.decoder import Decoder
from mlora.models.spec import linear_shapes, load_spec
from mlora.models.weights import Checkpoint
from mlora.pipeline.schedule.planner import Planner
from mlora.pipeline.stage import Batch, Stage
from mlora.types import IGNORE, Microbatch, SampleRef, StepDecision, StepPlan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from prepare_model import default_cache, prepare  # type: ignore[import-not-found]

RATE = 1e-4


class Peft:
    """Each job alone on the base model, as PEFT trains: its adapter is the active one, all rows in one batch."""

    def __init__(self, folder: Path, options: argparse.Namespace, device: torch.device) -> None:
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=choose_dtype("auto", device)).to(device)
        lora = LoraConfig(r=options.r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(base, lora, adapter_name="0")
        for name in range(1, options.adapters):
            self.model.add_adapter(str(name), lora)
        self.optimizers = {}
        for name in range(options.adapters):
            self.model.set_adapter(str(name))
            self.optimizers[name] = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=RATE)
        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")

    def step(self, jobs: list[torch.Tensor]) -> None:
        for name, input_ids in enumerate(jobs):
            self.model.set_adapter(str(name))
            with self.autocast:
                loss = self.model(input_ids=input_ids, labels=input_ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()


class Engine:
    """This engine's stage and planner; ``together`` decides whether all jobs are planned at once or one by one."""

    def __init__(self, folder: Path, options: argparse.Namespace, device: torch.device) -> None:
        spec = load_spec(folder)
        layers, dtype = range(spec.num_layers), choose_dtype("auto", device)
        self.options, self.device = options, device
        self.stage = Stage(Decoder(spec, Checkpoint(folder, spec), layers, dtype, device))
        adapter = {"name": "x", "dataset": "none", "r": options.r}
        config = parse_config({"base_model": "x", "adapters": [adapter]}).adapters[0]
        targets = match_targets(config, spec.num_layers)
        for slot in range(options.adapters):
            self.stage.join(slot, AdapterState(config, targets, linear_shapes(spec), layers, dtype, device))

    def together(self, jobs: list[torch.Tensor]) -> None:
        self._train(list(enumerate(jobs)))

    def one_by_one(self, jobs: list[torch.Tensor]) -> None:
        for job in enumerate(jobs):
            self._train([job])

    def _train(self, jobs: list[tuple[int, torch.Tensor]]) -> None:
        planner = Planner(self.options.cap)
        for slot, _ in jobs:
            planner.join(slot, self._one_step(slot))
        rows = dict(jobs)
        while positions := planner.window(1):
            microbatch = positions[0].microbatch
            self.stage.forward(self._batch(microbatch, rows))
            self.stage.backward(microbatch.index)
            for segment in microbatch.segments:
                if segment.ends_step:
                    self.stage.close_step(segment.slot)
                    self.stage.step(segment.slot, StepDecision(RATE, 1.0, False))

    def _one_step(self, slot: int) -> Callable[[], StepPlan | None]:
        rows, tokens = self.options.rows, self.options.tokens
        samples = tuple(SampleRef(i, i, tokens) for i in range(rows))
        plans = iter([StepPlan(slot, 0, samples, rows * (tokens - 1))])
        return lambda: next(plans, None)

    def _batch(self, microbatch: Microbatch, rows: dict[int, torch.Tensor]) -> Batch:
        input_ids_T = torch.zeros(microbatch.rows, dtype=torch.long)
        targets_T = torch.full((microbatch.rows,), IGNORE)
        for segment in microbatch.segments:
            for sample, first, last in segment.sample_rows():
                input_ids_T[first:last] = rows[segment.slot][sample.index].cpu()
                targets_T[first : last - 1] = input_ids_T[first + 1 : last]
        return Batch(microbatch, input_ids_T.to(self.device), targets_T)


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each way, round by round; the first round warms up and does not count."""
    device = choose_device("auto")
    folder = Path(options.model) if options.model else prepare(default_cache())
    prepare_arithmetic(device)
    torch.manual_seed(0)
    peft, engine = Peft(folder, options, device), Engine(folder, options, device)
    ways = {"PEFT, one by one": peft.step, "mLoRA, one by one": engine.one_by_one, "mLoRA, together": engine.together}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    vocab = load_spec(folder).vocab_size
    for turn in range(options.repeats + 1):
        jobs = [torch.randint(vocab, (options.rows, options.tokens), device=device) for _ in range(options.adapters)]
        for name, way in ways.items():
            elapsed = timed(partial(way, jobs), device)
            if turn:
                seconds[name].append(elapsed)
    return seconds


def timed(work: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a local model folder; default: SmolLM2-135M-Instruct")
    for name, value in {"adapters": 8, "rows": 1, "tokens": 64, "r": 16, "repeats": 5, "cap": 2048}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    seconds = measure(options)
    tokens = options.adapters * options.rows * options.tokens
    peer = statistics.median(seconds["PEFT, one by one"])
    shape = f"{options.adapters} adapters r={options.r}, {options.rows} x {options.tokens} tokens each"
    print(f"{shape}; torch {torch.__version__}, {torch.get_num_threads()} CPU threads, {choose_device('auto')}")
    for name, values in seconds.items():
        middle = statistics.median(values)
        spread = f"{min(values):.2f} - {max(values):.2f}"
        print(f"{name:<18} {middle:6.2f} s ({spread})  {tokens / middle:7.0f} tokens/s  {peer / middle:.2f} x PEFT")


if __name__ == "__main__":
    main()
