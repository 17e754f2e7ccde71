"""FlashAttention, from the online softmax up: why attention waits for memory, and how not to.

What it teaches: a GPU computes far faster than it reads. Attention as it is written down, softmax(q k^T) v, writes a
T x T matrix to memory and reads it back; FlashAttention computes the same numbers tile by tile in on-chip memory and
never writes that matrix. The chapter goes there in five steps, each exact, each with the naive version kept as oracle:

    1  tiling             a matrix product by blocks, and the bytes that it moves
    2  softmax            in three passes, in two (online), and merged from parts: what makes tiling possible
    3  recomputation      compute a thing again in backward instead of keeping it
    4  FlashAttention-2   the three together: forward and backward in Triton
    5  the loss           the same online softmax over the vocabulary

Papers: FlashAttention (Dao et al. 2022, 2205.14135), FlashAttention-2 (Dao 2023, 2307.08691), online softmax
(Milakov & Gimelshein 2018, 1805.02867), recomputation (Chen et al. 2016, 1604.06174).

    python flash.py                           the chapter's claims, predicted beside measured, on this machine
    python -m pytest tests/test_flash.py      on a GPU; on a CPU the kernels run in Triton's interpreter

Without Triton steps 1 to 3 are NumPy and torch as before, and attention and loss use torch's own operators. What it
can't do: dropout on the attention weights, masks other than the causal one, head sizes above 256, float64.
"""

from __future__ import annotations      # kernels name tl.constexpr, also where there is no tl

import math
import os
import sys
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:      # no Triton here, or one from before tensor descriptors (3.4)
    triton = tl = None

LOG2E = math.log2(math.e)      # exp(x) = exp2(LOG2E x)
jit = triton.jit if triton else lambda function: function
# lengths differ from call to call: one compilation serves them all, also where one happens to be 1 or a multiple of 16
jit_any_length = triton.jit(do_not_specialize=["nh", "Tq", "Tk"]) if triton else jit
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"      # Triton's own switch: kernels run on the CPU, slowly


def runs_kernels(x):
    """Whether Triton kernels can run where x is: on CUDA or in the interpreter."""
    return triton is not None and (x.is_cuda or INTERPRETED)


def has_kernels(x):
    """Whether the Triton kernels can take tensor x of numbers: in 16 or 32 bits."""
    return runs_kernels(x) and x.dtype in (torch.float16, torch.bfloat16, torch.float32)


def attends(x):
    """Whether the attention kernels can take x (..., hs)."""
    return has_kernels(x) and 0 < x.size(-1) <= 256 and x.numel() > 0


# --------------------------------------------------------------------------------------------------------------
# 1. Tiling
#
# C = A B with A (M, K), B (K, N): element by element, each of the M N results reads a row and a column from memory,
# 2 K numbers. A tile of C, b x b results, needs a strip of A and a strip of B, 2 K b numbers, for b^2 results: b times
# fewer. The strips pass through fast memory a tile at a time, so 3 b^2 numbers of it are enough for any K.

def matmul_tiled(a, b, block):
    """a (M, K), b (K, N) NumPy arrays -> (a @ b, numbers read from slow memory)."""
    (M, K), N = a.shape, b.shape[1]
    c, read = np.zeros((M, N), a.dtype), 0
    for i in range(0, M, block):
        for j in range(0, N, block):
            for k in range(0, K, block):
                tile_a, tile_b = a[i:i + block, k:k + block], b[k:k + block, j:j + block]
                read += tile_a.size + tile_b.size
                c[i:i + block, j:j + block] += tile_a @ tile_b               # (b, b) @ (b, b), all in fast memory
    return c, read


# --------------------------------------------------------------------------------------------------------------
# 2. Softmax
#
# Safe softmax, y_j = exp(x_j - m) / l with m = max x and l = sum exp(x - m), reads x three times: for m, for l, for y.
# The online softmax finds m and l in one pass. When the maximum rises from m to m', the sum so far was taken against
# the wrong maximum, and one factor mends it:
#
#     m' = max(m, x_j)        l' = l exp(m - m') + exp(x_j - m')
#
# The same factor merges two parts that know nothing of each other: (m, l) and (m', l') of two halves give those of the
# whole. And it mends a weighted sum O = sum exp(x_j - m) v_j just as well as the sum l. That is all of FlashAttention.

def softmax_safe(x):
    """x (n,) -> softmax(x), in three passes."""
    m = max(x)                                                               # pass 1
    l = sum(np.exp(v - m) for v in x)                                        # pass 2
    return np.array([np.exp(v - m) / l for v in x])                          # pass 3


def softmax_online(x):
    """x (n,) -> softmax(x), in two passes. Milakov & Gimelshein 2018."""
    m, l = -np.inf, 0.0
    for v in x:                                                              # pass 1
        m_new = max(m, v)
        if m_new > -np.inf:                                                  # else there is nothing yet to add
            l = l * np.exp(m - m_new) + np.exp(v - m_new)
        m = m_new
    return np.array([np.exp(v - m) / l for v in x])                          # pass 2


def merge(o1, lse1, o2, lse2):
    """Two attentions over different keys -> the attention over all of them.

    o (..., hs) outputs and lse (...) their log-sum-exps, float, torch tensors; -> (o, lse). A part that saw no key has
    lse = -inf and changes nothing (where neither saw one, there is no gradient either)."""
    lse = torch.logaddexp(lse1, lse2)
    safe = lse.masked_fill(lse == -math.inf, 0.0)                            # -inf - -inf is no number
    return o1 * (lse1 - safe).exp()[..., None] + o2 * (lse2 - safe).exp()[..., None], lse


@jit
def softmax_safe_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """One row a program: three reads and one write of it."""
    row, cols = tl.program_id(0).to(tl.int64) * n, tl.arange(0, BLOCK)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    for i in range(0, n, BLOCK):
        m = tl.maximum(m, tl.load(x_ptr + row + i + cols, mask=i + cols < n, other=float("-inf")))
    top = tl.max(m, 0)
    l = tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        l += tl.exp(tl.load(x_ptr + row + i + cols, mask=i + cols < n, other=float("-inf")) - top)
    total = tl.sum(l, 0)
    for i in range(0, n, BLOCK):
        x = tl.load(x_ptr + row + i + cols, mask=i + cols < n, other=float("-inf"))
        tl.store(y_ptr + row + i + cols, tl.exp(x - top) / total, mask=i + cols < n)


