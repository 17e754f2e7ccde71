"""The model: GPT-2, written so that every later chapter can use it unchanged.

What it teaches: a decoder-only transformer is an embedding, L identical blocks and a head, and a block is two
residual branches, one that mixes tokens (attention) and one that mixes channels (the MLP):

    x = wte[idx] + wpe[pos]                        (B, T, C)
    x = x + attention(layer_norm(x))               L times
    x = x + mlp(layer_norm(x))
    logits = layer_norm(x) @ wte.T                 (B, T, V)

The one seam. A block computes queries, keys and values and asks a function for the answer:

    attend(layer, q, k, v) -> o                    q, k, v, o: (B, nh, T, hs)

Without one it's causal attention among the tokens at hand. A paged cache or a token slice of a pipeline passes its own
`attend`; the model knows nothing of them.

With n_expert > 0 the MLP of a block is a mixture of E experts: a router sends each token to one or two of them, so that
there are E times the weights at about the cost of one MLP (or two).

Letters: B batch, T tokens, C embedding, nh heads, hs = C / nh head size, V vocabulary, L layers, E experts.

Papers: GPT-2 (Radford et al. 2019); Attention Is All You Need (Vaswani et al. 2017, 1706.03762); layer norm
(Ba et al. 2016, 1607.06450); GELU (Hendrycks & Gimpel 2016, 1606.08415); tied embeddings (Press & Wolf 2016,
1608.05859); FLOPs per token (PaLM: Chowdhery et al. 2022, 2204.02311, appendix B); nucleus sampling
(Holtzman et al. 2019, 1904.09751); mixture of experts (GShard: Lepikhin et al. 2020, 2006.16668; Switch Transformer:
Fedus et al. 2021, 2101.03961).

    python train.py          trains one            python sample.py         writes with one
    GPT.from_pretrained("gpt2/")                   OpenAI's weights, from a folder in Hugging Face's layout

What it can't do: rotary positions, grouped-query attention, any other family's weights.
"""

import argparse
import codecs
import difflib
import hashlib
import importlib
import json
import math
import os
import pickle
import re
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from flash import attention_naive, linear_cross_entropy, packed_flash_attention, torch_attention


class UserError(ValueError):
    """A request that can't be met. The programs print it as one sentence and leave with exit code 2."""


# --------------------------------------------------------------------------------------------------------------
# The shape of a model

