"""A grid's adapters ranked: those that differ in r, learning_rate and lora_alpha alone, however they were written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from mlora.config import GRID
from mlora.engine.adapter_run import AdapterRun
from mlora.engine.evaluation import best_of


def ranking(adapters: Sequence[AdapterRun]) -> str:
    """A table for each grid, lowest loss first: that of the best evaluation, else that of the last step."""
    grids: dict[str, list[AdapterRun]] = {}
    for adapter in adapters:
        common = {key: value for key, value in adapter.config.plain().items() if key not in ("name", *GRID)}
        grids.setdefault(json.dumps(common, sort_keys=True), []).append(adapter)
    return "".join(_table(sorted(grid, key=_score)) for grid in grids.values() if len(grid) > 1)


def _score(adapter: AdapterRun) -> float:
    """Infinite where there is none, or none that is finite."""
    if adapter.held_out is not None:
        best = best_of(adapter.evaluations)
        return best.loss if best else math.inf
    loss = adapter.reports[-1].loss if adapter.reports else math.inf
    return loss if math.isfinite(loss) else math.inf


def _table(ranked: Sequence[AdapterRun]) -> str:
    width = max(len("adapter"), *(len(adapter.config.name) for adapter in ranked))
    title = "last loss" if ranked[0].held_out is None else "best eval loss"
    lines = [f"\nrank  {'adapter':<{width}}  {'r':>4}  {'learning_rate':>13}  {'lora_alpha':>10}  {title}"]
    for place, adapter in enumerate(ranked, 1):
        config, score = adapter.config, _score(adapter)
        numbers = f"{config.r:>4}  {config.learning_rate:>13.4g}  {config.lora_alpha:>10g}"
        lines.append(f"{place:>4}  {config.name:<{width}}  {numbers}  {f'{score:.4f}' if score < math.inf else '-'}")
    return "\n".join(lines) + "\n"
