"""How torch's threads wait for one another in commands that run for minutes."""

import os
import sys


def wait_patiently() -> None:
    """Let threads sleep while they wait, unless the environment says otherwise; call it before torch is imported.

    They spin by default: on a machine that is busy with something else too, each then waits for one that the other
    program has put aside, and training was seen to run at a tenth of its speed. Results do not change.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
