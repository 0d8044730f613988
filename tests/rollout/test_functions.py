"""Reward functions over a dataset: prompts, what the functions get, what they may return, and how
mistakes are said."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.rows import SUMS, write_rows
from titan_grpo.config.rollout import WorkerKeys
from titan_grpo.config.task import TaskKeys
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.task_runner import TaskFailed, TaskOptions, TaskRunner
from titan_grpo.rollout.tasks.dataset import Condition, open_rows, open_table
from titan_grpo.rollout.tasks.functions import FunctionTask, Reward, load_task, read_rewards
from titan_grpo.samples import Completion

MakeTask = Callable[..., FunctionTask]

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{{ tools or '' }}:"


@pytest.fixture
def codec(model_dir: str, tmp_path: Path) -> TextCodec:
    """The model's tokenizer, one token per character, and a template."""
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return TextCodec(model_dir)


@pytest.fixture
def task(tmp_path: Path) -> MakeTask:
    """A factory: rows, functions by name, options -> the task."""

    def make(
        rows: list[dict[str, Any]],
        *functions: Callable[..., Any],
        weights: list[float] | None = None,
        **options: Any,
    ) -> FunctionTask:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        chosen = WorkerKeys(dataset=path, **options)
        weights = weights or [1.0] * len(functions)
        rewards = [Reward(f.__name__, f, w) for f, w in zip(functions, weights, strict=True)]
        return FunctionTask(chosen, rewards, open_rows(chosen))

    return make


def completed(text: str) -> Completion:
    ids = tuple(ord(c) - 29 for c in text)
    return Completion(ids, (-1.0,) * len(ids), "stop", 0, 0, "")


def rewards_of(
    task: FunctionTask, codec: TextCodec, texts: list[str], index: int = 0, timeout_s: float = 60.0
) -> list[float]:
    """Of a group of the task's prompt."""

    async def run() -> list[float]:
        runner = TaskRunner(task, codec, TaskKeys(task_timeout_s=timeout_s))
        return await runner.rewards(runner.prompt(index), [completed(text) for text in texts])

    return asyncio.run(run())


def right(completions: list[str], answer: list[int]) -> list[float]:
    return [float(said == str(wanted)) for said, wanted in zip(completions, answer, strict=True)]


def test_a_function_gets_a_whole_group_with_the_columns_as_lists(
    task: MakeTask, codec: TextCodec
) -> None:
    calls = []

    def seen(**given: Any) -> list[float]:
        calls.append(given)
        return [0.0] * len(given["completions"])

    made = task(SUMS, seen, dataset_shuffle=False)
    prompt = made.prompt(7, codec)
    assert codec.decode(prompt.token_ids) == "<u>1+1=:"
    assert prompt.payload == {"row": 1}
    rewards_of(made, codec, ["2", "no"], index=7)
    assert calls == [
        {
            "prompts": ["1+1="] * 2,
            "completions": ["2", "no"],
            "completion_ids": [[21], [81, 82]],
            "prompt": ["1+1="] * 2,
            "answer": [2, 2],
            "level": [1, 1],
        }
    ]
    assert rewards_of(task(SUMS, right, dataset_shuffle=False), codec, ["1", "2", ""]) == [1, 0, 0]


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_rows_of_messages_come_to_a_function_as_messages(
    task: MakeTask, codec: TextCodec, column: str
) -> None:
    calls = []

    def seen(prompts: list[Any], completions: list[Any]) -> list[float]:
        calls.append((prompts, completions))
        return [1.0]

    talk = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "2?"}]
    made = task([{column: talk}], seen, system_prompt="Not this one.")
    assert codec.decode(made.prompt(0, codec).token_ids) == "<s>Hi.<u>2?:"
    rewards_of(made, codec, ["4"])
    assert calls == [([talk], [[{"role": "assistant", "content": "4"}]])]


