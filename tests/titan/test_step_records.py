"""What a step leaves: its figures, completions with their log-probabilities, and loggers that may
fail (torchtitan's own TensorBoard, and a disk that is full: the kernel's /dev/full)."""

import math
import time
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest
import torch

from titan_grpo.algorithm.rows import Layout, Row, build, compact
from titan_grpo.commands import watch
from titan_grpo.observe import names
from titan_grpo.observe.alerts import Threshold
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.schema import Estimate, Evaluated
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.sync.server_set import NoObserver
from titan_grpo.titan import compat
from titan_grpo.titan.evaluations import Evaluations
from titan_grpo.titan.step_records import (
    Dispensable,
    FirstBatch,
    lacks_wandb,
    log_table,
    loss_values,
    make_dispensable,
    rollout_values,
    sequences,
    server_values,
    shown,
)
from titan_grpo.views.page import tokenizers_of
from titan_grpo.views.run import read_run

compat.prepare()

from tensorboard.backend.event_processing.event_accumulator import (  # noqa: E402
    EventAccumulator,
)
from torchtitan.components.metrics import (  # noqa: E402
    BaseLogger,
    LoggerContainer,
    TensorBoardLogger,
)

from titan_grpo.titan.rank0 import Controller  # noqa: E402

A, B = "http://a:8000", "http://b:8000"


def test_rates_and_queues_are_those_between_two_readings() -> None:
    before = {"tokens": 100, f"tokens.{A}": 100, "commits": 1, "in_flight_at_commits": 8}
    now = {"tokens": 700, f"tokens.{A}": 400, f"tokens.{B}": 300, "ready": 5, "thrown_tokens": 9}
    now |= {f"in_flight.{A}": 16, f"in_flight.{B}": 0, "commits": 3, "in_flight_at_commits": 38}
    assert rollout_values(before, now, 3.0) == {
        names.THROWN_TOKENS: 9.0,
        names.READY_GROUPS: 5.0,
        names.GENERATED: 200.0,
        names.IN_FLIGHT: 16.0,
        names.IN_FLIGHT_AT_COMMIT: 15.0,
        "server/a:8000/in_flight": 16.0,
        "server/a:8000/tokens_per_s": 100.0,
        "server/b:8000/in_flight": 0.0,
        "server/b:8000/tokens_per_s": 100.0,
    }


def test_a_server_that_left_and_came_back_between_two_readings_has_no_negative_rate() -> None:
    now = {f"in_flight.{A}": 0, f"tokens.{A}": 30}
    values = rollout_values({f"tokens.{A}": 900}, now, 3.0)
    assert values["server/a:8000/tokens_per_s"] == 10.0


def test_recorded_rollouts_have_no_rates() -> None:
    assert rollout_values({}, {"consumed_groups": 4}, 1.0) == {names.THROWN_TOKENS: 0.0}
    assert rollout_values({}, {"tokens": 600}, 3.0, 4)[names.GENERATED_PER_GPU] == 50.0


def test_each_server_has_its_version_and_its_lag() -> None:
    assert server_values(7, {A: 5, B: 8, "http://c:1": None}) == {
        names.VERSION: 7.0,
        names.LAG: 1.0,
        names.LAG_MAX: 2.0,
        "server/a:8000/version": 5.0,
        "server/a:8000/lag": 2.0,
        "server/b:8000/version": 8.0,
        "server/b:8000/lag": 0.0,
    }


def test_what_the_loss_sums_up_reaches_the_step_under_the_names_of_the_table() -> None:
    found = {"clipped_low": 0.1, "clipped_high": 0.2, "on_policy_count": 0.0}
    values = loss_values(found | {"minus_logprob_max": 7.0, "logprob_max": -0.5})
    assert values[names.CLIP_FRACTION] == pytest.approx(0.3)
    assert (values[names.LOGPROB_MIN], values[names.LOGPROB_MAX]) == (-7.0, -0.5)
    for given in ({}, {"better_count": 0, "worse_count": 2}, {"better_count": 4, "worse_count": 0}):
        sums = {"better_logprob": -2.0, "worse_logprob": -3.0} if given else {}
        assert names.LOGPROB_SEPARATION not in loss_values(found | given | sums), "of one sign"
    parted = {"better_count": 4, "better_logprob": -2.0, "worse_count": 2, "worse_logprob": -3.0}
    assert loss_values(found | parted)[names.LOGPROB_SEPARATION] == pytest.approx(1.0)
    assert all(names.meaning(name) for name in values)


