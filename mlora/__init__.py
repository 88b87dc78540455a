"""Fine-tune several LoRA adapters of one frozen Llama-family model at once."""

__version__ = "0.1.0"
