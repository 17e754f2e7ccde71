"""sample.py as a person uses it, pipes it and breaks it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DEVICE, gpt2_tensors, write_gpt2, write_tokenizer

import sample
import train
from model import Tokenizer

ROOT = Path(__file__).parent.parent
TINY = ["--preset=cpu", "--no-draft", "--no-compile", f"--device={DEVICE}", "--n_layer=2", "--n_head=2", "--n_embd=16",
        "--block_size=8", "--batch_size=4", "--max_steps=2", "--vocab_size=256"]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    """A model that has hardly learned: it writes any bytes at all."""
    out = tmp_path_factory.mktemp("out")
    (out / "text.txt").write_bytes(bytes(range(256)) * 10)
    assert train.main([*TINY, f"--data={out / 'text.txt'}", f"--out={out}"]) == 0
    return out / "ckpt.pt"


@pytest.fixture(scope="module")
def ids_ckpt(tmp_path_factory):
    out = tmp_path_factory.mktemp("ids")
    np.arange(300, dtype=np.uint16).tofile(out / "train.bin")
    assert train.main([*TINY[:-1], "--vocab_size=300", f"--data={out / 'train.bin'}", f"--out={out}"]) == 0
    return out / "ckpt.pt"


def write(capsys, ckpt, *options):
    capsys.readouterr()
    code = sample.main([f"--ckpt={ckpt}", f"--device={DEVICE}", "--dtype=float32", "--max_new_tokens=30", *options])
    out, err = capsys.readouterr()
    assert code == 0 and "tokens/s" in err and err.count("\n") == 1
    return out


def refused(capsys, *options):
    capsys.readouterr()
    try:
        code = sample.main([f"--device={DEVICE}", *options])
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err and not out
    return err


def test_text_is_the_models_and_nothing_else(ckpt, capsys):
    model, tokenizer = sample.load_model(ckpt, torch.device(DEVICE), torch.float32)
    prompt = torch.tensor([list(b"ab")], device=DEVICE)
    want = model.generate(prompt, 30, temperature=0)[0].tolist()
    assert write(capsys, ckpt, "--prompt=ab", "--temperature=0") == bytes(want).decode("utf-8", "replace") + "\n"


def test_seeds_and_samples(ckpt, capsys):
    one, same, other = (write(capsys, ckpt, f"--seed={s}") for s in (1, 1, 2))
    assert one == same != other
    three = write(capsys, ckpt, "--num_samples=3")
    assert three.startswith(one + "\n") and len(set(three.split("\n\n"))) >= 3


def test_greedy_and_its_equals(ckpt, capsys):
    greedy = write(capsys, ckpt, "--temperature=0", "--prompt=x")
    assert greedy == write(capsys, ckpt, "--temperature=0", "--prompt=x", "--seed=9")
    assert greedy == write(capsys, ckpt, "--top_k=1", "--prompt=x", "--temperature=1.7")
    assert write(capsys, ckpt, "--top_k=10000") == write(capsys, ckpt)
    assert write(capsys, ckpt, "--top_p=1.0") == write(capsys, ckpt)


@pytest.mark.parametrize("prompt", ["", "\n", "café 日本 ?", "a" * 7, "a" * 8, "a" * 17, "\udcff\udc80 bytes"])
def test_any_prompt(ckpt, capsys, prompt):
    raw = prompt.encode("utf-8", "surrogateescape")
    out = write(capsys, ckpt, f"--prompt={prompt}")
    assert out.startswith(raw.decode("utf-8", "replace"))


def test_prompt_files(ckpt, capsys, tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("é\nb".encode())
    assert write(capsys, ckpt, f"--prompt=@{path}") == write(capsys, ckpt, "--prompt=é\nb")
    path.write_bytes(b"")
    assert write(capsys, ckpt, f"--prompt=@{path}") == write(capsys, ckpt, "--prompt=")
    assert "No such file" in refused(capsys, f"--ckpt={ckpt}", f"--prompt=@{tmp_path / 'none'}")


def test_prompts_of_a_file_come_out_in_order(ckpt, capsys, tmp_path):
    path, alone = tmp_path / "prompts.txt", []
    for text in ("ab", "", "é"):
        alone.append(write(capsys, ckpt, f"--prompt={text}", "--temperature=0"))
    for raw in (b"ab\n\n\xc3\xa9\n", b"ab\r\n\r\n\xc3\xa9"):
        path.write_bytes(raw)
        for batch in (1, 2, 10 ** 15):
            assert write(capsys, ckpt, f"--prompts={path}", "--temperature=0", f"--max_batch={batch}") == "\n".join(alone)
    assert write(capsys, ckpt, "--prompt=ab", "--prompt=", "--prompt=é", "--temperature=0") == "\n".join(alone)
    path.write_bytes(b"")
    assert "prompts=" in refused(capsys, f"--ckpt={ckpt}", f"--prompts={path}")
    assert "prompts=" in refused(capsys, f"--ckpt={ckpt}", f"--prompts={tmp_path / 'none'}")
    assert "once" in refused(capsys, f"--ckpt={ckpt}", "--prompt=@-", "--prompts=-")


def test_a_model_of_numbers(ids_ckpt, capsys):
    out = write(capsys, ids_ckpt, "--prompt=7 8 299")
    assert len(out.split()) == 33 and out.startswith("7 8 299 ") and max(map(int, out.split())) < 300
    assert "'seven'" in refused(capsys, f"--ckpt={ids_ckpt}", "--prompt=seven")
    err = refused(capsys, f"--ckpt={ids_ckpt}", "--prompt=7 300")
    assert "300" in err and "299" in err


def test_a_character_is_shown_when_all_its_bytes_are_there():
    decode = Tokenizer("bytes").decoder()
    ids = list("é日🙂".encode())
    assert [decode([i]) for i in ids] == ["", "é", "", "", "日", "", "", "", "🙂"] and decode([], final=True) == ""
    decode = Tokenizer("bytes").decoder()
    assert decode([0xff, 65, 0xe6]) == "\ufffdA" and decode([], final=True) == "\ufffd"


# ---- speculation ------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    out = tmp_path_factory.mktemp("draft")
    (out / "text.txt").write_bytes(bytes(range(256)) * 10)
    options = [*TINY, "--n_layer=1", "--block_size=16", f"--data={out / 'text.txt'}", f"--out={out}"]
    assert train.main(options) == 0
    return out / "ckpt.pt"


def speculate(capsys, ckpt, *options):
    capsys.readouterr()
    code = sample.main([f"--ckpt={ckpt}", f"--device={DEVICE}", "--dtype=float32", "--max_new_tokens=30", "--speculative",
                        *options])
    out, err = capsys.readouterr()
    assert code == 0 and "Traceback" not in err
    return out, err


@pytest.mark.parametrize("gamma", ["1", "4", "8", "auto"])
def test_speculation_writes_the_same_greedy_text(ckpt, draft, capsys, gamma):
    want = write(capsys, ckpt, "--temperature=0", "--prompt=ab", "--num_samples=2")
    for who in (draft, ckpt, "lookup"):
        out, err = speculate(capsys, ckpt, f"--draft={who}", f"--gamma={gamma}", "--temperature=0", "--prompt=ab",
                             "--num_samples=2")
        assert out == want and f"drafts by {who}" in err and "alpha" in err
        assert "alpha 1.00" in err or who != ckpt


def test_colors_say_who_wrote_what(ckpt, capsys):
    out, _ = speculate(capsys, ckpt, f"--draft={ckpt}", "--gamma=2", "--temperature=0", "--color", "--prompt=ab")
    plain = write(capsys, ckpt, "--temperature=0", "--prompt=ab")
    assert re.sub("\033\\[\\d+m", "", out) == plain and "\033[32m" in out and "\033[34m" in out
    codes = re.findall("\033\\[(\\d+)m", out)      # each color ends before the next begins, so that Ctrl-C leaves none
    assert set(codes[1::2]) == {"0"} and "0" not in codes[::2] and len(codes) % 2 == 0
    out, _ = speculate(capsys, ckpt, "--draft=lookup", "--temperature=0", "--color", "--max_new_tokens=3")
    assert "\033[31m" in out and out.endswith("\033[0m\n")


def test_speculation_that_cannot_be(ckpt, ids_ckpt, draft, capsys, tmp_path):
    for options in (["--gamma=4"], ["--draft=lookup"], ["--color"]):
        assert "--speculative" in refused(capsys, f"--ckpt={ckpt}", *options)
    for gamma in ("0", "-1", "1.5", "many", "65", "²", ""):
        assert "gamma=" in refused(capsys, f"--ckpt={ckpt}", "--speculative", f"--gamma={gamma}")
    assert "no such checkpoint" in refused(capsys, f"--ckpt={ckpt}", "--speculative", f"--draft={tmp_path / 'none.pt'}")
    err = refused(capsys, f"--ckpt={ids_ckpt}", "--speculative", f"--draft={draft}", "--prompt=1")
    assert "256" in err and "300" in err
    assert "drafts by lookup" in speculate(capsys, ckpt)[1]      # no draft.pt is beside it
    beside = tmp_path / "ckpt.pt"
    shutil.copy(ckpt, beside), (tmp_path / "draft.pt").symlink_to(draft)
    assert f"drafts by {tmp_path / 'draft.pt'}" in speculate(capsys, beside)[1]
    (tmp_path / "draft.pt").unlink(), (tmp_path / "draft.pt").symlink_to(tmp_path / "gone.pt")
    assert "draft.pt: no such checkpoint" in refused(capsys, f"--ckpt={beside}", "--speculative")
    assert "is empty" in refused(capsys, f"--ckpt={ckpt}", "--speculative", "--draft=")
    err = speculate(capsys, draft, f"--draft={ckpt}")[1]
    assert "longer than it saves" in err and "ends at 8 tokens and the model's at 16" in err


def test_drafts_of_other_words_are_refused(tmp_path, capsys):
    gpt2(tmp_path / "a"), gpt2(tmp_path / "b")
    assert speculate(capsys, tmp_path / "a", f"--draft={tmp_path / 'b'}", "--prompt=the")[0].startswith("the")
    file = tmp_path / "b" / "tokenizer.json"
    file.write_text(file.read_text().replace('"t h"', '"h t"').replace('"th"', '"ht"').replace('"th e"', '"ht e"')
                    .replace('"the"', '"hte"').replace("the", "hte"))
    err = refused(capsys, f"--ckpt={tmp_path / 'a'}", "--speculative", f"--draft={tmp_path / 'b'}")
    assert str(tmp_path / "a") in err and str(tmp_path / "b") in err and "differently" in err


# ---- GPT-2's weights --------------------------------------------------------------------------------------------

def gpt2(folder, old=False, **changes):
    """A folder of 262 ids, byte pairs, whose model is unsure what to write."""
    pytest.importorskip("safetensors", reason="reading weights needs the library safetensors")
    pytest.importorskip("tokenizers", reason="reading text needs the library tokenizers")
    write_tokenizer(folder, old)
    tensors = gpt2_tensors(262, 24, 8, 2)
    tensors["wte.weight"] += torch.randn(262, 8)
    return write_gpt2(folder, tensors, vocab_size=262, n_positions=24, **changes)


@pytest.mark.parametrize("old", [False, True])
def test_a_gpt2_writes_text(tmp_path, capsys, old):
    folder = gpt2(tmp_path, old, eos_token_id=None)
    model, tokenizer = sample.load_model(folder, torch.device(DEVICE), torch.float32)
    prompt = "the other\n\n the é日"
    ids = tokenizer.encode(prompt)
    assert ids[0] == 257 and 258 in ids and 260 in ids and len(ids) < len(prompt.encode()) - 5
    text = model.generate(torch.tensor([ids], device=DEVICE), 30, temperature=0)[0].tolist()
    want = text[:text.index(261, len(ids))] if 261 in text[len(ids):] else text      # the end-of-text by its name
    decode = tokenizer.pairs.decode(want, skip_special_tokens=False)
    assert write(capsys, folder, f"--prompt={prompt}", "--temperature=0") == decode + "\n"
    assert decode.startswith(prompt)
    out = write(capsys, folder, "--prompt=", "--prompt=\udcffx")
    assert "\n\n\ufffdx" in out


def test_the_end_of_text_stops_it(tmp_path, capsys):
    model, _ = sample.load_model(gpt2(tmp_path), torch.device(DEVICE), torch.float32)
    first = model.generate(torch.tensor([[65, 66]], device=DEVICE), 30, temperature=0)[0].tolist()
    for end in (first[2], first[9]):
        _, tokenizer = sample.load_model(write_gpt2(tmp_path, state(model), vocab_size=262, n_positions=24,
                                                    eos_token_id=end), torch.device(DEVICE), torch.float32)
        text = tokenizer.pairs.decode([65, 66] + first[2:first.index(end, 2)], skip_special_tokens=False)
        start = tokenizer.pairs.decode([65, 66])
        assert write(capsys, tmp_path, f"--prompt={start}", "--temperature=0") == text + "\n"
    both = write(capsys, tmp_path, f"--prompt={start}", f"--prompt={start}", "--temperature=0")
    assert both == text + "\n\n" + text + "\n"


def state(model):
    """A model's weights as GPT-2 names them."""
    names = {"blocks.": "h.", ".qkv.": ".c_attn.", ".proj.": ".c_proj.", ".fc.": ".c_fc."}
    found = {}
    for name, p in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        p = p.cpu()[:262] if name == "wte.weight" else p.cpu()
        found[name] = p.t() if ".c_" in name and p.dim() == 2 else p
    return found


