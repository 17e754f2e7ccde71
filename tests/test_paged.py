"""paged.py: blocks against their books, the kernel against its reference, the engine against model.generate."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import DEVICE

import flash
import paged
from model import GPT, GPTConfig, LayerNorm, UserError, distribution, gelu
from paged import (BlockPool, ContiguousCache, ContiguousPool, Engine, contiguous_waste, draw, embed, invert, linear,
                   paged_attention, paged_attention_reference, trunk, uniform)

LIMIT = 40      # the model's block_size
needs_triton = pytest.mark.skipif(flash.triton is None, reason="needs Triton")


@pytest.fixture
def kernels(monkeypatch):
    """The Triton kernels, by the interpreter where there is no GPU."""
    monkeypatch.setattr(flash, "INTERPRETED", DEVICE == "cpu")
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module")
def model():
    """A small GPT with weights so large that texts don't repeat one token."""
    model = GPT(GPTConfig(vocab_size=65, block_size=LIMIT, n_layer=2, n_head=2, n_embd=32), seed=None)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3 if p.dim() > 1 else 0.1)
    model.wpe.weight.data *= 5
    return model.to(DEVICE).eval()


def greedy(model, prompt, n):
    return model.generate(torch.tensor([prompt], device=DEVICE), n, 0.0)[0].tolist()[len(prompt):]


def ids(n):
    return [random.randrange(65) for _ in range(n)]


@pytest.fixture(autouse=True)
def rng(seed):
    random.seed(seed)


# ---- the naive cache, and what it wastes ------------------------------------------------------------------------

def test_the_contiguous_cache_writes_what_generate_does(model):
    prompt = ids(7)
    cache, x, out = ContiguousCache(model, LIMIT), torch.tensor([prompt], device=DEVICE), []
    with torch.no_grad():
        for _ in range(20):
            logits = model(x, torch.arange(cache.used, cache.used + x.size(1), device=DEVICE), cache)
            cache.advance(x.size(1))
            x = logits[:, -1:].argmax(-1)
            out.append(x.item())
    assert out == greedy(model, prompt, 20)


def test_contiguous_room_is_the_first_hole_that_is_large_enough():
    pool = ContiguousPool(10)
    assert [pool.allocate(n) for n in (4, 4, 4, 2)] == [0, 4, None, 8]
    pool.free(0)
    pool.free(8)
    assert pool.allocate(5) is None and pool.allocate(3) == 0 and pool.allocate(1) == 3


@pytest.mark.parametrize("hs,dtype", [(16, torch.float64), (260, torch.float32)])
def test_the_engine_where_there_are_no_kernels(hs, dtype):
    """On a GPU too: it asks the device then, and nothing can be captured."""
    model = GPT(GPTConfig(vocab_size=65, block_size=LIMIT, n_layer=2, n_head=2, n_embd=2 * hs), seed=None)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.1)
    model, prompts = model.to(DEVICE, dtype).eval(), [ids(n) for n in (3, 11)]
    engine = Engine(model, 30, 4)
    requests = [engine.add(prompt, 20, 0.0) for prompt in prompts] + [engine.add(prompts[0], 9, seed=1)]
    drain(engine)
    assert [r.tokens for r in requests[:2]] == [greedy(model, prompt, 20) for prompt in prompts]
    assert len(requests[2].tokens) == 9 and not engine.graphs


def test_waste_of_reserving_everything():
    """Two requests of 2 + 6 tokens in room for 16 each, one at a time in a cache of 24: used 2, 3, .. 7 of 24."""
    used, reserved, scattered = contiguous_waste([(2, 6), (2, 6)], 24, lambda prompt, new: 16)
    assert abs(used - np.mean(range(2, 8)) / 24) < 1e-12 and abs(scattered - 8 / 24) < 1e-12
    assert abs(used + reserved + scattered - 1) < 1e-12


