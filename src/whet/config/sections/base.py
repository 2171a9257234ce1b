"""Base class and number types of all sections of the schema."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Negative = Annotated[int, Field(le=-1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Percent = Annotated[str, Field(pattern=r"^-?[1-9][0-9]?%$", examples=["10%"])]
Epochs = Annotated[str, Field(pattern=r"^[1-9][0-9]* epochs?$", examples=["2 epochs"])]
Steps = Annotated[str, Field(pattern=r"^[1-9][0-9]* steps? from [1-9][0-9]*$", examples=["4 steps from 3"])]
Seconds = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)? s$", examples=["30 s"])]
Interval = Count | Epochs | Steps | Annotated[tuple[Positive | Epochs | Steps, ...], Field(min_length=1)]
Above0 = Annotated[float, Field(gt=0.0)]
Place = Annotated[str, AfterValidator(os.path.expanduser)]
"""A local path, a URL or a word. `~` is the home of the user, as in a shell: no folder of that name is made."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen, types are never converted silently."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
