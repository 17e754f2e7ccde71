"""parallel.py: every mesh against one process, by real processes on gloo. The ranks of a world are started once and run
all its cases; each case is a function here that returns what the tests then look at."""

import itertools
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback
import weakref
from argparse import Namespace
from functools import cache, partial
from pathlib import Path

if __name__ == "__main__":      # a rank
    sys.path.insert(0, str(Path(__file__).parent.parent))
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel
from model import GPT, GPTConfig, MoE
from parallel import (LEDGER, Mesh, Parallel, all_gather, all_reduce, all_reduce_gradients, all_to_all, broadcast, channels,
                      gpipe, interleaved, naive, one_f_one_b, partition, pipedream, reduce_scatter, simulate, slice_tokens,
                      terapipe)

ROOT = Path(__file__).parent.parent
ODD = dict(vocab_size=65, block_size=8, n_layer=4, n_embd=36)
OPTIONS = dict(device=torch.device("cpu"), beta1=0.9, beta2=0.95, weight_decay=0.3, grad_clip=0.5, attention="auto",
               compile=False, seed=5, batch_size=12, schedule="1f1b", chunks=1, graph=False,
               partition=None, slices=None, recompute=False)
MODES = {2: [dict(), dict(zero=1), dict(zero=2), dict(zero=3), dict(tp=2), dict(tp=2, zero=3), dict(ep=2), dict(ep=2, top_k=2),
             dict(ep=2, zero=3), dict(pp=2), dict(pp=2, schedule="gpipe", zero=3), dict(pp=2, ep=1, zero=1),
             dict(zero=3, slices=[5, 3]), dict(zero=3, recompute=True), dict(tp=2, recompute=True), dict(ep=2, recompute=True)],
         3: [dict(pp=3), dict(), dict(zero=1), dict(zero=2), dict(zero=3), dict(tp=3)],
         4: [dict(pp=2, tp=2), dict(pp=2, zero=2), dict(pp=4), dict(pp=2, schedule="interleaved", chunks=2),
             dict(pp=2, ep=2, top_k=2), dict(tp=2), dict(tp=2, zero=1), dict(tp=2, zero=2), dict(tp=2, zero=3), dict(ep=2, zero=2),
             dict(ep=2, tp=2, top_k=2, bias=False), dict(ep=4, zero=1), dict(ep=2, zero=3, top_k=2),
             dict(pp=2, tp=2, slices=[1, 4, 3]), dict(pp=2, zero=3, recompute=True)],
         8: [dict(pp=2, ep=2), dict(pp=2, tp=2, zero=2), dict(pp=4, schedule="interleaved", zero=1), dict(pp=4, tp=2),
             dict(pp=2, tp=2, zero=3), dict(ep=2, tp=2, zero=3), dict(pp=2, ep=2, tp=2, top_k=2),
             dict(pp=2, ep=2, tp=2, zero=3, schedule="gpipe", recompute=True)]}
MOE = dict(n_expert=4, capacity_factor=0.7, aux_weight=0.1)


# ---- in the ranks -----------------------------------------------------------------------------------------------

@cache
def mesh_of(ep=1, pp=1, tp=1):
    """One for all cases: each has a dozen groups, with threads of their own."""
    return Mesh(ep=ep, pp=pp, tp=tp)


def shape(mode, world):
    """The model that a mode is tried on: with experts, of which tokens are dropped, if it's about them."""
    config = dict(ODD, n_head=3 if world == 3 else 4, bias=mode.get("bias", True))
    return GPTConfig(**config, **(dict(MOE, top_k=mode.get("top_k", 1)) if "ep" in mode else {}))


def batch(step, seed):
    """12 sequences, each with its own number of targets."""
    g = torch.Generator().manual_seed(seed + step)
    idx, targets = (torch.randint(0, 65, (12, 8), generator=g) for _ in range(2))
    targets[torch.rand(12, 8, generator=g) < 0.3] = -1
    targets[1] = -1
    return idx, targets


def engine_of(mode, world, dtype, accumulation=2, start=None, **options):
    mesh = mesh_of(ep=mode.get("ep", 1), pp=mode.get("pp", 1), tp=mode.get("tp", 1))
    options = {name: mode[name] for name in ("schedule", "chunks", "slices", "recompute") if name in mode} | options
    micro = 12 // mesh.data.size // accumulation
    args = Namespace(**{**OPTIONS, "zero": mode.get("zero", 0), "dtype": dtype, "micro_batch": micro, **options})
    return Parallel(shape(mode, world), mesh, args, start)


def mine(engine, tensors):
    data = engine.mesh.data
    return [x.chunk(data.size)[data.rank] for x in tensors]


def rate(dtype):
    """Adam turns the rounding of a gradient that is truly zero into steps of full size, and a router's near tie turns
    rounding into another expert: so in float32 steps are small."""
    return 1e-2 if dtype == torch.float64 else 3e-4


def steps(engine, seed, n=5, first=0):
    """n steps -> [(loss, norm)] of the whole batch."""
    found = []
    for step in range(first, first + n):
        loss = engine.backward(*mine(engine, batch(step, seed))).double() / engine.copies
        all_reduce(loss, engine.mesh.world)
        found.append((float(loss), float(engine.step(rate(engine.args.dtype)))))
    return found


def plain(config, dtype, seed, n=5):
    """The same by one process: the model, torch's AdamW, the batch in one piece. -> [(loss, norm)], weights."""
    model = GPT(config, seed=OPTIONS["seed"]).to(dtype)
    matrices, others = ([p for p in model.named_parameters() if parallel.is_matrix(*p) == m] for m in (True, False))
    adamw = torch.optim.AdamW([{"params": [p for _, p in matrices], "weight_decay": 0.3},
                               {"params": [p for _, p in others], "weight_decay": 0.0}], lr=rate(dtype), betas=(0.9, 0.95))
    found = []
    for step in range(n):
        loss = model.loss(*batch(step, seed))
        adamw.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()      # float32 sums are off by 1e-5
        for p in model.parameters():
            p.grad *= min(1, 0.5 / norm)
        adamw.step()
        found.append((float(loss.detach()), float(norm)))
    return found, {name: p.detach() for name, p in model.named_parameters()}


def training(world, seed):
    """Every mode, in float64 and float32: losses, norms and weights beside the plain ones."""
    found = {}
    for mode in MODES[world]:
        for dtype in (torch.float64, torch.float32):
            engine = engine_of(mode, world, dtype)
            got, weights = steps(engine, seed), engine.whole("master")
            if dist.get_rank() == 0:
                want, want_weights = plain(shape(mode, world), dtype, seed)
                relative = max(abs(a / b - 1) for x, y in zip(got, want) for a, b in zip(x, y))
                worst = max((weights[name] - want_weights[name]).abs().max().item() for name in want_weights)
                clipped = all(norm > 0.5 for _, norm in want)
                found[str(mode), str(dtype)] = relative, worst, clipped, float(engine.counts[:, -1].sum()) if "ep" in mode else 0
    return found


def compiled(world, seed):
    """With torch.compile: one graph a block, whatever is cut."""
    found, modes = {}, [dict(tp=2, zero=3), dict(ep=2, zero=2)]
    compile_, compile_blocks = torch.compile, GPT.compile_blocks
    torch.compile = lambda f, **_: compile_(f, backend="aot_eager")          # inductor needs a C compiler, and minutes
    GPT.compile_blocks = lambda model: [b.compile(dynamic=False, backend="aot_eager", fullgraph=True) for b in model.blocks.values()]
    try:
        for mode in modes:
            got = steps(engine_of(mode, world, torch.float64, compile=True), seed)
            found[str(mode)] = got, plain(shape(mode, world), torch.float64, seed)[0]
    finally:
        torch.compile, GPT.compile_blocks = compile_, compile_blocks
    return found


