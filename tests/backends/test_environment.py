"""What is read of the machine and of torch's settings."""

import subprocess
import sys

import pytest

SETTINGS = {
    "pass": False,
    "torch.backends.cuda.matmul.allow_tf32 = True": True,
    "torch.set_float32_matmul_precision('high')": True,
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'": True,
    "torch.backends.fp32_precision = 'tf32'": True,
    "torch.set_float32_matmul_precision('high'); torch.backends.cuda.matmul.fp32_precision = 'ieee'": False,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_tf32_is_allowed_by_whichever_setting_says_so(setting):
    module = "deltazoo.backends.devices"
    code = f"import torch; from {module} import tf32_allowed; {setting}; print(tf32_allowed())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(SETTINGS[setting])