# ---- blocks -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key", [hash, lambda x: 7])
def test_a_prefix_is_found_by_its_tokens_and_what_came_before(key):
    pool = BlockPool(6, 2, key)
    a, b, c = (pool.allocate() for _ in range(3))
    chain = pool.register(a, (0, 0), [1, 2])
    pool.register(b, chain, [3, 4])
    pool.register(c, (0, 0), [5, 6])
    assert pool.lookup([1, 2, 3, 4, 9])[0] == [a, b] and pool.lookup([1, 2, 9, 9])[0] == [a] and pool.lookup([1])[0] == []
    assert pool.lookup([5, 6, 3, 4])[0] == [c]                               # 3, 4 after something else
    for block in (b, a, c):
        pool.release(block)
    assert pool.lookup([1, 2, 3, 4])[0] == [a, b]                            # free, and still found
    taken = [pool.allocate() for _ in range(3)]
    assert not {a, b, c} & set(taken)                                        # first what holds nothing
    assert pool.allocate() == b and pool.lookup([1, 2, 3, 4])[0] == [a]      # then what has been free for longest
    pool.check()


def test_a_block_may_have_several_users():
    pool = BlockPool(1, 4)
    block = pool.allocate()
    pool.share(block)
    assert pool.allocate() is None
    pool.release(block)
    assert pool.allocate() is None
    pool.release(block)
    assert pool.allocate() == block


# ---- attention --------------------------------------------------------------------------------------------------