@dataclass(frozen=True)
class GPTConfig:
    """What fixes every shape and the function computed. Raises UserError on values that don't fit together."""

    vocab_size: int = 50257   # V, the ids that exist; the matrix is padded, see padded_vocab
    block_size: int = 1024    # the longest T: positions 0 .. block_size - 1
    n_layer: int = 12         # L
    n_head: int = 12          # nh
    n_embd: int = 768         # C
    dropout: float = 0.0      # on the embedding, the attention weights and both residual branches
    bias: bool = True         # of linear layers and layer norms
    n_expert: int = 0         # E, the MLPs among which a router chooses; 0: one dense MLP in every block
    top_k: int = 1            # experts a token is sent to: 1 as in Switch, 2 as in GShard
    capacity_factor: float = 1.25    # room for a sequence's tokens at an expert, in terms of an even share; in training
    aux_weight: float = 0.01  # of the loss that keeps the experts evenly used
    tied: bool = True         # the head's matrix is the embedding's; False: it has its own

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} can't be split over n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.n_expert < 0:
            raise UserError(f"n_expert={self.n_expert} must be 0 (no experts) or a positive number")
        if self.top_k not in (1, 2):
            raise UserError(f"top_k={self.top_k} must be 1 or 2 experts for each token")
        if 0 < self.n_expert < self.top_k:
            raise UserError(f"top_k={self.top_k} experts can't be chosen among n_expert={self.n_expert}")
        if not 0 < self.capacity_factor < math.inf:
            raise UserError(f"capacity_factor={self.capacity_factor} must be a positive number")
        if not 0 <= self.aux_weight < math.inf:
            raise UserError(f"aux_weight={self.aux_weight} must be 0 or a positive number")

    @property
    def padded_vocab(self):
        """Rows of the embedding: V rounded up to a multiple of 64, which matrix units need to run at full speed.
        The rows beyond V are zero, get no probability and no gradient, and are never sampled."""
        return -(-self.vocab_size // 64) * 64


def derive(seed, *key):
    """A 63-bit seed for one purpose, from the run's seed and what it is for, e.g. derive(1, "batch", 17).

    All randomness here goes through this: initial weights are a function of (seed, parameter name), batches and
    dropout of (seed, step). So nothing depends on what was drawn before, on how many processes there are, or on
    whether a run was interrupted, and no random state need be saved.
    """
    return int.from_bytes(hashlib.sha256(repr((seed, *key)).encode()).digest()[:8], "big") >> 1


# --------------------------------------------------------------------------------------------------------------
# Causal attention, three ways with the same numbers: qkv (3, B, nh, T, hs) -> (B, nh, T, hs)

def flash(qkv, dropout):
    """The kernels of flash.py, which have no dropout: with dropout, or where there are no kernels, torch's."""
    return torch_attention(*qkv.unbind(0), dropout=dropout) if dropout else packed_flash_attention(qkv)


ATTENTION = {"flash": flash,
             "torch": lambda qkv, dropout: torch_attention(*qkv.unbind(0), dropout=dropout),
             "naive": lambda qkv, dropout: attention_naive(*qkv.unbind(0), dropout=dropout)[0]}
ATTENTION["auto"] = flash


# --------------------------------------------------------------------------------------------------------------
# The model

class LayerNorm(nn.Module):
    """(..., C) -> (..., C): zero mean and unit variance over C, then a learned scale and, optionally, shift."""

    def __init__(self, C, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(C))
        self.bias = nn.Parameter(torch.empty(C)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Tokens look at earlier tokens. (B, T, C) -> (B, T, C); how they look is the caller's `attend`. Without one it's
    causal attention among the tokens at hand, by the function that `attention` names."""

    def __init__(self, config, layer, attention):
        super().__init__()
        C = config.n_embd
        self.layer, self.hs, self.dropout, self.causal = layer, C // config.n_head, config.dropout, ATTENTION[attention]
        self.qkv = nn.Linear(C, 3 * C, bias=config.bias)
        self.proj = nn.Linear(C, C, bias=config.bias)

    def forward(self, x, attend=None):
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, 3, -1, self.hs)                         # (B, T, 3C) -> (B, T, 3, nh, hs)
        qkv = qkv.permute(2, 0, 3, 1, 4)                                     # (3, B, nh, T, hs)
        if attend:
            o = attend(self.layer, *qkv.unbind(0))                           # (B, nh, T, hs)
        else:
            o = self.causal(qkv, self.dropout if self.training else 0.0)     # (B, nh, T, hs)
        o = o.transpose(1, 2).reshape(B, T, -1)                              # (B, T, nh, hs) -> (B, T, C)
        return F.dropout(self.proj(o), self.dropout, self.training)


def gelu(x):
    """GELU in its tanh form: x (1 + tanh u) / 2, u = sqrt(2 / pi) (x + 0.044715 x^3), which is also x sigmoid(2 u). The
    compiler makes one exponential of the latter, and of its tanh a path so long that memory waits for it."""
    if not (x.is_cuda and torch.compiler.is_compiling()):
        return F.gelu(x, approximate="tanh")
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return (z * torch.sigmoid(math.sqrt(8 / math.pi) * (z + 0.044715 * z ** 3))).to(x.dtype)


class MLP(nn.Module):
    """Each token alone, through a hidden layer four times as wide. (B, T, C) -> (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        self.dropout = config.dropout
        self.fc = nn.Linear(C, 4 * C, bias=config.bias)
        self.proj = nn.Linear(4 * C, C, bias=config.bias)

    def forward(self, x):
        h = gelu(self.fc(x))                                                 # (B, T, 4C)
        return F.dropout(self.proj(h), self.dropout, self.training)          # (B, T, C)


# --------------------------------------------------------------------------------------------------------------
# Mixture of experts: E MLPs in the place of one, and a router that sends each token to k of them (k = 1 or 2)
#
#     y[t] = sum over t's choices e of  gate[t, e] * expert_e(x[t])
#
# As a sum over experts with zeros in it that would cost E MLPs. Instead tokens are moved: every expert has a row of
# slots, each token is copied into a slot of every expert that it chose, one batched product runs all experts over their
# slots, and the answers are copied back. Here E = 3, T = 4, k = 1, two slots an expert, router's choices 2 0 2 2:
#
#     expert   0      1      2             owner   1 -   - -   0 2       which assignment fills the slot
#     slot     0 1    2 3    4 5           slot    4 0 5 none            which slot holds the assignment
#
# Token 3 came too late: expert 2 is full, and t = 3 goes on through the residual alone. Products need fixed shapes, so
# that slots are limited; a loss keeps the router from filling some experts and starving others. `slot` and `owner` are
# inverses, so that the gradient of either copy is the other copy.

def rows(x, index):
    """x (B, N, C), index (B, M) int64 in 0 .. N -> (B, M, C): x's rows of those numbers, zeros where the index is N."""
    x = F.pad(x, (0, 0, 0, 1))                                               # (B, N + 1, C)
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.size(-1)))       # (B, M, C)


class Move(torch.autograd.Function):
    """forward: rows(x, index), x (B, N, C), index (B, M) -> (B, M, C) / backward: the same by `back`, copies summed.

    back (B, r, N): entry j, n says to which of the M rows the j-th copy of row n went; M: to none. Autograd's own
    backward would be a scatter-add, whose atomics are slow in 16 bits and add in an order that isn't fixed."""

    @staticmethod
    def forward(ctx, x, index, back):
        ctx.save_for_backward(back)
        return rows(x, index)

    @staticmethod
    def backward(ctx, dy):
        back, = ctx.saved_tensors
        dx = rows(dy, back.flatten(1)).view(*back.shape, -1)                 # (B, r*N, C) -> (B, r, N, C)
        return dx.sum(1), None, None                                         # (B, N, C)


def place(choice, E, capacity):
    """Gives out the slots, in token order; all first choices come before any second one (GShard, algorithm 1).

    choice (B, k, T) int64: expert ids. An assignment has the number j * T + t: the j-th choice of token t. Returns
    slot (B, k*T) int64: where each assignment goes, expert * capacity + position; E * capacity: dropped, no room left
    owner (B, E*capacity) int64: the inverse, the assignment in each slot; k * T: empty
    load (B, E, k*T) int32: how many of the assignments up to this one want each expert, dropped ones too"""
    B, choice = choice.size(0), choice.flatten(1)                            # (B, k*T)
    n, ids = choice.size(1), torch.arange(E, device=choice.device)
    load = (choice.unsqueeze(1) == ids.view(E, 1)).cumsum(-1, dtype=torch.int32)           # (B, E, k*T)
    position = load.gather(1, choice.unsqueeze(1)).squeeze(1) - 1            # (B, k*T): earlier ones at the same expert
    slot = torch.where(position < capacity, choice * capacity + position, E * capacity)    # (B, k*T)
    owner = torch.full((B, E * capacity + 1), n, device=choice.device)       # one more slot takes all that is dropped
    owner = owner.scatter(1, slot, torch.arange(n, device=choice.device).expand(B, n))
    return slot, owner[:, :-1], load


class Experts(nn.Module):
    """E MLPs side by side, each on rows of its own: (G, E, n, C) -> (G, E, n, C) for G groups of n rows an expert.
    E is that of the weights: a process may hold some of the experts and get the rows of more groups for them. Or a part
    of each hidden layer: then f and g, applied before the first product and after the second, join the parts."""

    def __init__(self, config):
        super().__init__()
        E, C = config.n_expert, config.n_embd
        self.fc_weight = nn.Parameter(torch.empty(E, C, 4 * C))
        self.register_parameter("fc_bias", nn.Parameter(torch.empty(E, 4 * C)) if config.bias else None)
        self.proj_weight = nn.Parameter(torch.empty(E, 4 * C, C))
        self.register_parameter("proj_bias", nn.Parameter(torch.empty(E, C)) if config.bias else None)
        self.f = self.g = nn.Identity()

    def forward(self, x):
        G, _, n, C = x.shape
        E = self.fc_weight.size(0)
        x = self.f(x).transpose(0, 1).reshape(E, G * n, C)                           # (G, E, n, C) -> (E, G*n, C)
        h = torch.bmm(x, self.fc_weight)                                     # (E, G*n, C) @ (E, C, 4C) -> (E, G*n, 4C)
        if self.fc_bias is not None:
            h = h + self.fc_bias.unsqueeze(1)                                # (E, 1, 4C)
        y = self.g(torch.bmm(gelu(h), self.proj_weight))                     # (E, G*n, 4C) @ (E, 4C, C) -> (E, G*n, C)
        if self.proj_bias is not None:
            y = y + self.proj_bias.unsqueeze(1)                              # (E, 1, C)
        return y.view(E, G, n, C).transpose(0, 1)                            # (G, E, n, C)


def capacity(config, T):
    """Slots of an expert in training, of a sequence of T tokens."""
    return min(T, math.ceil(config.top_k * T / config.n_expert * config.capacity_factor))


class MoE(nn.Module):
    """Each token through the k of E experts that a router chooses for it. A group (GShard's word for the tokens that
    share the slots) is a sequence, so that the result doesn't depend on how a batch is split.

    x (B, T, C) -> y (B, T, C); aux (B,), float32 or wider: each sequence's balancing loss; counts (E + 1,) float32
    without gradient: the assignments that each expert kept, then the number dropped.

    In training an expert has `capacity` slots a sequence. In eval mode it has T, so that nothing is dropped and a
    token's output depends on that token alone, as decoding with a cache needs. With k = 2 training isn't strictly
    causal: a later token's first choice can take the slot of an earlier one's second."""

    def __init__(self, config):
        super().__init__()
        self.config, self.top_k, self.dropout = config, config.top_k, config.dropout
        self.router = nn.Linear(config.n_embd, config.n_expert, bias=False)
        self.experts = Experts(config)

    def route(self, x):
        """x (B, T, C) -> probs (B, T, E), gates (B, k, T), both float32 or wider (Switch, 2.4: in bfloat16 training is
        unstable), and choice (B, k, T) int64, the likeliest first and of equals the lowest id. k = 1: the gate is the
        probability itself, which is how the router learns (Switch); k = 2: the two add up to 1 (GShard, which sends a
        token to its second choice at random; here it always goes)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.router.weight.to(wide))           # (B, T, C) @ (C, E) -> (B, T, E)
        probs = logits.softmax(-1)
        left, choice = probs.detach(), []
        for _ in range(self.top_k):
            choice.append(left.argmax(-1, keepdim=True))                     # (B, T, 1); argmax is the first of equals
            left = left.scatter(-1, choice[-1], -1.0)
        choice = torch.cat(choice, -1)                                       # (B, T, k)
        gates = probs.gather(-1, choice)                                     # (B, T, k)
        if self.top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        return probs, gates.transpose(1, 2), choice.transpose(1, 2)          # (B, k, T) the last two

    def forward(self, x):
        B, T, C = x.shape
        E, k = self.router.out_features, self.top_k
        probs, gates, choice = self.route(x)                                 # (B, T, E), (B, k, T), (B, k, T)
        n = capacity(self.config, T) if self.training else T                 # slots of an expert
        slot, owner, load = place(choice, E, n)                              # (B, k*T), (B, E*n), (B, E, k*T)

        token = torch.where(owner < k * T, owner % T, T)                     # (B, E*n); T: an empty slot
        h = Move.apply(x, token, slot.view(B, k, T))                         # (B, T, C) -> (B, E*n, C)
        h = self.experts(h.view(B, E, n, C))                                 # (B, E, n, C)
        h = h.reshape(B, E * n, C)                                           # (B, E*n, C)
        y = Move.apply(h, slot, owner.unsqueeze(1))                          # (B, E*n, C) -> (B, k*T, C)
        y = (y.view(B, k, T, C) * gates.unsqueeze(-1)).sum(1).to(x.dtype)    # (B, k, T, C) * (B, k, T, 1) -> (B, T, C)

        share = load[:, :, T - 1].to(probs.dtype) / T                        # (B, E): f, of the first choices
        aux = E * (share * probs.mean(1)).sum(-1)                            # (B,): E sum_e f_e P_e, 1 when even
        kept = load[:, :, -1].clamp(max=n).sum(0)                            # (E,)
        counts = torch.cat([kept, B * k * T - kept.sum(0, keepdim=True)]).float()          # (E + 1,)
        return F.dropout(y, self.dropout, self.training), aux, counts


class Block(nn.Module):
    """Two residual branches, each behind its layer norm (pre-LN: the residual stream itself is never scaled).
    x (B, T, C) -> (B, T, C); with experts -> that, aux (B,) and counts (E + 1,), as MoE gives them."""

    def __init__(self, config, layer, attention):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, config.bias)
        self.attn = Attention(config, layer, attention)
        self.ln_2 = LayerNorm(config.n_embd, config.bias)
        self.mlp = MoE(config) if config.n_expert else MLP(config)

    def forward(self, x, attend=None):
        x = x + self.attn(self.ln_1(x), attend)                              # (B, T, C)
        y = self.mlp(self.ln_2(x))                                           # (B, T, C)
        if isinstance(y, tuple):                                             # y, aux, counts
            return x + y[0], *y[1:]
        return x + y


class GPT(nn.Module):
    """A GPT, or the pipeline stage of one that holds `layers` (a range; None means all of them).

    A stage has the positions `wpe` only if it holds layer 0 and the final norm `ln_f` only if it holds the last.
    The embedding `wte` is also the head's matrix if config.tied, so that first and last stage both have it, under one
    name; else the last has a `head`.
    Blocks are named by their number in the whole model: a parameter's name is the same on every stage.
    `seed` fixes the initial weights; None leaves them unset, for a caller that loads some. `attention`, a key of
    ATTENTION, is what computes it without an `attend`.

    With experts, a pass through the blocks leaves two attributes that hold until the next: `aux` (B,), the layers'
    balancing losses added up, for each sequence, with gradient; and `counts` (layers held, E + 1) float32, the
    assignments kept by each expert and the number dropped. Without experts both are None.
    """

    def __init__(self, config, layers=None, seed=0, attention="auto", device="cpu"):
        super().__init__()
        self.config = config
        self.layers = range(config.n_layer) if layers is None else layers
        self.first, self.last = 0 in self.layers, config.n_layer - 1 in self.layers
        self.aux = self.counts = None
        with torch.device("meta"):        # shapes only: reset() below gives the values
            if self.first or self.last and config.tied:
                self.wte = nn.Embedding(config.padded_vocab, config.n_embd)
            if self.first:
                self.wpe = nn.Embedding(config.block_size, config.n_embd)
            self.blocks = nn.ModuleDict({str(i): Block(config, i, attention) for i in self.layers})
            if self.last:
                self.ln_f = LayerNorm(config.n_embd, config.bias)
                if not config.tied:
                    self.head = nn.Linear(config.n_embd, config.padded_vocab, bias=False)
        self.cross_entropy = linear_cross_entropy
        if device != "meta":
            self.to_empty(device=device)
        if seed is not None:
            self.reset(seed)

    @torch.no_grad()
    def reset(self, seed):
        """The initial weights, each by `initial`."""
        for name, p in self.named_parameters():
            p.copy_(initial(self.config, name, p.shape, seed))

    @property
    def table(self):
        """The head's matrix, (V padded, C)."""
        return self.wte.weight if self.config.tied else self.head.weight

    def trunk(self, x, pos=None, attend=None):
        """Everything but the head. x: idx (B, T) int64 on the first stage, activations (B, T, C) on a later one.
        pos: (T,) or (B, T) int64, by default 0 .. T - 1. Returns (B, T, C), after ln_f if this is the last stage.
        Sets self.aux and self.counts."""
        if self.first:
            T = x.size(1)
            if pos is None:
                if T > self.config.block_size:
                    raise ValueError(f"T={T} tokens don't fit in block_size={self.config.block_size}")
                pos = torch.arange(T, device=x.device)                       # (T,)
            x = self.wte(x) + self.wpe(pos)                                  # (B, T, C)
            x = F.dropout(x, self.config.dropout, self.training)
        aux, counts = [], []
        for block in self.blocks.values():
            x = block(x, attend)                                             # (B, T, C)
            if self.config.n_expert:
                x, layer_aux, layer_counts = x
                aux.append(layer_aux)                                        # (B,)
                counts.append(layer_counts)                                  # (E + 1,)
        self.aux = torch.stack(aux).sum(0) if aux else None                  # (layers, B) -> (B,)
        self.counts = torch.stack(counts) if counts else None                # (layers, E + 1)
        return self.ln_f(x) if self.last else x

    def forward(self, x, pos=None, attend=None):
        """idx (B, T) int64 -> logits (B, T, V); a stage without the head returns its activations (B, T, C)."""
        x = self.trunk(x, pos, attend)
        return F.linear(x, self.table)[..., :self.config.vocab_size] if self.last else x

    def loss(self, x, targets, total=None, pos=None, attend=None):
        """Mean cross-entropy in nats, in training plus the experts' balancing loss; a float32 scalar (float64 for a
        float64 model).

        x as in forward; targets (B, T) int64, -1 where a token doesn't count. `total` is what the sum is divided
        by, by default the number of targets that count here. A caller that splits a batch passes the number in
        the whole batch to each part, and the parts add up to the mean, however unevenly they are filled.

        The balancing loss is aux_weight * sum_b aux_b valid_b / total: a sequence's counts by its share of the targets,
        valid_b, so that it too adds up however the batch is split. It's that of the layers held here alone, and not
        part of the loss in eval mode, which stays comparable with a dense model's.
        """
        x = self.trunk(x, pos, attend)                                       # (B, T, C)
        if total is None:
            total = (targets >= 0).sum().clamp(min=1)
        loss = self.cross_entropy(x.reshape(-1, x.size(-1)), self.table, targets.reshape(-1),
                                  self.config.vocab_size)                    # of (B*T, C) and (B*T,)
        balance = self.balance(targets)
        return (loss if balance is None else loss + balance) / total

    def balance(self, targets):
        """The balancing loss of the last pass before it's divided by the total: a scalar; None without experts, and in
        eval mode. targets (B, T) as in loss."""
        if not self.training or self.aux is None:
            return None
        return self.config.aux_weight * (self.aux * (targets >= 0).sum(1)).sum()

    def compile_blocks(self):
        """torch.compile for the blocks. A block is compiled and not the model: all of them run one graph, so that
        compiling takes as long for 48 layers as for one. Parameters keep their names."""
        for block in self.blocks.values():
            block.compile(dynamic=False)

    # ---- generation -----------------------------------------------------------------------------------------

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None):
        """idx (B, T) int64, T >= 1 -> (B, T + max_new_tokens): the plain oracle, a whole forward for each token.
        Options as in `distribution`; `generator` must live on idx's device. Past block_size as in `stream`."""
        return torch.cat([idx, *self.stream(idx, max_new_tokens, temperature, top_k, top_p, generator)], 1)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None):
        """The same as an iterator over the new tokens, each (B, 1) int64.

        A context longer than block_size starts again from its last block_size // 2 tokens, at position 0, and
        grows from there. (To slide by one token would move every position, and leave nothing for a cache to
        reuse.) A prompt longer than block_size keeps its end. Every decoding mode of this project does the same.
        """
        if idx.size(1) == 0:
            raise ValueError("generation needs at least one token to start from")
        context, training = idx[:, -self.config.block_size:], self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                if context.size(1) > self.config.block_size:
                    context = context[:, -max(1, self.config.block_size // 2):]
                x = self.trunk(context)[:, -1]                               # (B, T, C) -> (B, C)
                logits = F.linear(x, self.table)[:, :self.config.vocab_size]          # (B, V)
                if not logits.isfinite().all():
                    raise UserError("the model's logits are not numbers: its training diverged")
                probs = distribution(logits, temperature, top_k, top_p)      # (B, V)
                token = torch.multinomial(probs, 1, generator=generator)     # (B, 1)
                context = torch.cat([context, token], 1)                     # (B, T + 1)
                yield token
        finally:
            self.train(training)

    # ---- GPT-2's weights ------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, folder, attention="auto"):
        """The GPT-2 in `folder`, which is in Hugging Face's layout (config.json; model.safetensors, whole or sharded),
        in evaluation, float32, on the CPU. Raises UserError as load_folder does."""
        return load_model(folder, torch.device("cpu"), torch.float32, attention)[0]

    def save_pretrained(self, folder, tokenizer=None):
        """Writes a folder that Transformers' GPT2LMHeadModel loads, and from_pretrained: config.json,
        model.safetensors in the parameters' dtype and, given a Tokenizer, its files in the place of any other's there.
        Biases that the model hasn't are written as zeros, with which it's the same function. Raises UserError for
        experts, which GPT-2 hasn't, and for a stage; WriteError."""
        if not str(folder):
            raise UserError("the path of a folder to save to is empty")
        if self.config.n_expert or not (self.first and self.last):
            raise UserError(f"only a whole model of dense layers can be saved as GPT-2, not n_expert="
                            f"{self.config.n_expert}, layers {self.layers.start} to {self.layers.stop - 1} of "
                            f"{self.config.n_layer}")
        write_folder(self, Path(folder), tokenizer)

    # ---- what it costs --------------------------------------------------------------------------------------

    def num_params(self):
        """Parameters held here: the tied matrix counted once, its padding not at all. GPT-2 small: 124,439,808."""
        padding = (self.config.padded_vocab - self.config.vocab_size) * self.config.n_embd
        tables = sum(name in ("wte.weight", "head.weight") for name, _ in self.named_parameters())
        return sum(p.numel() for p in self.parameters()) - padding * tables


def is_matrix(name, p):
    """Whether weight decay applies to parameter p: to matrices, positions too, hence to no layer norm and no bias (the
    experts' have two dimensions)."""
    return p.dim() > 1 and not name.endswith("bias")


def initial(config, name, shape, seed):
    """The initial value of parameter `name`, on the CPU, float32, of that shape: GPT-2's initialisation.

    Normal, deviation 0.02 (positions 0.01); the two projections that end a residual branch are divided by sqrt(2L), so
    that the sum of 2L branches keeps the stream's variance at depth L. A value depends on (seed, name) alone and is
    drawn on the CPU: any stage, shard or device starts from the same model."""
    if len(shape) == 1 or name.endswith("bias"):
        return torch.full(shape, 1.0 if name.endswith("weight") else 0.0)    # layer norms; biases
    std = 0.01 if name == "wpe.weight" else 0.02
    if name.endswith(("proj.weight", "proj_weight")):
        std /= math.sqrt(2 * config.n_layer)
    real = config.vocab_size if name in ("wte.weight", "head.weight") else shape[0]
    p = torch.zeros(shape)                                                   # the padded rows stay zero
    p[:real].normal_(0.0, std, generator=torch.Generator("cpu").manual_seed(derive(seed, name)))
    return p


def flops_per_token(config):
    """Training FLOPs per token by PaLM's formula: 6 for each weight that multiplies (2 forward, 4 backward; the
    position table only adds), and 12 L C T for the scores and the weighted sum, causal halves counted whole. Of the
    experts those count that a token is sent to, top_k, besides the router; empty and missing slots don't."""
    C, L = config.n_embd, config.n_layer
    mlp = config.top_k * 8 * C * C + config.n_expert * C if config.n_expert else 8 * C * C    # 4 + 4 each; router
    weights = config.vocab_size * C + L * (4 * C * C + mlp)                  # head; qkv 3, proj 1, MLP
    return 6 * weights + 12 * L * C * config.block_size


def distribution(logits, temperature=1.0, top_k=None, top_p=None):
    """Logits (..., V) -> the probabilities (..., V) in float32 from which a token is drawn.

    temperature >= 0 divides the logits; 0 is argmax. top_k >= 1 keeps the k likeliest ids (None, or more than V: all).
    top_p in (0, 1] then keeps the fewest whose probability reaches p (Holtzman et al. 2019). Ties go to the lower id,
    so top_k=1 is argmax. They are numbers, or tensors (...,) with one for each row, which are taken as they are.
    Speculative decoding needs these very numbers for target and draft. Raises UserError on a number that is outside.
    """
    if not isinstance(temperature, torch.Tensor):
        check_sampling(temperature, top_k, top_p)
        temperature = logits.new_full(logits.shape[:-1], min(temperature, 3e38), dtype=torch.float32)
    top_k, top_p = (x[..., None] if isinstance(x, torch.Tensor) else x for x in (top_k, top_p))
    V = logits.size(-1)
    likeliest = torch.arange(V, device=logits.device) == logits.argmax(-1, keepdim=True)      # (..., V)
    greedy = temperature[..., None] < 1e-6      # the limit; 0 / 0 is no number
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature[..., None].clamp(min=1e-6)      # exp can't overflow
    if top_k is None and top_p is None:
        return torch.where(greedy, likeliest.float(), logits.softmax(-1))
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)  # (..., V) each
    if top_k is not None:
        sorted_logits = sorted_logits.masked_fill(torch.arange(V, device=order.device) >= top_k, float("-inf"))
    probs = sorted_logits.softmax(-1)                                        # (..., V), likeliest first
    if top_p is not None:
        beyond = probs.cumsum(-1) - probs >= top_p                           # what came before already reached p
        beyond[..., 0] = False                                               # however small that is
        probs = probs.masked_fill(beyond & (torch.as_tensor(top_p, device=order.device) < 1), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    probs = torch.zeros_like(probs).scatter(-1, order, probs)                # back to the order of ids
    return torch.where(greedy, likeliest.float(), probs)


def check_sampling(temperature, top_k, top_p):
    """UserError unless `distribution` can use these."""
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature={temperature} must be 0 (argmax) or a positive number")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k} must be at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p} must be above 0 and at most 1")


# --------------------------------------------------------------------------------------------------------------
# Files that survive: each is replaced whole or not at all

class WriteError(Exception):
    """A file could not be written."""


@contextmanager
def replacing(path):
    """A binary file to write, which takes the place of `path` when it's complete and on the disk. If anything goes
    wrong before, the old file stays; if the writing does, WriteError says why."""
    part = path.with_name(path.name + ".part")
    try:
        file = open(part, "wb")
    except OSError as error:
        raise WriteError(f"{path} can't be written: {error.strerror}") from None
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:      # torch's writer turns the first into the second
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, OSError) and cause.filename not in (None, str(part)):      # another file's, being copied
            raise
        if not isinstance(cause, OSError) and "writ" not in str(error):      # what was to be written
            raise
        reason = getattr(cause, "strerror", None) or "is the disk full?"
        raise WriteError(f"{path} can't be written: {reason}") from None
    finally:
        try:
            file.close()
        except OSError:      # the disk is still full
            pass
        part.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------------------
