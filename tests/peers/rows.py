"""All rows."""

from __future__ import annotations

from peers import (
    rows_cosmos,
    rows_divergence,
    rows_sdpo,
    rows_skyrl,
    rows_trinity,
    rows_trl,
    rows_trl_pairs,
    rows_verl,
)

ROWS = (
    *rows_verl.ROWS,
    *rows_skyrl.ROWS,
    *rows_trinity.ROWS,
    *rows_cosmos.ROWS,
    *rows_trl.ROWS,
    *rows_trl_pairs.ROWS,
    *rows_divergence.ROWS,
    *rows_sdpo.ROWS,
)
