"""The conversion of other weight formats to safetensors. It needs torch, so it lies beside
runtime/models/, which does not.

In reading order:

- gguf_to_safetensors.py: a GGUF file as a safetensors folder, for the demo model

May import: torch, transformers and runtime/models/.
"""
