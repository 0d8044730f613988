"""The doctor's findings about servers and rollout services: requests with deadlines that change
nothing, and pure judgements of the answers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from titan_grpo.commands.doctor_host import ENGINES, Finding, ok, problem, warning
from titan_grpo.config.task import ENGINE
from titan_grpo.engines import sglang, sglang_stock, vllm
from titan_grpo.engines.generation import NO_ROUTES
from titan_grpo.engines.http import (
    Call,
    HttpRefused,
    KeyRefused,
    ServerAccess,
    SyncDriver,
    ignore,
    want,
)
from titan_grpo.engines.server import detect, make_control
from titan_grpo.errors import ConfigError, PeerError
from titan_grpo.protocol.messages import PROBE, Joined
from titan_grpo.rollout.messages import FORMAT
from titan_grpo.runkey import Key
from titan_grpo.sync.transports.channel import resolve_bind_host

T = TypeVar("T")

CLOCK_SKEW_S = 5.0
"""Clock difference worth a warning: Date has whole seconds, and a round trip takes time."""

DESCRIPTION_S = 60.0
"""Deadline of vLLM's /server_info, which collects a description of the whole system."""

TEXT = "Add 12 and 3.14: was\tist\n\n  <b>größer</b>? 东京, 🙂 </s><|im_end|><eos>"
"""Text on which tokenizers differ: digits, white space, scripts, special tokens of some models."""


def named(url: str, text: str) -> str:
    """Return an error's text with the server's URL before it, once. Pure."""
    return text if text.startswith(url) else f"{url}: {text}"


def controller(url: str, key: str, timeout_s: float, ours: str = FORMAT) -> Finding:
    """Check a rollout service. ``ours``: message format of this end."""

    def parse(answer: Any) -> tuple[str, str]:
        return str(want(answer, "format", str, "/status")), str(want(answer, "run", str, "/status"))

    try:
        with SyncDriver(url, key) as driver:
            call = Call("GET", "/status", timeout_s, parse, key_from="rollout.controller_key_env")
            form, run = driver.run(call)
    except PeerError as error:
        remedy = (
            "start it there: titan-grpo rollouts --bind HOST:PORT, with the key that"
            " rollout.controller_key_env names"
        )
        return problem("controller", named(url, str(error)), remedy)
    if form != ours:
        remedy = "install the same one at both ends"
        return problem("controller", f"{url} runs another titan_grpo", remedy)
    state = f"serves run {run}, which a new one replaces" if run else "is free"
    return ok("controller", f"{url} {state}")


@dataclass(frozen=True, slots=True)
class Options:
    """Options that a job needs or a server has. ``lora_rank``: largest rank of adapters as
    versions, 0: none. ``routes``: the experts of each token are returned. ``context``: most tokens
    of a prompt and its completion, 0: unknown."""

    lora_rank: int = 0
    routes: bool = False
    context: int = 0

    @classmethod
    def of_server(cls, engine: str, answer: Any) -> "Options":
        """Read /server_info. Never show it: SGLang's contains its keys. Pure."""
        found = answer if isinstance(answer, dict) else {}
        if engine == sglang.NAME:
            return cls(0, found.get("enable_return_routed_experts") is True)
        config = found.get("vllm_config")
        config = config if isinstance(config, dict) else {}
        lora, extra = config.get("lora_config") or {}, config.get("aux_output_config") or {}
        model, routes = config.get("model_config") or {}, extra.get("enable_return_routed_experts")
        rank, context = lora.get("max_lora_rank", 0), model.get("max_model_len", 0)
        return cls(int(rank), routes is True, int(context))


