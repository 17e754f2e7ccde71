"""train.py: the step against plain definitions, and the program as a person uses and breaks it."""

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DEVICE, write_gpt2, write_tokenizer

import train
from model import GPT, GPTConfig, Tokenizer, UserError, load_checkpoint, load_model
from train import Data, learning_rate

ROOT = Path(__file__).parent.parent
TINY = ["--preset=cpu", "--no-draft", "--no-compile", f"--device={DEVICE}", "--dtype=float32", "--n_layer=2", "--n_head=2",
        "--n_embd=16", "--block_size=8", "--batch_size=4", "--eval_batches=2"]


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """5,000 bytes of words to learn from."""
    rng = np.random.default_rng()
    words = ["to ", "be ", "or ", "not ", "that ", "is ", "the ", "question,\n", "whether ", "é日 "]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_bytes("".join(rng.choice(words, 2000)).encode()[:5000])
    return path


def records(out, name="log.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def losses(out):
    return {r["step"]: (r["loss"], r["grad_norm"], r["lr"]) for r in records(out)[1:]}


def run(text, out, *options):
    return train.main([*TINY, f"--data={text}", f"--out={out}", *map(str, options)])


def program(text, out, *options, **kwargs):
    """The same in a process of its own."""
    return subprocess.Popen([sys.executable, "train.py", *TINY, f"--data={text}", f"--out={out}", *map(str, options)],
                            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


# ---- data -------------------------------------------------------------------------------------------------------

def data_of(path, block_size=8, seed=1, vocab_size=None, out="."):
    return Data(Namespace(data=str(path), out=str(out), block_size=block_size, seed=seed, vocab_size=vocab_size))


def test_batches_are_windows_and_a_function_of_seed_and_step(text):
    raw, data = text.read_bytes(), data_of(text)
    assert bytes(data.train) + bytes(data.val) == raw and len(data.val) == 500
    idx, targets = data.batch(3, 6)
    assert idx.shape == targets.shape == (6, 8) and idx.dtype == torch.int64
    for row, shifted in zip(idx.tolist(), targets.tolist()):
        assert bytes(row + shifted[-1:]) in raw[:4500] and row[1:] == shifted[:-1]
    again, _ = data_of(text).batch(3, 6)
    assert torch.equal(idx, again)
    for other in (data.batch(4, 6)[0], data_of(text, seed=2).batch(3, 6)[0]):
        assert not torch.equal(idx, other)


def test_every_window_is_reachable_and_none_is_beyond(tmp_path):
    path = tmp_path / "t.txt"
    path.write_bytes(bytes(range(12)))
    data = data_of(path)                                             # 12 tokens, T = 8: starts 0, 1, 2, 3
    idx, targets = data.batch(0, 500)
    assert set(idx[:, 0].tolist()) == {0, 1, 2, 3} and targets.max() == 11
    path.write_bytes(bytes(range(9)))                                # block_size + 1 tokens: one window
    idx, targets = data_of(path).batch(0, 3)
    assert idx.tolist() == [list(range(8))] * 3 and targets[0].tolist() == list(range(1, 9))


def test_validation_is_spread_over_its_split(text):
    data = data_of(text)
    parts = list(data.validation(2, 4))
    assert [p[0].shape for p in parts] == [(4, 8)] * 2
    starts = torch.cat([p[0] for p in parts])
    assert bytes(starts[0].tolist()) == bytes(data.val[:8]) and bytes(parts[-1][1][-1].tolist()) == bytes(data.val[-8:])
    assert sum(len(p[0]) for p in data.validation(10_000, 4)) == 60          # 62 windows fit in 500 bytes
    assert sum(len(p[0]) for p in data.validation(10_000, 100)) == 62


def test_nanogpts_bins_and_folders(tmp_path):
    ids = np.arange(1000, dtype=np.uint16) * 50
    ids.tofile(tmp_path / "train.bin")
    for path in (tmp_path / "train.bin", tmp_path):                 # the file, or nanoGPT's folder
        data = data_of(path)
        assert (len(data.train), len(data.val), data.vocab_size) == (900, 100, 50257)
    ids[:50].tofile(tmp_path / "val.bin")
    data = data_of(tmp_path / "train.bin", vocab_size=50000)
    assert (len(data.train), len(data.val), data.tokenizer.kind) == (1000, 50, "ids")
    assert data.batch(0, 20_000)[1].max() == 999 * 50
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("alpha " * 20)
    (folder / "deep" / "b.md").write_text("beta " * 20)
    (folder / ".hidden").write_text("no")
    (folder / "c.bin").write_bytes(b"\0\1")
    (tmp_path / "o").mkdir()
    joined = bytes(data_of(folder, out=tmp_path / "o").train) + bytes(data_of(folder, out=tmp_path / "o").val)
    assert joined in (b"alpha " * 20 + b"beta " * 20, b"beta " * 20 + b"alpha " * 20)


def test_the_default_data_is_the_python_library(tmp_path):
    data = Data(Namespace(data=None, out=str(tmp_path), block_size=8, seed=1, vocab_size=None))
    assert 5e6 < len(data.train) + len(data.val) < 40e6 and data.vocab_size == 256
    assert b"import argparse" in bytes(data.train)


# ---- the schedule ------------------------------------------------------------------------------------------------

def test_learning_rate():
    args = Namespace(lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=110, decay_steps=None)
    rates = [learning_rate(step, args) for step in range(130)]
    assert rates[0] == 1 / 11 and rates[9] == 10 / 11 and rates[10] == 1.0
    assert abs(rates[60] - 0.55) < 1e-12 and rates[110] == rates[129] == 0.1
    assert all(a < b for a, b in zip(rates[:10], rates[1:11])) and all(a > b for a, b in zip(rates[10:110], rates[11:111]))
    args.decay_steps = 60
    assert abs(learning_rate(35, args) - 0.55) < 1e-12 and learning_rate(60, args) == 0.1


# ---- the program ------------------------------------------------------------------------------------------------

def test_it_learns_and_says_so(text, tmp_path, capsys):
    assert run(text, tmp_path, "--max_steps=120", "--lr=1e-2", "--eval_every=50", "--save_every=0") == 0
    log = records(tmp_path)
    assert log[0]["config"]["n_embd"] == 16 and log[0]["options"]["lr"] == 1e-2
    assert [r["step"] for r in log[1:]] == list(range(1, 121))
    assert [r["step"] for r in log[1:] if "val_loss" in r] == [50, 100, 120]
    assert all(set(r) >= {"step", "loss", "grad_norm", "lr", "tokens_per_s", "mfu"} for r in log[1:])
    assert abs(log[1]["loss"] - math.log(256)) < 0.1 and log[-1]["val_loss"] < 3.0
    out = capsys.readouterr()
    assert f"val {log[-1]['val_loss']:.4f}" in out.out and "a sample:" in out.out and "tokens/s" in out.err


def test_a_short_text_trains_without_validation(tmp_path):
    path = tmp_path / "t.txt"
    for size in (9, 40, 89):                                         # T + 1 tokens; a last tenth that holds no window
        path.write_bytes(bytes(range(size)))
        assert run(path, tmp_path / str(size), "--max_steps=3", "--eval_every=1") == 0
        assert load_checkpoint(tmp_path / str(size) / "ckpt.pt")["step"] == 3
        assert not any("val_loss" in r for r in records(tmp_path / str(size)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_five_and_five_are_ten(text, tmp_path, dtype):
    """Bit for bit, with dropout, through a checkpoint."""
    common = ["--dropout=0.1", "--decay_steps=10", f"--dtype={dtype}", "--micro_batch=2"]
    assert run(text, tmp_path / "a", "--max_steps=10", *common) == 0
    assert run(text, tmp_path / "b", "--max_steps=5", *common) == 0
    assert train.main(["--resume", f"--out={tmp_path / 'b'}", "--max_steps=10"]) == 0      # options come from the run
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 10
    a, b = (load_checkpoint(tmp_path / x / "ckpt.pt") for x in "ab")
    assert a["scaler"] == b["scaler"] and a["updates"] == b["updates"]
    for key in ("exp_avg", "exp_avg_sq"):
        assert all(torch.equal(a["moments"][key][name], b["moments"][key][name]) for name in a["model"])
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


def test_checkpoint_is_the_single_device_state(text, tmp_path):
    assert run(text, tmp_path, "--max_steps=2", "--dtype=bfloat16") == 0
    ckpt = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    model = GPT(GPTConfig(**ckpt["config"]))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for named in (ckpt["model"], ckpt["moments"]["exp_avg"], ckpt["moments"]["exp_avg_sq"]):
        assert {name: t.shape for name, t in named.items()} == shapes
        assert all(t.dtype == torch.float32 for t in named.values())
    model.load_state_dict(ckpt["model"])
    assert ckpt["step"] == 2 and sorted(p.name for p in tmp_path.iterdir()) == ["ckpt.pt", "log.jsonl"]


def test_resume_with_other_options(text, tmp_path, capsys):
    assert run(text, tmp_path, "--max_steps=2", "--batch_size=8") == 0
    log = tmp_path / "log.jsonl"
    log.write_bytes(log.read_bytes() + b'{bad}\n[1]\n{"step": "a"}\n' + b"[" * 10 ** 5 +
                    b'\n\xff\xfe\n{"step": 3, "lo')                     # damaged at its end
    resume = ["--resume", f"--out={tmp_path}"]
    assert train.main([*resume, "--max_steps=4", "--batch_size=6", "--lr=1e-3"]) == 0      # micro_batch is chosen anew
    assert [r["step"] for r in records(tmp_path)[1:]] == [1, 2, 3, 4]
    assert load_checkpoint(tmp_path / "ckpt.pt")["step"] == 4
    np.zeros(100, np.uint16).tofile(tmp_path / "train.bin")
    refused(capsys, [*resume, f"--data={tmp_path / 'train.bin'}"], "ids", "bytes")
    refused(capsys, [*resume, "--init_from=x.pt"], "--init_from")


def test_resume_follows_what_is_typed_and_says_what_it_cannot(text, tmp_path, capsys):
    assert run(text, tmp_path, "--max_steps=2", "--draft") == 0
    resume = ["--resume", f"--out={tmp_path}"]
    args, _ = train.parse([*resume, "--lr=1e-5"])
    assert args.lr == 1e-5 and abs(args.min_lr - 1e-6) < 1e-12
    assert train.parse([*resume, "--lr=1e-5", "--min_lr=2e-6"])[0].min_lr == 2e-6
    refused(capsys, [*resume, "--preset=baby"], "preset=baby", "preset=cpu")
    old = torch.load(tmp_path / "draft.pt", weights_only=True)
    changed = {**train.DRAFTS["cpu"], "n_embd": 32}                  # as a later version might have it
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train.DRAFTS, "cpu", changed)
        text.with_name("more.txt").write_bytes(text.read_bytes() + b"more")
        assert train.main([*resume, "--max_steps=4", "--lr=1e-3", f"--data={text.with_name('more.txt')}"]) == 0
    assert "has 5,004 tokens, and had 5,000" in capsys.readouterr().err
    assert load_checkpoint(tmp_path / "draft.pt")["config"]["n_embd"] == 32 != old["config"]["n_embd"]
    log = records(tmp_path)
    assert log[0]["options"]["lr"] == 1e-3 and [r["step"] for r in log[1:]] == [1, 2, 3, 4]


def test_a_change_of_precision_starts_its_own_loss_scaler(text, tmp_path):
    for dtype, scaler in (("float32", None), ("float16", 2.0 ** 16), ("bfloat16", None)):
        steps = load_checkpoint(tmp_path / "ckpt.pt")["step"] + 2 if (tmp_path / "ckpt.pt").exists() else 2
        resume = ["--resume"] if steps > 2 else []
        assert run(text, tmp_path, *resume, f"--dtype={dtype}", f"--max_steps={steps}") == 0
        got = load_checkpoint(tmp_path / "ckpt.pt")["scaler"]
        assert got is None if scaler is None else 1 < got["scale"] <= scaler


def test_a_validation_cut_short_is_made_up_for(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda *_: None)          # as a signal leaves it
    assert run(text, tmp_path, "--max_steps=3") == 0
    assert "val_loss" not in records(tmp_path)[-1]
    monkeypatch.undo()
    assert train.main(["--resume", f"--out={tmp_path}"]) == 0
    assert 1 < records(tmp_path)[-1]["val_loss"] < 6 and len(records(tmp_path)) == 4


def test_init_from_takes_weights_and_architecture(text, tmp_path, capsys):
    assert run(text, tmp_path / "a", "--max_steps=3") == 0
    init = f"--init_from={tmp_path / 'a' / 'ckpt.pt'}"
    arguments = ["--preset=cpu", "--no-draft", f"--device={DEVICE}", f"--data={text}", init, "--max_steps=0"]
    assert train.main([*arguments, f"--out={tmp_path / 'b'}"]) == 0
    a, b = (load_checkpoint(tmp_path / x / "ckpt.pt") for x in "ab")
    assert b["step"] == 0 and all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"])
    capsys.readouterr()
    assert train.main([*arguments, f"--out={tmp_path / 'c'}", "--n_layer=5"]) == 2
    assert "n_layer=5 differs from the checkpoint's n_layer=2" in capsys.readouterr().err


def test_draft_is_trained_after_the_target_and_resumes(text, tmp_path):
    assert run(text, tmp_path, "--max_steps=4", "--draft") == 0
    target, draft = (load_checkpoint(tmp_path / f"{n}.pt") for n in ("ckpt", "draft"))
    assert draft["step"] == math.ceil(4 * train.DRAFTS["cpu"]["share"]) and draft["run"] == target["run"]
    for field in ("vocab_size", "block_size"):
        assert draft["config"][field] == target["config"][field]
    assert train.main(["--resume", f"--out={tmp_path}", "--max_steps=8"]) == 0
    steps = math.ceil(8 * train.DRAFTS["cpu"]["share"])
    assert load_checkpoint(tmp_path / "draft.pt")["step"] == steps > draft["step"]
    assert [r["step"] for r in records(tmp_path, "draft.jsonl")[1:]] == list(range(1, steps + 1))


def test_compiled_and_plain_checkpoints_have_the_same_names(text, tmp_path):
    assert run(text, tmp_path / "a", "--max_steps=2", "--compile", "--n_layer=1") == 0
    assert run(text, tmp_path / "b", "--max_steps=2", "--n_layer=1") == 0
    a, b = (load_checkpoint(tmp_path / x / "ckpt.pt") for x in "ab")
    assert list(a["model"]) == list(b["model"])
    for (la, na, _), (lb, nb, _) in zip(losses(tmp_path / "a").values(), losses(tmp_path / "b").values()):
        assert abs(la / lb - 1) < 1e-5 and abs(na / nb - 1) < 1e-4
    del a, b
    import sample
    assert sample.main([f"--ckpt={tmp_path / 'a' / 'ckpt.pt'}", "--max_new_tokens=3", "--device=cpu"]) == 0


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need CUDA")
@pytest.mark.parametrize("options", [["--micro_batch=2"], ["--dtype=bfloat16", "--compile"], ["--n_expert=4"],
                                     ["--n_expert=4", "--micro_batch=2", "--dtype=bfloat16", "--compile"]])
def test_a_replayed_step_is_the_step(text, tmp_path, options):
    """Bit for bit, with dropout, with evaluations and checkpoints between the replays, and when one of them is traced."""
    options = [*options, "--max_steps=12", "--save_every=5", "--eval_every=3", "--dropout=0.1"]
    trace = tmp_path / "trace.json"
    assert run(text, tmp_path / "a", "--graph", f"--trace={trace}", *options) == 0
    assert run(text, tmp_path / "b", "--no-graph", *options) == 0
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in json.loads(trace.read_text()) if e["ph"] == "X"]
    assert len(spans) >= 2 and all(a <= b for a, b in spans)
    assert all(a[1] <= b[0] + 1e-3 for a, b in zip(spans, spans[1:]))         # microseconds, rounded
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and len(losses(tmp_path / "a")) == 12
    a, b = (load_checkpoint(tmp_path / x / "ckpt.pt")["model"] for x in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_pipedream_on_one_process_is_a_step_for_each_micro_batch(text, tmp_path):
    options = ["--no-tied", "--max_steps=3", "--lr=1e-3", "--min_lr=1e-3", "--warmup_steps=0", f"--trace={tmp_path / 'x'}"]
    assert run(text, tmp_path / "a", "--schedule=pipedream", "--micro_batch=2", *options) == 0
    ckpt = load_checkpoint(tmp_path / "a" / "ckpt.pt")
    assert ckpt["updates"] == 6 and ckpt["step"] == 3 and (tmp_path / "x").exists()
    capture = [options[0], f"--trace={tmp_path / 'none' / 'x'}"]
    assert run(text, tmp_path / "b", *capture) == 2


def test_default_steps_run_in_one_micro_batch():
    """A preset that splits its batch for no need is many times slower on one device."""
    for preset in ("cpu", "baby"):
        args, _ = train.parse([f"--preset={preset}", "--device=cpu"])
        assert args.micro_batch == args.batch_size
    args, _ = train.parse(["--preset=gpt2", "--batch_size=48", "--device=cpu"])
    assert args.micro_batch == 24                                    # at most 32, and a divisor


# ---- GPT-2's weights --------------------------------------------------------------------------------------------

PLAIN = ["--no-compile", f"--device={DEVICE}", "--dtype=float32", "--batch_size=4", "--eval_batches=2"]


@pytest.fixture
def gpt2(tmp_path):
    """A folder of 262 ids and a tokenizer."""
    pytest.importorskip("safetensors", reason="reading weights needs the library safetensors")
    write_tokenizer(tmp_path / "gpt2")
    return write_gpt2(tmp_path / "gpt2", vocab_size=262, n_positions=8, eos_token_id=261)


@pytest.fixture
def bins(tmp_path):
    """train.bin and val.bin of 1,000 and 107 random ids below 262."""
    for name, n in (("train", 1000), ("val", 107)):
        np.random.randint(0, 262, n).astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    return tmp_path / "train.bin"


def test_a_gpt2_is_trained_further_and_its_tokenizer_travels(gpt2, bins, tmp_path, capsys):
    pytest.importorskip("tokenizers", reason="reading text needs the library tokenizers")
    arguments = [*PLAIN, f"--init_from={gpt2}", f"--data={bins}", f"--out={tmp_path / 'o'}"]
    assert train.main([*arguments, "--max_steps=0"]) == 0
    a, b = GPT.from_pretrained(gpt2), load_model(tmp_path / "o" / "ckpt.pt", torch.device("cpu"), torch.float32)[0]
    for name, p in a.named_parameters():
        assert torch.equal(p, b.get_parameter(name)), name
    capsys.readouterr()
    assert train.main([*arguments, "--max_steps=3"]) == 0
    assert "preset finetune" in capsys.readouterr().err and records(tmp_path / "o")[0]["options"]["lr"] == 3e-5
    ckpt = load_checkpoint(tmp_path / "o" / "ckpt.pt")
    assert (ckpt["tokenizer"], ckpt["tokenizer_file"].name, ckpt["end"]) == ("gpt2", "tokenizer.json", 261)
    assert not torch.equal(ckpt["model"]["wte.weight"], a.wte.weight)
    for path in [*gpt2.iterdir()]:
        path.unlink()                                                # the run has what it needs
    (tmp_path / "o").rename(tmp_path / "moved")
    assert train.main(["--resume", f"--out={tmp_path / 'moved'}", "--max_steps=5"]) == 0
    import sample
    capsys.readouterr()
    assert sample.main([f"--ckpt={tmp_path / 'moved' / 'ckpt.pt'}", "--prompt=the é", f"--device={DEVICE}"]) == 0
    assert capsys.readouterr().out.startswith("the é")
    (tmp_path / "moved" / "tokenizer.json").unlink()
    assert sample.main([f"--ckpt={tmp_path / 'moved' / 'ckpt.pt'}", "--prompt=7", "--max_new_tokens=2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("7 ") and "tokenizer.json" in err


def test_a_bin_needs_no_tokenizer_to_be_trained_on(gpt2, bins, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    arguments = [*PLAIN, f"--init_from={gpt2}", f"--data={bins}", f"--out={tmp_path / 'o'}", "--max_steps=1"]
    assert train.main(arguments) == 0
    assert re.search(r"a sample:\n(\d+ )+\n", capsys.readouterr().out)
    assert load_checkpoint(tmp_path / "o" / "ckpt.pt")["tokenizer"] == "gpt2"
    write_tokenizer(tmp_path, old=True)                              # beside the .bin, with a model from nothing
    assert run(bins, tmp_path / "p", "--max_steps=1", "--vocab_size=262") == 0
    ckpt = load_checkpoint(tmp_path / "p" / "ckpt.pt")
    assert (ckpt["tokenizer"], ckpt["tokenizer_file"]) == ("gpt2", tmp_path / "p" / "vocab.json")
    assert (tmp_path / "p" / "merges.txt").read_bytes() == (tmp_path / "merges.txt").read_bytes()


def test_text_is_tokenized_once(gpt2, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers", reason="reading text needs the library tokenizers")
    path, calls, encode = tmp_path / "t.txt", [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: calls.append(text) or encode(self, text))
    start = load_checkpoint(gpt2)

    def data(main=True, size=262):
        args = Namespace(data=str(path), out=str(tmp_path / "o"), block_size=8, seed=1, vocab_size=size)
        return Data(args, main, start)
    (tmp_path / "o").mkdir()
    path.write_text("the other\n\nthe é \xff日 <|endoftext|>the " * 50)
    found = data()
    ids = np.concatenate([found.train, found.val])
    assert ids.dtype == np.uint16 and found.tokenizer.pairs.decode(ids, skip_special_tokens=False) == path.read_text()
    assert len(found.val) == len(ids) // 10 and 261 in ids and calls
    calls.clear()
    for main in (True, False):
        again = data(main)
        assert np.array_equal(np.concatenate([again.train, again.val]), ids) and not calls
    path.write_text("another text, and the é " * 9)
    assert len(data().train) < len(ids) and calls
    calls.clear()
    write_tokenizer(gpt2)
    raw = (gpt2 / "tokenizer.json").read_text()
    (gpt2 / "tokenizer.json").write_text(raw.replace('"t h", ', ""))
    start = load_checkpoint(gpt2)
    assert 256 not in data().train and calls
    path.write_text("the <|endoftext|>" * 9)
    with pytest.raises(UserError, match="has the id 261 .*vocab_size=261"):
        data(size=261)
    assert not (tmp_path / "o" / "tokens.json").exists() and len(data().train) > 9
    path.write_text("")
    with pytest.raises(UserError, match="t.txt is empty"):
        data()


def test_a_text_in_pieces_has_the_tokens_of_the_whole(gpt2, tmp_path):
    pytest.importorskip("tokenizers", reason="reading text needs the library tokenizers")
    tokenizer, path = Tokenizer("gpt2", gpt2 / "tokenizer.json"), tmp_path / "t.txt"
    words = [" ", " ", "\n", "\n", "\t", "\r\n", "\x1c", "\u3000", "the", "é", "1", "'s", "?!", "<|endoftext|>", "日"]
    for _ in range(50):
        text = "".join(np.random.choice(words, 80))
        path.write_bytes(text.encode())
        parts = list(train.pieces(path, np.random.randint(1, 30)))
        assert "".join(parts) == text
        assert [i for part in parts for i in tokenizer.encode(part)] == tokenizer.encode(text), parts
    assert len(parts) > 2
    path.write_bytes(b"ab\xff c")
    assert "".join(train.pieces(path, 2)) == "ab\ufffd c"


@pytest.mark.parametrize("n", [9, 10, 16, 17, 18, 107])
def test_eval_only_is_the_loss_of_every_token(gpt2, bins, tmp_path, capsys, n):
    ids = np.random.randint(0, 262, n).astype(np.uint16)
    for name in ("val.bin", "other.bin"):
        ids.tofile(tmp_path / name)
    arguments = [*PLAIN[:-1], "--eval_only", f"--init_from={gpt2}", f"--out={tmp_path / 'o'}"]
    sums, model, T = 0.0, GPT.from_pretrained(gpt2), 8
    for t in range(1, n):                                            # by definition, one target after the other
        first = (t - 1) // T * T
        first = min(first, n - T - 1)                                # the last window is a full one
        idx = torch.from_numpy(ids[None, first:t].astype(np.int64))
        sums -= model(idx)[0, -1].log_softmax(-1)[int(ids[t])].item()
    for data in (tmp_path / "val.bin", bins, tmp_path / "other.bin"):      # train.bin stands for the val.bin beside it
        if data.name == "other.bin":
            (tmp_path / "val.bin").write_bytes(b"1234" * 20)
        capsys.readouterr()
        assert train.main([*arguments, f"--data={data}"]) == 0
        line = capsys.readouterr().out
        found = re.fullmatch(rf"(\S+): [\d,]+ parameters, {n} tokens; loss (\S+), perplexity (\S+)\n", line)
        assert found and found[1] == str(gpt2) and abs(float(found[2]) - sums / (n - 1)) < 1e-4, (line, sums / (n - 1))
        assert abs(float(found[3]) / math.exp(sums / (n - 1)) - 1) < 1e-3
    assert not list((tmp_path / "o").iterdir())                      # nothing was trained, nothing saved


def test_eval_only_of_a_run_and_of_text(text, tmp_path, capsys):
    assert run(text, tmp_path, "--max_steps=20") == 0
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for options in (["--resume"], [f"--init_from={tmp_path / 'ckpt.pt'}", f"--data={text}", "--eval_batches=100000"]):
        capsys.readouterr()
        assert train.main([*PLAIN[:-1], "--eval_only", f"--out={tmp_path}", *options]) == 0
        out = capsys.readouterr().out
        assert f"{tmp_path / 'ckpt.pt'}: " in out and "5,000 tokens; loss " in out
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    refused(capsys, [*TINY, "--eval_only", f"--data={text}", f"--out={tmp_path}"], "--init_from or --resume")
    refused(capsys, [*TINY, "--preset=finetune", f"--data={text}", f"--out={tmp_path}"], "preset=finetune")


def test_data_that_a_gpt2_cant_read(gpt2, text, tmp_path, capsys):
    arguments = [*PLAIN, f"--init_from={gpt2}", f"--out={tmp_path / 'o'}", "--max_steps=1"]
    np.full(50, 262, np.uint16).tofile(tmp_path / "x.bin")
    refused(capsys, [*arguments, f"--data={tmp_path / 'x.bin'}"], "has the id 262", "vocab_size=262")
    refused(capsys, [*arguments, f"--data={tmp_path / 'x.bin'}", "--vocab_size=300"], "vocab_size=300", "262")
    (gpt2 / "tokenizer.json").unlink()
    refused(capsys, [*arguments, f"--data={text}"], "is text", "tokenizer.json")
    weights = gpt2 / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    refused(capsys, [*arguments, f"--data={text}"], "model.safetensors", "bytes")
    weights.unlink()
    refused(capsys, [*arguments, f"--data={text}"], "holds no weights")
    assert not (tmp_path / "o" / "ckpt.pt").exists()


# ---- interruption -----------------------------------------------------------------------------------------------

def wait_for_step(out, step, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if (out / "log.jsonl").is_file() and len((out / "log.jsonl").read_text().splitlines()) > step:
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(f"no step {step} in {seconds} s: {process.communicate()}")


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    assert run(text, out, "--max_steps=40", "--decay_steps=40", "--dropout=0.1") == 0
    return losses(out)


@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(text, tmp_path, unbroken, number, code):
    process = program(text, tmp_path, "--max_steps=1000000", "--decay_steps=40", "--dropout=0.1", "--save_every=5")
    wait_for_step(tmp_path, 12, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code and "Traceback" not in err
    ckpt = load_checkpoint(tmp_path / "ckpt.pt")
    if number != signal.SIGKILL:
        assert "--resume" in err.splitlines()[-1] and ckpt["step"] == records(tmp_path)[-1]["step"]
    end = max(40, ckpt["step"])
    assert train.main(["--resume", f"--out={tmp_path}", f"--max_steps={end}"]) == 0
    assert {s: v for s, v in losses(tmp_path).items() if s <= 40} == unbroken and len(losses(tmp_path)) == end


def test_a_full_disk_keeps_the_old_checkpoint(text, tmp_path):
    resource = pytest.importorskip("resource")
    assert run(text, tmp_path, "--max_steps=2", "--n_embd=256") == 0
    before = hashlib.sha256((tmp_path / "ckpt.pt").read_bytes()).digest()
    limit = (tmp_path / "ckpt.pt").stat().st_size // 2                       # enough for a kernel that is compiled
    assert limit > 4e6
    process = program(text, tmp_path, "--resume", "--max_steps=6", "--save_every=2", "--n_embd=256",
                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in err and "ckpt.pt can't be written: File too large" in err, err
    assert err.count("can't be written") == 2                        # at step 4, after which it goes on, and at the end
    assert hashlib.sha256((tmp_path / "ckpt.pt").read_bytes()).digest() == before
    assert not list(tmp_path.glob("*.part"))


def test_a_diverged_run_says_so_and_keeps_what_was_good(text, tmp_path, capsys):
    bad = ["--lr=1e30", "--grad_clip=0", "--warmup_steps=0"]
    for steps in (1, 50):
        assert run(text, tmp_path, f"--max_steps={steps}", "--save_every=1", *bad) == 1
        assert re.search(r"train.py: the .*loss is \S+ .*step \d+; nothing was saved", capsys.readouterr().err)
        assert not (tmp_path / "ckpt.pt").exists()
    # a finite loss whose gradient isn't: nobody could go on from there
    assert run(text, tmp_path, "--max_steps=20", "--save_every=1", "--lr=100", *bad[1:]) in (0, 1)
    if (tmp_path / "ckpt.pt").exists():
        step = load_checkpoint(tmp_path / "ckpt.pt")["step"]
        capsys.readouterr()
        code = train.main(["--resume", f"--out={tmp_path}", f"--max_steps={step + 1}", "--lr=0", "--min_lr=0"])
        # its next step is a good one; the batch after that, on which that step is tried, may be too much for it
        assert code == 0 or f"after step {step + 1}; " in capsys.readouterr().err
        last = records(tmp_path)[-1]
        assert last["step"] == step + 1 and math.isfinite(last["loss"]) and math.isfinite(last["grad_norm"])
    assert run(text, tmp_path, "--max_steps=2") == 0
    capsys.readouterr()
    assert train.main(["--resume", f"--out={tmp_path}", "--max_steps=9", "--save_every=1", *bad]) == 1
    assert "keeps step 2" in capsys.readouterr().err and load_checkpoint(tmp_path / "ckpt.pt")["step"] == 2


def test_a_folder_serves_one_run_at_a_time(text, tmp_path, capsys):
    process = program(text, tmp_path, "--max_steps=1000000")
    wait_for_step(tmp_path, 2, process)
    refused(capsys, [*TINY, f"--data={text}", f"--out={tmp_path}"], "in use")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert run(text, tmp_path, "--max_steps=1") == 0


def test_a_second_signal_ends_at_once(text, tmp_path):
    """Here while the model is being built, which takes for ever and looks at no flag."""
    process = program(text, tmp_path, "--n_layer=20000", "--n_embd=2", "--n_head=1")
    time.sleep(4)
    for _ in range(10):                                              # two that come within one long C call are one
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
    process.communicate(timeout=5)
    assert process.returncode in (-signal.SIGINT, 130)


# ---- bad input: one sentence, exit code 2, nothing started ------------------------------------------------------

def refused(capsys, arguments, *words):
    capsys.readouterr()
    try:
        code = train.main(arguments)
    except SystemExit as error:
        code = error.code
    err = capsys.readouterr().err
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err, err
    for word in words:
        assert word in err


@pytest.mark.parametrize("options,words", [
    (["--data=no/such/file"], ["no/such/file", "No such file"]),
    (["--n_embd=17"], ["n_embd=17", "n_head=2"]),
    (["--batch_size=10", "--micro_batch=4"], ["batch_size=10", "micro_batch=4"]),
    (["--batch_size=0"], ["batch_size=0"]), (["--micro_batch=0"], ["micro_batch=0"]),
    (["--max_steps=-1"], ["max_steps=-1"]), (["--lr=nan"], ["lr=nan"]), (["--beta2=1"], ["beta2=1"]),
    (["--dropout=1"], ["dropout=1"]), (["--block_size=0"], ["block_size=0"]),
    (["--device=cuda:99"], ["cuda:99"]), (["--device=abacus"], ["abacus"]),
    (["--vocab_size=50"], ["vocab_size=50"]), (["--resume"], ["ckpt.pt"]), (["--init_from=nothing.pt"], ["nothing.pt"]),
    (["--learning_rate=1"], ["--learning_rate", "--lr"]), (["--nlayer=3"], ["--nlayer", "--n_layer"]),
    (["--n_lay=3"], ["--n_lay", "--n_layer"]), (["--n_layer=many"], ["--n_layer", "many"]),
    (["--n_layer=1000000000", "--n_embd=1000"], ["GiB"]), (["--batch_size=100000000000"], ["GiB"]), (["--data="], ["data="]),
    (["--vocab_size=300"], ["vocab_size=300", "256"]), (["--preset=huge"], ["huge", "baby"]), (["--preset=gpt2", "--draft"], ["draft", "gpt2"]),
])
def test_bad_options(text, tmp_path, capsys, options, words):
    refused(capsys, [*TINY, f"--data={text}", f"--out={tmp_path}", *options], *words)
    assert not (tmp_path / "ckpt.pt").exists()


def test_bad_data(tmp_path, capsys):
    path, out = tmp_path / "x.txt", f"--out={tmp_path / 'o'}"
    path.write_bytes(b"a" * 100)
    refused(capsys, [*TINY, f"--data={path}", "--block_size=256", out], "100", "257")
    path.write_bytes(b"")
    refused(capsys, [*TINY, f"--data={path}", out], "empty")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    refused(capsys, [*TINY, f"--data={tmp_path / 'odd.bin'}", out], "3 bytes")
    np.full(100, 60000, np.uint16).tofile(tmp_path / "train.bin")
    refused(capsys, [*TINY, f"--data={tmp_path / 'train.bin'}", out], "60000", "50257")
    (tmp_path / "bare").mkdir()
    refused(capsys, [*TINY, f"--data={tmp_path / 'bare'}", out], "no text files")
    refused(capsys, [*TINY, "--data=/dev/null", out], "not a regular file")
    (tmp_path / "file").write_text("x")
    refused(capsys, [*TINY, f"--data={path}", f"--out={tmp_path / 'file'}"], "file")


def test_bad_checkpoints(text, tmp_path, capsys):
    assert run(text, tmp_path, "--max_steps=1", "--draft") == 0
    path, resume = tmp_path / "ckpt.pt", ["--resume", f"--out={tmp_path}", "--max_steps=2"]
    refused(capsys, [*resume, "--n_layer=3"], "n_layer=3", "n_layer=2")
    refused(capsys, [*resume, "--vocab_size=300"], "vocab_size=300", "256")
    assert run(text, tmp_path / "e", "--max_steps=1", "--n_expert=4", "--top_k=2") == 0
    for name, usual, kept in (("n_expert", 0, 4), ("top_k", 1, 2)):      # an option's default is no less typed
        refused(capsys, ["--resume", f"--out={tmp_path / 'e'}", f"--{name}={usual}"], f"{name}={usual}", f"{name}={kept}")
    assert train.main(["--resume", f"--out={tmp_path / 'e'}", "--n_expert=4", "--max_steps=2", "--no-compile"]) == 0
    whole = path.read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(capsys, resume, "ckpt.pt", f"{size} bytes")
    torch.save({"weights": torch.zeros(3)}, path)
    refused(capsys, resume, "not a nanoscale")
    torch.save(Namespace, path)                                      # code, which a checkpoint may not hold
    refused(capsys, resume, "ckpt.pt")
    path.write_bytes(whole)
    for damage in (lambda c: c.pop("moments"), lambda c: c.pop("step"), lambda c: c.pop("scaler"), lambda c: c["config"].clear(), lambda c: c["config"].update(n_embd=32),
                   lambda c: c["model"].pop("ln_f.weight"), lambda c: c["model"]["wpe.weight"].fill_(math.nan)):
        ckpt = torch.load(path, weights_only=True)
        damage(ckpt)
        torch.save(ckpt, path)
        for arguments in (resume, [*TINY[:4], f"--data={text}", f"--out={tmp_path / 'x'}", f"--init_from={path}"]):
            refused(capsys, arguments, "ckpt.pt")
        path.write_bytes(whole)
    ckpt = torch.load(path, weights_only=True)
    ckpt["moments"]["exp_avg"]["wpe.weight"].fill_(math.nan)
    torch.save(ckpt, path)
    assert train.main(resume) == 2 and "not numbers" in capsys.readouterr().err
    path.write_bytes(whole)
    (tmp_path / "draft.pt").write_bytes(b"no draft")
    refused(capsys, resume, "draft.pt", "8 bytes", "--no-draft")


def test_help_is_a_manual(capsys):
    with pytest.raises(SystemExit) as leave:
        train.main(["--help"])
    page = capsys.readouterr().out
    assert leave.value.code == 0 and "presets:" in page and "gpt2-xl" in page
    for action in train.options()._actions:
        assert action.help and len(action.help) > 3


def test_it_runs_without_triton():
    code = "import sys; sys.modules['triton'] = None; import model, paged, speculate, train, sample"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_card_of_a_name(monkeypatch):
    want = {"NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA GH200 480GB": 989e12, "NVIDIA A10G": 70e12,
            "NVIDIA A10": 125e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA RTX A6000": 155e12, "NVIDIA RTX A4000": None,
            "NVIDIA RTX A1000": None, "NVIDIA L40S": 362e12, "Tesla T4": None}
    for name, peak in want.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert train.peak_flops(torch.device("cuda")) == peak, name


def test_memory_is_that_of_a_stage(monkeypatch):
    config = GPTConfig(vocab_size=50257, block_size=2048, n_layer=64, n_head=32, n_embd=4096)      # 12.9B
    args = dict(ep=1, dp=1, zero=0, eval_only=False, batch_size=8, block_size=2048, device=torch.device("cpu"))
    monkeypatch.setattr(os, "sysconf", lambda name: 40 * 2 ** 30 if name == "SC_PAGE_SIZE" else 1)
    monkeypatch.setenv("WORLD_SIZE", "8")
    train.check_memory(Namespace(**args, tp=1, pp=8), config)
    for tp, pp in ((1, 4), (2, 1)):
        with pytest.raises(UserError, match="this machine has 40"):
            train.check_memory(Namespace(**args, tp=tp, pp=pp), config)