def test_means_over_the_tokens_in_the_loss_are_left_out_of_a_step_without_any() -> None:
    found = {"clipped_low": 0.0, "clipped_high": 0.0, "on_policy_count": 0.0}
    means = {names.RATIO_MEAN: 0.6, names.IMPORTANCE_MEAN: 0.3}
    values = loss_values(found | {"kept": 0.5, "ratio": 0.3, "importance": 0.15})
    assert {name: values[name] for name in means} == means
    none = loss_values(found | {"kept": 0.0, "ratio": 0.0, "importance": 0.0})
    assert not means.keys() & none.keys()


def completion(
    tokens: tuple[int, ...], sampled: tuple[bool, ...] = (), reward: float = 0.0
) -> Completion:
    return Completion(tokens, (-1.0,) * len(tokens), "stop", 3, 3, "http://a:1", reward, sampled)


def first_batch(completions: list[Completion], pack: bool) -> FirstBatch:
    prompt = Prompt(0, (5, 6))
    rows = [Row(0, prompt, each, 1.0, 1.0) for each in completions]
    (batch,) = build(compact([rows], Layout(64, 32, 0, 8, pack)))
    # a log-probability that says which token it is of
    logprobs = -batch["labels"].float() / 100
    return FirstBatch(batch["inputs"], batch["labels"], batch["sequence"], logprobs)


@pytest.mark.parametrize("pack", [False, True])
def test_each_sequence_has_the_log_probabilities_of_its_own_tokens(pack: bool) -> None:
    batch = first_batch([completion((7, 8, 9)), completion((10,)), completion((7, 8))], pack)
    assert sequences(batch) == {
        (5, 6, 7, 8, 9): [None, None, -0.07, -0.08, -0.09],
        (5, 6, 10): [None, None, -0.1],
        (5, 6, 7, 8): [None, None, -0.07, -0.08],
    }


def test_a_tools_answer_has_no_log_probability() -> None:
    batch = first_batch([completion((7, 8, 9), (True, False, True))], pack=False)
    assert sequences(batch) == {(5, 6, 7, 8, 9): [None, None, -0.07, None, -0.09]}


def test_a_sequence_whose_last_token_the_batch_does_not_have_is_left_out() -> None:
    batch = first_batch([completion((7, 8), (True, False)), completion((9,))], pack=False)
    assert list(sequences(batch)) == [(5, 6, 9)]


def test_a_log_probability_that_is_no_number_is_none() -> None:
    batch = first_batch([completion((7, 8))], pack=False)
    nothing = batch._replace(logprobs=torch.full_like(batch.logprobs, float("nan")))
    assert sequences(nothing) == {(5, 6, 7, 8): [None] * 4}


def test_completions_of_other_ranks_are_not_shown() -> None:
    mine, other = completion((7, 8), reward=0.5), completion((9,))
    group = Group(Prompt(0, (5, 6)), (other, mine))
    (found,) = shown([group], sequences(first_batch([mine], pack=False)))
    assert (found.prompt, found.tokens, found.reward) == ([5, 6], [7, 8], 0.5)
    assert (found.engine, found.trainer) == ([-1.0, -1.0], [-0.07, -0.08])


WAIT_S = 60.0


def processor_of(*loggers: BaseLogger) -> Any:
    """A metrics processor of torchtitan, as far as its loggers go."""
    made = SimpleNamespace(logger=LoggerContainer())
    for each in loggers:
        made.logger.add_logger(each)
    return made


def processor_on_a_full_disk(folder: Path) -> Any:
    """torchtitan's own TensorBoard logger; its file is one that the kernel writes nothing to."""
    made = processor_of(TensorBoardLogger(str(folder)))
    (file,) = folder.glob("events*")
    file.unlink()
    file.symlink_to("/dev/full")
    return made


def log_until(processor: Any, ended: Callable[[], object]) -> None:
    """TensorBoard's thread writes, and a later call has its error."""
    end, steps = time.monotonic() + WAIT_S, count(1)
    while not ended():
        assert time.monotonic() < end, "no error within the deadline"
        processor.logger.log({"reward/mean": 1.0}, next(steps))


# TensorBoard's own thread ends with the error that the test is about.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_under_tensorboard_is_one_warning(tmp_path: Path) -> None:
    alone = processor_on_a_full_disk(tmp_path / "alone")
    with pytest.raises(OSError, match="No space left"):
        log_until(alone, lambda: False)
    wrapped = processor_on_a_full_disk(tmp_path / "wrapped")
    said: list[str] = []
    make_dispensable(wrapped, said.append)
    log_until(wrapped, lambda: bool(said))
    wrapped.logger.log({"reward/mean": 1.0}, 1_000)
    wrapped.logger.close()
    assert len(said) == 1
    assert "TensorBoardLogger failed" in said[0]


