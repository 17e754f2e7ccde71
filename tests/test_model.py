"""model.py against definitions written out a second time, in float64, on odd sizes."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE

from flash import LinearCrossEntropy, attention_naive
from model import ATTENTION, GPT, GPTConfig, UserError, derive, distribution, flops_per_token

SMALL = dict(vocab_size=65, block_size=12, n_layer=3, n_head=3, n_embd=24)


def make(seed=0, attention="auto", **changes):
    """A small float64 model whose weights are large enough to matter."""
    model = GPT(GPTConfig(**{**SMALL, **changes}), seed=seed, attention=attention).double().to(DEVICE)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p[:65].add_(torch.randn_like(p[:65]), alpha=0.2)
    return model


def batch(B=5, T=7, V=65):
    return torch.randint(0, V, (B, T), device=DEVICE), torch.randint(0, V, (B, T), device=DEVICE)


# ---- attention --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["torch", "naive"])
def test_attention_dropout_keeps_the_mean(name):
    qkv = torch.tensor([0.0, 0.0, 1.0], device=DEVICE).view(3, 1, 1, 1, 1).expand(3, 1, 1, 4, 2)
    mean = torch.stack([ATTENTION[name](qkv, 0.5) for _ in range(4000)]).mean(0)
    assert (mean - 1).abs().max() < 0.1


@pytest.mark.parametrize("name", list(ATTENTION))
def test_every_attention_gives_the_same_model(name):
    model = make(dropout=0.5)
    idx, _ = batch()
    assert not torch.equal(model(idx), model(idx))
    model.eval()
    want = model(idx)
    other = make(dropout=0.5, attention=name).eval()
    other.load_state_dict(model.state_dict())
    assert (other(idx) - want).abs().max() < 1e-12


# ---- the network ------------------------------------------------------------------------------------------------

def reference(model, idx):
    """GPT-2's equations once more, with plain tensor products."""
    p, config = dict(model.named_parameters()), model.config
    C, nh = config.n_embd, config.n_head

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * p[name + ".weight"] + p.get(name + ".bias", 0)

    def linear(x, name):
        return x @ p[name + ".weight"].T + p.get(name + ".bias", 0)

    x = p["wte.weight"][idx] + p["wpe.weight"][:idx.size(1)]
    for i in range(config.n_layer):
        q, k, v = linear(norm(x, f"blocks.{i}.ln_1"), f"blocks.{i}.attn.qkv").split(C, -1)
        heads = []
        for h in range(nh):
            cut = slice(h * C // nh, (h + 1) * C // nh)
            scores = q[..., cut] @ k[..., cut].transpose(1, 2) / math.sqrt(C // nh)
            scores += torch.full_like(scores, float("-inf")).triu(1)
            heads.append(scores.softmax(-1) @ v[..., cut])
        x = x + linear(torch.cat(heads, -1), f"blocks.{i}.attn.proj")
        h = linear(norm(x, f"blocks.{i}.ln_2"), f"blocks.{i}.mlp.fc")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
        x = x + linear(h, f"blocks.{i}.mlp.proj")
    return norm(x, "ln_f") @ p["wte.weight"][:config.vocab_size].T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("T", [1, 5, 12])
def test_logits_equal_gpt2s_equations(bias, T):
    model = make(bias=bias)
    idx, _ = batch(T=T)
    logits = model(idx)
    assert logits.shape == (5, T, 65)
    assert (logits - reference(model, idx)).abs().max() < 1e-11


def test_no_token_sees_a_later_one():
    model = make()
    idx, _ = batch(T=9)
    changed = idx.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 65
    assert torch.equal(model(idx)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(idx)[:, 5], model(changed)[:, 5])


def test_attend_is_the_seam():
    """An `attend` with a cache, one token at a time, gives the logits of the whole sequence at once."""
    model, cache, layers = make(), {}, []
    idx, _ = batch(T=9)

    def attend(layer, q, k, v):
        layers.append(layer)
        assert q.shape == (5, 3, 1, 8)
        old = cache.get(layer, (k[:, :, :0], v[:, :, :0]))
        cache[layer] = torch.cat([old[0], k], 2), torch.cat([old[1], v], 2)
        return attention_naive(q, *cache[layer])[0]

    steps = [model(idx[:, t:t + 1], torch.tensor([t], device=DEVICE), attend) for t in range(9)]
    assert (torch.cat(steps, 1) - model(idx)).abs().max() < 1e-12
    assert layers == [0, 1, 2] * 9


def test_positions_may_differ_by_sequence():
    model = make()
    idx, _ = batch(B=2, T=4)
    pos = torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]], device=DEVICE)
    both = model(idx, pos)
    for b in range(2):
        assert (both[b] - model(idx[b:b + 1], pos[b])[0]).abs().max() < 1e-12


