"""Tiny random models of every family, with a tokenizer, as folders that transformers and the engine both read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)

VOCAB = 320
_CORPUS = (
    "The quick brown fox jumps over the lazy dog.",
    "What is the capital of France? The capital of France is Paris.",
    "Janet has 3 ducks and sells 16 eggs for 2 dollars each. How much does she make?",
    "Write a short answer to the question below, one word is enough.",
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
    "llama2": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama3.1": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE | {"factor": 8.0}}),
    "llama3.2": (LlamaConfig, {"rope_parameters": _LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True}),
    "smollm2": (
        LlamaConfig,
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "tinyllama": (LlamaConfig, {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "mistral": (MistralConfig, {"sliding_window": 6}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
}
FAMILIES = tuple(_FAMILIES)


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """The configuration of a tiny model of one of FAMILIES; ``changes`` are transformers' own keys."""
    kind, special = _FAMILIES[family]
    config = kind(**(_COMMON | special | changes))
    config.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    return config


def tiny_model(family: str, seed: int = 0, **changes: object) -> torch.nn.Module:
    """transformers' model in float32 and eval mode, every tensor random: biases and norms too, logits of order 1."""
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model.eval()


def save_tiny(
    folder: Path, family: str, seed: int = 0, shards: int = 1, dtype: torch.dtype = torch.float32, **changes: object
) -> Path:
    """Write a tiny model and its tokenizer to ``folder`` and return it. ``shards`` above 1 is the least number."""
    model = tiny_model(family, seed, **changes).to(dtype)
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    model.save_pretrained(folder, max_shard_size=size // shards if shards > 1 else size + 1)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@cache
def _trained() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return json.loads(tokenizer.to_str())["model"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB tokens with a ChatML template; its pad token is its eos token.

    AutoTokenizer swaps the class of some model types for their own; Qwen2's is kept beside a model of any family.
    """
    model = _trained()
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = _CHATML
    return tokenizer
