"""titan-grpo init: what it writes is a job that the doctor takes."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from titan_grpo.commands import doctor, init
from titan_grpo.config import older
from titan_grpo.config.grpo import GRPO
from titan_grpo.errors import ConfigError
from titan_grpo.titan import jobconfig
from titan_grpo.titan.tiny import write_tiny_model

ROWS = [{"question": "7?", "answer": "7"}, {"question": "8?", "answer": "8"}]

OLDER_JOB = """
[job]
dump_folder = "out"
[model]
name = "qwen3"
flavor = "0.6B"
[training]
seq_len = 4096
global_batch_size = 64
[grpo]
sglang_urls = ["gpu1:9000", "gpu2:9000"]
sglang_tp = 2
kl_beta = 0.1
grpo_by_token = true
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model and data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_tiny_model("qwen3", tmp_path / "model", seed=1)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def make(*more: str) -> int:
    return init.run(
        ["--model", "model", "--data", "data.jsonl", "--servers", "http://a:8000,http://b:8000/"]
        + list(more),
        os.environ,
    )


def convert(older_job: str) -> dict[str, Any]:
    Path("old.toml").write_text(older_job)
    assert init.run(["--from", "old.toml", "--out", "new.toml"], os.environ) == 0
    return tomllib.loads(Path("new.toml").read_text())


def test_the_doctor_finds_nothing_wrong_with_it_but_servers_that_are_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make() == 0
    assert "titan-grpo doctor --job.config_file train.toml" in capsys.readouterr().out
    arguments = doctor.parser().parse_known_args(["--job.config_file", "train.toml"])
    found = list(doctor.findings(*arguments, os.environ))
    assert {each.subject for each in found if each.status == "problem"} <= {"server"}
    subjects = {each.subject: each for each in found}
    assert subjects["configuration"].status == "ok"
    assert subjects["reward"].text == "rewards:holds_answer"
    assert "user: 7?" in subjects["first prompt"].text or "8?" in subjects["first prompt"].text


def test_every_key_it_writes_has_an_effect_and_a_word(folder: Path) -> None:
    make("--reward", "examples.own_reward.rewards:number", "--out", "jobs/mine.toml")
    config, _, notes = jobconfig.read(["--job.config_file", "jobs/mine.toml"])
    assert notes == []
    assert config.rollout.servers == ["http://a:8000", "http://b:8000"]
    assert (config.model.name, config.model.flavor) == ("qwen3", "grpo_tiny")
    assert not (folder / "rewards.py").exists(), "a reward was named"


def test_a_place_with_a_space_is_quoted_in_the_commands_that_come_next(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make("--out", "my jobs/mine.toml")
    command = "titan-grpo doctor --job.config_file 'my jobs/mine.toml'"
    assert command in capsys.readouterr().out
    assert command in (folder / "my jobs/mine.toml").read_text()


def test_a_reward_that_is_there_is_kept_and_can_be_named(folder: Path) -> None:
    make()
    with pytest.raises(ConfigError, match=r"rewards\.py does: name its function \(--reward\)"):
        make("--out", "second.toml")
    assert make("--out", "second.toml", "--reward", "rewards:holds_answer") == 0


def test_its_first_reward_looks_at_the_last_line(folder: Path) -> None:
    make()
    names: dict[str, Any] = {}
    exec((folder / "rewards.py").read_text(), names)
    said = ["I think\nso 7\n", "7\nno, 8", ""]
    assert names["holds_answer"](said, ["7", "7", 7]) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--servers", "a:8000"], "a server must be a URL such as"),
        (["--model", "nowhere"], "--model must be a directory with the model's config.json"),
        (["--data", "nowhere.jsonl"], "--data must be an existing file or pattern"),
        (["--data", "empty"], r"--data must be a directory with files of .*, 'empty' has none"),
        (["--data", "/"], "--data must be a directory of at most 10000 files and folders"),
        (["--servers", ""], "init needs --servers"),
        (["--data", "text.jsonl"], "a column of answer, solution, target, label; .* has text"),
        (
            ["--data", "text.jsonl", "--reward", "a:b"],
            "must have a column that a prompt is made of .* has text: rename one",
        ),
        (["--out", "data.jsonl"], "init writes no file that exists, data.jsonl does"),
        (["--out", "rewards.py"], r"rewards\.py is both --out and the reward function"),
        (["--out", "model/../rewards.py"], "both --out and the reward function"),
        (["--flavor", "qwen3"], "--flavor must be NAME/FLAVOR of torchtitan, got 'qwen3'"),
        (["--flavor", "qwen3/9T"], "got 'qwen3/9T': model.flavor must be one of .* for qwen3"),
        (["--flavor", "qwen/0.6B"], "got 'qwen/0.6B': model.name must be"),
        (["--reward", "foo"], "--reward must be MODULE:FUNCTION, got 'foo'"),
        (["--reward", "foo:"], "--reward must be MODULE:FUNCTION, got 'foo:'"),
        (["--from", "old.toml"], "--from converts a job as it is and would not read --model"),
    ],
)
def test_what_it_cannot_use_is_said_in_one_line_and_nothing_is_written(
    folder: Path, arguments: list[str], message: str
) -> None:
    (folder / "empty").mkdir()
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=message):
        make(*arguments)
    assert sorted(folder.iterdir()) == before


