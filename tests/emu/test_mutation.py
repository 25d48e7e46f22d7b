"""The mutation test: planted faults are noticed. A few of them, and all with --all (a quarter of an hour)."""

import os

import pytest

from deep_moe.jit.paths import include_dir
from deep_moe.testing import mutation
from deep_moe.testing.mutants import MUTANTS

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
# Ways of noticing, and faults that the first of their cases shows.
SOME = {
    "arrivals: told relaxed": "Protocol: ",
    "mma: half of the scale group": "error too large: ",
    "receive: statistics overwritten": "statistics wrong: ",
    "mxfp4: 0.5 a code too high": "error too large: MXFP4, subnormal weights: ",
}


def test_mutants_fit_the_headers():
    """Every mutant's text is in the headers as often as it says, names are unique, and each has cases."""
    for mutant in MUTANTS:
        assert mutation.mutated(mutant, include_dir())
        assert any(mutant.cases in case.name for case in mutation.CASES), mutant.name
    assert len(BY_NAME) == len(MUTANTS)


def test_planted_faults_are_noticed():
    for outcome in mutation.try_mutants([BY_NAME[name] for name in SOME], seeds=1):
        assert outcome.caught.startswith(SOME[outcome.mutant.name]), outcome


@pytest.mark.extended
def test_nearly_all_planted_faults_are_noticed():
    unmutated, *outcomes = mutation.try_mutants([None, *MUTANTS], seeds=3, jobs=os.cpu_count() or 1)
    assert unmutated.caught == ""
    survivors = [outcome.mutant.name for outcome in outcomes if not outcome.caught]
    assert len(survivors) <= 0.05 * len(MUTANTS), survivors
