"""Fresh random inputs in every run. The seed of a test is printed when it fails; NANOSCALE_SEED repeats it.

Without a GPU the Triton kernels are run by Triton's interpreter, which has to be chosen before they are defined; only
test_flash.py then calls them, everything else uses what a CPU uses."""

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

os.environ.pop("TRITON_INTERPRET", None)      # the programs started have a CPU's defaults
flash.INTERPRETED = False


@pytest.fixture(autouse=True)
def seed():
    seed = int(os.environ.get("NANOSCALE_SEED", 0)) or int.from_bytes(os.urandom(3), "big")
    print(f"NANOSCALE_SEED={seed}")
    torch.manual_seed(seed)
    np.random.seed(seed)
    return seed
