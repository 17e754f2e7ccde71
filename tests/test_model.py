"""model.py against definitions written out a second time, in float64, on odd sizes."""

import errno
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, gpt2_tensors, write_gpt2, write_safetensors, write_tokenizer

import model as model_py
from flash import LinearCrossEntropy, attention_naive
from model import (ATTENTION, GPT, Experts, GPTConfig, MoE, Tokenizer, UserError, WriteError, config_of, derive,
                   distribution, flops_per_token, is_matrix, load_model, program, replacing)

SMALL = dict(vocab_size=65, block_size=12, n_layer=3, n_head=3, n_embd=24)
SPARSE = dict(n_expert=5, top_k=2, capacity_factor=0.8)


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
        if config.n_expert:
            x = x + moe_loop(model.blocks[str(i)].mlp, norm(x, f"blocks.{i}.ln_2"))[0]
            continue
        h = linear(norm(x, f"blocks.{i}.ln_2"), f"blocks.{i}.mlp.fc")
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
        x = x + linear(h, f"blocks.{i}.mlp.proj")
    return norm(x, "ln_f") @ p["wte.weight"][:config.vocab_size].T


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("T", [1, 5, 12])
@pytest.mark.parametrize("experts", [{}, SPARSE, dict(SPARSE, top_k=1)])
def test_logits_equal_gpt2s_equations(experts, bias, T):
    model = make(bias=bias, **experts)
    idx, _ = batch(T=T)
    logits = model(idx)
    assert logits.shape == (5, T, 65)
    assert (logits - reference(model, idx)).abs().max() < 1e-11


@pytest.mark.parametrize("experts", [{}, dict(SPARSE, top_k=1)])      # for two choices see MoE's docstring
def test_no_token_sees_a_later_one(experts):
    model = make(**experts)
    idx, _ = batch(T=9)
    changed = idx.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 65
    assert torch.equal(model(idx)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(idx)[:, 5], model(changed)[:, 5])


@pytest.mark.parametrize("experts", [{}, SPARSE, dict(SPARSE, top_k=1)])
def test_attend_is_the_seam(experts):
    """An `attend` with a cache, one token at a time, gives the logits of the whole sequence at once."""
    model, cache, layers = make(**experts).eval(), {}, []
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


# ---- mixture of experts -----------------------------------------------------------------------------------------

def make_moe(C=6, **changes):
    """A float64 MoE with weights of size 1."""
    moe = MoE(GPTConfig(n_head=1, n_embd=C, **{**dict(n_expert=5, capacity_factor=0.6), **changes})).double().to(DEVICE)
    for p in moe.parameters():
        torch.nn.init.normal_(p)
    return moe


def moe_loop(moe, x):
    """The layer by its definition, a token and an expert at a time: y (B, T, C), aux (B,), counts (E + 1,)."""
    p, k = dict(moe.named_parameters()), moe.top_k
    B, T, E = *x.shape[:2], p["router.weight"].size(0)
    capacity = min(T, math.ceil(k * T / E * moe.config.capacity_factor)) if moe.training else T
    counts, outputs, aux = [0] * (E + 1), [], []

    def expert(e, v):
        h = v @ p["experts.fc_weight"][e] + (p["experts.fc_bias"][e] if "experts.fc_bias" in p else 0)
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3)))
        return h @ p["experts.proj_weight"][e] + (p["experts.proj_bias"][e] if "experts.proj_bias" in p else 0)

    for b in range(B):
        probs = [p["router.weight"] @ x[b, t] for t in range(T)]
        probs = [torch.exp(row - row.max()) / torch.exp(row - row.max()).sum() for row in probs]
        ranked = [sorted(range(E), key=lambda e: (-row[e].item(), e))[:k] for row in probs]
        y, taken = [torch.zeros_like(x[b, 0]) for _ in range(T)], [0] * E
        for j in range(k):
            for t in range(T):
                e = ranked[t][j]
                if taken[e] == capacity:
                    counts[E] += 1
                    continue
                taken[e] += 1
                gate = probs[t][e] / (sum(probs[t][i] for i in ranked[t]) if k == 2 else 1)
                y[t] = y[t] + gate * expert(e, x[b, t])
        outputs.append(torch.stack(y))
        aux.append(E * sum(sum(r[0] == e for r in ranked) / T * sum(row[e] for row in probs) / T for e in range(E)))
        counts[:E] = [a + b for a, b in zip(counts, taken)]
    return torch.stack(outputs), torch.stack(aux), torch.tensor(counts, dtype=torch.float32, device=x.device)


