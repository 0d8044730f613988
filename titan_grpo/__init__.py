"""GRPO on torchtitan, with weights synced to vLLM and SGLang servers in the background.

Importing this package loads no torch; see docs/design.md for the rooms.
"""

__version__ = "0.1.0"
