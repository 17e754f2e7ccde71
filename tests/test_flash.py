"""flash.py: every step against its definition in float64. Kernels run on the GPU if there is one, else interpreted."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE

import flash
from flash import (LinearCrossEntropy, RecomputedMLP, attention_naive, attention_tiled, flash_attention, launch_backward,
                   launch_forward, linear_cross_entropy, matmul_tiled, merge, packed_flash_attention, softmax_grad,
                   softmax_loss, softmax_online, softmax_rows, softmax_safe, softmax_stats,
                   torch_attention)
from parallel import Prefix

ROOT = Path(__file__).parent.parent
CUDA = DEVICE == "cuda"
needs_triton = pytest.mark.skipif(flash.triton is None, reason="no Triton with tensor descriptors here")
on_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * CUDA      # the interpreter's bfloat16 product is wrong
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(flash, "INTERPRETED", not CUDA)
    if not CUDA:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def error(a, b, least=1e-30):
    """Relative, in the Frobenius norm, against `least` if b is smaller; NaN never passes."""
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm().clamp(min=least)).item() if b.numel() else 0.0


def tensors(B, nh, Tq, Tk, hs, dtype):
    q, k, v, do = (torch.randn(B, nh, T, hs, device=DEVICE).to(dtype) for T in (Tq, Tk, Tk, Tq))
    return [x.requires_grad_() for x in (q, k, v)], do


def exact(qkv, do, causal, scale=None):
    """o, lse and the three gradients in float64, by the definition."""
    leaves = [x.detach().double().requires_grad_() for x in qkv]
    o, lse = attention_naive(*leaves, causal, scale)
    return o.detach(), lse.detach(), torch.autograd.grad(o, leaves, do.double())


def check(qkv, do, causal=True, scale=None, slack=1):
    """flash_attention and its gradients against `exact`; on a GPU also against twice the error of torch's SDPA."""
    dtype = qkv[0].dtype
    want, lse_want, grads_want = exact(qkv, do, causal, scale)
    o, lse = flash_attention(*qkv, causal, scale, return_lse=True)
    grads = torch.autograd.grad(o, qkv, do)
    assert o.dtype == dtype and lse.dtype == torch.float32 and (lse - lse_want).abs().max() < 1e-3
    # with few keys dq and dk cancel to little (with one, to nothing): there the error is measured against do
    least = do.double().norm().item() if qkv[1].size(2) < 16 else 1e-30
    errors = [error(a, b, least) for a, b in zip((o, *grads), (want, *grads_want))]
    limits = [slack * TOLERANCE[dtype]] * 4
    if CUDA and dtype != torch.float32 and do.numel() > 10_000:      # of few numbers the errors differ by chance
        o_torch = torch_attention(*qkv, causal, scale)
        theirs = (o_torch, *torch.autograd.grad(o_torch, qkv, do))
        limits = [min(limit, 2 * error(a, b, least) + 1e-5) for limit, a, b in zip(limits, theirs, (want, *grads_want))]
    for name, got, limit in zip(("o", "dq", "dk", "dv"), errors, limits):
        assert got < limit, (name, got, limit)


# ---- 1, 2, 3: tiling, softmax, recomputation --------------------------------------------------------------------

@pytest.mark.parametrize("M,N,K,block", [(12, 8, 16, 4), (13, 7, 5, 4), (3, 3, 3, 8)])
def test_tiled_matmul(M, N, K, block):
    a, b = np.random.randn(M, K), np.random.randn(K, N)
    c, read = matmul_tiled(a, b, block)
    assert abs(c - a @ b).max() < 1e-12
    assert read == M * K * math.ceil(N / block) + K * N * math.ceil(M / block)


@pytest.mark.parametrize("n", [1, 2, 33])
def test_softmax_in_two_passes_and_in_three(n):
    x = np.random.randn(n) * 100
    want = torch.from_numpy(x).softmax(0).numpy()
    assert abs(softmax_safe(x) - want).max() < 1e-14 and abs(softmax_online(x) - want).max() < 1e-14


@needs_triton
@pytest.mark.parametrize("n", [1, 31, 1024, 2500])
def test_softmax_kernels(n):
    x = torch.randn(3, n, device=DEVICE) * 30
    for online in (False, True):
        assert (softmax_rows(x, online) - x.double().softmax(1)).abs().max() < 1e-6


