# SPDX-License-Identifier: Apache-2.0
"""Keep what a VLM policy trains on equal to what it saw while it generated.

What users call is exported here and loaded when it is first used, so that the import alone stays light: placeholder
runs and patch grids (numpy alone), the alignment of a turn, its verdicts, the provenance key, and the guards.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_rl_ext.align.families.registry import family_of
    from nemo_rl_ext.align.grids import DynamicTiler, Grid
    from nemo_rl_ext.align.items import MediaItem
    from nemo_rl_ext.align.runs import Grammar, PlaceholderRun, RunKind, find_runs
    from nemo_rl_ext.align.turn import AlignedTurn, align_turn, verify_turn
    from nemo_rl_ext.align.verdict import MediaAlignmentError, Reason, TurnReport, Verdict
    from nemo_rl_ext.guards.encode import SafeEncoder
    from nemo_rl_ext.guards.failfast import fail_fast
    from nemo_rl_ext.guards.lockstep import plan_lockstep
    from nemo_rl_ext.guards.masks import LossMaskGuard
    from nemo_rl_ext.guards.phantom import PhantomGuard
    from nemo_rl_ext.guards.sampling import media_token_ban
    from nemo_rl_ext.rollout.provenance import ROLLOUT_MATCHED_MEDIA_KEY

__version__ = "0.1.0"

__all__ = [
    "ROLLOUT_MATCHED_MEDIA_KEY",
    "AlignedTurn",
    "DynamicTiler",
    "Grammar",
    "Grid",
    "LossMaskGuard",
    "MediaAlignmentError",
    "MediaItem",
    "PhantomGuard",
    "PlaceholderRun",
    "Reason",
    "RunKind",
    "SafeEncoder",
    "TurnReport",
    "Verdict",
    "align_turn",
    "fail_fast",
    "family_of",
    "find_runs",
    "media_token_ban",
    "plan_lockstep",
    "verify_turn",
]

_HOMES = {
    "align.families.registry": ("family_of",),
    "align.grids": ("DynamicTiler", "Grid"),
    "align.items": ("MediaItem",),
    "align.runs": ("Grammar", "PlaceholderRun", "RunKind", "find_runs"),
    "align.turn": ("AlignedTurn", "align_turn", "verify_turn"),
    "align.verdict": ("MediaAlignmentError", "Reason", "TurnReport", "Verdict"),
    "guards.encode": ("SafeEncoder",),
    "guards.failfast": ("fail_fast",),
    "guards.lockstep": ("plan_lockstep",),
    "guards.masks": ("LossMaskGuard",),
    "guards.phantom": ("PhantomGuard",),
    "guards.sampling": ("media_token_ban",),
    "rollout.provenance": ("ROLLOUT_MATCHED_MEDIA_KEY",),
}
_HOME_OF = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
