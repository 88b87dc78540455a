"""``report.html``: one run on one page that needs nothing else, neither network nor scripts; and its ``curves.png``.

Made at the end of a run, and by ``mlora report`` from the folder of one that is live or dead.
"""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

import mlora
from mlora.config import RunConfig
from mlora.engine.adapter_run import OVER, AdapterRun
from mlora.engine.compare import Curve, differences, draw, read_curves
from mlora.engine.output import ADAPTERS, CURVES, FACTS, PICTURE, REPORT
from mlora.engine.status import read_status
from mlora.files import writable, write_whole
from mlora.types import UserError

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; vertical-align: top; white-space: nowrap; }
tr { border-bottom: 1px solid #e4e4e4; }
th { color: #666; font-weight: 500; }
th.text, td.text, .name, .long { text-align: left; }
.name, .value, .long { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; }
.long { min-width: 12rem; }
.note { color: #666; margin: .2rem 0; }
.ended { color: #177245; } .failed { color: #b3261e; } .interrupted, .stopped, .cancelled { color: #8a5a00; }
img { max-width: 100%; height: auto; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: .85rem; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # a browser fetches nothing for this page


def write_facts(config: RunConfig, adapters: Sequence[AdapterRun], engine: Mapping[str, Any]) -> None:
    """What a report tells beside the numbers: configuration and data. A disk that does not take it costs the file."""
    plain = asdict(config) | {"output_dir": str(config.output_dir)}
    plain["adapters"] = [adapter.config.plain() for adapter in adapters]
    facts = {
        "versions": {"mlora": mlora.__version__, "torch": torch.__version__},
        "engine": engine,
        "config": plain,
        "data": {adapter.config.name: _data_facts(adapter) for adapter in adapters},
    }
    try:
        with writable(config.output_dir / FACTS):
            write_whole(config.output_dir / FACTS, json.dumps(facts, indent=1).encode())
    except UserError as error:
        print(f"{error}; a report will lack configuration and data", flush=True)


def _data_facts(adapter: AdapterRun) -> dict[str, Any]:
    held_out = {"held_out": len(adapter.held_out)} if adapter.held_out is not None else {}
    quartiles = [int(length) for length in np.quantile(adapter.data.lengths, (0, 0.25, 0.5, 0.75, 1))]
    return asdict(adapter.data.stats) | {"lengths": quartiles} | held_out


def write_report(run: Path, file: Path | None = None) -> Path:
    """The report of a run, and its curves as PNG: in the run's folder, or as ``file`` and beside it.

    Raises UserError where the folder holds no run or the files cannot be written.
    """
    status = read_status(run)
    curves = [replace(curve, run="") for curve in read_curves([run])]
    page, png = file or run / REPORT, file.with_suffix(".png") if file else run / CURVES
    picture = draw(curves)
    for path, data in ((png, picture), (page, _page(run, status, curves, picture).encode())):
        with writable(path):
            write_whole(path, data)
    return page


def _page(run: Path, status: Mapping[str, Any], curves: Sequence[Curve], picture: bytes) -> str:
    facts = _read_facts(run)
    name, source = escape(run.resolve().name), f"data:image/png;base64,{b64encode(picture).decode()}"
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>{name}</h1>",
        *(f'<p class="note">{escape(line)}</p>' for line in _summary(status, facts)),
        "<h2>Adapters</h2>",
        _table(_ADAPTER_TITLES, [_adapter_row(status["adapters"][curve.adapter], curve) for curve in curves]),
        "<h2>Curves</h2>",
        f'<img alt="loss, learning rate and tokens per second" src="{source}">',
    ]
    if facts["data"]:
        parts += ["<h2>Data</h2>", _table(_DATA_TITLES, [_data_row(*item) for item in facts["data"].items()])]
    with suppress(OSError):
        timeline = (run / PICTURE).read_text(encoding="utf-8")
        parts += ["<h2>Timeline of the stages</h2>", f'<div class="wide">{timeline}</div>']
    parts += ["<h2>Configuration</h2>", *_configuration(facts["config"], curves), "</body></html>\n"]
    return "\n".join(parts)


def _read_facts(run: Path) -> dict[str, Any]:
    """Empty where the run was made before there was such a file, or its disk was full."""
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((run / FACTS).read_text(encoding="utf-8"))
    return {key: found.get(key, {}) for key in ("versions", "engine", "config", "data")}


def _summary(status: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    states = [adapter["state"] for adapter in status["adapters"].values()]
    live = status["live"] and any(state not in OVER for state in states)
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status["updated"]))
    lines = [f"{'Still running' if live else 'Not running any more'}; {counts}; as of {when}."]
    if facts["config"]:
        lines.append(f"Base model {facts['config']['base_model']}.")
    told = [f"{key} {value}" for key, value in (facts["engine"] | facts["versions"]).items()]
    return lines + ([", ".join(told) + "."] if told else [])


Cell = tuple[str, str]  # CSS class, text
_ADAPTER_TITLES = (
    *("adapter", "state", "step", "first loss", "last loss", "best loss", "best held-out", "tokens", "tokens/s"),
    "what became of it",
)


def _adapter_row(entry: Mapping[str, Any], curve: Curve) -> list[Cell]:
    best, held_out = (f"{pair[0]:.4f} @{pair[1]}" if pair else "–" for pair in (curve.best, curve.best_eval))
    first, last = (f"{curve.losses[i]:.4f}" if curve.losses else "–" for i in (0, -1))
    speed = f"{sum(curve.speeds) / len(curve.speeds):,.1f}" if curve.speeds else "–"
    return [
        ("name", curve.adapter),
        (f"text {entry['state']}", entry["state"]),
        ("", "–" if entry["step"] is None else f"{entry['step']}/{entry['total_steps']}"),
        ("", first),
        ("", last),
        ("", best),
        ("", held_out),
        ("", f"{curve.tokens:,}"),
        ("", speed),
        ("long", entry["reason"] or (f"exported to {ADAPTERS}/{curve.adapter}" if entry["exported"] else "–")),
    ]


_DATA_TITLES = (
    *("adapter", "rows read", "kept", "cut at the end", "held out", "tokens", "trained"),
    *("tokens of a row: shortest, quartiles, longest", "dropped"),
)


def _data_row(name: str, data: Mapping[str, Any]) -> list[Cell]:
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(data["dropped"].items()))
    numbers = (data["rows"], data["kept"], data["truncated"], data.get("held_out", 0), data["tokens"])
    return [
        ("name", name),
        *(("", f"{number:,}") for number in numbers),
        ("", f"{data['target_tokens']:,} ({data['target_tokens'] / max(1, data['tokens']):.0%})"),
        ("", ", ".join(f"{length:,}" for length in data["lengths"])),
        ("long", dropped or "none"),
    ]


def _configuration(config: Mapping[str, Any], curves: Sequence[Curve]) -> list[str]:
    """In what the adapters differ, then all of it."""
    parts = []
    differing = differences(curves)
    if len(curves) > 1 and differing:
        titles = ("key", *(curve.adapter for curve in curves))
        rows = [[("text", key), *(("value", value) for value in values)] for key, values in differing.items()]
        parts = [_table(titles, rows)]
    text = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True) if config else "not known"
    return [*parts, f"<details><summary>all keys</summary><pre>{escape(text)}</pre></details>"]


def _table(titles: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    kinds = [kind.split(" ")[0] for kind, _ in rows[0]]
    head = "".join(f'<th class="{k}">{escape(title)}</th>' for k, title in zip(kinds, titles, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{escape(text)}</td>' for kind, text in row) + "</tr>\n" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
