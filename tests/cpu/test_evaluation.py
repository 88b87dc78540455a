"""Evaluation: its numbers are transformers', its decisions an adapter's own, and it changes no bit of the training."""

from __future__ import annotations

import json
import math
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import mlora
from mlora import UserError
from mlora.checkpoint.versions import versions
from mlora.config import AdapterConfig, DatasetConfig
from mlora.data import read_rows
from mlora.engine.evaluate import evaluation_json
from mlora.engine.evaluation import EvaluationReport, best_of, fruitless, is_due, is_lower
from mlora.models.tokenizer import load_tokenizer
from mlora.tasks import SftTask
from tests.cpu.runs import outcome, run, write_rows
from tests.cpu.tiny import VOCAB

NAMES = "abc"


class Crash(Exception):
    pass


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return {
        name: str(write_rows(folder / f"{name}.jsonl", count, seed, 25))
        for seed, (name, count) in enumerate([("a", 14), ("b", 14), ("c", 14), ("held", 9)])
    }


@pytest.fixture(scope="module")
def adapters(data):
    """A file, a share and a number of rows; every n steps, at shares, by patience; with dropout and uneven steps."""
    common = {"learning_rate": 2e-2, "max_steps": 10, "warmup_steps": 1, "per_device_train_batch_size": 3}
    return [
        common
        | {"name": "a", "dataset": data["a"], "r": 8, "lora_dropout": 0.1, "eval_dataset": data["held"]}
        | {"eval_steps": 2, "load_best_model_at_end": True},
        common | {"name": "b", "dataset": data["b"], "r": 4, "val_size": 0.25, "eval_steps": [0.25, 0.5]},
        common
        | {"name": "c", "dataset": data["c"], "r": 16, "val_size": 5, "eval_steps": 1, "learning_rate": 0.3}
        | {"early_stopping_patience": 2, "load_best_model_at_end": True, "max_steps": 30},
    ]


def local(stages):
    return {"stages": stages, "transport": "local"}


def numbers(results, name):
    return [(e.step, e.loss, e.correct_tokens, e.target_tokens, e.best) for e in results.adapters[name].evaluations]


@pytest.fixture(scope="module")
def undisturbed(model, adapters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    results = run(folder, model, adapters, microbatch_tokens=120)
    return results, {name: (outcome(results, name), numbers(results, name)) for name in NAMES}, metrics(folder)


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]
    return {name: [line for line in lines if line["adapter"] == name] for name in NAMES}


def assert_undisturbed(results, undisturbed):
    for name, (expected, evaluations) in undisturbed[1].items():
        assert numbers(results, name) == evaluations, name
        assert not expected.differences(outcome(results, name)), name
        assert results.adapters[name].reason == undisturbed[0].adapters[name].reason


def test_evaluations_stand_where_they_were_asked_for(undisturbed):
    steps = {name: [e[0] for e in evaluations] for name, (_, evaluations) in undisturbed[1].items()}
    assert steps["a"] == [2, 4, 6, 8, 10]
    assert steps["b"] == [3, 5, 10]
    assert steps["c"] == list(range(1, len(steps["c"]) + 1))
    assert len(steps["c"]) < 30
    assert {name: lines[-1]["step"] for name, lines in undisturbed[2].items()} == {
        "a": 10,
        "b": 10,
        "c": steps["c"][-1],
    }


def test_patience_ends_an_adapter_and_its_best_step_is_exported(tmp_path, model, adapters, undisturbed):
    result = undisturbed[0].adapters["c"]
    losses = [e.loss for e in result.evaluations]
    best = losses.index(min(losses)) + 1
    assert result.best_step == best
    assert result.evaluations[-1].step == len(result.reports) == best + 2
    assert "early stopping: no lower eval_loss in 2 evaluations" in result.reason
    assert f"those of step {best}, whose eval_loss" in (result.folder / "README.md").read_text()
    assert "eval_loss" not in (undisturbed[0].adapters["b"].folder / "README.md").read_text()
    short = [{**adapters[2], "early_stopping_patience": None, "load_best_model_at_end": False}]
    stopped = run(tmp_path / "run", model, short, lambda report: "end" if report.step == best else None)
    assert outcome(stopped, "c").weights.keys() == undisturbed[1]["c"][0].weights.keys()
    assert not [k for k, x in outcome(stopped, "c").weights.items() if not x.equal(undisturbed[1]["c"][0].weights[k])]