@dataclass(frozen=True, slots=True)
class Needs:
    """A job's needs of its servers."""

    options: Options = Options()
    tokens: Sequence[int] | None = None
    """Ids of TEXT by the trainer's tokenizer; None: unknown."""
    tool_calls: bool = False
    """Whether servers must parse tool calls in what they sample."""
    streamed: bool = False
    """weight_sync.apply = "streamed" without NCCL, which an SGLang without our plugin takes too."""


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach servers. ``timeout_s`` is per request; a key may be empty."""

    timeout_s: float
    bind_host: str = ""
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    run_key: Key | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    """See Hello."""


@dataclass
class ServerFacts:
    """Answers of a server. An unanswered question is None, with its reason in ``errors``."""

    url: str
    healthy: bool = True
    version: str | None = None
    label: str | None = None
    paused: bool | None = None
    backend: str | None = None
    joined: Joined | None = None
    """The receiver's answer to a probe, which only a server with our backend gets."""
    errors: dict[str, str] = field(default_factory=dict)
    our_key: bool = False
    """Whether this end has a run key, which the probe proves."""
    engine: str = vllm.NAME
    middleware: bool | None = None
    """Whether a vLLM server has our middleware; None: unknown."""
    clock_ahead_s: float = 0.0
    """Seconds by which the server's clock is ahead of this host's."""
    options: Options | None = None
    tokens: list[int] | None = None
    """Ids of TEXT by the server's tokenizer."""


def server(facts: ServerFacts, needs: Needs | None = None) -> list[Finding]:
    """Check one server: reachable, new enough, RL routes open, not paused, our plugin answers. Stop
    after a finding that would explain the next ones."""
    where, errors, of = facts.url, facts.errors, ENGINES[facts.engine]
    if "key" in errors:
        return [problem("server", errors["key"], "set rollout.api_key_env")]
    if not facts.healthy:
        remedy = (
            "start it, or correct rollout.servers; from another host it must listen on more than"
            " 127.0.0.1 (--host 0.0.0.0)"
        )
        return [problem("server", errors.get("health", f"{where} is not healthy"), remedy)]
    if facts.version and of.too_old(facts.version):
        text = f"{where}: {of.title} {facts.version} is older than {of.oldest}"
        return [problem("server", text, f"install {of.package}: {of.why}")]
    if facts.version is None and facts.label is None:
        # Every vLLM tells its version, also one whose routes for weights are closed.
        reason = errors.get("version", "it tells no version").removeprefix(f"{where}: ")
        text = f"{where} answers, and neither as vLLM nor as SGLang: {reason}"
        return [problem("server", text, "correct rollout.servers: an engine must run there")]
    software = f", {of.title} {facts.version}" if facts.version else ""
    out = [ok("server", f"{where} answers{software}")]
    if abs(facts.clock_ahead_s) >= CLOCK_SKEW_S:
        side = "ahead of" if facts.clock_ahead_s > 0 else "behind"
        out.append(
            warning(
                "clocks",
                f"{where}: its clock is {abs(facts.clock_ahead_s):.0f} s {side} this host's, so the"
                " ages of runs and the times of both logs do not fit",
                "synchronise the clocks of both hosts (NTP)",
            )
        )
    if facts.label is None:
        text = named(where, errors.get("label", "no RL routes"))
        return [*out, problem("server routes", text, of.routes)]
    out.append(ok("server routes", f"{where} serves version {facts.label!r}"))
    if facts.paused:
        remedy = (
            f"curl -X POST {where}/{of.resume}, unless a trainer is at work on it; the next run's"
            " first sync resumes it too"
        )
        out.append(warning("server", f"{where} is paused, so requests to it wait", remedy))
    if facts.middleware is False:
        out.append(
            warning(
                "middleware",
                f"{where} lacks ours: it has no /generate and no /health_generate, requests of"
                " others without a cache_salt may meet prefixes of older weights, and lora.sync ="
                ' "adapter" does not work',
                f"start it with --middleware {vllm.MIDDLEWARE}",
            )
        )
    out.append(_plugin(facts, needs is not None and needs.streamed))
    if needs and facts.options:
        out += _options(where, facts.engine, needs.options, facts.options)
    if needs and needs.tool_calls:
        out.append(_tool_calls(facts))
    if needs and needs.tokens is not None and facts.tokens is not None:
        out.append(_tokenizer(where, needs.tokens, facts.tokens))
    return out


