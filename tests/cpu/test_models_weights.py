"""Weights and tokenizer: every tensor as transformers reads it, and every damaged folder refused before training."""

from __future__ import annotations

import fnmatch
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlora.models import weights
from mlora.models.spec import load_spec
from mlora.models.tokenizer import load_tokenizer
from mlora.models.weights import Checkpoint, resolve_base_model
from mlora.types import UserError
from tests.cpu.tiny import FAMILIES, save_tiny, tiny_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 747\n"
INDEX = "model.safetensors.index.json"


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, load_spec(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a single-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "single": save_tiny(folder / "single", "qwen2", num_hidden_layers=1),
        "sharded": save_tiny(folder / "sharded", "llama2", shards=3),
        "tied": save_tiny(folder / "tied", "llama3.2", num_hidden_layers=1),
    }


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(originals[kind], tmp_path / kind))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_as_transformers_reads_it(family: str, shards: int, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, shards=shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if shards == 1 else (tmp_path / INDEX).exists()
    checkpoint = open_checkpoint(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(checkpoint.embedding(), model.model.embed_tokens.weight)
    assert torch.equal(checkpoint.head(), model.lm_head.weight)
    assert torch.equal(checkpoint.final_norm(), model.model.norm.weight)
    for index, layer in enumerate(model.model.layers):
        read, expected = checkpoint.layer(index), layer.state_dict()
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_tensors_keep_their_stored_dtype(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_tiny(tmp_path, "mistral", dtype=torch.bfloat16))
    assert checkpoint.tensor("model.layers.2.mlp.up_proj.weight").dtype == torch.bfloat16


def test_single_file_counts_before_an_index_as_in_transformers(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    other = save_tiny(folder / "other", "llama2", seed=1)
    shutil.move(other / "model.safetensors", folder / "model.safetensors")
    expected = AutoModelForCausalLM.from_pretrained(folder).lm_head.weight
    assert torch.equal(open_checkpoint(folder).head(), expected)
    (folder / "model.safetensors").unlink()
    assert not torch.equal(open_checkpoint(folder).head(), expected)


def test_missing_tensor_is_named_with_its_file(originals: dict[str, Path], copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    for name in load_file(originals["single"] / "model.safetensors"):
        shutil.copy(originals["single"] / "model.safetensors", folder)
        rewrite(folder, lambda tensors, name=name: tensors.pop(name))
        text = refusal(folder)
        assert text.startswith(f"{folder / 'model.safetensors'}: {name} is missing")


def test_wrong_shape_is_named_with_its_file(originals: dict[str, Path], copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    for name, tensor in load_file(originals["single"] / "model.safetensors").items():
        shutil.copy(originals["single"] / "model.safetensors", folder)
        rewrite(folder, lambda tensors, name=name: tensors.update({name: tensors[name][1:].clone()}))
        text = refusal(folder)
        assert text.startswith(f"{folder / 'model.safetensors'}: {name} has shape")
        assert str(list(tensor.shape)) in text


def test_vocabulary_larger_than_the_embedding(copy: Callable[[str], Path]) -> None:
    folder = copy("tied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 321}))
    assert "model.embed_tokens.weight has shape [320, 64], but config.json asks for [321, 64]" in refusal(folder)


def test_several_missing_tensors_are_counted(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "layer_types": None}))
    assert "model.layers.1.input_layernorm.weight and 11 more are missing" in refusal(folder)


def test_whole_numbers_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert f"{name} is stored as I8" in refusal(folder)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_file_cut_anywhere_is_named(share: float, originals: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(originals["single"], tmp_path, dirs_exist_ok=True)
    content = (originals["single"] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: int(len(content) * share)])
    assert refusal(tmp_path).startswith(f"{tmp_path / 'model.safetensors'}: cut off or damaged")


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


def test_missing_shard(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    path = shard(folder, 1)
    path.unlink()
    assert refusal(folder).startswith(f"{path}: missing, but {INDEX} names it")


def test_shard_cut_at_half(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    path = shard(folder, 1)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert refusal(folder).startswith(f"{path}: cut off or damaged")


def test_stray_shard(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    stray = folder / "model-00005-of-00007.safetensors"
    shutil.copy(shard(folder, 0), stray)
    assert refusal(folder).startswith(f"{stray}: {INDEX} does not name this shard")


def test_shard_that_the_index_does_not_know(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    index = json.loads((folder / INDEX).read_text())
    last = shard(folder, -1)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last.name}
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder).startswith(f"{last}: {INDEX} does not name this shard")


def test_tensor_that_the_index_does_not_know(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder).startswith(f"{folder / INDEX}: model.norm.weight is missing")


def test_tensor_in_another_shard_than_the_index_says(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    index = json.loads((folder / INDEX).read_text())
    name = "model.norm.weight"
    files = sorted(set(index["weight_map"].values()) - {index["weight_map"][name]})
    index["weight_map"][name] = files[0]
    (folder / INDEX).write_text(json.dumps(index))
    assert refusal(folder).startswith(f"{folder / files[0]}: {name} is not in it")


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not valid JSON"), ("{}", "weight_map"), (POINTER, "git lfs pull")]
)
def test_damaged_index(content: str, words: str, copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    (folder / INDEX).write_text(content)
    text = refusal(folder)
    assert text.startswith(str(folder / INDEX))
    assert words in text


def test_missing_index(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    (folder / INDEX).unlink()
    assert refusal(folder).startswith(f"{folder / INDEX}: missing")


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_lfs_pointer_in_place_of_weights(kind: str, copy: Callable[[str], Path]) -> None:
    folder = copy(kind)
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.write_text(POINTER)
    text = refusal(folder)
    assert text.startswith(str(path))
    assert "git lfs pull" in text


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickled_weights_are_never_opened(name: str, copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(folder / "it_ran")))
    text = refusal(folder)
    assert text.startswith(str(folder / name))
    assert "save_pretrained" in text
    assert not (folder / "it_ran").exists()


def test_no_weights_at_all(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    (folder / "model.safetensors").unlink()
    assert refusal(folder).startswith(f"{folder}: holds neither")


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight"])
def test_harmless_extra_tensors_are_ignored(extra: str, copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    rewrite(folder, lambda tensors: tensors.update({extra: torch.ones(8)}))
    open_checkpoint(folder)


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.o_proj.bias", "model.layers.1.input_layernorm.weight"])
def test_tensor_that_the_model_would_miss_is_refused(extra: str, copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    rewrite(folder, lambda tensors: tensors.update({extra: torch.ones(64)}))
    assert refusal(folder).startswith(f"{folder / 'model.safetensors'}: {extra} has no place")


def test_head_of_a_tied_model(copy: Callable[[str], Path]) -> None:
    folder = copy("tied")
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(open_checkpoint(folder).head(), open_checkpoint(folder).embedding())
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].mul_(2))
    assert "tie_word_embeddings: false" in refusal(folder)


def test_base_model_folder(tmp_path: Path) -> None:
    assert resolve_base_model(str(tmp_path)) == tmp_path


def test_base_model_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def download(name: str, allow_patterns: list[str]) -> str:
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(weights, "snapshot_download", download)
    assert resolve_base_model("someone/some-model") == tmp_path
    (patterns,) = asked.values()
    wanted = ("model.safetensors", "model-00001-of-00002.safetensors", INDEX, "config.json", "chat_template.jinja")
    assert all(any(fnmatch.fnmatch(file, pattern) for pattern in patterns) for file in wanted)
    unwanted = ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "modeling_own.py")
    assert not any(fnmatch.fnmatch(file, pattern) for pattern in patterns for file in unwanted)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError.__new__(GatedRepoError), "gated"),
        (RepositoryNotFoundError.__new__(RepositoryNotFoundError), "no model of that name"),
        (LocalEntryNotFoundError("offline"), "out of reach"),
        (OSError("disk\nfull"), "disk full"),
    ],
)
def test_base_model_that_cannot_be_fetched(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(weights, "snapshot_download", download)
    with pytest.raises(UserError) as caught:
        resolve_base_model("someone/some-model")
    assert "'someone/some-model' is not a folder here" in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_base_model_that_is_no_hub_id_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be a hub id; check the path, which counts from the configuration"):
        resolve_base_model(str(tmp_path / "absent"))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match="is a file"):
        resolve_base_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizer_beside_every_family(family: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, family)
    tokenizer, original = load_tokenizer(folder, load_spec(folder).vocab_size), tiny_tokenizer()
    text = "Janet's 16 ducks, naïve:\n  <|im_end|>"
    assert tokenizer(text).input_ids == original(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nHi<|im_end|>\n"


def tokenizer_refusal(folder: Path, vocab_size: int = 1 << 20) -> str:
    with pytest.raises(UserError) as caught:
        load_tokenizer(folder, vocab_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tokenizer_larger_than_the_embedding(copy: Callable[[str], Path]) -> None:
    assert "has id 319, but the model's embedding has 319 rows" in tokenizer_refusal(copy("single"), 319)


def test_no_tokenizer(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    (folder / "tokenizer.json").unlink()
    assert tokenizer_refusal(folder).startswith(f"{folder}: holds no tokenizer")


@pytest.mark.parametrize(
    ("content", "words"), [(POINTER, "git lfs pull"), ("{}", "cannot be read"), ("{", "cannot be read")]
)
def test_damaged_tokenizer(content: str, words: str, copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    (folder / "tokenizer.json").write_text(content)
    text = tokenizer_refusal(folder)
    assert text.startswith(str(folder))
    assert words in text


def test_slow_tokenizer(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: object())
    assert "no fast form" in tokenizer_refusal(copy("single"))


def test_code_beside_the_tokenizer_is_never_run(copy: Callable[[str], Path]) -> None:
    folder = copy("tied")
    (folder / "own.py").write_text(f"open({str(folder / 'it_ran')!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "never run" in tokenizer_refusal(folder)
    assert not (folder / "it_ran").exists()