def test_merge_of_parts_is_the_whole():
    (q, k, v), _ = tensors(2, 3, 5, 12, 4, torch.float64)
    want, lse_want = attention_naive(q, k, v, causal=False)
    parts = [attention_naive(q, k[:, :, a:b], v[:, :, a:b], causal=False) for a, b in ((0, 5), (5, 5), (5, 12))]
    o, lse = merge(*merge(*parts[0], *parts[1]), *parts[2])
    assert (o - want).abs().max() < 1e-12 and (lse - lse_want).abs().max() < 1e-12
    o, lse = merge(*parts[1], *parts[1])                                     # nothing and nothing
    assert o.abs().max() == 0 and (lse == -math.inf).all()


def test_recomputed_mlp():
    x, w1, w2 = (torch.randn(*s, device=DEVICE, dtype=torch.float64, requires_grad=True) for s in ((7, 3), (12, 3), (3, 12)))
    want = F.gelu(x @ w1.t()) @ w2.t()
    got, dy = RecomputedMLP.apply(x, w1, w2), torch.randn_like(want)
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, (x, w1, w2), dy), torch.autograd.grad(want, (x, w1, w2), dy)):
        assert (a - b).abs().max() < 1e-12


# ---- 4: attention -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("Tq,Tk", [(1, 1), (7, 7), (1, 9), (3, 8), (33, 33), (17, 65)])
def test_the_definition_itself(Tq, Tk):
    """A query at a time: query i sees keys 0 .. Tk - Tq + i."""
    (q, k, v), do = tensors(2, 3, Tq, Tk, 5, torch.float64)
    rows = []
    for i in range(Tq):
        seen = Tk - Tq + i + 1
        weights = (q[:, :, i:i + 1] @ k[:, :, :seen].transpose(-2, -1) / math.sqrt(5)).softmax(-1)
        rows.append(weights @ v[:, :, :seen])
    want = torch.cat(rows, 2)
    grads = torch.autograd.grad(want, (q, k, v), do)
    for o in (attention_naive(q, k, v)[0], torch_attention(q, k, v), flash_attention(q, k, v)):      # float64: no kernel
        assert (o - want).abs().max() < 1e-12
        for a, b in zip(torch.autograd.grad(o, (q, k, v), do), grads):
            assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("Tq,Tk,block", [(1, 1, 4), (9, 9, 4), (5, 14, 4), (8, 8, 16)])
def test_tiled_attention_in_numpy(Tq, Tk, block, causal):
    (q, k, v), _ = tensors(1, 1, Tq, Tk, 6, torch.float64)
    want, lse_want = (x.detach().cpu().numpy()[0, 0] for x in attention_naive(q, k, v, causal))
    o, lse = attention_tiled(*(x.detach().cpu().numpy()[0, 0] for x in (q, k, v)), block, causal)
    assert abs(o - want).max() < 1e-12 and abs(lse - lse_want).max() < 1e-12


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 2, 7, 15, 16, 17, 63, 64, 65, 127, 129, 200])
def test_any_length(T, dtype):
    for B, nh, causal in ((1, 1, True), (3, 5, False)) if T < 100 or CUDA else ((1, 2, True), (2, 1, False)):
        check(*tensors(B, nh, T, T, 16, dtype), causal)


@needs_triton
@pytest.mark.parametrize("T", [1000, 1025])
def test_long(T):
    check(*tensors(1, 1, T, T, 16, torch.float32 if CUDA else torch.float16))


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hs", [1, 5, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 256])
def test_any_head_size(hs, dtype):
    check(*tensors(2, 3, 37, 70, hs, dtype))


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("Tq,Tk", [(1, 130), (3, 8), (64, 65), (65, 200), (100, 300)])
def test_queries_at_the_end_of_longer_keys(Tq, Tk, causal):
    check(*tensors(2, 2, Tq, Tk, 24, torch.float32), causal)


@needs_triton
def test_more_queries_than_keys_without_a_mask():
    check(*tensors(1, 2, 70, 33, 16, torch.float32), causal=False)


@needs_triton
@pytest.mark.parametrize("scale", [0.01, 3.0, -0.5, 0.0])
def test_any_scale(scale):
    T = 40 if scale else 15                                                  # without a scale dq and dk are exactly 0
    # a score of 50 is rounded by 2e-6 in float32 before exp sees it
    check(*tensors(1, 2, T, T, 16, torch.float32), scale=scale, slack=5)


