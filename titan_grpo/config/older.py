"""The keys of the older GRPO trainer on torchtitan (its sections ``[grpo]`` and ``[peft]``) and
their counterparts here.

One table serves the hint at an unknown key, ``titan-grpo init --from`` and the page
docs/from_the_older_trainer.md. Source: NousResearch/torchtitan, torchtitan/grpo.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_grpo.config.grpo import GRPO
from titan_grpo.config.rollout import Rollout
from titan_grpo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Older:
    """One key of the older trainer."""

    default: Any
    """Its default there; None: unset."""

    key: str = ""
    """Its key here, section first; empty: no counterpart."""

    note: str = ""
    """The difference, or why there is no counterpart."""

    keep: bool = True
    """Whether a converted job that does not set the key gets the older default where it differs.
    False for keys of the correction: only jobs that set ``rollout_is_threshold`` get theirs."""


ENGINE = "the servers' own matter: give it to each server's command line"
CORRECTION = "off there by default; here off-policy data is corrected unless a job forbids it"

OLDER: dict[str, Older] = {
    "sglang_urls": Older([], "rollout.servers", "with http://, and vLLM servers too"),
    "sglang_slurm_num_nodes": Older(
        -1,
        "rollout.servers_slurm",
        "not a number of hosts: the variable with the host list of the servers' part of the job"
        " (SLURM_JOB_NODELIST_HET_GROUP_1), one server per host at rollout.servers_port",
    ),
    "sglang_port": Older(29500, "", "none: each lane takes a free port"),
    "sglang_tp": Older(1, "", ENGINE),
    "sglang_pp": Older(1, "", ENGINE),
    "sglang_ep": Older(1, "", ENGINE),
    "async_weight_update": Older(False, "grpo.async_weight_update"),
    "temperature": Older(
        1.0, "rollout.temperature", "one key for sampling and for the trainer's logits"
    ),
    "grpo_by_token": Older(
        False,
        "grpo.loss_normalization",
        'true is "token", false is "sequence"; the default is the other way round here',
    ),
    "clip_ratio_lower_bound": Older(0.25, "grpo.clip_ratio_lower_bound"),
    "clip_ratio_upper_bound": Older(0.25, "grpo.clip_ratio_upper_bound"),
    "policy_ratio_type": Older("token", "grpo.policy_ratio_type"),
    "num_microbatches": Older(1, "grpo.num_microbatches"),
    "rollout_is_threshold": Older(None, "grpo.rollout_is_threshold", CORRECTION, keep=False),
    "rollout_is_level": Older("sequence", "grpo.rollout_is_level", keep=False),
    "rollout_is_mode": Older("mask", "grpo.rollout_is_mode", keep=False),
    "rollout_is_threshold_lower": Older(
        None, "grpo.rollout_is_threshold_lower", "0 is 1 / rollout_is_threshold", keep=False
    ),
    "rollout_is_veto_threshold": Older(1e-4, "grpo.rollout_is_veto_threshold", keep=False),
    "onpolicy_logp_threshold": Older(
        0.0,
        "grpo.onpolicy_logp_threshold",
        "here it leaves the tokens out of the loss; there, of the metrics",
    ),
    "kl_beta": Older(0.0, "grpo.kl_beta"),
    "kl_estimator_type": Older(
        "k3", "grpo.kl_estimator_type", "k2 is a further one, and k1 in the reward"
    ),
    "ref_model_ema": Older(0.0, "grpo.ref_model_ema"),
    "entropy_loss_weight": Older(0.0, "grpo.entropy_loss_weight"),
    "logit_loss_weight": Older(0.0, "grpo.logit_loss_weight"),
    "pos_scaler": Older(1.0, "grpo.pos_scaler"),
    "neg_scaler": Older(1.0, "grpo.neg_scaler"),
    "scale_adv_by_len": Older(False, "grpo.scale_adv_by_len"),
    "ptx_mixin_batchsize": Older(0, "grpo.ptx_mixin_batchsize"),
    "ptx_scale": Older(1.0, "grpo.ptx_scale", "there it was declared and not used"),
    "ptx_scale_by_tokens": Older(False, "grpo.ptx_scale_by_tokens", "there it crashed"),
}
"""Name in ``[grpo]`` there -> counterpart here."""

PEFT = {"lora_rank": "lora.rank", "lora_alpha": "lora.alpha"}
"""Name in ``[peft]`` there -> our key. The adapted layers there are our default."""

NO_PEFT = {
    "lora_dropout": "adapters have no dropout here",
    "lora_train_norm": "norms are frozen beside adapters",
    "train_embeddings": "the embedding is frozen beside adapters",
    "train_output_layer": "the head is frozen beside adapters",
    "layers_to_train": "every block has adapters; lora.targets names layers in a block",
}
"""Name in ``[peft]`` there without a counterpart -> why. Unset, 0 and false mean the same."""


def value_here(name: str, value: Any) -> Any:
    """Return the value of an older key as written here.

    >>> value_here("grpo_by_token", False), value_here("sglang_urls", ["a:1"])
    ('sequence', ['http://a:1'])
    """
    if name == "grpo_by_token":
        return "token" if value else "sequence"
    if name == "sglang_urls":
        return [url if "://" in url else f"http://{url}" for url in value]
    if name == "sglang_slurm_num_nodes" and value <= 0:
        return ""  # not from SLURM
    return value


def default_here(key: str) -> Any:
    """Return the default of one of our keys, such as "grpo.kl_beta"."""
    section, _, name = key.partition(".")
    return getattr({"grpo": GRPO, "rollout": Rollout}[section](), name)


def differs(name: str) -> bool:
    """Return whether the default of an older key differs here."""
    of = OLDER[name]
    there = value_here(name, of.default)
    # Unset there and 0 here mean the same, unless the note says otherwise.
    return bool(of.key) and (there or 0) != (default_here(of.key) or 0)


def hint(key: str) -> str:
    """Return the counterpart of an older key (in any section) as text, or "" if it is not an older
    key.

    >>> hint("grpo.sglang_urls")
    'it is rollout.servers here (with http://, and vLLM servers too)'
    """
    if key.partition(".")[0] == "peft":
        named = ", ".join(f"{name} is {ours}" for name, ours in PEFT.items())
        return f"adapters are [lora] here ({named}; `titan-grpo init --from` converts a job)"
    of = OLDER.get(key.rpartition(".")[2])
    if of is None:
        return ""
    if not of.key:
        return f"a key of the older trainer; {of.note}"
    return f"it is {of.key} here" + (f" ({of.note})" if of.note else "")


@dataclass(frozen=True, slots=True)
class Converted:
    """A key of the older trainer, converted."""

    key: str
    value: Any
    """None: it has no value here; the note gives the reason."""

    note: str = ""


def convert(older: Mapping[str, Any]) -> list[Converted]:
    """Return our keys for a ``[grpo]`` table of the older trainer, and its defaults that differ.
    Pure.

    Keys that the older trainer does not have get the value None. Raises ConfigError for a value of
    another type than there.
    """
    out = []
    for name, value in older.items():
        of = OLDER.get(name)
        if of is not None and not _of_type(value, of.default):
            form = {"[]": "a list of texts", "None": "a number"}.get(repr(of.default))
            form = form or f"like {of.default!r}"
            raise ConfigError(
                f"grpo.{name} must be {form}, as the older trainer has it, got {value!r:.200}"
            )
        if of is None:
            out.append(Converted(f"grpo.{name}", None, "no key of the older trainer"))
        elif not of.key:
            out.append(Converted(f"grpo.{name}", None, of.note))
        elif name == "sglang_slurm_num_nodes":
            if value > 0:
                out.append(Converted(of.key, None, of.note))
        else:
            out.append(Converted(of.key, value_here(name, value), of.note))
    corrected = "rollout_is_threshold" in older
    for name, of in OLDER.items():
        if name not in older and (of.keep or corrected) and differs(name):
            note = "the older trainer's default"
            out.append(Converted(of.key, value_here(name, of.default), note))
    return out


def _of_type(value: Any, default: Any) -> bool:
    """Return whether a value has the type of an older key's default."""
    if isinstance(default, list):
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if isinstance(default, float) or default is None:  # keys without a default are numbers
        return isinstance(value, int | float)
    return isinstance(value, type(default))