def test_a_model_gets_plain_text_where_it_has_no_chat_template_but_not_where_that_is_broken(
    folder: Path,
) -> None:
    tokenizer = folder / "model/tokenizer_config.json"
    settings = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(settings | {"chat_template": "{% for %}"}))
    with pytest.raises(ConfigError, match="the chat template of model is no template"):
        make()
    for text in ("{", "[" * 100_000):
        tokenizer.write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json must be JSON"):
            make()
    for templates in ([None], [{"name": "default"}], ["a"]):
        tokenizer.write_text(json.dumps(settings | {"chat_template": templates}))
        with pytest.raises(ConfigError, match="chat_template in model must be a text, or a list"):
            make()
    tokenizer.write_text(json.dumps(settings | {"chat_template": None}))
    make()
    config = jobconfig.parse(["--job.config_file", "train.toml"])
    assert config.rollout.chat_template == "none"


@pytest.mark.parametrize("positions", [1, 0, -1, 2.5, "2048", None])
def test_a_model_without_positions_is_refused(folder: Path, positions: Any) -> None:
    path = folder / "model/config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": positions})
    )
    with pytest.raises(ConfigError, match="must be a whole number, 2 or more, got"):
        make()


def test_a_model_that_the_trainer_would_compute_otherwise_is_refused(folder: Path) -> None:
    path = folder / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_bias": True}))
    with pytest.raises(
        ConfigError, match=r"^--model cannot be trained as qwen3/.*attention_bias True"
    ):
        make()
    assert not (folder / "train.toml").exists()


def test_a_quantised_model_is_refused(folder: Path) -> None:
    path = folder / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"bits": 8}}))
    with pytest.raises(ConfigError, match=r"^--model must have unquantised weights"):
        make()


def test_messages_need_a_model_with_a_chat_template(folder: Path) -> None:
    """Before, its job had chat_template = "none", with which a run refuses messages."""
    tokenizer = folder / "model/tokenizer_config.json"
    settings = json.loads(tokenizer.read_text())
    said = [{"role": "user", "content": "7?"}]
    (folder / "lists.jsonl").write_text(json.dumps({"messages": said, "answer": "7"}) + "\n")
    quoted = json.dumps(said).replace('"', '""')
    (folder / "texts.csv").write_text(f'messages,answer\n"{quoted}",7\n')
    assert make("--data", "lists.jsonl") == 0
    (folder / "train.toml").unlink()
    (folder / "rewards.py").unlink()
    tokenizer.write_text(json.dumps(settings | {"chat_template": None}))
    for data in ("lists.jsonl", "texts.csv"):
        with pytest.raises(ConfigError, match="must have a chat template for the messages in"):
            make("--data", data)


def test_an_older_job_keeps_its_meaning(folder: Path) -> None:
    table = convert(OLDER_JOB)
    assert table["rollout"]["servers"] == ["http://gpu1:9000", "http://gpu2:9000"]
    config = jobconfig.parse(["--job.config_file", "new.toml"])
    assert config.grpo.loss_normalization == "token", "grpo_by_token = true"
    assert (config.grpo.clip_ratio_lower_bound, config.grpo.clip_ratio_upper_bound) == (0.25, 0.25)
    assert config.grpo.kl_beta == 0.1
    assert config.rollout.prompts_per_step * config.rollout.group_size == 64
    assert "sglang_tp: has no value here" in (folder / "new.toml").read_text()