def test_without_a_tokenizer_there_are_ids(tmp_path, capsys):
    (gpt2(tmp_path) / "tokenizer.json").unlink()
    assert sample.main([f"--ckpt={tmp_path}", f"--device={DEVICE}", "--prompt=3 200", "--max_new_tokens=5"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("3 200 ") and len(out.split()) == 7
    assert "tokenizer.json, so that tokens are shown as numbers" in err and err.count("\n") == 2
    assert sample.main([f"--ckpt={tmp_path}", f"--device={DEVICE}", "--prompt=the"]) == 2
    assert "a prompt is numbers, not 'the'" in capsys.readouterr().err


def test_bad_folders_and_missing_libraries(tmp_path, capsys, monkeypatch):
    gpt2(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json is not a tokenizer" in refused(capsys, f"--ckpt={tmp_path}", "--prompt=x")
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    assert f"model.safetensors ({path.stat().st_size} bytes)" in refused(capsys, f"--ckpt={tmp_path}")
    write_gpt2(tmp_path, model_type="opt")
    assert "describes opt" in refused(capsys, f"--ckpt={tmp_path}")
    write_gpt2(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install tokenizers" in refused(capsys, f"--ckpt={tmp_path}")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "pip install safetensors" in refused(capsys, f"--ckpt={tmp_path}")


def test_pieces_of_characters_wait_and_spaces_stay(tmp_path):
    gpt2(tmp_path)
    tokenizer = Tokenizer("gpt2", tmp_path / "tokenizer.json")
    for text in ("é日🙂 the  the\n\n\nthe <|endoftext|> é", " ", "\ufffd", "a\ufffdb"):
        decode, ids = tokenizer.decoder(), tokenizer.encode(text)
        assert "".join([decode([i]) for i in ids] + [decode([], final=True)]) == text
        decode = tokenizer.decoder()
        assert decode(ids[:2]) + decode(ids[2:], final=True) == text
    decode = tokenizer.decoder()
    sun = tokenizer.encode("日")
    assert [decode([i]) for i in sun] == ["", "", "日"]
    assert decode(sun[:2]) == "" and decode([], final=True) == "\ufffd"


def program(ckpt, *options, **env):
    return subprocess.run([sys.executable, "sample.py", f"--ckpt={ckpt}", "--device=cpu", *options], cwd=ROOT,
                          capture_output=True, timeout=60, env={**os.environ, **env})


def test_room_is_taken_for_what_was_asked(ckpt, capsys, monkeypatch, tmp_path):
    """On a CPU as well, where nobody says how much there is."""
    options, made = [*TINY, f"--data={ckpt.parent / 'text.txt'}", f"--out={tmp_path}", "--block_size=64"], []
    assert train.main(options) == 0

    def make_engine(*args):
        made.append(make(*args))
        return made[0]
    make = sample.make_engine
    monkeypatch.setattr(sample, "make_engine", make_engine)
    write(capsys, tmp_path / "ckpt.pt", "--num_samples=64", "--max_batch=8", "--max_new_tokens=20", "--prompt=abcdef",
          "--prompt=")
    assert len(made[0].pool.users) == 8 * 2      # 26 tokens of 64, in blocks of 16


def test_any_locale(ckpt):
    result = program(ckpt, "--prompt=é日", "--max_new_tokens=20", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert result.returncode == 0 and result.stdout.startswith(b"??") and b"Traceback" not in result.stderr
    result = program(ckpt, "--prompt=é日", "--max_new_tokens=20", LC_ALL="C")
    assert result.returncode == 0 and result.stdout.decode().startswith("é日")


def test_a_reader_that_leaves(ckpt):
    command = f"{sys.executable} sample.py --ckpt={ckpt} --device=cpu --max_new_tokens=3000 | head -c 5"
    result = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, timeout=60)
    assert len(result.stdout) == 5 and b"Traceback" not in result.stderr and b"Exception" not in result.stderr


def test_streams_that_are_full_or_closed(ckpt):
    def run(redirection):
        command = f"{sys.executable} sample.py --ckpt={ckpt} --device=cpu --max_new_tokens=5 {redirection}"
        return subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, timeout=60, text=True)
    for redirection, code, words in ((">/dev/full", 1, "No space left"), (">&-", 2, "standard output"),
                                     ("--prompt=@- <&-", 2, "standard input"), ("2>&-", 0, "")):
        result = run(redirection)
        assert result.returncode == code and words in result.stderr and "Traceback" not in result.stderr, redirection
        assert "tokens/s" not in result.stdout


@pytest.mark.parametrize("option", ["--top_k=0", "--top_k=-1", "--top_p=0", "--top_p=2", "--temperature=-1",
                                    "--temperature=nan", "--num_samples=0", "--max_new_tokens=-1", "--device=cuda:99"])
def test_bad_options(ckpt, capsys, option):
    name, value = option[2:].split("=")
    err = refused(capsys, f"--ckpt={ckpt}", option)
    assert name in err and value in err


def test_bad_options_by_name(ckpt, capsys):
    assert "--max_new_tokens" in refused(capsys, "--max_tokens=3")
    assert "--prompt" in refused(capsys, "--promt=x")


def test_bad_checkpoints(ckpt, capsys, tmp_path):
    path = tmp_path / "c.pt"
    assert "train.py" in refused(capsys, f"--ckpt={path}")
    assert str(tmp_path) in refused(capsys, f"--ckpt={tmp_path}")
    whole = ckpt.read_bytes()
    for size in (0, 100, len(whole) // 3, len(whole) - 10):
        path.write_bytes(whole[:size])
        assert f"{size} bytes" in refused(capsys, f"--ckpt={path}")
    torch.save([1, 2], path)
    assert "not a nanoscale" in refused(capsys, f"--ckpt={path}")
    state = torch.load(ckpt, weights_only=True)
    state["model"]["ln_f.weight"] = torch.full_like(state["model"]["ln_f.weight"], float("nan"))
    torch.save(state, path)
    assert "not numbers" in refused(capsys, f"--ckpt={path}")
