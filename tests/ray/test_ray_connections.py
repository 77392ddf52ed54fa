"""Connections of actors fail at random, and actors are killed or lost; `make stress KIND=ray` runs more trials."""

import collections
import random

import pytest
from faults import connections


@pytest.mark.parametrize("seed", [8, 12])
def test_an_epoch_survives_what_happens_to_its_connections(cluster, tmp_path, seed):
    trial = connections.Trial.random(random.Random(seed), on_ray=True)
    figures = collections.Counter()
    assert connections.Play(trial, tmp_path, figures, connections.actors, cluster.lose).run() == [], trial
    assert figures["epochs"] == trial.settings.epochs and figures["restarts"] > 0, (trial, figures)