def test_the_numbers_are_those_of_transformers(tmp_path, model, data, adapters, undisturbed):
    """With the exported adapter in PEFT, row by row: the loss that transformers gives, and its largest logits."""
    last = {**adapters[0], "load_best_model_at_end": False}
    results = run(tmp_path / "run", model, [last])
    report = results.adapters["a"].evaluations[-1]
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), results.adapters["a"].folder).eval()
    losses, correct, count = [], 0, 0
    path = Path(data["held"])
    task = SftTask(DatasetConfig(path=path), load_tokenizer(model, VOCAB), 1024, VOCAB)
    for encoded in task.encode(list(read_rows(path))):
        ids, labels = torch.tensor([encoded.input_ids]), torch.tensor([encoded.labels])
        with torch.no_grad():
            out = peft(ids, labels=labels)
        shifted = labels[0, 1:]
        trained = shifted != -100
        losses.append(float(out.loss) * int(trained.sum()))
        correct += int((out.logits[0, :-1].argmax(-1) == shifted)[trained].sum())
        count += int(trained.sum())
    assert report.target_tokens == count
    assert report.loss == pytest.approx(sum(losses) / count, rel=1e-5)
    assert report.correct_tokens == correct
    assert 0 < report.accuracy <= 1
    assert report.perplexity == pytest.approx(math.exp(report.loss))


def test_evaluation_changes_no_bit_of_the_training(tmp_path, model, adapters, undisturbed):
    plain = {k: v for k, v in adapters[0].items() if not k.startswith(("eval", "load"))}
    results = run(tmp_path / "run", model, [plain])
    expected = undisturbed[1]["a"][0]
    assert outcome(results, "a").losses == expected.losses
    assert outcome(results, "a").norms == expected.norms


@pytest.mark.parametrize("name", NAMES)
def test_alone_and_cut_otherwise_gives_the_same_bits(tmp_path, model, adapters, undisturbed, name):
    own = [adapter for adapter in adapters if adapter["name"] == name]
    results = run(tmp_path / "run", model, own, microbatch_tokens=64)
    expected, evaluations = undisturbed[1][name]
    assert numbers(results, name) == evaluations
    assert not expected.differences(outcome(results, name))


@pytest.mark.parametrize("stages, in_flight", [(2, 1), (4, 2)])
def test_stages_change_no_bit(tmp_path, model, adapters, undisturbed, stages, in_flight):
    pipeline = local(stages) | {"in_flight": in_flight}
    results = run(tmp_path / "run", model, adapters, microbatch_tokens=90, pipeline=pipeline)
    assert_undisturbed(results, undisturbed)


def crash_at(adapter, step):
    def on_step(report):
        if (report.adapter, report.step) == (adapter, step):
            raise Crash

    return on_step


@pytest.mark.parametrize("before, after", [(1, 1), (1, 3), (3, 1)])
@pytest.mark.parametrize("step", [3, 6, 9])
def test_a_crash_changes_no_bit(tmp_path, model, adapters, undisturbed, before, after, step):
    """Best step and patience go on too; the weights of the best step come from the checkpoint."""
    folder = tmp_path / "run"
    top = {"microbatch_tokens": 120, "save_steps": 1}
    with pytest.raises(Crash):
        run(folder, model, adapters, crash_at("a", step), pipeline=local(before), **top)
    config = {
        "base_model": str(model),
        "output_dir": str(folder),
        "adapters": adapters,
        "pipeline": local(after),
        **top,
    }
    assert_undisturbed(mlora.train(config, resume="auto"), undisturbed)
    assert metrics(folder) == undisturbed[2]


def test_a_checkpoint_holds_the_best_weights_only_where_they_are_not_its_own(undisturbed):
    folder = undisturbed[0].output_dir / "checkpoints"
    tensors = load_file(versions(folder / "c")[-1] / "state.safetensors")
    assert any(name.startswith("best.") for name in tensors)
    assert not any(name.startswith("best.") for name in load_file(versions(folder / "b")[-1] / "state.safetensors"))


def test_status_has_the_last_and_the_best_evaluation(undisturbed):
    from mlora.engine.status import read_status, status_table

    tree = read_status(undisturbed[0].output_dir)
    last = undisturbed[0].adapters["a"].evaluations[-1]
    shown = tree["adapters"]["a"]
    assert (shown["eval_step"], float(shown["eval_loss"]), shown["eval_accuracy"]) == (10, last.loss, last.accuracy)
    assert shown["best_step"] == undisturbed[0].adapters["a"].best_step
    assert "eval loss" in status_table(tree)
    assert f"{float(shown['best_eval_loss']):.4f} step {shown['best_step']}" in status_table(tree)


def test_a_poisoned_evaluation_parks_its_adapter_alone(tmp_path, model, adapters, undisturbed, monkeypatch):
    from mlora.pipeline.stage import Stage

    original = Stage.score

    def failing(self, batch, x_TD=None):
        if any(segment.adapter == 0 and segment.step == 3 for segment in batch.microbatch.segments):
            raise MemoryError("no room")
        return original(self, batch, x_TD)

    monkeypatch.setattr(Stage, "score", failing)
    results = run(tmp_path / "run", model, adapters, microbatch_tokens=120, pipeline=local(3))
    assert results.adapters["a"].state == "failed"
    assert "no room" in results.adapters["a"].reason
    assert len(results.adapters["a"].reports) == 4
    for name in "bc":
        assert numbers(results, name) == undisturbed[1][name][1]
        assert not undisturbed[1][name][0].differences(outcome(results, name)), name


