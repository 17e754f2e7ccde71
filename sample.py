"""Writes text with a trained GPT: `python sample.py`.

What it teaches: a language model gives a distribution over the next token; text comes from drawing one, appending it
and asking again. The text goes to standard output and nothing else does, so it can be piped; figures go to standard
error.

    python sample.py --prompt="def main():" --max_new_tokens=200
    python sample.py --prompt=@story.txt --temperature=0 > ending.txt
    cat notes.txt | python sample.py --prompt=@- --num_samples=3
    python sample.py --ckpt=gpt2/ --prompt="The answer is"
    python sample.py --prompts=beginnings.txt --max_batch=128 > endings.txt
    python sample.py --speculative --gamma=4 --color

All texts are written at once by the engine of paged.py, which keeps the keys and values of what is written in blocks;
they come out in the order of the prompts. With --speculative a small model, the draft, guesses ahead, and the model
only checks (speculate.py): the texts have the same distribution, and at temperature 0 are the same.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)      # Ctrl-C while torch is being imported: no traceback

import os
import sys
import time
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from model import (DTYPES, Options, UserError, check_sampling, derive, load_model, pick_device, pick_dtype, program)
from paged import Engine
from speculate import GAMMAS, Speculator, check_pair, draft_beside, figures, sentence

COLORS = {"draft": "\033[32m", "target": "\033[31m", "bonus": "\033[34m"}      # green, red, blue


def options():
    p = Options(prog="sample.py", description=__doc__.split("\n\n")[0])
    p.add_argument("--ckpt", default="out/ckpt.pt", metavar="PATH", help="the model: as train.py saved it, or a folder "
                   "with GPT-2's weights in Hugging Face's layout (config.json, model.safetensors, tokenizer.json) "
                   "(default: out/ckpt.pt)")
    p.add_argument("--prompt", action="append", metavar="TEXT", help="the beginning of the text; @FILE takes it from a "
                   "file, @- from standard input; one longer than the model's block_size counts from its end alone; "
                   "may be given several times (default: none)")
    p.add_argument("--prompts", metavar="FILE", help="a file of prompts, one a line; - is standard input")
    p.add_argument("--num_samples", type=int, default=1, help="texts to write from each prompt (default: 1)")
    p.add_argument("--max_new_tokens", type=int, default=500, help="tokens to add to the prompt (default: 500)")
    p.add_argument("--temperature", type=float, default=0.8, help="below 1 likelier, above 1 wilder; 0: always the "
                   "likeliest token (default: 0.8)")
    p.add_argument("--top_k", type=int, help="draw among the k likeliest tokens alone (default: all)")
    p.add_argument("--top_p", type=float, help="draw among the fewest tokens that together have this probability")
    p.add_argument("--max_batch", type=int, default=64, help="texts to work on at once (default: 64)")
    p.add_argument("--speculative", action="store_true", help="decode speculatively: a draft guesses, the model checks")
    p.add_argument("--draft", metavar="PATH", help="with --speculative, who guesses: a model, as for --ckpt, or "
                   "lookup, what followed the text's last words before (default: draft.pt beside --ckpt if it's there, "
                   "else lookup)")
    p.add_argument("--gamma", help="with --speculative, drafts for one call of the model, 1 to 64; or auto, up to 8, "
                   "by how many are kept and what they cost here, on which a text that is drawn then depends "
                   "(default: 4)")
    p.add_argument("--color", action="store_true", help="with --speculative, show who wrote what: green, a draft that "
                   "was kept; red, the model, in the place of a draft or where there was none; blue, the model, after "
                   "all drafts were kept")
    p.add_argument("--seed", type=int, default=1, help="the same seed writes the same text (default: 1)")
    p.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or mps (default: auto, the best one here)")
    p.add_argument("--dtype", default="auto", choices=DTYPES, help="what the model computes in (default: auto, "
                   "bfloat16 on a GPU that has it, else float16; float32 elsewhere)")
    return p


def read(option, name):
    """The text of file `name`, - for standard input; bytes that aren't UTF-8 are kept (as surrogates)."""
    if name == "-" and sys.stdin is None:
        raise UserError(f"{option} can't be read: standard input is closed")
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"{option} can't be read: {error.strerror}") from None
    return raw.decode("utf-8", "surrogateescape")


