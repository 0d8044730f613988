"""A job's configuration without a file: every section, at its defaults but for what is given."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from titan_grpo import config
from titan_grpo.titan.jobfile import JobConfig, merged


def job(**given: Any) -> Any:
    """A job with these sections, each whole or as a mapping of what differs from its defaults.
    Nothing is derived and no rule is checked.

    Example: ``job(grpo=GRPO(kl_beta=0.1), training={"seq_len": 64})``.
    """
    made = merged(JobConfig, config.JobConfig)()
    for name, section in given.items():
        plain = getattr(made, name)
        whole = replace(plain, **section) if isinstance(section, Mapping) else section
        setattr(made, name, whole)
    return made