@pytest.mark.parametrize("rows", ['[{"role": "user", "content": "2?"}]', "[2]?"])
def test_a_column_of_messages_may_hold_them_as_json(
    task: MakeTask, codec: TextCodec, rows: str
) -> None:
    made = task([{"messages": rows}], right_or_wrong)
    expected = "<u>2?:" if "role" in rows else "<u>[2]?:"
    assert codec.decode(made.prompt(0, codec).token_ids) == expected


def test_a_prompt_is_made_of_columns_with_a_system_message_and_tools(
    task: MakeTask, codec: TextCodec, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('["f"]', encoding="utf-8-sig")
    made = task(
        [{"question": "2+2", "tools": '["g"]'}, {"question": "3+3", "tools": None}],
        right_or_wrong,
        prompt="Q: {question} {{x}}",
        system_prompt="S.",
        tools=str(tools),
        dataset_shuffle=False,
    )
    shown = [codec.decode(made.prompt(i, codec).token_ids) for i in range(2)]
    assert shown == ["<s>S.<u>Q: 2+2 {x}['g']:", "<s>S.<u>Q: 3+3 {x}['f']:"]


def test_tools_and_calls_of_a_row_in_arrow_have_no_keys_of_other_rows(
    codec: TextCodec, tmp_path: Path
) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages | tojson }}{{ tools | tojson }}")
    rows = []
    for name in "ab":
        call = {"function": {"name": name, "arguments": {name: 1}}}
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
        result = {"role": "tool", "content": "1"}
        tool = {"function": {"name": name, "parameters": {"properties": {name: {"type": "int"}}}}}
        rows.append({"messages": [*said, result], "tools": [tool]})
    keys = WorkerKeys(dataset=str(tmp_path / "rows.parquet"), dataset_shuffle=False)
    pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(keys.dataset)
    made = FunctionTask(keys, [Reward("right_or_wrong", right_or_wrong)], open_rows(keys))
    for number, row in enumerate(rows):
        shown = codec.decode(made.prompt(number, codec).token_ids)
        assert shown == json.dumps(row["messages"]) + json.dumps(row["tools"])


def right_or_wrong(completions: list[str]) -> list[float]:
    return [1.0] * len(completions)


def test_rewards_are_weighted_and_a_function_may_not_apply(
    task: MakeTask, codec: TextCodec
) -> None:
    async def short(completions: list[str], **kwargs: object) -> list[int | None]:
        return [None if len(said) > 3 else 1 for said in completions]

    def digits(completions: list[str]) -> list[int]:
        return [sum(letter.isdigit() for letter in said) for said in completions]

    made = task(SUMS, short, digits, weights=[10.0, 0.5])
    assert rewards_of(made, codec, ["12", "12345", "a"]) == [11.0, 2.5, 10.0]
    with pytest.raises(TaskFailed, match=r"every reward function returned None.*'12345'") as caught:
        rewards_of(task(SUMS, short), codec, ["1", "12345"])
    assert "rows.jsonl: {'prompt'" in caught.value.report


def test_plain_functions_run_in_threads_and_all_functions_of_a_group_at_once(
    task: MakeTask, codec: TextCodec
) -> None:
    met = threading.Barrier(2, timeout=60)

    def first(completions: list[str]) -> list[float]:
        assert threading.current_thread() is not threading.main_thread()
        met.wait()
        return [1.0]

    def second(completions: list[str]) -> Iterator[float]:
        assert threading.current_thread() is not threading.main_thread()
        met.wait()
        yield 2.0

    async def third(completions: list[str]) -> list[float]:
        assert threading.current_thread() is threading.main_thread()
        return [3.0]

    assert rewards_of(task(SUMS, first, second, third), codec, ["x"]) == [6.0]


