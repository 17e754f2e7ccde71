"""Trains a GPT on text, on whatever machine this is: `python train.py`, or on many devices by torchrun.

What it teaches: everything around the model that training takes. Data that is a function of (seed, step), so that a
run can be cut anywhere and every rank takes its part of the same batch; a step that gives the same numbers however the
batch is split (parallel.py does the splitting); and files that survive a crash.

    python train.py                                     the default: reads the Python library's own sources
    python train.py --preset=baby --data=input.txt      a text of yours
    python train.py --resume                            goes on from out/ckpt.pt, bit for bit
    python train.py --init_from=gpt2/ --data=input.txt  goes on from OpenAI's weights
    torchrun --nproc_per_node=4 train.py --tp=2         on four GPUs, or on four processes of a CPU
    python train.py --help                              the manual

Papers: GPT-2 (Radford et al. 2019); MFU (Chowdhery et al. 2022, 2204.02311).

Reads top to bottom: options, data, checkpoints, the loop, the program.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)      # Ctrl-C while torch is being imported: no traceback

import argparse
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
import sysconfig
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

try:
    import fcntl
except ImportError:      # Windows
    fcntl = None

import numpy as np
import torch
from tqdm import tqdm

from model import (ATTENTION, CHECKPOINT, DTYPES, GPTConfig, Options, Tokenizer, UserError, WriteError, config_of,
                   derive, find_tokenizer, flops_per_token, load_checkpoint, load_model, pick_device, pick_dtype,
                   replacing, tokenizer_of)
from parallel import (SCHEDULES, Parallel, Unreachable, all_reduce, between, check_layout, check_schedule, joined, now,
                      partition, plan_slices, profile_layers, simulate, world_size)

# --------------------------------------------------------------------------------------------------------------
# Options. A preset is a set of defaults: whatever is given on the command line wins.

GPT2 = dict(block_size=1024, dropout=0.0, bias=False, batch_size=512, max_steps=600_000, lr=6e-4, min_lr=6e-5,
            warmup_steps=2000, weight_decay=0.1, beta2=0.95, eval_every=1000, eval_batches=2, save_every=1000)
PRESETS = {
    "cpu": dict(n_layer=2, n_head=4, n_embd=128, block_size=64, dropout=0.0, bias=False, batch_size=12, micro_batch=12,
                max_steps=3300, lr=4e-3, min_lr=4e-5, warmup_steps=100, weight_decay=0.1, beta2=0.99,
                eval_every=1000, eval_batches=150, save_every=500),
    "baby": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, dropout=0.2, bias=False, batch_size=64,
                 micro_batch=64, max_steps=2500, lr=2e-3, min_lr=2e-5, warmup_steps=100, weight_decay=0.1, beta2=0.99,
                 eval_every=500, eval_batches=20, save_every=500),
    "gpt2": dict(GPT2, n_layer=12, n_head=12, n_embd=768, micro_batch=32),
    "gpt2-medium": dict(GPT2, n_layer=24, n_head=16, n_embd=1024, micro_batch=16, lr=3e-4, min_lr=3e-5),
    "gpt2-large": dict(GPT2, n_layer=36, n_head=20, n_embd=1280, micro_batch=8, lr=2.5e-4, min_lr=2.5e-5),
    "gpt2-xl": dict(GPT2, n_layer=48, n_head=25, n_embd=1600, micro_batch=8, lr=2e-4, min_lr=2e-5),
    # the shape is that of the weights it starts from; a rate at which they learn the new text and keep the old
    "finetune": dict(dropout=0.0, batch_size=32, micro_batch=4, max_steps=200, lr=3e-5, min_lr=3e-6, warmup_steps=10,
                     weight_decay=0.1, beta2=0.99, eval_every=50, eval_batches=4, save_every=100),
}
# Draft models for speculative decoding, in about a tenth of their target's time. share: of the target's steps.
DRAFTS = {
    "cpu": dict(n_layer=1, n_head=2, n_embd=96, lr=4e-3, min_lr=4e-5, share=0.27),
    "baby": dict(n_layer=1, n_head=4, n_embd=128, lr=5e-3, min_lr=5e-5, dropout=0.0, share=0.25),
}
ARCHITECTURE = [f.name for f in fields(GPTConfig)]
FREE = ["dropout", "capacity_factor", "aux_weight"]      # of these, what a resumed run may change
LAYOUT = ["dp", "ep", "pp", "tp", "schedule", "chunks", "token_slices", "partition", "recompute", "zero", "trace"]
# which are not taken from a checkpoint


def options():
    """The command line. Options that a preset sets have no default of their own here."""
    p = Options(prog="train.py", description=__doc__.split("\n\n")[0], epilog=preset_table())
    yes_no = argparse.BooleanOptionalAction

    g = p.add_argument_group("what to train on, and where to put it")
    g.add_argument("--preset", choices=PRESETS, help="a set of defaults, listed below (default: finetune from a GPT-2 "
                   "folder, else baby on a GPU, cpu elsewhere)")
    g.add_argument("--data", metavar="PATH", help="a text file; a folder of text files; or token ids as nanoGPT writes "
                   "them, train.bin (uint16) with val.bin beside it (default: the Python library's own sources, "
                   "11 MB). Text is read as bytes, in any language; from a GPT-2 folder, by its tokenizer, once, into "
                   "tokens.bin in --out. The last tenth is kept for validation. A tokenizer.json beside a .bin is its")
    g.add_argument("--vocab_size", type=int, help="number of ids (default: 256 for text, 50257 for a .bin)")
    g.add_argument("--out", metavar="DIR", default="out", help="folder for ckpt.pt, draft.pt, log.jsonl, and the "
                   "tokenizer's files (default: out)")
    g.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out, with the options it was "
                   "started with unless given anew; the architecture can't change")
    g.add_argument("--init_from", metavar="PATH", help="start from the weights and the architecture of this "
                   "checkpoint, at step 0; or of a folder with GPT-2's in Hugging Face's layout: config.json, "
                   "model.safetensors, whole or sharded, and tokenizer.json, or vocab.json and merges.txt")
    g.add_argument("--eval_only", action="store_true", help="train nothing: print loss and perplexity of the weights "
                   "of --init_from or --resume on the whole of --data, or on the val.bin beside a train.bin; with "
                   "--eval_batches on as many batches of it")
    g.add_argument("--draft", action=yes_no, help="afterwards train a small draft model for speculative decoding, in "
                   "about a tenth of the time (default: on for the presets cpu and baby)")

    g = p.add_argument_group("the model")
    g.add_argument("--n_layer", type=int, help="blocks, L")
    g.add_argument("--n_head", type=int, help="attention heads, nh")
    g.add_argument("--n_embd", type=int, help="width, C; a multiple of n_head")
    g.add_argument("--block_size", type=int, help="context length in tokens, T")
    g.add_argument("--dropout", type=float, help="share of activations dropped in training")
    g.add_argument("--bias", action=yes_no, help="biases in linear layers and layer norms, as GPT-2 has them "
                   "(nanoGPT's own runs leave them out: 4%% faster)")

    g.add_argument("--tied", action=yes_no, help="the head's matrix is the embedding, as in GPT-2 (default: on but for "
                   "--schedule=pipedream, whose stages never wait for each other)")
    g.add_argument("--n_expert", type=int, default=0, help="experts a block, in place of its MLP (default: 0, none)")
    g.add_argument("--top_k", type=int, default=1, help="experts that a token goes to: 1 as in Switch, 2 as in GShard "
                   "(default: 1)")
    g.add_argument("--capacity_factor", type=float, default=1.25, help="room of an expert, as a multiple of the tokens "
                   "it gets if all get the same; what finds no room skips the layer (default: 1.25)")
    g.add_argument("--aux_weight", type=float, default=0.01, help="weight of the loss that balances experts "
                   "(default: 0.01)")

    add_optimization(p)
    add_devices(p)
    return p


def add_optimization(p):
    g = p.add_argument_group("the optimization")
    g.add_argument("--max_steps", type=int, help="steps to train for")
    g.add_argument("--decay_steps", type=int, help="step at which the cosine reaches min_lr (default: max_steps)")
    g.add_argument("--batch_size", type=int, help="sequences in the GLOBAL batch of one step")
    g.add_argument("--micro_batch", type=int, help="sequences that a device runs at once; the rest of its part of the "
                   "batch follows and the gradients add up to the same (default: the most the preset allows that "
                   "divides that part)")
    g.add_argument("--lr", type=float, help="learning rate at its highest")
    g.add_argument("--min_lr", type=float, help="learning rate at the end (default with --lr: a tenth of it)")
    g.add_argument("--warmup_steps", type=int, help="steps of linear warm-up")
    g.add_argument("--weight_decay", type=float, help="AdamW's decay, on matrices alone")
    g.add_argument("--beta1", type=float, default=0.9, help="AdamW's decay of the mean gradient (default: 0.9)")
    g.add_argument("--beta2", type=float, help="AdamW's decay of the mean squared gradient")
    g.add_argument("--grad_clip", type=float, default=1.0, help="largest norm of the whole gradient; 0: no limit "
                   "(default: 1.0)")
    g.add_argument("--seed", type=int, default=1, help="fixes weights, batches and dropout (default: 1)")

    g = p.add_argument_group("looking and saving")
    g.add_argument("--eval_every", type=int, help="steps between validations; one is always at the end; 0: only that")
    g.add_argument("--eval_batches", type=int, help="batches of a validation, the same ones every time")
    g.add_argument("--save_every", type=int, help="steps between checkpoints; one is always at the end; 0: only that")


def add_devices(p):
    yes_no = argparse.BooleanOptionalAction
    g = p.add_argument_group("many devices: the processes that torchrun started are laid out as dp x ep x pp x tp")
    g.add_argument("--dp", type=int, help="data parallel: parts of the batch (default: what the others leave)")
    g.add_argument("--ep", type=int, default=1, help="expert parallel: groups of experts, n_expert / ep each; the "
                   "batch is split over these too (default: 1)")
    g.add_argument("--pp", type=int, default=1, help="pipeline parallel: stages, each with its layers (default: 1)")
    g.add_argument("--tp", type=int, default=1, help="tensor parallel: parts of each matrix (default: 1)")
    g.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="order in which a stage takes micro-batches; "
                   "`python parallel.py` draws them. With pipedream every micro-batch is a batch to the optimizer, and "
                   "no stage waits for another's update (default: 1f1b)")
    g.add_argument("--chunks", type=int, help="pieces of the model a stage, for --schedule=interleaved (default: 2 "
                   "there, else 1)")
    g.add_argument("--token_slices", metavar="N", default="1", help="TeraPipe: parts of each sequence that follow each "
                   "other through the stages; auto: as many and as long as is fastest by measurement (default: 1)")
    g.add_argument("--partition", choices=["even", "profile"], default="even", help="layers to stages: as many each, "
                   "or so that the slowest takes least, by measurement (default: even)")
    g.add_argument("--recompute", action=yes_no, default=False, help="keep only the blocks' inputs for backward and "
                   "compute the rest again: a third more work in much less memory")
    g.add_argument("--trace", metavar="FILE", help="write when each stage did what in one step, for Chrome's trace "
                   "viewer or Perfetto, and compare its bubble with the formula")
    g.add_argument("--zero", type=int, default=0, choices=range(4), help="what data-parallel processes share out "
                   "instead of each keeping it: 1 the optimizer's state, 2 gradients too, 3 weights too (default: 0)")

    g = p.add_argument_group("the machine")
    g.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or mps (default: auto, the best one here)")
    g.add_argument("--dtype", default="auto", choices=DTYPES, help="what the model computes in; masters and moments "
                   "are float32 at least (default: auto, bfloat16 on a GPU that has it, else float16; float32 "
                   "elsewhere)")
    g.add_argument("--attention", default="auto", choices=ATTENTION, help="what computes attention: the kernels of "
                   "flash.py, torch's scaled_dot_product_attention, the definition (default: auto, flash on CUDA)")
    g.add_argument("--compile", action=yes_no, help="torch.compile the blocks: slow to start, then "
                   "faster (default: on for CUDA where there is Triton)")
    g.add_argument("--graph", action=yes_no, help="replay the training step as a CUDA graph, so that the GPU never "
                   "waits for Python (default: on for CUDA where it can be: not with float16, pipedream, nor "
                   "dropout under --tp or --recompute)")


def preset_table():
    """The presets as the last part of --help."""
    rows = [["", *PRESETS]]
    rows += [[key, *(str(preset.get(key, "")) for preset in PRESETS.values())] for key in PRESETS["cpu"]]
    return "presets:\n" + "\n".join(f"  {row[0]:13}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in rows)


def parse(argv=None):
    """Command line -> (options, the checkpoint to start from or None). Raises UserError.

    Defaults of an option that isn't typed come from the preset; with --resume, from the run that wrote the checkpoint.
    Which preset and which checkpoint is itself on the command line: so it's read once for those, and once for all."""
    parser, first = options(), options()
    first.set_defaults(**dict.fromkeys(ARCHITECTURE))      # so that what is typed shows, be it the default
    typed = first.parse(argv)
    if typed.resume and typed.init_from:
        raise UserError("--resume goes on from out/ckpt.pt and --init_from starts anew; give one of them")
    path = Path(typed.out) / "ckpt.pt" if typed.resume else typed.init_from
    if typed.eval_only and not path:
        raise UserError("--eval_only looks at weights that are there: give --init_from or --resume")
    start = load_checkpoint(path) if path else None
    before = start["options"] if typed.resume else {}
    usual = "baby" if pick_device(typed.device).type == "cuda" else "cpu"
    preset = typed.preset or before.get("preset") or ("finetune" if path and Path(path).is_dir() else usual)
    if preset == "finetune" and not start:
        raise UserError("preset=finetune has no shape of its own: give --init_from")
    defaults = dict(PRESETS[preset], draft=preset in DRAFTS, micro_batch=None)
    defaults.update({name: value for name, value in before.items() if name not in ("out", "resume", *LAYOUT)})
    fixed = asdict(config_of(start)) if start else {}
    fixed = {name: value for name, value in fixed.items() if name not in FREE}
    for name, value in {**fixed, "preset": before.get("preset", preset)}.items():
        if getattr(typed, name) not in (None, value):
            raise UserError(f"{name}={getattr(typed, name)} differs from the checkpoint's {name}={value}, which can't "
                            "change")
    defaults.update(fixed, preset=preset)
    if typed.lr is not None:
        defaults["min_lr"] = typed.lr / 10
    parser.set_defaults(**defaults)
    args = parser.parse(argv)
    args.data = args.data and os.path.abspath(args.data)      # so that --resume works from another folder
    args.options = dict(vars(args))                           # what a checkpoint keeps: as asked for, not as resolved
    if args.eval_only:
        args.draft, args.eval_batches = False, typed.eval_batches
    check(args)
    part = args.batch_size // data_ranks(args)
    if args.micro_batch is None or (typed.micro_batch is None and part % args.micro_batch):
        args.micro_batch = max(n for n in range(1, min(PRESETS[preset]["micro_batch"], part) + 1) if part % n == 0)
    if part % args.micro_batch:
        raise UserError(f"batch_size={args.batch_size} over {data_ranks(args)} data ranks is {part} each, not a "
                        f"multiple of micro_batch={args.micro_batch}")
    args.device = pick_device(args.device)
    args.dtype = pick_dtype(args.dtype, args.device)
    if args.compile is None:      # on CUDA torch.compile needs Triton
        args.compile = args.device.type == "cuda" and importlib.util.find_spec("triton") is not None
    if args.dtype == torch.float16 and args.schedule == "pipedream":
        raise UserError("schedule=pipedream has no loss scale that all stages agree on: not with dtype=float16")
    can = (args.device.type == "cuda" and args.dtype != torch.float16 and args.schedule != "pipedream"
           and not (args.dropout and (args.tp > 1 or args.recompute)))
    if args.graph and not can:
        raise UserError("--graph needs a CUDA device, and neither float16, --schedule=pipedream, nor dropout under "
                        "--tp or --recompute")
    args.graph = can if args.graph is None else args.graph
    return args, start


