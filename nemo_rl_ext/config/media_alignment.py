# SPDX-License-Identifier: Apache-2.0
"""``grpo.media_alignment``: the one block that the embedded run and a NeMo-RL recipe share."""

import logging
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from nemo_rl_ext.config.block import Block

logger = logging.getLogger(__name__)

Action = Literal["mask", "raise"]

_EVIDENCE_OF_SOURCE = {"captured": "receipt", "runs": "runs"}


class MediaAlignmentConfig(Block):
    """Make the training tensors fit the placeholder runs of each rollout.

    Keys, names and defaults are the same in the embedded run and inside NeMo-RL. A key that one side cannot have is
    refused there by `refuse_keys`, with the place that has it.
    """

    enabled: bool = Field(
        default=True,
        description="Align every turn's media. When false, tensors are the processor's own, and a turn that the engine "
        "re-sized stops the run with the feature and placeholder counts. A NeMo-RL recipe without the block is left "
        "alone.",
    )
    on_ambiguous: Action = Field(
        default="mask",
        description="What happens to a row whose patch grid is not determined by its tokens: 'mask' keeps it with zero "
        "loss, 'raise' stops the run.",
    )
    on_unalignable: Action = Field(
        default="mask",
        description="What happens to a row whose media cannot be made to fit its tokens: 'mask' or 'raise'.",
    )
    prevent: bool = Field(
        default=False,
        description="Run only under limits at which the engine re-sizes no image: others are refused at the start, "
        "with the numbers that would do, and an image that is re-sized all the same is treated as on_unalignable says "
        "instead of being repaired. Clips are repaired as always.",
    )
    max_masked_fraction: float = Field(
        default=0.25,
        ge=0.0,
        le=1.0,
        description="The run stops with a diagnosis when a larger share of the rows in the window is masked.",
    )
    masked_window: int = Field(
        default=256,
        ge=1,
        description="Number of most recent rows over which max_masked_fraction is judged, once it is full.",
    )
    num_aligners: int = Field(
        default=1,
        ge=1,
        description="RolloutAligner actors, which decode and resize.",
    )
    aligner_cpus: float = Field(
        default=1.0,
        ge=0.0,
        description="CPUs that each aligner asks Ray for, spread over the nodes; 0 where all CPUs are set aside for "
        "other work.",
    )
    aligner_timeout_s: float = Field(
        default=600.0,
        gt=0.0,
        description="Longest time for one call's pixel work; an aligner that exceeds it is replaced.",
    )
    cache_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="Bytes of repaired tensors that each aligner keeps by (content, frames, grid); 0 keeps none.",
    )
    evidence: Literal["receipt", "runs"] = Field(
        default="receipt",
        description="What proves a medium: 'receipt' takes the engine's own record of each request where there is one "
        "and the placeholder runs where there is none, 'runs' the placeholder runs alone. The old key geometry_source "
        "is understood: captured is receipt.",
    )
    ban_media_tokens: bool = Field(
        default=True,
        description="Make media tokens unsampleable, in the engine and in the training log-probs alike.",
    )
    measure_logprob_gap: bool = Field(
        default=True,
        description="Embedded run only. Measure the engine-against-trainer log-prob gap on the weights that sampled "
        "each row: one more forward without gradients, over two generations of every prompt.",
    )
    media_roots: list[str] = Field(
        default_factory=list,
        description="Inside NeMo-RL only. Directories that local media must lie in. Empty: the prompts' own files are "
        "read as NeMo-RL reads them, and local files that a tool names are refused.",
    )
    allow_remote: bool = Field(
        default=False,
        description="Inside NeMo-RL only. Whether http(s) media are fetched, never from private addresses.",
    )

    @model_validator(mode="before")
    @classmethod
    def _understand_geometry_source(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or "geometry_source" not in values:
            return values
        values = dict(values)
        source = values.pop("geometry_source")
        evidence = _EVIDENCE_OF_SOURCE.get(source)
        if evidence is None:
            raise ValueError(
                f"grpo.media_alignment.geometry_source: expected 'captured' or 'runs', found {source!r}; "
                "the key is now grpo.media_alignment.evidence: receipt | runs"
            )
        if values.setdefault("evidence", evidence) != evidence:
            raise ValueError(
                f"grpo.media_alignment: geometry_source={source} and evidence={values['evidence']} contradict each "
                "other; keep evidence, geometry_source is its old name"
            )
        logger.info("grpo.media_alignment.geometry_source=%s is read as evidence=%s", source, evidence)
        return values

    @model_validator(mode="after")
    def _prevent_needs_alignment(self) -> "MediaAlignmentConfig":
        if self.prevent and not self.enabled:
            raise ValueError(
                "prevent: true compares what the engine saw with what is trained on, which needs enabled: true"
            )
        return self

    def refuse_keys(self, elsewhere: Mapping[str, str]) -> None:
        """Refuse keys of this block that the side which reads it has elsewhere or not at all.

        Raises:
            ValueError: for the first key of `elsewhere` that is not at its default, with what to do instead.
        """
        for key, instead in elsewhere.items():
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"grpo.media_alignment.{key} has no effect here: {instead}")
