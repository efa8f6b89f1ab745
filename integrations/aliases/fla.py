"""deltazoo.fla, an alias of `deltazoo.integrations.fla`: flash-linear-attention's names on our operators."""

import sys

from deltazoo.integrations import fla

sys.modules[__name__] = fla
