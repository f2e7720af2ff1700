# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL from outside: one flag in a recipe, no edited file.

Nothing here is imported until a recipe sets `grpo.media_alignment.enabled: true`; `probe`, `upstream_contract`,
`settings` and `launch` are the exceptions, and they import neither torch nor Ray nor NeMo-RL.
"""