def _plugin(facts: ServerFacts, streamed: bool) -> Finding:
    subject, url, joined = "server plugin", facts.url, facts.joined
    if facts.backend != vllm.BACKEND:
        error = facts.errors.get("backend", "unknown")
        if facts.engine == sglang.NAME:
            text = f"{url}: our plugin does not answer ({error})"
            if streamed and (unfit := facts.errors.get("stock", "")):
                return problem(subject, named(url, unfit), sglang.NO_PLUGIN)
            if streamed:
                text += ", so it stands still for each transfer, and checks no digest"
                return warning(subject, text, sglang.NO_PLUGIN)
            return problem(subject, text, sglang.NO_PLUGIN)
        text = f"{url}: weight-transfer backend is {facts.backend or error}"
        return problem(subject, text, vllm.NO_PLUGIN)
    if joined is None:
        return problem(
            subject,
            f"{url}: the receiver did not call back ({facts.errors.get('joined', 'unknown')})",
            "open the way from the server to this host (firewall, container network), or set"
            " weight_sync.bind_host",
        )
    if not joined.ok:
        return problem(
            subject,
            f"{url}: the receiver would refuse a trainer from here: {joined.error}",
            "correct what it says; it is a property of the server and its environment, or of the"
            " run key here",
        )
    if not joined.intact:
        return problem(
            subject,
            f"{url} holds half-loaded weights: a load broke off and no whole one followed, so what"
            " it generates is noise",
            "start a run (its first sync loads every tensor), or restart the server",
        )
    own = "its own weights"
    held = f"version {joined.held_version} of run {joined.held_run}" if joined.held_run else own
    text = f"{url}: receiver {joined.package} called back, holding {held}"
    if joined.quantization:
        text += f", quantised ({joined.quantization})"
    if not joined.keyed:
        return ok(subject, f"{text}; it demands no run key")
    if facts.our_key:
        return ok(subject, f"{text}; it has proven that it has our run key")
    return warning(
        subject,
        f"{text}; it demands a run key, and there is none here",
        "set TITAN_GRPO_RUN_KEY_FILE, TITAN_GRPO_RUN_KEY or weight_sync.run_key_file to the key it"
        " was started with",
    )


def _options(url: str, engine: str, needed: Options, found: Options) -> Iterator[Finding]:
    rank = needed.lora_rank
    enough = f"--enable-lora --max-lora-rank {vllm.allowed_rank(rank)}"
    if rank and engine != vllm.NAME:
        remedy = 'set lora.sync = "merged", or serve with vLLM'
        yield problem("options", f"{url}: {engine} takes no adapters as versions", remedy)
    elif rank and not found.lora_rank:
        text = f'{url} was started without --enable-lora, and lora.sync is "adapter"'
        yield problem("options", text, f"start it with {enough}")
    elif rank > found.lora_rank:
        text = f"{url} takes adapters of rank {found.lora_rank} at most, lora.rank is {rank}"
        yield problem("options", text, f"start it with {enough}")
    elif found.lora_rank and not rank:
        remedy = 'start it without --enable-lora, or set lora.sync = "adapter"'
        yield problem("options", f"{url} takes adapters, and the job sends whole weights", remedy)
    elif rank:
        yield ok("options", f"{url} takes adapters up to rank {found.lora_rank}")
    if needed.routes and not found.routes:
        text = f"{url} sends no routes, and grpo.router_replay needs those of every completion"
        yield problem("options", text, NO_ROUTES)
    elif needed.routes:
        yield ok("options", f"{url} sends the experts of each token")
    if needed.context > found.context > 0:
        yield warning(
            "options",
            f"{url} ends a completion with its prompt at {found.context} tokens, where"
            f" training.seq_len takes {needed.context}: long ones would count as truncated",
            f"start it with --max-model-len {needed.context}, or more",
        )