@pytest.mark.parametrize(
    "answer",
    [[1.0], [1.0] * 3, 0.5, None, "12", {0: 1, 1: 0}, {0, 1}, ["1", "0"], [1e999, 0], [1, 10**400]],
)
def test_an_answer_that_is_no_list_of_rewards_is_the_functions_mistake(answer: object) -> None:
    with pytest.raises(DataError, match="must return a list of 2 finite numbers"):
        read_rewards(answer, 2)


def test_the_error_of_a_deadline_names_the_functions_that_did_not_end_and_the_row(
    task: MakeTask, codec: TextCodec
) -> None:
    leave = threading.Event()

    def plain(completions: list[str]) -> list[float]:
        leave.wait(60)
        return [1.0]

    async def awaits(completions: list[str]) -> list[float]:
        await asyncio.Event().wait()
        return [1.0]

    made = task(SUMS, right, plain, awaits, dataset_shuffle=False)
    try:
        with pytest.raises(
            TaskFailed, match=r"TimeoutError \(rollout\.task_timeout_s = 0\.5"
        ) as of:
            rewards_of(made, codec, ["x"], timeout_s=0.5)
    finally:
        leave.set()
    slow = re.findall(
        r"rollout\.reward '(\w+)', row 0 of \S*rows\.jsonl: \{'prompt'", str(of.value)
    )
    assert sorted(slow) == ["awaits", "plain"]


@pytest.mark.parametrize("error", [StopIteration, SystemExit])
def test_what_a_future_cannot_hold_does_not_hang_a_group(
    task: MakeTask, codec: TextCodec, error: type[BaseException]
) -> None:
    def lost(completions: object) -> None:
        raise error

    with pytest.raises(TaskFailed, match=f"{error.__name__} left the function"):
        rewards_of(task(SUMS, lost), codec, ["x"])


def test_every_epoch_has_every_row_once_in_an_order_that_the_index_alone_determines(
    task: MakeTask, codec: TextCodec
) -> None:
    made, again = (task(SUMS, right, seed=3) for _ in range(2))
    rows = [made.prompt(index, codec).payload["row"] for index in range(18)]
    epochs = [rows[start : start + 6] for start in (0, 6, 12)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(6))] * 3
    assert len({tuple(epoch) for epoch in epochs}) > 1
    # A resumed run asks for what is left, and in whatever order groups end.
    for index in (17, 2, 9, 16, 0):
        assert again.prompt(index, codec).payload["row"] == rows[index]
    plain = task(SUMS, right, dataset_shuffle=False)
    assert [plain.prompt(i, codec).payload["row"] for i in range(8)] == [0, 1, 2, 3, 4, 5, 0, 1]


@pytest.mark.parametrize(
    ("filters", "rows"),
    [
        (["level >= 1"], [1, 2, 4, 5]),
        (["level != 0", "answer in [2, 6]"], [1, 5]),
        (['prompt == "3+1="'], [3]),
        (["level not in [0, 1]"], [2, 5]),
        (["note == null"], [0, 1, 2, 4, 5]),
        (["note > 0"], [3]),
    ],
)
def test_only_rows_that_pass_all_filters_are_asked(
    task: MakeTask, codec: TextCodec, filters: list[str], rows: list[int]
) -> None:
    noted = [row | {"note": 1 if row["answer"] == 4 else None} for row in SUMS]
    made = task(noted, right, dataset_filter=filters)
    asked = {made.prompt(index, codec).payload["row"] for index in range(2 * len(rows))}
    assert asked == set(rows)


