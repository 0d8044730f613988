"""Agents with the openai client against an engine that answers what a test says: which tokens are
trained on, and what an agent sees when something fails."""

import asyncio
import http.client
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.rollout.agents import HELLO, caller, client_of, says, send, taken, talker
from tests.rollout.conftest import GroupOf, answer, piece
from titan_grpo.errors import ConfigError
from titan_grpo.rollout.agents import Agents
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.sampler import GroupDropped, PromptTooLong
from titan_grpo.rollout.task_runner import TaskFailed
from titan_grpo.rollout.tasks.agent import AgentRows
from titan_grpo.titan.tiny import EOS, UNK

openai = pytest.importorskip("openai")

NOBODY = "http://127.0.0.1:9"
"""A URL at which nothing listens."""


def test_six_turns_of_an_unchanged_history_are_one_completion_of_the_engines_own_tokens(
    group_of: GroupOf, codec: TextCodec
) -> None:
    asked: list[list[int]] = []
    group = group_of(talker(6), [says(codec, "one", "two", log=asked)])
    (completion,) = group.completions
    whole = group.prompt.token_ids + completion.token_ids
    assert codec.spell(group.prompt.token_ids) == "<bos>user: hello\nassistant:"
    for before, after in pairwise(asked):
        assert after[: len(before)] == before
    assert list(whole[: len(asked[-1])]) == asked[-1]
    said = [t for t, s in zip(completion.token_ids, completion.sampled, strict=True) if s]
    assert said == [*codec.encode("one"), EOS, *codec.encode("two"), EOS] * 3
    context = "\nuser: and 0?\nassistant:"
    assert codec.spell(completion.token_ids[4:]).startswith(context)
    assert (completion.reward, completion.episode, completion.finish_reason) == (1.0, -1, "stop")


def test_tokens_that_their_text_would_not_give_again_are_kept(
    group_of: GroupOf, codec: TextCodec
) -> None:
    # The tokenizer makes no unknown token of the text of one: the history is not encoded again.
    odd = [*codec.encode("x"), UNK, UNK, EOS]
    asked: list[list[int]] = []

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body["prompt"])
        return answer(odd, [-1.0] * 4, "stop")

    group = group_of(talker(2), [behaviour])
    (completion,) = group.completions
    assert asked[1][: len(asked[0]) + 4] == asked[0] + odd
    assert list(completion.token_ids[:4]) == odd
    assert completion.num_sampled == 8


def test_a_changed_history_begins_a_second_completion_with_the_same_reward(
    group_of: GroupOf, codec: TextCodec
) -> None:
    answers = [{"role": "assistant", "content": said} for said in ("first", "second")]
    agent = caller(*({"messages": [HELLO, answer, HELLO]} for answer in answers), reward=0.5)
    asked: list[list[int]] = []
    group = group_of(agent, [says(codec, "one", "two", log=asked)])
    assert [c.episode for c in group.completions] == [0, 0]
    assert [c.reward for c in group.completions] == [0.5, 0.5]
    assert codec.spell(group.prompt.token_ids) == "<bos>user: hello\nassistant: "
    for completion, prompt, said in zip(group.completions, asked, ("one", "two"), strict=True):
        assert [*group.prompt.token_ids, *completion.token_ids][: len(prompt)] == prompt
        assert completion.num_sampled == len(said) + 1
        assert completion.sampled[: -len(said) - 1] == (False,) * (
            len(prompt) - len(group.prompt.token_ids)
        )


def test_calls_at_once_are_completions_of_their_own(group_of: GroupOf, codec: TextCodec) -> None:
    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = client_of(base_url, api_key)

        def ask(text: str) -> ChatCompletion:
            return client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": text}]
            )

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(ask, ("a", "b", "b")))
        return 1.0

    group = group_of(agent, [says(codec, "one")])
    assert [c.num_sampled for c in group.completions] == [4, 4, 4]
    assert {c.episode for c in group.completions} == {0}