def convert_peft(older: Mapping[str, Any]) -> list[Converted]:
    """Return our keys for a ``[peft]`` table of the older trainer; none if its adapters are off.
    Pure. Raises ConfigError for a rank or scale that is no number.

    >>> convert_peft({"enable_peft": True, "lora_rank": 8, "lora_alpha": 16})[0]
    Converted(key='lora.rank', value=8, note='')
    """
    if not (older.get("enable_peft") and older.get("use_lora", True)):
        return []
    for name in PEFT.keys() & older.keys():
        if not isinstance(older[name], int | float):
            raise ConfigError(f"peft.{name} must be a number, got {older[name]!r:.200}")
    out = [
        Converted(ours, float(older[name]) if name == "lora_alpha" else older[name])
        for name, ours in PEFT.items()
        if name in older
    ]
    missing = [
        Converted(ours, None, f"{name} was the older trainer's default: write its value")
        for name, ours in PEFT.items()
        if name not in older
    ]
    lost = [
        Converted(f"lora.{name}", None, why) for name, why in NO_PEFT.items() if older.get(name)
    ]
    return out + missing + lost


HEADER = """# From the older trainer

The GRPO trainer of NousResearch/torchtitan has one section, `[grpo]`; here `[rollout]` and
`[weight_sync]` stand beside it. A job of the older trainer is converted by

```bash
titan-grpo init --from OLD.toml --out new.toml
titan-grpo doctor --job.config_file new.toml
```

which keeps torchtitan's own sections, writes our name for each key, and writes out each older
default that differs, so that nothing changes but what this page lists. **Bold** defaults are the
ones that differ. An older key in a TOML file is refused with the same hint.

| key there, in `[grpo]` | key here | default there | default here | what is different |
|---|---|---|---|---|
"""