def read_prompts(args):
    """What --prompt (TEXT, @FILE or @-) and --prompts ask for: a list of texts, in that order."""
    given = args.prompt or []
    if given.count("@-") + (args.prompts == "-") > 1:
        raise UserError("standard input can be read once, and is asked for several times")
    texts = [read(f"prompt={prompt}", prompt[1:]) if prompt.startswith("@") else prompt for prompt in given]
    if args.prompts is not None:
        text = read(f"prompts={args.prompts}", args.prompts)
        if not text:
            raise UserError(f"prompts={args.prompts} is empty; a prompt of nothing is an empty line")
        texts += [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    return texts or [""]


def load_draft(args, model, tokenizer, device, dtype):
    """-> the draft model, None for lookup; and its name. Raises UserError for one that can't guess for the model."""
    path = args.draft
    if path is None:
        path = draft_beside(args.ckpt)
        path = path if os.path.lexists(path) else "lookup"
    if path == "lookup":
        return None, "lookup"
    draft, theirs = load_model(path, device, dtype)
    check_pair(model, tokenizer, args.ckpt, draft, theirs, path)
    if draft.config.block_size < model.config.block_size:
        print(f"sample.py: the draft's context ends at {draft.config.block_size} tokens and the model's at "
              f"{model.config.block_size}: past that there are no drafts", file=sys.stderr)
    if draft.num_params() > model.num_params():
        print(f"sample.py: the draft has {draft.num_params():,} parameters and the model {model.num_params():,}: "
              "guessing will take longer than it saves", file=sys.stderr)
    return draft, path


def make_engine(model, draft, args, texts, longest):
    """An Engine with room for --max_batch of the texts, of `longest` tokens at most, or on a GPU for as many as fit."""
    one, batch = -(-min(model.config.block_size, longest) // 16), min(args.max_batch, texts)
    blocks = one * batch
    if model.table.is_cuda:      # what fits; with less, some texts wait
        free = torch.cuda.mem_get_info(model.table.device)[0]
        block = sum(32 * x.config.n_layer * x.config.n_embd * x.table.itemsize for x in (model, draft) if x)
        blocks = max(one, min(blocks, int(0.8 * free) // block))
    if not args.speculative:
        return Engine(model, blocks, 16, batch)
    engine = Speculator(model, blocks, 16, batch, draft=draft, gamma=args.gamma)
    engine.timing = True
    return engine


def write_samples(model, tokenizer, draft, args):
    """Writes the texts to standard output in the order of their prompts, an empty line between them: the first that
    isn't complete as it grows, those after it when their turn comes. Returns the number of new tokens, the engine."""
    prompts = [tokenizer.encode(text) for text in read_prompts(args)]
    end = tokenizer.ending(model.config.vocab_size)
    stop = [] if end is None else [end]
    bad = next((i for ids in prompts for i in ids if not 0 <= i < model.config.vocab_size), None)
    if bad is not None:
        raise UserError(f"the prompt has the id {bad}, but the model's ids end at {model.config.vocab_size - 1}")
    engine = make_engine(model, draft, args, len(prompts) * args.num_samples,
                         max(1, *map(len, prompts)) + args.max_new_tokens)
    texts = [(ids, sample) for j, ids in enumerate(prompts) for sample in engine.add(
        ids or [tokenizer.start(model.config.vocab_size)], args.max_new_tokens, args.temperature, args.top_k,
        args.top_p, derive(args.seed, j) if j else args.seed, stop, args.num_samples).samples]
    bar = tqdm(total=len(texts), unit="text", disable=None if len(texts) > 1 else True)      # None: on a terminal alone
    tokens, at, shown, decode = engine.run(), 0, 0, None
    with bar:
        while at < len(texts):
            ids, sample = texts[at]
            if decode is None:
                decode, shown = tokenizer.decoder(), 0
                print(("\n" if at else "") + decode(ids), end="", flush=True)
            news = sample.text[sample.prompt + shown:]
            colors = [COLORS[who] for who in sample.wrote[shown:]] if args.color else [""] * len(news)
            for color, run in groupby(zip(colors, news), lambda pair: pair[0]):
                plain = decode([i for _, i in run if i not in stop])
                print(color + plain + "\033[0m" * args.color, end="", flush=True)      # nobody else's, if it ends here
            shown += len(news)
            if sample.done:
                print(decode([], final=True), flush=True)
                bar.update()
                at, decode = at + 1, None
            else:
                next(tokens)
    return sum(len(sample.tokens) for _, sample in texts), engine


def check(args):
    """Raises UserError for options that don't fit together; makes gamma a number or "auto"."""
    for name, least in (("num_samples", 1), ("max_new_tokens", 0), ("max_batch", 1)):
        if getattr(args, name) < least:
            raise UserError(f"{name}={getattr(args, name)} must be at least {least}")
    check_sampling(args.temperature, args.top_k, args.top_p)
    for name in ("draft", "gamma", "color"):
        if getattr(args, name) not in (None, False) and not args.speculative:
            raise UserError(f"--{name} is for --speculative")
    if args.gamma is None:
        args.gamma = 4
    elif args.gamma != "auto":
        if not args.gamma.isascii() or not args.gamma.isdigit() or int(args.gamma) not in GAMMAS:
            raise UserError(f"gamma={args.gamma} must be a number from {GAMMAS[0]} to {GAMMAS[-1]}, or auto")
        args.gamma = int(args.gamma)


def run(argv):
    args = options().parse(argv)
    check(args)
    device = pick_device(args.device)
    dtype = pick_dtype(args.dtype, device)
    model, tokenizer = load_model(args.ckpt, device, dtype)
    if tokenizer.note:
        print(f"sample.py: {tokenizer.note}", file=sys.stderr)
    draft, kind = load_draft(args, model, tokenizer, device, dtype) if args.speculative else (None, None)
    sys.stdout.reconfigure(errors="replace")      # a terminal that can't show a character shows a question mark
    start = time.perf_counter()
    tokens, engine = write_samples(model, tokenizer, draft, args)
    taken = time.perf_counter() - start - engine.stats.get("measuring", 0.0)
    print(f"{tokens} tokens in {taken:.2f} s, {tokens / taken:,.0f} tokens/s: {model.num_params():,} parameters on "
          f"{device} in {str(dtype).split('.')[1]}", file=sys.stderr)
    if args.speculative:
        found = figures(engine)
        print(sentence(found, kind) if found else f"drafts by {kind}: none were asked for", file=sys.stderr)


def main(argv=None):
    return program("sample.py", run, argv)


if __name__ == "__main__":
    sys.exit(main())
