# SPDX-License-Identifier: Apache-2.0
"""What a run did, to look at: a self-contained HTML page, and the offline check of stored rollouts."""
