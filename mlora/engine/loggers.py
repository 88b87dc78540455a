"""``report_to``: TensorBoard, Weights & Biases and MLflow through their own packages; each adapter is a run of its own.

Every logger has a thread, so that neither a network nor a disk makes the training wait. One that fails is named once
and gets nothing more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from mlora.config import AdapterConfig
from mlora.engine.output import LOGGED, TENSORBOARD
from mlora.files import write_whole
from mlora.types import UserError

_CLOSE_S = 15.0  # that a run waits at its end for what is not sent yet; less than a signal leaves it


class Logger(Protocol):
    """Takes the numbers of all adapters. It may raise anything; it is called from one thread."""

    def start(self, config: AdapterConfig, done: int) -> None:
        """An adapter begins, or goes on behind ``done`` steps."""

    def log(self, adapter: str, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, states: Mapping[str, str]) -> None:
        """Nothing follows; ``states`` are the adapters' last ones."""


class TensorBoard:
    """A folder of event files for each adapter, so that TensorBoard shows a run for each."""

    def __init__(self, output_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make, self._folder = SummaryWriter, output_dir / TENSORBOARD
        self._writers: dict[str, Any] = {}

    def start(self, config: AdapterConfig, done: int) -> None:
        """What an interrupted run had written behind ``done`` is hidden by the event of the new start."""
        writer = self._make(str(self._folder / config.name), purge_step=done + 1 if done else None, flush_secs=10)
        writer.add_text("configuration", "\n".join(f"    {key}: {value}" for key, value in config.plain().items()))
        self._writers[config.name] = writer

    def log(self, adapter: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writers[adapter].add_scalar(name, value, step)

    def close(self, states: Mapping[str, str]) -> None:
        for writer in self._writers.values():
            writer.close()


class WeightsAndBiases:
    """A W&B run for each adapter, in a group named after the run's folder."""

    def __init__(self, output_dir: Path) -> None:
        import wandb

        self._wandb, self._output_dir, self._ids = wandb, output_dir, _Ids(output_dir, "wandb")
        self._runs: dict[str, Any] = {}

    def start(self, config: AdapterConfig, done: int) -> None:
        """Steps that W&B has already are left out by itself."""
        run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mlora"),
            group=self._output_dir.name,
            name=config.name,
            id=self._ids.get(config.name),
            resume="allow",
            config=config.plain(),
            reinit="create_new",
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self._ids.put(config.name, run.id)
        self._runs[config.name] = run
        if not run.offline:
            print(f"{config.name}  wandb: {run.url}", flush=True)

    def log(self, adapter: str, step: int, values: Mapping[str, float]) -> None:
        self._runs[adapter].log(dict(values), step=step)

    def close(self, states: Mapping[str, str]) -> None:
        for name, run in self._runs.items():
            run.finish(exit_code=0 if states.get(name) == "ended" else 1)


class MLflow:
    """An MLflow run for each adapter, named after the run's folder and the adapter."""

    def __init__(self, output_dir: Path) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric, self._param = MlflowClient(), Metric, Param
        self._output_dir, self._ids = output_dir, _Ids(output_dir, "mlflow")
        self._runs: dict[str, str] = {}

    def start(self, config: AdapterConfig, done: int) -> None:
        if (known := self._ids.get(config.name)) is not None:
            self._client.update_run(known, status="RUNNING")
            self._runs[config.name] = known
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "mlora")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run = self._client.create_run(experiment, run_name=f"{self._output_dir.name}/{config.name}").info.run_id
        self._client.log_batch(run, params=[self._param(k, str(v)[:500]) for k, v in config.plain().items()])
        self._ids.put(config.name, run)
        self._runs[config.name] = run

    def log(self, adapter: str, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._runs[adapter], metrics=metrics)

    def close(self, states: Mapping[str, str]) -> None:
        for name, run in self._runs.items():
            state = states.get(name)
            self._client.set_terminated(run, {"ended": "FINISHED", "failed": "FAILED"}.get(state or "", "KILLED"))


_MADE: dict[str, Callable[[Path], Logger]] = {  # each under the name of its package
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def check_loggers(names: tuple[str, ...]) -> None:
    """Raises UserError where a package is missing, or W&B has no key."""
    check_installed(names)
    if "wandb" in names:
        _log_in()


def check_installed(names: tuple[str, ...]) -> None:
    """Raises UserError where a package is missing."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name} is not installed: pip install 'mlora-engine[{name}]', or leave it out")


def _log_in() -> None:
    """W&B asks for a key on a terminal; without one it fails. A network that is down is the logger's own matter."""
    import wandb

    if wandb.setup().settings.mode != "online":
        return
    try:
        wandb.login()
    except wandb.errors.UsageError:
        raise UserError("report_to: wandb has no key; run wandb login, or set WANDB_MODE=offline") from None
    except wandb.errors.CommError:
        return


class Loggers:
    """All loggers of ``report_to``. Every method returns at once but ``close``."""

    def __init__(self, names: tuple[str, ...], output_dir: Path) -> None:
        self._threads = [_Thread(name, _MADE[name], output_dir) for name in names]

    def open(self) -> None:
        """Until then nothing is written."""
        for thread in self._threads:
            thread.start()

    def start(self, config: AdapterConfig, done: int) -> None:
        """An adapter begins, or goes on behind ``done`` steps."""
        self._tell(lambda logger: logger.start(config, done))

    def log(self, entry: Mapping[str, Any]) -> None:
        """An entry of ``metrics.jsonl``."""
        values = _scalars(entry)
        self._tell(lambda logger: logger.log(entry["adapter"], entry["step"], values))

    def close(self, states: Mapping[str, str]) -> None:
        """Wait a while for what is on its way."""
        self._tell(lambda logger: logger.close(states))
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.finish(deadline)

    def _tell(self, what: Callable[[Logger], None]) -> None:
        for thread in self._threads:
            thread.jobs.put(what)


class _Thread(threading.Thread):
    """One logger at work."""

    def __init__(self, logger: str, make: Callable[[Path], Logger], output_dir: Path) -> None:
        super().__init__(name=logger, daemon=True)
        self._make, self._output_dir = make, output_dir
        self.jobs: queue.SimpleQueue[Callable[[Logger], None] | None] = queue.SimpleQueue()

    def finish(self, deadline: float) -> None:
        self.jobs.put(None)
        self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            print(f"report_to: {self.name} has not taken everything within {_CLOSE_S:.0f} s", flush=True)

    def run(self) -> None:
        try:
            logger = self._make(self._output_dir)
            while (job := self.jobs.get()) is not None:
                job(logger)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(f"report_to: {self.name} gets nothing more, the training goes on: {reason}", flush=True)
            while self.jobs.get() is not None:
                pass  # so that a long run does not fill the memory


class _Ids:
    """The names that a logger's service has given the adapters' runs, so that a run that goes on finds them."""

    _lock = threading.Lock()  # several loggers write the one file

    def __init__(self, output_dir: Path, logger: str) -> None:
        self._path, self._logger = output_dir / LOGGED, logger

    def get(self, adapter: str) -> str | None:
        return self._read().get(self._logger, {}).get(adapter)

    def put(self, adapter: str, name: str) -> None:
        with self._lock:
            tree = self._read()
            tree.setdefault(self._logger, {})[adapter] = name
            write_whole(self._path, json.dumps(tree, indent=1).encode())

    def _read(self) -> dict[str, dict[str, str]]:
        with suppress(OSError, ValueError):
            return json.loads(self._path.read_text(encoding="utf-8"))
        return {}


def _scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers under transformers' names: train/loss, eval/loss. A loss that is not finite is text in an entry."""
    numbers = {k: v for k, v in entry.items() if k not in ("adapter", "step") and not isinstance(v, bool)}
    return {
        f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}": float(value) for key, value in numbers.items()
    }
