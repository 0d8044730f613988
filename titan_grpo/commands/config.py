"""``titan-grpo config``: every key of titan_grpo's TOML sections, with type, default and meaning,
as Markdown."""

import argparse
import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from titan_grpo import config
from titan_grpo.config import older
from titan_grpo.observe import names

HEADER = """# Configuration

The keys that titan_grpo adds to a torchtitan TOML file. A job names them with
`[job] custom_config_module = "titan_grpo.config"` (the default of `titan_grpo.train`). The command
line overrides the file: `--grpo.async-weight-update`, `--weight_sync.slots 3`,
`--rollout.servers http://a:8000,http://b:8000` (lists have commas). `no-` switches a boolean off:
`--grpo.no-async-weight-update`; tables are for the file only. A wrong type, an unknown key or an
impossible combination ends the start with one line and exit code 2 (torchrun itself then exits
with 1). Keys that end in `_s` are in seconds, at most 500000.

This page is what `titan-grpo config` prints.
"""


SECTIONS: dict[str, Any] = {
    f.name: f.type for f in fields(config.JobConfig) if is_dataclass(f.type)
} | {"[evaluation]": config.Evaluation}


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a section, as written in the source."""

    name: str
    type: str
    default: str
    meaning: str


def keys(section: type) -> Iterator[Key]:
    """Yield the keys of a section in source order, inherited ones last, with the docstring that
    follows each."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    instance = section()
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(doc, ast.Expr):
            continue
        name, kind = ast.unparse(field.target), ast.unparse(field.annotation)
        meaning = " ".join(str(ast.literal_eval(doc.value)).split())
        yield Key(name, kind.removeprefix("Literal"), repr(getattr(instance, name)), meaning)
    for base in section.__bases__:
        if is_dataclass(base):
            yield from keys(base)


def page() -> str:
    """Return the page of all sections. Keys that a section inherits as an earlier one does have
    their rows there."""
    out, shown = [HEADER], set[Key]()
    for name, section in SECTIONS.items():
        out.append(f"## [{name}]\n\n{inspect.getdoc(section)}\n")
        out.append("| key | type | default | meaning |\n|---|---|---|---|")
        for key in keys(section):
            if key in shown:
                continue
            shown.add(key)
            cells = (f"`{key.name}`", f"`{key.type}`", f"`{key.default}`", key.meaning)
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        out.append("")
    return "\n".join(out).rstrip() + "\n"


