"""Built-in tasks: digits, the quickstart's toy, whose dense reward a tiny random model learns
within a minute; calculator, a small multi-turn tool loop; gsm8k, grade-school mathematics."""

import random
import re
import string
from collections.abc import Sequence
from fractions import Fraction

from titan_grpo.config.rollout import WorkerKeys
from titan_grpo.errors import ConfigError, DataError
from titan_grpo.rollout.task_runner import Codec, TaskOptions, Turn
from titan_grpo.rollout.tasks.functions import FunctionTask
from titan_grpo.samples import Prompt

PROMPT_LETTERS = 4


class Digits:
    """Task with prompts of a few random letters and "=". The reward is the share of digits among a
    completion's characters."""

    def __init__(self, options: TaskOptions) -> None:
        self._seed = options.seed

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Return letters drawn from a generator seeded with (seed, index)."""
        letters = random.Random(f"{self._seed}/{index}").choices(
            string.ascii_lowercase, k=PROMPT_LETTERS
        )
        return Prompt(index, codec.encode("".join(letters) + "="))

    async def reward(self, prompt: Prompt, text: str, token_ids: Sequence[int]) -> float:
        """Return the number of digits over the larger of the numbers of characters and of tokens,
        in 0..1: "12" and an end token give 2/3."""
        digits = sum(character in string.digits for character in text)
        return digits / max(len(text), len(token_ids), 1)


LARGEST = 999
TEMPLATE = "{a}+{b}=? [x+y] asks the calculator.\n"
CALL = re.compile(r"\[(\d{1,9})\+(\d{1,9})\]\s*\Z")
NUMBER = re.compile(r"\d+")


class Calculator:
    """Task of sums with a calculator that the policy may call. A turn that ends with "[12+34]" is
    answered by "=46" and a newline; any other turn ends the episode."""

    def __init__(self, options: TaskOptions) -> None:
        self._seed = options.seed

    def prompt(self, index: int, codec: Codec) -> Prompt:
        """Return a sum of two numbers drawn from a generator seeded with (seed, index)."""
        chance = random.Random(f"{self._seed}/{index}")
        a, b = chance.randint(0, LARGEST), chance.randint(0, LARGEST)
        return Prompt(index, codec.encode(TEMPLATE.format(a=a, b=b)), {"sum": a + b})

    async def turn(
        self, prompt: Prompt, turns: Sequence[Turn], codec: Codec
    ) -> Sequence[int] | None:
        """Return the calculator's answer; None if the turn does not call it."""
        call = CALL.search(turns[-1].text)
        return codec.encode(f"={int(call[1]) + int(call[2])}\n") if call else None

    async def episode_reward(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Return 1 if the last turn is the policy's and its last number is the sum, else 0."""
        numbers = NUMBER.findall(turns[-1].text) if turns[-1].sampled else []
        return float(bool(numbers) and int(numbers[-1][:18]) == prompt.payload["sum"])


PROMPT = "{question}\nThink step by step and put the final answer in \\boxed{{}}."
ANSWER_MARK = "####"

LONGEST_ANSWER = 100
"""Characters of a number that is read; a longer one is no answer."""

BOX = "\\boxed{"
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
"""A box. What is nested deeper than this is no number."""

DRESS = (
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[ !,:;]|\\?[$%£€]|~|\u00b0|\^(?:\\circ|\{\\circ\})"), ""),
    (re.compile("\u2212"), "-"),
    (re.compile(r"\\(?:text|textbf|mathrm|mathbf) *\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\[dt]?frac *(\d) *(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<!\d)\\[dt]?frac *\{([\d,.]+)\} *\{([\d,.]+)\}"), r"\1/\2"),
)
"""What LaTeX writes around a number, a currency, degrees, the Unicode minus; what is read in their
place."""

SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
WRITTEN = re.compile(rf"((?<!\d)[-+])?({PLAIN})(?:/({PLAIN}))?(?: *(?i:({'|'.join(SCALES)}))\b)?")
UNIT = re.compile(r"\.? *(?:/?[A-Za-z][A-Za-z /.]*(?:\^\{?\d\}?)?)?\.?")


def correct(completions: list[str], answer: list[str]) -> list[float]:
    """Return 1 for each final answer that is the reference's number, else 0."""
    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        wanted = str(reference).rpartition(ANSWER_MARK)[2].strip()  # a file may have numbers
        number = number_of(wanted)
        if number is None:
            raise DataError(
                f'an "answer" of the gsm8k task must end with a number, got {wanted!r:.100}:'
                " compare other answers with a function of your own (rollout.reward)"
            )
        rewards.append(float(final_number(completion) == number))
    return rewards


def final_number(text: str) -> Fraction | None:
    r"""Return the number in the last ``\boxed{...}`` of a text, else the last number in the text;
    None if there is none, or if the box has more than a number.

    >>> final_number(r"9 + 9, so \boxed{\frac{36}{2} \text{ dollars}}")
    Fraction(18, 1)
    """
    if (last := text.rfind(BOX)) >= 0:
        box = BOXED.match(text, last)
        return number_of(box[1]) if box else None
    found = [match[0] for match in WRITTEN.finditer(undressed(text))]
    return number_of(found[-1]) if found else None


def number_of(text: str) -> Fraction | None:
    """Return the value of a text that is a number, after any "x =", before any unit; else None.
    Computes nothing, except that 1.5 million is 1500000: "9^{9^9}" is no number."""
    said = undressed(text).rpartition("=")[2].strip("(){}" + string.whitespace)
    found = WRITTEN.match(said)
    if not found or not UNIT.fullmatch(said, found.end()) or len(found[0]) > LONGEST_ANSWER:
        return None
    sign, above, below, scale = found.groups()
    number, divisor = (Fraction(part.replace(",", "")) for part in (above, below or "1"))
    number *= SCALES[scale.lower()] if scale else 1
    return (-number if sign == "-" else number) / divisor if divisor else None


def undressed(text: str) -> str:
    """Return a text without what LaTeX writes around numbers."""
    for dress, plain in DRESS:
        text = dress.sub(plain, text)
    return text


GSM8K_SOURCE = "scripts/get_gsm8k.py makes that file"


def gsm8k(options: TaskOptions) -> FunctionTask:
    """Return a task of GSM8K rows in ``rollout.task_path``, {"question": ..., "answer": "... ####
    42"}, in the model's chat template. Also an example of a task with a reward function."""
    reward = [f"{__name__}:{correct.__name__}"]
    keys = WorkerKeys(reward=reward, dataset=options.path, prompt=PROMPT, seed=options.seed)
    try:
        return FunctionTask.load(keys)
    except (ConfigError, DataError) as error:
        # by the key that the user has set; this task has no filter
        text = str(error).replace("rollout.dataset", "rollout.task_path").partition(", or leave")[0]
        raise type(error)(f"{text} ({GSM8K_SOURCE})") from error
