"""verl's keys of generation (main_generation), which its document does not name: replies to a file of prompts.

Nothing of it is built yet; the table is there so that such a file is known for what it is.
"""

from __future__ import annotations

from whet.dialects.row import NotSupportedYet, Values
from whet.dialects.verl.rules import Native

_REPLIES = "writing a model's replies to a file of prompts, without training"


def unbuilt(v: Values) -> Native:
    raise NotSupportedYet(f"data.output_path={v['data.output_path']}: {_REPLIES} is coming, not built yet")
