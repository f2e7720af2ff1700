# SPDX-License-Identifier: Apache-2.0
"""What a vLLM server loads to give receipts, by this file's path and as a parser plugin, which registers no parser.

`vllm serve ... --tool-parser-plugin FILE`; NeMo-RL's workers through `policy.generation.vllm_cfg.tool_parser_plugin`.
"""

from nemo_rl_ext.receipts.server import install

install()
