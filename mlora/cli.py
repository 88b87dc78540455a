"""The command ``mlora``. argparse, since it is in the standard library and a few commands need no more."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import platform
import signal
import sys
import threading
import warnings
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import mlora
from mlora.config import data_config
from mlora.files import writable
from mlora.types import Interrupted, Note, UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from transformers import PreTrainedTokenizerBase

    from mlora.engine.generate import Answer

Made = TypeVar("Made")
_TRAIN_EPILOG = "Everything else is a key of the file, such as --set defaults.learning_rate=1e-4."
_NPROC = "start N processes on this host, as torchrun would"
_STARTER_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DTYPES = ("float32", "bfloat16", "float16")
_OK, _BUG, _USER, _FAILED, _INTERRUPTED = 0, 1, 2, 3, 128 + 2


def main(argv: list[str] | None = None) -> int:
    """Run one command. Exit codes: 0 all adapters ended, 2 the user's mistake, 3 an adapter failed, 1 our bug,
    128 + n signal n."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parsed(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # where LANG's letters are few
    trains = arguments.run is _train
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", Note)
            warnings.showwarning = _shower(warnings.showwarning)
            if vars(arguments).get("nproc") is not None:
                return _run_in_processes(arguments.nproc, argv)
            if arguments.engine:
                _load(f"mlora.engine.{arguments.engine}")
            code = arguments.run(arguments)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # whoever read our output has seen enough
        _silence(sys.stdout)
        return 1
    except UserError as error:
        for line in str(error).split("\n"):
            print(f"mlora: {line}", file=sys.stderr)
        return _USER
    except Interrupted as stopped:
        _say_interrupted("; --resume auto goes on from the checkpoints" if trains else "")
        return 128 + stopped.signal
    except KeyboardInterrupt:
        _say_interrupted(" before the training" if trains else "")
        return _INTERRUPTED


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        keys = "; a key of the file is changed with --set, such as --set defaults.learning_rate=1e-4"
        parser.error(f"unrecognized arguments: {' '.join(rest)}{keys if 'config' in arguments else ''}")
    return arguments


def _load(module: str) -> None:
    """Import with Ctrl-C ending the process at once: raised inside a library's own code the exception may abort it."""
    if threading.current_thread() is not threading.main_thread():  # where Ctrl-C never arrives
        import_module(module)
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        import_module(module)
    finally:
        signal.signal(signal.SIGINT, before)


def _end(*_: object) -> None:
    _say_interrupted()
    os._exit(_INTERRUPTED)


