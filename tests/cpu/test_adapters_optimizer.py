"""Rates against transformers, clipping and updates against torch, sums of squares against the direct sum."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from transformers import get_scheduler

from mlora import parse_config
from mlora.adapters.optimizer import Optimizer, clip_coefficient, learning_rate, warmup_steps
from mlora.adapters.state import AdapterState
from mlora.adapters.targets import match_targets
from mlora.pipeline.stage import Stage
from mlora.types import StepDecision

SHAPES = {
    "q_proj": (48, 32),
    "k_proj": (16, 32),
    "v_proj": (16, 32),
    "o_proj": (32, 48),
    "gate_proj": (56, 32),
    "up_proj": (56, 32),
    "down_proj": (32, 56),
}
LAYERS = 3


def _config(**keys):
    adapter = {"name": "a", "dataset": "x.jsonl", "r": 5, **keys}
    return parse_config({"base_model": "base", "adapters": [adapter]}).adapters[0]


def _state(layers=range(LAYERS), dtype=torch.float32, **keys) -> AdapterState:
    config = _config(**keys)
    return AdapterState(config, match_targets(config, LAYERS), SHAPES, layers, dtype, torch.device("cpu"))


CURVES = [
    (kind, warmup, total)
    for kind in ("constant", "constant_with_warmup", "linear", "cosine")
    for warmup, total in [(0, 1), (0, 17), (5, 17), (0.1, 17), (0.03, 100), (20, 17), (1, 2)]
    if kind != "constant" or warmup == 0
]


@pytest.mark.parametrize(("kind", "warmup", "total"), CURVES)
def test_the_rate_of_every_step_is_transformers(kind, warmup, total):
    config = _config(lr_scheduler_type=kind, warmup_steps=warmup, learning_rate=0.37)
    steps = int(warmup) if warmup >= 1 else math.ceil(warmup * total)
    assert warmup_steps(config, total) == steps
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    scheduler = get_scheduler(kind, optimizer, steps, total)
    for step in range(total):
        assert learning_rate(config, step, total) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12, abs=1e-15), (
            step
        )
        optimizer.step()
        scheduler.step()
    if kind in ("linear", "cosine") and total > steps:
        assert learning_rate(config, total, total) == pytest.approx(0, abs=1e-15)


def test_constant_ignores_the_default_warm_up():
    config = _config(lr_scheduler_type="constant", learning_rate=0.5)
    assert [learning_rate(config, step, 100) for step in (0, 1, 99)] == [0.5] * 3


@pytest.mark.parametrize(("share", "total", "expected"), [(0.03, 100, 3), (0.03, 101, 4), (0.1, 1, 1), (0.99, 10, 10)])
def test_a_share_of_warm_up_is_rounded_up(share, total, expected):
    assert warmup_steps(_config(warmup_steps=share), total) == expected


@pytest.mark.parametrize("limit", [0.01, 1.0, 50.0])
def test_clipping_is_torchs(limit):
    parameters = [torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    before = [parameter.grad.clone() for parameter in parameters]
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit).item()
    coefficient = clip_coefficient(norm, limit)
    assert (coefficient < 1) == (norm > limit)
    for parameter, grad in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.grad, grad * coefficient, rtol=1e-14, atol=0)


def test_clipping_can_be_off():
    assert clip_coefficient(1e9, 0.0) == 1.0 and clip_coefficient(0.0, 1.0) == 1.0


OPTIMIZERS = {
    "adamw": {"weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6},
    "sgd": {"optim": "sgd", "weight_decay": 0.05},
    "lora+": {"weight_decay": 0.1, "loraplus_lr_ratio": 3.0, "rank_pattern": {"k_proj": 3}},
    "sgd with lora+": {"optim": "sgd", "loraplus_lr_ratio": 3.0},
}


def _pefts_optimizer(config, parameters) -> torch.optim.Optimizer:
    parameters = [{"params": parameters[0::2]}, {"params": parameters[1::2]}]  # every A, every B
    if config.optim == "sgd":
        return torch.optim.SGD(parameters, lr=1.0, weight_decay=config.weight_decay)
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(parameters, lr=1.0, betas=betas, eps=config.adam_epsilon, weight_decay=config.weight_decay)


@pytest.mark.parametrize("keys", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_updates_are_torchs_tensor_by_tensor(keys):
    """The flat buffer with gaps against one parameter for each matrix, with clipping and changing rates."""
    state = _state(dtype=torch.float64, init_lora_weights=False, **keys)
    ours = [x for pair in state.matrices().values() for x in pair]
    theirs = [torch.nn.Parameter(x.clone()) for x in ours]
    optimizer, reference = Optimizer(state), _pefts_optimizer(state.config, theirs)
    generator = torch.Generator().manual_seed(0)
    for step in range(5):
        rate, coefficient = 0.1 / (step + 1), (1.0, 0.3)[step % 2]
        for name, pair in _gradients(state).items():
            for view, parameter in zip(pair, _of(theirs, state, name), strict=True):
                view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
                parameter.grad = view * coefficient
        optimizer.step(rate, coefficient)
        reference.param_groups[0]["lr"], reference.param_groups[1]["lr"] = rate, rate * state.config.loraplus_lr_ratio
        reference.step()
        assert not state.grad.any(), "the gradients were not cleared"
        assert torch.equal(state.compute, state.master), "the compute copy is old"
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-13, atol=1e-14)
    assert not state.master[_gaps(state)].any(), "what lies between the matrices was trained"


def _gradients(state: AdapterState) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {name: state._views(state.grad, place) for name, place in state._places.items()}


def _of(parameters, state: AdapterState, name: str):
    index = 2 * list(state.matrices()).index(name)
    return parameters[index : index + 2]


def _gaps(state: AdapterState) -> torch.Tensor:
    used = torch.zeros(state.master.numel(), dtype=torch.bool)
    for place in state._places.values():
        for view in state._views(used, place):
            assert not view.any(), "two matrices overlap"
            view.fill_(True)
    return ~used


def test_a_skipped_step_leaves_weights_moments_and_count_alone():
    state, twin = _state(init_lora_weights=False), _state(init_lora_weights=False)
    optimizer, undisturbed = Optimizer(state), Optimizer(twin)
    for disturbed in (False, True, False):
        if disturbed:
            state.grad.fill_(math.nan)
            optimizer.skip()
            assert not state.grad.any()
            continue
        for each, its in ((state, optimizer), (twin, undisturbed)):
            each.grad.copy_(torch.linspace(-1, 1, each.grad.numel()))
            its.step(0.1, 1.0)
    assert torch.equal(state.master, twin.master)


def test_masters_stay_float32_beside_a_half_precision_model():
    state = _state(dtype=torch.bfloat16, init_lora_weights=False)
    assert (state.master.dtype, state.grad.dtype, state.compute.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    optimizer = Optimizer(state)
    before = state.master.clone()
    for _ in range(20):  # each update is below bfloat16's resolution of most weights
        state.grad.fill_(1.0)
        optimizer.step(1e-5, 1.0)
    moved = (before - state.master)[~_gaps(state)]
    assert moved.min() > 1.8e-4 and torch.equal(state.compute, state.master.bfloat16())


@pytest.mark.parametrize("layers", [range(LAYERS), range(1, 3), range(2, 3)])
def test_sums_of_squares_equal_the_direct_sum_and_do_not_depend_on_the_cut(layers):
    whole, part = _state(), _state(layers)
    generator = torch.Generator().manual_seed(1)
    parts = _gradients(part)
    expected = [0.0] * LAYERS
    for name, pair in _gradients(whole).items():
        for i, view in enumerate(pair):
            view.copy_(
                torch.randn(view.shape, generator=generator) * 10 ** torch.randn(view.shape, generator=generator)
            )
            expected[int(name.split(".")[2])] += view.double().square().sum().item()
            if name in parts:
                parts[name][i].copy_(view)
    sums = whole.sums_of_squares().tolist()
    assert sums == pytest.approx(expected, rel=1e-14)
    assert part.sums_of_squares().tolist() == [sums[layer] for layer in layers]


def test_matrices_that_do_not_fit_are_no_state():
    state = _state()
    matrices = {name: (a.clone(), b.clone()) for name, (a, b) in state.matrices().items()}
    wide = dict(matrices)
    wide["model.layers.1.mlp.up_proj"] = (torch.zeros(5, 33), torch.zeros(5, 56))
    missing = {name: pair for name, pair in matrices.items() if name != "model.layers.2.self_attn.q_proj"}
    for wrong, name in ((wide, "model.layers.1.mlp.up_proj"), (missing, "model.layers.2.self_attn.q_proj")):
        with pytest.raises(AssertionError, match=name):
            state.load(wrong)


def test_groups_are_views_of_the_compute_copy_and_the_gradients():
    state = _state(target_modules=["k_proj", "v_proj", "down_proj"])
    group = state.group(1, "qkv")
    assert group.a_RD.shape == (10, 32) and [part.columns for part in group.parts] == [slice(48, 64), slice(64, 80)]
    assert state.group(1, "o") is None and state.group(1, "gate_up") is None
    group.grad_a_RD[5:].fill_(2.0)
    group.parts[1].grad_b_RO.fill_(3.0)
    assert all(
        bool((x == v).all()) for x, v in zip(_gradients(state)["model.layers.1.self_attn.v_proj"], (2, 3), strict=True)
    )
    assert state.grad.count_nonzero() == 5 * 32 + 5 * 16


def _stage(layers, **keys) -> tuple[Stage, AdapterState]:
    stage, state = Stage(SimpleNamespace(layers=layers, backward=None, dtype=torch.float32)), _state(layers, **keys)
    stage.join(0, state)
    return stage, state


def _step(stage, state, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(LAYERS, 1 << 16, generator=generator)
    for layer, start, stop in zip(state.layers, state._layer_starts, state._layer_starts[1:], strict=False):
        state.grad[start:stop] = whole[layer, : stop - start]
    stage.step(0, StepDecision(0.1, 0.5, skip=False))


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_snapshots_of_two_stages_go_on_in_one_and_the_reverse(optim, ratio):
    """Three steps straight, and three with a change of stages behind the first and the second."""
    keys = {"optim": optim, "weight_decay": 0.1, "loraplus_lr_ratio": ratio}
    straight, state = _stage(range(LAYERS), **keys)
    for seed in range(3):
        _step(straight, state, seed)
    parts = [_stage(range(1), **keys), _stage(range(1, LAYERS), **keys)]
    saved = {}
    for part in parts:
        _step(*part, 0)
        saved |= part[0].snapshot(0)
    one, its_state = _stage(range(LAYERS), **keys)
    one.restore(0, saved)
    _step(one, its_state, 1)
    saved = one.snapshot(0)
    found = {}
    for layers in (range(2), range(2, LAYERS)):
        part = _stage(layers, **keys)
        part[0].restore(0, saved)
        _step(*part, 2)
        found |= part[0].snapshot(0)
    wanted = straight.snapshot(0)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert ("optimizer.step" in wanted) == (optim == "adamw_torch") and any(x.any() for x in wanted.values())


def test_a_snapshot_does_not_change_with_later_steps():
    stage, state = _stage(range(LAYERS))
    _step(stage, state, 0)
    saved = stage.snapshot(0)
    before = {name: x.clone() for name, x in saved.items()}
    _step(stage, state, 1)
    assert all(torch.equal(saved[name], before[name]) for name in saved)
    assert not torch.equal(saved["optimizer.step"], stage.snapshot(0)["optimizer.step"])


def test_lora_plus_works_on_a_stage_without_a_module_of_the_adapter():
    stage, state = _stage(range(1), layers_to_transform=[2], loraplus_lr_ratio=4)
    stage.step(0, StepDecision(0.1, 1.0, skip=False))
    assert not state.matrices() and set(stage.snapshot(0)) == {"optimizer.step"}