class Lost(BaseLogger):  # type: ignore[misc]  # torchtitan has no types
    """A logger whose service cannot be reached."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


class Kept(BaseLogger):  # type: ignore[misc]  # torchtitan has no types
    """A logger that works."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append(step)


class InWandb(Kept):
    """One that has W&B's module, as torchtitan's has."""

    wandb = None


def test_the_other_loggers_go_on_when_one_fails() -> None:
    said: list[str] = []
    kept = Kept()
    processor = processor_of(Lost(), kept)
    make_dispensable(processor, said.append)
    for step in (1, 2):
        processor.logger.log({"a": 1.0}, step)
    processor.logger.close()
    assert kept.steps == [1, 2]
    assert len(said) == 1
    assert "Lost failed at step 1 and gets nothing more: ConnectionError" in said[0]


@pytest.mark.parametrize(
    ("loggers", "lacks"), [((), True), ((Kept(),), True), ((Kept(), InWandb()), False)]
)
def test_a_logger_of_wandb_that_torchtitan_could_not_make_is_missed(
    loggers: tuple[BaseLogger, ...], lacks: bool
) -> None:
    processor = processor_of(*loggers)
    make_dispensable(processor, print)
    assert lacks_wandb(processor) is lacks


def test_a_rank_that_logs_nothing_misses_no_logger() -> None:
    processor = SimpleNamespace(logger=BaseLogger())
    make_dispensable(processor, print)
    assert not lacks_wandb(processor)


def test_a_single_logger_is_wrapped_too() -> None:
    said: list[str] = []
    processor = SimpleNamespace(logger=Lost())
    make_dispensable(processor, said.append)
    assert isinstance(processor.logger, Dispensable)
    processor.logger.close()
    assert "at its end" in said[0]


def test_a_mean_that_torchtitan_would_call_the_largest_loss_is_not_written(tmp_path: Path) -> None:
    processor = processor_of(TensorBoardLogger(str(tmp_path)))
    make_dispensable(processor, print)
    average = "loss_metrics/global_avg_loss"
    processor.logger.log({average: 0.5, "loss_metrics/global_max_loss": 0.5}, 1)
    processor.logger.close()
    assert EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"] == [average]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_passes(error: type[BaseException]) -> None:
    class Ending(BaseLogger):  # type: ignore[misc]  # torchtitan has no types
        def log(self, metrics: dict[str, Any], step: int) -> None:
            raise error

    with pytest.raises(error):
        Dispensable(Ending(), print).log({}, 1)


COMPLETIONS = [(0.5, "3 to 4", "http://a:1", 0.0125, "2+|3=", "5\n<i>*x*")]


def test_completions_are_a_table_of_tensorboards_text_page(tmp_path: Path) -> None:
    said: list[str] = []
    processor = processor_of(TensorBoardLogger(str(tmp_path)), Kept())
    make_dispensable(processor, said.append)
    log_table(processor, COMPLETIONS, 7)
    processor.logger.close()
    assert said == []
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Tensors("completions/text_summary")
    assert event.step == 7
    text = event.tensor_proto.string_val[0].decode()
    row = "| 0.5 | 3 to 4 | http://a:1 | 0.0125 | 2+&#124;3= | 5⏎&lt;i&gt;&#42;x&#42; |"
    assert text.splitlines()[2] == row


NO_TOKENS = dict.fromkeys(("clipped_low", "clipped_high", "on_policy_count"), 0.0)
"""What every step's metrics of the loss have."""


def recording(folder: Path) -> Any:
    """A controller that can record steps, and nothing else."""
    controller: Any = Controller.__new__(Controller)
    controller.recorder = Recorder(folder)
    controller.sync_process = SimpleNamespace(servers=SimpleNamespace(versions=dict))
    controller._evaluations = SimpleNamespace(own=(), take_values=dict)
    controller._job = SimpleNamespace(training=SimpleNamespace(steps=9))
    controller._step_values, controller._taken, controller.stopped_by = {}, (3, []), ""
    controller._watched = ()
    return controller


@pytest.mark.parametrize(("first", "totals"), [(1, [1, 2]), (3, [21, 22])])
def test_the_totals_of_an_older_run_in_the_folder_are_those_of_a_resumed_run_alone(
    tmp_path: Path, first: int, totals: list[int]
) -> None:
    """Before, the first line of a new run had them, and the second one fewer again."""
    for steps, commits in (((1, 2), 10), ((first, first + 1), 1)):
        controller, found = recording(tmp_path), []
        for step in steps:
            controller.recorder.count(names.SYNC_COUNT, commits)
            found.append(controller.record(step, NO_TOKENS, {}, [])[names.SYNC_COUNT])
        controller.recorder.close()
    assert found == totals