def _say_interrupted(more: str = "") -> None:
    """Once a host: each of its processes is interrupted."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"mlora: interrupted{more}", file=sys.stderr, flush=True)


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _shower(others: Callable[..., None]) -> Callable[..., None]:
    """Shows a note on one line, and other warnings as ever."""

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, Note):
            print(f"mlora: note: {message}", file=sys.stderr)
        else:
            others(message, category, *rest, **named)

    return show


class _Parser(argparse.ArgumentParser):
    """An option has one name: --r is no --resume."""

    def __init__(self, **keys: Any) -> None:
        super().__init__(**keys, allow_abbrev=False)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(prog="mlora", description=mlora.__doc__)
    parser.add_argument("--version", action="version", version=f"mlora {mlora.__version__}")
    add = partial(_command, parser.add_subparsers(required=True, metavar="COMMAND"))
    train = add("train", _train, "run", "train the adapters of a configuration file", epilog=_TRAIN_EPILOG)
    train.add_argument("config", help="a YAML file")
    _add_set(train, "change one key of the file")
    again = train.add_argument_group("when output_dir holds a run already")
    again.add_argument("--overwrite", action="store_true", help="replace it")
    again.add_argument("--resume", metavar="auto|RUN", help="go on with it, or from another run's checkpoints")
    again.add_argument("--allow-changed", action="store_true", help="resume even where keys or data have changed")
    processes = train.add_argument_group("processes")
    processes.add_argument("--nproc", type=int, metavar="N", help=_NPROC)
    plan = add("plan", _plan, "plan", "show stages, order and predicted bubble, without training")
    plan.add_argument("config", help="a YAML file")
    plan.add_argument("--stages", type=int, metavar="S", help="number of stages (the file's, or 1)")
    _add_set(plan, "change one key of the file")
    plan.add_argument("--picture", default="plan.svg", metavar="FILE", help="where the picture goes (plan.svg)")
    status = add("status", _status, "status", "show the adapters of a run, live or dead")
    status.add_argument("run_dir", metavar="RUN", help="the run's folder")
    status.add_argument("--json", action="store_true", help="as JSON")
    added = add("add", _add, "inbox", "add the adapters of a file to a run while it runs")
    added.add_argument("run_dir", metavar="RUN", help="the run's folder")
    added.add_argument("file", metavar="FILE", help="a YAML file with adapters, and defaults if need be")
    stop = add("stop", _stop, "inbox", "end an adapter of a run behind its current step, and export it")
    stop.add_argument("run_dir", metavar="RUN", help="the run's folder")
    stop.add_argument("name", metavar="NAME", help="the adapter")
    verify = add("verify", _verify, "verify", "load a run's adapters with PEFT and compare logits with the engine's")
    verify.add_argument("output_dir", help="the run's folder")
    check = add("check", _check, "check", "read and tokenize everything, show what would be trained on, train nothing")
    check.add_argument("config", help="a YAML file")
    _add_set(check, "change one key of the file")
    add("schema", _schema, "", "print a JSON schema of configuration files, for completion in editors")
    init = add("init", _init, "", "write a commented configuration file for data files")
    init.add_argument("files", metavar="DATA", nargs="+", help="a data file; each becomes an adapter")
    init.add_argument("--output", default="run.yaml", metavar="CONFIG", help="the file to write (run.yaml)")
    init.add_argument("--base-model", default=_STARTER_MODEL, metavar="MODEL", help=f"({_STARTER_MODEL})")
    _add_merge_and_export(add)
    _add_generate(add)
    _add_comparisons(add)
    add("env", _env, "", "show versions and devices, for bug reports")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    engine: str,
    summary: str,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """A command that calls ``run``; the module of ``mlora.engine`` that it needs, "" for none, is imported before."""
    parser = commands.add_parser(name, help=summary, epilog=epilog)
    parser.set_defaults(run=run, engine=engine)
    return parser


def _add_set(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=what)


def _add_merge_and_export(add: Callable[..., argparse.ArgumentParser]) -> None:
    merge = add("merge", _merge, "merge", "add an adapter into its base model: a model folder for any loader")
    export = add("export", _export, "portable", "write an adapter in another form")
    for command in (merge, export):
        command.add_argument("adapter", metavar="ADAPTER", help="the adapter's folder, such as RUN/adapters/NAME")
        command.add_argument("output", metavar="FOLDER", help="a new folder")
    merge.add_argument("--base", metavar="MODEL", help="the base model, if not where the adapter says")
    merge.add_argument("--dtype", choices=_DTYPES, help="of the result (the base's own)")
    merge.add_argument(
        "--dequantised",
        action="store_true",
        help="merge into what the weights of its quantised base stand for, not into the original ones",
    )
    export.add_argument(
        "--portable", action="store_true", required=True, help="rsLoRA's scaling folded into lora_alpha"
    )


def _add_generate(add: Callable[..., argparse.ArgumentParser]) -> None:
    generate = add("generate", _generate, "generate", "let adapters, or their base model, answer prompts")
    _add_models(generate)
    asked = generate.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", action="append", metavar="TEXT", help="a user's turn; may stand several times")
    asked.add_argument("--file", metavar="FILE", help="a data file, whose answers are left out")
    generate.add_argument("--system", metavar="TEXT", help="the system's turn before --prompt")
    generate.add_argument(
        "--plain", action="store_true", help="go on with --prompt as it stands, without chat template"
    )
    _add_set(generate, "how to read FILE: dataset.format=…")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of each answer (128)")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) is greedy")
    generate.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest of this share (1)"
    )
    generate.add_argument("--seed", type=int, default=42, metavar="N", help="of the draws (42)")
    generate.add_argument("--batch-size", type=int, default=16, metavar="N", help="answers made at once (16)")


def _add_comparisons(add: Callable[..., argparse.ArgumentParser]) -> None:
    evaluate = add(
        "eval", _eval, "evaluate", "loss, perplexity and accuracy of adapters, or their base model, on a file"
    )
    _add_models(evaluate)
    evaluate.add_argument("--file", required=True, metavar="FILE", help="a data file")
    _add_set(evaluate, "how to read FILE: max_length=2048")
    compare = add("compare", _compare, "compare", "the adapters of several runs side by side")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    compare.add_argument("--picture", metavar="FILE", help="draw loss, rate and speed as PNG")
    report = add("report", _report, "report", "write a run's report: one page with curves, data and configuration")
    report.add_argument("run_dir", metavar="RUN", help="the run's folder")
    report.add_argument("--output", metavar="FILE", help="the page; its curves go beside it (RUN/report.html)")


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("places", nargs="*", metavar="ADAPTER", help="an adapter's folder, or a run's with all of them")
    parser.add_argument("--base", metavar="MODEL", help="the base model, if not the one that the adapters name")
    parser.add_argument("--with-base", action="store_true", help="the base model without an adapter, too")
    parser.add_argument("--dtype", default="auto", choices=("auto", *_DTYPES), help="of the base")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--json", action="store_true", help="a JSON object per line")
    parser.add_argument("--stages", type=int, metavar="S", help="cut the model into S stages of one process")
    parser.add_argument("--nproc", type=int, metavar="N", help=f"{_NPROC}, a stage in each")


def _made(kind: type[Made], arguments: argparse.Namespace) -> Made:
    """A dataclass whose fields are called as the arguments are."""
    return kind(**{field.name: getattr(arguments, field.name) for field in fields(kind)})  # type: ignore[arg-type]


class _Log(io.FileIO):
    """Standard output or error of a run: a full disk, a terminal or a reader that is gone costs lines, not the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EPIPE):
                raise
            return len(data)


