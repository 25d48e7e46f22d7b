"""`python -m deep_moe env | warmup | demo`."""

import sys

from .cli import main

sys.exit(main())
