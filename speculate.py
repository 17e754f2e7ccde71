"""Speculative decoding: several tokens for one call of the target, with its exact distribution.

What it teaches: a step of decoding reads all of the weights to compute one token, and reading is what takes the time: a
step on five tokens takes hardly longer. The trouble is that the tokens have to be known. So a small model, the draft,
guesses gamma of them one after the other, and the target looks at all guesses in one call. What it keeps is drawn so
that the text has the target's distribution, whatever the draft; a poor one costs time alone.

    draft     the cat [sat] [on] [the] [roof]        4 cheap calls: x_j drawn from q_j
    target             ok    ok    ok    no          1 call: p_1 .. p_5, keep x_j with probability min(1, p_j / q_j)
    text      the cat  sat   on    the   mat         the first that isn't kept is drawn anew, from max(0, p_j - q_j)

Why that is exact: token x comes out with q(x) min(1, p(x) / q(x)) = min(p, q) from a draft that was kept; otherwise,
which happens with probability 1 - sum min(p, q) = sum max(0, p - q), from max(0, p - q) over that sum: together p(x).
Were all kept, the call has one distribution left, and one more token is drawn from it.

If each draft is kept with probability alpha, a call gives (1 - alpha^(gamma + 1)) / (1 - alpha) tokens; if a draft's
call takes c of a target's, that is done in 1 + c gamma of its time. In truth the target's call on gamma + 1 tokens
takes a little longer than one on a single token, so that in the place of 1 stands what is measured, `check`.

Papers: Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318); prompt lookup: Saxena 2023.

    python train.py && python sample.py --speculative --gamma=4 --color
    python speculate.py                              acceptance and speed-up over gamma, predicted beside measured

Reads top to bottom: acceptance for one text, for many; where drafts come from; the engine of paged.py with both.
What it can't do: trees of drafts; draft and target on different devices.
"""

from __future__ import annotations      # kernels name tl.constexpr, also where there is no tl

import math
import sys
import time
from collections import Counter, defaultdict, deque
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from flash import jit, runs_kernels, tl, triton
from model import DTYPES, Options, UserError, load_model, pick_device, pick_dtype, program
from paged import (CAP, OFFSET, RUNS, SEED, TEMPERATURE, TOP_K, TOP_P, Engine, draw, draw_by_kernels, follow, head,
                   invert, overlap, piece_of, served, trunk, uniform, uniform_jit, whole)

DROPPED = -2      # in the place of a token that wasn't kept
GAMMAS = range(1, 65)      # what the programs take for gamma

# --------------------------------------------------------------------------------------------------------------
# 1. What is kept

def accept(p, q, drafts, generator=None):
    """The heart: which drafts are kept, and the token after them.

    p (gamma + 1, V), q (gamma, V): the target's and the draft's probabilities, after temperature, top-k and top-p;
    drafts (gamma,) int64, x_j drawn from q[j]. -> (n_accepted in 0 .. gamma, next_token), ints: drafts[:n_accepted]
    and next_token are distributed as the target's own tokens. ValueError for shapes that don't go together, ids beyond
    V, and what is no number. Leviathan et al. 2023, algorithm 1."""
    gamma, V = len(drafts), p.size(-1)
    if p.shape != (gamma + 1, V) or q.shape != (gamma, V) or ((drafts < 0) | (drafts >= V)).any():
        raise ValueError(f"{gamma} drafts below {V} want p ({gamma + 1}, {V}) and q ({gamma}, {V}), not "
                         f"{drafts.tolist()}, {tuple(p.shape)} and {tuple(q.shape)}")
    if not (p.isfinite().all() and q.isfinite().all()):
        raise ValueError("p and q must be numbers")
    u = torch.rand(gamma + 1, generator=generator, dtype=torch.float64, device=p.device)
    for j, x in enumerate(drafts.tolist()):
        if u[j] * q[j, x] >= p[j, x]:      # with probability 1 - min(1, p / q)
            residual = (p[j] - q[j]).clamp(min=0)
            if not residual.any():         # p = q, and rounding alone said no
                residual = p[j]
            return j, int(invert(residual[None], u[-1:]))
    return gamma, int(invert(p[-1:], u[-1:]))


def accept_rows(p, q, history, place, u, count):
    """accept for many texts at once. Their drafts stand in history (B, m) from place (B,) on, and the token after those
    that are kept is put there too, 0 for -1.

    p (B, gamma + 1, V), of which the last count + 1 belong to a row's drafts and the token after them: with gamma 4 and
    count 1 row 3 is for the draft and row 4 for what follows it. q (B, gamma, V), from the first on; random numbers u
    (B, gamma + 1) in [0, 1); count (B,) int64: how many of a row's drafts are drafts, the others aren't looked at, nor
    is one whose q is no number. -> n_accepted (B,), next_token (B,), int64, -1 where p is no number."""
    if runs_kernels(p):
        return accept_by_kernels(p.contiguous(), q.contiguous(), history, place, u, count)
    (B, gamma), row = q.shape[:2], torch.arange(len(q), device=p.device)
    step, skipped = torch.arange(gamma, device=p.device), gamma - count
    x = history.gather(1, place[:, None] + step)                             # (B, gamma)
    p_x = p[row[:, None], (skipped[:, None] + step).clamp(max=gamma), x]     # (B, gamma)
    q_x = q.gather(2, x[..., None])[..., 0]                                  # (B, gamma)
    count = torch.minimum(count, (q_x == q_x).long().cumprod(1).sum(1))
    kept = (u[:, :-1] * q_x < p_x) & (step < count[:, None])
    n = kept.long().cumprod(1).sum(1)                                        # (B,): until the first that isn't
    p_n = residual = p[row, skipped + n]                                     # (B, V)
    if gamma:
        there = (n < count)[:, None]                                         # else all were kept: nothing to take off
        residual = torch.where(there, p_n - q[row, n.clamp(max=gamma - 1)], p_n).clamp(min=0)
        residual = torch.where(residual.any(1, keepdim=True), residual, p_n)
    token = torch.where(residual.sum(1).isfinite(), invert(residual, u[:, -1]), -1)
    history.scatter_(1, (place + n)[:, None], token.clamp(min=0)[:, None])
    return n, token


