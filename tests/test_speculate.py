"""speculate.py: what is accepted against the target's distribution, the engine against plain decoding."""

import copy
import math
import random
import sys

import numpy as np
import pytest
import torch
from conftest import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

import flash
import paged
import speculate
from model import GPT, GPTConfig, UserError, distribution
from paged import ContiguousCache, Engine, invert
from speculate import (DROPPED, Lookup, Round, Speculator, accept, accept_rows, divergences, figures, rounding, sentence,
                       speedup, tokens_a_call)

LIMIT = 40      # the target's block_size
needs_triton = pytest.mark.skipif(flash.triton is None, reason="needs Triton")
EACH = [dict(temperature=t, **more) for t in (0.5, 1.0, 2.0) for more in ({}, dict(top_k=3), dict(top_p=0.7))]


def noisy(model, amount):
    model = copy.deepcopy(model)
    for p in model.parameters():
        p.data += amount * torch.randn_like(p) * p.data.abs().mean()
    return model


def random_model(n_layer, block_size=LIMIT, V=65, C=32):
    model = GPT(GPTConfig(vocab_size=V, block_size=block_size, n_layer=n_layer, n_head=2, n_embd=C), seed=None)
    for p in model.parameters():
        torch.nn.init.normal_(p, 0, 0.3 if p.dim() > 1 else 0.1)
    model.wpe.weight.data *= 5      # so that texts don't repeat one token
    return model.to(DEVICE).eval()


@pytest.fixture(scope="module")
def target():
    return random_model(2)


@pytest.fixture(autouse=True)
def rng(seed):
    random.seed(seed)


@pytest.fixture
def kernels(monkeypatch):
    """The Triton kernels, by the interpreter where there is no GPU."""
    monkeypatch.setattr(flash, "INTERPRETED", DEVICE == "cpu")
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def without(monkeypatch, f, *args):
    """f by torch, as on a CPU."""
    with monkeypatch.context() as m:
        m.setattr(flash, "triton", None)
        return f(*args)


