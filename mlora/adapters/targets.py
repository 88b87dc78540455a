"""Which modules of the model carry an adapter: PEFT's rules, but what matches nothing is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlora.config import AdapterConfig
from mlora.types import LINEAR_MODULES, UserError, linear_names


def match_targets(config: AdapterConfig, num_layers: int) -> tuple[str, ...]:
    """Global names of the targeted modules in model order.

    A list of ``target_modules`` matches a module by full name or by its last parts, a string is "all-linear" or a
    regular expression for the full name. Raises UserError naming the key and what exists.
    """
    place = f"adapters[{config.name}]"
    names = linear_names(num_layers)
    targets = list(LINEAR_MODULES) if config.target_modules == "all-linear" else config.target_modules
    chosen = _matching(targets, names, f"{place}.target_modules")
    if isinstance(targets, str):
        _refuse_others(targets, names, f"{place}.target_modules")
    if config.exclude_modules:
        chosen -= _matching(config.exclude_modules, names, f"{place}.exclude_modules")
    if config.layers_to_transform is not None:
        chosen &= _in_layers(config.layers_to_transform, num_layers, names, f"{place}.layers_to_transform")
    if not chosen:
        raise UserError(f"{place}: exclude_modules and layers_to_transform leave none of target_modules")
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(config, key):
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in chosen):
                raise UserError(f"{place}.{key}: {pattern!r} matches none of the adapter's modules")
    return tuple(name for name in names if name in chosen)


def _matching(targets: str | Sequence[str], names: list[str], place: str) -> set[str]:
    found: set[str] = set()
    for target in (targets,) if isinstance(targets, str) else targets:
        if isinstance(targets, str):
            matches = _full_matches(target, names, place)
        else:
            matches = {name for name in names if name == target or name.endswith("." + target)}
        if not matches:
            raise UserError(
                f"{place}: {target!r} matches no module; there are {', '.join(LINEAR_MODULES)} in "
                f"{names[0].rsplit('.', 2)[0]} … {names[-1].rsplit('.', 2)[0]}{_hint(targets)}"
            )
        found |= matches
    return found


def _hint(targets: str | Sequence[str]) -> str:
    """A string is a pattern, as in PEFT, where many mean a name."""
    if not isinstance(targets, str):
        return ""
    name = targets if targets in LINEAR_MODULES else LINEAR_MODULES[0]
    return f"; a string is all-linear or a regular expression for the whole name, and a name stands in a list: [{name}]"


def _full_matches(pattern: str, names: list[str], place: str) -> set[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"{place}: {pattern!r} is no valid regular expression: {error}") from None
    return {name for name in names if compiled.fullmatch(name)}


def _refuse_others(pattern: str, names: list[str], place: str) -> None:
    """PEFT tries to put an adapter on every module whose name the pattern matches."""
    others = [name for name in _other_modules(names) if re.fullmatch(pattern, name)]
    if others:
        raise UserError(
            f"{place}: {pattern!r} also matches {others[0]}, which carries no adapter; a string is a regular "
            r"expression for full names, so let it end with the linears, as in .*self_attn\.(q|v)_proj"
        )


def _other_modules(names: list[str]) -> list[str]:
    """Names of modules that are no target."""
    parts = [name.rsplit(".", depth)[0] for name in names for depth in (1, 2)]
    norms = [f"{parts[1]}.{norm}" for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm")]
    return ["lm_head", "model.embed_tokens", "model.norm", "model", "model.layers", *dict.fromkeys(parts), *norms]


def _in_layers(layers: int | tuple[int, ...], num_layers: int, names: list[str], place: str) -> set[str]:
    wanted = {layers} if isinstance(layers, int) else set(layers)
    outside = sorted(layer for layer in wanted if not 0 <= layer < num_layers)
    if outside:
        raise UserError(f"{place}: layer {outside[0]} does not exist; the model has layers 0 … {num_layers - 1}")
    return {name for name in names if int(name.split(".")[2]) in wanted}