@jit
def softmax_online_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """One row a program: two reads and one write. Each of BLOCK lanes keeps an (m, l) of its own; they merge last."""
    row, cols = tl.program_id(0).to(tl.int64) * n, tl.arange(0, BLOCK)
    m, l = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    for i in range(0, n, BLOCK):
        x = tl.load(x_ptr + row + i + cols, mask=i + cols < n, other=float("-inf"))
        m_new = tl.maximum(m, x)
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)                  # a lane that has seen nothing yet
        l = l * tl.exp(m - safe) + tl.exp(x - safe)
        m = m_new
    top = tl.max(m, 0)
    total = tl.sum(l * tl.exp(m - top), 0)
    for i in range(0, n, BLOCK):
        x = tl.load(x_ptr + row + i + cols, mask=i + cols < n, other=float("-inf"))
        tl.store(y_ptr + row + i + cols, tl.exp(x - top) / total, mask=i + cols < n)


def softmax_rows(x, online=True):
    """x (rows, n) float32, contiguous, where kernels run -> softmax over n, by one of the two kernels above."""
    y = torch.empty_like(x)
    kernel = softmax_online_kernel if online else softmax_safe_kernel
    kernel[(x.size(0),)](x, y, x.size(1), BLOCK=1024, num_warps=4)
    return y


# --------------------------------------------------------------------------------------------------------------
# 3. Recomputation
#
# Backward needs what forward computed. It can be kept, which costs memory from then until its turn comes, or computed
# again. FlashAttention computes its T x T matrix again, tile by tile, from q, k and one number a row. Here the idea
# alone, on a two-layer MLP whose hidden layer, the largest tensor, isn't kept.

class RecomputedMLP(torch.autograd.Function):
    """forward: gelu(x w1^T) w2^T with x (N, C), w1 (H, C), w2 (C, H) -> (N, C) / backward: the hidden (N, H) again."""

    @staticmethod
    def forward(ctx, x, w1, w2):
        ctx.save_for_backward(x, w1, w2)                                     # and not the hidden layer
        return F.gelu(x @ w1.t()) @ w2.t()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w1, w2 = ctx.saved_tensors
        with torch.enable_grad():
            a = (x @ w1.t()).requires_grad_()                                # (N, H), for the second time
            h = F.gelu(a)
        dw2 = dy.t() @ h                                                     # (C, N) @ (N, H) -> (C, H)
        da, = torch.autograd.grad(h, a, dy @ w2)                             # (N, C) @ (C, H) -> (N, H)
        return da @ w1, da.t() @ x, dw2                                      # (N, C), (H, C), (C, H)


# --------------------------------------------------------------------------------------------------------------
# 4. FlashAttention-2
#
# S = scale q k^T, P = softmax(S), O = P v. Forward, for a tile of queries, goes over the tiles of keys and keeps, for
# each query, the running maximum m, denominator l and output O:
#
#     m' = max(m, rowmax S)     P = exp(S - m')     l' = l exp(m - m') + rowsum P     O' = O exp(m - m') + P v
#
# and in the end O / l, and the log-sum-exp L = m + log l, the one number a row that backward needs, since
# P = exp(S - L) without any further maximum or sum. With dO given, the chain rule says
#
#     dv = P^T dO        dP = dO v^T        dS = P * (dP - D), D = rowsum(dO * O)
#     dq = scale dS k    dk = scale dS^T q
#
# D stands for the softmax's own backward, rowsum(P * dP), and is known before any tile: rowsum(P * (dO v^T)) is
# rowsum(dO * (P v)). If the log-sum-exp is used further on and has a gradient dL, dS gains P * dL, so D becomes D - dL.
#
# Queries are aligned bottom-right under the causal mask: query i is the token at position Tk - Tq + i and sees keys
# 0 .. Tk - Tq + i. Kernels compute with exp2, scale * log2(e) folded into the scores.

def attention_naive(q, k, v, causal=True, scale=None, dropout=0.0):
    """The definition, with the (Tq, Tk) matrix written out: the oracle. Arguments as flash_attention's; any float
    dtype; dropout on P. -> o (B, nh, Tq, hs), lse (B, nh, Tq). A row that sees no key gives 0 and -inf."""
    Tq, Tk = q.size(-2), k.size(-2)
    S = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)          # (B, nh, Tq, Tk)
    if causal:
        seen = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq)
        S = S.masked_fill(~seen, -math.inf)
    lse = S.logsumexp(-1)                                                    # (B, nh, Tq)
    P = (S - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return F.dropout(P, dropout) @ v, lse


def attention_tiled(q, k, v, block, causal=True):
    """FlashAttention-2's forward in NumPy, one head: q (Tq, hs), k and v (Tk, hs) -> o (Tq, hs), lse (Tq,)."""
    (Tq, hs), Tk = q.shape, k.shape[0]
    o, lse = np.zeros_like(q), np.zeros(Tq, q.dtype)
    for i in range(0, Tq, block):
        Q = q[i:i + block] / math.sqrt(hs)
        m, l, O = np.full(len(Q), -np.inf), np.zeros(len(Q)), np.zeros_like(Q)
        for j in range(0, Tk, block):
            S = Q @ k[j:j + block].T                                         # (b, hs) @ (hs, b) -> (b, b)
            if causal:
                rows, cols = np.arange(i, i + len(Q))[:, None], np.arange(j, j + S.shape[1])[None]
                S = np.where(cols <= rows + Tk - Tq, S, -np.inf)
            m_new = np.maximum(m, S.max(1))
            safe = np.where(np.isinf(m_new), 0.0, m_new)                     # nothing seen yet
            P, alpha = np.exp(S - safe[:, None]), np.exp(m - safe)
            l, O, m = l * alpha + P.sum(1), O * alpha[:, None] + P @ v[j:j + block], m_new
        blind = l == 0                                                       # queries that saw no key: 0 and -inf
        o[i:i + block] = O / np.where(blind, 1, l)[:, None]
        lse[i:i + block] = np.where(blind, -np.inf, m + np.log(l + blind))
    return o, lse


@jit_any_length
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, nh, Tq, Tk, scale_log2, CAUSAL: tl.constexpr,
                   HS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """A tile of BLOCK_M queries of one head a program. Descriptors cover (B, nh, T, hs): a tile that reaches over an
    edge reads zeros there and doesn't write there, whatever lies behind the edge in memory."""
    tiles = tl.cdiv(Tq, BLOCK_M)
    head, i = tl.program_id(0) // tiles, (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M      # longest first
    b, h = head // nh, head % nh
    rows = i + tl.arange(0, BLOCK_M)
    Q = q_desc.load([b, h, i, 0]).reshape(BLOCK_M, HS)
    m, l = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    O = tl.zeros([BLOCK_M, HS], tl.float32)
    end = tl.minimum(Tk, i + BLOCK_M + Tk - Tq) if CAUSAL else Tk
    for j in range(0, end, BLOCK_N):
        K = k_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS)
        S = tl.dot(Q, K.T, input_precision=PRECISION)                        # (BLOCK_M, BLOCK_N), not yet scaled
        if j + BLOCK_N > (tl.minimum(Tk, i + Tk - Tq + 1) if CAUSAL else Tk):      # the only tiles with a mask
            cols = j + tl.arange(0, BLOCK_N)
            seen = cols[None, :] < Tk
            if CAUSAL:
                seen = seen & (cols[None, :] <= rows[:, None] + Tk - Tq)
            S = tl.where(seen, S, float("-inf"))
        m_new = tl.maximum(m, tl.max(S, 1) * scale_log2)                     # scale > 0
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)                  # nothing seen yet: no -inf - -inf
        P, alpha = tl.exp2(S * scale_log2 - safe[:, None]), tl.exp2(m - safe)      # one multiply-add a score
        l = l * alpha + tl.sum(P, 1)
        V = v_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS)
        O = tl.dot(P.to(V.dtype), V, O * alpha[:, None], input_precision=PRECISION)
        m = m_new
    O = O / tl.where(l == 0, 1.0, l)[:, None]
    o_desc.store([b, h, i, 0], O.to(o_desc.dtype).reshape(1, 1, BLOCK_M, HS))
    lse = tl.where(l == 0, float("-inf"), m + tl.log2(l))
    tl.store(lse_ptr + head.to(tl.int64) * Tq + rows, lse, mask=rows < Tq)


