"""Invariant 4: a run that was interrupted and goes on, also over other stages, gives the bits of one that was not."""

from __future__ import annotations

import json
import shutil

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import mlora
from mlora import UserError
from mlora.checkpoint.versions import versions
from mlora.data import shares
from mlora.engine.adapter_run import AdapterRun
from mlora.types import LINEAR_MODULES, Segment
from tests.cpu import runs
from tests.cpu.runs import outcome, write_rows
from tests.cpu.tiny import save_tiny

NAMES = "abcd"


class Crash(Exception):
    pass


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Shuffling over epochs, dropout, clipping, accumulation over ragged rows, an optimizer without moments."""
    folder = tmp_path_factory.mktemp("data")
    common = {"learning_rate": 1e-2, "max_steps": 8, "warmup_steps": 2, "per_device_train_batch_size": 3}
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 14, i, 25)) for i, name in enumerate(NAMES)}
    return [
        common
        | {"name": "a", "dataset": rows["a"], "r": 8, "lora_dropout": 0.1, "max_grad_norm": 0.5, "loraplus_lr_ratio": 5}
        | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "logging_steps": 3},
        common | {"name": "b", "dataset": rows["b"], "r": 4, "target_modules": ["q_proj", "down_proj"], "max_steps": 3},
        common
        | {"name": "c", "dataset": rows["c"], "r": 16, "layers_to_transform": [3], "rank_pattern": {"k_proj": 6}},
        common | {"name": "d", "dataset": rows["d"], "r": 4, "optim": "sgd", "per_device_train_batch_size": 1},
    ]


def config(*arguments, **top):
    return runs.config(*arguments, **{"microbatch_tokens": 120, "save_steps": 2, **top})


def metrics(folder):
    """All lines without the time they took, in the order of each adapter."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in lines]
    return {name: [line for line in numbers if line["adapter"] == name] for name in NAMES}


