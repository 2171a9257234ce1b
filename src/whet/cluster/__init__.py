"""Parts of a run in processes of their own, on this machine or many, by Ray. The only package that imports it.

The loop stays in the process that was started. Nothing outlives the run: a cluster that was started here goes down with
this process, whatever ends it, and an actor in a foreign cluster ends when the driver is gone.
"""

from whet.cluster.engines import EngineActor, Hello, RayEngine, open_replicas
from whet.cluster.explorers import beside, open_crew
from whet.cluster.nodes import connect, disconnect, place
from whet.cluster.parts import enter, rank_lines
from whet.cluster.rewards import Hosts, hosts_of
from whet.rollout.router import Router

__all__ = [
    "EngineActor",
    "Hello",
    "Hosts",
    "RayEngine",
    "Router",
    "beside",
    "connect",
    "disconnect",
    "enter",
    "hosts_of",
    "open_crew",
    "open_replicas",
    "place",
    "rank_lines",
]
