"""Invariant 6 over stages: a microbatch that cannot be computed costs its culprit alone, in F and B, on any stage."""

from __future__ import annotations

import pytest

from mlora.pipeline.stage import Stage
from tests.cpu.runs import outcome, run, write_rows

NAMES = "abcd"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    common = {"learning_rate": 1e-2, "max_steps": 6, "warmup_steps": 0, "per_device_train_batch_size": 4}
    rows = {name: str(write_rows(folder / f"{name}.jsonl", 24, i, 20)) for i, name in enumerate(NAMES)}
    return [common | {"name": name, "dataset": rows[name], "r": 8, "lora_dropout": 0.1} for name in NAMES]


@pytest.fixture(scope="module")
def undisturbed(model, adapters, tmp_path_factory):
    results = run(tmp_path_factory.mktemp("one"), model, adapters)
    return {name: outcome(results, name) for name in NAMES}


def inject(monkeypatch, method, stage_first_layer, culprit, at_step, once, after=0):
    """Break ``method`` on one stage for every microbatch that holds the culprit's step, or once for a mixed one.

    ``after`` so many microbatches have held it.
    """
    original, seen = getattr(Stage, method), []
    holding, passed = {}, []

    def broken(self, first, *rest):
        microbatch = getattr(first, "microbatch", None)
        if microbatch is not None:
            holding[self, microbatch.index] = microbatch
        else:
            microbatch = holding.get((self, first))
        segments = microbatch.segments if microbatch else ()
        hit = any(culprit in (None, s.adapter) and s.step == at_step for s in segments)
        spared = once and (seen or len(microbatch.segments) == 1) if hit else True
        if not spared and self.model.layers.start == stage_first_layer:
            passed.append(microbatch)
        if not spared and self.model.layers.start == stage_first_layer and len(passed) > after:
            seen.append(len(microbatch.segments))
            raise RuntimeError("no memory for this one")
        return original(self, first, *rest)

    if method == "backward":
        forward = Stage.forward

        def remember(self, batch, *rest):
            holding[self, batch.microbatch.index] = batch.microbatch
            return forward(self, batch, *rest)

        monkeypatch.setattr(Stage, "forward", remember)
    monkeypatch.setattr(Stage, method, broken)
    return seen


PLACES = [(stages, stage, method) for stages in (1, 3) for stage in range(stages) for method in ("forward", "backward")]


@pytest.mark.parametrize("stages, stage, method", PLACES)
@pytest.mark.parametrize("once", [True, False])
def test_the_culprit_alone_is_parked(tmp_path, model, adapters, undisturbed, monkeypatch, stages, stage, method, once):
    first_layer = {1: [0], 3: [0, 2, 3]}[stages][stage]
    seen = inject(monkeypatch, method, first_layer, culprit=1, at_step=2, once=once)
    pipeline = {"stages": stages, "transport": "local"} | ({"layers": [2, 1, 1]} if stages == 3 else {})
    results = run(tmp_path / "run", model, adapters, microbatch_tokens=400, pipeline=pipeline)
    assert seen and seen[0] > 1, "the first poisoned microbatch was meant to be mixed"
    survivors = NAMES if once else NAMES.replace("b", "")
    for name in survivors:
        assert not undisturbed[name].differences(outcome(results, name)), name
        assert results.adapters[name].reason == "", "what was made good is no reason"
    if not once:
        parked = results.adapters["b"]
        assert parked.state == "failed" and parked.folder is None
        assert "RuntimeError: no memory for this one" in parked.reason and f"stage {stage}" in parked.reason
        assert len(parked.reports) == 2, "its earlier steps stand"


def test_an_adapter_that_is_alone_is_parked_at_once(tmp_path, model, adapters, monkeypatch):
    seen = inject(monkeypatch, "forward", 0, culprit=0, at_step=0, once=False)
    results = run(tmp_path / "run", model, adapters[:1])
    assert results.failed == ("a",) and len(seen) == 1


def test_the_last_step_can_be_retried(tmp_path, model, adapters, undisturbed, monkeypatch):
    seen = inject(monkeypatch, "backward", 2, culprit=None, at_step=5, once=True)
    pipeline = {"stages": 2, "transport": "local", "layers": [2, 2], "in_flight": 1}
    results = run(tmp_path / "run", model, adapters, microbatch_tokens=400, pipeline=pipeline)
    assert seen
    for name in NAMES:
        assert not undisturbed[name].differences(outcome(results, name)), name


def test_a_step_that_was_half_planned_is_repeated_from_its_first_sample(tmp_path, model, monkeypatch):
    """Both steps span many microbatches; what their first ones added to the gradients must not stay."""
    common = {"learning_rate": 1e-2, "max_steps": 3, "warmup_steps": 0, "per_device_train_batch_size": 12}
    long, short = (str(write_rows(tmp_path / f"{n}.jsonl", 24, n, longest)) for n, longest in ((1, 40), (2, 4)))
    both = [common | {"name": "long", "dataset": long}, common | {"name": "short", "dataset": short}]
    alone = run(tmp_path / "alone", model, both, microbatch_tokens=128)
    seen = inject(monkeypatch, "forward", 0, culprit=0, at_step=1, once=True, after=1)
    retried = run(tmp_path / "run", model, both, microbatch_tokens=128)
    assert seen
    for name in ("long", "short"):
        assert not outcome(alone, name).differences(outcome(retried, name)), name