@jit
def accept_kernel(p_ptr, q_ptr, history_ptr, place_ptr, u_ptr, count_ptr, n_ptr, to_ptr, else_ptr, rest_ptr, sum_ptr, V,
                  gamma, history_row, place_row, u_row, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """How many of a row's drafts are kept, and where the token after them goes; in this piece of the ids the weights by
    which it is drawn, and their sum."""
    follow(OVERLAP, "then")
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, count, n, goes_on, x = tl.load(place_ptr + r * place_row), tl.load(count_ptr + r), r * 0, r >= 0, r * 0
    drafts, first = history_ptr + r * history_row + place, r * (gamma + 1) + gamma - count      # first: of p's rows
    for j in range(gamma):
        x = tl.load(drafts + j)
        p_x, q_x = tl.load(p_ptr + (first + tl.minimum(j, count)) * V + x), tl.load(q_ptr + (r * gamma + j) * V + x)
        count = tl.where(q_x == q_x, count, tl.minimum(count, j))
        goes_on &= (j < count) & (tl.load(u_ptr + r * u_row + j) * q_x < p_x)
        n += goes_on.to(tl.int64)
    at = i * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(p_ptr + (first + n) * V + at, mask=at < V, other=0.0)
    if n < count:
        x = tl.load(drafts + n)
        rest -= tl.load(q_ptr + (r * gamma + n) * V + at, mask=at < V, other=0.0)
        rest = tl.where(rest < 0, 0.0, rest)      # what is no number stays none, which a maximum would make 0
    tl.store(else_ptr + r, x)      # to keep if no weight is left: p = q, and rounding alone said no
    tl.store(rest_ptr + r * V + at, rest, mask=at < V)
    tl.store(sum_ptr + r * tl.num_programs(1) + i, tl.sum(rest.to(tl.float64), 0))
    tl.store(n_ptr + r, n)
    tl.store(to_ptr + r, place + n)


def accept_by_kernels(p, q, history, place, u, count):
    """accept_rows, in two kernels."""
    (B, gamma, V), BLOCK = q.shape, piece_of(q.size(2))
    (n, to, otherwise), rest = history.new_empty(3, B), p.new_empty(B, V)
    sums = p.new_empty(B, triton.cdiv(V, BLOCK), dtype=torch.float64)
    with torch.cuda.device_of(p):
        accept_kernel[(B, sums.size(1))](
            p, q, history, place, u, count, n, to, otherwise, rest, sums, V, gamma, history.stride(0), place.stride(0),
            u.stride(0), BLOCK=BLOCK, **overlap(p.device))
    return n, draw_by_kernels(rest, None, u[:, -1], "sorted", None, (history, to), sums, otherwise)


def tokens_a_call(alpha, gamma):
    """Tokens that a call of the target gives, expected: 1 + alpha + ... + alpha^gamma."""
    return (1 - alpha ** (gamma + 1)) / (1 - alpha) if alpha < 1 else gamma + 1


def speedup(alpha, gamma, c, check=1.0, without=0.0):
    """Against plain decoding, if a call of the draft takes c of one of the target, and the target's on gamma + 1 tokens
    `check` of one on a single token: 1 in Leviathan et al. 2023, theorem 3.8. without: the share of plain steps among
    the rounds, 0 there."""
    some = 1 - without
    return (without + some * tokens_a_call(alpha, gamma)) / (without + some * (check + c * gamma))


# --------------------------------------------------------------------------------------------------------------
# 2. Drafts
#
#     propose(engine, size, how, gamma, now) -> q (size, gamma, V)
#
# for rows 0 .. size - 1 of the engine: puts drafts into its history where the Round `now` says, and gives what they
# were drawn from. Who has fewer than now.count lessens that, and with it the tokens that the target's call sees.

class Round(NamedTuple):
    """What a round goes by, for each row. Of gamma + 1 columns one is for each draft, the last for the target."""
    count: torch.Tensor      # (size,) int64: drafts that there is room for, 0 .. gamma
    total: torch.Tensor      # (size, gamma + 1) int64: tokens of the context that a call sees; in the first its length
    low: torch.Tensor        # likewise: the first of their places whose keys and values it writes
    place: torch.Tensor      # likewise: where in the history a draft goes; the last: what is drawn if all are kept
    guess: torch.Tensor      # (size, gamma + 1), as `uniform`: random numbers to draw drafts by; the last: idle
    test: torch.Tensor       # likewise: to test drafts by; the last: to draw the token after them


class Drafts:
    """What the engine asks of either kind, beside `propose`; here that of one which keeps nothing."""

    caches = ()                              # pages
    limit = sys.maxsize                      # of a context's tokens

    def forward(self, ids, pos, layout):
        """Tokens of prompts at pos (N,), as Engine.forward."""


class Model(Drafts):
    """Drafts by a smaller model. Its keys and values lie in pages of their own, at the target's places: one block table
    serves both.

    After gamma drafts it has computed all of them but the last. Were all kept, that entry is missing: the engine's
    `behind`. So its first call takes two tokens, of which the earlier one's keys and values are written only then."""

    def __init__(self, model, engine):
        self.model, self.pages, self.limit = model, engine.cache(model), model.config.block_size
        self.caches = (self.pages,)

    def forward(self, ids, pos, layout):
        self.pages.layout = layout
        return trunk(self.model, ids, pos, self.pages)                       # (N, C)

    def propose(self, engine, size, how, gamma, now):
        _, numbers, shares = (x[:size] for x in engine.on_device)
        q = shares.new_empty(size, gamma, engine.vocab)
        for j in range(gamma):      # past a row's count nothing is looked at, and only the count-th still writes
            x = self.forward(*engine.layout(now.total[:, j], 2 if j == 0 else 1, now.low[:, j]))
            x = x.view(size, -1, self.model.config.n_embd)[:, -1]            # (size, C), of the newest token
            draw(head(self.model, x), shares[:, TEMPERATURE], numbers[:, TOP_K], shares[:, TOP_P], now.guess[:, j], how,
                 keep=q[:, j], into=(engine.history[:size], now.place[:, j]))
        return q


class Lookup(Drafts):
    """Drafts without a model: what followed the longest earlier occurrence of the text's last tokens, of equals the
    latest. It's sure of them: q is 1 for its token. Where nothing occurred before, nothing is drafted."""

    def __init__(self, longest=8):
        self.longest = longest

    def propose(self, engine, size, how, gamma, now):
        history, n, device, length = engine.history[:size], self.longest, engine.device, now.total[:, 0]
        index = torch.arange(history.size(1), device=device)
        windows = F.pad(history, (n - 1, 0), value=-1).unfold(1, n, 1)       # (size, m, n): what ends at each place
        ends = (length - 1).clamp(min=0)[:, None]                            # (size, 1)
        same = windows == windows.gather(1, ends[..., None].expand(-1, -1, n))
        same = same & (windows >= 0)                                         # (size, m, n)
        match = same.flip(2).long().cumprod(2).sum(2)                        # (size, m): how many tokens agree
        score = torch.where(index < ends, match * len(index) + index, -1)    # the longest, then the latest
        best = score.argmax(1, keepdim=True)                                 # (size, 1)
        found = match.gather(1, best)[:, 0] * (length > 1)
        period = (ends - best).clamp(min=1)                                  # from there the text is its own draft
        step = engine.steps[:gamma]
        drafts = history.gather(1, best + 1 + step % period)                 # (size, gamma)
        history.scatter_(1, now.place[:, :gamma], drafts)
        none = torch.where(found > 0, 0, now.count)                          # (size,): what isn't drafted after all
        now.count.sub_(none), now.total[:, gamma].sub_(none)
        return F.one_hot(drafts, engine.vocab).float()


# streams of random numbers beside the one that the target draws from; a place in the text is drafted and tested each by
# its own number, and one that is drafted again was dropped for what came before it, so its number is unused. The token
# after the drafts, one a round, is drawn by the number of the round's first place
DRAFTS, TESTS = 0x5851F42D4C957F2D, 0x14057B7EF767814F


# --------------------------------------------------------------------------------------------------------------
# 3. The engine: a step of decoding is a round of drafts and one call of the target
#
# The target's call takes gamma + 1 tokens of each row, the newest one and the drafts. Near the end of a text or of the
# context there is room for fewer drafts, `count`; then the call begins that many tokens earlier instead, at tokens that
# have been computed before and aren't written again. What was rejected is left where it is, past the context's length,
# and overwritten: truncation is a smaller number. How many tokens a round gave is known on the device, which begins the
# next from it; the host learns it one round later, and until then reckons with all.
#
# What a round goes by are a few numbers a row. One kernel makes them all at its begin, and one puts down what came of
# it at its end: the operators of torch's that it would take instead let no kernel overlap with the next.

class Speculator(Engine):
    """An Engine that decodes speculatively: what it writes has the target's distribution, and is its greedy text at
    temperature 0.

    draft: a GPT of the same vocabulary, or None to look up drafts in the text; gamma: drafts a round, 1 or more, or
    "auto", up to `most`: by how many are accepted, and the measured cost. Everything else as for Engine."""

    def __init__(self, model, num_blocks, *args, draft=None, gamma=4, most=8, **kwargs):
        if draft is not None and draft.config.vocab_size != model.config.vocab_size:
            raise UserError(f"the draft has a vocabulary of {draft.config.vocab_size} ids and the target one of "
                            f"{model.config.vocab_size}: they must be the same")
        for name, x in (("gamma", 1 if gamma == "auto" else gamma), ("most", most)):
            if whole(name, x) < 1:
                raise UserError(f"{name}={x} must be at least 1" + (", or auto" if name == "gamma" else ""))
        gamma, most = gamma if gamma == "auto" else int(gamma), int(most)
        self.auto = self.timing = gamma == "auto"
        self.ahead = most if self.auto else gamma
        self.gamma = min(4, self.ahead) if self.auto else gamma
        super().__init__(model, num_blocks, *args, **kwargs)
        self.draft = Lookup() if draft is None else Model(draft, self)
        self.behind = torch.zeros_like(self.length)      # 1 where a row's last round kept gamma drafts, else 0
        self.steps = torch.arange(self.ahead + 1, device=self.device)
        self.stats.update(tested=0, accepted=0, written=0, measuring=0.0)
        self.counts = Counter()                  # of rounds of a request, by the number of their drafts
        # of the latest steps that only decode: by (rows, gamma), seconds and the host's share; the host's share alone
        self.turns, self.hosts = defaultdict(partial(deque, maxlen=4096)), deque(maxlen=15)
        self.costs = {}      # by number of rows, as measured if `timing`: what `measure` gives

    def caches(self):
        return [*super().caches(), *self.draft.caches]

    def state(self):
        return [*super().state(), self.behind]

    def add(self, *args, **kwargs):
        """As Engine.add; a Request's `wrote` says of each token who wrote it: "draft" (and the target kept it),
        "target" (in the place of a draft, or where there was none), "bonus" (the target, after all were kept)."""
        request = super().add(*args, **kwargs)
        for one in request.samples:
            one.wrote = []
        return request

    def restart_stats(self):
        super().restart_stats()
        self.counts.clear(), self.turns.clear()

    # ---- on the host

    def due(self, r):
        """All but the newest token: a round begins with that."""
        return r.context - 1 - r.computed

    def plan(self):
        """Prompts first, in steps of their own: so where a text's rounds begin depends on nothing else in the batch."""
        copies = {}
        while True:
            for r in [r for r in self.running if not r.at_hand and not self.due(r)]:
                for one in (r, *self.fork(r, r.computed)):
                    one.at_hand = True
            batch, more = super().plan()
            copies.update((b, a) for a, b in more)
            prompts = [(r, n) for r, n in batch if not r.at_hand]
            if not prompts or any(n for _, n in prompts):
                return [(r, n) for r, n in prompts if n] or batch, [(a, b) for b, a in copies.items()]

    def seat(self, r, blocks, computed):
        super().seat(r, blocks, computed)
        text, = self.upload(r.text[r.start:])
        self.history[r.row, :len(text)] = text
        self.length[r.row].fill_(len(text)), self.behind[r.row].zero_()      # to assign a number is to wait

    def prefill(self, ids, pos, layout):
        self.draft.forward(ids, pos, layout)
        return super().prefill(ids, pos, layout)

    def key(self, size, requests):
        size, how = super().key(size, requests)
        if self.timing and size not in self.costs:
            begin = time.perf_counter()
            self.costs[size] = self.measure(size, how)
            self.stats["measuring"] += time.perf_counter() - begin
        if self.auto and self.stats["tested"] and self.hosts:
            host, some = median(self.hosts), range(1, self.ahead + 1)
            self.gamma = max(zip(some, self.cost(size, some)[1]), key=lambda each: (
                tokens_a_call(self.alpha, each[0]) / self.turn_seconds(each[1], host)))[0]
        beyond = all(len(r.text) - r.start >= self.draft.limit for r in requests)      # where the draft can't follow
        self.decoding = size, 0 if beyond else self.gamma
        return size, how, self.decoding[1]

    @property
    def alpha(self):
        """The share of the drafts looked at that was kept."""
        return self.stats["accepted"] / max(1, self.stats["tested"])

    def measure(self, size, how):
        """For rows 0 .. size - 1 -> seconds of the device: those of a step of an Engine's decoding; numbers of drafts,
        one or, for "auto", the least and the most; for each of them the drafts' seconds, and a round's. For when a step
        is about to begin, and has room for what this writes; it leaves the state as it was."""
        gammas, restore = sorted({1, self.ahead}) if self.auto else [self.gamma], self.keep()
        step = partial(self.replay, super().decode_rows, size, how)
        calls = [lambda: None, step] + [partial(self.replay, f, size, how, gamma)
                                        for f in (self.propose, self.decode_rows) for gamma in gammas]

        def timed(f):
            begin = time.perf_counter()
            for each in (step, f):      # a step first: while a device is at it the host goes ahead, so that in the end
                each()                  # the device is what takes the time
                restore()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter() - begin
        with torch.inference_mode():
            for f in calls:      # once for what is captured or compiled
                timed(f)
            taken, start = [], time.perf_counter()
            while len(taken) < 3 or len(taken) < 15 and time.perf_counter() - start < 0.5:
                taken.append([timed(f) for f in calls])                      # in turn: what disturbs, disturbs all
        taken = np.array(taken)                                              # (repeats, calls)
        plain, *more = np.maximum(1e-9, np.median(taken[:, 1:] - taken[:, :1], 0))
        drafts, rounds = more[:len(gammas)], more[len(gammas):]
        return plain, gammas, drafts, np.maximum(rounds, np.add(drafts, plain))

    def cost(self, size, gamma):
        """Seconds of the device for gamma drafts, and for a round of them; between what was measured, a line. gamma: a
        number, or several above 0."""
        plain, gammas, drafts, rounds = self.costs.get(size, (math.nan, [1], [math.nan], [math.nan]))
        return (np.interp(gamma, gammas, drafts), np.interp(gamma, gammas, rounds)) if np.all(gamma) else (0.0, plain)

    def turn_seconds(self, device, host):
        """What a step takes, of which the device's part and the host's take so long: side by side, or in turn."""
        return max(device, host) if self.lag else device + host

    def turn(self):
        """A step; those that only decode are timed, but for what is captured or measured in them."""
        begin, waited = time.perf_counter(), self.waited
        before, self.decoding = len(self.graphs) + len(self.costs), None
        super().turn()
        if self.decoding and before == len(self.graphs) + len(self.costs):
            taken = time.perf_counter() - begin
            self.hosts.append(taken - (self.waited - waited))
            self.turns[self.decoding].append((taken, self.hosts[-1]))

    def take(self, r, tokens):
        """Tokens of a round, and the number of its drafts."""
        *tokens, count = tokens
        gamma, length, before = len(tokens) - 1, len(r.text) - r.start, len(r.text)
        tokens = [token for token in tokens if token != DROPPED]
        n = len(tokens) - 1
        if r.state == "running":      # else it let go of all that it had computed
            r.computed = length + n - (0 < gamma == n)
        try:
            super().take(r, tokens)
        finally:      # also if what followed them was no number
            r.wrote += (["draft"] * n + ["bonus" if 0 < count == n else "target"])[:len(r.text) - before]
            self.counts[count] += 1
            for name, value in (("accepted", n), ("tested", min(n + 1, count)), ("written", len(r.text) - before)):
                self.stats[name] += value

    # ---- on the device

    def begin_round(self, size, gamma):
        """-> Round, of rows 0 .. size - 1."""
        numbers, limit = self.on_device[1][:size], min(self.limit, self.draft.limit)
        if runs_kernels(numbers):
            count, (total, low, place) = numbers.new_empty(size), numbers.new_empty(3, size, gamma + 1)
            guess, test = numbers.new_empty(2, size, gamma + 1, dtype=torch.float64)
            now = Round(count, total, low, place, guess, test)
            with torch.cuda.device_of(numbers):
                begin_kernel[(size,)](
                    numbers, self.length, self.behind, *now, gamma, limit, self.limit + self.ahead + 1,
                    numbers.stride(0), DRAFTS=DRAFTS, TESTS=TESTS, BLOCK=triton.next_power_of_2(gamma + 1), num_warps=1,
                    **overlap(self.device))
            return now
        runs, cap, offset, seed = (numbers[:, column] for column in (RUNS, CAP, OFFSET, SEED))      # (size,) each
        length, place = self.places(size)
        count = (cap.clamp(max=limit) - length).clamp(0, gamma) * runs
        step = self.steps[:gamma + 1]                                        # (gamma + 1,)
        after = torch.where(step < gamma, step, 0)      # tokens after the newest with which a column's work begins
        low = (length - 1)[:, None] + after - torch.where(step == 0, self.behind[:size, None], 0)
        n, seed = (length + offset)[:, None] + after, seed[:, None]
        return Round(count, length[:, None] + torch.minimum(count[:, None], step), low, place[:, None] + step,
                     uniform(seed + DRAFTS, n), uniform(torch.where(step < gamma, seed + TESTS, seed), n))

    def end_round(self, size, gamma, now, n, token):
        """Takes in that n (size,) drafts were kept, and token (size,) after them. -> (size, gamma + 2): these, DROPPED
        after them, and the number of drafts."""
        numbers = self.on_device[1][:size]
        if runs_kernels(numbers):
            out = numbers.new_empty(size, gamma + 2)
            with torch.cuda.device_of(numbers):
                end_kernel[(size,)](
                    numbers, self.length, self.behind, self.history, now.place, now.count, n, token, out, gamma,
                    numbers.stride(0), self.history.stride(0), DROPPED=DROPPED,
                    BLOCK=triton.next_power_of_2(gamma + 2), num_warps=1, **overlap(self.device))
            return out
        runs, step = numbers[:, RUNS], self.steps[:gamma + 1]
        out = torch.where(step == n[:, None], token[:, None], DROPPED)       # (size, gamma + 1)
        out = torch.where(step < n[:, None], self.history[:size].gather(1, now.place), out)
        self.length[:size] += (n + 1) * runs
        self.behind[:size] = torch.where(runs > 0, (n == gamma).long(), self.behind[:size])
        return torch.cat([out, now.count[:, None]], 1)

    def propose(self, size, how, gamma):
        """The drafts of a round alone."""
        return self.draft.propose(self, size, how, gamma, self.begin_round(size, gamma))

    def decode_rows(self, size, how, gamma):
        """A round for rows 0 .. size - 1, as end_round gives it. Without drafts it's a plain step."""
        if not gamma:
            token = super().decode_rows(size, how)                           # (size, 1)
            return torch.cat([token, torch.zeros_like(token)], 1)
        _, numbers, shares = (x[:size] for x in self.on_device)
        now = self.begin_round(size, gamma)
        q = self.draft.propose(self, size, how, gamma, now)                  # (size, gamma, V)
        x = self.forward(*self.layout(now.total[:, gamma], gamma + 1, now.low[:, gamma]))      # (size (gamma + 1), C)
        p = shares.new_empty(len(x), self.vocab)                             # (size (gamma + 1), V)
        draw(head(self.model, x), shares[:, TEMPERATURE], numbers[:, TOP_K], shares[:, TOP_P], None, how, keep=p)
        p = p.view(size, gamma + 1, -1)      # (size, gamma + 1, V): the last draft's is the last but one
        n, token = accept_rows(p, q, self.history[:size], now.place[:, 0], now.test, now.count)
        return self.end_round(size, gamma, now, n, token)


@jit
def begin_kernel(numbers_ptr, length_ptr, behind_ptr, count_ptr, total_ptr, low_ptr, place_ptr, guess_ptr, test_ptr,
                 gamma, limit, nowhere, numbers_row, DRAFTS: tl.constexpr, TESTS: tl.constexpr, BLOCK: tl.constexpr,
                 OVERLAP: tl.constexpr):
    """Speculator.begin_round, a row a program."""
    follow(OVERLAP, "then")
    r, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row, to, real = numbers_ptr + r * numbers_row, r * (gamma + 1) + j, j <= gamma
    runs, cap, offset, seed = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    length, after = tl.load(length_ptr + r) * runs, tl.where(j < gamma, j, 0)
    count = tl.minimum(tl.maximum(tl.minimum(cap, limit) - length, 0), gamma) * runs
    tl.store(count_ptr + r, count)
    tl.store(total_ptr + to, length + tl.minimum(count, j), mask=real)
    tl.store(low_ptr + to, length - 1 + after - tl.where(j == 0, tl.load(behind_ptr + r), 0), mask=real)
    tl.store(place_ptr + to, tl.where(runs > 0, length, nowhere) + j, mask=real)
    n = length + offset + after
    tl.store(guess_ptr + to, uniform_jit(seed + DRAFTS, n), mask=real)
    tl.store(test_ptr + to, uniform_jit(tl.where(j < gamma, seed + TESTS, seed), n), mask=real)


@jit
def end_kernel(numbers_ptr, length_ptr, behind_ptr, history_ptr, place_ptr, count_ptr, n_ptr, token_ptr, out_ptr, gamma,
               numbers_row, history_row, DROPPED: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Speculator.end_round, a row a program."""
    follow(OVERLAP, "then")
    r, j = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    runs, n, token = tl.load(numbers_ptr + r * numbers_row), tl.load(n_ptr + r), tl.load(token_ptr + r)
    text = history_ptr + r * history_row + tl.load(place_ptr + r * (gamma + 1))
    out = tl.where(j < n, tl.load(text + j, mask=j < n, other=0), tl.where(j == n, token, DROPPED))
    out = tl.where(j > gamma, tl.load(count_ptr + r), out)
    tl.store(out_ptr + r * (gamma + 2) + j, out, mask=j < gamma + 2)
    tl.store(length_ptr + r, tl.load(length_ptr + r) + (n + 1) * runs)
    if runs > 0:
        tl.store(behind_ptr + r, (n == gamma).to(tl.int64))


def figures(engine):
    """What a Speculator has done, {alpha, c, check as for `speedup`; gamma: drafts of a round that has any; calls:
    tokens a call of the target, predicted and measured; speedup: against plain decoding, likewise; tested: drafts that
    were looked at; without: the share of rounds that had none; auto}. Plain decoding takes what `measure` found, and
    what the host takes beside it. NaN where there was too little to measure; None if there was no round at all."""
    rounds, alpha, found = sum(engine.counts.values()), engine.alpha, []
    if not rounds:
        return None
    for (size, gamma), turns in engine.turns.items():
        taken, host = np.median(turns, 0)
        (_, plain), (drafts, device) = engine.cost(size, 0), engine.cost(size, gamma)
        each = 1, taken, engine.turn_seconds(plain, host), engine.turn_seconds(device, host), drafts
        found.append([gamma, *(len(turns) * x for x in each)])
    gamma, n, taken, plain, predicted, drafts = np.array(found).reshape(-1, 6).T               # (kinds of steps,) each
    if n.sum() < 3:      # one alone may be disturbed
        plain = plain * math.nan
    some, drafted = gamma > 0, gamma * n
    calls = (sum(n * tokens_a_call(alpha, count) for count, n in engine.counts.items()) / rounds,
             engine.stats["written"] / rounds)
    with np.errstate(invalid="ignore"):      # 0 / 0
        one = plain[some].sum() / n[some].sum()
        gamma = drafted.sum() / n[some].sum() if some.any() else engine.gamma
        return dict(tested=engine.stats["tested"], without=engine.counts[0] / rounds, auto=engine.auto, alpha=alpha,
                    gamma=gamma, c=drafts.sum() / drafted.sum() / one, calls=calls,
                    check=(predicted - drafts)[some].sum() / plain[some].sum(),
                    speedup=tuple(float(call * plain.sum() / x.sum()) for call, x in zip(calls, (predicted, taken))))


def sentence(f, kind):
    """figures as one sentence, and a second one where speculation doesn't pay."""
    if not f["tested"]:
        return (f"drafts by {kind}: there was none to look at; none is made past the draft's context, at the end of a "
                "text, or of what didn't occur before")
    text = (f"drafts by {kind}: alpha {f['alpha']:.2f}, gamma {f['gamma']:.2g}" + (
        f" in {100 - 100 * f['without']:.2g}% of the calls of the target, none in the others" if f["without"] else "")
        + f", {f['calls'][1]:.2f} tokens a call (predicted {f['calls'][0]:.2f})")
    predicted, measured = f["speedup"]
    if math.isnan(measured):
        return f"{text}; too little text to measure the time"
    text += (f"; {measured:.2f} times as fast as plain decoding (predicted {predicted:.2f}: a draft costs c = "
             f"{f['c']:.2f} of the target's step, and checking makes that {f['check']:.2f} times as long)")
    if measured >= 1:
        return text
    most = max(speedup(f["alpha"], n, f["c"], without=f["without"]) for n in range(1, 9))
    pays = not f["auto"] and most * min(1.0, measured / predicted) > 1      # if checking cost nothing
    advice = "--gamma=auto might find a gamma that pays" if pays else "leave out --speculative"
    each = f["c"] + (f["check"] - 1) / f["gamma"]
    return (f"{text}\nspeculation didn't pay here: making and checking a draft cost {each:.2f} of the target's step, "
            f"and it is kept with probability {f['alpha']:.2f}; {advice}")


def draft_beside(ckpt):
    """The draft that train.py puts beside a checkpoint: its Path, whether it's there or not. ckpt: a file or folder."""
    path = Path(ckpt)
    return (path if path.is_dir() else path.parent) / "draft.pt"


def check_pair(target, its, path, draft, theirs, draft_path):
    """UserError unless target and draft, GPTs, have the same tokens, by their Tokenizers `its` and `theirs`."""
    if draft.config.vocab_size != target.config.vocab_size:
        raise UserError(f"the draft {draft_path} has {draft.config.vocab_size} ids and the model {path} has "
                        f"{target.config.vocab_size}: they must have the same tokens")
    kinds = {its.kind, theirs.kind}
    same = "ids" in kinds or len(kinds) == 1      # ids without their text may be anybody's
    if not same or kinds == {"gpt2"} and its.pairs.get_vocab() != theirs.pairs.get_vocab():
        raise UserError(f"the draft {draft_path} ({theirs.file or theirs.kind}) and the model {path} "
                        f"({its.file or its.kind}) read text differently: they must have the same tokens")


# --------------------------------------------------------------------------------------------------------------
# The chapter's claims, predicted beside measured: python speculate.py

def show_acceptance(n=100_000, V=50, gamma=4):
    """accept_rows on tables: alpha, the tokens of a call, and whether the first token has the target's distribution."""
    print(f"1  {n:,} rounds on random tables of {V} ids, gamma = {gamma}\n   {'draft':16}{'alpha: sum min(p, q)':>22}"
          f"{'measured':>10}{'tokens a call':>15}{'measured':>10}{'largest error of a frequency, deviations':>43}")
    g = torch.Generator().manual_seed(1)
    logits, noise = torch.randn(2, V, generator=g)
    for name, amount in (("as the target", 0.0), ("near", 0.5), ("far", 2.0)):
        p, q = (2 * logits).softmax(0), (2 * logits + amount * noise).softmax(0)
        text = torch.multinomial(q, n * (gamma + 1), replacement=True, generator=g).view(n, gamma + 1)
        kept, _ = accept_rows(p.expand(n, gamma + 1, V), q.expand(n, gamma, V), text, torch.zeros(n, dtype=torch.int64),
                              torch.rand(n, gamma + 1, generator=g).double(), torch.full((n,), gamma))
        alpha = float(torch.minimum(p, q).sum())
        first = torch.bincount(text[:, 0], minlength=V) / n      # a draft, or the token in its place
        tested = (kept + 1).clamp(max=gamma).sum()
        print(f"   {name:16}{alpha:22.3f}{kept.sum() / tested:10.3f}{tokens_a_call(alpha, gamma):15.3f}"
              f"{kept.float().mean() + 1:10.3f}{((first - p).abs() / (p / n).sqrt()).max():43.1f}")


def spacing(logits, dtype):
    """The distance between neighboring numbers of the dtype, of the largest logit's size. (..., n) -> (...)"""
    return torch.finfo(dtype).eps * logits.abs().amax(-1).clamp(min=1e-30).log2().floor().exp2()


@torch.inference_mode()
def divergences(model, plain, other):
    """Where two greedy texts of a prompt, Requests, first differ: [(place, how many of the dtype's steps the two best
    logits are apart there)] of the pairs that do. Rounding differs with the number of tokens in a call, so that in
    16 bits either of two nearly equal tokens may come first."""
    found = []
    for a, b in zip(plain, other):
        at = next((i for i, (x, y) in enumerate(zip(a.text, b.text)) if x != y), None)
        if at is not None:
            idx = torch.tensor([a.text[:at]], device=model.table.device)
            best = model(idx)[0, -1].topk(2).values.float()      # (2,)
            found.append((at - a.prompt, float((best[0] - best[1]) / spacing(best, model.table.dtype))))
    return found


@torch.inference_mode()
def rounding(model, texts):
    """How far the dtype moves what two best logits are apart, from what the same weights give in float32: the most over
    all places of these Requests' texts, in steps."""
    exact, most = deepcopy(model).float(), 0.0
    for text in texts:
        idx = torch.tensor([text.text[:-1]], device=model.table.device)
        best, which = exact(idx)[0].topk(2)                      # (t, 2)
        moved = (model(idx)[0].gather(1, which).float() - best).diff(dim=-1)[:, 0].abs()         # (t,)
        most = max(most, float((moved / spacing(best, model.table.dtype)).max()))
    return most


def show_engine(target, tokenizer, draft, gammas, device, dtype):
    """Decoding with and without drafts, the same prompts, by our own engine."""
    text, V = Path(__file__).read_text(), target.config.vocab_size
    ids = [i % V for i in (tokenizer.encode(text) if tokenizer.kind != "ids" else range(9999))]
    T = max(1, min(64, target.config.block_size // 4))
    new = max(1, min(256, target.config.block_size - T))
    print(f"2  {target.num_params():,} parameters, draft of {draft.num_params():,}, on {device}; {T} + {new} tokens\n"
          f"   {'':22}{'alpha':>6}{'c':>6}{'check':>7}{'tokens a call':>15}{'measured':>10}{'speed-up':>10}"
          f"{'measured':>10}{'whole texts':>14}{'tokens/s':>10}")
    for R, temperature in ((1, 0.0), (1, 1.0), (16, 0.0), (16, 1.0)):
        n = max(R, 4) if device.type == "cuda" else R      # one after the other, if there are more
        prompts = [ids[at:at + T] for at in np.linspace(0, len(ids) - T, n + 1).astype(int)[1:].tolist()]
        blocks = R * (-(-(T + new) // 16) + 1)
        plain, _, want = served(Engine(target, blocks, 16, R), prompts, new, temperature)
        apart, count, name = [], 0, f"batch {R}, temperature {temperature:.0f}"
        print(f"   {name:22}{'plain':>6}{'':72}{n * new / plain:10,.0f}", flush=True)
        for who, gamma in [(draft, gamma) for gamma in gammas] + [(draft, "auto"), (None, 4)]:
            engine = Speculator(target, blocks, 16, R, draft=who, gamma=gamma)
            engine.timing = True
            taken, _, texts = served(engine, prompts, new, temperature)
            f, count = figures(engine), count + n
            apart += divergences(target, want, texts) if temperature == 0 else []
            name = f"{'gamma' if who else 'lookup, gamma'} {gamma}" + (f": {f['gamma']:.1f}" if gamma == "auto" else "")
            print(f"   {name:22}{f['alpha']:6.2f}{f['c']:6.2f}{f['check']:7.2f}{f['calls'][0]:15.2f}"
                  f"{f['calls'][1]:10.2f}{f['speedup'][0]:10.2f}{f['speedup'][1]:10.2f}{plain / taken:14.2f}"
                  f"{n * new / taken:10,.0f}", flush=True)
        if temperature == 0:
            most = max((steps for _, steps in apart), default=0)
            print(f"   {len(apart)} of {count} texts differ from the plain ones" + (
                f": first where the two best logits are at most {most:.1f} steps of {dtype} apart, and its rounding "
                f"moves that by up to {rounding(target, want):.1f} in these texts" if apart else ""))


def chapter(argv=None):
    p = Options(prog="speculate.py", description=__doc__.split("\n\n")[0], epilog="c: what a draft costs in terms of "
                "the target's step; check: the target's call on gamma + 1 tokens, likewise; speed-up: of steps in "
                "which all decode; whole texts: with their prompts, and until the last has ended")
    p.add_argument("--ckpt", help="the target, a checkpoint or a folder (default: out/ckpt.pt)")
    p.add_argument("--draft", help="the draft, likewise (default: draft.pt beside the target)")
    p.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 4, 6, 8], help="(default: 1 2 4 6 8)")
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or mps (default: auto)")
    p.add_argument("--dtype", default="auto", choices=DTYPES, help="(default: auto)")
    args = p.parse(argv)
    bad = next((gamma for gamma in args.gammas if gamma not in GAMMAS), None)
    if bad is not None:
        raise UserError(f"gammas={bad} must be from {GAMMAS[0]} to {GAMMAS[-1]}")
    device, ckpt = pick_device(args.device), "out/ckpt.pt" if args.ckpt is None else args.ckpt
    pair = ckpt, draft_beside(ckpt) if args.draft is None else args.draft
    dtype, given = pick_dtype(args.dtype, device), (args.ckpt, args.draft) != (None, None)
    if given or all(Path(path).exists() for path in pair):
        (target, its), (draft, theirs) = (load_model(path, device, dtype) for path in pair)
        check_pair(target, its, pair[0], draft, theirs, pair[1])
        show_acceptance()
        show_engine(target, its, draft, args.gammas, device, dtype)
    else:
        show_acceptance()
        print(f"2  decoding wants a target and a draft, {pair[0]} and {pair[1]}: python train.py makes both")


if __name__ == "__main__":
    sys.exit(program("speculate.py", chapter))
