"""The distribution mlora-engine. Its code is the one package mlora; the links ops and pipeline are not installed."""

import re
from pathlib import Path

from setuptools import find_packages, setup

root = Path(__file__).parent

setup(
    name="mlora-engine",
    version=re.search(r'__version__ = "(.+)"', (root / "mlora/__init__.py").read_text()).group(1),
    description="Fine-tune several LoRA adapters of one frozen Llama-family model at once",
    long_description=(root / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["mlora", "mlora.*"]),
    install_requires=[
        "torch>=2.10",
        "triton>=3.6; sys_platform == 'linux'",
        "transformers>=5.17",
        "safetensors>=0.5",
        "huggingface_hub>=1.0",
        "numpy>=2.0",
        "pyyaml>=6.0",
        "jinja2>=3.1",
        "tokenizers>=0.22",
        "rich>=13",  # the live view
        "matplotlib>=3.8",  # curves of every run
    ],
    extras_require={
        "data": ["datasets>=4.0"],  # never runs a data set's script; its pyarrow reads Parquet and Arrow
        "quant": ["bitsandbytes>=0.50"],
        "verify": ["peft>=0.18"],
        "tensorboard": ["tensorboard>=2.18"],  # these three are what report_to names
        "wandb": ["wandb>=0.20"],  # from here on several runs in one process
        "mlflow": ["mlflow>=2.15"],
        "demo": ["peft>=0.18", "gguf>=0.17"],
        "test": [
            "peft>=0.18",
            "datasets>=4.0",
            "tensorboard>=2.18",
            "wandb>=0.20",
            "mlflow-skinny>=2.15",  # the same client without a server
            "gguf>=0.17",
            "bitsandbytes>=0.50",
            "accelerate>=1.1",
            "pytest>=8",
            "pytest-timeout",
            "pytest-xdist>=3.6",
            "hypothesis>=6",
            "pyte>=0.8",  # a terminal for the live view
            "jsonschema>=4",  # checks what mlora schema prints
            "ruff==0.17.6",
            "mypy==2.4.1",
            "types-PyYAML",
            "build",
        ],
    },
    entry_points={"console_scripts": ["mlora=mlora.cli:main"]},
)