def test_an_alert_of_a_long_run_copies_nothing_of_its_history(tmp_path: Path) -> None:
    """At every crossing: a gigabyte after weeks with many servers, while every lane waited."""
    controller = recording(tmp_path)
    for number in range(100_000):
        controller.recorder.observe(names.SEND_S, float(number))
    controller.recorder.quantised("http://a:1", "fp8")
    controller.recorder.close()
    controller._watched = (Threshold.parse(f"{names.gap('lag', 0)} > 0.1", "alerts.warn"),)
    tracemalloc.start()
    try:
        controller._alert(7, {names.gap("lag", 0): 0.5})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000  # of 800,000 bytes
    (error,) = controller.recorder.history().errors
    assert "servers quantise their weights (http://a:1 with fp8)" in error


def test_a_value_that_is_infinite_crosses_a_threshold_in_the_run_and_of_a_check_from_outside(
    tmp_path: Path,
) -> None:
    """As the loss of a step that was not taken, which is the one to stop at. Before, its line of
    metrics.jsonl did not have it, and ``watch --check`` saw nothing."""
    controller = recording(tmp_path)
    controller._watched = (Threshold.parse(f"{names.LOSS} > 100", "alerts.stop", "stop"),)
    values = controller.record(7, {"loss": math.inf, **NO_TOKENS}, {}, [])
    assert controller.stopped_by == f"alerts.stop {names.LOSS} > 100 (inf)"
    assert names.LOSS not in values
    controller.recorder.close()
    assert watch.run([str(tmp_path), "--check", f"--alert={names.LOSS} > 100"], {}) == watch.HOLDS


def test_the_tokenizer_of_shown_completions_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a page made elsewhere while the run went on had numbers in place of texts."""
    controller: Any = Controller.__new__(Controller)
    controller.recorder, controller._taken = Recorder(tmp_path), (3, [])
    controller._job = SimpleNamespace(rollout=SimpleNamespace(sample_every=1))
    controller._model_dir, controller._codec = "assets/model", SimpleNamespace(decode=str)
    here = Path.cwd()
    controller.show(1, first_batch([completion((5, 6))], False))
    controller.recorder.step(1, {})
    controller.recorder.close()
    monkeypatch.chdir(tmp_path)
    (place, _) = tokenizers_of(read_run(tmp_path), tmp_path)
    assert place.absolute() == here / "assets/model"


def test_prometheus_reads_an_evaluation_also_of_a_step_that_no_question_fell_on(
    tmp_path: Path,
) -> None:
    controller: Any = Controller.__new__(Controller)
    controller.recorder = Recorder(tmp_path)
    controller._evaluations = SimpleNamespace(latest=lambda: {"evaluation/test/reward": 0.75})
    with closing(controller._listen("127.0.0.1:0")) as server:
        url = f"http://{server.address}/metrics"
        assert b"dropped" not in urlopen(url, timeout=60).read(), "a resumed run's go on"
        controller.recorder.step(7, {"evaluation/test/reward": 0.75})
        controller.recorder.step(8, {names.REWARD: 0.5, names.dropped("stale"): 2.0})
        page = urlopen(url, timeout=60).read().decode()
    assert 'titan_grpo_evaluation_reward{evaluation="test"} 0.75\n' in page
    assert "titan_grpo_step 8.0\n" in page
    assert 'titan_grpo_dropped_total{reason="stale"} 2.0\n' in page
    assert 'titan_grpo_dropped_total{reason="bad_reward"} 0.0\n' in page, "else rate() misses one"
    controller.recorder.close()


@pytest.mark.parametrize(
    ("base_version", "shown"), [(7, {0.75}), (3, set[float]()), (0, set[float]())]
)
def test_the_evaluations_of_the_process_before_are_those_of_a_resumed_run(
    base_version: int, shown: set[float], tmp_path: Path
) -> None:
    recorder, some = Recorder(tmp_path), Estimate(0.75, None, None)
    found = Evaluated("test", 4, "http://a:1", 2, 1, some, {}, some, 0, 1.0)
    recorder.evaluated(msgspec.to_builtins(found))
    spec = RolloutSpec(model_dir="", base_version=base_version)
    one = Evaluations([], spec, NoObserver(), recorder, lambda _: None, lambda _: None)
    assert {n for k, n in one.latest().items() if k == "evaluation/test/reward"} == shown
    recorder.close()