def test_a_filter_takes_the_name_of_a_column_with_spaces() -> None:
    found = Condition.parse('the level not in ["a in b"]', "rollout.dataset_filter")
    assert found == Condition("the level", "not in", ["a in b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("level", 'must hold conditions "COLUMN OPERATOR VALUE"'),
        ("level = 3", 'must hold conditions "COLUMN OPERATOR VALUE"'),
        ("subject == algebra", "must compare with a JSON value"),
        ("level in 3", "must have a list after in"),
    ],
)
def test_a_filter_that_cannot_be_read_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Condition.parse(text, "rollout.dataset_filter")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dataset_filter": ["prompt > 1"]}, DataError, "cannot compare 'prompt' of row 0, '0.1='"),
        ({"prompt": '{"a": 1}'}, ConfigError, r"prompt \({{ and }} are braces\) asks for '\"a\"'"),
        ({"prompt": "{question"}, ConfigError, "rollout.prompt must be a text with columns in"),
    ],
)
def test_a_dataset_without_what_is_asked_of_it_is_one_line(
    task: MakeTask, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        task(SUMS, right, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prompt", ["", "Q: {prompt}", "Q: {prompt!r:>9}"])
def test_a_prompts_column_without_a_value_in_a_row_that_is_asked_is_one_line(
    task: MakeTask, codec: TextCodec, prompt: str
) -> None:
    rows = [*SUMS[:2], {"prompt": None, "answer": 1, "level": 1}]
    with pytest.raises(DataError) as caught:
        task(rows, right, prompt=prompt)
    user = "rollout.prompt asks for 'prompt'" if prompt else "a prompt is made of 'prompt'"
    assert str(caught.value).endswith(
        f"rows.jsonl' has no value (null) in its row 2 (the first is row 0), and {user}: fill it,"
        " or leave such rows out with rollout.dataset_filter = ['prompt != null']"
    )
    # Rows that are left out may lack it.
    made = task(rows, right, prompt=prompt, dataset_filter=["prompt != null"])
    assert {made.prompt(index, codec).payload["row"] for index in range(4)} == {0, 1}


def test_a_part_of_a_column_without_a_value_does_not_become_a_text(
    task: MakeTask, codec: TextCodec
) -> None:
    made = task([{"it": {"text": None}}], right_or_wrong, prompt="Q: {it[text]}")
    with pytest.raises(DataError, match=r"row 0 of .*does not fit: it\[text\] has no value"):
        made.prompt(0, codec)


def test_a_function_that_asks_for_a_column_that_is_not_there_is_one_line(
    task: MakeTask, tmp_path: Path
) -> None:
    def wrong(completions: Any, solution: Any, weight: float = 1.0) -> None:
        """Solution is no column, and weight has a default."""

    with pytest.raises(ConfigError) as caught:
        task(SUMS, wrong)
    assert str(caught.value) == (
        "rollout.reward 'wrong' asks for 'solution', a column that rollout.dataset"
        f" '{tmp_path}/rows.jsonl' must have; it has prompt, answer, level"
    )
    with pytest.raises(ConfigError, match=r"asks for 'prompt' or 'messages'.*it has question"):
        task([{"question": "x"}], right_or_wrong)


def test_a_function_whose_arguments_have_no_names_or_no_known_ones_is_one_line(
    task: MakeTask,
) -> None:
    def wrong(completions: Any, /) -> None:
        """The columns come by name."""

    with pytest.raises(ConfigError, match="'wrong' must take its arguments by name, got 'compl"):
        task(SUMS, wrong)
    text = "'max' must be a function whose parameters Python knows: no signature found"
    with pytest.raises(ConfigError, match=text):
        task(SUMS, max)


def test_files_of_all_kinds_and_patterns_are_read(tmp_path: Path) -> None:
    table = open_table(TaskKeys(dataset=write_rows(tmp_path / "a.jsonl", SUMS)))
    for name, write in (("b.parquet", table.to_parquet), ("c.csv", table.to_csv)):
        write(tmp_path / name)
        assert open_table(TaskKeys(dataset=str(tmp_path / name)))[3] == SUMS[3]
    (tmp_path / "b2.parquet").write_bytes((tmp_path / "b.parquet").read_bytes())
    assert len(open_table(TaskKeys(dataset=str(tmp_path / "*.parquet")))) == 2 * len(SUMS)


@pytest.mark.parametrize("name", ["rows [1].jsonl", "it's *.jsonl", "ROWS.JSONL"])
def test_a_file_is_read_whatever_its_name(tmp_path: Path, name: str) -> None:
    rows = TaskKeys(dataset=write_rows(tmp_path / name, SUMS))
    assert len(open_table(rows)) == len(SUMS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"rows\.jsonl' has no rows"),
        (b"\n \n", r"rows\.jsonl' has no rows"),
        (b'{"a": 1}\nnot json\n', r"rows\.jsonl:2 must be a JSON object"),
        (b'{"a": 1}\n[1]\n', r"rows\.jsonl:2 must be a JSON object"),
        (b'null\n{"a": 1}\n', r"rows\.jsonl:1 must be a JSON object"),
        (b'{"a": ' + b"[" * 5000, r"rows\.jsonl:1 must be a JSON object \(maximum recursion"),
        (b'{"a": ' + b"[" * 2000 + b"]" * 2000 + b"}", r"rows\.jsonl.* \(?.*maximum recursion"),
        (b"PK\x03\x04 a torn zip", r"rows\.jsonl:1 must be a JSON object"),
        (b"\x1f\x8b\x08\x00 a torn gzip", r"rows\.jsonl:1 must be a JSON object"),
    ],
    ids=["empty", "blank", "text", "list", "null", "torn depth", "depth", "zip", "gzip"],
)
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_table(TaskKeys(dataset=str(path)))
    assert "\n" not in str(caught.value)


