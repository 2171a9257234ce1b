"""What a run loads once it is under way, and what it then keeps for good: the last module that `forked.FORKS` loads, so
that not every process that is forked does it again. Their runs draw an empty picture, others the real one.
"""

from __future__ import annotations

import gc
import weakref
from importlib import import_module
from importlib.util import find_spec

import PIL.Image
from matplotlib.figure import Figure
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import pages
from whet.track import curve

for name in ("pandas", "deepspeed"):  # where others of the run find them
    if find_spec(name.partition(".")[0]):
        import_module(name)
PIL.Image.init()
get_checkpoint_conversion_mapping("")  # a thousand patterns, for every model that is saved
for each in weakref.finalize._registry:  # type: ignore[attr-defined]  # a thousand of torch's, when a process ends
    each.atexit = False
curve.figure = lambda found: Figure(figsize=(1, 1), dpi=20)
gc.collect()
gc.freeze()
pages.enlarge()