def _tool_calls(facts: ServerFacts) -> Finding:
    if error := facts.errors.get("tool_calls", ""):
        remedy = f"do what it says, or set rollout.tool_parser to another than {ENGINE!r}"
        return problem("options", error, remedy)
    return ok("options", f"{facts.url} reads calls of tools")


def _tokenizer(url: str, here: Sequence[int], there: Sequence[int]) -> Finding:
    """Compare the ids of TEXT from the trainer's and a server's tokenizer."""
    what = difference(here, there)
    if not what:
        return ok("tokenizer", f"{url} has the trainer's")
    return warning(
        "tokenizer",
        f"{url} has another tokenizer than model.hf_assets_path: {what}. Completions would end at"
        " other tokens, and stop texts and what users read would be wrong",
        "start the server with the model directory that the trainer has (or --tokenizer with it)",
    )


def difference(here: Sequence[int], there: Sequence[int]) -> str:
    """Return where two tokenizers' ids of TEXT differ; empty if they are the same. Pure."""
    if list(here) == list(there):
        return ""
    place = next((n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), -1)
    if place < 0:
        return f"{len(here)} tokens here, {len(there)} there"
    return f"token {place} of a sample text is {here[place]} here and {there[place]} there"


def tokens_there(timeout_s: float) -> Call[list[int]]:
    """Ask a server for TEXT's ids by its tokenizer (``POST /tokenize`` of both engines)."""

    def parse(answer: Any) -> list[int]:
        return [int(each) for each in want(answer, "tokens", list, "/tokenize")]

    body = {"prompt": TEXT, "add_special_tokens": False}
    return Call("POST", "/tokenize", timeout_s, parse, json=body)


def tokens_here(model_dir: str) -> list[int] | None:
    """Return TEXT's ids by the directory's tokenizer.json, no special tokens added; None without
    it. Raises ConfigError if it is damaged."""
    if not (Path(model_dir) / "tokenizer.json").is_file():
        return None
    # Imported here: it needs packages that the doctor must be able to report as missing.
    from titan_grpo.rollout.codec import TextCodec

    return list(TextCodec(model_dir).encode(TEXT))


