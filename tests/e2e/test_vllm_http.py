"""What our middleware adds to a real vLLM: the two routes that Atropos's server classes ask for."""

from typing import Any

import pytest

from tests.conformance import commits
from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, furthest, refusal
from tests.conformance.reference import Reference
from titan_grpo.engines.http import Call, HttpRefused, SyncDriver, ignore

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOKENS = 6


def _answer(answer: Any) -> Any:
    return answer


def test_generate_and_health_generate_answer_with_the_weights_that_are_served(
    site, tmp_path
) -> None:
    vllm, ids = EngineUnderTest.of(site.server, tmp_path, site.access), prompt(3)
    with commits.sender(vllm) as trainer:
        reference = Reference(trainer.sync(1, 1))
    body = {"prompt": {"prompt_token_ids": ids}, "logprobs": 0, "n": 2, "max_tokens": TOKENS}
    body |= {"temperature": 1.0, "ignore_eos": True}
    generate = Call("POST", "/generate", REQUEST_S, _answer, json=body)
    answer = vllm.run(generate)
    assert answer["finish_reasons"] == ["length"] * 2
    for sampled in answer["logprobs"]:
        pairs = [(int(token), value) for [entry] in sampled for token, value in entry.items()]
        assert len(pairs) == TOKENS
        computed = reference.logprobs([*ids, *(token for token, _ in pairs)])[len(ids) - 1 :]
        assert furthest([value for _, value in pairs], computed) <= MAX_DIFFERENCE
    health = Call("GET", "/health_generate", REQUEST_S, ignore)
    vllm.run(health)
    with SyncDriver(site.server.url) as stranger:
        for call in (generate, health):
            refused = refusal(lambda call=call: stranger.run(call))
            assert isinstance(refused, HttpRefused)
            assert refused.status == 401
