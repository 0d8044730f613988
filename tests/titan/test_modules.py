"""What GRPO changes in torchtitan's models, on the tiny ones: packed rows against one row per
sequence, replayed routes, logits in float32."""

import random
from array import array
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.rigs.present import present
from tests.rigs.tiny_model import loaded
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.algorithm.distribution import token_logprobs
from titan_grpo.algorithm.rows import attention_rows, build
from titan_grpo.errors import ConfigError
from titan_grpo.samples import Completion, Group, Prompt
from titan_grpo.titan.flavors import FLAVORS
from titan_grpo.titan.modules import (
    PackedAttention,
    RouterReplay,
    compute_head_in_fp32,
    route_width,
    routers,
)
from titan_grpo.titan.tiny import Kind

OPTIONS = BatchOptions(token_budget=160, max_len=80)


def random_groups(seed: int) -> list[Group]:
    source = random.Random(seed)
    groups = []
    for index in range(source.randint(1, 4)):
        prompt = Prompt(
            index, tuple(source.randrange(4, 128) for _ in range(source.randint(1, 20)))
        )
        lengths = [
            source.choice((1, 2, 7, 8, 9, source.randint(1, 60)))
            for _ in range(source.randint(2, 4))
        ]
        completions = tuple(
            Completion(
                tuple(source.randrange(4, 128) for _ in range(n)),
                (-2.0,) * n,
                "stop",
                0,
                0,
                "s",
                source.random(),
            )
            for n in lengths
        )
        groups.append(Group(prompt, completions))
    return groups


Ids = tuple[tuple[int, ...], tuple[int, ...]]
Computed = tuple[dict[Ids, list[torch.Tensor]], dict[str, torch.Tensor]]


def computed(
    model: torch.nn.Module,
    packed: PackedAttention | None,
    micro_batches: list[dict[str, torch.Tensor]],
) -> Computed:
    """Log-probabilities by sequence (its inputs and labels), and the gradient of their weighted
    sum."""
    model.zero_grad()
    found: dict[Ids, list[torch.Tensor]] = {}
    for mb in micro_batches:
        rows = attention_rows(mb["sequence"]) if "positions" in mb else None
        with packed.using(rows, torch.device("cpu")) if packed else nullcontext():
            logits = model(mb["inputs"], positions=mb.get("positions"))
            logprobs = token_logprobs(logits, mb["labels"], 1.0, 64)
            (logprobs * mb["weights"] * (1 + mb["advantages"])).sum().backward()
        for number in range(int(mb["sequence"].max()) + 1):
            mine = mb["sequence"] == number
            key = (tuple(mb["inputs"][mine].tolist()), tuple(mb["labels"][mine].tolist()))
            found.setdefault(key, []).append(logprobs.detach()[mine])
    return found, {name: present(p.grad).clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", FLAVORS)
def test_packed_and_padded_rows_give_the_same_logprobs_and_gradients(kind: Kind) -> None:
    plain, model, packed = loaded(kind), loaded(kind), PackedAttention()
    packed.install(model)
    assert [name for name, _ in plain.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    for seed in range(6):
        groups = random_groups(seed)
        [padded_batches], [packed_batches] = (
            plan(
                groups, 1, BatchOptions(OPTIONS.token_budget, OPTIONS.max_len, pack=pack)
            ).micro_batches()
            for pack in (False, True)
        )
        expected, expected_grads = computed(plain, None, padded_batches)
        got, grads = computed(model, packed, packed_batches)
        assert expected.keys() == got.keys()
        for key, rows in expected.items():
            for one, other in zip(rows, got[key], strict=True):
                torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-5)
        assert max(float(g.abs().max()) for g in expected_grads.values()) > 1e-3
        for name, grad in expected_grads.items():
            scale = float(grad.abs().max())
            torch.testing.assert_close(
                grads[name], grad, atol=2e-5 * max(scale, 1.0), rtol=1e-4, msg=f"{seed} {name}"
            )


def test_a_rank_without_sequences_runs_forward_and_backward_to_zero_gradients() -> None:
    model, packed = loaded("llama3"), PackedAttention()
    packed.install(model)
    options = BatchOptions(OPTIONS.token_budget, OPTIONS.max_len, pack=True)
    idle = plan(random_groups(0)[:1], 2, options).micro_batches()
    [empty] = [rank for rank in idle if int(rank[0]["sequence"].max()) < 0]
    found, grads = computed(model, packed, empty)
    assert found == {}
    assert all(not grad.any() for grad in grads.values())


def test_a_model_without_sdpa_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="pack_sequences needs a model with sdpa"):
        PackedAttention().install(torch.nn.Linear(2, 2))


CPU = torch.device("cpu")