METRICS = """# Metrics

Every name in the lines of `metrics.jsonl`, which also have `step` and `time_s` (seconds on a clock
that starts anywhere), and so in TensorBoard and W&B, with its unit. Names with `_s` are seconds;
what the main thread lost (`time/`) and work done elsewhere (`sync/`) never share a name. A run has
those that its configuration computes. The keys of `summary.json` are in
`titan_grpo/observe/schema.py`.

## Where to look at them

* `titan-grpo watch RUN` and `titan-grpo report RUN` read the run's files.
* TensorBoard and W&B: torchtitan's `metrics.enable_tensorboard` and `metrics.enable_wandb`. Both
  also get the completions of `rollout.sample_every`, as a table named `completions` (TensorBoard:
  among the texts). If one of them fails, the run warns and goes on.
* Prometheus: `dashboards.metrics_address = "host:port"`; rank 0 answers `GET /metrics` with the
  last step's line and the last values of each evaluation. A rollout service (`titan-grpo rollouts`)
  answers at its own address, with its own key, with what its rollouts counted. `reward/mean` is
  `titan_grpo_reward_mean`, `server/HOST:PORT/lag` is `titan_grpo_server_lag{server="HOST:PORT"}`;
  totals are counters, and end in `_total` (as does `titan_grpo_loss_total`, a gauge).
  `docker/grafana.json` is a dashboard of them, for Grafana's import.
* OpenTelemetry: with `OTEL_EXPORTER_OTLP_ENDPOINT` set, rank 0 also exports the trace's spans
  over HTTP. What belongs to one version, or to one step, is one trace. Spans that are missing there
  are among the run's errors, with the reason.

Prometheus and OpenTelemetry need `pip install 'titan_grpo[dashboards]'`.

## How they are counted

* **Tokens** are the sampled tokens of the sequences in the batch: once in each optimizer step that
  has them (`grpo.num_epochs` times), with the policy as it is before that optimizer step, also if
  the step is skipped. Means are over all of them, or over those that are *in the loss*: the ones
  that `loss/kept_fraction` counts. A share in `ratio/` or `importance/` counts tokens that are in
  the loss, and is divided by the number of all tokens.
* A completion that is in the batch with `zero_advantage` (Atropos: `set_advantage_to_zero`) is
  among them, and has no weight in the loss. Only `rollout/trained_tokens` and
  `rollout/trained_sequences` leave it out.
* **Losses** (`loss/total`, its terms, `loss/ptx`) are of all ranks together, and means over the
  optimizer steps, skipped ones included.
* **Totals** count from the start of the run, and go on in a resumed one, where steps that are made
  again count again: the names under `sync/` without `_s`, `dropped/`,
  `health/skipped_optimizer_steps`, and `rollout/` with `requests`, `outages`, `interrupted_groups`,
  `moved_groups` and `skipped_prompts`. A line has those of `rollout/` and of dropped groups as they
  were when the step took its groups, `summary.json` all of them at the run's end.
* **Durations** under `sync/` are means over what ended since the step before; a step without any
  has no value.
* **Rates** are over the time since the step before took its groups, in a process's first step since
  its rollouts started, with the start of the servers in it.
* Of several ranks, times of the main thread are rank 0's, and `sync/` has the copy of its shard and
  the hash of its host's part of a version.
* A value that is NaN or infinite, as the loss of a skipped step, is null in `metrics.jsonl` and
  missing elsewhere. An alert on it holds.

TensorBoard and W&B have torchtitan's own values too ([torchtitan.md](torchtitan.md)).
`loss_metrics/global_avg_loss` is `loss/total`, `grad_norm` is `optim/grad_norm`.

## Names

This page is what `titan-grpo config --metrics` prints.

| name | meaning |
|---|---|
"""


DROPS = """
## Reasons of drops

Each is a counter `dropped/REASON` of groups. `dropped/completion_REASON` counts the completions
that a batch left out, for a reason below or one of its own.

| reason | meaning |
|---|---|
"""


def metrics_page() -> str:
    """Return the page of all metrics."""
    meanings = names.MEANING | {
        **{
            f"{names.GAP}/{by}/MOST": f"the gap's mean over {of}; MOST is a number, or more"
            for by, of in names.GAP_OF.items()
        },
        **{f"{names.SERVER}/HOST:PORT/{what}": text for what, text in names.OF_SERVER.items()},
        **{f"{names.EVALUATION}/NAME/{what}": text for what, text in names.OF_EVALUATION.items()},
        f"{names.EVALUATION}/NAME/pass_at_K": "pass@K, with _low and _high like the reward",
        f"{names.DROPPED}/REASON": "groups dropped for that reason; the reasons are below",
    }
    return METRICS + _rows(meanings) + DROPS + _rows(names.REASONS)


def _rows(meanings: Mapping[str, str]) -> str:
    return "".join(f"| `{name}` | {meaning} |\n" for name, meaning in meanings.items())


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """Print the page."""
    parser = argparse.ArgumentParser(
        prog="titan-grpo config",
        description="Print every key of titan_grpo's TOML sections, with type, default and meaning,"
        " as Markdown.",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add("--older", action="store_true", help="print the keys of the older trainer in place of it")
    add("--metrics", action="store_true", help="print every metric in place of it")
    asked = parser.parse_args(argv)
    print(older.page() if asked.older else metrics_page() if asked.metrics else page(), end="")
    return 0
