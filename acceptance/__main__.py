"""``python -m tinyllm.acceptance ROOT``: the same as ``tinyllm accept ROOT``."""

import sys

from tinyllm.acceptance.accept import main

sys.exit(main(prog="python -m tinyllm.acceptance"))
