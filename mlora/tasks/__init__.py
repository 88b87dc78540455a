"""What a row means: rendering, tokens and labels."""

from mlora.tasks.prompts import Prompter
from mlora.tasks.sft import SftTask

__all__ = ["Prompter", "SftTask"]
