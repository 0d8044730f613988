"""llama3's Hugging Face files where its weights are sharded."""

from pathlib import Path

from tests.rigs.ranks import run_ranks

SCRIPT = Path(__file__).with_name("llama3_rank.py")


def test_llama3_has_the_same_weights_in_its_files_however_it_is_sharded(tmp_path: Path) -> None:
    for said in run_ranks(SCRIPT, 4, str(tmp_path)):
        assert said.splitlines() == [
            f"{way}: wrong []" for way in ("fsdp", "hsdp", "fsdp_tensor_parallel")
        ]