def assert_same_moe(moe, x):
    """Outputs and all gradients are the loop's. Returns the counts."""
    x = x.detach().requires_grad_()
    inputs, results = [x, *moe.parameters()], []
    dy, daux = torch.randn_like(x), torch.randn_like(x[:, 0, 0])
    for y, aux, counts in (moe(x), moe_loop(moe, x)):
        assert y.shape == x.shape and aux.shape == x.shape[:1] and not counts.requires_grad
        loss = (y * dy).sum() + (aux * daux).sum()
        results.append([y, aux, counts, *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*results):
        assert a.dtype == b.dtype and (a - b).abs().max() < 1e-12 * max(1, b.abs().max())
    assert counts.sum() == moe.top_k * x.size(0) * x.size(1)
    return counts


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("T,E,factor", [(11, 5, 0.6), (13, 3, 1.0), (7, 2, 1.25), (1, 4, 0.01), (5, 7, 100.0)])
def test_moe_is_its_definition(top_k, bias, T, E, factor):
    moe = make_moe(top_k=top_k, bias=bias, n_expert=E, capacity_factor=factor)
    counts = assert_same_moe(moe, torch.randn(3, T, 6, dtype=torch.float64, device=DEVICE))
    assert counts[E] > 0 if factor == 0.6 else counts[E] == 0 if factor == 100 else True
    counts = assert_same_moe(moe.eval(), torch.randn(3, T, 6, dtype=torch.float64, device=DEVICE))
    assert counts[E] == 0


def test_one_expert_is_an_mlp():
    """It's full only when every token is there; its gate is 1 and its balancing loss too."""
    moe = make_moe(n_expert=1, capacity_factor=1.0)
    x = torch.randn(2, 9, 6, dtype=torch.float64, device=DEVICE)
    y, aux, counts = moe(x)
    e = moe.experts
    want = F.gelu(x @ e.fc_weight[0] + e.fc_bias[0], approximate="tanh") @ e.proj_weight[0] + e.proj_bias[0]
    assert (y - want).abs().max() < 1e-12 and (aux - 1).abs().max() < 1e-12 and counts.tolist() == [18, 0]


def test_all_tokens_to_one_expert():
    """A full expert drops the rest, which then get nothing; one without tokens, or whose slots are empty, is still."""
    moe = make_moe(capacity_factor=1.0)
    x = torch.randn(2, 10, 6, dtype=torch.float64, device=DEVICE).abs()
    with torch.no_grad():
        moe.router.weight.copy_(torch.arange(5, device=DEVICE).view(5, 1).expand(5, 6))      # the last one wins
    assert assert_same_moe(moe, x).tolist() == [0, 0, 0, 0, 4, 16]
    y, aux, _ = moe(x)
    y.sum().backward()
    assert y[:, 2:].abs().max() == 0 < y[:, :2].abs().min()
    for p in moe.experts.parameters():
        assert p.grad[:4].abs().max() == 0 < p.grad[4].abs().max()
    with torch.no_grad():
        x[0, 3, 2] = math.nan      # harms itself alone
        y = moe(x)[0].isfinite()
        assert not y[0, 3].any() and y[0, :3].all() and y[0, 4:].all() and y[1].all()


@pytest.mark.parametrize("top_k", [1, 2])
def test_equal_probabilities_go_to_the_lower_id(top_k):
    moe = make_moe(top_k=top_k, capacity_factor=5.0)
    with torch.no_grad():
        moe.router.weight.zero_()
    x = torch.randn(2, 7, 6, dtype=torch.float64, device=DEVICE)
    assert assert_same_moe(moe, x).tolist() == [14.0, 14.0 * (top_k - 1), 0, 0, 0, 0]
    with torch.no_grad():
        moe.router.weight[0] = 1000 * x[0, 0]      # all other probabilities are 0: the second choice is among equals
    assert_same_moe(moe, x)


@pytest.mark.parametrize("factor,capacity", [(0.5, 2), (1.0, 4), (1.25, 5), (1.26, 6), (2.5, 10), (99.0, 10)])
def test_slots_are_as_many_as_said_and_empty_ones_are_zeros(factor, capacity):
    moe, seen = make_moe(capacity_factor=factor, top_k=2), []
    moe.experts.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = torch.randn(2, 10, 6, dtype=torch.float64, device=DEVICE)
    counts = moe(x)[2]
    moe.eval()(x)
    assert [slots.shape for slots in seen] == [(2, 5, capacity, 6), (2, 5, 10, 6)]
    assert torch.equal((seen[0] != 0).all(-1).sum((0, 2)), counts[:5]) and (seen[1] != 0).sum() == 2 * x.numel()


def test_experts_run_as_many_as_their_weights():
    """A process that holds 2 of 6 experts, and gets their rows from three times the groups."""
    experts = make_moe(n_expert=6).experts
    x = torch.randn(3, 6, 4, 6, dtype=torch.float64, device=DEVICE)
    want, part = experts(x), Experts(GPTConfig(n_head=1, n_embd=6, n_expert=6))
    for name, p in experts.named_parameters():
        setattr(part, name, torch.nn.Parameter(p[2:4].detach()))
    assert want.shape == x.shape and (part(x[:, 2:4]) - want[:, 2:4]).abs().max() < 1e-12


@pytest.mark.parametrize("dtype,wide", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                                        (torch.float32, torch.float32), (torch.float64, torch.float64)])
def test_the_router_is_wide(dtype, wide):
    """Logits 256 and 257 are the same in bfloat16, and the greater must win."""
    moe = make_moe(C=2, n_expert=2, capacity_factor=2.0).to(dtype)
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([[16.0, 0.0], [16.0, 1.0]]))
    y, aux, counts = moe(torch.tensor([[[16.0, 1.0]]], dtype=dtype, device=DEVICE))
    assert (y.dtype, aux.dtype, counts.dtype) == (dtype, wide, torch.float32) and counts.tolist() == [0, 1, 0]