def _log_what_is_taken() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Log(stream.fileno(), "w", closefd=False))
            log = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, log)


def _train(arguments: argparse.Namespace) -> int:
    _log_what_is_taken()
    from mlora.pipeline.transport.liveness import tell_launcher

    try:
        results = mlora.train(
            arguments.config,
            overrides=arguments.set,
            overwrite=arguments.overwrite,
            resume=arguments.resume,
            allow_changed=arguments.allow_changed,
        )
    except Interrupted as stopped:
        tell_launcher(str(stopped))
        raise
    if results.failed:
        tell_launcher(_failures(results))
        print(f"mlora: {_failures(results)}", file=sys.stderr)
        return _FAILED
    return _OK


def _failures(results: mlora.Results) -> str:
    """Which adapters failed, and why the first did: all that a host without rank 0 shows."""
    first = results.failed[0]
    return f"failed: {', '.join(results.failed)}; {first}: {results.adapters[first].reason}"


def _run_in_processes(nproc: int, argv: list[str]) -> int:
    """torch's own launcher, with this same command."""
    _load("torch.distributed.run")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if nproc < 1:
        raise UserError(f"--nproc {nproc}: give a positive number of processes")
    launcher = argparse.ArgumentParser(add_help=False)
    launcher.add_argument("--nproc")
    rest = launcher.parse_known_args(argv)[1]
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # else torchrun takes 1, with a banner
    try:
        torchrun(["--standalone", "--nproc-per-node", str(nproc), "-m", "mlora", *rest])
    except SignalException as ended:
        return 128 + ended.sigval
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        print(f"mlora: {_reason(rank, first)}", file=sys.stderr)
        own = [failure.exitcode for failure in error.failures.values() if 0 < failure.exitcode < 128]
        if own:
            return max(own)
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode  # ended by a signal, or as if by one
    return _OK


def _reason(rank: int, failure: ProcessFailure) -> str:
    """What a process said of its end, else what its exit code says; torch's words then point to a page of torch's."""
    if isinstance(failure.message, dict):
        return failure.message["message"]
    ended = failure.message if failure.exitcode < 0 else f"exit code {failure.exitcode}; its own words are above"
    return f"rank {rank} failed: {ended}"


def _plan(arguments: argparse.Namespace) -> int:
    from mlora.engine.plan import plan

    picture = Path(arguments.picture)
    if picture.suffix != ".svg":
        raise UserError(f"--picture {picture}: the picture is an SVG; give a name that ends in .svg")
    found = plan(mlora.load_config(arguments.config, arguments.set), arguments.stages)
    print(found.text())
    with writable(f"--picture {picture}"):
        found.write(picture)
    print(f"picture: {picture}; trace for Chrome or Perfetto: {picture.with_suffix('.trace.json')}")
    return _OK


def _status(arguments: argparse.Namespace) -> int:
    from mlora.engine.status import read_status, status_table

    tree = read_status(Path(arguments.run_dir))
    print(json.dumps(tree, indent=2) if arguments.json else status_table(tree))
    return _OK


def _add(arguments: argparse.Namespace) -> int:
    from mlora.engine.inbox import leave_adapters

    names = leave_adapters(Path(arguments.run_dir), Path(arguments.file))
    print(f"left for the run: {', '.join(names)}; see mlora status {arguments.run_dir}")
    return _OK


def _stop(arguments: argparse.Namespace) -> int:
    from mlora.engine.inbox import leave_stop

    leave_stop(Path(arguments.run_dir), arguments.name)
    print(f"{arguments.name} will end behind its current step; see mlora status {arguments.run_dir}")
    return _OK


def _verify(arguments: argparse.Namespace) -> int:
    from mlora.engine.verify import verify_run

    checks = verify_run(arguments.output_dir)
    for check in checks:
        verdict = "same logits" if check.ok else "LOGITS DIFFER"
        print(f"{check.name}: {verdict}, largest difference {check.max_difference:.2e} of {check.scale:.2e}")
    return _OK if all(check.ok for check in checks) else _FAILED


def _check(arguments: argparse.Namespace) -> int:
    from mlora.engine.check import check

    found = check(mlora.load_config(arguments.config, arguments.set))
    for name, text in found.adapters.items():
        print(f"\n{name}\n{text}")
    for error in found.errors:
        print(f"mlora: {error}", file=sys.stderr)
    return _USER if found.errors else _OK


