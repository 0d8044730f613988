"""Text to token ids and back, with the ``tokenizers`` library alone: the rollout process loads no transformers."""

from collections.abc import Sequence
from pathlib import Path

from titan_grpo.errors import ConfigError


class TextCodec:
    """The tokenizer of a model directory (its ``tokenizer.json``). No special tokens are added when encoding."""

    def __init__(self, model_dir: str) -> None:
        # Imported here: the trainer's side of this room needs no tokenizer.
        from tokenizers import Tokenizer

        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"the rollout process needs a tokenizer.json in model.hf_assets_path, got {model_dir!r}")
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))