def test_the_model_gathers_what_its_layers_say():
    """aux and counts of all layers, stage by stage or whole; aux is in the training loss alone; dense: none."""
    config = GPTConfig(**SMALL, **SPARSE, aux_weight=0.3)
    whole = GPT(config, seed=7).double().to(DEVICE)
    first, last = (GPT(config, layers, seed=7).double().to(DEVICE) for layers in (range(2), range(2, 3)))
    idx, targets = batch()
    targets[1, 3:] = -1
    loss = whole.loss(idx, targets)
    last(first(idx))
    assert whole.aux.shape == (5,) and (whole.aux - first.aux - last.aux).abs().max() < 1e-12
    assert torch.equal(whole.counts, torch.cat([first.counts, last.counts])) and not whole.counts.requires_grad
    assert whole.counts.sum(1).tolist() == [2 * 35] * 3 and whole.counts[:, 5].sum() > 0
    weights = (targets >= 0).double().sum(1) / (targets >= 0).sum()
    plain = F.cross_entropy(whole(idx).reshape(-1, 65), targets.reshape(-1), ignore_index=-1)
    assert abs(loss - plain - 0.3 * (whole.aux * weights).sum()) < 1e-12
    loss, logits = whole.eval().loss(idx, targets), whole(idx)
    assert abs(loss - F.cross_entropy(logits.reshape(-1, 65), targets.reshape(-1), ignore_index=-1)) < 1e-12
    assert whole.counts[:, 5].sum() == 0
    dense = make()
    dense(idx)
    assert dense.aux is None and dense.counts is None


@pytest.mark.parametrize("top_k", [1, 2])
def test_compiled_experts_have_no_graph_break(top_k):
    model = make(**{**SPARSE, "top_k": top_k})
    idx, targets = batch(T=11)
    results = []
    for _ in range(2):
        loss = model.loss(idx, targets)
        results.append([loss, model.aux, model.counts, *torch.autograd.grad(loss, list(model.parameters()))])
        for block in model.blocks.values():      # for the second round
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    for a, b in zip(*results):
        assert (a - b).abs().max() < 1e-12


def test_dropout_of_experts_keeps_the_mean():
    moe = make_moe(dropout=0.5, capacity_factor=5.0)
    x = torch.randn(1, 3, 6, dtype=torch.float64, device=DEVICE)
    want = moe.eval()(x)[0]
    y = torch.cat([moe.train()(x)[0] for _ in range(2000)])
    assert (y.mean(0) - want).abs().max() < 0.15 * want.abs().max()
    assert ((y == 0) | ((y - 2 * want).abs() < 1e-9)).all()


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