# GPT-2's weights in Hugging Face's layout. They are the same numbers under other names:
#
#     blocks.3.attn.qkv.weight (3C, C)    is    transformer.h.3.attn.c_attn.weight (C, 3C)
#
# The first GPT-2 had convolutions of width 1 where we have linear layers, and their matrices stand the other way round,
# (in, out); the rows that pad our tables aren't there. A safetensors file is the length of its header (8 bytes, the
# lowest first), the header (JSON: each tensor's dtype, shape and place) and the tensors, one after the other.

RENAMED = [("blocks.", "h."), (".qkv.", ".c_attn."), (".proj.", ".c_proj."), (".fc.", ".c_fc."), ("head.", "lm_head.")]
CONSTANT = re.compile(r"h\.\d+\.attn\.(masked_)?bias")      # the causal mask, in files of old versions
KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# What in a GPT-2's config.json changes the function computed: the values that give the one here, the default first
SAME = {"activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)}


def theirs(name):
    """A parameter's name here -> its name there, and whether it's transposed there."""
    for ours, other in RENAMED:
        name = name.replace(ours, other)
    return name, re.search(r"\.c_\w+\.weight$", name) is not None


def optional(name, what):
    """The module of a library that only some files need. Raises UserError, with what to type, where it's missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{what} needs the library {name}, which isn't here: pip install {name}") from None


def read_json(path):
    """A JSON file's object, a dictionary. Raises UserError for a file that is missing or holds none."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path} is not a JSON object")
    return found


def read_config(path):
    """config.json -> the GPTConfig and the id that ends a text, None if the vocabulary has none. dropout is that of
    the residual branches. Raises UserError for another architecture, or a GPT-2 that computes something else."""
    given = read_json(path)
    kind = given.get("model_type")
    if kind != "gpt2":
        kind = kind or given.get("architectures") or "no architecture"
        raise UserError(f"{path} describes {kind}, and of others' models only gpt2 can be read")
    sizes = {ours: given.get(other, getattr(GPTConfig, ours)) for ours, other in (
        ("vocab_size", "vocab_size"), ("block_size", "n_positions"), ("n_layer", "n_layer"), ("n_head", "n_head"),
        ("n_embd", "n_embd"))}
    for name, value in sizes.items():
        if type(value) is not int:
            raise UserError(f"{path} has {name}={value!r}, which must be a whole number")
    C = sizes["n_embd"]
    for name, values in {**SAME, "n_inner": (None, 4 * C)}.items():
        if given.get(name, values[0]) not in values:
            raise UserError(f"{path} has {name}={given[name]!r}, and the model here has only "
                            f"{' or '.join(map(str, values))}")
    dropout = given.get("resid_pdrop", 0.1)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)):
        raise UserError(f"{path} has resid_pdrop={dropout!r}, which must be a number")
    end = given.get("eos_token_id", 50256)
    try:
        config = GPTConfig(**sizes, dropout=dropout, tied=bool(given.get("tie_word_embeddings", True)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config, end if type(end) is int and 0 <= end < config.vocab_size else None


class Weights:
    """GPT-2's weights in a folder, under our names: get(name) -> tensor of our shape, on the CPU, in the file's dtype.
    The files are mapped into memory and a parameter is read when it's asked for, so that a rank reads what it holds.
    Raises UserError for files that are missing, cut short, or another model's, and for weights that are no numbers."""

    def __init__(self, folder, config):
        safetensors, found = optional("safetensors", f"reading {folder}"), {}
        for file in weight_files(folder):
            try:
                tensors = safetensors.safe_open(file, framework="pt")
            except OSError as error:
                raise UserError(f"{file} can't be read: {error.strerror or 'no such file'}") from None
            except safetensors.SafetensorError:
                size = file.stat().st_size
                raise UserError(f"{file} ({size} bytes) is not a safetensors file, or not a whole one") from None
            found |= {key.removeprefix("transformer."): (tensors, key) for key in tensors.keys()}
        self.found, self.rows = {}, {}
        layers, wide = sum(key.endswith(".ln_1.weight") for key in found), found.get("ln_f.weight")
        wide = wide[0].get_slice(wide[1]).get_shape() if wide else [config.n_embd]
        if config.n_layer > layers or wide != [config.n_embd]:      # a model of any size may be asked for
            raise UserError(f"{folder} holds {layers} layers of {wide}, and its config.json asks for {config.n_layer} "
                            f"of [{config.n_embd}]")
        for name, p in GPT(config, seed=None, device="meta").named_parameters():
            key, flipped = theirs(name)
            self.rows[name] = len(p)
            shape = [config.vocab_size if name in ("wte.weight", "head.weight") else len(p), *p.shape[1:]]
            tensors, full = found.pop(key, (None, key))
            if tensors is None:
                raise UserError(f"{folder} holds no {key}, which the model of its config.json has")
            there, kind = tensors.get_slice(full).get_shape(), tensors.get_slice(full).get_dtype()
            if there != (shape[::-1] if flipped else shape) or kind not in KINDS.values():
                raise UserError(f"{folder} holds {full} as {kind} {there}, and its config.json asks for floats of "
                                f"{shape[::-1] if flipped else shape}")
            if not tensors.get_tensor(full).isfinite().all():
                raise UserError(f"{folder} holds weights that are not numbers: {full}")
            self.found[name] = tensors, full, flipped
        left = [key for key in found if not CONSTANT.fullmatch(key) and not (config.tied and key == "lm_head.weight")]
        if left:
            raise UserError(f"{folder} holds {left[0]}, which the model of its config.json hasn't")

    def get(self, name):
        tensors, key, flipped = self.found[name]
        x = tensors.get_tensor(key)
        x = x.t() if flipped else x                                          # (in, out) -> (out, in)
        missing = self.rows[name] - len(x)
        return F.pad(x, (0, 0, 0, missing)) if missing else x                # (V, C) -> (V padded, C)


def weight_files(folder):
    """The safetensors files in `folder`: the one, or those that the index of a sharded model names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"{folder} holds no weights: neither {single.name} nor {index.name}")
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UserError(f"{index} doesn't say which file holds which tensor")
    return [folder / name for name in sorted(set(names.values()))]


def load_folder(folder):
    """A folder in Hugging Face's layout -> a dictionary as load_checkpoint's, but for what only training leaves; its
    "model" is read when asked for. Raises UserError for a folder that can't be used; see read_config and Weights."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json, so it's no model's folder; a checkpoint of train.py is a file")
    config, end = read_config(folder / "config.json")
    return {"config": asdict(config), "model": Weights(folder, config), "step": 0, "run": 0, "tokenizer": "gpt2",
            "tokenizer_file": find_tokenizer(folder), "end": end}


@torch.no_grad()
def write_folder(model, folder, tokenizer):
    """What GPT.save_pretrained does. The tensors are turned round and written one at a time; config.json comes last."""
    config, parts, header, at = model.config, [], {"__metadata__": {"format": "pt"}}, 0
    for name, p in model.named_parameters():
        key, flipped = theirs(name)
        p = p[:config.vocab_size] if p is model.table or name == "wte.weight" else p
        parts.append((key, p.t() if flipped else p))                         # (out, in) -> (in, out)
        if not config.bias and name.startswith(("blocks.", "ln_f.")):
            parts.append((key.removesuffix("weight") + "bias", p.new_zeros(len(p))))
    for i, (key, x) in enumerate(parts):
        parts[i] = key if key.startswith("lm_head.") else f"transformer.{key}", x
        header[parts[i][0]] = {"dtype": KINDS[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)                                          # so that the tensors are aligned
    end = tokenizer and tokenizer.ending(config.vocab_size)
    about = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": config.vocab_size,
             "n_positions": config.block_size, "n_layer": config.n_layer, "n_head": config.n_head,
             "n_embd": config.n_embd, "n_inner": None, **{name: values[0] for name, values in SAME.items()},
             **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
             "bos_token_id": end, "eos_token_id": end, "tie_word_embeddings": config.tied,
             "torch_dtype": str(model.table.dtype).split(".")[1]}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{folder} can't be made a folder: {error.strerror}") from None
    if tokenizer:
        write_tokenizer(tokenizer, folder, config.vocab_size)
    with replacing(folder / "model.safetensors") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in parts:
            file.write(x.cpu().contiguous().flatten().view(torch.uint8).numpy())
    with replacing(folder / "config.json") as file:
        file.write(json.dumps(about, indent=2).encode() + b"\n")


def write_tokenizer(tokenizer, folder, vocab_size):
    """Puts the tokenizer's files into the folder, in the place of another's, unless that is where it's from.
    WriteError; UserError for a file that is gone."""
    files = tokenizer.files()
    if files and files[0].parent.resolve() == folder.resolve():
        return
    tokenizer.copy_to(folder)
    for name in {"tokenizer.json", "vocab.json", "merges.txt"} - {file.name for file in files}:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"{folder / name} can't be taken away: {error.strerror}") from None
    if tokenizer.kind == "bytes" and vocab_size >= 256:
        with replacing(folder / "tokenizer.json") as file:
            file.write(json.dumps(bytes_as_pairs()).encode())


def bytes_as_pairs():
    """What stands in tokenizer.json for the kind "bytes": byte pairs without any pair. GPT-2 writes a byte that doesn't
    print as the character 256 + how many such there were before."""
    prints, letters = [*range(33, 127), *range(161, 173), *range(174, 256)], {}
    for byte in range(256):
        letters[chr(byte if byte in prints else 256 + byte - sum(b < byte for b in prints))] = byte
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    return dict(version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None, pre_tokenizer=level,
                post_processor=None, decoder=level, model=dict(
                    type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="",
                    fuse_unk=False, vocab=letters, merges=[]))


# --------------------------------------------------------------------------------------------------------------
# What both programs share: text in and out, checkpoints in, devices, options

class Tokenizer:
    """Text to ids and back. kind "bytes": UTF-8 bytes, 256 ids, any language, no vocabulary file. kind "gpt2": byte
    pairs, by the library `tokenizers`, from `file`, a tokenizer.json or a vocab.json with merges.txt beside it. kind
    "ids": the tokens came without their text (nanoGPT's train.bin), so a prompt is numbers and so is the output.

    end: the id that ends a text, if it's known; note: what a user should know about it, a sentence or nothing."""

    def __init__(self, kind, file=None, end=None, note=""):
        if kind not in ("bytes", "ids", "gpt2"):
            raise UserError(f"this version knows no tokenizer {kind!r}")
        self.kind, self.file, self.end, self.note = kind, file and Path(file).absolute(), end, note

    @cached_property
    def pairs(self):
        """The library's tokenizer. Raises UserError where the library is missing, or the file is damaged."""
        library = optional("tokenizers", self.file)
        try:
            if self.file.name == "tokenizer.json":
                pairs = library.Tokenizer.from_file(str(self.file))
            else:
                files = map(str, self.files())
                pairs = library.Tokenizer(library.models.BPE.from_file(*files))
                pairs.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
                pairs.decoder = library.decoders.ByteLevel()
                pairs.add_special_tokens([name for name in ["<|endoftext|>"] if pairs.token_to_id(name) is not None])
        except Exception as error:      # the library's are no narrower
            raise UserError(f"{self.file} is not a tokenizer: {error}") from None
        pairs.no_truncation()
        pairs.no_padding()
        return pairs

    def files(self):
        """The files to take along."""
        if self.kind != "gpt2":
            return []
        return [self.file] if self.file.name == "tokenizer.json" else [self.file, self.file.with_name("merges.txt")]

    def copy_to(self, folder):
        """Puts the files into `folder`. Raises UserError for one that can't be read; WriteError."""
        for file in self.files():
            try:
                raw, new = file.read_bytes(), folder / file.name
            except OSError as error:
                raise UserError(f"{file} can't be read: {error.strerror}") from None
            if not (new.is_file() and new.read_bytes() == raw):
                with replacing(new) as out:
                    out.write(raw)

    def encode(self, text):
        """str -> list of ids. Bytes that were no UTF-8 on the command line come through as they were, but for byte
        pairs, which are of characters: there each is U+FFFD."""
        if self.kind == "ids":
            try:
                return [int(word) for word in text.split()]
            except ValueError:
                raise UserError(f"this model's tokens have no text, so a prompt is numbers, not {text[:40]!r}"
                                + (f" ({self.note})" if self.note else "")) from None
        raw = text.encode("utf-8", "surrogateescape")
        if self.kind == "bytes":
            return list(raw)
        return self.pairs.encode(raw.decode("utf-8", "replace"), add_special_tokens=False).ids

    def ending(self, vocab_size):
        """The id that ends a text; None if the model has none."""
        end = self.pairs.token_to_id("<|endoftext|>") if self.end is None and self.kind == "gpt2" else self.end
        return end if end is not None and end < vocab_size else None

    def start(self, vocab_size):
        """The id that stands before an empty text: a newline, or GPT-2's end-of-text, which is the last of its ids."""
        end = ord("\n") if self.kind == "bytes" else self.ending(vocab_size)
        return vocab_size - 1 if end is None else end

    def decoder(self):
        """A function ids -> text for a stream: a character whose bytes aren't all there yet waits for the rest;
        call it with final=True last. Bytes that form no UTF-8 become U+FFFD."""
        if self.kind == "ids":
            return lambda ids, final=False: "".join(f"{i} " for i in ids)
        if self.kind == "gpt2":
            return PairsDecoder(self.pairs)
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        return lambda ids, final=False: decode(bytes(ids), final)


def find_tokenizer(folder):
    """The file from which a Tokenizer of byte pairs in `folder` is made. It's not there if the folder has none."""
    vocab = folder / "vocab.json"
    old = vocab.is_file() and (folder / "merges.txt").is_file() and not (folder / "tokenizer.json").is_file()
    return vocab if old else folder / "tokenizer.json"


class PairsDecoder:
    """Tokenizer.decoder for byte pairs. A token may be a part of a character, and what it looks like may depend on the
    one before (a space at the beginning of a text): so what was shown last is decoded once more with what is new."""

    def __init__(self, pairs):
        self.pairs, self.shown, self.new = pairs, [], []

    def __call__(self, ids, final=False):
        self.new += ids
        before, after = (self.pairs.decode(x, skip_special_tokens=False) for x in (self.shown, self.shown + self.new))
        if not self.new or (after.endswith("\ufffd") and not final):
            return ""
        self.shown, self.new = self.new, []
        return after[len(before):]


CHECKPOINT = "nanoscale-1"    # the format's name; a change that old readers can't read gets a new one


def load_checkpoint(path):
    """The dictionary that train.py saved at `path`, on the CPU, memory-mapped (reading the weights doesn't read the
    moments); of a folder, load_folder's. Raises UserError for a file that is missing, cut short, of another kind, or
    whose weights are no numbers."""
    if not str(path):
        raise UserError("the path of a checkpoint is empty")
    path = Path(path)
    if path.is_dir():
        return load_folder(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint; `python train.py` makes one")
    try:
        path.open("rb").close()
        ckpt = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PermissionError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        raise UserError(f"{path} ({path.stat().st_size} bytes) is not a checkpoint, or not a whole one") from None
    if not isinstance(ckpt, dict) or ckpt.get("format") != CHECKPOINT:
        raise UserError(f"{path} is not a {CHECKPOINT} checkpoint")
    try:
        shapes = {name: p.shape for name, p in GPT(config_of(ckpt), seed=None, device="meta").named_parameters()}
        parts = [ckpt["model"], ckpt["moments"]["exp_avg"], ckpt["moments"]["exp_avg_sq"]]
        whole = all({name: t.shape for name, t in part.items()} == shapes for part in parts)
        whole &= {"options", "tokenizer", "tokens", "step", "run", "updates", "scaler"} <= ckpt.keys()
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(f"{path} doesn't hold the weights and moments of the model that it describes")
    if not all(weight.isfinite().all() for weight in ckpt["model"].values()):
        raise UserError(f"{path} holds weights that are not numbers")
    if ckpt.get("tokenizer_file"):
        ckpt["tokenizer_file"] = path.parent / ckpt["tokenizer_file"]        # it lies beside the checkpoint
    return ckpt


def config_of(ckpt):
    """The GPTConfig in a checkpoint's dictionary. Those saved before there were experts or untied heads lack their
    fields, and a model that such a checkpoint holds is one of the defaults."""
    dense = {name: getattr(GPTConfig, name) for name in ("n_expert", "top_k", "capacity_factor", "aux_weight", "tied")}
    given = {**dense, **ckpt["config"]}
    return GPTConfig(**{f.name: given[f.name] for f in fields(GPTConfig)})


def tokenizer_of(ckpt):
    """The Tokenizer of a checkpoint's dictionary. One whose file is gone leaves the ids, and a note that says so."""
    kind, file, end = ckpt["tokenizer"], ckpt.get("tokenizer_file"), ckpt.get("end")
    if kind == "gpt2" and not (file and file.is_file()):
        return Tokenizer("ids", None, end, f"there is no {file or 'tokenizer'}, so that tokens are shown as numbers")
    return Tokenizer(kind, file, end)


@torch.no_grad()
def load_model(path, device, dtype, attention="auto"):
    """-> (GPT in evaluation, its Tokenizer). path: a checkpoint of train.py's, or a folder with GPT-2's weights in
    Hugging Face's layout. Raises UserError as load_checkpoint does."""
    ckpt = load_checkpoint(path)
    model = GPT(config_of(ckpt), seed=None, attention=attention, device="meta").to(dtype).to_empty(device=device)
    for name, p in model.named_parameters():
        p.copy_(ckpt["model"].get(name))                                     # one at a time, never a second whole copy
    return model.eval(), tokenizer_of(ckpt)


def pick_device(name):
    """"auto" | "cpu" | "cuda" | "cuda:1" | "mps" -> torch.device. Raises UserError for one that isn't here."""
    mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name} is not a device; use cpu, cuda, cuda:1 or mps") from None
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(mps)}.get(device.type, 0)
    if (device.index or 0) >= count:
        raise UserError(f"device={name}, but this machine has {count} of kind {device.type}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())      # cuda means the current one; say which
    return device


def pick_dtype(name, device):
    """A dtype's name -> torch.dtype. "auto": bfloat16 on a GPU that has it, else float16; float32 elsewhere."""
    if name == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    if name == "float64" and device.type == "mps":
        raise UserError("dtype=float64 can't run on device=mps; use float32")
    return getattr(torch, name)


DTYPES = ["auto", "float64", "float32", "bfloat16", "float16"]


class Options(argparse.ArgumentParser):
    """argparse, but an error is one sentence, and a misspelt option is told the nearest one."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse(self, argv=None):
        """Like parse_args. Raises UserError for options that can't be understood."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            names = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            word = unknown[0].split("=")[0]
            # --learning_rate is near --lr by its initials, though not by its letters
            initials = "--" + "".join(re.findall(r"(?:^|[-_])(\w)", word.lstrip("-")))
            near = [initials] if initials in names else difflib.get_close_matches(word, names, 1, 0.5)
            self.error(f"there is no option {word}" + (f"; did you mean {near[0]}?" if near else "; see --help"))
        return args

    def error(self, message):
        raise UserError(message)      # said where every other mistake is said: once, whatever the number of processes


def program(name, run, argv=None):
    """run(argv) as a program whose text goes to standard output. -> the exit code: 2 and a sentence for what the user
    can mend, 1 for what broke on the way; 130 after Ctrl-C, 141 when the reader of a pipe has left."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = sys.stderr or open(os.devnull, "w")      # closed by whoever started us: print would take stdout
    try:
        if sys.stdout is None:
            raise UserError("standard output is closed, and the text has nowhere to go")
        run(argv)
        sys.stdout.flush()
        return 0
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is not None:
            print(f"{name}: {error.filename} can't be used: {error.strerror}", file=sys.stderr)
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # what is still buffered goes nowhere
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"{name}: the text can't be written: {error.strerror}", file=sys.stderr)
        return 1