@jit_any_length
def backward_q_kernel(q_desc, k_desc, v_desc, o_desc, do_desc, dq_desc, lse_desc, dlse_desc, D_desc, nh, Tq, Tk,
                      scale, scale_log2, CAUSAL: tl.constexpr, HS: tl.constexpr, BLOCK_M: tl.constexpr,
                      BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """dq for a tile of queries, over the tiles of keys; on the way D, which the other kernel needs too. dlse_desc is
    None where nobody uses the log-sum-exp. Queries beyond Tq are read as zeros, and so are their dO: they add nothing
    here, nor in the other kernel."""
    tiles = tl.cdiv(Tq, BLOCK_M)
    head, i = tl.program_id(0) // tiles, (tiles - 1 - tl.program_id(0) % tiles) * BLOCK_M
    b, h = head // nh, head % nh
    rows = i + tl.arange(0, BLOCK_M)
    Q = q_desc.load([b, h, i, 0]).reshape(BLOCK_M, HS)
    dO = do_desc.load([b, h, i, 0]).reshape(BLOCK_M, HS)
    O = o_desc.load([b, h, i, 0]).reshape(BLOCK_M, HS)
    D = tl.sum(O.to(tl.float32) * dO.to(tl.float32), 1)                      # (BLOCK_M,)
    if dlse_desc is not None:
        D -= dlse_desc.load([b, h, i]).reshape(BLOCK_M)
    D_desc.store([b, h, i], D.reshape(1, 1, BLOCK_M))
    lse = lse_desc.load([b, h, i]).reshape(BLOCK_M)
    dQ = tl.zeros([BLOCK_M, HS], tl.float32)
    end = tl.minimum(Tk, i + BLOCK_M + Tk - Tq) if CAUSAL else Tk
    for j in range(0, end, BLOCK_N):
        K = k_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS)
        V = v_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS)
        P = tl.exp2(tl.dot(Q, K.T, input_precision=PRECISION) * scale_log2 - lse[:, None])
        if j + BLOCK_N > (tl.minimum(Tk, i + Tk - Tq + 1) if CAUSAL else Tk):
            cols = j + tl.arange(0, BLOCK_N)
            seen = cols[None, :] < Tk
            if CAUSAL:
                seen = seen & (cols[None, :] <= rows[:, None] + Tk - Tq)
            P = tl.where(seen, P, 0.0)
        dP = tl.dot(dO, V.T, input_precision=PRECISION)                      # (BLOCK_M, BLOCK_N)
        dS = P * (dP - D[:, None])
        dQ = tl.dot(dS.to(K.dtype), K, dQ, input_precision=PRECISION)        # (BLOCK_M, HS)
    dq_desc.store([b, h, i, 0], (dQ * scale).to(dq_desc.dtype).reshape(1, 1, BLOCK_M, HS))