@pytest.mark.parametrize("cuts", [[0, 3], [0, 1, 3], [0, 1, 2, 3]])
def test_stages_make_the_whole_model(cuts):
    whole = GPT(GPTConfig(**SMALL), seed=7).double().to(DEVICE)
    idx, targets = batch()
    x = idx
    stages = [GPT(GPTConfig(**SMALL), range(a, b), seed=7).double().to(DEVICE) for a, b in zip(cuts, cuts[1:])]
    for stage in stages[:-1]:
        x = stage(x)
    assert torch.equal(stages[-1](x), whole(idx))
    assert torch.equal(stages[-1].loss(x, targets), whole.loss(idx, targets))
    names = dict(whole.named_parameters())
    for stage in stages:                                           # by name, a stage's weights are the whole model's
        for name, p in stage.named_parameters():
            assert torch.equal(p, names[name])


# ---- the loss ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [1, 2, 3, 34, 35, 1000])
def test_loss_and_gradients_equal_cross_entropy(monkeypatch, rows):
    monkeypatch.setattr(LinearCrossEntropy, "chunk_bytes", rows * 128 * 8)
    model = make()
    idx, targets = batch()
    targets[torch.rand(targets.shape) < 0.3] = -1
    targets[0, 0] = 64
    want = F.cross_entropy(model(idx).reshape(-1, 65), targets.reshape(-1), ignore_index=-1)
    want_grads = torch.autograd.grad(want, list(model.parameters()))
    loss = model.loss(idx, targets)
    grads = torch.autograd.grad(3 * loss, list(model.parameters()))
    assert abs(loss - want) < 1e-12
    for a, b in zip(grads, want_grads):
        assert (a - 3 * b).abs().max() < 1e-12
    with torch.no_grad():
        assert abs(model.loss(idx, targets) - want) < 1e-12


def test_parts_with_unequal_targets_add_up():
    model = make()
    idx, targets = batch()
    targets[0] = targets[1, 2:] = -1
    total = (targets >= 0).sum()
    parts = sum(model.loss(idx[i:i + 2], targets[i:i + 2], total) for i in range(0, 5, 2))
    assert abs(parts - model.loss(idx, targets)) < 1e-12
    assert model.loss(idx, torch.full_like(targets, -1)) == 0      # nothing counts: no loss, not 0 / 0


def test_low_precision_loss_is_near():
    model = GPT(GPTConfig(**SMALL)).to(DEVICE)
    idx, targets = batch(B=9)
    want = model.loss(idx, targets)
    for dtype in (torch.bfloat16, torch.float16):
        loss = GPT(GPTConfig(**SMALL)).to(DEVICE, dtype).loss(idx, targets)
        assert loss.dtype == torch.float32 and abs(loss - want) < 0.02


def test_padded_ids_get_no_probability_and_no_gradient():
    model = make()
    with torch.no_grad():
        model.wte.weight[65:] = 50.0                               # huge logits, were they ever looked at
    idx, targets = batch()
    assert model.wte.weight.shape == (128, 24) and model(idx).size(-1) == 65
    want = F.cross_entropy(model(idx).reshape(-1, 65), targets.reshape(-1))
    loss = model.loss(idx, targets)
    loss.backward()
    assert abs(loss - want) < 1e-12
    assert model.wte.weight.grad[65:].abs().max() == 0 < model.wte.weight.grad[:65].abs().min()
    assert model.generate(idx, 20, temperature=5.0).max() < 65


# ---- initial values, counts -------------------------------------------------------------------------------------

def test_initialisation_is_gpt2s_and_a_function_of_seed_and_name():
    config = GPTConfig(vocab_size=1000, block_size=256, n_layer=8, n_head=4, n_embd=128)
    a, b, c = GPT(config, seed=3), GPT(config, seed=3), GPT(config, seed=4)
    deviations = {"wte": 0.02, "wpe": 0.01, "qkv": 0.02, "fc": 0.02, "proj": 0.02 / math.sqrt(16)}
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(p, q)
        if p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p) if name.endswith("weight") else torch.zeros_like(p)), name
        else:
            values = p[:1000]
            kind = next(kind for kind in deviations if kind in name)
            assert abs(values.std() / deviations[kind] - 1) < 0.03 and abs(values.mean()) < 2e-3, name
            assert not torch.equal(p, r)
    assert a.wte.weight[1000:].abs().max() == 0
    assert not torch.equal(a.blocks["0"].attn.qkv.weight, a.blocks["1"].attn.qkv.weight)


@pytest.mark.parametrize("L,nh,C,count", [(12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168),
                                          (36, 20, 1280, 774_030_080), (48, 25, 1600, 1_557_611_200)])
