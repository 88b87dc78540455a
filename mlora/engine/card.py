"""The README.md that lies beside an exported adapter."""

from __future__ import annotations

from mlora.engine.adapter_run import AdapterRun
from mlora.engine.base import Base
from mlora.engine.evaluation import best_of

_TEXT = """\
---
base_model: {base_model}
library_name: peft
tags: [lora]
---
# {name}

A LoRA adapter of `{base_model}`{quantised}, trained with mLoRA on {data}: {rows} rows, {steps} steps,
last loss {loss:.4f}.
{note}

| r | lora_alpha | lora_dropout | use_rslora | learning_rate | rows per step | seed |
| --- | --- | --- | --- | --- | --- | --- |
| {r} | {alpha:g} | {dropout:g} | {rslora} | {rate:g} | {batch} | {seed} |

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")  # this folder
```
"""


def model_card(adapter: AdapterRun, base: Base) -> str:
    """What was trained, on what, and how to load it."""
    config = adapter.config
    return _TEXT.format(
        base_model=base.name,
        quantised=f" with its linears kept as {base.quantization}" if base.quantization else "",
        name=config.name,
        data=", ".join(f"`{source.label}`" for source in config.sources),
        rows=len(adapter.data),
        steps=len(adapter.reports),
        loss=adapter.reports[-1].loss,
        note=_best(adapter),
        r=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        rslora=str(config.use_rslora).lower(),
        rate=config.learning_rate,
        batch=config.rows_per_step,
        seed=config.seed,
    )


def _best(adapter: AdapterRun) -> str:
    """Which step's weights these are, where there was a choice."""
    best = best_of(adapter.evaluations)
    if best is None or not adapter.config.load_best_model_at_end:
        return ""
    return f"The weights are those of step {best.step}, whose eval_loss of {best.loss:.4f} was the lowest.\n"