def ledger(world, seed):
    """Bytes that a step sends, beside parallel.predicted_bytes."""
    found = {}
    for mode in MODES[world]:
        engine = engine_of(mode, world, torch.float32)
        steps(engine, seed, 1)                                               # the first gathers fresh weights
        LEDGER.clear()
        steps(engine, seed, 1, first=1)
        LEDGER["all_reduce"] -= 2 * 8 * (world - 1) // world                 # the loss, added up here
        found[str(mode)] = dict(LEDGER), parallel.predicted_bytes(engine, 8)
    return found


def state_bytes(world, seed):
    """ZeRO's table, in bfloat16, on a model whose padding doesn't count."""
    found = {}
    for zero in range(4):
        engine = engine_of(dict(zero=zero), world, torch.bfloat16, accumulation=1)
        engine.backward(*(x.chunk(world)[engine.mesh.data.rank] for x in batch(0, seed)))
        padded = engine.num_params + 63 * 36                                 # rows 65 to 127 of the embedding
        found[zero] = engine.state_bytes() / padded, parallel.zero_bytes(zero, world)
    return found


def gathered(world, seed):
    """Whether weights are let go of where a step ends, and whether others than rank 0 copy any to the host."""
    found, cpu = {}, torch.Tensor.cpu
    for mode in (dict(zero=3), dict(zero=3, recompute=True), dict(zero=2, recompute=True), dict(tp=2, zero=1)):
        engine, copies = engine_of(mode, world, torch.float32), []
        steps(engine, seed, 1)
        kept = [key for unit in engine.units for places in unit.slots.values() for holder, key in places if holder[key] is not None]
        torch.Tensor.cpu = lambda x, copies=copies: copies.append(x) or cpu(x)
        try:
            engine.whole("exp_avg")
        finally:
            torch.Tensor.cpu = cpu
        found[str(mode)] = len(kept), len(copies), len(engine.shapes) if dist.get_rank() == 0 else 0
    return found


def deep_pipeline(world, seed):
    """The chapter's rows with as many stages as ranks, more than its model has layers elsewhere."""
    return [parallel.show(parallel.model_of(world, mode), mode, torch.device("cpu"), 2)
            for _, _, mode in parallel.modes(world) if mode.get("pp") == world]


class Watch(TorchDispatchMode):
    """The most bytes alive at once of tensors other than those in `kept`."""

    def __init__(self, kept):
        super().__init__()
        self.alive, self.peak, self.known = 0, 0, {x.untyped_storage()._cdata: 0 for x in kept if x is not None}

    def gone(self, key):
        self.alive -= self.known.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.known:
                    self.known[key] = storage.nbytes()
                    self.alive += storage.nbytes()
                    weakref.finalize(storage, self.gone, key)
        self.peak = max(self.peak, self.alive)
        return out


def peak(world, seed):
    """Peak bytes of a step beyond what is kept, for a deep narrow model whose weights are nearly everything."""
    found, config = {}, GPTConfig(vocab_size=65, block_size=8, n_layer=24, n_head=4, n_embd=96)
    for zero in range(4):
        args = Namespace(**OPTIONS | dict(batch_size=2, micro_batch=1, zero=zero, dtype=torch.float32))
        engine = Parallel(config, mesh_of(), args)
        idx, targets = (x[:1] for x in batch(0, seed))
        engine.backward(idx, targets), engine.step(1e-2)
        watch = Watch([x for u in engine.units for x in (u.full, u.own, u.master, u.exp_avg, u.exp_avg_sq)])
        with watch:
            engine.backward(idx, targets)
            engine.step(1e-2)
        found[zero] = engine.state_bytes(), watch.peak, 4 * engine.num_params
    return found