@pytest.mark.parametrize("experts", [{}, dict(SPARSE, aux_weight=0.7), dict(SPARSE, top_k=1)])
def test_parts_with_unequal_targets_add_up(experts):
    model = make(**experts)
    idx, targets = batch()
    targets[0] = targets[1, 2:] = -1
    total, params = (targets >= 0).sum(), list(model.parameters())
    whole = model.loss(idx, targets)
    for cuts in ([2, 2, 1], [1, 4], [1, 1, 1, 1, 1]):
        parts = sum(model.loss(*part, total) for part in zip(idx.split(cuts), targets.split(cuts)))
        assert abs(parts - whole) < 1e-12
        for a, b in zip(torch.autograd.grad(parts, params), torch.autograd.grad(whole, params, retain_graph=True)):
            assert (a - b).abs().max() < 1e-12
    assert model.loss(idx, torch.full_like(targets, -1)) == 0      # nothing counts: no loss, not 0 / 0


@pytest.mark.parametrize("experts", [{}, SPARSE, dict(SPARSE, top_k=1)])
def test_low_precision_loss_is_near(experts):
    config = GPTConfig(**SMALL, **experts)
    idx, targets = batch(B=9)
    want = GPT(config).to(DEVICE).loss(idx, targets)
    for dtype in (torch.bfloat16, torch.float16):
        model = GPT(config).to(DEVICE, dtype)
        loss = model.loss(idx, targets)
        assert loss.dtype == torch.float32 and abs(loss - want) < 0.02
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


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

@pytest.mark.parametrize("n_expert", [0, 13])
def test_initialisation_is_gpt2s_and_a_function_of_seed_and_name(n_expert):
    config = GPTConfig(vocab_size=1000, block_size=256, n_layer=8, n_head=4, n_embd=128, n_expert=n_expert)
    a, b, c = GPT(config, seed=3), GPT(config, seed=3), GPT(config, seed=4)
    deviations = {"wte": 0.02, "wpe": 0.01, "qkv": 0.02, "fc": 0.02, "router": 0.02, "proj": 0.02 / math.sqrt(16)}
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters()):
        assert torch.equal(p, q)
        assert is_matrix(name, p) == ("ln_" not in name and "bias" not in name), name
        if not is_matrix(name, p):
            assert torch.equal(p, torch.ones_like(p) if name.endswith("weight") else torch.zeros_like(p)), name
        else:
            values = p[:1000]
            kind = next(kind for kind in deviations if kind in name)
            near = 0.03 if values.numel() > 2000 else 0.15
            assert abs(values.std() / deviations[kind] - 1) < near and abs(values.mean()) < near / 15, name
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


@pytest.mark.parametrize("top_k", [1, 2])
def test_experts_are_counted_whole_and_paid_for_by_use(top_k):
    C, L, E = 24, 3, 5
    dense, sparse = GPTConfig(**SMALL), GPTConfig(**SMALL, n_expert=E, top_k=top_k)
    mlp = 8 * C * C + 5 * C
    assert GPT(sparse).num_params() - GPT(dense).num_params() == L * (E * mlp + E * C - mlp)
    assert flops_per_token(sparse) - flops_per_token(dense) == 6 * L * ((top_k - 1) * 8 * C * C + E * C)


def test_derived_seeds_differ_and_stay():
    seeds = {derive(s, kind, n) for s in range(10) for kind in ("batch", "dropout") for n in range(100)}
    assert len(seeds) == 2000 and all(0 <= s < 2 ** 63 for s in seeds)
    assert derive(1, "batch", 0) == 5920463798422921716      # saved runs rely on it


# ---- generation -------------------------------------------------------------------------------------------------