@needs_triton
def test_packed_qkv_and_gradients_of_any_stride():
    B, T, nh, hs = 2, 33, 3, 16
    packed = torch.randn(B, T, 3, nh, hs, device=DEVICE, requires_grad=True)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)                        # as the model cuts them
    want_o = attention_naive(q, k, v)[0]
    w = torch.randn(nh * hs, 7, device=DEVICE)
    for use in (lambda o: (o.transpose(1, 2).reshape(B, T, nh * hs) @ w).square().sum(), lambda o: o.sum(),
                lambda o: o[:, :, ::2].sum(), lambda o: o.transpose(2, 3)[..., 3].sum(), lambda o: (o[0] * o[1]).sum()):
        want, = torch.autograd.grad(use(want_o), packed, retain_graph=True)
        got, = torch.autograd.grad(use(flash_attention(q, k, v)), packed)
        assert error(got, want) < 1e-5
    odd = torch.randn(2, 3, 33, 17, device=DEVICE)[..., 1:]                  # rows that start at no multiple of 16 bytes
    assert error(flash_attention(odd, odd, odd), attention_naive(odd, odd, odd)[0]) < 2e-6
    wide = torch.randn(2, 3, 16, 33, device=DEVICE).transpose(2, 3)          # the last stride isn't 1
    assert error(flash_attention(wide, wide, wide), attention_naive(wide, wide, wide)[0]) < 2e-6
    same = torch.randn(1, 1, 33, 16, device=DEVICE).expand(2, 3, 33, 16)     # strides of 0
    assert error(flash_attention(same, same, same), attention_naive(same, same, same)[0]) < 2e-6


@needs_triton
@pytest.mark.parametrize("B,nh,T,hs", [(2, 3, 33, 16), (1, 1, 1, 64), (1, 2, 70, 5)])
def test_the_packed_form(B, nh, T, hs):
    packed, do = torch.randn(B, T, 3, nh, hs, device=DEVICE, requires_grad=True), torch.randn(B, nh, T, hs, device=DEVICE)
    qkv = packed.permute(2, 0, 3, 1, 4)
    o, want = packed_flash_attention(qkv), flash_attention(*qkv)
    assert torch.equal(o, want)
    got, grad = torch.autograd.grad(o, packed, do)[0], torch.autograd.grad(want, packed, do)[0]
    assert torch.equal(got, grad) and got.is_contiguous()


@needs_triton
@pytest.mark.parametrize("causal", [True, False])
def test_memory_beside_the_tensors_stays_out(causal):
    T, inner = 50, []
    for _ in range(4):
        buffer = torch.full((2, 2, 90, 40), math.nan, device=DEVICE)
        buffer[:, :, 20:20 + T, 8:32] = torch.randn(2, 2, T, 24, device=DEVICE)
        inner.append(buffer[:, :, 20:20 + T, 8:32])
    q, k, v, do = inner
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    check(clean, do.clone(), causal)
    scale = 24 ** -0.5
    o, lse = launch_forward(q, k, v, causal, scale)
    want_o, want_lse = launch_forward(*(x.detach() for x in clean), causal, scale)
    assert torch.equal(o, want_o) and torch.equal(lse, want_lse)
    grads = launch_backward(q, k, v, o, lse, do, torch.zeros_like(lse), causal, scale)
    o = flash_attention(*clean, causal)
    for a, b in zip(grads, torch.autograd.grad(o, clean, do.clone())):
        assert torch.equal(a, b)


@needs_triton
@pytest.mark.parametrize("hs", [16, 20])
def test_slices_of_a_sequence(hs):
    """As TeraPipe has them: each slice's queries see all keys so far, gradients of keys come together in one tensor."""
    lengths, attend = (70, 1, 9, 40), Prefix("auto", (70, 1, 9, 40))
    qkv, do = (torch.randn(2, 120, n, hs, device=DEVICE) for n in (6, 2))                      # (B, T, 3 nh, hs)
    whole, parts = qkv.requires_grad_(), qkv.detach().clone().requires_grad_()
    o = flash_attention(*whole.view(2, 120, 3, 2, hs).permute(2, 0, 3, 1, 4).unbind(0))        # (B, nh, T, hs)
    o.backward(do.transpose(1, 2))
    outs = []
    for i, x in enumerate(parts.split(lengths, 1)):
        q, k, v = x.view(2, -1, 3, 2, hs).permute(2, 0, 3, 1, 4).unbind(0)
        outs.append(attend(i, 0, q, k, v))
    assert (torch.cat(outs, 2) - o).abs().max() < 1e-5
    for out, d in reversed(list(zip(outs, do.transpose(1, 2).split(lengths, 2)))):
        out.backward(d)
    assert (parts.grad - whole.grad).abs().max() < 1e-4