@jit_any_length
def backward_kv_kernel(q_desc, k_desc, v_desc, do_desc, dk_desc, dv_desc, lse_desc, D_desc, nh, Tq, Tk, scale,
                       scale_log2, ADD: tl.constexpr, CAUSAL: tl.constexpr, HS: tl.constexpr, BLOCK_M: tl.constexpr,
                       BLOCK_N: tl.constexpr, PRECISION: tl.constexpr):
    """dk and dv for a tile of keys, over the tiles of queries that see it; with ADD they are added to what is there.
    Works on the transposed scores S^T, so that both sums are products whose left side is already in registers. lse and
    D come by the copy engine too, ahead of their use: read by the threads themselves, every iteration waited for them,
    which took a third of the time."""
    tiles = tl.cdiv(Tk, BLOCK_N)
    head, j = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * BLOCK_N
    b, h = head // nh, head % nh
    cols = j + tl.arange(0, BLOCK_N)
    K = k_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS)
    V = v_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS)
    dK, dV = tl.zeros([BLOCK_N, HS], tl.float32), tl.zeros([BLOCK_N, HS], tl.float32)
    start = tl.maximum(0, j - (Tk - Tq)) // BLOCK_M * BLOCK_M if CAUSAL else 0
    for i in range(start, Tq, BLOCK_M):
        rows = i + tl.arange(0, BLOCK_M)
        lse = lse_desc.load([b, h, i]).reshape(BLOCK_M)
        D = D_desc.load([b, h, i]).reshape(BLOCK_M)
        Q = q_desc.load([b, h, i, 0]).reshape(BLOCK_M, HS)
        dO = do_desc.load([b, h, i, 0]).reshape(BLOCK_M, HS)
        P = tl.exp2(tl.dot(K, Q.T, input_precision=PRECISION) * scale_log2 - lse[None, :])
        if CAUSAL and j + BLOCK_N > i + Tk - Tq + 1:
            P = tl.where(cols[:, None] <= rows[None, :] + Tk - Tq, P, 0.0)   # P^T: (BLOCK_N, BLOCK_M)
        if HS <= 64:      # dV first or last is a matter of registers: with wide heads this order needs too many
            dV = tl.dot(P.to(dO.dtype), dO, dV, input_precision=PRECISION)   # (BLOCK_N, HS)
        dP = tl.dot(V, dO.T, input_precision=PRECISION)                      # (BLOCK_N, BLOCK_M)
        dS = P * (dP - D[None, :])
        if HS > 64:
            dV = tl.dot(P.to(dO.dtype), dO, dV, input_precision=PRECISION)
        dK = tl.dot(dS.to(Q.dtype), Q, dK, input_precision=PRECISION)        # (BLOCK_N, HS)
    dK *= scale
    if ADD:
        dK += dk_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS).to(tl.float32)
        dV += dv_desc.load([b, h, j, 0]).reshape(BLOCK_N, HS).to(tl.float32)
    dk_desc.store([b, h, j, 0], dK.to(dk_desc.dtype).reshape(1, 1, BLOCK_N, HS))
    dv_desc.store([b, h, j, 0], dV.to(dv_desc.dtype).reshape(1, 1, BLOCK_N, HS))


# By kernel and head size (those up to 64 as 64): blocks of queries and of keys, warps, stages, and the limit on
# registers a thread, in 16 bits. The best of some 300 settings a kernel, measured on an H200. Small programs of 4
# warps, several of them on a multiprocessor, win nearly everywhere: the products of one run while another computes its
# exponentials. With 168 registers three of the 4-warp programs fit on a multiprocessor, with 176 only two: a fifth
# slower.
SETTINGS = {"forward": {64: (64, 64, 4, 3, None), 128: (64, 128, 4, 1, None), 256: (64, 32, 4, 1, None)},
            "backward_q": {64: (64, 32, 4, 3, None), 128: (128, 64, 8, 3, None), 256: (64, 32, 4, 1, None)},
            "backward_kv": {64: (64, 64, 4, 3, 168), 128: (64, 64, 4, 2, None), 256: (32, 32, 4, 1, None)}}
LONG = {"forward": (64, 128, 4, 2, None), "backward_q": (128, 64, 8, 3, None)}      # for hs <= 64 and T >= 2048
MANY = 1536      # programs; of fewer a multiprocessor should take four at once, for which LONG's forward is too large


@lru_cache
def shared_memory(device):
    """Bytes that one program can have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def settings(kind, x, T):
    """-> the keyword arguments of a kernel's launch for tensor x (B, nh, T, hs). On a card with less shared memory
    than Hopper's the blocks of keys are halved until they fit."""
    HS = max(16, triton.next_power_of_2(x.size(-1)))
    block_m, block_n, warps, stages, registers = SETTINGS[kind][max(64, HS)]
    few = kind == "forward" and x.numel() // x.size(-1) < MANY * block_m
    if HS <= 64 and T >= 2048 and not few:
        block_m, block_n, warps, stages, registers = LONG.get(kind, SETTINGS[kind][64])
    if x.dtype == torch.float32:      # products without tensor cores fill the registers: tiles that hardly spill
        block_m, block_n, warps, stages, registers = (32, 32, 8, 1, None) if HS <= 64 else (16, 16, 4, 1, None)
    if x.is_cuda:
        room = shared_memory(x.device)
        while (2 * block_m + 2 * block_n * stages) * HS * x.element_size() > room and block_n > 16:
            block_n, stages = block_n // 2, 1
    return dict(HS=HS, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, maxnreg=registers,
                PRECISION="ieee" if x.dtype == torch.float32 else "tf32")    # tf32 has no meaning in 16 bits