def test_files_with_other_columns_are_one_line_that_names_them(tmp_path: Path) -> None:
    for name, column in (("a", "question"), ("b", "q")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({column: "1+1="}) + "\n")
    with pytest.raises(DataError, match=r"Couldn't cast q: string .*'question'.* don't match") as e:
        open_table(TaskKeys(dataset=str(tmp_path / "*.jsonl")))
    assert "\n" not in str(e.value)


def test_a_file_of_json_that_begins_with_null_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("null")
    with pytest.raises(DataError, match=r"rows\.json' cannot be read: ValueError: it begins with"):
        open_table(TaskKeys(dataset=str(path)))


def test_a_file_of_another_kind_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("hello\n")
    with pytest.raises(ConfigError, match=r"must be a file of \.jsonl, .*, got '.*rows\.txt'"):
        open_table(TaskKeys(dataset=str(tmp_path / "rows.txt")))


def test_a_directory_is_read_where_it_has_rows(tmp_path: Path) -> None:
    keys = WorkerKeys(dataset=str(tmp_path))
    (tmp_path / "deeper").mkdir()
    (tmp_path / "readme.md").write_text("rows")
    with pytest.raises(ConfigError, match=r"rollout\.dataset must be a directory with files of"):
        open_rows(keys)
    (tmp_path / "deeper" / "rows.jsonl").write_text('{"prompt": "1"}\n')
    assert len(open_rows(keys)) == 1


def test_a_text_that_is_not_utf8_is_one_line_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "\xe9"}\n'.encode("latin-1"))
    rows = open_rows(WorkerKeys(dataset=str(path)))
    assert rows[0] == {"prompt": "a"}
    with pytest.raises(DataError, match=r"row 1 of rollout\.dataset '.*rows\.jsonl' must be UTF-8"):
        rows[1]


