"""What the rollout process loads before it asks for a completion: the task, its functions and
dataset, the tokenizer. The commands look at the same before they start a server."""

from titan_grpo.rollout.codec import TextCodec
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.rollout.task_runner import AnyTask, Filter
from titan_grpo.rollout.tasks.agent import AgentRows, load_parser
from titan_grpo.rollout.tasks.functions import codec_of, filter_of, ready


def load(spec: RolloutSpec) -> tuple[AnyTask | AgentRows, TextCodec, Filter | None]:
    """What asks and rewards, the tokenizer, and the filter of finished groups.

    Raises ConfigError or DataError for a mistake in what the keys name, TaskFailed where the user's
    code breaks.
    """
    task: AnyTask | AgentRows
    if spec.agent:
        task, codec = AgentRows.load(spec), codec_of(spec)
        codec.chat("")  # raises without a chat template
        load_parser(spec.tool_parser)
    else:
        task, codec = ready(spec)
    return task, codec, filter_of(spec, task)
