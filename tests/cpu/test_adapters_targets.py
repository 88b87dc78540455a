"""Targets: PEFT's own matching on a tiny model, and an error where something matches nothing."""

from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer

from mlora import UserError, parse_config
from mlora.adapters.targets import match_targets
from tests.cpu.tiny import tiny_model

LAYERS = 3


def _config(**keys):
    adapter = {"name": "a", "dataset": "x.jsonl", **keys}
    return parse_config({"base_model": "base", "adapters": [adapter]}).adapters[0]


def _pefts_choice(**keys) -> set[str]:
    model = get_peft_model(tiny_model("llama3.1"), LoraConfig(r=2, task_type="CAUSAL_LM", **keys))
    return {
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


CHOICES = {
    "list": {"target_modules": ["q_proj", "down_proj"]},
    "one name": {"target_modules": ["v_proj"]},
    "last parts": {"target_modules": ["self_attn.q_proj", "mlp.up_proj"]},
    "layer and name": {"target_modules": ["1.self_attn.o_proj", "layers.0.mlp.gate_proj"]},
    "full names": {"target_modules": ["model.layers.2.self_attn.k_proj", "model.layers.0.mlp.down_proj"]},
    "pattern": {"target_modules": r".*\.(q|k)_proj"},
    "pattern with layers": {"target_modules": r"model\.layers\.[02]\.mlp\.(gate|up)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "exclude list": {"target_modules": "all-linear", "exclude_modules": ["q_proj", "mlp.down_proj"]},
    "exclude pattern": {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*layers\.1\..*"},
    "one layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "two layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "layers of all and exclude": {
        "target_modules": ["q_proj", "k_proj", "o_proj"],
        "layers_to_transform": [2],
        "exclude_modules": ["k_proj"],
    },
}


@pytest.mark.parametrize("keys", CHOICES.values(), ids=CHOICES)
def test_the_choice_is_pefts(keys):
    chosen = match_targets(_config(**keys), LAYERS)
    assert set(chosen) == _pefts_choice(**keys)
    assert len(set(chosen)) == len(chosen)


def test_the_order_is_the_models():
    config = _config(target_modules=["down_proj", "up_proj", "q_proj"])
    assert [name.split("layers.")[1] for name in match_targets(config, 2)] == [
        "0.self_attn.q_proj",
        "0.mlp.up_proj",
        "0.mlp.down_proj",
        "1.self_attn.q_proj",
        "1.mlp.up_proj",
        "1.mlp.down_proj",
    ]


BAD = {
    "list": (
        {"target_modules": ["q_proj", "c_attn"]},
        "target_modules: 'c_attn' matches no module; there are q_proj, k_p",
    ),
    "string": ({"target_modules": "q_proj"}, "for the whole name, and a name stands in a list: [q_proj]"),
    "another word for all": (
        {"target_modules": "all"},
        "a string is all-linear or a regular expression for the whole name",
    ),
    "half a name": ({"target_modules": ["proj"]}, "target_modules: 'proj' matches no module"),
    "layer that is not there": ({"target_modules": ["layers.3.self_attn.q_proj"]}, "matches no module"),
    "pattern": ({"target_modules": r".*\.w1"}, r"target_modules: '.*\\.w1' matches no module"),
    "bad pattern": ({"target_modules": "(q_proj"}, "target_modules: '(q_proj' is no valid regular expression"),
    "exclude": ({"exclude_modules": ["router"]}, "exclude_modules: 'router' matches no module"),
    "layer": (
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 3]},
        "layers_to_transform: layer 3 does not exist; the model has layers 0 … 2",
    ),
    "nothing left": ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "leave none of target_modules"),
}


@pytest.mark.parametrize(("keys", "message"), BAD.values(), ids=BAD)
def test_what_matches_nothing_is_an_error_that_names_it(keys, message):
    with pytest.raises(UserError) as caught:
        match_targets(_config(**keys), LAYERS)
    text = str(caught.value)
    assert text.startswith("adapters[a]") and message in text and "\n" not in text
    if "matches no module" in text:
        assert "down_proj in model.layers.0 … model.layers.2" in text
