"""The tokenizer of a model."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlora.models.spec import refuse_lfs_pointer
from mlora.types import UserError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """The fast tokenizer in a model's folder. Code that its configuration points to is never run.

    ``vocab_size`` is the number of rows of the model's embedding. Raises UserError naming the folder or file where
    there is no tokenizer, it cannot be read, or a token id lies outside the embedding.
    """
    files = [folder / name for name in _FILES if (folder / name).exists()]
    if not files:
        raise UserError(f"{folder}: holds no tokenizer ({', '.join(_FILES)}); copy the one of the model there")
    for file in files:
        refuse_lfs_pointer(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # parsers of several libraries are behind this, each with errors of its own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{folder}: its tokenizer cannot be read (code beside it is never run): {reason}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"{folder}: {type(tokenizer).__name__} has no fast form; save a tokenizer.json beside it")
    token, index = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if index >= vocab_size:
        raise UserError(f"{files[0]}: token {token!r} has id {index}, but the model's embedding has {vocab_size} rows")
    return tokenizer