@pytest.mark.parametrize(
    ("source", "path", "message"),
    [
        ("", "broken_rewards", 'must be "package.module:function"'),
        ("", "no_such_module:f", r"ModuleNotFoundError.*\(put its folder on PYTHONPATH"),
        ("import no_such_library\n", "broken_rewards:f", r"no_such_library.*broken_rewards\.py:1"),
        ("x = 1\nx.y\n", "broken_rewards:f", r"AttributeError.*broken_rewards\.py:2"),
        ("def f(:\n", "broken_rewards:f", r"SyntaxError.*broken_rewards\.py:1\)"),
        ("import sys\nsys.exit(3)\n", "broken_rewards:f", r"SystemExit: 3.*broken_rewards\.py:2"),
        ("", "./broken_rewards.py:f", "a module's name as in import, no path of a file"),
        ("", "broken_rewards.py:f", "a module's name as in import, no path of a file"),
        ("", ":f", 'must be "package.module:function"'),
        (
            "",
            "broken_rewards:f",
            r"must be a function, .*broken_rewards\.py has nothing by that name",
        ),
        ("f = 1\n", "broken_rewards:f", "has 1 by that name"),
    ],
)
def test_a_function_that_cannot_be_imported_is_one_line_with_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, path: str, message: str
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "broken_rewards", raising=False)
    (tmp_path / "broken_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=message) as caught:
        Reward.load(path)
    assert "\n" not in str(caught.value)


def test_a_row_that_is_no_prompt_is_named(task: MakeTask, codec: TextCodec) -> None:
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]
    made = task([{"messages": talk}], right_or_wrong)
    with pytest.raises(
        DataError, match=r"row 0 of .*rows\.jsonl: column 'messages' must have .* ends with the"
    ):
        made.prompt(0, codec)


def test_a_text_among_messages_is_a_text_however_deep_its_brackets(
    task: MakeTask, codec: TextCodec
) -> None:
    deep = "[" * 5000
    made = task([{"messages": deep}], right_or_wrong)
    assert codec.decode(made.prompt(0, codec).token_ids) == f"<u>{deep}:"


@pytest.mark.parametrize(
    ("prompt", "tools", "message"),
    [
        ("{prompt.text}", None, "rollout.prompt '{prompt.text}' does not fit: 'str' object has no"),
        ("{prompt[key]}", None, "does not fit: string indices must be integers"),
        ("{prompt:d}", None, "does not fit: Unknown format code 'd'"),
        ("", "[no JSON", "column 'tools' must be JSON"),
        ("", "[" * 5000, "column 'tools' must be JSON"),
    ],
    ids=["attribute", "index", "format", "no JSON", "deep JSON"],
)
def test_a_row_that_does_not_fit_is_named(
    task: MakeTask, codec: TextCodec, prompt: str, tools: str | None, message: str
) -> None:
    made = task([{"prompt": "2?", "tools": tools}], right_or_wrong, prompt=prompt)
    expected = f"row 0 of .*rows.jsonl: .*{re.escape(message)}"
    with pytest.raises(DataError, match=expected) as caught:
        made.prompt(0, codec)
    assert "\n" not in str(caught.value)


def test_gsm8k_is_a_function_over_rows_in_the_models_template(
    tmp_path: Path, codec: TextCodec
) -> None:
    rows = [{"question": f"q{i}", "answer": f"so #### {i * 1000:,}"} for i in range(5)]
    made = load_task("gsm8k", TaskOptions(seed=1, path=write_rows(tmp_path / "g.jsonl", rows)))
    assert isinstance(made, FunctionTask)
    index = next(i for i in range(5) if made.prompt(i, codec).payload["row"] == 3)
    shown = codec.decode(made.prompt(index, codec).token_ids)
    assert shown.startswith("<u>q3")
    assert shown.endswith("in \\boxed{}.:")
    said = ["thus \\boxed{3000}", "thus \\boxed{3001}", "no idea"]
    assert rewards_of(made, codec, said, index) == [1, 0, 0]


def test_gsm8k_has_no_filter_that_could_leave_rows_out(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"question": None, "answer": "4"}]
    path = write_rows(tmp_path / "g.jsonl", rows)
    with pytest.raises(DataError) as caught:
        load_task("gsm8k", TaskOptions(seed=1, path=path))
    assert str(caught.value) == (
        f"rollout.task_path '{path}' has no value (null) in its row 0 (the first is row 0), and"
        " rollout.prompt asks for 'question': fill it (scripts/get_gsm8k.py makes that file)"
    )
