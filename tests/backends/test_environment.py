"""Settings of torch that deltazoo reads."""

import os
import subprocess
import sys

import pytest
import torch

from deltazoo.backends.torch_ext.devices import products_in_tf32

# Every torch setting that may allow tf32 -> whether float32 products use it.
SETTINGS = {
    "pass": False,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork: each setting needs a fresh process that has torch")
def test_tf32_allowed_follows_every_torch_setting():
    code = (
        "import os, sys, torch\n"
        "from deltazoo.backends.torch_ext.devices import tf32_allowed\n"
        "for setting in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        exec(setting)\n"
        "        print(tf32_allowed(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    command = [sys.executable, "-c", code, *SETTINGS]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert dict(zip(SETTINGS, output.split(), strict=True)) == {key: str(value) for key, value in SETTINGS.items()}


@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_products_in_tf32_restores_the_setting(before):
    setting = torch.backends.cuda.matmul
    initial = setting.fp32_precision
    setting.fp32_precision = before
    try:
        with products_in_tf32(False):
            assert setting.fp32_precision == before
        with products_in_tf32(True):
            assert setting.fp32_precision == "tf32"
        assert setting.fp32_precision == before
    finally:
        setting.fp32_precision = initial