@needs_triton
def test_rows_that_see_nothing():
    """Only inside: queries before the first key give 0, -inf and no gradients, also merged with a part that does."""
    (q, k, v), do = tensors(2, 2, 40, 9, 16, torch.float32)
    q, k, v = (x.detach() for x in (q, k, v))
    o, lse = launch_forward(q, k, v, True, 0.25)
    grads = launch_backward(q, k, v, o, lse, do, torch.zeros_like(lse), True, 0.25)
    blind = 40 - 9
    assert o[:, :, :blind].abs().max() == 0 and (lse[:, :, :blind] == -math.inf).all()
    assert grads[0][:, :, :blind].abs().max() == 0 and all(g.isfinite().all() for g in grads)
    want, _, grads_want = exact((q[:, :, blind:], k, v), do[:, :, blind:], True, 0.25)
    assert error(o[:, :, blind:], want) < 2e-6
    for a, b in zip((grads[0][:, :, blind:], *grads[1:]), grads_want):
        assert error(a, b) < 2e-6
    empty = k[:, :, :0]
    o, lse = flash_attention(q, empty, empty, causal=False, return_lse=True)
    assert o.shape == q.shape and o.abs().max() == 0 and (lse == -math.inf).all()


@needs_triton
def test_scores_of_any_size():
    q, k, v = (torch.tensor(x, device=DEVICE).view(1, 1, 2, 1) for x in ([-2e7, 0.0], [1.0, 0.0], [1.0, 100.0]))
    assert flash_attention(q, k, v, scale=1.0)[0, 0, 0, 0] == 1.0            # no mask value beats a real score
    (q, k, v), do = tensors(1, 2, 70, 70, 16, torch.float16)
    q = (q * 300).detach().requires_grad_()                                  # scores far beyond 65504
    k = (k * 300).detach().requires_grad_()
    o = flash_attention(q, k, v, scale=1.0)
    assert error(o, attention_naive(q.double(), k.double(), v.double(), scale=1.0)[0]) < 2e-3
    assert all(g.isfinite().all() for g in torch.autograd.grad(o, (q, k, v), do))


@needs_triton
def test_merged_parts_have_the_gradients_of_the_whole():
    (q, k, v), do = tensors(2, 2, 33, 33, 16, torch.float32)
    want, lse_want = flash_attention(q, k, v, causal=False, return_lse=True)
    parts = [flash_attention(q, k[:, :, a:b], v[:, :, a:b], causal=False, return_lse=True) for a, b in ((0, 20), (20, 33))]
    o, lse = merge(*parts[0], *parts[1])
    assert error(o, want) < 2e-6 and error(lse, attention_naive(q, k, v, False)[1]) < 1e-6
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), do, retain_graph=True) for x in (o, want))):
        assert error(a, b) < 5e-6
    dlse = torch.randn_like(lse)                                             # the log-sum-exp alone
    exact_lse = attention_naive(q.double(), k.double(), v.double(), False)[1]
    for a, b, c in zip(*(torch.autograd.grad(x, (q, k), dlse.to(x.dtype)) for x in (lse, lse_want, exact_lse))):
        assert error(a, c) < 5e-6 and error(b, c) < 5e-6


@needs_triton
def test_the_same_bits_every_time():
    T, runs = (1025, 30) if CUDA else (70, 3)
    qkv, do = tensors(2, 3, T, T, 64, torch.float16)
    want = None
    for _ in range(runs):
        o = flash_attention(*qkv)
        got = (o, *torch.autograd.grad(o, qkv, do))
        want = want or got
        assert all(torch.equal(a, b) for a, b in zip(got, want))


@needs_triton
def test_it_compiles_without_a_graph_break():
    def f(q, k, v):
        return flash_attention(q * 2, k, v).sin()
    qkv, do = tensors(1, 2, 20, 20, 16, torch.float32)
    compiled = torch.compile(f, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(*qkv), qkv, do), torch.autograd.grad(f(*qkv), qkv, do)):
        assert error(a, b) < 1e-6


