"""Fresh random inputs in every run. The seed of a test is printed when it fails; NANOSCALE_SEED repeats it.

Without a GPU the Triton kernels are run by Triton's interpreter, which has to be chosen before they are defined; only
test_flash.py then calls them, everything else uses what a CPU uses."""

import json
import math
import os

os.environ["OMP_NUM_THREADS"] = "1"      # small tensors, here and in the programs started: threads would only wait

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"      # the same tests run on both
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
import flash
import paged
import speculate

os.environ.pop("TRITON_INTERPRET", None)      # the programs started have a CPU's defaults
flash.INTERPRETED = False


@pytest.fixture(autouse=True)
def seed():
    seed = int(os.environ.get("NANOSCALE_SEED", 0)) or int.from_bytes(os.urandom(3), "big")
    print(f"NANOSCALE_SEED={seed}")
    torch.manual_seed(seed)
    np.random.seed(seed)
    return seed


# ---- a small GPT-2 in Hugging Face's layout, written by hand: the tests' own idea of what such a folder holds

GPT2 = dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], vocab_size=13, n_positions=6, n_embd=8, n_layer=2,
            n_head=2, activation_function="gelu_new", layer_norm_epsilon=1e-5, eos_token_id=None)


def gpt2_tensors(V, T, C, L):
    """Weights that are a formula of their place, {name: float64}. The sizes are those of GPT-2's first release."""
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C)}
    for i in range(L):
        shapes |= {f"h.{i}.ln_1.weight": (C,), f"h.{i}.ln_1.bias": (C,), f"h.{i}.attn.c_attn.weight": (C, 3 * C),
                   f"h.{i}.attn.c_attn.bias": (3 * C,), f"h.{i}.attn.c_proj.weight": (C, C),
                   f"h.{i}.attn.c_proj.bias": (C,), f"h.{i}.ln_2.weight": (C,), f"h.{i}.ln_2.bias": (C,),
                   f"h.{i}.mlp.c_fc.weight": (C, 4 * C), f"h.{i}.mlp.c_fc.bias": (4 * C,),
                   f"h.{i}.mlp.c_proj.weight": (4 * C, C), f"h.{i}.mlp.c_proj.bias": (C,)}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    return {name: (torch.arange(math.prod(shape), dtype=torch.float64) * (1 + i / 7) + i).sin().view(shape) / 2
            for i, (name, shape) in enumerate(shapes.items())}


def write_safetensors(path, tensors):
    """The format: 8 bytes with the length of the header, the header, the numbers."""
    kinds = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
             torch.uint8: "U8"}
    header, at = {}, 0
    for name, x in tensors.items():
        header[name] = dict(dtype=kinds[x.dtype], shape=list(x.shape), data_offsets=[at, at + x.nbytes])
        at += x.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text
                     + b"".join(x.contiguous().flatten().view(torch.uint8).numpy().tobytes() for x in tensors.values()))


def write_gpt2(folder, tensors=None, dtype=torch.float32, **changes):
    """config.json and model.safetensors in `folder`, of the formula's weights if none are given."""
    config = {**GPT2, **changes}
    if tensors is None:
        tensors = gpt2_tensors(*(config[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer")))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {name: x.to(dtype) for name, x in tensors.items()})
    return folder


def write_tokenizer(folder, old=False):
    """Byte pairs: the 256 bytes, five pairs and the end-of-text, 262 ids; tokenizer.json, or the two files of old.
    GPT-2 writes a byte that doesn't print as the character 256 + how many such there were before."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in prints]
    letter = {b: chr(b) for b in prints} | {b: chr(256 + i) for i, b in enumerate(rest)}
    merges = [("t", "h"), ("th", "e"), (letter[32], "the"), (letter[10], letter[10]), ("Ã", "©")]
    vocab = {letter[b]: i for i, b in enumerate(prints + rest)}
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(merges)} | {"<|endoftext|>": 261}
    folder.mkdir(parents=True, exist_ok=True)
    if old:
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
        return
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    end = dict(id=261, content="<|endoftext|>", single_word=False, lstrip=False, rstrip=False, normalized=False,
               special=True)
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=[end], normalizer=None, pre_tokenizer=level,
        post_processor=None, decoder=level, model=dict(
            type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="", end_of_word_suffix="",
            fuse_unk=False, vocab=vocab, merges=[f"{a} {b}" for a, b in merges]))))
