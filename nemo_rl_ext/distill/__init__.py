# SPDX-License-Identifier: Apache-2.0
"""SFT-masked distillation on prompt/response pairs: the loss is taken on the response tokens only."""
