"""What a call of an agent adds to a trajectory."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.agents import HELLO, caller, says
from tests.rollout.conftest import GroupOf
from titan_grpo.rollout.agents import Episode
from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.openai_api import ChatAnswer, ChatRequest


def test_a_template_that_rewrites_answers_writes_those_of_each_call_once(
    model: str, tmp_path: Path
) -> None:
    class Counting(TextCodec):
        count = 0

        def render(self, *given: Any, **named: Any) -> str:
            self.count += 1
            return super().render(*given, **named)

    template = tmp_path / "thoughts.jinja"
    said = "{{ m.content if loop.last else m.content.split('!')[-1] }}"
    template.write_text(f"{{% for m in messages %}}{{{{ m.role }}}}: {said}\n{{% endfor %}}")
    spec = RolloutSpec(model_dir=model, chat_template=str(template), max_completion_tokens=400)
    codec = Counting(model, spec)

    async def run() -> None:
        episode = Episode("key", 0, {}, asyncio.get_running_loop().create_future(), 60.0)
        messages: list[dict[str, Any]] = [{**HELLO}]
        for turn in range(8):
            request = ChatRequest("any", tuple(messages))
            call = episode.ask(codec, request, spec, lambda: False, False)
            said = {"role": "assistant", "content": f"hm!{turn}"}
            episode.answered(call, 4, f"hm!{turn}", ChatAnswer("id", 0, said, "stop", 9, 4))
            messages += [said, {**HELLO}]
        assert len(episode.calls) == 8

    asyncio.run(run())
    assert codec.count == 8 + 2 * 7


APART: dict[str, Any] = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
THOUGHTS = "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}"
TRIMMED = "{{ m.content.replace('hm\n', 'hm') }}"


@pytest.mark.parametrize(
    ("written", "sent", "sequences"),
    [
        (THOUGHTS, APART, 1),
        (TRIMMED, {"role": "assistant", "content": "<think>hm\n</think>so"}, 1),
        ("{{ m.content }}", APART, 2),
        (THOUGHTS, APART | {"reasoning_content": "oh"}, 2),
    ],
    ids=["as by LiteLLM", "as by Pydantic AI", "thoughts left out", "other thoughts"],
)
def test_an_answer_in_another_form_goes_on_where_the_template_writes_it_the_same(
    group_of: GroupOf,
    codec: TextCodec,
    tmp_path: Path,
    written: str,
    sent: dict[str, Any],
    sequences: int,
) -> None:
    template = tmp_path / "thoughts.jinja"
    template.write_text(f"{{% for m in messages %}}{{{{ m.role }}}}: {written}\n{{% endfor %}}")
    asked: list[list[int]] = []
    agent = caller({}, {"messages": [HELLO, sent, HELLO]})
    engine = says(codec, "<think>hm</think>so", log=asked)
    group = group_of(agent, [engine], chat_template=str(template))
    assert len(group.completions) == sequences
    if sequences == 1:
        assert asked[1][: len(asked[0])] == asked[0]