FOOTER = """
Of its section `[peft]`, `lora_rank` and `lora_alpha` are `lora.rank` and `lora.alpha` here
([lora.md](lora.md)), on the same layers; dropout, trained norms, embeddings or head, and a choice
of blocks have no counterpart.

Not a key, and different all the same:

* Each token's log-probability of the engine is compared with the trainer's of the same token.
  There they were one position apart, so `rollout_is_threshold` weighted tokens by their
  neighbours.
* A step's rewards come from `rollout.source = "atropos"` (the same API), from environments that
  push, or from a reward function. A batch of the API is `prompts_per_step * group_size` sequences.
* Every token carries the version that sampled it, or a bound on it if the engine does not report
  it (vLLM 0.32). No token older than `rollout.max_staleness` is trained on. There only the
  environment's `max_batches_offpolicy` bounded it.
* A group with a completion without log-probabilities is dropped and counted, not trained on with a
  weight of zero.
* The gradient of the sequence ratio is GSPO's.
* Normalisation and advantages are computed once, from the whole step, over all ranks and
  micro-batches: how rows are distributed changes no weight, and what is left out stays out.
* Text (`ptx_mixin_batchsize`), its order and a moving reference model are in the checkpoint. One
  without the reference can be resumed with `checkpoint.exclude_from_loading = ["reference"]`.
"""


def page() -> str:
    """Return the page of documentation, as Markdown."""
    rows = []
    for name, of in OLDER.items():
        here = repr(default_here(of.key)) if of.key else ""
        there = "unset" if of.default is None else repr(of.default)
        mark = "**" if differs(name) else ""
        cells = (
            f"`{name}`",
            f"`{of.key}`" if of.key else "none",
            f"{mark}`{there}`{mark}",
            f"{mark}`{here}`{mark}" if here else "",
            of.note,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return HEADER + "\n".join(rows) + "\n" + FOOTER