@pytest.fixture(scope="module")
def undisturbed(model, adapters, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    results = mlora.train(config(model, adapters, folder))
    return {name: outcome(results, name) for name in NAMES}, metrics(folder)


def crash_at(adapter, step):
    def on_step(report):
        if (report.adapter, report.step) == (adapter, step):
            raise Crash

    return on_step


def assert_undisturbed(results, folder, undisturbed):
    outcomes, lines = undisturbed
    for name in NAMES:
        assert not outcomes[name].differences(outcome(results, name)), name
    assert metrics(folder) == lines


@pytest.mark.parametrize("before, after", [(1, 1), (2, 1), (2, 4), (1, 3), (4, 2)])
def test_a_crash_changes_no_bit_also_over_other_stages(tmp_path, model, adapters, undisturbed, before, after):
    folder = tmp_path / "run"
    with pytest.raises(Crash):
        mlora.train(config(model, adapters, folder, before), on_step=crash_at("a", 5))
    if before == 1:
        assert [path.name for path in versions(folder / "checkpoints/a")] == ["000001-step2", "000002-step4"]
    results = mlora.train(config(model, adapters, folder, after), resume="auto")
    assert_undisturbed(results, folder, undisturbed)


def test_many_crashes_change_no_bit(tmp_path, model, adapters, undisturbed):
    folder = tmp_path / "run"
    for stages, adapter, step in ((1, "d", 3), (3, "c", 5), (2, "a", 7)):
        with pytest.raises(Crash):
            mlora.train(
                config(model, adapters, folder, stages, save_steps=1), resume="auto", on_step=crash_at(adapter, step)
            )
    results = mlora.train(config(model, adapters, folder, 1), resume="auto")
    assert_undisturbed(results, folder, undisturbed)


def test_a_crash_before_the_first_checkpoint_begins_anew(tmp_path, model, adapters, undisturbed):
    folder = tmp_path / "run"
    with pytest.raises(Crash):
        mlora.train(config(model, adapters, folder), resume="auto", on_step=crash_at("a", 1))
    results = mlora.train(config(model, adapters, folder), resume="auto")
    assert_undisturbed(results, folder, undisturbed)


def test_from_another_folder(tmp_path, model, adapters, undisturbed):
    with pytest.raises(Crash):
        mlora.train(config(model, adapters, tmp_path / "run", 2), on_step=crash_at("a", 5))
    results = mlora.train(config(model, adapters, tmp_path / "other"), resume=tmp_path / "run")
    assert_undisturbed(results, tmp_path / "other", undisturbed)


def test_what_had_ended_is_exported_again_and_trained_no_more(tmp_path, model, adapters, undisturbed):
    folder = tmp_path / "run"
    mlora.train(config(model, adapters, folder))
    shutil.rmtree(folder / "adapters/b")
    steps = []
    results = mlora.train(config(model, adapters, folder, 2), resume="auto", on_step=steps.append)
    assert steps == []
    assert_undisturbed(results, folder, undisturbed)


def test_adapters_added_to_and_removed_from_the_configuration(tmp_path, model, adapters, undisturbed, capsys):
    folder = tmp_path / "run"
    with pytest.raises(Crash):
        mlora.train(config(model, adapters[:3], folder), on_step=crash_at("a", 5))
    results = mlora.train(config(model, [adapters[3], adapters[0]], folder), resume="auto")
    outcomes, _ = undisturbed
    for name in "ad":
        assert not outcomes[name].differences(outcome(results, name)), name
    shown = capsys.readouterr().out
    assert "d: no checkpoint; it begins at its first step" in shown
    assert f"c: is not in the configuration any more; its checkpoints stay in {folder}/checkpoints/c" in shown
    assert "a: goes on behind step 4 of 8" in shown


@pytest.fixture
def crashed(tmp_path, model, adapters):
    folder = tmp_path / "crashed"
    with pytest.raises(Crash):
        mlora.train(config(model, adapters, folder), on_step=crash_at("a", 5))
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"learning_rate": 0.02}, r"adapters\[a\].learning_rate is 0.02 and was 0.01"),
        ({"seed": 1, "lora_dropout": 0}, r"lora_dropout is 0.0 and was 0.1; adapters\[a\].seed is 1 and was 42"),
        ({"max_steps": 9}, r"adapters\[a\].max_steps is 9 and was 8: .* --allow-changed \(allow_changed=True\) to go"),
    ],
)
def test_a_changed_key_is_named_and_needs_a_word(model, adapters, crashed, changes, message):
    changed = [adapters[0] | changes, *adapters[1:]]
    with pytest.raises(UserError, match=message):
        mlora.train(config(model, changed, crashed), resume="auto")
    results = mlora.train(config(model, changed, crashed), resume="auto", allow_changed=True)
    assert not results.failed and len(results.adapters["a"].reports) == changed[0]["max_steps"]


def test_changed_data_is_named_and_another_path_or_logging_is_not(tmp_path, model, adapters, crashed, undisturbed):
    other = str(write_rows(tmp_path / "other.jsonl", 14, 9, 25))
    with pytest.raises(UserError, match=r"adapters\[a\].dataset: .*other.jsonl gives other tokens than it did"):
        mlora.train(config(model, [adapters[0] | {"dataset": other}], crashed), resume="auto")
    same = str(shutil.copy(adapters[0]["dataset"], tmp_path / "same.jsonl"))
    spelled = {"dataset": same, "logging_steps": 1, "target_modules": list(LINEAR_MODULES)}
    results = mlora.train(config(model, [adapters[0] | spelled], crashed), resume="auto")
    assert not undisturbed[0]["a"].differences(outcome(results, "a"))