@on_gpu
@needs_triton
def test_more_than_two_to_the_31_elements():
    shape = (2200, 16, 512, 128)
    q, k, v, do = (torch.randn(shape, device=DEVICE, dtype=torch.float16) for _ in range(4))
    o, lse = launch_forward(q, k, v, True, 0.1)
    grads = launch_backward(q, k, v, o, lse, do, torch.zeros_like(lse), True, 0.1)
    last = [x[-1:].clone() for x in (q, k, v, do)]
    o_last, lse_last = launch_forward(*last[:3], True, 0.1)
    grads_last = launch_backward(*last[:3], o_last, lse_last, last[3], torch.zeros_like(lse_last), True, 0.1)
    assert torch.equal(o[-1:], o_last) and all(torch.equal(a[-1:], b) for a, b in zip(grads, grads_last))


def test_what_cannot_work_is_said():
    x = torch.randn(2, 3, 5, 8, device=DEVICE)
    for q, k, v, words in ((x, x[:, :2], x[:, :2], "nh"), (x, x, x[:, :, :4], "Tk"), (x[0], x[0], x[0], "B, nh"),
                           (x, x.half(), x.half(), "float16"), (x.long(), x.long(), x.long(), "int64"),
                           (x, x[:, :, :3], x[:, :, :3], "Tq <= Tk")):
        with pytest.raises(ValueError, match=words):
            flash_attention(q, k, v)


# ---- 5: the loss ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=needs_triton) for dtype in DTYPES] + [torch.float64])
@pytest.mark.parametrize("n,V,width", [(1, 1, 64), (9, 65, 128), (5, 50257, 50304), (7, 4096, 4096), (3, 4097, 4160)])
def test_softmax_loss(n, V, width, dtype):
    """Against torch's cross-entropy; and its parts, those of two ranks each with half of the columns, merged."""
    logits = (torch.randn(n, width, device=DEVICE) * 3).to(dtype)
    targets = torch.randint(0, V, (n,), device=DEVICE)
    targets[n // 2] = -1
    z = logits[:, :V].double().requires_grad_()
    loss_want = F.cross_entropy(z, targets, ignore_index=-1, reduction="none")
    loss_want.sum().backward()
    want = F.pad(z.grad, (0, width - V))
    half = width // 2
    parts = [(part.contiguous(), torch.where((targets >= at) & (targets < at + half), targets - at, -1),
              min(max(V - at, 0), half)) for part, at in ((logits[:, :half], 0), (logits[:, half:], half))]
    stats = [softmax_stats(*part) for part in parts]
    lse = torch.stack([lse for lse, _ in stats]).logsumexp(0)
    merged = (lse - sum(z for _, z in stats)).masked_fill(targets < 0, 0.0)
    for part in parts:
        softmax_grad(*part, lse.masked_fill(targets < 0, math.inf))
    loss = softmax_loss(logits, targets, V)
    error = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}[dtype]
    for found, grad in ((loss, logits), (merged, torch.cat([part[0] for part in parts], 1))):
        assert (found - loss_want).abs().max() < (1e-12 if dtype == torch.float64 else 1e-5)
        assert (grad.double() - want).abs().max() < error
        assert grad[n // 2].abs().max() == 0 and (V == width or grad[:, V:].abs().max() == 0)


def test_a_confident_prediction_keeps_its_small_gradient():
    """p = 0.9995 is 1 in bfloat16, but p - 1 is not 0."""
    logits = torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE)
    logits[0, 3] = 11.75
    softmax_loss(logits, torch.tensor([3], device=DEVICE), 64)
    p = 1 / (1 + 63 * math.exp(-11.75))
    assert abs(logits[0, 3].item() / (p - 1) - 1) < 0.01


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("rows", [1, 3, 8, 1000])
def test_linear_cross_entropy(monkeypatch, rows, dtype, tolerance):
    monkeypatch.setattr(LinearCrossEntropy, "chunk_bytes", rows * 128 * dtype.itemsize)
    x, w = (torch.randn(n, 24, dtype=dtype, device=DEVICE, requires_grad=True) for n in (19, 128))
    targets = torch.randint(0, 65, (19,), device=DEVICE)
    targets[4] = -1
    want = F.cross_entropy((x.double() @ w.double().t())[:, :65], targets, ignore_index=-1, reduction="sum")
    loss = linear_cross_entropy(x, w, targets, 65)
    assert error(loss, want) < tolerance
    for a, b in zip(torch.autograd.grad(3 * loss, (x, w)), torch.autograd.grad(3 * want, (x, w))):
        assert error(a, b) < tolerance
    with torch.no_grad():
        assert error(linear_cross_entropy(x, w, targets, 65), want) < tolerance