def describe(x, *tile):
    """A descriptor of x (B, nh, T) in tiles of (block,), or of x (B, nh, T, hs) in tiles of (block, HS), for the copy
    engine of Hopper (TMA), elsewhere for plain loads. It wants strides of whole 16 bytes, the last one 1; a tensor
    that has others is copied."""
    unit = 16 // x.element_size()
    strides = [s if n > 1 else unit for n, s in zip(x.shape, x.stride())]
    strides[-1] = x.stride(-1) if x.size(-1) > 1 else 1
    if strides[-1] != 1 or x.data_ptr() % 16 or any(s % unit or s == 0 for s in strides[:-1]):
        padded = x.new_empty(*x.shape[:-1], -(-x.size(-1) // unit) * unit)
        x = padded[..., :x.size(-1)].copy_(x)
        strides = list(x.stride())
    return TensorDescriptor(x, list(x.shape), strides, [1] * (x.dim() - len(tile)) + list(tile))


def like(x):
    """An empty tensor of x's shape (B, nh, T, hs) whose memory is laid out as (B, T, nh, hs), as a model wants it."""
    B, nh, T, hs = x.shape
    return x.new_empty(B, T, nh, hs).transpose(1, 2)


def launch_forward(q, k, v, causal, scale):
    """-> o like q, and the log-sum-exp in base 2, (B, nh, Tq) float32."""
    (B, nh, Tq, hs), Tk = q.shape, k.size(2)
    o, lse = like(q), q.new_empty(B, nh, Tq, dtype=torch.float32)
    how = settings("forward", q, Tk)
    M, N, HS = how["BLOCK_M"], how["BLOCK_N"], how["HS"]
    out = describe(o, M, HS)
    with torch.cuda.device_of(q):
        forward_kernel[(triton.cdiv(Tq, M) * B * nh,)](
            describe(q, M, HS), describe(k, N, HS), describe(v, N, HS), out, lse, nh, Tq, Tk, scale * LOG2E,
            CAUSAL=causal, **how)
    return (o if out.base is o else o.copy_(out.base)), lse


def launch_backward(q, k, v, o, lse, do, dlse, causal, scale, grads=None, add=False):
    """-> dq, dk, dv, from what forward took and gave, and the gradients do of o and dlse of lse (None: zero). grads:
    where to write them, by default into new tensors; add: dk and dv to what is there."""
    (B, nh, Tq, hs), Tk = q.shape, k.size(2)
    grads = grads or [like(x) for x in (q, k, v)]
    how_q, how_kv = settings("backward_q", q, Tk), settings("backward_kv", q, Tq)
    HS, M, N = how_q["HS"], how_q["BLOCK_M"], how_q["BLOCK_N"]
    lengths = nh, Tq, Tk, scale, scale * LOG2E
    with torch.cuda.device_of(q):
        dq, D = describe(grads[0], M, HS), describe(torch.empty_like(lse), M)
        backward_q_kernel[(triton.cdiv(Tq, M) * B * nh,)](
            describe(q, M, HS), describe(k, N, HS), describe(v, N, HS), describe(o, M, HS), describe(do, M, HS), dq,
            describe(lse, M), None if dlse is None else describe(dlse * LOG2E, M), D, *lengths, CAUSAL=causal, **how_q)
        M, N = how_kv["BLOCK_M"], how_kv["BLOCK_N"]
        dk, dv = describe(grads[1], N, HS), describe(grads[2], N, HS)
        backward_kv_kernel[(triton.cdiv(Tk, N) * B * nh,)](
            describe(q, M, HS), describe(k, N, HS), describe(v, N, HS), describe(do, M, HS), dk, dv,
            describe(lse, M), describe(D.base, M), *lengths, ADD=add, CAUSAL=causal, **how_kv)
    return [x if d.base is x else x.copy_(d.base) for x, d in zip(grads, (dq, dk, dv))]


# The kernels as operators of their own: torch.compile sees opaque calls with shapes and a gradient, and doesn't break
# its graph around them. Their log-sum-exp is in base 2, as the kernels use it.

def operator(schema, launch, shapes):
    """Registers nanoscale::NAME(...) -> ...: `launch` computes it, `shapes` gives empty tensors like its results."""
    name = "nanoscale::" + schema.split("(")[0]
    torch.library.define(name, schema[schema.index("("):], tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "default", launch)
    torch.library.register_fake(name, shapes)
    return getattr(torch.ops.nanoscale, schema.split("(")[0]).default


def packed_like(qkv):
    """An empty tensor of qkv's shape (3, B, nh, T, hs), laid out as (B, T, 3, nh, hs): a projection's output."""
    _, B, nh, T, hs = qkv.shape
    return qkv.new_empty(B, T, 3, nh, hs).permute(2, 0, 3, 1, 4)


def launch_packed_backward(qkv, o, lse, grad_o, scale):
    """-> the gradient of qkv (3, B, nh, T, hs), each third written in its place."""
    grad = packed_like(qkv)
    launch_backward(*qkv, o, lse, grad_o, None, True, scale, [*grad])
    return grad


flash_forward = operator(
    "flash_forward(Tensor q, Tensor k, Tensor v, bool causal, float scale) -> (Tensor, Tensor)", launch_forward,
    lambda q, k, v, causal, scale: (like(q), q.new_empty(q.shape[:3], dtype=torch.float32)))
flash_backward = operator(
    "flash_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor grad_o, Tensor? grad_lse, bool causal, "
    "float scale) -> (Tensor, Tensor, Tensor)", lambda *args: tuple(launch_backward(*args)),
    lambda q, k, v, *_: (like(q), like(k), like(v)))
flash_packed_backward = operator(
    "flash_packed_backward(Tensor qkv, Tensor o, Tensor lse, Tensor grad_o, float scale) -> Tensor",
    launch_packed_backward, lambda qkv, *_: packed_like(qkv))


class FlashAttention(torch.autograd.Function):
    """forward: o (B, nh, Tq, hs) and its log-sum-exp in base 2, (B, nh, Tq) / backward: dq, dk, dv."""

    @staticmethod
    def forward(ctx, q, k, v, causal, scale):
        ctx.set_materialize_grads(False)      # an output that nobody uses has the gradient None instead of zeros
        o, lse = flash_forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal, ctx.scale = causal, scale
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o, grad_lse):
        grad_o = torch.zeros_like(ctx.saved_tensors[3]) if grad_o is None else grad_o
        return *flash_backward(*ctx.saved_tensors, grad_o, grad_lse, ctx.causal, ctx.scale), None, None


class PackedFlashAttention(torch.autograd.Function):
    """forward: o (B, nh, T, hs), causal, of qkv (3, B, nh, T, hs) / backward: the gradient of qkv, one tensor."""

    @staticmethod
    def forward(ctx, qkv, scale):
        o, lse = flash_forward(*qkv.unbind(0), True, scale)
        ctx.save_for_backward(qkv, o, lse)
        ctx.scale = scale
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_o):
        return flash_packed_backward(*ctx.saved_tensors, grad_o, ctx.scale), None


