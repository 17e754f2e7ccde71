"""Many devices, one model: data, tensor, pipeline, optimizer (ZeRO), token and expert parallelism, and their products.

What it teaches: a training step can be cut along its batch, its layers, its matrices, its sequences, its experts; and
what every rank holds twice can be cut too. Each cut is a few lines once two things are there: a mesh, which says who
works with whom, and a handful of collectives, through which everything goes and which count their bytes.

    0  mesh and collectives     3  pipeline: schedules, their simulator and planners
    1  data                     4  optimizer: ZeRO 0 to 3, mixed precision, and data parallelism once more
    2  tensor                   5  token          6  expert          7  the engine, which does them all

Papers: ring all-reduce (Patarasu & Yuan 2009); Megatron-LM (Shoeybi et al. 2019, 1909.08053); ZeRO (Rajbhandari et al.
2020, 1910.02054); recomputation (Chen et al. 2016, 1604.06174); GPipe (Huang et al. 2019, 1811.06965); PipeDream
(Narayanan et al. 2019, SOSP) and 1F1B with flushes (Narayanan et al. 2021, 2006.09503); Megatron-LM's interleaved
schedule (Narayanan et al. 2021, 2104.04473); TeraPipe (Li et al. 2021, 2102.07988); mixed precision
(Micikevicius et al. 2017, 1710.03740); AdamW (Loshchilov & Hutter 2017, 1711.05101); GShard (Lepikhin et al. 2020,
2006.16668); Switch Transformer (Fedus et al. 2021, 2101.03961).

    python parallel.py                                                  the pipeline's schedules, drawn
    python parallel.py --plan --preset=gpt2-xl --gpus=1024 --tp=8 --pp=16      what a step would cost
    torchrun --nproc_per_node=4 parallel.py                             each mode, predicted beside measured
    torchrun --nproc_per_node=4 train.py --preset=cpu --tp=2 --zero=3   and in use

NCCL on GPUs, gloo elsewhere: a laptop runs all of it. One process is a mesh of size one, on the same path.
What it can't do: cut the sequence between the tensor-parallel regions (sequence parallelism), replicate one stage of a
pipeline more than another, save without a rank that can hold the whole model in the host's memory.
"""

import argparse
import math
import os
import re
import signal
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from flash import (LinearCrossEntropy, attends, attention_naive, flash_attention, flash_forward, launch_backward, like,
                   operator, softmax_grad, softmax_stats, torch_attention)
from model import (GPT, GPTConfig, Options, UserError, capacity, derive, flops_per_token, initial, is_matrix,
                   program)

# --------------------------------------------------------------------------------------------------------------
# 0. Mesh and collectives
#
# Ranks are laid out as a grid, data x expert x pipeline x tensor. Who differs from me in one coordinate alone is my
# group along that axis. Tensor neighbours talk most, so they are adjacent ranks: on one host, by the fastest link.
#
#     world 8, tp 2, ep 2:    rank = (dp * 2 + ep) * 2 + tp      rank 5 = (1, 0, 0, 1): tp group {4, 5}, ep group {5, 7}
#
# Tokens are split over data and expert ranks alike: both see different sequences. What they share is another matter:
# a dense weight is the same on all of them, an expert lives on one expert rank and is the same along data alone.

@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks that work together. `process_group` is None for a group of one, which never communicates. `name`: an
    operator that torch.compile sees takes a string."""

    ranks: tuple
    process_group: object = None

    @property
    def name(self):
        return ",".join(map(str, self.ranks))

    @property
    def size(self):
        return len(self.ranks)

    @property
    def rank(self):
        return self.ranks.index(dist.get_rank()) if self.size > 1 else 0


ALONE = Group((0,))
GROUPS = {}                 # by name
TIMEOUT = timedelta(minutes=10)      # to wait for another process before it counts as lost


class Mesh:
    """The groups of this rank: dp, ep, pp, tp along the axes; `data` (dp and ep together: those that see different
    tokens); `stage` (those that have the same layers); `tied` (data, on the first and the last stage: those that hold
    the embedding); `world`. And a channel for each (direction, sender, receiver) among the stages, so that messages of
    one never wait for those of another.
    dp is what the sizes given leave of the world; ValueError if they don't divide it. device: of this rank."""

    def __init__(self, device=torch.device("cpu"), ep=1, pp=1, tp=1):
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world % (ep * pp * tp):
            raise ValueError(f"{world} ranks can't be laid out with ep={ep}, pp={pp}, tp={tp}")
        self.device, grid = device, np.arange(world).reshape(-1, ep, pp, tp)
        axes = {"dp": (0,), "ep": (1,), "pp": (2,), "tp": (3,), "data": (0, 1), "stage": (0, 1, 3),
                "world": (0, 1, 2, 3)}
        for name, along in axes.items():
            last = np.moveaxis(grid, along, range(4 - len(along), 4))        # the axes that vary within a group
            rows = last.reshape(-1, int(np.prod([grid.shape[axis] for axis in along])))
            setattr(self, name, new_group(rows.tolist()))
        ends = grid[:, :, sorted({0, pp - 1})]                               # (dp, ep, first and last, tp)
        self.tied = new_group(np.moveaxis(ends, 3, 0).reshape(tp, -1).tolist())
        stages, self.channels = np.moveaxis(grid, 2, 3).reshape(-1, pp), {}
        for a in range(pp if pp > 1 else 0):
            b = (a + 1) % pp
            for key in (("F", a, b), ("B", b, a)):
                self.channels[key] = new_group([[row[key[1]], row[key[2]]] for row in stages.tolist()])
        self.open_channels(pp)

    def open_channels(self, pp):
        """Uses once, in an order that all ranks share, what ranks at different places of a schedule use together. NCCL
        makes a communicator at its first use, where both ends wait for each other: in the middle of a schedule, two of
        them could wait in a circle."""
        x = torch.zeros(1, device=self.device)
        for (_, a, b), channel in self.channels.items():
            if a == self.pp.rank:
                dist.send(x, self.pp.ranks[b], channel.process_group)
            elif b == self.pp.rank:
                dist.recv(x, self.pp.ranks[a], channel.process_group)
        if pp > 1 and self.tied.size > 1:
            dist.all_reduce(x, group=self.tied.process_group)

    @classmethod
    def alone(cls, device):
        """The mesh of this process alone, whoever else there is."""
        mesh = cls.__new__(cls)
        mesh.device = device
        for name in ("dp", "ep", "pp", "tp", "data", "stage", "tied", "world"):
            setattr(mesh, name, ALONE)
        return mesh

    def __str__(self):
        return " x ".join(f"{name} {getattr(self, name).size}" for name in ("dp", "ep", "pp", "tp"))

    def any(self, flag):
        """Whether flag is true on any rank; all call it."""
        x = torch.tensor([float(flag)], device=self.device)
        all_reduce(x, self.world, "max")
        return bool(x)

    def common(self, number):
        """Rank 0's integer, on all ranks."""
        x = torch.tensor([number], device=self.device)
        broadcast(x, self.world)
        return int(x)


def new_group(rows):
    """The group of this rank among `rows`, which every rank gives alike."""
    mine = ALONE
    for ranks in rows:
        if len(ranks) > 1:
            process_group = dist.new_group(ranks, timeout=TIMEOUT)           # all ranks take part, in the same order
            if dist.get_rank() in ranks:
                mine = Group(tuple(ranks), process_group)
    GROUPS[mine.name] = mine
    return mine


def world_size():
    """How many processes torchrun started; 1 if it didn't."""
    return int(os.environ.get("WORLD_SIZE", 1))


class Unreachable(Exception):
    """Another process is gone."""


class Processes:
    """The processes that torchrun started, or the one that nobody did: `size` of them, this one is `rank`. What they
    have to agree on before there are groups, or when a group is broken, goes through torchrun's store."""

    def __init__(self):
        self.size, self.rank = world_size(), int(os.environ.get("RANK", 0))
        self.agreements = 0
        if self.size > 1:
            store, _, _ = next(dist.rendezvous("env://", timeout=TIMEOUT))
            self.store = dist.PrefixStore(self.roll_call(store), store)
            self.ended, self.heart = threading.Event(), threading.Thread(target=self.beat, daemon=True)
            self.heart.start()

    def roll_call(self, store):
        """A name that these processes share and no earlier ones had: torchrun's store outlives its restarts. Each says
        a random word; the first repeats all words and its own until each has found itself among them."""
        word, end = os.urandom(8).hex(), time.monotonic() + TIMEOUT.total_seconds()
        store.set(f"word {self.rank}", word)
        while time.monotonic() < end:
            if self.rank == 0:
                keys = [f"word {rank}" for rank in range(self.size)]
                words = [store.get(key).decode() if store.check([key]) else "" for key in keys]
                store.set("roll", " ".join([word, *(w or "-" for w in words)]))
                if store.check([f"{word} {rank}" for rank in range(1, self.size)]):
                    return word
            elif store.check(["roll"]):
                name, *words = store.get("roll").decode().split()
                if len(words) == self.size and words[self.rank] == word:
                    store.set(f"{name} {self.rank}", "")
                    return name
            time.sleep(0.02)
        raise Unreachable(f"{self.size} processes were announced and didn't all come")

    def beat(self):
        """Says once a second that this process lives, also while it waits for another. With the store torchrun is gone,
        and nobody else would end what it started."""
        try:
            while not self.ended.wait(1):
                self.store.add(f"beat {self.rank}", 1)
        except RuntimeError:
            os.kill(os.getpid(), signal.SIGTERM)

    def gone(self):
        """Which ranks don't live any more, in words; "" if all do. A process that ends because of another says so
        first, and isn't meant."""
        try:
            self.store.set(f"leaves {self.rank}", "")
            before = [self.store.add(f"beat {rank}", 0) for rank in range(self.size)]
            time.sleep(3)
            ranks = [rank for rank in range(self.size) if self.store.add(f"beat {rank}", 0) == before[rank]
                     and not self.store.check([f"leaves {rank}"])]
        except RuntimeError:
            return "torchrun or rank 0, which kept the store, is gone, so this one ends too"
        who = f"ranks {', '.join(map(str, ranks))} are" if len(ranks) > 1 else f"rank {ranks[0]} is" if ranks else ""
        return who and f"{who} gone, so this one ends too"

    def gather(self, text):
        """Every process's text, on all of them."""
        self.agreements += 1
        keys = [f"says {self.agreements} {rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], text)
        end = time.monotonic() + TIMEOUT.total_seconds()
        while not self.store.check(keys):
            if time.monotonic() > end:
                raise Unreachable(f"the others didn't answer within {TIMEOUT}")
            time.sleep(0.02)
        return [self.store.get(key).decode() for key in keys]

    @contextmanager
    def agreed(self, *kinds):
        """An exception of these kinds that one process raises within is raised by all."""
        error = None
        try:
            yield
        except kinds as problem:
            error = problem
        if self.size > 1:
            for text in self.gather("" if error is None else f"{kinds.index(type(error))} {error}"):
                if text:
                    raise kinds[int(text.split()[0])](text.split(" ", 1)[1])
        elif error:
            raise error

    def same(self, text, words):
        """UserError, on all, unless all have the same text; `words` say of what."""
        if self.size > 1:
            texts = self.gather(text)
            other = next((rank for rank in range(self.size) if texts[rank] != texts[0]), None)
            if other is not None:
                raise UserError(f"rank {other} has {words} than rank 0: {texts[other]}, not {texts[0]}")

    def mesh(self, device, ep=1, pp=1, tp=1):
        """Makes the groups. On CUDA each process takes the GPU of its local rank; UserError if there are too few."""
        if self.size == 1:
            return Mesh(device, ep, pp, tp)
        if device.type == "cuda":
            local, here = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= here:
                raise UserError(f"{os.environ['LOCAL_WORLD_SIZE']} processes on a machine with {here} GPUs; start as "
                                "many as GPUs, or use --device=cpu")
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=self.store, rank=self.rank,
                                    world_size=self.size, timeout=TIMEOUT)
        return Mesh(device, ep, pp, tp)


@contextmanager
def joined():
    """Within, the processes that torchrun started work together: gives Processes. Raises Unreachable when one dies."""
    processes = Processes()
    try:
        yield processes
    except RuntimeError as error:
        if processes.size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise Unreachable(processes.gone() or f"the other ranks can't be reached: {error}") from None
    if processes.size > 1:
        processes.ended.set()
        processes.heart.join()      # a thread that is in the store when Python ends would abort the process
        dist.destroy_process_group()
        GROUPS.clear()


def check_layout(config, ep, pieces, tp, whose=""):
    """UserError if a model of this shape can't be cut so. whose: words to begin with."""
    if config.n_head % tp:
        raise UserError(f"{whose}n_head={config.n_head} can't be split over tp={tp}")
    if config.n_expert % ep:
        raise UserError(f"{whose}n_expert={config.n_expert} can't be split over ep={ep}")
    if config.n_layer < pieces:
        raise UserError(f"{whose}n_layer={config.n_layer} can't be split into {pieces} pieces (pp times chunks)")


