"""A whole run: losses, memory, precision, order of adapters, files, exit codes, and what a caller sees."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mlora
from mlora.adapters.init import initial_matrices
from mlora.adapters.optimizer import Optimizer
from mlora.adapters.state import AdapterState
from mlora.data import Sampler
from mlora.models.tokenizer import load_tokenizer
from mlora.tasks import SftTask
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.tiny import VOCAB, save_tiny

ROOT = Path(__file__).parents[2]
STILL = {"learning_rate": 0, "lr_scheduler_type": "constant"}  # losses of the untrained model; nothing is exported


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "llama3.2")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return str(write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", 10, seed=1, longest=30))


def _adapter(rows, name="a", **keys):
    common = {"r": 4, "learning_rate": 1e-2, "max_steps": 3, "warmup_steps": 0, "per_device_train_batch_size": 4}
    return {"name": name, "dataset": rows, **common, **keys}


def _config(model, adapters, folder, **top):
    return {"base_model": str(model), "output_dir": str(folder), "adapters": adapters, **top}


def _reference_losses(model, adapter, steps):
    """Loss of each step by transformers, one row at a time: Σ loss over the step's targets / their number."""
    config = mlora.parse_config({"base_model": "m", "adapters": [adapter]}).adapters[0]
    task = SftTask(config.dataset, load_tokenizer(model, VOCAB), 256, VOCAB)
    encoded = task.encode(list(_read(config.dataset.path)))
    reference = AutoModelForCausalLM.from_pretrained(model)
    sampler = Sampler(len(encoded), config.seed, config.rows_per_step)
    losses = []
    for step in range(steps):
        total = count = 0
        for index in sampler.indices(step):
            ids, labels = (torch.tensor([x]) for x in (encoded[index].input_ids, encoded[index].labels))
            targets = int((labels[:, 1:] != -100).sum())
            with torch.no_grad():
                total, count = total + reference(ids, labels=labels).loss.item() * targets, count + targets
        losses.append(total / count)
    return losses


def _read(path):
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        yield mlora.types.Row(json.loads(line), str(path), number)


def _losses(results, name="a"):
    return [report.loss for report in results.adapters[name].reports]


@pytest.mark.parametrize("cap", [16, 4096])
@pytest.mark.parametrize("size", [(1, 4), (3, 1)])
def test_losses_are_transformers_for_short_last_steps_and_packed_rows(tmp_path, model, rows, size, cap):
    """10 rows: the last step of an epoch has 2 rows or 1, and is divided by their own targets."""
    adapter = _adapter(
        rows, max_steps=5, per_device_train_batch_size=size[0], gradient_accumulation_steps=size[1], **STILL
    )
    results = run(tmp_path / "run", model, [adapter], microbatch_tokens=cap)
    assert _losses(results) == pytest.approx(_reference_losses(model, adapter, 5), rel=1e-6)