@pytest.mark.parametrize("kernel", [False, pytest.param(True, marks=needs_triton)])
def test_the_loss_takes_any_targets(monkeypatch, kernel):
    monkeypatch.setattr(flash, "INTERPRETED", kernel and not CUDA)
    x, w = torch.randn(5, 4, device=DEVICE), torch.randn(16, 4, device=DEVICE)
    y = torch.randint(0, 7, (5, 3), device=DEVICE)
    for targets in (y[:, 0], y[:1, 0].expand(5)):                            # not contiguous
        assert error(linear_cross_entropy(x, w, targets, 7), F.cross_entropy(x @ w[:7].t(), targets, reduction="sum")) < 1e-5
    for bad in (7, 10, 16, 1000):                                            # padding, and beyond
        assert linear_cross_entropy(x, w, torch.full((5,), bad, device=DEVICE), 7).isnan()
    broken = x.clone()
    broken[1] = math.nan                                                     # a row that counts for nothing
    targets = torch.tensor([0, -1, 2, 3, 4], device=DEVICE)
    assert error(linear_cross_entropy(broken, w, targets, 7), linear_cross_entropy(x, w, targets, 7)) < 1e-6
    for x_, w_, t_, V in ((x, w, y, 7), (x, w, y[:3, 0], 7), (x, w[:, :3], y[:, 0], 7), (x.half(), w, y[:, 0], 7),
                          (x, w, y[:, 0], 17), (x, w, y[:, 0], 0), (x[None], w, y[:, 0], 7)):
        with pytest.raises(ValueError, match="the loss takes|vocab_size"):
            linear_cross_entropy(x_, w_, t_, V)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert linear_cross_entropy(x, w.requires_grad_(), targets, 7).dtype == torch.float32


def test_a_second_derivative_is_refused():
    x = torch.randn(2, 1, 9, 4, device=DEVICE, requires_grad=True)
    grad, = torch.autograd.grad(linear_cross_entropy(x[0, 0], x[1, 0], torch.zeros(9, dtype=torch.int64, device=DEVICE), 9)
                                .square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale_without_kernels(monkeypatch, scale):
    monkeypatch.setattr(flash, "INTERPRETED", False)
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64, device=DEVICE) for _ in range(3))
    assert error(flash_attention(q, k, v, scale=scale), attention_naive(q, k, v, scale=scale)[0]) < 1e-12
    half = (torch.randn(1, 1, 9, 300, device=DEVICE) * 60).half()                # no kernel is so wide
    o, lse = flash_attention(half, half, half, return_lse=True)
    want = attention_naive(half.double(), half.double(), half.double())
    assert error(o, want[0]) < 2e-3 and error(lse, want[1]) < 1e-5


def test_numpy_versions_at_their_edges():
    assert abs(softmax_online(np.array([-np.inf, 1.0, 2.0])) - softmax_safe(np.array([-np.inf, 1.0, 2.0]))).max() < 1e-15
    q, k = np.random.randn(7, 4), np.random.randn(3, 4)
    o, lse = attention_tiled(q, k, k, 2)                                     # queries before the first key
    assert abs(o[:4]).max() == 0 and (lse[:4] == -np.inf).all() and np.isfinite(o).all()


def test_the_chapter_runs(capsys, monkeypatch):
    monkeypatch.setattr(flash, "INTERPRETED", False)
    flash.chapter(shapes=[(1, 2, 256, 64, True)], lengths=(128, 256), rows=(1024,), tokens=64)
    page = capsys.readouterr().out
    for words in ("tiling", "online softmax", "recomputation", "attention", "loss"):
        assert words in page


def test_everything_but_the_kernels_works_without_triton():
    code = ("import sys; sys.modules['triton'] = None; import torch, flash, model, paged, train, sample\n"
            "q = torch.randn(1, 2, 9, 4); o, lse = flash.flash_attention(q, q, q, return_lse=True)\n"
            "assert (flash.flash_attention(q, q, q) - flash.attention_naive(q, q, q)[0]).abs().max() < 1e-5\n"
            "assert flash.linear_cross_entropy(q[0, 0], q[0, 1], torch.zeros(9, dtype=torch.int64), 9) > 0")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_chapter_is_a_program():
    done = subprocess.run([sys.executable, "flash.py", "--fast"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == "flash.py: there is no option --fast; see --help\n" and not done.stdout
