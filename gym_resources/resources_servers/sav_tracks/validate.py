# SPDX-License-Identifier: Apache-2.0
"""Check the ground truth of every `sav_tracks` row of a manifest before a run starts.

    python -m resources_servers.sav_tracks.validate rows.jsonl

Rows of other environments in a mixed manifest are passed over. Stops at the first row that cannot be scored.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resources_servers.sav_tracks.convert import AGENT
from resources_servers.sav_tracks.truth import GroundTruthError, read_truth


class RowError(ValueError):
    """A row that the server would score 0 with an error; names file, line and row."""


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The checked `verifier_metadata` of each row of ours.

    Raises `RowError` for the first bad row, and for a file without any.
    """
    num_rows = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RowError(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise RowError(f"{path}:{number}: expected an object, got {type(row).__name__}")
            if _agent(row) not in (AGENT, None):
                continue
            metadata = row.get("verifier_metadata")
            try:
                read_truth(metadata)
            except GroundTruthError as error:
                raise RowError(f"{path}:{number}: row {_row_id(metadata)}: {error}") from None
            yield metadata
            num_rows += 1
    if num_rows == 0:
        raise RowError(f"{path}: no row for {AGENT}; expected 'agent_ref': {{'name': '{AGENT}'}}")


def validate_file(path: Path) -> int:
    """Number of checked rows; raises `RowError` as `read_rows`."""
    return sum(1 for _ in read_rows(path))


def _agent(row: dict[str, Any]) -> str | None:
    reference = row.get("agent_ref")
    return reference.get("name") if isinstance(reference, dict) else None


def _row_id(metadata: Any) -> str:
    return repr(metadata.get("row_id")) if isinstance(metadata, dict) else "without verifier_metadata"


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 when every row can be scored, 2 with one line on standard error when one cannot."""
    parser = argparse.ArgumentParser(description="Check the ground truth of sav_tracks rows.")
    parser.add_argument("manifest", type=Path, nargs="+")
    options = parser.parse_args(arguments)
    for path in options.manifest:
        try:
            num_rows = validate_file(path)
        except (OSError, RowError) as error:
            parser.exit(2, f"{error}\n")
        print(f"{path}: {num_rows} rows can be scored")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
