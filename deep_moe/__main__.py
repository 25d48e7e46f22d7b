"""`python -m deep_moe env | warmup | demo | mutate`."""

import sys

from .cli import main

sys.exit(main())