def test_a_streamed_answer_is_the_same(group_of: GroupOf, codec: TextCodec) -> None:
    seen: list[Any] = []
    agent = caller({"stream": True, "stream_options": {"include_usage": True}}, seen=seen)
    group = group_of(agent, [says(codec, "one")])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in seen if chunk.choices)
    assert text == "one"
    assert seen[-2].choices[0].finish_reason == "stop"
    assert seen[-1].usage.completion_tokens == group.completions[0].num_sampled == 4


def test_an_agent_of_the_run_reaches_it_past_the_environments_proxy(
    group_of: GroupOf, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set first, to be restored: the run sets them too.
    for name, value in (("http_proxy", NOBODY), ("HTTP_PROXY", NOBODY), ("no_proxy", "a.b")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "a.b")
    group = group_of(talker(1), [says(codec, "one")])
    assert len(group.completions) == 1
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "a.b,127.0.0.1"


@pytest.fixture
def library_agent() -> Callable[[str, str], Any]:
    """A factory: an endpoint and its key -> an agent of Pydantic AI that asks it."""
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def make(base_url: str, api_key: str) -> Any:
        provider = OpenAIProvider(base_url=base_url, api_key=api_key)
        return pydantic_ai.Agent(OpenAIChatModel("any", provider=provider))

    return make


def test_an_agent_library_that_writes_the_json_of_a_call_in_its_own_way_goes_on(
    group_of: GroupOf, codec: TextCodec, library_agent: Callable[[str, str], Any]
) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        asking = library_agent(base_url, api_key)

        def add(a: int) -> int:
            return a + 1

        asking.tool_plain(add)
        assert (await asking.run("hello")).output == "three"
        return 1.0

    text = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    asked: list[list[int]] = []
    group = group_of(agent, [says(codec, text, text, "three", log=asked)])
    assert [completion.episode for completion in group.completions] == [-1]
    for before, after in pairwise(asked):
        assert codec.spell(after[len(before) :]) == f"{text}<eos>\ntool: 2\nassistant:"


def test_an_empty_answer_that_an_agent_library_leaves_out_begins_a_second_completion(
    group_of: GroupOf, codec: TextCodec, library_agent: Callable[[str, str], Any]
) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        asking = library_agent(base_url, api_key)
        assert (await asking.run("hello")).output == "two"
        return 1.0

    asked: list[list[int]] = []
    group = group_of(agent, [says(codec, "", "two", log=asked)])
    assert [completion.episode for completion in group.completions] == [0, 0]
    assert [completion.num_sampled for completion in group.completions] == [1, 4]
    texts = [codec.spell(prompt) for prompt in asked]
    assert texts[0] == "<bos>user: hello\nassistant:"
    # It asks again, in words of its own, and does not repeat the answer.
    assert texts[1].startswith("<bos>user: hello\nsystem: ")


def test_log_probabilities_and_a_limit_are_those_of_the_tokens(
    group_of: GroupOf, codec: TextCodec
) -> None:
    seen: list[Any] = []
    group = group_of(caller({"logprobs": True, "max_tokens": 2}, seen=seen), [says(codec, "one")])
    (choice,) = seen[0].choices
    assert (choice.message.content, choice.finish_reason) == ("on", "length")
    assert [(t.token, t.logprob) for t in choice.logprobs.content] == [("o", -1.0), ("n", -1.0)]
    assert seen[0].usage.prompt_tokens == len(group.prompt.token_ids)
    # The agent's own limit, not the run's.
    assert group.completions[0].finish_reason == "stop"


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_an_answer_at_the_runs_own_limit_is_cut_by_its_length(
    group_of: GroupOf, codec: TextCodec, reason: str
) -> None:
    said = answer(list(codec.encode("on")), [-1.0] * 2, reason)
    group = group_of(talker(1), [lambda _: said], max_completion_tokens=2)
    assert group.completions[0].finish_reason == "length"


def test_an_agent_does_not_see_that_a_server_died_in_its_second_turn(
    group_of: GroupOf, codec: TextCodec
) -> None:
    first = says(codec, "one")
    asked: list[list[int]] = []

    def dies(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body["prompt"])
        if len(asked) == 1:
            return first(body)
        return 200, iter([piece(list(codec.encode("tw")))])

    keys, again = list[str](), list[list[int]]()
    group = group_of(talker(2, keys), [dies, says(codec, "o", log=again)])
    (completion,) = group.completions
    assert len(keys) == 1
    # The pieces that had come are gone on from, not made again.
    assert again == [asked[1] + list(codec.encode("tw"))]
    assert codec.decode(completion.token_ids[-4:]) == "two"
    assert (completion.version_first, completion.version_last) == (3, 4)


def test_an_episode_whose_tokens_were_thrown_away_begins_again_with_another_key(
    group_of: GroupOf, codec: TextCodec
) -> None:
    keys, refusals = list[str](), []

    def noted(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        try:
            return talker(2, keys)(base_url, api_key, row)
        except openai.AuthenticationError as error:
            refusals.append(str(error))
            raise

    first, asked = says(codec, "one"), list[int]()

    def dies(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body["seed"])
        return first(body) if len(asked) == 1 else (500, {})

    group = group_of(noted, [dies, says(codec, "one")], keeps=False)
    assert len(set(keys)) == 2
    assert len(refusals) == 1
    assert "this one is over" in refusals[0]
    assert group.completions[0].num_sampled == 8


def test_an_unknown_episode_is_refused_as_openai_does(group_of: GroupOf, codec: TextCodec) -> None:
    refusals = []

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        stranger = client_of(base_url, "ep-unknown")
        for call in (
            lambda: stranger.chat.completions.create(model="any", messages=[HELLO]),
            stranger.models.list,
        ):
            with pytest.raises(openai.AuthenticationError) as error:
                call()
            refusals.append(error.value)
        assert [m.id for m in client_of(base_url, api_key).models.list()] == ["policy"]
        assert client_of(base_url, api_key).models.retrieve("any name").id == "policy"
        # Older clients do not encode the slash.
        address = base_url.removeprefix("http://").removesuffix("/v1")
        assert send(address, "GET", "/v1/models/owner/name", api_key)[1]["id"] == "policy"
        return talker(1)(base_url, api_key, row)

    group_of(agent, [says(codec, "one")])
    assert [(e.status_code, e.code) for e in refusals] == [(401, "invalid_api_key")] * 2


def test_what_an_agent_raises_is_shown_with_its_own_lines_alone(
    group_of: GroupOf, codec: TextCodec
) -> None:
    def broken(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        talker(1)(base_url, api_key, row)
        nothing: dict[str, float] = {}
        return nothing["missing"]

    with pytest.raises(TaskFailed, match="the task's agent failed: KeyError") as failed:
        group_of(broken, [says(codec, "one")])
    report = failed.value.report
    assert 'return nothing["missing"]' in report
    assert "titan_grpo/rollout" not in report


@pytest.mark.parametrize(
    ("outcome", "text"),
    [(None, "must return its reward"), ("1", "the text .1."), (float("nan"), "finite")],
)
def test_an_agent_must_return_a_reward(
    group_of: GroupOf, codec: TextCodec, outcome: Any, text: str
) -> None:
    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> Any:
        talker(1)(base_url, api_key, row)
        return outcome

    with pytest.raises(TaskFailed, match=text):
        group_of(agent, [says(codec, "one")])


def test_an_agent_that_makes_no_call_has_failed(group_of: GroupOf, codec: TextCodec) -> None:
    with pytest.raises(TaskFailed, match="must make a call"):
        group_of(lambda *_: 1.0, [says(codec, "one")])


def test_an_agent_that_takes_too_long_ends_the_group(group_of: GroupOf, codec: TextCodec) -> None:
    async def slow(base_url: str, api_key: str, row: dict[str, Any]) -> None:
        # no deadline: the episode's own is what is tested
        await asyncio.Event().wait()

    with pytest.raises(TaskFailed, match=r"TimeoutError.*task_timeout_s = 0.5"):
        group_of(slow, [says(codec, "one")], timeout_s=0.5)


def test_a_call_without_room_is_refused_and_an_agent_that_lets_that_out_gets_0(
    group_of: GroupOf, codec: TextCodec
) -> None:
    group = group_of(talker(9), [says(codec, "one")], max_completion_tokens=60)
    (completion,) = group.completions
    assert completion.reward == 0.0
    assert completion.num_sampled == 12
    assert len(completion.token_ids) <= 60
    assert completion.finish_reason == "length"


def test_an_agent_library_that_lets_a_call_without_room_out_as_its_own_error_gets_0(
    group_of: GroupOf, codec: TextCodec, library_agent: Callable[[str, str], Any]
) -> None:
    async def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        asking, said = library_agent(base_url, api_key), None
        for _ in range(9):
            said = (await asking.run("hello", message_history=said)).all_messages()
        return 1.0

    group = group_of(agent, [says(codec, "one")], max_completion_tokens=60)
    assert {completion.reward for completion in group.completions} == {0.0}


def test_an_episode_that_goes_on_after_a_call_without_room_is_whole(
    group_of: GroupOf, codec: TextCodec
) -> None:
    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        with pytest.raises(openai.BadRequestError):
            talker(9)(base_url, api_key, row)
        return talker(1)(base_url, api_key, row)

    group = group_of(agent, [says(codec, "one")], max_completion_tokens=60)
    assert [completion.finish_reason for completion in group.completions] == ["stop", "stop"]


def test_a_new_sequence_without_room_in_a_row_is_refused_and_the_episode_goes_on(
    group_of: GroupOf, codec: TextCodec
) -> None:
    refusals = []

    def agent(base_url: str, api_key: str, row: dict[str, Any]) -> float:
        client = client_of(base_url, api_key)
        said: Any = {"role": "user", "content": "hello " * 9}
        for messages in ([HELLO], [said], [HELLO, HELLO]):
            try:
                client.chat.completions.create(model="any", messages=messages)
            except openai.BadRequestError as error:
                refusals.append(error)
        return 1.0

    asked: list[list[int]] = []
    group = group_of(agent, [says(codec, "one" * 9, log=asked)], row_tokens=50)
    assert [error.code for error in refusals] == ["context_length_exceeded"]
    assert "training.seq_len = 50" in str(refusals[0])
    rows = [len(group.prompt.token_ids) + len(c.token_ids) for c in group.completions]
    assert (len(asked), max(rows)) == (2, 50)
    assert [completion.reward for completion in group.completions] == [1.0, 1.0]


def test_a_first_call_without_room_in_a_row_is_the_prompts_fault(
    group_of: GroupOf, codec: TextCodec
) -> None:
    with pytest.raises(PromptTooLong, match=r"shorter than training\.seq_len = 9"):
        group_of(talker(1), [says(codec, "one")], row_tokens=9)


def test_an_answer_is_cut_at_the_agents_own_stop_but_its_tokens_are_not(
    group_of: GroupOf, codec: TextCodec
) -> None:
    seen, bodies = list[Any](), []

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        bodies.append(body)
        return answer(list(codec.encode("onE")), [-1.0] * 3, "stop")

    group = group_of(caller({"stop": "E"}, seen=seen), [behaviour])
    assert (seen[0].choices[0].message.content, bodies[0]["stop"]) == ("on", ["E"])
    assert codec.decode(group.completions[0].token_ids) == "onE"


@pytest.mark.parametrize(("said", "end"), [("one<", ""), ("one", "<eos>")])
def test_a_character_of_the_end_token_is_no_part_of_it(
    group_of: GroupOf, codec: TextCodec, tmp_path: Path, said: str, end: str
) -> None:
    template = tmp_path / "ends.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>\n{% endfor %}")
    asked: list[list[int]] = []

    def behaviour(body: dict[str, Any]) -> tuple[int, Any]:
        asked.append(body["prompt"])
        ids = list(codec.encode(said + end))
        return answer(ids, [-1.0] * len(ids), "stop")

    group_of(talker(2), [behaviour], chat_template=str(template))
    assert asked[1] == [*asked[0], *codec.encode(f"{said}<eos>\nuser: and 0?<eos>\n")]


def test_prompts_with_nothing_in_common_drop_the_group(
    group_of: GroupOf, codec: TextCodec, tmp_path: Path
) -> None:
    template = tmp_path / "bare.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    roles = ("user", "system")
    agent = caller(*({"messages": [{"role": role, "content": "x"}]} for role in roles))
    with pytest.raises(GroupDropped, match="empty_prompt"):
        group_of(agent, [says(codec, "one")], chat_template=str(template))


def test_agents_elsewhere_take_episodes_and_post_their_rewards(
    group_of: GroupOf, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTS", "shared")
    seen, threads = [], []

    def look(agents: Agents) -> None:
        address = agents.url.removeprefix("http://")

        def outside() -> None:
            seen.append(send(address, "POST", "/episodes")[0])
            given = taken(address, "shared")
            key, path = given["id"], f"/episodes/{given['id']}/reward"
            seen.append(given["row"])
            talker(2)(f"{agents.url}/v1", key, {})
            seen.append(send(address, "POST", path, key, {"reward": "much"})[0])
            seen.append(send(address, "POST", path, "wrong", {"reward": 1})[0])
            seen.append(send(address, "POST", path, key, {"reward": 0.25})[0])

        threads.append(threading.Thread(target=outside))
        threads[0].start()

    group = group_of(None, [says(codec, "one")], look=look, agent="outside", agent_key_env="AGENTS")
    threads[0].join(60)
    assert seen == [401, {"index": 0, "seed": 0}, 400, 401, 200]
    assert group.completions[0].reward == 0.25


def test_only_who_names_an_episode_has_a_body_read(group_of: GroupOf, codec: TextCodec) -> None:
    """Before, the body of any client was read and unpacked, and only then its key."""
    statuses = []

    def agent(base_url: str, api_key: str, row: Any) -> float:
        address = base_url.removeprefix("http://").partition("/")[0]
        for key in (api_key, "wrong"):
            for path in ("/v1/chat/completions", f"/episodes/{key}/reward"):
                connection = http.client.HTTPConnection(address, timeout=60)
                headers = {"Authorization": f"Bearer {key}", "Content-Encoding": "gzip"}
                connection.request("POST", path, b"no gzip", headers)
                statuses.append(connection.getresponse().status)
        return talker(1)(base_url, api_key, row)

    group_of(agent, [says(codec, "one")])
    assert statuses == [400, 400, 401, 401]


def test_an_agent_elsewhere_that_posts_nothing_costs_its_group(
    group_of: GroupOf, codec: TextCodec
) -> None:
    def look(agents: Agents) -> None:
        threading.Thread(target=taken, args=(agents.url.removeprefix("http://"),)).start()

    with pytest.raises(TaskFailed, match=r"no reward came within rollout\.task_timeout_s = 0.5"):
        group_of(None, [says(codec, "one")], timeout_s=0.5, look=look, agent="outside")


def test_as_many_agents_elsewhere_are_served_at_once_as_take_an_episode(
    group_of: GroupOf, codec: TextCodec
) -> None:
    both = threading.Barrier(2, timeout=60)
    threads: list[threading.Thread] = []

    def look(agents: Agents) -> None:
        def outside() -> None:
            address = agents.url.removeprefix("http://")
            key = taken(address)["id"]
            both.wait()
            talker(1)(f"{agents.url}/v1", key, {})
            both.wait()
            send(address, "POST", f"/episodes/{key}/reward", key, {"reward": 1.0})

        threads.extend(threading.Thread(target=outside) for _ in range(2))
        for thread in threads:
            thread.start()

    sizes = {"group_size": 2, "task_concurrency": 1}
    group = group_of(None, [says(codec, "one")], look=look, agent="outside", **sizes)
    for thread in threads:
        thread.join(60)
    assert [completion.reward for completion in group.completions] == [1.0, 1.0]


def test_rows_that_are_no_json_are_refused_before_they_are_offered(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    rows = {"text": ["a", "b"], "at": [datetime(2026, 1, 1), datetime(2026, 1, 2)]}
    pytest.importorskip("datasets").Dataset.from_dict(rows).to_parquet(path)
    with pytest.raises(ConfigError, match=r"column 'at' of rollout\.dataset '.*' has datetime"):
        AgentRows.load(RolloutSpec(model_dir="", agent="outside", dataset=path))


def test_a_key_that_is_named_and_not_there_opens_no_endpoint(
    group_of: GroupOf, codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AGENT_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"rollout\.agent_key_env must .* AGENT_KEY is empty"):
        group_of(talker(1), [says(codec, "one")], agent_key_env="AGENT_KEY")