def collectives(world, seed):
    """Each beside its definition; what isn't contiguous is refused by all of them."""
    rank, group, found = dist.get_rank(), mesh_of().world, []
    everyone = [torch.arange(6.0).view(world, 6 // world) * 10 ** r for r in range(world)] if 6 % world == 0 else [
        torch.arange(float(world * 2)).view(world, 2) * 10 ** r for r in range(world)]
    x = everyone[rank]
    total = sum(everyone)
    y = x.clone()
    all_reduce(y, group)
    found.append(torch.equal(y, total))
    y = x.clone()
    all_reduce(y, group, "max")
    found.append(torch.equal(y, everyone[-1]))
    y = torch.empty(world * world, x.size(1))
    all_gather(y, x, group)
    found.append(torch.equal(y, torch.cat(everyone)))
    y = torch.empty(1, x.size(1))
    reduce_scatter(y, x, group)
    found.append(torch.equal(y, total[rank:rank + 1]))
    found.append(torch.equal(all_to_all(x, group), torch.cat([e[rank:rank + 1] for e in everyone])))
    y = x.clone()
    broadcast(y, group)
    found.append(torch.equal(y, everyone[0]))
    crooked = torch.randn(4 * world, 2 * world).t()
    for call in (lambda: all_reduce(crooked, group), lambda: all_gather(torch.empty(0), crooked, group),
                 lambda: reduce_scatter(torch.empty(2, 4 * world), crooked, group), lambda: all_to_all(crooked, group),
                 lambda: broadcast(crooked, group)):
        try:
            call()
            found.append(False)
        except ValueError as error:
            found.append("contiguous" in str(error))
    found.append(torch.equal(parallel.reduced(crooked, group.name) * 0 + 1, torch.ones_like(crooked)))      # those copy
    return found


def naive_data_parallel(world, seed):
    """One all-reduce after backward gives the engine's gradients."""
    engine = engine_of({}, world, torch.float64)
    model, (idx, targets) = GPT(engine.config, seed=OPTIONS["seed"]).double(), batch(0, seed)
    total = (targets >= 0).sum()
    model.loss(*mine(engine, (idx, targets)), total=total).backward()
    all_reduce_gradients(model, engine.mesh.data)
    engine.backward(*mine(engine, (idx, targets)))
    grads = {name: view for unit in engine.units for name, view in zip(unit.names, unit.views(unit.shard_grad))}
    return max((p.grad - grads[name]).abs().max().item() for name, p in model.named_parameters())


def accumulation(world, seed):
    """1, 2 and more micro-batches give the same gradient in every stage. None of them is lost."""
    found = {}
    for zero in range(4):
        norms = []
        for parts in (1, 2, 12 // world):
            engine = engine_of(dict(zero=zero), world, torch.float64, accumulation=parts)
            norms.append(steps(engine, seed, 2))
        found[zero] = norms
    return found


def checkpoints(world, seed):
    """Three steps, saved under one mode, loaded under others: the next two steps agree. The same mode: bit for bit."""
    found, dense = [], [mode for mode in MODES[world] if not mode.keys() & {"ep", "slices", "recompute"}]
    for mode, other in zip(dense, dense[1:] + dense[:1]):
        first = engine_of(mode, world, torch.float64)
        steps(first, seed, 3)
        box = [pickle.loads(pickle.dumps(first.state()))]                    # not the tensors that go on to change
        dist.broadcast_object_list(box)
        want = steps(first, seed, 2, first=3)
        same, moved = (engine_of(one, world, torch.float64, start=box[0], seed=6) for one in (mode, other))
        same.load(box[0])
        moved.load(box[0])
        got, got_moved = steps(same, seed, 2, first=3), steps(moved, seed, 2, first=3)
        got_one = want
        if dist.get_rank() == 0:
            one = Parallel(first.config, Mesh.alone(torch.device("cpu")),
                           Namespace(**OPTIONS | dict(zero=0, dtype=torch.float64, micro_batch=12)), box[0])
            one.load(box[0])
            got_one = steps(one, seed, 2, first=3)
        found.append((got == want, mode, other, max(abs(a / b - 1) for g in (got_moved, got_one) for x, y in zip(g, want) for a, b in zip(x, y))))
    return found


def dropout(world, seed):
    """What every tensor rank computes alike is dropped alike; heads, and data ranks, draw their own."""
    config = GPTConfig(**ODD, n_head=4, dropout=0.5)
    mesh = mesh_of(tp=2)
    engine = Parallel(config, mesh, Namespace(**OPTIONS | dict(zero=0, dtype=torch.float64, micro_batch=1)))
    torch.manual_seed(seed + mesh.data.rank)
    streams = []
    for shell in engine.models[0].blocks.values():
        shell.register_forward_hook(lambda m, i, o: streams.append(o.detach()))
    engine.loss(*(x[:2] for x in batch(0, seed)))
    qkv = torch.ones(3, 1, 2, 8, 4)
    heads = engine.models[0].blocks["0"].block.attn.causal(qkv, 0.5)
    after = torch.rand(3)
    both = [torch.empty(2, *x.shape, dtype=x.dtype) for x in (torch.stack(streams), heads, after)]
    for out, x in zip(both, (torch.stack(streams), heads, after)):
        all_gather(out, x[None].contiguous(), mesh.tp)
    return [torch.equal(*x) for x in both], torch.stack(streams).sum().item()


def one_expert_gets_all(world, seed):
    """Router and capacity at their worst: the expert ranks still agree with one process, and nobody waits."""
    found = {}
    for name, changes in {"all to one": dict(capacity_factor=9.0), "dropped": dict(capacity_factor=0.5)}.items():
        config = GPTConfig(**ODD, n_head=4, **{**MOE, **changes})
        weights = GPT(config, seed=3).state_dict()
        for key in weights:
            if "router" in key:
                weights[key] = torch.zeros_like(weights[key])                # all the same: the lowest id
        args = Namespace(**OPTIONS | dict(zero=0, dtype=torch.float64, micro_batch=6))
        engine = Parallel(config, mesh_of(ep=2), args, start={"model": weights})
        model = GPT(config).double()
        model.load_state_dict(weights)
        idx, targets = batch(0, seed)
        loss = engine.backward(*mine(engine, (idx, targets)))
        all_reduce(loss, engine.mesh.data)
        model.loss(idx, targets).backward()
        experts = [unit for unit in engine.units if any(".experts." in name for name in unit.names)]
        worst, idle = 0.0, 0.0
        for unit in experts:
            for key, grad in zip(unit.names, unit.views(unit.shard_grad)):
                want = dict(model.named_parameters())[key].grad.chunk(engine.mesh.ep.size)[engine.mesh.ep.rank]
                worst = max(worst, (grad - want).abs().max().item())
                idle = max(idle, grad[1:].abs().max().item() if engine.mesh.ep.rank == 0 else grad.abs().max().item())
        found[name] = worst, idle, loss.item() - model.loss(idx, targets).item()
    return found


PIPES = [("gpipe", {}), ("1f1b", dict(tied=False)), ("1f1b", dict(recompute=True)), ("interleaved", dict(chunks=2)),
         ("interleaved", dict(chunks=2, tied=False, recompute=True)), ("gpipe", dict(slices=[3, 3, 2])),
         ("1f1b", dict(slices=[4, 1, 2, 1], recompute=True)), ("1f1b", dict(slices=[1] * 8, tied=False, attention="naive"))]


def pipelines(world, seed):
    """Every schedule with fewer micro-batches than stages, as many, more, and layers that don't divide: beside one
    process; and what it holds beside what the simulator says."""
    found = []
    for i, (schedule, options) in enumerate(PIPES):
        tied, chunks, slices = (options.get(*x) for x in (("tied", True), ("chunks", 1), ("slices", None)))
        # twice as many blocks as pieces, and one more: a piece has several, which are reduced one after the other
        config = GPTConfig(**{**ODD, "n_layer": (1 + (i == 3)) * world * chunks + 1}, n_head=4, tied=tied)
        mesh, alone = mesh_of(pp=world), Mesh.alone(torch.device("cpu"))
        for M in (1, 2, 3, 5, 8) if i < 4 else (2, 5):
            args = Namespace(**OPTIONS | dict(zero=0, dtype=torch.float64, batch_size=M, micro_batch=1, schedule=schedule,
                                              partition=[2] + [1] * (world * chunks - 1) if M == 2 and i != 3 else None)
                             | {name: options[name] for name in options if name != "tied"})
            engine, losses, first = Parallel(config, mesh, args), [0.0], dist.get_rank() == 0
            one = first and Parallel(config, alone, Namespace(**vars(args) | dict(schedule="1f1b", chunks=1, slices=None,
                                                                                  partition=None, recompute=False)))
            for step in range(2):
                idx, targets = (x[2:2 + M] for x in batch(step, seed))
                loss = engine.backward(idx, targets)
                all_reduce(loss, mesh.world)
                norm = engine.step(1e-2)
                if first:
                    losses += [(loss / one.backward(idx, targets)).item() - 1, (norm / one.step(1e-2)).item() - 1]
            moment, worst = ([(got[name] - want[name]).abs().max().item() for name in want] for got, want in (
                (engine.whole(kind), one.whole(kind) if first else {}) for kind in ("exp_avg", "master")))
            losses += moment
            lists = [parallel.SCHEDULES[schedule](chunks, len(slices or [0]))(s, world, M) for s in range(world)]
            found.append((schedule, options, M, max(map(abs, losses)), max(worst, default=0.0), engine.live,
                          simulate(lists).live(dist.get_rank())))
    return found


class Place(parallel.Group):
    """A group of some size in which this process plays any rank."""

    rank = property(lambda self: self.process_group)


def stale(config, options, world, micros, lrs):
    """PipeDream in one process: stage s runs micro-batch m with the weights after max(0, m - (P - 1 - s)) updates.
    -> the losses and each stage's weights."""
    stages = []
    for s in range(world):
        mesh = Mesh.alone(torch.device("cpu"))
        mesh.pp = Place(tuple(range(world)), s)
        stages.append(Parallel(config, mesh, Namespace(**options)))
    versions, losses = [[[unit.full for unit in stage.units]] for stage in stages], []
    for m, ((idx, targets), lr) in enumerate(zip(micros, lrs)):
        total, xs, ys = (targets >= 0).sum().clamp(min=1), [], []
        for s, stage in enumerate(stages):
            for unit, full in zip(stage.units, versions[s][max(0, m - (world - 1 - s))]):
                unit.full = unit.own = full
                unit.due = 1
            xs.append(idx if s == 0 else ys[-1].detach().requires_grad_())
            y, loss = stage.forward(s, xs[-1], targets, total)
            ys.append(loss if y is None else y)
        losses.append(loss.item())
        grad = None
        for s in reversed(range(world)):
            torch.autograd.backward(ys[s], grad)
            grad = xs[s].grad
            stages[s].pending.drain()
            stages[s].finish(stages[s].grad_norm(), lr)
            versions[s].append([unit.full for unit in stages[s].units])
    return losses, [[unit.master for unit in stage.units] for stage in stages]


def asynchronous(world, seed):
    """PipeDream over several batches without a flush, beside its simulation; how many versions of its weights a stage
    holds at once, counted; and then, flushed, as one process goes on from its weights."""
    config = GPTConfig(**{**ODD, "n_layer": world + 1}, n_head=4, tied=False)
    options = OPTIONS | dict(zero=0, dtype=torch.float32, batch_size=6, micro_batch=2, schedule="pipedream")
    engine, found, alive = Parallel(config, mesh_of(pp=world), Namespace(**options)), [], weakref.WeakSet()
    most, execute = [0], torch.autograd.backward

    def counted(*args):
        alive.update({engine.units[0].full.untyped_storage()})
        most[0] = max(most[0], len(alive))
        return execute(*args)
    torch.autograd.backward = counted
    batches, lrs = [[x[:6] for x in batch(step, seed)] for step in range(4)], [1e-2, 3e-3, 2e-2, 1e-2]
    try:
        for (idx, targets), lr in zip(batches, lrs):
            loss, _ = engine.train_step(idx, targets, lr)
            found.append(float(loss))
        engine.flush()
    finally:
        torch.autograd.backward = execute
    micros = [(x[i:i + 2], y[i:i + 2]) for x, y in batches for i in (0, 2, 4)]
    losses, weights = stale(config, options, world, micros, [lr for lr in lrs for _ in range(3)])
    counts = np.array([(y >= 0).sum().item() for _, y in micros]).reshape(4, 3)
    want = (np.array(losses).reshape(4, 3) * counts).sum(1) / counts.sum(1)
    rank = dist.get_rank()
    same = all(torch.equal(unit.master, w) for unit, w in zip(engine.units, weights[rank]))
    total = engine.loss(*batches[0])
    all_reduce(total, engine.mesh.world)
    model = GPT(config, seed=0)
    state = engine.whole("master")
    if rank == 0:
        model.load_state_dict(state)
        total = total.item() / model.eval().loss(*batches[0], total=1).item() - 1
    return same, abs(np.array(found) / want - 1).max() if rank == world - 1 else 0.0, most[0], rank, float(total) if rank == 0 else 0


def pipedream_learns(world, seed):
    """-> the mean loss of the last 100 of 480 updates, and that of a run whose pipeline is flushed at each, on the last
    rank. The data: the next token is a function of this one, with some noise."""
    config = GPTConfig(vocab_size=17, block_size=8, n_layer=world, n_head=4, n_embd=32, tied=False)
    found = []
    for schedule, n in (("pipedream", 12), ("1f1b", 2)):
        args = Namespace(**OPTIONS | dict(zero=0, dtype=torch.float32, batch_size=n, micro_batch=2, schedule=schedule))
        engine, losses = Parallel(config, mesh_of(pp=world), args), []
        g = torch.Generator().manual_seed(seed)
        table = torch.randint(17, (17,), generator=g)

        def two():
            x = torch.randint(17, (2, 9), generator=g)
            for t in range(8):
                x[:, t + 1] = torch.where(torch.rand(2, generator=g) < 0.8, table[x[:, t]], x[:, t + 1])
            return x
        for i in range(960 // n):
            x = torch.cat([two() for _ in range(n // 2)])
            loss, _ = engine.train_step(x[:, :-1], x[:, 1:], 3e-3 * min(1, 2 - 2 * i * n / 960))
            losses += [float(loss)] * (n // 2)
        engine.flush()
        found.append(np.mean(losses[-100:]))
    return found


def large_messages(world, seed, size=(64 << 20) // 4):
    """Rounds of 1F1B and interleaved 1F1B with activations of 64 MB, sent and received by the engine, not computed."""
    done = []
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2)):
        config = GPTConfig(vocab_size=65, block_size=1, n_layer=world * chunks, n_head=1, n_embd=8)
        args = Namespace(**OPTIONS | dict(zero=0, dtype=torch.float32, micro_batch=1, schedule=schedule, chunks=chunks))
        engine = Parallel(config, mesh_of(pp=world), args)
        engine.config = Namespace(n_embd=size, n_expert=0)
        x = torch.ones(1, 1, size)

        def forward(piece, y, *_):
            last = piece == engine.pieces - 1
            y = y * 1.0 if piece else x.clone().requires_grad_()
            return (None, y[..., :1].sum()) if last else (y, None)
        engine.forward = forward
        engine.parts = {m: parallel.Part(torch.zeros(1, 1), torch.zeros(1, 1), 1) for m in range(3)}
        begin = time.perf_counter()
        for _ in range(6 // world):
            engine.execute(engine.actions(3))
            engine.sent()
        done.append(time.perf_counter() - begin)
    return done


def float16_overflow(world, seed):
    """A gradient that overflows on one rank is skipped by all; the scale falls on all."""
    engine = engine_of({}, world, torch.float16, accumulation=1)
    before = engine.units[0].master.clone()
    engine.scale = 2.0 ** (30 if dist.get_rank() == 0 else 3)                # only the first overflows
    engine.backward(*mine(engine, batch(0, seed)))
    norm = engine.step(1e-2)
    return bool(norm.isfinite()), torch.equal(engine.units[0].master, before), engine.scale


CASES = {2: [training, compiled, ledger, state_bytes, gathered, peak, collectives, naive_data_parallel, accumulation, checkpoints, dropout,
             one_expert_gets_all, float16_overflow, pipelines, asynchronous, pipedream_learns, large_messages],
         3: [training, ledger, state_bytes, collectives, accumulation, checkpoints, pipelines, asynchronous,
             large_messages],
         4: [training, ledger, checkpoints, dropout, pipelines, asynchronous, large_messages], 8: [training, ledger, deep_pipeline]}


def rank_main(rank, world, folder, seed):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    results = {}
    for case in CASES[world]:
        try:
            results[case.__name__] = case(world, seed)
        except BaseException:
            results[case.__name__] = traceback.format_exc()
        failed = [None] * world
        dist.all_gather_object(failed, isinstance(results[case.__name__], str))
        if any(failed):      # the ranks may be out of step now
            break
    with open(f"{folder}/{rank}.pickle", "wb") as file:
        pickle.dump(results, file)
    dist.barrier()


if __name__ == "__main__":
    rank_main(*map(int, sys.argv[1:3]), sys.argv[3], int(sys.argv[4]))
    os._exit(0)


# ---- the tests --------------------------------------------------------------------------------------------------

WORLDS = {}


@pytest.fixture
def world(request, tmp_path_factory, seed):
    """The results of all ranks of a world of this size, which ran all its cases once: [{case: result}]. Their seed is
    that of the first test that asked."""
    size = request.param
    if size not in WORLDS:
        folder = tmp_path_factory.mktemp(f"world{size}")
        ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(size), str(folder), str(seed)],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for rank in range(size)]
        try:
            texts = [process.communicate(timeout=400)[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        files = [folder / f"{rank}.pickle" for rank in range(size)]
        assert all(file.exists() for file in files), texts
        WORLDS[size] = seed, [pickle.loads(file.read_bytes()) for file in files]
    seed, results = WORLDS[size]
    print(f"the ranks: NANOSCALE_SEED={seed}")
    return results


def of(world, case):
    """A case's results, rank by rank."""
    found = [results.get(case, "not run: an earlier case failed") for results in world]
    assert not any(isinstance(x, str) for x in found), "\n".join(map(str, found))
    return found


def every(case):
    return pytest.mark.parametrize("world", [size for size in CASES if case in CASES[size]], indirect=True)


@every(training)
def test_every_mode_trains_as_one_process(world):
    for (mode, dtype), (relative, worst, clipped, dropped) in of(world, "training")[0].items():
        exact = 1e-12 if len(world) < 8 else 1e-10                          # more ranks, more of a zero's rounding
        assert relative < (1e-5 if "32" in dtype else exact), (mode, dtype, relative)
        assert worst < (5e-3 if "32" in dtype else 1e-9), (mode, dtype, worst)      # Adam makes much of a zero's rounding
        assert clipped and (dropped > 0 or "ep" not in mode)


@every(compiled)
def test_compiled_modes_train_as_one_process(world):
    for mode, (got, want) in of(world, "compiled")[0].items():
        assert max(abs(a / b - 1) for x, y in zip(got, want) for a, b in zip(x, y)) < 1e-12, mode


@every(ledger)
def test_bytes_sent_are_as_predicted(world):
    for mode, (sent, predicted) in of(world, "ledger")[0].items():
        sent = {kind: n for kind, n in sent.items() if n}
        assert sent.keys() == predicted.keys(), (mode, sent, predicted)
        for kind in sent:
            assert abs(sent[kind] - predicted[kind]) <= 40, (mode, kind, sent[kind], predicted[kind])      # of rounding


@every(state_bytes)
def test_bytes_kept_are_those_of_the_table(world):
    for zero, (kept, table) in of(world, "state_bytes")[0].items():
        assert abs(kept / table - 1) < 1e-3, (zero, kept, table)


@every(gathered)
def test_weights_are_let_go_of_and_copied_by_one_rank(world):
    for found in of(world, "gathered"):
        assert all(kept == 0 and copies == wanted for kept, copies, wanted in found.values()), found


@every(deep_pipeline)
def test_as_many_stages_as_there_are_ranks(world):
    for whole, sliced in of(world, "deep_pipeline"):
        for predicted, sent, table, kept, difference, _ in (whole, sliced):
            assert predicted == sent and abs(table / kept - 1) < 1e-3 and difference < 1e-5


@every(peak)
def test_higher_stages_hold_less_at_the_peak(world):
    found = of(world, "peak")[0]
    total = {zero: kept + peak for zero, (kept, peak, _) in found.items()}
    weights = found[0][2]
    assert total[1] < total[0] - 0.3 * weights                               # masters and moments halved, weights apart
    assert total[2] < total[1] - 0.25 * weights and total[3] < total[2] - 0.25 * weights, found
    assert found[3][1] < (0.5 + 0.4) * weights, found      # the shard's gradients, and never all weights at once


@every(collectives)
def test_collectives(world):
    for found in of(world, "collectives"):
        assert all(found), found


@every(naive_data_parallel)
def test_one_all_reduce_after_backward_gives_the_same_gradients(world):
    assert max(of(world, "naive_data_parallel")) < 1e-12


@every(accumulation)
def test_micro_batches_add_up_in_every_stage(world):
    for zero, runs in of(world, "accumulation")[0].items():
        for run in runs[1:]:
            assert max(abs(a / b - 1) for x, y in zip(run, runs[0]) for a, b in zip(x, y)) < 1e-12, zero


@every(checkpoints)
def test_a_checkpoint_of_any_mesh_goes_on_under_any_other(world):
    for same, mode, other, moved in of(world, "checkpoints")[0]:
        assert same and moved < 1e-11, (mode, other, same, moved)


@every(dropout)
def test_dropout_agrees_where_activations_do_and_differs_where_they_do_not(world):
    for (streams, heads, after), _ in of(world, "dropout"):
        assert streams and not heads and after
    if len(world) == 4:
        assert world[0]["dropout"][1] != world[2]["dropout"][1]


@every(one_expert_gets_all)
def test_all_tokens_to_one_expert(world):
    for found in of(world, "one_expert_gets_all"):
        for worst, idle, difference in found.values():
            assert worst < 1e-12 and idle == 0 and abs(difference) < 1e-12


@every(pipelines)
def test_every_schedule_runs_as_simulated_and_trains_as_one_process(world):
    for found in of(world, "pipelines"):
        for *what, difference, worst, live, simulated in found:
            # of losses, norms and moments; of weights, where Adam makes much of the rounding of hardly any gradient
            assert difference < 1e-12 and worst < 1e-10, (what, difference, worst)
            assert live == simulated, (what, live, simulated)


@every(asynchronous)
def test_pipedream_is_its_simulation_and_keeps_a_version_for_each_stage_that_follows(world):
    for same, difference, versions, rank, evaluated in of(world, "asynchronous"):
        assert same and difference < 1e-6 and abs(evaluated) < 1e-6
        assert versions == len(of(world, "asynchronous")) - rank


@every(pipedream_learns)
def test_pipedream_learns_as_well_as_with_flushes(world):
    ours, flushed = of(world, "pipedream_learns")[-1]
    assert abs(ours / flushed - 1) < 0.02 and flushed < 3, (ours, flushed)


@every(large_messages)
def test_large_messages_never_wait_for_each_other(world):
    assert all(len(found) == 2 for found in of(world, "large_messages"))


@every(float16_overflow)
def test_an_overflow_on_one_rank_is_skipped_by_all(world):
    for finite, unchanged, _ in of(world, "float16_overflow"):
        assert not finite and unchanged


# ---- 3: schedules and planners, without processes ---------------------------------------------------------------

def schedules(P, M, v):
    """Every schedule of P ranks and M micro-batches, with v pieces a rank or slices a sequence where it has such."""
    makers = {"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "pipedream": pipedream,
              "interleaved": partial(interleaved, v=v), "terapipe": partial(terapipe, slices=v)}
    return {name: [make(s, P, M) for s in range(P)] for name, make in makers.items()}


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8])
def test_no_schedule_waits_for_ever_and_channels_agree(P):
    for M in (1, 2, 3, 4, 5, 7, 8, 11, 16):
        for v in (1, 2, 3):
            for name, lists in schedules(P, M, v).items():
                line = simulate(lists)
                pieces = P * v if name == "interleaved" else P
                slices = v if name == "terapipe" else 1
                for op in "FB":      # every micro-batch passes every piece once
                    done = sorted(a[1:] for actions in lists for a in actions if a.op == op)
                    assert done == [(m, i, t) for m in range(M) for i in range(pieces) for t in range(slices)]
                assert all(sent == expected for sent, expected in channels(lists).values()), (name, P, M, v)
                assert line.bubble < 1 - 1 / P + 1e-9


@pytest.mark.parametrize("P,M", [(1, 3), (2, 1), (3, 2), (4, 8), (4, 3), (5, 11)])
def test_bubbles_activations_and_versions_are_those_of_the_papers(P, M):
    lines = {name: simulate(lists) for name, lists in schedules(P, M, 2).items()}
    for name in ("gpipe", "1f1b"):
        assert abs(lines[name].bubble - (P - 1) / (M + P - 1)) < 1e-12
    assert abs(lines["naive"].bubble - (P - 1) / P) < 1e-12
    assert abs(lines["terapipe"].bubble - (P - 1) / (2 * M + P - 1)) < 1e-12
    if M % P == 0:
        assert abs(lines["interleaved"].bubble - (P - 1) / (2 * M + P - 1)) < 1e-12
    for s in range(P):
        assert lines["gpipe"].live(s) == M and lines["1f1b"].live(s) == min(M, P - s) and lines["naive"].live(s) == 1
        assert lines["1f1b"].versions(s) == 1 and lines["pipedream"].versions(s) <= P - s
        if M >= 2 * P:
            assert lines["pipedream"].versions(s) == P - s


def test_a_schedule_that_hangs_is_found():
    lists = [gpipe(s, 2, 2) for s in range(2)]
    lists[1] = lists[1][::-1]
    with pytest.raises(ValueError, match="never ends: rank 0 at B0, rank 1 at B1"):
        simulate(lists)
    crossed = [gpipe(0, 2, 2), [gpipe(1, 2, 2)[i] for i in (1, 0, 2, 3)]]
    assert any(sent != expected for sent, expected in channels(crossed).values())


def test_a_picture():
    page = simulate([one_f_one_b(s, 2, 2) for s in range(2)]).draw()
    assert [line.rstrip() for line in page.splitlines()] == ["rank 0  F0 F1       B0       B1", "rank 1     F0 B0    F1 B1"]


def one_process(slices, dtype, seed, **options):
    """An engine on this process alone, after one backward of sequences of 64 tokens, and the gradient of each weight."""
    g = torch.Generator().manual_seed(seed)
    idx, targets = (torch.randint(0, 65, (4, 64), generator=g) for _ in range(2))
    args = Namespace(**{**OPTIONS, "batch_size": 4, "micro_batch": 4, "zero": 0, "dtype": dtype, "slices": slices, **options})
    config = GPTConfig(vocab_size=65, block_size=64, n_layer=2, n_head=2, n_embd=36)
    engine = Parallel(config, Mesh.alone(torch.device("cpu")), args)
    engine.backward(idx, targets)
    return engine, torch.cat([unit.grad.double() for unit in engine.units])


def test_gradients_of_slices_are_summed_in_float32(seed):
    _, exact = one_process(None, torch.float64, seed)
    error = {}
    for slices in (None, [1] * 64):
        engine, grad = one_process(slices, torch.bfloat16, seed)
        error[str(slices)] = (grad - exact).norm() / exact.norm()
    assert error[str([1] * 64)] < 1.3 * error["None"]


def test_a_sliced_micro_batch_is_let_go_of_when_its_backward_is_through(seed, monkeypatch):
    alive, most, attend = weakref.WeakValueDictionary(), [], parallel.Prefix.__call__

    def watched(self, part, layer, *qkv):
        o = attend(self, part, layer, *qkv)
        alive[id(self.layers[layer].kept[0])] = self.layers[layer].kept[0]
        most.append(len(alive))
        return o
    monkeypatch.setattr(parallel.Prefix, "__call__", watched)
    one_process([40, 24], torch.float32, seed, micro_batch=1)
    # the keys of two layers: F0.0 and F0.1, then F1.0 while one slice of 0 is left, F1.1, ...
    assert most == [1, 2, 2, 2] + 3 * [3, 4, 2, 2] and not alive


def compositions(n, k):
    """All ways to cut 0 .. n into k pieces that aren't empty."""
    return ([0, *cuts, n] for cuts in itertools.combinations(range(1, n), k - 1))


@pytest.mark.parametrize("replicate", [False, True])
def test_partition_is_the_best_of_all(replicate):
    rng = np.random.default_rng()
    for _ in range(200):
        L, P = int(rng.integers(1, 7)), int(rng.integers(1, 5))
        if L < P and not replicate:
            with pytest.raises(ValueError, match=f"{L} layers"):
                partition(rng.random(L), P)
            continue
        times, weights, sent, rate = rng.random(L), rng.random(L), rng.random(L), rng.choice([0.5, 5, math.inf])
        best = math.inf
        for k in range(1, min(L, P) + 1) if replicate else (P,):
            for cuts in compositions(L, k):
                for ranks in itertools.product(range(1, P + 1) if replicate else (1,), repeat=k):
                    if sum(ranks) == P:
                        stages = [max(times[i:j].sum(), 2 * (m - 1) * weights[i:j].sum() / rate) / m
                                  for i, j, m in zip(cuts, cuts[1:], ranks)]
                        best = min(best, max(stages + [2 * sent[i - 1] / rate for i in cuts[1:-1]]))
        stages, slowest = partition(times, P, weights, sent, rate, replicate)
        assert abs(slowest - best) < 1e-12 and sum(m for _, _, m in stages) == P
        assert [i for i, _, _ in stages] == [0, *(j for _, j, _ in stages[:-1])] and stages[-1][1] == L


def plan_of(*argv):
    return parallel.planned(["--plan", *argv])


def test_the_plan_has_zeros_table_and_large_models():
    """The paper's: 7.5 billion parameters on 64 ranks; and 400 billion, 2 bytes each."""
    for zero, want in enumerate((120, 31.4, 16.6, 1.9)):
        args, config = plan_of("--gpus=64", f"--zero={zero}", "--batch_size=64")
        stage = parallel.predict_stage(config, args, (7.5e9, 0, 0), 0, 0, 0, 0, False)
        assert abs(stage.memory / 1e9 - want) < 0.06
    args, config = plan_of("--n_layer=124", "--n_embd=16384", "--n_head=128", "--gpus=512", "--tp=8", "--pp=4")
    stages, _ = parallel.predict(config, args)
    assert abs(8 * sum(x.weights for x in stages) / 1e9 - 800) < 4           # the embedding twice


@pytest.mark.parametrize("options,want", [
    ("--gpus=4", 2_795_922), ("--gpus=4 --zero=1", 2_795_922), ("--gpus=4 --zero=2", 2_795_922), ("--gpus=4 --zero=3", 4_138_002),
    ("--gpus=4 --tp=4", 10_635_270), ("--gpus=4 --ep=4 --n_expert=8", 2_507_922), ("--gpus=4 --pp=4", 442_374),
    ("--gpus=4 --pp=2 --tp=2", 3_956_742), ("--gpus=4 --tp=2 --zero=3", 6_342_926),
    ("--gpus=4 --ep=2 --tp=2 --n_expert=8", 6_271_502)])
def test_the_plan_sends_what_the_ledger_counted(options, want):
    """In bfloat16 half of the README's table, which is in float32."""
    args, config = plan_of("--n_layer=4", "--n_head=8", "--n_embd=96", "--block_size=64", "--vocab_size=65", "--batch_size=16",
                           *options.split())
    args.micro_batch = 4 if args.zero > 1 else 16 // args.data      # else gradients would be summed, and sent, in float32
    stages, _ = parallel.predict(config, args)
    assert abs(2 * sum(n for n, _ in stages[0].sent.values()) / want - 1) < 0.02


def test_the_plan_counts_pipedreams_versions():
    weights = {}
    for schedule in ("1f1b", "pipedream"):
        args, config = plan_of("--preset=gpt2", "--gpus=4", "--pp=4", f"--schedule={schedule}")
        config = parallel.replace(config, tied=False)
        weights[schedule] = [x.weights for x in parallel.predict(config, args)[0]]
    assert [a / b for a, b in zip(weights["pipedream"], weights["1f1b"])] == [4, 3, 2, 1]
    args, config = plan_of("--preset=gpt2", "--gpus=4", "--pp=2", "--schedule=pipedream", "--batch_size=16")
    stages, numbers = parallel.predict(config, args)      # each of 8 micro-batches sends its gradient, of 2 bytes
    assert not config.tied and numbers["bubble"] == 0
    assert [x.sent["data"][0] for x in stages] == [8 * 2 * x.parameters for x in stages]


def test_the_plan_holds_what_the_schedule_holds():
    found = {}
    for schedule in ("gpipe", "1f1b"):
        args, config = plan_of("--preset=gpt2-medium", "--gpus=4", "--pp=4", "--micro_batch=2", "--batch_size=16",
                               f"--schedule={schedule}")
        stages, numbers = parallel.predict(config, args)
        found[schedule] = [x.held for x in stages]
        assert abs(numbers["bubble"] - 3 / 11) < 1e-12 and 0 < numbers["mfu"] < args.efficiency
        assert stages[0].activations == 2 * 1024 * 2 * 1024 * 16 * 6 * stages[0].held
    assert found == {"gpipe": [8] * 4, "1f1b": [4, 3, 2, 1]}


def test_the_plan_as_a_program(capsys):
    assert parallel.program("parallel.py", parallel.main, ["--plan", "--preset=gpt2", "--gpus=16", "--tp=2", "--pp=2"]) == 0
    out = capsys.readouterr().out
    assert "fits:" in out and "data 4 x expert 1 x pipeline 2 x tensor 2" in out and "MFU" in out
    assert parallel.program("parallel.py", parallel.main, ["--plan", "--gpus=1", "--memory=9"]) == 0
    assert "does not fit" in capsys.readouterr().out
    assert parallel.program("parallel.py", parallel.main, ["--plan", "--preset=gpt2-xl", "--gpus=1024", "--tp=8", "--pp=16"]) == 0
    assert "n_head=25" in capsys.readouterr().err
    for options, words in ((["--gpus=6", "--tp=5"], "gpus=6"), (["--pp=0"], "pp=0"),
                           (["--gpus=64", "--pp=64"], "n_layer=48"), (["--batch_size=9"], "batch_size=9"),
                           (["--chunks=2"], "chunks=2"), (["--net=0"], "net"), (["--gups=2"], "--gpus"), (["--batch_size=0"], "batch_size=0"),
                           (["--batch_size=-8"], "batch_size=-8"), (["--preset=finetune"], "finetune"),
                           (["--schedule=pipedream", "--zero=3"], "zero=3"), (["--schedule=pipedream", "--n_expert=4"], "n_expert=4"),
                           (["--peak=nan"], "peak=nan"), (["--net=inf"], "net=inf"), (["--efficiency=2"], "efficiency=2"),
                           (["--n_layer=1000000000"], "n_layer=1000000000"), (["--vocab_size=" + 20 * "9"], "vocab_size=9"),
                           (["--n_embd=1" + 20 * "0", "--n_head=1"], "n_embd=1"),
                           (["--batch_size=1000000000"], "batch_size=1000000000")):
        assert parallel.program("parallel.py", parallel.main, ["--plan", *options]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1, err
    assert parallel.program("parallel.py", parallel.main, ["--gpus=8"]) == 2 and "--plan" in capsys.readouterr().err


def test_slices_are_the_best_of_all():
    rng = np.random.default_rng()
    for _ in range(200):
        T, P, unit = int(rng.integers(1, 11)), int(rng.integers(1, 6)), int(rng.integers(1, 4))
        a, b, c = rng.random(3)

        def cost(n, before):
            return a + b * n + c * n * (before + n / 2)
        ends = [*range(0, T, unit), T]
        best = math.inf
        for k in range(1, len(ends)):
            for cuts in compositions(len(ends) - 1, k):
                costs = [cost(ends[j] - ends[i], ends[i]) for i, j in zip(cuts, cuts[1:])]
                best = min(best, sum(costs) + (P - 1) * max(costs))
        lengths, seconds = slice_tokens(cost, T, P, unit)
        assert abs(seconds - best) < 1e-12 and sum(lengths) == T and all(n % unit == 0 for n in lengths[:-1])


# ---- the program under torchrun ---------------------------------------------------------------------------------

TINY = ["--preset=cpu", "--no-draft", "--device=cpu", "--no-compile", "--n_layer=2", "--n_head=4", "--n_embd=16", "--block_size=8",
        "--batch_size=8", "--eval_batches=2", "--eval_every=0"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes(bytes(torch.randint(32, 90, (4000,)).tolist()))
    return path


def torchrun(count, out, *options, launcher=(), program="train.py"):
    """train.py by `count` processes, on a port that is free."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}", *launcher, program,
               *TINY, f"--out={out}", *map(str, options)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})


def losses(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in lines if "step" in r}


def wait_for_step(out, step):
    end = time.time() + 60
    while time.time() < end:
        time.sleep(0.1)
        if (out / "log.jsonl").exists() and max(losses(out), default=0) >= step:
            return
    raise TimeoutError(f"step {step} didn't come")


def test_a_gpt2_on_any_layout_trains_as_on_one_process(text, tmp_path):
    from conftest import write_gpt2, write_tokenizer
    for library in ("safetensors", "tokenizers"):
        pytest.importorskip(library, reason=f"GPT-2's weights with a text need the library {library}")
    write_tokenizer(tmp_path / "gpt2")
    gpt2 = write_gpt2(tmp_path / "gpt2", vocab_size=262, n_positions=8, n_embd=16, n_head=4)
    options = [f"--data={text}", f"--init_from={gpt2}", "--max_steps=4", "--lr=1e-3"]
    import train
    assert train.main([*TINY, *options, f"--out={tmp_path / 'one'}"]) == 0
    want = losses(tmp_path / "one")
    for count, layout in ((2, ["--tp=2"]), (4, ["--pp=2", "--zero=2"])):
        process = torchrun(count, tmp_path / layout[0], *options, *layout)
        out, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
        got = losses(tmp_path / layout[0])
        assert len(got) == 4 and all(abs(got[step] / loss - 1) < 1e-5 for step, loss in want.items()), (got, want)
    process = torchrun(2, tmp_path / "eval", *options[:2], "--tp=2", "--eval_only")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0 and out.count("perplexity") == 1, err
    (gpt2 / "model.safetensors").unlink()
    process = torchrun(2, tmp_path / "bad", *options, "--tp=2")
    out, err = process.communicate(timeout=90)
    assert process.returncode and err.count("holds no weights") == 1


def ranks_of(process):
    """The process ids of the ranks that a torchrun started."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split() if "train.py" in Path(f"/proc/{pid}/cmdline").read_text()]


def ended(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")


def test_four_processes_write_what_one_reads(text, tmp_path):
    process = torchrun(4, tmp_path / "four", f"--data={text}", "--max_steps=12", "--tp=2", "--zero=3")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert out.count("ckpt.pt:") == 1 and out.count("a sample:") == 1 and "dp 2 x ep 1 x pp 1 x tp 2, zero 3" in err
    import train
    assert train.main([*TINY, f"--data={text}", f"--out={tmp_path / 'one'}", "--max_steps=12"]) == 0
    four, one = losses(tmp_path / "four"), losses(tmp_path / "one")
    assert four.keys() == one.keys() and max(abs(four[s] / one[s] - 1) for s in one) < 1e-5
    # and goes on from
    assert train.main(["--resume", f"--out={tmp_path / 'four'}", "--max_steps=14", "--no-compile"]) == 0
    assert train.main(["--resume", f"--out={tmp_path / 'one'}", "--max_steps=14", "--no-compile"]) == 0
    assert abs(losses(tmp_path / "four")[14] / losses(tmp_path / "one")[14] - 1) < 1e-5
    import sample
    assert sample.main([f"--ckpt={tmp_path / 'four' / 'ckpt.pt'}", "--max_new_tokens=5", "--device=cpu"]) == 0


@needs_proc
def test_a_killed_rank_ends_all_and_a_restart_goes_on(text, tmp_path):
    options = [f"--data={text}", "--zero=2", "--save_every=20", "--dropout=0.1"]
    process = torchrun(2, tmp_path / "a", *options, "--max_steps=400")
    assert process.wait(timeout=90) == 0
    process = torchrun(2, tmp_path / "b", *options, "--max_steps=100000", "--decay_steps=400")
    wait_for_step(tmp_path / "b", 25)
    ranks = ranks_of(process)
    os.kill(ranks[1], signal.SIGKILL)
    start = time.time()
    _, err = process.communicate(timeout=40)
    assert process.returncode != 0 and time.time() - start < 30 and ended(ranks)
    assert "train.py: rank 0: rank 1 is gone" in err
    (tmp_path / "b" / "log.jsonl").unlink()                                  # written anew from the checkpoint on
    begun = torch.load(tmp_path / "b" / "ckpt.pt", weights_only=True)["step"]
    process = torchrun(2, tmp_path / "b", *options, "--max_steps=400", "--resume", launcher=["--max_restarts=1"])
    wait_for_step(tmp_path / "b", begun + 30)                                # past the next checkpoint
    os.kill(ranks_of(process)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    a, b = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert a == {**a, **b} and max(b) == 400 and min(b) == begun + 1


@needs_proc
def test_a_killed_torchrun_leaves_a_checkpoint_and_no_process(text, tmp_path):
    process = torchrun(2, tmp_path, f"--data={text}", "--max_steps=100000", "--tp=2")
    wait_for_step(tmp_path, 5)
    ranks = ranks_of(process)
    process.kill()
    _, err = process.communicate(timeout=30)      # until the ranks have closed it, too
    end = time.time() + 5
    while not ended(ranks) and time.time() < end:
        time.sleep(0.1)
    assert len(ranks) == 2 and ended(ranks) and err.count("train.py: stopped and saved") == 1, err
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["step"] == max(losses(tmp_path)) >= 5


# train.py, but all it does is to send 64 MB again and again, until the sender is killed: almost surely within a message
KILLED_WITHIN_A_MESSAGE = """
import os, signal, sys, threading, torch, torch.distributed as dist, train

def messages(*_):
    x = torch.zeros(2**24)
    if dist.get_rank() == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        dist.send(x, 0) if dist.get_rank() == 1 else dist.recv(x, 1)

train.train = messages
sys.exit(train.main())
"""


def test_a_rank_that_dies_within_a_message_is_named(text, tmp_path):
    (tmp_path / "program.py").write_text(KILLED_WITHIN_A_MESSAGE)
    process = torchrun(2, tmp_path / "out", f"--data={text}", program=str(tmp_path / "program.py"))
    _, err = process.communicate(timeout=90)
    assert process.returncode == 1 and err.count("train.py: rank 0: rank 1 is gone, so this one ends too") == 1, err


def test_pipedream_in_four_stages_goes_on_bit_for_bit(text, tmp_path):
    """Checkpoints flush the pipeline, so a run that ends at one and goes on is the run that doesn't end."""
    options = ["--pp=4", "--schedule=pipedream", "--n_layer=5", "--micro_batch=2", "--save_every=4", "--decay_steps=8"]
    for out, steps in (("whole", 8), ("half", 4)):
        process = torchrun(4, tmp_path / out, f"--data={text}", f"--max_steps={steps}", *options)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
    process = torchrun(4, tmp_path / "half", "--resume", "--max_steps=8", *options)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert losses(tmp_path / "whole") == losses(tmp_path / "half") and len(losses(tmp_path / "half")) == 8
    import sample
    assert sample.main([f"--ckpt={tmp_path / 'whole' / 'ckpt.pt'}", "--max_new_tokens=5", "--device=cpu"]) == 0


def test_measured_layers_and_slices_and_a_trace(text, tmp_path):
    process = torchrun(2, tmp_path / "two", f"--data={text}", "--max_steps=8", "--n_layer=5", "--pp=2", "--micro_batch=4",
                       "--token_slices=auto", "--partition=profile", "--recompute", f"--trace={tmp_path / 'trace.json'}")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0 and "bubble of 2 micro-batches on 2 stages" in err, err
    layers, slices = (list(map(int, re.search(f"{what}: ([0-9 ]+)", err)[1].split())) for what in ("a piece", "a slice"))
    assert sum(layers) == 5 and len(layers) == 2 and sum(slices) == 8
    events = json.loads((tmp_path / "trace.json").read_text())
    for rank in (0, 1):
        spans = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e["tid"] == rank and e["ph"] == "X"]
        assert len(spans) == 2 * 2 * len(slices) and all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        assert sum(e["name"] == "send" for e in events if e["tid"] == rank) == 2 * len(slices)
    import train
    assert train.main([*TINY, f"--data={text}", f"--out={tmp_path / 'one'}", "--max_steps=8", "--n_layer=5"]) == 0
    two, one = losses(tmp_path / "two"), losses(tmp_path / "one")
    assert two.keys() == one.keys() and max(abs(two[s] / one[s] - 1) for s in one) < 1e-5


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_no_process(text, tmp_path, number):
    process = torchrun(3, tmp_path, f"--data={text}", "--max_steps=100000", "--batch_size=6")
    wait_for_step(tmp_path, 3)
    ranks = ranks_of(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=40)
    assert process.returncode != 0 and len(ranks) == 3 and ended(ranks)
    assert err.count("stopped and saved") == 1
    ckpt = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert ckpt["step"] == max(losses(tmp_path)) and not list(tmp_path.glob("*.part"))


def test_what_does_not_fit_is_said_once_by_all(text, tmp_path, monkeypatch):
    process = torchrun(3, tmp_path, f"--data={tmp_path / 'nothing.txt'}", "--batch_size=6")      # found by the first alone
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and err.count("train.py: data=") == 1
    process = torchrun(3, tmp_path, f"--data={text}", "--batch_size=6", "--tp=3")      # found by each
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and err.count("n_head=4 can't be split over tp=3") == 1
    process = torchrun(3, tmp_path, f"--data={text}", "--batch_size=7")          # before anything else
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and err.count("batch_size=7 can't be split over 3 data ranks") == 1
    import train
    monkeypatch.setenv("WORLD_SIZE", "4")
    for options, words in ((["--tp=3"], "4 processes can't be laid out with ep=1 x pp=1 x tp=3"), (["--batch_size=6"], "6 can't be split"),
                           (["--dp=2"], "nproc_per_node=2"), (["--micro_batch=3"], "micro_batch=3"), (["--ep=0"], "ep=0"),
                           (["--ep=2"], "n_expert=0"), (["--chunks=2"], "schedule=interleaved"), (["--pp=3"], "pp=3"),
                           (["--token_slices=9"], "token_slices=9"), (["--token_slices=two"], "token_slices=two"),
                           (["--token_slices=\u00b2"], "token_slices="),
                           (["--token_slices=2", "--schedule=interleaved"], "token_slices=2"),
                           (["--token_slices=2", "--dropout=0.1"], "dropout=0.1"),
                           (["--schedule=pipedream", "--zero=1"], "zero=1"), (["--schedule=pipedream", "--tied"], "--no-tied"),
                           (["--schedule=pipedream", "--n_expert=4"], "n_expert=4"),
                           (["--schedule=pipedream", "--dtype=float16"], "float16"), (["--graph"], "--graph")):
        with pytest.raises(train.UserError, match=re.escape(words)):
            train.parse([*TINY, f"--data={text}", *options])