def check_schedule(args):
    """UserError if the schedule doesn't go with the other options."""
    if args.chunks > 1 and args.schedule != "interleaved":
        raise UserError(f"chunks={args.chunks} are for schedule=interleaved, not {args.schedule}")
    for name in ("zero", "n_expert"):
        if args.schedule == "pipedream" and getattr(args, name):
            raise UserError(f"schedule=pipedream keeps versions of whole weights: not with {name}="
                            f"{getattr(args, name)}")


def seconds(f, device, repeats=5, graph=False):
    """What f() takes, the median of some; the first, which may compile, doesn't count. graph: as a CUDA graph."""
    taken = []
    if graph:
        f()
        torch.cuda.synchronize(device)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured, capture_error_mode="thread_local"):
            f()
        f = captured.replay
    for _ in range(repeats + 1):
        begin = now(device)
        f()
        taken.append(between(begin, now(device)))
    return float(np.median(taken[1:]))


def now(device):
    """This moment in the work given to the device: an event in its queue, or the time where nothing queues."""
    if device.type != "cuda":
        return time.perf_counter()
    captured = dict(external=True) if torch.cuda.is_current_stream_capturing() else {}      # read after each replay
    event = torch.cuda.Event(enable_timing=True, **captured)
    event.record()
    return event


def between(begin, end):
    """Seconds from one `now` to another; waits for the second."""
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


# What each rank sends, in bytes, by kind: a ring of N passes (N - 1) / N of the data for each of gather, scatter and
# exchange, and twice that for an all-reduce, which is a reduce-scatter and an all-gather.
class Ledger(Counter):
    """Bytes by kind. `launched`: while a list, it gets (moment, kind, bytes) of each."""

    launched = None

    def note(self, kind, n, device):
        self[kind] += n
        if self.launched is not None:
            self.launched.append((now(device), kind, n))


LEDGER = Ledger()


def check(kind, x):
    if not x.is_contiguous():      # gloo and NCCL read the memory as it lies, and some would answer wrongly
        raise ValueError(f"{kind} needs a contiguous tensor, not strides {x.stride()} of shape {tuple(x.shape)}")


def count(kind, x, group, rounds=1):
    check(kind, x)
    LEDGER.note(kind, rounds * x.numel() * x.element_size() * (group.size - 1) // group.size, x.device)


# newer names of the same, where torch has them
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Done:
    """The handle of a collective that had nothing to do."""

    def wait(self):
        pass


def all_reduce(x, group, op="sum", wait=True):
    """x becomes the sum, or "max", over the group, in place. wait=False, as in the two below, returns at once, and x
    may not be touched before .wait() on what is returned."""
    if group.size == 1:
        return Done()
    count("all_reduce", x, group, 2)
    op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    return finish(dist.all_reduce(x, op, group.process_group, async_op=True), wait)


def all_gather(out, x, group, wait=True):
    """out (N n, ...) becomes the x (n, ...) of all ranks, one after the other; x may be its own part of out."""
    if group.size == 1:
        out.copy_(x)
        return Done()
    count("all_gather", out, group)
    check("all_gather", x)
    return finish(gather_single(out, x, group=group.process_group, async_op=True), wait)


def reduce_scatter(out, x, group, wait=True):
    """out (n, ...) becomes this rank's part of the sum of x (N n, ...) over the group; it may be that part of x."""
    if group.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return Done()
    count("reduce_scatter", x, group)
    check("reduce_scatter", out)
    return finish(scatter_single(out, x, group=group.process_group, async_op=True), wait)


def all_to_all(x, group):
    """x (N n, ...): piece j goes to rank j. -> (N n, ...): piece j came from rank j."""
    if group.size == 1:
        return x
    count("all_to_all", x, group)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group.process_group)
    return out


def broadcast(x, group):
    """x becomes that of the group's first rank, in place."""
    if group.size > 1:
        count("broadcast", x, group)
        dist.broadcast(x, group.ranks[0], group.process_group)


def finish(work, wait):
    if wait:
        work.wait()
    return work


# Those with a gradient. The operators that they call, by a group's name, are opaque to torch.compile: a block stays one
# graph.

def sum_of(x, name):
    y = x.clone(memory_format=torch.contiguous_format)
    all_reduce(y, GROUPS[name])
    return y


def exchange(x, name):
    return all_to_all(x.clone(memory_format=torch.contiguous_format), GROUPS[name])


def packed(x, name):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


reduced = operator("all_reduced(Tensor x, str name) -> Tensor", sum_of, packed)
exchanged = operator("exchanged(Tensor x, str name) -> Tensor", exchange, packed)


class CopyTo(torch.autograd.Function):
    """Megatron's f. forward: identity / backward: all-reduce."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group.name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduced(grad, ctx.group), None


class ReduceFrom(torch.autograd.Function):
    """Megatron's g. forward: all-reduce / backward: identity."""

    @staticmethod
    def forward(ctx, x, group):
        return reduced(x, group.name)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Exchange(torch.autograd.Function):
    """x (N n, ...). forward: all-to-all / backward: all-to-all, which takes every piece back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group.name
        return exchanged(x, ctx.group)

    @staticmethod
    def backward(ctx, grad):
        return exchanged(grad, ctx.group), None


# --------------------------------------------------------------------------------------------------------------
# 1. Data parallelism
#
# Every rank has the whole model and its own part of the batch. If each divides its summed loss by the number of targets
# in the WHOLE batch, gradients add up to those of one process. The naive form, kept as the oracle: backward first, then
# one all-reduce for each parameter. Section 4 sends each block's gradients while backward goes on with the next.

def all_reduce_gradients(model, group):
    """After backward: every parameter's gradient becomes the sum over the group."""
    for p in model.parameters():
        if p.grad is None:      # it had no part here, but may have had elsewhere
            p.grad = torch.zeros_like(p)
        p.grad = p.grad.contiguous()
        all_reduce(p.grad, group)


# --------------------------------------------------------------------------------------------------------------
# 2. Tensor parallelism
#
# Two products in a row, y = gelu(x A) B. Cut A by columns and B by rows: rank i computes gelu(x A_i) B_i alone, and the
# sum over ranks is y. So one all-reduce forward (g), and one backward for the gradient of x (f); attention is the same
# with heads for columns. Everything between the two halves, the layer norms and the residual stream, is computed by
# every rank alike.
#
#     x --f--> x A_i --gelu--> . B_i --g--> y        forward: f nothing, g all-reduce; backward: f all-reduce, g nothing
#
# The embedding is cut by its rows, the vocabulary, and so are the logits: no rank ever has all columns of them.

