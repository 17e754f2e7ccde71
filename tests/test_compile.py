"""Every kernel compiles for a Hopper GPU, also where there is none: the interpreter runs what the compiler refuses.

    python tests/test_compile.py      the same by hand, with whatever Triton is installed
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

try:
    import triton
except ImportError:
    triton = None
ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(triton is None or not sys.platform.startswith("linux"), reason="needs Triton's compiler")
def test_every_kernel_compiles(tmp_path):
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=400, env={
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    names = {line.split("def ")[1].split("(")[0] for path in ("flash.py", "paged.py", "speculate.py")
             for line in (ROOT / path).read_text().splitlines() if line.startswith("def ") and "_kernel(" in line}
    compiled = dict(line.split() for line in done.stdout.splitlines())
    assert names == set(compiled) and len(names) > 15


def pretend():
    """From here on tensors of the CPU count as a GPU's, and a launch compiles for one and runs nothing: what it would
    have written is 0. -> {name of a kernel: set of what it was compiled to}."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
    driver.set_active(Hopper())
    compiled, run = {}, JITFunction.run
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def compile(self, *args, grid, warmup, **kwargs):
        compiled.setdefault(self.__name__, set()).add(id(run(self, *args, grid=grid, warmup=True, **kwargs)))
    JITFunction.run = compile
    torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).zero_()
    torch.empty_like = lambda *args, **kwargs: empty_like(*args, **kwargs).zero_()
    torch.Tensor.new_empty = lambda *args, **kwargs: new_empty(*args, **kwargs).zero_()
    torch.cuda.device_of = lambda x: nullcontext()
    return compiled


def main():
    sys.path.insert(0, str(ROOT))
    compiled = pretend()
    import flash
    import paged
    import speculate
    from model import GPT, GPTConfig
    flash.INTERPRETED = True      # nothing is: so kernels are called
    on = dict(OVERLAP=True, launch_pdl=True) if paged.recent() else dict(OVERLAP=False)
    paged.overlap = speculate.overlap = lambda device: on

    for kernel in (flash.softmax_safe_kernel, flash.softmax_online_kernel):
        kernel[(2,)](*torch.zeros(2, 2, 99), 99, BLOCK=32)
    for dtype, hs in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float32, 64)):
        q, k, v = (torch.zeros(1, 2, 40, hs, dtype=dtype, requires_grad=True) for _ in range(3))
        o, lse = flash.flash_attention(q, k, v, return_lse=True)
        (o.float().sum() + lse.sum()).backward()
    flash.packed_flash_attention(torch.zeros(3, 1, 2, 40, 64, requires_grad=True).bfloat16()).sum().backward()
    x, w = (torch.zeros(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (8, 128))
    flash.LinearCrossEntropy.apply(x, w, torch.zeros(8, dtype=torch.int64), 100, True).backward()

    for dtype, bias, V, rows, temperature, top_k in (
            (torch.bfloat16, False, 300, 1, 0.0, None), (torch.bfloat16, False, 3000, 3, 1.0, 5),
            (torch.float32, True, 3000, 1, 1.0, None)):
        shape = dict(vocab_size=V, block_size=256, bias=bias)
        target = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=128, **shape), seed=1).to(dtype).eval()
        draft = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, **shape), seed=1).to(dtype).eval()
        for engine in (paged.Engine(target, 90, 16, rows), speculate.Speculator(target, 90, 16, rows, draft=draft),
                       speculate.Speculator(target, 90, 16, rows, gamma=2)):
            for i in range(rows):
                engine.add([1, 2, 3] * (1 + 30 * i), 12, temperature, top_k=top_k, seed=i)
            while engine.busy:
                engine.step()
    for name, kinds in compiled.items():
        print(name, len(kinds))


if __name__ == "__main__":
    main()
