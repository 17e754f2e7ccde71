"""A paged KV cache, and the engine that serves many requests from it.

What it teaches: generation reads the keys and values of all earlier tokens at each step, so they are kept. Where? If
each request gets one stretch of memory, it has to be as long as the request might get, and most of it stays empty. An
operating system has met that problem, and its answer serves here: pages.

    operating system                     here
    page, a fixed number of bytes        block, `block_size` tokens' keys and values, in all layers
    page table of a process              block table of a request: which block has its tokens 0 .. 15, 16 .. 31, ...
    process                              request
    shared page, copied when written     common prefix, forked samples
    swapping out                         preemption: let go of the blocks, compute them again later

Papers: PagedAttention (Kwon et al. 2023, 2309.06180); iteration-level scheduling (Yu et al. 2022, Orca, OSDI); chunked
prefill (Agrawal et al. 2024, 2403.02310); split over the context (Dao et al. 2023, Flash-Decoding).

    python paged.py                                  the chapter's claims, predicted beside measured
    python sample.py --num_samples=64                the engine in use

Reads top to bottom: the naive cache and what it wastes, blocks, attention through block tables, a block in few kernels,
sampling, the engine.
What it can't do: more than one GPU. Where there are no kernels (float64, heads above 256) it's exact and slow.
"""

from __future__ import annotations      # kernels name tl.constexpr, also where there is no tl

import math
import sys
import time
from collections import OrderedDict, defaultdict, deque
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from numbers import Real
from operator import index
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash import LOG2E, attends, has_kernels, jit, runs_kernels, tl, torch_attention, triton
from model import GPT, GPTConfig, Options, UserError, check_sampling, derive, distribution, gelu, program

# --------------------------------------------------------------------------------------------------------------
# 1. The naive cache: one stretch of memory a request

class ContiguousCache:
    """Keys and values of one sequence, in room for `length` tokens that is taken at once: an `attend`. The oracle for
    every cache here, and what wastes memory.

    model: GPT. Call the model with the tokens that are new, their positions, and this as attend; then `advance`."""

    def __init__(self, model, length):
        config, p = model.config, model.table
        shape = config.n_layer, 1, config.n_head, length, config.n_embd // config.n_head
        self.k, self.v = p.new_empty(shape), p.new_empty(shape)              # (L, 1, nh, length, hs)
        self.used = 0

    def __call__(self, layer, q, k, v):
        """q, k, v (1, nh, t, hs) of the new tokens -> (1, nh, t, hs)."""
        end = self.used + q.size(2)
        self.k[layer, :, :, self.used:end], self.v[layer, :, :, self.used:end] = k, v
        return torch_attention(q, self.k[layer, :, :, :end], self.v[layer, :, :, :end])

    def advance(self, t):
        self.used += t


class ContiguousPool:
    """Room for `size` tokens, given out in one piece each, the first hole that is large enough."""

    def __init__(self, size):
        self.size, self.taken = size, {}                                     # {begin: length}

    def allocate(self, n):
        """-> where it begins, None if no hole is large enough."""
        at = 0
        for begin, length in sorted(self.taken.items()):
            if begin - at >= n:
                break
            at = begin + length
        if at + n > self.size:
            return None
        self.taken[at] = n
        return at

    def free(self, begin):
        del self.taken[begin]


def contiguous_waste(requests, size, reserve):
    """What a contiguous cache does with its memory. requests: [(prompt, new)] tokens, taken in order as soon as there
    is room; reserve(prompt, new): tokens of room for one. -> shares of the memory, averaged over the steps while
    requests wait: used by tokens, reserved (for tokens to come or that never come), free but too scattered for the next
    one."""
    pool, waiting, running = ContiguousPool(size), deque(requests), []
    shares = []
    while waiting:
        while waiting and (at := pool.allocate(reserve(*waiting[0]))) is not None:
            running.append([at, *waiting.popleft()])
        used = sum(length for _, length, _ in running)
        reserved = sum(pool.taken.values())
        if waiting:
            shares.append((used, reserved - used, size - reserved))
        for one in running:
            one[1], one[2] = one[1] + 1, one[2] - 1
        for at, _, left in running:
            if left == 0:
                pool.free(at)
        running = [one for one in running if one[2]]
    return np.mean(shares, 0) / size


# --------------------------------------------------------------------------------------------------------------
# 2. Blocks: who uses which, and which can be shared. No tensors here
#
# A full block's content is fixed by its tokens and by all tokens before them. Its key is a hash of (the key of the
# block before, its tokens), so that a lookup walks a prompt block by block. A hash can collide: tokens are compared,
# and so is what came before, by the number that each content got when it was first seen.

class BlockPool:
    """num_blocks blocks of block_size tokens. A block is free, or has one or more users; a free one keeps its content,
    to be found again, until it is needed: those without content first, then the one free for longest."""

    def __init__(self, num_blocks, block_size, hash=hash):
        self.block_size, self.hash = block_size, hash
        self.users = [0] * num_blocks
        self.content = [None] * num_blocks                                   # (key, number of parent, tokens, number)
        self.free = OrderedDict.fromkeys(range(num_blocks))                  # the next to be taken first
        self.by_key, self.numbers = defaultdict(list), count(1)

    def allocate(self):
        """-> a block with one user and no content; None if all are in use."""
        if not self.free:
            return None
        block, _ = self.free.popitem(last=False)
        if self.content[block]:
            self.by_key[self.content[block][0]].remove(block)
            if not self.by_key[self.content[block][0]]:
                del self.by_key[self.content[block][0]]
            self.content[block] = None
        self.users[block] = 1
        return block

    def share(self, block):
        """One more user."""
        if not self.users[block]:
            del self.free[block]
        self.users[block] += 1

    def release(self, block):
        """One user less."""
        self.users[block] -= 1
        if not self.users[block]:
            self.free[block] = None
            if not self.content[block]:      # nothing to be found again: it goes first
                self.free.move_to_end(block, last=False)

    def find(self, chain, tokens):
        """The block with these tokens after what `chain` stands for, None if there is none."""
        for block in self.by_key.get(self.hash((chain[0], tokens)), ()):
            if self.content[block][1:3] == (chain[1], tokens):
                return block

    def lookup(self, tokens):
        """-> the blocks that hold a prefix of tokens, as many as there are, and the chain that they stand for."""
        blocks, chain, n = [], (0, 0), self.block_size
        for i in range(0, len(tokens) - n + 1, n):
            block = self.find(chain, tuple(tokens[i:i + n]))
            if block is None:
                break
            blocks.append(block)
            chain = self.content[block][0], self.content[block][3]
        return blocks, chain

    def register(self, block, chain, tokens):
        """Lets others find a block that is full of `tokens` now. -> the chain that stands for what ends with it."""
        tokens, key = tuple(tokens), self.hash((chain[0], tuple(tokens)))
        known = self.find(chain, tokens)
        if known is None:
            self.content[block] = key, chain[1], tokens, next(self.numbers)
            self.by_key[key].append(block)
            known = block
        return key, self.content[known][3]

    def check(self):
        """AssertionError unless the books are right."""
        assert all((users == 0) == (block in self.free) and users >= 0 for block, users in enumerate(self.users))
        listed = [block for blocks in self.by_key.values() for block in blocks]
        assert sorted(listed) == [block for block, content in enumerate(self.content) if content]
        assert all(self.content[block][0] == key for key, blocks in self.by_key.items() for block in blocks)


# --------------------------------------------------------------------------------------------------------------
# 3. Attention through block tables
#
# Requests of any number of new tokens lie one after the other: request r has the queries start[r] .. start[r + 1] - 1,
# and with them length[r] tokens in all, of which query i sees all but the n - 1 - i last. Token j's keys lie in block
# table[r, j // block_size], at j % block_size. A decoding request has one query: what it costs is reading K and V once.
# Few requests can't keep a GPU busy, so their contexts are split, and the parts merged by their log-sum-exp.

