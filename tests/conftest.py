"""Every test runs in the environment that a run has."""

from whet.environment import prepare

prepare(None, exact=True)