def test_parameter_counts_are_gpt2s(L, nh, C, count):
    config = GPTConfig(n_layer=L, n_head=nh, n_embd=C)
    assert GPT(config, seed=None).num_params() == count
    matrices = count - 1024 * C - (2 * L + 1) * 2 * C - L * 9 * C - L * 4 * C + L * 4 * C      # less wpe, norms, biases
    assert flops_per_token(config) == 6 * matrices + 12 * L * C * 1024


def test_derived_seeds_differ_and_stay():
    seeds = {derive(s, kind, n) for s in range(10) for kind in ("batch", "dropout") for n in range(100)}
    assert len(seeds) == 2000 and all(0 <= s < 2 ** 63 for s in seeds)
    assert derive(1, "batch", 0) == 5920463798422921716      # saved runs rely on it


# ---- generation -------------------------------------------------------------------------------------------------

def greedy(model, tokens, n):
    """The rule written out: restart from the last half when the context is full."""
    tokens, context = list(tokens), list(tokens[-model.config.block_size:])
    for _ in range(n):
        if len(context) > model.config.block_size:
            context = context[-max(1, model.config.block_size // 2):]
        token = reference(model, torch.tensor([context], device=DEVICE))[0, -1].argmax().item()
        tokens.append(token)
        context.append(token)
    return tokens


@pytest.mark.parametrize("block_size", [1, 2, 7, 12])
def test_generation_past_block_size(block_size):
    model = make(block_size=block_size)
    for T in sorted({1, max(1, block_size - 2), block_size, 2 * block_size + 1}):
        prompt = torch.randint(0, 65, (1, T), device=DEVICE)
        out = model.generate(prompt, 20, temperature=0)
        assert out[0].tolist() == greedy(model, prompt[0].tolist(), 20)
        assert torch.equal(out, model.generate(prompt, 20, temperature=0))
        assert torch.equal(out, model.generate(prompt, 20, top_k=1))


def test_generation_is_seeded_and_restores_training():
    model = make(dropout=0.3).train()
    idx, _ = batch()
    draw = [model.generate(idx, 15, generator=torch.Generator(DEVICE).manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    assert draw[0].shape == (5, 22) and torch.equal(draw[0][:, :7], idx) and model.training
    assert model.generate(idx, 0).shape == (5, 7)
    with pytest.raises(ValueError):
        model.generate(idx[:, :0], 1)


# ---- the distribution a token is drawn from ---------------------------------------------------------------------

def brute_force(logits, temperature, top_k, top_p):
    weights = [math.exp(z / temperature) for z in logits]
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    total = sum(weights[i] for i in order)
    kept, before = [], 0.0
    for i in order:
        if top_p is None or before < top_p:
            kept.append(i)
        before += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 11, 10_000])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.6, 0.97, 1.0])
def test_distribution(temperature, top_k, top_p):
    logits = torch.randn(4, 3, 11, device=DEVICE)
    probs = distribution(logits, temperature, top_k, top_p)
    for row, got in zip(logits.view(-1, 11), probs.view(-1, 11)):
        want = torch.tensor(brute_force(row.tolist(), temperature, top_k, top_p), device=DEVICE)
        assert (got - want).abs().max() < 1e-5


def test_distribution_at_its_edges():
    logits = torch.tensor([[1.0, 7.0, 7.0, -2.0]])
    one_hot = torch.tensor([[0.0, 1.0, 0.0, 0.0]])
    for options in (dict(temperature=0), dict(temperature=1e-30), dict(top_k=1), dict(top_p=1e-9)):
        assert torch.equal(distribution(logits, **options), one_hot), options
    huge = distribution(torch.tensor([[3e38, -3e38, 0.0]]), 1e-3)
    assert torch.equal(huge, torch.tensor([[1.0, 0.0, 0.0]]))
    assert torch.equal(distribution(logits.half(), 0.7), distribution(logits, 0.7))
    for bad in (dict(temperature=-1), dict(temperature=math.nan), dict(temperature=math.inf), dict(top_k=0),
                dict(top_k=-3), dict(top_p=0.0), dict(top_p=1.1)):
        with pytest.raises(UserError):
            distribution(logits, **bad)


@pytest.mark.parametrize("changes,words", [(dict(n_embd=25), "n_embd=25.*n_head=3"), (dict(n_layer=0), "n_layer=0"),
                                           (dict(dropout=1.0), "dropout=1.0"), (dict(vocab_size=0), "vocab_size=0"),
                                           (dict(block_size=-1), "block_size=-1")])
def test_config_errors_name_the_numbers(changes, words):
    with pytest.raises(UserError, match=words):
        GPTConfig(**{**SMALL, **changes})


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="T=13.*block_size=12"):
        make()(torch.zeros(1, 13, dtype=torch.int64, device=DEVICE))
