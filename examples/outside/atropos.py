# An environment that samples on a server of the run, rewards digits, and talks to an Atropos API:
#
#   .venv-atropos/bin/python -m uvicorn atroposlib.api:app --port 8400
#   python examples/outside/atropos.py http://127.0.0.1:8000 http://127.0.0.1:8400
#
# beside the run, at a vLLM server of the quickstart's model (docs/first_job.md: Servers)
# that shows no version of an earlier run (one_box.sh starts all of them):
#
#   torchrun -m titan_grpo.train --job.config_file train_configs/quickstart_cpu.toml \
#     --job.dump_folder outputs/atropos --rollout.servers http://127.0.0.1:8000 \
#     --rollout.group_size 4 --rollout.source atropos --rollout.atropos_url http://127.0.0.1:8400

import sys
import time

from sampling import PROMPT, TOKENS, ask, begun, patiently, sample, version_of

GROUP, AHEAD = 4, 8
"""Completions of a group; groups that may wait in the API."""

MASKED, NO_LOGPROB = -100, 1.0
"""What a prompt's tokens have: they are not learnt from."""


def group(server):
    """One group in Atropos's form. The version is what Atropos itself does not know."""
    version, samples = version_of(server), [sample(server) for _ in range(GROUP)]
    before = len(PROMPT)
    return {
        "tokens": [PROMPT + tokens for tokens, _, _ in samples],
        "masks": [[MASKED] * before + tokens for tokens, _, _ in samples],
        "inference_logprobs": [[NO_LOGPROB] * before + logprobs for _, logprobs, _ in samples],
        "scores": [reward for _, _, reward in samples],
        "group_overrides": {"policy_version": version},
    }


def main(server, api):
    """Post groups until it is ended, or nothing answers any more."""
    begun(server)
    mine = {"desired_name": "digits", "max_token_length": len(PROMPT) + TOKENS}
    mine |= {"weight": 1.0, "group_size": GROUP}
    while (answer := ask(f"{api}/register-env", mine)[1])["status"] != "success":
        time.sleep(0.5)  # no trainer has registered yet
    while True:
        if ask(f"{api}/status")[1]["queue_size"] >= AHEAD:
            time.sleep(0.1)
            continue
        posted = patiently(group, server) | {"env_id": answer["env_id"]}
        status, said = ask(f"{api}/scored_data", posted)
        if status != 200:
            sys.exit(f"{api} refused a group: {said}")


if __name__ == "__main__":
    main(*sys.argv[1:])