def clock_ahead_s(driver: SyncDriver, timeout_s: float) -> float:
    """Return by how many seconds a server's clock is ahead of this host's, from the Date of any
    answer; 0 if unknown."""
    before = time.time()
    try:
        text = driver.header(Call("GET", "/version", timeout_s, ignore), "Date")
    except PeerError:
        return 0.0
    try:
        # Date is truncated to seconds: the clock was between it and one second later.
        date = parsedate_to_datetime(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return max(0.0, date - time.time()) - max(0.0, before - (date + 1))


def server_facts(url: str, access: Access, needs: Needs | None = None) -> ServerFacts:
    """Ask one server all questions, those of a job's ``needs`` too. Unanswered ones are in
    ``errors``; no exceptions."""
    facts = ServerFacts(url, our_key=access.run_key is not None)
    with SyncDriver(url, access.api_key, access.admin_key) as driver:
        try:
            facts.engine = detect(driver, access.timeout_s)
            if facts.engine == vllm.NAME:
                driver.run(vllm.models(access.timeout_s))
        except KeyRefused as error:
            facts.errors["key"] = str(error)
            return facts
        except PeerError:
            pass  # of_vllm's questions then find out whether it runs and its routes are open
        questions = _Questions(driver, access, facts)
        if facts.engine == sglang.NAME:
            questions.of_sglang()
        else:
            questions.of_vllm()
        if needs and facts.label is not None:
            if needs.tokens is not None:
                facts.tokens = questions.tokens()
            if needs.tool_calls:
                questions.tool_calls()
        facts.clock_ahead_s = clock_ahead_s(driver, access.timeout_s)
    return facts


class _Questions:
    """Questions to one server of either engine. Answers go into ``facts``."""

    def __init__(self, driver: SyncDriver, access: Access, facts: ServerFacts) -> None:
        self._driver, self._access, self._facts = driver, access, facts
        self._s = access.timeout_s

    def of_vllm(self) -> None:
        """Ask a vLLM server, or one of an unknown kind."""
        facts, described = self._facts, vllm.transfer_backend(max(DESCRIPTION_S, self._s))

        def version(answer: Any) -> str:
            return str(want(answer, "version", str, "/version"))

        def description(answer: Any) -> str:
            facts.options = Options.of_server(vllm.NAME, answer)
            return described.parse(answer)

        self._answer("health", vllm.health(self._s))
        if "health" in facts.errors:
            facts.healthy = False
            return
        facts.version = self._answer("version", Call("GET", "/version", self._s, version))
        facts.label = self._answer("label", vllm.label(self._s))
        facts.paused = self._answer("paused", vllm.is_paused(self._s))
        if facts.label is None:
            return
        facts.backend = self._answer("backend", replace(described, parse=description))
        if facts.backend == vllm.BACKEND:
            # Greet only our own backend: an exception in a worker kills the whole vLLM.
            facts.joined = self._greet(vllm.init_weight_transfer)
        # 405: the middleware serves this path (POST only). 404: it is missing. Others: unknown.
        try:
            self._driver.run(Call("GET", "/generate", self._s, lambda _: None))
        except HttpRefused as error:
            facts.middleware = {404: False, 405: True}.get(error.status)
        except PeerError:
            pass

    def of_sglang(self) -> None:
        """Ask an SGLang server. Never call its /health: on a paused server it may hang, and marks
        it as unhealthy."""
        facts = self._facts

        def version(answer: Any) -> str:
            facts.options = Options.of_server(sglang.NAME, answer)
            return str(want(answer, "version", str, "/server_info", secret=True))

        facts.version = self._answer("version", Call("GET", "/server_info", self._s, version))
        facts.label = self._answer("label", sglang.label(self._s))
        paused = self._answer("backend", sglang.paused(self._s))
        if paused is not None:
            facts.paused, facts.backend = paused, vllm.BACKEND
            facts.joined = self._greet(sglang.hello)
        else:
            self._answer("stock", sglang_stock.world_size(self._s))

    def tokens(self) -> list[int] | None:
        """Return the ids of TEXT by the server's tokenizer."""
        return self._answer("tokens", tokens_there(self._s))

    def tool_calls(self) -> None:
        """Check that the server parses tool calls."""
        a, url = self._access, self._facts.url
        with closing(
            make_control(
                self._facts.engine, ServerAccess(url, self._s, None, a.api_key, a.admin_key)
            )
        ) as control:
            self._ask("tool_calls", control.check_tool_parser)

    def _ask(self, question: str, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except (PeerError, ConfigError) as error:
            self._facts.errors[question] = str(error)
            return None

    def _answer(self, question: str, call: Call[T]) -> T | None:
        return self._ask(question, lambda: self._driver.run(call))

    def _greet(self, greeting: Callable[[Mapping[str, Any], float], Call[None]]) -> Joined | None:
        """Probe the server's receiver and wait for its answer on a store of ours: the route of a
        real lane (HTTP to the server, TCP back). Changes nothing there."""
        # Imported here: it loads torch, and the doctor must be able to report that torch is
        # missing.
        from titan_grpo.sync.probe import ask_receiver

        def call_back() -> Joined:
            a = self._access
            host = resolve_bind_host(a.bind_host, self._facts.url)
            return ask_receiver(
                lambda hello: self._driver.run(greeting(hello, self._s)),
                *(host, self._s, a.run_key),
                transport=PROBE,
                model=dict(a.model),
            )

        return self._ask("joined", call_back)
