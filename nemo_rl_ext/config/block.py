# SPDX-License-Identifier: Apache-2.0
"""The base of every configuration block, and the types that YAML lacks."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

# YAML has no path type: a string becomes a path although everything else is strict.
ConfigPath = Annotated[Path, Field(strict=False), AfterValidator(Path.expanduser)]


class Block(BaseModel):
    """A block of the configuration: keyword-only, immutable, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)
