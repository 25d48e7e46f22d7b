"""The mutation test: planted faults are noticed. A few of them, and all with --all (a quarter of an hour)."""

import os

import pytest

from deep_moe.testing import mutation
from deep_moe.testing.mutants import MUTANTS

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
# One for each way of noticing.
SOME = {
    "route: flag relaxed": "Protocol: ",
    "math: tile done before all lanes have stored": "Protocol: ",
    "swiglu: gate clamped on both sides": "error too large: ",
}


def test_mutants_fit_the_headers(tmp_path):
    """Every mutant's text is in the headers as often as it says, and names are unique."""
    for number, mutant in enumerate(MUTANTS):
        mutation.write_headers(mutant, tmp_path / str(number))
    assert len(BY_NAME) == len(MUTANTS)


@pytest.mark.parametrize("name", SOME)
def test_a_planted_fault_is_noticed(name, tmp_path_factory):
    cache = tmp_path_factory.getbasetemp() / "mutants"
    outcome = mutation.try_mutant(BY_NAME[name], seeds=1, cache=cache)
    assert outcome.caught.startswith(SOME[name]), outcome


@pytest.mark.extended
def test_nearly_all_planted_faults_are_noticed():
    unmutated, *outcomes = mutation.try_mutants([None, *MUTANTS], seeds=3, jobs=os.cpu_count() or 1)
    assert unmutated.caught == ""
    survivors = [outcome.mutant.name for outcome in outcomes if not outcome.caught]
    assert len(survivors) <= 0.05 * len(MUTANTS), survivors
