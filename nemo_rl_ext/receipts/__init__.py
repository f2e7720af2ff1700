# SPDX-License-Identifier: Apache-2.0
"""What the engine itself says of each media item of a request, from vLLM's process to the judgement of a turn."""
