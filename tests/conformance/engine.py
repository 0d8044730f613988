"""What every engine must do before weights come into it: generation, scores, pauses, labels, spans,
aborts, keys."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from tests.conformance.crowd import CROWD, FROZEN_S, REQUEST_S, Crowd, prompt
from tests.conformance.reference import Reference
from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import Sampled, Sampling, ToolCalls
from titan_grpo.engines.http import Call, HttpRefused, ServerAccess, SyncDriver
from titan_grpo.engines.launch import Server
from titan_grpo.engines.server import (
    AUTO,
    Dialect,
    ServerControl,
    detect,
    dialect,
    make_control,
)
from titan_grpo.errors import ServerRefused
from titan_grpo.patches.versions import numbers
from titan_grpo.runkey import Key
from titan_grpo.titan.tiny import Kind, write_tiny_model

T = TypeVar("T")

LENGTH = 220
"""The most tokens of a request that ends by itself."""

MAX_DIFFERENCE = 0.05
"""Largest difference of a log-probability between an engine in bf16 and transformers in fp32, in
nats."""


def remake(seed: int, folder: Path, kind: Kind = "qwen3") -> Path:
    """A tiny model whose weights are so large that two seeds differ by whole units of
    log-probability, and small enough for bf16."""
    return write_tiny_model(kind, folder, seed, std=0.05, dtype="bfloat16")


@dataclass(frozen=True)
class EngineUnderTest:
    """One running server, as its tests started it. Checks leave it generating, and with other
    weights and another label.

    It serves a model of transformers with at least 100 tokens and random weights;
    ``remake(seed, folder)`` writes the same model with other weights to a directory and returns
    that. ``folder``: for what checks write. ``restart``: ends the server and starts it again at its
    URL with the weights of ``model``; None: not to be tried. ``make``: how its control plane is
    reached.
    """

    server: Server
    folder: Path
    remake: Callable[[int, Path], Path] = remake
    restart: Callable[[], None] | None = None
    make: Callable[[str, ServerAccess], ServerControl] = make_control

    @property
    def engine(self) -> str:
        return self.server.spec.engine

    @property
    def access(self) -> ServerAccess:
        spec = self.server.spec
        return ServerAccess(self.server.url, 60.0, None, spec.api_key, spec.admin_key)

    @property
    def model(self) -> Path:
        """Directory of the weights that it was started with."""
        return Path(self.server.spec.model)

    @property
    def run_key(self) -> Key | None:
        """Without which it takes no weights."""
        return self.server.spec.run_key

    @property
    def says_versions(self) -> bool:
        """Whether its answers tell which weights made which token: SGLang's, vLLM's from 0.33."""
        if self.engine == sglang.NAME:
            return True
        version = self.run(Call("GET", "/version", REQUEST_S, lambda answer: answer["version"]))
        return numbers(str(version)) >= (0, 33)

    @property
    def follows_seeds(self) -> bool:
        """Whether the same request gets the same tokens again."""
        return self.engine == vllm.NAME

    @property
    def speak(self) -> Dialect:
        return dialect(self.engine)

    @contextmanager
    def driver(self) -> Iterator[SyncDriver]:
        """A connection with both keys."""
        with self.access.driver() as driver:
            yield driver

    @contextmanager
    def control(self) -> Iterator[ServerControl]:
        """A control plane that has asked the server what it is: its next call is one request."""
        control = self.make(AUTO, self.access)
        try:
            control.label()
            yield control
        finally:
            control.close()

    def require_alive(self) -> None:
        """Have the server's front answer, which it does paused too."""
        self.run(sglang.alive(REQUEST_S) if self.engine == sglang.NAME else vllm.health(REQUEST_S))

    def run(self, call: Call[T]) -> T:
        """One call with both keys."""
        with self.driver() as driver:
            return driver.run(call)

    @contextmanager
    def crowd(self, label: str = "crowd") -> Iterator[Crowd]:
        """Requests that generate until the check ends them; on the way out those that it left."""
        with ThreadPoolExecutor(CROWD + 1) as pool:
            crowd = Crowd(self.access, self.speak, label, pool)
            try:
                crowd.wait_begun()
                yield crowd
            finally:
                crowd.abort()


@contextmanager
def paused(control: ServerControl) -> Iterator[None]:
    """The server between pause and resume."""
    control.pause()
    try:
        yield
    finally:
        control.resume()


