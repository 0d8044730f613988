"""Completions on the page: which ones, and each token with its own text and gap."""

import tracemalloc
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from titan_grpo.observe import names
from titan_grpo.observe.recorder import Recorder
from titan_grpo.observe.schema import Shown, ShownStep, choose
from titan_grpo.views.page import completions, decoder, pieces
from titan_grpo.views.run import TOKENS, every_step, read_run, read_samples


def completion(reward: float = 0.0, gap: float = 0.0, tokens: int = 2) -> Shown:
    engine = [-1.0] * tokens
    return Shown("http://a:1", reward, 3, 4, [1], [7] * tokens, engine, [-1.0 - gap] * tokens)


def test_the_best_the_worst_and_the_one_with_the_largest_gap_are_kept() -> None:
    rewards = [0.5, 0.1, 0.5, 0.9, 0.5, 0.5]
    found = [completion(reward, gap=0.3 * (k == 5)) for k, reward in enumerate(rewards)]
    assert choose(found) == [found[3], found[1], found[5], found[0]]
    assert choose(found[:1]) == found[:1]
    assert choose([]) == []


def test_a_gap_is_of_the_sampled_tokens_alone() -> None:
    shown = Shown("a", 0.0, 1, 1, [1], [5, 6, 7], [-1.0, -9.0, -2.0], [-1.5, None, -2.1])
    assert shown.gap == pytest.approx(0.3)
    assert Shown("a", 0.0, 1, 1, [1], [5], [-1.0], [None]).gap == 0.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer, as most models have: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: k for k, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", ["plain words", "naïve 🙂 日本", " \n\tx", "🙂" * 40, ""])
def test_the_texts_of_tokens_are_together_the_whole_text(folder: Path, text: str) -> None:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    found = pieces(ids, decoder([folder]))
    assert len(found) == len(ids)
    assert "".join(found) == text


def test_half_a_character_belongs_to_the_token_that_completes_it(folder: Path) -> None:
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a🙂b").ids
    assert pieces(ids, decoder([folder])) == ["a", "", "", "", "🙂", "b"]
    assert "".join(pieces(ids[:3], decoder([folder]))).startswith("a\ufffd"), "a torn end is shown"


def test_without_a_tokenizer_or_with_a_torn_one_ids_are_shown(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:100])
    for folders in ([folder], [folder / "none"]):
        assert pieces([5, 6], decoder(folders)) == ["⟨5⟩", "⟨6⟩"]


def step(number: int, *shown: Shown) -> ShownStep:
    return ShownStep(number, number + 4, "", list(shown))


def test_a_row_has_the_figures_of_its_completion() -> None:
    shown = Shown("http://a:1", 0.123456, 3, 4, [1, 2], [5, 6], [-1.0, -2.0], [-1.25, None])
    (row,) = completions([step(1, shown)], decoder([]))
    assert row["tokens"] == [["⟨5⟩", 250], ["⟨6⟩", None]]
    assert (row["reward"], row["stale"], row["server"], row["gap"]) == (0.1235, 2, "a:1", 0.25)
    assert row["prompt"] == "⟨1⟩⟨2⟩"


def test_of_a_long_run_steps_that_lie_evenly_over_it_are_shown() -> None:
    assert every_step([10] * 100, limit=250) == 4
    assert every_step([10], limit=3) == every_step([], limit=3) == 1


def test_no_completions_are_shown_of_steps_that_a_resumed_run_has_yet_to_make_again(
    tmp_path: Path,
) -> None:
    for steps in (range(1, 12), range(6, 8)):
        recorder = Recorder(tmp_path)
        for number in steps:
            recorder.step(number, {names.REWARD: 0.5})
            if number in (1, 10):
                recorder.sample(msgspec.to_builtins(step(number, completion())))
        recorder.close()
    assert [each.step for each in read_run(tmp_path).samples] == [1]


def test_of_a_long_run_no_more_completions_are_in_memory_than_are_shown(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for number in (*range(1, 41), *range(31, 61)):  # resumed from step 30
        recorder.sample(msgspec.to_builtins(step(number, completion(tokens=TOKENS // 20))))
    recorder.close()
    path = tmp_path / "samples.jsonl"
    tracemalloc.start()
    try:
        found = read_samples(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [each.step for each in found] == [*range(1, 61, 3)]
    assert peak < 3 * path.stat().st_size
