# SPDX-License-Identifier: Apache-2.0
"""The configurations that come with the package: `configs/` of a checkout, and of an installed wheel."""

from __future__ import annotations

from pathlib import Path

CONFIGS = Path(__file__).parents[1] / "configs"
EMBEDDED = CONFIGS / "embedded_async.yaml"


def config_path(path: Path) -> Path:
    """`path`, or, where nothing is there and it says `configs/...`, the configuration of that name in the package."""
    if path.exists() or path.is_absolute() or path.parts[:1] != ("configs",):
        return path
    shipped = CONFIGS.joinpath(*path.parts[1:])
    return shipped if shipped.is_file() else path