def chosen(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """[R, L, layers * experts of a token]: what the model's own routers choose."""
    found = []
    hooks = [
        router.register_forward_hook(lambda _m, _i, out: found.append(out[1]))
        for router in routers(model).values()
    ]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    return torch.cat(found, -1).view(*tokens.shape, -1).short()


def routes_of(count: int, seed: int) -> bytes:
    """uint16 bytes of ``count`` tokens: two experts of 8 in each of two layers, at random."""
    source = torch.Generator().manual_seed(seed)
    pairs = torch.stack(
        [torch.randperm(8, generator=source)[:2] for _ in range(2 * count)]
    ).flatten()
    return pairs.to(torch.int16).numpy().tobytes()


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(4, 128, (2, 12), generator=torch.Generator().manual_seed(5))


def test_a_model_on_its_own_routes_computes_the_same_bit_for_bit(tokens: torch.Tensor) -> None:
    model, replay = loaded("qwen3_moe"), RouterReplay()
    own = chosen(model, tokens)
    before = model(tokens)
    replay.install(model)
    with replay.using(own, CPU):
        after = model(tokens)
        metrics = replay.take_metrics()
    assert torch.equal(before, after)
    assert metrics == {"routes_differ_sum": 0, "replayed_sum": 24}


def test_other_routes_are_the_ones_that_forward_and_backward_use(tokens: torch.Tensor) -> None:
    model: Any = loaded("qwen3_moe")
    replay = RouterReplay()
    own = chosen(model, tokens)
    other = (own + 1) % 8
    other[0, 0] = own[0, 0]
    replay.install(model)
    with replay.using(other, CPU):
        logits = model(tokens)
        metrics = replay.take_metrics()
        logits.logsumexp(-1).sum().backward()
    used = {int(e) for e in other[..., :2].flatten()}
    moe = model.layers["0"].moe
    older = hasattr(moe, "experts")
    experts = (moe.experts.w1 if older else moe.routed_experts.inner_experts.w1_EFD).grad
    assert {e for e in range(8) if experts[e].abs().sum() > 0} == used
    assert moe.router.gate.weight.grad.abs().sum() > 0
    assert metrics == {"routes_differ_sum": 23, "replayed_sum": 24}
    assert not torch.allclose(logits, model(tokens))


def test_a_layer_that_recomputes_selected_operations_takes_its_routes_again(
    tokens: torch.Tensor,
) -> None:
    plain: Any = loaded("qwen3_moe")
    model: Any = loaded("qwen3_moe")
    routes = (chosen(model, tokens) + 1) % 8
    # as torchtitan does with activation_checkpoint.mode = "selective"
    saved = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    for name, layer in model.layers.items():
        model.layers[name] = checkpoint_wrapper(layer, context_fn=saved)
    found = []
    for each in (plain, model):
        replay = RouterReplay()
        replay.install(each)
        with replay.using(routes, CPU):
            each(tokens).logsumexp(-1).sum().backward()
            metrics = replay.take_metrics()
        found.append([*(present(p.grad) for p in each.parameters()), *metrics.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_where_a_row_has_no_routes_the_trainers_own_stand(tokens: torch.Tensor) -> None:
    model, replay = loaded("qwen3_moe"), RouterReplay()
    own = chosen(model, tokens)
    before = model(tokens)
    replay.install(model)
    given = (own + 3) % 8
    given[1] = -1
    with replay.using(given, CPU):
        after = model(tokens)
        assert replay.take_metrics()["replayed_sum"] == 12
    # Not bit for bit: the experts compute with tokens of the other row beside these.
    torch.testing.assert_close(before[1], after[1])
    assert not torch.allclose(before[0], after[0])


@pytest.mark.parametrize("pack", [False, True])
def test_routes_travel_with_their_tokens_into_every_micro_batch(pack: bool) -> None:
    groups = []
    for index, (prompt, lengths) in enumerate((((5, 6, 7), (4, 9)), ((8, 9), (1, 12)))):
        completions = tuple(
            Completion(
                tuple(range(10, 10 + n)),
                (-2.0,) * n,
                "stop",
                0,
                0,
                "s",
                float(n),
                routes=routes_of(len(prompt) + n - 1, 100 * index + n),
            )
            for n in lengths
        )
        groups.append(Group(Prompt(index, prompt), completions))
    options = BatchOptions(token_budget=64, max_len=32, pack=pack, routes=4)
    [rows] = plan(groups, 1, options).rows
    model, packed, replay = loaded("qwen3_moe"), PackedAttention(), RouterReplay()
    assert route_width(model) == 4
    replay.install(model)
    if pack:
        packed.install(model)
    logits = {}
    for mb in build(rows):
        at = attention_rows(mb["sequence"]) if pack else None
        with packed.using(at, CPU), replay.using(mb["routes"], CPU), torch.no_grad():
            out = model(mb["inputs"], positions=mb.get("positions"))
        for row in range(len(out)):
            for number in mb["sequence"][row].unique().tolist():
                mine = mb["sequence"][row] == number
                if number >= 0:
                    logits[tuple(mb["inputs"][row][mine].tolist())] = out[row][mine]
    for group in groups:
        for completion in group.completions:
            sequence = (*group.prompt.token_ids, *completion.token_ids)[:-1]
            routes = torch.frombuffer(bytearray(completion.routes), dtype=torch.int16)
            alone = torch.tensor([sequence])
            with replay.using(routes.view(1, -1, 4), CPU), torch.no_grad():
                wanted = model(alone, positions=torch.arange(len(sequence))[None])[0]
            torch.testing.assert_close(logits[sequence], wanted, atol=2e-5, rtol=0)


def test_a_group_with_a_completion_without_routes_is_left_out_and_counted() -> None:
    def completion(routes: bytes) -> Completion:
        return Completion((7, 8), (-1.0, -1.0), "stop", 0, 0, "s", 1.0, routes=routes)

    whole = Group(Prompt(0, (5,)), (completion(routes_of(2, 1)), completion(routes_of(2, 2))))
    without = Group(Prompt(1, (5,)), (completion(routes_of(2, 3)), completion(b"")))
    cut = Group(Prompt(2, (5,)), (completion(routes_of(1, 3)), completion(routes_of(2, 4))))
    batch = plan([whole, without, cut], 1, BatchOptions(64, 32, routes=4))
    assert batch.rows[0].cuts == (2,)
    assert batch.dropped == {"no_routes": 2, "group_of_defective": 2}
    assert "routes" not in plan([without], 1, BatchOptions(64, 32)).micro_batches()[0][0]


@pytest.mark.parametrize(("expert", "known"), [(7, True), (-1, True), (8, False), (-2, False)])
def test_a_route_to_an_expert_that_the_model_lacks_takes_its_group_out(
    expert: int, known: bool
) -> None:
    routes = array("h", (0, expert) * 4).tobytes()
    groups = [
        Group(Prompt(n, (5,)), (Completion((7, 8), (-1.0, -1.0), "stop", 0, 0, "s", routes=each),))
        for n, each in enumerate((routes_of(2, 1), routes))
    ]
    batch = plan(groups, 1, BatchOptions(64, 32, routes=4, experts=8))
    assert batch.dropped == ({} if known else {"no_routes": 1})


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"router_replay needs an MoE"):
        RouterReplay().install(loaded("qwen3"))


def head_of(model: Any) -> Any:
    """The last layer, which torchtitan 0.3 names otherwise."""
    return getattr(model, "output", None) or model.lm_head


@pytest.mark.parametrize("kind", ["qwen3", "llama3"])
def test_logits_are_float32_products_of_what_mixed_precision_gives_the_head(kind: Kind) -> None:
    model: Any = loaded(kind)
    names = set(model.state_dict())
    model = model.to(torch.bfloat16)
    tokens = torch.arange(4, 36)[None]
    hidden, head = [], head_of(model)
    head.register_forward_pre_hook(lambda _m, given: hidden.append(given[0]))
    before = model(tokens)
    compute_head_in_fp32(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = model(tokens)
    assert (before.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(after, hidden[1].float() @ head.weight.float().T)
    # What bfloat16 loses: up to 1 in 256 of a logit.
    assert 1e-3 < (after - before).abs().max() < after.abs().max() / 100
    after.logsumexp(-1).sum().backward()
    assert head.weight.grad.abs().sum() > 0
    assert set(model.state_dict()) == names


def test_where_autocast_mixes_precision_the_head_has_its_types_and_not_the_optimizers() -> None:
    model: Any = loaded("llama3")
    hidden, head = list[torch.Tensor](), head_of(model)
    head.register_forward_pre_hook(lambda _m, given: hidden.append(given[0]))
    compute_head_in_fp32(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(torch.arange(4, 36)[None])
    assert (hidden[0].dtype, head.weight.dtype) == (torch.float32, torch.float32)
    sent = [x.bfloat16().float() for x in (hidden[0], head.weight)]
    assert torch.equal(logits, torch.nn.functional.linear(*sent))
    logits.logsumexp(-1).sum().backward()
    assert head.weight.grad.dtype == torch.float32


def test_a_last_layer_that_is_no_plain_projection_is_refused() -> None:
    model = torch.nn.Module()
    model.output = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(ConfigError, match="fp32_lm_head needs"):
        compute_head_in_fp32(model)
