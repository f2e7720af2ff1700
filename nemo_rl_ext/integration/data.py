# SPDX-License-Identifier: Apache-2.0
"""Rows of a mixed NeMo-Gym manifest for NeMo-RL: static video, still images and text in one file.

NeMo-RL's own processor demands a video in every row once video settings are present, and gives rows without one an
empty float prompt, which does not stack with a video's integer ids.
"""

from __future__ import annotations

import itertools
import json
import logging
from typing import Any

import torch
from nemo_rl.data.datasets.response_datasets.nemogym_dataset import NemoGymDataset
from nemo_rl.data.processors import PROCESSOR_REGISTRY
from nemo_rl.data.processors import nemo_gym_data_processor as upstream_processor

from nemo_rl_ext.integration.in_process import install_in_process
from nemo_rl_ext.integration.script_recipe import require_hooks
from nemo_rl_ext.integration.settings import RecipeError
from nemo_rl_ext.manifest.loading import MAX_ERRORS, ManifestError, RowFault, scan_manifest

logger = logging.getLogger(__name__)

TILES_KEY = "image_max_num_tiles"
"""Per-row key (or `data.default`'s, for rows without one) that is sent to the engine as
`mm_processor_kwargs.max_num_tiles`."""


class RowProcessor:
    """NeMo-RL's data processor for Gym rows, which takes every kind of row.

    An object rather than a function, so that unpickling it installs the hooks in the process that iterates rows.
    """

    name = "nemo_rl_ext.mixed_nemo_gym"

    def __call__(
        self,
        datum_dict: dict[str, Any],
        task_data_spec: Any,
        tokenizer: Any,
        max_seq_length: int | None,
        idx: int,
    ) -> dict[str, Any]:
        row = json.loads(datum_dict["extra_env_info"])
        tiles = row.get(TILES_KEY, datum_dict.get(TILES_KEY))
        if tiles is not None:
            row = with_max_num_tiles(row, tiles)
            datum_dict = {**datum_dict, "extra_env_info": json.dumps(row)}
        if getattr(task_data_spec, "video_sampling_style", None) is not None:
            try:
                return dict(upstream_processor(datum_dict, task_data_spec, tokenizer, max_seq_length, idx))
            except ValueError:
                # NeMo-RL refuses a row without a video there, and nothing else of such a row is judged.
                if has_static_video(row):
                    raise
        datum: dict[str, Any] = upstream_processor(datum_dict, None, tokenizer, max_seq_length, idx)
        for message in datum["message_log"]:
            # Integer like every other row's: a batch of both kinds is flattened before the rollout.
            message["token_ids"] = message["token_ids"].to(torch.int64)
        return datum

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, ()


def _receive() -> RowProcessor:
    install_in_process()
    return RowProcessor()


def has_static_video(row: dict[str, Any]) -> bool:
    """Whether a row's prompt holds a video, as one part or as cached frames."""
    from nemo_rl.data.multimodal_utils import VIDEO_CONTENT_TYPES

    messages = row.get("responses_create_params", {}).get("input", [])
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (
                part.get("type") in VIDEO_CONTENT_TYPES or part.get("_is_video_frame")
            ):
                return True
    return False


def with_max_num_tiles(row: dict[str, Any], tiles: Any) -> dict[str, Any]:
    """The row with the number of tiles that the engine may give an image.

    Raises:
        ValueError: unless `tiles` is a positive integer.
    """
    from nemo_rl.environments.nemo_gym_video import _inject_vllm_mm_processor_kwargs

    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise ValueError(f"{TILES_KEY} must be a positive integer, got {tiles!r} in row {row.get('id')!r}")
    _inject_vllm_mm_processor_kwargs(row, {"max_num_tiles": tiles})
    return row


class MixedNemoGymDataset(NemoGymDataset):  # type: ignore[misc]  # known only at run time
    """NeMo-RL's `NemoGymDataset` whose rows are checked when they are loaded, and whose processor takes every kind.

    Usable from a recipe alone: `data.train.dataset_name: nemo_rl_ext.integration.data.MixedNemoGymDataset`.

    Raises:
        ManifestError: listing the first faults by line and field.
    """

    refuses_faults = True

    def __init__(self, data_path: str, repeat: int = 1, **kwargs: Any) -> None:
        require_hooks()
        self._check_rows(data_path)
        super().__init__(data_path, repeat=repeat, **kwargs)
        tiles = kwargs.get(TILES_KEY)
        if tiles is not None:
            self.dataset: Any = self.dataset.add_column(TILES_KEY, [tiles] * len(self.dataset))

    def _check_rows(self, data_path: str) -> None:
        items = scan_manifest(data_path, check_media=False)
        faults = list(itertools.islice((item for item in items if isinstance(item, RowFault)), MAX_ERRORS))
        if not faults:
            return
        listed = "\n".join(f"  {fault}" for fault in faults)
        if self.refuses_faults:
            raise ManifestError(f"{data_path}: the manifest has faults; correct these lines:\n{listed}")
        logger.warning("%s: the manifest has faults, of which these are the first:\n%s", data_path, listed)

    def set_processor(self) -> None:
        """Bind the processor that takes every kind of row, whichever of the two names the recipe uses."""
        name = self.data_config.get("processor")
        if name not in (None, "nemo_gym_data_processor", RowProcessor.name):
            raise RecipeError(
                f"data processor {name!r} does not know mixed NeMo-Gym rows; use nemo_gym_data_processor or "
                f"{RowProcessor.name}"
            )
        self.processor = RowProcessor()


class CheckedNemoGymDataset(MixedNemoGymDataset):
    """What a recipe's `NemoGymDataset` becomes: faults are named, but rows that NeMo-RL takes are still taken."""

    refuses_faults = False


PROCESSOR_REGISTRY.setdefault(RowProcessor.name, RowProcessor())
