"""Invariant 7: what is exported works in real PEFT, and what would not work is never written or is refused by name."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mlora import UserError
from mlora.adapters.targets import match_targets
from mlora.checkpoint.peft_files import ExportError, adapter_files, read_adapter, read_note, write_adapter
from mlora.config import parse_config
from mlora.engine.verify import verify_run
from mlora.engine.warnings import deployment_warnings
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import save_tiny

LAYERS = 3
ADAPTERS = {
    "plain": {"r": 8},
    "rslora": {"r": 4, "use_rslora": True, "lora_alpha": 6, "target_modules": ["q_proj", "mlp.down_proj"]},
    "layers": {"r": 3, "target_modules": ["v_proj", "o_proj"], "layers_to_transform": [0, 2], "lora_alpha": 4.5},
    "one-layer": {"r": 2, "target_modules": ["up_proj"], "layers_to_transform": 1},
    "pattern": {"r": 2, "target_modules": r".*\.[12]\.self_attn\.(q|k)_proj", "lora_dropout": 0.1},
    "excluded": {"r": 2, "exclude_modules": ["o_proj", "down_proj"]},
    "full-names": {"r": 2, "target_modules": ["model.layers.1.mlp.gate_proj", "model.layers.0.self_attn.k_proj"]},
    "orthogonal": {"r": 4, "init_lora_weights": "orthogonal"},
    "patterns": {
        "r": 4,
        "rank_pattern": {r"layers\.[12]\.self_attn\.q_proj": 9, "(up|down)_proj": 2, "q_proj": 3},
        "alpha_pattern": {"(k_proj|layers.0.self_attn)": 4.5, "layers.0.mlp.down_proj": 64},
        "use_rslora": True,
    },
    "random-b": {"r": 2, "init_lora_weights": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    data = write_rows(folder / "rows.jsonl", 12, seed=1)
    common = {"dataset": str(data), "learning_rate": 1e-2, "max_steps": 2, "warmup_steps": 0}
    adapters = [{"name": name, **common, **keys} for name, keys in ADAPTERS.items()]
    results = run(folder / "run", model, adapters)
    assert {result.state for result in results.adapters.values()} == {"ended"}
    return folder / "run"


@pytest.fixture
def copy(exported, tmp_path):
    """A run with one adapter that a test may damage."""
    shutil.copytree(exported / "adapters" / "plain", tmp_path / "run" / "adapters" / "plain")
    return tmp_path / "run"


def _config(name="a", **keys):
    adapter = {"name": name, "dataset": "x.jsonl", **keys}
    return parse_config({"base_model": "base", "adapters": [adapter]}).adapters[0]


def _peft_config(folder):
    return json.loads((folder / "adapter_config.json").read_text())


def test_peft_gives_the_engines_logits(exported):
    checks = verify_run(exported)
    assert sorted(check.name for check in checks) == sorted(ADAPTERS)
    for check in checks:
        assert check.ok, check
        assert check.max_difference <= 1e-5 * check.scale and check.changed > 1e-3 * check.scale, check


@pytest.mark.parametrize("name", ADAPTERS)
def test_keys_and_shapes_are_pefts_own(exported, model, name):
    """The reference is what PEFT itself would save of the same configuration."""
    folder = exported / "adapters" / name
    ours = load_file(folder / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(model)
    theirs = get_peft_model_state_dict(get_peft_model(base, LoraConfig.from_pretrained(folder)))
    assert {key: tuple(x.shape) for key, x in ours.items()} == {key: tuple(x.shape) for key, x in theirs.items()}
    assert all(tensor.dtype == torch.float32 for tensor in ours.values())
    assert not any(".default." in key for key in ours)
    files = sorted(path.name for path in folder.iterdir())
    assert {"adapter_model.safetensors", "adapter_config.json", "README.md"} <= set(files)
    assert not any("index" in file or "partial" in file for file in files)


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_configuration_says_what_was_configured(exported, name):
    written = _peft_config(exported / "adapters" / name)
    asked = _config(**ADAPTERS[name])
    for key in ("r", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights"):
        assert written[key] == getattr(asked, key), key
    loaded = LoraConfig.from_pretrained(exported / "adapters" / name)
    assert loaded.task_type == "CAUSAL_LM" and loaded.peft_type == "LORA" and loaded.bias == "none"
    assert match_targets(_config(**ADAPTERS[name]), LAYERS) == match_targets(
        _config(**{key: written.get(key) for key in ("target_modules", "exclude_modules", "layers_to_transform")}),
        LAYERS,
    )


def test_peft_loads_every_tensor_and_the_adapter_acts(exported, model):
    for name in ("plain", "layers"):
        folder = exported / "adapters" / name
        peft_model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder)
        loaded = get_peft_model_state_dict(peft_model)
        for key, tensor in load_file(folder / "adapter_model.safetensors").items():
            assert torch.equal(loaded[key], tensor), key
    auto = AutoPeftModelForCausalLM.from_pretrained(exported / "adapters" / "plain")
    merged = auto.merge_and_unload().eval()
    ids = torch.arange(3, 20)[None]
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    assert (merged(ids).logits - plain(ids).logits).abs().max() > 1e-3


def test_reading_gives_back_what_was_written(tmp_path):
    matrices = _matrices()
    write_adapter(tmp_path / "a", _config(r=2, target_modules=["q_proj"]), "base", tuple(matrices), matrices)
    config, read = read_adapter(tmp_path / "a")
    assert config["base_model_name_or_path"] == "base" and read.keys() == matrices.keys()
    for name, pair in matrices.items():
        assert all(torch.equal(x, y) for x, y in zip(pair, read[name], strict=True))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_same_adapter_is_the_same_bytes(tmp_path):
    """With a note on its base, too; and whoever may read one of its files may read the other."""
    matrices, digests = _matrices(), set()
    for turn in range(12):
        folder = tmp_path / f"{turn}"
        keys = _config(r=2, target_modules=["q_proj"])
        write_adapter(folder, keys, "base", tuple(matrices), matrices, quantised='{"dense": []}')
        digests.add((folder / "adapter_model.safetensors").read_bytes())
    assert len(digests) == 1 and read_note(folder) == '{"dense": []}'
    read = read_adapter(folder)[1]
    assert all(torch.equal(x, y) for name in matrices for x, y in zip(matrices[name], read[name], strict=True))
    config, weights = adapter_files(folder)
    assert config.stat().st_mode == weights.stat().st_mode


def _matrices(layers=2):
    return {f"model.layers.{i}.self_attn.q_proj": (torch.randn(2, 8), torch.randn(2, 6)) for i in range(layers)}


def _changed(change):
    matrices = _matrices()
    last = list(matrices)[-1]
    a, b = matrices[last]
    if change == "every B zero":
        return {name: (a, torch.zeros_like(b)) for name, (a, b) in matrices.items()}
    if change == "module missing":
        return {name: pair for name, pair in matrices.items() if name != last}
    if change == "module too many":
        return _matrices(3)
    if change == "B vanishes in float32":
        return {name: (a.double(), torch.full_like(b, 1e-60, dtype=torch.float64)) for name, (a, b) in matrices.items()}
    if change == "overflows float32":
        return matrices | {last: (a.double() * 1e60, b.double())}
    value = {"NaN in A": math.nan, "infinity in B": -math.inf}[change]
    (a if change.endswith("A") else b)[1, 3] = value
    return matrices


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("every B zero", "every B is zero"),
        ("B vanishes in float32", "every B is zero"),
        ("module missing", "model.layers.1.self_attn.q_proj is targeted but not in the export"),
        ("module too many", "model.layers.2.self_attn.q_proj"),
        ("NaN in A", r"model.layers.1.self_attn.q_proj.lora_A.* not finite"),
        ("infinity in B", r"model.layers.1.self_attn.q_proj.lora_B.* not finite"),
        ("overflows float32", r"model.layers.1.self_attn.q_proj.lora_A.* not finite"),
    ],
)
def test_what_would_do_nothing_or_is_broken_is_never_written(tmp_path, change, reason):
    with pytest.raises(ExportError, match=reason):
        write_adapter(tmp_path / "a", _config(r=2), "base", tuple(_matrices()), _changed(change))
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_an_adapter_that_did_not_move_fails_and_is_not_exported(tmp_path, model):
    data = str(write_rows(tmp_path / "rows.jsonl", 8, seed=1))
    common = {"dataset": data, "max_steps": 2, "r": 2}
    adapters = [{"name": "still", "learning_rate": 0, **common}, {"name": "moves", "warmup_steps": 0, **common}]
    results = run(tmp_path / "run", model, adapters)
    still = results.adapters["still"]
    assert results.failed == ("still",) and still.folder is None and "every B is zero" in still.reason
    assert sorted(path.name for path in (tmp_path / "run" / "adapters").iterdir()) == ["moves"]


def _truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _edit_config(folder, **changes):
    config = _peft_config(folder) | changes
    text = json.dumps({key: value for key, value in config.items() if value != "REMOVED"})
    (folder / "adapter_config.json").write_text(text)


def _edit_tensors(folder, edit):
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


A_KEY = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
B_KEY = A_KEY.replace("lora_A", "lora_B")
DAMAGES = {
    "weights cut": (lambda f: _truncate(f / "adapter_model.safetensors"), "adapter_model.safetensors: missing or"),
    "weights empty": (
        lambda f: (f / "adapter_model.safetensors").write_bytes(b""),
        "adapter_model.safetensors: missing or",
    ),
    "weights gone": (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: missing or"),
    "config cut": (lambda f: _truncate(f / "adapter_config.json"), "adapter_config.json: cannot be read"),
    "config gone": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json: cannot be read"),
    "config a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "adapter_config.json: not the config"),
    "not LoRA": (lambda f: _edit_config(f, peft_type="IA3"), "adapter_config.json: not the config"),
    "no base": (lambda f: _edit_config(f, base_model_name_or_path=None), "adapter_config.json: base_model_name_or"),
    "r is text": (lambda f: _edit_config(f, r="eight"), r"adapter_config.json: .*\.r: expected a whole number"),
    "r changed": (lambda f: _edit_config(f, r=4), "shapes"),
    "alpha zero": (lambda f: _edit_config(f, lora_alpha=0), "lora_alpha: 0 would make the adapter do nothing"),
    "no lora_B": (lambda f: _edit_tensors(f, lambda t: t.pop(B_KEY)), f"{A_KEY} has no {B_KEY}"),
    "no lora_A": (lambda f: _edit_tensors(f, lambda t: t.pop(A_KEY)), "a lora_B without its lora_A"),
    "layer gone": (lambda f: _edit_tensors(f, lambda t: (t.pop(A_KEY), t.pop(B_KEY))), "layers.1.self_attn.v_proj"),
    "stray key": (lambda f: _edit_tensors(f, lambda t: t.update({"x": torch.ones(1)})), "x is not a key of a LoRA"),
    "A of another width": (
        lambda f: _edit_tensors(f, lambda t: t.update({A_KEY: t[A_KEY][:, :-1].contiguous()})),
        "made for another model: model.layers.1.self_attn.v_proj",
    ),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_and_edited_files_are_refused_by_name(copy, damage, reason):
    damage(copy / "adapters" / "plain")
    with pytest.raises(UserError, match=reason) as caught:
        verify_run(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"hidden_size": 96}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}])
def test_an_adapter_of_another_base_is_refused(copy, tmp_path, change):
    other = save_tiny(tmp_path / "other", "qwen3", **change)
    _edit_config(copy / "adapters" / "plain", base_model_name_or_path=str(other))
    with pytest.raises(UserError, match="made for another model"):
        verify_run(copy)


def test_a_run_without_adapters_is_a_users_mistake(tmp_path):
    with pytest.raises(UserError, match="there is no adapter"):
        verify_run(tmp_path)


@pytest.fixture
def small_disk(tmp_path, request):
    """A disk of 64 KiB, or of as many as a test asks for."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', 64)}k", "tmpfs", folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_nothing_half_written(small_disk):
    matrices = {"model.layers.0.self_attn.q_proj": (torch.randn(8, 4000), torch.randn(8, 4000))}
    with pytest.raises(ExportError, match=r"needs 256,000 bytes: .*No space left"):
        write_adapter(small_disk / "a", _config(r=8), "base", tuple(matrices), matrices)
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize(("small_disk", "r"), [(64, 64), (24, 1)], indirect=["small_disk"])
def test_on_a_full_disk_the_adapter_fails_by_name_and_the_run_ends(small_disk, tmp_path, model, r):
    """Too small for the weights, or for the tokenizer beside them."""
    data = str(write_rows(tmp_path / "rows.jsonl", 8, seed=1))
    keys = {"r": r, "target_modules": ["v_proj"] if r == 1 else "all-linear", "max_steps": 2, "warmup_steps": 0}
    results = run(small_disk / "run", model, [{"name": "large", "dataset": data, **keys}])
    large = results.adapters["large"]
    assert large.state == "failed" and "No space left" in large.reason and large.folder is None
    assert not list((small_disk / "run" / "adapters").iterdir())


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"r": 16}, []),
        ({"r": 17}, ["a: r 17 is over vLLM's default of 16; serve it with --max-lora-rank 32"]),
        ({"r": 300}, ["a: r 300 is over vLLM's default of 16; serve it with --max-lora-rank 320"]),
        ({"r": 513}, ["a: vLLM serves adapters up to r 512, not r 513"]),
    ],
)
def test_warnings_name_what_vllm_will_refuse(keys, expected):
    assert deployment_warnings(_config(**keys)) == expected


def test_the_form_of_rslora_that_the_warning_names_scales_alike():
    (warning,) = deployment_warnings(_config(r=16, lora_alpha=8, use_rslora=True))
    assert "llama.cpp" in warning and warning.endswith("lora_alpha 32")
    assert _config(r=16, lora_alpha=8, use_rslora=True).scaling("") == _config(r=16, lora_alpha=32).scaling("")
