"""The report: what stands in it is the run's, from a finished, a dead or a live one; a browser shows it offline."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread

import mlora
from mlora import cli, parse_config
from mlora.engine import leader
from mlora.engine.output import take_output
from mlora.engine.report import write_report
from tests.cpu.runs import files_up_to, run, write_rows
from tests.cpu.tiny import save_tiny

CHROMIUM = shutil.which("chromium")


class _Page(HTMLParser):
    """The texts of each table's rows, by the heading before it, and all attributes that load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self._heading, self._into = "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.loaded += [value for key, value in attrs if key in ("src", "href", "srcset", "data", "xlink:href")]
        if tag == "tr":
            self.tables.setdefault(self._heading, []).append([])
        self._into = tag

    def handle_endtag(self, tag):
        self._into = None

    def handle_data(self, data):
        if self._into in ("h1", "h2"):
            self._heading = data
        if self._into in ("th", "td"):
            self.tables[self._heading][-1].append(data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    model = save_tiny(folder / "model", "llama2")
    rows = str(write_rows(folder / "rows.jsonl", 20, seed=1))
    common = {"dataset": rows, "r": 4, "max_steps": 6, "warmup_steps": 0, "learning_rate": 1e-2}
    adapters = [
        {"name": "good", **common, "val_size": 4, "eval_steps": 2},
        {"name": "bad", **common, "learning_rate": 1e9, "weight_decay": 1e9, "max_grad_norm": 0},
    ]
    results = run(folder / "run", model, adapters, pipeline={"stages": 2, "transport": "local"})
    return folder / "run", results


def _copy(run_dir, target):
    shutil.copytree(run_dir, target)
    return target


def test_what_stands_in_it_is_the_runs(trained):
    run_dir, results = trained
    text = (run_dir / "report.html").read_text()
    page = _Page(text)
    titles, good, bad = page.tables["Adapters"]
    found = dict(zip(titles, good, strict=True))
    reports = results.adapters["good"].reports
    best = min(reports, key=lambda report: report.loss)
    assert found["state"] == "ended" and found["step"] == "6/6"
    assert (found["first loss"], found["last loss"]) == (f"{reports[0].loss:.4f}", f"{reports[-1].loss:.4f}")
    assert found["best loss"] == f"{best.loss:.4f} @{best.step}"
    held_out = min(results.adapters["good"].evaluations, key=lambda evaluation: evaluation.loss)
    assert found["best held-out"] == f"{held_out.loss:.4f} @{held_out.step}"
    assert found["tokens"] == f"{reports[-1].num_tokens:,}" and good[-1] == "exported to adapters/good"
    assert bad[1] == "failed" and bad[-1] == results.adapters["bad"].reason
    data = dict(zip(page.tables["Data"][0], page.tables["Data"][1], strict=True))
    assert (data["rows read"], data["kept"], data["held out"], data["dropped"]) == ("20", "20", "4", "none")
    assert "learning_rate" in [row[0] for row in page.tables["Configuration"]]
    assert "max_steps: 6" in unescape(text) and "stages of layers 2, 1" in text
    assert (run_dir / "timeline.svg").read_text() in text


def test_it_needs_nothing_but_itself(trained):
    run_dir, _ = trained
    page = _Page((run_dir / "report.html").read_text())
    (picture,) = page.loaded
    assert base64.b64decode(picture.removeprefix("data:image/png;base64,")) == (run_dir / "curves.png").read_bytes()
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert imread(run_dir / "curves.png").shape[:2] == (984, 1080)


def test_a_dead_run_and_one_without_configuration(trained, tmp_path, capsys):
    run_dir = _copy(trained[0], tmp_path / "dead")
    status = json.loads((run_dir / "status.json").read_text())
    status["adapters"]["good"] |= {"state": "training", "exported": None}
    (run_dir / "status.json").write_text(json.dumps(status))
    for name in ("report.html", "curves.png", "run.json", "timeline.svg"):
        (run_dir / name).unlink()
    assert cli.main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"{run_dir / 'report.html'}\n"
    page = _Page(text := (run_dir / "report.html").read_text())
    assert page.tables["Adapters"][1][1] == "interrupted" and "Not running any more" in text
    assert "Data" not in page.tables and (run_dir / "curves.png").exists() and "Timeline" not in text


def test_a_live_run_and_one_that_has_logged_nothing(trained, tmp_path):
    run_dir = _copy(trained[0], tmp_path / "live")
    status = json.loads((run_dir / "status.json").read_text())
    status["adapters"]["good"] |= {"state": "waiting", "step": 0, "exported": None}
    adapters = [{"name": "good", "dataset": "x"}]
    config = parse_config({"base_model": "b", "output_dir": str(run_dir), "adapters": adapters})
    lock = take_output(config, overwrite=False, resume=True)
    (run_dir / "status.json").write_text(json.dumps(status))
    (run_dir / "metrics.jsonl").write_text("")
    text = write_report(run_dir).read_text()
    lock.close()
    assert "Still running; 1 waiting, 1 failed" in text and _Page(text).tables["Adapters"][1][3] == "–"


def test_texts_are_texts(trained, tmp_path):
    run_dir = _copy(trained[0], tmp_path / "<b>run&amp;")
    status = json.loads((run_dir / "status.json").read_text())
    status["adapters"]["bad"]["reason"] = "<script>alert(1)</script>"
    (run_dir / "status.json").write_text(json.dumps(status))
    page = _Page(write_report(run_dir).read_text())
    assert "script" not in page.tags and "b" not in page.tags
    assert page.tables["Adapters"][2][-1] == "<script>alert(1)</script>"


def test_another_place_and_mistakes(trained, tmp_path, capsys):
    run_dir, _ = trained
    before = (run_dir / "report.html").stat().st_mtime_ns
    assert cli.main(["report", str(run_dir), "--output", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.png").exists() and (run_dir / "report.html").stat().st_mtime_ns == before
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "holds no run: status.json cannot be read: No such file or directory; give a run's folder" in (
        capsys.readouterr().err
    )
    assert cli.main(["report", str(run_dir), "--output", "/proc/page.html"]) == 2
    assert "mlora: /proc/page.png: cannot be written" in capsys.readouterr().err


def test_a_disk_that_takes_a_part_is_left_without_it(trained, tmp_path, capsys):
    with files_up_to(10_000):
        assert cli.main(["report", str(trained[0]), "--output", str(tmp_path / "page.html")]) == 2
    assert "page.png: cannot be written" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_a_report_that_cannot_be_made_costs_nothing_else(trained, tmp_path, monkeypatch, capsys):
    def broken(output_dir):
        raise ZeroDivisionError("no room")

    monkeypatch.setattr(leader, "write_report", broken)
    adapter = {"name": "a", "dataset": str(trained[0].parent / "rows.jsonl"), "max_steps": 2, "warmup_steps": 0}
    results = run(tmp_path / "run", trained[0].parent / "model", [adapter])
    assert not results.failed and not (tmp_path / "run/.lock").exists()
    assert "no report: ZeroDivisionError: no room" in capsys.readouterr().out


def test_overwrite_replaces_all_of_it_and_the_folder_is_still_a_runs(trained, tmp_path):
    run_dir = _copy(trained[0], tmp_path / "again")
    adapter = {"name": "a", "dataset": str(trained[0].parent / "rows.jsonl"), "max_steps": 2, "warmup_steps": 0}
    config = {"base_model": str(trained[0].parent / "model"), "output_dir": str(run_dir), "adapters": [adapter]}
    assert not mlora.train(config, overwrite=True).failed
    page = _Page((run_dir / "report.html").read_text())
    assert [row[0] for row in page.tables["Adapters"]] == ["adapter", "a"] and not (run_dir / "timeline.svg").exists()


def _browse(page, folder, height=1600) -> tuple[list[str], np.ndarray]:
    """What the browser's console says of a page, without network, and how the page looks."""
    assert CHROMIUM is not None
    shot = folder / "shot.png"
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size=1280,{height}", f"--screenshot={shot}"),
    ]
    done = subprocess.run([*command, page.as_uri()], check=True, capture_output=True, text=True, timeout=120)
    said = re.findall(r":CONSOLE[:(]\d+\)?\] (.*)", done.stderr)
    return said, imread(io.BytesIO(shot.read_bytes()))[..., :3]


@pytest.mark.skipif(CHROMIUM is None, reason="needs a headless chromium (Debian's package chromium)")
@pytest.mark.slow
def test_a_browser_shows_it_without_network_and_has_nothing_to_complain_of(trained, tmp_path):
    run_dir, _ = trained
    said, shot = _browse(run_dir / "report.html", tmp_path)
    assert said == []
    text = (run_dir / "report.html").read_text()
    without, bare = tmp_path / "without.html", re.sub(r"<img[^>]*>", "", text)
    without.write_text(bare)
    _, shot_without = _browse(without, tmp_path)
    curves = _blue(shot)
    assert curves > 500 and _blue(shot_without) < curves / 2  # the first curve's colour, gone with the picture
    assert (shot < 0.5).any(axis=2).mean() > 0.01 and (shot[-1] == 1).all()  # there is ink, and the page has an end


def _blue(shot) -> int:
    """Pixels in the colour of matplotlib's first curve."""
    return int((np.abs(shot - np.array([0x1F, 0x77, 0xB4]) / 255).max(axis=2) < 0.1).sum())


@pytest.mark.skipif(CHROMIUM is None, reason="needs a headless chromium (Debian's package chromium)")
@pytest.mark.slow
def test_the_browser_would_complain(trained, tmp_path):
    page = tmp_path / "page.html"
    text = (trained[0] / "report.html").read_text()
    page.write_text(text.replace("</body>", '<img src="http://example.org/x.png"><script>x()</script></body>'))
    said, _ = _browse(page, tmp_path)
    assert any("Content Security Policy" in line for line in said) and len(said) >= 2
