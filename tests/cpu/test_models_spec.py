"""config.json to ModelSpec: equal to transformers in every number, and refused by name where it is not supported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mlora.models.spec import linear_shapes, load_spec
from mlora.types import UserError
from tests.cpu.tiny import FAMILIES, tiny_config

LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OLD_LLAMA = {  # what files of transformers 4 hold; the newest keys are absent
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "max_position_embeddings": 131072,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
}
OLD_QWEN = OLD_LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4, "rope_theta": 1000000.0}
ROPES = {
    "no key at all": OLD_LLAMA,
    "rope_theta": OLD_LLAMA | {"rope_theta": 500000.0, "rope_scaling": None},
    "whole theta": OLD_LLAMA | {"rope_theta": 1000000},
    "rope_type": OLD_LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE | {"rope_type": "llama3"}},
    "type": OLD_LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE | {"type": "llama3"}},
    "factor 32": OLD_LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE | {"type": "llama3", "factor": 32.0}},
    "rope_parameters": OLD_LLAMA | {"rope_parameters": LLAMA3_ROPE | {"rope_type": "llama3", "rope_theta": 5e5}},
    "linear": OLD_LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn": OLD_QWEN | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
}


def write(folder: Path, config: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def assert_rope_equal(folder: Path) -> None:
    spec = load_spec(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).model
    rotary = type(model.rotary_emb)(model.config)
    assert torch.equal(torch.tensor(spec.inv_freq), rotary.inv_freq)
    assert spec.rope_scaling == rotary.attention_scaling


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_transformers(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    spec = load_spec(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    layer = model.model.layers[0]
    linears = {name.split(".")[-1]: module for name, module in layer.named_modules() if name.endswith("_proj")}
    assert linear_shapes(spec) == {name: tuple(linear.weight.shape) for name, linear in linears.items()}
    assert {linears[name].bias is not None for name in ("q_proj", "k_proj", "v_proj")} == {spec.qkv_bias}
    assert (linears["o_proj"].bias is not None) == spec.o_bias
    assert (linears["down_proj"].bias is not None) == spec.mlp_bias
    assert hasattr(layer.self_attn, "q_norm") == spec.qk_norm
    assert spec.tied == model.config.tie_word_embeddings
    assert (spec.vocab_size, spec.hidden_size) == tuple(model.lm_head.weight.shape)
    assert spec.num_layers == len(model.model.layers) == len(spec.windows)
    assert_rope_equal(tmp_path)


@pytest.mark.parametrize("config", ROPES.values(), ids=ROPES)
def test_every_spelling_of_rope_equals_transformers(config: dict[str, object], tmp_path: Path) -> None:
    assert_rope_equal(write(tmp_path, config))


def test_scaled_frequencies_are_scaled(tmp_path: Path) -> None:
    plain = load_spec(write(tmp_path, ROPES["rope_theta"])).inv_freq
    eighth = load_spec(write(tmp_path, ROPES["type"])).inv_freq
    assert eighth[0] == plain[0]
    assert eighth[-1] == plain[-1] / 8
    assert any(low / 8 < value < low for low, value in zip(plain, eighth, strict=True))


def test_missing_kv_heads_means_one_per_head(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, OLD_LLAMA))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (16, 16, 128)


def test_attention_bias_of_llama_is_on_all_four(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, OLD_LLAMA | {"attention_bias": True, "mlp_bias": True}))
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)


def test_attention_bias_that_mistral_ignores(tmp_path: Path) -> None:
    mistral = OLD_LLAMA | {"model_type": "mistral", "num_key_value_heads": 4, "attention_bias": True}
    assert not load_spec(write(tmp_path, mistral)).qkv_bias


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 7}, (7, 7, 7)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "llama", "sliding_window": 7}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False}, (None, None, None)),
        (
            {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            (None, 7, 7),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (7, None, 7),
        ),
    ],
)
def test_windows(changes: dict[str, object], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    config = OLD_LLAMA | {"num_hidden_layers": 3, "num_key_value_heads": 4} | changes
    assert load_spec(write(tmp_path, config)).windows == windows


REFUSED = [
    ({"model_type": "qwen3_moe", "num_experts": 8}, "qwen3_moe is a mixture-of-experts"),
    ({"num_local_experts": 8}, "mixture-of-experts"),
    ({"model_type": "mixtral"}, "mixtral is a mixture-of-experts"),
    ({"model_type": "gpt2"}, "'gpt2'"),
    ({"model_type": None}, "model_type None"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    (
        {"rope_scaling": {"type": "longrope", "factor": 2.0, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}},
        "rope type 'longrope'",
    ),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_theta": "many"}, "many"),
    ({"num_key_value_heads": 5}, "num_attention_heads 16 is not a multiple of num_key_value_heads 5"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"num_attention_heads": 0}, "cannot read it"),
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"head_dim": 7}, "even"),
    ({"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 0}, "sliding_window is 0"),
    (
        {"model_type": "qwen2", "num_key_value_heads": 4, "layer_types": ["sliding_attention"]},
        "layer_types holds sliding_attention",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refused_by_name(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_spec(write(tmp_path, OLD_LLAMA | changes))
    text = str(caught.value)
    assert text.startswith(str(tmp_path / "config.json"))
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"", "not valid JSON"),
        (b'{"model_type": "llama",\n', ":2: not valid JSON"),
        (b"[]", "found list"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 747\n", "git lfs pull"),
    ],
)
def test_damaged_file_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_spec(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_code_beside_the_config_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "it_ran"
    (tmp_path / "configuration_own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n", encoding="utf-8")
    auto_map = {"AutoConfig": "configuration_own.Own", "AutoModelForCausalLM": "configuration_own.Own"}
    spec = load_spec(write(tmp_path, OLD_LLAMA | {"auto_map": auto_map}))
    assert spec.hidden_size == 2048
    assert not marker.exists()