def test_a_labelled_first_token_does_not_count(tmp_path, model):
    """Plain text: every token is labelled, and all but the first are targets."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "red green blue " * n}) for n in (1, 4, 9)))
    adapter = _adapter(str(path), max_steps=1, per_device_train_batch_size=3, **STILL)
    results = run(tmp_path / "run", model, [adapter])
    assert _losses(results) == pytest.approx(_reference_losses(model, adapter, 1), rel=1e-6)


def test_batch_size_and_accumulation_are_interchangeable(tmp_path, model, rows):
    outcomes = []
    for batch, accumulation in ((4, 1), (2, 2), (1, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        outcomes.append(outcome(run(tmp_path / str(batch), model, [_adapter(rows, **sizes)]), "a"))
    assert not outcomes[0].differences(outcomes[1]) and not outcomes[0].differences(outcomes[2])


def _peak_bytes(tmp_path, model, rows, accumulation) -> int:
    """The most bytes of tensors alive at once beyond those at the start, by torch's profiler."""
    adapter = _adapter(rows, per_device_train_batch_size=1, gradient_accumulation_steps=accumulation, max_steps=2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(tmp_path / str(accumulation), model, [adapter], microbatch_tokens=64)
    trace = tmp_path / f"{accumulation}.json"
    profile.export_chrome_trace(str(trace))
    events = [event["args"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    totals = [args["Total Allocated"] for args in events if args["Device Type"] == 0]
    return max(totals) - totals[0]


def test_memory_does_not_grow_with_accumulation(tmp_path, model):
    """Rows of one length, in microbatches of one row: 32 of them a step need no more than 2."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"text": "red green blue " * 8}) for _ in range(32)))
    small, large = (_peak_bytes(tmp_path, model, str(path), accumulation) for accumulation in (2, 32))
    assert large <= 1.02 * small


def _moved(state: AdapterState) -> list[list[bool]]:
    """Whether A and B differ from where they started, for each module."""
    moved = []
    for name, pair in state.matrices().items():
        start = initial_matrices(state.config, name, pair[0].shape[1], pair[1].shape[1])
        moved.append([not torch.equal(x, y.to(x.dtype)) for x, y in zip(pair, start, strict=True)])
    return moved


def test_after_one_step_every_b_has_moved_and_after_two_every_a(tmp_path, model, rows, monkeypatch):
    adapters = [
        _adapter(rows, "small", r=4, target_modules=["q_proj", "down_proj"]),
        _adapter(rows, "all", r=16),
        _adapter(rows, "large", r=64, target_modules=["v_proj", "gate_proj"], seed=3),
    ]
    seen = []
    step = Optimizer.step

    def watched(self, *arguments):
        step(self, *arguments)
        seen.append((self._state.config.name, _moved(self._state)))

    monkeypatch.setattr(Optimizer, "step", watched)
    run(tmp_path / "run", model, adapters)
    for name, modules in (("small", 6), ("all", 21), ("large", 6)):
        first, second = [moved for adapter, moved in seen if adapter == name][:2]
        assert first == [[False, True]] * modules and second == [[True, True]] * modules


def test_adapters_that_follow_each_other_in_a_slot_learn_alike(tmp_path, model, rows):
    adapters = [_adapter(rows, name, max_steps=6) for name in ("first", "second", "third")]
    results = run(tmp_path / "run", model, adapters, max_active=1)
    outcomes = [outcome(results, name) for name in ("first", "second", "third")]
    assert outcomes[0].losses[-1] < outcomes[0].losses[0]
    assert not outcomes[0].differences(outcomes[1]) and not outcomes[0].differences(outcomes[2])


@pytest.mark.parametrize("active", [1, 2, 64])
def test_no_more_than_max_active_train_at_once(tmp_path, model, rows, active):
    steps = {"a": 2, "b": 5, "c": 3, "d": 1}
    order = []
    adapters = [_adapter(rows, name, max_steps=count) for name, count in steps.items()]
    results = run(tmp_path / "run", model, adapters, lambda report: order.append(report.adapter), max_active=active)
    spans = [range(order.index(name), len(order) - order[::-1].index(name)) for name in steps]
    at_once = max(sum(position in span for span in spans) for position in range(len(order)))
    assert at_once == min(active, len(steps))
    assert {name: order.count(name) for name in steps} == steps
    assert all(result.state == "ended" for result in results.adapters.values())


def test_a_skipped_step_moves_nothing(tmp_path, model, rows, monkeypatch):
    """Step 2 is not finite; torch's updates of the other steps alone, from the first weights, give the last."""
    met, updates = [], []
    squares, step = AdapterState.sums_of_squares, Optimizer.step

    def once_nan(self):
        met.append(self.master.clone())
        return torch.tensor([math.nan]) if len(met) == 2 else squares(self)

    def recorded(self, learning_rate, coefficient):
        updates.append((learning_rate, self._state.grad * coefficient))
        step(self, learning_rate, coefficient)
        updates[-1] += (self._state.master.clone(),)

    monkeypatch.setattr(AdapterState, "sums_of_squares", once_nan)
    monkeypatch.setattr(Optimizer, "step", recorded)
    run(tmp_path / "run", model, [_adapter(rows, max_steps=4)])
    assert len(met) == 4 and len(updates) == 3
    assert torch.equal(met[1], met[2]) and not torch.equal(met[2], met[3])
    twin = torch.nn.Parameter(met[0])
    reference = torch.optim.AdamW([twin], betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for rate, grad, after in updates:
        reference.param_groups[0]["lr"] = rate
        twin.grad = grad
        reference.step()
        assert torch.equal(twin.data, after)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_train_and_export_float32(tmp_path, model, dtype):
    rows = str(write_rows(tmp_path / "rows.jsonl", 8, seed=2, longest=4))
    adapters = [_adapter(rows, "a", max_steps=100), _adapter(rows, "b", max_steps=100, lora_dropout=0.1, r=16)]
    results = run(tmp_path / "run", model, adapters, dtype=dtype)
    for name in ("a", "b"):
        result = results.adapters[name]
        assert result.state == "ended" and not any(report.skipped for report in result.reports)
        assert all(math.isfinite(report.loss) and math.isfinite(report.grad_norm) for report in result.reports)
        assert result.reports[-1].loss < 0.5 * result.reports[0].loss
        tensors = load_file(result.folder / "adapter_model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
        assert any(not torch.equal(x, x.to(getattr(torch, dtype)).float()) for x in tensors.values()), "rounded masters"


def test_metrics_have_a_line_for_each_logging_step(tmp_path, model, rows):
    adapters = [_adapter(rows, "a", max_steps=7, logging_steps=3), _adapter(rows, "b", max_steps=2)]
    results = run(tmp_path / "run", model, adapters)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    fields = ["adapter", "step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "tokens_per_second"]
    assert all(list(line) == fields for line in lines)
    assert [line["step"] for line in lines if line["adapter"] == "b"] == [1, 2]
    of_a = [line for line in lines if line["adapter"] == "a"]
    reports = results.adapters["a"].reports
    assert [line["step"] for line in of_a] == [3, 6, 7]
    assert of_a[0]["loss"] == pytest.approx(sum(report.loss for report in reports[:3]) / 3, rel=1e-12)
    assert of_a[0]["epoch"] == 1.0 and of_a[1]["grad_norm"] == reports[5].grad_norm
    assert of_a[2]["num_tokens"] == reports[6].num_tokens > of_a[1]["num_tokens"] > 0


def test_numbers_that_are_not_finite_are_written_as_text(tmp_path, model, rows, monkeypatch, capsys):
    monkeypatch.setattr(AdapterState, "sums_of_squares", lambda self: torch.tensor([math.nan]))
    results = run(tmp_path / "run", model, [_adapter(rows, max_steps=9, max_nonfinite_steps=2)])
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    *lines, last = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert [(line["grad_norm"], line["skipped"]) for line in lines] == [("nan", True)] * 2
    reason = results.adapters["a"].reason
    assert last == {"adapter": "a", "step": 2, "state": "failed", "reason": reason}
    assert results.failed == ("a",) and results.adapters["a"].folder is None
    assert "not finite in 2 steps in a row, the last one step 2" in results.adapters["a"].reason
    shown = capsys.readouterr().out
    assert "skipped: loss or gradient is not finite" in shown and "a  failed: loss or gradient was" in shown


def test_a_run_folder_is_replaced_only_when_asked(tmp_path, model, rows):
    config = _config(model, [_adapter(rows)], tmp_path / "run")
    mlora.train(config)
    with pytest.raises(
        mlora.UserError, match=r"holds an earlier run; give another folder, or --overwrite \(overwrite=True\)"
    ):
        mlora.train(config)
    mlora.train(_config(model, [_adapter(rows, "b")], tmp_path / "run"), overwrite=True)
    assert [path.name for path in (tmp_path / "run" / "adapters").iterdir()] == ["b"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["adapter"] for line in lines} == {"b"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_anything_else_is_left_alone(tmp_path, model, rows, overwrite):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("words")
    with pytest.raises(mlora.UserError, match=r"chapter1.txt is not from a run"):
        mlora.train(_config(model, [_adapter(rows)], tmp_path / "thesis"), overwrite=overwrite)
    with pytest.raises(mlora.UserError, match="is a file; give a folder"):
        mlora.train(_config(model, [_adapter(rows)], tmp_path / "thesis" / "chapter1.txt"), overwrite=overwrite)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter1.txt"]


@pytest.mark.parametrize("mistake", [{"target_modules": ["c_attn"]}, {"dataset": "/no/rows.jsonl"}])
def test_a_mistake_is_found_before_anything_is_written(tmp_path, model, rows, mistake):
    with pytest.raises(mlora.UserError):
        run(tmp_path / "run", model, [_adapter(rows, "good"), _adapter(rows, "bad") | mistake])
    assert not (tmp_path / "run").exists()


def test_the_three_forms_of_a_configuration_are_the_same(tmp_path, model, rows):
    tree = _config(model, [_adapter(rows)], tmp_path / "tree")
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree | {"output_dir": "file"}))
    results = mlora.train(tree)
    built = mlora.train(mlora.parse_config(tree | {"output_dir": str(tmp_path / "built")}))
    read = mlora.train(str(file))
    assert read.output_dir == tmp_path / "file"
    for other in (built, read):
        assert not outcome(results, "a").differences(outcome(other, "a"))
    result = results.adapters["a"]
    assert (result.state, result.reason, results.failed) == ("ended", "", ())
    assert result.loss == result.reports[-1].loss and result.folder == tmp_path / "tree" / "adapters" / "a"


def test_reports_tell_each_step(tmp_path, model, rows):
    reports = []
    results = run(tmp_path / "run", model, [_adapter(rows, max_steps=-1, num_train_epochs=1.5)], reports.append)
    assert tuple(reports) == results.adapters["a"].reports
    assert [(report.adapter, report.step, report.total_steps) for report in reports] == [
        ("a", i, 5) for i in range(1, 6)
    ]
    assert [report.epoch for report in reports] == pytest.approx([0.4, 0.8, 1.0, 1.4, 1.8])


def _mlora(*arguments, **keys):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "mlora", *map(str, arguments)],
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - else a background shell ignores it
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keys,
    )


def _write(tmp_path, model, adapters):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(_config(model, adapters, "run")))
    return path


def test_exit_code_0_when_all_adapters_have_ended(tmp_path, model, rows):
    path = _write(tmp_path, model, [_adapter(rows, "a"), _adapter(rows, "b", max_steps=5)])
    process = _mlora("train", path, "--set", "adapters.b.max_steps=4")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "b  step 4/4" in out and "a  step 3/3" in out
    assert sorted(path.name for path in (tmp_path / "run" / "adapters").iterdir()) == ["a", "b"]
    verify = _mlora("verify", tmp_path / "run")
    out, err = verify.communicate(timeout=120)
    assert verify.returncode == 0, err
    assert out.count("same logits") == 2


def test_exit_code_3_when_an_adapter_failed(tmp_path, model, rows):
    process = _mlora("train", _write(tmp_path, model, [_adapter(rows, "good"), _adapter(rows, "still", **STILL)]))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3
    last = err.splitlines()[-1]
    assert last.startswith("mlora: failed: still; still: ") and "every B is zero" in last and "every B is zero" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapters": [{"name": "a"}]}, "mlora: adapters[0].dataset: missing"),
        ({"base_model": "/no/model"}, "mlora: base_model: '/no/model' is not a folder here"),
    ],
)
def test_exit_code_2_and_one_line_for_a_users_mistake(tmp_path, rows, model, change, message):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(_config(model, [_adapter(rows)], "run") | change))
    process = _mlora("train", path)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err.splitlines()[-1].startswith(message) and "Traceback" not in err


def test_exit_code_130_when_interrupted(tmp_path, model, rows):
    """The adapter that had ended is exported whole; of the other nothing is left."""
    path = _write(tmp_path, model, [_adapter(rows, "short", max_steps=1), _adapter(rows, "long", max_steps=10**6)])
    process = _mlora("train", path)
    for line in process.stdout:
        if line.startswith("long  step       3/"):
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=180)
    assert process.returncode == 130
    assert err.splitlines()[-1].startswith("mlora: interrupted") and "Traceback" not in err
    assert [folder.name for folder in (tmp_path / "run" / "adapters").iterdir()] == ["short"]
