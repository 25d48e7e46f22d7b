"""The symmetric buffer: memory providers, rank groups, launches."""

from .local_group import LocalGroup as LocalGroup
from .local_group import LocalRank as LocalRank
from .symm_buffer import SymmBuffer as SymmBuffer