def check_attention(q, k, v, causal):
    """ValueError unless these can be attended: one sentence with the shapes."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if (any(x.dim() != 4 for x in (q, k, v)) or k.shape != v.shape or q.shape[:2] != k.shape[:2]
            or q.size(3) != k.size(3)):
        raise ValueError(f"attention takes q (B, nh, Tq, hs) and k, v (B, nh, Tk, hs), not {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device or not q.is_floating_point():
        raise ValueError(f"attention takes q, k, v of one floating dtype on one device, not "
                         + ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v)))
    if causal and q.size(2) > k.size(2):
        raise ValueError(f"causal attention takes Tq <= Tk (the last query is the last key's token), not {shapes}")


def flash_attention(q, k, v, causal=True, scale=None, return_lse=False):
    """Exact attention without the (Tq, Tk) matrix. Dao 2023, 2307.08691.

    q (B, nh, Tq, hs), k and v (B, nh, Tk, hs), any strides, -> o (B, nh, Tq, hs) in their dtype; with return_lse also
    the log-sum-exp of the scaled scores, (B, nh, Tq) float32 or wider, in nats, whose gradient counts (see `merge`).
    causal: query i, the token at position Tk - Tq + i, sees keys 0 .. Tk - Tq + i. scale: default 1 / sqrt(hs). A query
    that sees no key (Tk = 0) gives 0 and -inf. The same input gives the same bits, forward and backward.

    Kernels take float32 (IEEE products), float16 and bfloat16 on CUDA, hs up to 256; anything else is computed by
    torch's operators. ValueError for shapes, dtypes and devices that don't go together, and for causal Tq > Tk.
    """
    check_attention(q, k, v, causal)
    scale = max(1, q.size(-1)) ** -0.5 if scale is None else float(scale)
    if scale <= 0:      # kernels, torch's too, scale after they took the maximum
        q, scale = (-q, -scale) if scale < 0 else (0 * q, 1.0)
    if attends(q) and k.numel():
        o, lse = FlashAttention.apply(q, k, v, causal, scale)
        return (o, lse / LOG2E) if return_lse else o
    if return_lse or k.size(2) == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        o, lse = attention_naive(q.to(wide), k.to(wide), v.to(wide), causal, scale)
        return (o.to(q.dtype), lse) if return_lse else o.to(q.dtype)
    return torch_attention(q, k, v, causal, scale)


def packed_flash_attention(qkv):
    """Causal flash_attention(q, k, v) of qkv (3, B, nh, T, hs), the three as one projection makes them. The gradient is
    one tensor too, which the projection's backward takes as it is: three would first be copied into one."""
    if qkv.dim() != 5 or qkv.size(0) != 3:
        raise ValueError(f"packed attention takes qkv (3, B, nh, T, hs), not {tuple(qkv.shape)}")
    if attends(qkv):
        return PackedFlashAttention.apply(qkv, qkv.size(-1) ** -0.5)
    return flash_attention(*qkv.unbind(0))


def torch_attention(q, k, v, causal=True, scale=None, dropout=0.0):
    """The same by PyTorch's scaled_dot_product_attention, which picks a fused kernel where it has one."""
    Tq, Tk = q.size(-2), k.size(-2)
    # its is_causal is aligned top-left, which is ours only for Tq = Tk; one query alone sees everything
    mask = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device).tril(Tk - Tq) if causal and 1 < Tq < Tk else None
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal and 1 < Tq == Tk, scale=scale)


# --------------------------------------------------------------------------------------------------------------
# 5. The loss
#
# The logits of a small GPT are its largest tensor by far: 6.6 GB in float32 for 32 x 1024 tokens of GPT-2.
# Cross-entropy is a softmax over them, so the same trick serves: with p = softmax(z),
#
#     loss = log sum exp z - z[target]           d loss / dz = p - onehot(target)
#
# one online pass finds the log-sum-exp and another writes the gradient over the logits. They live one chunk of rows
# at a time, in the model's dtype, and both products of backward are taken while the chunk is there.

def softmax_stats_naive(logits, targets, vocab_size):
    """Of logits (n, V padded), their columns from vocab_size on padding: log-sum-exp (n,) and logit of the target (n,),
    both at least float32. For targets (n,) int64 that logit is 0 where negative, NaN from vocab_size on."""
    z = logits[:, :vocab_size].to(torch.promote_types(logits.dtype, torch.float32))          # (n, V)
    column = F.pad(z, (0, 1)).gather(1, targets.clamp(0, vocab_size)[:, None])[:, 0]         # (n,)
    return z.logsumexp(1), column.masked_fill(targets < 0, 0.0).masked_fill(targets >= vocab_size, math.nan)


def softmax_grad_naive(logits, targets, vocab_size, lse):
    """Replaces the logits by exp(z - lse) - onehot(target), 0 in the padding: the gradient of lse - z[target]."""
    z = logits.to(lse.dtype)                                                 # (n, V padded)
    p = (z - lse[:, None]).exp()
    p[:, vocab_size:] = 0
    there = (targets >= 0) & (targets < logits.size(1))
    p[torch.arange(len(targets), device=p.device), targets * there] -= there.to(p.dtype)      # before p is rounded
    logits.copy_(p)