@pytest.mark.parametrize(
    "change", [{"r": 4}, {"optim": "sgd"}, {"target_modules": ["v_proj"]}, {"layers_to_transform": 1}]
)
def test_what_gives_the_tensors_their_shape_is_never_changed(model, adapters, crashed, change):
    changed = config(model, [adapters[0] | change], crashed)
    with pytest.raises(UserError, match=rf"adapters\[a\]: {next(iter(change))} cannot change in mid-training"):
        mlora.train(changed, resume="auto", allow_changed=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 5}, "was made for another base model: layers 4, not 5"),
        ({"hidden_size": 128}, "was made for another base model: hidden_size 64, not 128"),
        ({"vocab_size": 352}, "was made for another base model: vocab_size 320, not 352"),
        ({"num_key_value_heads": 4}, "adapters.a.: its modules cannot change in mid-training"),
        ({"rms_norm_eps": 1e-3}, "base_model: its files are others than they were"),
        ({"seed": 1}, "base_model: its files are others than they were"),
    ],
)
def test_a_checkpoint_of_another_base_model_is_refused(tmp_path, adapters, crashed, changes, message):
    other = save_tiny(tmp_path / "other", "llama3.2", **{"num_hidden_layers": 4, **changes})
    with pytest.raises(UserError, match=message):
        mlora.train(config(other, adapters[:1], crashed), resume="auto")


def test_another_dtype_is_named(model, adapters, crashed):
    with pytest.raises(UserError, match="dtype is float64 and was float32"):
        mlora.train(config(model, adapters[:1], crashed, dtype="float64"), resume="auto")


def test_a_folder_without_checkpoints_is_named(tmp_path, model, adapters):
    with pytest.raises(UserError, match=r"resume .*nowhere: there are no checkpoints in .*nowhere/checkpoints"):
        mlora.train(config(model, adapters, tmp_path / "run"), resume=tmp_path / "nowhere")


def test_only_so_many_are_kept_and_the_one_before_a_damaged_one_is_used(tmp_path, model, adapters, crashed, capsys):
    """The bits are those of an older checkpoint, so the same in the end."""
    newest = versions(crashed / "checkpoints/a")[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    undamaged = mlora.train(config(model, adapters[:1], tmp_path / "plain"))
    results = mlora.train(config(model, adapters[:1], crashed), resume="auto")
    assert not outcome(undamaged, "a").differences(outcome(results, "a"))
    shown = capsys.readouterr().out
    assert f"{newest}: has " in shown and "this checkpoint is left out, the one before it is used" in shown
    assert "a: goes on behind step 2 of 8" in shown
    assert [path.name for path in versions(crashed / "checkpoints/a")] == ["000004-step6", "000005-step8"]


def test_no_sound_checkpoint_is_refused(model, adapters, crashed):
    for path in versions(crashed / "checkpoints/a"):
        (path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"checkpoints/a: none of its 2 checkpoints is sound; delete the folder"):
        mlora.train(config(model, adapters, crashed), resume="auto")


class Rows:
    """Lengths and target tokens of some rows; no text."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.target_tokens = self.lengths - 1
        self.shares = shares([len(lengths)], None)

    def __len__(self):
        return len(self.lengths)


def walk(run, steps):
    """The plans of so many steps; each is closed as the stream would close it."""
    plans = []
    for _ in range(steps):
        plan = run.next_step()
        plans.append(plan)
        segment = Segment(0, 0, plan.step, 0, plan.samples, plan.target_tokens, ends_step=True)
        run.close_step(segment, 2.0 * plan.target_tokens, [1.0])
    return plans


@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=20),
    seed=st.integers(0, 2**62),
    batch=st.integers(1, 7),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    planned_ahead=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_the_cursor_goes_on_where_it_was_wherever_it_is_cut(lengths, seed, batch, cuts, planned_ahead):
    """Steps that were planned but not closed are planned again; order, tokens and rates are those of one walk."""
    keys = {"name": "a", "dataset": "x", "seed": seed, "per_device_train_batch_size": batch, "max_steps": 12}
    adapter = mlora.parse_config({"base_model": "m", "adapters": [keys]}).adapters[0]

    def fresh():
        return AdapterRun(index=0, config=adapter, data=Rows(lengths), targets=(), state="training")

    straight = fresh()
    plans = walk(straight, 12)
    run, found = fresh(), []
    for cut in sorted(cuts):
        found += walk(run, cut - len(found))
        for _ in range(planned_ahead):
            run.next_step()
        record, run = run.record(), fresh()
        run.state = "waiting"
        run.resume(record, {})
        if run.state == "waiting":
            run.state = "training"
    found += walk(run, 12 - len(found))
    assert found == plans
    assert run.reports == straight.reports and run.state == straight.state == "ended"