def greedy(model, tokens, n):
    """The rule written out: restart from the last half when the context is full."""
    model.eval()
    tokens, context = list(tokens), list(tokens[-model.config.block_size:])
    for _ in range(n):
        if len(context) > model.config.block_size:
            context = context[-max(1, model.config.block_size // 2):]
        token = reference(model, torch.tensor([context], device=DEVICE))[0, -1].argmax().item()
        tokens.append(token)
        context.append(token)
    return tokens


@pytest.mark.parametrize("block_size,experts", [(1, {}), (2, {}), (7, {}), (12, {}), (7, SPARSE)])
def test_generation_past_block_size(block_size, experts):
    model = make(block_size=block_size, **experts)
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
                                           (dict(block_size=-1), "block_size=-1"),
                                           (dict(n_expert=-2), "n_expert=-2"), (dict(n_expert=4, top_k=0), "top_k=0"),
                                           (dict(n_expert=4, top_k=3), "top_k=3"),
                                           (dict(n_expert=1, top_k=2), "top_k=2.*n_expert=1"),
                                           (dict(capacity_factor=0.0), "capacity_factor=0.0"),
                                           (dict(capacity_factor=math.nan), "capacity_factor=nan"),
                                           (dict(capacity_factor=math.inf), "capacity_factor=inf"),
                                           (dict(aux_weight=-0.1), "aux_weight=-0.1")])
def test_config_errors_name_the_numbers(changes, words):
    with pytest.raises(UserError, match=words):
        GPTConfig(**{**SMALL, **changes})


def test_configurations_saved_before_there_were_experts():
    new = dict(n_expert=4, top_k=2, capacity_factor=2.0, aux_weight=0.5)
    old = dict(SMALL, dropout=0.1, bias=False)
    assert config_of({"config": old}) == GPTConfig(**old)
    assert config_of({"config": {**old, **new}}) == GPTConfig(**old, **new)
    with pytest.raises(KeyError):
        config_of({"config": new})


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="T=13.*block_size=12"):
        make()(torch.zeros(1, 13, dtype=torch.int64, device=DEVICE))


# ---- GPT-2's weights --------------------------------------------------------------------------------------------

@pytest.fixture
def safetensors():
    return pytest.importorskip("safetensors", reason="reading weights needs the library safetensors")


# Of write_gpt2's weights, by Transformers 5.24's GPT2LMHeadModel in float64: the logits of three of six tokens
KNOWN_IDS = [3, 0, 12, 7, 7, 1]
KNOWN = {0: [-0.626433, 0.488975, 0.484141, -0.629861, -0.300852, 0.717408, 0.092086, -0.744205, 0.124478, 0.707982,
             -0.330501, -0.611806, 0.508537],
         2: [-0.532458, 0.545817, 0.373625, -0.654542, -0.183153, 0.707839, -0.022828, -0.701196, 0.226876, 0.635175,
             -0.411712, -0.515367, 0.561684],
         5: [-0.533254, 0.485030, 0.392110, -0.599134, -0.217762, 0.662503, 0.024973, -0.669770, 0.169930, 0.620320,
             -0.350443, -0.518341, 0.501281]}


def old_release(tensors):
    """As the first files had it: with the mask, and without a prefix."""
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 6, 6).tril() for i in range(2)}
    return {**tensors, **masks, "h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": tensors["wte.weight"]}


@pytest.mark.parametrize("names", [lambda x: x, old_release, lambda x: {f"transformer.{n}": w for n, w in x.items()}])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2e-6), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_a_gpt2_has_known_logits(safetensors, tmp_path, names, dtype, bound):
    write_gpt2(tmp_path, names(gpt2_tensors(13, 6, 8, 2)), dtype)
    model = GPT.from_pretrained(tmp_path)
    assert not model.training and model.wte.weight.shape == (64, 8) and model.wte.weight.dtype == torch.float32
    with torch.no_grad():
        logits = model(torch.tensor([KNOWN_IDS]))[0]
    for t, want in KNOWN.items():
        assert logits.shape == (6, 13) and (logits[t] - torch.tensor(want)).abs().max() < bound
    assert not model.wte.weight[13:].any()                           # the rows that pad the table


