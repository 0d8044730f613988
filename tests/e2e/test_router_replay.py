"""grpo.router_replay with a real SGLang: the gap of the same tokens on its routes and on ours, and
the run of the quickstart."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.common import keys
from tests.e2e.conftest import Replay, Runs
from tests.rigs.server_handle import ServerProcess
from tests.rigs.tiny_model import loaded
from titan_grpo.algorithm.distribution import token_logprobs
from titan_grpo.engines import sglang
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.launch import Server, ServerSpec
from titan_grpo.observe import names
from titan_grpo.observe.recorder import read_metrics
from titan_grpo.rollout.records import GroupRecorder
from titan_grpo.samples import Completion, Group, Prompt, whole_routes
from titan_grpo.titan import flavors, tiny
from titan_grpo.titan.modules import RouterReplay

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

TOKENS, COMPLETIONS, SEED, STD = 96, 8, 3, 0.1
GOAL = 0.02
"""Nats: the mean gap of tokens of the same weights, as docs/measurements.md has it."""


def torchtitans() -> torch.nn.Module:
    """The served model with its weights in float32, as bfloat16 rounded them."""
    weights = tiny.tiny_weights("qwen3_moe", SEED, STD, torch.bfloat16)
    whole = {name: value.float() for name, value in weights.items()}
    return loaded("qwen3_moe", whole)


@pytest.mark.long
def test_on_the_engines_routes_the_gap_is_arithmetic(sglang_python: str, tmp_path: Path) -> None:
    tiny.write_tiny_model("qwen3_moe", tmp_path / "model", SEED, std=STD)
    log = str(tmp_path / "server.log")
    spec = ServerSpec(sglang_python, str(tmp_path / "model"), log, "sglang", routes=True)
    prompts = [(5 + n, 17, 40, 90 - n) for n in range(COMPLETIONS)]
    with Server(spec) as server, SyncDriver(server.url) as driver:
        server.wait_healthy(250.0)
        ask = Sampling(TOKENS, ignore_eos=True, routes=True)
        answers = [driver.run(sglang.generate(prompt, ask, 60.0)) for prompt in prompts]
    model, replay = torchtitans(), RouterReplay()
    replay.install(model)
    gaps: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    differ = tokens = 0.0
    for prompt, sampled in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *sampled.token_ids])
        assert whole_routes(sampled.routes, len(ids), 4), "2 layers, 2 experts of a token"
        routes = torch.frombuffer(bytearray(sampled.routes), dtype=torch.int16).view(1, -1, 4)
        for on_engines, given in ((True, routes), (False, None)):
            with replay.using(given, torch.device("cpu")), torch.no_grad():
                logits = model(ids[None, :-1])
                if counted := replay.take_metrics():
                    differ += counted["routes_differ_sum"].item()
                    tokens += counted["replayed_sum"].item()
            found = token_logprobs(logits, ids[None, 1:], 1.0, 0)[0, len(prompt) - 1 :]
            gaps[on_engines].append((found - torch.tensor(sampled.logprobs)).abs())
    with_replay, without = (torch.cat(gaps[which]) for which in (True, False))
    print(
        f"{len(without)} tokens: gap mean {with_replay.mean():.4f} max {with_replay.max():.4f}"
        f" with replay, {without.mean():.4f} and {without.max():.4f} without;"
        f" {differ / tokens:.1%} of tokens routed otherwise"
    )
    assert with_replay.mean() <= GOAL
    assert differ > 0
    assert without.max() > 2 * with_replay.max()


@pytest.mark.long
def test_expert_parallel_ranks_train_on_recorded_routes_and_leave_out_what_has_none(
    runs: Runs, tmp_path: Path
) -> None:
    out, model = tmp_path / "run", tmp_path / "model"
    tiny.write_tiny_model("qwen3_moe", model, SEED)
    record = GroupRecorder(str(tmp_path / "groups.jsonl"), 0)
    for version in range(2):
        record.write(version, [group_of(version, index) for index in range(4)])
    record.close()
    name, flavor = flavors.FLAVORS["qwen3_moe"]
    settings = {
        "model.name": name,
        "model.flavor": flavor,
        "training.steps": 2,
        "parallelism.expert_parallel_degree": 2,
    }
    words = [*Replay(tmp_path / "groups.jsonl", 4, 2, 16).arguments, *keys(settings)]
    words += ["--grpo.router_replay", "--grpo.fp32_lm_head", "--grpo.no-single_rank_load"]
    with ServerProcess() as server:
        summary = replace(runs, model=model).complete(out, [server.url], *words, nproc=2)
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["rollout/trained_sequences"] for row in rows] == [6, 6]
    # Random routes: hardly any token has its own experts in both layers.
    assert min(row[names.ROUTES_DIFFER] for row in rows) > 0.9
    dropped = summary["dropped"]
    assert (dropped["completion_no_routes"], dropped["completion_group_of_defective"]) == (2, 2)


def group_of(version: int, index: int) -> Group:
    """Two completions on random routes; the last group of a version has one without."""
    source = torch.Generator().manual_seed(10 * version + index)
    prompt = Prompt(4 * version + index, (5, 6, 7 + index))

    def completion(number: int) -> Completion:
        ids = tuple(torch.randint(4, 100, (8 + number,), generator=source).tolist())
        pairs = [torch.randperm(8, generator=source)[:2] for _ in range(2 * (len(ids) + 2))]
        routes = torch.cat(pairs).to(torch.int16).numpy().tobytes()
        without = index == 3 and number == 1
        return Completion(
            ids,
            (-4.85,) * len(ids),
            "length",
            version,
            version,
            "",
            float(number),
            routes=b"" if without else routes,
        )

    return Group(prompt, (completion(0), completion(1)))


@pytest.mark.long
def test_the_quickstart_trains_an_moe_on_the_routes_that_it_sampled_on(
    root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = ["scripts/quickstart.sh", "--engine", "sglang", "--model", "qwen3_moe"]
    words += ["--router-replay", "--steps", "6", "--out", str(out)]
    said = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=380, check=False)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]
    summary = json.loads((out / "summary.json").read_text())
    rows = read_metrics(out / "metrics.jsonl")
    shares = [row[names.ROUTES_DIFFER] for row in rows]
    print(f"{summary['logprob_gap_on_policy']} dropped {summary['dropped']}; shares {shares}")
    assert len(rows) == 6
    assert summary["logprob_gap_on_policy"]["mean"] <= GOAL
    assert "no_routes" not in summary["dropped"]
