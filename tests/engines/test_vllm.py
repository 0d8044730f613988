"""vLLM's interface as data: what is asked, what is read, what is refused."""

import ast
import base64
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from titan_grpo.engines import vllm
from titan_grpo.engines.generation import Sampled, Sampling, StreamedAnswer, salt
from titan_grpo.engines.http import public_url
from titan_grpo.errors import ServerRefused

ANSWER = {
    "choices": [
        {
            "index": 0,
            "text": "ab",
            "finish_reason": "length",
            "token_ids": [7, 8],
            "logprobs": {"token_logprobs": [-0.5, -1.5]},
        }
    ]
}


def defaults_of_completions(vllm_python: str) -> Iterator[str]:
    """What the installed vLLM takes from generation_config.json if a completion names it not."""
    (source,) = (
        Path(vllm_python)
        .parents[1]
        .glob("lib/python3*/site-packages/vllm/entrypoints/openai/completion/protocol.py")
    )
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.AnnAssign) and "_DEFAULT_SAMPLING_PARAMS" in ast.dump(node.target):
            assert node.value is not None
            yield from ast.literal_eval(node.value)


def test_a_generation_request_leaves_no_sampling_default_to_the_model_directory(
    vllm_python: str,
) -> None:
    body = vllm.generate([1, 2], Sampling(4, 0.7, 9, "run/@3"), 1.0).json
    named = {k: body.get(k) for k in defaults_of_completions(vllm_python)}
    assert named == {
        "temperature": 0.7,
        "top_k": -1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    assert (body["seed"], body["cache_salt"]) == (9, salt("run/@3"))


def test_a_stop_text_is_looked_for_among_special_tokens_too_as_sglang_does() -> None:
    assert (
        vllm.generate([1], Sampling(4, stop=("<end>",)), 1.0).json["skip_special_tokens"] is False
    )


def test_a_salt_has_only_characters_that_vllm_takes() -> None:
    made = salt("run/@3\\" * 100)
    assert len(made) == 32
    assert made.isalnum()
    assert made != salt("run/@4")


def test_an_answer_gives_tokens_and_their_log_probabilities() -> None:
    assert vllm.parse_sampled(ANSWER) == Sampled((7, 8), (-0.5, -1.5), "length")


def test_an_answer_may_tell_which_version_made_which_token() -> None:
    spans = [{"version": "r:7:f", "start": 0, "end": 1}, {"version": "r:8:f", "start": 1, "end": 2}]
    sampled = vllm.parse_sampled({"choices": [ANSWER["choices"][0] | {"weight_versions": spans}]})
    assert sampled.versions == (("r:7:f", 0, 1), ("r:8:f", 1, 2))
    assert vllm.generate([1], Sampling(4), 1.0).json["return_weight_versions"] is True


def npy(routes: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, routes)
    return base64.b64encode(file.getvalue()).decode()


def test_an_answer_may_tell_which_experts_computed_which_token() -> None:
    routes = np.arange(24, dtype=np.uint8).reshape(3, 4, 2)
    choice = ANSWER["choices"][0] | {"routed_experts": npy(routes)}
    found = vllm.parse_sampled({"choices": [choice]}).routes
    assert np.frombuffer(found, "<u2").tolist() == list(range(24))
    with pytest.raises(ServerRefused, match="routed_experts"):
        vllm.parse_sampled({"choices": [choice | {"routed_experts": "AAAA"}]})


def test_all_tokens_of_an_answer_are_of_the_adapter_that_it_names() -> None:
    assert vllm.parse_sampled({"model": "r:7:f", **ANSWER}).versions == (("r:7:f", 0, 2),)
    assert vllm.parse_sampled({"model": "/models/base", **ANSWER}).versions == ()
    streamed = StreamedAnswer(vllm.stream([1], Sampling(4), 1.0))
    for end in ("", "length"):
        choice = ANSWER["choices"][0] | {"finish_reason": end}
        event = json.dumps({"model": "r:7:f", "choices": [choice]})
        streamed.take(f"data: {event}\n\n".encode())
    assert streamed.sampled(4, "length").versions == (("r:7:f", 0, 4),)
    assert streamed.sampled(3, "abort").versions == (("r:7:f", 0, 3),)


def test_null_and_floored_log_probabilities_become_nan_and_minus_infinity() -> None:
    answer = {"choices": [ANSWER["choices"][0] | {"logprobs": {"token_logprobs": [None, -9999.0]}}]}
    first, second = vllm.parse_sampled(answer).logprobs
    assert math.isnan(first)
    assert second == -math.inf


@pytest.mark.parametrize(
    "answer", [None, {}, {"choices": []}, {"choices": [{"token_ids": [1]}]}, [], {"choices": "x"}]
)
def test_an_answer_of_another_form_is_refused(answer: object) -> None:
    with pytest.raises(ServerRefused, match="/v1/completions must"):
        vllm.parse_sampled(answer)


@pytest.mark.parametrize("ids", [["7"], [None], [1.5], [-1], [True], [1 << 40]])
def test_an_answer_with_what_is_no_token_id_is_refused(ids: list[object]) -> None:
    answer = {"choices": [ANSWER["choices"][0] | {"token_ids": ids}]}
    with pytest.raises(ServerRefused, match="/v1/completions must answer with token ids"):
        vllm.parse_sampled(answer)


def test_scores_are_of_all_tokens_but_the_first() -> None:
    call = vllm.score([5, 6, 7], 1.0)
    answer = {"choices": [{"logprobs": {"token_logprobs": [None, -1.0, -2.0, -3.0]}}]}
    assert call.parse(answer) == (-1.0, -2.0)
    assert "cache_salt" not in call.json
    assert vllm.score([5, 6, 7], 1.0, "x").json["cache_salt"] == salt("x")


def test_weight_info_reads_the_label() -> None:
    assert vllm.label().parse({"weight_version": "7"}) == "7"
    with pytest.raises(ServerRefused, match="weight_version"):
        vllm.label().parse({"detail": "Not Found"})


def test_messages_show_no_credentials() -> None:
    assert public_url("http://user:secret@host:8000/base/?key=1") == "http://host:8000/base"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def read_by_vllm(message: dict[str, Any]) -> tuple[str, list[Any]]:
    """As vLLM 0.32 answered a derender."""
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    answer = {"id": "a76a", "object": "chat.completion", "created": 1, "choices": [choice]}
    return vllm.parse_tool_calls("", [7, 8], "ab", TOOLS, 1.0).parse(answer)


def test_calls_of_tools_are_read_in_the_tokens_with_the_tools_of_the_request() -> None:
    call = vllm.parse_tool_calls("", (7, 8), "ab", TOOLS, 1.0)
    assert (call.method, call.path) == ("POST", "/v1/chat/completions/derender")
    assert call.json["generate_response"]["choices"] == [{"index": 0, "token_ids": [7, 8]}]
    assert call.json["chat_request"]["tools"] == TOOLS


def test_what_vllm_read_is_a_text_and_its_calls() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    made = [{"id": "9dc5", "type": "function", "function": function}]
    said = {"role": "assistant", "refusal": None, "reasoning": None}
    assert read_by_vllm({**said, "content": "So.", "tool_calls": made}) == (
        "So.",
        [("add", {"a": 1})],
    )
    assert read_by_vllm({**said, "content": None, "tool_calls": made})[0] == ""
    assert read_by_vllm({**said, "content": "<tool_call>{broken"}) == ("<tool_call>{broken", [])
    broken = [{"function": {"name": "add", "arguments": '{"a"'}}]
    assert read_by_vllm({**said, "content": "So.", "tool_calls": broken}) == ("So.", [])
    with pytest.raises(ServerRefused, match="derender must answer with 'name'"):
        read_by_vllm({**said, "content": "", "tool_calls": [{"function": {}}]})