@dataclass(frozen=True)
class Cut:
    """Dimension `dim` of a parameter consists of `parts` equal pieces, each cut over the group `axis` of the mesh."""

    axis: str
    dim: int
    parts: int = 1

    def local(self, x, group):
        """The part of x that this rank holds; zeros where the dimension runs out."""
        pieces = x.unflatten(self.dim, (self.parts, -1))                     # (..., parts, n, ...)
        width = -(-pieces.size(self.dim + 1) // group.size)
        start = min(group.rank * width, pieces.size(self.dim + 1))
        mine = pieces.narrow(self.dim + 1, start, min(width, pieces.size(self.dim + 1) - start))
        missing = width - mine.size(self.dim + 1)
        if missing:
            shape = list(mine.shape)
            shape[self.dim + 1] = missing
            mine = torch.cat([mine, mine.new_zeros(shape)], self.dim + 1)
        return mine.flatten(self.dim, self.dim + 1)                          # (..., parts width, ...)

    def whole(self, locals_, length):
        """The parameter from all ranks' parts; `length` is its size along dim."""
        pieces = torch.cat([x.unflatten(self.dim, (self.parts, -1)) for x in locals_], self.dim + 1)
        return pieces.narrow(self.dim + 1, 0, length // self.parts).flatten(self.dim, self.dim + 1)


CUTS = [(r"attn\.qkv\.(weight|bias)$", Cut("tp", 0, 3)),      # q, k and v each by heads
        (r"attn\.proj\.weight$", Cut("tp", 1)),
        (r"mlp\.fc\.(weight|bias)$", Cut("tp", 0)),
        (r"mlp\.proj\.weight$", Cut("tp", 1)),
        (r"^(wte|head)\.weight$", Cut("tp", 0)),
        (r"experts\.", Cut("ep", 0)),
        (r"experts\.fc_weight$", Cut("tp", 2)),
        (r"experts\.fc_bias$", Cut("tp", 1)),
        (r"experts\.proj_weight$", Cut("tp", 1))]


def cuts_of(name, mesh):
    """How the parameter `name` is cut on this mesh."""
    return [cut for pattern, cut in CUTS if re.search(pattern, name) and getattr(mesh, cut.axis).size > 1]


def local_part(name, whole, mesh):
    """What this rank holds of the parameter `name`."""
    for cut in cuts_of(name, mesh):
        whole = cut.local(whole, getattr(mesh, cut.axis))
    return whole


class Replacement(nn.Module):
    """A module that does another's work, as one of a group of ranks, with the very parameters of it."""

    def __init__(self, module, group):
        super().__init__()
        self._parameters, self.group = module._parameters, group             # under the same names


class ColumnLinear(Replacement):
    """x, the same on all ranks, (..., C) -> this rank's columns (..., D/tp)."""

    def forward(self, x):
        return F.linear(CopyTo.apply(x, self.group), self.weight, self.bias)       # (..., C) @ (C, D/tp)


class RowLinear(Replacement):
    """This rank's columns (..., D/tp) -> the sum over ranks (..., C), the same on all of them; the bias added once."""

    def forward(self, x):
        y = ReduceFrom.apply(F.linear(x, self.weight), self.group)                 # (..., D/tp) @ (D/tp, C)
        return y if self.bias is None else y + self.bias


class Applied(nn.Module):
    """A function with a gradient, f or g, as a module."""

    def __init__(self, function, group):
        super().__init__()
        self.function, self.group = function, group

    def forward(self, x):
        return self.function.apply(x, self.group)


class VocabEmbedding(Replacement):
    """idx (B, T) -> (B, T, C): a rank looks up the ids whose rows (V/tp, C) it holds, zeros for the others; the sum."""

    def forward(self, idx):
        row = idx - self.group.rank * self.weight.size(0)
        held = (row >= 0) & (row < self.weight.size(0))                      # (B, T)
        x = F.embedding(row.clamp(0, self.weight.size(0) - 1), self.weight)  # (B, T, C)
        return ReduceFrom.apply(x * held[..., None], self.group)


class VocabCrossEntropy(torch.autograd.Function):
    """flash.LinearCrossEntropy with the vocabulary's rows w (V/tp, C) cut over the ranks: the softmax of parts, merged
    by their log-sum-exp, three numbers a token.

    forward: x (N, C), the same on all ranks -> summed loss, the same on all / backward: gradients of x and w's rows."""

    @staticmethod
    def forward(ctx, x, w, targets, vocab_size, with_grad, group):
        wide = torch.promote_types(x.dtype, torch.float32)
        first = group.rank * w.size(0)                                       # the id of w's first row
        real = min(max(vocab_size - first, 0), w.size(0))                    # rows that aren't padding
        rows = LinearCrossEntropy.chunk_rows(w)
        loss, works = torch.zeros((), dtype=wide, device=x.device), []
        dx, dw = (torch.empty_like(x), torch.zeros_like(w, dtype=wide)) if with_grad else (None, None)
        for i in range(0, x.size(0), rows):
            chunk, target = x[i:i + rows], targets[i:i + rows]               # (n, C), (n,)
            mine = torch.where((target >= first) & (target < first + w.size(0)), target - first, -1)
            z = chunk @ w.t()                                                # (n, V/tp)
            lse, z_target = softmax_stats(z, mine, real)                     # (n,), (n,): of our columns
            m = lse.clone()
            all_reduce(m, group, "max")
            sums = torch.stack([(lse - m).exp(), z_target])                  # (2, n)
            all_reduce(sums, group)
            lse = m + sums[0].log()                                          # of all columns
            loss += (lse - sums[1]).masked_fill(target < 0, 0.0).masked_fill(target >= vocab_size, math.nan).sum()
            if with_grad:
                softmax_grad(z, mine, real, lse.masked_fill(target < 0, math.inf))
                torch.mm(z, w, out=dx[i:i + rows])                           # (n, V/tp) @ (V/tp, C)
                works.append(all_reduce(dx[i:i + rows], group, wait=False))
                dw += z.t() @ chunk                                          # (V/tp, n) @ (n, C)
        for work in works:
            work.wait()
        if with_grad:
            ctx.save_for_backward(dx, dw.to(w.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return dx * grad, dw * grad, None, None, None, None


def vocab_cross_entropy(x, w, targets, vocab_size, group):
    """flash.linear_cross_entropy with the rows of w cut over the group."""
    with_grad = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    return VocabCrossEntropy.apply(x, w, targets.contiguous(), vocab_size, with_grad, group)


class ShardedAttention(nn.Module):
    """Causal attention of this rank's heads. With dropout on the attention weights its random numbers must differ from
    the other ranks', while those of the residual branches, which all ranks compute alike, must not: so it draws from
    a stream of its own and leaves the common one as it was."""

    def __init__(self, attend, group):
        super().__init__()
        self.attend, self.group = attend, group

    def forward(self, qkv, dropout):
        return self.apart(qkv, dropout) if dropout else self.attend(qkv, 0.0)

    @torch.compiler.disable
    def apart(self, qkv, dropout):
        cuda = qkv.is_cuda
        with torch.random.fork_rng([qkv.device] if cuda else []):
            state = torch.cuda.get_rng_state(qkv.device) if cuda else torch.get_rng_state()
            torch.manual_seed(derive(self.group.rank, state.numpy().tobytes()))
            y = self.attend(qkv, dropout)
        torch.rand(1, device=qkv.device)                                     # the common stream moves on alike
        return y


def tensor_parallel(model, group):
    """Exchanges a plain GPT's modules for those above, in place; whose parameters, by CUTS, Parallel puts there."""
    for block in model.blocks.values():
        attn, mlp = block.attn, block.mlp
        attn.qkv, attn.proj = ColumnLinear(attn.qkv, group), RowLinear(attn.proj, group)
        attn.causal = ShardedAttention(attn.causal, group)
        if hasattr(mlp, "experts"):      # each as an MLP is: its hidden layer cut over the ranks
            mlp.experts.f, mlp.experts.g = Applied(CopyTo, group), Applied(ReduceFrom, group)
        else:
            mlp.fc, mlp.proj = ColumnLinear(mlp.fc, group), RowLinear(mlp.proj, group)
    if hasattr(model, "wte"):
        model.wte = VocabEmbedding(model.wte, group)
    model.cross_entropy = partial(vocab_cross_entropy, group=group)


# --------------------------------------------------------------------------------------------------------------
# 3. Pipeline parallelism: a schedule is a list
#
# The model is cut into pieces by layers, and piece i lives on rank i % P. A micro-batch passes all pieces forward, then
# all of them backward. What a rank does is a list of actions (op, micro-batch, piece, slice): F waits for the F of the
# piece before, B for the B of the piece after. All schedules are one weave: some forwards first (the warm-up), then
# backwards and forwards in turn, then the backwards that are left.
#
#     GPipe, P = 2, M = 3                         1F1B, backward as long as forward
#     rank 0  F0 F1 F2 .  .  B0 B1 B2             rank 0  F0 F1 .  B0 F2 B1 .  B2
#     rank 1  .  F0 F1 F2 B0 B1 B2                rank 1  .  F0 B0 F1 B1 F2 B2
#
# The bubble, what ranks spend waiting, is (P - 1) / (M + P - 1) for both. GPipe holds the activations of all M
# micro-batches, 1F1B of no more than P - s on rank s: a backward lets go of one before the next forward makes one.

class Action(NamedTuple):
    """One entry of a schedule. op: F forward, B backward, or step (PipeDream's update, after the B before it)."""

    op: str
    batch: int = 0
    piece: int = 0
    slice: int = 0

    def __str__(self):
        return f"{self.op}{self.batch}" + (f".{self.slice}" if self.slice else "")


def weave(forwards, backwards, warm):
    """`warm` forwards, then forward and backward in turn, then the backwards that are left."""
    pairs = zip(forwards[warm:], backwards)
    return forwards[:warm] + [action for pair in pairs for action in pair] + backwards[len(forwards) - warm:]


def both(s, M, slices=1):
    """The forwards and the backwards of M micro-batches on a rank with one piece. Backward takes the slices of a
    sequence in reverse, since earlier slices' keys and values get gradients from later ones."""
    return ([Action("F", m, s, i) for m in range(M) for i in range(slices)],
            [Action("B", m, s, i) for m in range(M) for i in reversed(range(slices))])


def naive(s, P, M):
    """One micro-batch after the other, each alone in the pipeline."""
    return weave(*both(s, M), 0)


def gpipe(s, P, M, slices=1):
    """All forward, then all backward. Huang et al. 2019, 1811.06965."""
    return weave(*both(s, M, slices), M * slices)


def one_f_one_b(s, P, M, slices=1):
    """1F1B with a flush, PipeDream-flush. Narayanan et al. 2021, 2006.09503. With slices it's TeraPipe that begins
    backward as soon as the first sequence is through: the same bubble, P - s + slices - 1 activations held."""
    return weave(*both(s, M, slices), min(M * slices, P - 1 - s + slices - 1))


def interleaved(s, P, M, v):
    """v pieces a rank: a pass is v times shorter, and so is the bubble, for v times the messages. Narayanan et al.
    2021, 2104.04473. There M is a multiple of P; here groups of nearly equal size, at least P unless M is less, do."""
    groups = [list(group) for group in np.array_split(range(M), max(1, M // P))]
    forwards = [Action("F", int(m), i * P + s) for group in groups for i in range(v) for m in group]
    backwards = [Action("B", int(m), i * P + s) for group in groups for i in reversed(range(v)) for m in group]
    return weave(forwards, backwards, min(M * v, 2 * (P - 1 - s) + (v - 1) * len(groups[0])))


def pipedream(s, P, M):
    """1F1B that never flushes: an update after every backward. Narayanan et al. 2019 (SOSP)."""
    return [x for action in one_f_one_b(s, P, M)
            for x in ((action, Action("step", action.batch, s)) if action.op == "B" else (action,))]


def terapipe(s, P, M, slices):
    """GPipe over the token slices of each sequence. Li et al. 2021, 2102.07988."""
    return gpipe(s, P, M, slices)


# what --schedule chooses from: (pieces a rank, slices) -> schedule(s, P, M)
SCHEDULES = {"gpipe": lambda chunks, slices: partial(gpipe, slices=slices),
             "1f1b": lambda chunks, slices: partial(one_f_one_b, slices=slices),
             "interleaved": lambda chunks, slices: partial(interleaved, v=chunks),
             "pipedream": lambda chunks, slices: pipedream}


def channels(schedules):
    """What every sender sends and every receiver expects, in their own order, from the lists alone:
    {(direction, sender, receiver): ([sent], [expected])}. Equal orders are what first-in-first-out channels need."""
    P, found = len(schedules), defaultdict(lambda: ([], []))
    last = max(action.piece for actions in schedules for action in actions)
    for rank, actions in enumerate(schedules):
        for op, batch, piece, part in actions:
            step = {"F": 1, "B": -1, "step": 0}[op]
            if step and 0 <= piece + step <= last:
                found[op, rank, (piece + step) % P][0].append((batch, piece + step, part))
            if step and 0 <= piece - step <= last:
                found[op, (piece - step) % P, rank][1].append((batch, piece, part))
    return dict(found)


def simulate(schedules, cost=lambda action: {"F": 1.0, "B": 2.0, "step": 0.0}[action.op], send=0.0):
    """Replays lists of actions without a process. cost(action) and send: times, in any unit.

    -> Timeline. Raises ValueError if the lists wait for each other for ever."""
    P, last = len(schedules), max(action.piece for actions in schedules for action in actions)
    done, clock, at, rows = {}, [0.0] * P, [0] * P, [[] for _ in range(P)]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedules):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                before = needs(action, last)
                if before is not None and before not in done:
                    break
                arrival = done[before] + (send if before.piece % P != rank else 0.0) if before else 0.0
                start = max(clock[rank], arrival)
                clock[rank] = done[action] = start + cost(action)
                rows[rank].append((start, clock[rank], action))
                at[rank], moved = at[rank] + 1, True
    stuck = [f"rank {rank} at {actions[at[rank]]}" for rank, actions in enumerate(schedules) if at[rank] < len(actions)]
    if stuck:
        raise ValueError(f"this schedule never ends: {', '.join(stuck)}")
    return Timeline(rows)


def needs(action, last):
    """The action, maybe of another rank, that has to come before this one; None if there is none."""
    op, batch, piece, part = action
    if op == "F":
        return Action("F", batch, piece - 1, part) if piece else None
    if op == "step":
        return Action("B", batch, piece, part)
    return Action("B", batch, piece + 1, part) if piece < last else Action("F", batch, piece, part)


class Timeline:
    """rows[rank]: [(start, end, action)] in order."""

    def __init__(self, rows):
        self.rows = rows
        self.span = max(row[-1][1] for row in rows) - min(row[0][0] for row in rows)

    @property
    def bubble(self):
        """The share of all ranks' time that is spent waiting."""
        return 1 - sum(end - start for row in self.rows for start, end, _ in row) / (len(self.rows) * self.span)

    def live(self, rank):
        """The most micro-batches (or slices of them, or pieces) whose activations the rank holds at once."""
        held = np.cumsum([{"F": 1, "B": -1, "step": 0}[action.op] for _, _, action in self.rows[rank]])
        return int(held.max())

    def versions(self, rank):
        """The most versions of its weights that the rank holds at once: one for each distinct version with which a
        micro-batch whose backward is still due was seen, and the newest."""
        version, used, most = 0, {}, 1
        for _, _, (op, batch, piece, part) in self.rows[rank]:
            if op == "F":
                used[batch, piece, part] = version
            elif op == "B":
                del used[batch, piece, part]
            else:
                version += 1
            most = max(most, len({*used.values(), version}))
        return most

    def trace(self, launches=()):
        """As Chrome's trace format, for Perfetto, a row a rank: what json.dump takes. launches: from
        Parallel.traced."""
        kinds = {"F": "forward", "B": "backward", "step": "step"}
        return [dict(name=str(action), ph="X", pid=0, tid=rank, ts=1e6 * start, dur=1e6 * (end - start),
                     cat=kinds[action.op], args=action._asdict())
                for rank, row in enumerate(self.rows) for start, end, action in row] + [
            dict(name=kind, ph="i", s="t", pid=0, tid=rank, ts=1e6 * at, cat="communication", args=dict(bytes=n))
            for rank, at, kind, n in launches]

    def draw(self, width=100):
        """A row of text for each rank: every action at its place, as wide as it takes."""
        unit = min(end - start for row in self.rows for start, end, _ in row if end > start)
        unit = max(unit, self.span * 3 / width)
        lines = []
        for rank, row in enumerate(self.rows):
            line = ""
            for start, end, action in row:
                if end > start:
                    cell = round((end - start) / unit) * 3
                    line = line.ljust(round(start / unit) * 3) + str(action)[:max(2, cell - 1)].ljust(cell)
            lines.append(f"rank {rank}  {line}")
        return "\n".join(lines)


# Where to cut. Both planners minimise what the slowest part costs, over all ways to cut, by dynamic programming.

def partition(times, P, weights=None, activations=None, bandwidth=math.inf, replicate=False):
    """Layers to stages: PipeDream's dynamic program (Narayanan et al. 2019, section 3.1).

    times (L,): seconds of each layer, forward and backward; weights (L,): bytes of parameters; activations (L,): bytes
    that layer l sends to the next; bandwidth in bytes a second. -> [(first, end, ranks)], the seconds a micro-batch
    takes in the slowest stage or transfer. P stages of one rank each; with replicate, P ranks in all, of which several
    may serve one stage: then micro-batches are divided among them, and their gradients summed. ValueError if L < P."""
    L, zero = len(times), np.zeros(len(times))
    weights, activations = (zero if x is None else x for x in (weights, activations))
    if L < P and not replicate:
        raise ValueError(f"{L} layers can't make {P} stages")
    t, w = (np.concatenate([[0], np.cumsum(x)]) for x in (times, weights))

    def stage(i, j, m):
        return max(t[j] - t[i], 2 * (m - 1) * (w[j] - w[i]) / bandwidth) / m
    # best[j, p]: layers 0 .. j - 1 on p ranks -> (slowest, where the last stage begins, its ranks)
    best = {(0, 0): (0.0, 0, 0)}
    for j in range(1, L + 1):
        for p in range(1, P + 1):
            ways = [(max(best[i, p - m][0], 2 * activations[i - 1] / bandwidth if i else 0.0, stage(i, j, m)), i, m)
                    for i in range(j) for m in (range(1, p + 1) if replicate else (1,)) if (i, p - m) in best]
            if ways:
                best[j, p] = min(ways)
    stages, j, p = [], L, P
    while j:
        _, i, m = best[j, p]
        stages, j, p = [(i, j, m), *stages], i, p - m
    return stages, best[L, P][0]


def slice_tokens(cost, T, P, unit=1):
    """A sequence to slices: TeraPipe's dynamic program (Li et al. 2021, section 3.3). Later slices attend to more keys
    and cost more, so that good slices get shorter.

    cost(n, before): seconds of n tokens after `before` earlier ones, on one stage. P stages. -> (lengths, multiples of
    unit but for the last; the seconds of one pass, sum of the slices + (P - 1) times the slowest)."""
    ends = [*range(0, T, unit), T]
    table = {(i, j): cost(ends[j] - ends[i], ends[i]) for j in range(len(ends)) for i in range(j)}
    best = (math.inf, [])
    for slowest in sorted(set(table.values())):      # no slice may cost more than this
        if (P - 1) * slowest >= best[0]:
            break
        total = {0: (0.0, None)}
        for j in range(1, len(ends)):
            ways = [(total[i][0] + table[i, j], i) for i in range(j) if i in total and table[i, j] <= slowest]
            if ways:
                total[j] = min(ways)
        j = len(ends) - 1
        if j in total and total[j][0] + (P - 1) * slowest < best[0]:
            best = total[j][0] + (P - 1) * slowest, []
            while j:
                best[1].insert(0, ends[j] - ends[total[j][1]])
                j = total[j][1]
    return best[1], best[0]


def profile_layers(config, args):
    """(L,) seconds that each layer takes on this device, forward and backward of a micro-batch; the embedding counts
    with the first and the head with the last."""
    def model(n):
        made = GPT(replace(config, n_layer=n), attention=args.attention, device=args.device).to(args.dtype)
        if args.compile:
            made.compile_blocks()
        return made
    one, three = model(1), model(3)
    idx = torch.zeros(args.micro_batch, config.block_size, dtype=torch.int64, device=args.device)
    x = torch.randn(idx.numel(), config.n_embd, device=args.device, dtype=args.dtype, requires_grad=True)
    whole, longer = (seconds(lambda: m.loss(idx, idx).backward(), args.device) for m in (one, three))
    head = seconds(lambda: one.cross_entropy(x, one.table, idx.flatten(), config.vocab_size).backward(), args.device)
    block = max(longer - whole, 0.0) / 2
    times = np.full(config.n_layer, block)
    times[0] += max(whole - head - block, 0.0)
    times[-1] += head
    return times


def profile_slices(config, args):
    """cost(n, before) for slice_tokens: seconds that a block takes for n tokens after `before` others, forward and
    backward, not compiled (each length would be anew). Measured when asked for: a formula in n and n (before + n / 2)
    misses that a GPU's multiprocessors come out even for some lengths and not for others."""
    model = GPT(replace(config, n_layer=1), attention=args.attention, device=args.device).to(args.dtype)
    block = model.blocks["0"]

    def slices(*lengths):
        """-> a function that runs slices one after the other, and gives the last one's answer."""
        xs = [torch.randn(args.micro_batch, n, config.n_embd, device=args.device, dtype=args.dtype, requires_grad=True)
              for n in lengths]

        def run():
            prefix = Prefix(args.attention, lengths)
            for part, x in enumerate(xs):
                y = block(x, partial(prefix, part))
            return y[0] if isinstance(y, tuple) else y
        return run

    @lru_cache(None)
    def cost(n, before):
        run = slices(before, n) if before else slices(n)
        both = seconds(lambda: run().sum().backward(), args.device, 3, args.graph)
        return max(1e-9, both - (alone(before) if before else 0.0))

    @lru_cache(None)
    def alone(before):
        return seconds(slices(before), args.device, 3, args.graph)
    return cost


def plan_slices(config, args):
    """Tokens of each slice, by TeraPipe's dynamic program in eighths of the sequence; equal slices, unless others
    should be faster by 5%: less than that one measured block doesn't know of the whole."""
    T, cost = config.block_size, profile_slices(config, args)
    planned, seconds = slice_tokens(cost, T, args.pp, -(-T // 8))

    def taken(slices):
        costs = [cost(n, end - n) for n, end in zip(slices, np.cumsum(slices).tolist())]
        return sum(costs) + (args.pp - 1) * max(costs)
    equal = min(([T // n] * n for n in (1, 2, 4, 8) if T % n == 0), key=taken)
    return planned if seconds < 0.95 * taken(equal) else equal


# --------------------------------------------------------------------------------------------------------------
# 4. The optimizer: ZeRO, mixed precision, and data parallelism once more
#
# Training holds, for each parameter, a weight and a gradient in the model's dtype, and in float32 a master weight and
# Adam's two moments: 2 + 2 + 12 = 16 bytes in bfloat16. Of N data-parallel ranks each holds all of it. ZeRO cuts it:
#
#     stage   weights   gradients   masters, moments     bytes a parameter     sent, in passes of (N - 1) / N
#     0       2         2           12                   16                    2    all-reduce
#     1       2         2           12 / N               4 + 12 / N            2    reduce-scatter, all-gather
#     2       2         2 / N       12 / N               2 + 14 / N            2    the same; one scatter a micro-batch
#     3       2 / N     2 / N       12 / N               16 / N                3    gathered again for backward
#
# A unit is a block, its experts, or all that isn't a block. Its parameters lie in one flat vector, matrices first, so
# that weight decay is for a prefix; the vector is padded to N equal shards. What the unit computes with is what comes
# out of
#
#     Use     forward: shard --gather--> weights / backward: their gradients --reduce--> the shard's gradient
#
# Autograd calls that backward once, when the unit's last gradient is there, tied uses summed: so the reduction of one
# block runs while backward goes on with the next, with no hooks and no counters. With several micro-batches a step
# gradients are summed in float32, before they are sent (stages 0, 1) or after (2, 3); over ranks, in what is sent.

def adamw(master, weights, grad, m, v, clip, lr, decay, beta1, beta2, correction1, correction2):
    """One step of AdamW (Loshchilov & Hutter 2017), in place, on flat vectors; grad is multiplied by `clip` first. m
    and v are the running means of g and g^2; both start at 0, and the corrections 1 - beta^t take that bias out.
    Compiled, this is one kernel that reads and writes each number once: memory is what an optimizer waits for."""
    g = grad.to(m.dtype) * clip
    m.lerp_(g, 1 - beta1)                                                    # beta1 m + (1 - beta1) g
    v.lerp_(g * g, 1 - beta2)
    master.mul_(1 - lr * decay)
    master.sub_(lr * (m / correction1) / ((v / correction2).sqrt() + 1e-8))
    if weights is not None:                                                  # a copy in the model's dtype
        weights.copy_(master)


class Use(torch.autograd.Function):
    """forward: the unit's weights, gathered / backward: their gradients, reduced. `anchor` only makes autograd call."""

    @staticmethod
    def forward(ctx, anchor, unit):
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return tuple(unit.views(unit.ready()))

    @staticmethod
    def backward(ctx, *grads):
        ctx.unit.accumulate(grads)
        return None, None


class Unit:
    """Parameters that are gathered, reduced and stepped together: one flat vector, of which this rank keeps a shard.

    slots: {name: [(a module's dictionary of parameters, key in it), ...]}, meta tensors of local shapes; group: the
    ranks that hold the same parameters and see different tokens; before: the units that backward needs next; stash: an
    update writes new weights beside the old, which live as long as a backward still needs them (PipeDream)."""

    def __init__(self, slots, group, stage, dtype, grad_dtype, device, stash):
        meta = {name: holder[key] for name, ((holder, key), *_) in slots.items()}
        self.names = sorted(meta, key=lambda name: not is_matrix(name, meta[name]))
        self.shapes = [meta[name].shape for name in self.names]
        self.slots, self.group, self.stage, self.dtype, self.device = slots, group, stage, dtype, device
        self.sizes = [shape.numel() for shape in self.shapes]
        self.numel = sum(self.sizes)
        self.matrices = sum(n for n, name in zip(self.sizes, self.names) if is_matrix(name, meta[name]))
        shards = group.size if stage else 1
        self.width = -(-self.numel // shards)                                # of a shard
        self.start = group.rank * self.width if stage else 0                 # where mine begins
        self.wide = torch.promote_types(dtype, torch.float32)
        empty = partial(torch.zeros, device=device)
        self.master, self.exp_avg, self.exp_avg_sq = (empty(self.width, dtype=self.wide) for _ in range(3))
        copied = dtype != self.wide or (shards > 1 and stage < 3) or stash   # else masters are the weights
        self.full = None
        if stage < 3:
            self.full = empty(shards * self.width, dtype=dtype) if copied else self.master
            self.own = self.full[self.start:self.start + self.width]
        else:
            self.own = empty(self.width, dtype=dtype) if copied else self.master
        self.copied, self.padded, self.stash = copied, shards * self.width, stash
        self.grad, self.grad_dtype = None, grad_dtype      # from a step's first micro-batch to its update
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.shard_grad, self.arriving, self.before = None, None, []
        self.uses, self.due = 1, 0      # a micro-batch; gradients to come before the sum is complete

    def views(self, flat):
        """A vector of all parameters, cut into tensors of their shapes."""
        return [piece.view(shape) for piece, shape in zip(flat[:self.numel].split(self.sizes), self.shapes)]

    # ---- weights

    def gather(self):
        """Starts to bring the weights together, unless they are here or on their way."""
        if self.stage == 3 and self.full is None:
            self.full = torch.empty(self.padded, dtype=self.dtype, device=self.device)
            self.arriving = all_gather(self.full, self.own, self.group, wait=False)

    def ready(self):
        """The weights, all of them here, (padded,)."""
        self.gather()
        self.settle()
        return self.full

    def settle(self):
        """Waits for weights that are on their way: until then neither they nor what they come from may be written."""
        if self.arriving:
            self.arriving.wait()
            self.arriving = None

    def release(self):
        """Stage 3: lets go of the gathered weights."""
        if self.stage == 3:
            self.settle()
            self.full = None

    def install(self):
        """From now on the modules compute with this unit's weights."""
        for name, weight in zip(self.names, Use.apply(self.anchor, self)):
            for holder, key in self.slots[name]:
                holder[key] = weight

    def remove(self):
        for places in self.slots.values():
            for holder, key in places:
                holder[key] = None
        self.release()

    def pack(self, x):
        """What autograd keeps for backward in place of x, if that's a gathered weight: where it lay. Else None."""
        if self.full is None or x.untyped_storage().data_ptr() != self.full.untyped_storage().data_ptr():
            return None
        if x.dim() < 2:      # a norm's weight: too small to gather for
            return x.clone()
        return self, x.shape, x.stride(), x.storage_offset()

    # ---- gradients

    def accumulate(self, grads):
        """Takes the gradients of one micro-batch (None: zero) and, when it's time, starts their reduction."""
        self.release()
        self.due -= 1
        if self.stage < 2:
            if self.grad is None:
                self.grad = self.joined(grads, self.grad_dtype)
            else:
                self.add(self.views(self.grad), grads)
            if self.due:
                return
            self.shard_grad = self.grad[self.start:self.start + self.width]
            work = (all_reduce(self.grad, self.group, wait=False) if self.stage == 0 else
                    reduce_scatter(self.shard_grad, self.grad, self.group, wait=False))
            self.pending.put(work, lambda: None)
            return
        joined = self.joined(grads, self.dtype)
        piece = torch.empty(self.width, dtype=self.dtype, device=self.device)

        def finish():
            joined.size()                                                    # alive until here
            self.grad = piece.to(self.grad_dtype) if self.grad is None else self.grad.add_(piece)
            self.shard_grad = self.grad
        self.pending.put(reduce_scatter(piece, joined, self.group, wait=False), finish)

    def joined(self, grads, dtype):
        """Gradients as one vector, (padded,)."""
        flat = torch.empty(self.padded, dtype=dtype, device=self.device)
        flat[self.numel:] = 0
        views = self.views(flat)
        for view, grad in zip(views, grads):
            if grad is None:
                view.zero_()
        self.add(views, grads, torch._foreach_copy_)
        return flat

    def add(self, into, grads, how=torch._foreach_add_):
        into, grads = zip(*[pair for pair in zip(into, grads) if pair[1] is not None])
        how(into, grads)

    def held(self):
        """What of each parameter lies in this rank's shard: (name, begin and end in the shard, where in the shard the
        parameter itself begins, which may be before it)."""
        at = -self.start
        for name, n in zip(self.names, self.sizes):
            begin, end = max(at, 0), min(at + n, self.width)
            if begin < end:
                yield name, begin, end, at
            at += n

    def segments(self, weight_of):
        """[(begin, end, weight)] of this rank's shard of the gradient, neighbours of one weight joined."""
        found = []
        for name, begin, end, _ in self.held():
            weight = weight_of(name)
            if found and found[-1][2] == weight:
                found[-1][1] = end
            else:
                found.append([begin, end, weight])
        return found

    def step(self, update, decay, *numbers):
        """AdamW on the shard, then the weights' way to where they are needed."""
        self.settle()
        if self.stash:
            self.full = self.own = torch.empty_like(self.full)
        cut = min(max(self.matrices - self.start, 0), self.width)
        for part, d in ((slice(0, cut), decay), (slice(cut, self.width), 0.0)):
            if self.master[part].numel():
                update(self.master[part], self.own[part] if self.copied else None, self.shard_grad[part],
                       self.exp_avg[part], self.exp_avg_sq[part], numbers[0], numbers[1], d, *numbers[2:])
        self.spread()

    def spend(self):
        """The gradient has served."""
        self.grad = self.shard_grad = None

    def spread(self):
        """Stages 1 and 2: everyone gets the new weights."""
        if self.stage in (1, 2) and self.group.size > 1:
            self.arriving = all_gather(self.full, self.own, self.group, wait=False)


class Pending:
    """Reductions under way. At most two: a third waits for the first, or every full gradient would stay alive."""

    def __init__(self, most=2):
        self.queue, self.most = deque(), most

    def put(self, work, then):
        self.queue.append((work, then))
        if len(self.queue) > self.most:
            self.take()

    def take(self):
        work, then = self.queue.popleft()
        work.wait()
        then()

    def drain(self):
        while self.queue:
            self.take()


@contextmanager
def in_use(units, again=True):
    """Within, modules compute with the weights of these units. What stage 3 gathers is let go of at the end, and
    autograd keeps no hold of it: backward gathers it again. again=False: nothing of this is kept for backward."""
    def pack(x):
        return next((kept for kept in (unit.pack(x) for unit in units) if kept is not None), x)

    def unpack(kept):
        if isinstance(kept, torch.Tensor):
            return kept
        unit, shape, stride, offset = kept
        full = unit.ready()
        for other in unit.before:      # on their way while this one computes
            other.gather()
        return full.as_strided(shape, stride, offset)

    for unit in units:
        unit.install()
    gathered = again and any(unit.stage == 3 for unit in units)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if gathered else nullcontext():
            yield
    finally:      # recomputation leaves by an exception, as soon as it has what backward needs
        for unit in units:
            unit.remove()


class Shell(nn.Module):
    """A block that computes with the weights of its units. `after`: the units that forward needs next. recompute: it
    keeps its input alone, and computes the rest again in backward (Chen et al. 2016, 1604.06174); of slices of tokens
    also attention's q, o and log-sum-exp, since backward is that of forward's own SliceAttention."""

    def __init__(self, block, units, recompute):
        super().__init__()
        self.block, self.units, self.after, self.recompute = block, units, [], recompute

    def forward(self, x, attend=None):
        nearby = iter((self.after, self.units[0].before))      # what is needed next: in forward, and then in backward

        def run(x):
            with in_use(self.units, not self.recompute):
                for unit in next(nearby):
                    unit.gather()
                return self.block(x, attend)
        if not self.recompute or not torch.is_grad_enabled():
            return run(x)
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=self.training and self.block.attn.dropout > 0)


# --------------------------------------------------------------------------------------------------------------
# 5. Token parallelism
#
# With one long sequence there are no micro-batches to fill a pipeline with. But token t needs only what came before it:
# its own slice of the sequence can enter the next stage while this one goes on with the slice after. All a slice needs
# of the earlier ones, at each layer, are their keys and values. Their gradients are due when the later slices' backward
# is through, which is why that runs in reverse:
#
#     o_2 = attention(q_2, [k_0 k_1 k_2], [v_0 v_1 v_2])       B2: gradients for all k, v; those of k_2, v_2 are whole
#     o_1 = attention(q_1, [k_0 k_1], [v_0 v_1])               B1: adds to those of k_1, k_0; k_1's are whole now
#
# So a layer keeps the sequence's keys and values in one piece each, in which a slice sees what is before its end, and
# their gradients in two more, from which it takes its own part when its turn comes.

class SliceAttention(torch.autograd.Function):
    """forward: attention of q to all keys and values so far, of which k and v (B, nh, t, hs) at `begin` are new /
    backward: q's gradient, and what has come together for k and v."""

    @staticmethod
    def forward(ctx, q, k, v, whole, begin, attention):
        end = begin + k.size(2)
        for kept, x in zip(whole.kept, (k, v)):
            kept.data[:, :, begin:end] = x      # past what earlier slices saw, so that nothing saved for them changes
        ctx.whole, ctx.begin = whole, begin
        ctx.inputs = [x.detach().requires_grad_() for x in (q, *(kept[:, :, :end] for kept in whole.kept))]
        if attention is flash_attention and attends(q):
            ctx.o, ctx.lse = flash_forward(*ctx.inputs, True, q.size(3) ** -0.5)
            return ctx.o.detach()
        same = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)      # recomputation keeps out of here
        with torch.enable_grad(), same:
            ctx.o, ctx.lse = attention(*ctx.inputs), None                    # (B, nh, t, hs)
        return ctx.o.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do):
        (q, keys, values), sums = ctx.inputs, ctx.whole.grads
        end, last = keys.size(2), not sums      # the last slice's are the first, and of all keys
        if ctx.lse is not None:                                              # the kernel adds
            sums += [like(x) for x in (keys, values)] if last else []
            grads = like(q), *(total[:, :, :end] for total in sums)
            dq, *_ = launch_backward(q, keys, values, ctx.o, ctx.lse, do, None, True, q.size(3) ** -0.5, grads,
                                     add=not last)
        else:
            dq, *grads = torch.autograd.grad(ctx.o, ctx.inputs, do)          # (B, nh, end, hs) for keys and values
            sums += grads if last else []
            for total, grad in zip(sums, grads if not last else ()):
                total[:, :, :end] += grad
        ctx.o = ctx.lse = ctx.inputs = ctx.whole = None
        return dq, *(total[:, :, ctx.begin:end] for total in sums), None, None, None


class Whole(NamedTuple):
    """One sequence's keys and values at one layer, (B, nh, T, hs) each, and once there are some, their gradients."""

    kept: list
    grads: list


class Prefix:
    """The keys and values of one sequence's slices at each layer of one piece. attention: a key of model.ATTENTION;
    slices: their lengths."""

    def __init__(self, attention, slices):
        self.layers, self.slices = {}, slices
        self.attention = {"torch": torch_attention, "naive": lambda *qkv: attention_naive(*qkv)[0]}.get(
            attention, flash_attention)

    @torch.compiler.disable
    def __call__(self, part, layer, q, k, v):
        """The `attend` of slice `part`: q, k, v (B, nh, t, hs) -> (B, nh, t, hs)."""
        if layer not in self.layers:
            B, nh, _, hs = k.shape
            self.layers[layer] = Whole([k.new_empty(B, nh, sum(self.slices), hs) for _ in range(2)], [])
        return SliceAttention.apply(q, k, v, self.layers[layer], sum(self.slices[:part]), self.attention)


# --------------------------------------------------------------------------------------------------------------
# 6. Expert parallelism
#
# Experts are cut over the expert ranks, which see different tokens. So each token travels to the rank of its expert and
# back: two all-to-alls forward, two backward. The shapes are fixed by the capacity, however the router chooses: a rank
# without a token to give sends empty slots, and nobody waits for a message that doesn't come.

class ExpertParallel(nn.Module):
    """experts: a module for E/ep experts. x (G, E, n, C), this rank's tokens for all experts -> the same shape."""

    def __init__(self, experts, group):
        super().__init__()
        self.experts, self.group = experts, group

    def forward(self, x):
        (G, E, n, C), ep = x.shape, self.group.size
        x = x.view(G, ep, E // ep, n, C).transpose(0, 1)                     # (ep, G, E/ep, n, C): piece j for rank j
        x = Exchange.apply(x.contiguous(), self.group).view(ep * G, E // ep, n, C)               # piece j from rank j
        y = self.experts(x).reshape(ep, G, E // ep, n, C)
        y = Exchange.apply(y.contiguous(), self.group)                             # home again
        return y.transpose(0, 1).reshape(G, E, n, C)


def expert_parallel(model, group):
    """Exchanges the experts of a plain, or tensor-parallel, MoE GPT for those of this expert rank, in place."""
    for block in model.blocks.values():
        block.mlp.experts = ExpertParallel(block.mlp.experts, group)


# --------------------------------------------------------------------------------------------------------------
# 7. The engine: all of it at once
#
# A rank has the pieces of the model that its stage has, each cut for its tensor and expert ranks, in units that it
# shares with its data ranks. A step is backward on every micro-batch in the order of a schedule, then AdamW on every
# unit.

class Part(NamedTuple):
    """A micro-batch. idx and targets (B, T); total: the number of targets that its loss is divided by; share: its
    weight in the loss of the batch; lr: the learning rate, where it has an update of its own."""

    idx: torch.Tensor
    targets: torch.Tensor
    total: torch.Tensor
    share: object = 1.0
    lr: float = 0.0


class Replay:
    """A function of GPU tensors that returns such. Once captured, each call replays its kernels as one CUDA graph: the
    host launches a step's thousands of kernels, collectives among them, in one go and can't fall behind the GPU. Until
    then, and on a CPU, it's the function. `pool` is memory that several share: while one runs the others are done."""

    def __init__(self, function, pool):
        self.function, self.pool, self.graph = function, pool, None

    def capture(self, *inputs):
        self.inputs, self.graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=self.pool, capture_error_mode="thread_local"):
            self.outputs = self.function(*self.inputs)

    def __call__(self, *inputs):
        if self.graph is None:
            return self.function(*inputs)
        for mine, x in zip(self.inputs, inputs):
            mine.copy_(x)
        self.graph.replay()
        return [x.clone() for x in self.outputs]


class Parallel:
    """A GPT on a mesh, with the optimizer that trains it. The numbers are those of one process on any mesh.

    config: GPTConfig; mesh: Mesh; args: device, dtype (what the model computes in), zero (stage 0 to 3), batch_size (of
    all ranks), micro_batch (sequences that a rank runs at once), schedule, chunks (pieces a stage), partition (layers
    of each piece; None: even), slices (their lengths; None: whole sequences), recompute, beta1, beta2, weight_decay,
    grad_clip, attention, compile, graph (on a GPU: replay the step from its fourth time on) and seed. start: a
    checkpoint's dictionary, whose weights it takes; None: from the seed.

    float16 has too small a range for gradients: the loss is multiplied by `scale` before backward and the gradient
    divided by it after. A step whose gradient overflowed is skipped and the scale halved; 2000 good steps double it."""

    def __init__(self, config, mesh, args, start=None):
        self.config, self.mesh, self.args, dtype = config, mesh, args, args.dtype
        self.main, self.copies = mesh.world.rank == 0, mesh.tp.size          # of each part of the loss
        whole = GPT(config, seed=None, device="meta")
        self.shapes = {name: p.shape for name, p in whole.named_parameters()}
        self.num_params, self.counts = whole.num_params(), None
        P, s = mesh.pp.size, mesh.pp.rank
        self.pieces = P * args.chunks                                        # piece i lives on stage i % P
        sizes = args.partition or [len(part) for part in np.array_split(range(config.n_layer), self.pieces)]
        self.layers = [range(end - n, end) for n, end in zip(sizes, np.cumsum(sizes).tolist())]
        self.slices = args.slices or [config.block_size]
        self.stream = args.schedule == "pipedream"                           # never flushed but for a look at the model
        self.models = {i: GPT(config, self.layers[i], seed=None, attention=args.attention, device="meta")
                       for i in range(s, self.pieces, P)}
        slots = self.cut()
        wide = self.wide = torch.promote_types(dtype, torch.float32)
        several = args.batch_size // mesh.data.size > args.micro_batch or len(self.slices) > 1 or self.pieces > P
        grad_dtype = wide if several else dtype                              # of a single backward: nothing to add up
        self.pending = Pending()
        # a tied embedding's: the other stage joins when its backward is through, which may need ours: never wait before
        self.pending_tied = Pending(math.inf)

        def unit(names, group, stage=args.zero):
            if not names:
                return []
            places = {name: slots[name] for name in names}
            made = Unit(places, group, stage, dtype, grad_dtype, args.device, self.stream)
            made.pending = self.pending_tied if group is mesh.tied and P > 1 else self.pending
            return [made]
        inner = [name for name in slots if name.startswith("blocks.")]
        rest, self.units = [name for name in slots if name not in inner], []
        for model in self.models.values():
            self.wrap(model, [name for name in inner if int(name.split(".")[1]) in model.layers], unit, args.compile)
        if P == 1:
            self.outer = unit(rest, mesh.data)
            self.outer[0].uses = min(2, self.pieces)                         # by the first piece and the last
        else:      # a tied embedding is on two stages, which are never at the same place: they can't gather together
            tied = [name for name in rest if name == "wte.weight" and config.tied]
            self.outer = unit(tied, mesh.tied, min(args.zero, 1)) + unit([x for x in rest if x not in tied], mesh.data)
        self.units += self.outer
        self.held, self.parts = {}, {}                                       # of the batch under way
        self.local, self.sending, self.marks = defaultdict(deque), [], None
        self.begun = 0                                                       # forwards of the stream without backward
        self.norm_copies = (mesh.stage if self.stream else mesh.world).size  # ranks that have the norm of the same part
        self.adamw = torch.compile(adamw) if args.compile else adamw
        pool = torch.cuda.graph_pool_handle() if args.graph else None
        self.gradient, self.update, self.calls = Replay(self.find_gradient, pool), Replay(self.apply_gradient, pool), 0
        self.updates, self.scaled = 0, dtype == torch.float16
        self.scale, self.good_steps = 2.0 ** 16 if self.scaled else 1.0, 0
        self.fill("master", start["model"].get if start else
                  lambda name: initial(config, name, self.shapes[name], args.seed))

    def cut(self):
        """Cuts the models for this rank. -> {name: [(a module's dictionary of parameters, key in it), ...]}"""
        slots, mesh = {}, self.mesh
        for model in self.models.values():
            for path, module in model.named_modules():
                for key, p in module._parameters.items():
                    if p is not None:
                        slots.setdefault(f"{path}.{key}", []).append((module._parameters, key))
            if mesh.tp.size > 1:
                tensor_parallel(model, mesh.tp)
            if mesh.ep.size > 1 and self.config.n_expert:
                expert_parallel(model, mesh.ep)
        for name, places in slots.items():
            for holder, key in places:
                holder[key] = nn.Parameter(local_part(name, holder[key], mesh))
        return slots

    def wrap(self, model, inner, unit, compiled):
        """Makes the units of a model's blocks, and has each block compute with them."""
        if compiled:
            model.compile_blocks()
        before, last = [], None
        for i, block in model.blocks.items():
            names = [name for name in inner if name.startswith(f"blocks.{i}.")]
            experts = [name for name in names if ".experts." in name]
            units = unit([name for name in names if name not in experts], self.mesh.data)
            units += unit(experts, self.mesh.dp) if experts else []
            for u in units:
                u.before = before
            if last:
                last.after = units
            model.blocks[i] = last = Shell(block, units, self.args.recompute)
            self.units += units
            before = units

    # ---- forward and backward

    def train(self, mode=True):
        """Switches dropout, and the experts' limits, on or off."""
        for model in self.models.values():
            model.train(mode)

    def send(self, op, piece, x):
        """Sends what `piece` needs for its F or B. Returns at once, and keeps x until it has left. To wait for that
        here, before the next one, would be a deadlock of the interleaved schedule."""
        me, to = self.mesh.pp.rank, piece % self.mesh.pp.size
        if me == to:
            self.local[op, piece].append(x)
            return
        group = self.mesh.channels[op, me, to]
        x = x.contiguous()
        LEDGER.note("send", x.numel() * x.element_size(), x.device)
        if not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.sending = [(work, y) for work, y in self.sending if not work.is_completed()]
        self.sending.append((dist.isend(x, self.mesh.pp.ranks[to], group.process_group), x))

    def receive(self, action):
        """What the action needs, (rows, t, C), from the piece before or after; None if nothing does."""
        op, m, piece, part = action
        P, me, source = self.mesh.pp.size, self.mesh.pp.rank, piece + (1 if op == "B" else -1)
        if op == "step" or not 0 <= source < self.pieces:
            return None
        if source % P == me:
            return self.local[op, piece].popleft()
        x = torch.empty(len(self.parts[m].idx), self.slices[part], self.config.n_embd, dtype=self.args.dtype,
                        device=self.mesh.device)
        dist.recv(x, self.mesh.pp.ranks[source % P], self.mesh.channels[op, source % P, me].process_group)
        return x

    def forward(self, piece, x, targets, total, pos=None, attend=None):
        """One piece on what it needs: idx (B, T) or activations (B, T, C). -> (activations or None, this piece's part
        of the loss or None): the cross-entropy at the last piece, and at any the balancing loss of its experts."""
        model = self.models[piece]
        with in_use(self.outer if model.first or model.last else []):
            if model.last:
                x, loss = None, model.loss(x, targets, total, pos, attend)
            else:
                x = model.trunk(x, pos, attend)
                loss = model.balance(targets)
                loss = None if loss is None else loss / total
        model.aux = None      # it would keep what this pass saved for backward
        return x, loss

    @torch.no_grad()
    def loss(self, idx, targets, total=1):
        """The summed loss of this rank's sequences, idx and targets (B, T), divided by total, on the last stage; 0 on
        the others."""
        found, slices = torch.zeros((), dtype=self.wide, device=self.mesh.device), self.slices
        self.parts, self.slices = {0: Part(idx, targets, total)}, [idx.size(1)]
        for piece in self.models:
            x = self.receive(Action("F", 0, piece))
            x, loss = self.forward(piece, idx if x is None else x, targets, total)
            if x is not None:
                self.send("F", piece + 1, x)
            elif loss is not None:
                found = loss
        self.sent()
        self.slices = slices
        return found

    def sent(self):
        """Waits until all messages have left."""
        for work, _ in self.sending:
            work.wait()
        self.sending = []

    def actions(self, M, schedule=None):
        """What this stage does with M micro-batches."""
        schedule = SCHEDULES[schedule or self.args.schedule](self.args.chunks, len(self.slices))
        return schedule(self.mesh.pp.rank, self.mesh.pp.size, M)

    def backward(self, idx, targets):
        """Gradients of a batch, of which this rank has idx and targets (B, T); a micro-batch at a time, in the order of
        the schedule. -> this rank's part of the loss: the parts of all data ranks and stages add up to the mean over
        the whole batch.

        Each summed loss is divided by the number of targets in the WHOLE batch, so that parts add up to the mean and to
        its gradient, however many targets each of them holds."""
        total = (targets >= 0).sum()
        all_reduce(total, self.mesh.data)
        total, self.counts = total.clamp(min=1), None
        pairs = zip(idx.split(self.args.micro_batch), targets.split(self.args.micro_batch))
        self.parts = {m: Part(*pair, total) for m, pair in enumerate(pairs)}
        for unit in self.units:
            unit.due = unit.uses * len(self.parts) * len(self.slices)
        loss = self.execute(self.actions(len(self.parts), "1f1b" if self.stream else None))
        self.sent()
        self.pending.drain()
        self.pending_tied.drain()
        return loss

    def execute(self, actions):
        """Runs any schedule on self.parts, {micro-batch: Part}. -> this rank's part of the loss. Sets `live`, the most
        it held at once."""
        loss, self.live = torch.zeros((), dtype=self.wide, device=self.mesh.device), 0
        prefixes, sliced = defaultdict(partial(Prefix, self.args.attention, self.slices)), len(self.slices) > 1
        for action in actions:
            op, m, piece, part = action
            received = self.receive(action)
            self.mark(None)
            if op == "F":
                idx, targets, pos = self.slice(m, part)
                x = idx if received is None else received.requires_grad_()
                y, own = self.forward(piece, x, targets, self.parts[m].total, pos,
                                      partial(prefixes[m, piece], part) if sliced else None)
                self.held[m, piece, part] = x, y, own
                self.live = max(self.live, len(self.held))
                if own is not None:
                    loss = loss + own.detach() * self.parts[m].share
                self.mark(action)
                if y is not None:
                    self.send("F", piece + 1, y.detach())
                if self.config.n_expert:
                    self.note_counts(piece)
            elif op == "B":
                x, y, own = self.held.pop((m, piece, part))
                if part == 0:      # the last of its slices
                    prefixes.pop((m, piece), None)
                outputs, grads = ([], []) if own is None else ([own * self.scale], [None])
                if y is not None:
                    outputs, grads = [*outputs, y], [*grads, received]
                torch.autograd.backward(outputs, grads)
                self.mark(action)
                if piece:
                    self.send("B", piece - 1, x.grad)
            else:
                self.step_alone(self.parts[m].lr)
                self.mark(action)
        return loss

    def slice(self, m, part):
        """Slice `part` of micro-batch m: idx and targets (B, t), positions (t,), or None for 0 .. T - 1."""
        idx, targets, *_ = self.parts[m]
        if len(self.slices) == 1:
            return idx, targets, None
        end = sum(self.slices[:part + 1])
        at = slice(end - self.slices[part], end)
        return idx[:, at], targets[:, at], torch.arange(at.start, at.stop, device=idx.device)

    def note_counts(self, piece):
        """Adds what the experts of a piece were given to the step's counts, (L, E + 1); other stages' layers stay 0."""
        if self.counts is None:
            self.counts = torch.zeros(self.config.n_layer, self.config.n_expert + 1, device=self.mesh.device)
        layers = self.layers[piece]
        self.counts[layers.start:layers.stop] += self.models[piece].counts

    def mark(self, action):
        """Under `traced`, notes when an action has ended; None: when the next begins."""
        if self.marks is not None:
            self.marks.append((action, now(self.mesh.device)))

    # ---- PipeDream: an update after every backward, and no flush

    def advance(self, idx, targets, lr):
        """A batch into the stream, each micro-batch of which is a batch of its own to the optimizer: runs this stage's
        actions up to the last forward, and leaves the backwards that wait for other stages to the next call, or to
        `flush`. -> this rank's part of the mean loss, the norm of this stage's last gradient."""
        pairs = list(zip(idx.split(self.args.micro_batch), targets.split(self.args.micro_batch)))
        totals = torch.stack([(targets >= 0).sum() for _, targets in pairs])               # (M,)
        all_reduce(totals, self.mesh.data)
        shares, totals = totals / totals.sum().clamp(min=1), totals.clamp(min=1)
        self.parts |= {self.begun + i: Part(*pair, totals[i], shares[i], lr) for i, pair in enumerate(pairs)}
        self.norm = torch.zeros((), dtype=self.wide, device=self.mesh.device)
        done, self.begun = self.begun, self.begun + len(pairs)
        actions = self.actions(self.begun)
        left = min(self.begun, self.mesh.pp.size - 1 - self.mesh.pp.rank)    # backwards that wait for other stages
        for unit in self.units:
            unit.due = unit.uses
        loss = self.execute(actions[done:len(actions) - 2 * left])
        # what is still to come back is numbered from 0 again, as the first forwards of what follows
        shift = self.begun - left
        self.held = {(m - shift, piece, part): x for (m, piece, part), x in self.held.items()}
        self.parts = {m - shift: x for m, x in self.parts.items() if m >= shift}
        self.begun -= shift
        return loss, self.norm

    def step_alone(self, lr):
        """This stage's update with the gradient of one micro-batch. It's clipped by the norm of the stage's part: to
        ask the other stages for theirs would be to wait for them."""
        self.pending.drain()
        self.norm = self.grad_norm(self.mesh.stage)
        self.finish(self.norm, lr)
        for unit in self.units:
            unit.due = unit.uses

    def flush(self):
        """Ends what PipeDream has under way, so that all stages have seen the same micro-batches."""
        if self.begun:
            self.execute(self.actions(self.begun)[self.begun:])
            self.sent()
            self.held, self.parts, self.begun = {}, {}, 0

    # ---- the optimizer

    def grad_norm(self, group=None):
        """The norm of the whole gradient, or of the group's part of it, each element counted once: a weight that n
        ranks hold has weight 1 / n."""
        squares = []
        for unit in self.units:
            copies = unit.group.size if unit.stage == 0 else 1

            def weight_of(name):
                cut = any(cut.axis == "tp" for cut in cuts_of(name, self.mesh))
                return 1 / (copies * (1 if cut else self.mesh.tp.size))
            squares += [torch.linalg.vector_norm(unit.shard_grad[a:b], dtype=unit.wide) ** 2 * w
                        for a, b, w in unit.segments(weight_of)]
        total = torch.stack([*squares, torch.zeros((), dtype=self.wide, device=self.mesh.device)]).sum()
        all_reduce(total, group or self.mesh.world)
        return total.sqrt() / self.scale

    def find_gradient(self, idx, targets):
        """-> this rank's part of the loss, the norm of the whole gradient, what the experts were given."""
        loss = self.backward(idx, targets)
        return loss, self.grad_norm(), loss.new_empty(0) if self.counts is None else self.counts

    def apply_gradient(self, norm, rates):
        """AdamW on all units, the gradient clipped to norm grad_clip. rates: those of `finish`."""
        args, (lr, correction1, correction2, scale) = self.args, rates.unbind()
        clip = (args.grad_clip / norm).clamp(max=1.0) if args.grad_clip > 0 else torch.ones_like(norm)
        for unit in self.units:
            unit.step(self.adamw, args.weight_decay, clip / scale, lr, args.beta1, args.beta2, correction1, correction2)
        if self.args.graph:      # nothing may be under way when a graph ends
            self.settle()
        return ()

    def settle(self):
        for unit in self.units:
            unit.settle()

    def train_step(self, idx, targets, lr):
        """backward and step, on the GPU as two CUDA graphs once all is compiled and all communicators are open.
        -> this rank's part of the loss and the gradient's norm before clipping, scalars on the device: nothing here
        waits for the GPU but float16's look at overflow."""
        if self.stream:
            return self.advance(idx, targets, lr)
        self.calls += 1
        if self.args.graph and self.calls == 4:
            self.settle()
            torch.cuda.empty_cache()      # what the first steps took: the graphs have memory of their own
            self.gradient.capture(idx, targets)
            self.update.capture(self.gradient.outputs[1], self.rates(lr))
            self.forget()
        loss, norm, counts = self.gradient(idx, targets)
        self.counts = counts if counts.numel() else None
        self.finish(norm, lr)
        return loss, norm

    def step(self, lr):
        """One AdamW step with the accumulated gradient. Returns its norm before clipping, a scalar on the device."""
        norm = self.grad_norm()
        self.finish(norm, lr)
        return norm

    def rates(self, lr):
        """What differs from step to step, (4,) float64 on the device, where a graph finds it: the learning rate, Adam's
        corrections 1 - beta^t, the scale of the loss."""
        args, t = self.args, self.updates
        exact = torch.float32 if self.mesh.device.type == "mps" else torch.float64
        x = torch.tensor([lr, 1 - args.beta1 ** t, 1 - args.beta2 ** t, self.scale], dtype=exact)
        return x.to(self.mesh.device, non_blocking=True)

    def finish(self, norm, lr):
        """Takes the step, unless float16's gradient overflowed."""
        self.updates += 1
        rates = self.rates(lr)      # with the scale that this gradient has: the next line may change it
        if self.update_scale(norm):
            self.update(norm, rates)
        else:
            self.updates -= 1
        self.forget()

    def forget(self):
        """The gradient has served."""
        for unit in self.units:
            unit.spend()

    def update_scale(self, norm):
        """float16's loss scaler: True if the step is to be taken."""
        if not self.scaled:
            return True
        good = bool(norm.isfinite())
        self.good_steps = self.good_steps + 1 if good else 0
        if not good:
            self.scale = max(1.0, self.scale / 2)
        elif self.good_steps % 2000 == 0:
            self.scale *= 2
        return good

    def traced(self, step):
        """Runs step() and notes what each rank did when, in seconds since all began together; all ranks call it.
        -> its Timeline, and [(rank, moment, kind, bytes)] of the messages and collectives launched on the way."""
        self.flush()
        self.settle()
        self.marks, LEDGER.launched = [], []
        for replay in (self.gradient, self.update):
            if replay.graph:      # once more, with the marks in it
                replay.capture(*replay.inputs)
        self.forget()
        self.mesh.any(False)      # with the device idle and the ranks together
        begin = now(self.mesh.device)
        step()
        self.flush()
        marks, launched, self.marks, LEDGER.launched = self.marks, LEDGER.launched, None, None
        self.recorded = marks, launched      # graphs go on recording these events: they have to stay
        times = [between(begin, moment) for _, moment in marks]
        rank = self.mesh.world.ranks[self.mesh.world.rank]
        mine = ([(a, b, action) for a, b, (action, _) in zip(times, times[1:], marks[1:]) if action],
                [(rank, between(begin, at), kind, n) for at, kind, n in launched])
        everyone = [mine]
        if self.mesh.world.size > 1:
            everyone = [None] * self.mesh.world.size
            dist.all_gather_object(everyone, mine, self.mesh.world.process_group)
        rows, launches = zip(*everyone)
        return Timeline(rows), [launch for one in launches for launch in one]

    # ---- whole parameters in and out

    @torch.no_grad()
    def fill(self, kind, source):
        """Takes up `kind` ("master", "exp_avg", "exp_avg_sq") from source(name), whole tensors, one at a time."""
        for unit in self.units:
            flat = getattr(unit, kind)
            for name, begin, end, at in unit.held():
                flat[begin:end] = local_part(name, source(name), self.mesh).flatten()[begin - at:end - at].to(flat)
            if kind == "master" and unit.copied:
                unit.settle()
                unit.own.copy_(unit.master)
                unit.spread()

    @torch.no_grad()
    def whole(self, kind):
        """{name: tensor of full shape on the CPU} of master, exp_avg or exp_avg_sq; {} but on rank 0. All call it."""
        found, pp = {}, self.mesh.pp
        writes = self.mesh.data.rank == self.mesh.tp.rank == 0               # this stage's go to rank 0 from here
        for unit in self.units:
            flat = getattr(unit, kind)
            if unit.stage and unit.group.size > 1:
                flat = flat.new_empty(unit.padded)
                all_gather(flat, getattr(unit, kind), unit.group)
            for name, x in zip(unit.names, unit.views(flat)):
                for cut in reversed(cuts_of(name, self.mesh)):
                    group = getattr(self.mesh, cut.axis)
                    parts = x.new_empty(group.size, *x.shape)
                    all_gather(parts, x.contiguous()[None], group)
                    x = cut.whole(list(parts), self.shapes[name][cut.dim])
                if writes:
                    found[name] = x.cpu()
        if writes and pp.rank:
            dist.send_object_list([list(found)], 0, pp.process_group, self.mesh.device)
            for x in found.values():
                dist.send(x.to(self.mesh.device).contiguous(), 0, pp.process_group)
        for stage in pp.ranks[1:] if self.main else []:
            names = [None]
            dist.recv_object_list(names, stage, pp.process_group, self.mesh.device)
            for name in names[0]:
                x = torch.empty(self.shapes[name], dtype=self.wide, device=self.mesh.device)
                dist.recv(x, stage, pp.process_group)
                found[name] = x.cpu()
        return {name: found[name] for name in self.shapes} if self.main else {}

    def state(self):
        """What a checkpoint keeps, of full shapes on the CPU of rank 0; all ranks call it."""
        return {"model": self.whole("master"), "updates": self.updates,
                "moments": {kind: self.whole(kind) for kind in ("exp_avg", "exp_avg_sq")},
                "scaler": {"scale": self.scale, "good_steps": self.good_steps} if self.scaled else None}

    def load(self, state):
        """Takes up what `state` gave, on whatever mesh that was, but for the weights: with those it was made. UserError
        for moments that are not numbers."""
        for kind, named in state["moments"].items():
            self.fill(kind, named.get)
        flats = [getattr(unit, kind) for unit in self.units for kind in state["moments"]]
        if self.mesh.any(not all(flat.isfinite().all() for flat in flats)):
            raise UserError("the checkpoint holds moments that are not numbers")
        self.updates = state["updates"]
        if self.scaled and state["scaler"]:
            self.scale, self.good_steps = state["scaler"]["scale"], state["scaler"]["good_steps"]

    def state_bytes(self):
        """Bytes of weights, masters and moments that this rank keeps, and of gradients after a backward."""
        kept = {}
        for unit in self.units:
            for x in (unit.full if unit.stage < 3 else unit.own, unit.grad, unit.master, unit.exp_avg, unit.exp_avg_sq):
                if x is not None:
                    kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return sum(kept.values())


# --------------------------------------------------------------------------------------------------------------
# What each mode costs, predicted

def zero_bytes(zero, N, grad=2):
    """Bytes of state a parameter, in bfloat16: the table above. grad: of a gradient; 4 if several add up in a step."""
    return {0: 14 + grad, 1: 2 + grad + 12 / N, 2: 2 + (12 + grad) / N, 3: (14 + grad) / N}[zero]


class Work(NamedTuple):
    """What a rank has and does in a step, as far as it decides what it sends."""

    units: list              # (parameters, ranks with the same, ZeRO's stage, bytes of a gradient, gathers of weights)
    sequences: int
    parts: int               # micro-batches, or their slices
    layers: int
    borders: int             # of its pieces with those of other ranks
    ends: int                # of the model: the embedding, the loss
    last: bool               # whether it has the loss


def traffic(config, work, tp, ep, recompute, size, wide):
    """What a rank sends in a step, by the papers' formulas: yields (axis, kind, bytes). size, wide: bytes of an
    activation and of a number of the loss."""
    def ring(n, N):
        return n * (N - 1) / N
    for n, N, stage, grad, gathers in work.units:
        if stage == 0:
            yield "data", "all_reduce", ring(2 * n * grad, N)
        else:
            yield "data", "all_gather", ring(n * size * gathers, N)
            yield "data", "reduce_scatter", ring(n * (grad if stage == 1 else size * work.parts), N)
    tokens, again = work.sequences * config.block_size, int(recompute)       # forward's messages once more in backward
    x = tokens * config.n_embd * size                                        # activations, bytes
    slots = config.n_expert * capacity(config, config.block_size) / config.block_size if config.n_expert else 0
    yield "pipeline", "send", x * work.borders      # to the piece after; gradients to the piece before
    # attention's f and g, forward and backward, and the MLP's, of tokens or of the experts' slots; what a dense block's
    # last g gives isn't needed in backward, and so isn't computed again; three numbers a token for the loss
    block = (2 + again) * (1 + slots) if config.n_expert else 4 + again
    yield "tensor", "all_reduce", ring(2 * (x * (work.layers * block + work.ends) + 3 * tokens * wide * work.last), tp)
    yield "expert", "all_to_all", ring(x * slots * work.layers * (4 + 2 * again), ep)      # there and back


def predicted_bytes(engine, T):
    """Bytes that a rank sends in a training step of T tokens a sequence, {kind: bytes}."""
    mesh, args, config, models = engine.mesh, engine.args, engine.config, engine.models
    size, wide, B = args.dtype.itemsize, engine.wide.itemsize, args.batch_size // mesh.data.size
    parts = -(-B // args.micro_batch) * len(engine.slices)
    units = [(unit.padded, unit.group.size, unit.stage, unit.grad_dtype.itemsize,
              (parts if unit in engine.outer else 2 * parts) if unit.stage == 3 else 1) for unit in engine.units]
    work = Work(units, B, parts, sum(len(m.layers) for m in models.values()),
                sum((i > 0) + (i < engine.pieces - 1) for i in models) if mesh.pp.size > 1 else 0,
                sum(m.first + m.last for m in models.values()), any(m.last for m in models.values()))
    sent = Counter()
    for _, kind, n in traffic(replace(config, block_size=T), work, mesh.tp.size, mesh.ep.size, args.recompute, size,
                              wide):
        sent[kind] += n
    for n, group in ((8, mesh.data), (wide, mesh.world)):                    # number of targets; the gradient's norm
        sent["all_reduce"] += 2 * n * (group.size - 1) / group.size
    return {kind: round(n) for kind, n in sent.items() if n}


# --------------------------------------------------------------------------------------------------------------
# A plan for machines that aren't here: python parallel.py --plan --preset=gpt2-xl --gpus=1024 --tp=8 --pp=16
#
# The same formulas for any model, layout and card. Memory and bytes are exact to a few per cent; times are as good as
# the rates that are given, and assume that data parallelism hides behind backward, and nothing else.

class Stage(NamedTuple):
    """Bytes that a rank of a pipeline's stage holds, and what it sends a step, {kind: (bytes, seconds)}."""

    parameters: int
    weights: float
    gradients: float
    moments: float           # with the float32 masters
    activations: float
    held: int                # micro-batches' activations at once
    sent: dict

    @property
    def memory(self):
        return self.weights + self.gradients + self.moments + self.activations


def local_parameters(config, args):
    """(P, 3) parameters of a rank of each stage: dense ones, experts', and of an embedding that two stages have."""
    one = argparse.Namespace(tp=argparse.Namespace(size=args.tp, rank=0), ep=argparse.Namespace(size=args.ep, rank=0))
    pieces, found = args.pp * args.chunks, np.zeros((args.pp, 3), np.int64)
    of_layer = [i % args.pp for i, part in enumerate(np.array_split(range(config.n_layer), pieces)) for _ in part]
    for name, p in GPT(config, seed=None, device="meta").named_parameters():
        block = re.match(r"blocks\.(\d+)\.", name)
        if block:
            stages = {of_layer[int(block[1])]}
        elif name.startswith(("wte", "wpe")):      # a tied embedding is on the last stage too
            stages = {0, args.pp - 1} if name == "wte.weight" and config.tied else {0}
        else:
            stages = {args.pp - 1}
        for stage in stages:
            found[stage, 2 if len(stages) > 1 else int("experts." in name)] += local_part(name, p, one).numel()
    return found


def rate(args, ranks, apart):
    """Bytes a second among so many ranks that are so far apart: within a node, or between nodes."""
    return (args.link if ranks * apart <= args.node else args.net) * 1e9


def predict_stage(config, args, parameters, layers, held, borders, ends, last):
    """-> Stage, of a rank with these parameters, as local_parameters gives them, and so many layers, micro-batches held
    at once, borders and ends as in Work."""
    B, T, C = args.batch_size // args.data, config.block_size, config.n_embd
    M = B // args.micro_batch
    updates = M if args.schedule == "pipedream" else 1                       # of a step, each with its gradient
    wide = 2 if updates == M else 4                                          # of a gradient; 4 if several add up
    groups = [(int(n), N, zero) for n, N, zero in zip(
        parameters, (args.data, args.data // args.ep, 2 * args.data), (args.zero, args.zero, min(args.zero, 1))) if n]
    weights, gradients, moments = (sum(size * n / (N if zero >= stage else 1) for n, N, zero in groups)
                                   for size, stage in ((2, 3), (wide, 2), (12, 1)))
    units = [(n * updates, N, zero, wide, 2 * M if zero == 3 else 1) for n, N, zero in groups]
    ranks = {"data": (args.data, args.tp * args.pp), "pipeline": (args.pp, args.tp), "tensor": (args.tp, 1),
             "expert": (args.ep, args.tp * args.pp)}                         # how many, and how far apart
    sent = Counter()
    for axis, _, n in traffic(config, Work(units, B, M, layers, borders if args.pp > 1 else 0, ends, last), args.tp,
                              args.ep, args.recompute, 2, 4):
        sent[axis] += n
    # two norms, in and out; q, k, v, o and the MLP's 8 C, of tokens or slots, which tensor parallelism cuts
    slots = config.n_expert * capacity(config, T) / T if config.n_expert else 1
    token = 2 * C * (1 if args.recompute else 4 + (4 + 8 * slots) / args.tp)
    activations = args.micro_batch * T * token * layers / args.chunks * held
    return Stage(int(sum(parameters)), weights, gradients, moments, activations, held,
                 {axis: (n, n / rate(args, *ranks[axis])) for axis, n in sent.items() if n})


def predict(config, args):
    """-> the Stages of a pipeline, and {bubble, step: seconds, exposed: seconds of it for data parallelism, compute: of
    a rank, tokens: a second, mfu}. args: as `planned` gives them."""
    M, pieces = args.batch_size // args.data // args.micro_batch, args.pp * args.chunks
    lists = [SCHEDULES[args.schedule](args.chunks, 1)(s, args.pp, M) for s in range(args.pp)]
    line, counts = simulate(lists), [len(part) for part in np.array_split(range(config.n_layer), pieces)]
    stages = [predict_stage(config, args, n, sum(counts[s::args.pp]), line.live(s),
                            *(sum(any_of(piece) for piece in range(s, pieces, args.pp)) for any_of in (
                                lambda piece: (piece > 0) + (piece < pieces - 1),
                                lambda piece: (piece == 0) + (piece == pieces - 1))), s == args.pp - 1)
              for s, n in enumerate(local_parameters(config, args))]
    stages = [x._replace(weights=x.weights * line.versions(s)) for s, x in enumerate(stages)]
    flops = flops_per_token(config) * args.batch_size * config.block_size
    compute = flops * (4 / 3 if args.recompute else 1) / args.gpus / (args.efficiency * args.peak * 1e12)
    waits = max(sum(stage.sent[kind][1] for kind in ("tensor", "expert") if kind in stage.sent) for stage in stages)
    behind = compute if args.zero == 3 else compute / M * 2 / 3              # what data parallelism hides behind
    exposed = max(0.0, max(stage.sent.get("data", (0, 0))[1] for stage in stages) - behind)
    bubble = 0.0 if args.schedule == "pipedream" else line.bubble            # whose stream isn't flushed
    step = (compute + waits) / (1 - bubble) + exposed
    return stages, dict(bubble=bubble, compute=compute, waits=waits, exposed=exposed, step=step,
                        tokens=args.batch_size * config.block_size / step,
                        mfu=flops / step / args.gpus / (args.peak * 1e12))


def plan_options():
    sys.modules.setdefault("parallel", sys.modules[__name__])      # train.py imports this very module
    from train import PRESETS
    p = Options(prog="parallel.py", description="Without options the schedules are drawn, or under torchrun each mode "
                "is measured. With --plan: what a training step would cost elsewhere.")
    p.add_argument("--plan", action="store_true", help="predict memory, bytes, bubble and MFU; starts no process")
    shapes = {name: preset for name, preset in PRESETS.items() if "n_layer" in preset}
    p.add_argument("--preset", choices=shapes, default="gpt2-xl", help="the model's shape (default: gpt2-xl)")
    for name, kind, default, text in (
            ("n_layer", int, None, "instead of the preset's, as the next three"), ("n_head", int, None, ""),
            ("n_embd", int, None, ""), ("block_size", int, None, "tokens of a sequence"),
            ("vocab_size", int, 50257, "number of ids"), ("n_expert", int, 0, "experts a block"),
            ("gpus", int, 8, "ranks in all"), ("tp", int, 1, "tensor-parallel ranks"), ("pp", int, 1, "stages"),
            ("ep", int, 1, "expert ranks"), ("chunks", int, 1, "pieces a stage, for interleaved"),
            ("micro_batch", int, 1, "sequences of a micro-batch"), ("batch_size", int, None, "sequences of a step "
             "(default: 4 micro-batches a stage on each data rank)"), ("node", int, 8, "GPUs of a node"),
            ("memory", float, 141.0, "GB of a GPU"), ("peak", float, 989.0, "TFLOP/s of a GPU by its data sheet"),
            ("efficiency", float, 0.5, "share of that which its kernels reach"),
            ("link", float, 300.0, "GB/s of a GPU within a node"), ("net", float, 45.0, "GB/s of a GPU between nodes")):
        p.add_argument(f"--{name}", type=kind, default=default,
                       help=text if default is None else f"{text} (default: {default})")
    p.add_argument("--zero", type=int, choices=range(4), default=0, help="ZeRO's stage (default: 0)")
    p.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="(default: 1f1b)")
    p.add_argument("--recompute", action="store_true", help="activations again in backward")
    return p, shapes


def planned(argv=None):
    """The command line -> (args, config). UserError for what can't be laid out."""
    p, shapes = plan_options()
    args = p.parse(argv)
    if not args.plan:
        raise UserError("options are for --plan; without it there are none")
    shape = shapes[args.preset]
    fields = {name: shape.get(name) if getattr(args, name) is None else getattr(args, name)
              for name in ("n_layer", "n_head", "n_embd", "block_size")}
    for name in ("gpus", "tp", "pp", "ep", "chunks", "micro_batch", "batch_size", "node"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name}={getattr(args, name)} must be at least 1")
    for name in ("memory", "peak", "efficiency", "link", "net"):
        most = 1 if name == "efficiency" else 1e9
        if not 1e-9 <= getattr(args, name) <= most:
            raise UserError(f"{name}={getattr(args, name)} must be above 0 and at most {most:g}")
    for name, most in (("n_layer", 10 ** 4), ("n_embd", 10 ** 6), ("vocab_size", 10 ** 9), ("block_size", 10 ** 9)):
        if (getattr(args, name) or 0) > most:      # or it would take for ever
            raise UserError(f"{name}={getattr(args, name)} must be at most {most}")
    check_schedule(args)
    config = GPTConfig(vocab_size=args.vocab_size, tied=args.schedule != "pipedream", bias=False,
                       n_expert=args.n_expert, **fields)
    if args.gpus % (args.tp * args.pp * args.ep):
        raise UserError(f"gpus={args.gpus} must be a multiple of tp={args.tp} x pp={args.pp} x ep={args.ep}")
    check_layout(config, args.ep, args.pp * args.chunks, 1)
    if config.n_head % args.tp:
        print(f"n_head={config.n_head} can't be split over tp={args.tp}, so training would refuse: predicted as if it "
              f"could", file=sys.stderr)
    args.data = args.gpus // (args.tp * args.pp)                             # ranks that see different tokens
    if args.batch_size is None:
        args.batch_size = args.data * args.micro_batch * 4 * args.pp
    if args.batch_size % (args.data * args.micro_batch):
        raise UserError(f"batch_size={args.batch_size} must be a multiple of {args.data} data ranks x "
                        f"micro_batch={args.micro_batch}")
    M = args.batch_size // args.data // args.micro_batch
    if M * args.pp * args.chunks > 200_000:      # actions to simulate
        raise UserError(f"batch_size={args.batch_size} is {M} micro-batches on {args.pp * args.chunks} pieces; at most "
                        "200000 of one on the other are simulated")
    return args, config


def show_plan(args, config):
    stages, found = predict(config, args)
    total = GPT(config, seed=None, device="meta").num_params()
    print(f"{total:,} parameters, {2 * total / 1e9:,.1f} GB in bfloat16, on {args.gpus:,} GPUs: data "
          f"{args.data // args.ep} x expert {args.ep} x pipeline {args.pp} x tensor {args.tp}, ZeRO {args.zero}\n"
          f"{args.batch_size:,} sequences of {config.block_size:,} tokens a step, "
          f"{args.batch_size // args.data // args.micro_batch} micro-batches of {args.micro_batch} on each data rank, "
          f"{args.schedule}\n\n"
          f"GB of a rank {'parameters':>16}{'weights':>9}{'gradients':>11}{'moments':>9}{'activations':>13}{'held':>6}"
          f"{'all':>8}")
    fullest = max(range(args.pp), key=lambda s: stages[s].memory)
    for s in sorted({0, fullest, args.pp - 1}):
        x = stages[s]
        print(f"stage {s:<7}{x.parameters:16,}{x.weights / 1e9:9.2f}{x.gradients / 1e9:11.2f}{x.moments / 1e9:9.2f}"
              f"{x.activations / 1e9:13.2f}{x.held:6}{x.memory / 1e9:8.2f}")
    fits = stages[fullest].memory / 1e9 <= args.memory
    print(f"{'fits' if fits else 'does not fit'}: {stages[fullest].memory / 1e9:.1f} of {args.memory:g} GB\n")
    kinds = {kind: max((x.sent[kind] for x in stages if kind in x.sent)) for x in stages for kind in x.sent}
    for kind, (n, seconds) in kinds.items():
        print(f"sent a step for {kind:10}{n / 1e9:10.3f} GB{1e3 * seconds:10.1f} ms")
    print(f"compute {1e3 * found['compute']:.1f} ms, waiting for tensor and expert parallelism "
          f"{1e3 * found['waits']:.1f}, bubble {found['bubble']:.1%}, data parallelism in sight "
          f"{1e3 * found['exposed']:.1f} ms\n"
          f"a step {1e3 * found['step']:.1f} ms: {found['tokens']:,.0f} tokens/s, MFU {found['mfu']:.1%}")


# --------------------------------------------------------------------------------------------------------------
# The chapter's claims, predicted beside measured: torchrun --nproc_per_node=4 parallel.py

def model_of(N, mode):
    """The shape on which N ranks show a mode: every cut comes out even."""
    experts = dict(n_expert=2 * N) if "ep" in mode else {}
    return GPTConfig(vocab_size=65, block_size=64, n_layer=max(4, N), n_head=2 * N, n_embd=24 * N, **experts)


def modes(N):
    """(name, what is cut, options) of what N ranks can show."""
    found = [("data", "the batch", {}), ("zero 1", "+ masters, moments", dict(zero=1)),
             ("zero 2", "+ gradients", dict(zero=2)), ("zero 3", "+ weights", dict(zero=3)),
             ("tensor", "matrices, heads, vocabulary", dict(tp=N)), ("expert", "the batch, experts", dict(ep=N))]
    if N > 1:
        found += [("pipeline", "the layers", dict(pp=N)),
                  ("pipeline, sliced", "the layers, the sequences", dict(pp=N, slices=[16] * 4))]
    if N % 2 == 0 and N > 2:
        found += [("pipeline 2, tensor 2", "the layers; matrices", dict(pp=2, tp=2)),
                  ("tensor 2, zero 3", "matrices; weights", dict(tp=2, zero=3)),
                  ("expert 2, tensor 2", "experts; matrices", dict(ep=2, tp=2))]
    return found


def show(config, mode, device, steps=4, T=64):
    """-> the numbers of one mode, measured on `steps` steps in float32 beside one process."""
    mesh = Mesh(device, mode.get("ep", 1), mode.get("pp", 1), mode.get("tp", 1))
    B = 4 * mesh.world.size
    args = argparse.Namespace(device=device, dtype=torch.float32, zero=mode.get("zero", 0), batch_size=B, beta1=0.9,
                              beta2=0.95, weight_decay=0.1, grad_clip=1.0, attention="auto", compile=False, seed=1,
                              micro_batch=4, schedule="1f1b", chunks=1, graph=False,
                              partition=None, slices=mode.get("slices"), recompute=False)
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, config.vocab_size, (2, B, T), generator=g).to(device) for _ in range(steps)]
    runs = []
    for place, slices in ((mesh, args.slices), (Mesh.alone(device), None)):
        engine = Parallel(config, place, argparse.Namespace(**vars(args) | dict(slices=slices)))
        losses = []
        for step, batch in enumerate(batches):
            if step == steps - 1:
                mesh.any(False)                                              # all start the last one together
                LEDGER.clear()
                begin = time.perf_counter()
            loss = engine.backward(*(x.chunk(place.data.size)[place.data.rank] for x in batch))
            engine.step(1e-3)
            if step == steps - 1:
                sent = sum(LEDGER.values())
                loss.item()
                seconds = time.perf_counter() - begin
            loss = loss / engine.copies
            all_reduce(loss, place.world)
            losses.append(loss.item())
        runs.append((engine, losses, sent, seconds))
    (engine, losses, sent, seconds), (_, want, _, _) = runs
    half = Parallel(config, mesh, argparse.Namespace(**vars(args) | dict(dtype=torch.bfloat16, micro_batch=B)))
    half.backward(*(x.chunk(mesh.data.size)[mesh.data.rank] for x in batches[0]))
    table = sum(unit.numel * zero_bytes(args.zero, unit.group.size, unit.grad_dtype.itemsize) for unit in half.units)
    return (sum(predicted_bytes(engine, T).values()), sent, table / engine.num_params,
            half.state_bytes() / engine.num_params, max(abs(a / b - 1) for a, b in zip(losses, want)), seconds)


def show_schedules(P=4, M=6):
    """The schedules of P ranks as pictures, with what they cost: predicted, and as simulated."""
    print(f"{P} ranks, {M} micro-batches; a backward takes twice a forward")
    rows = [("naive", naive, (P - 1) / P), ("GPipe", gpipe, (P - 1) / (M + P - 1)),
            ("1F1B", one_f_one_b, (P - 1) / (M + P - 1)),
            ("interleaved, 2 pieces a rank", partial(interleaved, v=2), (P - 1) / (2 * M + P - 1)),
            ("PipeDream", pipedream, (P - 1) / (M + P - 1)),
            ("TeraPipe, 2 slices", partial(terapipe, slices=2), (P - 1) / (2 * M + P - 1))]
    for name, schedule, bubble in rows:
        line = simulate([schedule(s, P, M) for s in range(P)])
        print(f"\n{name}: bubble predicted {bubble:.3f}, simulated {line.bubble:.3f}; most activations held, by rank: "
              f"{[line.live(s) for s in range(P)]}; versions of the weights: {[line.versions(s) for s in range(P)]}")
        print(line.draw())


def chapter():
    """Prints the tables; every rank calls it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with joined() as processes:
        mesh = processes.mesh(device)
        N, device = mesh.world.size, mesh.device
        if N == 1:
            show_schedules()
            print()
        if mesh.world.rank == 0:
            print(f"{N} ranks on {device.type}; bytes that a rank sends a step, and of state a parameter in bfloat16\n"
                  f"{'mode':22}{'what is cut':29}{'sent: predicted':>16}{'measured':>12}{'state: predicted':>18}"
                  f"{'measured':>10}{'difference':>12}{'ms a step':>11}")
        for name, cut, mode in modes(N):
            a, b, c, d, difference, seconds = show(model_of(N, mode), mode, device)
            if mesh.world.rank == 0:
                print(f"{name:22}{cut:29}{a:16,}{b:12,}{c:18.2f}{d:10.2f}{difference:12.0e}{1e3 * seconds:11.1f}",
                      flush=True)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv:
        show_plan(*planned(argv))
    else:
        chapter()


if __name__ == "__main__":
    torch.set_num_threads(max(1, torch.get_num_threads() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    sys.exit(program("parallel.py", main))
