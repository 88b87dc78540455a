"""``mlora generate``: token by token what transformers + PEFT decode greedily, and the same bits in any company."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from mlora import cli
from mlora.config import data_config
from mlora.engine import generate as engine_generate
from mlora.engine.generate import Answer, Sampling, generate, read_prompts, text_prompt
from mlora.engine.use import Models
from mlora.models.generate import CachedDecoder
from tests.cpu.runs import run, write_rows
from tests.cpu.tiny import FAMILIES, save_tiny, tiny_tokenizer

NEW = 14
ADAPTERS = {
    "wide": {"r": 8},
    "narrow": {"r": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
}


def _run(folder, family):
    model = save_tiny(folder / "model", family)
    data = write_rows(folder / "rows.jsonl", 12, seed=1)
    keys = {"dataset": str(data), "learning_rate": 2e-2, "max_steps": 3, "warmup_steps": 0}
    run(folder / "run", model, [{"name": name, **keys, **more} for name, more in ADAPTERS.items()])
    return folder / "run"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return _run(tmp_path_factory.mktemp("llama"), "llama3.2")


def _prompts(tokenizer):
    """Ragged: of one token, of several, of more than a window and of more than 16 rows."""
    texts = ("a", "red green", "The quick brown fox", "one two three cat dog " * 3)
    return [tokenizer(text).input_ids for text in texts]


def _answers(places, prompts, sampling, batch_size=16, **models) -> list[Answer]:
    return generate(Models(places, **models), lambda tokenizer: prompts, sampling, batch_size)


def _peft_answer(model, prompt):
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers_and_peft(tmp_path, family):
    folder = _run(tmp_path, family)
    prompts = _prompts(tiny_tokenizer())
    answers = _answers([folder], prompts, Sampling(max_new_tokens=NEW), with_base=True, dtype="float32", device="cpu")
    assert Counter(answer.adapter for answer in answers) == dict.fromkeys(("base", "wide", "narrow"), len(prompts))
    for answer in answers:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        if answer.adapter != "base":
            model = PeftModel.from_pretrained(model, folder / "adapters" / answer.adapter)
        theirs = _peft_answer(model.eval(), prompts[answer.prompt])
        assert [*answer.tokens, *([2] if answer.ended else [])] == theirs, (answer.adapter, answer.prompt)
    said = {adapter: [a.tokens for a in answers if a.adapter == adapter] for adapter in ("base", "wide", "narrow")}
    assert said["base"] != said["wide"] != said["narrow"], "adapters that change nothing prove nothing"


@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=NEW), Sampling(max_new_tokens=NEW, temperature=1.0)])
def test_an_answer_does_not_depend_on_its_company(llama, sampling):
    prompts = _prompts(tiny_tokenizer()) * 6  # more than 16 sequences of one adapter
    together = _answers([llama], prompts, sampling, batch_size=64, with_base=True)
    mine = [answer for answer in together if answer.adapter == "narrow"]
    assert mine == _answers([llama / "adapters" / "narrow"], prompts, sampling, batch_size=1)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("sampling", [Sampling(max_new_tokens=NEW), Sampling(max_new_tokens=NEW, temperature=1.0)])
def test_answers_do_not_depend_on_the_stages(llama, sampling, stages):
    prompts = _prompts(tiny_tokenizer())
    wanted = _answers([llama], prompts, sampling, with_base=True)
    assert _answers([llama], prompts, sampling, with_base=True, stages=stages, batch_size=5) == wanted
    assert len({answer.tokens for answer in wanted}) > 6


def test_each_answer_is_shown_as_soon_as_it_is_there(llama):
    shown = []
    sampling = Sampling(max_new_tokens=3)
    answers = generate(Models([llama], stages=2), lambda tokenizer: [[40], [41, 42]], sampling, 1, shown.append)
    assert answers == shown and len(shown) == 4


def test_an_error_on_a_stage_ends_all_with_its_own_words(llama, monkeypatch):
    original = CachedDecoder.extend

    def extend(self, *args):
        if self._decoder.is_last:
            raise RuntimeError("the last stage is broken")
        return original(self, *args)

    monkeypatch.setattr(CachedDecoder, "extend", extend)
    with pytest.raises(RuntimeError, match="the last stage is broken"):
        _answers([llama], [[40]], Sampling(max_new_tokens=NEW), stages=3)


def test_draws_follow_seed_and_prompt(llama):
    prompts = [[40, 41, 42]] * 3

    def texts(**keys):
        sampling = Sampling(max_new_tokens=NEW, **keys)
        return [answer.tokens for answer in _answers([llama / "adapters" / "wide"], prompts, sampling)]

    drawn = texts(temperature=1.0, seed=1)
    assert drawn == texts(temperature=1.0, seed=1) != texts(temperature=1.0, seed=2)
    assert len(set(drawn)) == 3, "each prompt has draws of its own"
    assert texts(temperature=1.0, top_p=1e-9) == texts() == texts(temperature=1e-4)


def test_draws_have_the_models_probabilities(llama):
    sampling = Sampling(max_new_tokens=1, temperature=2.0)
    answers = _answers([llama / "adapters" / "wide"], [[40, 41, 42]] * 500, sampling, batch_size=500)
    counts = Counter(answer.tokens for answer in answers)
    model = AutoModelForCausalLM.from_pretrained(llama.parent / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(model, llama / "adapters" / "wide").eval()
    likeliest, token = torch.softmax(model(torch.tensor([[40, 41, 42]])).logits[0, -1] / 2, 0).max(0)
    expected = 500 * float(likeliest)
    assert abs(counts[(int(token),)] - expected) < 4 * expected**0.5


def test_a_file_of_training_rows_is_asked_without_its_answers(tmp_path):
    tokenizer = tiny_tokenizer()
    path = tmp_path / "rows.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "SECRET"}]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    texts = [tokenizer.decode(ids) for ids in read_prompts(data_config(path), tokenizer)]
    end = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [end, "<|im_start|>system\ns<|im_end|>\n" + end]
    assert tokenizer.decode(text_prompt("hi", "s", False, tokenizer)) == texts[1]
    assert tokenizer.decode(text_prompt("hi", None, True, tokenizer)) == "hi"


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "red", "completion": " SECRET"}, "red"),
        ({"prompt": "red"}, "red"),
        ({"question": "red"}, "<|im_start|>user\nred<|im_end|>\n<|im_start|>assistant\n"),
        ({"instruction": "red", "context": "dog", "response": "SECRET"}, "red\ndog"),
        ({"instruction": "red", "input": "dog"}, "red\ndog"),
    ],
)
def test_every_form_of_a_row_can_be_asked(tmp_path, row, text):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    (ids,) = read_prompts(data_config(path), tiny_tokenizer())
    shown = tiny_tokenizer().decode(ids)
    assert text in shown and "SECRET" not in shown


def test_the_command(llama, capsys):
    command = ["generate", str(llama), "--with-base", "--prompt", "one", "--prompt", "two", "--max-new-tokens", "3"]
    assert cli.main([*command, "--json"]) == 0
    entries = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(e["prompt"], e["adapter"]) for e in entries] == [
        (prompt, adapter) for prompt in (0, 1) for adapter in ("base", "narrow", "wide")
    ]
    assert cli.main(command) == 0 and "[2] wide" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", "x", "--max-new-tokens", "1000"], "more than the 256 positions of the model"),
        (["--prompt", "x", "--temperature", "-1"], "temperature -1: give 0 for greedy"),
        (["--prompt", "x", "--top-p", "0"], "top_p 0"),
        (["--prompt", "", "--plain"], "the prompt is empty"),
        (["--prompt", "x", "--plain", "--system", "y"], "system: only a conversation"),
        (["--prompt", "x", "--base", "/nowhere"], "base_model: '/nowhere' is not a folder"),
        (["--file", "/nowhere"], "/nowhere: cannot be read"),
        (["--prompt", "x", "--batch-size", "0"], "batch_size 0"),
    ],
)
def test_mistakes_are_told_in_one_line(llama, capsys, words, message):
    assert cli.main(["generate", str(llama), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_folder_without_adapters_is_named(tmp_path, capsys):
    assert cli.main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    assert f"{tmp_path}: there is no adapter" in capsys.readouterr().err
    assert cli.main(["generate", "--prompt", "x"]) == 2
    assert "give the folder of an adapter or of a run, or --base MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_at_a_real_width_do_not_depend_on_how_many_sequences_there_are(tmp_path, monkeypatch, dtype):
    model = save_tiny(tmp_path / "model", "tinyllama", hidden_size=960, num_hidden_layers=1)
    original, found = engine_generate._choose, []

    def choose(logits_V, sampling, sequence):
        found.append((sequence.prompt, logits_V))
        return original(logits_V, sampling, sequence)

    monkeypatch.setattr(engine_generate, "_choose", choose)
    prompts = [[40 + i, 41, 42] for i in range(40)]
    for batch_size in (1, 40):
        _answers([], prompts, Sampling(max_new_tokens=1), batch_size=batch_size, base=str(model), dtype=dtype)
    alone, together = found[:40], found[40:]
    assert [prompt for prompt, _ in alone] == [prompt for prompt, _ in together]
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in zip(alone, together, strict=True))