def test_what_an_older_job_has_outside_of_sections_and_in_quotes_is_kept(folder: Path) -> None:
    outside = 'title = "a job"\n"a b" = 1\n'
    tables = '[[stage]]\nname = "a"\nrows = 3\n[[stage]]\nname = "b"\n'
    tables += """[model."flags.of mine"]\n"x.y" = 2\n["my.section"]\n"a \\"b\\"" = 3\n"""
    table = convert(outside + OLDER_JOB + tables)
    assert (table["title"], table["a b"]) == ("a job", 1)
    assert table["model"]["flags.of mine"] == {"x.y": 2}
    assert table["my.section"] == {'a "b"': 3}
    assert table["stage"] == [{"name": "a", "rows": 3}, {"name": "b"}]
    assert table["training"]["seq_len"] == 4096


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo = 3", "grpo must be a table, got 3"),
        ("[[grpo]]", "grpo must be a table"),
        ("[grpo]\nsglang_urls = 3", r"grpo\.sglang_urls must be a list of texts, .* got 3"),
        ("[grpo]\nsglang_urls = [3]", r"grpo\.sglang_urls must be a list of texts"),
        ('[grpo]\nsglang_slurm_num_nodes = "x"', "num_nodes must be like -1, .* got 'x'"),
        ('[grpo]\nrollout_is_threshold = "x"', "rollout_is_threshold must be a number"),
        ('[peft]\nenable_peft = true\nlora_alpha = "x"', r"peft\.lora_alpha must be a number"),
        ('[training]\nglobal_batch_size = "x"', "global_batch_size must be a whole number"),
        (
            '[rollout]\nservers = ["http://a:1"]\n[lora]\nrank = 8',
            r"--from must be a job of the older trainer, old\.toml has rollout, lora of this one",
        ),
        ('[[evaluation]]\nname = "a"', "has evaluation of this one: .* it needs no conversion"),
    ],
)
def test_what_is_no_older_job_is_said_in_one_line_and_nothing_is_written(
    folder: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(text)
    assert not (folder / "new.toml").exists()


def test_an_older_jobs_adapters_are_ours_and_what_has_no_counterpart_is_named(folder: Path) -> None:
    peft = "[peft]\nenable_peft = true\nuse_lora = true\nlora_rank = 8\nlora_alpha = 32\n"
    table = convert(OLDER_JOB + peft + "lora_dropout = 0.1\n")
    assert table["lora"] == {"rank": 8, "alpha": 32.0}
    assert "peft" not in table
    text = (folder / "new.toml").read_text()
    assert "adapters have no dropout here\n# lora_dropout: has no value here" in text
    config = jobconfig.parse(["--job.config_file", "new.toml"])
    assert (config.lora.rank, config.lora.alpha) == (8, 32.0)
    assert older.convert_peft({"enable_peft": False, "lora_rank": 8}) == []


def test_a_job_that_says_nothing_gets_the_older_defaults() -> None:
    written = {each.key: each.value for each in older.convert({})}
    assert written == {
        "grpo.loss_normalization": "sequence",
        "grpo.clip_ratio_lower_bound": 0.25,
        "grpo.clip_ratio_upper_bound": 0.25,
    }
    written = {each.key: each.value for each in older.convert({"rollout_is_threshold": 4.0})}
    assert written["grpo.rollout_is_mode"] == "mask"
    assert written["grpo.rollout_is_level"] == "sequence"


def test_every_key_here_that_the_table_names_exists() -> None:
    for of in older.OLDER.values():
        if of.key:
            older.default_here(of.key)
    kept = [name for name in vars(GRPO()) if name in older.OLDER]
    assert all(
        older.OLDER[name].key in (f"grpo.{name}", "grpo.loss_normalization")
        for name in kept
        if name != "temperature"
    ), "a key of the same name is the same key"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("grpo.sglang_urls", "is not a key .*; it is rollout.servers here"),
        ("grpo.sglang_port", "a key of the older trainer; none: each lane takes a free port"),
        ("rollout.sglang_urls", "is not a key .*; it is rollout.servers here"),
        ("peft.enable_peft", r"is not a key .*; adapters are \[lora\] here \(.*lora_rank is lora"),
    ],
)
def test_an_older_key_is_refused_with_what_it_is_here(key: str, said: str, folder: Path) -> None:
    section, _, name = key.partition(".")
    (folder / "job.toml").write_text(f'[{section}]\n{name} = "x"\n')
    with pytest.raises(ConfigError, match=said):
        jobconfig.parse(["--job.config_file", "job.toml"])


def test_the_page_is_what_the_table_says(root: Path) -> None:
    page = (root / "docs" / "from_the_older_trainer.md").read_text()
    assert page == older.page(), "run: titan-grpo config --older > docs/from_the_older_trainer.md"
