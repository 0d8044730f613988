# An environment that samples on a server of the run, rewards digits, and pushes its groups:
#
#   python examples/outside/pushing.py http://127.0.0.1:8000 http://127.0.0.1:8300
#
# beside the run, at a vLLM server of the quickstart's model (docs/first_job.md: Servers)
# that shows no version of an earlier run (one_box.sh starts all of them):
#
#   torchrun -m titan_grpo.train --job.config_file train_configs/quickstart_cpu.toml \
#     --job.dump_folder outputs/pushing --rollout.servers http://127.0.0.1:8000 \
#     --rollout.group_size 4 --rollout.source push --rollout.push_address 127.0.0.1:8300

import secrets
import sys
import time

from sampling import PROMPT, ask, begun, patiently, sample, version_of

GROUP = 4

AGAIN = (429, 503)
"""Statuses after which a group is sent again: enough waits for the trainer; the run is busy."""


def group(server):
    """One group of the version that the server holds now; later tokens may be of a newer one."""
    version = version_of(server)
    completions = [sample(server) for _ in range(GROUP)]
    keys = ("tokens", "logprobs", "reward")
    return {
        # One that is sent again, since its answer was lost, is taken once.
        "id": secrets.token_hex(8),
        "policy_version": version,
        "prompt_tokens": PROMPT,
        "completions": [dict(zip(keys, each, strict=True)) for each in completions],
    }


def main(server, run):
    """Push until neither the run nor one that goes on from it answers."""
    begun(server)
    while True:
        try:
            made, status = patiently(group, server), AGAIN[0]
            while status in AGAIN:
                status, answer = patiently(ask, f"{run}/groups", {"groups": [made]})
                time.sleep(0.2 * (status in AGAIN))
        except OSError as error:
            print(f"the run has ended: {error}")
            return
        if status not in (202, 409):  # 409: too old by now, so another one
            sys.exit(f"{run} refused a group: {answer}")


if __name__ == "__main__":
    main(*sys.argv[1:])
