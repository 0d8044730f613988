"""The model's tokenizer and chat template, as tasks see them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_grpo.config.task import TEXT
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.chat import ChatTemplate


class TextCodec:
    """The tokenizer of a model directory (its ``tokenizer.json``), without special tokens. Uses
    ``tokenizers`` alone: the rollout process loads no transformers."""

    def __init__(
        self,
        model_dir: str,
        chat_template: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """The template is read when a prompt first asks for it: a task that makes its own text
        needs none."""
        # Imported here: the trainer's side of this room needs no tokenizer.
        from tokenizers import Tokenizer

        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                "the rollout process needs a tokenizer.json in model.hf_assets_path, got"
                f" {model_dir!r}"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        self._model_dir, self._chat_template = model_dir, chat_template
        self._variables = dict(chat_template_kwargs or {})
        self._template: ChatTemplate | None = None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def chat(
        self, said: str | Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a prompt: messages in the chat template, up to where the model answers. A
        text is the user's one message, or with rollout.chat_template = "none" the prompt as it is.

        Raises ConfigError without a template, DataError for messages that it refuses.
        """
        if self._chat_template == TEXT:
            if not isinstance(said, str):
                raise DataError(
                    f'prompts must be texts with rollout.chat_template = "{TEXT}", got'
                    f" {said!r:.200}"
                )
            return self.encode(said)
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        # The text has the special tokens that the template writes: no second <bos>.
        return self.encode(self.render(messages, tools))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        ask: bool = True,
    ) -> str:
        """The text of messages in the chat template; with ``ask`` up to where the model answers.
        Raises as ``chat``."""
        if self._template is None:
            self._template = ChatTemplate.of_model(self._model_dir, self._chat_template)
        variables = {"add_generation_prompt": ask, **self._variables}
        return self._template.render(messages, tools, **variables)

    def spell(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
