"""What a row means: rendering, tokens and labels."""

from mlora.tasks.sft import SftTask

__all__ = ["SftTask"]