def _schema(arguments: argparse.Namespace) -> int:
    from mlora.engine.schema import config_schema

    print(json.dumps(config_schema(), indent=2, default=str))
    return _OK


def _init(arguments: argparse.Namespace) -> int:
    from mlora.engine.starter import write_starter

    config = Path(arguments.output)
    names = write_starter([Path(file) for file in arguments.files], config, arguments.base_model)
    adapters = "1 adapter" if len(names) == 1 else f"{len(names)} adapters"
    print(f"{config}: {adapters}, {', '.join(names)}; look it over, then: mlora check {config}")
    return _OK


def _merge(arguments: argparse.Namespace) -> int:
    from mlora.engine.merge import merge

    adapter, output = Path(arguments.adapter), Path(arguments.output)
    merged = merge(adapter, output, arguments.base, arguments.dtype, arguments.dequantised)
    kinds = ("the original weights", "the dequantised weights")
    into = f" into {kinds[merged.dequantised]}" if merged.quantization else ""
    print(f"{merged.folder}: {merged.modules} modules merged{into}, written as {merged.dtype}")
    base = f"base ({merged.quantization}, as it was trained)" if merged.quantization else "base"
    print(
        f"logits of adapter on {base} and of the merged model differ by at most {merged.max_difference:.2e} of "
        f"{merged.scale:.2e}; the adapter moves them by up to {merged.changed:.2e}"
    )
    if merged.other_difference is not None:
        print(f"merged into {kinds[not merged.dequantised]} they would differ by {merged.other_difference:.2e}")
    return _OK


def _export(arguments: argparse.Namespace) -> int:
    from mlora.engine.portable import export_portable

    alpha = export_portable(Path(arguments.adapter), Path(arguments.output))
    if alpha is None:
        print(f"{arguments.output}: copied as it was; it is no rsLoRA, so every loader reads its scaling alike")
    else:
        print(f"{arguments.output}: use_rslora false, lora_alpha {alpha:g}; same weights, same scaling")
    return _OK


def _generate(arguments: argparse.Namespace) -> int:
    from mlora.engine.generate import Sampling, generate, read_prompts, text_prompt
    from mlora.engine.use import Models

    sampling = _made(Sampling, arguments)
    if arguments.file and (arguments.system is not None or arguments.plain):
        raise UserError("--system and --plain go with --prompt; in a file the rows say it")
    if arguments.prompt and arguments.set:
        raise UserError("--set: says how to read --file; leave it out with --prompt")

    def ask(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
        if arguments.file:
            return read_prompts(data_config(arguments.file, arguments.set), tokenizer)
        return [text_prompt(text, arguments.system, arguments.plain, tokenizer) for text in arguments.prompt]

    def show(answer: Answer) -> None:
        if arguments.json:
            print(json.dumps(asdict(answer), ensure_ascii=False), flush=True)
        else:
            end = "" if answer.ended else " (cut)"
            print(f"[{answer.prompt + 1}] {answer.adapter}{end}: {answer.text}", flush=True)

    generate(_made(Models, arguments), ask, sampling, arguments.batch_size, show)
    return _OK


def _eval(arguments: argparse.Namespace) -> int:
    from mlora.engine.evaluate import evaluate, evaluation_json, evaluation_table
    from mlora.engine.use import Models
    from mlora.engine.world import is_first_rank

    found = evaluate(_made(Models, arguments), data_config(arguments.file, arguments.set))
    if not is_first_rank():
        return _OK
    if arguments.json:
        for evaluation in found:
            print(evaluation_json(evaluation))
    else:
        print(evaluation_table(found))
    return _OK


def _compare(arguments: argparse.Namespace) -> int:
    from mlora.engine.compare import comparison_table, draw, read_curves

    curves = read_curves(arguments.runs)
    print(comparison_table(curves))
    if arguments.picture:
        with writable(f"--picture {arguments.picture}"):
            Path(arguments.picture).write_bytes(draw(curves))
        print(f"picture: {arguments.picture}")
    return _OK


def _report(arguments: argparse.Namespace) -> int:
    from mlora.engine.report import write_report

    print(write_report(Path(arguments.run_dir), Path(arguments.output) if arguments.output else None))
    return _OK


def _env(arguments: argparse.Namespace) -> int:
    import torch

    print(f"mlora {mlora.__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in (
        "torch",
        "transformers",
        "safetensors",
        "numpy",
        "triton",
        "peft",
        "bitsandbytes",
        "datasets",
        "pyarrow",
    ):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} not installed")
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    print(f"CUDA devices: {', '.join(devices) or 'none'}; CPU threads: {torch.get_num_threads()}")
    return _OK