@jit
def softmax_grad_kernel(z_ptr, target_ptr, lse_ptr, z_target_ptr, V, width, STATS: tl.constexpr, GRAD: tl.constexpr,
                        BLOCK: tl.constexpr):
    """One row of `width` logits a program, V of them real; softmax_stats_naive, softmax_grad_naive, or one after the
    other, where a negative target makes the whole gradient 0. Lanes as in softmax_online_kernel, in base 2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row, cols = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    z_ptr += row * width
    target = tl.load(target_ptr + row)
    if STATS:
        there = (target >= 0) & (target < V)
        z_target = tl.load(z_ptr + target, mask=there, other=0.0).to(tl.float32)      # before anything is replaced
        tl.store(z_target_ptr + row, tl.where(target < V, z_target, float("nan")))
        m, l = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
        for i in range(0, V, BLOCK):
            z = tl.load(z_ptr + i + cols, mask=i + cols < V, other=float("-inf")).to(tl.float32) * LOG2E
            m_new = tl.maximum(m, z)
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp2(m - safe) + tl.exp2(z - safe)
            m = m_new
        top = tl.max(m, 0)
        lse = top + tl.log2(tl.sum(l * tl.exp2(m - tl.where(top == float("-inf"), 0.0, top)), 0))
        tl.store(lse_ptr + row, lse / LOG2E)
        lse = tl.where(target >= 0, lse, float("inf"))                       # exp2(z - inf) = 0: no gradient
    else:
        lse = tl.load(lse_ptr + row) * LOG2E
    if GRAD:
        for i in range(0, width, BLOCK):
            z = tl.load(z_ptr + i + cols, mask=i + cols < V, other=float("-inf")).to(tl.float32) * LOG2E
            p = tl.exp2(z - lse)                                             # 0 in the padding
            p = tl.where(i + cols == target, p - 1.0, p)
            tl.store(z_ptr + i + cols, p.to(z_ptr.dtype.element_ty), mask=i + cols < width)


def launch_softmax(logits, targets, vocab_size, lse, z_target, stats, grad):
    with torch.cuda.device_of(logits):
        softmax_grad_kernel[(logits.size(0),)](logits, targets, lse, z_target, vocab_size, logits.size(1), stats, grad,
                                               BLOCK=4096, num_warps=16)


def softmax_stats(logits, targets, vocab_size):
    """softmax_stats_naive, by the kernel where there is one. Like the two below: logits and targets contiguous."""
    if not has_kernels(logits):
        return softmax_stats_naive(logits, targets, vocab_size)
    lse, z_target = logits.new_empty(2, logits.size(0), dtype=torch.float32)
    launch_softmax(logits, targets, vocab_size, lse, z_target, True, False)
    return lse, z_target


def softmax_grad(logits, targets, vocab_size, lse):
    """softmax_grad_naive, by the kernel where there is one."""
    if not has_kernels(logits):
        return softmax_grad_naive(logits, targets, vocab_size, lse)
    launch_softmax(logits, targets, vocab_size, lse, lse, False, True)


def softmax_loss(logits, targets, vocab_size):
    """Cross-entropy of each row, (n,); the logits are replaced by its gradient. A row whose target is negative counts
    for nothing. Both of the above; with the kernel in one go, while the row is in the cache."""
    if has_kernels(logits):
        lse, z_target = logits.new_empty(2, logits.size(0), dtype=torch.float32)
        launch_softmax(logits, targets, vocab_size, lse, z_target, True, True)
    else:
        lse, z_target = softmax_stats_naive(logits, targets, vocab_size)
        softmax_grad_naive(logits, targets, vocab_size, lse.masked_fill(targets < 0, math.inf))
    return (lse - z_target).masked_fill(targets < 0, 0.0)


class LinearCrossEntropy(torch.autograd.Function):
    """forward: x (N, C), w (V padded, C), targets (N,) -> summed loss, float32 / backward: gradients of x and w.

    The gradients are computed in forward, while each chunk of logits exists; backward only multiplies them by the
    incoming scalar. So no product is computed twice."""

    chunk_bytes = 2 ** 30    # of logits alive at once

    @staticmethod
    def chunk_rows(w):
        """Rows of x at a time: a power of two, so that chunks are aligned."""
        return 2 ** (max(1, LinearCrossEntropy.chunk_bytes // (w.size(0) * w.element_size())).bit_length() - 1)

    @staticmethod
    def forward(ctx, x, w, targets, vocab_size, with_grad):
        rows, wide = LinearCrossEntropy.chunk_rows(w), torch.promote_types(x.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=x.device)
        dx = torch.empty_like(x) if with_grad else None                      # (N, C)
        dw = torch.zeros_like(w, dtype=wide) if with_grad else None          # (V, C), summed over chunks in float32
        for i in range(0, x.size(0), rows):
            chunk = x[i:i + rows]                                            # (n, C)
            logits = chunk @ w.t()                                           # (n, C) @ (C, V) -> (n, V)
            loss += softmax_loss(logits, targets[i:i + rows], vocab_size).sum()
            if with_grad:
                torch.mm(logits, w, out=dx[i:i + rows])                      # now a gradient: (n, V) @ (V, C) -> (n, C)
                dw += logits.t() @ chunk                                     # (V, n) @ (n, C) -> (V, C)
        if with_grad:
            ctx.save_for_backward(dx, dw.to(w.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        dx, dw = ctx.saved_tensors
        return dx * grad_loss, dw * grad_loss, None, None, None              # a scalar doesn't change their dtypes


def linear_cross_entropy(x, w, targets, vocab_size):
    """Summed cross-entropy, in nats, of the logits x @ w.T, which never exist whole.

    x (N, C); w (V padded, C), whose rows from vocab_size on are padding and get no probability; targets (N,) int64,
    negative where a row doesn't count. -> float32 scalar (float64 for float64). ValueError for shapes and dtypes that
    don't go together; a target of vocab_size or more gives NaN."""
    if x.dim() != 2 or w.dim() != 2 or x.size(1) != w.size(1) or targets.shape != x.shape[:1] or x.dtype != w.dtype:
        raise ValueError(f"the loss takes x (N, C), w (V, C) of one dtype and targets (N,), not {x.dtype} "
                         f"{tuple(x.shape)}, {w.dtype} {tuple(w.shape)} and {tuple(targets.shape)}")
    if not 0 < vocab_size <= w.size(0):
        raise ValueError(f"vocab_size={vocab_size} must be between 1 and the {w.size(0)} rows of w")
    with_grad = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    with torch.autocast(x.device.type, enabled=False):
        return LinearCrossEntropy.apply(x, w, targets.contiguous(), vocab_size, with_grad)


# --------------------------------------------------------------------------------------------------------------
# The chapter's claims, predicted beside measured: python flash.py

SHAPES = [(16, 12, 1024, 64, True), (64, 12, 1024, 64, True), (4, 32, 4096, 64, True), (4, 16, 4096, 128, True),
          (2, 16, 16384, 128, True), (4, 32, 4096, 64, False), (4, 16, 4096, 128, False)]      # B, nh, T, hs, causal


def relative(a, b):
    """The error of a against b, in the Frobenius norm."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


def saved_bytes(f):
    """Bytes that autograd keeps for the backward of f(), each memory counted once."""
    kept = {}
    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        f()
    return sum(kept.values())


def peak_bytes(f):
    """Bytes of GPU memory that f() needs beyond what is there already."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def race(contestants, rounds=5, repeats=8):
    """{name: f} -> {name: milliseconds on the GPU}, the median over several rounds in which all take turns, each time
    with a cold L2 cache. The queue is filled while the GPU sleeps, so that no kernel waits for the host."""
    flush = torch.empty(2 ** 28, dtype=torch.int8, device="cuda")
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, f in contestants.items():
            f()
            events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
            torch.cuda._sleep(8_000_000)                                     # clock cycles, some 5 ms
            for start, end in events:
                flush.zero_()
                start.record()
                f()
                end.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end) for start, end in events]
    return {name: float(np.median(t)) for name, t in times.items()}