def test_more_held_out_than_there_is_says_so(tmp_path, model, data):
    adapter = {"name": "a", "dataset": data["a"], "val_size": 14, "max_steps": 1, "warmup_steps": 0}
    with pytest.raises(UserError, match=r"adapters\[a\].val_size: 14 holds out 14 of its 14 rows"):
        run(tmp_path / "run", model, [adapter])


def resumed(model, folder, adapter, **words):
    config = {"base_model": str(model), "output_dir": str(folder), "adapters": [adapter]}
    return mlora.train(config, resume="auto", **words)


def test_other_rows_and_keys_are_named_when_a_run_goes_on(tmp_path, model, data, adapters):
    folder = tmp_path / "run"
    adapter = {**adapters[0], "load_best_model_at_end": False}
    with pytest.raises(Crash):
        run(folder, model, [adapter], crash_at("a", 7), save_steps=1)
    with pytest.raises(UserError, match=r"adapters\[a\]: the rows that it is evaluated on are others"):
        resumed(model, folder, {**adapter, "eval_dataset": data["b"]})
    with pytest.raises(UserError, match=r"adapters\[a\].eval_steps is 3.0 and was 2.0"):
        resumed(model, folder, {**adapter, "eval_steps": 3})
    results = resumed(model, folder, {**adapter, "eval_steps": 3}, allow_changed=True)
    assert [e.step for e in results.adapters["a"].evaluations] == [2, 4, 6, 9, 10]


def test_best_weights_that_were_not_kept_are_not_made_up(tmp_path, model, adapters):
    folder = tmp_path / "run"
    adapter = {k: v for k, v in adapters[2].items() if k not in ("early_stopping_patience", "load_best_model_at_end")}
    with pytest.raises(Crash):
        run(folder, model, [adapter], crash_at("c", 12), save_steps=1)
    with pytest.raises(
        UserError, match=r"load_best_model_at_end: the weights of step \d+, the best so far, were not kept"
    ):
        resumed(model, folder, {**adapter, "load_best_model_at_end": True}, allow_changed=True)


@given(st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, math.nan, math.inf]), max_size=8), st.sampled_from([0.0, 0.6]))
def test_best_and_patience_are_those_of_a_plain_loop(losses, threshold):
    reports, best, best_at, since = [], math.inf, None, 0
    for step, loss in enumerate(losses, 1):
        lower = math.isfinite(loss) and loss < best - threshold
        since = 0 if lower else since + 1
        made = EvaluationReport(
            adapter="a",
            step=step,
            total_steps=9,
            loss=loss,
            correct_tokens=1,
            target_tokens=2,
            best=is_lower(loss, reports),
        )
        reports.append(made)
        if math.isfinite(loss) and loss < best:
            best, best_at = loss, step
    assert (best_of(reports).step if best_of(reports) else None) == best_at
    assert fruitless(reports, threshold) == since


@pytest.mark.parametrize(
    ("eval_steps", "total", "expected"),
    [(4, 10, [4, 8, 10]), (0.1, 10, list(range(1, 11))), (0.1, 95, [*range(10, 95, 10), 95]), ([0.25, 1], 10, [3, 10])],
)
def test_when_evaluations_are_due(eval_steps, total, expected):
    steps = tuple(eval_steps) if isinstance(eval_steps, list) else eval_steps
    config = AdapterConfig(name="a", dataset=DatasetConfig(path=Path("x")), val_size=1, eval_steps=steps)
    assert [done for done in range(total + 2) if is_due(config, done, total)] == expected


@pytest.mark.parametrize("loss", [0.0, 705.0, 710.0, math.nan])
def test_perplexity_is_the_same_in_a_run_and_behind_it(loss):
    report = EvaluationReport(
        adapter="a", step=1, total_steps=1, loss=loss, correct_tokens=1, target_tokens=1, best=False
    )
    evaluation = mlora.Evaluation(adapter="a", rows=1, target_tokens=1, loss=loss, accuracy=1.0)
    assert str(report.perplexity) == str(evaluation.perplexity)


def test_what_is_not_finite_is_text_in_json():
    evaluation = mlora.Evaluation(adapter="a", rows=1, target_tokens=1, loss=math.nan, accuracy=0.5)
    entry = json.loads(evaluation_json(evaluation), parse_constant=pytest.fail)
    assert (entry["rows"], entry["accuracy"], entry["loss"], entry["perplexity"]) == (1, 0.5, "nan", "nan")