def furthest(values: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference; infinite for unequal lengths or a value that is none."""
    if len(values) != len(others) or not all(map(math.isfinite, values)):
        return math.inf
    return max((abs(a - b) for a, b in zip(values, others, strict=True)), default=0.0)


def assert_sound(
    e: EngineUnderTest, sampled: Sampled, labels: Sequence[str], most: int = LENGTH
) -> None:
    """A whole answer: as many values as tokens, and each token made under one of ``labels``, in
    their order."""
    assert 1 <= len(sampled.token_ids) <= most, sampled
    assert sampled.finish_reason in ("stop", "length"), sampled
    _assert_consistent(e, sampled, labels)


def assert_aborted(e: EngineUnderTest, answers: Sequence[Sampled], labels: Sequence[str]) -> None:
    """What ``Crowd.end`` returns: each was at work until then, and has what it made, as a whole
    answer has it."""
    for sampled in answers:
        assert sampled.finish_reason == "abort", sampled
        _assert_consistent(e, sampled, labels)
    assert all(sampled.token_ids for sampled in answers[:CROWD]), answers


def _assert_consistent(e: EngineUnderTest, sampled: Sampled, labels: Sequence[str]) -> None:
    assert len(sampled.logprobs) == len(sampled.token_ids), sampled
    assert all(-math.inf < value <= 0.0 for value in sampled.logprobs), sampled
    spans = sampled.versions
    assert bool(spans) == (e.says_versions and bool(sampled.token_ids)), spans
    if spans:
        bounds = [0, *(end for _, _, end in spans)]
        assert [start for _, start, _ in spans] == bounds[:-1], spans
        assert bounds[-1] == len(sampled.token_ids), spans
        seen = [label for label, _, _ in spans]
        assert seen == [label for label in labels if label in seen], (spans, labels)


def a_server_says_what_it_is(e: EngineUnderTest) -> None:
    """Alive, healthy, recognised, with a label."""
    e.require_alive()
    e.run(e.speak.health())
    assert e.run(e.speak.label())
    with e.driver() as driver:
        assert detect(driver, REQUEST_S) == e.engine


def sampled_tokens_come_with_their_log_probabilities(e: EngineUnderTest) -> None:
    """Under the distribution that they were drawn from, also at another temperature; a short answer
    is no other one."""
    reference, label = Reference(e.model), e.run(e.speak.label())
    for temperature, most in ((1.0, 16), (0.5, 16), (2.0, 1)):
        ids = prompt(int(temperature * 10))
        sampled = e.run(e.speak.generate(ids, Sampling(most, temperature, 3, "t"), REQUEST_S))
        assert_sound(e, sampled, [label], most)
        computed = reference.logprobs([*ids, *sampled.token_ids], temperature)[len(ids) - 1 :]
        assert furthest(sampled.logprobs, computed) <= MAX_DIFFERENCE, (
            temperature,
            sampled,
            computed,
        )


def the_token_that_ends_an_answer_is_part_of_it(e: EngineUnderTest) -> None:
    """The trainer learns when to stop: so it needs that token, and its log-probability."""
    reference = Reference(e.model)
    with ThreadPoolExecutor(CROWD) as pool:
        calls = [
            e.speak.generate(prompt(seed), Sampling(LENGTH, 1.0, 17 + seed), REQUEST_S)
            for seed in range(CROWD)
        ]
        answers = list(pool.map(e.run, calls))
    stopped = [
        (seed, sampled) for seed, sampled in enumerate(answers) if sampled.finish_reason == "stop"
    ]
    assert stopped, "not one of the long requests ended by itself: the model must have an end token"
    for seed, sampled in stopped:
        assert sampled.token_ids[-1] in reference.end_ids, sampled
        computed = reference.logprobs([*prompt(seed), *sampled.token_ids])[len(prompt(seed)) - 1 :]
        assert furthest(sampled.logprobs, computed) <= MAX_DIFFERENCE, sampled


def given_sequences_are_scored(e: EngineUnderTest) -> None:
    """Whether the prefix cache has seen them or not."""
    reference, ids = Reference(e.model), prompt(5, 40)
    for salt in ("s", "s", ""):
        scores = e.run(e.speak.score(ids, REQUEST_S, salt))
        assert furthest(scores, reference.logprobs(ids)) <= MAX_DIFFERENCE, scores


def a_pause_holds_running_and_new_requests_and_loses_none(e: EngineUnderTest) -> None:
    """And the server stays alive, says that it is paused, and tells its label. An abort after it
    answers each request, whole or in pieces, with what it has."""
    label = e.run(e.speak.label())
    with e.control() as control, ThreadPoolExecutor(1) as pool:
        assert not control.paused()
        with e.crowd() as crowd:
            with paused(control):
                assert control.paused()
                late = pool.submit(
                    e.run, e.speak.generate(prompt(9), Sampling(4, 1.0, 9), REQUEST_S)
                )
                crowd.wait_still()
                assert not wait([late], FROZEN_S).done, "a request ended on a paused server"
                e.require_alive()
                assert e.run(e.speak.label()) == label
                control.pause()
                assert control.paused(), "a second pause changes nothing"
            assert_sound(e, late.result(REQUEST_S), [label])
            assert_aborted(e, crowd.end(), [label])
        assert not control.paused()
    # what a failed health check in a pause leaves behind would show here
    e.run(e.speak.health())


def a_label_in_a_pause_marks_the_tokens_after_it(e: EngineUnderTest) -> None:
    """Read back at once; requests that ran over it have tokens of both, where the engine says
    so."""
    before = e.run(e.speak.label())
    with e.control() as control, e.crowd() as crowd:
        with paused(control):
            control.relabel("conformance")
            assert control.label() == "conformance"
        answers = crowd.end()
    assert_aborted(e, answers, [before, "conformance"])
    assert not e.says_versions or any(len(sampled.versions) == 2 for sampled in answers), answers


def a_request_that_can_not_be_is_refused_and_not_the_servers_fault(e: EngineUnderTest) -> None:
    """A prompt that is too long: 400, which costs a prompt and not a server."""
    refused = refusal(lambda: e.run(e.speak.generate(prompt(1) * 1000, Sampling(4), REQUEST_S)))
    assert isinstance(refused, HttpRefused), refused
    assert refused.status == 400, refused


def each_call_needs_its_key(e: EngineUnderTest) -> None:
    """No request generates without one; where control has a key of its own, neither replaces the
    other."""
    access, generate = e.access, e.speak.generate(prompt(1), Sampling(2), REQUEST_S)
    assert access.api_key, "start the server with an API key"
    with SyncDriver(access.url) as stranger:
        _assert_denied(lambda: stranger.run(generate))
    with SyncDriver(access.url, access.admin_key or "another") as other:
        _assert_denied(lambda: other.run(generate))
    if access.admin_key:
        for keys in (("", ""), (access.api_key, "")):
            control = make_control(
                e.engine, ServerAccess(access.url, access.deadline_s, None, *keys)
            )
            _assert_denied(control.pause)
            control.close()
        with e.control() as control:
            assert not control.paused()


def a_server_without_an_open_update_takes_no_label_from_the_end_of_one(e: EngineUnderTest) -> None:
    """It is what a server looks like that was restarted in the middle of a commit."""
    before = e.run(e.speak.label())
    with e.control() as control:
        assert isinstance(refusal(lambda: control.finish("of-another-life")), ServerRefused)
        assert control.label() == before


def calls_of_tools_in_tokens_are_read_by_the_servers_own_parser(e: EngineUnderTest) -> None:
    """The server was started with its parser of Hermes' format."""
    tokenizer = Tokenizer.from_file(str(e.model / "tokenizer.json"))
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]

    def read(text: str) -> tuple[str, ToolCalls]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return e.run(e.speak.parse_tool_calls(name, ids, text, tools, REQUEST_S))

    with e.control() as control:
        control.check_tool_parser()
        asked = e.speak.tool_parser(REQUEST_S)
        name = "" if asked is None else e.run(asked)
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        with paused(control):
            content, calls = read(f"So.\n{call}")
            assert (content.strip(), calls) == ("So.", [("add", {"a": 1})])
            assert read("no call") == ("no call", [])
            assert read("So.<tool_call>{broken</tool_call>")[1] == []


def refusal(act: Callable[[], Any]) -> ServerRefused:
    """What ``act`` is refused with, which it must be."""
    try:
        answer = act()
    except ServerRefused as refusal:
        return refusal
    raise AssertionError(f"it must be refused, and was answered with {answer!r}")


def _assert_denied(act: Callable[[], Any]) -> None:
    refused = refusal(act)
    assert isinstance(refused, HttpRefused), refused
    assert refused.status in (401, 403), refused


CHECKS: tuple[Callable[[EngineUnderTest], None], ...] = (
    a_server_says_what_it_is,
    sampled_tokens_come_with_their_log_probabilities,
    the_token_that_ends_an_answer_is_part_of_it,
    given_sequences_are_scored,
    a_pause_holds_running_and_new_requests_and_loses_none,
    a_label_in_a_pause_marks_the_tokens_after_it,
    a_request_that_can_not_be_is_refused_and_not_the_servers_fault,
    each_call_needs_its_key,
    a_server_without_an_open_update_takes_no_label_from_the_end_of_one,
    calls_of_tools_in_tokens_are_read_by_the_servers_own_parser,
)
"""In this order: those that need the first weights come first."""
