"""What our middleware adds to a real vLLM: the two routes that Atropos asks for."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.conformance import commits
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, furthest, refusal
from tests.conformance.reference import Reference
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver, ignore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

COUNT, TOKENS = 2, 6
ENVIRONMENT_S = 120.0


def test_atroposs_own_server_class_samples_and_scores_by_the_weights_that_are_served(
    site, atropos_python, root: Path, tmp_path: Path
) -> None:
    vllm, ids = EngineUnderTest.of(site.server, tmp_path, site.access), prompt(3)
    with commits.sender(vllm) as trainer:
        reference = Reference(trainer.sync(1, 1))
    asked = [site.url, vllm.model, site.access.api_key, COUNT, TOKENS, *ids]
    done = subprocess.run(
        [atropos_python, root / "tests/rigs/atropos_server.py", *map(str, asked)],
        capture_output=True,
        text=True,
        timeout=ENVIRONMENT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["healthy"]
    prompt_tokens, sampled, logprobs, reasons = answer["sampled"]
    assert (prompt_tokens, reasons) == (ids, ["length"] * COUNT)
    for tokens, values in zip(sampled, logprobs, strict=True):
        assert len(tokens) == TOKENS
        computed = reference.logprobs([*ids, *tokens])[len(ids) - 1 :]
        assert furthest(values, computed) <= MAX_DIFFERENCE
    known = zip(
        answer["scored"]["prompt_topk_token_ids"],
        answer["scored"]["prompt_topk_logprobs"],
        strict=True,
    )
    scored = [dict(zip(*entry, strict=True)) for entry in known][1:]
    values = [entry[token] for entry, token in zip(scored, ids[1:], strict=True)]
    assert furthest(values, reference.logprobs(ids)) <= MAX_DIFFERENCE


def test_both_routes_ask_for_the_servers_key(site, tmp_path: Path) -> None:
    vllm = EngineUnderTest.of(site.server, tmp_path, site.access)
    body = {"prompt": {"prompt_token_ids": prompt(3)}, "max_tokens": 1}
    health = Call("GET", "/health_generate", REQUEST_S, ignore)
    generate = Call("POST", "/generate", REQUEST_S, ignore, json=body)
    with SyncDriver(site.server.url) as stranger:
        for call in (generate, health):
            vllm.run(call)
            refused = refusal(lambda call=call: stranger.run(call))
            assert isinstance(refused, HttpRefused)
            assert refused.status == 401