def check(args):
    """UserError for values that no run can use. GPTConfig checks the shapes."""
    for name in ("batch_size", "micro_batch", "eval_batches", "vocab_size", "dp", "ep", "pp", "tp", "chunks"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"{name}={getattr(args, name)} must be at least 1")
    for name in ("max_steps", "decay_steps", "warmup_steps", "eval_every", "save_every", "lr", "min_lr", "weight_decay",
                 "grad_clip", "seed"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"{name}={value} must be 0 or a positive number")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise UserError(f"{name}={getattr(args, name)} must be at least 0 and below 1")
    if args.data == "":
        raise UserError("data= names no file; without --data it's the Python library's own sources")
    world, ranks = world_size(), data_ranks(args)
    asked = (args.dp or 1) * args.ep * args.pp * args.tp
    if args.dp and asked != world:
        raise UserError(f"dp={args.dp} x ep={args.ep} x pp={args.pp} x tp={args.tp} is {asked}, but there are {world} "
                        f"processes; start as many: torchrun --nproc_per_node={asked}")
    if args.chunks is None:
        args.chunks = 2 if args.schedule == "interleaved" else 1
    if args.tied is None:
        args.tied = args.schedule != "pipedream"
    check_schedule(args)
    check_slices(args)
    if args.schedule == "pipedream" and args.tied:
        raise UserError("schedule=pipedream needs --no-tied: its first and last stage never wait for each other")
    if args.ep > 1 and not args.n_expert:
        raise UserError(f"ep={args.ep} splits experts, but n_expert=0")
    if world % asked:
        raise UserError(f"{world} processes can't be laid out with ep={args.ep} x pp={args.pp} x tp={args.tp}"
                        + ("; torchrun starts several" if world == 1 else ""))
    if args.batch_size % ranks:
        raise UserError(f"batch_size={args.batch_size} can't be split over {ranks} data ranks")