def pages(bs, nh, hs, news, lengths, dtype):
    """Random contexts in blocks of random order, NaN wherever no token is. -> the arguments of paged_attention; and each
    request's keys and values (nh, tokens, hs)."""
    blocks = [-(-n // bs) for n in lengths]
    order, at = torch.randperm(sum(blocks) + 3), 0
    table = torch.full((len(news), max(blocks) + 1), len(order) - 1, dtype=torch.int32)
    k, v = (torch.full((len(order), bs, nh, hs), math.nan, dtype=dtype) for _ in range(2))
    plain = []
    for r, (n, length) in enumerate(zip(blocks, lengths)):
        table[r, :n] = order[at:at + n]
        at += n
        plain.append([torch.randn(nh, length, hs).to(dtype) for _ in range(2)])
        for pool, x in zip((k, v), plain[-1]):
            for j in range(length):
                pool[table[r, j // bs], j % bs] = x[:, j]
    q = torch.randn(sum(news), nh, hs).to(dtype)
    start = torch.tensor([0, *np.cumsum(news)], dtype=torch.int32)
    tensors = q, k, v, table, torch.tensor(lengths, dtype=torch.int32), start
    return [x.to(DEVICE) for x in tensors], plain


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
@pytest.mark.parametrize("bs,hs,news,lengths,splits", [
    (16, 64, [1, 1, 1, 1], [1, 15, 16, 17], None), (16, 64, [1, 1], [200, 33], 4), (1, 24, [1, 5, 3], [1, 7, 100], 2),
    (7, 80, [1, 50, 70, 2], [70, 50, 100, 2], None), (32, 128, [5, 5], [37, 150], 8), (3, 16, [2, 1, 1], [9, 0, 3], 2),
    (5, 256, [1, 20], [64, 65], 1), (16, 8, [1], [300], 64),
    (4, 16, [5, 9, 70], [2, 9, 60], 2), (16, 32, [1, 3, 1], [390, 130, 5], 2)])
def test_paged_attention(bs, hs, news, lengths, splits, dtype, kernels):
    args, plain = pages(bs, 3, hs, news, lengths, dtype)
    got = paged_attention(*args, max(news), splits)
    reference = paged_attention_reference(*args)
    error = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    for r, (n, length) in enumerate(zip(news, lengths)):
        q, (k, v) = (args[0][args[5][r]:args[5][r + 1]].transpose(0, 1).double().cpu(), [x.double() for x in plain[r]])
        there = min(n, length)      # queries before the first token see nothing, and give 0
        want = torch.zeros_like(q).transpose(0, 1)                           # (n, nh, hs)
        if there:
            o = flash.attention_naive(q[None, :, n - there:], k[None], v[None])[0][0]
            want[n - there:] = o.transpose(0, 1)
        for found in (got, reference):
            assert (found[args[5][r]:args[5][r + 1]].double().cpu() - want).abs().max() < error


@needs_triton
@pytest.mark.parametrize("bs,nh,hs,news,lengths,splits", [
    (16, 2, 16, [1, 1, 1], [1, 16, 33], None), (4, 3, 20, [5, 1, 3], [5, 30, 9], 4), (8, 1, 64, [2, 5], [70, 8], 2),
    (16, 2, 24, [1, 40, 150], [90, 40, 170], None), (8, 1, 16, [2, 5, 1], [310, 8, 290], 2)])
def test_new_keys_and_values_are_seen_and_put_into_their_slots(bs, nh, hs, news, lengths, splits, kernels):
    (q, k, v, table, length, start), _ = pages(bs, nh, hs, news, lengths, torch.float32)
    places = [(r, length - n + j) for r, (n, length) in enumerate(zip(news, lengths)) for j in range(n)]
    slots = torch.tensor([int(table[r, j // bs]) * bs + j % bs for r, j in places], device=DEVICE)
    qkv = torch.stack([q, k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]], 1)                    # (N, 3, nh, hs)
    used = {int(block) for r, n in enumerate(lengths) for block in table[r, :-(-n // bs)]}
    nobodys = bs * min(set(range(len(k))) - used)                            # a slot of a block that is no request's
    for lost in ([], [0, len(slots) - 1]):                                   # what only this call is to see
        to = slots.clone()
        to[lost] = nobodys
        before = [torch.where(torch.isin(torch.arange(len(k) * bs, device=DEVICE), slots)[:, None, None], math.nan,
                              x.flatten(0, 1)).view_as(x) for x in (k, v)]
        got = paged_attention(qkv[:, 0], *before, table, length, start, max(news), splits, (*qkv.unbind(1)[1:], to))
        assert (got - paged_attention(q, k, v, table, length, start, max(news), splits)).abs().max() < 1e-5
        for x, was in zip(before, (k, v)):
            x, want = x.flatten(0, 1).clone(), was.flatten(0, 1).clone()
            x[nobodys] = want[nobodys] = 0
            want[slots[lost]] = math.nan
            assert torch.equal(x.nan_to_num(-1.0), want.nan_to_num(-1.0))


@needs_triton
def test_a_view_of_a_larger_cache_will_do(kernels):
    (q, k, v, table, length, start), _ = pages(4, 2, 16, [1, 2], [9, 30], torch.float32)
    both = torch.stack([k, v], 1)                                            # (blocks, 2, block_size, nh, hs)
    assert torch.equal(paged_attention(q, *both.unbind(1), table, length, start, 2),
                       paged_attention(q, k, v, table, length, start, 2))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs the memory of a GPU")
def test_more_than_2_to_the_31_numbers():
    k = torch.zeros(40_000, 16, 32, 128, dtype=torch.float16, device=DEVICE)
    k[-2:] = torch.randn(2, 16, 32, 128, device=DEVICE).half()
    table = torch.tensor([[39_998, 39_999]], dtype=torch.int32, device=DEVICE)
    length, start = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([31], [0, 1]))
    q = torch.randn(1, 32, 128, device=DEVICE).half()
    want = paged_attention_reference(q, k[-2:], k[-2:], table - 39_998, length, start)
    assert (paged_attention(q, k, k, table, length, start, 1) - want).abs().max() < 3e-3


# ---- sampling ---------------------------------------------------------------------------------------------------

def test_uniform_numbers_are_uniform_and_of_their_own_stream():
    n = torch.arange(200_000, device=DEVICE)
    for seed in (0, 1, -5, 2 ** 62 + 3):
        u = uniform(torch.full_like(n, seed)[:, None], n[:, None])[:, 0]
        assert 0 <= u.min() and u.max() < 1
        counts = torch.histc(u.float().cpu(), 100, 0, 1)
        assert ((counts - 2000) ** 2 / 2000).sum() < 170                     # chi-square of 99: p = 1e-5
        assert abs(np.corrcoef(u[:-1].cpu(), u[1:].cpu())[0, 1]) < 0.02
    a, b = uniform(torch.tensor([[1, 2]], device=DEVICE), n[:, None]).cpu().T
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02


def test_tokens_are_drawn_from_their_distribution():
    logits, n = torch.randn(4, 8, device=DEVICE) * 2, 20_000
    settings = [(0.7, 8, 1.0), (1.0, 3, 1.0), (1.5, 8, 0.6), (0.0, 8, 1.0)]
    t, k, p = (torch.tensor(x, device=DEVICE) for x in zip(*settings))
    want = torch.stack([distribution(row, *one) for row, one in zip(logits, settings)])      # (4, 8)
    assert (distribution(logits, t, k, p) - want).abs().max() < 1e-6
    step = torch.arange(n, device=DEVICE)
    for row in range(4):
        each = [x[row].expand(n, *x[row].shape) for x in (logits, t, k, p)]
        tokens = draw(*each, torch.rand(n, dtype=torch.float64, device=DEVICE), "sorted").cpu()
        seen, expected = torch.bincount(tokens, minlength=8), want[row].cpu() * n
        there = expected > 0
        assert seen[~there].sum() == 0
        assert ((seen - expected)[there] ** 2 / expected[there]).sum() < 35                  # of at most 7: p = 1e-5


def test_the_lowest_free_row_is_next(model):
    """However the rows came free: a step computes all up to the highest in use."""
    engine = engine_of(model, 100, 4, max_batch=5)
    for n in (9, 2, 14, 5, 11):
        engine.add(ids(3), n, 0.0)
    drain(engine)
    requests = [engine.add(ids(3), 5, 0.0) for _ in range(3)]
    engine.step()
    assert sorted(r.row for r in requests) == [0, 1, 2]
    first = next(r for r in requests if r.row == 0)
    engine.abort(first)
    requests.append(engine.add(ids(3), 5, 0.0))
    engine.step()
    assert requests[-1].row == 0
    drain(engine)


@pytest.mark.parametrize("budget", [4, 100])
def test_a_step_that_draws_nothing(budget):
    """A prompt in parts, and a vocabulary that is drawn from by pieces."""
    model = GPT(GPTConfig(vocab_size=2000, block_size=LIMIT, n_layer=1, n_head=2, n_embd=32), seed=1).to(DEVICE).eval()
    engine, prompt = Engine(model, 40, 4, 2, budget), ids(20)
    request = engine.add(prompt, 5, 0.0)
    drain(engine)
    assert request.tokens == greedy(model, prompt, 5)


@pytest.mark.parametrize("V", [1, 255, 256, 1000, 1025])
def test_a_weight_is_drawn_where_the_running_sum_passes(V):
    assert invert(torch.rand(0, V, device=DEVICE), torch.rand(0, device=DEVICE)).shape == (0,)
    p = torch.rand(50, V, device=DEVICE) * (torch.rand(50, V, device=DEVICE) < 0.3)
    p[:, V // 2] += 0.1
    u = torch.rand(50, device=DEVICE, dtype=torch.float64)
    u[0], u[1:3] = 0.0, 1 - 2 ** -53
    cdf = p.double().cumsum(-1)
    got = invert(p, u)[:, None]
    assert (p.gather(1, got) > 0).all()
    assert (cdf.gather(1, got) >= u[:, None] * cdf[:, -1:] - 1e-9).all()
    assert (cdf.gather(1, got) - p.gather(1, got) <= u[:, None] * cdf[:, -1:] + 1e-9).all()


@needs_triton
def test_kernels_give_the_same_random_numbers(kernels, monkeypatch):
    seed = torch.randint(-2 ** 62, 2 ** 62, (5, 1), device=DEVICE)
    n = torch.randint(0, 2 ** 40, (5, 7), device=DEVICE)
    got = [uniform(seed, n), uniform(seed[:, 0:1], n[:, ::3])]
    assert torch.equal(got[1], got[0][:, ::3])
    assert torch.equal(got[0].cpu(), uniform(seed.cpu(), n.cpu()) if DEVICE == "cuda" else without(monkeypatch, uniform, seed, n))


def without(monkeypatch, f, *args, **kwargs):
    """f by torch, as on a CPU."""
    with monkeypatch.context() as m:
        m.setattr(flash, "triton", None)
        m.setattr(paged, "runs_kernels", lambda x: False)
        return f(*args, **kwargs)


@needs_triton
@pytest.mark.parametrize("how", ["greedy", "warm", "plain", "sorted"])
@pytest.mark.parametrize("V,per", [(1, 1), (65, 3), (300, 2), (5000, 1)])
def test_kernels_draw_as_torch(how, V, per, kernels, monkeypatch):
    b = 6
    logits = (3 * torch.randn(b * per, V + 5)).to(DEVICE, torch.float16)[:, :V]                # rows apart, and equals
    logits[1, V // 2:] = -math.inf if V > 1 else 0
    logits[2, V // 3] = math.nan
    logits[3, V // 3] = math.inf
    t = torch.rand(b, device=DEVICE) + 0.2
    t = t * 0 if how == "greedy" else t if how == "warm" else t * (torch.arange(b, device=DEVICE) % 2)
    settings = t, torch.randint(1, V + 1, (b,), device=DEVICE), torch.rand(b, device=DEVICE) + 0.1
    u = torch.rand(b * per, dtype=torch.float64, device=DEVICE)
    u[0], u[4] = 0, 1 - 2 ** -53
    buffers = torch.full((3, b * per, V + 1), 7.0, device=DEVICE)
    p, want_p, again = buffers[..., :V]                                      # rows apart
    token, want = draw(logits, *settings, u, how, p), without(monkeypatch, draw, logits, *settings, u, how, want_p)
    real = torch.arange(b * per, device=DEVICE) % (b * per) != 2
    real[3] = False
    assert (token[~real] == -1).all() and (want[~real] == -1).all()
    assert (p[real] - want_p[real]).abs().max() < 2e-6
    cdf = want_p.double().cumsum(-1)
    for found in (token, want):      # where the running sum passes u
        at, mass = (x[real].gather(1, found[real, None])[:, 0] for x in (cdf, want_p))
        assert (mass > 0).all() and (at > u[real] - 2e-6).all() and (at - mass < u[real] + 2e-6).all() or how == "greedy"
    assert (token == want)[real].float().mean() > 0.7 and (how != "greedy" or torch.equal(token[real], want[real]))
    assert torch.equal(token, draw(logits, *settings, u, how))
    assert (draw(logits, *settings, None, how, again) is None) == (how != "greedy")
    assert torch.equal(again[real], p[real]) and (buffers[..., V] == 7).all()


@needs_triton
@pytest.mark.parametrize("bs,n", [(1, 1), (4, 2), (3, 5)])
def test_a_kernel_lays_out_as_torch(model, bs, n, kernels, monkeypatch):
    engine = Engine(model, 100, bs, 6)
    table, numbers, _ = engine.on_device
    table.copy_(torch.randint(0, 100, table.shape)), engine.history.copy_(torch.randint(0, 65, engine.history.shape))
    numbers[:, 1] = torch.randint(1, LIMIT + 1, (6,))
    total = torch.tensor([0, 1, 2, LIMIT - 1, LIMIT, 17], device=DEVICE)
    for low in (None, total - 2):
        ids, pos, layout = engine.layout(total, n, low)
        want = without(monkeypatch, engine.layout, total, n, low)
        assert all(torch.equal(a, b) for a, b in zip(layout[:4], want[2])) and torch.equal(pos, want[1]) and layout.most == n
        seen = (total[:, None] - n + torch.arange(n, device=DEVICE) >= 0).flatten()
        assert torch.equal(ids[seen], want[0][seen])


# ---- the block in few kernels -----------------------------------------------------------------------------------

@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
@pytest.mark.parametrize("N,K,n", [(1, 32, 65), (2, 300, 33), (1, 128, 16), (2, 129, 48), (1, 5000, 7), (3, 40, 50),
                                   (5, 1600, 33), (8, 2100, 9), (9, 40, 50), (16, 300, 20), (7, 4500, 40), (11, 2100, 20),
                                   (17, 40, 50)])
@pytest.mark.parametrize("what", [(), ("norm",), ("bias", "activation"), ("bias", "residual"),
                                  ("shifted norm", "bias", "activation", "residual")])
def test_linear_is_what_it_says(N, K, n, what, dtype, kernels):
    x, w, b, residual = (torch.randn(*shape).to(DEVICE, dtype) for shape in ((N, K), (n, K), (n,), (N, n)))
    x = x + 3                                                                # a mean that a norm has to take off
    norm = LayerNorm(K, bias="shifted norm" in what).to(DEVICE, dtype)
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    h = norm.double()(x.double()) if "norm" in " ".join(what) else x.double()
    h = h @ w.double().T / K ** 0.5
    w, norm = w / K ** 0.5, norm.to(dtype)
    h = h + b.double() if "bias" in what else h
    h = torch.nn.functional.gelu(h, approximate="tanh") if "activation" in what else h
    h = h + residual.double() if "residual" in what else h
    with torch.no_grad():
        more = [b if "bias" in what else None, norm if "norm" in " ".join(what) else None,
                gelu if "activation" in what else None, residual if "residual" in what else None]
        apart = torch.stack([x, x * math.nan], 1)[:, 0]                      # rows that don't follow each other
        got = [linear(x, w, *more[:3], residual=more[3] if more[3] is None else more[3].clone()) for x in (x, apart)]
    error = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for y in got:
        assert (y.double() - h).abs().max() < error * h.abs().max().clamp(min=1)


@needs_triton
@pytest.mark.parametrize("bias,experts", [(True, 0), (False, 0), (True, 3)])
@pytest.mark.parametrize("N", [1, 2, 30])
def test_the_trunk_is_the_models(bias, experts, N, kernels):
    config = GPTConfig(vocab_size=65, block_size=LIMIT, n_layer=2, n_head=3, n_embd=48, bias=bias, n_expert=experts)
    model = GPT(config, seed=None).to(DEVICE).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    idx, pos = torch.tensor(ids(N), device=DEVICE), torch.arange(N, device=DEVICE)
    with torch.no_grad():
        got = model.ln_f(trunk(model, idx, pos, lambda layer, q, k, v: flash.torch_attention(q, k, v)))
        assert (got - model.trunk(idx[None])[0]).abs().max() < 2e-5 * got.abs().max()
        past = embed(model, idx, pos + LIMIT - 1)                            # places after the last are the last
        assert torch.equal(past, model.wte.weight[idx] + model.wpe.weight[LIMIT - 1])


# ---- the engine -------------------------------------------------------------------------------------------------

def engine_of(model, *args, lag=None, **kwargs):
    """lag=1: on a CPU too, tokens are read one step late, as on a GPU."""
    engine = Engine(model, *args, **kwargs)
    engine.lag = engine.lag if lag is None else lag
    return engine


def drain(engine):
    for _ in engine.run():
        engine.pool.check()
    assert len(engine.pool.free) == len(engine.pool.users) and not any(engine.pool.users)
    assert len(engine.rows) == len(engine.table) and not engine.flying


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("bs,spare", [(1, 0), (1, 500), (3, 0), (3, 5), (16, 0), (16, 2), (16, 100), (64, 0)])
def test_the_engine_writes_what_generate_does(model, bs, spare, lag):
    """Prompts around the edges of blocks and of the context, shared prefixes, forks, a tiny pool, a crowd that changes."""
    engine = engine_of(model, -(-LIMIT // bs) + spare, bs, max_batch=5, budget=random.choice([5, 16, 100]), lag=lag)
    engine.pages.k.fill_(math.nan), engine.pages.v.fill_(math.nan)
    common, asked = ids(80), []
    for _ in range(10):
        n = random.choice([1, max(1, bs - 1), bs, bs + 1, 2 * bs, LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT])
        prompt = common[:n] if random.random() < 0.5 else ids(n)
        new = random.choice([1, 2, 7, 30, 60])
        asked.append((engine.add(prompt, new, 0.0, n=random.choice([1, 1, 3])), prompt, new))
        if random.random() < 0.5:
            engine.step()
    drain(engine)
    for request, prompt, new in asked:
        want = greedy(model, prompt, new)
        assert all(one.tokens == want and one.state == "length" for one in request.samples)


def test_logits_are_those_of_the_model(model, monkeypatch):
    seen, prompt = [], ids(20)
    engine = engine_of(model, 50, 4, budget=7, graph=False)      # which would call `tokens` once
    tokens = engine.tokens
    monkeypatch.setattr(engine, "tokens", lambda x, *rest: seen.append(model.ln_f(x) @ model.table.T[:, :65]) or tokens(x, *rest))
    request = engine.add(prompt, 10, 0.0)
    drain(engine)
    with torch.no_grad():
        want = model(torch.tensor([request.text[:-1]], device=DEVICE))[0, len(prompt) - 1:]
    rows = [x[0] for x in seen[-len(want):]]
    assert (torch.stack(rows) - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("n", [4, 8])
def test_a_prompt_that_is_all_there_is_found(model, n):
    """Whole blocks: all but the last, whose logits are needed; one after the other, and both at once."""
    engine, prompt = engine_of(model, 50, 4), ids(n)
    first = engine.add(prompt, 5, 0.0)
    drain(engine)
    assert engine.stats["found"] == 0
    second, third = engine.add(prompt, 5, 0.0), engine.add(prompt + ids(1), 5, 0.0)
    drain(engine)
    assert second.tokens == first.tokens and engine.stats["found"] == n - 4 + n


def test_a_hash_of_no_use_changes_nothing(model):
    texts = []
    for hash in (lambda x: 7, __builtins__["hash"] if isinstance(__builtins__, dict) else __builtins__.hash):
        random.seed(1)
        engine = engine_of(model, 14, 3, hash=hash, max_batch=4)
        common = ids(30)
        requests = [engine.add((common if i % 2 else common[1:])[:10 + 3 * i], 20, 0.0) for i in range(6)]
        drain(engine)
        texts.append([r.tokens for r in requests] + [engine.stats])
    assert texts[0] == texts[1] and texts[0][-1]["found"] > 0


def test_a_seed_writes_the_same_alone_and_in_a_crowd(model):
    options = dict(max_new_tokens=50, temperature=0.9, seed=5)
    for more in ({}, dict(top_k=9), dict(top_p=0.8)):
        alone = engine_of(model, 100, 4)
        a = alone.add([1, 2, 3], n=2, **options, **more)
        drain(alone)
        crowd = engine_of(model, 22, 4, max_batch=6, budget=9, lag=1)
        others = [crowd.add(ids(random.randrange(1, 50)), 30, random.choice([0.0, 1.0]), seed=i) for i in range(4)]
        b = crowd.add([1, 2, 3], n=2, **options, **more)
        others += [crowd.add(ids(random.randrange(1, 50)), 30, 1.0, top_p=0.9, seed=i) for i in range(4)]
        drain(crowd)
        assert [r.tokens for r in a.samples] == [r.tokens for r in b.samples]
        assert a.samples[0].tokens != a.samples[1].tokens and all(len(r.tokens) == 30 for r in others)


def test_preempted_requests_write_what_they_would_have(model):
    """A pool of 8 blocks, 16 requests, half of them with a common prefix."""
    engine, common = engine_of(model, 10, 4, max_batch=16), ids(9)
    prompts = [common + ids(3) if i % 2 else ids(12) for i in range(16)]
    requests = [engine.add(prompt, 20, 0.0) for prompt in prompts]
    drain(engine)
    assert engine.stats["preempted"] > 0
    assert all(r.tokens == greedy(model, prompt, 20) for r, prompt in zip(requests, prompts))


def test_what_cannot_fit_is_refused_and_others_go_on(model):
    engine = engine_of(model, 2, 4)
    small = engine.add(ids(3), 4, 0.0)
    for prompt, new in ((9, 1), (5, 5), (1, 9)):
        with pytest.raises(UserError, match=rf"{prompt} \+ {new} tokens needs 3 blocks of 4, and the cache has 2"):
            engine.add(ids(prompt), new)
    other = engine.add(ids(5), 4)                                            # 8 tokens in the cache: the last isn't kept
    drain(engine)
    assert len(small.tokens) == len(other.tokens) == 4


@pytest.mark.parametrize("lag", [0, 1])
def test_stops_and_limits_hold_to_the_token(model, lag):
    prompt = ids(5)
    want = greedy(model, prompt, 30)
    for at in range(8):
        stop = want[at]
        engine = engine_of(model, 50, 4, lag=lag)
        request, other = engine.add(prompt, 30, 0.0, stop=[stop]), engine.add(prompt, at + 1, 0.0)
        drain(engine)
        assert request.tokens == want[:want.index(stop) + 1] and request.state == "stop"
        assert other.tokens == want[:at + 1] and other.state == "length"


def test_bad_requests_and_aborts(model):
    engine = engine_of(model, 20, 4)
    for args, words in ((([],), "empty"), (([65],), "id 65"), (([-1],), "id -1"), (([1], -1), "max_new_tokens=-1"),
                        (([1], 1, -1.0), "temperature"), (([1], 1, 1.0, 0), "top_k"), (([1], 1, 1.0, None, 1.5), "top_p")):
        with pytest.raises(UserError, match=words):
            engine.add(*args)
    for options in (dict(max_new_tokens=2.5), dict(n=1.0), dict(seed="a"), dict(top_k=1.5), dict(stop=[1.5])):
        with pytest.raises(UserError, match="must be a whole number"):
            engine.add([1], **options)
    with pytest.raises(UserError, match="a token=1.7 must be a whole number"):
        engine.add([1.7])
    for name, value in (("temperature", None), ("temperature", "x"), ("top_p", "x"), ("stop", 5), ("stop", None)):
        with pytest.raises(UserError, match=f"{name}={value!r}"):
            engine.add([1], **{name: value})
    with pytest.raises(UserError, match="stop has the id 70"):
        engine.add([1], stop=[70])
    with pytest.raises(UserError, match="n=0"):
        engine.add([1], n=0)
    assert engine.add([1], 0).state == "length" and not engine.busy
    first, second, third = engine.add(ids(9), 30, 0.0, n=3), engine.add(ids(9), 30), engine.add(ids(9), 5, 0.0)
    engine.abort(first)                                                      # before it began: its other samples go on
    engine.step(), engine.step()
    engine.abort(second)
    engine.abort(second)
    drain(engine)
    assert first.state == second.state == "aborted" and first.tokens == [] and len(second.tokens) < 30
    assert [one.state for one in first.samples[1:]] == ["length"] * 2 and third.state == "length"
    engine.abort(third)
    assert third.state == "length"
    for name, options in (("num_blocks=0", (0,)), ("block_size=0", (1, 0)), ("max_batch=0", (1, 1, 0))):
        with pytest.raises(UserError, match=name):
            Engine(model, *options)


def test_numbers_of_any_kind_are_the_same(model):
    texts = []
    for kind in (int, np.int64, torch.tensor):
        engine = engine_of(model, 20, 4)
        texts.append(engine.add([kind(1), kind(2)], kind(6), seed=kind(3), top_k=kind(5)))
        drain(engine)
    assert texts[0].tokens == texts[1].tokens == texts[2].tokens


def test_samples_without_a_row_come_in_order_and_no_event_is_lost(model):
    engine = engine_of(model, 20, 4, max_batch=1)
    samples, seen = engine.add([1, 2], 3, n=5).samples, []
    while engine.busy or engine.events:
        for request, _ in engine.run():
            seen.append(samples.index(request))
            break
    assert seen == [i for i in range(5) for _ in range(3)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_said(model, temperature):
    broken = GPT(model.config, seed=1).to(DEVICE).eval()
    broken.wte.weight.data[0, 0] = math.nan
    engine = engine_of(broken, 20, 4)
    engine.add([1, 2], 4, temperature)
    with pytest.raises(UserError, match="not numbers"):
        drain(engine)


@pytest.mark.parametrize("options", [dict(top_p=1e-46), dict(temperature=1e39), dict(top_p=1e-320, top_k=3)])
def test_extreme_options(model, options):
    engine = engine_of(model, 20, 4)
    request = engine.add([1, 2], 4, **options)
    drain(engine)
    assert len(request.tokens) == 4
    text = model.generate(torch.tensor([[1, 2]], device=DEVICE), 4, **options)[0].tolist()[2:]
    assert "top_p" not in options or request.tokens == text == greedy(model, [1, 2], 4)


@pytest.mark.parametrize("lag", [0, 1])
def test_any_order_of_arrivals_aborts_and_ends(model, lag, monkeypatch):
    """10,000 steps of the books alone, the model a coin: every step gets on, the books are right, nothing is left."""
    engine = engine_of(model, 16, 4, max_batch=6, budget=8, lag=lag)
    def coin(drawn):
        return drawn, range(len(drawn)), torch.tensor([[random.randrange(65)] for _ in drawn])
    monkeypatch.setattr(engine, "mixed", lambda batch: coin(
        [one for r, n in batch if r.computed + n == r.context for one in (r, *engine.fork(r, r.context))]))
    monkeypatch.setattr(engine, "decode", lambda batch: coin([r for r, _ in batch]))
    live, ended, common = [], Counter(), ids(60)
    for step in range(10_000):
        if random.random() < 0.2:
            n = random.randrange(1, 60)
            live += engine.add(common[:n] if random.random() < 0.5 else ids(n), random.randrange(1, 60), stop=ids(1),
                               n=random.choice([1, 1, 4])).samples
        if live and random.random() < 0.05:
            engine.abort(random.choice(live))
        before = engine.stats["computed"], engine.stats["preempted"], len(engine.flying)
        events = engine.step()
        for pool in [engine.pool]:
            pool.check()
            used = Counter(block for r in engine.running for block in r.blocks)
            assert all(pool.users[block] == used[block] for block in range(16))
        assert len(engine.rows) + len(engine.running) == 6
        if engine.busy or events:
            assert events or (engine.stats["computed"], engine.stats["preempted"], len(engine.flying)) != before
        ended.update(r.state for r in live if r.done)
        live = [r for r in live if not r.done]
    drain(engine)
    assert all(r.done for r in live) and min(ended["length"], ended["stop"], ended["aborted"]) > 50
