# SPDX-License-Identifier: Apache-2.0
"""Guards against text and ranks: phantom tokens, safe encoding, sampling, loss masks, lockstep, fail fast.

Nothing heavy is imported here; import the module you need.
"""