def check_slices(args):
    """UserError unless token_slices fits the other options; "auto" stays, else it becomes a number."""
    if args.token_slices != "auto":
        number = str(args.token_slices)
        if not (number.isascii() and number.isdigit() and len(number) < 10 and 1 <= int(number) <= args.block_size):
            raise UserError(f"token_slices={args.token_slices} must be auto or between 1 and "
                            f"block_size={args.block_size}")
        args.token_slices = int(args.token_slices)
    if args.token_slices != 1:
        if args.schedule not in ("gpipe", "1f1b"):
            raise UserError(f"token_slices={args.token_slices} are for schedule=gpipe or 1f1b, not {args.schedule}")
        if args.dropout or args.n_expert:
            raise UserError(f"token_slices={args.token_slices} are for whole attention and dense layers: not with "
                            f"dropout={args.dropout}, n_expert={args.n_expert}")


def data_ranks(args):
    """How many parts the batch is split into."""
    return max(1, world_size() // (args.pp * args.tp))


# --------------------------------------------------------------------------------------------------------------
# Data: two arrays of token ids on disk, mapped into memory, never read whole

class Data:
    """`train` and `val` (1-D arrays of ids, uint8, uint16 or uint32; val may be empty), vocab_size and the tokenizer.
    start: the checkpoint's dictionary to train on, whose tokenizer reads a text; whole: all of it, or val.bin, is val,
    and train is empty."""

    def __init__(self, args, main_process=True, start=None, whole=False):
        self.block_size, self.seed = args.block_size, args.seed
        known, out = start and tokenizer_of(start), Path(args.out)
        path = Path(args.data) if args.data else None
        if path and (path / "train.bin").is_file():
            path = path / "train.bin"
        try:
            if path and path.suffix == ".bin":
                self.vocab_size = args.vocab_size or 50257
                self.tokenizer = known if known and known.kind != "bytes" else tokenizer_beside(path, self.vocab_size)
                self.train, self.val = read_ids(path, self.block_size, whole)
            else:
                self.tokenizer, self.vocab_size = known or Tokenizer("bytes"), args.vocab_size or 256
                if self.tokenizer.kind == "ids":
                    raise UserError(f"data={path or 'the library'} is text, but the checkpoint's tokens are numbers"
                                    + (f": {known.note}" if known.note else ""))
                if self.tokenizer.kind == "bytes" and self.vocab_size > 256:
                    raise UserError(f"vocab_size={self.vocab_size}, but text is read as bytes, which are 256")
                if not path or path.is_dir():
                    path = join_texts(path, out / "text.txt") if main_process else out / "text.txt"
                dtype = np.uint8
                if self.tokenizer.kind == "gpt2":
                    text, path = path, out / "tokens.bin"
                    dtype = np.uint16 if self.vocab_size <= 2 ** 16 else np.uint32
                    if main_process:
                        write_tokens(text, path, self.tokenizer, self.vocab_size, dtype)
                self.train, self.val = split(read_array(path, dtype), path, self.block_size, whole)
        except OSError as error:
            raise UserError(f"data={error.filename} can't be read: {error.strerror}") from None
        if self.vocab_size <= np.iinfo(self.train.dtype).max:      # else no id can be too large
            for ids in (self.train, self.val):
                if len(ids) and (top := largest(ids)) >= self.vocab_size:
                    raise UserError(f"data={path} has the id {top}, but vocab_size={self.vocab_size}")

    def batch(self, step, batch_size):
        """Inputs and targets of one step, (B, T) int64 each: windows at random places, a function of (seed, step)
        alone. Every start from 0 to n - T - 1 is as likely, so the last token is a target too."""
        rng = np.random.default_rng(derive(self.seed, "batch", step))
        return self.windows(self.train, rng.integers(0, len(self.train) - self.block_size, size=batch_size))

    def windows(self, ids, starts):
        """The T tokens from each start, and the same shifted by one: (B, T), (B, T) int64."""
        rows = np.stack([ids[i:i + self.block_size + 1] for i in starts]).astype(np.int64)         # (B, T + 1)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def validation(self, batches, batch_size):
        """At most `batches` batches, spread evenly over the validation tokens, the same ones at every call; none where
        no window fits."""
        places = len(self.val) - self.block_size
        if places < 1:
            return
        count = min(batches * batch_size, 1 + (places - 1) // self.block_size)
        if count > batch_size:
            count -= count % batch_size                                      # full batches: one shape to compile
        starts = np.linspace(0, places - 1, count).astype(np.int64)
        for i in range(0, count, batch_size):
            yield self.windows(self.val, starts[i:i + batch_size])

    def every(self, batch_size):
        """All of val, each token but the first a target once: windows side by side; the last one begins earlier, so as
        to be full, and only what is new to it counts. The last batch may be smaller."""
        T, n = self.block_size, len(self.val)
        starts = [*range(0, n - T, T)]
        old = -(n - 1) % T                                                   # targets of the last that had their turn
        starts += [n - T - 1] if old else []
        for i in range(0, len(starts), batch_size):
            idx, targets = self.windows(self.val, starts[i:i + batch_size])
            if i + batch_size >= len(starts):
                targets[-1, :old] = -1
            yield idx, targets


def read_array(path, dtype):
    """A file as a 1-D array, mapped. Raises UserError if it's empty or not whole."""
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if not path.is_file():
        raise UserError(f"data={path} is not a regular file")
    if size == 0:
        raise UserError(f"data={path} is empty")
    if size % width:
        raise UserError(f"data={path} has {size} bytes, not a whole number of {width}-byte tokens")
    return np.memmap(path, dtype, "r")


def read_ids(path, block_size, whole):
    """nanoGPT's format: `path`, and val.bin beside it if there, else the last tenth. -> train, val; whole: -> nothing,
    and all of `path`, but of train.bin the val.bin beside it."""
    beside = path.with_name("val.bin")
    if whole and path.name == "train.bin" and beside.is_file():
        path = beside
    if whole or path.name == "val.bin" or not beside.is_file():
        return split(read_array(path, np.uint16), path, block_size, whole)
    val = read_array(beside, np.uint16)
    return need(read_array(path, np.uint16), path, block_size), val if len(val) > block_size else val[:0]


def split(ids, path, block_size, whole):
    """-> the first nine tenths and the last tenth; a tenth that can't hold one window is trained on instead. whole:
    -> nothing and all."""
    if whole:
        return ids[:0], need(ids, path, block_size)
    n = len(ids) - len(ids) // 10
    if len(ids) - n <= block_size:
        n = len(ids)
    return need(ids[:n], path, block_size), ids[n:]


def need(ids, path, block_size):
    """ids, if one window fits in them: block_size inputs and one more token as the last target."""
    if len(ids) < block_size + 1:
        raise UserError(f"data={path} has {len(ids)} tokens, but block_size={block_size} needs {block_size + 1}")
    return ids


def largest(ids):
    """The largest id, read 16 million at a time."""
    step = 2 ** 24
    starts = tqdm(range(0, len(ids), step), "reading ids", leave=False, disable=len(ids) < 50 * step)
    return max(int(ids[i:i + step].max()) for i in starts)


def join_texts(folder, path):
    """Writes the text files of a folder (None: the Python library's sources) one after the other to `path`.

    In an order shuffled by their names, so that the last tenth, the validation split, is like the rest. Left out:
    hidden files and what has a zero byte in its first 4 KiB; of the library, its tests and installed packages."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    skip = set() if folder else {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [f for f in root.rglob("*" if folder else "*.py") if f.is_file() and f.resolve() != path.resolve()
             and not any(part in skip or part.startswith(".") for part in f.relative_to(root).parts)]
    files.sort(key=lambda f: hashlib.sha256(f.relative_to(root).as_posix().encode()).digest())
    with replacing(path) as out:
        for file in files:
            with open(file, "rb") as text:
                if b"\0" not in text.read(4096):
                    text.seek(0)
                    shutil.copyfileobj(text, out)
        if out.tell() == 0:
            raise UserError(f"data={root} holds no text files")
    return path


def tokenizer_beside(path, vocab_size):
    """The Tokenizer of a .bin: the files of one in the same folder, else none. GPT-2's end-of-text is known anyway."""
    file, end = find_tokenizer(path.parent), 50256 if vocab_size == 50257 else None
    return Tokenizer("gpt2", file, end) if file.is_file() else Tokenizer("ids", end=end)


def write_tokens(text, path, tokenizer, vocab_size, dtype):
    """Writes the ids of the file `text` to `path`, unless they are there already: the digests of the text and of the
    tokenizer's files, and the bytes, stand in a file beside it. Raises UserError for ids that the model hasn't."""
    read_array(text, np.uint8)      # it's a file, and not empty
    about, digests = path.with_suffix(".json"), []
    for file in (text, *tokenizer.files()):
        with open(file, "rb") as raw:
            digests.append(hashlib.file_digest(raw, "sha256").hexdigest())
    if path.is_file() and about.is_file() and about.read_text() == json.dumps([*digests, path.stat().st_size]):
        return
    about.unlink(missing_ok=True)      # before the ids change, and written after
    with replacing(path) as out, tqdm(total=text.stat().st_size, desc="reading text", unit="B", unit_scale=True,
                                      leave=False, disable=text.stat().st_size < 2 ** 24) as bar:
        for piece in pieces(text):
            ids = tokenizer.encode(piece)
            if max(ids, default=0) >= vocab_size:
                raise UserError(f"data={text} has the id {max(ids)} by {tokenizer.file}, but vocab_size={vocab_size}")
            out.write(np.array(ids, dtype).tobytes())
            bar.update(len(piece.encode()))
    with replacing(about) as file:
        file.write(json.dumps([*digests, path.stat().st_size]).encode())


def pieces(path, size=2 ** 20):
    """The text of a file in parts of about `size` characters, whose tokens one after the other are those of the whole:
    each but the first begins with white space, and none of GPT-2's words has any behind its first character."""
    rest, cut = "", re.compile(r".*\S(?=[ \n])", re.DOTALL)
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        while part := file.read(size):
            rest += part
            if found := cut.match(rest):
                yield found.group()
                rest = rest[found.end():]
    if rest:
        yield rest


def learning_rate(step, args):
    """Of step 0, 1, ...: linear up to lr over warmup_steps, then a cosine down to min_lr at decay_steps."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / (args.warmup_steps + 1)
    end = args.max_steps if args.decay_steps is None else args.decay_steps
    done = min(1.0, (step - args.warmup_steps) / max(1, end - args.warmup_steps))
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * done)) / 2


# --------------------------------------------------------------------------------------------------------------
# Checkpoints and the log: each file is replaced whole or not at all

def save(path, args, config, data, engine, step, run_id):
    """Writes a checkpoint, by the main process; all call it. run_id: a number that all files of one run share. Raises
    WriteError, on all."""
    state, error = engine.state(), None
    if engine.main:
        ckpt = {"format": CHECKPOINT, "config": asdict(config), "options": args.options,
                "tokenizer": data.tokenizer.kind, "tokenizer_file": data.tokenizer.file and data.tokenizer.file.name,
                "end": data.tokenizer.end, "tokens": len(data.train) + len(data.val), "step": step, "run": run_id,
                **state}
        try:
            with replacing(path) as file:
                torch.save(ckpt, file)
        except WriteError as problem:
            error = problem
    if engine.mesh.any(error is not None):
        raise error or WriteError(f"{path} can't be written by the main process")


def read_log(path, step):
    """The log's records up to `step`; a resumed run takes the later steps again. Damaged lines are left out."""
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= step:
            records.append(record)
    return records


class Log:
    """One JSON object a line, the configuration first; of the main process alone."""

    def __init__(self, path, header, records, main):
        self.file = open(os.devnull, "w")
        if not main:
            return
        with replacing(path) as file:
            file.write("".join(json.dumps(record) + "\n" for record in (header, *records)).encode())
        self.file = open(path, "a", buffering=1)

    def write(self, record):
        """Appends one line. A full disk costs the line, not the run: checkpoints say whether anything is wrong."""
        try:
            self.file.write(json.dumps(record) + "\n")
        except OSError:
            pass


# --------------------------------------------------------------------------------------------------------------
# The loop

# Dense bfloat16 peak in FLOP/s by the vendors' data sheets: the base of MFU. The first name that fits counts.
PEAK = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12,
        "A100": 312e12, "A10G": 70e12, "A10": 125e12, "A40": 150e12, "A6000": 155e12, "L40S": 362e12, "L40": 181e12,
        "L4": 121e12, "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 4080": 97e12, "RTX 3090": 71e12, "MI300X": 1307e12}


def peak_flops(device):
    """FLOP/s of the card, or None where it isn't known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for card, peak in PEAK.items() if re.search(rf"\b{card}\b", name)), None)


class Diverged(Exception):
    """The loss or the gradient is no longer a number."""


class Interrupt:
    """SIGINT or SIGTERM asks for a clean end: `number` is then set. The same signal again ends one process at once.

    Among several processes one that waits for a dead one would never see the signal: Python's handlers run between two
    of its instructions. Nor does it always see the death: gloo fails what waits for a message, but not what waits for
    the rest of one (in a pipeline, most times). So a thread is woken too, and ends the process if it hasn't ended
    itself within GRACE seconds (torchrun, which tells the others of a death by the signal, waits 30)."""

    GRACE = 20

    def __init__(self, processes):
        self.number, self.processes, self.several = None, processes, processes.size > 1
        if self.several:
            self.pipe = os.pipe()
            os.set_blocking(self.pipe[1], False)
            signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self.watch, daemon=True).start()
        self.old = {n: signal.signal(n, self.handle) for n in (signal.SIGINT, signal.SIGTERM)}

    def handle(self, number, frame):
        self.number = self.number or number
        signal.signal(number, signal.SIG_IGN if self.several else signal.SIG_DFL)      # torchrun sends some twice

    def watch(self):
        number = os.read(self.pipe[0], 1)[0]
        time.sleep(self.GRACE)
        gone = self.processes.gone()
        what = gone or f"told to stop, and had not come to an end after {self.GRACE} s"
        print(f"train.py: rank {self.processes.rank}: {what}", file=sys.stderr, flush=True)
        os._exit(1 if gone else 128 + number)

    def restore(self):
        """Signals mean again what they meant before. Not so among several processes: torchrun's must not keep one of
        them from saying why it ends."""
        if not self.several:
            for number, handler in self.old.items():
                signal.signal(number, handler)


class Progress:
    """The bar and the log, one step behind the device. A step's numbers travel to the host while the next step is
    being launched, and are read after that: to ask for them at once would leave the device idle meanwhile."""

    def __init__(self, title, args, log, start, last, flops, engine):
        self.bar = tqdm(desc=title, total=args.max_steps, initial=start, unit="step", dynamic_ncols=True,
                        disable=not engine.main)
        self.log, self.tokens, self.scaled, self.engine = log, args.batch_size * args.block_size, engine.scaled, engine
        self.flops, self.stopping = flops / engine.mesh.world.size, False
        self.peak, self.cuda = peak_flops(args.device), args.device.type == "cuda"
        self.record, self.seconds, self.last = None, 0.0, last
        self.side = torch.cuda.Stream(args.device) if self.cuda else None
        self.restart()

    def restart(self):
        """Starts the clock, first and after work that isn't training."""
        self.clock = now(self.engine.mesh.device)

    def push(self, record, loss, norm, stop):
        """record: step, lr. loss (this rank's part) and norm: scalars on the device. stop: whether this process was
        asked to. Adds up the parts over all ranks, and writes the record before."""
        numbers = torch.stack([loss / self.engine.copies, norm ** 2 / self.engine.norm_copies,
                               torch.full_like(loss, float(stop))])
        if self.engine.counts is not None:
            numbers = torch.cat([numbers, self.engine.counts.flatten() / self.engine.copies])
        work = all_reduce(numbers, self.engine.mesh.world, wait=False)
        end = now(self.engine.mesh.device)
        self.flush()
        self.record, self.numbers, self.work, self.end = record, numbers, work, end

    def read(self):
        """Waits for the pending step's numbers and takes the time. Raises Diverged if they aren't numbers."""
        seconds = between(self.clock, self.end)
        with torch.cuda.stream(self.side):      # beside the next step, which is in the queue already
            self.work.wait()
            numbers = self.numbers.tolist()
        self.clock = self.end
        self.seconds += seconds
        loss, square, stop, *counts = numbers
        self.stopping, norm = stop > 0, math.sqrt(square) if square >= 0 else math.nan
        if counts:
            *load, dropped = np.reshape(counts, (-1, self.engine.config.n_expert + 1)).sum(0)      # over all layers
            self.record.update(dropped=dropped / (sum(load) + dropped), load=[n / max(1, sum(load)) for n in load])
        if not math.isfinite(loss) or not (math.isfinite(norm) or self.scaled):      # float16 skips such a step
            raise Diverged(f"the loss is {loss} and the gradient's norm {norm} at step {self.record['step']}")
        self.record.update(loss=loss, grad_norm=norm if math.isfinite(norm) else None,
                           tokens_per_s=round(self.tokens / seconds, 1),
                           mfu=round(self.tokens * self.flops / seconds / self.peak, 4) if self.peak else None)

    def flush(self, validate=None):
        """Writes what is pending, with the value of validate() as its val_loss, whose time isn't counted."""
        if self.record is None:
            return
        self.read()
        record, self.record = self.record, None
        if validate and (value := validate()) is not None:
            if not math.isfinite(value):
                raise Diverged(f"the validation loss is {value} after step {record['step']}")
            record["val_loss"] = value
        self.log.write(record)
        self.last = {**self.last, **record}
        mfu = f"{record['mfu']:.1%}" if self.peak else "n/a"
        val = f", val {self.last['val_loss']:.3f}" if "val_loss" in self.last else ""
        self.bar.set_postfix_str(f"loss {record['loss']:.3f}{val}, {record['tokens_per_s']:,.0f} tokens/s, MFU {mfu}",
                                 refresh=False)
        self.bar.update(1)
        if validate:
            self.restart()


def to_device(tensors, device):
    """The tensors on `device`; to a GPU from pinned memory, since only then the host needn't wait for the copy."""
    if device.type == "cuda":
        return [x.pin_memory().to(device, non_blocking=True) for x in tensors]
    return [x.to(device) for x in tensors]


def my_part(tensors, engine):
    """This rank's sequences of a batch that all ranks have: contiguous rows, (B, T) -> (B / data ranks, T)."""
    data = engine.mesh.data
    return [x.chunk(data.size)[data.rank] for x in tensors]


@torch.no_grad()
def evaluate(engine, data, args, stop, batches=None):
    """Mean loss over the validation batches, or those given; None if there are none, or if the run is being stopped.

    Every rank runs as many micro-batches of one shape as every other: what is missing is filled up with sequences
    that have no targets."""
    engine.flush()
    engine.train(False)
    sums = torch.zeros(2, dtype=torch.float64, device=args.device if args.device.type != "mps" else "cpu")
    ranks, rank, rows = engine.mesh.data.size, engine.mesh.data.rank, args.micro_batch
    if batches is None:
        batches = data.validation(args.eval_batches, args.batch_size)
    for idx, targets in batches:
        missing = -len(idx) % (ranks * rows)
        idx = torch.cat([idx, idx.new_zeros(missing, idx.size(1))])
        targets = torch.cat([targets, targets.new_full((missing, idx.size(1)), -1)])
        for part in zip(idx.split(rows)[rank::ranks], targets.split(rows)[rank::ranks]):
            part = to_device(part, args.device)
            sums[0] += engine.loss(*part).to(sums) / engine.copies
            sums[1] += (part[1] >= 0).sum() / engine.mesh.world.size * ranks
            if engine.mesh.any(stop.number is not None):
                engine.train()
                return None
    engine.train()
    all_reduce(sums, engine.mesh.world)
    return float(sums[0] / sums[1]) if sums[1] else None


def config_from(args, data):
    """The shape that the options and the data ask for. Raises UserError."""
    return GPTConfig(data.vocab_size, *(getattr(args, field) for field in ARCHITECTURE[1:]))


def plan(args, config, mesh):
    """The layers of each piece and the tokens of each slice, None for the plain choice. What has to be measured is
    measured by rank 0, for all. -> the options with these as `partition` and `slices`."""
    main, pieces, lengths, slices = mesh.world.rank == 0, args.pp * args.chunks, None, None
    if args.partition == "profile":
        found = partition(profile_layers(config, args), pieces)[0] if main else [(0, 0, 0)] * pieces
        lengths = [mesh.common(end - first) for first, end, _ in found]
    if args.token_slices == "auto":
        found = plan_slices(config, args) if main else []
        count = mesh.common(len(found))
        slices = [mesh.common(n) for n in (found if main else [0] * count)]
    elif args.token_slices > 1:
        slices = [len(part) for part in np.array_split(range(config.block_size), args.token_slices)]
    if main and lengths:
        print(f"layers a piece: {' '.join(map(str, lengths))}", file=sys.stderr)
    if main and args.token_slices == "auto":
        print(f"tokens a slice: {' '.join(map(str, slices))}", file=sys.stderr)
    return argparse.Namespace(**vars(args) | dict(partition=lengths, slices=slices))


def build(args, config, mesh, start):
    """-> the engine that trains. `start`: a checkpoint's dictionary, to go on from with --resume, else to take the
    weights from; None: from the seed."""
    engine = Parallel(config, mesh, plan(args, config, mesh), start)
    if start and args.resume:
        engine.load(start)
    return engine


def check_health(engine, batch, step):
    """Raises Diverged if the model, as it is after `step`, has no finite loss and gradient on its next batch: a run
    could not go on from a checkpoint of it. The batch is taken again when it's due."""
    loss, norm, _ = engine.gradient(*batch)
    loss = loss / engine.copies
    engine.forget()
    all_reduce(loss, engine.mesh.world)
    if not loss.isfinite() or not (norm.isfinite() or engine.scaled):
        raise Diverged(f"the loss is {float(loss)} and the gradient's norm {float(norm)} after step {step}")


def take_step(engine, batch, lr, trace, bar):
    """-> what engine.train_step does. trace: None, or the file for the step's trace; then the bubble predicted and
    measured is said above the bar."""
    if not trace:
        return engine.train_step(*batch, lr)
    found = []
    timeline, launches = engine.traced(lambda: found.append(engine.train_step(*batch, lr)))
    P, M = engine.mesh.pp.size, len(batch[0]) // engine.args.micro_batch
    if engine.main:
        try:
            Path(trace).write_text(json.dumps(timeline.trace(launches)))
        except OSError as error:      # no reason to end the run
            bar.write(f"train.py: trace={trace} can't be written: {error.strerror}", file=sys.stderr)
        schedule = SCHEDULES[engine.args.schedule](engine.args.chunks, len(engine.slices))
        line = simulate([schedule(s, P, M) for s in range(P)])
        bar.write(f"trace in {trace}: bubble of {M} micro-batches on {P} stages {line.bubble:.3f} predicted, "
                  f"{timeline.bubble:.3f} measured", file=sys.stderr)
    return found[0]


def fit(name, args, data, mesh, start, run_id, stop, processes):
    """Trains one model, from `start` if there is one, and saves it as out/NAME.pt. Returns its Progress.

    After a signal it saves and returns early. Raises UserError, Diverged, and WriteError if the end can't be saved."""
    config, path = config_from(args, data), Path(args.out) / f"{name}.pt"
    engine = build(args, config, mesh, start)
    step, saved = (start["step"], start["step"]) if start and args.resume else (0, None)
    validate = partial(evaluate, engine, data, args, stop)

    def due(every):
        return step == args.max_steps or (every and step % every == 0)

    def batch():
        return to_device(my_part(data.batch(step, args.batch_size), engine), args.device)
    log_path = path.with_name("log.jsonl" if name == "ckpt" else f"{name}.jsonl")
    records = read_log(log_path, step)
    if mesh.any(bool(records) and due(args.eval_every) and "val_loss" not in records[-1]):
        value = validate()      # which a signal cut short
        if value is not None and records:
            records[-1]["val_loss"] = value
    header = {"config": asdict(config), "options": args.options, "parameters": engine.num_params}
    with processes.agreed(WriteError):
        log = Log(log_path, header, records, engine.main)
    progress = Progress("target" if name == "ckpt" else name, args, log, step, dict(*records[-1:]),
                        flops_per_token(config), engine)

    def store():
        nonlocal saved
        progress.flush()
        engine.flush()
        check_health(engine, ahead, step)
        save(path, args, config, data, engine, step, run_id)
        saved = step
        progress.restart()

    try:
        with progress.bar:
            ahead, traced = batch(), min(step + 5, args.max_steps - 1)       # by then all is compiled
            while step < args.max_steps and not progress.stopping:
                torch.manual_seed(derive(args.seed, "dropout", step, mesh.data.rank + mesh.data.size * mesh.pp.rank))
                lr = learning_rate(step, args)
                loss, norm = take_step(engine, ahead, lr, args.trace if step == traced else None, progress.bar)
                step += 1
                progress.push({"step": step, "lr": lr}, loss, norm, stop.number is not None)
                ahead = batch()                                              # while the device works
                if due(args.eval_every):
                    progress.flush(validate)
                if due(args.save_every) and step < args.max_steps:
                    try:
                        store()
                    except WriteError as error:      # there may be room again before the end
                        if engine.main:
                            progress.bar.write(f"train.py: {error}; going on, the last one saved stays",
                                               file=sys.stderr)
            if saved != step:
                store()
    except Diverged as error:
        kept = f"{path} keeps step {saved}" if saved else "nothing was saved"
        raise Diverged(f"{error}; {kept}, and a lower --lr may help") from None
    return progress


# --------------------------------------------------------------------------------------------------------------
# The program

def announce(args, data, mesh, start):
    """One line on what runs where, and why not on something faster; another if the data isn't what it was."""
    threads = f"{args.device.type}, {torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else threads
    where += "" if torch.cuda.is_available() else " (no CUDA GPU here)"
    how = f"{str(args.dtype).split('.')[1]}, attention {args.attention}, {'' if args.compile else 'not '}compiled"
    how += "" if mesh.world.size == 1 else f", {mesh}, zero {args.zero}"
    print(f"preset {args.preset} on {where}: {how}; {len(data.train):,} training and {len(data.val):,} validation "
          f"tokens, {args.batch_size * args.block_size:,} tokens a step", file=sys.stderr)
    tokens = len(data.train) + len(data.val)
    if args.resume and start["tokens"] != tokens:
        print(f"the data has {tokens:,} tokens, and had {start['tokens']:,} at the checkpoint", file=sys.stderr)


def draft_options(args):
    """The options of the draft model: the target's, with a smaller shape and a shorter schedule. It's too small to be
    cut: every process takes a part of the batch, if that has as many. Raises UserError."""
    if args.preset not in DRAFTS:
        raise UserError(f"draft is for the presets {' and '.join(DRAFTS)}, not {args.preset}")
    changes = dict(DRAFTS[args.preset], eval_every=0, decay_steps=None, n_expert=0, token_slices=1, partition="even",
                   trace=None)
    changes["max_steps"] = math.ceil(args.max_steps * changes.pop("share"))
    world = world_size()
    if args.batch_size % world == 0:
        changes.update(ep=1, pp=1, tp=1, chunks=1, schedule="1f1b",
                       micro_batch=math.gcd(args.micro_batch, args.batch_size // world))
    return argparse.Namespace(**{**vars(args), **changes})


def summary(name, progress, args):
    """One line on a finished model."""
    last = progress.last
    numbers = f"loss {last['loss']:.4f}" if last else "nothing left to train"
    if "val_loss" in last:
        numbers += f", val {last['val_loss']:.4f} (perplexity {math.exp(min(last['val_loss'], 700)):.2f})"
    if args.device.type == "cuda":
        numbers += f", {torch.cuda.max_memory_allocated(args.device) / 2 ** 30:.1f} GiB at the peak"
    engine = progress.engine
    return (f"{Path(args.out) / name}.pt: {engine.num_params:,} parameters, {args.max_steps} steps, "
            f"{progress.seconds:.1f} s of training; {numbers}")


def sample_text(path, args, stop, n=200):
    """A text, n tokens long, that the model saved at `path` writes from nothing."""
    model, tokenizer = load_model(path, args.device, args.dtype, args.attention)
    try:
        decode = tokenizer.decoder()
    except UserError:      # its library isn't here, and a .bin can be trained on without
        tokenizer = Tokenizer("ids", end=tokenizer.end)
        decode = tokenizer.decoder()
    V = model.config.vocab_size
    start = torch.tensor([[tokenizer.start(V)]], device=args.device)                            # (1, 1)
    generator = torch.Generator(args.device).manual_seed(derive(args.seed, "sample"))
    ids = []
    for token in model.stream(start, n, 0.8, generator=generator):
        if stop.number or token.item() == tokenizer.ending(V):
            break
        ids.append(token.item())
    return decode(ids, final=True)


def check_memory(args, config):
    """UserError if masters, gradient and moments, or one batch of ids, are more than the machine's memory."""
    C, share = config.n_embd, args.tp * (data_ranks(args) if args.zero else 1)
    mlps = 8 * max(1, config.n_expert / args.ep)
    layers = (4 + mlps) * config.n_layer * C / args.pp                       # the first stage has the embedding too
    parameters = int(C * (config.padded_vocab + config.block_size + layers) / share)
    need = (4 if args.eval_only else 16) * parameters + 16 * args.batch_size * args.block_size
    if args.device.type == "cuda":
        there = torch.cuda.get_device_properties(args.device).total_memory
    elif hasattr(os, "sysconf"):
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if need > there:
        raise UserError(f"{parameters:,} parameters and {args.batch_size * args.block_size:,} tokens a step need at "
                        f"least {need / 2 ** 30:,.0f} GiB, and this machine has {there / 2 ** 30:,.0f}")


@contextmanager
def own_folder(out):
    """Makes the folder and keeps it for this run alone while it lasts. Raises UserError if that can't be."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out={out} can't be made a folder: {error.strerror}") from None
    if not os.access(out, os.W_OK):
        raise UserError(f"out={out} can't be written to")
    folder = None
    if fcntl and os.access(out, os.R_OK):
        folder = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)               # let go of when the process ends, however
        except BlockingIOError:
            os.close(folder)
            raise UserError(f"out={out} is in use by another run") from None
        except OSError:      # a file system without locks
            pass
    try:
        yield
    finally:
        if folder is not None:
            os.close(folder)


def load_draft(args, config, start):
    """The draft's checkpoint to go on from: one of the same run and shape. Raises UserError if it's damaged."""
    path = Path(args.out) / "draft.pt"
    if not args.resume or not path.is_file():
        return None
    try:
        draft = load_checkpoint(path)
    except UserError as error:
        raise UserError(f"{error}; delete it to train the draft anew, or use --no-draft") from None
    return draft if draft["run"] == start["run"] and draft["config"] == asdict(config) else None


def prepare(args, data, start):
    """The models to train, [(name, options, checkpoint)]. Raises UserError for whatever can be found wrong before."""
    if start and (start["tokenizer"] == "bytes") != (data.tokenizer.kind == "bytes"):
        raise UserError(f"data={args.data} holds {data.tokenizer.kind}, but the checkpoint's tokens are "
                        f"{start['tokenizer']}")
    if args.trace is not None and (not Path(args.trace).parent.is_dir() or Path(args.trace).is_dir() or not args.trace):
        raise UserError(f"trace={args.trace} is no file that can be written")
    jobs = [("ckpt", args, start)]
    if args.draft:
        draft = draft_options(args)
        jobs.append(("draft", draft, load_draft(args, config_from(draft, data), start)))
    for name, options, _ in jobs:
        config = config_from(options, data)
        check_layout(config, options.ep if config.n_expert else 1, options.pp * options.chunks, options.tp,
                     "with --no-draft it would fit, but the draft model's " if name == "draft" else "")
        check_memory(options, config)
    return jobs


def train(jobs, meshes, data, run_id, stop, processes):
    """Trains the target, then its draft. -> what to print; None if a signal came before that was done."""
    lines, text, args = [], "", jobs[0][1]
    for (name, options, start), mesh in zip(jobs, meshes):
        if args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        progress = fit(name, options, data, mesh, start, run_id, stop, processes)
        lines.append(summary(name, progress, options))
        del progress      # and the memory of what was trained
        if mesh.any(stop.number is not None):
            return None
    path = Path(args.out) / "ckpt.pt"
    if processes.rank == 0:
        text = sample_text(path, args, stop)
    return "\n".join(lines) + f"\na sample:\n{text}\nmore: python sample.py --ckpt={path}"


def score(jobs, meshes, data, run_id, stop, processes):
    """--eval_only. As `train`, with nothing trained and nothing saved."""
    (_, args, start), mesh = jobs[0], meshes[0]
    engine = build(args, config_from(args, data), mesh, start)
    batches, windows = data.every(args.batch_size), -(-(len(data.val) - 1) // data.block_size)
    if args.eval_batches:
        batches = data.validation(args.eval_batches, args.batch_size)
        windows = min(windows, args.eval_batches * args.batch_size)
    batches = tqdm(batches, "evaluating", -(-windows // args.batch_size), False, unit="batch",
                   disable=None if engine.main else True)
    loss = evaluate(engine, data, args, stop, batches)
    if mesh.any(loss is None):
        return None
    if not math.isfinite(loss):
        raise Diverged(f"the loss is {loss}")
    path = args.init_from if not args.resume else Path(args.out) / "ckpt.pt"
    part = "a part of " if args.eval_batches else ""
    return (f"{path}: {engine.num_params:,} parameters, {part}{len(data.val):,} tokens; loss {loss:.4f}, perplexity "
            f"{math.exp(min(loss, 700)):.2f}")


def run(argv):
    """Everything that the options ask for. Returns the exit code."""
    with joined() as processes, ExitStack() as held:
        main = processes.rank == 0
        with processes.agreed(UserError):
            args, start = parse(argv)
        with processes.agreed(UserError, WriteError):      # the main process first: it may write the text that all read
            if main:
                held.enter_context(own_folder(args.out))
            data = Data(args, True, start, args.eval_only) if main else None
            if main and not args.eval_only:
                data.tokenizer.copy_to(Path(args.out))
        with processes.agreed(UserError):
            data = data or Data(args, False, start, args.eval_only)
            jobs = prepare(args, data, start)
        processes.same(f"{len(data.train)} and {len(data.val)} tokens", "other data")
        steps = [ckpt and (ckpt["run"], ckpt["step"]) for _, _, ckpt in jobs]
        processes.same(str(steps), "other checkpoints (run, step)")
        with processes.agreed(UserError):
            meshes = [processes.mesh(job.device, job.ep, job.pp, job.tp) for _, job, _ in jobs]
        mesh, args.device, jobs[-1][1].device = meshes[0], meshes[0].device, meshes[-1].device
        if main:
            announce(args, data, mesh, start)
        run_id = start["run"] if args.resume else mesh.common(time.time_ns())
        stop = Interrupt(processes)
        try:
            text = (score if args.eval_only else train)(jobs, meshes, data, run_id, stop, processes)
        finally:
            stop.restore()
        number = mesh.common(stop.number or signal.SIGTERM) if text is None else stop.number
    if number:
        if main:
            saved = "" if args.eval_only else f" and saved; go on with --resume --out={args.out}"
            print(f"train.py: stopped{saved}", file=sys.stderr)
        return 128 + number
    if main:
        print(text)
    return 0


def main(argv=None):
    """The program. What goes wrong is said in one sentence: 2 for what the user can mend, 1 for what broke on the way,
    128 + n after signal n."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stderr = sys.stderr or open(os.devnull, "w")      # closed by whoever started us
    if sys.stdout:
        sys.stdout.reconfigure(errors="replace")          # a terminal that can't show a character shows a question mark
    rank, several, code, alone = os.environ.get("RANK", "0"), world_size() > 1, 1, False
    try:
        return run(argv)
    except UserError as error:
        message, code = error, 2
    except torch.OutOfMemoryError:
        message = "the GPU's memory is full; a smaller --micro_batch gives the same numbers in less"
        code, alone = 2, True
    except (Diverged, WriteError) as error:
        message = error
    except OSError as error:
        message, alone = error, True
    except Unreachable as error:
        message, alone = error, True
    except KeyboardInterrupt:
        message, code = "stopped before the first step", 130
    if rank == "0" or alone:      # what all ranks found is said once, what one found by that one
        print(f"train.py: {f'rank {rank}: ' if several and alone else ''}{message}", file=sys.stderr, flush=True)
    if several:
        time.sleep(0 if rank == "0" or alone else 2)      # who leaves first has torchrun end the others: let 0 speak
        os._exit(code)      # to take leave of the others could mean to wait for them
    return code


if __name__ == "__main__":
    sys.exit(main())