def test_shards_are_one_model(safetensors, tmp_path):
    whole = {f"transformer.{name}": x.float() for name, x in gpt2_tensors(13, 6, 8, 2).items()}
    write_gpt2(tmp_path)
    want = GPT.from_pretrained(tmp_path)(torch.tensor([KNOWN_IDS]))
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"model-{i % 3:05}.safetensors" for i, name in enumerate(whole)}
    for file in set(files.values()):
        write_safetensors(tmp_path / file, {name: x for name, x in whole.items() if files[name] == file})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(metadata={}, weight_map=files)))
    assert torch.equal(GPT.from_pretrained(tmp_path)(torch.tensor([KNOWN_IDS])), want)
    (tmp_path / "model-00001.safetensors").unlink()
    with pytest.raises(UserError, match="model-00001.safetensors"):
        GPT.from_pretrained(tmp_path)
    index.write_text("[]")
    with pytest.raises(UserError, match="index.json is not a JSON object"):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize("changes", [{}, dict(tied=False), dict(bias=False), dict(tied=False, bias=False, dropout=0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_saved_is_what_is_loaded(safetensors, tmp_path, changes, dtype):
    model = make(**changes).to("cpu", dtype).eval()
    model.save_pretrained(tmp_path / "deep" / "er", Tokenizer("bytes"))
    assert sorted(p.name for p in (tmp_path / "deep" / "er").iterdir()) == ["config.json", "model.safetensors"]
    same, tokenizer = load_model(tmp_path / "deep" / "er", torch.device("cpu"), dtype)
    assert same.config == GPTConfig(**{**SMALL, **changes, "bias": True})
    idx = batch()[0].cpu()
    assert (same(idx) - model(idx)).abs().max() <= (0 if dtype == torch.bfloat16 else 1e-5)
    for name, p in model.named_parameters():
        assert torch.equal(dict(same.named_parameters())[name], p), name
    assert tokenizer.kind == "ids" and "tokenizer.json" in tokenizer.note


def test_the_tokenizer_goes_along(safetensors, tmp_path):
    for old in (False, True):
        write_tokenizer(tmp_path / f"{old}", old)
        file = tmp_path / f"{old}" / ("vocab.json" if old else "tokenizer.json")
        GPT(GPTConfig(**{**SMALL, "vocab_size": 262})).save_pretrained(tmp_path / "x", Tokenizer("gpt2", file, 261))
        assert json.loads((tmp_path / "x" / "config.json").read_text())["eos_token_id"] == 261
        assert (tmp_path / "x" / file.name).read_bytes() == file.read_bytes()
        tokenizer = load_model(tmp_path / "x", torch.device("cpu"), torch.float32)[1]
        assert tokenizer.kind == "gpt2" and tokenizer.end == 261 and tokenizer.start(262) == 261


def test_a_folder_saved_to_itself_keeps_its_tokenizer(tmp_path, monkeypatch):
    """Also if it's named in another way than before."""
    monkeypatch.chdir(tmp_path)
    for old in (False, True):
        write_tokenizer(tmp_path / f"{old}", old)
        (tmp_path / f"link {old}").symlink_to(tmp_path / f"{old}")
        name = "vocab.json" if old else "tokenizer.json"
        raw = (tmp_path / f"{old}" / name).read_bytes()
        for folder in (Path(f"{old}"), tmp_path / f"{old}", tmp_path / f"link {old}"):
            tokenizer = Tokenizer("gpt2", Path(f"{old}") / name, 261)
            GPT(GPTConfig(**{**SMALL, "vocab_size": 262})).save_pretrained(folder, tokenizer)
            assert (tmp_path / f"{old}" / name).read_bytes() == raw and (folder / "config.json").is_file()
        monkeypatch.chdir("/")                       # the path that it had there isn't one from here
        GPT(GPTConfig(**{**SMALL, "vocab_size": 262})).save_pretrained(tmp_path / "there", tokenizer)
        assert (tmp_path / "there" / name).read_bytes() == raw
        monkeypatch.chdir(tmp_path)
    # as in a cache of downloads: links to files of other names; and all three files in one folder
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokenizer.json").symlink_to(tmp_path / "False" / "tokenizer.json")
    (tmp_path / "False" / "tokenizer.json").rename(tmp_path / "blob")
    (tmp_path / "False" / "tokenizer.json").symlink_to(tmp_path / "blob")
    write_tokenizer(tmp_path / "False", True)
    for source, target in (("cache", "copy"), ("cache", "cache"), ("False", "False"), ("False", "cache")):
        before = sorted(path.name for path in (tmp_path / target).glob("*")) or ["tokenizer.json"]
        GPT(GPTConfig(**{**SMALL, "vocab_size": 262})).save_pretrained(
            tmp_path / target, Tokenizer("gpt2", tmp_path / source / "tokenizer.json", 261))
        assert {*before} <= {path.name for path in (tmp_path / target).iterdir()}
        assert (tmp_path / target / "tokenizer.json").read_bytes() == (tmp_path / "blob").read_bytes()
    (tmp_path / "z" / "merges.txt").mkdir(parents=True)
    with pytest.raises(WriteError, match="merges.txt can't be taken away"):
        GPT(GPTConfig(**SMALL)).save_pretrained(tmp_path / "z", Tokenizer("bytes"))
    assert [p.name for p in (tmp_path / "z").iterdir()] == ["merges.txt"]
    with pytest.raises(UserError, match="empty"):
        GPT(GPTConfig(**SMALL)).save_pretrained("")


def test_only_what_kept_a_file_from_being_written_is_said_to(tmp_path):
    (tmp_path / "x").write_text("old")
    with pytest.raises(RuntimeError, match="other") as caught, replacing(tmp_path / "x") as file:
        file.write(b"new")
        raise RuntimeError("something other")
    assert not isinstance(caught.value, WriteError)
    with pytest.raises(WriteError, match="x can't be written: No space left"), replacing(tmp_path / "x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (tmp_path / "x").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_program_says_which_file_is_at_fault(capsys, tmp_path):
    def read(argv):
        (tmp_path / "missing").read_text()
    assert program("x.py", read) == 1
    assert capsys.readouterr().err == f"x.py: {tmp_path / 'missing'} can't be used: No such file or directory\n"


def test_bytes_are_byte_pairs_without_a_pair(safetensors, tmp_path):
    """A folder's tokenizer is that of what was saved there last, and one of bytes can be written down too."""
    pytest.importorskip("tokenizers", reason="reading text needs the library tokenizers")
    write_tokenizer(tmp_path / "x")
    write_tokenizer(tmp_path / "x", old=True)
    model = GPT(GPTConfig(**{**SMALL, "vocab_size": 256}))
    model.save_pretrained(tmp_path / "x", Tokenizer("bytes"))
    tokenizer, raw = load_model(tmp_path / "x", torch.device("cpu"), torch.float32)[1], bytes(range(1, 256))
    for text in ("def f(x):\n\treturn  é日🙂", raw.decode("latin-1")):
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decoder()(list(text.encode()), final=True) == text
    assert sorted(p.name for p in (tmp_path / "x").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    GPT.from_pretrained(tmp_path / "x").save_pretrained(tmp_path / "x")      # without one what is there stays
    assert load_model(tmp_path / "x", torch.device("cpu"), torch.float32)[1].encode("é") == list("é".encode())
    write_tokenizer(tmp_path / "y")
    model.save_pretrained(tmp_path / "y", Tokenizer("ids"))
    assert load_model(tmp_path / "y", torch.device("cpu"), torch.float32)[1].kind == "ids"


def test_what_gpt2_hasnt_is_not_saved(tmp_path):
    for model in (make(**SPARSE), GPT(GPTConfig(**SMALL), range(0, 2))):
        with pytest.raises(UserError, match="n_expert=5" if model.config.n_expert else "layers 0 to 1 of 3"):
            model.save_pretrained(tmp_path / "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(WriteError, match="file"):
        make().save_pretrained(tmp_path / "file" / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("changes", [
    dict(vocab_size=301, n_positions=19, n_layer=3, n_head=3, n_embd=24), dict(n_head=1, n_embd=5, n_inner=20),
    dict(vocab_size=50257, n_positions=33, n_head=4, n_embd=32), dict(tie_word_embeddings=False),
    dict(reorder_and_upcast_attn=True, n_positions=40), dict(activation_function="gelu_pytorch_tanh")])
def test_logits_are_those_of_transformers(safetensors, tmp_path, changes):
    transformers = pytest.importorskip("transformers", reason="the comparison needs the library transformers")
    config = dict(vocab_size=97, n_positions=11, n_layer=2, n_head=2, n_embd=12, bos_token_id=None, eos_token_id=None)
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**config, **changes})).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
        other.save_pretrained(tmp_path / "a", max_shard_size="20KB")
        model = GPT.from_pretrained(tmp_path / "a")
        idx = torch.randint(0, model.config.vocab_size, (3, model.config.block_size))
        want = other(idx).logits
        assert (model(idx) - want).abs().max() < 1e-4 < want.abs().max()
        model.save_pretrained(tmp_path / "b")
        back, said = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "b", output_loading_info=True)
        assert not any(said.values()) and back.dtype == torch.float32
        assert (back.eval()(idx).logits - want).abs().max() < 1e-4


def test_a_model_without_biases_is_one_with_zeros_to_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="the comparison needs the library transformers")
    model = make(bias=False).to("cpu", torch.float32)
    model.save_pretrained(tmp_path)
    back, said = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    idx = batch(T=12)[0].cpu()
    assert not any(said.values()) and (back.eval()(idx).logits - model(idx)).abs().max() < 1e-4


@pytest.mark.parametrize("changes,words", [
    (dict(model_type="llama"), "describes llama"), (dict(model_type=None, architectures=["Other"]), "Other"),
    (dict(activation_function="gelu"), "activation_function='gelu'"), (dict(n_inner=31), "n_inner=31"),
    (dict(layer_norm_epsilon=1e-6), "layer_norm_epsilon=1e-06"), (dict(scale_attn_weights=False), "scale_attn_weights"),
    (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"), (dict(n_head=3), "n_head=3"),
    (dict(n_layer="2"), "n_layer='2'"), (dict(n_embd=0, n_head=1), "n_embd=0"),
    (dict(resid_pdrop="x"), "resid_pdrop='x'"),
    (dict(tie_word_embeddings=False), "holds no lm_head.weight"), (dict(n_layer=3), "holds 2 layers .* asks for 3"),
    (dict(n_layer=1), r"holds h.1.\S+, which"), (dict(n_layer=10 ** 9), "holds 2 layers"),
    (dict(n_embd=10 ** 9), r"of \[8\], .* of \[1000000000\]"), (dict(vocab_size=14), r"wte.weight as F32 \[13, 8\].*\[14, 8\]")])
def test_folders_of_other_models(safetensors, tmp_path, changes, words):
    write_gpt2(tmp_path, gpt2_tensors(13, 6, 8, 2), **changes)
    with pytest.raises(UserError, match=words) as error:
        GPT.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_damaged_folders(safetensors, tmp_path):
    def refused(words):
        with pytest.raises(UserError, match=words) as error:
            GPT.from_pretrained(tmp_path)
        assert "\n" not in str(error.value)
    refused("holds no config.json")
    write_gpt2(tmp_path)
    path, whole = tmp_path / "model.safetensors", (tmp_path / "model.safetensors").read_bytes()
    for size in (0, 7, 8, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(rf"model.safetensors \({size} bytes\)")
    path.unlink()
    refused("holds no weights: neither model.safetensors nor model.safetensors.index.json")
    for change, words in ((lambda x: x["ln_f.bias"].fill_(math.nan), "not numbers: ln_f.bias"),
                          (lambda x: x.update({"h.0.attn.c_attn.weight": x["h.0.attn.c_attn.weight"].t()}),
                           r"\[24, 8\].*\[8, 24\]"), (lambda x: x.pop("wpe.weight"), "holds no wpe.weight"),
                          (lambda x: x.update(score=torch.ones(2)), "holds score"),
                          (lambda x: x.update({"ln_f.bias": torch.ones(8, dtype=torch.uint8)}), r"U8 \[8\].*floats")):
        tensors = {name: x.float() for name, x in gpt2_tensors(13, 6, 8, 2).items()}
        change(tensors)
        write_safetensors(path, tensors)
        refused(words)
    for text in ("{", "[]", "\0"):
        (tmp_path / "config.json").write_text(text)
        refused("config.json is not a JSON object")


def test_missing_libraries_are_named(tmp_path, monkeypatch):
    write_gpt2(tmp_path)
    write_tokenizer(tmp_path)
    for name, use in (("safetensors", lambda: GPT.from_pretrained(tmp_path)),
                      ("tokenizers", lambda: Tokenizer("gpt2", tmp_path / "tokenizer.json").encode("x"))):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=f"pip install {name}$"):
            use()


def test_a_parameter_is_read_when_it_is_asked_for(safetensors, tmp_path):
    """A rank of many reads what it holds: views of the mapped file, not a copy of the model."""
    write_gpt2(tmp_path)
    ckpt = model_py.load_checkpoint(tmp_path)
    a, b = ckpt["model"].get("blocks.1.mlp.fc.weight"), ckpt["model"].get("blocks.1.mlp.fc.weight")
    assert a.shape == (32, 8) and a.data_ptr() == b.data_ptr() and not isinstance(ckpt["model"], dict)
