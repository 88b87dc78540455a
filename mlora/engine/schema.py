"""``mlora schema``: the configuration file as a JSON schema (draft 2020-12), made from the classes that read it.

Editors complete and check a YAML file with it. What it lets through is still checked when the file is read.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from mlora.config import GRID, REFUSED, AdapterConfig, DatasetConfig, PipelineConfig, RunConfig

_PLAIN: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    Path: {"type": "string"},
    type(None): {"type": "null"},
}
_OWN_PER_ADAPTER = ("name", "dataset")


def config_schema() -> dict[str, Any]:
    """The schema of a whole configuration file."""
    run = _object(RunConfig)
    adapter = _object(AdapterConfig)
    adapter["properties"] |= {
        key: {"enum": list(values), "description": f"only so: {why}"} for key, (values, why) in REFUSED.items()
    }
    adapter["properties"]["grid"] = {
        "type": ["object", "null"],
        "properties": {key: {"type": "array", "items": adapter["properties"][key], "minItems": 1} for key in GRID},
        "additionalProperties": False,
        "description": "an adapter for each combination of these values",
    }
    common = {key: value for key, value in adapter["properties"].items() if key not in _OWN_PER_ADAPTER}
    run["properties"] |= {
        "adapters": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/adapter"}},
        "defaults": {"type": ["object", "null"], "properties": common, "additionalProperties": False}
        | {"description": "keys for every adapter that does not have them itself"},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mLoRA run",
        **run,
        "$defs": {"adapter": adapter, "dataset": _object(DatasetConfig), "pipeline": _object(PipelineConfig)},
    }


def _object(cls: type) -> dict[str, Any]:
    fields, hints, comments = dataclasses.fields(cls), typing.get_type_hints(cls), _comments(cls)
    properties = {}
    for field in fields:
        described = _type(hints[field.name])
        if field.name in comments:
            described = described | {"description": comments[field.name]}
        if isinstance(field.default, str | int | float) and not isinstance(field.default, Path):
            described = described | {"default": field.default}
        properties[field.name] = described
    missing = dataclasses.MISSING
    required = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _type(annotation: Any) -> dict[str, Any]:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_type(part) for part in parts]}
    if origin is Literal:
        return {"enum": list(parts)}
    if origin in (tuple, list):
        return {"type": "array", "items": _type(parts[0])}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _type(parts[1])}
    if annotation is DatasetConfig:
        return {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/dataset"}]}
    if annotation is PipelineConfig:
        return {"anyOf": [{"$ref": "#/$defs/pipeline"}, {"type": "null"}]}
    return _PLAIN.get(annotation, {})


def _comments(cls: type) -> dict[str, str]:
    """What stands behind a key in the class that reads it."""
    found = re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.MULTILINE)
    return dict(found)
