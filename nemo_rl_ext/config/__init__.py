# SPDX-License-Identifier: Apache-2.0
"""Reading YAML and `key=value` overrides, and telling a user which line is wrong."""
