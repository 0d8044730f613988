# Own reward, own rows and the model's chat template, on the quickstart's model. From the root:
#
#   scripts/quickstart.sh --out outputs/own_reward \
#     --rollout.reward examples.own_reward.rewards:number \
#     --rollout.dataset examples/own_reward/data.jsonl


def number(completions, answer):
    """1 for the row's answer, and up to a half for being a number at all."""
    rewards = []
    for said, wanted in zip(completions, answer, strict=True):
        digits = sum(letter.isdigit() for letter in said) / max(len(said), 1)
        rewards.append(1.0 if said.strip() == wanted else digits / 2)
    return rewards