def attention_race(B, nh, T, hs, causal):
    """TFLOP/s forward and backward of ours and of torch's two kernels, on bfloat16: {name: (forward, backward)}."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    q, k, v = (torch.randn(B, nh, T, hs, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    do = torch.randn_like(q)
    flops = 4 * B * nh * T * T * hs / (2 if causal else 1)

    def peer(backend):
        def run():
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return run
    forward = {"ours": lambda: flash_attention(q, k, v, causal), "FA2": peer(SDPBackend.FLASH_ATTENTION),
               "cuDNN": peer(SDPBackend.CUDNN_ATTENTION)}
    outputs = {name: f() for name, f in forward.items()}
    backward = {name: lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
                for name, o in outputs.items()}
    answers = {name: (outputs[name], *backward[name]()) for name in ("ours", "FA2")}
    worst = max(relative(a, b) for a, b in zip(answers["ours"], answers["FA2"]))
    assert worst < 2e-2, f"the answers differ by {worst}"                    # what is timed is right
    with torch.no_grad():
        there = race(forward)
    back = race(backward)
    return {name: (flops / there[name] / 1e9, 2.5 * flops / back[name] / 1e9) for name in forward}


def show_tiling():
    print("1  tiling: numbers read for a product (128, 96) @ (96, 64)")
    a, b = np.random.randn(128, 96), np.random.randn(96, 64)
    for block in (1, 8, 32):
        c, read = matmul_tiled(a, b, block)
        print(f"   block {block:3}: predicted 2 M N K / b = {2 * 128 * 64 * 96 // block:9,}, measured {read:9,}, "
              f"error {abs(c - a @ b).max():.0e}")


def show_softmax(gpu, rows):
    print("2  online softmax: 2 readings of the row and a writing instead of 3 and 1, so predicted 1.33 times as fast "
          "where memory is all")
    for n in rows:
        if gpu:
            x = torch.randn(2 ** 28 // n, n, device="cuda")
            t = race({"safe": lambda: softmax_rows(x, online=False), "online": lambda: softmax_rows(x)})
            print(f"   rows of {n:6}: measured {t['safe'] / t['online']:.2f}, "
                  f"{12 * x.numel() / t['online'] / 1e6:,.0f} GB/s")
        else:
            x = np.random.randn(n)
            print(f"   a row of {n:6}: error {abs(softmax_online(x) - softmax_safe(x)).max():.0e}")


def show_recomputation(device):
    print("3  recomputation: bytes that an MLP with N, C, H = 512, 256, 1024 keeps for backward")
    x, w1, w2 = (torch.randn(*s, device=device, requires_grad=True) for s in ((512, 256), (1024, 256), (256, 1024)))
    kept = saved_bytes(lambda: F.gelu(x @ w1.t()) @ w2.t()) - saved_bytes(lambda: RecomputedMLP.apply(x, w1, w2))
    print(f"   predicted 2 N H numbers less = {2 * 512 * 1024 * 4:,} bytes, measured {kept:,}")


def show_attention(gpu, lengths, shapes):
    print("4  attention: memory of forward against T" if gpu else "4  attention: tiled, in NumPy")
    for T in lengths:
        if gpu:
            q = torch.randn(1, 8, T, 64, device="cuda", dtype=torch.bfloat16)
            naive, ours = peak_bytes(lambda: attention_naive(q, q, q)), peak_bytes(lambda: flash_attention(q, q, q))
            print(f"   T {T:5}: naive {naive / 2 ** 20:8,.0f} MiB = {naive / T ** 2:.0f} bytes a T^2, flash "
                  f"{ours / 2 ** 20:5.1f} MiB = {ours / T:,.0f} bytes a T, predicted 8 heads x (64 x 2 + 4) = 1,056")
        else:
            q = torch.randn(1, 1, T, 64, dtype=torch.float64)
            o, _ = attention_tiled(*[q[0, 0].numpy()] * 3, block=64)
            print(f"   T {T:5}: error {abs(o - attention_naive(q, q, q)[0][0, 0].numpy()).max():.0e}")
    if gpu:
        print(f"   {'TFLOP/s, bfloat16':34} forward: ours   FA2 cuDNN   ratios     backward: ours   FA2 cuDNN   ratios")
        for shape in shapes:
            r = attention_race(*shape)
            ours, fa2, cudnn = r["ours"], r["FA2"], r["cuDNN"]
            cells = [f"{ours[i]:12.0f} {fa2[i]:5.0f} {cudnn[i]:5.0f}   {ours[i] / fa2[i]:.2f} {ours[i] / cudnn[i]:.2f}"
                     for i in (0, 1)]
            print(f"   {str(shape[:4]):22} {'causal' if shape[4] else 'full':7} {cells[0]}    {cells[1]}")


def show_loss(gpu, tokens):
    V, width, N, C = (50257, 50304, tokens, 768) if gpu else (257, 320, 64, 32)
    print(f"5  loss: {N} tokens, {V} ids")
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float64)
    x, w = (torch.randn(n, C, device=device, dtype=dtype).requires_grad_() for n in (N, width))
    targets = torch.randint(0, V, (N,), device=device)

    def whole():
        logits = (x @ w.t())[:, :V].to(torch.promote_types(dtype, torch.float32))
        return F.cross_entropy(logits, targets, reduction="sum")

    def chunked():
        return linear_cross_entropy(x, w, targets, V)
    if gpu:
        t = race({"whole": lambda: whole().backward(), "chunked": lambda: chunked().backward()})
        print(f"   whole {peak_bytes(lambda: whole().backward()) / 2 ** 30:.1f} GiB, {t['whole']:.1f} ms; in chunks "
              f"{peak_bytes(lambda: chunked().backward()) / 2 ** 30:.1f} GiB, {t['chunked']:.1f} ms")
    print(f"   difference {relative(chunked().detach(), whole().detach()):.0e}")


def chapter(shapes=SHAPES, lengths=(1024, 2048, 4096), rows=(8192, 16384, 32768, 65536), tokens=32768):
    """Prints the tables: times and memory on a GPU, exactness on a CPU."""
    gpu = triton is not None and torch.cuda.is_available()
    print(f"on {torch.cuda.get_device_name()}" if gpu else "on a CPU: exactness, no times")
    show_tiling()
    show_softmax(gpu, rows)
    show_recomputation("cuda" if gpu else "cpu")
    show_attention(gpu, lengths, shapes)
    show_loss(gpu, tokens)


def main(argv=None):
    from model import Options
    Options(prog="flash.py", description=__doc__.split("\n\n")[0]).parse(argv)
    chapter()


if __name__ == "__main__":
    sys.modules["flash"] = sys.modules[__name__]      # which model.py imports
    from model import program
    sys.exit(program("flash.py", main))
