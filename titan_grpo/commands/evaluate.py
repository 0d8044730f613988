"""``titan-grpo evaluate``: run a job's [[evaluation]] tables on a checkpoint or a running
server."""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from titan_grpo.commands.doctor_servers import difference, tokens_here, tokens_there
from titan_grpo.commands.processes import print_progress, require_file
from titan_grpo.config import LAUNCH
from titan_grpo.config.rollout import PYTHONS, read_key, server_url
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.launch import Server
from titan_grpo.engines.server import detect, dialect
from titan_grpo.errors import ConfigError, PeerError
from titan_grpo.observe.output import write_whole
from titan_grpo.protocol.messages import Label, ServerState
from titan_grpo.rollout.evaluation import Job, evaluate, line, prepare


def _parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        prog="titan-grpo evaluate",
        description="Run the [[evaluation]] tables of a job on the weights of a Hugging Face"
        " directory (a server is started for it), or on a server that runs. Prints a line per"
        " table.",
        epilog="Every other argument is a job's, at least: --job.config_file X.toml.",
    )
    add = out.add_argument
    where = out.add_mutually_exclusive_group()
    where.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face directory, such as RUN/hf, or what titan-grpo export wrote (default:"
        " model.hf_assets_path); the server is started as the job's would be",
    )
    where.add_argument("--server", metavar="URL", help="a server that runs")
    add("--name", action="append", metavar="NAME", help="only this table (may be repeated)")
    add("--out", type=Path, metavar="FILE", help="write the figures as JSON, a list")
    return out


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Evaluate. Returns 0; without a result it raises (ConfigError for mistakes in the input)."""
    args, rest = _parser().parse_known_args(argv)
    from titan_grpo.titan import jobconfig

    config = jobconfig.parse(rest, calls_servers=False)
    known = [table.name for table in config.evaluation]
    names = args.name or known
    if not known:
        raise ConfigError(
            "the job must have an [[evaluation]] table for titan-grpo evaluate to run, it has none:"
            " add one to its TOML file (docs/evaluation.md)"
        )
    if set(names) - set(known):
        raise ConfigError(
            "the job must have the [[evaluation]] tables that are asked for, got"
            f" {', '.join(names)}; there are {', '.join(known)}"
        )
    server = args.server and server_url(args.server)
    out: Path | None = args.out
    if out is not None:
        require_file("--out", out)
    tables = [table for table in config.evaluation if table.name in names]
    from titan_grpo.titan.evaluations import evaluation_spec

    if args.model is not None and (args.model / "adapter_config.json").is_file():
        raise ConfigError(
            f"--model must be a whole model, got the adapter in {str(args.model)!r}: titan-grpo"
            " export --version V --out DIR, without --adapter, writes the base model with it"
        )
    key = read_key(env, config.rollout.api_key_env)
    model = str(args.model or config.model.hf_assets_path)
    config = replace(config, rollout=replace(config.rollout, servers=[server or LAUNCH]))
    spec = evaluation_spec(config, model)
    found = []
    # Before waiting for a server, so that mistakes in a task are reported at once.
    prepared = [prepare(Job.of(table, spec)) for table in tables]
    with _server(server, config, model, key) as state:
        for table, loaded in zip(tables, prepared, strict=True):
            result = asyncio.run(evaluate(Job.of(table, spec), state, loaded, key))
            print(line(result), flush=True)
            found.append(msgspec.to_builtins(result))
            # After each: a later one that fails would lose it.
            if out is not None:
                write_whole(out, json.dumps(found, indent=2) + "\n")
    return 0


@contextmanager
def _server(url: str | None, config: Any, model: str, key: str) -> Iterator[ServerState]:
    """Yield the running server, or start one. The version is 0 if the label is not a run's."""
    if url is None:
        with tempfile.TemporaryDirectory() as folder, _launched(config, model, key, folder) as own:
            yield own
        return
    with SyncDriver(url, key) as driver:
        engine = config.rollout.engine
        engine = detect(driver, 10.0) if engine == "auto" else engine
        text = driver.run(dialect(engine).label())
        _check_tokenizer(driver, url, model)
    label = Label.parse(text)
    if label is None and engine == "sglang":
        raise PeerError(
            f"{url} shows the label {text!r}, which no run set: its answers name no version that"
            " could be checked; start it with --weight-version run:0:0"
        )
    version = 0 if label is None else label.version
    yield ServerState(url, version, True, text if label else "", engine)


def _check_tokenizer(driver: SyncDriver, url: str, model: str) -> None:
    """Raise ConfigError if the server's tokenizer is not the job's: prompts are sent as ids."""
    here = tokens_here(model)
    with suppress(PeerError):  # a server need not have this route
        there = driver.run(tokens_there(10.0))
        if here is not None and (what := difference(here, there)):
            raise ConfigError(
                f"--server must have the tokenizer of model.hf_assets_path ({model!r}), {url} has"
                f" another: {what}; it would answer other prompts than the job's: name a server of"
                " that model, or its directory in model.hf_assets_path"
            )


@contextmanager
def _launched(config: Any, model: str, key: str, folder: str) -> Iterator[ServerState]:
    from titan_grpo.titan import compat
    from titan_grpo.titan.jobconfig import check_python
    from titan_grpo.titan.startup import launched

    spec = launched(config, model, compat.prepare(), None, (key, ""))[0]
    sglang = spec.engine == "sglang"
    if not spec.python:
        raise ConfigError(
            f"rollout.{PYTHONS[spec.engine]} must be the interpreter of the"
            " engine's environment, to start a server; or name one that runs: --server URL"
        )
    check_python(config.rollout, spec.engine)
    label = str(Label("evaluate", 0, "0")) if sglang else ""
    # It serves weights from a directory: no weight transfer, adapters, routes or run key.
    spec = replace(
        spec,
        log_path=f"{folder}/server.log",
        weight_transfer=False,
        lora_rank=0,
        routes=False,
        run_key=None,
        args=(*spec.args, "--weight-version", label) if sglang else spec.args,
    )
    with Server(spec) as server:
        print_progress(f"starting {spec.engine} for {model}")
        nbytes = sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
        server.wait_healthy(config.weight_sync.startup_s(nbytes))
        yield ServerState(server.url, 0, True, label, spec.engine)