def paged_attention_reference(q, k, v, table, length, start):
    """q (N, nh, hs) of all new tokens; k, v (blocks, block_size, nh, hs); table (R, blocks a request) int32, length
    (R,) and start (R + 1,) int32 -> (N, nh, hs). Queries that stand before a request's first token get zeros."""
    out, n = torch.zeros_like(q), k.size(1)
    for r in range(len(length)):
        end, tokens = int(start[r + 1]), int(length[r])
        begin = max(int(start[r]), end - tokens)
        if end > begin:
            blocks = table[r, :-(-tokens // n)].long()
            keys, values = (x[blocks].flatten(0, 1)[:tokens].transpose(0, 1) for x in (k, v))      # (nh, tokens, hs)
            o = torch_attention(q[begin:end].transpose(0, 1)[None], keys[None], values[None])[0]       # (nh, n, hs)
            out[begin:end] = o.transpose(0, 1)
    return out


# The kernels of a step of decoding take microseconds, and so do the gaps between them. On Hopper and later a kernel may
# come onto the GPU while the one before it runs (programmatic dependent launch): it does what doesn't depend on that,
# such as reading weights, and then waits for it to end.

@lru_cache
def recent():
    """Whether this Triton, 3.5 or later, knows how to, and has products of fewer than 16 columns."""
    return [int(part) for part in triton.__version__.split(".")[:2]] >= [3, 5]


@lru_cache
def overlap(device):
    """Options of a launch on this device, by which `begin` and `follow` do what they say."""
    hopper = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
    if not hopper or not recent():
        return dict(OVERLAP=False)
    return dict(OVERLAP=True, launch_pdl=True)


@jit
def begin(OVERLAP: tl.constexpr):
    """From here on the next kernel may begin, as soon as all programs of this one are here or past."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def follow(OVERLAP: tl.constexpr, NEXT: tl.constexpr):
    """Waits until the kernel before has ended, and so have all before that. Any program that writes, or reads what an
    earlier kernel wrote, passes here first. NEXT: when the next kernel may begin, "first", before this one waits,
    "then", after it, or "last", at its end, unless it began already."""
    if NEXT == "first":
        begin(OVERLAP)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if NEXT == "then":
        begin(OVERLAP)


@jit
def fetch(k_ptr, v_ptr, table_ptr, cols, there, d, hs, k_block, k_slot, v_block, v_slot, BLOCK_SIZE: tl.constexpr):
    """One head's keys and values at places cols of a context, (cols, d), through its block table."""
    block = tl.load(table_ptr + cols // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    inside = there[:, None] & (d < hs)[None, :]                              # nothing is read past the end
    K = tl.load(k_ptr + (block * k_block + cols % BLOCK_SIZE * k_slot)[:, None] + d[None, :], mask=inside, other=0.0)
    V = tl.load(v_ptr + (block * v_block + cols % BLOCK_SIZE * v_slot)[:, None] + d[None, :], mask=inside, other=0.0)
    return K, V


@jit
def absorb(Q, K, V, seen, m, l, O, scale_log2, PRECISION: tl.constexpr):
    """The online softmax of flash.py: what queries Q have seen so far, and now these keys and values."""
    S = tl.where(seen, tl.dot(Q, K.T, input_precision=PRECISION), float("-inf"))
    m_new = tl.maximum(m, tl.max(S, 1) * scale_log2)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    P, alpha = tl.exp2(S * scale_log2 - safe[:, None]), tl.exp2(m - safe)
    O = tl.dot(P.to(V.dtype), V, O * alpha[:, None], input_precision=PRECISION)
    return m_new, l * alpha + tl.sum(P, 1), O


@jit
def paged_kernel(q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, start_ptr, new_k_ptr, new_v_ptr, slot_ptr, o_ptr, lse_ptr,
                 nh, hs, q_token, new_token, k_block, k_slot, v_block, v_slot, table_row, scale_log2,
                 BLOCK_SIZE: tl.constexpr, SPLITS: tl.constexpr, HS: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr, NEXT: tl.constexpr,
                 OVERLAP: tl.constexpr):
    """BLOCK_M queries of one request and head, over one of SPLITS parts of what they see. With one part it writes o
    (N, nh, hs); with more, (N, nh, SPLITS, hs) and the log-sum-exp in base 2, (N, nh, SPLITS). NEXT: see `follow`.

    New keys and values, if given, are seen where they are, by the last part, which also puts its own queries' into
    their slots: so no program waits for another's. AHEAD: a part's first keys and values come while the kernel before
    runs, and are taken last, so that those of the loop are under way by then; worth its registers for short parts."""
    r, i, h, part = tl.program_id(0), tl.program_id(1) * BLOCK_M, tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    first, length = tl.load(start_ptr + r), tl.load(length_ptr + r)
    n = tl.load(start_ptr + r + 1) - first
    rows, d = i + tl.arange(0, BLOCK_M), tl.arange(0, HS)
    token, real = (first + rows).to(tl.int64), (rows < n)[:, None] & (d < hs)[None, :]
    k_ptr, v_ptr, table_ptr = k_ptr + h * hs, v_ptr + h * hs, table_ptr + r * table_row
    last = length - n + rows[:, None]                                        # the last place that a query sees
    end = tl.minimum(length if new_k_ptr is None else length - n, length - n + i + BLOCK_M)
    width = tl.cdiv(tl.cdiv(end, BLOCK_N), SPLITS) * BLOCK_N                 # of a part
    low, end = part * width, tl.where(i < n, tl.minimum(end, part * width + width), 0)
    ahead = low + tl.arange(0, BLOCK_N)
    if AHEAD:
        first_K, first_V = fetch(k_ptr, v_ptr, table_ptr, ahead, ahead < end, d, hs, k_block, k_slot, v_block, v_slot,
                                 BLOCK_SIZE)
        low += BLOCK_N
    if new_k_ptr is not None:
        slot = tl.load(slot_ptr + token, mask=rows < n, other=0)
        new_k_ptr, new_v_ptr = new_k_ptr + h * hs, new_v_ptr + h * hs
    follow(OVERLAP, NEXT)
    if i < n:
        Q = tl.load(q_ptr + token[:, None] * q_token + h * hs + d[None, :], mask=real, other=0.0)
        m, l = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
        O = tl.zeros([BLOCK_M, HS], tl.float32)
        if new_k_ptr is not None:
            if part == SPLITS - 1:
                new_K = tl.load(new_k_ptr + token[:, None] * new_token + d[None, :], mask=real, other=0.0)
                new_V = tl.load(new_v_ptr + token[:, None] * new_token + d[None, :], mask=real, other=0.0)
                block, slot = slot // BLOCK_SIZE, slot % BLOCK_SIZE
                tl.store(k_ptr + (block * k_block + slot * k_slot)[:, None] + d[None, :], new_K, mask=real)
                tl.store(v_ptr + (block * v_block + slot * v_slot)[:, None] + d[None, :], new_V, mask=real)
                for j in range(i, -1, -BLOCK_M):      # its own tokens, then those before them
                    place = length - n + j + tl.arange(0, BLOCK_M)
                    seen = ((place < length) & (place >= 0))[None, :] & (place[None, :] <= last)
                    m, l, O = absorb(Q, new_K, new_V, seen, m, l, O, scale_log2, PRECISION)
                    at = (token - i + j - BLOCK_M)[:, None] * new_token + d[None, :]
                    inside = (d < hs)[None, :] & (rows - i + j >= BLOCK_M)[:, None]
                    new_K = tl.load(new_k_ptr + at, mask=inside, other=0.0)
                    new_V = tl.load(new_v_ptr + at, mask=inside, other=0.0)
        for j in range(low, end, BLOCK_N):
            cols = j + tl.arange(0, BLOCK_N)
            K, V = fetch(k_ptr, v_ptr, table_ptr, cols, cols < end, d, hs, k_block, k_slot, v_block, v_slot, BLOCK_SIZE)
            m, l, O = absorb(Q, K, V, (cols < end)[None, :] & (cols[None, :] <= last), m, l, O, scale_log2, PRECISION)
        if AHEAD:
            if low < end + BLOCK_N:
                m, l, O = absorb(Q, first_K, first_V, (ahead < end)[None, :] & (ahead[None, :] <= last), m, l, O,
                                 scale_log2, PRECISION)
        O = O / tl.where(l == 0, 1.0, l)[:, None]
        out = (token * nh + h) * SPLITS + part
        tl.store(o_ptr + out[:, None] * hs + d[None, :], O.to(o_ptr.dtype.element_ty), mask=real)
        if SPLITS > 1:
            tl.store(lse_ptr + out, tl.where(l == 0, float("-inf"), m + tl.log2(l)), mask=rows < n)


@jit
def merge_kernel(part_ptr, lse_ptr, o_ptr, hs, SPLITS: tl.constexpr, HS: tl.constexpr, NEXT: tl.constexpr,
                 OVERLAP: tl.constexpr):
    """One query of one head a program: parts (SPLITS, hs) and their log-sum-exp in base 2 -> o (hs,)."""
    follow(OVERLAP, NEXT)
    row, s, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, HS)
    lse = tl.load(lse_ptr + row * SPLITS + s)
    m = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(m == float("-inf"), 0.0, m))             # a part that saw nothing: 0
    total = tl.sum(weight, 0)
    O = tl.load(part_ptr + (row * SPLITS + s[:, None]) * hs + d[None, :], mask=(d < hs)[None, :], other=0.0)
    O = tl.sum(O * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(o_ptr + row * hs + d, O.to(o_ptr.dtype.element_ty), mask=d < hs)


def attention_shape(R, nh, HS, most, positions, splits=None):
    """-> options of paged_kernel, by measurement on an H200: as many parts as make some eight programs a
    multiprocessor, each of 128 positions at least. One read ahead costs more than it saves where parts are longer, and
    where there are so many programs that its registers keep some of them waiting."""
    M = 16 if most <= 16 else 64
    if splits is None:
        splits = 2 ** max(0, min(1024 // max(1, R * nh), positions // 128, 32).bit_length() - 1) if M == 16 else 1
    ahead = 1 < splits and positions <= 128 * splits and R * nh * splits <= 512
    warps, stages, after = ((4, 2, "first") if ahead else (4, 5, "then") if splits > 16 else
                            (2, 3, "first") if splits > 1 else (2, 3, "last"))
    if HS > 64 or M == 64:
        warps, stages = 4, 2 if HS > 128 or M == 64 and HS > 64 else max(stages, 3)
    return dict(SPLITS=splits, BLOCK_M=M, BLOCK_N=64 if HS <= 128 else 32, AHEAD=ahead, NEXT=after, num_warps=warps,
                num_stages=stages)


def paged_attention(q, k, v, table, length, start, most, splits=None, new=None):
    """paged_attention_reference, by the kernel where there is one. most: the largest number of queries of a request.
    splits: parts of a context, a power of two; by default enough to keep a GPU busy. Last strides must be 1, and heads
    next to each other: k[..., h, :] at h * hs. All but q must have been written as linear's w.

    new: keys and values (N, nh, hs) of the queries' tokens, which aren't in k and v yet, just computed as q was, and
    slots (N,) int64 where they are to be put, places in the blocks one after the other. The kernel sees them also where
    that is nobody's place; the reference sees what is in the blocks."""
    if not attends(q):
        if new:
            k.flatten(0, 1)[new[2]], v.flatten(0, 1)[new[2]] = new[:2]       # (blocks block_size, nh, hs) at (N,)
        return paged_attention_reference(q, k, v, table, length, start)
    (N, nh, hs), R, HS = q.shape, len(length), max(16, triton.next_power_of_2(q.size(2)))
    shape, out = attention_shape(R, nh, HS, most, table.size(1) * k.size(1), splits), torch.empty_like(q)
    splits = shape["SPLITS"]
    parts = q.new_empty(N, nh, splits, hs, dtype=torch.float32) if splits > 1 else out
    lse = q.new_empty(N, nh, splits, dtype=torch.float32) if splits > 1 else out
    with torch.cuda.device_of(q):
        paged_kernel[(R, triton.cdiv(most, shape["BLOCK_M"]), nh * splits)](
            q, k, v, table, length, start, *(new or (None, None, None)), parts, lse, nh, hs, q.stride(0),
            new[0].stride(0) if new else 0, k.stride(0), k.stride(1), v.stride(0), v.stride(1), table.stride(0),
            LOG2E / math.sqrt(hs), BLOCK_SIZE=k.size(1), HS=HS,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", **shape, **overlap(q.device))
        if splits > 1:
            merge_kernel[(N * nh,)](parts, lse, out, hs, SPLITS=splits, HS=HS, NEXT=shape["NEXT"], num_warps=1,
                                    **overlap(q.device))
    return out


# --------------------------------------------------------------------------------------------------------------
# 4. The block once more, for few tokens
#
# A product of a few rows with a matrix takes as long as reading the matrix, if only that is kept up: kernels that begin
# and end one after the other don't. So few of them: what stands before a product (layer norm) and after it (bias, GELU,
# the residual) goes into its kernel, and a block is four of those and two for attention. And a program asks for its
# part of the matrix before the kernel ahead has ended, which made the rows.

@jit
def gelu_factor(y):
    """gelu(y) / y, as in model.gelu; the number is sqrt(8 / pi)."""
    return tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))


FEW, SOME = 2, 16      # rows that the two kernels take; for more the library's products are as fast


@jit
def few_rows_kernel(x_ptr, w_ptr, b_ptr, g_ptr, s_ptr, y_ptr, n, K, x_row, BIAS: tl.constexpr, NORM: tl.constexpr,
                    SHIFT: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr, ROWS: tl.constexpr,
                    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr):
    """BLOCK_N columns of y (ROWS, n) = x (ROWS, K) @ w.T, w (n, K), with what NORM, BIAS, GELU and RESIDUAL say.
    BLOCK_K holds all of K. x's rows lie x_row apart. The weights come while the kernel before runs."""
    begin(OVERLAP)
    rows, cols = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.arange(0, BLOCK_K)
    inside = (cols < n)[:, None] & (at < K)[None, :]
    w = tl.load(w_ptr + cols.to(tl.int64)[:, None] * K + at[None, :], mask=inside, other=0.0)      # (BLOCK_N, BLOCK_K)
    if NORM:
        gain = tl.load(g_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if SHIFT:
        shift = tl.load(s_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(b_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    to, real = rows[:, None] * n + cols[None, :], (cols < n)[None, :]
    follow(OVERLAP, "last")
    residual = tl.load(y_ptr + to, mask=real & RESIDUAL, other=0.0).to(tl.float32)
    y = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for r in tl.static_range(ROWS):
        x = tl.load(x_ptr + r * x_row + at, mask=at < K, other=0.0)
        if NORM:
            h = x.to(tl.float32)
            h = tl.where(at < K, h - tl.sum(h, 0) / K, 0.0)
            h *= tl.rsqrt(tl.sum(h * h, 0) / K + 1e-5) * gain
            if SHIFT:
                h += shift
            x = h.to(x.dtype)
        part = tl.sum(w.to(tl.float32) * x.to(tl.float32)[None, :], 1)       # (BLOCK_N,)
        y += tl.where((rows == r)[:, None], part[None, :], 0.0)
    if BIAS:
        y += bias[None, :]
    if GELU:
        y *= gelu_factor(y)
    tl.store(y_ptr + to, (y + residual).to(y_ptr.dtype.element_ty), mask=real)


@jit
def ask(w_ptr, mine, at, j, K):
    """Weights from place j of K on: (PARTS, BLOCK_N, k)."""
    return tl.load(w_ptr + j, mask=mine[None, :, None] & (j + at < K), other=0.0)


@jit
def some_rows_kernel(x_ptr, w_ptr, b_ptr, g_ptr, s_ptr, y_ptr, n, K, x_row, rows, BIAS: tl.constexpr,
                     NORM: tl.constexpr, SHIFT: tl.constexpr, GELU: tl.constexpr, RESIDUAL: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALL_K: tl.constexpr,
                     PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    """As few_rows_kernel, by tensor cores, for up to ROWS rows, 8 or 16. They take 16 rows of the left factor at least
    and 8 columns of the right one: for 8 rows they compute y transposed, w @ x.T. Each warp sums over one of PARTS of
    every BLOCK_K of K, all of it if there is a NORM; two of those are asked for at once, the next when one is used."""
    begin(OVERLAP)
    i, cols, part = tl.arange(0, ROWS), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, PARTS)
    mine = cols < n
    at = (part * (BLOCK_K // PARTS))[:, None, None] + tl.arange(0, BLOCK_K // PARTS)[None, None, :]      # (PARTS, 1, k)
    from_w, w = w_ptr + cols.to(tl.int64)[None, :, None] * K + at, ()
    for j in tl.static_range(0, ALL_K, BLOCK_K):
        if j < 2 * BLOCK_K:
            w = w + (ask(from_w, mine, at, j, K),)
    if NORM:
        gain = tl.load(g_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if SHIFT:
        shift = tl.load(s_ptr + at, mask=at < K, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(b_ptr + cols, mask=mine, other=0.0).to(tl.float32)
    to, real = i[:, None] * n + cols[None, :], (i < rows)[:, None] & mine[None, :]
    follow(OVERLAP, "last")
    residual = tl.load(y_ptr + to, mask=real & RESIDUAL, other=0.0).to(tl.float32)
    y = tl.zeros([PARTS, BLOCK_N, ROWS] if ROWS < 16 else [PARTS, ROWS, BLOCK_N], tl.float32)
    for j in tl.static_range(0, ALL_K, BLOCK_K):
        there = j + at < K
        if j + 2 * BLOCK_K < ALL_K:
            w = w + (ask(from_w, mine, at, j + 2 * BLOCK_K, K),)
        x = tl.load(x_ptr + i[None, :, None] * x_row + j + at, mask=(i < rows)[None, :, None] & there, other=0.0)
        if NORM:
            h = x.to(tl.float32)                                             # (PARTS, ROWS, k)
            h = tl.where(there, h - (tl.sum(tl.sum(h, 2), 0) / K)[None, :, None], 0.0)
            h *= tl.rsqrt(tl.sum(tl.sum(h * h, 2), 0) / K + 1e-5)[None, :, None] * gain
            if SHIFT:
                h += shift
            x = h.to(x.dtype)
        now = w[j // BLOCK_K]
        y = tl.dot(now, x.permute(0, 2, 1), y) if ROWS < 16 else tl.dot(x, now.permute(0, 2, 1), y)
    y = tl.sum(y, 0)
    if ROWS < 16:
        y = y.T                                                              # (ROWS, BLOCK_N)
    if BIAS:
        y += bias[None, :]
    if GELU:
        y *= gelu_factor(y)
    tl.store(y_ptr + to, (y + residual).to(y_ptr.dtype.element_ty), mask=real)


def product_shape(rows, n, K, size):
    """-> options of few_rows_kernel or some_rows_kernel for this many rows, and weights (n, K) of `size` bytes each; by
    measurement on an H200. As far as there is room a program asks for all of its weights at once."""
    ALL_K = max(64, triton.next_power_of_2(K))
    if rows <= FEW:
        return dict(ROWS=rows, BLOCK_N=max(2, min(16 if n > 16384 else 8, 32768 // (ALL_K * size))), BLOCK_K=ALL_K,
                    num_warps=4)
    ROWS, BLOCK_K = 8 if rows <= 8 else 16, min(ALL_K, 2048 if ALL_K <= 4096 else 1024)
    warps = max(4, BLOCK_K // 256)
    return dict(ROWS=ROWS, BLOCK_N=(256 if ALL_K <= 2048 else 128) // ROWS, BLOCK_K=BLOCK_K, ALL_K=ALL_K, PARTS=warps,
                num_warps=warps, num_stages=1)


def linear(x, w, b=None, norm=None, activation=None, residual=None):
    """residual + activation(norm(x) @ w.T + b), each of the four only where given; on a GPU up to 8 rows, or 16 where
    that is faster, in float32 up to 2, are one kernel. The answer overwrites the residual.

    x (N, K) with 1 as its last stride, w (n, K), b (n,), norm: a LayerNorm over K, activation: model.gelu, residual
    (N, n) -> (N, n). w, b and the norm's weights are read before this kernel waits for the one ahead, so they must be
    older than the latest kernel that lets none begin before it has waited itself, such as `embed`'s."""
    N, (n, K) = len(x), w.shape
    few = 0 < N <= FEW and K <= 16384
    some = (FEW < N <= SOME and x.dtype != torch.float32 and (K <= 2048 or not norm)           # rows fit into registers
            and (N <= 8 or n * K <= 2 ** 22))                                # a larger matrix keeps the library busy
    if has_kernels(x) and (few or some and recent()):
        y = x.new_empty(N, n) if residual is None else residual
        gain, shift = (norm.weight, norm.bias) if norm else (None, None)
        kernel, rest = (few_rows_kernel, ()) if few else (some_rows_kernel, (N,))
        shape = product_shape(N, n, K, x.element_size())
        with torch.cuda.device_of(x):
            kernel[(triton.cdiv(n, shape["BLOCK_N"]),)](
                x, w, b, gain, shift, y, n, K, x.stride(0), *rest, BIAS=b is not None, NORM=norm is not None,
                SHIFT=shift is not None, GELU=activation is not None, RESIDUAL=residual is not None, **shape,
                **overlap(x.device))
        return y
    x = norm(x) if norm else x
    if residual is not None and not activation:      # the library adds to what is there
        residual.addmm_(x, w.T)                                              # (N, K) @ (K, n) -> (N, n)
        return residual if b is None else residual.add_(b)
    y = F.linear(x, w, b)                                                    # (N, K) @ (K, n) -> (N, n)
    y = activation(y) if activation else y
    return y if residual is None else residual.add_(y)


def head(model, x):
    """The trunk's answer x (N, C) -> logits (N, V)."""
    return linear(x, model.table, norm=model.ln_f)[:, :model.config.vocab_size]


@jit
def embed_kernel(idx_ptr, pos_ptr, wte_ptr, wpe_ptr, x_ptr, T, C, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """x[i] = wte[idx[i]] + wpe[pos[i]], C numbers each, of T places."""
    follow(OVERLAP, "then")
    i, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    token = tl.load(wte_ptr + tl.load(idx_ptr + i) * C + c, mask=c < C).to(tl.float32)
    pos = tl.minimum(tl.load(pos_ptr + i), T - 1)
    place = tl.load(wpe_ptr + pos * C + c, mask=c < C).to(tl.float32)
    tl.store(x_ptr + i * C + c, (token + place).to(x_ptr.dtype.element_ty), mask=c < C)


def embed(model, idx, pos):
    """idx, pos (N,) int64 -> (N, C). A place past the model's last is taken for the last: a draft's context may be
    shorter than its target's, and nobody looks at what is there."""
    wte, wpe = model.wte.weight, model.wpe.weight
    if not has_kernels(wte):
        return wte[idx] + wpe[pos.clamp(max=len(wpe) - 1)]
    x = wte.new_empty(len(idx), wte.size(1))
    with torch.cuda.device_of(x):
        embed_kernel[(len(idx),)](idx, pos, wte, wpe, x, *wpe.shape, BLOCK=triton.next_power_of_2(wpe.size(1)),
                                  **overlap(x.device))
    return x


def trunk(model, idx, pos, attend):
    """model.trunk without its last norm, idx and pos (N,) -> (N, C), a product a `linear`."""
    x = embed(model, idx, pos)                                               # (N, C)
    for block in model.blocks.values():
        attn, mlp = block.attn, block.mlp
        qkv = linear(x, attn.qkv.weight, attn.qkv.bias, norm=block.ln_1)     # (N, 3C)
        q, k, v = qkv.view(len(x), 3, -1, attn.hs).permute(1, 2, 0, 3).unsqueeze(1)      # (N, 3, nh, hs): 1, nh, N, hs
        o = attend(attn.layer, q, k, v)                                      # (1, nh, N, hs)
        o = o[0].transpose(0, 1).reshape(len(x), -1)                         # (nh, N, hs) -> (N, C)
        x = linear(o, attn.proj.weight, attn.proj.bias, residual=x)
        if model.config.n_expert:
            x = x + mlp(block.ln_2(x)[None])[0][0]                           # (1, N, C) -> (N, C)
        else:
            h = linear(x, mlp.fc.weight, mlp.fc.bias, norm=block.ln_2, activation=gelu)      # (N, 4C)
            x = linear(h, mlp.proj.weight, mlp.proj.bias, residual=x)
    return x


# --------------------------------------------------------------------------------------------------------------
# 5. Sampling: each request from its own stream of random numbers
#
# A number is a function of (the request's seed, how many were drawn before), computed for all rows at once on the
# device: what a request draws depends on nothing else in the batch. The token is where the cumulative distribution
# passes it.

def uniform(seed, n):
    """seed and n int64, (b, m) once expanded to each other -> (b, m) float64 in [0, 1), on MPS float32 in [0, 1]: the
    n-th number of each stream. Splitmix64 (Steele et al. 2014), whose products wrap around 2^64."""
    seed, n = torch.broadcast_tensors(seed, n)
    if not runs_kernels(seed):
        return mixed_bits(seed, n).to(wide(seed)) / 2 ** 53
    u = seed.new_empty(seed.shape, dtype=torch.float64)
    with torch.cuda.device_of(u):
        uniform_kernel[(len(u),)](seed, n, u, u.size(1), *seed.stride(), *n.stride(),
                                  BLOCK=triton.next_power_of_2(u.size(1)), **overlap(u.device))
    return u


def mixed_bits(seed, n):
    """53 bits, int64, of torch's tensors or Triton's. To shift to the right as if unsigned, the bits that come in at
    the left are taken off."""
    x = seed + (n + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (x ^ (x >> 31 & 0x1FFFFFFFF)) >> 11 & 0x1FFFFFFFFFFFFF


mixed_bits_jit = jit(mixed_bits)


@jit
def uniform_jit(seed, n):
    return mixed_bits_jit(seed, n).to(tl.float64) / 9007199254740992.0       # 2^53


@jit
def uniform_kernel(seed_ptr, n_ptr, u_ptr, m, seed_row, seed_col, n_row, n_col, BLOCK: tl.constexpr,
                   OVERLAP: tl.constexpr):
    """A row of m numbers."""
    follow(OVERLAP, "then")
    r, c = tl.program_id(0), tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr + r * seed_row + c * seed_col, mask=c < m)
    n = tl.load(n_ptr + r * n_row + c * n_col, mask=c < m)
    tl.store(u_ptr + r * m + c, uniform_jit(seed, n), mask=c < m)


def wide(x):
    return torch.float32 if x.device.type == "mps" else torch.float64


def draw(logits, temperature, top_k, top_p, u, how, keep=None, into=None):
    """logits (N, V); settings (b,), each for N / b rows that follow each other; random numbers u (N,), or None, by
    which only "greedy" draws -> tokens (N,) int64, -1 where logits aren't numbers, or None if none are drawn. keep:
    where the probabilities go, (N, V) float32 with 1 as its last stride. into: a history (N, m) and places in it (N,),
    where tokens go too, 0 for -1.

    how, the cheapest way that serves all rows: "greedy", if every temperature is 0 (u isn't looked at), "warm", if none
    is and no row has a top_k or top_p, "plain", if no row has those, else "sorted"."""
    kernels, each = has_kernels(logits) and len(logits), [temperature, top_k, top_p]
    if how == "sorted" or not kernels:
        each = [x.repeat_interleave(len(logits) // max(1, len(x))) for x in each]              # (N,)
    if how == "sorted":
        p = distribution(logits, *each)                                      # (N, V)
    if kernels:
        token = draw_by_kernels(p if how == "sorted" else logits, temperature, u, how, keep, into)
    elif how == "greedy":
        token = logits.argmax(-1)
        p = None if keep is None else torch.where(logits.amax(-1, keepdim=True).isfinite(),
                                                  F.one_hot(token, logits.size(-1)), math.nan)      # (N, V)
    else:
        if how == "warm":
            p = (logits.float() / each[0][:, None]).softmax(-1)
        elif how == "plain":
            p = distribution(logits, each[0])
        token = None if u is None else invert(p, u)
    if token is not None and (how == "sorted" or not kernels):
        token = torch.where(logits.amax(-1).isfinite(), token, -1)
    if keep is not None and not kernels:
        keep.copy_(p)
    if into and not kernels:
        into[0].scatter_(1, into[1][:, None], token.clamp(min=0)[:, None])
    return token


def invert(p, u, piece=256):
    """p (b, V) weights, u (b,) in [0, 1) -> (b,) int64: where the running sum of a row passes u of its total, never a
    weight of 0. For a large V first which piece of it, then where in that: a running sum is made by one multiprocessor
    a row."""
    def passed(sums, target):      # the last that adds something is never passed, however sums are rounded
        return ((sums <= target) & (sums < sums[:, -1:])).sum(-1)
    if p.size(1) <= 4 * piece:
        sums = p.cumsum(-1, dtype=wide(p))                                   # (b, V)
        return passed(sums, u[:, None] * sums[:, -1:])
    count = -(-p.size(1) // piece)
    pieces = F.pad(p, (0, count * piece - p.size(1))).view(len(p), count, piece)
    ends = pieces.sum(-1, dtype=wide(p)).cumsum(-1)                          # (b, V / piece)
    target = u[:, None] * ends[:, -1:]                                       # (b, 1)
    i = passed(ends, target)                                                 # (b,)
    before = F.pad(ends, (1, 0)).gather(1, i[:, None])                       # (b, 1)
    inside = pieces[torch.arange(len(p), device=p.device), i]                # (b, piece)
    return i * piece + passed(before + inside.cumsum(-1, dtype=wide(p)), target)


# The same in two kernels, a program a piece of a row. The first finds each piece's largest logit and the sum of its
# weights, exp((x - largest) / temperature); the second merges those, as flash.py merges parts of an attention, and the
# program whose piece the running sum passes in draws. A row of one piece needs no first.

@jit
def pieces_kernel(x_ptr, temperature_ptr, top_ptr, best_ptr, sum_ptr, V, x_row, t_row, per, GIVEN: tl.constexpr,
                  BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Of logits x: the largest, where it is, the sum of the weights; of GIVEN weights x their sum."""
    follow(OVERLAP, "then")
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at, to = i * BLOCK + tl.arange(0, BLOCK), r * tl.num_programs(1) + i
    x = tl.load(x_ptr + r * x_row + at, mask=at < V, other=0.0 if GIVEN else float("-inf")).to(tl.float32)
    if not GIVEN:
        top, temperature = tl.max(x, 0), tl.load(temperature_ptr + r // per * t_row)
        tl.store(top_ptr + to, top)
        tl.store(best_ptr + to, i * BLOCK + tl.argmax(x, 0))
        x = tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) / tl.maximum(temperature, 1e-6))
    tl.store(sum_ptr + to, tl.sum(x.to(tl.float64), 0))


@jit
def draw_kernel(x_ptr, temperature_ptr, top_ptr, best_ptr, sum_ptr, u_ptr, else_ptr, history_ptr, place_ptr, token_ptr,
                p_ptr, V, x_row, t_row, per, u_row, history_row, place_row, p_row, pieces, GIVEN: tl.constexpr,
                DRAWS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, OVERLAP: tl.constexpr):
    """From what pieces_kernel found, if there are several, a row's token, and this piece's probabilities."""
    follow(OVERLAP, "then")
    r, i, k = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PIECES)
    at, real = i * BLOCK + tl.arange(0, BLOCK), k < pieces
    w = tl.load(x_ptr + r * x_row + at, mask=at < V, other=0.0 if GIVEN else float("-inf")).to(tl.float32)
    best, greedy, scale = r * 0, r < 0, 1.0
    if not GIVEN:
        temperature = tl.load(temperature_ptr + r // per * t_row)
        warm, greedy = tl.maximum(temperature, 1e-6), temperature < 1e-6
        top, best = tl.max(w, 0), tl.argmax(w, 0).to(tl.int64)
        if sum_ptr is not None:
            tops = tl.load(top_ptr + r * pieces + k, mask=real, other=float("-inf"))
            top, best = tl.max(tops, 0), tl.load(best_ptr + r * pieces + tl.argmax(tops, 0))
            scale = tl.exp((tops - top) / warm)
        w = tl.exp((w - top) / warm)
    if sum_ptr is not None:
        l = tl.load(sum_ptr + r * pieces + k, mask=real, other=0.0) * scale      # (PIECES,) float64
    else:
        l = tl.where(real, tl.sum(w.to(tl.float64), 0), 0.0)
    total, ends = tl.sum(l, 0), tl.cumsum(l, 0)
    finite = total < float("inf")                                            # NaN isn't
    if p_ptr is not None:
        p = tl.where(greedy & finite, (at == best).to(tl.float32), w / total.to(tl.float32))
        tl.store(p_ptr + r * p_row + at, p, mask=at < V)
    if DRAWS:
        target = total
        if u_ptr is not None:
            target *= tl.load(u_ptr + r * u_row)
        mine = tl.sum(((ends <= target) & (ends < tl.max(ends, 0))).to(tl.int32), 0)           # where the sum passes
        if i == tl.where(finite & (greedy == 0), mine, 0):
            sums = tl.sum(tl.where(k < i, l, 0.0), 0) + tl.cumsum(w.to(tl.float64), 0)
            passed = tl.sum(((sums <= target) & (sums < tl.max(sums, 0))).to(tl.int64), 0)
            token = tl.where(greedy, best, i * BLOCK + passed)
            if else_ptr is not None:
                token = tl.where(total == 0, tl.load(else_ptr + r), token)
            tl.store(token_ptr + r, tl.where(finite, token, -1))
            if history_ptr is not None:
                to = history_ptr + r * history_row + tl.load(place_ptr + r * place_row)
                tl.store(to, tl.where(finite, token, 0))


def piece_of(V):
    """Ids of a program."""
    return min(2048, max(16, triton.next_power_of_2(V)))


def draw_by_kernels(x, temperature, u, how, keep=None, into=None, sums=None, otherwise=None):
    """As draw. x (N, V): logits, or if how is "sorted" weights; sums (N, pieces) float64 of these, if they are known;
    otherwise: tokens (N,) for rows whose weights are all 0."""
    (N, V), given, draws = x.shape, how == "sorted", u is not None or how == "greedy"
    BLOCK = piece_of(V)
    pieces = triton.cdiv(V, BLOCK)
    token = x.new_empty(N, dtype=torch.int64) if draws else None
    first, (history, place) = sums is None and pieces > 1, into or (None, None)
    top, best = (x.new_empty(N, pieces, dtype=dtype) if first and not given else None
                 for dtype in (torch.float32, torch.int64))
    sums = x.new_empty(N, pieces, dtype=torch.float64) if first else sums
    common = (V, x.stride(0), 0, 1) if given else (V, x.stride(0), temperature.stride(0), N // len(temperature))
    with torch.cuda.device_of(x):
        if first:
            pieces_kernel[(N, pieces)](x, temperature, top, best, sums, *common, GIVEN=given, BLOCK=BLOCK,
                                       **overlap(x.device))
        if draws or keep is not None:
            apart = [0 if one is None else one.stride(0) for one in (u, history, place, keep)]
            draw_kernel[(N, pieces)](
                x, temperature, top, best, sums, u, otherwise, history, place, token, keep, *common, *apart, pieces,
                GIVEN=given, DRAWS=draws, BLOCK=BLOCK, PIECES=max(2, triton.next_power_of_2(pieces)),
                **overlap(x.device))
    return token


# --------------------------------------------------------------------------------------------------------------
# 6. The engine
#
# A step takes whatever tokens are due: one from each request that decodes, and chunks of the prompts that have come
# since, up to `budget`. Requests join and leave at every step. When blocks run out, the request that came last lets go
# of its own; it computes them again when there is room, but for those that are still found in the pool.
#
# The GPU doesn't wait for the host: what was drawn stays on the device, where the next step finds it, and the host
# reads it while that step runs. So it learns one step late that a request has ended, and drops one token.

class Request:
    """A text that is being written: what Engine.add returns. `tokens`: the output so far. `state`: "waiting",
    "running", or how it ended: "length", "stop", "aborted". `samples`: this request and the others of the same
    prompt."""

    def __init__(self, prompt, arrival, seed, max_new_tokens, temperature, top_k, top_p, stop):
        self.text, self.prompt, self.arrival, self.seed = list(prompt), len(prompt), arrival, seed
        self.max_new_tokens, self.temperature, self.top_k, self.top_p = max_new_tokens, temperature, top_k, top_p
        self.stop, self.state, self.forks, self.samples = frozenset(stop), "waiting", [], [self]
        self.start = 0                     # where in the text its context begins, which has position 0
        self.unseen = self.most = 0        # steps that drew for it and the host hasn't seen; most tokens of theirs
        self.at_hand = False               # whether its newest token was drawn in its row, where the device finds it
        self.row, self.blocks, self.computed = None, [], 0                   # tokens whose keys and values are there
        self.chain, self.registered = (0, 0), 0                              # of full blocks that others can find

    @property
    def tokens(self):
        return self.text[self.prompt:]

    @property
    def context(self):
        """Tokens of the context, with the most that are under way."""
        return len(self.text) + self.most - self.start

    @property
    def cap(self):
        """Tokens of this context whose keys and values will ever be asked for, if its length alone ends the text."""
        return self.prompt + self.max_new_tokens - 1 - self.start

    @property
    def done(self):
        return self.state not in ("waiting", "running")


def whole(name, x):
    """x as an int; UserError if it's none, such as 2.5 or "2"."""
    try:
        return index(x)
    except TypeError:
        raise UserError(f"{name}={x!r} must be a whole number") from None


class Layout(NamedTuple):
    """Where a step's tokens are, one request after the other; N tokens, R requests."""
    slots: torch.Tensor      # (N,) int64, for their keys and values
    table: torch.Tensor      # (R, blocks) int32
    length: torch.Tensor     # (R,) int32, of the contexts
    start: torch.Tensor      # (R + 1,) int32, each request's first token
    most: int                # tokens of a request


class Pages:
    """The engine's `attend`: puts the new keys and values into their slots and attends through the block tables, as
    `layout` says, the step's Layout, which whoever calls the model sets before."""

    def __init__(self, k, v):
        self.k, self.v, self.layout = k, v, None                             # (L, blocks, block_size, nh, hs) each

    def __call__(self, layer, q, k, v):
        """q, k, v (1, nh, N, hs), all requests' new tokens one after the other -> (1, nh, N, hs)."""
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))                  # (N, nh, hs)
        slots, *layout = self.layout
        o = paged_attention(q, self.k[layer], self.v[layer], *layout, new=(k, v, slots))         # (N, nh, hs)
        return o.transpose(0, 1)[None]


RUNS, CAP, OFFSET, SEED, TOP_K = range(5)      # of a row: 1 if it runs; Request.cap; start - prompt; seed; top_k
TEMPERATURE, TOP_P = range(2)


class Engine:
    """Writes texts for many requests at once.

    model: GPT in eval mode, on its device; num_blocks of block_size tokens: the cache; max_batch requests run at once;
    budget: tokens of a step. On CUDA, where there are kernels, steps that only decode are replayed as CUDA graphs
    (graph=False: not)."""

    ahead = 0      # tokens that a step of decoding may compute beyond the newest: drafts, see speculate.py

    def __init__(self, model, num_blocks, block_size=16, max_batch=64, budget=4096, graph=True, hash=hash):
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size), ("max_batch", max_batch),
                            ("budget", budget)):
            if whole(name, value) < 1:
                raise UserError(f"{name}={value} must be at least 1")
        self.model, self.device = model, model.table.device
        self.vocab, self.limit = model.config.vocab_size, model.config.block_size
        self.pool, self.bs, self.budget = BlockPool(num_blocks, block_size, hash), block_size, max(budget, max_batch)
        self.pages = self.cache(model)
        of_a_head = model.table.new_empty(1, model.config.n_embd // model.config.n_head)
        self.graph = graph and self.device.type == "cuda" and attends(of_a_head)      # the reference asks the device
        self.lag = int(self.device.type == "cuda")
        self.waiting, self.running, self.flying, self.events, self.arrivals = deque(), [], deque(), deque(), count()
        self.rows, self.graphs = list(range(max_batch)), {}                  # free rows, a heap: the lowest is next
        # by row, on the host and on the device: what a step of decoding needs
        self.table = np.zeros((max_batch, -(-self.limit // block_size)), np.int32)
        self.numbers = np.zeros((max_batch, 5), np.int64)                    # columns RUNS to TOP_K
        self.shares = np.ones((max_batch, 2), np.float32)                    # TEMPERATURE, TOP_P
        self.sent = [x.copy() for x in (self.table, self.numbers, self.shares)]                # what the device has
        self.on_device = [torch.from_numpy(x).to(self.device, copy=True) for x in self.sent]
        # what only the device knows at once: tokens of the context, and each by its place in it, if it was drawn there;
        # past all places are some for what is to be kept nowhere
        self.length = torch.zeros(max_batch, dtype=torch.int64, device=self.device)
        self.history = torch.zeros(max_batch, self.limit + 2 * self.ahead + 2, dtype=torch.int64, device=self.device)
        self.starts = {}                                                     # by tokens of a request: Layout.start
        self.stats = dict(steps=0, computed=0, found=0, preempted=0, copied=0)
        self.waited = 0.0                        # seconds, for the device

    def cache(self, model):
        """Pages for a model's keys and values, with a block more than the pool's, for rows without a request."""
        config, shape = model.config, (len(self.pool.users) + 1, self.bs)
        shape = config.n_layer, *shape, config.n_head, config.n_embd // config.n_head
        return Pages(model.table.new_zeros(shape), model.table.new_zeros(shape))

    # ---- what a caller does

    def add(self, tokens, max_new_tokens=100, temperature=1.0, top_k=None, top_p=None, seed=0, stop=(), n=1):
        """-> Request. tokens: the prompt, ids, at least one; of more than the model's block_size the end counts. stop:
        ids that end the text, themselves its last token. n: samples of the prompt, `samples` of what is returned, each
        from a stream of its own. UserError for what can't be served."""
        for name, x in (("tokens", tokens), ("stop", stop)):
            if not hasattr(x, "__iter__"):
                raise UserError(f"{name}={x!r} must be a list of ids")
        for name, x in (("temperature", temperature), ("top_p", top_p)):
            if not isinstance(x, Real) and not (x is None and name == "top_p"):
                raise UserError(f"{name}={x!r} must be a number")
        tokens, stop = [whole("a token", t) for t in tokens], [whole("stop", t) for t in stop]
        max_new_tokens, n, seed = whole("max_new_tokens", max_new_tokens), whole("n", n), whole("seed", seed)
        check_sampling(temperature, top_k if top_k is None else whole("top_k", top_k), top_p)
        if not tokens:
            raise UserError("the prompt is empty; generation needs at least one token to start from")
        for what, ids in (("prompt", tokens), ("stop", stop)):
            bad = next((t for t in ids if not 0 <= t < self.vocab), None)
            if bad is not None:
                raise UserError(f"{what} has the id {bad}, but the model's ids end at {self.vocab - 1}")
        if max_new_tokens < 0 or n < 1:
            raise UserError(f"max_new_tokens={max_new_tokens} and n={n} must be at least 0 and 1")
        need = -(-min(len(tokens) + max_new_tokens - 1, self.limit) // self.bs) if max_new_tokens else 0
        if need > len(self.pool.users):
            raise UserError(f"a request of {len(tokens)} + {max_new_tokens} tokens needs {need} blocks of {self.bs}, "
                            f"and the cache has {len(self.pool.users)}")
        samples = [Request(tokens, next(self.arrivals), derive(seed, "sample", i), max_new_tokens, temperature, top_k,
                           top_p, stop) for i in range(n)]
        for one in samples:
            one.samples, one.start = samples, max(0, len(tokens) - self.limit)
        leader, *leader.forks = samples
        if max_new_tokens:
            self.waiting.append(leader)
        else:
            for one in samples:
                one.state = "length"
        return leader

    def abort(self, request):
        """Ends a request; one that has ended stays as it is. Other samples of its prompt go on."""
        if not request.done:
            self.end(request, "aborted")

    def step(self):
        """Runs one batch. -> [(request, token)], what has become known. Call it while `busy`."""
        self.turn()
        events = list(self.events)
        self.events.clear()
        return events

    def turn(self):
        batch, copies = self.plan()
        if batch:
            self.launch(batch, copies)
        while len(self.flying) > (self.lag if batch else 0):
            self.land()

    @property
    def busy(self):
        return bool(self.waiting or self.running or self.flying)

    def restart_stats(self):
        """Counts anew from here on."""
        self.stats.update(dict.fromkeys(self.stats, 0))

    def run(self):
        """Yields (request, token) as they come, until all have ended. Who leaves it and comes back misses none."""
        while self.busy or self.events:
            if not self.events:
                self.turn()
            while self.events:
                yield self.events.popleft()

    # ---- who runs

    def plan(self):
        """-> [(request, number of its tokens)] of this step, and the blocks to copy before, [(from, to)]."""
        copies, preempted = [], self.stats["preempted"]
        if any(r.context > self.limit and r.unseen for r in self.running):
            while self.flying:      # the text begins anew from its end, which has to be known
                self.land()
        for r in [r for r in self.running if r.context > self.limit]:
            r.start = len(r.text) - max(1, self.limit // 2)
            self.let_go(r)
        left, batch = self.budget, []
        for r in sorted(self.running, key=lambda r: (not r.at_hand, r.arrival)):      # decoding first
            n = 1 if r.at_hand else min(self.due(r), left)
            tokens = min(r.context + self.ahead, self.limit, r.cap) if r.at_hand else r.computed + n
            ended = len(r.text) + r.unseen >= r.prompt + r.max_new_tokens
            if r.state == "running" and n and not ended and self.room(r, tokens, copies):
                batch.append((r, n))
                left -= n
        while self.waiting and self.rows and left and self.stats["preempted"] == preempted:
            r = self.waiting[0]
            if r.unseen or not self.admit(r):
                break
            n = min(self.due(r), left)
            self.room(r, r.computed + n, copies)
            batch.append((r, n))
            left -= n
        batch = [(r, n) for r, n in batch if r.state == "running"]           # some had to let go after their turn
        kept = {block for r, _ in batch for block in r.blocks}
        return batch, [(a, b) for a, b in copies if b in kept]

    def due(self, r):
        """Tokens of r's context to be computed before it decodes."""
        return r.context - r.computed

    def room(self, r, tokens, copies):
        """Makes sure that r has blocks of its own for its tokens from `computed` on. Whoever came last lets go of
        theirs for it; False if that was r."""
        while True:
            shared = r.computed // self.bs
            if shared < len(r.blocks) and self.pool.users[r.blocks[shared]] > 1:
                block = self.pool.allocate()
                if block is not None:
                    copies.append((r.blocks[shared], block))
                    self.pool.release(r.blocks[shared])
                    r.blocks[shared] = self.table[r.row, shared] = block
                    self.stats["copied"] += 1
                    continue
            elif len(r.blocks) * self.bs < tokens:
                block = self.pool.allocate()
                if block is not None:
                    self.table[r.row, len(r.blocks)] = block
                    r.blocks.append(block)
                    continue
            else:
                return True
            last = max(self.running, key=lambda other: other.arrival)
            self.let_go(last)
            self.stats["preempted"] += 1
            if last is r:
                return False

    def admit(self, r):
        """Has r run, on what the pool still holds of its context, if there is room for the rest. The last token is
        always computed: its logits are what is asked for."""
        text = r.text[r.start:]
        blocks, r.chain = self.pool.lookup(text[:-1])
        for block in blocks:
            self.pool.share(block)
        if len(blocks) + len(self.pool.free) < -(-len(text) // self.bs):
            for block in reversed(blocks):
                self.pool.release(block)
            return False
        self.waiting.popleft()
        self.seat(r, blocks, len(blocks) * self.bs)
        r.registered = len(blocks)
        self.stats["found"] += r.computed
        return True

    def seat(self, r, blocks, computed):
        """Gives r a row, and what its next tokens are drawn by."""
        r.row, r.blocks, r.computed, r.state, r.at_hand = heappop(self.rows), blocks, computed, "running", False
        self.running.append(r)
        self.table[r.row, :len(blocks)] = blocks
        self.numbers[r.row, 1:] = (min(r.cap, self.limit), r.start - r.prompt, r.seed,
                                   self.vocab if r.top_k is None else min(r.top_k, self.vocab))
        self.shares[r.row] = min(r.temperature, 3e38), 1.0 if r.top_p is None else r.top_p

    def leave(self, r):
        """r gives back its row and its blocks, the last first: a prefix is useful for longer than what follows it."""
        self.running.remove(r)
        heappush(self.rows, r.row)
        for block in reversed(r.blocks):
            self.pool.release(block)
        r.row, r.blocks, r.computed, r.chain, r.registered = None, [], 0, (0, 0), 0

    def let_go(self, r):
        """r waits, before all that came later, to compute its context again."""
        self.leave(r)
        r.state = "waiting"
        self.queue(r)

    def queue(self, r):
        """r waits in the order of arrival."""
        at = next((i for i, other in enumerate(self.waiting) if other.arrival > r.arrival), len(self.waiting))
        self.waiting.insert(at, r)

    def end(self, r, state):
        if r.state == "running":
            self.leave(r)
        elif r in self.waiting:
            self.waiting.remove(r)
        r.state = state
        for other in r.samples:      # one that hasn't forked yet goes on without its leader
            if r in other.forks:
                other.forks.remove(r)
        if r.forks:
            heir, *heir.forks = r.forks
            r.forks = []
            self.queue(heir)

    # ---- what runs

    def launch(self, batch, copies):
        """Starts a step; its tokens land later."""
        with torch.inference_mode():
            if copies:
                a, b = self.upload(*zip(*copies))                            # (n,) each
                for pages in self.caches():
                    pages.k[:, b], pages.v[:, b] = pages.k[:, a], pages.v[:, a]
            decoding = all(r.at_hand for r, _ in batch)
            drawn, where, tokens = self.decode(batch) if decoding else self.mixed(batch)
            event = None
            if self.device.type == "cuda":
                tokens, event = tokens.to("cpu", non_blocking=True), torch.cuda.Event()
                event.record()
        for r, n in batch:
            r.computed += n
            self.register(r)
        for r in drawn:
            r.unseen, r.most, r.at_hand = r.unseen + 1, r.most + 1 + self.ahead * decoding, True
        self.flying.append((drawn, where, 1 + self.ahead * decoding, tokens, event))
        self.stats["steps"] += 1
        self.stats["computed"] += sum(n for _, n in batch)

    def upload(self, *arrays):
        """To the device, without waiting for what is under way there."""
        tensors = [torch.from_numpy(np.ascontiguousarray(x, dtype=None if len(x) else np.int64)) for x in arrays]
        if self.device.type == "cuda":
            return [x.pin_memory().to(self.device, non_blocking=True) for x in tensors]
        return [x.to(self.device) for x in tensors]

    def mixed(self, batch):
        """Any numbers of tokens. -> the requests that draw one, where among the tokens it is, tokens (b,)."""
        counts, begins = (np.array(x) for x in zip(*((n, r.computed) for r, n in batch)))      # (R,)
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)    # (R + 1,)
        rows = np.repeat([r.row for r, _ in batch], counts)                  # (N,), of each token
        pos = np.arange(start[-1]) - np.repeat(start[:-1] - begins, counts)  # (N,)
        slots = self.table[rows, pos // self.bs].astype(np.int64) * self.bs + pos % self.bs
        ids = []
        for r, n in batch:
            known = r.text[r.start + r.computed:r.start + r.computed + n]
            ids += known + [-1] * (n - len(known))                           # -1: drawn, and still on the device
        drawn, ends = [], []
        for end, (r, n) in zip(start[1:], batch):
            if r.computed + n == r.context:
                drawn += [r, *self.fork(r, r.context)]
                ends += [end - 1] * (len(drawn) - len(ends))
        who, lengths = [r.row for r in drawn], [r.context for r in drawn]    # (b,), as ends
        ids, rows, pos, slots, table, length, start, who, ends, lengths, numbers, shares = self.upload(
            ids, rows, pos, slots, self.table[[r.row for r, _ in batch]], (begins + counts).astype(np.int32), start,
            who, ends, lengths, self.numbers[who], self.shares[who])
        ids = torch.where(ids < 0, self.history[rows, pos], ids)             # (N,)
        x = self.prefill(ids, pos, Layout(slots, table, length, start, int(counts.max())))                  # (N, C)
        x = x[ends]                                                          # (b, C)
        tokens = self.tokens(x, lengths, numbers, shares, self.how(drawn))   # (b,)
        self.history[who, lengths], self.length[who] = tokens.clamp(min=0), lengths + 1
        return drawn, range(len(drawn)), tokens[:, None]

    def fork(self, r, computed):
        """The other samples of a prompt of which `computed` tokens are computed share its blocks. -> those for whom
        there is a row; the rest wait, and find what is full of it in the pool."""
        heirs = []
        for heir in r.forks:
            if not self.rows:
                self.queue(heir)
                continue
            for block in r.blocks:
                self.pool.share(block)
            self.seat(heir, list(r.blocks), computed)
            heir.chain, heir.registered = r.chain, r.registered
            heirs.append(heir)
        r.forks = []
        return heirs

    def decode(self, batch):
        """One token from each. -> the requests, where among the tokens theirs is, tokens (rows,). By rows, so that the
        shapes are those of few graphs; rows without a request have length 0, and write into the block that nobody
        has."""
        requests = [r for r, _ in batch]
        rows = [r.row for r in requests]
        self.numbers[:, RUNS] = 0
        self.numbers[rows, RUNS] = 1
        size = min(1 << max(rows).bit_length(), len(self.table))
        for mine, sent, x in zip(self.on_device, self.sent, (self.table, self.numbers, self.shares)):
            if not np.array_equal(sent[:size], x[:size]):
                sent[:size] = x[:size]
                x = torch.from_numpy(x[:size].copy())
                mine[:size].copy_(x.pin_memory() if self.graph else x, non_blocking=True)
        key, started = self.key(size, requests), time.perf_counter()
        tokens = self.replay(self.decode_rows, *key)
        if self.device.type != "cuda":      # else this only asks for it
            self.waited += time.perf_counter() - started
        return requests, rows, tokens

    def key(self, size, requests):
        """What fixes the shape of a step of decoding: the arguments of decode_rows."""
        return size, self.how(requests)

    def decode_rows(self, size, how):
        """The next token of rows 0 .. size - 1, from what is on the device: (size, 1)."""
        _, numbers, shares = (x[:size] for x in self.on_device)
        length, place = self.places(size)
        ids, pos, layout = self.layout(length, 1)
        x = self.forward(ids, pos, layout)                                   # (size, C)
        tokens = self.tokens(x, length, numbers, shares, how, (self.history[:size], place))
        self.length[:size] += numbers[:, RUNS]
        return tokens[:, None]

    def places(self, size):
        """Of rows 0 .. size - 1: the lengths of their contexts (size,), 0 for those that don't run, and where in
        `history` their next tokens go (size,)."""
        runs = self.on_device[1][:size, RUNS]
        length = self.length[:size] * runs
        return length, torch.where(runs > 0, length, self.limit + self.ahead + 1)

    def layout(self, total, n, low=None):
        """For rows of total (size,) tokens, of which the last n are to be computed: ids and pos (size n,), anything
        where there are fewer, and the Layout. Keys and values go into the rows' blocks from place low (size,) on, by
        default from the first, as far as they will ever be asked for."""
        size, (table, numbers, _) = len(total), self.on_device
        if n not in self.starts:
            self.starts[n] = torch.arange(0, len(table) * n + 1, n, dtype=torch.int32, device=self.device)
        start, spare = self.starts[n][:size + 1], len(self.pool.users) * self.bs
        if runs_kernels(total):
            ids, pos, slots = torch.empty(3, size * n, dtype=torch.int64, device=self.device)
            length = torch.empty(size, dtype=torch.int32, device=self.device)
            with torch.cuda.device_of(total):
                layout_kernel[(size,)](
                    total, low, table, numbers, self.history, ids, pos, slots, length, n, self.limit, self.bs, spare,
                    total.stride(0), 0 if low is None else low.stride(0), table.stride(0), numbers.stride(0),
                    self.history.stride(0), BLOCK=triton.next_power_of_2(n), num_warps=1, **overlap(self.device))
            return ids, pos, Layout(slots, table[:size], length, start, n)
        place = total[:, None] - n + torch.arange(n, device=self.device)     # (size, n)
        pos, ids = place.clamp(0, self.limit - 1), self.history[:size].gather(1, place.clamp(min=0))
        block = table[:size].gather(1, pos // self.bs).long()
        low = total * 0 if low is None else low.clamp(min=0)
        written = (place >= low[:, None]) & (place < numbers[:size, CAP, None])
        slots = torch.where(written, block * self.bs + pos % self.bs, spare)
        return ids.flatten(), pos.flatten(), Layout(slots.flatten(), table[:size], total.int(), start, n)

    def replay(self, f, *key):
        """f(*key), a method on what the device has; on CUDA as a graph, captured when first needed."""
        if not self.graph:
            return f(*key)
        if (f.__name__, *key) not in self.graphs:
            restore = self.keep()      # what warming up draws isn't to stay
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                for _ in range(2):
                    f(*key)
                    restore()
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graph, pool = torch.cuda.CUDAGraph(), next((g.pool() for g, _ in self.graphs.values()), None)
            with torch.cuda.graph(graph, pool=pool):
                out = f(*key)
            self.graphs[f.__name__, *key] = graph, out
        graph, out = self.graphs[f.__name__, *key]
        graph.replay()
        return out

    def forward(self, ids, pos, layout):
        """The trunk's answer for tokens ids at pos (N,), through the pages: (N, C)."""
        self.pages.layout = layout
        return trunk(self.model, ids, pos, self.pages)

    def prefill(self, ids, pos, layout):
        """forward, where tokens of prompts are among them."""
        return self.forward(ids, pos, layout)

    def tokens(self, x, length, numbers, shares, how, into=None):
        """The trunk's (b, C) for contexts of length (b,) -> the tokens that follow (b,), by each row's numbers."""
        seed, n = numbers[:, SEED, None], (length + numbers[:, OFFSET])[:, None]      # (b, 1)
        u = None if how == "greedy" else uniform(seed, n)[:, 0]              # (b,)
        return draw(head(self.model, x), shares[:, TEMPERATURE], numbers[:, TOP_K], shares[:, TOP_P], u, how, into=into)

    def how(self, requests):
        """To draw for these, the cheapest way that serves them all; see `draw`."""
        if any(r.top_k is not None or r.top_p is not None for r in requests):
            return "sorted"
        warm = sum(r.temperature >= 1e-6 for r in requests)
        return "warm" if warm == len(requests) else "plain" if warm else "greedy"

    # ---- what comes of it

    def caches(self):
        return [self.pages]

    def state(self):
        """What a step of decoding changes on the device, beside the pages."""
        return [self.length, self.history]

    def keep(self):
        """-> a function that puts `state` back to what it is now."""
        kept = [(x, x.clone()) for x in self.state()]

        def restore():
            for x, was in kept:
                x.copy_(was)
        return restore

    def register(self, r):
        """Lets others find what is full of r's blocks, as far as its tokens are known here."""
        while (r.registered + 1) * self.bs <= min(r.computed, len(r.text) - r.start):
            i = r.start + r.registered * self.bs
            r.chain = self.pool.register(r.blocks[r.registered], r.chain, r.text[i:i + self.bs])
            r.registered += 1

    def land(self):
        """Takes in the tokens of the oldest step under way."""
        (drawn, where, most, tokens, event), started = self.flying.popleft(), time.perf_counter()
        if event:
            event.synchronize()
        tokens, failed = tokens.tolist(), None
        self.waited += time.perf_counter() - started
        for r, i in zip(drawn, where):
            r.unseen, r.most = r.unseen - 1, r.most - most
            if not r.done:      # else it ended while this was under way
                try:
                    self.take(r, tokens[i])
                except UserError as error:      # the others go on
                    failed = error
        if failed:
            raise failed

    def take(self, r, tokens):
        """Adds what was drawn to r's text, as far as that goes."""
        for token in tokens:
            if token < 0:
                self.end(r, "aborted")
                raise UserError("the model's logits are not numbers: its training diverged")
            r.text.append(token)
            self.events.append((r, token))
            if token in r.stop or len(r.text) == r.prompt + r.max_new_tokens:
                self.end(r, "stop" if token in r.stop else "length")
                return
        if r.state == "running":
            self.register(r)


@jit
def layout_kernel(total_ptr, low_ptr, table_ptr, numbers_ptr, history_ptr, id_ptr, pos_ptr, slot_ptr, length_ptr, n,
                  limit, bs, spare, total_row, low_row, table_row, numbers_row, history_row, BLOCK: tl.constexpr,
                  OVERLAP: tl.constexpr):
    """Engine.layout, a row a program."""
    follow(OVERLAP, "then")
    r, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    total, low, cap = tl.load(total_ptr + r * total_row), r * 0, tl.load(numbers_ptr + r * numbers_row + 1)
    if low_ptr is not None:
        low = tl.maximum(tl.load(low_ptr + r * low_row), 0)
    place, real, to = total - n + i, i < n, r * n + i
    pos = tl.minimum(tl.maximum(place, 0), limit - 1)
    block = tl.load(table_ptr + r * table_row + pos // bs, mask=real, other=0).to(tl.int64)
    written = (place >= low) & (place < cap)
    tl.store(id_ptr + to, tl.load(history_ptr + r * history_row + tl.maximum(place, 0), mask=real, other=0), mask=real)
    tl.store(pos_ptr + to, pos, mask=real)
    tl.store(slot_ptr + to, tl.where(written, block * bs + pos % bs, spare), mask=real)
    tl.store(length_ptr + r, total.to(tl.int32))


# --------------------------------------------------------------------------------------------------------------
# The chapter's claims, predicted beside measured: python paged.py

def mix(n, longest, seed=0):
    """n requests of 16 to `longest` tokens, [(prompt, new)], all lengths and all shares of the prompt alike."""
    rng = np.random.default_rng(seed)
    totals = rng.integers(16, longest + 1, n)
    prompts = (rng.random(n) * (totals - 1)).astype(int) + 1
    return [(int(p), int(t - p)) for p, t in zip(prompts, totals)]


def paged_waste(model, requests, num_blocks, block_size, max_batch):
    """What the engine does with its memory on these requests, over the steps while some wait: the share of the blocks
    in use that holds tokens; tokens of a request on average."""
    engine = Engine(model, num_blocks, block_size, max_batch)
    for prompt, new in requests:
        engine.add(np.random.default_rng(prompt * new).integers(0, engine.vocab, prompt), new, 0.0)
    used, held = [], []
    while engine.waiting:
        engine.step()
        used.append(sum(r.computed for r in engine.running))
        held.append(sum(len(r.blocks) for r in engine.running) * block_size)
    return sum(used) / sum(held), np.mean([u / max(1, len(engine.running)) for u in used])


def show_waste(device):
    """One table: a contiguous cache that reserves the longest, one that knows each length, and pages."""
    longest, size, bs, rows = 1024, 8192, 16, 32
    requests = mix(96, longest)
    print(f"1  memory of a cache of {size:,} tokens, {len(requests)} requests of 16 to {longest} tokens; shares of it\n"
          f"   {'':34}{'used':>8}{'reserved':>10}{'scattered':>11}")
    for name, reserve in (("contiguous, the longest reserved", lambda p, n: longest),
                          ("contiguous, each length known", lambda p, n: p + n)):
        used, reserved, scattered = contiguous_waste(requests, size, reserve)
        print(f"   {name:34}{used:8.1%}{reserved:10.1%}{scattered:11.1%}")
    model = GPT(GPTConfig(vocab_size=65, block_size=longest, n_layer=1, n_head=1, n_embd=16), seed=1).to(device).eval()
    used, each = paged_waste(model, requests, size // bs, bs, rows)
    print(f"   {'pages of 16, what is in use':34}{used:8.1%}{1 - used:10.1%}{0:11.1%}\n"
          f"   of pages only a request's last is partly empty: predicted {bs / 2 / (each + bs / 2):.1%} reserved, "
          f"measured {1 - used:.1%}")


def show_attention(device):
    """On a GPU: decoding attention's bytes a second, beside a kernel of cuDNN's. Elsewhere: the kernel's reference
    against the definition."""
    if device.type != "cuda":
        k, v = torch.randn(2, 9, 16, 2, 64)
        q, table = torch.randn(2, 2, 64), torch.randperm(9, dtype=torch.int32)[:8].view(2, 4)
        length, start = torch.tensor([50, 64], dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)
        got = paged_attention(q, k, v, table, length, start, 1)
        keys, values = (x[table[1].long()].flatten(0, 1).transpose(0, 1)[None] for x in (k, v))
        want = torch_attention(q[1:].transpose(0, 1)[None], keys, values)[0, :, 0]
        print(f"2  attention through a block table: largest difference {(got[1] - want).abs().max():.0e}")
        return
    print("2  attention through block tables in random order, one and five new tokens: GB/s of K and V, and time;\n"
          "   cuDNN's kernel on contiguous keys and values")
    for nh, hs, R, T in ((12, 64, 1, 8192), (12, 64, 1, 32768), (12, 64, 16, 2048), (12, 64, 64, 1024),
                         (12, 64, 64, 4096), (16, 128, 64, 4096)):
        size = 2 * R * T * nh * hs * 2                                       # bytes of K and V
        pools, line = max(2, -(-2 ** 28 // size)), f"   {nh} heads of {hs}, {R:3} x {T:6}:"      # larger than any cache
        k, v = torch.randn(2, pools * R * T // 16, 16, nh, hs, device=device, dtype=torch.bfloat16)
        tables = torch.randperm(len(k), dtype=torch.int32, device=device).view(pools, R, -1)
        keys, values = (x.view(pools, R, T, nh, hs).transpose(2, 3).contiguous() for x in (k, v))
        for n in (1, 5):
            q = torch.randn(R * n, nh, hs, device=device, dtype=torch.bfloat16)
            length = torch.full((R,), T, dtype=torch.int32, device=device)
            start = torch.arange(R + 1, dtype=torch.int32, device=device) * n
            ours = replayed([lambda table=table: paged_attention(q, k, v, table, length, start, n) for table in tables])
            x = q.view(R, n, nh, hs).transpose(1, 2)                         # (R, nh, n, hs)
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                peer = replayed([lambda kv=kv: F.scaled_dot_product_attention(x, *kv) for kv in zip(keys, values)])
            line += (f"{size / ours / 1e9:8,.0f} GB/s {1e6 * ours:6.1f} us, cuDNN {1e6 * peer:6.1f} "
                     f"({peer / ours:4.2f});")
        print(line[:-1], flush=True)
        del k, v, keys, values


def replayed(calls):
    """Seconds of a call: the calls, each on memory of its own so that none finds it cached, as one CUDA graph."""
    for f in calls:
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in calls:
            f()
    return seconds(lambda: [graph.replay() for _ in range(4)], torch.device("cuda"), 9) / 4 / len(calls)


def seconds(f, device, repeats=3):
    """What f() takes, the median of some; the first, which may compile, doesn't count."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        f()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken[1:]))


def serve(engine, prompts, new, temperature=0.0):
    """Has the engine write `new` tokens after each prompt. -> seconds in all, and of a step in which all decode; the
    requests."""
    requests = [engine.add(prompt, new, temperature, seed=i) for i, prompt in enumerate(prompts)]
    begin, inside = time.perf_counter(), []
    while engine.busy:
        started, full = time.perf_counter(), all(r.at_hand for r in requests)
        engine.step()
        if full and all(r.state == "running" for r in requests):
            inside.append(time.perf_counter() - started)
    return time.perf_counter() - begin, float(np.median(inside)) if inside else math.nan, requests


def served(engine, prompts, new, temperature=0.0):
    """serve from an empty pool: on a GPU the median of three runs, without those in which something was compiled or
    captured. The engine's stats are those of the last one."""
    runs, want = [], 3 if engine.graph else 1
    for attempt in range(3 * want):
        engine.pool, known = BlockPool(len(engine.pool.users), engine.bs), len(engine.graphs)
        engine.restart_stats()
        result = serve(engine, prompts, new, temperature)
        if attempt and known == len(engine.graphs):
            runs.append(result)
        if len(runs) == want:
            break
    return sorted(runs or [result], key=lambda run: run[0])[len(runs) // 2]


def replay_seconds(engine, n):
    """What the device takes for a step of decoding n rows, as captured, without a scheduler."""
    graph, _ = engine.graphs["decode_rows", min(1 << (n - 1).bit_length(), len(engine.table)), "greedy"]
    return seconds(lambda: [graph.replay() for _ in range(20)], engine.device) / 20


def memory_bound(model, contexts, bandwidth):
    """Tokens/s of decoding if all that took time were reading the weights, and these contexts' keys and values."""
    config, size = model.config, model.table.itemsize
    weights = model.num_params() - config.block_size * config.n_embd
    return len(contexts) * bandwidth / size / (weights + 2 * config.n_layer * config.n_embd * sum(contexts))


def show_engine(device):
    """Tokens a second of greedy texts, beside what the memory's bandwidth allows: without a cache, with a contiguous
    one, by the engine."""
    small, rng = device.type != "cuda", np.random.default_rng(0)
    x = torch.empty(2 ** 27 if small else 2 ** 30, dtype=torch.int8, device=device)
    y = torch.empty_like(x)
    bandwidth = 2 * len(x) / seconds(lambda: y.copy_(x), device)
    R, T, new = (8, 32, 64) if small else (64, 256, 128)
    print(f"3  texts of {T} + {new} tokens; memory moves {bandwidth / 1e9:,.0f} GB/s\n   {'':44}{'tokens computed':>16}"
          f"{'tokens/s: bound':>18}{'measured':>10}{'a step: ms':>12}{'on the GPU':>12}")

    def row(name, model, contexts, new, computed, taken, step=math.nan, alone=math.nan):
        most = memory_bound(model, contexts, bandwidth)
        print(f"   {name:44}{computed:16,}{most:18,.0f}{len(contexts) * new / taken:10,.0f}{1e3 * step:12.2f}"
              f"{1e3 * alone:12.2f}", flush=True)

    def run(name, model, prompts, blocks=None, rows=None):
        rows = rows or len(prompts)
        engine = Engine(model, blocks or sum(-(-(len(p) + new) // 16) for p in prompts), max_batch=rows, budget=16384)
        taken, step, _ = served(engine, prompts, new)
        row(name, model, [len(p) + new / 2 for p in prompts[:rows]], new * len(prompts) / rows,
            engine.stats["computed"], taken, step, replay_seconds(engine, rows) if engine.graph else math.nan)

    config = (GPTConfig(vocab_size=256, block_size=128, n_layer=2, n_head=4, n_embd=128) if small else
              GPTConfig(bias=False))
    model = GPT(config, seed=1, device=device).to(torch.float32 if small else torch.bfloat16).eval()
    prompts = rng.integers(0, config.vocab_size, (R, T)).tolist()
    first = torch.tensor(prompts[:1], device=device)

    def contiguous():
        cache, x = ContiguousCache(model, T + new), first
        with torch.inference_mode():
            for _ in range(new):
                logits = model(x, torch.arange(cache.used, cache.used + x.size(1), device=device), cache)
                cache.advance(x.size(1))
                x = logits[:, -1:].argmax(-1)
    row("no cache, 1", model, [T + new / 2], new, sum(range(T, T + new)),
        seconds(lambda: model.generate(first, new, 0.0), device))
    row("contiguous cache, 1", model, [T + new / 2], new, T + new - 1, seconds(contiguous, device))
    run("engine, 1", model, prompts[:1])
    run(f"engine, {R}", model, prompts)
    lengths = rng.integers(T // 16, 2 * T + 1 - new // 2 * small, 4 * R)
    many = [rng.integers(0, config.vocab_size, n).tolist() for n in lengths]
    half = sum(-(-(n + new) // 16) for n in lengths) // 2
    run(f"engine, {4 * R} of {min(lengths)} to {max(lengths)}, half fit", model, many, half, 2 * R)
    if not small:
        xl = GPT(GPTConfig(n_layer=48, n_head=25, n_embd=1600, bias=False), seed=1, device=device)
        run("engine, 1, a model of 1.5B", xl.to(torch.bfloat16).eval(), prompts[:1])


def chapter(argv=None):
    Options(prog="paged.py", description=__doc__.split("\n\n")[0]).parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    show_waste(device)
    show_attention(device)
    show_engine(device)


if __name__ == "__main__":
    sys.exit(program("paged.py", chapter))