def drafts_of(target):
    """Drafts that are never, sometimes and always right; one whose positions end early; text that was before."""
    return [random_model(1), noisy(target, 0.3), target, random_model(1, block_size=LIMIT // 2), None]


def ids(n, V=65):
    return [random.randrange(V) for _ in range(n)]


def greedy(model, prompt, n):
    return model.generate(torch.tensor([prompt], device=DEVICE), n, 0.0)[0].tolist()[len(prompt):]


def drain(engine, check=None):
    while engine.busy:
        engine.step()
        if check:
            check()
    engine.pool.check()
    assert len(engine.pool.free) == len(engine.pool.users) and not engine.running


def chi_square_holds(seen, expected):
    """At a p-value of 1e-5 or more (tests run often), by Wilson and Hilferty's cube root. What is expected fewer than 10
    times counts together, if that makes 10: the statistic's distribution is that of large counts."""
    assert seen[expected == 0].sum() == 0
    often = expected >= 10
    seen, expected = (torch.cat([x[often], x[~often].sum()[None]]) for x in (seen, expected))
    seen, expected = seen[expected >= 10], expected[expected >= 10]
    k = max(1, len(seen) - 1)
    x = float(((seen - expected) ** 2 / expected).sum())
    assert ((x / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)) < 4.27, (x, k)


# ---- what is accepted -------------------------------------------------------------------------------------------

def drawn(p, q, n, count=None):
    """n rounds with the same tables p (gamma + 1, V), q (gamma, V), each completed to gamma + 1 tokens by the target:
    (n, gamma + 1); and how many drafts were kept (n,)."""
    gamma, V = q.shape
    drafts = torch.multinomial(q, n, replacement=True).T                     # (n, gamma)
    count, step = torch.full((n,), gamma) if count is None else count, torch.arange(gamma + 1)
    place = torch.randint(0, 3, (n,))
    history = torch.zeros(n, gamma + 3, dtype=torch.int64).scatter_(1, place[:, None] + step[:-1], drafts)
    mine = (step - gamma + count[:, None]).clamp(min=0)                      # (n, gamma + 1): the last count + 1 of p
    kept, after = accept_rows(p[mine], q.expand(n, -1, -1), history, place, torch.rand(n, gamma + 1).double(), count)
    written = history.gather(1, place[:, None] + step)                       # (n, gamma + 1)
    assert torch.equal(written.gather(1, kept[:, None])[:, 0], after)
    return torch.where(step <= kept[:, None], written, torch.multinomial(p, n, replacement=True).T), kept


def tables(gamma, V=8, **options):
    return (distribution(torch.randn(n, V) * 1.5, **options) for n in (gamma + 1, gamma))


@pytest.mark.parametrize("options", EACH, ids=str)
@pytest.mark.parametrize("gamma", [1, 2, 3, 5, 8])
def test_tokens_and_pairs_are_distributed_as_the_targets(gamma, options):
    n, (p, q) = 200_000, tables(gamma, **options)
    text, kept = drawn(p, q, n, torch.randint(0, gamma + 1, (n,)))           # with fewer drafts than places, too
    for j in range(gamma + 1):
        chi_square_holds(torch.bincount(text[:, j], minlength=8).double(), p[j].double() * n)
        if j:
            pair = torch.bincount(text[:, j - 1] * 8 + text[:, j], minlength=64).double()
            chi_square_holds(pair, torch.outer(p[j - 1], p[j]).flatten().double() * n)


def test_equal_tables_keep_all_and_disjoint_ones_none():
    p, _ = tables(4)
    text, kept = drawn(p, p[:-1], 100_000)
    assert (kept == 4).all()
    half = torch.arange(8) < 4
    p, q = (x / x.sum(-1, keepdim=True) for x in (torch.rand(5, 8) * half, torch.rand(4, 8) * ~half))
    text, kept = drawn(p, q, 100_000)
    assert (kept == 0).all()
    chi_square_holds(torch.bincount(text[:, 0], minlength=8).double(), p[0].double() * 100_000)


@pytest.mark.parametrize("V", [8, 3000])
def test_many_rows_are_each_as_one(V):
    for _ in range(300):
        gamma, seed = random.randrange(1, 9), random.randrange(2 ** 40)
        p, q = (x.to(DEVICE) for x in tables(gamma, V, temperature=random.choice([0.0, 0.5, 1.0])))
        if random.random() < 0.3:
            q = p[:-1].clone()
        drafts = torch.multinomial(q, 1)[:, 0]
        u = torch.rand(gamma + 1, generator=torch.Generator(DEVICE).manual_seed(seed), dtype=torch.float64, device=DEVICE)
        want = accept(p, q, drafts, torch.Generator(DEVICE).manual_seed(seed))
        others = torch.softmax(torch.randn(2, gamma + 1, V, device=DEVICE), -1)
        rows = [torch.stack([a, b, c]) for a, b, c in ((others[0], p, others[1]), (others[0, 1:], q, others[1, 1:]))]
        history, full = torch.cat([drafts, drafts[:1]]).repeat(3, 1), torch.full((3,), gamma, device=DEVICE)
        n, token = accept_rows(*rows, history, full * 0, u.expand(3, -1), full)
        assert (int(n[1]), int(token[1])) == want
        assert history[1, :want[0] + 1].tolist() == [*drafts[:want[0]].tolist(), want[1]]
        n, token = accept_rows(*rows, history, full * 0, u.expand(3, -1), full * 0)
        assert int(n[1]) == 0 and int(token[1]) == int(invert(p[-1:], u[-1:])) == int(history[1, 0])


@needs_triton
@pytest.mark.parametrize("V", [8, 3000])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_kernels_accept_as_torch(gamma, V, monkeypatch, kernels):
    B = 12
    p, q = (torch.randn(B, n, V).mul(2).softmax(-1) for n in (gamma + 1, gamma))
    q[:4], count = p[:4, :-1], torch.randint(0, gamma + 1, (B,))
    count[:4], step, place = gamma, torch.arange(gamma), torch.randint(0, 9, (B,))
    drafts = torch.multinomial(q.view(-1, V), 1).view(B, gamma) if gamma else torch.zeros(B, 0, dtype=torch.int64)
    history = torch.randint(0, V, (B, gamma + 12)).scatter_(1, place[:, None] + step, drafts)
    u = torch.rand(B, gamma + 1).double()
    u[:4, 0], u[4:6, -1] = 1 - 2 ** -53, 0.0
    if gamma:      # a draft that is dropped, and no weight left to any other
        p[0, 0] = q[0, 0] * (1 - 1e-6)
        u[0, 0] = 1 - 1e-9
        q[11, random.randrange(gamma)] = math.nan                            # from there on there are no drafts
    p[10, random.randrange(gamma + 1):] = math.nan
    args, written = [x.to(DEVICE, copy=True) for x in (p, q, history, place, u, count)], history.clone()
    want = without(monkeypatch, accept_rows, p, q, written, place, u, count)
    args[3] = torch.stack([args[3], args[3]], 1)[:, 0]                       # places that don't follow each other
    n, token = (x.cpu() for x in accept_rows(*args))
    assert torch.equal(n, want[0])
    if gamma:
        assert n[0] == 0 and token[0] == drafts[0, 0]
    assert torch.equal(token[1:], want[1][1:]) and (token[[*range(10), 11]] >= 0).all()
    assert torch.equal(args[2][1:].cpu(), written[1:])
    history[range(B), place + n] = token.clamp(min=0)
    assert torch.equal(args[2].cpu(), history)


@pytest.mark.parametrize("gamma", [1, 4])
def test_tokens_a_call_are_as_predicted(gamma):
    p, q = (x[:1].expand(n, -1).contiguous() for x, n in zip(tables(1), (gamma + 1, gamma)))
    alpha = float(torch.minimum(p[0], q[0]).sum())
    _, kept = drawn(p, q, 200_000)
    assert abs((kept + 1.0).mean() - tokens_a_call(alpha, gamma)) < 5 * (kept + 1.0).std() / 200_000 ** 0.5
    assert abs(speedup(alpha, gamma, 0.1) - tokens_a_call(alpha, gamma) / (1 + 0.1 * gamma)) < 1e-12
    assert abs(tokens_a_call(0.8, 4) - (1 - 0.8 ** 5) / 0.2) < 1e-12 and tokens_a_call(1.0, 4) == 5


# ---- a round ----------------------------------------------------------------------------------------------------

def shaken(target, draft, gamma, rows=13):
    """A Speculator whose rows are anywhere, a third of them without a request: near the end of a text, of a context, or
    of the draft's and past it."""
    engine = Speculator(target, 100, 3, rows, draft=draft, gamma=max(1, gamma))
    lengths = random.choices([1, 9, LIMIT // 2 - 1, LIMIT // 2, LIMIT - 2, LIMIT], k=rows)
    engine.length.copy_(torch.tensor(lengths)), engine.behind.copy_(torch.randint(0, 2, (rows,)))
    engine.history.copy_(torch.randint(0, 65, engine.history.shape))
    engine.on_device[1].copy_(torch.tensor([
        [random.random() < 0.67, min(LIMIT, n + random.choice([0, 1, 3, 20])), random.randrange(-n, 1000),
         random.randrange(-2 ** 63, 2 ** 63), 65] for n in lengths]))
    return engine


@needs_triton
@pytest.mark.parametrize("size", [1, 12])
@pytest.mark.parametrize("gamma", range(9))
def test_kernels_begin_and_end_a_round_as_torch(target, gamma, size, monkeypatch, kernels):
    for draft in (target, random_model(1, block_size=LIMIT // 2), None):
        engine = shaken(target, draft, gamma)
        now, want = engine.begin_round(size, gamma), without(monkeypatch, engine.begin_round, size, gamma)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(now, want))
        limit = min(LIMIT, draft.config.block_size) if draft else LIMIT
        for r, (runs, cap, *_) in enumerate(engine.on_device[1][:size].tolist()):
            assert now.count[r] == runs * max(0, min(gamma, min(cap, limit) - int(engine.length[r])))
        n = (torch.rand(size, device=DEVICE) * (now.count + 1)).long()
        token = torch.randint(0, 65, (size,), device=DEVICE).where(torch.rand(size, device=DEVICE) < 0.7, -1)
        (length, history, behind), restore = [x.tolist() for x in engine.state()], engine.keep()
        out = without(monkeypatch, engine.end_round, size, gamma, now, n, token)
        want = [out, *[x.clone() for x in engine.state()]]
        restore()
        got = [engine.end_round(size, gamma, now, n, token), *engine.state()]
        assert all(torch.equal(a, b) for a, b in zip(got, want))
        for r, (kept, last, runs) in enumerate(zip(n.tolist(), token.tolist(), engine.on_device[1][:, 0].tolist())):
            place = length[r] if runs else LIMIT + engine.ahead + 1
            text = history[r][place:place + kept] + [last] + [DROPPED] * (gamma - kept)
            assert got[0][r].tolist() == text + [int(now.count[r])]
            assert got[1][r] == length[r] + (kept + 1) * runs and got[3][r] == ((kept == gamma) if runs else behind[r])


class Operators(TorchDispatchMode):
    """What torch runs outside of the kernels, but for views and room for answers: they run nothing on a GPU."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        frame, out, name = sys._getframe(), f(*args, **(kwargs or {})), f.__name__.split(".")[0]
        while frame and not frame.f_code.co_filename.startswith(flash.triton.__path__[0]):
            frame = frame.f_back
        places = [x.untyped_storage().data_ptr() for x in (*args, out) if isinstance(x, torch.Tensor)]
        view = name == "unbind" or places[-1] in places[:-1] and not name.endswith("_")
        if not frame and not view and "empty" not in name:
            self.seen.append(name)
        return out


@pytest.mark.skipif(flash.triton is None or not paged.recent(), reason="needs Triton 3.5, for products of a few rows")
@pytest.mark.parametrize("limit,gamma,how", [(LIMIT, 3, "greedy"), (LIMIT // 4, 3, "warm"), (LIMIT // 4, 1, "plain")])
def test_a_round_is_kernels_alone(target, limit, gamma, how, kernels):
    model, draft = copy.deepcopy(target).half(), random_model(1, block_size=limit).half()
    engine = Speculator(model, 20, 4, 1, draft=draft, gamma=3)
    engine.on_device[1][0, :2] = torch.tensor([1, 30])
    with torch.inference_mode():
        engine.decode_rows(1, how, gamma)      # some tables are made once
        with Operators() as operators:
            engine.decode_rows(1, how, gamma)
    assert operators.seen == []


@needs_triton
def test_a_text_by_kernels_in_16_bits(kernels):
    """All of them together, on a text that begins anew where its context ends."""
    model, prompt, texts = random_model(1, C=16).half(), ids(LIMIT - 4), []
    for engine in (Engine(model, 20, 4, 1), Speculator(model, 20, 4, 1, draft=model, gamma=3)):
        texts.append(engine.add(prompt, 9, 0.0))
        drain(engine)
    assert all(steps <= 6 for _, steps in divergences(model, texts[:1], texts[1:]))
    assert len(texts[1].tokens) == 9 and {"draft", "target"} <= set(texts[1].wrote)


@needs_triton
@pytest.mark.parametrize("draft", [0.3, LIMIT // 4, None])
def test_kernels_write_torchs_texts(draft, monkeypatch, kernels):
    """Forks, preemption, rows that don't run, contexts that end; of models that look at a token and its place alone,
    with which the interpreter is done soon."""
    for module in (paged, speculate):
        monkeypatch.setattr(module, "trunk", lambda model, idx, pos, attend: paged.embed(model, idx, pos))
    target = random_model(1, V=8, C=16)
    who = draft and (noisy(target, draft) if draft < 1 else random_model(1, block_size=draft, V=8, C=16))
    gamma, blocks = random.choice([1, 2, 3, 4, "auto"]), random.choice([10, 14, 60])
    asked = [(ids(random.choice([1, 5, 9, LIMIT - 3, LIMIT + 1]), 8), random.choice([1, 2, 7, 20]), how)
             for how in random.sample([*EACH, *[dict(temperature=0.0)] * 4], 4)]

    def written():
        engine = Speculator(target, blocks, 4, 5, 16, draft=who, gamma=gamma, graph=False)
        engine.costs = dict.fromkeys(range(9), (1.0, [1, 8], [0.05, 0.4], [1.05, 1.4]))
        texts = [one for prompt, n, how in asked for one in engine.add(prompt, n, seed=n, n=1 + n // 7, **how).samples]
        drain(engine)
        return [(r.tokens, r.wrote) for r in texts], {k: v for k, v in engine.stats.items() if type(v) is int}
    assert written() == without(monkeypatch, written)


# ---- whole texts ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("options", [{}, dict(temperature=0.6), dict(top_k=2), dict(top_p=0.8, temperature=1.5)], ids=str)
@pytest.mark.parametrize("lookup", [False, True])
def test_short_texts_against_enumeration(options, lookup):
    V, T, n = 4, 3, 4000
    model = random_model(1, block_size=16, V=V, C=16)
    engine = Speculator(model, 8 * 64, 4, 64, draft=None if lookup else noisy(model, 0.5), gamma=2)
    prompt = [1, 2, 1, 2]
    texts = engine.add(prompt, T, seed=random.randrange(2 ** 40), n=n, **options).samples
    drain(engine)
    expected = torch.ones(1, dtype=torch.float64)
    for j in range(T):
        prefixes = torch.cartesian_prod(*[torch.arange(V)] * j).view(-1, j) if j else torch.zeros(1, 0, dtype=torch.int64)
        idx = torch.cat([torch.tensor(prompt).expand(len(prefixes), -1), prefixes], 1).to(DEVICE)
        with torch.no_grad():
            p = distribution(model(idx)[:, -1], **options)
        expected = (expected[:, None] * p.double().cpu()).flatten()
    seen = torch.zeros(V ** T, dtype=torch.float64)
    for one in texts:
        seen[sum(token * V ** (T - 1 - j) for j, token in enumerate(one.tokens))] += 1
    chi_square_holds(seen, expected * n)
    assert lookup or 0 < engine.stats["accepted"] < engine.stats["tested"]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("gamma", range(1, 9))
def test_greedy_text_is_the_targets(target, gamma, lag):
    """Prompts around the edges of blocks and of the context, any draft, a pool that forces preemption, forks, NaN in all
    that nobody wrote."""
    for draft in drafts_of(target):
        bs = random.choice([1, 3, 4, 16])
        engine = Speculator(target, -(-LIMIT // bs) + random.choice([0, 2, 100]), bs, random.choice([1, 5]), 16,
                            draft=draft, gamma=gamma)
        engine.lag = max(lag, engine.lag)
        for pages in engine.caches():
            pages.k.fill_(math.nan), pages.v.fill_(math.nan)
        common, requests = ids(60), []
        for length in random.choices([1, 2, bs, bs + 1, 2 * bs, 7, LIMIT - 2, LIMIT - 1, LIMIT, LIMIT + 1, 60], k=7):
            prompt = common[:length] if random.random() < 0.5 else ids(length)
            requests += engine.add(prompt, random.choice([1, 2, 5, 20, LIMIT, LIMIT + 20]), 0.0,
                                   n=random.choice([1, 1, 3])).samples
        drain(engine)
        for r in requests:
            assert r.tokens == greedy(target, r.text[:r.prompt], r.max_new_tokens) and len(r.wrote) == len(r.tokens)
        if draft is target and engine.stats["tested"]:
            assert engine.stats["accepted"] == engine.stats["tested"]        # its cache is right


@pytest.mark.parametrize("gamma", [1, 4])
def test_after_every_round_both_caches_hold_what_was_accepted(target, gamma):
    kept = set()
    for draft in (target, noisy(target, 0.05), noisy(target, 0.3)):
        engine, before = Speculator(target, 60, 4, 5, draft=draft, gamma=gamma), {}
        engine.lag = 0
        for pages in engine.caches():
            pages.k.fill_(math.nan), pages.v.fill_(math.nan)
        for n in (1, 3, 4, 9, 30):
            engine.add(ids(n), LIMIT - n + 1, 0.0)

        def check():
            for r in [r for r in engine.running if r.computed]:
                kept.add(len(r.tokens) - before.get(r, 0) - 1)
                before[r] = len(r.tokens)
                for model, pages, n in ((target, engine.pages, len(r.text) - 1), (draft, engine.draft.pages, r.computed)):
                    assert len(r.text) - 1 - n in (0, 1)
                    fresh = ContiguousCache(model, n)
                    with torch.no_grad():
                        model(torch.tensor([r.text[:n]], device=DEVICE), attend=fresh)
                    for mine, want in ((pages.k, fresh.k), (pages.v, fresh.v)):
                        found = mine[:, r.blocks].flatten(1, 2)[:, :n].transpose(1, 2)       # (L, nh, n, hs)
                        assert (found - want[:, 0]).abs().max() < 1e-4 * want.abs().max()
        drain(engine, check)
    assert {0, gamma} <= kept and (gamma == 1 or len(kept) > 2)


@pytest.mark.parametrize("lag", [0, 1])
def test_limits_and_stops_hold_to_the_token(target, lag):
    prompt = ids(5)
    want = greedy(target, prompt, 30)
    for draft in (target, noisy(target, 0.3), None):
        engine = Speculator(target, 100, 4, 8, draft=draft, gamma=8)
        engine.lag = max(lag, engine.lag)
        cut = [engine.add(prompt, n, 0.0) for n in (0, 1, 2, 5, 9, 10, 30)]
        stopped = [engine.add(prompt, 30, 0.0, stop=[token]) for token in want[:20]]
        drain(engine)
        assert [r.tokens for r in cut] == [want[:r.max_new_tokens] for r in cut]
        for r, token in zip(stopped, want):
            assert r.tokens == want[:want.index(token) + 1] and r.state == "stop"


@pytest.mark.parametrize("draft", [0.3, None])
def test_a_seed_writes_the_same_alone_and_in_a_crowd(target, draft):
    draft = noisy(target, draft) if draft else None
    prompts = [ids(random.choice([1, 4, 5, 17])) for _ in range(8)]
    options = [dict(random.choice(EACH), seed=j, max_new_tokens=20) for j in range(8)]

    def written(together, blocks):
        engine, texts = Speculator(target, blocks, 4, 5, draft=draft, gamma=3), []
        for prompt, how in zip(prompts, options):
            texts.append(engine.add(prompt, **how))
            if not together:
                drain(engine)
        drain(engine)
        return [r.tokens for r in texts]
    assert written(False, 100) == written(True, 100) == written(True, 12)


def test_a_draft_that_diverged_writes_nothing(target):
    """From some place on its logits are no numbers."""
    draft = noisy(target, 0.1)
    draft.wpe.weight.data[12:] = math.nan
    prompts = [ids(3), ids(7), ids(20)]
    plain = Engine(target, 100, 4, 4)
    want = [plain.add(prompt, 15, 0.0) for prompt in prompts]
    drain(plain)
    for temperature in (0.0, 2e-6):      # drawn, but from one token, if no two are as likely
        engine = Speculator(target, 100, 4, 4, draft=draft, gamma=3)
        texts = [engine.add(prompt, 15, temperature) for prompt in prompts]
        drain(engine)
        assert all(steps < 100 for _, steps in divergences(target, want, texts))
        assert "draft" in texts[0].wrote and (temperature == 0 or set(texts[2].wrote) == {"target"})


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_target_that_diverged_is_said_and_other_texts_go_on(temperature, lookup):
    """Logits are no numbers from place 9 on."""
    broken = random_model(2)
    broken.wpe.weight.data[9:] = math.nan
    engine = Speculator(broken, 60, 4, 4, draft=None if lookup else broken, gamma=8)
    long, short = (engine.add([5, 3, 5, 3, 5], n, temperature, seed=1) for n in (20, 3))
    errors = 0
    for _ in range(50):
        try:
            engine.step()
        except UserError as error:
            errors += "not numbers" in str(error)
    assert not engine.busy and errors == 1 and long.state == "aborted" and len(long.tokens) == len(long.wrote) < 5
    assert short.state == "length" and len(short.tokens) == len(short.wrote) == 3
    assert temperature > 0 or short.tokens == greedy(broken, [5, 3, 5, 3, 5], 3)


def test_accept_refuses_what_it_cannot_judge():
    p, q = torch.rand(4, 7).softmax(1), torch.rand(3, 7).softmax(1)
    drafts = torch.tensor([1, 6, 0])
    assert accept(p, q, drafts)[0] in range(4)
    for bad in ((p[1:], q, drafts), (p, q[1:], drafts), (p, q[:, :6], drafts), (p, q, drafts[:2]), (p, q, drafts + 1),
                (p, q, drafts - 1), (p * math.nan, q, drafts), (p, q * math.inf, drafts)):
        with pytest.raises(ValueError):
            accept(*bad)


def test_the_advice_is_not_what_was_just_tried():
    said = dict(tested=9, alpha=0.7, gamma=1.0, c=0.6, check=1.1, calls=(1.7, 1.7), speedup=(1.0, 0.9), auto=False,
                without=0.0)
    assert "leave out --speculative" in sentence(said, "x")
    cheap = dict(said, gamma=8.0, c=0.1, check=2.6)
    assert "--gamma=auto might" in sentence(cheap, "x") and "leave out" in sentence(dict(cheap, auto=True), "x")
    assert "leave out" in sentence(dict(cheap, without=0.9, speedup=(1.0, 0.6)), "x")
    assert "gamma 8 in 25% of the calls" in sentence(dict(cheap, without=0.75), "x")
    assert "none to look at" in sentence(dict(said, tested=0), "x")


def test_a_vocabulary_in_pieces():
    target, draft = random_model(1, V=3000), random_model(1, V=3000)
    for who in (draft, target, None):
        engine, prompt = Speculator(target, 60, 4, 2, draft=who, gamma=2), ids(9, 3000)
        text = engine.add(prompt, 12, 0.0)
        engine.add(prompt, 12, 1.0)
        drain(engine)
        assert text.tokens == greedy(target, prompt, 12)


def test_what_was_before_is_looked_up():
    engine = Speculator(random_model(1), 30, 4, 2, draft=None, gamma=5)
    for text, want in (([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1, 2, 3]),          # the longest, continued
                       ([7, 1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2, 6, 1]),       # of equals the latest, and around
                       ([5, 5], [5] * 5), ([3, 1, 2, 3, 8, 2, 3], [8, 2, 3, 8, 2]), ([1, 2, 3], None), ([4], None)):
        engine.history.fill_(want[0] if want else 3)      # past the text is anything
        engine.history[0, :len(text)] = torch.tensor(text)
        full = torch.full((1,), 5, device=DEVICE)
        length = full * 0 + len(text)
        columns = torch.arange(6, device=DEVICE)
        now = Round(full.clone(), length + columns[None], None, length + columns[None], None, None)
        q = Lookup().propose(engine, 1, "plain", 5, now)
        assert now.count.item() == (5 if want else 0) == now.total[0, 5] - len(text)
        drafts = engine.history[0, len(text):len(text) + 5].tolist()
        assert want is None or drafts == want and (q[0, torch.arange(5), want] == 1).all()


def test_gamma_follows_acceptance_and_cost(target):
    for draft, least, most in ((target, 6, 8), (random_model(1), 1, 2)):
        engine = Speculator(target, 100, 4, 4, draft=draft, gamma="auto")
        engine.costs = dict.fromkeys(range(9), (1.0, [1, 8], [0.05, 0.4], [1.05, 1.4]))      # else this machine's
        for _ in range(8):
            engine.add(ids(3), 30, 0.0)
        drain(engine)
        assert least <= engine.gamma <= most


def test_what_a_round_costs_is_a_line_between_what_was_measured(target):
    engine = Speculator(target, 100, 4, draft=target, gamma="auto")
    engine.costs[1] = 1.0, [1, 8], [0.1, 0.8], [2.0, 2.7]
    assert engine.cost(1, 0) == (0.0, 1.0) and engine.cost(1, 4) == pytest.approx((0.4, 2.3))
    engine.lag = 0
    assert engine.turn_seconds(3.0, 1.0) == 4.0
    engine.lag = 1
    assert engine.turn_seconds(3.0, 1.0) == engine.turn_seconds(1.0, 3.0) == 3.0


def test_figures_of_known_times(target):
    """Two kinds of steps, with drafts and without, on a host that waits for the device and one that doesn't."""
    engine = Speculator(target, 100, 4, draft=target, gamma=3)
    engine.costs[2] = 1.0, [3], [0.6], [2.0]
    engine.turns.update({(2, 3): [(2.5, 0.5), (2.5, 0.5), (9.0, 0.5)], (2, 0): [(1.5, 0.5)]})
    engine.counts.update({3: 4, 1: 2, 0: 2})
    engine.stats.update(accepted=7, tested=14, written=15)
    calls = (4 * 1.875 + 2 * 1.5 + 2) / 8
    for lag, plain, predicted, check in ((0, 1.5, 3 * 2.5 + 1.5, (2.5 - 0.6) / 1.5), (1, 1.0, 3 * 2.0 + 1.0, 1.4)):
        engine.lag = lag
        f = figures(engine)
        assert (f["alpha"], f["gamma"], f["without"], f["tested"]) == (0.5, 3.0, 0.25, 14)
        assert f["calls"] == pytest.approx((calls, 15 / 8)) and f["c"] == pytest.approx(0.2 / plain)
        assert f["check"] == pytest.approx(check)
        assert f["speedup"] == pytest.approx((calls * 4 * plain / predicted, 15 / 8 * 4 * plain / (3 * 2.5 + 1.5)))
    engine.costs.clear()
    assert math.isnan(figures(engine)["speedup"][1]) and "too little" in sentence(figures(engine), "x")
    engine.costs[2] = 1.0, [3], [0.6], [2.0]
    for few in ({}, {(2, 3): [(2.5, 0.5)]}):      # as after a text of a few tokens
        engine.turns.clear(), engine.turns.update(few)
        assert "gamma 3 in 75% of the calls" in (said := sentence(figures(engine), "x")) and "too little" in said
    engine.restart_stats()
    assert figures(engine) is None


def test_bad_requests_are_refused_in_a_sentence(target):
    for most in (0, 1.5):
        with pytest.raises(UserError, match="most"):
            Speculator(target, 10, draft=target, gamma="auto", most=most)
    assert Speculator(target, 10, gamma=True).gamma == 1
    for gamma in (0, -1, 2.5, 2.0, "much"):
        with pytest.raises(UserError, match="gamma"):
            Speculator(target, 10, draft=target, gamma=gamma)
    with pytest.raises(UserError, match="66 .* 65"):
        Speculator(target, 10, draft=random_model(1, V=66))


def test_padded_ids_are_never_written():
    target, draft = random_model(1, V=50), random_model(1, V=50)             # tables of 64 rows
    for model in (target, draft):
        model.wte.weight.data[50:] = 100 * torch.randn(14, 32)
    engine = Speculator(target, 100, 4, 8, draft=draft, gamma=4)
    texts = [engine.add(ids(3, 50), 30, 2.0, seed=j) for j in range(8)]
    drain(engine)
    assert max(max(r.tokens) for r in texts) < 50


def test_aborts_and_arrivals_leave_nothing(target):
    engine = Speculator(target, 14, 4, 4, 16, draft=noisy(target, 0.2), gamma=3)
    engine.lag = 1
    live, texts = [], []
    for step in range(400):
        if random.random() < 0.3:
            live += engine.add(ids(random.randrange(1, 30)), random.randrange(1, 20), 0.0, n=random.choice([1, 2])).samples
        if live and random.random() < 0.1:
            engine.abort(random.choice(live))
        engine.step() if engine.busy else None
        engine.pool.check()
        texts += [r for r in live if r.done and r.state != "aborted"]
        live = [r for r in live if not r.done]
    drain(engine)
    assert len(texts) > 20
    for r in random.sample(texts, 20):
        assert r.tokens == greedy(target, r.text[:r.prompt], r.max_new_tokens)


@pytest.mark.parametrize("lag", [0, 1])
def test_measuring_changes_nothing(target, lag):
    """What plain decoding and a draft take is measured in the middle of texts, by steps whose tokens are dropped."""
    for draft in (noisy(target, 0.3), None):
        engine, prompts = Speculator(target, 100, 4, 4, draft=draft, gamma=3), [ids(n) for n in (1, 5, 9)]
        engine.lag, engine.timing = max(lag, engine.lag), True
        texts = [engine.add(prompt, 20, 0.0) for prompt in prompts]
        while engine.busy:
            engine.step()
            engine.costs.clear()      # to be measured before each step
        assert [r.tokens for r in texts] == [greedy(target, prompt, 20) for prompt in prompts]
        engine.add(prompts[0], 20, 0.0)
        drain(engine)
        measured = figures(engine)
        assert measured["alpha"] == engine.alpha and all(x > 0 for x in (*measured["calls"], *measured["speedup"]))
        assert "didn't pay" in sentence(dict(measured, speedup=(2.0, 0.75)), "x")
        assert "didn't pay" not in sentence(dict(measured, speedup=(2.0, 1.75)), "x")


def test_where_the_draft_cannot_follow_none_is_asked(target, monkeypatch):
    """Past the draft's positions a step is a plain one; a new context begins with drafts again."""
    draft = random_model(1, block_size=LIMIT // 4)
    engine, asked = Speculator(target, 50, 4, 2, draft=draft, gamma=3), []
    propose = engine.draft.propose
    monkeypatch.setattr(engine.draft, "propose", lambda engine, size, how, gamma, now: asked.append(
        now.total[:, 0].tolist()) or propose(engine, size, how, gamma, now))
    engine.lag, engine.graph = 0, False
    prompts = [ids(3), ids(4)]
    texts = [engine.add(prompt, LIMIT + 20, 0.0) for prompt in prompts]
    drain(engine)
    assert [r.tokens for r in texts] == [greedy(target, prompt, LIMIT + 20) for prompt in prompts]
    assert all(min(n for n in lengths if n) < LIMIT // 4 for lengths in asked)
    assert {gamma for _, gamma in engine.turns} == {0, 3} and figures(engine)["without"] > 0


def test_where_greedy_texts_part_is_found(target):
    engine = Speculator(target, 50, 4, draft=target, gamma=2)
    a, b = engine.add(ids(5), 10, 0.0), engine.add(ids(5), 10, 0.0)
    drain(engine)
    b.text = a.text[:]
    assert divergences(target, [a], [b]) == []
    b.text[9] = (a.text[9] + 1) % 65
    (at, steps), = divergences(target, [a], [b])
    best, second, *_ = target(torch.tensor([a.text[:9]], device=DEVICE))[0, -1].sort(descending=True).values.tolist()
    spacing = float(np.spacing(np.float32(max(abs(best), abs(second)))))
    assert at == 4 and abs(steps * spacing - (best - second)) < 1e-4
    assert rounding(target, [a]) == 0


def test_how_far_16_bits_move_two_logits(target):
    engine = Engine(target, 50, 4)
    text = engine.add(ids(5), 10, 0.0)
    drain(engine)
    model, most = copy.deepcopy(target).to(torch.bfloat16), 0.0
    rounded = copy.deepcopy(model).to(torch.float32)      # the same weights, which bfloat16 holds exactly
    for at in range(1, len(text.text)):
        idx = torch.tensor([text.text[:at]], device=DEVICE)
        exact = rounded(idx)[0, -1].tolist()
        a, b = sorted(range(len(exact)), key=exact.__getitem__)[-2:]
        got = model(idx)[0, -1].tolist()
        spacing = 2.0 ** (math.floor(math.log2(max(abs(exact[a]), abs(exact[b])))) - 7)      # 8 bits
        most = max(most, abs((got[b] - got[a]) - (exact[b] - exact[a])) / spacing)
    assert 0.1 < most < 20 and most / 3 < rounding(model, [text]) < 3 * most      # calls of other lengths round differently


@pytest.mark.skipif(DEVICE == "cpu", reason="bfloat16 on a GPU")
def test_in_16_bits_greedy_texts_part_only_where_two_logits_are_alike(target):
    model, prompts = target.to(torch.bfloat16), [ids(random.randrange(1, 20)) for _ in range(50)]
    try:
        texts = []
        for engine in (Engine(model, 400, 4), Speculator(model, 400, 4, draft=model, gamma=4)):
            texts.append([engine.add(prompt, 20, 0.0) for prompt in prompts])
            drain(engine)
        apart = divergences(model, *texts)
        print(f"{len(apart)} of 50 texts differ")
        assert len(apart) < 25 and all(steps <= 6 for _, steps in apart), apart
    finally:
        target.to(torch.float32)


@pytest.mark.skipif(DEVICE == "cpu", reason="there is no device to wait for")
@pytest.mark.parametrize("gamma", [None, 3])
def test_nothing_that_the_host_does_waits_for_the_device(target, gamma):
    """But for tokens of the step before: prompts that come and go, copies of shared blocks, texts that begin anew."""
    engine = Engine(target, 300, 4) if gamma is None else Speculator(target, 300, 4, draft=target, gamma=gamma)
    for mode in (0, "error"):      # first what is captured and compiled
        random.seed(3)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for _ in range(6):
                engine.add(ids(random.randrange(1, LIMIT)), 30, 0.0, n=random.choice([1, 3]))
                for _ in range(3):
                    engine.step()
            drain(engine)
        finally:
            torch.cuda.set_sync_debug_mode(0)
    assert engine.stats["copied"] > 0
